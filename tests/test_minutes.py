"""Minutes that are counted, and a core that fits its time."""

import pytest

from dlojz_tp.authoring import minutes
from dlojz_tp.works import source

MADE = """# %% [markdown]
# # A work
# one two three
#
# ```bash
# # no heading
# ```

# %%
tp = course.open("09_made")
given = (
    1
)

# %% jupyter={"source_hidden": true}
draw()

# %% [markdown]
# ## Part
# four
#
# ### Balise 1 · Add · further · about 99 min
# five six
# <details><summary>Hint</summary>plus</details>

# %% tags=["balise-1"]
def add(a, b):
    # BEGIN SOLUTION
    # think
    c = a + b
    return c
    # END SOLUTION

# %%
tp.check(1, add)

# %% [markdown]
# ### And so on
# seven

# %% [markdown]
# ## The end
# eight
"""
WORKS = minutes.all_works()


def test_sections_are_counted():
    found = minutes.sections(MADE)
    counts = [(s.title, s.words, s.given, s.written, s.verdicts, s.further) for s in found]
    assert counts == [
        ("A work", 8, 3, 0, 0, False),
        ("Part", 1, 0, 0, 0, True),
        ("Balise 1 · Add", 3, 2, 2, 1, True),
        ("And so on", 1, 0, 0, 0, True),
        ("The end", 1, 0, 0, 0, False),
    ]
    assert [(s.sight, s.task) for s in found] == [(8, 0), (1, 0), (2, 2), (1, 0), (1, 0)], "a hint is folded"
    assert found[2].minutes == pytest.approx(3 / 100 + 2 / 30 + 2 + 4.5)
    assert minutes.of_work(found)[1] == pytest.approx(2 + 9 / 100 + 3 / 30)


def test_words_after_the_answer_are_no_part_of_the_task():
    more = MADE.replace("tp.check(1, add)", "tp.check(1, add)\n\n# %% [markdown]\n# See it: four more words.")
    (found,) = (s for s in minutes.sections(more) if s.balise)
    assert (found.sight, found.task) == (7, 2)


def test_ratios_are_of_the_cores_alone():
    found = minutes.sections(MADE.replace(" · further", ""))
    assert minutes.in_cores({"one": found, "two": minutes.sections(MADE)}) == pytest.approx(((13 + 9) / 2, (5 + 3) / 2))


def test_help_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(minutes, "write", pytest.fail)
    with pytest.raises(SystemExit, match="0"):
        minutes.main(["--help"])
    assert "write" in capsys.readouterr().out


def test_minutes_are_written_after_headings_and_read_from_them(tmp_path):
    text = minutes.with_minutes(MADE)
    assert minutes.with_minutes(text) == text
    changed = [line for line in text.splitlines() if line not in MADE.splitlines()]
    assert changed == ["# # A work · about 10 min, core 5", "# ### Balise 1 · Add · further · about 7 min"]
    (tmp_path / "09_made.py").write_text(text)
    work = source.read(tmp_path / "09_made.py")
    assert (work.title, work.minutes, work.core) == ("A work", 10, 5)
    assert (work.balises[1].title, work.balises[1].further, work.balises[1].minutes) == ("Add", True, 7)


@pytest.mark.parametrize("name", WORKS)
def test_the_minutes_of_a_work_are_true_and_fit(name):
    text = (source.SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    assert minutes.with_minutes(text) == text, "run: make minutes, make notebooks"
    assert any(s.balise and not s.further for s in WORKS[name])
    whole, core = minutes.of_work(WORKS[name])
    assert whole <= minutes.OF_A_WORK and core <= minutes.CORE_OF_A_WORK
    assert {s.balise: s.task for s in WORKS[name] if s.task > minutes.WORDS_OF_A_TASK} == {}


def test_the_course_is_short_to_read():
    assert sum(s.sight for found in WORKS.values() for s in found) <= minutes.WORDS_OF_ALL
    words, given = minutes.in_cores(WORKS)
    assert words <= minutes.WORDS_A_LINE and given <= minutes.GIVEN_A_LINE


def test_readme_and_plans_are_true_and_the_cores_fit():
    text, plans = (path.read_text(encoding="utf-8") for path in (minutes.README, minutes.INSTRUCTOR))
    assert minutes.readme(text, WORKS, minutes.of_plan("Two days")) == text, "run: make minutes"
    assert minutes.plans(plans, WORKS) == plans, "run: make minutes"
    assert [name for name, _ in minutes._ROW.findall(text)] == list(WORKS)
    cores = {name: minutes.of_work(found)[1] for name, found in WORKS.items()}
    for days, most in minutes.PLANS_OF_DAYS.items():
        chosen = minutes.of_plan(days)
        assert sum(cores[name] for name in cores if name[:2] in chosen) <= most
