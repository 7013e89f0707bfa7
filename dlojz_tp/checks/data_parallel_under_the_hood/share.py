"""Balise 2: each rank's share of the data."""

import random

import numpy as np
import torch

from dlojz_tp.checking import Wrong
from dlojz_tp.checking.borrowed import replaced

HINTS = {
    "sampler-borrowed": "DistributedSampler does this work for you. In this exercise you do it yourself.",
    "not-integers": "Return the indices as a list of whole numbers.",
    "tensors-not-numbers": "The indices are tensors. Return a list of whole numbers: as keys and in comparisons, "
                           "two tensors with the same number differ. tolist() makes numbers.",
    "out-of-range": "An index is negative or larger than n − 1.",
    "shuffles-differ": "The ranks' shares overlap: either each rank has its own permutation, or the ranks take the "
                       "same places. All ranks must draw the same permutation, from a generator whose seed is the "
                       "same on all of them, and then take different parts of it.",
    "global-generator": "The permutation comes from the global random state, which differs from rank to rank. Make "
                        "your own torch.Generator, seeded from `seed` and `epoch`.",
    "global-state-changed": "Your code changed the global random state. Dropout and augmentation draw from it: use "
                            "your own torch.Generator.",
    "everything-everywhere": "Every rank gets all n indices: all ranks would train on the same images.",
    "lengths-differ": "The ranks get {lengths} indices. If one rank has one more batch, it waits forever for the "
                      "others: all shares must have the same length.",
    "tail-lost": "With drop_last=False, every sample must appear. These indices are missing: {missing}.",
    "too-many": "{count} indices for each rank are too many: with drop_last=False, pad only up to the next "
                "multiple of world_size.",
    "padded-with-one": "The whole padding is one index. Start again at the front of the permutation, so that no "
                       "sample counts much more often than the others.",
    "few-samples": "With n = {n} and {size} ranks, the padding is longer than the data: repeat the permutation "
                   "several times.",
    "tail-never-seen": "With drop_last=True, the same samples are left out in every epoch: {missing}. Shuffle all "
                       "n first, then drop the tail of the permutation.",
    "drop-last-ignored": "With drop_last=True, no index may appear twice, and the tail is left out: n // "
                         "world_size indices for each rank.",
    "too-few": "With drop_last=True, each rank gets n // world_size indices: {each} here.",
    "same-every-epoch": "Two epochs have the same order. Include the epoch number, as a whole number, in the seed "
                        "of the generator.",
    "own-share-shuffled": "A rank sees the same samples in every epoch, only in another order. Shuffle all n, then "
                          "take the rank's part.",
    "seed-ignored": "Another seed gives the same order. Seed the generator from `seed` too.",
    "rotated": "From epoch to epoch, the order is only shifted or reversed: neighbours stay neighbours. Draw a new "
               "permutation in each epoch.",
    "ascending": "Every share is in ascending order, so a batch holds samples that are close together in the data. "
                 "Leave a share in the order of the permutation.",
    "drawn-again": "A single rank gets some samples twice and others never. A permutation holds each sample once: "
                   "use torch.randperm, not random numbers.",
    "not-reproducible": "The same arguments give another order the second time. A run could not be resumed.",
}  # fmt: skip


def balise_2(my_indices):
    """Shares of 1 to 4 ranks, and of 7, for sizes that divide, do not divide, and are smaller than the world."""
    with replaced(torch.utils.data.DistributedSampler, "__init__", _refuse):
        yield "12 samples over 1, 2, 3 and 4 ranks: disjoint shares of equal length, together complete"
        for size in (1, 2, 3, 4):
            _whole(_shares(my_indices, 12, size, epoch=0), 12, size, drop_last=False)
        yield "a tail: 10, 13 and 1003 samples, padded"
        for n, size in ((10, 4), (13, 3), (13, 4), (1003, 4), (1003, 7)):
            _whole(_shares(my_indices, n, size, epoch=1), n, size, drop_last=False)
        yield "a tail, dropped"
        for n, size in ((12, 3), (10, 4), (13, 4), (1003, 7), (3, 4)):
            _whole(_shares(my_indices, n, size, epoch=1, drop_last=True), n, size, drop_last=True)
        yield "fewer samples than ranks"
        for n, size in ((1, 4), (3, 4), (2, 7)):
            _whole(_shares(my_indices, n, size, epoch=2), n, size, drop_last=False)
        yield "another order in each epoch and for each seed; the same order for the same epoch and seed"
        _orders(my_indices)
        _leaves_others(my_indices)
        yield "with drop_last, each sample is used in some epoch"
        ever = {i for epoch in range(30) for s in _shares(my_indices, 10, 4, epoch, drop_last=True) for i in s}
        if (
            len(ever) < 10
        ):  # fair permutations leave one sample out thirty times only once in 10 to the power of 20 runs
            missing = sorted(set(range(10)) - ever)
            raise Wrong("tail-never-seen", missing=missing, where="n = 10, 4 ranks, 30 epochs")


def _refuse(*_, **__):
    raise Wrong("sampler-borrowed")


def _shares(my_indices, n, size, epoch, drop_last=False, seed=0):
    """The shares of all ranks; each is asked for in another global random state, as on real ranks."""
    shares = []
    for rank in range(size):
        torch.manual_seed(1000 + rank)
        random.seed(1000 + rank)
        np.random.seed(1000 + rank)
        before = torch.get_rng_state()
        found = my_indices(n, rank, size, epoch, seed=seed, drop_last=drop_last)
        shares.append(_plain(found, n))
        if not torch.equal(before, torch.get_rng_state()):
            flat = [i for s in shares for i in s]
            if rank and len(set(flat)) < min(n, len(flat)):
                raise Wrong("global-generator", where=f"n = {n}, rank {rank} of {size}")
            if rank == size - 1 and size > 1:
                raise Wrong("global-state-changed", where=f"n = {n}, rank {rank} of {size}")
    return shares


def _leaves_others(my_indices):
    """Refuse what draws from, or seeds, the random numbers that augmentations draw from."""
    before = _others()
    my_indices(1000, 1, 4, 3, seed=5, drop_last=False)
    if before != _others():
        raise Wrong("global-state-changed", where="n = 1000, rank 1 of 4")


def _others():
    """The global random states of Python and NumPy, from which augmentations draw."""
    _, words, place, *_ = np.random.get_state()
    return random.getstate(), words.tobytes(), place


def _plain(found, n):
    if found is None:
        raise Wrong("nothing-returned")
    if not isinstance(found, list | tuple | range | torch.Tensor) and not hasattr(found, "tolist"):
        try:
            found = list(found)
        except TypeError:
            raise Wrong("not-integers", got=found) from None
    if isinstance(found, torch.Tensor) or any(isinstance(i, torch.Tensor) for i in found):
        raise Wrong("tensors-not-numbers", expected="a list of int", got=found)
    found = found.tolist() if hasattr(found, "tolist") else [i.item() if hasattr(i, "item") else i for i in found]
    if not isinstance(found, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise Wrong("not-integers", got=found)
    bad = [i for i in found if not 0 <= i < n]
    if bad:
        raise Wrong("out-of-range", expected=f"0 to {n - 1}", got=bad)
    return found


def _whole(shares, n, size, drop_last):
    where = f"n = {n}, {size} ranks, drop_last={drop_last}"
    lengths = [len(s) for s in shares]
    each = n // size if drop_last else -(-n // size)
    flat = [i for s in shares for i in s]
    counts = [flat.count(i) for i in range(n)] if n < 100 else torch.bincount(torch.tensor(flat), minlength=n).tolist()
    if size > 1 and n >= size and lengths == [n] * size:
        raise Wrong("everything-everywhere", expected=f"{each} indices a rank", got=f"{n} indices a rank", where=where)
    if len(set(lengths)) > 1:
        slug = "few-samples" if n < size else "lengths-differ"
        raise Wrong(slug, expected=[each] * size, got=lengths, where=where, lengths=lengths, n=n, size=size)
    missing = [i for i in range(n) if not counts[i]]
    if drop_last:
        if lengths[0] > each:
            raise Wrong("drop-last-ignored", expected=each, got=lengths[0], where=where)
        if lengths[0] < each:
            raise Wrong("too-few", expected=each, got=lengths[0], where=where, each=each)
        if max(counts) > 1:
            raise Wrong("shuffles-differ", got=shares if n < 20 else None, where=where)
        return
    if lengths[0] > each:
        raise Wrong("too-many", expected=each, got=lengths[0], where=where, count=lengths[0])
    if lengths[0] < each:
        slug = "few-samples" if n < size else "tail-lost"
        raise Wrong(slug, expected=each, got=lengths[0], where=where, missing=missing[:8], n=n, size=size)
    if missing:
        # the padding alone cannot make samples disappear: then the ranks have drawn differently
        raise Wrong("shuffles-differ" if size > 1 else "drawn-again", got=shares if n < 20 else None, where=where)
    if max(counts) > -(-each * size // n):
        raise Wrong(
            "padded-with-one", expected="each index at most once more", got=shares if n < 20 else None, where=where
        )


def _orders(my_indices):
    n, size = 1000, 4
    at_3, again = (_shares(my_indices, n, size, epoch=3) for _ in range(2))
    if at_3 != again:
        raise Wrong("not-reproducible", where=f"n = {n}, {size} ranks, epoch 3, twice")
    epochs = [_shares(my_indices, n, size, epoch=epoch) for epoch in (0, 1, 2, 5, 10, 50, 100)]
    for epoch, shares in enumerate(epochs):
        for other in epochs[epoch + 1 :]:
            if shares == other:
                raise Wrong("same-every-epoch", where=f"n = {n}, {size} ranks, epochs 0 to 100")
            if all(s == sorted(s) for s in other):
                raise Wrong("ascending", got=other[0][:8], where=f"n = {n}, rank 0 of {size}")
            turns = _turns(shares, n)
            if len(turns & _turns(other, n)) > len(turns) // 10:  # two random orders share one in a hundred
                raise Wrong("rotated", got=other[0][:8], where=f"n = {n}, rank 0 of {size}, epochs 0 to 100")
            if all(set(a) == set(b) for a, b in zip(shares, other, strict=True)):
                raise Wrong("own-share-shuffled", where=f"n = {n}, {size} ranks, epochs 0 to 100")
    first, *others = (_shares(my_indices, n, size, epoch=epoch, seed=42) for epoch in (0, 1, 2))
    if first in others:
        raise Wrong("same-every-epoch", where=f"n = {n}, {size} ranks, seed 42, epochs 0 to 2")
    for shares in epochs[1:]:
        steps = [(b - a) % n for s in shares for a, b in zip(s, s[1:])]
        # in a random order any one difference is rare
        if max(map(steps.count, set(steps))) > len(steps) // 4:
            raise Wrong("rotated", got=shares[0][:8], where=f"n = {n}, rank 0 of {size}, epoch 1")
    for epoch, known in ((3, at_3), (0, epochs[0])):
        if _shares(my_indices, n, size, epoch=epoch, seed=17) == known:
            raise Wrong("seed-ignored", where=f"n = {n}, {size} ranks, epoch {epoch}, seeds 0 and 17")


def _turns(shares, n):
    """The pairs of successive steps from neighbour to neighbour, in either direction: shifts and turns change none."""
    steps = [[min((b - a) % n, (a - b) % n) for a, b in zip(s, s[1:])] for s in shares]
    return {tuple(sorted(pair)) for one in steps for pair in zip(one, one[1:])}
