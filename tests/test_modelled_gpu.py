"""The modelled cards: near to what was published, the techniques in their order, and always labelled."""

import ctypes
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from dlojz_tp import launch, report
from dlojz_tp.modelled_gpu import Loading, on_card, rates, train
from dlojz_tp.modelled_gpu.published import gains, misses, rows

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


@pytest.mark.parametrize(("words", "most"), [
    (["V100", "Channels last"], 0.15),
    (["V100 ", "forward", "16 images"], 0.2),
    (["H100", "Lambda BERT", "base, TF32"], 0.15),
])  # fmt: skip
def test_near_to_what_was_published(words, most):
    found = {row: row.modelled() for row in rows(words)}
    assert found
    assert misses([(1 / row.seconds, 1 / run.result) for row, run in found.items()])[1] < most
    assert {run.label for run in found.values()} == {f"modelled, {words[0].strip()}"}


def test_rows_have_sources_and_few_are_fitted():
    every = rows()
    held = [row for row in every if not row.fitted]
    assert len(held) >= 40 and len(every) - len(held) <= 12
    assert {row.family for row in held} == {"BERT", "EfficientNet", "GPT", "ResNet"}
    assert {"V100", "A100", "H100"} < {row.card for row in held}
    assert len({(row.source, row.card, row.name) for row in every}) == len(every)
    assert len(gains({row: row.seconds for row in every})) == sum(row.over is not None for row in every)
    assert rows(["karpathy", "TF32"]) == [row for row in every if row.source == "Karpathy" and "TF32" in row.name]


def test_a_gain_is_a_ratio_of_speeds():
    before, after = rows(["A100 ", "Lambda ResNet"])
    assert gains({before: 1.0, after: 1.0}) == [(after, pytest.approx(1582 / 1066), pytest.approx(1280 / 640))]
    assert gains({after: 1.0}) == []


def odd_products(clock):
    """Seconds of an output layer's product over 50,304 and 50,257 words: eager, compiled, compiled without padding."""
    x, times = torch.empty(4096, 768, device="cuda", dtype=torch.bfloat16), {}
    for words in (50304, 50257):
        w = torch.empty(words, 768, device="cuda", dtype=torch.bfloat16)
        for how, options in ((None, None), ("pads", {}), ("as it is", {"shape_padding": False})):
            run = F.linear if how is None else torch.compile(F.linear, options=options)
            torch.cuda.synchronize()
            begin = clock.host
            run(x, w)
            torch.cuda.synchronize()
            times[how, words] = clock.host - begin
    return times


def test_the_compiler_pads_products_of_odd_sizes():
    t = on_card(odd_products, card="A100").result
    assert t[None, 50257] > 2 * t[None, 50304] and t["as it is", 50257] > 2 * t["as it is", 50304]
    assert t["pads", 50304] < t["pads", 50257] < 0.8 * t[None, 50257]


def kernels(clock):
    """Seconds of: a cast, the same bytes without one, a mask; a convolution in each format, in float32 and float16."""
    low, times = torch.empty(2**26, device="cuda", dtype=torch.bfloat16), {}
    images = torch.empty(64, 256, 56, 56, device="cuda")
    mask = torch.zeros(2**26, device="cuda", dtype=torch.bool)

    def took(name, run):
        torch.cuda.synchronize()
        begin = clock.host
        run()
        torch.cuda.synchronize()
        times[name] = clock.host - begin

    took("cast", lambda: low.float())
    took("three times its bytes", lambda: torch.add(low, low))
    took("mask", lambda: low.masked_fill(mask, 0))
    for dtype in (torch.float32, torch.float16):
        weight = torch.empty(256, 256, 1, 1, device="cuda", dtype=dtype)
        for last in (False, True):
            x = images.to(dtype, memory_format=torch.channels_last if last else torch.contiguous_format)
            took((dtype, last), partial(F.conv2d, x, weight))
    return times


def grouped(clock):
    """Seconds of the forward and the backward pass of a convolution in 32 groups."""
    x = torch.empty(64, 1024, 28, 28, device="cuda", requires_grad=True)
    weight, times = torch.empty(1024, 32, 3, 3, device="cuda", requires_grad=True), []
    out = F.conv2d(x, weight, padding=1, groups=32)
    for run in (lambda: F.conv2d(x, weight, padding=1, groups=32), out.sum().backward):
        torch.cuda.synchronize()
        begin = clock.host
        run()
        torch.cuda.synchronize()
        times.append(clock.host - begin)
    return times


def test_the_gradients_of_groups_are_counted_once():
    forward, backward = on_card(grouped, card="V100").result
    assert 1.5 < backward / forward < 3


def test_kernels_cost_what_they_go_through():
    t = on_card(kernels, card="V100").result
    assert t["cast"] > 1.3 * t["three times its bytes"] and t["mask"] > 1.3 * t["three times its bytes"]
    assert t[torch.float16, False] > 1.3 * t[torch.float16, True], "Tensor Cores want the channels last"
    assert t[torch.float32, True] > 1.1 * t[torch.float32, False], "and other cores do not"


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


def addresses(clock):
    """C reads and writes where a tensor on the CPU is, also from the middle on; each storage has its own address."""
    x, y = torch.randn(1_000_000), torch.empty(1_000_000)
    ctypes.memmove(y[500_000:].data_ptr(), x[500_000:].data_ptr(), 4 * 500_000)
    on_gpu = [torch.empty(9, device="cuda") for _ in range(9)]
    storages = {one.untyped_storage().data_ptr() for one in (x, x.view(-1), y, *on_gpu, *(one[1:] for one in on_gpu))}
    return y[500_000:].data_ptr() - y.data_ptr(), len(storages), on_gpu[0][3:].data_ptr() - on_gpu[0].data_ptr()


def test_tensors_have_addresses():
    assert on_card(addresses).result == (4 * 500_000, 11, 12)


def counted(clock):
    x = torch.randint(8, (4, 16), device="cuda").flatten()
    counts, weighted = x.bincount(minlength=8), x.bincount(x / 2)
    sizes, wide = counts.tolist(), torch.empty(2, 60, device="cuda")
    parts = [torch.split(wide, sizes, dim=1), x.split(sizes), x.split([60, 4])]
    return (
        [(tuple(y.shape), y.dtype, y.device.type) for y in (counts, weighted)],
        [[y.shape[-1] for y in split] for split in parts],
    )


def test_counts_have_the_length_that_is_asked_for_and_split_evenly():
    counts, parts = on_card(counted).result
    assert counts == [((8,), torch.int64, "cuda"), ((1,), torch.float32, "cuda")]
    assert parts == [[8] * 4 + [7] * 4, [8] * 8, [60, 4]]


def states_from_a_card(clock):
    """A checkpoint that was loaded to a card brings the states of generators there."""
    before = torch.get_rng_state()
    for put, state in ((torch.set_rng_state, before), (torch.cuda.set_rng_state, torch.cuda.get_rng_state())):
        put(state.to("cuda").cpu().clone())
        put(state)
    return torch.equal(torch.get_rng_state(), before)


def test_states_of_generators_without_values_change_nothing():
    assert on_card(states_from_a_card).result
