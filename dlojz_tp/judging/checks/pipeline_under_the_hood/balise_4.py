"""Balise 4: the step in micro-batches."""

import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, edge
from dlojz_tp.judging.checks.pipeline_under_the_hood import common, steps
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import looked, right_step, stage_look, stage_mistake, stages
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus

CASES = ((12, 4), (9, 4), (5, 5), (7, 1))  # rows, micro-batches; 9 rows in 4: chunk makes 3 of them, split 5


def observe(gpipe_step, cases):
    """On a rank: two steps of each batch."""
    return [
        common.run_step(gpipe_step, lambda *given, m=m: gpipe_step(*given, common.loss_function, m), rows, calls=2)
        for rows, m in cases
    ]


def _on_gpu(_, gpipe_step):
    place = common.Place(dist.get_rank(), dist.get_world_size())
    x, targets = (tensor.to(launch.device()) for tensor in common.batch(4))
    gpipe_step(common.my_stage(place.stage, place.n_stages), place, x, targets, common.loss_function, 2)


def _kinds(got):
    return "".join(kind for kind, _, _ in got["seen"])


def _not_cut(got, at):
    rows, most = max(steps.forwards(got)), -(-at.rows // at.pieces)
    return ("not-cut", {"got": rows, "most": most}) if rows > most else None


def _too_often(got, at):
    n = len(steps.forwards(got)) / 2
    return ("run-too-often", {"got": n, "m": at.pieces}) if n != at.pieces else None


def _forward_first(kinds, at) -> bool:
    """Whether all micro-batches go forward before a gradient comes back, on the stages in the middle."""
    return at.stage or at.last or kinds.startswith("F" * at.pieces)


def _last_first(got, at):
    went, back = ([first for kind, _, first in got["seen"] if kind == what][: at.pieces] for what in "FB")
    return back == went[::-1] or not _kinds(got).startswith("F" * at.pieces)


CUT = [
    stage_mistake(common.itself, _not_cut),
    stage_mistake(common.itself, _too_often),
    stage_look(_kinds, _forward_first, "one-at-a-time", lambda kinds, at: {"got": " ".join(kinds[: 2 * at.pieces])}),
    stage_look(common.itself, _last_first, "first-one-back"),
    *steps.CROSSING,
]


def balise_4(gpipe_step):
    """Gradients and losses with even and uneven micro-batches; how the batch was cut, and in which order."""
    even, cases = "12 rows in 4 micro-batches, on 1, 2, 3 and 4 stages: loss and every gradient", CASES
    yield even
    try:
        found = steps.in_any_order(observe, gpipe_step, cases)
    except (launch.RankError, Wrong) as error:  # was it the first case? Its values may say more
        found = common.on_ranks(observe, gpipe_step, cases[:1], sizes=(2, 3))
        yield from right_step(even, steps.case(found, 0), 12, 4)
        if not isinstance(error, launch.RankError):
            raise
        words = ", ".join(map(str, common.row_counts(*cases[1])))
        where = "9 rows in 4 micro-batches"
        edge("uneven-fails", error=error.summary, got=error.summary, rows=9, cut=words, where=where)
        cases = cases[:1]
    yield from right_step(even, steps.case(found, 0), 12, 4)
    order = "each micro-batch runs alone, all go forward before a gradient comes back, the last one goes back first"
    yield from looked(order, CUT, stages(steps.case(found, 0), 12, 4))
    for number, (rows, pieces) in enumerate(cases):
        yield from steps.right_cut(
            "9 rows in 4 micro-batches, 5 rows in 5, 7 rows in 1", steps.case(found, number), rows, pieces
        )
    if any(got["faults"] for ranks in steps.case(found, 0).values() for got in ranks):
        return  # it would hang there
    yield "and on two stages, each with a GPU"
    with steps.last_look():
        on_gpus(_on_gpu, gpipe_step, known=left_on_cpu("step-not-on-gpu"))
