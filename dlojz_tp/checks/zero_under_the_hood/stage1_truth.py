"""What one process gives, for the check of stage 1: AdamW, groups with options of their own, SGD."""

from functools import cache

import torch

from dlojz_tp.checks.zero_under_the_hood.common import ADAMW, Odd, plain

STEPS = 3
SGD = {"lr": 0.05, "momentum": 0.9}
CASES = {  # how the answer is made, and the truth
    "adamw": (lambda m: (m.named(),), ADAMW, lambda m: torch.optim.AdamW(trained(m), **ADAMW)),
    "groups": (lambda m: (m.groups(),), ADAMW, lambda m: torch.optim.AdamW(m.groups(), **ADAMW)),
    "sgd": (lambda m: (trained(m), torch.optim.SGD), SGD, lambda m: torch.optim.SGD(trained(m), **SGD)),
}


def trained(model):
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


@cache
def one_process(case, size):
    """[gradients of each step], weights after each step."""
    _, _, optimizer_of = CASES[case]
    return plain(lambda: Odd(by_rank=case == "adamw"), optimizer_of, size, STEPS)


@cache
def local(rank, size):
    """The gradients of one rank's rows alone, in the first step."""
    return plain(lambda: Odd(by_rank=True), CASES["adamw"][2], size, 1, shares={rank: 1.0})[0][0]


DEFAULTS = {  # optimizers that forget options
    "adamw": {
        "AdamW with its defaults": lambda m: torch.optim.AdamW(trained(m)),
        "AdamW with the learning rate alone": lambda m: torch.optim.AdamW(trained(m), lr=ADAMW["lr"]),
    },
    "groups": {
        "AdamW with its defaults": lambda m: torch.optim.AdamW(m.groups()),
        "AdamW with its defaults for both groups": lambda m: torch.optim.AdamW(trained(m)),
    },
    "sgd": {
        "SGD without momentum": lambda m: torch.optim.SGD(trained(m), lr=SGD["lr"]),
        "SGD with its defaults": lambda m: torch.optim.SGD(trained(m)),
    },
}


def run(case, optimizer_of, size):
    """The weights after all steps, with another optimizer."""
    return plain(lambda: Odd(by_rank=case == "adamw"), optimizer_of, size, STEPS)[1][-1]
