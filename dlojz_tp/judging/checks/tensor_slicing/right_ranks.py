"""What the notebook calls `Ranks`, right by construction: the checks hand it to an answer."""

import contextlib

import torch
import torch.distributed as dist


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.size, ctx.rank, ctx.dim = dist.get_world_size(group), dist.get_rank(group), dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.tensor_split(ctx.size, ctx.dim)[ctx.rank].contiguous(), None, None


class CheckRanks:
    """What the notebook calls `Ranks`, right by construction, for all ranks or those of `group`."""

    def __init__(self, group=None):
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        world_rank = dist.distributed_c10d.get_rank()
        self.stream = torch.Generator().manual_seed(1000 + world_rank).get_state()

    @property
    def group(self):
        """The process group, which `GroupRanks` has."""
        return self._group

    def copy(self, x):
        """x; its gradient is added up over the ranks."""
        return _Copy.apply(x, self._group)

    def sum(self, x):
        """Sum of x over the ranks; its gradient passes as it is."""
        return _Sum.apply(x, self._group)

    def gather(self, x, dim=-1):
        """The parts of all ranks side by side; each gets its part of the gradient."""
        return _Gather.apply(x, self._group, dim)

    def part(self, tensor, dim):
        """A view of this rank's part of `tensor` along `dim`. Raises ValueError where the size does not divide."""
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{self.size} ranks do not divide a size of {tensor.shape[dim]}")
        return tensor.chunk(self.size, dim)[self.rank]

    @contextlib.contextmanager
    def own_random(self):
        """Inside, random numbers of this rank's own stream; outside, all ranks draw alike."""
        common = torch.get_rng_state()
        torch.set_rng_state(self.stream)
        try:
            yield
        finally:
            self.stream = torch.get_rng_state()
            torch.set_rng_state(common)


class _Sequence(torch.autograd.Function):
    """All-gather along dimension 1; with `cut` the mirror of it, a sum of which each rank keeps its part."""

    @staticmethod
    def forward(ctx, x, group, cut):
        ctx.group, ctx.cut = group, cut
        return _summed_part(x, group) if cut else _whole(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _whole(gradient, ctx.group) if ctx.cut else _summed_part(gradient, ctx.group), None, None


def _whole(x, group):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def _summed_part(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class LayerRanks(CheckRanks):
    """What a layer is handed: the notebook's `Ranks` has no `group` yet when it is written."""

    @property
    def group(self):
        """Absent, as in the notebook."""
        raise AttributeError("'Ranks' object has no attribute 'group'")

    def others(self, kind):
        """Ranks of another kind, for the same group."""
        return kind(self._group)


class SequenceCheckRanks(LayerRanks):
    """What balise 12 asks for, right by construction: `copy` makes the sequence whole, `sum` cuts it."""

    def copy(self, x):
        """(b, s / N, d) -> (b, s, d)."""
        return _Sequence.apply(x, self._group, False)

    def sum(self, x):
        """(b, s, d) -> (b, s / N, d), summed over the ranks."""
        return _Sequence.apply(x, self._group, True)
