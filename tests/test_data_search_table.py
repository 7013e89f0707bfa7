"""The search table as a notebook loads it: nearest configurations, curves, and one line where it is not whole."""

import importlib.util
import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlojz_tp import data
from dlojz_tp.data import made as made_sets

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_search_table.py"
SMALL = ["--epochs", "1", "--rates", "3"]
SGD = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.9, "batch_size": 64, "width": 24, "weight_decay": 1e-5}
ADAMW = {name: value for name, value in SGD.items() if name != "momentum"} | {"optimizer": "adamw"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of data sets with a small table, made once: for looking only."""
    spec = importlib.util.spec_from_file_location("make_search_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    root = tmp_path_factory.mktemp("data")
    assert script.main([*SMALL, "--out", str(root / "search_table")]) == 0
    return root


@pytest.fixture(autouse=True)
def here(made, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(made))


@pytest.fixture
def copy(made, tmp_path, monkeypatch):
    """The folder of a copy of the table, to be damaged."""
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    return Path(shutil.copytree(made / "search_table", tmp_path / "search_table"))


def state():
    return {name: (state, detail) for name, state, detail in data.status()}["search_table"]


def test_every_configuration_is_its_own_nearest_and_has_its_own_row(made):
    table = data.search_table()
    assert len(table.configurations) == 3 * 4 * 3 * 3 * 2 and (table.epochs, table.seeds) == (1, 3)
    right = np.load(made / "search_table/right.npy").astype(float)
    for row, config in zip(right, table.configurations):
        assert table.nearest(config) == config and ("momentum" in config) == (config["optimizer"] == "sgd")
        for seed, part in itertools.product(range(3), range(2)):
            seen = (table.curve, table.test)[part](config, seed)
            due = np.where(row[seed, :, part] < 0, np.nan, row[seed, :, part] / (360, 359)[part])
            assert seen.dtype == np.float64 and np.array_equal(seen, due, equal_nan=True)
    assert len({tuple(config.items()) for config in table.configurations}) == len(table.configurations)
    assert len(repr(table)) < 200


@pytest.mark.parametrize(
    ("name", "value", "due"),
    [
        ("learning_rate", 0.09, 0.01), ("learning_rate", 0.11, 1.0), ("learning_rate", 1e-9, 1e-4),
        ("momentum", 0.44, 0), ("learning_rate", 50, 1.0), ("momentum", 0.46, 0.9), ("momentum", 0.95, 0.99),
        ("batch_size", 31, 16),
        ("batch_size", 33, 64), ("width", 41, 24), ("width", np.int64(42), 72), ("weight_decay", 3e-4, 1e-5),
        ("weight_decay", np.float32(4e-4), 1e-2), ("weight_decay", 0, 1e-5),
    ],
)  # fmt: skip
def test_nearest_by_ratio_on_log_axes_by_difference_on_the_other(name, value, due):
    assert data.search_table().nearest({**SGD, name: value}) == {**SGD, name: due}


def test_a_momentum_that_is_not_active_changes_nothing():
    table = data.search_table()
    assert table.nearest({**ADAMW, "momentum": 0.9}) == ADAMW
    assert table.seconds(SGD) > 0 and table.seconds(ADAMW) != table.seconds(SGD)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({**SGD, "dropout": 0.1}, "no dropout"), (ADAMW | {"optimizer": "sgd"}, "no 'momentum'"),
        ({**SGD, "width": math.nan}, "width is NaN"), ({**SGD, "width": "24"}, "no number"), ({}, "no 'optimizer'"),
        ({**SGD, "optimizer": "lion"}, "lion"),
    ],
)  # fmt: skip
def test_no_configuration_is_refused_with_its_reason(config, word):
    with pytest.raises(ValueError, match=word):
        data.search_table().curve(config, 0)


def test_curves_are_the_callers_own():
    table = data.search_table()
    table.curve(SGD, 0)[:] = 7
    table.nearest(SGD).clear()
    assert table.curve(SGD, 0).max() <= 1 and table.nearest(SGD) == SGD


def test_missing_table_gives_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "new"))
    with pytest.raises(data.DataMissing) as error:
        data.search_table()
    line = str(error.value)
    assert not isinstance(error.value, data.DataDamaged) and "\n" not in line and state() == ("missing", line)
    subprocess.run(f"{line.split('Make it: ')[1]} {' '.join(SMALL)}", shell=True, check=True, capture_output=True)
    assert data.search_table().epochs == 1 and state()[0] == "ready"


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut short", "changed"])
def test_damaged_file_is_told_with_the_command_that_repairs(copy, damage):
    path = copy / "right.npy"
    good = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "cut short": good[:-7], "changed": good[:200] + b"?" + good[201:]}[damage])
    for look in (data.search_table, lambda: data.verify("search_table")):
        with pytest.raises(data.DataDamaged) as error:
            look()
        line = str(error.value)
        assert "\n" not in line and str(copy) in line and line.endswith("--epochs 1 --rates 3 --force")
    assert state() == ("damaged", line)


@pytest.mark.parametrize("damage", ["deleted", "garbled", "other format", "no seconds", "another length"])
def test_damaged_manifest_is_told(copy, damage):
    path = copy / made_sets.NAME
    manifest = json.loads(path.read_text())
    if damage in ("deleted", "garbled"):
        path.write_text(path.read_text()[:100]) if damage == "garbled" else path.unlink()
    else:
        changed = {"other format": {"format": 99}, "no seconds": {"seconds": []}, "another length": {"epochs": 5}}
        path.write_text(json.dumps(manifest | changed[damage]))
    with pytest.raises(data.DataDamaged) as error:
        data.search_table()
    line = str(error.value)
    assert "\n" not in line and "make_search_table.py" in line and "rm -r" not in line
    assert ("mv " in line) == (damage != "other format")


def test_import_is_light():
    code = "import sys, dlojz_tp.data as d; d.status(); assert not {'torch', 'numpy', 'optuna'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
