"""A data set that is damaged, edited, older, newer or another user's is told as such; nothing is removed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlojz_tp import data
from dlojz_tp.commands import doctor
from dlojz_tp.data import made
from dlojz_tp.works import temporary

SCRIPT = Path(__file__).resolve().parents[2] / "data_scripts" / "make_photo_patches.py"
SOMEBODY = 65534  # nobody, on most machines
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make a folder of another user")
SMALL = "--size", "48x36", "--count", "2"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_photo_patches", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "photo_patches"
    assert script.main([*SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def root(whole, tmp_path, monkeypatch):
    """A copy of a small set, to be damaged."""
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    monkeypatch.delenv("DLOJZ_SCALE", raising=False)
    return Path(shutil.copytree(whole, tmp_path / "photo_patches"))


def edited(root, seal=True, **entries):
    """Change entries of the manifest; without its seal it is as older versions wrote it."""
    manifest = json.loads((root / made.NAME).read_text()) | entries
    if not seal:
        for key in (made.SEAL, "sizes", "crc32"):
            del manifest[key]
    (root / made.NAME).write_text(json.dumps(manifest))


def told(look) -> str:
    with pytest.raises(data.DataDamaged) as caught:
        look()
    line = str(caught.value)
    assert "\n" not in line and "rm -r" not in line
    return line


def row() -> doctor.Row:
    return next(row for row in doctor._data_sets() if row.name == "data: photo_patches")


def test_what_killed_makers_left_goes_though_the_set_is_whole(script, whole, tmp_path, capsys):
    """A maker that lives, here or perhaps elsewhere, keeps its folder."""
    out = Path(shutil.copytree(whole, tmp_path / "set"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, alive = temporary._place(), temporary.label()
    for owner, days in {f"{here}-{ended.pid}-5": 0, alive: 2, "other-1-5": 0, "another-1-5": 2, "node7": 2}.items():
        folder = tmp_path / f".set.making-{owner}-abc"
        (folder / "new").mkdir(parents=True)
        os.utime(folder, (time.time() - days * script.making.DAY,) * 2)
    assert script.main([*SMALL, "--out", str(out)]) == 0 and "nothing to do" in capsys.readouterr().out
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"set", f".set.making-{alive}-abc", ".set.making-other-1-5-abc"}


@pytest.mark.parametrize("older", [False, True])
def test_half_a_file_is_found_when_the_set_is_opened(root, older):
    edited(root, seal=not older)
    victim = root / "train/cat/0001.jpg"
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    line = told(data.photo_patches)
    assert ("its files have" if older else "train/cat/0001.jpg has") in line
    assert line.endswith("--count 2 --size 48x36 --force") and data.status()[0][1] == "damaged"


def test_a_changed_byte_is_found_and_named_by_the_doctor(root):
    victim = root / "val/brick/0000.jpg"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert "val/brick/0000.jpg was changed" in told(data.verify)
    assert row().mark == "gap" and "val/brick/0000.jpg was changed" in row().value


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("count", [{"train": 1, "val": 1}, {"train": 3, "val": 1}])
def test_an_edited_count_is_found_when_the_set_is_opened(root, older, count):
    edited(root, seal=not older, count=count)
    assert ("manifest.json was changed" in told(data.photo_patches)) == (not older)


def test_every_entry_of_the_manifest_is_covered(root):
    manifest = json.loads((root / made.NAME).read_text())
    for key in manifest:
        edited(root, **{key: None})
        told(data.photo_patches)
        (root / made.NAME).write_text(json.dumps(manifest))
    data.photo_patches()  # written in another way, it says the same


def test_an_older_set_is_read_and_its_manifest_gets_a_checksum(root, script, capsys):
    before = (root / made.NAME).read_text()
    edited(root, seal=False)
    assert data.verify().endswith("--count 2 --size 48x36") and "older version" in data.verify()
    assert row().mark == "ok" and "run this once" in row().todo
    old = {path: path.stat().st_mtime_ns for path in root.rglob("*.jpg")}
    assert script.main([*SMALL, "--out", str(root)]) == 0 and "its own checksum now" in capsys.readouterr().out
    assert (root / made.NAME).read_text() == before and data.verify() == "" and row().todo == ""
    assert old == {path: path.stat().st_mtime_ns for path in root.rglob("*.jpg")}
    assert [path.name for path in root.parent.iterdir() if not path.name.endswith(".lock")] == ["photo_patches"]


def test_a_newer_set_is_left_alone(root):
    edited(root, format=2)
    line = told(data.photo_patches)
    assert "is of format 2" in line and "Update the course, or set DLOJZ_DATA" in line and "mv " not in line


@as_root
def test_a_set_of_another_user_is_left_alone(root, monkeypatch):
    (root / "train/cat/0001.jpg").unlink()
    os.chown(root, SOMEBODY, SOMEBODY)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    line = told(data.photo_patches)
    assert "Ask whoever made it, or set DLOJZ_DATA to a folder of yours. Make it there: " in line
    assert "--force" not in line and "mv " not in line


def test_a_folder_that_is_no_set_is_named_and_moved_not_removed(tmp_path, monkeypatch, script, capsys):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    (tmp_path / "photo_patches").mkdir()
    (tmp_path / "photo_patches" / "thesis.tex").write_text("mine")
    line = told(data.photo_patches)
    assert "holds thesis.tex and no manifest.json" in line and ". Make it again: mv " in line
    assert script.main([*SMALL, "--force", "--out", str(tmp_path / "photo_patches")]) == 1
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "photo_patches" / "thesis.tex").read_text() == "mine"


def test_a_foreign_file_in_a_set_is_named_and_left_alone(root):
    (root / "train" / "cat" / "mine.jpg").write_text("mine")
    assert len(data.photo_patches().train) == 30 and "train/cat/mine.jpg" in data.verify()
    assert row().mark == "ok" and "train/cat/mine.jpg, which the course did not make and leaves alone" in row().todo
    assert (root / "train" / "cat" / "mine.jpg").read_text() == "mine"


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    from dlojz_tp.training import training_run

    (tmp_path / "half.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")
    assert "half.jpg cannot be decoded" in told(lambda: training_run.decoded(str(tmp_path / "half.jpg")))
