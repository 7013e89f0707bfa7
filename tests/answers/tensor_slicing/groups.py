"""What answers to balises 8, 10 share."""

import torch.distributed as dist


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
