"""Checks of 22_compression: distillation, quantization, pruning, formats below 16 bits."""

from dlojz_tp.checks.compression.affine import balise_2
from dlojz_tp.checks.compression.distillation import balise_1
from dlojz_tp.checks.compression.fake import balise_4
from dlojz_tp.checks.compression.float8 import balise_7
from dlojz_tp.checks.compression.integers import balise_3
from dlojz_tp.checks.compression.magnitude import balise_5
from dlojz_tp.checks.compression.two_of_four import balise_6

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]
