"""What a crash would leave: copies of a folder, taken at every step of what writes into it."""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from dlojz_tp.judging.probes.late_rank import Waits

STILL = 2.0  # seconds without a write by others, where they wait in a way that nobody sees
PATIENCE = 20.0
LATEST = "the last rank begins to write"  # at first, or again after a wait
WATCHED = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "open", "os.truncate"}


class Images:
    """Inside, on a rank: before and after each write in `folder`, its copy lands in `to`, named by what happens next.

    late: whether this rank, at first and after each wait, writes only when the others wait for it, or have come back.
    The others begin together, at first and after each wait; those that do not wait come back before. So no rank is the
    quicker one by chance. Written files are also copied cut in half.
    For processes that end soon: an audit hook cannot be taken away.
    """

    def __init__(self, folder: Path, to: Path, late: bool):
        self.folder, self.to, self.late = Path(folder), to, late
        self.busy, self.on, self.torn = False, False, []
        self.waits, self._let = Waits("images"), -1
        self._save, self._renames = torch.save, (os.replace, os.rename)
        sys.addaudithook(self._heard)

    def __enter__(self):
        torch.save, self.on = self._saving, True
        os.replace, os.rename = map(self._renaming, self._renames)
        self.waits.__enter__()
        return self

    def __exit__(self, *error):
        self.waits.__exit__(*error)
        if error[0] is None:
            self._tear()
        torch.save, self.on = self._save, False
        os.replace, os.rename = self._renames

    def returned(self):
        """The last image of this rank, once the answer has come back."""
        self.take(f"returned on {self.waits.rank}")
        self.waits.tell("done")

    def _saving(self, obj, f, *args, **kwargs):
        path = None if hasattr(f, "write") else Path(os.fspath(f))
        self._before("a file is written")
        self._save(obj, f, *args, **kwargs)
        if path is not None:
            self.torn.append(path)
            self._tear()
        self.take("a file was written")

    def _renaming(self, rename):
        """What was buffered in an open file is not there yet when its name is."""

        def renamed(*args, **kwargs):
            rename(*args, **kwargs)
            self.take("a file was renamed")

        return renamed

    def _heard(self, event, args):
        if not self.on or self.busy or event not in WATCHED:
            return
        if event == "open":
            path, mode, flags = args
            writes = (
                any(c in mode for c in "wax+") if isinstance(mode, str) else (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            )
            if not writes or isinstance(path, int):
                return
        with contextlib.suppress(TypeError, ValueError):
            path = Path(os.fsdecode(args[0]))
            if self.folder in (path, *path.parents) or self.folder in Path(os.fsdecode(args[1] or "")).parents:
                self._before("a file is opened" if event == "open" else f"{event.removeprefix('os.')} is called")
                if event == "open":
                    self.torn.append(path)

    def _before(self, text):
        self._tear()
        if self._let < self.waits.count:
            self._let, self.busy = self.waits.count, True
            self.waits.tell(word := "late" if self.late else f"holds {self._let}")
            besides = ("done",) if self.late else ("done", "late", word)
            self.waits.others_wait(limit=PATIENCE, besides=besides, meanwhile=_Still(self.folder))
            self.busy = False
            if self.late:
                self.take(LATEST)
        self.take(f"before {text}")

    def _tear(self):
        """An image for each file that was being written: half of it is there."""
        files, self.torn = self.torn, []
        for path in files:
            if path.is_file():
                self.take(f"while {path.suffix or 'a file'} is written", torn=path)

    def take(self, text, torn=None):
        """Copy the folder as it is at one moment; what changes meanwhile is copied again."""
        if not self.folder.is_dir():
            return
        self.busy = True
        try:
            for _ in range(6):
                target = self.to / f"{time.time_ns()} {text}"
                with contextlib.suppress(OSError, shutil.Error):
                    before = _listing(self.folder)
                    shutil.copytree(self.folder, target, symlinks=True)
                    if before == _listing(self.folder):
                        break
                shutil.rmtree(target, ignore_errors=True)
            else:
                return
            if torn is not None:
                copy = target / torn.relative_to(self.folder)
                if copy.is_file():
                    os.truncate(copy, copy.stat().st_size // 2)
        finally:
            self.busy = False


class _Still:
    """Called again and again: whether nobody has written in a folder for STILL seconds."""

    def __init__(self, folder: Path):
        self.folder, self.seen, self.since = folder, None, 0.0

    def __call__(self) -> bool:
        now = _listing(self.folder)
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since > STILL


def _listing(folder: Path) -> list:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            about = path.lstat()
            found.append((path, about.st_ino, about.st_size, about.st_mtime_ns))
    return found


def content(folder: Path) -> tuple:
    """What makes two images the same: names, bytes, and where links lead."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found.append((str(path.relative_to(folder)), os.fsencode(path.readlink())))
        elif path.is_file():
            found.append((str(path.relative_to(folder)), path.read_bytes()))
    return tuple(found)
