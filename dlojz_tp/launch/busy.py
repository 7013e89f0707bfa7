"""How much longer things may take because other programs want the same cores."""

import os
import time
from pathlib import Path

from dlojz_tp.launch import proc

THREAD = Path("/proc/thread-self")  # the one that reads it
MOST = 6.0  # times the seconds that were meant: then it is enough, whatever the machine does


def factor() -> float:
    """How many programs want each core, by the load of the last minute: from 1 to MOST."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Clock:
    """Seconds of this thread, from its making: those in which it could have run and had no core do not count."""

    def __init__(self):
        self._began, self._waited = time.monotonic(), proc.waited(THREAD)

    def passed(self, seconds: float) -> bool:
        """Whether `seconds` have passed on a machine that does nothing else."""
        spent = time.monotonic() - self._began
        own = spent - (proc.waited(THREAD) - self._waited)
        # processes that this thread waits for are kept waiting too, which only the load tells
        return spent >= MOST * seconds or (own >= seconds and spent >= seconds * factor())
