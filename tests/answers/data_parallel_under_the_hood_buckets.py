"""Answers to 08_data_parallel_under_the_hood: gradients averaged one by one, and in buckets."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tests.answers.bank import Answer, Bank

bank = Bank("08_data_parallel_under_the_hood")


def mean(t):
    dist.all_reduce(t)
    return t.div_(dist.get_world_size())


# ---------------------------------------------------------------- balise 3


@bank.right(3)
def average_gradients(parameters):
    works = []
    for p in parameters:
        if p.grad is not None:
            works.append((p, dist.all_reduce(p.grad, async_op=True)))
    for p, work in works:
        work.wait()
        p.grad.mul_(1 / dist.get_world_size())


@bank.wrong(3, "gathered")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is None:
            continue
        all_of_them = [
            torch.empty_like(p.grad, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())
        ]
        dist.all_gather(all_of_them, p.grad.contiguous())
        p.grad = torch.stack(all_of_them).mean(dim=0)


@bank.right(3)
def average_gradients(parameters):
    gradients = [p.grad for p in parameters if p.grad is not None]
    for dtype in {g.dtype: 0 for g in gradients}:
        same = [g for g in gradients if g.dtype == dtype]
        flat = mean(_flatten_dense_tensors(same))
        for g, piece in zip(same, _unflatten_dense_tensors(flat, same)):
            g.copy_(piece)


def in_two_halves(flat):
    """The mean: each rank adds up one part, then the parts are handed on. Padded to equal parts."""
    n = dist.get_world_size()
    each = -(-flat.numel() // n)
    whole, part = flat.new_zeros(n * each), flat.new_empty(each)
    whole[: flat.numel()] = flat
    dist.reduce_scatter_tensor(part, whole)
    dist.all_gather_into_tensor(whole, part / n)
    return whole[: flat.numel()]


@bank.right(3)
def average_gradients(parameters):
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        gradient.copy_(in_two_halves(gradient.reshape(-1)).view(gradient.shape))


@bank.right(3)
def average_gradients(parameters):
    """To rank 0, and from there to all: as many bytes in all."""
    for p in parameters:
        if p.grad is not None:
            dist.reduce(p.grad, dst=0)
            dist.broadcast(p.grad, src=0)
            p.grad /= dist.get_world_size()


@bank.wrong(3, "gathered")
def average_gradients(parameters):
    """One rank collects, adds up and tells the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for p in parameters:
        if p.grad is not None:
            found = [torch.empty(p.shape, dtype=p.dtype) for _ in range(n)] if rank == 0 else None
            dist.gather(p.grad.contiguous(), found)
            p.grad = torch.stack(found).mean(0) if rank == 0 else p.grad.contiguous()
            dist.broadcast(p.grad, src=0)


@bank.wrong(3, "none-filled")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        mean(p.grad)


@bank.wrong(3, "no-communication")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()


@bank.wrong(3, "not-divided")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)


@bank.wrong(3, "divided-twice")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            mean(p.grad)


@bank.wrong(3, "not-waited")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)


@bank.wrong(3, "not-copied-back")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            mean(p.grad.clone())


@bank.wrong(3, "not-copied-back")
def average_gradients(parameters):
    """Only tables."""
    for p in parameters:
        if p.grad is not None and p.grad.dim() > 1:
            mean(p.grad)


@bank.wrong(3, "ranks-apart")
def average_gradients(parameters):
    """A gradient of zeros is not sent; another rank may have more there, and waits."""
    for p in parameters:
        if p.grad is not None and p.grad.count_nonzero():
            mean(p.grad)


@bank.wrong(3, "ddp-borrowed")
def average_gradients(parameters):
    gradients = [p.grad for p in parameters if p.grad is not None]
    for dtype in {g.dtype: 0 for g in gradients}:
        dist.all_reduce_coalesced([g for g in gradients if g.dtype == dtype])
    for g in gradients:
        g /= dist.get_world_size()


@bank.wrong(3, "reduce-not-all-reduce")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.reduce(p.grad, dst=0)


@bank.wrong(3, "wrong-gradient")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)


@bank.wrong(3, "wrong-gradient")
def average_gradients(parameters):
    """Rank 0's gradients for all."""
    for p in parameters:
        if p.grad is not None:
            dist.broadcast(p.grad, src=0)


@bank.wrong(3, "weights-changed")
def average_gradients(parameters):
    for p in parameters:
        mean(p.data)
        p.data.add_(1e-3)


@bank.wrong(3, "no-communication")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            torch.mean(p.grad, dim=0)


@bank.wrong(3, "rank-failed")
def average_gradients(parameters):
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@bank.wrong(3, "ranks-apart")
def average_gradients(parameters):
    """Ranks that skip a parameter which others reduce."""
    for k, p in enumerate(parameters):
        if p.grad is not None and (k or dist.get_rank()):
            mean(p.grad)


@bank.wrong(3, "no-gradient")
def average_gradients(parameters):
    for p in parameters:
        mean(p.grad)


@bank.wrong(3, "sent-too-much")
def average_gradients(parameters):
    for _ in range(2):  # the second time changes nothing
        for p in parameters:
            if p.grad is not None:
                mean(p.grad)


@bank.wrong(3, "sent-too-much")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            wide = p.grad.float() if p.grad.dtype == torch.bfloat16 else p.grad
            p.grad.copy_(mean(wide))


@bank.wrong(3, "sent-rounded")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(mean(p.grad.float()))


# ---------------------------------------------------------------- balise 4


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


def pair(slug=None, make=make_buckets, average=average_in_buckets):
    bank.answers.append(Answer(bank.work, 4, slug, (make, average), sys._getframe(1).f_lineno))


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


pair("forward-order", lambda ps, c: filled(ps, c, order=list))
pair("forward-order", lambda ps, c: filled(ps, c)[::-1])
pair("order-in-bucket", lambda ps, c: [bucket[::-1] for bucket in filled(ps, c)])
pair("elements-not-bytes", lambda ps, c: filled(ps, c, size=lambda p: p.numel()))
pair("four-bytes-each", lambda ps, c: filled(ps, c, size=lambda p: 4 * p.numel()))
pair("dtypes-mixed", lambda ps, c: filled(ps, c, mixed=True))
bank.slip(4, "dtypes-mixed", ("p.dtype != buckets[-1][0].dtype", "p.element_size() != buckets[-1][0].element_size()"))
pair("exactly-full", lambda ps, c: filled(ps, c, fits=lambda need, room: need < room))
pair("half-empty", lambda ps, c: [[p] for p in reversed(ps)])
pair("not-a-list", lambda ps, c: torch.cat([p.flatten() for p in ps]))
pair("not-a-list", lambda ps, c: [[p.numel() for p in bucket] for bucket in filled(ps, c)])


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


pair("earlier-bucket", first_that_fits)
pair("earlier-bucket", emptiest)
pair("nothing-returned", lambda ps, c: filled(ps, c).clear())
pair("parameter-doubled", lambda ps, c: [*filled(ps, c), [ps[0]]])


def closed_too_late(parameters, capacity):
    buckets, bucket, held = [], [], 0
    for p in reversed(parameters):
        bucket.append(p)
        held += p.numel() * p.element_size()
        if held >= capacity:
            buckets.append(bucket)
            bucket, held = [], 0
    return buckets + [bucket] * bool(bucket)


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


pair("parameter-lost", last_lost)


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


pair("empty-bucket", empty_first)


def refuses_large(parameters, capacity):
    for p in parameters:
        if p.numel() * p.element_size() > capacity:
            raise ValueError("a parameter is larger than a bucket")
    return filled(parameters, capacity)


pair("too-large-fails", refuses_large)


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


pair("one-by-one", average=reduce_each)


def all_in_one(buckets):
    """Everything in one message, whatever the buckets."""
    parameters = [p for bucket in buckets for p in bucket]
    flat = mean(torch.cat([p.grad.reshape(-1).double() for p in parameters]))
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = piece.view(p.shape).to(p.dtype)


pair("too-few-messages", average=all_in_one)


def in_view(buckets):
    for bucket in buckets:
        flat = mean(torch.cat([p.grad.view(-1) for p in bucket]))
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


pair("view-not-reshape", average=in_view)


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
bank.slip(4, "flat-not-on-gpu", (FLAT, FLAT.replace(" for p in bucket])", " for p in bucket]).cpu()")))
FILLED = """        flat, first = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype), 0
        for p in bucket:
            flat[first : first + p.numel()] = p.grad.reshape(-1)
            first += p.numel()
"""
bank.slip(4, "flat-not-on-gpu", (FLAT, FILLED))
bank.slip(4, None, (FLAT, FILLED.replace("bucket[0].dtype)", "bucket[0].dtype, device=bucket[0].device)")))
bank.slip(
    4,
    "flat-not-on-gpu",
    (FLAT, "        flat = torch.tensor([number for p in bucket for number in p.grad.flatten().tolist()], dtype=bucket[0].dtype)\n"),
    variant=True,
)  # fmt: skip

bank.slip(
    3,
    "no-gradient",
    ("dist.all_reduce(p.grad)", "p.grad = dist.all_reduce(p.grad)"),
    ("            p.grad /= dist.get_world_size()\n", ""),
    ("p.grad)\n", "p.grad) / dist.get_world_size()\n"),
)
bank.slip(
    3,
    "sent-too-much",
    (
        "            dist.all_reduce(p.grad)\n",
        "            wide = p.grad.double()\n            dist.all_reduce(wide)\n            p.grad.copy_(wide)\n",
    ),
)
bank.slip(4, "over-capacity", ("not buckets or size > room or p.dtype", "not buckets or p.dtype"))
bank.slip(
    4,
    "half-empty",
    (
        "        if not buckets or size > room or p.dtype != buckets[-1][0].dtype:\n            buckets.append([])\n            room = capacity\n",
        "        if not buckets or size > room:\n            buckets.append([])\n            room = capacity\n        elif p.dtype != buckets[-1][0].dtype:\n            buckets.append([])\n",
    ),
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
bank.slip(3, "ranks-apart", ("        if p.grad is not None:", "        if p.grad is not None and p.grad.any():"))
bank.slip(
    3, "made-on-cpu", ("            dist.all_reduce(p.grad)", "            host = p.grad.cpu()\n            dist.all_reduce(host)\n            p.grad.copy_(host)")
)  # fmt: skip


def one_flat_for_all(buckets):
    """One flat tensor for all buckets of a dtype."""
    memory, running = {}, []
    for bucket in buckets:
        most = max(sum(p.numel() for p in each) for each in buckets)
        sizes = [p.numel() for p in bucket]
        flat = memory.setdefault(bucket[0].dtype, torch.empty(most, dtype=bucket[0].dtype, device=bucket[0].device))[: sum(sizes)]
        pieces = flat.split(sizes)
        for p, piece in zip(bucket, pieces):
            torch.div(p.grad, dist.get_world_size(), out=piece.view(p.shape))
        running.append((bucket, pieces, dist.all_reduce(flat, async_op=True)))
    for bucket, pieces, work in running:
        work.wait()
        for p, piece in zip(bucket, pieces):
            p.grad.copy_(piece.view(p.shape))


pair("written-in-flight", average=one_flat_for_all)
