"""Balise 9: an asynchronous stage, whose backward uses the weights of its forward."""

import gc
from functools import cache

import torch
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, Value, judged, silent
from dlojz_tp.judging.checks.pipeline_under_the_hood.history import mistake, versions
from dlojz_tp.judging.checks.pipeline_under_the_hood.recomputing import one_thread
from dlojz_tp.judging.checks.pipeline_under_the_hood.streams import (
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
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.live import LiveBytes

STREAMS = {
    1: {"p": 1}, 2: {"p": 2}, 3: {"p": 3}, 4: {"p": 4},
    "momentum": {"p": 3, "momentum": 0.8}, "frozen": {"p": 3, "frozen": True},
}  # fmt: skip
IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation."


class Either(nn.Module):
    """Running statistics; then one layer for micro-batches that begin with a positive number, another for the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.positive, self.other = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return (self.positive if x[0, 0] > 0 else self.other)(self.norm(x))


def observe(AsyncStage):  # noqa: N803
    for name, options in STREAMS.items():
        slips, trace = stream(AsyncStage, **options)
        yield {name: trace, ("slip", name): next(iter(slips), None)}
    yield parts(AsyncStage)
    yield {"versions": versions(AsyncStage)}
    yield {"copies": copies(AsyncStage)}


@cache
def by_hand(p: int, momentum: float = 0.0, frozen: bool = False) -> dict:
    """The stream in plain arithmetic: ("F", k, stage): output, ("B", k, stage): gradient of the input, ("w", layer)."""
    weights, (x, targets) = layers_of(), batches(N)
    speed, saved, trace = {}, {}, {}
    for kind, k, stage in in_turn(p, N):
        low, high = bounds(p)[stage]
        if kind == "F":
            values = [x[k] if stage == 0 else trace["F", k, stage - 1]]
            for w, b in weights[low:high]:
                values.append(torch.tanh(values[-1] @ w.T + b))
            saved[k, stage] = values, weights[low:high]
            trace["F", k, stage] = values[-1]
            continue
        y, (values, used) = trace["F", k, stage], saved.pop((k, stage))
        gradient = 2 * (y - targets[k]) / y.numel() if stage == p - 1 else trace["B", k, stage + 1]
        for layer in reversed(range(low, high)):
            z = gradient * (1 - values[layer - low + 1] ** 2)
            update = [z.T @ values[layer - low], z.sum(0)]
            gradient = z @ used[layer - low][0]
            before = speed.get(layer, (0.0, 0.0))
            speed[layer] = update = [momentum * v + u for v, u in zip(before, update, strict=True)]
            new = [w - RATE * u for w, u in zip(weights[layer], update, strict=True)]
            weights[layer] = (weights[layer][0] if frozen and layer == low else new[0], new[1])
        trace["B", k, stage] = gradient
    return looked_at(trace, [w for w, _ in weights])


def looked_at(trace, weights):
    """Without the gradients of the first stage's inputs, which nobody needs; with the weights at the end."""
    found = {key: value for key, value in trace.items() if key[0] == "F" or key[2]}
    return found | {("w", layer): w.detach() for layer, w in enumerate(weights)}


def stream(AsyncStage, p, momentum=0.0, frozen=False):  # noqa: N803
    """(slips, beside its numbers: hints with their fields; the numbers) of what comes out of a stream."""
    modules, (x, targets) = stages_of(p, frozen), batches(N)
    trace, slips, at, lent = {}, [], {}, {}  # lent: the caller's x of what is in flight

    def begins(k, stage):
        at.update(k=k, where=f"micro-batch {k} on stage {stage} of {p}")

    def tell(kind, k, stage, tensor, given=None):
        forward, given = kind == "F", lent.pop((k, stage), given)
        if forward:
            lent[k, stage] = given
        still = [q for q in modules[stage].parameters() if not q.requires_grad]
        slips.extend((slug, at | {"what": what}) for wrong, slug, what in (
            (given.requires_grad, "callers-x", "now requires a gradient"),
            (not close(given, trace.get(("F", k, stage - 1), x[k])), "callers-x", "now has other values"),
            (forward and tensor is None, "nothing-returned", ""),
            (forward and getattr(tensor, "requires_grad", False), "output-with-graph", ""),
            (not forward and stage and tensor is None, "no-input-gradient", ""),
            (any(q.grad is not None for q in still), "frozen-gradient", ""),
        ) if wrong)  # fmt: skip
        trace[kind, k, stage] = None if tensor is None else tensor.detach().clone()

    try:
        drive(asynchronous(AsyncStage, modules, RATE, momentum), x, targets, tell, begins)
    except (RuntimeError, TypeError, AttributeError) as error:
        slips += [(slug, at | {"error": text, "got": text}) for slug, text in failure(error, frozen)]
        if not slips:
            raise
    return slips, looked_at(trace, [layer.weight for module in modules for layer in module[::2]])


def failure(error, frozen):
    if "modified by an inplace operation" in str(error):
        return [("changed-in-place", IN_PLACE)]
    if "backward through the graph a second time" in str(error):
        return [("wrong-micro-batch", str(error)[:80])]
    return [("frozen-moved", str(error))] if frozen else []


def parts(AsyncStage):  # noqa: N803
    """Whether running statistics moved; by how much a weight did that a micro-batch does not use."""
    with seeded(2):
        module, x = Either(), torch.rand(4, 3)
    [stage] = asynchronous(AsyncStage, [module], RATE)
    stage.forward(0, x)
    stage.backward(0, x)
    before = module.positive.weight.detach().clone()
    stage.forward(1, -x)
    stage.backward(1, x)
    moved = (module.positive.weight - before).abs().max().item()
    return {"statistics": bool(module.norm.running_mean.any()), "moved": moved}


def copies(AsyncStage):  # noqa: N803
    """Where a stage holds too many copies of its weights: (micro-batch, stage of four, copies)."""
    p, n, width, found = 4, 12, 64, []
    with seeded(1):
        modules = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(p)]
    size = sum(q.nbytes for q in modules[0].parameters())
    x, targets = torch.randn(2, n, 2, width)
    lives = [LiveBytes() for _ in range(p)]
    stages = [Under(stage, live) for stage, live in zip(asynchronous(AsyncStage, modules, 0.01), lives, strict=True)]

    def tell(_kind, k, stage, *_):
        most = size * (p - stage + 2.5)  # a set of gradients, and what is small
        if not found and lives[stage].live > most:
            gc.collect()  # what an answer's cycles hold
            found.extend([(k, stage, lives[stage].live / size)] if lives[stage].live > most else [])

    drive(stages, x, targets, tell)
    return found


class Under:
    """A stage whose work is done under a mode that counts living bytes."""

    def __init__(self, stage, live):
        self.stage, self.live = stage, live

    def forward(self, k, x):
        with self.live:
            return self.stage.forward(k, x)

    def backward(self, k, gradient):
        with self.live:
            return self.stage.backward(k, gradient)


def kept(seen, due):
    k, stage, many = seen[0]
    told = {"n": k + 1, "stage": stage, "p": 4, "copies": many, "most": 4 - stage, "where": f"stage {stage} of 4"}
    return silent(seen, due) | told


def updates(claim, name):
    """Looks at a stream."""
    p, momentum, frozen = (STREAMS[name].get(key) for key in ("p", "momentum", "frozen"))

    def wrong(seen, due):
        return next((key for key, value in due.items() if not close(seen[key], value, 1e-6)), None)

    def hint(seen, due):
        kind, k, *stage = wrong(seen, due)
        if momentum or frozen:
            return "momentum-wrong" if momentum else "frozen-moved"
        if kind == "B":
            return "wrong-stale-gradient"
        # the first thing that is wrong, and there was an update before it
        return "wrong-update" if kind == "w" or k > p - 1 - stage[0] else "wrong-stale-output"

    def fields(seen, due):
        kind, k, *stage = key = wrong(seen, due)
        where = f"weight of layer {k}, {p} stages" if kind == "w" else f"micro-batch {k} on stage {stage[0]} of {p}"
        where += f", momentum {momentum}" if momentum else ""
        error = "the gradients differ from those without it."
        return {"expected": due[key], "got": seen[key], "where": where, "k": k, "error": error}

    def right(seen, due):
        return wrong(seen, due) is None

    return [
        recognised(claim, lambda observed: observed["slip", name]),
        Value("", name, lambda _: by_hand(**STREAMS[name]), hint, holds=right, fields=fields),
    ]


LOOKS = [
    *updates("one stage: the plain loop, an update for each micro-batch", 1),
    *updates("2, 3 and 4 stages: outputs with the newest weights, gradients with those of the forward, updates of the "
             "newest", 2),
    *updates("", 3), *updates("", 4),
    *updates("the optimizer's momentum, a frozen parameter", "momentum"), *updates("", "frozen"),
    Look("a weight that a micro-batch does not use, running statistics", "statistics", True, "statistics-lost"),
    Look("", "moved", 0.0, "collected",
         fields=lambda *pair: silent(*pair) | {"where": "a weight that micro-batch 0 used and micro-batch 1 did not"}),
    recognised("history records the versions", mistake),
    Look("no more copies of the weights than micro-batches in flight", "copies", [], "never-freed", fields=kept),
]  # fmt: skip


def on_gpu(_, AsyncStage):  # noqa: N803
    module, x = nn.Linear(3, 3).to(launch.device()), torch.ones(2, 3, device=launch.device())
    stage = AsyncStage(module, torch.optim.SGD(module.parameters(), lr=0.1))
    stage.backward(0, torch.ones_like(stage.forward(0, x)))


def balise_9(AsyncStage):  # noqa: N803
    """Streams of micro-batches through 1 to 4 stages, against the same arithmetic by hand."""
    with one_thread():
        yield from judged(LOOKS, observe, AsyncStage)
    yield "the copies are on the weights' device, on a GPU too"
    on_gpus(on_gpu, AsyncStage, n=1, known=left_on_cpu("copies-not-on-gpu"))
