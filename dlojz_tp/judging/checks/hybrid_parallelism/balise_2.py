"""Balise 2: what each rank holds of the model, and one step on the mesh, against one process."""

from functools import cache

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, within
from dlojz_tp.judging.checks.hybrid_parallelism import grid
from dlojz_tp.judging.probes.ranks import hung, killed_by, world_after_world
from dlojz_tp.parallel import Stage

STEPS = (8, 4), (9, 4)  # rows of the batch, micro-batches; the second does not divide


def observe(part_of, hybrid_step):
    """On a rank, for each mesh: what it holds, then two steps."""
    for shape, tied in grid.MESHES[dist.get_world_size()]:
        mesh = grid.joined(shape)
        part = part_of(grid.plain(tied), mesh)
        layers = list(grid.pieces(grid.own(tied), mesh.tensor).items())
        yield {"form": "a Stage" if isinstance(part, Stage) else type(part).__name__, "held": _held(part, mesh, layers),
               "words": sum(name.endswith("words") for name, _ in getattr(part, "named_parameters", list)())}  # fmt: skip
        yield from _steps(hybrid_step, part, mesh, layers)


def _held(part, mesh, layers):
    """The names of the plain model's layers whose parameters these are, in their order; "?" for others."""
    if mesh.pipeline.rank == 0:  # a tied head's words stand at both ends: here they are the entrance's
        layers = layers[::-1]
    names = {_key(p): name for name, layer in layers for p in layer.parameters()}
    return list(dict.fromkeys(names.get(_key(p), "?") for p in getattr(part, "parameters", list)()))


def _key(p):
    """The parameter's values, which no other has."""
    return p.detach().numpy().tobytes()


def _steps(hybrid_step, part, mesh, layers):
    """Of each step: what is computed with, what comes out, the gradients in the order of the model."""
    calls, mine = [], {_key(p): p for p in part.parameters()}
    part[0].register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    keys = [_key(p) for _, layer in layers for p in layer.parameters()]
    keys = dict.fromkeys(keys) if mesh.pipeline.rank == 0 else reversed(dict.fromkeys(reversed(keys)))
    held = [mine[key] for key in keys if key in mine]
    for rows, n in STEPS:
        calls.clear()
        part.zero_grad()
        loss = hybrid_step(part, mesh, grid.batch(rows), n)
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held]
        yield {"rows": sum(calls), "calls": len(calls), "loss": 0.0 if loss is None else float(loss), "none": loss is None,
               "gradients": torch.cat(gradients), "filled": any(p.grad is not None and not p.requires_grad for p in held)}  # fmt: skip


@cache
def _world(at):
    """(the mesh of each rank, tied head, rows, micro-batches) of what `at` names."""
    shape, tied, rows, n = ALL[at]
    return [grid.mesh_of(rank, shape) for rank in range(torch.Size(shape).numel())], tied, rows, n


def _shares(at):
    """What each rank must hold, in the words of `_held`; where stages are not alike, as the solution has it."""
    found = []
    for mesh in _world(at)[0]:
        stage, n = mesh.pipeline.rank, mesh.pipeline.size
        blocks = [f"block {k}" for k in range(grid.LAYERS * stage // n, grid.LAYERS * (stage + 1) // n)]
        found.append(["Entrance"] * (stage == 0) + blocks + ["Exit"] * (stage == n - 1))
    return found


def _words(at):
    """How many weights of words each rank holds."""
    ends = [sum(name in ("Entrance", "Exit") for name in mine) for mine in _shares(at)]
    return [min(n, 1) if _world(at)[1] else n for n in ends]


def _evenly(seen, due):
    """Whether all layers stand once along each pipeline, in order, cut as evenly as it goes."""
    names = ["Entrance", *(f"block {k}" for k in range(grid.LAYERS)), "Exit"]
    at = next(at for at in ALL if _shares(at) == due)
    for ranks in {tuple(mesh.pipeline.ranks) for mesh in _world(at)[0]}:
        blocks = [sum(name.startswith("block") for name in seen[rank]) for rank in ranks]
        if [name for rank in ranks for name in seen[rank]] != names or max(blocks) - min(blocks) > 1:
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


def _first_form(seen, due):
    return {"got": seen[0], "expected": due[0]}


def _rows_due(at):
    meshes, _, rows, _ = _world(at)
    return [len(torch.arange(rows).tensor_split(mesh.data.size)[mesh.data.rank]) for mesh in meshes]


def _of_rows(seen, due):
    return "whole-batch" if sum(seen) > sum(due) and len(set(seen)) == 1 else "other-rows"


def _losses_due(at):
    """Of each rank: the loss of the pipeline's own rows on its last stage, 0 elsewhere."""
    meshes, tied, rows, _ = _world(at)
    ends = [mesh.pipeline.rank == mesh.pipeline.size - 1 for mesh in meshes]
    return [grid.share_loss(tied, rows, m.data.size, m.data.rank) if end else 0.0 for m, end in zip(meshes, ends)]


def _along(values, meshes):
    """The tensors of all ranks, along one pipeline after the other: however its layers are cut into stages."""
    pipelines = sorted({tuple(mesh.pipeline.ranks) for mesh in meshes})
    return torch.cat([values[rank] for ranks in pipelines for rank in ranks])


@cache
def _gradients_due(at):
    meshes, tied, rows, _ = _world(at)
    return _along([grid.gradients(tied, rows, mesh) for mesh in meshes], meshes)


ALL = {
    f"{grid.told(shape, tied)}, {rows} rows": (shape, tied, rows, n)
    for some in grid.MESHES.values()
    for shape, tied in some
    for rows, n in STEPS
}
LOOKS = {
    "held": [
        Look("part_of: a Stage", "form", lambda at: ["a Stage"] * len(_world(at)[0]), "no-stage", fields=_first_form),
        Look("each pipeline holds the layers once along its stages, ends included, cut over the tensor ranks",
             "held", _shares, _of_layers,
             holds=_evenly, fields=_rank_fields),
        Look("a tied head on the embedding's stage is the embedding's parameter; otherwise the head has its own",
             "words", _words,
             lambda seen, due: "tied-twice" if sum(seen) > sum(due) else "one-for-two", fields=silent),
    ],
    "step": [
        Look("hybrid_step: each rank computes with the rows of its data coordinate", "rows", _rows_due, _of_rows, fields=silent),
        Look("in the micro-batches asked for", "calls", lambda at: [min(_world(at)[3], n) for n in _rows_due(at)], "not-in-parts",
             fields=silent),
        Look("frozen parameters have no gradient",
             "filled", lambda at: [False] * len(_world(at)[0]), "frozen-filled", fields=silent),
        Value("the gradients of one process: each rank has those of its part",
              lambda ranks: ranks[0]["gradients"], _gradients_due, "wrong-gradient",
              holds=within(1e-6), fields=silent),
        Look("the loss of a pipeline's own rows on its last stage, None elsewhere", "none",
             lambda at: [mesh.pipeline.rank < mesh.pipeline.size - 1 for mesh in _world(at)[0]], "wrong-step-loss", fields=silent),
        Value("", "loss", _losses_due, "wrong-step-loss", holds=within(1e-9)),
    ],
}  # fmt: skip
KNOWN = (
    (hung, "ranks-waiting"), (killed_by("SIGABRT"), "ranks-waiting"), ("Connection closed", "ranks-waiting"),
    ("'NoneType' object has no attribute 'group'", "no-ends-here"), ("'NoneType' object has no attribute 'size'", "no-ends-here"),
    ("NoneType", "gradient-none"), ("'Block' object has no attribute 'width'", "blocks-whole"),
)  # fmt: skip


def balise_2(part_of, hybrid_step):
    yield LOOKS["held"][0].claim
    first = f", {STEPS[0][0]} rows"
    at = {size: [(at, looks) for at in ALL if ALL[at][0] in dict(grid.MESHES[size])
                 for looks in (("held", "step") if at.endswith(first) else ("step",))] for size in (4, 3)}  # fmt: skip
    for size, ranks in world_after_world(observe, part_of, hybrid_step, known=KNOWN, sizes=tuple(at)):
        where, looks = at[size].pop(0)
        if looks == "step":  # along the pipelines
            whole = _along([rank["gradients"] for rank in ranks], _world(where)[0])
            ranks = [rank | {"gradients": whole} for rank in ranks]
        yield from judged(LOOKS[looks], lambda seen=ranks: seen, at=where, where=where)
