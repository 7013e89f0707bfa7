"""All layouts of a model over some GPUs that divide and fit, the quickest first."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .cards import CARDS
from .cluster import Cluster
from .layouts import Layout, Memory, rank_memory
from .models import GPT
from .steps import StepTime, step_time
from .throughput import mfu

LARGEST_MICRO_BATCH = 64
KEPT_FREE = 0.04  # of what the driver shows: for the context, libraries' own buffers and fragments
MOST_CHUNKS = 8
WORTH = 0.01
LEAST_TOKENS = 4096  # of a sequence that a context rank has


class NoLayout(ValueError):
    """Nothing divides, or nothing fits; the message is one line that says what would have to change."""


@dataclass(frozen=True)
class Plan:
    """A layout, the bytes of its fullest rank, the seconds of its step, and the share of the peak that the model's own
    operations reach (MFU, 0 to 1).
    """

    layout: Layout
    memory: Memory
    time: StepTime
    mfu: float


def search(
    model: GPT, cluster: Cluster, gpus: int, batch: int, *, only: Mapping | None = None, kept_free: float = KEPT_FREE
) -> list[Plan]:
    """All layouts that divide and fit, the quickest first; of equals the one that takes least memory.

    Tried: tensor ranks that divide heads and node (more than a node only if given); pipelines whose stages differ by
    one layer at most, 1F1B and interleaved with up to `MOST_CHUNKS` chunks; contexts of whole nodes' ranks where a
    sequence is long; experts over ranks that divide them; micro-batches up to 64; ZeRO 1 to 3, without a pipeline 3;
    recomputation of nothing, of what costs no product ("norm+activation"), of all. Sequence parallelism goes with
    tensor ranks, and ZeRO 1 in the place of 0: the same bytes travel, fewer are kept.

    A layout with more chunks comes first only where it is quicker by more than `WORTH` a doubling: each chunk is
    another stage to keep in order.

    Args:
        batch: sequences of a step. kept_free: share of the card's memory that no layout may use.
        only: fields of `Layout` that are given: {"tensor": 8, "overlap": False}.

    Raises:
        NoLayout: where there is none. ValueError: for values in `only` that no layout has.
    """
    usable = cluster.card.memory * (1 - kept_free)
    plans = []
    for layout in _candidates(model, cluster, gpus, batch, only or {}):
        held = rank_memory(model, layout)
        if held.total <= usable:
            time = step_time(model, layout, cluster)
            peak = gpus * cluster.card.peak(layout.precision)
            plans.append(Plan(layout, held, time, mfu(model.flops(batch), time.total, peak)))
    if not plans:
        raise NoLayout(_why(model, cluster, gpus, batch, only or {}, kept_free))
    return sorted(plans, key=lambda plan: (_cost(plan), plan.memory.total))


def _cost(plan: Plan) -> float:
    return plan.time.total * (1 + WORTH) ** math.log2(plan.layout.chunks)


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def _candidates(model: GPT, cluster: Cluster, gpus: int, batch: int, only: Mapping) -> Iterator[Layout]:
    chosen = {"tensor", "context", "pipeline", "data", "expert", "micro_batch", "micro_batches"}
    rest = {name: value for name, value in only.items() if name not in chosen}
    kinds = ["none", "norm+activation", "full"] if model.fused_attention else ["none", "selective", "full"]
    recomputations = [only["recomputation"]] if "recomputation" in only else kinds
    for t, c, p, d, e in _grids(model, cluster, gpus, only):
        if batch % d:
            continue
        zeros = [only["zero"]] if "zero" in only else [1, 2, 3] if d * c > 1 else [0]
        for b in _divisors(batch // d):
            m = batch // d // b
            if b > LARGEST_MICRO_BATCH or b != only.get("micro_batch", b) or m != only.get("micro_batches", m):
                continue
            for schedule, v in _schedules(model.layers, p, m, only):
                for zero, kind in itertools.product(zeros, recomputations):
                    grid = {"schedule": schedule, "chunks": v, "context": c, "expert": e}
                    how = {"sequence_parallel": t > 1} | rest | grid | {"zero": zero, "recomputation": kind}
                    yield Layout(t, p, d, b, m, **how)


def _grids(model: GPT, cluster: Cluster, gpus: int, only: Mapping) -> Iterator[tuple[int, int, int, int, int]]:
    """(tensor, context, pipeline, data, expert)"""
    for t, c in itertools.product(_divisors(gpus), repeat=2):
        torn = gpus > cluster.node and cluster.node % t and t % cluster.node  # its ranks would be in several nodes
        if torn or model.heads % t or t != only.get("tensor", t) or (t > cluster.node and "tensor" not in only):
            continue
        if gpus % (t * c) or c != only.get("context", c) or (model.sequence / c < LEAST_TOKENS and c > 1):
            continue
        for p in _divisors(gpus // t // c):
            d = gpus // t // c // p
            if p != only.get("pipeline", p) or d != only.get("data", d) or not _staged(model.layers, p, 1):
                continue
            experts = [1]
            if model.experts:
                room = t * c * d
                least = 1 if "expert" in only else min(room, cluster.node)
                experts = [e for e in _divisors(math.gcd(model.experts, room)) if e >= least]
            for e in experts:
                if e == only.get("expert", e):
                    yield t, c, p, d, e


def _staged(layers: int, p: int, v: int) -> bool:
    """Whether layers can be laid on stages of which the fullest has one layer more than the others, at the ends."""
    return layers >= p * v - 2 and (-layers) % (p * v) <= 3


def _schedules(layers: int, p: int, m: int, only: Mapping) -> list[tuple[str, int]]:
    wanted = [only["schedule"]] if "schedule" in only else ["1F1B", "interleaved"]
    found = [(schedule, 1) for schedule in wanted if schedule != "interleaved"]
    if p > 1 and m % p == 0 and "interleaved" in wanted:
        most = only.get("chunks", MOST_CHUNKS)
        found += [("interleaved", v) for v in range(2, most + 1) if _staged(layers, p, v)]
    return [(schedule, v) for schedule, v in found if v == only.get("chunks", v)]


def _leanest(model: GPT, cluster: Cluster, gpus: int, batch: int, only: Mapping) -> tuple[float, Layout | None]:
    """The least bytes that a rank can do with, and how."""
    lean = {"micro_batch": 1, "schedule": "1F1B"} if not {"schedule", "chunks", "micro_batches"} & set(only) else {}
    layouts = _candidates(model, cluster, gpus, batch, lean | dict(only))
    found = ((rank_memory(model, layout).total, layout) for layout in layouts)
    return min(found, key=lambda pair: pair[0], default=(float("inf"), None))


def _why(model: GPT, cluster: Cluster, gpus: int, batch: int, only: Mapping, kept_free: float) -> str:
    """One line: what is in the way, and what would do."""
    card, share = cluster.card, 1 - kept_free
    need, leanest = _leanest(model, cluster, gpus, batch, only)
    if leanest is None:
        return _undivided(model, cluster, gpus, batch, only)

    def fits(card, gpus, only):
        return _leanest(model, replace(cluster, card=card), gpus, batch, only)[0] <= card.memory * share

    ways = [f"without {_words(only)}"] if only and fits(card, gpus, {}) else []
    ways += [f"on {gpus * k} GPUs" for k in (2, 4, 8, 16, 32, 64) if fits(card, gpus * k, only)][:1]
    others = sorted((one for one in CARDS.values() if one.memory > card.memory), key=lambda one: one.memory)
    ways += [f"on cards of {one.memory / 1e9:.0f} GB ({one.name})" for one in others if fits(one, gpus, only)][:1]
    how = f"{leanest.tensor} x {leanest.pipeline} x {leanest.data} ranks, ZeRO {leanest.zero}, {leanest.recomputation}"
    return (
        f"no layout fits: the leanest ({how} recomputation) takes {need / 1e9:.1f} GB a GPU, and {card.name} has "
        f"{card.memory * share / 1e9:.1f} to use; it would fit " + (" or ".join(ways) or "on far more GPUs only")
    )


def _undivided(model: GPT, cluster: Cluster, gpus: int, batch: int, only: Mapping) -> str:
    """One line: what does not divide what."""
    if only and _leanest(model, cluster, gpus, batch, {})[1]:
        return f"no layout divides with {_words(only)}: leave some of that to the search"
    ranks = min(d for _, _, _, d, _ in _grids(model, cluster, gpus, {}))
    return f"no layout divides: {gpus} GPUs need a batch that is a multiple of {ranks}, not {batch}"


def _words(only: Mapping) -> str:
    return " ".join(f"--only {name}={value}" for name, value in only.items())
