"""Answers to balise 3 of 14_fsdp: recompute activations."""

import functools

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.answers.bank import Bank
from tests.answers.fsdp.options import plain

bank = Bank("14_fsdp", 3, whole=True)


@bank.right()
def shard_recomputed(model, mesh, every=1):
    """The wrapper outside the sharded block: the same gathers, once wrapped by PyTorch."""
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh)
        if index % every == 0:
            model.blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return fully_shard(model, mesh=mesh)


@bank.right()
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """The forward of a block replaced."""
    for block in model.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return plain(model, mesh)


@bank.right()
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """PyTorch's walk over the modules."""
    chosen = {id(block) for block in model.blocks[::every]}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return plain(model, mesh)


@bank.right()
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """The composable form."""
    from torch.distributed._composable import checkpoint as composable

    for block in model.blocks[::every]:
        composable(block)
    return plain(model, mesh)


WRAP = "model.blocks[index] = checkpoint_wrapper(model.blocks[index])"

bank.hint(
    "nothing-again",
    "No block runs again in backward: all activations were kept, on the GPU or elsewhere. `checkpoint_wrapper` makes "
    "a new module, which counts only once it is in the model. With every=1, each block is one of these modules.",
)
bank.slip("nothing-again", (WRAP, "checkpoint_wrapper(model.blocks[index])"))

bank.slip("nothing-again", (WRAP, "pass"), variant=True)

bank.hint(
    "every-ignored",
    "With every={every}, all blocks run again. The argument says how many blocks apart the checkpointed ones are.",
    edge=True,
)
bank.slip("every-ignored", ("len(model.blocks), every)", "len(model.blocks), 1)"), variant=True)

bank.hint(
    "other-blocks",
    "With every={every}, blocks {expected} should run again in backward, but {got} do.",
    edge=True,
)
bank.slip("other-blocks", ("range(0, len", "range(every - 1, len"))

bank.slip("other-blocks", ("range(0, len(model.blocks), every)", "range(0, len(model.blocks) // every)"), variant=True)

bank.slip(None, (WRAP, f"{WRAP}\n        {WRAP}"))  # the outer one saves nothing and never runs again

bank.hint("part-again", "Only a part of block {index} runs again ({got}). Only its input should be kept.")
bank.slip("part-again", (WRAP, "b = model.blocks[index]; b.feed_forward = checkpoint_wrapper(b.feed_forward)"))

bank.slip("part-again", (WRAP, "b = model.blocks[index]; b.attention = checkpoint_wrapper(b.attention)"), variant=True)

bank.slip("nothing-returned", ("return fully_shard(model", "fully_shard(model"))

bank.slip("root-only", ("fully_shard(block, mesh=mesh)", "pass"))

bank.slip(
    "nothing-sharded",
    ("fully_shard(block, mesh=mesh)", "pass"),
    ("return fully_shard(model, mesh=mesh)", "return model"),
)

bank.hint(
    "whole-model-again",
    "The whole model runs again in backward, including the head: it is one segment, whose activations all exist at "
    "once. Checkpoint the blocks.",
)


@bank.wrong("whole-model-again", variant=True)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
    return plain(model, mesh)


bank.hint("twice-again", "Block {index} runs {got} times in backward. Once is enough: did you wrap it twice?")


@bank.wrong("twice-again", variant=True)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    for block in model.blocks[::every]:
        inner = functools.partial(checkpoint, block.forward, use_reentrant=True)
        block.forward = functools.partial(checkpoint, inner, use_reentrant=True)
    return plain(model, mesh)


bank.hint(
    "more-kept",
    "Blocks run again in backward, but forward keeps more than their inputs: {got}, where {expected} would do.",
)


@bank.wrong("more-kept")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """A selective checkpoint that keeps the result of every product."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def products(_ctx, op, *_args, **_options):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    keep = functools.partial(create_selective_checkpoint_contexts, products)
    for index in range(0, len(model.blocks), every):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index], context_fn=keep)
    return plain(model, mesh)


@bank.wrong("more-kept", variant=True)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """Runs again for nothing: what it saves is not used."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, block, x):
            ctx.block = block
            ctx.save_for_backward(x)
            return y.view_as(y)

        @staticmethod
        def backward(ctx, gradient):
            ctx.block(ctx.saved_tensors[0])
            return gradient, None, None

    for block in model.blocks[::every]:
        inner = block.forward
        block.forward = lambda x, inner=inner: Twice.apply(inner(x), inner, x.detach())
    return plain(model, mesh)


bank.hint(
    "reentrant",
    "Block {index} got no gradient, because its input needs none (the embedding isn't trained): the reentrant form "
    "of checkpoint looks only at its inputs. Use `use_reentrant=False`.",
    edge=True,
)


@bank.wrong("reentrant", variant=True)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    for block in model.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    return plain(model, mesh)


@bank.wrong("root-only")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """A mistake of the idea after one at the edge."""
    for block in model.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    return fully_shard(model, mesh=mesh)


@bank.wrong("names-changed")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    class Again(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    for index in range(0, len(model.blocks), every):
        model.blocks[index] = Again(model.blocks[index])
    return plain(model, mesh)


@bank.wrong("parameters-gone")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks[::every])
    return plain(model, mesh)


@bank.wrong("not-the-model")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    return checkpoint_wrapper(plain(model, mesh))


bank.edge("names-changed")
