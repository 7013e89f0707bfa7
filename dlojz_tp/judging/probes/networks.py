"""Small networks and batches that the checks train, the plain loop that is their truth, and how both are compared."""

import copy
import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import close, tolerance
from dlojz_tp.judging.probes.seeded import seeded


class Moved:
    """Beside nn.Module as a base: counts how often the module is moved."""

    moves = 0

    def to(self, *args, **kwargs):
        self.moves += 1
        return super().to(*args, **kwargs)

    def cuda(self, *args, **kwargs):
        self.moves += 1
        return super().cuda(*args, **kwargs)


class Watched(Moved, nn.Sequential):
    """A network that counts how often it is moved, and how often it is called."""

    calls = 0

    def forward(self, images):
        self.calls += 1
        return super().forward(images)


def network(dropout: float = 0.0) -> Watched:
    """Conv, batch norm, dropout, linear: (batch, 3, 6, 5) to (batch, 4), always with the same weights."""
    with seeded(3):
        return Watched(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(5 * 4 * 3, 4)
        )


def held_mode(model: nn.Module) -> nn.Module:
    """The model, whose mode train() and eval() no longer change: `.modes` gets what they are asked for."""
    model.modes = []
    model.train = lambda mode=True: model.modes.append(mode) or model  # eval() calls it, too
    return model


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images (n, 3, 6, 5) and labels (n,), not alike."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, 6, 5, generator=generator) * (1 + k), torch.randint(4, (n,), generator=generator))
        for k, n in enumerate(sizes)
    ]


def plain_steps(model: nn.Module, data, lr: float = 0.1, momentum: float = 0.9, add_up: bool = False):
    """The truth: a copy of the model trained in float64, SGD with momentum written out. Returns (copy, losses).

    add_up: never clear the gradients, which is a mistake.
    """
    model = copy.deepcopy(model).double()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    losses, sums = [], [0.0 for _ in velocity]
    for images, labels in data:
        loss = F.cross_entropy(model(images.double()), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        if add_up:
            sums = gradients = [s + g for s, g in zip(sums, gradients, strict=True)]
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(momentum).add_(g)
                p.sub_(lr * v)
    return model, losses


def mean_losses(optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]) -> list[float]:
    """One step of the optimizer for each loss, made when its turn comes; the losses, averaged over the ranks."""
    found = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if dist.is_initialized() and dist.get_world_size() > 1:
            mean = mean / dist.get_world_size()
            dist.all_reduce(mean)
        found.append(mean.item())
    return found


TOLERANCE = 1e-6  # even in float64: a weight such as 1/3 may have been a float32 on its way


def rows(step: int, n: int = 12, width: int = 8, seed: int = 100) -> torch.Tensor:
    """The whole batch of a step, (n, width) in float64; its rows are not alike."""
    generator = torch.Generator().manual_seed(seed + step)
    return torch.randn(n, width, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, n).double()[:, None]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tell, text):
        ctx.tell, ctx.text = tell, text
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell(ctx.text)
        return gradient, None, None


def mark(x, tell, text):
    """`x` itself; when the gradient comes back through here, `tell(text)` is called."""
    return _Mark.apply(x, tell, text)


class Chain(nn.Module):
    """Equal layers in float64, always alike. Its loss is the mean over the rows of x (b, width).

    tell: called with "layer k" when the gradient comes back to the output of layer k.
    """

    def __init__(self, depth: int = 6, width: int = 8):
        super().__init__()
        self.depth = depth
        with seeded(7):
            self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(depth))
        self.tell = lambda text: None

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = mark(torch.tanh(layer(x)), self.tell, f"layer {k}")
        return x.square().sum(dim=1).mean()


class Odd(nn.Module):
    """Parameters whose sizes divide by nothing: a tied, a frozen, a transposed, a scalar one, and one never used.

    `extra` is used by even ranks only, where `by_rank` says so. idle: elements of one parameter more, never used.
    The loss is the mean over the rows of x (b, 6).
    """

    def __init__(self, by_rank: bool = False, idle: int = 0):
        super().__init__()
        self.by_rank = by_rank
        with seeded(5):
            self.first = nn.Linear(6, 5, dtype=torch.float64)
            self.frozen = nn.Parameter(torch.rand(5, dtype=torch.float64) + 0.5, requires_grad=False)
            self.tied = nn.Parameter(torch.randn(5, 5, dtype=torch.float64) / 2)
            self.turned = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
            self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
            self.unused = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.extra = nn.Parameter(torch.randn(3, dtype=torch.float64))
        if idle:
            self.idle = nn.Parameter(torch.linspace(-1, 1, idle, dtype=torch.float64))

    def forward(self, x, rank: int = 0):
        x = torch.tanh(self.first(x)) * self.frozen
        x = torch.tanh(torch.tanh(x @ self.tied) @ self.tied)
        x = self.scale * (x @ self.turned)
        if not self.by_rank or rank % 2 == 0:
            x = x + self.extra
        return x.square().sum(dim=1).mean()

    def named(self) -> list[nn.Parameter]:
        """All parameters; the tied one is named twice."""
        w, b = self.first.weight, self.first.bias
        return [w, b, self.frozen, self.tied, self.turned, self.scale, self.tied, self.unused, self.extra]

    def groups(self) -> list[dict]:
        """Matrices with the common options; the rest without weight decay and with another rate.

        What only even ranks use is a separate group: the others use nothing of it.
        """
        w, b = self.first.weight, self.first.bias
        idle = [self.idle] if hasattr(self, "idle") else []
        rest, options = [*idle, b, self.scale, self.unused], {"weight_decay": 0.0, "lr": 0.02}
        groups = [{"params": [w, self.tied, self.turned]}, {"params": rest, **options}]
        if self.by_rank:
            groups.append({"params": [self.extra], **options})
        else:
            rest.append(self.extra)
        return groups


class Seen(nn.Linear):
    """Without a graph, keeps copies of the parameters it computes with, in `seen`, under its name."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.seen |= {f"{self.name}.{key}": p.detach().clone() for key, p in self.named_parameters()}
        return torch.tanh(super().forward(x))


class Pair(Seen):
    """A frozen layer before a trained one: what is frozen is needed after the gradients of the unit are complete."""

    def __init__(self, inputs, outputs, **options):
        super().__init__(inputs, outputs, **options)
        self.inner = nn.Linear(inputs, inputs, dtype=torch.float64)

    def forward(self, x):
        return super().forward(torch.tanh(self.inner(x)))


class Unlike(nn.Module):
    """Six layers: the last is tied to the first, one has a frozen weight, one is frozen, one partly used, one is two.

    at: the layer that computes, or did last; seen: what they computed with, by name, when there was no graph.
    The loss is the mean over the rows of x (b, 6).
    """

    FROZEN = "mixed.weight", "fixed.weight", "fixed.bias", "pair.inner.weight", "pair.inner.bias"

    def __init__(self):
        super().__init__()
        self.seen = {}
        sizes = {"first": (6, 6), "mixed": (6, 7), "fixed": (7, 3), "partly": (3, 6), "pair": (6, 6), "last": (6, 6)}
        with seeded(9):
            for name, (inputs, outputs) in sizes.items():
                layer = (Pair if name == "pair" else Seen)(inputs, outputs, bias=name != "last", dtype=torch.float64)
                layer.name, layer.seen = name, self.seen
                self.add_module(name, layer)
            self.partly.unused = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.last.weight = self.first.weight
        for name, p in self.named_parameters():
            p.requires_grad_(name not in self.FROZEN)

    def forward(self, x):
        for layer in self.children():
            self.at = layer.name
            x = layer(x)
        return x.square().sum(dim=1).mean()


def backward_of_share(model, x, rank: int, size: int, scale: float = 1.0) -> None:
    """Backward of a rank's share of the rows of x (n, width); each rank takes every size-th row."""
    x = x[rank::size]
    loss = model(x, rank) if isinstance(model, Odd) else model(x)
    (loss * scale).backward()


def plain_shares(make, optimizer_of, rows_of, size: int, micro) -> tuple[list[dict], list[dict]]:
    """The truth of training on shares: one process with all rows.

    Returns (gradients by name in each step, parameters by name before training and after each step).

    rows_of(pass): the rows (n, width) of a backward pass; micro: how many of them each step has. What got no gradient
    counts as zero.
    """
    model, found, turn = make(), [], itertools.count()
    optimizer, weights = optimizer_of(model), [state(model)]
    for passes in micro:
        optimizer.zero_grad()
        for number in itertools.islice(turn, passes):
            for rank in range(size):
                backward_of_share(model, rows_of(number), rank, size, 1 / size)
        for p in model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        weights.append(state(model))
    return found, weights


def twin(module: nn.Module, known: dict | None = None) -> nn.Module:
    """What `copy.deepcopy` makes of a module, in a third of its time: tables of hooks, all empty, are made anew.

    known: what has been copied already, as deepcopy notes it.
    """
    known = {} if known is None else known
    if id(module) in known:
        return known[id(module)]
    made = known[id(module)] = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            vars(made)[name] = {key: inner and twin(inner, known) for key, inner in value.items()}
        elif isinstance(value, dict) and not value:
            vars(made)[name] = type(value)()
        else:
            vars(made)[name] = copy.deepcopy(value, known)
    return made


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(parameters) -> list:
    """Copies of the gradients on the CPU, None where there is none."""
    return [None if p.grad is None else p.grad.detach().cpu().clone() for p in parameters]


def same(got, truth, tol: float = TOLERANCE) -> bool:
    """Equal within the tolerance, dictionaries of tensors too. No gradient (None) and zeros are the same."""
    if isinstance(truth, dict):
        return got.keys() == truth.keys() and all(same(got[name], truth[name], tol) for name in truth)
    if got is None or truth is None:
        return all(value is None or not value.count_nonzero() for value in (got, truth))
    return close(got, truth, max(tolerance(truth.dtype), tol))
