"""Balise 6: the straight line behind the peaks: exact, noisy, with failed sizes, on a card that is too small."""

import functools
import itertools
import math
from numbers import Integral

import torch

from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look, judged, within

MODEL, IMAGE, CARD = 300_000_000, 7_500_000, 2_000_000_000
EXACT = {b: MODEL + IMAGE * b for b in (8, 16, 32, 64, 128)}
NOISE = {4: 14e6, 8: -9e6, 16: -6e6, 32: 5e6, 64: 2e6, 128: -3e6}
CALLS = {  # name: (peaks, capacity)
    "exact": (EXACT, CARD),
    "failed": ({256: None, **dict(reversed(EXACT.items())), 512: None}, CARD),
    "two": ({16: EXACT[16], 64: EXACT[64]}, CARD),
    "noisy": ({b: round(MODEL + IMAGE * b + e) for b, e in NOISE.items()}, CARD),
    "large": (EXACT, CARD),
    "40 images": (EXACT, MODEL + 40 * IMAGE + 1000),
    "no image": (EXACT, MODEL + IMAGE // 2),
    "failed below": ({**EXACT, 200: None}, CARD),  # that size failed for another's sake: the line decides
    "no model": (EXACT, MODEL // 2),
    "other": ({b: MODEL // 7 + IMAGE // 3 * b for b in (24, 48, 96)}, CARD),
}
NO_NUMBERS = str, bytes, list, tuple, dict, type(None)


def observe(memory_model):
    """What each call returns, and the dictionary that it was given; an error that comes of a failed size."""
    for name, (peaks, capacity) in CALLS.items():
        given = dict(peaks)
        try:
            got = memory_model(given, capacity)
        except TypeError as error:
            if name != "failed" or "None" not in str(error):
                raise
            got = error
        yield {name: tuple(got) if isinstance(got, list) else got, f"{name}, given": given}
        yield {f"{name}, largest": tuple(got)[2:]}


def _three(got, _):
    """Whether it is three numbers; None may stand for a batch."""
    numbers = got if isinstance(got, tuple) and len(got) == 3 else [None]
    return not any(isinstance(one, NO_NUMBERS) for one in (*numbers[:2], *(one or 0 for one in numbers[2:])))


def _called(claim, name, *more):
    """The looks at a call: at the form of what comes back, at what was given, and more."""
    form = Look(claim, name, "(model_bytes, bytes_per_image, largest_batch)",
                lambda seen, _: "failed-counted" if isinstance(seen, TypeError) else "not-three",
                holds=_three)  # fmt: skip
    return [form, Look("", f"{name}, given", CALLS[name][0], "peaks-changed"), *more]


def _line(claim, name):
    """The looks at a call and at its line."""
    peaks, capacity = CALLS[name]
    fitting = {b: p for b, p in peaks.items() if p is not None}
    found = [_least_squares({b: value if p is None else p for b, p in peaks.items()})[1]
             for value in (0, capacity, max(fitting.values()))]  # fmt: skip
    return _called(claim, name, Look(
        "", lambda o: [float(one) for one in o[name][:2]], _least_squares(fitting),
        functools.partial(_line_hint, fitting, found), holds=_near, fields=_both_lines,
    ))  # fmt: skip


def _near(seen, due):
    return all(abs(a - b) <= most * b for a, b, most in zip(seen, due, (2e-3, 1e-3)))


def _both_lines(seen, due):
    return {"got": _words(*seen), "expected": _words(*due)}


def _words(model, image):
    return f"{model / 1e6:.1f} MB and {image / 1e6:.3f} MB an image"


def _least_squares(fitting):
    """(value at 0, slope) of the line, in whole numbers as far as possible: no rounding to speak of."""
    n, x, y = len(fitting), sum(fitting), sum(fitting.values())
    xx, xy = sum(b * b for b in fitting), sum(b * p for b, p in fitting.items())
    slope = (n * xy - x * y) / (n * xx - x * x)
    return (y - slope * x) / n, slope


def _line_hint(fitting, counted, seen, due):
    """The mistake in a line. counted: the slopes where a failed size is counted."""
    model, image = seen
    ratios = [p / b for b, p in fitting.items()]
    through_zero = sum(b * p for b, p in fitting.items()) / sum(b * b for b in fitting)
    divided = sum(ratios) / len(ratios), through_zero, sum(fitting.values()) / sum(fitting), ratios[0], ratios[-1]
    pairs = [(b, p, (q - p) / (c - b)) for (b, p), (c, q) in itertools.combinations(fitting.items(), 2)]
    known = {
        "wrong-intercept": close(image, due[1], 1e-3),
        "swapped": close([model, image], [float(IMAGE), float(MODEL)], 0.1),
        "no-fixed-part": any(close(image, one, 1e-3) for one in divided),
        "failed-counted": any(close(image, one, 1e-3) for one in counted),
        "two-points": any(close(image, slope, 1e-3) and close(model, p - b * slope, 2e-3) for b, p, slope in pairs),
    }
    return next((slug for slug, made in known.items() if made), "wrong-line")


def _largest(claim, name):
    """The looks at a call and at the largest batch: a tuple of one, because None is a mistake of its own."""
    capacity = CALLS[name][1]

    def hint(seen, due):
        if not isinstance(seen[0], int | Integral | torch.Tensor):
            return "not-an-integer"
        if seen[0] in (capacity // IMAGE, math.ceil(capacity / IMAGE), round(capacity / IMAGE)):
            return "fixed-part-forgotten"
        return "rounded-up" if seen[0] > due[0] else "wrong-largest"

    def fields(seen, due):
        needed, there = (f"{size / 1e6:,.1f} MB" for size in (MODEL + IMAGE * (seen[0] or 0), capacity))
        where = f"{there}, model {MODEL / 1e6:.0f} MB, {IMAGE / 1e6:.1f} MB an image"
        return {"expected": due[0], "got": seen[0], "where": where, "needed": needed, "capacity": there}

    look = Look("", f"{name}, largest", ((capacity - MODEL) // IMAGE,), hint, fields=fields,
                holds=lambda seen, due: seen[0] == due[0] and not isinstance(seen[0], float))  # fmt: skip
    return _called(claim, name, look)


def _size(seen, _):
    return {"expected": 0, "got": f"{seen[0]}", "size": seen[0]}


LOOKS = [
    *_line("the two parts of the peak, from sizes that are on a line", "exact"),
    *_line("sizes that did not fit are left out, and the sizes may be in any order", "failed"), *_line("", "two"),
    *_line("noisy peaks: the line follows all of them", "noisy"),
    *_largest("the largest batch: a whole number that still fits", "large"), *_largest("", "40 images"),
    *_largest("", "no image"), *_largest("", "failed below"),
    *_called("a card too small for the model: 0", "no model"),
    Look("", "no model, largest", (0,), lambda seen, _: "negative-batch" if (seen[0] or -1) < 0 else "wrong-largest",
         fields=_size),
    *_called("another network on another card", "other"),
    Look("", lambda o: [one if one is None else float(one) for one in o["other"]],
         [float(MODEL // 7), float(IMAGE // 3), float((CARD - MODEL // 7) // (IMAGE // 3))], "wrong-line",
         holds=within(1e-3)),
]  # fmt: skip


def balise_6(memory_model):
    yield from judged(LOOKS, observe, memory_model)
