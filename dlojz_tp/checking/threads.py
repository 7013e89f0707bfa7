"""What the other threads of this process do: one that wants a core and has none does not rest."""

import contextlib
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")  # on Linux


def states() -> dict[int, str]:
    """{native id: state} of all threads but this one, "R" and "D" for those at work; {} where the system does not tell.

    Source: proc_pid_stat(5).
    """
    found, mine = {}, str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            if task.name != mine:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    found[int(task.name)] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def rests(state: str) -> bool:
    """Whether a thread in this state waits for something; a core, or a disk, are not meant."""
    return state not in "RD"
