"""What a check says of an answer that fails, and mistakes at the edge, after which it goes on.

A mistake is at the *edge* where an engineer who has understood the idea would still make it: a buffer that is no
parameter, a transposed view, a mixed dtype. The bank marks it (`edge=True`), and `mistakes/edges.json` beside the
checks of a work lists it. A check does not end at such a mistake: it goes on, so that no mistake of the idea hides
after it. If nothing else fails, the verdict is "not yet robust".

A mistake at the edge often makes a later look fail, too. `make notebooks` learns from the bank which looks these are
(`judging.after_effects`), and such a failure after that mistake is passed over.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from dlojz_tp.judging.checking import mistakes


class Wrong(Exception):  # noqa: N818  (it reads "raise Wrong(...)")
    """An answer failed. slug: the hint's name in HINTS of the check's module.

    expected, got: short texts or values. where: the input and the rank, in words.
    They and all further keyword arguments fill the {fields} of the hint.
    """

    def __init__(self, slug: str, *, expected=None, got=None, where: str = "", **fields):
        super().__init__(slug)
        self.slug, self.expected, self.got, self.where = slug, expected, got, where
        self.fields = {"expected": expected, "got": got, "where": where} | fields
        self.evidence: dict | None = None  # what a look at a value saw: see dlojz_tp.judging.checking.mistakes.nearest


@dataclass
class Case:
    """An answer while it is judged.

    known: the recorded mistakes of the balise. edges: {slug: its after-effects} of those at the edge, where an
    after-effect is a pair (claim, slug). looking: the claim that is looked at. kept: the mistakes at the edge so far,
    each with its claim. overlooked: their after-effects. learning: pass over every failure after a mistake at the edge,
    and note it in `overlooked`.
    """

    known: list[dict] = ()
    edges: Mapping[str, set[tuple[str, str]]] = field(default_factory=dict)
    looking: str = ""
    kept: list[tuple[Wrong, str]] = field(default_factory=list)
    overlooked: set[tuple[str, str]] = field(default_factory=set)
    learning: bool = False

    def named(self, wrong: Wrong) -> tuple[str, list[tuple[str, float]]]:
        """The slug of a mistake, that of the nearest known one where there is one, and all that are known."""
        near = mistakes.nearest(wrong.evidence, self.known) if wrong.evidence else []
        return near[0][0] if near and near[0][1] <= mistakes.NEAR else wrong.slug, near


_case: ContextVar[Case | None] = ContextVar("case", default=None)


@contextlib.contextmanager
def in_case(case: Case) -> Iterator[None]:
    """Inside, `fails` keeps the mistakes at the edge in `case`."""
    before = _case.set(case)
    try:
        yield
    finally:
        _case.reset(before)


def fails(wrong: Wrong):
    """Raise `wrong`, unless it is a mistake at the edge, which is kept, or an after-effect: then the check goes on."""
    case = _case.get()
    if case is None:
        raise wrong
    slug, _ = case.named(wrong)
    seen = case.looking, slug
    if slug in case.edges:
        case.kept.append((wrong, case.looking))
        case.overlooked |= case.edges[slug]
    elif case.kept and case.learning:
        case.overlooked.add(seen)
    elif seen not in case.overlooked:
        raise wrong


def edge(slug: str, **details):
    """As `raise Wrong(slug, **details)`, for a mistake at the edge: returns where the check shall go on.

    It raises for a balise of which the mistake is not at the edge, and outside of a verdict.
    """
    fails(Wrong(slug, **details))
