"""Balise 3: what float16 loses of given gradients. The truth is the cast done by NumPy, value by value."""

from functools import partial

import numpy as np
import torch

from dlojz_tp.judging.checking.compare import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations


def _spread(signs=False, zeros=False):
    """Three tensors, of different sizes and exponents; if asked for, of both signs, with exact zeros in the first."""
    generator = torch.Generator().manual_seed(4)
    grads = []
    for shape, low, high in (((40, 30), -40, -10), ((7,), -12, 0), ((300,), -30, -18)):
        exponent = torch.empty(shape).uniform_(low, high, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1 if signs else 1
        grads.append(torch.exp2(exponent) * sign)
    if zeros:
        grads[0][:, ::3] = 0.0
    return grads


def _borders():
    tie = 2.0**-25
    near = [tie, -tie, tie * (1 + 2**-20), tie * (1 - 2**-20), 2.0**-24, 1.5 * 2.0**-25, -1.7 * 2.0**-25]
    more = [2.0**-14, 2.0**-15, -(2.0**-20), 3e-5, 65504.0, -65504.0, 65519.0, 65520.0, 65535.0, -70000.0, 1.0]
    return torch.tensor(near + more)


def _cases():
    """(claim, what is given in words, gradients, scale): all exponents, ties and borders, shapes, strides, None."""
    yield "two fractions between 0 and 1", "random gradients from 2**-40 to 1", _spread(), 1.0
    for scale in (2.0**8, 2.0**20, 1000.0, 2.0**-6):
        yield "the scale multiplies in float32, before the cast", f"scale {scale:g}", _spread(), scale
    claim = "borders: subnormals are kept, ties go to even, 65,504 is the largest"
    yield claim, "values around 2**-25, 2**-24, 2**-14 and 65,504", [_borders()], 1.0
    yield claim, "the same, scaled", [_borders() / 64], 64.0
    claim = "exact zeros do not count; None, strides and empty tensors cause no error"
    for zeros in (False, True):
        grads = _spread(True, zeros)
        yield claim, "None and non-contiguous tensors", [None, grads[0].t(), None, grads[2][::2]], 1.0
        yield claim, "a generator", grads, 2.0**20
    yield claim, "with a tensor of zeros", [*grads, torch.zeros(5000)], 1.0


CASES = list(_cases())
EMPTY = {"zeros": [torch.zeros(3, 4)], "nothing": [None], "an empty tensor": [torch.zeros(0)]}


def observe(lost):
    """The two fractions for each of the cases, or the error that nothing to count makes; operations for two tensors."""
    for number, (_, where, grads, scale) in enumerate(CASES):
        given = [None if g is None else g.clone(memory_format=torch.preserve_format) for g in grads]
        yield {number: _pair(lost(given if where != "a generator" else iter(given), scale))}
    for where, grads in EMPTY.items():
        try:
            found = _pair(lost([None if g is None else g.clone() for g in grads], 8.0))
        except (ZeroDivisionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            found = error
        yield {where: found}
    grads = [torch.randn(4000), torch.randn(50, 60)]
    before = [g.clone() for g in grads]
    with Operations() as operations:
        lost(grads, 512.0)
    yield {"operations": operations.total, "unchanged": all(map(torch.equal, grads, before))}


def _pair(answer):
    """Two floats in a list; the text of anything else but None."""
    try:
        found = [float(value) for value in answer] if isinstance(answer, tuple | list) else []
    except (TypeError, ValueError, RuntimeError):
        found = []
    return None if answer is None else found if len(found) == 2 else repr(answer)


def _fractions(values):
    """(lost, infinite) of NumPy float32 `values`, cast to float16 by NumPy."""
    with np.errstate(over="ignore", under="ignore"):
        cast = values.astype(np.float16)
    there = values != 0
    n = max(int(there.sum()), 1)
    return float(((cast == 0) & there).sum() / n), float((np.isinf(cast) & there).sum() / n)


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


def _looks(number):
    """Looks at the two fractions of a case."""
    claim, where, grads, scale = CASES[number]
    arrays = [g.numpy().ravel() for g in grads if g is not None]
    values = np.concatenate(arrays)
    scaled, there = values * np.float32(scale), values != 0
    known, due = _mistakes(arrays, values, scaled, scale), list(_fractions(scaled))
    early = float(((np.abs(scaled) >= 65504) & there).sum() / max(there.sum(), 1))

    def low_hint(seen):
        if close(seen, due[::-1], 1e-6):
            return "swapped-fractions"
        return mistake_of(seen[0], known, "percent" if seen[0] > 1 else "wrong-fraction", 1e-6)

    def high_hint(seen):
        return "overflow-at-65504" if close(seen[1], early, 1e-6) else "overflow-missed"

    def wrong(k, hint, o):
        """The mistake in one of the two."""
        got, wanted = o[number][k], due[k]
        about = {"expected": wanted, "got": got, "where": where, "wanted": wanted}
        return None if close(got, wanted, 1e-6) else (hint(o[number]), about)

    yield Look(claim, number, "two fractions", "not-two-fractions", holds=lambda seen, _: isinstance(seen, list))
    yield recognised("", partial(wrong, 0, low_hint))
    yield recognised("", partial(wrong, 1, high_hint))


def _empty(where):
    """The look at gradients of which nothing counts."""

    def fields(seen, _):
        raised = isinstance(seen, Exception)
        error, got = (f"{type(seen).__name__}: {seen}", "") if raised else ("another value came", seen)
        return {"error": error, "expected": "(0, 0)", "got": got, "where": where}

    return Look("", where, [0.0, 0.0], lambda seen, _: "not-two-fractions" if isinstance(seen, str) else "empty-fails",
                fields=fields)  # fmt: skip


LOOKS = [
    *(look for number in range(len(CASES)) for look in _looks(number)),
    *map(_empty, EMPTY),
    Look("a few operations per tensor; the gradients are unchanged", "operations", 200, "value-by-value", holds=at_most,
         fields=lambda seen, _: {"n": seen, "size": 4000 + 50 * 60}),
    Look("", "unchanged", True, "gradients-overwritten"),
]  # fmt: skip


def balise_3(lost):
    yield from judged(LOOKS, observe, lost)
