"""All layouts of a model over some GPUs that divide and fit, the quickest first."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .cards import CARDS
from .layouts import GPT, Layout, Memory, rank_memory
from .steps import Cluster, StepTime, step_time
from .throughput import mfu

LARGEST_MICRO_BATCH = 64
KEPT_FREE = 0.1  # of a card's memory: for the libraries' own buffers and for fragments


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

    Tried: tensor ranks that divide heads and node (more than a node only if given); pipelines that divide the
    layers, 1F1B and interleaved with any number of chunks; micro-batches up to 64; ZeRO 1 to 3; every recomputation.
    Sequence parallelism goes with tensor ranks, and ZeRO 1 in the place of 0: the same bytes travel, fewer are kept.

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
            plans.append(Plan(layout, held, time, mfu(model.flops(batch), time.total, gpus * cluster.peak)))
    if not plans:
        raise NoLayout(_why(model, cluster, gpus, batch, only or {}, kept_free))
    return sorted(plans, key=lambda plan: (plan.time.total, plan.memory.total))


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def _candidates(model: GPT, cluster: Cluster, gpus: int, batch: int, only: Mapping) -> Iterator[Layout]:
    kinds = ["none", "full"] if model.fused_attention else ["none", "selective", "full"]
    rest = {k: v for k, v in only.items() if k not in ("tensor", "pipeline", "data", "micro_batch", "micro_batches")}
    for t, p, d in _grids(model, cluster, gpus, only):
        if batch % d:
            continue
        zeros = [only["zero"]] if "zero" in only else [1, 2, 3] if d > 1 else [0]
        recomputations = [only["recomputation"]] if "recomputation" in only else kinds
        for b in _divisors(batch // d):
            m = batch // d // b
            if b > LARGEST_MICRO_BATCH or b != only.get("micro_batch", b) or m != only.get("micro_batches", m):
                continue
            for schedule, v in _schedules(model.layers // p, p, m, only):
                for zero, kind in itertools.product(zeros, recomputations):
                    chosen = {"schedule": schedule, "chunks": v, "zero": zero, "recomputation": kind}
                    yield Layout(t, p, d, b, m, **({"sequence_parallel": t > 1} | rest | chosen))


def _grids(model: GPT, cluster: Cluster, gpus: int, only: Mapping) -> Iterator[tuple[int, int, int]]:
    for t in _divisors(gpus):
        torn = gpus > cluster.node and cluster.node % t and t % cluster.node  # its ranks would be in several nodes
        if torn or model.heads % t or t != only.get("tensor", t) or (t > cluster.node and "tensor" not in only):
            continue
        for p in _divisors(gpus // t):
            d = gpus // t // p
            if model.layers % p == 0 and p == only.get("pipeline", p) and d == only.get("data", d):
                yield t, p, d


def _schedules(layers: int, p: int, m: int, only: Mapping) -> list[tuple[str, int]]:
    wanted = [only["schedule"]] if "schedule" in only else ["1F1B", "interleaved"]
    found = [(schedule, 1) for schedule in wanted if schedule != "interleaved"]
    if p > 1 and m % p == 0 and "interleaved" in wanted:
        found += [("interleaved", v) for v in _divisors(layers)[1:]]
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
        if only and _leanest(model, cluster, gpus, batch, {})[1]:
            return f"no layout divides with {_words(only)}: leave some of that to the search"
        ranks = min((d for _, _, d in _grids(model, cluster, gpus, {})), default=gpus)
        return f"no layout divides: {gpus} GPUs need a batch that is a multiple of {ranks}, not {batch}"

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


def _words(only: Mapping) -> str:
    return " ".join(f"--only {name}={value}" for name, value in only.items())
