"""How fast a modelled card is: what its data sheet promises, times the share of it that programs reach.

Two constants a generation; everything else is stated here, once for all cards.
"""

from dataclasses import dataclass

import torch

from dlojz_tp.planner.cards import CARDS, Card
from dlojz_tp.planner.steps import PRODUCTS

# Calibrated: the share of the peak that products and convolutions reach on Tensor Cores. V100: ResNet-50 in mixed
# precision; A100: the planner's, from Megatron-LM's table; H100: MPT 1B. And the CPU's seconds to start an operation,
# of the machine that such a card comes in. V100: ResNet-50's forward pass of one image; the younger ones are guesses.
CALIBRATED = {"V100": (0.60, 55e-6), "A100": (PRODUCTS, 25e-6), "H100": (0.54, 20e-6)}

# stated for all cards
FLOAT32 = 0.9  # share of the peak that products reach without Tensor Cores, which memory keeps up with
TRAFFIC = 0.85  # share of the memory's bandwidth that kernels reach (triad of BabelStream: 0.85 to 0.93)
KERNEL = 3e-6  # the shortest kernel, with the gap before the next (seconds)
UNALIGNED = 0.5  # speed of a product whose sizes are no multiples of 16 bytes
ATTENTION = 0.7  # fused attention beside a plain product (Dao 2023, "FlashAttention-2", figures 4 and 5)
COMPILED_LAUNCH = 8e-6  # CPU's seconds for a kernel of a compiled graph
CALL = 50e-6  # CPU's seconds to check the guards of a compiled function and enter it
REPLAY = 10e-6  # CPU's seconds to start a CUDA graph
ONE_OF_LIST = 0.3e-6  # CPU's seconds for each further tensor of a _foreach_ operation
PINNED, PAGEABLE = 0.8, 0.3  # shares of the PCIe bus that copies reach
PCIE = {"V100": 16e9, "A100": 32e9, "H100": 64e9, "H200": 64e9, "B200": 64e9, "MI300X": 64e9}  # 3.0, 4.0, 5.0 x16
LATENCY = 10e-6  # of a copy, or for the CPU to see that a stream is done (seconds)

# sizes of the errors of what benchmarks/modelled_gpu.py predicts: on average, the largest
MEAN_MISS, LARGEST_MISS = 0.09, 0.21
MISSED = (
    f"The model missed published throughputs by {100 * MEAN_MISS:.0f} % on average and by {100 * LARGEST_MISS:.0f} % "
    "at most (benchmarks/modelled_gpu.py); how fast the processor starts operations is a guess, except for the V100."
)


@dataclass(frozen=True)
class Rates:
    """The times of one card. launch: CPU's seconds to start an operation."""

    card: Card
    products: float
    launch: float

    def product(self, flops: float, dtype: torch.dtype, conv: bool) -> float:
        """Seconds for the operations of matrix products or convolutions, whose sizes fit."""
        card = self.card
        if dtype in (torch.float16, torch.bfloat16):
            peak = card.float16 if dtype == torch.float16 else card.bfloat16 or card.float32
        else:
            if not self.tf32(conv):
                return flops / (card.float32 * FLOAT32)
            peak = card.tf32
        return flops / (peak * self.products)

    def tf32(self, conv: bool) -> bool:
        """Whether convolutions, or products, of float32 numbers run in TF32; both ways to switch it count."""
        switch = torch.backends.cudnn.conv if conv else torch.backends.cuda.matmul
        return bool(self.card.tf32) and switch.fp32_precision == "tf32"

    def traffic(self, nbytes: float) -> float:
        """Seconds for bytes that a kernel reads and writes."""
        return nbytes / (self.card.bandwidth * TRAFFIC)

    def copy(self, way: str, nbytes: float, pinned: bool) -> float:
        """Seconds for a copy over the bus, or between two cards."""
        bus = PCIE.get(self.card.name, 64e9) * (PINNED if pinned else PAGEABLE)
        return LATENCY + nbytes / (self.card.link if way == "between gpus" else bus)


def rates(card: str | Card) -> Rates:
    """The rates of a card, or of the one of this name; one that was never calibrated does as well as an H100."""
    card = CARDS[card] if isinstance(card, str) else card
    return Rates(card, *CALIBRATED.get(card.name, CALIBRATED["H100"]))


def fits(*sizes: int, itemsize: int) -> float:
    """Share of the speed of Tensor Cores that a product of these sizes gets: they want rows of 16 bytes."""
    return 1.0 if all(size * itemsize % 16 == 0 for size in sizes) else UNALIGNED
