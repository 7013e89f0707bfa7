"""Answers to balise 1 of 15_pipeline_under_the_hood: cut the model evenly."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 1, whole=True)


bank.hint(
    "same-number",
    "These stages have the same number of layers, not the same cost: {costs}.",
)


@bank.wrong("same-number")
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    cuts = [round(len(costs) * s / n_stages) for s in range(n_stages + 1)]
    return list(zip(cuts[:-1], cuts[1:]))


bank.hint(
    "greedy",
    "The largest stage costs {largest}, but {best} is possible. Filling each stage up to the average "
    "leaves the rest to the last one: a layer that is put off must go somewhere.",
)


@bank.wrong("greedy")
def balance(costs, n_stages):
    """Fill each stage up to the average."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    target, stages, at = sum(costs) / n_stages, [], 0
    for s in range(n_stages - 1):
        stop, filled = at + 1, costs[at]
        while stop < len(costs) - (n_stages - s - 1) and filled + costs[stop] <= target * (1 + 1e-9):
            filled += costs[stop]
            stop += 1
        stages.append((at, stop))
        at = stop
    return [*stages, (at, len(costs))]


bank.hint(
    "not-optimal",
    "The largest stage costs {largest}, but {best} is possible: {cut}.",
)


@bank.wrong("not-optimal")
def balance(costs, n_stages):
    """Cut the largest stage in two, again and again."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    stages = [(0, len(costs))]
    while len(stages) < n_stages:
        k = max((k for k, (a, b) in enumerate(stages) if b - a > 1), key=lambda k: sum(costs[slice(*stages[k])]))
        a, b = stages[k]
        cut = min(range(a + 1, b), key=lambda c: max(sum(costs[a:c]), sum(costs[c:b])))
        stages[k : k + 1] = [(a, cut), (cut, b)]
    return stages


bank.hint(
    "tries-all",
    "You try all cuts, or nearly all, and their number explodes: 20 layers in 3 stages took "
    "{small:.2g} s, {large} layers in {n} stages {seconds:.2g} s. 200 layers would never finish. "
    "Build on the best cuts of fewer layers.",
)


@bank.wrong("tries-all")
def balance(costs, n_stages):
    from itertools import combinations

    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = None
    for cuts in combinations(range(1, len(costs)), n_stages - 1):
        cuts = [0, *cuts, len(costs)]
        largest = max(sum(costs[a:b]) for a, b in zip(cuts[:-1], cuts[1:]))
        if best is None or largest < best[0]:
            best = largest, cuts
    return list(zip(best[1][:-1], best[1][1:]))


bank.hint(
    "empty-stage",
    "Stage {stage} is empty. Each rank needs a layer, even one that costs nothing.",
)


@bank.wrong("empty-stage")
def balance(costs, n_stages):
    """Search the limit, but never fill up the stages that are left over."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle, stages, filled = (low + high) / 2, 1, 0
        for cost in costs:
            if filled + cost > middle:
                stages, filled = stages + 1, 0
            filled += cost
        low, high = (low, middle) if stages <= n_stages else (middle, high)
    cuts, filled = [0], 0
    for k, cost in enumerate(costs):
        if filled + cost > high * (1 + 1e-12):
            cuts.append(k)
            filled = 0
        filled += cost
    cuts += [len(costs)] * (n_stages + 1 - len(cuts))
    return list(zip(cuts[:-1], cuts[1:]))


bank.hint(
    "no-error",
    "{n} layers were to be cut into {stages} stages, but nothing was raised. Raise ValueError when "
    "there are fewer layers than stages, or no stage at all.",
)


@bank.wrong("no-error")
def balance(costs, n_stages):
    n_stages = min(n_stages, len(costs))
    if not n_stages:
        return []
    return _fill(costs, n_stages)


bank.hint(
    "not-bounds",
    "Return a list of pairs (start, stop), one per stage: stage s is model[start:stop]. You returned {got}.",
)


@bank.wrong("not-bounds")
def balance(costs, n_stages):
    """Only where the stages begin."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [start for start, _ in _fill(costs, n_stages)]


bank.hint(
    "stage-count",
    "You returned {got} stages, but {n} were asked for. Was a table of best cuts overwritten while "
    "it was still being read, or does a loop end one stage too early?",
)


@bank.wrong("stage-count")
def balance(costs, n_stages):
    """One cut too many."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return _fill(costs, min(n_stages + 1, len(costs)))


bank.hint(
    "layers-lost",
    "Layers {missing} aren't in any stage.",
)


@bank.wrong("layers-lost")
def balance(costs, n_stages):
    """stop is meant as the last layer of the stage."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(start, stop - 1) if stop - start > 1 else (start, stop) for start, stop in _fill(costs, n_stages)]


bank.hint(
    "stages-overlap",
    "A stage begins at layer {got}, but the previous one stops at {stop}. Each stage begins "
    "where the previous one stops.",
)


@bank.wrong("stages-overlap")
def balance(costs, n_stages):
    """Each stage begins with the last layer of the one before."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(max(start - 1, 0), stop) for start, stop in _fill(costs, n_stages)]


bank.hint(
    "costs-changed",
    "You changed the list of costs.",
)


@bank.wrong("costs-changed")
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    found = _fill(costs, n_stages)
    costs.sort()
    costs.append(0)
    return found


@bank.wrong("not-optimal", variant=True)
def balance(costs, n_stages):
    """The smallest sum of squares: costs that are alike, and not the smallest largest one."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = {j: (sum(costs[:j]) ** 2, [0, j]) for j in range(1, len(costs) + 1)}
    for s in range(2, n_stages + 1):
        best = {
            j: min((best[i][0] + sum(costs[i:j]) ** 2, [*best[i][1], j]) for i in range(s - 1, j))
            for j in range(s, len(costs) + 1)
        }
    cuts = best[len(costs)][1]
    return list(zip(cuts[:-1], cuts[1:]))


@bank.wrong("greedy", variant=True)
def balance(costs, n_stages):
    """Close a stage as soon as the average is reached."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    target, stages, start, filled = sum(costs) / n_stages, [], 0, 0
    for k, cost in enumerate(costs):
        filled += cost
        left = n_stages - len(stages) - 1
        if left and (filled >= target or len(costs) - k - 1 == left):
            stages.append((start, k + 1))
            start, filled = k + 1, 0
    return [*stages, (start, len(costs))]


@bank.wrong("tries-all", variant=True)
def balance(costs, n_stages):
    """All cuts but those that are worse already: fast on 24 layers, and not on more."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = [float("inf"), None]

    def go(at, left, worst, stages):
        if worst >= best[0]:
            return
        if left == 1:
            worst = max(worst, sum(costs[at:]))
            if worst < best[0]:
                best[:] = worst, [*stages, (at, len(costs))]
            return
        for stop in range(at + 1, len(costs) - left + 2):
            go(stop, left - 1, max(worst, sum(costs[at:stop])), [*stages, (at, stop)])

    go(0, n_stages, 0, [])
    return best[1]


bank.hint(
    "not-in-order",
    "These are the right layers in the wrong order: stage 0 holds the first layers, and each pair "
    "is (start, stop). You returned {got}.",
)


@bank.wrong("not-in-order")
def balance(costs, n_stages):
    """From the last stage to the first, as the table is read."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return _fill(costs, n_stages)[::-1]


@bank.wrong("not-bounds", variant=True)
def balance(costs, n_stages):
    """A generator: balance(...)[0] would fail, and nothing is raised until it is read."""
    yield from _fill(costs, n_stages)


bank.hint(
    "other-error",
    "{n} layers can't be cut into {stages} stages. Raise ValueError for that; you raised {error}.",
)


@bank.wrong("other-error")
def balance(costs, n_stages):
    assert 1 <= n_stages <= len(costs)
    return _fill(costs, n_stages)


def _fill(costs, n_stages):
    """The best cut: fill up to a limit, for each possible limit from below."""
    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    low, high = 0, len(sums) - 1

    def cut(limit):
        stages, at = [], 0
        for s in range(n_stages):
            stop, filled = at, 0
            while stop < len(costs) - (n_stages - s - 1) and (
                stop == at or filled + costs[stop] <= limit * (1 + 1e-12)
            ):
                filled += costs[stop]
                stop += 1
            stages.append((at, stop))
            at = stop
        worst = max(sum(costs[a:b]) for a, b in stages)
        return stages if at == len(costs) and worst <= limit * (1 + 1e-9) + 1e-12 else None

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(sums[middle]) else (middle + 1, high)
    return cut(sums[low])


@bank.wrong("stage-count", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return _fill(costs, max(n_stages - 1, 1))


@bank.wrong("layers-lost", variant=True)
def balance(costs, n_stages):
    """The last layer is never reached."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    *others, (start, stop) = _fill(costs, n_stages)
    return [*others, (start, max(stop - 1, start + 1))]


@bank.wrong("not-in-order", variant=True)
def balance(costs, n_stages):
    """(stop, start)"""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(stop, start) for start, stop in _fill(costs, n_stages)]


@bank.wrong("stages-overlap", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(start, min(stop + 1, len(costs))) for start, stop in _fill(costs, n_stages)]


@bank.wrong("empty-stage", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(0, 0), *_fill(costs, n_stages - 1)] if n_stages > 1 else _fill(costs, 1)


@bank.wrong("same-number", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    each, more = divmod(len(costs), n_stages)
    starts = [s * each + min(s, more) for s in range(n_stages + 1)]
    return list(zip(starts, starts[1:]))


@bank.wrong("costs-changed", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    found = _fill(costs, n_stages)
    costs.reverse()
    return found


@bank.wrong("no-error", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        return [(0, len(costs))]
    return _fill(costs, n_stages)


@bank.wrong("other-error", variant=True)
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise IndexError("too few layers")
    return _fill(costs, n_stages)


@bank.right()
def balance(costs, n_stages):
    """Search the limit by halving, then fill up to it."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError("too many stages")
    low, high = max(costs), sum(costs)
    for _ in range(80):
        limit = (low + high) / 2
        stages, filled = 1, 0.0
        for cost in costs:
            if filled + cost > limit:
                stages, filled = stages + 1, 0.0
            filled += cost
        low, high = (low, limit) if stages <= n_stages else (limit, high)
    pairs, at = [], 0
    for left in reversed(range(n_stages)):
        stop, filled = at + 1, costs[at]
        while stop < len(costs) - left and filled + costs[stop] <= high + 1e-9:
            filled += costs[stop]
            stop += 1
        pairs.append((at, stop))
        at = stop
    return pairs


@bank.right()
def balance(costs, n_stages):
    """Top down, remembered."""
    from functools import cache
    from itertools import accumulate

    if n_stages < 1 or n_stages > len(costs):
        raise ValueError(f"no way to cut {len(costs)} layers into {n_stages}")
    total = [0, *accumulate(costs)]

    @cache
    def best(j, s):
        if s == 1:
            return total[j], 0
        return min((max(best(i, s - 1)[0], total[j] - total[i]), i) for i in range(s - 1, j))

    cuts = [len(costs)]
    for s in range(n_stages, 0, -1):
        cuts.append(best(cuts[-1], s)[1])
    cuts.reverse()
    return [[a, b] for a, b in zip(cuts, cuts[1:])]


@bank.right()
def balance(costs, n_stages):
    """A table with numpy."""
    import numpy as np

    n = len(costs)
    if not 0 < n_stages <= n:
        raise ValueError
    total = np.concatenate([[0.0], np.cumsum(costs)])
    best, came = total.copy(), []
    best[0] = np.inf
    for _ in range(n_stages - 1):
        new, origin = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=int)
        for j in range(1, n + 1):
            values = np.maximum(best[:j], total[j] - total[:j])
            origin[j] = values.argmin()
            new[j] = values[origin[j]]
        best = new
        came.append(origin)
    stop, pairs = n, []
    for origin in reversed(came):
        pairs.append((origin[stop], stop))
        stop = origin[stop]
    return [(0, stop), *reversed(pairs)]


@bank.right()
def balance(costs, n_stages):
    """Top down, and slow: every sum is made anew, every best cut is copied. It does not explode."""
    if n_stages <= 0 or len(costs) < n_stages:
        raise ValueError("too few layers, or no stage")
    known = {}

    def best(start, left):
        if left == 1:
            return sum(costs[start:]), ((start, len(costs)),)
        if (start, left) not in known:
            options = []
            for stop in range(start + 1, len(costs) - left + 2):
                worst, rest = best(stop, left - 1)
                options.append((max(worst, sum(costs[start:stop])), ((start, stop), *rest)))
            known[start, left] = min(options, key=lambda option: option[0])
        return known[start, left]

    return best(0, n_stages)[1]
