"""Verdicts that were given are not forgotten."""

import multiprocessing
import os

import pytest

from dlojz_tp import progress
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
