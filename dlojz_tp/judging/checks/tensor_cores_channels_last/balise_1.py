"""Balise 1: operations and bytes of a matrix product and of a convolution, against PyTorch's own counter."""

import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.tensor_cores_channels_last.numbers import first, of_each, read, same, several

PAIR = "(operations, bytes)"
CASES = {  # products of uneven sizes; convolutions with one more difficulty at a time; last the bytes per element
    "a matrix product: operations and bytes, from the sizes and the bytes per element": [
        (64, 32, 80, 2), (1, 4096, 512, 2), (7, 13, 5, 4), (1000, 50257, 768, 1), (3, 11, 2, 8),
    ],
    "a convolution: kernel 3, and kernel 1": [
        (5, 6, 11, 17, 17, 3, 1, 0, 1, 4), (5, 6, 11, 17, 13, 3, 1, 0, 1, 4), (6, 64, 48, 14, 9, 1, 1, 0, 1, 2),
    ],
    "with padding": [(3, 10, 7, 19, 12, 5, 1, 2, 1, 2)],
    "with a stride, also one that does not divide evenly": [
        (4, 3, 14, 23, 16, 3, 2, 0, 1, 2), (3, 8, 16, 14, 10, 1, 2, 0, 1, 2), (4, 3, 22, 33, 26, 7, 3, 3, 1, 4),
    ],
    "with groups, up to one channel per group (depthwise)": [
        (3, 12, 20, 15, 10, 3, 1, 1, 4, 2), (7, 96, 96, 20, 14, 3, 2, 1, 96, 2),
    ],
    "one image, one byte per element; float64": [(1, 32, 64, 9, 31, 3, 2, 1, 4, 1), (1, 8, 24, 5, 5, 5, 4, 0, 8, 8)],
}  # fmt: skip


def observe(matmul_cost, conv_cost):
    """What each case costs."""
    for cases in CASES.values():
        for case in cases:
            yield {case: read((matmul_cost if len(case) == 4 else conv_cost)(*case))}


def _counted(operation, x, weights, size, **known):
    """The truth of a call: operations, elements of what is read and written, bytes of each; and what else is known."""
    with FlopCounterMode(display=False) as counter:
        results = operation(x, weights)
    counts = {"x": x.numel(), "weights": weights.numel(), "results": results.numel()}
    return SimpleNamespace(flop=counter.get_total_flops(), size=size, **counts, **known)


def _product(m, n, k, size):
    a, b = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    about = {"kind": "product", "where": f"m={m}, n={n}, k={k}, {_each(size)}", "batch": 1}
    return _counted(torch.mm, a, b, size, mistakes=[("multiply-add-once", m * n * k)], more={}, **about)


def _conv(batch, c_in, c_out, height, width, kernel, stride, padding, groups, size):
    x = torch.empty(batch, c_in, height, width, device="meta")
    weight = torch.empty(c_out, c_in // groups, kernel, kernel, device="meta")
    more = {
        "weights-ignore-groups": weight.numel() * (groups - 1),
        "weights-each-image": weight.numel() * (batch - 1),
        "padding-moved": batch * c_in * (height + 2 * padding) * (width + 2 * padding) - x.numel(),
    }
    each = 2 * batch * c_out * (c_in // groups) * kernel**2

    def pixels(h, w, stride=stride, padding=2 * padding, round_=lambda x: x // 1):
        return (round_((h + padding - kernel) / stride) + 1) * (round_((w + padding - kernel) / stride) + 1)

    flop = each * pixels(height, width)
    mistakes = [
        ("multiply-add-once", flop / 2), ("kernel-not-squared", flop / kernel), ("batch-forgotten", flop / batch),
        ("groups-ignored", flop * groups), ("groups-twice", flop / groups),
        ("stride-ignored", each * pixels(height, width, stride=1)),
        ("padding-ignored", each * pixels(height, width, padding=0)),
        ("padding-one-side", each * pixels(height, width, padding=padding)),
        ("pixels-rounded-up", each * pixels(height, width, round_=lambda x: -(-x // 1))),
        ("pixels-not-whole", each * pixels(height, width, round_=lambda x: x)),
        ("not-square", each * pixels(height, height)), ("not-square", each * pixels(width, width)),
        ("stride-ignored" if stride > 1 else "borders-ignored", each * height * width),
        ("borders-ignored", each * (height // stride) * (width // stride)),
        ("borders-ignored", each * -(-height // stride) * -(-width // stride)),
    ]  # fmt: skip
    where = (
        f"{batch} images {c_in}×{height}×{width} to {c_out} channels, kernel {kernel}, stride {stride}, "
        f"padding {padding}, groups {groups}, {_each(size)}"
    )
    return _counted(lambda x, w: F.conv2d(x, w, None, stride, padding, groups=groups), x, weight, size,
                    kind="conv", where=where, batch=batch, mistakes=mistakes, more=more)  # fmt: skip


def _each(size):
    return f"{size} byte{'s' if size > 1 else ''} per element"


def _moved(got, due):
    """Bytes of the results for which the operations are: of one mistake in both, the bytes are not told as well."""
    otherwise = not same(got[0], due.flop) and not _flop_hint(got, due).startswith("groups")
    return due.size * (due.x + due.weights + due.results * (got[0] / due.flop if otherwise else 1))


def _flop_hint(got, due):
    swapped = same(got[0], due.size * (due.x + due.weights + due.results)) and same(got[1], due.flop)
    return "cost-swapped" if swapped else first(got[0], due.mistakes, f"wrong-{due.kind}-flop")


def _bytes_hint(got, due):
    moved, size = _moved(got, due), due.size
    results = moved / size - due.x - due.weights
    # two operands moved for each multiply-add, the result not, once, or each time as well
    each_use = due.flop, due.flop + results, due.flop + due.flop // 2, 2 * due.flop
    mistakes = [
        ("result-not-moved", size * (due.x + due.weights)),
        *(("operand-not-moved", moved - size * operand) for operand in (due.x, due.weights)),
        ("elements-not-bytes", moved / size),
        *((slug, moved + size * elements) for slug, elements in due.more.items()),
        *(("moved-at-each-use", size * uses) for uses in each_use),
    ]
    return first(got[1], mistakes, f"wrong-{due.kind}-bytes")


@functools.cache
def _truth(case, _at=None):
    """Counted when it is needed: PyTorch imports its compiler for that."""
    return (_product if len(case) == 4 else _conv)(*case)


def _look(case, k, truth, unit, hint):
    """A look at one of the two numbers. truth(got, due): what it must be."""

    def fields(got, due):
        numbers = {"expected": f"{truth(got, due):,} {unit}", "got": f"{got[k]:,}"}
        return numbers | {"where": due.where, "batch": due.batch}

    due = functools.partial(_truth, case)
    return Look("", case, due, hint, holds=lambda got, due: same(got[k], truth(got, due)), fields=fields)


def _looks(claim, case):
    yield several(claim, case, 2, "not-a-cost", PAIR)
    yield _look(case, 0, lambda got, due: due.flop, "operations", _flop_hint)
    yield _look(case, 1, _moved, "bytes", _bytes_hint)


LOOKS = of_each(CASES, _looks)


def balise_1(matmul_cost, conv_cost):
    yield from judged(LOOKS, observe, matmul_cost, conv_cost)
