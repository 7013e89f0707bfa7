"""Balise 1: places of ranks in a mesh, and the groups of its axes. No rank runs: numbers alone."""

import itertools

import torch

from dlojz_tp.checking.looks import Look, Value, judged, silent, tried

MESHES = [
    {"pipeline": 2, "data": 3, "tensor": 4},
    {"tensor": 3, "pipeline": 5},
    {"data": 6},
    {"pod": 2, "pipeline": 1, "data": 3, "tensor": 2, "context": 2},
    {"pipeline": 1, "data": 1, "tensor": 1},
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
    right = [isinstance(one, dict) and set(one) == set(sizes) for sizes, all_of in zip(MESHES, found) for one in all_of]
    yield {"place form": "such a dictionary" if all(right) else f"{type(found[0][0]).__name__} {found[0][0]}"}
    tables = [[[int(one[axis]) for axis in sizes] for one in all_of] for sizes, all_of in zip(MESHES, found)]
    yield {"places": torch.cat([torch.tensor(table).flatten() for table in tables]).double()}
    outside = [(k, rank) for k, n in enumerate(NUMBERS) for rank in (n.numel(), n.numel() + 7, -1)]
    yield {"outside": [str(tried(call, place_of, rank, k)).split(":")[0] for k, rank in outside]}
    back = []
    for k, (sizes, places) in enumerate(PLACES):
        for place in places.tolist():
            pairs = list(zip(sizes, place))
            back += [call(rank_at, dict(order), k) for order in (pairs, pairs[::-1])]
    yield {"ranks": torch.tensor([float("nan") if r is None else float(r) for r in back], dtype=torch.float64)}
    made = [call(groups, list(axes), k) for k, axes in CHOICES]
    lists = all(isinstance(all_of, list) and all(isinstance(one, list) for one in all_of) for all_of in made)
    yield {"group form": "a list of lists" if lists else f"{type(made[0]).__name__} {str(made[0])[:60]}"}
    yield {"groups": torch.cat([_first_of(all_of, NUMBERS[k].numel()) for (k, _), all_of in zip(CHOICES, made)])}
    yield {"in order": made, "changed": any(changed)}


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
    return "not-once" if (seen < 0).any() else "wrong-groups"


def _example(seen, due):
    """The first choice of axes whose groups are wrong."""
    sizes = [NUMBERS[k].numel() for k, _ in CHOICES]
    parts = zip(CHOICES, seen.split(sizes), due.split(sizes))
    k, axes = next(choice for choice, mine, true in parts if not torch.equal(mine, true))
    return silent(seen, due) | {"axes": axes, "sizes": MESHES[k], "due": _true_groups(k, axes).tolist()}


TRUE = [_true_groups(k, axes).tolist() for k, axes in CHOICES]
LOOKS = [
    Look("place_of: a coordinate for each axis of the mesh", "place form", "such a dictionary", "place-form"),
    Value("the places of all ranks, in meshes of 1 to 5 axes", "places",
          torch.cat([places.flatten() for _, places in PLACES]).double(), "wrong-place", fields=silent),
    Look("a rank that the mesh has not: ValueError", "outside", ["ValueError"] * 3 * len(MESHES), "rank-outside",
         fields=lambda seen, due: {"got": next(one for one in seen if one != "ValueError"), "expected": "ValueError"}),
    Value("rank_at: back again, whatever the order in `place`", "ranks",
          torch.cat([torch.arange(len(places)).repeat_interleave(2) for _, places in PLACES]).double(), "wrong-rank", fields=silent),
    Look("groups: a list of lists of ranks", "group form", "a list of lists", "groups-form"),
    Look("who is in a group with whom: no axis, one, two, all", "groups",
         torch.cat([_first_of(all_of, NUMBERS[k].numel()) for (k, _), all_of in zip(CHOICES, TRUE)]), _of_groups, fields=_example),
    Look("ranks count up in a group, groups by their first rank", "in order", TRUE, "groups-order", fields=silent),
    Look("`sizes` stays as it is", "changed", False, "sizes-changed"),
]  # fmt: skip


def balise_1(place_of, rank_at, groups):
    yield from judged(LOOKS, observe, place_of, rank_at, groups)
