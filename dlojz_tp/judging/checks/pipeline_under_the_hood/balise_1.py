"""Balise 1: contiguous stages with the smallest largest cost."""

import operator
import random
import time
from itertools import combinations
from types import SimpleNamespace

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import beside, itself, looked, stage_look, stage_mistake
from dlojz_tp.works.balise import BaliseNotDone

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


REFUSED = [([1.0, 2.0], 3), ([], 1), ([1.0], 0)]


def balise_1(balance):
    """Small cases against all cuts; cases at random; 200 layers; what cannot be cut."""
    draw = random.Random(5)
    small = [_at(*case) for case in CASES]
    yield from looked("ten small models, each compared with every way to cut it", SMALL, _cuts(balance, small))
    yield from looked("60 models with random costs", SMALL, _cuts(balance, [_drawn(draw) for _ in range(60)]))
    large = [_at([draw.random() for _ in range(n_layers)], n) for n_layers, n in LADDER]
    yield from looked("200 layers in a moment", LARGE, _cuts(balance, large))
    refused = [_at(*case) for case in REFUSED]
    yield from looked("fewer layers than stages are refused", REFUSAL, ((_refusal(balance, at), at) for at in refused))


def _at(costs, stages):
    shown = str(costs) if len(costs) < 12 else f"{len(costs)} layers"
    return SimpleNamespace(costs=costs, stages=stages, n=len(costs), where=f"balance({shown}, {stages})", small=0.0)


def _drawn(draw):
    n_layers = draw.randint(2, 11)
    costs = [round(draw.choice((draw.random(), 10 * draw.random() ** 4)), 3) for _ in range(n_layers)]
    return _at(costs, draw.randint(1, min(5, n_layers)))


def _cuts(balance, places):
    """What the answer does with each; it is told how long the first one took."""
    took = []
    for at in places:
        at.small = took[0] if took else 0.0
        yield observe(balance, at, took), at


def observe(balance, at, took):
    given, start = list(at.costs), time.process_time()
    pairs = _pairs(balance(given, at.stages))
    took.append(max(time.process_time() - start, 1e-4))
    yield {"pairs": pairs, "seconds": took[-1], "given": given}
    yield {"elsewhere": [_counts(_whole(_pairs(balance(list(costs), n)), _at(costs, n))) for costs, n in UNEVEN]}


def _refusal(balance, at):
    try:
        balance(list(at.costs), at.stages)
        raised = ""
    except ValueError:
        raised = "ValueError"
    except (BaliseNotDone, TypeError):
        raise
    except Exception as error:
        raised = repr(error)
    yield {"raised": raised}


def _pairs(found):
    """The stages as a list of pairs of integers; what is no such list, in words."""
    try:
        len(found)  # a list, or what can be used as one
        return [(operator.index(start), operator.index(stop)) for start, stop in found]
    except (TypeError, ValueError):
        return repr(found)[:80]


def _counts(pairs):
    """Into how many layers a stage it is cut."""
    return [stop - start for start, stop in pairs]


def _torn(pairs, at) -> tuple[str, dict] | None:
    """What is wrong with a cut, whatever the costs: slug and fields; None if nothing is."""
    if isinstance(pairs, str):
        return "not-bounds", {"got": pairs}
    if len(pairs) != at.stages:
        return "stage-count", {"got": len(pairs), "n": at.stages}
    parts = sorted(sorted(pair) for pair in pairs)
    ends = [0, *(stop for _, stop in parts)]
    if [*(start for start, _ in parts), at.n] == ends and parts != [list(pair) for pair in pairs]:
        return "not-in-order", {"got": pairs}
    end = 0
    for stage, (start, stop) in enumerate([*pairs, (at.n, at.n + 1)]):
        if start < end:
            return ("stages-overlap" if stage < at.stages else "not-bounds"), {
                "got": start if stage < at.stages else pairs,
                "stop": end,
            }
        if start > end:
            return "layers-lost", {"missing": list(range(end, start))}
        if stop <= start:
            return "empty-stage", {"stage": stage, "got": pairs}
        end = stop
    return None


def _whole(pairs, at):
    if torn := _torn(pairs, at):
        raise Wrong(torn[0], **torn[1], where=at.where)
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


def _reaches(pairs, at) -> bool:
    """Whether no slightly smaller largest stage is possible: filling up to a limit tells."""
    limit = _largest(at.costs, pairs) * (1 - 1e-6)
    stages, filled = 1, 0.0
    for cost in at.costs:
        if cost > limit:
            return True
        if filled + cost > limit:
            stages, filled = stages + 1, 0.0
        filled += cost
    return stages > at.stages


def _why(seen, at) -> str:
    cases = [
        (_counts(seen["pairs"]), at.costs, at.stages),
        *((found, *case) for found, case in zip(seen["elsewhere"], UNEVEN)),
    ]
    if all(max(found) - min(found) <= 1 for found, *_ in cases):  # one case alone may look like another by chance
        return "same-number"
    greedy = any(all(found == _greedy(*case, over) for found, *case in cases) for over in (False, True))
    return "greedy" if greedy else "not-optimal"


def _shown(seen, at):
    pairs, (best, cut) = seen["pairs"], _best(at.costs, at.stages)
    got, sums = _largest(at.costs, pairs), [round(sum(at.costs[a:b]), 3) for a, b in pairs]
    return {"expected": f"{cut}, largest {best:.6g}", "costs": sums, "best": round(best, 3), "cut": cut,
            "largest": round(got, 3), "got": f"{pairs}, largest {got:.6g}"}  # fmt: skip


def _shown_large(pairs, at):
    largest = _largest(at.costs, pairs)
    cut = f"{at.stages} stages below {largest * (1 - 1e-6):.4f}"
    return {"largest": round(largest, 4), "got": round(largest, 4), "best": "less", "cut": cut}


def _is_best(seen, at) -> bool:
    return _largest(at.costs, seen["pairs"]) <= _best(at.costs, at.stages)[0] * (1 + 1e-6) + 1e-9


def _soon(spent, at) -> bool:
    """An exponential answer is caught on sizes that it still ends on; a slow one that grows with a power passes."""
    return at.n >= 200 or at.stages <= 3 or spent <= max(0.4, 40 * at.small)


def _not_refused(raised, _):
    if raised == "ValueError":
        return None
    return "other-error" if raised else "no-error", {"error": raised.split("(")[0], "got": raised}


WHOLE = stage_mistake("pairs", _torn)
SMALL = [
    WHOLE,
    stage_look("given", lambda given, at: given == at.costs, "costs-changed", beside(operator.attrgetter("costs"))),
    stage_look(itself, _is_best, _why, _shown),
]
LARGE = [
    WHOLE,
    stage_look("seconds", _soon, "tries-all", lambda spent, at: {"large": at.n, "n": at.stages, "seconds": spent}),
    stage_look("pairs", _reaches, "not-optimal", _shown_large),
]
REFUSAL = [stage_mistake("raised", _not_refused)]
