"""One process at a time."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Hold a lock on this file, which is made. Yields False where another process has held it for so many seconds.

    Where the file system knows no locks, as some shared ones do, or a folder has its name, it goes without.
    """
    try:  # unlike `open`, it does not wait for the reader of a pipe
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except IsADirectoryError:
        yield True
        return
    try:
        until, held = time.monotonic() + seconds, True
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                held = time.monotonic() < until
                if not held:
                    break
                time.sleep(0.01)
            except OSError:
                break
        yield held
    finally:
        os.close(handle)
