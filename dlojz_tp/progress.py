"""Which balises have passed: a small private file for each practical work.

The last verdict counts, as it does for the grader: a balise that passed and fails now has failed. State belongs to the
work folder that `lab` made, so that another folder starts afresh; `python -m dlojz_tp reset` forgets it.
"""

import contextlib
import json

from dlojz_tp.works import whole_file
from dlojz_tp.works.state import folder

WORDS = ("pass", "by catch_up", "fail", "not done")
_here: dict[str, dict[int, str]] = {}  # what this process knows, should the folder not be writable


def load(name: str) -> dict[int, str]:
    """{balise: one of WORDS} for the practical work `name`, its last verdicts; a damaged file counts as empty."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        stored = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
        return {int(k): v for k, v in stored.items() if v in WORDS} | _here.get(name, {})
    return _here.get(name, {})


def record(name: str, number: int, verdict: str):
    """Remember a verdict. Where the folder cannot be written, this process alone does."""
    state = load(name) | {number: verdict}
    _here.pop(name, None)
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        whole_file.replace(folder() / f"{name}.json", f".{name}-", json.dumps(state).encode())
    except OSError:
        _here[name] = state
