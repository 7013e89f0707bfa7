"""Answers to balises 2 and 4 of 05_dataloader."""

import math
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from dlojz_tp import measure
from tests.answers.bank import Bank

bank = Bank("05_dataloader")


def both(slug, record, predict):
    """An answer to balise 2 is a recorder and a prediction."""
    bank.several(2, slug, record, predict)


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
recorder("missing-events")(WITHOUT_LOADING)
recorder("other-clock")(timed(lambda stamps, *times: [_event(stamps), *main_side(*times)], time.time))
recorder("main-side-loading")(loaded(lambda stamps, asked, got: ("loading", int(stamps[0, 2]), asked, got)))
recorder("one-image-only")(loaded(lambda stamps, asked, got: image(stamps[0])))
recorder("wrong-loading")(loaded(lambda stamps, asked, got: image(stamps.mean(dim=0) - torch.tensor([0.5, 0.0, 0.0]))))
recorder("not-floats")(
    loaded(lambda stamps, asked, got: ("loading", int(stamps[0, 2]), stamps[:, 0].min(), stamps[:, 1].max()))
)


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


recorder("wait-too-short")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, asked + 1e-4), ("step", -1, got, done)])
)
recorder("step-includes-wait")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got), ("step", -1, asked, done)])
)
recorder("ends-before")(
    waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got - asked), ("step", -1, got, done - got)])
)
recorder("ends-before")(waited(lambda stamps, asked, got, done: [("waiting", -1, asked, got), ("step", -1, done, got)]))
recorder("names-swapped")(
    waited(lambda stamps, asked, got, done: [("step", -1, asked, got), ("waiting", -1, got, done)])
)
recorder("wait-from-stamps")(
    waited(lambda stamps, asked, got, done: main_side(stamps[:, 1].max().item(), got, done))
)
recorder("wait-from-stamps")(
    waited(lambda stamps, asked, got, done: main_side(stamps[:, 0].min().item(), got, done))
)


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


@recorder("no-events")
def record_events(loader, step):
    for images, labels, _ in loader:
        step(images, labels)
    return []


@recorder("bad-event")
def record_events(loader, step):
    events = []
    for images, labels, _ in loader:
        begin = time.monotonic()
        step(images, labels)
        events.append((begin, time.monotonic()))
    return events


@recorder("step-not-called")
def record_events(loader, step):
    return [_event(stamps) for _, _, stamps in loader]


@recorder("wrong-arguments")
def record_events(loader, step):
    events = []
    for images, labels, stamps in loader:
        step(labels, images)
        events.append(_event(stamps))
    return events


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


@predictor("in-turn-wrong")
def predicted_seconds(loading, step, n, workers):
    return loading + n * max(loading / max(workers, 1), step)


@predictor("in-turn-wrong")
def predicted_seconds(loading, step, n, workers):
    if workers == 0:
        return loading + n * step
    return predicted(loading, step, n, workers)


@predictor("workers-not-counted")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else loading + n * max(loading, step)


@predictor("not-overlapped")
def predicted_seconds(loading, step, n, workers):
    return n * (loading / max(workers, 1) + step)


@predictor("not-overlapped")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step)


@predictor("shorter-counts")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else n * min(loading / workers, step)


@predictor("first-batch-forgotten")
def predicted_seconds(loading, step, n, workers):
    return n * (loading + step) if workers == 0 else n * max(loading / workers, step)


@predictor("one-step-missing")
def predicted_seconds(loading, step, n, workers):
    """As if the first load were one of the n turns."""
    if not workers:
        return n * (loading + step)
    return loading + max(loading / workers, step) * (n - 1)


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


# ---------------------------------------------------------------- balise 4

NAMES = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def grouped(records):
    found = defaultdict(list)
    for record in records:
        found[tuple(record.settings[name] for name in NAMES)].append(record)
    return found


def times_of(record, skip=None):
    return [step["total"] for step in record.steps[record.warmup if skip is None else skip :]]


def choose(records, tolerance=0.05, *, time_of=None, memory_of=None, key=None, pool=False, failures=True, some=False):
    """A right choice in another style; wrong ones change a part of it."""
    time_of = time_of or (lambda group: statistics.median(np.mean(times_of(r)) for r in group))
    memory_of = memory_of or (lambda group: max(max(r.peak_memory_bytes) for r in group))
    rows = []
    for names, group in grouped(records).items():
        if failures and any(r.out_of_memory for r in group):
            continue
        group = [r for r in group if some or len(r.steps) > r.warmup]
        if group:
            rows.append((time_of(group), names[0], memory_of(group), names))
    if not rows:
        raise ValueError("nothing to choose from")
    limit = min(rows, key=lambda row: row[0])[0] * (1 + tolerance)
    good = [row for row in rows if row[0] <= limit]
    return dict(zip(NAMES, min(good, key=key or (lambda row: row[1:3]))[-1]))


@bank.right(4)
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance)


@bank.right(4)
def choose_options(records, tolerance=0.05):
    """Sorted, cheapest first; total time over number of steps."""
    table = {}
    for options, group in grouped(records).items():
        usable = [measure.counted_steps(r) for r in group if measure.counted_steps(r)]
        if usable and not any(r.out_of_memory for r in group):
            means = sorted(sum(s["total"] for s in steps) / len(steps) for steps in usable)
            seconds = float(np.median(means))
            table[options] = seconds, max(byte for r in group for byte in r.peak_memory_bytes)
    if not table:
        raise ValueError("no trial")
    fastest = min(seconds for seconds, _ in table.values())
    for options in sorted(table, key=lambda o: (o[0], table[o][1])):
        if table[options][0] / fastest - 1 <= tolerance:
            return {name: options[k] for k, name in enumerate(NAMES)}
    return None


@bank.right(4)
def choose_options(records, tolerance=0.05):
    """Candidates from a sorted list; what failed is kept as an infinite time."""
    rows = []
    for names in sorted({tuple(r.settings[name] for name in NAMES) for r in records}, key=str):
        group = [r for r in records if all(r.settings[n] == v for n, v in zip(NAMES, names))]
        counted = [np.array(times_of(r)) for r in group if times_of(r)]
        broken = any(r.out_of_memory for r in group) or not counted
        time = math.inf if broken else float(np.quantile([c.sum() / len(c) for c in counted], 0.5))
        rows.append((time, np.max([max(r.peak_memory_bytes, default=0) for r in group]), names))
    fastest = min((row[0] for row in rows), default=math.inf)
    if math.isinf(fastest):
        raise ValueError("every trial failed")
    rows = [row for row in rows if row[0] <= fastest + tolerance * fastest]
    fewest = min(row[2][0] for row in rows)
    rows = sorted((row for row in rows if row[2][0] == fewest), key=lambda row: row[1])
    return {"num_workers": rows[0][2][0], "prefetch_factor": rows[0][2][1], "pin_memory": rows[0][2][2],
            "persistent_workers": rows[0][2][3]}  # fmt: skip


@bank.wrong(4, "not-options")
def choose_options(records, tolerance=0.05):
    best = choose(records, tolerance)
    return next(r.settings for r in records if all(r.settings[name] == best[name] for name in NAMES))


@bank.wrong(4, "not-options")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance)["num_workers"]


@bank.wrong(4, "median-over-steps")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(t for r in group for t in times_of(r)))


@bank.wrong(4, "longest-step")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(max(times_of(r)) for r in group))


@bank.wrong(4, "warmup-counted")
def choose_options(records, tolerance=0.05):
    return choose(
        records, tolerance, some=True, time_of=lambda g: statistics.median(np.mean(times_of(r, 0)) for r in g)
    )


@bank.wrong(4, "warmup-counted")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda g: statistics.median(np.mean(times_of(r, 2) or [1e9]) for r in g))


@bank.wrong(4, "failed-not-out")
def choose_options(records, tolerance=0.05):
    return choose([r for r in records if not r.out_of_memory], tolerance)


@bank.wrong(4, "failed-not-out")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, failures=False)


@bank.wrong(4, "noise-believed")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: min(np.mean(times_of(r)) for r in group))


@bank.wrong(4, "noise-believed")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.mean(np.mean(times_of(r)) for r in group))


@bank.wrong(4, "noise-believed")
def choose_options(records, tolerance=0.05):
    one_each = {tuple(r.settings[name] for name in NAMES): r for r in records if len(r.steps) > r.warmup}
    failed = [r for r in records if r.out_of_memory]
    return choose([*one_each.values(), *failed], tolerance)


@bank.wrong(4, "pooled-trials")
def choose_options(records, tolerance=0.05):
    def trimmed(group):
        means = sorted((np.mean(times_of(r)), len(times_of(r)), r) for r in group)
        if len({n for _, n, _ in means}) == 1:
            return statistics.median(mean for mean, *_ in means)
        return np.mean([t for r in group for t in times_of(r)])

    return choose(records, tolerance, time_of=trimmed)


@bank.wrong(4, "fastest-not-cheapest")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: row[0])


@bank.wrong(4, "too-slow")
def choose_options(records, tolerance=0.05):
    """Each within the tolerance of the one before it: far from the fastest in the end."""
    rows = {}
    choose(records, tolerance, key=lambda row: rows.setdefault(row[3], row)[0])
    choose(records, 1e9, key=lambda row: rows.setdefault(row[3], row)[0])
    first, *others = sorted(rows.values(), key=lambda row: row[0])
    for row in others:
        if row[0] <= (1 + tolerance) * first[0] and row[1:3] < first[1:3]:
            first = row
    return dict(zip(NAMES, first[-1]))


@bank.wrong(4, "median-over-steps")
def choose_options(records, tolerance=0.05):
    """A harmonic mean: steps a second, averaged."""
    rate = lambda record: np.mean([1 / t for t in times_of(record)])  # noqa: E731
    return choose(records, tolerance, time_of=lambda group: statistics.median(1 / rate(r) for r in group))


@bank.wrong(4, "median-over-steps")
def choose_options(records, tolerance=0.05):
    """The shortest and the longest step left out."""
    trimmed = lambda record: np.mean(sorted(times_of(record))[1:-1] or times_of(record))  # noqa: E731
    return choose(records, tolerance, time_of=lambda group: statistics.median(map(trimmed, group)))


@bank.wrong(4, "too-slow")
def choose_options(records, tolerance=0.05):
    return choose(records, 2 * tolerance)


@bank.wrong(4, "tolerance-ignored")
def choose_options(records, tolerance=0.05):
    return choose(records, 0.05)


@bank.wrong(4, "wrong-choice")
def choose_options(records, tolerance=0.05):
    return choose(records, 1e9)


@bank.wrong(4, "wrong-choice")
def choose_options(records, tolerance=0.05):
    return dict(zip(NAMES, (2, 2, False, False)))


@bank.wrong(4, "memory-before-workers")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: (row[2], row[1]))


@bank.wrong(4, "memory-ignored")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: row[1])


@bank.wrong(4, "memory-ignored")
def choose_options(records, tolerance=0.05):
    """Between as many workers, what stands first in the tuple."""
    return choose(records, tolerance, key=lambda row: row[3])


@bank.wrong(4, "smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: max(r.peak_memory_bytes[0] for r in group))


@bank.wrong(4, "smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: min(max(r.peak_memory_bytes) for r in group))


@bank.wrong(4, "smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: max(sum(r.peak_memory_bytes) for r in group))


@bank.wrong(4, "smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: sum(max(r.peak_memory_bytes) for r in group))


def strictly(take):
    """Leaves the fastest out where nothing is tolerated."""

    def choose_options(records, tolerance=0.05):
        rows = {}
        for names, group in grouped(records).items():
            means = [statistics.mean(times_of(r)) for r in group if times_of(r)]
            if means and not any(r.out_of_memory for r in group):
                rows[names] = statistics.median(means), max(max(r.peak_memory_bytes) for r in group)
        fastest = min(seconds for seconds, _ in rows.values())
        good = [names for names, (seconds, _) in rows.items() if seconds < fastest * (1 + tolerance)]
        return dict(zip(NAMES, take(good, lambda names: (names[0], rows[names][1]))))

    bank.several(4, "fastest-left-out", choose_options)


strictly(lambda good, cost: min(good, key=cost))
strictly(lambda good, cost: sorted(good, key=cost)[0])


@bank.wrong(4, "loading-only")
def choose_options(records, tolerance=0.05):
    def waiting(group):
        means = [np.mean([s["loading"] for s in r.steps[r.warmup :]]) for r in group]
        return statistics.median(means)

    return choose(records, tolerance, time_of=waiting)


@bank.wrong(4, "empty-not-refused")
def choose_options(records, tolerance=0.05):
    try:
        return choose(records, tolerance)
    except ValueError:
        return {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}


@bank.wrong(4, "empty-not-refused")
def choose_options(records, tolerance=0.05):
    try:
        return choose(records, tolerance)
    except ValueError:
        return None


@bank.wrong(4, "records-changed")
def choose_options(records, tolerance=0.05):
    for record in records:
        record.steps = record.steps[record.warmup :]
        record.warmup = 0
    return choose(records, tolerance)


@bank.wrong(4, "nothing-returned")
def choose_options(records, tolerance=0.05):
    choose(records, tolerance)


@bank.wrong(4, "signature")
def choose_options(records):
    return choose(records)


@bank.wrong(4, "sum-over-steps")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(sum(times_of(r)) for r in group))


@recorder("raised")
def record_events(loader, step):
    """The call that does not fit is the answer's own."""
    for images, labels, _stamps in loader:
        step((images, labels))

whole = Bank("05_dataloader", whole=True)
whole.slip(4, "step-only", ('step["total"]', 'step["step"]'))
whole.slip(4, "step-only", ('step["total"]', 'step["total"] - step["loading"]'))
whole.slip(4, "noise-believed", ("statistics.median(means)", "means[0]"))
whole.slip(4, "noise-believed", ("statistics.median(means)", "means[min(1, len(means) - 1)]"))
bank.add(whole)

with_setup = Bank("05_dataloader", whole=True)
with_setup.text(
    4,
    "fastest-not-cheapest",
    """
def choose_options(records, tolerance=0.05):
    trials, failed = {}, set()
    for record in records:
        choice = tuple(record.settings[name] for name in OPTIONS)
        if record.out_of_memory:
            failed.add(choice)
        elif measure.counted_steps(record):
            trials.setdefault(choice, []).append(record)
    seconds, memory = {}, {}
    for choice, found in trials.items():
        if choice in failed:
            continue
        memory[choice] = max(max(record.peak_memory_bytes, default=0) for record in found)
        means = sorted(sum(s["total"] for s in steps) / len(steps) for steps in map(measure.counted_steps, found))
        half = len(means) // 2
        seconds[choice] = (means[half] + means[~half]) / 2
    if not seconds:
        raise ValueError("no choice of options is left: every trial failed or counted no step")
    # from the dearest to the cheapest; the last one that is fast enough is taken
    order = sorted(seconds, key=lambda choice: (-choice[0], -memory[choice]))
    cheapest = min(seconds, key=seconds.get)
    for choice in order:
        if seconds[choice] / min(seconds.values()) <= 1 + tolerance:
            cheapest = choice
        else:
            break
    return dict(zip(OPTIONS, cheapest))
""",
)
bank.add(with_setup)
