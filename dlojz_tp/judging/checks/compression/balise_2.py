"""Balise 2: affine quantization, against fractions: no rounding but the one that is asked for."""

import math
from fractions import Fraction

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, same, silent
from dlojz_tp.judging.checks.compression.exact_quantization import (
    CHANNELS,
    MIXED,
    SIGNED,
    USUAL,
    copied,
    limits_of,
    quantized,
)
from dlojz_tp.measure.operations import Operations

#        tensor, axis
SPREAD = [
    (MIXED, None), (MIXED, 0), (MIXED, 1), (MIXED.permute(3, 2, 0, 1), 2), (torch.tensor(-2.5), None),
    (torch.tensor([[3.0, 4.0, 3.5]]), 0), (torch.full((1, 2), -7.0, dtype=torch.float64), 1),
]  # fmt: skip
#         least, greatest of a channel: both signs, beside 0, far and near; no zero point lies on a half
RANGES = [(-1.31, 2.1), (0.2, 5.0), (-7.0, -2.1), (-3.0, 3.1), (0.0, 6.0), (-3.7, 0.0), (-2e30, 1e30), (-1e-7, 3e-7)]
WAYS = (8, False), (8, True), (3, False), (2, True)  # bits, symmetric
HALVES = torch.arange(-8, 9) / 4  # in steps of half a scale
#        x, scale, zero, bits, symmetric: a scale of 0.5 divides without error
TIES = HALVES, torch.tensor(0.5), torch.tensor(7, dtype=torch.int32), 8, False
OUTSIDE = torch.tensor([-1e30, -300.0, -0.26, 0.13, 4.01, 300.0, 1e30, 7e4]), torch.tensor(0.5)
OUTSIDE = [(*OUTSIDE, torch.tensor(zero, dtype=torch.int32), bits, symmetric)
           for zero, bits, symmetric in ((7, 8, False), (0, 8, True), (1, 2, False), (0, 4, True))]  # fmt: skip


def affine_of(low, high, bits, symmetric):
    """(scale, zero point) of one channel, as a fraction and a whole number."""
    least, most = limits_of(bits, symmetric)
    low, high = min(Fraction(low), Fraction(0)), max(Fraction(high), Fraction(0))
    if symmetric:
        low, high = -max(-low, high), max(-low, high)
    scale = (high - low) / (most - least)
    return scale, round(least - low / scale)


def extremes_of(x, axis):
    rows = [x.flatten()] if axis is None else [row.flatten() for row in x.unbind(axis)]
    shape = () if axis is None else [-1 if d == axis else 1 for d in range(x.dim())]
    return [torch.stack([pick(row) for row in rows]).reshape(shape) for pick in (torch.min, torch.max)]


LOW, HIGH = (torch.tensor(ends).view(-1, 1) for ends in zip(*RANGES))
TRUE = [[affine_of(low, high, *way) for low, high in zip(LOW.flatten().tolist(), HIGH.flatten().tolist())]
        for way in WAYS]  # fmt: skip
#       integers, their scale and zero point
BACK = [(quantized(*case), case[1], case[2]) for case in (USUAL, SIGNED, CHANNELS)]


def observe(extremes, affine, quantize, dequantize):
    got = [extremes(*copied(case)) for case in SPREAD]
    yield {"extremes form": form(got)}
    yield {"extremes": [list(one) for one in got]}
    ranges = [(LOW.clone(), HIGH.clone()) for _ in WAYS]
    found = [affine(*ends, *way) for ends, way in zip(ranges, WAYS)]
    yield {"pairs": [one if one is None else len(one) if isinstance(one, tuple | list) else 1 for one in found]}
    yield {"affine form": [form(list(one)) for one in found]}
    yield {
        "scales": torch.stack([torch.tensor([s / float(t) for s, (t, _) in zip(one[0].flatten().tolist(), true)])
                               for one, true in zip(found, TRUE)]),
        "zeros": torch.stack([one[1].flatten() for one in found]),
    }  # fmt: skip
    beside = torch.zeros(2, 1), torch.tensor([[0.0], [6.0]])
    alone, mixed = ([affine(*ends, *way) for way in WAYS] for ends in ((torch.tensor(0.0), torch.tensor(0.0)), beside))
    yield {"constant": [in_words(*(one.flatten()[0].item() for one in pair), *way)
                        for found in (alone, mixed) for pair, way in zip(found, WAYS)]}  # fmt: skip
    found6 = [scale.flatten()[1].item() / float(affine_of(0.0, 6.0, *way)[0]) for (scale, _), way in zip(mixed, WAYS)]
    yield {"beside": all(abs(one - 1) < 1e-5 for one in found6)}
    given = copied(USUAL)
    with Operations() as operations:
        got = quantize(*given), quantize(*copied(SIGNED))
    yield {"form": form(list(got)), "usual": list(got)}
    yield {"borrowed": sorted(name for name in operations.functions if "quantize_per" in name)}
    yield {"changed": not same([given[0], *ranges], [USUAL[0], *[(LOW, HIGH)] * len(WAYS)])}
    yield {"ties": quantize(*copied(TIES)), "outside": [quantize(*copied(case)) for case in OUTSIDE]}
    yield {"channels": quantize(*copied(CHANNELS))}
    got = [dequantize(*copied(case)) for case in BACK]
    yield {"back form": form(got), "back": got}
    still = [dequantize(quantize(0 * LOW, scale, zero, *way), scale, zero) for (scale, zero), way in zip(found, WAYS)]
    yield {"zero": bool((torch.stack(still) == 0).all())}
    x = torch.linspace(-1, 1, 768).view(96, 8)
    with Operations() as operations:
        pair = affine(*extremes(x, 0))
        dequantize(quantize(x, *pair), *pair)
    read = [tensors[0][1] for name, tensors, *_ in operations.log if name == "python.values"]
    yield {"loops": operations.total > 150 or any(n > 1 for n in read)}


def in_words(scale, zero, bits, symmetric):
    """Of a channel of zeros, "fine", or what came: without a positive scale or with a zero point that is no integer of 0."""
    least, most = limits_of(bits, symmetric)
    fits = zero == 0 if symmetric else least <= zero <= most
    kind = "symmetric" if symmetric else "asymmetric"
    return "fine" if math.isfinite(scale) and scale > 0 and fits else f"{kind}: scale {scale:g}, zero point {zero}"


def of_zeros(seen, due):
    """Fields: the first that is not fine."""
    return {
        "expected": "a positive scale; if symmetric, the zero point is 0",
        "got": next(one for one in seen if one != "fine"),
    }


def only_the_narrow(seen):
    """Whether all scales are right but those of the last range, which are too large."""
    near = (seen["scales"] - 1).abs() < 1e-5
    return bool(near[:, :-1].all() and (seen["scales"][~near] > 1).any())


def of_axes(seen, due):
    """Which axes are left, of the second and third tensor: (3, 2, 2, 2) with axis 0 and 1."""
    shapes = [one[0].split(" ", 1)[-1] if isinstance(one, list) and one else "" for one in seen[1:3]]
    known = {("(1, 2, 2, 2)", "(3, 1, 2, 2)"): "wrong-axis", ("(3, 1, 1, 1)", "(3, 1, 1, 1)"): "first-axis"}
    return known.get(tuple(map(str, shapes)), "extremes-form")


def of_bytes(seen, due):
    """Whether the right form but for an integer type of another size."""
    return (
        "not-bytes"
        if [one.split(" ", 1)[-1] for one in map(str, seen)] == [one.split(" ", 1)[1] for one in due]
        else "form"
    )


EXTREMES = [extremes_of(*case) for case in SPREAD]
ONES = torch.ones(len(WAYS), len(RANGES), dtype=torch.float32)
ZEROS = torch.tensor([[zero for _, zero in true] for true in TRUE], dtype=torch.int32)
RIGHT = [quantized(*USUAL), quantized(*SIGNED)]
LOOKS = [
    Look("least and greatest: one number, or one per channel", "extremes form", form(EXTREMES), of_axes),
    Value("", "extremes", EXTREMES, "wrong-extremes"),
    Look("a scale and a zero point for each channel", "pairs", [2] * len(WAYS), "not-a-pair"),
    Look("", "affine form", [["float32 (8, 1)", "int32 (8, 1)"]] * len(WAYS), "affine-form",
         fields={"shape": "(8, 1)"}),
    Look("scales, relative to the true ones", only_the_narrow, False, "least-scale", fields=silent),
    Value("", "scales", ONES, "wrong-scale"),
    Value("zero points", "zeros", ZEROS, "wrong-zero"),
    Look("nothing but zeros", "constant", ["fine"] * 2 * len(WAYS), "no-range", fields=of_zeros),
    Look("", "beside", True, "all-or-none", fields=silent),
    Look("a byte each", "form", form(RIGHT), of_bytes),
    Look("written out", "borrowed", [], "borrowed", fields=silent),
    Value("equal to exact fractions, rounded", "usual", RIGHT, "wrong-integers"),
    Look("the inputs are unchanged", "changed", False, "input-changed"),
    Value("halves", "ties", quantized(*TIES), "wrong-integers"),
    Value("numbers out of range", "outside", [quantized(*case) for case in OUTSIDE], "wrong-integers"),
    Value("a scale for each channel", "channels", quantized(*CHANNELS), "wrong-integers"),
    Look("the form of the result", "back form", form([case[0].float() for case in BACK]), "back-form"),
    Value("back to real numbers", "back", [(q.double() - zero) * scale.double() for q, scale, zero in BACK], "wrong-back",
          holds=lambda seen, due: all(same(a, b.float()) for a, b in zip(seen, due))),
    Look("a zero stays a zero", "zero", True, "zero-moves"),
    Look("no loops", "loops", False, "loops", fields=silent),
]  # fmt: skip


def balise_2(extremes, affine, quantize, dequantize):
    yield from judged(LOOKS, observe, extremes, affine, quantize, dequantize)
