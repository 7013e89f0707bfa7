"""Balise 4: the choice of options, on made records whose best choice is known."""

import random

from dlojz_tp.checking import Wrong
from dlojz_tp.measure import Record

OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")

HINTS = {
    "not-options": "Return a dictionary with exactly the four options, ready for DataLoader(**options).",
    "median-over-steps": "With workers, most steps wait for nothing and one in w waits long: a median, a trimmed "
                         "mean or a mean of rates sees mainly the short steps. Take the mean over all steps.",
    "longest-step": "You chose the setting whose longest step is shortest. One long wait in w steps is what "
                    "workers cost: take the mean over all steps.",
    "sum-over-steps": "Trials may have different numbers of steps: the time of a trial is the mean over its steps, "
                      "not their sum.",
    "warmup-counted": "You count the warm-up, whose steps include the start of the workers. Leave out the first "
                      "record.warmup steps.",
    "failed-not-out": "This choice ran out of memory in one of its trials, and will again: leave it out.",
    "noise-believed": "One trial of this choice was lucky, or one trial of a better choice was disturbed. Take the "
                      "median over the trials of a choice.",
    "pooled-trials": "You pool the steps of all trials of a choice, so one disturbed trial spoils the mean. Take "
                     "the mean of each trial, then the median over the trials.",
    "fastest-not-cheapest": "This is the fastest choice, but a cheaper one is within {tolerance:.0%} of it: the "
                            "tolerance is there to save workers and memory.",
    "too-slow": "This choice is slower than the fastest by more than the tolerance of {tolerance:.0%}.",
    "tolerance-ignored": "With tolerance={tolerance}, another choice is expected. Do you use the argument, and "
                         "times that are not rounded?",
    "memory-before-workers": "Fewest workers come first; memory decides only between choices with the same number "
                             "of workers.",
    "memory-ignored": "Of two choices with the same number of workers, take the one that needs less memory.",
    "smallest-peak": "The memory of a choice is the largest peak over its trials and ranks: not the smallest or "
                     "the first one, nor a mean or a sum.",
    "fastest-left-out": "With tolerance=0 your code raised {kind}, though choices remain: the fastest itself is "
                        "within the tolerance, so compare with <=.",
    "step-only": "You compared only the time of the step. Workers are there to shorten the wait before it: compare "
                 "the total.",
    "loading-only": "You compared only the loading time. Workers also slow the step down: compare the total.",
    "empty-not-refused": "No trial is left to choose from, but you returned something. Raise a ValueError.",
    "wrong-choice": "Another choice is expected: the cheapest within the tolerance of the fastest.",
    "records-changed": "You changed the records. They are measurements: only read them.",
}


def _choice(workers, prefetch=None, pin=False, persistent=False):
    return dict(zip(OPTIONS, (workers, prefetch, pin, persistent), strict=True))


def _trial(options, totals, *, memory=(100,), warmup=2, failed=False, loading=None):
    """A record with the given totals after two slow steps of warm-up. memory in MB, one entry a rank."""
    steps = [{"loading": 3.0, "step": 0.1, "total": 3.1}] * warmup
    for k, total in enumerate(totals):
        wait = (total / 2) if loading is None else loading[k % len(loading)]
        steps.append({"loading": wait, "step": total - wait, "total": total})
    settings = {"batch_size": 32, **options, "model": "resnet18"}
    return Record("trial", settings=settings, out_of_memory=failed, warmup=warmup, steps=steps,
                  peak_memory_bytes=[m * 10**6 for m in memory])  # fmt: skip


A, B, C, D = _choice(0), _choice(1, 2), _choice(2, 2), _choice(4, 2, True, True)


def balise_4(choose_options):
    """Each case changes one thing, so that a wrong choice tells its mistake."""
    yield "the fastest of four choices, when no other is close"
    records = [_trial(o, [t] * 6) for o, t in ((A, 0.4), (B, 0.3), (D, 0.1), (C, 0.2))]
    _is(choose_options, records, D, {0: "wrong-choice"})
    yield "bursts: most steps wait for nothing"
    burst = _trial(D, [0.1, 0.1, 0.1, 0.9] * 3)  # mean 0.3, median 0.1
    _is(choose_options, [burst, _trial(A, [0.4] * 12), _trial(C, [0.2] * 12)], C, {4: "median-over-steps"})
    once = _trial(D, [0.1, 0.1, 0.1, 0.9])
    _is(choose_options, [once, _trial(A, [0.4] * 4), _trial(C, [0.2] * 4)], C, {4: "median-over-steps"})
    burst = _trial(D, [0.05, 0.05, 0.05, 0.25] * 3)  # mean 0.1, and the longest step of all
    _is(choose_options, [burst, _trial(A, [0.4] * 12), _trial(C, [0.2] * 12)], D, {2: "longest-step"})
    yield "the warm-up does not count, whatever its length"
    slow_start = [_trial(D, [0.1] * 4, warmup=6), _trial(C, [0.2] * 4, warmup=1), _trial(A, [0.5] * 4, warmup=0)]
    _is(choose_options, slow_start, D, {0: "warmup-counted", 2: "warmup-counted"})
    nothing = [_trial(D, [], warmup=3), _trial(B, [0.2] * 4)]
    _is(choose_options, nothing, B, {4: "warmup-counted"})
    yield "a choice that once ran out of memory is left out"
    failed = [_trial(D, [0.1] * 4), _trial(C, [0.2] * 4), _trial(D, [], failed=True), _trial(A, [0.4] * 4)]
    _is(choose_options, failed, C, {4: "failed-not-out"})
    partly = [_trial(D, [0.1] * 4, failed=True), _trial(C, [0.2] * 4), _trial(A, [0.4] * 4)]
    _is(choose_options, partly, C, {4: "failed-not-out"})
    yield "several trials: one disturbed or lucky trial changes nothing"
    _noise(choose_options)
    yield "the cheapest within the tolerance: workers first, then memory"
    _cheapest(choose_options)
    uneven = [_trial(D, [0.1] * 40), _trial(C, [0.2] * 6), _trial(A, [0.4] * 4)]
    _is(choose_options, uneven, D, {2: "sum-over-steps", 0: "sum-over-steps"})
    yield "the total counts, not only the loading"
    crowded = [_trial(D, [0.5] * 6, loading=[0.01]), _trial(C, [0.2] * 6, loading=[0.1])]
    _is(choose_options, crowded, C, {4: "loading-only"})
    starved = [_trial(D, [0.5] * 6, loading=[0.4]), _trial(C, [0.2] * 6, loading=[0.05])]
    _is(choose_options, starved, C, {4: "step-only"})
    yield "nothing left: ValueError"
    for records in ([], [_trial(D, [], failed=True), _trial(C, [], warmup=2)]):
        try:
            got = choose_options(records)
        except ValueError:
            continue
        raise Wrong("empty-not-refused", got=got, where=f"{len(records)} records, none usable")


def _noise(choose_options):
    # C: 0.2, one trial disturbed. D: 0.3, one trial lucky. A: steady, between
    records = [_trial(C, [t] * 5) for t in (0.2, 0.2, 1.5)] + [_trial(D, [t] * 5) for t in (0.05, 0.3, 0.3)]
    records += [_trial(A, [0.27] * 5)] * 3
    random.Random(1).shuffle(records)
    _is(choose_options, records, C, {0: "noise-believed", 4: "noise-believed"})
    # five trials each, no two alike: one of C is disturbed, one of D lucky
    means = (C, (1.0, 0.19, 0.2, 0.21, 0.22)), (D, (0.31, 0.05, 0.3, 0.29, 0.32)), (A, (0.26, 0.28, 0.265, 0.275, 0.27))
    records = [_trial(choice, [of_trial[k]] * 5) for k in range(5) for choice, of_trial in means]
    _is(choose_options, records, C, {0: "noise-believed", 4: "noise-believed"})
    # trials of different lengths: a long disturbed one must not weigh more
    records = [_trial(C, [0.2] * 5), _trial(C, [0.2] * 5), _trial(C, [0.9] * 40), *[_trial(A, [0.5] * 5)] * 3]
    _is(choose_options, records, C, {0: "pooled-trials"})


def _cheapest(choose_options):
    near = [_trial(D, [0.100] * 6), _trial(C, [0.104] * 6), _trial(A, [0.2] * 6)]
    _is(choose_options, near, C, {4: "fastest-not-cheapest", 0: "too-slow"})
    slow = [_trial(D, [0.100] * 6), _trial(C, [0.107] * 6), _trial(A, [0.2] * 6)]
    _is(choose_options, slow, D, {2: "too-slow", 0: "too-slow"})
    _is(choose_options, slow, C, {4: "tolerance-ignored", 0: "too-slow"}, tolerance=0.1)
    _is(choose_options, near, D, {2: "tolerance-ignored", 0: "too-slow"}, tolerance=0.0)
    # each within the tolerance of the one before: only the fastest counts
    chain = [_trial(D, [0.100] * 6), _trial(C, [0.104] * 6), _trial(A, [0.108] * 6)]
    _is(choose_options, chain, C, {4: "fastest-not-cheapest", 0: "too-slow"})
    # time need not fall with every worker
    bend = [_trial(D, [0.1] * 6), _trial(C, [0.2] * 6), _trial(B, [0.103] * 6)]
    _is(choose_options, bend, B, {4: "fastest-not-cheapest", 2: "too-slow"})
    _is(choose_options, [_trial(D, [0.1] * 6), _trial(C, [0.18] * 6)], D, {2: "too-slow"}, tolerance=0.5)
    # fewer workers with more memory; as many workers with less memory
    records = [_trial(D, [0.1] * 6, memory=(50,)), _trial(C, [0.102] * 6, memory=(300,)), _trial(A, [0.2] * 6)]
    _is(choose_options, records, C, {4: "memory-before-workers", 0: "too-slow"})
    deep = _choice(2, 8)
    for pair in ([deep, C], [C, deep]):
        records = [_trial(o, [0.1 if o is deep else 0.101] * 6, memory=(400 if o is deep else 90,)) for o in pair]
        _is(choose_options, records, C, {2: "memory-ignored"})
    # and where the options say nothing of the memory
    kinds = [C, deep, _choice(2, 2, True), _choice(2, 8, True, True)]
    for least in kinds:
        records = [_trial(o, [0.1 if o is least else 0.101] * 6, memory=(90 if o is least else 400,)) for o in kinds]
        _is(choose_options, records, least, {2: "memory-ignored"})
    # the peak of a choice: over its trials and over its ranks
    pinned = _choice(2, 2, True)
    for peaks in ([(10,), (400,)], [(400,), (10,)], [(10, 400), (10, 10)], [(10, 10), (400, 10)]):
        records = [_trial(pinned, [0.1] * 6, memory=m) for m in peaks] + [_trial(C, [0.1] * 6, memory=(250,))] * 2
        _is(choose_options, records, C, {2: "smallest-peak"})
    for held, uneven in (([(50, 50)], [(70, 10)]), ([(50,), (50,)], [(70,), (10,)])):
        records = [_trial(pinned, [0.1] * 6, memory=m) for m in uneven] + [_trial(C, [0.1] * 6, memory=m) for m in held]
        _is(choose_options, records, C, {2: "smallest-peak"})


def _is(choose_options, records, expected, mistakes, tolerance=0.05):
    """mistakes: workers of a wrong choice to the slug of its mistake."""
    before = repr(records)
    try:
        got = choose_options(list(records)) if tolerance == 0.05 else choose_options(list(records), tolerance)
    except (ValueError, IndexError) as error:
        if tolerance:
            raise
        raise Wrong("fastest-left-out", got=str(error), kind=type(error).__name__) from error
    if repr(records) != before:
        raise Wrong("records-changed")
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, dict) or set(got) != set(OPTIONS):
        raise Wrong("not-options", expected=str(expected), got=got)
    if got != expected:
        slug = mistakes.get(got["num_workers"], "wrong-choice")
        where = "; ".join(sorted({_words(record) for record in records}))
        raise Wrong(slug, expected=str(expected), got=got, where=where, tolerance=tolerance)


def _words(record):
    counted = [step["total"] for step in record.steps[record.warmup :]]
    words = f"{record.settings['num_workers']} workers"
    if record.out_of_memory:
        return f"{words}: out of memory"
    mean = f"{sum(counted) / len(counted):.3g} s" if counted else "no step counted"
    return (
        f"{words}, prefetch {record.settings['prefetch_factor']}: {mean}, {max(record.peak_memory_bytes) // 10**6} MB"
    )
