"""Streams of micro-batches through asynchronous stages: small ones, in float64, in one process."""

import torch
from torch import nn

from dlojz_tp import planner

WIDTHS = (4, 6, 5, 7, 3, 6, 4, 5, 3)  # of the activations between eight layers
RATE, N = 0.3, 9  # learning rate, micro-batches


def layers_of() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, bias) of eight layers in float64; each is followed by tanh."""
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(b, a, generator=generator).double() / a**0.5, torch.randn(b, generator=generator).double() / 3)
        for a, b in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def batches(n: int):
    """n micro-batches of three rows, and targets."""
    generator = torch.Generator().manual_seed(8)
    shape = (n, 3, WIDTHS[0]), (n, 3, WIDTHS[-1])
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shape]


def bounds(p: int) -> list[tuple[int, int]]:
    cuts = [round(s * 8 / p) for s in range(p + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def in_turn(p: int, n: int):
    """All actions of a 1F1B stream in an order in which each finds what it needs: (kind, k, stage)."""
    orders, done = planner.one_f_one_b(p, n), set()
    at = [0] * p
    while any(a < len(order) for a, order in zip(at, orders, strict=True)):
        for stage in range(p):
            while at[stage] < len(orders[stage]):
                kind, k = orders[stage][at[stage]]
                needs = ("F", k, stage - 1) if kind == "F" else ("B", k, stage + 1)
                if 0 <= needs[2] < p and needs not in done:
                    break
                done.add((kind, k, stage))
                at[stage] += 1
                yield kind, k, stage


def stages_of(p: int, frozen: bool = False) -> list[nn.Sequential]:
    stages = []
    for low, high in bounds(p):
        parts = []
        for w, b in layers_of()[low:high]:
            linear = nn.Linear(w.shape[1], w.shape[0]).double()
            with torch.no_grad():
                linear.weight.copy_(w)
                linear.bias.copy_(b)
            parts += [linear, nn.Tanh()]
        parts[0].weight.requires_grad_(not frozen)
        stages.append(nn.Sequential(*parts))
    return stages


def asynchronous(AsyncStage, modules, rate, momentum=0.0):  # noqa: N803
    return [
        AsyncStage(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=rate, momentum=momentum))
        for m in modules
    ]


def drive(stages, x, targets, tell=lambda *_: None, begins=lambda *_: None):
    """Stream the micro-batches through the answer's stages.

    begins(k, stage) is called before each action, tell(kind, k, stage, what it gave, x of a forward) after it.
    """
    p, outputs, gradients = len(stages), {}, {}
    for kind, k, stage in in_turn(p, len(x)):
        begins(k, stage)
        if kind == "F":
            given = x[k].clone() if stage == 0 else outputs.pop((k, stage - 1))
            y = stages[stage].forward(k, given)
            tell(kind, k, stage, y, given)
            outputs[k, stage] = y.detach().clone()
        else:
            if stage == p - 1:
                y = outputs.pop((k, stage))
                gradient = 2 * (y - targets[k]) / y.numel()
            else:
                gradient = gradients.pop((k, stage + 1))
            g = stages[stage].backward(k, gradient)
            tell(kind, k, stage, g)
            gradients[k, stage] = None if g is None else g.detach().clone()
