"""Balise 1: bytes of a rank at each stage, against a table of bytes for each parameter."""

import torch

from dlojz_tp import planner
from dlojz_tp.judging.checking.borrowed import Borrowed, out_of_reach
from dlojz_tp.judging.checking.looks import Look, Value, judged, within

WIDTHS = {  # (optimizer, mixed precision): bytes for each parameter of (parameters, gradients, optimizer)
    ("adam", True): (2, 2, 12),
    ("momentum", True): (2, 2, 8),
    ("sgd", True): (2, 2, 4),
    ("adam", False): (4, 4, 8),
    ("momentum", False): (4, 4, 4),
    ("sgd", False): (4, 4, 0),
}
PADDED = 4e-5  # bytes for each parameter that a padded shard may have more
MODELS = ((1_002_720, 3), (13e9, 1024), (1_000_003, 1), (350_000_000, 7))
CASES = {
    "example": [(7.5e9, 64, stage, "adam", True) for stage in range(4)],
    "sizes": [(*model, stage, "adam", True) for model in MODELS for stage in range(4)],
    "kinds": [(124_000_000, 24, stage, *kind) for kind in WIDTHS for stage in range(4)],
}


def _due(n, size, stage, optimizer, mixed):
    """From stage 3 on the parameters are shared out, from 2 the gradients, from 1 the optimizer's part."""
    widths = zip(WIDTHS[optimizer, mixed], (3, 2, 1), strict=True)
    return [n * width / (size if stage >= first else 1) for width, first in widths]


def _each(cases, rows):
    """(cases, 3) bytes for each parameter."""
    return torch.tensor([[value / case[0] for value in row] for case, row in zip(cases, rows)], dtype=torch.float64)


def observe(bytes_per_rank):
    """For each group of cases: who was called, how many numbers came, and the bytes."""
    for name, cases in CASES.items():
        got, called = [], ""
        try:
            # under any name: an answer may look at who calls it
            with out_of_reach(Borrowed, planner.state_bytes, _due):
                for n, size, stage, optimizer, mixed in cases:
                    more = {} if name == "example" else {"optimizer": optimizer, "mixed_precision": mixed}
                    got.append(_numbers(bytes_per_rank(n, size, stage, **more)))
        except Borrowed as error:
            called = str(error)
        found = {f"{name} called": called, f"{name} counts": [one if one is None else len(one) for one in got]}
        yield found | ({name: _each(cases, got)} if set(found[f"{name} counts"]) == {3} else {})


def _numbers(got):
    try:
        return got if got is None else [float(value) for value in got]
    except (TypeError, ValueError):
        return []


def _shown(cases):
    """Fields of a hint: the first case that is wrong, and which other one it would be right for."""

    def fields(seen, due):
        k = int(((seen - due).abs() > PADDED).any(1).int().argmax())
        n, size, stage, optimizer, mixed = cases[k]
        alike = lambda *case: within(PADDED)(seen[k], _each([case], [_due(*case)])[0])  # noqa: E731
        others = [other for other in range(4) if alike(n, size, other, optimizer, mixed)]
        another = [other for other, _ in WIDTHS if other != optimizer and alike(n, size, stage, other, mixed)]
        word = f"{n:,.0f} parameters, {size} ranks, stage {stage}, {optimizer}, {'mixed precision' if mixed else 'float32'}"
        return {"stage": stage, "as_stage": (others or ["another"])[0], "optimizer": optimizer,
                "as_optimizer": (another or ["those of another"])[0], "where": word, "word": word,
                "expected": _words(due[k] * n), "got": _words(seen[k] * n)}  # fmt: skip

    return fields


def _words(values):
    return ", ".join(f"{value:,.0f}" for value in values.tolist())


def _small(seen, _):
    """The hint for bytes by parameter, up to 12, that are tiny: the bytes of one of 7.5 billion, or gigabytes."""
    return "of-one-parameter" if 1e-9 < seen.abs().max() < 5e-9 else "in-gigabytes"


def _looks(name, claim):
    cases = CASES[name]
    due = _each(cases, [_due(*case) for case in cases])
    return [
        Look(claim, f"{name} called", "", lambda seen, _: "check-called" if seen == "_due" else "planner-called"),
        Look("", f"{name} counts", [3] * len(cases), "not-three"),
        # of so small numbers no distance tells anything
        Look("", name, due, _small, holds=lambda seen, _: not 0 < seen.abs().max() < 1e-6, fields=_shown(cases)),
        Value("", name, due, "wrong-bytes", holds=within(PADDED), fields=_shown(cases)),
    ]


LOOKS = [
    *_looks("example", "7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB, as published"),
    *_looks("sizes", "other sizes, a single rank, numbers that do not divide evenly"),
    *_looks("kinds", "SGD with and without momentum, and float32 throughout"),
]


def balise_1(bytes_per_rank):
    yield from judged(LOOKS, observe, bytes_per_rank)
