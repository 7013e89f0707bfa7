"""The time of a training step over tensor × pipeline × data parallel ranks, on nodes with two levels of bandwidth."""

import math
from dataclasses import asdict, dataclass

from .cards import Card
from .collectives import Link, hierarchical_reduce_scatter, reduce_scatter
from .layouts import GPT, Layout, layer_bytes, stage_parameters
from .memory import state_bytes
from .tensor import tensor_parallel_layer

# Chosen so that two published runs come out, the smallest and the largest of `published.MEGATRON`: A100, no fused
# attention. What a link loses to its data sheet is in them too.
PRODUCTS = 0.658
TRAFFIC = 6.36


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of card. latency: seconds of a message. Links run at what the card's row says.

    products: the share of the card's peak that matrix products reach. traffic: how often the bytes of a layer's
    activations go through the card's memory, forward and backward, in all that is no product.
    """

    card: Card
    node: int = 8
    latency: float = 5e-6
    products: float = PRODUCTS
    traffic: float = TRAFFIC

    def __post_init__(self):
        if self.node < 1 or self.latency < 0 or self.traffic < 0 or not 0 < self.products <= 1:
            raise ValueError(f"a cluster has 1 GPU a node or more, products from 0 to 1, nothing below 0: {self}")

    @property
    def peak(self) -> float:
        """Operations a second of the card in half precision."""
        return self.card.bfloat16 or self.card.float16

    @property
    def between(self) -> Link:
        """What one rank gets of the network between nodes."""
        return Link(self.latency, self.card.network)

    def inside(self, ranks: int) -> Link:
        """What one of `ranks` ranks of a node gets; of a mesh, the wires to the others alone."""
        part = (min(ranks, self.node) - 1) / max(1, self.node - 1) if self.card.mesh and ranks > 1 else 1
        return Link(self.latency, self.card.link * part)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts that add up: what one rank computes, waits for and updates.

    compute: products, with what is computed twice. elementwise: norms, dropouts and the like, bound by memory.
    tensor, pipeline, data: communication of each axis that nothing hides. bubble: waiting for the other stages.
    """

    compute: float
    elementwise: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())

    @property
    def binds(self) -> str:
        """What costs most beside the products."""
        parts = asdict(self)
        return max(list(parts)[1:], key=parts.get)


def step_time(model: GPT, layout: Layout, cluster: Cluster) -> StepTime:
    """Predict a step.

    - A layer computes and sends as `tensor_parallel_layer` says. Recomputation "full" adds a forward and its sums,
      "selective" the attention's forward, a fused attention one of its two products. What is no product moves the
      layer's activations `traffic` times through the card's memory. The head is the slowest stage's.
    - p stages idle for (p − 1)/v of a stage's time, v chunks; ZB-H1 fills this with weight gradients. A message takes
      1/t of an activation to each tensor rank, between nodes if there are several; with overlap, a chunk's forward
      hides it.
    - Gradients are reduced once a step, from ZeRO 2 on after each micro-batch; parameters come back once, with ZeRO 3
      twice a micro-batch. With overlap, backward hides reducing, forward hides gathering, all but one layer's part;
      what a message hides behind hides nothing else.
    - The update reads and writes optimizer states and gradients once.

    Nothing slows down what it runs beside, and no stage is slower than the others except for the head: a prediction for
    comparing layouts, and an optimistic one.

    Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    §2.2 (bubble), §4.1 (messages cut into t); Qi et al. 2023, "Zero bubble pipeline parallelism", §2; Korthikanti et
    al. 2022 (recomputation, as above); Rajbhandari et al. 2020, "ZeRO", §7; Dao 2023, "FlashAttention-2", §3.
    """
    s, b, h, t = model.sequence, layout.micro_batch, model.width, layout.tensor
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    speed = cluster.products * cluster.peak
    full = layout.recomputation == "full"
    layer = tensor_parallel_layer(
        s, b, h, model.heads, tensor_parallel=t, ranks_per_node=min(t, cluster.node), inside=cluster.inside(t),
        between=cluster.between, flops_per_second=speed, overlap="weight gradients" if layout.overlap else "none",
    )  # fmt: skip
    scores = 2 * b * s * s * h / t / speed  # one of the attention's two products, forward
    again = scores if model.fused_attention else 2 * scores if layout.recomputation == "selective" else 0
    again += layer.compute / 3 if full else 0
    layers = model.layers // p
    compute = layers * (layer.compute + again)
    elementwise = layers * cluster.traffic * layer_bytes(model, layout, again=True) / cluster.card.bandwidth
    elementwise *= 4 / 3 if full else 1
    tensor = layers * (layer.communication * (1.5 if full else 1) - layer.hidden)
    stage = compute + elementwise + tensor
    head = 6 * b * s * h * model.vocabulary / t / speed

    link = cluster.inside(2) if layout.ranks <= cluster.node else cluster.between
    message = (link.latency + 2 * b * s * h / t / link.bandwidth) * (p > 1)
    forward = stage / (4 if full else 3)
    hidden = min(message, forward / v) if layout.overlap else 0.0
    weights = layers * layer.compute / 3 if layout.schedule == "zero-bubble" else 0
    left = forward - v * hidden, stage - forward - v * hidden  # of forward and backward, to hide gradients behind
    return StepTime(
        compute=m * (compute + head),
        elementwise=m * elementwise,
        tensor=m * tensor,
        pipeline=2 * m * v * (message - hidden) + 2 * (p - 1) * message,
        bubble=(p - 1) * max(0.0, stage / v - 2 * weights),
        data=_data(model, layout, cluster, *left),
        update=_update(model, layout, cluster),
    )


def _data(model: GPT, layout: Layout, cluster: Cluster, forward: float, backward: float) -> float:
    """Seconds of data-parallel communication that are not hidden, beside a micro-batch's forward and backward."""
    d, m = layout.data, layout.micro_batches
    if d == 1:
        return 0.0
    together = math.gcd(d, max(1, cluster.node // layout.tensor))  # ranks of the group in a node
    if layout.hierarchical:

        def seconds(size):
            return hierarchical_reduce_scatter(size, d // together, together, cluster.inside(together), cluster.between)
    else:

        def seconds(size):
            return reduce_scatter(size, d, cluster.inside(d) if d == together else cluster.between)

    def waited(communication, beside):
        layers = model.layers // layout.pipeline
        return max(communication / layers, communication - beside) if layout.overlap else communication

    everything, _, root = stage_parameters(model, layout, 0)
    reduce = seconds(everything * (4 if layout.float32_gradients else 2))
    gather = seconds(everything * 2)
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
    n = stage_parameters(model, layout, 0)[0] / (layout.data if layout.zero else 1)
    states = state_bytes(n, float32_gradients=layout.float32_gradients)
    return 2 * (states.optimizer + states.gradients) / cluster.card.bandwidth
