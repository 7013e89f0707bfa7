"""The command that makes the photo cells: same bytes, no pixel in both parts, whole or not at all, clear refusals."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dlojz_tp.data import cells

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_photo_cells.py"
SMALL = ["--train", "2", "--val", "2", "--varied", "3"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_photo_cells", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """A small set, made once: for looking only."""
    out = tmp_path_factory.mktemp("made") / "cells"
    assert script.main([*SMALL, "--out", str(out)]) == 0
    return out


def run(script, capsys, *arguments):
    """Run the command here; returns (exit status, stdout, stderr)."""
    try:
        status = script.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_same_arguments_same_bytes_in_another_process(made, tmp_path):
    command = [sys.executable, str(SCRIPT), *SMALL, "--out", str(tmp_path / "cells")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("made")
    for name in (*cells.FILES, "manifest.json"):
        assert (tmp_path / "cells" / name).read_bytes() == (made / name).read_bytes()


def test_a_longer_set_begins_like_a_shorter_one_and_another_seed_differs(script, capsys, made, tmp_path):
    for name, more in (("longer", ["--train", "3"]), ("other", ["--seed", "1"])):
        assert run(script, capsys, *SMALL, *more, "--out", tmp_path / name)[0] == 0
    short, longer, other = (np.load(folder / "train.npy") for folder in (made, tmp_path / "longer", tmp_path / "other"))
    assert (longer.reshape(15, 3, -1)[:, :2] == short.reshape(15, 2, -1)).all()
    assert other.shape == short.shape and all((a != b).any() for a, b in zip(short, other))


def test_manifest_and_files_say_what_is_there(made):
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["count"] == {"train": 2, "val": 2, "varied": 3} and len(manifest["classes"]) == 15
    assert {"numpy", "pillow", "libjpeg"} < manifest["versions"].keys()
    assert str(Path.home()) not in json.dumps(manifest) and sys.prefix not in json.dumps(manifest)
    for name in ("train.npy", "val.npy"):
        images = np.load(made / name)
        assert images.shape == (30, 3, 32, 32) and images.dtype == np.uint8
        assert len({image.tobytes() for image in images}) == 30


@pytest.fixture
def boxes(script, monkeypatch):
    """Every box that is cut, (left, top, right, bottom) in pixels."""
    found, resize = [], Image.Image.resize

    def recorded(photo, size, method, box):
        found.append(box)
        return resize(photo, size, method, box=box)

    monkeypatch.setattr(script.Image.Image, "resize", recorded)
    return found


def touched(size, boxes):
    """(height, width) bool: pixels of a photograph that one of the boxes touches, be it with an edge."""
    pixels = np.zeros(size[::-1], dtype=bool)
    for left, top, right, bottom in boxes:
        pixels[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)] = True
    return pixels


def cuts(script, photo, split, n=150):
    """As the command cuts: squares, and for validation rectangles too."""
    script.squares([photo], split, n, 0)
    if split == "val":
        script.rectangles([photo], n, 0)


def test_training_and_validation_share_no_pixel(script, boxes):
    sizes = {script.load_photo(name).size for name in script.PHOTOS}
    assert any(width % 4 and height % 3 for width, height in sizes)  # cells that are not whole pixels
    for size in sizes:
        parts = []
        for split in cells.SPLITS:
            boxes.clear()
            cuts(script, Image.new("RGB", size), split)
            parts.append(touched(size, boxes))
        assert not (parts[0] & parts[1]).any()
        assert parts[0].mean() > 0.5 and parts[1].mean() > 0.25  # of 8 and of 4 cells of 12


def test_no_pixel_beside_a_box_is_seen(script, boxes, monkeypatch):
    """A filter could reach over the box: what is white beside all boxes of a part does not show in it."""
    monkeypatch.setattr(script, "GRAIN", 0)
    size = (451, 300)
    for split in cells.SPLITS:
        boxes.clear()
        cuts(script, Image.new("RGB", size), split, 30)
        beside = Image.fromarray(np.where(touched(size, boxes), 0, 255).astype(np.uint8)).convert("RGB")
        seen = [script.squares([beside], split, 30, 0), *(script.rectangles([beside], 30, 0) if split == "val" else [])]
        assert all(image.max() == 0 for image in seen) and np.asarray(beside).max() == 255


def test_rectangles_have_a_short_side_of_32_and_strides_for_the_long_one(script):
    photo = script.load_photo("cat")
    shapes = [image.shape for image in script.rectangles([photo], 200, 0)]
    assert {min(h, w) for _, h, w in shapes} == {32}
    assert {max(h, w) for _, h, w in shapes} == {32, 40, 48, 56, 64}
    wide = sum(w > h for _, h, w in shapes)
    tall = sum(h > w for _, h, w in shapes)
    assert abs(wide - tall) < 50 and wide + tall > 130


def test_a_cell_that_is_as_small_as_a_box_can_be_cut(script):
    """The draw's lower and upper end are one there, and exp(log(x)) may exceed x."""
    for side in range(90, 100):
        photo = Image.new("RGB", (4 * side // 3, side))
        assert script.squares([photo], "train", 20, side).shape == (20, 3, 32, 32)
        assert len(script.rectangles([photo], 20, side)) == 20


def test_second_run_does_nothing_another_length_needs_force_and_damage_is_mended(script, capsys, tmp_path):
    out = tmp_path / "cells"
    assert run(script, capsys, *SMALL, "--out", out)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, text, err = run(script, capsys, *SMALL, "--out", out)
    assert status == 0 and "already there" in text and err == ""
    status, _, err = run(script, capsys, *SMALL[2:], "--train", 1, "--out", out)
    assert status == 1 and "another count" in err and "--force" in err and err.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    good = (out / "varied.npy").read_bytes()
    (out / "varied.npy").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert run(script, capsys, *SMALL, "--out", out)[0] == 0 and (out / "varied.npy").read_bytes() == good


@pytest.mark.parametrize("wrong", [["--train", "0"], ["--val", "1.5"], ["--varied", "5001"], ["--seed", "-1"], ["all"]])
def test_wrong_arguments_are_one_line_and_status_2(script, capsys, tmp_path, wrong):
    status, out, err = run(script, capsys, "--out", tmp_path / "cells", *wrong)
    assert status == 2 and out == "" and err.count("\n") == 1 and "--help" in err and "make_photo_cells" in err
    assert list(tmp_path.iterdir()) == []


def test_a_photograph_that_is_not_there_is_one_line(script, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(script.PHOTOS, "cat", ("skimage", "data/no_such.png"))
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "cells")
    assert status == 1 and err.count("\n") == 1 and "--force-reinstall scikit-image" in err
    assert not (tmp_path / "cells").exists()
