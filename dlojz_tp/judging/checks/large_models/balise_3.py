"""Balise 3: parameters and operations of three layers, against modules on the meta device and PyTorch's counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.judging.checking.looks import Look, Value, judged, numbers
from dlojz_tp.models.coatnet import MBConv, RelativeAttention
from dlojz_tp.models.transformer import FeedForward
from dlojz_tp.models.vit import SelfAttention

#     (c, d, n, heads, table); with a table the places are (height, width) instead of n
ATTENTION = [
    (8, 8, 5, 2, 0),
    (24, 24, 17, 3, 0),
    (8, 24, (3, 4), 3, 35),
    (48, 16, (5, 2), 4, 27),
    (16, 16, (1, 1), 2, 1),
]
FEED_FORWARD = [(8, 32, 5), (12, 20, 1), (64, 16, 30)]
#         (c, d, height, width, stride)
ALIKE = [(8, 8, 6, 5, 1), (16, 16, 3, 8, 1), (32, 32, 2, 2, 1)]
STRIDED = [(8, 16, 6, 4, 2), (24, 8, 8, 2, 2), (16, 16, 4, 6, 2), (8, 12, 3, 5, 1), (4, 8, 4, 2, 2)]


def _counted(layer, *shape):
    """(parameters, operations of a forward) of a module on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.empty(1, *shape, device="meta"))
    return sum(p.numel() for p in layer.parameters()), counter.get_total_flops()


def _attention(c, d, n, heads, table):
    if not table:
        return _counted(SelfAttention(d, heads), n, c)
    return _counted(RelativeAttention(c, d, d // heads, n), n[0] * n[1], c)


def _given(c, d, n, heads, table):
    return c, d, n[0] * n[1] if table else n, heads, table


with torch.device("meta"):
    DUE = {
        "attention": {_given(*case): _attention(*case) for case in ATTENTION},
        "feed-forward": {case: _counted(FeedForward(*case[:2]), case[2], case[0]) for case in FEED_FORWARD},
        "alike": {case: _counted(MBConv(case[0], case[1], case[4]), case[0], *case[2:4]) for case in ALIKE},
        "strided": {case: _counted(MBConv(case[0], case[1], case[4]), case[0], *case[2:4]) for case in STRIDED},
    }
NAMES = {"attention": "c={}, d={}, n={}, heads={}, table={}", "feed-forward": "d={}, f={}, n={}"}
BLOCK = "c={}, d={}, height={}, width={}, stride={}"


def observe(attention_cost, feed_forward_cost, mbconv_cost):
    """Of each group: how many numbers came for a case; parameters and operations, as parts of the true ones."""
    answers = {
        "attention": attention_cost,
        "feed-forward": feed_forward_cost,
        "alike": mbconv_cost,
        "strided": mbconv_cost,
    }
    for group, due in DUE.items():
        got = [numbers(answers[group](*case)) for case in due]
        found = {f"{group} numbers": None if got[0] is None else [len(one or []) for one in got]}
        yield found
        parts = torch.tensor(got, dtype=torch.float64) / torch.tensor(list(due.values()), dtype=torch.float64)
        yield {f"{group} parameters": parts[:, 0], f"{group} operations": parts[:, 1]}


def _shown(group, column):
    """Fields: the first case that is wrong, in whole numbers."""

    def fields(seen, due):
        k = int(((seen - due).abs() > 1e-9).int().argmax())
        case, truth = list(DUE[group].items())[k]
        text = NAMES.get(group, BLOCK).format(*case)
        by = round(truth[column] * seen[k].item()) - truth[column]
        words = {"by": f"{abs(by):,}", "word": "many" if by > 0 else "few"}
        return words | {
            "expected": f"{truth[column]:,}",
            "got": f"{truth[column] * seen[k].item():,.0f}",
            "where": text,
        }

    return fields


def _looks(group, claim):
    ones = torch.ones(len(DUE[group]), dtype=torch.float64)
    return [
        Look(claim, f"{group} numbers", [2] * len(ones), "not-two"),
        Value("", f"{group} parameters", ones, "wrong-parameters", fields=_shown(group, 0)),
        Value("", f"{group} operations", ones, "wrong-operations", fields=_shown(group, 1)),
    ]


LOOKS = [
    *_looks("attention", "attention: parameters and operations, with and without a table of biases"),
    *_looks("feed-forward", "feed-forward, also at a single place"),
    *_looks("alike", "MBConv that keeps the shape"),
    *_looks("strided", "MBConv with a stride, with a change of channels, on images that are not square"),
]


def balise_3(attention_cost, feed_forward_cost, mbconv_cost):
    yield from judged(LOOKS, observe, attention_cost, feed_forward_cost, mbconv_cost)
