"""The third part of balise 4: pooling over the real positions, against one row after the other in float64."""

import functools

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, within


def scene(b=3, t=7, d=4, dtype=torch.float32, fill=None):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(b, t, d, generator=generator).to(dtype)
    query = 1.5 * torch.randn(d, generator=generator).to(dtype)
    mask = torch.arange(t) < torch.tensor([t - 1, 1, t - 3][:b])[:, None]
    if fill is not None:
        x[~mask] = fill * query
    return x, query, mask


def row_by_row(x, query, mask):
    """Row by row, over the real positions alone, in float64."""
    rows = []
    for row, real in zip(x.double(), mask, strict=True):
        row = row[real]
        weights = (row @ query.double()).softmax(0)
        rows.append((weights[:, None] * row).sum(0))
    return torch.stack(rows)


X, QUERY, MASK = scene()
SCENES = {
    f"{what} in the padding, {str(dtype)[6:]}": scene(dtype=dtype, fill=fill)
    for dtype in (torch.float32, torch.float64)
    for what, fill in (("numbers", 0.3), ("zeros", 0.0))
} | {
    "no padding at all": (*scene(b=1, t=5)[:2], torch.ones(1, 5, dtype=torch.bool)),
    "scores whose exponentials do not fit into float32": (X, 60 * QUERY, MASK),
    "scores of some thousands, many of them negative": (X, 3000 * QUERY, MASK),
    "real positions anywhere":
        (X, QUERY, torch.tensor([[1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0] * 6 + [1]]).bool()),
    "NaN in the padding": scene(fill=torch.nan),
}  # fmt: skip
TRUTH = {where: row_by_row(*given) for where, given in SCENES.items()}


def observe(masked_pool):
    """Of each scene the result, of a wrong one also that in which all positions are real; then what is changed."""
    for where, given in SCENES.items():
        copies = [one.clone() for one in given]
        found = [masked_pool(*copies)]
        pairs = zip(("input x", "query", "mask"), copies, given)
        written = [what for what, a, b in pairs if not torch.equal(a.nan_to_num(), b.nan_to_num())]
        yield {f"{where}: written": written, f"{where}: got": found[0]}
        found += [] if right(found, TRUTH[where]) else [masked_pool(*everywhere(where))]
        yield {where: found}
    x = X.clone()
    x[0, 1] = torch.nan
    yield {"real": masked_pool(x, QUERY.clone(), MASK.clone())[0].isnan().all().item()}
    yield {f"gradients, {fill}": gradients(masked_pool, fill) for fill in (None, torch.nan)}


def everywhere(where):
    x, query, mask = SCENES[where]
    return x.double(), query.double(), torch.ones_like(mask)


def right(seen, due):
    return isinstance(seen[0], torch.Tensor) and close(seen[0], due, 1e-4)


def why(where, seen, due):
    """Which known mistake gives this result."""
    x, query, mask = SCENES[where]
    if isinstance(seen[0], torch.Tensor) and seen[0].isnan().any():
        return "pool-overflows" if "scores" in where else "padding-nan" if "NaN" in where else "pool-nan"
    if "thousands" in where:  # what was right for smaller scores, and is some large negative number
        return "padding-read"
    x, query, real = x.double(), query.double(), mask.double()[..., None]
    scores = (x @ query)[..., None]
    zeroed, inverted = (scores * real).softmax(1), (~mask).any(1).all()
    known = [
        ("mask-ignored", (scores.softmax(1) * x).sum(1)),
        ("mask-after-softmax", (scores.softmax(1) * real * x).sum(1)),
        ("mask-before-scores", (zeroed * x).sum(1)),
        ("pool-mean", due / x.shape[1]),
        ("scores-scaled", row_by_row(x, query / x.shape[2] ** 0.5, mask)),
        ("plain-mean", (real * x).sum(1) / real.sum(1)),
        ("mask-before-scores", (zeroed * real * x).sum(1)),
        ("pool-inverted", row_by_row(x, query, ~mask) if inverted else None),
        ("padding-read", seen[0] if not mask.all() and close(seen[1], row_by_row(*everywhere(where)), 1e-4) else None),
    ]
    return next((slug for slug, value in known if close(seen[0], value, 1e-4)), "wrong-pool")


def gradients(pool, fill=None):
    """Of x and of the query, for a sum in which each element of d has a weight of its own."""
    x, query, mask = scene(dtype=torch.float64)
    if fill is not None:
        x[~mask] = fill
    leaves = x.requires_grad_(), query.requires_grad_()
    pooled = pool(x, query, mask)
    if pooled.requires_grad:
        (pooled * torch.arange(1.0, 5.0)).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def odd(seen, due):
    """The first gradient that is wrong."""
    return next(k for k in range(2) if not close(seen[k], due[k], 1e-6))


def of_gradients(seen, due):
    return "padding-nan-gradient" if seen[odd(seen, due)].isnan().any() else "pool-gradients"


def looks_at(claim, where):
    told = {"where": where}
    return [
        Look(claim, f"{where}: written", [], "input-written",
             fields=lambda seen, _: told | {"what": seen[0], "got": ""}),
        Look("", where, TRUTH[where], functools.partial(why, where), holds=right,
             fields=lambda seen, _: told | {"got": seen[0]}),
    ]  # fmt: skip


def looks(claim):
    return [
        *(look for where in SCENES for look in looks_at(claim, where)),
        Look("", "real", True, "real-nan-hidden", fields={"where": "NaN at a real position"}),
        *(Look("", f"gradients, {fill}", gradients(row_by_row, fill), of_gradients, holds=within(1e-6),
               fields=lambda seen, due: {"what": ("x", "query")[odd(seen, due)]}) for fill in (None, torch.nan)),
    ]  # fmt: skip
