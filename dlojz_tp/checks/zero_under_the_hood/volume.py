"""Balise 9: the bytes that a rank sends in a step, counted while the step runs."""

import numbers

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.checking.looks import Look, Value, judged
from dlojz_tp.checks.zero_under_the_hood.worlds import on_ranks

N = 240  # elements; every number of ranks divides it
SENT = {  # step: what it sends, each (collective, elements of the whole tensor, bytes of one)
    "all_reduce": [("all_reduce", N, 4)],
    "reduce_scatter": [("reduce_scatter", N, 4)],
    "all_gather": [("all_gather", N, 4)],
    "bfloat16": [("reduce_scatter", N, 4), ("reduce_scatter", N, 2)],
    "gather into a list": [("all_gather", N, 4)],
    "message": [("message", N, 4)],
    "asynchronous": [("all_reduce", N, 4)] * 2,
    "nothing": [],
    "a barrier": [],
    "from hooks": [("all_reduce", N, 4)],
    "DDP": [("all_reduce", N, 4)],
}
GROUPS = list(SENT)[:5], list(SENT)[5:9], list(SENT)[9:]
PLACES = [(size, rank) for size in (2, 3, 4, 1) for rank in range(size)]


def _steps():
    """The functions of SENT, by the same names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    x, own, half = torch.ones(N), torch.ones(N // size), torch.ones(N, dtype=torch.bfloat16)
    pieces = [torch.empty(N // size) for _ in range(size)]
    p = nn.Parameter(torch.ones(N))
    p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    wrapped = DistributedDataParallel(nn.Linear(N, 1, bias=False))

    def message():
        if size > 1:
            ends = (dist.isend, x, (rank + 1) % size), (dist.irecv, torch.empty(N), (rank - 1) % size)
            for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
                work.wait()

    def asynchronous():
        for work in [dist.all_reduce(torch.ones(N), async_op=True) for _ in range(2)]:
            work.wait()

    def both():
        scatter(own, half.float())
        scatter(torch.empty(N // size, dtype=torch.bfloat16), half)

    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "reduce_scatter": lambda: scatter(own, x),
        "all_gather": lambda: gather(x, own),
        "bfloat16": both,
        "gather into a list": lambda: dist.all_gather(pieces, own),
        "message": message,
        "asynchronous": asynchronous,
        "nothing": lambda: x.sum(),
        "a barrier": lambda: dist.barrier(),
        "from hooks": lambda: (p * 2).sum().backward(),
        "DDP": lambda: wrapped(torch.ones(1, N)).sum().backward(),
    }


def _count(sent_bytes):
    """{step: (what the answer returns, how often it ran the step)} on a rank."""
    found = {}
    for name, step in _steps().items():
        calls = []

        def counted(step=step, calls=calls):
            calls.append(1)
            return step()

        value = sent_bytes(counted)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, numbers.Real):  # NumPy's and fractions, too
            value = float(value)
        found[name] = value, len(calls)
    return found


def observe(sent_bytes):
    """What came and how often the step ran, everywhere; for each group of steps, bytes (places, steps)."""
    worlds = on_ranks(_count, sent_bytes)
    ranks = [worlds[size][rank] for size, rank in PLACES]
    values = [value for found in ranks for value, _ in found.values()]
    kinds = [None if value is None else type(value).__name__ for value in values]
    yield {"calls": [calls for found in ranks for _, calls in found.values()], "kinds": kinds}
    for group in GROUPS:
        yield {group[0]: torch.tensor([[found[name][0] for name in group] for found in ranks], dtype=torch.float64)}


def ring(name: str, size: int, n: int = N, itemsize: int = 4) -> int:
    """Bytes that one rank sends: n elements in `size` chunks go round a ring, one chunk a step."""
    return n // size * itemsize * (size - 1) * (2 if name == "all_reduce" else 1)


def _due(name, size):
    one = lambda kind, n, itemsize: n * itemsize * (size > 1) if kind == "message" else ring(kind, size, n, itemsize)  # noqa: E731
    return float(sum(one(*part) for part in SENT[name]))


def _look(claim, group, hint):
    due = torch.tensor([[_due(name, size) for name in group] for size, _ in PLACES], dtype=torch.float64)
    allowed = torch.tensor([16 if name == "a barrier" else 0.5 for name in group])  # some count the number in a barrier

    def wrong(seen):
        return (seen - due).abs() > 1e-6 * due + allowed

    def fields(seen, _):
        place, step = wrong(seen).nonzero()[0].tolist()
        size, rank = PLACES[place]
        return {"where": f"{group[step]}, rank {rank} of {size}", "size": size,
                "expected": f"{due[place, step]:g} bytes", "got": f"{seen[place, step]:g} bytes"}  # fmt: skip

    return Value(claim, group[0], due, hint, lambda seen, _: not wrong(seen).any(), fields)


def _missed(seen, due):
    """Whether nothing was counted where something was sent."""
    return "backward-missed" if ((seen == 0) & (due > 0)).any() else "wrong-volume"


LOOKS = [
    Look("single collectives, in float32 and bfloat16 (1, 2, 3 and 4 ranks)", "calls", [1] * len(PLACES) * len(SENT),
         lambda seen, _: "step-run-again" if min(seen) else "step-not-run", fields=lambda seen, _: {"got": max(seen), "expected": 1}),
    Look("", "kinds", ("int", "float"), lambda seen, _: "nothing-returned" if None in seen else "not-a-number",
         lambda seen, due: set(seen) <= set(due), lambda seen, due: {"got": next((kind for kind in seen if kind not in due), ""), "expected": "a number"}),
    _look("", GROUPS[0], "wrong-volume"),
    _look("a message to the next rank, an asynchronous one, nothing at all", GROUPS[1], "wrong-volume"),
    _look("what starts in backward: hooks, and DistributedDataParallel", GROUPS[2], _missed),
]  # fmt: skip


def balise_9(sent_bytes):
    yield from judged(LOOKS, observe, sent_bytes)
