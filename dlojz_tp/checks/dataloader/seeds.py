"""Balise 3: random numbers in workers, drawn by real worker processes."""

import builtins
import random
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from dlojz_tp.checking import Wrong, describe

HINTS = {
    "no-loader": "Return a DataLoader over the data set.",
    "options-ignored": "The options did not reach the DataLoader: {what}.",
    "rng-not-set": "The data set has no rng yet, and your code fails: {error}. Set dataset.rng without reading an "
                   "old one.",
    "other-kind": "dataset.rng is another kind of generator. Make it with numpy.random.default_rng: the data set "
                  "calls its methods.",
    "own-copied": "dataset.rng draws the same numbers in both workers: each has a copy of it, in the same state. "
                  "Give each data set a new one in worker_init_fn, through get_worker_info().dataset.",
    "own-same-seed": "Both workers made the new generator of dataset.rng from the same seed, so it draws the same "
                     "numbers in both. The seed must differ from worker to worker: use torch.initial_seed().",
    "own-not-reached": "dataset.rng was replaced in the main process. Workers are copies of it, so both still have "
                       "the same generator: replace it in the worker.",
    "global-alike": "{source} draws the same numbers in both workers: PyTorch had seeded it differently in each, "
                    "and your worker_init_fn undid that.",
    "epochs-alike": "{source} draws the same numbers in every epoch: its seed was the same each time. In the "
                    "worker, use the whole of torch.initial_seed(), as PyTorch has set it: it differs from epoch "
                    "to epoch.",
    "state-word": "numpy draws the same numbers in every epoch: np.random.get_state()[1][0] is the same constant "
                  "in every worker, since PyTorch seeds numpy with a list of words. Leave numpy alone, or seed it "
                  "from torch.initial_seed().",
    "depends-on-global": "{source} draws other numbers if the program has drawn random numbers before: the epoch's "
                         "seed comes from the global generator. Give the loader its own generator, seeded from "
                         "seed.",
    "not-reproducible": "Two loaders with the same seed draw different numbers from {source}.",
    "few-seeds": "In {all} epochs, a worker gave dataset.rng only {n} different states: a remainder or a small "
                 "randint soon repeats. Use the whole of torch.initial_seed().",
    "hash-of-text": "The seed comes from the hash of a text, which Python changes with each run of the program. "
                    "Mix the numbers: int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]).",
    "generator-shared": "Two loaders share one torch.Generator: making the second, for validation perhaps, changed "
                        "what the first draws. Make a new generator in each call.",
    "seed-without-effect": "{source} draws the same numbers with another seed.",
    "rank-without-effect": "{source} draws the same numbers on another rank: all ranks would augment in the same "
                           "way. The seed must include the rank.",
    "pairs-collide": "{source} draws the same numbers for {one} as for {other}: both give the same seed, because "
                     "many pairs have the same sum, product or xor, and a remainder leaves few numbers. "
                     "int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]) mixes the two, in this order, "
                     "into 32 bits.",
    "seed-cut": "{source} draws the same numbers for {one} as for {other}: on the CPU, manual_seed uses only the "
                "low 32 bits of its argument. Mix seed and rank into 32 bits: int(np.random.SeedSequence([seed, "
                "rank]).generate_state(1)[0]).",
    "global-disturbed": "Making the loader seeds the program's global generators: dropout and initial weights "
                        "would repeat. Use a torch.Generator.",
    "persistent-alike": "With persistent workers, {source} draws the same numbers in the second epoch.",
}
SOURCES = ("dataset.rng", "numpy.random", "random", "torch")
SEEDS, RANKS = range(21), (*range(21), 64, 512, 1000)  # pairs whose generators are compared


class _Draws(Dataset):
    """Items: (worker, index, a number from each source)."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        numbers = self.rng.random(), np.random.random(), random.random(), torch.rand((), dtype=torch.float64).item()  # noqa: NPY002
        return (info.id if info else -1), index, *numbers


class _Epochs:
    """The numbers of some epochs of a new loader. epochs: list of {source: {worker: [numbers]}}."""

    def __init__(self, seeded_loader, seed, n, noise=0, **options):
        _disturb(noise)
        options = {"batch_size": 2, "num_workers": 2} | options
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        loader = seeded_loader(_Draws(), seed, **options)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        if loader is None:
            raise Wrong("nothing-returned")
        if not hasattr(loader, "__iter__"):
            raise Wrong("no-loader", got=type(loader).__name__)
        if options.get("persistent_workers") and not getattr(loader, "persistent_workers", True):
            raise Wrong("options-ignored", what="persistent_workers is False, but True was asked for")
        self.disturbed = not torch.equal(before[0], after[0]) or before[1:] != after[1:]
        self.epochs = []
        for epoch in range(n):
            _disturb(noise + 1 + epoch)
            self.epochs.append(self._one(loader))
        del loader  # persistent workers end with it

    def _one(self, loader):
        found = {source: {} for source in SOURCES}
        seen = 0
        for batch in loader:
            if not isinstance(batch, list | tuple) or len(batch) != 6:
                raise Wrong("options-ignored", got=batch, what="the batches are not those of the data set")
            if len(batch[0]) != 2:
                raise Wrong("options-ignored", what=f"batch_size is {len(batch[0])}, but 2 was asked for")
            for row in zip(*(column.tolist() for column in batch), strict=True):
                seen += 1
                for source, number in zip(SOURCES, row[2:], strict=True):
                    found[source].setdefault(row[0], []).append(number)
        workers = sorted(found["torch"])
        if workers != [0, 1] or seen != 8:
            raise Wrong("options-ignored", what=(f"{seen} items came from workers {workers}, but 8 from two "
                                                 "workers were asked for"))
        return found


def _disturb(noise):
    """Draw from the global generators, as a training does between two epochs."""
    torch.manual_seed(1000 + noise)
    np.random.seed(1000 + noise)  # noqa: NPY002
    random.seed(1000 + noise)


def balise_3(seeded_loader):
    """Two workers, two epochs, the same seed again after other random numbers; persistent workers; ranks."""
    yield "a DataLoader with the given options"
    _with_options(seeded_loader)
    yield "no two workers draw the same numbers"
    first = _Epochs(seeded_loader, 7, 2)
    for source in SOURCES:
        a, b = first.epochs[0][source].values()
        if set(a) & set(b):
            slug = "global-alike" if source != "dataset.rng" else _own_alike(seeded_loader, a)
            raise Wrong(slug, expected="eight different numbers", got=f"{a[:2]} and {b[:2]}", source=source)
    _set_anyway(seeded_loader)
    yield "no two epochs draw the same numbers"
    _epochs_differ(first, "epochs-alike")
    _many_epochs(seeded_loader)
    yield "the same seed gives the same numbers, whatever else was drawn"
    if first.disturbed:
        raise Wrong("global-disturbed")
    _reproducible(seeded_loader, first)
    _by_itself(seeded_loader)
    yield "another seed or another rank gives other numbers"
    drawn = {pair: _Epochs(seeded_loader, pair[0], 1, rank=pair[1]).epochs[0] for pair in ((8, 0), (7, 1))}
    drawn[7, 0] = first.epochs[0]
    _no_two_alike(seeded_loader, drawn, (7, 0), (8, 0), "seed-without-effect")
    _no_two_alike(seeded_loader, drawn, (7, 0), (7, 1), "rank-without-effect")
    _no_two_alike(seeded_loader, drawn, (7, 1), (8, 0), "pairs-collide")
    _many_pairs(seeded_loader)
    yield "all of this with persistent workers too"
    options = {"persistent_workers": True}
    lasting = _Epochs(seeded_loader, 3, 2, **options)
    _epochs_differ(lasting, "persistent-alike")
    again = _Epochs(seeded_loader, 3, 2, noise=20, **options)
    for source in SOURCES:
        if lasting.epochs[0][source] != again.epochs[0][source] or lasting.epochs[1][source] != again.epochs[1][source]:
            raise Wrong("not-reproducible", source=source, where="persistent workers")


def _with_options(seeded_loader):
    """Other options than those of the draws below; a loader that does not show one is not asked for it."""
    given = {"batch_size": 3, "num_workers": 1, "drop_last": True, "prefetch_factor": 4, "pin_memory": True}
    for shuffle, sampler in ((True, RandomSampler), (False, SequentialSampler)):
        try:
            loader = seeded_loader(_Draws(), 7, shuffle=shuffle, **given)
        except ValueError as error:  # DataLoader's own: of options that were given, some came and others did not
            raise Wrong("options-ignored", what=str(error).split(".")[0]) from error
        for name, value in given.items():
            if (got := getattr(loader, name, value)) != value:
                raise Wrong("options-ignored", what=f"{name} is {got}, but {value} was asked for")
        if not isinstance(getattr(loader, "sampler", None), sampler | None):
            raise Wrong("options-ignored", what=f"shuffle={shuffle} was asked for, but the sampler is of another kind")


class _Bare(Dataset):
    """It draws from `rng`, and has none."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return isinstance(self.rng, np.random.Generator)


def _set_anyway(seeded_loader):
    try:
        if not torch.cat(list(seeded_loader(_Bare(), 7, batch_size=2, num_workers=1))).all():
            raise Wrong("other-kind")
    except AttributeError as error:
        raise Wrong("rng-not-set", error=str(error).strip().splitlines()[-1]) from error


def _own_alike(seeded_loader, drawn):
    """Why dataset.rng draws the same in both workers: the slug. drawn: one worker's numbers."""
    dataset, untouched = _Draws(), _Draws()
    rng = dataset.rng
    seeded_loader(dataset, 7, batch_size=2, num_workers=2)
    first = untouched.rng.random()
    if dataset.rng is not rng or dataset.rng.random() != first:  # changed in the main process
        return "own-not-reached"
    return "own-copied" if first in drawn else "own-same-seed"


def _epochs_differ(run, slug):
    for source in SOURCES:
        first, second = ({n for numbers in epoch[source].values() for n in numbers} for epoch in run.epochs)
        if not first & second:
            continue
        if source == "numpy.random":
            words = np.random.RandomState(2**31).random(), np.random.RandomState(2**31 + 1).random()  # noqa: NPY002
            if set(words) & first:
                raise Wrong("state-word", source=source)
        raise Wrong(slug, expected="other numbers", got=f"{describe(sorted(first & second)[:2])} again", source=source)


def _reproducible(seeded_loader, first):
    other = _Epochs(seeded_loader, 7, 2, noise=50)
    for source in SOURCES:
        for epoch, wanted in enumerate(first.epochs):
            if other.epochs[epoch][source] == wanted[source]:
                continue
            # does it repeat at all, with the global generators in the same state?
            same = _Epochs(seeded_loader, 7, 2).epochs[epoch][source] == wanted[source]
            raise Wrong("depends-on-global" if same else "not-reproducible", source=source, where=f"epoch {epoch}")


def _no_two_alike(seeded_loader, drawn, one, other, slug):
    """drawn: {(seed, rank): {source: {worker: [numbers]}}}, of which two pairs are compared."""
    for source in SOURCES:
        mine, theirs = ({n for numbers in drawn[pair][source].values() for n in numbers} for pair in (one, other))
        if not mine & theirs:
            continue
        if _is_cut(_generator(seeded_loader, *one), _generator(seeded_loader, *other)):
            slug = "seed-cut"
        raise Wrong(slug, expected="other numbers", got=f"{describe(sorted(mine & theirs)[:2])} again", source=source,
                    one=f"seed {one[0]} on rank {one[1]}", other=f"seed {other[0]} on rank {other[1]}")  # fmt: skip


def _many_pairs(seeded_loader):
    """Two pairs whose loaders' generators are alike: then workers tell whether they draw the same numbers."""
    known = {}
    for pair in [(seed, rank) for seed in SEEDS for rank in RANKS] + _linear(seeded_loader):
        generator = _generator(seeded_loader, *pair)
        if generator is None:
            return  # the loader does not show it, or does without
        other = known.setdefault(tuple(torch.randint(2**62, (2,), generator=generator).tolist()), pair)
        if other != pair:
            drawn = {each: _Epochs(seeded_loader, each[0], 1, rank=each[1]).epochs[0] for each in (other, pair)}
            _no_two_alike(seeded_loader, drawn, other, pair, "pairs-collide")
            return  # the seeds of the workers come from elsewhere


def _linear(seeded_loader):
    """The pairs that meet another one where the seed is a sum of multiples: those that are large enough to be missed."""
    found = [_generator(seeded_loader, *pair) for pair in ((0, 0), (0, 1), (1, 0))]
    if None in found:
        return []
    first, rank, seed = (generator.initial_seed() for generator in found)
    return [pair for pair in ((rank - first, 0), (0, seed - first)) if 0 < sum(pair) < 2**31]


def _many_epochs(seeded_loader):
    """What worker_init_fn makes of a thousand epochs' seeds, called here: dataset.rng begins elsewhere each time."""
    start, seen = getattr(seeded_loader(_Draws(), 7, batch_size=2, num_workers=2), "worker_init_fn", None), set()
    if start is None:
        return
    bases = torch.randint(2**62, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    for base in bases:
        dataset = _Draws()
        info = worker_module.WorkerInfo(id=0, num_workers=2, seed=base, dataset=dataset)
        with mock.patch.object(worker_module, "_worker_info", info):
            torch.default_generator.manual_seed(base)  # torch.manual_seed notes a stack for each kind of device
            random.seed(base)
            np.random.seed(base % 2**32)  # noqa: NPY002
            start(0)
        seen.add(dataset.rng.random())
    if 1 < len(seen) < len(bases):  # one alone: the epochs are told apart by something else
        raise Wrong("few-seeds", n=len(seen), all=len(bases))


def _by_itself(seeded_loader):
    """The loader's generator, where it shows: its own, and from numbers that are the same in each run."""
    generator = _generator(seeded_loader, 7, 0)
    if generator is None:
        return
    if any(generator is _generator(seeded_loader, seed, 0) for seed in (7, 8)):
        raise Wrong("generator-shared")
    with mock.patch.object(builtins, "hash", _of_another_run):
        again = _generator(seeded_loader, 7, 0)
    if again and again.initial_seed() != generator.initial_seed():
        raise Wrong("hash-of-text", expected=f"seed {generator.initial_seed()}", got="another one in the next run")


def _of_another_run(value, hashed=hash):
    parts = value if isinstance(value, tuple) else (value,)
    return hashed((value, 1)) if any(isinstance(part, str | bytes) for part in parts) else hashed(value)


def _generator(seeded_loader, seed, rank):
    generator = getattr(seeded_loader(_Draws(), seed, rank=rank, batch_size=2, num_workers=2), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _is_cut(one, other):
    """Whether two generators were seeded with numbers of which only the bits above the low 32 differ.

    A CPU generator is a Mersenne Twister that begins with the low 32 bits of its seed (ATen/core/MT19937RNGEngine.h).
    """
    if one is None or other is None:
        return False
    apart = one.initial_seed() - other.initial_seed()
    return apart != 0 and apart % 2**32 == 0
