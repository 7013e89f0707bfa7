"""Seconds for a piece of code of this process, by the alarm clock of the system."""

import contextlib
import signal
import threading
import time


class Overdue(BaseException):
    """The time is over; a BaseException, so that `except Exception` in what runs cannot hold it."""


@contextlib.contextmanager
def at_most(seconds: float, of_processor: bool = False):
    """Raise Overdue after `seconds` of the block. Only the main thread can be woken so; others run without.

    Arguments: seconds; of_processor, whether they are this process's processor time, so that a busy machine takes none.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_signal, _frame):
        raise Overdue

    timer, rings, repeat = signal.ITIMER_REAL, signal.SIGALRM, 0.0
    if of_processor:  # again each second, should a library have swallowed it
        timer, rings, repeat = signal.ITIMER_VIRTUAL, signal.SIGVTALRM, 1.0
    began = time.monotonic()
    handler = signal.signal(rings, ring)
    left, again = signal.setitimer(timer, seconds, repeat)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(rings, handler)
        if left:  # somebody else's alarm, a check's, goes on
            signal.setitimer(timer, max(left - (time.monotonic() - began), 1e-3), again)
