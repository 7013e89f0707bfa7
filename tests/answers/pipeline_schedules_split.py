"""Balise 4: the two halves of a backward, and ZB-H1."""

import torch
from torch import nn

from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

KEEP = "        self.kept[k] = [(*pair, grad) for pair, grad in zip(with_weights, grads)]\n"
ADD = (
    "                if weight.grad is None:\n                    weight.grad = found\n"
    "                else:\n                    weight.grad += found\n"
)
PUT_OFF = '        if k >= rank:\n            order.append(("W", k - rank))\n'
REST = '[("W", k) for k in range(max(0, n_micro_batches - rank), n_micro_batches)]'

bank.slip(4, "wrong-output", ("        return y.detach()\n", "        return x.detach()\n"))
bank.slip(4, "wrong-input-gradient", ("        return grad_x\n", "        return grads[0]\n"))
bank.slip(4, "wrong-input-gradient", ("[x, *outputs], grad_y,", "[x, *outputs], torch.ones_like(grad_y),"))
bank.slip(
    4,
    "micro-batches-mixed",
    ("self.kept[k] = x, y", "self.last = x, y"),
    ("with_weights = self.kept[k]", "with_weights = self.last"),
)
bank.slip(4, "not-added", (ADD, "                weight.grad = found\n"))
bank.slip(
    4,
    "wrong-weight-gradient",
    (ADD, "                weight.grad = found if weight.grad is None else (weight.grad + found) / 2\n"),
)
bank.slip(4, "weights-missing", (ADD, "                weight.gradient = found\n"))
bank.slip(4, "kept-for-ever", ("self.kept.pop(k):", "self.kept[k]:"))
bank.slip(4, "weights-at-once", (PUT_OFF, '        order.append(("W", k))\n'), (" + " + REST, ""))
bank.slip(4, "weights-too-late", (PUT_OFF, ""), (REST, '[("W", k) for k in range(n_micro_batches)]'))
bank.slip(4, "whole-backwards", ('order.append(("I", k))', 'order.append(("B", k))'), (PUT_OFF, ""), (" + " + REST, ""))
bank.slip(4, "not-a-step", (" + " + REST, ""))
bank.slip(
    4, "not-a-step", (PUT_OFF, '        if k >= rank:\n            order.insert(len(order) - 2, ("W", k - rank))\n')
)
bank.slip(4, "bubble-left", ("if k >= rank:\n            order.append((\"W\", k - rank))", "late = min(rank, 1)\n        if k >= late:\n            order.append((\"W\", k - late))"),
          ("max(0, n_micro_batches - rank)", "max(0, n_micro_batches - min(rank, 1))"))  # fmt: skip
bank.slip(4, "deadlock", ("ahead = min(n_ranks - rank - 1, n_micro_batches)", "ahead = min(rank, n_micro_batches)"))
bank.slip(
    4,
    "weights-too-late",
    ("ahead = min(n_ranks - rank - 1, n_micro_batches)", "ahead = min(2 * (n_ranks - rank - 1), n_micro_batches)"),
)


class TouchesGrad:
    """.backward() as first half, and a second half that does nothing."""

    def __init__(self, module):
        self.module, self.kept = module, {}

    def forward(self, k, x):
        x = x.detach().requires_grad_()
        y = self.module(x)
        self.kept[k] = x, y
        return y.detach()

    def backward_input(self, k, grad_y):
        x, y = self.kept.pop(k)
        y.backward(grad_y)
        return x.grad

    def backward_weight(self, k):
        pass


class AllAtOnce(TouchesGrad):
    """autograd.grad of everything in the first half."""

    def backward_input(self, k, grad_y):
        x, y = self.kept.pop(k)
        weights = [p for p in self.module.parameters() if p.requires_grad]
        grad_x, *self.kept[k] = torch.autograd.grad(y, [x, *weights], grad_y)
        return grad_x

    def backward_weight(self, k):
        weights = [p for p in self.module.parameters() if p.requires_grad]
        for p, g in zip(weights, self.kept.pop(k)):
            p.grad = g if p.grad is None else p.grad + g


class Twice(TouchesGrad):
    """The chain once for the input, once more for the weights."""

    def backward_input(self, k, grad_y):
        x, y = self.kept[k]
        self.kept[k] = y, grad_y
        return torch.autograd.grad(y, x, grad_y, retain_graph=True)[0]

    def backward_weight(self, k):
        y, grad_y = self.kept.pop(k)
        weights = [p for p in self.module.parameters() if p.requires_grad]
        for p, g in zip(weights, torch.autograd.grad(y, weights, grad_y)):
            p.grad = g if p.grad is None else p.grad + g


class ForwardTwice(Twice):
    def forward(self, k, x):
        self.module(x)
        return super().forward(k, x)


class ByHand:
    """Linear layers by their formula; the others by autograd."""

    def __init__(self, module):
        self.layers, self.inputs, self.work = list(module), {}, {}

    def forward(self, k, x):
        self.inputs[k] = []
        for layer in self.layers:
            x = x.detach()
            if isinstance(layer, nn.Linear):
                self.inputs[k].append((x, None))
                with torch.no_grad():
                    x = layer(x)
            else:
                x.requires_grad_()
                y = layer(x)
                self.inputs[k].append((x, y))
                x = y
        return x.detach()

    def backward_input(self, k, grad_y):
        self.work[k] = []
        for layer, (x, y) in zip(reversed(self.layers), reversed(self.inputs.pop(k))):
            if y is None:
                self.work[k].append((layer, x, grad_y))
                grad_y = grad_y @ layer.weight.detach()
            else:
                (grad_y,) = torch.autograd.grad(y, x, grad_y)
        return grad_y

    def backward_weight(self, k):
        for layer, x, g in self.work.pop(k):
            x, g = x.flatten(0, -2), g.flatten(0, -2)
            if layer.weight.requires_grad:
                layer.weight.grad = g.T @ x if layer.weight.grad is None else layer.weight.grad.add_(g.T @ x)
            if layer.bias is not None and layer.bias.requires_grad:
                layer.bias.grad = g.sum(0) if layer.bias.grad is None else layer.bias.grad.add_(g.sum(0))


class OfTheLibrary(TouchesGrad):
    def backward_input(self, k, grad_y):
        from torch.distributed.pipelining._backward import stage_backward_input

        x, y = self.kept[k]
        (grad,), self.kept[k] = stage_backward_input([y], [grad_y], [x], self.module.parameters())
        return grad


class FrozenToo(ByHand):
    def backward_weight(self, k):
        for layer, x, g in self.work.pop(k):
            x, g = x.flatten(0, -2), g.flatten(0, -2)
            for p, value in ((layer.weight, g.T @ x), (layer.bias, g.sum(0))):
                if p is not None:
                    p.grad = value if p.grad is None else p.grad + value


class Pieces:
    """Each layer has a graph of its own, cut at detached inputs."""

    def __init__(self, module):
        self.module, self.pieces, self.late = module, {}, {}

    def forward(self, k, x):
        pieces = []
        for layer in self.module:
            x = x.detach().requires_grad_(True)
            y = layer(x)
            pieces.append((layer, x, y))
            x = y
        self.pieces[k] = pieces
        return y

    def backward_input(self, k, grad_y):
        late = []
        for layer, x, y in reversed(self.pieces.pop(k)):
            weights = [p for p in layer.parameters() if p.requires_grad]
            late.append((y, weights, grad_y))
            (grad_y,) = torch.autograd.grad(y, x, grad_y, retain_graph=bool(weights))
        self.late[k] = late
        return grad_y

    def backward_weight(self, k):
        for y, weights, grad in self.late.pop(k):
            if weights:
                torch.autograd.backward(y, grad, inputs=weights)


def order_from_1f1b(rank, n_ranks, n_micro_batches):
    warm = min(n_ranks - 1 - rank, n_micro_batches)
    base = [("F", k) for k in range(warm)]
    for k in range(n_micro_batches):
        base += [("F", k + warm)] * (k + warm < n_micro_batches) + [("I", k)]
    order, waiting = [], []
    for kind, k in base:
        order.append((kind, k))
        if kind == "I":
            waiting.append(k)
            if len(waiting) > rank:
                order.append(("W", waiting.pop(0)))
    return order + [("W", k) for k in waiting]


def order_with_stages(rank, n_ranks, n_micro_batches):
    return [(*action, rank) for action in order_from_1f1b(rank, n_ranks, n_micro_batches)]


def order_on_1f1b(rank, n_ranks, n_micro_batches):
    from dlojz_tp import planner

    order, done = [], []
    for kind, k in planner.one_f_one_b(n_ranks, n_micro_batches)[rank]:
        order.append(("I" if kind == "B" else kind, k))
        done += [k] if kind == "B" else []
        if kind == "B" and len(done) > rank:
            order.append(("W", done[-1 - rank]))
    left = done[len(done) - min(rank, len(done)) :]
    return tuple(order + [("W", k) for k in left])


def order_of_planner(rank, n_ranks, n_micro_batches):
    from dlojz_tp import planner

    return planner.zero_bubble_h1(n_ranks, n_micro_batches)[rank]


bank.several(4, "weights-in-input", TouchesGrad, order_from_1f1b)
bank.several(4, "weights-computed-early", AllAtOnce, order_from_1f1b)
bank.several(4, "chain-twice", Twice, order_from_1f1b)
bank.several(4, "forward-twice", ForwardTwice, order_from_1f1b)
bank.several(4, "frozen-trained", FrozenToo, order_from_1f1b)
bank.several(4, "library-called", OfTheLibrary, order_from_1f1b)
bank.several(4, "planner-called", ByHand, order_of_planner)
bank.several(4, None, ByHand, order_from_1f1b)
bank.several(4, None, Pieces, order_with_stages)
bank.several(4, None, Pieces, order_on_1f1b)
bank.slip(
    4, "half-not-on-gpu", ("                    weight.grad = found", "                    weight.grad = torch.zeros(weight.shape, dtype=weight.dtype)\n                    weight.grad += found")
)  # fmt: skip
