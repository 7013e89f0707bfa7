"""Balise 3: random numbers in workers, drawn by real worker processes."""

import builtins
import random
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from dlojz_tp.judging.checking import Wrong, describe
from dlojz_tp.judging.checking.looks import Look, judged, one_of, silent

SOURCES = ("dataset.rng", "numpy.random", "random", "torch")
SEEDS, RANKS = range(21), (*range(21), 64, 512, 1000)  # pairs whose generators are compared
OTHER_SEED, OTHER_RANK, CROSSED = ((7, 0), (8, 0)), ((7, 0), (7, 1)), ((7, 1), (8, 0))  # two of (seed, rank) each
OWN = {"changed in the main process": "own-not-reached", "copied": "own-copied", "seeded alike": "own-same-seed"}
# what numpy draws in workers that seed it from its own first word of state, which is always 2³¹
STATE_WORDS = {np.random.RandomState(2**31 + k).random() for k in (0, 1)}  # noqa: NPY002
EPOCHS = 1000


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


def observe(seeded_loader):
    """Two workers, two epochs, the same seed again after other random numbers; persistent workers; ranks."""
    yield {"options": _options_lost(seeded_loader)}
    _disturb(0)
    before = _global_states()
    loader = seeded_loader(_Draws(), 7, batch_size=2, num_workers=2)
    yield {"kind": None if loader is None else hasattr(loader, "__iter__"), "disturbed": _global_states() != before}
    first = _epochs(seeded_loader, 7, 2)
    workers = _common(*first[0].values())
    own = _own(seeded_loader, first[0][0]["dataset.rng"]) if "dataset.rng" in workers else ""
    yield {"own": own, "workers": workers}
    yield _without_rng(seeded_loader)
    yield {"epochs": _common(*map(_all, first)), "states": _states(seeded_loader)}
    noisy = _apart(first, _epochs(seeded_loader, 7, 2, noise=50))
    # does it repeat at all, with the global generators in the same state?
    yield {"noisy": noisy, "again": noisy and _apart(first, _epochs(seeded_loader, 7, 2))}
    yield _by_itself(seeded_loader)
    drawn = {(7, 0): first[0]} | {pair: _drawn(seeded_loader, *pair) for pair in ((8, 0), (7, 1))}
    for pairs in (OTHER_SEED, OTHER_RANK, CROSSED):
        yield {pairs: _of_pairs(seeded_loader, drawn, *pairs)}
    yield {"many": _many_pairs(seeded_loader)}
    lasting, again = (_epochs(seeded_loader, 3, 2, noise, persistent_workers=True) for noise in (0, 20))
    yield {"lasting": _common(*map(_all, lasting)), "lasting again": _apart(lasting, again)}


def _options_lost(seeded_loader):
    """Of other options than those of the draws below, one that the loader shows otherwise; it need not show any."""
    given = {"batch_size": 3, "num_workers": 1, "drop_last": True, "prefetch_factor": 4, "pin_memory": True}
    given["persistent_workers"] = True
    for shuffle, sampler in ((True, RandomSampler), (False, SequentialSampler)):
        try:
            loader = seeded_loader(_Draws(), 7, shuffle=shuffle, **given)
        except ValueError as error:  # DataLoader's own: of options that were given, some came and others did not
            return str(error).split(".")[0]
        for name, value in given.items():
            if (got := getattr(loader, name, value)) != value:
                return f"{name} is {got}, but {value} was asked for"
        if not isinstance(getattr(loader, "sampler", None), sampler | None):
            return f"shuffle={shuffle} was asked for, but the sampler is of another kind"
    return ""


def _epochs(seeded_loader, seed, n, noise=0, **options):
    """The numbers of some epochs of a new loader: a list of {worker: {source: numbers}}."""
    _disturb(noise)
    loader, found = seeded_loader(_Draws(), seed, **{"batch_size": 2, "num_workers": 2} | options), []
    for epoch in range(n):
        _disturb(noise + 1 + epoch)
        found.append(_numbers(loader))
    return found


def _numbers(loader):
    rows = []
    for batch in loader:
        if not isinstance(batch, list | tuple) or len(batch) != 6:
            raise Wrong("options-ignored", got=batch, what="the batches are not those of the data set")
        if len(batch[0]) != 2:
            raise Wrong("options-ignored", what=f"batch_size is {len(batch[0])}, but 2 was asked for")
        rows += zip(*(column.tolist() for column in batch), strict=True)
    workers = sorted({worker for worker, *_ in rows})
    if workers != [0, 1] or len(rows) != 8:
        what = f"{len(rows)} items came from workers {workers}, but 8 from two workers were asked for"
        raise Wrong("options-ignored", what=what)
    return {
        worker: {source: [row[2 + k] for row in rows if row[0] == worker] for k, source in enumerate(SOURCES)}
        for worker in workers
    }


def _disturb(noise):
    """Draw from the global generators, as a training does between two epochs."""
    torch.manual_seed(1000 + noise)
    np.random.seed(1000 + noise)  # noqa: NPY002
    random.seed(1000 + noise)


def _global_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def _drawn(seeded_loader, seed, rank):
    return _epochs(seeded_loader, seed, 1, rank=rank)[0]


def _all(epoch):
    """The numbers of both workers: {source: numbers}."""
    return {source: epoch[0][source] + epoch[1][source] for source in SOURCES}


def _common(one, other):
    """The numbers that two {source: numbers} share; only of the sources that share any."""
    return {source: shared for source in SOURCES if (shared := sorted({*one[source]} & {*other[source]}))}


def _apart(one, other):
    """(source, epoch) where two runs have not drawn the same."""
    epochs = list(enumerate(zip(one, other, strict=True)))
    return [(source, k) for source in SOURCES for k, pair in epochs if _all(pair[0])[source] != _all(pair[1])[source]]


class _Bare(Dataset):
    """It draws from `rng`, and has none."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return isinstance(self.rng, np.random.Generator)


def _without_rng(seeded_loader):
    """Whether the data set has a generator then, or the error."""
    try:
        found = torch.cat(list(seeded_loader(_Bare(), 7, batch_size=2, num_workers=1)))
    except AttributeError as error:
        return {"error": str(error).strip().splitlines()[-1]}
    return {"error": "", "generator": bool(found.all())}


def _own(seeded_loader, drawn):
    """Why dataset.rng draws the same in both workers: a key of OWN. drawn: one worker's numbers."""
    dataset, untouched = _Draws(), _Draws()
    rng = dataset.rng
    seeded_loader(dataset, 7, batch_size=2, num_workers=2)
    first = untouched.rng.random()
    if dataset.rng is not rng or dataset.rng.random() != first:
        return "changed in the main process"
    return "copied" if first in drawn else "seeded alike"


def _states(seeded_loader):
    """How many states worker_init_fn gives dataset.rng in a thousand epochs, called here; None where there is none."""
    start, seen = getattr(seeded_loader(_Draws(), 7, batch_size=2, num_workers=2), "worker_init_fn", None), set()
    if start is None:
        return None
    for base in torch.randint(2**62, (EPOCHS,), generator=torch.Generator().manual_seed(1)).tolist():
        dataset = _Draws()
        info = worker_module.WorkerInfo(id=0, num_workers=2, seed=base, dataset=dataset)
        with mock.patch.object(worker_module, "_worker_info", info):
            torch.default_generator.manual_seed(base)  # torch.manual_seed notes a stack for each kind of device
            random.seed(base)
            np.random.seed(base % 2**32)  # noqa: NPY002
            start(0)
        seen.add(dataset.rng.random())
    return len(seen)


def _by_itself(seeded_loader):
    """Whether two loaders share the generator, if it shows; whether another run of Python would seed it otherwise."""
    generator = _generator(seeded_loader, 7, 0)
    shared = any(generator is _generator(seeded_loader, seed, 0) for seed in (7, 8))
    with mock.patch.object(builtins, "hash", _of_another_run):
        again = _generator(seeded_loader, 7, 0)
    shows = generator is not None and again is not None
    return {"shared": shows and shared, "hashed": shows and again.initial_seed() != generator.initial_seed()}


def _of_another_run(value, hashed=hash):
    parts = value if isinstance(value, tuple) else (value,)
    return hashed((value, 1)) if any(isinstance(part, str | bytes) for part in parts) else hashed(value)


def _generator(seeded_loader, seed, rank):
    generator = getattr(seeded_loader(_Draws(), seed, rank=rank, batch_size=2, num_workers=2), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _of_pairs(seeded_loader, drawn, one, other):
    """What {(seed, rank): numbers} of two pairs share; whether the seeds of their generators differ in high bits alone.

    A CPU generator is a Mersenne Twister that begins with the low 32 bits of its seed (ATen/core/MT19937RNGEngine.h).
    """
    generators = [_generator(seeded_loader, *pair) for pair in (one, other)]
    apart = 0 if None in generators else generators[0].initial_seed() - generators[1].initial_seed()
    return {"shared": _common(_all(drawn[one]), _all(drawn[other])), "cut": apart != 0 and apart % 2**32 == 0,
            "pairs": (one, other)}  # fmt: skip


def _many_pairs(seeded_loader):
    """Of two pairs whose loaders' generators are alike: then workers tell whether they draw the same numbers."""
    known = {}
    for pair in [(seed, rank) for seed in SEEDS for rank in RANKS] + _linear(seeded_loader):
        generator = _generator(seeded_loader, *pair)
        if generator is None:
            break  # the loader does not show it, or does without
        other = known.setdefault(tuple(torch.randint(2**62, (2,), generator=generator).tolist()), pair)
        if other != pair:  # if these differ, the seeds of the workers come from elsewhere
            drawn = {each: _drawn(seeded_loader, *each) for each in (other, pair)}
            return _of_pairs(seeded_loader, drawn, other, pair)
    return {"shared": {}}


def _linear(seeded_loader):
    """The pairs that meet another one where the seed is a sum of multiples: those too large to be in SEEDS and RANKS."""
    found = [_generator(seeded_loader, *pair) for pair in ((0, 0), (0, 1), (1, 0))]
    if None in found:
        return []
    first, rank, seed = (generator.initial_seed() for generator in found)
    return [pair for pair in ((rank - first, 0), (0, seed - first)) if 0 < sum(pair) < 2**31]


def _source(seen, _):
    source = next(iter(seen))
    return {"expected": "other numbers", "got": f"{describe(seen[source][:2])} again", "source": source}


def _where(seen, _):
    return {"expected": "the same numbers", "got": "others", "source": seen[0][0], "where": f"epoch {seen[0][1]}"}


def _no_two_alike(claim, key, slug):
    """A look at two pairs of seed and rank."""

    def hint(seen, _):
        return "seed-cut" if seen["cut"] else slug

    def fields(seen, due):
        names = (f"seed {seed} on rank {rank}" for seed, rank in seen["pairs"])
        return _source(seen["shared"], due) | dict(zip(("one", "other"), names))

    return Look(claim, key, {}, hint, holds=lambda seen, due: seen["shared"] == due, fields=fields)


LOOKS = [
    Look("a DataLoader with the given options", "options", "", "options-ignored",
         fields=lambda seen, _: {"expected": "", "got": "", "what": seen}),
    Look("", "kind", True, "no-loader"),
    Look("no two workers draw the same numbers", "own", "", lambda seen, _: OWN[seen], fields=silent),
    Look("", "workers", {}, "global-alike", fields=_source),
    Look("", "error", "", "rng-not-set", fields=lambda seen, _: {"expected": "", "got": "", "error": seen}),
    Look("", "generator", True, "other-kind"),
    Look("no two epochs draw the same numbers", lambda o: STATE_WORDS & {*o["epochs"].get("numpy.random", ())}, set(),
         "state-word", fields=silent),
    Look("", "epochs", {}, "epochs-alike", fields=_source),
    # one state alone: the epochs are told apart by something else
    Look("", "states", (None, 1, EPOCHS), "few-seeds", holds=one_of,
         fields=lambda seen, _: {"expected": "", "got": "", "n": seen, "all": EPOCHS}),
    Look("the same seed gives the same numbers, whatever else was drawn", "disturbed", False, "global-disturbed"),
    Look("", "again", [], "not-reproducible", fields=_where),
    Look("", "noisy", [], "depends-on-global", fields=_where),
    Look("", "shared", False, "generator-shared"),
    Look("", "hashed", False, "hash-of-text"),
    _no_two_alike("another seed or another rank gives other numbers", OTHER_SEED, "seed-without-effect"),
    _no_two_alike("", OTHER_RANK, "rank-without-effect"),
    _no_two_alike("", CROSSED, "pairs-collide"),
    _no_two_alike("", "many", "pairs-collide"),
    Look("all of this with persistent workers too", "lasting", {}, "persistent-alike", fields=_source),
    Look("", "lasting again", [], "not-reproducible", fields=_where),
]  # fmt: skip


def balise_3(seeded_loader):
    yield from judged(LOOKS, observe, seeded_loader)
