"""Answers to balise 6 of 09_ddp: equal work."""

import heapq
import random

import torch

from tests.answers.bank import Bank

bank = Bank("09_ddp", 6)


# balise 6
bank.hint("not-lists", "Return one list of sequence numbers for each rank: {n} lists.")


@bank.wrong("not-lists")
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [i % world_size for i in order]


@bank.wrong("not-lists", variant=True)
def balance(lengths, world_size):
    shares = [list(range(len(lengths)))[i : i + world_size] for i in range(0, len(lengths), world_size)]
    return shares * 2


bank.hint("sequence-lost", "You put sequence {which} on no rank.")


@bank.wrong("sequence-lost", variant=True)
def balance(lengths, world_size):
    n = len(lengths) // world_size
    return [list(range(rank * n, (rank + 1) * n)) for rank in range(world_size)]


bank.hint("sequence-twice", "You put sequence {which} on several ranks, or several times on one.")


@bank.wrong("sequence-twice", variant=True)
def balance(lengths, world_size):
    return [list(range(len(lengths))) for _ in range(world_size)]


bank.hint("equal-counts", "Each rank has equally many sequences, but not equally many tokens: the fullest rank has "
          "{most} of {total}, and {best} is possible.")  # fmt: skip


@bank.wrong("equal-counts")
def balance(lengths, world_size):
    return [list(range(rank, len(lengths), world_size)) for rank in range(world_size)]


@bank.wrong("equal-counts")
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = [order[i : i + world_size] for i in range(0, len(order), world_size)]
    rounds = [r if k % 2 == 0 else [None] * (world_size - len(r)) + r[::-1] for k, r in enumerate(rounds)]
    return [[r[rank] for r in rounds if rank < len(r) and r[rank] is not None] for rank in range(world_size)]


bank.hint("unbalanced", "The fullest rank has {most} tokens of {total}, and {best} is possible. At most 4/3 of the "
          "least possible number is allowed.")  # fmt: skip


@bank.wrong("unbalanced", variant=True)
def balance(lengths, world_size):
    shares = [[] for _ in range(world_size)]
    for place in range(len(lengths)):
        shares[place if place < world_size else 0].append(place)
    return shares


bank.hint("not-the-same-everywhere", "Two calls with the same lengths gave different answers. Every rank computes "
          "the lists by itself, and all must get the same.")  # fmt: skip


@bank.wrong("not-the-same-everywhere", variant=True)
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], random.random()))
    random.shuffle(order)
    order.sort(key=lambda i: -lengths[i])
    shares, loads = [[] for _ in range(world_size)], [0] * world_size
    ranks = list(range(world_size))
    for place in order:
        random.shuffle(ranks)
        rank = min(ranks, key=loads.__getitem__)
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return shares


bank.hint("not-level", "The fullest rank has {most} tokens, and the mean is {best}. With so many sequences the ranks "
          "can be nearly equal: at most 2 % above the mean.")  # fmt: skip


@bank.wrong("not-level", variant=True)
def balance(lengths, world_size):
    """Cut in the order given, where the tokens so far pass a rank's part of all."""
    shares, so_far = [[] for _ in range(world_size)], 0
    for place, length in enumerate(lengths):
        shares[so_far * world_size // sum(lengths)].append(place)
        so_far += length
    return shares


bank.slip("nothing-returned", ("    return shares\n", ""))

bank.hint("not-numbers", "Your lists hold the lengths of the sequences. Return their indices: their places in "
          "`lengths`.")  # fmt: skip
bank.slip("not-numbers", ("shares[rank].append(place)", "shares[rank].append(lengths[place])"), variant=True)

bank.hint("longest-first", "It is right to go to the rank with the fewest tokens. But take the longest sequences "
          "first: if a long one comes last, nothing is left to balance it.")  # fmt: skip
bank.slip(
    "longest-first", ("sorted(range(len(lengths)), key=lambda i: -lengths[i])", "range(len(lengths))"), variant=True
)

bank.hint("shortest-first", "You take the shortest sequences first, so the longest come last and nothing is left to "
          "balance them.")  # fmt: skip
bank.slip("shortest-first", ("key=lambda i: -lengths[i]", "key=lambda i: lengths[i]"))

bank.slip("shortest-first", ("sorted(range(len(lengths)), key=lambda i: -lengths[i])", "sorted(range(len(lengths)), key=lambda i: (lengths[i], i))"), variant=True)  # fmt: skip

bank.hint("numbered-from-one", "You count the places from 1. Indices in Python start at 0.")
bank.slip("numbered-from-one", ("shares[rank].append(place)", "shares[rank].append(place + 1)"), variant=True)

bank.slip("equal-counts", ("tokens + lengths[place]", "tokens + 1"), variant=True)

bank.hint("rank-without-work", "A rank has no sequence, though there are enough. The other ranks would wait for it "
          "at every step.")  # fmt: skip
bank.slip(
    "rank-without-work",
    (
        "loads = [(0, rank) for rank in range(world_size)]",
        "loads = [(0, rank) for rank in range(max(1, world_size - 1))]",
    ),
    variant=True,
)

bank.hint("lengths-changed", "The function changed the list it was given.")
bank.slip("lengths-changed", ("    return shares", "    lengths.sort()\n    return shares"), variant=True)


@bank.right()
def balance(lengths, world_size):
    """No heap: the least loaded rank by looking at all."""
    loads, shares = torch.zeros(world_size, dtype=torch.long), [[] for _ in range(world_size)]
    for place in torch.tensor(lengths).argsort(descending=True, stable=True).tolist():
        rank = int(loads.argmin())
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return tuple(shares)


@bank.right()
def balance(lengths, world_size):
    """Longest first, then exchanges between the fullest and the emptiest while they help."""
    shares = [[] for _ in range(world_size)]

    def load(share):
        return sum(lengths[i] for i in share)

    loads = [0] * world_size
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += lengths[place]
    full, empty = max(shares, key=load), min(shares, key=load)
    for place in list(full):
        if len(full) > 1 and load(empty) + lengths[place] < load(full):
            full.remove(place)
            empty.append(place)
    return shares


@bank.right()
def balance(lengths, world_size):
    """Differences (Karmarkar and Karp, 1982): the two partitions that differ most are laid over each other."""
    heap = []
    for place, length in enumerate(lengths):
        shares = [(length, [place])] + [(0, [])] * (world_size - 1)
        heapq.heappush(heap, (-length, place, shares))
    number = len(lengths)
    while len(heap) > 1:
        (_, _, one), (_, _, two) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(two))]
        both.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
        number += 1
    return [share for _, share in heap[0][2]]
