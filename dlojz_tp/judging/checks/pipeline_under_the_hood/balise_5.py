"""Balise 5: GPipe and 1F1B as data, judged by the simulator."""

from dlojz_tp import planner
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import out_of_reach
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.probes.schedules import pipeline_schedules

SIZES = [(1, 1), (1, 3), (2, 4), (4, 8), (3, 7), (4, 4), (5, 6), (3, 2), (4, 1), (6, 3)]  # stages, micro-batches
COSTS = {"F": 1.0, "B": 2.0}


def balise_5(gpipe, one_f_one_b):
    """Order, completeness, absence of deadlock, memory and time of both schedules."""
    with out_of_reach(lambda name: Wrong("library-schedule", name=name), *pipeline_schedules(), copies=True):
        for at in SIZES:
            yield from judged(GPIPE, _simulated, "gpipe", gpipe, *at, at=at, where=_where("gpipe", *at))
        for at in SIZES:
            try:
                yield from judged(EAGER, observe, one_f_one_b, *at, at=at, where=_where("one_f_one_b", *at))
            except Wrong as wrong:  # fewer micro-batches than stages
                fails(wrong)


def observe(one_f_one_b, p, m):
    yield _simulated("one_f_one_b", one_f_one_b, p, m)
    every = (_simulated("one_f_one_b", one_f_one_b, p, m) | {"m": m} for p, m in SIZES if m >= p)
    yield {"as GPipe": all({*one.get("kept", [])} == {one["m"]} for one in every)}


def _where(name, p, m):
    return f"{name}(stage, n_stages={p}, n_micro_batches={m})"


def _simulated(name, schedule, p, m):
    """The lists of all stages, and what the simulator says of them. Raises Wrong for what it cannot run."""
    lists = []
    for stage in range(p):
        actions = schedule(stage, p, m)
        if not isinstance(actions, list | tuple) or not all(
            isinstance(a, tuple | list) and len(a) == 2 for a in actions
        ):
            kind = "None" if actions is None else f"a {type(actions).__name__}: {actions!r:.80}"
            raise Wrong("not-a-list", kind=kind, where=_where(name, p, m))
        actions = [(kind, int(k) if type(k).__module__ == "numpy" else k) for kind, k in actions]
        foreign = [k for _, k in actions if isinstance(k, int) and not 0 <= k < m]
        if foreign:
            slug = "fewer-than-stages" if m < p else "other-micro-batch"
            error = f"the list names micro-batch {foreign[0]}"
            raise Wrong(slug, m=m, got=foreign[0], error=error, where=f"stage {stage}, {_where(name, p, m)}")
        lists.append(actions)
    missing = [(s, k) for s in range(p) for k in range(m) if {a for a in lists[s] if a[1] == k} != {("F", k), ("B", k)}]
    try:
        found = planner.simulate(lists, COSTS)
        return {"differ": "", "lists": lists, "kept": list(found.in_flight), "seconds": found.seconds}
    except planner.Deadlock as error:
        raise Wrong("would-deadlock", error=str(error).removeprefix("deadlock: "), where=_where(name, p, m)) from None
    except planner.OrdersDiffer as error:
        return {"differ": str(error), "lists": lists}
    except planner.ScheduleError as error:
        text = f"stage {missing[0][0]} lacks micro-batch {missing[0][1]}" if missing and not any(lists) else str(error)
        slug = "fewer-than-stages" if m < p and (p, m) != (1, 1) else "incomplete"
        raise Wrong(slug, error=text, where=_where(name, p, m)) from None


def _as_gpipe(at):
    p, m = at
    return p * [[("F", k) for k in range(m)] + [("B", k) for k in reversed(range(m))]]


def _other(lists, due):
    """Fields: the first stage whose list is not that of GPipe."""
    stage = next(stage for stage, actions in enumerate(lists) if actions != due[stage])
    return {"got": lists[stage], "expected": due[stage], "where": f"stage {stage} of {len(due)}, GPipe"}


def _not_gpipe(lists, due):
    got, m = _other(lists, due)["got"], len(due[0]) // 2
    return "gpipe-forwards" if got[:m] != due[0][:m] else "gpipe-backwards"


def _look(due, hint, wrong) -> Look:
    """A Look at all that was observed. wrong(seen, due): the fields of the hint; {} where nothing is wrong."""

    def holds(seen, due):
        return not wrong(seen, due)

    return Look("", lambda seen: seen, due, hint, holds=holds, fields=wrong)


def _too_long(seen, best):
    late = {"got": seen["seconds"], "n_stages": len(seen["lists"]), "best": best}
    return late if seen["seconds"] > best + 1e-9 else {}


def _too_much(seen, most):
    """Fields: the first stage that keeps too much."""
    over = [s for s, (got, allowed) in enumerate(zip(seen["kept"], most, strict=True)) if got > allowed]
    return {"stage": over[0], "n_stages": len(most), "expected": most, "got": seen["kept"][over[0]]} if over else {}


def _kept_hint(seen, most):
    found = _too_much(seen, most)
    one_more = found["got"] == most[found["stage"]] + 1
    return "gpipes-memory" if seen["as GPipe"] else "one-more-kept" if one_more else "more-kept"


def _unordered(seen) -> str:
    """The first micro-batches that do not come in their order."""
    lists = enumerate(seen["lists"])
    numbers = ((stage, [k for what, k in actions if what == kind]) for stage, actions in lists for kind in "FB")
    return next((f"stage {stage}: {some}" for stage, some in numbers if some != sorted(some)), "")


TIME = _look(lambda at: 3 * (sum(at) - 1), "no-overlap", _too_long)
GPIPE = [
    Look("GPipe: complete, in order, without deadlock, from 1 to 6 stages and 1 to 8 micro-batches", "lists", _as_gpipe, _not_gpipe, fields=_other),
    Look("", "differ", "", "1f1b-order"),
    TIME,
]  # fmt: skip
EAGER = [
    Look("1F1B: complete, without deadlock, at most n_stages − stage micro-batches kept", "differ", "", "1f1b-order"),
    _look(lambda at: [at[0] - stage for stage in range(at[0])], _kept_hint, _too_much),
    Look("", _unordered, "", "1f1b-order"),
    TIME,
]
