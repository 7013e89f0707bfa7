"""A file that is written whole or not at all: first beside its place, under another name."""

import errno
import os
import stat
import tempfile
from pathlib import Path

NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)  # of a link in a circle, a socket, a closed file
LARGEST = 1 << 20  # bytes: what the course remembers of a work has some thousand


def read(path: Path) -> bytes:
    """The content of a small file. Never waits: a pipe or a device may have its name.

    Raises ValueError where this is no file, is closed to this user or larger than LARGEST; OSError where it is not
    there, or cannot be read now.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NO_FILE:
            raise ValueError(f"{path} cannot be opened") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(LARGEST + 1)
    finally:
        os.close(handle)
    if len(content) > LARGEST:
        raise ValueError(f"{path} is too large")
    return content


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
