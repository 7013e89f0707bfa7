"""Balise 5: parameters that a rank holds only while their layer computes."""

from functools import cache

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, at_most, silent
from dlojz_tp.judging.checks.zero_under_the_hood.common import ADAMW, own_work, rows, world
from dlojz_tp.judging.checks.zero_under_the_hood.training_looks import differing, equal
from dlojz_tp.judging.checks.zero_under_the_hood.trainings import STEPS, flat
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.probes.memory import Memory, held_bytes
from dlojz_tp.judging.probes.networks import Chain, Unlike, plain_shares
from dlojz_tp.judging.probes.outside import Outside
from dlojz_tp.judging.probes.shared_looks import each_rank
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits, on_the_wire
from dlojz_tp.judging.probes.withheld import Withheld

PASSES = 1, 2, 1  # backward passes in each step
DEPTH, WIDTH = 16, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 8  # bytes
BYTES, TRAINED = DEPTH * LAYER, DEPTH * LAYER // 2
SLACK = 3000  # bytes: activations of one row, single numbers
EMPTY = ("not allocated", "setStorage", "size mismatch", "shape", "must match", "invalid for input", "out of bounds",
         "must be a matrix", "2-D", "dimension", "size of tensor")  # fmt: skip
KNOWN = (
    ("SIGSEGV", "freed-memory-read"),
    ("_Failed: forward of last", "tied-missing"),
    (("setStorage", "in update"), "gathered-after-update"),
    ("_Failed: forward", "empty-in-forward"),
    ("_Failed: backward", "empty-in-backward"),
)


class _Failed(Exception):  # noqa: N818
    """Forward or backward failed for want of parameters."""


def observe(Unit, ShardedParameters):  # noqa: N803
    """On a rank: a unit by itself; a training of odd layers; what is alive, and sent, in a chain of equal ones."""
    rank, size = world()
    with own_work():
        model = Unlike()
        optimizer = ShardedParameters(list(model.children()), **ADAMW)
        found = {"unit": _unit(Unit), "weights": []}
        if found["unit"]["early"]:
            return found  # the memory that it would compute with may be gone
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(sum(PASSES[:step]), sum(PASSES[: step + 1])):
                loss = _tried(model, "forward", model, rows(part)[rank::size])
                _tried(model, "backward", loss.backward)
            optimizer.reduce()
            optimizer.update()
            with torch.no_grad():
                _tried(model, "forward", model, rows(0))
            found["weights"].append(flat(model.seen))
            found["evaluated"] = sum(p.numel() > 0 and p.untyped_storage().nbytes() > 0 for p in model.parameters())
        known = {id(p) for group in optimizer.optimizer.param_groups for p in group["params"]}
        found["frozen known"] = len(known & {id(unit.own) for unit in optimizer.frozen})
        found["foreign"] = len(known) - found["frozen known"] - len(known & {id(own) for own in optimizer.shards})
        return found | (_measured(ShardedParameters, rank, size) if size > 1 else {})


def _unit(Unit):  # noqa: N803
    """What gathering sends, once and twice; whether it returned before what it sent for was there."""
    p = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))
    unit = Unit([p])
    with Withheld(), Traffic() as log, counted_waits() as waits:
        unit.gather()
        held = p.untyped_storage().nbytes()
        once, early = len(log.calls), len(waits) < len(log.calls) and p.flatten().tolist() != [1, 2, 3, 4, 5, 6]
        unit.gather()
    return {"once": once, "twice": len(log.calls), "early": early, "bytes": held}


def _tried(model, what, work, *args):
    try:
        return work(*args)
    except RuntimeError as error:
        if any(word in str(error) for word in EMPTY):
            raise _Failed(f"{what} of {getattr(model, 'at', 'a layer')}: {str(error).splitlines()[0]}") from error
        raise


def _measured(ShardedParameters, rank, size):  # noqa: N803
    model, found = Chain(DEPTH, WIDTH), {}
    frozen, trained = [layer.weight for layer in model.layers[1::2]], [layer.weight for layer in model.layers[::2]]
    frozen.append(model.layers[0].bias)
    for p in (*frozen, *(layer.bias for layer in model.layers[1::2])):
        p.requires_grad_(False)
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] + rank

    def whole(parameters):
        """How many are in memory at the moment."""
        return sum(p.numel() > 0 and p.untyped_storage().nbytes() > 0 for p in parameters)

    with Outside(BYTES, on=size == 2) as outside, Memory(*model.parameters()) as memory:
        optimizer = ShardedParameters(list(model.layers), **ADAMW)
        made = whole(frozen)
        for _ in range(2):
            optimizer.zero_grad()
            between = max(memory.settled(_between(size)), held_bytes(optimizer))
            found |= {"between": between, "frozen between": whole(frozen), "trained between": whole(trained)}
            memory.reset()
            with Traffic() as log:
                loss = _tried(model, "forward", model, x)
                found |= {"in forward": memory.peak - between, "whole after forward": whole(frozen) + whole(trained)}
                found["after forward"] = memory.settled(between + 2.5 * LAYER + 2 * SLACK) - between
                memory.reset()
                _tried(model, "backward", loss.backward)
                found |= {"in backward": memory.peak - between, "frozen after backward": whole(frozen)}
                del loss
                optimizer.reduce()
                reduced = whole(trained)
                optimizer.update()
    return found | {
        "frozen made": made, "whole after reduce": reduced, "fetched": whole(trained) - reduced,
        "cost": on_the_wire(log.events), "outside": outside.kept,
    }  # fmt: skip


def _between(size):
    """Bytes between two steps: the shards of all parameters, and two moments of those that are trained."""
    return 2 * (BYTES / size + 8 * DEPTH) + 2 * LAYER + SLACK


@cache
def _truth(size):
    optimizer_of = lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], **ADAMW)  # noqa: E731
    _, weights = plain_shares(Unlike, optimizer_of, rows, size, PASSES)
    return torch.stack([flat({**one, "last.weight": one["first.weight"]}) for one in weights])


START = dict(Unlike().named_parameters(remove_duplicate=False))
IS_FROZEN = torch.cat([torch.full((p.numel(),), name in Unlike.FROZEN) for name, p in START.items()])


def _weights(ranks):
    return torch.stack([torch.stack(rank["weights"]) for rank in ranks])


def _due(size):
    return _truth(size)[1:].expand(size, -1, -1)


def _moved(seen, _):
    return not equal(seen[:, -1], flat(START).expand(len(seen), -1))


def _gathers_or_right(seen, due):
    """Whether every rank has gathered something, or the weights are right."""
    return len(due) == 1 or min(seen[0]) > 0 or equal(seen[1], due)


def _gathers_nothing(seen, due):
    return silent(seen, due) | {"rank": seen[0].index(0)}


def _few_bytes(got, _):
    return got["bytes"] <= 36


def _bytes(got, _):
    return {"got": f"{got['bytes']} bytes", "expected": "24 bytes", "where": "6 numbers of float32"}


def _once(got, _):
    return got["twice"] == got["once"]


def _again(got, _):
    return {"got": got["twice"], "expected": got["once"]}


LOOKS = [
    each_rank("what forward sees after three steps: the weights of AdamW in one process", "unit", None, "gather-in-flight",
         holds=lambda got, _: not got["early"], fields=silent),
    Look("", _weights, _due, "stale-parameters", holds=_moved, fields=differing(START, "AdamW")),
    Look("", lambda ranks: ([rank["unit"]["once"] for rank in ranks], _weights(ranks)), _due, "gathers-nothing",
         holds=_gathers_or_right, fields=_gathers_nothing),
    Look("", _weights, _due, "frozen-decayed",
         holds=lambda seen, due: equal(seen[..., IS_FROZEN], due[..., IS_FROZEN]) or not equal(seen[..., ~IS_FROZEN], due[..., ~IS_FROZEN])),
    Value("", _weights, _due, "weights-differ", holds=equal, fields=differing(START, "AdamW")),
    each_rank("between steps: this rank's shards and their states, nothing else", "fetched", 0, "gathered-after-update", holds=at_most),
    each_rank("", "trained between", 3, "never-freed", holds=at_most),
    each_rank("", "frozen made", 0, "frozen-whole"),
    each_rank("", "frozen known", 0, "frozen-known"),
    each_rank("", "foreign", 0, "states-not-shared"),
    each_rank("", "frozen between", 3, "frozen-kept", holds=at_most),
    each_rank("", "trained between", 0, "some-never-freed"),
    each_rank("", "between", _between, "memory-not-returned", holds=at_most),
    each_rank("", "outside", 0.6 * BYTES, "copy-outside", holds=at_most, fields=lambda got, _: {"found": got, "whole": BYTES}),
    each_rank("in forward and in backward: one layer at a time", "whole after forward", 1, "kept-after-forward", holds=at_most),
    each_rank("", "evaluated", 0, "kept-after-forward", holds=at_most),
    each_rank("", "after forward", 2.5 * LAYER + 2 * SLACK, "memory-not-returned", holds=at_most),
    each_rank("", "in forward", 3.5 * LAYER + 2 * SLACK, "all-at-once", holds=at_most),
    each_rank("", "frozen after backward", 2, "frozen-kept", holds=at_most),
    each_rank("", "in backward", lambda size: TRAINED / size + 6 * LAYER + SLACK, "kept-in-backward", holds=at_most),
    each_rank("", "whole after reduce", 0, "kept-after-backward"),
    each_rank("", "frozen between", 0, "frozen-kept"),
    each_rank("", "unit", None, "more-than-its-numbers", holds=_few_bytes, fields=_bytes),
    each_rank("", "unit", None, "gathered-again", holds=_once, fields=_again),
    each_rank("two all-gathers and one reduce-scatter of everything: 3Ψ, no more", "cost",
         lambda size: 1.15 * (2 * BYTES + TRAINED) * (size - 1) / size + 500, "gathered-often", holds=at_most),
]  # fmt: skip


def balise_5(Unit, ShardedParameters):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, Unit, ShardedParameters, known=KNOWN, sizes=(2, 3, 1))
