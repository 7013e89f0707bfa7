"""Functions that know a pipeline schedule already: an answer that is to write one must not call them."""

from collections.abc import Callable

from dlojz_tp import planner


def pipeline_schedules(*ours: Callable) -> list:
    """The functions and classes that know a pipeline schedule already: PyTorch's, and the planner's.

    ours: those of the planner that count; none given: all.
    """
    from torch.distributed.pipelining import schedules  # late: it imports much

    ours = ours or (planner.gpipe, planner.one_f_one_b, planner.interleaved_1f1b, planner.zero_bubble_h1)
    names = [name for name in vars(schedules) if name.startswith(("Schedule", "_get_1f1b"))]
    return [*ours, *(getattr(schedules, name) for name in names)]
