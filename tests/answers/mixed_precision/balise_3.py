"""Answers to balise 3 of 02_mixed_precision: what float16 loses."""

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 3)


def count(gradients, s, lost=None, infinite=None, cast=None, below=None, weigh=None):
    """Fractions, with one thing done otherwise."""
    low = high = n = 0
    for g in gradients:
        if g is None:
            continue
        half = cast(g, s) if cast else (g * s).half()
        there = g != 0
        low += int((lost(g, s) & there).sum()) if lost else int(((half == 0) & there).sum())
        high += int((infinite(g, s) & there).sum()) if infinite else int(half.isinf().sum())
        n += g.numel() if below == "all" else int(there.sum())
    n = max(n, 1)
    return low / n, high / n


# ---------------------------------------------------------------- right


@bank.right()
def lost_in_float16(gradients, s):
    """One long vector."""
    values = [g.reshape(-1) for g in gradients if g is not None]
    if not values:
        return 0.0, 0.0
    values = torch.cat(values)
    values = values[values != 0]
    if not len(values):
        return 0.0, 0.0
    half = (values * s).to(torch.float16)
    return (half == 0).float().mean(dtype=torch.float64).item(), half.isinf().double().mean().item()


@bank.right()
def lost_in_float16(gradients, s):
    """By the borders: 2**-25 itself is lost, 65,520 and more are infinite."""
    return count(
        gradients, s,
        lost=lambda g, s: (g.double() * s).abs() <= 2.0**-25,
        infinite=lambda g, s: (g * s).abs() >= 65520,
    )  # fmt: skip


@bank.right()
def lost_in_float16(gradients, s):
    """With NumPy."""
    arrays = [g.numpy().ravel() for g in gradients if g is not None]
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.float32)
    values = values[values != 0]
    if values.size == 0:
        return 0.0, 0.0
    with np.errstate(over="ignore"):
        half = (values * np.float32(s)).astype(np.float16)
    return float((half == 0).mean()), float(np.isinf(half).mean())


@bank.right()
def lost_in_float16(gradients, s):
    """Tensors come back."""
    lost, infinite, there = torch.zeros(3, dtype=torch.float64)
    for g in gradients:
        if g is not None:
            half = g.mul(s).half()
            lost = lost + ((half == 0) & (g != 0)).sum()
            infinite = infinite + torch.isinf(half).sum()
            there = there + torch.count_nonzero(g)
    return [lost / there.clamp(min=1), infinite / there.clamp(min=1)]


# ---------------------------------------------------------------- wrong


@bank.wrong("nothing-returned")
def lost_in_float16(gradients, s):
    count(gradients, s)


bank.hint("not-two-fractions", "Return two numbers: the fraction lost to zero and the fraction that becomes infinite.")


@bank.wrong("not-two-fractions", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s)[0]


bank.hint("zeros-counted-lost", "A gradient that is exactly zero in float32 is not lost by float16. Leave zeros "
          "out of both the numerator and the denominator.", edge=True)  # fmt: skip


@bank.wrong("zeros-counted-lost")
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None])
    half = (values * s).half()
    return (half == 0).double().mean().item(), half.isinf().double().mean().item()


ALL = "there += not_zero.sum()", "there += gradient.numel()"
bank.slip("zeros-counted-lost", ALL, ("((half == 0) & not_zero)", "(half == 0)"), variant=True)

bank.hint("divided-by-all", "Divide by the number of nonzero values, not by the number of all values.", edge=True)


@bank.wrong("divided-by-all")
def lost_in_float16(gradients, s):
    return count(gradients, s, below="all")


bank.slip("divided-by-all", ALL, variant=True)


bank.hint("normals-only", "Values below 2**-14 are not lost yet: float16 has subnormals, down to 2**-24.", edge=True)


@bank.wrong("normals-only", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < torch.finfo(torch.float16).tiny)


bank.hint("no-rounding", "Values between 2**-25 and 2**-24 are rounded up to 2**-24, not lost. The cast rounds to "
          "the nearest number; only the tie, 2**-25, goes to the even one, which is zero.", edge=True)  # fmt: skip


@bank.wrong("no-rounding", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < 2.0**-24)


bank.hint("tie-kept", "2**-25 is exactly halfway between 0 and 2**-24. Ties go to the even number, so it becomes "
          "zero.", edge=True)  # fmt: skip


@bank.wrong("tie-kept", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < 2.0**-25)


bank.hint("scale-too-late", "The fraction lost does not depend on the scale. A value that has become zero stays "
          "zero: multiply in float32, before the cast.")  # fmt: skip


@bank.wrong("scale-too-late")
def lost_in_float16(gradients, s):
    return count(gradients, s, cast=lambda g, s: g.half() * s)


@bank.wrong("scale-too-late", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, 1.0)


bank.hint("divided-by-scale", "You divide the gradients by the scale. Scaling multiplies the loss, and so every "
          "gradient.")  # fmt: skip


@bank.wrong("divided-by-scale", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, 1 / s)


bank.hint("mean-of-fractions", "This is the mean of the tensors' fractions. Count the values over all tensors.")


@bank.wrong("mean-of-fractions", variant=True)
def lost_in_float16(gradients, s):
    each = [count([g], s) for g in gradients if g is not None]
    return tuple(sum(pair[i] for pair in each) / max(len(each), 1) for i in (0, 1))


bank.hint("first-tensor-only", "You looked at only one tensor.")


@bank.wrong("first-tensor-only", variant=True)
def lost_in_float16(gradients, s):
    for g in gradients:
        if g is not None:
            return count([g], s)
    return 0.0, 0.0


bank.hint("percent", "A fraction is between 0 and 1: this is a percentage or a count.")


@bank.wrong("percent")
def lost_in_float16(gradients, s):
    return tuple(100 * value for value in count(gradients, s))


@bank.wrong("percent", variant=True)
def lost_in_float16(gradients, s):
    gradients = [g for g in gradients if g is not None]
    n = sum(int((g != 0).sum()) for g in gradients)
    return tuple(value * n for value in count(gradients, s))


bank.hint("negative-missed", "Gradients may be negative. Compare the absolute value.", edge=True)


@bank.wrong("negative-missed", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: g * s <= 2.0**-25)


bank.hint("overflow-missed", "The second fraction is wrong. It counts the values that float16 makes infinite, here "
          "{wanted:.3f} of the nonzero ones.")  # fmt: skip


@bank.wrong("overflow-missed", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s)[0], 0.0


bank.hint("overflow-at-65504", "65,504 is the largest float16 and is not infinite: values become infinite from "
          "65,520 on.", edge=True)  # fmt: skip


@bank.wrong("overflow-at-65504", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, infinite=lambda g, s: (g * s).abs() >= torch.finfo(torch.float16).max)


bank.hint("bf16-range", "You find that nothing is lost. This is true of bfloat16, with its range, but the question "
          "is about float16.")  # fmt: skip


@bank.wrong("bf16-range")
def lost_in_float16(gradients, s):
    return count(gradients, s, cast=lambda g, s: (g * s).bfloat16())


@bank.wrong("bf16-range", variant=True)
def lost_in_float16(gradients, s):
    return 0.0, 0.0


bank.hint("swapped-fractions", "The order is wrong: return the fraction lost to zero first, the infinite one second.")


@bank.wrong("swapped-fractions", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s)[::-1]


bank.hint("gradients-overwritten", "You changed the gradients, which the step still needs.", edge=True)


@bank.wrong("gradients-overwritten", variant=True)
def lost_in_float16(gradients, s):
    gradients = [g for g in gradients if g is not None]
    there = [g != 0 for g in gradients]
    for g in gradients:
        g.mul_(s)
    n = max(sum(int(t.sum()) for t in there), 1)
    halves = [g.half() for g in gradients]
    return sum(int(((h == 0) & t).sum()) for h, t in zip(halves, there)) / n, sum(
        int(h.isinf().sum()) for h in halves
    ) / n


bank.hint("empty-fails", "Gradients that are all zero, or None, must give (0, 0): {error}", edge=True)


@bank.wrong("empty-fails")
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None])
    values = values[values != 0]
    half = (values * s).half()
    return (half == 0).sum().item() / len(values), half.isinf().sum().item() / len(values)


@bank.wrong("empty-fails", variant=True)
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None] + [torch.zeros(0)])
    values = values[values != 0]
    half = (values * s).half()
    return (half == 0).double().mean().item(), half.isinf().double().mean().item()


bank.hint("wrong-fraction", "The fraction lost is wrong.")


@bank.wrong("wrong-fraction", variant=True)
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).half() != g * s)  # all that rounding changes


bank.hint("value-by-value", "You run {n} operations for {size} values. Cast whole tensors.")


@bank.wrong("value-by-value", variant=True)
def lost_in_float16(gradients, s):
    lost = infinite = there = 0
    for g in gradients:
        if g is not None:
            for row in g.reshape(-1, 10) if g.numel() % 10 == 0 else g.reshape(-1, 1):
                half = (row * s).half()
                lost += int(((half == 0) & (row != 0)).sum())
                infinite += int(half.isinf().sum())
                there += int((row != 0).sum())
    return lost / max(there, 1), infinite / max(there, 1)
