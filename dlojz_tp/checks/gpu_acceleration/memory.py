"""Balise 6: the straight line behind the peaks."""

import itertools
import math
from numbers import Integral

import torch

from dlojz_tp.checking import Wrong, close

HINTS = {
    "not-three": "Return three numbers: model_bytes, bytes_per_image, largest_batch.",
    "swapped": "The model's part and the part per image are swapped: polyfit returns the slope first.",
    "no-fixed-part": "You divide the peak by the batch size. That is not the memory per image, because the model's "
                     "part is still in it. Fit a straight line with an intercept.",
    "two-points": "Your line goes through two of the points and follows their noise. Fit all the points (least "
                  "squares).",
    "failed-counted": "Sizes with None did not fit, so they have no peak. Leave them out of the fit.",
    "wrong-line": "The line does not fit the peaks: peak = model_bytes + bytes_per_image × batch size.",
    "wrong-intercept": "The part per image is right, but the model's part is not. It is the line's value at batch "
                       "size 0, which is below the smallest peak.",
    "peaks-changed": "You changed the dictionary that you were given. Leave it unchanged, and collect the sizes "
                     "that fitted in a new one.",
    "rounded-up": "This batch does not fit: it needs {needed}, and the card has {capacity}. Round down. If not "
                  "even one image fits, the answer is 0.",
    "fixed-part-forgotten": "You divided the whole capacity among the images, but the model takes its part first.",
    "negative-batch": "The model alone does not fit: the largest batch is 0, not {size}.",
    "not-an-integer": "The largest batch must be a whole number, an int.",
    "wrong-largest": "The largest batch is the largest whole number with model_bytes + bytes_per_image × batch ≤ "
                     "capacity. Use the line, not the sizes that were tried.",
}


MODEL, IMAGE = 300_000_000, 7_500_000


def balise_6(memory_model):
    """Exact lines, noisy ones, failed sizes, a card that is too small."""
    exact = {b: MODEL + IMAGE * b for b in (8, 16, 32, 64, 128)}
    capacity = 2_000_000_000
    yield "the two parts of the peak, from sizes that are on a line"
    _line(memory_model, exact, capacity)
    yield "sizes that did not fit are left out, and the sizes may be in any order"
    _line(memory_model, {256: None, **dict(reversed(exact.items())), 512: None}, capacity, failed=True)
    _line(memory_model, {16: exact[16], 64: exact[64]}, capacity)
    yield "noisy peaks: the line follows all of them"
    noise = {4: 14e6, 8: -9e6, 16: -6e6, 32: 5e6, 64: 2e6, 128: -3e6}
    _line(memory_model, {b: round(MODEL + IMAGE * b + e) for b, e in noise.items()}, capacity)
    yield "the largest batch: a whole number that still fits"
    for available in (capacity, MODEL + 40 * IMAGE + 1000, MODEL + IMAGE // 2):
        _largest(memory_model, exact, available)
    _largest(memory_model, {**exact, 200: None}, capacity)  # that size failed for another's sake: the line decides
    yield "a card too small for the model: 0"
    largest = _called(memory_model, exact, MODEL // 2)[2]
    if largest is None or largest != 0:
        slug = "negative-batch" if largest is None or largest < 0 else "wrong-largest"
        raise Wrong(slug, expected=0, got=f"{largest}", size=largest)
    yield "another network on another card"
    small = {b: MODEL // 7 + IMAGE // 3 * b for b in (24, 48, 96)}
    got = _called(memory_model, small, capacity)
    expected = (MODEL // 7, IMAGE // 3, (capacity - MODEL // 7) // (IMAGE // 3))
    if None in got or not close([float(value) for value in got], [float(value) for value in expected], 1e-3):
        raise Wrong("wrong-line", expected=str(expected), got=got, where="another network")


_NO_NUMBERS = (str, bytes, list, tuple, dict, type(None))


def _called(memory_model, peaks, capacity, failed=False):
    given = dict(peaks)
    try:
        got = memory_model(given, capacity)
    except TypeError as error:
        if failed and "None" in str(error):
            raise Wrong("failed-counted", got=str(error)) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("not-three", expected="(model_bytes, bytes_per_image, largest_batch)", got=got)
    if any(isinstance(value, _NO_NUMBERS) for value in (*got[:2], got[2] or 0)):
        raise Wrong("not-three", expected="three numbers", got=got)
    if given != peaks:
        raise Wrong("peaks-changed", expected=str(peaks), got=str(given))
    return got


def _least_squares(fitting):
    """(value at 0, slope) of the line, in whole numbers as far as possible: no rounding to speak of."""
    n, x, y = len(fitting), sum(fitting), sum(fitting.values())
    xx, xy = sum(b * b for b in fitting), sum(b * p for b, p in fitting.items())
    slope = (n * xy - x * y) / (n * xx - x * x)
    return (y - slope * x) / n, slope


def _line(memory_model, peaks, capacity, failed=False):
    model, image = (float(value) for value in _called(memory_model, peaks, capacity, failed)[:2])
    fitting = {b: p for b, p in peaks.items() if p is not None}
    true_model, true_image = _least_squares(fitting)
    if abs(model - true_model) <= 2e-3 * true_model and abs(image - true_image) <= 1e-3 * true_image:
        return
    ratio = sum(p / b for b, p in fitting.items()) / len(fitting)
    origin = sum(b * p for b, p in fitting.items()) / sum(b * b for b in fitting)
    total = sum(fitting.values()) / sum(fitting)
    pairs = itertools.combinations(fitting.items(), 2)
    (b0, p0), *_ = fitting.items()
    slug = "wrong-line"
    if close(image, true_image, 1e-3):
        slug = "wrong-intercept"
    elif close(model, float(IMAGE), 0.1) and close(image, float(MODEL), 0.1):
        slug = "swapped"
    elif any(
        close(image, r, 1e-3) for r in (ratio, origin, total, p0 / b0, list(fitting.values())[-1] / list(fitting)[-1])
    ):
        slug = "no-fixed-part"
    elif failed and any(close(image, _least_squares(counted)[1], 1e-3) for counted in _counted(peaks, capacity)):
        slug = "failed-counted"
    elif any(close(image, (q - p) / (c - b), 1e-3) and close(model, p - b * (q - p) / (c - b), 2e-3) for (b, p), (c, q) in pairs):
        slug = "two-points"
    raise Wrong(slug, expected=f"{true_model / 1e6:.1f} MB and {true_image / 1e6:.3f} MB an image",
                got=f"{model / 1e6:.1f} MB and {image / 1e6:.3f} MB an image")  # fmt: skip


def _counted(peaks, capacity):
    """The peaks with a number where a size failed: what a fit sees that does not leave it out."""
    highest = max(peak for peak in peaks.values() if peak is not None)
    return [{b: value if p is None else p for b, p in peaks.items()} for value in (0, capacity, highest)]


def _largest(memory_model, peaks, capacity):
    got = _called(memory_model, peaks, capacity)[2]
    truth = (capacity - MODEL) // IMAGE
    if got == truth and not isinstance(got, float):
        return
    where = f"{capacity / 1e6:,.1f} MB, model {MODEL / 1e6:.0f} MB, {IMAGE / 1e6:.1f} MB an image"
    if not isinstance(got, int | Integral | torch.Tensor):
        raise Wrong("not-an-integer", expected=truth, got=got, where=where)
    slug = "wrong-largest"
    if got in (capacity // IMAGE, math.ceil(capacity / IMAGE), round(capacity / IMAGE)):
        slug = "fixed-part-forgotten"
    elif got > truth:
        slug = "rounded-up"
    needed, there = f"{(MODEL + IMAGE * got) / 1e6:,.1f} MB", f"{capacity / 1e6:,.1f} MB"
    raise Wrong(slug, expected=truth, got=got, where=where, needed=needed, capacity=there)
