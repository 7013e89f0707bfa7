"""Balise 8: a ring all-reduce from point-to-point messages."""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import on_ranks, own_work
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import hung
from dlojz_tp.judging.probes.shared_looks import first_found, recognised
from dlojz_tp.judging.probes.traffic import Traffic, sent
from dlojz_tp.judging.probes.withheld import Kept
from dlojz_tp.launch import RankError
from dlojz_tp.measure import LiveBytes

KNOWN = ((hung, "ring-deadlock"),)
BIG = 4000  # elements of the case whose bytes are counted
F32, F64 = torch.float32, torch.float64
CASES = {  # in order: a fault shows at the easiest case
    "twelve": ((12,), F64), "big": ((BIG,), F32), "thirteen": ((13,), F64), "five": ((5,), F64), "two": ((2,), F64),
    "one": ((1,), F64), "table": ((3, 5), F64), "integers": ((7,), torch.int64), "turned": ((6, 4), F64),
}  # fmt: skip
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


@functools.cache
def own(case, size):
    """What the ranks hold, (ranks, ...)."""
    return torch.stack([given(case, rank) for rank in range(size)])


def right(found, case, size):
    """Which elements are those of the sum."""
    truth = own(case, size).sum(dim=0)
    if not truth.is_floating_point():
        return found == truth
    tol = 1e-9 if truth.dtype == torch.float64 else 2e-5
    return torch.isclose(found.double(), truth.double(), rtol=tol, atol=tol * 100)


def is_sum(found, case, size):
    like = isinstance(found, torch.Tensor) and found.shape == own(case, size)[0].shape
    return like and bool(right(found, case, size).all())


def observe_rank(ring_all_reduce, cases):
    found, rank = {}, dist.get_rank()
    for case in cases:
        x = given(case, rank).to(launch.device())
        with Kept() as running, LiveBytes() as live, Traffic() as log, own_work():
            out = ring_all_reduce(x)
        out = x if out is None else out
        out = out.detach().cpu().clone() if isinstance(out, torch.Tensor) else out
        calls, lost = sent(log.events), running.forgotten()
        # gloo would hang in what follows
        stopped = bool(lost) and not is_sum(out, case, dist.get_world_size())
        found[case] = {
            "sum": out, "peak": live.peak, "stopped": stopped, "dropped": running.dropped,
            "others": [call.name for call in calls if call.name not in ALLOWED],
            "messages": [(call.peer, call.bytes) for call in calls if call.name == "send"],
        }  # fmt: skip
        if stopped:
            break
        dist.barrier()
    return found


def observe(ring_all_reduce):
    """Each case on each rank of each world; where the small ones fail, whether the size was the reason."""
    failure = ""
    try:
        worlds = on_ranks(observe_rank, ring_all_reduce, list(CASES), known=KNOWN)
    except (RankError, Wrong) as error:
        failed = error if isinstance(error, RankError) else error.__cause__
        if isinstance(error, Wrong) and error.slug != "ring-deadlock":
            raise
        if failed.world_size == 1:  # the last one
            raise Wrong("ring-of-one", got=failed.summary) from None
        try:
            worlds, failure = on_ranks(observe_rank, ring_all_reduce, ["twelve"], timeout=3), failed.summary
        except RankError:
            raise error from None
    seen = [
        SimpleNamespace(case=case, rank=rank, size=size, first=ranks[0].get(case), **found)
        for size, ranks in worlds.items() for rank, got in enumerate(ranks) for case, found in got.items()
    ]  # fmt: skip
    return {"seen": seen, "failure": failure}


def look_at(cases, find, claim=""):
    """A look at some cases: what find(one) finds in one of them on one rank; see `recognised`."""

    def found(observed):
        for one in observed["seen"]:
            if one.case in cases:
                where = f"rank {one.rank} of {one.size}, {' × '.join(map(str, CASES[one.case][0]))} values"
                yield find(one), {"rank": one.rank, "where": where}

    return recognised(claim, lambda observed: first_found(found(observed)))


def sum_hint(one):
    """What it is that is not the sum."""
    mine = own(one.case, one.size)
    if not isinstance(one.sum, torch.Tensor) or one.sum.shape != mine[0].shape:
        return "shape-lost"
    if one.sum.dtype != mine.dtype:
        return "dtype-lost"
    good, n = right(one.sum, one.case, one.size).flatten(), one.sum.numel()
    if one.size == 1:
        return "ring-of-one"
    if one.case == "turned":
        return "view-ignored"
    if close(one.sum, mine[one.rank]):
        return "nothing-summed"
    if mine.is_floating_point() and close(one.sum, mine.sum(dim=0) / one.size):
        return "mean-of-the-ring"
    if n % one.size and good[: n - n % one.size].all():
        return "tail-not-summed"
    theirs, found = mine.double().flatten(1)[:, ~good], one.sum.double().flatten()[~good]
    # how often is each rank's value in what came out?
    if (
        one.size < 4
        and mine.is_floating_point()
        and torch.linalg.lstsq(theirs.t(), found[:, None]).solution.max() > 1.5
    ):
        return "added-too-often"
    return "half-a-ring" if good.any() or torch.isclose(found, theirs[one.rank]).any() else "wrong-sum"


def not_the_sum(one):
    if is_sum(one.sum, one.case, one.size) and one.sum.dtype == CASES[one.case][1]:
        return None
    return sum_hint(one), {"expected": own(one.case, one.size).sum(dim=0), "got": one.sum}


def too_much(one):
    """Whether it sends more than 2 (N − 1) chunks."""
    sent, allowed = sum(nbytes for _, nbytes in one.messages), 2 * (one.size - 1) * -(-BIG // one.size) * 4
    return sent > allowed and ("whole-tensor-round", {"sent": sent, "allowed": allowed})


def strangers(one):
    peers = sorted({peer for peer, nbytes in one.messages if nbytes})
    far = any((peer - one.rank) % one.size not in (1, one.size - 1) for peer in peers)
    return far and ("not-a-neighbour", {"peers": ", ".join(map(str, peers))})


def other_bits(one):
    if torch.equal(one.sum, one.first["sum"]):
        return None
    return "bits-differ", {"error": f"by up to {(one.sum - one.first['sum']).abs().max().item():.2g}"}


def held(one):
    """Whether it holds too much; of few ranks a chunk is half a tensor: four of them tell."""
    return one.peak > 4 * BIG * (1 + 3.2 / one.size) and ("memory", {"peak": one.peak, "held": 4 * BIG})


LOOKS = [
    look_at(CASES, lambda one: one.stopped and ("ring-not-waited", {}),
            "the sum of 12 values on 2, 3 and 4 ranks, and on one rank"),
    look_at(CASES, lambda one: one.dropped and ("send-dropped", {})),
    look_at(CASES, lambda one: one.others and ("collective-used", {"name": one.others[0]})),
    look_at(["twelve"], not_the_sum),
    Look("", "failure", "", "does-not-divide", fields=lambda seen, _: {"error": seen, "got": ""}),
    look_at(["big"], too_much, "only messages to a neighbour, 2 (N − 1) / N of the tensor from each rank"),
    look_at(["big"], strangers),
    *(look_at([case], not_the_sum, "sizes that are not multiples of the number of ranks: 13, 5, 2 and 1 values; a "
              "table, integers, a transposed tensor") for case in CASES),
    look_at(["big"], other_bits, "all ranks hold the same bits"),
    look_at(["big"], held, "memory: the sum and little more"),
]  # fmt: skip


def balise_8(ring_all_reduce):
    """Sums of nine tensors on 1 to 4 ranks; what each rank sends, to whom, and what it holds meanwhile."""
    yield from judged(LOOKS, observe, ring_all_reduce)
    yield "the same where each rank has a GPU"
    on_gpus(lambda _, answer: answer(given("thirteen", dist.get_rank()).to(launch.device())), ring_all_reduce,
            known=left_on_cpu("ring-not-on-gpu"))  # fmt: skip
