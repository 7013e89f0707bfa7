"""The instructor's plans name balises that exist, their sums are right, and every work has its page."""

import re
from pathlib import Path

import pytest

from dlojz_tp import index
from dlojz_tp.works import source

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "instructor.md").read_text(encoding="utf-8")
WORKS = {name[:2]: source.find(name) for name in source.names()}

BUILDS_ON = {number: before for part in index.MAP.values() for number, before in part.items()}


@pytest.mark.parametrize("plan", re.findall(r"^## (?:Two|Four|Five) days.*?(?=^## )", TEXT, re.DOTALL | re.MULTILINE))
def test_a_plan_fits_its_days(plan):
    rows = re.findall(r"^\| (\d) \| (\d\d) \| [\d, ]+ \| (\d+) \|$", plan, re.MULTILINE)
    assert len({work for _, work, _ in rows}) == len(rows) > 5
    days = {day: sum(int(slot) for of, _, slot in rows if of == day) for day, *_ in rows}
    assert max(days.values()) <= 210, days
    hours = float(re.search(r"^## .*: ([\d.]+) hours", plan)[1])
    assert sum(days.values()) <= 60 * hours
    numbers = [work for _, work, _ in rows]
    assert len(days) < 5 or numbers[-1] == "25", "five days end with the race"
    for at, number in enumerate(numbers):
        missing = set(BUILDS_ON[number].split()) - set(numbers[:at])
        assert not missing, f"{number} builds on {missing}, which the plan does not have before it"


def test_all_plans_are_found_and_every_work_has_its_page():
    assert len(re.findall(r"^## (?:Two|Four|Five) days", TEXT, re.MULTILINE)) == 3
    assert re.findall(r"^### (\d\d) · ", TEXT, re.MULTILINE) == list(WORKS)
    for page in TEXT.split("\n### ")[1:]:
        assert [*re.findall(r"^- \*\*(.+?)\.\*\*", page, re.MULTILINE)] == [
            "Idea",
            "They ask",
            "They stick",
            "On a GPU",
        ]
