"""Compute what cannot be run here: times of collectives, and of a data-parallel step on many GPUs."""

from .collectives import Link, all_gather, all_reduce, broadcast, hierarchical_all_reduce, reduce_scatter
from .scaling import StepTimes, data_parallel_step, scaling_efficiency

__all__ = [
    "Link",
    "StepTimes",
    "all_gather",
    "all_reduce",
    "broadcast",
    "data_parallel_step",
    "hierarchical_all_reduce",
    "reduce_scatter",
    "scaling_efficiency",
]
