"""Balise 5, second part: where the boxes of CutMix lie, and how large they are."""

import numpy as np
import torch

from dlojz_tp.checking.looks import Look
from dlojz_tp.checks.data_augmentation.devices import SILENT

MANY = 1200  # samples for a distribution; the looks at one have a false alarm in fewer than 1 of 10,000 runs
LIMIT = np.sqrt(np.log(2 / 5e-5) / 2)  # of √n · D, by the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart
HEIGHT, WIDTH = 24, 32
GRID = np.linspace(0.02, 0.98, 40)  # of the areas


def observe_areas(cutmix):
    """For each α, from images that hold their number: which pixels were pasted, in statistics of all boxes."""
    images = torch.arange(float(MANY)).view(-1, 1, 1, 1).repeat(1, 1, HEIGHT, WIDTH)
    for alpha in (1.0, 0.3):
        torch.manual_seed(4)
        mixed, _ = cutmix(images.clone(), torch.zeros(MANY, dtype=torch.long), 1, alpha)
        yield {alpha: _statistics((mixed != images)[:, 0])}


def _statistics(pasted):
    """pasted: (MANY, HEIGHT, WIDTH)."""
    mixed = pasted.flatten(1).any(1)
    lines = {"row": pasted[mixed].any(2), "column": pasted[mixed].any(1)}  # (boxes, HEIGHT), (boxes, WIDTH)
    rows, columns = lines.values()
    y, x = (one.double() @ torch.linspace(0, 1, one.shape[1]).double() / one.sum(1) for one in (rows, columns))
    free = [~(one[:, 0] | one[:, -1]) for one in (rows, columns)]  # of the borders across it
    tall, wide = rows.sum(1), columns.sum(1)
    large = free[0] & free[1] & (tall >= 5) & (wide >= 5)
    some = tall * wide >= 12  # pixels
    shared = {what: one[some].all(0).nonzero().flatten().tolist() for what, one in lines.items() if some.any()}
    return {
        "same": bool(mixed.any() and (pasted == pasted[0]).all()),
        "reach": [int(one.any(0).sum()) for one in (rows, columns)],
        "shared": {what: found for what, found in shared.items() if found},
        "centres": [y.std(), (y.mean() - 0.5).abs(), (x.mean() - 0.5).abs(), torch.corrcoef(torch.stack([y, x]))[0, 1].abs()],
        "sides": [tall[free[0]], wide[free[1]]],  # of boxes that no border cuts
        "proportions": (tall / HEIGHT * WIDTH / wide)[large],
        "areas": np.searchsorted(np.sort(pasted.double().mean((1, 2)).numpy()), GRID) / MANY,
    }  # fmt: skip


def _around(shared):
    """Whether what all boxes share lies in the middle of the image."""
    sides = {"row": HEIGHT, "column": WIDTH}
    return shared.keys() == sides.keys() and all({n // 2 - 1, n // 2} & set(shared[what]) for what, n in sides.items())


def _band(alpha, n=20000):
    """Of the areas of boxes without pixels, from NumPy's own generator: the least and the largest part below GRID."""
    rng = np.random.default_rng(0)
    side = np.sqrt(1 - rng.beta(alpha, alpha, n)) / 2
    tall, wide = (np.minimum(c + side, 1) - np.maximum(c - side, 0) for c in rng.random((2, n)))
    # rounding moves areas a little; a shift of one pixel on each side is no mistake here
    low, high = (np.searchsorted(np.sort(tall * wide), GRID * (1 - s) - s / 4) / n for s in (2 / HEIGHT, -2 / HEIGHT))
    slack = LIMIT / np.sqrt(MANY) + 0.01
    return low - slack, high + slack


def _looks(alpha):
    """Looks at the statistics for one α."""

    def look(key, hint, holds, fields=lambda seen: {}):
        say = SILENT | {"where": f"α = {alpha:g}, images of {HEIGHT} × {WIDTH}"}
        return Look(
            "", lambda o: o[alpha][key], "", hint, lambda seen, _: holds(seen), lambda seen, _: say | fields(seen)
        )

    low, high = _band(alpha)
    yield look("same", "one-box", lambda same: not same)
    sides = {"height": HEIGHT, "width": WIDTH}
    yield look("reach", "sides-swapped", lambda reach: reach != [HEIGHT, HEIGHT], lambda _: sides)
    yield look("shared", lambda seen, _: "box-at-centre" if _around(seen) else "one-centre", lambda shared: not shared,
               lambda shared: {"what": "point" if len(shared) == 2 else next(iter(shared))})  # fmt: skip
    # seven standard errors of the means and of the correlation
    yield look("centres", lambda seen, _: "box-at-centre" if seen[0] < 1 / 12 else "box-not-uniform",
               lambda seen: seen[0] >= 1 / 12 and max(seen[1:3]) <= 0.06 and seen[3] <= 0.2)  # fmt: skip
    yield look("sides", "one-lambda", lambda seen: min(map(len, seen)) <= 20 or max(one.max() - one.min() for one in seen) > 1,
               lambda seen: {"got": f"boxes of {seen[0][0]} × {seen[1][0]} pixels, where no border cuts them"})  # fmt: skip
    yield look("proportions", "box-proportions", lambda seen: len(seen) <= 40 or 0.87 < seen.mean() < 1.15,
               lambda seen: {"expected": "1", "got": f"{seen.mean():.2f}", "where": "share of the height over that of the width"})  # fmt: skip
    yield look("areas", "areas-wrong", lambda seen: ((low <= seen) & (seen <= high)).all(), lambda _: {"alpha": alpha})


AREAS = [look for alpha in (1.0, 0.3) for look in _looks(alpha)]
