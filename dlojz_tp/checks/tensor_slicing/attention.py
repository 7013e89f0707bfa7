"""Balise 4: self-attention cut by heads."""

from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.checks.tensor_slicing.attention_dropout import dropped, judge_dropout
from dlojz_tp.checks.tensor_slicing.common import STEPS, Form, exercise, noise, randomise, refused, together, truth
from dlojz_tp.checks.tensor_slicing.layers import judge_layer, refuse_sizes
from dlojz_tp.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.checks.tensor_slicing.parts import (
    LONGER_AT,
    judge_longer,
    judge_odd,
    judge_part,
    judge_shorter,
    longer,
    odd_batches,
    one_part,
    shorter,
)
from dlojz_tp.models import Attention

HINTS = {
    "scaled-by-width": "You scale the scores by the hidden size, either the whole one or this rank's part. The "
                       "scale is 1/√k, where k is the size of one head, and a head is not cut.",
    "not-scaled": "You do not scale the scores. The scale is 1/√k, where k is the size of a head.",
    "not-causal": "Every token also attends to later tokens, but attention here is causal.",
    "heads-not-divided": "The heads are {n} times too small: you split this rank's width into as many heads as the "
                         "whole layer has. The rank holds only its share of the heads, each as large as before.",
    "heads-mixed": "You split or join the heads in the wrong way. The numbers of one head are next to each other: "
                   "view (b, s, d) as (b, s, heads, k), then swap heads and s. Swap them back before you join the "
                   "last two dimensions.",
    "scaled-twice": "You scale the scores by too small a number. Either you scale twice, because "
                    "F.scaled_dot_product_attention already scales by 1/√k, or you compute k from this rank's "
                    "number of heads, and it is N times too large.",
}  # fmt: skip

WIDTH, HEADS = 32, 8


def attention_forms(prefix: str = "", head: int = WIDTH // HEADS) -> list[Form]:
    """What a rank holds of an attention: query, key and value by columns, alone or stacked; the output by rows.

    Stacked: the three one behind the other, or head by head, as Megatron-LM holds them, or number by number.
    """
    three = [f"{prefix}{name}" for name in ("query", "key", "value")]
    forms = [Form((f"{name}.{part}",), 0) for name in three for part in ("weight", "bias")]
    for size in (None, head, 1):
        forms += [Form(tuple(f"{name}.{part}" for name in three), 0, head=size) for part in ("weight", "bias")]
    return [*forms, Form((f"{prefix}output.weight",), 1), Form((f"{prefix}output.bias",), None, optional=True)]


@cache
def _case() -> dict:
    plain, other = (randomise(Attention(WIDTH, HEADS), seed) for seed in (1, 2))
    return {
        "plain": plain, "other": other, "forms": attention_forms(), "large": partial(Attention, 384, HEADS),
        "batches": [noise(2, 5, WIDTH, seed=20 + k) for k in range(STEPS)],
        "upstream": [noise(2, 5, WIDTH, seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


@cache
def _truth() -> dict:
    return truth(_case())


def balise_4(row_part, SlicedAttention):  # noqa: N803
    """The part by itself; the layer; its dropout; heads that do not divide."""
    yield "row_part: an nn.Linear with this rank's input features, without bias"
    every = on_groups(_attention, row_part, SlicedAttention, _case())
    yield from in_groups_too(_judge, every)


def _judge(every):
    for size, rank, got in every:
        judge_part(got["part"], 1, f"rank {rank} of {size}")
    sent = 2 * 5 * WIDTH * 8
    yield from judge_layer(every, _truth(), _case(), calls=(1, 1), sizes_of=lambda size: (sent, sent), known=_KNOWN)
    yield "one sequence; a transposed input; float32"
    for size, rank, got in every:
        judge_odd(got["odd"], f"rank {rank} of {size}")
    yield "dropout: only in training, as much as the rate says, other masks on other ranks, the same draws outside"
    for size in {size: None for size, _, _ in every}:
        judge_dropout([got["dropout"] for n, _, got in every if n == size], size)
    for size, rank, got in every:
        judge_shorter(got["shorter"], f"rank {rank} of {size}")
    yield "a number of heads that the ranks do not divide is refused, even if they divide the width"
    refuse_sizes(every, "refused", "{n} heads, of a width that divides,")
    yield from judge_longer(every)


def _attention(row_part, SlicedAttention, case, ranks):  # noqa: N803
    report = {"part": one_part(row_part, 1, ranks), "stopped": "part"}
    if not together(report["part"]["fine"]):
        return report
    report |= exercise(SlicedAttention, case, ranks)
    if report["stopped"]:
        return report
    report["odd"] = odd_batches(SlicedAttention, case["other"], WIDTH, ranks)
    report["shorter"] = shorter(SlicedAttention, case["other"], case["batches"][0], ranks)
    report["dropout"] = dropped(SlicedAttention, WIDTH, HEADS, ranks)
    if ranks.size == LONGER_AT:
        report["longer"] = longer(SlicedAttention, case["other"], WIDTH, ranks)
    if ranks.size > 1:
        report["refused"] = {3: refused(SlicedAttention, randomise(Attention(12, 3), 4), ranks)}
    else:
        report["refused"] = {}
    return report


def _split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join(y):
    return y.transpose(1, 2).flatten(2)


def _not_turned(x, heads):
    """(b, s, d) seen as (b, heads, s, k): tokens and heads are mixed."""
    return x.reshape(x.shape[0], heads, x.shape[1], -1)


def _number_by_number(x, heads):
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def _not_turned_back(y):
    return y.reshape(y.shape[0], y.shape[2], -1)


def _computed(size, scale=None, causal=True, factor=1, split=_split, join=_join):
    """The layer's first result, `size` ranks' parts computed one by one and something done in another way."""
    plain, x = _case()["plain"], _case()["batches"][0]
    with torch.no_grad():
        parts = []
        for columns in zip(*(layer(x).chunk(size, -1) for layer in (plain.query, plain.key, plain.value)), strict=True):
            q, k, v = (split(column, HEADS * factor // size) for column in columns)
            parts.append(join(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)))
        return plain.output(torch.cat(parts, -1))


_KNOWN = (
    ("scaled-by-width", lambda rank, size: _computed(size, WIDTH**-0.5)),
    ("scaled-by-width", lambda rank, size: _computed(size, (WIDTH / size) ** -0.5)),
    ("not-scaled", lambda rank, size: _computed(size, 1.0)),
    ("scaled-twice", lambda rank, size: _computed(size, HEADS / WIDTH)),
    ("not-causal", lambda rank, size: _computed(size, causal=False)),
    ("heads-not-divided", lambda rank, size: _computed(size, factor=size)),
    ("heads-mixed", lambda rank, size: _computed(size, join=_not_turned_back)),
    ("heads-mixed", lambda rank, size: _computed(size, split=_not_turned)),
    ("heads-mixed", lambda rank, size: _computed(size, split=_not_turned, join=_not_turned_back)),
    ("heads-mixed", lambda rank, size: _computed(size, split=_number_by_number)),
    (
        "heads-mixed",
        lambda rank, size: _computed(size, split=_number_by_number, join=lambda y: y.permute(0, 2, 3, 1).flatten(2)),
    ),
)
