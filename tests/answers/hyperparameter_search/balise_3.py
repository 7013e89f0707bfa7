"""Answers to balise 3 of 11_hyperparameter_search: asynchronous successive halving."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 3, whole=True)

LEVELS = """
class ASHA:
    def __init__(self, first, last, eta, maximize=True):
        self.first, self.last, self.eta, self.maximize = first, last, eta, maximize
        self.trials = []  # the level of each: how far it was told to go
        self.values = {}

    def job(self):
        epochs = self.first
        while epochs * self.eta <= self.last:
            epochs *= self.eta
        while epochs > self.first:
            epochs //= self.eta
            worst = -math.inf if self.maximize else math.inf
            there = [(worst if math.isnan(v) else v, -i) for (i, e), v in self.values.items() if e == epochs]
            there.sort(reverse=self.maximize)
            for _, minus in there[: len(there) // self.eta]:
                if self.trials[-minus] == epochs:
                    self.trials[-minus] = epochs * self.eta
                    return [-minus, epochs * self.eta]
        self.trials.append(self.first)
        return [len(self.trials) - 1, self.first]

    def report(self, number, epochs, value):
        self.values[number, epochs] = value
"""
bank.text(None, LEVELS)
bank.text(
    None, LEVELS.replace("-i) for", "i) for").replace("minus", "number").replace("-number", "number")
)  # of diverged ones, the last that came

HEAPS = """
class ASHA:
    def __init__(self, first, last, eta, maximize=True):
        self.first, self.eta, self.sign, self.next = first, eta, 1 if maximize else -1, 0
        self.table, epochs = {}, first
        while epochs <= last:
            self.table[epochs] = []
            epochs *= eta

    def job(self):
        for epochs, rows in reversed(list(self.table.items())[:-1]):
            for row in heapq.nlargest(len(rows) // self.eta, rows, key=lambda row: row[0]):
                if not row[2]:
                    row[2] = True
                    return row[1], epochs * self.eta
        self.next += 1
        return self.next - 1, self.first

    def report(self, number, epochs, value):
        mark = self.sign * value if value == value else -math.inf
        self.table[epochs].append([mark, number, False])
"""
bank.text(None, HEAPS)

bank.hint(
    "waits",
    "job() returned nothing, so the worker would have to wait. When no trial can be promoted, start a new one.",
)
bank.slip(
    "waits",
    (
        "        self.started += 1\n",
        "        if self.started > len(self.rungs[0]) + 2:\n            return None\n        self.started += 1\n",
    ),
)
bank.slip(
    "waits",
    (
        "        self.started += 1\n",
        "        if self.started == 27:\n            return None\n        self.started += 1\n",
    ),
)
bank.variant(
    "waits",
    HEAPS,
    ("        self.next += 1\n", "        if self.next == 9:\n            return None\n        self.next += 1\n"),
)

bank.hint("job-form", "job() returns a pair of integers: the trial's number, and its total number of epochs.")
bank.slip("job-form", ("return self.started - 1, self.epochs[0]", "return self.started - 1"))
bank.variant(
    "job-form", LEVELS, ("return [len(self.trials) - 1, self.first]", "return {len(self.trials) - 1: self.first}")
)

bank.hint("wrong-job", "Another job is expected here. {why}")
bank.slip("wrong-job", ("return self.started - 1, self.epochs[0]", "return self.started, self.epochs[0]"))
bank.variant("wrong-job", HEAPS, ("return self.next - 1, self.first", "return 2 * self.next, self.first"))

bank.hint(
    "promoted-twice",
    "A trial was promoted from the same rung twice: its training is paid for again. Record the promotion when you "
    "hand out the job.",
)
bank.slip("promoted-twice", ("                    self.promoted[k].add(number)\n", "                    pass\n"))
bank.variant("promoted-twice", LEVELS, ("if self.trials[-minus] == epochs:", "if True:"))

bank.hint(
    "noted-at-report",
    "A trial is promoted again before its first promotion has reported, because another worker asks in between. "
    "Record the promotion when you hand out the job.",
    edge=True,
)
bank.slip("noted-at-report", ("                    self.promoted[k].add(number)\n", ""), (
    "        self.rungs[self.epochs.index(epochs)][number] = value\n",
    "        k = self.epochs.index(epochs)\n        self.rungs[k][number] = value\n        if k:\n            self.promoted[k - 1].add(number)\n"))  # fmt: skip
bank.variant("noted-at-report", LEVELS, ("                    self.trials[-minus] = epochs * self.eta\n", ""), (
    "        self.values[number, epochs] = value\n", "        self.values[number, epochs] = value\n        self.trials[number] = max(self.trials[number], epochs)\n"))  # fmt: skip

bank.hint(
    "lowest-first",
    "A trial in a low rung was promoted while one in a higher rung could be. Go through the "
    "rungs from the highest down.",
)
bank.slip("lowest-first", ("reversed(range(len(self.epochs) - 1))", "range(len(self.epochs) - 1)"))
bank.variant("lowest-first", HEAPS, ("reversed(list(self.table.items())[:-1])", "list(self.table.items())[:-1]"))

bank.hint("new-first", "A new trial was started while one could be promoted. Promotions come first.")
bank.slip(
    "new-first",
    (
        "        for k in reversed",
        "        if self.started < 27:\n            self.started += 1\n            return self.started - 1, self.epochs[0]\n        for k in reversed",
    ),
)
bank.variant(
    "new-first",
    HEAPS,
    (
        "        for epochs, rows in rev",
        "        if self.next < 27:\n            self.next += 1\n            return self.next - 1, self.first\n        for epochs, rows in rev",
    ),
)

bank.hint("worst-promoted", "You promote the worst trials of the rung.")
bank.slip("worst-promoted", ("-1 if maximize else 1", "1 if maximize else -1"))
bank.variant("worst-promoted", HEAPS, ("1 if maximize else -1", "-1 if maximize else 1"))

bank.hint(
    "maximize-ignored",
    "With maximize=False, you promote the trials with the largest values. The smallest are the best there.",
)
bank.slip("maximize-ignored", ("-1 if maximize else 1", "-1"))
bank.variant("maximize-ignored", HEAPS, ("1 if maximize else -1", "1"))

bank.hint(
    "nan-promoted",
    "A diverged trial counts among the best. NaN is the worst value, whether you maximise or minimise.",
    edge=True,
)
bank.slip("nan-promoted", ("(math.isnan(values[number]), self", "(not math.isnan(values[number]), self"))
bank.slip(
    "nan-promoted",
    (
        "key=lambda number: (math.isnan(values[number]), self.sign * values[number])",
        "key=lambda number: self.sign * values[number]",
    ),
)
bank.variant("nan-promoted", HEAPS, ("else -math.inf", "else math.inf"))

bank.hint(
    "share-of-the-rest",
    "You take the best 1 / eta of the trials that have not been promoted yet. Take the best 1 / eta of all that "
    "have reported in the rung, promoted ones included.",
)
bank.slip("share-of-the-rest", ("order = sorted(values,", "order = sorted(values.keys() - self.promoted[k],"))
bank.variant(
    "share-of-the-rest",
    HEAPS,
    ("            for row", "            rows = [row for row in rows if not row[2]]\n            for row"),
)

bank.hint(
    "rounded-up",
    "A rung promotes before eta trials have reported there. The number of reports // eta is rounded down, even to 0.",
    edge=True,
)
bank.slip("rounded-up", ("order[: len(order) // self.eta]", "order[: math.ceil(len(order) / self.eta)]"))
bank.slip("rounded-up", ("order[: len(order) // self.eta]", "order[: max(1, len(order) // self.eta)]"))
bank.slip("rounded-up", ("order[: len(order) // self.eta]", "order[: round(len(order) / self.eta)]"))
bank.variant("rounded-up", HEAPS, ("len(rows) // self.eta", "-(-len(rows) // self.eta)"))
bank.variant("rounded-up", HEAPS, ("len(rows) // self.eta", "len(rows) // self.eta or 1"))

bank.hint(
    "waits-for-the-rung",
    "A rung promotes only when it is full, as in the synchronous version. Decide with the reports that are there.",
)
bank.slip(
    "waits-for-the-rung",
    (
        "            values = self.rungs[k]\n",
        "            values = self.rungs[k] if len(self.rungs[k]) >= 27 / self.eta**k else {}\n",
    ),
)
bank.variant(
    "waits-for-the-rung",
    HEAPS,
    (
        "            for row",
        "            if len(rows) < 27 * self.first / epochs:\n                continue\n            for row",
    ),
)

bank.hint("more-not-all", "The second number is the trial's total number of epochs, not the number of additional ones.")
bank.slip("more-not-all", ("return number, self.epochs[k + 1]", "return number, self.epochs[k + 1] - self.epochs[k]"), (
    "self.rungs[self.epochs.index(epochs)][number] = value",
    "k = 0\n        while number in self.rungs[k] and k < len(self.rungs) - 1:\n            k += 1\n        self.rungs[k][number] = value"))  # fmt: skip
bank.variant("more-not-all", LEVELS, ("return [-minus, epochs * self.eta]", "return [-minus, epochs * self.eta - epochs]"), (
    "        self.values[number, epochs] = value\n", "        self.values[number, self.trials[number]] = value\n"))  # fmt: skip

bank.hint("not-the-best", "A trial among the best 1 / eta was promoted, but not the best one left.")
bank.slip("not-the-best", ("in order[: len(order) // self.eta]:", "in order[: len(order) // self.eta][::-1]:"))
bank.variant(
    "not-the-best", LEVELS, ("in there[: len(there) // self.eta]:", "in reversed(there[: len(there) // self.eta]):")
)

bank.hint("rung-left-out", "Promotions stop one rung too early: `last` epochs are still allowed.", edge=True)
bank.slip("rung-left-out", ("self.epochs[-1] * eta <= last", "self.epochs[-1] * eta < last"))
bank.variant("rung-left-out", HEAPS, ("while epochs <= last:", "while epochs < last:"))

bank.hint("beyond-last", "A trial was sent beyond `last` epochs.", edge=True)
bank.slip("beyond-last", ("self.epochs[-1] * eta <= last", "self.epochs[-1] < last"))
bank.variant("beyond-last", HEAPS, ("        while epochs <= last:\n", "        while epochs // eta < last:\n"))

bank.hint(
    "nan-best-of-losses",
    "With maximize=False, a NaN passes for a small loss. It is the worst value there, too.",
    edge=True,
)
bank.slip("nan-best-of-losses", (
    "(math.isnan(values[number]), self.sign * values[number])",
    "self.sign * (-math.inf if math.isnan(values[number]) else values[number])"))  # fmt: skip
bank.variant("nan-best-of-losses", HEAPS, ("else -math.inf", "else self.sign * -math.inf"))

bank.hint(
    "nan-not-counted",
    "A diverged trial has reported, too. Count it among the reports that you divide by eta; when too few others "
    "are left, promote it.",
    edge=True,
)
bank.slip(
    "nan-not-counted",
    ("if number not in self.promoted[k]:", "if number not in self.promoted[k] and not math.isnan(values[number]):"),
)
bank.slip("nan-not-counted", (
    "        self.rungs[self.epochs.index(epochs)]",
    "        if not math.isnan(value):\n            self.rungs[self.epochs.index(epochs)]"))  # fmt: skip
bank.variant("nan-not-counted", HEAPS, ("if not row[2]:", "if not row[2] and row[0] > -math.inf:"))
bank.variant("nan-not-counted", LEVELS, ("if e == epochs]", "if e == epochs and not math.isnan(v)]"))

bank.hint(
    "number-again",
    "A new trial got the number of one that is still running. Count the trials started, not those reported.",
    edge=True,
)
bank.slip("number-again", ("return self.started - 1, self.epochs[0]", "return len(self.rungs[0]), self.epochs[0]"))
bank.variant("number-again", LEVELS, (
    "return [len(self.trials) - 1, self.first]", "return [sum(e == self.first for _, e in self.values), self.first]"))  # fmt: skip

bank.hint(
    "promoted-once-in-all",
    "A trial that was promoted from one rung is never promoted from another. Keep one set per rung; [set()] * n is "
    "the same set n times.",
    edge=True,
)
bank.slip("promoted-once-in-all", ("[set() for _ in self.epochs]", "[set()] * len(self.epochs)"))
bank.variant("promoted-once-in-all", HEAPS, ("                if not row[2]:\n                    row[2] = True\n", """                if row[1] not in self.gone:
                    self.gone.add(row[1])
"""), ("self.table, epochs = {}, first", "self.table, self.gone, epochs = {}, set(), first"))  # fmt: skip

bank.hint(
    "rounded-logarithm",
    "A rung near 243 epochs is wrong: math.log(243, 3) is 4.999… in floats, and int() turns that into 4. Multiply, "
    "or round.",
    edge=True,
)
bank.slip("rounded-logarithm", ("self.rungs[self.epochs.index(epochs)]", "self.rungs[int(math.log(epochs / self.epochs[0], self.eta))]"))  # fmt: skip
bank.slip("rounded-logarithm", (
    "        while self.epochs[-1] * eta <= last:\n", "        for _ in range(int(math.log(last / first, eta))):\n"))  # fmt: skip
bank.variant("rounded-logarithm", HEAPS, (
    "        while epochs <= last:\n", "        for _ in range(int(math.log(last / first) / math.log(eta)) + 1):\n"))  # fmt: skip

bank.hint(
    "same-rung-again",
    "A promoted trial is sent to the rung that it comes from, not to the next one. It has had these epochs already.",
)
bank.slip("same-rung-again", ("return number, self.epochs[k + 1]", "return number, self.epochs[k]"))
bank.variant("same-rung-again", LEVELS, ("return [-minus, epochs * self.eta]", "return [-minus, epochs]"))
