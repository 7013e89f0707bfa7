"""Balise 7: bytes that autograd keeps; the recomputing stage is in recomputing.py."""

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood import recomputing
from dlojz_tp.checks.pipeline_under_the_hood.recomputing import gradients, one_thread
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "nothing-counted": "A forward has run inside the with block, but `now` is still 0. Count in pack().",
    "parameters-counted": "You count {seen} bytes, but activations take {truth}: the difference is weights. They "
                          "stay in memory anyway. A linear layer saves a transposed view of its weight, which is "
                          "another object with the same memory: compare addresses.",
    "storage-counted-twice": "You count {seen} bytes, but {truth} are held. One operation's output is the next "
                             "one's input: both save it, but it is one storage. Count it when its first holder "
                             "comes. Identify it by untyped_storage().data_ptr(): the data_ptr() of a view is "
                             "where the view begins.",
    "elements-counted": "These are elements, not bytes: a float64 has 8 bytes. A storage knows its nbytes().",
    "view-bytes": "A view keeps all the memory that it looks into: {truth} bytes are held here, but you count "
                  "{seen}. Take size and address from untyped_storage().",
    "wrong-bytes": "These aren't the bytes that are held.",
    "saved-for-ever": "Backward has freed what it used, but `now` didn't go down. When the graph lets go of a "
                      "Kept, the Kept is gone: weakref.finalize(kept, function, …) calls a function at that moment.",
    "own-graph": "An output was dropped without its backward, and {seen} bytes are never freed: tanh saves its own "
                 "result, which holds the graph that holds it. Keep tensor.detach(): the same memory, without the "
                 "graph.",
    "peak-of-all": "`peak` is the sum of everything that was ever saved. It must be the highest value that `now` "
                   "has had.",
    "peak-lost": "`now` is right, but `peak` isn't the highest value that `now` has had.",
    "freed-when-read": "backward(retain_graph=True) reads what was saved and keeps it, so nothing is freed yet. "
                       "Count down when the Kept itself goes, not in unpack().",
    "given-back-twice": "{seen} bytes: you subtract a storage once for each of its holders. It is counted once, so "
                        "subtract it once.",
    "first-one-gone": "You count {seen} bytes while {truth} are still held: a storage is free when its last holder "
                      "is gone, not its first.",
    "seen-for-ever": "The second micro-batch isn't counted in full: freed memory is reused, at the same address. "
                     "Forget an address when its last holder is gone.",
    "copy-kept": "Backward gets a copy, and the original, which you counted, is gone by then. Keep "
                 "tensor.detach(): the same memory, without the graph.",
    "hooks-spoil": "With the hooks, the gradients differ from those without: unpack() must return the tensor as it "
                   "was saved.",
} | recomputing.HINTS  # fmt: skip

WIDE, HIDDEN, OUT = 16, 24, 8
FLOAT = 8  # bytes of a float64


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


def held(rows: int) -> dict[str, int]:
    """Bytes of x, h and z, for a micro-batch of so many rows."""
    return {"x": rows * WIDE * FLOAT, "h": rows * HIDDEN * FLOAT, "z": rows * OUT * FLOAT}


def inputs(rows: int, seed: int = 0) -> torch.Tensor:
    """A micro-batch that needs a gradient, as on a stage in the middle."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDE, generator=generator, dtype=torch.float64).requires_grad_()


def balise_7(SavedBytes, recompute):  # noqa: N803
    """The meter on known operations and orders, then the recomputing stage."""
    with one_thread():
        yield "what one forward keeps: each storage once, no weights"
        _forward(SavedBytes)
        yield "backward frees it, and the peak stays"
        _backward(SavedBytes)
        yield "the peaks of naive, GPipe and 1F1B; memory that is reused"
        _orders(SavedBytes)
        yield "a graph that is kept, a graph that is dropped, views of one storage; gradients as without hooks"
        _kept(SavedBytes)
        _views(SavedBytes)
        yield from recomputing.recomputing(recompute)


def _forward(SavedBytes):  # noqa: N803
    stage, rows = Layers(), 6
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(rows))
        got = meter.now
    parts = held(rows)
    truth, weights = sum(parts.values()), FLOAT * (WIDE * HIDDEN + HIDDEN * OUT)
    doubled = truth + parts["h"] + parts["z"]
    known = {
        0: "nothing-counted", truth + weights: "parameters-counted", doubled + weights: "parameters-counted",
        doubled: "storage-counted-twice", truth // FLOAT: "elements-counted", doubled // FLOAT: "elements-counted",
    }  # fmt: skip
    _compare(got, truth, known, "after one forward")
    _peak(meter, truth, truth, "after one forward")
    with SavedBytes([]):
        y = inputs(rows).tanh()
    first, again = y.grad_fn._saved_result, y.grad_fn._saved_result
    if first.data_ptr() == again.data_ptr() != y.data_ptr():  # at each look the same memory, and not that of y
        raise Wrong("copy-kept", where="what tanh saves")


def _compare(got, truth, known, where):
    if isinstance(got, bool) or not isinstance(got, int) or got != truth:
        slug = known.get(got, "wrong-bytes") if isinstance(got, int) else "wrong-bytes"
        if slug == "wrong-bytes" and isinstance(got, int) and got < 0:
            slug = "given-back-twice"
        raise Wrong(slug, expected=truth, got=got, where=f"`now` {where}", seen=got, truth=truth)


def _peak(meter, truth, total, where):
    if meter.peak != truth:
        slug = "peak-of-all" if meter.peak == total else "peak-lost"
        raise Wrong(slug, expected=truth, got=meter.peak, where=f"`peak` {where}")


def _backward(SavedBytes):  # noqa: N803
    stage, rows = Layers(), 6
    parts = held(rows)
    truth = sum(parts.values())
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(rows))
        y.sum().backward()
        got = meter.now
        y = stage(inputs(rows // 2))
    _compare(got, 0, {truth: "saved-for-ever"}, "after backward")
    _peak(meter, truth, truth + sum(held(rows // 2).values()), "after backward, and a smaller forward")
    del y
    plain = gradients(stage)
    stage.zero_grad()
    stage(inputs(rows)).sum().backward()
    if not close(plain, gradients(stage)):
        raise Wrong("hooks-spoil", expected=stage.first.grad, got=plain[0], where="the first layer's weight")


def _orders(SavedBytes):  # noqa: N803
    """Orders of actions on one stage; `now` after each of them."""
    rows = 5
    one = inputs(rows).detach()  # a buffer for all inputs: when it is used again, its address surely is an old one
    each = sum(held(rows).values())
    for name, order, most in (
        ("naive twice, one after the other", "F0 B0 F1 B1 F2 B2 F3 B3", 1),
        ("GPipe", "F0 F1 F2 F3 B3 B2 B1 B0", 4),
        ("1F1B", "F0 F1 F2 B0 F3 B1 B2 B3", 3),
    ):
        stage, outputs, in_flight, done = Layers(), {}, 0, 0
        with SavedBytes(stage.parameters()) as meter:
            for action in order.split():
                kind, k = action[0], int(action[1:])
                if kind == "F":
                    x = one.detach().requires_grad_() if most == 1 else inputs(rows, seed=k)
                    outputs[k] = stage(x)
                    del x
                    in_flight, done = in_flight + 1, done + 1
                else:
                    outputs.pop(k).sum().backward()
                    in_flight -= 1
                known = {done * each: "saved-for-ever"}
                if meter.now < in_flight * each:
                    known[meter.now] = "seen-for-ever"
                _compare(meter.now, in_flight * each, known, f"after {action} of {order} ({name})")
            _peak(meter, most * each, 4 * each, f"after {order} ({name})")


def _kept(SavedBytes):  # noqa: N803
    stage, rows = Layers(), 4
    truth = sum(held(rows).values())
    with SavedBytes(stage.parameters()) as meter:
        y = stage(inputs(rows))
        y.sum().backward(retain_graph=True)
        if meter.now != truth:
            raise Wrong(
                "freed-when-read", expected=truth, got=meter.now, where="`now` after backward(retain_graph=True)"
            )
        y.sum().backward()
        _compare(meter.now, 0, {truth: "saved-for-ever"}, "after the second backward of one graph")
        y = stage(inputs(rows))
        del y
        _compare(meter.now, 0, {meter.now: "own-graph"}, "after an output was dropped unused")


def _views(SavedBytes):  # noqa: N803
    """Micro-batches that are rows and columns of one batch; a storage that two graphs hold."""
    stage, batch = Layers(), torch.randn(8, WIDE + 4, dtype=torch.float64)
    whole, each = batch.numel() * FLOAT, held(4)["h"] + held(4)["z"]
    parts = [part[:, :WIDE] for part in batch.split(4)]
    with SavedBytes(stage.parameters()) as meter:
        first = stage(parts[0])
        known = {each + 4 * WIDE * FLOAT: "view-bytes"}
        _compare(meter.now, whole + each, known, "of a micro-batch that is a view of the whole batch")
        second = stage(parts[1])
        known = {2 * (whole + each): "storage-counted-twice"}
        _compare(meter.now, whole + 2 * each, known, "of two micro-batches that are views of one batch")
        first.sum().backward()
        _compare(meter.now, whole + each, {each: "first-one-gone"}, "when one of the two is done")
        second.sum().backward()
        _compare(meter.now, 0, {}, "when both are done")
