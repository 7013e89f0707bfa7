"""Run PyTorch's schedules on ranks with layers that note what happens, and compare with one process."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes import ranks
from dlojz_tp.probes.ranks import hung, killed_by

HINTS = {
    "ranks-wait": "The ranks waited for each other forever. Every rank must call the same collectives, in the same "
                  "order, and use the same schedule.",
    "collective-broke": "A collective failed ({error}). Its tensor must have the same shape and dtype on all ranks.",
}

WIDTHS = (5, 6, 4, 7, 5, 6, 4, 3)  # of what goes into the layers, and out of the last
BATCH = 24
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


def make_layers(n: int = len(WIDTHS) - 1) -> list[Layer]:
    """All layers of the network."""
    return [Layer(number) for number in range(n)]


def loss_mean(output, target):
    """Half squares less a constant, mean over samples: no loss of the library, and a negative one."""
    return (0.5 * ((output - target) ** 2).sum(dim=1) - 40).mean()


def loss_sum(output, target):
    """The same, summed."""
    return (0.5 * ((output - target) ** 2).sum(dim=1) - 40).sum()


LOSSES = {"mean": loss_mean, "sum": loss_sum}


def batch(step: int, rows: int = BATCH, out: int = WIDTHS[-1]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(7 + step)
    x = torch.randn(rows, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, out, generator=generator, dtype=torch.float64)


def truth(step: int, reduction: str, rows: int = BATCH) -> tuple[float, dict[int, list[torch.Tensor]]]:
    """Loss and gradients {layer: [weight, bias]} of one process on the whole batch."""
    layers, (x, y) = make_layers(), batch(step, rows)
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


def observe(make, step, n_micro_batches: int, look=None, plan=(("mean", 2), ("sum", 1)), rows: int = BATCH):
    """On a rank: for each reduction, what the rank holds and what its last step did.

    make(layers, n_micro_batches, loss_fn, reduction) -> (stages, schedule); step as `own_step`. look: sees what all ranks
    hold, [[(stage, its layers), …] of each rank], before anything runs that could not run; may raise `Wrong`.
    """
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for reduction, steps in plan:
        layers = make_layers()
        stages, schedule = make(layers, n_micro_batches, LOSSES[reduction], reduction)
        mine = [(stage.stage_index, held(stage)) for stage in stages]
        if look is not None:
            everyones = [None] * size
            dist.all_gather_object(everyones, mine)
            look(everyones)
        seen = []
        for number in range(steps):
            x, y = batch(number, rows)
            if rank > 0:
                x = torch.full_like(x, torch.nan)
            if rank < size - 1:
                y = torch.full_like(y, torch.nan)
            EVENTS.clear()
            loss = step(stages, schedule, x, y, reduction)
            seen.append((loss, gradients(stages), list(EVENTS)))
        found.append((reduction, mine, stages[0].num_stages, seen))
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


# sizes are given in an order in which no two go side by side, so that it is certain which mistake is found first
on_ranks = functools.partial(
    ranks.on_ranks, usual=((hung, "ranks-wait"), (killed_by("SIGABRT"), "collective-broke")), timeout=8
)


def kept(events: list[tuple[str, int, int]], layers: list[int]) -> int:
    """Peak number of micro-batches kept, counted at the given layers: the first of each stage."""
    now = peak = 0
    for kind, number, _ in events:
        if number in layers:
            now += 1 if kind == "F" else -1
            peak = max(peak, now)
    return peak


def right_gradients(
    found: dict[int, list], step: int, reduction: str, mistakes: dict, default: str, where: str, rows=BATCH
):
    """Compare a rank's gradients with one process; mistakes: {slug: function(gradient, gradient before) -> value}."""
    _, wanted = truth(step, reduction, rows)
    _, before = truth(step - 1, reduction, rows) if step else (None, wanted)
    if not found:
        return
    if any(gradient is None for pair in found.values() for gradient in pair):
        raise Wrong(default, expected="a gradient for each parameter", got="parameters without a gradient", where=where)
    got = torch.cat([g.flatten() for number in sorted(found) for g in found[number]])

    def line(grads):
        return torch.cat([g.flatten() for number in sorted(found) for g in grads[number]])

    if close(got, line(wanted)):
        return
    for slug, value in mistakes.items():
        if close(got, value(line(wanted), line(before))):
            raise Wrong(slug, expected=line(wanted)[:6], got=got[:6], where=where)
    raise Wrong(default, expected=line(wanted)[:6], got=got[:6], where=where)
