"""The board of a class: what verdicts say of it, its page, its table."""

import asyncio
import csv
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from dlojz_tp import progress
from dlojz_tp.cards.verdict import BROKEN
from dlojz_tp.classroom import command, desk, drop, pace, reading, telling
from dlojz_tp.classroom.reading import Told
from dlojz_tp.works import source

WORK = "00_welcome"
NOW = 1_800_000_000.0


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A class folder, named in the environment; with a trainee's state beside it."""
    folder = tmp_path / "class"
    drop.make(folder)
    monkeypatch.setenv(drop.VARIABLE, str(folder))
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("DLOJZ_STRICT")  # wrong answers are no errors here
    monkeypatch.setattr(telling, "_tellers", {})
    monkeypatch.setattr(telling, "_said", set())
    return folder


def written(shared):
    for teller in telling._tellers.values():
        assert teller._tried.wait(20)
    return [told for news in reading.Reader(shared).news().values() for told in news]


def trainee(*told, uid=1):
    """told: (minutes before now, balise, word, hint)."""
    one = desk.Trainee(uid)
    one.hear([Told(WORK, n, word, hint, 1, NOW - 60 * minutes) for minutes, n, word, hint in told])
    return one


def test_each_verdict_is_one_file_without_code(shared, capsys):
    from dlojz_tp import course

    tp = course.open(WORK, {})
    tp.check(1, lambda: {"device": "secret words"})
    tp.check(1, lambda: {"device": "secret words"})
    tp.show(1, lambda: 0)
    told = written(shared)
    assert [(t.work, t.number, t.word, t.attempts) for t in told] == [
        (WORK, 0, "opened", 0), (WORK, 1, "fail", 1), (WORK, 1, "fail", 2),
    ]  # fmt: skip
    (folder,) = shared.iterdir()
    texts = [path.read_text() for path in folder.iterdir()]
    assert len(texts) == 3 and not any("secret" in text or "lambda" in text for text in texts)
    assert {frozenset(json.loads(text)) for text in texts} == {
        frozenset({"work", "balise", "verdict", "hint", "attempts", "time"})
    }
    assert desk.hint_text(WORK, 1, told[1].hint)
    assert not capsys.readouterr().err


def test_a_file_that_cannot_be_read_now_is_read_the_next_time(shared, monkeypatch):
    from dlojz_tp import course

    course.open(WORK, {})
    written(shared)
    reader, opened = reading.Reader(shared), reading._opened

    def failing(path, flags, within=None):
        if within is not None:
            raise OSError(errno.EIO, "input/output error")
        return opened(path, flags, within)

    monkeypatch.setattr(reading, "_opened", failing)
    assert not any(reader.news().values()) and not reader.aside
    monkeypatch.undo()
    assert [told.word for news in reader.news().values() for told in news] == ["opened"]


def test_without_the_variable_nothing_is_told(shared, monkeypatch):
    from dlojz_tp import course

    monkeypatch.delenv(drop.VARIABLE)
    course.open(WORK, {}).check(1, lambda: 0)
    assert not list(shared.iterdir()) and not telling._tellers


def test_another_kernel_goes_on_counting_in_the_same_folder(shared, monkeypatch):
    telling.tell(WORK, 1, "fail", "a")
    written(shared)
    monkeypatch.setattr(telling, "_tellers", {})
    telling.tell(WORK, 1, "pass")
    assert sorted(told.attempts for told in written(shared)) == [1, 2] and len(list(shared.iterdir())) == 1


def test_files_are_open_to_the_instructor_whatever_the_umask(shared):
    before = os.umask(0o077)
    try:
        telling.tell(WORK, 1, "fail", "a")
        written(shared)
    finally:
        os.umask(before)
    (folder,) = shared.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o755 and {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o644}
    assert (telling.drop.state.folder() / drop.KEPT).stat().st_mode & 0o777 == 0o600


def test_who_is_stuck_and_where():
    calm = trainee((20, 0, "opened", ""), (10, 1, "fail", "a"), (8, 1, "pass", ""), (6, 2, "fail", "b"))
    failures = trainee((9, 0, "opened", ""), (3, 1, "fail", "a"), (2, 1, "fail", "b"), (1, 1, "fail", "b"))
    minutes = trainee((30, 0, "opened", ""), (17, 1, "pass", ""))
    away = trainee((99, 0, "opened", ""), (70, 1, "fail", ""), (69, 1, "fail", ""), (68, 1, "fail", ""))
    done = trainee((40, 0, "opened", ""), (35, 1, "pass", ""), (30, 2, "by catch_up", ""))
    seen = [one.view(NOW) for one in (calm, failures, minutes, away, done)]
    assert [view["stuck"] for view in seen] == [[], ["3 failures"], ["17 minutes"], [], []]
    assert [view["at"] for view in seen] == [2, 1, 2, 1, None] and seen[1]["hint"] == "b"
    assert trainee((20, 0, "opened", "")).view(NOW)["stuck"] == ["20 minutes"]


def test_all_cells_at_once_take_no_minutes_from_the_balise_worked_at():
    one = trainee(
        (30, 0, "opened", ""), (30, 1, "not done", ""), (30, 2, "not done", ""),
        (20, 1, "pass", ""), (20, 2, "not done", ""), (13, 1, "pass", ""), (13, 2, "fail", "x"), (8, 2, "pass", ""),
        (1, 1, "pass", ""), (1, 2, "pass", ""),
    )  # fmt: skip
    assert [one.rows[WORK, n].seconds / 60 for n in (1, 2)] == pytest.approx([10, 12])


def test_a_night_counts_as_a_pause_and_late_files_find_their_place():
    whole = [(900, 0, "opened", ""), (890, 1, "fail", "x"), (5, 1, "pass", "")]
    one = trainee(whole[0], whole[2])
    one.hear([Told(WORK, 1, "fail", "x", 1, NOW - 60 * 890)])
    assert (
        one.rows == trainee(*whole).rows
        and one.rows[WORK, 1].attempts == 2
        and one.rows[WORK, 1].seconds / 60 == pytest.approx(10 + desk.PAUSE)
    )


def test_the_view_of_a_class():
    one = trainee((20, 1, "fail", "a"), (18, 1, "fail", "a"), (10, 1, "pass", ""), uid=60_001)
    two = trainee((20, 0, "opened", ""), (18, 1, "fail", "a"), (16, 1, "pass", ""), (2, 2, "fail", "b"), uid=60_002)
    view = desk.class_view([one, two], NOW)
    (work,) = view["works"]
    assert [b["passed"] for b in work["balises"]] == [2, 0] and work["balises"][0]["median"] == (10 + 4) / 2
    assert [(h["hint"], h["trainees"], h["times"], h["now"]) for h in view["hints"]] == [("a", 2, 3, 0), ("b", 1, 1, 1)]
    rows = list(csv.DictReader(io.StringIO(desk.table([one, two]))))
    assert [(row["balise"], row["verdict"]) for row in rows] == [("1", "pass"), ("1", "pass"), ("2", "fail")]


def test_stated_minutes_and_hints_are_those_of_the_course():
    work, seen = source.find(WORK), desk._work(WORK, [])
    assert seen["stated"] == work.minutes > 0
    assert [balise["stated"] for balise in seen["balises"]] == [balise.minutes for balise in work.balises.values()]
    name = next(iter(desk._recorded("23_inference", 1)))
    assert len(desk.hint_text("23_inference", 1, name)) > 20 and desk.hint_text(WORK, 1, "none") == ""
    assert "return" in desk.hint_text(WORK, 1, "nothing-returned")
    assert {"model-moved", "raised"} <= desk._in_code("gpu_acceleration").keys()


def test_minutes_of_a_class_beside_those_that_are_stated(tmp_path):
    def of(many):
        trainees = [trainee((20, 0, "opened", ""), (8, 1, "pass", ""), uid=60_000 + i) for i in range(many)]
        return pace.rows(desk.class_view(trainees, NOW))

    stated = source.find(WORK).balises[1].minutes
    assert of(3) == [(WORK, 1, 3, stated, 12.0, 12 / stated)], "nobody has passed the second"
    page = tmp_path / "docs" / "minutes.md"
    assert "nothing is written" in pace.keep(of(7), "2026-01-31", page) and "is not there" in pace.keep(of(8), "", page)
    page.parent.mkdir()
    assert "1 balises" in pace.keep(of(8), "2026-01-31", page)
    assert f"| {WORK} | 1 | 8 | {stated} | 12.0 | {12 / stated:.2f} |" in page.read_text()
    assert pace.text(of(1)).splitlines()[1].split()[:3] == [WORK, "1", "1"] and len(pace.text([]).splitlines()) == 1


def test_the_command_prints_minutes_and_serves_nothing(shared, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "MEASURED", tmp_path / "minutes.md")
    assert command.main([str(shared), "--minutes"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [*pace.HEAD] and "nothing is written" in said.err


def answer(address):
    with urllib.request.urlopen(address, timeout=20) as got:
        return got.status, got.headers, got.read().decode()


@pytest.mark.usefixtures("interruptible")
def test_the_page_and_its_table(shared):
    telling.tell(WORK, 1, "fail", "a")
    written(shared)
    words = [sys.executable, "-m", "dlojz_tp", "class", str(shared)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=source.ROOT)
    try:
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\S+/", line)))
        status, headers, page = answer(address)
        assert status == 200 and "Class board" in page and "default-src 'none'" in headers["Content-Security-Policy"]
        state = json.loads(answer(address + "state.json")[2])
        assert state["trainees"][0]["cells"] == {WORK: {"1": ["fail", 1, 1, 0.0, "a"]}} and state["warnings"] == []
        assert f",{WORK},1," in answer(address + "class.csv")[2]
        root, token, _ = address.rsplit("/", 2)
        other = ("y" if token[0] == "x" else "x") + token[1:]
        for wrong in ("/", "/state.json", f"/{other}/state.json", f"/{token[:-1]}/state.json"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                answer(root + wrong)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            answer(address + "../../etc/passwd")
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and not err


def test_the_page_names_only_what_there_is():
    html, script = ((command.PAGE / name).read_text(encoding="utf-8") for name in ("board.html", "board.js"))
    asked = set(re.findall(r'\$\("(\w+)"\)', script))
    assert asked <= set(re.findall(r'id="([\w-]+)"', html)) and "innerHTML" not in script
    words = {*progress.WORDS, BROKEN}
    assert all(f'"{word}":' in script or f" {word}:" in script for word in words)


def test_a_clock_that_is_set_back_does_not_stop_the_page(shared):
    board = command.Board(shared)
    board.read()
    board._read_at += 3600
    asyncio.run(board.view())
    assert board._read_at <= time.time()


def test_a_folder_that_stops_answering_leaves_the_page_with_a_warning(shared, monkeypatch):
    board = command.Board(shared)
    board.read()
    monkeypatch.setattr(command, "FRESH", 0)
    monkeypatch.setattr(command, "PATIENCE", 0.1)
    board._read_at -= 60
    shared.chmod(0)
    shared.rename(shared.with_name("gone"))
    view = asyncio.run(board.view())
    assert "No such file" in view["warnings"][0] and "60 s old" in view["warnings"][1] and view["trainees"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["{tmp}/none"], "--make` makes it"), (["{tmp}/file"], "is not a folder"), (["{tmp}", "--make"], "not empty")],
)
def test_commands_that_cannot_be_done(tmp_path, arguments, message, capsys):
    (tmp_path / "file").write_text("")
    assert command.main([a.format(tmp=tmp_path) for a in arguments]) == 1
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_make_names_the_folders_that_keep_trainees_out(tmp_path, capsys):
    (tmp_path / "closed").mkdir(mode=0o700)
    assert command.main([str(tmp_path / "closed" / "class"), "--make"]) == 0
    out = capsys.readouterr()
    assert f"chmod o+x {tmp_path / 'closed'}" in out.err and f"export DLOJZ_CLASS={tmp_path}" in out.out
    assert (tmp_path / "closed" / "class").stat().st_mode & 0o7777 == drop.MODE
