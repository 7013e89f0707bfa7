"""Balise 8: masters and states in CPU memory, judged on a pretended GPU that counts what crosses the bus."""

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import at_most
from dlojz_tp.judging.checks.zero_under_the_hood import half
from dlojz_tp.judging.checks.zero_under_the_hood.common import world
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.judging.probes import exact_training as exact
from dlojz_tp.judging.probes.exact_training import N
from dlojz_tp.judging.probes.memory import held_bytes
from dlojz_tp.judging.probes.settling import settle
from dlojz_tp.judging.probes.shared_looks import each_rank

SLACK = 80  # bytes: single numbers, padding
KNOWN = (
    ("tensor with device type 'cuda'", "masters-on-gpu"),
    *half.OTHER_DTYPE,
    (("in collective", "same device"), "mixed-collective"),
    *((words, "gradient-left-on-gpu") for words in ("same device", "different device", "on device")),
)


def observe(OffloadedShards):  # noqa: N803
    """On a rank: the training of balise 6, on tensors that say they are on a GPU."""
    rank, size = world()
    kind, options, _ = exact.training(size)
    with pretend_gpu(nccl=False) as gpu:
        parameters = [nn.Parameter(value.to("cuda")) for value in exact.in_shapes(exact.START)]
        optimizer = OffloadedShards(exact.groups_of(parameters, size), kind, capacity=half.CAPACITY, **options)
        for step in range(exact.STEPS):
            optimizer.zero_grad()
            gradients = [g.to("cuda") for g in exact.in_shapes(exact.gradient(step, rank, size))]
            gpu.copies.clear()
            for p in parameters:
                _give(p, gradients.pop(0))
            optimizer.step()
            moved = [k for k, p in enumerate(parameters) if not p.is_cuda]
            if moved:  # the next step would fail for another reason
                return {"moved": moved}
        crossed = {way: _crossed(gpu, way) for way in ("to cpu", "to gpu")}
        after = settle(lambda: gpu.requested[0], 2 * N + 2 * SLACK)
        optimizer.zero_grad()
        masters, states = list(optimizer.shards), optimizer.optimizer.state.values()
        on_gpu = [name for of in states for name, t in of.items() if isinstance(t, torch.Tensor) and t.is_cuda]
        return {
            "moved": moved, "masters on": [m.device.type for m in masters], "states on gpu": on_gpu,
            "places": half.places(optimizer, parameters), "masters": [m.detach().cpu().clone() for m in masters],
            "parameters": torch.cat([p.detach().cpu().reshape(-1) for p in parameters]),
            **crossed, "after": after, "held": settle(lambda: gpu.requested[0], 2 * N + 2 * SLACK), "reached": held_bytes(vars(optimizer)),
        }  # fmt: skip


def _give(p, gradient):
    """What backward does in the end: fill p.grad, then call the hooks."""
    p.grad = gradient if p.grad is None else p.grad + gradient
    for hook in list((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)


def _crossed(gpu, way):
    """Bytes that crossed the bus one way in the last step, and whether numbers of more than two bytes did."""
    copies = [copy for copy in gpu.copies if copy.way == way]
    return sum(copy.bytes for copy in copies), any(copy.item > 2 and copy.bytes > copy.item for copy in copies)


def _crosses(claim, way):
    """A look at the bytes that cross the bus: those of a shard in bfloat16."""

    def hint(got, _):
        return f"{'float32' if got[1] else 'more'}-to-{way}"

    return each_rank(claim, f"to {way}", _shard, hint, holds=_few, fields=_crossing)


def _shard(size):
    """Bytes of a shard in bfloat16."""
    return 2 * N / size


def _few(got, due):
    return got[0] <= due + SLACK


def _crossing(got, due):
    return {"got": got[0], "expected": round(due)}


def _all_numbers(ranks):
    return [torch.cat([*rank["masters"], rank["parameters"]]) for rank in ranks]


LOOKS = [
    each_rank("masters and states are in CPU memory, the parameters on the (simulated) GPU", "moved", [], "moved-off-gpu",
         fields=lambda got, _: {"got": got[0]}),
    each_rank("", "masters on", None, "masters-on-gpu", holds=lambda got, _: set(got) == {"cpu"}),
    each_rank("", "states on gpu", [], "states-on-gpu", fields=lambda got, _: {"name": got[0]}),
    each_rank("the same weights as in one process", _all_numbers, None, "read-before-arrival", holds=lambda got, _: not got.isnan().any()),
    *half.weights("", "offload-wrong-weights", "", "offload-wrong-parameters"),
    _crosses("only the rank's own shard crosses the bus, in bfloat16: gradients down, parameters up", "cpu"),
    _crosses("", "gpu"),
    each_rank("", "held", 2 * N + 2 * SLACK, "kept-on-gpu", holds=at_most, fields={"expected": 2 * N}),
    each_rank("", "after", 2 * N + 2 * SLACK, "gradient-kept-on-gpu", holds=at_most, fields={"expected": 2 * N}),
    each_rank("", "reached", lambda size: 2 * N + 18 * N / size + 4 * SLACK, "whole-on-cpu", holds=at_most),  # 12 N / size, and buffers
]  # fmt: skip


def balise_8(OffloadedShards):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, OffloadedShards, known=KNOWN, sizes=(3, 1, 2))
