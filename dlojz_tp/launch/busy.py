"""How much longer things may take because other programs want the same cores."""

import os
import time
from pathlib import Path

from dlojz_tp.launch import proc

THREAD = Path("/proc/thread-self")  # the one that reads it
LATE_S = 5.0  # an alarm rings within this time, unless the process that it is for is stopped
MOST = 6.0  # times the seconds that were meant: then it is enough, whatever the machine does


def load() -> float:
    """How many programs want each core, by the load of the last minute: 1 at least."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) if hasattr(os, "getloadavg") else 1.0


def factor() -> float:
    """How much more time things get: `load()`, and MOST at most."""
    return min(MOST, load())


class Clock:
    """Seconds of this thread, from its making: those in which it could have run and had no core do not count."""

    def __init__(self):
        self._fresh = True
        self._began, self._waited, self._computed = time.monotonic(), proc.waited(THREAD), time.thread_time()

    def passed(self, seconds: float) -> bool:
        """Whether the time is over: `seconds` were had, or MOST times as many have passed.

        Asked for the first time long after `seconds`, it begins anew: this process was stopped, as a suspended job is.
        """
        if self._fresh and time.monotonic() - self._began > seconds + LATE_S:
            self._began, self._waited = time.monotonic(), proc.waited(THREAD)
        self._fresh = False
        return time.monotonic() - self._began >= MOST * seconds or self.had(seconds)

    def had(self, seconds: float) -> bool:
        """Whether what runs has had what it has in `seconds` on a machine that does nothing else."""
        if time.thread_time() - self._computed >= seconds:
            return True
        spent = time.monotonic() - self._began
        own = spent - (proc.waited(THREAD) - self._waited)
        # processes that this thread waits for are kept waiting too, which only the load tells
        return own >= seconds and spent >= seconds * load()
