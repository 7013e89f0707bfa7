"""Many small trainings side by side: one batched forward and backward for all, an ordinary model for each optimizer."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap


class SideBySide:
    """Models of one architecture that are trained at the same time, each with its own weights, batches and optimizer.

    make(): a new model, without running statistics (LayerNorm, not BatchNorm); it is called once for each of `seeds`,
    after torch.manual_seed. `models` are the models: any optimizer may be given `models[k].parameters()`. They share
    memory with stacked tensors, so that `backward` fills all their `.grad` in one pass. Never set a `.grad` to None.

    Source: torch.func, "Model ensembling".
    """

    def __init__(self, make: Callable[[], nn.Module], seeds: Iterable[int]):
        self.models = []
        for seed in seeds:
            torch.manual_seed(seed)
            self.models.append(make())
        self._shape = copy.deepcopy(self.models[0]).to("meta")
        weights, self._buffers = stack_module_state(self.models)
        self._weights = {name: stacked.detach().requires_grad_() for name, stacked in weights.items()}
        for name, stacked in self._weights.items():
            stacked.grad = torch.zeros_like(stacked)
            for one, gradient, model in zip(stacked.detach(), stacked.grad, self.models):
                weight = model.get_parameter(name)
                weight.data, weight.grad = one, gradient

    def __call__(self, x: Tensor) -> Tensor:
        """What each model makes of its own batch: x (models, batch, ...) → (models, batch, ...)."""
        return vmap(self._one, randomness="different")(self._weights, self._buffers, x)

    def _one(self, weights, buffers, x):
        return functional_call(self._shape, (weights, buffers), (x,))

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Fill every `.grad` with the gradient of that model's mean cross-entropy; the losses (models,).

        x (models, batch, ...); y (models, batch) int64.
        """
        for stacked in self._weights.values():
            stacked.grad.zero_()
        logits = self(x)
        losses = F.cross_entropy(logits.transpose(1, -1), y, reduction="none").mean(1)
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def descend(self, rates: Tensor) -> None:
        """A step of plain SGD for all models in one pass, with a rate for each: rates (models,)."""
        for stacked in self._weights.values():
            stacked.sub_(stacked.grad * rates.view(-1, *[1] * (stacked.dim() - 1)))

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> Tensor:
        """Share of right answers of each model (models,) on the same x (batch, ...), y (batch,)."""
        return (self(x.expand(len(self.models), *x.shape)).argmax(-1) == y).float().mean(1)
