"""Balise 6: sequences of different lengths shared out so that the ranks have nearly equal numbers of tokens."""

import itertools

import torch

from dlojz_tp.checking import Wrong

HINTS = {
    "not-lists": "Return one list of sequence numbers for each rank: {n} lists.",
    "not-numbers": "Your lists hold the lengths of the sequences. Return their indices: their places in `lengths`.",
    "sequence-lost": "You put sequence {which} on no rank.",
    "sequence-twice": "You put sequence {which} on several ranks, or several times on one.",
    "rank-without-work": "A rank has no sequence, though there are enough. The other ranks would wait for it at "
                         "every step.",
    "equal-counts": "Each rank has equally many sequences, but not equally many tokens: the fullest rank has "
                    "{most} of {total}, and {best} is possible.",
    "longest-first": "It is right to go to the rank with the fewest tokens. But take the longest sequences first: "
                     "if a long one comes last, nothing is left to balance it.",
    "shortest-first": "You take the shortest sequences first, so the longest come last and nothing is left to "
                      "balance them.",
    "numbered-from-one": "You count the places from 1. Indices in Python start at 0.",
    "unbalanced": "The fullest rank has {most} tokens of {total}, and {best} is possible. At most 4/3 of the least "
                  "possible number is allowed.",
    "not-level": "The fullest rank has {most} tokens, and the mean is {best}. With so many sequences the ranks can "
                 "be nearly equal: at most 2 % above the mean.",
    "lengths-changed": "The function changed the list it was given.",
    "not-the-same-everywhere": "Two calls with the same lengths gave different answers. Every rank computes the "
                               "lists by itself, and all must get the same.",
}


def balise_6(balance):
    """Partitions of small lists against the best of all, found by trying; then real sizes."""
    yield "one list for each rank, every sequence exactly once"
    for lengths, world_size in (
        ([5, 3, 8, 1], 1),
        ([5, 3, 8, 1], 2),
        ([7, 7], 2),
        ([2, 9, 4, 4, 6, 1, 3], 3),
        ([4, 4, 4], 4),
    ):
        _right_partition(balance, lengths, world_size)
    yield "the fullest rank has at most 4/3 as many tokens as in the best partition"
    found = [(lengths, size, _right_partition(balance, lengths, size)) for lengths, size in _hard()]
    for lengths, world_size, shares in found:
        best = _best(lengths, world_size)
        _right_balance(lengths, world_size, shares, best, 4 / 3, found)
    yield "1,000 sequences over 64 ranks: the fullest rank is within 2 % of the mean"
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(1000, generator=generator).mul(0.6).add(5.5).exp().clamp(8, 2048).int().tolist()
    shares = _right_partition(balance, lengths, 64)
    best = max(max(lengths), sum(lengths) / 64)
    _right_balance(lengths, 64, shares, best, 1.02, [(lengths, 64, shares)])


def _hard():
    generator = torch.Generator().manual_seed(5)
    yield [90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2  # equal counts are far from equal work
    yield [1, 1, 1, 1, 1, 1, 1, 1, 8], 2  # the long one comes last
    yield [3, 3, 2, 2, 2], 2
    yield [5, 5, 4, 4, 3, 3, 3], 3  # the worst case of the bound
    for world_size in (2, 3, 4):
        yield torch.randint(1, 60, (8,), generator=generator).tolist(), world_size


def _right_partition(balance, lengths, world_size):
    where = f"lengths {lengths if len(lengths) < 12 else f'of {len(lengths)} sequences'}, {world_size} ranks"
    given = list(lengths)
    shares = balance(given, world_size)
    if shares is None:
        raise Wrong("nothing-returned")
    if given != lengths:
        raise Wrong("lengths-changed", where=where)
    try:
        shares = [[int(i) for i in share] for share in shares]
    except TypeError:
        raise Wrong("not-lists", got=shares, where=where, n=world_size) from None
    if len(shares) != world_size:
        raise Wrong("not-lists", expected=f"{world_size} lists", got=f"{len(shares)} lists", where=where, n=world_size)
    seen = list(itertools.chain(*shares))
    if sorted(seen) != list(range(len(lengths))):
        if sorted(seen) == list(range(1, len(lengths) + 1)):
            raise Wrong("numbered-from-one", got=shares if len(lengths) < 12 else "", where=where)
        if sorted(seen) == sorted(lengths):
            raise Wrong("not-numbers", got=shares, where=where)
        lost = sorted(set(range(len(lengths))) - set(seen))
        twice = sorted({i for i in seen if seen.count(i) > 1})
        if lost and not twice:
            raise Wrong("sequence-lost", got=shares if len(lengths) < 12 else "", where=where, which=lost[0])
        raise Wrong("sequence-twice", got=shares if len(lengths) < 12 else "", where=where, which=(twice or seen)[0])
    if len(lengths) >= world_size and not all(shares):
        raise Wrong("rank-without-work", got=shares, where=where)
    again = balance(list(lengths), world_size)
    if [[int(i) for i in share] for share in again] != shares:
        raise Wrong("not-the-same-everywhere", where=where)
    return shares


def _right_balance(lengths, world_size, shares, best, bound, found):
    loads = [sum(lengths[i] for i in share) for share in shares]
    if max(loads) <= bound * best + 1e-9:
        return
    few = len(lengths) < 12
    where = f"lengths {lengths if few else f'of {len(lengths)} sequences'}, {world_size} ranks"
    counts = [len(share) for share in shares]
    slug = "unbalanced" if few else "not-level"
    if _in_turn(found, lambda lengths: range(len(lengths))):
        slug = "longest-first"
    elif _in_turn(found, lambda lengths: sorted(range(len(lengths)), key=lengths.__getitem__)):
        slug = "shortest-first"
    elif max(counts) - min(counts) <= 1:
        slug = "equal-counts"
    most = max(loads)
    expected = f"at most {bound * best:.0f} tokens on a rank"
    raise Wrong(slug, expected=expected, got=most, where=where, most=most, total=sum(lengths), best=f"{best:.0f}")


def _in_turn(found, order):
    """Whether all partitions found are those of sequences shared out in this order."""
    return all(
        sorted(map(sorted, shares)) == sorted(map(sorted, _greedy(lengths, world_size, order(lengths))))
        for lengths, world_size, shares in found
    )


def _greedy(lengths, world_size, places):
    """Each sequence, in this order, to the rank with the fewest tokens so far."""
    loads, shares = [0] * world_size, [[] for _ in range(world_size)]
    for place in places:
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return shares


def _best(lengths, world_size):
    """The least possible load of the fullest rank, by trying all partitions of a few sequences."""
    best = sum(lengths)
    for places in itertools.product(range(world_size), repeat=len(lengths) - 1):
        loads = [0] * world_size
        for place, length in zip((0, *places), lengths):
            loads[place] += length
        best = min(best, max(loads))
    return best
