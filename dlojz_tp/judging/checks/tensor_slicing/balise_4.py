"""Balise 4: self-attention cut by heads."""

from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.judging.checks.tensor_slicing import parts
from dlojz_tp.judging.checks.tensor_slicing.attention_dropout import CLAIM, dropped, judge_dropout
from dlojz_tp.judging.checks.tensor_slicing.attention_forms import attention_forms
from dlojz_tp.judging.checks.tensor_slicing.common import STEPS, noise, randomise, refused, truth
from dlojz_tp.judging.checks.tensor_slicing.layers import layer_looks
from dlojz_tp.judging.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each
from dlojz_tp.models import Attention

WIDTH, HEADS = 32, 8


@cache
def _case() -> dict:
    plain, other = (randomise(Attention(WIDTH, HEADS), seed) for seed in (1, 2))
    return {
        "plain": plain, "other": other, "forms": attention_forms(WIDTH // HEADS),
        "large": partial(Attention, 384, HEADS),
        "batches": [noise(2, 5, WIDTH, seed=20 + k) for k in range(STEPS)],
        "upstream": [noise(2, 5, WIDTH, seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


@cache
def _truth() -> dict:
    return truth(_case())


def _attention(row_part, SlicedAttention, case, ranks):  # noqa: N803
    """On a rank: the report of the part and of the layer as it is trained, then of what else must hold."""
    report = parts.trained(row_part, 1, SlicedAttention, case, ranks)
    yield report
    if report["stopped"] or report["single"]:
        return
    report = {"odd": parts.odd_batches(SlicedAttention, case["other"], WIDTH, ranks)}
    report["shorter"] = parts.shorter(SlicedAttention, case["other"], case["batches"][0], ranks)
    report["dropout"] = dropped(SlicedAttention, WIDTH, HEADS, ranks)
    if ranks.size == parts.LONGER_AT:
        report["longer"] = parts.longer(SlicedAttention, case["other"], WIDTH, ranks)
    report["refused"] = {}
    if ranks.size > 1:
        report["refused"][3] = refused(SlicedAttention, randomise(Attention(12, 3), 4), ranks)
    yield report


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
        heads = []
        for columns in zip(*(layer(x).chunk(size, -1) for layer in (plain.query, plain.key, plain.value)), strict=True):
            q, k, v = (split(column, HEADS * factor // size) for column in columns)
            heads.append(join(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)))
        return plain.output(torch.cat(heads, -1))


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
LOOKS = [
    *parts.looks("row_part: an nn.Linear with this rank's input features, without bias", 1),
    *layer_looks(_case, _truth, (1, 1), sent=(2 * 5 * WIDTH * 8, 2 * 5 * WIDTH * 8), known=_KNOWN),
    parts.odd("one sequence; a transposed input; float32"),
]  # fmt: skip
MORE = [
    replace(parts.SHORTER, claim=CLAIM),
    parts.sizes("a number of heads that the ranks do not divide is refused, even if they divide the width",
                "{n} heads, of a width that divides,"),
    parts.LONGER,
]  # fmt: skip


def balise_4(row_part, SlicedAttention):  # noqa: N803
    """The part by itself; the layer; its dropout; heads that do not divide."""
    yield LOOKS[0].claim
    yield from in_groups_too(_judge, on_groups(_attention, row_part, SlicedAttention, _case()))


def _judge(every):
    yield from at_each(LOOKS, every)
    yield from judge_dropout(every)
    yield from at_each(MORE, every)
