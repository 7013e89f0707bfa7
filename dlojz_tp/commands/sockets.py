"""Where the kernels of `lab` listen: sockets in a folder that nobody else can enter, not ports of the machine."""

import os
import tempfile
from pathlib import Path

from dlojz_tp.works import state

# All that a socket's path can hold, less the name that Jupyter gives it.
LONGEST = 107 - len("/kernel-00000000-0000-0000-0000-000000000000-ipc-5")


def folder() -> Path | None:
    """The user's private folder for sockets, made where it is not there; None where there can be none."""
    for base in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/dev/shm"]):  # a centre's TMPDIR may be long
        found = Path(base, f"dlojz-lab-{os.getuid()}")
        if len(os.fsencode(found)) <= LONGEST and state.private(found):
            return found
    return None
