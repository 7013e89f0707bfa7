"""Balise 3: optimizer states for one shard on each rank, parameters gathered after the step."""

from functools import cache

import torch
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import Look, Value, at_most, nothing, silent
from dlojz_tp.judging.checks.zero_under_the_hood.common import ADAMW, alive_between, in_two, own_work, rows, world
from dlojz_tp.judging.checks.zero_under_the_hood.training_looks import differing, equal, travels
from dlojz_tp.judging.checks.zero_under_the_hood.trainings import flat, gradient, train, truth
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.judging.probes.networks import Chain, Odd, backward_of_share, state
from dlojz_tp.judging.probes.outside import Outside
from dlojz_tp.judging.probes.shared_looks import each_rank, stacked
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


SLACK = 3000  # bytes for step counters and single numbers
SGD = {"lr": 0.05, "momentum": 0.9}
CASES = {  # how the answer is made, its options, the truth
    "adamw": (lambda m: (m.named(),), ADAMW, lambda m: torch.optim.AdamW(_trained(m), **ADAMW)),
    "groups": (lambda m: (m.groups(),), ADAMW, lambda m: torch.optim.AdamW(m.groups(), **ADAMW)),
    "sgd": (lambda m: (_trained(m), torch.optim.SGD), SGD, lambda m: torch.optim.SGD(_trained(m), **SGD)),
}
ELEMENTS = sum(p.numel() for p in Chain(10, 16).parameters())  # of the model on which memory and traffic are measured
TRAINED = sum(p.numel() for p in _trained(Odd()))
GROUPS = [round(ELEMENTS / 2), ELEMENTS - round(ELEMENTS / 2)]
KNOWN = (("NoneType", "none-gradient"), (("IndexError", "in flatten"), "gradients-moved-up"),  # a rank without any
         *((words, "gradient-left-out") for words in ("outputShape", "invalid tensor size", "must be equal to world_size", "sizes().vec()")))  # fmt: skip


def observe(ShardedOptimizer):  # noqa: N803
    """On a rank: three trainings of an odd model; then what lives and what is sent in a model of equal layers."""
    (rank, size), found = world(), {}
    with own_work():
        for case, (arguments, options, _) in CASES.items():
            model = Odd(by_rank=case != "sgd")
            found |= train(case, model, ShardedOptimizer(*arguments(model), **options), rank, size)
        return found | _measured(ShardedOptimizer, rank, size)


def _measured(ShardedOptimizer, rank, size):  # noqa: N803
    model = Chain(10, 16)
    with Outside(8 * ELEMENTS, on=size == 2) as outside, Memory(*model.parameters()) as memory:
        optimizer = ShardedOptimizer(in_two(list(model.parameters()), 0.5), **ADAMW)
        for step in range(2):
            optimizer.zero_grad()
            backward_of_share(model, rows(step, width=16), rank, size)
            with Traffic() as log:
                optimizer.step()
        alive = alive_between(memory, model, optimizer, _alive(size))
    moments = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    states = sum(t.numel() for t in moments if isinstance(t, torch.Tensor) and t.numel() > 1)  # no step counters
    return {"cost": on_the_wire(log.events), "outside": outside.kept, "alive": alive, "states": states}


def _alive(size):
    """Bytes of parameters, the states of one shard, and its gradient, which may stay as zeros."""
    return 8 * ELEMENTS + 24 * -(-ELEMENTS // size) + SLACK


START = state(Odd())


@cache
def _truth(case, size):
    return truth(lambda: Odd(by_rank=case != "sgd"), CASES[case][2], size)


def _weights(case, claim, word):
    """Looks at the weights of a case; what nobody waited for, and what the optimizer knows besides, count where they are wrong."""
    frozen = slice(len(Odd().frozen))
    see = stacked(f"{case} weights")

    def due(size):
        return _truth(case, size)[1][1:].expand(size, -1, -1)

    def due_frozen(size):
        return due(size)[:, 0, frozen]

    def where_wrong(claim, key, hint, sign=1):
        return Look(claim, lambda ranks: ([sign * rank[f"{case} {key}"] for rank in ranks], see(ranks)), due, hint,
                    holds=_none_or_right, fields=_most)  # fmt: skip

    return [
        where_wrong(claim, "off", "gather-not-awaited", -1),
        Look("", lambda ranks: see(ranks)[:, 0, frozen], due_frozen, "frozen-trained"),
        where_wrong("", "foreign", "optimizer-on-parameters"),
        Look("", lambda ranks: any(rank[f"{case} moved"] for rank in ranks), True, "no-step"),
        Look("", see, due, "views-lost", holds=lambda seen, _: not seen[:, -1].equal(flat(START).expand(len(seen), -1)), fields=differing(START, word)),
        Value("", see, due, "weights-differ", holds=equal, fields=differing(START, word)),
    ]  # fmt: skip


def _none_or_right(seen, due):
    """Whether a count of each rank is at most 0, or the numbers beside it are right."""
    return max(seen[0]) <= 0 or equal(seen[1], due)


def _most(seen, due):
    """Fields: the rank of the largest count."""
    return silent(seen, due) | {"rank": seen[0].index(max(seen[0]))}


def _sharing(found, size):
    """What `found` elements of states tell: "shared", or the slug of a mistake. Due are two moments for a rank's part of each group."""
    if size == 1 or found <= _due(size) + 8 * 20:  # the padding of several parts
        return "shared"
    if found >= 2 * sum(GROUPS):
        return "states-whole"
    first_shared = 2 * (-(-GROUPS[0] // size) + GROUPS[1])
    return "first-group-shared" if abs(found - first_shared) <= 8 * 20 else "states-unequal"


def _due(size):
    return 2 * sum(-(-n // size) for n in GROUPS)


def gradient_due(size):
    return _truth("adamw", size)[0][0]


def _without(ranks):
    """Of each rank, the numbers of its shards without a gradient."""
    return [[k for k, g in enumerate(rank["adamw gradients"]) if g is None] for rank in ranks]


def _elements(ranks):
    """Of each rank, the elements of its gradients."""
    return [sum(g.numel() for g in rank["adamw gradients"]) for rank in ranks]


def _in_part(seen, due):
    return len(seen) == 1 or min(seen) < due


def first_found(field, **more):
    """Fields: the first in any rank's list."""
    return lambda seen, due: silent(seen, due) | {field: max(seen)[0]} | more


def _shared(got, size):
    return _sharing(got, size) == "shared"


def _states(got, size):
    return {"found": got, "due": _due(size), "expected": _due(size)}


def _cost_due(size):
    return 2.4 * 8 * ELEMENTS * (size - 1) / size + SLACK


LOOKS = [
    travels("adamw"),
    Look("", _without, [], "no-shard-gradient", holds=nothing, fields=first_found("k", found="None")),
    Look("", _elements, TRAINED, "gathered-in-reduce", holds=_in_part,
         fields=lambda seen, due: {"found": seen[0], "due": -(-due // len(seen))}),
    Look("", lambda ranks: ([-rank["adamw off"] for rank in ranks], gradient(ranks)), gradient_due, "gather-not-awaited",
         holds=_none_or_right, fields=_most),
    Value("", gradient, gradient_due, "wrong-shard-gradient", holds=equal),
    *_weights("adamw", "the weights of AdamW in one process after three steps, with tied, frozen and unused "
                       "parameters", "AdamW"),
    *_weights("groups", "groups with their own options; a rank uses nothing of one group", "AdamW with groups"),
    *_weights("sgd", "SGD instead of AdamW", "SGD with momentum"),
    each_rank("states for one shard only, and no full copy of anything except the parameters",
         "states", lambda size: size, _sharing,
         holds=_shared, fields=_states),
    each_rank("", "alive", _alive, "hidden-copy", holds=at_most),
    each_rank("", "outside", 0.6 * 8 * ELEMENTS, "copy-outside", holds=at_most, fields=lambda got, _: {"found": got, "whole": 8 * ELEMENTS}),
    Look("", "adamw left", [], "own-grad-left", holds=nothing, fields=first_found("k")),
    Look("", "adamw left whole", [], "grad-left", holds=nothing, fields=first_found("name")),
    each_rank("gradients are reduced to their shards, parameters are gathered: 2Ψ, no more", "cost",
         _cost_due, "all-reduce-first", holds=at_most, fields=lambda got, _: {"found": got, "held": 8 * ELEMENTS}),
]  # fmt: skip


def _on_gpu(_, ShardedOptimizer):  # noqa: N803
    used, unused = (nn.Parameter(torch.ones(3, device=launch.device())) for _ in range(2))
    optimizer = ShardedOptimizer([used, unused], torch.optim.SGD, lr=0.1)
    used.sum().backward()
    optimizer.step()


def balise_3(ShardedOptimizer):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, ShardedOptimizer, known=KNOWN, sizes=(2, 3, 1))
    yield "the same with two ranks that each have a GPU"
    on_gpus(_on_gpu, ShardedOptimizer, known=left_on_cpu("shards-not-on-gpu"))
