"""Balise 2: a result, and the spread of a ratio of two: the draws against all that can be drawn, with its probability."""

import functools
import itertools
import math
from collections import Counter

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, same, silent, tried

INF = math.inf
RESULTS = {
    (5.0, 3.0, 9.0, 4.0, 30.0): 6.0, (2.0, 50.0, 8.0): 8.0, (7.0, 1.0, 4.0, 20.0): 5.5, (6.0, 6.0, 6.0, 6.0): 6.0,
    (1.0, 8.0, 1.0, 8.0, 2.0, 1.0): 3.0, (90.0, 12.0, 11.0, 10.0, 9.0, 1.0, 14.0, 16.0, 13.0, 15.0): 12.5,
}  # fmt: skip
FAILED = {
    (5.0, INF, 9.0, 4.0, 12.0): 26 / 3, (INF, 2.0, 8.0): 8.0, (3.0, 1.0, 7.0, 14.0, 2.0, INF): 6.5,
    (5.0, INF, 9.0, 4.0, INF): INF, (INF, 2.0, INF): INF, (INF, INF, INF): INF, (INF, 1.0, 1.0, INF, 2.0, 2.0): INF,
}  # fmt: skip

#  (reference, entry): ratio, from what is left of the lists when they are sorted; the first two lists are in the same order
EQUAL = {
    ((12.2, 10.1, 19.4, 11.3, 15.9, 13.7), (6.4, 5.2, 10.3, 5.9, 8.8, 7.7)): (11.3 + 12.2 + 13.7 + 15.9) / (5.9 + 6.4 + 7.7 + 8.8),
}  # fmt: skip
FINITE = EQUAL | {
    ((31.0, 20.3, 23.1, 21.7, 60.0), (14.9, 12.1, 16.3, 11.2, 18.8, 13.4)): (75.8 / 3) / (56.7 / 4),
    ((8.9, 7.3, 9.7, 8.1, 10.6, 7.7, 12.5), (4.4, 7.9, 5.3)): 9.0 / 5.3,
}
SOME_FAILED = {
    ((20.3, 23.1, 31.0, 21.7, 27.2), (12.1, INF, 14.9, 11.2, 18.8, 13.4)): (72.0 / 3) / (59.2 / 4),
    ((20.3, INF, 23.1, 31.0, 21.7), (12.1, 14.9, 11.2, INF, 13.4)): (75.8 / 3) / (40.4 / 3),
}
PAIRS = {"equal": EQUAL, "finite": FINITE, "failed": SOME_FAILED}
DRAWS, SHARE = {"equal": 1000, "finite": 3000, "failed": 3000}, 0.05


@functools.cache
def drawn(runs):
    """All multisets that as many draws with replacement can give: their results and their probabilities, two tensors."""
    n, runs, found = len(runs), sorted(runs), []
    for places in itertools.combinations_with_replacement(range(n), n):
        orders = math.factorial(n) // math.prod(map(math.factorial, Counter(places).values()))
        found.append((sum(runs[k] for k in places[1:-1]) / (n - 2), orders / n**n))
    return torch.tensor(found, dtype=torch.float64).T


@functools.cache
def distribution(case, paired):
    """All ratios in rising order; the probability of less than the first, of the first or less, and so on.

    paired: the same places are drawn in both lists, which is a mistake.
    """
    (a, p), (b, q) = map(drawn, case)
    found, shares = (a / b, p) if paired else ((a[:, None] / b).flatten(), torch.outer(p, q).flatten())
    valid = (found > 0) & found.isfinite()  # 0 is finite / inf
    found, order = found[valid].sort()
    shares = shares[valid][order].cumsum(0)
    return found, torch.cat([torch.zeros(1, dtype=torch.float64), shares / shares[-1]])


def tails(case, low, high, paired=False):
    """The probabilities of a ratio below `low` and above `high`; where these can be drawn, what is nearest to SHARE."""
    found, shares = distribution(case, paired)

    def below(value, side):
        return shares[int((found < value * (1 + side * 1e-5)).sum())].item()

    if math.isnan(low) or math.isnan(high):
        return [-1.0, -1.0]
    return [min(max(SHARE, below(low, -1)), below(low, 1)), min(max(SHARE, 1 - below(high, 1)), 1 - below(high, -1))]


def numbers(got, n):
    """One number or a list of n; None, or in words what else."""
    try:
        if n == 1 or got is None:
            return None if got is None else float(got)
        return [float(one) for one in got] if len(got) == n else f"{len(got)} values"
    except (TypeError, ValueError):
        return type(got).__name__


def observe(result, speedup):
    given = [list(runs) for runs in RESULTS]
    found = [numbers(result(runs), 1) for runs in given]
    yield {"form": next((one for one in found if not isinstance(one, float)), "")}
    changed = given != [list(runs) for runs in RESULTS]
    yield {"changed": changed, "results": found}
    yield {
        "failed runs": [
            one if isinstance(one, str) else numbers(one, 1) for one in (tried(result, list(runs)) for runs in FAILED)
        ]
    }

    def three(case, draws, seed):
        nonlocal changed
        given = list(map(list, case))
        got = numbers(speedup(*given, draws=draws, seed=seed), 3)
        changed |= given != list(map(list, case))
        return got

    for name, cases in PAIRS.items():
        got = [three(case, DRAWS[name], 11 + k) for k, case in enumerate(cases)]
        yield {f"{name}: form": next((one for one in got if not isinstance(one, list)), "")}
        yield {f"{name}: ratios": [one[0] for one in got], f"{name}: changed": changed,
               f"{name}: spread": all(low < high for _, low, high in got),
               f"{name}: tails": sum((tails(case, *ends) for case, (_, *ends) in zip(cases, got)), [])}  # fmt: skip
        if name == "equal":
            yield {"paired": tails(*EQUAL, *got[0][1:], paired=True)}
    few = [three(*EQUAL, 60, seed) for seed in range(12)]
    off = [tail - SHARE for _, *ends in few for tail in tails(*EQUAL, *ends)]
    yield {"again": few[0] == three(*EQUAL, 60, 0), "other": any(one != few[0] for one in few),
           "scatter": math.hypot(*off) / len(off) ** 0.5}  # fmt: skip


def said(case):
    return "reference {}, entry {}".format(*case) if isinstance(case[0], tuple) else f"runs {case}"


def first_of(cases):
    """Fields: the first case that differs."""

    def fields(seen, due):
        case, got, true = next((case, a, b) for case, a, b in zip(cases, seen, due) if not same(a, b))
        return {"where": said(case), "expected": true, "got": got}

    return fields


def tail_fields(cases):
    """Fields: the case that is farthest off."""

    def fields(seen, due):
        case, *got = max(zip(cases, seen[::2], seen[1::2]), key=lambda one: max(abs(tail - SHARE) for tail in one[1:]))
        got = "low or high is NaN" if min(got) < 0 else "{:.1%} below low, {:.1%} above high".format(*got)
        return {"where": said(case), "expected": "5 % of all draws are below low, 5 % above high", "got": got}

    return fields


def near(most, mean=1.0):
    """A look's `holds`: the shares of the draws are off by no more, root mean square and mean; chance hardly reaches half of it."""

    def holds(seen, due):
        off = [one - SHARE for one in seen]
        return math.hypot(*off) <= most * len(off) ** 0.5 and abs(sum(off)) <= mean * len(off)

    return holds


def form(claim, key):
    return Look(claim, key, "", "three-numbers", fields=lambda seen, _: {"got": seen, "expected": ""})


def says(what):
    return lambda seen, due: {"what": what, "expected": "", "got": ""}


LOOKS = [
    form("the result of 3 to 10 runs", "form"),
    Look("", "results", list(RESULTS.values()), "wrong-result", fields=first_of(RESULTS)),
    Look("the runs stay as they are", "changed", False, "changes-list"),
    Look("the result where some runs never reached the target", "failed runs", list(FAILED.values()), "failed-runs", fields=first_of(FAILED)),
    form("the speed-up: the same number of runs for both", "equal: form"),
    Look("", "equal: changed", False, "changes-list"),
    Look("", "equal: ratios", list(EQUAL.values()), "wrong-ratio", fields=first_of(EQUAL)),
    Look("how much luck can change: the same number of runs for both", "equal: spread", True, "no-spread"),
    Look("", "paired", [SHARE] * 2, "paired", holds=lambda seen, due: not near(0.03)(seen, due), fields=silent),
    form("more runs for one than for the other", "finite: form"),
    Look("", "finite: ratios", list(FINITE.values()), "wrong-ratio", fields=first_of(FINITE)),
    Value("", "finite: tails", [SHARE] * 2 * len(FINITE), "wrong-draws", holds=near(0.01, 0.008), fields=tail_fields(FINITE)),
    form("some runs never reached the target", "failed: form"),
    Look("", "failed: ratios", list(SOME_FAILED.values()), "wrong-ratio", fields=first_of(SOME_FAILED)),
    Value("", "failed: tails", [SHARE] * 2 * len(SOME_FAILED), "failed-counted", holds=near(0.014, 0.012), fields=tail_fields(SOME_FAILED)),  # fewer are left
    Look("the seed and the number of draws have an effect", "again", True, "argument-ignored", fields=says("The same seed gives other numbers")),
    Look("", "other", True, "argument-ignored", fields=says("All seeds give the same numbers")),
    Look("", "scatter", 0.012, "argument-ignored", holds=lambda seen, least: seen >= least, fields=says("With draws=60, low and high scatter as little as with thousands")),
]  # fmt: skip


def balise_2(result, speedup):
    yield from judged(LOOKS, observe, result, speedup)
