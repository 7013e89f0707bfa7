"""Balise 4: a backward in two halves, and ZB-H1 as data."""

import gc
import weakref
from functools import cache

import torch
from torch import nn
from torch.distributed.pipelining import _backward

from dlojz_tp import launch, planner
from dlojz_tp.judging.checking import Wrong, close, pretended
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.checks.pipeline_schedules.orders import fault_look, idle_look, kept_look, own_orders, simulated
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.memory import held_bytes
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.measure.operations import Operations

PRODUCTS = {f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmm_", "addbmm")}
ORDERS = (2, 4), (4, 8), (1, 3), (3, 7), (4, 4), (8, 16), (4, 2), (5, 13)  # ranks, micro-batches
COSTS = (1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.2, 0.8), (3.0, 2.0, 1.0)  # seconds of F, I, W


class _Token:
    """Dies with the graph that holds it."""


class _Hold(torch.autograd.Function):
    tokens: list[weakref.ref] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.token = _Token()
        _Hold.tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Held(nn.Module):
    def forward(self, x):
        return _Hold.apply(x)


def _module(frozen=False):
    with seeded(3):
        module = nn.Sequential(
            nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4),
            nn.ReLU(),
        ).double()  # fmt: skip
    module[4].weight.requires_grad_(not frozen)
    return module


def _random(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


# {a weight is frozen: {micro-batch: [x, gradient of the output]}}
GIVEN = {
    False: {k: _random(50 + k, (3, 5), (3, 4)) for k in range(3)},
    True: {
        0: [*_random(0, (1, 5)), torch.ones(1, 4).double()],
        7: [*_random(7, (2, 3, 5)), torch.ones(2, 3, 4).double()],
    },
}
# the last micro-batch comes back in another order than it went, and weights come late; then one after the other
TURNS = {False: "F0 F1 F2 I0 I2 W0 I1 W1 W2", True: "F0 I0 W0 F7 I7 W7"}


@cache
def _truth(frozen, k, other=None):
    """Output, gradient of x, those of the weights in a line; other: with the gradient of that one's output."""
    module, x = _module(frozen), GIVEN[frozen][k][0].clone().requires_grad_()
    y = module(x)
    weights = [p for p in module.parameters() if p.requires_grad]
    grad_x, *grads = torch.autograd.grad(y, [x, *weights], GIVEN[frozen][k if other is None else other][1])
    return y.detach(), grad_x, _line(grads)


def _line(grads):
    return torch.cat([grad.flatten() for grad in grads])


def observe_values(SplitStage, frozen):  # noqa: N803
    """Of each turn: an output, a gradient of x, or .grad of the weights in a line; who has a .grad too early."""
    module = _module(frozen)
    stage, weights = SplitStage(module), {name: p for name, p in module.named_parameters() if p.requires_grad}
    for turn in TURNS[frozen].split():
        k = int(turn[1:])
        x, grad = GIVEN[frozen][k]
        if turn[0] == "F":
            if frozen:
                module.zero_grad()
            yield {turn: stage.forward(k, x.clone())}
        elif turn[0] == "I":
            before = {name: p.grad if p.grad is None else p.grad.clone() for name, p in weights.items()}
            got = stage.backward_input(k, grad.clone())
            changed = [
                name for name, p in weights.items() if p.grad is not before[name] and not close(p.grad, before[name])
            ]
            yield {turn: got[0] if isinstance(got, tuple | list) and len(got) == 1 else got, f"{turn} changed": changed}
        else:
            stage.backward_weight(k)
            trained = frozen and module[4].weight.grad is not None and bool(module[4].weight.grad.any())
            yield {
                f"{turn} frozen": trained,
                f"{turn} missing": [name for name, p in weights.items() if p.grad is None],
            }
            yield {turn: _line(p.grad for p in weights.values())}


def _value_looks(frozen, claim):
    done = []
    for turn in TURNS[frozen].split():
        kind, k = turn[0], int(turn[1:])
        others = [n for n in GIVEN[frozen] if n != k and not frozen]
        about = {"k": k, "where": f"{TURNS[frozen]}{', a weight frozen' * frozen}: at {turn}"}
        fields = lambda *_, about=about: about  # noqa: E731
        if kind == "F":
            done = [] if frozen else done
            yield Look(claim, turn, _truth(frozen, k)[0], "wrong-output", fields=fields)
        elif kind == "I":
            mixed = {"micro-batches-mixed": [_truth(frozen, n, k)[1] for n in others]}
            yield Look("", turn, _truth(frozen, k)[1], _known(mixed, "wrong-input-gradient"), fields=fields)
            yield Look("", f"{turn} changed", [], "weights-in-input", fields=fields)
        else:
            done = [*done, k]
            weights = {n: _truth(frozen, n)[2] for n in GIVEN[frozen]}
            known = (
                {"not-added": [weights[k]]} if len(done) > 1 else {"micro-batches-mixed": [weights[n] for n in others]}
            )
            yield Look("", f"{turn} frozen", False, "frozen-trained", fields=fields)
            yield Look("", f"{turn} missing", [], "weights-missing", fields=fields)
            yield Look("", turn, sum(weights[n] for n in done), _known(known, "wrong-weight-gradient"), fields=fields)
        claim = ""


def _known(known, other):
    """A hint: the slug in {slug: values} of which one was seen, else `other`."""
    return lambda seen, _: next((slug for slug, some in known.items() if any(close(seen, one) for one in some)), other)


VALUES = {
    False: [*_value_looks(False, "outputs and input gradients, with three micro-batches under way")],
    True: [*_value_looks(True, "one more step with other sizes, a 3-dimensional input and a frozen weight")],
}


def observe_operations(SplitStage, layers):  # noqa: N803
    """Matrix products of each half, and of forward."""
    parts = [part for _ in range(layers) for part in (nn.Linear(6, 6), nn.GELU())]
    stage, (x, grad) = SplitStage(nn.Sequential(*parts).double()), _random(50, (4, 6), (4, 6))
    turns = {
        "F": lambda: stage.forward(0, x),
        "I": lambda: stage.backward_input(0, grad),
        "W": lambda: stage.backward_weight(0),
    }
    found = {}
    for turn, act in turns.items():
        with Operations() as operations:
            act()
        found[turn] = sum(n for name, n in operations.calls.items() if name in PRODUCTS)
    return found


def _products_look(claim, turn, slug):
    """No more products than layers, the `at` of the table."""
    return Look(claim, turn, int, slug, holds=at_most, fields=lambda found, layers: {"found": found, "wanted": layers})


OPERATIONS = [
    _products_look("the two halves do as many matrix products as a whole backward", "F", "forward-twice"),
    _products_look("", "I", "weights-computed-early"),
    _products_look("", "W", "chain-twice"),
]


def observe_memory(SplitStage):  # noqa: N803
    """What is kept after two micro-batches: graphs of forwards, and bytes beside the weights."""
    module = nn.Sequential(nn.Linear(6, 6), _Held(), nn.Linear(6, 6), nn.GELU()).double()
    stage = SplitStage(module)
    _Hold.tokens.clear()
    x, grad = _random(50, (64, 6), (64, 6))
    for k in (0, 1):
        stage.forward(k, x + k)
        stage.backward_input(k, grad)
        stage.backward_weight(k)
    gc.collect()
    graphs = sum(token() is not None for token in _Hold.tokens)
    module.zero_grad()
    return {"graphs": graphs, "beside": held_bytes(stage) - held_bytes(list(module.parameters()))}


def _kept_look(claim, key, most, what):
    def fields(kept, _):
        return {"k": "0 or 1", "what": what.format(kept), "expected": "", "got": "", "where": "after F0 I0 W0 F1 I1 W1"}

    return Look(claim, key, most, "kept-for-ever", holds=at_most, fields=fields)


MEMORY = [
    _kept_look("nothing of a micro-batch is kept after its weight gradients", "graphs", 0, "the graph of a forward"),
    _kept_look("", "beside", 64 * 6 * 8 - 1, "{} bytes beside the weights"),
]


def observe_order(zero_bubble_order, p, m):
    """The orders of all ranks on the clock: see `orders.simulated`; idle seconds once more where no W is delayed."""
    orders = own_orders(planner.zero_bubble_h1, zero_bubble_order, p, m)
    if any(action and action[0] == "B" for order in orders if order for action in order):
        return {"fault": ("whole-backwards", {})}
    found = simulated(orders, m, [dict(zip("FIW", seconds)) for seconds in COSTS])
    return found if found["fault"] or not all(map(_at_once, orders)) else found | {"idle at once": found["idle"]}


def _at_once(order):
    """Whether each W comes right after its I."""
    return all(
        after[:2] == ("W", before[1]) for before, after in zip(order, [*order[1:], ("", -1)]) if before[0] == "I"
    )


def _order_looks(p, m):
    due = [(p - 1) * (forward + half + (-weight if m >= p else weight)) for forward, half, weight in COSTS]
    return [
        fault_look("ZB-H1: (p − 1)(F + I − W) of idle time, with at most p micro-batches kept"),
        kept_look("", "kept", [p] * p, "weights-too-late"),
        *(idle_look(k, seconds, "weights-at-once", "idle at once") for k, seconds in enumerate(due)),
        *(idle_look(k, seconds, "bubble-left") for k, seconds in enumerate(due)),
    ]


def balise_4(SplitStage, zero_bubble_order):  # noqa: N803
    """Values, operations and memory of the halves; then the orders on the clock."""
    halves = "stage_backward_input", "stage_backward_weight", "stage_backward"
    with pretended([(_backward, name, _refuse) for name in halves], SplitStage):
        for frozen, looks in VALUES.items():
            yield from judged(looks, observe_values, SplitStage, frozen)
    for layers in (1, 2, 4):
        yield from judged(
            OPERATIONS, observe_operations, SplitStage, layers, at=layers, where=f"{layers} linear layers"
        )
    yield from judged(MEMORY, observe_memory, SplitStage)
    on_gpus(_on_gpu, SplitStage, n=1, known=left_on_cpu("half-not-on-gpu"))
    for case in ORDERS:
        where = "{} ranks, {} micro-batches".format(*case)
        yield from judged(_order_looks(*case), observe_order, zero_bubble_order, *case, where=where)


def _refuse(*_, **__):
    raise Wrong("library-called")


def _on_gpu(_, SplitStage):  # noqa: N803
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(launch.device()), torch.ones(2, 3, device=launch.device())
    stage = SplitStage(module)
    stage.backward_input(0, torch.ones_like(stage.forward(0, x)))
    stage.backward_weight(0)
