"""DLO-JZ practical work: balises, verdicts, ranks, measures and reports.

A notebook starts with ``from dlojz_tp import course, todo`` and ``tp = course.open("00_welcome")``.
Submodules are imported at first use, so that commands that need no torch start at once.
"""

import importlib

from dlojz_tp.balise import BaliseNotDone, todo
from dlojz_tp.scale import scale

__version__ = "0.1.0"
__all__ = ["BaliseNotDone", "checking", "course", "data", "launch", "measure", "report", "scale", "todo"]


def __getattr__(name):
    if name in __all__:
        return importlib.import_module(f"dlojz_tp.{name}")
    raise AttributeError(f"module 'dlojz_tp' has no attribute {name!r}")
