"""Answers to balise 4 of 03_tensor_cores_channels_last."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last")


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


bank.several(4, None, padded_size, PaddedLinear)


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


bank.several(4, None, size_by_search, Inherits)


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


bank.several(4, None, padded_size, Transposed)


def sized(slug, padded, extra=lambda p, s: (p - s) / s):
    def padded_size(size, dtype, alignment=16):
        found = padded(size, alignment // dtype.itemsize, alignment)
        return found, extra(found, size)

    bank.several(4, slug, padded_size, PaddedLinear)


def right(s, m, a):
    return math.ceil(s / m) * m


sized("size-rounded-down", lambda s, m, a: s // m * m)
sized("size-rounded-down", lambda s, m, a: round(s / m) * m)
sized("aligned-padded", lambda s, m, a: s + m - s % m)
sized("bytes-as-elements", lambda s, m, a: math.ceil(s / a) * a)
sized("dtype-ignored", lambda s, m, a: math.ceil(s / 8) * 8)
sized("power-of-two", lambda s, m, a: 1 << (s - 1).bit_length())
sized("wrong-size", lambda s, m, a: s + m)
sized("dtype-ignored", lambda s, m, a: 50304)
sized("extra-of-padded", right, lambda p, s: (p - s) / p)
sized("ratio-not-extra", right, lambda p, s: p / s)
sized("extra-in-elements", right, lambda p, s: p - s)
sized("extra-in-percent", right, lambda p, s: 100 * (p - s) / s)
sized("wrong-extra", right, lambda p, s: round((p - s) / s, 3))
sized("wrong-extra", right, lambda p, s: 0.0)
bank.several(4, "not-size-and-extra", lambda size, dtype, alignment=16: math.ceil(size / 8) * 8, PaddedLinear)


def wrong(slug):
    return lambda layer: bank.several(4, slug, padded_size, layer) or layer


@wrong("not-a-module")
def padded_function(linear, alignment=16):
    padded = PaddedLinear(linear, alignment)
    return lambda x: padded(x)


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


@wrong("not-padded")
def same_again(linear, alignment=16):
    return copy.deepcopy(linear)


@wrong("not-padded")
class SlicesFirst(PaddedLinear):
    def forward(self, x):
        return F.linear(x, self.weight[: self.n], None if self.bias is None else self.bias[: self.n])


@wrong("alignment-ignored")
class Always16(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, 16)


@wrong("given-layer-changed")
class Freezes(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        linear.requires_grad_(False)


@wrong("gradient-differs")
class WithoutGraph(PaddedLinear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@wrong("given-layer-kept")
class Keeps(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.linear = linear


@wrong("pads-each-call")
class PadsEachCall(nn.Module):
    def __init__(self, linear, alignment=16):
        super().__init__()
        self.linear, self.more = copy.deepcopy(linear), rows_of(linear, alignment) - linear.out_features

    def forward(self, x):
        bias = None if self.linear.bias is None else F.pad(self.linear.bias, (0, self.more))
        return F.linear(x, F.pad(self.linear.weight, (0, 0, 0, self.more)), bias)[..., : self.linear.out_features]


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


@wrong("bias-lost")
class NoBias(PaddedLinear):
    def forward(self, x):
        return F.linear(x, self.weight)[..., : self.n]


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


@wrong("wrong-shape")
class Flattens(PaddedLinear):
    def forward(self, x):
        return super().forward(x.flatten(0, -2))


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


@wrong("dtype-changed")
class Float32(PaddedLinear):
    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        weight = torch.zeros(self.weight.shape)
        if linear.weight.device.type != "meta":
            weight[: self.n] = linear.weight.detach()
        self.weight = nn.Parameter(weight)


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


bank.several(4, None, padded_size, Copies)


class BiasAfterwards(PaddedLinear):
    """Pads the weights alone; the bias is added to what is kept."""

    def __init__(self, linear, alignment=16):
        super().__init__(linear, alignment)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        y = F.linear(x, self.weight).narrow(-1, 0, self.n)
        return y if self.bias is None else y + self.bias


bank.several(4, None, padded_size, BiasAfterwards)


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


wrong("weights-shared")(Borrows)


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


bank.several(4, "padded-for-float32", padded_size, CountedInFloat32)
