"""What cards hold and answer when a model is served: weights, caches, tokens a second."""

from dataclasses import dataclass

from .cluster import Cluster
from .models import GPT

MEMORY = 0.85  # share of the bandwidth that kernels reach


@dataclass(frozen=True)
class Serving:
    """A model on `cards` that share it as tensor ranks. Bytes of one card; tokens a second of all of them together.

    weights: bytes. row: bytes of one sequence's cache. rows: sequences that fit beside the weights. prefill: tokens of
    prompts read a second. decode: {sequences at once: tokens written a second}.
    """

    cards: int
    weights: float
    row: float
    rows: int
    prefill: float
    decode: dict[int, float]


def serving(
    model: GPT, cluster: Cluster, cards: int = 1, *, number_bytes: float = 2, kept_free: float = 0.1
) -> Serving:
    """Predict how `cards` of one node serve a model whose sequences have `model.sequence` tokens.

    A pass reads the weights once (of a mixture, those of the experts that its rows need), each row its own cache, and
    computes; the slower of memory and products counts, and after it two sums a layer. A latent attention caches its
    latent and the rotary part alone, whole on each card; other caches are cut as far as there are heads of keys.

    Args:
        number_bytes: of a weight and of a number in the cache. kept_free: share of the memory for all else.

    Raises:
        ValueError: for cards that do not divide the heads or do not fit into a node, or weights that do not fit.

    Sources: Pope et al. 2022, "Efficiently scaling transformer inference", §3; DeepSeek-AI 2024, "DeepSeek-V2", §2.1.
    """
    if model.heads % cards or cards > cluster.node:
        raise ValueError(f"{cards} cards must divide {model.heads} heads, and a node has {cluster.node}")
    numbers = sum(model.latent[1:3]) if model.latent else 2 * model.kv_heads * model.head / min(cards, model.kv_heads)
    row = model.layers * model.sequence * numbers * number_bytes
    weights = model.n_parameters * number_bytes / cards
    free = cluster.card.memory * (1 - kept_free) - weights
    if free < row:
        raise ValueError(
            f"{weights / 1e9:.1f} GB of weights and a cache of {row / 1e9:.1f} GB a card do not fit on {cards} "
            f"{cluster.card.name}"
        )

    def seconds(tokens: int, rows: int) -> float:
        met = 1 - (1 - model.top_k / model.experts) ** tokens if model.experts else 1.0
        experts = model.sparse_layers * model.experts * model.block_weights(model.expert_ffn)
        read = weights - experts * (1 - met) * number_bytes / cards + rows * row
        scores = model.layers * model.scores(causal=True) if tokens > rows else 0  # answers read the cache instead
        flops = (2 * model.active_parameters + scores) * tokens / cards
        summed = 2 * model.layers * cluster.collective("all_reduce", 2 * tokens * model.width, cards)
        return max(read / MEMORY / cluster.card.bandwidth, flops / cluster.speed()) + summed

    rows = int(free // row)
    batches = sorted({1, min(16, rows), rows})
    return Serving(
        cards, weights, row, rows, model.sequence / seconds(model.sequence, 1),
        {batch: batch / seconds(batch, batch) for batch in batches},
    )  # fmt: skip
