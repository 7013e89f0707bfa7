"""Balise 2: how many micro-batches, and 1F1B."""

from numbers import Real

import torch

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.pipeline_schedules import running

HINTS = {
    "does-not-divide": "{batch} samples cannot be split into {m} micro-batches of equal size: take a divisor.",
    "bubble-too-large": "With {m} micro-batches on {p} stages the bubble is {share:.1%} of the step, more than {bound:.1%}. A rank "
    "works for m pairs of forward and backward, and is idle for p − 1 of them.",
    "bubble-of-work": "You take the bubble as a share of the *work*, (p−1)/m. As a share of the step it is "
                      "(p−1)/(m+p−1).",
    "size-returned": "That is the size of a micro-batch, in samples. Return the number of micro-batches.",
    "bubble-of-zero": "A bubble of 0 is a bound like any other: a pipeline of one stage meets it, a longer one "
                      "cannot. {error}",
    "more-than-needed": "{fewer} micro-batches are enough. Small micro-batches do not fill a device: take the "
                        "smallest number.",
    "equal-refused": "A bubble of exactly the bound is allowed: the bound means *at most*.",
    "nothing-raised": "No number of micro-batches meets this bound: raise a ValueError.",
    "found-nothing": "You raised a ValueError, but {m} micro-batches meet the bound.",
    "not-a-number": "Return the number of micro-batches, an int.",
    "gpipe-memory": "Rank {rank} of {size} kept {found} micro-batches at once, as in GPipe. In 1F1B, stage s keeps "
                    "at most p − s.",
    "too-many-in-flight": "Rank {rank} of {size} kept {found} micro-batches at once. In 1F1B, stage s keeps at "
                          "most p − s: {most}.",
    "other-number": "A stage did {found} forwards in a step, but {wanted} micro-batches were asked for.",
    "mean-not-scaled": "The gradients of a mean loss are n_micro_batches times too large: 1F1B must scale them, as "
                       "GPipe does.",
    "sum-divided": "The gradients of a loss that is a sum are divided by the number of micro-batches.",
    "not-the-gradients": "The gradients are not those of a single process on the whole batch.",
    "no-schedule": "make_1f1b returns a schedule with a method `step`.",
}  # fmt: skip

CASES = (  # stages, bubble, batch
    (4, 0.34, 96), (2, 0.15, 60), (8, 0.32, 120), (4, 0.5, 12), (1, 0.0, 7), (5, 0.25, 48), (3, 0.9, 10), (16, 0.21, 1000),
    (2, 0.11, 9),  # only the batch itself will do
    (4, 0.11, 96),  # where 24 miss it by a thousandth
    (4, 0.6, 8),  # where a quotient of floats lies above the whole number
)  # fmt: skip
IMPOSSIBLE = ((4, 0.1, 12), (2, 0.0, 64), (8, 0.3, 11))
MICRO_BATCHES = 6  # not the practical work's own


def balise_2(choose_micro_batches, make_1f1b):
    """The number for given bounds; 1F1B in worlds of 1, 2 and 4."""
    yield "the smallest number of equal micro-batches that keeps the bubble within a bound"
    for p, bound, batch in CASES:
        _right_number(choose_micro_batches, p, bound, batch)
    yield "a ValueError where no number meets the bound"
    for p, bound, batch in IMPOSSIBLE:
        try:
            found = choose_micro_batches(p, bound, batch)
        except ValueError:
            continue
        except ZeroDivisionError as error:
            raise Wrong("bubble-of-zero", error=error, got=repr(error), where=f"{p} stages, {bound:.0%}") from error
        raise Wrong(
            "nothing-raised", expected="ValueError", got=found, where=f"{p} stages, {bound:.0%}, {batch} samples"
        )
    worlds = running.on_ranks(_observed, make_1f1b, sizes=(2, 4, 1))
    yield "1F1B: the gradients of a single process, for a mean and for a sum"
    for size, ranks in worlds.items():
        _right_ranks(size, ranks)
    yield "stage s keeps at most p − s micro-batches"
    for size, ranks in worlds.items():
        _right_memory(size, ranks)


def _share(p, m):
    return (p - 1) / (m + p - 1)


def _right_number(choose_micro_batches, p, bound, batch):
    where = f"{p} stages, a bubble of at most {bound:.0%}, {batch} samples"
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    wanted = next(m for m in divisors if _share(p, m) <= bound)
    try:
        m = choose_micro_batches(p, bound, batch)
    except ValueError as error:
        raise Wrong("found-nothing", expected=wanted, got=f"ValueError: {error}", where=where, m=wanted) from error
    except ZeroDivisionError as error:
        raise Wrong("bubble-of-zero", expected=wanted, got=repr(error), where=where, error=error) from error
    if m is None:
        raise Wrong("nothing-returned")
    if isinstance(m, bool) or not isinstance(m, Real) or m != int(m) or m < 1:
        raise Wrong("not-a-number", expected=wanted, got=m, where=where)
    more = {"expected": wanted, "got": m, "where": where}
    if m == wanted:
        return
    if batch % m:
        raise Wrong("does-not-divide", m=m, batch=batch, **more)
    if _share(p, m) > bound:
        raise Wrong("bubble-too-large", m=m, p=p, share=_share(p, m), bound=bound, **more)
    for slug, rule in _MISTAKES.items():  # in one case, two mistakes may give one number
        if all(_is(choose_micro_batches, *case, rule(*case)) for case in CASES if case[0] > 1):
            raise Wrong(slug, **more)
    raise Wrong("more-than-needed", fewer=wanted, **more)


def _first(batch, fits):
    """The first divisor of the batch that fits; None where none does."""
    return next((n for n in range(1, batch + 1) if batch % n == 0 and fits(n)), None)


_MISTAKES = {  # what they give for stages, bubble, batch
    "bubble-of-work": lambda p, bound, batch: _first(batch, lambda n: (p - 1) / n <= bound),
    "equal-refused": lambda p, bound, batch: _first(batch, lambda n: _share(p, n) < bound),
    "size-returned": lambda p, bound, batch: batch // _first(batch, lambda n: _share(p, n) <= bound),
}


def _is(choose_micro_batches, p, bound, batch, value):
    try:
        return choose_micro_batches(p, bound, batch) == value
    except ValueError:
        return value is None


def _observed(make_1f1b):
    from torch import distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    def make(layers, n_micro_batches, loss_fn, reduction):
        rank, n = dist.get_rank(), dist.get_world_size()
        share = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]
        stage = PipelineStage(nn.Sequential(*share), rank, n, torch.device("cpu"))
        schedule = make_1f1b(stage, n_micro_batches, loss_fn, reduction)
        if not hasattr(schedule, "step"):
            raise Wrong("nothing-returned" if schedule is None else "no-schedule", got=type(schedule).__name__)
        return [stage], schedule

    return running.observe(make, running.own_step, MICRO_BATCHES)


def _right_ranks(size, ranks):
    m = MICRO_BATCHES
    for rank, found in enumerate(ranks):
        for reduction, held, _, seen in found:
            first = held[0][1][0]
            forwards = sum(kind == "F" and number == first for kind, number, _ in seen[-1][2])
            where = f"rank {rank} of {size}, loss a {reduction}"
            if len(seen) > 1 and forwards != m:  # a first step also runs a forward to find out the shapes
                raise Wrong("other-number", expected=m, got=forwards, where=where, found=forwards, wanted=m)
            mistakes = {"sum-divided": lambda g, _: g / m}
            if reduction == "mean":
                mistakes = {"mean-not-scaled": lambda g, _: m * g}
            running.right_gradients(seen[-1][1], len(seen) - 1, reduction, mistakes, "not-the-gradients", where)


def _right_memory(size, ranks):
    for rank, found in enumerate(ranks):
        for _, held, _, seen in found[:1]:
            peak, most = running.kept(seen[-1][2], [held[0][1][0]]), min(size - rank, MICRO_BATCHES)
            if peak > most:
                slug = "gpipe-memory" if peak == MICRO_BATCHES else "too-many-in-flight"
                raise Wrong(slug, expected=f"at most {most}", got=peak, rank=rank, size=size, found=peak, most=most)
