"""Nobody's verdicts are lost, read or forged in a class folder, and no fault of it reaches a trainee."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlojz_tp.classroom import command, drop, reading, telling
from dlojz_tp.works import source, whole_file

WORK = "00_welcome"
fork = multiprocessing.get_context("fork")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(telling, "_tellers", {})
    monkeypatch.setattr(telling, "_said", set())


@pytest.fixture
def shared(tmp_path, monkeypatch):
    folder = tmp_path / "class"
    drop.make(folder)
    monkeypatch.setenv(drop.VARIABLE, str(folder))
    return folder


def settled():
    for teller in telling._tellers.values():
        assert teller._tried.wait(20)


def seconds(verdict):
    start = time.perf_counter()
    telling.tell(WORK, 1, verdict, "a-hint")
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.rmdir(), "No such file or directory"),
        (lambda folder: (folder.rmdir(), folder.write_text("")), "it is no folder"),
        (lambda folder: folder.chmod(0o1777), "others can list it"),
        (lambda folder: folder.chmod(0o733), "others can remove"),
    ],
)
def test_a_folder_that_is_none_is_said_once_and_used_when_it_is_mended(shared, capsys, spoil, why):
    spoil(shared)
    assert max(seconds("fail") for _ in range(3)) < 2
    settled()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err and "count as before" in err
    if shared.is_file():
        shared.unlink()
    drop.make(shared)
    seconds("pass")
    settled()
    (told,) = reading.Reader(shared).news().values()
    assert [(t.word, t.attempts) for t in told] == [("fail", 1), ("fail", 2), ("fail", 3), ("pass", 4)]


def test_a_full_disk_loses_nothing_and_leaves_no_litter(shared, monkeypatch, capsys):
    seconds("fail")
    settled()
    with monkeypatch.context() as full:
        full.setattr(whole_file.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        seconds("fail")
        seconds("pass")
        settled()
        assert capsys.readouterr().err.count("No space left") == 1
    seconds("pass")
    settled()
    (folder,) = shared.iterdir()
    assert sorted(path.name.split(".")[2] for path in folder.iterdir()) == ["1", "2", "3", "4"]


def test_a_dead_folder_holds_no_trainee(shared, monkeypatch, capsys):
    dead, again = telling.threading.Event(), telling.threading.Event()
    monkeypatch.setattr(drop, "own", lambda path, own=drop.own: (dead.set(), again.wait(60), own(path))[2])
    monkeypatch.setattr(telling, "SLOW", 0.5)
    assert seconds("fail") < 2 and dead.wait(5) and not capsys.readouterr().err
    time.sleep(0.6)
    assert sum(seconds("fail") for _ in range(20)) < 10 * telling.PATIENCE  # nothing waits any more
    assert capsys.readouterr().err.count("does not answer") == 1
    again.set()
    settled()
    (told,) = reading.Reader(shared).news().values()
    assert len(told) == 21


def test_a_process_ends_in_spite_of_a_dead_folder(shared):
    code = "from dlojz_tp.classroom import drop, telling; import time; drop.own = lambda path: time.sleep(99)\n"
    code += "telling.tell('00_welcome', 1, 'pass')"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=source.ROOT)
    assert time.monotonic() - start < 30


def test_the_last_verdict_of_a_process_arrives(shared):
    code = "from dlojz_tp.classroom import telling; telling.PATIENCE, telling.LAST = 0, 50\n"
    code += "for k in range(30): telling.tell('00_welcome', 1, 'fail')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=source.ROOT)
    assert sum(map(len, reading.Reader(shared).news().values())) == 30


def write(shared, uid, count, every):
    """As this user, `count` verdicts, one each `every` seconds."""
    os.environ["DLOJZ_STATE"] = str(shared.parent / f"state-{uid}")
    if os.getuid() == 0:
        Path(os.environ["DLOJZ_STATE"]).mkdir()
        os.chown(os.environ["DLOJZ_STATE"], uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    start = time.monotonic()
    for number in range(count):
        telling.tell(WORK, 1 + number % 2, "fail", "a-hint")
        time.sleep(max(0, start + (number + 1) * every - time.monotonic()))
    settled()


def as_users(shared, function, *uids):
    """Run `function(shared, uid)` as each of these users, at once; the exit statuses."""
    for folder in (shared, *shared.parents):
        if folder != shared and not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 1)
    processes = [fork.Process(target=function, args=(shared, uid)) for uid in uids]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def test_twenty_writers_lose_nothing(shared):
    uids = range(20_001, 20_021)
    reader, found = reading.Reader(shared), []

    def some(shared, uid):
        write(shared, uid, 20, 0.05)

    processes = telling.threading.Thread(target=lambda: found.append(as_users(shared, some, *uids)))
    processes.start()
    told = {}
    while processes.is_alive():  # read while they write
        for uid, news in reader.news().items():
            told.setdefault(uid, []).extend(news)
        processes.join(0.1)
    for uid, news in reader.news().items():
        told.setdefault(uid, []).extend(news)
    assert found == [[0] * 20] and sum(map(len, told.values())) == 400 and not reader.aside
    if os.getuid() == 0:
        assert set(told) == set(uids) and {len(news) for news in told.values()} == {20}
        assert all(sorted(t.attempts for t in news if t.number == 1) == [*range(1, 11)] for news in told.values())


@as_root
def test_no_trainee_can_read_remove_or_forge_anothers(shared):
    ada, mallory = 20_001, 20_002

    def one(shared, uid):
        write(shared, uid, 1, 0)

    assert as_users(shared, one, ada) == [0]
    (folder,) = shared.iterdir()
    (file,) = folder.iterdir()

    def attack(shared, uid):
        """Even who knows the folder's name changes nothing; without it nobody finds the folder."""
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        tries = [
            lambda: list(shared.iterdir()),
            lambda: folder.rename(shared / "mine"),
            folder.rmdir,
            file.unlink,
            lambda: file.write_text("{}"),
            lambda: (folder / "more.json").write_text("{}"),
            lambda: folder.chmod(0o777),
        ]
        for k, wrong in enumerate(tries):
            try:
                wrong()
            except PermissionError:
                continue
            os._exit(10 + k)
        mine = shared / f"{ada}-of-mallory"  # in ada's name
        mine.mkdir(0o755)
        said = {"work": WORK, "balise": 1, "verdict": "pass", "hint": "", "attempts": 1, "time": 1.0}
        (mine / "00_welcome.1.1.5.json").write_text(json.dumps(said | {"trainee": "ada", "uid": ada}))
        (mine / "b.json").symlink_to(file)
        (shared / "link").symlink_to(folder)
        with contextlib.suppress(PermissionError):
            (mine / "c.json").hardlink_to(file)
        os._exit(0)

    assert as_users(shared, attack, mallory) == [0]
    reader = reading.Reader(shared)
    told = reader.news()
    assert {uid: [t.word for t in news] for uid, news in told.items()} == {ada: ["fail"], mallory: ["pass"]}
    assert set(reader.aside) <= {mallory} and reader.aside[mallory] >= 1


SAID = {"work": WORK, "balise": 1, "verdict": "pass", "hint": "", "attempts": 1, "time": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"work": "<script>"}, {"work": ["00_welcome"]}, {"work": None}, {"balise": 9}, {"balise": True},
        {"balise": 1.0},
        {"verdict": "PASS"}, {"verdict": "opened"}, {"verdict": {}}, {"hint": "=cmd()"}, {"hint": "<b>"}, {"hint": 3},
        {"hint": "x" * 99}, {"attempts": -1}, {"attempts": 10**9}, {"attempts": "1"}, {"time": "now"},
        {"time": float("nan")}, {"time": float("inf")}, {"time": -1}, {"time": 10**400},
    ],
)  # fmt: skip
def test_what_is_no_verdict_is_refused(change):
    with pytest.raises(ValueError):
        reading.understood(json.dumps(SAID | change).encode())


def test_the_same_without_a_change_is_a_verdict():
    assert reading.understood(json.dumps(SAID).encode()).word == "pass"
    ahead = reading.understood(json.dumps(SAID | {"time": time.time() + 9999}).encode())
    assert ahead.at <= time.time()


def test_odd_files_stop_nothing(shared):
    telling.tell(WORK, 1, "pass")
    settled()
    (folder,) = shared.iterdir()
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "large").write_text("9" * 2000)
    (folder / "deep").write_text("[" * 900)
    (folder / "words").write_bytes(b"caf\xe9")
    (folder / "empty").write_text("")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / ".partial").write_text("{")
    (shared / "file").write_text("x")
    os.mkfifo(shared / "pipe")
    reader = reading.Reader(shared)
    assert [len(told) for told in reader.news().values()] == [1] and reader.aside == {os.getuid(): 7}
    assert sum(map(len, reader.news().values())) == 0 and reader.aside == {os.getuid(): 7}


def test_a_flood_of_one_is_cut_and_said(shared, monkeypatch):
    monkeypatch.setattr(reading, "MOST_FILES", 5)
    monkeypatch.setattr(reading, "MOST_OF_ONE", 3)
    for folder in range(5):
        (shared / f"f{folder}").mkdir()
        for file in range(3):
            Path(shared, f"f{folder}", f"{file}").write_text(json.dumps(SAID))
    (shared / "loose").touch()
    reader = reading.Reader(shared)
    assert [len(reader.news()[os.getuid()]), len(reader.news()[os.getuid()])] == [5, 0]
    assert reader.warnings(lambda uid: "ada") == [
        "2 folders of ada are not read: one can have 3 here.",
        "ada has too many files here: 5 of them are read.",
        "1 entries of the class folder are no folders, and are left aside.",
    ]
    monkeypatch.setattr(reading, "MOST_ENTRIES", 4)
    reader.news()
    assert "more than 4 entries" in reader.warnings(str)[-1]


@as_root
def test_a_flood_of_one_hides_nobody_else(shared, capsys):
    mallory, trainees = 20_099, range(20_001, 20_031)

    def place(folder, uid, text):
        folder.mkdir(0o755)
        (folder / "00_welcome.1.1.5.json").write_text(text)
        for path in (folder / "00_welcome.1.1.5.json", folder):
            os.chown(path, uid, uid)

    for uid in trainees[:15]:
        place(shared / f"{uid}-{uid:032x}", uid, json.dumps(SAID))
    for number in range(21_000):
        os.mkdir(shared / f"{mallory}-{number}")  # noqa: PTH102
        os.chown(shared / f"{mallory}-{number}", mallory, mallory)
    for number in range(5_000):
        os.close(os.open(shared / f"x{number}", os.O_CREAT))
    crowded = shared / f"{mallory}-0"
    for number in range(reading.MOST_FILES + 1):
        os.close(os.open(crowded / f"{number}", os.O_CREAT))
    for uid in trainees[15:]:
        place(shared / f"{uid}-{uid:032x}", uid, json.dumps(SAID))
    board = command.Board(shared)
    board.read()
    assert set(board.trainees) - {mallory} == set(trainees)
    late = 20_050
    place(shared / "late", late, json.dumps(SAID))
    began = time.monotonic()
    board.read()
    assert late in board.trainees and time.monotonic() - began < command.PATIENCE
    assert {
        f"20000 files of user {mallory} are no verdicts, and are left aside.",
        f"20800 folders of user {mallory} are not read: one can have 200 here.",
        f"user {mallory} has too many files here: 20,000 of them are read.",
    } < set(board.left)
    assert command.main([str(shared), "--csv"]) == 0
    told = capsys.readouterr()
    assert told.out.count(",00_welcome,1,") == 31 and "20800 folders of user" in told.err
