"""The photo cells as a notebook loads them, and one line where they are not whole."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlojz_tp import data
from dlojz_tp.data import made as made_sets

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_photo_cells.py"
SMALL = ["--train", "3", "--val", "2", "--varied", "4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of data sets with a small set of photo cells, made once: for looking only."""
    spec = importlib.util.spec_from_file_location("make_photo_cells", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    root = tmp_path_factory.mktemp("data")
    assert script.main([*SMALL, "--out", str(root / "photo_cells")]) == 0
    return root


@pytest.fixture(autouse=True)
def here(made, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(made))


@pytest.fixture
def copy(made, tmp_path, monkeypatch):
    """The folder of a copy of the set, to be damaged."""
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    return Path(shutil.copytree(made / "photo_cells", tmp_path / "photo_cells"))


def state():
    return {name: (state, detail) for name, state, detail in data.status()}["photo_cells"]


def test_images_and_labels_as_the_command_wrote_them(made):
    found = data.photo_cells()
    root = made / "photo_cells"
    for x, y, name, count in ((found.train_x, found.train_y, "train", 3), (found.val_x, found.val_y, "val", 2)):
        assert x.dtype == torch.uint8 and np.array_equal(x.numpy(), np.load(root / f"{name}.npy"))
        assert y.dtype == torch.int64 and y.tolist() == [label for label in range(15) for _ in range(count)]
    assert len(found.varied) == len(found.varied_y) == 60 and found.varied_y.bincount().tolist() == [4] * 15
    assert [image.shape[1:] for image in found.varied] == [tuple(row) for row in np.load(root / "varied_shapes.npy")]
    assert np.array_equal(torch.cat([image.flatten() for image in found.varied]).numpy(), np.load(root / "varied.npy"))
    manifest = json.loads((root / "manifest.json").read_text())
    assert found.classes == tuple(manifest["classes"]) and found.classes[3] == "cat"
    assert len(found.version) == 12 and manifest["sha256"].startswith(found.version)
    assert found.version in repr(found) and len(repr(found)) < 200
    assert state()[0] == "ready" and "45 train and 30 val" in state()[1] and data.verify("photo_cells") == ""


def test_a_photograph_is_told_from_its_colours():
    """Images and labels belong together: the nearest mean colour is right more often than luck."""
    found = data.photo_cells()
    means = found.train_x.float().mean((2, 3)).view(15, 3, 3).mean(1)
    nearest = torch.cdist(found.val_x.float().mean((2, 3)), means).argmin(1)
    assert (nearest == found.val_y).float().mean() > 0.3


def test_missing_set_gives_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "new"))
    with pytest.raises(data.DataMissing) as error:
        data.photo_cells()
    line = str(error.value)
    assert not isinstance(error.value, data.DataDamaged) and "\n" not in line and state() == ("missing", line)
    subprocess.run(f"{line.split('Make it: ')[1]} {' '.join(SMALL)}", shell=True, check=True, capture_output=True)
    assert len(data.photo_cells().train_x) == 45 and state()[0] == "ready"


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut short", "changed"])
@pytest.mark.parametrize("name", ["val.npy", "varied_shapes.npy"])
def test_damaged_file_is_told_with_the_command_that_repairs(copy, damage, name):
    path = copy / name
    good = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "cut short": good[:-7], "changed": good[:200] + b"?" + good[201:]}[damage])
    for look in (data.photo_cells, lambda: data.verify("photo_cells")):
        with pytest.raises(data.DataDamaged) as error:
            look()
        line = str(error.value)
        assert "\n" not in line and str(copy) in line and line.endswith("--train 3 --val 2 --varied 4 --force")
        assert name in line
    assert state() == ("damaged", line)


@pytest.mark.parametrize("damage", ["deleted", "garbled", "other format", "no classes", "another count", "no seed"])
def test_damaged_manifest_is_told(copy, damage):
    path = copy / made_sets.NAME
    manifest = json.loads(path.read_text())
    if damage in ("deleted", "garbled"):
        path.write_text(path.read_text()[:100]) if damage == "garbled" else path.unlink()
    else:
        changed = {
            "other format": {"format": 99}, "no classes": {"classes": []}, "no seed": {"seed": None},
            "another count": {"count": {"train": 4, "val": 2, "varied": 4}},
        }  # fmt: skip
        path.write_text(json.dumps(manifest | changed[damage]))
    with pytest.raises(data.DataDamaged) as error:
        data.photo_cells()
    line = str(error.value)
    assert "\n" not in line and "make_photo_cells.py" in line and "rm -r" not in line
    assert ("mv " in line) == (damage != "other format")


def test_files_that_do_not_fit_a_sealed_manifest_are_told(copy):
    """As a set that another program made with our manifest's form: labels would not belong to the images."""
    path = copy / made_sets.NAME
    manifest = json.loads(path.read_text()) | {"count": {"train": 2, "val": 3, "varied": 4}}
    path.write_text(json.dumps(manifest | {made_sets.SEAL: made_sets.seal(manifest)}))
    with pytest.raises(data.DataDamaged, match="number of images .* --force"):
        data.photo_cells()


def test_a_foreign_file_is_named(copy):
    (copy / "mine.txt").write_text("mine")
    assert "mine.txt" in data.verify("photo_cells") and len(data.photo_cells().varied) == 60


def test_verify_names_the_sets_that_it_knows():
    with pytest.raises(ValueError, match="'digits', only for photo_patches, code_text, search_table, photo_cells"):
        data.verify("digits")


def test_import_is_light():
    code = "import sys, dlojz_tp.data as d; d.status(); assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
