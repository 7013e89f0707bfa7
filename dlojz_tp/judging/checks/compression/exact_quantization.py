"""Affine quantization in exact fractions, number by number, and cases for it."""

from fractions import Fraction

import torch

DRAWN = torch.Generator().manual_seed(2)
MIXED = torch.randn(3, 2, 2, 2, generator=DRAWN)  # a tensor, drawn before CHANNELS
#       x, scale, zero, bits, symmetric
USUAL = torch.linspace(-2.03, 3.01, 24), torch.tensor(0.0193), torch.tensor(101, dtype=torch.int32), 8, False
SIGNED = torch.linspace(-2.03, 2.51, 24), torch.tensor(0.0201), torch.tensor(0, dtype=torch.int32), 8, True
CHANNELS = (
    torch.randn(3, 2, 5, generator=DRAWN), torch.tensor([0.011, 0.3, 0.0027]).view(3, 1, 1),
    torch.tensor([3, 120, 255], dtype=torch.int32).view(3, 1, 1), 8, False,
)  # fmt: skip


def limits_of(bits, symmetric):
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def quantized(x, scale, zero, bits, symmetric):
    """Number by number."""
    least, most = limits_of(bits, symmetric)
    parts = zip(*(one.expand(x.shape).flatten().tolist() for one in (x, scale, zero)))
    whole = [min(max(round(Fraction(a) / Fraction(s)) + z, least), most) for a, s, z in parts]
    return torch.tensor(whole, dtype=torch.int8 if symmetric else torch.uint8).view(x.shape)


def copied(case):
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in case]
