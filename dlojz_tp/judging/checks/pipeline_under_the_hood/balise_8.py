"""Balise 8: the bubble by formula, and from the events of a run; what a stage costs."""

import statistics
from collections import defaultdict
from numbers import Real

from dlojz_tp import planner
from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.borrowed import out_of_reach
from dlojz_tp.judging.checking.looks import Look, judged, nothing, within
from dlojz_tp.planner.pipeline import PipelineEvent

CASES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, 3, 7, 8, 20)] + [(1, 1), (1, 5)]
SHARES = (4, 0.25), (9, 0.125), (3, 0.15), (16, 0.07), (64, 0.11), (2, 0.9), (1, 0.1), (5, 0.5)
MET_EXACTLY = (4, 0.2), (4, 0.1), (8, 0.05), (2, 0.05), (64, 0.05)  # by shares that are no sums of powers of two


def balise_8(ideal_bubble, fewest_micro_batches, measured_bubble, stage_costs):
    """The formula against simulated pipelines; shares and costs against events that are known."""
    truth = [planner.simulate(planner.gpipe(p, m), {"F": 1.0, "B": 2.0}).bubble for p, m in CASES]
    with out_of_reach(lambda name: Wrong("simulated", name=name), planner.simulate, copies=True):
        yield from judged(FORMULA, lambda: {"numbers": [_number(ideal_bubble(*case)) for case in CASES]}, at=truth)
        for case in (*SHARES, *MET_EXACTLY):
            where = "{} stages, a bubble of {} at most".format(*case)
            found = lambda case=case: {"numbers": [_number(fewest_micro_batches(*case))]}  # noqa: E731
            yield from judged(FEWEST, found, at=case, where=where)
    for looks, observe, answer in ((IDLE, observe_idle, measured_bubble), (COSTS, observe_costs, stage_costs)):
        for words, events in _runs().items():
            yield from judged(looks, observe, answer, events, at=events, where=words)


def observe_idle(measured_bubble, events):
    given = list(events)
    return {"numbers": [_number(measured_bubble(given))], "left": given == events}


def observe_costs(stage_costs, events):
    given = list(events)
    try:
        got, error = stage_costs(given), ""
    except statistics.StatisticsError as nothing:
        got, error = {}, str(nothing)
    yield {"error": error, "left": given == events, "form": _form(got), "kinds": set(got) if _form(got) else None}
    yield {"costs": {kind: [float(value) for value in got[kind]] for kind in sorted(got)}}


def _number(value):
    """As a float; what is no number, as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _numbers(claim, slug) -> Look:
    """A Look at whether all that came are numbers."""
    other = lambda seen: next(value for value in seen if type(value) is not float)  # noqa: E731

    def hint(seen, _):
        return "nothing-returned" if other(seen) is None else slug

    def fields(seen, _):
        return {"expected": "", "got": other(seen)}

    return Look(claim, "numbers", {float}, hint, holds=lambda seen, due: {*map(type, seen)} == due, fields=fields)


def _form(costs):
    """Whether it is a dictionary of lists; None for None."""
    lists = lambda: all(isinstance(v, list | tuple) or hasattr(v, "tolist") for v in costs.values())  # noqa: E731
    return None if costs is None else isinstance(costs, dict) and lists()


def _not_the_bubble(got, truth) -> str:
    near = [
        lambda p, m: (p - 1) / (m + p), lambda p, m: p / (m + p), lambda p, m: p / (m + p - 1),
        lambda p, m: (p - 1) / (m + p + 1), lambda p, m: (p - 1) / (m + p - 2) if m + p > 2 else 0.0,
    ]  # fmt: skip
    known = [("bubble-off-by-one", [off(p, m) for p, m in CASES]) for off in near]
    known += [("whole-numbers", got)] if {*got} <= {0.0, 1.0} else []
    known += [("worked-share", [m / (m + p - 1) for p, m in CASES]), ("over-ideal", [(p - 1) / m for p, m in CASES])]
    known.append(("percent", [100 * value for value in truth]))
    return next((slug for slug, values in known if close(got, values, 1e-6)), "wrong-bubble")


def _bubble(got, truth):
    k = next(k for k, pair in enumerate(zip(got, truth, strict=True)) if not close(*pair, 1e-6))
    return {"expected": truth[k], "got": got[k], "where": "{} stages, {} micro-batches".format(*CASES[k])}


def _fewest(at) -> int:
    p, share = at
    return next(n for n in range(1, 10**5) if (p - 1) / (n + p - 1) <= share + 1e-12)


def _not_the_fewest(seen, at) -> str:
    [m], due, (p, share) = seen, _fewest(at), at
    if m != int(m):
        return "not-a-count"
    if m < due:
        return "no-micro-batch" if m < 1 else "too-few"
    if m == due + 1 and at in MET_EXACTLY:  # right so far
        return "ceil-of-a-float"
    return "over-ideal" if abs(m - (p - 1) / share) < 1 and m > due + 1 else "too-many"


def _count(seen, at):
    [m], due, (p, share) = seen, _fewest(at), at
    bubble, got = (p - 1) / (max(m, 1) + p - 1), int(m) if m == int(m) else m
    return {"m": got, "bubble": bubble, "share": share, "truth": due, "expected": due, "got": got}


def _idle(events) -> float:
    """From the gaps of each rank, rather than from what it works."""
    ranks, idle = {event[0] for event in events}, 0.0
    begin, end = min(event[4] for event in events), max(event[5] for event in events)
    for rank in ranks:
        at = begin
        for event in sorted((e for e in events if e[0] == rank), key=lambda e: e[4]):
            idle, at = idle + event[4] - at, event[5]
        idle += end - at
    return idle / (len(ranks) * (end - begin))


def _not_the_idle(seen, events) -> str:
    truth, ranks = _idle(events), sorted({event[0] for event in events})
    n, begin, end = len(ranks), min(event[4] for event in events), max(event[5] for event in events)
    each = [[event for event in events if event[0] == rank] for rank in ranks]
    works = [sum(e[5] - e[4] for e in mine) for mine in each]
    own = [max(e[5] for e in mine) - min(e[4] for e in mine) for mine in each]
    busy, length, first_to_last = sum(works), end - begin, events[-1][5] - events[0][4]
    known = {
        "percent": [100 * truth],
        "idle-not-busy": [1 - truth, busy / length],
        "clock-zero": [1 - busy / (n * end)],
        "order-assumed": [1 - busy / (n * first_to_last)] if first_to_last else [],
        "own-window": [1 - busy / sum(own), statistics.fmean(1 - a / b for a, b in zip(works, own, strict=True))],
        "ranks-forgotten": [1 - busy / length, n * truth],
        "ranks-miscounted": [1 - busy / (count * length) for count in (len({e[3] for e in events}), max(ranks) + 1)],
    }
    return next((s for s, values in known.items() if any(close(seen, [v], 1e-6) for v in values)), "wrong-idle")


def _share(seen, events):
    return _about(events) | {"expected": _idle(events), "got": seen[0]}


def _about(events):
    """Fields: the kinds, the last stage, the ranks."""
    kinds, stages, ranks = (sorted({event[k] for event in events}) for k in (1, 3, 0))
    return {"kinds": ", ".join(kinds), "last": stages[-1], "ranks": ", ".join(map(str, ranks)), "n": len(ranks)}


def _spent(events):
    """{kind: [seconds of each action of a stage]}"""
    found = defaultdict(lambda: defaultdict(list))
    for _, kind, _, stage, begin, end in events:
        found[kind][stage].append(end - begin)
    return {kind: [found[kind][stage] for stage in sorted(found[kind])] for kind in sorted(found)}


def _missing(kinds, due):
    return {"kinds": ", ".join(sorted(due)), "expected": "", "got": ", ".join(map(str, kinds))}


def _first_off(costs, events):
    """Of the first kind whose costs are wrong: the kind, its costs, and what each action of a stage took."""
    kinds = ((kind, costs[kind], times) for kind, times in _spent(events).items())
    return next((one for one in kinds if not close(one[1], [*map(statistics.median, one[2])], 1e-6)), None)


def _not_the_cost(seen, events) -> str:
    _, costs, times = _first_off(seen, events)
    if len(costs) != len(times):
        return "per-rank" if len(costs) == _about(events)["n"] else "not-costs"
    if close(sorted(costs), sorted(map(statistics.median, times)), 1e-6):
        return "stages-shuffled"
    known = {"mean-not-median": [*map(statistics.fmean, times)], "cost-summed": [*map(sum, times)]}
    return next((slug for slug, values in known.items() if close(costs, values, 1e-6)), "wrong-cost")


def _cost(seen, events):
    kind, costs, times = _first_off(seen, events)
    return {"rank": events[0][0], "expected": {kind: [*map(statistics.median, times)]}, "got": {kind: costs}}


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


def _itself(at):
    return at


FORMULA = [
    _numbers("the formula, for 1 to 8 stages and 1 to 20 micro-batches, against simulated pipelines", "not-a-share"),
    Look("", "numbers", _itself, _not_the_bubble, holds=within(1e-6), fields=_bubble),
]
FEWEST = [
    _numbers("the fewest micro-batches for a bubble", "not-a-count"),
    Look("", "numbers", _itself, _not_the_fewest, holds=lambda seen, at: seen == [_fewest(at)], fields=_count),
]
IDLE = [
    _numbers("the idle share of a run: ranks that wait at both ends, any clock, any order of the events", "not-a-share"),
    Look("", "left", True, "events-changed"),
    Look("", "numbers", _itself, _not_the_idle, holds=lambda seen, events: close(seen, [_idle(events)], 1e-6),
         fields=_share),
]  # fmt: skip
COSTS = [
    Look("the median cost of each kind and stage", "error", _itself, "nothing-to-take", holds=nothing,
         fields=lambda error, events: _about(events) | {"error": error, "expected": "", "got": error}),
    Look("", "left", True, "events-changed"),
    Look("", "form", True, "not-costs"),
    Look("", "kinds", lambda events: {*_spent(events)}, "kind-missing", fields=_missing),
    Look("", "costs", _itself, _not_the_cost, holds=lambda seen, events: not _first_off(seen, events), fields=_cost),
]  # fmt: skip
