"""Balise 11: data parallelism over tensor groups: the sampler, and one step of 2D parallelism."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import AS_GROUP, AS_OP, IN_PLACE, Borrowed, CheckRanks, by_world
from dlojz_tp.checks.tensor_slicing.layouts import group_of
from dlojz_tp.checks.tensor_slicing.sampler import SAMPLES, judge_samples, sampled
from dlojz_tp.checks.tensor_slicing.small_net import (
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
from dlojz_tp.probes.networks import state
from dlojz_tp.probes.traffic import Call, Traffic, on_the_wire
from dlojz_tp.probes.withheld import Withheld

TENSOR = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4)}  # world size -> sizes of a tensor group
STEPS = 3
SLACK = 512  # bytes that may travel for the loss

HINTS = {
    "no-step": "You called the optimizer's step {n} times in one training step, not once.",
    "data-silent": "Nothing travels between the data ranks: each copy of the model trains only on its own share.",
    "data-summed": "The gradient is the *sum* over the {n} data ranks. The loss is a mean over the global batch, "
                   "so divide by the number of data ranks.",
    "averaged-over-world": "You added up the gradients of all ranks of the world. Tensor ranks hold different "
                           "slices, so their gradients have nothing to do with each other. Reduce over the data "
                           "group.",
    "divided-by-world": "You divided the sum over the data ranks by the size of the world, or twice. The sum has "
                        "{n} terms, one for each data rank: divide by their number, once.",
    "averaged-over-tensor": "You added up the gradients over the tensor group, whose ranks hold different slices. "
                            "Reduce over the data group.",
    "averaged-after-step": "You average the gradients after the optimizer's step, so the step used this rank's own "
                           "gradients. Average before the step.",
    "data-not-written": "The data ranks exchanged values, but the optimizer saw this rank's own gradients. You "
                        "reduced a copy, or did not wait for the result. It has to be in p.grad before the step.",
    "weights-averaged": "You average the weights after the step. Only for plain gradient descent is that the same. "
                        "Adam divides by each rank's own second moments and trains differently. Average the "
                        "gradients, before the step.",
    "gradient-of-one": "This is only the gradient of data rank 0: it was sent to the others, and theirs are lost. "
                       "Average them.",
    "data-not-waited": "This is this rank's own gradient, divided: the values of the other data ranks had not "
                       "arrived yet. Wait for them, then divide.",
    "gradients-lost": "There are no gradients left when the optimizer steps: you set them to zero after backward.",
    "gradients-kept": "The gradients still include those of the previous step. Set them to zero first.",
    "no-gradient-2d": "A frozen or unused parameter has p.grad None. Leave it out.",
    "none-filled": "{name} has no gradient (p.grad is None), but you gave the optimizer zeros for it. With weight "
                   "decay or momentum, it then moves frozen or unused parameters. Leave None.",
    "gradient-2d": "The gradient is not that of the global batch.",
    "loss-of-share": "This is only the loss of this rank's own share. Return the mean over the data ranks, which "
                     "is the loss of the global batch.",
    "loss-summed": "This loss is too large by a factor of {n}: you compute a sum over ranks instead of a mean.",
    "loss-wrong": "The loss is not the mean over the global batch.",
    "weights-2d": "The gradients are right when the optimizer steps, but afterwards the weights are not those of "
                  "one process.",
    "rows-2d": "This rank computed the loss of {n} rows in a step, but its share has {share}. Each data rank "
               "computes only its own rows, once. Send gradients, not the batch.",
    "too-much-2d": "Besides those of its tensor group, a rank sends {sent} bytes; {enough} are enough for the "
                   "gradients. Send each gradient once. The ranks of a tensor group already agree on what they "
                   "hold in common.",
}  # fmt: skip
KNOWN = (*IN_PLACE, AS_OP, AS_GROUP, ("Invalid rank", "sampler-rank"), ("NoneType", "no-gradient-2d"), ("Expected parameter `tensor`", "no-gradient-2d"))


def balise_11(make_sampler, step_2d):
    """A sliced network in grids of up to 4 ranks, against one process with the whole batch."""
    yield from by_world(_judge, _train, make_sampler, step_2d, known=KNOWN)


def _judge(world, ranks):
    truth = dict(zip(("losses", "gradients", "weights"), _alone(STEPS)[1:], strict=True))
    grids = [(world, tensor, [rank[k] for rank in ranks]) for k, tensor in enumerate(TENSOR[world])]
    grids.sort(key=lambda grid: grid[:2] != (4, 2))  # both groups have two ranks there: a mistake shows its kind
    yield "the sampler: the same samples in a tensor group, disjoint shares for the data ranks"
    for world, tensor, ranks in grids:
        for n in SAMPLES:
            judge_samples([got["samples"][n] for got in ranks], n, world, tensor)
    yield "gradients and weights, in grids of 1 to 4 ranks: those of the global batch, cut into slices"
    for world, tensor, ranks in grids:
        for rank, got in reversed(list(enumerate(ranks))):  # the last first: rank 0 alone may be right
            _gradients(got, truth, rank, world, tensor)
    yield "the loss of the global batch"
    for world, tensor, ranks in grids:
        for rank, got in enumerate(ranks):
            _loss(got, truth, rank, world, tensor)
    yield "each row is computed once, each gradient travels once"
    for world, tensor, ranks in grids:
        for rank, got in enumerate(ranks):
            _frugal(got, world, tensor, _where(rank, world, tensor, "one step"))


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
    found = {
        "samples": sampled(make_sampler, grid),
        "alone": alone.calls,
        "steps": [],
        "later": [],
        "losses": [],
        "weights": [],
        "rows": [],
    }

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


def _where(rank, world, tensor, what):
    return f"rank {rank} of {world}, {world // tensor} tensor groups of {tensor}, {what}"


def _gradients(got, truth, rank, world, tensor):
    data, place = world // tensor, rank % tensor
    if got["steps"] != list(range(1, STEPS + 1)):
        raise Wrong("no-step", n=got["steps"][0], where=_where(rank, world, tensor, "first step"))
    kept = {}
    for step, seen in enumerate(got["seen"]):
        if filled := [name for name, value in seen.items() if value is not None and name in ("frozen", "unused")]:
            raise Wrong(
                "none-filled", got=seen[filled[0]], name=filled[0], where=_where(rank, world, tensor, f"step {step}")
            )
        wanted = _slices(truth["gradients"][step], place, tensor)
        if _all_same(seen, wanted):
            kept = wanted
            for name, value in got["weights"][step].items():
                if not close(value, part := cut(name, truth["weights"][step][name], place, tensor)):
                    where = _where(rank, world, tensor, f"{name} after step {step}")
                    raise Wrong("weights-2d", expected=part, got=value, where=where)
            continue
        own = _local(step, data)
        cuts = [[_slices(g, k, tensor) for k in range(tensor)] for g in own]
        mine, group = cuts[rank // tensor][place], cuts[rank // tensor]
        everyone = [part for parts in cuts for part in parts]
        silent = _sent(got) < _held(got) / 2
        candidates = (
            ("gradients-lost", _add([wanted], 0.0)),
            ("data-silent", mine if silent else None),
            ("data-silent", _add([mine], 1 / data) if silent else None),
            ("gradients-kept", _add([wanted, kept]) if step else None),
            ("data-summed", _add([wanted], data) if data > 1 else None),
            ("averaged-after-step", mine if _all_same(got["later"][step], wanted) else None),
            ("weights-averaged", mine if _right_weights(got, truth, step, place, tensor) else None),
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
        where = _where(rank, world, tensor, f"gradient of {name}, step {step}")
        came = "no gradient (None)" if seen[name] is None else seen[name]
        raise Wrong(slug, expected=wanted[name], got=came, where=where, n=data)


def _alone(steps):
    """One process with the whole batch: its network after some steps; on the way losses, gradients, weights.

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
    return model, losses, gradients, weights


def _local(step, data):
    """Gradients of each data rank's share, after `step` right steps."""
    model, found = _alone(step)[0], []
    for share in range(data):
        model.zero_grad()
        loss_of(model, rows(step)[share::data]).backward()
        found.append({name: value for name, value in gradients_of(model).items() if value is not None})
    return found


def _slices(gradients, place, tensor):
    return {name: cut(name, value, place, tensor) for name, value in gradients.items()}


def _add(several, factor=1.0):
    return {name: factor * sum(part[name] for part in several) for name in several[0]}


def _same(got, wanted):
    return got is not None and close(got, wanted)


def _all_same(got, wanted):
    return all(_same(got[name], value) for name, value in wanted.items())


def _right_weights(got, truth, step, place, tensor):
    wanted = {name: cut(name, value, place, tensor) for name, value in truth["weights"][step].items()}
    return _all_same(got["weights"][step], wanted)


def _loss(got, truth, rank, world, tensor):
    data = world // tensor
    for step, (loss, wanted) in enumerate(zip(got["losses"], truth["losses"], strict=True)):
        where = _where(rank, world, tensor, f"step {step}")
        if loss is None:
            raise Wrong("nothing-returned", where=where)
        if not isinstance(loss, float):
            raise Wrong("loss-wrong", expected=wanted, got=loss, where=where)
        if close(loss, wanted):
            continue
        slug, n = "loss-wrong", data
        if step == 0 and data > 1 and close(loss, loss_of(Plain(), rows(0)[rank // tensor :: data]).item()):
            slug = "loss-of-share"
        for n in {data, tensor, world} - {1}:
            if close(loss, wanted * n):
                raise Wrong("loss-summed", n=n, expected=wanted, got=loss, where=where)
        raise Wrong(slug, n=n, expected=wanted, got=loss, where=where)


def _held(got):
    """Bytes of the gradients."""
    return sum(value.numel() * value.element_size() for value in got["seen"][0].values() if value is not None)


def _sent(got):
    """Bytes that a rank sends in the first step, beside those of the tensor group's own work."""
    return on_the_wire(got["calls"]) - on_the_wire(got["alone"])


def _frugal(got, world, tensor, where):
    share, data = ROWS * tensor // world, world // tensor
    if max(got["rows"]) > share:
        raise Wrong("rows-2d", n=max(got["rows"]), share=share, where=where)
    enough = on_the_wire([Call("all_reduce", _held(got), data)])
    if _sent(got) > 1.05 * enough + SLACK:
        raise Wrong("too-much-2d", sent=int(_sent(got)), enough=int(enough), where=where)
