"""Checks of 13_zero_under_the_hood: the memory formula, shards, stages 1, 2 and 3, and what stands on them."""

from dlojz_tp.checking import merged
from dlojz_tp.checks.zero_under_the_hood import checkpoint, common
from dlojz_tp.checks.zero_under_the_hood.checkpoint import balise_10
from dlojz_tp.checks.zero_under_the_hood.clipping import balise_7
from dlojz_tp.checks.zero_under_the_hood.formula import balise_1
from dlojz_tp.checks.zero_under_the_hood.masters import balise_6
from dlojz_tp.checks.zero_under_the_hood.offload import balise_8
from dlojz_tp.checks.zero_under_the_hood.shards import balise_2
from dlojz_tp.checks.zero_under_the_hood.stage1 import balise_3
from dlojz_tp.checks.zero_under_the_hood.stage2 import balise_4
from dlojz_tp.checks.zero_under_the_hood.stage3 import balise_5
from dlojz_tp.checks.zero_under_the_hood.volume import balise_9

__all__ = [
    "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7", "balise_8", "balise_9",
    "balise_10",
]  # fmt: skip

HINTS = merged(common, checkpoint)
