"""A folder that a command is told to write in: whether it can be one, and what to say where it cannot."""

import errno
import os
from pathlib import Path


class NoFolder(Exception):
    """The path cannot be a folder; the message is one line that says why and what to do."""


def resolve(given: Path, option: str) -> Path:
    """The folder that the option's value means, existing or not. Raises NoFolder."""
    try:
        folder = given.expanduser().resolve()
    except RuntimeError as error:  # nobody of that name, no home, or links in a circle
        raise NoFolder(f"{given}: {str(error).rstrip('.')}: give another {option}") from error
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise NoFolder(f"{path} is not a folder: give another {option}")
    return folder


def explain(error: OSError, folder: Path, option: str) -> str:
    """One line: what could not be written in `folder`, why, and what to do."""
    what, why = f"in {folder}", error.strerror or str(error)
    todo = f"give {option} in a folder you can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = f"free some space and run it again, or give {option} on another disk"
    elif error.errno == errno.EISDIR:
        what, todo = str(error.filename2 or error.filename), "a file must be there: move the folder away"
    elif error.errno == errno.ENOENT:
        why = f"no file can be made in {next(path for path in (folder, *folder.parents) if path.is_dir())}"
    return f"cannot write {what}: {why}: {todo}"
