"""Collect the answers of one practical work.

    bank = Bank("00_welcome")

    @bank.wrong(2, "tail-dropped")
    def distributed_sum(values): ...

    @bank.right(2)
    def distributed_sum(values): ...

An answer of several functions: `bank.several(2, "slug", first, second)`. A slip in an otherwise right answer:
`bank.slip(2, "slug", ("text of the solution", "what the trainee wrote"))`. A whole answer as text:
`bank.text(2, None, "def distributed_sum(values): ...")`. `Bank(work, whole=True)` defines for slips and texts, beside
the imports, all setup cells and the solutions of earlier balises. Text becomes functions when it is judged.

A balise whose check is a table of looks has a file of its own, `tests/answers/WORK/balise_N.py`, with each mistake in one
place: its hint, its wrong answers, and a variant, the same mistake in another design, that is never recorded:

    bank.hint(2, "tail-dropped", "The last values are left out.")
    bank.slip(2, "tail-dropped", ("text of the solution", "what the trainee wrote"))
    bank.variant(2, "tail-dropped", OTHER, ("text of OTHER, a right answer", "what the trainee wrote"))

`variant=True` makes a variant of any other wrong answer. `bank.add(others)` takes in the banks of other files.
"""

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle

from dlojz_tp.works import source


@dataclass(frozen=True)
class Answer:
    """One answer. slug: the hint it must get; None for a right one. line: where it stands in its file.

    given: its functions, or what makes them. variant: never recorded as a known mistake. file: None where the line does
    not tell its text. code: all text that it is made of, if it is text.
    """

    work: str
    balise: int
    slug: str | None
    given: tuple | Callable[[], tuple]
    line: int
    variant: bool = False
    file: str | None = None
    code: str = ""

    @functools.cached_property
    def answers(self) -> tuple:
        """What the check is given."""
        return self.given() if callable(self.given) else self.given

    def __str__(self):
        return f"{self.work}-{self.balise}-{self.slug or 'right'}-L{self.line}"


class Bank:
    """The answers to one practical work, in the order they are written."""

    def __init__(self, work: str, *, whole: bool = False):
        self.work, self.answers, self.whole = work, [], whole
        self.hints: dict[int, dict[str, str]] = {}
        module = sys._getframe(1).f_globals["__name__"]
        # several answers share a name, so ranks must get them by value
        cloudpickle.register_pickle_by_value(sys.modules[module])

    def hint(self, balise: int, slug: str, text: str):
        """The text of a hint of this balise alone; {fields} in it are filled by its check."""
        assert slug not in self.hints.setdefault(balise, {}), f"balise {balise} has a hint {slug!r} already"
        self.hints[balise][slug] = text

    def add(self, *others: "Bank"):
        """Take in the answers and the hints of other banks."""
        for other in others:
            self.answers += other.answers
            for balise, hints in other.hints.items():
                for slug, text in hints.items():
                    self.hint(balise, slug, text)

    def wrong(self, balise: int, slug: str, *, variant: bool = False):
        """Decorator: this answer to `balise` must fail with the hint `slug`."""
        return lambda answer: self._add(balise, slug, answer, variant)

    def right(self, balise: int):
        """Decorator: this answer to `balise` must pass."""
        return lambda answer: self._add(balise, None, answer)

    def several(self, balise: int, slug: str | None, *answers, variant: bool = False):
        """An answer made of several functions or classes; slug None for a right one."""
        self._append(balise, slug, answers, variant)

    def slip(self, balise: int, slug: str | None, *changes: tuple[str, str], variant: bool = False):
        """The solution with some of its text changed, (old, new) each; slug None where it stays right."""
        code = source.without_markers(self._source.balises[balise].code) + "\n"
        self.text(balise, slug, _changed(code, changes), variant=variant)

    def variant(self, balise: int, slug: str, code: str, *changes: tuple[str, str]):
        """A right answer of another design, as text, with some of it changed: it must get the hint unrecorded."""
        self.text(balise, slug, _changed(code, changes), variant=True)

    def text(self, balise: int, slug: str | None, code: str, *, variant: bool = False):
        """An answer as text, run after the imports (or, in a whole bank, after all that stands before the balise)."""
        names = self._source.balises[balise].answers
        upto = balise if self.whole else None

        def made():
            namespace = dict(before(self.work, upto))
            exec(compile(code, f"<answer to balise {balise}>", "exec"), namespace)
            return tuple(namespace[name] for name in names)

        self._append(balise, slug, made, variant, "\n".join([*_texts_before(self.work, upto), code]))

    @functools.cached_property
    def _source(self) -> source.Work:
        return source.find(self.work)

    def _add(self, balise, slug, answer, variant=False):
        self._append(balise, slug, (answer,), variant)
        return answer

    def _append(self, balise, slug, answers, variant=False, code=""):
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>":
            frame = frame.f_back
        where = frame.f_lineno, variant, frame.f_code.co_filename
        self.answers.append(Answer(self.work, balise, slug, answers, *where, code))


def _changed(code, changes):
    for old, new in changes:
        assert old in code, f"the answer has no {old!r}"
        code = code.replace(old, new)
    return code


@functools.cache
def before(name: str, balise: int | None) -> dict:
    """The names that stand before a balise: its work's setup cells and earlier solutions; None: the imports alone."""
    names = {"__name__": "__main__"}  # functions of __main__ go to ranks by value
    for text in _texts_before(name, balise):
        exec(compile(text, f"<{name}>", "exec"), names)
    return names


@functools.cache
def _texts_before(name: str, balise: int | None) -> list[str]:
    cells = [cell for cell in source.find(name).cells if cell.kind == "code"]
    if balise is not None:
        return [c.text for c in cells if "setup" in c.options or (c.balise is not None and c.balise < balise)]
    nodes = [node for c in cells if "setup" in c.options for node in ast.parse(c.text).body]
    return [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
