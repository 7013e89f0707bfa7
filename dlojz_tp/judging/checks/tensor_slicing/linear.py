"""Balises 2, 5 and 6: a linear layer cut by columns, a feed-forward of two of them, and the pair of columns and rows."""

from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checks.tensor_slicing import parts
from dlojz_tp.judging.checks.tensor_slicing.common import STEPS, Form, exercise, noise, randomise, refused, truth
from dlojz_tp.judging.checks.tensor_slicing.layers import layer_looks
from dlojz_tp.judging.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each
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
def case_of(kind: str) -> dict:
    if kind == "linear":
        plain, other = parts.linear(1), parts.linear(2)
        forms = [Form(("weight",), 0), Form(("bias",), 0)]
        shapes = (2, 3, parts.INPUTS), (2, 3, parts.OUTPUTS)
    else:
        plain, other = (randomise(FeedForward(WIDTH, HIDDEN), seed) for seed in (3, 4))
        # balise 5 may be cut either way, the pair of 6 in one way only
        forms = pair_forms() + ([Form(("down.weight",), 0), Form(("down.bias",), 0)] if kind == "gathered" else [])
        shapes = (2, 3, WIDTH), (2, 3, WIDTH)
    return {
        "kind": kind, "plain": plain, "other": other, "forms": forms,
        "large": parts.LARGE if kind == "linear" else partial(FeedForward, 256, 512),
        "batches": [noise(*shapes[0], seed=20 + k) for k in range(STEPS)],
        "upstream": [noise(*shapes[1], seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


def pair_forms(prefix: str = "") -> list[Form]:
    """What a rank holds of a feed-forward cut by columns, then rows."""
    first = [Form((f"{prefix}up.weight",), 0), Form((f"{prefix}up.bias",), 0)]
    return [*first, Form((f"{prefix}down.weight",), 1), Form((f"{prefix}down.bias",), None, optional=True)]


@cache
def _truth(kind: str) -> dict:
    return truth(case_of(kind))


LINEAR = [
    *parts.looks("column_part: an nn.Linear with this rank's output features, in its own memory", 0),
    *layer_looks(partial(case_of, "linear"), partial(_truth, "linear"), (1, 1),
                 sent=(2 * 3 * parts.OUTPUTS * 8, 2 * 3 * parts.INPUTS * 8)),
    parts.odd("without bias; one sequence; a transposed input; float32"),
    parts.sizes("sizes that do not divide are refused", "{n} output features"),
    parts.LONGER,
]  # fmt: skip


def linears(column_part, ColumnLinear, case, ranks):  # noqa: N803
    """On a rank: the report of the part and of the layer as it is trained, then of what else must hold."""
    part = parts.trained(column_part, 0, ColumnLinear, case, ranks)
    yield part
    if part["stopped"] or part["single"]:
        return
    report = {"odd": parts.odd_batches(ColumnLinear, parts.linear(5), parts.INPUTS, ranks)}
    if not part["bias error"]:
        bare = parts.linear(6, bias=False)
        report["odd"]["a layer without bias"] = parts.run(ColumnLinear, bare, noise(2, parts.INPUTS, seed=7), ranks)
    if ranks.size == parts.LONGER_AT:
        report["longer"] = parts.longer(ColumnLinear, case["other"], parts.INPUTS, ranks, gathered=True)
    uneven = parts.linear(5, outputs=7, bias=ranks.size == 4)
    report["refused"] = {7: refused(ColumnLinear, uneven, ranks)} if ranks.size > 1 else {}
    yield report


def _feed_forwards(Layer, case, ranks):  # noqa: N803
    """On a rank: the report of the layer as it is trained, then of what else must hold."""
    report = exercise(Layer, case, ranks)
    yield report
    if report["stopped"]:
        return
    report = {"odd": parts.odd_batches(Layer, randomise(FeedForward(WIDTH, HIDDEN), 5), WIDTH, ranks)}
    if ranks.size == parts.LONGER_AT and case["kind"] == "pair":
        report["longer"] = parts.longer(Layer, case["other"], WIDTH, ranks)
    tried = {1: [], 2: [7], 4: [14]}[ranks.size]
    report["refused"] = {n: refused(Layer, randomise(FeedForward(WIDTH, n), 6), ranks) for n in tried}
    yield report


def _mistake(work):
    """An output of the plain layer's parts put together wrongly, by `work(plain, x, size)`."""

    def output(_rank, size):
        with torch.no_grad():
            return work(case_of("pair")["plain"], case_of("pair")["batches"][0], size)

    return output


def _on_terms(plain, x, size):
    """A GELU on each term after the second layer, as if one stood there."""
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


def _named(slug, got):
    """The hint for a parameter that is cut in a wrong way: another one, where the first weight is cut along its inputs
    and the second along its outputs."""
    if slug not in ("wrong-dimension", "not-cut") or got["size"] == 1:
        return slug
    whole = {name: p.detach() for name, p in case_of("pair")["plain"].named_parameters()}
    turned = [Form((f"{name}.weight",), dim).of(whole, 0, got["size"]) for name, dim in (("up", 1), ("down", 0))]
    held = got["all"][0]["parameters"].values()
    rows_first = all(any(close(value, part) for value in held) for part in turned)
    return "rows-before-columns" if rows_first else slug


def feed_forward_looks(kind, calls, sent):
    return [
        *layer_looks(
            partial(case_of, kind), partial(_truth, kind), calls, sent=(sent, sent), known=_KNOWN, named=_named
        ),
        parts.odd("one sequence; a transposed input; float32"),
        parts.sizes("sizes that do not divide are refused", "A feed-forward of width {n}"),
        parts.LONGER,
    ]


LOOKS = {"gathered": feed_forward_looks("gathered", (2, 2), 2 * 3 * 8 * (HIDDEN + WIDTH)),
         "pair": feed_forward_looks("pair", (1, 1), 2 * 3 * 8 * WIDTH)}  # fmt: skip


def feed_forward(kind, Layer):  # noqa: N803
    yield from in_groups_too(partial(at_each, LOOKS[kind]), on_groups(_feed_forwards, Layer, case_of(kind)))
