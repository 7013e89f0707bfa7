"""Balise 1: places of ranks in a mesh, and the groups of its axes. No rank runs: numbers alone."""

import itertools

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, tried

MESHES = [
    {"pipeline": 2, "data": 3, "tensor": 4},
    {"tensor": 3, "pipeline": 5},
    {"data": 6},
    {"pod": 2, "pipeline": 1, "data": 3, "tensor": 2, "context": 2},
    {"pipeline": 1, "data": 1, "tensor": 1},
    {"data": 12, "tensor": 11},  # places such as 1, 10 and 11, 0
]
NUMBERS = [torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values()) for sizes in MESHES]
PLACES = [(sizes, torch.cartesian_prod(*map(torch.arange, sizes.values())).view(-1, len(sizes))) for sizes in MESHES]


def _axes(sizes):
    """Some choices of axes, in the mesh's order and not: none, one, two, all."""
    pairs = [pair[::-1] for pair in itertools.combinations(sizes, 2)]
    return [[], *([axis] for axis in sizes), *map(list, pairs), list(sizes)]


CHOICES = [(k, axes) for k, sizes in enumerate(MESHES) for axes in _axes(sizes)]


def _true_groups(k, axes):
    """All groups, by moving these axes to the end: (groups, ranks)."""
    sizes = list(MESHES[k])
    dims = [sizes.index(axis) for axis in sizes if axis in axes]
    numbers = NUMBERS[k].movedim(dims, list(range(-len(dims), 0))) if dims else NUMBERS[k]
    return numbers.reshape(-1, torch.Size(NUMBERS[k].shape[d] for d in dims).numel())


def observe(place_of, rank_at, groups):
    changed = []

    def call(fn, what, k):
        """fn(what, a copy of mesh k); whether it changed the copy is noted."""
        sizes = dict(MESHES[k])
        got = fn(what, sizes)
        changed.append(sizes != MESHES[k])
        return got

    found = [[call(place_of, rank, k) for rank in range(n.numel())] for k, n in enumerate(NUMBERS)]
    wrong = [f"{one!r} for rank {rank} of {MESHES[k]}" for k, all_of in enumerate(found)
             for rank, one in enumerate(all_of) if not _is_place(one, MESHES[k])]  # fmt: skip
    yield {"place form": wrong[0] if wrong else "such a dictionary"}
    tables = [[[int(one[axis]) for axis in sizes] for one in all_of] for sizes, all_of in zip(MESHES, found)]
    yield {"places": torch.cat([torch.tensor(table).flatten() for table in tables]).double()}
    outside = [(k, rank) for k, n in enumerate(NUMBERS) for rank in (n.numel(), n.numel() + 7, -1)]
    answers = [(k, rank, tried(call, place_of, rank, k)) for k, rank in outside]
    yield {"outside": [_refusal(got) or f"{got!r} for rank {rank} of {MESHES[k]}" for k, rank, got in answers]}
    back = []
    for k, (sizes, places) in enumerate(PLACES):
        for place in places.tolist():
            pairs = list(zip(sizes, place))
            back += [call(rank_at, dict(order), k) for order in (pairs, pairs[::-1])]
    numbers = [float("nan") if r is None else float(r) for r in back]
    ranks = None if all(r is None for r in back) else torch.tensor(numbers, dtype=torch.float64)
    yield {"ranks": ranks if ranks is None else ranks[::2], "turned": ranks if ranks is None else ranks[1::2]}
    made = [call(groups, list(axes), k) for k, axes in CHOICES]
    wrong = [f"{type(one).__name__} {str(one)[:60]}" for one in made if not _is_groups(one)]
    yield {"group form": wrong[0] if wrong else "a list of lists"}
    yield {"groups": torch.cat([_first_of(all_of, NUMBERS[k].numel()) for (k, _), all_of in zip(CHOICES, made)])}
    yield {"in order": [sorted(all_of) for all_of in made], "changed": any(changed)}


def _is_place(one, sizes):
    return isinstance(one, dict) and set(one) == set(sizes) and all(int(number) == number for number in one.values())


def _refusal(got):
    """The name of an error that was raised; "" where a value came back."""
    return got.split(":")[0] if isinstance(got, str) else ""


def _is_groups(made):
    lists = isinstance(made, list) and all(isinstance(one, list) for one in made)
    return lists and all(hasattr(rank, "__index__") for one in made for rank in one)


def _first_of(all_of, n):
    """For each rank, the smallest rank of its group: two numbers that say the partition; -1 where it is in none or more."""
    first = torch.full((n,), -1.0, dtype=torch.float64)
    members = [rank for one in all_of for rank in one]
    for one in all_of:
        for rank in one:
            if members.count(rank) == 1 and 0 <= rank < n:
                first[rank] = min(one)
    return first


def _of_groups(seen, due):
    """The hint: recognised where every rank of the groups has another one's partition."""
    for slug, change in (("others-vary", lambda k, axes: [a for a in MESHES[k] if a not in axes]),
                         ("one-axis-of-several", lambda k, axes: axes[:1]),
                         ("one-axis-of-several", lambda k, axes: axes[-1:])):  # fmt: skip
        other = torch.cat(
            [_first_of(_true_groups(k, change(k, axes)).tolist(), NUMBERS[k].numel()) for k, axes in CHOICES]
        )
        if torch.equal(seen, other):
            return slug
    wrong = [choice for choice, mine, true in _parts(seen, due) if not torch.equal(mine, true)]
    if all(k == len(MESHES) - 1 for k, _ in wrong):
        return "digits-joined"
    if not any(axes for _, axes in wrong):
        return "no-axis"
    return "not-once" if (seen < 0).any() else "wrong-groups"


def _parts(seen, due):
    """(choice of axes, partition, the true one) of each choice."""
    sizes = [NUMBERS[k].numel() for k, _ in CHOICES]
    return zip(CHOICES, seen.split(sizes), due.split(sizes))


def _example(seen, due):
    """The first choice of axes whose groups are wrong; no axis at all only where no other is."""
    wrong = [choice for choice, mine, true in _parts(seen, due) if not torch.equal(mine, true)]
    k, axes = next((choice for choice in wrong if choice[1]), wrong[0])
    return silent(seen, due) | {"axes": axes, "sizes": MESHES[k], "due": _true_groups(k, axes).tolist()}


def _place(seen, due):
    """The first rank whose place is wrong."""
    ranks = [(sizes, rank, place) for sizes, places in PLACES for rank, place in enumerate(places.tolist())]
    mine = seen.long().split([len(sizes) for sizes, _, _ in ranks])
    sizes, rank, true, got = next((*one, got.tolist()) for one, got in zip(ranks, mine) if got.tolist() != one[2])
    shown = {"due": dict(zip(sizes, true)), "mine": dict(zip(sizes, got))}
    return silent(seen, due) | {"rank": rank, "sizes": sizes} | shown


TRUE = [_true_groups(k, axes).tolist() for k, axes in CHOICES]
RANKS = torch.cat([torch.arange(len(places)) for _, places in PLACES]).double()
LOOKS = [
    Look("place_of: a coordinate for each axis of the mesh", "place form", "such a dictionary", "place-form"),
    Value("the coordinates of all ranks, in meshes of 1 to 5 axes", "places",
          torch.cat([places.flatten() for _, places in PLACES]).double(), "wrong-place", fields=_place),
    Look("a rank that the mesh does not have: ValueError", "outside", ["ValueError"] * 3 * len(MESHES), "rank-outside",
         fields=lambda seen, due: {"got": next(one for one in seen if one != "ValueError"), "expected": "ValueError"}),
    Value("rank_at: back again", "ranks", RANKS, "wrong-rank", fields=silent),
    Look("any order of the axes in `place`", "turned", RANKS, "order-of-place", fields=silent),
    Look("groups: a list of lists of ranks", "group form", "a list of lists", "groups-form"),
    Look("which ranks share a group: for no axis, one, two, all", "groups",
         torch.cat([_first_of(all_of, NUMBERS[k].numel()) for (k, _), all_of in zip(CHOICES, TRUE)]), _of_groups, fields=_example),
    Look("ranks are in increasing order in a group", "in order", TRUE, "groups-order", fields=silent),
    Look("`sizes` stays as it is", "changed", False, "sizes-changed"),
]  # fmt: skip


def balise_1(place_of, rank_at, groups):
    yield from judged(LOOKS, observe, place_of, rank_at, groups)
