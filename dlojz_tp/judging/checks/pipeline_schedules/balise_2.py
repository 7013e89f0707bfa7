"""Balise 2: how many micro-batches, and 1F1B."""

from numbers import Real

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.pipeline_schedules import running
from dlojz_tp.judging.checks.pipeline_schedules.orders import fault_look, kept_look
from dlojz_tp.judging.checks.pipeline_schedules.running import gradient_look
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised

PLAIN = (4, 0.34, 96), (2, 0.15, 60), (8, 0.32, 120)
CASES = (  # stages, bubble, batch
    *PLAIN, (4, 0.5, 12), (1, 0.0, 7), (5, 0.25, 48), (3, 0.9, 10), (16, 0.21, 1000),
    (2, 0.11, 9),  # only the batch itself will do
    (4, 0.11, 96),  # where 24 miss it by a thousandth
    (4, 0.6, 8),  # where a quotient of floats lies above the whole number
)  # fmt: skip
IMPOSSIBLE = ((4, 0.1, 12), (2, 0.0, 64), (8, 0.3, 11))
MICRO_BATCHES = 6  # not the practical work's own


def observe(choose_micro_batches):
    """For each case the number, or the error that was raised."""
    for case in CASES + IMPOSSIBLE:
        try:
            yield {case: choose_micro_batches(*case)}
        except (ValueError, ZeroDivisionError) as error:
            yield {case: error}


def _share(p, m):
    return (p - 1) / (m + p - 1)


def _first(batch, fits):
    """The first divisor of the batch that fits; None where none does."""
    return next((n for n in range(1, batch + 1) if batch % n == 0 and fits(n)), None)


MISTAKES = {  # what they give for stages, bubble, batch
    "bubble-of-work": lambda p, bound, batch: _first(batch, lambda n: (p - 1) / n <= bound),
    "equal-refused": lambda p, bound, batch: _first(batch, lambda n: _share(p, n) < bound),
    "size-returned": lambda p, bound, batch: batch // _first(batch, lambda n: _share(p, n) <= bound),
}


def _number_looks(p, bound, batch):
    """At one case: a number, that divides the batch, and is the smallest. Each passes over what is named before."""
    case, due = (p, bound, batch), _first(batch, lambda n: _share(p, n) <= bound)
    least = next(n for n in range(1, batch + 1) if _share(p, n) <= bound)  # of those that need not divide

    def fields(m, _):
        where = f"{p} stages, a bubble of at most {bound:.0%}, {batch} samples"
        said = {"p": p, "bound": bound, "batch": batch, "expected": due, "where": where}
        if isinstance(m, Exception):
            return said | {"m": due, "error": m, "got": repr(m)}
        return (
            said
            | {"m": m, "got": m}
            | ({"share": _share(p, m), "fewer": least if batch % m else due} if _is_number(m) else {})
        )

    def without(m, _):
        if isinstance(m, ValueError) and case in PLAIN:  # that is not at the edge
            raise Wrong("found-nothing", **fields(m, due))
        errors = {ValueError: "found-nothing", ZeroDivisionError: "bubble-of-zero"}
        return next((slug for kind, slug in errors.items() if isinstance(m, kind)), "not-a-number")

    def mistake(seen):
        m = seen[case]
        if isinstance(m, Exception) or m == due or (batch % m != 0 and m == least):
            return None
        if _share(p, m) > bound:
            return "bubble-too-large", fields(m, due)
        for slug, gives in MISTAKES.items():  # in one case, two mistakes may give one number
            if all(_is(seen[of], gives(*of)) for of in CASES if of[0] > 1):
                return slug, fields(m, due)
        return "more-than-needed", fields(m, due)

    claim = "the smallest number of equal micro-batches that keeps the bubble within a bound"
    return [
        Look(claim, case, due, without, holds=lambda m, _: _is_number(m), fields=fields),
        Look("", case, due, "does-not-divide", holds=lambda m, _: isinstance(m, Exception) or batch % m == 0,
             fields=fields),
        recognised("", mistake),
    ]  # fmt: skip


def _is_number(m):
    return isinstance(m, Real) and not isinstance(m, bool) and m == int(m) and m >= 1


def _is(m, gives):
    return gives is None if isinstance(m, ValueError) else m == gives


def _refusal_look(p, bound, batch):
    """A look at a case that no number meets."""

    def unrefused(seen):
        m, where = seen[p, bound, batch], f"{p} stages, {bound:.0%}, {batch} samples"
        slug = "bubble-of-zero" if isinstance(m, ZeroDivisionError) else "nothing-raised"
        about = {"error": m, "expected": "ValueError", "got": repr(m), "where": where}
        return None if isinstance(m, ValueError) else (slug, about)

    return recognised("a ValueError where no number meets the bound", unrefused)


NUMBERS = [look for case in CASES for look in _number_looks(*case)] + [_refusal_look(*case) for case in IMPOSSIBLE]


def run(make_1f1b):
    """On a rank: two steps and one of 1F1B, the layers cut as in balise 1."""

    def make(layers, n_micro_batches, loss_fn, reduction):
        rank, n = dist.get_rank(), dist.get_world_size()
        share = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]
        stage = PipelineStage(nn.Sequential(*share), rank, n, torch.device("cpu"))
        schedule = make_1f1b(stage, n_micro_batches, loss_fn, reduction)
        fault = ("nothing-returned" if schedule is None else "no-schedule"), {"got": type(schedule).__name__}
        return None if hasattr(schedule, "step") else fault, [stage], schedule

    return running.observe(make, running.own_step, MICRO_BATCHES)


def _count(got, due):
    return {"found": len(got), "wanted": due, "got": len(got)}


def _most(size):
    return [min(size - rank, MICRO_BATCHES) for rank in range(size)]


RUN = [
    fault_look("1F1B: the gradients of a single process, for a mean and for a sum"),
    each_rank("", "mean 2: rows", MICRO_BATCHES, "other-number", holds=lambda got, due: len(got) == due, fields=_count),
    gradient_look("", "mean 2", "not-the-gradients", ("mean-not-scaled", lambda g, _: MICRO_BATCHES * g)),
    gradient_look("", "sum 1", "not-the-gradients", ("sum-divided", lambda g, _: g / MICRO_BATCHES)),
    kept_look("stage s keeps at most p − s micro-batches", "mean 2: kept", _most,
              lambda kept: "gpipe-memory" if kept == MICRO_BATCHES else "too-many-in-flight"),
]  # fmt: skip


def balise_2(choose_micro_batches, make_1f1b):
    yield from judged(NUMBERS, observe, choose_micro_batches)
    yield from running.judged_on_ranks(RUN, run, make_1f1b, sizes=(2, 4, 1))
