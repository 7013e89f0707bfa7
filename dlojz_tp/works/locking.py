"""One process at a time."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Hold a lock on this file, which is made. Yields False where another process has held it for so many seconds.

    Where the file system knows no locks, as some shared ones do, it goes without.
    """
    with path.open("w") as file:
        until, held = time.monotonic() + seconds, True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                held = time.monotonic() < until
                if not held:
                    break
                time.sleep(0.01)
            except OSError:
                break
        yield held
