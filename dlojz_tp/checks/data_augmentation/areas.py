"""Balise 5, second part: where the boxes of CutMix lie, and how large they are."""

import numpy as np
import torch

from dlojz_tp.checking import Wrong

MANY = 1200  # samples for a distribution; the test below has a false alarm in fewer than 1 of 10,000 runs
LIMIT = np.sqrt(np.log(2 / 5e-5) / 2)  # of √n · D, by the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart


def right_areas(cut, alpha, height=24, width=32):
    """cut(images, labels): cutmix's images with this alpha, labels of one class."""
    torch.manual_seed(4)
    images = torch.arange(MANY, dtype=torch.float32).view(-1, 1, 1, 1).expand(MANY, 1, height, width).contiguous()
    mixed = cut(images, torch.zeros(MANY, dtype=torch.long))
    pasted = (mixed != images)[:, 0]
    if pasted.any(0).sum() and (pasted == pasted[0]).all():
        raise Wrong("one-box")
    _several_centres(pasted[pasted.flatten(1).sum(1) >= 12], height, width)
    some = pasted.flatten(1).any(1)
    rows = torch.arange(height, dtype=torch.float64)
    centres = (pasted[some].any(2) * rows).sum(1) / pasted[some].any(2).sum(1)
    if len(centres) and centres.std() < height / 12:
        raise Wrong("box-at-centre", got=f"rows {centres.min():.0f} to {centres.max():.0f} of {height}")
    columns = torch.arange(width, dtype=torch.float64)
    across = (pasted[some].any(1) * columns).sum(1) / pasted[some].any(1).sum(1)
    if len(centres) > 100:
        shifted = (abs(c.mean().item() / (n - 1) - 0.5) > 0.06 for c, n in ((centres, height), (across, width)))
        if (
            any(shifted) or abs(torch.corrcoef(torch.stack([centres, across]))[0, 1]) > 0.2
        ):  # seven standard errors each
            raise Wrong("box-not-uniform")
    _right_proportions(pasted[some])
    areas = np.sort(pasted.double().mean((1, 2)).numpy())
    wanted = np.sort(_simulated(alpha, height, width))
    # rounding to pixels moves areas a little; a shift of one pixel on each side is no mistake here
    grid = np.linspace(0.02, 0.98, 40)
    shift = 2 / height
    found = np.searchsorted(areas, grid) / len(areas)
    low, high = (np.searchsorted(wanted, grid * (1 - s) - s / 4) / len(wanted) for s in (shift, -shift))
    slack = LIMIT / np.sqrt(MANY) + 0.01
    if (found < low - slack).any() or (found > high + slack).any():
        raise Wrong("areas-wrong", where=f"α = {alpha}", alpha=alpha)


def _right_proportions(pasted):
    """Of boxes that no border clips and that are not a few pixels only."""
    height, width = pasted.shape[1:]
    rows, columns = pasted.any(2), pasted.any(1)
    free = [~(lines[:, 0] | lines[:, -1]) for lines in (rows, columns)]  # of the borders across it
    tall, wide = (lines.sum(1)[both] for lines, both in zip((rows, columns), free))
    if min(len(tall), len(wide)) > 20 and max(tall.max() - tall.min(), wide.max() - wide.min()) <= 1:  # rounding
        raise Wrong("one-lambda", got=f"boxes of {tall[0]} × {wide[0]} pixels, where no border cuts them")
    tall, wide = (lines.sum(1)[free[0] & free[1]] for lines in (rows, columns))
    large = (tall >= 5) & (wide >= 5)
    shape = (tall[large] / height) / (wide[large] / width)
    if len(shape) > 40 and not 0.87 < shape.mean() < 1.15:
        raise Wrong(
            "box-proportions",
            expected="1",
            got=f"{shape.mean():.2f}",
            where="share of the height over that of the width",
        )


def _several_centres(pasted, height, width):
    """What all boxes have in common: rows, columns, or both."""
    shared = {"row": pasted.any(2).all(0), "column": pasted.any(1).all(0)}
    found = [name for name, common in shared.items() if len(pasted) and common.any()]
    if not found:
        return
    middle = [name for name in found if shared[name][(len(shared[name]) - 1) // 2 : len(shared[name]) // 2 + 1].any()]
    if len(middle) == 2:
        raise Wrong("box-at-centre", where=f"images of {height} × {width}")
    raise Wrong("one-centre", where=f"images of {height} × {width}", what="point" if len(found) == 2 else found[0])


def _simulated(alpha, height, width, n=20000):
    """Areas of boxes without pixels, from NumPy's own generator."""
    rng = np.random.default_rng(0)
    side = np.sqrt(1 - rng.beta(alpha, alpha, n)) / 2
    y, x = rng.random((2, n))
    return (np.minimum(y + side, 1) - np.maximum(y - side, 0)) * (np.minimum(x + side, 1) - np.maximum(x - side, 0))
