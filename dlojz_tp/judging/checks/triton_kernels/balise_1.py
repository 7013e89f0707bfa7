"""Balise 1: a masked vector kernel: its reads and writes on strided vectors whose length is not round."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged
from dlojz_tp.judging.checks.triton_kernels.watching import (
    KERNEL_LOOKS,
    MANY_PROGRAMS,
    NO_IDLE,
    ONE_LAUNCH,
    READ_ONCE,
    kernel_parts,
    watched,
)

N = 997
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3 * N, generator=GENERATOR)[::3]
Y = torch.randn(N + 5, generator=GENERATOR)[5:]
OTHERS = {  # what is told of it: (x, y)
    "one element": (X[:1], Y[:1]),
    "1024 elements": (torch.linspace(-1, 1, 1024), torch.linspace(3, 4, 1024)),
    "3000 elements": (torch.linspace(-1, 1, 3000), torch.linspace(3, 4, 3000)),
    "a column of a matrix as `y`": (X[:50], torch.arange(250.0).view(50, 5)[:, 2]),
    "a number expanded to 70 elements as `x`": (torch.tensor([3.0]).expand(70), Y[:70]),
    "no elements": (X[:0], Y[:0]),
}


def due(x, y, alpha):
    return (alpha * x.double() + y.double()).float()


def observe(scale_add):
    result, seen, _ = yield from kernel_parts(scale_add, X, Y, -2.5)
    yield {"values": result}
    for name, (x, y) in OTHERS.items():
        result, seen, _ = watched(scale_add, x, y, 2)
        yield {f"{name}, outside": seen.outside, name: result}
        if len(x) == 3000:
            yield {"busy": seen.busy()}


def strays(seen, due):
    return "stride-ignored" if seen[0].between else "wrong-there"


def of_others(name, truth):
    def told(seen, due):
        return {"where": name, "what": name}

    def told_of_strays(seen, due):
        return {"where": name, "what": str(seen[0]) if seen[0].between else name, "expected": "", "got": ""}

    yield Look(f"right for {name}", f"{name}, outside", [], strays, fields=told_of_strays)
    yield Value("", name, truth, "wrong-there", fields=told)


LOOKS = [
    Look("a float32 vector", "form", form(X), "another-form"),
    *KERNEL_LOOKS,
    Value("alpha * x + y", "values", due(X, Y, -2.5), "wrong-values"),
    READ_ONCE,
    ONE_LAUNCH,
    NO_IDLE,
    *[look for name, (x, y) in OTHERS.items() for look in of_others(name, due(x, y, 2))],
    MANY_PROGRAMS,
]


def balise_1(scale_add):
    yield from judged(LOOKS, observe, scale_add)
