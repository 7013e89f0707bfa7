"""Steps of which is known what a rank sends in them: collectives, a message, what starts in backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def steps() -> dict:
    """On a rank: the functions of SENT, by the same names."""
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


def ring(name: str, size: int, n: int = N, itemsize: int = 4) -> int:
    """Bytes that one rank sends: n elements in `size` chunks go round a ring, one chunk a step."""
    return n // size * itemsize * (size - 1) * (2 if name == "all_reduce" else 1)


def bytes_sent(name: str, size: int) -> float:
    """What a rank of so many sends in a step; a barrier counts nothing."""
    one = lambda kind, n, itemsize: n * itemsize * (size > 1) if kind == "message" else ring(kind, size, n, itemsize)  # noqa: E731
    return float(sum(one(*part) for part in SENT[name]))
