"""How fast a modelled card is: what its data sheet promises, times the share of it that programs reach.

Two constants a generation; everything else is stated here, once for all cards.
"""

import math
from dataclasses import dataclass

import torch

from dlojz_tp.planner.cards import CARDS, Card
from dlojz_tp.planner.cluster import PRODUCTS

NEW = "Hopper", "Blackwell", "Blackwell Ultra", "CDNA3"

# CPU's seconds to start an operation that Python calls, of the machine that cards of a generation come in: fitted on a
# forward pass of one image, by ResNet-50 (Volta) and EfficientNet-b0 (Ampere); the others are guesses. Autocast's casts
# and the backward pass are called from C++: fitted on EfficientNet-b0 in float16.
LAUNCH = {"Volta": 57e-6, "Ampere": 37e-6} | dict.fromkeys(NEW, 20e-6)
INNER = 0.5

# A product whose smallest size is d reaches d / (d + SMALL) of what large ones do, the planner's PRODUCTS: the faster
# Tensor Cores are, the longer they wait at the ends of each sum. Fitted on MPT of 1 billion (Ampere, Hopper).
# Convolutions, whose sizes are small, have shares of their own.
SMALL = {"Volta": 150, "Ampere": 250} | dict.fromkeys(NEW, 550)
CONVOLUTIONS = {"Volta": 0.6, "Ampere": 0.658} | dict.fromkeys(NEW, 0.54)

# Share of the peak of fused attention over long sequences (Dao 2023, "FlashAttention-2": 50 to 73 % on an A100, up to
# 335 TFLOP/s on an H100); over 450 tokens it reaches half of that.
ATTENTION = {"Volta": 0.24, "Ampere": 0.56} | dict.fromkeys(NEW, 0.34)
ATTENTION_HALF = 450

# Share of the memory's bandwidth that cuDNN reaches when it puts the channels of 16-bit images last, or back. Fitted on
# Lambda's contiguous ResNet-50 in float16, on a V100 and an A100.
REORDERED = {"Volta": 0.75} | dict.fromkeys(("Ampere", *NEW), 0.4)

# stated for all cards
# shares of the peak without Tensor Cores, of products (fitted on BERT-large of 2019) and convolutions (Winograd's way)
FLOAT32, FLOAT32_CONV = 0.8, 0.9
TRAFFIC = 0.85  # share of the memory's bandwidth that kernels reach (triad of BabelStream: 0.85 to 0.93)
STRIDED = 0.6  # of kernels that cannot read 16 bytes at once: casts, broadcasting; fitted on Karpathy's bfloat16
DEPTHWISE = 0.13  # of convolutions that go through each channel alone; fitted on EfficientNet-b0, trained in float16
KERNEL = 3e-6  # the shortest kernel, with the gap before the next (seconds)
# speed of a product whose rows are multiples of fewer bytes than 16: Tensor Cores are fed by copies of 4, 8 or 16
# bytes. Of 2 bytes: "nearly a 3x speedup" by padding (pytorch.org/blog/accelerating-large-language-models)
UNALIGNED = {8: 0.8, 4: 0.8, 2: 1 / 3}
COMPILED_LAUNCH = 8e-6  # CPU's seconds for a kernel of a compiled graph
CALL = 50e-6  # CPU's seconds to check the guards of a compiled function and enter it
REPLAY = 10e-6  # CPU's seconds to start a CUDA graph
ONE_OF_LIST = 0.3e-6  # CPU's seconds for each further tensor of a _foreach_ operation
PINNED, PAGEABLE = 0.8, 0.3  # shares of the PCIe bus that copies reach
PCIE = {"Volta": 16e9, "Ampere": 32e9} | dict.fromkeys(NEW, 64e9)  # x16
LATENCY = 10e-6  # of a copy, or for the CPU to see that a stream is done (seconds)

# How far the model is off: sizes of errors, on average and the largest, of speeds and of gains (ratios of two speeds of
# one source), over the published rows on which nothing was fitted; benchmarks/modelled_gpu.py --check holds them.
ROWS_HELD_OUT = 94
MEAN_MISS, LARGEST_MISS = 0.08, 0.36
MEAN_GAIN_MISS, LARGEST_GAIN_MISS = 0.06, 0.17
CARD_MISSES = {"H100": 0.02, "A100-40GB": 0.13}  # on average
MISSED = (
    f"The model missed {ROWS_HELD_OUT} published speeds of ResNets, EfficientNets, GPTs and BERTs by {MEAN_MISS:.0%} "
    f"on average and {LARGEST_MISS:.0%} at most ({CARD_MISSES['H100']:.0%} on an H100, {CARD_MISSES['A100-40GB']:.0%} "
    f"on an A100 of 40 GB), and their gains by {MEAN_GAIN_MISS:.0%} and {LARGEST_GAIN_MISS:.0%} "
    "(benchmarks/modelled_gpu.py). None of them is a compiled ResNet, and how fast an H100's processor starts "
    "operations is a guess."
).replace("%", " %")


@dataclass(frozen=True)
class Rates:
    """The times of one card. launch: CPU's seconds to start an operation. The others: see the tables."""

    card: Card
    products: float
    convolutions: float
    small: float
    launch: float
    attention: float
    reordered: float

    def product(self, flops: float, dtype: torch.dtype, conv: bool) -> float:
        """Seconds for the operations of matrix products or convolutions, whose sizes fit."""
        card = self.card
        if dtype in (torch.float16, torch.bfloat16):
            peak = card.float16 if dtype == torch.float16 else card.bfloat16 or card.float32
        else:
            if not self.tf32(conv):
                return flops / (card.float32 * (FLOAT32_CONV if conv else FLOAT32))
            peak = card.tf32
        return flops / (peak * (self.convolutions if conv else self.products))

    def tf32(self, conv: bool) -> bool:
        """Whether convolutions, or products, of float32 numbers run in TF32; both ways to switch it count."""
        switch = torch.backends.cudnn.conv if conv else torch.backends.cuda.matmul
        return bool(self.card.tf32) and switch.fp32_precision == "tf32"

    def traffic(self, nbytes: float, share: float = TRAFFIC) -> float:
        """Seconds for bytes that a kernel reads and writes."""
        return nbytes / (self.card.bandwidth * share)

    def copy(self, way: str, nbytes: float, pinned: bool) -> float:
        """Seconds for a copy over the bus, or between two cards."""
        bus = PCIE[self.card.generation] * (PINNED if pinned else PAGEABLE)
        return LATENCY + nbytes / (self.card.link if way == "between gpus" else bus)


def rates(card: str | Card) -> Rates:
    """The rates of a card, or of the one of this name."""
    card = CARDS[card] if isinstance(card, str) else card
    tables = PRODUCTS, CONVOLUTIONS, SMALL, LAUNCH, ATTENTION, REORDERED
    return Rates(card, *(table[card.generation] for table in tables))


def fits(*sizes: int, itemsize: int) -> float:
    """Share of the speed of Tensor Cores that a product of these sizes gets: they want rows of 16 bytes."""
    aligned = math.gcd(16, *(size * itemsize for size in sizes))
    return UNALIGNED.get(aligned, 1.0)
