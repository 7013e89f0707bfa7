"""Checks of 12_large_models: patches, attention, memory, recomputation, the largest model of a card."""

from dlojz_tp.checks.large_models.attention import balise_2
from dlojz_tp.checks.large_models.counting import balise_3
from dlojz_tp.checks.large_models.fused_step import balise_6
from dlojz_tp.checks.large_models.limits import balise_7
from dlojz_tp.checks.large_models.memory import balise_4
from dlojz_tp.checks.large_models.patches import balise_1
from dlojz_tp.checks.large_models.recomputation import balise_5

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]
