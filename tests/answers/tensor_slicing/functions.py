"""What answers to balises 1, 2, 3 share."""

import torch
from torch import nn


class SubLinear(nn.Linear):
    """A linear layer that is its own part; names of its own are free."""

    def __init__(self, linear, ranks):
        share = ranks.part(linear.weight, 0)
        super().__init__(
            share.shape[1], share.shape[0], linear.bias is not None, linear.weight.device, linear.weight.dtype
        )
        with torch.no_grad():
            self.weight.copy_(share)
            if self.bias is not None:
                self.bias.copy_(ranks.part(linear.bias, 0))
        self.ranks = ranks

    def forward(self, x):
        return self.ranks.gather(super().forward(self.ranks.copy(x)), dim=-1)


def part_by_numbers(linear, ranks):
    n = linear.out_features // ranks.size
    if n * ranks.size != linear.out_features:
        raise ValueError(f"{linear.out_features} features on {ranks.size} ranks")
    rows = slice(ranks.rank * n, (ranks.rank + 1) * n)
    part = nn.Linear(linear.in_features, n, bias=linear.bias is not None).to(linear.weight)
    part.load_state_dict({name: p[rows] for name, p in linear.state_dict().items()})
    return part
