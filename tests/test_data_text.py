"""The code text as a notebook loads it: tokens, text and back, batches, and one line where the set is not whole."""

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlojz_tp import data
from dlojz_tp.data import made as made_sets

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_code_text.py"
SMALL = ["--megabytes", "0.2", "--vocab", "300"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of data sets with a small code text, made once: for looking only."""
    spec = importlib.util.spec_from_file_location("make_code_text", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    root = tmp_path_factory.mktemp("data")
    assert script.main([*SMALL, "--out", str(root / "code_text")]) == 0
    return root


@pytest.fixture(autouse=True)
def here(made, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(made))


@pytest.fixture
def copy(made, tmp_path, monkeypatch):
    """The folder of a copy of the set, to be damaged."""
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    return Path(shutil.copytree(made / "code_text", tmp_path / "code_text"))


def state():
    return {name: (state, detail) for name, state, detail in data.status()}["code_text"]


def test_tokens_are_one_long_row_of_int64(made):
    text = data.code_text()
    assert text.name == "code_text" and text.root == made / "code_text" and text.vocab_size == 300
    for tokens in (text.train, text.val):
        assert tokens.dtype == torch.int64 and tokens.ndim == 1 and len(tokens) > 1000
        assert tokens.min() >= 0 and tokens.max() < text.vocab_size and tokens[-1] == text.end_of_file
    assert len(text.train) > 10 * len(text.val)
    tokens = json.loads((made / "code_text/manifest.json").read_text())["tokens"]
    assert tokens == {"train": len(text.train), "val": len(text.val)}
    assert len(repr(text)) < 300
    with pytest.raises(AttributeError):
        text.name = "other"


def test_tensors_are_the_callers_own():
    text = data.code_text()
    text.train.zero_()
    assert data.code_text().train.any()


@pytest.mark.parametrize(
    "sample",
    ["", " ", "def f(x):\n\treturn x  # twice\r\n\n", "  two  spaces ", "été 🙂 日本\x00", "<|endoftext|>", "\ufeffa"],
)
def test_any_text_there_and_back(sample):
    text = data.code_text()
    ids = text.encode(sample)
    assert isinstance(ids, list) and all(type(one) is int and 0 <= one < text.vocab_size for one in ids)
    assert text.decode(ids) == text.decode(torch.tensor(ids, dtype=torch.int64)) == text.decode(tuple(ids)) == sample


def test_tokens_are_those_of_encode():
    text = data.code_text()
    end = (text.val == text.end_of_file).nonzero()[0].item()
    source = text.decode(text.val[:end])
    assert "import" in source or "def " in source
    assert text.encode(source) == text.val[:end].tolist()
    assert len(text.encode(source)) < len(source)


def test_loaded_set_needs_no_file_and_can_be_sent_to_another_process(copy):
    text = data.code_text()
    shutil.rmtree(copy)
    for _ in range(2):  # the second time with the tokenizer already built
        text = pickle.loads(pickle.dumps(text))
        assert text.decode(text.encode("for i in range(3): pass")) == "for i in range(3): pass"


def test_without_the_library_tokens_still_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = data.code_text()
    with pytest.raises(data.DataMissing, match="pip install tokenizers"):
        text.encode("x")


def test_missing_set_gives_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "new"))
    with pytest.raises(data.DataMissing) as error:
        data.code_text()
    line = str(error.value)
    assert not isinstance(error.value, data.DataDamaged) and "\n" not in line and state() == ("missing", line)
    command = line.split("Make it: ")[1]
    subprocess.run(f"{command} {' '.join(SMALL)}", shell=True, check=True, capture_output=True)
    assert data.code_text().vocab_size == 300 and state()[0] == "ready"


@pytest.mark.parametrize("name", ["train.npy", "val.npy", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut short", "changed"])
def test_damaged_file_is_told_with_the_command_that_repairs(copy, name, damage):
    path = copy / name
    good = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "cut short": good[:-7], "changed": good[:200] + b"?" + good[201:]}[damage])
    for look in (data.code_text, lambda: data.verify("code_text")):
        with pytest.raises(data.DataDamaged) as error:
            look()
        line = str(error.value)
        assert "\n" not in line and str(copy) in line and line.endswith("--megabytes 0.2 --vocab 300 --force")
    assert state() == ("damaged", line)


def test_the_command_given_does_repair(copy):
    before = data.code_text().train
    (copy / "train.npy").write_bytes(b"")
    subprocess.run(state()[1].split("Make it again: ")[1], shell=True, check=True, capture_output=True)
    data.verify("code_text")
    assert torch.equal(data.code_text().train, before)


@pytest.mark.parametrize("damage", ["deleted", "garbled", "other format", "no counts", "photos", "counts are text"])
def test_damaged_manifest_is_told(copy, damage):
    path = copy / made_sets.NAME
    manifest = json.loads(path.read_text())
    if damage == "deleted":
        path.unlink()
    elif damage == "garbled":
        path.write_text(path.read_text()[:100])
    else:
        changed = {
            "other format": {**manifest, "format": 99},
            "no counts": {key: value for key, value in manifest.items() if key != "tokens"},
            "photos": {**manifest, "made_by": "make_photo_patches"},
            "counts are text": {**manifest, "tokens": {"train": "1", "val": 2}},
        }
        path.write_text(json.dumps(changed[damage]))
    with pytest.raises(data.DataDamaged) as error:
        data.code_text()
    line = str(error.value)
    assert "\n" not in line and "make_code_text.py" in line and "rm -r" not in line
    assert ("Update the course" in line) == (damage == "other format")
    if damage == "garbled":  # the command alone would refuse: only the whole line repairs
        line = line.split("Make it again: ")[1]
        subprocess.run(f"{line} {' '.join(SMALL)}", shell=True, check=True, capture_output=True)
        data.verify("code_text")


def test_options_of_a_manifest_cannot_carry_a_command(copy):
    manifest = json.loads((copy / made_sets.NAME).read_text())
    del manifest[made_sets.SEAL]
    (copy / made_sets.NAME).write_text(json.dumps({**manifest, "vocab": "1; rm -r ~", "seed": [True, -1]}))
    (copy / "val.npy").unlink()
    assert state()[1].endswith("make_code_text.py --megabytes 0.2 --force")


def test_import_is_light():
    code = "import sys, dlojz_tp.data as d; d.status(); assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_batch_holds_windows_of_the_tokens():
    tokens = torch.arange(1000) * 3
    for seed in range(20):
        batch = data.batch_of_text(tokens, 5, 8, seed)
        assert batch.shape == (5, 8) and batch.dtype == torch.int64 and batch.is_contiguous()
        assert (batch.diff(dim=1) == 3).all()
        batch.zero_()
        assert tokens[1:].all()  # no view of the tokens


def test_draw_depends_on_the_seed_and_on_nothing_else():
    tokens = torch.arange(1000)
    torch.manual_seed(1)
    first = data.batch_of_text(tokens, 4, 8, seed=0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, data.batch_of_text(tokens, 4, 8, seed=0))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, data.batch_of_text(tokens, 4, 8, seed=1))


def test_every_window_can_be_drawn_and_none_beyond_the_end():
    tokens = torch.arange(6)
    starts = {row[0].item() for seed in range(40) for row in data.batch_of_text(tokens, 8, 4, seed)}
    assert starts == {0, 1, 2}
    assert data.batch_of_text(tokens, 2, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_type_and_device_of_the_tokens_are_kept_and_the_draw_is_the_same(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tokens = torch.arange(50, dtype=torch.int16)
    batch = data.batch_of_text(tokens.to(device), 2, 4)
    assert batch.dtype == torch.int16 and batch.device.type == device
    assert torch.equal(batch.cpu(), data.batch_of_text(tokens, 2, 4))


@pytest.mark.parametrize(
    ("shape", "batch_size", "length", "word"),
    [
        ((10,), 2, 11, "got 10"),
        ((0,), 2, 1, "got 0"),
        ((5, 5), 2, 2, "one dimension"),
        ((10,), 0, 2, "at least 1"),
        ((10,), 2, 0, "at least 1"),
    ],
)
def test_impossible_batches_are_refused(shape, batch_size, length, word):
    with pytest.raises(ValueError, match=word):
        data.batch_of_text(torch.zeros(shape, dtype=torch.int64), batch_size, length)
