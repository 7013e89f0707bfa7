"""The chain of layers that balises 5 and 6 train on ranks: the size of its buckets, its bytes, its true gradients."""

from functools import cache

import torch

from dlojz_tp.judging.probes.networks import Chain, gradients, rows

CAPACITY = 1200  # bytes: two of the chain's six layers, 576 bytes each
RATE = 0.1
HELD = sum(p.numel() * p.element_size() for p in Chain().parameters())


@cache
def plain(steps: int) -> list[list]:
    """The truth: gradients of the whole batch in each step, one process, float64, SGD between the steps."""
    model, found = Chain(), []
    for step in range(steps):
        model.zero_grad()
        model(rows(step)).backward()
        found.append(gradients(model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
    return found


@cache
def local(rank: int, size: int) -> list:
    """The gradients of what one rank sees in the first step."""
    model = Chain()
    model(rows(0)[rank::size]).backward()
    return gradients(model.parameters())
