"""Answers to 06_compile, balise 5: the step at which compiling has paid."""

import math
from itertools import count

from tests.answers.bank import Bank

bank = Bank("06_compile", 5)

bank.hint("not-none", "When a compiled step is not faster, compiling never pays: return None, not {got}.")
bank.slip(
    "not-none",
    ("    if compiled >= eager:\n        return None\n", "    if compiled == eager:\n        return None\n"),
)
bank.slip("not-none", ("return None", "return math.inf"))
bank.slip("not-none", ("return None", "return 0"))
bank.slip("not-none", ("return None", "return -1"))
bank.hint("slower-divides", "The steps take equally long, so you divide by zero. Compiling never pays then: return "
          "None.", edge=True)  # fmt: skip
bank.slip("slower-divides", ("compiled >= eager", "compiled > eager"), variant=True)
bank.slip("not-none", ("    if compiled >= eager:\n        return None\n", ""), variant=True)
bank.hint("never-at-all", "Compiling pays here: each step saves {gain} s. None means never.")
bank.slip(
    "never-at-all",
    ("compiled >= eager", "compiled >= eager or extra0 > 10"),
    ("    if", "    extra0 = sum(slow_steps)\n    if"),
    variant=True,
)
bank.hint("not-whole", "The number of steps must be a whole number, an int.")
bank.slip("not-whole", ("math.ceil(extra / (eager - compiled))", "extra / (eager - compiled)"))
bank.slip("not-whole", ("return max(1,", "return float(max(1,"), ("compiled)))", "compiled))))"), variant=True)
bank.hint("rounded-down", "After {n} steps the compiled job is still behind. Round up.", edge=True)
bank.slip("rounded-down", ("math.ceil(", "int("))
bank.slip("rounded-down", ("math.ceil(extra / (eager - compiled))", "int(extra // (eager - compiled))"), variant=True)
bank.hint("rounded-to-nearest", "After {n} steps the compiled job is still behind. round() goes to the nearest number; "
          "the first step at which the compiled job has caught up is above it.", edge=True)  # fmt: skip
bank.slip(
    "rounded-to-nearest",
    ("math.ceil(extra / (eager - compiled))", "math.floor(extra / (eager - compiled) + 0.5)"),
    variant=True,
)
bank.hint("one-too-many", "One step earlier, compiling has already paid: it has paid as soon as both jobs take equally "
          "long.", edge=True)  # fmt: skip
bank.slip("one-too-many", ("math.ceil(extra / (eager - compiled))", "int(extra / (eager - compiled)) + 1"))
bank.hint("step-forgotten", "A slow step also did the work of a step. Its extra cost is its seconds *minus* a compiled "
          "step, not all of its seconds.")  # fmt: skip
bank.slip("step-forgotten", ("seconds - compiled for", "seconds for"))
bank.hint("eager-step-taken", "Either you subtracted an eager step for each slow one, although a slow step did the "
          "work of a *compiled* step. Or this is the number of steps left *after* the slow steps, and you must add the "
          "number of slow steps.")  # fmt: skip
bank.slip("eager-step-taken", ("seconds - compiled for", "seconds - eager for"), variant=True)
bank.hint("first-only", "Count every step that compiled, not only the first one.")
bank.slip(
    "first-only",
    ("sum(seconds - compiled for seconds in slow_steps)", "(slow_steps or [compiled])[0] - compiled"),
    variant=True,
)
bank.hint("only-the-compiling", "You divide the slow steps by the eager steps' time. What pays them back is the gain "
          "of a step: eager minus compiled.")  # fmt: skip
bank.slip(
    "only-the-compiling", ("math.ceil(extra / (eager - compiled))", "math.ceil(sum(slow_steps) / eager)"), variant=True
)
bank.hint("below-one", "The number of steps is at least one, and at least the number of slow steps.", edge=True)
bank.slip(
    "below-one",
    ("max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))", "math.ceil(extra / (eager - compiled))"),
)
bank.slip("below-one", ("max(1, len(slow_steps), ", "max(1, "), variant=True)
bank.hint("wrong-count", "The number of steps is wrong. Compare n × eager with what the compiled job takes for n steps.")  # fmt: skip
bank.slip("wrong-count", ("(eager - compiled)))", "(eager - compiled)) + 13)"))
bank.slip(
    "wrong-count", ("return max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))", "return 80"), variant=True
)
bank.hint("list-changed", "The list that was passed in has changed after the call.", edge=True)
bank.slip("list-changed", ("return max(", "slow_steps.sort(); slow_steps.append(0.0)\n    return max("))
bank.slip("list-changed", ("return max(", "slow_steps[:0] = [eager]\n    return max("), variant=True)


@bank.right()
def break_even(eager, compiled, slow_steps):
    if eager <= compiled:
        return None
    n = max(len(slow_steps), 1)
    while sum(slow_steps) + (n - len(slow_steps)) * compiled > n * eager:
        n += 1
        if n > 5000:
            return max(n, math.ceil((sum(slow_steps) - len(slow_steps) * compiled) / (eager - compiled)))
    return n


@bank.right()
def break_even(eager, compiled, slow_steps):  # noqa: F811
    gain = eager - compiled
    if gain <= 0:
        return None
    lost = sum(slow_steps) - len(slow_steps) * compiled
    at_least = max(1, len(slow_steps))
    return max(at_least, -int(-lost // gain))


@bank.right()
def break_even(eager, compiled, slow_steps):  # noqa: F811
    import numpy as np

    if not compiled < eager:
        return None
    slow = np.asarray(slow_steps, dtype=float)
    return int(max(1, slow.size, np.ceil((slow - compiled).sum() / (eager - compiled))))


@bank.right()
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
bank.hint("slow-steps-added", "You added the slow steps a second time: they are the first ones of the n steps.")
bank.slip("slow-steps-added", (COUNT, "len(slow_steps) + math.ceil(extra / (eager - compiled))"), variant=True)
bank.slip(
    "step-forgotten", ("sum(seconds - compiled for seconds in slow_steps)", "sum(slow_steps) - compiled"), variant=True
)
bank.slip(
    "one-too-many", ("math.ceil(extra / (eager - compiled))", "int(extra / (eager - compiled)) + 1"), variant=True
)
