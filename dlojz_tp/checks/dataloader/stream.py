"""Balise 5: a stream split over workers and ranks, in simulated workers and in real ones."""

import contextlib
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as worker_module

from dlojz_tp.checking import Wrong

HINTS = {
    "not-a-stream": "The class must be an IterableDataset with __iter__ and set_epoch. Otherwise, a DataLoader "
                    "would ask it for an index.",
    "workers-not-split": "Each of the {workers} workers gives all items of its rank: every item comes {workers} times. Ask "
    "get_worker_info().",
    "ranks-not-split": "Each of the {world} ranks gives all items. Split by rank too.",
    "main-process-forgotten": "Without workers, get_worker_info() is None: then there is one part per rank.",
    "parts-collide": "Two rank/worker pairs have the same part number, or one has a number beyond the last. For "
                     "rank r and worker w of W workers, the number r × W + w is unique.",
    "items-lost": "{n} of {all} items never come, with {world} rank(s) of {workers} worker(s). The last part may "
                  "be larger or smaller than the others.",
    "items-twice": "{n} of {all} items come twice, with {world} rank(s) of {workers} worker(s).",
    "places-not-items": "You give out positions, 0 to {last}: the order says where the items are. Give "
                        "self.items[position].",
    "orders-differ": "Ranks and workers shuffle differently, so their shares overlap. Draw the order from seed and "
                     "the epoch of set_epoch, which are the same everywhere; nothing in a worker may change either.",
    "not-shuffled": "The items come in the order of the list. Draw a new order for each epoch.",
    "worker-order-only": "Each worker always has the same items, and only their order changes. Shuffle first, then "
                         "split.",
    "epoch-without-effect": "set_epoch(1) gives the order of epoch 0.",
    "order-not-kept": "The same epoch and seed gave two different orders: a training cannot be repeated or resumed.",
    "epoch-moved": "__iter__ itself changes the epoch: each worker does that at a different time, and their shares "
                   "overlap. Only set_epoch may change it.",
    "seed-not-used": "Another seed gives the same order.",
    "reads-all": "A worker read {n} items to give {share}. Reading is the expensive part: choose the indices, then "
                 "read.",
    "items-changed": "You shuffled the list of items in place. It belongs to the caller.",
    "even-parts-differ": "With even=True the parts have {sizes} items: ranks would make different numbers of "
                         "steps, and wait for each other forever.",
    "even-drops-too-much": "With even=True, {n} of {all} items are dropped; with {parts} parts, dropping at most "
                           "{most} is necessary.",
    "even-same-dropped": "With even=True, the same items are dropped in every epoch, so they are never seen. "
                         "Shuffle all items first, then drop some.",
    "even-repeats": "With even=True, items come twice. Drop the leftover items instead.",
    "even-always": "{n} of {all} items are dropped although even=False: then the parts need not have the same size.",
    "epoch-not-seen": "In persistent workers, set_epoch had no effect: they hold copies, made when they started. "
                      "Keep the epoch in a tensor in shared memory.",
    "epoch-counted": "The order changes only because __iter__ counts its calls, and restarted workers begin at "
                     "zero again. Use the epoch that set_epoch received.",
    "global-order": "The stream draws from the global generator, or seeds it. Use its own torch.Generator or "
                    "random.Random.",
}


class _Items:
    """A sequence of n numbers that counts what is read of it."""

    def __init__(self, n):
        self.n, self.read = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[k] for k in range(self.n)[index]]
        if not -self.n <= index < self.n:
            raise IndexError(index)
        self.read += 1
        return 100 + range(self.n)[index]


def balise_5(SplitStream):  # noqa: N803  (the answer is a class)
    """Parts by hand, with made worker numbers; then a DataLoader with persistent workers."""
    yield "every item once: no workers, one rank"
    _right_kind(SplitStream)
    _parts_right(SplitStream, 17, 1, 0)
    yield "every item once: 1 to 3 workers, 1 to 4 ranks, lengths that do not divide"
    for n, world, workers in ((17, 1, 2), (17, 3, 0), (23, 2, 3), (22, 4, 2), (9, 1, 1), (5, 3, 3), (30, 3, 2)):
        _parts_right(SplitStream, n, world, workers)
    yield "a worker reads only what it yields"
    items = _Items(60)
    share = _part(SplitStream(items, 0, 1, 2), 1, 3)
    if items.read > len(share) + 1:
        raise Wrong("reads-all", n=items.read, share=len(share))
    yield "another order in each epoch, the same for the same seed and epoch"
    _orders(SplitStream)
    yield "even=True: parts of the same size, and no more items dropped than necessary"
    for n, world, workers in ((23, 2, 3), (17, 4, 1), (17, 3, 0), (24, 2, 2), (5, 3, 2), (19, 1, 2)):
        _even(SplitStream, n, world, workers)
    yield "in a DataLoader: set_epoch reaches persistent workers"
    _real(SplitStream)


def _right_kind(SplitStream):  # noqa: N803
    stream = SplitStream(_Items(3))
    if not isinstance(stream, IterableDataset) or not callable(getattr(stream, "set_epoch", None)):
        raise Wrong("not-a-stream", got=type(stream).__name__)
    if hasattr(stream, "__getitem__") and not hasattr(stream, "__iter__"):
        raise Wrong("not-a-stream", got="__getitem__")


@contextlib.contextmanager
def _in_worker(number, workers):
    """Inside, get_worker_info() answers as in worker `number` of `workers`; 0 workers: as in the main process."""
    before = worker_module._worker_info
    info = worker_module.WorkerInfo(id=number, num_workers=workers, seed=number, dataset=None) if workers else None
    worker_module._worker_info = info
    try:
        yield
    finally:
        worker_module._worker_info = before


def _part(stream, number, workers):
    # ranks and workers are processes of their own: their global generators are in different states
    torch.manual_seed(997 + 31 * number + workers)
    random.seed(997 + 31 * number + workers)
    np.random.seed(997 + 31 * number + workers)  # noqa: NPY002
    with _in_worker(number, workers):
        found = []
        for item in stream:
            found.append(int(item))
            if len(found) > 10_000:
                raise Wrong("endless", seconds=0)
        return found


def _parts(SplitStream, n, world, workers, epoch=0, seed=4, **options):  # noqa: N803
    """The parts of all workers of all ranks, {(rank, worker): items}."""
    found = {}
    for rank in range(world):
        for number in range(max(workers, 1)):
            random.seed(rank * 10 + number + 50)
            stream = SplitStream(_Items(n), seed=seed, rank=rank, world_size=world, **options)
            stream.set_epoch(epoch)
            torch.manual_seed(rank)
            try:
                found[rank, number] = _part(stream, number, workers)
            except AttributeError as error:
                if workers or "NoneType" not in str(error):
                    raise
                raise Wrong("main-process-forgotten", got=str(error)) from error
    return found


def _parts_right(SplitStream, n, world, workers):  # noqa: N803
    parts = _parts(SplitStream, n, world, workers)
    given = [item for part in parts.values() for item in part]
    where = f"{n} items, {world} ranks, {workers} workers each"
    wanted = list(range(100, 100 + n))
    if sorted(given) == wanted:
        return
    fields = {"world": world, "workers": workers, "all": n}
    per_rank = {rank: sorted(i for (r, _), part in parts.items() if r == rank for i in part) for rank in range(world)}
    once = {rank: sorted(set(items)) for rank, items in per_rank.items()}
    slug, count = "items-lost", len(set(wanted) - set(given))
    if given and set(given) <= set(range(n)):
        raise Wrong("places-not-items", expected=wanted[:4], got=given[:4], where=where, last=n - 1)
    if workers > 1 and all(len(set(parts[r, 0])) == len(parts[r, 0]) and sorted(parts[r, 0]) == sorted(parts[r, w])
                           for r in range(world) for w in range(workers)):  # fmt: skip
        slug = "workers-not-split"
    elif world > 1 and all(items == wanted for items in once.values()):
        slug = "ranks-not-split"
    elif _nested(list(parts.values())):
        slug = "parts-collide"
    elif len(given) == n:
        slug = "orders-differ"
    elif len(given) > n:
        slug, count = "items-twice", len(given) - len(set(given))
    elif (
        len(given) == len(set(given))
        and len({len(part) for part in parts.values()}) == 1
        and n - len(given) < len(parts)
    ):
        slug = "even-always"
    raise Wrong(slug, expected=f"{n} items, each once", got=f"{len(given)} items, {len(set(given))} different", where=where,
                n=count, **fields)  # fmt: skip


def _nested(parts):
    """Whether some parts have items in common, and always as if one had begun later in the same order."""
    pairs = [(one, other) for k, one in enumerate(parts) for other in parts[:k] if set(one) & set(other)]
    return bool(pairs) and all(
        short == long[-len(short) :] for short, long in (sorted(pair, key=len) for pair in pairs)
    )


def _orders(SplitStream):  # noqa: N803
    first = _parts(SplitStream, 40, 2, 2)
    if all(part == sorted(part) for part in first.values()):
        raise Wrong("not-shuffled")
    again = _parts(SplitStream, 40, 2, 2)
    if first != again:
        raise Wrong("order-not-kept")
    second = _parts(SplitStream, 40, 2, 2, epoch=1)
    if first == second:
        raise Wrong("epoch-without-effect")
    if all(sorted(first[key]) == sorted(second[key]) for key in first):
        raise Wrong("worker-order-only")
    if first == _parts(SplitStream, 40, 2, 2, seed=5):
        raise Wrong("seed-not-used")
    given = list(range(100, 130))
    stream = SplitStream(given, seed=4)
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    with _in_worker(0, 0):
        alone = [*stream]
        stream.set_epoch(3)
        late = [*stream]
        stream.set_epoch(0)
        back = [*stream]
        once_more = [*stream]
    if given != list(range(100, 130)):
        raise Wrong("items-changed")
    if alone != back or alone == late:
        raise Wrong("order-not-kept" if alone != back else "epoch-without-effect", where="epochs 0, 3, 0 of one stream")
    if back != once_more:
        raise Wrong("epoch-moved")
    if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
        raise Wrong("global-order")


def _even(SplitStream, n, world, workers):  # noqa: N803
    parts = _parts(SplitStream, n, world, workers, even=True)
    sizes, given = [len(part) for part in parts.values()], [item for part in parts.values() for item in part]
    where = f"{n} items, {world} ranks, {workers} workers each"
    if len(given) != len(set(given)):
        raise Wrong("even-repeats", where=where)
    if len(set(sizes)) > 1:
        raise Wrong("even-parts-differ", where=where, sizes=", ".join(str(size) for size in sizes))
    most = n % len(parts)
    if n - len(given) != most:
        raise Wrong("even-drops-too-much", where=where, n=n - len(given), all=n, parts=len(parts), most=most)
    if 0 < most < n and all(
        set(given)
        == {item for part in _parts(SplitStream, n, world, workers, epoch, even=True).values() for item in part}
        for epoch in (1, 2, 3)
    ):
        raise Wrong("even-same-dropped", where=where)


def _real(SplitStream):  # noqa: N803
    def epoch(loader):
        found = [batch.tolist() for batch in loader]
        given = [i for batch in found for i in batch]
        if sorted(given) != list(range(100, 111)):
            slug, twice = "orders-differ" if len(given) == 11 else "items-twice", len(given) - len(set(given))
            raise Wrong(slug, n=twice, all=11, world=1, workers=2, where="a DataLoader with 2 workers")
        return found

    stream = SplitStream(range(100, 111), seed=2)
    loader = DataLoader(stream, batch_size=3, num_workers=2, persistent_workers=True)
    lasting = []
    for number in (0, 1):
        stream.set_epoch(number)
        lasting.append(epoch(loader))
    del loader
    stream = SplitStream(range(100, 111), seed=2)
    loader = DataLoader(stream, batch_size=3, num_workers=2)
    fresh = []
    for number in (0, 1):
        stream.set_epoch(number)
        fresh.append(epoch(loader))
    if fresh[0] == fresh[1]:
        raise Wrong(
            "epoch-counted" if lasting[0] != lasting[1] else "epoch-without-effect", where="workers started anew"
        )
    if lasting[0] == lasting[1]:
        raise Wrong("epoch-not-seen", expected=str(fresh[1]), got=str(lasting[1]))
    if lasting != fresh:
        raise Wrong("order-not-kept", where="the same epoch with persistent workers and without")
