"""Right pieces that several answers are made of, and varied."""

import contextlib

import torch
import torch.distributed as dist


def buckets_of(parameters, capacity):
    buckets, room = [], 0
    for p in reversed(list(parameters)):
        size = p.numel() * p.element_size()
        if not buckets or size > room or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = capacity
        buckets[-1].append(p)
        room -= size
    return buckets


class Flat:
    """Overlap with torch.cat, numbers instead of sets, and a copy back at the end."""

    async_op = True

    def __init__(self, parameters, capacity):
        self.buckets = buckets_of(parameters, capacity)
        self.number = {p: k for k, bucket in enumerate(self.buckets) for p in bucket}
        self.running = []
        self.reset()
        for p in self.number:
            p.register_post_accumulate_grad_hook(self.hook)

    def reset(self):
        self.left = [len(bucket) for bucket in self.buckets]

    def hook(self, p):
        k = self.number[p]
        self.left[k] -= 1
        if self.left[k] == 0:
            self.start(k)

    def start(self, k):
        flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[k]]) / dist.get_world_size()
        self.running.append((self.buckets[k], flat, dist.all_reduce(flat, async_op=self.async_op)))

    def finish(self):
        for bucket, flat, work in self.running:
            work.wait()
            self.copy_back(bucket, flat)
        self.running = []
        self.reset()

    def copy_back(self, bucket, flat):
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))


class Quiet(Flat):
    """Flat with no_sync."""

    on = True

    @contextlib.contextmanager
    def no_sync(self):
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def hook(self, p):
        if self.on:
            super().hook(p)


class Whole(Quiet):
    """Quiet for any list of parameters."""

    def __init__(self, parameters, capacity):
        super().__init__([p for p in dict.fromkeys(parameters) if p.requires_grad], capacity)

    def reset(self):
        super().reset()
        self.next = 0

    def hook(self, p):
        if not self.on:
            return
        self.left[self.number[p]] -= 1
        while self.next < len(self.buckets) and self.left[self.next] == 0:
            self.start(self.next)
            self.next += 1

    def finish(self):
        for k in range(self.next, len(self.buckets)):
            self.fill(self.buckets[k])
            self.start(k)
        super().finish()

    def fill(self, bucket):
        for p in bucket:
            if p.grad is None:
                p.grad = torch.zeros_like(p)


def backward_in_parts(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    with reducer.no_sync():
        for part in parts[:-1]:
            (loss_of(part) * (len(part) / rows)).backward()
    (loss_of(parts[-1]) * (len(parts[-1]) / rows)).backward()
    reducer.finish()
