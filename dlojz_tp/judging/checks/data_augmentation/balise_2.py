"""Balise 2: see `mixing.py`."""

from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.data_augmentation.mixing import MIXUP, observe, observe_beta


def balise_2(mixup):
    yield from judged(MIXUP, observe, mixup, observe_beta)
