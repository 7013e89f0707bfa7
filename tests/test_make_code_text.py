"""The command that makes the text: same bytes, no file in both parts, whole or not at all, and clear refusals."""

import collections
import fcntl
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_code_text.py"
SMALL = ["--megabytes", "0.2", "--vocab", "300"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_code_text", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """A small set, made once: for looking only."""
    out = tmp_path_factory.mktemp("made") / "set"
    assert script.main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the small set, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "set"))


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
    """Wait until a run has begun its work under `folder`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if list(folder.glob(".*.making-*/new")):
            return
        time.sleep(0.005)
    raise AssertionError("the run began nothing")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_beside(out):
    return [path.name for path in out.parent.iterdir() if path not in (out, out.parent / f".{out.name}.lock")]


def parts(out):
    """The files of both parts, decoded, and the tokenizer."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = {}
    for name in ("train", "val"):
        ids = np.load(out / f"{name}.npy")
        assert ids.dtype == np.uint16 and ids.ndim == 1 and ids[-1] == end
        pieces = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
        texts[name] = [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]
    return texts, tokenizer


def library_files(script):
    library = Path(sysconfig.get_path("stdlib"))
    return {(library / path).read_text("utf-8-sig") for path in script.source_files()}


def test_same_bytes_in_another_process_with_another_hash_seed_and_thread_count(made, tmp_path):
    for name, variables in (("a", {"RAYON_NUM_THREADS": "1"}), ("b", {"TOKENIZERS_PARALLELISM": "false"})):
        process = start(tmp_path / name, *SMALL, env={**os.environ, "PYTHONHASHSEED": "7", **variables})
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "") and out.startswith("made") and out.count("\n") == 1
        assert contents(tmp_path / name) == contents(made)


def test_another_seed_draws_other_files(script, capsys, made, tmp_path):
    assert run(script, capsys, *SMALL, "--seed", 1, "--out", tmp_path / "set")[0] == 0
    first, second = (set(parts(out)[0]["train"]) for out in (made, tmp_path / "set"))
    assert first != second and contents(tmp_path / "set").keys() == contents(made).keys()


def test_whole_files_of_the_library_and_none_in_both_parts(script, made):
    texts, _ = parts(made)
    assert not set(texts["train"]) & set(texts["val"])
    everything = texts["train"] + texts["val"]
    assert len(set(everything)) == len(everything) and set(everything) <= library_files(script)


def test_manifest_counts_what_is_there(made):
    manifest, (texts, tokenizer) = json.loads((made / "manifest.json").read_text()), parts(made)
    assert (manifest["megabytes"], manifest["vocab"], manifest["seed"]) == (0.2, 300, 0)
    assert manifest["files"] == {name: len(files) for name, files in texts.items()}
    assert manifest["tokens"] == {name: len(np.load(made / f"{name}.npy")) for name in texts}
    sizes = {name: sum(len(text.encode()) for text in files) for name, files in texts.items()}
    assert manifest["text_bytes"] == sizes and 150_000 < sum(sizes.values()) <= 200_000
    assert 0.01 < sizes["val"] / sum(sizes.values()) <= 0.05
    assert manifest["vocab_size"] == tokenizer.get_vocab_size() == 300
    assert manifest["end_of_file"] == tokenizer.token_to_id("<|endoftext|>")
    assert manifest["bytes"] == sum(len(content) for name, content in contents(made).items() if name != "manifest.json")
    assert set(manifest["versions"]) == {"python", "numpy", "tokenizers"}
    assert str(Path.home()) not in json.dumps(manifest) and sys.prefix not in json.dumps(manifest)


def test_tokenizer_is_trained_on_train_alone(script, made, monkeypatch, tmp_path):
    texts, _ = parts(made)
    monkeypatch.setattr(script, "split", lambda _: (texts["train"], ["print('another val')\n"]))
    assert script.main([*SMALL, "--out", str(tmp_path / "set")]) == 0
    assert (tmp_path / "set/tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    assert (tmp_path / "set/train.npy").read_bytes() == (made / "train.npy").read_bytes()


def test_source_is_the_library_and_neither_tests_nor_what_is_installed(script):
    files = script.source_files()
    parts_seen = collections.Counter(part for path in files for part in path.with_suffix("").parts)
    assert len(files) > 300 and parts_seen["argparse"] and parts_seen["asyncio"] > 10
    for name in ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "encodings"):
        assert not parts_seen[name]
    assert not [path for path in files if path.name.startswith("_sysconfig") or "config-" in str(path)]
    assert files == sorted(files) and all(path.suffix == ".py" and not path.is_absolute() for path in files)


@pytest.mark.parametrize("sizes", [[10] * 40, [900, 50, 50], [500, 500], [1000, 1], [3, 3, 3]])
def test_val_is_about_its_share_and_never_empty(script, sizes):
    texts = [chr(97 + index % 26) * size for index, size in enumerate(sizes)]
    train, val = script.split(texts)
    assert train and val and sorted(train + val) == sorted(texts)
    assert sum(map(len, val)) <= 0.05 * sum(sizes) or len(val) == 1


def test_a_library_with_odd_files(script, capsys, monkeypatch, tmp_path):
    library = tmp_path / "lib"
    (library / "json" / "tests").mkdir(parents=True)
    (library / "empty.py").write_text(" \n")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    (library / "odd-name.py").write_text("x = 1\n")
    (library / "json/tests/case.py").write_text("y = 1\n")
    (library / "linked.py").symlink_to(SCRIPT)
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(library))
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "set")
    assert status == 1 and err.count("\n") == 1 and str(library) in err and left_beside(tmp_path / "set") == ["lib"]
    (library / "a.py").write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    (library / "b.py").write_text("b = 'é'\n" * 20)
    (library / "c.py").write_text("b = 'é'\n" * 20)  # the same again
    assert run(script, capsys, *SMALL, "--out", tmp_path / "set")[0] == 0
    assert parts(tmp_path / "set")[0] == {"train": ["b = 'é'\n" * 20], "val": ["a = 1\n"]}
    shutil.rmtree(library)
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "other")
    assert status == 1 and err.count("\n") == 1 and str(library) in err


def test_second_run_does_nothing(script, capsys, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    status, text, err = run(script, capsys, *SMALL, "--out", copy)
    assert status == 0 and "already there" in text and text.count("\n") == 1 and err == ""
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_other_parameters_need_force(script, capsys, copy):
    before = contents(copy)
    status, _, err = run(script, capsys, *SMALL, "--vocab", 310, "--out", copy)
    assert status == 1 and "another vocab" in err and "--force" in err and err.count("\n") == 1
    assert contents(copy) == before
    assert run(script, capsys, *SMALL, "--vocab", 310, "--out", copy, "--force")[0] == 0
    assert json.loads((copy / "manifest.json").read_text())["vocab_size"] == 310 and left_beside(copy) == []


@pytest.mark.parametrize("damage", ["deleted", "truncated", "changed"])
def test_damaged_set_is_made_again(script, capsys, copy, made, damage):
    good = (copy / "train.npy").read_bytes()
    if damage == "deleted":
        (copy / "train.npy").unlink()
    else:
        (copy / "train.npy").write_bytes(good[:-100] if damage == "truncated" else good[:300] + b"?" + good[301:])
    assert run(script, capsys, *SMALL, "--out", copy)[0] == 0
    assert contents(copy) == contents(made)


@pytest.mark.parametrize("kind", ["no manifest", "garbled", "the photo patches'"])
def test_never_deletes_what_it_did_not_make(script, capsys, tmp_path, kind):
    out = tmp_path / "set"
    out.mkdir()
    (out / "train.npy").write_text("mine")
    if kind != "no manifest":
        photos = '{"format": 1, "made_by": "make_photo_patches", "sha256": ""}'
        (out / "manifest.json").write_text('{"format' if kind == "garbled" else photos)
    for force in ([], ["--force"]):
        status, _, err = run(script, capsys, *SMALL, "--out", out, *force)
        assert status == 1 and err.count("\n") == 1 and str(out) in err
    assert (out / "train.npy").read_text() == "mine"


def test_force_spares_a_foreign_file_in_a_set(script, capsys, copy):
    (copy / "model.pt").write_text("mine")
    status, _, err = run(script, capsys, *SMALL, "--seed", 5, "--out", copy, "--force")
    assert status == 1 and "model.pt" in err and (copy / "model.pt").read_text() == "mine"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--megabytes", "0"], ["--megabytes", "0.01"], ["--megabytes", "-4"], ["--megabytes", "nan"],
        ["--megabytes", "1e3"], ["--megabytes", "four"], ["--megabytes", "101"], ["--vocab", "256"],
        ["--vocab", "65537"], ["--vocab", "2048.0"], ["--seed", "-1"], ["--frce"], ["train"],
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(script, capsys, tmp_path, wrong):
    status, out, err = run(script, capsys, "--out", tmp_path / "set", *wrong)
    assert status == 2 and out == "" and err.count("\n") == 1 and "--help" in err and "make_code_text" in err
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_one_line(script, capsys, tmp_path, monkeypatch):
    def missing(name):
        raise script.importlib.metadata.PackageNotFoundError("tokenizers")

    monkeypatch.setattr(script.importlib.metadata, "version", missing)
    status, _, err = run(script, capsys, *SMALL, "--out", tmp_path / "set")
    assert status == 1 and err.count("\n") == 1 and "pip install tokenizers" in err and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(tmp_path, signum):
    out = tmp_path / "set"
    process = start(out)
    started_writing(tmp_path)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and "interrupted" in err
    assert not out.exists() and left_beside(out) == []


def test_interrupted_replacement_keeps_the_set(script, capsys, copy, made, monkeypatch):
    real = Path.rename

    def stopped(self, target):
        if self.name == "new":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", stopped)
    assert run(script, capsys, *SMALL, "--seed", 5, "--out", copy, "--force")[0] == 1
    assert contents(copy) == contents(made) and left_beside(copy) == []


def test_killed_run_leaves_nothing_finished_and_the_next_cleans(script, capsys, tmp_path):
    out = tmp_path / "set"
    process = start(out)
    started_writing(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists() and left_beside(out) != []
    assert run(script, capsys, *SMALL, "--out", out)[0] == 0
    assert left_beside(out) == [] and (out / "manifest.json").is_file()


def test_runs_at_once(made, tmp_path):
    out = tmp_path / "set"
    processes = [start(out, *SMALL) for _ in range(3)]
    texts = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    assert sum(text.splitlines()[-1].startswith("made") for text, _ in texts) == 1
    assert contents(out) == contents(made)


def test_full_disk_is_one_line(tmp_path):
    out = tmp_path / "set"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file may pass 1000 bytes: EFBIG

    process = start(out, *SMALL, preexec_fn=limit)
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
    assert status == 1 and err.count("\n") == 1 and "write to" in err and "make_code_text: " in err


def test_works_without_locks(script, capsys, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run(script, capsys, *SMALL, "--out", tmp_path / "set")[0] == 0


def test_default_folder_follows_the_variable(script, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "elsewhere"))
    assert run(script, capsys, *SMALL)[0] == 0
    assert (tmp_path / "elsewhere/code_text/manifest.json").is_file()
