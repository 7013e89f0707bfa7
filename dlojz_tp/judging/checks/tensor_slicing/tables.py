"""Tables of looks at the reports of a group's ranks: (size of the group, rank in it, report)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, filled, judged, silent


class Idea(Look):
    """A look that ends the check, although other answers that get its hint are at the edge."""


def at_each(looks: list[Look], every: list[tuple]) -> Iterator[str]:
    """The claims of a table: one claim's looks at all reports, rank after rank, then those of the next claim.

    A claim is made where a report has the key of its first look, a look where it has its own. `at` is (rank, size). An
    observation is a report with "rank", "size" and "all", the reports of its group. What a look's fields have under
    "where" is said after the rank, or after what the report has under "place".
    """
    for k, first in enumerate(looks):
        below = takewhile(lambda look: not look.claim, looks[k + 1 :])
        claim = [first, *below] if first.claim else []
        for size, rank, got in every if claim else ():
            if callable(first.see) or first.see in got:
                seen = got | {"rank": rank, "size": size, "all": [one for *_, one in every]}
                where = got.get("place", f"rank {rank} of {size}")
                here = [_placed(look, where) for look in claim if callable(look.see) or look.see in got]
                yield from judged(here, lambda seen=seen: seen, at=(rank, size), where=where)


def _placed(look, where):
    def fields(seen, due):
        said = filled(look.fields, seen, due)
        return said | {"where": ", ".join(filter(None, [where, said.get("where")]))}

    def ends(seen, due):
        slug = look.hint(seen, due) if callable(look.hint) else look.hint
        raise Wrong(slug, **{"expected": due, "got": seen} | fields(seen, due))

    return replace(look, fields=fields, hint=ends if isinstance(look, Idea) else look.hint)


def whole(report: dict) -> dict:
    """A look's `see`, where what it looks at takes more than one key."""
    return report


def told(key: str = "", **more):
    """A look's `fields`: what was seen, as the field `key`, and `more`. The hint says it all: no values are shown."""
    return lambda seen, due: silent(seen, due) | more | ({key: seen} if key else {})


def pair(claim: str, key: str, hint: str, where: str, what: str = "", tol: float | None = None) -> Look:
    """A look at (found, wanted)."""

    def fields(both, _):
        return {"got": both[0], "expected": both[1], "where": where, "what": what}

    return Look(claim, key, None, hint, holds=lambda both, _: close(*both, tol), fields=fields)


def pairs(claim: str, key: str, hint, *, right=close, about=lambda name: {"what": name}) -> Look:
    """A look at {name: (found, wanted)}: the first that is not right is shown. hint: a slug, or a function of the name.

    right(found, wanted). about(name): fields of the hint.
    """

    def first(seen):
        return next((name for name, both in seen.items() if not right(*both)), None)

    def fields(seen, _):
        name = first(seen)
        return about(name) | {"got": seen[name][0], "expected": seen[name][1], "where": name}

    slug = (lambda seen, _: hint(first(seen))) if callable(hint) else hint
    return Look(claim, key, None, slug, holds=lambda seen, _: first(seen) is None, fields=fields)
