"""Balise 6: parameters in bfloat16, float32 masters of this rank's shards."""

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Value, at_most, within
from dlojz_tp.judging.checks.zero_under_the_hood import half
from dlojz_tp.judging.checks.zero_under_the_hood.common import world
from dlojz_tp.judging.checks.zero_under_the_hood.half import whole
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.probes import exact_training as exact
from dlojz_tp.judging.probes.exact_training import N
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.memory import Memory, held_bytes
from dlojz_tp.judging.probes.outside import Outside
from dlojz_tp.judging.probes.shared_looks import each_rank
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire
from dlojz_tp.launch import device

KNOWN = (("'masters'", "no-masters"), *half.OTHER_DTYPE)


def observe(MasterShards):  # noqa: N803
    """On a rank: a training whose gradients have no rounding errors, so that one process in float64 is the truth."""
    rank, size = world()
    kind, options, _ = exact.training(size)
    parameters = [nn.Parameter(value) for value in exact.in_shapes(exact.START)]
    with Memory(*parameters) as memory, Outside(4 * N, on=size == 2, lists=False) as outside:
        optimizer = MasterShards(exact.groups_of(parameters, size), kind, capacity=half.CAPACITY, **options)
        masters, parts, gradients = list(optimizer.shards), optimizer.parts, []
        found = {
            "count": (len(masters), len(parts)), "places": half.places(optimizer, parameters), "gradients": gradients,
            "dtypes": _dtypes(masters), "elements": [(m.numel(), part.own.numel()) for m, part in zip(masters, parts)],
        }  # fmt: skip
        if len(masters) != len(parts) or found["dtypes"] != ["float32"] or any(a != b for a, b in found["elements"]):
            return found
        for step in range(exact.STEPS):
            optimizer.zero_grad()
            with Traffic() as log:
                for p, g in zip(parameters, exact.in_shapes(exact.gradient(step, rank, size)), strict=True):
                    p.backward(g)
                if step < 2:
                    optimizer.reduce()
                    # lists: tensors would count
                    gradients.append([m.grad if m.grad is None else m.grad.tolist() for m in masters])
                    optimizer.update()
                else:
                    optimizer.step()
            found["widened"] = _dtypes(parameters)
            if found["widened"] != ["bfloat16"]:  # the next step would fail for another reason
                return found
        optimizer.zero_grad()
        held = max(memory.settled(_held(size)), held_bytes(vars(optimizer)))  # a NumPy array is no tensor
    return found | {
        "first": gradients[0], "second": gradients[1], "missing": sum(g is None for step in gradients for g in step),
        "masters": [m.detach() for m in masters], "parameters": torch.cat([p.detach().reshape(-1) for p in parameters]),
        "sent": on_the_wire(log.events), "held": held, "outside": outside.kept,
    }  # fmt: skip


def _dtypes(tensors):
    return sorted({str(t.dtype).removeprefix("torch.") for t in tensors})


def _due(size):
    """Bytes between two steps."""
    return 2 * N + (8 if size == 3 else 12) * -(-N // size)


def _held(size):
    """With step counters, padding, and a message that is let go of a little late."""
    return _due(size) + 150 + 2 * half.CAPACITY / size


def _pair(got, _):
    return {"got": got[0], "expected": got[1]}


def _first_pair(got, _):
    return next(_pair(pair, _) for pair in got if pair[0] != pair[1])


def _first_gradients(ranks):
    return torch.stack([whole(ranks, "first"), whole(ranks, "second")])


LOOKS = [
    each_rank("a float32 master for each part", "count", None, "masters-count", holds=lambda got, _: got[0] == got[1],
         fields=_pair),
    each_rank("", "dtypes", ["float32"], "masters-not-float32", fields=lambda got, _: {"got": ", ".join(got)}),
    each_rank("", "elements", None, "masters-whole", holds=lambda got, _: all(a == b for a, b in got),
         fields=_first_pair),
    each_rank("on every rank the parameters stay in bfloat16", "widened", ["bfloat16"], "parameters-widened",
         fields=lambda got, _: {"got": ", ".join(got)}),
    each_rank("after reduce(), each master has the mean gradient", "missing", 0, "no-master-gradient"),
    Value("", _first_gradients, lambda size: exact.means(size)[:2],
          "wrong-master-gradient", holds=within(half.CLOSE)),
    *half.weights("updates much smaller than a step of bfloat16 add up in the masters, as in one process", "wrong-masters",
                  "the parameters are the rounded masters of all ranks", "wrong-parameters"),
    each_rank("two bytes an element in every message; between two steps, 2 bytes for each parameter, and 12 for each "
         "one in a rank's own shard", "sent", lambda size: 4.6 * N * (size - 1) / size, "messages-in-float32", holds=at_most),
    each_rank("", "held", _held, "held-too-much", holds=at_most, fields={"n": N}),
    each_rank("", "outside", 0.6 * 4 * N, "copy-outside", holds=at_most, fields=lambda got, _: {"found": got, "whole": 4 * N}),
]  # fmt: skip


def _on_gpu(_, MasterShards):  # noqa: N803
    parameters = [nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16, device=device()))]
    optimizer = MasterShards(parameters)
    (parameters[0].float().sum() * 2).backward()
    optimizer.step()


def balise_6(MasterShards):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, MasterShards, known=KNOWN)
    yield "the same with two ranks that each have a GPU"
    on_gpus(_on_gpu, MasterShards, known=left_on_cpu("masters-not-on-gpu"))
