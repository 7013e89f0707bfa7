"""A file that is written whole or not at all: first beside its place, under another name."""

import os
import tempfile
from pathlib import Path


def beside(folder: Path, prefix: str, content: bytes, mode: int | None = None) -> Path:
    """A new file in `folder`, named `prefix`…, on the disk when this returns.

    mode: who may read and write it; None is as other new files.
    """
    handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        path.chmod(mode)  # mkstemp gives 0600
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def replace(path: Path, prefix: str, content: bytes, mode: int | None = None) -> None:
    """Put this content in the place of a file, or make it."""
    temporary = beside(path.parent, prefix, content, mode)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
