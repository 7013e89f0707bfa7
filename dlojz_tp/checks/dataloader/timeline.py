"""Balise 2: the recorder, judged by inequalities that hold on a busy machine too, and the prediction."""

import time

import torch

from dlojz_tp.checking import Wrong

HINTS = {
    "no-events": "Return the list of events (kind, worker, begin, end), three per batch.",
    "bad-event": 'An event is (kind, worker, begin, end) with kind "loading", "waiting" or "step".',
    "step-not-called": "step(images, labels) was called {n} times for {batches} batches.",
    "wrong-arguments": "step must be called with the images and the labels of the batch, in this order.",
    "loaded-all-first": "All batches were loaded before the first step ran. Call step inside the loop: the "
                        "timeline must show how loading and steps wait for each other.",
    "loader-twice": "You loop over the loader {n} times. Do it once: a second loop loads everything again.",
    "missing-events": "There are {n} events of kind {kind!r} for {batches} batches.",
    "other-clock": "These are not times of time.monotonic(), the clock of the stamps (nor are durations), so they "
                   "cannot be compared with the stamps.",
    "ends-before": "An event ends at {end:.3f} but begins later, at {begin:.3f}. Give two times of the clock, the "
                   "begin first, and no duration.",
    "wait-from-stamps": "The wait begins when the main process asks for the batch. The stamps say when a worker "
                        "loaded it: read the clock yourself.",
    "names-swapped": 'You call the step "waiting", and the wait "step".',
    "main-side-loading": "The loading event repeats the wait of the main process. The batch's stamps say when it "
                         "was loaded.",
    "one-image-only": "The loading of a batch lasts from the begin of its first image to the end of its last; you "
                      "give that of one image.",
    "wrong-loading": "The loading event must have the earliest begin and the latest end of the batch's stamps.",
    "wrong-worker": "The worker's number is in the third column of the stamps; it is -1 in the main process.",
    "main-worker": "Waiting and step happen in the main process: their worker is -1, not {found}.",
    "first-wait-missing": "The first wait must include the start of the loader: read the clock before iter(loader).",
    "wait-includes-step": "The wait for a batch begins when the step of the batch before it is over; yours "
                          "includes that step.",
    "wait-too-short": "The wait ends when the batch has arrived; yours does not cover the whole wait.",
    "asked-before-step": "The next batch was asked for before this step had run. With workers it may be ready, but "
                         "the step still has to wait for it.",
    "step-includes-wait": "The step's event includes the wait for its batch. Read the clock again when the batch "
                          "has arrived.",
    "step-too-short": "The step's event does not cover the whole call of step.",
    "not-floats": "Times must be Python floats, not {kind}: tensors are slow to draw and awkward to compare.",
    "in-turn-wrong": "With workers=0, everything is done in turn: n × (loading + step).",
    "workers-not-counted": "w workers load w batches at a time: count loading / w per batch.",
    "not-overlapped": "With workers, loading and step run at the same time: the longer one counts, not the sum.",
    "shorter-counts": "The slower side sets the pace: take the maximum.",
    "one-step-missing": "This is n - 1 turns of the slower side. There are n steps: the first batch is loaded, and "
                        "its step comes after that.",
    "first-batch-forgotten": "The first batch cannot load during another batch's step: no step runs until it is "
                             "loaded.",
    "wrong-prediction": "This is not what the formulas give.",
}


def balise_2(record_events, predicted_seconds):
    """A loader and a step that note when they are called themselves."""
    yield "step is called for every batch, between the loads"
    run = _Run()
    events = record_events(run, run.step)
    _called_right(run)
    yield "three events per batch, in Python floats"
    kinds = _sorted(events, run)
    yield "loading: from the stamps, in the worker that did it"
    shift = _loading(kinds, run)
    yield "waiting and step: where they begin and end"
    _main(kinds, run, shift)
    yield "another loader, of one batch, in the main process"
    run = _Run(batches=1, workers=0, rows=1)
    kinds = _sorted(record_events(run, run.step), run)
    _main(kinds, run, _loading(kinds, run))
    yield "the prediction: in turn, and with workers"
    _prediction(predicted_seconds)


class _Run:
    """A loader and its step; both write down the times at which they really ran."""

    def __init__(self, batches=5, workers=2, rows=4):
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
            worker = (k + 1) % self.workers if self.workers else -1
            self.stamps.append((worker, rows[0][0], rows[-1][1]))
            stamps = torch.cat([stamps, torch.full((self.rows, 1), worker, dtype=torch.float64)], dim=1)
            self.given.append(time.monotonic())
            yield torch.full((self.rows, 2), float(k)), torch.full((self.rows,), k), stamps

    def step(self, images, labels):
        self.begins.append(time.monotonic())
        time.sleep(0.003)
        same = isinstance(images, torch.Tensor) and images.shape == (self.rows, 2) and labels.shape == (self.rows,)
        self.got.append(int(labels[0]) if same and images[0, 0] == labels[0] else None)
        self.ends.append(time.monotonic())


def _called_right(run):
    if len(run.begins) != run.batches:
        raise Wrong("step-not-called", n=len(run.begins), batches=run.batches)
    if run.rounds > 1:
        raise Wrong("loader-twice", n=run.rounds)
    if run.got != list(range(run.batches)):
        raise Wrong("wrong-arguments", expected=str(list(range(run.batches))), got=str(run.got))
    if run.batches > 1 and run.given[-1] < run.begins[0]:
        raise Wrong("loaded-all-first")


def _sorted(events, run):
    if events is None:
        raise Wrong("nothing-returned")
    if not isinstance(events, list | tuple) or not events:
        raise Wrong("no-events", got=events)
    kinds = {"loading": [], "waiting": [], "step": []}
    for event in events:
        if not isinstance(event, list | tuple) or len(event) != 4 or event[0] not in kinds:
            raise Wrong("bad-event", got=event)
        kinds[event[0]].append(event)
        for value in event[2:]:
            if not isinstance(value, float):
                raise Wrong("not-floats", got=value, kind=type(value).__name__)
        begin, end = event[2:]
        if end < begin:
            raise Wrong("ends-before", got=event, begin=begin, end=end)
    for kind, found in kinds.items():
        if len(found) != run.batches:
            raise Wrong("missing-events", n=len(found), kind=kind, batches=run.batches)
        found.sort(key=lambda event: event[2])
    return kinds


def _loading(kinds, run):
    """Compare with the stamps; return the shift by which all of the answer's times differ from the clock (0 is usual)."""
    truth = sorted(run.stamps, key=lambda stamp: stamp[1])
    waits = [(begin, end) for *_, begin, end in kinds["waiting"]]
    loads = [(begin, end) for *_, begin, end in kinds["loading"]]
    shift = loads[0][0] - truth[0][1]

    def meanwhile(stamp):
        return run.made <= stamp <= run.ends[-1]

    # a recorder may count from its own start, if it does so everywhere: then the waits are shifted alike
    if meanwhile(waits[0][0]) or not meanwhile(waits[0][0] - shift):
        shift = 0.0
    where = f"batch 0 of {run.batches}"
    if any(abs(begin - stamp) < 1e-6 for begin, _ in waits for _, *stamps in truth for stamp in stamps):
        raise Wrong("wait-from-stamps", where=where)
    if not meanwhile(waits[0][0] - shift):
        raise Wrong("other-clock", expected=f"about {run.asked[0]:.1f}", got=f"{waits[0][0]:.1f}", where=where)
    for k, ((worker, begin, end), (got_begin, got_end)) in enumerate(zip(truth, loads, strict=True)):
        if abs(got_begin - begin - shift) < 1e-6 and abs(got_end - end - shift) < 1e-6:
            if kinds["loading"][k][1] != worker:
                raise Wrong("wrong-worker", expected=worker, got=kinds["loading"][k][1], where=f"batch {k}")
            continue
        slug = "wrong-loading"
        if any(abs(got_begin - w[0]) < 1e-3 and abs(got_end - w[1]) < 1e-3 for w in waits):
            slug = "main-side-loading"
        elif run.rows > 1 and abs((got_end - got_begin) - 0.01) < 1e-6:
            slug = "one-image-only"
        raise Wrong(slug, expected=f"{begin + shift:.3f} to {end + shift:.3f}", got=f"{got_begin:.3f} to {got_end:.3f}",
                    where=f"batch {k}")  # fmt: skip
    return shift


def _main(kinds, run, shift):
    slack = 1e-6
    (*_, first_wait), (*_, first_step) = kinds["waiting"][0], kinds["step"][0]
    if first_step - shift < run.begins[0] and first_wait - shift >= run.ends[0]:
        raise Wrong("names-swapped", where="batch 0")
    for k in range(run.batches):
        (*_, wait_begin, wait_end), (*_, step_begin, step_end) = kinds["waiting"][k], kinds["step"][k]
        wait_begin, wait_end, step_begin, step_end = (t - shift for t in (wait_begin, wait_end, step_begin, step_end))
        where = f"batch {k}"
        for _, worker, *_ in (kinds["waiting"][k], kinds["step"][k]):
            if worker != -1:
                raise Wrong("main-worker", expected=-1, got=worker, where=where, found=worker)
        if k == 0 and wait_begin > run.started + slack:
            raise Wrong("first-wait-missing", where=where)
        if k and wait_begin < run.ends[k - 1] - slack:
            raise Wrong("wait-includes-step", where=where)
        if step_begin < run.given[k] - slack:
            raise Wrong("step-includes-wait", where=where)
        if wait_begin > run.asked[k] + slack or wait_end < run.given[k] - slack:
            raise Wrong("wait-too-short", where=where)
        if wait_end > run.begins[k] + slack:
            raise Wrong("wait-includes-step", where=where)
        late = k + 1 < run.batches and step_end > run.asked[k + 1] + slack
        if late:
            early = run.asked[k + 1] < run.begins[k] - slack
            raise Wrong("asked-before-step" if early else "step-includes-wait", where=where)
        if step_begin > run.begins[k] + slack or step_end < run.ends[k] - slack:
            raise Wrong("step-too-short", where=where)


def _exact(load, step, n, workers):
    """A perfect pipeline, batch by batch."""
    if workers == 0:
        return n * (load + step)
    end = 0.0
    for i in range(n):
        end = max(end, (i // workers + 1) * load) + step
    return end


def _prediction(predicted_seconds):
    """In turn exactly; with workers between the formula and a perfect pipeline, which differ by less than a load."""
    _in_turn(predicted_seconds)
    cases = [(0.04, 0.05, 200, 2), (0.06, 0.03, 200, 1), (0.2, 0.03, 240, 4), (0.4, 0.1, 1, 2), (0.5, 0.01, 1, 8)]
    got = [_seconds(predicted_seconds, *case) for case in cases]
    for case, seconds in zip(cases, got, strict=True):
        load, step, n, workers = case
        formula, exact = load + n * max(load / workers, step), _exact(*case)
        if min(formula, exact) - 1e-6 <= seconds <= max(formula, exact) + 1e-6:
            continue
        known = {
            "not-overlapped": (lambda t, s, n, w: n * (t + s), lambda t, s, n, w: n * (t / w + s)),
            "shorter-counts": (lambda t, s, n, w: n * min(t / w, s), lambda t, s, n, w: t + n * min(t / w, s)),
            "workers-not-counted": (lambda t, s, n, w: n * max(t, s), lambda t, s, n, w: t + n * max(t, s)),
            "first-batch-forgotten": (lambda t, s, n, w: n * max(t / w, s),),
            "one-step-missing": (lambda t, s, n, w: t + (n - 1) * max(t / w, s),),
        }
        slug = next(
            (s for s, mistakes in known.items() if any(_same(mistake, cases, got) for mistake in mistakes)), None
        )
        raise Wrong(slug or "wrong-prediction", expected=f"{formula:.2f} s", got=seconds, where=_case(*case))


def _in_turn(predicted_seconds):
    for load, step, n in ((0.06, 0.03, 200), (0.02, 0.05, 7)):
        seconds = _seconds(predicted_seconds, load, step, n, 0)
        if abs(seconds - n * (load + step)) > 1e-6:
            raise Wrong(
                "in-turn-wrong", expected=f"{n * (load + step):.2f} s", got=seconds, where=_case(load, step, n, 0)
            )


def _seconds(predicted_seconds, *case):
    got = predicted_seconds(*case)
    if got is None:
        raise Wrong("nothing-returned")
    try:
        return float(got)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong("wrong-prediction", expected="a number of seconds", got=got, where=_case(*case)) from None


def _same(mistake, cases, got):
    """Whether all cases are those of this mistake: in a single one, several can look alike."""
    return all(abs(mistake(*case) - seconds) < 1e-6 for case, seconds in zip(cases, got, strict=True))


def _case(load, step, n, workers):
    return f"loading {load} s, step {step} s, {n} batches, {workers} workers"
