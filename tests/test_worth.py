"""Tables of modelled steps and calls: labelled, and the operators that steps of the course need."""

import threading

import pytest
import torch
from torch.nn import functional as F

from dlojz_tp.modelled_gpu import Loading, batches, on_card
from dlojz_tp.modelled_gpu.runs import prefetched
from dlojz_tp.modelled_gpu.stand_ins import NO_META
from dlojz_tp.report import recorded
from dlojz_tp.training import gains, training_run, worth


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(gains, "_modelled", {})


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 3, 8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


def masked_step(model, images, labels, optimizer, device):
    """Reads a mask, draws from Beta and looks for a NaN in the backward pass."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        images, labels = images.to(device), labels.to(device)
        lam = torch.distributions.Beta(*torch.ones(2, len(images), device=device), validate_args=False).sample()
        known = labels >= 0
        loss = F.cross_entropy(model(images * lam[:, None, None, None])[known], labels[known])
        loss.backward()
        optimizer.step()
        return loss.item(), None


def wrong_step(model, *rest):
    return model(3)


def idle_step(*batch):
    return None


lock = threading.Lock()


def tied_step(*batch):
    return lock


def test_a_table_is_labelled_and_its_gain_is_kept():
    steps = {"waits": masked_step, "wrong": wrong_step, "flows": training_run.plain_step}
    said = repr(worth.table(steps, card="A100", batches=(8, 16), makes=Tiny, keep="04_a"))
    assert said.startswith("modelled, A100: ") and "Nothing in this table was measured" in said
    assert said.count("no model of it: ") == 2 and said.count("× ") == 2 and "The model missed" in said
    kept = gains.kept_modelled()["04_a"]
    assert (kept["card"], kept["steps"], kept["images"]) == ("A100", ["waits", "flows"], 16)
    assert kept["seconds"][0] > kept["seconds"][1]


@pytest.mark.parametrize("step", [wrong_step, idle_step, tied_step])
def test_no_gain_of_a_step_without_a_model(step):
    said = worth.table({"wrong": step, "flows": training_run.plain_step}, makes=Tiny, batches=(8,), keep="04_a")
    assert gains.kept_modelled() == {} and "wrong           8       no model of it: " in repr(said)


def compiled_step(loss_of, optimizer):
    forward = torch.compile(loss_of)

    def step(*batch):
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_compiled_step_with_options_is_the_same_step_with_fewer_starts():
    steps = {"compiled": worth.compiled(compiled_step)}
    steps["graphs"] = worth.compiled(compiled_step, mode="reduce-overhead")
    said = repr(worth.table(steps, makes=Tiny, batches=(8,)))
    assert float(said.split("×")[1].split()[0]) > 1.1


def loop(clock, ahead):
    """Seconds of eight steps of long products, each with a batch that is copied."""
    x, device = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda"), torch.device("cuda")
    come = batches(clock, (64, 3, 224, 224), 10, Loading())
    there = prefetched(come, device) if ahead else ((x.to(device, non_blocking=True), y) for x, y in come)
    for _ in zip(range(8), there):
        for _ in range(4):
            x @ x
    torch.cuda.synchronize()
    return clock.host


def test_copies_ahead_in_a_stream_of_their_own_hide():
    copies = 7 * 64 * 3 * 224 * 224 * 4 / (64e9 * 0.8)  # the first has nothing to hide behind
    assert on_card(loop, False).result - on_card(loop, True).result == pytest.approx(copies, rel=0.3)


def product(device, columns=4095):
    x, y = (torch.empty(n, m, dtype=torch.bfloat16, device=device) for n, m in ((4096, 4096), (4096, columns)))
    return lambda: x @ y


def test_calls_alone():
    said = repr(worth.calls({"odd": product, "even": lambda device: product(device, 4096)}))
    assert said.startswith("modelled, H100: each alone.")
    assert float(said.split("×")[1].split()[0]) == pytest.approx(3, rel=0.1)


def test_the_card_at_hand_is_modelled_if_it_is_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = {"NVIDIA A100-SXM4-80GB": "A100", "Tesla V100-SXM2-32GB": "V100", "NVIDIA L4": "H100"}
    for name, card in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert worth.here() == card


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
def test_batch_norm_without_values_looks_like_pytorchs(training, form):
    x, weight = torch.randn(2, 3, 4, 5).to("meta", memory_format=form), torch.ones(3, device="meta")
    args = x, weight, weight, weight, weight, training
    found, true = NO_META["aten::native_batch_norm"](*args, 0.1, 1e-5), torch.native_batch_norm(*args, 0.1, 1e-5)
    saved = (weight, weight, *true[1:], training, 1e-5)
    for wanted in ([True] * 3, [True, False, False]):
        back = NO_META["aten::native_batch_norm_backward"](x, x, weight, *saved, wanted)
        found, true = (*found, *back), (*true, *torch.ops.aten.native_batch_norm_backward(x, x, weight, *saved, wanted))
    assert list(map(looks, found)) == list(map(looks, true))


def looks(x):
    return x if x is None else (x.shape, x.stride(), x.dtype)
