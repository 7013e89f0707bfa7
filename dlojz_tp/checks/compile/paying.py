"""Balise 5: the break-even, against totals that are counted step by step."""

import math
from fractions import Fraction
from numbers import Integral

from dlojz_tp.checking import Wrong

HINTS = {
    "not-none": "When a compiled step is not faster, compiling never pays: return None, not {got}.",
    "never-at-all": "Compiling pays here: each step saves {gain} s. None means never.",
    "slower-divides": "The steps take equally long, so you divide by zero. Compiling never pays then: return None.",
    "not-whole": "The number of steps must be a whole number, an int.",
    "rounded-down": "After {n} steps the compiled job is still behind. Round up.",
    "rounded-to-nearest": "After {n} steps the compiled job is still behind. round() goes to the nearest number; "
                          "the first step at which the compiled job has caught up is above it.",
    "one-too-many": "One step earlier, compiling has already paid: it has paid as soon as both jobs take equally long.",
    "step-forgotten": "A slow step also did the work of a step. Its extra cost is its seconds *minus* a compiled "
                      "step, not all of its seconds.",
    "eager-step-taken": "Either you subtracted an eager step for each slow one, although a slow step did the work "
                        "of a *compiled* step. Or this is the number of steps left *after* the slow steps, and you "
                        "must add the number of slow steps.",
    "first-only": "Count every step that compiled, not only the first one.",
    "only-the-compiling": "You divide the slow steps by the eager steps' time. What pays them back is the gain of "
                          "a step: eager minus compiled.",
    "slow-steps-added": "You added the slow steps a second time: they are the first ones of the n steps.",
    "below-one": "The number of steps is at least one, and at least the number of slow steps.",
    "wrong-count": "The number of steps is wrong. Compare n × eager with what the compiled job takes for n steps.",
    "list-changed": "The list that was passed in has changed after the call.",
}


def balise_5(break_even):
    """Times in parts of a second that binary numbers hold, so that equal totals really are equal; then ordinary ones."""
    yield "three steps that compile, and totals that are never equal"
    _judge(break_even, 0.5, 0.375, [12.0, 3.0, 3.3125])
    yield ("a first step of 21 s that compiles, then 1.75 s a step against 2 s: compiling has paid when the totals "
           "are exactly equal")
    _judge(break_even, 2.0, 1.75, [21.0])
    yield "totals that are never equal"
    _judge(break_even, 2.0, 1.75, [21.1875])
    _judge(break_even, 2.0, 1.75, [21.0625])
    yield "several recompilations"
    _judge(break_even, 0.5, 0.375, [12.0, 3.0, 3.25])
    _judge(break_even, 0.0371, 0.0302, [41.3, 8.9])
    yield "a start that finds everything in the cache"
    _judge(break_even, 0.5, 0.25, [0.75])
    _judge(break_even, 0.5, 0.25, [0.25])
    _judge(break_even, 0.5, 0.25, [])
    _judge(break_even, 0.5, 0.25, [0.25, 0.25, 0.375])
    yield "never, when the compiled step is not faster"
    _judge(break_even, 0.25, 0.5, [20.0])
    _judge(break_even, 0.25, 0.25, [20.0])
    yield "milliseconds, minutes, days"
    _judge(break_even, 1.1e-3, 1.0e-3, [95.00005])
    _judge(break_even, 0.9, 0.3, [1800.1, 600.0])


def _truth(eager, compiled, slow):
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


def _judge(break_even, eager, compiled, slow):
    truth, given = _truth(eager, compiled, slow), list(slow)
    where = f"eager {eager:g} s, compiled {compiled:g} s, slow steps {', '.join(f'{s:g}' for s in slow) or 'none'}"
    try:
        got = break_even(eager, compiled, given)
    except ZeroDivisionError:
        if eager == compiled:
            raise Wrong("slower-divides", expected="None", where=where) from None
        raise
    if given != slow:
        raise Wrong("list-changed", expected=str(slow), got=str(given))
    if truth is None:
        if got is None:
            return
        raise Wrong("not-none", expected="None", got=f"{got}", where=where)
    if got is None:
        raise Wrong("never-at-all", expected=truth, got="None", where=where, gain=f"{eager - compiled:g}")
    if isinstance(got, bool) or not isinstance(got, int | float | Integral):
        raise Wrong("not-whole", expected=truth, got=got, where=where)
    near = abs(float(got) - truth) <= 1e-9 * truth + (0 if _binary(eager, compiled, slow) else 1e-6 * truth)
    if near and isinstance(got, Integral):
        return
    if float(got) != int(got) or (near and not isinstance(got, Integral)):
        raise Wrong("not-whole", expected=truth, got=got, where=where)
    raise Wrong(_why(eager, compiled, slow, truth, int(got)), expected=truth, got=got, where=where, n=int(got))


def _binary(*values):
    """Whether all times are whole 64ths: then floats compute exactly."""
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return all(64 * v == int(64 * v) for v in flat)


def _why(eager, compiled, slow, truth, got):
    gain = eager - compiled
    extra = sum(s - compiled for s in slow)
    floor = max(1, len(slow))
    if got < floor:
        return "below-one"
    sums = {
        "step-forgotten": sum(slow) / gain,
        "step-forgotten ": (sum(slow) - compiled) / gain if len(slow) > 1 else math.nan,
        "slow-steps-added": math.ceil(extra / gain) + len(slow) if len(slow) > 1 else math.nan,
        "eager-step-taken": (sum(slow) - len(slow) * eager) / gain,
        "first-only": (slow[0] - compiled) / gain if len(slow) > 1 else math.nan,
        "only-the-compiling": sum(slow) / eager,
    }
    exact = extra / gain
    if got == math.floor(exact) and got < truth:
        return "rounded-down" if math.floor(exact + 0.5) != got else "rounded-to-nearest"
    for slug, value in sums.items():
        if not math.isnan(value) and got in (max(floor, math.ceil(value)), max(floor, math.floor(value))):
            return slug.strip()
    return "one-too-many" if got == truth + 1 else "wrong-count"
