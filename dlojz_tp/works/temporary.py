"""Names of temporary folders that tell whose they are, so that what a killed program left goes with the next one."""

import functools
import hashlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

FACTS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/time"


def prefix(kind: str) -> str:
    """What the name of a new temporary folder of this process begins with; removes those of processes that are gone."""
    begins = f"dlojz-{kind}-"
    remove_ended(Path(tempfile.gettempdir()), begins)
    return f"{begins}{label()}-"


def remove_ended(folder: Path, begins: str, unknown_after: float = float("inf")) -> None:
    """Remove this user's folders there whose names are `begins`, a label and more, once their processes have ended.

    unknown_after: seconds after which one also goes of which that cannot be told.
    """
    for path in folder.glob(f"{begins}*-*"):
        try:
            found = path.lstat()
            lives = _lives(path.name.removeprefix(begins).rpartition("-")[0])
            if lives is None:
                lives = time.time() - found.st_mtime < unknown_after
            if found.st_uid == os.getuid() and not lives:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def label() -> str:
    """Names this process, and no other one: where its number means something, its number, when it started."""
    return f"{_place()}-{os.getpid()}-{_started(os.getpid())}"


def _lives(owner: str) -> bool | None:
    """Whether the process with this label lives; None where another machine or container alone can tell."""
    place, _, process = owner.partition("-")
    pid, _, start = process.partition("-")
    if place != _place() or not pid.isdecimal():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    except OverflowError:
        return None
    return _started(int(pid)) in (start, "")  # else its number has gone to another process


@functools.cache
def _place() -> str:
    """The machine since it was started, and the container: others may see the same folder, and other processes."""
    facts = [socket.gethostname()]
    for path in map(Path, FACTS):
        try:
            facts.append(str(path.readlink()) if "ns" in path.parts else path.read_text())
        except OSError:  # no Linux
            facts.append("")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""
