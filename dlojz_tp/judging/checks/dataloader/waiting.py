"""Wait for threads, however busy the machine is: a thread that wants a core and has none is no thread that hangs."""

import time
from collections.abc import Callable

from dlojz_tp.judging.probes import threads
from dlojz_tp.launch import busy
from dlojz_tp.launch.proc import rests

PAUSE = 0.003  # seconds between two looks at the threads
PATIENCE = 1.0  # seconds in which all other threads rest: what takes a right answer milliseconds will not come then
MOST = 20.0  # seconds after which a thread that never rests is given up


def comes(true: Callable[[], bool], patience: float = PATIENCE, pause: float = PAUSE) -> bool:
    """Wait until `true()`; False where all other threads have rested for `patience` seconds, or MOST seconds are over.

    pause: seconds between two looks; long for a thread that only watches another one which waits in this way, too.
    """
    rested, end = 0.0, time.monotonic() + MOST
    while not true():
        if rested > patience or time.monotonic() > end:
            return False
        time.sleep(pause)
        rested += pause if _others_rest() else 0.0
    return True


def let_rest() -> None:
    """Wait until all other threads rest: what they still had to do is done."""
    looks, end = 0, time.monotonic() + PATIENCE * busy.factor()
    while looks < 4 and time.monotonic() < end:
        time.sleep(PAUSE)
        looks = looks + 1 if _others_rest() else 0


def _others_rest() -> bool:
    return all(rests(state) for state in threads.states().values())
