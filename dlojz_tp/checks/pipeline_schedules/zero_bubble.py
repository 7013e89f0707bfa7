"""Balise 4: a backward in two halves, and ZB-H1 as data."""

import gc
import weakref

import torch
from torch import nn
from torch.distributed.pipelining import _backward

from dlojz_tp import launch, planner
from dlojz_tp.checking import Wrong, close, pretended
from dlojz_tp.checks.pipeline_schedules import orders as data
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.memory import held_bytes
from dlojz_tp.probes.operations import Operations
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "library-called": "PyTorch has such a split internally. Write it yourself here: torch.autograd.grad is all you "
                      "need.",
    "wrong-output": "forward({k}, x) does not give the module's output.",
    "wrong-input-gradient": "backward_input does not give the gradient of the input.",
    "micro-batches-mixed": "That is the result for another micro-batch: keep everything that belongs to k under k.",
    "weights-in-input": "backward_input already writes to .grad of the weights. torch.autograd.grad computes "
                        "gradients without touching .grad.",
    "weights-computed-early": "backward_input did {found} matrix products, but the gradient of the input needs "
                              "only {wanted}. It computes weight gradients, runs the forward again, or goes back "
                              "through the graph twice. One call gives all the gradients you need.",
    "chain-twice": "backward_weight did {found} matrix products, but the weights' gradients need only {wanted}: it "
                   "goes through the chain of layers again. In the first half, keep the gradients of the outputs "
                   "of the layers that have parameters.",
    "forward-twice": "forward did {found} matrix products, but the module has {wanted} linear layers.",
    "weights-missing": "After backward_weight a parameter has no gradient.",
    "not-added": ".grad holds only the last micro-batch: gradients must add up over micro-batches, as with backward().",
    "wrong-weight-gradient": "After backward_weight, .grad is not what a whole backward gives.",
    "half-not-on-gpu": "On a GPU, something is in the CPU's memory: {error}. Make new tensors on the gradient's "
                       "device: torch.zeros_like(weight).",
    "frozen-trained": "A frozen parameter (requires_grad=False) got a gradient.",
    "kept-for-ever": "Something of micro-batch {k} is still kept after its backward_weight: {what}. Remove it from "
                     "what the stage holds.",
    "whole-backwards": "The order contains a whole backward, B. Here, backward comes in two halves, I and W.",
    "weights-at-once": "Each rank is idle for {found:.3g} s, where {wanted:.3g} s are possible. The weight "
                       "gradients come right after the input gradients, so the stage before has to wait. Delay "
                       "them: on rank r, by r micro-batches.",
    "bubble-left": "Each rank is idle for {found:.3g} s, where {wanted:.3g} s are possible. As in 1F1B, rank r "
                   "begins with p − r − 1 forwards; its weight gradients come r micro-batches late.",
    "weights-too-late": "Rank {rank} keeps {found} micro-batches at once, until their W, but {most} are enough. "
                        "Begin with p − r − 1 forwards, as 1F1B does, and delay weight gradients by r "
                        "micro-batches, no more.",
}  # fmt: skip

PRODUCTS = {
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.linear",
    "aten.matmul",
    "aten.addmm_",
    "aten.addbmm",
}


def balise_4(SplitStage, zero_bubble_order):  # noqa: N803
    """Values, operations and memory of the halves; then the orders on the clock."""
    yield "outputs and input gradients, with three micro-batches under way"
    library = [
        (_backward, name, _refuse) for name in ("stage_backward_input", "stage_backward_weight", "stage_backward")
    ]
    with pretended(library, SplitStage):
        yield from _values(SplitStage)
    yield "the two halves do as many matrix products as a whole backward"
    for layers in (1, 2, 4):
        _operations(SplitStage, layers)
    yield "nothing of a micro-batch is kept after its weight gradients"
    _memory(SplitStage)
    on_gpus(_on_gpu, SplitStage, n=1, known=left_on_cpu("half-not-on-gpu"))
    yield "ZB-H1: (p − 1)(F + I − W) of idle time, with at most p micro-batches kept"
    with data.own_orders(planner.zero_bubble_h1):
        for p, m in ((2, 4), (4, 8), (1, 3), (3, 7), (4, 4), (8, 16), (4, 2), (5, 13)):
            _right_order(zero_bubble_order, p, m)


def _on_gpu(_, SplitStage):  # noqa: N803
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(launch.device()), torch.ones(2, 3, device=launch.device())
    stage = SplitStage(module)
    stage.backward_input(0, torch.ones_like(stage.forward(0, x)))
    stage.backward_weight(0)


def _refuse(*_, **__):
    raise Wrong("library-called")


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


def _module(seed=3, frozen=False):
    with seeded(seed):
        layers = [
            nn.Linear(5, 7),
            nn.GELU(),
            nn.Linear(7, 6, bias=False),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.Linear(6, 4),
            nn.ReLU(),
        ]
        module = nn.Sequential(*layers).double()
    if frozen:
        module[4].weight.requires_grad_(False)
    return module


def _inputs(k, rows, wide, out):
    generator = torch.Generator().manual_seed(50 + k)
    x = torch.randn(rows, wide, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, out, generator=generator, dtype=torch.float64)


def _truth(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x)
    weights = [p for p in module.parameters() if p.requires_grad]
    grad_x, *grads = torch.autograd.grad(y, [x, *weights], grad)
    return y.detach(), grad_x, grads


def _values(SplitStage):  # noqa: N803
    module = _module()
    stage = SplitStage(module)
    sizes = {0: 3, 1: 3, 2: 3}
    given = {k: _inputs(k, rows, 5, 4) for k, rows in sizes.items()}
    true = {k: _truth(module, *given[k]) for k in sizes}
    for k in (0, 1, 2):
        _same_output(stage, k, given[k][0], true[k][0])
    names = dict(module.named_parameters())
    done, total = [], [torch.zeros_like(p) for p in module.parameters()]
    # the last micro-batch comes back in another order than it went, and weights come late
    for kind, k in (("I", 0), ("I", 2), ("W", 0), ("I", 1), ("W", 1), ("W", 2)):
        where = f"F0 F1 F2, then I0 I2 W0 I1 W1 W2: at {kind}{k}"
        if kind == "I":
            before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            grad = stage.backward_input(k, given[k][1].clone())
            others = {n: _truth(module, given[n][0], given[k][1])[1] for n in sizes if n != k}
            _same_input_gradient(grad, true[k][1], others, module, true, where)
            after = [p.grad for p in module.parameters()]
            if any((a is None) != (b is None) or (b is not None and not close(a, b)) for a, b in zip(after, before)):
                raise Wrong("weights-in-input", where=where)
            continue
        stage.backward_weight(k)
        done.append(k)
        total = [t + g for t, g in zip(total, true[k][2])]
        for (name, p), wanted, last in zip(names.items(), total, true[k][2]):
            more = {"expected": wanted, "where": f"{where}, {name}"}
            if p.grad is None:
                raise Wrong("weights-missing", got="None", **more)
            if not close(p.grad, wanted):
                slug = "not-added" if len(done) > 1 and close(p.grad, last) else "wrong-weight-gradient"
                if any(close(p.grad, true[n][2][list(names).index(name)]) for n in sizes if n != k) and len(done) == 1:
                    slug = "micro-batches-mixed"
                raise Wrong(slug, got=p.grad, **more)
    yield "one more step with other sizes, a 3-dimensional input and a frozen weight"
    module = _module(frozen=True)
    stage = SplitStage(module)
    for k, shape in ((0, (1, 5)), (7, (2, 3, 5))):
        x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        module.zero_grad()
        y, grad_x, grads = _truth(module, x, torch.ones(*shape[:-1], 4, dtype=torch.float64))
        where = f"input {tuple(shape)}, a frozen weight"
        _same_output(stage, k, x, y)
        grad = stage.backward_input(k, torch.ones_like(y))
        _same_input_gradient(grad, grad_x, {}, module, {}, where)
        stage.backward_weight(k)
        if module[4].weight.grad is not None and bool(module[4].weight.grad.any()):
            raise Wrong("frozen-trained", where=where)
        for p, wanted in zip((p for p in module.parameters() if p.requires_grad), grads):
            if p.grad is None:
                raise Wrong("weights-missing", where=where)
            if not close(p.grad, wanted):
                raise Wrong("wrong-weight-gradient", expected=wanted, got=p.grad, where=where)


def _same_output(stage, k, x, wanted):
    y = stage.forward(k, x.clone())
    if y is None:
        raise Wrong("nothing-returned")
    if not close(y, wanted):
        raise Wrong("wrong-output", expected=wanted, got=y, where=f"micro-batch {k}", k=k)


def _same_input_gradient(grad, wanted, others, module, true, where):
    if grad is None:
        raise Wrong("nothing-returned", where=where)
    if isinstance(grad, tuple | list) and len(grad) == 1:
        grad = grad[0]
    if not close(grad, wanted):
        mixed = any(close(grad, other) for other in others.values())
        raise Wrong("micro-batches-mixed" if mixed else "wrong-input-gradient", expected=wanted, got=grad, where=where)


def _operations(SplitStage, layers):  # noqa: N803
    parts = [part for _ in range(layers) for part in (nn.Linear(6, 6), nn.GELU())]
    module = nn.Sequential(*parts).double()
    x, grad = _inputs(0, 4, 6, 6)
    stage, counts = SplitStage(module), []
    for act in (lambda: stage.forward(0, x), lambda: stage.backward_input(0, grad), lambda: stage.backward_weight(0)):
        with Operations() as operations:
            act()
        counts.append(sum(n for name, n in operations.calls.items() if name in PRODUCTS))
    for slug, found in zip(("forward-twice", "weights-computed-early", "chain-twice"), counts):
        if found > layers:
            raise Wrong(slug, expected=layers, got=found, where=f"{layers} linear layers", found=found, wanted=layers)


def _memory(SplitStage):  # noqa: N803
    module = nn.Sequential(nn.Linear(6, 6), _Held(), nn.Linear(6, 6), nn.GELU()).double()
    stage = SplitStage(module)
    _Hold.tokens.clear()
    x, grad = _inputs(0, 64, 6, 6)
    for k in (0, 1):
        stage.forward(k, x + k)
        stage.backward_input(k, grad)
        stage.backward_weight(k)
    gc.collect()
    where = "after F0 I0 W0 F1 I1 W1"
    if any(token() is not None for token in _Hold.tokens):
        raise Wrong("kept-for-ever", where=where, k="0 or 1", what="the graph of a forward")
    module.zero_grad()
    weights = held_bytes(list(module.parameters()))
    extra = held_bytes(stage) - weights
    if extra >= x.nbytes:
        raise Wrong("kept-for-ever", where=where, k="0 or 1", what=f"{extra} bytes beside the weights")


def _right_order(zero_bubble_order, p, m):
    where = f"{p} ranks, {m} micro-batches"
    orders = [zero_bubble_order(rank, p, m) for rank in range(p)]
    if any(action and action[0] == "B" for order in orders if order for action in order):
        raise Wrong("whole-backwards", where=where)
    if all(orders):
        number = 1 + max((a[1] for o in orders for a in o if len(a) > 1 and isinstance(a[1], int)), default=-1)
        if number != m:
            problem = f"there are {m} micro-batches, but the orders do {number}"
            raise Wrong("not-a-step", where=where, problem=problem)
    found = data.simulated(orders, {"F": 1.0, "I": 1.0, "W": 1.0}, where)
    for rank, kept in enumerate(found.in_flight):
        if kept > p:
            raise Wrong(
                "weights-too-late", expected=f"at most {p}", got=kept, where=where, rank=rank, found=kept, most=p
            )
    for forward, half, weight in ((1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.2, 0.8), (3.0, 2.0, 1.0)):
        costs = {"F": forward, "I": half, "W": weight}
        found = data.simulated(orders, costs, where)
        idle = found.seconds - found.busy[0]
        at_once = (p - 1) * (forward + half)
        wanted = (p - 1) * (forward + half - weight) if m >= p else at_once + (p - 1) * weight
        if idle > wanted + 1e-6:
            slug = "weights-at-once" if all(map(_at_once, orders)) else "bubble-left"
            with_costs = f"{where}, F {forward} s, I {half} s, W {weight} s"
            raise Wrong(slug, where=with_costs, found=idle, wanted=wanted)


def _at_once(order):
    """Whether each W comes right after its I."""
    return all(
        after[:2] == ("W", before[1]) for before, after in zip(order, [*order[1:], ("", -1)]) if before[0] == "I"
    )
