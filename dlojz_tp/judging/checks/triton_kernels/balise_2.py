"""Balise 2: a fused softmax: its reads and writes, hard rows, lengths, and float16 that is rounded once."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent
from dlojz_tp.judging.checks.triton_kernels.watching import (
    KERNEL_LOOKS,
    MANY_PROGRAMS,
    ONE_LAUNCH,
    READ_ONCE,
    kernel_parts,
    watched,
)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 50, generator=GENERATOR)[:, 8:45]  # rows of 37 elements, 50 apart
ROW = torch.linspace(-3, 3, 37)[None]
NEGATIVE, LARGE = torch.cat([ROW - 1e5, ROW - 30]), torch.cat([ROW + 1000, ROW + 60])
MASKED = torch.cat([ROW.masked_fill(ROW < 1, -torch.inf), ROW.masked_fill(ROW > -2.9, -torch.inf)])
HALF = (0.3 * torch.randn(3, 300, generator=GENERATOR)).half()
OTHERS = {  # what is told of it
    "rows of one element": torch.tensor([[7.0], [-7.0]]),
    "rows of 64 elements": torch.randn(2, 64, generator=GENERATOR),
    "one row of 3000 elements": torch.randn(1, 3000, generator=GENERATOR),
    "100 rows": torch.randn(100, 3, generator=GENERATOR),  # the last: who shares them?
}


def due(x):
    return x.double().softmax(1).float()


def observe(softmax):
    result, seen, _ = yield from kernel_parts(softmax, X)
    yield {"values": result}
    for name, x in OTHERS.items():
        result, seen, _ = watched(softmax, x)
        yield {f"{name}, inside": not seen.outside, name: result, "busy": seen.busy()}
    yield {"negative": watched(softmax, NEGATIVE)[0]}
    yield {"large": watched(softmax, LARGE)[0]}
    yield {"masked": watched(softmax, MASKED)[0]}
    result, _, _ = watched(softmax, HALF)
    yield {"half form": form(result)}
    truth = HALF.double().softmax(1)
    yield {"half": bool(((result - truth).abs() <= 1.05 * 2**-11 * truth).all())}


def of_others(name, x):
    told = {"where": name, "what": name}
    yield Look(f"right for {name}", f"{name}, inside", True, "wrong-there",
               fields=told | {"expected": "", "got": ""})  # fmt: skip
    yield Value("", name, due(x), "wrong-there", fields=told)


LOOKS = [
    Look("a float32 matrix", "form", form(X), "another-form"),
    *KERNEL_LOOKS,
    Value("the softmax of each row", "values", due(X), "wrong-softmax"),
    READ_ONCE,
    ONE_LAUNCH,
    *[look for name, x in OTHERS.items() for look in of_others(name, x)],
    MANY_PROGRAMS,
    Value("of rows that are far below 0", "negative", due(NEGATIVE), "masked-lanes-count"),
    Value("far above", "large", due(LARGE), "overflows"),
    Value("-inf almost throughout", "masked", due(MASKED), "wrong-softmax"),
    Look("float16 comes back as float16", "half form", form(HALF), "another-form"),
    Look("computed in float32, rounded once", "half", True, "half-inside", fields=silent),
]


def balise_2(softmax):
    yield from judged(LOOKS, observe, softmax)
