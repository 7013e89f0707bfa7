"""What a race reads and logs, and the network that it trains."""

import json
import math

import pytest
import torch

from dlojz_tp import data
from dlojz_tp.data.cells import PhotoCells
from dlojz_tp.models import small_resnet
from dlojz_tp.training.race_data import AT_ONCE, MEAN, STD, Log, Photos
from tests.test_data_cifar import cifar  # noqa: F401  (a fixture)


def photos(train=40, validation=300):
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (n, 3, 32, 32), generator=generator).byte() for n in (train, validation)]
    labels = [torch.arange(n) % 5 for n in (train, validation)]
    return Photos(*zip(images, labels)), images, labels


def test_a_log_is_lines_that_any_reader_of_json_takes():
    times = iter((0.5, 1.0, 2.5, 4.0))
    log = Log(lambda: next(times))
    log("run_start")
    log("train_read", [3, 1], epoch=2)
    log("result", math.inf, worst=[math.nan, -math.inf])
    log("run_stop", torch.tensor(1))

    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    lines = str(log).splitlines()
    assert len(lines) == 4 and all(line.startswith(":::MLLOG ") for line in lines)
    found = [json.loads(line.removeprefix(":::MLLOG "), parse_constant=strict) for line in lines]
    assert [event["time_ms"] for event in found] == [500, 1000, 2500, 4000]
    assert [event["event_type"] for event in found] == ["INTERVAL_START", *["POINT_IN_TIME"] * 2, "INTERVAL_END"]
    assert all(event.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for event in found)
    assert found[1] | {"time_ms": 0} == log.events[1] | {"time_ms": 0} and found[1]["metadata"] == {"epoch": 2}
    assert (found[2]["value"], found[2]["metadata"]) == ("inf", {"worst": ["nan", "-inf"]})
    assert log.events[2]["value"] == math.inf  # the events themselves keep their values


def test_readings_are_numbered_normalised_and_logged():
    some, images, labels = photos()
    assert (some.train, some.validation, some.classes) == (range(40), range(40, 340), 5) and len(repr(some)) < 120
    some.log = Log()
    for numbers in ([7, 3, 3], torch.tensor([7, 3, 3]), torch.tensor([7, 3, 3], dtype=torch.uint8)):
        x, y = some.read(numbers)
        # as torchvision's transforms of ImageNet have it
        mean, std = (torch.tensor(c).view(3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        due = (images[0][[7, 3, 3]] / 255 - mean) / std
        assert x.dtype == torch.float32 and (x - due).abs().max() < 2e-3 and y.tolist() == labels[0][[7, 3, 3]].tolist()
    assert torch.equal(some.read(some.validation[:2])[0], some.normalised(images[1][:2]))
    assert [(event["key"], event["value"]) for event in some.log.events] == [
        *[("train_read", [7, 3, 3])] * 3, ("train_read", [40, 41]),
    ]  # fmt: skip
    shape = (3, 40, 32)
    flat = torch.tensor(MEAN).round().byte().view(3, 1, 1).expand(shape)
    assert some.normalised(flat).shape == shape and some.normalised(flat).abs().max() < 0.51 / min(STD)


@pytest.mark.parametrize(
    "numbers", [[-1], [340], [0.0], [[1, 2]], 3, [], torch.arange(340) > 337, torch.tensor([1.0])]
)  # fmt: skip
def test_what_is_no_number_of_an_image_is_refused_and_not_logged(numbers):
    """-1 and a mask would read images under another name than the log has."""
    some = photos()[0]
    with pytest.raises(IndexError, match="numbered from 0 to 339"):
        some.read(numbers)
    assert some.log.events == []


def test_an_evaluation_reads_every_validation_image_once_and_is_logged():
    some, images, labels = photos()
    seen = []

    class Model(torch.nn.Module):
        def forward(self, x):
            assert not torch.is_grad_enabled() and self.training
            place = sum(map(len, seen))
            seen.append(x)
            told = labels[1][place : place + len(x)].clone()
            told[:: len(x)] += 1  # one wrong in each batch
            return torch.nn.functional.one_hot(told, 6).float()

    accuracy = some.evaluate(Model())
    assert torch.equal(torch.cat(seen), some.normalised(images[1])) and len(seen) == math.ceil(300 / AT_ONCE)
    assert accuracy == (300 - len(seen)) / 300 and isinstance(accuracy, float)
    assert [(event["key"], event["value"]) for event in some.log.events] == [
        ("eval_read", list(range(40, 340))), ("eval_accuracy", accuracy),
    ]  # fmt: skip


def test_the_squares_of_the_photo_cells():
    generator = torch.Generator().manual_seed(0)
    train, val = (torch.randint(0, 256, (n, 3, 32, 32), generator=generator).byte() for n in (6, 3))
    cells = PhotoCells(train, torch.arange(6) // 2, val, torch.arange(3), [], torch.empty(0), ("a", "b", "c"), "0")
    some = Photos.of(cells)
    assert (some.train, some.validation, some.classes) == (range(6), range(6, 9), 3)
    x, y = some.read([5, 6])
    assert torch.equal(x, some.normalised(torch.stack([train[5], val[0]]))) and y.tolist() == [2, 0]


def test_cifar10_where_it_is(cifar, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.delenv("DSDIR")
    monkeypatch.delenv("DLOJZ_CIFAR10", raising=False)
    assert Photos.cifar10() is None
    monkeypatch.setenv("DLOJZ_CIFAR10", str(cifar.parent))
    some, due = Photos.cifar10(), data.cifar10()
    assert (some.train, some.validation, some.classes) == (range(20), range(20, 24), 10)
    x, y = some.read([0, 20])
    assert torch.equal(x, some.normalised(torch.stack([due.train_x[0], due.val_x[0]])))
    assert y.tolist() == [due.train_y[0], due.val_y[0]]
    monkeypatch.setenv("DLOJZ_CIFAR10", str(tmp_path / "nowhere"))  # named, so never passed over in silence
    with pytest.raises(data.DataMissing, match="nowhere"):
        Photos.cifar10()


def test_small_resnet_takes_rectangles():
    model = small_resnet(8, 15).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 20_119
    for shape in ((32, 32), (64, 32), (32, 40), (8, 8)):
        features = []
        pool = next(module for module in model if isinstance(module, torch.nn.AdaptiveAvgPool2d))
        handle = pool.register_forward_pre_hook(lambda module, inputs, seen=features: seen.append(inputs[0].shape))
        assert model(torch.randn(2, 3, *shape)).shape == (2, 15)
        handle.remove()
        assert features == [(2, 32, shape[0] // 8, shape[1] // 8)]


def test_small_resnet_learns():
    """Every parameter gets a gradient, and a few steps lower the loss."""
    torch.manual_seed(0)
    model, x, y = small_resnet(8, 3), torch.randn(12, 3, 16, 24), torch.arange(12) % 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(x), y))
        losses[-1].backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 2
