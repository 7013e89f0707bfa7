"""DLO-JZ practical work: balises, verdicts, ranks, measures and reports.

A notebook starts with ``from dlojz_tp import course, todo`` and ``tp = course.open("00_welcome")``.
Submodules are imported at first use, so that commands that need no torch start at once.

The rooms, from the ground up; nothing imports upwards (a test holds it so):

    frameworks  libraries that not everybody has
    works/      the sources of the practical works, balises, where state is kept
    models/     networks
    cards/      verdicts and lines as they are shown
    planner/ data/      arithmetic of large machines, data sets
    measure/    time, memory, communications
    launch/     ranks on this machine, and jobs
    pretend_gpu/        GPUs that are not there, for programs that would run on them
    modelled_gpu/       what such programs would cost there
    report/     figures and recorded results
    parallel/   a transformer laid over a grid of ranks
    training/   the red thread: one training run, its gains
    checking/   verdicts: how an answer is judged
    probes/     what looks at an answer at work
    classroom/  an instructor's board over the verdicts of a class
    checks/     a package for each practical work
    progress, course, index     what a notebook opens
    commands/ grading/ authoring/       the command line
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
    ("checking", "course", "data", "index", "launch", "measure", "parallel", "planner", "report"), "dlojz_tp"
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
