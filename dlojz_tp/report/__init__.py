"""Figures made from run records: each answers a question."""

from ._compare import compare
from ._inspection import inspection
from ._learning import learning
from ._sweep import sweep

__all__ = ["compare", "inspection", "learning", "sweep"]
