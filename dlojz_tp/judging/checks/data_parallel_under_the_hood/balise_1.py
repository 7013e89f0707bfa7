"""Balise 1: the same start everywhere."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import by_world, own_work
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import some_returned, waits_in
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire, sent, volume
from dlojz_tp.judging.probes.withheld import Withheld

SLACK = 12_000  # bytes that a right answer may send on top: shapes and names, say

KNOWN = ((some_returned, "only-rank-0"), (waits_in("broadcast"), "every-rank-is-source"))


class Zoo(nn.Module):
    """Every kind of state that a model can hold; the values depend on the seed."""

    def __init__(self, seed):
        super().__init__()
        with seeded(seed):
            self.linear = nn.Linear(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(1, 2)
            self.norm.num_batches_tracked.fill_(2**60 + 1 + seed)  # no float64 holds it
            self.embedding = nn.Embedding(100, 40, dtype=torch.float64)
            self.decoder = nn.Linear(40, 100, bias=False, dtype=torch.float64)
            self.decoder.weight = self.embedding.weight  # tied
            self.transposed = nn.Parameter(torch.randn(6, 3).t())
            self.strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
            self.coarse = nn.Parameter(torch.randn(7).bfloat16())
            self.fine = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.single = nn.Parameter(torch.randn(()))
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("nothing", None)
            self.register_buffer("mask", torch.rand(9) > 0.5)
            self.register_buffer("table", torch.randn(8, 5), persistent=False)
            self.register_buffer("window", torch.randn(6, 8)[:, 2:5])


def state(model):
    """All names and tensors, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


TRUTH = {name: tensor.detach() for name, tensor in state(Zoo(0)).items()}
HELD = sum(tensor.nbytes for tensor in TRUTH.values())
PARAMETERS = [name for name, _ in Zoo(0).named_parameters()]
EASY = [name for name in PARAMETERS if name.split(".")[0] in ("linear", "norm", "embedding")]
BUFFERS = [name for name in TRUTH if name not in PARAMETERS and name != "window"]


def observe(broadcast_state):
    """On a rank: all tensors afterwards; which are other objects, lie elsewhere, are part of a graph; what was sent."""
    model = Zoo(dist.get_rank()).to(launch.device())
    before = state(model)
    flags = {name: t.requires_grad for name, t in before.items()}
    places = {name: t.data_ptr() for name, t in before.items()}
    with Withheld() as running, Traffic() as log, own_work():
        broadcast_state(model)
    values = {name: t.detach().cpu().clone() for name, t in state(model).items()}
    left, after = running.left(), state(model)
    changed = {k: "another object" for k, t in before.items() if flags[k] and after.get(k) is not t}
    moved = [k for k, place in places.items() if k in after and after[k].data_ptr() != place]
    graph = {k: str(t.grad_fn or f"requires_grad={t.requires_grad}") for k, t in after.items()
             if not t.is_leaf or (k in flags and t.requires_grad != flags[k])}  # fmt: skip
    return {
        "values": values, "events": log.events, "changed": changed, "moved": moved, "graph": graph, "left": left,
        "overwritten": running.overwritten,
    }  # fmt: skip


def equal(a, b):
    return torch.equal(a, b) if not b.is_floating_point() else close(a, b, 1e-12)


def first_wrong(ranks, names):
    """(name, rank) of the first tensor that is not rank 0's; None if all are."""
    for name, (rank, got) in itertools.product(names, enumerate(ranks)):
        value = got["values"].get(name)
        if value is None or value.dtype != TRUTH[name].dtype or not equal(value, TRUTH[name]):
            return name, rank
    return None


def mistake(ranks, name, rank):
    """The hint for a tensor that is not rank 0's on `rank`."""
    calls, own = [sent(got["events"]) for got in ranks], [state(Zoo(rank)) for rank in range(len(ranks))]
    value, mine, truth = ranks[rank]["values"].get(name), own[rank][name].detach(), TRUTH[name]
    if calls[0] and not any(calls[1:]):
        return "only-rank-0"
    if not calls[rank]:
        return "nothing-sent"
    if value is None:
        return "wrong-state"
    if ranks[rank]["left"]:
        return "start-not-waited"
    if sources(ranks, name, rank):
        return "wrong-source"
    whole = value.dtype == torch.int64
    if whole or value.is_floating_point():
        if close(value.double(), truth.double(), 1e-7 if whole else 1e-2) and not equal(value, mine):
            return "cast"
        mean = torch.stack([model[name].detach().double() for model in own]).mean(dim=0)
        if not whole and close(value.double(), mean, 1e-2):
            return "averaged"
    # what is the same on all ranks from the beginning (ones, say) proves nothing
    telling = {k: t for k, t in ranks[rank]["values"].items() if k in TRUTH and not equal(TRUTH[k], own[-1][k])}
    others_right = [k for k, t in telling.items() if equal(t, TRUTH[k])]
    if name in ("strided", "window") and others_right:
        return "gaps"
    if not equal(value, mine):
        return "wrong-state"
    return "received-not-kept" if name == "transposed" else left_out(name, others_right, telling)


def sources(ranks, name, rank):
    """The other ranks but rank 0 that had begun with what `rank` has now."""
    others = [one for one in range(1, len(ranks)) if one != rank]
    return [one for one in others if equal(ranks[rank]["values"][name], state(Zoo(one))[name].detach())]


def left_out(name, right, telling):
    """Why a tensor still holds the rank's own values, judged by those that are right."""
    if not right:
        return "received-not-kept"
    if name not in PARAMETERS and not any(key not in PARAMETERS for key in right):
        return "buffers-forgotten"
    if not any(TRUTH[key].is_floating_point() for key in telling if key not in right):
        return "integers-forgotten"
    if name == "table":
        return "state-dict-misses"
    return "frozen-forgotten" if name == "frozen" else "wrong-state"


def tensors(claim, names):
    """A look at these tensors of all ranks."""

    def find(ranks):
        if not (first := first_wrong(ranks, names)):
            return None
        name, rank = first
        value, where = ranks[rank]["values"].get(name), f"{name} on rank {rank} of {len(ranks)}"
        source = None if value is None else [*sources(ranks, name, rank), None][0]
        told = {"expected": TRUTH[name], "got": value, "rank": rank, "name": name, "source": source, "where": where}
        return mistake(ranks, name, rank), told

    return recognised(claim, find)


def sends(claim, count, most, hint):
    """A look at bytes of the rank that has fewest: rank 0 may send to each of the others."""

    def fewest(ranks):
        return min(count(got["events"]) for got in ranks)

    return Look(claim, fewest, most, hint, holds=at_most, fields=lambda seen, _: {"sent": seen, "held": HELD})


LOOKS = [
    tensors("the parameters of rank 0 on 2, 3 and 4 ranks; a single rank", EASY),
    tensors("buffers: running statistics, integers, booleans, buffers that are not saved", BUFFERS),
    tensors("frozen, tied and scalar parameters, several dtypes, views with gaps", TRUTH),
    each_rank("the parameters are the same objects as before, in the same memory, without a graph", "changed", {},
              "parameter-replaced", fields=lambda got, _: {"name": next(iter(got)), "got": next(iter(got.values()))}),
    each_rank("", "moved", [], "memory-replaced", fields=lambda got, _: {"name": got[0]}),
    each_rank("", "graph", {}, "graph-left",
              fields=lambda got, _: dict(zip(("name", "error"), next(iter(got.items()))))),
    sends("each tensor is sent once", volume, HELD + SLACK, "tied-twice"),
    sends("", on_the_wire, 2.2 * HELD, "gathered-by-all"),  # a sum with zeros is twice a broadcast
    each_rank("", "overwritten", 0, "written-in-flight"),
]  # fmt: skip


def on_gpu(_, broadcast_state):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(torch.ones(4, 3).t())
    broadcast_state(model.to(launch.device()))


def balise_1(broadcast_state):
    """Models that differ from rank to rank, with every kind of parameter and buffer."""
    yield LOOKS[0].claim
    yield from by_world(LOOKS, observe, broadcast_state, known=KNOWN)
    yield "the same where each rank has a GPU"
    on_gpus(on_gpu, broadcast_state, known=left_on_cpu("made-on-cpu"))
