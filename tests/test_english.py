"""Texts that a person reads have none of the habits that CONTRIBUTING's style sheet names."""

import ast
import json
import re

import pytest

from dlojz_tp.works.source import ROOT, split_cells, uncomment

NOT_AFTER = (  # one hides behind a thing, falls behind, leaves nothing behind
    *(
        "hide",
        "hides",
        "hidden",
        "hiding",
        "fall",
        "falls",
        "fell",
        "far",
        "idea",
        "nothing",
        "name",
        "it",
        "left",
        "not",
    ),
    *("leave", "leaves", "still", "longer", "before,", "before and"),
)
HIDING = "".join(rf"(?<!\b{word} )" for word in NOT_AFTER) + r"(?<!\bplace\.)(?<!{)"
HABITS = {  # what not to write: what to write instead
    HIDING + r"\bbehind\b": "after",
    r"(?:^|[.:;!] )Who(?:ever)? [^?.]{3,90}[.:]": "anyone who",
    r"\bnobody who\b|\bfor who\b": "anyone who",
    r"\bfor ever\b": "forever; better: never ends",
    r"\bat hand\b": "here; that you have",
    r"\blikewise\b": "in the same way; too",
    r"\bmust do\.|\bails\b": "is enough; fails",
    r"[.:;] So (?:served|cut|sent|written|made|done|kept|read|told|seen),": "put the subject first",
    r"\bit is told\b|\bis told by\b|\bare told by\b": "you see; says",
    r"\bbut for (?:it|them|the)\b": "except",
    r"\b(?:stands?|lies?) (?:in|on|at|below|above|beside) (?:the|a|its|it|them)\b": "is",
}


def markdown(path):
    for cell in split_cells(path.read_text(encoding="utf-8")):
        if cell.kind == "markdown":
            yield "\n".join(map(uncomment, cell.text.splitlines()))


def strings(path):
    """All texts of a module; of a check none of its docstrings, which no trainee sees."""
    tree, unseen = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree) if "checks" in path.parts else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            unseen.add(node.body[0].value)
    for node in ast.walk(tree):
        if node not in unseen and isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def hints(path):
    yield from json.loads(path.read_text(encoding="utf-8")).get("hints", {}).values()


def texts():
    for path in sorted(ROOT.joinpath("solutions").glob("*.py")):
        yield from ((path, text) for text in [*markdown(path), *strings(path)])
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.joinpath("docs").glob("*.md")]:
        yield path, path.read_text(encoding="utf-8")
    for path in sorted(ROOT.joinpath("dlojz_tp").rglob("*.py")):
        yield from ((path, text) for text in strings(path))
    for path in sorted(ROOT.joinpath("dlojz_tp").rglob("mistakes/*.json")):
        yield from ((path, text) for text in hints(path))


TEXTS = [*texts()]


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_gone(habit):
    found = [
        f"{path.relative_to(ROOT)}: …{text[max(0, m.start() - 40) : m.end() + 40]}…".replace("\n", " ")
        for path, text in TEXTS
        for m in re.finditer(habit, text)
    ]
    assert not found, f"{len(found)}: better {HABITS[habit]}\n" + "\n".join(found[:40])
