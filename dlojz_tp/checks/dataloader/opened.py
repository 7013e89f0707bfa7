"""Which files Python opens, whoever calls it."""

import contextlib
import os
import sys
from pathlib import Path

_open: list["Opened"] = []  # those that count now; an audit hook cannot be taken away again
_hooked = False


class Opened:
    """Inside, every file under `folder` that is opened is noted.

    reads, writes: resolved paths, in order. libraries: the packages among `watched` that opened one of them.
    """

    watched = ("webdataset",)

    def __init__(self, folder):
        self.folder = str(Path(folder).resolve()).rstrip(os.sep) + os.sep
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.libraries: set[str] = set()

    def __enter__(self):
        global _hooked
        if not _hooked:
            sys.addaudithook(_hook)
            _hooked = True
        _open.append(self)
        return self

    def __exit__(self, *_):
        _open.remove(self)


def _hook(event, args):
    if event != "open" or not _open or not isinstance(args[0], str | bytes | os.PathLike):
        return
    with contextlib.suppress(Exception):  # an error in a hook would come out of the trainee's open()
        path, flags = os.path.realpath(os.fsdecode(args[0])), args[2]
        for counting in _open:
            if path.startswith(counting.folder):
                writing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                (counting.writes if writing else counting.reads).append(path)
                counting.libraries |= _callers() & set(counting.watched)


def _callers() -> set[str]:
    """The top packages of the functions that are running now."""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        found.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return found


def open_descriptors() -> dict[str, str]:
    """The open files of this process: descriptor to path; empty where the system does not tell (not on Linux)."""
    found = {}
    folder = Path("/proc/self/fd")
    if folder.is_dir():
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found[entry.name] = str(entry.readlink())
    return found
