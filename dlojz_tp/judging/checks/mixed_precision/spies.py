"""What the checks of a step look through: a scaler, an optimizer, a network and autocast that write down their use."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F

from dlojz_tp.judging.probes.networks import held_mode, network

SCALE = 1024.0
LR, MOMENTUM = 0.1, 0.9


class SpyScaler:
    """The interface of torch.amp.GradScaler, with a log and copies of the gradients at each call. Never waits."""

    def __init__(self, scale: float = SCALE):
        self.value, self.log, self.seen, self.inside, self._unscaled = scale, [], {}, False, False

    def scale(self, outputs):
        self.log.append("scale")
        return outputs * self.value

    def unscale_(self, optimizer):
        if self._unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.log.append("unscale_")
        self.seen["unscale_"] = gradients(optimizer)
        self._unscale(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.log.append("step")
        if not self._unscaled:
            self._unscale(optimizer)
        self.seen["step"] = gradients(optimizer)
        self.inside = True
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.inside = False

    def update(self, new_scale=None):
        self.log.append("update")
        self.seen["update"] = True
        self._unscaled = False

    def get_scale(self):
        self.log.append("get_scale")
        return self.value

    def is_enabled(self):
        return True

    def _unscale(self, optimizer):
        self._unscaled = True
        for p in parameters(optimizer):
            if p.grad is not None:
                p.grad.mul_(1 / self.value)


class SpySGD(torch.optim.SGD):
    """SGD with momentum that writes down when it steps: inside the scaler or not."""

    def __init__(self, params, scaler=None):
        super().__init__(params, lr=LR, momentum=MOMENTUM)
        self.steps, self.alone, self.scaler, self.grads = 0, 0, scaler, None

    def step(self, closure=None):
        self.steps += 1
        self.alone += not getattr(self.scaler, "inside", True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.grads = gradients(self)
        super().step()
        return loss


def parameters(optimizer):
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(optimizer):
    """Copies of the gradients, None where there is none."""
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters(optimizer)]


def watched_network():
    """The small network of the course's checks, held in training mode.

    `.states` gets (autocast on, its dtype, weights' dtype, gradients) a forward.
    """
    model = held_mode(network())
    model.states = []

    def look(module, inputs):
        kind = inputs[0].device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        model.states.append((*cast, module.weight.dtype, torch.is_grad_enabled()))

    model[0].register_forward_pre_hook(look)
    return model


@contextlib.contextmanager
def autocast_seen():
    """Give a list of the device types that autocast is asked for inside."""
    seen, original = [], torch.autocast.__init__

    def init(self, device_type, *args, **kwargs):
        seen.append(device_type)
        return original(self, device_type, *args, **kwargs)

    with mock.patch.object(torch.autocast, "__init__", init):
        yield seen


def loop(model, data, max_norm=None, lr=LR, momentum=MOMENTUM):
    """The truth: a copy trained in float64, clipped by global norm. Returns (list of weights a step, losses, grads)."""
    import copy

    model = copy.deepcopy(model).double()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    weights, losses, first = [], [], None
    for images, labels in data:
        loss = F.cross_entropy(model(images.double()), labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        first = first or grads
        norm = global_norm(grads)
        factor = 1.0 if max_norm is None else min(1.0, max_norm / norm)
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, grads, strict=True):
                v.mul_(momentum).add_(g * factor)
                p.sub_(lr * v)
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights, losses, first


def global_norm(grads) -> float:
    """The norm of all gradients as one vector, in float64; inf where there is an infinite one."""
    return torch.stack([g.double().norm() for g in grads if g is not None]).norm().item()


def distance(got, wanted) -> float:
    """The norm of the difference of two lists of tensors, relative to that of the second."""
    differences = [a.detach().double() - b.detach().double() for a, b in zip(got, wanted, strict=True)]
    return global_norm(differences) / max(global_norm(wanted), 1e-30)


def moved(after, before):
    """What an update added to the weights."""
    return [a.detach().double() - b.detach().double() for a, b in zip(after, before, strict=True)]
