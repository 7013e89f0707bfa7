"""The slide of a mistake: the lines of a wrong answer that differ from the solution, and the verdict on them."""

import ast
import difflib
import textwrap

from dlojz_tp import course
from dlojz_tp.authoring import banks
from dlojz_tp.cards import render
from dlojz_tp.works import source

WIDTH = 1800  # pixels for text on a slide of 1920
WHOLE, LINES = 10, 16  # lines: an answer of so many is shown whole; of a longer one at most so many


def made(work: source.Work, number: int, slug: str) -> tuple[str, list[str]]:
    """(title, body) of the slide with the first wrong answer to balise `number` whose hint is `slug`, judged now.

    Raises ValueError where the bank has no such answer as text, or where its verdict is another one.
    """
    where = f"{work.name}, balise {number}"
    known = [one for one in banks.of(work).answers if (one.balise, one.slug) == (number, slug) and one.written]
    if not known:
        raise ValueError(f"{where}: the bank of answers has no {slug!r} that is written as text, or under a decorator")
    solution = source.without_markers(work.balises[number].code)
    answer = min(known, key=lambda one: len(changed(solution, one.written)[0]))
    verdict = course.judge(work, number, answer.answers)
    if verdict.slug != slug:
        raise ValueError(f"{where}: the verdict on {slug!r} is {verdict.slug or verdict.verdict!r}: {verdict.hint}")
    lines, marked = changed(solution, answer.written)
    title = f"{work.balises[number].title}: {slug.replace('-', ' ')}"
    return title, [code("\n".join(lines), marked), f"<div>{render.verdict(verdict)._repr_html_()}</div>"]


def changed(solution: str, answer: str) -> tuple[list[str], list[int]]:
    """(lines, marked): of an answer, the lines that differ from the solution, with a neighbour on each side.

    The head of the function that they are in is shown as well. "# …" is for lines left out. marked: numbers, from 1, of
    the lines that differ. Docstrings and comments don't count.
    """
    old, new = _bare(solution), _bare(answer)
    differ, near = set(), set()
    for kind, _, _, begin, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            differ |= set(range(begin, end))
            near |= set(range(begin - 1, end + 1))
    near &= set(range(len(new)))
    for k in sorted(near):
        depth = _depth(new[k])
        for above in range(k - 1, -1, -1):
            if _depth(new[above]) < depth:
                depth = _depth(new[above])
                if new[above].lstrip().startswith(("def ", "class ", "async def ")):
                    near.add(above)
    kept = range(len(new)) if len(new) <= WHOLE else sorted(near)
    lines, marked, last = [], [], -1
    for k in kept:
        if k > last + 1:
            lines.append(" " * _depth(new[k]) + "# …")
        lines.append(new[k])
        if k in differ:
            marked.append(len(lines))
        last = k
    return lines[:LINES] + ["# …"] * (len(lines) > LINES), marked


def code(text: str, marked: list[int] = ()) -> str:
    """Python as HTML in colours; the lines whose numbers, from 1, are `marked` have a ground of their own."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers.python import PythonLexer

    size = f"font-size:min(1em, {WIDTH / 0.61 / max(map(len, text.splitlines())):.1f}px)"
    return highlight(text, PythonLexer(), HtmlFormatter(noclasses=True, hl_lines=list(marked), prestyles=size))


def _bare(code: str) -> list[str]:
    """The lines of a program without docstrings, comments and empty lines."""
    code, left_out = textwrap.dedent(code), set()
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            left_out |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(code.splitlines(), 1)
    return [line.rstrip() for k, line in lines if k not in left_out and line.strip() and line.strip()[0] != "#"]


def _depth(line):
    return len(line) - len(line.lstrip())
