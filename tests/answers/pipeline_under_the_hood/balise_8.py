"""Answers to balise 8 of 15_pipeline_under_the_hood: the bubble, by formula and from your run."""

import math
from fractions import Fraction

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 8, whole=True)

bank.hint(
    "simulated",
    "planner.{name} simulates a whole step. The bubble of an ideal pipeline is a formula of two numbers: count turns.",
)
bank.instead(
    "simulated",
    '''
def ideal_bubble(n_stages, n_micro_batches):
    """Cheat: the planner's simulator."""
    orders = [one_f_one_b(stage, n_stages, n_micro_batches) for stage in range(n_stages)]
    return planner.simulate(orders, {"F": 1.0, "B": 2.0}).bubble
''',
)

bank.instead(
    "simulated",
    '''
def fewest_micro_batches(n_stages, bubble):
    """Cheat: the planner's simulator, until it is satisfied."""
    from dlojz_tp.planner.pipeline import simulate
    from dlojz_tp.planner.schedules import gpipe as orders

    m = 1
    while simulate(orders(n_stages, m), {"F": 1.0, "B": 2.0}).bubble > bubble + 1e-9:
        m += 1
    return m
''',
)


other = Bank("15_pipeline_under_the_hood", 8)


# --- right ones ---


def ideal_as_waiting(p, m):
    return 1 - m / (m + p - 1)


def fewest_by_formula(p, share):
    return max(1, math.ceil((p - 1) * (1 / share - 1) - 1e-9))


def idle_with_numpy(events):
    times = np.array([event[4:] for event in events])
    ranks = np.array([event[0] for event in events])
    total = (times[:, 1].max() - times[:, 0].min()) * len(np.unique(ranks))
    return 1 - (times[:, 1] - times[:, 0]).sum() / total


def costs_with_numpy(events):
    found = {}
    for kind in sorted({event[1] for event in events}):
        mine = [event for event in events if event[1] == kind]
        stages = sorted({event[3] for event in mine})
        found[kind] = np.array([np.median([e[5] - e[4] for e in mine if e[3] == s]) for s in stages])
    return found


def fewest_by_doubling(p, share):
    low, high = 0, 1
    while (p - 1) / (high + p - 1) > share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if (p - 1) / (middle + p - 1) <= share else (middle, high)
    return high


def idle_by_gaps(events):
    start, stop = min(e[4] for e in events), max(e[5] for e in events)
    by_rank = {}
    for e in sorted(events, key=lambda e: e[4]):
        by_rank.setdefault(e[0], []).append(e)
    idle = 0.0
    for mine in by_rank.values():
        idle += mine[0][4] - start + stop - mine[-1][5] + sum(b[4] - a[5] for a, b in zip(mine, mine[1:]))
    return torch.tensor(idle / (len(by_rank) * (stop - start)), dtype=torch.float64)


def costs_in_lists(events):
    n = len({e[3] for e in events})
    lists = {}
    for _, kind, _, stage, begin, end in events:
        lists.setdefault(kind, [[] for _ in range(n)])[stage].append(end - begin)
    return {kind: tuple(float(np.median(times)) for times in stages) for kind, stages in lists.items()}


def ideal_as_fraction(p, m):
    """As a drawing would show it: m turns of work, p - 1 of waiting."""
    return Fraction(p - 1, m + p - 1)


def fewest_rounded(p, share):
    """Rounds up what is a last bit above a whole number: 13 for 12."""
    return max(1, math.ceil((p - 1) * (1 - share) / share))


def fewest_in_fractions(p, share):
    """The decimal number that the share is written as, without rounding."""
    share = Fraction(str(share))
    return max(1, math.ceil((p - 1) * (1 - share) / share))


other.several(None, ideal_as_waiting, fewest_by_formula, idle_with_numpy, costs_with_numpy)
other.several(None, ideal_as_waiting, fewest_by_doubling, idle_by_gaps, costs_in_lists)
bank.hint(
    "ceil-of-a-float",
    "{truth} micro-batches meet the share exactly. In floats, 3 * (1 - 0.2) / 0.2 is a little "
    "more than 12, so rounding up gives one too many. Compare the bubble itself with the share, "
    "or subtract a little before you round up.",
)
other.several("ceil-of-a-float", ideal_as_waiting, fewest_rounded, idle_with_numpy, costs_in_lists)
other.several(None, ideal_as_fraction, fewest_in_fractions, idle_with_numpy, costs_in_lists)


# --- the formula ---

IDEAL = "return (n_stages - 1) / (n_micro_batches + n_stages - 1)"


other.slip("simulated", (IDEAL, "return planner.simulate(planner.gpipe(n_stages, n_micro_batches), {'F': 1.0, 'B': 2.0}).bubble"), variant=True)  # fmt: skip


bank.hint(
    "percent",
    "That is a percentage. Return the share as a number from 0 to 1; it is printed as a percentage later.",
)
other.slip("percent", (IDEAL, "return 100 * (n_stages - 1) / (n_micro_batches + n_stages - 1)"))
bank.hint(
    "worked-share",
    "That is the share of the time in which a stage works. The bubble is the rest.",
)
other.slip("worked-share", (IDEAL, "return n_micro_batches / (n_micro_batches + n_stages - 1)"),
          ("> share + 1e-9", "< 1 - share"))  # fmt: skip
other.slip("worked-share", (IDEAL, "return 1 - (n_stages - 1) / (n_micro_batches + n_stages - 1)"), variant=True)
other.slip(None, (IDEAL, "return 1 - n_micro_batches / (n_micro_batches + n_stages - 1)"))
bank.hint(
    "over-ideal",
    "(p − 1) / m compares the waiting with the work. The bubble is a share of the whole time, work "
    "and waiting together: m + p − 1 turns.",
)
other.slip("over-ideal", (IDEAL, "return (n_stages - 1) / n_micro_batches"), variant=True)
bank.hint(
    "bubble-off-by-one",
    "You count one turn too many or too few. A step takes m + p − 1 turns, and each stage works in m of them.",
)
other.slip("bubble-off-by-one", (IDEAL, "return (n_stages - 1) / (n_micro_batches + n_stages)"))
other.slip("bubble-off-by-one", (IDEAL, "return n_stages / (n_micro_batches + n_stages - 1)"), variant=True)
bank.hint(
    "whole-numbers",
    "A share is between 0 and 1, but this one was rounded to a whole number: / divides, // rounds down.",
)
other.slip("whole-numbers", (IDEAL, "return (n_stages - 1) // (n_micro_batches + n_stages - 1)"))
other.slip("whole-numbers", (IDEAL, "return round((n_stages - 1) / (n_micro_batches + n_stages - 1))"), variant=True)
bank.hint(
    "wrong-bubble",
    "That isn't the share of the time that a stage spends waiting.",
)
other.slip("wrong-bubble", (IDEAL, "return 2 * (n_stages - 1) / (n_micro_batches + n_stages - 1)"))
other.slip("wrong-bubble", (IDEAL, "return 3 / 11"), variant=True)
bank.hint(
    "not-a-share",
    "The bubble is one number, a float from 0 to 1.",
)
other.slip("not-a-share", (IDEAL, "return f'{(n_stages - 1) / (n_micro_batches + n_stages - 1):.0%}'"))
other.slip("nothing-returned", (IDEAL, "(n_stages - 1) / (n_micro_batches + n_stages - 1)"))


# --- the fewest ---

LOOP = """n_micro_batches = 1
    while ideal_bubble(n_stages, n_micro_batches) > share + 1e-9:  # allows for rounding
        n_micro_batches += 1
    return n_micro_batches"""


other.slip("ceil-of-a-float", (LOOP, "import math\n\n    return max(1, math.ceil((n_stages - 1) * (1 - share) / share))"), variant=True)  # fmt: skip
bank.hint(
    "not-a-count",
    "A number of micro-batches is a whole number, an int.",
)
other.slip("not-a-count", (LOOP, "return max(1, (n_stages - 1) * (1 / share - 1))"))
other.slip("not-a-count", (LOOP, "return str(max(1, round((n_stages - 1) * (1 / share - 1))))"), variant=True)
bank.hint(
    "too-few",
    "With {m} micro-batches the bubble is {bubble:.4f}, which is more than {share}. Round up.",
)
other.slip("too-few", (LOOP, "return max(1, int((n_stages - 1) * (1 / share - 1)))"))
other.slip("too-few", (LOOP, "return 1"), variant=True)
bank.hint(
    "too-many",
    "{m} micro-batches are enough, but not the fewest. When the share is met exactly, one more is one too many.",
)
other.slip("too-many", (LOOP, "return int((n_stages - 1) * (1 / share - 1)) + 1"))
other.slip("too-many", ("> share + 1e-9", ">= share"))
other.slip("too-many", ("n_micro_batches += 1", "n_micro_batches *= 2"), variant=True)
bank.hint(
    "no-micro-batch",
    "At least one micro-batch is needed, even when there is nothing to hide.",
)
other.slip("no-micro-batch", (LOOP, "return -int(-(n_stages - 1) * (1 / share - 1) // 1)"))
other.slip("no-micro-batch", (LOOP, "return round((n_stages - 1) * (1 / share - 1) + 0.4999999)"), variant=True)
other.slip("over-ideal", (LOOP, "return max(1, -int(-(n_stages - 1) / share // 1))"))


# --- the measured share ---

bank.hint(
    "idle-not-busy",
    "That is the share of the time in which the ranks work.",
)
other.slip("idle-not-busy", ("return 1 - busy", "return busy"))
other.slip("idle-not-busy", ("return 1 - busy", "return 1.0 * busy"), variant=True)
other.slip("percent", ("return 1 - busy / (length * len({rank for rank, *_ in events}))",
          "return 100 * (1 - busy / (length * len({rank for rank, *_ in events})))"), variant=True)  # fmt: skip
bank.hint(
    "clock-zero",
    "The clock isn't at 0 when the step begins. The step lasts from the first begin to the last end.",
)
other.slip("clock-zero", (" - min(begin for *_, begin, _ in events)", ""))
other.slip("clock-zero", ("min(begin for *_, begin, _ in events)", "min(0.0, *(begin for *_, begin, _ in events))"), variant=True)  # fmt: skip
bank.hint(
    "order-assumed",
    "The events aren't sorted by time: those of all ranks are mixed. Look for the smallest begin and the largest end.",
)
other.slip("order-assumed", ("max(end for *_, end in events) - min(begin for *_, begin, _ in events)",
          "events[-1][5] - events[0][4]"))  # fmt: skip
other.slip("order-assumed", ("max(end for *_, end in events) - min(begin for *_, begin, _ in events)", "events[-1][-1] - events[0][-2]"), variant=True)  # fmt: skip
bank.hint(
    "ranks-forgotten",
    "You compare the work of all ranks with the time of one. The time available is the length "
    "of the step times the number of ranks.",
)
other.slip("ranks-forgotten", (" * len({rank for rank, *_ in events})", ""))
other.slip("ranks-forgotten", ("1 - busy / (length * len({rank for rank, *_ in events}))", "(length - busy) / length"), variant=True)  # fmt: skip
bank.hint(
    "ranks-miscounted",
    "The ranks here are {ranks}: {n} of them. Count the different ranks in the events, not the "
    "stages, and don't assume that they start at 0.",
)
other.slip("ranks-miscounted", ("len({rank for rank, *_ in events})", "(1 + max(rank for rank, *_ in events))"))
other.slip("ranks-miscounted", ("{rank for rank, *_ in events}", "{e[3] for e in events}"), variant=True)
bank.hint(
    "wrong-idle",
    "That isn't the share of all ranks' time in which they do nothing.",
)
other.slip("wrong-idle", ("max(end for *_, end in events)", "max(begin for *_, begin, _ in events)"))
other.slip("wrong-idle", ("busy = sum(end - begin for *_, begin, end in events)",
          "busy = sum(end - begin for _, kind, *_, begin, end in events if kind == 'F')"))  # fmt: skip
other.slip("not-a-share", ("    return 1 - busy", "    return busy, length\n    return 1 - busy"), variant=True)
bank.hint(
    "events-changed",
    "You changed the list of events. Leave it as it is: it is drawn afterwards.",
)
other.slip(
    "events-changed",
    ("    busy = sum", "    events.sort(key=lambda e: e[4] + e[0])\n    events.pop()\n    busy = sum"),
)
other.slip("events-changed", ("    busy = sum", "    events.reverse()\n    busy = sum"), variant=True)


def idle_own_window(events):
    shares = []
    for rank in {e[0] for e in events}:
        mine = [e for e in events if e[0] == rank]
        length = max(e[5] for e in mine) - min(e[4] for e in mine)
        shares.append(1 - sum(e[5] - e[4] for e in mine) / length)
    return sum(shares) / len(shares)


def idle_own_windows_added(events):
    length = busy = 0
    for rank in {e[0] for e in events}:
        mine = [e for e in events if e[0] == rank]
        length += max(e[5] for e in mine) - min(e[4] for e in mine)
        busy += sum(e[5] - e[4] for e in mine)
    return 1 - busy / length


bank.hint(
    "own-window",
    "You time each rank from its own first action to its own last one. Waiting for the first "
    "micro-batch is waiting too: the time of every rank is that of the whole step.",
)
other.several("own-window", ideal_as_waiting, fewest_by_formula, idle_own_window, costs_in_lists)
other.several("own-window", ideal_as_waiting, fewest_by_formula, idle_own_windows_added, costs_in_lists, variant=True)


# --- the costs ---

bank.hint(
    "not-costs",
    'Return a dictionary: for each kind of action, such as "F", a list with one number per stage.',
)
other.slip("not-costs", ("    return {\n        kind: [", "    return [\n        ["),
          ("for kind in {kind for _, kind, *_ in events}\n    }", "for kind in {kind for _, kind, *_ in events}\n    ]"))  # fmt: skip
other.slip("not-costs", ("    return {\n", "    return 0.0\n    return {\n"), variant=True)
bank.hint(
    "nothing-to-take",
    "Some pair of kind and stage has no event ({error}). Here the kinds are {kinds}, the stages "
    "0 to {last}, and the ranks {ranks}: take kinds and stages from the events.",
)
other.slip("nothing-to-take", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'FB'"))
other.slip("nothing-to-take", ("if e[1] == kind and e[3] == s)", "if e[1] == kind and e[0] == s)"), variant=True)
bank.hint(
    "kind-missing",
    "The kinds in these events are {kinds}. Each needs its own list of costs.",
)
other.slip("kind-missing", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'FB'"),
          ("for s in range(n_stages)]", "for s in range(n_stages)] if kind in {e[1] for e in events} else [0.0]"))  # fmt: skip
other.slip("kind-missing", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'F'"), variant=True)
bank.hint(
    "per-rank",
    "Return one number per stage, in the order of the stages. Here rank {rank} holds two of them.",
)
other.slip("per-rank", ("e[3] == s) for s in range(n_stages)]", "e[0] == s) for s in sorted({e[0] for e in events})]"))
other.slip("per-rank", ("e[3] == s) for s in range(n_stages)]", "e[0] == s) for s in sorted(set(e[0] for e in events))]"), variant=True)  # fmt: skip
bank.hint(
    "stages-shuffled",
    "These are the right numbers in the wrong order: stage 0 comes first, wherever its events are in the list.",
)
other.slip("stages-shuffled", ("for s in range(n_stages)]", "for s in dict.fromkeys(e[3] for e in events)]"))
other.slip("stages-shuffled", ("for s in range(n_stages)]", "for s in reversed(range(n_stages))]"), variant=True)
bank.hint(
    "mean-not-median",
    "That is the mean. One action disturbed by another program shifts it: take the median.",
)
other.slip("mean-not-median", ("statistics.median(", "statistics.fmean("))
other.slip("mean-not-median", ("statistics.median(", "statistics.mean("), variant=True)
bank.hint(
    "cost-summed",
    "That is the time of all micro-batches together. The cost is the time of one.",
)
other.slip("cost-summed", ("statistics.median(", "sum("))
other.slip("cost-summed", ("statistics.median(", "(lambda times: sum(times))("), variant=True)
bank.hint(
    "wrong-cost",
    "The cost of an action is its end minus its begin; take the median over the micro-batches.",
)
other.slip("wrong-cost", ("statistics.median(", "max("))
other.slip("wrong-cost", ("e[5] - e[4] for e", "e[5] for e"), variant=True)


LENGTH = "length = max(end for *_, end in events) - min"


other.slip("wrong-idle", (LENGTH, "length = max(events, key=lambda event: event[4])[5] - min"))


BUSY = "    busy = sum(end - begin for *_, begin, end in events)\n"


IN_ORDER = """    first, idle, free = min(begin for *_, begin, _ in events), 0.0, {}
    for rank, *_, begin, end in events:
        idle += max(0.0, begin - free.get(rank, first))
        free[rank] = max(end, free.get(rank, first))
    busy = length * len(free) - idle - sum(first + length - end for end in free.values())
"""


other.slip("wrong-idle", (BUSY, IN_ORDER), variant=True)  # each rank's events are taken for ordered
bank.add(other)
