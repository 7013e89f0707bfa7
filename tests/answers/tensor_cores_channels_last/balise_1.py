"""Answers to balise 1 of 03_tensor_cores_channels_last: count operations and bytes."""

import math

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 1)


def matmul_cost(m, n, k, itemsize):
    return 2 * m * n * k, itemsize * (m * k + k * n + m * n)


def side(n, kernel, stride, padding):
    return (n + 2 * padding - kernel) // stride + 1


def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    h, w = side(height, kernel, stride, padding), side(width, kernel, stride, padding)
    flop = 2 * batch * c_out * h * w * kernel**2 * c_in // groups
    x, weight, y = batch * c_in * height * width, c_out * c_in // groups * kernel**2, batch * c_out * h * w
    return flop, itemsize * (x + weight + y)


bank.several(None, matmul_cost, conv_cost)


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


bank.several(None, counted_matmul, counted_conv)


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


bank.several(None, with_tensors, conv_as_products)

PLAIN = """
def matmul_cost(m, n, k, itemsize):
    return 2 * m * n * k, (m * k + k * n + m * n) * itemsize

def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    oh, ow = ((s + 2 * padding - kernel) // stride + 1 for s in (height, width))
    each = kernel * kernel * c_in // groups
    results, weights = batch * c_out * oh * ow, c_out * each
    return 2 * results * each, (batch * c_in * height * width + results + weights) * itemsize
"""
bank.text(None, PLAIN)

# At the edge are the border of an image, sizes that do not divide, and options that have a default.

bank.hint("not-a-cost", "Both functions must return two numbers: (floating-point operations, bytes moved).")
bank.several("not-a-cost", lambda m, n, k, s: 2 * m * n * k / (s * (m * k + k * n + m * n)), conv_cost)
bank.several("not-a-cost", lambda m, n, k, s: {"flop": 2 * m * n * k, "bytes": 1}, conv_cost)
bank.variant("not-a-cost", PLAIN, ("return 2 * m * n * k, (m", "return (m"))

bank.several("nothing-returned", lambda m, n, k, s: print(2 * m * n * k), conv_cost)

bank.hint("cost-swapped", "You have swapped the two numbers: the operations come first, then the bytes.")
bank.several("cost-swapped", lambda *sizes: matmul_cost(*sizes)[::-1], conv_cost)
bank.several("cost-swapped", matmul_cost, lambda *sizes: conv_cost(*sizes)[::-1])
bank.variant(
    "cost-swapped",
    PLAIN,
    (
        "return 2 * m * n * k, (m * k + k * n + m * n) * itemsize",
        "return (m * k + k * n + m * n) * itemsize, 2 * m * n * k",
    ),
)

bank.hint("multiply-add-once", "You count a multiply-add as one operation. It is two floating-point operations.")
bank.several("multiply-add-once", lambda m, n, k, s: (m * n * k, s * (m * k + k * n + m * n)), conv_cost)
bank.variant("multiply-add-once", PLAIN, ("return 2 * results", "return results"))

bank.hint("result-not-moved", "Your bytes lack the result: it has to be written to memory.")
bank.several("result-not-moved", lambda m, n, k, s: (2 * m * n * k, s * (m * k + k * n)), conv_cost)
bank.variant("result-not-moved", PLAIN, ("width + results + weights", "width + weights"))

bank.hint("operand-not-moved", "Your bytes lack an operand: input and weights are both read.")
bank.several("operand-not-moved", lambda m, n, k, s: (2 * m * n * k, s * (m * k + m * n)), conv_cost)
bank.variant("operand-not-moved", PLAIN, ("m * k + k * n + m * n", "k * n + m * n"))

bank.hint("elements-not-bytes", "These are elements. Multiply by the number of bytes per element.")
bank.several("elements-not-bytes", lambda m, n, k, s: (2 * m * n * k, m * k + k * n + m * n), conv_cost)
bank.variant("elements-not-bytes", PLAIN, ("results + weights) * itemsize", "results + weights)"))

bank.hint(
    "moved-at-each-use",
    "You move a value each time it is used. Count each operand and the result once, as a perfect cache would move "
    "them.",
)
bank.several("moved-at-each-use", lambda m, n, k, s: (2 * m * n * k, s * m * n * (2 * k + 1)), conv_cost)
bank.variant("moved-at-each-use", PLAIN, ("(m * k + k * n + m * n) * itemsize", "2 * m * n * k * itemsize"))

bank.hint(
    "wrong-product-flop",
    "The operations of this matrix product are wrong. How many products are summed in each result?",
)
bank.several("wrong-product-flop", lambda m, n, k, s: (2 * m * n + k, s * (m * k + k * n + m * n)), conv_cost)
bank.variant("wrong-product-flop", PLAIN, ("2 * m * n * k,", "2 * m * n + m * k,"))

bank.hint(
    "wrong-product-bytes",
    "The bytes of this matrix product are wrong. Count two operands and one result, each once.",
)
bank.several("wrong-product-bytes", lambda m, n, k, s: (2 * m * n * k, s * m * k * n), conv_cost)
bank.several("wrong-product-bytes", lambda m, n, k, s: (2 * m * n * k, 2 * (m * k + k * n + m * n)),
        conv_cost)  # fmt: skip
bank.variant("wrong-product-bytes", PLAIN, ("m * k + k * n + m * n", "m * k + k * n + m + n"))


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

    bank.several(slug, matmul_cost, conv_cost)


conv_variant("multiply-add-once", flop=lambda f, b, k, g: f / 2)

bank.hint("kernel-not-squared", "The kernel has two dimensions, so each result sums over kernel × kernel pixels.")
conv_variant("kernel-not-squared", flop=lambda f, b, k, g: f / k)
bank.variant("kernel-not-squared", PLAIN, ("return 2 * results * each", "return 2 * results * each // kernel"))

bank.hint("batch-forgotten", "This is the work for one image. The batch has {batch} images.")
conv_variant("batch-forgotten", flop=lambda f, b, k, g: f / b)
bank.variant("batch-forgotten", PLAIN, ("return 2 * results * each", "return 2 * c_out * oh * ow * each"))

bank.hint(
    "groups-ignored",
    "With groups, a result sums over the input channels of its own group only: c_in / groups.",
    edge=True,
)
conv_variant("groups-ignored", flop=lambda f, b, k, g: f * g, weights=lambda w, b, k, g: w * g)
bank.variant("groups-ignored", PLAIN, ("kernel * c_in // groups", "kernel * c_in"))

bank.hint(
    "groups-twice",
    "Each of the c_out results sums over c_in / groups channels. Divide by the groups only once.",
    edge=True,
)
conv_variant("groups-twice", flop=lambda f, b, k, g: f / g)
bank.variant("groups-twice", PLAIN, ("return 2 * results * each", "return 2 * results * each // groups"))

bank.hint(
    "weights-ignore-groups",
    "The operations are right, but with groups there are also fewer weights to move: each output channel has c_in / "
    "groups of them per kernel position.",
    edge=True,
)
conv_variant("weights-ignore-groups", weights=lambda w, b, k, g: w * g)
bank.variant("weights-ignore-groups", PLAIN, ("c_out * each", "c_out * kernel * kernel * c_in"))

bank.hint(
    "weights-each-image",
    "You count the weights once for each image. They serve the whole batch: count them once in all.",
)
conv_variant("weights-each-image", weights=lambda w, b, k, g: w * b)
bank.variant("weights-each-image", PLAIN, ("results + weights)", "results + batch * weights)"))

bank.hint("padding-moved", "The zeros of the padding are not in memory. Count the image without padding.", edge=True)
conv_variant("padding-moved", pad_input=True)
bank.variant("padding-moved", PLAIN, ("c_in * height * width", "c_in * (height + 2 * padding) * (width + 2 * padding)"))

conv_variant("operand-not-moved", parts=(1, 0, 1))

conv_variant("result-not-moved", parts=(1, 1, 0))

bank.hint(
    "borders-ignored",
    "Without padding, the output of a convolution has fewer pixels than its input: the kernel must fit into the image.",
    edge=True,
)
conv_variant("borders-ignored", side=lambda n, k, s, p: n)
conv_variant("borders-ignored", side=lambda n, k, s, p: n // s)
bank.variant("borders-ignored", PLAIN, ("((s + 2 * padding - kernel) // stride + 1 for", "(-(-s // stride) for"))

bank.hint(
    "stride-ignored",
    "With a stride of s the kernel stops only at every s-th pixel, so there are fewer results.",
    edge=True,
)
conv_variant("stride-ignored", side=lambda n, k, s, p: n + 2 * p - k + 1)
bank.variant("stride-ignored", PLAIN, ("// stride", ""))

bank.hint(
    "pixels-rounded-up",
    "Where the stride does not divide evenly, the last, incomplete position of the kernel does not count. Round down.",
    edge=True,
)
conv_variant("pixels-rounded-up", side=lambda n, k, s, p: math.ceil((n + 2 * p - k) / s) + 1)
conv_variant("pixels-rounded-up", side=lambda n, k, s, p: round((n + 2 * p - k) / s + 1))
bank.variant(
    "pixels-rounded-up", PLAIN, ("(s + 2 * padding - kernel) // stride", "-(-(s + 2 * padding - kernel) // stride)")
)

bank.hint(
    "pixels-not-whole",
    "The number of output pixels is a whole number. Round down before you multiply.",
    edge=True,
)
conv_variant("pixels-not-whole", side=lambda n, k, s, p: (n + 2 * p - k) / s + 1)
bank.variant("pixels-not-whole", PLAIN, ("kernel) // stride", "kernel) / stride"))

bank.hint("padding-ignored", "Padding adds pixels around the image, so there are more results.", edge=True)
conv_variant("padding-ignored", side=lambda n, k, s, p: (n - k) // s + 1)
bank.variant("padding-ignored", PLAIN, ("s + 2 * padding", "s"))

bank.hint("padding-one-side", "Padding is added on both sides of the image, in height and in width.", edge=True)
conv_variant("padding-one-side", side=lambda n, k, s, p: (n + p - k) // s + 1)
bank.variant("padding-one-side", PLAIN, ("2 * padding", "padding"))

bank.hint("wrong-conv-flop", "The operations of this convolution are wrong. They are results × products in each × 2.")
conv_variant("wrong-conv-flop", side=lambda n, k, s, p: (n + 2 * p - k + 1) // s + 1)
bank.variant(
    "wrong-conv-flop", PLAIN, ("each = kernel * kernel * c_in // groups", "each = kernel * kernel + c_in // groups")
)

bank.hint("wrong-conv-bytes", "The bytes of this convolution are wrong. Count image, weights and result, each once.")
conv_variant("wrong-conv-bytes", weights=lambda w, b, k, g: w / k)
bank.variant("wrong-conv-bytes", PLAIN, ("results + weights) * itemsize", "results) * itemsize + 4 * weights"))


def conv_cost_of_squares(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    return conv_cost(batch, c_in, c_out, height, height, kernel, stride, padding, groups, itemsize)


bank.hint("not-square", "The image's height and width differ. Each has its own size after the convolution.", edge=True)
bank.several("not-square", matmul_cost, conv_cost_of_squares)
bank.variant("not-square", PLAIN, ("(height, width))", "(height, height))"))

bank.several("not-a-cost", matmul_cost, lambda *sizes: conv_cost(*sizes)[0])
