"""Answers to balises 1 and 2 of 03_tensor_cores_channels_last."""

import math
from fractions import Fraction

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last")

# ---------------------------------------------------------------- balise 1


def matmul_cost(m, n, k, itemsize):
    return 2 * m * n * k, itemsize * (m * k + k * n + m * n)


def side(n, kernel, stride, padding):
    return (n + 2 * padding - kernel) // stride + 1


def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    h, w = side(height, kernel, stride, padding), side(width, kernel, stride, padding)
    flop = 2 * batch * c_out * h * w * kernel**2 * c_in // groups
    x, weight, y = batch * c_in * height * width, c_out * c_in // groups * kernel**2, batch * c_out * h * w
    return flop, itemsize * (x + weight + y)


bank.several(1, None, matmul_cost, conv_cost)


def counted_matmul(m, n, k, itemsize):
    a, b = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    with FlopCounterMode(display=False) as counter:
        c = torch.mm(a, b)
    return [counter.get_total_flops(), sum(t.numel() for t in (a, b, c)) * itemsize]


def counted_conv(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    x = torch.empty(batch, c_in, height, width, device="meta")
    weight = torch.empty(c_out, c_in // groups, kernel, kernel, device="meta")
    with FlopCounterMode(display=False) as counter:
        y = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
    return counter.get_total_flops(), (x.numel() + weight.numel() + y.numel()) * itemsize


bank.several(1, None, counted_matmul, counted_conv)


def conv_as_products(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    """A group is a matrix product of pixels by kernel² × channels; what is moved differs."""
    h = math.floor((height + 2 * padding - kernel) / stride) + 1
    w = math.floor((width + 2 * padding - kernel) / stride) + 1
    flop = groups * matmul_cost(batch * h * w, c_out / groups, kernel * kernel * c_in / groups, 1)[0]
    numbers = np.array([batch * c_in * height * width, c_out * (c_in / groups) * kernel**2, batch * c_out * h * w])
    return np.float64(flop), (numbers * itemsize).sum()


def with_tensors(m, n, k, itemsize):
    m, n, k = (torch.tensor(value, dtype=torch.float64) for value in (m, n, k))
    return 2 * m * n * k, itemsize * (m * k + k * n + m * n)


bank.several(1, None, with_tensors, conv_as_products)

bank.several(1, "not-a-cost", lambda m, n, k, s: 2 * m * n * k / (s * (m * k + k * n + m * n)), conv_cost)
bank.several(1, "not-a-cost", lambda m, n, k, s: {"flop": 2 * m * n * k, "bytes": 1}, conv_cost)
bank.several(1, "nothing-returned", lambda m, n, k, s: print(2 * m * n * k), conv_cost)
bank.several(1, "cost-swapped", lambda *sizes: matmul_cost(*sizes)[::-1], conv_cost)
bank.several(1, "cost-swapped", matmul_cost, lambda *sizes: conv_cost(*sizes)[::-1])
bank.several(1, "multiply-add-once", lambda m, n, k, s: (m * n * k, s * (m * k + k * n + m * n)), conv_cost)
bank.several(1, "result-not-moved", lambda m, n, k, s: (2 * m * n * k, s * (m * k + k * n)), conv_cost)
bank.several(1, "operand-not-moved", lambda m, n, k, s: (2 * m * n * k, s * (m * k + m * n)), conv_cost)
bank.several(1, "elements-not-bytes", lambda m, n, k, s: (2 * m * n * k, m * k + k * n + m * n), conv_cost)
bank.several(1, "moved-at-each-use", lambda m, n, k, s: (2 * m * n * k, s * m * n * (2 * k + 1)), conv_cost)
bank.several(1, "wrong-product-flop", lambda m, n, k, s: (2 * m * n + k, s * (m * k + k * n + m * n)), conv_cost)
bank.several(1, "wrong-product-bytes", lambda m, n, k, s: (2 * m * n * k, s * m * k * n), conv_cost)
bank.several(1, "wrong-product-bytes", lambda m, n, k, s: (2 * m * n * k, 2 * (m * k + k * n + m * n)),
        conv_cost)  # fmt: skip


def conv_variant(
    slug, side=side, flop=lambda f, b, k, g: f, weights=lambda w, b, k, g: w, pad_input=False, parts=(1, 1, 1)
):
    """A convolution with one mistake in it."""

    def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
        h, w = side(height, kernel, stride, padding), side(width, kernel, stride, padding)
        work = flop(2 * batch * c_out * h * w * kernel**2 * c_in / groups, batch, kernel, groups)
        weight = weights(c_out * c_in / groups * kernel**2, batch, kernel, groups)
        border = 2 * padding if pad_input else 0
        x = batch * c_in * (height + border) * (width + border)
        sizes = x, weight, batch * c_out * h * w
        return work, itemsize * sum(part * size for part, size in zip(parts, sizes))

    bank.several(1, slug, matmul_cost, conv_cost)


conv_variant("multiply-add-once", flop=lambda f, b, k, g: f / 2)
conv_variant("kernel-not-squared", flop=lambda f, b, k, g: f / k)
conv_variant("batch-forgotten", flop=lambda f, b, k, g: f / b)
conv_variant("groups-ignored", flop=lambda f, b, k, g: f * g, weights=lambda w, b, k, g: w * g)
conv_variant("groups-twice", flop=lambda f, b, k, g: f / g)
conv_variant("weights-ignore-groups", weights=lambda w, b, k, g: w * g)
conv_variant("weights-each-image", weights=lambda w, b, k, g: w * b)
conv_variant("padding-moved", pad_input=True)
conv_variant("operand-not-moved", parts=(1, 0, 1))
conv_variant("result-not-moved", parts=(1, 1, 0))
conv_variant("borders-ignored", side=lambda n, k, s, p: n)
conv_variant("borders-ignored", side=lambda n, k, s, p: n // s)
conv_variant("stride-ignored", side=lambda n, k, s, p: n + 2 * p - k + 1)
conv_variant("pixels-rounded-up", side=lambda n, k, s, p: math.ceil((n + 2 * p - k) / s) + 1)
conv_variant("pixels-rounded-up", side=lambda n, k, s, p: round((n + 2 * p - k) / s + 1))
conv_variant("pixels-not-whole", side=lambda n, k, s, p: (n + 2 * p - k) / s + 1)
conv_variant("padding-ignored", side=lambda n, k, s, p: (n - k) // s + 1)
conv_variant("padding-one-side", side=lambda n, k, s, p: (n + p - k) // s + 1)
conv_variant("wrong-conv-flop", side=lambda n, k, s, p: (n + 2 * p - k + 1) // s + 1)
conv_variant("wrong-conv-bytes", weights=lambda w, b, k, g: w / k)


def conv_cost_of_squares(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    return conv_cost(batch, c_in, c_out, height, height, kernel, stride, padding, groups, itemsize)


bank.several(1, "not-square", matmul_cost, conv_cost_of_squares)
bank.several(1, "not-a-cost", matmul_cost, lambda *sizes: conv_cost(*sizes)[0])

# ---------------------------------------------------------------- balise 2


@bank.right(2)
def roofline(flop, n_bytes, peak, bandwidth):
    computing, moving = flop / peak, n_bytes / bandwidth
    return flop / max(computing, moving), "compute" if computing > moving else "memory", peak / bandwidth


@bank.right(2)
def roofline(flop, n_bytes, peak, bandwidth):
    ridge = Fraction(peak) / Fraction(bandwidth)
    intensity = Fraction(flop) / Fraction(n_bytes)
    bound = ("memory", "compute")[intensity >= ridge]
    return [float(intensity * Fraction(bandwidth)) if bound == "memory" else peak, bound, float(ridge)]


@bank.right(2)
def roofline(flop, n_bytes, peak, bandwidth):
    rates = {"memory": flop / n_bytes * bandwidth, "compute": peak}
    bound = min(rates, key=rates.get)
    return torch.tensor(rates[bound], dtype=torch.float64), bound, np.float64(peak / bandwidth)


def wrong_roofline(slug, rate=None, bound=None, ridge=None):
    """A roofline with one mistake in it; each part is given (flop, n_bytes, peak, bandwidth)."""

    def roofline(*work):
        flop, n_bytes, peak, bandwidth = work
        right = (
            min(peak, flop / n_bytes * bandwidth),
            "memory" if flop / n_bytes < peak / bandwidth else "compute",
            peak / bandwidth,
        )
        return tuple(part(*work) if part else value for part, value in zip((rate, bound, ridge), right))

    bank.several(2, slug, roofline)


wrong_roofline("times-added", rate=lambda f, q, p, b: f / (f / p + q / b))
wrong_roofline("upper-roof", rate=lambda f, q, p, b: max(p, f / q * b))
wrong_roofline("peak-only", rate=lambda f, q, p, b: p)
wrong_roofline("slope-only", rate=lambda f, q, p, b: f / q * b)
wrong_roofline("intensity-inverted", rate=lambda f, q, p, b: min(p, q / f * b) if f else 0)
wrong_roofline("seconds-not-rate", rate=lambda f, q, p, b: max(f / p, q / b))
wrong_roofline("fraction-not-rate", rate=lambda f, q, p, b: min(1, f / q * b / p))
wrong_roofline("scaled-rate", rate=lambda f, q, p, b: min(p, f / q * b) / 1e12)
wrong_roofline("wrong-rate", rate=lambda f, q, p, b: min(p, f / q))
wrong_roofline("wrong-rate", rate=lambda f, q, p, b: min(p, 2 * f / q * b))
wrong_roofline("ridge-inverted", ridge=lambda f, q, p, b: b / p)
wrong_roofline("ridge-of-the-layer", ridge=lambda f, q, p, b: f / q)
wrong_roofline("wrong-ridge", ridge=lambda f, q, p, b: p / b / 1e3)
wrong_roofline("other-words", bound=lambda f, q, p, b: "computing" if f / q > p / b else "bandwidth")
wrong_roofline("other-words", bound=lambda f, q, p, b: f / q > p / b)
wrong_roofline("bound-reversed", bound=lambda f, q, p, b: "compute" if f / q < p / b else "memory")
wrong_roofline("bound-reversed", bound=lambda f, q, p, b: "memory" if f and f / q < p / b else "compute")
wrong_roofline("bound-by-counts", bound=lambda f, q, p, b: "compute" if f > q else "memory")
wrong_roofline("bound-of-one-machine", bound=lambda f, q, p, b: "compute" if f / q > 153 else "memory")
wrong_roofline("wrong-ridge", ridge=lambda f, q, p, b: 153.01)
wrong_roofline("bound-beside-ridge", bound=lambda f, q, p, b: "compute" if f / q > 1.05 * p / b else "memory")
wrong_roofline("bound-beside-ridge", bound=lambda f, q, p, b: "compute" if round(f / q) > round(p / b) else "memory")


@bank.wrong(2, "not-three-values")
def roofline(flop, n_bytes, peak, bandwidth):
    return min(peak, flop / n_bytes * bandwidth)


@bank.wrong(2, "nothing-returned")
def roofline(flop, n_bytes, peak, bandwidth):
    min(peak, flop / n_bytes * bandwidth)

bank.text(
    1,
    "wrong-conv-bytes",
    """
def matmul_cost(m, n, k, itemsize):
    return 2 * m * n * k, (m * k + k * n + m * n) * itemsize

def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    oh, ow = ((s + 2 * padding - kernel) // stride + 1 for s in (height, width))
    each = kernel * kernel * c_in // groups
    results, weights = batch * c_out * oh * ow, c_out * each
    return 2 * results * each, (batch * c_in * height * width + results) * itemsize + 4 * weights
""",
)
