"""Balise 6: a compiled step, against the same steps uncompiled."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.compile.fresh import Graphs, fresh, no_inductor

HINTS = {
    "no-step": "Return the function step, not the result of a step.",
    "loss-called": "loss_of was called without a batch. Pass the function itself: torch.compile(loss_of, …).",
    "step-loss": "step must return the loss, a tensor of shape (); it returned {got}.",
    "step-replaced": "You replaced optimizer.step, and a scheduler that is created afterwards fails: it needs the "
                     "optimizer's own method ({error}). Keep what torch.compile returns under a separate name.",
    "loss-keeps-graph": "The loss still has its graph: any code that keeps the loss also keeps the activations. "
                        "Return loss.detach().",
    "loss-read": "step returns a Python number, so it would wait for the GPU in every step. Return a tensor.",
    "loss-wrong": "The loss differs from what loss_of gives before the update.",
    "backend-ignored": "torch.compile was called without the given backend, so it used Inductor.",
    "nothing-compiled": "Nothing was compiled: the backend was never called.",
    "loss-uncompiled": "The loss was not compiled: no graph contains the model.",
    "optimizer-uncompiled": "optimizer.step was not compiled: no graph updates the weights.",
    "optimizer-fullgraph": "The update fails at a graph break, although the loss has none: PyTorch's optimizers "
                           "break the graph in their own step(). Compile it without fullgraph.",
    "break-tolerated": "loss_of has a graph break, but it still ran. fullgraph=True turns the break into an error "
                       "that names the line.",
    "compiled-anew": "Every step compiles again, although nothing has changed. Compile once, outside step.",
    "lr-recompiles": "When the learning rate changed, the update was compiled anew: the rate is a Python number, "
                     "and a guard checks it. Make it a tensor, in every group.",
    "fell-back": "In the last steps fewer graphs ran than before: a part of the step has gone back to uncompiled "
                 "code. Avoid recompilations instead of limiting them.",
    "lr-no-effect": "The weights follow a constant learning rate: what the scheduler writes into optimizer.param_groups is not "
    "what the update uses.",
    "never-cleared": "The gradients add up over all steps. Clear them in each step.",
    "no-update": "The weights have not moved: call backward, then the optimizer's step.",
    "other-optimizer": "The given optimizer has not taken a step: use it, with its state.",
    "two-updates": "You made two updates in a step.",
    "weights-differ": "After {n} steps the weights differ from those of the uncompiled step.",
    "buffers-differ": "The batch norm statistics differ from those of the uncompiled step: forward must run once a "
                      "step, in training mode.",
}


def balise_6(make_compiled_step):
    """SGD with momentum and batch norm; AdamW with two groups and a scheduler made before; a loss with a break."""
    yield "losses and weights of the uncompiled step, and nothing compiled again: SGD, batch norm, dropout"
    _scene(make_compiled_step, _sgd, early=False)
    yield "the same with AdamW, two groups of parameters, and a scheduler created beforehand"
    _scene(make_compiled_step, _adamw, early=True)
    yield "a graph break in the loss is an error"
    _break(make_compiled_step)


STEPS, CONSTANT = 6, 4  # steps in all; the first of them with one learning rate


def _sgd():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-2)
    batches = [(torch.randn(10, 6), torch.randint(3, (10,))) for _ in range(STEPS)]

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y)

    return model, optimizer, batches, loss_of


def _adamw():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    batches = [(torch.randn(7, 5), torch.randn(7, 2), torch.rand(7, 1)) for _ in range(STEPS)]

    def loss_of(model, x, y, weights):
        return (weights * (model(x) - y) ** 2).mean()

    return model, optimizer, batches, loss_of


def _made(make):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, optimizer, batches, loss_of = make()
        torch.manual_seed(6)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model, optimizer, batches, loss_of


def _plain(make, scheduled=True, cleared=True, updates=1):
    """Losses and the model after all steps, without any compiler."""
    model, optimizer, batches, loss_of = _made(make)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
    losses = []
    for i, batch in enumerate(batches):
        torch.manual_seed(100 + i)
        if cleared:
            optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        for _ in range(updates):
            optimizer.step()
        losses.append(loss.detach())
        if scheduled and i >= CONSTANT - 1:
            schedule.step()
    return losses, model


def _scene(make_compiled_step, make, early):
    model, optimizer, batches, loss_of = _made(make)
    before = copy.deepcopy(model)
    losses, graphs, counts, runs = [], Graphs(), [], []

    def loss(*batch):
        if not batch:
            raise Wrong("loss-called")
        return loss_of(model, *batch)

    with fresh(), no_inductor() as inductor:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6) if early else None
        step = make_compiled_step(loss, optimizer, graphs)
        if step is None:
            raise Wrong("nothing-returned")
        if not callable(step):
            raise Wrong("no-step", got=step)
        schedule = schedule or _schedule(optimizer)
        for i, batch in enumerate(batches):
            torch.manual_seed(100 + i)
            ran = graphs.runs
            losses.append(_loss(_stepped(step, batch)))
            runs.append(graphs.runs - ran)
            counts.append(len(graphs.captured))
            if inductor:
                raise Wrong("backend-ignored")
            if i == 0 and not graphs.captured:
                raise Wrong("nothing-compiled")
            if i >= CONSTANT - 1:
                schedule.step()
        _values(make, model, before, optimizer, losses)
        _compiled(graphs, counts, runs, early)


def _schedule(optimizer):
    """A scheduler that is made after the step; it looks into the optimizer's own method `step`."""
    try:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
    except AttributeError as error:
        raise Wrong("step-replaced", error=str(error)) from error


def _stepped(step, batch):
    try:
        return step(*batch)
    except torch._dynamo.exc.Unsupported as error:  # the loss has no break
        raise Wrong("optimizer-fullgraph", got=str(error).split("\n")[0]) from error


def _loss(got):
    if got is None:
        raise Wrong("nothing-returned")
    if isinstance(got, int | float):
        raise Wrong("loss-read", expected="a tensor ()", got=got)
    if not isinstance(got, torch.Tensor) or got.shape != ():
        raise Wrong("step-loss", expected="a tensor ()", got=str(type(got).__name__))
    if got.requires_grad:
        raise Wrong("loss-keeps-graph")
    return got.clone()


def _flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _values(make, model, before, optimizer, losses):
    truth, right = _plain(make)
    if close(_flat(model), _flat(before), 1e-9):
        raise Wrong("no-update")
    if not close(losses[0], truth[0], 1e-4):
        raise Wrong("loss-wrong", expected=truth[0], got=losses[0], where="the first step")
    if not optimizer.state:
        raise Wrong("other-optimizer")
    if not close(_flat(model), _flat(right), 2e-4):
        known = {
            "never-cleared": {"cleared": False},
            "two-updates": {"updates": 2},
            "lr-no-effect": {"scheduled": False},
        }
        for slug, options in known.items():
            if close(_flat(model), _flat(_plain(make, **options)[1]), 2e-4):
                raise Wrong(slug, n=STEPS)
        raise Wrong("weights-differ", expected=_flat(right), got=_flat(model), n=STEPS)
    for (name, got), (_, expected) in zip(model.named_buffers(), right.named_buffers(), strict=True):
        if not close(got.double(), expected.double(), 2e-4):
            raise Wrong("buffers-differ", expected=expected, got=got, where=name)
    for i, (got, expected) in enumerate(zip(losses, truth, strict=True)):
        if not close(got, expected, 2e-4):
            raise Wrong("loss-wrong", expected=expected, got=got, where=f"step {i}")


def _compiled(graphs, counts, runs, clean):
    names = graphs.names()
    if not any("linear" in calls or "Linear" in str(calls) for calls in names):
        raise Wrong("loss-uncompiled")
    if clean and not any(_updates(calls) for calls in names):  # batch norm's counter is an in-place operation too
        raise Wrong("optimizer-uncompiled")
    if counts[CONSTANT - 1] > counts[CONSTANT - 3]:
        raise Wrong("compiled-anew", expected=f"{counts[CONSTANT - 3]} graphs", got=f"{counts[CONSTANT - 1]} graphs")
    if counts[-1] > counts[CONSTANT - 1]:
        raise Wrong("lr-recompiles", expected=f"{counts[CONSTANT - 1]} graphs", got=f"{counts[-1]} graphs")
    if runs[-1] < runs[0]:
        raise Wrong("fell-back", expected=f"{runs[0]} graphs run in a step", got=f"{runs[-1]}")


_IN_PLACE = ("add_", "sub_", "mul_", "div_", "lerp_", "addcdiv_", "addcmul_", "copy_")


def _updates(calls):
    return any(name in _IN_PLACE or (name.startswith("_foreach_") and name.endswith("_")) or "fused" in name
               for name in calls)  # fmt: skip


def _break(make_compiled_step):
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
            return
    raise Wrong("break-tolerated")
