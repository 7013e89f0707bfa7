"""Balise 4: gradients averaged in flat buckets."""

from typing import NamedTuple

import torch
from torch import nn

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.checks.data_parallel_under_the_hood.average import (
    GIVEN,
    KNOWN,
    as_buckets,
    averaged,
    given_of,
    means,
    thrift,
)
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import case_by_case, on_each, on_ranks
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import sent

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SIX = (F32, F64, BF16, F16, F64, BF16)
BUCKETS = "lists of parameters"


class Case(NamedTuple):
    """Parameters of so many elements, of a dtype each, and a capacity in bytes."""

    sizes: list
    capacity: int
    dtypes: tuple

    @property
    def held(self) -> list[int]:
        return [size * dtype.itemsize for size, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def __str__(self):
        return f"parameters of {self.held} bytes, capacity {self.capacity}"


def of_one(dtype, *pairs):
    return [Case(sizes, capacity, (dtype,) * len(sizes)) for sizes, capacity in pairs]


CASES = {
    "buckets of float32 parameters: all parameters, from the end, within the capacity":
        of_one(F32, ([9] * 8, 40), ([1, 2, 3, 4, 5, 6, 7], 50), ([10] * 5, 80), ([6, 4, 3, 1, 2], 24)),
    "a parameter larger than the capacity; one that fills it exactly":
        of_one(F32, ([2, 50, 2], 40), ([50, 2, 60], 40), ([5, 5], 40), ([5, 5, 10, 1], 40), ([3], 1)),
    "float64 and bfloat16, with elements of eight and two bytes":
        of_one(F64, ([6, 4, 3, 1, 2, 5], 80)) + of_one(BF16, ([6, 4, 3, 1, 2, 5], 24)),
    "two dtypes never share a bucket":
        [Case([4] * 6, 1000, SIX), Case([4] * 5, 40, (BF16,) * 4 + (F32,)), Case([4] * 6, 40, SIX)],
}  # fmt: skip


def observe_buckets(make_buckets, case):
    """The buckets, as lists of numbers of parameters; what it fails with where one is too large for any."""
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(case.sizes, case.dtypes, strict=True)]
    place = {id(p): k for k, p in enumerate(parameters)}
    seen = {"case": case, "error": "", "kind": BUCKETS, "buckets": []}
    try:
        found = make_buckets(list(parameters), case.capacity)
    except (IndexError, ValueError, RecursionError) as error:
        if max(case.held) <= case.capacity:
            raise
        return seen | {"error": f"{type(error).__name__}: {error}"}
    try:
        return seen | {"buckets": [[place[id(p)] for p in bucket] for bucket in found]}
    except (TypeError, KeyError):
        return seen | {"kind": None if found is None else type(found).__name__}


def of_buckets(find):
    """A look at what find(buckets, case) finds."""

    def wrong(seen):
        found = find(seen["buckets"], seen["case"]) if not seen["error"] else None
        return found and (found[0], {"got": f"parameters {seen['buckets']}"} | dict(*found[1:]))

    return recognised("", wrong)


def tidy(buckets, case):
    """Whether each bucket has something in it, of one dtype, in order."""
    for bucket in buckets:
        if not bucket:
            return ("empty-bucket",)
        if len(kinds := {str(case.dtypes[k]) for k in bucket}) > 1:
            return "dtypes-mixed", {"dtypes": " and ".join(sorted(kinds))}
        if bucket != sorted(bucket, reverse=True):
            return ("order-in-bucket",)
    return None


def by_dtype(buckets, case):
    """Of each dtype the buckets that hold no other, each from the end: (place in the list, parameters)."""
    placed = [(place, sorted(bucket, reverse=True)) for place, bucket in enumerate(filter(None, buckets))]
    return [[one for one in placed if {case.dtypes[k] for k in one[1]} == {dtype}] for dtype in {*case.dtypes}]


def in_order(buckets, case):
    """Whether each parameter is in one bucket, and the buckets of a dtype follow one another, from the end."""
    flat, n = sum(buckets, []), len(case.sizes)
    if len({*flat}) < len(flat):
        return ("parameter-doubled",)
    if len(flat) < n:
        return "parameter-lost", {"lost": n - len(flat), "n": n}
    for mine in ([bucket for _, bucket in found] for found in by_dtype(buckets, case)):
        if mine != sorted(mine, reverse=True):
            return ("forward-order",)
        if any(a[-1] < b[0] for a, b in zip(mine, mine[1:])):
            return ("earlier-bucket",)
    return None


def used(buckets, case):
    """Whether the buckets are as large as the capacity allows. Where the dtype changes, one may also be closed."""
    capacity, bytes_of = case.capacity, lambda bucket: sum(case.held[k] for k in bucket)
    for bucket in buckets:
        if (size := bytes_of(bucket)) > capacity and len(bucket) > 1:
            small = sum(case.sizes[k] for k in bucket) <= capacity
            slug = "elements-not-bytes" if small and size > 2 * capacity else "over-capacity"
            return wrong_size(slug, case, size=size, n=len(bucket))
    for found in by_dtype(buckets, case):
        for (i, one), (j, other) in zip(found, found[1:]):
            a, b = bytes_of(one), bytes_of(other)
            if a + b <= capacity and j == i + 1:
                return wrong_size("exactly-full" if a + b == capacity else "half-empty", case, sizes=f"{a} and {b}")
    return None


def wrong_size(slug, case, **fields):
    """Where all have one dtype, and not float32, the size of its elements was not asked for."""
    first, *others = {*case.dtypes}
    if not others and first != F32:
        slug, fields["dtype"], fields["bytes"] = "four-bytes-each", str(first)[6:], first.itemsize
    return slug, fields | {"capacity": case.capacity}


def observe_rank(average_in_buckets, turned=True):
    buckets = as_buckets(turned)
    return {"first": averaged(average_in_buckets, buckets, sum(buckets, []))}


def observe(average_in_buckets):
    try:
        return on_ranks(observe_rank, average_in_buckets, known=KNOWN)
    except Wrong as wrong:  # at the edge: gradients that are not contiguous
        fails(wrong)
        return on_ranks(observe_rank, average_in_buckets, False, known=KNOWN)


def mean_of(size):
    return [torch.stack(values).mean(dim=0) for values in zip(*map(given_of, range(size)), strict=True)]


def messages(ranks, rank):
    # a sum in two halves, the second of which hands the first one's parts on, is one
    sums = [call for call in sent(ranks[rank]["first"]["events"]) if call.name not in ("all_gather", "broadcast")]
    if len(sums) == len(GIVEN) or len(ranks) == 1 and not sums:
        return None
    return "one-by-one" if len(sums) > len(GIVEN) else "too-few-messages", {"n": len(sums), "buckets": len(GIVEN)}


BUCKET_LOOKS = [
    Look("", "error", "", "too-large-fails", fields="error"),
    Look("", "kind", BUCKETS, "not-a-list"),
    *map(of_buckets, (tidy, in_order, used)),
]
HELD = sum(value.nbytes for value in given_of(0))
LOOKS = [
    *means("on 2, 3 and 4 ranks, and on one rank: flat buckets averaged, the means back in p.grad", "first", mean_of,
           lambda rank, size: given_of(rank)),
    *thrift("one all-reduce for each bucket, each gradient in exactly one bucket", HELD), on_each("", messages),
]  # fmt: skip


def balise_4(make_buckets, average_in_buckets):
    """Buckets of many lists of parameters, then the reduction of given buckets on ranks."""
    yield from case_by_case(CASES, BUCKET_LOOKS, observe_buckets, make_buckets)
    yield from judged(LOOKS, observe, average_in_buckets)
    yield "the same where each rank has a GPU"
    on_gpus(lambda _, answer: answer(as_buckets()), average_in_buckets, known=left_on_cpu("flat-not-on-gpu"))
