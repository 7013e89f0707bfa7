"""Large memory pages for a process that forks often.

A fork copies the table of all pages, and the end of the child takes the copy down: with torch imported some 90,000
pages of 4 KiB. Pages of 2 MiB make the table short.
"""

import ctypes
import sys
from pathlib import Path

MADV_COLLAPSE = 25  # Linux 6.1 and later; older ones refuse it, and all stays as it was
SIZE = 2 << 20  # bytes


def collapse() -> None:
    """Put the memory of this process that no file backs into large pages, where the system can; half a second once."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(end, 16) for end in span.split("-"))
            first, last = -(-first // SIZE) * SIZE, last // SIZE * SIZE
            if first < last:
                libc.madvise(first, last - first, MADV_COLLAPSE)
