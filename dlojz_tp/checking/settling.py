"""Memory that a library's thread still holds for a moment: look again until it is let go, or all threads have slept."""

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

TASKS = Path("/proc/self/task")  # the threads of this process, on Linux
LOOKS, PAUSE = 20 if TASKS.exists() else 60, 0.005


def settle(now: Callable[[], float], most: float, patience: float = 5.0) -> float:
    """`now()` once it is at most `most`; else what it is when no other thread of this process holds on to anything.

    A thread of gloo lets go of a collective's tensors a little after the wait for it has ended: on a busy machine, when
    it gets a core again. Until then it is not asleep; so one that was found asleep several times has let go.
    patience: seconds after which this ends in any case.
    """
    if (found := now()) <= most:
        return found
    gc.collect()
    asleep, looks, end = Counter(), 0, time.monotonic() + patience
    while (found := now()) > most and time.monotonic() < end:
        time.sleep(PAUSE)
        looks += 1
        states = _others()
        asleep.update(name for name, state in states.items() if state not in "RD")
        if looks >= LOOKS and all(asleep[name] >= LOOKS for name in states):
            return now()
    return found


def _others() -> dict[str, str]:
    """{number: state} of the other threads of this process; none where the system does not tell."""
    found, mine = {}, str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            if task.name != mine:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    found[task.name] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found
