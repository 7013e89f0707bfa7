"""Balise 1: operations and bytes of a matrix product and of a convolution, against PyTorch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.tensor_cores_channels_last.numbers import first, same, several

HINTS = {
    "not-a-cost": "Both functions must return two numbers: (floating-point operations, bytes moved).",
    "cost-swapped": "You have swapped the two numbers: the operations come first, then the bytes.",
    "multiply-add-once": "You count a multiply-add as one operation. It is two floating-point operations.",
    "result-not-moved": "Your bytes lack the result: it has to be written to memory.",
    "operand-not-moved": "Your bytes lack an operand: input and weights are both read.",
    "elements-not-bytes": "These are elements. Multiply by the number of bytes per element.",
    "moved-at-each-use": "You move a value each time it is used. Count each operand and the result once, as a "
                         "perfect cache would move them.",
    "wrong-product-flop": "The operations of this matrix product are wrong. How many products are summed in each "
                          "result?",
    "wrong-product-bytes": "The bytes of this matrix product are wrong. Count two operands and one result, each once.",
    "kernel-not-squared": "The kernel has two dimensions, so each result sums over kernel × kernel pixels.",
    "batch-forgotten": "This is the work for one image. The batch has {batch} images.",
    "not-square": "The image's height and width differ. Each has its own size after the convolution.",
    "borders-ignored": "Without padding, the output of a convolution has fewer pixels than its input: the kernel "
                       "must fit into the image.",
    "stride-ignored": "With a stride of s the kernel stops only at every s-th pixel, so there are fewer results.",
    "pixels-rounded-up": "Where the stride does not divide evenly, the last, incomplete position of the kernel "
                         "does not count. Round down.",
    "pixels-not-whole": "The number of output pixels is a whole number. Round down before you multiply.",
    "padding-ignored": "Padding adds pixels around the image, so there are more results.",
    "padding-one-side": "Padding is added on both sides of the image, in height and in width.",
    "groups-ignored": "With groups, a result sums over the input channels of its own group only: c_in / groups.",
    "groups-twice": "Each of the c_out results sums over c_in / groups channels. Divide by the groups only once.",
    "weights-ignore-groups": "The operations are right, but with groups there are also fewer weights to move: each "
                             "output channel has c_in / groups of them per kernel position.",
    "weights-each-image": "You count the weights once for each image. They serve the whole batch: count them once "
                          "in all.",
    "padding-moved": "The zeros of the padding are not in memory. Count the image without padding.",
    "wrong-conv-flop": "The operations of this convolution are wrong. They are results × products in each × 2.",
    "wrong-conv-bytes": "The bytes of this convolution are wrong. Count image, weights and result, each once.",
}  # fmt: skip
PAIR = "(operations, bytes)"


def balise_1(matmul_cost, conv_cost):
    """Products of uneven sizes; convolutions with one more difficulty at a time."""
    yield "a matrix product: operations and bytes, from the sizes and the bytes per element"
    for m, n, k, size in ((64, 32, 80, 2), (1, 4096, 512, 2), (7, 13, 5, 4), (1000, 50257, 768, 1), (3, 11, 2, 8)):
        _product(matmul_cost, m, n, k, size)
    yield "a convolution: kernel 3, and kernel 1"
    _conv(conv_cost, 5, 6, 11, 17, 13, 3, 1, 0, 1, 4)
    _conv(conv_cost, 6, 64, 48, 14, 9, 1, 1, 0, 1, 2)
    yield "with padding"
    _conv(conv_cost, 3, 10, 7, 19, 12, 5, 1, 2, 1, 2)
    yield "with a stride, also one that does not divide evenly"
    _conv(conv_cost, 4, 3, 14, 23, 16, 3, 2, 0, 1, 2)
    _conv(conv_cost, 3, 8, 16, 14, 10, 1, 2, 0, 1, 2)
    _conv(conv_cost, 4, 3, 22, 33, 26, 7, 3, 3, 1, 4)
    yield "with groups, up to one channel per group (depthwise)"
    _conv(conv_cost, 3, 12, 20, 15, 10, 3, 1, 1, 4, 2)
    _conv(conv_cost, 7, 96, 96, 20, 14, 3, 2, 1, 96, 2)
    yield "one image, one byte per element; float64"
    _conv(conv_cost, 1, 32, 64, 9, 31, 3, 2, 1, 2, 1)
    _conv(conv_cost, 1, 8, 24, 5, 5, 5, 4, 0, 8, 8)


def _product(matmul_cost, m, n, k, size):
    a, b = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    with FlopCounterMode(display=False) as counter:
        c = a @ b
    flop, moved = counter.get_total_flops(), size * (a.numel() + b.numel() + c.numel())
    where = f"m={m}, n={n}, k={k}, {_bytes(size)}"
    got = several(matmul_cost(m, n, k, size), 2, "not-a-cost", PAIR)
    _not_swapped(got, flop, moved, where)
    if not same(got[0], flop):
        slug = first(got[0], [("multiply-add-once", flop / 2)], "wrong-product-flop")
        raise Wrong(slug, expected=f"{flop:,} operations", got=f"{got[0]:,}", where=where)
    if not same(got[1], moved):
        mistakes = [
            ("result-not-moved", moved - size * c.numel()),
            ("operand-not-moved", moved - size * a.numel()),
            ("operand-not-moved", moved - size * b.numel()),
            ("elements-not-bytes", moved / size),
            *_each_use(flop, size, c.numel()),
        ]
        slug = first(got[1], mistakes, "wrong-product-bytes")
        raise Wrong(slug, expected=f"{moved:,} bytes", got=f"{got[1]:,}", where=where)


def _conv(conv_cost, *sizes):
    batch, c_in, c_out, height, width, kernel, stride, padding, groups, size = sizes
    x = torch.empty(batch, c_in, height, width, device="meta")
    layer = torch.nn.Conv2d(c_in, c_out, kernel, stride, padding, groups=groups, bias=False, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        y = layer(x)
    flop, weights = counter.get_total_flops(), layer.weight.numel()
    moved = size * (x.numel() + weights + y.numel())
    where = (
        f"{batch} images {c_in}×{height}×{width} to {c_out} channels, kernel {kernel}, stride {stride}, "
        f"padding {padding}, groups {groups}, {_bytes(size)}"
    )
    got = several(conv_cost(*sizes), 2, "not-a-cost", PAIR)
    _not_swapped(got, flop, moved, where)
    if not same(got[0], flop):
        slug = first(got[0], _flop_mistakes(flop, *sizes[:-1]), "wrong-conv-flop")
        raise Wrong(slug, expected=f"{flop:,} operations", got=f"{got[0]:,}", where=where, batch=batch)
    if not same(got[1], moved):
        around = batch * c_in * (height + 2 * padding) * (width + 2 * padding)
        mistakes = [
            ("result-not-moved", moved - size * y.numel()),
            ("operand-not-moved", moved - size * weights),
            ("operand-not-moved", moved - size * x.numel()),
            ("elements-not-bytes", moved / size),
            ("weights-ignore-groups", moved + size * weights * (groups - 1)),
            ("weights-each-image", moved + size * weights * (batch - 1)),
            ("padding-moved", moved + size * (around - x.numel())),
            *_each_use(flop, size, y.numel()),
        ]
        slug = first(got[1], mistakes, "wrong-conv-bytes")
        raise Wrong(slug, expected=f"{moved:,} bytes", got=f"{got[1]:,}", where=where)


def _not_swapped(got, flop, moved, where):
    if same(got[0], moved) and same(got[1], flop) and flop != moved:
        raise Wrong("cost-swapped", expected=f"({flop:,}, {moved:,})", got=str(tuple(got)), where=where)


def _each_use(flop, size, results):
    """Two operands moved for each multiply-add, the result not, once, or each time as well."""
    return [("moved-at-each-use", size * uses) for uses in (flop, flop + results, flop + flop // 2, 2 * flop)]


def _flop_mistakes(flop, batch, c_in, c_out, height, width, kernel, stride, padding, groups):
    """What known mistakes give in place of the right number of operations."""
    each = 2 * batch * c_out * (c_in // groups) * kernel**2

    def pixels(h, w, stride=stride, padding=2 * padding, round_=lambda x: x // 1):
        return (round_((h + padding - kernel) / stride) + 1) * (round_((w + padding - kernel) / stride) + 1)

    mistakes = [
        ("multiply-add-once", flop / 2),
        ("kernel-not-squared", flop / kernel),
        ("batch-forgotten", flop / batch),
        ("groups-ignored", flop * groups),
        ("groups-twice", flop / groups),
        ("stride-ignored", each * pixels(height, width, stride=1)),
        ("padding-ignored", each * pixels(height, width, padding=0)),
        ("padding-one-side", each * pixels(height, width, padding=padding)),
        ("pixels-rounded-up", each * pixels(height, width, round_=lambda x: -(-x // 1))),
        ("pixels-not-whole", each * pixels(height, width, round_=lambda x: x)),
        ("not-square", each * pixels(height, height)),
        ("not-square", each * pixels(width, width)),
        ("stride-ignored" if stride > 1 else "borders-ignored", each * height * width),
        ("borders-ignored", each * (height // stride) * (width // stride)),
        ("borders-ignored", each * -(-height // stride) * -(-width // stride)),
    ]
    return [(slug, value) for slug, value in mistakes if value != flop]


def _bytes(size):
    return f"{size} byte{'s' if size > 1 else ''} per element"
