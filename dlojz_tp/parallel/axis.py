"""The ranks along one axis of a mesh, and the functions with which a cut layer talks to them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class _Copy(torch.autograd.Function):
    """Forward: x. Backward: the gradients of all ranks of the group, added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _total(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """Forward: the x of all ranks of the group, added up. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx, x, group):
        return _total(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _total(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Axis:
    """The ranks that differ from this one in one coordinate. Call it on each of them.

    group: their process group. ranks: their numbers in the world, in order. rank: this rank's place among them, from 0.
    size: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)

    def copy(self, x: Tensor) -> Tensor:
        """The entrance of what is cut: x, whose gradient is the sum of all ranks' gradients."""
        return x if self.size == 1 else _Copy.apply(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """The exit of what is cut: the sum of all ranks' x."""
        return x if self.size == 1 else _Sum.apply(x, self.group)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor, a view. Raises ValueError for a size that the ranks do not divide."""
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{self.size} ranks do not divide a size of {tensor.shape[dim]}")
        return tensor.chunk(self.size, dim)[self.rank]


@dataclass(frozen=True)
class Mesh:
    """A rank's groups: one for each axis, and `ends`, first and last stage of its pipeline (else None)."""

    tensor: Axis
    data: Axis
    pipeline: Axis
    ends: Axis | None
