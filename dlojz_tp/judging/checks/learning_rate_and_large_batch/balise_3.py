"""Balise 3: which parameters decay; steps of AdamW, with awkward groups, resumed, without a loop over parameters."""

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, judged
from dlojz_tp.judging.checks.learning_rate_and_large_batch.stepping import (
    Training,
    few_and_many,
    follow,
    kept,
    no_more_for_many,
    operators,
    own_work,
    truth,
    without_values,
)


class _Net(nn.Module):
    """A tied head, a frozen matrix, a frozen bias, norms of other names, a kernel, a gain and a scalar of its own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.stem = nn.Conv1d(4, 4, 3)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.gain = nn.Parameter(torch.ones(4))
        self.places = nn.Parameter(torch.ones(3, 4))  # of a matrix only the dimensions tell, not its name
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.blocks[2].weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


def _names(net):
    return {id(parameter): name for name, parameter in net.named_parameters()}


DECAYS = {name: 0.3 if parameter.ndim > 1 else 0.0 for name, parameter in _Net().named_parameters()
          if parameter.requires_grad}  # fmt: skip


def _described(groups_of):
    net = _Net()
    groups, names = groups_of(net, 0.3), _names(net)
    if not isinstance(groups, list | tuple) or not all(
        isinstance(one, dict) and {"params", "weight_decay"} <= set(one) for one in groups
    ):
        return {"kind": None if groups is None else "others"}
    found = [(names.get(id(p), "not from the model"), float(group["weight_decay"])) for group in groups
             for p in list(group["params"])]  # fmt: skip
    if any(name == "not from the model" for name, _ in found):
        return {"kind": "others"}
    twice = len(found) - len({name for name, _ in found})
    return {"kind": "groups", "frozen": sorted({n for n, _ in found} - DECAYS.keys()), "twice": twice,
            "missing": sorted(DECAYS.keys() - {n for n, _ in found}), "decays": dict(sorted(found))}  # fmt: skip


def _decays_hint(seen, due):
    wrong = {name for name in due if seen[name] != due[name]}
    return "vectors-decay" if all(due[name] == 0 for name in wrong) else "matrices-do-not-decay"


def rule(weight, steps, betas, eps, weight_decay):
    """One parameter, number by number as the paper has it."""
    mean = square = 0.0
    for t, (gradient, rate) in enumerate(steps, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        corrected = mean / (1 - betas[0] ** t), square / (1 - betas[1] ** t)
        weight = weight - rate * (corrected[0] / (corrected[1].sqrt() + eps) + weight_decay * weight)
        yield weight


def options(lr=0.1, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0):
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


PLAIN = Training(((((4, 3),), options()),))
DECAY = Training(((((4, 3), (5,)), options(weight_decay=0.7)),))
EPS = Training(((((4, 3), (5,)), options(eps=0.5)),))
GROUPS = Training(
    (
        (((3, 4), (), (2, 3, 2)), options(0.1, (0.9, 0.99), 1e-3, 0.4)),
        (((4,), (6,)), options(0.03, (0.6, 0.8), 1e-2, 0.0)),
        (((2,),), options(0.05, (0.9, 0.99), 1e-2, 0.5)),
    ),
    rates=(0.1, 1.0, 0.5, 0.2),
    absent=((0, 1), (1, 1), (1, 3), (0, 5), (1, 5), (2, 5), (3, 5)),  # the last one is frozen: no gradient at all
)
SHAPES = [(3, 4), (4,), ()]


def observe(groups_of, optimizer):
    described = _described(groups_of)
    yield {"kind": described["kind"]}
    yield described
    yield {"plain": follow(PLAIN, optimizer)}
    yield {"decay": follow(DECAY, optimizer)}
    yield {"eps": follow(EPS, optimizer)}
    yield {"groups": follow(GROUPS, optimizer)}
    yield {"resumed": follow(GROUPS, optimizer, resume=2)}
    yield kept(GROUPS, optimizer)
    yield {"operators": operators(optimizer, SHAPES)}
    yield {"without values": without_values(optimizer, SHAPES)}


LOOKS = [
    Look("groups of parameters", "kind", "groups", "groups-form"),
    Look("each trainable parameter once", "frozen", [], "frozen-inside"),
    Look("", "twice", 0, "tied-twice"),
    Look("", "missing", [], "parameters-missing"),
    Look("what decays", "decays", dict(sorted(DECAYS.items())), _decays_hint),
    Value("three steps with one matrix", "plain", truth(PLAIN, rule), "wrong-step"),
    Value("with weight decay", "decay", truth(DECAY, rule), "wrong-decay"),
    Value("with a large ε", "eps", truth(EPS, rule), "wrong-eps"),
    Value("several groups, changing rates, gradients that are None", "groups", truth(GROUPS, rule), "wrong-groups"),
    Value("the same after stopping and resuming from the state_dict", "resumed", truth(GROUPS, rule), "not-resumed"),
    Look("gradients stay the same, weights change in place", "gradients", 0, "gradients-changed"),
    Look("", "moved", False, "weights-moved"),
    Look(
        "as many operators for 12 parameters as for 3",
        "operators",
        [0, 0],
        "an-operator-each",
        holds=no_more_for_many,
        fields=few_and_many(SHAPES),
    ),
    Look("no value is read back to the CPU", "without values", True, "weights-moved"),
]


def balise_3(groups_of, optimizer):
    with own_work():
        yield from judged(LOOKS, observe, groups_of, optimizer)
