"""Balise 2: each rank's share of the data."""

import itertools
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import case_by_case
from dlojz_tp.judging.probes.shared_looks import recognised


class Case(NamedTuple):
    n: int
    size: int
    epoch: int = 0
    drop_last: bool = False

    @property
    def each(self) -> int:
        """Indices of a rank."""
        return self.n // self.size if self.drop_last else -(-self.n // self.size)

    def __str__(self):
        return f"n = {self.n}, {self.size} ranks, drop_last={self.drop_last}"


CASES = {
    "12 samples over 1, 2, 3 and 4 ranks: disjoint shares of equal length, together complete":
        [Case(12, size) for size in (1, 2, 3, 4)],
    "a tail: 10, 13 and 1003 samples, padded":
        [Case(*pair, epoch=1) for pair in ((10, 4), (13, 3), (13, 4), (1003, 4), (1003, 7))],
    "a tail, dropped":
        [Case(*pair, epoch=1, drop_last=True) for pair in ((12, 3), (10, 4), (13, 4), (1003, 7), (3, 4))],
    "fewer samples than ranks": [Case(*pair, epoch=2) for pair in ((1, 4), (3, 4), (2, 7))],
}  # fmt: skip
INTEGERS = "a list of int"


def asked(my_indices, case, seed=0):
    """(the shares of all ranks, each in a random state of its own; whether one after the first changed torch's)."""
    shares, changed = [], False
    for rank in range(case.size):
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(1000 + rank)
        before = torch.get_rng_state()
        shares.append(plain(my_indices(case.n, rank, case.size, case.epoch, seed=seed, drop_last=case.drop_last)))
        changed |= rank > 0 and not torch.equal(before, torch.get_rng_state())
    return shares, changed


def plain(found):
    """A share as a list of int; in a word what it is, if it cannot be one; None for None."""
    if found is None:
        return None
    try:
        found = found if hasattr(found, "tolist") else list(found)
    except TypeError:
        return "no list"
    if isinstance(found, torch.Tensor) or any(isinstance(i, torch.Tensor) for i in found):
        return "tensors"
    found = found.tolist() if hasattr(found, "tolist") else [i.item() if hasattr(i, "item") else i for i in found]
    return found if isinstance(found, list) and all(type(i) is int for i in found) else "no integers"


def observe(my_indices, case):
    shares, changed = asked(my_indices, case)
    kind = next((share for share in shares if not isinstance(share, list)), INTEGERS)
    return {"case": case, "kind": kind, "shares": shares, "changed": changed}


def outside(got):
    """Indices that there are not."""
    last = got["case"].n - 1
    bad = [i for share in got["shares"] for i in share if not 0 <= i <= last]
    return bad and ("out-of-range", {"expected": f"0 to {last}", "got": bad})


def global_state(got):
    """Where the random state of all was changed: whether the permutation came from it."""
    if not got["changed"]:
        return None
    flat = sum(got["shares"], [])
    return "global-generator" if len({*flat}) < min(got["case"].n, len(flat)) else "global-state-changed", {}


def fault(lengths, counts, case):
    """What is wrong with shares of these lengths, in which each index comes so often; "" if nothing is."""
    n, size, each, few = case.n, case.size, case.each, case.n < case.size
    if size > 1 and not few and {*lengths} == {n}:
        return "everything-everywhere"
    if len({*lengths}) > 1:
        return "few-samples" if few else "lengths-differ"
    if lengths[0] > each:
        return "drop-last-ignored" if case.drop_last else "too-many"
    if lengths[0] < each:
        return "too-few" if case.drop_last else "few-samples" if few else "tail-lost"
    most = max(counts.values(), default=0)
    # the padding alone cannot make samples disappear: then the ranks have drawn differently
    if most > 1 if case.drop_last else len(counts) < n:
        return "shuffles-differ" if size > 1 else "drawn-again"
    return "padded-with-one" if most > -(-each * size // n) else ""


def whole(got):
    """The shares together."""
    case, shares, lengths = got["case"], got["shares"], [len(share) for share in got["shares"]]
    due = [case.each] * case.size
    counts = Counter(sum(shares, []))
    expected, found = (due, lengths) if lengths != due else ("", shares if case.n < 20 else "")
    told = case._asdict() | {"expected": expected, "got": found, "lengths": lengths, "count": lengths[0]}
    slug = fault(lengths, counts, case)
    missing = [i for i in range(case.n) if not counts[i]]
    return slug and (slug, told | {"each": case.each, "missing": missing[:8]})


def observe_orders(my_indices):
    """Two epochs and two seeds of 1000 samples over 4 ranks shall have nothing in common."""

    def shares(epoch, seed=0):
        return asked(my_indices, Case(1000, 4, epoch), seed)[0]

    at_3 = shares(3)
    yield {"again": shares(3) == at_3}
    epochs = [shares(epoch) for epoch in (0, 1, 2, 5, 10, 50, 100)]
    pairs = list(itertools.combinations(epochs, 2))
    ways = itertools.combinations(map(turns, epochs), 2)
    yield {
        "same": any(one == other for one, other in pairs),
        "ascending": any(all(share == sorted(share) for share in one) for one in epochs[1:]),
        "turned": any(len(a & b) > len(a) // 10 for a, b in ways),  # two random orders share one in a hundred
        "own": any(all({*a} == {*b} for a, b in zip(*pair, strict=True)) for pair in pairs),
        "stepped": any(map(stepped, epochs[1:])),
    }
    of_42 = [shares(epoch, seed=42) for epoch in (0, 1, 2)]
    yield {"same of 42": of_42[0] in of_42[1:], "seed": at_3 == shares(3, seed=17) or epochs[0] == shares(0, seed=17)}
    before = others()
    my_indices(1000, 1, 4, 3, seed=5, drop_last=False)
    yield {"others": others() == before}
    # fair permutations leave one sample out thirty times only once in 10 to the power of 20 runs
    ever = sum((share for epoch in range(30) for share in asked(my_indices, Case(10, 4, epoch, drop_last=True))[0]), [])
    yield {"never": sorted({*range(10)} - {*ever})}


def turns(shares):
    """The pairs of successive steps from neighbour to neighbour, in either direction: shifts and turns change none."""
    steps = [[min((b - a) % 1000, (a - b) % 1000) for a, b in zip(s, s[1:])] for s in shares]
    return {tuple(sorted(pair)) for one in steps for pair in zip(one, one[1:])}


def stepped(shares):
    """Whether one difference between neighbours, which is rare in a random order, is that of a quarter."""
    steps = Counter((b - a) % 1000 for s in shares for a, b in zip(s, s[1:]))
    return max(steps.values()) > steps.total() // 4


def others():
    """The global random states of Python and NumPy, from which augmentations draw."""
    _, words, place, *_ = np.random.get_state()
    return random.getstate(), words.tobytes(), place


SHARES = [
    Look("", "kind", INTEGERS, lambda seen, _: "tensors-not-numbers" if seen == "tensors" else "not-integers"),
    *(recognised("", find) for find in (outside, global_state, whole)),
]
ORDERS = [
    Look("another order in each epoch and for each seed; the same order for the same epoch and seed", "again", True,
         "not-reproducible"),
    Look("", "same", False, "same-every-epoch"), Look("", "ascending", False, "ascending"),
    Look("", "turned", False, "rotated"), Look("", "own", False, "own-share-shuffled"),
    Look("", "same of 42", False, "same-every-epoch"), Look("", "stepped", False, "rotated"),
    Look("", "seed", False, "seed-ignored"), Look("", "others", True, "global-state-changed"),
    Look("with drop_last, each sample is used in some epoch", "never", [], "tail-never-seen",
         fields=lambda seen, due: silent(seen, due) | {"missing": seen, "where": "n = 10, 4 ranks, 30 epochs"}),
]  # fmt: skip


def refuse(*_, **__):
    raise Wrong("sampler-borrowed")


def balise_2(my_indices):
    """Shares of 1 to 4 ranks, and of 7, for sizes that divide, do not divide, and are smaller than the world."""
    with replaced(torch.utils.data.DistributedSampler, "__init__", refuse):
        yield from case_by_case(CASES, SHARES, observe, my_indices)
        yield from judged(ORDERS, observe_orders, my_indices, where="n = 1000, 4 ranks")
