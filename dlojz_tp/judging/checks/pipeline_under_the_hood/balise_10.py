"""Balise 10: pipelines side by side, their gradients averaged within groups."""

from collections import deque
from functools import cache
from itertools import product
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import by_worlds, itself, stage_look, stage_mistake
from dlojz_tp.judging.probes.ranks import hung, killed_by
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Withheld

# Ranks: numbers of stages; one world after the other. First where replicas and stages are different numbers, so that a
# wrong divisor can be told.
WORLDS = {6: (2, 3), 4: (2, 1, 4), 1: (1,)}
LAYERS, WIDTH = 12, 3
ROWS = (12, 7)
A_FEW = 64  # bytes that may be told to all ranks: numbers of rows, say
KNOWN = (
    (hung, "groups-not-everywhere"),
    (killed_by("SIGABRT"), "groups-not-everywhere"), ("UnboundLocalError", "no-group-kept"), ("NoneType", "grad-none"),
)  # fmt: skip


def balise_10(make_grid, hybrid_step):
    """Grids of 1, 4 and 6 ranks: places, groups, and the gradients of one process."""
    looks = {claim: _of_each(*more) for claim, more in LOOKS.items()}
    yield from by_worlds(looks, observe, make_grid, hybrid_step, sizes=tuple(WORLDS), known=KNOWN, timeout=6)


def _of_each(numbers, *tables):
    """A look at the worlds: each table at each rank and grid. numbers: of the batches; (None,) for the grid itself."""

    def all_of_them(worlds):
        for table in tables:
            cells = [(ranks, p, rank) for size, ranks in worlds.items() for p in WORLDS[size] for rank in range(size)]
            for (ranks, p, rank), number in product(cells, numbers):
                found = [got[p] if number is None else got[p]["steps"][number] for got in ranks]
                at = _at(rank, len(ranks), p, found)
                deque(judged(table, lambda found=found, rank=rank: found[rank], at=at, where=at.where), maxlen=0)

    return all_of_them


def _at(rank, size, p, found):
    """Where a rank stands, and what all ranks did there."""
    where = f"rank {rank} of {size}, {p} stages × {size // p} replicas"
    where += f", batch of {found[rank]['rows']}" if "rows" in found[rank] else ""
    return SimpleNamespace(
        rank=rank, size=size, n_stages=p, n_replicas=size // p, stage=rank % p, replica=rank // p, where=where, found=found,
        pipeline=[rank // p * p + stage for stage in range(p)], same=list(range(rank % p, size, p)),
    )  # fmt: skip


@cache
def _batch(rows: int):
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, y * torch.linspace(0.5, 4, rows).double()[:, None]


class _Layer(nn.Module):
    """tanh(x W + b), scaled by a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = (nn.Parameter(torch.randn(n, WIDTH).double() / 2) for n in (WIDTH, 1))
        self.scale = nn.Parameter(torch.rand(WIDTH).double() + 0.5, requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.shift) * self.scale


def _model() -> list[nn.Module]:
    """Twelve layers of one size, so that a sum over the wrong ranks is a sum all the same."""
    with seeded(2):
        return [_Layer() for _ in range(LAYERS)]


def _loss_of(layers, x, targets):
    for layer in layers:
        x = layer(x)
    return (x - targets).square().sum(dim=1).mean()


def observe(make_grid, hybrid_step):
    """What this rank made of each grid of its world."""
    return {p: _on_grid(make_grid, hybrid_step, p) for p in WORLDS[dist.get_world_size()]}


def _on_grid(make_grid, hybrid_step, p):
    rank, size = dist.get_rank(), dist.get_world_size()
    made = make_grid(p)
    if not isinstance(made, tuple | list) or len(made) != 4:
        return {"what": "nothing (None)" if made is None else f"{type(made).__name__} {str(made)[:60]}"}
    stage, replica, pipeline, group = made
    try:
        members = None if group is None else list(dist.get_process_group_ranks(group))  # None would be the world
    except Exception:
        members = None
    got = {"cell": (stage, replica), "pipeline": pipeline, "group": members}
    # the answer's second function is tried with the right grid only: another one might stand still
    right = [r for r in range(size) if r % p == rank % p]
    votes = [None] * size
    dist.all_gather_object(votes, members == right and (stage, replica) == (rank % p, rank // p))
    if all(votes):
        got["steps"] = [_one_step(hybrid_step, p, rows, replica, group) for rows in ROWS]
    return got


def _one_step(hybrid_step, p, rows, replica, group):
    stage = dist.get_rank() % p
    layers, calls, own = [layer.to(launch.device()) for layer in _model()], [], []
    mine = [q for layer in layers[stage * LAYERS // p : (stage + 1) * LAYERS // p] for q in layer.parameters()]
    before = [q.detach().clone() for q in mine]

    def step(x, targets):
        """Stands for a pipeline: the gradients of this stage, of the mean loss of these rows."""
        calls.append((x.detach().cpu().clone(), targets.detach().cpu().clone()))
        loss = _loss_of(layers, x, targets)
        moving = [q for q in mine if q.requires_grad]
        for q, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
            q.grad = g if q.grad is None else q.grad + g
        own.extend(q.grad.cpu().clone() for q in moving)
        return loss.detach() if stage == p - 1 else None

    x, targets = (tensor.to(launch.device()) for tensor in _batch(rows))
    with Withheld() as running, Traffic() as traffic:
        loss = hybrid_step(step, list(mine), x, targets, replica, group)
    returned = [None if q.grad is None else q.grad.cpu().clone() for q in mine if q.requires_grad]
    group_size = dist.get_world_size(group)
    return {
        "rows": rows, "calls": calls, "times": len(calls), "own": own, "gradients": returned,
        "loss": None if loss is None else _as_float(loss),
        "beyond": sum(call.bytes for call in traffic.calls if call.group > group_size), "running": running.left(),
        "filled": any(q.grad is not None for q in mine if not q.requires_grad),
        "changed": not all(torch.equal(a, b) for a, b in zip(before, mine, strict=True)),
    }  # fmt: skip


def _as_float(loss):
    """A number; NaN for what is none."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


@cache
def _truth(rows, p, stage):
    layers = _model()
    loss = _loss_of(layers, *_batch(rows))
    stages = layers[stage * LAYERS // p : (stage + 1) * LAYERS // p]
    mine = [q for layer in stages for q in layer.parameters() if q.requires_grad]
    return loss.item(), torch.autograd.grad(loss, mine)


def _wrong_cell(cell, at):
    if tuple(cell) == (at.stage, at.replica):
        return None
    turned = (at.replica, at.stage), (at.rank // at.n_replicas, at.rank % at.n_replicas)
    slug = "stage-replica-swapped" if tuple(cell) in turned else "wrong-cell"
    words = "stage {}, replica {}".format
    return slug, {"expected": words(at.stage, at.replica), "got": words(*cell)}


def _wrong_pipeline(got, at):
    ranks = got["pipeline"]
    right = isinstance(ranks, list | tuple | range) and list(ranks) == at.pipeline
    return None if right else ("wrong-pipeline", {"expected": at.pipeline, "got": ranks})


def _wrong_group(got, at):
    members = got["group"]
    if members == at.same:
        return None
    if members is None or at.rank not in members:
        slug = "not-in-group"
    elif members == at.pipeline:
        slug = "group-along-pipeline"
    else:
        slug = "group-is-world" if len(members) == at.size else "wrong-group"
    return slug, {"expected": at.same, "got": members}


def _share(step, at, which):
    """What came of the inputs (0) or of the targets (1), and what is due."""
    return step["calls"][0][which], _batch(step["rows"])[which].tensor_split(at.n_replicas)[at.replica]


def _other_rows(step, at) -> str:
    mine, (x, _) = step["calls"][0][0], _batch(step["rows"])
    if close(mine, x):
        return "whole-batch-everywhere"
    by_rank = len(x) % at.size == 0 and close(mine, x.tensor_split(at.size)[at.rank])
    return "share-by-rank" if by_rank else "other-rows"


def _rows(step, at):
    x, _ = _batch(step["rows"])
    number = lambda row: next((j for j, own in enumerate(x) if close(row, own)), None)  # noqa: E731
    got, due = ([number(row) for row in rows] for rows in _share(step, at, 0))
    return {"expected": due, "got": got}


def _due(step, at):
    return list(_truth(step["rows"], at.n_stages, at.stage)[1])


def _mistake(step, at) -> str:
    """The known mistake that gives these gradients."""
    if any(found["running"] for found in at.found):
        return "reduce-not-waited"
    n, p, size, truth, rank = at.n_replicas, at.n_stages, at.size, _due(step, at), at.rank
    own, shares = (
        [found["own"] for found in at.found],
        [len(x) / step["rows"] for x in torch.arange(step["rows"]).tensor_split(n)],
    )

    def total(members, weights):
        parts = zip(*(own[r] for r in members), strict=True)
        return [sum(w * g for w, g in zip(weights, part, strict=True)) for part in parts]

    def times(factor, gradients):
        return [factor * g for g in gradients]

    everyone, share = [shares[r // p] for r in range(size)], shares[at.replica]
    known = {
        "replica-only": [own[rank], times(share, own[rank]), times(1 / n, own[rank])],
        "replicas-summed": [total(at.same, [1.0] * n)],
        "replicas-alike": [total(at.same, [1 / n] * n)],
        "weighted-late": [times(share, total(at.same, [1.0] * n))],
        "divided-by-world": [total(at.same, [1 / size] * n), times(1 / size, truth), times(1 / p, truth)],
        "summed-over-world": [*(times(v, total(range(size), everyone)) for v in (1, 1 / n, 1 / size, 1 / p)),
                              *(total(range(size), [w] * size) for w in (1, 1 / n, 1 / size))],
        "weighted-twice": [times(1 / n, truth), total(at.same, [s * s for s in shares]), times(share, truth), total(at.same, [1 / n**2] * n)],
    }  # fmt: skip
    got = step["gradients"]
    return next((slug for slug, values in known.items() if any(close(got, v, 1e-6) for v in values)), "wrong-hybrid")


def _gradient(step, at):
    pairs = enumerate(zip(step["gradients"], _due(step, at), strict=True))
    k, got, due = next(((k, g, t) for k, (g, t) in pairs if g is None or not close(g, t, 1e-6)), (0, None, None))
    return {"expected": due, "got": got, "where": f"{at.where}, parameter {k}"}


def _due_loss(step, at):
    last = at.stage == at.n_stages - 1
    return _truth(step["rows"], at.n_stages, at.stage)[0] if last else None


def _right_loss(step, at) -> bool:
    due = _due_loss(step, at)
    return step["loss"] is None if due is None else step["loss"] is not None and close(step["loss"], due, 1e-6)


def _not_the_loss(step, at) -> str:
    loss, layers, n = step["loss"], _model(), at.n_replicas
    if loss is not None and _due_loss(step, at) is not None:
        parts = zip(*(whole.tensor_split(n) for whole in _batch(step["rows"])), strict=True)
        losses = [_loss_of(layers, *part).item() for part in parts]
        if n > 1 and close(loss, losses[at.replica], 1e-6):
            return "loss-of-replica"
        if any(close(loss, sum(losses) / d, 1e-6) for d in (1, n)):
            return "loss-unweighted"
    return "reduce-not-waited" if step["running"] and _due_loss(step, at) is not None else "wrong-hybrid-loss"


CELL = [
    Look("", lambda got: got.get("what", ""), "", "not-a-grid", fields="what"),
    stage_mistake("cell", _wrong_cell),
    stage_mistake(itself, _wrong_pipeline),
]
GROUP = [stage_mistake(itself, _wrong_group)]
ROWS_RUN = [
    stage_look("times", lambda n, _: n == 1, "step-twice", "n"),
    stage_look(itself, lambda step, at: close(*_share(step, at, 0)), _other_rows, _rows),
    stage_look(itself, lambda step, at: close(*_share(step, at, 1)), "targets-of-others"),
]
GRADIENTS = [
    Look("", "changed", False, "updated-inside"),
    stage_look(itself, lambda step, at: close(step["gradients"], _due(step, at), 1e-6), _mistake, _gradient),
    Look("", "beyond", A_FEW, "sent-to-all", holds=at_most),
    Look("", "filled", False, "frozen-filled", fields={"expected": "None", "got": "a tensor"}),
]
LOSS = [
    stage_look(itself, _right_loss, _not_the_loss,
               lambda step, at: {"expected": _due_loss(step, at), "got": step["loss"]}),
]  # fmt: skip
LOOKS = {
    "6 ranks: stage, replica and pipeline of each rank": ((None,), CELL),
    "its data group: the ranks with the same stage": ((None,), GROUP),
    "a batch that divides evenly: each pipeline runs its replica's rows, gradients as in one process": ((0,), ROWS_RUN, GRADIENTS),
    "a batch that doesn't: each pipeline runs its replica's rows, gradients as in one process": ((1,), ROWS_RUN, GRADIENTS),
    "the loss of the whole batch on the last stage": ((0, 1), LOSS),
}  # fmt: skip
