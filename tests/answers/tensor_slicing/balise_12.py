"""Answers to 17_tensor_slicing: sequence parallelism."""

import torch
import torch.distributed as dist

from dlojz_tp.judging.checks.tensor_slicing.common import CheckRanks
from tests.answers.bank import Bank, before

bank = Bank("17_tensor_slicing", 12, whole=True)
RIGHT = before(bank.work, 13)
COMMON = RIGHT["sum_common_gradients"]
SequenceRight = RIGHT["SequenceRanks"]


class Mirror(torch.autograd.Function):
    """A function and its mirror, given as functions of a tensor."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.backward(gradient), None, None


def classes(slug, variant=False):
    """Decorator: this class, with right gradients of what is common."""
    return lambda kind: bank.several(slug, kind, COMMON, variant=variant) or kind


def gradients(slug, variant=False):
    """Decorator: this treatment of the gradients, with the right class."""
    return lambda function: bank.several(slug, SequenceRight, function, variant=variant)


def gathered(x, group, dim=1):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def scattered(x, group, dim=1):
    n = dist.get_world_size(group)
    if x.shape[dim] % n:
        raise ValueError(f"{n} ranks do not divide {x.shape[dim]} tokens")
    parts = [part.contiguous() for part in x.chunk(n, dim)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=group)
    return result


def all_reduced(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@classes(None)
class SequenceClosed(CheckRanks):
    """One autograd function for both."""

    def gathered(self, x):
        return gathered(x, self.group)

    def scattered(self, x):
        return scattered(x, self.group)

    def copy(self, x):
        return Mirror.apply(x, self.gathered, self.scattered)

    def sum(self, x):
        return Mirror.apply(x, self.scattered, self.gathered)


@classes(None)
class SequenceFirst(CheckRanks):
    """With the sequence moved to the front, as Megatron-LM holds it, and an all-to-all in the place of the reduce-scatter."""

    def copy(self, x):
        return Mirror.apply(x, self.whole, self.mine)

    def sum(self, x):
        return Mirror.apply(x, self.mine, self.whole)

    def whole(self, x):
        return gathered(x.transpose(0, 1), self.group, 0).transpose(0, 1)

    def mine(self, x):
        assert x.shape[1] % self.size == 0, "the ranks do not divide the sequence"
        x_sbd = x.transpose(0, 1).contiguous()
        arriving = torch.empty_like(x_sbd)
        dist.all_to_all_single(arriving, x_sbd, group=self.group)
        return arriving.unflatten(0, (self.size, -1)).sum(0).transpose(0, 1)


@classes(None)
class SequenceDifferentiable(CheckRanks):
    """PyTorch's functional collectives."""

    def whole(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor, wait_tensor

        return wait_tensor(all_gather_tensor(x.contiguous(), 1, self.group))

    def mine(self, x):
        from torch.distributed._functional_collectives import reduce_scatter_tensor, wait_tensor

        self.part(x, 1)
        return wait_tensor(reduce_scatter_tensor(x.contiguous(), "sum", 1, self.group))

    def copy(self, x):
        return Mirror.apply(x, self.whole, self.mine)

    def sum(self, x):
        return Mirror.apply(x, self.mine, self.whole)


@classes(None)
class SequenceLazy(SequenceDifferentiable):
    """Nobody waits for the functional collectives: the first that uses the result does."""

    def whole(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor

        return all_gather_tensor(x.contiguous(), 1, self.group)

    def mine(self, x):
        from torch.distributed._functional_collectives import reduce_scatter_tensor

        self.part(x, 1)
        return reduce_scatter_tensor(x.contiguous(), "sum", 1, self.group)


@classes(None)
class SequenceAutograd(CheckRanks):
    """PyTorch's differentiable functional collectives."""

    def copy(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        return all_gather_tensor_autograd(x.contiguous(), 1, self.group)

    def sum(self, x):
        from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd

        self.part(x, 1)
        return reduce_scatter_tensor_autograd(x.contiguous(), "sum", 1, self.group)


@gradients(None)
def sum_one_by_one(parameters, ranks):
    for p in parameters:
        if p.grad is not None:
            p.grad = all_reduced(p.grad, ranks.group)


@gradients(None)
def sum_asynchronous(parameters, ranks):
    works = [(p, p.grad.contiguous()) for p in parameters if p.grad is not None]
    works = [(p, message, dist.all_reduce(message, group=ranks.group, async_op=True)) for p, message in works]
    for p, message, work in works:
        work.wait()
        p.grad.copy_(message)


# mistakes in the class

GATHER, SCATTER = "GatherSequence.apply(x, self.group)", "ScatterSequence.apply(x, self.group)"
FORWARD_GATHER, BACKWARD_SCATTER = "gather_parts(x_bsd, 1, group)", "sum_to_parts(gradient_bsd, 1, ctx.group)"
FORWARD_SCATTER, BACKWARD_GATHER = "sum_to_parts(x_bsd, 1, group)", "gather_parts(gradient_bsd, 1, ctx.group)"
REFUSE = "        self.part(x, 1)  # refuses a sequence that does not divide\n"
MINE = ".chunk(dist.get_world_size({group}), 1)[dist.get_rank({group})].contiguous()"

bank.hint("sequence-unchanged", "`{name}` returned a tensor of the same shape. A rank holds s / N tokens outside the "
          "sliced layers and s inside: copy makes the sequence whole, sum cuts it.")  # fmt: skip
bank.slip("sequence-unchanged", (GATHER, "super().copy(x)"))
bank.slip("sequence-unchanged", (SCATTER, "super().sum(x)"), variant=True)
bank.hint("sequence-dimension", "You put the parts together, or cut them, along another dimension. The sequence is "
          "dimension 1 of (b, s, d).")  # fmt: skip
bank.slip("sequence-dimension", (FORWARD_GATHER, "gather_parts(x_bsd, 0, group)"))
bank.slip("sequence-dimension", (FORWARD_GATHER, "gather_parts(x_bsd, -1, group)"))
bank.slip("sequence-dimension", (FORWARD_SCATTER, "sum_to_parts(x_bsd, 2, group)"), variant=True)
bank.hint("sequence-shape", "backward returned a gradient of another shape than its input: {error}")
bank.slip("sequence-shape", (BACKWARD_SCATTER, "sum_to_parts(gradient_bsd, 2, ctx.group)"))
bank.slip("sequence-shape", (BACKWARD_GATHER, "gather_parts(gradient_bsd, 0, ctx.group)"))
bank.slip("sequence-shape", (BACKWARD_GATHER, "gradient_bsd"), variant=True)
bank.hint("sequence-over-world", "All ranks of the world took part in {name}. Only the group holds this sequence.")
bank.slip("sequence-over-world", (GATHER, "GatherSequence.apply(x, None)"))
bank.slip("sequence-over-world", (SCATTER, "ScatterSequence.apply(x, None)"))
bank.hint("slice-without-sum", "In backward, each rank kept its part of *its own* gradient. Every rank used the "
          "whole sequence in its own slice of the layer, so add up the gradients before you cut them.")  # fmt: skip
bank.slip("slice-without-sum", (BACKWARD_SCATTER, "gradient_bsd" + MINE.format(group="ctx.group")), variant=True)
bank.hint("sequence-not-summed", "sum returns this rank's own values, cut. Add up the ranks' partial results.")
bank.slip("sequence-not-summed", (FORWARD_SCATTER, "x_bsd" + MINE.format(group="group")), variant=True)
bank.hint("sequence-mean", "This is a mean over the ranks: you divide by {n}. Parts are added up, without a "
          "division.")  # fmt: skip
bank.slip("sequence-mean", (FORWARD_SCATTER, FORWARD_SCATTER + " / dist.get_world_size(group)"))
bank.slip("sequence-mean", (BACKWARD_SCATTER, BACKWARD_SCATTER + " / dist.get_world_size(ctx.group)"))
bank.slip("sequence-mean", (BACKWARD_GATHER, BACKWARD_GATHER + " / dist.get_world_size(ctx.group)"), variant=True)
bank.hint("sequence-times-n", "The gradient of {name} is {n} times too large: you added it up, but it should only be "
          "gathered.")  # fmt: skip
bank.slip("sequence-times-n", (BACKWARD_GATHER, BACKWARD_GATHER + " * dist.get_world_size(ctx.group)"), variant=True)
bank.hint("scatter-backward-local", "The backward of sum returns only this rank's part of the gradient. Each rank "
          "needs the gradient of all tokens: gather the parts.")  # fmt: skip
bank.slip("scatter-backward-local", (
    BACKWARD_GATHER, "torch.cat([gradient_bsd] * dist.get_world_size(ctx.group), 1)",
))  # fmt: skip
bank.slip("scatter-backward-local", (
    BACKWARD_GATHER,
    "torch.cat([gradient_bsd * (r == dist.get_rank(ctx.group)) for r in range(dist.get_world_size(ctx.group))], 1)",
), variant=True)  # fmt: skip
bank.hint("sequence-uneven", "{size} ranks do not divide a sequence of {length} tokens, but the answer was {error}. "
          "Raise a ValueError (`self.part` does).")  # fmt: skip
bank.slip("sequence-uneven", (REFUSE, ""), variant=True)
bank.slip("gradient-for-group", (BACKWARD_SCATTER + ", None", BACKWARD_SCATTER))
bank.slip("nothing-returned", ("return " + GATHER, GATHER))
bank.slip("nothing-returned", ("return " + SCATTER, SCATTER))
bank.hint("sequence-wrong", "{name}: {what} is not what it should be.")
bank.slip("sequence-wrong", (FORWARD_GATHER, "gather_parts(x_bsd, 1, group).flip(1)"), variant=True)


@classes("sequence-over-world", variant=True)
class SequenceBackwardWorld(SequenceClosed):
    """Backward, the sum of all ranks of the world."""

    def copy(self, x):
        return Mirror.apply(x, self.gathered, lambda gradient: self.part(all_reduced(gradient, None), 1))


bank.hint("reduced-then-cut", "The numbers are right, but {name} moves {sent} bytes per rank {way}, where {least} "
          "are enough. An all-reduce followed by a cut throws away most of what it sends. A reduce-scatter avoids "
          "that.")  # fmt: skip


@classes("reduced-then-cut", variant=True)
class SequenceReduced(CheckRanks):
    """All-reduce, then throw away."""

    def copy(self, x):
        return Mirror.apply(x, lambda x: gathered(x, self.group), self.cut)

    def sum(self, x):
        return Mirror.apply(x, self.cut, lambda x: gathered(x, self.group))

    def cut(self, x):
        return self.part(all_reduced(x, self.group), 1).contiguous()


bank.hint("padded-then-summed", "The numbers are right, but {name} moves {sent} bytes per rank {way}, where {least} "
          "are enough. An all-reduce of parts padded with zeros sends twice as much as an all-gather of the "
          "parts.")  # fmt: skip


@classes("padded-then-summed", variant=True)
class SequencePadded(CheckRanks):
    """Gathers by adding up parts with zeros around them."""

    def copy(self, x):
        return Mirror.apply(x, self.whole, lambda gradient: scattered(gradient, self.group))

    def sum(self, x):
        return Mirror.apply(x, lambda x: scattered(x, self.group), self.whole)

    def whole(self, x):
        parts = [torch.zeros_like(x) for _ in range(self.size)]
        parts[self.rank] = x
        return all_reduced(torch.cat(parts, 1), self.group)


# mistakes with the gradients

PARTS = "gradient.copy_(part.view_as(gradient))"
bank.hint("common-silent", "The gradients in `parameters` are still this rank's own: they come only from this rank's "
          "tokens.")  # fmt: skip
bank.slip("common-silent", (PARTS, "gradient = part.view_as(gradient)"))
bank.slip("common-silent", ("    dist.all_reduce(message, group=ranks.group)\n", ""))
bank.hint("common-mean", "You divide these gradients by the number of ranks. Each comes from other tokens of the "
          "*same* loss, so they are parts of a sum.")  # fmt: skip
bank.slip("common-mean", (PARTS, "gradient.copy_(part.view_as(gradient) / ranks.size)"))
bank.hint("common-over-world", "You added up the gradients over the whole world, but the other groups see other "
          "data.")  # fmt: skip
bank.slip("common-over-world", ("message, group=ranks.group", "message"), variant=True)
bank.hint("common-gathered", "The gradients are right, but sum_common_gradients moves {sent} bytes per rank, where "
          "an all-reduce moves {least}. Gathering first and then adding up sends every rank's gradients to every "
          "rank.")  # fmt: skip
bank.slip(
    "common-gathered",
    (
        "    dist.all_reduce(message, group=ranks.group)\n",
        "    parts = [torch.empty_like(message) for _ in range(ranks.size)]\n"
        "    dist.all_gather(parts, message, group=ranks.group)\n    message = torch.stack(parts).sum(0)\n",
    ),
    variant=True,
)
bank.hint("common-no-gradient", "A frozen or unused parameter has p.grad None. Leave it out.")
bank.slip("common-no-gradient", (" if p.grad is not None]\n    message", "]\n    message"))


@gradients("common-mean", variant=True)
def mean_over_world(parameters, ranks):
    for p in parameters:
        if p.grad is not None:
            p.grad = all_reduced(p.grad, None) / dist.get_world_size()


@gradients("common-silent", variant=True)
def does_nothing(parameters, ranks):
    pass


bank.hint("common-cut", "You called ranks.{name} for these gradients. In SequenceRanks it works on a sequence: it "
          "would cut them, or put them side by side. Each rank needs their whole sum: use an all-reduce over "
          "ranks.group.")  # fmt: skip


@gradients("common-cut", variant=True)
def cut_with_the_sequence(parameters, ranks):
    """`sum` of these ranks cuts what it sums."""
    for p in parameters:
        if p.grad is not None:
            p.grad = ranks.sum(p.grad)


@gradients("common-no-gradient", variant=True)
def for_all(parameters, ranks):
    for p in parameters:
        dist.all_reduce(p.grad, group=ranks.group)


@gradients(None)
def with_the_sum_of_the_group(parameters, ranks):
    """`sum` as GroupRanks has it."""
    for p in parameters:
        if p.grad is not None:
            p.grad = super(SequenceRight, ranks).sum(p.grad)


COMMON = "dist.all_reduce(message, group=ranks.group)"
bank.slip("group-not-waited", (COMMON, COMMON.replace(")", ", async_op=True)")))
bank.slip("reduced-in-place", (COMMON, f"message = {COMMON}"))
