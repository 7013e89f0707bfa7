"""Trainings side by side are the same trainings, one after the other."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.training.side_by_side import SideBySide


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))


def test_each_model_is_trained_as_if_alone():
    runs = SideBySide(make, [0, 1, 1])
    alone = copy.deepcopy(runs.models)
    rates = 0.1, 0.3, 0.01
    together = [torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(runs.models, rates)]
    single = [torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(alone, rates)]
    torch.manual_seed(5)
    for _ in range(4):
        x, y = torch.randn(3, 6, 3, 4), torch.randint(3, (3, 6))
        losses = runs.backward(x, y)
        for k, (model, optimizer) in enumerate(zip(alone, single)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[k]), y[k])
            loss.backward()
            torch.testing.assert_close(losses[k], loss.detach())
            optimizer.step()
            together[k].step()
    for model, other in zip(runs.models, alone):
        for one, due in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(one, due, atol=1e-5, rtol=1e-4)
    x, y = torch.randn(20, 3, 4), torch.randint(3, (20,))
    due = [float((model(x).argmax(1) == y).float().mean()) for model in alone]
    torch.testing.assert_close(runs.accuracy(x, y), torch.tensor(due))


def test_seeds_make_the_weights():
    first, second, third = SideBySide(make, [0, 1, 0]).models
    assert torch.equal(first[1].weight, third[1].weight) and not torch.equal(first[1].weight, second[1].weight)


def test_descend_is_plain_sgd():
    runs, rates = SideBySide(make, [0, 1]), torch.tensor([0.1, 0.5])
    alone = copy.deepcopy(runs.models)
    single = [torch.optim.SGD(model.parameters(), lr=float(rate)) for model, rate in zip(alone, rates)]
    torch.manual_seed(6)
    x, y = torch.randn(2, 6, 3, 4), torch.randint(3, (2, 6))
    for _ in range(2):
        runs.backward(x, y)
        runs.descend(rates)
        for k, (model, optimizer) in enumerate(zip(alone, single)):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k]), y[k]).backward()
            optimizer.step()
    for model, other in zip(runs.models, alone):
        for one, due in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(one, due, atol=1e-5, rtol=1e-4)
