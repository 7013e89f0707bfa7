"""Balise 9: the bytes that a rank sends in a step, counted while the step runs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.zero_under_the_hood.worlds import on_ranks

N = 240  # elements; every number of ranks divides it

HINTS = {
    "step-not-run": "step() was not called. The volume is to be counted while it runs.",
    "step-run-again": "step() was called {got} times: a training would make as many steps. Once.",
    "not-a-number": "Return one number, the bytes. {got} came.",
    "handed-in": "These are the bytes that the rank hands in. What it sends depends on the collective: look at the table.",
    "all-reduce-once": "An all-reduce is a reduce-scatter and an all-gather: it sends twice as much as one of them.",
    "all-reduce-whole": "An all-reduce sends 2 (N - 1) / N of the tensor: a little less than twice, however many ranks there are.",
    "gather-as-scatter": "An all-gather was counted like a reduce-scatter. There a rank hands in the whole tensor, here its own part "
    "alone, which goes to all others: N - 1 times.",
    "scatter-as-gather": "A reduce-scatter was counted like an all-gather. A rank hands in the whole tensor; all parts but its own "
    "leave it, once each.",
    "elements-not-bytes": "These are elements. A float32 has 4 bytes, a bfloat16 2; the log has bytes.",
    "two-ranks-only": "Right for 2 ranks, wrong for {size}. Ask for the number of ranks.",
    "alone-sends": "One rank alone sends nothing.",
    "backward-missed": "Collectives that start in backward, from hooks or in DistributedDataParallel, were not counted. Record them "
    "all: measure.Communications sees every one.",
    "of-all-ranks": "This is what all ranks send together. Asked is one rank.",
    "message-forgotten": "A message to one rank was not counted: the last row of the table.",
    "receive-counted": "A message that is received was counted as well. Asked is what leaves the rank.",
    "wrong-volume": "This is not what the rank sends in these collectives.",
}


def balise_9(sent_bytes):
    """Steps of known collectives on 1 to 4 ranks; the truth walks round the ring and adds up."""
    yield "single collectives, in float32 and bfloat16 (1, 2, 3 and 4 ranks)"
    worlds = on_ranks(_count, sent_bytes)
    for size in (2, 3, 4, 1):
        for rank, found in enumerate(worlds[size]):
            for name in ("all_reduce", "reduce_scatter", "all_gather", "bfloat16", "gather into a list"):
                _right(name, found, rank, size, worlds[3][0])
    yield "a message to the next rank, an asynchronous one, nothing at all"
    for size in (2, 3, 4, 1):
        for rank, found in enumerate(worlds[size]):
            for name in ("message", "asynchronous", "nothing", "a barrier"):
                _right(name, found, rank, size, worlds[3][0])
    yield "what starts in backward: hooks, and DistributedDataParallel"
    for size in (2, 3, 4, 1):
        for rank, found in enumerate(worlds[size]):
            for name in ("from hooks", "DDP"):
                _right(name, found, rank, size, worlds[3][0])


def ring(name: str, size: int, n: int = N, itemsize: int = 4) -> int:
    """Bytes that one rank sends: n elements in `size` chunks go round a ring, one chunk a step."""
    sent, chunk = 0, n // size
    rounds = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}[name]
    for _ in range(rounds):
        for _step in range(size - 1):
            sent += chunk * itemsize
    return sent


def _steps():
    """name -> (function without arguments, [(collective, elements of the whole tensor, bytes of one), ...])"""
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    x, own, half = torch.ones(N), torch.ones(N // size), torch.ones(N, dtype=torch.bfloat16)
    pieces = [torch.empty(N // size) for _ in range(size)]
    p = nn.Parameter(torch.ones(N))
    p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    wrapped = DistributedDataParallel(nn.Linear(N, 1, bias=False), broadcast_buffers=False)

    def message():
        if size > 1:
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, torch.empty(N), (rank - 1) % size)
            ])  # fmt: skip
            for work in works:
                work.wait()

    def asynchronous():
        works = [dist.all_reduce(torch.ones(N), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()

    def both():
        scatter(own, half.float())
        scatter(torch.empty(N // size, dtype=torch.bfloat16), half)

    return {
        "all_reduce": (lambda: dist.all_reduce(x), [("all_reduce", N, 4)]),
        "reduce_scatter": (lambda: scatter(own, x), [("reduce_scatter", N, 4)]),
        "all_gather": (lambda: gather(x, own), [("all_gather", N, 4)]),
        "bfloat16": (both, [("reduce_scatter", N, 4), ("reduce_scatter", N, 2)]),
        "gather into a list": (lambda: dist.all_gather(pieces, own), [("all_gather", N, 4)]),
        "message": (message, [("message", N, 4)]),
        "asynchronous": (asynchronous, [("all_reduce", N, 4)] * 2),
        "nothing": (lambda: x.sum(), []),
        "a barrier": (lambda: dist.barrier(), []),
        "from hooks": (lambda: (p * 2).sum().backward(), [("all_reduce", N, 4)]),
        "DDP": (lambda: wrapped(torch.ones(1, N)).sum().backward(), [("all_reduce", N, 4)]),
    }


def _count(sent_bytes):
    found = {}
    for name, (step, parts) in _steps().items():
        calls = []

        def counted(step=step, calls=calls):
            calls.append(1)
            return step()

        value = sent_bytes(counted)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        found[name] = value, len(calls), parts
    return found


def _sum(parts, size, **factors) -> float:
    """Bytes for these collectives; `factors` replaces what a kind sends, as a multiple of the whole tensor's bytes."""
    total = 0
    for name, n, itemsize in parts:
        if name in factors:
            total += factors[name] * n * itemsize
        else:
            total += (n * itemsize if size > 1 else 0) if name == "message" else ring(name, size, n, itemsize)
    return total


def _right(name, found, rank, size, of_three):
    got, calls, parts = found[name]
    where = f"{name}, rank {rank} of {size}"
    if got is None:
        raise Wrong("nothing-returned", where=where)
    if not calls:
        raise Wrong("step-not-run", where=where)
    if calls > 1:
        raise Wrong("step-run-again", got=calls, where=where)
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong("not-a-number", got=type(got).__name__, where=where)
    truth = _sum(parts, size)
    allowed = 16 if name == "a barrier" else 0.5  # some count the number in a barrier
    if abs(got - truth) <= 1e-6 * truth + allowed:
        return
    slug = "wrong-volume"
    if size == 1 and got:
        slug = "alone-sends"
    elif name in ("from hooks", "DDP") and not got:
        slug = "backward-missed"
    else:
        slug = _mistake(of_three, slug)
    raise Wrong(slug, expected=f"{truth} bytes", got=f"{got:g} bytes", where=where, size=size)


def _mistake(found, default) -> str:
    """The mistake that explains all that an answer says on three ranks."""
    n = 3
    ring_of = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": (n - 1) / n, "message": 1}
    for slug, factors in (
        ("two-ranks-only", {"all_reduce": 1, "reduce_scatter": 1 / 2, "all_gather": 1 / n}),
        ("handed-in", {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1 / n}),
        ("handed-in", {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1 / n, "message": 2}),
        ("all-reduce-once", {"all_reduce": (n - 1) / n}),
        ("all-reduce-whole", {"all_reduce": 2}),
        ("all-reduce-whole", {"all_reduce": n - 1}),
        ("gather-as-scatter", {"all_gather": (n - 1) / n**2}),
        ("scatter-as-gather", {"reduce_scatter": n - 1}),
        ("receive-counted", {"message": 2}),
        ("message-forgotten", {"message": 0}),
        ("of-all-ranks", {key: n * value for key, value in ring_of.items()}),
        ("elements-not-bytes", {key: value / 4 for key, value in ring_of.items()}),
    ):
        names = (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "message",
            *(["bfloat16"] if "elements" not in slug else []),
        )
        told = {name: _sum(found[name][2], n, **(ring_of | factors)) for name in names}
        if all(isinstance(found[name][0], int | float) and abs(found[name][0] - told[name]) <= 1 for name in names):
            return slug
    return default
