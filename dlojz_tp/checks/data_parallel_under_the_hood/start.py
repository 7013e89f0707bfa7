"""Balise 1: the same start everywhere."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.data_parallel_under_the_hood.common import by_world, own_work, undisturbed
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import some_returned, waits_in
from dlojz_tp.probes.seeded import seeded
from dlojz_tp.probes.traffic import Traffic, on_the_wire, sent, volume
from dlojz_tp.probes.withheld import Withheld

SLACK = 12_000  # bytes that a right answer may send on top: shapes and names, say

HINTS = {
    "nothing-sent": "Rank {rank} sent nothing and received nothing. The values of rank 0 must be sent to the "
                    "others: dist.broadcast(t, src=0).",
    "only-rank-0": "Only rank 0 calls the collective. Every rank must call a broadcast: rank 0 sends, the others "
                   "receive.",
    "every-rank-is-source": "All ranks wait in broadcast, and none receives: {error}. The source must be rank 0 on "
                            "every rank, and all ranks must take the tensors in the same order.",
    "wrong-source": "All ranks got the values of rank {source}. Send those of rank 0.",
    "averaged": "The ranks hold the mean over the ranks. They must all hold the values of rank 0: a mean is no "
                "rank's initialisation, and it shrinks the weights.",
    "received-not-kept": "The ranks exchanged values, but rank {rank} still holds its own: a copy received the "
                         "others. Copy it back into the parameter, under torch.no_grad().",
    "start-not-waited": "When your code returned on rank {rank}, a broadcast was still running. With "
                        "async_op=True, wait for the handle that it returns before you use the tensor.",
    "buffers-forgotten": "The parameters agree, but the buffers don't ({name}). Batch norm would normalise "
                         "differently on each rank: broadcast model.buffers() too.",
    "integers-forgotten": "{name} holds integers or booleans, and you left it out. It is a part of the state like "
                          "any other.",
    "state-dict-misses": "{name} is a buffer with persistent=False: state_dict() leaves it out. model.buffers() "
                         "has all buffers.",
    "frozen-forgotten": "{name} has requires_grad=False, and you left it out. The forward pass uses it all the same.",
    "gaps": "{name} is a view with gaps, a part of a larger table, and it came out wrong. A collective sends "
            "contiguous memory from the place where a tensor begins: send t.contiguous(), and copy what arrives "
            "into t.",
    "cast": "{name} came back rounded: you sent it in a coarser dtype. Tensors of different dtypes can't share a "
            "message.",
    "parameter-replaced": "{name} is a new object. An optimizer that was created earlier still holds the old one: "
                          "write into the existing tensor.",
    "memory-replaced": "{name} is at another place in memory than before: t.data = … drops the old memory, which a "
                       "larger table or a flat buffer may still share. Write into it with copy_.",
    "graph-left": "{name} has become part of a graph ({error}), or lost requires_grad. Copy under torch.no_grad().",
    "tied-twice": "You sent {sent} bytes; the model holds {held}. A tied parameter has two names but one memory. "
                  "model.parameters() returns it once; a loop over model.modules() meets parameters several times, "
                  "because modules contain other modules.",
    "gathered-by-all": "Each rank sent {sent:.0f} bytes; the model holds {held}. An all-gather brings the state of "
                       "every rank to every rank, and then you throw away all but one: it takes N times the memory "
                       "and N − 1 times the messages. You need only the state of rank 0: use a broadcast.",
    "wrong-state": "{name} on rank {rank} differs from rank 0's.",
}  # fmt: skip
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


def balise_1(broadcast_state):
    """Models that differ from rank to rank, with every kind of parameter and buffer."""
    yield "the parameters of rank 0 on 2, 3 and 4 ranks; a single rank"
    yield from by_world(_judge, _on_rank, broadcast_state, known=KNOWN)
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, broadcast_state, known=left_on_cpu("made-on-cpu"))


def _on_gpu(_, broadcast_state):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(torch.ones(4, 3).t())
    broadcast_state(model.to(launch.device()))


def _judge(size, ranks):
    worlds = {size: ranks}
    truth = {name: t.detach() for name, t in state(Zoo(0)).items()}
    parameters = [name for name, _ in Zoo(0).named_parameters()]
    easy = [name for name in parameters if name.split(".")[0] in ("linear", "norm", "embedding")]
    _values(worlds, truth, easy)
    yield "buffers: running statistics, integers, booleans, buffers that are not saved"
    buffers = [name for name in truth if name not in parameters and name != "window"]
    _values(worlds, truth, buffers)
    yield "frozen, tied and scalar parameters, several dtypes, views with gaps"
    _values(worlds, truth, list(truth))
    yield "the parameters are the same objects as before, in the same memory, without a graph"
    for rank, got in enumerate(ranks):
        for name, words in got["changed"].items():
            raise Wrong("parameter-replaced", name=name, got=words, where=f"rank {rank} of {size}")
        for name in got["moved"]:
            raise Wrong("memory-replaced", name=name, where=f"rank {rank} of {size}")
        for name, words in got["graph"].items():
            raise Wrong("graph-left", name=name, error=words, where=f"rank {rank} of {size}")
    yield "each tensor is sent once"
    held = sum(t.numel() * t.element_size() for t in truth.values())
    least = min(volume(got["events"]) for got in ranks)  # rank 0 may send to each of the others
    if least > held + SLACK:
        raise Wrong("tied-twice", sent=least, held=held, where=f"one of {size} ranks")
    crossed = min(on_the_wire(got["events"]) for got in ranks)
    if crossed > 2.2 * held:  # a sum with zeros is twice a broadcast
        raise Wrong("gathered-by-all", sent=crossed, held=held, where=f"each of {size} ranks")
    undisturbed([got["overwritten"] for got in ranks], size)


def _on_rank(broadcast_state):
    rank = dist.get_rank()
    model = Zoo(rank).to(launch.device())
    before = state(model)
    flags = {name: t.requires_grad for name, t in before.items()}
    places = {name: t.data_ptr() for name, t in before.items()}
    with Withheld() as running, Traffic() as log, own_work():
        broadcast_state(model)
    values = {name: t.detach().cpu().clone() for name, t in state(model).items()}
    left, after = running.left(), state(model)
    changed = {k: "another object" for k, t in before.items() if flags[k] and after.get(k) is not t}
    moved = [k for k, place in places.items() if k in after and after[k].data_ptr() != place]
    graph = {
        k: str(t.grad_fn or f"requires_grad={t.requires_grad}")
        for k, t in after.items()
        if not t.is_leaf or (k in flags and t.requires_grad != flags[k])
    }
    return {"values": values, "events": log.events, "changed": changed, "moved": moved, "graph": graph, "left": left, "overwritten": running.overwritten}


def _values(worlds, truth, names):
    for size, ranks in worlds.items():
        own = [state(Zoo(rank)) for rank in range(size)]
        for name in names:
            for rank, got in enumerate(ranks):
                value = got["values"].get(name)
                if value is not None and value.dtype == truth[name].dtype and _equal(value, truth[name]):
                    continue
                slug, fields = _mistake(ranks, own, truth, name, rank)
                where = f"{name} on rank {rank} of {size}"
                raise Wrong(
                    slug, expected=truth[name], got=value, where=where, **{"rank": rank, "name": name, **fields}
                )


def _equal(a, b):
    return torch.equal(a, b) if not b.is_floating_point() else close(a, b, 1e-12)


def _mistake(ranks, own, truth, name, rank):
    """The hint for a tensor that is not rank 0's on `rank`, and what fills it."""
    calls = [sent(got["events"]) for got in ranks]
    value, mine = ranks[rank]["values"].get(name), own[rank][name].detach()
    if not any(calls):
        return "nothing-sent", {}
    if calls[0] and not any(calls[1:]):
        return "only-rank-0", {}
    if not calls[rank]:
        return "nothing-sent", {}
    if value is None:
        return "wrong-state", {}
    if ranks[rank]["left"]:
        return "start-not-waited", {}
    for source in range(1, len(ranks)):
        if source != rank and _equal(value, own[source][name].detach()):
            return "wrong-source", {"source": source}
    if value.dtype == torch.int64 and close(value.double(), truth[name].double(), 1e-7) and not _equal(value, mine):
        return "cast", {}
    if value.is_floating_point() and close(value.double(), truth[name].double(), 1e-2) and not _equal(value, mine):
        return "cast", {}
    if value.is_floating_point():
        mean = torch.stack([model[name].detach().double() for model in own]).mean(dim=0)
        if close(value.double(), mean, 1e-2):
            return "averaged", {}
    # what is the same on all ranks from the beginning (ones, say) proves nothing
    telling = {k: t for k, t in ranks[rank]["values"].items() if k in truth and not _equal(truth[k], own[-1][k])}
    others_right = [k for k, t in telling.items() if _equal(t, truth[k])]
    if name in ("strided", "window") and others_right:
        return "gaps", {}
    if name == "transposed" and _equal(value, mine):
        return "received-not-kept", {}
    if _equal(value, mine):
        return _left_out(name, others_right, telling, truth), {}
    return "wrong-state", {}


def _left_out(name, right, telling, truth):
    """Why a tensor still holds the rank's own values, judged by those that are right."""
    parameters = {key for key, _ in Zoo(0).named_parameters()}
    if not right:
        return "received-not-kept"
    if name not in parameters and not any(key not in parameters for key in right):
        return "buffers-forgotten"
    if not any(truth[key].is_floating_point() for key in telling if key not in right):
        return "integers-forgotten"
    if name == "table":
        return "state-dict-misses"
    return "frozen-forgotten" if name == "frozen" else "wrong-state"
