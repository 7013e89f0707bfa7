"""What was measured, as a table that a notebook prints."""

from collections.abc import Callable, Mapping, Sequence

from dlojz_tp.works.columns import aligned


def table(columns: Mapping[str, str | Callable[[object], str]], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below the heads of their columns, in lines of equal length.

    Args:
        columns: for each head how its values are written: a format such as ``"{:.1f}"``, or a function such as
            ``measure.human_bytes``. Numbers are aligned at the right, and everything else at the left.
        rows: a value for each column; ``None`` is printed as a dash.

    Raises:
        ValueError: where a row has more or fewer values than there are columns.
    """
    writes = [how if callable(how) else how.format for how in columns.values()]
    cells = [["—" if v is None else write(v) for write, v in zip(writes, row, strict=True)] for row in rows]
    right = {i for i in range(len(columns)) if any(isinstance(row[i], int | float) for row in rows)}
    print(*aligned([[*columns], *cells], right), sep="\n")
