"""Answers to balises 5 and 6 of 01_gpu_acceleration."""

import contextlib
import gc
import math

import numpy as np
import torch
from torch.cuda import empty_cache, mem_get_info

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration")

# ---------------------------------------------------------------- balise 5


@bank.right(5)
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


@bank.right(5)
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


@bank.right(5)
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


@bank.right(5)
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


@bank.wrong(5, "cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
            torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong(5, "cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        torch.cuda.empty_cache()  # and not after the last
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong(5, "cache-not-emptied")
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


@bank.wrong(5, "freed-too-early")
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


@bank.wrong(5, "swallows-errors")
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


@bank.wrong(5, "not-tried")
def sweep(run, batch_sizes):
    """All doublings in between, not the sizes that were asked for."""
    found, size = dict.fromkeys(batch_sizes), min(batch_sizes)
    while size <= max(batch_sizes):
        with contextlib.suppress(torch.OutOfMemoryError):
            found[size] = run(size)
        torch.cuda.empty_cache()
        size *= 2
    return found


bank.wrong(5, "not-tried")(skipping(lambda: torch.cuda.mem_get_info()[0]))
bank.wrong(5, "not-tried", variant=True)(skipping(lambda: torch.cuda.get_device_properties(0).total_memory))


@bank.wrong(5, "sizes-missing")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[str(size)] = run(size)
        except torch.OutOfMemoryError:
            found[str(size)] = None
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "not-survived")
def sweep(run, batch_sizes):
    return {size: run(size) for size in batch_sizes}


@bank.wrong(5, "not-survived")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except MemoryError:
            found[size] = None
    return found


@bank.wrong(5, "swallows-errors")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except Exception:
            found[size] = None
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "swallows-errors")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except RuntimeError:
            found[size] = None
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "stopped-early")
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


@bank.wrong(5, "sizes-missing")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "failure-not-none")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError as error:
            found[size] = error
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "failure-not-none")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = "out of memory"
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "other-record")
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


@bank.wrong(5, "run-twice")
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


@bank.wrong(5, "record-changed")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size).peak_memory_bytes[0]
        except torch.OutOfMemoryError:
            found[size] = None
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "no-dictionary")
def sweep(run, batch_sizes):
    found = []
    for size in batch_sizes:
        try:
            found.append(run(size))
        except torch.OutOfMemoryError:
            found.append(None)
        torch.cuda.empty_cache()
    return found


@bank.wrong(5, "memory-held")
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


@bank.wrong(5, "memory-held")
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


@bank.wrong(5, "freed-too-early")
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


@bank.wrong(5, "cache-not-emptied")
def sweep(run, batch_sizes):
    found = {}
    for size in batch_sizes:
        try:
            found[size] = run(size)
        except torch.OutOfMemoryError:
            found[size] = None
    return found


@bank.wrong(5, "nothing-returned")
def sweep(run, batch_sizes):
    for size in batch_sizes:
        try:
            print(run(size))
        except torch.OutOfMemoryError:
            print("out of memory")
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- balise 6


def fitting(peaks):
    return {b: peak for b, peak in peaks.items() if peak is not None}


def line(peaks):
    peaks = fitting(peaks)
    slope, start = np.polyfit(list(peaks), list(peaks.values()), 1)
    return float(start), float(slope)


@bank.right(6)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    # polyfit is right to about nine digits: a hair of a byte must not cost an image
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.right(6)
def memory_model(peaks, capacity):
    sizes = torch.tensor([[1.0, b] for b, p in peaks.items() if p is not None], dtype=torch.float64)
    values = torch.tensor([[float(p)] for p in peaks.values() if p is not None], dtype=torch.float64)
    model, image = torch.linalg.lstsq(sizes, values).solution.flatten().tolist()
    return [model, image, max(0, math.floor((capacity - model) / image + 1e-9))]


@bank.right(6)
def memory_model(peaks, capacity):
    """A line through the first and the last size: fine where the sizes are far apart."""
    known = sorted(fitting(peaks).items())
    (b0, p0), (b1, p1) = known[0], known[-1]
    if len(known) > 5:
        return memory_model_of_all(peaks, capacity)
    image = (p1 - p0) / (b1 - b0)
    return p0 - b0 * image, image, max(0, int((capacity - p0 + b0 * image) // image))


def memory_model_of_all(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.wrong(6, "not-three")
def memory_model(peaks, capacity):
    return line(peaks)


@bank.wrong(6, "nothing-returned")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    print(model, image, (capacity - model) // image)


@bank.wrong(6, "swapped")
def memory_model(peaks, capacity):
    peaks = fitting(peaks)
    model, image = np.polyfit(list(peaks), list(peaks.values()), 1)
    return model, image, int((capacity - model) // image)


@bank.wrong(6, "no-fixed-part")
def memory_model(peaks, capacity):
    peaks = fitting(peaks)
    image = sum(peak / b for b, peak in peaks.items()) / len(peaks)
    return 0.0, image, int(capacity // image)


@bank.wrong(6, "no-fixed-part")
def memory_model(peaks, capacity):
    largest = max(fitting(peaks))
    image = peaks[largest] / largest
    return 0.0, image, int(capacity // image)


@bank.wrong(6, "two-points")
def memory_model(peaks, capacity):
    (b0, p0), (b1, p1) = sorted(fitting(peaks).items())[:2]
    image = (p1 - p0) / (b1 - b0)
    model = p0 - b0 * image
    return model, image, max(0, int((capacity - model) // image))


@bank.wrong(6, "failed-counted")
def memory_model(peaks, capacity):
    image, model = np.polyfit(list(peaks), list(peaks.values()), 1)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.wrong(6, "failed-counted")
def memory_model(peaks, capacity):
    image, model = np.polyfit(list(peaks), [peak or 0 for peak in peaks.values()], 1)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.wrong(6, "wrong-line")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model / 2**20, image / 2**20, max(0, int((capacity - model) / image + 1e-6))


@bank.wrong(6, "rounded-up")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, math.ceil((capacity - model) / image))


@bank.wrong(6, "rounded-up")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, round((capacity - model) / image))


@bank.wrong(6, "fixed-part-forgotten")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, int(capacity // image)


@bank.wrong(6, "negative-batch")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, math.floor((capacity - model) / image + 1e-6)


@bank.wrong(6, "not-an-integer")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0.0, (capacity - model) / image)


@bank.wrong(6, "wrong-largest")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, 128 if capacity > model else 0


@bank.wrong(6, "wrong-largest")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    fits = int((capacity - model) / image + 1e-6)
    return model, image, 2 ** (fits.bit_length() - 1) if fits > 0 else 0


@bank.wrong(6, "wrong-line")
def memory_model(peaks, capacity):
    """Hard-coded: the numbers of one network."""
    return 300_000_000.0, 7_500_000.0, max(0, (capacity - 300_000_000) // 7_500_000)


def with_largest(model, image, capacity):
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.right(6)
def memory_model(peaks, capacity):
    known = fitting(peaks)
    mean_b, mean_p = sum(known) / len(known), sum(known.values()) / len(known)
    above = sum((b - mean_b) * (p - mean_p) for b, p in known.items())
    image = above / sum((b - mean_b) ** 2 for b in known)
    return with_largest(mean_p - image * mean_b, image, capacity)


@bank.wrong(6, "two-points")
def memory_model(peaks, capacity):
    (b0, p0), (b1, p1) = sorted(fitting(peaks).items())[-2:]
    image = (p1 - p0) / (b1 - b0)
    return with_largest(p0 - b0 * image, image, capacity)


@bank.wrong(6, "two-points")
def memory_model(peaks, capacity):
    known = sorted(fitting(peaks).items())
    (b0, p0), (b1, p1) = known[0], known[-1]
    image = (p1 - p0) / (b1 - b0)
    return with_largest(p0 - b0 * image, image, capacity)


@bank.wrong(6, "two-points")
def memory_model(peaks, capacity):
    known = list(fitting(peaks).items())
    slopes = [(q - p) / (c - b) for i, (b, p) in enumerate(known) for c, q in known[i + 1 :]]
    image = sorted(slopes)[len(slopes) // 2]
    models = sorted(p - image * b for b, p in known)
    return with_largest(models[len(models) // 2], image, capacity)


@bank.wrong(6, "not-three")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return str(model), str(image), max(0, int((capacity - model) / image + 1e-6))


@bank.wrong(6, "peaks-changed")
def memory_model(peaks, capacity):
    for b in [b for b, peak in peaks.items() if peak is None]:
        del peaks[b]
    return with_largest(*line(peaks), capacity)


@bank.wrong(6, "wrong-intercept")
def memory_model(peaks, capacity):
    return with_largest(min(fitting(peaks).values()), line(peaks)[1], capacity)


@bank.wrong(6, "negative-batch")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, int((capacity - model) / image + 1e-6) if capacity > model else None


@bank.wrong(5, "stopped-early")
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


@bank.wrong(6, "two-points")
def memory_model(peaks, capacity):
    """The first and the last size in the dictionary."""
    there = [b for b in peaks if peaks[b] is not None]
    first, last = there[0], there[-1]
    image = (peaks[last] - peaks[first]) / (last - first)
    model = peaks[first] - image * first
    return model, image, max(0, int((capacity - model) // image))


@bank.wrong(6, "wrong-line")
def memory_model(peaks, capacity):
    """Sizes sorted, peaks not: with sizes in another order they no longer belong together."""
    there = {b: peak for b, peak in peaks.items() if peak is not None}
    image, model = np.polyfit(sorted(there), list(there.values()), 1)
    return model, image, max(0, int((capacity - model) // image))

bank.text(
    5,
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
)


@bank.wrong(6, "wrong-largest")
def memory_model(peaks, capacity):
    """No batch that failed, or a larger one: the line is not asked alone."""
    model, image, largest = with_largest(*line(peaks), capacity)
    return model, image, min([largest, *(b - 1 for b, peak in peaks.items() if peak is None)])
