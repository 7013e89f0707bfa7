"""Records are stale after what can change them, and after nothing else."""

import pytest

from dlojz_tp.authoring import banks, reached, records
from dlojz_tp.works import source

CHECK = '''
from dlojz_tp.judging.checks.made.values import DUE, OTHER

SEEN = [1]  # what the answer is given
SEEN.append(2)
UNUSED = 3


def balise_1(answer):
    """Of a sum."""
    yield from look(answer(SEEN), DUE)


def look(seen, due):
    return [seen == due]


def balise_2(answer):
    yield OTHER
'''
VALUES = "BASE = 2\nDUE = BASE + 1\nOTHER = 5\n"
BANK = """
RIGHT = "def add(values): return sum(values, 0)"
bank = Bank("00_made", 1)
bank.text(None, RIGHT)
bank.hint("no-sum", "It is a product.", edge=True)
WRONG = "def add(values): return 0"
bank.text("no-sum", WRONG)
bank.variant("no-sum", RIGHT, ("sum", "max"))


@bank.wrong("no-sum")
def add(values):
    return first(values)


def first(values):
    return values[0]
"""


@pytest.mark.parametrize(("name", "old", "new", "stale"), [
    ("check", "# what the answer is given", "", False),
    ("check", '    """Of a sum."""\n', "", False),
    ("check", "answer(SEEN), DUE", "answer(\n    SEEN),\n    DUE,\n", False),
    ("check", "UNUSED = 3", "UNUSED = 4", False),
    ("check", "yield OTHER", "yield 0", False),
    ("check", "append(2)", "append(3)", True),
    ("check", "[seen == due]", "[seen >= due]", True),
    ("values", "BASE = 2", "BASE = 4", True),
    ("values", "OTHER = 5", "OTHER = 6", False),
    ("bank", ", edge=True", "", False),
    ("bank", "a product", "not a sum", True),
    ("bank", "values, 0", "values", False),  # of a right answer
    ("bank", '"max"', '"min"', False),  # of a variant
    ("bank", "return 0", "return 1", True),
    ("bank", "values[0]", "values[1]", True),  # what an answer uses
])  # fmt: skip
def test_an_edit_makes_stale_what_it_can_change(name, old, new, stale, tmp_path, monkeypatch):
    folder = tmp_path / "dlojz_tp" / "judging" / "checks" / "made"
    folder.mkdir(parents=True)
    paths = {"check": folder / "balise_1.py", "values": folder / "values.py", "bank": tmp_path / "balise_1.py"}
    for each, text in (("check", CHECK), ("values", VALUES), ("bank", BANK)):
        paths[each].write_text(text)
    monkeypatch.setattr(reached, "ROOT", tmp_path)
    monkeypatch.setattr(records.mistakes, "CHECKS", folder.parent)
    monkeypatch.setattr(banks, "file", lambda *_: paths["bank"])
    balise = source.Balise(1, "Add", "def add(values):\n    return sum(values)", ("add",))
    work = source.Work("00_made", "Made", (), {1: balise})
    before = records.made_from(work, 1)
    text = paths[name].read_text()
    assert old in text
    paths[name].write_text(text.replace(old, new))
    assert (records.made_from(work, 1) != before) == stale
