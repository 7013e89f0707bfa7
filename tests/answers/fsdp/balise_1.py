"""Answers to balise 1 of 14_fsdp: shard by block, then the root."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.answers.bank import Bank

bank = Bank("14_fsdp", 1, whole=True)


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def prepare(model, mesh, shard, learning_rate):
    sharded = shard(model, mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=learning_rate, weight_decay=0.1)
    return sharded, optimizer


bank.several(None, shard, prepare)

# ---------------------------------------------------------------- other right designs


def with_embedding_and_head(model, mesh):
    """As torchtitan does: embedding, blocks, and the last norm with the head."""
    tied = model.config.tied_head
    if not tied:
        fully_shard(model.token_embedding, mesh=mesh)
    for block in reversed(list(model.blocks)):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    if not tied:
        fully_shard([model.norm, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepare_with_groups(model, mesh, shard, learning_rate):
    model = shard(model, mesh)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim > 1]},
    ]
    groups = [group for group in groups if group["params"]]
    return [model, torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.1, foreach=False)]


bank.several(None, with_embedding_and_head, prepare_with_groups)


def by_walking(model, mesh):
    kinds = {type(block) for block in model.blocks}
    for module in [m for m in model.modules() if type(m) in kinds]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


bank.several(None, by_walking, prepare)

bank.several(None, lambda model, mesh: [fully_shard(m, mesh=mesh) for m in (*model.blocks, model)][-1], prepare)


def with_prefetch(model, mesh):
    model = shard(model, mesh)
    for block, following in zip(model.blocks, list(model.blocks)[1:]):
        block.set_modules_to_forward_prefetch([following])
    for block, before in zip(list(model.blocks)[1:], model.blocks):
        block.set_modules_to_backward_prefetch([before])
    return model


bank.several(None, with_prefetch, prepare)

# ---------------------------------------------------------------- wrong: what is sharded


def by_slip(slug, *changes, **more):
    bank.slip(slug, *changes, **more)


BLOCKS = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n"

ROOT = "return fully_shard(model, mesh=mesh)"

by_slip("root-only", (BLOCKS, ""))

by_slip("no-root", (ROOT, "return model"))

by_slip("nothing-sharded", (BLOCKS, ""), (ROOT, "return model"))

by_slip("nothing-returned", (ROOT, "fully_shard(model, mesh=mesh)"))

by_slip("block-left-out", ("in model.blocks:", "in model.blocks[:-1]:"))

by_slip("block-left-out", ("in model.blocks:", "in model.blocks[1:]:"))

by_slip("kept-whole", ("fully_shard(block, mesh=mesh)", "fully_shard(block, mesh=mesh, reshard_after_forward=False)"))

by_slip("other-mesh", ("fully_shard(block, mesh=mesh)", "fully_shard(block)"), (ROOT, "return fully_shard(model)"))

by_slip("container", (BLOCKS, "    fully_shard(model.blocks, mesh=mesh)\n"))

by_slip("blocks-together", (BLOCKS, "    fully_shard(list(model.blocks), mesh=mesh)\n"))

by_slip(
    "every-layer",
    (
        BLOCKS,
        "    for m in list(model.modules()):\n        if isinstance(m, nn.Linear):\n            fully_shard(m, mesh=mesh)\n",
    ),
)

by_slip(
    "every-layer",
    (
        BLOCKS,
        "    for b in model.blocks:\n        fully_shard(b.attention, mesh=mesh)\n"
        "        fully_shard(b.feed_forward, mesh=mesh)\n        fully_shard(b, mesh=mesh)\n",
    ),
)

by_slip("root-first", (BLOCKS, "    fully_shard(model, mesh=mesh)\n" + BLOCKS), (ROOT, "return model"))

by_slip("sharded-twice", (BLOCKS, BLOCKS + BLOCKS))


def ddp(model, mesh):
    return DDP(model)


def old(model, mesh):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def input_back(model, mesh):
    return model


def a_copy(model, mesh):
    """Trains a copy: whoever has the model in hand keeps an unsharded one."""
    other = copy.deepcopy(model)
    return shard(other, mesh)


def first_rank_only(model, mesh):
    """Sharded, with other weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return shard(model, mesh)


def halved(model, mesh):
    """On top of the mean that is made already."""
    shard(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0 * dist.get_world_size())
            module.set_force_sum_reduction_for_comms(True)
    return model


def without_sums(model, mesh):
    shard(model, mesh).set_requires_gradient_sync(False)
    return model


class Inside(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        self.attention, self.feed_forward = block.attention, block.feed_forward

    def forward(self, x):
        return self.block(x)


def renamed(model, mesh):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(Inside(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def first_only(model, mesh):
    """The others wait for it."""
    return shard(model, mesh) if dist.get_rank() == 0 else model


bank.several("nothing-sharded", first_only, prepare)

bank.several("replicated", ddp, prepare)

bank.several("old-fsdp", old, prepare)

bank.several("nothing-sharded", input_back, prepare)

bank.several("not-the-model", a_copy, prepare)

bank.several("not-the-model", lambda model, mesh: (shard(model, mesh), mesh), prepare)

bank.several("wrong-loss", first_rank_only, prepare)

bank.several("wrong-weights", halved, prepare)

bank.several("no-gradient", without_sums, prepare)

bank.several("names-changed", renamed, prepare)


def table_by_itself(model, mesh):
    for part in (*model.blocks, model.token_embedding):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def every_child(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    for child in (model.norm, model.head):
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def table_and_whole_blocks(model, mesh):
    """A mistake of the idea after one at the edge."""
    for part in (*model.blocks, model.token_embedding):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


bank.several("kept-whole", table_and_whole_blocks, prepare)

bank.several("tie-cut", table_by_itself, prepare)

bank.several("tie-cut", every_child, prepare, variant=True)

KEPT = []


def with_a_copy(model, mesh):
    """For a comparison afterwards, and never dropped."""
    KEPT.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return shard(model, mesh)


def with_arrays(model, mesh):
    """The same, in NumPy."""
    KEPT.append([p.detach().numpy().copy() for p in model.parameters()])
    return shard(model, mesh)


def with_lists(model, mesh):
    """The same, in lists."""
    KEPT.append([p.tolist() for p in model.parameters()])
    return shard(model, mesh)


def by_dtensor_alone(model, mesh):
    for module in list(model.modules()):
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    return model


bank.several("copy-kept", with_a_copy, prepare)

bank.several("copy-kept", with_arrays, prepare)

bank.several("copy-kept", with_lists, prepare)

bank.several("no-groups", by_dtensor_alone, prepare)

# ---------------------------------------------------------------- wrong: the optimizer

bank.hint(
    "optimizer-first",
    "The optimizer holds parameters that the model no longer has: you made it before `shard` "
    "replaced them, so its steps change nothing. Shard first.",
)

by_slip(
    "optimizer-first",
    (
        "    model = shard(model, mesh)\n",
        "    o = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)\n",
    ),
    (
        "return model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)",
        "return shard(model, mesh), o",
    ),
    variant=True,
)

bank.hint(
    "returned-model-dropped",
    "`prepare` must continue with what its argument `shard` returns: not every such function works in place.",
    edge=True,
)

by_slip("returned-model-dropped", ("    model = shard(model, mesh)\n", "    shard(model, mesh)\n"), variant=True)

bank.hint(
    "shard-not-called",
    "`prepare` must shard with the function that it is given: later balises pass it other functions.",
)

by_slip("shard-not-called", ("    model = shard(model, mesh)\n", ""))

bank.hint(
    "not-adamw",
    "The optimizer must be torch.optim.AdamW with the given learning rate and a weight decay of 0.1.",
)

by_slip("not-adamw", (", weight_decay=0.1", ""))

by_slip("not-adamw", ("lr=learning_rate", "lr=1e-3"))

by_slip("not-adamw", ("torch.optim.AdamW", "torch.optim.Adam"))

bank.hint(
    "part-of-the-parameters",
    "The optimizer has {got} parameters, but the model has {expected} trainable ones.",
)

by_slip("part-of-the-parameters", ("AdamW(model.parameters()", "AdamW(model.blocks.parameters()"), variant=True)

bank.hint(
    "not-a-pair",
    "`prepare` returns two things: the sharded model and its optimizer.",
)

by_slip("not-a-pair", ("return model, torch", "return torch"), variant=True)

by_slip("nothing-returned", ("return model, torch", "model, torch"))


def fixed_shard(model, mesh, shard, learning_rate):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)


bank.several("shard-not-called", shard, fixed_shard, variant=True)

bank.slip("resharded-to-few", ("fully_shard(block, mesh=mesh)",
          "fully_shard(block, mesh=mesh, reshard_after_forward=2 if mesh.size() == 4 else None)"))  # fmt: skip

bank.slip(
    "resharded-to-few", ("fully_shard(block, mesh=mesh)", "fully_shard(block, mesh=mesh, reshard_after_forward=2)")
)

bank.slip("not-adamw", ("torch.optim.AdamW(", "torch.optim.SGD("), variant=True)

bank.edge("names-changed", "other-mesh", "tie-cut")
