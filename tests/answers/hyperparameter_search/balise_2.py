"""Answers to balise 2 of 11_hyperparameter_search: successive halving."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 2, whole=True)

RECURSIVE = """
def successive_halving(trials, first, eta, last, maximize=True):
    worst = -math.inf if maximize else math.inf

    def rung(numbers, done, epochs):
        if epochs > last:
            return []
        values = {}
        for number in sorted(numbers):
            values[number] = trials[number].train(epochs - done)
        known = {number: worst if math.isnan(value) else value for number, value in values.items()}
        best = sorted(known, key=known.get, reverse=maximize)
        return [(epochs, values), *rung(best[: len(best) // eta or 1], epochs, epochs * eta)]

    return rung(range(len(trials)), 0, first)


def halving_epochs(n, first, eta, last):
    k, total = 0, n * first
    while first * eta ** (k + 1) <= last:
        k += 1
        total += max(1, n // eta**k) * first * (eta**k - eta ** (k - 1))
    return total
"""
bank.text(None, RECURSIVE)

PICKS = """
def successive_halving(trials, first, eta, last, maximize=True):
    sign = 1.0 if maximize else -1.0
    left, rungs, had = dict(enumerate(trials)), [], 0
    for k in range(64):
        epochs = first * eta**k
        if epochs > last:
            break
        seen = {i: trial.train(epochs - had) for i, trial in left.items()}
        had = epochs
        rungs.append([epochs, seen])
        marks = np.array([np.nan_to_num(sign * seen[i], nan=-np.inf) for i in left])
        numbers = np.array(list(left))
        keep = numbers[np.argsort(-marks, kind="stable")][: max(len(left) // eta, 1)]
        left = {i: left[i] for i in left if i in keep}
    return rungs


def halving_epochs(n, first, eta, last):
    class Idle:
        spent = 0

        def train(self, epochs):
            Idle.spent += epochs
            return 0.0

    successive_halving([Idle() for _ in range(n)], first, eta, last)
    return float(Idle.spent)
"""
bank.text(None, PICKS)

# epoch by epoch is as good
bank.slip(
    None,
    ("trials[number].train(epochs - done) for", "[trials[number].train(1) for _ in range(epochs - done)][-1] for"),
)

bank.slip("nothing-returned", ("    return rungs\n", "    return\n"))

bank.hint("rungs-form", "Return a list of pairs: the total number of epochs, and a dict of trial numbers and values.")
bank.slip("rungs-form", ("rungs.append((epochs, values))", "rungs.append((epochs, list(values.values())))"))
bank.slip("rungs-form", ("    return rungs\n", "    return dict(rungs)\n"))
bank.variant("rungs-form", PICKS, ("    return rungs\n", "    return rungs[-1][1]\n"))

bank.hint("not-all-start", "{n} trials were never trained. All of them must start.")
bank.slip("not-all-start", ("range(len(trials))", "range(len(trials) // eta)"))
bank.variant("not-all-start", RECURSIVE, ("range(len(trials))", "range(1, len(trials))"))

bank.hint(
    "rungs-differences",
    "The first entry of a rung is the total number of epochs that its trials have had, not the number that was added.",
    edge=True,
)
bank.slip("rungs-differences", ("rungs.append((epochs, values))", "rungs.append((epochs - done, values))"))
bank.variant(
    "rungs-differences",
    PICKS,
    (
        "        had = epochs\n        rungs.append([epochs, seen])",
        "        rungs.append([epochs - had, seen])\n        had = epochs",
    ),
)

bank.hint("last-rung-missing", "The last rung is missing: `last` epochs are still allowed.", edge=True)
bank.slip(
    "last-rung-missing", ("    while epochs <= last:\n        values", "    while epochs < last:\n        values")
)
bank.variant("last-rung-missing", RECURSIVE, ("if epochs > last:", "if epochs >= last:"))

bank.hint("beyond-last", "A rung goes beyond `last` epochs.")
bank.slip("beyond-last", ("    while epochs <= last:\n        values", "    while done < last:\n        values"))
bank.variant("beyond-last", PICKS, ("if epochs > last:", "if had >= last:"))

bank.hint(
    "rung-epochs",
    "The rungs should have {expected} epochs. Yours have {got}. Each rung has eta times as many as the one before.",
)
bank.slip(
    "rung-epochs",
    ("done, epochs = epochs, epochs * eta\n    return rungs", "done, epochs = epochs, epochs + eta\n    return rungs"),
)
bank.variant("rung-epochs", RECURSIVE, ("epochs, epochs * eta)]", "epochs, epochs * 2)]"))

bank.hint(
    "wrong-trained",
    "A trial was not trained for the right number of epochs. The best n // eta of each rung go on.",
)
bank.slip("wrong-trained", ("order[: max(1, len(order) // eta)]", "order[: max(1, len(order) - eta)]"))
bank.slip("wrong-trained", ("train(epochs - done)", "train(first)"))
bank.variant("wrong-trained", RECURSIVE, ("[: len(best) // eta or 1]", "[:2]"))

bank.hint(
    "from-zero",
    "`train` takes the number of additional epochs. Your rungs pay again for the epochs that the trials have "
    "already had. Subtract them.",
)
bank.slip("from-zero", ("train(epochs - done)", "train(epochs)"))
bank.variant("from-zero", RECURSIVE, ("train(epochs - done)", "train(epochs)"))
bank.variant("from-zero", PICKS, ("train(epochs - had)", "train(epochs)"))

bank.hint(
    "all-to-the-end", "All trials were trained to the end, even those that a rung had stopped, so nothing is saved."
)
bank.slip("all-to-the-end", ("    return rungs\n", """    for rung, (epochs, values) in enumerate(rungs[:-1]):
        for number in values.keys() - rungs[rung + 1][1].keys():
            trials[number].train(rungs[-1][0] - epochs)
    return rungs
"""))  # fmt: skip
bank.variant(
    "all-to-the-end",
    PICKS,
    ("train(epochs - had) for i, trial in left.items()}", "train(epochs - had) for i, trial in enumerate(trials)}"),
)

bank.hint(
    "worst-go-on",
    "The trials that go on are the worst, or simply not the best. A position among the remaining trials is not a "
    "trial's number.",
)
bank.slip("worst-go-on", ("sign = -1 if maximize else 1", "sign = 1 if maximize else -1"))
bank.variant(
    "worst-go-on",
    RECURSIVE,
    ("reverse=maximize", "reverse=not maximize"),
    ("worst = -math.inf if maximize else math.inf", "worst = math.inf if maximize else -math.inf"),
)

bank.hint(
    "always-maximised",
    "With maximize=False, the trials with the largest values go on. The smallest are the best there.",
)
bank.slip("always-maximised", ("sign = -1 if maximize else 1", "sign = -1"))
bank.variant("always-maximised", PICKS, ("1.0 if maximize else -1.0", "1.0"))

bank.hint(
    "nan-goes-on",
    "Diverged trials go on, or push others out. NaN is worse than any number, whether you maximise or minimise.",
    edge=True,
)
bank.slip("nan-goes-on", ("(math.isnan(values[number]), sign", "(not math.isnan(values[number]), sign"))
bank.slip("nan-goes-on", ("(math.isnan(values[number]), sign * values[number], number)", "sign * values[number]"))
bank.variant("nan-goes-on", PICKS, ("nan=-np.inf", "nan=np.inf"))
bank.text("nan-goes-on", RECURSIVE.replace("sorted(known, key=known.get", "sorted(values, key=values.get"))

bank.hint(
    "nan-best-of-losses",
    "With maximize=False, a NaN passes for a small loss. It is the worst value there, too.",
    edge=True,
)
bank.slip("nan-best-of-losses", (
    "(math.isnan(values[number]), sign * values[number], number)",
    "(sign * np.nan_to_num(values[number], nan=-1e9), number)"))  # fmt: skip
bank.variant("nan-best-of-losses", RECURSIVE, ("worst = -math.inf if maximize else math.inf", "worst = -math.inf"))

bank.hint(
    "ties-to-the-last",
    "Among equal values, the trial with the higher number went on. The lower number goes first.",
    edge=True,
)
bank.slip("ties-to-the-last", ("sign * values[number], number)", "sign * values[number], -number)"))
bank.variant(
    "ties-to-the-last",
    PICKS,
    ('numbers[np.argsort(-marks, kind="stable")]', 'numbers[np.argsort(marks, kind="stable")[::-1]]'),
)

bank.hint("one-too-many", "Too many trials go on: n // eta is rounded down.", edge=True)
bank.slip("one-too-many", ("len(order) // eta)]", "-(-len(order) // eta))]"))
bank.variant("one-too-many", RECURSIVE, ("len(best) // eta or 1", "math.ceil(len(best) / eta)"))

bank.hint("nobody-goes-on", "With fewer than eta trials in a rung, none goes on. At least one must.", edge=True)
bank.slip(
    "nobody-goes-on",
    ("max(1, len(order) // eta)]", "len(order) // eta]"),
    (
        "    while epochs <= last:\n        values",
        "    while epochs <= last:\n        if not going_on:\n            rungs.append((epochs, {}))\n            done, epochs = epochs, epochs * eta\n            continue\n        values",
    ),
)
bank.variant("nobody-goes-on", RECURSIVE, (" or 1]", "]"))

bank.hint("rung-values", "A rung doesn't list the trials that were in it with the values that train returned.")
bank.slip(
    "rung-values",
    ("rungs.append((epochs, values))", "rungs.append((epochs, {i: round(v, 1) for i, v in values.items()}))"),
)
bank.variant("rung-values", RECURSIVE, ("[(epochs, values), *", "[(epochs, known), *"))

bank.hint("total-form", "halving_epochs must return one number.")
bank.slip("total-form", ("    return total\n", "    return [total]\n"))
bank.variant("total-form", RECURSIVE, ("    return total\n", "    return str(total)\n"))

bank.hint("wrong-total", "This is not the total cost of the rungs.")
bank.slip("wrong-total", ("    return total\n", "    return 2 * total\n"))
bank.variant("wrong-total", RECURSIVE, ("    return total\n", "    return total - n * first\n"))

bank.hint("total-from-zero", "This is the cost if each rung trains from scratch. Trials go on from where they were.")
bank.slip("total-from-zero", ("total += n * (epochs - done)", "total += n * epochs"))
bank.variant("total-from-zero", RECURSIVE, ("(eta**k - eta ** (k - 1))", "eta**k"))

bank.hint("total-nobody", "With fewer than eta trials in a rung, one still goes on, and its epochs count.", edge=True)
bank.slip("total-nobody", ("n = max(1, n // eta)", "n = n // eta"))
bank.variant("total-nobody", RECURSIVE, ("max(1, n // eta**k)", "(n // eta**k)"))

bank.hint(
    "total-not-rounded",
    "There is no such thing as a third of a trial: n // eta is rounded down at each rung.",
    edge=True,
)
bank.slip("total-not-rounded", ("n = max(1, n // eta)", "n = max(1, n / eta)"))
bank.variant("total-not-rounded", RECURSIVE, ("n // eta**k", "n / eta**k"))
bank.slip("total-not-rounded", ("n = max(1, n // eta)", "n = math.ceil(n / eta)"))
bank.slip("total-not-rounded", ("n = max(1, n // eta)", "n = max(1, round(n / eta))"))
# the formula of the text, which knows no rounding
bank.slip("total-not-rounded", ("    return total\n", "    return trials * first * (1 + k * (1 - 1 / eta))\n"), (
    "    total, done, epochs = 0, 0, first\n", "    total, done, epochs = 0, 0, first\n    trials, k = n, round(math.log(last / first, eta))\n"))  # fmt: skip
bank.variant("total-not-rounded", RECURSIVE, ("n // eta**k", "math.ceil(n / eta**k)"))

bank.hint(
    "rounded-logarithm",
    "A rung is missing at 243 epochs: math.log(243, 3) is 4.999… in floats, and int() turns that into 4. Count the "
    "rungs by multiplying.",
    edge=True,
)
LOGARITHM = "for _ in range(int(math.log(last / first, eta)) + 1):\n"
bank.slip("rounded-logarithm", ("    while epochs <= last:\n        values", f"    {LOGARITHM}        values"))
bank.slip("rounded-logarithm", ("    while epochs <= last:\n        total", f"    {LOGARITHM}        total"))
bank.variant("rounded-logarithm", PICKS, ("range(64)", "range(int(math.log(last / first) / math.log(eta)) + 1)"))

# ranked by the best value that a trial ever had: this rung's value counts
bank.slip("wrong-trained", ("        rungs.append((epochs, values))\n", """        rungs.append((epochs, values))
        ever = {i: max(seen[i] for _, seen in rungs) if maximize else min(seen[i] for _, seen in rungs) for i in values}
"""), ("sign * values[number], number)", "sign * ever[number], number)"))  # fmt: skip
# argsort is not stable unless told
bank.variant("ties-to-the-last", PICKS, ('np.argsort(-marks, kind="stable")', "np.argsort(-marks)"))
# a stable sort of those going on: in the second rung they stand in the order of the first
bank.hint(
    "ties-to-the-leader",
    "Among equal values, the trial that led in the previous rung went on. It should be the lower number: put it in "
    "the sort key.",
    edge=True,
)
bank.slip("ties-to-the-leader", ("sign * values[number], number)", "sign * values[number])"))
bank.variant("ties-to-the-leader", RECURSIVE, ("for number in sorted(numbers):", "for number in numbers:"))

bank.hint(
    "nan-left-out",
    "When most trials have diverged, too few go on. n counts all the trials of the rung; NaN is just the worst value.",
    edge=True,
)
bank.slip("nan-left-out", ("        order = sorted(values, key", "        n = len(values)\n        order = sorted([i for i in values if not math.isnan(values[i])], key"), (
    "order[: max(1, len(order) // eta)]", "order[: max(1, n // eta)]"))  # fmt: skip
bank.variant("nan-left-out", RECURSIVE, (
    "best = sorted(known, key", "n = len(known)\n        best = sorted([i for i in known if not math.isnan(values[i])], key"), ("len(best) // eta or 1", "n // eta or 1"))  # fmt: skip
