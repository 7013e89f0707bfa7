"""Balise 6: the prefetcher, behind loaders that notice how they are used; its copies on a GPU, which is only pretended."""

import gc
import threading
import weakref
from collections import namedtuple

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.dataloader.loaders import Loader
from dlojz_tp.checks.dataloader.waiting import MOST, PATIENCE, comes, let_rest
from dlojz_tp.pretend_gpu.memory import tag
from dlojz_tp.probes.gpus import on_one_gpu

HINTS = {
    "wrong-batches": "These are not the loader's batches, each once and in the loader's order.",
    "batches-lost": "The last {n} batches never came. When the loader ends, the batches that are ready must still "
                    "be given.",
    "nest-changed": "A nested batch came back as {kind}. Tuples, lists, dictionaries and everything that is not a "
                    "tensor must keep their form.",
    "batches-kept": "{n} batches that the loop has finished with are still held. On a GPU, the whole epoch would "
                    "be in memory.",
    "not-ahead": "While the loop works, nothing is taken from the loader: each batch is fetched only when the loop "
                 "asks for it.",
    "depth-exceeded": "With depth={depth}, {n} batches were taken ahead of the one in use. Each takes memory: let "
                      "the thread wait.",
    "one-too-many": "With depth={depth}, {n} batches are ahead of the one in use: the queue of that size is full, "
                    "and the thread holds one more. Let the thread get a place in the queue before it asks the "
                    "loader.",
    "depth-not-used": "With depth={depth}, only {n} batches were taken ahead, though the loop worked for long. The "
                      "thread may hold more.",
    "error-lost": "The loader raised an error, but the loop ended as if all were well. Send the error to the loop "
                  "and raise it there.",
    "error-early": "The error was raised after {n} batches, but in the loader, {before} batches come before it.",
    "error-changed": "The loader raised a {raised}, but a {kind} arrived. Raise the same error.",
    "loop-hangs": "The loop waited for a batch that never came{after}. Did the thread die silently, or does it "
                  "wait for a place that the loop never gave back?",
    "no-end": "The batches never end: {n} came from a loader that has only a few. Do you call next() on one and "
              "the same iterator, and what does the thread do when next() finds no more?",
    "end-as-error": "next(batches) raises StopIteration at the end of the loader, and inside a generator that "
                    "becomes a RuntimeError. Give it a default: next(batches, ready).",
    "end-hangs": "When the loop is left early, it never ends: it waits for a thread that waits for a place to put "
                 "its batch. Wake the thread before you join it. Once awake, the thread must look at `stop` before "
                 "it takes another batch.",
    "taken-after-end": "After the loop was left, the thread took {n} more batches. Once awake, it must look at "
                       "`stop` before it asks the loader.",
    "thread-left": "{when}, the thread is still running. Stop it and join it in a finally.",
    "second-epoch": "A second loop over the same prefetcher gave {n} of {all} batches. __iter__ must start again "
                    "from the beginning.",
    "started-early": "Batches were taken from the loader before any loop over the prefetcher. Start in __iter__.",
    "still-on-cpu": "A tensor was not copied to the device.",
    "dtype-changed": "A tensor of {expected} arrived on the device as {got}. Change only the device: labels, for "
                     "example, stay whole numbers.",
    "blocking-copy": "This copy makes the processor wait: use non_blocking=True.",
    "same-stream": "The copy was queued in the stream that computes: it waits for the network's work, and the "
                   "network waits for it. Give the copies their own torch.cuda.Stream.",
    "not-waited": "The loop's stream does not wait for the copy: the network would read memory that is not filled "
                  "yet. Call wait_event or wait_stream in the loop. (An event covers only the work queued before "
                  "it was recorded.)",
    "thread-stream": "A stream waits for the copy, but it is not the loop's current stream. In a thread, or in "
                     "__init__, current_stream() may return another one: call it in the loop.",
    "record-stream": "The allocator does not know that the loop's stream uses the tensor: it may hand out the "
                     "memory while the network still reads it. Call tensor.record_stream(current stream).",
    "copied-on-cpu": "On a GPU, a copy waits in spite of non_blocking=True: it does not copy the loader's pinned "
                     "memory, but something made from it. Copy the very tensors that the loader gives.",
    "overwritten": "On a GPU, pinned memory is overwritten while an earlier copy may still read it: the network "
                   "gets parts of two batches. Copy from the loader's own tensors, or wait for the copy before you "
                   "reuse its memory.",
    "processor-waits": "The main thread waited for the device {n} times. Let a stream wait, not the processor.",
}
CPU = torch.device("cpu")
ENDLESS = 1000  # batches: no loader here has a tenth of it
Pair = namedtuple("Pair", "image label")


def balise_6(Prefetcher):  # noqa: N803  (the answer is a class)
    """In order, ahead, with errors, with breaks, again; then copies."""
    before = set(threading.enumerate())
    yield "the loader's batches, in order"
    loader = Loader(7)
    prefetcher = Prefetcher(loader, CPU, 2)
    let_rest()
    if loader.taken:
        raise Wrong("started-early")
    _all_there(_loop(prefetcher), 7)
    _gone(before, "After the loop")
    yield "a second epoch, another depth, a loader of one batch and an empty one"
    again = _loop(prefetcher)
    if len(again) != 7:
        raise Wrong("second-epoch", n=len(again), all=7)
    _all_there(again, 7)
    for n, depth in ((5, 1), (1, 3), (0, 2), (3, 10)):
        _all_there(_loop(Prefetcher(Loader(n), CPU, depth)), n)
    yield "nested batches keep their form"
    _nested(Prefetcher)
    yield "while the loop works, the next batches are taken, never more than depth"
    for depth in (2, 3, 1):
        _ahead(Prefetcher, depth)
    _gone(before, "After the loop")
    _let_go(Prefetcher)
    yield "an error of the loader arrives in its place"
    _errors(Prefetcher)
    _gone(before, "After an error of the loader")
    yield "a loop that breaks or raises leaves no thread"
    for leave in (_broken, _raised):
        _left(leave, Prefetcher)
        _gone(before, "After a loop that was left early")
    _left_while_loading(Prefetcher)
    yield "copies to a GPU: during the computation, waited for, known to the allocator"
    on_one_gpu(_copies, Prefetcher, count=1, must=True)


def _let_go(Prefetcher):  # noqa: N803
    """A batch that the loop is done with is nobody's: the one in use and the one before may be."""
    used, most = [], 0
    for batch in Prefetcher(Loader(8), CPU, 2):
        used.append(weakref.ref(batch[0]))
        most = max(most, sum(one() is not None for one in used))
    if most > 3:
        raise Wrong("batches-kept", n=most - 1)


def _loop(prefetcher, where="", work=None):
    """Go through a prefetcher in a thread of its own, so that one that hangs can be left; its batches, or its error."""
    found, failed = [], []

    def go():
        try:
            for batch in prefetcher:
                found.append(batch)
                if len(found) > ENDLESS:
                    raise Wrong("no-end", n=f"more than {ENDLESS}", where=where.strip())
                if work:
                    work(len(found))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go, daemon=True, name="the loop")
    thread.start()
    if not comes(lambda: not thread.is_alive(), 2 * PATIENCE, 0.02):  # the loop may wait, too
        raise Wrong("loop-hangs", after=where, got=f"{len(found)} batches came")
    if failed:
        if "raised StopIteration" in str(failed[0]):
            raise Wrong("end-as-error", after=where, got=f"{len(found)} batches, then {failed[0]!r}")
        failed[0].batches = len(found)
        raise failed[0]
    return found


def _all_there(found, n):
    wanted = [(torch.full((2, 3), float(k)), torch.tensor([k, k])) for k in range(n)]
    if any(batch is None for batch in found):
        raise Wrong("nothing-returned")
    if close([tuple(batch) if isinstance(batch, list) else batch for batch in found], wanted):
        return
    first = [int(batch[1][0]) if isinstance(batch, tuple | list) and len(batch) == 2 else batch for batch in found]
    if len(first) < n and first == list(range(len(first))):
        raise Wrong("batches-lost", expected=f"{n} batches", got=f"{len(first)} batches", n=n - len(first))
    raise Wrong("wrong-batches", expected=str(list(range(n))), got=str(first))


def _nested(Prefetcher):  # noqa: N803
    batch = {"image": torch.ones(2), "more": [torch.zeros(1), (torch.ones(3), "name", None)], "n": 7}
    kinds = [batch, Pair(torch.ones(2), torch.zeros(1)), [torch.ones(1), torch.zeros(2)], torch.arange(3), "text only"]
    found = _loop(Prefetcher(Loader(len(kinds), make=lambda k: kinds[k]), CPU, 2))
    for wanted, got in zip(kinds, found, strict=False):
        if not _alike(wanted, got):
            raise Wrong("nest-changed", expected=str(wanted), got=str(got), kind=f"a {type(got).__name__}")
    if len(found) != len(kinds):
        raise Wrong("batches-lost", n=len(kinds) - len(found))


def _alike(wanted, got):
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and close(got, wanted)
    if isinstance(wanted, dict):
        return isinstance(got, dict) and wanted.keys() == got.keys() and all(_alike(wanted[k], got[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        same = type(got) is type(wanted) or (isinstance(wanted, Pair) and isinstance(got, tuple))
        return same and len(got) == len(wanted) and all(map(_alike, wanted, got))
    return got == wanted


def _ahead(Prefetcher, depth):  # noqa: N803
    """The loop works on batch 2 until `depth` more are taken, then a little longer: none may follow."""
    loader, ahead = Loader(20), []

    def work(n):
        if n != 3:
            return
        comes(lambda: loader.taken >= n + depth)
        let_rest()
        ahead.append(loader.taken - n)

    _loop(Prefetcher(loader, CPU, depth), work=work)
    n = ahead[0] if ahead else 0
    if n <= 0:
        raise Wrong("not-ahead")
    if n > depth:
        raise Wrong("one-too-many" if n == depth + 1 else "depth-exceeded", depth=depth, n=n)
    if n < depth:
        raise Wrong("depth-not-used", depth=depth, n=n)


class _OwnError(Exception):
    """An error that only this check raises."""


def _errors(Prefetcher):  # noqa: N803
    for error, at in (
        (_OwnError("file 17 is damaged"), 3),
        (_OwnError("the first file is damaged"), 0),
        (KeyError("x"), 6),
    ):
        try:
            found = _loop(Prefetcher(Loader(7, error, at), CPU, 2), where=f" after an error in place of batch {at}")
        except Wrong:
            raise
        except BaseException as raised:
            if type(raised) is not type(error):
                raise Wrong(
                    "error-changed", raised=type(error).__name__, got=repr(raised), kind=type(raised).__name__
                ) from raised
            if raised.batches != at:
                raise Wrong("error-early", n=raised.batches, before=at) from raised
        else:
            raise Wrong("error-lost", got=f"{len(found)} batches")


def _broken(Prefetcher):  # noqa: N803
    loader = Loader(50)
    for _ in Prefetcher(loader, CPU, 2):
        let_rest()  # until the thread waits for a place
        taken = loader.taken
        break
    gc.collect(1)
    let_rest()
    if loader.taken > taken:
        raise Wrong("taken-after-end", n=loader.taken - taken)


def _raised(Prefetcher):  # noqa: N803
    try:
        for k, _ in enumerate(Prefetcher(Loader(50), CPU, 2)):
            if k == 2:
                let_rest()
                raise _OwnError
    except _OwnError:
        pass


def _left_while_loading(Prefetcher):  # noqa: N803
    """The loader makes batch 1 as long as the check wants it: the end of the loop has to wait for that thread."""
    asked, finish = threading.Event(), threading.Event()

    def make(k):
        if k == 1:
            asked.set()
            finish.wait(MOST)
        return torch.tensor([k])

    def leave(Prefetcher):  # noqa: N803
        for _ in Prefetcher(Loader(5, make=make), CPU, 2):
            asked.wait(MOST)
            break
        gc.collect(1)  # the iterator is young: one in a cycle of references ends here

    def meanwhile(loop):
        early = asked.wait(MOST) and comes(lambda: not loop.is_alive(), 0.02, 0.005)
        finish.set()
        if early:
            raise Wrong("thread-left", when="After a loop that was left while the loader was making a batch")

    _left(leave, Prefetcher, meanwhile)


def _left(leave, Prefetcher, meanwhile=lambda loop: None):  # noqa: N803
    """Leave a loop early, in a thread of its own: one that waits for ever is left behind."""
    failed = []

    def go():
        try:
            leave(Prefetcher)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go, daemon=True, name="the loop")
    thread.start()
    meanwhile(thread)
    if not comes(lambda: not thread.is_alive(), PATIENCE, 0.02):
        raise Wrong("end-hangs")
    if failed:
        raise failed[0]


def _gone(before, when):
    def gone():
        return not set(threading.enumerate()) - before

    if comes(gone, PATIENCE / 10):
        return
    gc.collect()  # an iterator in a cycle of references ends when it is found; only now, for it takes a while
    if not comes(gone, PATIENCE / 3):
        raise Wrong("thread-left", when=when)


class _OfMainThread(list):
    """Takes what the main thread notes, and no other."""

    def append(self, note):
        if threading.current_thread() is threading.main_thread():
            super().append(note)


def _copies(gpu, device, Prefetcher):  # noqa: N803
    """Six batches; the loop computes in a stream that is not the default one, as CUDA graphs and others do."""
    n, gpu.waits = 6, _OfMainThread()

    def make(k):
        return {
            "image": torch.full((2, 2), float(k)).pin_memory(), "rest": (torch.tensor([k]).pin_memory(), "id"),
        }  # fmt: skip

    earlier, compute = torch.cuda.Stream(), torch.cuda.Stream()
    others = (earlier, torch.cuda.default_stream())
    used, copied, queued = [], [], []
    with torch.cuda.stream(earlier):  # it is made where another stream is current
        prefetcher = Prefetcher(Loader(n, make=make), device, 2)
    with torch.cuda.stream(compute):
        for batch in prefetcher:
            for tensor in (batch["image"], batch["rest"][0]):
                if not tensor.is_cuda:
                    raise Wrong("still-on-cpu", got=f"{tensor.device}")
                due = torch.float32 if tensor is batch["image"] else torch.int64
                if tensor.dtype != due:
                    raise Wrong("dtype-changed", expected=due, got=tensor.dtype)
                if any(not copy.non_blocking for copy in gpu.copies):
                    raise Wrong("blocking-copy")
                side, number = tag(tensor).written
                if side in (compute, *others):
                    raise Wrong("same-stream")
                races = len(gpu.races)
                used.append(tensor * 1)
                if any("on the CPU" in race.what for race in gpu.races):
                    raise Wrong("overwritten")
                if any("freed" not in race.what for race in gpu.races[races:]):
                    waited = any(stream.after.get(side, 0) >= number for stream in others)
                    raise Wrong("thread-stream" if waited else "not-waited")
                copied.append((side, compute in tag(tensor).kept))
            queued.append(compute.after[compute])
    if not all(copy.pinned for copy in gpu.copies):
        raise Wrong("copied-on-cpu")
    if gpu.waits:
        raise Wrong("processor-waits", n=len(gpu.waits))
    values = [int(tensor) for tensor in used[1::2]]
    if values != list(range(n)):
        raise Wrong("wrong-batches", expected=str(list(range(n))), got=str(values))
    # the other way: the copying stream waits for the computing one before it fills memory again
    turned = all(side.after.get(compute, 0) >= queued[n - 4] for side, _ in copied)
    if not turned and not all(recorded for _, recorded in copied):
        raise Wrong("record-stream")
