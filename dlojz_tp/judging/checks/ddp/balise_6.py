"""Balise 6: sequences of different lengths shared out so that the ranks have nearly equal numbers of tokens."""

import functools
import itertools

import torch

from dlojz_tp.judging.checking.compare import describe
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.probes.shared_looks import recognised

SMALL = ([5, 3, 8, 1], 1), ([5, 3, 8, 1], 2), ([7, 7], 2), ([2, 9, 4, 4, 6, 1, 3], 3), ([4, 4, 4], 4)


DRAWN, MANY = torch.Generator().manual_seed(5), torch.Generator().manual_seed(0)
HARD = (
    ([90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2),  # equal counts are far from equal work
    ([1, 1, 1, 1, 1, 1, 1, 1, 8], 2),  # the long one comes last
    ([3, 3, 2, 2, 2], 2),
    ([5, 5, 4, 4, 3, 3, 3], 3),  # the worst case of the bound
    *((torch.randint(1, 60, (8,), generator=DRAWN).tolist(), size) for size in (2, 3, 4)),
)
REAL = torch.randn(1000, generator=MANY).mul(0.6).add(5.5).exp().clamp(8, 2048).int().tolist()


def observe(balance, lengths, world_size, found):
    """Two calls; `found` takes the partition, as (lengths, number of ranks, lists)."""
    given = list(lengths)
    shares = balance(given, world_size)
    yield {"given": None if shares is None else given}
    shares = _as_lists(shares)
    yield {"count": shares if isinstance(shares, str) else f"{len(shares)} lists", "shares": shares}
    found.append((lengths, world_size, shares))
    yield {"again": _as_lists(balance(list(lengths), world_size)) == shares}


def _as_lists(shares):
    try:
        return [[int(place) for place in share] for share in shares]
    except TypeError:
        return describe(shares)


def _not_once(shares, lengths):
    """Of a partition in which the places are not each there once: (hint, its fields)."""
    places, every = list(itertools.chain(*shares)), set(range(len(lengths)))
    if sorted(places) == sorted(every):
        return None
    lost, twice = sorted(every - set(places)), sorted(place for place in places if places.count(place) > 1)
    known = {tuple(place + 1 for place in every): "numbered-from-one", tuple(sorted(lengths)): "not-numbers"}
    slug = known.get(tuple(sorted(places)), "sequence-lost" if lost and not twice else "sequence-twice")
    return slug, {"which": (twice or lost or places)[0], "got": shares}


def partition(claim, lengths, size):
    """Looks at one partition of these for so many ranks."""
    return [
        Look(claim, "given", lengths, "lengths-changed", fields=silent),
        Look("", "count", f"{size} lists", "not-lists", fields={"n": size}),
        recognised("", lambda observed: _not_once(observed["shares"], lengths)),
        Look("", "shares", lengths, "rank-without-work", fields={"expected": ""},
             holds=lambda shares, lengths: all(shares) or len(lengths) < len(shares)),
        Look("", "again", True, "not-the-same-everywhere"),
    ]  # fmt: skip


ORDERS = {"longest-first": lambda length: 0, "shortest-first": lambda length: length}  # the slug of those in that order


def level(claim, lengths, shares, best, bound, other, found):
    """A look at the fullest rank, which may have `bound` times as many tokens as in the best one; other: a hint."""
    loads, counts = [sum(lengths[place] for place in share) for share in shares], [len(share) for share in shares]

    def too_full(_):
        if (most := max(loads)) <= bound * best + 1e-9:
            return None
        in_order = (slug for slug, key in ORDERS.items() if all(_in_turn(*one, key) for one in found))
        slug = next(in_order, "equal-counts" if max(counts) - min(counts) <= 1 else other)
        told = {"expected": f"at most {bound * best:.0f} tokens on a rank", "got": most}
        return slug, told | {"most": most, "total": sum(lengths), "best": f"{best:.0f}"}

    return recognised(claim, too_full)


def _in_turn(lengths, world_size, shares, key):
    """Whether the sequences, in the order of `key`, each went to the rank with the fewest tokens so far."""
    loads, due = [0] * world_size, [[] for _ in range(world_size)]
    for place in sorted(range(len(lengths)), key=lambda place: key(lengths[place])):
        rank = loads.index(min(loads))
        due[rank].append(place)
        loads[rank] += lengths[place]
    return sorted(map(sorted, shares)) == sorted(map(sorted, due))


def _best(lengths, world_size):
    """The least possible load of the fullest rank, by trying all partitions of a few sequences."""
    best = sum(lengths)
    for places in itertools.product(range(world_size), repeat=len(lengths) - 1):
        loads = [0] * world_size
        for place, length in zip((0, *places), lengths):
            loads[place] += length
        best = min(best, max(loads))
    return best


CLAIMS = (  # cases, the best number of tokens of the fullest rank, how many times that is allowed, the general hint
    ("one list for each rank, every sequence exactly once", SMALL, None),
    ("the fullest rank has at most 4/3 as many tokens as in the best partition", HARD, _best, 4 / 3, "unbalanced"),
    ("1,000 sequences over 64 ranks: the fullest rank is within 2 % of the mean", ((REAL, 64),),
     lambda lengths, size: max(max(lengths), sum(lengths) / size), 1.02, "not-level"),
)  # fmt: skip


def balise_6(balance):
    """Partitions of small lists against the best of all, found by trying; then real sizes."""
    for claim, cases, best, *allowed in CLAIMS:
        wheres = [
            f"lengths {some if len(some) < 12 else f'of {len(some)} sequences'}, {size} ranks" for some, size in cases
        ]
        found = []
        for at, where in zip(cases, wheres):
            yield from judged(partition(claim, *at), functools.partial(observe, balance, *at, found), where=where)
        for (lengths, size, shares), where in zip(found if best else (), wheres):
            yield from judged([level(claim, lengths, shares, best(lengths, size), *allowed, found)], dict, where=where)
