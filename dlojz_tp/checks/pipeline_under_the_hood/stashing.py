"""Balise 9: an asynchronous stage, whose backward uses the weights of its forward."""

import gc

import torch
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.history import versions
from dlojz_tp.checks.pipeline_under_the_hood.recomputing import one_thread
from dlojz_tp.checks.pipeline_under_the_hood.streams import (
    RATE,
    N,
    asynchronous,
    batches,
    bounds,
    drive,
    in_turn,
    layers_of,
    stages_of,
)
from dlojz_tp.measure.live import LiveBytes
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "changed-in-place": "The graph of an earlier forward holds the weights themselves, and the optimizer has "
                        "changed them since: {error} Let each forward run on copies that nothing changes.",
    "newest-weights": "The gradient of micro-batch {k} comes from a forward and backward with the newest weights. "
                      "Its output was computed, and sent on, with older ones: backward must belong to that output.",
    "last-stash": "The backward of micro-batch {k} used the weights that the last forward stashed. Several "
                  "micro-batches are in flight, each with the weights of its own forward: stash them under its "
                  "number.",
    "stashed-references": "The backward of micro-batch {k} multiplied by weights that are newer than those of its "
                          "forward. You stash the parameters themselves, or views of them, and the optimizer "
                          "changes these in place: clone() them.",
    "first-version": "Every forward uses the initial weights. A forward must take the newest ones.",
    "rolled-back": "The update started from the old, stashed weights, so what other micro-batches have taught "
                   "since is lost. The gradient comes from the old weights, but the update goes to the newest.",
    "no-update": "The weights haven't changed. Each backward ends with an optimizer step, and step() must find the "
                 "gradient in p.grad of the stage's own parameters.",
    "collected": "The gradients of earlier micro-batches are still in p.grad. Each update must use the gradient of "
                 "one micro-batch alone.",
    "statistics-lost": "The stage's running statistics didn't move: forward moved those of a copy. Copy only the "
                       "parameters; the buffers stay the stage's own.",
    "momentum-lost": "This is right without momentum and wrong with it: the optimizer forgets. Keep the one that "
                     "you were given, on the stage's own parameters.",
    "momentum-wrong": "This is right without momentum and wrong with it. Let the optimizer that you were given "
                      "make the update.",
    "wrong-micro-batch": "The backward of micro-batch {k} used what belongs to another one. Several are in flight: "
                         "look yours up by its number.",
    "frozen-gradient": "A frozen parameter has a gradient after backward, but its p.grad must stay None: zeros are "
                       "a gradient too. A copy should require one only if the parameter does: "
                       "requires_grad_(p.requires_grad).",
    "copies-not-on-gpu": "On a GPU, a copy is in the CPU's memory: {error}. p.detach().clone() is on the same "
                         "device as p.",
    "callers-x": "The x that was given to forward {what}. It is the caller's: x.detach() makes a tensor of your "
                 "own, requires_grad_() changes the one that it is called on.",
    "frozen-moved": "With a frozen parameter (requires_grad False), something fails or the parameter moves: {error}",
    "wrong-stale-output": "The output of micro-batch {k} doesn't come from the newest weights.",
    "wrong-stale-gradient": "The gradient of the input of micro-batch {k} doesn't come from the weights of its "
                            "forward.",
    "no-input-gradient": "backward({k}, …) returned no gradient for the input. The previous stage waits for it.",
    "wrong-update": "The weights are wrong after an update, though everything before it was right: each backward "
                    "ends with one optimizer step, with the gradient of that micro-batch.",
    "incoming-not-used": "Backward started from ones. It must go on from the gradient that it is given.",
    "output-with-graph": "The output that forward returns still has its graph. It goes to another rank: return "
                         "y.detach().",
    "never-freed": "After {n} micro-batches, stage {stage} of {p} holds {copies:.1f} copies of its weights, but at "
                   "most {most} are in flight. A stash is needed until its backward and no longer: take it out "
                   "then (pop).",
}  # fmt: skip


def balise_9(AsyncStage):  # noqa: N803
    """Streams of micro-batches through 1 to 4 stages, against the same arithmetic by hand."""
    with one_thread():
        yield "one stage: the plain loop, an update for each micro-batch"
        _stream(AsyncStage, 1)
        yield "2, 3 and 4 stages: outputs with the newest weights, gradients with those of the forward, updates of the newest"
        for p in (2, 3, 4):
            _stream(AsyncStage, p)
        yield "the optimizer's momentum, a frozen parameter"
        _stream(AsyncStage, 3, momentum=0.8)
        _stream(AsyncStage, 3, frozen=True)
        yield "a weight that a micro-batch does not use, running statistics"
        _parts(AsyncStage)
        yield "history records the versions"
        versions(AsyncStage)
        yield "no more copies of the weights than micro-batches in flight"
        _copies(AsyncStage)
    yield "the copies are on the weights' device, on a GPU too"
    on_gpus(_on_gpu, AsyncStage, n=1, known=left_on_cpu("copies-not-on-gpu"))


class _Either(nn.Module):
    """Running statistics; then one layer for micro-batches that begin with a positive number, another for the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.positive, self.other = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return (self.positive if x[0, 0] > 0 else self.other)(self.norm(x))


def _parts(AsyncStage):  # noqa: N803
    with seeded(2):
        module, x = _Either(), torch.rand(4, 3)
    [stage] = asynchronous(AsyncStage, [module], RATE)
    stage.forward(0, x)
    stage.backward(0, x)
    if not module.norm.running_mean.any():
        raise Wrong("statistics-lost", where="a stage with batch normalization")
    before = module.positive.weight.detach().clone()
    stage.forward(1, -x)
    stage.backward(1, x)
    if not close(module.positive.weight, before):
        raise Wrong("collected", where="a weight that micro-batch 0 used and micro-batch 1 did not")


def _on_gpu(_, AsyncStage):  # noqa: N803
    module, x = nn.Linear(3, 3).to(launch.device()), torch.ones(2, 3, device=launch.device())
    stage = AsyncStage(module, torch.optim.SGD(module.parameters(), lr=0.1))
    stage.backward(0, torch.ones_like(stage.forward(0, x)))


def _by_hand(p: int, mode: str = "", momentum: float = 0.0, frozen: bool = False) -> dict:
    """The stream in plain arithmetic. mode: "" is right, else a known mistake.

    Returns {("F", k, stage): output, ("B", k, stage): gradient of the input, ("w", layer): weight at the end}.
    """
    weights, (x, targets) = layers_of(), batches(N)
    start, speed, saved, trace, sums, last = list(weights), {}, {}, {}, {}, {}
    for kind, k, stage in in_turn(p, N):
        low, high = bounds(p)[stage]
        if kind == "F":
            used = start if mode == "first-version" else weights
            values = [x[k] if stage == 0 else trace["F", k, stage - 1]]
            for w, b in used[low:high]:
                values.append(torch.tanh(values[-1] @ w.T + b))
            saved[k, stage] = values, used[low:high]
            last[stage] = used[low:high]
            trace["F", k, stage] = values[-1]
            continue
        y = trace["F", k, stage]
        gradient = 2 * (y - targets[k]) / y.numel() if stage == p - 1 else trace["B", k, stage + 1]
        gradient = torch.ones_like(y) if mode == "incoming-not-used" else gradient
        # the mistake: of those in flight, the one that came last
        taken = max(j for j, s in saved if s == stage) if mode == "wrong-micro-batch" else k
        values, used = saved.pop((taken, stage))
        newest = {
            "newest-weights": weights[low:high],
            "stashed-references": weights[low:high],
            "last-stash": last.get(stage),
        }
        multiply = newest.get(mode, used)
        if mode in ("newest-weights", "last-stash"):
            values = values[:1]
            for w, b in multiply:
                values.append(torch.tanh(values[-1] @ w.T + b))
        for layer in reversed(range(low, high)):
            z = gradient * (1 - values[layer - low + 1] ** 2)
            update = [z.T @ values[layer - low], z.sum(0)]
            gradient = z @ multiply[layer - low][0]
            if mode == "collected":
                sums[layer] = update = [a + b for a, b in zip(sums.get(layer, (0.0, 0.0)), update, strict=True)]
            if momentum and mode != "momentum-lost":
                speed[layer] = update = [
                    momentum * v + u for v, u in zip(speed.get(layer, (0.0, 0.0)), update, strict=True)
                ]
            old = used[layer - low] if mode == "rolled-back" else weights[layer]
            if mode != "no-update":
                new = [w - RATE * u for w, u in zip(old, update, strict=True)]
                weights[layer] = (old[0] if frozen and layer == low else new[0], new[1])
        trace["B", k, stage] = gradient
    return trace | {("w", layer): w for layer, (w, _) in enumerate(weights)}


def _stream(AsyncStage, p, momentum=0.0, frozen=False):  # noqa: N803
    modules, (x, targets) = stages_of(p, frozen), batches(N)
    truth, trace, at, lent = _by_hand(p, "", momentum, frozen), {}, {}, {}  # lent: the caller's x of what is in flight

    def begins(k, stage):
        at.update(k=k, where=f"micro-batch {k} on stage {stage} of {p}")

    def tell(kind, k, stage, tensor, given=None):
        where = at["where"]
        if kind == "F":
            lent[k, stage] = given
        else:
            given = lent.pop((k, stage))
        if given.requires_grad:
            raise Wrong("callers-x", what="now requires a gradient", where=where)
        if not close(given, trace.get(("F", k, stage - 1), x[k])):
            raise Wrong("callers-x", what="now has other values", where=where)
        if kind == "F":
            if tensor is None:
                raise Wrong("nothing-returned", where=f"forward, {where}")
            if tensor.requires_grad:
                raise Wrong("output-with-graph", where=where)
        elif stage and tensor is None:
            raise Wrong("no-input-gradient", k=k, where=where)
        frozen_ones = [q for q in modules[stage].parameters() if not q.requires_grad]
        if any(q.grad is not None for q in frozen_ones):
            raise Wrong("frozen-gradient", where=where)
        trace[kind, k, stage] = None if tensor is None else tensor.detach().clone()

    try:
        drive(asynchronous(AsyncStage, modules, RATE, momentum), x, targets, tell, begins)
    except (RuntimeError, TypeError, AttributeError) as error:
        if "modified by an inplace operation" in str(error):
            text = "one of the variables needed for gradient computation has been modified by an inplace operation."
            raise Wrong("changed-in-place", error=text, got=text, where=at["where"]) from error
        if "backward through the graph a second time" in str(error):
            raise Wrong("wrong-micro-batch", k=at["k"], got=str(error)[:80], where=at["where"]) from error
        if frozen:
            raise Wrong("frozen-moved", error=error, got=str(error), where=at["where"]) from error
        raise
    linears = [layer for module in modules for layer in module[::2]]
    trace |= {("w", k): linear.weight.detach() for k, linear in enumerate(linears)}
    wrong = [
        key
        for key, value in truth.items()
        if not (key[0] == "B" and key[2] == 0) and not close(trace[key], value, 1e-6)
    ]
    if wrong:
        _mistake(wrong[0], trace, truth, p, momentum, frozen)


_MODES = (
    "no-update", "newest-weights", "last-stash", "stashed-references", "rolled-back", "collected", "first-version", "wrong-micro-batch",
    "incoming-not-used",
)  # fmt: skip


def _mistake(key, trace, truth, p, momentum, frozen):
    modes = ("momentum-lost", *_MODES) if momentum else _MODES
    looked = [k for k in truth if not (k[0] == "B" and k[2] == 0)]
    slug = {"F": "wrong-stale-output", "B": "wrong-stale-gradient", "w": "wrong-update"}[key[0]]
    if key[0] == "F" and key[1] > p - 1 - key[2]:  # the first thing that is wrong, and there was an update before it
        slug = "wrong-update"
    for mode in modes:
        values = _by_hand(p, mode, momentum, frozen)
        if all(close(trace[k], values[k], 1e-6) for k in looked):
            slug = mode
            break
    else:
        slug = "momentum-wrong" if momentum else slug
        slug = "frozen-moved" if frozen else slug
    where = (
        f"weight of layer {key[1]}, {p} stages" if key[0] == "w" else f"micro-batch {key[1]} on stage {key[2]} of {p}"
    )
    where += f", momentum {momentum}" if momentum else ""
    raise Wrong(
        slug,
        expected=truth[key],
        got=trace[key],
        where=where,
        k=key[1],
        error=("the gradients differ from those without it."),
    )


def _copies(AsyncStage):  # noqa: N803
    p, n, width = 4, 12, 64
    with seeded(1):
        modules = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(p)]
    size = sum(q.numel() * q.element_size() for q in modules[0].parameters())
    x, targets = torch.randn(2, n, 2, width)
    lives = [LiveBytes() for _ in range(p)]
    stages = [_Under(stage, live) for stage, live in zip(asynchronous(AsyncStage, modules, 0.01), lives, strict=True)]

    def tell(_kind, k, stage, *_):
        most = p - stage
        if lives[stage].live / size > most + 2.5:  # a set of gradients, and what is small
            gc.collect()  # what an answer's cycles hold
        copies = lives[stage].live / size
        if copies > most + 2.5:
            raise Wrong(
                "never-freed", n=k + 1, stage=stage, p=p, copies=copies, most=most, where=f"stage {stage} of {p}"
            )

    drive(stages, x, targets, tell)


class _Under:
    """A stage whose work is done under a mode that counts living bytes."""

    def __init__(self, stage, live):
        self.stage, self.live = stage, live

    def forward(self, k, x):
        with self.live:
            return self.stage.forward(k, x)

    def backward(self, k, gradient):
        with self.live:
            return self.stage.backward(k, gradient)
