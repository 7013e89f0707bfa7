"""Balises 3 and 4: gradients averaged one by one, and in flat buckets."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.data_parallel_under_the_hood.common import (
    NO_HANDLE,
    compare,
    judge_held,
    on_ranks,
    own_work,
    reduced,
    share,
    undisturbed,
)
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.networks import gradients, rows
from dlojz_tp.probes.ranks import killed_by
from dlojz_tp.probes.seeded import seeded
from dlojz_tp.probes.traffic import Traffic, sent
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "no-gradient": "Something is None: {error}. A parameter without a gradient (frozen or unused) has p.grad None: "
                   "skip it. Also, dist.all_reduce works in place and returns None.",
    "reduce-not-all-reduce": "Rank 0 has the mean, the other ranks don't. reduce() gives the result to one rank, "
                             "all_reduce() to all of them.",
    "none-filled": "A parameter without a gradient (frozen or unused) now has one, perhaps of zeros. Leave it "
                   "None: otherwise, with weight decay or momentum, the optimizer goes on moving the parameter.",
    "sent-too-much": "You sent as much as all-reduces of {sent} bytes need, but the gradients have {held} bytes. "
                     "Send each gradient once, in its own dtype.",
    "sent-rounded": "You sent only as much as all-reduces of {sent} bytes need, but the gradients have {held} "
                    "bytes: gradients of a wide dtype were rounded to a narrow one. Send the gradients in their "
                    "own dtype.",
    "not-a-list": "Return a list of buckets; each bucket is a list of the parameters themselves.",
    "parameter-lost": "{lost} of {n} parameters are in no bucket. Do you also return the last bucket when it is "
                      "not full?",
    "parameter-doubled": "A parameter is in two buckets.",
    "forward-order": "The buckets are in the order of the parameters. Backward computes the gradients of the last "
                     "layers first: fill the buckets from the end, so that the first one is complete early.",
    "earlier-bucket": "A parameter was put into an earlier bucket, already closed, because it fits there. That "
                      "bucket now waits for a gradient that comes late: fill only the last bucket.",
    "order-in-bucket": "Inside a bucket, the parameters are not in reverse order.",
    "elements-not-bytes": "The capacity is in bytes, but you counted elements. A float32 element has 4 bytes: use "
                          "p.element_size().",
    "four-bytes-each": "This is right for float32, but wrong for {dtype}, whose elements have {bytes} bytes each: "
                       "use p.element_size().",
    "dtypes-mixed": "A bucket holds {dtypes}. A flat tensor has one dtype, so different dtypes need separate buckets.",
    "over-capacity": "A bucket of {size} bytes holds {n} parameters; the capacity is {capacity}. Close a bucket "
                     "before it becomes too large; only a single parameter that is too large by itself may exceed "
                     "the capacity.",
    "exactly-full": "Two parameters that together fill the capacity exactly were put into two buckets. A bucket "
                    "may be as large as the capacity.",
    "half-empty": "Two neighbouring buckets of {sizes} bytes would fit into one bucket of {capacity}.",
    "empty-bucket": "There is an empty bucket. Does a parameter larger than the capacity close a bucket that is "
                    "still empty?",
    "too-large-fails": "A parameter larger than the capacity needs its own bucket. Your code failed there: {error}",
    "one-by-one": "You start {n} collectives for {buckets} buckets. Put the gradients of a bucket into one flat "
                  "tensor, and reduce that tensor.",
    "too-few-messages": "You start {n} collectives for {buckets} buckets: the capacity has no effect. Use one "
                        "all-reduce for each bucket.",
    "flat-not-on-gpu": "On GPUs, a tensor of the bucket is in the CPU's memory: {error}. Make the flat tensor on "
                       "the gradients' device (device=p.grad.device): NCCL sends from there.",
    "ranks-apart": "{error}: the ranks sent tensors of different lengths in the same call. All ranks must send the "
                   "same gradients in the same order, including gradients of zeros.",
    "view-not-reshape": "view() refuses a gradient that is not contiguous ({error}). reshape(-1) copies if it must.",
}  # fmt: skip
KNOWN = (
    (killed_by("SIGABRT"), "ranks-apart"),
    NO_HANDLE, ("NoneType", "no-gradient"), ("view size is not compatible", "view-not-reshape"),
)

HIGH = rows(0)[:, 0].sort().values[-2:].mean().item()  # one row of the first step has more in its first column


class Mixed(nn.Module):
    """Parameters in several layouts and dtypes, one frozen, one never used. The loss is the mean over the rows of x."""

    def __init__(self):
        super().__init__()
        with seeded(3):
            self.first = nn.Linear(8, 6, dtype=torch.float64)
            self.scale = nn.Parameter(torch.randn(6))
            self.turned = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
            self.shift = nn.Parameter(torch.randn((), dtype=torch.float64))
            self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
            self.rare = nn.Parameter(torch.randn((), dtype=torch.float64))  # its gradient is zero on all ranks but one
            self.unused = nn.Parameter(torch.randn(5, dtype=torch.float64))
            self.coarse = nn.Parameter(torch.randn(8, 6))
            self.short = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))  # as float32 it sends 128 bytes more

    def forward(self, x):
        narrow = torch.tanh(x @ self.short.double() / 4).sum(dim=1)
        rare = self.rare * (x[:, 0] - HIGH).relu()
        x = torch.tanh(self.first(x) + x @ self.coarse.double()) * self.scale
        return ((x @ self.turned + self.shift * self.frozen).square().sum(dim=1) + rare + narrow).mean()


def balise_3(average_gradients):
    """The gradient of a batch of 12 rows, shared by 1 to 4 ranks, against one process with the whole batch."""
    yield "on 2, 3 and 4 ranks, and on one rank: the gradient of the whole batch, in float64"
    worlds = on_ranks(_one_by_one, average_gradients, known=KNOWN)
    truth, own = _truth(Mixed(), 0), {size: [_truth(Mixed(), 0, r, size) for r in range(size)] for size in worlds}
    _judge(worlds, truth, own, "first")
    yield "parameters without a gradient, other layouts and dtypes; a second step"
    truth, own = _truth(Mixed(), 1), {size: [_truth(Mixed(), 1, r, size) for r in range(size)] for size in worlds}
    _judge(worlds, truth, own, "second")
    yield "each gradient is sent once, and the parameters don't change"
    held = sum(t.numel() * t.element_size() for t in truth if t is not None)
    judge_held(worlds, lambda got: got["first"]["peak"])
    _frugal(worlds, held, lambda got: got["first"]["events"], slack=96)  # each gradient may be padded
    yield "the same where each rank has a GPU"
    on_gpus(lambda _, answer: answer(sum(_as_buckets(), [])), average_gradients, known=left_on_cpu("made-on-cpu"))


def _truth(model, step, rank=0, size=1):
    """Gradients of one process: of the whole batch, or of what `rank` of `size` sees. None where there is none."""
    model(rows(step)[rank::size]).backward()
    return gradients(model.parameters())


def _one_by_one(average_gradients):
    model = Mixed().to(launch.device())
    parameters, results = list(model.parameters()), {}
    before = [p.detach().clone() for p in parameters]
    for step, name in enumerate(("first", "second")):
        model.zero_grad()
        model(share(step)).backward()
        with Withheld() as running, LiveBytes() as live, Traffic() as log, own_work():
            average_gradients(parameters)
            results[name] = {"now": gradients(parameters), "events": log.events, "peak": live.peak}
        running.left()
        results[name] |= {"later": gradients(parameters), "overwritten": running.overwritten}
    results["changed"] = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    return results


def _judge(worlds, truth, own, case):
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            if got.get("changed"):
                raise Wrong("weights-changed", where=f"rank {rank} of {size}")
        for rank, got in enumerate(ranks):
            found = got[case]
            for k, (value, wanted) in enumerate(zip(found["now"], truth, strict=True)):
                if wanted is None and value is not None:
                    raise Wrong("none-filled", got=value, where=f"rank {rank} of {size}, parameter {k}")
            try:
                compare(
                    found["now"], truth, own[size][rank], rank=rank, size=size, calls=sent(found["events"]),
                    later=found["later"],
                )  # fmt: skip
            except Wrong as wrong:
                kinds = {call.name for call in sent(found["events"])}
                if wrong.slug != "not-waited" and kinds == {"reduce"}:
                    wrong.slug = "reduce-not-all-reduce"
                raise
        undisturbed([got[case]["overwritten"] for got in ranks], size)


def _frugal(worlds, held, events, slack=64):
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            travelled = reduced(events(got), size)
            if travelled > held + slack or size > 1 and travelled < held - 64:  # parts may be padded
                slug = "sent-too-much" if travelled > held else "sent-rounded"
                raise Wrong(slug, sent=travelled, held=held, where=f"rank {rank} of {size}")


def balise_4(make_buckets, average_in_buckets):
    """Buckets of many lists of parameters, then the reduction of given buckets on ranks."""
    yield "buckets of float32 parameters: all parameters, from the end, within the capacity"
    # sizes in elements; capacities in bytes
    for sizes, capacity in (([9] * 8, 40), ([1, 2, 3, 4, 5, 6, 7], 50), ([10, 10, 10, 10, 10], 80), ([6, 4, 3, 1, 2], 24)):
        _buckets(make_buckets, [torch.float32] * len(sizes), sizes, capacity)
    yield "a parameter larger than the capacity; one that fills it exactly"
    for sizes, capacity in (([2, 50, 2], 40), ([50, 2, 60], 40), ([5, 5], 40), ([5, 5, 10, 1], 40), ([3], 1)):
        _buckets(make_buckets, [torch.float32] * len(sizes), sizes, capacity)
    yield "float64 and bfloat16, with elements of eight and two bytes"
    for dtype, capacity in ((torch.float64, 80), (torch.bfloat16, 24)):
        try:
            _buckets(make_buckets, [dtype] * 6, [6, 4, 3, 1, 2, 5], capacity)
        except Wrong as wrong:
            if wrong.slug in ("over-capacity", "elements-not-bytes", "half-empty", "exactly-full"):
                wrong.slug = "four-bytes-each"
                wrong.fields |= {"dtype": str(dtype).removeprefix("torch."), "bytes": dtype.itemsize}
            raise
    yield "two dtypes never share a bucket"
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float64, torch.bfloat16]
    _buckets(make_buckets, dtypes, [4, 4, 4, 4, 4, 4], 1000)
    _buckets(make_buckets, [torch.bfloat16] * 4 + [torch.float32], [4] * 5, 40)
    _buckets(make_buckets, dtypes, [4, 4, 4, 4, 4, 4], 40)
    yield "on 2, 3 and 4 ranks, and on one rank: flat buckets averaged, the means back in p.grad"
    worlds = on_ranks(_in_buckets, average_in_buckets, known=KNOWN)
    for size, ranks in worlds.items():
        own = [_given(rank) for rank in range(size)]
        truth = [torch.stack(list(values)).mean(dim=0) for values in zip(*own, strict=True)]
        for rank, got in enumerate(ranks):
            compare(got["now"], truth, own[rank], rank=rank, size=size, calls=sent(got["events"]), later=got["later"])
            if got["changed"]:
                raise Wrong("weights-changed", where=f"rank {rank} of {size}")
        undisturbed([got["overwritten"] for got in ranks], size)
    yield "one all-reduce for each bucket, each gradient in exactly one bucket"
    judge_held(worlds, lambda got: got["peak"])
    for size, ranks in worlds.items():
        # a sum in two halves, the second of which hands the first one's parts on, is one
        sums = [event for event in sent(ranks[0]["events"]) if event[0] not in ("all_gather", "broadcast")]
        if len(sums) == len(GIVEN) or (size == 1 and not sums):
            continue
        slug = "one-by-one" if len(sums) > len(GIVEN) else "too-few-messages"
        raise Wrong(slug, n=len(sums), buckets=len(GIVEN), where=f"rank 0 of {size}")
    _frugal(worlds, sum(t.numel() * t.element_size() for t in _given(0)), lambda got: got["events"])
    yield "the same where each rank has a GPU"
    on_gpus(lambda _, answer: answer(_as_buckets()), average_in_buckets, known=left_on_cpu("flat-not-on-gpu"))


def _buckets(make_buckets, dtypes, sizes, capacity):
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in zip(sizes, dtypes, strict=True)]
    place = {id(p): k for k, p in enumerate(parameters)}
    held = [p.numel() * p.element_size() for p in parameters]
    where = f"parameters of {held} bytes, capacity {capacity}"
    try:
        found = make_buckets(list(parameters), capacity)
    except (IndexError, ValueError, RecursionError) as error:
        if max(held) > capacity:
            raise Wrong("too-large-fails", error=f"{type(error).__name__}: {error}", where=where) from error
        raise
    if found is None:
        raise Wrong("nothing-returned")
    try:
        buckets = [[place[id(p)] for p in bucket] for bucket in found]
    except (TypeError, KeyError):
        raise Wrong("not-a-list", got=type(found).__name__, where=where) from None
    flat = [k for bucket in buckets for k in bucket]
    fields = {"got": f"parameters {buckets}", "where": where}
    if [] in buckets:
        raise Wrong("empty-bucket", **fields)
    if len(set(flat)) < len(flat):
        raise Wrong("parameter-doubled", **fields)
    if len(flat) < len(parameters):
        raise Wrong("parameter-lost", lost=len(parameters) - len(flat), n=len(parameters), **fields)
    for bucket in buckets:
        if len({dtypes[k] for k in bucket}) > 1:
            raise Wrong("dtypes-mixed", dtypes=" and ".join(sorted({str(dtypes[k]) for k in bucket})), **fields)
    if len(flat) > 1 and flat == sorted(flat) and len(set(dtypes)) == 1:
        raise Wrong("forward-order", **fields)
    weight = [sum(held[k] for k in bucket) for bucket in buckets]
    for bucket, size in zip(buckets, weight, strict=True):
        if size > capacity and len(bucket) > 1:
            small = sum(parameters[k].numel() for k in bucket) <= capacity
            slug = "elements-not-bytes" if small and size > 2 * capacity else "over-capacity"
            raise Wrong(slug, size=size, n=len(bucket), capacity=capacity, **fields)
    _in_order(buckets, weight, dtypes, capacity, fields)


def _in_order(buckets, weight, dtypes, capacity, fields):
    for dtype in set(dtypes):
        mine = [(bucket, size) for bucket, size in zip(buckets, weight, strict=True) if dtypes[bucket[0]] == dtype]
        for bucket, _ in mine:
            if bucket != sorted(bucket, reverse=True):
                raise Wrong("order-in-bucket", **fields)
        if mine != sorted(mine, key=lambda pair: pair[0], reverse=True):
            raise Wrong("forward-order", **fields)
        if any(a[-1] < b[0] for (a, _), (b, _) in zip(mine, mine[1:])):
            raise Wrong("earlier-bucket", **fields)
        places = [k for k, bucket in enumerate(buckets) if dtypes[bucket[0]] == dtype]
        for i, j, (_, a), (_, b) in zip(places, places[1:], mine, mine[1:]):
            if a + b <= capacity and j == i + 1:  # a bucket may also be closed where the dtype changes
                slug = "exactly-full" if a + b == capacity else "half-empty"
                raise Wrong(slug, sizes=f"{a} and {b}", capacity=capacity, **fields)


# Buckets for the ranks: shapes and dtypes, one list a bucket; "turned" gradients are transposed.
GIVEN = (
    (((3, 4), torch.float64, "turned"), ((5,), torch.float64, "")),
    (((2, 3, 2), torch.float32, ""), ((), torch.float32, ""), ((4, 2), torch.float32, "turned")),
    (((59,), torch.float64, ""),),
    (((8, 6), torch.bfloat16, ""), ((5,), torch.bfloat16, "")),
)


def _given(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    found = []
    for shape, dtype, layout in (entry for bucket in GIVEN for entry in bucket):
        value = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(value.t().contiguous().t() if layout else value)
    return found


def _as_buckets():
    """The buckets of this rank, on its device."""
    values, buckets = _given(dist.get_rank()), []
    for entries in GIVEN:
        bucket = []
        for shape, dtype, _ in entries:
            p = nn.Parameter(torch.ones(shape, dtype=dtype, device=launch.device()))
            p.grad = values.pop(0).to(launch.device())
            bucket.append(p)
        buckets.append(bucket)
    return buckets


def _in_buckets(average_in_buckets):
    buckets = _as_buckets()
    parameters = [p for bucket in buckets for p in bucket]
    with Withheld() as running, LiveBytes() as live, Traffic() as log, own_work():
        average_in_buckets(buckets)
        now = gradients(parameters)
    running.left()
    changed = any(not torch.equal(p, torch.ones_like(p)) for p in parameters)
    return {
        "now": now, "later": gradients(parameters), "events": log.events, "peak": live.peak, "changed": changed,
        "overwritten": running.overwritten,
    }  # fmt: skip
