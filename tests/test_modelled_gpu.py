"""The modelled cards: near to what was published, the techniques in their order, and always labelled."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from dlojz_tp import launch, report
from dlojz_tp.modelled_gpu import Loading, on_card, rates, train
from dlojz_tp.modelled_gpu.published import PUBLISHED

IMAGES = (64, 3, 224, 224)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model, images, labels, optimizer, device, dtype=None, waits=False, memory_format=torch.contiguous_format):
    images = images.to(device, non_blocking=True, memory_format=memory_format)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return (loss.item() if waits else loss.detach()), None


def last():
    return resnet18().to(memory_format=torch.channels_last)


def compiled():
    return torch.compile(last())


def float32_step(*args):
    torch.backends.cudnn.allow_tf32 = False
    return step(*args)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("conv", [False, True])
def test_each_switch_of_tf32_counts(conv, precision):
    switch = torch.backends.cudnn.conv if conv else torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, precision
    try:
        assert rates("A100").tf32(conv) == (precision == "tf32")
        assert not rates("V100").tf32(conv)
    finally:
        switch.fp32_precision = before


half = partial(step, dtype=torch.bfloat16)
half_last = partial(half, memory_format=torch.channels_last)


@pytest.mark.parametrize(("name", "card", "most"), [
    ("ResNet-50, float16, channels last, 256 images", "V100", 0.08),
    ("ResNet-50, TF32, 256 images", "A100", 0.12),
    ("ResNet-50 forward, 16 images", "V100", 0.12),
])  # fmt: skip
def test_near_to_what_was_published(name, card, most):
    run = next(run for run in PUBLISHED if run.name == name and run.card.name == card)
    value, found = run.predicted()
    assert abs(value / run.value - 1) < most
    assert found.label == f"modelled, {card}"


def test_techniques_in_their_order():
    ways = [(float32_step, resnet18), (step, resnet18), (half, resnet18), (half_last, last), (half_last, compiled)]
    speeds = [train("", how, model, sgd, IMAGES, card="A100", steps=1).images_per_second for how, model in ways]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.5 * speeds[0] and speeds[3] > 1.1 * speeds[2]


def test_loading_ahead_hides_and_blocking_adds():
    free, own, ahead, slow = (
        train("", half, resnet18, sgd, IMAGES, steps=4, loading=loading)
        for loading in (Loading(), Loading(0.05), Loading(0.05, workers=16), Loading(0.05, workers=2))
    )
    assert own.seconds == pytest.approx(free.seconds + 0.05, rel=0.2)
    assert ahead.seconds == pytest.approx(free.seconds, rel=0.1)
    assert IMAGES[0] / slow.images_per_second == pytest.approx(0.025, rel=0.2)


def test_record_and_figure_say_modelled():
    run = train("half", half, resnet18, sgd, IMAGES, card="H100", steps=1)
    assert run.label == run.record.hardware["device_name"] == "modelled, H100"
    assert run.record.memory_kind == "estimated" and set(run.record.steps[0]) == {"loading", "step", "total"}
    assert report.streams([run]).axes[0].get_title(loc="left") == "modelled, H100: half"
    assert str(run).startswith("modelled, H100")


def program(clock):
    """Seconds of: a wait for a value; copies; a copy beside computing, on the same stream and on its own."""
    x = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    times = {}

    def took(name, run):
        begin = clock.host
        run()
        times[f"{name}, CPU"] = clock.host - begin
        torch.cuda.synchronize()
        times[name] = clock.host - begin

    data, side = torch.empty(2**26), torch.cuda.Stream()
    pinned = data.pin_memory()
    took("product", lambda: x @ x)
    took("odd product", lambda: x[:, :4095] @ x[:4095])
    took("pageable", lambda: data.to("cuda"))
    took("pinned", lambda: pinned.to("cuda", non_blocking=True))

    def many(stream):
        with torch.cuda.stream(stream):
            pinned.to("cuda", non_blocking=True)
        for _ in range(16):
            x @ x

    took("one stream", lambda: many(None))
    took("two streams", lambda: many(side))
    took("value", lambda: (x @ x).sum().item())
    return times


def test_waits_copies_and_streams():
    run = on_card(program)
    t = run.result
    promised = 2 * 4096**3 / rates("H100").card.bfloat16
    assert 1 < t["product"] / promised < 3 and t["product, CPU"] < t["product"] / 2
    assert t["odd product"] > 1.5 * t["product"]
    assert t["pageable"] > 2 * t["pinned"] and t["pageable, CPU"] > 2**28 / 64e9
    assert t["pinned, CPU"] < 1e-3 * 0.1
    assert t["two streams"] < 0.8 * t["one stream"]
    assert t["value, CPU"] >= t["product"]


def too_much(clock):
    torch.empty(10 * 2**30, dtype=torch.float16, device="cuda")
    torch.empty(60 * 2**30, dtype=torch.float16, device="cuda")


def test_memory_of_the_card_ends():
    with pytest.raises(launch.RankError, match="CUDA out of memory"):
        on_card(too_much, card="A100")


def on_the_cpu(clock):
    """A layer's columns as trainees cut them out before they move them: by a copy, through NumPy, through a list."""
    whole = torch.nn.Linear(64, 64).weight.detach()
    parts = [
        whole[:, 32:].clone(),
        torch.from_numpy(whole.numpy()[:, 32:].copy()),
        torch.tensor(whole.tolist())[:, 32:],
    ]
    device = torch.device("cuda")
    return [
        (each.device.type, torch.nn.Parameter(each).to(device).device.type, each.dtype, each.shape) for each in parts
    ]


def test_layers_are_cut_on_the_cpu():
    assert on_card(on_the_cpu).result == [("cpu", "cuda", torch.float32, (64, 32))] * 3
