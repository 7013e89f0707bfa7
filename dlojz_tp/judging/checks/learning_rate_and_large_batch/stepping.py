"""What the checks of optimizers share: a small training with everything that is awkward, and its truth in float64."""

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from dlojz_tp.judging.checking.borrowed import out_of_reach, replaced
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.measure.operations import Operations, syncs

HINTS = {
    "optimizer-borrowed": "{what} does this for you. Write it yourself here, with torch._foreach_… on lists of "
    "tensors.",
    "not-resumed": "Resumed from its state_dict, the training continues differently. Averages and counts belong in "
    "self.state, everything else in the groups.",
    "gradients-changed": "After the step, {got} gradients are not what they were. Other code still reads them: "
    "write into new tensors or buffers.",
    "weights-moved": "A weight is a different tensor after the step. Everything that shares its memory (DDP, tied "
    "weights, this notebook's trainings) loses it: change it in place.",
    "an-operator-each": "A step takes {few} operators with a few parameters, and {many} with four times as many "
    "parameters. One call of torch._foreach_… handles a whole list.",
}


@contextlib.contextmanager
def own_work():
    """Inside, optimizers that exist already are out of reach."""

    def borrowed(what):
        return Wrong("optimizer-borrowed", what=what)

    ready_made = [torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon]
    before = "timm.optim" in sys.modules
    if before:
        ready_made += [sys.modules["timm.optim"].Lamb, sys.modules["timm.optim"].Lars]

    def fused(*_, **__):
        raise borrowed("torch._fused_adamw_")

    with out_of_reach(borrowed, *ready_made, _zeropower_via_newtonschulz), replaced(torch, "_fused_adamw_", fused):
        yield
    if "timm.optim" in sys.modules and not before:
        raise borrowed("timm.optim")


@dataclass(frozen=True)
class Training:
    """groups: (shapes, options) each. rates: what a scheduler multiplies every rate by, one entry a step.

    absent: (step, number of a parameter) without a gradient; zero: numbers of parameters that begin at 0; still: (step,
    number) with a gradient of 0. sizes: of the weights, by turns.
    """

    groups: tuple
    rates: tuple = (1.0,) * 3
    absent: tuple = ()
    zero: tuple = ()
    still: tuple = ()
    sizes: tuple = (1.0, 0.3, 2.0)  # trust ratios above and below 1

    @property
    def shapes(self):
        return [shape for shapes, _ in self.groups for shape in shapes]

    def weights(self):
        drawn = torch.Generator().manual_seed(3)
        sizes = [self.sizes[k % 3] for k in range(len(self.shapes))]
        made = [torch.randn(shape, generator=drawn) * size for shape, size in zip(self.shapes, sizes)]
        return [one * (k not in self.zero) for k, one in enumerate(made)]

    def gradient(self, step, number):
        """None where it is absent."""
        if (step, number) in self.absent:
            return None
        drawn = torch.Generator().manual_seed(100 * step + number)
        scale = 0.3 + 0.4 * number + 0.5 * step  # gradients that change, by step and by parameter
        return torch.randn(self.shapes[number], generator=drawn) * scale * ((step, number) not in self.still)

    def options(self, number):
        return [options for shapes, options in self.groups for _ in shapes][number]


def follow(training: Training, make: Callable, resume: int | None = None) -> torch.Tensor:
    """All weights after each step, (steps, n). resume: after that step, go on with a new optimizer and its old state."""
    weights, after = [nn.Parameter(one) for one in training.weights()], []
    optimizer = _made(training, make, weights)
    for step, rate in enumerate(training.rates):
        if step == resume:
            weights = [nn.Parameter(one.detach().clone()) for one in weights]
            old, optimizer = optimizer, _made(training, make, weights)
            optimizer.load_state_dict(copy.deepcopy(old.state_dict()))
            for weight in (one for group in old.param_groups for one in group["params"]):
                weight.detach().fill_(float("nan"))  # for who still holds on to it
        for group, (_, options) in zip(optimizer.param_groups, training.groups):
            group["lr"] = options["lr"] * rate
        for number, weight in enumerate(weights):
            weight.grad = training.gradient(step, number)
        optimizer.step()
        after.append(torch.cat([weight.detach().flatten() for weight in weights]))
    return torch.stack(after)


def truth(training: Training, rule: Callable) -> torch.Tensor:
    """As `follow`, float64. rule(weight, steps, **options): the weights after each step of one parameter;

    steps: (gradient, rate) of those steps that it takes part in.
    """
    columns = []
    for number, weight in enumerate(training.weights()):
        options = dict(training.options(number))
        base = options.pop("lr")
        taken, steps = [], []
        for step, rate in enumerate(training.rates):
            gradient = training.gradient(step, number)
            taken.append(gradient is not None)
            if gradient is not None:
                steps.append((gradient.double(), base * rate))
        after, now = iter(rule(weight.double(), steps, **options)), weight.double()
        rows = []
        for takes_part in taken:
            now = next(after) if takes_part else now
            rows.append(now.flatten())
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1)


def kept(training: Training, make: Callable) -> dict:
    """What a step must leave alone: {"gradients": changed ones, "places": weights that moved to other memory}."""
    weights = [nn.Parameter(one) for one in training.weights()]
    optimizer, places = _made(training, make, weights), [weight.data_ptr() for weight in weights]
    changed = set()
    for step in range(2):
        for number, weight in enumerate(weights):
            weight.grad = training.gradient(step, number)
        optimizer.step()
        changed |= {
            number
            for number, weight in enumerate(weights)
            if (due := training.gradient(step, number)) is not None
            and (weight.grad is None or not torch.equal(weight.grad, due))
        }
    moved = [weight.data_ptr() for weight in weights] != places
    return {"gradients": len(changed), "moved": moved}


def no_more_for_many(seen, due) -> bool:
    """A look's `holds`, at what `operators` gives: not more for many parameters than for a few."""
    return seen[1] <= seen[0]


def few_and_many(shapes) -> Callable:
    """A look's `fields` for "an-operator-each", at what `operators` gives for these shapes."""

    def fields(seen, due):
        few, many = seen
        return {"few": few, "many": many, "expected": f"{few} operators, as for {len(shapes)} parameters", "got": many}

    return fields


def operators(make: Callable, shapes, times=(1, 4)) -> list[int]:
    """How many operators the second step takes, for so many copies of the shapes.

    Reading back is not counted: a count of steps may be a tensor on the CPU, as PyTorch's are. See `without_values`.
    """
    counts = []
    for n in times:
        weights = [nn.Parameter(torch.ones(shape)) for shape in shapes * n]
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        optimizer = make(weights)
        optimizer.step()
        with Operations() as operations:
            optimizer.step()
        counts.append(operations.total - len(syncs(operations)))
    return counts


def without_values(make: Callable, shapes) -> bool:
    """Two steps on a device that has shapes and no values: what reads one back raises. The weights are still there."""
    weights = [nn.Parameter(torch.ones(shape, device="meta")) for shape in shapes]
    optimizer = make(weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    return all(weight.is_meta for weight in weights)


def _made(training, make, weights):
    """A single group's options are the optimizer's own, as trainees write it."""
    if len(training.groups) == 1:
        return make(weights, **training.groups[0][1])
    rest, groups = iter(weights), []
    for shapes, options in training.groups:
        groups.append({"params": [next(rest) for _ in shapes], **options})
    return make(groups)
