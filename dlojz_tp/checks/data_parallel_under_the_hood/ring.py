"""Balise 8: a ring all-reduce from point-to-point messages."""

import sys

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.data_parallel_under_the_hood.common import on_ranks, own_work
from dlojz_tp.launch import RankError
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import hung
from dlojz_tp.probes.traffic import Traffic, sent
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "ring-deadlock": "The ranks wait for each other: {error}. If every rank sends before it receives, nobody "
                     "receives: start isend and irecv, then wait for both.",
    "ring-not-waited": "Rank {rank} started to receive a message, and used its values without waiting for them. "
                       "First call wait() on the handle that irecv returns.",
    "send-dropped": "Rank {rank} threw away the handle of an isend, and waited for another message. Without its "
                    "handle, a message may be lost before it is sent, and the next rank waits forever: keep the "
                    "handle, and call wait() on it too.",
    "collective-used": "You called {name}. Only messages between two ranks are allowed here: isend and irecv.",
    "nothing-summed": "Rank {rank} still holds its own values, at least in part. In each step of the first round, "
                      "add what arrives to the rank's own chunk.",
    "half-a-ring": "Rank {rank} has at most some chunks of the sum. In the first round, add each chunk that "
                   "arrives to the chunk at the same place, so that each rank ends with one finished chunk; a "
                   "second round of N − 1 steps passes the finished chunks on.",
    "added-too-often": "Some values were added more than once. The reduce-scatter has N − 1 steps, and in the "
                       "second round each chunk that arrives replaces the old one.",
    "mean-of-the-ring": "You return the mean. Return the sum.",
    "whole-tensor-round": "Rank {rank} sent {sent} bytes, but {allowed} are enough: 2 (N − 1) messages, each with "
                          "one of N chunks.",
    "not-a-neighbour": "Rank {rank} sent to ranks {peers}. In a ring, each rank sends only to the next one.",
    "does-not-divide": "Your code fails when the size is not a multiple of the number of ranks: {error}. "
                       "torch.tensor_split gives N chunks, some of them one element longer; with 2 elements for 4 "
                       "ranks, some are empty.",
    "tail-not-summed": "The last elements are not summed: the size is not a multiple of the number of ranks.",
    "shape-lost": "The result doesn't have the shape of the tensor.",
    "dtype-lost": "The result doesn't have the dtype of the tensor.",
    "bits-differ": "The ranks' sums differ in the last bits ({error}). In a ring, each chunk is added up once, on "
                   "one way round the ring, and then copied: all ranks hold the same bits.",
    "view-ignored": "This is right for a contiguous tensor, but wrong for a transposed one. Its chunks may be "
                    "copies: return the result, or copy it back.",
    "memory": "You held {peak} bytes at once in addition to the tensor of {held} bytes. The sum and one chunk for "
              "what arrives are enough: cut one flat tensor into views, change them in place (+=, copy_), and "
              "reuse one buffer in all steps.",
    "ring-of-one": "A single rank has nobody to send to: return the tensor as it is.",
    "ring-not-on-gpu": "On GPUs, a tensor of the ring is in the CPU's memory: {error}. Make the sum and the buffer "
                       "on the device of x, with torch.empty_like(x) or device=x.device; NCCL sends and receives "
                       "only there.",
    "wrong-sum": "The result is not the sum over the ranks.",
}
KNOWN = ((hung, "ring-deadlock"),)
BIG = 4000  # elements of the case whose bytes are counted
CASES = {  # in order: a fault shows at the easiest case
    "twelve": ((12,), torch.float64),
    "big": ((BIG,), torch.float32),
    "thirteen": ((13,), torch.float64),
    "five": ((5,), torch.float64),
    "two": ((2,), torch.float64),
    "one": ((1,), torch.float64),
    "table": ((3, 5), torch.float64),
    "integers": ((7,), torch.int64),
    "turned": ((6, 4), torch.float64),
}
ALLOWED = ("send", "recv", "recv_any_source")


def given(case, rank):
    """What one rank holds; values of very different size, so that the order of additions shows in the last bits."""
    shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(1000 * rank + len(case))
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=dtype) * 10 ** (4 * torch.rand(shape, generator=generator) - 2)
    x = x.to(dtype)
    return x.t() if case == "turned" else x


def balise_8(ring_all_reduce):
    """Sums of nine tensors on 1 to 4 ranks; what each rank sends, to whom, and what it holds meanwhile."""
    yield "the sum of 12 values on 2, 3 and 4 ranks, and on one rank"
    worlds = _run(ring_all_reduce)
    for size, ranks in worlds.items():
        _library(ranks, size)
    _sums(worlds, "twelve")
    yield "only messages to a neighbour, 2 (N − 1) / N of the tensor from each rank"
    for size, ranks in worlds.items():
        _traffic(ranks, size)
    yield ("sizes that are not multiples of the number of ranks: 13, 5, 2 and 1 values; a table, integers, a "
           "transposed tensor")
    for case in CASES:
        _sums(worlds, case)
    yield "all ranks hold the same bits"
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            if not torch.equal(got["big"]["sum"], ranks[0]["big"]["sum"]):
                gap = (got["big"]["sum"] - ranks[0]["big"]["sum"]).abs().max().item()
                raise Wrong("bits-differ", error=f"by up to {gap:.2g}", where=f"ranks 0 and {rank} of {size}")
    yield "memory: the sum and little more"
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            held = 4 * BIG
            if (
                got["big"]["peak"] > held + 3.2 * held / size
            ):  # of few ranks a chunk is half a tensor: four of them tell
                raise Wrong("memory", peak=got["big"]["peak"], held=held, where=f"rank {rank} of {size}")
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, ring_all_reduce, known=left_on_cpu("ring-not-on-gpu"))


def _run(ring_all_reduce):
    """All worlds; where the small cases fail, find out whether the size was the reason."""
    try:
        return on_ranks(_on_rank, ring_all_reduce, list(CASES), known=KNOWN)
    except (RankError, Wrong) as error:
        failure = error if isinstance(error, RankError) else error.__cause__
        if isinstance(error, Wrong) and error.slug != "ring-deadlock":
            raise
        if failure.world_size == 1:  # the last one
            raise Wrong("ring-of-one", got=failure.summary) from None
        try:
            _sums(on_ranks(_on_rank, ring_all_reduce, ["twelve"], timeout=3), "twelve")
        except RankError:
            raise error from None
        raise Wrong("does-not-divide", error=failure.summary) from None


def _on_rank(ring_all_reduce, cases):
    found, rank = {}, dist.get_rank()
    for case in cases:
        x = given(case, rank).to(launch.device())
        with _Kept() as running, LiveBytes() as live, Traffic() as log, own_work():
            out = ring_all_reduce(x)
        result = x if out is None else out
        found[case] = {
            "sum": result.detach().cpu().clone() if isinstance(result, torch.Tensor) else result,
            "returned": out is not None, "events": log.events, "peak": live.peak,
            "forgotten": running.forgotten(), "dropped": running.dropped,
        }  # fmt: skip
        if running.forgotten() and not _is_sum(found[case]["sum"], case):
            break  # gloo would hang in what follows
        dist.barrier()
    return found


def _on_gpu(_, ring_all_reduce):
    ring_all_reduce(given("thirteen", dist.get_rank()).to(launch.device()))


class _Kept(Withheld):
    """Withheld; keeps sends alive, which gloo forgets with their handles, and counts those that nobody else kept."""

    def __init__(self):
        super().__init__()
        self._sends, self.dropped = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket._qualified_op_name == "c10d::send":
            self._sends.append(dist.Work.unbox(out))
        return out

    def _wait(self, work, *args, **kwargs):
        # an entry that only this list and the call itself refer to
        self.dropped += sum(sys.getrefcount(self._sends[k]) <= 2 for k in range(len(self._sends)))
        self._sends = [send for send in self._sends if send is not work]
        return super()._wait(work, *args, **kwargs)


def _is_sum(found, case):
    truth = torch.stack([given(case, rank) for rank in range(dist.get_world_size())]).sum(dim=0)
    return isinstance(found, torch.Tensor) and found.shape == truth.shape and bool(_right(found, truth).all())


def _library(ranks, size):
    for rank, got in enumerate(ranks):
        for case, found in got.items():
            if found["forgotten"] and len(got) < len(CASES):
                raise Wrong("ring-not-waited", rank=rank, where=f"rank {rank} of {size}, {case}")
            if found["dropped"]:
                raise Wrong("send-dropped", rank=rank, where=f"rank {rank} of {size}, {case}")
            for name, *_ in sent(found["events"]):
                if name not in ALLOWED:
                    raise Wrong("collective-used", name=name, where=f"rank {rank} of {size}, {case}")


def _sums(worlds, case):
    for size, ranks in worlds.items():
        own = [given(case, rank) for rank in range(size)]
        truth = torch.stack(own).sum(dim=0)
        for rank, got in enumerate(ranks):
            found = got[case]["sum"]
            where = f"rank {rank} of {size}, {' × '.join(map(str, truth.shape))} values"
            if not isinstance(found, torch.Tensor) or found.shape != truth.shape:
                raise Wrong("shape-lost", expected=truth, got=found, where=where)
            if found.dtype != truth.dtype:
                raise Wrong("dtype-lost", expected=truth.dtype, got=found.dtype, where=where)
            if _right(found, truth).all():
                continue
            raise Wrong(
                _mistake(found, truth, own, rank, size, case), expected=truth, got=found, where=where, rank=rank
            )


def _right(found, truth):
    if not truth.is_floating_point():
        return found == truth
    tol = 1e-9 if truth.dtype == torch.float64 else 2e-5
    return torch.isclose(found.double(), truth.double(), rtol=tol, atol=tol * 100)


def _mistake(found, truth, own, rank, size, case):
    right = _right(found, truth).flatten()
    if size == 1:
        return "ring-of-one"
    if case == "turned":
        return "view-ignored"
    if close(found, own[rank]):
        return "nothing-summed"
    if truth.is_floating_point() and close(found, truth / size):
        return "mean-of-the-ring"
    n = len(right)
    if n % size and right[: n - n % size].all():
        return "tail-not-summed"
    mine = torch.stack(own).double().flatten(1)[:, ~right]
    if size < 4 and truth.is_floating_point():
        # how often is each rank's value in what came out?
        weights = torch.linalg.lstsq(mine.t(), found.double().flatten()[~right][:, None]).solution
        if weights.max() > 1.5:
            return "added-too-often"
    parts = torch.isclose(found.double().flatten()[~right], mine[rank])
    return "half-a-ring" if right.any() or parts.any() else "wrong-sum"


def _traffic(ranks, size):
    for rank, got in enumerate(ranks):
        messages = [(call.peer, call.bytes) for call in sent(got["big"]["events"]) if call.name == "send"]
        total = sum(nbytes for _, nbytes in messages)
        allowed = 2 * (size - 1) * -(-BIG // size) * 4
        peers = sorted({peer for peer, nbytes in messages if nbytes})
        if total > allowed:
            raise Wrong("whole-tensor-round", rank=rank, sent=total, allowed=allowed, where=f"rank {rank} of {size}")
        if any((peer - rank) % size not in (1, size - 1) for peer in peers):
            raise Wrong("not-a-neighbour", rank=rank, peers=", ".join(map(str, peers)), where=f"rank {rank} of {size}")
