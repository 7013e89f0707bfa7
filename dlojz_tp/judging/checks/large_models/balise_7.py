"""Balise 7: bytes of a rank with DDP and ZeRO, and the largest batch that fits, against every batch tried."""

import math
from numbers import Integral, Real

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, silent

#     (parameters, of the largest block, bytes of an image's activations, batch, ranks, stage)
DDP = [
    (1_000_000, 100_000, 40_000, 64, 8, 0),
    (2_440_000_000, 113_000_000, 10**9, 1, 1, 0),
    (5_000, 900, 70_000, 3, 4, 0),
]
SHARED = [(1_000_000, 100_000, 40_000, 64, 8, stage) for stage in (1, 2, 3)] + [
    (3_000_000, 900_000, 5_000, 10, 3, stage) for stage in (1, 2, 3)
]
NAMES = "{:,} parameters, the largest block {:,}, activations of {:,} bytes, batch {}, {} ranks, stage {}"


def _due(n, largest, activations, batch, ranks, stage):
    """Weights of 2 bytes from stage 3 on are shared, gradients of 2 from stage 2, Adam's 12 from stage 1."""
    shares = [size / (ranks if stage >= first else 1) for size, first in ((2, 3), (2, 2), (12, 1))]
    return n * sum(shares) + batch * activations + {2: 2, 3: 4}.get(stage, 0) * largest


#            name: (bytes of a batch, memory, most)
SEARCHES = {
    "a straight line": (lambda b: 1000 + 37 * b, 5000, 4096),
    "exactly full": (lambda b: 100 + 10 * b, 200, 64),
    "nothing fits": (lambda b: 600 + b, 600, 512),
    "everything fits": (lambda b: 5 * b, 1000, 77),
    "in steps of 64": (lambda b: 50 * -(-b // 64), 300, 1000),
    "faster than a line": (lambda b: b * b + 3 * b, 90_000, 10_000),
    "only one": (lambda b: 100 * b, 150, 1000),
    "up to one": (lambda b: 100 * b, 150, 1),
    "a jump": (lambda b: b if b < 700 else 10**9, 5000, 5000),
    "a large batch": (lambda b: 3.5 * b, 2.1e6 + 1, 2**20),
}


def _tried(bytes_of, memory, most):
    """The truth: from below, in the large searches from the solved one on."""
    low = 599_000 if most == 2**20 else 0
    while low < most and bytes_of(low + 1) <= memory:
        low += 1
    return low


FOUND = {name: _tried(*case) for name, case in SEARCHES.items()}
USUAL = [name for name in SEARCHES if name not in ("nothing fits", "exactly full", "everything fits", "up to one")]


class _Endless(BaseException):
    """It was asked for thousands of batches."""


def observe(rank_bytes, largest_batch):
    """Bytes as parts of the true ones; of each search what was found, how often and how far it asked."""
    for name, cases in (("DDP", DDP), ("shared", SHARED)):
        got = [rank_bytes(*case) for case in cases]
        numbers = all(isinstance(one, Real) for one in got)
        yield {f"{name} kind": "numbers" if numbers else None if got[0] is None else type(got[0]).__name__}
        yield {name: torch.tensor([one / _due(*case) for one, case in zip(got, cases)], dtype=torch.float64)}
    found, calls, again, outside = {}, {}, {}, {}
    for name, (bytes_of, memory, most) in SEARCHES.items():
        asked = []

        def told(batch, bytes_of=bytes_of, asked=asked, most=most):
            asked.append(batch)
            if len(asked) > 2000:
                raise _Endless
            return bytes_of(batch)

        try:
            found[name] = largest_batch(told, memory, most)
        except _Endless:
            yield {"endless": f"{asked[-1]:,}" if len({*asked[-100:]}) == 1 else True}
            return
        calls[name] = len(asked) / (math.log2(most) + 2)
        again[name] = len(asked) - len(set(asked))
        outside[name] = [batch for batch in asked if batch < 1 or batch > most or batch != int(batch)][:1]
    kinds = {type(one).__name__ for one in found.values() if not isinstance(one, Integral)}
    yield {"endless": False, "found kind": None if all(one is None for one in found.values()) else sorted(kinds)}
    yield {"usual": _parts(found, USUAL), "all": [found[name] for name in SEARCHES]}
    yield {name: found[name] for name in SEARCHES}
    yield {"calls": max(calls.values()), "again": max(again.values())}
    yield {"outside": [one for batches in outside.values() for one in batches][:1]}


def _parts(found, names):
    """What was found, each as a part of the truth."""
    return torch.tensor([found[name] / FOUND[name] for name in names], dtype=torch.float64)


def _bytes_shown(cases):
    def fields(seen, due):
        k = int(((seen - due).abs() > 1e-9).int().argmax())
        truth = _due(*cases[k])
        return {
            "expected": f"{truth:,.0f} bytes",
            "got": f"{truth * seen[k].item():,.0f} bytes",
            "where": NAMES.format(*cases[k]),
        }

    return fields


def _search_shown(seen, due):
    name = USUAL[int(((seen - due).abs() > 1e-9).int().argmax())]
    batch = FOUND[name] * seen[USUAL.index(name)].item()
    return {"expected": f"{FOUND[name]:,}", "got": f"{batch:,.0f}", "where": f"{name}, at most {SEARCHES[name][2]:,}"}


def _endless(seen, due):
    return "asked-often" if seen is True else "asked-again"


def _one(claim, name, hint):
    fields = lambda seen, due: {"where": f"{name}, at most {SEARCHES[name][2]:,}"}  # noqa: E731
    return Look(claim, name, FOUND[name], hint, fields=fields)


ONES = {
    name: torch.ones(len(cases), dtype=torch.float64)
    for name, cases in (("DDP", DDP), ("shared", SHARED), ("usual", USUAL))
}
LOOKS = [
    Look("a rank's bytes with DDP", "DDP kind", "numbers", "not-a-number"),
    Value("", "DDP", ONES["DDP"], "wrong-ddp", fields=_bytes_shown(DDP)),
    Look("with ZeRO 1, 2 and 3", "shared kind", "numbers", "not-a-number"),
    Value("", "shared", ONES["shared"], "wrong-zero", fields=_bytes_shown(SHARED)),
    Look("the largest batch, whether memory grows in a straight line or not", "endless", False, _endless,
         fields="batch"),
    Look("", "found kind", [], "not-a-batch", fields=lambda seen, _: silent(seen, _) | {"kind": ", ".join(seen)}),
    Value("", "usual", ONES["usual"], "wrong-batch", fields=_search_shown),
    _one("", "exactly full", "less-than"),
    _one("0 where nothing fits, never more than `most`", "nothing fits", "not-zero"),
    _one("", "everything fits", "not-most"),
    _one("", "up to one", "not-most"),
    Look("only batches from 1 to `most` are asked for, and few of them", "outside", [], "asked-outside",
         fields=lambda seen, _: silent(seen, _) | {"batch": seen[0]}),
    Look("", "calls", 4.0, "asked-often", holds=at_most, fields=silent),
    Look("", "again", 3, "asked-twice", holds=at_most, fields=silent),
]  # fmt: skip


def balise_7(rank_bytes, largest_batch):
    yield from judged(LOOKS, observe, rank_bytes, largest_batch)
