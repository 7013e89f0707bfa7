"""`check all`: a class in one run, several at once; a table, a summary of hints, equal answers."""

import csv
import json
import os
import re
import socket
import textwrap
import time
from pathlib import Path

import nbformat
import pytest

from dlojz_tp.cards.verdict import Verdict
from dlojz_tp.judging.grading import alike, command, keepers, slicing, watched, whole_class
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
    assert "     2               0            0       0         6  ada" in out and "       1  00.1" in out


def judge(name):
    """In a keeper: says how many keepers there have been by then, once there are two."""

    def one(note_kill, path, number):
        begun = Path(path).parent
        (begun / f"{os.getppid()}").touch()
        until = time.monotonic() + 100
        while len(list(begun.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return {"balise": number, "title": f"{len(list(begun.iterdir()))} of {name}", "verdict": "pass"}

    return one


def test_lanes_run_at_once_and_keep_the_order_of_each(tmp_path):
    work = source.find(WORK)
    tasks = [(work, [(tmp_path / f"{k}", 1), (tmp_path / f"{k}", 2)]) for k in range(2)]
    found = [(job[0].name, v.balise, v.title) for _, job, v in keepers.verdicts(judge, tasks, 2)]
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
        return list(whole_class.trainees({tmp_path / path: WORK for path in paths})[0].values())

    assert names("ada/a.ipynb", "bob/x/b.ipynb") == ["ada", "bob"]
    assert names("ada/dlojz-tp/a.ipynb", "bob/dlojz-tp/a.ipynb") == ["ada", "bob"]
    assert names("00_ada.ipynb", "00_bob.ipynb") == ["00_ada", "00_bob"]
    assert names("ada/a.ipynb") == ["ada"]


LOADER = "05_dataloader"
NUMBERS = {"00": WORK, "05": LOADER}


def whose(tmp_path, *paths, named=None):
    """The trainees of files, each of the work whose number comes last in its path; and the rule."""
    works = {tmp_path / path: NUMBERS[re.findall("00|05", path)[-1]] for path in paths}
    found, rule = whole_class.trainees(works, named and re.compile(named))
    return [found[path] for path in works], rule


@pytest.mark.parametrize(
    ("rule", "paths", "names"),
    [
        ("folders of the works", ["00_welcome/a.ipynb", "00_welcome/b.ipynb", "05_dataloader/a.ipynb"], "a b a"),
        ("folders of the works", ["TP00/ada/x.ipynb", "TP00/bob/x.ipynb", "TP05/ada/x.ipynb"], "ada bob ada"),
        ("all of one", ["ada/00_welcome/00_welcome.ipynb", "ada/05/05_dataloader.ipynb"], "ada ada"),
        ("nbgrader", ["submitted/a/ps1/00.ipynb", "submitted/b/ps1/00.ipynb", "submitted/a/ps2/05.ipynb"], "a b a"),
        ("nbgrader", ["submitted/ada/00_welcome/00_welcome.ipynb"], "ada"),
        ("first folder", ["submitted/2026/ada/00.ipynb", "submitted/2026/bob/00.ipynb"], "ada bob"),
        ("Moodle", ["Ada L_1_assignsubmission_file_/00.ipynb", "É B_7_assignsubmission_file/x/00.ipynb"], "Ada L,É B"),
        ("Moodle", ["Ada_1_assignsubmission_file_/00.ipynb", "Ada_2_assignsubmission_file_/00.ipynb"], "Ada 1,Ada 2"),
        ("Canvas", ["lada_12_345_00_welcome.ipynb", "b_LATE_1_34_00_x-1.ipynb", "b_1_35_05.ipynb"], "lada b b"),
        ("each file", ["ada-00.ipynb", "bob-00.ipynb"], "ada-00 bob-00"),
        ("first folder", ["ada/00.ipynb", "ada/00 copy.ipynb", "bob/00.ipynb"], "ada ada bob"),
        ("first folder", ["ada/00_welcome.ipynb"], "ada"),
    ],
)  # fmt: skip
def test_layouts_of_a_class(tmp_path, rule, paths, names):
    found, said = whose(tmp_path / "class", *(path for path in paths))
    assert found == names.split("," if "," in names else " ") and rule in said


@pytest.mark.parametrize(
    "paths",
    [
        ["week1/ada-00.ipynb", "week1/bob-00.ipynb", "week2/ada-05.ipynb", "week2/bob-05.ipynb"],
        ["monday/ada/00.ipynb", "monday/bob/00.ipynb", "tuesday/cyd/00.ipynb", "tuesday/dan/00.ipynb"],
        ["ada_00.ipynb", "bob_00.ipynb", "ada_05.ipynb"],
    ],
)
def test_where_it_cannot_be_told_whose_a_file_is_nothing_is_guessed(tmp_path, paths):
    with pytest.raises(whole_class.Unclear, match="--trainee REGEX"):
        whose(tmp_path, *paths)
    found, _ = whose(tmp_path, *paths, named=r".*[\d/](ada|bob|cyd|dan)")
    assert len(set(found)) > 1


def test_the_trainee_is_what_a_regular_expression_finds(tmp_path, monkeypatch, capsys):
    assert whose(tmp_path, "a/00-ada.ipynb", "b/00-ada.ipynb", named=r"-(\w+)\.ipynb") == (
        ["ada", "ada"], r"--trainee -(\w+)\.ipynb"
    )  # fmt: skip
    graded(monkeypatch, tmp_path, ("pass", "pass"), ("pass", "pass"))
    assert command.main(["all", str(tmp_path), "--trainee", "/(ada)/"]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"--trainee finds nobody in {tmp_path / 'bob'}" in err and not out
    assert command.main(["all", str(tmp_path), "--trainee", "/(ada|bob)/"]) == 0
    assert capsys.readouterr().out.startswith("2 trainees: --trainee /(ada|bob)/\n")
    assert command.main(["all", str(tmp_path / "ada"), str(tmp_path / "bob")]) == 0
    assert capsys.readouterr().out.startswith("2 trainees: the first folder in which the files differ\n")
    for wrong in ("ada", "(ada"):
        with pytest.raises(SystemExit, match="2"):
            command.main(["all", str(tmp_path), "--trainee", wrong])


def test_a_link_to_another_place_makes_nobody_somebody_else(tmp_path):
    hand_in(tmp_path / "class" / "ada", RIGHT)
    hand_in(tmp_path / "elsewhere", RIGHT)
    (tmp_path / "class" / "bob").mkdir()
    (tmp_path / "class" / "bob" / "00.ipynb").symlink_to(tmp_path / "elsewhere" / f"{WORK}.ipynb")
    works, _ = whole_class.found([tmp_path / "class"])
    assert list(whole_class.trainees(works)[0].values()) == ["ada", "bob"]


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_a_file_name_is_no_formula(first):
    row = dict.fromkeys(whole_class.COLUMNS, "x") | {"trainee": f"{first}cmd()", "balise": 1}
    assert f"'{first}cmd()" in whole_class.as_csv([row])


def test_odd_files_are_a_line_each(tmp_path, capsys):
    good = hand_in(tmp_path / "good", RIGHT)
    odd = tmp_path / "odd"
    odd.mkdir()
    os.mkfifo(odd / "pipe.ipynb")
    (odd / "zero.ipynb").symlink_to("/dev/zero")
    with (odd / "sparse.ipynb").open("wb") as file:
        file.truncate(12_000_000_000)
    (odd / "loop.ipynb").symlink_to("loop.ipynb")
    (odd / "gone.ipynb").symlink_to("none")
    (odd / "many.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "x = 1\n" * 1_000_000}]}))
    (odd / "folder.ipynb").mkdir()
    (odd / "folder.ipynb" / "x.ipynb").write_text("{}")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(odd)  # the address of a socket is short
        listening.bind("socket.ipynb")
        os.chdir(here)
    works, problems = whole_class.found([tmp_path])
    why = {Path(line.partition(": ")[0]).stem: line.partition(": ")[2] for line in problems}
    assert list(works) == [good]
    assert why.pop("loop").startswith("cannot be read") and why.pop("socket").startswith("cannot be read")
    assert why == {
        "pipe": "is not a file", "zero": "is not a file", "sparse": "is too large (12000 MB)",
        "gone": "cannot be read (No such file or directory)",
    }  # fmt: skip
    with pytest.raises(slicing.Unreadable, match=r"too large \(6 MB of code\)"):
        slicing.statements(odd / "many.ipynb")
    assert command.main([WORK, str(odd / "pipe.ipynb"), str(odd / "sparse.ipynb")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


ESCAPES = "a\x1b[2Jb\x9b1mc\u202ed\re\udcff"


def test_odd_names_reach_no_terminal_and_no_other_line(tmp_path, monkeypatch, capsys):
    graded(monkeypatch, tmp_path, ("pass", "fail"), ("pass", "pass"))
    (tmp_path / "ada").rename(tmp_path / f"ada\n{ESCAPES}")
    (tmp_path / f"x\n{ESCAPES}.ipynb").write_bytes(b"\xff")
    table = tmp_path / "grades.csv"
    assert command.main(["all", str(tmp_path), "--csv", str(table)]) == 2
    out, err = capsys.readouterr()
    told = "\\u000aa\\u001b[2Jb\\u009b1mc\\u202ed\\u000de\\udcff"
    assert err.count("\n") == 1 and f"x{told}.ipynb: is not a text" in err
    assert f"ada{told}/{WORK}.ipynb: 1 of 2" in out
    assert re.sub("[\n]", "", out).isprintable()
    with table.open(newline="") as file:
        assert {row["trainee"] for row in csv.DictReader(file)} == {"bob", f"ada\n{ESCAPES[:-1]}\\udcff"}
    assert command.main(["all", str(tmp_path), "--json"]) == 2
    out = capsys.readouterr().out
    assert re.sub("[\n]", "", out).isprintable()
    assert {row["trainee"] for row in json.loads(out)["verdicts"]} == {"bob", f"ada\n{ESCAPES}"}


def test_what_an_answer_says_moves_no_cursor():
    said = Verdict(1, "T", "fail", hint=f"Your code raised ValueError: {ESCAPES}\nMore")
    shown = command.table([said])
    assert "a\\u001b[2Jb\\u009b1mc\\u202ed\\u000d" in shown and all(map(str.isprintable, shown.split("\n")))


def test_what_an_answer_writes_to_its_errors_moves_no_cursor(capsys):
    reads, writes = os.pipe()
    os.write(writes, b"a\x1b[2Jb\n")
    os.close(writes)
    watched._echo(os.fdopen(reads, "rb"))
    assert capsys.readouterr().err == "a\\u001b[2Jb\n"


def test_a_thousand_notebooks_and_twenty_thousand_folders_are_found_at_once(tmp_path):
    text = hand_in(tmp_path / "class" / "0", RIGHT).read_text()
    for k in range(1, 1000):
        (tmp_path / "class" / f"{k}").mkdir()
        (tmp_path / "class" / f"{k}" / "00.ipynb").write_text(text)
    for k in range(20_000):
        (tmp_path / "class" / "1" / f"{k}").mkdir()
    start = time.process_time()
    works, problems = whole_class.found([tmp_path / "class"])
    assert len(set(whole_class.trainees(works)[0].values())) == 1000 and not problems
    assert time.process_time() - start < 20


def interrupted_after(monkeypatch, count, error=KeyboardInterrupt):
    """A run that passes all balises of `count` files and is then interrupted (None: never). Gives whose they are."""
    judged = []

    def grade(_judge, works, _at_once):
        for path, name in works.items():
            if len(judged) == count:
                raise error
            judged.append(path.parent.name)
            work = source.find(name)
            yield path, work, [Verdict(n, b.title, "pass") for n, b in work.balises.items()]

    monkeypatch.setattr(whole_class, "grade", grade)
    return judged


def test_an_interrupted_run_goes_on_from_its_table(tmp_path, monkeypatch, capsys):
    folder, table = tmp_path / "class", tmp_path / "grades.csv"
    for who in ("=ada", "bob", "cyd"):
        hand_in(folder / who, RIGHT)
    run = ["all", str(folder), "--csv", str(table), "--resume"]
    interrupted_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        command.main(run)
    err = capsys.readouterr().err
    assert "2 of 3 notebooks are judged" in err and f"--resume goes on from {table}" in err
    hand_in(folder / "bob", RIGHT, "other = 1")
    judged = interrupted_after(monkeypatch, None)
    assert command.main(run) == 0
    out = capsys.readouterr().out
    assert judged == ["bob", "cyd"] and f"kept from {table}: 1; to judge: 2" in out
    rows = list(csv.DictReader(table.open()))
    assert [(row["trainee"], row["balise"]) for row in rows] == [(w, n) for w in ("'=ada", "bob", "cyd") for n in "12"]
    assert "     2               0            0       0         0  =ada" in out
    judged = interrupted_after(monkeypatch, None)
    assert command.main(run) == 0 and judged == []
    again = list(csv.DictReader(table.open()))
    assert again == rows
    assert command.main(run[:-1]) == 0 and judged == ["=ada", "bob", "cyd"], "without --resume all are judged"


def test_what_is_not_kept(tmp_path, monkeypatch, capsys):
    table = tmp_path / "grades.csv"
    graded(monkeypatch, tmp_path, ("pass", "could not judge"), ("pass", "fail"))
    run = ["all", str(tmp_path / "ada"), str(tmp_path / "bob"), "--csv", str(table), "--resume"]
    assert command.main(run) == 1
    judged = interrupted_after(monkeypatch, None)
    assert command.main(run) == 1 and judged == ["ada"], "the machine broke there"
    assert "00.2 a-slug" in capsys.readouterr().out, "the hints of kept files are counted"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line for line in lines if not line.startswith("bob") or "Sum" not in line) + "\n")
    judged = interrupted_after(monkeypatch, None)
    assert command.main(run) == 0 and judged == ["bob"], "one of its rows was missing"
    for other in ("trainee;file\n", "", ",".join(whole_class.COLUMNS) + "\nx,y\n"):
        table.write_text(other)
        capsys.readouterr()
        assert command.main(run) == 2 and table.read_text() == other
        assert "is not a table that --csv has written" in capsys.readouterr().err


def test_a_file_that_changes_while_it_is_judged_is_judged_again(tmp_path, monkeypatch):
    path, table = hand_in(tmp_path / "ada", RIGHT), tmp_path / "grades.csv"
    interrupted_after(monkeypatch, None)
    grade = whole_class.grade

    def changing(*arguments):
        for found in grade(*arguments):
            path.write_text(path.read_text() + "\n")
            yield found

    monkeypatch.setattr(whole_class, "grade", changing)
    run = ["all", str(path), "--csv", str(table), "--resume"]
    assert command.main(run) == 0
    judged = interrupted_after(monkeypatch, None)
    assert command.main(run) == 0 and judged == ["ada"]


def test_a_run_that_may_be_killed_saves_on_its_way(tmp_path, monkeypatch):
    for who in ("ada", "bob"):
        hand_in(tmp_path / who, RIGHT)
    table, seen = tmp_path / "grades.csv", []
    monkeypatch.setattr(whole_class, "SAVED_EVERY", 0.0)
    interrupted_after(monkeypatch, None)
    grade = whole_class.grade

    def looking(*arguments):
        for found in grade(*arguments):
            seen.append(table.exists())
            yield found

    monkeypatch.setattr(whole_class, "grade", looking)
    assert command.main(["all", str(tmp_path), "--csv", str(table)]) == 0 and seen == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/empty"], "no notebook in this folder\n"),
        (["{tmp}/of_others"], "no notebook in this folder opens a practical work"),
        (["{tmp}/none.py"], "cannot be read"),
        (["{tmp}/x.py"], "no practical work"),
    ],
)
def test_what_cannot_be_graded_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "x.py").write_text("x = 1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "of_others").mkdir()
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "of_others" / "x.ipynb")
    assert command.main(["all", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["all", "x", "--balise", "1"],
        ["00", "x", "--jobs", "2"],
        ["all", "x", "--jobs", "0"],
        ["all", "x", "--resume"],
        ["00", "x", "--trainee", "(x)"],
    ],
)
def test_options_that_do_not_fit(arguments):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
