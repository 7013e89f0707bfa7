"""Balise 2: what each rank holds of the model, and one step on the mesh, against one process."""

import torch
import torch.distributed as dist

from dlojz_tp.checking.looks import Look, Value, judged, silent, within
from dlojz_tp.checks.hybrid_parallelism import grid
from dlojz_tp.parallel import Stage
from dlojz_tp.probes.ranks import hung, killed_by, world_after_world

STEPS = (7, 2), (6, 3)  # rows of the batch, micro-batches; the first does not divide


def observe(part_of, hybrid_step):
    """On a rank, for each mesh: what it holds, then two steps."""
    for shape, tied in grid.MESHES[dist.get_world_size()]:
        mesh, model = grid.joined(shape), grid.plain(tied)
        part = part_of(model, mesh)
        yield {"form": "a Stage" if isinstance(part, Stage) else type(part).__name__, "held": _held(part, mesh, tied),
               "words": sum(1 for p in getattr(part, "parameters", list)() if getattr(p, "tied", False))}  # fmt: skip
        yield _steps(hybrid_step, part, mesh, tied, model)


def _held(part, mesh, tied):
    """The names of the plain model's layers whose parameters these are, in their order; "?" for others."""
    names = {p.detach().numpy().tobytes(): name
             for name, piece in reversed(grid.pieces(grid.plain(tied), mesh.tensor).items()) for p in piece.parameters()}  # fmt: skip
    if tied and mesh.pipeline.rank > 0:  # the same words stand at both ends
        names |= {
            p.detach().numpy().tobytes(): "Exit"
            for p in grid.pieces(grid.plain(tied), mesh.tensor)["Exit"].parameters()
        }
    mine = getattr(part, "parameters", list)()
    return list(dict.fromkeys(names.get(p.detach().numpy().tobytes(), "?") for p in mine))


def _steps(hybrid_step, part, mesh, tied, model):
    """What is computed with, what comes out, the gradients in the order of the truth."""
    calls, found = [], {"rows": [], "calls": [], "losses": [], "gradients": [], "filled": False}
    part[0].register_forward_pre_hook(lambda _, given: calls.append(given[0]))
    keys = [p.detach().numpy().tobytes() for p in grid.part(model, mesh).parameters()]
    mine = {p.detach().numpy().tobytes(): p for p in part.parameters()}
    for rows, n in STEPS:
        calls.clear()
        part.zero_grad()
        loss = hybrid_step(part, mesh, grid.batch(rows), n)
        found["rows"].append(sum(len(x) for x in calls))
        found["calls"].append(len(calls))
        found["losses"].append(0.0 if loss is None else float(loss))
        grads = [mine[key].grad for key in keys]
        found["gradients"] += [torch.zeros_like(mine[key]) if g is None else g.clone() for key, g in zip(keys, grads)]
        found["filled"] |= any(g is not None and not mine[key].requires_grad for key, g in zip(keys, grads))
    found["gradients"] = torch.cat([g.flatten() for g in found["gradients"]])
    return found


def _world(at):
    """(rank's mesh for each rank, tied head) of the mesh that `at` names."""
    shape, tied = next(one for some in grid.MESHES.values() for one in some if grid.told(one[0]) == at)
    return [grid.mesh_of(rank, shape) for rank in range(torch.Size(shape).numel())], tied


def _along(meshes, held):
    """[what the stages of a pipeline hold], one for each pipeline; `held`: of each rank."""
    return [[held[rank] for rank in mesh.pipeline.ranks] for mesh in meshes if mesh.pipeline.rank == 0]


def _shares(at):
    """What each rank must hold, in the words of `_held`."""
    meshes, tied = _world(at)
    found = []
    for mesh in meshes:
        stage, n = mesh.pipeline.rank, mesh.pipeline.size
        blocks = [f"block {k}" for k in range(grid.LAYERS * stage // n, grid.LAYERS * (stage + 1) // n)]
        found.append(["Entrance"] * (stage == 0) + blocks + ["Exit"] * (stage == n - 1))
    return found


def _evenly(seen, due):
    """Whether all layers are there once along each pipeline, in order, cut as evenly as it goes."""
    meshes, _ = _world(next(at for at in ALL if _shares(at) == due))
    whole = ["Entrance", *(f"block {k}" for k in range(grid.LAYERS)), "Exit"]
    for stages in _along(meshes, seen):
        blocks = [sum(name.startswith("block") for name in stage) for stage in stages]
        if sum(stages, []) != whole or max(blocks) - min(blocks) > 1:
            return False
    return True


def _of_layers(seen, due):
    """The hint for layers that are not where they should be."""
    if any("?" in mine for mine in seen):
        return "cut-elsewhere"
    if all(sum(name.startswith("block") for name in mine) == grid.LAYERS for mine in seen):
        return "all-layers"
    ends = [[name for name in mine if not name.startswith("block")] for mine in seen]
    right = [[name for name in mine if not name.startswith("block")] for mine in due]
    return "ends-wrong" if ends != right else "wrong-layers"


def _rank_fields(seen, due):
    """The first rank that holds other layers."""
    rank = next((k for k, (a, b) in enumerate(zip(seen, due)) if a != b), 0)
    return {
        "rank": rank,
        "got": f"rank {rank}: {', '.join(seen[rank]) or 'nothing'}",
        "expected": f"rank {rank}: {', '.join(due[rank])}",
    }


ALL = [grid.told(shape) for some in grid.MESHES.values() for shape, _ in some]


def _rows_due(at):
    meshes, _ = _world(at)
    return [[len(torch.arange(rows).tensor_split(m.data.size)[m.data.rank]) for rows, _ in STEPS] for m in meshes]


def _calls_due(at):
    return [[min(n, rows) for rows, (_, n) in zip(mine, STEPS)] for mine in _rows_due(at)]


def _losses_due(at):
    """Of each rank and step: the loss of the pipeline's own rows on its last stage, 0 elsewhere."""
    meshes, tied = _world(at)
    last = [m.pipeline.rank == m.pipeline.size - 1 for m in meshes]
    return torch.tensor([[grid.share_loss(tied, rows, m.data.size, m.data.rank) if end else 0.0 for rows, _ in STEPS]
                         for m, end in zip(meshes, last)], dtype=torch.float64)  # fmt: skip


def _gradients_due(at):
    meshes, tied = _world(at)
    return [torch.cat([p.detach().flatten() for rows, _ in STEPS for p in grid.part(grid.truth(tied, rows)[2], mesh).parameters()])
            for mesh in meshes]  # fmt: skip


def _of_rows(seen, due):
    whole = [[rows for rows, _ in STEPS]] * len(seen)
    return "whole-batch" if seen == whole else "other-rows"


LOOKS = {
    "held": [
        Look("part_of: a Stage", "form", lambda at: ["a Stage"] * len(_world(at)[0]), "no-stage",
             fields=lambda seen, due: {"got": seen[0], "expected": "a Stage"}),
        Look("the layers of a pipeline once along its stages, ends included, cut over the tensor ranks", "held", _shares, _of_layers,
             _evenly, _rank_fields),
        Look("a tied head on the embedding's stage is the embedding's parameter", "words",
             lambda at: [sum(name in ("Entrance", "Exit") for name in mine) and _world(at)[1] for mine in _shares(at)], "tied-twice",
             fields=silent),
    ],
    "step": [
        Look("hybrid_step: each rank computes with the rows of its data coordinate", "rows", _rows_due, _of_rows, fields=silent),
        Look("in the micro-batches asked for", "calls", _calls_due, "not-in-parts", fields=silent),
        Look("what is frozen has no gradient", "filled", lambda at: [False] * len(_world(at)[0]), "frozen-filled", fields=silent),
        Value("the gradients of one process, on each rank those of its part", "gradients", _gradients_due, "wrong-gradient",
              within(1e-9), silent),
        Value("the loss of a pipeline's own rows on its last stage, else None",
              lambda ranks: torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64), _losses_due, "wrong-step-loss",
              within(1e-9)),
    ],
}  # fmt: skip
KNOWN = (
    (hung, "ranks-waiting"), (killed_by("SIGABRT"), "ranks-waiting"), ("Connection closed", "ranks-waiting"),
    ("'NoneType' object has no attribute 'group'", "no-ends-here"), ("NoneType", "gradient-none"),
)  # fmt: skip


def balise_2(part_of, hybrid_step):
    yield LOOKS["held"][0].claim
    at = {
        size: [(grid.told(shape), looks) for shape, _ in grid.MESHES[size] for looks in ("held", "step")]
        for size in (4, 3)
    }
    for size, ranks in world_after_world(observe, part_of, hybrid_step, known=KNOWN, sizes=tuple(at), timeout=8):
        mesh, looks = at[size].pop(0)
        yield from judged(LOOKS[looks], lambda seen=ranks: seen, at=mesh, where=mesh)
