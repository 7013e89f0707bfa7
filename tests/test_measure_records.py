"""The run record: what is saved comes back, and what is damaged is named."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlojz_tp import measure


def make(**values):
    steps = [{"forward": 0.25, "total": 0.5}]
    return measure.new_record("run", "cpu", steps=steps, batch_size=64, **values)


def test_what_is_saved_comes_back(tmp_path):
    record = make(losses=[torch.tensor(1.5), np.float32(0.5)], accuracy=(0.25,), dtype=torch.bfloat16, path=Path("a"))
    assert record.settings == {"batch_size": 64, "dtype": "torch.bfloat16", "path": "a"}
    assert measure.load(measure.save(record, tmp_path / "new" / "run.json")) == record


def test_it_says_where_and_with_what():
    record = make()
    assert {"device_name", "device_count", "device_memory_bytes", "cpu_model", "cpu_cores"} <= set(record.hardware)
    assert record.versions["torch"] == torch.__version__
    assert record.versions["torchvision"][0].isdigit()
    assert record.date[:2] == "20" and "T" in record.date
    assert record.schema == 1 and record.communications == [] and not record.out_of_memory


def test_a_loss_that_diverged_survives(tmp_path):
    path = measure.save(make(losses=[1.0, math.inf, math.nan]), tmp_path / "run.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    losses = measure.load(path).losses
    assert losses[0] == 1.0 and all(math.isnan(loss) for loss in losses[1:])


def test_a_size_that_failed():
    record = measure.new_record("sweep", "cpu", out_of_memory=True, batch_size=512)
    assert record.out_of_memory and record.settings == {"batch_size": 512} and record.steps == []
    with pytest.raises(ValueError, match="memory_kind"):
        measure.new_record("x", "cpu", memory_kind="guessed")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: '{"name": "other"}',
        lambda text: text.replace('"schema": 1', '"schema": 99'),
        lambda text: text.replace('"warmup"', '"warm"'),
        lambda text: text.replace('"warmup": 0', '"warmup": "none"'),
        lambda text: text.replace('"total"', '"sum"'),
        lambda text: text.replace('"losses": []', '"losses": null'),
        lambda text: "\udcff" + text,
    ],
)
def test_a_damaged_file_gives_one_clear_error(tmp_path, damage):
    path = measure.save(make(), tmp_path / "run.json")
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(measure.RecordError, match="run.json") as error:
        measure.load(path)
    assert "\n" not in str(error.value)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = measure.save(make(), tmp_path / "run.json")
    before = path.read_text()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        measure.save(make(losses=[1.0]), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        measure.load(tmp_path / "none.json")


def test_measuring_needs_no_matplotlib():
    code = "import sys, dlojz_tp.measure; sys.exit('matplotlib' in sys.modules or 'torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
