"""Answers to balise 8 of 17_tensor_slicing: tensor groups."""

import functools
import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.groups import choose, even

bank = Bank("17_tensor_slicing", 8, whole=True)


@bank.right()
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(f, f + tensor_size)) for f in range(0, world_size, tensor_size)])


MADE = {}


@bank.right()
def tensor_group(tensor_size):
    """Each group is made once, over all calls."""
    for first in range(0, even(tensor_size), tensor_size):
        members = tuple(range(first, first + tensor_size))
        if members not in MADE:
            MADE[members] = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = MADE[members]
    return mine


@bank.right()
@functools.cache
def tensor_group(tensor_size):
    return choose([list(range(f, f + tensor_size)) for f in range(0, even(tensor_size), tensor_size)])


@bank.right()
def tensor_group(tensor_size):
    """The library's own."""
    group, _ = dist.new_subgroups(tensor_size)
    return group


@bank.right()
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    lists = [[g * tensor_size + k for k in range(tensor_size)] for g in range(world_size // tensor_size)]
    return dist.new_subgroups_by_enumeration(lists)[0]


@bank.right()
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (world_size // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    return mesh["tensor"].get_group()


@bank.right()
def tensor_group(tensor_size):
    """Only the members call, and PyTorch is told so."""
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return dist.new_group(list(range(first, first + tensor_size)), use_local_synchronization=True)


@bank.right()
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


@bank.wrong("uneven-asserted")
def tensor_group(tensor_size):
    world_size, mine = dist.get_world_size(), None
    assert world_size % tensor_size == 0, f"{world_size} ranks, groups of {tensor_size}"
    for first in range(0, world_size, tensor_size):
        members = range(first, first + tensor_size)
        group = dist.new_group(members)
        mine = group if dist.get_rank() in members else mine
    return mine


@bank.wrong("members-only")
def tensor_group(tensor_size):
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return dist.new_group(list(range(first, first + tensor_size)))


@bank.wrong("members-only")
def tensor_group(tensor_size):
    for first in range(0, even(tensor_size), tensor_size):
        members = list(range(first, first + tensor_size))
        if dist.get_rank() in members:
            return dist.new_group(members)


@bank.wrong("members-only")
def tensor_group(tensor_size):
    """Stops as soon as its own group is there."""
    for first in range(0, even(tensor_size), tensor_size):
        members = list(range(first, first + tensor_size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            return group


@bank.wrong("made-twice")
def tensor_group(tensor_size):
    """Once for each member, of which the first is kept."""
    mine = None
    for rank in range(even(tensor_size)):
        first = rank // tensor_size * tensor_size
        group = dist.new_group(list(range(first, first + tensor_size)))
        if rank == first == dist.get_rank() // tensor_size * tensor_size:
            mine = group
    return mine


@bank.wrong("made-twice")
def tensor_group(tensor_size):
    """Once for each member, who keeps the one of its own turn."""
    made = []
    for rank in range(even(tensor_size)):
        first = rank // tensor_size * tensor_size
        made.append(dist.new_group(list(range(first, first + tensor_size))))
    return made[dist.get_rank()]


@bank.wrong("group-order")
def tensor_group(tensor_size):
    """Its own group first."""
    rank, world_size = dist.get_rank(), even(tensor_size)
    firsts = sorted(range(0, world_size, tensor_size), key=lambda first: not first <= rank < first + tensor_size)
    return choose([list(range(first, first + tensor_size)) for first in firsts])


@bank.wrong("group-order")
def tensor_group(tensor_size):
    """From the own group on, round the world."""
    world_size, mine = even(tensor_size), dist.get_rank() // tensor_size
    groups = world_size // tensor_size
    lists = [[(mine + g) % groups * tensor_size + k for k in range(tensor_size)] for g in range(groups)]
    return choose(lists)


@bank.wrong("outside-group")
def tensor_group(tensor_size):
    for first in range(0, even(tensor_size), tensor_size):
        group = dist.new_group(list(range(first, first + tensor_size)))
    return group


@bank.wrong("outside-group")
def tensor_group(tensor_size):
    """Counts from 0 in every group."""
    even(tensor_size)
    return dist.new_group(list(range(tensor_size)))


@bank.wrong("world-group")
def tensor_group(tensor_size):
    even(tensor_size)
    return dist.group.WORLD


@bank.wrong("world-group")
def tensor_group(tensor_size):
    return dist.new_group(list(range(even(tensor_size))))


bank.hint("across-nodes", "The group's ranks are {step} apart. Tensor parallelism communicates in every layer, so "
          "its ranks must be neighbours on the same node: 0 and 1, 2 and 3, …")  # fmt: skip


@bank.wrong("across-nodes")
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    return choose(
        [list(range(first, world_size, world_size // tensor_size)) for first in range(world_size // tensor_size)]
    )


@bank.wrong("across-nodes", variant=True)
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (tensor_size, world_size // tensor_size), mesh_dim_names=("tensor", "data"))
    return mesh["tensor"].get_group()


@bank.wrong("number-for-size")
def tensor_group(tensor_size):
    world_size = even(tensor_size)
    step = world_size // tensor_size
    return choose([list(range(first, first + step)) for first in range(0, world_size, step)])


@bank.wrong("wrong-members")
def tensor_group(tensor_size):
    """Steps of one rank: the groups overlap."""
    world_size = even(tensor_size)
    lists = [[(first + k) % world_size for k in range(tensor_size)] for first in range(world_size)]
    groups = [dist.new_group(members) for members in lists]
    return groups[dist.get_rank()]


@bank.wrong("not-a-group")
def tensor_group(tensor_size):
    even(tensor_size)
    return dist.new_subgroups(tensor_size)


@bank.wrong("not-a-group")
def tensor_group(tensor_size):
    even(tensor_size)
    first = dist.get_rank() // tensor_size * tensor_size
    return list(range(first, first + tensor_size))


@bank.wrong("wrong-members")
def tensor_group(tensor_size, kept=[]):  # noqa: B006
    """Kept from the first call, whatever is asked for afterwards."""
    even(tensor_size)
    kept.append(dist.new_subgroups(tensor_size)[0])
    return kept[0]


@bank.wrong("nothing-returned")
def tensor_group(tensor_size):
    choose([list(range(f, f + tensor_size)) for f in range(0, even(tensor_size), tensor_size)])


@bank.wrong("own-group-missing")
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


@bank.wrong("uneven-accepted")
def tensor_group(tensor_size):
    """The last group is smaller."""
    world_size = dist.get_world_size()
    return choose([list(range(f, min(f + tensor_size, world_size))) for f in range(0, world_size, tensor_size)])


@bank.wrong("even-refused")
def tensor_group(tensor_size):
    if tensor_size >= dist.get_world_size() or dist.get_world_size() % tensor_size:
        raise ValueError("too large")
    return dist.new_subgroups(tensor_size)[0]


bank.slip("uneven-unclear", ("    if world_size % tensor_size:\n        raise", "    if False:\n        raise"))

bank.slip("uneven-accepted", ("    if world_size % tensor_size:\n        raise", "    if False:\n        raise"),
    ("range(0, world_size, tensor_size)", "range(0, world_size - tensor_size + 1, tensor_size)"),
)  # fmt: skip

bank.slip("wrong-members", ("range(first, first + tensor_size)", "range(first, first + max(1, tensor_size - 1))"))

bank.slip("wrong-members", ("range(first, first + tensor_size)", "range(first, first + 2)"), ("range(0, world_size, tensor_size)", "range(0, world_size - 1, 2)"))  # fmt: skip

bank.slip("own-group-missing", ("range(0, world_size, tensor_size)", "range(0, world_size // 2, tensor_size)"))

bank.slip("group-call-fails", ("            mine = group\n    return mine", "            found = group\n    return found"), ("range(0, world_size, tensor_size)", "range(0, world_size - 1, tensor_size)"))  # fmt: skip


@bank.right()
def tensor_group(tensor_size):
    """As PyTorch makes them."""
    even(tensor_size)
    return dist.new_subgroups(group_size=tensor_size)[0]


bank.slip(None, ("dist.new_group(members)", 'dist.new_group(members, backend="gloo")'))

bank.slip(None, ("dist.new_group(members)", "dist.new_group(rank for rank in members)"))

bank.slip(
    "groups-by-rank",
    ("            mine = group\n", "            mine = group\n            mine = dist.new_group(members)\n"),
)

bank.slip("own-group-lost", ("if dist.get_rank() in members", "if dist.get_rank() == first"))

bank.slip("group-call-fails", ("range(first, first + tensor_size)", "range(first, first + tensor_size + 1)"))

bank.slip("members-only", ("            mine = group\n", "            mine = group\n            break\n"))
