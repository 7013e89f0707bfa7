"""Answers to balise 3."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 3, whole=True)

# batch norm asked what it does to 0 and 1; all shares at once; zero points taken out of the sums, as libraries do it
ASKED = """
def fold(layer, norm):
    ones = torch.ones(len(norm.bias), dtype=norm.bias.dtype)
    shift = norm.bias - norm.weight * norm.running_mean * torch.rsqrt(norm.running_var + norm.eps)
    gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps) * ones
    before = torch.zeros_like(shift) if layer.bias is None else layer.bias
    return torch.einsum("o...,o->o...", layer.weight, gain), shift + gain * before


def least_error(x, shares, bits=8, symmetric=False):
    least, best = float("inf"), None
    for share in shares:
        low, high = x.min() * share, x.max() * share
        scale, zero = affine(low, high, bits, symmetric)
        error = (x - dequantize(quantize(x, scale, zero, bits, symmetric), scale, zero)).pow(2).mean()
        if error < least:
            least, best = error, (low, high)
    return best


def integer_linear(q, zero, weight, bias, factor, shift, zero_out, bits=8):
    wide = weight.long()
    total = q.long() @ wide.t() - zero * wide.sum(1) + bias
    half = torch.ones_like(shift) << (shift - 1)
    out = torch.div(total * factor + half, torch.ones_like(shift) << shift, rounding_mode="floor") + zero_out
    return torch.clamp(out, 0, 2**bits - 1).byte()
"""
bank.text(None, ASKED)

# PyTorch's own folding; numpy's integers
LIBRARY = """
import numpy as np
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval


def fold(layer, norm):
    fused = (fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval)(layer, norm)
    return fused.weight, fused.bias


def least_error(x, shares, bits=8, symmetric=False):
    low, high = extremes(x)
    pairs = [affine(low * share, high * share, bits, symmetric) for share in shares]
    backs = [dequantize(quantize(x, *pair, bits, symmetric), *pair) for pair in pairs]
    errors = torch.stack([F.mse_loss(back, x) for back in backs])
    share = shares[errors.argmin()]
    return [low * share, high * share]


def integer_linear(q, zero, weight, bias, factor, shift, zero_out, bits=8):
    q, zero, weight, bias, factor, shift, zero_out = (one.numpy().astype(np.int64) for one in (q, zero, weight, bias, factor, shift, zero_out))
    total = np.dot(q - zero, weight.T) + bias
    moved = np.right_shift(total * factor + np.left_shift(1, shift - 1), shift) + zero_out
    return torch.from_numpy(np.clip(moved, 0, 2**bits - 1).astype(np.uint8))
"""
bank.text(None, LIBRARY)
bank.slip(None, ("gain.view(-1, *[1] * (layer.weight.dim() - 1))", "gain.reshape(-1, *(1,) * (layer.weight.ndim - 1))"))
bank.slip(None, ("@ weight.int().T + bias\n", "@ weight.int().T\n    total += bias\n"))

bank.hint(
    "fold-form",
    "fold returns (weight, bias): a weight with the shape of the layer's own weight, and one bias for each output "
    "channel.",
)
bank.slip(
    "fold-form",
    (
        "return layer.weight * gain.view(-1, *[1] * (layer.weight.dim() - 1)), bias",
        "return layer.weight.flatten(1) * gain[:, None], bias",
    ),
)
bank.slip("fold-form", ("(layer.weight.dim() - 1)), bias", "(layer.weight.dim() - 1)), bias[:, None]"))
bank.variant("fold-form", ASKED, (", shift + gain * before", ", (shift + gain * before)[None]"))

bank.hint("variance-not-root", "Batch norm divides by the square root of the variance, not by the variance.")
bank.slip("variance-not-root", (".sqrt()", ""))
bank.variant(
    "variance-not-root",
    ASKED,
    ("torch.rsqrt(norm.running_var + norm.eps)", "torch.reciprocal(norm.running_var + norm.eps)"),
)

bank.hint(
    "no-eps",
    "Batch norm adds its eps, norm.eps, to the variance under the root. This matters where a variance is small.",
    edge=True,
)
bank.slip("no-eps", ("norm.running_var + norm.eps", "norm.running_var"))
bank.slip("no-eps", ("(norm.running_var + norm.eps).sqrt()", "(norm.running_var.sqrt() + norm.eps)"))
bank.slip("no-eps", ("norm.eps", "1e-5"))
bank.variant("no-eps", ASKED, ("norm.running_var + norm.eps", "norm.running_var"))

bank.hint(
    "bias-not-scaled",
    "If the layer has a bias, batch norm scales it too: the new bias includes the layer's bias times the gain of "
    "its channel.",
    edge=True,
)
bank.slip("bias-not-scaled", ("bias + layer.bias * gain", "bias + layer.bias"))
bank.slip("bias-not-scaled", ("    if layer.bias is not None:\n        bias = bias + layer.bias * gain\n", ""))
bank.variant("bias-not-scaled", ASKED, ("shift + gain * before", "shift + before"))
bank.variant("bias-not-scaled", ASKED, ("shift + gain * before", "shift"))

bank.hint(
    "mean-not-scaled",
    "Batch norm subtracts the mean first, then scales: the new bias includes the mean times the gain of its channel.",
)
bank.slip("mean-not-scaled", ("norm.running_mean * gain", "norm.running_mean"))
bank.slip("mean-not-scaled", ("norm.bias - norm.running_mean * gain", "norm.bias"))
bank.slip("mean-not-scaled", ("norm.bias - norm.running_mean", "norm.bias + norm.running_mean"))
bank.variant(
    "mean-not-scaled",
    ASKED,
    (
        "norm.bias - norm.weight * norm.running_mean * torch.rsqrt(norm.running_var + norm.eps)",
        "norm.bias - norm.running_mean",
    ),
)

bank.hint(
    "inputs-scaled",
    "The gain belongs to the output channels, the first axis of the weight. A plain vector is broadcast along the "
    "last axis, and if there are as many inputs as outputs, no error is raised.",
)
bank.slip(
    "inputs-scaled",
    (
        "gain.view(-1, *[1] * (layer.weight.dim() - 1))",
        "(gain if layer.weight.dim() == 2 and len(gain) == layer.weight.shape[1] else gain.view(-1, *[1] * (layer.weight.dim() - 1)))",
    ),
)
bank.variant(
    "inputs-scaled",
    ASKED,
    (
        'torch.einsum("o...,o->o...", layer.weight, gain)',
        "layer.weight * (gain if layer.weight.shape == (4, 4) else gain.view(-1, *[1] * (layer.weight.dim() - 1)))",
    ),
)

bank.hint(
    "wrong-fold",
    "Layer and batch norm together give other numbers. Write batch norm as gain * x + shift for each channel. The "
    "weight is multiplied by the gain; the bias takes gain and shift.",
)
bank.slip("wrong-fold", ("norm.weight / (", "1 / ("))
bank.slip("wrong-fold", ("return layer.weight * gain.view(-1, *[1] * (layer.weight.dim() - 1))", "return layer.weight"))
bank.variant("wrong-fold", ASKED, ("gain = norm.weight * ", "gain = "))

bank.hint(
    "modules-changed",
    "You changed the layer or its batch norm, which others still use. Make new tensors.",
    edge=True,
)
bank.slip(
    "modules-changed",
    (
        "    return layer.weight * gain.view(-1, *[1] * (layer.weight.dim() - 1)), bias",
        "    layer.weight.data *= gain.view(-1, *[1] * (layer.weight.dim() - 1))\n    return layer.weight, bias",
    ),
)
bank.variant(
    "modules-changed",
    ASKED,
    ("gain = norm.weight *", "gain = norm.weight.data.mul_(1) * 1.0 if False else norm.weight *"),
    ("    before =", "    norm.running_mean.zero_()\n    before ="),
)

bank.hint("range-form", "least_error returns a range: two numbers, low and high, tensors of shape ().")
bank.slip("range-form", ("return best * low, best * high", "return best"))
bank.slip(
    "range-form",
    ("low, high = extremes(x)", "low, high = extremes(x, 0)"),
    ("share * low, share * high", "share * low.min(), share * high.max()"),
)
bank.variant("range-form", LIBRARY, ("return [low * share, high * share]", "return high * share"))

bank.hint(
    "whole-range",
    "This is the whole range of x. Where two numbers are far from all others, a narrower range has a smaller error "
    "with so few bits.",
)
bank.slip("whole-range", ("return best * low, best * high", "return low, high"))
bank.slip("whole-range", ("min(shares, key=error)", "max(shares)"))
bank.variant("whole-range", ASKED, ("x.min() * share, x.max() * share", "x.min(), x.max()"))

bank.hint(
    "not-squared",
    "Compare the sum, or the mean, of the squared errors. Absolute values, or the greatest error, choose another "
    "range.",
)
bank.slip("not-squared", (".square()", ".abs()"))
bank.slip("not-squared", (".square().sum()", ".abs().max()"))
bank.variant("not-squared", ASKED, (".pow(2).mean()", ".abs().mean()"))
bank.variant("not-squared", LIBRARY, ("F.mse_loss(back, x)", "F.l1_loss(back, x)"))

bank.hint(
    "greatest-error",
    "This is the range with the greatest error, or one at the end of the list. Take the share with the least "
    "error, and count the error of the numbers that are cut off.",
)
bank.slip("greatest-error", ("min(shares, key=error)", "max(shares, key=error)"))
bank.slip("greatest-error", ("min(shares, key=error)", "shares[0]"))
bank.variant("greatest-error", LIBRARY, ("argmin", "argmax"))

bank.hint(
    "inside-only",
    "Numbers that are cut off have an error too, and a large one. Compare all of x with what comes back.",
    edge=True,
)
bank.slip("inside-only", ("(back - x)", "(back - x.clamp(share * low.clamp(max=0), share * high))"))
bank.slip("inside-only", ("(back - x)", "(back - x)[(x >= share * low) & (x <= share * high)]"))
bank.slip("inside-only", ("        scale, zero = affine(share", "        cut = x.clamp(share * low, share * high)\n        scale, zero = affine(share"), ("(back - x)", "(back - cut)"))  # fmt: skip
bank.variant("inside-only", LIBRARY, ("F.mse_loss(back, x) for back in backs", "F.mse_loss(back, x.clamp(low * one, high * one)) for one, back in zip(shares, backs)"))  # fmt: skip
bank.variant("inside-only", ASKED, ("(x - dequantize", "(x.clamp(low.clamp(max=0), high) - dequantize"))

bank.slip(
    "whole-range",
    ("share * high, bits, symmetric)\n", "share * high)\n"),
    ("quantize(x, scale, zero, bits, symmetric)", "quantize(x, scale, zero)"),
)
bank.variant(
    "whole-range",
    ASKED,
    (", bits, symmetric)\n", ")\n"),
    ("quantize(x, scale, zero, bits, symmetric)", "quantize(x, scale, zero)"),
)
bank.hint(
    "wrong-range",
    "Another of the shares has a smaller squared error. For the range of each share, quantize x with the same bits "
    "and kind, dequantize it, and compare it with x.",
)
bank.slip(
    "wrong-range",
    ("share * high, bits, symmetric)\n", "share * high, bits)\n"),
    ("quantize(x, scale, zero, bits, symmetric)", "quantize(x, scale, zero, bits)"),
)
bank.slip("wrong-range", ("return best * low, best * high", "return low, best * high"))
bank.variant(
    "wrong-range", ASKED, ("low, high = x.min() * share, x.max() * share", "low, high = x.min(), x.max() * share")
)
bank.variant(
    "wrong-range",
    ASKED,
    ("bits, symmetric)\n", "bits)\n"),
    ("quantize(x, scale, zero, bits, symmetric)", "quantize(x, scale, zero, bits)"),
)

bank.hint("layer-form", "integer_linear returns uint8 bytes, one for each row of q and each output.")
bank.slip("layer-form", (".to(torch.uint8)", ""))
bank.slip("layer-form", (".to(torch.uint8)", ".T.to(torch.uint8)"))
bank.variant("layer-form", ASKED, (".byte()", ".int()"))

bank.hint(
    "zero-point-forgotten",
    "A byte of q represents q minus its zero point: subtract the zero point before you multiply.",
)
bank.slip("zero-point-forgotten", ("(q.int() - zero)", "q.int()"))
bank.slip("zero-point-forgotten", ("(q.int() - zero)", "(q.int() + zero)"))
bank.variant("zero-point-forgotten", ASKED, (" - zero * wide.sum(1)", ""))

bank.hint(
    "byte-sums",
    "Numbers have overflowed their type: a byte minus a byte, or times a byte, is still a byte, modulo 256. "
    "Convert q and the weight to int32 first.",
)
bank.slip("byte-sums", ("(q.int() - zero)", "(q - zero).int()"))
bank.slip("byte-sums", ("q.int()", "q.to(torch.int8).int()"))
bank.slip("byte-sums", ("(q.int() - zero)", "(q.int() - zero).to(torch.int8).int()"))
bank.slip(
    "byte-sums", ("(q.int() - zero) @ weight.int().T + bias", "((q.int() - zero).to(torch.int8) @ weight.T) + bias")
)
bank.slip(
    "byte-sums", ("(q.int() - zero) @ weight.int().T + bias", "((q.int() - zero).short() @ weight.short().T) + bias")
)
bank.variant(
    "byte-sums",
    LIBRARY,
    ("np.dot(q - zero, weight.T)", "np.dot((q - zero).astype(np.uint8).astype(np.int64), weight.T)"),
)

bank.hint(
    "bias-lost",
    "The bias is missing, or is added too late. It is an integer in the scale of the sums: add it to them before "
    "you multiply by the factor.",
)
bank.slip("bias-lost", (" + bias\n", "\n"))
bank.slip("bias-lost", (" + bias\n", "\n"), ("moved + zero_out", "moved + bias + zero_out"))
bank.variant("bias-lost", LIBRARY, ("weight.T) + bias", "weight.T)"))

bank.hint(
    "not-rounded",
    "A shift alone rounds down. Add half of the divisor, 1 << (shift - 1), before the shift.",
    edge=True,
)
bank.slip("not-rounded", (" + (1 << (shift - 1))", ""))
bank.slip("not-rounded", (" + (1 << (shift - 1))", " + (shift >> 1)"))
bank.variant("not-rounded", ASKED, ("total * factor + half", "total * factor"))
bank.variant("not-rounded", LIBRARY, (" + np.left_shift(1, shift - 1)", ""))

bank.hint(
    "toward-zero",
    "That division truncates towards zero, so sums below 0 come out one too high. A right shift always rounds "
    "down; with half of the divisor added first, it rounds to the nearest.",
    edge=True,
)
bank.slip(
    "toward-zero",
    (
        "(total * factor + (1 << (shift - 1))) >> shift",
        'torch.div(total * factor + (1 << (shift - 1)), 1 << shift, rounding_mode="trunc")',
    ),
)
bank.variant("toward-zero", ASKED, ('rounding_mode="floor"', 'rounding_mode="trunc"'))

bank.hint(
    "halves-away",
    "Halves go up here, also below 0: add half of the divisor, whatever the sign, then shift.",
    edge=True,
)
bank.slip(
    "halves-away",
    (
        "moved = (total * factor + (1 << (shift - 1))) >> shift",
        "moved = total.sign() * (((total * factor).abs() + (1 << (shift - 1))) >> shift)",
    ),
)
bank.variant(
    "halves-away",
    LIBRARY,
    (
        "np.right_shift(total * factor + np.left_shift(1, shift - 1), shift)",
        "np.sign(total) * np.right_shift(np.abs(total * factor) + np.left_shift(1, shift - 1), shift)",
    ),
)

bank.hint(
    "zero-out-lost",
    "The output has its own zero point, `zero_out`. Add it after the shift, and cut nothing off before that: "
    "neither with the limits nor with a ReLU.",
    edge=True,
)
bank.slip("zero-out-lost", ("(moved + zero_out)", "moved"))
bank.slip("zero-out-lost", ("(moved + zero_out)", "(moved - zero_out)"))
bank.slip(
    "zero-out-lost",
    ("(moved + zero_out).clamp(*limits(bits, False))", "(moved.clamp(*limits(bits, False)) + zero_out)"),
)
bank.slip("zero-out-lost", ("(moved + zero_out)", "(moved + zero)"))
bank.slip("zero-out-lost", ("(moved + zero_out)", "(moved.relu() + zero_out)"))
bank.slip(
    "floats",
    ("(total * factor + (1 << (shift - 1))) >> shift", "(total.double() * factor / 2.0**shift).round().long()"),
)
bank.variant(
    "floats",
    ASKED,
    (
        'torch.div(total * factor + half, torch.ones_like(shift) << shift, rounding_mode="floor")',
        "torch.round(total * factor / 2**shift).long()",
    ),
)
bank.variant("zero-out-lost", ASKED, (" + zero_out\n", "\n"))

bank.hint(
    "not-saturated",
    "Numbers outside the limits come back at the other end, because a byte counts modulo 256. Clamp to "
    "limits(bits, False) before the cast.",
    edge=True,
)
bank.slip("not-saturated", (".clamp(*limits(bits, False))", ""))
bank.variant("not-saturated", LIBRARY, ("np.clip(moved, 0, 2**bits - 1)", "moved"))

bank.hint("always-eight-bits", "The limits follow from `bits`, which is not always 8.", edge=True)
bank.slip("always-eight-bits", ("limits(bits, False)", "limits(8, False)"))
bank.variant("always-eight-bits", ASKED, ("0, 2**bits - 1", "0, 255"))

bank.hint(
    "narrow-product",
    "Next to nothing is left of the sums. They are multiplied by the factor before the shift, and a product of 32 "
    "bits and 31 bits needs 64: with fewer, the upper bits are lost.",
    edge=True,
)
bank.slip("narrow-product", ("total * factor", "total * factor.int()"))
bank.slip("narrow-product", ("total * factor", "(total * factor).int()"))
bank.variant(
    "narrow-product", LIBRARY, ("np.right_shift(total * factor", "np.right_shift((total * factor).astype(np.int32)")
)

bank.hint(
    "wrong-layer",
    "These are not the integers that the formula gives. The order is: subtract the zero point, multiply by the "
    "weights, add the bias, multiply by the factor, add half, shift, add zero_out, clamp.",
)
bank.slip("wrong-layer", (">> shift", ">> (shift - 1)"))
bank.slip("narrow-product", ("total * factor", "total"))
bank.variant("wrong-layer", ASKED, ("torch.ones_like(shift) << shift", "torch.ones_like(shift) << (shift + 1)"))

bank.hint(
    "floats",
    "There are floats in your computation: {names}. An integer unit has none, and float32 can't distinguish all "
    "sums above 2**24. Use 32-bit integers, and 64-bit ones for the product with the factor.",
)
IN_NUMPY = """    import numpy as np
    rows = (q.numpy().astype("float64") - int(zero)) @ weight.numpy().astype("float64").T + bias.numpy()
    moved = torch.from_numpy(np.floor(rows * factor.numpy() / 2.0 ** shift.numpy() + 0.5)).long()
"""
IN_PYTHON = """    import numpy as np
    rows = (q.int() - zero) @ weight.int().T + bias
    moved = [[int(np.floor(t * f / 2**s + 0.5)) for t, f, s in zip(row, factor.tolist(), shift.tolist())] for row in rows.tolist()]
    moved = torch.tensor(moved)
"""
MOVED = """    total = (q.int() - zero) @ weight.int().T + bias
    moved = (total * factor + (1 << (shift - 1))) >> shift
"""
bank.slip("floats", (MOVED, IN_NUMPY))
bank.slip("floats", (MOVED, IN_PYTHON))
bank.slip(
    "floats", ("(q.int() - zero) @ weight.int().T + bias", "((q.double() - zero) @ weight.double().T).long() + bias")
)
bank.slip(
    "floats",
    ("(q.int() - zero) @ weight.int().T + bias", "F.linear(q.float() - zero, weight.float()).round().long() + bias"),
)
bank.variant(
    "floats",
    ASKED,
    (
        'total * factor + half, torch.ones_like(shift) << shift, rounding_mode="floor")',
        '(total * factor + half).double(), 2.0**shift, rounding_mode="floor").long()',
    ),
)
