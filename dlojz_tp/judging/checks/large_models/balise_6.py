"""Balise 6: the optimizer's step inside backward: equal weights, one gradient at a time, what cannot be had with it."""

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, tried
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.judging.probes.seeded import seeded

WIDTH, DEPTH, STEPS = 96, 10, 4
LAYER = 4 * WIDTH * WIDTH  # bytes of a layer's gradient
RATES = (0.1, 0.1, 0.02, 0.05)  # of each step: a schedule


class Net(nn.Module):
    """A weight used twice, a frozen one, one that no loss reaches, one with a gradient of 0, a norm, one that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5).view(1, 5))
        self.tied = nn.Linear(5, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 2)
        self.out = nn.Linear(5, 3)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.tied.weight
        self.off = nn.Linear(5, 5)

    def forward(self, x):
        return self.out(torch.tanh(self.last(self.frozen(self.norm(self.tied(self.scale * x) + 0 * self.off(x))))))


def net(kind):
    """Always the same weights, float64."""
    with seeded(6):
        layers = [layer for _ in range(3) for layer in (nn.Linear(5, 5), nn.Tanh())]
        return (Net() if kind == "mixed" else nn.Sequential(*layers, nn.Linear(5, 3))).double()


MAKERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}
RUNS = {
    "SGD": ("plain", "SGD", RATES[:1] * STEPS),
    "momentum": ("plain", "momentum", RATES[:1] * STEPS),
    "AdamW": ("plain", "AdamW", RATES[:1] * STEPS),
    "mixed": ("mixed", "AdamW", RATES[:1] * STEPS),
    "schedule": ("plain", "momentum", RATES),
}


def batches():
    drawn = torch.Generator().manual_seed(7)
    return [torch.randn(4, 5, generator=drawn, dtype=torch.float64) for _ in range(STEPS)]


TARGET = torch.tensor([0, 2, 1, 2])


def run(name, backward):
    """All weights after four steps. backward(model, make): what is done first; returns (optimizers, what ends a step)."""
    kind, maker, rates = RUNS[name]
    model = net(kind)
    optimizers, end = backward(model, MAKERS[maker])
    for x, rate in zip(batches(), rates):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = rate
        F.cross_entropy(model(x), TARGET).backward()
        end()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def after_backward(model, make):
    """The usual loop."""
    optimizer = make([*model.parameters()])

    def end():
        optimizer.step()
        optimizer.zero_grad()

    return [optimizer], end


def memory(step_in_backward):
    """(bytes, in layers, that a second step needs beside weights and states, gradients that are left)."""
    with torch.random.fork_rng():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    x = torch.ones(1, WIDTH)
    kept = step_in_backward(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9))
    with Memory(*model.parameters()) as held:
        model(x).sum().backward()
        held.reset()
        model(x).sum().backward()
        peak = held.peak
    del kept
    left = sum(p.grad is not None for p in model.parameters())
    return peak / LAYER - 2 * DEPTH, left


REFUSED = {
    "max_norm": {"max_norm": 1.0},
    "micro_batches": {"micro_batches": 4},
    "scaler": {"scaler": torch.amp.GradScaler("cpu")},
}


def refusal(step_in_backward, options):
    """How it is refused: the kind of error, and whether backward does anything now."""
    model = net("plain")
    word = tried(lambda: step_in_backward(model, MAKERS["SGD"], **options))
    before = [p.detach().clone() for p in model.parameters()]
    model(batches()[0]).sum().backward()
    moved = not all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    if not isinstance(word, str):
        return ["accepted", moved]
    kind, _, why = word.partition(": ")
    return [kind if why else f"{kind} without a word", moved]


def observe(step_in_backward):
    model = net("plain")
    optimizers = step_in_backward(model, MAKERS["SGD"])
    yield {"listed": None if optimizers is None else _listed(optimizers)}
    before = [p.detach().clone() for p in model.parameters()]
    model(batches()[0]).sum().backward()
    yield {"moved": sum(not torch.equal(p, old) for p, old in zip(model.parameters(), before))}
    for name in RUNS:
        if name == "mixed":
            layers, left = memory(step_in_backward)
            yield {"left": left, "layers": layers}
        yield {name: run(name, lambda model, make: (step_in_backward(model, make), lambda: None))}
    for name, options in REFUSED.items():
        yield {name: refusal(step_in_backward, options)}


def _apart(name):
    """A look's `fields`: how far the weights of a run went, and which of them are elsewhere."""

    def fields(seen, due):
        model = net(RUNS[name][0])
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        names, parts = zip(*((name, p.numel()) for name, p in model.named_parameters()))
        off = [name for name, one, other in zip(names, seen.split(parts), due.split(parts)) if not close(one, other)]
        times = float((seen - start) @ (due - start) / (due - start).square().sum())
        return {"times": f"{times:.2f}", "names": "all" if len(off) == len(names) else ", ".join(off)}

    return fields


def _listed(optimizers):
    """True for a list of optimizers; else what it is, in words."""
    if not isinstance(optimizers, list | tuple):
        return type(optimizers).__name__
    odd = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    return f"a list that contains a {type(odd[0]).__name__}" if odd else len(optimizers) > 0 or "an empty list"


def _moved(seen, due):
    return "nothing-moves" if seen == 0 else "few-move" if seen <= 2 else "some-left-out"  # 2: a layer's


def _refused(seen, due):
    return (
        "not-refused" if seen[0] == "accepted" else "refused-otherwise" if seen[0] != "ValueError" else "refused-late"
    )


LOOKS = [
    Look("a list of optimizers", "listed", True, "optimizers-form", fields="what"),
    Look("backward alone moves the weights", "moved", len([*net("plain").parameters()]), _moved,
         fields=lambda seen, due: {"moved": seen, "all": due}),
    Value("after four steps of SGD, the weights of the usual loop", "SGD", run("SGD", after_backward), "wrong-weights", fields=_apart("SGD")),
    Value("the same for SGD, momentum and weight decay", "momentum", run("momentum", after_backward), "state-lost"),
    Value("of AdamW", "AdamW", run("AdamW", after_backward), "state-lost"),
    Look("no gradient is left", "left", 0, "gradients-left", fields=lambda seen, due: {"left": seen, "all": DEPTH}),
    Look("the gradients of all layers are never in memory together", "layers", 4.5, "gradients-together", holds=at_most,
         fields=lambda seen, due: {"layers": f"{seen:.1f}", "all": DEPTH}),
    Value("with tied, frozen and unused weights", "mixed", run("mixed", after_backward), "wrong-weights", fields=_apart("mixed")),
    Value("with a learning rate that changes from step to step", "schedule", run("schedule", after_backward), "rate-ignored"),
    *(Look(f"{name} is refused", name, ["ValueError", False], _refused,
           fields=lambda seen, due, name=name: {"name": name, "error": seen[0]}) for name in REFUSED),
]  # fmt: skip


def balise_6(step_in_backward):
    try:
        yield from judged(LOOKS, observe, step_in_backward)
    except TypeError as error:
        if "hook returned" not in str(error):
            raise
        raise Wrong("hook-returns") from None
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise Wrong("moved-too-early") from None
