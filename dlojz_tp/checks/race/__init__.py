"""Checks of 25_race: a timed run, a result, an audit, progressive resizing, rectangles, an average, costs, an entry."""

from dlojz_tp.checks.race.balise_1 import balise_1
from dlojz_tp.checks.race.balise_2 import balise_2
from dlojz_tp.checks.race.balise_3 import balise_3
from dlojz_tp.checks.race.balise_4 import balise_4
from dlojz_tp.checks.race.balise_5 import balise_5
from dlojz_tp.checks.race.balise_6 import balise_6
from dlojz_tp.checks.race.balise_7 import balise_7
from dlojz_tp.checks.race.balise_8 import balise_8

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7", "balise_8"]
