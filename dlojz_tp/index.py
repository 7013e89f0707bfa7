"""The map of the course: every practical work with its minutes, what it builds on, and how far you have come.

`lab` writes it to `index.ipynb` in the work folder at each start, and opens that first. Works and balises come from the
sources, and the state from `progress`. Only the order of ideas is here.
"""

import html
import json
import threading
import time
from pathlib import Path

from dlojz_tp import progress
from dlojz_tp.cards import render
from dlojz_tp.cards.verdict import DONE
from dlojz_tp.works import source, state

NAME = "index.ipynb"
LOOKS_EVERY_S = 2.0  # at the time of one folder
MAP = {  # part of the course: {work: the works that come before it}
    "One device": {"00": "", "01": "00", "02": "01", "03": "02", "04": "01", "05": "01", "06": "03", "07": "05"},
    "Many devices, the whole model on each": {"08": "01", "09": "08"},
    "Training well": {"10": "09", "11": "10"},
    "Models too large for one device": {
        "12": "02 09", "13": "02 08", "14": "13", "15": "08", "16": "15", "17": "08", "18": "08 17", "19": "13 15 17",
        "20": "09 13",
    },
    "After training": {"21": "02", "22": "02", "23": "03 17"},
    "Below PyTorch's operators": {"24": "03 06"},
    "All together": {"25": "05 10"},
}  # fmt: skip
# the shortest path, as in the instructor's plan
TWO_DAYS = {"00", "01", "02", "05", "08", "09", "13", "14"}
_SQUARE = (
    "display:inline-block;width:15px;height:15px;line-height:15px;margin-right:2px;text-align:center;font-size:11px;"
    "vertical-align:middle;"
)
_FRAME = "box-shadow:inset 0 0 0 1px rgba(128,128,128,.9);"  # of the core
_shown = None  # the page that is kept up to date


def card(folder: Path | None = None) -> render.Card:
    """The map as it is now. folder: of the verdicts; default those of the notebook that runs this."""
    works = [source.find(name) for name in source.names()]
    verdicts = {work.name: progress.load(work.name, folder) for work in works}
    rest, lines, rows = {work.name[:2] for work in works}, [], []
    for part, builds_on in [*MAP.items(), ("More", {})]:
        inside = [work for work in works if work.name[:2] in (builds_on or rest)]
        rest -= set(builds_on)
        if inside:
            lines.append(part)
            rows.append(f'<tr><th colspan="6" style="text-align:left;padding-top:14px">{part}</th></tr>')
        for work in inside:
            text, row = _work(work, verdicts[work.name], builds_on.get(work.name[:2], "").replace(" ", ", "))
            lines.append(text)
            rows.append(row)
    passed = sum(word in DONE for known in verdicts.values() for word in known.values())
    head = f"{passed} of {sum(len(work.balises) for work in works)} balises done, as of {time.strftime('%H:%M')}"
    names = "".join(
        f'<th style="text-align:left">{name}</th>' for name in ("", "", "balises", "core min", "all min", "builds on")
    )
    page = f'<p><b>{head}</b></p><table style="font-size:100%"><tr>{names}</tr>{"".join(rows)}</table>'
    return render.Card("\n".join([head, *lines]), page)


def _work(work: source.Work, verdicts: dict[int, str], before: str) -> tuple[str, str]:
    """A work's line as text and as HTML: a square for each balise, its title when the mouse is over it."""
    words = [(balise, verdicts.get(number, "not done")) for number, balise in work.balises.items()]
    done, number = sum(word in DONE for _, word in words), work.name[:2]
    squares = "".join(
        f'<span title="{html.escape(f"{balise.number} · {balise.title}{balise.about}: {word}")}" style="{_SQUARE}'
        f'{"" if balise.further else _FRAME}background-color:rgba({render._COLOUR[word]},.3)">'
        f"{'' if word == 'not done' else render._MARK[word]}</span>"
        for balise, word in words
    )
    link = f'<a href="{work.name}.ipynb">{number}</a>'
    cells = (
        link,
        html.escape(work.title) + " •" * (number in TWO_DAYS),
        f'<span style="white-space:nowrap">{squares}</span>',
        work.core,
        work.minutes,
        before,
    )
    row = "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells)
    said = f"about {work.minutes} min, core {work.core}" + f", builds on {before}" * bool(before)
    marked = work.title + " •" * (number in TWO_DAYS)
    return f"  {number}  {marked}: {done} of {len(words)}, {said}", f"<tr>{row}</tr>"


def show():
    """Show the map in a notebook, and keep it up to date while the kernel lives."""
    global _shown
    from IPython.display import display

    seen = _changed()
    _shown = display(card(), display_id=True)
    if _shown is not None:
        threading.Thread(target=_follow, args=(_shown, seen), daemon=True).start()


def _follow(page, seen):
    while _shown is page:
        time.sleep(LOOKS_EVERY_S)
        if (now := _changed()) != seen:
            seen = now
            page.update(card())


def _changed() -> int:
    try:
        return state.folder().stat().st_mtime_ns  # each verdict is a new file there
    except OSError:
        return 0


def notebook(folder: Path) -> bytes:
    """`index.ipynb`, with the map as it is now below its one cell of code. folder: of the verdicts."""
    now = card(folder)
    head = (
        "# The practical works\n\nClick on a number to open the notebook. Run the cell below (Shift-Enter), and the "
        "map follows your work while this kernel runs."
    )
    # after the code: Shift-Enter in a last cell would add one
    tail = (
        "Each square is a balise; a frame means that it belongs to the core. Hold the mouse over it for its title. "
        "★ passed, ✓ works but isn't yet robust, » by catch_up. A • after the title marks the two-day path."
    )
    data = {"text/html": [now._repr_html_()], "text/plain": [repr(now)]}
    cells = [
        {"cell_type": "markdown", "id": "head", "metadata": {}, "source": [head]},
        {
            "cell_type": "code", "execution_count": None, "id": "map", "metadata": {},
            "outputs": [{"data": data, "metadata": {}, "output_type": "display_data"}],
            "source": ["from dlojz_tp import index\n", "\n", "index.show()"],
        },
        {"cell_type": "markdown", "id": "tail", "metadata": {}, "source": [tail]},
    ]  # fmt: skip
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}).encode()
