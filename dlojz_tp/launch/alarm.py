"""Seconds for a piece of code of this process, by the alarm clock of the system."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable


class Overdue(BaseException):
    """The time is over; a BaseException, so that `except Exception` in what runs cannot hold it."""


@contextlib.contextmanager
def deadline(seconds: float, of_processor: bool = False, over: Callable[[], bool] = lambda: True):
    """Raise Overdue after `seconds` of the block. Only the main thread can be woken so; others run without.

    Arguments: seconds; of_processor, whether they are this process's processor time, so that a busy machine takes none;
    over, asked once they have passed, and then each second, whether the time is really over.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_signal, _frame):
        if over():
            raise Overdue

    timer, rings, clock = signal.ITIMER_REAL, signal.SIGALRM, time.monotonic
    if of_processor:
        timer, rings, clock = signal.ITIMER_VIRTUAL, signal.SIGVTALRM, time.process_time
    began = clock()
    handler = signal.signal(rings, ring)
    left, again = signal.setitimer(timer, seconds, 1.0)  # again each second, should a library have swallowed it
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(rings, handler)
        if left:  # somebody else's alarm, a check's, goes on
            signal.setitimer(timer, max(left - (clock() - began), 1e-3), again)
