"""Balise 3: the naive step."""

from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import looked, loss_function, right_step, run_step, stages
from dlojz_tp.judging.checks.pipeline_under_the_hood.steps import CROSSING, case, forwards, in_any_order


def observe(naive_step, cases):
    """On a rank: two steps of each batch."""
    return [run_step(naive_step, lambda *given: naive_step(*given, loss_function), rows, calls=2) for rows in cases]


def _per_step(n, _):
    return {"n": n / 2}


TWICE = [
    Look("", lambda got: len(forwards(got)), 2, "not-in-one-piece", fields=_per_step),
    *CROSSING,
]


def balise_3(naive_step):
    """Gradients, loss and messages of one batch on 1 to 4 stages; then once more."""
    whole = "a batch of 12 through 1, 2, 3 and 4 stages: loss and every gradient"
    yield whole
    found = in_any_order(observe, naive_step, (12, 1))
    yield from right_step(whole, case(found, 0), 12)
    again = "a second step adds its gradients; one forward per step, only what crosses a cut is sent"
    yield from looked(again, TWICE, stages(case(found, 0), 12))
    yield from right_step("a batch of one row", case(found, 1), 1)
