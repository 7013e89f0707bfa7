"""Answers to balise 5 of 08_data_parallel_under_the_hood: overlap."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.answers.bank import Bank
from tests.answers.data_parallel_under_the_hood.parts import Flat, Whole, buckets_of

bank = Bank("08_data_parallel_under_the_hood", 5)

bank.edge("second-step", "missing-no-set", "written-in-flight")


@bank.right()
class Overlap(Flat):
    pass


@bank.right()
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


@bank.right()
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


bank.right()(Whole)


@bank.right()
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


@bank.right()
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


@bank.wrong("no-communication")
class Overlap(Flat):
    def start(self, k):
        pass


@bank.wrong("not-divided")
class Overlap(Flat):
    def start(self, k):
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]])
        self.running.append((self.buckets[k], flat, dist.all_reduce(flat, async_op=True)))


@bank.wrong("not-waited")
class Overlap(Flat):
    def finish(self):
        for bucket, flat, _ in self.running:
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = piece.view(p.shape)
        self.running = []
        self.reset()


@bank.wrong("not-copied-back")
class Overlap(Flat):
    def finish(self):
        for _, _, work in self.running:
            work.wait()
        self.running = []
        self.reset()


@bank.wrong("not-copied-back")
class Overlap(Flat):
    """Copied back before the wait."""

    def finish(self):
        for bucket, flat, work in self.running:
            self.copy_back(bucket, flat)
            work.wait()
        self.running = []
        self.reset()


@bank.wrong("blocking")
class Overlap(Flat):
    def start(self, k):
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]]) / dist.get_world_size()
        dist.all_reduce(flat)
        self.copy_back(self.buckets[k], flat)


@bank.wrong("blocking")
class Overlap(Flat):
    def start(self, k):
        super().start(k)
        self.running[-1][-1].wait()


bank.hint("no-overlap", "All {n} all-reduces were started after backward had ended. Start the all-reduce of a bucket "
          "in a hook, as soon as the bucket's last gradient has arrived.")  # fmt: skip


@bank.wrong("no-overlap", variant=True)
class Overlap(Flat):
    def hook(self, p):
        pass

    def finish(self):
        for k in range(len(self.buckets)):
            self.start(k)
        super().finish()


bank.hint("no-buckets", "You start {n} all-reduces for {held} bytes of gradients in buckets of {capacity} bytes. Start "
          "one for each bucket, not one for each parameter.")  # fmt: skip


@bank.wrong("no-buckets", variant=True)
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, 1)


bank.hint("one-bucket", "One all-reduce carries all gradients. The capacity is {capacity} bytes: respect it, and most "
          "of the work starts before backward ends.")  # fmt: skip


@bank.wrong("one-bucket", variant=True)
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, 25 * 2**20)


bank.hint("late-start", "Before the gradients of the first layer were computed, only {early} of {total} bytes were on "
          "their way: a bucket waits although it is complete.")  # fmt: skip


@bank.wrong("late-start", variant=True)
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


@bank.wrong("sent-again")
class Overlap(Flat):
    def finish(self):
        super().finish()
        for bucket in self.buckets:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            dist.all_reduce(flat)


@bank.wrong("placed-again")
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


@bank.wrong("second-step")
class Overlap(Flat):
    """The counters are never set back."""

    def finish(self):
        left = self.left
        super().finish()
        self.left = left


@bank.wrong("second-step")
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


@bank.wrong("second-step")
class Overlap(Flat):
    """The list of what runs is never emptied: the first step's means come back."""

    def finish(self):
        for bucket, flat, work in reversed(self.running):
            work.wait()
            self.copy_back(bucket, flat)
        self.reset()


bank.hint("handles-kept", "Step {step} waits for {n} all-reduces of earlier steps. finish() must remove what it has "
          "waited for from the list of running operations; otherwise the list grows with each step.", edge=True)  # fmt: skip


@bank.wrong("handles-kept")
class Overlap(Flat):
    """What was waited for stays in the list: right, as the newest mean is copied last."""

    def finish(self):
        for bucket, flat, work in self.running:
            work.wait()
            self.copy_back(bucket, flat)
        self.reset()


@bank.wrong("handles-kept", variant=True)
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


@bank.right()
class Overlap(Flat):
    """Each all-reduce is waited for twice, within its step."""

    def finish(self):
        for _, _, work in self.running:
            work.wait()
        super().finish()


bank.hint("zeroed-in-place", "This is right after zero_grad(set_to_none=True), but wrong after "
          "zero_grad(set_to_none=False): then backward adds to the tensor that is already in p.grad, perhaps to a part "
          "of your bucket.", edge=True)  # fmt: skip


@bank.wrong("zeroed-in-place")
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


@bank.wrong("zeroed-in-place", variant=True)
class Overlap(Flat):
    """Sends only gradients that are new tensors."""

    old = {}  # noqa: RUF012

    def start(self, k):
        new = [p.grad * (self.old.get(p) is not p.grad) / dist.get_world_size() for p in self.buckets[k]]
        flat = torch.cat([gradient.reshape(-1) for gradient in new])
        self.running.append((self.buckets[k], flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        super().finish()
        self.old = {p: p.grad for p in self.number}


@bank.right()
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


@bank.wrong("no-handle")
class Overlap(Flat):
    """Keeps what a collective that is done returns: nothing."""

    async_op = False


@bank.wrong("hook-too-early")
class Overlap(Flat):
    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        for p in self.number:
            p._post_accumulate_grad_hooks.clear()
            p.register_hook(lambda gradient, p=p: self.hook(p))


@bank.wrong("hook-too-early")
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


@bank.wrong("weights-changed")
class Overlap(Flat):
    def finish(self):
        super().finish()
        with torch.no_grad():
            for p in self.number:
                p -= 0.1 * p.grad


@bank.wrong("ddp-borrowed")
class Overlap:
    def __init__(self, parameters, capacity):
        module = torch.nn.Module()
        module.all = torch.nn.ParameterList(parameters)
        DistributedDataParallel(module, bucket_cap_mb=capacity / 2**20)

    def finish(self):
        pass


@bank.wrong("rank-failed")
class Overlap(Flat):
    """Waits for ever: one rank calls a collective more."""

    def finish(self):
        super().finish()
        if dist.get_rank() == 0:
            dist.barrier()


slips = Bank("08_data_parallel_under_the_hood", 5, whole=True)

slips.slip("hook-too-early", ("register_post_accumulate_grad_hook(self.ready)", "register_hook(self.ready)"))

slips.slip("hook-too-early", ("hook(self.ready)", "hook(self.ready(p))"))

AS_NEW = "        for bucket in self.buckets:\n            bucket.missing = set(bucket.parameters)"

slips.slip("placed-again", (AS_NEW, "        pass"))

slips.slip(
    "placed-again",
    (AS_NEW, AS_NEW + "\n        for p in self.home:\n            p.register_post_accumulate_grad_hook(self.ready)"),
)

slips.slip("written-in-flight",
    ("        for work in self.running:", "        for bucket in self.buckets:\n            bucket.flat.zero_()\n        for work in self.running:"),
)  # fmt: skip

slips.slip("missing-no-set", (AS_NEW, AS_NEW.replace("set(bucket.parameters)", "list(bucket.parameters)")))

slips.slip("not-waited", (AS_NEW, AS_NEW.replace("set(bucket.parameters)", "list(bucket.parameters)")), ("            work.wait()", "            pass")
)  # fmt: skip

bank.add(slips)

with_setup = Bank("08_data_parallel_under_the_hood", 5, whole=True)

with_setup.text(
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
