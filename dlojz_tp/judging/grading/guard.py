"""What an answer may not touch while it is judged: the course's code, its solutions, and the processes that judge.

It stops what somebody tries in passing. An answer runs in the process that judges it, so anyone who means it can forge
the verdict on that answer; docs/grading.md says so.
"""

import contextlib
import inspect
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

from dlojz_tp.works import source

TABLES = ("LOOKS", "HINTS", "KNOWN")  # how those of checks end
LEAST_MEMORY = 4 << 30  # bytes: what torch, its libraries and the largest check need, several times


class Forbidden(PermissionError):
    """An answer reached for what belongs to the judge."""


def limit_memory() -> None:
    """This process and those that it starts get half of the machine's memory each, and at least LEAST_MEMORY."""
    with contextlib.suppress(ValueError, OSError):
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = max(half, LEAST_MEMORY)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def shut(folders: list[Path], files: list[Path], keepers: set[int], note_kill: Callable[[int], None]) -> None:
    """From now on this process cannot open files of these folders but for `files`, nor signal these processes.

    Nor can it start a program with the name of such a folder in its command. note_kill: gets the signals that this
    process sends to itself, before it does. It cannot be undone.
    """
    real, decode, forbidden = os.path.realpath, os.fsdecode, Forbidden
    closed, allowed = tuple(real(folder) + os.sep for folder in folders), {real(file) for file in files}
    named = [os.path.relpath(real(folder), source.ROOT) for folder in folders]
    me, starts = (os.getpid(), 0, -os.getpid()), ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")

    def hook(event, args):
        if event == "open" and isinstance(args[0], str | bytes):
            path = real(decode(args[0]))
            if path.startswith(closed) and path not in allowed:
                raise forbidden(f"{path} is not for answers")
        everybody = event == "os.kill" and args[0] == -1
        if event in ("os.kill", "os.killpg") and (abs(args[0]) in keepers or everybody):
            raise forbidden("these processes are not the answer's")
        if (event in ("os.kill", "os.killpg") and args[0] in me and args[1]) or event == "signal.pthread_kill":
            note_kill(int(args[1]))
        if event in starts:
            words = repr(args[:2]).replace(str(source.ROOT), "")  # the course may lie below a folder of such a name
            if folder := next((name for name in named if re.search(rf"(?<![\w-]){name}\b", words)), None):
                raise forbidden(f"{folder} is not for answers")

    sys.addaudithook(hook)


def watch() -> Callable[[], str | None]:
    """A function that names what of the course has been replaced since; None where all is as it was.

    What Python's and PyTorch's functions are is looked at by `checking.originals`, in a notebook too.
    """
    before, look, alike, joined = _course(), _course, _alike, ".".join

    def changed():
        after = look()
        return next((joined(key) for key, parts in before.items() if not alike(parts, after.get(key))), None)

    return changed


def _alike(before, after) -> bool:
    return after is not None and len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _course() -> dict[tuple[str, str], tuple]:
    """Functions and classes of the course's modules, and the tables of its checks, by what they consist of."""
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("dlojz_tp"):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                found[name, key] = (value, value.__code__)
            elif isinstance(value, type) and value.__module__.startswith("dlojz_tp"):
                # torch wraps the `step` of an optimizer when one is first made
                methods = [inspect.unwrap(m) for m in vars(value).values() if isinstance(m, FunctionType)]
                found[name, key] = (value, *methods, *(m.__code__ for m in methods if isinstance(m, FunctionType)))
            elif key.endswith(TABLES) and isinstance(value, list | tuple | dict):
                found[name, key] = (value, *(value.values() if isinstance(value, dict) else value))
    return found
