"""Balises 8 and 10: process groups of neighbours for tensor parallelism, and across them for data parallelism."""

import contextlib
import os
import pickle
import re
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checking.verdicts import own_lines
from dlojz_tp.judging.checks.tensor_slicing.common import on_ranks
from dlojz_tp.judging.checks.tensor_slicing.tables import pairs
from dlojz_tp.judging.probes.shared_looks import recognised
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
    "number-for-size": "These groups have {n} ranks each. {why}",
    "wrong-members": "These are not the ranks of this group.",
    "not-a-group": "Return a process group, the result of dist.new_group.",
    "even-refused": "{size} divides {world}, but you refused it: {error}",
    "group-call-fails": "{size} divides {world}, and this failed there:\n{lines}\nWrite down the groups for these two "
                        "numbers, and compare them with yours.",
    "uneven-accepted": "{size} does not divide {world}: some rank would have a group that is too small, or none. Raise "
                       "a ValueError that names both numbers.",
    "uneven-asserted": "{size} does not divide {world}, and you use an assert for that. It is skipped under python "
                       "-O, and a caller cannot tell it from a bug. Raise a ValueError that names both numbers.",
    "uneven-unclear": "{size} does not divide {world}, but rank {rank} found that out too late: {error}. Raise a "
                      "ValueError that names both numbers before you make any group.",
}  # fmt: skip


def neighbours_of(rank, world, size):
    first = rank // size * size
    return list(range(first, first + size))


def strided(rank, world, size):
    return list(range(rank % size, world, size))


def groups_of(make, members, mixed_up, slug):
    """The claims. members, mixed_up: of the groups of this balise, and of the other's, which have the hint `slug`."""
    misplaced = partial(_misplaced, members=members, mixed_up=mixed_up, slug=slug)
    looks = [
        recognised("worlds of 1 to 12 ranks, recorded: all ranks make the same groups in the same order",
                   partial(_first, _unlike, EVEN)),
        recognised("", partial(_first, _twice, EVEN)),
        recognised("each rank gets the group that it belongs to", partial(_first, misplaced, EVEN)),
        recognised("a size that does not divide the world is refused with a clear error",
                   partial(_first, _accepted, UNEVEN)),
        pairs("real groups on 3 and 4 ranks: a sum in each group", "sums", "wrong-members"),
    ]  # fmt: skip
    yield from judged(looks, _observe, make, members)


def _observe(make, members):
    yield launch.ranks(_recorded, make, n=1, timeout=20)[0]
    sums = on_ranks(_sums, make, members, sizes=(4, 3), timeout=8)
    yield {"sums": {where: both for ranks in sums.values() for found in ranks for where, both in found.items()}}


def _first(find, cases, o):
    """What find(observation, rank, world, size) recognises first in these cases."""
    for rank, world, size in ((rank, *case) for case in cases for rank in range(case[0])):
        if mistake := find(o, rank, world, size):
            where = f"rank {rank} of {world}, tensor_size = {size}"
            return mistake[0], {"rank": rank, "world": world, "size": size, "where": where} | mistake[1]
    return None


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


def _unlike(o, rank, world, size):
    calls = [[members for members, local in made if not local] for made, *_ in o[world, size]]
    first, mine = calls[0], calls[rank]
    if mine == first or o[world, size][rank][2]:
        return None
    text = {"expected": f"rank 0 made {first}", "got": f"rank {rank} made {mine}"}
    if sorted(mine) == sorted(first):
        return "group-order", text
    if len(mine) == len(first) > 1:
        return "groups-by-rank", text
    return "members-only", text | {"rank": 0 if first == mine[: len(first)] else rank}


def _twice(o, rank, world, size):
    made = [members for members, local in o[world, size][rank][0] if not local]
    again = max(made, key=made.count, default=[])
    n = made.count(again)
    fields = {"members": again, "n": n, "expected": "each once", "got": f"{made}"}
    return ("made-twice", fields) if world > 1 and n > 1 else None


def _misplaced(o, rank, world, size, members, mixed_up, slug):
    made, got, error = o[world, size][rank]
    wanted, others = members(rank, world, size), world // size
    fields = {"expected": f"a group of the ranks {wanted}", "wanted": wanted}
    if error and error[1].startswith("ValueError") and not made:
        return "even-refused", fields | {"error": error[1], "got": error[1]}
    if error:
        return "group-call-fails", fields | {"lines": error[2], "got": f"made until then: {[each for each, _ in made]}"}
    if got == "None":
        kept = any(isinstance(one, list) for case in EVEN for _, one, _ in o[case])
        if (made or kept) and not any(rank in mine for mine, _ in made):
            return "own-group-missing", fields
        return ("own-group-lost", fields) if kept else ("nothing-returned", {})
    if isinstance(got, str):
        return ("outside-group", fields) if got == "outside" else ("not-a-group", fields | {"got": got})
    if got == wanted:
        return None
    fields["got"] = f"a group of the ranks {got}"
    if got == list(range(world)):
        return "world-group", fields
    near = mixed_up(rank, world, size)
    if got in (near, mixed_up(rank, world, others)):
        return slug, fields | {"step": size if got == near or slug != "across-nodes" else others}
    if got == members(rank, world, others):
        why = f"tensor_size, {size}, is the number of ranks in a tensor group, not the number of tensor groups."
        if slug != "across-nodes":
            why = f"One rank of every tensor group makes {others}, and there are tensor_size, {size}, such groups."
        return "number-for-size", fields | {"n": len(got), "why": why}
    return "wrong-members", fields


def _accepted(o, rank, world, size):
    made, got, error = o[world, size][rank]
    if error is None and got not in ("outside", "None"):
        return "uneven-accepted", {"got": f"rank {rank} got a group of the ranks {got}"}
    if error and not made and error[1].startswith("AssertionError"):
        return "uneven-asserted", {"got": error[1]}
    clear, came = error[:2] if error else (False, "no group for this rank")
    return None if clear else ("uneven-unclear", {"error": came})


def _sums(make, members):
    """On a rank: {where: (the sum of 2^rank in its group, the right one)} for each size that divides the world."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    for size in (n for n in (1, 2, 3, 4) if world % n == 0):
        total = torch.tensor(2.0**rank, dtype=torch.float64)
        dist.all_reduce(total, group=make(size))
        where = f"rank {rank} of {world}, tensor_size = {size}, a sum of 2^rank in its group"
        found[where] = total.item(), sum(2.0**r for r in members(rank, world, size))
    return found
