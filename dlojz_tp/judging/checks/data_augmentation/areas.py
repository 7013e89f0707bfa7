"""Balise 5, second part: where the boxes of CutMix lie, and how large they are."""

import math

import numpy as np
import torch

from dlojz_tp.judging.checking.looks import Look, silent


def dkw(n):
    """How far n samples stray from their distribution function, but for 1 of 20,000 runs: Dvoretzky, Kiefer, Wolfowitz and Massart."""
    return np.sqrt(np.log(2 / 5e-5) / 2 / n)


BOXES = 5000  # so many that λ of another distribution shows
SLACK = dkw(BOXES)
HEIGHT, WIDTH, ALPHA = 24, 32, 0.3
GRID = np.linspace(0.02, 0.98, 40)  # of the areas


def observe_areas(cutmix):
    """From images that hold their number, which pixels were pasted; statistics of all boxes."""
    images = torch.arange(float(BOXES)).view(-1, 1, 1, 1).repeat(1, 1, HEIGHT, WIDTH)
    torch.manual_seed(4)
    mixed, _ = cutmix(images.clone(), torch.zeros(BOXES, dtype=torch.long), 1, ALPHA)
    pasted = (mixed != images)[:, 0]
    areas = np.searchsorted(np.sort(pasted.double().mean((1, 2)).numpy()), GRID) / BOXES
    pasted = pasted[pasted.any(2).any(1)]
    yield {"same": bool((pasted == pasted[:1]).all()), "areas": areas}
    lines = [pasted.any(2).double(), pasted.any(1).double()]  # rows (boxes, HEIGHT), columns (boxes, WIDTH)
    sides = torch.stack([one.sum(1) for one in lines])
    centres = torch.stack([one @ torch.linspace(0, 1, one.shape[1]).double() for one in lines]) / sides
    free = torch.stack([one[:, 0] + one[:, -1] == 0 for one in lines])  # of the borders across it
    tall, wide = sides[:, free.all(0) & (sides >= 5).all(0)]
    shared = any(one[sides.prod(0) >= 12].all(0).any() for one in lines)
    yield {
        "reach": [int(one.any(0).sum()) for one in lines],
        "centres": [shared, *centres.std(1), *(centres.mean(1) - 0.5).abs(), torch.corrcoef(centres)[0, 1].abs()],
        "lengths": [len(side[inside].unique()) for side, inside in zip(sides, free)],  # rounding makes two of one
        "proportions": (tall / HEIGHT * WIDTH / wide).mean().item(),
    }


def _band(n=20000):
    """Of the areas of boxes without pixels, from NumPy's own generator: the least and the largest part below GRID."""
    rng = np.random.default_rng(0)
    side = np.sqrt(1 - rng.beta(ALPHA, ALPHA, n)) / 2
    tall, wide = (np.minimum(c + side, 1) - np.maximum(c - side, 0) for c in rng.random((2, n)))
    # rounding moves areas a little; a shift of one pixel on each side is no mistake here
    low, high = (np.searchsorted(np.sort(tall * wide), GRID * (1 - s) - s / 4) / n for s in (2 / HEIGHT, -2 / HEIGHT))
    return low - SLACK - 0.01, high + SLACK + 0.01


BAND = _band()


def _centre(seen, _=None):
    """The mistake at the centres: around the middle, around another place, or not evenly anywhere; "" if there is none."""
    shared, y, x, *off, tilt = seen
    if shared:  # some row or column, by all boxes
        return "box-at-centre" if max(y, x, *off) < 0.04 else "one-centre"
    # seven standard errors of the means and of the correlation
    return "box-not-uniform" if min(y, x) < 1 / 12 or max(off) > 0.06 or tilt > 0.2 else ""


ONE_BOX = [  # of the same box, or of sides swapped, the shares say less
    Look("", "same", False, "one-box"),
    Look("", lambda o: o["reach"] == [HEIGHT, HEIGHT], False, "sides-swapped"),
]
AREAS = [
    Look("boxes: one for each image, anywhere, with the right areas",
         lambda o: max(o["lengths"]) in (1, 2), False, "one-lambda"),
    Look("", "centres", "", _centre, holds=lambda seen, _: not _centre(seen), fields=silent),
    Look("", "proportions", 1.0, "box-proportions", holds=lambda seen, _: not abs(math.log(seen)) > 0.14),
    Look("", lambda o: bool(((BAND[0] <= o["areas"]) & (o["areas"] <= BAND[1])).all()), True, "areas-wrong"),
    # of boxes of the right sizes: near 0.225 for uniform centres, 0.16 for the mean of two uniform ones
    Look("", lambda o: bool(min(o["centres"][1:3]) > 0.2), True, "box-not-uniform"),
]  # fmt: skip
