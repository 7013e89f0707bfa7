"""Write what is known of each balise's mistakes, from the bank of answers: hints, and how each wrong answer behaves.

A balise has records if its hints are in its bank, `tests/answers/WORK/balise_N.py`.
"""

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlojz_tp import course
from dlojz_tp.authoring import banks, reached
from dlojz_tp.judging import checks
from dlojz_tp.judging.checking import mistakes, verdicts
from dlojz_tp.judging.checking.verdicts import Verdict
from dlojz_tp.works import source

SAME = 0.02  # of the distance to the truth: rounding on another machine moves no sketch further


def numbers(work: source.Work) -> list[int]:
    """The balises of a work that have records."""
    return [number for number in work.balises if "hint(" in _text(banks.file(work, number))]


def made_from(work: source.Work, number: int) -> str:
    """sha256 of what the records of a balise are made from: its recorded answers and hints, its check, its solution.

    Of each file the syntax of those statements counts that these need: no comment, no layout, no other balise's check.
    """
    folder = mistakes.CHECKS / work.module
    answers = [reached.tree(node) for node in reached.statements(banks.file(work, number), _is_recorded)]
    looks = reached.from_names(folder / f"balise_{number}.py", {f"balise_{number}"}, folder)
    solution = reached.tree(ast.parse(work.balises[number].code))
    return hashlib.sha256(repr([answers, looks, solution]).encode()).hexdigest()[:16]


def _is_recorded(node: ast.AST) -> bool:
    """Whether a statement of a bank gives a hint or a wrong answer that is no variant; its mark `edge` is taken out."""
    found = False
    for call in reached.bank_calls(node):
        call.keywords = [one for one in call.keywords if one.arg != "edge"]
        right = call.func.attr == "right" or (bool(call.args) and ast.unparse(call.args[0]) == "None")
        variant = call.func.attr == "variant" or any(ast.unparse(one) == "variant=True" for one in call.keywords)
        found |= not (right or variant or call.func.attr == "edge")
    return found


def is_fresh(work: source.Work, number: int) -> bool:
    """Whether nothing of this has changed since."""
    return mistakes.load(work.module, number).get("made_from") == made_from(work, number)


def remake(work: source.Work, number: int) -> Path | None:
    """Judge the wrong answers of a balise, and write their records; those that are still right are left as they are.

    A hint that is new is written before, because a verdict needs its text.
    Where the check needs a library that is not here, they stay as they are, and None is returned.
    """
    bank = banks.of(work)
    hints = verdicts.hints_of(checks.hints(work.module), {"hints": bank.hints.get(number, {})})
    path, old = mistakes.path_of(work.module, number), mistakes.load(work.module, number)["mistakes"]
    old = [one for one in old if one["slug"] in hints]  # a verdict cannot give a hint that is gone
    kept = _text(path) if path.exists() else None
    found = {"made_from": "", "hints": bank.hints.get(number, {}), "mistakes": old}
    _write(path, found)
    made = []
    for answer in bank.answers:
        if answer.balise == number and answer.slug and not answer.variant:
            verdict = course.judge(work, number, answer.answers)
            if verdict.slug == verdicts.NOT_INSTALLED:
                path.unlink() if kept is None else path.write_text(kept, encoding="utf-8")
                return None
            made += [one for one in [record(answer.slug, verdict, old)] if one and one not in made]
    _write(path, found | {"made_from": made_from(work, number), "mistakes": made})
    return path


def refresh(work: source.Work, balises: Iterable[int], *, force: bool = False) -> Iterator[str]:
    """Write the records of these balises that are old, and the marks of the work; a line on each that it made."""
    for number in sorted({*balises} & {*numbers(work)}):
        if force or not is_fresh(work, number):
            made = remake(work, number)
            said = f"written to {made.relative_to(source.ROOT)}" if made else "NOT made: run make notebooks"
            yield f"{work.name}: known mistakes of balise {number} {said}"
    write_edges(work, force=force)


def record(slug: str, verdict: Verdict, old: list[dict]) -> dict | None:
    """What is recorded of a wrong answer; the record it has in `old` if that still holds; None if it shows no value."""
    if not verdict.evidence:
        return None
    new = {"slug": slug} | {key: verdict.evidence[key] for key in ("look", "at", "seen")}
    for one in old:
        if all(one[key] == new[key] for key in ("slug", "look", "at")) and _alike(one["seen"], verdict.evidence):
            return one
    return new


def write_edges(work: source.Work, *, force: bool = False) -> Path:
    """Write which mistakes of a work are at the edge, as its bank marks them, and what each makes fail after it.

    A balise whose marks have not changed is left as it is, unless `force` is set.
    """
    bank, path = banks.of(work), mistakes.edges_of(work.module)
    old = json.loads(_text(path)) if path.exists() else {}
    found = {}
    for number in sorted(number for number, slugs in bank.edges.items() if slugs):
        before, slugs = old.get(str(number), {}), sorted(bank.edges[number])
        if not force and list(before) == slugs:
            found[number] = before
            continue
        records, check = mistakes.load(work.module, number), checks.check(work.module, number)
        given = {"hints": verdicts.hints_of(checks.hints(work.module), records), "known": records["mistakes"]}
        after = {slug: set() for slug in slugs}
        for answer in bank.answers:
            if answer.balise == number and answer.slug in after and not answer.variant:
                after[answer.slug] |= verdicts.after_effects(check, answer.answers, answer.slug, **given)
        found[number] = {slug: sorted(effects) for slug, effects in after.items()}
    _replace(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return path


def _alike(seen, evidence) -> bool:
    scale = mistakes.distance(evidence["seen"], evidence["due"])
    return mistakes.distance(seen, evidence["seen"]) <= SAME * (scale if scale < float("inf") else 1.0)


def _text(path):
    return path.read_text(encoding="utf-8")


def _write(path, records):
    """One mistake a line: a change is then seen as one."""
    head = {key: records[key] for key in ("made_from", "hints")}
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in records["mistakes"])
    _replace(path, json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "mistakes": [\n{lines}\n]\n}}\n')


def _replace(path, text):
    """Write a whole file, where it has another text."""
    if path.exists() and _text(path) == text:
        return
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
