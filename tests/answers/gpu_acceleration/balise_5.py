"""Answers to balise 5 of 01_gpu_acceleration: a sweep that survives a full memory."""

import contextlib
import gc

import torch
from torch.cuda import empty_cache, mem_get_info

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 5)


@bank.right()
def sweep(run, batch_sizes):
    def attempt(size):
        try:
            return run(size)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return None

    found = {}
    for size in batch_sizes:
        found[size] = attempt(size)
        gc.collect()
        torch.cuda.empty_cache()
    return found


@bank.right()
def sweep(run, batch_sizes):
    """Sorted, and what is larger than a size that failed is not tried."""
    found, full = {}, False
    for size in sorted(batch_sizes):
        found[size] = None
        if full:
            torch.cuda.empty_cache()
            continue
        try:
            found[size] = run(size)
        except torch.cuda.OutOfMemoryError:
            full = True
        if full and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
    return {size: found[size] for size in batch_sizes}


@bank.right()
def sweep(run, batch_sizes):
    """Functions imported by name; what is free is looked at."""
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
        finally:
            empty_cache()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            print(mem_get_info(), torch.cuda.memory_allocated(), torch.cuda.memory_summary())
            torch.cuda.reset_peak_memory_stats()
    return found


@bank.right()
def sweep(run, batch_sizes):
    """Other errors come through in words of its own."""
    found = {}
    for size in batch_sizes:
        torch.cuda.memory.empty_cache()
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
        except Exception as error:
            raise RuntimeError(f"batch size {size} failed") from error
    torch.cuda.memory.empty_cache()
    return found


bank.hint("cache-not-emptied", "Batch size {size} did not fit, and you did not call torch.cuda.empty_cache() "
          "between that and {then}: the allocator keeps its fragmented blocks.")  # fmt: skip


@bank.wrong("cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
            torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong("cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        torch.cuda.empty_cache()  # and not after the last
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong("cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
    for _ in batch_sizes:
        torch.cuda.empty_cache()
    return found


bank.hint("freed-too-early", "After batch size {size}, you called empty_cache() while the exception still held the "
          "tensors, so nothing could be freed. The call is inside the except block, or in a `with` or `finally` "
          "around it, or a variable still refers to the exception. Call it after the exception is gone.")  # fmt: skip


@bank.wrong("freed-too-early")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
            torch.cuda.empty_cache()
        else:
            torch.cuda.empty_cache()
    return found


bank.hint("swallows-errors", "You treated a {kind} in run() as running out of memory. Catch only "
          "torch.OutOfMemoryError, or mistakes stay hidden.", edge=True)  # fmt: skip


@bank.wrong("swallows-errors")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except RuntimeError as error:
            if "CUDA" not in str(error):
                raise
            found[size] = None
        torch.cuda.empty_cache()
    return found


def skipping(free):
    def sweep(run, batch_sizes):
        """What is free does not tell what a run needs."""
        found = {}
        for size in batch_sizes:
            found[size] = None
            if torch.cuda.is_available() and size * 2**21 > free():
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                found[size] = run(size)
            torch.cuda.empty_cache()
        return found

    return sweep


bank.hint("not-tried", "Batch size {missing} fits, but you never called run() with it. Only a try shows what a run "
          "needs; neither the free memory nor another size does. Call run({missing}), and see whether "
          "it fails.")  # fmt: skip


@bank.wrong("not-tried")
def sweep(run, batch_sizes):
    """All doublings in between, not the sizes that were asked for."""
    found, size = dict.fromkeys(batch_sizes), min(batch_sizes)
    while size <= max(batch_sizes):
        with contextlib.suppress(torch.OutOfMemoryError):
            found[size] = run(size)
        torch.cuda.empty_cache()
        size *= 2
    return found


bank.wrong("not-tried")(skipping(lambda: torch.cuda.mem_get_info()[0]))

bank.wrong("not-tried", variant=True)(skipping(lambda: torch.cuda.get_device_properties(0).total_memory))


bank.hint("sizes-missing", "There is no entry for {missing}. A size that did not fit gets None.")


@bank.wrong("sizes-missing")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[str(size)] = run(size)
        except torch.OutOfMemoryError:
            found[str(size)] = None
        torch.cuda.empty_cache()
    return found


bank.hint("not-survived", "The out-of-memory error was not caught and ended the sweep. Catch torch.OutOfMemoryError.")


@bank.wrong("not-survived")
def sweep(run, batch_sizes):
    return {size: run(size) for size in batch_sizes}


@bank.wrong("not-survived", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except MemoryError:
            found[size] = None
    return found


@bank.wrong("swallows-errors")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except Exception:
            found[size] = None
        torch.cuda.empty_cache()
    return found


@bank.wrong("swallows-errors")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except RuntimeError:
            found[size] = None
        torch.cuda.empty_cache()
    return found


bank.hint("stopped-early", "The sweep ended at the first size that did not fit. But the sizes need not be sorted: "
          "{missing} would have fitted.", edge=True)  # fmt: skip


@bank.wrong("stopped-early")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
            break
    torch.cuda.empty_cache()
    return found


@bank.wrong("sizes-missing", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()
    return found


bank.hint("failure-not-none", "A size that did not fit must get None. An exception kept in a dictionary keeps its "
          "tensors alive.")  # fmt: skip


@bank.wrong("failure-not-none")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError as error:
            found[size] = error
        torch.cuda.empty_cache()
    return found


@bank.wrong("failure-not-none", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = "out of memory"
        torch.cuda.empty_cache()
    return found


bank.hint("other-record", "A size that did not fit must get None, not the record of another size or anything else.")


@bank.wrong("other-record", variant=True)
def sweep(run, batch_sizes):
    """What did not fit is tried with half of it."""
    found = {}
    for size in batch_sizes:
        record, fits = None, size
        while record is None and fits:
            try:
                record = run(fits)
            except torch.OutOfMemoryError:
                fits //= 2
            torch.cuda.empty_cache()
        found[size] = record
    return found


bank.hint("run-twice", "You ran batch size {size} {n} times. Once is enough: each run takes minutes on a real card.")


@bank.wrong("run-twice", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            run(size)  # to warm up
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
        torch.cuda.empty_cache()
    return found


bank.hint("record-changed", "The dictionary must hold the very record that run() returned.")


@bank.wrong("record-changed", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size).peak_memory_bytes[0]
        except torch.OutOfMemoryError:
            found[size] = None
        torch.cuda.empty_cache()
    return found


bank.hint("no-dictionary", "Return a dictionary {{batch size: record, or None where memory ran out}}.")


@bank.wrong("no-dictionary", variant=True)
def sweep(run, batch_sizes):
    found = []
    for size in batch_sizes:
        try:
            found.append(run(size))
        except torch.OutOfMemoryError:
            found.append(None)
        torch.cuda.empty_cache()
    return found


bank.hint("memory-held", "When the next size started, the tensors of the failed one were still alive. Either "
          "something still refers to the exception (its traceback holds the frames, and the frames hold the "
          "tensors), or the next run starts inside the except block.")  # fmt: skip


@bank.wrong("memory-held")
def sweep(run, batch_sizes):
    found, errors = {}, []
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError as error:
            found[size] = None
            errors.append(error)
        torch.cuda.empty_cache()
    return found


@bank.wrong("memory-held", variant=True)
def sweep(run, batch_sizes):
    if not batch_sizes:
        return {}
    size, *rest = batch_sizes
    try:
        record = run(size)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {size: None, **sweep_inside(run, rest)}
    return {size: record, **sweep_inside(run, rest)}


def sweep_inside(run, batch_sizes):
    found = {}
    for i, size in enumerate(batch_sizes):
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            return {**found, size: None, **sweep_inside(run, batch_sizes[i + 1 :])}
    return found


@bank.wrong("freed-too-early", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
            gc.collect()
            torch.cuda.empty_cache()
    return found


@bank.wrong("cache-not-emptied", variant=True)
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong("nothing-returned")
def sweep(run, batch_sizes):
    for size in batch_sizes:
        try:
            print(run(size))
        except torch.OutOfMemoryError:
            print("out of memory")
        torch.cuda.empty_cache()


@bank.wrong("stopped-early", variant=True)
def sweep(run, batch_sizes):
    """After the first failure, in the order given, nothing is run: all that follows gets None."""
    found, full = dict.fromkeys(batch_sizes), False
    for size in batch_sizes:
        try:
            found[size] = None if full else run(size)
        except torch.OutOfMemoryError:
            full = True
        torch.cuda.empty_cache()
    return found


bank.text(
    "swallows-errors",
    """
def sweep(run, batch_sizes):
    def attempt(b):
        try:
            return run(b)
        except (torch.OutOfMemoryError, MemoryError):
            return None
    records = {}
    for b in batch_sizes:
        records[b] = attempt(b)
        if records[b] is None:
            torch.cuda.empty_cache()
    return records
""",
    variant=True,
)
