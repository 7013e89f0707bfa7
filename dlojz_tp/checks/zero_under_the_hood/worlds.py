"""How the checks of this work run on ranks, and what is said of those that fail."""

import functools

from dlojz_tp.checking.borrowed import Borrowed
from dlojz_tp.probes.ranks import by_worlds, hung, on_ranks, world_after_world

TIMEOUT = 15  # seconds for a launch: a deadlock must come back quickly
GRAPH = tuple(
    (words, "in-graph") for words in ("being modified inplace", "leaf Variable", "Only Tensors created explicitly")
)


USUAL = (
    (Borrowed, "zero-borrowed"), *GRAPH, (hung, "ranks-waiting"),
    *((f"has no attribute '{name}'", "parts-missing", {"name": name}) for name in ("parts", "optimizer", "frozen")),
)  # fmt: skip
on_ranks = functools.partial(on_ranks, usual=USUAL, timeout=TIMEOUT)
by_worlds = functools.partial(by_worlds, usual=USUAL, timeout=TIMEOUT)
world_after_world = functools.partial(world_after_world, usual=USUAL, timeout=TIMEOUT)


def each_training(look):
    """A look(worlds) that calls look(result, name, rank, world size, where) for every training of every rank."""

    def all_of_them(worlds):
        for size, ranks in worlds.items():
            for rank, found in enumerate(ranks):
                for name, got in found.items():
                    look(got, name, rank, size, f"{name}, rank {rank} of {size}")

    return all_of_them
