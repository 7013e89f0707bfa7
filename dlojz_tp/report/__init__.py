"""Figures and tables of what was measured: each answers a question."""

from ._communications import communications
from ._compare import compare
from ._gantt import gantt
from ._inspection import inspection
from ._learning import learning
from ._plans import plans
from ._roofline import roofline
from ._streams import streams
from ._style import ground
from ._sweep import sweep
from ._table import table
from ._timeline import timeline

__all__ = [
    "communications",
    "compare",
    "gantt",
    "ground",
    "inspection",
    "learning",
    "plans",
    "roofline",
    "streams",
    "sweep",
    "table",
    "timeline",
]
