"""Nodes of one kind of card: what their products, their memory and their links reach, and what a collective takes."""

from dataclasses import dataclass

from .cards import Card
from .collectives import (
    Link,
    all_to_all,
    broadcast,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)

# Shares of the peak, a number for each generation of cards: of matrix products in linear layers in half precision, and
# of a fused attention, forward and backward, on what a causal mask leaves. LOW: of the products' share, what float8 and
# float4 reach of their own peaks, with their casts. Those of Ampere, Hopper and Blackwell were chosen so that the six
# rows that published.toml marks come out; for CDNA3 nothing was: its numbers are a guess.
PRODUCTS = {"Volta": 0.60, "Ampere": 0.80, "Hopper": 0.72, "Blackwell": 0.60, "Blackwell Ultra": 0.80, "CDNA3": 0.55}
ATTENTION = {"Volta": 0.25, "Ampere": 0.33, "Hopper": 0.30, "Blackwell": 0.50, "Blackwell Ultra": 0.50, "CDNA3": 0.30}
# OF_PYTORCH: the same of PyTorch's own attention, with which FSDP trains: FlashAttention-2, which uses nothing that is
# new in Hopper. Megatron has kernels that do.
OF_PYTORCH = ATTENTION | {"Hopper": 0.18}
LOW = {"Hopper": {"float8": 1.0}, "Blackwell": {"float8": 0.86, "float4": 0.68}, "CDNA3": {"float8": 0.86}}
LOW["Blackwell Ultra"] = LOW["Blackwell"]
TRAFFIC = 15.0  # how often the bytes of a layer's activations go through memory in what is no product, kernels fused
LINKS = 0.8  # share of their data sheets that links reach


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of card.

    node: cards of a node; None: as the card's row says. latency: seconds of a message. products, attention: shares of
    the card's peak that matrix products and a fused attention reach; None: those of its generation. traffic: how
    often the bytes of a layer's activations go through the card's memory, forward and backward, in all that is no
    product. links: the share of its bandwidths that messages reach.
    """

    card: Card
    node: int | None = None
    latency: float = 5e-6
    products: float | None = None
    traffic: float = TRAFFIC
    attention: float | None = None
    links: float = LINKS

    def __post_init__(self):
        if self.node is None:
            object.__setattr__(self, "node", self.card.node)
        if self.products is None:
            object.__setattr__(self, "products", PRODUCTS[self.card.generation])
        shares = self.products, self.attention or 1, self.links
        if self.node < 1 or self.latency < 0 or self.traffic < 0 or not all(0 < share <= 1 for share in shares):
            raise ValueError(f"a cluster has 1 GPU a node or more, shares from 0 to 1, nothing below 0: {self}")

    @property
    def peak(self) -> float:
        """Operations a second of the card in half precision."""
        return self.card.peak()

    def speed(self, precision: str = "bfloat16") -> float:
        """Operations a second that products of linear layers reach in a precision.

        Raises ValueError where the card has no such Tensor Cores.
        """
        return self.card.peak(precision) * self.products * LOW.get(self.card.generation, {}).get(precision, 1.0)

    def scores(self, zero: int = 0) -> float:
        """Operations a second of a fused attention, forward and backward; `zero`: the ZeRO stage, for the library."""
        table = OF_PYTORCH if zero == 3 else ATTENTION
        return (self.attention or table[self.card.generation]) * self.peak

    @property
    def between(self) -> Link:
        """What one rank gets of the network between nodes."""
        return Link(self.latency, self.links * self.card.network)

    def inside(self, ranks: int) -> Link:
        """What one of `ranks` ranks of a node gets; of a mesh, the wires to the others alone."""
        part = (min(ranks, self.node) - 1) / max(1, self.node - 1) if self.card.mesh and ranks > 1 else 1
        return Link(self.latency, self.links * self.card.link * part)

    def together(self, ranks: int, apart: int = 1) -> int:
        """How many of a group's ranks a node holds, where `apart` ranks lie from one to the next."""
        room = max(1, self.node // apart)
        return max(n for n in range(1, min(ranks, room) + 1) if ranks % n == 0)

    def collective(self, kind: str, size: float, ranks: int, together: int | None = None, copies: float = 0.0) -> float:
        """Seconds of a collective over ranks that fill their nodes, whose ranks all send at once.

        Each rank has a network card of its own, so a node of 8 sends 8 times what one rank gets: collectives go first
        inside a node, then each rank's share goes between nodes.

        Args:
            kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast" or "send" (to the next node
                where there are several).
            size: bytes: of the whole tensor; for "all_to_all" of what one rank sends, its own share with it.
            ranks: of the group. together: how many of them a node holds; default: as many as it can.
            copies: for "all_to_all", as `collectives.all_to_all` has it.

        Raises ValueError for an unknown kind, or ranks that do not fill their nodes evenly.
        """
        together = self.together(ranks) if together is None else together
        if ranks % together or together > self.node:
            raise ValueError(f"{ranks} ranks do not fill nodes of {self.node} with {together} each")
        nodes, inside = ranks // together, self.inside(together)
        if kind == "all_reduce":
            return hierarchical_all_reduce(size, nodes, together, inside, self.between)
        if kind in ("reduce_scatter", "all_gather"):
            return hierarchical_reduce_scatter(size, nodes, together, inside, self.between)
        if kind == "all_to_all":
            return all_to_all(size, nodes, together, inside, self.between, copies)
        if kind == "broadcast":
            return broadcast(size, nodes, self.between) + broadcast(size, together, inside)
        if kind == "send":
            link = inside if nodes == 1 else self.between
            return link.latency + size / link.bandwidth
        raise ValueError(f"no collective {kind!r}")
