"""Balise 8: a LoRA layer on a packed base, against LoRA in float64 on the weight that NF4 leaves; memory by storages."""

import copy
import gc
import math
from types import SimpleNamespace

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, tried, within
from dlojz_tp.judging.checks.fine_tuning.nf4 import BLOCK, GROUP, TABLE, largest
from dlojz_tp.judging.probes.memory import Memory, held_storages

RANK, ALPHA = 4, 6.0
SHAPES = {"(150, 70) with a bias": (150, 70, True), "(33, 96) without": (33, 96, False)}
WIDE = 150, 200  # (out, in): a full weight is far larger than all else that a call makes
MODEL = (24, 80), (50, 24), (9, 50)  # (out, in) of the packed layers of a model


def packed_bytes(numbers):
    blocks = -(-numbers // BLOCK)
    return (numbers + 1) // 2 + blocks + 4 * -(-blocks // GROUP) + 4


def unpacked(weight):
    """What NF4 leaves of a weight, float64."""
    scales, mean, steps = largest(weight)
    each = steps.repeat_interleave(GROUP)[: len(scales)]
    again = (((scales - mean) / each).round() * each + mean).repeat_interleave(BLOCK)[: weight.numel()]
    values = again[:, None] * TABLE
    best = (values - weight.double().flatten()[:, None]).abs().argmin(1)
    return values.gather(1, best[:, None]).view(weight.shape)


def linear_of(out, inputs, bias, seed=19):
    """Of this seed no weight is near a border between two codes, where rounding decides."""
    draws = torch.Generator().manual_seed(seed + out)
    linear = nn.Linear(inputs, out, bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draws))
    return linear


def inputs_of(size, *rows):
    return torch.randn(*rows, size, generator=torch.Generator().manual_seed(size))


def lora(linear, layer, x, gradient=None):
    """LoRA in float64 on what NF4 leaves: y; with a gradient of y, those of x, A and B."""
    x, a, b = (t.detach().double().requires_grad_() for t in (x, layer.A, layer.B))
    y = x @ unpacked(linear.weight.detach()).T + ALPHA / RANK * (x @ a.T) @ b.T
    y = y if linear.bias is None else y + linear.bias.detach().double()
    return y.detach() if gradient is None else torch.autograd.grad(y, (x, a, b), gradient.double())


def awake(layer):
    """The layer after some training: B is not zero."""
    with torch.no_grad():
        layer.B.copy_(torch.randn(layer.B.shape, generator=torch.Generator().manual_seed(5)))
    return layer


def learning(layer):
    return {name: tuple(p.shape) for name, p in sorted(layer.named_parameters()) if p.requires_grad}


def held(make):
    """Bytes that a layer holds beside A, B and its bias: what lives of all that was made, or hangs on it."""
    linear = linear_of(*WIDE, True)
    with Memory(linear.weight) as memory:
        layer = make(linear, RANK, ALPHA)
        own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in (layer.A, layer.B)}
        known = own | {p.untyped_storage().data_ptr(): 0 for p in [linear.bias]}
        del linear
        gc.collect()
        hangs = sum(n for at, n in held_storages(layer, functions=True).items() if at not in known)
        return max(memory.now() - sum(own.values()), hangs)


def kept(make):
    """Bytes alive between forward and backward, and after both, beside what every design has."""
    layer = awake(make(linear_of(*WIDE, True), RANK, ALPHA))
    x = inputs_of(WIDE[1], 2).requires_grad_()
    with Memory(*layer.buffers()) as memory:  # an answer may look at them in a way that makes them new to it
        before = memory.now()
        y = layer(x)
        gc.collect()
        between = memory.now() - before
        y.sum().backward()
        layer.A.grad = layer.B.grad = x.grad = y = None
        gc.collect()
        return [between, memory.now() - before]


def backward(layer, x, gradient):
    """Gradients of x, A and B."""
    x = x.clone().requires_grad_()
    y = layer(x)
    if y.requires_grad:
        y.backward(gradient)
    return x.grad, layer.A.grad, layer.B.grad


def moved(layer):
    """Bytes that stay where they were when the layer goes to another device."""
    before = held_storages(layer, functions=True)
    now = held_storages(layer.to("meta"), functions=True)
    return sum(before[at] for at in before.keys() & now.keys())


def in_dtype(make, dtype):
    return form(make(linear_of(33, 96, True).to(dtype), RANK, ALPHA)(inputs_of(96, 3).to(dtype)))


class Deep(nn.Module):
    """Packed layers among others, one of them inside another module."""

    def __init__(self, packed):
        super().__init__()
        self.first, self.plain = packed[0], nn.Linear(10, 10)
        self.rest = nn.Sequential(nn.ReLU(), nn.ModuleDict({"inner": packed[1]}), nn.BatchNorm1d(4), packed[2])


def bits(shapes):
    numbers = [math.prod(shape) for shape in shapes]
    return 8 * sum(map(packed_bytes, numbers)) / sum(numbers)


def observe(make, held_bits):
    """What learns and is held; results and gradients; what lives between forward and backward, moves, is counted."""
    linears = [linear_of(*shape) for shape in SHAPES.values()]
    layers = [make(copy.deepcopy(linear), RANK, ALPHA) for linear in linears]
    yield {"learning": [learning(layer) for layer in layers]}
    spread = [layer.A.detach().abs().max().item() * linear.in_features**0.5 for layer, linear in zip(layers, linears)]
    start = [float(layer.B.detach().abs().max()) for layer in layers] + [float(0.9 <= one <= 1.0001) for one in spread]
    yield {"start": start, "held": held(make)}
    xs = [inputs_of(linears[0].in_features, 3), inputs_of(linears[1].in_features, 2, 5)]
    with torch.no_grad():
        asleep = [layer(x) for layer, x in zip(layers, xs)]
    yield {"forms": [form(y) for y in asleep]}
    with torch.no_grad():
        got = asleep + [awake(layer)(x) for layer, x in zip(layers, xs)]
    sleeping = [SimpleNamespace(A=layer.A, B=torch.zeros_like(layer.B)) for layer in layers]
    due = [lora(linear, layer, x) for group in (sleeping, layers) for linear, layer, x in zip(linears, group, xs)]
    yield {"forward": [(y.double() - one) / one.std() for y, one in zip(got, due)]}
    ups = [inputs_of(y.shape[-1], *y.shape[:-1]) for y in asleep]
    grads = [backward(*case) for case in zip(layers, xs, ups)]
    yield {"missing": [name for k, name in enumerate("xAB") if any(one[k] is None for one in grads)]}
    true = [lora(*case) for case in zip(linears, layers, xs, ups)]
    yield {"gradients": [(g.double() - one) / one.std() for gs, ones in zip(grads, true) for g, one in zip(gs, ones)]}
    yield {"kept": kept(make)}
    others = [make(linear_of(*shape, seed=1), RANK, ALPHA) for shape in SHAPES.values()]
    for other, layer, linear in zip(others, layers, linears):
        if linear.bias is not None:
            other.bias.data.copy_(linear.bias)
        other.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        apart = [(other(x) - layer(x)).abs().max().item() for other, layer, x in zip(others, layers, xs)]
    yield {"loaded": apart, "moved": [moved(layer) for layer in others]}
    yield {"dtypes": [tried(in_dtype, make, dtype) for dtype in (torch.float64, torch.bfloat16)]}
    packed = [make(linear_of(*shape, True), RANK, ALPHA) for shape in MODEL]
    found = [held_bits(Deep(packed)), held_bits(packed[0]), held_bits(nn.Sequential(packed[2]))]
    yield {"bits": None if found[0] is None else [float(one) for one in found]}


def kept_hint(seen, due):
    """The hint: what lives after backward, too, was not kept by the graph."""
    return "kept-for-good" if seen[1] > due else "saved-for-backward"


FEW = 4 * WIDE[0] * WIDE[1] // 5  # bytes, less than a weight in int8; a call with two rows makes far less
OUT = ["float32 (3, 150)", "float32 (2, 5, 33)"]
ERRORS = [torch.zeros(*shape, dtype=torch.float64) for shape in ((3, 150), (2, 5, 33))]
GRADIENTS = [torch.zeros(*shape, dtype=torch.float64) for out, inputs, rows in ((150, 70, (3,)), (33, 96, (2, 5)))
             for shape in ((*rows, inputs), (RANK, inputs), (out, RANK))]  # fmt: skip
LOOKS = [
    Look("A and B learn, and nothing else", "learning",
         [{"A": (RANK, inputs), "B": (out, RANK)} for out, inputs, _ in SHAPES.values()], "other-learns"),
    Look("B starts at zero, A like a weight of nn.Linear", "start", [0.0, 0.0, 1.0, 1.0], "other-start", fields=silent),
    Look("bytes held in addition to A, B and the bias", "held", packed_bytes(math.prod(WIDE)) + 256, "full-weight", holds=at_most),
    Look("x with two and with three dimensions", "forms", OUT, "out-form"),
    Value("LoRA on the NF4 weight, with B zero and B nonzero", "forward", 2 * ERRORS, "wrong-forward", holds=within(1e-4), fields=silent),
    Look("gradients of x, A and B", "missing", [], "no-gradient",
         fields=lambda seen, due: {"what": " and ".join(seen)} | silent(seen, due)),
    Value("", "gradients", GRADIENTS, "wrong-gradient", holds=within(1e-4), fields=silent),
    Look("bytes alive between forward and backward, and after both", "kept", FEW, kept_hint, holds=at_most),
    Look("the state_dict, loaded into another layer, brings the packed weight", "loaded", [0.0, 0.0], "not-in-state", fields=silent),
    Look("bytes left behind by .to(...)", "moved", 128, "left-behind", holds=at_most),
    Look("a linear layer in float64, one in bfloat16", "dtypes", ["float64 (3, 33)", "bfloat16 (3, 33)"], "out-form"),
    Value("bits per packed number", "bits", [bits(MODEL), bits(MODEL[:1]), bits(MODEL[2:])], "wrong-bits", holds=within(1e-6)),
]  # fmt: skip


def balise_8(make, held_bits):
    yield from judged(LOOKS, observe, make, held_bits)
