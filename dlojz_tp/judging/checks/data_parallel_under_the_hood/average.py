"""What balises 3 and 4 share: a mean of gradients on ranks, and looks at it."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import (
    NO_HANDLE,
    not_mean,
    nothing_overwritten,
    on_each,
    own_work,
    reduced,
)
from dlojz_tp.judging.probes.networks import gradients
from dlojz_tp.judging.probes.ranks import killed_by
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import Traffic, sent
from dlojz_tp.judging.probes.withheld import Withheld
from dlojz_tp.measure import LiveBytes

HINTS = {
    "no-gradient": "Something is None: {error}. A parameter without a gradient (frozen or unused) has p.grad None: "
                   "skip it. Also, dist.all_reduce works in place and returns None.",
    "reduce-not-all-reduce": "Rank 0 has the mean, the other ranks don't. reduce() gives the result to one rank, "
                             "all_reduce() to all of them.",
    "sent-too-much": "You sent as much as all-reduces of {sent} bytes need, but the gradients have {held} bytes. "
                     "Send each gradient once, in its own dtype.",
    "sent-rounded": "You sent only as much as all-reduces of {sent} bytes need, but the gradients have {held} "
                    "bytes: gradients of a wide dtype were rounded to a narrow one. Send the gradients in their "
                    "own dtype.",
    "ranks-apart": "{error}: the ranks sent tensors of different lengths in the same call. All ranks must send the "
                   "same gradients in the same order, including gradients of zeros.",
    "view-not-reshape": "view() refuses a gradient that is not contiguous ({error}). reshape(-1) copies if it must.",
}  # fmt: skip
KNOWN = (
    (killed_by("SIGABRT"), "ranks-apart"),
    NO_HANDLE,
    ("NoneType", "no-gradient"),
    ("view size is not compatible", "view-not-reshape"),
)

# Buckets for the ranks: shapes and dtypes, one list a bucket; "turned" gradients are transposed.
GIVEN = (
    (((3, 4), torch.float64, "turned"), ((5,), torch.float64, "")),
    (((2, 3, 2), torch.float32, ""), ((), torch.float32, ""), ((4, 2), torch.float32, "turned")),
    (((59,), torch.float64, ""),),
    (((8, 6), torch.bfloat16, ""), ((5,), torch.bfloat16, "")),
)


def given_of(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    found = []
    for shape, dtype, layout in (entry for bucket in GIVEN for entry in bucket):
        value = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(value.t().contiguous().t() if layout else value)
    return found


def as_buckets(turned=True):
    """The buckets of this rank, on its device. turned: some gradients are not contiguous."""
    values, buckets = given_of(dist.get_rank()), []
    for entries in GIVEN:
        bucket = []
        for shape, dtype, _ in entries:
            p = nn.Parameter(torch.ones(shape, dtype=dtype, device=launch.device()))
            value = values.pop(0).to(launch.device())
            p.grad = value if turned else value.contiguous()
            bucket.append(p)
        buckets.append(bucket)
    return buckets


def averaged(average, given, parameters):
    """What average(given) makes of the gradients of the parameters, and what it sends and holds."""
    before = [p.detach().clone() for p in parameters]
    with Withheld() as running, LiveBytes() as live, Traffic() as log, own_work():
        average(given)
        now = gradients(parameters)
    running.left()
    return {
        "now": now, "later": gradients(parameters), "events": log.events, "peak": live.peak,
        "changed": any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)),
        "overwritten": running.overwritten,
    }  # fmt: skip


def means(claim, case, truth, own):
    """Looks at what `averaged` returned under this key. truth(size): the means; own(rank, size): a rank's gradients."""

    def mean(ranks, rank):
        got, size = ranks[rank][case], len(ranks)
        if got["changed"]:
            return "weights-changed", {}
        wrong = not_mean(got, truth(size), own(rank, size), rank, size)
        if wrong and wrong[0] != "not-waited" and {call.name for call in sent(got["events"])} == {"reduce"}:
            return "reduce-not-all-reduce", wrong[1]
        return wrong

    return [on_each(claim, mean), nothing_overwritten(lambda got: got[case]["overwritten"])]


def growth(worlds):
    """Whether what a rank holds at the first call grows with the number of ranks."""
    less, more = (max((got["first"]["peak"], rank) for rank, got in enumerate(worlds[size])) for size in (2, 4))
    if more[0] <= 1.25 * less[0] + 64:  # parts padded to a multiple of the world's size are a few bytes
        return None
    where = f"rank {more[1]} of 4"
    return "gathered", {"large": 4, "small": 2, "rank": more[1], "more": more[0], "less": less[0], "where": where}


def thrift(claim, held, slack=64):
    """Looks at the first call: memory, and whether gradients of `held` bytes are sent once, but for `slack`."""

    def wasted(ranks, rank):
        travelled = reduced(ranks[rank]["first"]["events"], len(ranks))
        if travelled > held + slack or len(ranks) > 1 and travelled < held - 64:  # parts may be padded
            return "sent-too-much" if travelled > held else "sent-rounded", {"sent": travelled, "held": held}
        return None

    return [recognised(claim, growth), on_each("", wasted)]
