"""What the checks of this work share: its hints, what is no own work, what lives between two steps."""

import functools

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking.borrowed import refusing
from dlojz_tp.judging.probes.memory import held_bytes
from dlojz_tp.judging.probes.networks import rows

TOLERANCE = 1e-6
rows = functools.partial(rows, width=6, seed=200)
ADAMW = {"lr": 0.05, "weight_decay": 0.1}

HINTS = {
    "nothing-travels": "Rank {rank} sent nothing: each rank trains on its own. reduce() needs a reduce-scatter of "
    "the gradients, update() an all-gather of the parameters.",
    "not-gathered": "After step(), rank {rank} has updated its own shard, but the other shards are still the old "
    "ones. Gather the shards of all ranks into the flat tensor that the parameters are views of.",
    "sum-not-mean": "own.grad holds the sum over the ranks. The loss is a mean over the whole batch: divide by world_size.",
    "mean-divided-twice": "own.grad is the mean divided by world_size a second time.",
    "no-shard-gradient": "After reduce(), own.grad of shard {k} is {found}. It must be the shard of the mean "
    "gradient, of shape (n / world_size,): the optimizer reads it there.",
    "wrong-shard-gradient": "After reduce(), the gradients of the shards, put end to end, are not the mean gradient.",
    "none-gradient": "A parameter that was not used has p.grad None ({error}). Count it as zero. And to free a "
    "gradient, set p.grad = None; zero_() does not free it.",
    "gradients-pile-up": "The first step is right, but the second is not: it still contains the gradient of the "
    "first. zero_grad() must free p.grad and own.grad.",
    "frozen-trained": "A frozen parameter changed. Leave out parameters with requires_grad False: weight decay "
    "would shrink them.",
    "weights-differ": "After {steps} steps the weights differ from those of {word} in one process: {names}.",
    "states-whole": "This rank holds {found} elements of optimizer states, as many as a single process would. It "
    "should update only its shard: {due} elements. Give the optimizer part.own, not the parameters.",
    "states-unequal": "This rank holds {found} elements of optimizer states; ⌈n / world_size⌉ for each group makes "
    "{due}. Cut the flat tensor, not the list of parameters: then all shards have the same "
    "length.",
    "first-group-shared": "This rank holds {found} elements of optimizer states; ⌈n / world_size⌉ for each group "
    "makes {due}. The first group is sharded, but the second one is whole on every rank: "
    "each group needs its parts.",
    "hidden-copy": "After a step and zero_grad(), {got} bytes are alive; the parameters, the states of one shard "
    "and its gradient make {expected:.0f} at most. A full copy of the parameters, the gradients or "
    "the states is kept.",
    "copy-outside": "This rank keeps {found} bytes in NumPy arrays, lists or bytes objects; the whole makes "
    "{whole}. A copy outside tensors is still a copy: keep no more than this rank's shard, plus "
    "the parameters where the stage keeps them.",
    "zero-borrowed": "{what} does this work for you. Here you write it yourself: use reduce_scatter and all_gather.",
    "parts-missing": "self.{name} does not exist. The text above the class says what it must hold: later balises "
    "use it.",
    "in-graph": "Autograd records this: {error} A shard and its parameters are nn.Parameter. Whatever you write "
    "into them or gather from them must stay outside any graph: use own.detach(), or torch.no_grad().",
    "ranks-waiting": "The ranks hung. All of them must call the same collectives, in the same order and with the "
    "same sizes. {error}",
}


def own_work():
    """Inside, what PyTorch has of ZeRO raises Borrowed."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    owners = ZeroRedundancyOptimizer, DistributedDataParallel, fsdp.FullyShardedDataParallel, FSDPState
    return refusing(*((o, "__init__", "fully_shard" if o is FSDPState else o.__name__) for o in owners))


def apart(optimizer) -> int:
    """Bytes of the shards that are no views of a larger tensor."""
    sizes = [(own.untyped_storage().nbytes(), own.numel() * own.element_size()) for own in optimizer.shards]
    return sum(size for size, own in sizes if size == own)


def alive_between(memory, model, optimizer, most: int) -> int:
    """Bytes that live between two steps, gradients cleared, besides shards that are no views. most: how many may."""
    optimizer.zero_grad()
    model.zero_grad()
    alive = memory.settled(most + apart(optimizer))
    return max(alive, held_bytes(optimizer)) - apart(optimizer)  # a NumPy array is no tensor


def in_two(parameters, first: float) -> list[dict]:
    """Two groups, of which the first has this part of the parameters; the rates differ."""
    count = round(first * len(parameters))
    return [{"params": parameters[:count]}, {"params": parameters[count:], "lr": 0.02}]


def gradient_shards(optimizer) -> list[torch.Tensor]:
    """Copies of the gradients of the shards, in their order."""
    return [None if own.grad is None else own.grad.detach().clone() for own in optimizer.shards]


def world() -> tuple[int, int]:
    """(rank, world size)"""
    return dist.get_rank(), dist.get_world_size()
