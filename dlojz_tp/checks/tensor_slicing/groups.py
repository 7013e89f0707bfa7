"""Balises 8 and 10: process groups of neighbours for tensor parallelism, and across them for data parallelism."""

import contextlib
import os
import pickle
import re

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checking.judging import own_lines
from dlojz_tp.checks.tensor_slicing.common import on_ranks
from dlojz_tp.launch import wire
from dlojz_tp.works.balise import BaliseNotDone

# (ranks in the world, ranks in a tensor group)
EVEN = ((4, 2), (8, 2), (12, 4), (8, 4), (6, 3), (6, 2), (2, 2), (4, 4), (3, 3), (2, 1), (3, 1), (4, 1), (1, 1))
UNEVEN = ((4, 3), (3, 2), (8, 3), (2, 4), (6, 4))
# what a mistake in the numbers of ranks and groups raises, torch's own AssertionError for an empty group among it
OF_THE_SIZES = ValueError, AssertionError, IndexError, KeyError, StopIteration, UnboundLocalError

HINTS = {
    "members-only": "Rank {rank} did not make all groups: it called new_group only for its own group, or stopped "
                    "there. All ranks of the world must make all groups, including those that they do not belong "
                    "to. Real ranks would wait for each other here until the timeout.",
    "group-order": "Rank {rank} makes the groups in another order than rank 0. new_group matches the calls of the "
                   "ranks only by their order, so real ranks would wait for each other here until the timeout. The "
                   "loop must not depend on the rank.",
    "groups-by-rank": "Rank {rank} makes other groups than rank 0. All ranks must make the same groups in the same "
                      "order, so the arguments of new_group must not depend on the rank. Choose a group by rank "
                      "after all groups are made.",
    "made-twice": "You make the group of the ranks {members} {n} times in one call. Two calls of new_group with "
                  "the same ranks make two groups, and ranks that keep different ones wait for each other forever. "
                  "Make each group once.",
    "outside-group": "Rank {rank} does not belong to the group that it returned. Remember the one group whose "
                     "members include this rank, and continue the loop.",
    "own-group-missing": "Rank {rank} got None because its group, {wanted}, was never made. Every rank needs a "
                         "group, however many ranks there are.",
    "own-group-lost": "Rank {rank} got None: its group, {wanted}, was made, but not kept. Every rank in the group "
                      "must keep it.",
    "world-group": "The group holds all ranks of the world: the size you were given has no effect.",
    "across-nodes": "The group's ranks are {step} apart. Tensor parallelism communicates in every layer, so its "
                    "ranks must be neighbours on the same node: 0 and 1, 2 and 3, …",
    "neighbours-again": "These ranks are neighbours, so they hold different slices of one copy of the model. Ranks "
                        "that hold the same slice are {step} apart.",
    "number-for-size": "These groups have {n} ranks each. {why}",
    "wrong-members": "These are not the ranks of this group.",
    "not-a-group": "Return a process group, the result of dist.new_group.",
    "even-refused": "{size} divides {world}, but you refused it: {error}",
    "group-call-fails": "{size} divides {world}, and this failed there:\n{lines}\nWrite down the groups for these two numbers, and compare "
    "them with yours.",
    "uneven-accepted": "{size} does not divide {world}: some rank would have a group that is too small, or none. Raise a "
    "ValueError that names both numbers.",
    "uneven-asserted": "{size} does not divide {world}, and you use an assert for that. It is skipped under python "
                       "-O, and a caller cannot tell it from a bug. Raise a ValueError that names both numbers.",
    "uneven-unclear": "{size} does not divide {world}, but rank {rank} found that out too late: {error}. Raise a "
                      "ValueError that names both numbers before you make any group.",
}  # fmt: skip


def balise_8(tensor_group):
    """Groups of neighbours in worlds of 1 to 12 ranks: the calls recorded, then real groups on 3 and 4 ranks."""
    yield from _groups(tensor_group, _neighbours, _strided, "across-nodes")


def balise_10(data_group):
    """Groups across the tensor groups, in the same worlds."""
    yield from _groups(data_group, _strided, _neighbours, "neighbours-again")


def _neighbours(rank, world, size):
    first = rank // size * size
    return list(range(first, first + size))


def _strided(rank, world, size):
    return list(range(rank % size, world, size))


def _groups(make, members, mixed_up, slug):
    yield "worlds of 1 to 12 ranks, recorded: all ranks make the same groups in the same order"
    seen = launch.ranks(_recorded, make, n=1, timeout=20)[0]
    for world, size in EVEN:
        _same_calls(seen[world, size], world, size)
    yield "each rank gets the group that it belongs to"
    kept = any(isinstance(got, list) for ranks in seen.values() for _, got, _ in ranks)
    for world, size in EVEN:
        for rank, found in enumerate(seen[world, size]):
            _right_members(found, rank, world, size, members, mixed_up, slug, kept)
    yield "a size that does not divide the world is refused with a clear error"
    for world, size in UNEVEN:
        _refused(seen[world, size], world, size)
    yield "real groups on 3 and 4 ranks: a sum in each group"
    for world, ranks in on_ranks(_sums, make, sizes=(4, 3), timeout=8).items():
        for rank, found in enumerate(ranks):
            for size, total in found.items():
                wanted = sum(2.0**r for r in members(rank, world, size))
                if total != wanted:
                    where = f"rank {rank} of {world}, tensor_size = {size}, a sum of 2^rank in its group"
                    raise Wrong("wrong-members", expected=wanted, got=total, where=where)


@contextlib.contextmanager
def fake_world(rank, world):
    """Inside, this process is `rank` of a world whose collectives send nothing and never wait.

    Gives a list that fills with (ranks, whether only these need to call) for each new group.
    """
    # not at the top: it registers a backend, which only this needs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, made = distributed_c10d._new_group_with_tag, []

    def record(ranks=None, timeout=None, backend=None, *args, use_local_synchronization=False, **options):
        ranks = None if ranks is None else list(ranks)  # an iterator is read once
        everyone = range(world) if ranks is None else ranks
        made.append(([int(r) for r in everyone], use_local_synchronization))
        # whatever backend it names: here it is that of the world
        return begin(ranks, timeout, None, *args, use_local_synchronization=use_local_synchronization, **options)

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    distributed_c10d._new_group_with_tag = record
    try:
        yield made
    finally:
        distributed_c10d._new_group_with_tag = begin
        dist.destroy_process_group()


def _recorded(make):
    """On a rank: be every rank of every world in turn; {(world, size): [(calls, members or what came, error)]}.

    Each is a process of its own elsewhere: what a function remembers between two calls is of one rank in one world.
    """
    packed = wire.pack(make)
    dist.destroy_process_group()
    found = {}
    for world, size in (*EVEN, *UNEVEN):
        found[world, size] = []
        for rank in range(world):
            got = error = None
            with fake_world(rank, world) as made:
                try:
                    got = _members(pickle.loads(packed)(size))
                except BaliseNotDone:
                    raise
                except Exception as raised:
                    if (world, size) in EVEN and not isinstance(raised, OF_THE_SIZES):
                        raise
                    error = (not made and _clear(raised, world, size), _line(raised), own_lines(raised))
            found[world, size].append((made, got, error))
    return found


def _members(group):
    """The ranks of a group; "outside" for one that this rank is not in, else what came instead, in words."""
    if isinstance(group, dist.ProcessGroup):
        try:
            return dist.get_process_group_ranks(group)
        except KeyError:
            return "a group kept from an earlier call"
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return "outside"
    return "None" if group is None else type(group).__name__


def _clear(error, world, size):
    """Whether an error says what does not fit; not one that happened somewhere on the way."""
    return isinstance(error, ValueError) or {str(world), str(size)} <= set(re.findall(r"\d+", str(error)))


def _line(error):
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _same_calls(ranks, world, size):
    where = f"{world} ranks, tensor_size = {size}"
    calls = [[members for members, local in made if not local] for made, _, _ in ranks]
    for rank, mine in enumerate(calls):
        if mine == calls[0] or ranks[rank][2]:
            continue
        text = {"expected": f"rank 0 made {calls[0]}", "got": f"rank {rank} made {mine}", "where": where}
        if sorted(mine) == sorted(calls[0]):
            raise Wrong("group-order", rank=rank, **text)
        if len(mine) == len(calls[0]) > 1:
            raise Wrong("groups-by-rank", rank=rank, **text)
        raise Wrong("members-only", rank=0 if calls[0] == mine[: len(calls[0])] else rank, **text)
    for members in calls[0]:
        if world > 1 and (n := calls[0].count(members)) > 1:
            raise Wrong("made-twice", members=members, n=n, expected="each once", got=f"{calls[0]}", where=where)


def _right_members(found, rank, world, size, members, mixed_up, slug, kept):
    """Raise Wrong where a rank's group is not the right one. kept: whether some rank got a group."""
    made, got, error = found
    wanted = members(rank, world, size)
    where = f"rank {rank} of {world}, tensor_size = {size}"
    fields = {"expected": f"a group of the ranks {wanted}", "where": where}
    if error:
        fields |= {"size": size, "world": world, "error": error[1]}
        if error[1].startswith("ValueError") and not made:
            raise Wrong("even-refused", got=error[1], **fields)
        groups = [members for members, _ in made]
        raise Wrong("group-call-fails", lines=error[2], got=f"the groups made until then: {groups}", **fields)
    if got == "None" and (made or kept) and not any(rank in mine for mine, _ in made):
        raise Wrong("own-group-missing", rank=rank, wanted=wanted, **fields)
    if got == "None":
        raise Wrong("own-group-lost" if kept else "nothing-returned", rank=rank, wanted=wanted, where=where)
    if got == "outside":
        raise Wrong("outside-group", rank=rank, **fields)
    if isinstance(got, str):
        raise Wrong("not-a-group", got=got, **fields)
    if got == wanted:
        return
    fields["got"] = f"a group of the ranks {got}"
    if got == list(range(world)):
        raise Wrong("world-group", **fields)
    others = world // size
    if got == mixed_up(rank, world, size):
        raise Wrong(slug, step=size, **fields)
    if got == members(rank, world, others):
        why = f"tensor_size, {size}, is the number of ranks in a tensor group, not the number of tensor groups."
        if slug != "across-nodes":
            why = f"One rank of every tensor group makes {others}, and there are tensor_size, {size}, such groups."
        raise Wrong("number-for-size", n=len(got), why=why, **fields)
    if got == mixed_up(rank, world, others):
        raise Wrong(slug, step=others if slug == "across-nodes" else size, **fields)
    raise Wrong("wrong-members", **fields)


def _refused(ranks, world, size):
    fields = {"size": size, "world": world}
    where = f"{world} ranks, tensor_size = {size}"
    for rank, (made, got, error) in enumerate(ranks):
        if error is None and got not in ("outside", "None"):
            raise Wrong("uneven-accepted", got=f"rank {rank} got a group of the ranks {got}", where=where, **fields)
        if error and not made and error[1].startswith("AssertionError"):
            raise Wrong("uneven-asserted", got=error[1], where=where, **fields)
        if error is None or not error[0]:
            came = error[1] if error else "no group for this rank"
            raise Wrong("uneven-unclear", rank=rank, error=came, where=where, **fields)


def _sums(make):
    """On a rank: the sum of 2^rank in the group, for each size that divides the world."""
    world, found = dist.get_world_size(), {}
    for size in (n for n in (1, 2, 3, 4) if world % n == 0):
        total = torch.tensor(2.0 ** dist.get_rank(), dtype=torch.float64)
        dist.all_reduce(total, group=make(size))
        found[size] = total.item()
    return found
