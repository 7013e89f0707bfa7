"""What the verdicts of a class say: who is where, who is stuck and on which hint, how long a balise takes.

A balise's minutes are those before each verdict on it, from the one before on, until it passes; a pause counts at most
PAUSE. "Not done" takes none: running all cells gives it to every hole.
"""

import ast
import csv
import functools
import io
import json
import pwd
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from dlojz_tp.cards import verdict
from dlojz_tp.cards.verdict import BROKEN
from dlojz_tp.classroom import races
from dlojz_tp.classroom.reading import Told, works
from dlojz_tp.classroom.telling import JUDGED, OPENED, RACED

DONE = (*verdict.DONE, "by catch_up")
FAILURES = 3  # in a row at one balise: stuck
MINUTES = 15  # at one balise: stuck
PAUSE = 30  # minutes: a longer one counts as this
AWAY = 60  # minutes without a verdict: not at work, so not stuck
SHOWN_HINTS = 15
JUDGING = Path(__file__).resolve().parent.parent / "judging"


@dataclass
class Row:
    """One trainee at one balise. word, at: the last verdict and its time. failed: failures since it passed."""

    word: str = "not done"
    attempts: int = 0
    failed: int = 0
    hint: str = ""
    seconds: float = 0.0
    passed: bool = False  # once, by an answer of the trainee's own
    at: float = 0.0


@dataclass
class Trainee:
    """One trainee. rows: {(work, balise): Row}. last: when something was heard. since: when the last one counted.

    raced: {(work, balise): (ratio, noise)}, the best race.
    """

    uid: int
    told: list[Told] = field(default_factory=list)
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    hints: Counter = field(default_factory=Counter)  # {(work, balise, hint): times}
    raced: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    work: str = ""
    last: float = 0.0
    since: float = 0.0

    def hear(self, news: list[Told]):
        """Take in verdicts; those that come late find their place."""
        for told in news:
            if told.word == RACED:  # neither a verdict nor an attempt: minutes and places don't change
                key = told.work, told.number
                self.raced[key] = min(self.raced.get(key, told.race), told.race)
        news = sorted((told for told in news if told.word != RACED), key=lambda told: told.at)
        late = bool(self.told) and bool(news) and news[0].at < self.told[-1].at
        self.told += news
        if late:
            self.told.sort(key=lambda told: told.at)
            news = self.told
            self.rows, self.hints, self.work, self.since = {}, Counter(), "", 0.0
        for told in news:
            self._take(told)

    def _take(self, told: Told):
        new = told.work != self.work or told.at - self.last > PAUSE * 60
        before, self.work, self.last = self.since or told.at, told.work, told.at
        if told.word == OPENED:  # within a pause: the same cells once more
            self.since = told.at if new else before
            return
        row = self.rows.setdefault((told.work, told.number), Row())
        row.attempts = max(
            row.attempts + (told.word in JUDGED), told.attempts
        )  # two kernels may count beside each other
        if told.word in ("fail", *DONE) and row.word not in DONE:
            row.seconds += 0 if row.passed else min(told.at - before, PAUSE * 60)
            self.since = told.at
        if told.word == "fail":
            row.failed += 1
            row.hint = told.hint
            self.hints[told.work, told.number, told.hint] += 1
        if told.word in DONE:
            row.failed, row.hint = 0, ""
        if told.word != BROKEN or row.word not in DONE:
            row.word = told.word
        row.passed |= told.word in verdict.DONE
        row.at = told.at

    def place(self) -> int | None:
        """The balise of the last work that this trainee is at; None where all is done.

        The one that failed last, unless another has passed since: then the next that is open.
        """
        if self.work not in works():
            return None
        rows = {number: self.rows.get((self.work, number), Row()) for number in works()[self.work].balises}
        still_open = [number for number, row in rows.items() if row.word not in DONE]
        answered = [number for number, row in rows.items() if row.word in (*DONE, "fail")]
        last = max(answered, key=lambda number: rows[number].at, default=0)
        if last in still_open:
            return last
        return next((n for n in still_open if n > last), next(iter(still_open), None))

    def view(self, now: float) -> dict:
        """What the page shows of this trainee. now: seconds since 1970."""
        at, quiet = self.place(), (now - self.last) / 60
        row = self.rows.get((self.work, at), Row()) if at else Row()
        minutes = ((0 if row.passed else row.seconds) + now - self.since) / 60
        why = []
        if at and quiet < AWAY:
            why += [f"{row.failed} failures"] * (row.failed >= FAILURES)
            why += [f"{minutes:.0f} minutes"] * (minutes >= MINUTES)
        cells: dict[str, dict[int, list]] = defaultdict(dict)
        for (work, number), one in sorted(self.rows.items()):
            cells[work][number] = [one.word, one.attempts, one.failed, round(one.seconds / 60, 1), one.hint]
        return {
            "name": name_of(self.uid),
            "work": self.work,
            "at": at,
            "minutes": round(minutes, 1),
            "quiet": round(quiet, 1),
            "stuck": why,
            "hint": row.hint,
            "words": hint_text(self.work, at, row.hint) if row.hint else "",
            "cells": cells,
        }


def class_view(trainees: list[Trainee], now: float) -> dict:
    """All that the page shows: works, trainees, hints, races."""
    views = sorted((one.view(now) for one in trainees), key=lambda view: view["name"])
    used = sorted({work for one in trainees for work, _ in one.rows} | {one.work for one in trainees if one.work})
    found = {"works": [_work(name, trainees) for name in used], "trainees": views, "hints": _hints(trainees)}
    return found | {"races": _races(trainees)}


def _work(name: str, trainees: list[Trainee]) -> dict:
    work, balises = works()[name], []
    for number, balise in work.balises.items():
        rows = [one.rows[name, number] for one in trainees if (name, number) in one.rows]
        spent = [row.seconds / 60 for row in rows if row.passed]
        balises.append(
            {
                "number": number,
                "title": balise.title,
                "passed": sum(row.word in verdict.DONE for row in rows),
                "timed": len(spent),
                "median": round(statistics.median(spent), 1) if spent else None,
                "stated": balise.minutes or None,
            }
        )
    return {"name": name, "title": work.title, "stated": work.minutes or None, "balises": balises}


def _races(trainees: list[Trainee]) -> list[dict]:
    """For each balise that somebody has raced, a line a trainee, the best first."""
    named = {name_of(one.uid): one.raced for one in trainees}
    keys = sorted({key for raced in named.values() for key in raced})
    found = []
    for work, number in keys:
        lines = races.ranked({name: raced[work, number] for name, raced in named.items() if (work, number) in raced})
        title = works()[work].balises[number].title
        found.append({"work": work, "balise": number, "title": title, "lines": lines})
    return found


def _hints(trainees: list[Trainee]) -> list[dict]:
    """The hints that most trainees have met, the commonest first. now: how many of them still are where they met it."""
    met, times, now = Counter(), Counter(), Counter()
    for one in trainees:
        met.update(one.hints.keys())
        times.update(one.hints)
        now.update((*key, row.hint) for key, row in one.rows.items() if row.word == "fail")
    found = []
    for key in sorted(met, key=lambda key: (-met[key], -times[key], key))[:SHOWN_HINTS]:
        work, number, hint = key
        more = {"trainees": met[key], "times": times[key], "now": now[key], "text": hint_text(work, number, hint)}
        found.append({"work": work, "balise": number, "hint": hint} | more)
    return found


def hint_text(work: str, number: int, hint: str) -> str:
    """The words of a hint, its {fields} left out; empty where only the check knows them."""
    found = _recorded(work, number).get(hint) or _in_code(works()[work].module).get(hint, "")
    return re.sub(r"\{[^{}]*\}\.?(?!\w)", "…", found)


@functools.cache
def _recorded(work: str, number: int) -> dict[str, str]:
    path = JUDGING / "checks" / works()[work].module / "mistakes" / f"{number}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["hints"]
    except (OSError, ValueError, KeyError):
        return {}


@functools.cache
def _in_code(module: str) -> dict[str, str]:
    """The hints in the checks of a work, and those that any work can give. Read, not imported: no torch."""
    found = {}
    for path in [JUDGING / "checking" / "verdicts.py", *(JUDGING / "checks" / module).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").endswith("HINTS")
            if named and isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                found |= {
                    k.value: v.value for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)
                }
    return found


def name_of(uid: int) -> str:
    """The login name of a user; the number where the system knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def table(trainees: list[Trainee]) -> str:
    """CSV: a line for each trainee and balise. Of its best race: time over PyTorch's, noise, place in the class."""
    out = io.StringIO()
    write = csv.writer(out)
    write.writerow(
        ["trainee", "work", "balise", "title", "verdict", "attempts", "failures in a row", "last hint", "minutes",
         "race ratio", "race noise", "race place"]
    )  # fmt: skip
    raced = {
        (line["name"], each["work"], each["balise"]): [f"{line['ratio']:.3f}", f"{line['noise']:.3f}", line["place"]]
        for each in _races(trainees)
        for line in each["lines"]
    }
    for one in sorted(trainees, key=lambda one: name_of(one.uid)):
        for work, number in sorted(one.rows.keys() | one.raced.keys()):
            title, row = works()[work].balises[number].title, one.rows.get((work, number), Row())
            known = [row.word, row.attempts, row.failed, row.hint, f"{row.seconds / 60:.1f}"]
            best = raced.get((name_of(one.uid), work, number), [""] * 3)
            write.writerow([name_of(one.uid), work, number, title, *known, *best])
    return out.getvalue()
