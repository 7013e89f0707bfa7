"""Balise 3: what float16 loses of given gradients. The truth is the cast done by NumPy, value by value."""

import numpy as np
import torch

from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.probes.operations import Operations

HINTS = {
    "not-two-fractions": "Return two numbers: the fraction lost to zero and the fraction that becomes infinite.",
    "zeros-counted-lost": "A gradient that is exactly zero in float32 is not lost by float16. Leave zeros out of "
                          "both the numerator and the denominator.",
    "divided-by-all": "Divide by the number of nonzero values, not by the number of all values.",
    "normals-only": "Values below 2**-14 are not lost yet: float16 has subnormals, down to 2**-24.",
    "no-rounding": "Values between 2**-25 and 2**-24 are rounded up to 2**-24, not lost. The cast rounds to the "
                   "nearest number; only the tie, 2**-25, goes to the even one, which is zero.",
    "tie-kept": "2**-25 is exactly halfway between 0 and 2**-24. Ties go to the even number, so it becomes zero.",
    "scale-too-late": "The fraction lost does not depend on the scale. A value that has become zero stays zero: "
                      "multiply in float32, before the cast.",
    "divided-by-scale": "You divide the gradients by the scale. Scaling multiplies the loss, and so every gradient.",
    "mean-of-fractions": "This is the mean of the tensors' fractions. Count the values over all tensors.",
    "first-tensor-only": "You looked at only one tensor.",
    "percent": "A fraction is between 0 and 1: this is a percentage or a count.",
    "negative-missed": "Gradients may be negative. Compare the absolute value.",
    "overflow-missed": "The second fraction is wrong. It counts the values that float16 makes infinite, here "
                       "{wanted:.3f} of the nonzero ones.",
    "overflow-at-65504": "65,504 is the largest float16 and is not infinite: values become infinite from 65,520 on.",
    "bf16-range": "You find that nothing is lost. This is true of bfloat16, with its range, but the question is "
                  "about float16.",
    "swapped-fractions": "The order is wrong: return the fraction lost to zero first, the infinite one second.",
    "gradients-overwritten": "You changed the gradients, which the step still needs.",
    "empty-fails": "Gradients that are all zero, or None, must give (0, 0): {error}",
    "wrong-fraction": "The fraction lost is wrong.",
    "value-by-value": "You run {n} operations for {size} values. Cast whole tensors.",
}


def balise_3(lost):
    """Random gradients over all exponents, ties and borders, several tensors of several shapes and strides."""
    yield "two fractions between 0 and 1"
    _compare(lost, _spread(), 1.0, "random gradients from 2**-40 to 1")
    yield "the scale multiplies in float32, before the cast"
    for scale in (2.0**8, 2.0**20, 1000.0, 2.0**-6):
        _compare(lost, _spread(), scale, f"scale {scale:g}")
    yield "borders: subnormals are kept, ties go to even, 65,504 is the largest"
    _compare(lost, [_borders()], 1.0, "values around 2**-25, 2**-24, 2**-14 and 65,504")
    _compare(lost, [_borders() / 64], 64.0, "the same, scaled")
    yield "exact zeros do not count; None, strides and empty tensors cause no error"
    _hard(lost)
    yield "a few operations per tensor; the gradients are unchanged"
    grads = [torch.randn(4000), torch.randn(50, 60)]
    before = [g.clone() for g in grads]
    with Operations() as operations:
        lost(grads, 512.0)
    if operations.total > 200:
        raise Wrong("value-by-value", n=operations.total, size=sum(g.numel() for g in grads))
    if not all(torch.equal(a, b) for a, b in zip(grads, before, strict=True)):
        raise Wrong("gradients-overwritten")


def _spread():
    """Three tensors, of different sizes and exponents, with exact zeros in the first."""
    generator = torch.Generator().manual_seed(4)
    grads = []
    for shape, low, high in (((40, 30), -40, -10), ((7,), -12, 0), ((300,), -30, -18)):
        exponent = torch.empty(shape).uniform_(low, high, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        grads.append(torch.exp2(exponent) * sign)
    grads[0][:, ::3] = 0.0
    return grads


def _borders():
    tie = 2.0**-25
    near = [tie, -tie, tie * (1 + 2**-20), tie * (1 - 2**-20), 2.0**-24, 1.5 * 2.0**-25, -1.7 * 2.0**-25]
    more = [2.0**-14, 2.0**-15, -(2.0**-20), 3e-5, 65504.0, -65504.0, 65519.0, 65520.0, 65535.0, -70000.0, 1.0]
    return torch.tensor(near + more)


def _hard(lost):
    grads = _spread()
    _compare(lost, [None, grads[0].t(), None, grads[2][::2]], 1.0, "None and non-contiguous tensors")
    _compare(lost, [*grads, torch.zeros(5000)], 1.0, "with a tensor of zeros")
    _compare(lost, _spread(), 4.0, "a generator")
    for what, empty in (("zeros", [torch.zeros(3, 4)]), ("nothing", [None]), ("an empty tensor", [torch.zeros(0)])):
        try:
            got = _pair(lost(empty, 8.0))
        except (ZeroDivisionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            raise Wrong("empty-fails", error=f"{type(error).__name__}: {error}", where=what) from error
        if not close(got, [0.0, 0.0]):
            raise Wrong("empty-fails", error="another value came", expected="(0, 0)", got=str(got), where=what)


def _pair(answer):
    if answer is None:
        raise Wrong("nothing-returned")
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("not-two-fractions", got=answer)
    try:
        return [float(value) for value in answer]
    except (TypeError, ValueError, RuntimeError) as error:
        raise Wrong("not-two-fractions", got=answer) from error


def _fractions(values):
    """(lost, infinite) of NumPy float32 `values`, cast to float16 by NumPy."""
    with np.errstate(over="ignore", under="ignore"):
        cast = values.astype(np.float16)
    there = values != 0
    n = max(int(there.sum()), 1)
    return float(((cast == 0) & there).sum() / n), float((np.isinf(cast) & there).sum() / n)


def _compare(lost, grads, scale, where):
    given = [None if g is None else g.clone(memory_format=torch.preserve_format) for g in grads]
    low, high = _pair(lost(given if where != "a generator" else iter(given), scale))
    arrays = [g.numpy().ravel() for g in grads if g is not None]
    values = np.concatenate(arrays)
    scaled = values * np.float32(scale)
    want_low, want_high = _fractions(scaled)
    there = values != 0
    if not close(low, want_low, 1e-6):
        swapped = close(high, want_low, 1e-6) and close(low, want_high, 1e-6)
        known = _mistakes(arrays, values, scaled, scale)
        slug = "swapped-fractions" if swapped else nearest(low, known, "wrong-fraction", 1e-6)
        raise Wrong(
            "percent" if low > 1 and slug == "wrong-fraction" else slug, expected=want_low, got=low, where=where
        )
    if not close(high, want_high, 1e-6):
        early = float(((np.abs(scaled) >= 65504) & there).sum() / max(there.sum(), 1))
        slug = "overflow-at-65504" if close(high, early, 1e-6) else "overflow-missed"
        raise Wrong(slug, expected=want_high, got=high, where=where, wanted=want_high)


def _mistakes(arrays, values, scaled, scale):
    """The fraction lost, as each known mistake counts it."""
    there, size, factor = values != 0, np.abs(scaled), np.float32(scale)
    with np.errstate(over="ignore"):
        zero, divided = scaled.astype(np.float16) == 0, (values / factor).astype(np.float16) == 0

    def share(mask):
        return float((mask & there).sum() / max(there.sum(), 1))

    each = [_fractions(a * factor)[0] for a in arrays]
    known = {
        "zeros-counted-lost": float(zero.sum() / len(values)),
        "divided-by-all": float((zero & there).sum() / len(values)),
        "percent": 100 * share(zero),
        "tie-kept": share(size < 2.0**-25),
        "no-rounding": share(size < 2.0**-24),
        "normals-only": share(size < 2.0**-14),
        "divided-by-scale": share(divided),
        "negative-missed": share(scaled <= 2.0**-25),
        "first-tensor-only": each[0],
        "mean-of-fractions": float(np.mean(each)),
        "bf16-range": 0.0,
    }
    return {"scale-too-late": share(values.astype(np.float16) == 0), **known} if scale > 1 else known
