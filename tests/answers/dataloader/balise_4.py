"""Answers to balise 4 of 05_dataloader: choose the loader's options from trials."""

import math
import statistics
from collections import defaultdict

import numpy as np

from dlojz_tp import measure
from tests.answers.bank import Bank

bank = Bank("05_dataloader", 4)


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


whole = Bank("05_dataloader", 4, whole=True)
PLAIN = """
def choose_options(records, tolerance=0.05):
    groups, rows = {}, []
    for record in records:
        groups.setdefault(tuple(record.settings[name] for name in OPTIONS), []).append(record)
    for choice, found in groups.items():
        steps = [[step["total"] for step in r.steps[r.warmup :]] for r in found]
        means = [sum(one) / len(one) for one in steps if one]
        if means and not any(r.out_of_memory for r in found):
            peak = max(max(r.peak_memory_bytes) for r in found)
            rows.append((statistics.median(means), choice[0], peak, choice))
    if not rows:
        raise ValueError("no choice is left")
    limit = min(rows)[0] * (1 + tolerance)
    return dict(zip(OPTIONS, min((row for row in rows if row[0] <= limit), key=lambda row: row[1:3])[-1]))
"""
whole.text(None, PLAIN)


@bank.right()
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance)


@bank.right()
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


@bank.right()
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


bank.hint("not-options", "Return a dictionary with exactly the four options, ready for DataLoader(**options).")
whole.variant("not-options", PLAIN, ("dict(zip", "list(zip"))


@bank.wrong("not-options")
def choose_options(records, tolerance=0.05):
    best = choose(records, tolerance)
    return next(r.settings for r in records if all(r.settings[name] == best[name] for name in NAMES))


@bank.wrong("not-options")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance)["num_workers"]


bank.hint(
    "median-over-steps",
    "With workers, most steps wait for nothing and one in w waits long: a median, a trimmed mean or a mean of rates "
    "sees mainly the short steps. Take the mean over all steps.",
)
whole.variant("median-over-steps", PLAIN, ("sum(one) / len(one)", "statistics.median(one)"))


@bank.wrong("median-over-steps")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(t for r in group for t in times_of(r)))


bank.hint(
    "longest-step",
    "You chose the setting whose longest step is shortest. One long wait in w steps is what workers cost: take the "
    "mean over all steps.",
)
whole.variant("longest-step", PLAIN, ("sum(one) / len(one)", "max(one)"))


@bank.wrong("longest-step")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(max(times_of(r)) for r in group))


bank.hint(
    "warmup-counted",
    "You count the warm-up, whose steps include the start of the workers. Leave out the first record.warmup steps.",
)
whole.variant("warmup-counted", PLAIN, ("r.steps[r.warmup :]", "r.steps"))


@bank.wrong("warmup-counted")
def choose_options(records, tolerance=0.05):
    return choose(
        records, tolerance, some=True, time_of=lambda g: statistics.median(np.mean(times_of(r, 0)) for r in g)
    )


@bank.wrong("warmup-counted")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda g: statistics.median(np.mean(times_of(r, 2) or [1e9]) for r in g))


bank.hint(
    "failed-not-out",
    "This choice ran out of memory in one of its trials, and will again: leave it out.",
    edge=True,
)
whole.variant("failed-not-out", PLAIN, (" and not any(r.out_of_memory for r in found)", ""))


@bank.wrong("failed-not-out")
def choose_options(records, tolerance=0.05):
    return choose([r for r in records if not r.out_of_memory], tolerance)


@bank.wrong("failed-not-out")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, failures=False)


bank.hint(
    "noise-believed",
    "One trial of this choice was lucky, or one trial of a better choice was disturbed. Take the median over the "
    "trials of a choice.",
)
whole.variant("noise-believed", PLAIN, ("statistics.median(means)", "min(means)"))


@bank.wrong("noise-believed")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: min(np.mean(times_of(r)) for r in group))


@bank.wrong("noise-believed")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.mean(np.mean(times_of(r)) for r in group))


@bank.wrong("noise-believed")
def choose_options(records, tolerance=0.05):
    one_each = {tuple(r.settings[name] for name in NAMES): r for r in records if len(r.steps) > r.warmup}
    failed = [r for r in records if r.out_of_memory]
    return choose([*one_each.values(), *failed], tolerance)


bank.hint(
    "pooled-trials",
    "You pool the steps of all trials of a choice, so one disturbed trial spoils the mean. Take the mean of each "
    "trial, then the median over the trials.",
    edge=True,
)
whole.variant("pooled-trials", PLAIN, ("for one in steps if one", "for one in steps for _ in one"))


@bank.wrong("pooled-trials")
def choose_options(records, tolerance=0.05):
    def trimmed(group):
        means = [(np.mean(times_of(r)), len(times_of(r))) for r in group]
        if len({n for _, n in means}) == 1:
            return statistics.median(mean for mean, _ in means)
        return np.mean([t for r in group for t in times_of(r)])

    return choose(records, tolerance, time_of=trimmed)


bank.hint(
    "fastest-not-cheapest",
    "This is the fastest choice, but a cheaper one is within {tolerance:.0%} of it: the tolerance is there to save "
    "workers and memory.",
)
whole.variant("fastest-not-cheapest", PLAIN, ("row[1:3]", "row[0]"))


@bank.wrong("fastest-not-cheapest")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: row[0])


bank.hint("too-slow", "This choice is slower than the fastest by more than the tolerance of {tolerance:.0%}.")
whole.variant("too-slow", PLAIN, ("(1 + tolerance)", "(1 + 2 * tolerance)"))


@bank.wrong("too-slow")
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


@bank.wrong("median-over-steps")
def choose_options(records, tolerance=0.05):
    """A harmonic mean: steps a second, averaged."""
    rate = lambda record: np.mean([1 / t for t in times_of(record)])  # noqa: E731
    return choose(records, tolerance, time_of=lambda group: statistics.median(1 / rate(r) for r in group))


@bank.wrong("median-over-steps")
def choose_options(records, tolerance=0.05):
    """The shortest and the longest step left out."""
    trimmed = lambda record: np.mean(sorted(times_of(record))[1:-1] or times_of(record))  # noqa: E731
    return choose(records, tolerance, time_of=lambda group: statistics.median(map(trimmed, group)))


@bank.wrong("too-slow")
def choose_options(records, tolerance=0.05):
    return choose(records, 2 * tolerance)


bank.hint(
    "tolerance-ignored",
    "With tolerance={tolerance}, another choice is expected. Do you use the argument, and times that are not rounded?",
    edge=True,
)
whole.variant("tolerance-ignored", PLAIN, ("(1 + tolerance)", "1.05"))


@bank.wrong("tolerance-ignored")
def choose_options(records, tolerance=0.05):
    return choose(records, 0.05)


bank.hint("wrong-choice", "Another choice is expected: the cheapest within the tolerance of the fastest.")
whole.variant("wrong-choice", PLAIN, ("row[0] <= limit", "True"))


@bank.wrong("wrong-choice")
def choose_options(records, tolerance=0.05):
    return choose(records, 1e9)


@bank.wrong("wrong-choice")
def choose_options(records, tolerance=0.05):
    return dict(zip(NAMES, (2, 2, False, False)))


bank.hint(
    "memory-before-workers",
    "Fewest workers come first; memory decides only between choices with the same number of workers.",
)
whole.variant("memory-before-workers", PLAIN, ("row[1:3]", "row[2:0:-1]"))


@bank.wrong("memory-before-workers")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: (row[2], row[1]))


bank.hint("memory-ignored", "Of two choices with the same number of workers, take the one that needs less memory.")
whole.variant("memory-ignored", PLAIN, ("row[1:3]", "row[1]"))


@bank.wrong("memory-ignored")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, key=lambda row: row[1])


@bank.wrong("memory-ignored")
def choose_options(records, tolerance=0.05):
    """Between as many workers, what stands first in the tuple."""
    return choose(records, tolerance, key=lambda row: row[3])


bank.hint(
    "smallest-peak",
    "The memory of a choice is the largest peak over its trials and ranks: not the smallest or the first one, nor a "
    "mean or a sum.",
    edge=True,
)
whole.variant("smallest-peak", PLAIN, ("max(max(r.peak_memory_bytes) for", "min(max(r.peak_memory_bytes) for"))


@bank.wrong("smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: max(r.peak_memory_bytes[0] for r in group))


@bank.wrong("smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: min(max(r.peak_memory_bytes) for r in group))


@bank.wrong("smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: max(sum(r.peak_memory_bytes) for r in group))


@bank.wrong("smallest-peak")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, memory_of=lambda group: sum(max(r.peak_memory_bytes) for r in group))


bank.hint(
    "fastest-left-out",
    "With tolerance=0 your code raised {kind}, though choices remain: the fastest itself is within the tolerance, so "
    "compare with <=.",
    edge=True,
)
whole.variant("fastest-left-out", PLAIN, ("row[0] <= limit", "row[0] < limit"))


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

    bank.several("fastest-left-out", choose_options)


strictly(lambda good, cost: min(good, key=cost))

strictly(lambda good, cost: sorted(good, key=cost)[0])


bank.hint("loading-only", "You compared only the loading time. Workers also slow the step down: compare the total.")
whole.variant("loading-only", PLAIN, ('step["total"]', 'step["loading"]'))


@bank.wrong("loading-only")
def choose_options(records, tolerance=0.05):
    def waiting(group):
        means = [np.mean([s["loading"] for s in r.steps[r.warmup :]]) for r in group]
        return statistics.median(means)

    return choose(records, tolerance, time_of=waiting)


bank.hint(
    "empty-not-refused",
    "No trial is left to choose from, but you returned something. Raise a ValueError.",
    edge=True,
)
whole.variant("empty-not-refused", PLAIN, ('raise ValueError("no choice is left")', "return {}"))


@bank.wrong("empty-not-refused")
def choose_options(records, tolerance=0.05):
    try:
        return choose(records, tolerance)
    except ValueError:
        return {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}


@bank.wrong("empty-not-refused")
def choose_options(records, tolerance=0.05):
    try:
        return choose(records, tolerance)
    except ValueError:
        return None


bank.hint("records-changed", "You changed the records. They are measurements: only read them.", edge=True)
whole.variant(
    "records-changed",
    PLAIN,
    ("    for record in records:\n", '    for record in records:\n        record.settings["seen"] = True\n'),
)


@bank.wrong("records-changed")
def choose_options(records, tolerance=0.05):
    for record in records:
        record.steps = record.steps[record.warmup :]
        record.warmup = 0
    return choose(records, tolerance)


@bank.wrong("nothing-returned")
def choose_options(records, tolerance=0.05):
    choose(records, tolerance)


@bank.wrong("signature")
def choose_options(records):
    return choose(records)


bank.hint(
    "sum-over-steps",
    "Trials may have different numbers of steps: the time of a trial is the mean over its steps, not their sum.",
    edge=True,
)
whole.variant("sum-over-steps", PLAIN, ("sum(one) / len(one)", "sum(one)"))


@bank.wrong("sum-over-steps")
def choose_options(records, tolerance=0.05):
    return choose(records, tolerance, time_of=lambda group: statistics.median(sum(times_of(r)) for r in group))


bank.hint(
    "step-only",
    "You compared only the time of the step. Workers are there to shorten the wait before it: compare the total.",
)
whole.variant("step-only", PLAIN, ('step["total"]', 'step["step"]'))
whole.slip("step-only", ('step["total"]', 'step["step"]'))
whole.slip("step-only", ('step["total"]', 'step["total"] - step["loading"]'))

whole.slip("noise-believed", ("statistics.median(means)", "means[0]"))
whole.slip("noise-believed", ("statistics.median(means)", "means[min(1, len(means) - 1)]"))

bank.add(whole)

with_setup = Bank("05_dataloader", 4, whole=True)

with_setup.text(
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
