"""A page with a verdict of each kind, on answers to work 00 that are judged now."""

import errno

import nbformat

from dlojz_tp import course
from dlojz_tp.authoring import banks
from dlojz_tp.cards import render
from dlojz_tp.works import balise, source

HEAD = (
    "# What a verdict looks like\n\nThese verdicts are real: answers to work 00 were judged when this site was built."
)
WRONG = (
    "A verdict names what was expected, what came instead, for which input, and a hint for this very mistake. Here, "
    "somebody counted the cores of the whole node."
)
EDGE = "The idea is right, but an edge case isn't. It counts as done."
RIGHT = "The lines say what the check looked at. The result is only a part of it."
NOT_DONE = "A balise that you haven't written gets one calm line."
BROKEN = "If the machine fails, the verdict says nothing about your answer. Nothing is counted."


def made() -> nbformat.NotebookNode:
    """The page, as a notebook."""
    work = source.find("00_welcome")
    known = banks.of(work).answers

    def of(number, slug):
        answer = next(one for one in known if (one.balise, one.slug) == (number, slug))
        return course.judge(work, number, answer.answers)

    def full_disk():
        raise OSError(errno.ENOSPC, "No space left on device")

    of(1, None)  # the first verdict of a process also waits for imports
    cells = [nbformat.v4.new_markdown_cell(HEAD, id="head")]
    for number, (title, words, verdict) in enumerate(
        [
            ("A wrong answer", WRONG, of(1, "cores-of-the-node")),
            ("Works, not yet robust", EDGE, of(2, "tail-dropped")),
            ("A right answer", RIGHT, of(1, None)),
            ("Not done yet", NOT_DONE, course.judge(work, 1, (lambda: balise.todo(1),))),
            ("The machine's fault", BROKEN, course.judge(work, 1, (full_disk,))),
        ]
    ):
        card = render.verdict(verdict)
        shown = nbformat.v4.new_output("display_data", {"text/html": card._repr_html_(), "text/plain": repr(card)})
        cells.append(nbformat.v4.new_markdown_cell(f"## {title}\n\n{words}", id=f"words-{number}"))
        hidden = {"tags": ["remove-input"]}
        cells.append(nbformat.v4.new_code_cell("# judged", id=f"card-{number}", metadata=hidden, outputs=[shown]))
    return nbformat.v4.new_notebook(cells=cells)
