"""Small networks and batches that the checks train, and the plain loop that is their truth."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Watched(nn.Sequential):
    """A network that counts how often it is moved, and how often it is called."""

    moves = calls = 0

    def forward(self, images):
        self.calls += 1
        return super().forward(images)

    def to(self, *args, **kwargs):
        self.moves += 1
        return super().to(*args, **kwargs)

    def cuda(self, *args, **kwargs):
        self.moves += 1
        return super().cuda(*args, **kwargs)


def network(dropout: float = 0.0) -> Watched:
    """Conv, batch norm, dropout, linear: (batch, 3, 6, 5) to (batch, 4), always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Watched(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(5 * 4 * 3, 4)
        )


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images (n, 3, 6, 5) and labels (n,), not alike."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, 6, 5, generator=generator) * (1 + k), torch.randint(4, (n,), generator=generator))
        for k, n in enumerate(sizes)
    ]


def plain_steps(model: nn.Module, data, lr: float = 0.1, momentum: float = 0.9, add_up: bool = False):
    """The truth: a copy of the model trained in float64, SGD with momentum written out. Returns (copy, losses).

    add_up: never clear the gradients, which is a mistake.
    """
    model = copy.deepcopy(model).double()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    losses, sums = [], [0.0 for _ in velocity]
    for images, labels in data:
        loss = F.cross_entropy(model(images.double()), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        if add_up:
            sums = gradients = [s + g for s, g in zip(sums, gradients, strict=True)]
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(momentum).add_(g)
                p.sub_(lr * v)
    return model, losses
