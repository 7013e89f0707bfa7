"""Answers to balise 3 of 05_dataloader. Worker processes are forked, so inner functions may travel."""

import os
import random
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.answers.bank import Bank

bank = Bank("05_dataloader")


def own(worker_id):
    """A right worker_init_fn."""
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def generator(seed, rank=0):
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


@bank.right(3)
def seeded_loader(dataset, seed, rank=0, **options):
    """All four by hand, as PyTorch's note on reproducibility does it; a seed sequence for the ranks."""

    def init(worker_id):
        worker_seed = torch.initial_seed() % 2**32
        np.random.seed(worker_seed)
        random.seed(worker_seed)
        get_worker_info().dataset.rng = np.random.default_rng(worker_seed)

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    return DataLoader(dataset, worker_init_fn=init, generator=torch.Generator().manual_seed(mixed), **options)


@bank.right(3)
def seeded_loader(dataset, seed, rank=0, **options):
    """The workers' seed from get_worker_info()."""

    def init(worker_id):
        info = get_worker_info()
        info.dataset.rng = np.random.default_rng([info.seed, 7])

    g = torch.Generator()
    g.manual_seed(hash((seed, rank)))
    return DataLoader(dataset, generator=g, worker_init_fn=init, **options)


class PerSample(Dataset):
    """Seeds everything anew for each sample and epoch: the same whatever the number of workers."""

    def __init__(self, dataset, *words):
        self.dataset, self.words = dataset, words
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        words = np.random.SeedSequence([*self.words, self.epoch.item(), index]).generate_state(4)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        torch.manual_seed(int(words[2]))
        self.dataset.rng = np.random.default_rng(words[3])
        return self.dataset[index]


class Epochs:
    """A loader that counts its epochs where all workers see it."""

    def __init__(self, loader, dataset):
        self.loader, self.dataset = loader, dataset

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        yield from self.loader
        self.dataset.epoch += 1


@bank.right(3)
def seeded_loader(dataset, seed, rank=0, **options):
    dataset = PerSample(dataset, seed, rank)
    return Epochs(DataLoader(dataset, generator=generator(seed, rank), **options), dataset)


@bank.right(3)
class seeded_loader(DataLoader):  # noqa: N801  (a class that is called is a function too)
    def __init__(self, dataset, seed, rank=0, **options):
        super().__init__(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


@bank.right(3)
def seeded_loader(dataset, seed, rank=0, **options):
    """All ranks have the same generator, and so the same order of images; the seeds of the numbers hold the pair."""

    def init(worker_id):
        words = np.random.SeedSequence([seed, rank, torch.initial_seed()]).generate_state(4)
        np.random.seed(words[0])
        random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        get_worker_info().dataset.rng = np.random.default_rng(words[3])

    return DataLoader(dataset, generator=generator(0), worker_init_fn=init, **options)


@bank.wrong(3, "nothing-returned")
def seeded_loader(dataset, seed, rank=0, **options):
    DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


@bank.wrong(3, "no-loader")
def seeded_loader(dataset, seed, rank=0, **options):
    return own


@bank.wrong(3, "options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, batch_size=4, generator=generator(seed, rank), num_workers=2, worker_init_fn=own)


@bank.wrong(3, "options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    options["num_workers"] = 0
    options.pop("persistent_workers", None)
    return DataLoader(dataset, generator=generator(seed, rank), **options)


@bank.wrong(3, "rng-not-set")
def seeded_loader(dataset, seed, rank=0, **options):
    """The old generator gives a part of the new one's seed."""

    def init(worker_id):
        mine = get_worker_info().dataset
        mine.rng = np.random.default_rng([torch.initial_seed(), int(mine.rng.integers(2**31))])

    return DataLoader(dataset, worker_init_fn=init, generator=generator(seed, rank), **options)


@bank.wrong(3, "rng-not-set")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        mine = get_worker_info().dataset
        if hasattr(mine, "rng"):
            own(worker_id)

    return DataLoader(dataset, worker_init_fn=init, generator=generator(seed, rank), **options)


@bank.wrong(3, "own-copied")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(seed, rank), **options)


@bank.wrong(3, "own-copied")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        np.random.seed(torch.initial_seed() % 2**32)
        random.seed(torch.initial_seed())

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "own-same-seed")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "own-same-seed")
def seeded_loader(dataset, seed, rank=0, **options):
    """PyTorch seeds worker k with the base seed + k: this takes the k away again."""

    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed() - worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "pairs-collide")
def seeded_loader(dataset, seed, rank=0, **options):
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    return DataLoader(dataset, generator=numbers, worker_init_fn=own, **options)


@bank.wrong(3, "options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    options["persistent_workers"] = False
    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


@bank.wrong(3, "own-not-reached")
def seeded_loader(dataset, seed, rank=0, **options):
    dataset.rng = np.random.default_rng(1000 * seed + rank)
    return DataLoader(dataset, generator=generator(seed, rank), **options)


@bank.wrong(3, "own-not-reached")
def seeded_loader(dataset, seed, rank=0, **options):
    """In a forked worker, the name `dataset` is the main process's copy of it, and that is the worker's too; but here
    every worker draws its seed from the same state."""
    dataset.rng = np.random.default_rng(seed + rank)

    def init(worker_id):
        dataset.rng = np.random.default_rng(dataset.rng.integers(2**32))

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "global-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "global-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        torch.manual_seed(seed)
        random.seed(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "epochs-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng([seed, rank, worker_id])

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "epochs-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(seed + 100 * rank + worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "state-word")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(np.random.get_state()[1][0] + worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "depends-on-global")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, worker_init_fn=own, **options)


@bank.wrong(3, "global-disturbed")
def seeded_loader(dataset, seed, rank=0, **options):
    torch.manual_seed(1000 * seed + rank)
    return DataLoader(dataset, worker_init_fn=own, **options)


@bank.wrong(3, "global-disturbed")
def seeded_loader(dataset, seed, rank=0, **options):
    np.random.seed(seed)
    random.seed(seed)
    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


@bank.wrong(3, "not-reproducible")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng()

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "not-reproducible")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        random.seed(os.getpid() + time.time_ns())

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong(3, "seed-without-effect")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(0, rank), worker_init_fn=own, **options)


@bank.wrong(3, "rank-without-effect")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(seed), worker_init_fn=own, **options)


@bank.wrong(3, "persistent-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    """The epoch is counted in the main process, where persistent workers do not see it."""

    class Unshared(PerSample):
        def __init__(self, dataset, *words):
            super().__init__(dataset, *words)
            self.epoch = torch.zeros((), dtype=torch.int64)

    dataset = Unshared(dataset, seed, rank)
    return Epochs(DataLoader(dataset, generator=generator(seed, rank), **options), dataset)


@bank.wrong(3, "signature")
def seeded_loader(dataset, seed, **options):
    return DataLoader(dataset, generator=generator(seed), worker_init_fn=own, **options)


@bank.wrong(3, "pairs-collide")
def seeded_loader(dataset, seed, rank=0, **options):
    """Rank 1 of this run draws what rank 0 of the next one draws."""
    g = torch.Generator().manual_seed(seed + rank)
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


def collides(slug, mix):
    """A wrong answer: right but for the number that seed and rank are mixed into."""

    def seeded_loader(dataset, seed, rank=0, **options):
        g = torch.Generator().manual_seed(mix(seed, rank))
        return DataLoader(dataset, generator=g, worker_init_fn=own, **options)

    bank.several(3, slug, seeded_loader)


collides("pairs-collide", lambda seed, rank: seed + seed * rank)  # all ranks alike with seed 0
collides("pairs-collide", lambda seed, rank: rank ^ seed)
collides("pairs-collide", lambda seed, rank: 8 * seed + rank)  # from rank 8 on
collides("pairs-collide", lambda seed, rank: 64 * seed + rank)
collides("pairs-collide", lambda seed, rank: (seed + 1) * (rank + 1))
collides("seed-cut", lambda seed, rank: rank + 2**32 * seed)
collides("seed-cut", lambda seed, rank: rank << 32 | seed)
bank.slip(
    3,
    "options-ignored",
    ("seed_worker, **options", 'seed_worker, batch_size=options["batch_size"], num_workers=options["num_workers"]'),
)
bank.slip(3, "options-ignored", ("seed_worker, **options", 'seed_worker, **options | {"shuffle": True}'))


@bank.wrong(3, "hash-of-text")
def seeded_loader(dataset, seed, rank=0, **options):
    g = torch.Generator().manual_seed(hash(f"{seed}-{rank}") % 2**32)
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


@bank.wrong(3, "hash-of-text")
def seeded_loader(dataset, seed, rank=0, **options):
    g = torch.Generator().manual_seed(abs(hash(str((seed, rank)))))
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


@bank.wrong(3, "generator-shared")
def seeded_loader(dataset, seed, rank=0, generator=torch.Generator(), **options):  # noqa: B008
    generator.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
    return DataLoader(dataset, generator=generator, worker_init_fn=own, **options)


GENERATOR = torch.Generator()


@bank.wrong(3, "generator-shared")
def seeded_loader(dataset, seed, rank=0, **options):
    GENERATOR.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
    return DataLoader(dataset, generator=GENERATOR, worker_init_fn=own, **options)


def few(draw):
    """dataset.rng gets one of few states."""

    def seeded_loader(dataset, seed, rank=0, **options):
        def init(worker_id):
            get_worker_info().dataset.rng = np.random.default_rng(draw())

        return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)

    return seeded_loader


bank.wrong(3, "few-seeds")(few(lambda: random.randint(0, 10_000)))
bank.wrong(3, "few-seeds")(few(lambda: torch.initial_seed() % 2**16))
bank.right(3)(few(lambda: random.getrandbits(64)))


def summed(mix):
    def seeded_loader(dataset, seed, rank=0, **options):
        g = torch.Generator().manual_seed(mix(seed, rank))
        return DataLoader(dataset, generator=g, worker_init_fn=own, **options)

    return seeded_loader


bank.wrong(3, "pairs-collide")(summed(lambda seed, rank: seed + 1000 * rank))
bank.wrong(3, "pairs-collide")(summed(lambda seed, rank: 12_345 * rank + seed))
bank.wrong(3, "pairs-collide")(summed(lambda seed, rank: 99_991 * seed + rank))

bank.slip(
    3,
    "other-kind",
    ("np.random.default_rng(torch.initial_seed())", "np.random.RandomState(torch.initial_seed() % 2**32)"),
)
