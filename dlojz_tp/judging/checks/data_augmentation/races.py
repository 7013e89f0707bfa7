"""Races of 07: MixUp and CutMix of a batch. torchvision's draw one λ, and one box, for all of its images."""

import torch
from torchvision.transforms import v2

from dlojz_tp.judging.contest import Contest, device

CLASSES = 10


def _batch():
    n, side = (256, 224) if device().type == "cuda" else (64, 96)
    return torch.randn(n, 3, side, side, device=device()), torch.randint(CLASSES, (n,), device=device())


def yours(mix):
    batch = _batch()
    return lambda: mix(*batch, CLASSES, 1.0)


def _theirs(kind):
    batch, mix = _batch(), kind(num_classes=CLASSES)
    return lambda: mix(*batch)


RACES = {
    2: Contest("v2.MixUp", yours, lambda: _theirs(v2.MixUp)),
    5: Contest("v2.CutMix", yours, lambda: _theirs(v2.CutMix)),
}
