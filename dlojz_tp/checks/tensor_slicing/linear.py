"""Balises 2, 5 and 6: a linear layer cut by columns, a feed-forward of two of them, and the pair of columns and rows."""

from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import STEPS, Form, exercise, noise, randomise, refused, together, truth
from dlojz_tp.checks.tensor_slicing.layers import judge_layer, refuse_sizes
from dlojz_tp.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.checks.tensor_slicing.parts import (
    INPUTS,
    LARGE,
    LONGER_AT,
    OUTPUTS,
    judge_longer,
    judge_odd,
    judge_part,
    linear,
    longer,
    odd_batches,
    one_part,
    run,
)  # fmt: skip
from dlojz_tp.models import FeedForward

HINTS = {
    "rows-before-columns": "You cut the first layer by rows and the second by columns. Then you need a sum between "
                           "the two, before the GELU, and must gather the result. Cut the first by columns and the "
                           "second by rows: then nothing travels in between.",
    "activation-lost": "The GELU is missing: this is the result without it.",
    "activation-late": "The GELU comes after the second layer. It belongs between the two.",
    "activation-on-terms": "You apply the GELU to each rank's term of a sum. φ(a + b) is not φ(a) + φ(b): apply it "
                           "where the numbers are complete.",
    "activation-other": "This is the result of another activation. The plain layer has a GELU between the two.",
    "activation-approximate": "You use the tanh approximation of the GELU. The plain layer uses the exact GELU.",
}  # fmt: skip

WIDTH, HIDDEN = 12, 48


@cache
def _case(kind: str) -> dict:
    if kind == "linear":
        plain, other = linear(1), linear(2)
        forms = [Form(("weight",), 0), Form(("bias",), 0)]
        shapes = (2, 3, INPUTS), (2, 3, OUTPUTS)
    else:
        plain, other = (randomise(FeedForward(WIDTH, HIDDEN), seed) for seed in (3, 4))
        # balise 5 may be cut either way, the pair of 6 in one way only
        forms = pair_forms() + ([Form(("down.weight",), 0), Form(("down.bias",), 0)] if kind == "gathered" else [])
        shapes = (2, 3, WIDTH), (2, 3, WIDTH)
    return {
        "kind": kind, "plain": plain, "other": other, "forms": forms,
        "large": LARGE if kind == "linear" else partial(FeedForward, 256, 512),
        "batches": [noise(*shapes[0], seed=20 + k) for k in range(STEPS)],
        "upstream": [noise(*shapes[1], seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


def pair_forms(prefix: str = "") -> list[Form]:
    """What a rank holds of a feed-forward cut by columns, then rows."""
    first = [Form((f"{prefix}up.weight",), 0), Form((f"{prefix}up.bias",), 0)]
    return [*first, Form((f"{prefix}down.weight",), 1), Form((f"{prefix}down.bias",), None, optional=True)]


@cache
def _truth(kind: str) -> dict:
    return truth(_case(kind))


def balise_2(column_part, ColumnLinear):  # noqa: N803
    """The part by itself; the layer with and without bias, in odd shapes, and sizes that do not divide."""
    yield "column_part: an nn.Linear with this rank's output features, in its own memory"
    every = on_groups(_linears, column_part, ColumnLinear, _case("linear"))
    yield from in_groups_too(_linear, every)


def _linear(every):
    case = _case("linear")
    for size, rank, got in every:
        judge_part(got["part"], 0, f"rank {rank} of {size}")
    yield from judge_layer(
        every, _truth("linear"), case, calls=(1, 1),
        sizes_of=lambda size: (2 * 3 * OUTPUTS * 8, 2 * 3 * INPUTS * 8),
    )  # fmt: skip
    yield "without bias; one sequence; a transposed input; float32"
    for size, rank, got in every:
        judge_odd(got["odd"], f"rank {rank} of {size}")
    yield "sizes that do not divide are refused"
    refuse_sizes(every, "refused", "{n} output features")
    yield from judge_longer(every)


def _linears(column_part, ColumnLinear, case, ranks):  # noqa: N803
    report = {"part": one_part(column_part, 0, ranks), "stopped": "part"}
    if not together(report["part"]["fine"]):
        return report
    report |= exercise(ColumnLinear, case, ranks)
    if report["stopped"]:
        return report
    bare = linear(6, bias=False)
    report["odd"] = {"a layer without bias": run(ColumnLinear, bare, noise(2, INPUTS, seed=7), ranks)}
    report["odd"] |= odd_batches(ColumnLinear, linear(5), INPUTS, ranks)
    if ranks.size == LONGER_AT:
        report["longer"] = longer(ColumnLinear, case["other"], INPUTS, ranks, gathered=True)
    uneven = linear(5, outputs=7, bias=ranks.size == 4)
    report["refused"] = {7: refused(ColumnLinear, uneven, ranks)} if ranks.size > 1 else {}
    return report


def _feed_forwards(Layer, case, ranks):  # noqa: N803
    report = exercise(Layer, case, ranks)
    if report["stopped"]:
        return report
    report["odd"] = odd_batches(Layer, randomise(FeedForward(WIDTH, HIDDEN), 5), WIDTH, ranks)
    if ranks.size == LONGER_AT and case["kind"] == "pair":
        report["longer"] = longer(Layer, case["other"], WIDTH, ranks)
    tried = {1: [], 2: [7], 4: [14]}[ranks.size]
    report["refused"] = {n: refused(Layer, randomise(FeedForward(WIDTH, n), 6), ranks) for n in tried}
    return report


def _mistake(work):
    """An output of the plain layer's parts put together wrongly, by `work(plain, x, size)`."""

    def output(_rank, size):
        with torch.no_grad():
            return work(_case("pair")["plain"], _case("pair")["batches"][0], size)

    return output


def _on_terms(plain, x, size):
    """A GELU on each term behind the second layer, as if one stood there."""
    h = F.gelu(plain.up(x))
    parts = [part @ w.t() for part, w in zip(h.chunk(size, -1), plain.down.weight.chunk(size, 1), strict=True)]
    return sum(F.gelu(p) for p in parts) + plain.down.bias


_KNOWN = (
    ("activation-lost", _mistake(lambda plain, x, size: plain.down(plain.up(x)))),
    ("activation-late", _mistake(lambda plain, x, size: F.gelu(plain.down(plain.up(x))))),
    ("activation-approximate", _mistake(lambda plain, x, size: plain.down(F.gelu(plain.up(x), approximate="tanh")))),
    ("activation-other", _mistake(lambda plain, x, size: plain.down(F.relu(plain.up(x))))),
    ("activation-other", _mistake(lambda plain, x, size: plain.down(F.silu(plain.up(x))))),
    ("activation-on-terms", _mistake(_on_terms)),
)


def _feed_forward(kind, Layer, calls, sent):  # noqa: N803
    every = on_groups(_feed_forwards, Layer, _case(kind))
    yield from in_groups_too(partial(_judge, kind, calls, sent), every)


def _judge(kind, calls, sent, every):
    case = _case(kind)
    try:
        yield from judge_layer(every, _truth(kind), case, calls=calls, sizes_of=lambda size: (sent, sent), known=_KNOWN)
    except Wrong as wrong:
        if wrong.slug in ("wrong-dimension", "not-cut") and _rows_first(every):
            wrong.slug = "rows-before-columns"
        raise
    yield "one sequence; a transposed input; float32"
    for size, rank, got in every:
        judge_odd(got["odd"], f"rank {rank} of {size}")
    yield "sizes that do not divide are refused"
    refuse_sizes(every, "refused", "A feed-forward of width {n}")
    yield from judge_longer(every)


def _rows_first(every):
    """Whether some rank holds the first weight cut along its inputs, and the second along its outputs."""
    whole = {name: p.detach() for name, p in _case("pair")["plain"].named_parameters()}
    size, rank, got = every[0]
    return size > 1 and all(
        any(value.shape == part.shape and close(value, part) for value in got["parameters"].values())
        for part in (Form((f"{name}.weight",), dim).of(whole, rank, size) for name, dim in (("up", 1), ("down", 0)))
    )


def balise_5(GatheredFeedForward):  # noqa: N803
    """Two column-cut layers: right, with two communications each way."""
    yield from _feed_forward("gathered", GatheredFeedForward, (2, 2), 2 * 3 * 8 * (HIDDEN + WIDTH))


def balise_6(ColumnRow):  # noqa: N803
    """The pair: one communication each way, as large as its input."""
    yield from _feed_forward("pair", ColumnRow, (1, 1), 2 * 3 * 8 * WIDTH)
