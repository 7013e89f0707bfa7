"""Minutes that a class took, beside those that the course states."""

from pathlib import Path

from dlojz_tp.works.columns import aligned

ENOUGH = 8  # trainees: the median of fewer says more of them than of the balise
HEAD = ("work", "balise", "trainees", "stated", "measured", "ratio")


def rows(view: dict) -> list[tuple]:
    """A row (see HEAD) for each balise that somebody has passed. view: what `desk.class_view` returns."""
    return [
        (work["name"], one["number"], one["timed"], one["stated"], one["median"], one["median"] / one["stated"])
        for work in view["works"]
        for one in work["balises"]
        if one["timed"] and one["stated"]
    ]


def table(found: list[tuple], day: str) -> str:
    """The rows as a page in Markdown. day: when the class was read."""
    lines = [
        "# Minutes that a class took",
        "",
        f"Medians of {day}, for balises that at least {ENOUGH} trainees passed. A pause counts half an hour at most.",
        f"Written by `python -m dlojz_tp class FOLDER --minutes`.{_in_all(found)}",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(_said(row))} |" for row in found), ""])


def text(found: list[tuple]) -> str:
    """The rows as aligned lines."""
    return "\n".join(aligned([HEAD, *map(_said, found)], range(1, len(HEAD)))) + "\n"


def keep(found: list[tuple], day: str, page: Path) -> str:
    """Write the rows of at least ENOUGH trainees to the page; returns a line that says what was done."""
    sure = [row for row in found if row[2] >= ENOUGH]
    if not sure:
        return f"no balise was passed by {ENOUGH} trainees: nothing is written"
    if not page.parent.is_dir():
        return f"{page.parent} is not there: nothing is written"
    page.write_text(table(sure, day), encoding="utf-8")
    return f"{len(sure)} balises of at least {ENOUGH} trainees are written to {page}"


def _said(row):
    name, number, timed, stated, median, ratio = row
    return name, str(number), str(timed), str(stated), f"{median:.1f}", f"{ratio:.2f}"


def _in_all(found):
    return f" In all, {sum(row[4] for row in found):.0f} minutes, where {sum(row[3] for row in found)} are stated."
