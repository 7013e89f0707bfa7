"""Where the course keeps what it remembers of a trainee: verdicts, measures, jobs."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

WORK = ".course.json"  # a file that `lab` leaves in a work folder
_started = Path("/")
with contextlib.suppress(OSError):  # the current folder may be gone
    _started = Path.cwd()  # a notebook's kernel starts in the notebook's folder


def folder(started: Path | None = None) -> Path:
    """DLOJZ_STATE, else the work folder around `started`, else the user's state folder, else a private one.

    started: a folder; default the one where this process started.
    """
    chosen = os.environ.get("DLOJZ_STATE")
    if chosen:
        return Path(chosen)
    started = started or _started
    for work in (started, *started.parents):
        if (work / WORK).is_file() and os.access(work, os.W_OK):
            return work / ".course-progress"
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dlojz_tp"
    except RuntimeError:  # in some containers the user has no name and no home
        with contextlib.suppress(OSError):
            if private(found := Path(tempfile.gettempdir()) / f"dlojz-state-{os.getuid()}"):
                return found
        return Path(os.devnull) / "dlojz_tp"  # cannot be written


def private(folder: Path) -> bool:
    """Make a folder that this user alone can use; returns whether there is one of this name."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        # Anybody may have made it: only the owner's own folder, closed to others, is trusted.
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        return mine and os.access(folder, os.W_OK)
    return False
