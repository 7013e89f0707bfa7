"""Runs of a race that are kept: whole or not at all, read back by TensorBoard, MLflow and the table."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from dlojz_tp.measure import tracking

CONFIG = {"rate": 0.15, "batch": 32, "plan": "small first", "ema": True}
CURVE = [(1.5, 0.4), (3.0, 0.7), (4.5, 0.65)]
needs_mlflow = pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="MLflow is not installed")


@pytest.fixture(autouse=True)
def alone(request, monkeypatch):
    """Without MLflow, whose first run takes seconds, where it is not what a test is about."""
    if "mlflow" not in request.node.name:
        found = importlib.util.find_spec
        monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: name != "mlflow" and found(name))


def noted(folder, name="baseline", config=CONFIG, seconds=2.5, curve=CURVE, data_version="abc", **more):
    return tracking.note(folder, name, config, seconds, curve, data_version=data_version, **more)


def test_a_run_is_written_as_plain_json(tmp_path):
    config = CONFIG | {"batch": np.int64(32), "rate": torch.tensor(0.5)}
    place = noted(tmp_path / "runs", "my run/1", config, torch.tensor(2.5), cost={"kWh": 0.25})
    assert place.parent == tmp_path / "runs" and place.name.startswith("my-run-1-")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [place.name]

    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    run = json.loads((place / "run.json").read_text(), parse_constant=strict)
    assert (run["name"], run["seconds"], run["curve"]) == ("my run/1", 2.5, [list(pair) for pair in CURVE])
    assert run["config"] == CONFIG | {"rate": 0.5} and (run["data_version"], run["cost"]) == ("abc", {"kWh": 0.25})
    assert run["hardware"]["cpu_cores"] and run["versions"]["torch"] == str(torch.__version__)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", run["date"])


def test_a_run_that_never_reached_the_target_has_no_seconds(tmp_path):
    for seconds in (math.inf, None):
        assert json.loads((noted(tmp_path, seconds=seconds) / "run.json").read_text())["seconds"] is None


def test_tensorboard_reads_curve_and_hyperparameters(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    before = time.time()
    reached, never = noted(tmp_path), noted(tmp_path, "never", seconds=math.inf, curve=CURVE[:1])
    for place, due in ((reached, {"seconds": 2.5, "best accuracy": 0.7}), (never, {"best accuracy": 0.4})):
        events = accumulator.EventAccumulator(str(place)).Reload()
        assert set(events.Tags()["scalars"]) == {"accuracy", *due}
        curve = events.Scalars("accuracy")
        assert [event.step for event in curve] == list(range(len(curve)))
        assert [event.value for event in curve] == pytest.approx([value for _, value in CURVE[: len(curve)]])
        walls = [event.wall_time for event in curve]
        assert [wall - walls[0] for wall in walls] == pytest.approx([0, 1.5, 3][: len(curve)], abs=1e-3)
        assert before - 1 < walls[-1] < time.time() + 1  # the last evaluation is now, not so many seconds after 1970
        for name, value in due.items():
            assert events.Scalars(name)[0].value == pytest.approx(value)
        assert "_hparams_/experiment" not in events.summary_metadata  # the columns would be those of one run
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        chosen = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
        assert (chosen["rate"].number_value, chosen["plan"].string_value) == (0.15, "small first")
        assert (chosen["ema"].number_value, chosen["batch"].number_value) == (1, 32)  # PyTorch counts a boolean
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.parent != tmp_path]  # one run a folder


def test_an_empty_configuration_and_no_evaluation_are_kept(tmp_path):
    place = noted(tmp_path, config={}, seconds=math.inf, curve=[])
    assert "never" in str(tracking.table(tmp_path)) and list(place.glob("events*"))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"config": {"rate": math.nan}}, "rate"), ({"config": {"sizes": [1, 2]}}, "sizes"),
        ({"config": {"decay": None}}, "decay"),
        ({"seconds": math.nan}, "seconds"), ({"seconds": "2"}, "seconds"), ({"curve": [(1, math.nan)]}, "accuracy"),
        ({"curve": [(math.inf, 0.5)]}, "curve"), ({"cost": {"kWh": "much"}}, "kWh"),
        ({"curve": [(i, 0.123456789) for i in range(60_000)]}, "too many"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused_before_anything_is_written(tmp_path, wrong, word):
    with pytest.raises(ValueError, match=word):
        noted(tmp_path / "runs", **wrong)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_note_leaves_nothing(tmp_path, monkeypatch, stop):
    def stopped(path, text):
        (tmp_path / "half").touch()
        raise stop

    monkeypatch.setattr(tracking.Path, "write_text", stopped)
    with pytest.raises((KeyboardInterrupt, OSError)):
        noted(tmp_path / "runs")
    assert (tmp_path / "half").exists() and not list((tmp_path / "runs").iterdir())


def test_what_a_killed_process_left_goes_with_the_next_run(tmp_path):
    code = """
import os, signal, sys
from dlojz_tp.measure import tracking
tracking._to_tensorboard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tracking.note(sys.argv[1], "killed", {}, 1.0, [], data_version="abc")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert len(list(tmp_path.iterdir())) == 1 and str(tracking.table(tmp_path)).startswith("no runs")
    place = noted(tmp_path)
    assert list(tmp_path.iterdir()) == [place]


def test_a_library_that_fails_does_not_cost_the_run(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(tracking, "_to_tensorboard", fails)
    with pytest.warns(UserWarning, match=r"tensorboard did not take the run: no\\u000aroom"):
        noted(tmp_path)
    assert len(tracking.table(tmp_path).runs) == 1
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # neither is installed
    noted(tmp_path)
    assert len(tracking.table(tmp_path).runs) == 2


def test_several_may_note_at_once(tmp_path):
    threads = [threading.Thread(target=noted, args=(tmp_path, f"run {i % 2}")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tracking.table(tmp_path)
    assert [run["name"] for run in found.runs].count("run 0") == 3 and len(found.runs) == 6 and not found.skipped


def test_the_table_has_a_row_a_run_the_fastest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "code_version", lambda: {"commit": "0123456789abcdef", "clean": False})
    noted(tmp_path, "slow", CONFIG | {"batch": 64, "ema": 1}, 3.25)
    noted(tmp_path, "never", seconds=math.inf)
    noted(tmp_path, "slow", CONFIG | {"swa": "on", "rate": 0.15}, 1.25, cost={"kWh": 0.002})
    found = tracking.table(tmp_path)
    assert [(run["name"], run["seconds"]) for run in found.runs] == [("slow", 1.25), ("slow", 3.25), ("never", None)]
    lines = str(found).splitlines()
    assert len(lines) == 4 and repr(found) == str(found)
    cells = [re.split(r"\s{2,}", line) for line in lines]
    assert set(cells[0]) == {"name", "seconds", "best accuracy", "batch", "ema", "swa", "data", "code", "kWh"}
    column = {head: [row[i] for row in cells[1:]] for i, head in enumerate(cells[0])}
    assert column["seconds"] == ["1.25 s", "3.25 s", "never"] and column["best accuracy"] == ["0.700"] * 3
    assert column["batch"] == ["32", "64", "32"] and column["swa"] == ["on", "—", "—"]
    assert column["ema"] == ["True", "1", "True"] and column["kWh"] == ["0.002", "—", "—"]
    assert column["data"] == ["abc"] * 3 and column["code"] == ["01234567, changed"] * 3
    html = found._repr_html_()
    assert html.count("<tr>") == 4 and html.count("<td") == 27 and html.index("1.25 s") < html.index("3.25 s")


def test_an_entry_that_is_equal_in_all_runs_is_no_column(tmp_path):
    noted(tmp_path, config={"rate": 1, "plan": "a"})
    noted(tmp_path, config={"rate": 1.0, "plan": "b"})
    assert tracking.table(tmp_path)._heads() == ["name", "seconds", "best accuracy", "plan", "data", "code"]


def test_names_are_shown_as_text(tmp_path):
    noted(tmp_path, "<b>a</b>\x1b[2J\nb", {"<i>": "\x1b]"}, data_version="<u>")
    noted(tmp_path, "..", {"<i>": "c"})
    found = tracking.table(tmp_path)
    assert "\x1b" not in str(found) and len(str(found).splitlines()) == 3
    html = found._repr_html_()
    assert not re.search(r"<[biu]>|\x1b", html) and "&lt;b&gt;a" in html


@pytest.mark.parametrize(
    "damage", ["cut", "list", "other format", "no curve", "odd curve", "nan", "cost", "commit", "big"]
)
def test_a_damaged_run_is_named_and_left_out(tmp_path, damage):
    noted(tmp_path, "whole")
    path = noted(tmp_path, "broken") / "run.json"
    run = json.loads(path.read_text())
    changed = {
        "other format": {"format": 99}, "no curve": {"curve": None}, "odd curve": {"curve": [[1, 2, 3]]},
        "nan": {"seconds": math.nan}, "cost": {"cost": [1]}, "commit": {"code_version": {"commit": 1, "clean": True}},
        "big": {"seconds": 10**400},
    }  # fmt: skip
    if damage in changed:
        path.write_text(json.dumps(run | changed[damage]))
    else:
        path.write_text("[]" if damage == "list" else path.read_text()[:50])
    found = tracking.table(tmp_path)
    assert [run["name"] for run in found.runs] == ["whole"]
    (line,) = [line for line in str(found).splitlines() if "left out" in line]
    assert path.parent.name in line and "damaged" in line and path.parent.name in found._repr_html_()


def test_foreign_files_are_named_in_one_line(tmp_path):
    noted(tmp_path)
    for i in range(7):
        (tmp_path / f"note {i}.txt").write_text("mine")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")  # to open it would wait for ever
    (tmp_path / ".hidden").touch()
    (tmp_path / "mlruns").mkdir()
    found = tracking.table(tmp_path)
    assert len(found.runs) == 1 and len(found.skipped) == 9 and len(str(found).splitlines()) == 3
    last = str(found).splitlines()[-1]
    assert "a folder (no run.json)" in last and "and 4 more" in last


def test_a_folder_without_runs_is_an_empty_table(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        found = tracking.table(folder)
        assert str(found) == f"no runs in {folder}" and str(folder) in found._repr_html_() and not found.runs


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_code_version_is_the_commit_of_the_working_folder(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert tracking.code_version() is None  # no checkout
    git("init", "--quiet")
    assert tracking.code_version() is None  # no commit yet
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "--quiet", "-m", "one")
    due = {"commit": git("rev-parse", "HEAD"), "clean": True}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "new").touch()  # what git does not follow, such as the runs themselves
    assert tracking.code_version() == due
    (tmp_path / "a.py").write_text("2")
    assert tracking.code_version() == due | {"clean": False}


def test_a_git_that_is_slow_or_absent_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tracking, "GIT_SECONDS", 0.1)
    start = time.monotonic()
    assert tracking.code_version() is None and time.monotonic() - start < 10
    (tmp_path / "git").unlink()
    assert tracking.code_version() is None


def test_import_is_light():
    code = "import sys; from dlojz_tp.measure import tracking; assert not {'tensorboard', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_mlflow
def test_mlflow_gets_a_copy_in_the_folder_and_nowhere_else(tmp_path, monkeypatch):
    """Whatever server a trainee has set: here one that nobody answers."""
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my runs é"
    noted(folder, "first", cost={"kWh": 0.5})
    noted(folder, "never", seconds=math.inf)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name] and mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == "http://127.0.0.1:9"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlruns/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "race"]
    first, never = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.run_name)
    assert (first.info.run_name, first.info.status, never.info.status) == ("first", "FINISHED", "FINISHED")
    assert first.data.params == {key: str(value) for key, value in CONFIG.items()}
    assert first.data.metrics == pytest.approx({"accuracy": 0.65, "seconds": 2.5, "best accuracy": 0.7, "kWh": 0.5})
    assert first.data.tags["data_version"] == "abc" and first.data.tags["code_version"]
    history = client.get_metric_history(first.info.run_id, "accuracy")
    assert [(one.step, one.value) for one in history] == [(step, value) for step, (_, value) in enumerate(CURVE)]
    assert history[2].timestamp - history[0].timestamp == pytest.approx(3000, abs=2)
    assert "seconds" not in never.data.metrics
    found = tracking.table(folder)
    assert len(found.runs) == 2 and not found.skipped


@needs_mlflow
def test_mlflow_is_kept_from_a_folder_that_its_address_cannot_name(tmp_path):
    with pytest.warns(UserWarning, match="mlflow did not take the run"):
        noted(tmp_path / "why?")
    assert len(tracking.table(tmp_path / "why?").runs) == 1 and not (tmp_path / "why").exists()
