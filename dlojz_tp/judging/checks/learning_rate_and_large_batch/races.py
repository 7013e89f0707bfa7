"""Race of 10: an update of a small Llama's weights."""

import torch

from dlojz_tp.judging.contest import Contest, device
from dlojz_tp.models import Llama, LlamaConfig


def _step(make):
    model = Llama(LlamaConfig(1000, width=256, heads=8, layers=4)).to(device())
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    return make(model).step


def yours(parameter_groups, AdamW):  # noqa: N803
    return _step(lambda model: AdamW(parameter_groups(model, 0.1)))


def theirs():
    def make(model):
        groups = [[w for w in model.parameters() if (w.ndim > 1) is decays] for decays in (True, False)]
        groups = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0))]
        return torch.optim.AdamW(groups, foreach=True)

    return _step(make)


RACES = {3: Contest("torch.optim.AdamW, foreach", yours, theirs)}
