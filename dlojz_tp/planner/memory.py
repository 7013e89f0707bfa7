"""Bytes that a rank holds: states of the training at each ZeRO stage, activations of a transformer; bytes it sends."""

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank: parameters, gradients, optimizer states (with float32 master weights, if there are any)."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    n_parameters: float, world_size: int = 1, stage: int = 0, *, mixed_precision: bool = True, optimizer: str = "adam",
    float32_gradients: bool = False,
) -> StateBytes:  # fmt: skip
    """Bytes of a rank's parameters, gradients and optimizer states.

    Mixed precision: 2 bytes a parameter, 2 a gradient, and a float32 master weight (4) beside the states: Adam 8 (two
    moments), SGD with momentum 4, SGD 0. In float32 throughout: 4, 4 and the states. Usual practice beside bfloat16
    parameters adds gradients up and reduces them in float32, 4 bytes: 18 with Adam in the place of 16. Stage 1 shares
    out the optimizer's part, stage 2 also the gradients, stage 3 also the parameters, each to 1/N. What is kept for a
    moment only (a gathered layer, a bucket) is not counted.

    Args:
        n_parameters: of the whole model.
        world_size: ranks N that share.
        stage: 0 (plain data parallelism) to 3.
        mixed_precision: whether parameters and gradients have 2 bytes.
        optimizer: "adam", "momentum" or "sgd".
        float32_gradients: whether gradients have 4 bytes in mixed precision too.

    Returns:
        `StateBytes`.

    Raises:
        ValueError: for an unknown stage or optimizer, or numbers below 0 (parameters) or 1 (ranks).

    Sources: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", §3.1, §5;
    for the 18 bytes NVIDIA, Megatron Core developer guide, "Distributed Optimizer" (float32 gradients: 6 + 12/d).
    """
    states = {"adam": 8, "momentum": 4, "sgd": 0}
    if optimizer not in states or stage not in STAGES or n_parameters < 0 or world_size < 1:
        raise ValueError(
            f"give 0 or more parameters, 1 or more ranks, a stage of {STAGES}, an optimizer of {', '.join(states)}; "
            f"not {n_parameters}, {world_size}, {stage}, {optimizer!r}"
        )
    weight = 2 if mixed_precision else 4
    gradient = 4 if float32_gradients else weight
    kept = states[optimizer] + (4 if mixed_precision else 0)
    shares = [world_size if stage >= first else 1 for first in (3, 2, 1)]  # parameters, gradients, optimizer
    return StateBytes(*(n_parameters * size / share for size, share in zip((weight, gradient, kept), shares)))


def step_volume(n_parameters: float, world_size: int, stage: int = 0, *, bytes_per_element: float = 2) -> float:
    """Bytes that a rank sends in one step, with ring collectives.

    Stages 0 to 2: a reduce-scatter and an all-gather, 2 (N−1)/N Ψ elements. Stage 3 gathers the parameters twice, for
    forward and for backward, and reduce-scatters the gradients: 3 (N−1)/N Ψ.

    Raises ValueError for an unknown stage or numbers out of range.
    Source: Rajbhandari et al. 2020 (as above), §7.
    """
    if stage not in STAGES or n_parameters < 0 or world_size < 1:
        raise ValueError(f"no volume for {n_parameters} parameters, {world_size} ranks, stage {stage}")
    return (3 if stage == 3 else 2) * (world_size - 1) / world_size * n_parameters * bytes_per_element


def layer_activation_bytes(
    sequence: int,
    micro_batch: int,
    width: int,
    heads: int,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recomputation: str = "none",
) -> float:
    """Bytes of activations that one transformer layer keeps for backward, of one rank, in 16-bit precision.

    s·b·d (34 + 5 h s/d) without parallelism: 34 for the layers, the second term for the attention's scores. Cut over t
    ranks, 10 of the 34 stay whole (inputs of layer norms and dropouts), which sequence parallelism cuts as well.

    Args:
        sequence, micro_batch: tokens and sequences; width: hidden size d; heads: h.
        tensor_parallel: ranks t that share the layer.
        sequence_parallel: whether norms and dropouts are cut along the sequence.
        recomputation: "none"; "selective": the attention's scores are computed again (a fused attention such as
            FlashAttention keeps none of them either); "full": only the layer's input is kept.

    Returns:
        Bytes.

    Raises:
        ValueError: for an unknown recomputation, sizes below 1, or ranks that do not divide the heads.

    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", table 2.
    """
    if recomputation not in ("none", "selective", "full"):
        raise ValueError(f'recomputation is "none", "selective" or "full", not {recomputation!r}')
    if min(sequence, micro_batch, width, heads, tensor_parallel) < 1 or heads % tensor_parallel:
        raise ValueError(f"sizes are 1 or more, and {tensor_parallel} ranks must divide {heads} heads")
    t = tensor_parallel
    unit = sequence * micro_batch * width
    if recomputation == "full":
        return 2 * unit / (t if sequence_parallel else 1)
    scores = 5 * heads * sequence / width if recomputation == "none" else 0
    return unit * ((10 / t if sequence_parallel else 10) + 24 / t + scores / t)
