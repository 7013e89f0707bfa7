"""The command that pretrains the small network, and the network as a notebook loads it."""

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlojz_tp import data
from dlojz_tp.data import made as made_sets
from dlojz_tp.data import pretraining

SCRIPT = Path(__file__).resolve().parents[1] / "data_scripts" / "make_pretrained.py"
SMALL = ["--epochs", "1"]
FILE = pretraining.FILES[0]


@pytest.fixture(scope="module")
def script():
    """The command with a tenth of its images."""
    spec = importlib.util.spec_from_file_location("make_pretrained", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TRAIN, module.VAL = 40, 10
    return module


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """A folder of data sets with a network that has hardly learned, made once: for looking only."""
    root = tmp_path_factory.mktemp("data")
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert script.main([*SMALL, "--out", str(root / "pretrained")]) == 0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    return root


@pytest.fixture
def copy(made, tmp_path, monkeypatch):
    """The folder of a copy of the set, to be damaged."""
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    return Path(shutil.copytree(made / "pretrained", tmp_path / "pretrained"))


def state():
    return {name: (state, detail) for name, state, detail in data.status()}["pretrained"]


def test_same_arguments_same_bytes_whatever_the_threads_and_another_seed_differs(script, made, tmp_path):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(5)
        assert script.main([*SMALL, "--out", str(tmp_path / "again")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert script.main([*SMALL, "--seed", "1", "--out", str(tmp_path / "other")]) == 0
    for name in (FILE, made_sets.NAME):
        assert (tmp_path / "again" / name).read_bytes() == (made / "pretrained" / name).read_bytes()
    assert (tmp_path / "other" / FILE).read_bytes() != (made / "pretrained" / FILE).read_bytes()


def test_network_classes_and_accuracy(copy):
    found, again = data.pretrained(), data.pretrained()
    manifest = json.loads((copy / made_sets.NAME).read_text())
    assert len(found.classes) == 10 and not {*found.classes} & {*pretraining.NEW}
    assert found.accuracy == manifest["accuracy"]
    assert manifest["versions"]["torch"] == importlib.metadata.version("torch")
    assert not found.model.training and found.model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    torch.nn.init.zeros_(found.model[0].weight)
    assert again.model[0].weight.abs().max() > 0  # a network of its own
    assert found.version in repr(found) and len(repr(found)) < 200
    assert state() == ("ready", f"a network for 10 classes, 1 epochs, accuracy {found.accuracy:.3f} in {copy}")
    assert data.verify("pretrained") == ""
    (copy / "mine.txt").write_text("mine")
    assert "mine.txt" in data.verify("pretrained")


def test_lights_are_each_image_s_own_and_repeat_with_the_generator():
    images = torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = images.expand(300, -1, -1, -1)
    lit, again = (data.under_lights(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(lit, again) and lit.dtype == torch.float32 and lit.abs().max() < 2.3
    means = lit.mean((2, 3))
    assert means.std(0).min() > 0.3 and means.mean(0).abs().max() < 0.15
    assert torch.corrcoef(means.T)[0, 1].abs() < 0.2  # a colour's light says nothing of the others'


@pytest.mark.parametrize("damage", ["deleted", "cut short", "changed", "other weights"])
def test_damage_is_one_line_with_the_command_that_repairs(copy, damage):
    path = copy / FILE
    good = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    elif damage == "other weights":  # whole, but not this network's
        from safetensors.torch import save

        path.write_bytes(save({"0.weight": torch.zeros(3)}))
        manifest = json.loads((copy / made_sets.NAME).read_text()) | made_sets.sums(copy, pretraining.FILES)
        (copy / made_sets.NAME).write_text(json.dumps(manifest | {made_sets.SEAL: made_sets.seal(manifest)}))
    else:
        path.write_bytes({"cut short": good[:-7], "changed": good[:-1] + bytes([good[-1] ^ 1])}[damage])
    by_bytes = damage != "other weights"  # other weights are found only when they are loaded
    for look in (data.pretrained, lambda: data.verify("pretrained"))[: 1 + by_bytes]:
        with pytest.raises(data.DataDamaged) as error:
            look()
        line = str(error.value)
        assert "\n" not in line and FILE in line and line.endswith("--epochs 1 --force")
    assert not by_bytes or state() == ("damaged", line)


def test_missing_set_gives_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path / "new"))
    with pytest.raises(data.DataMissing, match=r"make_pretrained\.py"):
        data.pretrained()


@pytest.mark.parametrize("name", ["safetensors", "scikit-image"])
def test_missing_library_is_one_line(script, capsys, tmp_path, monkeypatch, name):
    version = importlib.metadata.version

    def without(asked):
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(asked)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert script.main([*SMALL, "--out", str(tmp_path / "new")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith(f"pip install {name}\n") and list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_one_line_and_status_2(tmp_path):
    command = [sys.executable, str(SCRIPT), "--epochs", "0", "--out", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and "--help" in done.stderr
    assert list(tmp_path.iterdir()) == []
