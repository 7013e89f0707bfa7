"""The pretend card: it fails where a card would, and gives memory back as one does."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlojz_tp import measure


@pytest.fixture(autouse=True)
def _no_collector():
    """Memory must come back by itself, as soon as the last reference is gone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def model_and_step():
    model = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        images, labels = torch.randn(batch, 100), torch.zeros(batch, dtype=torch.long)
        measure.training_step(model, optimizer, images, labels)

    return model, optimizer, step


def test_a_sweep_fails_at_the_size_that_does_not_fit_and_recovers():
    model, optimizer, step = model_and_step()
    fixed = 4 * sum(p.numel() for p in model.parameters())
    card = measure.MemoryBudget(8 * 2**20, model, optimizer)
    fate = {}
    for batch in (16, 64, 4096, 32):
        try:
            with card:
                step(batch)
            fate[batch] = "fits"
        except torch.OutOfMemoryError as error:
            fate[batch] = str(error)
    assert [fate[batch] == "fits" for batch in (16, 64, 4096, 32)] == [True, True, False, True]
    for words in ("out of memory", "Tried to allocate", "pretend card has a total capacity of 8.0 MiB"):
        assert words in fate[4096]
    model.zero_grad()
    # Weights and momentum stay, all else is free again.
    assert card.live == 2 * fixed
    assert card.peak <= card.capacity


def test_the_estimate_tells_whether_a_step_fits():
    def make():
        return model_and_step()[0]

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    peak = measure.estimate_memory(make, (100,), 256, sgd).peak
    for capacity, fits in ((1.02 * peak, True), (0.98 * peak, False)):
        card = measure.MemoryBudget(capacity)
        try:
            with card:
                model = make()
                optimizer = sgd(model.parameters())
                images, labels = torch.zeros(256, 100), torch.zeros(256, dtype=torch.long)
                for _ in range(2):
                    measure.training_step(model, optimizer, images, labels)
            happened = True
        except torch.OutOfMemoryError:
            happened = False
        assert happened is fits


def test_it_fails_inside_the_backward_pass():
    layer = nn.Linear(100, 100)
    card = measure.MemoryBudget(10**9, layer)
    with card:
        loss = layer(torch.randn(100, 100)).relu().sum()
        card.capacity = card.live + 30_000
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    del loss
    assert card.live == 4 * (100 * 100 + 100)


def test_a_kept_exception_keeps_the_memory():
    def step():
        kept = torch.zeros(1000)
        return kept, torch.zeros(100_000)

    card = measure.MemoryBudget(10_000)
    error = None
    try:
        with card:
            step()
    except torch.OutOfMemoryError as caught:
        error = caught
    # The frame of ``step`` is alive in the traceback, and so is its tensor; what was refused is not.
    assert card.live == 4000
    error = error.with_traceback(None)
    assert card.live == 0


def test_kept_losses_keep_their_graphs():
    layer = nn.Linear(50, 50)
    card = measure.MemoryBudget(10**9)
    losses = []
    lives = []
    with card:
        for _ in range(3):
            losses.append(layer(torch.randn(100, 50)).relu().sum())
            lives.append(card.live)
    assert lives[2] - lives[1] == lives[1] - lives[0] > 4 * 100 * 50
    losses.clear()
    assert card.live == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_lowers_the_peak(reentrant):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6))

    def peak(with_checkpoint):
        layers.zero_grad()
        card = measure.MemoryBudget(10**9, layers)
        with card:
            x = torch.randn(1000, 64, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if with_checkpoint else layer(x)
            x.sum().backward()
        return card.peak

    assert peak(True) < 0.65 * peak(False)


def test_results_are_the_same_under_the_card():
    outputs = []
    for capacity in (None, 10**9):
        torch.manual_seed(0)
        model, optimizer, step = model_and_step()
        for _ in range(3):
            if capacity:
                with measure.MemoryBudget(capacity):
                    step(8)
            else:
                step(8)
        outputs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*outputs)


def test_tensors_larger_than_the_card_cannot_be_registered():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        measure.MemoryBudget(1000, nn.Linear(100, 100))
    with pytest.raises(ValueError, match="capacity"):
        measure.MemoryBudget(0)


def test_a_tensor_registered_twice_counts_once():
    model = nn.Linear(10, 10)
    card = measure.MemoryBudget(10**6, model, [model.weight, {"tied": model.weight}])
    assert card.live == 440
    with card:
        model.weight.data.add_(1)
    assert card.live == 440
