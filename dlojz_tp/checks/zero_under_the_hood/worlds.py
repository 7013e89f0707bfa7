"""How the checks of this work run on ranks, and what is said of those that fail."""

import functools

from dlojz_tp.checking.borrowed import Borrowed
from dlojz_tp.checking.looks import Look, judged, same
from dlojz_tp.probes.ranks import hung, on_ranks, world_after_world

TIMEOUT = 15  # seconds for a launch: a deadlock must come back quickly
GRAPH = tuple(
    (words, "in-graph") for words in ("being modified inplace", "leaf Variable", "Only Tensors created explicitly")
)


USUAL = (
    (Borrowed, "zero-borrowed"), *GRAPH, (hung, "ranks-waiting"),
    *((f"has no attribute '{name}'", "parts-missing", {"name": name}) for name in ("parts", "optimizer", "frozen")),
)  # fmt: skip
on_ranks = functools.partial(on_ranks, usual=USUAL, timeout=TIMEOUT)
world_after_world = functools.partial(world_after_world, usual=USUAL, timeout=TIMEOUT)


def table(looks, observe, *answers, **more):
    """The claims of a table of looks at what all ranks see, world after world; `at` is the size of a world.

    What one rank alone does not show is not looked at there.
    """
    yield looks[0].claim
    for size, ranks in world_after_world(observe, *answers, **more):
        here = [look for look in looks if size > 1 or callable(look.see) or look.see in ranks[0]]
        yield from judged(here, lambda seen=ranks: seen, at=size, where=f"{size} rank{'s' * (size > 1)}")


def each(claim, key, due, hint, holds=same, fields=lambda got, due: {}):
    """A Look that holds on every rank: holds(got, due); hint, fields: as for Look, of the first rank where it does not.

    Further fields of the hint are rank, size, expected, got.
    """

    def first(seen, due):
        return next((rank for rank, got in enumerate(seen) if not holds(got, due)), None)

    def all_fields(seen, due):
        rank, size = first(seen, due), len(seen)
        about = {"rank": rank, "size": size, "expected": due, "got": seen[rank], "where": f"rank {rank} of {size}"}
        return about | fields(seen[rank], due)

    slug = (lambda seen, due: hint(seen[first(seen, due)], due)) if callable(hint) else hint
    return Look(claim, key, due, slug, lambda seen, due: first(seen, due) is None, all_fields)
