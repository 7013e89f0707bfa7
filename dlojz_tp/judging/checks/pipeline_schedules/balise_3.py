"""Balise 3: chunks dealt out to ranks, their order as data, and PyTorch's interleaved schedule."""

import operator

import torch

from dlojz_tp import planner
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.pipeline_schedules import running
from dlojz_tp.judging.checks.pipeline_schedules.orders import fault_look, idle_look, kept_look, own_orders, simulated
from dlojz_tp.judging.checks.pipeline_schedules.running import gradient_look

MICRO_BATCHES = 12
CHUNKS = 2
# Before torch 2.14 two stages of one rank send messages to themselves, which gloo cannot.
ALONE = (1,) if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14) else ()
PLACEMENTS = (8, 2, 2), (7, 2, 3), (12, 4, 1), (9, 1, 4), (11, 2, 4), (24, 3, 4), (16, 4, 2)  # layers, ranks, chunks
# ranks, micro-batches, chunks
ORDERS = (2, 4, 2), (4, 8, 2), (3, 6, 3), (1, 3, 2), (4, 4, 2), (2, 2, 1), (4, 12, 1), (2, 6, 4), (5, 10, 2)
COSTS = (1.0, 2.0), (2.0, 3.0)  # of a forward and a backward; a second pair, so that no order fits the first by chance


def observe_placement(placement, n_layers, n_ranks, n_chunks):
    """Stages and layers, as numbers."""
    found = placement(n_layers, n_ranks, n_chunks)
    try:
        dealt = (
            found
            if found is None
            else [[(int(stage), [int(i) for i in layers]) for stage, layers in rank] for rank in found]
        )
    except (TypeError, ValueError):
        dealt = str(found)
    yield {"ranks": len(dealt) if isinstance(dealt, list) else dealt}
    yield {"stages": [[stage for stage, _ in stages] for stages in dealt], "found": str(found)}
    by_stage = [layers for _, layers in sorted(pair for stages in dealt for pair in stages)]
    yield {"layers": sum(by_stage, []), "lengths": [len(layers) for layers in by_stage]}


def _placement_looks(n_layers, n_ranks, n_chunks):
    dealt = [list(range(rank, n_ranks * n_chunks, n_ranks)) for rank in range(n_ranks)]

    def first(seen, due):
        rank = next(rank for rank, stages in enumerate(seen) if stages != due[rank])
        return {"rank": rank, "found": seen[rank]}

    return [
        Look("the layers that a rank holds, also where nothing divides", "ranks", n_ranks, "no-placement"),
        Look("", "stages", dealt, "not-dealt-out", fields=first),
        Look("", "layers", list(range(n_layers)), "layers-missing", fields="found"),
        running.even_look("lengths", "stages-uneven"),
    ]  # fmt: skip


def observe_order(interleaved_order, p, m, v):
    """The orders of all ranks on the clock: see `orders.simulated`."""
    orders = own_orders(planner.interleaved_1f1b, interleaved_order, p, m, v)
    fault = _misread(orders, p, v)
    costs = [{"F": forward, "B": backward} for forward, backward in COSTS]
    return {"fault": fault} if fault else simulated(orders, m, costs, THIRD)


ORDER = "the order: the idle time of 1F1B divided by the number of chunks, and as many forwards ahead as the text says"
THIRD = " and that of the stage"


def _misread(orders, p, v):
    """What of the actions does not fit 1F1B on p ranks with v chunks: (hint, its fields), or None."""
    for rank, order in enumerate(orders):
        for action in order if isinstance(order, list) else ():
            if not isinstance(action, tuple | list) or len(action) != 3:
                return "not-a-list", {"got": action, "third": THIRD}
            kind, _, stage = action
            if kind not in ("F", "B"):
                return "whole-actions-only", {"got": action}
            if isinstance(stage, int) and stage % p != rank:
                return "stage-of-another", {"got": action, "rank": rank, "stage": stage, "owner": stage % p}
    n_stages = 1 + max((action[2] for order in orders if order for action in order), default=0)
    if n_stages != p * v and all(orders):
        return "not-a-step", {"problem": f"there are {p * v} stages, but the orders name {n_stages}"}
    return None


def most_kept(rank, p, m, v):
    """Forwards of a chunk that interleaved 1F1B keeps at most."""
    return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)


def _order_looks(p, m, v):
    few = 2 * (p - 1) + (v - 1) * p > m * v  # some rank would start with more forwards than there are
    kept = [most_kept(rank, p, m, v) for rank in range(p)]

    def name(slug):
        return "few-micro-batches" if few and slug in ("not-a-step", "deadlock") else slug

    def too_idle(idle, least):
        return "bubble-not-divided" if v > 1 and 0.95 * v * least <= idle <= 1.05 * v * least else "too-much-idle"

    return [
        fault_look(ORDER, name),
        *(idle_look(k, (p - 1) * sum(costs), too_idle, unit=costs[0]) for k, costs in enumerate(COSTS)),
        kept_look("", "kept", kept, lambda found: "all-forwards-first" if found == m * v else "keeps-too-much"),
        kept_look("", "kept", kept if v > 1 else [], "too-few-ahead", operator.lt),  # one chunk: that is 1F1B
    ]  # fmt: skip


def run(placement, make_interleaved):
    """On a rank: two steps and one of the schedule."""

    def make(layers, n_micro_batches, loss_fn, reduction):
        made = make_interleaved(layers, CHUNKS, n_micro_batches, loss_fn, reduction, torch.device("cpu"))
        if made is None:
            return ("nothing-returned", {}), [], None
        if not isinstance(made, tuple | list) or len(made) != 2 or not hasattr(made[1], "step"):
            return ("no-pair", {"got": type(made).__name__}), [], None
        return None, list(made[0]), made[1]

    return running.observe(make, running.own_step, MICRO_BATCHES, _misfit)


def _misfit(held):
    """What is wrong with the stages of the ranks, so that they cannot run: see `running.observe`."""
    size, begin = len(held), 0
    for rank, stages in enumerate(held):
        wanted, found = list(range(rank, size * CHUNKS, size)), [stage for stage, _ in stages]
        if found != wanted:
            return "chunks-not-stages", {"rank": rank, "size": size, "found": found, "wanted": wanted}
    for stage, layers in sorted(pair for stages in held for pair in stages):
        wanted = list(range(begin, begin + max(1, len(layers))))
        begin = wanted[-1] + 1
        if layers != wanted or begin > running.LAYERS:
            return "layers-elsewhere", {"stage": stage, "found": layers, "wanted": wanted}
    return None


RUN = [
    fault_look("on up to 3 ranks with PyTorch: the gradients of a single process, for a mean and for a sum"),
    gradient_look("", "mean 2", "chunks-gradients", ("chunks-mean", lambda g, _: MICRO_BATCHES * g)),
    kept_look("", "mean 2: kept", lambda size: [most_kept(rank, size, MICRO_BATCHES, CHUNKS) for rank in range(size)],
              "not-interleaved"),
    gradient_look("", "sum 1", "chunks-gradients", ("chunks-sum", lambda g, _: g / MICRO_BATCHES)),
]  # fmt: skip


def balise_3(placement, interleaved_order, make_interleaved):
    for case in PLACEMENTS:
        where = "{} layers, {} ranks, {} chunks".format(*case)
        yield from judged(_placement_looks(*case), observe_placement, placement, *case, where=where)
    for case in ORDERS:
        where = "{} ranks, {} micro-batches, {} chunks".format(*case)
        yield from judged(_order_looks(*case), observe_order, interleaved_order, *case, where=where)
    yield from running.judged_on_ranks(RUN, run, placement, make_interleaved, sizes=(2, 3, *ALONE))
