"""Balise 7, second half: a stage that keeps its input only, and runs again in backward."""

import contextlib
import gc
from functools import cache

import torch
from torch import nn
from torch.distributed._composable import checkpoint_activation as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.utils import checkpoint

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close, pretended
from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, silent
from dlojz_tp.judging.probes.gpus import on_one_gpu
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.live import LiveBytes

DRAWN = [0, 1, 1, 0]  # two forwards, then each again; not the last one last
MOST_CALLS = 50  # of a stage in one look; a few are due
OUTPUTS = 3 * 64 * 32 * 8  # bytes of three micro-batches
DROPOUT = "dropout of 0.4, three micro-batches in flight"
CASES = {  # {name: (options of the stage, whether x needs a gradient)}
    "stage in the middle": ({}, True),
    "first stage, x needs no gradient": ({}, False),
    "a frozen parameter": ({"frozen": True}, True),
    "first stage, token numbers": ({"ids": True}, False),
    DROPOUT: ({"dropout": 0.4}, True),
}


@contextlib.contextmanager
def one_thread():
    """Inside, torch computes on one core: small tensors on several are slow where other programs want them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recomputing(recompute):
    """What balise 7 looks at in `recompute`."""
    names = ("checkpoint", "checkpoint_sequential", "CheckpointFunction")
    inner = [name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentrant")]
    refused = [(checkpoint, name, _refuse(name)) for name in (*names, *inner)]
    refused += [(composable, name, _refuse("checkpoint")) for name in inner if name in vars(composable)]
    refused.append((checkpoint_wrapper, "torch_utils_checkpoint", _refuse("checkpoint")))
    # no rank runs here, and an answer may ask for its device
    with pretended([*refused, (launch, "device", lambda: torch.device("cpu"))], recompute):
        yield from judged(LOOKS, observe, recompute)
    yield from judged(ON_GPU, on_gpu, recompute, where="the generator of a GPU, two micro-batches, counted in forwards")


def _refuse(name):
    def refuse(*_args, **_named):
        raise Wrong("library-checkpoint", what=f"torch.utils.checkpoint.{name}")

    return refuse


def gradients(stage):
    """Copies of the gradients of a stage."""
    return [None if p.grad is None else p.grad.clone() for p in stage.parameters()]


class Counted(nn.Module):
    """A stage whose width, dropout and first layer can be chosen; it counts its calls."""

    def __init__(self, dropout=0.0, ids=False, frozen=False):
        super().__init__()
        with seeded(9):
            self.first = nn.Embedding(20, 32) if ids else nn.Linear(32, 32)
            self.rest = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.double()
        self.dropout, self.calls = nn.Dropout(dropout), 0
        if frozen:
            self.rest[1].weight.requires_grad_(False)

    def forward(self, x):
        self.calls += 1
        if self.calls > MOST_CALLS:  # no deadline reaches autograd's threads: it would go on until memory is full
            raise Wrong("runs-for-ever", n=self.calls)
        x = self.first(x)
        for layer in self.rest:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def plain(stage, x):
    """The stage without recomputation."""
    return stage(x)


def inputs(ids=False, needs=True):
    """Three micro-batches of 64 rows."""
    generator = torch.Generator().manual_seed(4)
    if ids:
        return [torch.randint(0, 20, (64,), generator=generator) for _ in range(3)]
    return [torch.randn(64, 32, generator=generator, dtype=torch.float64).requires_grad_(needs) for _ in range(3)]


def observe(recompute):
    yield {"held": held(recompute)}
    for case in [*CASES][:-1]:
        yield from passes(recompute, case)
    yield of_a_result(recompute)
    yield {"changed": changed(recompute)}
    yield from passes(recompute, DROPOUT)


def held(recompute):
    """Bytes that are alive after the forwards of three micro-batches."""
    stage, xs, live = Counted(), inputs(), LiveBytes()
    with live:
        ys = [recompute(stage, x) for x in xs]
    gc.collect()  # what an answer's cycles hold
    return live.live if ys else 0  # they live until here


def passes(recompute, case):
    """Forwards of three micro-batches, then their backwards: outputs and gradients, calls, what is drawn next."""
    options, needs = CASES[case]
    stage, xs = Counted(**options), inputs(options.get("ids", False), needs)
    torch.manual_seed(21)
    ys = [recompute(stage, x) for x in xs]
    graphs = all(getattr(y, "requires_grad", False) for y in ys)
    yield {("outputs", case): [None if y is None else y.detach() for y in ys], ("graphs", case): graphs}
    try:
        for k in (2, 0, 1):  # not the last one last: its state happens to be where the stream goes on
            (ys[k] * torch.linspace(-1, 2, 32).double() * (k + 1)).sum().backward()
    except RuntimeError as error:
        if not (slug := refused(str(error), case)):
            raise
        yield {("error", case): (slug, {"error": error, "got": str(error), "where": case})}
        return
    moving = [p for p in stage.parameters() if p.requires_grad]
    of_stage, of_inputs = ([torch.zeros_like(p) if p.grad is None else p.grad for p in some] for some in (moving, xs))
    yield {
        ("error", case): None, ("gradients", case): of_stage, ("inputs", case): of_inputs if needs else [],
        ("lost", case): not any(g.count_nonzero() for g in of_stage), ("calls", case): stage.calls,
        ("input lost", case): needs and xs[0].grad is None, ("next", case): torch.rand(3),
    }  # fmt: skip


@cache
def truth(case):
    return {key: value for part in passes(plain, case) for key, value in part.items()}


def refused(text, case):
    """The hint for an error of a backward; "" for any other."""
    if case == "a frozen parameter":
        return "frozen-fails"
    if case == "first stage, token numbers" and "require" in text:
        return "ids-no-gradient"
    return "no-second-graph" if not CASES[case][0] and "does not require grad" in text else ""


def of_a_result(recompute):
    """x is no leaf, and is used beside the stage as well: its past is gone through once, by autograd."""
    stage, (leaf, *_), passed = Counted(), inputs(), []
    x = torch.tanh(2 * leaf)
    x.register_hook(lambda _: passed.append(1))
    try:
        (recompute(stage, x).sum() + x.square().sum()).backward()
    except RuntimeError as error:
        return {"past": str(error)}
    return {"past": "", "passed": len(passed), "leaf": leaf.grad}


def changed(recompute):
    """The gradients where x is changed in place before the backward, or that this is an error."""
    stage, (x, *_) = Counted(), inputs()
    y = recompute(stage, x)
    with torch.no_grad():
        x.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        return "refused"
    return gradients(stage)


def unchanged(_):
    stage = Counted()
    stage(inputs()[0]).sum().backward()
    return gradients(stage)


def on_gpu(recompute):
    """The same of a GPU's generator, in numbers: each forward of the stage takes one."""
    began, after = on_one_gpu(_drawn, recompute, count=1) or (DRAWN, len(DRAWN) // 2)
    return {"began": began, "after": after}


def _drawn(_, device, recompute):
    """Where the GPU's generator was when each forward of a stage began, and after the last backward."""
    now, began = [0], []

    class Drawing(nn.Linear):
        def forward(self, x):
            began.append(now[0])
            now[0] += 1
            return super().forward(x)

    def state(*_):
        return torch.full((16,), now[0], dtype=torch.uint8)

    def set_state(new, *_, **__):
        now[0] = new.tolist()[0]

    with (
        replaced(torch.cuda, "get_rng_state", state), replaced(torch.cuda, "get_rng_state_all", lambda: [state()]),
        replaced(torch.cuda, "set_rng_state", set_state),
        replaced(torch.cuda, "set_rng_state_all", lambda new: set_state(new[0])),
    ):  # fmt: skip
        stage, x = Drawing(3, 3).to(device), torch.ones(2, 3, device=device).requires_grad_()
        for y in [recompute(stage, x), recompute(stage, x)][::-1]:
            y.sum().backward()
    return began, now[0]


def worst(case):
    """A look's `fields`: the first value that differs."""

    def fields(seen, due):
        k = next(k for k, pair in enumerate(zip(seen, due, strict=True)) if not close(*pair))
        return {"expected": due[k], "got": seen[k], "where": f"{case}, number {k}"}

    return fields


def same(claim, case, key, hint, kind=Look):
    """A look at values that must be those without recomputation."""
    return kind(claim, (key, case), lambda _: truth(case)[key, case], hint, fields=worst(case))


def as_without(claim, case):
    """Looks at `passes`."""

    def told(seen, due):
        return silent(seen, due) | {"where": case}

    def times(calls, due):
        return told(calls, due) | {"n": f"{calls / 3:g}", "expected": "3 forwards, and 3 more", "got": f"{calls}"}

    return [
        same(claim, case, "outputs", "other-output"),
        Look("", ("graphs", case), True, "first-stage-no-graph", fields=told),
        recognised("", lambda observed: observed["error", case]),
        Look("", ("lost", case), False, "parameters-lost", fields=told),
        Look("", ("input lost", case), False, "input-gradient-lost", fields=told),
        same("", case, "gradients", "wrong-recomputed", Value),
        same("", case, "inputs", "wrong-recomputed", Value),
        Look("", ("calls", case), 6, "not-recomputed", fields=times),
    ]


def through(seen, due):
    return {"error": f": {seen}" if isinstance(seen, str) else "", "where": "x is the result of a layer"}


def kept(seen, due):
    return {"seen": seen, "truth": OUTPUTS, "expected": OUTPUTS, "where": "three micro-batches of 64 rows"}


MASKS = "dropout: the same masks again, and afterwards the same random numbers as without recomputation"
MIDDLE, *FURTHER, _ = CASES
LOOKS = [
    Look("recompute keeps only its input, with three micro-batches in flight", "held", 2 * OUTPUTS + 24_000, "all-kept",
         holds=at_most, fields=kept),
    *as_without("output and gradients as without it: middle stage, first stage, a frozen parameter, token numbers",
                MIDDLE),
    *(look for case in FURTHER for look in as_without("", case)),
    Look("", "past", "", "through-x", fields=through),
    Look("", "passed", 1, "through-x", holds=at_most, fields=through),
    Look("", "leaf", lambda _: of_a_result(plain)["leaf"], "through-x", fields=through),
    Look("", "changed", unchanged, "change-not-seen", fields=worst("x changed in place"),
         holds=lambda seen, due: seen == "refused" or close(seen, due)),
    same(MASKS, DROPOUT, "gradients", "other-mask"), same("", DROPOUT, "inputs", "other-mask"),
    Look("", ("next", DROPOUT), lambda _: truth(DROPOUT)["next", DROPOUT], "stream-rewound"),
]  # fmt: skip
ON_GPU = [Look(MASKS, "began", DRAWN, "other-mask"), Look("", "after", len(DRAWN) // 2, "stream-rewound")]
