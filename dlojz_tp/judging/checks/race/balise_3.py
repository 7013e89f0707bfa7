"""Balise 3: logs of runs that break one rule, several or none; which ones is written beside them by hand."""

import copy
import itertools
import math
from numbers import Integral

from dlojz_tp.judging.checking.looks import Look, Value, judged
from dlojz_tp.training.race_data import RULES, Log

VALIDATION, TEST, EVERY = set(range(100, 106)), {200, 201, 202}, 12
ALL = [103, 100, 105, 101, 104, 102]
MEANS = {
    "validation images": "a run breaks it if one of its train_read events holds a validation image",
    "test images": "a run breaks it if it reads a test image, for training or in an evaluation",
    "sparse evaluation": "a run breaks it if more than `every` images are read for training in a row, also before the "
    "first evaluation and after the last, or if an eval_read leaves out a validation image",
    "warm start": 'a run breaks it if weights_from is anything but "random"',
    "clock": "a run breaks it if anything is read before run_start, or if its result, in seconds, is below 99 % of the "
    "milliseconds from run_start to run_stop",
    "seed": "a run breaks it if another run has the same seed: both of them do",
}


def run(reads, seed, weights="random", claim=1.0, early=(), setup=0):
    """Events of a run. reads, early: how many images to train on, "e" for an evaluation, or (key, numbers) as it is.

    claim: as a part of the true time. early: what is read before run_start. setup: seconds spent before it.
    """
    now, step, images = 0.0, 2**-10, itertools.cycle(range(80))

    def clock():
        nonlocal now
        now += step
        return now

    log = Log(clock)

    def read(what):
        if isinstance(what, int):
            log("train_read", list(itertools.islice(images, what)))
        else:
            log(*(("eval_read", ALL) if what == "e" else what))
            log("eval_accuracy", 0.5)

    log("init_start")
    if seed % 2:
        log("weights_from", weights)
    log("comment", [0, 100, 200])  # numbers of images, but nothing is read
    for what in early:
        read(what)
    now += setup
    log("run_start")
    step = 0.25
    log("seed", seed)
    if not seed % 2:
        log("weights_from", weights)
    for what in reads:
        read(what)
        log("samples", 4)
    log("run_stop")
    start, stop = (next(e["time_ms"] for e in log.events if e["key"] == key) for key in ("run_start", "run_stop"))
    log("result", claim * (stop - start) / 1000)
    return log.events


USUAL = (5, 7, "e", 4, 8, "e")


def usual(*seeds, **more):
    return [run(USUAL, seed, **more) for seed in seeds]


def taught(*numbers):
    return ("train_read", list(numbers))


def asked(*numbers):
    return ("eval_read", list(numbers))


NO_TEST = "an empty set of test images: number 201 is a training image"
ONE = {  # logs: the runs that break a rule; where nothing stands, none does
    "three honest runs, of exactly `every` images between evaluations": (usual(0, 1, 2), {}),
    "a run that never reached the target: a claim of math.inf": ([run((12, "e"), 7, claim=math.inf), *usual(4)], {}),
    "a minute of preparations before run_start": (usual(3, 5, setup=60), {}),
    "a claim of 99.001 % of the time": (usual(1, 6, claim=0.99001), {}),
    "two evaluations in a row, and one before the first step": ([run(("e", 12, "e", "e", 3), 2), *usual(1)], {}),
    "the first run ends with training images": ([run((12, "e", 9), 1), run((12, "e"), 2), run((6, 6, "e"), 3)], {}),
    "a validation image in a later batch": ([*usual(0), run((4, "e", 4, taught(3, 104, 5), 4, "e"), 1), *usual(2)], {"validation images": [1]}),
    "validation images in several batches of two runs": ([run((taught(1, 100), taught(101, 4), 3, "e"), 8), *usual(9), run((3, taught(102, 2), "e", 4, "e", taught(1, 103)), 4)], {"validation images": [0, 2]}),
    NO_TEST: ([run((4, taught(201, 1), 4, "e"), 3), *usual(4)], {}),
    "a test image in a batch": ([run((4, taught(201, 1), 4, "e"), 3), *usual(4)], {"test images": [0]}),
    "a test image in an evaluation that reads all validation images too": ([*usual(6, 7), run((3, "e", 6, asked(*ALL, 202), 2, "e"), 8)], {"test images": [2]}),
    "one image too many before the first evaluation": ([*usual(1), run((5, 4, 4, "e", 2, "e"), 2)], {"sparse evaluation": [1]}),
    "one image too many between two evaluations": ([run((4, "e", 13, "e", 2, "e"), 2), *usual(1)], {"sparse evaluation": [0]}),
    "one image too many after the last evaluation": ([*usual(1, 4), run((4, "e", 6, 7), 2)], {"sparse evaluation": [2]}),
    "the same eight images twice, and no evaluation": ([run(2 * (taught(*range(8)),), 1), *usual(2), run(2 * (taught(*range(8)),), 3)], {"sparse evaluation": [0, 2]}),
    "an evaluation without one of the validation images": ([*usual(3), run((8, "e", 4, asked(*ALL[1:]), 8, "e"), 4)], {"sparse evaluation": [1]}),
    "an evaluation that reads one image twice and leaves one out": ([*usual(3, 9), run((8, asked(*ALL[1:], ALL[1]), 8, "e"), 4)], {"sparse evaluation": [2]}),
    "weights of another run": ([*usual(5), *usual(2, weights="run 0"), *usual(4)], {"warm start": [1]}),
    "weights of ImageNet, and of a random epoch": ([*usual(5, weights="ImageNet"), *usual(2), *usual(3, weights="a random epoch")], {"warm start": [0, 2]}),
    "a training batch before run_start": ([*usual(1, 2), run((8, "e"), 3, early=(4,))], {"clock": [2]}),
    "an evaluation before run_start, in another run with a batch before it": ([run(USUAL, 4, early=("e",)), *usual(3), run(USUAL, 5, early=(4, "e"))], {"clock": [0, 2]}),
    "a claim of 98.9 % of the time": ([*usual(2), *usual(1, claim=0.989), *usual(5)], {"clock": [1]}),
    "a claim of 1 % of the time": ([*usual(2, claim=0.01, setup=30), *usual(1), *usual(3, claim=0.01)], {"clock": [0, 2]}),
    "the same seed, 0, in two of four runs": (usual(0, 1, 0, 3), {"seed": [0, 2]}),
    "two seeds, each of two runs": (usual(8, 5, 5, 2, 8), {"seed": [0, 1, 2, 4]}),
    "the same seed in three runs": (usual(4, 4, 4), {"seed": [0, 1, 2]}),
    "eleven runs": ([*usual(20, 21), *usual(22, weights="run 1"), *usual(*range(23, 30)), *usual(30, weights="run 2")], {"warm start": [2, 10]}),
}  # fmt: skip
EVIL = run((5, taught(1, 105), 8, asked(*ALL[2:], 200), 2), 6, weights="run 5", claim=0.5, early=(3, "e"))
SEVERAL = {
    "the second of three runs breaks all rules": ([*usual(5), EVIL, *usual(6)], dict.fromkeys(RULES, [1]) | {"seed": [1, 2]}),
    "a validation image is trained on before run_start": ([*usual(0), run((4, "e"), 2, early=(taught(100),))], {"validation images": [1], "clock": [1]}),
    "a batch holds a validation and a test image, another run has other weights and a claim of 50 %": (
        [run((taught(100, 200), 3, "e"), 1), *usual(4, weights="run 9", claim=0.5)],
        {"validation images": [0], "test images": [0], "warm start": [1], "clock": [1]},
    ),
    "an evaluation without a validation image, and one image too many": ([run((9, asked(*ALL[:5], 201), 13, "e"), 2), run((taught(102), 13, "e"), 2)], {"test images": [0], "sparse evaluation": [0, 1], "validation images": [1], "seed": [0, 1]}),
}  # fmt: skip
CASES = ONE | SEVERAL


def observe(audit):
    """Which rules have no entry; whether entries are run numbers; the runs of each rule and case."""
    found, absent, odd = {}, set(), []
    for name, (logs, _) in CASES.items():
        got = audit(copy.deepcopy(logs), set(VALIDATION), set() if name == NO_TEST else set(TEST), EVERY)
        if not isinstance(got, dict):
            found = None if got is None else type(got).__name__
            break
        absent |= set(RULES) - got.keys()
        found[name] = {rule: got[rule] for rule in RULES if rule in got}
        odd += [[name, rule, runs] for rule, runs in found[name].items() if not rising(runs, len(logs))]
    yield {"kind": "dict" if isinstance(found, dict) else found, "absent": sorted(absent, key=RULES.index)}
    yield {"odd": odd, "runs": found}


def rising(runs, many) -> bool:
    """Whether these are numbers of runs, each once, in rising order."""
    if not isinstance(runs, list | tuple) or not all(isinstance(one, Integral) for one in runs):
        return False
    return all(a < b for a, b in itertools.pairwise([-1, *runs, many]))


def table(rule, cases, runs):
    """A list for each case, with a 1 for each run that is named, a 0 for each other."""
    return [[float(run in runs[name].get(rule, [])) for run in range(len(logs))] for name, (logs, _) in cases.items()]


def whose(seen, due):
    """The hint for one rule: whether all runs are named wherever one of them breaks the rule."""
    return "other-runs" if seen == [[float(any(named))] * len(named) for named in due] else "wrong-rule"


def hidden(seen, due):
    """The hint where every rule alone is found: whether no run is named that does not break the rule."""
    return "one-rule" if all(a <= b for got, truth in zip(seen, due) for a, b in zip(got, truth)) else "wrong-rule"


def look(rule, cases, claim, kind, hint):
    def fields(seen, due):
        name, *both = next(one for one in zip(cases, seen, due) if one[1] != one[2])
        got, expected = (f"{rule!r}: {[run for run, named in enumerate(one) if named]}" for one in both)
        return {"where": name, "expected": expected, "got": got, "rule": rule, "means": MEANS[rule]}

    truth = {name: broken for name, (_, broken) in cases.items()}
    return kind(
        claim, lambda observed: table(rule, cases, observed["runs"]), table(rule, cases, truth), hint, fields=fields
    )


LOOKS = [
    Look("a dictionary with an entry for each rule", "kind", "dict", "no-entry", fields={"rules": "each rule"}),
    Look("", "absent", [], "no-entry", fields=lambda seen, due: {"rules": ", ".join(seen), "got": "", "expected": ""}),
    Look("numbers of runs", "odd", [], "wrong-runs", fields=lambda seen, due: {"where": seen[0][0], "got": f"{seen[0][1]!r}: {seen[0][2]}", "expected": ""}),
]  # fmt: skip
LOOKS += [look(rule, ONE, rule, Value, whose) for rule in RULES]
LOOKS += [look(rule, SEVERAL, "" if k else "several rules are broken", Look, hidden) for k, rule in enumerate(RULES)]


def balise_3(audit):
    yield from judged(LOOKS, observe, audit)
