"""Balise 1: bytes of a rank at each stage."""

from dlojz_tp import planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checking.borrowed import out_of_reach

HINTS = {
    "check-called": "That is the formula of the check. Here it is yours to write: three products.",
    "planner-called": "planner.state_bytes has this formula. Here it is yours to write: three products.",
    "not-three": "Three numbers are due: (parameters, gradients, optimizer).",
    "in-gigabytes": "The unit is bytes: leave 1e9 to who prints them.",
    "master-forgotten": "In mixed precision the optimizer also keeps a float32 copy of the parameters: 4 bytes more for each, "
    "which it shares out like its states.",
    "master-in-float32": "Without mixed precision the parameters themselves are float32: there is no second copy of them.",
    "master-not-shared": "The float32 copy belongs to the optimizer: it is counted in the third number, and shared out from "
    "stage 1 on.",
    "gradients-wide": "In mixed precision a gradient has 2 bytes, as its parameter has.",
    "precision-ignored": "mixed_precision=False makes parameters and gradients 4 bytes each.",
    "optimizer-ignored": "{optimizer} was asked for, and the states of {other} were counted. Adam keeps two float32 numbers "
    "for each parameter, momentum one, plain SGD none.",
    "other-order": "Stage {stage} shares out the wrong thing first. The optimizer's part is the largest, and goes first: stage 1; "
    "then the gradients, stage 2; then the parameters, stage 3.",
    "stage-late": "Stage {stage} came out as stage {other}. Stage 1 shares out the optimizer's part, stage 2 also the "
    "gradients, stage 3 also the parameters.",
    "one-thing-each": "Each stage shares out what the one before does, and one thing more: stage 2 also the optimizer's part.",
    "shared-in-stage-0": "Stage 0 is plain data parallelism: nothing is shared out.",
    "parts-mixed-up": "The numbers are right, their order is not: (parameters, gradients, optimizer).",
    "sizes-fixed": "Right for the example of the text, wrong for other numbers of parameters and ranks.",
    "wrong-bytes": "These are not the bytes of {word}.",
}


class _Called(Exception):  # noqa: N818  (it reads "raise _Called(...)")
    """The answer called what it was to write, by this name."""


def balise_1(bytes_per_rank):
    """The published example, then every stage, optimizer and precision, for other sizes."""
    yield "7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB, as published"
    for stage in range(4):
        _compare(bytes_per_rank, 7.5e9, 64, stage, "adam", True, default=True)
    yield "other sizes, one rank, numbers that do not divide"
    for n, size in ((1_002_720, 3), (13e9, 1024), (1_000_003, 1), (350_000_000, 7)):
        for stage in range(4):
            _compare(bytes_per_rank, n, size, stage, "adam", True)
    yield "SGD, with momentum and without it, and float32 throughout"
    for optimizer in ("adam", "momentum", "sgd"):
        for mixed in (True, False):
            for stage in range(4):
                _compare(bytes_per_rank, 124_000_000, 24, stage, optimizer, mixed)


def _due(n, size, stage, optimizer="adam", mixed=True):
    """A table, so that no formula is copied: bytes for each parameter, and the stage from which it is shared."""
    table = {
        ("adam", True): (2, 2, 12),
        ("momentum", True): (2, 2, 8),
        ("sgd", True): (2, 2, 4),
        ("adam", False): (4, 4, 8),
        ("momentum", False): (4, 4, 4),
        ("sgd", False): (4, 4, 0),
    }
    widths = table[optimizer, mixed]
    return tuple(n * width / (size if stage >= first else 1) for width, first in zip(widths, (3, 2, 1), strict=True))


def _equal(got, due):
    return all(abs(g - d) <= 32 + 1e-6 * d for g, d in zip(got, due, strict=True))


def _compare(bytes_per_rank, n, size, stage, optimizer, mixed, default=False):
    try:
        with out_of_reach(_Called, planner.state_bytes, _due):  # under any name: an answer may look at who calls it
            if default:
                got = bytes_per_rank(n, size, stage)
            else:
                got = bytes_per_rank(n, size, stage, optimizer=optimizer, mixed_precision=mixed)
    except _Called as called:
        raise Wrong("check-called" if str(called) == "_due" else "planner-called") from None
    word = f"{n:,.0f} parameters, {size} ranks, stage {stage}, {optimizer}, {'mixed precision' if mixed else 'float32'}"
    if got is None:
        raise Wrong("nothing-returned")
    try:
        got = tuple(float(value) for value in got)
    except (TypeError, ValueError):
        raise Wrong("not-three", got=got, where=word) from None
    due = _due(n, size, stage, optimizer, mixed)
    if len(got) != 3:
        raise Wrong("not-three", expected="three numbers", got=f"{len(got)} numbers", where=word)
    if not _equal(got, due):
        fields = {"optimizer": optimizer, "stage": stage, "word": word, "other": ""}
        slug, more = _mistake(bytes_per_rank, got, n, size, stage, optimizer, mixed)
        texts = {"expected": _words(due), "got": _words(got)}
        raise Wrong(slug, where=word, **texts, **(fields | more))


def _words(values):
    return ", ".join(f"{value:,.0f}" for value in values)


def _mistake(bytes_per_rank, got, n, size, stage, optimizer, mixed):
    due = _due(n, size, stage, optimizer, mixed)
    if any(_equal([value * unit for value in got], due) for unit in (1e9, 2**30)):
        return "in-gigabytes", {}
    if sorted(map(round, got)) == sorted(map(round, due)):
        return "parts-mixed-up", {}
    if stage == 0 and size > 1 and _equal(got, [value / size for value in due]):
        return "shared-in-stage-0", {}
    if stage == 0 and size > 1 and any(g < d / 2 for g, d in zip(got, due, strict=True)) and _shared(got, n, size):
        return "shared-in-stage-0", {}
    p, g, o = got
    shared = size if stage >= 1 else 1
    if mixed and abs(o - (due[2] - 4 * n / shared)) < 64:
        return ("master-not-shared" if abs(p + g - due[0] - due[1] - 4 * n) < 1e-6 * p else "master-forgotten"), {}
    if mixed and stage and abs(o - (due[2] - 4 * n / shared + 4 * n)) < 64:
        return "master-not-shared", {}
    if not mixed and abs(o - due[2] - 4 * n / shared) < 64:
        return ("precision-ignored" if abs(2 * p - due[0]) < 64 else "master-in-float32"), {}
    if mixed and abs(g - 2 * due[1]) < 64:
        return "gradients-wide", {}
    if not mixed and abs(2 * p - due[0]) < 64:
        return "precision-ignored", {}
    for other in ("adam", "momentum", "sgd"):
        if other != optimizer and _equal(got, _due(n, size, stage, other, mixed)):
            return "optimizer-ignored", {"other": other}
    for other in range(4):
        if other != stage and _equal(got, _due(n, size, other, optimizer, mixed)):
            return "stage-late", {"other": other}
    alone = [value * (1 if k + stage == 3 else size) for k, value in enumerate(_due(n, size, 3, optimizer, mixed))]
    if stage > 1 and _equal(got, alone):
        return "one-thing-each", {}
    shared = [abs(g - d / size) <= 32 for g, d in zip(got, _due(n, size, 0, optimizer, mixed), strict=True)]
    if stage and size > 1 and sum(shared) == stage:
        return "other-order", {}
    if (n, size) != (7.5e9, 64) and _equal(got, _due(7.5e9, 64, stage)):
        return "sizes-fixed", {}
    return "wrong-bytes", {}


def _shared(got, n, size):
    return any(_equal([value], [n * width / size]) for value in got for width in (2, 4, 8, 12))
