"""Balise 1: groups by block and root, and an optimizer for the shards."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.fsdp import common, watched

HINTS = {
    "not-a-pair": "`prepare` returns two things: the sharded model and its optimizer.",
    "optimizer-first": "The optimizer holds parameters that the model no longer has: you made it before `shard` "
    "replaced them, so its steps change nothing. Shard first.",
    "part-of-the-parameters": "The optimizer has {got} parameters, but the model has {expected} trainable ones.",
    "shard-not-called": "`prepare` must shard with the function that it is given: later balises pass it other "
    "functions.",
    "returned-model-dropped": "`prepare` must continue with what its argument `shard` returns: not every such "
    "function works in place.",
    "not-adamw": "The optimizer must be torch.optim.AdamW with the given learning rate and a weight decay of 0.1.",
}


def balise_1(shard, prepare):
    """Trained on 1 to 4 ranks: what a rank holds, gathers, frees; weights as in one process."""
    cases = [
        common.decoder("a decoder", frozen=("blocks.1.norm_attention.weight", "token_embedding.weight")),
        common.decoder("a decoder with a tied head", tied_head=True, layers=2, kv_heads=1),
    ]
    yield "every parameter is a shard, one group for each block and one for the rest, trained as in one process"
    prepared = []
    for size, ranks in common.on_ranks(_each, shard, prepare, cases):
        prepared += [(report.pop(), f"rank {rank} of {size}") for rank, report in enumerate(ranks) if size == 2]
        for case, reports in zip(_of_size(cases, size), zip(*ranks)):
            for rank, report in enumerate(reports):
                where = f"{case.name}, rank {rank} of {size}"
                common.well_formed(report, where)
                common.grouped_by_block(report, case, where)
            common.trained(reports, common.truth(case, size), f"{case.name}, {size} ranks")
    yield "the optimizer holds the shards"
    for report, where in prepared:
        _right_optimizer(report, where)


def _of_size(cases, size):
    """Both cases on two ranks, one on the others: a second at most."""
    return {2: cases, 1: cases[1:], 3: cases[1:], 4: cases[:1]}[size]


def _each(shard, prepare, cases):
    """On a rank: reports of the trainings; on 2 ranks, also what `prepare` makes, if all ranks could train."""
    reports = [watched.train(shard, case) for case in _of_size(cases, dist.get_world_size())]
    if dist.get_world_size() == 2:
        fine = not any(report["slug"] for report in reports)
        reports.append(_prepared(prepare, shard, cases[0]) if fine else {})
    return reports


def _prepared(prepare, shard, case):
    """On a rank: what `prepare` makes, given a `shard` of its own that also renames the model's class."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    made = []

    def watched(model, given):
        other = copy.deepcopy(model)  # not in place: the returned one is the sharded one
        made.append((shard(other, given), given is mesh))
        return made[-1][0]

    model = copy.deepcopy(case.model)
    answer = prepare(model, mesh, watched, 0.0123)
    if answer is None:
        return {"slug": "nothing-returned"}
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return {"slug": "not-a-pair", "got": type(answer).__name__}
    returned, optimizer = answer
    if not isinstance(returned, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        return {"slug": "not-a-pair", "got": ", ".join(type(part).__name__ for part in answer)}
    if not made:
        return {"slug": "shard-not-called"}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    mine = {id(p) for p in returned.parameters() if p.requires_grad}
    sharded = all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if not sharded or not held & {id(p) for p in made[-1][0].parameters()}:
        return {"slug": "returned-model-dropped" if returned is model else "optimizer-first"}
    if returned is not made[-1][0]:
        return {"slug": "returned-model-dropped"}
    groups = [(group["lr"], group["weight_decay"], tuple(group.get("betas", ()))) for group in optimizer.param_groups]
    return {
        "slug": "",
        "missing": len(mine - held),
        "counts": (len(mine & held), len(mine)),
        "kind": type(optimizer).__name__,
        "groups": groups,
    }


def _right_optimizer(report, where):
    if report["slug"]:
        raise Wrong(report["slug"], got=report.get("got", ""), where=where)
    if report["missing"]:
        got, expected = report["counts"]
        raise Wrong("part-of-the-parameters", got=got, expected=expected, where=where)
    other = [group for group in report["groups"] if group != (0.0123, 0.1, (0.9, 0.999))]
    if report["kind"] != "AdamW" or other:
        shown = [*other, *report["groups"]][0]
        raise Wrong("not-adamw", got=f"{report['kind']}, (lr, weight decay, betas) {shown}", where=where)
