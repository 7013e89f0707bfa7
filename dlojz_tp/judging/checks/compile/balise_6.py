"""Balise 6: a compiled step, against the same steps uncompiled."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, within
from dlojz_tp.judging.checks.compile.fresh import Graphs, fresh, no_inductor

STEPS, CONSTANT = 6, 4  # steps in all; the first of them with one learning rate


def sgd():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-2)
    batches = [(torch.randn(10, 6), torch.randint(3, (10,))) for _ in range(STEPS)]
    return model, optimizer, batches, lambda model, x, y: F.cross_entropy(model(x), y)


def adamw():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    batches = [(torch.randn(7, 5), torch.randn(7, 2), torch.rand(7, 1)) for _ in range(STEPS)]
    return model, optimizer, batches, lambda model, x, y, weights: (weights * (model(x) - y) ** 2).mean()


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, optimizer, batches, loss_of = make()
        torch.manual_seed(6)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model, optimizer, batches, loss_of


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def buffers(model):
    return [buffer.double() for buffer in model.buffers()]


@functools.cache
def plain(make):
    """Losses, weights and buffers after all steps, without any compiler."""
    model, optimizer, batches, loss_of = made(make)
    schedule, losses = falling(optimizer), []
    for i, batch in enumerate(batches):
        torch.manual_seed(100 + i)
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if i >= CONSTANT - 1:
            schedule.step()
    return {"losses": losses, "first loss": losses[:1], "weights": flat(model), "buffers": buffers(model)}


def steps(make_compiled_step, make, early):
    """What all steps of a scene do, or what came back if that is no step.

    early: the scheduler is made before the step; after it, it looks into the optimizer's own method `step`.
    """
    model, optimizer, batches, loss_of = made(make)
    before, graphs, kinds, losses, counts, runs = flat(model), Graphs(), [], [], [], []

    def loss(*batch):
        if not batch:
            raise Wrong("loss-called")
        return loss_of(model, *batch)

    with fresh(), no_inductor(graphs) as inductor:
        schedule = falling(optimizer) if early else None
        step = make_compiled_step(loss, optimizer, graphs)
        if not callable(step):
            return {"step": step}
        try:
            schedule = schedule or falling(optimizer)
        except AttributeError as error:  # that mistake does no harm where the scheduler is there already
            return steps(make_compiled_step, make, True) | {"replaced": str(error)}
        for i, batch in enumerate(batches):
            torch.manual_seed(100 + i)
            ran = graphs.runs
            kind, value = stepped(step, batch)
            kinds.append(kind)
            losses.append(value)
            runs.append(graphs.runs - ran)
            counts.append(len(graphs.captured))
            if i >= CONSTANT - 1:
                schedule.step()
    names = set().union(*graphs.names())
    return {
        "step": "a function", "replaced": "", "kinds": kinds, "inductor": bool(inductor), "compiled": counts[0] > 0,
        "moved": not close(flat(model), before, 1e-9), "losses": losses, "first loss": losses[:1],
        "state": bool(optimizer.state),
        "weights": flat(model), "buffers": buffers(model), "loss graph": "linear" in names or "Linear" in str(names),
        "update graph": any(map(updates, names)), "graphs made anew": counts[CONSTANT - 1] - counts[CONSTANT - 3],
        "graphs for another rate": counts[-1] - counts[CONSTANT - 1], "graphs that run no more": runs[0] - runs[-1],
    }  # fmt: skip


def stepped(step, batch):
    """(what a step returns, in words; as a tensor (), or None)"""
    try:
        got = step(*batch)
    except torch._dynamo.exc.Unsupported as error:  # the loss has no break
        raise Wrong("optimizer-fullgraph", got=str(error).split("\n")[0]) from error
    if isinstance(got, int | float):
        return "a Python number", torch.tensor(float(got))
    if not isinstance(got, torch.Tensor) or got.shape != ():
        return None if got is None else type(got).__name__, None
    return "a tensor () with its graph" if got.requires_grad else "a tensor ()", got.detach().clone()


IN_PLACE = ("add_", "sub_", "mul_", "div_", "lerp_", "addcdiv_", "addcmul_", "copy_")


def updates(name):
    return name in IN_PLACE or (name.startswith("_foreach_") and name.endswith("_")) or "fused" in name


def break_stops(make_compiled_step):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x):
        h = model(x)
        torch._dynamo.graph_break()
        return h.square().mean()

    with fresh(), no_inductor():
        step = make_compiled_step(loss_of, optimizer, Graphs())
        try:
            step(torch.ones(4, 3))
        except torch._dynamo.exc.Unsupported:
            return True
    return False


def observe(make_compiled_step):
    for make in (sgd, adamw):
        found = steps(make_compiled_step, make, make is adamw)
        yield {f"{make.__name__}: {key}": value for key, value in found.items()}
    yield {"stops": break_stops(make_compiled_step)}


def returned(seen, due):
    """What a step returns in place of a loss."""
    known = {"a Python number": "loss-read", "a tensor () with its graph": "loss-keeps-graph"}
    return "nothing-returned" if None in seen else known.get(odd(seen, due), "step-loss")


def odd(seen, due):
    return next(kind for kind, right in zip(seen, due) if kind != right)


def looks(claim, make):
    def look(key, due, hint, holds=None, got=lambda seen, due: {}, kind=Look):
        due = (lambda _: plain(make)[key]) if due is plain else due
        return kind(claim, f"{make.__name__}: {key}", due, hint, holds=holds, fields=got)

    return [
        look("step", "a function", "no-step"),
        look("replaced", "", "step-replaced", got=lambda seen, due: {"error": seen}),
        look("kinds", ["a tensor ()"] * STEPS, returned,
             got=lambda seen, due: {"expected": due[0], "got": odd(seen, due)}),
        look("inductor", False, "backend-ignored"),
        look("compiled", True, "nothing-compiled"),
        look("moved", True, "no-update"),
        look("first loss", plain, "loss-wrong", within(1e-4)),
        look("state", True, "other-optimizer"),
        look("weights", plain, "weights-differ", within(2e-4), lambda seen, due: {"n": STEPS}, Value),
        look("buffers", plain, "buffers-differ", within(2e-4)),
        look("losses", plain, "loss-wrong", within(2e-4)),
        look("loss graph", True, "loss-uncompiled"),
        # batch norm's counter is an in-place operation too
        *[look("update graph", True, "optimizer-uncompiled")] * (make is adamw),
        look("graphs made anew", 0, "compiled-anew", at_most),
        look("graphs for another rate", 0, "lr-recompiles", at_most),
        look("graphs that run no more", 0, "fell-back", at_most),
    ]  # fmt: skip


LOOKS = [
    *looks("losses and weights of the uncompiled step, and nothing compiled again: SGD, batch norm, dropout", sgd),
    *looks("the same with AdamW, two groups of parameters, and a scheduler created beforehand", adamw),
    Look("a graph break in the loss is an error", "stops", True, "break-tolerated"),
]


def balise_6(make_compiled_step):
    yield from judged(LOOKS, observe, make_compiled_step)
