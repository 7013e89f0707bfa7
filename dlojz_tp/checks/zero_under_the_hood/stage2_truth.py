"""What one process gives, for the check of stage 2: the odd model with a bucket that is never used."""

from functools import cache

import torch
from torch import nn

from dlojz_tp.checks.zero_under_the_hood.common import ADAMW, plain
from dlojz_tp.probes.networks import Odd

STEPS = 2
SMALL = 400  # bytes of a bucket: about a parameter


class Idle(Odd):
    """With one parameter more, never used, that fills a bucket."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.linspace(-1, 1, SMALL // 8, dtype=torch.float64))

    def named(self):
        *others, last = super().named()
        return [*others, self.idle, last]

    def groups(self):
        first, rest = super().groups()
        return [first, {**rest, "params": [self.idle, *rest["params"]]}]


CASES = {  # how the answer is made; how the truth is
    "one": (lambda m: m.named(), lambda m: torch.optim.AdamW(_trained(m), **ADAMW), 1),
    "two": (lambda m: m.groups(), lambda m: torch.optim.AdamW(m.groups(), **ADAMW), 2),
}


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@cache
def one_process(case, size):
    """([gradients of each step], weights after each step)"""
    _, optimizer_of, micro = CASES[case]
    return plain(Idle, optimizer_of, size, STEPS, micro=micro)
