"""Answers to balise 3 of 02_mixed_precision: what float16 loses."""

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision")


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


@bank.right(3)
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


@bank.right(3)
def lost_in_float16(gradients, s):
    """By the borders: 2**-25 itself is lost, 65,520 and more are infinite."""
    return count(
        gradients, s,
        lost=lambda g, s: (g.double() * s).abs() <= 2.0**-25,
        infinite=lambda g, s: (g * s).abs() >= 65520,
    )  # fmt: skip


@bank.right(3)
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


@bank.right(3)
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


@bank.wrong(3, "nothing-returned")
def lost_in_float16(gradients, s):
    count(gradients, s)


@bank.wrong(3, "not-two-fractions")
def lost_in_float16(gradients, s):
    return count(gradients, s)[0]


@bank.wrong(3, "zeros-counted-lost")
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None])
    half = (values * s).half()
    return (half == 0).double().mean().item(), half.isinf().double().mean().item()


@bank.wrong(3, "divided-by-all")
def lost_in_float16(gradients, s):
    return count(gradients, s, below="all")


@bank.wrong(3, "normals-only")
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < torch.finfo(torch.float16).tiny)


@bank.wrong(3, "no-rounding")
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < 2.0**-24)


@bank.wrong(3, "tie-kept")
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).abs() < 2.0**-25)


@bank.wrong(3, "scale-too-late")
def lost_in_float16(gradients, s):
    return count(gradients, s, cast=lambda g, s: g.half() * s)


@bank.wrong(3, "scale-too-late")
def lost_in_float16(gradients, s):
    return count(gradients, 1.0)


@bank.wrong(3, "divided-by-scale")
def lost_in_float16(gradients, s):
    return count(gradients, 1 / s)


@bank.wrong(3, "mean-of-fractions")
def lost_in_float16(gradients, s):
    each = [count([g], s) for g in gradients if g is not None]
    return tuple(sum(pair[i] for pair in each) / max(len(each), 1) for i in (0, 1))


@bank.wrong(3, "first-tensor-only")
def lost_in_float16(gradients, s):
    for g in gradients:
        if g is not None:
            return count([g], s)
    return 0.0, 0.0


@bank.wrong(3, "percent")
def lost_in_float16(gradients, s):
    return tuple(100 * value for value in count(gradients, s))


@bank.wrong(3, "percent")
def lost_in_float16(gradients, s):
    gradients = [g for g in gradients if g is not None]
    n = sum(int((g != 0).sum()) for g in gradients)
    return tuple(value * n for value in count(gradients, s))


@bank.wrong(3, "negative-missed")
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: g * s <= 2.0**-25)


@bank.wrong(3, "overflow-missed")
def lost_in_float16(gradients, s):
    return count(gradients, s)[0], 0.0


@bank.wrong(3, "overflow-at-65504")
def lost_in_float16(gradients, s):
    return count(gradients, s, infinite=lambda g, s: (g * s).abs() >= torch.finfo(torch.float16).max)


@bank.wrong(3, "bf16-range")
def lost_in_float16(gradients, s):
    return count(gradients, s, cast=lambda g, s: (g * s).bfloat16())


@bank.wrong(3, "bf16-range")
def lost_in_float16(gradients, s):
    return 0.0, 0.0


@bank.wrong(3, "swapped-fractions")
def lost_in_float16(gradients, s):
    return count(gradients, s)[::-1]


@bank.wrong(3, "gradients-overwritten")
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


@bank.wrong(3, "empty-fails")
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None])
    values = values[values != 0]
    half = (values * s).half()
    return (half == 0).sum().item() / len(values), half.isinf().sum().item() / len(values)


@bank.wrong(3, "empty-fails")
def lost_in_float16(gradients, s):
    values = torch.cat([g.flatten() for g in gradients if g is not None] + [torch.zeros(0)])
    values = values[values != 0]
    half = (values * s).half()
    return (half == 0).double().mean().item(), half.isinf().double().mean().item()


@bank.wrong(3, "wrong-fraction")
def lost_in_float16(gradients, s):
    return count(gradients, s, lost=lambda g, s: (g * s).half() != g * s)  # all that rounding changes


@bank.wrong(3, "value-by-value")
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
