"""Balise 5: a sweep that survives a full memory, judged on a made `run` that fills a GPU and keeps a diary."""

import torch

from dlojz_tp import measure
from dlojz_tp.checking import Wrong
from dlojz_tp.launch import stacks
from dlojz_tp.measure.collector import no_collector
from dlojz_tp.probes.gpus import on_one_gpu

HINTS = {
    "no-dictionary": "Return a dictionary {{batch size: record, or None where memory ran out}}.",
    "not-survived": "The out-of-memory error was not caught and ended the sweep. Catch torch.OutOfMemoryError.",
    "swallows-errors": "You treated a {kind} in run() as running out of memory. Catch only torch.OutOfMemoryError, "
                       "or mistakes stay hidden.",
    "stopped-early": "The sweep ended at the first size that did not fit. But the sizes need not be sorted: "
                     "{missing} would have fitted.",
    "not-tried": "Batch size {missing} fits, but you never called run() with it. Only a try shows what a run "
                 "needs; neither the free memory nor another size does. Call run({missing}), and see whether it "
                 "fails.",
    "sizes-missing": "There is no entry for {missing}. A size that did not fit gets None.",
    "failure-not-none": "A size that did not fit must get None. An exception kept in a dictionary keeps its "
                        "tensors alive.",
    "other-record": "A size that did not fit must get None, not the record of another size or anything else.",
    "run-twice": "You ran batch size {size} {n} times. Once is enough: each run takes minutes on a real card.",
    "record-changed": "The dictionary must hold the very record that run() returned.",
    "memory-held": "When the next size started, the tensors of the failed one were still alive. Either something "
                   "still refers to the exception (its traceback holds the frames, and the frames hold the "
                   "tensors), or the next run starts inside the except block.",
    "freed-too-early": "After batch size {size}, you called empty_cache() while the exception still held the "
                       "tensors, so nothing could be freed. The call is inside the except block, or in a `with` or "
                       "`finally` around it, or a variable still refers to the exception. Call it after the "
                       "exception is gone.",
    "cache-not-emptied": "Batch size {size} did not fit, and you did not call torch.cuda.empty_cache() between "
                         "that and {then}: the allocator keeps its fragmented blocks.",
}


MIB = 2**20
LIMIT = 40  # images of 1 MiB that fit
SIZES = [8, 64, 128, 24, 32, 256]  # two failures in a row, and one at the end; not all of them doublings
OTHERS = (
    ValueError("a mistake in the model"),
    RuntimeError("shapes do not match"),
    MemoryError("the CPU's memory is full"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
)


def balise_5(sweep):
    """A made `run` on a GPU with little memory, which tells what stays of its failed calls; no order in the sizes."""
    yield "it survives sizes that do not fit, in any order"
    got, diary, swallowed = on_one_gpu(_swept, sweep, count=1, capacity=(LIMIT + 1) * MIB, must=True)
    calls = [size for size, *_ in diary[:-1]]
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, dict):
        raise Wrong("not-survived" if isinstance(got, torch.OutOfMemoryError) else "no-dictionary", got=str(got)[:200])
    missing = [size for size in SIZES if size not in got]
    if missing:
        early = [size for size in missing if size <= LIMIT and size not in calls]
        words = ", ".join(str(size) for size in early or missing)
        raise Wrong("stopped-early" if early else "sizes-missing", got=str(sorted(got)), missing=words)
    for size in SIZES:
        where = f"batch size {size}"
        if size > LIMIT and got[size] is not None:
            slug = "other-record" if got[size].startswith(("Record(", "the record")) else "failure-not-none"
            raise Wrong(slug, expected="None", got=got[size].split("(")[0], where=where)
        if size <= LIMIT and size not in calls:
            slug = "stopped-early" if sum(called > LIMIT for called in calls) == 1 else "not-tried"
            raise Wrong(slug, got=f"{size}: {got[size]}, and run({size}) was never called", missing=str(size))
        if calls.count(size) > 1:
            raise Wrong("run-twice", size=size, n=calls.count(size))
    yield "nothing of a failed size is alive when the next one starts"
    for (before, *_), (_, held, *_) in zip(diary, diary[1:]):
        if held:
            raise Wrong("memory-held", where=f"batch size {before}")
    for size in SIZES:
        if size <= LIMIT and got[size] != "the record":
            raise Wrong("record-changed", got=got[size], where=f"batch size {size}")
    yield "after a failure the freed memory is given back"
    for (failed, _, _, before), (size, _, kept, emptied) in zip(diary, diary[1:]):
        if failed > LIMIT and kept:
            if emptied > before:
                raise Wrong("freed-too-early", size=failed)
            raise Wrong(
                "cache-not-emptied", size=failed, then=f"the start of batch size {size}" if size else "the return"
            )
    yield "other errors are not mistaken for running out of memory"
    for error in swallowed:
        raise Wrong("swallows-errors", kind=type(error).__name__, where=str(error))


def _swept(gpu, device, sweep):
    """What it returned, or the error that ended it; the diary; which of the other errors it swallowed."""
    run = _Run(gpu)
    with no_collector():
        try:
            got = sweep(run, list(SIZES))
        except torch.OutOfMemoryError as error:
            got = torch.OutOfMemoryError(str(error))
    run.note(0)
    if isinstance(got, dict):
        got = {size: _told(value, run.records.get(size)) for size, value in got.items()}
    swallowed = []
    for error in OTHERS:
        try:
            sweep(_Run(gpu, error), list(SIZES))
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
