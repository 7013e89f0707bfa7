"""Balise 2: the recorder, judged by inequalities that hold on a busy machine too, and the prediction."""

import functools
import math
import time

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, silent, tried, within

RUNS = {5: (2, 4), 1: (0, 1)}  # batches: (workers, images in a batch)
KINDS = ("loading", "waiting", "step")
SLACK = 1e-6
ORDER = (  # two times of each batch, the earlier one first; the mistake where it is the later one
    ("step called", "next asked", "asked-before-step"),
    ("wait begins", "loop begins", "first-wait-missing"),
    ("last step returned", "wait begins", "wait-includes-step"),
    ("given", "step begins", "step-includes-wait"),
    ("wait begins", "asked", "wait-too-short"),
    ("given", "wait ends", "wait-too-short"),
    ("wait ends", "step called", "wait-includes-step"),
    ("step ends", "next asked", "step-includes-wait"),
    ("step begins", "step called", "step-too-short"),
    ("step returned", "step ends", "step-too-short"),
)
# (loading, step, n, workers)
IN_TURN = (0.06, 0.03, 200, 0), (0.02, 0.05, 7, 0)
AT_ONCE = (0.04, 0.05, 200, 2), (0.06, 0.03, 200, 1), (0.2, 0.03, 240, 4), (0.4, 0.1, 1, 2), (0.5, 0.01, 1, 8)


class _Run:
    """A loader and its step; both write down the times at which they really ran."""

    def __init__(self, batches, workers, rows):
        self.batches, self.workers, self.rows, self.made = batches, workers, rows, time.monotonic()
        self.asked, self.given, self.begins, self.ends, self.got, self.stamps, self.rounds = [], [], [], [], [], [], 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.rounds += 1
        self.started = time.monotonic()
        time.sleep(0.002)
        return self._batches()

    def _batches(self):
        for k in range(self.batches):
            self.asked.append(time.monotonic())
            time.sleep(0.004)
            now = time.monotonic()
            rows = [[now - 0.9 + 0.01 * (i + k), now - 0.9 + 0.01 * (i + k + 1)] for i in range(self.rows)]
            stamps = torch.tensor(rows, dtype=torch.float64)
            worker = _worker(k, self.workers)
            self.stamps.append((rows[0][0], rows[-1][1]))
            stamps = torch.cat([stamps, torch.full((self.rows, 1), worker, dtype=torch.float64)], dim=1)
            self.given.append(time.monotonic())
            yield torch.full((self.rows, 2), float(k)), torch.full((self.rows,), k), stamps

    def step(self, images, labels):
        self.begins.append(time.monotonic())
        time.sleep(0.003)
        same = isinstance(images, torch.Tensor) and images.shape == (self.rows, 2) and labels.shape == (self.rows,)
        self.got.append(int(labels[0]) if same and images[0, 0] == labels[0] else "?")
        self.ends.append(time.monotonic())

    def outside(self, moment):
        """Seconds by which a time lies before or after this run; below 0 for a time in it."""
        return max(self.made - moment, moment - self.ends[-1])


def _worker(k, workers):
    return (k + 1) % workers if workers else -1


def observe(record_events, predicted_seconds):
    """Two loaders, and a step, that note when they are called themselves; then some predictions."""
    for batches, more in RUNS.items():
        run = _Run(batches, *more)
        for part in _recorded(run, record_events(run, run.step)):
            yield {(batches, name): value for name, value in part.items()}
    for cases in (IN_TURN, AT_ONCE):
        got = [predicted_seconds(*case) for case in cases]
        yield {cases: [seconds if seconds is None else tried(float, seconds) for seconds in got]}


def _recorded(run, events):
    """How step was called; the events' form; their times, in seconds of time.monotonic()."""
    yield {"steps": len(run.begins), "rounds": run.rounds, "labels": run.got, "events": events}
    yield {"all first": run.batches > 1 and run.given[-1] < run.begins[0]}
    yield {"malformed": [event for event in events if not _is_event(event)]}
    yield {"not floats": [moment for event in events for moment in event[2:] if not isinstance(moment, float)]}
    events = sorted(
        ((kind, worker, float(begin), float(end)) for kind, worker, begin, end in events), key=lambda event: event[2]
    )
    yield {"backwards": [event for event in events if event[3] < event[2]]}
    yield {"counts": {kind: [event[0] for event in events].count(kind) for kind in KINDS}}
    loads, waits, steps = ([event[1:] for event in events if event[0] == kind] for kind in KINDS)
    shift = loads[0][1] - run.stamps[0][0]
    # a recorder may count from its own start, if it does so everywhere: then the waits are shifted alike
    if run.outside(waits[0][1]) <= 0 or run.outside(waits[0][1] - shift) > 0:
        shift = 0.0
    loads, waits, steps = ([(w, begin - shift, end - shift) for w, begin, end in of] for of in (loads, waits, steps))
    yield {
        "from stamps": any(abs(wait[1] - stamp) < SLACK for wait in waits for stamps in run.stamps for stamp in stamps),
        "outside": run.outside(waits[0][1]),
        "repeats": any(math.dist(load[1:], wait[1:]) < 1e-3 for load in loads for wait in waits),
        "loading": [(load[1] - begin, load[2] - end) for load, (begin, end) in zip(loads, run.stamps, strict=True)],
        "loaders": [load[0] for load in loads],
        "swapped": steps[0][2] < run.begins[0] and waits[0][2] >= run.ends[0],
        "workers": [event[0] for event in waits + steps],
        **_times(run, waits, steps),
    }


def _times(run, waits, steps):
    """The times of all batches, one list for each name in ORDER."""
    return {
        "loop begins": [run.started], "asked": run.asked, "next asked": run.asked[1:], "given": run.given,
        "step called": run.begins, "step returned": run.ends, "last step returned": [-math.inf, *run.ends],
        "wait begins": [begin for _, begin, _ in waits], "wait ends": [end for *_, end in waits],
        "step begins": [begin for _, begin, _ in steps], "step ends": [end for *_, end in steps],
    }  # fmt: skip


def _is_event(event):
    return isinstance(event, list | tuple) and len(event) == 4 and event[0] in KINDS


def _is_list(seen, _):
    return isinstance(seen, list | tuple) and len(seen) > 0


def _later(one, other, o):
    """Seconds by which a time is later than another, in each batch."""
    return [a - b for a, b in zip(o[one], o[other], strict=False)]


def _of_batch(seen, most):
    return silent(seen, most) | {"where": f"batch {[late > most for late in seen].index(True)}"}


def _farthest(seen):
    """The batch whose loading event is farthest from its stamps; the seconds by which it begins and ends later."""
    return max(enumerate(seen), key=lambda batch: math.hypot(*batch[1]))


def _off(seen, _):
    k, (begin, end) = _farthest(seen)
    got = f"it begins {begin:+.3f} s and ends {end:+.3f} s from there"
    return {"expected": "the begin and the end in the stamps", "got": got, "where": f"batch {k}"}


def _first(seen, _):
    return {"expected": "", "got": seen[0], "kind": type(seen[0]).__name__}


def _backwards(seen, _):
    return {"expected": "", "got": seen[0], "begin": seen[0][2], "end": seen[0][3]}


def _miscounted(seen, due):
    kind = next(kind for kind in KINDS if seen[kind] != due[kind])
    return {"n": seen[kind], "kind": kind, "batches": due[kind]}


def _recorder(batches, calls, events="", loading="", main=""):
    """Looks at a run of so many batches."""
    workers, rows = RUNS[batches]

    def look(claim, name, due, hint, **more):
        return Look(claim, (batches, name), due, hint, **more)

    def of_loading(seen, _):
        _, (begin, end) = _farthest(seen)
        return "one-image-only" if rows > 1 and abs(begin - end - 0.01 * (rows - 1)) < SLACK else "wrong-loading"

    return [
        look(calls, "steps", batches, "step-not-called", fields=lambda seen, due: {"n": seen, "batches": due}),
        look("", "rounds", 1, "loader-twice", holds=at_most, fields=lambda seen, _: {"n": seen}),
        look("", "labels", [*range(batches)], "wrong-arguments"),
        look("", "all first", False, "loaded-all-first"),
        look(events, "events", "a list of events", "no-events", holds=_is_list),
        look("", "malformed", [], "bad-event", fields=_first),
        look("", "not floats", [], "not-floats", fields=_first),
        look("", "backwards", [], "ends-before", fields=_backwards),
        look("", "counts", dict.fromkeys(KINDS, batches), "missing-events", fields=_miscounted),
        look(loading, "from stamps", False, "wait-from-stamps"),
        look("", "outside", 0, "other-clock", holds=at_most,
             fields=lambda seen, _: {"expected": "times of this run", "got": f"a wait {seen:.1f} s outside of it"}),
        look("", "repeats", False, "main-side-loading"),
        look("", "loading", [(0.0, 0.0)] * batches, of_loading, holds=within(SLACK), fields=_off),
        look("", "loaders", [_worker(k, workers) for k in range(batches)], "wrong-worker"),
        look(main, "swapped", False, "names-swapped"),
        look("", "workers", [-1] * 2 * batches, "main-worker",
             fields=lambda seen, _: {"found": next(worker for worker in seen if worker != -1)}),
        *(Look("", functools.partial(_later, (batches, one), (batches, other)), SLACK, slug,
               holds=at_most, fields=_of_batch) for one, other, slug in ORDER),
    ]  # fmt: skip


def _formula(load, step, n, workers):
    return load + n * max(load / workers, step) if workers else n * (load + step)


def _exact(load, step, n, workers):
    """A perfect pipeline, batch by batch."""
    if workers == 0:
        return n * (load + step)
    end = 0.0
    for i in range(n):
        end = max(end, (i // workers + 1) * load) + step
    return end


def _is_right(case, seconds):
    """Between the formula and a perfect pipeline, which differ by less than a load; in turn they are the same."""
    least, most = sorted((_formula(*case), _exact(*case)))
    return isinstance(seconds, float) and least - SLACK <= seconds <= most + SLACK


def _predicted(kind, claim, cases, hint):
    """A look at predictions, all at once: in a single one, several mistakes can look alike."""

    def fields(seen, due):
        k = [*map(_is_right, cases, seen)].index(False)
        load, step, n, workers = cases[k]
        where = f"loading {load} s, step {step} s, {n} batches, {workers} workers"
        return {"expected": f"{due[k]:.2f} s", "got": seen[k], "where": where}

    return kind(claim, cases, [_formula(*case) for case in cases], hint,
                holds=lambda seen, _: all(map(_is_right, cases, seen)), fields=fields)  # fmt: skip


LOOKS = [
    *_recorder(5, "step is called for every batch, between the loads", "three events per batch, in Python floats",
               "loading: from the stamps, in the worker that did it", "waiting and step: where they begin and end"),
    *_recorder(1, "another loader, of one batch, in the main process"),
    _predicted(Look, "the prediction: in turn, and with workers", IN_TURN, "in-turn-wrong"),
    _predicted(Value, "", AT_ONCE, "wrong-prediction"),
]  # fmt: skip


def balise_2(record_events, predicted_seconds):
    yield from judged(LOOKS, observe, record_events, predicted_seconds)
