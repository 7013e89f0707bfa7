"""Balise 4: the two halves of a backward, and ZB-H1."""

import torch
from torch import nn

from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules", 4)

KEEP = "        self.kept[k] = [(*pair, grad) for pair, grad in zip(with_weights, grads)]\n"
ADD = (
    "                if weight.grad is None:\n                    weight.grad = found\n"
    "                else:\n                    weight.grad += found\n"
)
PUT_OFF = '        if k >= rank:\n            order.append(("W", k - rank))\n'
REST = '[("W", k) for k in range(max(0, n_micro_batches - rank), n_micro_batches)]'

bank.hint("wrong-output", "forward({k}, x) does not give the module's output.")
bank.slip("wrong-output", ("        return y.detach()\n", "        return x.detach()\n"), variant=True)

bank.hint("wrong-input-gradient", "backward_input does not give the gradient of the input.")
bank.slip("wrong-input-gradient", ("        return grad_x\n", "        return grads[0]\n"))
bank.slip("wrong-input-gradient", ("[x, *outputs], grad_y,", "[x, *outputs], torch.ones_like(grad_y),"), variant=True)

bank.hint(
    "micro-batches-mixed",
    "That is the result for another micro-batch: keep everything that belongs to k under k.",
)
bank.slip(
    "micro-batches-mixed",
    ("self.kept[k] = x, y", "self.last = x, y"),
    ("with_weights = self.kept[k]", "with_weights = self.last"),
    variant=True,
)

bank.hint(
    "not-added",
    ".grad holds only the last micro-batch: gradients must add up over micro-batches, as with backward().",
)
bank.slip("not-added", (ADD, "                weight.grad = found\n"), variant=True)

bank.hint("wrong-weight-gradient", "After backward_weight, .grad is not what a whole backward gives.")
bank.slip(
    "wrong-weight-gradient",
    (ADD, "                weight.grad = found if weight.grad is None else (weight.grad + found) / 2\n"),
    variant=True,
)

bank.hint("weights-missing", "After backward_weight a parameter has no gradient.")
bank.slip("weights-missing", (ADD, "                weight.gradient = found\n"), variant=True)

bank.hint(
    "kept-for-ever",
    "Something of micro-batch {k} is still kept after its backward_weight: {what}. Remove it from what the stage "
    "holds.",
)
bank.slip("kept-for-ever", ("self.kept.pop(k):", "self.kept[k]:"), variant=True)

bank.hint(
    "weights-at-once",
    "Each rank is idle for {found:.3g} s, where {wanted:.3g} s are possible. The weight gradients come right after "
    "the input gradients, so the stage before has to wait. Delay them: on rank r, by r micro-batches.",
)
bank.slip("weights-at-once", (PUT_OFF, '        order.append(("W", k))\n'), (" + " + REST, ""), variant=True)

bank.hint(
    "weights-too-late",
    "Rank {rank} keeps {found} micro-batches at once, until their W, but {most} are enough. Begin with p − r − 1 "
    "forwards, as 1F1B does, and delay weight gradients by r micro-batches, no more.",
)
bank.slip("weights-too-late", (PUT_OFF, ""), (REST, '[("W", k) for k in range(n_micro_batches)]'))

bank.hint("whole-backwards", "The order contains a whole backward, B. Here, backward comes in two halves, I and W.")
bank.slip(
    "whole-backwards",
    ('order.append(("I", k))', 'order.append(("B", k))'),
    (PUT_OFF, ""),
    (" + " + REST, ""),
    variant=True,
)
bank.slip("not-a-step", (" + " + REST, ""))
bank.slip("not-a-step", (PUT_OFF, '        if k >= rank:\n            order.insert(len(order) - 2, ("W", k - rank))\n'))

bank.hint(
    "bubble-left",
    "Each rank is idle for {found:.3g} s, where {wanted:.3g} s are possible. As in 1F1B, rank r begins with p − r − "
    "1 forwards; its weight gradients come r micro-batches late.",
)
bank.slip("bubble-left", ("if k >= rank:\n            order.append((\"W\", k - rank))", "late = min(rank, 1)\n        if k >= late:\n            order.append((\"W\", k - late))"),
          ("max(0, n_micro_batches - rank)", "max(0, n_micro_batches - min(rank, 1))"), variant=True)  # fmt: skip
bank.slip("deadlock", ("ahead = min(n_ranks - rank - 1, n_micro_batches)", "ahead = min(rank, n_micro_batches)"))
bank.slip(
    "weights-too-late",
    ("ahead = min(n_ranks - rank - 1, n_micro_batches)", "ahead = min(2 * (n_ranks - rank - 1), n_micro_batches)"),
    variant=True,
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


bank.hint(
    "weights-in-input",
    "backward_input already writes to .grad of the weights. torch.autograd.grad computes gradients without touching "
    ".grad.",
)
bank.several("weights-in-input", TouchesGrad, order_from_1f1b, variant=True)

bank.hint(
    "weights-computed-early",
    "backward_input did {found} matrix products, but the gradient of the input needs only {wanted}. It computes "
    "weight gradients, runs the forward again, or goes back through the graph twice. One call gives all the "
    "gradients you need.",
)
bank.several("weights-computed-early", AllAtOnce, order_from_1f1b, variant=True)

bank.hint(
    "chain-twice",
    "backward_weight did {found} matrix products, but the weights' gradients need only {wanted}: it goes through the "
    "chain of layers again. In the first half, keep the gradients of the outputs of the layers that have parameters.",
)
bank.several("chain-twice", Twice, order_from_1f1b, variant=True)

bank.hint("forward-twice", "forward did {found} matrix products, but the module has {wanted} linear layers.")
bank.several("forward-twice", ForwardTwice, order_from_1f1b, variant=True)

bank.hint("frozen-trained", "A frozen parameter (requires_grad=False) got a gradient.")
bank.several("frozen-trained", FrozenToo, order_from_1f1b, variant=True)

bank.hint(
    "library-called",
    "PyTorch has such a split internally. Write it yourself here: torch.autograd.grad is all you need.",
)
bank.several("library-called", OfTheLibrary, order_from_1f1b, variant=True)
bank.several("planner-called", ByHand, order_of_planner)
bank.several(None, ByHand, order_from_1f1b)
bank.several(None, Pieces, order_with_stages)
bank.several(None, Pieces, order_on_1f1b)

bank.hint(
    "half-not-on-gpu",
    "On a GPU, something is in the CPU's memory: {error}. Make new tensors on the gradient's device: "
    "torch.zeros_like(weight).",
)
bank.slip("half-not-on-gpu", ("                    weight.grad = found", "                    weight.grad = torch.zeros(weight.shape, dtype=weight.dtype)\n                    weight.grad += found"), variant=True)  # fmt: skip
