"""CIFAR-10 from the standard pickles: both ages of them load, and nothing that they hold is run."""

import builtins
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from dlojz_tp import data


@pytest.fixture(autouse=True)
def no_centre(monkeypatch):
    for name in ("DLOJZ_CIFAR10", "DSDIR"):
        monkeypatch.delenv(name, raising=False)


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def py2_batch(pixels, labels):
    """Bytes of a batch as Python 2 and the numpy of its time wrote it: strings are byte strings."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\n" + b"(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    shape = b"(" + b"".join(b"J" + struct.pack("<i", side) for side in pixels.shape) + b"t"
    array += b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"]" + b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    folder = tmp_path / "store" / "CIFAR_10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels, labels = rng.integers(0, 256, (4, 3072), dtype=np.uint8), [index, 9, 0, 1]
        if index % 2:
            (folder / name).write_bytes(py2_batch(pixels, labels))
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=4))
    names = [f"class {index}".encode() for index in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}))
    monkeypatch.setenv("DSDIR", str(tmp_path / "store"))
    return folder


def test_cifar10_loads_both_pickle_ages(cifar, monkeypatch):
    found = data.cifar10()
    assert found.train_x.shape == (20, 3, 32, 32) and found.train_x.dtype == torch.uint8
    assert found.val_x.shape == (4, 3, 32, 32) and found.val_y.tolist() == [5, 9, 0, 1]
    assert found.train_y.dtype == torch.int64 and found.train_y.tolist()[:5] == [0, 9, 0, 1, 1]
    assert found.classes[3] == "class 3" and len(repr(found)) < 300
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, (4, 3072), dtype=np.uint8) for _ in range(2))
    assert (found.train_x[:4].numpy().reshape(4, -1) == first).all()
    assert (found.train_x[4:8].numpy().reshape(4, -1) == second).all()
    for folder in (cifar, cifar.parent):
        monkeypatch.setenv("DLOJZ_CIFAR10", str(folder))
        assert torch.equal(data.cifar10().train_x, found.train_x)


class Attack:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def _attacks(marker):
    yield Attack(os.system, f"touch {marker}")
    yield Attack(builtins.eval, f"open({str(marker)!r}, 'w').close()")
    yield Attack(builtins.exec, f"open({str(marker)!r}, 'w').close()")
    yield Attack(builtins.getattr, np.ndarray, "tofile")
    yield Attack(np.memmap, str(marker), "uint8", "w+", 0, (1,))
    yield Attack(np.ndarray, (1,), "uint8")


def test_cifar10_never_runs_what_a_pickle_holds(cifar, tmp_path):
    marker = tmp_path / "ran"
    for attack in _attacks(marker):
        (cifar / "data_batch_2").write_bytes(pickle.dumps({b"data": attack, b"labels": []}))
        with pytest.raises(data.DataDamaged) as error:
            data.cifar10()
        one_line(error, "data_batch_2")
        assert not marker.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "shape", "label", "list", "text"])
def test_cifar10_damaged(cifar, damage):
    victim = cifar / "data_batch_3"
    whole = victim.read_bytes()
    good = np.zeros((2, 3072), dtype=np.uint8)
    contents = {
        "cut": whole[:-200], "empty": b"", "text": b"hello", "list": pickle.dumps([1]),
        "shape": pickle.dumps({b"data": good[:, :100], b"labels": [0, 1]}),
        "label": pickle.dumps({b"data": good, b"labels": [0, 10]}),
    }  # fmt: skip
    victim.unlink() if damage == "gone" else victim.write_bytes(contents[damage])
    with pytest.raises(data.DataDamaged) as error:
        data.cifar10()
    one_line(error, "data_batch_3")


def test_cifar10_missing():
    with pytest.raises(data.DataMissing) as error:
        data.cifar10()
    one_line(error, "DLOJZ_CIFAR10")


def test_status_names_a_missing_file(cifar, monkeypatch):
    def state():
        return {name: (state, detail) for name, state, detail in data.status()}["cifar10"]

    assert state()[0] == "ready"
    (cifar / "test_batch").unlink()
    assert state()[0] == "damaged" and "test_batch" in state()[1]
    monkeypatch.delenv("DSDIR")
    assert state()[0] == "missing"
