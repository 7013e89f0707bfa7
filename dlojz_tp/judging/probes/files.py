"""Which files Python opens, moves and removes, no matter which code calls it."""

import contextlib
import io
import os
import sys
from pathlib import Path

from dlojz_tp.judging.checking.borrowed import replaced

_inside: list["Opened"] = []  # those that note now; an audit hook cannot be taken away again
_hooked = False


class Opened:
    """Inside, every file under `folder` that is opened is noted, and what is moved or removed anywhere.

    reads, writes: resolved paths, in order. moves: (from, to), where `to` is None for a file that is removed.
    libraries: the packages among `watched` that opened one of the files.
    """

    def __init__(self, folder, watched: tuple[str, ...] = ()):
        self.folder, self.watched = str(Path(folder).resolve()).rstrip(os.sep) + os.sep, set(watched)
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.moves: list[tuple[Path, Path | None]] = []
        self.libraries: set[str] = set()

    def __enter__(self):
        global _hooked
        if not _hooked:
            sys.addaudithook(_hook)
            _hooked = True
        _inside.append(self)
        return self

    def __exit__(self, *_):
        _inside.remove(self)

    def note(self, path, writing: bool = False):
        """A file that is opened, perhaps where Python does not see it."""
        path = os.path.realpath(os.fsdecode(path))
        if path.startswith(self.folder):
            (self.writes if writing else self.reads).append(path)
            self.libraries |= self.watched and self.watched & _callers()


def _hook(event, args):
    if not _inside or event not in ("open", "os.rename", "os.remove"):
        return
    with contextlib.suppress(Exception):  # an error in a hook would come out of the trainee's open()
        if event == "open":
            if isinstance(args[0], str | bytes | os.PathLike):
                writing = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                for noting in _inside:
                    noting.note(args[0], bool(writing))
        elif os.path.exists(args[0]):  # noqa: PTH110
            places = args[:2] if event == "os.rename" else args[:1]
            for noting in _inside:
                noting.moves.append((*(Path(os.fsdecode(place)).absolute() for place in places), None)[:2])


def _callers() -> set[str]:
    """The top packages of the functions that are running now."""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        found.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return found


@contextlib.contextmanager
def unsafe_loads():
    """Inside, torch.load is watched: yields a list with an entry for each file that was free to run code.

    What is in memory is left alone: torch.distributed unpacks objects from other ranks so.
    """
    import torch

    found, load = [], torch.load

    def loading(f, *args, **kwargs):
        if kwargs.get("weights_only") is False and not isinstance(f, io.BytesIO):
            found.append(f)
        return load(f, *args, **kwargs)

    with replaced(torch, "load", loading):
        yield found


def open_descriptors() -> dict[str, str]:
    """The open files of this process: descriptor to path; empty where the system does not tell (not on Linux)."""
    found = {}
    folder = Path("/proc/self/fd")
    if folder.is_dir():
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found[entry.name] = str(entry.readlink())
    return found
