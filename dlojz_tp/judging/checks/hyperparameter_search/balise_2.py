"""Balise 2: which trials are trained for how long, what is returned, and the epochs that all of it takes."""

import math

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged

NAN = math.nan
# values of the trials after `first` epochs; they go up by themselves, so that the order never changes: (values, first, eta, last, maximize)
CASES = [
    ([0.3, 0.9, 0.1, 0.8, 0.5, 0.2, 0.95, 0.4, 0.7, 0.6, 0.15], 1, 3, 27, True),
    ([0.3, 0.9, 0.1, 0.8, 0.5, 0.2, 0.95, 0.4, 0.7, 0.6], 2, 2, 15, False),
    ([NAN, 0.2, NAN, 0.9, 0.6, NAN, 0.3, 0.4, 0.5], 1, 3, 9, True),
    ([0.5, NAN, 0.2, NAN, 0.9, 0.6, NAN, 0.3, 0.4], 1, 3, 9, False),
    ([0.4, 0.7, 0.7, 0.7, 0.4, 0.7, 0.7, 0.7, 0.4], 1, 3, 9, True),
    ([0.2, 0.8, 0.6], 1, 4, 64, True),
    ([0.5, 0.1, 0.4, 0.3, 0.2, 0.45, 0.35, 0.25], 3, 2, 24, True),
    ([0.5, 0.9, 0.1, 0.8, 0.95, 0.2, 0.7, 0.4, 0.6], 1, 3, 9, True),
    (
        [0.3 + 0.1 * (7 * i % 3) for i in range(60)],
        1,
        4,
        16,
        True,
    ),  # so many that only a stable sort keeps them in order
    ([0.2, 0.8, 0.6], 1, 3, 243, True),  # int(math.log(243, 3)) is 4
    ([0.5, 0.7, 0.9, 0.6, 0.4, 0.3, 0.2, 0.1, 0.8], 1, 3, 9, True),  # equal in the second rung, in another order
    ([NAN, NAN, NAN, NAN, 0.5, NAN, NAN, NAN, NAN], 1, 3, 9, False),
]
TIES = {4, 8, 10, 11}  # cases; in the last one NaN are equal
CROSSING = {
    (0, 3): [0.8, 0.81, 0.5, 0.5],
    (7, 4): [0.95, 0.3, 0.3, 0.3],
    (10, 1): [0.7, 0.95, 0.95],
    (10, 2): [0.9, 0.95, 0.95],
    (10, 8): [0.8, 0.95, 0.95],
}  # (case, trial): a value for each rung: one that leads and falls behind
TOTALS = [(27, 1, 3, 27), (11, 1, 3, 27), (10, 2, 2, 15), (3, 1, 4, 64), (1, 5, 2, 40), (100, 3, 4, 50), (8, 4, 3, 4),
          (5, 1, 3, 243)]  # fmt: skip
MOST = max(len(case[0]) for case in CASES)


class _Trial:
    """Notes how long it is trained; its value follows from the epochs that it has had."""

    def __init__(self, case, number):
        self.case, self.number, self.calls = case, number, []

    def train(self, epochs):
        self.calls.append(float(epochs))
        return value_of(self.case, self.number, sum(self.calls))


def value_of(case, number, epochs):
    values, first, eta, _, _ = CASES[case]
    rung = round(math.log(max(epochs, 1) / first, eta)) if epochs >= first else 0
    if (case, number) in CROSSING:
        return CROSSING[case, number][min(max(rung, 0), len(CROSSING[case, number]) - 1)]
    return values[number] + 0.01 * rung


def _due(case):
    """The rungs of a case, {epochs: {number: value}}, by counting who is better: no sorting."""
    values, first, eta, last, maximize = CASES[case]
    inside, epochs, rungs = set(range(len(values))), first, {}
    while epochs <= last:
        rung = {i: value_of(case, i, epochs) for i in inside}
        rungs[epochs] = rung

        def before(i, j, rung=rung):
            a, b = rung[i], rung[j]
            if math.isnan(a) or math.isnan(b):
                return (math.isnan(b), j) > (math.isnan(a), i)
            return ((a > b) == maximize) if a != b else i < j

        inside = {j for j in inside if sum(before(i, j) for i in inside if i != j) < max(1, len(inside) // eta)}
        epochs *= eta
    return rungs


RUNGS = [_due(case) for case in range(len(CASES))]
TRAINED = [[[max((e for e, rung in rungs.items() if i in rung), default=0) for i in range(MOST)]] for rungs in RUNGS]


def observe(halving, epochs_of):
    trained, found, kinds = [], [], []
    for case, (values, first, eta, last, maximize) in enumerate(CASES):
        trials = [_Trial(case, number) for number in range(len(values))]
        # maximize is the default
        rungs = halving(trials, first, eta, last) if maximize else halving(trials, first, eta, last, maximize=False)
        calls = [trial.calls for trial in trials]
        trained.append([sum(one) for one in calls] + [0.0] * (MOST - len(values)))
        kinds.append(_kind(rungs))
        found.append(rungs)
        if case == 0:
            yield {"kind": kinds[0], "idle": [i for i, one in enumerate(calls) if not one]}
            yield {"epochs": [int(epochs) for epochs, _ in rungs]}
    yield {"trained": torch.tensor(trained)}
    yield {"kinds": sorted(set(kinds)), "same": [_read(one) for one in found]}
    totals = [epochs_of(*case) for case in TOTALS]
    yield {"total kinds": sorted({type(one).__name__ for one in totals})}
    yield {"totals": torch.tensor([float(one) for one in totals])}


def _kind(rungs):
    if rungs is None:
        return None
    pairs = isinstance(rungs, list) and rungs and all(isinstance(one, tuple | list) and len(one) == 2 for one in rungs)
    return "pairs" if pairs and all(isinstance(values, dict) for _, values in rungs) else "others"


def _read(rungs):
    """In an order of its own, NaN as a word."""
    return [(int(epochs), {i: "nan" if math.isnan(values[i]) else round(float(values[i]), 9) for i in sorted(values)})
            for epochs, values in rungs]  # fmt: skip


def _epochs_hint(seen, due):
    if seen == [b - a for a, b in zip([0, *due], due)]:
        return "rungs-differences"
    return "last-rung-missing" if seen == due[:-1] else "beyond-last" if seen[: len(due)] == due else "rung-epochs"


def _total(epochs_case):
    n, first, eta, last = epochs_case
    reached = [n]  # trials in each rung
    while first * eta ** len(reached) <= last:
        reached.append(max(1, reached[-1] // eta))
    return float(sum(n * first * (eta**k - (eta ** (k - 1) if k else 0)) for k, n in enumerate(reached)))


def _trained_hint(seen, due):
    """As many as due for as long, but others, and only where values are equal."""
    wrong = {case for case in range(len(CASES)) if not torch.equal(seen[case], due[case])}
    as_many = torch.equal(seen.sort(1).values, due.sort(1).values)
    return "ties-to-the-last" if wrong <= TIES and as_many else "wrong-trained"


def _where_trained(seen, due):
    case, number = (seen - due).nonzero()[0].tolist()
    values, first, eta, last, maximize = CASES[case]
    values = values if len(values) < 20 else f"{len(values)} trials, many with equal values"
    where = f"{values}, first={first}, eta={eta}, last={last}, maximize={maximize}"
    return {
        "where": where,
        "expected": f"trial {number}: {due[case, number]:g} epochs",
        "got": f"{seen[case, number]:g}",
    }


def _where_total(seen, due):
    place = (seen - due).nonzero()[0].item()
    where = "n={}, first={}, eta={}, last={}".format(*TOTALS[place])
    return {"where": where, "expected": f"{due[place]:g} epochs", "got": f"{seen[place]:g}"}


LOOKS = [
    Look("rungs of (epochs, values)", "kind", "pairs", "rungs-form"),
    Look("", "idle", [], "not-all-start", fields=lambda seen, _: {"n": len(seen), "expected": "", "got": seen}),
    Look("", "epochs", [1, 3, 9, 27], _epochs_hint),
    Value("how long each trial is trained: the best go on, in both directions, with NaN and ties", "trained",
          torch.tensor(TRAINED, dtype=torch.float32).squeeze(1), _trained_hint, fields=_where_trained),
    Look("what each rung contains", "kinds", ["pairs"], "rungs-form"),
    Look("", "same", [_read(list(rungs.items())) for rungs in RUNGS], "rung-values",
         fields=lambda seen, due: next({"expected": d, "got": s} for s, d in zip(seen, due) if s != d)),
    Look("the computed number of epochs of all trials", "total kinds", ["int", "float"], "total-form",
         holds=lambda seen, due: set(seen) <= set(due)),
    Value("", "totals", torch.tensor([_total(case) for case in TOTALS]), "wrong-total", fields=_where_total),
]  # fmt: skip


def balise_2(halving, epochs_of):
    yield from judged(LOOKS, observe, halving, epochs_of)
