"""Answers to 06_compile, balise 3: one graph, no break."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("06_compile", 3)


WHERE = "h = F.gelu(torch.where(some, h / torch.where(some, square, 1.0).sqrt(), h))"
SQUARE = "        square = h.square().sum()\n        some = square > 0\n        " + WHERE + "\n"
GELU = "        h = F.gelu(h)\n"
PEAK = "self.peak.copy_(h.detach().max())"
RETURN = "return self.second(h) * (1 + (h > h.mean()).to(h.dtype).mean())"

bank.hint("layers-differ", "Mended must keep Chatty's layers under their names, first (16 to 32) and second (32 to 4): "
          "{error}")  # fmt: skip
bank.slip("layers-differ", ("nn.Linear(16, 32)", "nn.Linear(16, 64)"), ("nn.Linear(32, 4)", "nn.Linear(64, 4)"))
bank.slip("layers-differ", ("self.first", "self.layer1"), variant=True)
bank.hint("no-buffer", "There is no buffer `peak` of shape (). Create one with register_buffer in __init__.", edge=True)
bank.slip("no-buffer", ('self.register_buffer("peak", torch.zeros(()))', "self.peak = torch.zeros(())"))
bank.slip("no-buffer", ("torch.zeros(())", "torch.zeros(1)"), variant=True)
bank.hint("more-state", "{what} is more than Chatty's two layers and the buffer `peak`.", edge=True)
bank.slip(
    "more-state",
    ("self.register_buffer", "self.scale = nn.Parameter(torch.ones(()))\n        self.register_buffer"),
    variant=True,
)
bank.slip("nothing-returned", ("        return self.second", "        self.second"))
bank.hint("logits-differ", "The logits are not those of Chatty.")
bank.slip("logits-differ", (RETURN, RETURN + " + 1"))
bank.slip("logits-differ", (RETURN, "return h"), variant=True)
bank.hint("scale-missing", "The logits lack the last factor: 1 + the share of activations above their mean.")
bank.slip("scale-missing", (RETURN, "return self.second(h)"))
bank.hint("share-as-count", "The last factor is 1 + the *share* of activations above the mean, not their number.")
bank.slip("share-as-count", (".to(h.dtype).mean())", ".sum())"))
bank.hint("never-divided", "The numbers are not divided by their norm when it is larger than 0.")
bank.slip("never-divided", (SQUARE, GELU))
bank.hint("no-gelu-here", "The activation is missing: apply F.gelu after the division.")
bank.slip("no-gelu-here", ("F.gelu(", "("))
bank.hint("gelu-before", "Apply the activation after the division by the norm, not before it.")
bank.slip("gelu-before", ("self.first(x)\n", "F.gelu(self.first(x))\n"), ("h = F.gelu(torch", "h = (torch"))
bank.hint("row-norms", "The norm is taken over all numbers of the batch together, not for each row.")
bank.slip("row-norms", (SQUARE, "        h = F.normalize(h, dim=1)\n" + GELU))
bank.hint("gradients-differ", "The logits are right, but their gradients are not: a part was cut off from the graph "
          "(detach, no_grad, .data).")  # fmt: skip
bank.slip(
    "gradients-differ",
    ("/ torch.where(some, square, 1.0).sqrt()", "/ torch.where(some, square, 1.0).sqrt().detach()"),
)
bank.slip("gradients-differ", ("self.first(x)", "self.first(x.detach())"), variant=True)
bank.hint("nan-logits", "When all numbers are zero, the logits are NaN: zero is divided by zero.", edge=True)
bank.slip("nan-logits", (SQUARE, "        h = h / h.norm()\n" + GELU))
bank.hint("nan-gradients", "When all numbers are zero, some gradients are NaN. torch.where sends gradients through "
          "both sides, and 0 × ∞ is NaN: make the divisor harmless *before* you take the root, and before the division.", edge=True)  # fmt: skip
bank.slip("nan-gradients", (SQUARE, "        size = h.norm()\n        h = torch.where(size > 0, h / size, h)\n" + GELU))
bank.slip(
    "nan-gradients",
    (SQUARE, "        size = h.square().sum().sqrt()\n        h = torch.where(size > 0, h / size, h)\n" + GELU),
)
bank.slip(
    "nan-gradients",
    (SQUARE, "        size = h.square().sum().sqrt()\n        h = h / torch.where(size > 0, size, 1.0)\n" + GELU),
    variant=True,
)
bank.hint("epsilon", "You add a small number to the norm, or keep the norm above one. Small numbers then come out too "
          "small: the logits must be those of Chatty for every input.", edge=True)  # fmt: skip
bank.slip("epsilon", (SQUARE, "        h = h / (h.square().sum() + 1e-6).sqrt()\n" + GELU))
bank.slip("epsilon", (SQUARE, "        h = h / h.norm().clamp_min(1e-3)\n" + GELU))
bank.hint("zero-gradients", "When all numbers are zero, some gradients are wrong. Chatty divides by nothing then: h "
          "stays as it is, and so does its gradient.", edge=True)  # fmt: skip
bank.slip("zero-gradients", (SQUARE, "        h = h / h.norm().clamp_min(1e-12)\n" + GELU))
bank.slip("zero-gradients", (SQUARE, "        h = F.normalize(h.flatten(), dim=0).view_as(h)\n" + GELU), variant=True)
bank.hint("still-prints", "Dynamo stops at a print: {line}")
bank.slip("still-prints", ("        square = ", '        print("mean activation", h.mean())\n        square = '))
bank.slip("still-prints", ("        square = ", '        print("shape", h.shape)\n        square = '), variant=True)
bank.hint("still-item", "Dynamo stops where a number leaves its tensor: {line}")
bank.slip("still-item", (PEAK, "self.peak.fill_(h.detach().max().item())"))
bank.slip("still-item", ("(h > h.mean()).to(h.dtype).mean()", "(h > h.mean()).sum().item() / h.numel()"))
bank.slip(
    "still-item",
    ("(h > h.mean()).to(h.dtype).mean()", "sum((h > h.mean()).flatten().tolist()) / h.numel()"),
    variant=True,
)
bank.hint("still-branches", "Dynamo stops where Python's `if` depends on the numbers in a tensor: {line}. Compute both "
          "sides, and choose with torch.where.")  # fmt: skip
bank.slip("still-branches", (WHERE, "if some:\n            h = h / square.sqrt()\n        h = F.gelu(h)"))
bank.slip(
    "still-branches", (SQUARE, "        h = h / h.square().sum().sqrt() if h.any() else h\n" + GELU), variant=True
)
bank.hint("still-selects", "Dynamo stops where the shape of a result depends on the numbers: {line}. You can count "
          "elements without taking any out.")  # fmt: skip
bank.slip("still-selects", ("(h > h.mean()).to(h.dtype).mean()", "len(h[h > h.mean()]) / h.numel()"))
bank.slip(
    "still-selects",
    ("(h > h.mean()).to(h.dtype).mean()", "(h > h.mean()).nonzero().shape[0] / h.numel()"),
    variant=True,
)
bank.hint("breaks-left", "The graph still breaks at {line}. Dynamo says: {reason}")
bank.slip("breaks-left", ("        square = ", "        torch._dynamo.graph_break()\n        square = "), variant=True)
bank.hint("not-traced", "Dynamo captured nothing: it was told to leave this function alone. Nothing can be fused then.")
bank.slip("not-traced", ("    def forward(self, x):", "    @torch.compiler.disable\n    def forward(self, x):"))
bank.slip(
    "not-traced", ("    def forward(self, x):", "    @torch._dynamo.disable\n    def forward(self, x):"), variant=True
)
bank.hint("compiled-differs", "The compiled network gives different results from the uncompiled one.")
bank.slip(
    "compiled-differs",
    (RETURN, "if torch.compiler.is_compiling():\n            return self.second(h)\n        " + RETURN),
    variant=True,
)
bank.hint("graph-again", "{n} inputs of one shape gave {n_graphs} graphs: something that a guard checks changes with "
          "each call.", edge=True)  # fmt: skip
bank.slip(
    "graph-again",
    ("        square = ", "        self.calls = getattr(self, 'calls', 0) + 1\n        square = "),
    variant=True,
)
bank.hint("peak-list", "A Python list grows with each call, and a guard checks it. Keep only the last number, in the "
          "buffer.", edge=True)  # fmt: skip
bank.slip(
    "peak-list",
    ("self.register_buffer", "self.peaks = []\n        self.register_buffer"),
    (PEAK, PEAK + "\n        self.peaks.append(self.peak.clone())"),
    variant=True,
)
bank.hint("peak-wrong", "The buffer `peak` must hold the largest activation of the last call, as `second` receives it.")
bank.slip("peak-wrong", (PEAK, ""))
bank.slip("peak-wrong", (PEAK, "if self.training:\n            " + PEAK))
bank.slip("peak-wrong", (PEAK, "self.peak.copy_(torch.maximum(self.peak, h.detach().max()))"))
bank.slip(
    "peak-wrong",
    ("        square = ", "        self.peak.copy_(h.detach().max())\n        square = "),
    ("self.peak.copy_(h.detach().max())\n        return", "return"),
)
bank.slip("peak-wrong", (PEAK, "self.peak.copy_(h.detach().mean())"))
bank.hint("peak-graph", "The buffer `peak` still has its graph, which keeps the activations of its step alive. Call "
          "detach() on it.", edge=True)  # fmt: skip
bank.slip("peak-graph", (PEAK, "self.peak = h.max()"), variant=True)
bank.hint("peak-lost", "`peak` is no longer a buffer after a call: to(device) would leave it behind.", edge=True)
bank.slip("peak-lost", (PEAK, "del self.peak\n        self.peak = h.detach().max()"), variant=True)

bank.slip(None, (PEAK, "self.peak = h.detach().max()"))
bank.slip(None, (PEAK, "with torch.no_grad():\n            self.peak.fill_(h.max())"))
bank.slip(
    None,
    (
        "        square = ",
        "        if not torch.compiler.is_compiling():\n            print('mean', h.mean())\n        square = ",
    ),
)
bank.slip(None, (SQUARE, "        some = h.any()\n        h = F.gelu(h / torch.where(some, h.norm(), 1.0))\n"))


class Mended(nn.Module):
    """Where all is zero, ones are put in for the norm alone; it is then taken back out of the divisor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)
        self.register_buffer("peak", torch.tensor(0.0), persistent=True)

    def forward(self, x):
        h = self.first(x)
        silent = (h == 0).all()
        size = torch.linalg.vector_norm(h.masked_fill(silent, 1.0))
        h = nn.functional.gelu(h / size.masked_fill(silent, 1.0))
        self.peak = h.amax().detach().clone()
        above = torch.count_nonzero(h > h.mean()) / h.numel()
        return (1 + above) * self.second(h)


bank.several(None, Mended)


class Conditional(Mended):
    """Both branches as functions: torch.cond keeps the choice in the graph."""

    def forward(self, x):
        h = self.first(x)
        square = h.square().sum()
        h = nn.GELU()(torch.cond(square > 0, lambda h, s: h / s.sqrt(), lambda h, s: h + 0 * s, (h, square)))
        with torch.no_grad():
            self.peak.copy_(h.max())
        return self.second(h) * (1 + (h > h.mean()).float().mean())


bank.several(None, Conditional)


class Masked(nn.Sequential):
    """A mask by multiplication, a safe square root, layers by add_module."""

    def __init__(self):
        super().__init__()
        self.add_module("first", nn.Linear(16, 32))
        self.add_module("second", nn.Linear(32, 4))
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        h = self.first(x)
        square = (h * h).sum()
        zero = (square == 0).to(h.dtype)
        h = F.gelu(h * torch.rsqrt(square + zero))
        self.peak.copy_(h.detach().amax())
        return self.second(h).mul(1 + torch.gt(h, h.mean()).float().sum() / h.numel())


bank.several(None, Masked)
bank.slip(None, ("torch.zeros(()))", "torch.zeros(()), persistent=False)"))
bank.slip("epsilon", ("some = square > 0", "some = square > 1e-10"), variant=True)

SHARE = "(h > h.mean()).to(h.dtype).mean()"
bank.hint("one-missing", "The last factor is 1 + the share of activations above their mean: the 1 is missing.")
bank.slip("one-missing", (f"(1 + {SHARE})", SHARE))
bank.hint("row-means", "The mean is taken over all activations of the batch, not for each row.")
bank.slip("row-means", ("h > h.mean()", "h > h.mean(dim=1, keepdim=True)"))
bank.hint("not-above", "An activation that equals the mean is not above it: use >, not >=.", edge=True)
bank.slip("not-above", ("h > h.mean()", "h >= h.mean()"))
bank.hint("tanh-gelu", "F.gelu computes the exact GELU unless you ask for the tanh approximation.", edge=True)
bank.slip("tanh-gelu", (".sqrt(), h))", '.sqrt(), h), approximate="tanh")'))
bank.slip("peak-wrong", ("h.detach().max()", "h.detach().abs().max()"), variant=True)

# the same mistakes in another design
NORM = "        h = h / torch.where(h.any(), h.norm(), 1.0)\n"
COUNT = "torch.count_nonzero(h > h.mean())"
bank.slip("scale-missing", (RETURN, "return F.linear(h, self.second.weight, self.second.bias)"), variant=True)
bank.slip("share-as-count", (RETURN, f"return self.second(h) * (1 + {COUNT})"), variant=True)
bank.slip("one-missing", (RETURN, f"return self.second(h) * {COUNT} / h.numel()"), variant=True)
bank.slip("row-means", ("h > h.mean()", "(h.T > h.sum(1) / 32).T"), variant=True)
bank.slip("not-above", (SHARE, "(1 - (h < h.mean()).to(h.dtype).mean())"), variant=True)
bank.slip("tanh-gelu", (SQUARE, NORM + '        h = nn.GELU("tanh")(h)\n'), variant=True)
bank.slip("never-divided", (SQUARE, "        h = h / 2 * (1 + torch.erf(h / 2**0.5))\n"), variant=True)
bank.slip("row-norms", (SQUARE, "        h = F.gelu(h / h.norm(dim=1, keepdim=True).clamp_min(1e-12))\n"), variant=True)
bank.slip("no-gelu-here", (SQUARE, NORM), variant=True)
bank.slip("gelu-before", (SQUARE, GELU + NORM), variant=True)
bank.slip("nan-logits", (SQUARE, "        h = F.gelu(h / h.square().sum().sqrt())\n"), variant=True)
