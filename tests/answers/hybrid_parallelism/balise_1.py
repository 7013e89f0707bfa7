"""Answers to balise 1: places and groups in a mesh."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 1, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# NumPy's own digits, and an array of all ranks whose axes are moved
NUMPY = """
import numpy as np


def place_of(rank, sizes):
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(f"rank {rank}, mesh {sizes}")
    return dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values()))))


def rank_at(place, sizes):
    return int(np.ravel_multi_index([place[axis] for axis in sizes], list(sizes.values())))


def groups(axes, sizes):
    names = list(sizes)
    inside = [names.index(axis) for axis in names if axis in axes]
    outside = [k for k in range(len(names)) if k not in inside]
    numbers = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    rows = numbers.transpose(*outside, *inside).reshape(-1, math.prod(sizes[names[k]] for k in inside))
    return sorted(sorted(row) for row in rows.tolist())
"""
bank.text(None, NUMPY)

# strides: how many ranks one step along an axis is; groups by their first rank, which stands at 0 of these axes
STRIDES = """
def stride(axis, sizes):
    names = list(sizes)
    behind = names[names.index(axis) + 1 :]
    return math.prod(sizes[name] for name in behind)


def place_of(rank, sizes):
    n = math.prod(sizes.values())
    if rank < 0 or rank >= n:
        raise ValueError("no such rank")
    return {axis: rank // stride(axis, sizes) % sizes[axis] for axis in sizes}


def rank_at(place, sizes):
    return sum(place[axis] * stride(axis, sizes) for axis in sizes)


def groups(axes, sizes):
    def along(first, rest):
        if not rest:
            return [first]
        step = stride(rest[0], sizes)
        return [r for k in range(sizes[rest[0]]) for r in along(first + k * step, rest[1:])]

    firsts = [r for r in range(math.prod(sizes.values())) if all(place_of(r, sizes)[axis] == 0 for axis in axes)]
    return [along(first, [axis for axis in sizes if axis in axes]) for first in firsts]
"""
bank.text(None, STRIDES)

hint(
    "place-form",
    "place_of must return a dictionary with a coordinate, a whole number, for each axis in `sizes`. Here: {got}",
)
slip("place-form", ("return {axis: place[axis] for axis in sizes}", "return tuple(place[axis] for axis in sizes)"))
slip(
    "place-form",
    (
        "return {axis: place[axis] for axis in sizes}",
        "return {name: place.get(name, 0) for name in ('tensor', 'data', 'pipeline')}",
    ),
)
slip(
    "place-form",
    (
        "left, place[axis] = divmod(left, sizes[axis])",
        "place[axis] = left % sizes[axis]\n        left = left / sizes[axis]",
    ),
    ("if left:", "if not 0 <= rank < math.prod(sizes.values()):"),
)
variant("place-form", NUMPY, ("dict(zip(sizes, np", "list(zip(sizes, np"))

hint(
    "first-axis-first",
    "Ranks count up along the *last* axis first: ranks 0 and 1 differ in the last coordinate. In your answer they "
    "differ in the first one.",
)
slip("first-axis-first", ("in reversed(sizes)", "in sizes"))
variant("first-axis-first", STRIDES, ("behind = names[names.index(axis) + 1 :]", "behind = names[: names.index(axis)]"))

hint(
    "wrong-stride",
    "A step along an axis is as many ranks as the *product* of the sizes of all axes after it. You use the size of "
    "one axis.",
)
slip(
    "wrong-stride",
    ("left, place[axis] = divmod(left, sizes[axis])", "place[axis], left = left // sizes[axis] % sizes[axis], left"),
    ("if left:", "if not 0 <= rank < math.prod(sizes.values()):"),
)
slip(
    "wrong-stride",
    ("left, place[axis] = divmod(left, sizes[axis])", "place[axis] = rank // sizes[axis] % sizes[axis]"),
    ("if left:", "if rank < 0:"),
)
variant(
    "wrong-stride",
    STRIDES,
    ("return {axis: rank // stride(axis, sizes) % sizes[axis]", "return {axis: rank // sizes[axis] % sizes[axis]"),
)

hint(
    "wrong-place",
    "In a mesh of {sizes}, rank {rank} is at {due}, not at {mine}. Coordinates count from 0, and each one stays "
    "below the size of its axis.",
)
slip("wrong-place", ("divmod(left, sizes[axis])\n", "divmod(left, sizes[axis])\n        place[axis] += 1\n"))
slip("wrong-place", ("return {axis: place[axis] for axis in sizes}", "return dict(zip(sizes, place.values()))"))
variant("wrong-place", STRIDES, ("% sizes[axis] for axis in sizes}", "for axis in sizes}"))

hint("rank-outside", "A mesh of n ranks has the ranks 0 to n − 1. For any other, raise ValueError. Here: {got}")
slip(
    "rank-outside",
    (
        '    if left:  # below 0 for a negative rank\n        raise ValueError(f"a mesh of {sizes} has no rank {rank}")\n',
        "",
    ),
)
slip("rank-outside", ("if left:", "if left > 0:"))
variant("rank-outside", STRIDES, ("rank < 0 or rank >= n", "rank > n"))

hint(
    "order-of-place",
    "rank_at returns a different rank when the same place lists its axes in another order. The order of the mesh "
    "is that of `sizes`.",
)
slip(
    "order-of-place",
    (
        "for axis, size in sizes.items():\n        rank = rank * size + place[axis]",
        "for axis, number in place.items():\n        rank = rank * sizes[axis] + number",
    ),
)
slip(
    "order-of-place",
    (
        "for axis, size in sizes.items():\n        rank = rank * size + place[axis]",
        "for number, size in zip(place.values(), sizes.values()):\n        rank = rank * size + number",
    ),
)
variant(
    "order-of-place",
    NUMPY,
    ("[place[axis] for axis in sizes], list(sizes.values())", "list(place.values()), [sizes[axis] for axis in place]"),
)

hint(
    "wrong-rank",
    "rank_at must undo place_of: one step of a coordinate is as many ranks as the product of the sizes of all axes "
    "after it.",
)
slip("wrong-rank", ("in sizes.items():\n        rank", "in reversed(sizes.items()):\n        rank"))
slip("wrong-rank", ("rank = rank * size + place[axis]", "rank += size * place[axis]"))
variant("wrong-rank", STRIDES, ("place[axis] * stride(axis, sizes) for", "place[axis] * sizes[axis] for"))

hint("groups-form", "groups must return a list of groups, each of them a list of ranks. Here: {got}")
slip("groups-form", ("return list(found.values())", "return found"))
slip("groups-form", ("return list(found.values())", "return list(found.values())[0]"))
slip("groups-form", (".append(rank)", ".append(place_of(rank, sizes))"))
variant("groups-form", NUMPY, ("sorted(sorted(row) for row in rows.tolist())", "rows"))

hint(
    "others-vary",
    "The ranks of these groups agree in {axes} and differ in the other axes. The given axes are those in which "
    "they must *differ*: for a mesh of {sizes}, {due} are expected.",
)
slip("others-vary", ("if axis not in axes", "if axis in axes"))
variant("others-vary", NUMPY, ("if axis in axes]", "if axis not in axes]"))

hint(
    "one-axis-of-several",
    "Of the axes {axes}, only one varies in these groups. For a mesh of {sizes}, {due} are expected.",
)
slip("one-axis-of-several", ("if axis not in axes", "if axis not in axes[:1]"))
variant("one-axis-of-several", STRIDES, ("firsts = ", "axes = axes[-1:]\n    firsts = "))

hint(
    "not-once",
    "Each rank must be in exactly one group; here some are in none, or in two. For {axes} of a mesh of {sizes}, "
    "{due} are expected.",
)
slip("not-once", ("return list(found.values())", "return [one for one in found.values() if 0 in one]"))
slip("not-once", ("return list(found.values())", "return [one for one in found.values() if len(one) > 1]"))
variant(
    "not-once",
    STRIDES,
    (
        "firsts = [r for r in range(math.prod(sizes.values())) if all(place_of(r, sizes)[axis] == 0 for axis in axes)]",
        "firsts = range(math.prod(sizes.values()))",
    ),
)

hint("no-axis", "When no axis is given, no ranks differ: each rank is a group by itself, [[0], [1], [2], …].")
slip("no-axis", ("found = {}", "found = {}\n    if not axes:\n        return []"))
slip("no-axis", ("found = {}", "found = {}\n    axes = axes or list(sizes)"))
variant("no-axis", STRIDES, ("firsts = ", "axes = axes if axes else list(sizes)\n    firsts = "))

hint(
    "digits-joined",
    "The groups are right in small meshes. With 12 × 11 ranks, the places (1, 10) and (11, 0) get the same key: a "
    "tuple of numbers keeps them apart.",
)
slip("digits-joined", ("others = tuple(number for", "others = ''.join(str(number) for"))
slip("digits-joined", ("others = tuple(number for", "others = sum(10**list(sizes).index(axis) * number for"))
variant(
    "digits-joined",
    STRIDES,
    (
        "    firsts = [r",
        "    kept = [axis for axis in sizes if axis not in axes]\n    by = {}\n    for r in range(math.prod(sizes.values())):\n"
        "        place = place_of(r, sizes)\n        by.setdefault(int('1' + ''.join(str(place[axis]) for axis in kept)), []).append(r)\n"
        "    return list(by.values())\n    firsts = [r",
    ),
)

hint("wrong-groups", "Ranks share a group if they differ only in {axes}. For a mesh of {sizes}, {due} are expected.")
NEIGHBOURS = "size = math.prod(sizes[axis] for axis in axes)\n    n = math.prod(sizes.values())\n    return [list(range(k, k + size)) for k in range(0, n, size)]\n    found = {}"
slip("wrong-groups", ("found = {}", NEIGHBOURS))
variant("wrong-groups", NUMPY, ("numbers.transpose(*outside, *inside).reshape", "numbers.reshape"))

hint(
    "groups-order",
    "The groups are right, but the order in them is not: list the ranks of a group in increasing order.",
)
slip(None, ("return list(found.values())", "return list(found.values())[::-1]"))
slip("groups-order", ("return list(found.values())", "return [one[::-1] for one in found.values()]"))
variant("groups-order", NUMPY, ("sorted(sorted(row) for row in rows.tolist())", "rows[:, ::-1].tolist()"))
variant("groups-order", STRIDES, ("[axis for axis in sizes if axis in axes]", "list(axes)"))

hint("sizes-changed", "`sizes` has changed after these calls. It belongs to the caller: work on a copy.")
slip("sizes-changed", ("return list(found.values())", "sizes.clear()\n    return list(found.values())"))
variant("sizes-changed", NUMPY, ("return sorted(sorted", "sizes.popitem()\n    return sorted(sorted"))

bank.edge("digits-joined", "groups-order", "no-axis", "order-of-place", "rank-outside", "sizes-changed")
