"""Answers to 17_tensor_slicing: copy, sum and gather within a group."""

import contextlib

import torch
import torch.distributed as dist

from dlojz_tp.judging.checks.tensor_slicing.common import CheckRanks
from tests.answers.bank import Bank

bank = Bank("17_tensor_slicing", 9, whole=True)


def reduced(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Own(CheckRanks):
    """part and own_random as in the notebook; the rest is each answer's."""

    copy = sum = gather = None


@bank.right()
class GroupRanks(Own):
    """Straight-through tricks in the place of functions of its own, and a hook for the gradient."""

    def copy(self, x):
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: reduced(gradient, self.group))
        return y

    def sum(self, x):
        others = reduced(x.detach(), self.group) - x.detach()
        return x + others

    def gather(self, x, dim=-1):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.group)
        parts[self.rank] = x
        return torch.cat(parts, dim)


@bank.right()
class GroupRanks(Own):
    """Functions made anew for each group, which they close over; gather is a sum of parts with zeros around them."""

    def __init__(self, group):
        super().__init__(group)
        members = dist.get_process_group_ranks(group)
        self.rank, self.size = members.index(dist.get_rank()), len(members)

        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return reduced(gradient, group)

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return reduced(x, group)

            @staticmethod
            def backward(ctx, gradient):
                return gradient.clone()

        self.copy, self.sum = Copy.apply, Sum.apply

    def gather(self, x, dim=-1):
        zeros = [torch.zeros_like(x) for _ in range(self.size)]
        zeros[self.rank] = x
        return self.sum(torch.cat(zeros, dim))


@bank.right()
class GroupRanks(Own):
    """PyTorch's functional collectives, which return what they reduced."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, now):
            ctx.group, ctx.now = group, now
            return GroupRanks_reduce(x, group) if now else x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return (gradient if ctx.now else GroupRanks_reduce(gradient, ctx.group)), None, None

    def copy(self, x):
        return self.Both.apply(x, self.group, False)

    def sum(self, x):
        return self.Both.apply(x, self.group, True)

    def gather(self, x, dim=-1):
        return CheckRanks.gather(self, x, dim)


def GroupRanks_reduce(x, group):  # noqa: N802
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    return wait_tensor(all_reduce(x.contiguous(), "sum", group))


@bank.right()
class GroupRanks(CheckRanks):
    """Functional collectives that nobody waits for: the first that uses the result does."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            from torch.distributed._functional_collectives import all_reduce

            return all_reduce(gradient.contiguous(), "sum", ctx.group), None

    def copy(self, x):
        return self.Copy.apply(x, self.group)


@bank.right()
class GroupRanks(CheckRanks):
    """Waits by itself; a group of one sends nothing."""

    def sum(self, x):
        if self.size == 1:
            return x
        return super().sum(x)


WORLD = dist.group
SUM_FORWARD = "dist.all_reduce(result, group=group)"
COPY_BACKWARD = "dist.all_reduce(result, group=ctx.group)"
ROUND = "self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)"

bank.slip(None, ("gradient.chunk(", "gradient.tensor_split("))
bank.hint("rank-of-world", "`rank` is not this rank's number in the group. Among the ranks {members}, it is {rank}: "
          "use dist.get_rank(group).")  # fmt: skip
bank.slip(
    "rank-of-world",
    ("self.rank, self.size = group, dist.get_rank(group)", "self.rank, self.size = group, dist.get_rank()"),
)
bank.slip("rank-of-world", (ROUND, "self.group, self.size = group, dist.get_world_size(group)"))
bank.hint("size-of-world", "`size` is the size of the world. The group has {size} ranks: use "
          "dist.get_world_size(group).")  # fmt: skip
bank.slip("size-of-world", (ROUND, ROUND.replace("dist.get_world_size(group)", "dist.get_world_size()")))
bank.slip("size-of-world", (ROUND, "self.group = group"), variant=True)
bank.hint("place-in-group", "`rank` and `size` must be those within the group, here {rank} of {size}.")
bank.slip(
    "place-in-group",
    (ROUND, "self.group, self.rank, self.size = group, dist.get_world_size(group), dist.get_rank(group)"),
    variant=True,
)
bank.hint("forward-over-world", "In forward, {name} adds up over all ranks of the world. Only the group holds the "
          "parts of one model: pass `group=` to the collective.")  # fmt: skip
bank.slip("forward-over-world", (SUM_FORWARD, "dist.all_reduce(result)"))
bank.hint("backward-over-world", "Forward is right, but in backward {name} adds up over all ranks of the world. Keep "
          "the group in `ctx` for backward.")  # fmt: skip
bank.slip("backward-over-world", (COPY_BACKWARD, "dist.all_reduce(result)"))
bank.slip("forward-over-world", (SUM_FORWARD, "dist.all_reduce(result)"), (COPY_BACKWARD, "dist.all_reduce(result)"))
bank.slip("forward-over-world", ("SumOverGroup.apply(x, self.group)", "SumOverRanks.apply(x)"), variant=True)
bank.slip("backward-over-world", ("CopyToGroup.apply(x, self.group)", "CopyToRanks.apply(x)"), variant=True)
bank.hint("gather-over-world", "`gather` puts the parts of all ranks of the world side by side, not only those of "
          "the group.")  # fmt: skip
bank.slip("gather-over-world", ("GatherFromGroup.apply(x, dim, self.group)", "GatherFromRanks.apply(x, dim)"))
bank.slip("gather-over-world", ("range(dist.get_world_size(group))", "range(dist.get_world_size())"),
    ("dist.all_gather(parts, x.contiguous(), group=group)", "dist.all_gather(parts, x.contiguous())"),
    variant=True,
)  # fmt: skip
bank.slip(
    "rank-of-world",
    (
        "self.rank, self.size = group, dist.get_rank(group)",
        "self.rank, self.size = group, dist.get_rank() % dist.get_world_size(group)",
    ),
    variant=True,
)
bank.hint("group-not-in-ctx", "This is right while only one group is in use. If another group is used before "
          "backward, copy adds up over that other group. Keep the group in `ctx`, which is separate for each call, "
          "not in the class or a global.")  # fmt: skip
bank.slip("group-not-in-ctx", ("ctx.group = group\n        return x.view_as", "CopyToGroup.group = group\n        return x.view_as"), (COPY_BACKWARD, "dist.all_reduce(result, group=CopyToGroup.group)"))  # fmt: skip
bank.slip("group-not-in-ctx", ("ctx.group = group\n        return x.view_as", "globals()['LAST'] = group\n        return x.view_as"), (COPY_BACKWARD, "dist.all_reduce(result, group=LAST)"), variant=True)  # fmt: skip
bank.slip("gradient-for-group", ("return result, None\n", "return result\n"))
bank.slip("gradient-for-group", ("return gradient, None\n", "return gradient\n"))
bank.slip("gradient-for-group", ("part.contiguous(), None, None", "part.contiguous(), None"))
bank.hint("group-not-summed", "{name} gave this rank's own values {way}. They must be added up over the group.")
bank.slip("group-not-summed", (COPY_BACKWARD, "pass"))
bank.slip("group-not-summed", (SUM_FORWARD, "pass"), variant=True)
bank.hint("group-mean", "This is the mean over the group. Parts are added up, without a division.")
bank.slip("group-mean", (SUM_FORWARD, SUM_FORWARD + "\n        result /= dist.get_world_size(group)"))
bank.slip(
    "group-mean",
    (COPY_BACKWARD, COPY_BACKWARD + "\n        result /= dist.get_world_size()"),
    (COPY_BACKWARD, "dist.all_reduce(result)"),
    variant=True,
)
bank.hint("group-summed-twice", "{name} also adds up {way}, where nothing has to travel. Look at balise 1 again.")
bank.slip("group-summed-twice", ("        result = x.clone", "        ctx.group = group\n        result = x.clone"),
    ("        return gradient, None", f"        gradient = gradient.clone()\n        {COPY_BACKWARD.replace('result', 'gradient')}\n        return gradient, None"),
)  # fmt: skip
bank.hint("group-in-place", "{what} was overwritten. Others may still need the tensor: reduce a copy.")
bank.slip("group-in-place", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x.contiguous()"))
bank.slip(
    "group-in-place",
    ("result = gradient.clone(memory_format=torch.contiguous_format)", "result = gradient.contiguous()"),
    variant=True,
)
bank.hint("group-layout", "The result is right for contiguous tensors, but wrong for transposed ones. Make them "
          "contiguous before the collective.")  # fmt: skip
bank.slip(
    "group-layout",
    (
        "result = x.clone(memory_format=torch.contiguous_format)",
        "result = torch.empty_strided(x.shape, torch.empty(x.shape).stride(), dtype=x.dtype).view(-1).copy_(torch.as_strided(x, (x.numel(),), (1,)) if min(x.stride()) else x.flatten()).view(x.shape)",
    ),
)
bank.slip(
    "rank-of-peer",
    (COPY_BACKWARD, "dist.reduce(result, 0, group=ctx.group)\n        dist.broadcast(result, 0, group=ctx.group)"),
)
bank.slip("nothing-returned", ("        return SumOverGroup", "        SumOverGroup"))


bank.hint("sent-beyond-group", "The values are right, but {name} ran in a group of {found} ranks, and the group has "
          "{size}. The other ranks wait for nothing.")  # fmt: skip


@bank.wrong("sent-beyond-group", variant=True)
class GroupRanks(CheckRanks):
    """Gathers from the whole world, and adds up those of the group."""

    def sum(self, x):
        members, own = dist.get_process_group_ranks(self.group), x.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return x + sum(parts[r] for r in members if r != dist.get_rank())


bank.hint("group-sent-twice", "{name} calls {n} collectives {way}. One is enough.")


@bank.wrong("group-sent-twice", variant=True)
class GroupRanks(CheckRanks):
    """From each rank in turn."""

    def sum(self, x):
        total = torch.zeros_like(x)
        for k in range(self.size):
            part = x.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(part, group=self.group, group_src=k)
            total = total + (x if k == self.rank else part)
        return total


bank.hint("group-wrong", "{name}: {what} is not what it should be.")


@bank.wrong("group-wrong")
class GroupRanks(CheckRanks):
    """Gathers along the wrong dimension."""

    def gather(self, x, dim=-1):
        return super().gather(x, 0)


@bank.wrong("group-wrong", variant=True)
class GroupRanks(CheckRanks):
    """The other way round."""

    def gather(self, x, dim=-1):
        return torch.cat(super().gather(x, dim).chunk(self.size, dim)[::-1], dim)


@bank.wrong("graph-cut")
class GroupRanks(CheckRanks):
    """Knows nothing of autograd."""

    def sum(self, x):
        return reduced(x.detach(), self.group)


bank.hint("group-sends-back", "The values are right, but {name} calls {call} {way}, where nothing has to travel. See "
          "the drawing of balise 1.")  # fmt: skip


@bank.wrong("group-sends-back")
class GroupRanks(CheckRanks):
    """Makes sure forward that all have the same x: it is so already."""

    def copy(self, x):
        reduced(x.detach(), self.group)
        return super().copy(x)


@bank.wrong("group-sends-back")
class GroupRanks(CheckRanks):
    """The mean of equal gradients, which is each of them."""

    def sum(self, x):
        y = super().sum(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: reduced(gradient, self.group) / self.size)
        return y


@bank.wrong("group-sends-back", variant=True)
class GroupRanks(CheckRanks):
    """The gradient of gather adds up what all ranks have alike."""

    def gather(self, x, dim=-1):
        y = super().gather(x, dim)
        if y.requires_grad:
            y.register_hook(lambda gradient: reduced(gradient, self.group) / self.size)
        return y


bank.hint("group-sent-too-much", "{name} moves {sent} bytes per rank {way}, but {least} are enough. An all-gather "
          "followed by a sum sends every part to every rank. An all-reduce avoids that.")  # fmt: skip


@bank.wrong("group-sent-too-much")
class GroupRanks(CheckRanks):
    """Gathers all parts and adds them up."""

    def sum(self, x):
        own = x.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.group)
        return x + (sum(parts) - own)


@bank.wrong("group-sent-too-much", variant=True)
class GroupRanks(CheckRanks):
    """One message with the values twice."""

    def sum(self, x):
        twice = reduced(torch.stack([x.detach(), x.detach()]), self.group)
        return x + (twice[1] - x.detach())


bank.hint("gather-dimension", "`gather` always puts the parts side by side along the last dimension, whatever `dim` "
          "is.")  # fmt: skip


@bank.wrong("gather-dimension")
class GroupRanks(CheckRanks):
    """Has forgotten `dim`."""

    def gather(self, x, dim=-1):
        return super().gather(x, -1)


bank.slip(
    "gather-dimension",
    ("GatherFromGroup.apply(x, dim, self.group)", "GatherFromGroup.apply(x, -1, self.group)"),
    variant=True,
)


bank.hint("own-random-lost", "`own_random` gives the ranks {members} the same random numbers, or changes the random "
          "numbers drawn outside it. The one of `Ranks` is already right.")  # fmt: skip


@bank.wrong("own-random-lost")
class GroupRanks(CheckRanks):
    """All ranks draw alike."""

    def own_random(self):
        return contextlib.nullcontext()


@bank.wrong("own-random-lost", variant=True)
class GroupRanks(CheckRanks):
    """Begins anew each time."""

    @contextlib.contextmanager
    def own_random(self):
        with torch.random.fork_rng():
            torch.manual_seed(self.rank)
            yield


bank.hint("group-not-kept", "Keep the group as `group`: later cells use it.")


@bank.wrong("group-not-kept", variant=True)
class GroupRanks(CheckRanks):
    """Under another name."""

    group = None


bank.slip("group-forgotten", ("        ctx.group = group\n", ""))
bank.slip("group-forgotten", ("self.group, self.rank, self.size = group, dist", "self.rank, self.size = dist"))
bank.slip(
    "ranks-as-group",
    ("dist.all_reduce(result, group=ctx.group)", "dist.all_reduce(result, group=GroupRanks(ctx.group))"),
)
PART = "part = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]"
bank.slip("group-layout", ("x.clone(memory_format=torch.contiguous_format)", "x.clone()"), variant=True)
bank.slip("index-of-world", (PART, PART.replace("[dist.get_rank(ctx.group)]", "[dist.get_rank()]")))
bank.slip("group-summed-twice", (PART, "gradient = gradient.contiguous()\n        dist.all_reduce(gradient, group=ctx.group)\n        " + PART), variant=True)  # fmt: skip
HALVES = """flat = result.flatten()
        part = flat.new_empty(len(flat) // dist.get_world_size(group))
        dist.reduce_scatter_tensor(part, flat, group=group)
        dist.all_gather_into_tensor(flat, part, group=group)
        result = flat.view(x.shape)"""
bank.slip(None, ("dist.all_reduce(result, group=group)", HALVES))

REDUCED = "dist.all_reduce(result, group=ctx.group)"
bank.slip("group-not-waited", (REDUCED, REDUCED.replace(")", ", async_op=True)", 1)))
bank.slip("gradient-for-group", ("return result, None", "return result, ctx.group"))
