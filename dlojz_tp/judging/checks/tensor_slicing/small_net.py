"""A small network that is cut over the ranks, with its batches: what balise 11 trains."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp.judging.checks.tensor_slicing.common import noise
from dlojz_tp.judging.probes.seeded import seeded

ROWS = 12
RATE, MOMENTUM = 0.05, 0.9
SLICED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # parameter -> dimension that is cut


class Plain(nn.Module):
    """A norm, a feed-forward with a residual, a head; one parameter frozen, one not used. x (n, 6) -> (n, 3)."""

    def __init__(self):
        super().__init__()
        with seeded(11):
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
            self.head = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.full((3,), 1.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.ranks = None
        self.double()

    def forward(self, x):
        if self.ranks is None:
            return self.head(x + self.down(F.gelu(self.up(self.norm(x))))) * self.frozen
        hidden = F.gelu(self.up(self.ranks.copy(self.norm(x))))
        return self.head(x + self.ranks.sum(F.linear(hidden, self.down.weight)) + self.down.bias) * self.frozen


def sliced(ranks):
    """A Plain of which this rank holds its slices."""
    model = Plain()
    for name, dim in SLICED.items():
        owner, attribute = getattr(model, name.split(".")[0]), name.split(".")[1]
        part = ranks.part(getattr(owner, attribute).data, dim).clone()
        setattr(owner, attribute, nn.Parameter(part))
    model.ranks = ranks
    return model


def loss_of(model, batch):
    """Mean over the rows of batch (n, 9): six inputs, three targets."""
    return (model(batch[:, :6]) - batch[:, 6:]).square().sum(dim=1).mean()


def rows(step):
    """The global batch of a step; its rows are not alike."""
    return noise(ROWS, 9, seed=300 + step) * torch.linspace(0.5, 2, ROWS).double()[:, None]


class Recorder(torch.optim.SGD):
    """SGD that notes the gradients that it sees."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.model, self.seen = model, []

    def step(self, closure=None):
        """Note the gradients, then update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.seen.append(gradients_of(self.model))
        super().step()
        return loss


def gradients_of(model):
    """Copies of the gradients, None where there is none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def cut(name, value, place, tensor):
    """What the rank at `place` of `tensor` ranks holds of a parameter."""
    return value.tensor_split(tensor, SLICED[name])[place] if name in SLICED else value
