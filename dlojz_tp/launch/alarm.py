"""Seconds for a piece of code of this process, by the alarm clock of the system."""

import contextlib
import signal
import threading
import time


class Overdue(BaseException):
    """The time is over; a BaseException, so that `except Exception` in what runs cannot hold it."""


@contextlib.contextmanager
def at_most(seconds: float):
    """Raise Overdue after `seconds` of the block. Only the main thread can be woken so; others run without."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_signal, _frame):
        raise Overdue

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm, a check's, goes on
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), again)
