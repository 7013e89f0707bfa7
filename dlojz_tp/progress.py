"""Which balises have passed: a small private file for each practical work."""

import contextlib
import json
import os
import tempfile
from pathlib import Path

_here: dict[str, dict[int, str]] = {}  # what this process knows, should the folder not be writable


def folder() -> Path:
    """Where progress is kept: DLOJZ_STATE, else the user's own state folder."""
    chosen = os.environ.get("DLOJZ_STATE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dlojz_tp"


def load(name: str) -> dict[int, str]:
    """{balise: "pass" | "fail" | "not done"} for the practical work `name`; this session counts."""
    return {**_stored(name), **_here.get(name, {})}


def _stored(name: str) -> dict[int, str]:
    """What earlier sessions left; a damaged file counts as empty."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        stored = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
        return {int(k): v for k, v in stored.items() if v in ("pass", "fail", "not done")}
    return {}


def record(name: str, number: int, verdict: str):
    """Remember a verdict: in the file, a balise that has passed stays passed; in this session, the last one counts.

    A folder that cannot be written is no error.
    """
    kept = _stored(name)
    _here.setdefault(name, {})[number] = verdict
    if kept.get(number) == "pass":
        return
    state = {**kept, number: verdict}
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, partial = tempfile.mkstemp(dir=folder(), prefix=f".{name}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(state, file)
        Path(partial).replace(folder() / f"{name}.json")
