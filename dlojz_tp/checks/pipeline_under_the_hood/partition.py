"""Balise 1: contiguous stages with the smallest largest cost."""

import operator
import random
import time
from itertools import combinations

from dlojz_tp.checking import Wrong
from dlojz_tp.works.balise import BaliseNotDone

HINTS = {
    "not-bounds": "Return a list of pairs (start, stop), one per stage: stage s is model[start:stop]. You returned "
    "{got}.",
    "stage-count": "You returned {got} stages, but {n} were asked for. Was a table of best cuts overwritten while "
    "it was still being read, or does a loop end one stage too early?",
    "layers-lost": "Layers {missing} aren't in any stage.",
    "not-in-order": "These are the right layers in the wrong order: stage 0 holds the first layers, and each pair "
    "is (start, stop). You returned {got}.",
    "stages-overlap": "A stage begins at layer {got}, but the previous one stops at {stop}. Each stage begins "
    "where the previous one stops.",
    "empty-stage": "Stage {stage} is empty. Each rank needs a layer, even one that costs nothing.",
    "same-number": "These stages have the same number of layers, not the same cost: {costs}.",
    "greedy": "The largest stage costs {largest}, but {best} is possible. Filling each stage up to the average "
    "leaves the rest to the last one: a layer that is put off must go somewhere.",
    "not-optimal": "The largest stage costs {largest}, but {best} is possible: {cut}.",
    "tries-all": "You try all cuts, or nearly all, and their number explodes: 20 layers in 3 stages took "
    "{small:.2g} s, {large} layers in {n} stages {seconds:.2g} s. 200 layers would never finish. "
    "Build on the best cuts of fewer layers.",
    "costs-changed": "You changed the list of costs.",
    "no-error": "{n} layers were to be cut into {stages} stages, but nothing was raised. Raise ValueError when "
    "there are fewer layers than stages, or no stage at all.",
    "other-error": "{n} layers can't be cut into {stages} stages. Raise ValueError for that; you raised {error}.",
}
CASES = [  # costs, stages
    ([1, 1, 1, 1], 2), ([5.0], 1), ([3, 1, 1, 1], 2), ([1, 1, 1, 9], 2), ([9, 1, 1, 1, 1], 3), ([2, 3, 4], 3),
    ([0, 1, 1, 1, 1, 0], 3), ([0.0, 0.0, 0.0], 3), ([0, 0, 5, 0, 0], 4), ([2, 2, 3, 3, 2, 2, 3], 3),
]  # fmt: skip

# whoever fills up to the average, and whoever makes the smallest stage as large as can be, cuts some of them in other places
UNEVEN = [
    ([8, 1, 1, 1, 1, 1, 1, 1], 2),
    ([1, 1, 1, 1, 1, 1, 7, 7], 3),
    ([4, 3, 4, 3, 4, 3], 3),
    ([2, 7, 2, 2], 2),
    ([5, 1, 1, 6, 2, 3, 1, 4], 3),
    ([3, 9, 1, 1, 2, 8, 2], 3),
]
LADDER = [(20, 3), (20, 7), (24, 8), (28, 9), (32, 10), (40, 11), (60, 12), (200, 16)]  # layers, stages


def balise_1(balance):
    """Small cases against all cuts; cases at random; 200 layers; what cannot be cut."""
    yield "ten small models, each compared with every way to cut it"
    for costs, n in CASES:
        _one(balance, costs, n)
    yield "60 models with random costs"
    draw = random.Random(5)
    for _ in range(60):
        n_layers = draw.randint(2, 11)
        costs = [round(draw.choice((draw.random(), 10 * draw.random() ** 4)), 3) for _ in range(n_layers)]
        _one(balance, costs, draw.randint(1, min(5, n_layers)))
    yield "200 layers in a moment"
    _fast(balance, draw)
    yield "fewer layers than stages are refused"
    for costs, n in (([1.0, 2.0], 3), ([], 1), ([1.0], 0)):
        words = {"n": len(costs), "stages": n, "where": _where(costs, n)}
        try:
            balance(list(costs), n)
        except ValueError:
            continue
        except (BaliseNotDone, TypeError):
            raise
        except Exception as error:
            raise Wrong("other-error", error=type(error).__name__, got=repr(error), **words) from error
        raise Wrong("no-error", **words)


def _one(balance, costs, n):
    given = list(costs)
    found = _bounds(balance(given, n), costs, n)
    if given != costs:
        raise Wrong("costs-changed", expected=costs, got=given)
    got, (best, cut) = _largest(costs, found), _best(costs, n)
    if got > best * (1 + 1e-6) + 1e-9:
        counts = [stop - start for start, stop in found]
        sums = [round(sum(costs[a:b]), 3) for a, b in found]
        cases = [(counts, costs, n), *((_counts(balance, *case), *case) for case in UNEVEN)]
        slug = "not-optimal"  # one case alone may look like another mistake by chance
        if all(max(found) - min(found) <= 1 for found, _, _ in cases):
            slug = "same-number"
        elif any(all(found == _greedy(*case, over) for found, *case in cases) for over in (False, True)):
            slug = "greedy"
        raise Wrong(
            slug, expected=f"{cut}, largest {best:.6g}", costs=sums, best=round(best, 3), cut=cut,
            largest=round(got, 3), got=f"{found}, largest {got:.6g}",
            where=_where(costs, n),
        )  # fmt: skip


def _counts(balance, costs, n):
    """Into how many layers a stage the answer cuts."""
    return [stop - start for start, stop in _bounds(balance(list(costs), n), costs, n)]


def _bounds(found, costs, n):
    """The stages as a list of pairs of integers, looked at."""
    try:
        pairs = [(operator.index(start), operator.index(stop)) for start, stop in found]
        len(found)  # a list, or what can be used as one
    except (TypeError, ValueError):
        raise Wrong("not-bounds", got=repr(found)[:80], where=_where(costs, n)) from None
    if len(pairs) != n:
        raise Wrong("stage-count", got=len(pairs), n=n, where=_where(costs, n))
    parts = sorted(sorted(pair) for pair in pairs)
    ends = [0, *(stop for _, stop in parts[:-1])], len(costs)
    if [start for start, _ in parts] == ends[0] and parts[-1][1] == ends[1] and parts != [list(pair) for pair in pairs]:
        raise Wrong("not-in-order", got=pairs, where=_where(costs, n))
    at = 0
    for stage, (start, stop) in enumerate(pairs):
        if start < at or (start > at and stage == 0):
            slug = "stages-overlap" if start < at else "layers-lost"
            raise Wrong(slug, got=start, stop=at, missing=list(range(at, start)), where=_where(costs, n))
        if start > at:
            raise Wrong("layers-lost", missing=list(range(at, start)), where=_where(costs, n))
        if stop <= start:
            raise Wrong("empty-stage", stage=stage, got=pairs, where=_where(costs, n))
        at = stop
    if at != len(costs):
        slug = "layers-lost" if at < len(costs) else "not-bounds"
        raise Wrong(slug, missing=list(range(at, len(costs))), got=pairs, where=_where(costs, n))
    return pairs


def _largest(costs, pairs):
    return max(sum(costs[start:stop]) for start, stop in pairs)


def _best(costs, n):
    """By trying all cuts."""
    every = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), n - 1))
    stages = ([*zip(cuts[:-1], cuts[1:], strict=True)] for cuts in every)
    return min(((_largest(costs, pairs), pairs) for pairs in stages), key=lambda found: found[0])


def _greedy(costs, n, over):
    """Numbers of layers if each stage is filled up to the average, or (over) until the average is reached."""
    target, counts, at = sum(costs) / n, [], 0
    for stage in range(n - 1):
        taken, filled = 1, costs[at]
        while at + taken < len(costs) - (n - stage - 1) and (
            filled < target if over else filled + costs[at + taken] <= target * (1 + 1e-9)
        ):
            filled += costs[at + taken]
            taken += 1
        counts.append(taken)
        at += taken
    return [*counts, len(costs) - at]


def _fast(balance, draw):
    """An exponential answer is caught on sizes that it still ends on; a slow one that only grows with a power passes."""
    small = 0.0
    for n_layers, n in LADDER:
        costs = [draw.random() for _ in range(n_layers)]
        start = time.process_time()
        found = _bounds(balance(list(costs), n), costs, n)
        spent = time.process_time() - start
        if n_layers < 200 and n > 3 and spent > max(0.4, 40 * small):
            raise Wrong("tries-all", small=small, large=n_layers, n=n, seconds=spent, where=_where(costs, n))
        small = small or max(spent, 1e-4)
        _reaches(costs, n, found)


def _reaches(costs, n, found):
    """Whether a slightly smaller largest stage is possible: filling up to a limit tells."""
    got = _largest(costs, found)
    limit = got * (1 - 1e-6)
    stages, filled = 1, 0.0
    for cost in costs:
        if cost > limit:
            return
        if filled + cost > limit:
            stages, filled = stages + 1, 0.0
        filled += cost
    if stages <= n:
        raise Wrong(
            "not-optimal", got=round(got, 4), best="less", cut=f"{n} stages below {limit:.4f}", where=_where(costs, n)
        )


def _where(costs, n):
    shown = str(costs) if len(costs) < 12 else f"{len(costs)} layers"
    return f"balance({shown}, {n})"
