"""The time of a transformer layer cut over ranks: what it computes against what it sends."""

from dataclasses import dataclass

from .collectives import Link, hierarchical_all_reduce


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer on one rank, forward and backward: computing, and all-reduces that nothing hides."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """Both, one after the other: a layer needs the sum before it can go on."""
        return self.compute + self.communication

    @property
    def communication_share(self) -> float:
        """The part of the time in which the rank waits for the others, from 0 to 1."""
        return self.communication / self.total


def layer_flops(sequence: int, micro_batch: int, width: int, *, ffn_width: int | None = None) -> float:
    """Operations of one transformer layer, forward and backward, a multiplication and an addition counted as two.

    Forward: 8 b·s·d² for queries, keys, values and output, 4 b·s²·d for the attention's scores and their use, 4 b·s·d·f
    for the feed-forward block. Backward has twice as many. With f = 4d: 72 b·s·d² (1 + s/6d). Norms, dropouts and the
    saving that a causal mask allows are not counted.

    Args:
        sequence: tokens s.
        micro_batch: sequences b.
        width: hidden size d.
        ffn_width: width f of the feed-forward block; 4 d when not given.

    Raises:
        ValueError: for sizes below 1.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    appendix (there with one more forward pass, for recomputation).
    """
    f = 4 * width if ffn_width is None else ffn_width
    if min(sequence, micro_batch, width, f) < 1:
        raise ValueError(f"sizes are 1 or more, not {sequence}, {micro_batch}, {width}, {f}")
    tokens = sequence * micro_batch
    return 3 * tokens * (8 * width**2 + 4 * sequence * width + 4 * width * f)


def tensor_parallel_layer(
    sequence: int,
    micro_batch: int,
    width: int,
    heads: int,
    *,
    tensor_parallel: int,
    ranks_per_node: int,
    inside: Link,
    between: Link,
    flops_per_second: float,
    ffn_width: int | None = None,
    bytes_per_element: float = 2,
) -> LayerTimes:
    """Predict one layer, forward and backward, cut over `tensor_parallel` ranks as Megatron-LM does it.

    Each rank computes 1/t of the layer, at the same speed however thin its slices are (on a GPU, thin slices are
    slower: the prediction flatters large t). Four all-reduces of b·s·d elements, two in forward and two in backward,
    lie on the way and hide behind nothing. A group that fits into a node uses its links alone; a larger one reduces
    in each node, between the nodes, and gathers in each node. Sequence parallelism sends the same bytes.

    Args:
        sequence, micro_batch, width, ffn_width: as for `layer_flops`.
        heads: attention heads h, which the ranks share out.
        tensor_parallel: ranks t of the group.
        ranks_per_node: how many ranks of the group a node holds, at most. 1: the group is spread, a rank a node.
        inside: link between two ranks of a node.
        between: what one rank gets of the network between nodes.
        flops_per_second: what a rank really reaches, not the data sheet's peak.
        bytes_per_element: of the activations that travel.

    Returns:
        `LayerTimes`.

    Raises:
        ValueError: for ranks that do not divide the heads or the feed-forward width, nodes that are not filled evenly,
            a speed that is not positive, or sizes below 1.

    Sources: Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model
    parallelism", §3 (the four all-reduces); Korthikanti et al. 2022, "Reducing activation recomputation in large
    transformer models", §4.2 (sequence parallelism); `hierarchical_all_reduce`.
    """
    t = tensor_parallel
    operations = layer_flops(sequence, micro_batch, width, ffn_width=ffn_width)
    f = 4 * width if ffn_width is None else ffn_width
    if min(t, heads, ranks_per_node) < 1 or width % heads or heads % t or f % t:
        raise ValueError(f"{t} ranks must divide {heads} heads and a feed-forward width of {f}; heads divide {width}")
    if t > ranks_per_node and t % ranks_per_node:
        raise ValueError(f"{t} ranks do not fill nodes of {ranks_per_node} evenly")
    if not (flops_per_second > 0 and bytes_per_element > 0):
        raise ValueError("a rank's speed and the bytes of an element are above 0")
    together = min(t, ranks_per_node)
    size = sequence * micro_batch * width * bytes_per_element
    all_reduce = hierarchical_all_reduce(size, t // together, together, inside, between)
    return LayerTimes(operations / t / flops_per_second, 4 * all_reduce)
