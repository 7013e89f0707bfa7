"""Memory that a library's thread still holds for a moment: look again until it is let go, or all threads have slept."""

import gc
import time
from collections import Counter
from collections.abc import Callable

from dlojz_tp.judging.probes import threads
from dlojz_tp.launch.proc import rests

LOOKS, PAUSE = 20 if threads.TASKS.exists() else 60, 0.005


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
        states = threads.states()
        asleep.update(thread for thread, state in states.items() if rests(state))
        if looks >= LOOKS and all(asleep[thread] >= LOOKS for thread in states):
            return now()
    return found
