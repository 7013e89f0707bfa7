"""Run PyTorch's schedules on ranks with layers that note what happens, and compare with one process."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.probes import shared_looks
from dlojz_tp.judging.probes.ranks import hung, killed_by

HINTS = {
    "ranks-wait": "The ranks waited for each other forever. Every rank must call the same collectives, in the same "
    "order, and use the same schedule.",
    "collective-broke": "A collective failed ({error}). Its tensor must have the same shape and dtype on all ranks.",
}

WIDTHS = (5, 6, 4, 7, 5, 6, 4, 3)  # of what goes into the layers, and out of the last
LAYERS = len(WIDTHS) - 1
BATCH = 24
STEPS = "mean 1", "mean 2", "sum 1"  # the loss, and the number of the step; a new schedule for each loss
EVENTS: list[tuple[str, int, int]] = []  # on a rank: ("F" or "B", number of the layer, rows)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, number):
        ctx.number = number
        EVENTS.append(("F", number, len(y)))
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        EVENTS.append(("B", ctx.number, len(gradient)))
        return gradient, None


class Layer(nn.Module):
    """A linear layer in float64 with tanh; knows its number and notes its forwards and backwards."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + number)
        shape = WIDTHS[number + 1], WIDTHS[number]
        self.number = number
        self.weight = nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 2)
        self.bias = nn.Parameter(torch.randn(shape[0], generator=generator, dtype=torch.float64) / 2)

    def forward(self, x):
        return _Noted.apply(torch.tanh(x @ self.weight.t() + self.bias), self.number)


def make_layers() -> list[Layer]:
    """All layers of the network."""
    return [Layer(number) for number in range(LAYERS)]


def loss_mean(output, target):
    """Half squares less a constant, mean over samples: no loss of the library, and a negative one."""
    return (0.5 * ((output - target) ** 2).sum(dim=1) - 40).mean()


def loss_sum(output, target):
    """The same, summed."""
    return (0.5 * ((output - target) ** 2).sum(dim=1) - 40).sum()


LOSSES = {"mean": loss_mean, "sum": loss_sum}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, from 1."""
    generator = torch.Generator().manual_seed(6 + step)
    x = torch.randn(BATCH, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.randn(BATCH, WIDTHS[-1], generator=generator, dtype=torch.float64)


@functools.cache
def truth(name: str) -> tuple[float, dict[int, list[torch.Tensor]]]:
    """Of a step of STEPS: loss and gradients {layer: [weight, bias]} of one process on the whole batch."""
    layers, (reduction, step) = make_layers(), name.split()
    x, y = batch(int(step))
    loss = LOSSES[reduction](nn.Sequential(*layers)(x), y)
    loss.backward()
    return loss.item(), {layer.number: [layer.weight.grad, layer.bias.grad] for layer in layers}


def own_step(stages, schedule, x, y, reduction):
    """A step as balise 1 wants it, for the checks of the others."""
    for stage in stages:
        stage.submod.zero_grad()
    losses = []
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    schedule.step(*((x,) if first else ()), target=y if last else None, losses=losses)
    if not last:
        return torch.zeros((), dtype=x.dtype)
    losses = torch.stack([loss.detach() for loss in losses])
    return losses.mean() if reduction == "mean" else losses.sum()


def observe(make, step, n_micro_batches: int, misfit=lambda held: None, trap=torch.nan) -> dict:
    """On a rank: what it holds, and what the schedule did in each of STEPS.

    make(layers, n_micro_batches, loss_fn, reduction) -> (fault, stages, schedule); misfit([[(stage, its layers), …] of
    each rank]) -> fault: None, or the hint for what cannot run, and its fields; then nothing does. step as `own_step`.
    trap: all numbers of an x or y that a rank must not use.
    """
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for name in STEPS:
        reduction, number = name.split()
        if number == "1":
            fault, stages, schedule = make(make_layers(), n_micro_batches, LOSSES[reduction], reduction)
            mine = [] if fault else [(stage.stage_index, held(stage)) for stage in stages]
            everyones = [None] * size
            dist.all_gather_object(everyones, (fault, mine))
            fault = next((one for one, _ in everyones if one), None) or misfit([stages for _, stages in everyones])
            found |= {"fault": fault, "held": mine}
            if fault:
                return found
        x, y = batch(int(number))
        if rank > 0:
            x = torch.full_like(x, trap)
        if rank < size - 1:
            y = torch.full_like(y, trap)
        EVENTS.clear()
        found[f"{name}: loss"] = step(stages, schedule, x, y, reduction)
        firsts = [layers[0] for _, layers in mine if layers]
        actions = [(kind, rows) for kind, layer, rows in EVENTS if layer in firsts[:1]]
        found |= {f"{name}: gradients": gradients(stages), f"{name}: kept": kept(firsts),
                  f"{name}: order": "".join(kind for kind, _ in actions),
                  f"{name}: rows": [rows for kind, rows in actions if kind == "F"]}  # fmt: skip
    return found


def held(stage) -> list[int]:
    """Numbers of the layers in a stage, in order."""
    return [layer.number for layer in stage.submod.modules() if isinstance(layer, Layer)]


def gradients(stages) -> dict[int, list]:
    """{number of a layer: [gradients of weight and bias]} of a rank, copied."""
    layers = [layer for stage in stages for layer in stage.submod.modules() if isinstance(layer, Layer)]
    return {
        layer.number: [None if p.grad is None else p.grad.detach().clone() for p in (layer.weight, layer.bias)]
        for layer in layers
    }


def kept(layers: list[int]) -> int:
    """Peak number of micro-batches kept, counted at the given layers: the first of each stage."""
    now = peak = 0
    for kind, number, _ in EVENTS:
        if number in layers:
            now += 1 if kind == "F" else -1
            peak = max(peak, now)
    return peak


# sizes are given in an order in which no two go side by side, so that it is certain which mistake is found first
judged_on_ranks = functools.partial(
    shared_looks.judged_on_ranks, usual=((hung, "ranks-wait"), (killed_by("SIGABRT"), "collective-broke")), timeout=8,
    alone=False,
)  # fmt: skip


def even_look(see, hint: str) -> Look:
    """A look at sizes that differ by at most one."""

    def fields(sizes, _):
        return {"most": max(sizes), "least": min(sizes), "expected": ""}

    return Look("", see, 1, hint, holds=lambda sizes, most: max(sizes) - min(sizes) <= most, fields=fields)


def gradient_look(claim: str, name: str, wrong: str, *mistakes: tuple[str, Callable]) -> Look:
    """A look at the gradients of a step on all ranks: for the layers that a rank holds, those of one process.

    It sees of each rank its mistake, "" for none, and what `observe` returned. mistakes: (slug, function(gradient,
    gradient of the loss's first step) -> what this mistake gives), the gravest first; wrong: where a rank makes none.
    """
    wanted, first = (truth(of)[1] for of in (name, f"{name.split()[0]} 1"))

    def named(got):
        for slug, gives in (("", lambda gradient, _: gradient), *mistakes):
            if all(close(pair, list(map(gives, wanted[layer], first[layer]))) for layer, pair in got.items()):
                return slug
        return wrong

    def see(ranks):
        return [(named(rank[f"{name}: gradients"]), rank) for rank in ranks]

    def fields(seen, _):
        rank = next(rank for rank, (slug, _) in enumerate(seen) if slug)
        pairs = [(n, *pair) for n, got in seen[rank][1][f"{name}: gradients"].items() for pair in zip(got, wanted[n])]
        layer, got, due = next(one for one in pairs if not close(*one[1:]))
        where = f"rank {rank} of {len(seen)}, loss a {name.replace(' ', ', step ')}, layer {layer}"
        return {"expected": due, "got": "no gradient" if got is None else got, "where": where}

    def gravest(seen, _):
        return min((slug for slug, _ in seen if slug), key=[wrong, *dict(mistakes)].index)

    return Look(claim, see, "", gravest, holds=lambda seen, _: not any(slug for slug, _ in seen), fields=fields)
