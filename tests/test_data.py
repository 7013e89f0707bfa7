"""Where data lives, and the one line that a missing or damaged set gives."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dlojz_tp import data
from dlojz_tp.data import places

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_photo_patches.py"


@pytest.fixture(autouse=True)
def no_centre(monkeypatch, tmp_path):
    for name in ("DLOJZ_IMAGENET", "DLOJZ_CIFAR10", "DSDIR", "DLOJZ_SCALE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "data"))


@pytest.fixture
def patches(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("make_photo_patches", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    root = tmp_path / "data" / "photo_patches"
    assert script.main(["--out", str(root), "--size", "48x36", "--count", "3"]) == 0
    return root


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


def test_data_root_is_the_variable_else_in_the_checkout(monkeypatch, tmp_path):
    assert data.data_root() == tmp_path / "data"
    for unset in ("", None):
        monkeypatch.setenv("DLOJZ_DATA", unset) if unset == "" else monkeypatch.delenv("DLOJZ_DATA")
        assert data.data_root() == SCRIPT.parents[1] / "data"


def test_import_is_light():
    code = "import sys, dlojz_tp.data; assert not {'torch', 'numpy', 'sklearn', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_photo_patches_lists_every_file(patches):
    found = data.photo_patches()
    assert found.name == "photo_patches" and found.root == patches and len(found.classes) == 15
    assert len(found.train) == 45 and len(found.val) == 15
    for split, files in (("train", found.train), ("val", found.val)):
        for path, label in files:
            assert path.is_file() and path.parts[-3:-1] == (split, found.classes[label])
    assert len(repr(found)) < 300
    with pytest.raises(AttributeError):
        found.name = "other"
    data.verify("photo_patches")


def test_missing_set_gives_the_command():
    with pytest.raises(data.DataMissing) as error:
        data.photo_patches()
    one_line(error, "make_photo_patches.py", "Make it")
    assert not isinstance(error.value, data.DataDamaged)
    assert error.value._render_traceback_() == [str(error.value)]


def test_the_command_given_does_repair(patches, monkeypatch):
    (patches / "train/cat/0000.jpg").unlink()
    with pytest.raises(data.DataDamaged) as error:
        data.photo_patches()
    command = one_line(error, "train/cat/0000.jpg", "--force").split("Make it again: ")[1]
    # Small, so that the test is quick.
    subprocess.run(f"{command} --size 48x36 --count 3", shell=True, check=True, capture_output=True)
    data.verify()


def test_command_works_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = places.make_command("make_photo_patches")
    done = subprocess.run(f"{command} --help", shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "--count" in done.stdout


@pytest.mark.parametrize("damage", ["class", "manifest", "garbled", "other", "half-made", "evil class"])
def test_half_made_or_damaged_set_is_told(patches, damage):
    manifest = patches / "manifest.json"
    text = manifest.read_text()
    if damage == "class":
        for path in (patches / "val/cat").iterdir():
            path.unlink()
        (patches / "val/cat").rmdir()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "half-made":
        manifest.write_text('{"format": 1, "made_by": "make_photo_patches"}')
    else:
        other = {"garbled": text[: len(text) // 2], "other": text.replace('"format": 1', '"format": 99')}
        manifest.write_text(other.get(damage, text.replace('"cat"', '"../../cat"')))
    with pytest.raises(data.DataDamaged) as error:
        data.photo_patches()
    one_line(error, "make_photo_patches.py")
    assert {name: state for name, state, _ in data.status()}["photo_patches"] == "damaged"


def test_verify_finds_a_truncated_file_by_name(patches):
    victim = patches / "val/rocket/0000.jpg"
    victim.write_bytes(victim.read_bytes()[:-50])
    for look in (data.photo_patches, data.verify):
        with pytest.raises(data.DataDamaged) as error:
            look()
        one_line(error, "val/rocket/0000.jpg has ", f"bytes and not {victim.stat().st_size + 50:,}", "--force")


def test_verify_finds_a_changed_byte_and_swapped_files(patches):
    first, second = patches / "val/rocket/0000.jpg", patches / "val/cat/0000.jpg"
    a, b = first.read_bytes(), second.read_bytes()
    for one, other, why in ((a[:200] + b"?" + a[201:], b, "rocket/0000.jpg was changed"), (b, a, "cat/0000.jpg has")):
        first.write_bytes(one)
        second.write_bytes(other)
        with pytest.raises(data.DataDamaged) as error:
            data.verify()
        one_line(error, why)
    with pytest.raises(ValueError):
        data.verify("imagenet")


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    root = tmp_path / "store" / "imagenet"
    for split, count in (("train", 3), ("val", 2)):
        for name in ("n02", "n01"):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (8, 8)).save(root / split / name / f"{name}_{index}.JPEG", "JPEG")
    (root / "train" / "n01" / "readme.txt").write_text("no image")
    (root / "train" / ".hidden").mkdir()
    monkeypatch.setenv("DSDIR", str(root.parent))
    return root


def test_imagenet_by_either_variable(imagenet, monkeypatch):
    found = data.imagenet()
    assert found.classes == ("n01", "n02") and len(found.train) == 6 and len(found.val) == 4
    assert found.train[0] == (imagenet / "train/n01/n01_0.JPEG", 0) and found.train[-1][1] == 1
    monkeypatch.delenv("DSDIR")
    monkeypatch.setenv("DLOJZ_IMAGENET", str(imagenet))
    assert data.imagenet() == found


def test_imagenet_missing(monkeypatch, tmp_path):
    with pytest.raises(data.DataMissing) as error:
        data.imagenet()
    one_line(error, "DLOJZ_IMAGENET")
    monkeypatch.setenv("DLOJZ_IMAGENET", str(tmp_path / "gone"))
    with pytest.raises(data.DataMissing) as error:
        data.imagenet()
    one_line(error, "gone")


def test_imagenet_flat_val_other_classes_empty_class(imagenet):
    for path in (imagenet / "val").glob("*/*"):
        path.rename(imagenet / "val" / path.name)
    with pytest.raises(data.DataDamaged) as error:
        data.imagenet()
    one_line(error, "val/n01", "no images")
    (imagenet / "val/n01").rmdir()
    (imagenet / "val/n02").rmdir()
    with pytest.raises(data.DataDamaged) as error:
        data.imagenet()
    one_line(error, "no class folders", "val/CLASS")
    (imagenet / "val/n01").mkdir()
    with pytest.raises(data.DataDamaged) as error:
        data.imagenet()
    one_line(error, "differ", "n02")


def test_image_set_follows_scale_and_centre(patches, imagenet, monkeypatch):
    monkeypatch.setenv("DLOJZ_SCALE", "small")
    assert data.image_set().name == "photo_patches"
    monkeypatch.setenv("DLOJZ_SCALE", "full")
    assert data.image_set().name == "imagenet"
    monkeypatch.delenv("DSDIR")
    assert data.image_set().name == "photo_patches"
    monkeypatch.setenv("DLOJZ_IMAGENET", "/nowhere/at/all")
    with pytest.raises(data.DataMissing):
        data.image_set()


def test_digits():
    found, again, other = data.digits(), data.digits(), data.digits(seed=1)
    assert found.train_x.shape[1:] == (1, 8, 8) and found.train_x.dtype == torch.float32
    assert len(found.train_x) + len(found.val_x) == 1797 and len(found.train_y) == len(found.train_x)
    assert found.train_y.dtype == found.val_y.dtype == torch.int64
    assert found.train_x.min() == 0 and found.train_x.max() == 1
    assert torch.equal(found.train_x, again.train_x) and torch.equal(found.val_y, again.val_y)
    assert not torch.equal(found.train_x, other.train_x)
    everything, kept = torch.bincount(torch.cat([found.train_y, found.val_y])), torch.bincount(found.val_y)
    assert (kept / everything - 0.2).abs().max() < 0.01
    assert found.train_y[:20].unique().numel() > 3  # mixed
    for share in (0, 1, 2, -0.5):
        with pytest.raises(ValueError):
            data.digits(val_share=share)


def test_status(patches, imagenet, monkeypatch):
    rows = data.status()
    assert [row[:2] for row in rows] == [
        ("photo_patches", "ready"), ("code_text", "missing"), ("search_table", "missing"), ("photo_cells", "missing"),
        ("pretrained", "missing"), ("digits", "ready"), ("imagenet", "ready"), ("cifar10", "missing"),
    ]  # fmt: skip
    assert all("\n" not in detail for _, _, detail in rows)
    (imagenet / "val/n01").rename(imagenet / "val/n09")
    assert data.status()[6][1] == "damaged"
    monkeypatch.delenv("DSDIR")
    assert data.status()[6][1] == "missing"
