"""Race of 02: what a loss scaler adds to a step, for the 142 tensors of a MobileNet and a rate of 0."""

import torch
from torchvision.models import mobilenet_v3_small

from dlojz_tp.judging.contest import Contest, device

NO_GROWTH = {"growth_interval": 10**9}


def _step(scaler):
    with torch.device("meta"):  # its shapes alone
        shapes = [p.shape for p in mobilenet_v3_small().parameters()]
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device())) for shape in shapes]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    scaler.scale(torch.zeros((), device=device()))  # PyTorch's makes its tensors here

    def step():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def yours(LossScaler):  # noqa: N803
    return _step(LossScaler(**NO_GROWTH))


def theirs():
    return _step(torch.amp.GradScaler(device().type, **NO_GROWTH))


RACES = {4: Contest("torch.amp.GradScaler", yours, theirs)}
