"""Balise 4: the choice of options, on made records whose best choice is known."""

import random

from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.measure import Record

OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


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


def _cases():
    """(claim, records, best choice, {workers of a wrong one: its mistake}), and a tolerance; each changes one thing."""
    yield from _usual()
    yield from _noise()
    yield from _cheapest()
    uneven = [_trial(D, [0.1] * 40), _trial(C, [0.2] * 6), _trial(A, [0.4] * 4)]
    yield "", uneven, D, {2: "sum-over-steps", 0: "sum-over-steps"}
    crowded = [_trial(D, [0.5] * 6, loading=[0.01]), _trial(C, [0.2] * 6, loading=[0.1])]
    yield "the total counts, not only the loading", crowded, C, {4: "loading-only"}
    starved = [_trial(D, [0.5] * 6, loading=[0.4]), _trial(C, [0.2] * 6, loading=[0.05])]
    yield "", starved, C, {4: "step-only"}


def _usual():
    records = [_trial(o, [t] * 6) for o, t in ((A, 0.4), (B, 0.3), (D, 0.1), (C, 0.2))]
    yield "the fastest of four choices, when no other is close", records, D, {0: "wrong-choice"}
    burst = _trial(D, [0.1, 0.1, 0.1, 0.9] * 3)  # mean 0.3, median 0.1
    records = [burst, _trial(A, [0.4] * 12), _trial(C, [0.2] * 12)]
    yield "bursts: most steps wait for nothing", records, C, {4: "median-over-steps"}
    once = _trial(D, [0.1, 0.1, 0.1, 0.9])
    yield "", [once, _trial(A, [0.4] * 4), _trial(C, [0.2] * 4)], C, {4: "median-over-steps"}
    burst = _trial(D, [0.05, 0.05, 0.05, 0.25] * 3)  # mean 0.1, and the longest step of all
    yield "", [burst, _trial(A, [0.4] * 12), _trial(C, [0.2] * 12)], D, {2: "longest-step"}
    slow_start = [_trial(D, [0.1] * 4, warmup=6), _trial(C, [0.2] * 4, warmup=1), _trial(A, [0.5] * 4, warmup=0)]
    counted = dict.fromkeys((0, 2), "warmup-counted")
    yield "the warm-up does not count, whatever its length", slow_start, D, counted
    yield "", [_trial(D, [], warmup=3), _trial(B, [0.2] * 4)], B, {4: "warmup-counted"}
    failed = [_trial(D, [0.1] * 4), _trial(C, [0.2] * 4), _trial(D, [], failed=True), _trial(A, [0.4] * 4)]
    yield "a choice that once ran out of memory is left out", failed, C, {4: "failed-not-out"}
    partly = [_trial(D, [0.1] * 4, failed=True), _trial(C, [0.2] * 4), _trial(A, [0.4] * 4)]
    yield "", partly, C, {4: "failed-not-out"}


def _noise():
    believed = dict.fromkeys((0, 4), "noise-believed")
    # C: 0.2, one trial disturbed. D: 0.3, one trial lucky. A: steady, between
    records = [_trial(C, [t] * 5) for t in (0.2, 0.2, 1.5)] + [_trial(D, [t] * 5) for t in (0.05, 0.3, 0.3)]
    records += [_trial(A, [0.27] * 5)] * 3
    random.Random(1).shuffle(records)
    yield "several trials: one disturbed or lucky trial changes nothing", records, C, believed
    # five trials each, no two alike: one of C is disturbed, one of D lucky
    means = (C, (1.0, 0.19, 0.2, 0.21, 0.22)), (D, (0.31, 0.05, 0.3, 0.29, 0.32)), (A, (0.26, 0.28, 0.265, 0.275, 0.27))
    records = [_trial(choice, [of_trial[k]] * 5) for k in range(5) for choice, of_trial in means]
    yield "", records, C, believed
    # trials of different lengths: a long disturbed one must not weigh more
    records = [_trial(C, [0.2] * 5), _trial(C, [0.2] * 5), _trial(C, [0.9] * 40), *[_trial(A, [0.5] * 5)] * 3]
    yield "", records, C, {0: "pooled-trials"}


def _cheapest():
    near = [_trial(D, [0.100] * 6), _trial(C, [0.104] * 6), _trial(A, [0.2] * 6)]
    yield (
        "the cheapest within the tolerance: workers first, then memory",
        near,
        C,
        {4: "fastest-not-cheapest", 0: "too-slow"},
        0.05,
    )
    slow = [_trial(D, [0.100] * 6), _trial(C, [0.107] * 6), _trial(A, [0.2] * 6)]
    yield "", slow, D, {2: "too-slow", 0: "too-slow"}
    yield "", slow, C, {4: "tolerance-ignored", 0: "too-slow"}, 0.1
    yield "", near, D, {2: "tolerance-ignored", 0: "too-slow"}, 0.0
    # each within the tolerance of the one before: only the fastest counts
    chain = [_trial(D, [0.100] * 6), _trial(C, [0.104] * 6), _trial(A, [0.108] * 6)]
    yield "", chain, C, {4: "fastest-not-cheapest", 0: "too-slow"}
    # time need not fall with every worker
    bend = [_trial(D, [0.1] * 6), _trial(C, [0.2] * 6), _trial(B, [0.103] * 6)]
    yield "", bend, B, {4: "fastest-not-cheapest", 2: "too-slow"}
    yield "", [_trial(D, [0.1] * 6), _trial(C, [0.18] * 6)], D, {2: "too-slow"}, 0.5
    # fewer workers with more memory; as many workers with less memory
    records = [_trial(D, [0.1] * 6, memory=(50,)), _trial(C, [0.102] * 6, memory=(300,)), _trial(A, [0.2] * 6)]
    yield "", records, C, {4: "memory-before-workers", 0: "too-slow"}
    deep = _choice(2, 8)
    for pair in ([deep, C], [C, deep]):
        records = [_trial(o, [0.1 if o is deep else 0.101] * 6, memory=(400 if o is deep else 90,)) for o in pair]
        yield "", records, C, {2: "memory-ignored"}
    # and where the options say nothing of the memory
    kinds = [C, deep, _choice(2, 2, True), _choice(2, 8, True, True)]
    for least in kinds:
        records = [_trial(o, [0.1 if o is least else 0.101] * 6, memory=(90 if o is least else 400,)) for o in kinds]
        yield "", records, least, {2: "memory-ignored"}
    # the peak of a choice: over its trials and over its ranks
    pinned = _choice(2, 2, True)
    for peaks in ([(10,), (400,)], [(400,), (10,)], [(10, 400), (10, 10)], [(10, 10), (400, 10)]):
        records = [_trial(pinned, [0.1] * 6, memory=m) for m in peaks] + [_trial(C, [0.1] * 6, memory=(250,))] * 2
        yield "", records, C, {2: "smallest-peak"}
    for held, uneven in (([(50, 50)], [(70, 10)]), ([(50,), (50,)], [(70,), (10,)])):
        records = [_trial(pinned, [0.1] * 6, memory=m) for m in uneven] + [_trial(C, [0.1] * 6, memory=m) for m in held]
        yield "", records, C, {2: "smallest-peak"}


def observe(choose_options):
    """The choice in each case, or the error where with tolerance 0 none was made; whether the records have changed."""
    for k, (_, records, _, _, *tolerance) in enumerate(_cases()):
        before, changed = repr(records), False
        try:
            got = choose_options(list(records), *tolerance)
            changed = repr(records) != before
        except (ValueError, IndexError) as error:
            if tolerance != [0.0]:
                raise
            got = error
        yield {("changed", k): changed, k: got}
    for key, records in (("no record", []), ("none usable", [_trial(D, [], failed=True), _trial(C, [], warmup=2)])):
        try:
            yield {key: f"no error, but {choose_options(records)}"}
        except ValueError:
            yield {key: "ValueError"}


def _looks(k, claim, records, due, mistakes, tolerance=0.05):
    def hint(seen, due):
        if isinstance(seen, Exception):
            return "fastest-left-out"
        if not isinstance(seen, dict) or set(seen) != set(OPTIONS):
            return "not-options"
        return mistakes.get(seen["num_workers"], "wrong-choice")

    def fields(seen, due):
        where = "; ".join(sorted({_words(record) for record in records}))
        return {"expected": str(due), "where": where, "tolerance": tolerance, "kind": type(seen).__name__}

    yield Look(claim, ("changed", k), False, "records-changed")
    yield Look("", k, due, hint, fields=fields)


def _words(record):
    counted = [step["total"] for step in record.steps[record.warmup :]]
    words = f"{record.settings['num_workers']} workers"
    if record.out_of_memory:
        return f"{words}: out of memory"
    mean = f"{sum(counted) / len(counted):.3g} s" if counted else "no step counted"
    return (
        f"{words}, prefetch {record.settings['prefetch_factor']}: {mean}, {max(record.peak_memory_bytes) // 10**6} MB"
    )


LOOKS = [
    *(look for k, case in enumerate(_cases()) for look in _looks(k, *case)),
    Look("nothing left: ValueError", "no record", "ValueError", "empty-not-refused"),
    Look("", "none usable", "ValueError", "empty-not-refused"),
]


def balise_4(choose_options):
    yield from judged(LOOKS, observe, choose_options)
