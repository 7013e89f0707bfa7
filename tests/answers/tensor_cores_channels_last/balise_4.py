"""Answers to balise 4 of 03_tensor_cores_channels_last."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 4)


def padded_size(size, dtype, alignment=16):
    multiple = alignment // dtype.itemsize
    padded = -(-size // multiple) * multiple
    return padded, (padded - size) / size


def rows_of(linear, alignment):
    return padded_size(linear.out_features, linear.weight.dtype, alignment)[0]


class PaddedLinear(nn.Module):
    """By parameters of its own, and F.linear."""

    def __init__(self, linear, alignment=16):
        super().__init__()
        self.n = linear.out_features
        more = rows_of(linear, alignment) - self.n
        self.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, more)))
        self.bias = None if linear.bias is None else nn.Parameter(F.pad(linear.bias.detach(), (0, more)))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).narrow(-1, 0, self.n)


bank.several(None, padded_size, PaddedLinear)


def size_by_search(size, dtype, alignment=16):
    padded = size
    while padded * torch.empty(0, dtype=dtype).element_size() % alignment:
        padded += 1
    return [padded, padded / size - 1.0]


class Inherits(nn.Linear):
    """Is a linear layer itself, of the padded size."""

    def __init__(self, linear, alignment=16):
        rows = rows_of(linear, alignment)
        kind = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        super().__init__(linear.in_features, rows, linear.bias is not None, **kind)
        self.kept = linear.out_features
        with torch.no_grad():
            zeros = linear.weight.new_zeros(rows - self.kept, linear.in_features)
            self.weight.copy_(torch.cat([linear.weight, zeros]))
            if linear.bias is not None:
                self.bias.copy_(torch.cat([linear.bias, zeros[:, 0]]))

    def forward(self, x):
        return torch.split(super().forward(x), [self.kept, self.out_features - self.kept], dim=-1)[0]


bank.several(None, size_by_search, Inherits)


class Transposed(nn.Module):
    """Keeps the weights the other way round, and adds the bias by itself."""

    def __init__(self, linear, alignment=16):
        super().__init__()
        self.n, rows = linear.out_features, rows_of(linear, alignment)
        weight = linear.weight.detach().new_zeros(linear.in_features, rows)
        weight[:, : self.n] = linear.weight.detach().T
        self.weight, self.bias = nn.Parameter(weight), None
        if linear.bias is not None:
            bias = linear.bias.detach().new_zeros(rows)
            bias[: self.n] = linear.bias.detach()
            self.bias = nn.Parameter(bias)

    def forward(self, x):
        y = x @ self.weight
        return (y if self.bias is None else y + self.bias)[..., : self.n]


bank.several(None, padded_size, Transposed)


PLAIN = """
def padded_size(size, dtype, alignment=16):
    multiple = alignment // dtype.itemsize
    padded = size + -size % multiple
    return padded, padded / size - 1

class PaddedLinear(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        self.n = n = linear.out_features
        rows, _ = padded_size(n, linear.weight.dtype, alignment)
        kind = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        inner = nn.Linear(linear.in_features, rows, linear.bias is not None, **kind)
        with torch.no_grad():
            for given, own in zip(linear.parameters(), inner.parameters()):
                own.zero_()[:n].copy_(given)
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[..., : self.n]
"""
bank.text(None, PLAIN)


def sized(slug, padded, extra=lambda p, s: (p - s) / s):
    def padded_size(size, dtype, alignment=16):
        found = padded(size, alignment // dtype.itemsize, alignment)
        return found, extra(found, size)

    bank.several(slug, padded_size, PaddedLinear)


def right(s, m, a):
    return math.ceil(s / m) * m


bank.hint("size-rounded-down", "Your padded size is smaller than the size, so columns would be lost. Round up.")
sized("size-rounded-down", lambda s, m, a: s // m * m)
sized("size-rounded-down", lambda s, m, a: round(s / m) * m)
bank.variant("size-rounded-down", PLAIN, ("size + -size % multiple", "size - size % multiple"))

bank.hint("aligned-padded", "This size is already a multiple. It needs no padding.")
sized("aligned-padded", lambda s, m, a: s + m - s % m)
bank.variant("aligned-padded", PLAIN, ("-size % multiple", "multiple - size % multiple"))

bank.hint("bytes-as-elements", "The alignment is in bytes. How many elements of this dtype is that?")
sized("bytes-as-elements", lambda s, m, a: math.ceil(s / a) * a)
bank.variant("bytes-as-elements", PLAIN, ("alignment // dtype.itemsize", "alignment"))

bank.hint(
    "dtype-ignored",
    "You use the same multiple for every dtype. The alignment is in bytes, and elements differ in size.",
)
sized("dtype-ignored", lambda s, m, a: math.ceil(s / 8) * 8)
bank.variant("dtype-ignored", PLAIN, ("alignment // dtype.itemsize", "8"))

bank.hint("power-of-two", "You round up to the next power of two, which adds far more work. A multiple is enough.")
sized("power-of-two", lambda s, m, a: 1 << (s - 1).bit_length())
bank.variant("power-of-two", PLAIN, ("size + -size % multiple", "2 ** (size - 1).bit_length()"))

bank.hint(
    "wrong-size",
    "The padded size is wrong. It is the smallest multiple of alignment bytes, in elements, that is not below size.",
)
sized("wrong-size", lambda s, m, a: s + m)
sized("dtype-ignored", lambda s, m, a: 50304)
bank.variant("wrong-size", PLAIN, ("size + -size % multiple", "size + multiple // 2"))

bank.hint(
    "extra-of-padded",
    "The fraction compares the added work with the work before padding, not with the padded work.",
)
sized("extra-of-padded", right, lambda p, s: (p - s) / p)
bank.variant("extra-of-padded", PLAIN, ("padded / size - 1", "1 - size / padded"))

bank.hint("ratio-not-extra", "This is padded over unpadded. The added fraction is one less.")
sized("ratio-not-extra", right, lambda p, s: p / s)
bank.variant("ratio-not-extra", PLAIN, ("padded / size - 1", "padded / size"))

bank.hint("extra-in-elements", "This is the number of elements added. Divide by the size.")
sized("extra-in-elements", right, lambda p, s: p - s)
bank.variant("extra-in-elements", PLAIN, ("padded / size - 1", "padded - size"))

bank.hint("extra-in-percent", "The task asks for a fraction, not a percentage.")
sized("extra-in-percent", right, lambda p, s: 100 * (p - s) / s)
bank.variant("extra-in-percent", PLAIN, ("padded / size - 1", "(padded / size - 1) * 100"))

bank.hint("wrong-extra", "The fraction of work added is wrong. It is (padded - size) / size.")
sized("wrong-extra", right, lambda p, s: round((p - s) / s, 3))
sized("wrong-extra", right, lambda p, s: 0.0)
bank.variant("wrong-extra", PLAIN, ("padded / size - 1", "padded // size - 1"))

bank.hint("not-size-and-extra", "padded_size must return two numbers: the padded size and the fraction of work added.")
bank.several("not-size-and-extra", lambda size, dtype, alignment=16: math.ceil(size / 8) * 8, PaddedLinear)
bank.variant("not-size-and-extra", PLAIN, ("return padded, padded / size - 1", "return padded"))


def wrong(slug, variant=False):
    return lambda layer: bank.several(slug, padded_size, layer, variant=variant) or layer


bank.hint("not-a-module", "PaddedLinear must be an nn.Module, so that the optimizer finds its weights.")
bank.variant("not-a-module", PLAIN, ("(nn.Module)", ""))


@wrong("not-a-module")
def padded_function(linear, alignment=16):
    padded = PaddedLinear(linear, alignment)
    return lambda x: padded(x)


bank.hint(
    "padding-visible",
    "The output has the padded width, so extra logits of zero take part in a softmax. Return only the first "
    "out_features columns.",
)
bank.variant("padding-visible", PLAIN, ("[..., : self.n]", ""))


@wrong("padding-visible")
class Visible(PaddedLinear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@wrong("padding-visible")
def just_a_linear(linear, alignment=16):
    padded = nn.Linear(linear.in_features, rows_of(linear, alignment), linear.bias is not None)
    with torch.no_grad():
        padded.weight.zero_()[: linear.out_features] = linear.weight
    return padded


bank.hint("not-padded", "The matrix product inside still has {width} columns. Pad the weights.")
bank.variant("not-padded", PLAIN, ("rows, _ = padded_size(n, linear.weight.dtype, alignment)", "rows = n"))


@wrong("not-padded")
def same_again(linear, alignment=16):
    return copy.deepcopy(linear)


@wrong("not-padded")
class SlicesFirst(PaddedLinear):
    def forward(self, x):
        return F.linear(x, self.weight[: self.n], None if self.bias is None else self.bias[: self.n])


bank.hint("alignment-ignored", "You pad the layer to the same size for every alignment. Use the given one.")
bank.variant("alignment-ignored", PLAIN, ("linear.weight.dtype, alignment)", "linear.weight.dtype)"))


@wrong("alignment-ignored")
class Always16(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, 16)


bank.hint("given-layer-changed", "You changed the given layer. Leave it as it is.")
bank.variant("given-layer-changed", PLAIN, ("self.inner = inner", "self.inner, linear.out_features = inner, rows"))


@wrong("given-layer-changed")
class Freezes(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        linear.requires_grad_(False)


bank.hint("gradient-differs", "The gradient of the real rows differs from that of the given layer.")
bank.variant("gradient-differs", PLAIN, ("self.inner(x)", "self.inner.requires_grad_(False)(x)"))


@wrong("gradient-differs")
class WithoutGraph(PaddedLinear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


bank.hint(
    "given-layer-kept",
    "parameters() also has the given layer's weights, so an optimizer would get both. Keep what you need from the "
    "layer, not the layer itself.",
)
bank.variant("given-layer-kept", PLAIN, ("self.inner = inner", "self.inner, self.given = inner, linear"))


@wrong("given-layer-kept")
class Keeps(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.linear = linear


bank.hint(
    "pads-each-call",
    "You pad the weights again in each forward pass, which copies all of them at every step. Pad once, in __init__.",
)


@wrong("pads-each-call", variant=True)
class PadsEachCall(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        self.linear, self.more = copy.deepcopy(linear), rows_of(linear, alignment) - linear.out_features

    def forward(self, x):
        bias = None if self.linear.bias is None else F.pad(self.linear.bias, (0, self.more))
        return F.linear(x, F.pad(self.linear.weight, (0, 0, 0, self.more)), bias)[..., : self.linear.out_features]


bank.hint(
    "weights-not-parameters",
    "The padded weights are not in parameters(), so no optimizer will train them. Use nn.Parameter.",
)
bank.variant(
    "weights-not-parameters",
    PLAIN,
    ("self.inner = inner", "self.inner = [inner]"),
    ("self.inner(x)", "self.inner[0](x)"),
)


@wrong("weights-not-parameters")
class PlainTensors(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        padded = PaddedLinear(linear, alignment)
        self.n, self.weight = padded.n, padded.weight.detach()
        self.bias = None if padded.bias is None else padded.bias.detach()

    forward = PaddedLinear.forward


@wrong("weights-not-parameters")
class Buffers(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        padded = PaddedLinear(linear, alignment)
        self.n = padded.n
        self.register_buffer("weight", padded.weight.detach())
        self.register_buffer("bias", None if padded.bias is None else padded.bias.detach())

    forward = PaddedLinear.forward


bank.hint("bias-lost", "The output lacks the layer's bias.")
bank.variant("bias-lost", PLAIN, ("linear.bias is not None", "False"))


@wrong("bias-lost")
class NoBias(PaddedLinear):
    def forward(self, x):
        return F.linear(x, self.weight)[..., : self.n]


bank.hint("bias-made-up", "The given layer has no bias (bias=None), so the padded one must have none either.")
bank.variant("bias-made-up", PLAIN, ("linear.bias is not None", "True"))


@wrong("bias-made-up")
class AlwaysBias(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        self.n = linear.out_features
        self.inner = nn.Linear(linear.in_features, rows_of(linear, alignment))
        with torch.no_grad():
            self.inner.weight.zero_()[: self.n] = linear.weight
            if linear.bias is not None:
                self.inner.bias.zero_()[: self.n] = linear.bias

    def forward(self, x):
        return self.inner(x)[..., : self.n]


@wrong("bias-made-up")
class ZeroBias(AlwaysBias):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        if linear.bias is None:
            nn.init.zeros_(self.inner.bias)


bank.hint(
    "padding-not-zero",
    "The rows after the given ones are not zero. The given rows come first, then zeros: otherwise an optimizer with "
    "weight decay, and a norm of all weights, would see other values.",
)
bank.variant("padding-not-zero", PLAIN, ("own.zero_()[:n]", "own[:n]"))


@wrong("padding-not-zero")
class RandomRows(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        self.n, bias = linear.out_features, linear.bias is not None
        kind = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.inner = nn.Linear(linear.in_features, rows_of(linear, alignment), bias, **kind)
        with torch.no_grad():
            self.inner.weight[: self.n] = linear.weight
            if bias:
                self.inner.bias[: self.n] = linear.bias

    def forward(self, x):
        return self.inner(x)[..., : self.n]


@wrong("padding-not-zero")
class LearnsPadding(PaddedLinear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y[..., : self.n] + y[..., self.n :].sum(-1, keepdim=True)


bank.hint("wrong-shape", "The output does not have the same shape as that of the given layer.")
bank.variant("wrong-shape", PLAIN, ("[..., : self.n]", "[..., : self.n].flatten(0, -2)"))


@wrong("wrong-shape")
class Flattens(PaddedLinear):
    def forward(self, x):
        return super().forward(x.flatten(0, -2))


bank.hint("wrong-columns", "The output differs from that of the given layer, though its shape is right.")
bank.variant("wrong-columns", PLAIN, ("[..., : self.n]", "[..., -self.n :]"))


@wrong("wrong-columns")
class LastColumns(PaddedLinear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y[..., y.shape[-1] - self.n :]


@wrong("wrong-columns")
class FreshWeights(RandomRows):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.inner.reset_parameters()


bank.hint(
    "dtype-changed",
    "The padded layer has another dtype than the given one. nn.Linear and torch.zeros use float32 unless you pass a "
    "dtype.",
)
bank.variant("dtype-changed", PLAIN, (', "dtype": linear.weight.dtype', ""))


@wrong("dtype-changed")
class Float32(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        weight = torch.zeros(self.weight.shape)
        if linear.weight.device.type != "meta":
            weight[: self.n] = linear.weight.detach()
        self.weight = nn.Parameter(weight)


bank.hint("device-changed", "The padded layer is not on the given layer's device.")
bank.variant("device-changed", PLAIN, ('"device": linear.weight.device, ', ""))


@wrong("device-changed")
class OnCpu(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        if linear.weight.device.type == "meta":
            self.weight = nn.Parameter(torch.zeros(self.weight.shape, dtype=linear.weight.dtype))


@wrong("device-changed")
class CopiesToCpu(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        weight = torch.zeros(self.weight.shape, dtype=linear.weight.dtype)
        weight[: self.n] = linear.weight.detach().to("cpu")
        self.weight = nn.Parameter(weight)


class Copies(PaddedLinear):
    """Its output can be reshaped by view, as that of nn.Linear."""

    def forward(self, x):
        return super().forward(x).contiguous()


bank.several(None, padded_size, Copies)


class BiasAfterwards(PaddedLinear):
    """Pads the weights alone; the bias is added to what is kept."""

    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        y = F.linear(x, self.weight).narrow(-1, 0, self.n)
        return y if self.bias is None else y + self.bias


bank.several(None, padded_size, BiasAfterwards)


@wrong("padding-not-zero")
class ZerosFirst(PaddedLinear):
    """Right outside; its added rows stand before the given ones."""

    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.weight.data = self.weight.data.roll(rows_of(linear, alignment) - self.n, 0)
        if self.bias is not None:
            self.bias.data = self.bias.data.roll(rows_of(linear, alignment) - self.n, 0)

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y[..., y.shape[-1] - self.n :]


bank.hint(
    "input-gradient-differs",
    "The gradient of the input differs from that of the given layer, so the layers before it would learn something "
    "else, or nothing.",
)
bank.variant("input-gradient-differs", PLAIN, ("self.inner(x)", "self.inner(x.detach())"))


@wrong("input-gradient-differs")
class CutsTheGraph(PaddedLinear):
    def forward(self, x):
        return super().forward(x.data)


@wrong("given-layer-changed")
def changes_in_place(linear, alignment=16):
    padded = PaddedLinear(linear, alignment)
    linear.weight, linear.bias, linear.out_features = padded.weight, padded.bias, rows_of(linear, alignment)
    return padded


@wrong("gradient-differs")
class ScaledGradient(PaddedLinear):
    def forward(self, x):
        y = super().forward(x)
        return y.detach() + 2 * (y - y.detach())


@wrong("gradient-differs")
class Detached(PaddedLinear):
    def forward(self, x):
        bias = self.bias
        return F.linear(x, self.weight.detach(), bias)[..., : self.n]


class Borrows(PaddedLinear):
    """Where the size is right already, the given layer itself does the work."""

    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        if rows_of(linear, alignment) == linear.out_features:
            self.weight, self.bias = linear.weight, linear.bias


bank.hint(
    "weights-shared",
    "The new layer shares its weights with the given one, so training one would change the other. Copy them, even "
    "where no row has to be added.",
)
wrong("weights-shared")(Borrows)
bank.variant("weights-shared", PLAIN, ("self.inner = inner", "self.inner = inner if rows > n else linear"))


bank.hint(
    "result-dtype",
    "For a layer and an input in {dtype}, the padded layer {what}. The output must have the layer's dtype, as it does "
    "without padding.",
)
bank.variant("result-dtype", PLAIN, ("self.inner(x)", "self.inner(x).to(torch.float32)"))


@wrong("result-dtype")
class Widened(PaddedLinear):
    def forward(self, x):
        return super().forward(x).float()


@wrong("result-dtype")
class InFloat32(PaddedLinear):
    def forward(self, x):
        return super().forward(x.float())


class CountedInFloat32(PaddedLinear):
    """The rows are those that float32 needs, whatever the layer's dtype."""

    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        more = padded_size(self.n, torch.float32, alignment)[0] - self.n
        self.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, more)))
        self.bias = None if linear.bias is None else nn.Parameter(F.pad(linear.bias.detach(), (0, more)))


bank.hint(
    "padded-for-float32",
    "A layer of 9 outputs in {dtype}, at {alignment} bytes, has no weight with 16 rows. The size to pad to depends on "
    "the layer's own dtype.",
)
bank.several("padded-for-float32", padded_size, CountedInFloat32)
bank.variant(
    "padded-for-float32",
    PLAIN,
    ("padded_size(n, linear.weight.dtype, alignment)", "padded_size(n, torch.float32, alignment)"),
)
