"""The command that runs the solutions on a GPU and records their figures; here without a GPU."""

import os
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient.exceptions import CellExecutionError

from dlojz_tp.authoring import notebooks, recording


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")


def test_without_a_gpu_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recording.main(["--into", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "finds no GPU" in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_an_unknown_name_is_refused(capsys):
    assert recording.main(["99_nothing"]) == 2
    assert "99_nothing" in capsys.readouterr().err


def test_each_runs_at_full_size_and_one_that_fails_keeps_no_other_from_running(gpu, tmp_path, capsys, monkeypatch):
    seen, names = [], ("DLOJZ_RECORD", "DLOJZ_SCALE", "DLOJZ_STATE")
    before = {name: os.environ.get(name) for name in names}

    def execute(notebook):
        work = notebook.metadata["dlojz_tp"]["name"]
        seen.append((work, *(os.environ[name] for name in names)))
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text=work)]
        if work == "00_welcome":
            raise CellExecutionError("a long story", "ValueError", "a cell failed\nfor a reason")

    monkeypatch.setattr(notebooks, "execute", execute)
    assert recording.main(["--into", str(tmp_path), "00_welcome", "02_mixed_precision"]) == 1
    assert [work for work, *_ in seen] == ["00_welcome", "02_mixed_precision"]
    ((record, size, state),) = {tuple(rest) for _, *rest in seen}
    assert (record, size) == ("1", "full") and not Path(state).exists()
    assert {name: os.environ.get(name) for name in names} == before
    said = capsys.readouterr()
    assert "00_welcome: failed, ValueError: a cell failed, " in said.out and "02_mixed_precision: done, " in said.out
    assert "1 × NVIDIA X" in said.out and "runs on the CPU" in said.out and said.err == "failed: 00_welcome\n"
    kept = {path.stem: nbformat.read(path, as_version=4) for path in tmp_path.glob("*.ipynb")}
    assert {name: notebook.cells[1].outputs[0].text for name, notebook in kept.items()} == {w: w for w, *_ in seen}


def test_the_model_is_recorded_beside_what_was_measured(gpu, tmp_path, capsys, monkeypatch):
    from dlojz_tp.report import recorded
    from dlojz_tp.training import gains

    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    measured = {"device": "NVIDIA H100", "step": [0.09, 0.03]}
    model = {"card": "H100", "images": 8, "steps": ["a", "b"], "seconds": [0.1, 0.05], "loads": False}

    def execute(notebook):
        recorded.note("00_welcome", gains.KEY, measured)
        recorded.note_modelled("00_welcome", "H100", model)

    monkeypatch.setattr(notebooks, "execute", execute)
    monkeypatch.setattr(recorded.measure, "hardware", lambda: {"device_name": "NVIDIA H100"})
    assert recording.main(["--into", str(tmp_path), "00_welcome"]) == 0
    assert (
        "modelled, H100: 100 ms → 50.0 ms a step, × 2.00; measured 90.0 ms → 30.0 ms (-33 %" in capsys.readouterr().out
    )
    assert recorded.load("00_welcome", "modelled")["error"] == pytest.approx(-1 / 3)


def test_all_is_well(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notebooks, "execute", lambda notebook: None)
    assert recording.main(["--into", str(tmp_path), "00_welcome"]) == 0
    assert capsys.readouterr().err == ""
