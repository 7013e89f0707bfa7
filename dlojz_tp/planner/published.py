"""Runs of large models as they were published, to hold predictions against."""

from dataclasses import dataclass, field

from .layout_search import search
from .layouts import GPT
from .steps import Cluster


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

# The same paper, table 2: the same models with model parallelism, and with DeepSpeed's ZeRO 3 alone, taken here without
# prefetching and with collectives that know no nodes (the paper says neither; so it fits best).
MEGATRON_OR_ZERO = [
    _run(billions, gpus, batch, tflops, zero=0, tensor=8, pipeline=p, micro_batch=1)
    for billions, p, gpus, batch, tflops in (
        (174.6, 12, 384, 1536, 153), (174.6, 12, 768, 1536, 149), (174.6, 12, 1536, 1536, 141),
        (529.6, 35, 560, 2240, 171), (529.6, 35, 1120, 2240, 167), (529.6, 35, 2240, 2240, 159),
    )
] + [
    _run(
        billions, gpus, batch, tflops, zero=3, tensor=1, pipeline=1, micro_batch=b, prefetch=False, root_stays=False,
        hierarchical=False, float32_gradients=False,
    )
    for billions, b, gpus, batch, tflops in (
        (174.6, 4, 384, 1536, 144), (174.6, 2, 768, 1536, 88), (174.6, 1, 1536, 1536, 44),
        (529.6, 4, 640, 2560, 138), (529.6, 2, 1120, 2240, 98), (529.6, 1, 2240, 2240, 48),
    )
]  # fmt: skip


def predicted_tflops(run: PublishedRun, cluster: Cluster) -> float:
    """TFLOP/s and GPU of the quickest layout that agrees with what is known of a run, as the paper counts them.

    Memory is no limit here: some of these runs ended closer to it than the search would go.
    """
    best = search(run.model, cluster, run.gpus, run.batch, only=run.only, kept_free=-1)[0]
    return run.model.flops(run.batch, forwards=2) / best.time.total / run.gpus / 1e12
