"""How much longer things may take because other programs want the same cores."""

import os
import time
from pathlib import Path

MOST = 6.0  # times the seconds that were meant: then it is enough, whatever the machine does


def factor() -> float:
    """How many programs want each core, by the load of the last minute: from 1 to MOST."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Clock:
    """Seconds of this thread, from its making: those in which it could have run and had no core do not count."""

    def __init__(self):
        self._began, self._waited = time.monotonic(), _waited()

    def passed(self, seconds: float) -> bool:
        """Whether `seconds` have passed on a machine that does nothing else."""
        spent = time.monotonic() - self._began
        own = spent - (_waited() - self._waited)
        # processes that this thread waits for are kept waiting too, which only the load tells
        return spent >= MOST * seconds or (own >= seconds and spent >= seconds * factor())


def _waited() -> float:
    """Seconds that this thread has waited for a core; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
