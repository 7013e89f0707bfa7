"""Answers to 14_fsdp: mixed precision, recomputation, what stays whole, offload (balises 2 to 5)."""

import functools

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.answers.bank import Bank

bank = Bank("14_fsdp", whole=True)


def plain(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# ---------------------------------------------------------------- balise 2: mixed precision

HALF, FULL = torch.bfloat16, torch.float32


@bank.wrong(2, "output-too-early")
def shard_mixed(model, mesh):
    """One policy for all."""
    return plain(model, mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))


@bank.wrong(2, "root-in-full")
def shard_mixed(model, mesh):  # noqa: F811
    """What one comes to by trying until no error is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))
    return fully_shard(model, mesh=mesh)


@bank.wrong(2, "blocks-in-full")
def shard_mixed(model, mesh):  # noqa: F811
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(FULL, FULL, output_dtype=HALF))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))


@bank.right(2)
def shard_mixed(model, mesh):  # noqa: F811
    """The logits cast by a hook."""
    model.head.register_forward_hook(lambda module, args, logits: logits.float())
    return plain(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL))


@bank.right(2)
def shard_mixed(model, mesh):  # noqa: F811
    """Embedding and head in groups of their own."""
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL)
    root = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL, output_dtype=FULL, cast_forward_inputs=False)
    if not model.config.tied_head:
        fully_shard(model.token_embedding, mesh=mesh, mp_policy=policy)
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=root)
    return model


@bank.right(2)
def shard_mixed(model, mesh):  # noqa: F811
    """The model may come in another dtype: first float32, then the policy."""
    model.float()
    for module in [*model.blocks, model]:
        out = FULL if module is model else None
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, output_dtype=out))
    return model


BLOCK_POLICY = "fully_shard(block, mesh=mesh, mp_policy=policy)"
ROOT_POLICY = "return fully_shard(model, mesh=mesh, mp_policy=last)"
bank.slip(2, "policy-missing", (BLOCK_POLICY, "fully_shard(block, mesh=mesh)"))
bank.slip(2, "policy-missing", (ROOT_POLICY, "return fully_shard(model, mesh=mesh)"))
bank.slip(2, "computes-in-full", (", mp_policy=policy", ""), (", mp_policy=last", ""))
bank.slip(2, "computes-in-full", ("param_dtype=torch.bfloat16, ", ""))
bank.slip(2, "reduces-in-half", (", reduce_dtype=torch.float32", ""))
bank.slip(2, "reduces-in-half", ("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"))
bank.slip(2, "logits-in-half", (", output_dtype=torch.float32", ""))
bank.slip(2, "another-half", ("torch.bfloat16", "torch.float16"))
bank.slip(2, "root-only", (f"        {BLOCK_POLICY}\n", "        pass\n"))
bank.slip(2, "policy-missing", (ROOT_POLICY, "return model"))
bank.slip(
    2,
    None,
    (
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "torch.bfloat16, torch.float32, cast_forward_inputs=False)",
    ),
    ("output_dtype=torch.float32)", "output_dtype=torch.float32, cast_forward_inputs=False)"),
)
bank.slip(2, "shards-in-half", ("    for block in", "    model.bfloat16()\n    for block in"))


@bank.wrong(2, "shards-in-half")
def shard_mixed(model, mesh):  # noqa: F811
    return plain(model.to(HALF), mesh)


@bank.wrong(2, "gathers-in-full")
def shard_mixed(model, mesh):  # noqa: F811
    """autocast around the forward: products in bf16, and nothing else."""
    plain(model, mesh)
    inner = model.forward

    def forward(tokens):
        with torch.autocast("cpu", dtype=HALF):
            return inner(tokens).float()

    model.forward = forward
    return model


@bank.wrong(2, "nothing-sharded")
def shard_mixed(model, mesh):  # noqa: F811
    return model


# ---------------------------------------------------------------- balise 3: recomputation


@bank.right(3)
def shard_recomputed(model, mesh, every=1):
    """The wrapper outside the sharded block: the same gathers, once wrapped by PyTorch."""
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh)
        if index % every == 0:
            model.blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return fully_shard(model, mesh=mesh)


@bank.right(3)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """The forward of a block replaced."""
    for block in model.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return plain(model, mesh)


@bank.right(3)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """PyTorch's walk over the modules."""
    chosen = {id(block) for block in model.blocks[::every]}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return plain(model, mesh)


@bank.right(3)
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """The composable form."""
    from torch.distributed._composable import checkpoint as composable

    for block in model.blocks[::every]:
        composable(block)
    return plain(model, mesh)


WRAP = "model.blocks[index] = checkpoint_wrapper(model.blocks[index])"
bank.slip(3, "nothing-again", (WRAP, "checkpoint_wrapper(model.blocks[index])"))
bank.slip(3, "nothing-again", (WRAP, "pass"))
bank.slip(3, "every-ignored", ("len(model.blocks), every)", "len(model.blocks), 1)"))
bank.slip(3, "other-blocks", ("range(0, len", "range(every - 1, len"))
bank.slip(3, "other-blocks", ("range(0, len(model.blocks), every)", "range(0, len(model.blocks) // every)"))
bank.slip(3, None, (WRAP, f"{WRAP}\n        {WRAP}"))  # the outer one saves nothing and never runs again
bank.slip(3, "part-again", (WRAP, "b = model.blocks[index]; b.feed_forward = checkpoint_wrapper(b.feed_forward)"))
bank.slip(3, "part-again", (WRAP, "b = model.blocks[index]; b.attention = checkpoint_wrapper(b.attention)"))
bank.slip(3, "nothing-returned", ("return fully_shard(model", "fully_shard(model"))
bank.slip(3, "root-only", ("fully_shard(block, mesh=mesh)", "pass"))
bank.slip(
    3,
    "nothing-sharded",
    ("fully_shard(block, mesh=mesh)", "pass"),
    ("return fully_shard(model, mesh=mesh)", "return model"),
)


@bank.wrong(3, "whole-model-again")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
    return plain(model, mesh)


@bank.wrong(3, "twice-again")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    for block in model.blocks[::every]:
        inner = functools.partial(checkpoint, block.forward, use_reentrant=True)
        block.forward = functools.partial(checkpoint, inner, use_reentrant=True)
    return plain(model, mesh)


@bank.wrong(3, "more-kept")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    """A selective checkpoint that keeps the result of every product."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def products(_ctx, op, *_args, **_options):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    keep = functools.partial(create_selective_checkpoint_contexts, products)
    for index in range(0, len(model.blocks), every):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index], context_fn=keep)
    return plain(model, mesh)


@bank.wrong(3, "more-kept")
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


@bank.wrong(3, "reentrant")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    for block in model.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    return plain(model, mesh)


@bank.wrong(3, "names-changed")
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


@bank.wrong(3, "parameters-gone")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks[::every])
    return plain(model, mesh)


@bank.wrong(3, "not-the-model")
def shard_recomputed(model, mesh, every=1):  # noqa: F811
    return checkpoint_wrapper(plain(model, mesh))


# ---------------------------------------------------------------- balise 4: what stays whole


@bank.right(4)
def shard_kept(model, mesh, kept):
    """Set afterwards."""
    plain(model, mesh)
    for block in list(model.blocks)[len(model.blocks) - kept :]:
        block.set_reshard_after_forward(False, recurse=False)
    return model


@bank.right(4)
def shard_kept(model, mesh, kept):  # noqa: F811
    for distance, block in enumerate(reversed(model.blocks)):
        fully_shard(block, mesh=mesh, reshard_after_forward=not distance < kept)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


@bank.right(4)
def shard_kept(model, mesh, kept):  # noqa: F811
    """Two loops."""
    cut = len(model.blocks) - kept
    for block in model.blocks[:cut]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    for block in model.blocks[cut:]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


FREED = "reshard_after_forward=index < first"
bank.slip(4, "kept-ignored", (f", {FREED}", ""))
bank.slip(4, "kept-ignored", (FREED, "reshard_after_forward=False"))
bank.slip(4, "all-or-none", (FREED, "reshard_after_forward=not kept"))
bank.slip(4, "first-kept", (FREED, "reshard_after_forward=index >= kept"))
bank.slip(4, "the-others-kept", (FREED, "reshard_after_forward=index >= first"))
bank.slip(4, "other-blocks-kept", (FREED, "reshard_after_forward=index <= first"))
bank.slip(4, "other-blocks-kept", (FREED, "reshard_after_forward=index < first - 1"))
bank.slip(4, "smaller-world", (FREED, "reshard_after_forward=kept"))
bank.slip(4, "root-only", (f"fully_shard(block, mesh=mesh, {FREED})", "pass"))
bank.slip(4, "no-root", ("return fully_shard(model, mesh=mesh)", "return model"))
bank.slip(4, "nothing-returned", ("return fully_shard(model, mesh=mesh)", "fully_shard(model, mesh=mesh)"))


@bank.wrong(4, "none-means-all")
def shard_kept(model, mesh, kept):  # noqa: F811
    last = list(model.blocks)[-kept:]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not any(block is other for other in last))
    return fully_shard(model, mesh=mesh)


@bank.wrong(4, "never-freed")
def shard_kept(model, mesh, kept):  # noqa: F811
    plain(model, mesh)
    for block in list(model.blocks)[len(model.blocks) - kept :]:
        block.set_reshard_after_forward(False)
        block.set_reshard_after_backward(False)
    return model


@bank.wrong(4, "gathered-again")
def shard_kept(model, mesh, kept):  # noqa: F811
    """Gathered for show: whole after forward, freed and fetched once more before backward."""
    plain(model, mesh)
    blocks = list(model.blocks)
    for block in blocks[len(blocks) - kept :]:
        block.set_reshard_after_forward(False)

    def again(gradient):
        for block in blocks:
            if isinstance(block, FSDPModule):
                block.reshard()
        return gradient

    model.head.register_forward_hook(lambda m, args, out: out.register_hook(again) and None)
    return model


@bank.wrong(4, "nothing-sharded")
def shard_kept(model, mesh, kept):  # noqa: F811
    return model


# ---------------------------------------------------------------- balise 5: offload


@bank.right(5)
def shard_offloaded(model, mesh, pin):
    return plain(model, mesh, offload_policy=CPUOffloadPolicy(pin))


@bank.right(5)
def shard_offloaded(model, mesh, pin):  # noqa: F811
    """Every group its own policy, and embedding and head in groups of their own."""
    parts = [] if model.config.tied_head else [model.token_embedding, [model.norm, model.head]]
    for part in [*parts, *model.blocks, model]:
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=bool(pin)))
    return model


@bank.right(5)
def shard_offloaded(model, mesh, pin):  # noqa: F811
    if pin:
        return plain(model, mesh, offload_policy=CPUOffloadPolicy())
    return plain(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


BLOCK, ROOT = (
    "fully_shard(block, mesh=mesh, offload_policy=policy)",
    "fully_shard(model, mesh=mesh, offload_policy=policy)",
)
bank.slip(5, "root-offloaded", (BLOCK, "fully_shard(block, mesh=mesh)"))
bank.slip(5, "blocks-offloaded", (ROOT, "fully_shard(model, mesh=mesh)"))
bank.slip(5, "not-offloaded", (BLOCK, "fully_shard(block, mesh=mesh)"), (ROOT, "fully_shard(model, mesh=mesh)"))
bank.slip(5, "pinned-always", ("pin_memory=pin", ""))
bank.slip(5, "pinned-always", ("pin_memory=pin", "pin_memory=True"))
bank.slip(5, "never-pinned", ("pin_memory=pin", "pin_memory=False"))
bank.slip(5, "no-policy", ("CPUOffloadPolicy(pin_memory=pin)", "CPUOffloadPolicy"))
bank.slip(5, "no-policy", ("CPUOffloadPolicy(pin_memory=pin)", "'cpu'"))
bank.slip(5, "root-only", (BLOCK, "pass"))
bank.slip(5, "no-root", (f"return {ROOT}", "return model"))
bank.slip(5, "nothing-returned", (f"return {ROOT}", ROOT))


@bank.wrong(5, "not-offloaded")
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return plain(model.cpu(), mesh)


@bank.wrong(5, "not-offloaded")
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return plain(model, mesh, offload_policy=OffloadPolicy())


@bank.wrong(5, "nothing-sharded")
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return model.cpu()
