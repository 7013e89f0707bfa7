"""`check all`: a class in one run, several at once; a table, a summary of hints, equal answers."""

import csv
import json
import os
import textwrap
import time
from pathlib import Path

import nbformat
import pytest

from dlojz_tp.cards.verdict import Verdict
from dlojz_tp.grading import alike, command, lanes, slicing, whole_class
from dlojz_tp.works import source
from tests.test_grading import RIGHT, check

WORK = "00_welcome"
OPENS = f"from dlojz_tp import course\ntp = course.open('{WORK}')"


def hand_in(folder, *cells, name=f"{WORK}.ipynb"):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (OPENS, *cells)])
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, folder / name)
    return folder / name


def test_a_class_in_one_run(tmp_path):
    head, body = RIGHT.split("def distributed_sum")
    hand_in(tmp_path / "ada", head, "def distributed_sum" + body)
    hand_in(tmp_path / "bob", head.replace("cuda =", "# mine\n    c =").replace("if cuda", "if c"), "tp.catch_up(2)")
    hand_in(tmp_path / "cyd", head.replace("len(os.sched_getaffinity(0))", "os.cpu_count()"))
    hand_in(tmp_path / "cyd", "def f(:", name="notes.ipynb")
    (tmp_path / "cyd" / "other.ipynb").write_text('{"cells": []}')
    (tmp_path / "ada" / "03.ipynb").write_bytes((source.NOTEBOOKS / "03_tensor_cores_channels_last.ipynb").read_bytes())
    table = tmp_path / "grades.csv"
    status, out, err = check("all", tmp_path, "--csv", table, "--jobs", "2", timeout=280)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    words = {(r["trainee"], r["file"].rpartition("/")[2][:5], r["balise"]): r["verdict"] for r in rows}
    assert [words[who, "00_we", n] for who in ("ada", "bob", "cyd") for n in "12"] == [
        "pass", "pass", "by catch_up", "by catch_up", "fail", "not done"
    ]  # fmt: skip
    assert [words["ada", "03.ip", str(n)] for n in range(1, 7)] == ["not done"] * 6
    assert status == 1 and not err and "5 notebooks in" in out
    assert "     2            0       0         6  ada" in out and "       1  00.1" in out


def judge(say, name, jobs):
    """In a child: says how many children there have been by then, once there are two."""
    begun = Path(jobs[0][0]).parent
    (begun / f"{os.getpid()}").touch()
    until = time.monotonic() + 100
    while len(list(begun.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    for _, number in jobs:
        say({"balise": number, "title": f"{len(list(begun.iterdir()))} of {name}", "verdict": "pass"})


def test_lanes_run_at_once_and_keep_the_order_of_each(tmp_path):
    work = source.find(WORK)
    tasks = [(work, [(tmp_path / f"{k}", 1), (tmp_path / f"{k}", 2)]) for k in range(2)]
    found = [(job[0].name, v.balise, v.title) for _, job, v in lanes.verdicts(judge, tasks, 2)]
    assert sorted(found) == [(k, n, f"2 of {WORK}") for k in "01" for n in (1, 2)]
    for k in "01":
        assert [n for name, n, _ in found if name == k] == [1, 2]


def marked(code, number=1):
    work = source.find(WORK)
    return alike.mark(slicing._parse("made", textwrap.dedent(code)), work, number)[0]


SUM = """
    import torch.distributed as dist
    def distributed_sum(values):
        rank, size = dist.get_rank(), dist.get_world_size()
        part = [v for v in values[rank::size]]
        for k, one in enumerate(part):
            if k % 2:
                part[k] = scaled(one, by=2.0)
        total = Adder(part).total()
        dist.all_reduce(total)
        return total
    def scaled(value, by):
        return value * by
    class Adder:
        def __init__(self, parts):
            self.parts = parts
        def total(self):
            return sum(self.parts)
"""
RENAMED = '''
    import torch.distributed as dist
    def distributed_sum(values):
        """My own words."""
        r, n = (dist.get_rank(),
                dist.get_world_size())   # who am I
        mine: list = [x for x in values[r::n]]
        for i, each in enumerate(mine):
            if i % 2: mine[i] = larger(each, factor=2.0)
        s = Gather(mine).whole()
        dist.all_reduce(s); return s
    def larger(number: float, factor: float) -> float:
        return number * factor
    class Gather:
        "Adds up"
        def __init__(me, ps): me.ps = ps
        def whole(me): return sum(me.ps)
'''


def test_names_comments_and_layout_make_no_difference():
    assert marked(SUM, 2) == marked(RENAMED, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [("rank::size", "size::rank"), ("k % 2", "k % 3"), ("value * by", "by * value"), ("total)", "part)"),
     ("sum(", "max("), ("dist.get_rank()", "dist.get_node()"), ("return total", "return part")],
)  # fmt: skip
def test_what_is_done_makes_a_difference(old, new):
    assert old in SUM and marked(SUM, 2) != marked(SUM.replace(old, new), 2)


def test_the_courses_own_lines_are_no_ones_answer():
    given = textwrap.dedent(SUM) + "\nFULL = scale() == 'full'\n"
    own = slicing._parse("made", given.replace("rank, size =", "FULL\n    rank, size ="))
    without = slicing._parse("made", textwrap.dedent(SUM).replace("rank, size =", "FULL\n    rank, size ="))
    work = source.find(WORK)
    assert 'FULL = scale() == "full"' in "".join(cell.text for cell in work.cells)
    assert alike.mark(own, work, 2) == alike.mark(without, work, 2)


def test_groups_leave_short_answers_out():
    marks = {("ada", WORK, 1): ("a", 200), ("bob", WORK, 1): ("a", 200), ("cyd", WORK, 1): ("b", 200)}
    marks |= {(who, WORK, 2): ("c", alike.SMALL - 1) for who in ("ada", "bob")}
    assert alike.groups(marks) == [{"work": WORK, "balise": 1, "nodes": 200, "trainees": ["ada", "bob"]}]


def graded(monkeypatch, tmp_path, *words):
    """A run in which ada and bob fail and pass as told, without judging."""

    def grade(_judge, works, _at_once):
        for (path, name), said in zip(works.items(), words, strict=True):
            work = source.find(name)
            yield (
                path,
                work,
                [
                    Verdict(n, b.title, word, slug="a-slug" * (word == "fail"), hint="Look again.\nMore.")
                    for (n, b), word in zip(work.balises.items(), said, strict=True)
                ],
            )

    monkeypatch.setattr(whole_class, "grade", grade)
    for who in ("ada", "bob"):
        hand_in(tmp_path / who, RIGHT)


def test_json_has_verdicts_hints_and_equal_answers(tmp_path, monkeypatch, capsys):
    graded(monkeypatch, tmp_path, ("pass", "fail"), ("pass", "fail"))
    monkeypatch.setattr(alike, "SMALL", 20)
    assert command.main(["all", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["trainee"] for row in found["verdicts"]] == ["ada", "ada", "bob", "bob"]
    assert found["hints"] == [
        {"work": WORK, "balise": 2, "hint": "a-slug", "trainees": 2, "text": "Look again.\nMore."}
    ]
    assert [(one["balise"], one["trainees"]) for one in found["equal"]] == [(2, ["ada", "bob"]), (1, ["ada", "bob"])]
    assert command.main(["all", str(tmp_path)]) == 1
    assert "ada and bob: 2 equal answers" in capsys.readouterr().out


def test_a_table_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    graded(monkeypatch, tmp_path, ("pass", "pass"), ("pass", "pass"))
    assert command.main(["all", str(tmp_path), "--csv", str(tmp_path / "none" / "grades.csv")]) == 2
    out, err = capsys.readouterr()
    assert "grades.csv cannot be written" in err and not out, "it is told before anything is judged"
    (tmp_path / "grades.csv").mkdir()
    assert command.main(["all", str(tmp_path), "--csv", str(tmp_path / "grades.csv")]) == 2
    out, err = capsys.readouterr()
    assert "grades.csv cannot be written: Is a directory" in err and "2 notebooks in" in out


@pytest.mark.parametrize(
    ("words", "status"), [("pass", 0), ("by catch_up", 1), ("not done", 1), ("could not judge", 3)]
)
def test_exit_statuses(tmp_path, monkeypatch, capsys, words, status):
    graded(monkeypatch, tmp_path, ("pass", words), ("pass", "pass"))
    assert command.main(["all", str(tmp_path)]) == status


def test_every_notebook_of_the_course_is_known_by_what_it_opens():
    for folder in (source.NOTEBOOKS, source.SOLUTIONS):
        works, problems = whole_class.found([folder])
        assert {path.stem: name for path, name in works.items()} == {n: n for n in source.names()} and not problems
    for name in source.names():
        assert slicing.opened(slicing.statements(source.NOTEBOOKS / f"{name}.ipynb")[0]) == name


def test_whose_a_file_is(tmp_path):
    def names(*paths):
        return list(whole_class.trainees({tmp_path / path: WORK for path in paths}).values())

    assert names("ada/a.ipynb", "bob/x/b.ipynb") == ["ada", "bob"]
    assert names("ada/dlojz-tp/a.ipynb", "bob/dlojz-tp/a.ipynb") == ["ada", "bob"]
    assert names("00_ada.ipynb", "00_bob.ipynb") == ["00_ada", "00_bob"]
    assert names("ada/a.ipynb") == ["ada"]


def test_a_file_name_is_no_formula(tmp_path):
    row = dict.fromkeys(whole_class.COLUMNS, "x") | {"trainee": "=cmd()", "balise": 1}
    assert "'=cmd()" in whole_class.as_csv([row])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "no notebook in this folder"),
        (["{tmp}/none.py"], "cannot be read"),
        (["{tmp}/x.py"], "no practical work"),
    ],
)
def test_what_cannot_be_graded_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "x.py").write_text("x = 1")
    assert command.main(["all", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["all", "x", "--balise", "1"], ["00", "x", "--jobs", "2"], ["all", "x", "--jobs", "0"]]
)
def test_options_that_do_not_fit(arguments):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
