"""Balise 6: the prefetcher, around loaders that notice how they are used; its copies on a GPU are only pretended."""

import gc
import threading
import weakref
from collections import namedtuple

import torch

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, same, silent
from dlojz_tp.judging.checks.dataloader.loaders import Loader
from dlojz_tp.judging.checks.dataloader.waiting import MOST, PATIENCE, comes, let_rest
from dlojz_tp.judging.pretend_gpu.memory import tag
from dlojz_tp.judging.probes.gpus import on_one_gpu

CPU = torch.device("cpu")
ENDLESS = 1000  # batches: no loader here has a tenth of it
OTHERS = (5, 1), (1, 3), (0, 2), (3, 10)  # batches of further loaders, and the depth
DEPTHS = 2, 3, 1
Pair = namedtuple("Pair", "image label")
NESTS = (
    {"image": torch.ones(2), "more": [torch.zeros(1), (torch.ones(3), "name", None)], "n": 7},
    Pair(torch.ones(2), torch.zeros(1)), [torch.ones(1), torch.zeros(2)], torch.arange(3), "text only",
)  # fmt: skip


class _OwnError(Exception):
    """An error that only this check raises."""


# batch: the error in its place
ERRORS = {3: (_OwnError, "file 17 is damaged"), 0: (_OwnError, "the first file is damaged"), 6: (KeyError, "x")}


def observe(Prefetcher):  # noqa: N803  (the answer is a class)
    """In order, ahead, with errors, with breaks, again; then copies."""
    before = set(threading.enumerate())
    loader = Loader(7)
    prefetcher = Prefetcher(loader, CPU, 2)
    let_rest()
    yield {"early": loader.taken}
    yield {"batches": _numbers(_loop(prefetcher))}
    yield {"loop": _gone(before)}
    yield {"again": _numbers(_loop(prefetcher))}
    for n, depth in OTHERS:
        yield {(n, depth): _numbers(_loop(Prefetcher(Loader(n), CPU, depth)))}
    found = _loop(Prefetcher(Loader(len(NESTS), make=lambda k: NESTS[k]), CPU, 2))
    yield {"changed": [pair for pair in zip(NESTS, found) if not _alike(*pair)], "lost": len(NESTS) - len(found)}
    for depth in DEPTHS:
        yield {("ahead", depth): _ahead(Prefetcher, depth)}
    yield {"more loops": _gone(before)}
    yield {"held": _held(Prefetcher)}
    for at in ERRORS:
        yield {("error", at): _error(Prefetcher, at)}
    yield {"error": _gone(before)}
    yield {"taken": _leave(_broken, Prefetcher)}
    yield {"break": _gone(before)}
    _leave(_raised, Prefetcher)
    yield {"raise": _gone(before)}
    yield {"loading": _waits_for_loader(Prefetcher)}
    yield on_one_gpu(_copies, Prefetcher, count=1, must=True)


def _aside(go, patience, hangs, meanwhile=lambda loop: None):
    """What go() returns or raises, in a thread of its own, so that one that hangs can be left: then hangs() is raised."""
    done, failed = [], []

    def run():
        try:
            done.append(go())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="the loop")
    thread.start()
    meanwhile(thread)
    if not comes(lambda: not thread.is_alive(), patience, 0.02):
        raise hangs()
    if failed:
        raise failed[0]
    return done[0]


def _loop(prefetcher, where="", work=None):
    """Go through a prefetcher; its batches, or its error."""
    found = []

    def go():
        for batch in prefetcher:
            found.append(batch)
            if len(found) > ENDLESS:
                raise Wrong("no-end", n=f"more than {ENDLESS}", where=where.strip())
            if work:
                work(len(found))

    try:  # the loop may wait, too
        _aside(go, 2 * PATIENCE, lambda: Wrong("loop-hangs", after=where, got=f"{len(found)} batches came"))
    except BaseException as error:
        if "raised StopIteration" in str(error):
            raise Wrong("end-as-error", after=where, got=f"{len(found)} batches, then {error!r}") from error
        error.batches = len(found)
        raise
    return found


def _numbers(found):
    """Which of the loader's batches they are; what is none of them, as it is."""
    make = Loader(0).make
    return [next((k for k in range(7) if close(batch, make(k))), batch) for batch in found]


def _alike(wanted, got):
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and close(got, wanted)
    if isinstance(wanted, dict):
        return isinstance(got, dict) and wanted.keys() == got.keys() and all(_alike(wanted[k], got[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        kind = type(got) is type(wanted) or (isinstance(wanted, Pair) and isinstance(got, tuple))
        return kind and len(got) == len(wanted) and all(map(_alike, wanted, got))
    return got == wanted


def _ahead(Prefetcher, depth):  # noqa: N803
    """The loop works on batch 2 until `depth` more are taken, then a little longer: how many are taken by then."""
    loader, ahead = Loader(20), []

    def work(n):
        if n != 3:
            return
        comes(lambda: loader.taken >= n + depth)
        let_rest()
        ahead.append(loader.taken - n)

    _loop(Prefetcher(loader, CPU, depth), work=work)
    return ahead[0] if ahead else 0


def _held(Prefetcher):  # noqa: N803
    """How many batches that it has given are alive at once: the one in use and the one before may be."""
    used, most = [], 0
    for batch in Prefetcher(Loader(8), CPU, 2):
        used.append(weakref.ref(batch[0]))
        most = max(most, sum(one() is not None for one in used))
    return most


def _error(Prefetcher, at):  # noqa: N803
    """What arrives of an error of the loader: its type, "" if none does, and the number of batches before."""
    kind, text = ERRORS[at]
    try:
        found = _loop(Prefetcher(Loader(7, kind(text), at), CPU, 2), where=f" after an error in place of batch {at}")
    except Wrong:
        raise
    except BaseException as raised:
        return type(raised).__name__, raised.batches
    return "", len(found)


def _leave(leave, Prefetcher, meanwhile=lambda loop: None):  # noqa: N803
    """Leave a loop early."""
    return _aside(lambda: leave(Prefetcher), PATIENCE, lambda: Wrong("end-hangs"), meanwhile)


def _broken(Prefetcher):  # noqa: N803
    loader = Loader(50)
    for _ in Prefetcher(loader, CPU, 2):
        let_rest()  # until the thread waits for a place
        taken = loader.taken
        break
    gc.collect(1)
    let_rest()
    return loader.taken - taken


def _raised(Prefetcher):  # noqa: N803
    try:
        for k, _ in enumerate(Prefetcher(Loader(50), CPU, 2)):
            if k == 2:
                let_rest()
                raise _OwnError
    except _OwnError:
        pass


def _waits_for_loader(Prefetcher):  # noqa: N803
    """The loader makes batch 1 as long as the check wants it: the end of the loop has to wait for that thread."""
    asked, finish, early = threading.Event(), threading.Event(), []

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
        early.append(asked.wait(MOST) and comes(lambda: not loop.is_alive(), 0.02, 0.005))
        finish.set()

    _leave(leave, Prefetcher, meanwhile)
    return not early[0]


def _gone(before):
    """Whether the threads have ended that were not there before."""

    def gone():
        return not set(threading.enumerate()) - before

    if comes(gone, PATIENCE / 10):
        return True
    gc.collect()  # an iterator in a cycle of references ends when it is found; only now, for it takes a while
    return comes(gone, PATIENCE / 3)


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
    used, copied, queued, recast, unwaited = [], [], [], [], []
    with torch.cuda.stream(earlier):  # it is made where another stream is current
        prefetcher = Prefetcher(Loader(n, make=make), device, 2)
    with torch.cuda.stream(compute):
        for batch in prefetcher:
            for tensor, dtype in ((batch["image"], torch.float32), (batch["rest"][0], torch.int64)):
                if not tensor.is_cuda:
                    return {"device": tensor.device.type}
                recast += [] if tensor.dtype == dtype else [(dtype, tensor.dtype)]
                side, number = tag(tensor).written
                races = len(gpu.races)
                used.append(tensor * 1)
                if any("freed" not in race.what for race in gpu.races[races:]):
                    unwaited.append(any(stream.after.get(side, 0) >= number for stream in others))
                copied.append((side, compute in tag(tensor).kept))
            queued.append(compute.after[compute])
    # the other way: the copying stream waits for the computing one before it fills memory again
    turned = len(queued) == n and all(side.after.get(compute, 0) >= queued[n - 4] for side, _ in copied)
    return {
        "device": "cuda", "recast": recast, "unwaited": unwaited,
        "blocking": any(not copy.non_blocking for copy in gpu.copies),
        "one stream": any(side in (compute, *others) for side, _ in copied),
        "overwritten": any("on the CPU" in race.what for race in gpu.races),
        "pinned": all(copy.pinned for copy in gpu.copies),
        "waits": len(gpu.waits),
        "recorded": turned or all(recorded for _, recorded in copied),
        "labels": [int(tensor) for tensor in used[1::2]],
    }  # fmt: skip


def _batches(key, n, claim=""):
    """A look at whether these are the loader's batches."""

    def hint(seen, due):
        if key == "again" and len(seen) != n:
            return "second-epoch"
        return "batches-lost" if len(seen) < n and same(seen, due[: len(seen)]) else "wrong-batches"

    def fields(seen, _):
        return {"n": len(seen) if key == "again" else n - len(seen), "all": n}

    return Look(claim, key, [*range(n)], hint, fields=fields)


def _ended(key, when):
    return Look("", key, True, "thread-left", fields={"when": when})


def _changed(seen, _):
    due, got = seen[0]
    return {"expected": str(due), "got": str(got), "kind": f"a {type(got).__name__}"}


def _of_ahead(n, depth):
    if n < depth:
        return "depth-not-used" if n > 0 else "not-ahead"
    return "one-too-many" if n == depth + 1 else "depth-exceeded"


def _of_error(seen, due):
    if not seen[0]:
        return "error-lost"
    return "error-early" if seen[0] == due[0] else "error-changed"


def _about_error(seen, due):
    return silent(seen, due) | {"raised": due[0], "kind": seen[0], "n": seen[1], "before": due[1]}


def _count(seen, due):
    return silent(seen, due) | {"n": seen}


LOOKS = [
    Look("the loader's batches, in order", "early", 0, "started-early"),
    _batches("batches", 7),
    _ended("loop", "After the loop"),
    _batches("again", 7, "a second epoch, another depth, a loader of one batch and an empty one"),
    *(_batches((n, depth), n) for n, depth in OTHERS),
    Look("nested batches keep their form", "changed", [], "nest-changed", fields=_changed),
    Look("", "lost", 0, "batches-lost", fields=_count),
    *(Look("while the loop works, the next batches are taken, never more than depth" * (depth == DEPTHS[0]),
           ("ahead", depth), depth, _of_ahead, fields=lambda n, depth: {"depth": depth, "n": n}) for depth in DEPTHS),
    _ended("more loops", "After the loop"),
    Look("", "held", 3, "batches-kept", holds=at_most, fields=lambda seen, due: _count(seen - 1, due)),
    *(Look("an error of the loader arrives in its place" * (at == 3), ("error", at), (kind.__name__, at),
           _of_error, fields=_about_error) for at, (kind, _) in ERRORS.items()),
    _ended("error", "After an error of the loader"),
    Look("a loop that breaks or raises leaves no thread", "taken", 0, "taken-after-end", fields=_count),
    _ended("break", "After a loop that was left early"),
    _ended("raise", "After a loop that was left early"),
    _ended("loading", "After a loop that was left while the loader was making a batch"),
    Look("copies to a GPU: during the computation, waited for, known to the allocator", "device", "cuda",
         "still-on-cpu"),
    Look("", "recast", [], "dtype-changed", fields=lambda seen, _: dict(zip(("expected", "got"), seen[0]))),
    Look("", "blocking", False, "blocking-copy"),
    Look("", "one stream", False, "same-stream"),
    Look("", "overwritten", False, "overwritten"),
    Look("", "unwaited", [], lambda seen, _: "thread-stream" if seen[0] else "not-waited", fields=silent),
    Look("", "pinned", True, "copied-on-cpu"),
    Look("", "waits", 0, "processor-waits", fields=_count),
    Look("", "labels", [*range(6)], "wrong-batches"),
    Look("", "recorded", True, "record-stream"),
]  # fmt: skip


def balise_6(Prefetcher):  # noqa: N803
    yield from judged(LOOKS, observe, Prefetcher)
