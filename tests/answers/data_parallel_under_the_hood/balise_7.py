"""Answers to 08_data_parallel_under_the_hood: parameters that took no part."""

import time

import torch
import torch.distributed as dist

from tests.answers.bank import Bank
from tests.answers.data_parallel_under_the_hood.parts import Quiet, Whole

bank = Bank("08_data_parallel_under_the_hood", 7)

bank.right()(Whole)


@bank.right()
class Reducer(Whole):
    """As PyTorch: what no rank used keeps no gradient."""

    def finish(self):
        used = torch.tensor([float(p.grad is not None) for p in self.number], device=next(iter(self.number)).device)
        dist.all_reduce(used)
        super().finish()
        for p, ranks in zip(self.number, used.tolist()):
            if not ranks:
                p.grad = None


@bank.right()
class Reducer:
    """Flat tensors that stay; sets of what is missing; the first bucket that may start is remembered."""

    def __init__(self, parameters, capacity):
        self.silent, seen = False, []
        for p in parameters:
            if p.requires_grad and not any(p is q for q in seen):
                seen.append(p)
        self.buckets = []
        held = capacity + 1
        for p in reversed(seen):
            size = p.numel() * p.element_size()
            if held + size > capacity:
                self.buckets.append([])
                held = 0
            self.buckets[-1].append(p)
            held += size
        self.flats = [
            torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype, device=b[0].device) for b in self.buckets
        ]
        self.clear()
        for p in seen:
            p.register_post_accumulate_grad_hook(self.arrived)

    def clear(self):
        self.missing = [{id(p) for p in bucket} for bucket in self.buckets]
        self.works = []

    def no_sync(self):
        reducer = self

        class Silence:
            def __enter__(self):
                reducer.silent = True

            def __exit__(self, *_):
                reducer.silent = False

        return Silence()

    def arrived(self, p):
        if not self.silent:
            for missing in self.missing:
                missing.discard(id(p))
            self.go()

    def go(self, everything=False):
        while len(self.works) < len(self.buckets) and (everything or not self.missing[len(self.works)]):
            k = len(self.works)
            flat, offset = self.flats[k], 0
            flat.zero_()
            for p in self.buckets[k]:
                if p.grad is not None:
                    flat[offset : offset + p.numel()] = p.grad.reshape(-1)
                offset += p.numel()
            self.works.append(dist.all_reduce(flat, async_op=True))

    def finish(self):
        self.go(everything=True)
        for work, flat, bucket in zip(self.works, self.flats, self.buckets):
            work.wait()
            offset = 0
            for p in bucket:
                p.grad = flat[offset : offset + p.numel()].view(p.shape) / dist.get_world_size()
                offset += p.numel()
        self.clear()


@bank.right()
class Reducer(Whole):
    """Frozen ones stay in the list; gradients are made before backward, so that there is always one to send."""

    def fill(self, bucket):
        for p in bucket:
            p.grad = p.new_zeros(p.shape) if p.grad is None else p.grad


bank.hint("frozen-hook", "A frozen parameter (requires_grad False) never gets a gradient and accepts no hook. Skip it.")


@bank.wrong("frozen-hook", variant=True)
class Reducer(Quiet):
    pass


bank.hint("bucket-left-out", "A bucket was never started: parameter {k} still has the rank's own gradient. "
          "start_complete must go on while the next bucket is complete, up to the last bucket; finish() places what is "
          "missing, and then calls start_complete again.")  # fmt: skip


@bank.wrong("bucket-left-out")
class Reducer(Quiet):
    """Sends only what was complete when backward ended."""

    def __init__(self, parameters, capacity):
        super().__init__([p for p in dict.fromkeys(parameters) if p.requires_grad], capacity)


bank.hint("unused-none", "A parameter that was not used on this rank has p.grad None: {error}")


@bank.wrong("unused-none", variant=True)
class Reducer(Whole):
    def fill(self, bucket):
        pass


bank.hint("waits-for-ever", "The ranks stood still or stopped with an error. Either a rank waits for a hook that never "
          "fires, or the ranks started different buckets. All ranks must start the same buckets in the same order, "
          "whichever parameters they used (the order of a set differs from rank to rank). {error}")  # fmt: skip


@bank.wrong("waits-for-ever")
class Reducer(Whole):
    """Waits for hooks that will never fire."""

    def finish(self):
        while self.next < len(self.buckets):
            time.sleep(0.01)
        super().finish()


@bank.wrong("waits-for-ever")
class Reducer(Whole):
    """A bucket of what was used only: its size differs from rank to rank."""

    def start(self, k):
        used = [p for p in self.buckets[k] if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in used] or [torch.zeros(0).double()]) / dist.get_world_size()
        self.running.append((used, flat, dist.all_reduce(flat, async_op=True)))

    def fill(self, bucket):
        pass


bank.hint("buckets-swapped", "Parameter {k} has the gradient of another head. Rank 0 and rank 1 used different heads, "
          "so their buckets were complete in a different order: start the buckets strictly one after the other.")  # fmt: skip


@bank.wrong("buckets-swapped", variant=True)
class Reducer(Whole):
    """Starts a bucket as soon as it is complete, and what is left in finish."""

    def reset(self):
        super().reset()
        self.sent = set()

    def hook(self, p):
        if self.on:
            k = self.number[p]
            self.left[k] -= 1
            if self.left[k] == 0:
                self.sent.add(k)
                self.start(k)

    def finish(self):
        for k in range(len(self.buckets)):
            if k not in self.sent:
                self.fill(self.buckets[k])
                self.start(k)
        self.next = len(self.buckets)
        super().finish()


bank.hint("ranks-disagree", "Parameter {k} was used on only one rank, and the other ranks hold {error}. Afterwards all "
          "ranks must hold the same mean, or their weights drift apart.")  # fmt: skip


@bank.wrong("ranks-disagree", variant=True)
class Reducer(Whole):
    """What this rank did not use stays None here, whatever the others used."""

    def finish(self):
        unused = [p for p in self.number if p.grad is None]
        super().finish()
        for p in unused:
            p.grad = None


bank.hint("divided-by-users", "You divided parameter {k} by the number of ranks that used it. A rank that didn't use "
          "it contributes zero: divide by world_size.")  # fmt: skip


@bank.wrong("divided-by-users", variant=True)
class Reducer(Whole):
    def finish(self):
        used = torch.tensor([float(p.grad is not None) for p in self.number])
        dist.all_reduce(used)
        super().finish()
        for p, ranks in zip(self.number, used.tolist()):
            p.grad *= dist.get_world_size() / max(1, ranks)


bank.hint("stale", "Not every rank used parameter {k} in this step, and a rank that didn't use it sent something other "
          "than zero: perhaps what an earlier step left in the bucket.")  # fmt: skip


@bank.wrong("stale")
class Reducer(Whole):
    """A flat tensor that stays; the part of what was not used still holds the step before."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.flats = [torch.ones(sum(p.numel() for p in b)).double() for b in self.buckets]

    def fill(self, bucket):
        pass

    def start(self, k):
        offset = 0
        for p in self.buckets[k]:
            if p.grad is not None:
                self.flats[k][offset : offset + p.numel()] = p.grad.reshape(-1) / dist.get_world_size()
            offset += p.numel()
        self.running.append((self.buckets[k], self.flats[k], dist.all_reduce(self.flats[k], async_op=True)))

    def copy_back(self, bucket, flat):
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = piece.view(p.shape).clone()


@bank.wrong("stale", variant=True)
class Reducer(Whole):
    """Flat tensors that begin with zeros and keep what the step before left where nothing new came."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.flats = [p.new_zeros(sum(q.numel() for q in b)) for b in self.buckets for p in b[:1]]

    def fill(self, bucket):
        pass

    def start(self, k):
        parts = self.flats[k].split([p.numel() for p in self.buckets[k]])
        for p, part in zip(self.buckets[k], parts):
            if p.grad is not None:
                part.copy_(p.grad.reshape(-1) / dist.get_world_size())
        self.running.append((self.buckets[k], self.flats[k], dist.all_reduce(self.flats[k], async_op=True)))

    def copy_back(self, bucket, flat):
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = piece.view(p.shape).clone()


@bank.wrong("bucket-left-out")
class Reducer(Whole):
    """Hooks alone start buckets: behind one that is never complete, none is sent."""

    def finish(self):
        Quiet.finish(self)


bank.hint("frozen-gradient", "A frozen parameter now has a gradient. Leave it None: with zeros, weight decay would "
          "shrink the parameter.")  # fmt: skip


@bank.wrong("frozen-gradient")
class Reducer(Whole):
    """Zeros for all that have no gradient, the frozen ones too."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.all = list(parameters)

    def finish(self):
        super().finish()
        for p in self.all:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@bank.wrong("second-step")
class Reducer(Whole):
    """Which bucket is next is never set back."""

    def finish(self):
        super().finish()
        self.next = len(self.buckets)


bank.hint("overlap-lost", "Every parameter was used, but no all-reduce was started before backward had reached the "
          "first layer.")  # fmt: skip


@bank.wrong("overlap-lost")
class Reducer(Whole):
    """Starts all of them when the last gradient of all has come."""

    def hook(self, p):
        if self.on:
            self.left[self.number[p]] -= 1
            while self.next < len(self.buckets) and not any(self.left):
                self.start(self.next)
                self.next += 1


bank.hint("collected-lost", "Parameter {k} was used in the first micro-batch, but not in the last one. Its hook did "
          "not fire in the last one, but its gradient had been collected in p.grad, and it counts.")  # fmt: skip


@bank.wrong("collected-lost", variant=True)
class Reducer(Whole):
    """Takes missing for unused: what was collected before is overwritten with zeros."""

    def reset(self):
        super().reset()
        self.fired = set()

    def hook(self, p):
        if self.on:
            self.fired.add(p)
        super().hook(p)

    def fill(self, bucket):
        for p in bucket:
            if p not in self.fired:
                p.grad = torch.zeros_like(p)


bank.hint("tied-sent-twice", "You sent as much as all-reduces of {sent} bytes need, for {held} bytes of gradients. A "
          "parameter with two names is one parameter.")  # fmt: skip


@bank.wrong("tied-sent-twice", variant=True)
class Reducer(Whole):
    def __init__(self, parameters, capacity):
        parameters = [p for p in parameters if p.requires_grad]
        super().__init__(parameters, capacity)
        self.again = next(p for p in parameters if sum(p is q for q in parameters) > 1)

    def finish(self):
        super().finish()
        dist.all_reduce(self.again.grad)
        self.again.grad /= dist.get_world_size()


@bank.wrong("frozen-gradient", variant=True)
class Reducer(Whole):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.frozen = [p for p in parameters if not p.requires_grad]

    def finish(self):
        super().finish()
        for p in self.frozen:
            p.grad = torch.ones_like(p)


@bank.wrong("overlap-lost")
class Reducer(Whole):
    """Safe and slow: everything in finish."""

    def hook(self, p):
        pass


bank.hint("one-each", "{n} collectives in one step are too many for {held} bytes in buckets of {capacity} bytes. Start "
          "one for each bucket.")  # fmt: skip


@bank.wrong("one-each", variant=True)
class Reducer(Whole):
    def start(self, k):
        for p in self.buckets[k]:
            for row in (p.grad / dist.get_world_size()).split(4):
                row = row.contiguous()
                self.running.append(([], row, dist.all_reduce(row, async_op=True)))
                self.pieces = getattr(self, "pieces", [])
                self.pieces.append((p, row))

    def finish(self):
        super().finish()
        for p in self.number:
            p.grad = torch.cat([row for q, row in self.pieces if q is p])
        self.pieces = []

    def copy_back(self, bucket, flat):
        pass


@bank.wrong("not-divided")
class Reducer(Whole):
    def copy_back(self, bucket, flat):
        super().copy_back(bucket, flat * dist.get_world_size())


@bank.wrong("no-communication")
class Reducer(Whole):
    def start(self, k):
        pass


slips = Bank("08_data_parallel_under_the_hood", 7, whole=True)

STARTED = "self.running.append(dist.all_reduce(self.buckets[len(self.running)].flat, async_op=True))"

NEXT = (
    "        while len(self.running) < len(self.buckets) and not self.buckets[len(self.running)].missing:\n            "
    + STARTED
)

slips.slip("blocking", (STARTED, STARTED + "\n            self.running[-1].wait()"))

slips.slip(
    "sent-again",
    (
        NEXT,
        "        for bucket in self.buckets:\n            if not bucket.missing:\n                self.running.append(dist.all_reduce(bucket.flat, async_op=True))",
    ),
)

slips.slip(
    "bucket-left-out",
    (
        "                    p.grad = torch.zeros_like(p)\n                bucket.place(p)\n",
        "                    p.grad = torch.zeros_like(p)\n                    bucket.place(p)\n",
    ),
)

slips.slip(
    "waits-for-ever",
    (
        NEXT,
        "        for bucket in self.buckets[len(self.running) :]:\n            if not bucket.missing:\n                self.running.append(dist.all_reduce(bucket.flat, async_op=True))",
    ),
    variant=True,
)

slips.slip(
    "overlap-lost",
    (
        NEXT,
        "        if not self.buckets[0].missing and not self.running:\n            self.running.append(dist.all_reduce(self.buckets[0].flat, async_op=True))\n        if not any(bucket.missing for bucket in self.buckets):\n            for bucket in self.buckets[len(self.running) :]:\n                self.running.append(dist.all_reduce(bucket.flat, async_op=True))",
    ),
    variant=True,
)

with_setup = Bank("08_data_parallel_under_the_hood", 7, whole=True)

with_setup.slip(
    "bucket-left-out",
    (
        "        parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]\n",
        "        unique = []\n        for p in parameters:\n"
        "            if p.requires_grad and not any(p.shape == q.shape and torch.equal(p, q) for q in unique):\n"
        "                unique.append(p)\n        parameters = unique\n",
    ),
    variant=True,
)

with_setup.slip("made-on-cpu", ("torch.zeros_like(p)", "torch.zeros(p.shape, dtype=p.dtype)"))
bank.add(slips, with_setup)
