"""Balise 7: bytes that autograd keeps; the recomputing stage is in recomputing.py."""

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, judged
from dlojz_tp.judging.checks.pipeline_under_the_hood import recomputing
from dlojz_tp.judging.checks.pipeline_under_the_hood.recomputing import gradients, one_thread
from dlojz_tp.judging.probes.seeded import seeded

WIDE, HIDDEN, OUT = 16, 24, 8
FLOAT = 8  # bytes of a float64
ORDERS = {  # {name: (actions, most micro-batches in flight)}
    "naive twice, one after the other": ("F0 B0 F1 B1 F2 B2 F3 B3", 1),
    "GPipe": ("F0 F1 F2 F3 B3 B2 B1 B0", 4),
    "1F1B": ("F0 F1 F2 B0 F3 B1 B2 B3", 3),
}


class Layers(nn.Module):
    """Two linear layers in float64; what autograd keeps of it is known: x, h and z."""

    def __init__(self):
        super().__init__()
        with seeded(5):
            self.first = nn.Parameter(torch.randn(HIDDEN, WIDE).double() / 4)
            self.second = nn.Parameter(torch.randn(OUT, HIDDEN).double() / 4)

    def forward(self, x):
        h = torch.tanh(x @ self.first.t())
        z = h @ self.second.t()
        return z * z


def held(rows: int, widths=(WIDE, HIDDEN, OUT)) -> int:
    """Bytes of x, h and z, for a micro-batch of so many rows."""
    return rows * sum(widths) * FLOAT


def inputs(rows: int, seed: int = 0) -> torch.Tensor:
    """A micro-batch that needs a gradient, as on a stage in the middle."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDE, generator=generator, dtype=torch.float64).requires_grad_()


def observe(SavedBytes):  # noqa: N803
    """`now` and `peak` of the meter after known operations."""
    yield forward(SavedBytes)
    yield backward(SavedBytes)
    for name, (order, most) in ORDERS.items():
        yield in_order(SavedBytes, name, order, most)
    yield kept(SavedBytes)
    yield views(SavedBytes)


def forward(SavedBytes):  # noqa: N803
    stage = Layers()
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(6))
        seen = {"forward": meter.now, "forward peak": meter.peak}
    with SavedBytes([]):
        y = inputs(6).tanh()
    first, again = y.grad_fn._saved_result, y.grad_fn._saved_result
    # at each look the same memory, and not that of y
    return seen | {"copy": first.data_ptr() == again.data_ptr() != y.data_ptr()}


def backward(SavedBytes):  # noqa: N803
    stage = Layers()
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(6))
        y.sum().backward()
        now = meter.now
        y = stage(inputs(3))
    del y
    return {"backward": now, "backward peak": meter.peak, "gradients": gradients(stage)}


def plain_gradients(_):
    stage = Layers()
    stage(inputs(6)).sum().backward()
    return gradients(stage)


def in_order(SavedBytes, name, order, most):  # noqa: N803
    """`now` after each action of an order on one stage, and the peak."""
    one = inputs(5).detach()  # a buffer for all inputs: when it is used again, its address surely is an old one
    stage, outputs, found = Layers(), {}, []
    with SavedBytes(stage.parameters()) as meter:
        for kind, k in order.split():
            if kind == "F":
                x = one.detach().requires_grad_() if most == 1 else inputs(5, seed=int(k))
                outputs[k] = stage(x)
                del x
            else:
                outputs.pop(k).sum().backward()
            found.append(meter.now)
    return {name: found, (name, "peak"): meter.peak}


def kept(SavedBytes):  # noqa: N803
    """A graph that is kept, gone through again, and one that is dropped."""
    stage = Layers()
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(4))
        y.sum().backward(retain_graph=True)
        seen = {"retained": meter.now}
        y.sum().backward()
        seen["again"] = meter.now
        y = stage(inputs(4))
        del y
    return seen | {"dropped": meter.now}


def views(SavedBytes):  # noqa: N803
    """Micro-batches that are rows and columns of one batch; a storage that two graphs hold."""
    stage, batch = Layers(), torch.randn(8, WIDE + 4, dtype=torch.float64)
    parts = [part[:, :WIDE] for part in batch.split(4)]
    with SavedBytes(stage.parameters()) as meter:
        first = stage(parts[0])
        seen = {"view": meter.now}
        second = stage(parts[1])
        seen["views"] = meter.now
        first.sum().backward()
        seen["one left"] = meter.now
        second.sum().backward()
    return seen | {"none left": meter.now}


def now(claim, key, due, where, hint="wrong-bytes"):
    """A Value at bytes, those of `now` if nothing else is said."""
    where = where if where.startswith("`") else f"`now` {where}"
    return Value(claim, key, due, hint, fields=lambda seen, due: {"seen": seen, "truth": due, "where": where})


def nows(claim, name):
    """Looks at an order: bytes after each action, and their peak."""
    order, most = ORDERS[name]
    begun = [order[: 3 * k + 1].count("F") for k in range(8)]
    ended = [order[: 3 * k + 1].count("B") for k in range(8)]

    def first(seen, due):
        return next(k for k, pair in enumerate(zip(seen, due, strict=True)) if pair[0] != pair[1])

    def hint(seen, due):
        k = first(seen, due)
        if seen[k] < due[k]:
            return "seen-for-ever"
        return "saved-for-ever" if seen[k] == held(5) * begun[k] else "wrong-bytes"

    def fields(seen, due):
        k = first(seen, due)
        told = {"expected": due[k], "got": seen[k], "seen": seen[k], "truth": due[k]}
        return told | {"where": f"`now` after {order.split()[k]} of {order} ({name})"}

    return [
        Look(claim, name, [held(5) * (b - e) for b, e in zip(begun, ended, strict=True)], hint, fields=fields),
        now("", (name, "peak"), most * held(5), f"`peak` after {order} ({name})", "peak-lost"),
    ]


WHOLE, EACH = 8 * (WIDE + 4) * FLOAT, held(4, (HIDDEN, OUT))  # of a batch, and of a micro-batch that is a view of it
LOOKS = [
    now("what one forward keeps: each storage once, no weights", "forward", held(6), "after one forward"),
    now("", "forward peak", held(6), "`peak` after one forward", "peak-lost"),
    Look("", "copy", False, "copy-kept"),
    now("backward frees it, and the peak stays", "backward", 0, "after backward"),
    now("", "backward peak", held(6), "`peak` after backward, and a smaller forward", "peak-lost"),
    Look("", "gradients", plain_gradients, "hooks-spoil"),
    *nows("the peaks of naive, GPipe and 1F1B; memory that is reused", "naive twice, one after the other"),
    *nows("", "GPipe"), *nows("", "1F1B"),
    now("a graph that is kept, a graph that is dropped, views of one storage; gradients as without hooks", "retained",
        held(4), "after backward(retain_graph=True)", "freed-when-read"),
    now("", "again", 0, "after the second backward of one graph"),
    now("", "dropped", 0, "after an output was dropped unused", "own-graph"),
    now("", "view", WHOLE + EACH, "of a micro-batch that is a view of the whole batch"),
    now("", "views", WHOLE + 2 * EACH, "of two micro-batches that are views of one batch"),
    now("", "one left", WHOLE + EACH, "when one of the two is done"),
    now("", "none left", 0, "when both are done"),
]  # fmt: skip


def balise_7(SavedBytes, recompute):  # noqa: N803
    """The meter on known operations and orders, then the recomputing stage."""
    with one_thread():
        yield from judged(LOOKS, observe, SavedBytes)
        yield from recomputing.recomputing(recompute)
