"""The time of a training step over tensor × context × pipeline × data ranks, on nodes with two levels of bandwidth."""

import math
from dataclasses import asdict, dataclass

from .cluster import Cluster
from .collectives import reduce_scatter
from .layouts import Layout, expert_weights, layer_bytes, stage_layers, stage_parameters
from .memory import state_bytes
from .models import GPT

# Stated for all cards.
SCORES = 6.6  # how often the bytes of scores that are written out go through memory: 13 a number, 20 in backward, of 5
WEIGHTS = 12  # bytes that go through memory for each parameter of a rank and micro-batch
NARROW = 2000  # experts of width f reach f / (f + NARROW) of `products`
HOST = 5e-3  # seconds in which a processor starts the kernels of a layer of experts, forward and backward
# Share of the step that each doubling of the nodes costs, by ZeRO stage. To wait for all is to wait for the
# slowest, and ZeRO 3 waits in every layer. MPT's throughput falls by 4 to 8 % from 128 to 512 H100s (published.toml).
JITTER = {0: 0.008, 1: 0.008, 2: 0.008, 3: 0.02}
LAUNCHES = 30e-6  # seconds that a chunk's messages and its own kernels take to start, each way


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts that add up: what one rank computes, waits for and updates.

    compute: products, with what is computed twice. elementwise: norms, dropouts and the like, bound by memory.
    tensor, context, expert, pipeline, data: communication of each axis that nothing hides. bubble: waiting for the
    other stages. jitter: waiting for the slowest rank of all.
    """

    compute: float
    elementwise: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    update: float
    context: float = 0.0
    expert: float = 0.0
    jitter: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())

    @property
    def binds(self) -> str:
        """What costs most beside the products."""
        parts = asdict(self)
        return max(list(parts)[1:], key=parts.get)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch, forward and backward: parts as in `StepTime`, which add up.

    weights: seconds of its weight gradients' products, a part of compute. A layer of a mixture is the mean of all.
    """

    compute: float
    elementwise: float
    tensor: float
    context: float
    expert: float
    weights: float

    @property
    def total(self) -> float:
        """Seconds of the layer."""
        return self.compute + self.elementwise + self.tensor + self.context + self.expert

    @property
    def waiting(self) -> float:
        """The part of the time in which the rank waits for others, from 0 to 1."""
        return 1 - (self.compute + self.elementwise) / self.total


def layer_time(model: GPT, layout: Layout, cluster: Cluster) -> LayerTime:
    """Predict a layer on a rank, as `step_time` says; errors are its own."""
    h, t = model.width, layout.tensor
    tokens = layout.micro_batch * model.sequence / layout.context
    speed = cluster.speed(layout.precision)
    full, again = layout.recomputation == "full", layout.again
    sparse = model.sparse
    dense = 2 * tokens * (1 - sparse) * model.block_weights(model.ffn) / t / speed
    narrow = 1 + NARROW / max(1, model.expert_ffn)
    routed = model.top_k * model.block_weights(model.expert_ffn) * narrow + model.block_weights(model.shared_ffn)
    mixture = 2 * tokens * sparse * (routed / t + model.experts * h / t) / speed
    attention = 2 * tokens * model.attention_weights / t / speed
    linear = dense + mixture + attention
    scores = tokens * model.scores(causal=model.fused_attention) / t
    scores /= cluster.scores(layout.zero) if model.fused_attention else cluster.products * cluster.peak
    repeated = linear + scores if full else 0.0
    repeated += (dense + mixture) * ("ffn" in again) + attention / 2 * ("latent" in again)
    repeated += linear / 2 * ("products" in again)
    repeated += scores * (layout.recomputation == "selective" and not model.fused_attention)
    compute = 3 * linear + (3.5 if model.fused_attention else 3) * scores + repeated
    written = 0 if model.fused_attention else 5 * tokens * model.sequence * model.heads / t  # bytes of scores
    whole = layer_bytes(model, layout, again=True)
    moved = cluster.traffic * (whole - written) + SCORES * written
    moved *= 4 / 3 if full else 1
    if again:  # what is dropped is written and read once more
        moved += 2 * (whole - layer_bytes(model, layout))
    elementwise = moved / cluster.card.bandwidth

    passes, sums = 3 if full else 2, 2 - sparse
    summed = cluster.collective("all_reduce", 2 * tokens * h, t)
    parts = [2 * tokens * h * n / t / speed for n in (3 * h, (1 - sparse) * model.ffn, h, (1 - sparse) * model.ffn)]
    overlap = layout.tensor_overlap if layout.overlap else "none"
    tensor = passes * sums * summed - _hidden(summed, parts[:2], parts[2:], t, overlap) * sums / 2
    context = _context(model, layout, cluster, scores, passes)
    expert = sparse * _experts(model, layout, cluster, tokens) * passes
    if layout.experts_overlap:
        expert = max(0.0, expert - compute)
    host = max(0.0, sparse * HOST - compute - elementwise - expert - tensor)
    return LayerTime(compute, elementwise + host, tensor, context, expert, linear)


def _hidden(summed: float, column: list[float], row: list[float], t: int, overlap: str) -> float:
    """Seconds of a layer's four sums that run beside its products.

    column, row: seconds of the products before which inputs are gathered, and after which outputs are summed, forward.
    "weight gradients": a sum in backward (of the gradient of a column-cut layer's input) runs beside the product for
    that layer's weight gradient. "products": each gather and each scatter is cut into t pieces, which travel while the
    product beside them works on others ("async TP"): all but one piece of the shorter of the two is hidden.

    Sources: Megatron-LM, megatron/core/tensor_parallel/layers.py; Wang et al. 2023, "Overlap communication with
    dependent computation via decomposition in large deep learning models".
    """
    if overlap == "none":
        return 0.0
    if overlap == "weight gradients":
        return sum(min(summed, product) for product in column)
    return 2 * (t - 1) / t * sum(min(summed / 2 * t / max(1, t - 1), product) for product in column + row)


def _context(model: GPT, layout: Layout, cluster: Cluster, scores: float, passes: int) -> float:
    """Seconds that keys and values of the other ranks are waited for; backward sends their gradients as well."""
    if layout.context == 1:
        return 0.0
    numbers = model.kv_heads * (2 * model.head if not model.latent else model.head + model.latent[3])
    size = 2 * layout.micro_batch * model.sequence * numbers / layout.tensor
    seconds = cluster.collective("all_gather", size, layout.context, cluster.together(layout.context, layout.tensor))
    beside = (scores, 2.5 * scores) if layout.overlap else (0.0, 0.0)
    return (passes - 1) * max(0.0, seconds - beside[0]) + max(0.0, 2 * seconds - beside[1])


def _experts(model: GPT, layout: Layout, cluster: Cluster, tokens: float) -> float:
    """Seconds of sending tokens to their experts and back, forward; a token goes once to each rank that it needs."""
    if layout.expert == 1:
        return 0.0

    def reached(places):  # places that a token goes to, of so many
        return places * (1 - (1 - 1 / places) ** model.top_k)

    together = cluster.together(layout.expert)
    copies = reached(layout.expert / together) / reached(layout.expert)
    size = tokens / layout.tensor * reached(layout.expert) * model.width
    out = 2 if layout.precision == "bfloat16" else 1
    return sum(cluster.collective("all_to_all", size * width, layout.expert, together, copies) for width in (out, 2))


def step_time(model: GPT, layout: Layout, cluster: Cluster) -> StepTime:
    """Predict a step.

    - Linear layers compute at `products` of the peak (in float8 and float4 at `LOW` of that), the scores at
      `attention` of it; a fused attention computes the causal half, and once more in backward. Recomputation adds what
      it repeats. What is no product moves the layer's activations `traffic` times through the card's memory.
    - Tensor ranks sum four times a layer, twice where it holds experts. Tokens travel to experts and back, forward and
      backward: each once to each rank that has one of its experts, out in 1 byte a number where products are. Keys and
      values travel around a context, beside the scores.
    - A step lasts as long as its slowest stage, the last one with the head: m micro-batches of that, and, to fill and
      drain the pipeline, one of each other stage, divided by the chunks; ZB-H1 fills this with weight gradients. A
      message takes 1/t of an activation to each tensor rank, between nodes if there are several; with overlap, a
      chunk's forward hides it, but not the `LAUNCHES` that it costs.
    - Gradients are reduced once a step, from ZeRO 2 on after each micro-batch; parameters come back once, with ZeRO 3
      twice a micro-batch. With overlap, backward hides reducing, forward hides gathering, all but one layer's part;
      what a message hides behind hides nothing else. With HSDP, what a shard has reduced is summed over all shards.
    - The update reads and writes optimizer states and gradients once.
    - Each doubling of the nodes costs `JITTER` of all that: anyone who waits for all ranks waits for the slowest.

    Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    §2.2 (bubble), §4.1 (messages cut into t); Qi et al. 2023, "Zero bubble pipeline parallelism", §2; Korthikanti et
    al. 2022 (recomputation, as above); Rajbhandari et al. 2020, "ZeRO", §7; Dao 2023, "FlashAttention-2", §3; Liu et
    al. 2023, "Ring attention with blockwise transformers"; DeepSeek-AI 2024, "DeepSeek-V3 technical report", §3.2.
    """
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    layer, tokens = layer_time(model, layout, cluster), layout.micro_batch * model.sequence / layout.context
    head = 6 * tokens * model.width * model.vocabulary / layout.tensor / cluster.products / cluster.peak
    extra = model.extra * (layer.total + head)  # layers that predict further tokens stand in the last stage
    stages = stage_layers(model.layers, p, v)
    times = [n * layer.total + (head + extra) * (k == p - 1) for k, n in enumerate(stages)]
    stage = max(times)
    last = times[-1] == stage
    layers = stages[-1] + model.extra if last else max(stages)

    link = cluster.inside(2) if layout.ranks <= cluster.node else cluster.between
    message = (link.latency + 2 * tokens * model.width / layout.tensor / link.bandwidth) * (p > 1)
    forward = stage / (4 if layout.recomputation == "full" else 3)
    hidden = min(message, forward / v) if layout.overlap else 0.0
    weights = layers * layer.weights if layout.schedule == "zero-bubble" else 0
    left = forward - v * hidden, stage - forward - v * hidden  # of forward and backward, to hide gradients behind
    weighed = WEIGHTS * stage_parameters(model, layout, p - 1 if last else 0)[0] / cluster.card.bandwidth
    parts = {
        "compute": m * (layers * layer.compute + (1 + model.extra) * head * last),
        "elementwise": m * (layers * layer.elementwise + weighed),
        "tensor": m * layers * layer.tensor,
        "pipeline": 2 * m * v * (message - hidden + LAUNCHES * (p > 1)) + 2 * (p - 1) * message,
        "bubble": max(0.0, (sum(times) - stage) / v - 2 * (p - 1) * weights),
        "data": _data(model, layout, cluster, *left),
        "update": _update(model, layout, cluster),
        "context": m * layers * layer.context,
        "expert": m * layers * layer.expert,
    }
    doublings = math.log2(max(1.0, layout.ranks / cluster.node))
    return StepTime(**parts, jitter=JITTER[layout.zero] * doublings * sum(parts.values()))


def _data(model: GPT, layout: Layout, cluster: Cluster, forward: float, backward: float) -> float:
    """Seconds of data-parallel communication that are not hidden, beside a micro-batch's forward and backward."""
    d, m = layout.replicas, layout.micro_batches
    if d == 1:
        return 0.0
    sharers = layout.shard or d
    together = cluster.together(sharers, layout.tensor)  # ranks of a shard in a node

    def seconds(size):
        if layout.hierarchical:
            return cluster.collective("reduce_scatter", size, sharers, together)
        return reduce_scatter(size, sharers, cluster.inside(sharers) if sharers == together else cluster.between)

    def waited(communication, beside):
        layers = model.layers / layout.pipeline
        return max(communication / layers, communication - beside) if layout.overlap else communication

    everything, _, root = stage_parameters(model, layout, 0)
    if model.experts:  # experts are shared by fewer ranks: what each one sends of them is less
        layers = stage_layers(model.layers, layout.pipeline, layout.chunks)[0]
        owned = layers * model.sparse * expert_weights(model, layout)
        copies = max(1, layout.tensor * d // layout.expert)
        everything -= owned * (1 - (copies - 1) / copies * d / (d - 1))
    width = 4 if layout.float32_gradients else 2
    reduce, gather = seconds(everything * width), seconds(everything * 2)
    if d > sharers:  # each shard's part is summed over the shards
        reduce += cluster.collective("all_reduce", everything * width / sharers, d // sharers, 1)
    if layout.zero == 0:
        return waited(2 * reduce, backward)
    if layout.zero == 1:
        return waited(reduce, backward) + waited(gather, forward)
    if layout.zero == 2:
        return m * waited(reduce, backward) + waited(gather, forward)
    second = seconds((everything - root * layout.root_stays) * 2)
    beside = (forward, backward) if layout.prefetch else (0.0, 0.0)
    return m * (waited(gather, beside[0]) + waited(second, beside[1] / 2) + waited(reduce, backward / 2))


def _update(model: GPT, layout: Layout, cluster: Cluster) -> float:
    """Seconds of the optimizer's step: its states and gradients are read and written."""
    sharers = (layout.shard or layout.replicas) if layout.zero else 1
    states = state_bytes(stage_parameters(model, layout, 0)[0] / sharers, float32_gradients=layout.float32_gradients)
    return 2 * (states.optimizer + states.gradients) / cluster.card.bandwidth
