"""Rows of words as lines of equal columns, for a terminal or below a cell."""

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """One line a row, two spaces between columns. right: the columns that end at the right; others begin at the left.

    Raises ValueError where a row has more or fewer cells than the first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if i in right else '<'}{width}}" for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
