"""Answers to balise 4."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 4, whole=True)

# a function with a backward of its own; the layer's product written out
FUNCTION = """
class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, zero, bits, symmetric):
        steps = torch.round(x / scale) + zero
        least, most = limits(bits, symmetric)
        ctx.save_for_backward((steps >= least) & (steps <= most))
        return (steps.clamp(least, most) - zero) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None, None


def fake_quantize(x, scale, zero, bits=8, symmetric=False):
    return Through.apply(x, scale, zero, bits, symmetric)


def fake_layer(layer, x, high, bits):
    axes = tuple(range(1, layer.weight.dim()))
    top = layer.weight.detach().abs().amax(axes, keepdim=True)
    weight = fake_quantize(layer.weight, *affine(-top, top, bits, True), bits, True)
    x = fake_quantize(x, *affine(0 * high, high, bits), bits)
    if isinstance(layer, nn.Linear):
        return x @ weight.T + (0 if layer.bias is None else layer.bias)
    return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
"""
bank.text(None, FUNCTION)

# a clamp that knows its own gradient, and the rest detached; a copy of the layer's function
CLAMPED = """
def fake_quantize(x, scale, zero, bits=8, symmetric=False):
    least, most = limits(bits, symmetric)
    kept = torch.minimum(torch.maximum(x, (least - zero) * scale), (most - zero) * scale)
    return kept + (dequantize(quantize(kept, scale, zero, bits, symmetric), scale, zero) - kept).detach()


def fake_layer(layer, x, high, bits):
    scale, zero = affine(*extremes(layer.weight.detach(), 0), bits, True)
    weight = layer.weight
    inside = (weight.abs() <= scale * (2 ** (bits - 1) - 0.5)).float()
    back = dequantize(quantize(weight.detach(), scale, zero, bits, True), scale, zero)
    weight = back + weight * inside - (weight * inside).detach()
    low = torch.zeros(())
    x = fake_quantize(x, *affine(low, high, bits, False), bits, False)
    if hasattr(layer, "stride"):
        way = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
        return F.conv2d(x, weight, layer.bias, **way)
    return F.linear(x, weight, layer.bias)
"""
bank.text(None, CLAMPED)
bank.slip(None, ("torch.zeros_like(high)", "high * 0"))
bank.slip(
    None,
    (
        "back + (x - x.detach()) * ((steps >= least) & (steps <= most))",
        "torch.where((steps >= least) & (steps <= most), x + (back - x).detach(), back)",
    ),
)

PASSES = "back + (x - x.detach()) * ((steps >= least) & (steps <= most))"
bank.hint("form", "fake_quantize returns one float32 tensor with the shape of x: real numbers, not integers.")
bank.slip("form", (PASSES, "quantize(x, scale, zero, bits, symmetric)"))
bank.slip("form", (PASSES, "back, (steps >= least) & (steps <= most)"))
bank.variant(
    "form", FUNCTION, ("return (steps.clamp(least, most) - zero) * scale", "return steps.clamp(least, most).int()")
)

bank.hint(
    "unrounded",
    "What you return is not rounded. Only the gradient ignores the rounding: the value is that of "
    "dequantize(quantize(x)).",
)
bank.slip(
    "unrounded", (PASSES, "x * ((steps >= least) & (steps <= most)) + back * ~((steps >= least) & (steps <= most))")
)
bank.slip("unrounded", (PASSES, "x.clamp((least - zero) * scale, (most - zero) * scale)"))
bank.slip("unrounded", (PASSES, "back + x - back.detach()"))
bank.variant(
    "unrounded",
    CLAMPED,
    (" + (dequantize(quantize(kept, scale, zero, bits, symmetric), scale, zero) - kept).detach()", ""),
)

bank.hint(
    "added",
    "The value is not the rounded x: something is added to it. The term that carries the gradient must have the "
    "value 0, like x - x.detach().",
)
bank.slip("added", ("(x - x.detach())", "x"))
bank.slip("added", ("(x - x.detach())", "(x - back)"), ("return back", "return back + back"))
bank.variant("added", CLAMPED, (" - kept).detach()", ").detach()"))

bank.hint(
    "wrong-values",
    "These are not the real numbers that the integers of x represent: dequantize(quantize(x)), with the same bits "
    "and kind.",
)
bank.slip("wrong-values", ("quantize(x, scale, zero, bits, symmetric)", "quantize(x, scale, zero, 8, symmetric)"))
bank.slip("wrong-values", ("return back + (x", "return back / scale + (x"))
bank.slip("wrong-values", ("return back + (x", "return (steps - zero) * scale + (x"))
bank.variant(
    "wrong-values", FUNCTION, ("(steps.clamp(least, most) - zero) * scale", "steps.clamp(least, most) * scale")
)
bank.slip(
    "wrong-values",
    (
        "quantize(x, scale, zero, bits, symmetric), scale, zero)",
        "quantize(x, scale, zero, bits, symmetric), scale, 0 * zero)",
    ),
)

bank.hint("borrowed", "This is PyTorch's own fake quantization. Write it yourself, both value and gradient.")
bank.slip(
    "borrowed",
    (
        "    least, most",
        "    if scale.dim() == 0:\n        return torch.fake_quantize_per_tensor_affine(x, scale, zero, *limits(bits, symmetric))\n    least, most",
    ),
)
bank.variant(
    "borrowed",
    FUNCTION,
    (
        "    return Through.apply",
        "    if scale.dim() == 0:\n        return torch.fake_quantize_per_tensor_affine(x, scale, zero, *limits(bits, symmetric))\n    return Through.apply",
    ),
)

bank.hint(
    "no-gradient",
    "No gradient arrives at x: rounding has the derivative 0, or you detached the value. Add a term with value 0 "
    "and gradient 1.",
)
bank.slip("no-gradient", (PASSES, "back"))
bank.slip("no-gradient", (PASSES, "dequantize(quantize(x, scale, zero, bits, symmetric), scale, zero)"))
bank.slip("no-gradient", (PASSES, "((torch.round(x / scale) + zero).clamp(least, most) - zero) * scale"))
bank.variant("no-gradient", FUNCTION, ("return grad * inside, None", "return grad * 0, None"))
bank.variant("no-gradient", CLAMPED, ("return kept + (", "return kept.detach() + ("))

bank.hint(
    "passes-everywhere",
    "The gradient also passes where numbers are saturated. A small change of x changes nothing there, so the "
    "gradient must be 0.",
)
bank.slip("passes-everywhere", (" * ((steps >= least) & (steps <= most))", ""))
bank.slip("passes-everywhere", ("((steps >= least) & (steps <= most))", "((steps >= least) | (steps <= most))"))
bank.variant("passes-everywhere", FUNCTION, ("return grad * inside, None", "return grad, None"))
bank.variant(
    "passes-everywhere",
    CLAMPED,
    ("kept = torch.minimum(torch.maximum(x, (least - zero) * scale), (most - zero) * scale)", "kept = x"),
)

bank.hint(
    "passes-outside",
    "It is the other way round: the gradient passes within the range and is 0 where numbers are saturated.",
)
bank.slip("passes-outside", ("* ((steps >= least) & (steps <= most))", "* ((steps < least) | (steps > most))"))
bank.variant("passes-outside", FUNCTION, ("return grad * inside, None", "return grad * ~inside, None"))

bank.hint(
    "zero-point-in-range",
    "A number is saturated when its integer, including the zero point, is outside the limits. You leave out the "
    "zero point, so another range is cut off.",
)
bank.slip("zero-point-in-range", ("steps = torch.round(x / scale) + zero", "steps = torch.round(x / scale)"))
bank.variant(
    "zero-point-in-range",
    FUNCTION,
    (
        "ctx.save_for_backward((steps >= least) & (steps <= most))",
        "ctx.save_for_backward((steps - zero >= least) & (steps - zero <= most))",
    ),
)

bank.hint("one-end", "A range has two ends, and numbers are saturated at both.")
bank.slip("one-end", ("((steps >= least) & (steps <= most))", "(steps <= most)"))
bank.slip("one-end", ("((steps >= least) & (steps <= most))", "(steps >= least)"))
bank.slip("one-end", ("((steps >= least) & (steps <= most))", "(steps.abs() <= most)"))
bank.variant(
    "one-end",
    CLAMPED,
    (
        "torch.minimum(torch.maximum(x, (least - zero) * scale), (most - zero) * scale)",
        "torch.minimum(x, (most - zero) * scale)",
    ),
)
bank.variant("one-end", FUNCTION, ("(steps >= least) & (steps <= most)", "steps >= least"))

bank.hint(
    "scaled-gradient",
    "The gradient is multiplied or divided by the scale. x and its rounded value have the same unit, so the "
    "gradient passes unchanged: times 1.",
)
bank.slip("scaled-gradient", ("(x - x.detach())", "(x - x.detach()) * scale"))
bank.slip("scaled-gradient", ("(x - x.detach())", "(x - x.detach()) / scale"))
bank.variant(
    "scaled-gradient",
    FUNCTION,
    (
        "ctx.save_for_backward((steps >= least) & (steps <= most))",
        "ctx.save_for_backward(((steps >= least) & (steps <= most)) * scale)",
    ),
)

bank.hint(
    "wrong-gradient",
    "The gradient at x is wrong. It is 1 where the integer of x is within the limits, and 0 elsewhere.",
)
bank.slip("wrong-gradient", ("(x - x.detach())", "(x - x.detach()) * 2"))
bank.slip("wrong-gradient", ("(x - x.detach())", "(x.detach() - x)"))
bank.variant("wrong-gradient", FUNCTION, ("return grad * inside, None", "return -grad * inside, None"))

bank.hint("input-changed", "You changed x, the float32 weight that training updates. Work on a new tensor.")
bank.slip("input-changed", ("    return back", "    x.data.copy_(back)\n    return back"))
bank.variant(
    "input-changed",
    FUNCTION,
    (
        "    return Through.apply(x, scale, zero, bits, symmetric)",
        "    out = Through.apply(x, scale, zero, bits, symmetric)\n    x.data.copy_(out.data)\n    return out",
    ),
)

bank.hint("layer-form", "fake_layer returns the output of the layer: one tensor with the shape of layer(x). A "
                           "convolution keeps its stride, padding, dilation and groups.")  # fmt: skip
bank.slip(
    "layer-form", ("return torch.func.functional_call(layer, ", "return weight, torch.func.functional_call(layer, ")
)
bank.slip(
    "layer-form",
    ('return torch.func.functional_call(layer, {"weight": weight}, fake_quantize(x, *of_x, bits))', "return weight"),
)
bank.variant(
    "layer-form",
    FUNCTION,
    (
        "return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)",
        "return F.conv2d(x, weight, layer.bias, groups=layer.groups)",
    ),
)

bank.variant(
    "layer-form", FUNCTION, ("layer.padding, layer.dilation, layer.groups)", "layer.padding, groups=layer.groups)")
)

bank.hint(
    "inputs-not-rounded",
    "Round the inputs too: from 0 to high, with the same number of bits, of the asymmetric kind.",
)
bank.slip("inputs-not-rounded", ("fake_quantize(x, *of_x, bits)", "x"))
bank.slip("inputs-not-rounded", ("fake_quantize(x, *of_x, bits))", "x.clamp(0, high))"))
bank.variant("inputs-not-rounded", FUNCTION, ("    x = fake_quantize(x, *affine(0 * high, high, bits), bits)\n", ""))

bank.hint("weights-not-rounded", "The weights are not rounded: you call the layer with its float32 weights.")
bank.slip("weights-not-rounded", ('{"weight": weight}', "{}"))
bank.variant(
    "weights-not-rounded",
    FUNCTION,
    ("x @ weight.T", "x @ layer.weight.T"),
    ("F.conv2d(x, weight,", "F.conv2d(x, layer.weight,"),
)

bank.hint(
    "one-scale",
    "The weights of all channels share one scale here. Give each output channel, along axis 0, its own scale.",
)
bank.slip("one-scale", ("extremes(layer.weight, 0)", "extremes(layer.weight)"))
bank.variant("one-scale", FUNCTION, ("amax(axes, keepdim=True)", "max()"))

bank.hint(
    "asymmetric-weights",
    "Weights are of the symmetric kind: their range reaches as far below 0 as above, and the zero point is 0.",
)
bank.slip(
    "asymmetric-weights",
    (
        "of_weight = affine(*extremes(layer.weight, 0), bits, symmetric=True)",
        "of_weight = affine(*extremes(layer.weight, 0), bits)",
    ),
    ("fake_quantize(layer.weight, *of_weight, bits, symmetric=True)", "fake_quantize(layer.weight, *of_weight, bits)"),
)
bank.variant(
    "asymmetric-weights",
    CLAMPED,
    ("affine(*extremes(layer.weight.detach(), 0), bits, True)", "affine(*extremes(layer.weight.detach(), 0), bits)"),
    ("inside = (weight.abs() <= scale * (2 ** (bits - 1) - 0.5)).float()", "inside = 1.0"),
    ("quantize(weight.detach(), scale, zero, bits, True)", "quantize(weight.detach(), scale, zero, bits)"),
)

bank.hint("bias-lost", "The layer's bias is missing. It is not rounded, and is added after the product.")
bank.slip(
    "bias-lost",
    ('{"weight": weight}', '{"weight": weight, **({} if layer.bias is None else {"bias": 0 * layer.bias})}'),
)
bank.variant(
    "bias-lost",
    FUNCTION,
    ("(0 if layer.bias is None else layer.bias)", "0"),
    ("weight, layer.bias, layer.stride", "weight, None, layer.stride"),
)

bank.hint(
    "wrong-layer",
    "The layer gives other numbers. Round its weights (symmetric, with one scale per channel) and its inputs (from "
    "0 to high) with `bits`; the rest is as in layer(x).",
)
bank.slip("wrong-layer", ("extremes(layer.weight, 0)", "extremes(layer.weight, 1)"))
bank.variant("wrong-layer", FUNCTION, ("axes = tuple(range(1, layer.weight.dim()))", "axes = 0"))

bank.hint(
    "other-inputs",
    "The inputs are rounded on another grid. Use the asymmetric kind, from 0 to high, whatever x holds, with "
    "`bits` in both affine and fake_quantize.",
)
bank.slip("other-inputs", ("high, bits)\n", "high)\n"), ("fake_quantize(x, *of_x, bits)", "fake_quantize(x, *of_x)"))
bank.slip("other-inputs", ("torch.zeros_like(high), high, bits)", "-high, high, bits)"))
bank.slip("other-inputs", ("torch.zeros_like(high), high, bits)", "*extremes(x), bits)"))
bank.slip(
    "other-inputs",
    ("high, bits)\n", "high, bits, True)\n"),
    ("fake_quantize(x, *of_x, bits)", "fake_quantize(x, *of_x, bits, True)"),
)
bank.variant("other-inputs", FUNCTION, ("affine(0 * high, high, bits)", "affine(-high, high, bits)"))

bank.hint(
    "masters-lost",
    "The layer no longer holds its float32 weights. Training moves them by less than a step of the grid: if you "
    "keep them rounded, they never leave it. Call the layer with another weight, and don't change its own.",
)
bank.slip(
    "masters-lost",
    (
        'return torch.func.functional_call(layer, {"weight": weight}, fake_quantize(x, *of_x, bits))',
        "layer.weight.data = weight.detach()\n    return layer(fake_quantize(x, *of_x, bits))",
    ),
)
bank.slip(
    "masters-lost",
    (
        'return torch.func.functional_call(layer, {"weight": weight}, fake_quantize(x, *of_x, bits))',
        "layer.weight = nn.Parameter(weight.detach())\n    return layer(fake_quantize(x, *of_x, bits))",
    ),
)
bank.variant("masters-lost", CLAMPED, ("    weight = back +", "    layer.weight.data = back\n    weight = back +"))

bank.hint(
    "inputs-detached",
    "The gradient stops at the inputs, so the layers before this one would learn nothing. Call fake_quantize on x "
    "itself.",
)
bank.slip("inputs-detached", ("fake_quantize(x, *of_x, bits)", "fake_quantize(x.detach(), *of_x, bits)"))
bank.slip("inputs-detached", ("fake_quantize(x, *of_x, bits)", "dequantize(quantize(x, *of_x, bits), *of_x)"))
bank.variant("inputs-detached", FUNCTION, ("x = fake_quantize(x,", "x = fake_quantize(x.detach(),"))

bank.hint(
    "weights-detached",
    "No gradient arrives at the layer's float32 weights, so an optimizer cannot move them. Call fake_quantize on layer.weight itself.",
)
bank.slip("weights-detached", ("fake_quantize(layer.weight,", "fake_quantize(layer.weight.detach(),"))
bank.slip("weights-detached", ("fake_quantize(layer.weight,", "fake_quantize(layer.weight.data,"))
bank.variant("weights-detached", FUNCTION, ("fake_quantize(layer.weight,", "fake_quantize(layer.weight.data,"))

bank.hint(
    "ends-cut",
    "The largest weight of each channel gets no gradient, or half of it. It is at the end of the range, and is not "
    "saturated: use `<=` and `>=` on the rounded integers. torch.minimum, and clamp with tensors as limits, halve "
    "the gradient there.",
)
bank.slip("ends-cut", ("(steps >= least) & (steps <= most)", "(steps > least) & (steps < most)"))
bank.slip("ends-cut", ("return back + (x - x.detach()) * ((steps >= least) & (steps <= most))",
          "kept = torch.minimum(torch.maximum(x, (least - zero) * scale), (most - zero) * scale)\n    return kept + (back - kept).detach()"))  # fmt: skip
bank.variant("ends-cut", FUNCTION, ("(steps >= least) & (steps <= most)", "(steps > least) & (steps < most)"))

bank.hint(
    "eight-bits",
    "You compute the scales with `bits`, but don't pass it to fake_quantize, which then uses 8 and saturates too "
    "late. Pass `bits` there too.",
)
bank.slip(
    "eight-bits", ("*of_weight, bits, symmetric=True)", "*of_weight, symmetric=True)"), ("*of_x, bits)", "*of_x)")
)
bank.slip("eight-bits", ("fake_quantize(x, *of_x, bits)", "fake_quantize(x, *of_x)"))
bank.variant("eight-bits", CLAMPED, ("bits, False), bits, False)", "bits, False))"))

bank.hint(
    "wrong-layer-gradient",
    "The gradients of the inputs, weights and bias are wrong. They are those of the layer with rounded weights and "
    "inputs, passed through by your fake_quantize.",
)
bank.slip(
    "wrong-layer-gradient",
    ('{"weight": weight}', '{"weight": weight, **({} if layer.bias is None else {"bias": layer.bias.detach()})}'),
)
bank.slip(
    "wrong-layer-gradient",
    (
        "fake_quantize(layer.weight, *of_weight, bits, symmetric=True)",
        "fake_quantize(layer.weight, *of_weight, bits, symmetric=True) * 2 - fake_quantize(layer.weight, *of_weight, bits, symmetric=True).detach()",
    ),
)
bank.variant(
    "wrong-layer-gradient",
    FUNCTION,
    ("else layer.bias)", "else layer.bias.detach())"),
    ("weight, layer.bias, layer.stride", "weight, layer.bias.detach(), layer.stride"),
)

bank.hint(
    "old-scale",
    "After an optimizer step the weights have changed, and so has their range: compute it again in each call.",
)
bank.slip(
    "old-scale",
    (
        "    with torch.no_grad():\n        of_weight = affine(*extremes(layer.weight, 0), bits, symmetric=True)\n",
        '    with torch.no_grad():\n        if not hasattr(layer, "of_weight"):\n            layer.of_weight = affine(*extremes(layer.weight, 0), bits, symmetric=True)\n        of_weight = layer.of_weight\n',
    ),
)
bank.variant(
    "old-scale",
    FUNCTION,
    ("    weight = fake", "    layer.top = top = getattr(layer, 'top', top)\n    weight = fake"),
)
