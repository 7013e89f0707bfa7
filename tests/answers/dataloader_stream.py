"""Answers to balise 5 of 05_dataloader."""

import multiprocessing
import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.answers.bank import Bank

bank = Bank("05_dataloader")


class Base(IterableDataset):
    """A right one; wrong ones override a part of it."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items, self.seed, self.rank, self.world_size, self.even = items, seed, rank, world_size, even
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch[0] = epoch

    def order(self):
        return np.random.default_rng([self.seed, int(self.epoch[0])]).permutation(len(self.items)).tolist()

    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self.rank * workers + worker, self.world_size * workers

    def cut(self, order, parts):
        return order[: len(order) - len(order) % parts] if self.even else order

    def __iter__(self):
        part, parts = self.place()
        for index in self.cut(self.order(), parts)[part::parts]:
            yield self.items[index]


@bank.right(5)
class SplitStream(IterableDataset):
    """Contiguous pieces, worker-major numbering, a shared integer of multiprocessing, an iterator made at once."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items, self.seed, self.even = items, seed, even
        self.rank, self.world_size = rank, world_size
        self.epoch = multiprocessing.Value("q", 0)

    def set_epoch(self, epoch):
        self.epoch.value = epoch

    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        k, parts = number * self.world_size + self.rank, workers * self.world_size
        order = list(range(len(self.items)))
        random.Random(self.seed * 7919 + self.epoch.value).shuffle(order)
        n = len(order)
        if self.even:
            size = n // parts
            mine = order[k * size : (k + 1) * size]
        else:
            mine = order[k * n // parts : (k + 1) * n // parts]
        return iter([self.items[i] for i in mine])


@bank.right(5)
class SplitStream(Base):
    """First over ranks, then over workers."""

    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        order = self.cut(self.order(), self.world_size * workers)
        mine = order[self.rank :: self.world_size][number::workers]
        return (self.items[i] for i in mine)


@bank.right(5)
class SplitStream(Base):
    """Counts as it goes."""

    def __iter__(self):
        part, parts = self.place()
        order = self.order()
        last = len(order) // parts * parts
        for position, index in enumerate(order):
            if self.even and position >= last:
                return
            if position % parts == part:
                yield self.items[index]


@bank.wrong(5, "not-a-stream")
class SplitStream(Dataset):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items = items

    def set_epoch(self, epoch):
        pass

    def __getitem__(self, index):
        return self.items[index]


@bank.wrong(5, "not-a-stream")
class SplitStream(IterableDataset):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@bank.wrong(5, "workers-not-split")
class SplitStream(Base):
    def place(self):
        return self.rank, self.world_size


@bank.wrong(5, "places-not-items")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        yield from self.cut(self.order(), parts)[part::parts]


@bank.wrong(5, "places-not-items")
class SplitStream(Base):
    """The places of the list, shuffled where they stand."""

    def __iter__(self):
        part, parts = self.place()
        for place, _ in enumerate(self.items):
            if place % parts == part:
                yield self.order()[place]


@bank.wrong(5, "ranks-not-split")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        return (info.id, info.num_workers) if info else (0, 1)


@bank.wrong(5, "main-process-forgotten")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        return self.rank * info.num_workers + info.id, self.world_size * info.num_workers


@bank.wrong(5, "items-lost")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        for index in self.cut(self.order(), parts)[part:-1:parts]:
            yield self.items[index]


@bank.wrong(5, "even-always")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        size = len(self.items) // parts
        for index in self.order()[part * size : (part + 1) * size]:
            yield self.items[index]


@bank.wrong(5, "parts-collide")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        if info is None:
            return self.rank, self.world_size
        return self.rank + info.id, self.world_size * info.num_workers


@bank.wrong(5, "parts-collide")
class SplitStream(Base):
    """Worker by worker, but in steps of the workers instead of the ranks."""

    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return worker * workers + self.rank, self.world_size * workers


@bank.wrong(5, "parts-collide")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self.rank * self.world_size + worker, self.world_size * workers


@bank.right(5)
class SplitStream(Base):
    """Worker by worker: any numbering that uses each part once."""

    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return worker * self.world_size + self.rank, self.world_size * workers


@bank.wrong(5, "epoch-moved")
class SplitStream(Base):
    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1


@bank.wrong(5, "even-same-dropped")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        n = len(self.items) // parts * parts if self.even else len(self.items)
        drawn = np.random.default_rng([self.seed, int(self.epoch[0])]).permutation(n).tolist()
        for index in drawn[part::parts]:
            yield self.items[index]


@bank.wrong(5, "items-twice")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        order = self.order()
        order += order[: -len(order) % parts]
        for index in order[part::parts]:
            yield self.items[index]


@bank.wrong(5, "orders-differ")
class SplitStream(Base):
    def order(self):
        return torch.randperm(len(self.items)).tolist()


@bank.wrong(5, "orders-differ")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng([self.seed, int(self.epoch[0]), self.rank]).permutation(len(self.items)).tolist()


@bank.wrong(5, "orders-differ")
class SplitStream(Base):
    def order(self):
        return (
            np.random.default_rng([self.seed, int(self.epoch[0]), self.place()[0]])
            .permutation(len(self.items))
            .tolist()
        )


@bank.wrong(5, "not-shuffled")
class SplitStream(Base):
    def order(self):
        return list(range(len(self.items)))


@bank.wrong(5, "worker-order-only")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        mine = self.cut(list(range(len(self.items))), parts)[part::parts]
        random.Random(f"{self.seed} {int(self.epoch[0])}").shuffle(mine)
        for index in mine:
            yield self.items[index]


@bank.wrong(5, "epoch-without-effect")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng(self.seed).permutation(len(self.items)).tolist()


@bank.wrong(5, "epoch-without-effect")
class SplitStream(Base):
    """Shuffled once, when it is made."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        super().__init__(items, seed, rank, world_size, even)
        self.fixed = super().order()

    def order(self):
        return self.fixed


@bank.wrong(5, "order-not-kept")
class SplitStream(Base):
    """Shuffles the order of the last epoch further."""

    last = None

    def order(self):
        self.last = self.last or list(range(len(self.items)))
        random.Random(self.seed + int(self.epoch[0])).shuffle(self.last)
        return list(self.last)


@bank.wrong(5, "seed-not-used")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng(int(self.epoch[0])).permutation(len(self.items)).tolist()


@bank.wrong(5, "reads-all")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        for position, index in enumerate(self.cut(self.order(), parts)):
            item = self.items[index]
            if position % parts == part:
                yield item


@bank.wrong(5, "reads-all")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        everything = list(self.items)
        random.Random(self.seed * 1000 + int(self.epoch[0])).shuffle(everything)
        yield from self.cut(everything, parts)[part::parts]


@bank.wrong(5, "items-changed")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        if isinstance(self.items, list):
            self.items.sort()
            random.Random(self.seed * 1000 + int(self.epoch[0])).shuffle(self.items)
            yield from self.cut(self.items, parts)[part::parts]
        else:
            yield from super().__iter__()


@bank.wrong(5, "even-parts-differ")
class SplitStream(Base):
    def cut(self, order, parts):
        return order


@bank.wrong(5, "even-parts-differ")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // self.world_size * self.world_size] if self.even else order


@bank.wrong(5, "even-drops-too-much")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // (2 * parts) * (2 * parts)] if self.even else order


@bank.wrong(5, "even-repeats")
class SplitStream(Base):
    """As DistributedSampler does it without drop_last."""

    def cut(self, order, parts):
        return order + order[: -len(order) % parts] if self.even else order


@bank.wrong(5, "even-always")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // parts * parts]


@bank.wrong(5, "epoch-not-seen")
class SplitStream(Base):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        super().__init__(items, seed, rank, world_size, even)
        self.epoch = [0]


@bank.wrong(5, "epoch-counted")
class SplitStream(Base):
    """set_epoch counts in the main process only, __iter__ in each copy."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        super().__init__(items, seed, rank, world_size, even)
        self.epoch, self.calls = [0], 0

    def __iter__(self):
        if get_worker_info() is not None and get_worker_info().dataset is not None:  # in a real worker
            self.epoch[0] = self.calls
            self.calls += 1
        yield from super().__iter__()


@bank.wrong(5, "global-order")
class SplitStream(Base):
    def order(self):
        torch.manual_seed(1000 * self.seed + int(self.epoch[0]))
        return torch.randperm(len(self.items)).tolist()


@bank.wrong(5, "global-order")
class SplitStream(Base):
    def order(self):
        random.seed(1000 * self.seed + int(self.epoch[0]))
        return random.sample(range(len(self.items)), len(self.items))


@bank.wrong(5, "signature")
class SplitStream(Base):
    def __init__(self, items, seed=0, rank=0, world_size=1):
        super().__init__(items, seed, rank, world_size)
