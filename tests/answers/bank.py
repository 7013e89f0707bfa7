"""Collect the answers of one practical work.

    bank = Bank("00_welcome")

    @bank.wrong(2, "tail-dropped")
    def distributed_sum(values): ...

    @bank.right(2)
    def distributed_sum(values): ...
"""

import sys
from dataclasses import dataclass

import cloudpickle


@dataclass(frozen=True)
class Answer:
    """One answer. slug: the hint it must get; None for a right one. line: where it stands in its file."""

    work: str
    balise: int
    slug: str | None
    answers: tuple
    line: int

    def __str__(self):
        return f"{self.work}-{self.balise}-{self.slug or 'right'}-L{self.line}"


class Bank:
    """The answers to one practical work, in the order they are written."""

    def __init__(self, work: str):
        self.work, self.answers = work, []
        module = sys._getframe(1).f_globals["__name__"]
        # several answers share a name, so ranks must get them by value
        cloudpickle.register_pickle_by_value(sys.modules[module])

    def wrong(self, balise: int, slug: str):
        """Decorator: this answer to `balise` must fail with the hint `slug`."""
        return lambda answer: self._add(balise, slug, answer)

    def right(self, balise: int):
        """Decorator: this answer to `balise` must pass."""
        return lambda answer: self._add(balise, None, answer)

    def _add(self, balise, slug, answer):
        line = sys._getframe(2).f_lineno
        self.answers.append(Answer(self.work, balise, slug, (answer,), line))
        return answer
