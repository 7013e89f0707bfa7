"""A transformer laid over a grid of ranks: groups, layers cut over a tensor group, stages of a pipeline.

The pieces that practical works 15 and 17 build by hand, in the form in which 19 puts them together.
"""

from .axis import Axis, Mesh
from .pipelined import run_pipeline
from .sliced import Entrance, Exit, SlicedBlock, Stage, sliced_loss

__all__ = ["Axis", "Entrance", "Exit", "Mesh", "SlicedBlock", "Stage", "run_pipeline", "sliced_loss"]
