"""Answers to balise 4 of 14_fsdp: what stays gathered between forward and backward."""

from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
)

from tests.answers.bank import Bank
from tests.answers.fsdp.options import plain

bank = Bank("14_fsdp", 4, whole=True)

bank.hint(
    "other-blocks-kept",
    "Asked to keep {kept} blocks, you should keep blocks {expected} whole after forward, but you keep {got}.",
)
bank.text(
    "other-blocks-kept",
    """
def shard_kept(model, mesh, kept):
    n_blocks = len(model.blocks)
    if not 0 <= kept <= n_blocks:
        raise ValueError(f"kept must be between 0 and {n_blocks}, got {kept}")
    for index, block in enumerate(model.blocks):
        stays_whole = (index + 1) * kept // n_blocks > index * kept // n_blocks  # evenly spread
        fully_shard(block, mesh=mesh, reshard_after_forward=not stays_whole)
    return fully_shard(model, mesh=mesh)
""",
)


@bank.right()
def shard_kept(model, mesh, kept):
    """Set afterwards."""
    plain(model, mesh)
    for block in list(model.blocks)[len(model.blocks) - kept :]:
        block.set_reshard_after_forward(False, recurse=False)
    return model


@bank.right()
def shard_kept(model, mesh, kept):  # noqa: F811
    for distance, block in enumerate(reversed(model.blocks)):
        fully_shard(block, mesh=mesh, reshard_after_forward=not distance < kept)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


@bank.right()
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

bank.hint("kept-ignored", "Asked to keep {kept} blocks, you keep {got} of {blocks}, as with every other number.")
bank.slip("kept-ignored", (f", {FREED}", ""))
bank.slip("kept-ignored", (FREED, "reshard_after_forward=False"), variant=True)

bank.hint(
    "all-or-none",
    "Asked to keep {kept} of {blocks} blocks, you keep {got}: one truth value for all of them. Each block has its "
    "own call, and so its own answer.",
)
bank.slip("all-or-none", (FREED, "reshard_after_forward=not kept"), variant=True)

bank.hint(
    "first-kept",
    "You keep the first {kept} blocks whole. Backward begins with the last blocks: keep those, because they are "
    "needed at once and freed first.",
)
bank.slip("first-kept", (FREED, "reshard_after_forward=index >= kept"), variant=True)

bank.hint(
    "the-others-kept",
    "Asked to keep {kept} of {blocks} blocks, you keep the others. `reshard_after_forward` says what is *freed*.",
)
bank.slip("the-others-kept", (FREED, "reshard_after_forward=index >= first"), variant=True)
bank.slip("other-blocks-kept", (FREED, "reshard_after_forward=index <= first"))
bank.slip("other-blocks-kept", (FREED, "reshard_after_forward=index < first - 1"), variant=True)

bank.hint(
    "smaller-world",
    "`reshard_after_forward` got a number ({error}). A number means the size of a smaller group of ranks to shard "
    "over, not a number of blocks.",
)
bank.slip("smaller-world", (FREED, "reshard_after_forward=kept"), variant=True)
bank.slip("root-only", (f"fully_shard(block, mesh=mesh, {FREED})", "pass"))
bank.slip("no-root", ("return fully_shard(model, mesh=mesh)", "return model"))
bank.slip("nothing-returned", ("return fully_shard(model, mesh=mesh)", "fully_shard(model, mesh=mesh)"))

bank.hint(
    "none-means-all",
    "Asked to keep no block, you keep all {blocks}. A slice that begins at -0 begins at 0.",
    edge=True,
)


@bank.wrong("none-means-all", variant=True)
def shard_kept(model, mesh, kept):  # noqa: F811
    last = list(model.blocks)[-kept:]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not any(block is other for other in last))
    return fully_shard(model, mesh=mesh)


bank.hint(
    "never-freed",
    "Block {index} is still whole after backward: between steps, a rank should hold only its shards.",
)


@bank.wrong("never-freed", variant=True)
def shard_kept(model, mesh, kept):  # noqa: F811
    plain(model, mesh)
    for block in list(model.blocks)[len(model.blocks) - kept :]:
        block.set_reshard_after_forward(False)
        block.set_reshard_after_backward(False)
    return model


bank.hint(
    "gathered-again",
    "Backward gathers {got} times, but at most {expected} are needed: blocks that were kept are gathered again.",
)


@bank.wrong("gathered-again", variant=True)
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


@bank.wrong("nothing-sharded")
def shard_kept(model, mesh, kept):  # noqa: F811
    return model
