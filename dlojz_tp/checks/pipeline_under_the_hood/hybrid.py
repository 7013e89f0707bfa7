"""Balise 10: pipelines side by side, their gradients averaged within groups."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.common import by_worlds
from dlojz_tp.probes.ranks import hung, killed_by
from dlojz_tp.probes.seeded import seeded
from dlojz_tp.probes.traffic import Traffic
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "groups-not-everywhere": "The ranks are stuck, or one gave up: {error}. All ranks of a group must make the "
                             "same calls in the same order. new_group(), and all_reduce() without group=, are "
                             "calls of the whole world: every rank creates every group, even those that it isn't "
                             "in.",
    "no-group-kept": "{error}: this rank never found its own group in the loop. Are stage and replica swapped?",
    "not-a-grid": "make_grid returns four things: the stage, the replica, the list of this pipeline's ranks, and a "
                  "process group. Here: {what}.",
    "stage-replica-swapped": "Rank {rank} of {size} has stage and replica swapped: rank = replica × n_stages + "
                             "stage, so that neighbours in a pipeline are neighbouring ranks.",
    "wrong-cell": "Rank {rank} of {size} is on the wrong stage or in the wrong replica: rank = replica × n_stages "
                  "+ stage.",
    "wrong-pipeline": "The pipeline of rank {rank} is {expected}, the ranks that hold the stages of its replica, "
                      "starting with stage 0; here it is {got}.",
    "not-in-group": "Rank {rank} isn't in the group that it returned, or it returned none. All ranks create all "
                    "groups; a rank keeps the one that it is in, and mustn't lose it in later turns of a loop.",
    "group-along-pipeline": "The data group of rank {rank} holds the stages of one pipeline. These are different "
                            "layers, whose gradients have nothing to do with each other. The group must hold the "
                            "ranks with the same stage.",
    "group-is-world": "The data group of rank {rank} is the whole world. It must hold only the ranks with the same "
                      "stage.",
    "wrong-group": "The data group of rank {rank} isn't the group of the ranks with its stage.",
    "whole-batch-everywhere": "Replica {replica} ran the whole batch. Each replica takes its own rows: use "
                              "tensor_split with the number of replicas.",
    "share-by-rank": "Rank {rank} ran one rank's share of the rows. All ranks of a pipeline work on the same rows, "
                     "those of their replica: split by the number of replicas, not of ranks.",
    "other-rows": "Replica {replica} ran rows {got}; its own are {expected}, x.tensor_split(number of "
                  "replicas)[replica]. They are consecutive, even when the batch doesn't divide evenly.",
    "targets-of-others": "The targets don't belong to the rows that came with them.",
    "step-twice": "step() was called {n} times. Call it once: its gradients add up.",
    "reduce-not-waited": "When hybrid_step returned, an all-reduce was still running. Call wait() for each one "
                         "that you started with async_op.",
    "replica-only": "These are the gradients of this replica's rows alone: nothing was summed over the data group, "
                    "or the sum went into a new tensor. Change p.grad in place.",
    "replicas-summed": "The replicas' means were added up. Weight each one by its rows over all rows.",
    "weighted-late": "You weight the gradients by the rank's share of the rows after the sum. Weight each by its "
                     "own share first, then add them.",
    "replicas-alike": "This is right for equal shares and wrong for unequal ones: weight each by its rows over all "
                      "rows.",
    "divided-by-world": "You divide the gradients by the number of ranks. They are a mean over the batch, and only "
                        "the replicas share the batch.",
    "summed-over-world": "The gradients of all stages were added together: all_reduce without group= runs over the "
                         "whole world.",
    "sent-to-all": "The gradients are right, but {got} bytes of them went to ranks of other stages, which have no use for them. "
    "Average within the data group.",
    "weighted-twice": "The gradients are weighted twice, before the sum and after it.",
    "grad-none": "For a frozen parameter, p.grad is None: {error}",
    "frozen-filled": "A frozen parameter had p.grad None and now has a tensor there. An optimizer with weight "
                     "decay or momentum would move it: leave None as it is.",
    "updated-inside": "The weights changed inside the step. The update comes after it, once the gradients of all replicas are there.",
    "wrong-hybrid": "The gradients differ from those of one process with the whole batch.",
    "loss-of-replica": "That is the loss of this replica's rows. Every replica contributes to the loss of the batch.",
    "loss-unweighted": "The replicas' losses were added or averaged without weighting them by their rows.",
    "wrong-hybrid-loss": "The last stage must return the mean loss of the whole batch, as a tensor or a number; "
                         "the others must return None.",
}  # fmt: skip

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
    looks = {
        "6 ranks: stage, replica and pipeline of each rank": _of_each(_cell),
        "its data group: the ranks with the same stage": _of_each(_group),
        "a batch that divides evenly: each pipeline runs its replica's rows, gradients as in one process": _trained(0),
        "a batch that doesn't: each pipeline runs its replica's rows, gradients as in one process": _trained(1),
        "the loss of the whole batch on the last stage": _of_each(_loss),
    }
    yield from by_worlds(looks, _on_rank, make_grid, hybrid_step, sizes=tuple(WORLDS), known=KNOWN, timeout=6)


def _of_each(look):
    """A look at the worlds that calls look(result, rank, size, stages) for each rank and grid."""

    def all_of_them(worlds):
        for size, ranks in worlds.items():
            for p in WORLDS[size]:
                for rank, got in enumerate(ranks):
                    look(got[p], rank, size, p)

    return all_of_them


def _trained(number):
    """A look at the step of one batch: the rows of all ranks, then their gradients."""

    def look(worlds):
        cells = [(p, rank, size, ranks) for size, ranks in worlds.items() for p in WORLDS[size] for rank in range(size)]
        for p, rank, size, ranks in cells:
            _rows(ranks[rank][p]["steps"][number], rank, size, p)
        for p, rank, size, ranks in cells:
            _gradients(ranks[rank][p]["steps"][number], ranks, number, rank, size, p)

    return look


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


def _on_rank(make_grid, hybrid_step):
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
        "rows": rows, "calls": calls, "own": own, "loss": None if loss is None else _as_float(loss), "gradients": returned,
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


def _where(rank, size, p):
    return f"rank {rank} of {size}, {p} stages × {size // p} replicas"


def _cell(got, rank, size, p):
    where = _where(rank, size, p)
    if "what" in got:
        raise Wrong("not-a-grid", what=got["what"], where=where)
    wanted, cell = (rank % p, rank // p), tuple(got["cell"])
    if cell != wanted:
        n = size // p
        slug = "wrong-cell"
        if cell in (wanted[::-1], (rank // n, rank % n)):
            slug = "stage-replica-swapped"
        raise Wrong(slug, rank=rank, size=size, expected=f"stage {wanted[0]}, replica {wanted[1]}",
                    got=f"stage {cell[0]}, replica {cell[1]}", where=where)  # fmt: skip
    wanted = [rank // p * p + s for s in range(p)]
    if not isinstance(got["pipeline"], list | tuple | range) or list(got["pipeline"]) != wanted:
        raise Wrong("wrong-pipeline", rank=rank, expected=wanted, got=got["pipeline"], where=where)


def _group(got, rank, size, p):
    wanted, where, members = [r for r in range(size) if r % p == rank % p], _where(rank, size, p), got["group"]
    if members == wanted:
        return
    if members is None or rank not in members:
        raise Wrong("not-in-group", rank=rank, expected=wanted, got=members, where=where)
    slug = "wrong-group"
    if members == [rank // p * p + s for s in range(p)]:
        slug = "group-along-pipeline"
    elif len(members) == size:
        slug = "group-is-world"
    raise Wrong(slug, rank=rank, expected=wanted, got=members, where=where)


def _rows(step, rank, size, p):
    n, replica, where = size // p, rank // p, _where(rank, size, p)
    x, targets = _batch(step["rows"])
    if len(step["calls"]) != 1:
        raise Wrong("step-twice", n=len(step["calls"]), where=where)
    mine, wanted = step["calls"][0], x.tensor_split(n)[replica]
    if not close(mine[0], wanted):
        by_rank = len(x) % size == 0 and close(mine[0], x.tensor_split(size)[rank])
        slug = "share-by-rank" if by_rank else "other-rows"
        slug = "whole-batch-everywhere" if close(mine[0], x) else slug
        expected, got = (
            [next((j for j, own in enumerate(x) if close(row, own)), None) for row in rows]
            for rows in (wanted, mine[0])
        )
        raise Wrong(slug, replica=replica, rank=rank, expected=expected, got=got, where=where)
    if not close(mine[1], targets.tensor_split(n)[replica]):
        raise Wrong("targets-of-others", where=where)


@cache
def _truth(rows, p, stage):
    layers = _model()
    loss = _loss_of(layers, *_batch(rows))
    stages = layers[stage * LAYERS // p : (stage + 1) * LAYERS // p]
    mine = [q for layer in stages for q in layer.parameters() if q.requires_grad]
    return loss.item(), torch.autograd.grad(loss, mine)


def _gradients(step, ranks, number, rank, size, p):
    n, where = size // p, f"{_where(rank, size, p)}, batch of {step['rows']}"
    if step["changed"]:
        raise Wrong("updated-inside", where=where)
    truth, got = list(_truth(step["rows"], p, rank % p)[1]), step["gradients"]
    if close(got, truth, 1e-6):
        if step["beyond"] > A_FEW:
            raise Wrong("sent-to-all", got=step["beyond"], where=where)
        if step["filled"]:
            raise Wrong("frozen-filled", expected="None", got="a tensor", where=where)
        return
    if any(found[p]["steps"][number]["running"] for found in ranks):
        raise Wrong("reduce-not-waited", where=where)
    shares = [len(part) / step["rows"] for part in torch.arange(step["rows"]).tensor_split(n)]
    own = [ranks[r][p]["steps"][number]["own"] for r in range(size)]

    def total(members, weights):
        parts = zip(*(own[r] for r in members), strict=True)
        return [sum(w * g for w, g in zip(weights, part, strict=True)) for part in parts]

    same = list(range(rank % p, size, p))
    everyone = [
        total(range(size), [w * v for w in [shares[r // p] for r in range(size)]]) for v in (1, 1 / n, 1 / size, 1 / p)
    ]
    plain = [total(range(size), [w] * size) for w in (1, 1 / n, 1 / size)]
    known = {
        "replica-only": [own[rank], [g * shares[rank // p] for g in own[rank]], [g / n for g in own[rank]]],
        "replicas-summed": [total(same, [1.0] * n)],
        "replicas-alike": [total(same, [1 / n] * n)],
        "weighted-late": [[g * shares[rank // p] for g in total(same, [1.0] * n)]],
        "divided-by-world": [total(same, [w / size for w in (1.0,) * n]), [g / size for g in truth], [g / p for g in truth]],
        "summed-over-world": [*everyone, *plain],
        "weighted-twice": [[g / n for g in truth], total(same, [s * s for s in shares]), [g * shares[rank // p] for g in truth],
                           total(same, [1 / n**2] * n)],
    }  # fmt: skip
    slug = next((s for s, values in known.items() if any(close(got, v, 1e-6) for v in values)), "wrong-hybrid")
    k = next((k for k, (g, t) in enumerate(zip(got, truth, strict=True)) if g is None or not close(g, t, 1e-6)), 0)
    raise Wrong(slug, expected=truth[k], got=got[k], where=f"{where}, parameter {k}")


def _loss(got, rank, size, p):
    for step in got["steps"]:
        _loss_of_batch(step, rank, size, p)


def _loss_of_batch(step, rank, size, p):
    n, where = size // p, f"{_where(rank, size, p)}, batch of {step['rows']}"
    if rank % p != p - 1:
        if step["loss"] is not None:
            raise Wrong("wrong-hybrid-loss", expected="None", got=step["loss"], where=where)
        return
    x, targets = _batch(step["rows"])
    layers = _model()
    losses = [_loss_of(layers, *part).item() for part in zip(x.tensor_split(n), targets.tensor_split(n), strict=True)]
    truth = _truth(step["rows"], p, rank % p)[0]
    if step["loss"] is None or not close(step["loss"], truth, 1e-6):
        slug = "reduce-not-waited" if step["running"] else "wrong-hybrid-loss"
        if step["loss"] is not None and n > 1 and close(step["loss"], losses[rank // p], 1e-6):
            slug = "loss-of-replica"
        elif step["loss"] is not None and any(close(step["loss"], sum(losses) / d, 1e-6) for d in (1, n)):
            slug = "loss-unweighted"
        raise Wrong(slug, expected=truth, got=step["loss"], where=where)
