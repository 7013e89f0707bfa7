"""The dropout of balise 4's attention, made visible: which attention weights were dropped out, and how many."""

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.tensor_slicing.common import build
from dlojz_tp.judging.checks.tensor_slicing.tables import told
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.models import Attention

RATE, LENGTH, BATCH = 0.3, 24, 2
MARGIN = 0.045  # nearly seven times the spread of a share of 4,800 draws


def _revealing(width, heads) -> Attention:
    """An attention that shows its mask: all scores are alike, the values are its input, and the projection changes nothing."""
    plain = Attention(width, heads, dropout=RATE).double()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
        plain.value.weight.copy_(torch.eye(width))
        plain.output.weight.copy_(torch.eye(width))
    return plain


def dropped(SlicedAttention, width, heads, ranks):  # noqa: N803
    """On a rank: results in training, twice, and in evaluation, (b, s, heads, k); what is drawn outside afterwards."""
    layer, error = build(SlicedAttention, _revealing(width, heads), ranks)
    if error is not None:
        raise error
    torch.manual_seed(11)  # all ranks alike, as in the notebook
    x = torch.ones(BATCH, LENGTH, width, dtype=torch.float64)
    with torch.no_grad():
        found = {
            "first": layer(x).clone(),
            "outside": torch.rand(4),
            "second": layer(x).clone(),
            "later": torch.rand(4),
        }
        layer.eval()
        found["eval"] = layer(x).clone()
    return {name: value.unflatten(-1, (heads, -1)) if value.ndim > 1 else value for name, value in found.items()}


def _unlike(reports):
    """The first rank that drops nothing, or that has another result than rank 0."""
    for rank, got in enumerate(reports):
        where = {"rate": RATE, "where": f"rank {rank} of {len(reports)}"}
        if close(got["first"], torch.ones_like(got["first"])):
            return "dropout-lost", where
        if not close(got["first"], reports[0]["first"]):
            return "dropout-disagrees", where
    return None


def observe(reports):
    """Of a group: which of the earlier tokens did a head keep, and how many? It gives their share, over 1 - rate."""
    yield {"eval": [got["eval"] for got in reports], "reports": reports}
    got_bshk, size = reports[0]["first"], len(reports)
    late = got_bshk[:, LENGTH // 2 :]
    even = ((late - late.max()).abs() * late.abs()).max() < 1e-9
    apart = not close(got_bshk, got_bshk[..., :1].expand_as(got_bshk))
    yield {
        "elsewhere": bool(got_bshk.isnan().any() or even) or apart
    }  # not a number: all scores of a token were dropped
    shares_bhs, tokens = got_bshk[..., 0].transpose(1, 2), torch.arange(1, LENGTH + 1)
    largest = shares_bhs[..., 0].max().item()  # the first token sees itself alone
    kept_bhs = shares_bhs * tokens * (1 - RATE)
    scaled = close(kept_bhs, kept_bhs.round(), 1e-6)
    yield {"scale": None if scaled else (largest, 1 - shares_bhs.mean().item())}
    kept_bhs = kept_bhs if scaled else shares_bhs * tokens / largest  # whatever it is scaled by
    # a token, once dropped, is dropped for all that look at it
    yield {"whole tokens": bool((kept_bhs.diff(dim=-1) > -1e-6).all())}
    parts, rows = kept_bhs.chunk(size, 1), kept_bhs.flatten(0, 1)
    others = [k for k in range(size) if not close(reports[k]["outside"], reports[0]["outside"])]
    again = close(reports[0]["first"], reports[0]["second"]) or close(reports[0]["outside"], reports[0]["later"])
    yield {
        "share": 1 - kept_bhs.mean().item() / ((LENGTH + 1) / 2),
        "ranks alike": any(close(part, parts[0]) for part in parts[1:]),
        "rows alike": any(close(rows[k], rows[j]) for k in range(len(rows)) for j in range(k)),
        "outside": f"rank {others[0]} of {size}" if others else "",
        "again": again,
    }


def _of_scale(seen):
    if seen["scale"] is None:
        return None
    largest, lost = seen["scale"]
    if abs(largest - 1) < 1e-9 and abs(lost - RATE) < MARGIN:
        return "dropout-unscaled", {"rate": RATE}
    if largest <= 1 or abs(1 - 1 / largest - RATE) < 1e-6:
        return "dropout-elsewhere", {}
    return "dropout-rate", {"rate": RATE, "found": 1 - 1 / largest}


CLAIM = "dropout: only in training, as much as the rate says, other masks on other ranks, the same draws outside"
LOOKS = [
    each_rank(CLAIM, "eval", 1.0, "dropout-in-eval", holds=lambda got, one: close(got, torch.full_like(got, one))),
    recognised("", lambda seen: _unlike(seen["reports"])),
]
MASKS = [
    Look(CLAIM, "elsewhere", False, "dropout-elsewhere"),
    recognised("", _of_scale),
    Look("", "whole tokens", False, "dropout-elsewhere"),
    Look("", "share", RATE, "dropout-rate", holds=lambda share, rate: abs(share - rate) <= MARGIN,
         fields=told("found", rate=RATE)),
    Look("", "ranks alike", False, "same-mask"),
    Look("", "rows alike", False, "mask-shared"),
    Look("", "outside", "", "outside-differs", fields=told("where")),
    Look("", "again", False, "mask-repeats"),
]  # fmt: skip


def judge_dropout(every):
    """The claims of what a group's `dropped` found, in reports under "dropout"."""
    reports = [got["dropout"] for *_, got in every if "dropout" in got]
    for looks in (LOOKS, MASKS) if reports else ():
        if looks is LOOKS or not _unlike(reports):  # where nothing is dropped there is no mask
            yield from judged(looks, observe, reports, where=f"{len(reports)} rank{'s' * (len(reports) > 1)}")
