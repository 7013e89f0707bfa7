"""Answers to balise 2 of 05_dataloader: record a timeline, and predict it."""

import math
import time

import torch

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 2)


def both(slug, record, predict):
    """An answer to balise 2 is a recorder and a prediction."""
    bank.several(slug, record, predict)


def predicted(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else loading + n * max(loading / workers, step)


def recorder(slug):
    """Decorator: this recorder, with a right prediction."""
    return lambda record: both(slug, record, predicted)


def predictor(slug):
    """Decorator: this prediction, with a right recorder."""
    return lambda predict: both(slug, RIGHT, predict)


def _event(stamps):
    return ("loading", int(stamps[0, 2]), stamps[:, 0].min().item(), stamps[:, 1].max().item())


def record_events(loader, step):
    """With next() and an iterator, in place of a for loop."""
    events, asked = [], time.monotonic()
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        images, labels, stamps = batch
        got = time.monotonic()
        events.append(("waiting", -1, asked, got))
        begin = time.monotonic()
        step(images, labels)
        asked = time.monotonic()
        events.append(("step", -1, begin, asked))
        events.append(_event(stamps))
    return events


RIGHT = record_events

recorder(None)(RIGHT)

PLAIN = """
import time


def record_events(loader, step):
    events, asked, batches = [], time.monotonic(), iter(loader)
    while (batch := next(batches, None)) is not None:
        images, labels, stamps = batch
        got = time.monotonic()
        begins, ends, workers = stamps.T.tolist()
        step(images, labels)
        done = time.monotonic()
        events.append(("loading", int(workers[0]), min(begins), max(ends)))
        events.append(("waiting", -1, asked, got))
        events.append(("step", -1, got, done))
        asked = done
    return events


def predicted_seconds(loading, step, n, workers):
    if workers == 0:
        return n * (loading + step)
    return loading + n * max(loading / workers, step)
"""
FORMULA = "loading + n * max(loading / workers, step)"
WAIT, STEP = '"waiting", -1, asked, got', '"step", -1, got, done'
AHEAD = """
def ahead(loader):
    held = None
    for batch in loader:
        if held is not None:
            yield held
        held = batch
    yield held


def record_events"""
bank.text(None, PLAIN)


def timed(events_of, clock=time.monotonic):
    """A recorder whose events of a batch are events_of(stamps, asked, got, done), times of `clock`."""

    def record_events(loader, step):
        events, asked = [], clock()
        for images, labels, stamps in loader:
            got = clock()
            step(images, labels)
            done = clock()
            events += events_of(stamps, asked, got, done)
            asked = done
        return events

    return record_events


def main_side(asked, got, done):
    """The two right events of the main process."""
    return [("waiting", -1, asked, got), ("step", -1, got, done)]


def image(stamps):
    """A loading event from one row of stamps."""
    begin, end, worker = stamps.tolist()
    return "loading", int(worker), begin, end


def loaded(loading):
    """A recorder with other loading events: loading(stamps, asked, got)."""
    return timed(lambda stamps, asked, got, done: [loading(stamps, asked, got), *main_side(asked, got, done)])


def waited(events_of):
    """A recorder with right loading events: events_of(stamps, asked, got, done) are those of the main process."""
    return timed(lambda stamps, *times: [_event(stamps), *events_of(stamps, *times)])


WITHOUT_LOADING = timed(lambda stamps, *times: main_side(*times))

recorder(None)(waited(lambda stamps, *times: main_side(*times)))


bank.hint("missing-events", "There are {n} events of kind {kind!r} for {batches} batches.")
bank.variant("missing-events", PLAIN, ('        events.append(("waiting", -1, asked, got))\n', ""))


recorder("missing-events")(WITHOUT_LOADING)


bank.hint(
    "other-clock",
    "These are not times of time.monotonic(), the clock of the stamps (nor are durations), so they cannot be "
    "compared with the stamps.",
)
bank.variant("other-clock", PLAIN, ("time.monotonic", "time.time"))


recorder("other-clock")(timed(lambda stamps, *times: [_event(stamps), *main_side(*times)], time.time))


bank.hint(
    "main-side-loading",
    "The loading event repeats the wait of the main process. The batch's stamps say when it was loaded.",
)
bank.variant("main-side-loading", PLAIN, ("min(begins), max(ends)", "asked, got"))


recorder("main-side-loading")(loaded(lambda stamps, asked, got: ("loading", int(stamps[0, 2]), asked, got)))


bank.hint(
    "one-image-only",
    "The loading of a batch lasts from the begin of its first image to the end of its last; you give that of one "
    "image.",
)
bank.variant("one-image-only", PLAIN, ("min(begins), max(ends)", "begins[-1], ends[-1]"))


recorder("one-image-only")(loaded(lambda stamps, asked, got: image(stamps[0])))


bank.hint("wrong-loading", "The loading event must have the earliest begin and the latest end of the batch's stamps.")
bank.variant("wrong-loading", PLAIN, ("max(ends)", "max(begins)"))


recorder("wrong-loading")(loaded(lambda stamps, asked, got: image(stamps.mean(dim=0) - torch.tensor([0.5, 0.0, 0.0]))))


bank.hint(
    "not-floats",
    "Times must be Python floats, not {kind}: tensors are slow to draw and awkward to compare.",
    edge=True,
)
bank.variant("not-floats", PLAIN, ("stamps.T.tolist()", "stamps.T"))


recorder("not-floats")(
    loaded(lambda stamps, asked, got: ("loading", int(stamps[0, 2]), stamps[:, 0].min(), stamps[:, 1].max()))
)


bank.hint(
    "asked-before-step",
    "The next batch was asked for before this step had run. With workers it may be ready, but the step still has to "
    "wait for it.",
)
bank.variant("asked-before-step", PLAIN, ("iter(loader)", "ahead(loader)"), ("\ndef record_events", AHEAD))


@recorder("asked-before-step")
def ahead(loader, step):
    events, asked, batches = [], time.monotonic(), iter(loader)
    batch, got = next(batches, None), time.monotonic()
    while batch is not None:
        asked_next = time.monotonic()
        following, got_next = next(batches, None), time.monotonic()
        begin = time.monotonic()
        step(*batch[:2])
        events += [_event(batch[2]), ("waiting", -1, asked, got), ("step", -1, begin, time.monotonic())]
        batch, asked, got = following, asked_next, got_next
    return events


bank.hint("wait-too-short", "The wait ends when the batch has arrived; yours does not cover the whole wait.")
bank.variant("wait-too-short", PLAIN, (WAIT, '"waiting", -1, asked, asked'))


recorder("wait-too-short")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, asked + 1e-4), ("step", -1, got, done)])
)


bank.hint(
    "step-includes-wait",
    "The step's event includes the wait for its batch. Read the clock again when the batch has arrived.",
)
bank.variant("step-includes-wait", PLAIN, (STEP, '"step", -1, asked, done'))


recorder("step-includes-wait")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got), ("step", -1, asked, done)])
)


bank.hint(
    "ends-before",
    "An event ends at {end:.3f} but begins later, at {begin:.3f}. Give two times of the clock, the begin first, and "
    "no duration.",
)
bank.variant("ends-before", PLAIN, (WAIT, '"waiting", -1, got, asked'))


recorder("ends-before")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got - asked), ("step", -1, got, done - got)])
)

recorder("ends-before")(waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got), ("step", -1, done, got)]))


bank.hint("names-swapped", 'You call the step "waiting", and the wait "step".')
bank.variant("names-swapped", PLAIN, (WAIT, '"step", -1, asked, got'), (STEP, '"waiting", -1, got, done'))


recorder("names-swapped")(
    waited(lambda stamps, asked, got, done: [("step", -1, asked, got), ("waiting", -1, got, done)])
)


bank.hint(
    "wait-from-stamps",
    "The wait begins when the main process asks for the batch. The stamps say when a worker loaded it: read the "
    "clock yourself.",
)
bank.variant("wait-from-stamps", PLAIN, (WAIT, '"waiting", -1, max(ends), got'))


recorder("wait-from-stamps")(waited(lambda stamps, asked, got, done: main_side(stamps[:, 1].max().item(), got, done)))

recorder("wait-from-stamps")(waited(lambda stamps, asked, got, done: main_side(stamps[:, 0].min().item(), got, done)))


@recorder(None)
def record_events(loader, step):
    """Seconds since the start, everywhere; lists in place of tuples; perf_counter, the same clock on Linux."""
    start = time.monotonic()
    events, free = [], 0.0
    for images, labels, stamps in loader:
        got = time.monotonic() - start
        times = stamps.numpy()[:, :2] - start
        step(images, labels)
        done = time.monotonic() - start
        events.append(["loading", int(stamps[-1, 2]), float(times.min()), float(times.max())])
        events += [["waiting", -1, free, got], ["step", -1, got, done]]
        free = done
    return sorted(events, key=lambda event: event[2])


@predictor(None)
def predicted_seconds(loading, step, n, workers):
    """Batch by batch."""
    if not workers:
        return (loading + step) * n
    now = 0.0
    for i in range(n):
        now = max(now, math.ceil((i + 1) / workers) * loading) + step
    return now


@predictor(None)
def predicted_seconds(loading, step, n, workers):
    """The first batch, n - 1 turns of the slower side, the last step."""
    if workers:
        return loading + (n - 1) * max(step, loading / workers) + step
    return n * loading + n * step


@recorder("nothing-returned")
def record_events(loader, step):
    for images, labels, _ in loader:
        step(images, labels)


bank.hint("no-events", "Return the list of events (kind, worker, begin, end), three per batch.")
bank.variant("no-events", PLAIN, ("return events", "return events[:0]"))


@recorder("no-events")
def record_events(loader, step):
    for images, labels, _ in loader:
        step(images, labels)
    return []


bank.hint("bad-event", 'An event is (kind, worker, begin, end) with kind "loading", "waiting" or "step".')
bank.variant("bad-event", PLAIN, ('"loading"', '"load"'))


@recorder("bad-event")
def record_events(loader, step):
    events = []
    for images, labels, _ in loader:
        begin = time.monotonic()
        step(images, labels)
        events.append((begin, time.monotonic()))
    return events


bank.hint("step-not-called", "step(images, labels) was called {n} times for {batches} batches.")
bank.variant("step-not-called", PLAIN, ("        step(images, labels)", "        events and step(images, labels)"))


@recorder("step-not-called")
def record_events(loader, step):
    return [_event(stamps) for _, _, stamps in loader]


bank.hint("wrong-arguments", "step must be called with the images and the labels of the batch, in this order.")
bank.variant("wrong-arguments", PLAIN, ("step(images, labels)", "step(labels, images)"))


@recorder("wrong-arguments")
def record_events(loader, step):
    events = []
    for images, labels, stamps in loader:
        step(labels, images)
        events.append(_event(stamps))
    return events


bank.hint(
    "loaded-all-first",
    "All batches were loaded before the first step ran. Call step inside the loop: the timeline must show how "
    "loading and steps wait for each other.",
)
bank.variant("loaded-all-first", PLAIN, ("iter(loader)", "iter(list(loader))"))


@recorder("loaded-all-first")
def record_events(loader, step):
    events, asked = [], time.monotonic()
    for images, labels, stamps in list(loader):
        got = time.monotonic()
        step(images, labels)
        done = time.monotonic()
        events += [_event(stamps), ("waiting", -1, asked, got), ("step", -1, got, done)]
        asked = done
    return events


bank.hint("loader-twice", "You loop over the loader {n} times. Do it once: a second loop loads everything again.")
bank.variant("loader-twice", PLAIN, ("[], time", "list(loader)[:0], time"))


@recorder("loader-twice")
def record_events(loader, step):
    events = [_event(stamps) for _, _, stamps in loader]
    return events + WITHOUT_LOADING(loader, step)


@recorder("missing-events")
def record_events(loader, step):
    events, asked = [], time.monotonic()
    for images, labels, stamps in loader:
        got = time.monotonic()
        step(images, labels)
        done = time.monotonic()
        events = [_event(stamps), ("waiting", -1, asked, got), ("step", -1, got, done)]
        asked = done
    return events


@recorder("other-clock")
def record_events(loader, step):
    start = time.monotonic()
    events, asked = [], 0.0
    for images, labels, stamps in loader:
        got = time.monotonic() - start
        step(images, labels)
        done = time.monotonic() - start
        events += [_event(stamps), ("waiting", -1, asked, got), ("step", -1, got, done)]
        asked = done
    return events


bank.hint("main-worker", "Waiting and step happen in the main process: their worker is -1, not {found}.", edge=True)
bank.variant("main-worker", PLAIN, (WAIT, '"waiting", int(workers[0]), asked, got'))


@recorder("main-worker")
def record_events(loader, step):
    """Three events a batch: all bear the number of the worker that loaded it."""
    events = RIGHT(loader, step)
    loaded = [worker for kind, worker, *_ in events if kind == "loading"]
    return [(kind, loaded[k // 3], begin, end) for k, (kind, _, begin, end) in enumerate(events)]


@recorder("main-worker")
def record_events(loader, step):
    """The main process has number 0 here."""
    return [(kind, worker if kind == "loading" else 0, begin, end) for kind, worker, begin, end in RIGHT(loader, step)]


bank.hint(
    "wrong-worker",
    "The worker's number is in the third column of the stamps; it is -1 in the main process.",
    edge=True,
)
bank.variant("wrong-worker", PLAIN, ("int(workers[0])", "-1"))


@recorder("wrong-worker")
def record_events(loader, step):
    events, asked = [], time.monotonic()
    for k, (images, labels, stamps) in enumerate(loader):
        got = time.monotonic()
        step(images, labels)
        done = time.monotonic()
        _, _, begin, end = _event(stamps)
        events += [("loading", k % 2, begin, end), ("waiting", -1, asked, got), ("step", -1, got, done)]
        asked = done
    return events


bank.hint(
    "first-wait-missing",
    "The first wait must include the start of the loader: read the clock before iter(loader).",
    edge=True,
)
bank.variant(
    "first-wait-missing",
    PLAIN,
    ("time.monotonic(), iter(loader)\n", "0.0, iter(loader)\n    asked = time.monotonic()\n"),
)


@recorder("first-wait-missing")
def record_events(loader, step):
    events, batches = [], iter(loader)
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return events
        images, labels, stamps = batch
        got = time.monotonic()
        step(images, labels)
        events += [_event(stamps), ("waiting", -1, asked, got), ("step", -1, got, time.monotonic())]


bank.hint(
    "wait-includes-step",
    "The wait for a batch begins when the step of the batch before it is over; yours includes that step.",
)
bank.variant("wait-includes-step", PLAIN, ("asked = done", "asked = got"))


@recorder("wait-includes-step")
def record_events(loader, step):
    events, asked = [], time.monotonic()
    for images, labels, stamps in loader:
        got = time.monotonic()
        events += [_event(stamps), ("waiting", -1, asked, got)]
        asked = time.monotonic()
        step(images, labels)
        events += [("step", -1, got, time.monotonic())]
    return events


bank.hint("step-too-short", "The step's event does not cover the whole call of step.")
bank.variant("step-too-short", PLAIN, (STEP, '"step", -1, got, got'))


@recorder("step-too-short")
def record_events(loader, step):
    events, asked = [], time.monotonic()
    for images, labels, stamps in loader:
        got = time.monotonic()
        begin = time.monotonic()
        end = time.monotonic()
        step(images, labels)
        events += [_event(stamps), ("waiting", -1, asked, got), ("step", -1, begin, end)]
        asked = time.monotonic()
    return events


bank.hint("in-turn-wrong", "With workers=0, everything is done in turn: n × (loading + step).", edge=True)
bank.variant("in-turn-wrong", PLAIN, ("n * (loading + step)", "n * max(loading, step)"))


@predictor("in-turn-wrong")
def predicted_seconds(loading, step, n, workers):
    return loading + n * max(loading / max(workers, 1), step)


@predictor("in-turn-wrong")
def predicted_seconds(loading, step, n, workers):
    if workers == 0:
        return loading + n * step
    return predicted(loading, step, n, workers)


bank.hint("workers-not-counted", "w workers load w batches at a time: count loading / w per batch.")
bank.variant("workers-not-counted", PLAIN, (FORMULA, "n * max(loading, step)"))


@predictor("workers-not-counted")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else loading + n * max(loading, step)


bank.hint("not-overlapped", "With workers, loading and step run at the same time: the longer one counts, not the sum.")
bank.variant("not-overlapped", PLAIN, (FORMULA, "loading + n * (loading + step)"))


@predictor("not-overlapped")
def predicted_seconds(loading, step, n, workers):
    return n * (loading / max(workers, 1) + step)


@predictor("not-overlapped")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step)


bank.hint("shorter-counts", "The slower side sets the pace: take the maximum.")
bank.variant("shorter-counts", PLAIN, ("max(loading / workers, step)", "min(loading / workers, step)"))


@predictor("shorter-counts")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else n * min(loading / workers, step)


bank.hint(
    "first-batch-forgotten",
    "The first batch cannot load during another batch's step: no step runs until it is loaded.",
)
bank.variant("first-batch-forgotten", PLAIN, (FORMULA, "max(n * loading / workers, n * step)"))


@predictor("first-batch-forgotten")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else n * max(loading / workers, step)


bank.hint(
    "one-step-missing",
    "This is n - 1 turns of the slower side. There are n steps: the first batch is loaded, and its step comes after "
    "that.",
    edge=True,
)
bank.variant("one-step-missing", PLAIN, ("+ n * max", "+ (n - 1) * max"))


@predictor("one-step-missing")
def predicted_seconds(loading, step, n, workers):
    """As if the first load were one of the n turns."""
    if not workers:
        return n * (loading + step)
    return loading + max(loading / workers, step) * (n - 1)


bank.hint("wrong-prediction", "This is not what the formulas give.")
bank.variant("wrong-prediction", PLAIN, (FORMULA, "2 * " + FORMULA))


@predictor("wrong-prediction")
def predicted_seconds(loading, step, n, workers):
    """One turn too many, which is little beside two hundred."""
    return n * (loading + step) if not workers else loading + (n + 1) * max(loading / workers, step)


@predictor("wrong-prediction")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else n * max(loading, step) / workers


@predictor("nothing-returned")
def predicted_seconds(loading, step, n, workers):
    pass


@recorder("raised")
def record_events(loader, step):
    """The call that does not fit is the answer's own."""
    for images, labels, _stamps in loader:
        step((images, labels))
