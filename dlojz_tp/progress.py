"""Which balises have passed: a small private file for each practical work.

The last verdict counts, as it does for the grader: a balise that passed and fails now has failed. State belongs to the
work folder that `lab` made, so that another folder starts afresh; `python -m dlojz_tp reset` forgets it.
"""

import contextlib
import json
import sys
from pathlib import Path

from dlojz_tp.cards.verdict import DONE
from dlojz_tp.works import whole_file
from dlojz_tp.works.locking import locked
from dlojz_tp.works.state import folder

WORDS = (*DONE, "by catch_up", "fail", "not done")
LOCK_S = 5.0  # for another process to write its line
_here: dict[str, dict[int, str]] = {}  # what this process knows, should the folder not be writable
_said: set[str] = set()


def load(name: str, where: Path | None = None) -> dict[int, str]:
    """{balise: one of WORDS} for the practical work `name`, its last verdicts; a damaged file counts as empty.

    where: the folder of the verdicts; default that of this process.
    """
    stored = {}
    with contextlib.suppress(OSError):
        stored, _ = _read((where or folder()) / f"{name}.json")
    return stored | _here.get(name, {})


def record(name: str, number: int, verdict: str):
    """Remember a verdict, also beside other notebooks of this work.

    Where the folder cannot be written, this process alone does, and says so once. What is no list of verdicts, such as
    a file of a newer course or a pipe, is kept under another name.
    """
    path = folder() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(path.parent / f".{name}.lock", LOCK_S):  # whoever holds it longer hangs: go on
            stored, strange = _read(path)
            if strange:
                _keep_aside(path)
            state = stored | _here.get(name, {}) | {number: verdict}
            whole_file.replace(path, f".{name}-", json.dumps(state).encode())
        _here.pop(name, None)
    except OSError as error:
        _here[name] = _here.get(name, {}) | {number: verdict}
        _say(
            f"progress cannot be written to {path.parent} ({error.strerror or error}): it lasts until this kernel ends"
        )


def _read(path: Path) -> tuple[dict[int, str], bool]:
    """The verdicts in a file, and whether it holds something else as well. OSError where it cannot be read now."""
    try:
        stored = json.loads(whole_file.read(path))
        known = {int(k): v for k, v in stored.items() if k.isdigit() and v in WORDS}
        return known, len(known) < len(stored)
    except FileNotFoundError:
        return {}, False
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}, True


def _keep_aside(path: Path):
    for number in range(1, 100):
        aside = path.with_name(f"{path.name}.kept-{number}")
        if not aside.exists():
            path.rename(aside)
            return _say(f"{path} is not what this version of the course writes: kept as {aside.name}")
    raise OSError(f"{path} is none of this course's, and its folder is full of such")


def _say(line: str):
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr)
