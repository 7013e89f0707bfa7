"""Answers to balise 5 of 05_dataloader."""

import multiprocessing
import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 5)


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


@bank.right()
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


@bank.right()
class SplitStream(Base):
    """First over ranks, then over workers."""

    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        order = self.cut(self.order(), self.world_size * workers)
        mine = order[self.rank :: self.world_size][number::workers]
        return (self.items[i] for i in mine)


@bank.right()
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


PLAIN = """
import random

import torch
from torch.utils.data import IterableDataset, get_worker_info


class SplitStream(IterableDataset):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items, self.seed, self.rank, self.world_size, self.even = items, seed, rank, world_size, even
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self.rank * workers + worker, self.world_size * workers
        order = list(range(len(self.items)))
        random.Random(1000 * self.seed + self.epoch.item()).shuffle(order)
        size = len(order) // parts
        if self.even:
            order = order[: size * parts]
        for place in range(part, len(order), parts):
            yield self.items[order[place]]
"""
SHUFFLE = "        random.Random(1000 * self.seed + self.epoch.item()).shuffle(order)\n"
bank.text(None, PLAIN)

bank.hint(
    "not-a-stream",
    "The class must be an IterableDataset with __iter__ and set_epoch. Otherwise, a DataLoader would ask it for an "
    "index.",
)
bank.variant("not-a-stream", PLAIN, ("(IterableDataset)", ""))


@bank.wrong("not-a-stream")
class SplitStream(Dataset):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items = items

    def set_epoch(self, epoch):
        pass

    def __getitem__(self, index):
        return self.items[index]


@bank.wrong("not-a-stream")
class SplitStream(IterableDataset):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items = items

    def __iter__(self):
        return iter(self.items)


bank.hint(
    "workers-not-split",
    "Each of the {workers} workers gives all items of its rank: every item comes {workers} times. Ask "
    "get_worker_info().",
)
bank.variant(
    "workers-not-split",
    PLAIN,
    ("self.rank * workers + worker, self.world_size * workers", "self.rank, self.world_size"),
)


@bank.wrong("workers-not-split")
class SplitStream(Base):
    def place(self):
        return self.rank, self.world_size


bank.hint(
    "places-not-items",
    "You give out positions, 0 to {last}: the order says where the items are. Give self.items[position].",
)
bank.variant("places-not-items", PLAIN, ("self.items[order[place]]", "order[place]"))


@bank.wrong("places-not-items")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        yield from self.cut(self.order(), parts)[part::parts]


@bank.wrong("places-not-items")
class SplitStream(Base):
    """The places of the list, shuffled where they stand."""

    def __iter__(self):
        part, parts = self.place()
        for place, _ in enumerate(self.items):
            if place % parts == part:
                yield self.order()[place]


bank.hint("ranks-not-split", "Each of the {world} ranks gives all items. Split by rank too.")
bank.variant("ranks-not-split", PLAIN, ("self.rank * workers + worker, self.world_size * workers", "worker, workers"))


@bank.wrong("ranks-not-split")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        return (info.id, info.num_workers) if info else (0, 1)


bank.hint("main-process-forgotten", "Without workers, get_worker_info() is None: then there is one part per rank.")
bank.variant(
    "main-process-forgotten", PLAIN, ("(info.id, info.num_workers) if info else (0, 1)", "info.id, info.num_workers")
)


@bank.wrong("main-process-forgotten")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        return self.rank * info.num_workers + info.id, self.world_size * info.num_workers


bank.hint(
    "items-lost",
    "{n} of {all} items never come, with {world} rank(s) of {workers} worker(s). The last part may be larger or "
    "smaller than the others.",
)
bank.variant("items-lost", PLAIN, ("len(order), parts)", "len(order) - 1, parts)"))


@bank.wrong("items-lost")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        for index in self.cut(self.order(), parts)[part:-1:parts]:
            yield self.items[index]


bank.hint(
    "even-always",
    "{n} of {all} items are dropped although even=False: then the parts need not have the same size.",
)
bank.variant("even-always", PLAIN, ("if self.even:", "if True:"))


@bank.wrong("even-always")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        size = len(self.items) // parts
        for index in self.order()[part * size : (part + 1) * size]:
            yield self.items[index]


bank.hint(
    "parts-collide",
    "Two rank/worker pairs have the same part number, or one has a number beyond the last. For rank r and worker w of "
    "W workers, the number r × W + w is unique.",
)
bank.variant("parts-collide", PLAIN, ("self.rank * workers + worker", "self.rank + worker"))


@bank.wrong("parts-collide")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        if info is None:
            return self.rank, self.world_size
        return self.rank + info.id, self.world_size * info.num_workers


@bank.wrong("parts-collide")
class SplitStream(Base):
    """Worker by worker, but in steps of the workers instead of the ranks."""

    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return worker * workers + self.rank, self.world_size * workers


@bank.wrong("parts-collide")
class SplitStream(Base):
    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self.rank * self.world_size + worker, self.world_size * workers


@bank.right()
class SplitStream(Base):
    """Worker by worker: any numbering that uses each part once."""

    def place(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return worker * self.world_size + self.rank, self.world_size * workers


bank.hint(
    "epoch-moved",
    "__iter__ itself changes the epoch: each worker does that at a different time, and their shares overlap. Only "
    "set_epoch may change it.",
)
bank.variant("epoch-moved", PLAIN, ("self.items[order[place]]", "self.items[order[place]]\n        self.epoch += 1"))


@bank.wrong("epoch-moved")
class SplitStream(Base):
    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1


bank.hint(
    "even-same-dropped",
    "With even=True, the same items are dropped in every epoch, so they are never seen. Shuffle all items first, then "
    "drop some.",
)
bank.variant("even-same-dropped", PLAIN, (SHUFFLE, ""), ("        for place in", SHUFFLE + "        for place in"))


@bank.wrong("even-same-dropped")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        n = len(self.items) // parts * parts if self.even else len(self.items)
        drawn = np.random.default_rng([self.seed, int(self.epoch[0])]).permutation(n).tolist()
        for index in drawn[part::parts]:
            yield self.items[index]


bank.hint("items-twice", "{n} of {all} items come twice, with {world} rank(s) of {workers} worker(s).")
bank.variant("items-twice", PLAIN, ("        size =", "        order += order[: -len(order) % parts]\n        size ="))


@bank.wrong("items-twice")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        order = self.order()
        order += order[: -len(order) % parts]
        for index in order[part::parts]:
            yield self.items[index]


bank.hint(
    "orders-differ",
    "Ranks and workers shuffle differently, so their shares overlap. Draw the order from seed and the epoch of "
    "set_epoch, which are the same everywhere; nothing in a worker may change either.",
)
bank.variant("orders-differ", PLAIN, ("self.epoch.item())", "self.epoch.item() + self.rank)"))


@bank.wrong("orders-differ")
class SplitStream(Base):
    def order(self):
        return torch.randperm(len(self.items)).tolist()


@bank.wrong("orders-differ")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng([self.seed, int(self.epoch[0]), self.rank]).permutation(len(self.items)).tolist()


@bank.wrong("orders-differ")
class SplitStream(Base):
    def order(self):
        return (
            np.random.default_rng([self.seed, int(self.epoch[0]), self.place()[0]])
            .permutation(len(self.items))
            .tolist()
        )


bank.hint("not-shuffled", "The items come in the order of the list. Draw a new order for each epoch.")
bank.variant("not-shuffled", PLAIN, (".shuffle(order)", ".random()"))


@bank.wrong("not-shuffled")
class SplitStream(Base):
    def order(self):
        return list(range(len(self.items)))


bank.hint(
    "worker-order-only",
    "Each worker always has the same items, and only their order changes. Shuffle first, then split.",
)
bank.variant(
    "worker-order-only",
    PLAIN,
    (SHUFFLE, ""),
    (
        "range(part, len(order), parts)",
        "random.Random(self.epoch.item() - self.seed).sample(range(part, len(order), parts), len(order[part::parts]))",
    ),
)


@bank.wrong("worker-order-only")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        mine = self.cut(list(range(len(self.items))), parts)[part::parts]
        random.Random(f"{self.seed} {int(self.epoch[0])}").shuffle(mine)
        for index in mine:
            yield self.items[index]


bank.hint("epoch-without-effect", "set_epoch(1) gives the order of epoch 0.")
bank.variant("epoch-without-effect", PLAIN, (" + self.epoch.item()", ""))


@bank.wrong("epoch-without-effect")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng(self.seed).permutation(len(self.items)).tolist()


@bank.wrong("epoch-without-effect")
class SplitStream(Base):
    """Shuffled once, when it is made."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        super().__init__(items, seed, rank, world_size, even)
        self.fixed = super().order()

    def order(self):
        return self.fixed


bank.hint(
    "order-not-kept",
    "The same epoch and seed gave two different orders: a training cannot be repeated or resumed.",
)
bank.variant(
    "order-not-kept",
    PLAIN,
    ("order = list(range(len(self.items)))", 'self.last = order = getattr(self, "last", list(range(len(self.items))))'),
)


@bank.wrong("order-not-kept")
class SplitStream(Base):
    """Shuffles the order of the last epoch further."""

    last = None

    def order(self):
        self.last = self.last or list(range(len(self.items)))
        random.Random(self.seed + int(self.epoch[0])).shuffle(self.last)
        return list(self.last)


bank.hint("seed-not-used", "Another seed gives the same order.")
bank.variant("seed-not-used", PLAIN, ("1000 * self.seed + ", ""))


@bank.wrong("seed-not-used")
class SplitStream(Base):
    def order(self):
        return np.random.default_rng(int(self.epoch[0])).permutation(len(self.items)).tolist()


bank.hint(
    "reads-all",
    "A worker read {n} items to give {share}. Reading is the expensive part: choose the indices, then read.",
)
bank.variant("reads-all", PLAIN, ("self.items[order[place]]", "list(self.items)[order[place]]"))


@bank.wrong("reads-all")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        for position, index in enumerate(self.cut(self.order(), parts)):
            item = self.items[index]
            if position % parts == part:
                yield item


@bank.wrong("reads-all")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        everything = list(self.items)
        random.Random(self.seed * 1000 + int(self.epoch[0])).shuffle(everything)
        yield from self.cut(everything, parts)[part::parts]


bank.hint("items-changed", "You shuffled the list of items in place. It belongs to the caller.")
bank.variant(
    "items-changed",
    PLAIN,
    (
        "        size =",
        "        if isinstance(self.items, list):\n            self.items.sort(reverse=True)\n        size =",
    ),
)


@bank.wrong("items-changed")
class SplitStream(Base):
    def __iter__(self):
        part, parts = self.place()
        if isinstance(self.items, list):
            self.items.sort()
            random.Random(self.seed * 1000 + int(self.epoch[0])).shuffle(self.items)
            yield from self.cut(self.items, parts)[part::parts]
        else:
            yield from super().__iter__()


bank.hint(
    "even-parts-differ",
    "With even=True the parts have {sizes} items: ranks would make different numbers of steps, and wait for each "
    "other forever.",
)
bank.variant("even-parts-differ", PLAIN, ("if self.even:", "if False:"))


@bank.wrong("even-parts-differ")
class SplitStream(Base):
    def cut(self, order, parts):
        return order


@bank.wrong("even-parts-differ")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // self.world_size * self.world_size] if self.even else order


bank.hint(
    "even-drops-too-much",
    "With even=True, {n} of {all} items are dropped; with {parts} parts, dropping at most {most} is necessary.",
)
bank.variant("even-drops-too-much", PLAIN, ("size * parts", "size // 2 * 2 * parts"))


@bank.wrong("even-drops-too-much")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // (2 * parts) * (2 * parts)] if self.even else order


bank.hint("even-repeats", "With even=True, items come twice. Drop the leftover items instead.")
bank.variant("even-repeats", PLAIN, ("order = order[: size * parts]", "order += order[: -len(order) % parts]"))


@bank.wrong("even-repeats")
class SplitStream(Base):
    """As DistributedSampler does it without drop_last."""

    def cut(self, order, parts):
        return order + order[: -len(order) % parts] if self.even else order


@bank.wrong("even-always")
class SplitStream(Base):
    def cut(self, order, parts):
        return order[: len(order) // parts * parts]


bank.hint(
    "epoch-not-seen",
    "In persistent workers, set_epoch had no effect: they hold copies, made when they started. Keep the epoch in a "
    "tensor in shared memory.",
)
bank.variant(
    "epoch-not-seen",
    PLAIN,
    ("torch.zeros((), dtype=torch.int64).share_memory_()", "0"),
    ("self.epoch.fill_(epoch)", "self.epoch = epoch"),
    ("self.epoch.item()", "self.epoch"),
)


@bank.wrong("epoch-not-seen")
class SplitStream(Base):
    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        super().__init__(items, seed, rank, world_size, even)
        self.epoch = [0]


bank.hint(
    "epoch-counted",
    "The order changes only because __iter__ counts its calls, and restarted workers begin at zero again. Use the "
    "epoch that set_epoch received.",
)


@bank.wrong("epoch-counted", variant=True)
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


bank.hint(
    "global-order",
    "The stream draws from the global generator, or seeds it. Use its own torch.Generator or random.Random.",
)
bank.variant(
    "global-order",
    PLAIN,
    (
        "random.Random(1000 * self.seed + self.epoch.item())",
        "random.seed(1000 * self.seed + self.epoch.item())\n        random",
    ),
)


@bank.wrong("global-order")
class SplitStream(Base):
    def order(self):
        torch.manual_seed(1000 * self.seed + int(self.epoch[0]))
        return torch.randperm(len(self.items)).tolist()


@bank.wrong("global-order")
class SplitStream(Base):
    def order(self):
        random.seed(1000 * self.seed + int(self.epoch[0]))
        return random.sample(range(len(self.items)), len(self.items))


@bank.wrong("signature")
class SplitStream(Base):
    def __init__(self, items, seed=0, rank=0, world_size=1):
        super().__init__(items, seed, rank, world_size)
