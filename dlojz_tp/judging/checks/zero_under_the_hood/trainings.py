"""A training on every rank and the same one in one process: gradients and weights of its steps."""

from contextlib import ExitStack

import torch

from dlojz_tp.judging.checks.zero_under_the_hood.common import gradient_shards, rows
from dlojz_tp.judging.probes.networks import backward_of_share, plain_shares, state
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits
from dlojz_tp.judging.probes.withheld import Withheld

STEPS, ONCE = 3, (1, 1, 1)  # backward passes in each step


def train(case, model, optimizer, rank, size, micro=ONCE):
    """Train with so many backward passes in each step: what is sent and waited for, what comes out, what zero_grad() leaves."""
    gradients, weights, left, whole, shards = [], [], [], [], optimizer.shards
    start = [own.detach().clone() for own in shards]
    for step in range(STEPS):
        optimizer.zero_grad()
        if step:
            left += [k for k, own in enumerate(shards) if own.grad is not None]
            whole += [name for name, p in model.named_parameters() if p.grad is not None]
        with ExitStack() as modes:  # in the first step alone: under them, no graph is noticed
            if not step:
                withheld, log, waits = map(modes.enter_context, (Withheld(), Traffic(), counted_waits()))
            for part in range(sum(micro[:step]), sum(micro[: step + 1])):
                backward_of_share(model, rows(part), rank, size)
            optimizer.reduce()
            gradients.append(gradient_shards(optimizer))
            optimizer.update()
        weights.append(flat(state(model)))
        withheld.left()
    inside = {id(p) for group in optimizer.optimizer.param_groups for p in group["params"]}
    here = {
        "sent": len(log.calls), "off": len(waits) - len(log.calls), "gradients": gradients[0], "later": gradients[1],
        "weights": torch.stack(weights), "left": left, "left whole": whole,
        "foreign": len(inside - {id(own) for own in shards}),
        "moved": not all(map(torch.equal, start, optimizer.shards)),
    }  # fmt: skip
    return {f"{case} {name}": value for name, value in here.items()}


def flat(named):
    """(n,) all parameters."""
    return torch.cat([p.reshape(-1) for p in named.values()])


def truth(make, optimizer_of, size, micro=ONCE):
    """One process: the gradients of each step, in order, none zero; parameters before and after each step, (4, n)."""
    gradients, weights = plain_shares(make, optimizer_of, rows, size, micro)
    return [in_order(step.values()) for step in gradients], torch.stack([flat(one) for one in weights])


def in_order(parts):
    """The order of the parameters in the flat tensor is free, and how they are padded."""
    whole = torch.cat([torch.zeros(0), *(part.reshape(-1) for part in parts if part is not None)])
    return whole[whole != 0].sort()[0]


def gradient(ranks, key="adamw gradients"):
    """What the ranks have of it, in order."""
    return in_order(g for rank in ranks for g in rank[key])
