"""Answers at work on GPUs that are not there: what only a GPU would show."""

import contextlib
import io
import linecache
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from dlojz_tp import launch
from dlojz_tp.judging.checking.breakage import ProbeLost, broken
from dlojz_tp.judging.checking.wrong import Wrong, fails
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.works.balise import BaliseNotDone

MIXED = "Expected all tensors to be on the same device"
NO_BACKEND = "No backend type associated with device type cpu"
ELSEWHERE = (MIXED, "indices should be either on", "attempting to assign a gradient", "device type for generator")
WRAPPED = "module parameters {device(type='cpu')}"
WORDS = {  # of waits that PyTorch names otherwise than a program does
    "aten::_local_scalar_dense": "a value is read", "tolist": "values are read", "print": "a tensor is printed",
    "aten::index": "a mask as index, and how many elements come out is a value", "copy to cpu": "a copy to the CPU",
    "an index of the CPU": "an index made on the CPU is copied over",
    "aten::nonzero": "nonzero, and how many elements come out is a value",
    "aten::masked_select": "a mask as index, and how many elements come out is a value",
}  # fmt: skip


def left_on_cpu(slug: str) -> tuple:
    """The signs of a tensor in the CPU's memory where the others are on a GPU, for `known`."""
    return tuple((sign, slug) for sign in (*ELSEWHERE, NO_BACKEND, WRAPPED))


def on_gpus(fn, *args, known, n=2, **more) -> list | None:
    """Call `fn(gpu, *args)` on `n` ranks, each with a pretended GPU of its own: results in rank order.

    known: (sign, slug), as for `on_ranks`; they end in Wrong, unless they are at the edge. None where they are, and
    where it fails without a sign: a pretended GPU is not a GPU, and what goes wrong for another reason than its words
    say is not the answer's fault.
    Errors: ProbeLost where it hangs: nothing is known then; an error of the machine.
    """
    try:
        return on_ranks(_with_gpu, fn, args, {"count": n}, sizes=(n,), known=known, **more)[n]
    except Wrong as wrong:
        return fails(wrong)
    except launch.RankError as error:
        return _says_nothing(error)


def on_one_gpu(fn, *args, count=2, capacity="80 GiB", must=False):
    """What `fn(gpu, device, *args)` returns in a separate process; None where it fails, unless it `must` not.

    device: the last of the machine's `count` GPUs, so that "cuda" alone, which is the first, is a mistake that shows.
    """
    try:
        return on_ranks(_with_gpu, _on_device, (fn, args), {"count": count, "capacity": capacity}, sizes=(1,))[1][0]
    except launch.RankError as error:
        if must:
            raise
        return _says_nothing(error)


def _says_nothing(error: launch.RankError) -> None:
    """A pretended GPU is not a GPU, so an error may be its own; but a probe that hangs has not seen the answer through.

    Errors: ProbeLost, or the error itself where the machine broke.
    """
    if error.kind == "hung":
        raise ProbeLost(f"a probe with a pretended GPU did not end: {error.summary}") from error
    if broken(error, in_answer=True):
        raise error


def on_gpu(call, *tensors) -> list[str]:
    """What goes wrong in `call(*tensors)` on a GPU: a word and its text, or ["", ""].

    "waits": the CPU waits for it. "validates": it does so in torch.distributions, to check arguments, and nowhere else.
    "elsewhere": it fails because tensors are on several devices, or one that it returns is on the CPU.
    """
    seen, left, checks = on_one_gpu(_called, call, tensors) or (Seen(), False, False)
    if left and not any(seen.fault):
        return ["elsewhere", "a result is on cpu"]
    return ["validates", seen.fault[1]] if checks else seen.fault


def _called(gpu, device, call, tensors):
    """What is noted; whether a result is on the CPU; whether nothing waits once distributions check no arguments."""
    moved, found = [tensor.to(device) for tensor in tensors], []
    seen = watched(gpu, lambda: found.append(call(*moved)))
    left = any(isinstance(one, torch.Tensor) and one.is_cpu for one in tree_leaves(found))
    torch.distributions.Distribution.set_default_validate_args(False)
    return seen, left, bool(seen.reads) and not watched(gpu, call, *moved).reads


def _with_gpu(fn, args, machine):
    with pretend_gpu(**machine) as gpu:
        return fn(gpu, *args)


def _on_device(gpu, fn, args):
    return fn(gpu, torch.device("cuda", gpu.count - 1), *args)


class Seen(NamedTuple):
    """What an answer did on a pretended GPU: the machine's notes, and the error that it ended with, in one line."""

    error: str = ""
    waits: list = ()
    copies: list = ()
    races: list = ()
    pinned: list = ()

    @property
    def reads(self) -> list[str]:
        """In words, what made the CPU wait and was no copy to the GPU; or that numpy() was refused."""
        found = [_words(wait) for wait in self.waits if not wait.why.startswith("copy to gpu")]
        return found + ([self.error] if "to numpy" in self.error else [])

    @property
    def fault(self) -> list[str]:
        """A word and its text, as for `on_gpu`."""
        if self.reads:
            return ["waits", ", ".join(dict.fromkeys(self.reads))]
        return ["elsewhere", self.error] if self.misplaced else ["", ""]

    @property
    def unpinned(self) -> list[str]:
        """In words, the copies to the GPU that should not block, and do, for what they copy is not pinned."""
        return [_line(wait, ", in ") for wait in self.waits if wait.why == "copy to gpu, not pinned"]

    @property
    def there(self) -> list:
        """The copies from the CPU."""
        return [copy for copy in self.copies if copy.way == "to gpu"]

    @property
    def misplaced(self) -> bool:
        """Whether it ended because tensors are on several devices."""
        return any(words in self.error for words in ELSEWHERE) or self.other_gpu

    @property
    def other_gpu(self) -> bool:
        """Whether another GPU than the one that was given took part."""
        return "cuda:0" in self.error or any(copy.way == "between gpus" for copy in self.copies)


def watched(gpu, call, *args) -> Seen:
    """Call the answer and hand back what was noted meanwhile; what it prints is not shown once more."""
    for notes in (gpu.waits, gpu.copies, gpu.races, gpu.pinned):
        notes.clear()
    error = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            call(*args)
    except BaliseNotDone:
        raise
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".split("\n")[0]
    return Seen(error, *map(list, (gpu.waits, gpu.copies, gpu.races, gpu.pinned)))


def _words(wait) -> str:
    return f"{WORDS.get(wait.why, wait.why)}{_line(wait, ', in ')}"


def _line(place, before="") -> str:
    """The line of the program, if its text is known."""
    text = linecache.getline(place.file, place.line).strip()
    return f"{before}`{text}`" if text else ""
