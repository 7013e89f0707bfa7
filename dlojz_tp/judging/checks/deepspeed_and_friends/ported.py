"""What a loop that was ported to a framework does on two ranks, beside one process that takes both shares as one batch."""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterable
from numbers import Real
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from dlojz_tp import frameworks
from dlojz_tp.judging.checking.looks import Look, Value, judged, one_of, silent, within
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.judging.probes.ranks import world_after_world
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.launch.place import INSIDE
from dlojz_tp.models import Llama, LlamaConfig, language_loss

if INSIDE in os.environ:  # once, in the process that ranks are forked from
    for library in filter(frameworks.here, ("accelerate", "lightning_fabric")):
        importlib.import_module(library)

RANKS = 2
CONFIG = LlamaConfig(64, width=32, heads=2, layers=1, max_length=16)
RATE = 0.5
GRADIENTS = ("all_reduce", "reduce_scatter", "reduce", "all_gather")


class Case(NamedTuple):
    """One epoch. batch: sequences of a micro-batch on a rank. accumulation: micro-batches of a step."""

    samples: int
    batch: int
    accumulation: int
    max_norm: float


# accumulation does not divide the micro-batches; first without clipping, which would hide a gradient of another scale;
# then to a norm below the largest number of the gradient, so that cutting each number is something else
CASES = {"four micro-batches, 3 of them a step": Case(24, 3, 3, 1e6), "five, 2 a step, clipped": Case(20, 2, 2, 0.02)}


def parts(case):
    """The model, its optimizer, and sequences whose first token is their number."""
    torch.manual_seed(0)
    model = Llama(CONFIG)
    tokens = torch.randint(64, (case.samples, 9), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.arange(case.samples)
    return model, torch.optim.SGD(model.parameters(), lr=RATE), tokens


@functools.cache
def truth(name):
    """The same epoch on one process: each sequence's loss, norms before clipping, how far the weights moved, and when."""
    case = CASES[name]
    model, optimizer, tokens = parts(case)
    before = _flat(model)
    norms, batches, each = [], list(tokens.split(RANKS * case.batch)), {}
    for i, batch in enumerate(batches, 1):
        with torch.no_grad():
            each |= {int(one[0]): language_loss(model, one[None]).item() for one in batch}
        (language_loss(model, batch) / case.accumulation).backward()
        if i % case.accumulation == 0 or i == len(batches):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    steps = [int(i % case.accumulation == 0 or i == len(batches)) for i in range(1, len(batches) + 1)]
    moved = _flat(model) - before
    return {"each": each, "norms": norms, "moved": moved, "furthest": moved.abs().max(), "steps": steps,
            "batches": [batch[:, 0].tolist() for batch in batches]}  # fmt: skip


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def on_rank(train, library, kind, size_of):
    """On a rank, case after case: what the answer did; then what it would run on where GPUs are.

    kind: the framework's class; size_of: where it keeps the ranks' number.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "check"  # as torchrun sets it
    made = getattr(importlib.import_module(library), kind)
    for case in CASES.values():
        yield _epoch(train, case, made, size_of)
        if library == "accelerate":  # it keeps one state for the whole process
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(True)
            GradientState._reset_state()
    yield {"device": _device(train, made)}


class Enough(Exception):
    """What the check wanted to see is there."""


def _device(train, made):
    """The kind of device that the framework's object takes with cpu=False, where each rank has a GPU (pretended); "" if none is made."""
    begin, found = made.__init__, [""]

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        found.insert(0, self.device.type)
        raise Enough

    model, optimizer, tokens = parts(case := next(iter(CASES.values())))
    loader = DataLoader(tokens, batch_size=case.batch)
    with contextlib.suppress(Exception), pretend_gpu(count=RANKS), mock.patch.object(made, "__init__", noted):
        list(train(model, optimizer, loader, case.accumulation, case.max_norm, cpu=False))
    return found[0]


def _epoch(train, case, made, size_of):
    model, optimizer, tokens = parts(case)
    before, size = _flat(model), sum(p.numel() * p.element_size() for p in model.parameters())
    saw, norms, instances = [], [], []
    begin = made.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        instances.append(self)

    with Traffic() as traffic, mock.patch.object(made, "__init__", noted):

        def forward(_, inputs):
            saw.append(inputs[0][:, 0].tolist())
            traffic.mark("micro-batch")

        def step(*_):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            traffic.mark("step")

        model.register_forward_pre_hook(forward)
        next(model.parameters()).register_hook(lambda _: traffic.mark("backward"))
        optimizer.register_step_pre_hook(step)
        given = train(
            model, optimizer, DataLoader(tokens, batch_size=case.batch), case.accumulation, case.max_norm, cpu=True
        )
        losses = list(given) if isinstance(given, Iterable) else None
    reduced, steps, backwards = [], [], []
    for event in traffic.events:
        if event.name == "micro-batch":
            reduced.append(0)
            steps.append(0)
            backwards.append(0)
        elif event.name == "backward" and backwards:
            backwards[-1] += 1
        elif event.name == "step" and steps:
            steps[-1] += 1
        elif event.name in GRADIENTS and reduced:
            reduced[-1] += event.bytes / size
    single = losses is not None and all(
        isinstance(one, torch.Tensor | Real) and torch.as_tensor(one).dim() == 0 for one in losses
    )
    return {
        "form": f"{len(losses)} numbers" if single else None if given is None else _described(losses or given),
        "processes": [getattr(one, size_of) for one in instances][-1:],
        "saw": saw, "backwards": backwards, "steps": steps, "reduced": [round(each, 1) for each in reduced], "norms": norms,
        "losses": [float(loss) for loss in losses] if single else [], "moved": _flat(model) - before,
    }  # fmt: skip


def _described(value):
    return f"{len(value)} of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


def _known_processes(seen, due):
    return {"n": seen[0][0] if seen[0] else "nothing of any"}


def _shares(ranks):
    """Sequences of each micro-batch, of both ranks together."""
    return [sorted(first + second) for first, second in zip(*(rank["saw"] for rank in ranks))]


def _in_both(seen, due):
    """Each rank shows what is due."""
    return all(one == due for one in seen)


def _of_one(seen, due):
    """Fields: the first rank that shows something else."""
    rank = next(rank for rank, one in enumerate(seen) if one != due)
    return {"expected": due, "got": f"rank {rank}: {seen[rank]}"}


def _reductions(seen, due):
    first = seen[0]
    if not any(first):
        return "never-reduced"
    whole = len(first) == len(due)
    return "always-reduced" if whole and min(first) >= 1 else _boundaries(seen, due)


def _boundaries(seen, due):
    return "rest-lost" if seen[0] == [*due[:-1], 0] else "other-boundaries"


def _own_losses(name, rank):
    """The losses that are due on a rank: at each step the mean over the sequences of its micro-batches."""
    due, losses = truth(name), [[]]
    for numbers, stepped in zip(rank["saw"], due["steps"]):
        losses[-1] += [due["each"].get(number, torch.nan) for number in numbers]
        losses += [[]] * stepped
    return [sum(one) / len(one) for one in losses[:-1] if one]


def _due_norms(at):
    return [[min(norm, CASES[at].max_norm) for norm in truth(at)["norms"]]] * RANKS


LOOKS = [
    Look("the framework knows of two processes", "processes", [RANKS], "alone", holds=_in_both, fields=_known_processes),
    Look("together the ranks see each batch once", _shares, lambda at: truth(at)["batches"], "other-shares"),
    Look("each micro-batch has its own backward", "backwards", lambda at: [1] * len(truth(at)["steps"]), "backward-elsewhere", holds=_in_both, fields=_of_one),
    Look("gradients are reduced at a step, and only there", "reduced", lambda at: [float(one) for one in truth(at)["steps"]], _reductions, holds=_in_both, fields=_of_one),
    Look("there the optimizer steps, and also after the last micro-batch", "steps", lambda at: truth(at)["steps"], _boundaries, holds=_in_both, fields=_of_one),
    Look("a loss for each step", "form", lambda at: f"{sum(truth(at)['steps'])} numbers", "losses-form", holds=_in_both),
    Value("the gradient's norm at each step is that of one process, clipped", "norms", _due_norms, "other-gradient", holds=within(1e-3)),
    Value("the weights move as on one process", "moved", lambda at: [truth(at)["moved"] / truth(at)["furthest"]] * RANKS, "other-weights", holds=within(1e-3)),
    Value("the losses, as parts of the means over this rank's micro-batches", "parts", lambda at: [[1.0] * sum(truth(at)["steps"])] * RANKS, "other-losses", holds=within(1e-4)),
]  # fmt: skip


DEVICES = [
    # "" as well: a pretended GPU is not a GPU, and what fails on it for another reason is not the answer's fault
    Look("with cpu=False it takes the GPUs that are there (pretended ones)", "device", ["cuda", ""], "never-on-gpu", holds=one_of, fields=silent)
]  # fmt: skip


def as_one_process(train, library, kind, size_of, known=()):
    """The claims of a check. known: words of an exception on a rank, and the hint that it gets."""
    frameworks.need(library)
    worlds = world_after_world(on_rank, train, library, kind, size_of, known=known, sizes=(RANKS,), timeout=25)
    with contextlib.closing(worlds):  # the next launch must find these ranks gone
        for name, (_, ranks) in zip(CASES, worlds):
            for rank in ranks:
                rank["moved"] /= truth(name)["furthest"]
                rank["parts"] = [one / own for one, own in zip(rank["losses"], _own_losses(name, rank))]
            yield from judged(LOOKS, lambda _, ranks=ranks: ranks, train, at=name, where=f"2 ranks, {name}")
        yield from judged(DEVICES, lambda: next(worlds)[1])
