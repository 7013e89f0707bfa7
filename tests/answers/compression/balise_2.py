"""Answers to balise 2."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 2, whole=True)

# channels as rows; ranges with Python's words; the reciprocal of the scale; clipped before zero is added
BY_ROWS = """
def extremes(x, axis=None):
    if axis is None:
        return x.min(), x.max()
    rows = x.transpose(0, axis).flatten(1)
    shape = [x.shape[axis] if d == axis else 1 for d in range(x.dim())]
    return rows.min(1).values.reshape(shape), rows.max(1).values.reshape(shape)


def affine(low, high, bits=8, symmetric=False):
    nothing = torch.zeros_like(low)
    low, high = torch.minimum(low, nothing), torch.maximum(high, nothing)
    if symmetric:
        scale = torch.maximum(high, low.abs()) / (2 ** (bits - 1) - 1)
        return scale.clamp(min=1e-38), nothing.int()
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-38)
    return scale, torch.round(-low / scale).to(torch.int32)


def quantize(x, scale, zero, bits=8, symmetric=False):
    steps = (x * scale.reciprocal()).round_()
    least, most = limits(bits, symmetric)
    steps = torch.minimum(torch.maximum(steps, (least - zero).float()), (most - zero).float())
    return (steps + zero).to(torch.int8 if symmetric else torch.uint8)


def dequantize(q, scale, zero):
    return scale * (q.float() - zero.float())
"""
bank.text(None, BY_ROWS)

# with numpy: halves to even, its own types
NUMPY = """
import numpy as np


def extremes(x, axis=None):
    axes = tuple(d for d in range(x.dim()) if d != axis)
    return tuple(torch.as_tensor(f(x.numpy(), axis=axes, keepdims=axis is not None)) for f in (np.min, np.max))


def affine(low, high, bits=8, symmetric=False):
    least, most = limits(bits, symmetric)
    low, high = np.minimum(low.numpy(), 0), np.maximum(high.numpy(), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    low, high = np.where(high > low, low, np.float32(least)), np.where(high > low, high, np.float32(most))
    scale = ((high - low) / np.float32(most - least)).astype(np.float32)
    return torch.as_tensor(scale), torch.as_tensor(np.rint(least - low / scale).astype(np.int32))


def quantize(x, scale, zero, bits=8, symmetric=False):
    q = np.rint(x.numpy() / scale.numpy()) + zero.numpy()
    return torch.as_tensor(np.clip(q, *limits(bits, symmetric)).astype(np.int8 if symmetric else np.uint8))


def dequantize(q, scale, zero):
    return torch.as_tensor((q.numpy().astype(np.int32) - zero.numpy()).astype(np.float32) * scale.numpy())
"""
bank.text(None, NUMPY)
bank.slip(None, ("least - low / scale", "most - high / scale"))
bank.slip(None, ("(q.int() - zero) * scale", "q * scale - zero * scale"))
# the scale of zeros set afterwards, and their zero point with it
WIDTH = "    high = torch.where(high - low > 1e-37, high, 1.0)\n"
ZERO = "(least - low / scale).round().int()"
EMPTY = "    scale = torch.where(scale > 0, scale, 1.0)\n    return scale, "
bank.slip(None, (WIDTH, ""), ("    return scale, " + ZERO, EMPTY + f"({ZERO} * (not symmetric)).int()"))

AXES = "[other for other in range(x.dim()) if other != axis]"
bank.hint(
    "extremes-form",
    "extremes returns two tensors. Without an axis their shape is (). With an axis they keep all axes of x, each "
    "of length 1 except the channel axis: keepdim=True.",
)
bank.slip("extremes-form", ("keepdim=keep", "keepdim=False"))
bank.slip("extremes-form", ("x.amin(axes, keepdim=keep), ", ""))
bank.slip("extremes-form", ("keepdim=keep", "keepdim=True"))
bank.variant("extremes-form", BY_ROWS, (".values.reshape(shape)", ".values"))

bank.hint(
    "wrong-axis",
    "A channel is all the numbers with the same index along `axis`. Take the minimum over all other axes and keep "
    "`axis`.",
)
bank.slip("wrong-axis", (AXES, "list(range(x.dim())) if axis is None else [axis]"))
bank.variant("wrong-axis", BY_ROWS, ("    rows =", "    return x.amin(axis, True), x.amax(axis, True)\n    rows ="))
bank.slip("first-axis", (AXES, "list(range(axis is not None, x.dim()))"))
bank.hint("first-axis", "The channels are along `axis`, which is not always the first axis.", edge=True)
bank.variant("first-axis", BY_ROWS, ("x.transpose(0, axis)", "x"), ("x.shape[axis] if d == axis", "len(x) if d == 0"))

bank.hint(
    "wrong-extremes",
    "These are not the least and the greatest numbers. Take amin and amax over all axes except `axis`.",
)
bank.slip("wrong-extremes", ("return x.amin", "x = x.abs()\n    return x.amin"))
bank.variant("wrong-extremes", BY_ROWS, ("x.min(), x.max()", "-x.abs().max(), x.abs().max()"))

bank.hint("not-a-pair", "affine returns two things: (scale, zero point).")
bank.slip("not-a-pair", ("return scale, (least - low / scale).round().int()", "return scale"))
bank.variant("not-a-pair", BY_ROWS, ("return scale, torch.round(-low / scale).to(torch.int32)", "return scale"))

bank.hint(
    "affine-form",
    "For channels of shape {shape}, the scale is float32 and the zero point int32, both of that shape: one per "
    "channel.",
)
bank.slip("affine-form", (".round().int()", ".round()"))
bank.slip(
    "affine-form",
    ("low, high = low.clamp(max=0), high.clamp(min=0)", "low, high = low.min().clamp(max=0), high.max().clamp(min=0)"),
)
bank.variant("affine-form", BY_ROWS, ("torch.round(-low / scale).to(torch.int32)", "torch.round(-low / scale)"))

bank.hint(
    "zero-outside",
    "First widen the range so that it includes 0. For numbers from 0.2 to 5 it goes from 0 to 5: otherwise no "
    "integer represents 0.",
    edge=True,
)
bank.slip("zero-outside", ("low.clamp(max=0), high.clamp(min=0)", "low, high"))
bank.slip("zero-outside", ("low.clamp(max=0), high.clamp(min=0)", "low, high.clamp(min=0)"))
bank.slip("zero-outside", ("low.clamp(max=0), high.clamp(min=0)", "low.clamp(max=0), high"))
bank.variant(
    "zero-outside", BY_ROWS, ("    low, high = torch.minimum(low, nothing), torch.maximum(high, nothing)\n", "")
)

bank.hint(
    "one-step-more",
    "There are most - least steps from the least integer to the greatest. With one more, the scale is too small "
    "and the greatest number saturates.",
)
bank.slip("one-step-more", ("(most - least)", "(most - least + 1)"))
bank.slip("one-step-more", ("(most - least)", "2**bits"))
bank.variant("one-step-more", BY_ROWS, ("(2 ** (bits - 1) - 1)", "2 ** (bits - 1)"), ("(2**bits - 1)", "2**bits"))

bank.hint(
    "one-side",
    "A symmetric range reaches as far as the number farthest from 0, on either side: the greater of -low and high.",
    edge=True,
)
bank.slip("one-side", ("high = torch.maximum(high, -low)\n        ", ""))
bank.slip("one-side", ("torch.maximum(high, -low)", "-low"))
bank.slip("one-side", ("high = torch.maximum(high, -low)\n        low = -high", "pass"))
bank.slip(
    "one-side",
    (WIDTH, ""),
    ("high = torch.maximum(high, -low)\n        ", ""),
    ("    return scale, ", "    scale = scale.clamp(min=1e-38)\n    return scale, "),
)
bank.variant("one-side", BY_ROWS, ("torch.maximum(high, low.abs())", "high"))

bank.hint(
    "wrong-scale",
    "The scale is the width of the widened range divided by the number of steps from the least integer to the greatest.",
)
bank.slip("wrong-scale", ("(most - least)", "most"))
bank.slip("wrong-scale", ("(high - low) / (most - least)", "(most - least) / (high - low)"))
bank.variant("wrong-scale", BY_ROWS, ("(2**bits - 1)", "(2 ** (bits - 1) - 1)"))

bank.hint(
    "zero-truncated",
    "Round the zero point to the nearest integer. .int() alone cuts off the decimals.",
    edge=True,
)
bank.slip("zero-truncated", (".round().int()", ".int()"))
bank.slip("zero-truncated", (".round().int()", ".floor().int()"))
bank.variant("zero-truncated", BY_ROWS, ("torch.round(-low / scale)", "(-low / scale)"))

bank.hint(
    "wrong-zero",
    "The zero point is the integer for 0 when the least number becomes the least integer: it is as many steps "
    "above that integer as `low` is below 0.",
)
bank.slip("wrong-zero", ("least - low / scale", "least + low / scale"))
bank.slip("wrong-zero", ("least - low / scale", "-low / scale"))
bank.variant("wrong-zero", BY_ROWS, ("-low / scale", "low / scale"))

bank.hint(
    "no-range",
    "A channel of zeros has a range of width 0. Its scale must still be positive, because x is divided by it. With "
    "symmetric=True its zero point is 0, as for every channel: integer_linear doesn't subtract a zero point from "
    "the weights.",
    edge=True,
)
bank.slip("no-range", (WIDTH, ""))
bank.slip("no-range", (WIDTH, ""), ("    return scale, ", EMPTY))  # the scale alone: its zero point is -127
bank.variant("no-range", BY_ROWS, ("clamp(min=1e-38), nothing.int()", "clamp(min=1e-38), torch.where(high > low, 0, 1 - 2 ** (bits - 1)).int()"))  # fmt: skip
bank.variant("no-range", BY_ROWS, (".clamp(min=1e-38)", ""))

bank.hint(
    "not-bytes",
    "These are not integers of the right type, or not bytes at all. Use torch.uint8 where the integers start at 0, "
    "and torch.int8 if symmetric.",
)
bank.slip("not-bytes", (".to(torch.int8 if symmetric else torch.uint8)", ".int()"))
bank.slip("not-bytes", ("torch.int8 if symmetric else torch.uint8", "torch.uint8"))
bank.variant("not-bytes", BY_ROWS, (".to(torch.int8 if symmetric else torch.uint8)", ""))
bank.hint("form", "quantize returns one tensor with the shape of x.")
bank.slip("form", ("return q.clamp", "return scale, q.clamp"))
bank.variant("form", NUMPY, ("np.rint(x.numpy() / scale.numpy())", "np.rint(x.numpy() / scale.numpy())[None]"))

bank.hint("borrowed", "This is PyTorch's own quantization. Write the three steps yourself: divide, round, saturate.")
bank.slip(
    "borrowed",
    (
        "    q = torch.round",
        "    if not symmetric and x.dim() == 1:\n        x = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)\n    q = torch.round",
    ),
)
bank.variant("borrowed", BY_ROWS,
    ("    steps = (", "    if x.dim() == 1:\n        x = torch.fake_quantize_per_tensor_affine(x, scale, zero, *limits(bits, symmetric))\n    steps = ("),
)  # fmt: skip

bank.hint("truncated", "Round to the nearest integer. A cast to an integer type only cuts off the decimals.")
bank.slip("truncated", ("torch.round(x / scale)", "(x / scale).int()"))
bank.slip("truncated", ("torch.round(x / scale)", "torch.trunc(x / scale)"))
bank.variant("truncated", BY_ROWS, (".round_()", ".trunc_()"))
bank.hint(
    "floored",
    "Round to the nearest integer. floor always goes down, and makes all numbers half a step smaller on average.",
)
bank.slip("floored", ("torch.round(x / scale)", "torch.floor(x / scale)"))
bank.slip("floored", ("torch.round(x / scale)", "(x // scale)"))
bank.variant("floored", BY_ROWS, (".round_()", ".floor_()"))

bank.hint(
    "half-up",
    "Halves go to the even neighbour: 0.5 to 0, 1.5 to 2. If you add 0.5 and take the floor, all halves go up, "
    "which shifts the mean.",
    edge=True,
)
bank.slip("half-up", ("torch.round(x / scale)", "torch.floor(x / scale + 0.5)"))
bank.slip("half-up", ("torch.round(x / scale)", "torch.sign(x) * torch.floor(x.abs() / scale + 0.5)"))
bank.variant("half-up", BY_ROWS, ("(x * scale.reciprocal()).round_()", "(x * scale.reciprocal()).add_(0.5).floor_()"))

bank.hint(
    "rounded-late",
    "Round x / scale first, then add the zero point. If you add an odd zero point before rounding, halves go to "
    "the other neighbour.",
    edge=True,
)
bank.slip("rounded-late", ("torch.round(x / scale) + zero", "torch.round(x / scale + zero)"))
bank.variant(
    "rounded-late",
    NUMPY,
    ("np.rint(x.numpy() / scale.numpy()) + zero.numpy()", "np.rint(x.numpy() / scale.numpy() + zero.numpy())"),
)

bank.hint(
    "wraps",
    "A number out of range comes back at the other end, because a byte counts modulo 256. Clamp to the limits "
    "before the cast.",
    edge=True,
)
bank.slip("wraps", ("q.clamp(*limits(bits, symmetric)).to(", "q.to(torch.int64).to("))
bank.slip(
    "wraps",
    (
        "q.clamp(*limits(bits, symmetric)).to(torch.int8 if symmetric else torch.uint8)",
        "q.to(torch.int8 if symmetric else torch.uint8).clamp(*limits(bits, symmetric))",
    ),
)
bank.variant("wraps", NUMPY, ("np.clip(q, *limits(bits, symmetric)).astype(", "q.astype(np.int64).astype("))

bank.hint("too-large-for-int", "Numbers far out of range end up at the wrong limit. You call .int() before the "
                                  "clamp, and they don't fit into 32 bits. Clamp the floats, then cast.", edge=True)  # fmt: skip
bank.slip("too-large-for-int", ("torch.round(x / scale) + zero", "torch.round(x / scale).int() + zero"))
bank.variant("too-large-for-int", NUMPY, ("np.rint(x.numpy() / scale.numpy()) +", "torch.round(x / scale).int().numpy() +"))  # fmt: skip

bank.hint(
    "wrong-integers",
    "These are not the integers that the formula gives: divide by the scale, round, add the zero point, clamp to "
    "`limits(bits, symmetric)`.",
)
bank.slip("wrong-integers", ("x / scale", "x * scale"))
bank.slip("wrong-integers", ("+ zero", "- zero"))
bank.slip(
    "wrong-integers",
    (".clamp(*limits(bits, symmetric))", ".clamp(-127 if symmetric else 0, 127 if symmetric else 255)"),
)
bank.variant("wrong-integers", BY_ROWS, ("limits(bits, symmetric)", "limits(8, symmetric)"))

bank.hint(
    "input-changed",
    "You changed an input: x, or the ends of its range. The caller sees every change "
    "made in place. Work on new tensors.",
    edge=True,
)
bank.slip("input-changed", ("torch.round(x / scale)", "x.div_(scale).round()"))
bank.slip("input-changed", ("low.clamp(max=0), high.clamp(min=0)", "low.clamp_(max=0), high.clamp_(min=0)"))
bank.variant("input-changed", BY_ROWS, ("torch.minimum(low, nothing)", "torch.minimum(low, nothing, out=low)"))
bank.variant("input-changed", BY_ROWS, ("(x * scale.reciprocal())", "x.mul_(scale.reciprocal())"))

bank.hint("back-form", "dequantize returns real numbers: one float32 tensor with the shape of q.")
bank.slip("back-form", ("(q.int() - zero) * scale", "((q.int() - zero) * scale).double()"))
bank.variant("back-form", BY_ROWS, ("scale * (q.float() - zero.float())", "(scale * (q.float() - zero.float())).int()"))

bank.hint(
    "byte-minus",
    "Integers below the zero point come back large and positive. A byte minus a number is still a byte, modulo "
    "256. Convert q to int32 or float first.",
    edge=True,
)
bank.slip("byte-minus", ("(q.int() - zero)", "(q - zero)"))
bank.slip("byte-minus", ("(q.int() - zero)", "(q - zero).float()"))
bank.slip("byte-minus", ("(q.int() - zero)", "(q - zero.to(q.dtype)).float()"))
bank.variant(
    "byte-minus",
    NUMPY,
    ("(q.numpy().astype(np.int32) - zero.numpy())", "(q.numpy() - zero.numpy().astype(np.uint8))"),
)

bank.hint("wrong-back", "These are not the real numbers that the integers represent: (q - zero point) times the scale.")
bank.slip("wrong-back", ("(q.int() - zero) * scale", "q.int() * scale - zero"))
bank.slip("wrong-back", ("(q.int() - zero) * scale", "q.int() * scale"))
bank.variant("wrong-back", BY_ROWS, ("(q.float() - zero.float())", "q.float()"))

bank.hint("zero-moves", "0 doesn't come back as 0. It must become the zero point exactly.")
bank.slip("zero-moves", ("(q.int() - zero) * scale", "(q.int() - zero) * scale + 1e-7"))
bank.variant("zero-moves", BY_ROWS, ("scale * (q.float() - zero.float())", "scale * (q.float() - zero.float()) + 1e-8"))

AFTER = "    return scale, "
bank.slip(None, (AFTER, f"    scale = scale.clamp(min=1e-12)\n{AFTER}"))
bank.hint("least-scale", "A range that is narrow but not empty gets too large a scale. Only an empty range may have "
                      "any scale: if you add a small number, or set a minimum, it must not affect the other ranges.", edge=True
)  # fmt: skip
bank.slip("least-scale", (AFTER, f"    scale = scale.clamp(min=torch.finfo(torch.float32).eps)\n{AFTER}"))
bank.slip("least-scale", (AFTER, f"    scale = scale + 1e-8\n{AFTER}"))
bank.variant("least-scale", BY_ROWS, ("1e-38)\n    return scale", "1e-8)\n    return scale"))  # fmt: skip

bank.hint(
    "all-or-none",
    "One channel of zeros changes the scales of the others. Decide for each channel separately, with torch.where "
    "or clamp.",
    edge=True,
)
bank.slip("all-or-none", (WIDTH, "    high = high if (high > low).all() else torch.ones_like(high)\n"))
bank.variant("all-or-none", BY_ROWS, ("    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-38)", "    scale = (high - low) / (2**bits - 1)\n    scale = scale if (scale > 0).all() else 0 * scale + 1"))  # fmt: skip

bank.hint("loops", "You loop over single numbers or channels. PyTorch's operations take whole tensors, and "
                      "broadcast a scale to each channel.")  # fmt: skip
bank.text("loops", BY_ROWS + """

def dequantize(q, scale, zero):
    rows = zip(*(one.expand(q.shape).flatten().tolist() for one in (q, scale, zero)))
    return torch.tensor([(n - z) * s for n, s, z in rows], dtype=torch.float32).view(q.shape)
""")  # fmt: skip
bank.variant("loops", BY_ROWS, ("    nothing = torch.zeros_like(low)\n", """    if low.dim() and len(low) > 1:
        pairs = [affine(a, b, bits, symmetric) for a, b in zip(low, high)]
        return torch.stack([one for one, _ in pairs]), torch.stack([one for _, one in pairs])
    nothing = torch.zeros_like(low)
"""))  # fmt: skip

bank.slip(None, ("scale = (high - low) / (most - least)", "scale = (high - low) * (1 / (most - least))"))
bank.slip(
    None, ("return scale, (least - low / scale).round().int()", "return scale, most - (high / scale).round().int()")
)
