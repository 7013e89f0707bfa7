"""DLO-JZ practical work: balises, verdicts, ranks, measures and reports.

A notebook starts with ``from dlojz_tp import course, todo`` and ``tp = course.open("00_welcome")``.
Submodules are imported at first use, so that commands that need no torch start at once.

The rooms. Nothing imports upwards; tests/test_structure.py has their order from the ground up.

What notebooks call:
    course, index       what a notebook opens: checks, help, the table of works
    launch/     ranks on this machine, and jobs
    measure/    time, memory, communications, operators
    report/     figures and recorded results
    models/ data/       networks, data sets
    parallel/   a transformer laid over a grid of ranks
    planner/    arithmetic of large machines
    modelled_gpu/       what a program would cost on a GPU
    training/   the red thread: one training run, its gains
What judges:
    judging/    verdicts, probes, pretended GPUs, checks, grading; its docstring has them
What serves trainees and instructors:
    cards/      verdicts and lines as they are shown
    progress, guesses   what a trainee has done
    classroom/  an instructor's board over the verdicts of a class
    commands/   python -m dlojz_tp doctor, lab, plan, ...
What authors use:
    works/      the sources of the practical works, balises, where state is kept
    authoring/  notebooks, records, slides, minutes, rehearsals
    frameworks  libraries that not everybody has
"""

# before all else: a file of the folder at hand may have the name of a module that is imported below
from dlojz_tp.works import shadowing

shadowing.step_aside()

import importlib  # noqa: E402

from dlojz_tp.scale import scale  # noqa: E402
from dlojz_tp.works.balise import BaliseNotDone, todo  # noqa: E402

__version__ = "0.1.0"
# what notebooks take from here, and where it lives
_ROOMS = dict.fromkeys(
    ("course", "data", "index", "launch", "measure", "parallel", "planner", "report"), "dlojz_tp"
) | {
    "gains": "dlojz_tp.training",
    "precision": "dlojz_tp.training",
    "recorded": "dlojz_tp.report",
    "tensorboard": "dlojz_tp.report",
    "training_run": "dlojz_tp.training",
    "worth": "dlojz_tp.training",
}
__all__ = ["BaliseNotDone", "scale", "todo", *_ROOMS]  # noqa: PLE0604


def __getattr__(name):
    if name in _ROOMS:
        return importlib.import_module(f"{_ROOMS[name]}.{name}")
    raise AttributeError(f"module 'dlojz_tp' has no attribute {name!r}")
