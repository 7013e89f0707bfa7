"""Balise 2: attention with relative positions: the table of offsets spread over all pairs, and the scores written out."""

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent
from dlojz_tp.judging.checks.large_models.wrong_tensors import names_of_wrong
from dlojz_tp.measure.operations import Operations

DRAWN = torch.Generator().manual_seed(22)


def drawn(*shape):
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64)


TABLE = drawn(2, 5, 3), 3, 2  # two heads, three rows of two places
OTHERS = (drawn(1, 1, 1), 1, 1), (drawn(3, 1, 7), 1, 4), (drawn(2, 7, 1), 4, 1), (drawn(1, 3, 7), 2, 4)
ALONG = drawn(2, 6, 6)
GIVEN = (
    drawn(2, 3, 6, 7),
    drawn(2, 3, 6, 7),
    drawn(2, 3, 6, 5),
    drawn(3, 6, 6),
)  # q, k, v, bias; with heads of 4, √d is d / 2
LARGE = 1000 * GIVEN[0], *GIVEN[1:]
ONE = drawn(1, 1, 1, 2), drawn(1, 1, 1, 2), drawn(1, 1, 1, 3), drawn(1, 1, 1)
OUT = drawn(2, 3, 6, 5)


def bias_of(table, height, width):
    """Pair by pair."""
    places = [(r, c) for r in range(height) for c in range(width)]
    rows = [torch.stack([table[:, r - s + height - 1, c - t + width - 1] for s, t in places], 1) for r, c in places]
    return torch.stack(rows, 1)


def attention_of(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def gradients(call, along, tensors, *sizes):
    given = [one.clone().requires_grad_() for one in tensors]
    out = call(*given, *sizes)
    if not out.requires_grad:
        return [torch.zeros_like(one) for one in given]
    found = torch.autograd.grad((out * along).sum(), given, allow_unused=True)
    return [torch.zeros_like(one) if g is None else g for one, g in zip(given, found)]


def operators(relative_bias, side, heads=1):
    with Operations() as operations:
        relative_bias(torch.ones(heads, 2 * side - 1, 2 * side - 1), side, side)
    return operations.total


def observe(relative_bias, relative_attention):
    got = relative_bias(TABLE[0].clone(), *TABLE[1:])
    yield {"bias form": form(got), "bias": got}
    yield {"other sizes": [relative_bias(table.clone(), *sizes) for table, *sizes in OTHERS]}
    yield {"of the table": gradients(relative_bias, ALONG, TABLE[:1], *TABLE[1:])}
    few = operators(relative_bias, 3)
    yield {
        "more": operators(relative_bias, 9) - few,
        "for more heads": operators(relative_bias, 3, 7) - operators(relative_bias, 3, 2),
    }
    given = [one.clone() for one in GIVEN]
    with Operations() as operations:
        got = relative_attention(*given)
    yield {"form": form(got), "out": got}
    yield {"called": any("scaled_dot_product" in name for name in operations.functions | operations.calls.keys())}
    yield {"changed": [name for name, one, before in zip("qkv", given, GIVEN) if not torch.equal(one, before)]}
    yield {"large": relative_attention(*(one.clone() for one in LARGE))}
    yield {"one": relative_attention(*(one.clone() for one in ONE))}
    yield {"gradients": gradients(relative_attention, OUT, GIVEN)}


def rounded_or(slug, otherwise):
    """The hint: one of values that are right to float32 only."""
    return lambda seen, due: slug if close(seen, due, 1e-4) else otherwise


LOOKS = [
    Look("one bias for each head and each pair of places", "bias form", form(bias_of(*TABLE)), "bias-form"),
    Value("the bias of each pair's offset, on three rows of two places", "bias", bias_of(*TABLE), "wrong-bias"),
    Value("one place, one row, one column, two rows", "other sizes", [bias_of(*one) for one in OTHERS], "wrong-bias"),
    Value("the gradient of the table", "of the table", gradients(bias_of, ALONG, TABLE[:1], *TABLE[1:]), "table-gradient",
          fields=silent),
    Look("as many operators for 81 places as for 9", "more", 0, "operators-grow", holds=at_most, fields="n"),
    Look("nor more for seven heads", "for more heads", 0, "a-loop-over-heads", holds=at_most, fields="n"),
    Look("the shape and dtype of attention's output", "form", form(attention_of(*GIVEN)), "attention-form"),
    Look("the scores are written out", "called", False, "borrowed"),
    Value("equal to PyTorch's own attention, in float64", "out", attention_of(*GIVEN), rounded_or("float32-inside", "wrong-attention")),
    Look("unchanged inputs", "changed", [], "inputs-changed", fields=lambda seen, due: {"what": " and ".join(seen)}),
    Look("scores of several thousand", "large", attention_of(*LARGE), "overflow"),
    Value("one head, one place, a batch of one", "one", attention_of(*ONE), "wrong-attention"),
    Value("gradients", "gradients", gradients(attention_of, OUT, GIVEN), "no-gradient",
          fields=names_of_wrong(["q", "k", "v", "bias"])),
]  # fmt: skip


def balise_2(relative_bias, relative_attention):
    yield from judged(LOOKS, observe, relative_bias, relative_attention)
