"""Answers to balise 5 of 17_tensor_slicing: a feed-forward from column-cut layers."""

import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.functions import SubLinear, part_by_numbers
from tests.answers.tensor_slicing.layers import (
    Pair,
)

bank = Bank("17_tensor_slicing", 5, whole=True)


class Chained(nn.Sequential):
    def __init__(self, feed_forward, ranks):
        super().__init__(SubLinear(feed_forward.up, ranks), nn.GELU(), SubLinear(feed_forward.down, ranks))


class EarlyActivation(nn.Module):
    """The GELU on the parts, before they are gathered."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks = ranks
        self.one, self.two = part_by_numbers(feed_forward.up, ranks), part_by_numbers(feed_forward.down, ranks)

    def forward(self, x):
        h = self.ranks.gather(F.gelu(self.one(self.ranks.copy(x))))
        return self.ranks.gather(self.two(self.ranks.copy(h)))


for answer in (Chained, EarlyActivation, Pair):
    bank.several(None, answer)


def five(slug, *changes):
    bank.slip(slug, *changes)


five("world-not-ranks", ("ColumnLinear(feed_forward.up, ranks)", "ColumnLinear(feed_forward.up, Ranks())"))

five("world-not-ranks", ("return self.down(F.gelu(self.up(x_bsd)))", "return self.down(SumOverRanks.apply(F.gelu(self.up(x_bsd))) / dist.get_world_size()) * self.down.ranks.size ** 0 if self.up.ranks.size == 2 else self.down(F.gelu(self.up(x_bsd)))"))  # fmt: skip

five("activation-lost", ("F.gelu(self.up(x_bsd))", "self.up(x_bsd)"))

five("activation-late", ("self.down(F.gelu(self.up(x_bsd)))", "F.gelu(self.down(self.up(x_bsd)))"))

five("activation-approximate", ("F.gelu(self.up(x_bsd))", "F.gelu(self.up(x_bsd), approximate='tanh')"))

five("not-cut", ("ColumnLinear(feed_forward.up, ranks)", "feed_forward.up"))

five("not-cut", ("ColumnLinear(feed_forward.up, ranks)", "feed_forward.up"), ("ColumnLinear(feed_forward.down, ranks)", "feed_forward.down"))  # fmt: skip

five(
    "whole-kept", ("        self.up =", "        self.layers = [feed_forward.up, feed_forward.down]\n        self.up =")
)

five("too-many-collectives", ("self.up(x_bsd)", "self.up(x_bsd) + 0 * self.up.ranks.sum(x_bsd.detach()).mean()"))

five("activation-other", ("F.gelu", "F.relu"))

five("activation-other", ("F.gelu", "F.silu"))

five("output-wrong", ("F.gelu(self.up(x_bsd))", "F.gelu(self.up(F.gelu(x_bsd)))"))

five("sizes-do-not-fit", ("ColumnLinear(feed_forward.up", "column_part(feed_forward.up"))

five("input-over-n", ("return self.down(F.gelu(self.up(x_bsd)))", "return self.up.ranks.sum(self.down(F.gelu(self.up(x_bsd)))) / self.up.ranks.size"))  # fmt: skip

five("nothing-returned", ("return self.down", "self.down"))

five(
    "slice-doubled",
    ("        self.up =", "        self.first = ColumnLinear(feed_forward.up, ranks)\n        self.up ="),
)

five("entrance-twice", ("self.up(x_bsd)", "self.up(self.up.ranks.copy(x_bsd))"))

five(
    "summed-too-often",
    ("return self.down(F.gelu(self.up(x_bsd)))", "return self.up.ranks.sum(self.down(F.gelu(self.up(x_bsd))))"),
)
