"""Guess before you measure: what a trainee expected of a measurement, kept beside what it was.

    faster = tp.predict("How many times faster is a step in channels_last, here?", ...)   # a guess in place of ...
    faster.shows(0.94, "× {:.2f}", "oneDNN changes the layout inside anyway.")            # where it is measured

The guess made before the first measurement stands; one made after it is marked so. Guesses lie beside the verdicts, one
small file for each work.
"""

import contextlib
import json
import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from dlojz_tp import progress
from dlojz_tp.cards import render
from dlojz_tp.works import state, whole_file
from dlojz_tp.works.locking import locked

CLOSE = 1.25  # a number is as expected when neither is more than this many times the other
FOLDER = "guesses"
_here: dict[str, dict[str, dict]] = {}  # what this process knows, should the folder not be writable


@dataclass
class Guess:
    """What a trainee expects of one measurement of a work."""

    work: str
    question: str
    choices: tuple[str, ...] = ()

    def shows(self, measured: float | str, form: str = "{:.3g}", why: str = "") -> None:
        """Show the guess beside what was measured, and keep both.

        measured: a number, or one of the choices. form: how a number is said. why: a sentence for who is surprised.
        """
        measured = measured if self.choices else float(measured)
        row = load(self.work).get(self.question, {})
        guess = _read(row.get("guess"), self.choices)
        row |= {"was": _said(measured, form), "said": guess if guess is None else _said(guess, form)}
        row["right"] = guess is not None and not row.get("late") and as_expected(guess, measured)
        _keep(self.work, self.question, row)
        kind = "pass" if row["right"] else "not done" if guess is None else "by catch_up"
        render.show(render.line(f"{compared(row)}. {why}".rstrip(), kind))


def predict(work: str, question: str, guess=..., choices: tuple[str, ...] = ()) -> Guess:
    """Take a trainee's guess of what the next cells measure, before they do; never raises for a bad one.

    guess: a number, a range (low, high), one of the choices, or ... for none yet.
    """
    row = load(work).get(question, {})
    first, measured = _read(row.get("guess"), choices), "was" in row
    due = f"one of {', '.join(map(repr, choices))}" if choices else "a number or a range such as (1, 2)"
    if guess is ...:
        said, kind = f"guess before you measure: {due}, in place of the dots", "not done"
    elif (guess := _read(guess, choices)) is None:
        said, kind = f"a guess is {due}", "fail"
    elif first is not None and measured and not row.get("late") and guess != first:
        said, kind = f"your first guess, {_said(first)}, was made before it was measured, and stands", "by catch_up"
    else:
        if guess != first:
            _keep(work, question, row | {"guess": guess, "late": measured})
        said, kind = f"you expect {_said(guess)}" + ", after it was measured" * measured, "by catch_up"
    render.show(render.line(f"{question} {said[0].upper()}{said[1:]}.", kind))
    return Guess(work, question, tuple(choices))


def as_expected(guess, measured) -> bool:
    """Whether a guess was right: the same choice, in the range, or within CLOSE of the number."""
    if isinstance(guess, str):
        return guess == measured
    low, high = guess if isinstance(guess, list) else (guess, guess)
    if low == high:
        low, high = sorted((low / CLOSE, low * CLOSE))
    return low <= measured <= high


def compared(row: dict) -> str:
    """A guess beside what was measured, in a few words."""
    if row.get("said") is None:
        return f"It was {row['was']}; you made no guess"
    return f"You expected {row['said']}" + " (after the measurement)" * bool(row.get("late")) + f", it was {row['was']}"


def lines(work: str) -> list[tuple[str, bool]]:
    """For each question that was measured: guess, measurement and question in a line, and whether it was right."""
    return [(f"{compared(row)}: {question}", row["right"]) for question, row in load(work).items() if "was" in row]


def load(work: str) -> dict[str, dict]:
    """{question: {guess, late, said, was, right}} of a work; what is damaged counts as not there."""
    try:
        stored = json.loads(whole_file.read(_path(work)))
        stored = {question: row for question, row in stored.items() if _whole(row)}
    except (OSError, ValueError, AttributeError, RecursionError):
        stored = {}
    return stored | _here.get(work, {})


def _whole(row) -> bool:
    if not isinstance(row, dict):
        return False
    guess = row.get("guess")
    known = guess is None or isinstance(guess, str) or _read(guess, ()) is not None
    return known and ("was" not in row or {"said", "right"} <= row.keys())


def _keep(work, question, row):
    path = _path(work)
    _here[work] = _here.get(work, {}) | {question: row}
    with contextlib.suppress(OSError):  # then it lasts until this kernel ends, as the verdicts' line says
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(path.parent / f".{work}.lock", progress.LOCK_S):
            whole_file.replace(path, f".{work}-", json.dumps(load(work)).encode())
        del _here[work]


def _path(work) -> Path:
    return state.folder() / FOLDER / f"{work}.json"


def _number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _read(guess, choices):
    """A guess as it is kept: a float, [low, high] or a choice; None if it is none of these."""
    if choices:
        return guess if guess in choices else None
    if isinstance(guess, (tuple, list)) and len(guess) == 2 and all(map(_number, guess)):
        return sorted(map(float, guess))
    return float(guess) if _number(guess) else None


def _said(value, form="{:.4g}") -> str:
    if isinstance(value, (tuple, list)):
        return " to ".join(form.format(end) for end in value)
    return value if isinstance(value, str) else form.format(value)
