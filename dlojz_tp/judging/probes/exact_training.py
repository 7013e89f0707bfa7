"""A small training in bfloat16 whose gradients have no rounding errors, and its truth: one process in float64."""

import functools
import math

import torch
from torch import nn

SHAPES = ((70,), (13, 15), (), (111,), (6, 2, 9))
COUNTS = [math.prod(shape) for shape in SHAPES]
N, FIRST = sum(COUNTS), sum(COUNTS[:2])  # elements: of all parameters, of the first group
STEPS = 3
# the rounded values of the first group change in step 3 alone, those of the second in step 2: older ones show their age
ADAMW = torch.optim.AdamW, {"lr": 1.5e-3, "weight_decay": 0.1}, {"lr": 2.5e-3, "weight_decay": 0.0}
SGD = torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}, {}


def training(size: int):
    """What trains on so many ranks: the class, its options, those of the second group."""
    return SGD if size == 3 else ADAMW


def _drawn(seed: int, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, (N,), generator=torch.Generator().manual_seed(seed)).double()


SIGNS = 2 * _drawn(1, 0, 2) - 1
START = SIGNS * (1 + _drawn(2, 0, 128) / 128)  # (N,), all numbers of bfloat16 between 1 and 2: they are 1/128 apart


def gradient(step: int, rank: int, size: int) -> torch.Tensor:
    """(N,) what backward gives on a rank; sums and means over the ranks have no rounding error in bfloat16."""
    return size * SIGNS.roll(1) * (_drawn(3, 3, 8) + _drawn(1000 * step + rank, -2, 3)) / 8


@functools.cache
def means(size: int) -> torch.Tensor:
    """(STEPS, N): the mean gradients."""
    return torch.stack([sum(gradient(step, rank, size) for rank in range(size)) / size for step in range(STEPS)])


@functools.cache
def truth(size: int) -> torch.Tensor:
    """(N,): the parameters after training in one process, in float64."""
    kind, options, second = training(size)
    groups = [nn.Parameter(part.clone()) for part in START.split([FIRST, N - FIRST])]
    optimizer = kind([{"params": groups[:1]}, {"params": groups[1:], **second}], **options)
    for mean in means(size):
        for p, part in zip(groups, mean.split([FIRST, N - FIRST]), strict=True):
            p.grad = part.clone()
        optimizer.step()
    return torch.cat(groups).detach()


def in_shapes(flat: torch.Tensor) -> list[torch.Tensor]:
    """(N,) as parameters, in bfloat16."""
    return [part.reshape(shape).bfloat16() for part, shape in zip(flat.split(COUNTS), SHAPES, strict=True)]


def groups_of(parameters, size: int) -> list:
    """The parameters as they are handed to an optimizer: groups with a frozen one and one named twice, or a list."""
    first = [*parameters[:2], nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)]
    second, options = [*parameters[2:], parameters[3]], training(size)[2]
    return [{"params": first}, {"params": second, **options}] if options else first + second
