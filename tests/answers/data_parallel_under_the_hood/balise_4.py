"""Answers to balise 4 of 08_data_parallel_under_the_hood: flat buckets."""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tests.answers.bank import Bank
from tests.answers.data_parallel_under_the_hood.buckets import in_two_halves, mean

bank = Bank("08_data_parallel_under_the_hood", 4)

bank.edge("view-not-reshape", "sent-rounded", "sent-too-much", "written-in-flight")


def make_buckets(parameters, capacity):
    """PyTorch's way: one open bucket for each dtype."""
    buckets, opened = [], {}
    for p in parameters[::-1]:
        size = p.nbytes
        bucket, held = opened.get(p.dtype, (None, 0))
        if bucket is None or held + size > capacity:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(p)
        opened[p.dtype] = bucket, held + size
    return buckets


def average_in_buckets(buckets):
    for bucket in buckets:
        gradients = [p.grad.contiguous() for p in bucket]
        flat = mean(_flatten_dense_tensors(gradients))
        for p, piece in zip(bucket, _unflatten_dense_tensors(flat, gradients)):
            p.grad = piece


def pair(slug=None, make=make_buckets, average=average_in_buckets, variant=False):
    bank.several(slug, make, average, variant=variant)


pair()


def right_tuples(parameters, capacity):
    """Closes a bucket where the dtype changes; tuples; a balanced look ahead is not needed."""
    buckets, bucket = [], []
    for p in reversed(parameters):
        full = sum(q.numel() * q.element_size() for q in bucket) + p.numel() * p.element_size() > capacity
        if bucket and (full or bucket[0].dtype != p.dtype):
            buckets.append(tuple(bucket))
            bucket = []
        bucket = [*bucket, p]
    return (*buckets, tuple(bucket))


def right_asynchronous(buckets):
    running = []
    for bucket in buckets:
        flat = torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        offset = 0
        for p in bucket:
            flat[offset : offset + p.numel()] = p.grad.flatten() / dist.get_world_size()
            offset += p.numel()
        running.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, work in running:
        work.wait()
        offset = 0
        for p in bucket:
            p.grad.copy_(flat[offset : offset + p.numel()].reshape(p.shape))
            offset += p.numel()


pair(make=right_tuples, average=right_asynchronous)


def right_cumulative(parameters, capacity):
    groups = [[]]
    room = capacity
    for p in list(parameters)[::-1]:
        need = p.numel() * p.element_size()
        if groups[-1] and (need > room or groups[-1][-1].dtype is not p.dtype):
            groups.append([])
            room = capacity
        groups[-1].append(p)
        room -= need
    return groups


pair(make=right_cumulative)


def filled(
    parameters, capacity, *, order=reversed, size=lambda p: p.numel() * p.element_size(), mixed=False, fits=None
):
    buckets, room = [], 0
    fits = fits or (lambda need, room: need <= room)
    for p in order(parameters):
        if not buckets or not fits(size(p), room) or (not mixed and p.dtype != buckets[-1][0].dtype):
            buckets.append([])
            room = capacity
        buckets[-1].append(p)
        room -= size(p)
    return buckets


bank.hint("forward-order", "The buckets are in the order of the parameters. Backward computes the gradients of the "
          "last layers first: fill the buckets from the end, so that the first one is complete early.")  # fmt: skip
pair("forward-order", lambda ps, c: filled(ps, c, order=list))

pair("forward-order", lambda ps, c: filled(ps, c)[::-1], variant=True)

bank.hint("order-in-bucket", "Inside a bucket, the parameters are not in reverse order.", edge=True)
pair("order-in-bucket", lambda ps, c: [bucket[::-1] for bucket in filled(ps, c)])
bank.slip("order-in-bucket", ("return buckets", "return [bucket[::-1] for bucket in buckets]"), variant=True)

bank.hint("elements-not-bytes", "The capacity is in bytes, but you counted elements. A float32 element has 4 bytes: "
          "use p.element_size().")  # fmt: skip
pair("elements-not-bytes", lambda ps, c: filled(ps, c, size=lambda p: p.numel()))
bank.slip("elements-not-bytes", ("p.numel() * p.element_size()", "p.numel()"), variant=True)

bank.hint("four-bytes-each", "This is right for float32, but wrong for {dtype}, whose elements have {bytes} bytes "
          "each: use p.element_size().", edge=True)  # fmt: skip
pair("four-bytes-each", lambda ps, c: filled(ps, c, size=lambda p: 4 * p.numel()))
bank.slip("four-bytes-each", ("p.element_size()", "4"), variant=True)

bank.hint("dtypes-mixed", "A bucket holds {dtypes}. A flat tensor has one dtype, so different dtypes need separate "
          "buckets.", edge=True)  # fmt: skip
pair("dtypes-mixed", lambda ps, c: filled(ps, c, mixed=True))

bank.slip(
    "dtypes-mixed",
    ("p.dtype != buckets[-1][0].dtype", "p.element_size() != buckets[-1][0].element_size()"),
    variant=True,
)

bank.hint("exactly-full", "Two parameters that together fill the capacity exactly were put into two buckets. A bucket "
          "may be as large as the capacity.", edge=True)  # fmt: skip
pair("exactly-full", lambda ps, c: filled(ps, c, fits=lambda need, room: need < room))
bank.slip("exactly-full", ("size > room", "size >= room"), variant=True)

bank.hint("half-empty", "Two neighbouring buckets of {sizes} bytes would fit into one bucket of {capacity}.")
pair("half-empty", lambda ps, c: [[p] for p in reversed(ps)])

bank.hint("not-a-list", "Return a list of buckets; each bucket is a list of the parameters themselves.")
pair("not-a-list", lambda ps, c: torch.cat([p.flatten() for p in ps]))

pair("not-a-list", lambda ps, c: [[p.numel() for p in bucket] for bucket in filled(ps, c)], variant=True)


def first_that_fits(parameters, capacity):
    buckets = []
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        for bucket in buckets:
            if bucket[0].dtype == p.dtype and size + sum(q.numel() * q.element_size() for q in bucket) <= capacity:
                bucket.append(p)
                break
        else:
            buckets.append([p])
    return buckets


def emptiest(parameters, capacity):
    """Into the bucket with the most room."""
    buckets = []
    for p in reversed(parameters):
        held = sorted((sum(q.nbytes for q in b), k) for k, b in enumerate(buckets) if b[0].dtype == p.dtype)
        if held and held[0][0] + p.nbytes <= capacity:
            buckets[held[0][1]].append(p)
        else:
            buckets.append([p])
    return buckets


bank.hint("earlier-bucket", "A parameter was put into an earlier bucket, already closed, because it fits there. That "
          "bucket now waits for a gradient that comes late: fill only the last bucket.")  # fmt: skip
pair("earlier-bucket", first_that_fits)

pair("earlier-bucket", emptiest, variant=True)

pair("nothing-returned", lambda ps, c: filled(ps, c).clear())

bank.hint("parameter-doubled", "A parameter is in two buckets.")
pair("parameter-doubled", lambda ps, c: [*filled(ps, c), [ps[0]]])
bank.slip("parameter-doubled", ("return buckets", "return [*buckets, buckets[0]]"), variant=True)


def closed_too_late(parameters, capacity):
    buckets, bucket, held = [], [], 0
    for p in reversed(parameters):
        bucket.append(p)
        held += p.numel() * p.element_size()
        if held >= capacity:
            buckets.append(bucket)
            bucket, held = [], 0
    return buckets + [bucket] * bool(bucket)


bank.hint("over-capacity", "A bucket of {size} bytes holds {n} parameters; the capacity is {capacity}. Close a bucket "
          "before it becomes too large; only a single parameter that is too large by itself may "
          "exceed the capacity.")  # fmt: skip
pair("over-capacity", closed_too_late)


def last_lost(parameters, capacity):
    buckets, bucket, room = [], [], capacity
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if bucket and size > room:
            buckets.append(bucket)
            bucket, room = [], capacity
        bucket.append(p)
        room -= size
    return buckets


bank.hint("parameter-lost", "{lost} of {n} parameters are in no bucket. Do you also return the last bucket when it is "
          "not full?")  # fmt: skip
pair("parameter-lost", last_lost)
bank.slip("parameter-lost", ("return buckets", "return buckets[:-1]"), variant=True)


def empty_first(parameters, capacity):
    buckets, bucket, room = [], [], capacity
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if size > room:
            buckets.append(bucket)
            bucket, room = [], capacity
        bucket.append(p)
        room -= size
    return [*buckets, bucket]


bank.hint("empty-bucket", "There is an empty bucket. Does a parameter larger than the capacity close a bucket that is "
          "still empty?", edge=True)  # fmt: skip
pair("empty-bucket", empty_first)
bank.slip(
    "empty-bucket",
    ("buckets, room = [], 0", "buckets, room = [[]], capacity"),
    (
        "not buckets or size > room or p.dtype != buckets[-1][0].dtype",
        "size > room or any(q.dtype != p.dtype for q in buckets[-1])",
    ),
    variant=True,
)


def refuses_large(parameters, capacity):
    for p in parameters:
        if p.numel() * p.element_size() > capacity:
            raise ValueError("a parameter is larger than a bucket")
    return filled(parameters, capacity)


bank.hint("too-large-fails", "A parameter larger than the capacity needs its own bucket. Your code failed there: "
          "{error}", edge=True)  # fmt: skip
pair("too-large-fails", refuses_large)
bank.slip(
    "too-large-fails", ("p.element_size()\n", "p.element_size()\n        _ = range(capacity)[size - 1]\n"), variant=True
)


def halves(buckets):
    for bucket in buckets:
        flat = in_two_halves(torch.cat([p.grad.reshape(-1) for p in bucket]))
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair(average=halves)


def collects(buckets):
    for bucket in buckets:
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        table = flat.new_empty(dist.get_world_size() * flat.numel())
        dist.all_gather_into_tensor(table, flat)
        for p, piece in zip(bucket, table.view(-1, flat.numel()).mean(0).split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("gathered", average=collects)


def reduce_each(buckets):
    for bucket in buckets:
        for p in bucket:
            p.grad = mean(p.grad.contiguous())


bank.hint("one-by-one", "You start {n} collectives for {buckets} buckets. Put the gradients of a bucket into one flat "
          "tensor, and reduce that tensor.")  # fmt: skip
pair("one-by-one", average=reduce_each)
bank.slip(
    "one-by-one",
    ("dist.all_reduce(flat)", "_ = [dist.all_reduce(one) for one in flat.split([p.numel() for p in bucket])]"),
    variant=True,
)


def all_in_one(buckets):
    """Everything in one message, whatever the buckets."""
    parameters = [p for bucket in buckets for p in bucket]
    flat = mean(torch.cat([p.grad.reshape(-1).double() for p in parameters]))
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = piece.view(p.shape).to(p.dtype)


bank.hint("too-few-messages", "You start {n} collectives for {buckets} buckets: the capacity has no effect. Use one "
          "all-reduce for each bucket.")  # fmt: skip
pair("too-few-messages", average=all_in_one)
bank.slip(
    "too-few-messages",
    ("    for bucket in buckets:\n        flat", "    kinds = {p.dtype: 0 for bucket in buckets for p in bucket}\n"
     "    for bucket in ([p for some in buckets for p in some if p.dtype == kind] for kind in kinds):\n        flat"),
    variant=True,
)  # fmt: skip


def in_view(buckets):
    for bucket in buckets:
        flat = mean(torch.cat([p.grad.view(-1) for p in bucket]))
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("view-not-reshape", average=in_view)


def sums_in_view(buckets):
    """A mistake of the idea after one at the edge."""
    for bucket in buckets:
        flat = torch.cat([p.grad.view(-1) for p in bucket])
        dist.all_reduce(flat)
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("not-divided", average=sums_in_view)


def in_flat(
    buckets, before=lambda flat: None, after=lambda flat: flat.div_(dist.get_world_size()), back=True, async_op=False
):
    for bucket in buckets:
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        before(flat)
        dist.all_reduce(flat, async_op=async_op)
        after(flat)
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            if back:
                p.grad = piece.view(p.shape)


pair("not-divided", average=lambda b: in_flat(b, after=lambda flat: None))

pair("divided-twice", average=lambda b: in_flat(b, before=lambda flat: flat.div_(dist.get_world_size())))

pair("not-copied-back", average=lambda b: in_flat(b, back=False))

pair("no-communication", average=lambda buckets: None)

pair(
    "not-waited",
    average=lambda b: in_flat(b, before=lambda flat: flat.div_(dist.get_world_size()), after=len, async_op=True),
)


def sent_wide(buckets):
    for bucket in buckets:
        flat = mean(torch.cat([p.grad.reshape(-1) for p in bucket]).double())
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = piece.view(p.shape).to(p.dtype)


pair("sent-too-much", average=sent_wide)


def sent_as_float32(buckets):
    """16 bits travel as 32, for the sum's sake; wider ones as they are."""
    for bucket in buckets:
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        flat = mean(flat.float() if flat.dtype.itemsize == 2 else flat)
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("sent-too-much", average=sent_as_float32)


def sent_narrow(buckets, kind=torch.float32):
    for bucket in buckets:
        flat = mean(torch.cat([p.grad.reshape(-1).to(kind) for p in bucket]))
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("sent-rounded", average=sent_narrow)


def received_narrow(buckets):
    """Into a flat tensor of the default dtype, as torch.zeros makes it."""
    for bucket in buckets:
        flat, first = torch.zeros(sum(p.numel() for p in bucket), device=bucket[0].device), 0
        for p in bucket:
            flat[first : first + p.numel()] = p.grad.reshape(-1)
            first += p.numel()
        mean(flat)
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("sent-rounded", average=received_narrow)


def wrong_pieces(buckets):
    for bucket in buckets:
        flat = mean(torch.cat([p.grad.reshape(-1) for p in bucket]))
        offset = 0
        for p in bucket:
            p.grad.copy_(flat[: p.numel()].view(p.shape))
            offset += p.numel()


pair("wrong-gradient", average=wrong_pieces)


def weights_instead(buckets):
    in_flat(buckets)
    for bucket in buckets:
        for p in bucket:
            p.data -= 0.1 * p.grad


pair("weights-changed", average=weights_instead)

# ---------------------------------------------------------------- what only GPUs show
FLAT = "        flat = torch.cat([p.grad.reshape(-1) for p in bucket])\n"

bank.hint("flat-not-on-gpu", "On GPUs, a tensor of the bucket is in the CPU's memory: {error}. Make the flat tensor "
          "on the gradients' device (device=p.grad.device): NCCL sends from there.", edge=True)  # fmt: skip
bank.slip("flat-not-on-gpu", (FLAT, FLAT.replace(" for p in bucket])", " for p in bucket]).cpu()")))

FILLED = """        flat, first = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype), 0
        for p in bucket:
            flat[first : first + p.numel()] = p.grad.reshape(-1)
            first += p.numel()
"""

bank.slip("flat-not-on-gpu", (FLAT, FILLED))

bank.slip(None, (FLAT, FILLED.replace("bucket[0].dtype)", "bucket[0].dtype, device=bucket[0].device)")))

bank.slip("flat-not-on-gpu",
    (FLAT, "        flat = torch.tensor([number for p in bucket for number in p.grad.flatten().tolist()], dtype=bucket[0].dtype)\n"),
    variant=True,
)  # fmt: skip

bank.slip("over-capacity", ("not buckets or size > room or p.dtype", "not buckets or p.dtype"), variant=True)

bank.slip(
    "half-empty",
    (
        "        if not buckets or size > room or p.dtype != buckets[-1][0].dtype:\n            buckets.append([])\n            room = capacity\n",
        "        if not buckets or size > room:\n            buckets.append([])\n            room = capacity\n        elif p.dtype != buckets[-1][0].dtype:\n            buckets.append([])\n",
    ),
    variant=True,
)


def when_complete(parameters, capacity):
    """One open bucket for each dtype; in the list once it is full, the rest at the end."""
    full, opened = [], {}
    for p in reversed(parameters):
        bucket = opened.pop(p.dtype, [])
        if bucket and sum(q.nbytes for q in bucket) + p.nbytes > capacity:
            full.append(bucket)
            bucket = []
        opened[p.dtype] = [*bucket, p]
    place = {id(p): k for k, p in enumerate(parameters)}
    return sorted(full + list(opened.values()), key=lambda bucket: place[id(bucket[-1])], reverse=True)


pair(None, when_complete)


def one_flat_for_all(buckets):
    """One flat tensor for all buckets of a dtype."""
    memory, running = {}, []
    for bucket in buckets:
        most = max(sum(p.numel() for p in each) for each in buckets)
        sizes = [p.numel() for p in bucket]
        flat = memory.setdefault(bucket[0].dtype, torch.empty(most, dtype=bucket[0].dtype, device=bucket[0].device))[
            : sum(sizes)
        ]
        pieces = flat.split(sizes)
        for p, piece in zip(bucket, pieces):
            torch.div(p.grad, dist.get_world_size(), out=piece.view(p.shape))
        running.append((bucket, pieces, dist.all_reduce(flat, async_op=True)))
    for bucket, pieces, work in running:
        work.wait()
        for p, piece in zip(bucket, pieces):
            p.grad.copy_(piece.view(p.shape))


pair("written-in-flight", average=one_flat_for_all)
