"""Balise 5: see `mixing.py`."""

from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.data_augmentation.areas import observe_areas
from dlojz_tp.judging.checks.data_augmentation.mixing import CUTMIX, observe


def balise_5(cutmix):
    yield from judged(CUTMIX, observe, cutmix, observe_areas)
