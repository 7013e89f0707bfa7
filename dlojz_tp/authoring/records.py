"""Write what is known of each balise's mistakes, from the bank of answers: hints, and how each wrong answer behaves.

A balise has records if the bank has a separate file for it, `tests/answers/WORK/balise_N.py`.
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

from dlojz_tp import course
from dlojz_tp.checking import judging, mistakes
from dlojz_tp.checking.judging import Verdict
from dlojz_tp.works import source
from dlojz_tp.works.source import ROOT

SAME = 0.02  # of the distance to the truth: rounding on another machine moves no sketch further


def numbers(work: source.Work) -> list[int]:
    """The balises of a work that have records."""
    return [number for number in work.balises if _answers(work, number).exists()]


def made_from(work: source.Work, number: int) -> str:
    """sha256 of the texts that the records of a balise are made from: its answers, its check, its solution."""
    check = (p for p in sorted((mistakes.CHECKS / work.module).glob("*.py")) if f"def balise_{number}(" in _text(p))
    texts = [_text(_answers(work, number)), *map(_text, check), work.balises[number].code]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def is_fresh(work: source.Work, number: int) -> bool:
    """Whether none of these texts has changed since."""
    return mistakes.load(work.module, number).get("made_from") == made_from(work, number)


def remake(work: source.Work, number: int) -> Path | None:
    """Judge the wrong answers of a balise, and write their records; those that are still right are left as they are.

    A hint that is new is written before, because a verdict needs its text.
    Where the check needs a library that is not here, they stay as they are, and None is returned.
    """
    bank = bank_of(work)
    hints = judging.hints_of(course.checks_of(work), {"hints": bank.hints.get(number, {})})
    path, old = mistakes.path_of(work.module, number), mistakes.load(work.module, number)["mistakes"]
    old = [one for one in old if one["slug"] in hints]  # a verdict cannot give a hint that is gone
    kept = _text(path) if path.exists() else None
    found = {"made_from": "", "hints": bank.hints.get(number, {}), "mistakes": old}
    _write(path, found)
    made = []
    for answer in bank.answers:
        if answer.balise == number and answer.slug and not answer.variant:
            verdict = course.judge(work, number, answer.answers)
            if verdict.slug == judging.NOT_INSTALLED:
                path.unlink() if kept is None else path.write_text(kept, encoding="utf-8")
                return None
            made += [one for one in [record(answer.slug, verdict, old)] if one and one not in made]
    _write(path, found | {"made_from": made_from(work, number), "mistakes": made})
    return path


def record(slug: str, verdict: Verdict, old: list[dict]) -> dict | None:
    """What is recorded of a wrong answer; the record it has in `old` if that still holds; None if it shows no value."""
    if not verdict.evidence:
        return None
    new = {"slug": slug} | {key: verdict.evidence[key] for key in ("look", "at", "seen")}
    for one in old:
        if all(one[key] == new[key] for key in ("slug", "look", "at")) and _alike(one["seen"], verdict.evidence):
            return one
    return new


def bank_of(work: source.Work):
    """The answers to a work."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"tests.answers.{work.module}").bank


def _alike(seen, evidence) -> bool:
    scale = mistakes.apart(evidence["seen"], evidence["due"])
    return mistakes.apart(seen, evidence["seen"]) <= SAME * (scale if scale < float("inf") else 1.0)


def _answers(work, number):
    return ROOT / "tests" / "answers" / work.module / f"balise_{number}.py"


def _text(path):
    return path.read_text(encoding="utf-8")


def _write(path, records):
    """One mistake a line: a change is then seen as one."""
    head = {key: records[key] for key in ("made_from", "hints")}
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in records["mistakes"])
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "mistakes": [\n{lines}\n]\n}}\n'
    if path.exists() and _text(path) == text:
        return
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
