"""Balise 1: groups by block and root, and an optimizer for the shards."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import of_each, on_each
from dlojz_tp.judging.probes.shared_looks import each_rank


def _each(shard, prepare, cases):
    """On a rank: reports of the trainings; on 2 ranks, also what `prepare` makes, if all ranks could train."""
    reports = [watched.train(shard, case) for case in cases[dist.get_world_size()]]
    if dist.get_world_size() == 2:
        fine = all(report["slug"] in ("", "tie-cut") for report in reports)
        reports.append(_prepared(prepare, shard, cases[2][0]) if fine else {})
        if reports[-1].get("slug") == "returned-model-dropped":
            reports[-1]["in place"] = _prepared(prepare, shard, cases[2][0], copied=False)
    return reports


def _prepared(prepare, shard, case, *, copied=True):
    """On a rank: what `prepare` makes, given a `shard` of its own. copied: it shards a copy, and returns that."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    made = []

    def watched(model, given):
        other = copy.deepcopy(model) if copied else model
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
        return {"slug": "returned-model-dropped" if copied and returned is model else "optimizer-first"}
    if returned is not made[-1][0]:
        return {"slug": "returned-model-dropped"}
    groups = [(group["lr"], group["weight_decay"], tuple(group.get("betas", ()))) for group in optimizer.param_groups]
    return {"slug": "", "held": (len(mine & held), len(mine)), "kind": (type(optimizer).__name__, groups)}


def _last(report):
    """What was prepared last: where the model returned was dropped, that with a `shard` that works in place."""
    return report.get("in place", report)


def _unprepared(report):
    """The mistake that is left where `shard` works in place."""
    slug, got = _last(report)["slug"], _last(report).get("got", "")
    if slug == "returned-model-dropped":  # that is not at the edge
        raise Wrong(slug)
    return slug and (slug, {"got": got})


def _left_out(report):
    held, parameters = _last(report)["held"]
    return held != parameters and ("part-of-the-parameters", {"got": held, "expected": parameters})


def _not_adamw(prepared, _):
    kind, groups = prepared
    shown = next((group for group in groups if group != GROUP), groups[0])
    return {"expected": "", "got": f"{kind}, (lr, weight decay, betas) {shown}"}


GROUP = 0.0123, 0.1, (0.9, 0.999)
PREPARED = [
    each_rank("the optimizer holds the shards", of_each(lambda report: report["slug"] * ("in place" in report)), "",
              "returned-model-dropped"),
    on_each("", _unprepared), on_each("", _left_out),
    each_rank("", of_each(lambda report: _last(report)["kind"]), ("AdamW", {GROUP}), "not-adamw",
              holds=lambda got, due: (got[0], set(got[1])) == due, fields=_not_adamw),
]  # fmt: skip


def balise_1(shard, prepare):
    """Trained on 1 to 4 ranks: what a rank holds, gathers, frees; weights as in one process."""
    frozen = "blocks.1.norm_attention.weight", "token_embedding.weight"
    cases = (
        common.decoder("a decoder", frozen=frozen),
        common.decoder("a decoder with a tied head", tied_head=True, layers=2, kv_heads=1),
    )
    parts = {2: cases, 1: cases[1:], 3: cases[1:], 4: cases[:1]}  # by ranks: a second at most
    claim = "every parameter is a shard, one group for each block and one for the rest, trained as in one process"
    for size, ranks in common.on_ranks(_each, shard, prepare, parts):
        if size == 2:
            prepared = [reports.pop() for reports in ranks]
        for case, *reports in zip(parts[size], *ranks):
            yield from common.judged_training(claim, reports, case)
    yield from judged(PREPARED, lambda: prepared)
