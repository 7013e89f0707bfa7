"""Looks that works share: at all ranks of a world, and at what only a GPU would show."""

import inspect
from collections.abc import Callable, Iterator

import torch

from dlojz_tp.judging.checking.looks import Look, filled, judged, same, silent
from dlojz_tp.judging.probes.ranks import world_after_world


def judged_on_ranks(looks: list[Look], observe: Callable, *answers, **more) -> Iterator[str]:
    """The claims of a table, world after world; `at`, what the truth depends on, is the size of a world.

    observe(*answers) runs on each rank and returns a dictionary. A look at a key that a world of one does not have is
    not made there. more: as for `world_after_world`. Raises TypeError for an observe that yields its parts.
    """
    if inspect.isgeneratorfunction(observe):
        raise TypeError(f"{observe.__name__} yields parts: over ranks it returns one dictionary")
    yield looks[0].claim
    for size, ranks in world_after_world(observe, *answers, **more):
        here = [look for look in looks if size > 1 or callable(look.see) or look.see in ranks[0]]
        yield from judged(here, lambda seen=ranks: seen, at=size, where=f"{size} rank{'s' * (size > 1)}")


def each_rank(claim, key, due, hint, *, holds=same, fields=None) -> Look:
    """A Look that holds on every rank: holds(got, due); hint, fields: as for Look, of the first rank where it does not.

    Further fields of the hint are rank, size, expected, got.
    """

    def first(seen, due):
        return next((rank for rank, got in enumerate(seen) if not holds(got, due)), None)

    def all_fields(seen, due):
        rank, size = first(seen, due), len(seen)
        about = {"rank": rank, "size": size, "expected": due, "got": seen[rank], "where": f"rank {rank} of {size}"}
        return about | filled(fields, seen[rank], due)

    slug = (lambda seen, due: hint(seen[first(seen, due)], due)) if callable(hint) else hint
    return Look(claim, key, due, slug, holds=lambda seen, due: first(seen, due) is None, fields=all_fields)


def mistake_look(claim: str, see, due, find, kind=Look) -> Look:
    """A look at a mistake that find(seen, due) recognises: nothing where all is right, else (hint, its fields)."""

    def hint(seen, due):
        return find(seen, due)[0]

    def fields(seen, due):
        return find(seen, due)[1]

    return kind(claim, see, due, hint, holds=lambda seen, due: not find(seen, due), fields=fields)


def recognised(claim: str, find, kind=Look) -> Look:
    """`mistake_look` at all that was observed, find(observed); the hint says it all, and no values are shown."""
    return mistake_look(claim, find, None, lambda found, due: found and (found[0], silent(found, due) | found[1]), kind)


def first_found(found: Iterator[tuple]) -> tuple | None:
    """For `recognised`: of pairs (nothing, or (hint, its fields); fields of any mistake there), the first mistake."""
    return next(((wrong[0], about | wrong[1]) for wrong, about in found if wrong), None)


def stacked(key) -> Callable:
    """A look's `see`: what the ranks have under a key, as one tensor (ranks, ...)."""
    return lambda ranks: torch.stack([rank[key] for rank in ranks])


def stays(claim, waits="waits") -> Look:
    """A look at what `probes.gpus.on_gpu` returned, under "device". waits: the hint for what makes the CPU wait."""
    slugs = {"waits": waits, "elsewhere": "other-device", "validates": "validates"}
    return Look(claim, "device", ["", ""], lambda seen, _: slugs[seen[0]], fields=said)


def said(seen, due) -> dict:
    """A look's `fields`, at (word, what was said)."""
    return silent(seen, due) | {"error": seen[1]}
