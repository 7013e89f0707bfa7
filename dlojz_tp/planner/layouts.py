"""Layouts of a model over tensor × context × pipeline × data parallel ranks, and the bytes that a rank then holds."""

import math
from dataclasses import dataclass
from functools import lru_cache

from .memory import STAGES, layer_activation_bytes, state_bytes
from .models import GPT

SCHEDULES = ("GPipe", "1F1B", "interleaved", "zero-bubble")
RECOMPUTATIONS = ("none", "selective", "full")
OPERATORS = ("norm", "activation", "ffn", "latent", "products")  # recomputed each for itself, joined by +
OVERLAPS = ("none", "weight gradients", "products")
PRECISIONS = ("bfloat16", "float8", "float4")


@dataclass(frozen=True)
class Layout:
    """How a training step is laid over `ranks` GPUs: numbered tensor first, then context, then data, then pipeline.

    tensor, pipeline, data: ranks of each axis. micro_batch: sequences. micro_batches: their number, a pipeline.
    schedule: of `SCHEDULES`; chunks: stages a rank holds, above 1 with "interleaved" alone. zero: stage, 0 to 3.
    recomputation: "none", "selective" (the attention's scores), "full", or operators joined by "+": "norm",
    "activation", "ffn" (the feed-forward block or the experts), "latent" (the projections up), "products" (every
    second product of a layer, and norms and activations: what torchtitan calls "op"). sequence_parallel: norms
    and dropouts are cut as well. float32_gradients: gradients are kept and reduced in 4 bytes. overlap: gradients and
    parameters travel beside computing, messages of the pipeline too, sums of backward beside weight gradients, keys and
    values of a context beside scores. prefetch, root_stays: with ZeRO 3, as FSDP does, the next layer is gathered
    early, and the embedding stays gathered until backward. hierarchical: collectives go first inside a node, then
    between nodes. context: ranks that share a sequence. expert: ranks, of the tensor, context and data ranks, that
    share the experts. shard: over how many data ranks ZeRO shares its states (HSDP); 0: over all. precision: of the
    products in linear layers. experts_overlap: tokens travel to experts beside computing (DualPipe). tensor_overlap:
    what runs beside the tensor ranks' sums, of `OVERLAPS`, as `steps._hidden` has it; with overlap alone.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    zero: int = 0
    recomputation: str = "none"
    sequence_parallel: bool = False
    float32_gradients: bool = True
    overlap: bool = True
    prefetch: bool = True
    root_stays: bool = True
    hierarchical: bool = True
    context: int = 1
    expert: int = 1
    shard: int = 0
    precision: str = "bfloat16"
    experts_overlap: bool = False
    tensor_overlap: str = "weight gradients"

    def __post_init__(self):
        counts = self.tensor, self.pipeline, self.data, self.micro_batch, self.micro_batches, self.chunks
        if min(*counts, self.context, self.expert) < 1:
            raise ValueError("ranks, micro-batches and chunks of a layout are 1 or more")
        choices = {"schedule": SCHEDULES, "zero": STAGES, "precision": PRECISIONS, "tensor_overlap": OVERLAPS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {getattr(self, name)!r}")
        if self.recomputation not in RECOMPUTATIONS and not self.again <= set(OPERATORS):
            known = f"{', '.join(RECOMPUTATIONS)}, or of {', '.join(OPERATORS)} joined by +"
            raise ValueError(f"recomputation is one of {known}, not {self.recomputation!r}")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(f"interleaved has 2 chunks or more, others 1: not {self.schedule} with {self.chunks}")
        if self.chunks > 1 and self.micro_batches % self.pipeline:
            raise ValueError(
                f"interleaved: {self.micro_batches} micro-batches are no multiple of {self.pipeline} ranks"
            )
        if self.tensor * self.replicas % self.expert or self.replicas % (self.shard or 1):
            raise ValueError(
                f"{self.expert} expert ranks must divide the {self.tensor * self.replicas} ranks of a stage, and "
                f"{self.shard} of a shard its {self.replicas} data ranks"
            )

    @property
    def again(self) -> set[str]:
        """Operators that are computed again, each for itself."""
        return set() if self.recomputation in RECOMPUTATIONS else set(self.recomputation.split("+"))

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that reduce a gradient: those of a context see other tokens of the same sequences."""
        return self.data * self.context

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro_batch * self.micro_batches

    def in_flight(self, stage: int) -> int:
        """The most chunks of layers, times micro-batches, whose activations a rank of this stage keeps.

        Sources: Huang et al. 2019 (GPipe: all); Fan et al. 2021 (1F1B); Qi et al. 2023, §2.1 (ZB-H1, as 1F1B's first
        stage); Narayanan et al. 2021 (as above), §2.2, for the interleaved warm-up.
        """
        p, m, v = self.pipeline, self.micro_batches, self.chunks
        most = {"GPipe": m, "1F1B": p - stage, "zero-bubble": p, "interleaved": 2 * (p - stage - 1) + (v - 1) * p + 1}
        return min(most[self.schedule], m * v)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. gathered: what ZeRO 2 and 3 hold for a moment: layers, gradients not yet shared out."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered


@lru_cache(maxsize=4096)
def stage_layers(layers: int, pipeline: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of each pipeline rank. Where they cannot be shared out evenly, the ends have one fewer, last end first.

    The last rank has the head and the first the embedding: BLOOM's 70 layers lay on 12 ranks as 5, 6, …, 6, 5, and the
    126 of Llama 3 405B on 16 as 7, 8, …, 8, 7.

    Raises ValueError for more chunks than layers.
    Sources: Le Scao et al. 2022, "BLOOM", §3.2; Grattafiori et al. 2024, "The Llama 3 herd of models", §3.3.2.
    """
    stages = pipeline * chunks
    largest = math.ceil(layers / stages) * chunks
    fewer = pipeline * largest - layers
    if layers < stages - 2:
        raise ValueError(f"{pipeline} x {chunks} stages are too many for {layers} layers")
    ends = [k // 2 if k % 2 else pipeline - 1 - k // 2 for k in range(pipeline)]
    ends = [ends[k % pipeline] for k in range(fewer)]
    return tuple(largest - ends.count(k) for k in range(pipeline))


def stage_parameters(model: GPT, layout: Layout, stage: int) -> tuple[float, float, float]:
    """Parameters that a rank of a stage computes with: (all of them, of one layer, of embedding and head).

    Cut over tensor ranks: matrices, their biases on the cut side, embeddings of words. Whole on each: norms, biases of
    output and down projection, positions. The last of several stages has its own copy of the embedding, as the head.
    Of a mixture, a layer is the mean of all, with the experts that this rank owns.

    Raises ValueError for ranks that share out neither layers nor heads.
    Source: Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model
    parallelism", §3.
    """
    p, h, t = layout.pipeline, model.width, layout.tensor
    layers = model.layers + model.extra
    if model.heads % t or not 0 <= stage < p or model.experts % layout.expert:
        raise ValueError(
            f"{t} ranks must divide {model.heads} heads, {layout.expert} ranks {model.experts} experts; stages are "
            f"numbered from 0 to {p - 1}, not {stage}"
        )
    dense, sparse = layers - model.sparse_layers, model.sparse_layers
    blocks = dense * model.block_weights(model.ffn) + sparse * model.block_weights(model.shared_ffn)
    whole = 2 * h if model.gated else 6 * h
    layer = (model.attention_weights + model.small_weights - whole + blocks / layers) / t + whole
    layer += sparse / layers * (model.experts * h + expert_weights(model, layout))
    first, last = stage == 0, stage == p - 1
    words = model.vocabulary * h / t * ((first or last) if model.tied else first + last)
    root = words + (0 if model.gated else model.sequence * h) * first + (1 if model.gated else 2) * h * last
    return stage_layers(model.layers, p, layout.chunks)[stage] * layer + root, layer, root


def expert_weights(model: GPT, layout: Layout) -> float:
    """Numbers in the experts that a rank holds in one layer of them."""
    return model.experts * model.block_weights(model.expert_ffn) / layout.expert if model.experts else 0.0


def rank_memory(model: GPT, layout: Layout, stage: int | None = None) -> Memory:
    """Bytes of a rank of a pipeline stage; of the fullest rank when `stage` is None (the first or the last stage).

    States as `state_bytes` has them for the rank's own parameters, shared out over the data-parallel ranks (those of a
    shard), experts over the ranks that hold the same ones; in float8, weights are kept in two layouts of 1 byte, no
    less. Activations of the layers as `layer_bytes`, for what the schedule keeps in
    flight; with full recomputation also those of the layer that is being computed again; the embedding's dropout; the
    head's input and its float32 logits. ZeRO 2 and 3 hold one layer's gradients before they are shared out. ZeRO 3
    gathers a layer, and the next if it prefetches; the root beside them if it stays, else in their place where it is
    larger. Not counted: what libraries reserve.

    Sources: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", §4 (§4.3 for
    embedding and head); PyTorch, `torch.distributed.fsdp.fully_shard` (prefetching; the root is not resharded).
    """
    if stage is None:
        return max((rank_memory(model, layout, k) for k in {0, layout.pipeline - 1}), key=lambda one: one.total)
    everything, layer, root = stage_parameters(model, layout, stage)
    layers, sharers = stage_layers(model.layers, layout.pipeline, layout.chunks)[stage], layout.shard or layout.replicas
    experts = layers * model.sparse * expert_weights(model, layout)
    wide = {"float32_gradients": layout.float32_gradients}
    states = state_bytes(everything - experts, sharers, layout.zero, **wide)
    owned = state_bytes(experts, max(1, layout.tensor * sharers // layout.expert), layout.zero, **wide)
    s, b, h, t = model.sequence / layout.context, layout.micro_batch, model.width, layout.tensor
    whole = t if layout.sequence_parallel else 1  # by what norms and dropouts are divided
    in_flight = layout.in_flight(stage)
    activations = in_flight * layers / layout.chunks * layer_bytes(model, layout)
    if layout.recomputation == "full":
        activations += layer_bytes(model, layout, again=True)
    if stage == 0 and not model.gated:
        activations += min(in_flight, layout.micro_batches, layout.pipeline) * s * b * h / whole
    if stage == layout.pipeline - 1:
        activations += 4 * s * b * (h / whole + model.vocabulary / t)
    gathered = layer * (4 if layout.float32_gradients else 2) if layout.zero >= 2 and layout.data > 1 else 0
    if layout.zero == 3 and layout.data > 1:
        together = layer * (2 if layout.prefetch else 1)
        gathered += 2 * (together + root if layout.root_stays else max(together, root))
    both = (getattr(states, part) + getattr(owned, part) for part in ("parameters", "gradients", "optimizer"))
    return Memory(*both, activations, gathered)


def layer_bytes(model: GPT, layout: Layout, again: bool = False) -> float:
    """Bytes of activations of one layer and micro-batch on a rank; `again`: while it is computed a second time.

    GPT-2's layer as `layer_activation_bytes`. Llama's by the same accounting, with fused SwiGLU: inputs of norms and
    of the products after them (8 h bytes a token; 1 byte a number for the latter in float8), queries, keys, values and
    the attention's output, and gate, up and their product (6 f; 5 f in float8). Of experts, each token's copies, and
    those three for each. Of operators that are computed again, the outputs are dropped.
    """
    kept, dropped = ("none", set()) if again else (layout.recomputation, layout.again)
    s, t = model.sequence / layout.context, layout.tensor
    usual = model.kv_heads == model.heads and model.ffn == 4 * model.width == 4 * model.heads * model.head
    if usual and not model.gated and not model.experts and not dropped and s == model.sequence:
        return layer_activation_bytes(
            model.sequence, layout.micro_batch, model.width, model.heads, tensor_parallel=t,
            sequence_parallel=layout.sequence_parallel,
            recomputation="selective" if kept == "none" and model.fused_attention else kept,
        )  # fmt: skip
    h, whole = model.width, t if layout.sequence_parallel else 1
    if kept == "full":
        return 2 * s * layout.micro_batch * h / whole
    one = 2 if layout.precision == "bfloat16" else 1
    if "products" in dropped:
        dropped = dropped | {"norm", "activation"}
    outside = (4 if model.gated else 6) * h + (0 if "norm" in dropped else 2 * one * h)
    value = model.latent[3] if model.latent else model.head
    attention = 2 * model.heads * (model.head + value) + 2 * model.kv_heads * (model.head + value)
    if model.latent:
        attention = 2 * sum(model.latent[:3]) + (2 * model.heads * value if "latent" in dropped else attention)
    scores = 0 if model.fused_attention or kept == "selective" else 5 * model.heads * model.sequence

    def block(ffn):
        if "ffn" in dropped:
            return 0
        return (4 if model.gated else 2) * ffn + (0 if "activation" in dropped else one * ffn)

    mixture = block(model.shared_ffn) + model.top_k * (block(model.expert_ffn) + (0 if "ffn" in dropped else one * h))
    inside = attention + scores + (1 - model.sparse) * block(model.ffn) + model.sparse * mixture
    inside *= 0.5 if "products" in dropped else 1
    return s * layout.micro_batch * (outside / whole + inside / t)
