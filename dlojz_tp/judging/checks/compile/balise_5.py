"""Balise 5: the break-even, against totals that are counted step by step."""

import functools
import math
import operator
from fractions import Fraction
from numbers import Integral, Real

from dlojz_tp.judging.checking.looks import Look, judged

# (eager, compiled, slow steps): parts of a second that binary numbers hold, so that equal totals really are equal;
# then ordinary ones
CASES = {
    "three steps that compile, and totals that are never equal": [(0.5, 0.375, [12.0, 3.0, 3.3125])],
    "a first step of 21 s that compiles, then 1.75 s a step against 2 s: compiling has paid when the totals are exactly "
    "equal": [(2.0, 1.75, [21.0])],
    "totals that are never equal": [(2.0, 1.75, [21.1875]), (2.0, 1.75, [21.0625])],
    "several recompilations": [(0.5, 0.375, [12.0, 3.0, 3.25]), (0.0371, 0.0302, [41.3, 8.9])],
    "a start that finds everything in the cache": [(0.5, 0.25, s) for s in ([0.75], [0.25], [], [0.25, 0.25, 0.375])],
    "never, when the compiled step is not faster": [(0.25, 0.5, [20.0]), (0.25, 0.25, [20.0])],
    "milliseconds, minutes, days": [(1.1e-3, 1.0e-3, [95.00005]), (0.9, 0.3, [1800.1, 600.0])],
}


def truth(eager, compiled, slow):
    """The smallest n from which totals are no longer behind; exact arithmetic, then looked for around the place."""
    e, c, extra = Fraction(eager), Fraction(compiled), [Fraction(s) for s in slow]
    if c >= e:
        return None
    n = max(1, len(extra))
    behind = sum(extra) + (n - len(extra)) * c - n * e
    while behind > 0:
        jump = max(1, int(behind / (e - c)))
        n, behind = n + jump, behind - jump * (e - c)
    return n


def told(eager, compiled, slow):
    return f"eager {eager:g} s, compiled {compiled:g} s, slow steps {', '.join(f'{s:g}' for s in slow) or 'none'}"


def observe(break_even):
    """Of each case what came back, a number or words, and the list afterwards."""
    for eager, compiled, slow in (case for cases in CASES.values() for case in cases):
        where, given = told(eager, compiled, slow), list(slow)
        try:
            got = break_even(eager, compiled, given)
        except ZeroDivisionError as error:
            if eager != compiled:
                raise
            got = error
        yield {where: got if isinstance(got, Real) else repr(got), f"{where}: list": given}


def near(case, seen, due):
    exact = all(64 * seconds == int(64 * seconds) for seconds in (*case[:2], *case[2]))  # as floats compute then
    return abs(float(seen) - due) <= (1e-9 if exact else 1e-6) * due


def right(case, seen, due):
    if isinstance(seen, str) or due == "None":
        return seen == due
    return isinstance(seen, Integral) and not isinstance(seen, bool) and near(case, seen, due)


def why(case, seen, due):
    """What was done wrong, by what came back."""
    if due == "None":
        return "slower-divides" if str(seen).startswith("ZeroDivisionError") else "not-none"
    if isinstance(seen, str | bool) or not float(seen).is_integer() or near(case, seen, due):
        return "never-at-all" if seen == "None" else "not-whole"
    (eager, compiled, slow), floor = case, max(1, len(case[2]))
    gain, several = eager - compiled, len(slow) > 1
    exact = sum(s - compiled for s in slow) / gain
    if seen < floor:
        return "below-one" if due == floor else "wrong-count"
    if seen == math.floor(exact) and seen < due:
        return "rounded-to-nearest" if math.floor(exact + 0.5) == seen else "rounded-down"
    known = {
        "step-forgotten": [sum(slow) / gain] + [(sum(slow) - compiled) / gain] * several,
        "slow-steps-added": [math.ceil(exact) + len(slow)] * several,
        "eager-step-taken": [(sum(slow) - len(slow) * eager) / gain],
        "first-only": [(sum(slow[:1]) - compiled) / gain] * several,
        "only-the-compiling": [sum(slow) / eager],
    }
    for slug, counts in known.items():
        if any(seen in (max(floor, math.ceil(count)), max(floor, math.floor(count))) for count in counts):
            return slug
    return "one-too-many" if seen == due + 1 else "wrong-count"


def looks(claim, case):
    where, due = told(*case), truth(*case) or "None"

    def fields(seen, due):
        n = seen if isinstance(seen, str) else f"{seen:.0f}"
        return {"where": where, "gain": f"{case[0] - case[1]:g}", "n": n, "got": f"{seen}"}

    return [
        Look(claim, f"{where}: list", case[2], "list-changed", holds=operator.eq),
        Look(claim, where, due, functools.partial(why, case), holds=functools.partial(right, case), fields=fields),
    ]


LOOKS = [look for claim, cases in CASES.items() for case in cases for look in looks(claim, case)]


def balise_5(break_even):
    yield from judged(LOOKS, observe, break_even)
