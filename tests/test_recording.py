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


def first_code(notebook):
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


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

    def execute(notebook, **_):
        work = notebook.metadata["dlojz_tp"]["name"]
        seen.append((work, *(os.environ[name] for name in names)))
        first_code(notebook).outputs = [nbformat.v4.new_output("stream", text=work)]
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
    assert "1 × NVIDIA X" in said.out and said.err == "failed: 00_welcome\n"
    kept = {path.stem: nbformat.read(path, as_version=4) for path in tmp_path.glob("*.ipynb")}
    assert {name: first_code(notebook).outputs[0].text for name, notebook in kept.items()} == {w: w for w, *_ in seen}


def test_the_model_is_recorded_beside_what_was_measured(gpu, tmp_path, capsys, monkeypatch):
    from dlojz_tp.report import recorded
    from dlojz_tp.training import gains

    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    measured = {"device": "NVIDIA H100", "step": [0.09, 0.03]}
    model = {"card": "H100", "images": 8, "steps": ["a", "b"], "seconds": [0.1, 0.05], "loads": False}

    def execute(notebook, **_):
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
    monkeypatch.setattr(notebooks, "execute", lambda notebook, **_: None)
    assert recording.main(["--into", str(tmp_path), "00_welcome"]) == 0
    assert capsys.readouterr().err == ""


def begun(capsys):
    """The works that ran, as the lines say."""
    return [line[:2] for line in capsys.readouterr().out.splitlines() if line[:2].isdigit() and line[2] == "_"]


def test_one_gpu_leaves_out_works_over_ranks_in_one_line(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notebooks, "execute", lambda notebook, **_: None)
    assert recording.main(["--into", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("left out, they want two GPUs or more: ")]
    assert "09_ddp" in line and "12_large_models" not in line and "09_ddp: " not in said
    assert recording.main(["--into", str(tmp_path), "09_ddp"]) == 0 and begun(capsys) == ["09"]


def test_when_time_is_up_the_same_command_goes_on(gpu, tmp_path, capsys, monkeypatch):
    clock, fails = [1000.0], {"01_gpu_acceleration"}
    monkeypatch.setattr(recording.time, "monotonic", lambda: clock[0])

    def execute(notebook, timeout_func):
        assert timeout_func("") <= recording.MOST_S
        clock[0] += 100
        if notebook.metadata["dlojz_tp"]["name"] in fails:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(notebooks, "execute", execute)
    command = ["--into", str(tmp_path), "--minutes", "5.4"]
    works = [f"0{k}_" for k in range(6)]
    paths = [path for path in notebooks.chosen([]) if path.name[:3] in works]
    monkeypatch.setattr(notebooks, "chosen", lambda names: paths)
    assert recording.main(command) == 1  # one fails
    said = capsys.readouterr()
    assert "time is up; the same command goes on with 03_tensor_cores_channels_last, 04_profiler, " in said.out
    assert said.err == "failed: 01_gpu_acceleration\n"
    fails.clear()
    assert recording.main(command) == 0 and begun(capsys) == ["03", "04", "05"]
    assert recording.main(command) == 0 and begun(capsys) == ["01"]  # what failed comes last
    assert recording.main(command) == 0 and begun(capsys) == []
