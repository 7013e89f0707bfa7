"""Verdicts that were given are not forgotten."""

import errno
import multiprocessing
import os
import socket
import time
from pathlib import Path

import pytest

from dlojz_tp import guesses, progress
from dlojz_tp.classroom import drop
from dlojz_tp.works import state, whole_file


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(progress, "_here", {})
    monkeypatch.setattr(progress, "_said", set())


def write(first, count):
    for number in range(first, first + count):
        progress.record("w", number, "pass")


def test_two_processes_lose_nothing():
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(first, 200)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(progress.load("w")) == 400


@pytest.mark.parametrize("text", ["{broken", "[1, 2]", "[" * 100_000, '{"version": 7, "balises": []}'])
def test_a_strange_file_is_kept_beside(text, capsys):
    state.folder().mkdir(parents=True)
    (state.folder() / "w.json").write_text(text)
    assert progress.load("w") == {}
    progress.record("w", 1, "pass")
    assert progress.load("w") == {1: "pass"} and (state.folder() / "w.json.kept-1").read_text() == text
    assert "kept as w.json.kept-1" in capsys.readouterr().err


def sparse(path):
    path.touch()
    os.truncate(path, 12 << 30)


ODD = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "a file of 12 GB": sparse,
}


@pytest.mark.parametrize("put", ODD.values(), ids=ODD)
def test_what_is_no_file_of_verdicts_holds_nobody_and_is_kept_beside(put, capsys):
    state.folder().mkdir(parents=True)
    put(state.folder() / "w.json")
    start = time.monotonic()
    assert progress.load("w") == {}
    progress.record("w", 1, "pass")
    assert time.monotonic() - start < 3
    assert progress.load("w") == {1: "pass"} and (state.folder() / "w.json").is_file()
    assert os.path.lexists(state.folder() / "w.json.kept-1") and "kept as w.json.kept-1" in capsys.readouterr().err


@pytest.mark.parametrize("put", ODD.values(), ids=ODD)
def test_guesses_and_the_folder_of_a_class_are_read_no_other_way(put):
    kept = state.folder() / drop.KEPT
    (state.folder() / guesses.FOLDER).mkdir(parents=True)
    put(kept)
    put(state.folder() / guesses.FOLDER / "w.json")
    assert drop._names(kept) == {} and guesses.load("w") == {}


@pytest.mark.parametrize("name", ["a pipe", "a folder", "a link to a device"])
def test_what_stands_in_the_place_of_the_lock_keeps_no_verdict_back(name):
    state.folder().mkdir(parents=True)
    ODD[name](state.folder() / ".w.lock")
    write(1, 2)
    assert progress.load("w") == {1: "pass", 2: "pass"} and progress._here == {}


def test_a_file_that_cannot_be_read_just_now_is_not_replaced(monkeypatch, capsys):
    progress.record("w", 1, "pass")
    with monkeypatch.context() as stale:
        stale.setattr(whole_file, "read", lambda _: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
        progress.record("w", 2, "pass")
        assert progress.load("w") == {2: "pass"} and "Stale file handle" in capsys.readouterr().err
    progress.record("w", 3, "pass")
    assert progress.load("w") == {1: "pass", 2: "pass", 3: "pass"}
    assert not list(state.folder().glob("*.kept-*"))


def test_a_full_disk_is_said_once_and_leaves_no_litter(monkeypatch, capsys):
    progress.record("w", 1, "pass")

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(whole_file.os, "fsync", full)
    progress.record("w", 2, "pass")
    progress.record("w", 3, "fail")
    assert progress.load("w") == {1: "pass", 2: "pass", 3: "fail"}
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert {path.name for path in state.folder().iterdir()} == {"w.json", ".w.lock"}
