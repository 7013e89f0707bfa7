"""Where jobs are remembered: one private folder for each, under a name that a person can say.

job.json        the facts: name, place, id, nodes, ranks a node, minutes, time of submission
task            the surroundings and the function, pickled
rank-N.log      what rank N printed
rank-N.up       exists once rank N has joined the others
rank-N.result   what rank N returned, pickled        (or rank-N.report: how it failed, as JSON)
rank-N.stack    where rank N stood when it was asked
rank-N.end      how the process of rank N ended, and when
over.json       how the job ended
halt            exists where a rank waited too long for another: all ranks write where they stand
store           where the ranks of a job on this machine meet
alone           exists where Slurm's own process was killed, and the job has ended its allocation itself
submitit/       submitit's own files; batch.log is the output of the batch script

What is pickled is run when it is read. So nothing is read from a folder that is not the user's own, or where others can
write, nor from a file of another user.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import stat
import sys
import time
from pathlib import Path

from dlojz_tp.launch.jobs import options
from dlojz_tp.launch.jobs.options import JobError
from dlojz_tp.works import state, whole_file

KEPT = 50  # folders of jobs that are over; older ones go
TAIL = 64 * 1024  # bytes


def root() -> Path:
    """The folder of all jobs. Errors: JobError where the one that is chosen names a variable that is not set."""
    chosen = os.path.expandvars(options.load().folder)
    if "$" in chosen:
        raise JobError(f"folder {chosen!r} in {options.path()} names a variable that is not set")
    return Path.home() / Path(chosen).expanduser() if chosen else state.folder().absolute() / "jobs"


def _trouble(found: os.stat_result) -> str:
    """Why a folder is not the user's alone, the end of a sentence; an empty text where it is."""
    if found.st_uid != os.getuid():
        return "belongs to another user"
    return "can be written by other users" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _own_root() -> Path:
    """The folder of all jobs. Errors: JobError where it is there and not the user's alone."""
    top = root()
    with contextlib.suppress(OSError):
        if why := _trouble(top.stat()):
            todo = f"`chmod go-w {top}`" if why.startswith("can") else f"set folder in {options.path()} or DLOJZ_STATE"
            raise JobError(f"the folder of the jobs, {top}, {why}, who could run code as you: {todo}")
    return top


def refused(folder: Path) -> str:
    """Why the folder of a job is not to be trusted, in one line; an empty text where it is the user's alone."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    why = _trouble(found) if stat.S_ISDIR(found.st_mode) else "is no folder"
    return f"{folder} {why}: it is left alone" if why else ""


def own(path: Path):
    """Open a file of a job to read it. Errors: OSError, also where it is not the user's own."""
    file = path.open("rb")
    if os.fstat(file.fileno()).st_uid != os.getuid():  # of the open file: its name may stand for another one by now
        file.close()
        raise PermissionError(f"{path} belongs to another user")
    return file


def create(function: str) -> Path:
    """Make the private folder of a new job, named after its function: train-1, train-2, ...

    Errors: JobError where the folder cannot be made, or where others could write in it.
    """
    base = re.sub(r"[^A-Za-z0-9_]+", "-", function).strip("-")[:30] or "job"
    top = root()
    try:
        top.mkdir(parents=True, exist_ok=True, mode=0o700)
        _own_root()
        taken = [int(p.name.rpartition("-")[2]) for p in top.glob(f"{base}-*") if p.name.rpartition("-")[2].isdecimal()]
        number = max(taken, default=0) + 1
        while True:
            try:
                (top / f"{base}-{number}").mkdir(mode=0o700)
                return top / f"{base}-{number}"
            except FileExistsError:  # another notebook was faster
                number += 1
    except OSError as error:
        todo = f"set folder in {options.path()} or DLOJZ_STATE"
        raise JobError(f"no folder for jobs in {top}: {error.strerror}; {todo} to one you can write to") from None


def known() -> list[Path]:
    """The folders of all remembered jobs, the oldest first; those of others are named and left out.

    Errors: JobError where others can write in the folder of all jobs.
    """
    found, top = [], _own_root()
    with contextlib.suppress(OSError):
        for folder in top.iterdir():
            if not (folder / "job.json").exists():
                continue
            if why := refused(folder):
                print(why, file=sys.stderr)
            elif facts := read(folder / "job.json"):
                found.append((facts.get("submitted", 0), folder))
    return [folder for _, folder in sorted(found)]


def prune() -> None:
    """Remove the oldest folders of jobs that are over, but the last KEPT."""
    over = [folder for folder in known() if (folder / "over.json").exists()]
    for folder in over[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, value) -> None:
    """Write bytes, or a value as JSON, whole or not at all."""
    data = value if isinstance(value, (bytes, memoryview)) else json.dumps(value).encode()
    whole_file.replace(path, f".{path.name}-", data)


def write_task(folder: Path, surroundings: dict, task: memoryview) -> None:
    """Write what the ranks load: the surroundings, then the pickled call. Errors: JobError where there is no space."""
    try:
        with (folder / "task").open("wb") as file:
            pickle.dump(surroundings, file)
            file.write(task)
    except OSError as error:
        raise JobError(f"the function cannot be stored in {folder}: {error.strerror}") from None


def read(path: Path) -> dict:
    """Read a JSON file; empty where it is missing, damaged or not the user's own."""
    with contextlib.suppress(OSError, ValueError, RecursionError), own(path) as file:
        value = json.load(file)
        return value if isinstance(value, dict) else {}
    return {}


def refresh(folder: Path) -> None:
    """Make a network file system show what other machines wrote: it may remember that a file was not there."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)  # noqa: PTH101
        os.listdir(folder)  # noqa: PTH208


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a text file; none where it is missing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rpartition("\r")[2] for line in text.splitlines()][-lines:] if lines else []


def now() -> float:
    """Seconds since the epoch: jobs outlive the clocks of single processes."""
    return time.time()
