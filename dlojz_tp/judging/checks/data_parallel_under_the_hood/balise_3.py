"""Balise 3: gradients averaged one by one."""

from functools import cache, partial

import torch
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.data_parallel_under_the_hood.average import KNOWN, as_buckets, averaged, means, thrift
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import on_each, on_ranks, share
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.networks import gradients, rows
from dlojz_tp.judging.probes.seeded import seeded

HIGH = rows(0)[:, 0].sort().values[-2:].mean().item()  # one row of the first step has more in its first column


class Mixed(nn.Module):
    """Parameters in several layouts and dtypes, one frozen, one never used. The loss is the mean over the rows of x."""

    def __init__(self):
        super().__init__()
        with seeded(3):
            self.first = nn.Linear(8, 6, dtype=torch.float64)
            self.scale = nn.Parameter(torch.randn(6))
            self.turned = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
            self.shift = nn.Parameter(torch.randn((), dtype=torch.float64))
            self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
            self.rare = nn.Parameter(torch.randn((), dtype=torch.float64))  # its gradient is zero on all ranks but one
            self.unused = nn.Parameter(torch.randn(5, dtype=torch.float64))
            self.coarse = nn.Parameter(torch.randn(8, 6))
            self.short = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))  # as float32 it sends 128 bytes more

    def forward(self, x):
        narrow = torch.tanh(x @ self.short.double() / 4).sum(dim=1)
        rare = self.rare * (x[:, 0] - HIGH).relu()
        x = torch.tanh(self.first(x) + x @ self.coarse.double()) * self.scale
        return ((x @ self.turned + self.shift * self.frozen).square().sum(dim=1) + rare + narrow).mean()


@cache
def truth_of(step, rank=0, size=1):
    """Gradients of one process: of the whole batch, or of what `rank` of `size` sees. None where there is none."""
    model = Mixed()
    model(rows(step)[rank::size]).backward()
    return gradients(model.parameters())


def observe_rank(average_gradients):
    model, found = Mixed().to(launch.device()), {}
    for step, name in enumerate(("first", "second")):
        model.zero_grad()
        model(share(step)).backward()
        parameters = list(model.parameters())
        found[name] = averaged(average_gradients, parameters, parameters)
    return found


def filled(ranks, rank):
    for k, (got, due) in enumerate(zip(ranks[rank]["second"]["now"], truth_of(1), strict=True)):
        if due is None and got is not None:
            return "none-filled", {"got": got, "where": f"rank {rank} of {len(ranks)}, parameter {k}"}
    return None


HELD = sum(t.nbytes for t in truth_of(0) if t is not None)
LOOKS = [
    *means("on 2, 3 and 4 ranks, and on one rank: the gradient of the whole batch, in float64", "first",
           lambda size: truth_of(0), partial(truth_of, 0)),
    *means("parameters without a gradient, other layouts and dtypes; a second step", "second",
           lambda size: truth_of(1), partial(truth_of, 1)),
    on_each("", filled),
    *thrift("each gradient is sent once, and the parameters don't change", HELD, slack=96),  # each may be padded
]  # fmt: skip


def balise_3(average_gradients):
    """The gradient of a batch of 12 rows, shared by 1 to 4 ranks, against one process with the whole batch."""
    yield from judged(LOOKS, partial(on_ranks, observe_rank, known=KNOWN), average_gradients)
    yield "the same where each rank has a GPU"
    on_gpus(lambda _, answer: answer(sum(as_buckets(), [])), average_gradients, known=left_on_cpu("made-on-cpu"))
