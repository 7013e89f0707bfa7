"""What the checks of this practical work share: reading numbers out of an answer, and comparing them."""

import math

from dlojz_tp.checking import Wrong


def several(got, n: int, slug: str, expected: str) -> list[float]:
    """The `n` numbers of a tuple or list; Wrong(slug) for anything else."""
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != n:
        raise Wrong(slug, expected=expected, got=got)
    return [number(value, slug, expected) for value in got]


def number(value, slug: str, expected: str) -> float:
    """A number of Python, NumPy or a tensor without dimensions, as int or float; Wrong(slug) for anything else."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(slug, expected=expected, got=value)
    return value


def same(got: float, expected: float, tol: float = 1e-9) -> bool:
    """Equal but for the rounding of floating-point numbers."""
    return math.isclose(got, expected, rel_tol=tol, abs_tol=1e-12)


def first(got: float, mistakes: list[tuple[str, float]], default: str) -> str:
    """The slug of the first known mistake that gives this number."""
    return next((slug for slug, value in mistakes if same(got, value)), default)
