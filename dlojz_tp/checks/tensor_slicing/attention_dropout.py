"""The dropout of balise 4's attention, made visible: which attention weights were dropped out, and how many."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import build
from dlojz_tp.models import Attention

HINTS = {
    "same-mask": "The heads of different ranks get the same dropout, because all ranks draw the same random "
                 "numbers. Inside the sliced region, draw them in ranks.own_random().",
    "mask-shared": "Two heads of one rank, or two sequences, get the same dropout. Each attention weight must be "
                   "dropped independently.",
    "outside-differs": "After the layer, the ranks draw different random numbers, so dropout outside the layer "
                       "would no longer be the same on all of them. Keep the ranks' own draws inside "
                       "ranks.own_random(), and set no seed.",
    "mask-repeats": "Two calls gave the same dropout, or later layers then draw the same numbers: the random "
                    "numbers start again each time. Set no seed in forward.",
    "dropout-lost": "You drop no attention weight in training, although the layer's dropout is {rate}. Apply "
                    "dropout to the weights after the softmax, and do not normalise them again.",
    "dropout-rate": "The layer's dropout is {rate}, but yours is {found:.3g}. Use the rate of the plain layer, "
                    "whatever the number of ranks, and divide the kept values by 1 - rate (dropout_p does both).",
    "dropout-unscaled": "You drop the right values, but you do not divide the kept ones by 1 - {rate}: in training "
                        "the layer gives less than in evaluation.",
    "dropout-in-eval": "In evaluation the result is not that of the plain layer: you still apply dropout "
                       "(self.training is False).",
    "dropout-elsewhere": "You do not drop attention weights but other numbers (of the result, the values or the "
                         "heads, or of the scores before the softmax), or you normalise the weights to a sum of 1 "
                         "again. The plain layer drops attention weights (dropout_p).",
    "dropout-disagrees": "In training with dropout, the ranks' results differ. All ranks must return the same sum.",
}  # fmt: skip

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
        found = {"first": layer(x).clone(), "outside": torch.rand(4), "second": layer(x).clone(), "later": torch.rand(4)}
        layer.eval()
        found["eval"] = layer(x).clone()
    return {name: value.unflatten(-1, (heads, -1)) if value.ndim > 1 else value for name, value in found.items()}


def judge_dropout(reports, size):
    """Raise Wrong for what is wrong in the reports of the ranks of one group."""
    for rank, got in enumerate(reports):
        where, ones = f"rank {rank} of {size}", torch.ones_like(got["eval"])
        if not close(got["eval"], ones):
            raise Wrong("dropout-in-eval", expected=ones, got=got["eval"], where=where)
        if close(got["first"], ones):
            raise Wrong("dropout-lost", rate=RATE, where=where)
        if not close(got["first"], reports[0]["first"]):
            raise Wrong("dropout-disagrees", where=where)
    _masks(reports[0]["first"], size)
    for rank, got in enumerate(reports):
        where = f"rank {rank} of {size}"
        if not close(got["outside"], reports[0]["outside"]):
            raise Wrong("outside-differs", where=where)
    if close(reports[0]["first"], reports[0]["second"]) or close(reports[0]["outside"], reports[0]["later"]):
        raise Wrong("mask-repeats", where=f"rank 0 of {size}")


def _masks(got_bshk, size):
    """A head gives the share of the earlier tokens that it kept, over 1 - rate: which were they, and how many?"""
    where, heads = f"{size} ranks" if size > 1 else "rank 0 of 1", got_bshk.shape[2]
    if got_bshk.isnan().any():  # all scores of a token were dropped out
        raise Wrong("dropout-elsewhere", where=where)
    late = got_bshk[:, LENGTH // 2 :]
    if ((late - late.max()).abs() * late.abs()).max() < 1e-9 or not close(
        got_bshk, got_bshk[..., :1].expand_as(got_bshk)
    ):
        raise Wrong("dropout-elsewhere", where=where)
    shares_bhs = got_bshk[..., 0].transpose(1, 2)
    kept_bhs = shares_bhs * torch.arange(1, LENGTH + 1) * (1 - RATE)
    if not close(kept_bhs, kept_bhs.round(), 1e-6):
        largest = shares_bhs[..., 0].max().item()  # the first token sees itself alone
        if abs(largest - 1) < 1e-9 and abs(1 - shares_bhs.mean().item() - RATE) < MARGIN:
            raise Wrong("dropout-unscaled", rate=RATE, where=where)
        if largest <= 1 or abs(1 - 1 / largest - RATE) < 1e-6:
            raise Wrong("dropout-elsewhere", where=where)
        raise Wrong("dropout-rate", rate=RATE, found=1 - 1 / largest, where=where)
    if (kept_bhs.diff(dim=-1) > -1e-6).all():  # a token, once dropped, is dropped for all that look at it
        raise Wrong("dropout-elsewhere", where=where)
    share = 1 - kept_bhs.mean().item() / ((LENGTH + 1) / 2)
    if abs(share - RATE) > MARGIN:
        raise Wrong("dropout-rate", rate=RATE, found=share, where=where)
    parts = kept_bhs.chunk(size, 1)
    if any(close(parts[k], parts[0]) for k in range(1, size)):
        raise Wrong("same-mask", where=where)
    rows = kept_bhs.flatten(0, 1)
    if any(close(rows[k], rows[j]) for k in range(BATCH * heads) for j in range(k)):
        raise Wrong("mask-shared", where=where)
