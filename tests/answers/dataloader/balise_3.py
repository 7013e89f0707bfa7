"""Answers to balise 3 of 05_dataloader. Worker processes are forked, so inner functions may travel."""

import os
import random
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 3)


def own(worker_id):
    """A right worker_init_fn."""
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def generator(seed, rank=0):
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


@bank.right()
def seeded_loader(dataset, seed, rank=0, **options):
    """All four by hand, as PyTorch's note on reproducibility does it; a seed sequence for the ranks."""

    def init(worker_id):
        worker_seed = torch.initial_seed() % 2**32
        np.random.seed(worker_seed)
        random.seed(worker_seed)
        get_worker_info().dataset.rng = np.random.default_rng(worker_seed)

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    return DataLoader(dataset, worker_init_fn=init, generator=torch.Generator().manual_seed(mixed), **options)


@bank.right()
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


@bank.right()
def seeded_loader(dataset, seed, rank=0, **options):
    dataset = PerSample(dataset, seed, rank)
    return Epochs(DataLoader(dataset, generator=generator(seed, rank), **options), dataset)


@bank.right()
class seeded_loader(DataLoader):  # noqa: N801  (a class that is called is a function too)
    def __init__(self, dataset, seed, rank=0, **options):
        super().__init__(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


@bank.right()
def seeded_loader(dataset, seed, rank=0, **options):
    """All ranks have the same generator, and so the same order of images; the seeds of the numbers hold the pair."""

    def init(worker_id):
        words = np.random.SeedSequence([seed, rank, torch.initial_seed()]).generate_state(4)
        np.random.seed(words[0])
        random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        get_worker_info().dataset.rng = np.random.default_rng(words[3])

    return DataLoader(dataset, generator=generator(0), worker_init_fn=init, **options)


PLAIN = """
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


def start(worker_id):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def seeded_loader(dataset, seed, rank=0, **options):
    word = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    generator = torch.Generator()
    generator.manual_seed(word)
    return DataLoader(dataset, generator=generator, worker_init_fn=start, **options)
"""
START, WORD = "    info = get_worker_info()\n", "int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])"
ANEW = """
class Anew(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.dataset.rng = np.random.default_rng([get_worker_info().seed, index])
        return self.dataset[index]


def seeded_loader"""
bank.text(None, PLAIN)


@bank.wrong("nothing-returned")
def seeded_loader(dataset, seed, rank=0, **options):
    DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


bank.hint("no-loader", "Return a DataLoader over the data set.")
bank.variant("no-loader", PLAIN, ("return DataLoader", "return lambda: DataLoader"))


@bank.wrong("no-loader")
def seeded_loader(dataset, seed, rank=0, **options):
    return own


bank.hint("options-ignored", "The options did not reach the DataLoader: {what}.")
bank.variant("options-ignored", PLAIN, ("**options)\n", "batch_size=2, num_workers=2)\n"))


@bank.wrong("options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, batch_size=4, generator=generator(seed, rank), num_workers=2, worker_init_fn=own)


@bank.wrong("options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    options["num_workers"] = 0
    options.pop("persistent_workers", None)
    return DataLoader(dataset, generator=generator(seed, rank), **options)


bank.hint(
    "rng-not-set",
    "The data set has no rng yet, and your code fails: {error}. Set dataset.rng without reading an old one.",
)
bank.variant("rng-not-set", PLAIN, ("    info.dataset.rng =", "    info.dataset.rng.random()\n    info.dataset.rng ="))


@bank.wrong("rng-not-set")
def seeded_loader(dataset, seed, rank=0, **options):
    """The old generator gives a part of the new one's seed."""

    def init(worker_id):
        mine = get_worker_info().dataset
        mine.rng = np.random.default_rng([torch.initial_seed(), int(mine.rng.integers(2**31))])

    return DataLoader(dataset, worker_init_fn=init, generator=generator(seed, rank), **options)


@bank.wrong("rng-not-set")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        mine = get_worker_info().dataset
        if hasattr(mine, "rng"):
            own(worker_id)

    return DataLoader(dataset, worker_init_fn=init, generator=generator(seed, rank), **options)


bank.hint(
    "own-copied",
    "dataset.rng draws the same numbers in both workers: each has a copy of it, in the same state. Give each data "
    "set a new one in worker_init_fn, through get_worker_info().dataset.",
)
bank.variant("own-copied", PLAIN, ("worker_init_fn=start, ", ""))


@bank.wrong("own-copied")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(seed, rank), **options)


@bank.wrong("own-copied")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        np.random.seed(torch.initial_seed() % 2**32)
        random.seed(torch.initial_seed())

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "own-same-seed",
    "Both workers made the new generator of dataset.rng from the same seed, so it draws the same numbers in both. "
    "The seed must differ from worker to worker: use torch.initial_seed().",
)
bank.variant("own-same-seed", PLAIN, ("default_rng(info.seed)", "default_rng(0)"))


@bank.wrong("own-same-seed")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong("own-same-seed")
def seeded_loader(dataset, seed, rank=0, **options):
    """PyTorch seeds worker k with the base seed + k: this takes the k away again."""

    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed() - worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "pairs-collide",
    "{source} draws the same numbers for {one} as for {other}: both give the same seed, because many pairs have the "
    "same sum, product or xor, and a remainder leaves few numbers. int(np.random.SeedSequence([seed, "
    "rank]).generate_state(1)[0]) mixes the two, in this order, into 32 bits.",
)
bank.variant("pairs-collide", PLAIN, (WORD, "seed + 100 * rank"))


@bank.wrong("pairs-collide")
def seeded_loader(dataset, seed, rank=0, **options):
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    return DataLoader(dataset, generator=numbers, worker_init_fn=own, **options)


@bank.wrong("options-ignored")
def seeded_loader(dataset, seed, rank=0, **options):
    options["persistent_workers"] = False
    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


bank.hint(
    "own-not-reached",
    "dataset.rng was replaced in the main process. Workers are copies of it, so both still have the same generator: "
    "replace it in the worker.",
)
bank.variant(
    "own-not-reached",
    PLAIN,
    ("worker_init_fn=start, ", ""),
    ("    word =", "    dataset.rng = np.random.default_rng(seed)\n    word ="),
)


@bank.wrong("own-not-reached")
def seeded_loader(dataset, seed, rank=0, **options):
    dataset.rng = np.random.default_rng(1000 * seed + rank)
    return DataLoader(dataset, generator=generator(seed, rank), **options)


@bank.wrong("own-not-reached")
def seeded_loader(dataset, seed, rank=0, **options):
    """In a forked worker, the name `dataset` is the main process's copy of it, and that is the worker's too; but here
    every worker draws its seed from the same state."""
    dataset.rng = np.random.default_rng(seed + rank)

    def init(worker_id):
        dataset.rng = np.random.default_rng(dataset.rng.integers(2**32))

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "global-alike",
    "{source} draws the same numbers in both workers: PyTorch had seeded it differently in each, and your "
    "worker_init_fn undid that.",
)
bank.variant("global-alike", PLAIN, (START, START + "    random.seed(0)\n"))


@bank.wrong("global-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong("global-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        torch.manual_seed(seed)
        random.seed(seed)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "epochs-alike",
    "{source} draws the same numbers in every epoch: its seed was the same each time. In the worker, use the whole "
    "of torch.initial_seed(), as PyTorch has set it: it differs from epoch to epoch.",
)
bank.variant("epochs-alike", PLAIN, ("default_rng(info.seed)", "default_rng(worker_id)"))


@bank.wrong("epochs-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng([seed, rank, worker_id])

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong("epochs-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(seed + 100 * rank + worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "state-word",
    "numpy draws the same numbers in every epoch: np.random.get_state()[1][0] is the same constant in every worker, "
    "since PyTorch seeds numpy with a list of words. Leave numpy alone, or seed it from torch.initial_seed().",
)
bank.variant("state-word", PLAIN, (START, START + "    np.random.seed(worker_id + np.random.get_state()[1][0])\n"))


@bank.wrong("state-word")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        np.random.seed(np.random.get_state()[1][0] + worker_id)

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint(
    "depends-on-global",
    "{source} draws other numbers if the program has drawn random numbers before: the epoch's seed comes from the "
    "global generator. Give the loader its own generator, seeded from seed.",
)
bank.variant("depends-on-global", PLAIN, ("generator=generator, ", ""))


@bank.wrong("depends-on-global")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, worker_init_fn=own, **options)


bank.hint(
    "global-disturbed",
    "Making the loader seeds the program's global generators: dropout and initial weights would repeat. Use a "
    "torch.Generator.",
)
bank.variant("global-disturbed", PLAIN, ("    generator = torch", "    random.seed(word)\n    generator = torch"))


@bank.wrong("global-disturbed")
def seeded_loader(dataset, seed, rank=0, **options):
    torch.manual_seed(1000 * seed + rank)
    return DataLoader(dataset, worker_init_fn=own, **options)


@bank.wrong("global-disturbed")
def seeded_loader(dataset, seed, rank=0, **options):
    np.random.seed(seed)
    random.seed(seed)
    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=own, **options)


bank.hint("not-reproducible", "Two loaders with the same seed draw different numbers from {source}.")
bank.variant("not-reproducible", PLAIN, ("default_rng(info.seed)", "default_rng()"))


@bank.wrong("not-reproducible")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng()

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


@bank.wrong("not-reproducible")
def seeded_loader(dataset, seed, rank=0, **options):
    def init(worker_id):
        own(worker_id)
        random.seed(os.getpid() + time.time_ns())

    return DataLoader(dataset, generator=generator(seed, rank), worker_init_fn=init, **options)


bank.hint("seed-without-effect", "{source} draws the same numbers with another seed.")
bank.variant("seed-without-effect", PLAIN, ("[seed, rank]", "[rank]"))


@bank.wrong("seed-without-effect")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(0, rank), worker_init_fn=own, **options)


bank.hint(
    "rank-without-effect",
    "{source} draws the same numbers on another rank: all ranks would augment in the same way. The seed must include "
    "the rank.",
)
bank.variant("rank-without-effect", PLAIN, ("[seed, rank]", "[seed]"))


@bank.wrong("rank-without-effect")
def seeded_loader(dataset, seed, rank=0, **options):
    return DataLoader(dataset, generator=generator(seed), worker_init_fn=own, **options)


bank.hint("persistent-alike", "With persistent workers, {source} draws the same numbers in the second epoch.")
bank.variant(
    "persistent-alike", PLAIN, ("DataLoader(dataset,", "DataLoader(Anew(dataset),"), ("\ndef seeded_loader", ANEW)
)


@bank.wrong("persistent-alike")
def seeded_loader(dataset, seed, rank=0, **options):
    """The epoch is counted in the main process, where persistent workers do not see it."""

    class Unshared(PerSample):
        def __init__(self, dataset, *words):
            super().__init__(dataset, *words)
            self.epoch = torch.zeros((), dtype=torch.int64)

    dataset = Unshared(dataset, seed, rank)
    return Epochs(DataLoader(dataset, generator=generator(seed, rank), **options), dataset)


@bank.wrong("signature")
def seeded_loader(dataset, seed, **options):
    return DataLoader(dataset, generator=generator(seed), worker_init_fn=own, **options)


@bank.wrong("pairs-collide")
def seeded_loader(dataset, seed, rank=0, **options):
    """Rank 1 of this run draws what rank 0 of the next one draws."""
    g = torch.Generator().manual_seed(seed + rank)
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


def collides(slug, mix):
    """A wrong answer: right but for the number that seed and rank are mixed into."""

    def seeded_loader(dataset, seed, rank=0, **options):
        g = torch.Generator().manual_seed(mix(seed, rank))
        return DataLoader(dataset, generator=g, worker_init_fn=own, **options)

    bank.several(slug, seeded_loader)


collides("pairs-collide", lambda seed, rank: seed + seed * rank)  # all ranks alike with seed 0
collides("pairs-collide", lambda seed, rank: rank ^ seed)
collides("pairs-collide", lambda seed, rank: 8 * seed + rank)  # from rank 8 on
collides("pairs-collide", lambda seed, rank: 64 * seed + rank)
collides("pairs-collide", lambda seed, rank: (seed + 1) * (rank + 1))

bank.hint(
    "seed-cut",
    "{source} draws the same numbers for {one} as for {other}: on the CPU, manual_seed uses only the low 32 bits of "
    "its argument. Mix seed and rank into 32 bits: int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]).",
)
bank.variant("seed-cut", PLAIN, (WORD, "seed * 2**32 + rank"))


collides("seed-cut", lambda seed, rank: rank + 2**32 * seed)
collides("seed-cut", lambda seed, rank: rank << 32 | seed)
bank.slip(
    "options-ignored",
    ("seed_worker, **options", 'seed_worker, batch_size=options["batch_size"], num_workers=options["num_workers"]'),
)
bank.slip("options-ignored", ("seed_worker, **options", 'seed_worker, **options | {"shuffle": True}'))


bank.hint(
    "hash-of-text",
    "The seed comes from the hash of a text, which Python changes with each run of the program. Mix the numbers: "
    "int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]).",
)
bank.variant("hash-of-text", PLAIN, (WORD, 'hash(str(seed) + "/" + str(rank)) % 2**32'))


@bank.wrong("hash-of-text")
def seeded_loader(dataset, seed, rank=0, **options):
    g = torch.Generator().manual_seed(hash(f"{seed}-{rank}") % 2**32)
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


@bank.wrong("hash-of-text")
def seeded_loader(dataset, seed, rank=0, **options):
    g = torch.Generator().manual_seed(abs(hash(str((seed, rank)))))
    return DataLoader(dataset, generator=g, worker_init_fn=own, **options)


bank.hint(
    "generator-shared",
    "Two loaders share one torch.Generator: making the second, for validation perhaps, changed what the first draws. "
    "Make a new generator in each call.",
)
bank.variant(
    "generator-shared",
    PLAIN,
    ("generator = torch.Generator()", 'generator = seeded_loader.__dict__.setdefault("generator", torch.Generator())'),
)


@bank.wrong("generator-shared")
def seeded_loader(dataset, seed, rank=0, generator=torch.Generator(), **options):  # noqa: B008
    generator.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
    return DataLoader(dataset, generator=generator, worker_init_fn=own, **options)


GENERATOR = torch.Generator()


@bank.wrong("generator-shared")
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


bank.hint(
    "few-seeds",
    "In {all} epochs, a worker gave dataset.rng only {n} different states: a remainder or a small randint soon "
    "repeats. Use the whole of torch.initial_seed().",
)
bank.variant("few-seeds", PLAIN, ("default_rng(info.seed)", "default_rng(info.seed % 1000)"))


bank.wrong("few-seeds")(few(lambda: random.randint(0, 10_000)))
bank.wrong("few-seeds")(few(lambda: torch.initial_seed() % 2**16))
bank.right()(few(lambda: random.getrandbits(64)))


def summed(mix):
    def seeded_loader(dataset, seed, rank=0, **options):
        g = torch.Generator().manual_seed(mix(seed, rank))
        return DataLoader(dataset, generator=g, worker_init_fn=own, **options)

    return seeded_loader


bank.wrong("pairs-collide")(summed(lambda seed, rank: seed + 1000 * rank))
bank.wrong("pairs-collide")(summed(lambda seed, rank: 12_345 * rank + seed))
bank.wrong("pairs-collide")(summed(lambda seed, rank: 99_991 * seed + rank))


bank.hint(
    "other-kind",
    "dataset.rng is another kind of generator. Make it with numpy.random.default_rng: the data set calls its methods.",
)
bank.variant("other-kind", PLAIN, ("default_rng(info.seed)", "RandomState(info.seed % 2**32)"))


bank.slip(
    "other-kind",
    ("np.random.default_rng(torch.initial_seed())", "np.random.RandomState(torch.initial_seed() % 2**32)"),
)
