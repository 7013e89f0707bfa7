"""Checks of 19_hybrid_parallelism: the mesh, a step over it, memory, time, and the search for a layout."""

from dlojz_tp.checks.hybrid_parallelism.grid_step import balise_2
from dlojz_tp.checks.hybrid_parallelism.layouts import balise_6
from dlojz_tp.checks.hybrid_parallelism.memory import balise_4
from dlojz_tp.checks.hybrid_parallelism.mesh import balise_1
from dlojz_tp.checks.hybrid_parallelism.table import balise_7
from dlojz_tp.checks.hybrid_parallelism.times import balise_5
from dlojz_tp.checks.hybrid_parallelism.totals import balise_3

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]
