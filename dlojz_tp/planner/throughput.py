"""How fast a training is, as the field says it: images or tokens a second, and the share of the peak it reaches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Steps of a training. samples: images or tokens of a step, over all cards; seconds: of a step.

    forward: operations of the model's forward pass on one sample; peak: operations a second of all cards together,
    dense, in the number format of the products. A card's data sheet often gives twice that, for sparse matrices.
    """

    samples: float
    seconds: float
    forward: float
    peak: float

    def __post_init__(self):
        if not (self.samples > 0 and self.seconds > 0 and self.forward > 0 and self.peak > 0):
            raise ValueError(f"samples, seconds, operations and peak are above 0: {self!r}")

    @property
    def per_second(self) -> float:
        """Images or tokens a second."""
        return self.samples / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1: a backward pass has twice the operations of the forward."""
        return mfu(3 * self.forward * self.samples, self.seconds, self.peak)

    def hfu(self, forwards: float = 2.0) -> float:
        """Hardware FLOPs utilization: with the forwards of recomputation: 2 where each layer runs again."""
        return mfu((2 + forwards) * self.forward * self.samples, self.seconds, self.peak)

    def __str__(self) -> str:
        return f"{self.per_second:,.4g} a second, {100 * self.mfu:.1f} % of the peak (MFU)"


def mfu(operations: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilization: the share of the peak (operations a second) that the model's own operations reach.

    Operations that recomputation adds do not count: they are a means, not the work. Counting them gives the hardware's
    utilization.

    Source: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", §4.1 and appendix B.
    """
    return operations / seconds / peak
