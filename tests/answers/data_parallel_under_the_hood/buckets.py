"""What answers to balises 3, 4 share."""

import torch.distributed as dist


def mean(t):
    dist.all_reduce(t)
    return t.div_(dist.get_world_size())


def in_two_halves(flat):
    """The mean: each rank adds up one part, then the parts are handed on. Padded to equal parts."""
    n = dist.get_world_size()
    each = -(-flat.numel() // n)
    whole, part = flat.new_zeros(n * each), flat.new_empty(each)
    whole[: flat.numel()] = flat
    dist.reduce_scatter_tensor(part, whole)
    dist.all_gather_into_tensor(whole, part / n)
    return whole[: flat.numel()]
