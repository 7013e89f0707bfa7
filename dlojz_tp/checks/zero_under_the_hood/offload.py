"""Balise 8: masters and states in CPU memory, judged on a pretended GPU that counts what crosses the bus."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.zero_under_the_hood import half
from dlojz_tp.checks.zero_under_the_hood.away import Away, pretended_gpu
from dlojz_tp.checks.zero_under_the_hood.half import CAPACITY, TRAININGS, initial, own_part, places, truth
from dlojz_tp.checks.zero_under_the_hood.worlds import by_worlds, each_training
from dlojz_tp.probes.memory import held_bytes
from dlojz_tp.probes.settling import settle

SIZES = ((3, 1, 2),)  # one launch
SLACK = 64  # bytes
CLOSE = 2e-5

HINTS = {
    "masters-on-gpu": "A master is on the GPU. Masters, and with them the states, belong into CPU memory.",
    "states-on-gpu": "A state of the optimizer, {name}, is on the GPU. States are made beside what the optimizer was given: give it the "
    "masters that are on the CPU, from the start.",
    "gradient-left-on-gpu": "The masters are on the CPU, their gradients are not: {error}. Bring each to the CPU in reduce().",
    "read-before-arrival": "Values were read before they had arrived: a copy to the CPU with non_blocking=True returns at once. "
    "Synchronise before the optimizer reads them, or let the copy block.",
    "old-masters": "The parameters on the GPU stand still: the optimizer updates other masters than those of self.masters. Move the ones it "
    "knows, by master.data, or exchange them in its param_groups.",
    "offload-no-update": "The parameters on the GPU stand still. Copy each rounded master back into own, then gather.",
    "moved-off-gpu": "Parameter {got} is no longer on the GPU. Only masters and states move.",
    "offload-wrong-weights": "The parameters are not those of balise 6, which computes the same on the GPU.",
    "whole-to-cpu": "{got} bytes went to the CPU in a step; this rank's shard of the gradients has {expected}. Reduce first: the others "
    "own the rest.",
    "float32-to-cpu": "{got} bytes went to the CPU in a step, twice those of the bfloat16 shard ({expected}). Let it cross as it is, and "
    "convert on the CPU. A copy that does not block converts on the GPU: cast in a step of its own.",
    "more-to-cpu": "{got} bytes went to the CPU in a step; only this rank's shard of the gradients has to: {expected}.",
    "float32-to-gpu": "{got} bytes went back to the GPU in a step, twice those of the bfloat16 shard ({expected}). Round on the CPU: a "
    "copy_ into a bfloat16 tensor does, where it blocks; with non_blocking=True it rounds on the GPU.",
    "more-to-gpu": "{got} bytes went back to the GPU in a step; only this rank's shard of the parameters has to: {expected}.",
    "mixed-collective": "A collective was given tensors on the CPU and on the GPU together. Copy the rounded master into part.own, "
    "which stays a view of part.flat on the GPU, and gather that.",
    "whole-on-cpu": "Between two steps this rank keeps {got} bytes, in CPU memory and on the GPU; the parameters, and masters and "
    "states of its own shard, make {expected}. The other ranks keep the rest.",
    "kept-on-gpu": "Between two steps the GPU holds {got} bytes; the parameters have {expected}. What else stays there?",
}
KNOWN = (
    ("tensor with device type 'cuda'", "masters-on-gpu"),
    (("in collective", "same device"), "mixed-collective"),
    ("same device", "gradient-left-on-gpu"),
    ("different device", "gradient-left-on-gpu"),
    ("on device", "gradient-left-on-gpu"),
)


def balise_8(OffloadedShards):  # noqa: N803
    """The trainings of balise 6, on tensors that say they are on a GPU, on 1, 2 and 3 ranks."""
    looks = {
        "masters and states are in CPU memory, the parameters on the GPU (a pretended one)": each_training(_placed),
        "the same weights as in one process": each_training(_weights),
        "only the own shard crosses the bus, in bfloat16: gradients down, parameters up": each_training(_bus),
    }
    yield from by_worlds(looks, _train, OffloadedShards, known=KNOWN, launches=SIZES)


def _train(OffloadedShards):  # noqa: N803
    return {name: _training(OffloadedShards, name) for name in half.trainings(dist.get_world_size())}


def _training(OffloadedShards, name):  # noqa: N803
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, options, steps = TRAININGS[name]
    upstream = [[g.bfloat16() for g in half.gradients(step, rank, size)] for step in range(steps)]
    with pretended_gpu() as bus:
        parameters = [nn.Parameter(bus.away(value)) for value in initial()]
        optimizer = OffloadedShards(half.groups_of(parameters, name), kind, capacity=CAPACITY, **options)
        for step in range(steps):
            optimizer.zero_grad()
            bus.to_cpu = bus.to_gpu = 0
            bus.wide.clear()
            for p, g in zip(reversed(parameters), reversed(upstream[step]), strict=True):
                _give(p, bus.away(g.clone()))
            optimizer.step()
            moved = [k for k, p in enumerate(parameters) if _place(p) != "cuda"]
            if moved:  # the next step would fail for another reason
                return {"moved": moved[0]}
        optimizer.zero_grad()
        parts = places(optimizer, parameters)
        held, reached = settle(bus.held, _on_gpu(parts, size) + 2 * SLACK), held_bytes(vars(optimizer))
        masters = list(optimizer.shards)
        states = {
            key: _place(value)
            for of in optimizer.optimizer.state.values()
            for key, value in of.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        return {
            "masters": [_plain(m).detach().clone() for m in masters],
            "places": parts,
            "on": [_place(m) for m in masters],
            "states": states,
            "parameters": [_plain(p).detach().clone() for p in parameters],
            "to cpu": bus.to_cpu,
            "to gpu": bus.to_gpu,
            "wide": bus.wide,
            "held": held,
            "strangers": any(
                id(m) not in {id(p) for g in optimizer.optimizer.param_groups for p in g["params"]} for m in masters
            ),
            "reached": reached,
        }


def _give(p, gradient):
    """What backward does in the end: fill p.grad, then call the hooks."""
    p.grad = gradient if p.grad is None else p.grad + gradient
    for hook in list((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)


def _place(tensor) -> str:
    return tensor.place.type if isinstance(tensor, Away) else tensor.device.type


def _plain(tensor):
    return tensor.inner if isinstance(tensor, Away) else tensor


def _placed(got, _name, _rank, _size, where):
    if "moved" in got:
        raise Wrong("moved-off-gpu", got=got["moved"], where=where)
    for place in got["on"]:
        if place != "cpu":
            raise Wrong("masters-on-gpu", where=where)
    for name, place in got["states"].items():
        if place != "cpu":
            raise Wrong("states-on-gpu", name=name, where=where)


def _weights(got, name, rank, size, where):
    steps = truth(name, size)
    wanted = [value.bfloat16() for value in steps[-1]]
    if any(m.isnan().any() for m in [*got["masters"], *got["parameters"]]):
        raise Wrong("read-before-arrival", where=where)
    for k, (p, value) in enumerate(zip(got["parameters"], wanted, strict=True)):
        if bool(((p.double() - value.double()).abs() <= value.double().abs() / 128).all()):
            continue
        stands = all(torch.equal(p, value) for p, value in zip(got["parameters"], initial(), strict=True))
        slug = ("old-masters" if got["strangers"] else "offload-no-update") if stands else "offload-wrong-weights"
        raise Wrong(slug, expected=value, got=p, where=f"{where}, parameter {k}")
    for part, master in zip(got["places"], got["masters"], strict=True):
        value = own_part([steps[-1][k] for k in part], rank, size)
        if not close(master.reshape(-1), value, CLOSE):
            raise Wrong("offload-wrong-weights", expected=value, got=master, where=f"{where}, a master")


def _on_gpu(parts, size) -> int:
    """Bytes of the parameters in their flat tensors."""
    return 2 * size * sum(-(-sum(initial()[k].numel() for k in part) // size) for part in parts)


def _bus(got, _name, _rank, size, where):
    whole = _on_gpu(got["places"], size)
    own = whole // size
    for key, wide, more in (("to cpu", "float32-to-cpu", "more-to-cpu"), ("to gpu", "float32-to-gpu", "more-to-gpu")):
        if got[key] > own + SLACK:
            slug = wide if key in got["wide"] else more
            if slug == more and key == "to cpu" and size > 1 and abs(got[key] - whole) <= SLACK:
                slug = "whole-to-cpu"
            raise Wrong(slug, got=got[key], expected=own, where=where)
    if got["held"] > whole + 2 * SLACK:
        raise Wrong("kept-on-gpu", got=got["held"], expected=whole, where=where)
    if size > 1 and got["reached"] > whole + 9 * own + 4 * SLACK:  # 6 are due; buffers of a shard may stay
        raise Wrong("whole-on-cpu", got=got["reached"], expected=whole + 6 * own, where=where)
