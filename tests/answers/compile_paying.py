"""Answers to 06_compile, balise 5: the step at which compiling has paid."""

import math
from itertools import count

from tests.answers.bank import Bank

bank = Bank("06_compile")

bank.slip(
    5,
    "not-none",
    ("    if compiled >= eager:\n        return None\n", "    if compiled == eager:\n        return None\n"),
)
bank.slip(5, "not-none", ("return None", "return math.inf"))
bank.slip(5, "not-none", ("return None", "return 0"))
bank.slip(5, "not-none", ("return None", "return -1"))
bank.slip(5, "slower-divides", ("compiled >= eager", "compiled > eager"))
bank.slip(5, "not-none", ("    if compiled >= eager:\n        return None\n", ""))
bank.slip(
    5,
    "never-at-all",
    ("compiled >= eager", "compiled >= eager or extra0 > 10"),
    ("    if", "    extra0 = sum(slow_steps)\n    if"),
)
bank.slip(5, "not-whole", ("math.ceil(extra / (eager - compiled))", "extra / (eager - compiled)"))
bank.slip(5, "not-whole", ("return max(1,", "return float(max(1,"), ("compiled)))", "compiled))))"))
bank.slip(5, "rounded-down", ("math.ceil(", "int("))
bank.slip(5, "rounded-down", ("math.ceil(extra / (eager - compiled))", "int(extra // (eager - compiled))"))
bank.slip(
    5, "rounded-to-nearest", ("math.ceil(extra / (eager - compiled))", "math.floor(extra / (eager - compiled) + 0.5)")
)
bank.slip(5, "one-too-many", ("math.ceil(extra / (eager - compiled))", "int(extra / (eager - compiled)) + 1"))
bank.slip(5, "step-forgotten", ("seconds - compiled for", "seconds for"))
bank.slip(5, "eager-step-taken", ("seconds - compiled for", "seconds - eager for"))
bank.slip(
    5, "first-only", ("sum(seconds - compiled for seconds in slow_steps)", "(slow_steps or [compiled])[0] - compiled")
)
bank.slip(5, "only-the-compiling", ("math.ceil(extra / (eager - compiled))", "math.ceil(sum(slow_steps) / eager)"))
bank.slip(
    5,
    "below-one",
    ("max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))", "math.ceil(extra / (eager - compiled))"),
)
bank.slip(5, "below-one", ("max(1, len(slow_steps), ", "max(1, "))
bank.slip(5, "wrong-count", ("(eager - compiled)))", "(eager - compiled)) + 13)"))
bank.slip(5, "wrong-count", ("return max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))", "return 80"))
bank.slip(5, "list-changed", ("return max(", "slow_steps.sort(); slow_steps.append(0.0)\n    return max("))


@bank.right(5)
def break_even(eager, compiled, slow_steps):
    if eager <= compiled:
        return None
    n = max(len(slow_steps), 1)
    while sum(slow_steps) + (n - len(slow_steps)) * compiled > n * eager:
        n += 1
        if n > 5000:
            return max(n, math.ceil((sum(slow_steps) - len(slow_steps) * compiled) / (eager - compiled)))
    return n


@bank.right(5)
def break_even(eager, compiled, slow_steps):  # noqa: F811
    gain = eager - compiled
    if gain <= 0:
        return None
    lost = sum(slow_steps) - len(slow_steps) * compiled
    at_least = max(1, len(slow_steps))
    return max(at_least, -int(-lost // gain))


@bank.right(5)
def break_even(eager, compiled, slow_steps):  # noqa: F811
    import numpy as np

    if not compiled < eager:
        return None
    slow = np.asarray(slow_steps, dtype=float)
    return int(max(1, slow.size, np.ceil((slow - compiled).sum() / (eager - compiled))))


@bank.right(5)
def break_even(eager, compiled, slow_steps):  # noqa: F811
    """Bisection over the totals."""
    if compiled >= eager:
        return None

    def paid(n):
        return sum(slow_steps) + (n - len(slow_steps)) * compiled <= n * eager

    low = max(1, len(slow_steps))
    if paid(low):
        return low
    high = next(low << k for k in count() if paid(low << k))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if paid(middle) else (middle, high)
    return high


COUNT = "max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))"
bank.slip(5, "slow-steps-added", (COUNT, "len(slow_steps) + math.ceil(extra / (eager - compiled))"))
bank.slip(5, "step-forgotten", ("sum(seconds - compiled for seconds in slow_steps)", "sum(slow_steps) - compiled"))
bank.slip(5, "one-too-many", ("math.ceil(extra / (eager - compiled))", "int(extra / (eager - compiled)) + 1"))
