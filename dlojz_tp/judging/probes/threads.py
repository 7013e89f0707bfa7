"""What the other threads of this process do: one that wants a core and has none does not rest."""

import contextlib
import threading
from pathlib import Path

from dlojz_tp.launch.proc import fields

TASKS = Path("/proc/self/task")  # on Linux


def states() -> dict[int, str]:
    """{native id: state} of all threads but this one, see `proc.rests`; {} where the system does not tell."""
    found, mine = {}, str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            if task.name != mine:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    found[int(task.name)] = fields(task)[0]
    return found
