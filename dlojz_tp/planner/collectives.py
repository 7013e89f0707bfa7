"""Times of collectives from latency and bandwidth: the model of Hockney, one message costs α + bytes / β."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link between two ranks: latency of a message (seconds), bandwidth in one direction (bytes a second)."""

    latency: float
    bandwidth: float

    def __post_init__(self):
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link has a latency of 0 s or more and a bandwidth above 0, not {self}")


def reduce_scatter(size: float, world_size: int, link: Link) -> float:
    """Seconds of a ring reduce-scatter of `size` bytes a rank: (N−1) messages of size/N.

    Raises ValueError for a negative size or a world without ranks.
    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH", §4.
    """
    n = _ranks(size, world_size)
    return (n - 1) * (link.latency + size / n / link.bandwidth)


def all_gather(size: float, world_size: int, link: Link) -> float:
    """Seconds of a ring all-gather whose result is `size` bytes: the same messages as a reduce-scatter.

    Source and errors: as for `reduce_scatter`.
    """
    return reduce_scatter(size, world_size, link)


def broadcast(size: float, world_size: int, link: Link) -> float:
    """Seconds of a broadcast of `size` bytes along a binomial tree: ⌈log₂ N⌉ messages, one after the other.

    Source and errors: as for `reduce_scatter`.
    """
    n = _ranks(size, world_size)
    return math.ceil(math.log2(n)) * (link.latency + size / link.bandwidth)


def all_reduce(size: float, world_size: int, link: Link, algorithm: str = "ring") -> float:
    """Seconds of an all-reduce of `size` bytes a rank.

    - "ring": 2 (N−1) α + 2 (N−1)/N · size/β. No algorithm sends fewer bytes, but the latency grows with N.
    - "tree": 2 ⌈log₂ N⌉ α + 2 · size/β. Two binary trees, each for half of the data, pipelined.
    - "best": the faster of the two, as NCCL chooses.

    Raises ValueError for an unknown algorithm, a negative size or a world without ranks.
    Sources: Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (ring);
    Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (tree).
    """
    n = _ranks(size, world_size)
    if algorithm == "best":
        return min(all_reduce(size, n, link, name) for name in ("ring", "tree"))
    if algorithm == "ring":
        return 2 * reduce_scatter(size, n, link)
    if algorithm == "tree":
        return 2 * (math.ceil(math.log2(n)) * link.latency + (n > 1) * size / link.bandwidth)
    raise ValueError(f"unknown algorithm {algorithm!r}: choose ring, tree or best")


def hierarchical_all_reduce(
    size: float, nodes: int, ranks_per_node: int, inside: Link, between: Link, algorithm: str = "best"
) -> float:
    """Seconds of an all-reduce over nodes: reduce-scatter in each node, all-reduce between nodes, all-gather in each.

    Each of a node's ranks all-reduces its share of size / ranks_per_node with its like on the other nodes, all at once:
    `between` is what one rank gets of the node's network.

    Source: Jia et al. 2018, "Highly scalable deep learning training system with mixed-precision" (hierarchical
    all-reduce).
    """
    share = size / _ranks(size, ranks_per_node)
    return 2 * reduce_scatter(size, ranks_per_node, inside) + all_reduce(share, nodes, between, algorithm)


def hierarchical_reduce_scatter(size: float, nodes: int, ranks_per_node: int, inside: Link, between: Link) -> float:
    """Seconds of a reduce-scatter of `size` bytes a rank over nodes: first in each node, then each share between nodes.

    All ranks of a node send at once, each through its network card: `between` is what one rank gets of the node's
    network. The two phases are added; NCCL's rings, one for each card, do both at a time and can be faster.

    Sources: the phases of `hierarchical_all_reduce`; NVIDIA/nccl, issue 412 (flows through all network cards at once).
    Errors: as for `reduce_scatter`.
    """
    share = size / _ranks(size, ranks_per_node)
    return reduce_scatter(size, ranks_per_node, inside) + reduce_scatter(share, nodes, between)


def all_to_all(size: float, nodes: int, ranks_per_node: int, inside: Link, between: Link, copies: float = 0.0) -> float:
    """Seconds of an all-to-all in which each rank sends 1/N of its `size` bytes to each of N ranks.

    What stays in the node goes over its links, the rest at the same time over the network: the slower way counts. Where
    the same bytes go to several ranks of a node, the network carries them once: `copies` is how many nodes they go to
    for each rank that they go to (0: one each).

    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", §3.2.2 (both ways at once, once to each node). Errors: as
    for `reduce_scatter`.
    """
    ranks = _ranks(size, nodes * ranks_per_node)
    near, far = (ranks_per_node - 1) / ranks, 1 - ranks_per_node / ranks
    ways = ((near, inside), (far * (copies or 1), between))
    return max((link.latency + part * size / link.bandwidth for part, link in ways if part), default=0.0)


def _ranks(size: float, world_size: int) -> int:
    if size < 0 or world_size < 1:
        raise ValueError(f"a collective has 0 bytes and 1 rank at least, not {size} bytes and {world_size} ranks")
    return world_size
