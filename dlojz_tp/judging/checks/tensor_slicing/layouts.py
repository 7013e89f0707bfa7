"""One launch of four ranks, cut into groups of 4, of 2 and of 1: a layer must do with the `ranks` that it is handed."""

import contextlib
import functools
from collections.abc import Iterator
from inspect import isgenerator

import torch.distributed as dist

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.checks.tensor_slicing.common import ASIDE, Borrowed, together, world_after_world
from dlojz_tp.judging.checks.tensor_slicing.right_ranks import LayerRanks
from dlojz_tp.judging.probes.outside import look_aside
from dlojz_tp.works.balise import BaliseNotDone

WORLD = 4
# The groups of two are no neighbours: a rank's number in its group is not that in the world.
GROUPS = {4: ((0, 1, 2, 3),), 2: ((0, 2), (1, 3)), 1: ((0,), (1,), (2,), (3,))}
JUDGED = {4: (0, 1, 2, 3), 2: (1, 3), 1: (3,)}  # of several groups, that which is least like a world of its own
SIZES = tuple(GROUPS)

HINTS = {
    "world-not-ranks": "This is right when `ranks` are all ranks of the world, but wrong in a group of {size} "
    "ranks: {what} refers to the whole world. Use the `ranks` that the layer was given: "
    "ranks.rank, ranks.size, and their methods.",
}
QUESTIONS = ("get_rank", "get_world_size")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "reduce", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "gather", "scatter",
)  # fmt: skip


def on_groups(fn, *args, known=()) -> Iterator[list[tuple]]:
    """Run fn(*args, ranks) in groups of each size, the largest first; yields [(size of the group, rank in it, report)].

    fn returns a dictionary; where its "stopped" or "halt" is not empty, nothing follows. It may yield several: each is
    judged before the answer does more.
    Errors: Wrong("copy-aside"), found last of all.
    """
    for _, found in world_after_world(_in_each, fn, *args, known=known, sizes=(WORLD,)):
        size = found[0][0]
        if not size:
            if (held := max(bytes for _, bytes in found)) > ASIDE:
                raise Wrong("copy-aside", held=held, where="a large layer")
            return
        yield [(size, place, found[member][1]) for place, member in enumerate(JUDGED[size])]


def group_of(layout):
    """(this rank's group, its members) of a layout; called by all ranks of the world."""
    mine = None
    for members in layout:
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group, members
    return mine


def _in_each(fn, *args):
    """On a rank: yields (size of the group, report, with what the layer asked the world); then (0, bytes kept aside)."""
    for size, layout in GROUPS.items():
        group, members = group_of(layout)
        with _asked() as asked:
            parts = _parts(fn, args, LayerRanks(group))
            while True:
                try:
                    report = next(parts, None)
                except (BaliseNotDone, Borrowed, Wrong):
                    raise
                except Exception as error:
                    if size == WORLD or not asked:
                        raise
                    report = {"failed": f"{type(error).__name__}: {error}".split("\n")[0]}
                    with contextlib.suppress(Wrong):  # the others may be waiting in a collective for ever
                        together(False, patience=1)
                        yield size, report | {"asked": asked}
                        return
                    where = f"rank {members.index(dist.get_rank())} of {size}"
                    raise Wrong(
                        "world-not-ranks", what=asked[0], size=size, where=where, got=report["failed"]
                    ) from error
                if report is None:
                    break
                yield size, (report | {"asked": asked}) if members == JUDGED[size] else None
                if not together(not (report.get("stopped") or report.get("halt"))):
                    return
    yield 0, look_aside()


def _parts(fn, args, ranks):
    """The reports of fn: one, or those that it yields."""
    found = fn(*args, ranks)
    yield from found if isgenerator(found) else (found,)


@contextlib.contextmanager
def _asked():
    """Yields a list that fills with the calls that speak of the world: dist.get_rank() and the like without a group."""
    asked, before = [], {}

    def noting(name, call):
        @functools.wraps(call)
        def noted(*args, **kwargs):
            groups = [kwargs.get("group"), *args]
            if not any(isinstance(g, dist.ProcessGroup) and g is not dist.group.WORLD for g in groups):
                asked.append(f"dist.{name}" + ("()" if name in QUESTIONS else " without `group`"))
            return call(*args, **kwargs)

        return noted

    for name in (*QUESTIONS, *COLLECTIVES):
        if hasattr(dist, name):
            before[name] = getattr(dist, name)
            setattr(dist, name, noting(name, before[name]))
    try:
        yield asked
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def in_groups_too(judge, groups):
    """Yield the claims of judge(reports); where only a smaller group fails, and the answer spoke of the world, say so.

    That ends it: all ranks of the world, as one group, have been judged before.
    """
    try:
        yield from _each_size(judge, groups)
    except Wrong as wrong:
        if wrong.slug != "world-not-ranks":
            raise
        fails(wrong)


def _each_size(judge, groups):
    said = []
    with contextlib.closing(groups):  # which ends the ranks at the first mistake
        for every in groups:
            size = every[0][0]
            if size == SIZES[1]:
                yield f"all of it again in groups of {SIZES[1]} and {SIZES[2]}"
            asked = next((what for *_, got in every for what in got["asked"]), None)
            try:
                for claim in judge([one for one in every if "failed" not in one[2]]):
                    if claim not in said:
                        said.append(claim)
                        yield claim
            except Wrong as wrong:
                if size == WORLD or asked is None:
                    raise
                fields = {"expected": wrong.expected, "got": wrong.got, "where": wrong.where}
                raise Wrong("world-not-ranks", what=asked, size=size, **fields) from wrong
            for _, rank, got in every:
                if "failed" in got:
                    where = f"rank {rank} of {size}"
                    raise Wrong("world-not-ranks", what=asked, size=size, got=got["failed"], where=where)
