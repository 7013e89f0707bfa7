"""What the checks of this work share: ranks, living bytes, what travels, small networks and their float64 truth."""

import contextlib
import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.checking import close
from dlojz_tp.checking.borrowed import Borrowed, refusing, replaced
from dlojz_tp.checks.data_parallel_under_the_hood.common import Log, mark, sent, until
from dlojz_tp.probes.settling import settle

__all__ = ["Borrowed", "Log", "mark", "replaced", "sent", "until"]

TOLERANCE = 1e-6
ADAMW = {"lr": 0.05, "weight_decay": 0.1}

HINTS = {
    "zero-borrowed": "{what} does this work for you. Here it is yours: use reduce_scatter and all_gather.",
    "parts-missing": "self.{name} is not there. The text above the class says what it must hold: later balises use it.",
    "in-graph": "Autograd follows this: {error} A shard and its parameters are nn.Parameter. What is written into them, or gathered "
    "from them, must be outside of any graph: own.detach(), or under torch.no_grad().",
    "ranks-waiting": "The ranks stood still. All of them must call the same collectives, in the same order and with the "
    "same sizes, whatever gradients they have. {error}",
}


def own_work():
    """Inside, what PyTorch has of ZeRO raises Borrowed."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    owners = ZeroRedundancyOptimizer, DistributedDataParallel, fsdp.FullyShardedDataParallel, FSDPState
    return refusing(*((o, "__init__", "fully_shard" if o is FSDPState else o.__name__) for o in owners))


@contextlib.contextmanager
def counted_waits():
    """Inside, the waits for collectives are counted: yields a list with an entry for each."""
    found, wait = [], dist.Work.wait

    def counting(work, *args, **kwargs):
        found.append(1)
        return wait(work, *args, **kwargs)

    with replaced(dist.Work, "wait", counting):
        yield found


class Memory(TorchDispatchMode):
    """The bytes of all living storages that were made under it, or tracked, as they are now: resized ones too.

    peak: highest figure since the last `reset`, looked at after each operation.
    """

    def __init__(self, *tensors):
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self.peak = 0
        for tensor in tensors:
            self._note(tensor)

    def _note(self, value) -> bool:
        """Follow the storages of what an operation returned; whether one of them is new."""
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._known and self._known[key]() is not None:
                return False
            self._known[key] = weakref.ref(storage, lambda ref, key=key: self._forget(key, ref))
            return True
        return isinstance(value, tuple | list) and sum(self._note(item) for item in value) > 0

    def _forget(self, key, ref):
        if self._known.get(key) is ref:
            del self._known[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._note(out) or func.namespace == "c10d":  # a resized storage comes back in a collective
            self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive now."""
        return sum(s.nbytes() for s in [ref() for ref in list(self._known.values())] if s is not None)

    def settled(self, most: float) -> int:
        """Bytes alive once they are `most`, or once no thread has anything to do: a collective's lets go a little late."""
        return settle(self.now, most)

    def reset(self):
        """Begin a new peak."""
        self.peak = self.now()


def on_the_wire(events, size: int) -> float:
    """Bytes that a rank sends if each collective is done in a ring (or an equally good way)."""
    factors = {"all_reduce": 2 / size, "all_gather": 1.0}  # of what a rank hands in, times (size - 1)
    return sum(bytes_ * factors.get(name, 1 / size) * (size - 1) for name, bytes_, _ in sent(events))


def rows(step: int, n: int = 12, width: int = 6) -> torch.Tensor:
    """The whole batch of a step, (n, width) in float64; its rows are not alike."""
    generator = torch.Generator().manual_seed(200 + step)
    return torch.randn(n, width, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, n).double()[:, None]


class Chain(nn.Module):
    """Equal layers in float64, always alike. Its loss is the mean over the rows of x (b, width)."""

    def __init__(self, depth: int = 10, width: int = 16):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(depth))
        self.tell = lambda text: None

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = mark(torch.tanh(layer(x)), self.tell, f"layer {k}")
        return x.square().sum(dim=1).mean()


class Odd(nn.Module):
    """Parameters whose sizes divide by nothing: a tied, a frozen, a transposed, a scalar one, and one never used.

    `extra` is used by even ranks only, where `by_rank` says so. The loss is the mean over the rows of x (b, 6).
    """

    def __init__(self, by_rank: bool = False):
        super().__init__()
        self.by_rank = by_rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = nn.Linear(6, 5, dtype=torch.float64)
            self.frozen = nn.Parameter(torch.rand(5, dtype=torch.float64) + 0.5, requires_grad=False)
            self.tied = nn.Parameter(torch.randn(5, 5, dtype=torch.float64) / 2)
            self.turned = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
            self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
            self.unused = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.extra = nn.Parameter(torch.randn(3, dtype=torch.float64))

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
        """Matrices with the common options; the rest without weight decay and with a rate of its own."""
        w, b = self.first.weight, self.first.bias
        rest = {"params": [b, self.scale, self.unused, self.extra], "weight_decay": 0.0, "lr": 0.02}
        return [{"params": [w, self.tied, self.turned]}, rest]


NAMES = ("first.weight", "first.bias", "frozen", "tied", "turned", "scale", "unused", "extra")


def state(model) -> dict[str, torch.Tensor]:
    """Copies of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def share_backward(model, step: int, rank: int, size: int, scale: float = 1.0, width: int = 6):
    """Backward of one rank's rows in a step."""
    x = rows(step, width=width)[rank::size]
    loss = model(x, rank) if isinstance(model, Odd) else model(x)
    (loss * scale).backward()


def plain(make, optimizer_of, size: int, steps: int, *, width: int = 6, micro: int = 1, shares=None):
    """The truth: one process with all rows. Returns ([gradients by name in each step], [parameters by name before
    training and after each step]).

    What got no gradient counts as zero. micro: backward passes a step, each on other rows. shares: ranks whose rows
    count, with what factor ({rank: factor}); all of them, each 1 / size, where it is not given.
    """
    model, found = make(), []
    optimizer, weights = optimizer_of(model), [state(model)]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            for rank, factor in (shares or dict.fromkeys(range(size), 1 / size)).items():
                share_backward(model, step * micro + part, rank, size, factor, width)
        for p in model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        weights.append(state(model))
    return found, weights


def same(got, truth, tol: float = TOLERANCE) -> bool:
    """Equal within the tolerance, for dictionaries of tensors too."""
    if isinstance(truth, dict):
        return got.keys() == truth.keys() and all(close(got[name], truth[name], tol) for name in truth)
    return close(got, truth, tol)


def differing(got: dict, truth: dict) -> list[str]:
    """Names whose tensors are not the truth's."""
    return [name for name in truth if name not in got or not close(got[name], truth[name], TOLERANCE)]


def left_behind(got: dict, start: dict, truth: dict) -> bool:
    """Whether every number is either right or still what it was at the start, and some are."""
    right = moved = still = 0
    for name, value in truth.items():
        new = torch.isclose(got[name], value, atol=1e-9)
        old = (got[name] == start[name]) & (value != start[name])
        right, still, moved = right + int((new & ~old).sum()), still + int(old.sum()), moved + value.numel()
    return still > 0 and right + still >= moved


def apart(optimizer) -> int:
    """Bytes of the shards that are no views of a larger tensor."""
    sizes = [(own.untyped_storage().nbytes(), own.numel() * own.element_size()) for own in optimizer.shards]
    return sum(size for size, own in sizes if size == own)


def in_two(parameters, first: float) -> list[dict]:
    """Two groups, of which the first has this part of the parameters; the rates differ."""
    count = round(first * len(parameters))
    return [{"params": parameters[:count]}, {"params": parameters[count:], "lr": 0.02}]


def sharing(found: int, groups: list[int], size: int) -> str:
    """What `found` elements of states tell: "shared", "first-group-shared", or the slug of another mistake.

    groups: elements of the parameters in each group. Every rank should hold two moments for its part of each.
    """
    shares = [-(-n // size) for n in groups]
    if size == 1 or found <= 2 * sum(shares) + 8 * 20:  # the padding of several parts
        return "shared"
    if found >= 2 * sum(groups):
        return "states-whole"
    first_alone = 2 * (shares[0] + sum(groups[1:]))
    return "first-group-shared" if abs(found - first_alone) <= 8 * 20 else "states-unequal"


def optimizers() -> list[torch.optim.Optimizer]:
    """All torch optimizers on this rank."""
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]


def states_held(others: list, most: float) -> int:
    """Elements of the states of all `optimizers()` but these, single numbers such as step counters left out.

    most: where there are more, an optimizer that was thrown away may wait in a circle: it does not count.
    """
    known = {id(other) for other in others}

    def elements():
        states = [s for made in optimizers() if id(made) not in known for s in made.state.values()]
        tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.numel() > 1]
        return sum({t.data_ptr(): t.numel() for t in tensors}.values())

    if (found := elements()) > most:
        gc.collect()
        found = elements()
    return found


def gradient_shards(optimizer) -> list[torch.Tensor]:
    """Copies of the gradients of the shards, in their order."""
    return [None if own.grad is None else own.grad.detach().clone() for own in optimizer.shards]


def world() -> tuple[int, int]:
    """(rank, world size)"""
    return dist.get_rank(), dist.get_world_size()
