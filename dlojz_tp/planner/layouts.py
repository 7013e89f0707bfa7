"""Layouts of a GPT over tensor × pipeline × data parallel ranks, and the bytes that a rank then holds."""

from dataclasses import dataclass

from .memory import STAGES, layer_activation_bytes, state_bytes

SCHEDULES = ("GPipe", "1F1B", "interleaved", "zero-bubble")
RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class GPT:
    """A GPT: hidden size, layers, attention heads, tokens of a sequence, words; its feed-forward width is 4 × hidden.

    fused_attention: the attention's scores are never written out (FlashAttention), and computed again in backward.
    """

    width: int
    layers: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    fused_attention: bool = True

    def __post_init__(self):
        if min(self.width, self.layers, self.heads, self.sequence, self.vocabulary) < 1 or self.width % self.heads:
            raise ValueError(f"sizes are 1 or more, and {self.heads} heads must divide a hidden size of {self.width}")

    @property
    def n_parameters(self) -> int:
        """All parameters, the head's weight being the embedding's.

        Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
        Megatron-LM", §5.1, equation 2, and the last norm, which it leaves out: 12 l h² + 13 l h + (V + s) h + 2 h.
        """
        return self.layers * (12 * self.width**2 + 13 * self.width) + self.root_parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embeddings of words and positions, the last norm."""
        return (self.vocabulary + self.sequence + 2) * self.width

    def flops(self, batch: int, *, forwards: int = 1) -> float:
        """Operations of a step on `batch` sequences: for MFU, with one forward; with 2, layers computed again count.

        Source: the same paper, appendix: 96 B s l h² (1 + s/6h + V/16lh) with recomputation, 72 in the place of 96 and
        12 of 16 without.
        """
        h, s = self.width, self.sequence
        return batch * s * ((2 + forwards) * self.layers * (24 * h**2 + 4 * s * h) + 6 * h * self.vocabulary)


@dataclass(frozen=True)
class Layout:
    """How a training step is laid over `ranks` GPUs. Ranks are numbered tensor first, then data, then pipeline.

    tensor, pipeline, data: ranks of each axis. micro_batch: sequences. micro_batches: their number, a pipeline.
    schedule: of `SCHEDULES`; chunks: stages a rank holds, above 1 with "interleaved" alone. zero: stage, 0 to 3.
    recomputation: "none", "selective" (the attention's scores) or "full". sequence_parallel: norms and dropouts are cut
    as well. float32_gradients: gradients are kept and reduced in 4 bytes. overlap: gradients and parameters travel
    beside computing, messages of the pipeline too, sums of backward beside weight gradients. prefetch, root_stays: with
    ZeRO 3, as FSDP does, the next layer is gathered early, and the embedding stays gathered until backward.
    hierarchical: collectives go first inside a node, then between nodes.
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

    def __post_init__(self):
        if min(self.tensor, self.pipeline, self.data, self.micro_batch, self.micro_batches, self.chunks) < 1:
            raise ValueError("ranks, micro-batches and chunks of a layout are 1 or more")
        choices = {"schedule": SCHEDULES, "zero": STAGES, "recomputation": RECOMPUTATIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {getattr(self, name)!r}")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(f"interleaved has 2 chunks or more, others 1: not {self.schedule} with {self.chunks}")
        if self.chunks > 1 and self.micro_batches % self.pipeline:
            raise ValueError(
                f"interleaved: {self.micro_batches} micro-batches are no multiple of {self.pipeline} ranks"
            )

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.tensor * self.pipeline * self.data

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


def stage_parameters(model: GPT, layout: Layout, stage: int) -> tuple[float, float, float]:
    """Parameters that a rank of a stage computes with: (all of them, of one layer, of embedding and head).

    Cut over tensor ranks: matrices, their biases on the cut side, embeddings of words. Whole on each: norms, biases of
    output and down projection, positions. The last of several stages has its own copy of the embedding, as the head.

    Raises ValueError for stages that do not share out the layers evenly.
    Source: Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model
    parallelism", §3.
    """
    p, h, t = layout.pipeline, model.width, layout.tensor
    if model.layers % (p * layout.chunks) or model.heads % t or not 0 <= stage < p:
        raise ValueError(
            f"{p} x {layout.chunks} stages must divide {model.layers} layers, {t} ranks {model.heads} heads; stages "
            f"are numbered from 0, not {stage}"
        )
    layer = (12 * h * h + 7 * h) / t + 6 * h
    first, last = stage == 0, stage == p - 1
    words = model.vocabulary * h / t * (first or last)
    root = words + model.sequence * h * first + 2 * h * last
    return model.layers // p * layer + root, layer, root


def rank_memory(model: GPT, layout: Layout, stage: int | None = None) -> Memory:
    """Bytes of a rank of a pipeline stage; of the fullest rank when `stage` is None (the first or the last stage).

    States as `state_bytes` has them for the rank's own parameters, shared out over the data-parallel ranks. Activations
    of the layers as `layer_activation_bytes`, for what the schedule keeps in flight; with full recomputation also those
    of the layer that is being computed again; the embedding's dropout; the head's input and its float32 logits. ZeRO 2
    and 3 hold one layer's gradients before they are shared out. ZeRO 3 gathers a layer, and the next if it prefetches;
    the root beside them if it stays, else in their place where it is larger. Not counted: what libraries reserve.

    Sources: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", §4 (§4.3 for
    embedding and head); PyTorch, `torch.distributed.fsdp.fully_shard` (prefetching; the root is not resharded).
    """
    if stage is None:
        return max((rank_memory(model, layout, k) for k in {0, layout.pipeline - 1}), key=lambda one: one.total)
    everything, layer, root = stage_parameters(model, layout, stage)
    states = state_bytes(everything, layout.data, layout.zero, float32_gradients=layout.float32_gradients)
    s, b, h, t = model.sequence, layout.micro_batch, model.width, layout.tensor
    whole = t if layout.sequence_parallel else 1  # by what norms and dropouts are divided
    in_flight = layout.in_flight(stage)
    activations = in_flight * model.layers / layout.pipeline / layout.chunks * layer_bytes(model, layout)
    if layout.recomputation == "full":
        activations += layer_bytes(model, layout, again=True)
    if stage == 0:
        activations += min(in_flight, layout.micro_batches, layout.pipeline) * s * b * h / whole
    if stage == layout.pipeline - 1:
        activations += 4 * s * b * (h / whole + model.vocabulary / t)
    gathered = layer * (4 if layout.float32_gradients else 2) if layout.zero >= 2 and layout.data > 1 else 0
    if layout.zero == 3 and layout.data > 1:
        layers = layer * (2 if layout.prefetch else 1)
        gathered += 2 * (layers + root if layout.root_stays else max(layers, root))
    return Memory(states.parameters, states.gradients, states.optimizer, activations, gathered)


def layer_bytes(model: GPT, layout: Layout, again: bool = False) -> float:
    """Bytes of activations of one layer and micro-batch on a rank; `again`: while it is computed a second time."""
    kept = "none" if again else layout.recomputation
    return layer_activation_bytes(
        model.sequence, layout.micro_batch, model.width, model.heads, tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        recomputation="selective" if kept == "none" and model.fused_attention else kept,
    )  # fmt: skip
