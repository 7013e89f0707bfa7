"""Balise 11: data parallelism over tensor groups: the sampler, and one step of 2D parallelism."""

import contextlib
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing.common import AS_GROUP, AS_OP, IN_PLACE, Borrowed, CheckRanks, by_world
from dlojz_tp.judging.checks.tensor_slicing.layouts import group_of
from dlojz_tp.judging.checks.tensor_slicing.sampler import SAMPLES, mistake_in_samples, sampled
from dlojz_tp.judging.checks.tensor_slicing.small_net import (
    MOMENTUM,
    RATE,
    ROWS,
    Plain,
    Recorder,
    cut,
    gradients_of,
    loss_of,
    rows,
    sliced,
)
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each
from dlojz_tp.judging.probes.networks import state
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import Call, Traffic, on_the_wire
from dlojz_tp.judging.probes.withheld import Withheld

# world size -> sizes of a tensor group; of 4 ranks 2 first: where both groups have two, a mistake shows its kind
TENSOR = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (2, 1, 4)}
STEPS = 3
SLACK = 512  # bytes that may travel for the loss

KNOWN = (
    *IN_PLACE,
    AS_OP,
    AS_GROUP,
    ("Invalid rank", "sampler-rank"),
    ("NoneType", "no-gradient-2d"),
    ("Expected parameter `tensor`", "no-gradient-2d"),
)


def _borrowed(*_, **__):
    raise Borrowed("DistributedDataParallel")


def _train(make_sampler, step_2d):
    nn.parallel.DistributedDataParallel.__init__ = _borrowed  # this process ends with the check
    return [_train_in(make_sampler, step_2d, tensor) for tensor in TENSOR[dist.get_world_size()]]


def _train_in(make_sampler, step_2d, tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    across, _ = group_of([range(k, world, tensor) for k in range(tensor)])
    beside, _ = group_of([range(k, k + tensor) for k in range(0, world, tensor)])
    grid = SimpleNamespace(tensor=CheckRanks(beside), data=CheckRanks(across))
    torch.manual_seed(1000 + rank)
    model = sliced(grid.tensor)
    with Traffic() as alone:
        loss_of(sliced(grid.tensor), _share(0, grid.data)).backward()
    optimizer = Recorder(model)
    found = {"tensor": tensor, "samples": sampled(make_sampler, grid), "alone": alone.calls}
    found |= {key: [] for key in ("steps", "later", "losses", "weights", "rows")}

    def counted(model, batch):
        found["rows"][-1] += len(batch)
        return loss_of(model, batch)

    for step in range(STEPS):
        found["rows"].append(0)
        with Withheld() as running, Traffic() if step == 0 else contextlib.nullcontext() as traffic:
            loss = step_2d(model, _share(step, grid.data), counted, optimizer, grid)
        found["losses"].append(loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss)
        found["later"].append(gradients_of(model))
        running.left()
        found["steps"].append(len(optimizer.seen))
        if step == 0:
            found["calls"] = traffic.calls
        found["weights"].append(state(model))
    found["seen"] = optimizer.seen
    return found


def _share(step, data):
    return rows(step)[data.rank :: data.size].clone()


def _filled(step, got):
    seen = got["seen"][step]
    name = next((name for name in ("frozen", "unused") if seen[name] is not None), None)
    return name and ("none-filled", {"name": name, "got": seen[name], "where": f"step {step}"})


def _of_gradients(step, got):
    """What the gradients are that the optimizer saw in a step, where they are not the right ones."""
    rank, world, tensor, seen = got["rank"], got["size"], got["tensor"], got["seen"][step]
    data, place = world // tensor, rank % tensor
    wanted = _due("gradients", step, got)
    if _all_same(seen, wanted):
        return None
    cuts = [[_slices(gradients, k, tensor) for k in range(tensor)] for gradients in _local(step, data)]
    mine, group = cuts[rank // tensor][place], cuts[rank // tensor]
    everyone = [part for parts in cuts for part in parts]
    quiet = _sent(got) < _held(got) / 2
    averaged = _all_same(got["weights"][step], _due("weights", step, got))
    candidates = (
        ("gradients-lost", _add([wanted], 0.0)),
        ("data-silent", mine if quiet else None),
        ("data-silent", _add([mine], 1 / data) if quiet else None),
        ("gradients-kept", _add([wanted, _due("gradients", step - 1, got)]) if step else None),
        ("data-summed", _add([wanted], data) if data > 1 else None),
        ("averaged-after-step", mine if _all_same(got["later"][step], wanted) else None),
        ("weights-averaged", mine if averaged else None),
        ("gradient-of-one", cuts[0][place] if rank >= tensor else None),
        ("data-not-written", mine),
        ("data-not-waited", _add([mine], 1 / data)),
        ("divided-by-world", _add([wanted], 1 / tensor) if tensor > 1 else None),
        ("averaged-over-tensor", _add(group) if tensor > 1 else None),
        ("averaged-over-tensor", _add(group, 1 / tensor) if tensor > 1 else None),
        ("averaged-over-tensor", _add(group, 1 / data) if tensor > 1 else None),
        ("averaged-over-world", _add(everyone, 1 / world) if tensor > 1 else None),
        ("averaged-over-world", _add(everyone, 1 / data) if tensor > 1 else None),
        ("averaged-over-world", _add(everyone) if tensor > 1 else None),
    )
    slug = next((s for s, value in candidates if value is not None and _all_same(seen, value)), "gradient-2d")
    slug = "gradients-lost" if all(value is None for value in seen.values()) else slug
    name = next(name for name in wanted if not _same(seen[name], wanted[name]))
    came = "no gradient (None)" if seen[name] is None else seen[name]
    return slug, {"n": data, "expected": wanted[name], "got": came, "where": f"gradient of {name}, step {step}"}


def _of_weights(step, got):
    weights, due = got["weights"][step], _due("weights", step, got)
    name = next((name for name, value in weights.items() if not close(value, due[name])), None)
    where = f"{name} after step {step}"
    return name and ("weights-2d", {"expected": due[name], "got": weights[name], "where": where})


@cache
def _alone(steps):
    """One process with the whole batch: its "model" after some steps; on the way "losses", "gradients", "weights".

    SGD written out: an optimizer of PyTorch's needs seconds where it is the first of its process.
    """
    model, losses, gradients, weights, momenta = Plain(), [], [], [], {}
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(model, rows(step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: value for name, value in gradients_of(model).items() if value is not None})
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    momenta[name] = MOMENTUM * momenta.get(name, 0) + p.grad
                    p -= RATE * momenta[name]
        weights.append(state(model))
    return {"model": model, "losses": losses, "gradients": gradients, "weights": weights}


def _local(step, data):
    """Gradients of each data rank's share, after `step` right steps."""
    model, found = _alone(step)["model"], []
    for share in range(data):
        model.zero_grad()
        loss_of(model, rows(step)[share::data]).backward()
        found.append({name: value for name, value in gradients_of(model).items() if value is not None})
    return found


def _due(kind, step, got):
    """What a rank shall have of the truth's "gradients" or "weights"."""
    return _slices(_alone(STEPS)[kind][step], got["rank"] % got["tensor"], got["tensor"])


def _slices(gradients, place, tensor):
    return {name: cut(name, value, place, tensor) for name, value in gradients.items()}


def _add(several, factor=1.0):
    return {name: factor * sum(part[name] for part in several) for name in several[0]}


def _same(got, wanted):
    return got is not None and close(got, wanted)


def _all_same(got, wanted):
    return all(_same(got[name], value) for name, value in wanted.items())


def _of_loss(got):
    rank, world, tensor = got["rank"], got["size"], got["tensor"]
    data = world // tensor
    for step, (loss, wanted) in enumerate(zip(got["losses"], _alone(STEPS)["losses"], strict=True)):
        about = {"n": data, "expected": wanted, "got": loss, "where": f"step {step}"}
        if loss is None:
            return "nothing-returned", about
        if isinstance(loss, float) and close(loss, wanted):
            continue
        if factors := [n for n in (data, tensor, world) if n > 1 and close(loss, wanted * n)]:
            return "loss-summed", about | {"n": factors[0]}
        share = loss_of(Plain(), rows(0)[rank // tensor :: data]).item()
        return "loss-of-share" if step == 0 and data > 1 and close(loss, share) else "loss-wrong", about
    return None


def _held(got):
    """Bytes of the gradients."""
    return sum(value.numel() * value.element_size() for value in got["seen"][0].values() if value is not None)


def _sent(got):
    """Bytes that a rank sends in the first step, beside those of the tensor group's own work."""
    return on_the_wire(got["calls"]) - on_the_wire(got["alone"])


def _wasteful(got):
    share, data = ROWS * got["tensor"] // got["size"], got["size"] // got["tensor"]
    if max(got["rows"]) > share:
        return "rows-2d", {"n": max(got["rows"]), "share": share, "where": "one step"}
    sent, enough = _sent(got), on_the_wire([Call("all_reduce", _held(got), data)])
    about = {"sent": int(sent), "enough": int(enough), "where": "one step"}
    return ("too-much-2d", about) if sent > 1.05 * enough + SLACK else None


LOOKS = [
    *(recognised("the sampler: the same samples in a tensor group, disjoint shares for the data ranks" * (not k),
                 partial(mistake_in_samples, n)) for k, n in enumerate(SAMPLES)),
    Look("gradients and weights, in grids of 1 to 4 ranks: those of the global batch, cut into slices", "steps",
         list(range(1, STEPS + 1)), "no-step",
         fields=lambda steps, due: silent(steps, due) | {"n": steps[0], "where": "first step"}),
    *(recognised("", partial(find, step)) for step in range(STEPS) for find in (_filled, _of_gradients, _of_weights)),
    recognised("the loss of the global batch", _of_loss),
    recognised("each row is computed once, each gradient travels once", _wasteful),
]  # fmt: skip


def _judge(world, ranks):
    every = []
    for grid in zip(*ranks, strict=True):
        drawn, tensor = [got["samples"] for got in grid], grid[0]["tensor"]
        for rank, got in reversed(list(enumerate(grid))):  # the last first: rank 0 alone may be right
            place = f"rank {rank} of {world}, {world // tensor} tensor groups of {tensor}"
            every.append((world, rank, got | {"drawn": drawn, "place": place}))
    yield from at_each(LOOKS, every)


def balise_11(make_sampler, step_2d):
    """A sliced network in grids of up to 4 ranks, against one process with the whole batch."""
    yield LOOKS[0].claim
    yield from by_world(_judge, _train, make_sampler, step_2d, known=KNOWN)
