"""Names of temporary folders that tell whose they are, so that what a killed program left goes with the next one."""

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path


def prefix(kind: str) -> str:
    """What the name of a new temporary folder of this process begins with; removes those of processes that are gone."""
    # other machines may see the same folder, and know nothing of these processes
    begins = f"dlojz-{kind}-{socket.gethostname().replace('-', '_')}-"
    for path in Path(tempfile.gettempdir()).glob(f"{begins}*-*"):
        owner = path.name.removeprefix(begins).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and path.lstat().st_uid == os.getuid() and not _lives(int(owner)):
                shutil.rmtree(path, ignore_errors=True)
    return f"{begins}{os.getpid()}-"


def _lives(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
