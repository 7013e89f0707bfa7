"""Balise 5: a stream split over workers and ranks, in simulated workers and in real ones."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.checks.dataloader.pretended_worker import in_worker

# (items, ranks, workers of each)
ONCE = (17, 1, 0), (17, 1, 2), (17, 3, 0), (23, 2, 3), (22, 4, 2), (9, 1, 1), (5, 3, 3), (30, 3, 2)
EVEN = (23, 2, 3), (17, 4, 1), (17, 3, 0), (24, 2, 2), (5, 3, 2), (19, 1, 2)
REAL = [(lasting, epoch) for lasting in (True, False) for epoch in (0, 1)]


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


def observe(SplitStream):  # noqa: N803  (the answer is a class)
    """Parts by hand, with made worker numbers; then a DataLoader with persistent workers, and with new ones."""
    stream = SplitStream(_Items(3))
    indexed = hasattr(stream, "__getitem__") and not hasattr(stream, "__iter__")
    yield {"kind": isinstance(stream, IterableDataset) and callable(getattr(stream, "set_epoch", None)) and not indexed}
    for case in ONCE:
        yield {case: _parts(SplitStream, *case)}
    items = _Items(60)
    share = _part(SplitStream(items, 0, 1, 2), 1, 3)
    yield {"read": (items.read, len(share))}
    for key, options in (("first", {}), ("again", {}), ("second", {"epoch": 1}), ("other seed", {"seed": 5})):
        yield {key: _parts(SplitStream, 40, 2, 2, **options)}
    yield _one_stream(SplitStream)
    for case in EVEN:
        parts = _parts(SplitStream, *case, even=True)
        given = _given(parts)
        yield {("twice", case): len(given) - len({*given}), ("sizes", case): [len(part) for part in parts.values()]}
        later = (_parts(SplitStream, *case, epoch, even=True) for epoch in (1, 2, 3))
        always = 0 < case[0] % len(parts) < case[0] and all({*given} == {*_given(one)} for one in later)
        yield {("dropped", case): always}
    for lasting in (True, False):
        stream = SplitStream(range(100, 111), seed=2)
        loader = DataLoader(stream, batch_size=3, num_workers=2, persistent_workers=lasting)
        for epoch in (0, 1):
            stream.set_epoch(epoch)
            yield {(lasting, epoch): [batch.tolist() for batch in loader]}
        del loader


def _part(stream, number, workers):
    # ranks and workers are processes of their own: their global generators are in different states
    torch.manual_seed(997 + 31 * number + workers)
    random.seed(997 + 31 * number + workers)
    np.random.seed(997 + 31 * number + workers)  # noqa: NPY002
    with in_worker(number, workers):
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


def _given(parts):
    return [item for part in parts.values() for item in part]


def _one_stream(SplitStream):  # noqa: N803
    """Epochs 0, 3, 0 and 0 of one stream; what becomes of the items and of the global generators."""
    given = list(range(100, 130))
    stream = SplitStream(given, seed=4)
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    with in_worker(0, 0):
        alone = [*stream]
        stream.set_epoch(3)
        late = [*stream]
        stream.set_epoch(0)
        back = [*stream]
        once_more = [*stream]
    return {
        "items": given == list(range(100, 130)),
        "back": (alone == back, alone != late),
        "once more": back == once_more,
        "global": torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate(),
    }


def _nested(parts):
    """Whether some parts have items in common, and always as if one had begun later in the same order."""
    pairs = [(one, other) for k, one in enumerate(parts) for other in parts[:k] if set(one) & set(other)]
    return bool(pairs) and all(
        short == long[-len(short) :] for short, long in (sorted(pair, key=len) for pair in pairs)
    )


def _once(claim, case):
    n, world, workers = case
    wanted = list(range(100, 100 + n))

    def hint(parts, _):
        given = _given(parts)
        per_rank = [sorted(i for (r, _), part in parts.items() if r == rank for i in part) for rank in range(world)]
        if given and set(given) <= set(range(n)):
            return "places-not-items"
        if workers > 1 and all(len({*parts[r, 0]}) == len(parts[r, 0]) and sorted(parts[r, 0]) == sorted(parts[r, w])
                               for r in range(world) for w in range(workers)):  # fmt: skip
            return "workers-not-split"
        if world > 1 and all(sorted({*items}) == wanted for items in per_rank):
            return "ranks-not-split"
        if _nested(list(parts.values())):
            return "parts-collide"
        if len(given) >= n:
            return "orders-differ" if len(given) == n else "items-twice"
        alike = len(given) == len({*given}) and len({len(part) for part in parts.values()}) == 1
        return "even-always" if alike and n - len(given) < len(parts) else "items-lost"

    def fields(parts, _):
        given = _given(parts)
        count = len(given) - len({*given}) if len(given) > n else len({*wanted} - {*given})
        got = f"{len(given)} items, {len({*given})} different"
        return _about(case) | {"n": count, "last": n - 1, "expected": f"{n} items, each once", "got": got}

    return Look(claim, case, wanted, hint, holds=lambda parts, _: sorted(_given(parts)) == wanted, fields=fields)


def _about(case):
    n, world, workers = case
    return {"all": n, "world": world, "workers": workers, "where": f"{n} items, {world} ranks, {workers} workers each"}


def _even(claim, case):
    def fields(seen, due):
        found = seen if isinstance(seen, list) else [1]
        dropped = {"n": case[0] - sum(found), "parts": len(found), "most": case[0] % len(found)}
        return silent(seen, due) | _about(case) | dropped | {"sizes": ", ".join(map(str, found))}

    return [
        Look(claim, ("twice", case), 0, "even-repeats", fields=fields),
        Look("", ("sizes", case), 1, "even-parts-differ", holds=lambda seen, due: len({*seen}) == due, fields=fields),
        Look("", ("sizes", case), case[0], "even-drops-too-much",
             holds=lambda seen, n: n - sum(seen) == n % len(seen), fields=fields),
        Look("", ("dropped", case), False, "even-same-dropped", fields=fields),
    ]  # fmt: skip


def _real(claim, key):
    def hint(seen, _):
        return "orders-differ" if len(sum(seen, [])) == 11 else "items-twice"

    def fields(seen, _):
        given = sum(seen, [])
        return {
            "n": len(given) - len({*given}),
            "all": 11,
            "world": 1,
            "workers": 2,
            "where": "a DataLoader with 2 workers",
        }

    return Look(
        claim, key, list(range(100, 111)), hint, holds=lambda seen, due: sorted(sum(seen, [])) == due, fields=fields
    )


def _differ(*keys):
    """What looks at whether two observations differ."""
    return lambda o: o[keys[0]] != o[keys[1]]


def _at(where):
    return lambda *of: silent(*of) | {"where": where}


def _read(seen, due):
    return silent(seen, due) | {"n": seen[0], "share": seen[1]}


def _anew(o):
    """Whether workers that start anew see the epoch; if not, the mistake."""
    if o[False, 0] != o[False, 1]:
        return "another order"
    return "epoch-counted" if o[True, 0] != o[True, 1] else "epoch-without-effect"


LOOKS = [
    Look("every item once: no workers, one rank", "kind", True, "not-a-stream"), _once("", ONCE[0]),
    _once("every item once: 1 to 3 workers, 1 to 4 ranks, lengths that do not divide", ONCE[1]),
    *(_once("", case) for case in ONCE[2:]),
    Look("a worker reads only what it yields", "read", 1, "reads-all",
         holds=lambda seen, due: seen[0] <= seen[1] + due, fields=_read),
    Look("another order in each epoch, the same for the same seed and epoch",
         lambda o: all(part == sorted(part) for part in o["first"].values()), False, "not-shuffled"),
    Look("", _differ("first", "again"), False, "order-not-kept"),
    Look("", _differ("first", "second"), True, "epoch-without-effect"),
    Look("", lambda o: all(sorted(part) == sorted(o["second"][key]) for key, part in o["first"].items()), False,
         "worker-order-only"),
    Look("", _differ("first", "other seed"), True, "seed-not-used"),
    Look("", "items", True, "items-changed"),
    Look("", "back", (True, True), lambda seen, _: "epoch-without-effect" if seen[0] else "order-not-kept",
         fields=_at("epochs 0, 3, 0 of one stream")),
    Look("", "once more", True, "epoch-moved"), Look("", "global", True, "global-order"),
    *_even("even=True: parts of the same size, and no more items dropped than necessary", EVEN[0]),
    *(look for case in EVEN[1:] for look in _even("", case)),
    _real("in a DataLoader: set_epoch reaches persistent workers", REAL[0]), *(_real("", key) for key in REAL[1:]),
    Look("", _anew, "another order", lambda seen, _: seen, fields=_at("workers started anew")),
    Look("", _differ((True, 0), (True, 1)), True, "epoch-not-seen"),
    Look("", lambda o: all(o[True, epoch] == o[False, epoch] for epoch in (0, 1)), True, "order-not-kept"),
]  # fmt: skip


def balise_5(SplitStream):  # noqa: N803
    yield from judged(LOOKS, observe, SplitStream)
