"""Races of 08: a training step of a chain of linear layers on two ranks, gradients averaged in buckets."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.judging.contest import Contest, device


def _step(wrap):
    """wrap(model, bytes of a bucket): (what is called, what ends the averages)."""
    width, layers, rows = (2048, 16, 2048) if device().type == "cuda" else (512, 8, 48)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
    model, finish = wrap(model.to(device()), 2 * (width * width + width) * 4)
    torch.manual_seed(1000 + dist.get_rank())
    x, optimizer = torch.randn(rows, width, device=device()), torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        finish()
        optimizer.step()

    return step


def yours(Averager):  # noqa: N803
    return _step(lambda model, capacity: (model, Averager(list(model.parameters()), capacity).finish))


def theirs():
    return _step(lambda model, capacity: (DistributedDataParallel(model, bucket_cap_mb=capacity / 2**20), lambda: None))


RACES = {number: Contest("DistributedDataParallel", yours, theirs, ranks=2) for number in (5, 7)}
