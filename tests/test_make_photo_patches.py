"""The command that makes the default image set: same bytes, whole or not at all, and clear refusals."""

import contextlib
import fcntl
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dlojz_tp import data

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_photo_patches.py"
SMALL = ["--size", "48x36", "--count", "2"]
LONG = ["--size", "500x375", "--count", "400"]  # long enough to be interrupted


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_photo_patches", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, capsys, *arguments):
    """Run the command here; returns (exit status, stdout, stderr)."""
    try:
        status = script.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def start(out, *arguments, **options):
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def started_writing(folder):
    """Wait until a run has written some files under `folder`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if sum(1 for _ in folder.glob(".*.making-*/new/train/*/*.jpg")) > 5:
            return
        time.sleep(0.01)
    raise AssertionError("the run wrote nothing")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_beside(out):
    return [path.name for path in out.parent.iterdir() if path not in (out, out.parent / f".{out.name}.lock")]


def test_same_bytes_twice_and_with_other_thread_counts(script, capsys, tmp_path):
    for name, jobs in (("a", 1), ("b", 2), ("c", 5)):
        status, out, err = run(script, capsys, *SMALL, "--out", tmp_path / name, "--jobs", jobs)
        assert (status, err) == (0, "") and out.count("\n") == 1
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    run(script, capsys, *SMALL, "--out", tmp_path / "d", "--seed", 1)
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "d").keys()
    assert contents(tmp_path / "a") != contents(tmp_path / "d")


def test_global_random_state_plays_no_part(script, capsys, tmp_path):
    before = np.random.get_state()[1].copy()
    run(script, capsys, *SMALL, "--out", tmp_path / "a")
    assert (np.random.get_state()[1] == before).all()


def test_layout_and_manifest(script, capsys, tmp_path):
    run(script, capsys, "--size", "64x40", "--count", 3, "--seed", 7, "--out", tmp_path / "set")
    manifest = json.loads((tmp_path / "set/manifest.json").read_text())
    assert manifest["count"] == {"train": 3, "val": 1} and manifest["size"] == [64, 40] and manifest["seed"] == 7
    files = sorted((tmp_path / "set").rglob("*.jpg"))
    assert len(files) == 15 * 4 and manifest["bytes"] == sum(path.stat().st_size for path in files)
    assert {path.relative_to(tmp_path / "set").parts[0] for path in files} == {"train", "val"}
    assert all(Image.open(path).size == (64, 40) and Image.open(path).mode == "RGB" for path in files)
    assert {"numpy", "pillow", "scikit-image", "scikit-learn", "libjpeg"} == set(manifest["versions"])


@pytest.mark.parametrize("patch", [(500, 375), (100, 300), (2000, 16), (16, 2000)])
def test_train_and_val_share_no_pixel(script, patch):
    for name in script.PHOTOS:
        size = script.load_photo(name).size
        boxes = {
            split: [script.crop_box(size, split, patch, np.random.default_rng([3, i])) for i in range(200)]
            for split in ("train", "val")
        }
        for left, top, right, bottom in boxes["train"] + boxes["val"]:
            assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        assert max(box[2] for box in boxes["train"]) <= min(box[0] for box in boxes["val"])


def test_the_boxes_tested_are_the_boxes_cut(script):
    photo = Image.new("RGB", (400, 300), "white")
    photo.paste("black", (int(400 * script.SPLIT_AT), 0, 400, 300))
    for split, dark in (("train", False), ("val", True)):
        for index in range(5):
            patch = script.patch_bytes(photo, split, 0, index, (64, 48), 0)
            level = np.asarray(Image.open(io.BytesIO(patch)), dtype=float).mean()
            assert level < 20 if dark else level > 235


def test_second_run_does_nothing(script, capsys, tmp_path):
    out = tmp_path / "set"
    run(script, capsys, *SMALL, "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, text, err = run(script, capsys, *SMALL, "--out", out)
    assert status == 0 and "already there" in text and text.count("\n") == 1 and err == ""
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_other_parameters_need_force(script, capsys, tmp_path):
    out = tmp_path / "set"
    run(script, capsys, *SMALL, "--out", out)
    before = contents(out)
    status, _, err = run(script, capsys, *SMALL, "--out", out, "--seed", 5)
    assert status == 1 and "another seed" in err and "--force" in err and err.count("\n") == 1
    assert contents(out) == before
    status, _, err = run(script, capsys, *SMALL, "--out", out, "--seed", 5, "--force")
    assert status == 0 and json.loads((out / "manifest.json").read_text())["seed"] == 5
    assert left_beside(out) == []


@pytest.mark.parametrize("damage", ["deleted", "truncated", "changed"])
def test_damaged_set_is_made_again(script, capsys, tmp_path, damage):
    out = tmp_path / "set"
    run(script, capsys, *SMALL, "--out", out)
    before = contents(out)
    victim = out / "train/brick/0001.jpg"
    good = victim.read_bytes()
    if damage == "deleted":
        victim.unlink()
    else:
        victim.write_bytes(good[:-100] if damage == "truncated" else good[:300] + b"\0" + good[301:])
    assert run(script, capsys, *SMALL, "--out", out)[0] == 0
    assert contents(out) == before


@pytest.mark.parametrize("kind", ["no manifest", "garbled", "someone's manifest", "a file"])
def test_never_deletes_what_it_did_not_make(script, capsys, tmp_path, kind):
    out = tmp_path / "set"
    if kind == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
        if kind != "no manifest":
            (out / "manifest.json").write_text('{"files": 3}' if kind == "someone's manifest" else '{"format')
    for force in ([], ["--force"]):
        status, _, err = run(script, capsys, *SMALL, "--out", out, *force)
        assert status == 1 and err.count("\n") == 1 and str(out) in err
    assert (out if kind == "a file" else out / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("extra", ["notes.txt", "train/brick/mine.jpg", "train/mine/0000.jpg"])
def test_force_spares_a_foreign_file_in_a_set(script, capsys, tmp_path, extra):
    out = tmp_path / "set"
    run(script, capsys, *SMALL, "--out", out)
    (out / extra).parent.mkdir(exist_ok=True)
    (out / extra).write_text("mine")
    status, _, err = run(script, capsys, *SMALL, "--out", out, "--seed", 5, "--force")
    assert status == 1 and extra.split("/0")[0] in err and (out / extra).read_text() == "mine"


def test_a_link_inside_a_set_is_never_followed(script, capsys, tmp_path):
    out, mine = tmp_path / "set", tmp_path / "mine"
    run(script, capsys, *SMALL, "--out", out)
    shutil.copytree(out / "val", mine)
    shutil.rmtree(out / "val")
    (out / "val").symlink_to(mine)
    assert run(script, capsys, *SMALL, "--out", out, "--force")[0] == 1
    assert len(list(mine.rglob("*.jpg"))) == 15


@pytest.mark.parametrize(
    "wrong",
    [
        ["--count", "0"], ["--count", "-3"], ["--count", "two"], ["--count", "100000"], ["--size", "500"],
        ["--size", "500x"], ["--size", "0x10"], ["--size", "99999x99999"], ["--size", "-5x5"], ["--seed", "-1"],
        ["--seed", "1.5"], ["--jobs", "0"], ["--frce"], ["train"],
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(script, capsys, tmp_path, wrong):
    status, out, err = run(script, capsys, "--out", tmp_path / "set", *wrong)
    assert status == 2 and out == "" and err.count("\n") == 1 and "--help" in err
    assert list(tmp_path.iterdir()) == []


def test_missing_photograph_is_named(script, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(script.PHOTOS, "rocket", ("skimage", "data/gone.jpg"))
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "set")
    assert status == 1 and "gone.jpg" in err and "pip install" in err and err.count("\n") == 1
    assert left_beside(tmp_path / "set") == []


def test_only_photographs_inside_the_wheels(script):
    for name in script.PHOTOS:
        assert "site-packages" in str(script.photo_path(name)) or script.photo_path(name).is_file()
    assert "pooch" not in SCRIPT.read_text() and "import skimage" not in SCRIPT.read_text()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(tmp_path, signum):
    out = tmp_path / "set"
    process = start(out, *LONG)
    started_writing(tmp_path)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and "interrupted" in err
    assert not out.exists() and left_beside(out) == []


def test_killed_run_leaves_nothing_finished_and_the_next_cleans(script, capsys, tmp_path):
    out = tmp_path / "set"
    process = start(out, *LONG)
    started_writing(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists() and left_beside(out) != []
    assert run(script, capsys, *SMALL, "--out", out)[0] == 0
    assert left_beside(out) == [] and (out / "manifest.json").is_file()


def test_two_runs_at_once(script, capsys, tmp_path):
    out = tmp_path / "set"
    processes = [start(out, "--size", "200x150", "--count", "8") for _ in range(3)]
    texts = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    assert sum(text.splitlines()[-1].startswith("made") for text, _ in texts) == 1
    run(script, capsys, "--size", "200x150", "--count", "8", "--out", tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")


def test_full_disk_is_one_line(tmp_path):
    out = tmp_path / "set"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file may pass 1000 bytes: EFBIG

    process = start(out, "--size", "200x150", "--count", "1", preexec_fn=limit)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and "free some space" in err
    assert not out.exists() and left_beside(out) == []


def test_unwritable_folder_is_one_line(script, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "file" / "set")
    assert status == 1 and err.count("\n") == 1 and "--out" in err

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # file rights do not stop root
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "set")
    assert status == 1 and err.count("\n") == 1 and "write to" in err


def test_a_place_that_cannot_be_a_folder_is_named(script, capsys, tmp_path):
    file = tmp_path / "file.py"
    file.write_text("")
    for out, words in (
        (file, f"{file} is not a folder"),
        (file / "x", f"{file} is not a folder"),
        ("~nosuchuser/x", "home directory"),
        ("/proc/x", "no file can be made in /proc"),
    ):
        status, _, err = run(script, capsys, *SMALL, "--out", out)
        assert status == 1 and err.count("\n") == 1 and words in err and "--out" in err


def test_a_damaged_set_says_how_it_was_made(script, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    run(script, capsys, *SMALL, "--seed", 3, "--out", tmp_path / "photo_patches")
    data.verify()
    (tmp_path / "photo_patches/train/cat/0001.jpg").write_bytes(b"")
    for look in (data.photo_patches, data.verify):
        with pytest.raises(
            data.DataDamaged, match="train/cat/0001.jpg is empty.*--count 2 --size 48x36 --seed 3 --force"
        ):
            look()
    again = data.status()[0][2].split("--count")[1].split()
    assert run(script, capsys, "--count", *again, "--out", tmp_path / "photo_patches")[0] == 0
    assert data.status()[0][1] == "ready"


def test_output_that_nobody_can_read_is_no_failure(tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, str(SCRIPT), *SMALL, "--out", str(tmp_path / "set")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "set/manifest.json").is_file()


def test_works_without_locks(script, capsys, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run(script, capsys, *SMALL, "--out", tmp_path / "set")[0] == 0


def test_default_folder_follows_the_variable(tmp_path):
    environment = {**os.environ, "DLOJZ_DATA": str(tmp_path / "elsewhere")}
    with contextlib.chdir(tmp_path):
        subprocess.run([sys.executable, str(SCRIPT), *SMALL], env=environment, check=True, capture_output=True)
    assert (tmp_path / "elsewhere/photo_patches/manifest.json").is_file()
