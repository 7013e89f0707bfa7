"""Answers to 08_data_parallel_under_the_hood: overlap, and accumulation."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.answers.bank import Answer, Bank
from tests.answers.data_parallel_under_the_hood_parts import Flat, Quiet, Whole, backward_in_parts, buckets_of

bank = Bank("08_data_parallel_under_the_hood")

# ---------------------------------------------------------------- balise 5


@bank.right(5)
class Overlap(Flat):
    pass


@bank.right(5)
class Overlap:
    """Closures; the gradients live in the bucket from the beginning."""

    def __init__(self, parameters, capacity):
        self.works, self.resets = [], []
        for bucket in buckets_of(parameters, capacity):
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            self.watch(bucket, flat)

    def watch(self, bucket, flat):
        arrived = []
        parts = flat.split([p.numel() for p in bucket])

        def hook(p):
            arrived.append(p)
            if len(arrived) == len(bucket):
                torch._foreach_copy_(list(parts), [q.grad.reshape(-1) for q in bucket])
                for q, part in zip(bucket, parts):
                    q.grad = part.view_as(q)
                self.works.append((flat, dist.all_reduce(flat, async_op=True)))

        self.resets.append(arrived.clear)
        for p in bucket:
            p.register_post_accumulate_grad_hook(hook)

    def finish(self):
        for flat, work in self.works:
            work.wait()
            flat /= dist.get_world_size()
        self.works.clear()
        for reset in self.resets:
            reset()


@bank.right(5)
class Overlap:
    """Hooks on the nodes that accumulate; nothing in finish but waiting."""

    def __init__(self, parameters, capacity):
        self.nodes = []
        self.futures = []
        for bucket in buckets_of(parameters, capacity):
            state = {"left": len(bucket)}
            for p in bucket:
                node = p.view_as(p).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, bucket=bucket, state=state: self.one(bucket, state))
                self.nodes.append(node)

    def one(self, bucket, state):
        state["left"] -= 1
        if state["left"]:
            return
        state["left"] = len(bucket)
        flat = torch.cat([p.grad.flatten() for p in bucket])
        flat.div_(dist.get_world_size())
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = piece.view(p.shape)
        self.futures.append(dist.all_reduce(flat, async_op=True).get_future())

    def finish(self):
        torch.futures.wait_all(self.futures)
        self.futures.clear()


bank.right(5)(Whole)


@bank.right(5)
class Overlap:
    """One hook for a bucket, given all its gradients before they are in p.grad."""

    def __init__(self, parameters, capacity):
        self.running = []
        for bucket in buckets_of(parameters, capacity):
            torch.autograd.graph.register_multi_grad_hook(bucket, lambda gradients, b=bucket: self.start(b, gradients))

    def start(self, bucket, gradients):
        flat = torch.cat([g.flatten() for g in gradients])
        self.running.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        while self.running:
            bucket, flat, work = self.running.pop(0)
            work.wait()
            flat /= dist.get_world_size()
            for p in bucket:
                p.grad, flat = flat[: p.numel()].view_as(p), flat[p.numel() :]


@bank.right(5)
class Overlap(Flat):
    """register_hook, with the gradient that it is given."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.new = {}
        for p in self.number:
            p._post_accumulate_grad_hooks.clear()
            p.register_hook(lambda gradient, p=p: self.take(p, gradient))

    def take(self, p, gradient):
        self.new[p] = gradient
        self.hook(p)

    def start(self, k):
        flat = torch.cat([self.new.pop(p).flatten() for p in self.buckets[k]]) / dist.get_world_size()
        self.running.append((self.buckets[k], flat, dist.all_reduce(flat, async_op=True)))


@bank.wrong(5, "no-communication")
class Overlap(Flat):
    def start(self, k):
        pass


@bank.wrong(5, "not-divided")
class Overlap(Flat):
    def start(self, k):
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]])
        self.running.append((self.buckets[k], flat, dist.all_reduce(flat, async_op=True)))


@bank.wrong(5, "not-waited")
class Overlap(Flat):
    def finish(self):
        for bucket, flat, _ in self.running:
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = piece.view(p.shape)
        self.running = []
        self.reset()


@bank.wrong(5, "not-copied-back")
class Overlap(Flat):
    def finish(self):
        for _, _, work in self.running:
            work.wait()
        self.running = []
        self.reset()


@bank.wrong(5, "not-copied-back")
class Overlap(Flat):
    """Copied back before the wait."""

    def finish(self):
        for bucket, flat, work in self.running:
            self.copy_back(bucket, flat)
            work.wait()
        self.running = []
        self.reset()


@bank.wrong(5, "blocking")
class Overlap(Flat):
    def start(self, k):
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]]) / dist.get_world_size()
        dist.all_reduce(flat)
        self.copy_back(self.buckets[k], flat)


@bank.wrong(5, "blocking")
class Overlap(Flat):
    def start(self, k):
        super().start(k)
        self.running[-1][-1].wait()


@bank.wrong(5, "no-overlap")
class Overlap(Flat):
    def hook(self, p):
        pass

    def finish(self):
        for k in range(len(self.buckets)):
            self.start(k)
        super().finish()


@bank.wrong(5, "no-buckets")
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, 1)


@bank.wrong(5, "one-bucket")
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, 25 * 2**20)


@bank.wrong(5, "late-start")
class Overlap(Flat):
    """Starts a bucket when the next one is complete."""

    def hook(self, p):
        k = self.number[p]
        self.left[k] -= 1
        if self.left[k] == 0 and k > 0:
            self.start(k - 1)

    def finish(self):
        self.start(len(self.buckets) - 1)
        super().finish()


@bank.wrong(5, "sent-again")
class Overlap(Flat):
    def finish(self):
        super().finish()
        for bucket in self.buckets:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            dist.all_reduce(flat)


@bank.wrong(5, "placed-again")
class Overlap(Flat):
    """A lambda in a loop, which sees the loop's last parameter."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.missing = set(self.number)
        for p in self.number:
            p._post_accumulate_grad_hooks.clear()
            p.register_post_accumulate_grad_hook(lambda _: self.place(p))  # noqa: B023

    def place(self, p):
        self.missing.remove(p)
        self.hook(p)


@bank.wrong(5, "second-step")
class Overlap(Flat):
    """The counters are never set back."""

    def finish(self):
        left = self.left
        super().finish()
        self.left = left


@bank.wrong(5, "second-step")
class Overlap(Flat):
    """Hooks that remove themselves."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        for p in self.number:
            p._post_accumulate_grad_hooks.clear()
        self.handles = {p: p.register_post_accumulate_grad_hook(self.once) for p in self.number}

    def once(self, p):
        self.handles[p].remove()
        self.hook(p)


@bank.wrong(5, "second-step")
class Overlap(Flat):
    """The list of what runs is never emptied: the first step's means come back."""

    def finish(self):
        for bucket, flat, work in reversed(self.running):
            work.wait()
            self.copy_back(bucket, flat)
        self.reset()


@bank.wrong(5, "handles-kept")
class Overlap(Flat):
    """What was waited for stays in the list: right, as the newest mean is copied last."""

    def finish(self):
        for bucket, flat, work in self.running:
            work.wait()
            self.copy_back(bucket, flat)
        self.reset()


@bank.wrong(5, "handles-kept", variant=True)
class Overlap:
    """A handle a bucket and step, in a dictionary that nobody empties."""

    def __init__(self, parameters, capacity):
        self.step, self.works = 0, {}
        for k, bucket in enumerate(buckets_of(parameters, capacity)):
            torch.autograd.graph.register_multi_grad_hook(bucket, lambda g, k=k, b=bucket: self.start(k, b, g))

    def start(self, k, bucket, gradients):
        flat = torch.cat([g.flatten() for g in gradients])
        self.works[self.step, k] = bucket, flat, dist.all_reduce(flat, async_op=True)

    def finish(self):
        for (step, _), (bucket, flat, work) in self.works.items():
            work.wait()
            if step == self.step:
                for p, piece in zip(bucket, (flat / dist.get_world_size()).split([p.numel() for p in bucket])):
                    p.grad = piece.view_as(p)
        self.step += 1


@bank.right(5)
class Overlap(Flat):
    """Each all-reduce is waited for twice, within its step."""

    def finish(self):
        for _, _, work in self.running:
            work.wait()
        super().finish()


@bank.wrong(5, "zeroed-in-place")
class Overlap(Flat):
    """Takes the new gradient from p.grad only where it is not the bucket's part."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.flats = [
            torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype, device=b[0].device) for b in self.buckets
        ]

    def start(self, k):
        parts = self.flats[k].split([p.numel() for p in self.buckets[k]])
        for p, part in zip(self.buckets[k], parts):
            if p.grad.data_ptr() != part.data_ptr():
                part.copy_(p.grad.reshape(-1) / dist.get_world_size())
                p.grad = part.view_as(p)
        self.running.append((self.buckets[k], self.flats[k], dist.all_reduce(self.flats[k], async_op=True)))

    def copy_back(self, bucket, flat):
        pass


@bank.right(5)
class Overlap(Flat):
    """The sum in two halves: one rank adds up each part, and hands it on in finish()."""

    def start(self, k):
        n = dist.get_world_size()
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]])
        each = -(-flat.numel() // n)
        whole, part = flat.new_zeros(n * each), flat.new_empty(each)
        whole[: flat.numel()] = flat
        self.running.append((k, whole, part, dist.reduce_scatter_tensor(part, whole, async_op=True)))

    def finish(self):
        for k, whole, part, work in self.running:
            work.wait()
            dist.all_gather_into_tensor(whole, part / dist.get_world_size())
            self.copy_back(self.buckets[k], whole[: sum(p.numel() for p in self.buckets[k])])
        self.running = []
        self.reset()


@bank.wrong(5, "no-handle")
class Overlap(Flat):
    """Keeps what a collective that is done returns: nothing."""

    async_op = False


@bank.wrong(5, "hook-too-early")
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        for p in self.number:
            p._post_accumulate_grad_hooks.clear()
            p.register_hook(lambda gradient, p=p: self.hook(p))


@bank.wrong(5, "hook-too-early")
class Overlap(Flat):
    """Starts with the first gradient of a bucket instead of the last: the others are still those of the step before."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        for p in self.number:
            p.grad = torch.zeros_like(p)

    def hook(self, p):
        k = self.number[p]
        self.left[k] -= 1
        if self.left[k] == len(self.buckets[k]) - 1:
            self.start(k)


@bank.wrong(5, "weights-changed")
class Overlap(Flat):
    def finish(self):
        super().finish()
        with torch.no_grad():
            for p in self.number:
                p -= 0.1 * p.grad


@bank.wrong(5, "ddp-borrowed")
class Overlap:
    def __init__(self, parameters, capacity):
        module = torch.nn.Module()
        module.all = torch.nn.ParameterList(parameters)
        DistributedDataParallel(module, bucket_cap_mb=capacity / 2**20)

    def finish(self):
        pass


@bank.wrong(5, "rank-failed")
class Overlap(Flat):
    """Waits for ever: one rank calls a collective more."""

    def finish(self):
        super().finish()
        if dist.get_rank() == 0:
            dist.barrier()


# ---------------------------------------------------------------- balise 6


def pair(slug=None, reducer=Quiet, backward=backward_in_parts):
    bank.answers.append(Answer(bank.work, 6, slug, (reducer, backward), sys._getframe(1).f_lineno))


pair()


class RightSwitch(Flat):
    """A class as context manager."""

    depth = 0

    def no_sync(self):
        return self

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1

    def hook(self, p):
        if not self.depth:
            super().hook(p)


def right_list(loss_of, parts, reducer):
    weights = torch.tensor([float(len(part)) for part in parts])
    weights = (weights / weights.sum()).tolist()
    for k, (weight, part) in enumerate(zip(weights, parts)):
        context = reducer.no_sync() if k + 1 < len(parts) else contextlib.nullcontext()
        with context:
            loss = loss_of(part)
            loss.backward(torch.full_like(loss, weight))
    return reducer.finish()


pair(reducer=RightSwitch, backward=right_list)


class RightOwnSum(Quiet):
    """Hooks are always there; the counters are made new when silence ends."""

    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        try:
            yield self
        finally:
            self.on = True
            self.reset()


pair(reducer=RightOwnSum)


class NoSwitch(Flat):
    """no_sync does nothing; each backward sends."""

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def hook(self, p):
        super().hook(p)
        if self.left[self.number[p]] == 0:
            self.left[self.number[p]] = len(self.buckets[self.number[p]])


pair("every-micro-batch", NoSwitch)


class StaysOff(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        yield


pair("never-sent", StaysOff)


class OffAfterError(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        yield
        self.on = True


pair("switch-stays", OffAfterError)


class DividesAnyway(Quiet):
    def hook(self, p):
        if not self.on:
            p.grad /= 2
        super().hook(p)


pair("lost-local", DividesAnyway)


class Forgets(Quiet):
    """Drops what was collected when silence ends."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.drop = True

    def hook(self, p):
        if self.on and getattr(self, "drop", False):
            self.fresh = getattr(self, "fresh", {})
            if p in self.fresh:
                p.grad -= self.fresh.pop(p)
        if not self.on:
            self.fresh = getattr(self, "fresh", {})
            self.fresh[p] = p.grad.clone()
        super().hook(p)


pair("only-the-last", Forgets)


class AtTheEnd(Quiet):
    def hook(self, p):
        pass

    def finish(self):
        for k in range(len(self.buckets)):
            self.start(k)
        super().finish()


pair("no-overlap-left", AtTheEnd)


class CountsInSilence(Quiet):
    """Counts gradients also inside no_sync, and so starts too early."""

    def hook(self, p):
        k = self.number[p]
        self.left[k] -= 1
        if self.on and self.left[k] <= 0:
            self.start(k)


pair("sent-again", CountsInSilence)


def sends_each(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for part in parts:
        (loss_of(part) * len(part) / rows).backward()
    reducer.finish()


pair("every-micro-batch", backward=sends_each)


def all_silent(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    with reducer.no_sync():
        for part in parts:
            (loss_of(part) * len(part) / rows).backward()
    reducer.finish()


pair("never-sent", backward=all_silent)


def varied(weight=lambda part, parts: len(part) / sum(map(len, parts)), each=False, finish=True, keep=None):
    def backward(loss_of, parts, reducer):
        for k, part in enumerate(parts):
            with contextlib.nullcontext() if k == len(parts) - 1 else reducer.no_sync():
                (loss_of(part) * weight(part, parts)).backward()
            if each:
                reducer.finish()
        if finish and not each:
            reducer.finish()

    return backward


for weight in (
    lambda part, parts: 1.0,
    lambda part, parts: len(part),
    lambda part, parts: 1 / len(part),
    lambda part, parts: len(part) * dist.get_world_size() / sum(map(len, parts)),  # as where no reducer divides
):
    pair("part-weights", backward=varied(weight=weight))
pair("part-weights", backward=varied(weight=lambda part, parts: 1 / len(parts)))
pair("finish-forgotten", backward=varied(finish=False))
pair("finish-every-time", backward=varied(each=True))


def one_graph(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    sum(loss_of(part) * len(part) / rows for part in parts).backward()
    reducer.finish()


pair("graphs-kept", backward=one_graph)


def retained(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for k, part in enumerate(parts):
        with contextlib.nullcontext() if k == len(parts) - 1 else reducer.no_sync():
            loss = loss_of(part) * (len(part) / rows)
            loss.backward(retain_graph=True)
    reducer.finish()


pair("retained", backward=retained)


def losses_kept(loss_of, parts, reducer):
    rows, losses = sum(map(len, parts)), []
    with reducer.no_sync():
        for part in parts[:-1]:
            losses.append(loss_of(part))
            torch.autograd.backward(losses[-1], torch.tensor(len(part) / rows), retain_graph=True)
    losses.append(loss_of(parts[-1]))
    (losses[-1] * (len(parts[-1]) / rows)).backward()
    reducer.finish()
    return torch.stack(losses).sum().item()


pair("retained", backward=losses_kept)


def one_batch(loss_of, parts, reducer):
    loss_of(torch.cat(parts)).backward()
    reducer.finish()


pair("not-in-parts", backward=one_batch)


def only_last(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for part in parts[:-1]:
        loss_of(part)
    (loss_of(parts[-1]) * len(parts[-1]) / rows).backward()
    reducer.finish()


pair("only-the-last", backward=only_last)


def counted_first(loss_of, parts, reducer):
    """How many rows there are on all ranks is asked, not assumed."""
    rows = torch.tensor(sum(map(len, parts)))
    dist.all_reduce(rows)
    mean_of_ranks = rows.item() / dist.get_world_size()
    for k, part in enumerate(parts):
        with reducer.no_sync() if k < len(parts) - 1 else contextlib.nullcontext():
            (loss_of(part) * (len(part) / mean_of_ranks)).backward()
    reducer.finish()


pair(backward=counted_first)


def sent_after_all(loss_of, parts, reducer):
    """All micro-batches in silence; then the hooks are called by hand."""
    rows = sum(map(len, parts))
    with reducer.no_sync():
        for part in parts:
            (loss_of(part) * (len(part) / rows)).backward()
    for p in reducer.number:
        reducer.hook(p)
    reducer.finish()


pair("no-overlap-left", backward=sent_after_all)


class Announced(Flat):
    """The course's Bucket, and hooks that do not look at the switch."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.missing = set(self.number)

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def place(self, p):
        self.missing.remove(p)

    def hook(self, p):
        self.place(p)
        super().hook(p)


pair("placed-twice", Announced)

slips = Bank("08_data_parallel_under_the_hood", whole=True)
slips.slip(5, "hook-too-early", ("register_post_accumulate_grad_hook(self.ready)", "register_hook(self.ready)"))
slips.slip(5, "hook-too-early", ("hook(self.ready)", "hook(self.ready(p))"))
slips.slip(6, "part-weights", ("(loss_of(part) * len(part) / total)", "(loss_of(part) / total)"))

AS_NEW = "        for bucket in self.buckets:\n            bucket.missing = set(bucket.parameters)"
slips.slip(5, "placed-again", (AS_NEW, "        pass"))
slips.slip(
    5,
    "placed-again",
    (AS_NEW, AS_NEW + "\n        for p in self.home:\n            p.register_post_accumulate_grad_hook(self.ready)"),
)
slips.slip(
    5, "written-in-flight",
    ("        for work in self.running:", "        for bucket in self.buckets:\n            bucket.flat.zero_()\n        for work in self.running:"),
)  # fmt: skip
slips.slip(5, "missing-no-set", (AS_NEW, AS_NEW.replace("set(bucket.parameters)", "list(bucket.parameters)")))

bank.add(slips)

with_setup = Bank("08_data_parallel_under_the_hood", whole=True)
with_setup.text(
    5,
    "wrong-gradient",
    """
import itertools
class Overlap:
    def __init__(self, parameters, capacity):
        self.buckets = [Bucket(group) for group in make_buckets(parameters, capacity)]
        self.home = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.running = []
        self.ends = list(itertools.accumulate(len(b.parameters) for b in self.buckets))
        self.arrived = 0
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.home[p].place(p)
        self.arrived += 1
        if self.arrived in self.ends:  # the gradients of the next bucket are there
            bucket = self.buckets[self.ends.index(self.arrived)]
            self.running.append(dist.all_reduce(bucket.flat, async_op=True))

    def finish(self):
        for work in self.running:
            work.wait()
        self.running.clear()
        self.arrived = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
""",
)
bank.add(with_setup)
