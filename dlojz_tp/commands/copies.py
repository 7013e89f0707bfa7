"""The trainee's copies of the course's notebooks, in a work folder.

A copy that the trainee has touched is never overwritten: a new version of the course is put beside it.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import sys
from pathlib import Path

from dlojz_tp.works import open_task, whole_file
from dlojz_tp.works.locking import locked
from dlojz_tp.works.state import WORK

LOCK = ".course.lock"
TEMPORARY = ".course-tmp-"
LOCK_SECONDS = 20
AGENTS = "AGENTS.md"  # what an AI assistant is asked to do and not to do
LEVELS = "guided", "open"
LEVEL = "the level"  # beside the names of notebooks in what is remembered


class LabError(Exception):
    """JupyterLab cannot be started; the message is one line that says what to do."""


def sync(course: Path, work: Path, level: str | None = None) -> list[str]:
    """Bring the notebooks of `course` into `work`; returns one line a notebook that changed there.

    level: "guided", or "open" for notebooks in which each balise starts from its names alone; None: as last time.
    Raises LabError where there is nothing to bring or another run holds the lock too long, OSError where `work` cannot
    be written.
    """
    notebooks = sorted(course.glob("*.ipynb"))
    if not notebooks:
        raise LabError(f"no notebooks in {course}: get the whole checkout, or run make notebooks")
    if work == course.resolve():
        raise LabError(f"{work} holds the course itself: give another --work")
    work.mkdir(parents=True, exist_ok=True)
    with _remembered(work) as state:
        kept = state.setdefault(LEVEL, {})
        kept["is"] = level or kept.get("is", LEVELS[0])
        change = open_task.opened if kept["is"] == "open" else lambda content, name: content
        brought = {path.name: change(path.read_bytes(), path.stem) for path in notebooks}
        if (agents := course / AGENTS).is_file():
            brought[AGENTS] = agents.read_bytes()
        lines = [_bring(name, _as_jupyterlab(content), work, state) for name, content in brought.items()]
    return [line for line in lines if line]


def renew(name: str, content: bytes, work: Path) -> list[str]:
    """Bring one notebook with its outputs; in a copy whose cells nobody touched they are replaced, without a word."""
    content = _as_jupyterlab(content)
    with _remembered(work) as state:
        line = _bring(name, content, work, state)
        if line is None and sha_of(work / name) == _sha(content):
            whole_file.replace(work / name, TEMPORARY, content)
    return [line] if line else []


@contextlib.contextmanager
def _remembered(work: Path):
    """What was copied and offered, for one run at a time; written when the run ends."""
    if (work / WORK).is_dir():  # nothing is brought that could not be remembered
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(work / WORK))
    with locked(work / LOCK, LOCK_SECONDS) as held:
        if not held:
            raise LabError(f"another run has been using {work} for {LOCK_SECONDS} s: try again")
        for left in work.glob(f"{TEMPORARY}*"):  # of a run that was killed
            left.unlink(missing_ok=True)
        state = _read_state(work)
        before = json.dumps(state)
        try:
            yield state
        finally:
            if json.dumps(state) != before or not (work / WORK).exists():
                whole_file.replace(work / WORK, TEMPORARY, json.dumps(state, indent=1).encode())


def _bring(name: str, content: bytes, work: Path, state: dict) -> str | None:
    """Bring one notebook; `state` maps a file's name to what was last copied to it and last offered beside it."""
    new = _sha(content)
    known = state.setdefault(name, {})
    now = sha_of(work / name)
    if now == new:
        known["copied"] = new
        return None
    if now is None:
        again = "copied" in known
        create(work / name, content)
        known["copied"] = new
        return f"{name}: put back" if again else f"{name}: copied"
    if now == known.get("copied"):
        whole_file.replace(work / name, TEMPORARY, content)
        known["copied"] = new
        return f"{name}: brought up to date"
    if new in (known.get("copied"), known.get("offered")):
        return None  # the trainee's work on the version that the course still has
    for beside in _names_beside(name):
        there = sha_of(work / beside)
        if there is None:
            create(work / beside, content)
        elif there == state.get(beside, {}).get("copied"):
            whole_file.replace(work / beside, TEMPORARY, content)  # an earlier offer that nobody touched
        elif there != new:
            continue
        state[beside] = {"copied": new}
        known["offered"] = new
        return f"{name}: yours is kept; the course's new version is in {beside}"
    return None


def _names_beside(name: str):
    stem, ending = Path(name).stem, Path(name).suffix
    yield f"{stem}.new{ending}"
    number = 2
    while True:
        yield f"{stem}.new-{number}{ending}"
        number += 1


def _as_jupyterlab(content: bytes) -> bytes:
    """The notebook as JupyterLab saves it here: it writes its kernel into the file, and calls that a change."""
    try:
        notebook = json.loads(content)
        metadata = notebook["metadata"]
        metadata["kernelspec"] |= {"display_name": "Python 3 (ipykernel)"}
        metadata["language_info"] = {
            "codemirror_mode": {"name": "ipython", "version": sys.version_info.major},
            "file_extension": ".py",
            "mimetype": "text/x-python",
            "name": "python",
            "nbconvert_exporter": "python",
            "pygments_lexer": f"ipython{sys.version_info.major}",
            "version": platform.python_version(),
        }
        return (json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    except (ValueError, LookupError, TypeError):
        return content


def _sha(content: bytes) -> str:
    """SHA-256 of a notebook's cells, as they are written: to open it, to run it and to save it is no edit."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        cells = json.loads(content)["cells"]
        content = json.dumps([[cell["cell_type"], "".join(cell["source"])] for cell in cells]).encode()
    return hashlib.sha256(content).hexdigest()


def sha_of(path: Path) -> str | None:
    """_sha of a file; None if nothing is there; "unknown" for what cannot be read, so that it counts as touched."""
    if not os.path.lexists(path):
        return None
    try:
        return _sha(path.read_bytes())
    except OSError:
        return "unknown"


def _read_state(work: Path) -> dict:
    """What was copied and offered; empty if the file is missing or damaged, so that every copy counts as touched."""
    try:
        state = json.loads((work / WORK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    return {name: dict(known) for name, known in state.items() if isinstance(known, dict)}


def create(path: Path, content: bytes) -> None:
    """Make a file that is not there, whole or not at all; never over one that is there."""
    temporary = whole_file.beside(path.parent, TEMPORARY, content)
    try:
        os.link(temporary, path)  # noqa: PTH200
    except FileExistsError:
        return  # saved this moment by the trainee: judged at the next run
    except OSError:  # a file system without links
        if not path.exists():
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
