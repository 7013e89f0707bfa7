"""Answers to balise 10 of 17_tensor_slicing: data groups."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.groups import choose, even

bank = Bank("17_tensor_slicing", 10, whole=True)


@bank.wrong("uneven-asserted")
def data_group(tensor_size):
    assert not dist.get_world_size() % tensor_size
    groups = [dist.new_group(range(k, dist.get_world_size(), tensor_size)) for k in range(tensor_size)]
    return groups[dist.get_rank() % tensor_size]


@bank.wrong("made-twice")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(rank % tensor_size, world_size, tensor_size)) for rank in range(world_size)])


@bank.wrong("own-group-missing")
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


# across


@bank.right()
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([[rank for rank in range(world_size) if rank % tensor_size == k] for k in range(tensor_size)])


@bank.right()
def data_group(tensor_size):
    world_size = even(tensor_size)
    mesh = init_device_mesh("cpu", (world_size // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    return mesh.get_group("data")


@bank.right()
def data_group(tensor_size):
    world_size = even(tensor_size)
    lists = [list(range(k, world_size, tensor_size)) for k in range(tensor_size)]
    return dist.new_subgroups_by_enumeration(lists)[0]


@bank.right()
def data_group(tensor_size):
    """Only the members call, and PyTorch is told so."""
    world_size = even(tensor_size)
    members = range(dist.get_rank() % tensor_size, world_size, tensor_size)
    return dist.new_group(list(members), use_local_synchronization=True)


bank.hint("neighbours-again", "These ranks are neighbours, so they hold different slices of one copy of the model. "
          "Ranks that hold the same slice are {step} apart.")  # fmt: skip


@bank.wrong("neighbours-again")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return choose([list(range(f, f + tensor_size)) for f in range(0, world_size, tensor_size)])


@bank.wrong("neighbours-again", variant=True)
def data_group(tensor_size):
    """As many neighbours as there are data ranks."""
    world_size = even(tensor_size)
    return dist.new_subgroups(world_size // tensor_size)[0]


@bank.wrong("number-for-size")
def data_group(tensor_size):
    """As many ranks as a tensor group has, far apart."""
    world_size = even(tensor_size)
    step = world_size // tensor_size
    return choose([list(range(first, world_size, step)) for first in range(step)])


@bank.wrong("members-only")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return dist.new_group(list(range(dist.get_rank() % tensor_size, world_size, tensor_size)))


@bank.wrong("group-order")
def data_group(tensor_size):
    world_size, mine = even(tensor_size), dist.get_rank() % tensor_size
    order = [mine, *(k for k in range(tensor_size) if k != mine)]
    return choose([list(range(k, world_size, tensor_size)) for k in order])


@bank.wrong("outside-group")
def data_group(tensor_size):
    world_size = even(tensor_size)
    return [dist.new_group(list(range(k, world_size, tensor_size))) for k in range(tensor_size)][0]


@bank.wrong("world-group")
def data_group(tensor_size):
    return dist.new_group(list(range(even(tensor_size))))


@bank.wrong("wrong-members")
def data_group(tensor_size):
    """The first rank of the own group, with the others' same place: one place off."""
    world_size = even(tensor_size)
    groups = [dist.new_group(list(range(k, world_size, tensor_size))) for k in range(tensor_size)]
    return dist.new_group([dist.get_rank()], use_local_synchronization=True) if groups else None


@bank.wrong("not-a-group")
def data_group(tensor_size):
    return list(range(dist.get_rank() % tensor_size, even(tensor_size), tensor_size))


@bank.wrong("uneven-accepted")
def data_group(tensor_size):
    world_size = dist.get_world_size()
    return choose([list(range(k, world_size, tensor_size)) for k in range(min(tensor_size, world_size))])


bank.slip("nothing-returned", ("    return mine", "    mine"))

bank.slip(
    "wrong-members",
    ("range(first, world_size, tensor_size)", "range(first, max(first + 1, world_size - 1), tensor_size)"),
)


@bank.wrong("outside-group")
def data_group(tensor_size):
    """The list of groups read at the row, where it has one for each column."""
    even(tensor_size)
    groups = [dist.new_group(list(range(k, dist.get_world_size(), tensor_size))) for k in range(tensor_size)]
    return groups[dist.get_rank() // tensor_size]
