"""Read what trainees put into a class folder. Nothing there is believed but who owns a file, which the system says.

Anybody on the machine can write there: links, pipes, huge files, other words than a verdict's. Such are left aside and
counted; a folder's files count if its owner owns them.
"""

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlojz_tp.cards.verdict import BROKEN
from dlojz_tp.classroom.telling import OPENED
from dlojz_tp.progress import WORDS
from dlojz_tp.works import source

LARGEST = 1000  # bytes of a verdict's file: five times what one has
MOST_FOLDERS = 20_000  # in the class folder
MOST_OF_ONE = 200  # folders that one owner can have there
MOST_FILES = 50_000  # of one owner
NO_VERDICT = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO)  # of a link, a closed file, a pipe or a socket
HINT = re.compile(r"[a-z0-9-]{0,60}")


class Told(NamedTuple):
    """A verdict that was put there. number: 0 for a work that was opened. at: seconds since 1970."""

    work: str
    number: int
    word: str
    hint: str
    attempts: int
    at: float


class Reader:
    """Reads a class folder again and again; each file once. aside: {owner: files that were no verdicts}."""

    def __init__(self, shared: Path):
        self.aside: Counter[int] = Counter()
        self._shared = shared
        self._seen: dict[str, set[str]] = {}
        self._files: Counter[int] = Counter()

    def news(self) -> dict[int, list[Told]]:
        """{owner's uid: verdicts that were not there before}. Raises OSError where the folder cannot be read."""
        found: dict[int, list[Told]] = {}
        folders: Counter[int] = Counter()
        with os.scandir(self._shared) as entries:
            names = [entry.name for entry in itertools.islice(entries, MOST_FOLDERS)]
        for name in sorted(names):
            with contextlib.suppress(OSError), _opened(self._shared / name, os.O_DIRECTORY) as (handle, status):
                folders[status.st_uid] += 1
                if folders[status.st_uid] <= MOST_OF_ONE:
                    found.setdefault(status.st_uid, []).extend(self._inside(name, handle, status.st_uid))
        return found

    def _inside(self, folder: str, handle: int, owner: int) -> Iterator[Told]:
        seen = self._seen.setdefault(folder, set())
        left = MOST_FILES - self._files[owner]
        with os.scandir(handle) as entries:
            fresh = [e.name for e in entries if e.name not in seen and not e.name.startswith(".")]
        for name in sorted(fresh)[: max(left, 0)]:
            seen.add(name)
            self._files[owner] += 1
            try:
                with _opened(name, 0, handle) as (file, status):
                    if status.st_uid != owner or not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
                        raise ValueError
                    yield understood(os.read(file, LARGEST))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno not in NO_VERDICT:
                    seen.discard(name)  # it may be read the next time
                    self._files[owner] -= 1
                else:
                    self.aside[owner] += 1


@contextlib.contextmanager
def _opened(path, flags: int, within: int | None = None):
    """A file that is opened without following a link or waiting for a pipe: its descriptor and its status."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=within)
    try:
        yield handle, os.fstat(handle)
    finally:
        os.close(handle)


def understood(content: bytes) -> Told:
    """The verdict in a file. Raises ValueError where there is none of this course."""
    try:
        said = json.loads(content)
        work, number, word, hint, attempts, at = (
            said[key] for key in ("work", "balise", "verdict", "hint", "attempts", "time")
        )
        whole = all(type(n) is int and 0 <= n < 10**6 for n in (number, attempts))
        known = works().get(work)
        there = known and (number in known.balises and word in (*WORDS, BROKEN) or (number, word) == (0, OPENED))
        timed = type(at) in (int, float) and math.isfinite(at) and at > 0
        if not (whole and there and timed and HINT.fullmatch(hint)):
            raise ValueError
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError from error
    return Told(work, number, word, hint, attempts, min(at, time.time()))  # no clock is ahead of the board's


@functools.cache
def works() -> dict[str, source.Work]:
    """The practical works of the course, by name."""
    return {name: source.find(name) for name in source.names()}
