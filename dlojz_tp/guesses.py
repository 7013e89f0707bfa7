"""Guess before you measure: what a trainee expected of a measurement, kept beside what it was.

    faster = tp.predict("How many times faster is a step in channels_last, here?", ...)   # a guess in place of ...
    faster.shows(0.94, "× {:.2f}", "oneDNN changes the layout inside anyway.")            # where it is measured

The first guess that was shown beside its measurement stands. Without a guess the measurement is folded away, so that
running all cells tells no answer. Guesses are kept beside the verdicts, in one small file for each work.
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

        measured: a number, or one of the choices. form: how a number is said. why: a sentence for anyone surprised.
        Without a guess both are folded: a click shows them.
        """
        measured = measured if self.choices else float(measured)
        row = load(self.work).get(self.question, {})
        guess = _read(row.get("guess"), self.choices)
        if guess is None:
            answer = f"It was {_said(measured, form)}. {why}".rstrip()
            render.show(render.line(f"You made no guess: {self.question}", folded=("what was measured", answer)))
            return
        row |= {"was": _said(measured, form), "said": _said(guess, form), "right": as_expected(guess, measured)}
        _keep(self.work, self.question, row)
        render.show(render.line(f"{compared(row)}. {why}".rstrip(), "pass" if row["right"] else "by catch_up"))


def predict(work: str, question: str, guess=..., choices: tuple[str, ...] = ()) -> Guess:
    """Take a trainee's guess of what the next cells measure, before they do; never raises for a bad one.

    guess: a number, a range (low, high), one of the choices, or ... for none yet.
    """
    row = load(work).get(question, {})
    first = _read(row.get("guess"), choices)
    due = f"one of {', '.join(map(repr, choices))}" if choices else "a number or a range such as (1, 2)"
    if guess is ...:
        said, kind = f"guess before you measure: {due}, in place of the dots", "not done"
    elif (guess := _read(guess, choices)) is None:
        said, kind = f"a guess is {due}", "fail"
    elif first is not None and "was" in row and guess != first:
        said = f"your first guess, {_said(first)}, was made before you saw the measurement, and stands"
        kind = "by catch_up"
    else:
        if guess != first:
            _keep(work, question, {"guess": guess})
        said, kind = f"you expect {_said(guess)}", "by catch_up"
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
    return f"You expected {row['said']}, it was {row['was']}"


def lines(work: str) -> list[tuple[str, bool]]:
    """For each guess that was measured: guess, measurement and question in a line, and whether it was right."""
    found = load(work).items()
    return [(f"{compared(row)}: {question}", row["right"]) for question, row in found if row.get("said") is not None]


def load(work: str) -> dict[str, dict]:
    """{question: {guess, said, was, right}} of a work; what is damaged counts as not there."""
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
