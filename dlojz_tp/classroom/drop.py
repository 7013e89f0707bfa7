"""The class folder: everybody may put a folder of his or her own into it, only the instructor can list them.

It needs neither groups nor access lists, which many shared file systems lack. Its mode is 1733: anybody can make a
folder in it, nobody can rename or remove another's (the sticky bit), and its owner alone can list it. A trainee's
folder has a name that cannot be guessed, so only the trainee and the instructor can open what is in it. A file's
owner says whose verdict it is, never its name or its text.
"""

import json
import os
import secrets
import stat
from pathlib import Path

from dlojz_tp.works import state, whole_file

VARIABLE = "DLOJZ_CLASS"
MODE = 0o1733
OWN = 0o755  # of a trainee's folder: the instructor has no other right to it; its name is the key
KEPT = "class.json"  # in the trainee's state: the names of his or her folders


class NotOne(OSError):
    """This is no class folder; the message says why."""


def refused(found: os.stat_result) -> str:
    """Why a folder cannot be a class folder; empty where it can."""
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return "others can list it"
    if not found.st_mode & stat.S_ISVTX:
        return "others can remove what is in it"
    return ""


def own(shared: Path) -> Path:
    """This user's folder in the class folder, the one of before or a new one. Raises OSError, NotOne among them."""
    if why := refused(shared.stat()):
        raise NotOne(f"{why}: `python -m dlojz_tp class {shared} --make` makes one")
    kept = state.folder() / KEPT
    names = _names(kept)
    before = names.get(str(shared))
    if before and _mine(shared / before):
        return shared / before
    path = shared / f"{os.getuid()}-{secrets.token_hex(16)}"
    path.mkdir(OWN)
    path.chmod(OWN)  # whatever the umask
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole_file.replace(kept, f".{KEPT}-", json.dumps(names | {str(shared): path.name}).encode(), 0o600)
    except OSError:
        pass  # the next kernel makes another folder: the board joins those of one owner
    return path


def _names(kept: Path) -> dict[str, str]:
    try:
        names = json.loads(whole_file.read(kept))
        return {k: v for k, v in names.items() if isinstance(v, str) and v == Path(v).name}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _mine(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def make(shared: Path) -> list[str]:
    """Make a class folder, or make one of an empty folder. Returns lines about what would keep trainees out.

    Raises OSError, NotOne where it cannot be one.
    """
    shared.mkdir(parents=True, exist_ok=True)
    found = shared.stat()
    if found.st_uid != os.getuid():
        raise NotOne("it belongs to somebody else")
    if refused(found) and any(shared.iterdir()):
        raise NotOne("it is not empty, and everybody could write into it: name a new one")
    shared.chmod(MODE)
    if why := refused(shared.stat()):
        raise NotOne(f"this file system keeps no permissions, {why}")
    closed = [path for path in shared.parents if not path.stat().st_mode & stat.S_IXOTH]
    return [f"{path} is closed to others: trainees need `chmod o+x {path}`" for path in reversed(closed)]
