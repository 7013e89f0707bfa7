"""Answers to 06_compile, balise 3: one graph, no break."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("06_compile")

WHERE = "h = F.gelu(torch.where(some, h / torch.where(some, square, 1.0).sqrt(), h))"
SQUARE = "        square = h.square().sum()\n        some = square > 0\n        " + WHERE + "\n"
GELU = "        h = F.gelu(h)\n"
PEAK = "self.peak.copy_(h.detach().max())"
RETURN = "return self.second(h) * (1 + (h > h.mean()).to(h.dtype).mean())"

bank.slip(3, "layers-differ", ("nn.Linear(16, 32)", "nn.Linear(16, 64)"), ("nn.Linear(32, 4)", "nn.Linear(64, 4)"))
bank.slip(3, "layers-differ", ("self.first", "self.layer1"))
bank.slip(3, "no-buffer", ('self.register_buffer("peak", torch.zeros(()))', "self.peak = torch.zeros(())"))
bank.slip(3, "no-buffer", ("torch.zeros(())", "torch.zeros(1)"))
bank.slip(
    3, "more-state", ("self.register_buffer", "self.scale = nn.Parameter(torch.ones(()))\n        self.register_buffer")
)
bank.slip(3, "nothing-returned", ("        return self.second", "        self.second"))
bank.slip(3, "logits-differ", (RETURN, RETURN + " + 1"))
bank.slip(3, "logits-differ", (RETURN, "return h"))
bank.slip(3, "scale-missing", (RETURN, "return self.second(h)"))
bank.slip(3, "share-as-count", (".to(h.dtype).mean())", ".sum())"))
bank.slip(3, "never-divided", (SQUARE, GELU))
bank.slip(3, "no-gelu-here", ("F.gelu(", "("))
bank.slip(3, "gelu-before", ("self.first(x)\n", "F.gelu(self.first(x))\n"), ("h = F.gelu(torch", "h = (torch"))
bank.slip(3, "row-norms", (SQUARE, "        h = F.normalize(h, dim=1)\n" + GELU))
bank.slip(
    3,
    "gradients-differ",
    ("/ torch.where(some, square, 1.0).sqrt()", "/ torch.where(some, square, 1.0).sqrt().detach()"),
)
bank.slip(3, "gradients-differ", ("self.first(x)", "self.first(x.detach())"))
bank.slip(3, "nan-logits", (SQUARE, "        h = h / h.norm()\n" + GELU))
bank.slip(
    3, "nan-gradients", (SQUARE, "        size = h.norm()\n        h = torch.where(size > 0, h / size, h)\n" + GELU)
)
bank.slip(
    3,
    "nan-gradients",
    (SQUARE, "        size = h.square().sum().sqrt()\n        h = torch.where(size > 0, h / size, h)\n" + GELU),
)
bank.slip(
    3,
    "nan-gradients",
    (SQUARE, "        size = h.square().sum().sqrt()\n        h = h / torch.where(size > 0, size, 1.0)\n" + GELU),
)
bank.slip(3, "epsilon", (SQUARE, "        h = h / (h.square().sum() + 1e-6).sqrt()\n" + GELU))
bank.slip(3, "epsilon", (SQUARE, "        h = h / h.norm().clamp_min(1e-3)\n" + GELU))
bank.slip(3, "zero-gradients", (SQUARE, "        h = h / h.norm().clamp_min(1e-12)\n" + GELU))
bank.slip(3, "zero-gradients", (SQUARE, "        h = F.normalize(h.flatten(), dim=0).view_as(h)\n" + GELU))
bank.slip(3, "still-prints", ("        square = ", '        print("mean activation", h.mean())\n        square = '))
bank.slip(3, "still-prints", ("        square = ", '        print("shape", h.shape)\n        square = '))
bank.slip(3, "still-item", (PEAK, "self.peak.fill_(h.detach().max().item())"))
bank.slip(3, "still-item", ("(h > h.mean()).to(h.dtype).mean()", "(h > h.mean()).sum().item() / h.numel()"))
bank.slip(3, "still-item", ("(h > h.mean()).to(h.dtype).mean()", "sum((h > h.mean()).flatten().tolist()) / h.numel()"))
bank.slip(3, "still-branches", (WHERE, "if some:\n            h = h / square.sqrt()\n        h = F.gelu(h)"))
bank.slip(3, "still-branches", (SQUARE, "        h = h / h.square().sum().sqrt() if h.any() else h\n" + GELU))
bank.slip(3, "still-selects", ("(h > h.mean()).to(h.dtype).mean()", "len(h[h > h.mean()]) / h.numel()"))
bank.slip(3, "still-selects", ("(h > h.mean()).to(h.dtype).mean()", "(h > h.mean()).nonzero().shape[0] / h.numel()"))
bank.slip(3, "breaks-left", ("        square = ", "        torch._dynamo.graph_break()\n        square = "))
bank.slip(3, "not-traced", ("    def forward(self, x):", "    @torch.compiler.disable\n    def forward(self, x):"))
bank.slip(3, "not-traced", ("    def forward(self, x):", "    @torch._dynamo.disable\n    def forward(self, x):"))
bank.slip(
    3,
    "compiled-differs",
    (RETURN, "if torch.compiler.is_compiling():\n            return self.second(h)\n        " + RETURN),
)
bank.slip(
    3, "graph-again", ("        square = ", "        self.calls = getattr(self, 'calls', 0) + 1\n        square = ")
)
bank.slip(
    3,
    "peak-list",
    ("self.register_buffer", "self.peaks = []\n        self.register_buffer"),
    (PEAK, PEAK + "\n        self.peaks.append(self.peak.clone())"),
)
bank.slip(3, "peak-wrong", (PEAK, ""))
bank.slip(3, "peak-wrong", (PEAK, "if self.training:\n            " + PEAK))
bank.slip(3, "peak-wrong", (PEAK, "self.peak.copy_(torch.maximum(self.peak, h.detach().max()))"))
bank.slip(
    3,
    "peak-wrong",
    ("        square = ", "        self.peak.copy_(h.detach().max())\n        square = "),
    ("self.peak.copy_(h.detach().max())\n        return", "return"),
)
bank.slip(3, "peak-wrong", (PEAK, "self.peak.copy_(h.detach().mean())"))
bank.slip(3, "peak-graph", (PEAK, "self.peak = h.max()"))
bank.slip(3, "peak-lost", (PEAK, "del self.peak\n        self.peak = h.detach().max()"))

bank.slip(3, None, (PEAK, "self.peak = h.detach().max()"))
bank.slip(3, None, (PEAK, "with torch.no_grad():\n            self.peak.fill_(h.max())"))
bank.slip(
    3,
    None,
    (
        "        square = ",
        "        if not torch.compiler.is_compiling():\n            print('mean', h.mean())\n        square = ",
    ),
)
bank.slip(3, None, (SQUARE, "        some = h.any()\n        h = F.gelu(h / torch.where(some, h.norm(), 1.0))\n"))


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


bank.several(3, None, Mended)


class Conditional(Mended):
    """Both branches as functions: torch.cond keeps the choice in the graph."""

    def forward(self, x):
        h = self.first(x)
        square = h.square().sum()
        h = nn.GELU()(torch.cond(square > 0, lambda h, s: h / s.sqrt(), lambda h, s: h + 0 * s, (h, square)))
        with torch.no_grad():
            self.peak.copy_(h.max())
        return self.second(h) * (1 + (h > h.mean()).float().mean())


bank.several(3, None, Conditional)


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


bank.several(3, None, Masked)


bank.slip(3, None, ("torch.zeros(()))", "torch.zeros(()), persistent=False)"))
bank.slip(3, "epsilon", ("some = square > 0", "some = square > 1e-10"))

SHARE = "(h > h.mean()).to(h.dtype).mean()"
bank.slip(3, "one-missing", (f"(1 + {SHARE})", SHARE))
bank.slip(3, "row-means", ("h > h.mean()", "h > h.mean(dim=1, keepdim=True)"))
bank.slip(3, "not-above", ("h > h.mean()", "h >= h.mean()"))
bank.slip(3, "tanh-gelu", (".sqrt(), h))", '.sqrt(), h), approximate="tanh")'))
bank.slip(3, "peak-wrong", ("h.detach().max()", "h.detach().abs().max()"))
