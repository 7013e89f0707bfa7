"""Answers to balise 2 of 16_pipeline_schedules: 1F1B, and enough micro-batches."""

from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from tests.answers.bank import Bank
from tests.answers.pipeline_schedules.step import SCALE

bank = Bank("16_pipeline_schedules", 2)

# Wrong answers to balise 2.
LOOP = "        if batch_size % m == 0 and (n_stages - 1) / (m + n_stages - 1) <= bubble:\n"

bank.hint(
    "does-not-divide",
    "{batch} samples cannot be split into {m} micro-batches of equal size: take a divisor.",
    edge=True,
)
bank.slip("does-not-divide", ("batch_size % m == 0 and ", ""), variant=True)

bank.hint(
    "bubble-of-work",
    "You take the bubble as a share of the *work*, (p−1)/m. As a share of the step it is (p−1)/(m+p−1).",
)
bank.slip(
    "bubble-of-work", ("(n_stages - 1) / (m + n_stages - 1) <= bubble", "(n_stages - 1) / m <= bubble"), variant=True
)

bank.hint("size-returned", "That is the size of a micro-batch, in samples. Return the number of micro-batches.")
bank.slip("size-returned", ("            return m\n", "            return batch_size // m\n"), variant=True)

bank.hint(
    "more-than-needed",
    "{fewer} micro-batches are enough. Small micro-batches do not fill a device: take the smallest number.",
)
bank.slip("more-than-needed", ("(n_stages - 1) / (m + n_stages - 1)", "n_stages / (m + n_stages - 1)"))

bank.hint(
    "bubble-of-zero",
    "A bubble of 0 is a bound like any other: a pipeline of one stage meets it, a longer one cannot. {error}",
    edge=True,
)
bank.slip(
    "bubble-of-zero",
    ("range(1, batch_size + 1)", "range(max(1, int((n_stages - 1) * (1 - bubble) / bubble)), batch_size + 1)"),
    variant=True,
)

bank.slip("more-than-needed", ("(n_stages - 1) / (m + n_stages - 1)", "n_stages / (m + n_stages)"))

bank.slip("more-than-needed", ("range(1, batch_size + 1)", "range(batch_size, 0, -1)"))

bank.hint("equal-refused", "A bubble of exactly the bound is allowed: the bound means *at most*.", edge=True)
bank.slip("equal-refused", ("<= bubble", "< bubble and n_stages > 1 or n_stages == 1"))

bank.slip("equal-refused", ("<= bubble", "< bubble"), variant=True)

bank.hint("nothing-raised", "No number of micro-batches meets this bound: raise a ValueError.", edge=True)
bank.slip("nothing-raised", ("    raise ValueError(", "    return batch_size\n    raise ValueError("), variant=True)

bank.hint(
    "bubble-too-large",
    "With {m} micro-batches on {p} stages the bubble is {share:.1%} of the step, more than {bound:.1%}. A rank works "
    "for m pairs of forward and backward, and is idle for p − 1 of them.",
)
bank.slip("bubble-too-large", (LOOP, "        if batch_size % m == 0 and m >= n_stages:\n"))

bank.slip("bubble-too-large", ("/ (m + n_stages - 1) <=", "* 100 // (m + n_stages - 1) / 100 <="), variant=True)

bank.hint("found-nothing", "You raised a ValueError, but {m} micro-batches meet the bound.", edge=True)
bank.slip("found-nothing", ("range(1, batch_size + 1)", "range(1, 4 * n_stages)"))

bank.slip("found-nothing", ("range(1, batch_size + 1)", "range(1, batch_size)"), variant=True)

bank.hint("not-a-number", "Return the number of micro-batches, an int.")
bank.slip("not-a-number", ("            return m\n", "            return [m]\n"), variant=True)

bank.hint(
    "gpipe-memory",
    "Rank {rank} of {size} kept {found} micro-batches at once, as in GPipe. In 1F1B, stage s keeps at most p − s.",
)
bank.slip("gpipe-memory", ("Schedule1F1B(", "ScheduleGPipe("), variant=True)

bank.hint("other-number", "A stage did {found} forwards in a step, but {wanted} micro-batches were asked for.")
bank.slip("other-number", ("Schedule1F1B(stage, n_micro_batches,", "Schedule1F1B(stage, 4,"))

bank.slip("other-number", ("Schedule1F1B(stage, n_micro_batches,", "Schedule1F1B(stage, 8,"), variant=True)

bank.hint(
    "mean-not-scaled",
    "The gradients of a mean loss are n_micro_batches times too large: 1F1B must scale them, as GPipe does.",
)
bank.slip("mean-not-scaled", (SCALE, "scale_grads=False"), variant=True)

bank.hint("sum-divided", "The gradients of a loss that is a sum are divided by the number of micro-batches.", edge=True)
bank.slip("sum-divided", (", " + SCALE, ""), variant=True)

bank.hint("not-the-gradients", "The gradients are not those of a single process on the whole batch.")
bank.slip(
    "not-the-gradients", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"), variant=True
)

bank.hint("no-schedule", "make_1f1b returns a schedule with a method `step`.")
bank.slip(
    "no-schedule", ("return Schedule1F1B(stage, n_micro_batches, loss_fn, " + SCALE + ")", "return stage"), variant=True
)


# Right answers to balise 2.
def choose_by_formula(n_stages, bubble, batch_size):
    divisors = sorted(d for d in range(1, batch_size + 1) if not batch_size % d)
    fitting = [m for m in divisors if (n_stages - 1) * (1 - bubble) <= bubble * m + 1e-12]
    if not fitting:
        raise ValueError("no number of micro-batches is enough")
    return min(fitting)


def choose_by_simulation(n_stages, bubble, batch_size):
    from dlojz_tp import planner

    if n_stages == 1:
        return 1
    for m in range(1, batch_size + 1):
        if batch_size % m == 0 and 1 - m / (m + n_stages - 1) <= bubble + 1e-12:
            return m
    raise ValueError(f"nothing below {planner.__name__}")


def f1b_keywords(stage, n_micro_batches, loss_fn, reduction="mean"):
    return Schedule1F1B(stage, n_microbatches=n_micro_batches, loss_fn=loss_fn, scale_grads=(reduction != "sum"))


def f1b_own_scale(stage, n_micro_batches, loss_fn, reduction="mean"):
    factor = 1 / n_micro_batches if reduction == "mean" else 1.0

    def scaled(output, target):
        return loss_fn(output, target) * factor

    return Schedule1F1B(stage, n_micro_batches, scaled, scale_grads=False)


def f1b_interleaved_of_one(stage, n_micro_batches, loss_fn, reduction="mean"):
    """Interleaved with one chunk keeps more than 1F1B on the first ranks."""
    return ScheduleInterleaved1F1B([stage], n_micro_batches, loss_fn, scale_grads=reduction == "mean")


bank.several(None, choose_by_formula, f1b_keywords)

bank.several(None, choose_by_simulation, f1b_own_scale)

bank.hint(
    "too-many-in-flight",
    "Rank {rank} of {size} kept {found} micro-batches at once. In 1F1B, stage s keeps at most p − s: {most}.",
)
bank.several("too-many-in-flight", choose_by_formula, f1b_interleaved_of_one, variant=True)

bank.text(
    "more-than-needed",
    '''
def choose_micro_batches(n_stages, bubble, batch_size):
    """The smallest divisor of `batch_size` that keeps the bubble's share at or under `bubble`; ValueError if none."""
    import math
    if bubble > 0 or n_stages == 1:
        least = max(1, math.ceil((n_stages - 1) * (1 - bubble) / bubble)) if n_stages > 1 else 1
        for m in range(least, batch_size + 1):
            if batch_size % m == 0:
                return m
    raise ValueError(f"{batch_size} samples on {n_stages} stages always have a bubble above {bubble:.0%}")


def make_1f1b(stage, n_micro_batches, loss_fn, reduction="mean"):
    """The 1F1B schedule; arguments as of make_gpipe."""
    return Schedule1F1B(stage, n_micro_batches, loss_fn, scale_grads=reduction == 'mean')
''',
    variant=True,
)
