"""Collect the answers to a balise, in a file of its own, `tests/answers/WORK/balise_N.py`.

    bank = Bank("00_welcome", 2)

    @bank.wrong("tail-dropped")
    def distributed_sum(values): ...

    @bank.right()
    def distributed_sum(values): ...

An answer of several functions: `bank.several("slug", first, second)`. A slip in an otherwise right answer:
`bank.slip("slug", ("text of the solution", "what the trainee wrote"))`. A whole answer as text:
`bank.text(None, "def distributed_sum(values): ...")`. `Bank(work, balise, whole=True)` defines for slips and texts, beside
the imports, all setup cells and the solutions of earlier balises. Text becomes functions when it is judged.

A balise whose check is a table of looks has each mistake in one place: its hint, its wrong answers, and a variant, the
same mistake in another design, that is never recorded:

    bank.hint("tail-dropped", "The last values are left out.")
    bank.slip("tail-dropped", ("text of the solution", "what the trainee wrote"))
    bank.variant("tail-dropped", OTHER, ("text of OTHER, a right answer", "what the trainee wrote"))

A mistake that an engineer who has understood the idea would still make is at the *edge*: `bank.hint(..., edge=True)`, or
`bank.edge("slug")` where the hint's text stands with the check. Such an answer must get the verdict "not yet robust".

`variant=True` makes a variant of any other wrong answer. `bank.add(others)` takes in other banks: one for answers that
need `whole`, or those of all balises.
"""

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.works import running, source


@dataclass(frozen=True)
class Answer:
    """One answer. slug: the hint it must get; None for a right one. line: where it stands in its file.

    given: its functions, or what makes them. variant: never recorded as a known mistake. file: None where the line does
    not tell its text. code: all text that it is made of, if it is text. text: its own part of that.
    """

    work: str
    balise: int
    slug: str | None
    given: tuple | Callable[[], tuple]
    line: int
    variant: bool = False
    file: str | None = None
    code: str = ""
    text: str = ""

    @property
    def written(self) -> str:
        """Its text, as a trainee would write it; "" for one that is put together from functions of its file."""
        if self.text or not self.file:
            return self.text
        text = Path(self.file).read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if self.line in [one.lineno for one in getattr(node, "decorator_list", [])]:
                return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        return ""

    @functools.cached_property
    def answers(self) -> tuple:
        """What the check is given."""
        return self.given() if callable(self.given) else self.given

    def __str__(self):
        return f"{self.work}-{self.balise}-{self.slug or 'right'}-L{self.line}"


class Bank:
    """The answers to one balise of a practical work, in the order they are written; of all that `add` takes in."""

    def __init__(self, work: str, balise: int = 0, *, whole: bool = False):
        self.work, self.balise, self.answers, self.whole = work, balise, [], whole
        self.hints: dict[int, dict[str, str]] = {}
        self.edges: dict[int, set[str]] = {}

    def hint(self, slug: str, text: str, *, edge: bool = False):
        """The text of a hint of this balise alone; {fields} in it are filled by its check. edge: of a mistake there."""
        assert slug not in self.hints.setdefault(self.balise, {}), f"there is a hint {slug!r} already"
        self.hints[self.balise][slug] = text
        if edge:
            self.edge(slug)

    def edge(self, *slugs: str):
        """These mistakes are at the edge."""
        self.edges.setdefault(self.balise, set()).update(slugs)

    def add(self, *others: "Bank"):
        """Take in the answers and the hints of other banks."""
        for other in others:
            self.answers += other.answers
            for balise, hints in other.hints.items():
                assert not hints.keys() & self.hints.setdefault(balise, {}).keys(), f"balise {balise} has a hint twice"
                self.hints[balise] |= hints
            for balise, slugs in other.edges.items():
                self.edges.setdefault(balise, set()).update(slugs)

    def wrong(self, slug: str, *, variant: bool = False):
        """Decorator: this answer must fail with the hint `slug`."""
        return lambda answer: self._add(slug, answer, variant)

    def right(self):
        """Decorator: this answer must pass."""
        return lambda answer: self._add(None, answer)

    def several(self, slug: str | None, *answers, variant: bool = False):
        """An answer made of several functions or classes; slug None for a right one."""
        self._append(slug, answers, variant)

    def slip(self, slug: str | None, *changes: tuple[str, str], variant: bool = False):
        """The solution with some of its text changed, (old, new) each; slug None where it stays right."""
        code = source.without_markers(self._source.balises[self.balise].code) + "\n"
        self.text(slug, _changed(code, changes), variant=variant)

    def instead(self, slug: str | None, code: str):
        """The solution with some of its functions written anew."""
        self.text(slug, f"{self._source.balises[self.balise].code}\n\n{code}")

    def variant(self, slug: str, code: str, *changes: tuple[str, str]):
        """A right answer of another design, as text, with some of it changed: it must get the hint unrecorded."""
        self.text(slug, _changed(code, changes), variant=True)

    def text(self, slug: str | None, code: str, *, variant: bool = False):
        """An answer as text, run after the imports (or, in a whole bank, after all that stands before the balise)."""
        names = self._source.balises[self.balise].answers
        upto = self.balise if self.whole else None

        def made():
            namespace = dict(before(self.work, upto))
            running.run(code, f"<answer to balise {self.balise}>", namespace)
            return tuple(namespace[name] for name in names)

        self._append(slug, made, variant, "\n".join([*_texts_before(self.work, upto), code]), code)

    @functools.cached_property
    def _source(self) -> source.Work:
        return source.find(self.work)

    def _add(self, slug, answer, variant=False):
        self._append(slug, (answer,), variant)
        return answer

    def _append(self, slug, answers, variant=False, code="", text=""):
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>":
            frame = frame.f_back
        where = frame.f_lineno, variant, frame.f_code.co_filename
        self.answers.append(Answer(self.work, self.balise, slug, answers, *where, code, text))


def _changed(code, changes):
    for old, new in changes:
        assert old in code, f"the answer has no {old!r}"
        code = code.replace(old, new)
    return code


@functools.cache
def before(name: str, balise: int | None) -> dict:
    """The names that stand before a balise: its work's setup cells and earlier solutions; None: the imports alone."""
    names = {"__name__": "__main__"}  # functions of __main__ go to ranks by value
    for number, text in enumerate(_texts_before(name, balise)):
        running.run(text, f"<{name}, {number} before balise {balise}>", names)
    return names


@functools.cache
def _texts_before(name: str, balise: int | None) -> list[str]:
    cells = [cell for cell in source.find(name).cells if cell.kind == "code"]
    if balise is not None:
        return [c.text for c in cells if "setup" in c.options or (c.balise is not None and c.balise < balise)]
    nodes = [node for c in cells if "setup" in c.options for node in ast.parse(c.text).body]
    return [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
