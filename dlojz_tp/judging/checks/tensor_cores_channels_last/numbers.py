"""What the checks of this practical work share: reading numbers out of an answer, and looks at them."""

import math
from collections.abc import Callable

from dlojz_tp.judging.checking.looks import Look


def read(got):
    """A tuple or list with its numbers (of NumPy, tensors without dimensions) as Python's; all else as it is."""
    if not isinstance(got, tuple | list):
        return got
    return tuple(one.item() if hasattr(one, "item") and getattr(one, "ndim", 0) == 0 else one for one in got)


def is_number(value) -> bool:
    """Whether it is an int or a float, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def several(claim: str, key, n: int, hint: str, due: str) -> Look:
    """A look at the form of what `read` gave: n numbers. due: what they are, in words."""

    def holds(seen, _):
        return isinstance(seen, tuple) and len(seen) == n and all(map(is_number, seen))

    return Look(claim, key, due, hint, holds=holds)


def number(
    claim: str, see, due: float, mistakes: list[tuple[str, float]], hint: str, where: str, shown="{:,.6g}"
) -> Look:
    """A look at a number: its hint is that of the first of the mistakes, (slug, number), that gives it, else `hint`."""

    def fields(seen, _):
        return {"expected": shown.format(due), "got": shown.format(seen), "where": where}

    return Look(claim, see, due, lambda seen, _: first(seen, mistakes, hint), holds=same, fields=fields)


def of_each(cases: dict[str, list], looks: Callable) -> list[Look]:
    """The looks of all cases, {claim: its cases}. looks(claim, case): those of a case, the first with the claim."""
    return [look for claim, some in cases.items() for case in some for look in looks(claim * (case == some[0]), case)]


def same(got: float, expected: float, tol: float = 1e-9) -> bool:
    """Equal but for the rounding of floating-point numbers."""
    return math.isclose(got, expected, rel_tol=tol, abs_tol=1e-12)


def first(got: float, mistakes: list[tuple[str, float]], default: str) -> str:
    """The slug of the first known mistake that gives this number."""
    return next((slug for slug, value in mistakes if same(got, value)), default)
