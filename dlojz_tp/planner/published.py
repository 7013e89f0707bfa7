"""Runs of large models as they were published, to hold predictions against."""

import math
import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from .cards import CARDS, Card
from .cluster import Cluster
from .layout_search import search
from .layouts import Layout
from .models import GPT, MODELS
from .steps import step_time

FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Row:
    """One run whose layout is known. kind: of cards, models and layouts. tokens: a second and GPU.

    fitted: whether a constant was chosen on it. cluster: fields of `Cluster` that differ from those of its card:
    kernels of its time.
    """

    kind: str
    name: str
    model: GPT
    card: Card
    gpus: int
    layout: Layout
    tokens: float
    fitted: bool
    cluster: dict = field(hash=False)

    def predicted(self) -> float:
        """Tokens a second and GPU by the planner."""
        seconds = step_time(self.model, self.layout, Cluster(self.card, **self.cluster)).total
        return self.layout.batch * self.model.sequence / seconds / self.gpus


def read_rows() -> list[Row]:
    """All rows of published.toml: groups of one source and kind, what their rows have in common, and columns."""
    file = tomllib.loads(FILE.read_text(encoding="utf-8"))
    models = MODELS | {name: GPT(**shape) for name, shape in file["models"].items()}
    return [
        _row(group, models, group["same"] | dict(zip(group["columns"], values, strict=True)))
        for group in file["group"] for values in group["rows"]
    ]  # fmt: skip


def _row(group: dict, models: dict, given: dict) -> Row:
    shape = {"sequence": given["sequence"], "fused_attention": given.get("fused_attention", True)}
    model = replace(models[given["model"]], **shape, extra=given.get("extra", models[given["model"]].extra))
    chosen = {one.name: given[one.name] for one in fields(Layout) if one.name in given}
    model_ranks = math.prod(given.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    layout = Layout(data=given["gpus"] // model_ranks, **chosen)
    name = f"{group['name']}: {given['model']}, {given['gpus']} {given['card']}, {given['sequence']} tokens"
    card = replace(CARDS[given["card"]], **group.get("card", {}))
    told = given["gpus"], layout, given["tokens"], given.get("fitted", False)
    return Row(group["kind"], name, model, card, *told, group.get("cluster", {}))


@dataclass(frozen=True)
class Missed:
    """How far predictions are off: their number, mean error, mean size of it, and the share within 15 %."""

    rows: int
    mean: float
    size: float
    within: float


def missed(errors: Iterable[float]) -> Missed:
    """Sum up errors, each predicted / published - 1."""
    errors = list(errors)
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes) / len(sizes) if sizes else math.nan
    return Missed(len(errors), statistics.fmean(errors), statistics.fmean(sizes), within)


@dataclass(frozen=True)
class PublishedRun:
    """One run on A100s, in nodes of 8. billions: of parameters. batch: sequences. tflops: achieved a second and GPU,
    with what was computed again counted. only: what is known of its layout, as `search` takes it.
    """

    billions: float
    model: GPT
    gpus: int
    batch: int
    tflops: float
    only: dict = field(hash=False)


# Megatron-LM in 2021: each layer computed again, gradients not sharded, nothing beside computing, attention not fused.
_THEN = {"recomputation": "full", "sequence_parallel": False, "overlap": False}
_SIZES = {
    1.7: (2304, 24, 24), 3.6: (3072, 30, 32), 7.5: (4096, 36, 32), 18.4: (6144, 40, 48), 39.1: (8192, 48, 64),
    76.1: (10240, 60, 80), 145.6: (12288, 80, 96), 174.6: (12288, 96, 96), 310.1: (16384, 96, 128),
    529.6: (20480, 105, 128), 1008.0: (25600, 128, 160),
}  # fmt: skip


def _run(billions, gpus, batch, tflops, **only):
    return PublishedRun(billions, GPT(*_SIZES[billions], fused_attention=False), gpus, batch, tflops, _THEN | only)


# Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", table 1. It
# does not say micro-batches and chunks.
MEGATRON = [
    _run(billions, gpus, batch, tflops, zero=0, tensor=t, pipeline=p)
    for billions, t, p, gpus, batch, tflops in (
        (1.7, 1, 1, 32, 512, 137), (3.6, 2, 1, 64, 512, 138), (7.5, 4, 1, 128, 512, 142), (18.4, 8, 1, 256, 1024, 135),
        (39.1, 8, 2, 512, 1536, 138), (76.1, 8, 4, 1024, 1792, 140), (145.6, 8, 8, 1536, 2304, 148),
        (310.1, 8, 16, 1920, 2160, 155), (529.6, 8, 35, 2520, 2520, 163), (1008.0, 8, 64, 3072, 3072, 163),
    )
]  # fmt: skip

# The same paper, table 2: the same models with model parallelism, and with DeepSpeed's ZeRO 3 alone. The paper does not
# say how that one sent its messages: `ZERO_THEN` has the switches that come nearest.
MEGATRON_OR_ZERO = [
    _run(billions, gpus, batch, tflops, zero=0, tensor=8, pipeline=p, micro_batch=1)
    for billions, p, gpus, batch, tflops in (
        (174.6, 12, 384, 1536, 153), (174.6, 12, 768, 1536, 149), (174.6, 12, 1536, 1536, 141),
        (529.6, 35, 560, 2240, 171), (529.6, 35, 1120, 2240, 167), (529.6, 35, 2240, 2240, 159),
    )
] + [
    _run(
        billions, gpus, batch, tflops, zero=3, tensor=1, pipeline=1, micro_batch=b, float32_gradients=False,
    )
    for billions, b, gpus, batch, tflops in (
        (174.6, 4, 384, 1536, 144), (174.6, 2, 768, 1536, 88), (174.6, 1, 1536, 1536, 44),
        (529.6, 4, 640, 2560, 138), (529.6, 2, 1120, 2240, 98), (529.6, 1, 2240, 2240, 48),
    )
]  # fmt: skip


ZERO_THEN = {"prefetch": False, "root_stays": False, "hierarchical": False}


def predicted_tflops(run: PublishedRun, cluster: Cluster) -> float:
    """TFLOP/s and GPU of the quickest layout that agrees with what is known of a run, as the paper counts them.

    Memory is no limit here: some of these runs ended closer to it than the search would go.
    """
    best = search(run.model, cluster, run.gpus, run.batch, only=run.only, kept_free=-1)[0]
    return run.model.flops(run.batch, forwards=2) / best.time.total / run.gpus / 1e12
