"""Checks of 07_data_augmentation: RandAugment's place, MixUp and CutMix for whole batches, the loss, the step."""

from dlojz_tp.checking import merged
from dlojz_tp.checks.data_augmentation import devices, mixing
from dlojz_tp.checks.data_augmentation.boxes import balise_3
from dlojz_tp.checks.data_augmentation.losses import balise_6
from dlojz_tp.checks.data_augmentation.masks import balise_4
from dlojz_tp.checks.data_augmentation.mixing import balise_2, balise_5
from dlojz_tp.checks.data_augmentation.pipeline import balise_1
from dlojz_tp.checks.data_augmentation.step import balise_7

__all__ = ["balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]

HINTS = merged(devices, mixing)
