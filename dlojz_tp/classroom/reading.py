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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dlojz_tp.cards.verdict import BROKEN
from dlojz_tp.classroom.telling import OPENED, RACED
from dlojz_tp.progress import WORDS
from dlojz_tp.works import source

LARGEST = 1000  # bytes of a verdict's file: five times what one has
MOST_ENTRIES = 1_000_000  # of the class folder: as many are listed in a second
MOST_OF_ONE = 200  # folders that one owner can have there
MOST_FILES = 20_000  # of one owner
MOST_RATIO = 1000  # of a race: what is larger is none
NO_VERDICT = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO)  # of a link, a closed file, a pipe or a socket
HINT = re.compile(r"[a-z0-9-]{0,60}")


class Told(NamedTuple):
    """A verdict that was put there, or a race. number: 0 for a work that was opened. at: seconds since 1970.

    race: its ratio and noise.
    """

    work: str
    number: int
    word: str
    hint: str
    attempts: int
    at: float
    race: tuple[float, float] | None = None


class Reader:
    """Reads a class folder again and again; each file once.

    aside: {owner: files that were no verdicts}. Nobody's flood keeps another's verdicts out: each owner can have so
    much, the rest is not read, and `warnings` says so.
    """

    def __init__(self, shared: Path):
        self.aside: Counter[int] = Counter()
        self._shared = shared
        self._seen: dict[str, set[str]] = {}
        self._files: Counter[int] = Counter()
        self._beyond: dict[str, int] = {}  # folders that are more than their owner can have: the owner
        self._full: set[int] = set()  # owners of more files than are read
        self._loose, self._more = 0, False  # entries that are no folders; whether there are too many of all

    def news(self) -> dict[int, list[Told]]:
        """{owner's uid: verdicts that were not there before}. Raises OSError where the folder cannot be read."""
        found: dict[int, list[Told]] = {}
        folders: Counter[int] = Counter()
        listed: Counter[int] = Counter()
        with os.scandir(self._shared) as entries:
            first = list(itertools.islice(entries, MOST_ENTRIES))
            self._more = next(entries, None) is not None
        names = {entry.name for entry in first if entry.is_dir(follow_symlinks=False)}
        self._loose = len(first) - len(names)
        self._beyond = {name: owner for name, owner in self._beyond.items() if name in names}
        known = sorted(self._seen)  # first, and also where they are listed no more
        for name in itertools.chain(known, sorted(names - self._seen.keys() - self._beyond.keys())):
            with contextlib.suppress(OSError), _opened(self._shared / name, os.O_DIRECTORY) as (handle, status):
                owner = status.st_uid
                folders[owner] += 1
                if folders[owner] <= MOST_OF_ONE:
                    found.setdefault(owner, []).extend(self._inside(name, handle, owner, listed))
                else:
                    self._beyond[name] = owner
        return found

    def warnings(self, name_of: Callable[[int], str]) -> list[str]:
        """What was left aside or not read, a line for each owner. name_of: how to call an owner."""
        lines = []
        for owner, n in self.aside.items():
            lines.append(f"{n} files of {name_of(owner)} are no verdicts, and are left aside.")
        for owner, n in Counter(self._beyond.values()).items():
            lines.append(f"{n} folders of {name_of(owner)} are not read: one can have {MOST_OF_ONE} here.")
        lines += [f"{name_of(owner)} has too many files here: {MOST_FILES:,} of them are read." for owner in self._full]
        if self._loose:
            lines.append(f"{self._loose} entries of the class folder are no folders, and are left aside.")
        if self._more:
            lines.append(f"The class folder has more than {MOST_ENTRIES:,} entries: new trainees may be missing.")
        return lines

    def _inside(self, folder: str, handle: int, owner: int, listed: Counter) -> Iterator[Told]:
        seen = self._seen.setdefault(folder, set())
        left = max(MOST_FILES - self._files[owner], 0)
        with os.scandir(handle) as entries:
            names = [entry.name for entry in itertools.islice(entries, MOST_FILES + 1 - listed[owner])]
        listed[owner] += len(names)
        fresh = [name for name in names if name not in seen and not name.startswith(".")]
        if len(fresh) > left or listed[owner] > MOST_FILES:
            self._full.add(owner)
        for name in sorted(fresh)[:left]:
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
        there = known and (number in known.balises and word in (*WORDS, BROKEN, RACED) or (number, word) == (0, OPENED))
        timed = type(at) in (int, float) and math.isfinite(at) and at > 0
        race = (said["ratio"], said["noise"]) if word == RACED else None
        fair = race is None or all(type(n) in (int, float) and 0 <= n < MOST_RATIO for n in race) and race[0] > 0
        if not (whole and there and timed and fair and HINT.fullmatch(hint)):
            raise ValueError
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError from error
    return Told(work, number, word, hint, attempts, min(at, time.time()), race)  # no clock is ahead of the board's


@functools.cache
def works() -> dict[str, source.Work]:
    """The practical works of the course, by name."""
    return {name: source.find(name) for name in source.names()}
