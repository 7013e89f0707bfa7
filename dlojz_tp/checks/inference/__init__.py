"""Checks of 23_inference: a cache of keys and values, its blocks, a scheduler, speculation, several cards."""

from dlojz_tp.checks.inference.cache import balise_1
from dlojz_tp.checks.inference.cost import balise_2
from dlojz_tp.checks.inference.devices import HINTS
from dlojz_tp.checks.inference.on_ranks import balise_7
from dlojz_tp.checks.inference.paged import balise_3
from dlojz_tp.checks.inference.scheduler import balise_4
from dlojz_tp.checks.inference.shared import balise_6
from dlojz_tp.checks.inference.speculation import balise_5

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]
