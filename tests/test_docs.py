"""The instructor's plans name balises that exist, their sums are right, and every work has its page."""

import re
from pathlib import Path

import pytest

from dlojz_tp.works import source

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "instructor.md").read_text(encoding="utf-8")
WORKS = {name[:2]: source.find(name) for name in source.names()}


@pytest.mark.parametrize("plan", re.findall(r"^## (?:Four|Two) days.*?(?=^## )", TEXT, re.DOTALL | re.MULTILINE))
def test_a_plan_names_what_exists_and_adds_up(plan):
    rows = re.findall(r"^\| (\d) \| (\d\d) \| ([\d, ]+) \| (\d+) \|$", plan, re.MULTILINE)
    assert len(rows) > 5
    for _, work, balises, _ in rows:
        assert {int(number) for number in balises.split(",")} <= set(WORKS[work].balises), work
    slots = [int(slot) for *_, slot in rows]
    assert sum(slots) == int(re.search(r"\*\*(\d+)\*\* \|$", plan, re.MULTILINE)[1])
    assert sum(slots) == 60 * int(re.search(r"^## .*: (\d+) hours", plan)[1])
    days = {day: sum(int(slot) for of, *_, slot in rows if of == day) for day, *_ in rows}
    assert set(days.values()) == {210}, days


def test_both_plans_are_found_and_every_work_has_its_page():
    assert len(re.findall(r"^## (?:Four|Two) days", TEXT, re.MULTILINE)) == 2
    assert re.findall(r"^### (\d\d) · ", TEXT, re.MULTILINE) == list(WORKS)
    for page in TEXT.split("\n### ")[1:]:
        assert [*re.findall(r"^- \*\*(.+?)\.\*\*", page, re.MULTILINE)] == [
            "Idea",
            "They ask",
            "They stick",
            "On a GPU",
        ]
