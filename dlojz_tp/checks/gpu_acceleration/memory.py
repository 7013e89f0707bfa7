"""Balises 5 and 6: a sweep that survives a full memory, and the straight line behind it."""

import math
import weakref
from unittest import mock

import torch

from dlojz_tp import measure
from dlojz_tp.checking import Wrong, close

HINTS = {
    "no-dictionary": "Return a dictionary {{batch size: record, or None where memory ran out}}.",
    "not-survived": "The out-of-memory error came through and ended the sweep. Catch torch.OutOfMemoryError.",
    "swallows-errors": "A {kind} in run() was taken for a full memory. Catch torch.OutOfMemoryError only, or mistakes "
    "stay hidden.",
    "stopped-early": "The sweep ended at the first size that did not fit, but the sizes need not be sorted: {missing} "
    "would have fitted.",
    "sizes-missing": "There is no entry for {missing}. A size that did not fit gets None.",
    "failure-not-none": "A size that did not fit must get None; an exception kept in a dictionary keeps its tensors alive.",
    "run-twice": "Batch size {size} was run {n} times. Once is enough: each run costs minutes on a real card.",
    "record-changed": "The dictionary must hold the very record that run() returned.",
    "memory-held": "When the next size started, the tensors of the failed one were still alive: something refers to "
    "the exception (its traceback holds the frames, the frames hold the tensors), or the next run starts inside the "
    "except block.",
    "freed-too-early": "empty_cache() was called inside the except block, where the exception still holds the tensors: "
    "nothing could be freed. Call it after the block.",
    "cache-not-emptied": "After a size that did not fit, torch.cuda.empty_cache() was not called: the allocator keeps its "
    "broken-up blocks.",
    "not-three": "Return three numbers: model_bytes, bytes_per_image, largest_batch.",
    "swapped": "The model's part and the part of an image are swapped: polyfit returns the slope first.",
    "no-fixed-part": "Peak over batch size is not the part of an image: the model's part is in it. Fit a straight line "
    "with an intercept.",
    "two-points": "A line through two neighbouring points follows their noise. Fit all points (least squares).",
    "failed-counted": "Sizes with None did not fit: they have no peak. Leave them out of the fit.",
    "wrong-line": "The line does not fit the peaks: peak = model_bytes + bytes_per_image × batch size.",
    "rounded-up": "This batch does not fit: {needed} are needed, {capacity} are there. Round down.",
    "fixed-part-forgotten": "The whole capacity was shared out among images, but the model takes its part first.",
    "negative-batch": "The model alone does not fit: the largest batch is 0, not {size}.",
    "not-an-integer": "The largest batch is a whole number, an int.",
    "wrong-largest": "The largest batch is the largest whole number with model_bytes + bytes_per_image × batch ≤ capacity.",
}


def balise_5(sweep):
    """A made `run` that watches what stays alive of its failed calls; no order in the sizes."""
    sizes = [8, 64, 16, 128, 32]
    run = _Run(limit=40)
    yield "it survives sizes that do not fit, in any order"
    got = _swept(sweep, run, sizes)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, dict):
        raise Wrong("no-dictionary", got=got)
    missing = [size for size in sizes if size not in got]
    if missing:
        early = [size for size in missing if size <= 40]
        words = ", ".join(str(size) for size in early or missing)
        raise Wrong("stopped-early" if early else "sizes-missing", got=str(sorted(got)), missing=words)
    for size in sizes:
        if size > 40 and got[size] is not None:
            raise Wrong("failure-not-none", expected=None, got=got[size], where=f"batch size {size}")
        if size <= 40 and got[size] is not run.records.get(size):
            raise Wrong("record-changed", got=got[size], where=f"batch size {size}")
        if run.calls.count(size) > 1:
            raise Wrong("run-twice", size=size, n=run.calls.count(size))
    yield "nothing of a failed size is alive when the next one starts"
    if run.held:
        raise Wrong("memory-held", where=f"batch size {run.held[0]}")
    yield "after a failure the freed memory is given back"
    failures = sum(size > 40 for size in sizes)
    if any(run.emptied_while_held) and run.emptied_while_held.count(False) < failures:
        raise Wrong("freed-too-early")
    if run.emptied_while_held.count(False) < failures:
        raise Wrong("cache-not-emptied")
    yield "other errors are not taken for a full memory"
    for error in (ValueError("a mistake in the model"), RuntimeError("shapes do not match")):
        try:
            _swept(sweep, _Run(limit=40, error=error), sizes)
        except type(error) as raised:
            if raised is error:
                continue
        raise Wrong("swallows-errors", kind=type(error).__name__)


class _Run:
    """Stands for a training run; notices whether earlier calls left anything alive."""

    def __init__(self, limit, error=None):
        self.limit, self.error = limit, error
        self.calls, self.held, self.emptied_while_held, self.records, self._made = [], [], [], {}, []

    def alive(self) -> bool:
        return any(made() is not None for made in self._made)

    def __call__(self, batch_size):
        if self.alive():
            self.held.append(self.calls[-1])
        self.calls.append(batch_size)
        activations = torch.empty(batch_size)
        self._made.append(weakref.ref(activations))
        if self.error:
            raise self.error
        if batch_size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {batch_size}.00 MiB.")
        self.records[batch_size] = measure.Record(f"batch size {batch_size}", peak_memory_bytes=[batch_size])
        return self.records[batch_size]

    def empty_cache(self):
        self.emptied_while_held.append(self.alive())


def _swept(sweep, run, sizes):
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "empty_cache", run.empty_cache),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", lambda *_: None),
        mock.patch.object(torch.accelerator, "empty_cache", run.empty_cache, create=True),
    ):
        try:
            return sweep(run, list(sizes))
        except torch.OutOfMemoryError as error:
            raise Wrong("not-survived", got=str(error)) from error


MODEL, IMAGE = 300_000_000, 7_500_000


def balise_6(memory_model):
    """Exact lines, noisy ones, failed sizes, a card that is too small."""
    exact = {b: MODEL + IMAGE * b for b in (8, 16, 32, 64, 128)}
    capacity = 2_000_000_000
    yield "the two parts of the peak, from sizes that lie on a line"
    _line(memory_model, exact, capacity)
    yield "sizes that did not fit are left out; no order in the sizes"
    _line(memory_model, {256: None, **dict(reversed(exact.items())), 512: None}, capacity, failed=True)
    _line(memory_model, {16: exact[16], 64: exact[64]}, capacity)
    yield "noisy peaks: the line follows all of them"
    noise = {4: 14e6, 8: -9e6, 16: -6e6, 32: 5e6, 64: 2e6, 128: -3e6}
    _line(memory_model, {b: round(MODEL + IMAGE * b + e) for b, e in noise.items()}, capacity, tol=0.06)
    yield "the largest batch: a whole number that still fits"
    for available in (capacity, MODEL + 40 * IMAGE + 1000, MODEL + IMAGE // 2):
        _largest(memory_model, exact, available)
    yield "a card too small for the model: 0"
    largest = _called(memory_model, exact, MODEL // 2)[2]
    if largest != 0:
        raise Wrong("negative-batch" if largest < 0 else "wrong-largest", expected=0, got=f"{largest}", size=largest)
    yield "another network on another card"
    small = {b: MODEL // 7 + IMAGE // 3 * b for b in (24, 48, 96)}
    got = _called(memory_model, small, capacity)
    expected = (MODEL // 7, IMAGE // 3, (capacity - MODEL // 7) // (IMAGE // 3))
    if not close([float(value) for value in got], [float(value) for value in expected], 1e-3):
        raise Wrong("wrong-line", expected=str(expected), got=got, where="another network")


def _called(memory_model, peaks, capacity, failed=False):
    try:
        got = memory_model(dict(peaks), capacity)
    except TypeError as error:
        if failed:
            raise Wrong("failed-counted", got=str(error)) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("not-three", expected="(model_bytes, bytes_per_image, largest_batch)", got=got)
    return got


def _line(memory_model, peaks, capacity, tol=1e-3, failed=False):
    model, image, _ = (float(value) for value in _called(memory_model, peaks, capacity, failed))
    if abs(model - MODEL) <= tol * MODEL * 2 and abs(image - IMAGE) <= tol * IMAGE:
        return
    fitting = {b: p for b, p in peaks.items() if p is not None}
    ratio = sum(p / b for b, p in fitting.items()) / len(fitting)
    origin = sum(b * p for b, p in fitting.items()) / sum(b * b for b in fitting)
    total = sum(fitting.values()) / sum(fitting)
    (b0, p0), (b1, p1), *_ = fitting.items()
    slug = "wrong-line"
    if close(model, float(IMAGE), 0.1) and close(image, float(MODEL), 0.1):
        slug = "swapped"
    elif any(close(image, r, 1e-3) for r in (ratio, origin, total, p0 / b0, list(fitting.values())[-1] / list(fitting)[-1])):
        slug = "no-fixed-part"
    elif failed:
        slug = "failed-counted"
    elif len(fitting) > 2 and close(image, (p1 - p0) / (b1 - b0), 1e-3):
        slug = "two-points"
    raise Wrong(slug, expected=f"{MODEL / 1e6:.0f} MB and {IMAGE / 1e6:.2f} MB an image",
                got=f"{model / 1e6:.1f} MB and {image / 1e6:.3f} MB an image")  # fmt: skip


def _largest(memory_model, peaks, capacity):
    got = _called(memory_model, peaks, capacity)[2]
    truth = (capacity - MODEL) // IMAGE
    if got == truth and float(got).is_integer() and not isinstance(got, float):
        return
    where = f"{capacity / 1e6:,.1f} MB, model {MODEL / 1e6:.0f} MB, {IMAGE / 1e6:.1f} MB an image"
    if isinstance(got, float):
        raise Wrong("not-an-integer", expected=truth, got=got, where=where)
    slug = "wrong-largest"
    if got in (capacity // IMAGE, math.ceil(capacity / IMAGE), round(capacity / IMAGE)):
        slug = "fixed-part-forgotten"
    elif got > truth:
        slug = "rounded-up"
    needed, there = f"{(MODEL + IMAGE * got) / 1e6:,.1f} MB", f"{capacity / 1e6:,.1f} MB"
    raise Wrong(slug, expected=truth, got=got, where=where, needed=needed, capacity=there)
