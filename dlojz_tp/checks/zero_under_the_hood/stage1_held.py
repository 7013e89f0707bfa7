"""What a rank holds and sends in stage 1, for its check."""

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.zero_under_the_hood.common import (
    ADAMW,
    apart,
    in_two,
    optimizers,
    share_backward,
    sharing,
    states_held,
)
from dlojz_tp.checks.zero_under_the_hood.outside import no_copy
from dlojz_tp.probes.memory import Memory, held_bytes
from dlojz_tp.probes.networks import Chain
from dlojz_tp.probes.outside import Outside
from dlojz_tp.probes.traffic import Traffic, on_the_wire

FIRST = 0.5  # of the parameters are in the first group
SLACK = 3000  # bytes for step counters and single numbers
BYTES = sum(p.numel() * p.element_size() for p in Chain(10, 16).parameters())


def measured(ShardedOptimizer, rank, size):  # noqa: N803
    """What lives after two steps, and what the second one sends."""
    before, model = optimizers(), Chain(10, 16)
    with Outside(BYTES, on=size == 2) as outside, Memory(*model.parameters()) as memory:
        optimizer = ShardedOptimizer(in_two(list(model.parameters()), FIRST), **ADAMW)
        for step in range(2):
            optimizer.zero_grad()
            share_backward(model, step, rank, size, width=16)
            with Traffic() as log:
                optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        alive = memory.settled(_most(size) + apart(optimizer))
        alive = max(alive, held_bytes(optimizer)) - apart(optimizer)  # a NumPy array is no tensor
    states = states_held(before, 2 * -(-BYTES // 8 // size) + 160)
    return {"events": log.events, "outside": outside.kept, "alive": alive, "states": states}


def sending(got, size, where):
    """Raise Wrong where a rank sends more than a reduce-scatter and an all-gather."""
    if (cost := on_the_wire(got["events"])) > 2.4 * BYTES * (size - 1) / size + SLACK:
        raise Wrong("all-reduce-first", found=cost, held=BYTES, where=where)


def _most(size):
    """Bytes that may be alive: parameters, states of one shard, and its gradient, which may stay as zeros."""
    shard = 8 * -(-BYTES // 8 // size)
    return BYTES + 3 * shard + SLACK


def held(ranks, size):
    """Raise Wrong where a rank holds more than parameters, states of one shard, and its gradient."""
    elements = BYTES // 8
    groups = [round(elements * FIRST), elements - round(elements * FIRST)]
    due = 2 * sum(-(-n // size) for n in groups)
    for rank, got in enumerate(ranks):
        where = f"rank {rank} of {size}, {elements} parameters in two groups"
        if (slug := sharing(got["states"], groups, size)) != "shared":
            raise Wrong(slug, found=got["states"], due=due, where=where)
        if got["alive"] > _most(size):
            raise Wrong("hidden-copy", found=got["alive"], due=BYTES + 8 * due, where=where)
        no_copy(got["outside"], BYTES, where)
        if any(left := got["adamw"]["left"]):
            raise Wrong("own-grad-left", k=left.index(True), where=where)
        if names := got["adamw"]["left whole"]:
            raise Wrong("grad-left", name=names[0], where=where)
