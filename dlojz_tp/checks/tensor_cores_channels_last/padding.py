"""Balise 4: sizes that Tensor Cores like, and a linear layer that is padded inside and unchanged outside."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_cores_channels_last.numbers import first, same, several
from dlojz_tp.probes.operations import Operations

HINTS = {
    "not-size-and-extra": "padded_size must return two numbers: the padded size and the fraction of work added.",
    "size-rounded-down": "Your padded size is smaller than the size, so columns would be lost. Round up.",
    "aligned-padded": "This size is already a multiple. It needs no padding.",
    "bytes-as-elements": "The alignment is in bytes. How many elements of this dtype is that?",
    "dtype-ignored": "You use the same multiple for every dtype. The alignment is in bytes, and elements differ in "
                     "size.",
    "power-of-two": "You round up to the next power of two, which adds far more work. A multiple is enough.",
    "wrong-size": "The padded size is wrong. It is the smallest multiple of alignment bytes, in elements, that is "
                  "not below size.",
    "extra-of-padded": "The fraction compares the added work with the work before padding, not with the padded work.",
    "ratio-not-extra": "This is padded over unpadded. The added fraction is one less.",
    "extra-in-elements": "This is the number of elements added. Divide by the size.",
    "extra-in-percent": "The task asks for a fraction, not a percentage.",
    "wrong-extra": "The fraction of work added is wrong. It is (padded - size) / size.",
    "not-a-module": "PaddedLinear must be an nn.Module, so that the optimizer finds its weights.",
    "padding-visible": "The output has the padded width, so extra logits of zero take part in a softmax. Return "
                       "only the first out_features columns.",
    "not-padded": "The matrix product inside still has {width} columns. Pad the weights.",
    "given-layer-kept": "parameters() also has the given layer's weights, so an optimizer would get both. Keep "
                        "what you need from the layer, not the layer itself.",
    "alignment-ignored": "You pad the layer to the same size for every alignment. Use the given one.",
    "pads-each-call": "You pad the weights again in each forward pass, which copies all of them at every step. Pad "
                      "once, in __init__.",
    "weights-not-parameters": "The padded weights are not in parameters(), so no optimizer will train them. Use "
                              "nn.Parameter.",
    "bias-lost": "The output lacks the layer's bias.",
    "bias-made-up": "The given layer has no bias (bias=None), so the padded one must have none either.",
    "padding-not-zero": "The rows after the given ones are not zero. The given rows come first, then zeros: "
                        "otherwise an optimizer with weight decay, and a norm of all weights, would see other "
                        "values.",
    "wrong-columns": "The output differs from that of the given layer, though its shape is right.",
    "wrong-shape": "The output does not have the same shape as that of the given layer.",
    "padded-for-float32": "A layer of 9 outputs in {dtype}, at {alignment} bytes, has no weight with 16 rows. The "
                          "size to pad to depends on the layer's own dtype.",
    "dtype-changed": "The padded layer has another dtype than the given one. nn.Linear and torch.zeros use float32 "
                     "unless you pass a dtype.",
    "result-dtype": "For a layer and an input in {dtype}, the padded layer {what}. The output must have the "
                    "layer's dtype, as it does without padding.",
    "device-changed": "The padded layer is not on the given layer's device.",
    "given-layer-changed": "You changed the given layer. Leave it as it is.",
    "weights-shared": "The new layer shares its weights with the given one, so training one would change the "
                      "other. Copy them, even where no row has to be added.",
    "gradient-differs": "The gradient of the real rows differs from that of the given layer.",
    "input-gradient-differs": "The gradient of the input differs from that of the given layer, so the layers "
                              "before it would learn something else, or nothing.",
}  # fmt: skip


def balise_4(padded_size, PaddedLinear):  # noqa: N803  (the answer is a class)
    """Sizes by arithmetic in bytes; the layer against the given one: values, gradients, what runs inside."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield "the padded size, aligned to 16 bytes: float32, bfloat16, int8"
    for size, dtype in ((50257, torch.bfloat16), (50257, torch.float32), (50257, torch.int8), (1001, torch.float16)):
        _size(padded_size, size, dtype, 16)
    yield "sizes that already fit; other alignments"
    for size, dtype, alignment in (
        (1024, torch.float32, 16), (8, torch.float16, 16), (50257, torch.bfloat16, 128), (37, torch.float32, 128),
        (130, torch.int8, 128), (1, torch.bfloat16, 16), (1000, torch.float64, 64),
    ):  # fmt: skip
        _size(padded_size, size, dtype, alignment)
    yield "the layer gives the same output, of the same shape"
    for n_out, shape, bias in ((13, (5,), True), (13, (2, 3), False), (16, (4,), True)):
        _same_output(PaddedLinear, n_out, shape, bias)
    yield "inside, the product has the padded size; the padding is done once, not in each call"
    _padded_inside(PaddedLinear)
    yield "the given layer stays as it is, even where nothing is padded"
    for n_out in (13, 16):
        _own_weights(PaddedLinear, _layer(n_out))
    yield "the gradients of the real rows are equal; the padding is zero and stays zero"
    _gradients(PaddedLinear)
    yield "dtype and device are those of the given layer"
    for layer, alignment in ((nn.Linear(6, 9, dtype=torch.bfloat16), 16), (nn.Linear(6, 9, dtype=torch.float64), 128)):
        padded = _make(PaddedLinear, layer, alignment)
        if any(p.dtype != layer.weight.dtype for p in padded.parameters()):
            raise Wrong("dtype-changed", expected=layer.weight.dtype, got=[p.dtype for p in padded.parameters()])
        if not any(p.dim() == 2 and 16 in p.shape for p in padded.parameters()):
            raise Wrong("padded-for-float32", dtype=str(layer.weight.dtype).removeprefix("torch."), alignment=alignment)
        _called_in_its_dtype(padded.eval(), layer.weight.dtype)
    padded = _make(PaddedLinear, nn.Linear(6, 9, device="meta"), 16)
    if any(p.device.type != "meta" for p in padded.parameters()):
        raise Wrong("device-changed", got=[p.device for p in padded.parameters()])


def _called_in_its_dtype(padded, dtype):
    """A layer of 9 outputs, in evaluation."""
    name = str(dtype).removeprefix("torch.")
    try:
        got = padded(torch.ones(2, 6, dtype=dtype))
    except RuntimeError as error:
        raise Wrong("result-dtype", dtype=name, what=f"fails ({error})".split("\n")[0]) from error
    if got.shape != (2, 9):
        raise Wrong("padding-visible", expected=(2, 9), got=tuple(got.shape), where=f"in evaluation, {name}")
    if got.dtype != dtype:
        raise Wrong("result-dtype", dtype=name, what=f"gives {got.dtype}", expected=dtype, got=got.dtype)


def _size(padded_size, size, dtype, alignment):
    each = torch.empty((), dtype=dtype).element_size()
    truth = next(n for n in range(size, size + alignment + 1) if n * each % alignment == 0)
    padded, extra = several(padded_size(size, dtype, alignment), 2, "not-size-and-extra", "(size, fraction)")
    where = f"size {size}, {str(dtype).removeprefix('torch.')}, {alignment} bytes"
    if not same(padded, truth):
        multiple = alignment // each
        mistakes = [
            ("bytes-as-elements", math.ceil(size / alignment) * alignment),
            ("size-rounded-down", size // multiple * multiple),
            ("size-rounded-down", round(size / multiple) * multiple),
            ("aligned-padded", (size // multiple + 1) * multiple),
            *(("dtype-ignored", math.ceil(size / fixed) * fixed) for fixed in (8, 4, 64)),
            ("power-of-two", 2 ** math.ceil(math.log2(size))),
        ]
        slug = first(padded, [(slug, value) for slug, value in mistakes if value != truth], "wrong-size")
        raise Wrong(slug, expected=f"{truth:,}", got=f"{padded:,}", where=where)
    fraction = (truth - size) / size
    if not same(extra, fraction):
        mistakes = [
            ("extra-of-padded", (truth - size) / truth), ("ratio-not-extra", truth / size),
            ("extra-in-elements", truth - size), ("extra-in-percent", 100 * fraction),
        ]  # fmt: skip
        raise Wrong(first(extra, mistakes, "wrong-extra"), expected=fraction, got=f"{extra:.6g}", where=where)


def _layer(n_out, bias=True):
    torch.manual_seed(3)
    return nn.Linear(6, n_out, bias=bias)


def _make(PaddedLinear, layer, alignment=16):  # noqa: N803
    before = copy.deepcopy(layer)
    try:
        padded = PaddedLinear(layer, alignment)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if layer.weight.device.type == "meta" and "meta" in text:
            raise Wrong("device-changed", got=text) from error
        raise
    if not isinstance(padded, nn.Module):
        raise Wrong("not-a-module", got=padded)
    same_shape = layer.weight.shape == before.weight.shape and layer.out_features == before.out_features
    if not same_shape or (layer.weight.device.type != "meta" and not torch.equal(layer.weight, before.weight)):
        raise Wrong("given-layer-changed", expected=str(before), got=str(layer))
    if any(one.requires_grad != two.requires_grad for one, two in zip(layer.parameters(), before.parameters())):
        raise Wrong("given-layer-changed", expected="parameters that learn as before", got="other requires_grad")
    return padded


def _same_output(PaddedLinear, n_out, shape, bias):  # noqa: N803
    layer = _layer(n_out, bias)
    x = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(4))
    weight = layer.weight.detach().double()
    without = x.double() @ weight.T
    truth = without + (layer.bias.detach().double() if bias else 0)
    got = _make(PaddedLinear, layer)(x)
    where = f"{n_out} outputs, float32, input {'×'.join(map(str, x.shape))}, {'with' if bias else 'without'} bias"
    if got is None:
        raise Wrong("nothing-returned", where=where)
    if got.shape != truth.shape:
        slug = "padding-visible" if got.shape[:-1] == truth.shape[:-1] and got.shape[-1] > n_out else "wrong-shape"
        raise Wrong(slug, expected=tuple(truth.shape), got=tuple(got.shape), where=where)
    if not close(got, truth, 1e-5):
        slug = "bias-lost" if bias and close(got, without, 1e-5) else "wrong-columns"
        slug = slug if bias else "bias-made-up"
        raise Wrong(slug, expected=truth.float(), got=got, where=where)


def _padded_inside(PaddedLinear):  # noqa: N803
    layer, x = _layer(13), torch.randn(5, 6)
    padded = _make(PaddedLinear, layer)
    with Operations() as operations:
        padded(x)
    products = [entry for entry in operations.log if entry[0] in ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear")]
    if products and not any(16 in out[3] for *_, out in products):
        raise Wrong("not-padded", expected="16 columns", got=f"{products[0][-1][3][-1]} columns", width=13)
    if not _weights(padded):
        sizes = [tuple(p.shape) for p in padded.parameters()]
        raise Wrong("pads-each-call" if sizes else "weights-not-parameters", expected="a parameter of 16×6", got=sizes)
    rows = [max(p.shape) for p in _make(PaddedLinear, _layer(13), 128).parameters() if p.dim() == 2]
    if 32 in rows and len(rows) > 1:
        raise Wrong("given-layer-kept", expected="one matrix of 32 rows", got=f"{rows} rows")
    if rows != [32]:
        raise Wrong("alignment-ignored", expected="32 rows", got=f"{rows} rows", where="13 outputs, float32, 128 bytes")
    layer, bare = _layer(16), _layer(13, bias=False)
    for given, n in ((layer, 16 * 7), (bare, 16 * 6)):
        held = sum(p.numel() for p in _make(PaddedLinear, given).parameters())
        if held != n:
            slug = "bias-made-up" if held > n and given is bare else "wrong-columns"
            raise Wrong(slug, expected=f"{n} weights", got=f"{held} weights", where=str(given))


def _own_weights(PaddedLinear, layer):  # noqa: N803
    before, padded = copy.deepcopy(layer), _make(PaddedLinear, layer)
    with torch.no_grad():
        for p in padded.parameters():
            p.add_(1.0)
    if not all(torch.equal(p, q) for p, q in zip(layer.parameters(), before.parameters(), strict=True)):
        raise Wrong("weights-shared", where=f"{layer.out_features} outputs, float32, 16 bytes")


def _weights(padded):
    """The padded weights, one row an output, whichever way they are stored."""
    for p in padded.parameters():
        if tuple(p.shape) in ((16, 6), (6, 16)):
            return [p if p.shape[0] == 16 else p.T]
    return []


def _gradients(PaddedLinear):  # noqa: N803
    layer = _layer(13)
    padded, plain = _make(PaddedLinear, layer), copy.deepcopy(layer).double()
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(5), requires_grad=True)
    exact = x.detach().double().requires_grad_()
    labels = torch.arange(7) * 2 % 13
    optimizer = torch.optim.SGD(padded.parameters(), lr=0.5, weight_decay=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5, weight_decay=0.1)
    for step in range(2):
        (weight,) = _weights(padded)
        biases = [p for p in padded.parameters() if p.dim() == 1]
        if any(p.detach()[13:].any() for p in (weight, *biases)):
            raise Wrong("padding-not-zero", expected="zeros", got=weight.detach()[13:], where=f"before step {step + 1}")
        optimizer.zero_grad()
        reference.zero_grad()
        loss = F.cross_entropy(padded(x), labels)
        if not loss.requires_grad:
            raise Wrong("gradient-differs", expected="a gradient", got="an output without a graph")
        loss.backward()
        F.cross_entropy(plain(exact), labels).backward()
        found = next(p.grad for p in padded.parameters() if p.dim() == 2)
        if found is None:
            raise Wrong("gradient-differs", expected=plain.weight.grad.float(), got="no gradient")
        found = found if found.shape[0] == 16 else found.T
        if not close(found[:13], plain.weight.grad, 1e-4):
            raise Wrong(
                "gradient-differs", expected=plain.weight.grad.float(), got=found[:13], where=f"step {step + 1}"
            )
        if found[13:].any():
            raise Wrong("padding-not-zero", expected="no gradient in the added rows", got=found[13:])
        if x.grad is None or not close(x.grad, exact.grad, 1e-4):
            got = "no gradient" if x.grad is None else x.grad
            raise Wrong("input-gradient-differs", expected=exact.grad.float(), got=got)
        optimizer.step()
        reference.step()
