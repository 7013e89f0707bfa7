"""What one process gives, for the check of stage 1: AdamW, groups with options of their own, SGD."""

from functools import cache

import torch

from dlojz_tp.checking import close
from dlojz_tp.checks.zero_under_the_hood.common import ADAMW, NAMES, plain, share_backward
from dlojz_tp.probes.networks import Odd, same, state

STEPS = 3
WORDS = {"adamw": "AdamW", "groups": "AdamW with two groups", "sgd": "SGD with momentum"}
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


def second_step(got, size, case):
    """Why the second step is wrong although the first was right."""
    _, _, optimizer_of = CASES[case]
    model = Odd(by_rank=case == "adamw")
    for step in range(2):  # a new optimizer in each step
        optimizer = optimizer_of(model)
        optimizer.zero_grad()
        for rank in range(size):
            share_backward(model, step, rank, size, 1 / size)
        for p in trained(model):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    if same(got["second"], state(model)):
        return "states-forgotten"
    return "gradients-pile-up" if not same(got["second"], one_process(case, size)[1][2]) else "weights-differ"


def only_shards(optimizer) -> bool:
    """Whether the optimizer inside knows the shards, and no parameter besides."""
    shards = {id(own) for own in optimizer.shards}
    return all(id(p) in shards for group in optimizer.optimizer.param_groups for p in group["params"])


def reduced_instead(ranks, start, truth, size) -> str:
    """ "the sum", "the mean", where the parameters of all ranks were added up in the place of a gather; else ""."""
    moved = [name for name in truth if not same(truth[name], start[name])]
    for word, factor in (("the mean", 1.0), ("the sum", float(size))):
        due = {name: (start[name] * (size - 1) + truth[name]) / size * factor for name in moved}
        if moved and all(same(got[name], due[name]) for got in ranks for name in moved):
            return word
    return ""


def moved_up(ranks, size):
    """Whether the first step's gradients, side by side, are the mean ones without those of the unused parameter."""
    truth = one_process("adamw", size)[0][0]
    due = torch.cat([truth[name].reshape(-1) for name in dict.fromkeys(NAMES) if name not in ("frozen", "unused")])
    got = torch.cat([g.reshape(-1) for rank in ranks for g in rank["adamw"]["gradients"]])
    return close(got[: len(due)], due, 1e-9) and not got[len(due) :].any()
