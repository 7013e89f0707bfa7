"""Balise 2: a sum over ranks. Its value, what each rank read, and what it sent."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.probes.operations import Operations, elements_read
from dlojz_tp.probes.ranks import on_ranks
from dlojz_tp.probes.traffic import Traffic, counted_waits
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "no-communication": "The ranks don't communicate. Each rank only sums the values it read; add up these partial "
                        "sums with dist.all_reduce.",
    "all-the-work": "The result is right, but rank {rank} read {read} of {n} values. Each rank should read about "
                    "{fair}: take a slice first, then sum it.",
    "rank-0-only": "One rank did all the work and sent the result to the others. Each rank must sum its own share.",
    "own-share": "You return the sum of this rank's share. The sums of all ranks must still be added up.",
    "reduce-not-all-reduce": "Rank 0 has the sum, the other ranks don't. reduce() gives the sum to one rank, "
                             "all_reduce() to all of them.",
    "sum-not-waited": "Rank {rank} went on before the sum had arrived: with async_op=True, all_reduce only starts. "
                      "Call wait() on the handle that it returns.",
    "mean-not-sum": "You return the sum divided by the number of ranks. Use ReduceOp.SUM, and don't divide.",
    "counted-by-every-rank": "Every rank counted every value, so the sum is world_size times too large. Let each "
                             "rank sum only its own share, and add up these sums once.",
    "tail-dropped": "The last values are missing: n // world_size drops the remainder of the division. "
                    "values[rank::world_size] and torch.tensor_split keep it.",
    "few-values": "Your code fails when there are fewer values than ranks: torch.chunk may return fewer pieces "
                  "than you ask for. torch.tensor_split always returns all of them; some may be empty.",
    "whole-tensor-sent": "Rank {rank} sent {sent} bytes. A sum is one number: add up your share first, then all-reduce.",
    "input-changed": "The function changed its input. all_reduce works in place: give it a new tensor.",
    "unequal-shares": "This works only when n is a multiple of world_size ({error}). values[rank::world_size] and "
                      "torch.tensor_split give shares of different lengths.",
    "index-too-far": "There is no value at this index: {error}. A rank's share ends at the last value at the "
                     "latest, and it may be empty.",
    "rounded": "The sum is rounded: you converted the values to a coarser dtype. Keep their dtype.",
    "wrong-dtype": "The values are {wanted}, but their sum is {found}. Keep the dtype of the values.",
    "not-a-tensor": "You returned {kind}. Return the sum as a tensor of shape (): to get a Python number, the "
                    "program has to wait for the device.",
    "wrong-shape": "Return one number: a tensor without dimensions, shape ().",
    "wrong-sum": "The sum over all ranks is not the sum of the values. Is every value in the share of exactly one "
                 "rank?",
}

KNOWN = (
    ("tuple index out of range", "few-values"),
    ("list index out of range", "few-values"),
    ("IndexError", "index-too-far"),
    ("invalid for input of size", "unequal-shares"),
    ("multiply up to", "unequal-shares"),
)
PATIENCE_S = 4  # a sum takes milliseconds; time in which a rank has no core does not count

_CASES = {
    "the sum of 12 values over 1, 2, 3 and 4 ranks": ("easy",),
    "sizes that are not multiples of the number of ranks: 10, 7 and 1003 values": ("rest", "seven", "many"),
    "fewer values than ranks": ("one",),
    "integers beyond 2⁵³, a strided input, float64: the dtype is kept": ("large", "strided", "double"),
}


def balise_2(distributed_sum):
    """Sums over 1 to 4 ranks of inputs that do not divide, are shorter than the world, are large integers."""
    together = failure = None
    for claim, cases in _CASES.items():
        yield claim
        if not together and not failure:
            try:
                together = _run(distributed_sum, _inputs())  # all at once: the ranks are started once only
            except launch.RankError as error:
                failure = error
        worlds = together or _alone(distributed_sum, cases)
        for case in cases:
            _compare(worlds, case)
    for case in ("strided", "double"):
        _right_dtype(worlds, case)
    if failure:
        raise failure
    yield "the input is not changed"
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            if got["changed"]:
                raise Wrong("input-changed", where=f"rank {rank} of {size}")
    yield "the work is shared: each rank reads its share and sends one number"
    for size, ranks in worlds.items():
        _shared(size, ranks)


def _alone(distributed_sum, cases):
    """These cases by themselves: where one of the others fails, what is said of these must be true."""
    return _run(distributed_sum, cases, PATIENCE_S / 2, KNOWN)


def _inputs():
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(1003, generator=generator)
    return {
        "easy": torch.arange(1.0, 13.0),
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
        if case == "many" or "calls" not in found:
            # one rank's share of the work, however it reads: with ones on that rank alone, the sum says it
            size, mine = dist.get_world_size(), dist.get_rank()
            shares = [distributed_sum(torch.full((len(values),), float(mine == r))) for r in range(size)]
            found["shares"] = [float(one) if isinstance(one, torch.Tensor) and one.numel() == 1 else 0.0 for one in shares]
            found |= {"read": elements_read(operations, values), "sent": traffic.volume(), "calls": traffic.names()}
    return found


def _compare(worlds, case):
    values = _inputs()[case]
    truth = values.sum()
    for size, ranks in worlds.items():
        sums = [got["sums"][case] for got in ranks]
        for rank, got in enumerate(sums):
            where = f"rank {rank} of {size}, {len(values)} values"
            if got is None:
                raise Wrong("nothing-returned")
            if not isinstance(got, torch.Tensor):
                raise Wrong("not-a-tensor", expected=truth, got=got, where=where, kind=type(got).__name__)
            if got.shape != ():
                raise Wrong("wrong-shape", expected=truth, got=got, where=where)
            if not close(got, truth) or not truth.is_floating_point() and int(got) != int(truth):
                raise Wrong(_mistake(values, sums, rank, size, ranks), expected=truth, got=got, where=where, rank=rank)


def _right_dtype(worlds, case):
    values = _inputs()[case]
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            found = got["sums"][case].dtype
            if found != values.dtype:
                raise Wrong("wrong-dtype", where=f"rank {rank} of {size}", wanted=values.dtype, found=found)


def _mistake(values, sums, rank, size, ranks):
    truth, got = values.sum(), sums[rank]
    if not ranks[0]["calls"] and size > 1:
        return "no-communication"
    if ranks[rank]["early"]:
        return "sum-not-waited"
    if values.dtype in (torch.int64, torch.float64) and close(float(got), float(truth), 1e-6):
        return "rounded"
    if close(sums[0], truth) and rank:
        return "reduce-not-all-reduce"
    shares = {
        "strided": values[rank::size].sum(),
        "split": values.tensor_split(size)[rank].sum(),
    }
    if size > 1 and any(close(got, share) for share in shares.values()):
        return "own-share"
    whole = len(values) // size * size
    return nearest(
        got,
        {
            "mean-not-sum": truth / size,
            "counted-by-every-rank": truth * size,
            "tail-dropped": values[:whole].sum(),
        },
        "wrong-sum",
    )


def _shared(size, ranks):
    n = len(_inputs()["many"])
    allowed = n // size + n % size  # the last rank may take the rest of the division
    reads = [max(got["read"], round(ranks[0]["shares"][rank])) for rank, got in enumerate(ranks)]
    busy = [rank for rank, read in enumerate(reads) if read > 0]
    for rank, got in enumerate(ranks):
        where = f"rank {rank} of {size}, {n} values"
        if size > 1 and not got["calls"]:
            raise Wrong("no-communication", where=where)
        if got["sent"] > 64 * size + 512:  # a number for each rank, or a few numbers pickled; a share is 1000 bytes
            raise Wrong("whole-tensor-sent", where=where, rank=rank, sent=got["sent"])
        if reads[rank] > allowed:
            slug = "rank-0-only" if size > 1 and len(busy) == 1 else "all-the-work"
            raise Wrong(slug, where=where, rank=rank, read=reads[rank], n=n, fair=-(-n // size))
