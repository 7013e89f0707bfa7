"""Answers to balise 2 of 08_data_parallel_under_the_hood: each rank's share of the data."""

import random

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from tests.answers.bank import Bank

bank = Bank("08_data_parallel_under_the_hood", 2)


def shuffled(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def padded(order, world_size):
    order = list(order)
    length = -(-len(order) // world_size) * world_size
    while len(order) < length:
        order += order[: length - len(order)]
    return order


PLAIN = """
import random

def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    each = n // world_size if drop_last else -(-n // world_size)
    return [order[(rank * each + k) % n] for k in range(each)]
"""
bank.text(None, PLAIN)


@bank.right()
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    each = n // world_size if drop_last else -(-n // world_size)
    return [int(order[(k * world_size + rank) % n]) for k in range(each)]


bank.hint("tensors-not-numbers", "The indices are tensors. Return a list of whole numbers: as keys and in "
          "comparisons, two tensors with the same number differ. tolist() makes numbers.")  # fmt: skip


@bank.wrong("tensors-not-numbers")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(31 * seed + epoch))
    each = n // world_size if drop_last else -(-n // world_size)
    return order[(torch.arange(each) * world_size + rank) % n]


@bank.wrong("tensors-not-numbers", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(31 * seed + epoch))
    each = n // world_size if drop_last else -(-n // world_size)
    return [order[(k * world_size + rank) % n] for k in range(each)]


bank.hint("tail-never-seen", "With drop_last=True, the same samples are left out in every epoch: {missing}. Shuffle "
          "all n first, then drop the tail of the permutation.")  # fmt: skip
bank.variant("tail-never-seen", PLAIN, ("    order =", "    n -= n % world_size * drop_last\n    order ="))


@bank.wrong("tail-never-seen")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Leaves the tail out, then shuffles what is left."""
    if drop_last:
        n -= n % world_size
        return shuffled(n, seed, epoch)[rank::world_size]
    return padded(shuffled(n, seed, epoch), world_size)[rank::world_size]


@bank.right()
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Blocks; each rank fills its own block from the front."""
    order = shuffled(n, 7919 * seed, epoch)
    if drop_last:
        each = n // world_size
        return order[rank * each : (rank + 1) * each]
    return tuple(padded(order, world_size)[rank::world_size])


bank.hint("sampler-borrowed", "DistributedSampler does this work for you. In this exercise you do it yourself.")
bank.variant(
    "sampler-borrowed",
    PLAIN,
    ("list(range(n))", "list(torch.utils.data.DistributedSampler(range(n), 1, 0, seed=seed + epoch))"),
)


@bank.wrong("sampler-borrowed")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    sampler = DistributedSampler(range(n), world_size, rank, seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return list(sampler)


bank.hint("not-integers", "Return the indices as a list of whole numbers.")
bank.variant("not-integers", PLAIN, ("[order[(rank * each + k) % n]", "[float(order[(rank * each + k) % n])"))


@bank.wrong("not-integers")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return [i / 1 for i in shuffled(n, seed, epoch)[rank::world_size]]


bank.hint("out-of-range", "An index is negative or larger than n − 1.")
bank.variant("out-of-range", PLAIN, ("range(n)", "range(1, n + 1)"))


@bank.wrong("out-of-range")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return [i + 1 for i in padded(shuffled(n, seed, epoch), world_size)[rank::world_size]]


bank.hint("shuffles-differ", "The ranks' shares overlap: either each rank has its own permutation, or the ranks take "
          "the same places. All ranks must draw the same permutation, from a generator whose seed is the same on all "
          "of them, and then take different parts of it.")  # fmt: skip


@bank.wrong("shuffles-differ")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(shuffled(n, seed + rank, epoch), world_size)[rank::world_size]


@bank.wrong("shuffles-differ", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    random.shuffle(order)
    return padded(order, world_size)[rank::world_size]


bank.hint("global-generator", "The permutation comes from the global random state, which differs from rank to rank. "
          "Make your own torch.Generator, seeded from `seed` and `epoch`.")  # fmt: skip
bank.variant(
    "global-generator", PLAIN, ('random.Random(f"{seed}/{epoch}").shuffle(order)', "order = torch.randperm(n).tolist()")
)


@bank.wrong("global-generator")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(torch.randperm(n).tolist(), world_size)[rank::world_size]


bank.hint("global-state-changed", "Your code changed the global random state. Dropout and augmentation draw from it: "
          "use your own torch.Generator.")  # fmt: skip


@bank.wrong("global-state-changed")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    torch.manual_seed(seed + epoch)
    return padded(torch.randperm(n).tolist(), world_size)[rank::world_size]


bank.hint("everything-everywhere", "Every rank gets all n indices: all ranks would train on the same images.")
bank.variant("everything-everywhere", PLAIN, ("[order[(rank * each + k) % n] for k in range(each)]", "order"))


@bank.wrong("everything-everywhere")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return shuffled(n, seed, epoch)


bank.hint("lengths-differ", "The ranks get {lengths} indices. If one rank has one more batch, it waits forever for "
          "the others: all shares must have the same length.")  # fmt: skip
bank.variant(
    "lengths-differ", PLAIN, ("[order[(rank * each + k) % n] for k in range(each)]", "order[rank * each :][:each]")
)


@bank.wrong("lengths-differ")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return shuffled(n, seed, epoch)[rank::world_size]


bank.hint("tail-lost", "With drop_last=False, every sample must appear. These indices are missing: {missing}.")
bank.variant("tail-lost", PLAIN, (" if drop_last else -(-n // world_size)", ""))


@bank.wrong("tail-lost")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    each = n // world_size
    return shuffled(n, seed, epoch)[rank * each : (rank + 1) * each]


bank.hint("too-many", "{count} indices for each rank are too many: with drop_last=False, pad only up to the next "
          "multiple of world_size.")  # fmt: skip
bank.variant("too-many", PLAIN, ("-(-n // world_size)", "n // world_size + 1"))


@bank.wrong("too-many")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    order = order + order[: world_size - n % world_size]
    return order[: len(order) // world_size * world_size][rank::world_size]


bank.hint("padded-with-one", "The whole padding is one index. Start again at the front of the permutation, so that no "
          "sample counts much more often than the others.")  # fmt: skip
bank.variant("padded-with-one", PLAIN, ("(rank * each + k) % n", "min(rank * each + k, n - 1)"))


@bank.wrong("padded-with-one")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    order += [0] * (-n % world_size)
    return order[rank::world_size]


bank.hint("few-samples", "With n = {n} and {size} ranks, the padding is longer than the data: repeat the permutation "
          "several times.")  # fmt: skip
bank.variant(
    "few-samples",
    PLAIN,
    ("[order[(rank * each + k) % n] for k in range(each)]", "(order * 2)[: each * world_size][rank::world_size]"),
)


@bank.wrong("few-samples")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    if drop_last:
        return order[: n // world_size * world_size][rank::world_size]
    order += order[: -n % world_size]
    return order[rank::world_size]


bank.hint("drop-last-ignored", "With drop_last=True, no index may appear twice, and the tail is left out: n // "
          "world_size indices for each rank.")  # fmt: skip
bank.variant("drop-last-ignored", PLAIN, ("n // world_size if drop_last else ", ""))


@bank.wrong("drop-last-ignored")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(shuffled(n, seed, epoch), world_size)[rank::world_size]


bank.hint("too-few", "With drop_last=True, each rank gets n // world_size indices: {each} here.")
bank.variant("too-few", PLAIN, ("n // world_size if", "(n - 1) // world_size if"))


@bank.wrong("too-few")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    if drop_last:
        order = order[: (n - 1) // world_size * world_size]
    return padded(order, world_size)[rank::world_size]


bank.hint("same-every-epoch", "Two epochs have the same order. Include the epoch number, as a whole number, in the "
          "seed of the generator.")  # fmt: skip


@bank.wrong("same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, 0)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Ten orders, again and again."""
    order = shuffled(n, 100 * seed, epoch % 10)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("same-every-epoch", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Another order in each epoch with the seed 0 alone."""
    order = shuffled(n, seed or epoch, 0)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


bank.hint("own-share-shuffled", "A rank sees the same samples in every epoch, only in another order. Shuffle all n, "
          "then take the rank's part.")  # fmt: skip
bank.variant(
    "own-share-shuffled",
    PLAIN,
    ('    random.Random(f"{seed}/{epoch}").shuffle(order)\n', ""),
    (
        "return [order[(rank * each + k) % n] for k in range(each)]",
        "mine = [order[(rank * each + k) % n] for k in range(each)]\n    random.Random(epoch + seed / 2).shuffle(mine)\n    return mine",
    ),
)


@bank.wrong("own-share-shuffled")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    mine = (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]
    random.Random(seed + 1000 * epoch).shuffle(mine)
    return mine


bank.hint("seed-ignored", "Another seed gives the same order. Seed the generator from `seed` too.")


@bank.wrong("seed-ignored")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, 0, epoch)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("seed-ignored", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """The first epoch is the same for all seeds."""
    order = shuffled(n, 0, epoch * (2 * seed + 1))
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


bank.hint("drawn-again", "A single rank gets some samples twice and others never. A permutation holds each sample "
          "once: use torch.randperm, not random numbers.")  # fmt: skip


@bank.wrong("drawn-again")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("drawn-again", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = np.random.default_rng([seed, epoch]).choice(n, n).tolist()
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


bank.hint("ascending", "Every share is in ascending order, so a batch holds samples that are close together in the "
          "data. Leave a share in the order of the permutation.")  # fmt: skip


@bank.wrong("ascending")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    return sorted((order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size])


@bank.wrong("ascending", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Blocks, each put in order."""
    order = shuffled(n, seed, epoch)
    order = order[: n // world_size * world_size] if drop_last else padded(order, world_size)
    return np.sort(order[rank * len(order) // world_size :][: len(order) // world_size]).tolist()


bank.hint("rotated", "From epoch to epoch, the order is only shifted or reversed: neighbours stay neighbours. Draw a "
          "new permutation in each epoch.")  # fmt: skip


@bank.wrong("rotated")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """One permutation, begun at another place in each epoch."""
    order = shuffled(n, seed, 0)
    order = order[3 * epoch % n :] + order[: 3 * epoch % n]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("rotated")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """One permutation, its numbers moved on, and read backwards in every second epoch."""
    order = [(i + 11 * epoch) % n for i in shuffled(n, seed, 0)][:: 1 if epoch % 2 else -1]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("rotated", variant=True)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = [(i + 7 * epoch + seed) % n for i in range(n)]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


calls = []


bank.hint("not-reproducible", "The same arguments give another order the second time. A run could not be resumed.")
bank.variant(
    "not-reproducible",
    PLAIN,
    ("import random\n", "import random\n\ncalls = []\n"),
    ("    order", "    calls.extend([n] * (rank == 0))\n    order"),
    ("/{epoch}", "/{epoch}/{len(calls)}"),
)


@bank.wrong("not-reproducible")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    if rank == 0:
        calls.append(n)
    order = shuffled(n, seed + 1000 * len(calls), epoch)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong("nothing-returned")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    shuffled(n, seed, epoch)


DRAWN = "torch.randperm(n, generator=generator)"

bank.slip("seed-ignored", ("manual_seed(seed + epoch)", "manual_seed(seed if epoch == 0 else epoch)"))

bank.slip(
    "global-state-changed",
    (DRAWN, "torch.tensor(random.sample(range(n), n))"),
    ("    generator = torch", "    import random\n\n    random.seed(seed + epoch)\n    generator = torch"),
)

bank.slip(
    "global-state-changed",
    (DRAWN, "torch.from_numpy(np.random.permutation(n))"),
    ("    generator = torch", "    import numpy as np\n\n    np.random.seed(seed + epoch)\n    generator = torch"),
    variant=True,
)
