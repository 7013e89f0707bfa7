"""The command that makes the search table: same bytes, real training, whole or not at all, and clear refusals."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlojz_tp.data import searching

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_search_table.py"
SMALL = ["--epochs", "1", "--rates", "2"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_search_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """A small table, made once: for looking only."""
    out = tmp_path_factory.mktemp("made") / "table"
    threads = torch.get_num_threads()
    assert script.main([*SMALL, "--out", str(out)]) == 0 and torch.get_num_threads() == threads
    return out


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the small table, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "table"))


def run(script, capsys, *arguments):
    """Run the command here; returns (exit status, stdout, stderr)."""
    try:
        status = script.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_same_counts_in_another_process_on_one_core(made, tmp_path):
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, str(SCRIPT), *SMALL, "--out", str(tmp_path / "table")]
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, [core]), timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("made")
    assert (tmp_path / "table/right.npy").read_bytes() == (made / "right.npy").read_bytes()


def test_manifest_says_what_is_there(made):
    manifest, right = json.loads((made / "manifest.json").read_text()), np.load(made / "right.npy")
    assert right.shape == (2 * 4 * 3 * 3 * 2, 3, 1, 2) and right.dtype == np.int16
    assert manifest["images"] == [1078, 360, 359] and (manifest["epochs"], manifest["rates"]) == (1, 2)
    assert (right <= manifest["images"][1:]).all() and right.min() >= -1
    assert np.array(manifest["seconds"]).shape == (2, 3, 3) and np.array(manifest["seconds"]).min() > 0
    assert str(Path.home()) not in json.dumps(manifest) and sys.prefix not in json.dumps(manifest)


def test_parts_share_no_image_and_have_every_digit(script):
    for seed in (0, 1):
        parts = script.split_digits(seed)
        assert sum(len(x) for x, _ in parts) == 1797
        for _, labels in parts:
            assert labels.bincount(minlength=10).min() > 0.09 * len(labels)
    other = script.split_digits(0)[0][0]
    assert not torch.equal(other[:50], parts[0][0][:50])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_trains_as_torch_does(script, name):
    """Each network of an ensemble goes the way of nn.Linear, cross_entropy and torch.optim."""
    parts = script.split_digits(0)
    common = {"optimizer": name, "batch_size": 64, "width": 24}
    configs = [
        {**common, "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.01},
        {**common, "learning_rate": 0.001, "momentum": 0.0, "weight_decay": 0.5},
    ]
    found = script.train_together(parts, configs, 5, 2, threading.Event())
    generator = torch.Generator().manual_seed(5)
    drawn = [(torch.rand(*shape, generator=generator) * 2 - 1) / fan**0.5 for fan, shape in
             ((64, (65, 1, 24)), (24, (1, 24, 10)), (24, (1, 1, 10)))]  # fmt: skip
    (x, y), *held_out = [(x[:, :-1].double(), y) for x, y in parts]
    orders = [torch.randperm(len(x), generator=generator) for _ in range(2)]
    for config, seen in zip(configs, found):
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).double()
        start = drawn[0][:-1, 0].T, drawn[0][-1, 0], drawn[1][0].T, drawn[2].flatten()
        for parameter, value in zip(model.parameters(), start):
            parameter.data.copy_(value)
        rate, decay = config["learning_rate"], config["weight_decay"]
        if name == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), rate, momentum=config["momentum"], weight_decay=decay)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)
        for epoch, order in enumerate(orders):
            for rows in order.split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            due = [(model(images).argmax(-1) == labels).sum() for images, labels in held_out]
            assert (seen[epoch] - torch.stack(due)).abs().max() <= 2  # float32 against float64


def test_once_diverged_stays_so(script):
    config = {"optimizer": "sgd", "learning_rate": 1e4, "momentum": 0.99, "batch_size": 64, "width": 8}
    config |= {"weight_decay": 1e-5}
    tame = {**config, "learning_rate": 0.01, "momentum": 0.0}
    found = script.train_together(script.split_digits(0), [config, tame], 0, 2, threading.Event())
    assert (found[0] == -1).all() and (found[1] > 0).all()


def test_second_run_does_nothing_and_another_length_needs_force(script, capsys, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    status, text, err = run(script, capsys, *SMALL, "--out", copy)
    assert status == 0 and "already there" in text and err == ""
    status, _, err = run(script, capsys, *SMALL[2:], "--epochs", 2, "--out", copy)
    assert status == 1 and "another epochs" in err and "--force" in err and err.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


@pytest.mark.parametrize("damage", ["deleted", "truncated", "changed"])
def test_damaged_table_is_made_again(script, capsys, copy, made, damage, monkeypatch):
    good = (copy / "right.npy").read_bytes()
    if damage == "deleted":
        (copy / "right.npy").unlink()
    else:
        (copy / "right.npy").write_bytes(good[:-100] if damage == "truncated" else good[:300] + b"?" + good[301:])

    def quick(folder, manifest):  # what training gives is tested above
        shutil.copy(made / "right.npy", folder)
        manifest |= json.loads((made / "manifest.json").read_text())

    monkeypatch.setattr(script, "RECIPE", script.making.Recipe(
        searching.MADE_BY, searching.read, lambda _: searching.FILES, quick, script.summary))  # fmt: skip
    assert run(script, capsys, *SMALL, "--out", copy)[0] == 0
    assert (copy / "right.npy").read_bytes() == good


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(tmp_path, signum):
    out = tmp_path / "table"
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--out", str(out)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".*.making-*/new")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and "interrupted" in err
    assert [path.name for path in tmp_path.iterdir()] == [".table.lock"]


def test_interrupted_while_training_ends_soon(script, capsys, tmp_path, monkeypatch):
    def stopped(parts, configs, seed, epochs, stop):
        if configs[0]["optimizer"] == "adamw":
            raise KeyboardInterrupt
        assert stop.wait(30)
        return torch.zeros(len(configs), epochs, 2, dtype=torch.int16)

    monkeypatch.setattr(script, "train_together", stopped)
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "table")
    assert status == 1 and "interrupted" in err and not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    "wrong", [["--epochs", "0"], ["--epochs", "1.5"], ["--rates", "1"], ["--rates", "101"], ["--seed", "-1"], ["all"]]
)
def test_wrong_arguments_are_one_line_and_status_2(script, capsys, tmp_path, wrong):
    status, out, err = run(script, capsys, "--out", tmp_path / "table", *wrong)
    assert status == 2 and out == "" and err.count("\n") == 1 and "--help" in err and "make_search_table" in err
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_one_line(script, capsys, tmp_path, monkeypatch):
    def missing(name):
        raise script.importlib.metadata.PackageNotFoundError("scikit-learn")

    monkeypatch.setattr(script.importlib.metadata, "version", missing)
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "table")
    assert status == 1 and err.count("\n") == 1 and "pip install scikit-learn" in err and not list(tmp_path.iterdir())
