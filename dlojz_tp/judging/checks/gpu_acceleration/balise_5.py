"""Balise 5: a sweep that survives a full memory, judged on a made `run` that fills a GPU and keeps a diary."""

import torch

from dlojz_tp import measure
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.probes.gpus import on_one_gpu
from dlojz_tp.launch import stacks
from dlojz_tp.measure.collector import no_collector

MIB = 2**20
LIMIT = 40  # images of 1 MiB that fit
SIZES = [8, 64, 128, 24, 32, 256]  # two failures in a row, and one at the end; not all of them doublings
SORTED = [8, 24, 32, 64]  # here a sweep may end at the first failure
OTHERS = (
    ValueError("a mistake in the model"),
    RuntimeError("shapes do not match"),
    MemoryError("the CPU's memory is full"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
)


def observe(sweep):
    """A sweep without order in the sizes; one with sorted sizes, where that ended at the first failure."""
    found = _sizes(sweep, SIZES)
    yield {"got": found["got"], "early": found["early"]}
    found = _sizes(sweep, SORTED) if found["early"] else found
    yield found | {"got in the end": found["got"]}


def _sizes(sweep, sizes):
    """What a sweep returned; lists of the sizes with which something is wrong, and what."""
    got, diary, swallowed = on_one_gpu(_swept, sweep, sizes, count=1, capacity=(LIMIT + 1) * MIB, must=True)
    there, calls = got if isinstance(got, dict) else {}, [size for size, *_ in diary[:-1]]
    missing = [size for size in sizes if size not in there]
    untried = [size for size in sizes if size <= LIMIT and size not in calls]
    both, starts = [size for size in untried if size in missing], list(zip(diary, diary[1:]))
    ended = not missing and sum(size > LIMIT for size in calls) == 1  # at the first failure: the other sizes got None
    return {
        "got": got, "early": untried[:1] if ended else both, "both": both, "missing": missing, "untried": untried,
        "failed": [(size, there[size]) for size in sizes if size > LIMIT and there.get(size) is not None],
        "twice": [(size, calls.count(size)) for size in sizes if calls.count(size) > 1],
        "held": [before for (before, *_), (_, held, *_) in starts if held],
        "changed": [(size, there.get(size)) for size in sizes if size <= LIMIT and there.get(size) != "the record"],
        "kept": [(failed, size, emptied > before)
                 for (failed, *_, before), (size, _, kept, emptied) in starts if failed > LIMIT and kept],
        "swallowed": swallowed,
    }  # fmt: skip


def _swept(gpu, device, sweep, sizes):
    """What it returned, or the error that ended it; the diary; which of the other errors it swallowed."""
    run = _Run(gpu)
    with no_collector():
        try:
            got = sweep(run, list(sizes))
        except torch.OutOfMemoryError as error:
            got = torch.OutOfMemoryError(str(error))
    run.note(0)
    if isinstance(got, dict):
        got = {size: _told(value, run.records.get(size)) for size, value in got.items()}
    swallowed = []
    for error in OTHERS:
        try:
            sweep(_Run(gpu, error), list(sizes))
        except Exception as raised:
            if not _holds(raised, error):
                raise
        else:
            swallowed.append(error)
    return got if got is None or isinstance(got, dict | Exception) else repr(got), run.diary, swallowed


def _told(value, record):
    return "the record" if record is not None and value is record else None if value is None else repr(value)


def _holds(raised, error):
    """Whether `error` is what was raised, or stands behind it (`raise ... from error`)."""
    return any(one is error for one in stacks.chain(raised))


class _Run:
    """Stands for a training run, and takes a MiB of the GPU's memory for each image.

    diary: at each start, its batch size, bytes in use, bytes kept by the allocator, calls of empty_cache until then.
    """

    def __init__(self, gpu, error=None):
        self.gpu, self.error, self.records, self.diary = gpu, error, {}, []

    def note(self, batch_size):
        emptied = sum("empty_cache" in wait.why for wait in self.gpu.waits)
        self.diary.append((batch_size, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), emptied))

    def __call__(self, batch_size):
        self.note(batch_size)
        weights = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        if self.error:
            raise self.error
        activations = torch.empty(batch_size, MIB, dtype=torch.uint8, device="cuda")
        self.records[batch_size] = measure.Record(
            f"batch size {batch_size}", peak_memory_bytes=[weights.nbytes + activations.nbytes]
        )
        return self.records[batch_size]


def _form(claim, key):
    """The look at what came back."""

    def hint(seen, _):
        return "not-survived" if isinstance(seen, torch.OutOfMemoryError) else "no-dictionary"

    def fields(seen, _):
        return {"got": str(seen)[:200]}

    return Look(claim, key, "a dictionary", hint, holds=lambda seen, _: isinstance(seen, dict), fields=fields)


def _words(sizes, _):
    """Fields of a hint."""
    return {"missing": ", ".join(map(str, sizes)), "expected": "", "got": ""}


def _failed_hint(seen, _):
    return "other-record" if seen[0][1].startswith(("Record(", "the record")) else "failure-not-none"


def _kept_fields(seen, _):
    (size, then, _), *_ = seen
    then = f"the start of batch size {then}" if then else "the return"
    return {"size": size, "then": then, "expected": "", "got": ""}


LOOKS = [
    _form("it survives sizes that do not fit, in any order", "got"),
    Look("", "early", [], "stopped-early", fields=_words),
    _form("", "got in the end"),
    Look("", "both", [], "not-tried", fields=lambda seen, _: _words(seen[:1], _)),
    Look("", "missing", [], "sizes-missing", fields=_words),
    Look("", "failed", [], _failed_hint,
         fields=lambda seen, _: {"expected": "None", "got": seen[0][1].split("(")[0],
         "where": f"batch size {seen[0][0]}"}),
    Look("", "untried", [], "not-tried", fields=lambda seen, _: _words(seen[:1], _)),
    Look("", "twice", [], "run-twice", fields=lambda seen, _: dict(zip(("size", "n"), seen[0]), got="", expected="")),
    Look("nothing of a failed size is alive when the next one starts", "held", [], "memory-held",
         fields=lambda seen, _: {"where": f"batch size {seen[0]}", "expected": "", "got": ""}),
    Look("", "changed", [], "record-changed",
         fields=lambda seen, _: {"where": f"batch size {seen[0][0]}", "expected": "", "got": seen[0][1]}),
    Look("after a failure the freed memory is given back", "kept", [],
         lambda seen, _: "freed-too-early" if seen[0][2] else "cache-not-emptied", fields=_kept_fields),
    Look("other errors are not mistaken for running out of memory", "swallowed", [], "swallows-errors",
         fields=lambda seen, _: {"kind": type(seen[0]).__name__, "where": str(seen[0]), "expected": "", "got": ""}),
]  # fmt: skip


def balise_5(sweep):
    yield from judged(LOOKS, observe, sweep)
