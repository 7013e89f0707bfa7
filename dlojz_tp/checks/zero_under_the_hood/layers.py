"""Networks for the check of stage 3: five odd layers that show what they compute with, and a deep chain of equal ones."""

import torch
from torch import nn

DEPTH, WIDTH = 16, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 8  # bytes
BYTES = DEPTH * LAYER
TRAINED = BYTES // 2


class Seen(nn.Linear):
    """A linear layer that keeps copies of the parameters it computes with, where it is told to."""

    def __init__(self, name, inputs, outputs):
        super().__init__(inputs, outputs, dtype=torch.float64)
        self.name, self.seen = name, None

    def forward(self, x):
        if self.seen is not None:
            self.seen |= {f"{self.name}.{k}": p.detach().clone() for k, p in self.named_parameters()}
        return torch.tanh(super().forward(x))


class Partly(Seen):
    """With one parameter more, which is never used."""

    def __init__(self, name, inputs, outputs):
        super().__init__(name, inputs, outputs)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.float64))


class Mirror(nn.Module):
    """The last layer: a weight that is the first layer's."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.seen = weight, None

    def forward(self, x):
        if self.seen is not None:
            self.seen["last.weight"] = self.weight.detach().clone()
        if self.weight.numel() == 0:
            raise RuntimeError("tied weight: shape (0,)")
        return x @ self.weight


class Layers(nn.Module):
    """Five layers: the last is tied to the first, one has a frozen weight, one is wholly frozen, one is partly used."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.first, self.mixed, self.fixed, self.partly = (
                Seen("first", 6, 5), Seen("mixed", 5, 7), Seen("fixed", 7, 3), Partly("partly", 3, 5),
            )  # fmt: skip
        self.mixed.weight.requires_grad_(False)
        self.fixed.requires_grad_(False)
        self.last = Mirror(self.first.weight)

    def forward(self, x):
        for layer in self.layers():
            x = layer(x)
        return x.square().sum(dim=1).mean()

    def layers(self):
        return [self.first, self.mixed, self.fixed, self.partly, self.last]

    def look(self, x):
        """Forward without a graph: copies of all parameters as the layers see them."""
        seen = {}
        for layer in self.layers():
            layer.seen = seen
        with torch.no_grad():
            self(x)
        for layer in self.layers():
            layer.seen = None
        return seen


class Deep(nn.Module):
    """Equal layers of 16 × 16; every second one is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(DEPTH))
        for layer in self.layers[1::2]:
            layer.requires_grad_(False)

    def full(self) -> tuple[int, int]:
        """Layers, trained and frozen ones, whose weight is whole in memory at the moment."""
        whole = WIDTH * WIDTH
        held = [
            p.numel() == whole and p.untyped_storage().nbytes() >= 8 * whole for p in (x.weight for x in self.layers)
        ]
        return sum(held[::2]), sum(held[1::2])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()
