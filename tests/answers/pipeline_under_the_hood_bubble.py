"""Answers to 15_pipeline_under_the_hood: the bubble."""

import math
from fractions import Fraction

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood")


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


bank.several(8, None, ideal_as_waiting, fewest_by_formula, idle_with_numpy, costs_with_numpy)
bank.several(8, None, ideal_as_waiting, fewest_by_doubling, idle_by_gaps, costs_in_lists)
bank.several(8, "ceil-of-a-float", ideal_as_waiting, fewest_rounded, idle_with_numpy, costs_in_lists)
bank.several(8, None, ideal_as_fraction, fewest_in_fractions, idle_with_numpy, costs_in_lists)

# --- the formula ---

IDEAL = "return (n_stages - 1) / (n_micro_batches + n_stages - 1)"
bank.slip(8, "percent", (IDEAL, "return 100 * (n_stages - 1) / (n_micro_batches + n_stages - 1)"))
bank.slip(8, "worked-share", (IDEAL, "return n_micro_batches / (n_micro_batches + n_stages - 1)"),
          ("> share + 1e-9", "< 1 - share"))  # fmt: skip
bank.slip(8, None, (IDEAL, "return 1 - n_micro_batches / (n_micro_batches + n_stages - 1)"))
bank.slip(8, "over-ideal", (IDEAL, "return (n_stages - 1) / n_micro_batches"))
bank.slip(8, "bubble-off-by-one", (IDEAL, "return (n_stages - 1) / (n_micro_batches + n_stages)"))
bank.slip(8, "bubble-off-by-one", (IDEAL, "return n_stages / (n_micro_batches + n_stages - 1)"))
bank.slip(8, "whole-numbers", (IDEAL, "return (n_stages - 1) // (n_micro_batches + n_stages - 1)"))
bank.slip(8, "wrong-bubble", (IDEAL, "return 2 * (n_stages - 1) / (n_micro_batches + n_stages - 1)"))
bank.slip(8, "wrong-bubble", (IDEAL, "return 3 / 11"))
bank.slip(8, "not-a-share", (IDEAL, "return f'{(n_stages - 1) / (n_micro_batches + n_stages - 1):.0%}'"))
bank.slip(8, "nothing-returned", (IDEAL, "(n_stages - 1) / (n_micro_batches + n_stages - 1)"))

# --- the fewest ---

LOOP = """n_micro_batches = 1
    while ideal_bubble(n_stages, n_micro_batches) > share + 1e-9:  # allows for rounding
        n_micro_batches += 1
    return n_micro_batches"""
bank.slip(8, "not-a-count", (LOOP, "return max(1, (n_stages - 1) * (1 / share - 1))"))
bank.slip(8, "too-few", (LOOP, "return max(1, int((n_stages - 1) * (1 / share - 1)))"))
bank.slip(8, "too-few", (LOOP, "return 1"))
bank.slip(8, "too-many", (LOOP, "return int((n_stages - 1) * (1 / share - 1)) + 1"))
bank.slip(8, "too-many", ("> share + 1e-9", ">= share"))
bank.slip(8, "too-many", ("n_micro_batches += 1", "n_micro_batches *= 2"))
bank.slip(8, "no-micro-batch", (LOOP, "return -int(-(n_stages - 1) * (1 / share - 1) // 1)"))
bank.slip(8, "over-ideal", (LOOP, "return max(1, -int(-(n_stages - 1) / share // 1))"))

# --- the measured share ---

bank.slip(8, "idle-not-busy", ("return 1 - busy", "return busy"))
bank.slip(8, "percent", ("return 1 - busy / (length * len({rank for rank, *_ in events}))",
          "return 100 * (1 - busy / (length * len({rank for rank, *_ in events})))"))  # fmt: skip
bank.slip(8, "clock-zero", (" - min(begin for *_, begin, _ in events)", ""))
bank.slip(8, "order-assumed", ("max(end for *_, end in events) - min(begin for *_, begin, _ in events)",
          "events[-1][5] - events[0][4]"))  # fmt: skip
bank.slip(8, "ranks-forgotten", (" * len({rank for rank, *_ in events})", ""))
bank.slip(8, "ranks-miscounted", ("len({rank for rank, *_ in events})", "(1 + max(rank for rank, *_ in events))"))
bank.slip(8, "ranks-miscounted", ("{rank for rank, *_ in events}", "{e[3] for e in events}"))
bank.slip(8, "wrong-idle", ("max(end for *_, end in events)", "max(begin for *_, begin, _ in events)"))
bank.slip(8, "wrong-idle", ("busy = sum(end - begin for *_, begin, end in events)",
          "busy = sum(end - begin for _, kind, *_, begin, end in events if kind == 'F')"))  # fmt: skip
bank.slip(8, "not-a-share", ("    return 1 - busy", "    return busy, length\n    return 1 - busy"))
bank.slip(
    8,
    "events-changed",
    ("    busy = sum", "    events.sort(key=lambda e: e[4] + e[0])\n    events.pop()\n    busy = sum"),
)


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


bank.several(8, "own-window", ideal_as_waiting, fewest_by_formula, idle_own_window, costs_in_lists)
bank.several(8, "own-window", ideal_as_waiting, fewest_by_formula, idle_own_windows_added, costs_in_lists)

# --- the costs ---

bank.slip(8, "not-costs", ("    return {\n        kind: [", "    return [\n        ["),
          ("for kind in {kind for _, kind, *_ in events}\n    }", "for kind in {kind for _, kind, *_ in events}\n    ]"))  # fmt: skip
bank.slip(8, "nothing-to-take", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'FB'"))
bank.slip(8, "nothing-to-take", ("if e[1] == kind and e[3] == s)", "if e[1] == kind and e[0] == s)"))
bank.slip(8, "kind-missing", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'FB'"),
          ("for s in range(n_stages)]", "for s in range(n_stages)] if kind in {e[1] for e in events} else [0.0]"))  # fmt: skip
bank.slip(8, "kind-missing", ("for kind in {kind for _, kind, *_ in events}", "for kind in 'F'"))
bank.slip(
    8, "per-rank", ("e[3] == s) for s in range(n_stages)]", "e[0] == s) for s in sorted({e[0] for e in events})]")
)
bank.slip(8, "stages-shuffled", ("for s in range(n_stages)]", "for s in dict.fromkeys(e[3] for e in events)]"))
bank.slip(8, "mean-not-median", ("statistics.median(", "statistics.fmean("))
bank.slip(8, "cost-summed", ("statistics.median(", "sum("))
bank.slip(8, "wrong-cost", ("statistics.median(", "max("))
bank.slip(8, "wrong-cost", ("e[5] - e[4] for e", "e[5] for e"))

LENGTH = "length = max(end for *_, end in events) - min"
bank.slip(8, "wrong-idle", (LENGTH, "length = max(events, key=lambda event: event[4])[5] - min"))
BUSY = "    busy = sum(end - begin for *_, begin, end in events)\n"
IN_ORDER = """    first, idle, free = min(begin for *_, begin, _ in events), 0.0, {}
    for rank, *_, begin, end in events:
        idle += max(0.0, begin - free.get(rank, first))
        free[rank] = max(end, free.get(rank, first))
    busy = length * len(free) - idle - sum(first + length - end for end in free.values())
"""
bank.slip(8, "wrong-idle", (BUSY, IN_ORDER))  # each rank's events are taken for ordered
