"""Balise 3: chunks dealt out to ranks, their order as data, and PyTorch's interleaved schedule."""

import torch

from dlojz_tp import planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.pipeline_schedules import orders as data
from dlojz_tp.checks.pipeline_schedules import running

HINTS = {
    "no-placement": "Return a list with one entry per rank: the rank's list of (stage, [numbers of layers]).",
    "not-dealt-out": "Rank {rank} holds stages {found}. Deal out the stages in turn: rank r holds r, r + p, r + "
                     "2p, … Neighbouring stages on one rank gain nothing: they are one long stage.",
    "layers-missing": "Along the stages, the layers are {found}. Each layer must come once, in order.",
    "stages-uneven": "The longest stage has {most} layers, the shortest {least}. They may differ by at most one.",
    "whole-actions-only": "An order of 1F1B has only the kinds F and B.",
    "stage-of-another": "Rank {rank} runs stage {stage}, which is on rank {owner}: chunk c of rank r is stage c·p + r.",
    "bubble-not-divided": "The bubble is that of 1F1B without chunks: each rank is idle for {found:.3g} forwards, "
                          "where {wanted:.3g} are possible. Do not finish one chunk with all micro-batches before "
                          "the next chunk begins.",
    "too-much-idle": "A rank is idle for {found:.3g} forwards, where {wanted:.3g} are possible. To keep every rank "
                     "busy, work in rounds of p micro-batches, chunk after chunk, with as many forwards ahead of "
                     "the first backward as the text says.",
    "all-forwards-first": "The time is right, but rank {rank} keeps all {found} forwards at once. Start the "
                          "backwards as soon as the last rank can: {most} forwards are enough.",
    "keeps-too-much": "Rank {rank} keeps {found} forwards at once, but {most} are enough.",
    "too-few-ahead": "Rank {rank} keeps {found} forwards at once, not {most}: too few come before its first "
                     "backward. That is as fast only if messages take no time; otherwise ranks wait for messages. "
                     "The text asks for two more forwards for each rank after this one.",
    "chunks-not-stages": "Rank {rank} of {size} has the stages {found}, but {wanted} were expected: one "
                         "PipelineStage per chunk, each with its number in the whole model.",
    "layers-elsewhere": "Stage {stage} holds layers {found}, not {wanted}.",
    "chunks-mean": "The gradients of a mean loss are n_micro_batches times too large.",
    "chunks-sum": "The gradients of a loss that is a sum are divided by the number of micro-batches.",
    "chunks-gradients": "The gradients are not those of a single process on the whole batch.",
    "not-interleaved": "In the run, rank {rank} of {size} kept {found} forwards at once, but interleaved 1F1B "
                       "keeps at most {most}. Did you use its schedule?",
    "no-pair": "make_interleaved returns two things: the list of stages and the schedule.",
}  # fmt: skip

LAYERS = len(running.WIDTHS) - 1
MICRO_BATCHES = 12
CHUNKS = 2
# Before torch 2.14 two stages of one rank send messages to themselves, which gloo cannot.
ALONE = (1,) if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14) else ()


def balise_3(placement, interleaved_order, make_interleaved):
    """Placements, orders on the clock, and a run on 1, 2 and 3 ranks."""
    yield "the layers that a rank holds, also where nothing divides"
    for case in ((8, 2, 2), (7, 2, 3), (12, 4, 1), (9, 1, 4), (11, 2, 4), (24, 3, 4), (16, 4, 2)):
        _right_placement(placement, *case)
    yield ("the order: the idle time of 1F1B divided by the number of chunks, and as many forwards ahead as the "
           "text says")
    with data.own_orders(planner.interleaved_1f1b):
        for case in (
            (2, 4, 2),
            (4, 8, 2),
            (3, 6, 3),
            (1, 3, 2),
            (4, 4, 2),
            (2, 2, 1),
            (4, 12, 1),
            (2, 6, 4),
            (5, 10, 2),
        ):
            _right_order(interleaved_order, *case)
    yield "on up to 3 ranks with PyTorch: the gradients of a single process, for a mean and for a sum"
    worlds = running.on_ranks(_observed, placement, make_interleaved, sizes=(2, 3, *ALONE))
    for size, ranks in worlds.items():
        _right_run(size, ranks)


def _right_placement(placement, n_layers, n_ranks, n_chunks):
    where = f"{n_layers} layers, {n_ranks} ranks, {n_chunks} chunks"
    found = placement(n_layers, n_ranks, n_chunks)
    if found is None:
        raise Wrong("nothing-returned")
    try:
        found = [[(int(stage), [int(i) for i in layers]) for stage, layers in rank] for rank in found]
    except (TypeError, ValueError) as error:
        raise Wrong("no-placement", got=found, where=where) from error
    if len(found) != n_ranks:
        raise Wrong("no-placement", expected=f"{n_ranks} ranks", got=f"{len(found)} entries", where=where)
    for rank, stages in enumerate(found):
        numbers = [stage for stage, _ in stages]
        if numbers != list(range(rank, n_ranks * n_chunks, n_ranks)):
            raise Wrong("not-dealt-out", got=str(found), where=where, rank=rank, found=numbers)
    by_stage = {stage: layers for rank in found for stage, layers in rank}
    flat = [i for stage in sorted(by_stage) for i in by_stage[stage]]
    if flat != list(range(n_layers)):
        raise Wrong("layers-missing", expected=f"0 to {n_layers - 1}", got=str(found), where=where, found=flat)
    most, least = max(map(len, by_stage.values())), min(map(len, by_stage.values()))
    if most - least > 1:
        raise Wrong("stages-uneven", got=str(found), where=where, most=most, least=least)


def most_kept(rank, p, m, v):
    """Forwards of a chunk that interleaved 1F1B keeps at most."""
    return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)


def _right_order(interleaved_order, p, m, v):
    where = f"{p} ranks, {m} micro-batches, {v} chunks"
    orders = [interleaved_order(rank, p, m, v) for rank in range(p)]
    for rank, order in enumerate(orders):
        for action in order if isinstance(order, list) else ():
            if not isinstance(action, tuple | list) or len(action) != 3:
                raise Wrong("not-a-list", got=action, where=where, third=" and that of the stage")
            if action[0] not in ("F", "B"):
                raise Wrong("whole-actions-only", got=action, where=where)
            if isinstance(action[2], int) and action[2] % p != rank:
                more = {"rank": rank, "stage": action[2], "owner": action[2] % p}
                raise Wrong("stage-of-another", got=f"rank {rank}: {action}", where=where, **more)
    n_stages = 1 + max((action[2] for order in orders if order for action in order), default=0)
    if n_stages != p * v and all(orders):
        raise Wrong("not-a-step", where=where, problem=f"there are {p * v} stages, but the orders name {n_stages}")
    # a second pair of costs, so that no order fits the first by chance
    for forward, backward in ((1.0, 2.0), (2.0, 3.0)):
        found = data.simulated(orders, {"F": forward, "B": backward}, where, " and that of the stage")
        idle, wanted = found.seconds - found.busy[0], (p - 1) * (forward + backward)
        number = max((k for order in orders for _, k, _ in order), default=-1) + 1
        if number != m:
            problem = f"there are {m} micro-batches, but the orders do {number}"
            raise Wrong("not-a-step", where=where, problem=problem)
        if idle > wanted + 1e-6:
            slug = "bubble-not-divided" if v > 1 and 0.95 * v * wanted <= idle <= 1.05 * v * wanted else "too-much-idle"
            raise Wrong(slug, where=where, found=idle / forward, wanted=wanted / forward)
    for rank, kept in enumerate(found.in_flight):
        most = most_kept(rank, p, m, v)
        if kept > most:
            slug = "all-forwards-first" if kept == m * v else "keeps-too-much"
            raise Wrong(slug, expected=f"at most {most}", got=kept, where=where, rank=rank, found=kept, most=most)
        if kept < most and v > 1:  # one chunk: that is 1F1B
            raise Wrong("too-few-ahead", expected=most, got=kept, where=where, rank=rank, found=kept, most=most)


def _observed(placement, make_interleaved):
    def make(layers, n_micro_batches, loss_fn, reduction):
        made = make_interleaved(layers, CHUNKS, n_micro_batches, loss_fn, reduction, torch.device("cpu"))
        if made is None:
            raise Wrong("nothing-returned")
        if not isinstance(made, tuple | list) or len(made) != 2 or not hasattr(made[1], "step"):
            raise Wrong("no-pair", got=type(made).__name__)
        stages, schedule = made
        return list(stages), schedule

    return running.observe(make, running.own_step, MICRO_BATCHES, _right_stages)


def _right_stages(everyones):
    size = len(everyones)
    for rank, held in enumerate(everyones):
        wanted, numbers = list(range(rank, size * CHUNKS, size)), [stage for stage, _ in held]
        if numbers != wanted:
            more = {"rank": rank, "size": size, "found": numbers, "wanted": wanted}
            raise Wrong("chunks-not-stages", got=f"stages {numbers}", **more)
    begin = 0
    for stage, layers in sorted(pair for held in everyones for pair in held):
        right = list(range(begin, begin + max(1, len(layers))))
        begin = right[-1] + 1
        if layers != right or begin > LAYERS:
            raise Wrong("layers-elsewhere", where=f"{size} ranks", stage=stage, found=layers, wanted=right)


def _right_run(size, ranks):
    m, chunks = MICRO_BATCHES, CHUNKS
    for rank, found in enumerate(ranks):
        for reduction, held, _, seen in found:
            where = f"rank {rank} of {size}, loss a {reduction}"
            mistakes = {"chunks-sum": lambda g, _: g / m}
            if reduction == "mean":
                mistakes = {"chunks-mean": lambda g, _: m * g}
            running.right_gradients(seen[-1][1], len(seen) - 1, reduction, mistakes, "chunks-gradients", where)
            kept = running.kept(seen[-1][2], [layers[0] for _, layers in held])
            most = most_kept(rank, size, m, chunks)
            if len(seen) > 1 and kept > most:  # a first step also runs a forward to find out the shapes
                raise Wrong("not-interleaved", where=where, rank=rank, size=size, found=kept, most=most)
