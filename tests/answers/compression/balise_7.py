"""Answers to balise 7."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 7, whole=True)

# the bits of float32: half a step is added, and the rest cut off; subnormal numbers on a fixed grid; scales with frexp
BITS = """
def round_float(x, mantissa, least, most):
    drop = 23 - mantissa
    bits = x.contiguous().view(torch.int32)
    even = (bits >> drop) & 1
    normal = ((bits + (1 << (drop - 1)) - 1 + even) & -(1 << drop)).view(torch.float32)
    grid = 2.0 ** (least - mantissa)
    small = (x / grid).round() * grid
    y = torch.where(x.abs() < 2.0**least, small, normal).clamp(-most, most)
    return torch.where(x.isnan(), x, y)


def tensor_scale(x, most):
    top = torch.linalg.vector_norm(x, ord=float("inf"))
    return top / most if top > 0 else torch.ones(())


def block_scales(x, most, size=32):
    rows = x.reshape(-1, x.shape[-1])
    count = -(-rows.shape[1] // size)
    whole = torch.zeros(len(rows), count * size)
    whole[:, : rows.shape[1]] = rows.abs()
    fraction, exponent = torch.frexp(whole.view(len(rows), count, size).max(2).values / most)
    exponent = (exponent - (fraction == 0.5).int()).clamp(min=-127)
    scales = torch.ldexp(torch.ones(len(rows), count), exponent)
    return scales[:, torch.arange(rows.shape[1]) // size].view(x.shape)
"""
bank.text(None, BITS)

# sign and size apart, logarithms; a scale is doubled or halved until it fits
LOGS = """
def round_float(x, mantissa, least, most):
    size = x.abs().clamp(max=most)
    exponent = torch.floor(torch.log2(size)).clamp(min=least)
    steps = (size * 2.0 ** (mantissa - exponent)).round()
    return torch.copysign(steps * 2.0 ** (exponent - mantissa), x)


def tensor_scale(x, most):
    return torch.maximum(x.max(), -x.min()).clamp(min=1e-30) / most


def block_scales(x, most, size=32):
    parts = []
    for part in x.abs().split(size, dim=-1):
        top = part.amax(-1, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(top / most)).clamp(-127, 127))
        scale = torch.where(scale * most < top, 2 * scale, scale)
        parts.append(scale.expand(part.shape))
    return torch.cat(parts, -1)
"""
bank.text(None, LOGS)

# all numbers of the format, and the nearest of them
TABLE = """
def round_float(x, mantissa, least, most):
    low = torch.arange(2**mantissa) * 2.0 ** (least - mantissa)
    grid, exponent = [low], least
    while 2.0**exponent <= most:
        grid.append((2**mantissa + torch.arange(2**mantissa)) * 2.0 ** (exponent - mantissa))
        exponent += 1
    grid = torch.cat(grid)
    grid = grid[grid <= most]
    middles, size = (grid[1:].double() + grid[:-1]) / 2, x.contiguous().abs().double()
    below = torch.bucketize(size, middles)
    nearest = torch.where(below % 2 == 0, below, torch.bucketize(size, middles, right=True))
    return torch.where(x.isnan(), x, torch.copysign(grid[nearest], x))
"""
bank.text(None, LOGS[LOGS.index("\n\ndef tensor_scale") :] + TABLE)
bank.slip(None, ("    x = x.clamp(-most, most)\n", "    x = torch.nan_to_num(x, nan=float('nan'), posinf=most, neginf=-most)\n"),
          ("torch.round(x / step) * step", "(torch.round(x / step) * step).clamp(-most, most)"))  # fmt: skip
bank.slip(None, ("torch.where(scale > 0, scale, 1.0)", "scale.clamp(min=1e-38)"))

ROUND = "torch.round(x / step) * step"
bank.hint("form", "round_float returns float32 numbers in the shape of x: the values of the codes, not the codes.")
bank.slip("form", (ROUND, f"({ROUND}).to(torch.float8_e4m3fn)"))
bank.slip("form", (ROUND, f"({ROUND}).half()"))
bank.slip("form", (ROUND, f"{ROUND}, step"))
bank.variant("form", LOGS, ("return torch.copysign(steps * 2.0 ** (exponent - mantissa), x)", "return steps.int()"))

bank.slip(
    "form", ("    _, exponent", "    if x.abs().max() == 0:\n        return x\n    _, exponent")
)  # an empty tensor has no max
bank.slip("one-exponent", ("torch.frexp(x)", "torch.frexp(x.abs().max())"))  # nor here: what is wrong comes first
bank.variant("one-exponent", LOGS, ("torch.log2(size))", "torch.log2(size.max()))"))

bank.hint("one-bit-less",
    "The distance between neighbours is twice or half the right one. torch.frexp has a fraction from 1/2 to 1, so "
    "its exponent is one more than floor(log2 |x|).",
)  # fmt: skip
bank.slip("one-bit-less", ("(exponent - 1)", "exponent"))
bank.slip("one-bit-less", ("(exponent - 1)", "(exponent - 2)"))
bank.variant("one-bit-less", LOGS, ("torch.floor(torch.log2(size))", "(torch.floor(torch.log2(size)) + 1)"))
bank.variant("one-bit-less", BITS, ("drop = 23 - mantissa", "drop = 24 - mantissa"))

bank.hint(
    "cut-off",
    "Digits are cut off, not rounded. Take the nearest number of the format, and the even one if two are equally near.",
)
bank.slip("cut-off", ("torch.round(x / step)", "torch.trunc(x / step)"))
bank.slip("cut-off", ("torch.round(x / step)", "(x / step).int()"))
bank.slip("cut-off", ("torch.round(x / step)", "torch.floor(x / step)"))
bank.slip("cut-off", ("torch.round(x / step)", "torch.ceil(x / step)"))
bank.variant("cut-off", BITS, ("bits + (1 << (drop - 1)) - 1 + even", "bits"))
bank.variant("cut-off", LOGS, (".round()", ".floor()"))

bank.hint("too-many-digits",
    "Large numbers keep more digits than the format has. There are 2 ** mantissa numbers between two powers of "
    "two, so the step grows with |x| and doubles at each power of two.",
)  # fmt: skip
bank.slip("too-many-digits", ("return " + ROUND, "return 1 * x"))
bank.slip("too-many-digits", ("(exponent - 1).clamp(min=least)", "torch.full_like(x, least)"))
bank.slip("too-many-digits", ("torch.exp2((exponent - 1).clamp(min=least) - mantissa)", "2.0 ** -mantissa"))
bank.variant("too-many-digits", BITS, ("torch.where(x.abs() < 2.0**least, small, normal)", "small"))
bank.variant("too-many-digits", LOGS, ("return torch", "return x.half().float()\n    return torch"))

bank.hint(
    "one-exponent",
    "All numbers have the step of the largest one. Each number has its own exponent, which determines its step.",
)
bank.slip("one-exponent", ("torch.frexp(x)", "torch.frexp(x.abs().amax() if x.numel() else x)"))
bank.variant("one-exponent", LOGS, ("torch.log2(size)", "torch.log2(size.max() if x.numel() else size)"))

bank.hint("wrong-rounding",
    "These are not the nearest numbers of the format. The step is 2 ** (exponent - mantissa), with the exponent of "
    "|x|; round x / step to an integer.",
)  # fmt: skip
bank.slip("wrong-rounding", ("torch.exp2(", "torch.exp("))
bank.slip("wrong-rounding", (ROUND, "torch.round(x / step)"))
bank.slip("wrong-rounding", (ROUND, f"({ROUND}).abs()"))
bank.slip("too-many-digits", ("torch.frexp(x)", "torch.frexp(x / most)"))
bank.variant(
    "wrong-rounding",
    LOGS,
    ("torch.copysign(steps * 2.0 ** (exponent - mantissa), x)", "steps * 2.0 ** (exponent - mantissa)"),
)
bank.variant("wrong-rounding", LOGS, ("steps * 2.0 ** (exponent - mantissa)", "steps"))

bank.hint(
    "halves",
    "A number halfway between two goes to the even neighbour, as with torch.round, not always up or away from 0.",
)
bank.slip("halves", (ROUND, "torch.floor(x / step + 0.5) * step"))
bank.slip("halves", (ROUND, "torch.copysign(torch.floor((x / step).abs() + 0.5) * step, x)"))
bank.variant("halves", BITS, (" - 1 + even", ""))
bank.variant("halves", LOGS, (".round()", ".add(0.5).floor()"))

bank.hint("input-changed", "You changed x, which may be a weight's float32 master. Clamp and round into a new tensor.")
bank.slip(
    "input-changed",
    ("x = x.clamp(-most, most)", "x.clamp_(-most, most)"),
    ("return " + ROUND, "return x.div_(step).round_().mul_(step)"),
)
bank.variant(
    "input-changed",
    BITS,
    ("    return torch.where(x.isnan(), x, y)", "    return x.copy_(torch.where(x.isnan(), x, y))"),
)

bank.hint("too-fine",
    "Numbers below the least normal one come out too fine. The exponent stops at `least`: below it, the step no "
    "longer shrinks.",
)  # fmt: skip
bank.slip("too-fine", (".clamp(min=least)", ""))
bank.slip("too-fine", (".clamp(min=least)", ".clamp(min=least - mantissa)"))
bank.slip("too-fine", (".clamp(min=least) - mantissa", " - mantissa"), (ROUND, f"({ROUND}).nan_to_num(0.0)"))
bank.variant("too-fine", BITS, ("torch.where(x.abs() < 2.0**least, small, normal)", "normal"))
bank.variant("too-fine", LOGS, (".clamp(min=least)", ".clamp(min=least - mantissa)"))

bank.hint("flushed",
    "All numbers below the least normal one become 0. Between it and 0 are the subnormal numbers, with the same "
    "step as at the least normal one.",
)  # fmt: skip
bank.slip("flushed", ("return " + ROUND, f"return torch.where(x.abs() < 2.0**least, 0 * x, {ROUND})"))
bank.variant("flushed", BITS, ("small = (x / grid).round() * grid", "small = 0 * x"))
bank.variant("flushed", LOGS, ("return torch", "steps = torch.where(size < 2.0**least, 0.0, steps)\n    return torch"))

bank.hint("wrong-small",
    "Numbers near 0 come out wrong. Below the least normal number the step is 2 ** (least - mantissa), down to 0; "
    "0 itself stays 0.",
)  # fmt: skip
bank.slip("wrong-small", (".clamp(min=least)", ".clamp(min=least + 1)"))
bank.slip(
    "wrong-small", ("return " + ROUND, f"return torch.where(x.abs() < 2.0 ** (least - mantissa), 0 * x, {ROUND})")
)
bank.variant(
    "wrong-small",
    TABLE + LOGS[LOGS.index("\n\ndef tensor_scale") :],
    (
        "torch.arange(2**mantissa) * 2.0 ** (least - mantissa)",
        "torch.arange(2**mantissa) * 2.0 ** (least - mantissa - 1)",
    ),
)

bank.hint("not-saturated",
    "Numbers beyond the range don't become the largest one. `most` is the limit, whatever the formula gives: clamp "
    "to -most and most.",
)  # fmt: skip
bank.slip("not-saturated", ("    x = x.clamp(-most, most)\n", ""))
bank.slip("not-saturated", ("x.clamp(-most, most)", "x.clamp(max=most)"))
bank.slip(
    "not-saturated",
    ("    x = x.clamp(-most, most)\n", ""),
    ("return " + ROUND, f"y = {ROUND}\n    return torch.where(y.abs() > most, y * float('inf'), y)"),
)
bank.slip(
    "not-saturated",
    ("    x = x.clamp(-most, most)\n", ""),
    ("return " + ROUND, f"y = {ROUND}\n    return torch.where(y.abs() > most, float('nan'), y)"),
)
bank.variant("not-saturated", BITS, (".clamp(-most, most)", ""))
bank.variant("not-saturated", LOGS, (".clamp(max=most)", ""))

bank.hint(
    "wrong-large",
    "Numbers beyond the range, and infinities, must become the largest number of the format, with their sign.",
)
bank.slip("wrong-large", ("x = x.clamp(-most, most)", "x = torch.where(x.abs() > most, most, x)"))
bank.slip("wrong-large", ("x = x.clamp(-most, most)", "x = torch.where(x.abs() > most, 0, x)"))
bank.variant(
    "wrong-large",
    LOGS,
    (
        "torch.copysign(steps * 2.0 ** (exponent - mantissa), x)",
        "torch.where(x.abs() > most, most, torch.copysign(steps * 2.0 ** (exponent - mantissa), x))",
    ),
)

bank.hint(
    "infinities",
    "An infinity becomes NaN in your computation, because its exponent is infinite or arbitrary. Clamp x before "
    "you compute anything from it.",
)
bank.slip("infinities", ("x = x.clamp(-most, most)\n    _, exponent = torch.frexp(x)", "exponent = torch.floor(torch.log2(x.abs())) + 1"),
          ("return " + ROUND, f"return ({ROUND}).clamp(-most, most)"))  # fmt: skip
bank.variant(
    "infinities",
    LOGS,
    ("x.abs().clamp(max=most)", "x.abs()"),
    ("steps * 2.0 ** (exponent - mantissa)", "(steps * 2.0 ** (exponent - mantissa)).clamp(max=most)"),
)

bank.hint("nan-lost", "NaN becomes a number. NaN says that something went wrong: let it through.")
bank.slip("nan-lost", ("x = x.clamp(-most, most)", "x = x.nan_to_num(0.0).clamp(-most, most)"))
bank.slip("nan-lost", ("return " + ROUND, f"return ({ROUND}).nan_to_num(most)"))
bank.variant("nan-lost", BITS, ("return torch.where(x.isnan(), x, y)", "return torch.where(x.isnan(), most, y)"))

bank.hint("hard-coded",
    "E4M3 and E5M2 come out right, but another format doesn't. Take bits and limits from the arguments.",
)  # fmt: skip
CAST = "x.clamp(-most, most).to(torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2).float()"
bank.slip("hard-coded", ("return " + ROUND, f"return {CAST}"))
bank.slip("hard-coded", ("    x = x.clamp", f"    if mantissa in (2, 3):\n        return {CAST}\n    x = x.clamp"))
bank.slip("hard-coded", ("min=least)", "min=-6 if mantissa == 3 else -14)"))
bank.slip("hard-coded", ("- mantissa)", "- (3 if most == 448 else 2))"))
bank.variant("hard-coded", LOGS, ("    size =", f"    return {CAST}\n    size ="))
bank.variant("hard-coded", BITS, ("drop = 23 - mantissa", "drop = 20 if mantissa == 3 else 21"))

bank.hint("scale-form", "tensor_scale returns one float32 number, a tensor of shape (), whatever the shape of x.")
bank.slip("scale-form", ("x.abs().amax() / most", "x.abs().amax(-1, keepdim=True) / most"))
bank.slip("scale-form", ("torch.where(scale > 0, scale, 1.0)", "scale.item()"))
bank.variant("scale-form", LOGS, (".clamp(min=1e-30) / most", ".clamp(min=1e-30).item() / most"))

bank.hint("upside-down", "This is one divided by the scale. x / scale must fit, so the scale is large where x is.")
bank.slip("upside-down", ("x.abs().amax() / most", "most / x.abs().amax()"))
bank.variant("upside-down", LOGS, (".clamp(min=1e-30) / most", ".clamp(min=1e-30).reciprocal() * most"))

bank.hint("one-sided", "The number farthest from 0 may be negative: take magnitudes.")
bank.slip("one-sided", ("x.abs().amax() / most", "x.amax() / most"))
bank.variant("one-sided", LOGS, ("torch.maximum(x.max(), -x.min())", "x.max()"))

bank.slip("one-sided", ("F.pad(x.abs(),", "F.pad(x,"))
bank.variant("one-sided", LOGS, ("x.abs().split", "x.split"))

bank.hint(
    "wrong-scale",
    "Divided by this scale, the largest magnitude is not `most`. The scale is the largest magnitude divided by `most`.",
)
bank.slip("wrong-scale", ("x.abs().amax() / most", "x.abs().mean() / most"))
bank.slip("wrong-scale", ("x.abs().amax() / most", "x.abs().amax()"))
bank.slip("wrong-scale", ("x.abs().amax() / most", "x.abs().amax().clamp(min=1e-4) / most"))
bank.slip("wrong-scale", ("return torch.where(scale > 0, scale, 1.0)", "return torch.exp2(torch.log2(scale).ceil())"))
bank.slip("wrong-scale", ("scale = x.abs().amax() / most", "scale = 3 * x.std() / most"))
bank.variant("wrong-scale", BITS, ("top / most if", "top if"))

REPEAT = ".repeat_interleave(size, -1)[..., : x.shape[-1]]"
bank.hint("blocks-form",
    "block_scales returns float32 in the shape of x: each number gets the scale of its block, also in a last block "
    "that is shorter.",
)  # fmt: skip
bank.slip("blocks-form", (REPEAT, ""))
bank.slip("blocks-form", ("[..., : x.shape[-1]]", ""))
bank.slip("blocks-form", ("return torch.exp2(exponent)", "return exponent.to(torch.int32)"))
bank.variant("blocks-form", LOGS, ("parts.append(scale.expand(part.shape))", "parts.append(scale)"))

bank.hint("rounded-down",
    "A number of the block is larger than `most` times its scale, so it is cut off. Round the exponent up.",
)  # fmt: skip
bank.slip("rounded-down", (".ceil()", ".floor()"))
bank.slip("rounded-down", (".ceil()", ".round()"))
bank.slip(
    "rounded-down",
    (
        "torch.log2(blocks.amax(-1).double() / most).ceil()",
        "(torch.log2(blocks.amax(-1)).floor() - math.log2(most) // 1)",
    ),
    ("    blocks =", "    import math\n    blocks ="),
)
bank.variant("rounded-down", BITS, ("(exponent - (fraction == 0.5).int())", "(exponent - 1)"))
bank.variant("rounded-down", LOGS, ("torch.where(scale * most < top, 2 * scale, scale)", "scale"))

bank.hint(
    "no-power",
    "The scale of a block is a power of two: an exponent in a byte, without a mantissa. Round the exponent up.",
)
bank.slip("no-power", ("torch.log2(blocks.amax(-1).double() / most).ceil()", "torch.log2(blocks.amax(-1) / most)"))
bank.slip("no-power", ("torch.exp2(exponent)", "(blocks.amax(-1) / most)"))
bank.variant("no-power", LOGS, ("torch.exp2(torch.floor(torch.log2(top / most)).clamp(-127, 127))", "top / most"))

bank.hint("twice-too-large",
    "A smaller power of two is enough. Where the largest magnitude is exactly `most` times a power of two, this "
    "power is the scale.",
)  # fmt: skip
bank.slip("twice-too-large", (".ceil()", ".floor().add(1)"))
bank.slip("twice-too-large", (".ceil()", ".ceil().add(1)"))
bank.variant("twice-too-large", BITS, ("(exponent - (fraction == 0.5).int())", "exponent"))
bank.variant("twice-too-large", LOGS, ("scale * most < top", "scale * most <= top"))

bank.hint(
    "one-for-all",
    "All numbers share one scale here, or all numbers of a row. Each block of `size` numbers has its own.",
)
bank.slip("one-for-all", ("blocks.amax(-1)", "blocks.amax(-1).amax(-1, keepdim=True).expand(blocks.shape[:-1])"))
bank.slip("one-for-all", ("blocks.amax(-1)", "blocks.amax().expand(blocks.shape[:-1])"))
bank.variant("one-for-all", LOGS, ("top = part.amax(-1, keepdim=True)", "top = x.abs().amax(-1, keepdim=True)"))

bank.hint("size-fixed", "Blocks of 32 come out right, others don't: their length is `size`.")
bank.slip(
    "size-fixed", ("% size", "% 32"), ("(-1, size)", "(-1, 32)"), ("repeat_interleave(size", "repeat_interleave(32")
)
bank.variant("size-fixed", LOGS, (".split(size,", ".split(32,"))

bank.hint("over-rows", "Your blocks run over the end of a row. Each row of the last axis begins with a new block.")
bank.slip(
    "over-rows",
    (
        "    blocks =",
        "    if x.dim() > 1:\n        return block_scales(x.flatten(), most, size).view(x.shape)\n    blocks =",
    ),
)
bank.variant(
    "over-rows",
    LOGS,
    (
        "    parts =",
        "    if x.dim() > 1:\n        return block_scales(x.flatten(), most, size).view(x.shape)\n    parts =",
    ),
)

bank.hint("wrong-exponent",
    "These are not the scales of the blocks. A scale is the least power of two by which the largest magnitude of "
    "`size` consecutive numbers of the last axis can be divided to be at most `most`.",
)  # fmt: skip
bank.slip("wrong-exponent", ("blocks.amax(-1)", "blocks.mean(-1)"))
bank.slip("wrong-exponent", ("blocks.amax(-1).double()", "blocks.amax(-1)"))
bank.slip("wrong-exponent", ("blocks.amax(-1).double() / most", "blocks.amax(-1)"))
bank.variant("wrong-exponent", LOGS, ("top = part.amax(-1, keepdim=True)", "top = part.mean(-1, keepdim=True)"))

bank.hint(
    "below-e8m0",
    "The exponent of a scale can't go below -127, the least that the byte can hold. Clamp it there, and no higher.",
)
bank.slip("below-e8m0", (".clamp(min=-127)", ".clamp(min=-149)"))
bank.variant("below-e8m0", BITS, (".clamp(min=-127)", ""))

bank.hint(
    "no-range",
    "A tensor or a block of zeros needs a scale too: any positive, finite number. With 0, you compute 0 / 0, which "
    "is NaN.",
)
bank.slip("no-range", ("torch.where(scale > 0, scale, 1.0)", "scale"))
bank.slip(
    "no-range",
    (
        "blocks.amax(-1).double() / most).ceil().clamp(min=-127)",
        "blocks.amax(-1).double() / most).ceil().clamp(min=-127).where(blocks.amax(-1) > 0, -torch.inf)",
    ),
)
bank.variant("no-range", LOGS, (".clamp(min=1e-30) / most", " / most"))

bank.hint(
    "loops",
    "You loop over single numbers or rows. PyTorch's operations take whole tensors: a weight has millions of numbers.",
)
bank.slip("loops", ("    blocks =", "    for one in x.flatten():\n        one * 1\n    blocks ="))
bank.slip("loops", ("blocks.amax(-1)", "torch.stack([row.amax(-1) for row in blocks])"))
bank.variant("loops", BITS, ("    drop =", "    for one in x.flatten():\n        one.abs()\n    drop ="))

bank.slip(None, ("    exponent = torch.log2(blocks.amax(-1).double() / most).ceil().clamp(min=-127).float()\n",
          "    top = blocks.amax(-1).double()\n    exponent = torch.full(top.shape, -127.0)\n    for k in range(-127, 127):\n        exponent = torch.where(top > most * 2.0**k, k + 1.0, exponent)\n"))  # fmt: skip
