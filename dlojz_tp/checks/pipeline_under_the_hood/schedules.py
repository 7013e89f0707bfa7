"""Balise 5: GPipe and 1F1B as data, judged by the simulator."""

from dlojz_tp import planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checking.borrowed import out_of_reach
from dlojz_tp.probes.schedules import pipeline_schedules

HINTS = {
    "library-schedule": "{name} comes from a library. Here you write it yourself.",
    "not-a-list": 'Return a list of actions such as ("F", 0) and ("B", 0); you returned {kind}. A schedule is run '
    "again in each step, but a generator (yield) is used up after one.",
    "incomplete": "This isn't a whole step: {error}.",
    "fewer-than-stages": "It fails with fewer micro-batches than stages: {error}. A stage can't start with more "
    "forwards than there are micro-batches.",
    "would-deadlock": "On real ranks this would never end, so it wasn't run: {error}.",
    "other-micro-batch": "There are {m} micro-batches, numbered from 0; the list names {got}.",
    "gpipe-forwards": "GPipe does all forwards first, in the order of the micro-batches, then the backwards.",
    "gpipe-backwards": "The backwards go in reverse order: the last micro-batch comes first, because the last "
    "stage has just computed it.",
    "gpipes-memory": "Stage {stage} of {n_stages} keeps {got} micro-batches, as many as with GPipe. In 1F1B a "
    "backward follows each forward as soon as the pipeline is full, and stage s keeps at most "
    "n_stages − s.",
    "one-more-kept": "Stage {stage} of {n_stages} keeps {got} micro-batches, one more than n_stages − stage. How many forwards "
    "come before the pairs?",
    "more-kept": "Stage {stage} of {n_stages} keeps {got} micro-batches, but n_stages − stage is the most. The "
    "number of forwards before the pairs depends on both.",
    "no-overlap": "The step takes {got} units of time on {n_stages} stages, but {best} are enough: stages wait "
    "when they could work. Are there enough forwards at the start?",
    "1f1b-order": "In 1F1B, forwards and backwards both follow the order of the micro-batches: the oldest one's "
    "gradient comes back first.",
}
SIZES = [(1, 1), (1, 3), (2, 4), (4, 8), (3, 7), (4, 4), (5, 6), (3, 2), (4, 1), (6, 3)]
COSTS = {"F": 1.0, "B": 2.0}


def balise_5(gpipe, one_f_one_b):
    """Order, completeness, absence of deadlock, memory and time of both schedules."""
    with out_of_reach(lambda name: Wrong("library-schedule", name=name), *pipeline_schedules(), copies=True):
        yield "GPipe: complete, in order, without deadlock, from 1 to 6 stages and 1 to 8 micro-batches"
        for p, m in SIZES:
            lists, found = _simulated("gpipe", gpipe, p, m)
            _gpipe(lists, p, m)
            _time(found, p, m, "gpipe")
        yield "1F1B: complete, without deadlock, at most n_stages − stage micro-batches kept"
        for p, m in SIZES:
            lists, found = _simulated("one_f_one_b", one_f_one_b, p, m)
            for stage, kept in enumerate(found.in_flight):
                if kept > p - stage:
                    slug = "one-more-kept" if kept == p - stage + 1 else "more-kept"
                    slug = "gpipes-memory" if all(_keeps_all(one_f_one_b, *size) for size in SIZES) else slug
                    raise Wrong(slug, stage=stage, n_stages=p, got=kept, where=_where("one_f_one_b", p, m))
            for stage, actions in enumerate(lists):
                for kind in "FB":
                    numbers = [k for what, k in actions if what == kind]
                    if numbers != sorted(numbers):
                        raise Wrong("1f1b-order", got=numbers, where=f"stage {stage}, {_where('one_f_one_b', p, m)}")
            _time(found, p, m, "one_f_one_b")


def _keeps_all(schedule, p, m):
    """Whether each stage keeps all micro-batches at once, as GPipe does."""
    return set(_simulated("one_f_one_b", schedule, p, m)[1].in_flight) == {m}


def _where(name, p, m):
    return f"{name}(stage, n_stages={p}, n_micro_batches={m})"


def _simulated(name, schedule, p, m):
    """The lists of all stages, and what the simulator says of them."""
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
        return lists, planner.simulate(lists, COSTS)
    except planner.Deadlock as error:
        raise Wrong("would-deadlock", error=str(error).removeprefix("deadlock: "), where=_where(name, p, m)) from None
    except planner.OrdersDiffer as error:
        if name == "gpipe":
            _gpipe(lists, p, m)
        raise Wrong("1f1b-order", got=str(error), where=_where(name, p, m)) from None
    except planner.ScheduleError as error:
        text = f"stage {missing[0][0]} lacks micro-batch {missing[0][1]}" if missing and not any(lists) else str(error)
        slug = "fewer-than-stages" if m < p and (p, m) != (1, 1) else "incomplete"
        raise Wrong(slug, error=text, where=_where(name, p, m)) from None


def _gpipe(lists, p, m):
    for stage, actions in enumerate(lists):
        where = f"stage {stage}, {_where('gpipe', p, m)}"
        if list(actions[:m]) != [("F", k) for k in range(m)]:
            raise Wrong("gpipe-forwards", got=actions, where=where)
        if [k for _, k in actions[m:]] != list(reversed(range(m))):
            raise Wrong("gpipe-backwards", got=actions, where=where)


def _time(found, p, m, name):
    best = 3 * (m + p - 1)
    if found.seconds > best + 1e-9:
        raise Wrong("no-overlap", n_stages=p, got=found.seconds, best=best, where=_where(name, p, m))
