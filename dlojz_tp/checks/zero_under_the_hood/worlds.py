"""How the checks of this work run on ranks: in worlds of 1 to 4, two launches, and looks at what came back."""

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.zero_under_the_hood.common import Borrowed
from dlojz_tp.probes.ranks import in_worlds

SIZES = ((2,), (4, 3, 1))  # a launch each; two ranks first: they show most mistakes, and cost least
ALL = (4, 3, 1, 2)  # in one launch
TIMEOUT, MORE = 10, 5  # seconds for a launch, and for each further world in it: a deadlock must come back quickly
GRAPH = tuple(
    (words, "in-graph") for words in ("being modified inplace", "leaf Variable", "Only Tensors created explicitly")
)


def on_ranks(fn, *args, known=(), sizes=ALL) -> dict[int, list]:
    """Run a check's function in worlds of these sizes, in one launch: {world size: results in rank order}, 2 first.

    known: pairs (words in the error, or several of them, or its kind; slug) of failures that have their own hint, which
    may use {error}.
    """
    try:
        found = in_worlds(fn, *args, sizes=sizes, timeout=TIMEOUT + MORE * (len(sizes) - 1))
        return {size: found[size] for size in sorted(found, key=lambda size: (size != 2, size))}
    except launch.RankError as error:
        if isinstance(error.cause, Borrowed):
            raise Wrong("zero-borrowed", what=str(error.cause)) from error
        for sign, slug in (*known, *GRAPH, ("hung", "ranks-waiting")):
            if (
                error.kind == sign
                or _all_in(sign, error.summary)
                or (error.kind == "raised" and _all_in(sign, str(error)))
            ):
                raise Wrong(slug, got=error.summary, error=error.summary) from error
        for name in ("parts", "optimizer", "frozen"):
            if f"has no attribute '{name}'" in error.summary:
                raise Wrong("parts-missing", name=name) from error
        raise


def _all_in(words, text: str) -> bool:
    return all(each in text for each in ((words,) if isinstance(words, str) else words))


def by_worlds(looks: dict, fn, *args, known=(), sizes=SIZES):
    """The claims of a check: all looks at 2 ranks first, where most mistakes show, then all at the others.

    looks: {claim: look}; look(worlds) is given {world size: results of fn in rank order} and raises Wrong.
    """
    first, *others = sizes
    for number, (claim, look) in enumerate(looks.items()):
        yield claim
        if not number:
            worlds = on_ranks(fn, *args, known=known, sizes=first)
        look(worlds)
    for together in others:
        *most, last = map(str, sorted(together))
        yield f"all of it again on {', '.join(most)} and {last} ranks"
        worlds = on_ranks(fn, *args, known=known, sizes=together)
        for look in looks.values():
            look(worlds)


def each_rank(look):
    """A look(worlds) that calls look(result, world size, where) for every rank."""

    def all_of_them(worlds):
        for size, ranks in worlds.items():
            for rank, got in enumerate(ranks):
                look(got, size, f"rank {rank} of {size}")

    return all_of_them


def each_training(look):
    """A look(worlds) that calls look(result, name, rank, world size, where) for every training of every rank."""

    def all_of_them(worlds):
        for size, ranks in worlds.items():
            for rank, found in enumerate(ranks):
                for name, got in found.items():
                    look(got, name, rank, size, f"{name}, rank {rank} of {size}")

    return all_of_them
