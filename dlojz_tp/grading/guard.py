"""What an answer may not touch while it is judged: the course's code, its solutions, and the processes that judge.

It stops what somebody tries in passing. An answer runs in the process that judges it, so who means it can still forge
a verdict; the README says so.
"""

import contextlib
import inspect
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

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


def shut(folders: list[Path], files: list[Path], keepers: set[int]) -> None:
    """From now on this process cannot open files of these folders but for `files`, nor signal these processes.

    It cannot be undone.
    """
    real, decode, forbidden = os.path.realpath, os.fsdecode, Forbidden
    closed, allowed = tuple(real(folder) + os.sep for folder in folders), {real(file) for file in files}

    def hook(event, args):
        if event == "open" and isinstance(args[0], str | bytes):
            path = real(decode(args[0]))
            if path.startswith(closed) and path not in allowed:
                raise forbidden(f"{path} is not for answers")
        if event in ("os.kill", "os.killpg") and args[0] in keepers:
            raise forbidden("these processes are not the answer's")

    sys.addaudithook(hook)


def watch() -> Callable[[], str | None]:
    """A function that names what of the course has been replaced since; None where all is as it was."""
    before, look = _course(), _course

    def changed():
        after = look()
        return next((".".join(key) for key, parts in before.items() if not _alike(parts, after.get(key))), None)

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
