"""Balise 4: gradients that leave bucket by bucket while backward goes on, and are freed at once."""

from functools import cache

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, silent
from dlojz_tp.judging.checks.zero_under_the_hood.common import ADAMW, alive_between, in_two, own_work, world
from dlojz_tp.judging.checks.zero_under_the_hood.training_looks import differing, equal, travels
from dlojz_tp.judging.checks.zero_under_the_hood.trainings import gradient, train, truth
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.judging.probes.networks import Chain, Odd, state
from dlojz_tp.judging.probes.outside import Outside
from dlojz_tp.judging.probes.shared_looks import each_rank, stacked
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits, on_the_wire

PASSES = 1, 2, 2  # backward passes in each step
SMALL = 400  # bytes of a bucket of the odd model: about a parameter
DEPTH, WIDTH, CAPACITY = 24, 16, 4500  # bytes of a bucket of the chain: two of its layers
BYTES = DEPTH * (WIDTH * WIDTH + WIDTH) * 8
BUCKETS = BYTES // CAPACITY + 1
SLACK = 4000  # bytes: activations of a few rows, single numbers
KNOWN = (
    ("'NoneType' object has no attribute 'wait'", "none-handle"),
    ("for +=: 'NoneType'", "none-handle"),
    (("NoneType", "in reduce"), "none-gradient"),
    ("NoneType", "hook-before-grad"),
    (("KeyError: ", " of shape ("), "hook-before-grad"),
)


def _model():
    return Odd(idle=SMALL // 8)  # a parameter that fills a bucket, never used


def observe(ShardedGradients):  # noqa: N803
    """On a rank: a training of the odd model; what is sent when, and what is alive, in a model of equal layers."""
    (rank, size), model = world(), _model()
    with own_work():
        found = train("two", model, ShardedGradients(model.groups(), capacity=SMALL, **ADAMW), rank, size, PASSES)
        model = _model()
        found |= train("all", model, ShardedGradients(model.groups(), capacity=10**9, **ADAMW), rank, size, PASSES)
        return found | (_measured(ShardedGradients, rank, size) if size > 1 else {})


def _measured(ShardedGradients, rank, size):  # noqa: N803
    model, found, early, reduced, flying, at = Chain(DEPTH, WIDTH), {}, [], [], [], {}
    pairs = [(layer.weight, layer.bias)[:: 1 if n < DEPTH // 2 else -1] for n, layer in enumerate(model.layers)]
    parameters = [p for pair in pairs for p in pair]  # in the second half not in the order of gradients
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] + rank

    def tell(text):
        at[text] = len(log.calls)
        flying.append(len(log.calls) - len(waits))

    def with_gradient():
        return sum(p.grad is not None for p in parameters)

    model.tell = tell
    with Outside(BYTES, on=size == 2) as outside, Memory(*parameters) as memory:
        optimizer = ShardedGradients(in_two(parameters, 0.4), capacity=CAPACITY, **ADAMW)
        for _ in range(2):
            optimizer.zero_grad()
            memory.reset()
            before = memory.now()
            with Traffic() as log, counted_waits() as waits:
                model(x).backward()
                early.append(len(log.calls))
                found |= {"peak": memory.peak - before, "kept": with_gradient()}
                optimizer.reduce()
                reduced.append(memory.settled(before + _reduced(size)) - before)
                found["left"] = with_gradient()
                buckets = len(log.calls)
                optimizer.update()
        alive = alive_between(memory, model, optimizer, _alive(size))
        optimizer.zero_grad()
        model.tell = lambda text: None
        for _ in range(2):
            model(x).backward()
        found["kept twice"] = with_gradient()
        optimizer.reduce()
    return found | {
        "when": (*early, at["layer 1"], buckets), "buckets": buckets, "flying": sum(one > 0 for one in flying) / len(flying), "reduced": max(reduced),
        "cost": on_the_wire(log.events), "alive": alive, "outside": outside.kept,
    }  # fmt: skip


def _reduced(size):
    """Bytes after reduce(), besides what was there before backward: a shard of the gradients, and a bucket or two."""
    return BYTES / size + 2 * CAPACITY + SLACK


def _alive(size):
    """Bytes after the step: parameters, the states of a shard, and its gradient, which may stay as zeros."""
    return BYTES + 3 * BYTES / size + CAPACITY + SLACK


@cache
def _truth(size):
    gradients, weights = truth(_model, lambda m: torch.optim.AdamW(m.groups(), **ADAMW), size, PASSES)
    return gradients, weights[1:].expand(size, -1, -1)


def _arrived(ranks):
    """Of each rank, waits less collectives; whether each shard has no gradient; the gradient."""
    missing = [g is None for rank in ranks for g in rank["two gradients"]]
    return [rank["two off"] for rank in ranks], missing, gradient(ranks, "two gradients")


def _not_arrived(seen, _):
    off, missing, _ = seen
    if all(missing):
        return "no-shard-gradient"
    return "shards-not-waited" if min(off) < 0 else "bucket-left" if any(missing) else "added-twice"


def _late(got, _):
    return "after-backward" if not got[0] else "late-buckets" if got[1] else "not-again"


def _all_arrived(seen, due):
    off, missing, gradient = seen
    return not any(missing) and (not any(off) or equal(gradient, due))


def _who_waits(seen, due):
    return silent(seen, due) | {"rank": seen[0].index(max(seen[0], key=abs)), "k": 0, "found": "None"}


def _gradient_due(size):
    return _truth(size)[0][0]


def _second_due(size):
    return _truth(size)[0][1]


def _weights_due(size):
    return _truth(size)[1]


def _on_rank_0(seen, due):
    return {"rank": 0}


def _cost_due(size):
    return round(2.4 * BYTES * (size - 1) / size + SLACK)


def _in_time(got, _):
    return got[2] >= 0.7 * got[3]


def _early(got, due):
    return silent(got, due) | {"early": got[2], "n": got[3]}


LOOKS = [
    travels("two"),
    Look("", _arrived, _gradient_due, _not_arrived, holds=_all_arrived, fields=_who_waits),
    Value("", lambda ranks: gradient(ranks, "two gradients"), _gradient_due, "wrong-shard-gradient", holds=equal),
    each_rank("each bucket is sent while backward goes on",
         "buckets", BUCKETS, "one-each-parameter", holds=lambda got, due: got <= 3 * due),
    each_rank("", "cost", _cost_due, "grad-all-reduced", holds=at_most,
         fields=lambda got, _: {"found": got, "held": BYTES}),
    each_rank("", "buckets", BUCKETS, "capacity-ignored", holds=lambda got, due: got > due // 3),
    each_rank("", "when", "", _late, holds=_in_time, fields=_early),
    each_rank("", "flying", 0.5, "not-asynchronous", holds=lambda got, due: got >= due, fields=silent),
    each_rank("what the rank does not own is freed at once: at the peak, after reduce(), after the step",
         "left", 0, "gradients-kept"),
    each_rank("", "kept", 8, "freed-late", holds=at_most),
    each_rank("", "kept twice", 8, "freed-late", holds=at_most),
    each_rank("", "peak", lambda size: BYTES / size + 8 * CAPACITY + SLACK, "flats-kept", holds=at_most),
    each_rank("", "reduced", _reduced, "buckets-kept", holds=at_most),
    each_rank("", "alive", _alive, "hidden-copy", holds=at_most),
    each_rank("", "outside", 0.6 * BYTES, "copy-outside", holds=at_most, fields=lambda got, _: {"found": got, "whole": BYTES}),
    Value("groups with their own options, and two backward passes before a step: the weights of AdamW in one process",
          lambda ranks: gradient(ranks, "two later"), _second_due, "second-backward", holds=equal, fields=_on_rank_0),
    Value("", stacked("two weights"), _weights_due,
          "weights-differ", holds=equal, fields=differing(state(_model()), "AdamW")),
    Value("the same with a single bucket for everything", stacked("all weights"), _weights_due,
          "sent-and-kept", holds=equal, fields=differing(state(_model()), "AdamW")),
]  # fmt: skip


def balise_4(ShardedGradients):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, ShardedGradients, known=KNOWN, sizes=(2, 3, 1))
