"""Balise 6: an average of weights. At step t each tensor of the model is 1 at place t: the average *is* its coefficients."""

import gc
import itertools
import math

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, at_most, close, judged, silent
from dlojz_tp.judging.probes.memory import held_storages

STEPS = 10  # updates; places 0, the beginning, to STEPS
RUNS = ((0.3, 4), (0.9, STEPS))  # decay, updates: the cap holds at the end of the first run, and never in the second
WIDTH, LATER = STEPS + 1, 7.0
COUNTS = [2**24 + 5 * k + 1 for k in range(WIDTH)]  # of batches: no float32 holds them
COPIES = 4  # of the model's state: in float64, beside a model that is kept for its form


class Probe(nn.Module):
    """Parameters of three dtypes, one tied, one frozen that nobody changes; buffers of floats, whole numbers, yes and no."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first, self.last = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.last.weight = self.first.weight
        self.coarse = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2, 2), 3.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))

    @torch.no_grad()
    def at(self, step):
        """Be the model at this step, in place; returns it."""
        state = self.state_dict()
        for name in FLOATS:
            state[name].copy_(torch.eye(WIDTH)[step].view_as(state[name]))
        self.norm.num_batches_tracked.fill_(COUNTS[step])
        self.seen.copy_(torch.arange(WIDTH) <= step)
        return self

    def filled(self, value=LATER):
        """Every number is this one, in place; returns the model."""
        for tensor in self.state_dict().values():
            tensor.fill_(value)
        return self

    def floats(self):
        """Copies of what the formula is for, by name."""
        return {name: self.state_dict()[name].flatten().clone() for name in [*FLOATS, "frozen"]}

    def bits(self):
        """All that it has, as lists."""
        return [tensor.tolist() for tensor in self.state_dict().values()]

    def holds_later(self):
        """Whether what `filled` wrote is found in one of its tensors."""
        return any(bool((tensor == LATER).any()) for tensor in self.state_dict().values() if tensor.dtype != torch.bool)


FLOATS = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "first.weight", "last.weight", "coarse", "fine"]  # fmt: skip


def coefficients(decay, updates, times=1):
    """The truth, float64: what of the model at each step is in the average, from the products of what was kept.

    times: how often a tensor moves in one update.
    """
    kept = [min(decay, (1 + t) / (10 + t)) ** times for t in range(1, updates + 1)]
    shares = [1.0, *(1 - one for one in kept)]
    return torch.tensor([share * math.prod(kept[k:]) for k, share in enumerate(shares)], dtype=torch.float64)


def written(average):
    """A new model into which the average was written."""
    target = Probe().filled(9)
    average.into(target)
    return target


def outside(model):
    """What `into` must leave: dtype, shape and requires_grad of all tensors, and the parameters themselves."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers())}
    return {k: (one.dtype, one.shape, one.requires_grad, id(parameters.get(k))) for k, one in tensors.items()}


def with_history():
    """How many living tensors autograd keeps a history of."""
    return sum(type(one) in (torch.Tensor, nn.Parameter) and one.grad_fn is not None for one in gc.get_objects())


def observe(average_of):
    """An average before its first update, after some; who shares memory with whom; what is held."""
    graphs, model = with_history(), Probe().at(0)
    average = average_of(model, RUNS[1][0])
    model.filled()
    begun = written(average)
    yield {"aliased": begun.holds_later()}
    yield {"begun": begun.floats()}

    ends, changed = [], False
    for decay, updates in RUNS:
        model = Probe().at(0)
        average = average_of(model, decay)
        for step in range(1, updates + 1):
            before = model.at(step).bits()
            average.update(model)
            changed |= model.bits() != before
        ends.append(written(average))
    yield {"changed": changed}
    yield {"coefficients": torch.cat([end.floats()["norm.weight"][: n + 1] for end, (_, n) in zip(ends, RUNS)])}
    yield {
        "all": ends[-1].floats(),
        "whole": [[end.norm.num_batches_tracked.item(), end.seen.tolist()] for end in ends],
    }
    model.filled()
    yield {"aliased later": written(average).holds_later(), "graphs": with_history() - graphs}

    model, target = Probe().at(0), Probe()
    average = average_of(model, 0.5)
    average.update(model.at(1))
    marks = outside(target)
    average.into(target)
    yield {"replaced": [name for name, mark in outside(target).items() if mark != marks[name]]}
    before = target.bits()
    average.update(model.at(2))
    shared = target.bits() != before
    target.filled()
    yield {"shared": shared or written(average).holds_later()}

    model = Probe().at(0)
    average = average_of(model, 0.9)
    for step in itertools.islice(itertools.cycle(range(WIDTH)), 3 * WIDTH):
        average.update(model.at(step))
    held, state = (sum(held_storages(one, functions=True).values()) for one in (average, model.state_dict()))
    yield {"held": held / state}


def wrong_names(seen, due):
    most = {torch.bfloat16: 3e-2}
    return [name for name, one in seen.items() if not close(one, due[name], most.get(one.dtype, 2e-5))]


def names_hint(otherwise):
    """The hint, by the names of the tensors that are wrong."""

    def hint(seen, due):
        names, twice = wrong_names(seen, due), coefficients(*RUNS[1], times=2)
        if names == ["first.weight", "last.weight"] and close(seen["last.weight"], twice, 2e-5):
            return "tied-twice"
        return "buffers-left-out" if names == ["norm.running_mean", "norm.running_var"] else otherwise

    return hint


def names_fields(seen, due):
    names = wrong_names(seen, due)
    return {"names": ", ".join(names), "where": names[0], "got": seen[names[0]], "expected": due[names[0]]}


def all_floats(moved):
    return dict.fromkeys(FLOATS, moved) | {"frozen": torch.full((4,), 3.0)}


def first_run(seen, due):
    decay, updates = RUNS[0]
    where = f"after {updates} updates with decay {decay}"
    return {"names": "weights", "where": where, "got": seen[: updates + 1], "expected": due[: updates + 1]}


LOOKS = [
    Look("a copy of the model, in its own memory", "aliased", False, "shared-memory"),
    Look("the average starts with the model's values", "begun", all_floats(torch.eye(WIDTH)[0]), names_hint("wrong-start"),
         holds=lambda seen, due: not wrong_names(seen, due), fields=names_fields),
    Look("an update leaves the model unchanged", "changed", False, "shared-memory"),
    Value("the share of each step's weights in the average", "coefficients", torch.cat([coefficients(*run) for run in RUNS]),
          "wrong-average", fields=first_run),
    Look("the same for buffers, tied weights, other dtypes", "all", all_floats(coefficients(*RUNS[1])), names_hint("wrong-average"),
         holds=lambda seen, due: not wrong_names(seen, due), fields=names_fields),
    Look("tensors that are not floating-point are copied", "whole", [[COUNTS[n], [k <= n for k in range(WIDTH)]] for _, n in RUNS],
         "integers-not-copied", fields=lambda seen, due: {"where": "batches counted", "got": seen[0][0], "expected": due[0][0]}),
    Look("the model may change afterwards", "aliased later", False, "shared-memory"),
    Look("the average has no graph", "graphs", 0, "graph-kept", holds=at_most, fields=silent),
    Look("into: a model keeps its tensors, their values change", "replaced", [], "into-replaces",
         fields=lambda seen, due: {"got": ", ".join(seen), "expected": ""}),
    Look("and later updates do not affect them", "shared", False, "into-replaces"),
    Look("only one copy is held, however many updates there are", "held", COPIES, "history-kept", holds=at_most,
         fields=lambda seen, due: {"copies": round(seen)} | silent(seen, due)),
]  # fmt: skip


def balise_6(average_of):
    yield from judged(LOOKS, observe, average_of)
