"""Balise 8: the bubble by formula, and from the events of a run; what a stage costs."""

import statistics
from collections import defaultdict
from numbers import Real

from dlojz_tp import planner
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checking.borrowed import out_of_reach
from dlojz_tp.planner.pipeline import PipelineEvent

HINTS = {
    "simulated": "planner.{name} simulates a whole step. The bubble of an ideal pipeline is a formula of two numbers: count turns.",
    "worked-share": "That is the share of the time in which a stage works. The bubble is the rest.",
    "over-ideal": "(p − 1) / m compares the waiting with the work. The bubble is a share of the whole time, work "
                  "and waiting together: m + p − 1 turns.",
    "bubble-off-by-one": "You count one turn too many or too few. A step takes m + p − 1 turns, and each stage "
                         "works in m of them.",
    "whole-numbers": "A share is between 0 and 1, but this one was rounded to a whole number: / divides, // rounds "
                     "down.",
    "wrong-bubble": "That isn't the share of the time that a stage spends waiting.",
    "percent": "That is a percentage. Return the share as a number from 0 to 1; it is printed as a percentage later.",
    "not-a-share": "The bubble is one number, a float from 0 to 1.",
    "not-a-count": "A number of micro-batches is a whole number, an int.",
    "no-micro-batch": "At least one micro-batch is needed, even when there is nothing to hide.",
    "too-few": "With {m} micro-batches the bubble is {bubble:.4f}, which is more than {share}. Round up.",
    "ceil-of-a-float": "{truth} micro-batches meet the share exactly. In floats, 3 * (1 - 0.2) / 0.2 is a little "
                       "more than 12, so rounding up gives one too many. Compare the bubble itself with the share, "
                       "or subtract a little before you round up.",
    "too-many": "{m} micro-batches are enough, but not the fewest. When the share is met exactly, one more is one "
                "too many.",
    "idle-not-busy": "That is the share of the time in which the ranks work.",
    "clock-zero": "The clock isn't at 0 when the step begins. The step lasts from the first begin to the last end.",
    "order-assumed": "The events aren't sorted by time: those of all ranks are mixed. Look for the smallest begin "
                     "and the largest end.",
    "own-window": "You time each rank from its own first action to its own last one. Waiting for the first "
                  "micro-batch is waiting too: the time of every rank is that of the whole step.",
    "ranks-forgotten": "You compare the work of all ranks with the time of one. The time available is the length "
                       "of the step times the number of ranks.",
    "ranks-miscounted": "The ranks here are {ranks}: {n} of them. Count the different ranks in the events, not the "
                        "stages, and don't assume that they start at 0.",
    "wrong-idle": "That isn't the share of all ranks' time in which they do nothing.",
    "not-costs": 'Return a dictionary: for each kind of action, such as "F", a list with one number per stage.',
    "kind-missing": "The kinds in these events are {kinds}. Each needs its own list of costs.",
    "per-rank": "Return one number per stage, in the order of the stages. Here rank {rank} holds two of them.",
    "stages-shuffled": "These are the right numbers in the wrong order: stage 0 comes first, wherever its events "
                       "are in the list.",
    "nothing-to-take": "Some pair of kind and stage has no event ({error}). Here the kinds are {kinds}, the stages "
                       "0 to {last}, and the ranks {ranks}: take kinds and stages from the events.",
    "mean-not-median": "That is the mean. One action disturbed by another program shifts it: take the median.",
    "cost-summed": "That is the time of all micro-batches together. The cost is the time of one.",
    "wrong-cost": "The cost of an action is its end minus its begin; take the median over the micro-batches.",
    "events-changed": "You changed the list of events. Leave it as it is: it is drawn afterwards.",
}  # fmt: skip

CASES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, 3, 7, 8, 20)] + [(1, 1), (1, 5)]


def balise_8(ideal_bubble, fewest_micro_batches, measured_bubble, stage_costs):
    """The formula against simulated pipelines; shares and costs against events that are known."""
    yield "the formula, for 1 to 8 stages and 1 to 20 micro-batches, against simulated pipelines"
    truth = [planner.simulate(planner.gpipe(p, m), {"F": 1.0, "B": 2.0}).bubble for p, m in CASES]
    with out_of_reach(lambda name: Wrong("simulated", name=name), planner.simulate, copies=True):
        _formula(ideal_bubble, truth)
        yield "the fewest micro-batches for a bubble"
        _fewest(fewest_micro_batches)
    yield "the idle share of a run: ranks that wait at both ends, any clock, any order of the events"
    for words, events in _runs().items():
        _idle(measured_bubble, words, events)
    yield "the median cost of each kind and stage"
    for words, events in _runs().items():
        _costs(stage_costs, words, events)


def _number(value, slug, where):
    if value is None:
        raise Wrong("nothing-returned")
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Wrong(slug, got=value, where=where)
    return float(value)


def _formula(ideal_bubble, truth):
    got = [_number(ideal_bubble(p, m), "not-a-share", f"{p} stages, {m} micro-batches") for p, m in CASES]
    if close(got, truth, 1e-6):
        return
    known = {
        "worked-share": [m / (m + p - 1) for p, m in CASES],
        "over-ideal": [(p - 1) / m for p, m in CASES],
        "percent": [100 * value for value in truth],
    }
    near = [
        lambda p, m: (p - 1) / (m + p), lambda p, m: p / (m + p), lambda p, m: p / (m + p - 1),
        lambda p, m: (p - 1) / (m + p + 1), lambda p, m: (p - 1) / (m + p - 2) if m + p > 2 else 0.0,
    ]  # fmt: skip
    slug = next((name for name, values in known.items() if close(got, values, 1e-6)), "wrong-bubble")
    if any(close(got, [f(p, m) for p, m in CASES], 1e-6) for f in near):
        slug = "bubble-off-by-one"
    elif all(value in (0.0, 1.0) for value in got):
        slug = "whole-numbers"
    k = next(k for k, (g, t) in enumerate(zip(got, truth, strict=True)) if not close(g, t, 1e-6))
    raise Wrong(slug, expected=truth[k], got=got[k], where="{} stages, {} micro-batches".format(*CASES[k]))


def _fewest(fewest_micro_batches):
    # the last five are met exactly, by shares that are no sums of powers of two
    shares = (4, 0.25), (9, 0.125), (3, 0.15), (16, 0.07), (64, 0.11), (2, 0.9), (1, 0.1), (5, 0.5)
    for p, share in (*shares, (4, 0.2), (4, 0.1), (8, 0.05), (2, 0.05), (64, 0.05)):
        where = f"{p} stages, a bubble of {share} at most"
        m = _number(fewest_micro_batches(p, share), "not-a-count", where)
        truth = next(n for n in range(1, 10**5) if (p - 1) / (n + p - 1) <= share + 1e-12)
        if m != int(m):
            raise Wrong("not-a-count", expected=truth, got=m, where=where)
        if m < 1:
            raise Wrong("no-micro-batch", expected=truth, got=int(m), where=where)
        if m < truth:
            raise Wrong(
                "too-few", m=int(m), bubble=(p - 1) / (m + p - 1), share=share, expected=truth, got=int(m), where=where
            )
        if m > truth:
            slug = "over-ideal" if abs(m - (p - 1) / share) < 1 and m > truth + 1 else "too-many"
            if m == truth + 1 and (p, share) not in shares:  # right so far, also where a share is met exactly
                slug = "ceil-of-a-float"
            raise Wrong(slug, m=int(m), truth=truth, expected=truth, got=int(m), where=where)


def _runs() -> dict[str, list]:
    """Runs with known events; the same all the time."""
    uneven = {"F": [1.0, 1.5, 0.5, 1.0], "B": [2.0, 2.5, 1.0, 3.0]}
    plain = planner.simulate(planner.one_f_one_b(4, 6), uneven).events
    alone = planner.simulate(planner.gpipe(1, 3), {"F": 1.0, "B": 2.0}).events
    chunks = planner.simulate(planner.interleaved_1f1b(2, 4, 2), uneven).events
    split = planner.simulate(planner.zero_bubble_h1(2, 4), {"F": [1.0, 1.25], "I": [0.75, 1.0], "W": [0.5, 1.5]}).events
    return {
        "4 stages of unequal cost": _disturbed(plain, 0.0),
        "a clock that began long before": _disturbed(plain, 5000.0),
        "events of all ranks one after the other, the last rank first": sorted(_disturbed(plain, 30.0), key=lambda e: (-e[0], e[4])),
        "ranks 2 and 3 only, a second pipeline": [(e[0] + 2, *e[1:]) for e in _disturbed(chunks, 7.0)],
        "backward in two halves": _disturbed(split, 3.0),
        "the last event first": _disturbed(plain, 0.0)[::-1],
        "a long action that outlasts the last one": [
            (0, "F", 0, 0, 0.0, 1.0), (0, "B", 0, 0, 11.0, 12.0), (1, "F", 0, 1, 1.0, 9.0), (1, "B", 0, 1, 9.0, 14.0),
        ],
        "one rank": _disturbed(alone, 1.0),
    }  # fmt: skip


def _disturbed(events: list[PipelineEvent], offset: float) -> list[tuple]:
    """The events as plain tuples, later on the clock, some of them shorter: their rank pauses for the rest."""
    found = []
    for rank, kind, k, stage, begin, end in events:
        cut = 0.5 if k == 1 else 0.1 * (k % 3)
        found.append((rank, kind, k, stage, begin + offset, end + offset - cut * (end - begin)))
    return found


def _idle(measured_bubble, words, events):
    given = list(events)
    got = _number(measured_bubble(given), "not-a-share", words)
    if given != events:
        raise Wrong("events-changed", where=words)
    ranks = sorted({event[0] for event in events})
    begin, end = min(event[4] for event in events), max(event[5] for event in events)
    # the gaps of each rank, rather than what it works
    idle = 0.0
    for rank in ranks:
        at = begin
        for event in sorted((e for e in events if e[0] == rank), key=lambda e: e[4]):
            idle, at = idle + event[4] - at, event[5]
        idle += end - at
    truth = idle / (len(ranks) * (end - begin))
    if close(got, truth, 1e-6):
        return
    busy = sum(e[5] - e[4] for e in events)
    own = sum(max(e[5] for e in events if e[0] == r) - min(e[4] for e in events if e[0] == r) for r in ranks)
    n = len(ranks)
    first_to_last = events[-1][5] - events[0][4]
    stages, highest = len({e[3] for e in events}), max(ranks) + 1
    windows = []
    for rank in ranks:
        mine = [e for e in events if e[0] == rank]
        length = max(e[5] for e in mine) - min(e[4] for e in mine)
        windows.append(1 - sum(e[5] - e[4] for e in mine) / length)
    known = {
        "percent": [100 * truth],
        "idle-not-busy": [1 - truth, busy / (end - begin)],
        "clock-zero": [1 - busy / (n * end)],
        "order-assumed": [1 - busy / (n * first_to_last)] if first_to_last else [],
        "own-window": [1 - busy / own, statistics.fmean(windows)],
        "ranks-forgotten": [1 - busy / (end - begin), idle / (end - begin)],
        "ranks-miscounted": [1 - busy / (count * (end - begin)) for count in (stages, highest)],
    }
    slug = next((s for s, values in known.items() if any(close(got, v, 1e-6) for v in values)), "wrong-idle")
    raise Wrong(slug, expected=truth, got=got, where=words, ranks=", ".join(map(str, ranks)), n=n)


def _costs(stage_costs, words, events):
    given = list(events)
    spent = defaultdict(list)
    for _, kind, _, stage, begin, end in events:
        spent[kind, stage].append(end - begin)
    kinds, n_stages = sorted({kind for kind, _ in spent}), 1 + max(stage for _, stage in spent)
    try:
        got = stage_costs(given)
    except statistics.StatisticsError as error:
        ranks = ", ".join(map(str, sorted({event[0] for event in events})))
        shown = {"kinds": ", ".join(kinds), "last": n_stages - 1, "ranks": ranks}
        raise Wrong("nothing-to-take", error=error, got=str(error), where=words, **shown) from error
    if given != events:
        raise Wrong("events-changed", where=words)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, dict) or not all(isinstance(v, list | tuple) or hasattr(v, "tolist") for v in got.values()):
        raise Wrong("not-costs", got=got, where=words)
    got = {kind: [float(value) for value in values] for kind, values in got.items()}
    if set(got) != set(kinds):
        raise Wrong("kind-missing", kinds=", ".join(kinds), got=", ".join(map(str, got)), where=words)
    for kind in kinds:
        truth = [statistics.median(spent[kind, stage]) for stage in range(n_stages)]
        if close(got[kind], truth, 1e-6):
            continue
        if len(got[kind]) != n_stages:
            rank = next(iter(event[0] for event in events))
            slug = "per-rank" if len(got[kind]) == len({event[0] for event in events}) else "not-costs"
            raise Wrong(slug, rank=rank, expected=truth, got=got[kind], where=f"{kind}, {words}")
        slug = "wrong-cost"
        if close(sorted(got[kind]), sorted(truth), 1e-6):
            slug = "stages-shuffled"
        elif close(got[kind], [statistics.fmean(spent[kind, s]) for s in range(n_stages)], 1e-6):
            slug = "mean-not-median"
        elif close(got[kind], [sum(spent[kind, s]) for s in range(n_stages)], 1e-6):
            slug = "cost-summed"
        raise Wrong(slug, expected=truth, got=got[kind], where=f"{kind}, {words}")
