"""Balise 4: self-attention cut by heads."""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import (
    SLICES,
    STEPS,
    CheckRanks,
    Form,
    build,
    exercise,
    noise,
    on_ranks,
    randomise,
    refused,
    together,
    truth,
)  # fmt: skip
from dlojz_tp.checks.tensor_slicing.layers import flattened, judge_layer, refuse_sizes
from dlojz_tp.checks.tensor_slicing.parts import judge_odd, judge_part, odd_batches, one_part
from dlojz_tp.models import Attention

HINTS = {
    "scaled-by-width": "The scores are scaled by the hidden size, the whole one or this rank's part. The scale is 1/√k, k the "
    "size of one head, and a head is not cut.",
    "not-scaled": "The scores are not scaled: 1/√k, k the size of a head.",
    "not-causal": "Every token looks at later ones too: attention here is causal.",
    "heads-not-divided": "The heads came out {n} times too small: this rank's width was split into as many heads as the whole "
    "layer has. It holds only its share of them, each as large as before.",
    "heads-mixed": "The heads were joined in another order than they were split: (b, heads, s, k) has to become (b, s, heads, k) "
    "before the last two are joined.",
    "same-mask": "The heads of different ranks are dropped out alike: all ranks draw the same random numbers. Inside the sliced "
    "region they must come from ranks.own_random().",
    "outside-differs": "After the layer, the ranks draw different random numbers: what is dropped out outside would no longer be "
    "the same on all of them. Keep the ranks' own draws inside ranks.own_random(), and set no seed.",
    "mask-repeats": "Two calls dropped out the same: the random numbers begin anew each time. Set no seed in forward.",
    "dropout-lost": "Nothing is dropped out in training, although the layer's dropout is {rate}.",
    "dropout-in-eval": "In evaluation the result is not the plain layer's: something is dropped out (self.training is False).",
    "dropout-elsewhere": "What is dropped out are numbers of the result. The plain layer drops out attention weights (dropout_p).",
    "dropout-disagrees": "In training with dropout, the ranks' results differ. They must be the same sum.",
}  # fmt: skip

WIDTH, HEADS = 32, 8
RATE = 0.5


def attention_forms(prefix: str = "") -> list[Form]:
    """What a rank holds of an attention: query, key and value by columns, alone or stacked; the output by rows."""
    three = [f"{prefix}{name}" for name in ("query", "key", "value")]
    forms = [Form((f"{name}.{part}",), 0) for name in three for part in ("weight", "bias")]
    forms += [Form(tuple(f"{name}.{part}" for name in three), 0) for part in ("weight", "bias")]
    return [*forms, Form((f"{prefix}output.weight",), 1), Form((f"{prefix}output.bias",), None, optional=True)]


@cache
def _case() -> dict:
    plain, other = (randomise(Attention(WIDTH, HEADS), seed) for seed in (1, 2))
    return {
        "plain": plain, "other": other, "forms": attention_forms(),
        "batches": [noise(2, 4, WIDTH, seed=20 + k) for k in range(STEPS)],
        "upstream": [noise(2, 4, WIDTH, seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


@cache
def _truth() -> dict:
    return truth(_case())


def balise_4(row_part, SlicedAttention):  # noqa: N803
    """The part by itself; the layer; its dropout; heads that do not divide."""
    yield "row_part: an nn.Linear with this rank's input features, without bias"
    every = flattened(on_ranks(_attention, row_part, SlicedAttention, _case(), sizes=SLICES))
    for size, rank, got in reversed(every):
        judge_part(got["part"], 1, f"rank {rank} of {size}")
    sent = 2 * 4 * WIDTH * 8
    yield from judge_layer(every, _truth(), _case(), calls=(1, 1), sizes_of=lambda size: (sent, sent), known=_KNOWN)
    yield "one sequence; a transposed input; float32"
    for size, rank, got in every:
        judge_odd(got["odd"], f"rank {rank} of {size}")
    yield "dropout: in training only, other masks on other ranks, the same draws outside"
    for size in SLICES:
        _dropout([got["dropout"] for n, _, got in every if n == size], size)
    yield "heads that the ranks do not divide are refused, where the width divides too"
    refuse_sizes(every, "refused", "{n} heads, of a width that divides,")


def _attention(row_part, SlicedAttention, case):  # noqa: N803
    ranks = CheckRanks()
    report = {"part": one_part(row_part, 1, ranks)}
    if not together(report["part"]["fine"]):
        return report
    report |= exercise(SlicedAttention, case)
    if report["stopped"]:
        return report
    report["odd"] = odd_batches(SlicedAttention, case["other"], WIDTH, ranks)
    report["dropout"] = _dropped(SlicedAttention, ranks)
    if ranks.size > 1:
        report["refused"] = {3: refused(SlicedAttention, randomise(Attention(12, 3), 4), ranks)}
    else:
        report["refused"] = {}
    return report


def _revealing() -> Attention:
    """An attention that shows its mask: all scores are alike, all values 1, and the projection changes nothing."""
    plain = Attention(WIDTH, HEADS, dropout=RATE).double()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
        plain.value.bias.fill_(1.0)
        plain.output.weight.copy_(torch.eye(WIDTH))
    return plain


def _dropped(SlicedAttention, ranks):  # noqa: N803
    layer, _ = build(SlicedAttention, _revealing(), ranks)
    torch.manual_seed(11)  # all ranks alike, as in the notebook
    x = torch.zeros(2, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        found = {"first": layer(x).clone(), "second": layer(x).clone(), "outside": torch.rand(4)}
        layer.eval()
        found["eval"] = layer(x).clone()
    return found


def _dropout(reports, size):
    ones = torch.ones(2, 16, WIDTH, dtype=torch.float64)
    for rank, got in enumerate(reports):
        where = f"rank {rank} of {size}"
        if not close(got["eval"], ones):
            raise Wrong("dropout-in-eval", expected=ones, got=got["eval"], where=where)
        if close(got["first"], ones):
            raise Wrong("dropout-lost", rate=RATE, where=where)
        late = got["first"][:, 8:]
        if bool(((late == 0) | (late == 2)).all()):
            raise Wrong("dropout-elsewhere", where=where)
        if size > 1:
            parts = got["first"].chunk(size, -1)
            if any(close(parts[k], parts[0]) for k in range(1, size)):
                raise Wrong("same-mask", where=f"{size} ranks")
    for rank, got in enumerate(reports):
        where = f"rank {rank} of {size}"
        if not close(got["outside"], reports[0]["outside"]):
            raise Wrong("outside-differs", where=where)
        if not close(got["first"], reports[0]["first"]):
            raise Wrong("dropout-disagrees", where=where)
        if close(got["first"], got["second"]):
            raise Wrong("mask-repeats", where=where)


def _heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _computed(size, scale=None, causal=True, heads=HEADS, join=None):
    """The layer's first result with something done in another way."""
    plain, x = _case()["plain"], _case()["batches"][0]
    with torch.no_grad():
        q, k, v = (_heads(layer(x), heads) for layer in (plain.query, plain.key, plain.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        joined = join(y, size) if join else y.transpose(1, 2).flatten(2)
        return plain.output(joined)


def _not_transposed(y, size):
    """Each rank's heads joined without turning (heads, s) round."""
    return torch.cat([part.reshape(part.shape[0], part.shape[2], -1) for part in y.chunk(size, 1)], -1)


def _scaled(_rank, size):
    return _computed(size, WIDTH**-0.5)


def _scaled_local(_rank, size):
    return _computed(size, (WIDTH / size) ** -0.5)


_KNOWN = (
    ("scaled-by-width", _scaled),
    ("scaled-by-width", _scaled_local),
    ("not-scaled", lambda rank, size: _computed(size, 1.0)),
    ("not-causal", lambda rank, size: _computed(size, causal=False)),
    ("heads-not-divided", lambda rank, size: _computed(size, heads=HEADS * size)),
    ("heads-mixed", lambda rank, size: _computed(size, join=_not_transposed)),
)
