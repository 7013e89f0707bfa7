"""The third part of balise 4: pooling over the real positions, against one row after the other in float64."""

import torch

from dlojz_tp.checking import Wrong, close, nearest

HINTS = {
    "mask-ignored": "The padding takes part in the result: with weights from the scores of zeros, or with whatever "
                    "it contains.",
    "mask-after-softmax": "You set the weights of the padding to 0 after the softmax: the other weights no longer "
                          "add up to 1.",
    "mask-before-scores": "The padding has a share in the softmax: a score of 0 has weight too, because exp(0) is "
                          "1. A score of minus infinity has none.",
    "padding-read": "Without padding the result is right, but with padding it is not: a padded position has a "
                    "weight, even if a small one, or a real position has none.",
    "padding-nan": "With a NaN in the padding the result is NaN. Multiplying by 0 does not remove it, nor does "
                   "adding minus infinity: both give NaN. Fill the padding of x itself.",
    "padding-nan-gradient": "With a NaN in the padding the result is right, but the gradient of {what} is NaN: 0 × "
                            "NaN is NaN in backward too. Fill the padding of x before you compute anything with it.",
    "real-nan-hidden": "A NaN at a real position must show in the result of its row. Fill only where the mask is "
                       "False.",
    "pool-inverted": "The mean is taken over the padding. Mask out the positions where the mask is *False*.",
    "pool-nan": "The result is NaN. A softmax over nothing but minus infinities is NaN (does it run over t, the "
                "positions of one row?), and so are 0 × ∞ and ∞ - ∞: fill what is masked, do not multiply it.",
    "pool-overflows": "With large scores the result is NaN: their exp overflows, or the weights of the real "
                      "positions vanish next to the padding's. softmax subtracts the largest score first, so leave "
                      "the padding out before it.",
    "pool-mean": "The weights already add up to 1: add up over t, and do not divide by their sum again.",
    "scores-scaled": "The scores are plain x · query, not divided by √d.",
    "plain-mean": "This is the plain mean over the real positions. The weights come from a softmax.",
    "wrong-pool": "The pooled values differ from those of attention_pool over the real positions.",
    "pool-gradients": "The gradients differ from those of attention_pool over the real positions; the padding must "
                      "get none.",
}


def scene(b=3, t=7, d=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(b, t, d, generator=generator).to(dtype)
    query = 1.5 * torch.randn(d, generator=generator).to(dtype)
    lengths = torch.tensor([t - 1, 1, t - 3][:b])
    return x, query, torch.arange(t) < lengths[:, None]


def row_by_row(x, query, mask):
    """Row by row, over the real positions alone, in float64."""
    rows = []
    for row, real in zip(x.double(), mask, strict=True):
        row = row[real]
        weights = (row @ query.double()).softmax(0)
        rows.append((weights[:, None] * row).sum(0))
    return torch.stack(rows)


def pools(masked_pool):
    for dtype in (torch.float32, torch.float64):
        for what in ("numbers", "zeros"):
            x, query, mask = scene(dtype=dtype)
            x[~mask] = 0.3 * query if what == "numbers" else 0.0
            _one_pool(masked_pool, x, query, mask, f"{what} in the padding, {str(dtype).removeprefix('torch.')}")
    x, query, mask = scene(b=1, t=5)
    _one_pool(masked_pool, x, query, torch.ones(1, 5, dtype=torch.bool), "no padding at all")
    x, query, mask = scene()
    _one_pool(masked_pool, x, 60 * query, mask, "scores whose exponentials do not fit into float32")
    _one_pool(masked_pool, x, 3000 * query, mask, "scores of some thousands, many of them negative")
    scattered = torch.tensor([[1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]]).bool()
    _one_pool(masked_pool, x, query, scattered, "real positions anywhere")
    x[~mask] = torch.nan
    _one_pool(masked_pool, x, query, mask, "NaN in the padding")
    x = scene()[0]
    x[0, 1] = torch.nan
    if not masked_pool(x, query, mask)[0].isnan().all():
        raise Wrong("real-nan-hidden", expected="NaN in row 0", where="NaN at a real position")
    for fill in (None, torch.nan):
        _pool_gradients(masked_pool, fill)


def _one_pool(masked_pool, x, query, mask, where):
    given = [x.clone(), query.clone(), mask.clone()]
    got = masked_pool(*given)
    if got is None:
        raise Wrong("nothing-returned")
    for what, a, b in zip(("input x", "query", "mask"), given, (x, query, mask), strict=True):
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            raise Wrong("input-written", what=what, where=where)
    expected = row_by_row(x, query, mask)
    if isinstance(got, torch.Tensor) and got.shape == expected.shape and close(got, expected, 1e-4):
        return
    if isinstance(got, torch.Tensor) and got.isnan().any():
        slug = "pool-overflows" if "scores" in where else "padding-nan" if "NaN" in where else "pool-nan"
        raise Wrong(slug, expected=expected, got=got, where=where)
    x, query = x.double(), query.double()
    scores, real = x @ query, mask.double()
    after = scores.softmax(1) * real
    zeroed = (scores * real).softmax(1)
    known = {
        "mask-ignored": (scores.softmax(1)[..., None] * x).sum(1),
        "mask-after-softmax": (after[..., None] * x).sum(1),
        "mask-before-scores": (zeroed[..., None] * x).sum(1),
        "pool-mean": expected / x.shape[1],
        "scores-scaled": row_by_row(x, query / x.shape[2] ** 0.5, mask),
        "plain-mean": (real[..., None] * x).sum(1) / real.sum(1, keepdim=True),
    }
    if "thousands" in where:  # what was right for smaller scores, and is some large negative number
        raise Wrong("padding-read", expected=expected, got=got, where=where)
    slug = nearest(got, known, "wrong-pool", 1e-4)
    if slug == "wrong-pool" and close(got, (zeroed[..., None] * real[..., None] * x).sum(1), 1e-4):
        slug = "mask-before-scores"
    if slug == "wrong-pool" and (~mask).any(1).all() and close(got, row_by_row(x, query, ~mask), 1e-4):
        slug = "pool-inverted"
    if slug == "wrong-pool" and (~mask).any():
        alone, right = (pool(x, query, torch.ones_like(mask)) for pool in (masked_pool, row_by_row))
        slug = "padding-read" if close(alone, right, 1e-4) else slug
    raise Wrong(slug, expected=expected, got=got, where=where)


def _pool_gradients(masked_pool, fill):
    found = []
    for function in (masked_pool, row_by_row):
        x, query, mask = scene(dtype=torch.float64)
        if fill is not None:
            x[~mask] = fill
        x, query = x.requires_grad_(), query.requires_grad_()
        pooled = function(x, query, mask)
        if pooled.requires_grad:
            (pooled * torch.arange(1.0, 5.0)).sum().backward()
        found.append([torch.zeros_like(t) if t.grad is None else t.grad for t in (x, query)])
    for what, got, expected in zip(("x", "query"), *found, strict=True):
        if not close(got, expected, 1e-6):
            slug = "padding-nan-gradient" if got.isnan().any() else "pool-gradients"
            raise Wrong(slug, what=what, expected=expected, got=got, where=f"the gradient of {what}")
