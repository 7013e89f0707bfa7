"""Looks at one Unit by itself, and at a layer whose weight is frozen, for the check of stage 3."""

import torch
from torch import nn

from dlojz_tp.checking import Wrong
from dlojz_tp.probes.traffic import Traffic, counted_waits, sent
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "gathered-again": "gather() was called twice, and sent twice. Where the values are there already, it does nothing.",
    "gathers-nothing": "Rank {rank} gathers nothing: gather() must fill `flat` from the `own` of all ranks.",
    "gather-in-flight": "gather() returned while its all-gather was still on its way: the layer would compute with what is not there "
    "yet. Wait for it.",
}


def small(Unit, ShardedParameters):  # noqa: N803
    """What a unit does when it is gathered twice; what a layer with a frozen weight leaves after reduce()."""
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    optimizer = ShardedParameters([layer], lr=0.1)
    p = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))
    unit = Unit([p])
    with Withheld(), Traffic() as log, counted_waits() as waits:
        unit.gather()
        once, there = len(sent(log.events)), p.numel() == 6 and p.flatten().tolist() == [1, 2, 3, 4, 5, 6]
        if not there and len(waits) < once:
            raise Wrong("gather-in-flight")
        unit.gather()
        twice = len(sent(log.events))
    unit.free()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.reduce()
    return {"calls": (once, twice), "frozen": layer.weight.untyped_storage().nbytes()}


def sound(got, where):
    """Raise Wrong where a unit is gathered again, or the frozen weight of a first layer outlives reduce()."""
    once, twice = got["calls"]
    if twice > once:
        raise Wrong("gathered-again", where=where)
    if got["frozen"]:
        raise Wrong("frozen-kept", where=f"{where}, a first layer with a frozen weight, after reduce()")
