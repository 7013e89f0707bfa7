"""Answers to 17_tensor_slicing: process groups of neighbours, and across."""

import functools
import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.answers.bank import Bank

bank = Bank("17_tensor_slicing", whole=True)


def even(tensor_size):
    world_size = dist.get_world_size()
    if world_size % tensor_size:
        raise ValueError(f"{tensor_size} does not divide {world_size}")
    return world_size


def choose(lists):
    """Every group is made; the one of this rank is returned."""
    found = {}
    for members in lists:
        found[tuple(members)] = dist.new_group(members)
    return next(group for members, group in found.items() if dist.get_rank() in members)


@bank.right(8)
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(f, f + tensor_size)) for f in range(0, world_size, tensor_size)])


MADE = {}


@bank.right(8)
def tensor_group(tensor_size):
    """Each group is made once, over all calls."""
    for first in range(0, even(tensor_size), tensor_size):
        members = tuple(range(first, first + tensor_size))
        if members not in MADE:
            MADE[members] = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = MADE[members]
    return mine


@bank.right(8)
@functools.cache
def tensor_group(tensor_size):
    return choose([list(range(f, f + tensor_size)) for f in range(0, even(tensor_size), tensor_size)])


@bank.right(8)
def tensor_group(tensor_size):
    """The library's own."""
    group, _ = dist.new_subgroups(tensor_size)
    return group


@bank.right(8)
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    lists = [[g * tensor_size + k for k in range(tensor_size)] for g in range(world_size // tensor_size)]
    return dist.new_subgroups_by_enumeration(lists)[0]


@bank.right(8)
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (world_size // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    return mesh["tensor"].get_group()


@bank.right(8)
def tensor_group(tensor_size):
    """Only the members call, and PyTorch is told so."""
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return dist.new_group(list(range(first, first + tensor_size)), use_local_synchronization=True)


@bank.right(8)
def tensor_group(tensor_size):
    """From the last group to the first, named by torchrun's variables."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if divmod(world_size, tensor_size)[1] != 0:
        raise ValueError("uneven")
    for first in reversed(range(0, world_size, tensor_size)):
        group = dist.new_group(range(first, first + tensor_size))
        if first <= rank < first + tensor_size:
            mine = group
    return mine


@bank.wrong(8, "uneven-asserted")
def tensor_group(tensor_size):
    world_size, mine = dist.get_world_size(), None
    assert world_size % tensor_size == 0, f"{world_size} ranks, groups of {tensor_size}"
    for first in range(0, world_size, tensor_size):
        members = range(first, first + tensor_size)
        group = dist.new_group(members)
        mine = group if dist.get_rank() in members else mine
    return mine


@bank.wrong(10, "uneven-asserted")
def data_group(tensor_size):
    assert not dist.get_world_size() % tensor_size
    groups = [dist.new_group(range(k, dist.get_world_size(), tensor_size)) for k in range(tensor_size)]
    return groups[dist.get_rank() % tensor_size]


@bank.wrong(8, "members-only")
def tensor_group(tensor_size):
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return dist.new_group(list(range(first, first + tensor_size)))


@bank.wrong(8, "members-only")
def tensor_group(tensor_size):
    for first in range(0, even(tensor_size), tensor_size):
        members = list(range(first, first + tensor_size))
        if dist.get_rank() in members:
            return dist.new_group(members)


@bank.wrong(8, "members-only")
def tensor_group(tensor_size):
    """Stops as soon as its own group is there."""
    for first in range(0, even(tensor_size), tensor_size):
        members = list(range(first, first + tensor_size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            return group


@bank.wrong(8, "made-twice")
def tensor_group(tensor_size):
    """Once for each member, of which the first is kept."""
    mine = None
    for rank in range(even(tensor_size)):
        first = rank // tensor_size * tensor_size
        group = dist.new_group(list(range(first, first + tensor_size)))
        if rank == first == dist.get_rank() // tensor_size * tensor_size:
            mine = group
    return mine


@bank.wrong(8, "made-twice")
def tensor_group(tensor_size):
    """Once for each member, who keeps the one of its own turn."""
    made = []
    for rank in range(even(tensor_size)):
        first = rank // tensor_size * tensor_size
        made.append(dist.new_group(list(range(first, first + tensor_size))))
    return made[dist.get_rank()]


@bank.wrong(10, "made-twice")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(rank % tensor_size, world_size, tensor_size)) for rank in range(world_size)])


@bank.wrong(10, "own-group-missing")
def data_group(tensor_size):
    """No group where there is one copy of the model."""
    world_size = even(tensor_size)
    for k in range(tensor_size):
        column = list(range(k, world_size, tensor_size))
        if len(column) > 1:
            group = dist.new_group(column)
            if dist.get_rank() in column:
                mine = group
    return mine if world_size > tensor_size else None


@bank.wrong(8, "group-order")
def tensor_group(tensor_size):
    """Its own group first."""
    rank, world_size = dist.get_rank(), even(tensor_size)
    firsts = sorted(range(0, world_size, tensor_size), key=lambda first: not first <= rank < first + tensor_size)
    return choose([list(range(first, first + tensor_size)) for first in firsts])


@bank.wrong(8, "group-order")
def tensor_group(tensor_size):
    """From the own group on, round the world."""
    world_size, mine = even(tensor_size), dist.get_rank() // tensor_size
    groups = world_size // tensor_size
    lists = [[(mine + g) % groups * tensor_size + k for k in range(tensor_size)] for g in range(groups)]
    return choose(lists)


@bank.wrong(8, "outside-group")
def tensor_group(tensor_size):
    for first in range(0, even(tensor_size), tensor_size):
        group = dist.new_group(list(range(first, first + tensor_size)))
    return group


@bank.wrong(8, "outside-group")
def tensor_group(tensor_size):
    """Counts from 0 in every group."""
    even(tensor_size)
    return dist.new_group(list(range(tensor_size)))


@bank.wrong(8, "world-group")
def tensor_group(tensor_size):
    even(tensor_size)
    return dist.group.WORLD


@bank.wrong(8, "world-group")
def tensor_group(tensor_size):
    return dist.new_group(list(range(even(tensor_size))))


@bank.wrong(8, "across-nodes")
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    return choose(
        [list(range(first, world_size, world_size // tensor_size)) for first in range(world_size // tensor_size)]
    )


@bank.wrong(8, "across-nodes")
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (tensor_size, world_size // tensor_size), mesh_dim_names=("tensor", "data"))
    return mesh["tensor"].get_group()


@bank.wrong(8, "number-for-size")
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    step = world_size // tensor_size
    return choose([list(range(first, first + step)) for first in range(0, world_size, step)])


@bank.wrong(8, "wrong-members")
def tensor_group(tensor_size):
    """Steps of one rank: the groups overlap."""
    world_size = even(tensor_size)
    lists = [[(first + k) % world_size for k in range(tensor_size)] for first in range(world_size)]
    groups = [dist.new_group(members) for members in lists]
    return groups[dist.get_rank()]


@bank.wrong(8, "not-a-group")
def tensor_group(tensor_size):
    even(tensor_size)
    return dist.new_subgroups(tensor_size)


@bank.wrong(8, "not-a-group")
def tensor_group(tensor_size):
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return list(range(first, first + tensor_size))


@bank.wrong(8, "wrong-members")
def tensor_group(tensor_size, kept=[]):  # noqa: B006
    """Kept from the first call, whatever is asked for afterwards."""
    even(tensor_size)
    kept.append(dist.new_subgroups(tensor_size)[0])
    return kept[0]


@bank.wrong(8, "nothing-returned")
def tensor_group(tensor_size):
    choose([list(range(f, f + tensor_size)) for f in range(0, even(tensor_size), tensor_size)])


@bank.wrong(8, "own-group-missing")
def tensor_group(tensor_size):
    """As many groups as a group has ranks."""
    even(tensor_size)
    made = [
        dist.new_group(list(range(k, k + tensor_size)))
        for k in range(0, tensor_size**2, tensor_size)
        if k + tensor_size <= dist.get_world_size()
    ]
    place = dist.get_rank() // tensor_size
    return made[place] if place < len(made) else None


@bank.wrong(8, "uneven-accepted")
def tensor_group(tensor_size):
    """The last group is smaller."""
    world_size = dist.get_world_size()
    return choose([list(range(f, min(f + tensor_size, world_size))) for f in range(0, world_size, tensor_size)])


@bank.wrong(8, "even-refused")
def tensor_group(tensor_size):
    if tensor_size >= dist.get_world_size() or dist.get_world_size() % tensor_size:
        raise ValueError("too large")
    return dist.new_subgroups(tensor_size)[0]


bank.slip(8, "uneven-unclear", ("    if world_size % tensor_size:\n        raise", "    if False:\n        raise"))
bank.slip(8, "uneven-accepted", ("    if world_size % tensor_size:\n        raise", "    if False:\n        raise"),
    ("range(0, world_size, tensor_size)", "range(0, world_size - tensor_size + 1, tensor_size)"),
)  # fmt: skip


# across


@bank.right(10)
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([[rank for rank in range(world_size) if rank % tensor_size == k] for k in range(tensor_size)])


@bank.right(10)
def data_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (world_size // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    return mesh.get_group("data")


@bank.right(10)
def data_group(tensor_size):
    world_size = even(tensor_size)
    lists = [list(range(k, world_size, tensor_size)) for k in range(tensor_size)]
    return dist.new_subgroups_by_enumeration(lists)[0]


@bank.right(10)
def data_group(tensor_size):
    """Only the members call, and PyTorch is told so."""
    world_size = even(tensor_size)
    members = range(dist.get_rank() % tensor_size, world_size, tensor_size)
    return dist.new_group(list(members), use_local_synchronization=True)


@bank.wrong(10, "neighbours-again")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(f, f + tensor_size)) for f in range(0, world_size, tensor_size)])


@bank.wrong(10, "neighbours-again")
def data_group(tensor_size):
    """As many neighbours as there are data ranks."""
    world_size = even(tensor_size)
    return dist.new_subgroups(world_size // tensor_size)[0]


@bank.wrong(10, "number-for-size")
def data_group(tensor_size):
    """As many ranks as a tensor group has, far apart."""
    world_size = even(tensor_size)
    step = world_size // tensor_size
    return choose([list(range(first, world_size, step)) for first in range(step)])


@bank.wrong(10, "members-only")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return dist.new_group(list(range(dist.get_rank() % tensor_size, world_size, tensor_size)))


@bank.wrong(10, "group-order")
def data_group(tensor_size):
    world_size, mine = even(tensor_size), dist.get_rank() % tensor_size
    order = [mine, *(k for k in range(tensor_size) if k != mine)]
    return choose([list(range(k, world_size, tensor_size)) for k in order])


@bank.wrong(10, "outside-group")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return [dist.new_group(list(range(k, world_size, tensor_size))) for k in range(tensor_size)][0]


@bank.wrong(10, "world-group")
def data_group(tensor_size):
    return dist.new_group(list(range(even(tensor_size))))


@bank.wrong(10, "wrong-members")
def data_group(tensor_size):
    """The first rank of the own group, with the others' same place: one place off."""
    world_size = even(tensor_size)
    groups = [dist.new_group(list(range(k, world_size, tensor_size))) for k in range(tensor_size)]
    return dist.new_group([dist.get_rank()], use_local_synchronization=True) if groups else None


@bank.wrong(10, "not-a-group")
def data_group(tensor_size):
    return list(range(dist.get_rank() % tensor_size, even(tensor_size), tensor_size))


@bank.wrong(10, "uneven-accepted")
def data_group(tensor_size):
    world_size = dist.get_world_size()
    return choose([list(range(k, world_size, tensor_size)) for k in range(min(tensor_size, world_size))])


bank.slip(10, "nothing-returned", ("    return mine", "    mine"))
bank.slip(8, "wrong-members", ("range(first, first + tensor_size)", "range(first, first + max(1, tensor_size - 1))"))
bank.slip(8, "wrong-members", ("range(first, first + tensor_size)", "range(first, first + 2)"), ("range(0, world_size, tensor_size)", "range(0, world_size - 1, 2)"))  # fmt: skip
bank.slip(8, "own-group-missing", ("range(0, world_size, tensor_size)", "range(0, world_size // 2, tensor_size)"))
bank.slip(8, "group-call-fails", ("            mine = group\n    return mine", "            found = group\n    return found"), ("range(0, world_size, tensor_size)", "range(0, world_size - 1, tensor_size)"))  # fmt: skip
bank.slip(
    10,
    "wrong-members",
    ("range(first, world_size, tensor_size)", "range(first, max(first + 1, world_size - 1), tensor_size)"),
)


@bank.wrong(10, "outside-group")
def data_group(tensor_size):
    """The list of groups read at the row, where it has one for each column."""
    even(tensor_size)
    groups = [dist.new_group(list(range(k, dist.get_world_size(), tensor_size))) for k in range(tensor_size)]
    return groups[dist.get_rank() // tensor_size]


@bank.right(8)
def tensor_group(tensor_size):
    """As PyTorch makes them."""
    even(tensor_size)
    return dist.new_subgroups(group_size=tensor_size)[0]


bank.slip(8, None, ("dist.new_group(members)", 'dist.new_group(members, backend="gloo")'))
bank.slip(8, None, ("dist.new_group(members)", "dist.new_group(rank for rank in members)"))
bank.slip(8, "groups-by-rank", ("            mine = group\n", "            mine = group\n            mine = dist.new_group(members)\n"))
bank.slip(8, "own-group-lost", ("if dist.get_rank() in members", "if dist.get_rank() == first"))
bank.slip(8, "group-call-fails", ("range(first, first + tensor_size)", "range(first, first + tensor_size + 1)"))
bank.slip(8, "members-only", ("            mine = group\n", "            mine = group\n            break\n"))
