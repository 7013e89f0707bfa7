"""Balise 4: rounding with a gradient, and a layer that is rounded at each call: values and gradients, written out."""

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent
from dlojz_tp.judging.checks.compression.exact_quantization import CHANNELS, SIGNED, USUAL, copied, limits_of, quantized
from dlojz_tp.measure.operations import Operations

DRAWN = torch.Generator().manual_seed(4)


def whole(number):
    return torch.tensor(number, dtype=torch.int32)


def drawn(*shape):
    return torch.rand(shape, generator=DRAWN) * 2 - 1


# many are saturated, none lies near an end of its range: either gradient is right from there to half a step beyond
FEW = drawn(3, 6) * 4, torch.tensor(0.5), whole(2), 2, False
CASES = [USUAL, SIGNED, CHANNELS, FEW, (drawn(12) * 3, torch.tensor(0.25), whole(0), 3, True)]


def ends(scale, zero, bits, symmetric):
    return [(one - zero) * scale for one in limits_of(bits, symmetric)]


def away_from_ends(x, scale, *way):
    """x, with numbers next to an end moved inwards by a step."""
    low, high = ends(scale, *way)
    x = torch.where((x - low).abs() < scale, low + 1.2 * scale, x)
    return torch.where((x - high).abs() < scale, high - 1.2 * scale, x)


CASES = [(away_from_ends(*case), *case[1:]) for case in CASES]


def inside(x, scale, *way):
    low, high = ends(scale, *way)
    return ((x > low) & (x < high)).float()


def rounded(x, scale, zero, *way):
    return (quantized(x, scale, zero, *way).int() - zero) * scale


def made(layer, bits):
    """With a largest weight in each channel that makes its scale a power of two."""
    weight = drawn(*layer.weight.shape)
    most = 2 ** (bits - 1) - 1
    for k, row in enumerate(weight.view(len(weight), -1)):
        row.mul_(0.9 * most / 2 ** (bits + k))
        row[k % len(row)] = (-1) ** k * most / 2 ** (bits + k)
    layer.weight.data = weight
    if layer.bias is not None:
        layer.bias.data = drawn(len(weight))  # what PyTorch draws differs from run to run
    return layer


#         layer, x, high, bits
LAYERS = [
    (made(nn.Linear(6, 3), 4), drawn(5, 6).abs() * 3, torch.tensor(15 / 8), 4),
    (made(nn.Linear(3, 4, bias=False), 2), drawn(4, 3).abs(), torch.tensor(0.75), 2),
    (made(nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=(2, 1)), 8), drawn(2, 2, 6, 4).abs(), torch.tensor(255 / 256), 8),
    (made(nn.Conv2d(4, 4, 2, padding=1, groups=2), 4), drawn(2, 4, 5, 4).abs(), torch.tensor(15 / 16), 4),
]  # fmt: skip
LAYERS = [
    (layer, away_from_ends(x, high / (2**bits - 1), whole(0), bits, False).clamp(min=0), high, bits)
    for layer, x, high, bits in LAYERS
]


def scales_of(weight, bits):
    rows = weight.detach().flatten(1).abs().amax(1) / (2 ** (bits - 1) - 1)
    return rows.view(-1, *[1] * (weight.dim() - 1))


def layer_of(layer, x, high, bits):
    """(what comes out, gradients of its sum of squares for x, weight and bias): rounded leaves, then the mask of x."""
    scale, step = scales_of(layer.weight, bits), high / (2**bits - 1)
    weight = rounded(
        layer.weight.detach(), scale, torch.zeros_like(scale, dtype=torch.int32), bits, True
    ).requires_grad_()
    given = rounded(x, step, whole(0), bits, False).requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_()
    if isinstance(layer, nn.Linear):
        out = F.linear(given, weight, bias)
    else:
        out = F.conv2d(given, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    gradients = torch.autograd.grad(out.square().sum(), [given, weight] + [bias] * (bias is not None))
    return out.detach(), [gradients[0] * ((x < high) & (x >= 0)), *gradients[1:]]


def gradients(out, along, tensors):
    """Of the sum of out times along; zeros where there is none."""
    if not out.requires_grad:
        return [torch.zeros_like(one) for one in tensors]
    found = torch.autograd.grad((out * along).sum(), tensors, allow_unused=True)
    return [torch.zeros_like(one) if g is None else g for one, g in zip(tensors, found)]


def again(layer):
    """The same layer, another object."""
    other = type(layer)(*layer.weight.shape[1::-1], *([layer.kernel_size] if isinstance(layer, nn.Conv2d) else []))
    other.__dict__.update({key: value for key, value in layer.__dict__.items() if not key.startswith("_")})
    other.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
    other.weight = nn.Parameter(layer.weight.detach().clone())
    return other


ALONG = [drawn(*torch.broadcast_shapes(case[0].shape, case[1].shape)) for case in CASES]


def observe(fake_quantize, fake_layer):
    given = [copied(case) for case in CASES]
    for case in given:
        case[0].requires_grad_()
    with Operations() as operations:
        got = [fake_quantize(*case) for case in given]
    yield {"form": form(got)}
    yield {"values": [one.detach() for one in got]}
    yield {"borrowed": any("fake_quantize" in name for name in operations.functions)}
    yield {"gradients": [gradients(one, along, [case[0]])[0] for one, along, case in zip(got, ALONG, given)]}
    yield {"changed": any(not torch.equal(case[0], before[0]) for case, before in zip(given, CASES))}
    layers, inputs = [again(layer) for layer, *_ in LAYERS], [x.clone().requires_grad_() for _, x, *_ in LAYERS]
    weights = [layer.weight for layer in layers]
    got = [fake_layer(layer, x, high.clone(), bits) for layer, x, (*_, high, bits) in zip(layers, inputs, LAYERS)]
    yield {"layer form": form(got)}
    yield {"layers": [one.detach() for one in got]}
    kept = [
        layer.weight is weight and torch.equal(weight, old.weight)
        for layer, weight, (old, *_) in zip(layers, weights, LAYERS)
    ]
    yield {"masters": all(kept)}
    found = []
    for out, layer, x in zip(got, layers, inputs):
        found.append(gradients(out, 2 * out.detach(), [x, layer.weight] + [layer.bias] * (layer.bias is not None)))
    yield {
        "of x": [one[0] for one in found],
        "of weights": [one[1] for one in found],
        "of biases": [one[2] for one in found if one[2:]],
    }
    with torch.no_grad():
        layers[0].weight.mul_(-2)
        later = fake_layer(layers[0], *copied(LAYERS[0][1:]))
    yield {"later": later.detach()}


TRUE = [layer_of(*case) for case in LAYERS]
LATER = again(LAYERS[0][0])
LATER.weight.data.mul_(-2)
LOOKS = [
    Look("rounded and dequantized", "form", form([case[0] for case in CASES]), "form"),
    Value("", "values", [rounded(*case) for case in CASES], "wrong-values"),
    Look("written out", "borrowed", False, "borrowed", fields=silent),
    Value("the gradient passes, except where x is saturated", "gradients",
          [along * inside(*case) for along, case in zip(ALONG, CASES)], "wrong-gradient", fields=silent),
    Look("the inputs are unchanged", "changed", False, "input-changed"),
    Look("a layer with rounded inputs and weights", "layer form", form([out for out, _ in TRUE]), "layer-form"),
    Value("", "layers", [out for out, _ in TRUE], "wrong-layer"),
    Look("its float32 weights are unchanged", "masters", True, "masters-lost"),
    Value("gradients of the inputs", "of x", [found[0] for _, found in TRUE], "wrong-layer-gradient", fields=silent),
    Value("of the weights", "of weights", [found[1] for _, found in TRUE], "wrong-layer-gradient", fields=silent),
    Value("of the biases", "of biases", [found[2] for _, found in TRUE if found[2:]], "wrong-layer-gradient", fields=silent),
    Value("after the weights have moved", "later", layer_of(LATER, *LAYERS[0][1:])[0], "old-scale"),
]  # fmt: skip


def balise_4(fake_quantize, fake_layer):
    yield from judged(LOOKS, observe, fake_quantize, fake_layer)
