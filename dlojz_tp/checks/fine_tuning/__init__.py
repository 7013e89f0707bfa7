"""Checks of 21_fine_tuning: a frozen body, cached features, rates by layer, thawing, LoRA, adapters, NF4, QLoRA."""

from dlojz_tp.checks.fine_tuning.balise_1 import balise_1
from dlojz_tp.checks.fine_tuning.balise_2 import balise_2
from dlojz_tp.checks.fine_tuning.balise_3 import balise_3
from dlojz_tp.checks.fine_tuning.balise_4 import balise_4
from dlojz_tp.checks.fine_tuning.balise_5 import balise_5
from dlojz_tp.checks.fine_tuning.balise_6 import balise_6
from dlojz_tp.checks.fine_tuning.balise_7 import balise_7
from dlojz_tp.checks.fine_tuning.balise_8 import balise_8

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7", "balise_8"]
