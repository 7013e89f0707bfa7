"""The small training in bfloat16 that balises 6 and 8 are judged with."""

import functools

import torch
from torch import nn

CAPACITY = 400  # bytes of a bucket: 200 elements of two bytes
SHAPES = ((70,), (13, 15), (), (111,), (6, 2, 9))
TRAININGS = {
    "AdamW, two groups": (torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 0.1}, 6),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}, 3),
}


def trainings(size: int) -> list[str]:
    """What is trained on so many ranks: each more costs the trainee time."""
    return list(TRAININGS) if size == 3 else list(TRAININGS)[:1]


def initial(dtype=torch.bfloat16) -> list[torch.Tensor]:
    """The first values, between 1 and 2 or -2 and -1: a bfloat16 has steps of 1/128 there."""
    generator = torch.Generator().manual_seed(11)
    values = [1 + torch.rand(shape, generator=generator) for shape in SHAPES]
    signs = [torch.randint(2, shape, generator=generator) * 2 - 1 for shape in SHAPES]
    return [(value * sign).to(torch.bfloat16).to(dtype) for value, sign in zip(values, signs, strict=True)]


def gradients(step: int, rank: int, size: int) -> list[torch.Tensor]:
    """What backward gives on a rank, in float64; their sums and their means have no rounding error in bfloat16."""
    same, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for shape in SHAPES:
        base = torch.randint(3, 8, shape, generator=same) * (torch.randint(2, shape, generator=same) * 2 - 1)
        found.append(size * (base + torch.randint(-2, 3, shape, generator=own)).double() / 8)
    return found


def groups_of(parameters, name) -> list:
    """The parameters as the training `name` hands them to an optimizer: a list, or groups with a tied one."""
    if "groups" not in name:
        return list(parameters)
    first, second = parameters[:2], [*parameters[2:], parameters[3]]
    return [{"params": list(first)}, {"params": second, "lr": 8e-4, "weight_decay": 0.0}]


@functools.cache
def truth(name: str, size: int) -> list[list[torch.Tensor]]:
    """One process, float64: the parameters before training and after each step."""
    kind, options, steps = TRAININGS[name]
    parameters = [nn.Parameter(value) for value in initial(torch.float64)]
    groups = groups_of(parameters, name)
    if isinstance(groups[0], dict):
        groups[1]["params"].pop()  # the plain optimizer refuses what is named twice
    optimizer, found = kind(groups, **options), [[p.detach().clone() for p in parameters]]
    for step in range(steps):
        means = [
            torch.stack(list(of)).mean(0) for of in zip(*(gradients(step, r, size) for r in range(size)), strict=True)
        ]
        for p, mean in zip(parameters, means, strict=True):
            p.grad = mean
        optimizer.step()
        found.append([p.detach().clone() for p in parameters])
    return found


def own_part(values: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """This rank's shard of these tensors laid end to end, with zeros behind."""
    flat = torch.cat([value.reshape(-1) for value in values])
    each = -(-flat.numel() // size)
    return torch.cat([flat, flat.new_zeros(each * size - flat.numel())])[rank * each : (rank + 1) * each]


def places(optimizer, parameters) -> list[list[int]]:
    """Which parameters each part of an optimizer holds, by their numbers."""
    number = {id(p): k for k, p in enumerate(parameters)}
    return [[number[id(p)] for p in part.parameters] for part in optimizer.parts]
