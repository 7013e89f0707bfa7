"""Balise 2: a sum over ranks. Its value, what each rank read, and what it sent."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits
from dlojz_tp.judging.probes.withheld import Withheld
from dlojz_tp.measure.operations import Operations, elements_read

KNOWN = (
    ("tuple index out of range", "few-values"),
    ("list index out of range", "few-values"),
    ("IndexError", "index-too-far"),
    ("invalid for input of size", "unequal-shares"),
    ("multiply up to", "unequal-shares"),
)
PATIENCE_S = 4  # a sum takes milliseconds; time in which a rank has no core does not count

_CASES = {
    "the sum of 12 values over 1, 2, 3 and 4 ranks": ("easy", "long"),
    "sizes that are not multiples of the number of ranks: 10, 7 and 1003 values": ("rest", "seven", "many"),
    "fewer values than ranks": ("one",),
    "integers beyond 2⁵³, a strided input, float64: the dtype is kept": ("large", "strided", "double"),
}


def balise_2(distributed_sum):
    """Sums over 1 to 4 ranks of inputs that do not divide, are shorter than the world, are large integers."""
    together = failure = told = None
    for claim, cases in _CASES.items():
        yield claim
        if not together and not failure:
            try:
                together = _run(distributed_sum, _inputs())  # all at once: the ranks are started once only
            except launch.RankError as error:
                failure = error
        try:
            worlds = together or _alone(distributed_sum, cases)
        except Wrong as wrong:
            fails(wrong)  # these sizes may be at the edge: the others are judged
            told = True
            continue
        for case in cases:
            for size, ranks in worlds.items():
                for rank in range(size):
                    where = f"rank {rank} of {size}, {len(_inputs()[case])} values"
                    yield from judged(_sum_looks(claim, case), _one, ranks, case, rank, where=where)
    if failure and not told:
        raise failure
    worlds = together or _alone(distributed_sum, ("easy", "long"))
    for looks in WORK_LOOKS:
        for size, ranks in worlds.items():
            yield from judged(looks, lambda seen=ranks: seen, at=size)


def _alone(distributed_sum, cases):
    """These cases by themselves: where one of the others fails, what is said of these must be true."""
    return _run(distributed_sum, cases, PATIENCE_S / 2, KNOWN)


def _inputs():
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(1003, generator=generator)
    return {
        "easy": torch.arange(1.0, 13.0),
        "long": torch.rand(1008, generator=generator),  # shared by 1 to 4 ranks without a rest
        "rest": torch.arange(1.0, 11.0),
        "seven": torch.tensor([3.0, -1.0, 4.0, -1.0, 5.0, -9.0, 2.5]),
        "many": many,
        "one": torch.tensor([2.5]),
        "large": torch.tensor([2**53 + 1, 2, 4, 8, 16]),
        "strided": torch.arange(20.0)[::2],
        "double": torch.tensor([2**24 + 1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64),
    }


def _run(distributed_sum, cases, seconds=PATIENCE_S, known=()):
    return on_ranks(_sums, distributed_sum, tuple(cases), known=known, timeout=seconds)


def _sums(distributed_sum, cases):
    """On a rank: the answer's sums, and what it read and sent for the longest input."""
    found = {"sums": {}, "changed": False, "early": False}
    for case, values in _inputs().items():
        if case not in cases:
            continue
        before = values.clone()
        with Withheld(), Operations() as operations, Traffic() as traffic, counted_waits() as waits:
            got = distributed_sum(values)
        found["early"] |= len(waits) < len(traffic.calls)
        found["sums"][case] = got.detach() if isinstance(got, torch.Tensor) else got
        found["changed"] |= not torch.equal(before, values)
        if case == "long" or "calls" not in found:
            # one rank's share of the work, however it reads: with ones on that rank alone, the sum says it
            size, mine = dist.get_world_size(), dist.get_rank()
            shares = [distributed_sum(torch.full((len(values),), float(mine == r))) for r in range(size)]
            found["shares"] = [
                float(one) if getattr(one, "shape", None) == () or type(one) in (int, float) else 0.0 for one in shares
            ]
            found |= {"read": elements_read(operations, values), "sent": traffic.volume(), "calls": traffic.names()}
    return found


def _one(ranks, case, rank):
    """What a rank returned, and beside it what the others did."""
    sums = [got["sums"][case] for got in ranks]
    mine, values = sums[rank], _inputs()[case]
    yield {"kind": None if mine is None else type(mine).__name__, "dtype": getattr(mine, "dtype", values.dtype)}
    mine = torch.as_tensor(mine, dtype=None if isinstance(mine, torch.Tensor) else values.dtype)
    alike = {"values": values, "sums": sums, "rank": rank, "calls": ranks[0]["calls"], "early": ranks[rank]["early"]}
    yield {"shape": tuple(mine.shape), "sum": alike | {"got": mine}}


def _sum_looks(claim, case):
    values = _inputs()[case]
    looks = [
        Look(claim, "kind", "Tensor", "not-a-tensor", fields="kind"),
        Look("", "shape", (), "wrong-shape"),
        Look("", "sum", values.sum(), _mistake, holds=_right, fields=lambda seen, _: seen),
        Look("", "dtype", values.dtype, "wrong-dtype", fields=lambda seen, due: {"wanted": due, "found": seen}),
    ]
    return looks if case in ("strided", "double") else looks[:3]


def _right(seen, truth):
    return close(seen["got"], truth) and (truth.is_floating_point() or int(seen["got"]) == int(truth))


def _mistake(seen, truth):
    values, sums, got, rank, size = seen["values"], seen["sums"], seen["got"], seen["rank"], len(seen["sums"])
    if not seen["calls"] and size > 1:
        return "no-communication"
    if seen["early"]:
        return "sum-not-waited"
    if values.dtype in (torch.int64, torch.float64) and close(float(got), float(truth), 1e-6):
        return "rounded"
    if close(sums[0], truth) and rank:
        return "reduce-not-all-reduce"
    if size > 1 and any(close(got, share.sum()) for share in (values[rank::size], values.tensor_split(size)[rank])):
        return "own-share"
    known = {"mean-not-sum": truth / size, "counted-by-every-rank": truth * size,
             "tail-dropped": values[: len(values) // size * size].sum()}  # fmt: skip
    return mistake_of(got, known, "wrong-sum")


def _talks(calls, size):
    return bool(calls) or size == 1


def _greedy(ranks):
    """The first rank that reads more than its share: as it was read, or as its share of the sum says."""
    reads = [max(got["read"], round(ranks[0]["shares"][rank])) for rank, got in enumerate(ranks)]
    size, most = len(ranks), N // len(ranks) + 8  # a few more than its share, where it looks at the first value, too
    for rank, read in enumerate(reads):
        if read > most:
            told = {"expected": most, "got": reads, "where": f"rank {rank} of {size}"}
            slug = "rank-0-only" if sum(read > 0 for read in reads) == 1 < size else "all-the-work"
            return slug, told | {"rank": rank, "read": read, "n": N, "fair": -(-N // size)}
    return None


N = len(_inputs()["long"])
WORK_LOOKS = [
    [each_rank("the input is not changed", "changed", False, "input-changed")],
    [
        each_rank("the work is shared: each rank reads its share and sends one number", "calls",
                  lambda size: size, "no-communication", holds=_talks),
        # a number for each rank, or a few numbers pickled; a share is 1000 bytes
        each_rank("", "sent", lambda size: 64 * size + 512, "whole-tensor-sent", holds=at_most,
                  fields="sent"),
        recognised("", _greedy),
    ],
]  # fmt: skip
