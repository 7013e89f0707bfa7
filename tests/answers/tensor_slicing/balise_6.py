"""Answers to balise 6 of 17_tensor_slicing: the pair: columns, then rows."""

import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.functions import SubLinear, part_by_numbers
from tests.answers.tensor_slicing.layers import COUNTED, OwnWeights, Pair, rows_by_numbers

bank = Bank("17_tensor_slicing", 6, whole=True)


class BiasOfRankZero(nn.Module):
    """Rank 0 alone holds the last bias, and adds it before the sum."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks, self.a, self.b = (
            ranks,
            part_by_numbers(feed_forward.up, ranks),
            rows_by_numbers(feed_forward.down, ranks),
        )
        if ranks.rank == 0:
            self.b.bias = nn.Parameter(feed_forward.down.bias.detach().clone())

    def forward(self, x):
        return self.ranks.sum(self.b(F.gelu(self.a(self.ranks.copy(x)))))


bank.several(None, Pair)

bank.several(None, BiasOfRankZero)

bank.several(None, OwnWeights)


def six(slug, *changes):
    bank.slip(slug, *changes)


PAIR = "return self.ranks.sum(self.down(hidden)) + self.bias"

six("world-not-ranks", (PAIR, PAIR.replace("self.ranks.sum(", "SumOverRanks.apply(")))

six("world-not-ranks", ("self.ranks.copy(x_bsd)", "CopyToRanks.apply(x_bsd)"))

six("world-not-ranks", ("        self.ranks = ranks", "        self.ranks = ranks = Ranks()"))

six("rank-failed", ("        self.ranks = ranks", "        self.ranks, self.group = ranks, ranks.group"))

six("bias-every-rank", (PAIR, "return self.ranks.sum(self.down(hidden) + self.bias)"))

six("bias-over-n", ("feed_forward.down.bias.detach().clone()", "feed_forward.down.bias.detach() / ranks.size"), (PAIR, "return self.ranks.sum(self.down(hidden) + self.bias)"))  # fmt: skip

six("weight-over-n", (PAIR, "return self.ranks.sum(self.down(hidden) + self.bias / self.ranks.size)"))

six("mean-not-sum", (PAIR, "return self.ranks.sum(self.down(hidden)) / self.ranks.size + self.bias"))

six("gathered-to-sum", (PAIR, "return self.ranks.gather(self.down(hidden).unsqueeze(-1)).sum(-1) + self.bias"))

six(
    "copy-aside",
    ("        self.ranks = ranks", "        self.ranks, self.whole = ranks, feed_forward.up.weight.tolist()"),
)

six("bias-lost", (PAIR, PAIR.replace(" + self.bias", "")))

six("bias-cut", ("feed_forward.down.bias.detach().clone()", "ranks.part(feed_forward.down.bias, 0).detach().clone()"), (PAIR, PAIR.replace("self.bias", "self.ranks.gather(self.bias)")))  # fmt: skip

six("not-summed", (PAIR, PAIR.replace("self.ranks.sum(self.down(hidden))", "self.down(hidden)")))

six("summed-too-often", (PAIR, "return self.ranks.sum(self.ranks.sum(self.down(hidden)) + self.bias)"))

six("entrance-forgotten", ("self.ranks.copy(x_bsd)", "x_bsd"))

six("entrance-twice", ("self.ranks.copy(x_bsd)", "self.ranks.copy(self.ranks.copy(x_bsd))"))

six("activation-on-terms", ("F.gelu(self.up(self.ranks.copy(x_bsd)))", "F.gelu(self.up(self.ranks.copy(x_bsd)))\n        hidden = [F.gelu(self.down(hidden))]"), (PAIR, "return self.ranks.sum(hidden[0]) + self.bias"))  # fmt: skip

six("activation-lost", ("F.gelu(self.up(self.ranks.copy(x_bsd)))", "self.up(self.ranks.copy(x_bsd))"))

six("wrong-dimension", ("        self.down = row_part(", "        self.down = column_part("), ("self.ranks.copy(x_bsd)))", "self.ranks.copy(x_bsd)))\n        hidden = self.ranks.gather(hidden)"), (PAIR, "return self.ranks.gather(self.down(hidden))"))  # fmt: skip

six("too-many-collectives", ("F.gelu(self.up(self.ranks.copy(x_bsd)))", "self.ranks.part(self.ranks.gather(F.gelu(self.up(self.ranks.copy(x_bsd)))), -1)"))  # fmt: skip

six(
    "weight-over-n",
    (PAIR, "return self.ranks.sum(self.down(hidden)) + self.ranks.sum(self.bias) / self.ranks.size"),
)

six("slice-lost", ("        self.bias = nn.Parameter(feed_forward.down.bias.detach().clone())\n", ""), (PAIR, PAIR.replace(" + self.bias", "")))  # fmt: skip

six("size-accepted", ("        self.up = column_part(feed_forward.up, ranks)\n        self.down = row_part(feed_forward.down, ranks)\n", "        up, down = copy.copy(feed_forward.up), nn.Linear(1, 1, bias=False)\n        up.weight = nn.Parameter(up.weight.detach().tensor_split(ranks.size)[ranks.rank].clone())\n        up.bias = nn.Parameter(up.bias.detach().tensor_split(ranks.size)[ranks.rank].clone())\n        down.weight = nn.Parameter(feed_forward.down.weight.detach().tensor_split(ranks.size, 1)[ranks.rank].clone())\n        self.up, self.down = up, down\n"))  # fmt: skip

six("whole-kept", ("        self.ranks = ranks", "        self.ranks, self.whole = ranks, [feed_forward]"))

six("too-much-volume", (PAIR, "return self.ranks.sum(torch.cat([self.down(hidden), hidden], -1))[..., : len(self.bias)] + self.bias"))  # fmt: skip

six("rank-failed", (PAIR, "if self.ranks.rank:\n            raise KeyError('down')\n        " + PAIR))

six("rank-failed", (PAIR, "if self.ranks.rank:\n            import os\n\n            os._exit(3)\n        " + PAIR))

six(
    "calls-differ",
    (PAIR, "if self.ranks.rank == 1:\n            return self.down(hidden) + self.bias\n        " + PAIR),
)

BIASED = "self.bias = nn.Parameter(feed_forward.down.bias.detach().clone())"

six("part-not-trained", (BIASED, BIASED.replace(".clone())", ".clone(), requires_grad=False)")))

six("view-keeps-whole", (BIASED, BIASED + "\n        self.up.weight = nn.Parameter(ranks.part(feed_forward.up.weight, 0).detach())"))  # fmt: skip

six("weight-without-gradient", (PAIR, "return self.ranks.sum(self.down(hidden) + (self.bias if self.ranks.rank == 0 else 0))"))  # fmt: skip

six("steps-drift", (PAIR, COUNTED + PAIR + " * (1 if self.calls == 1 else 0.5)"))  # fmt: skip

six("old-weights", (PAIR, "if torch.is_grad_enabled() or not hasattr(self, 'last') or x_bsd.shape != (2, 3, 12):\n            self.last = " + PAIR.removeprefix("return ") + "\n        return self.last"))  # fmt: skip

bank.edge("world-not-ranks", "sizes-before-copy", "size-accepted", "odd-batch", "part-not-trained")

bank.edge("view-keeps-whole", "weight-without-gradient", "steps-drift", "old-weights")


class RowsFirst(nn.Module):
    """Right numbers: the sum stands in the middle, and the result is gathered."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks, self.up = ranks, rows_by_numbers(feed_forward.up, ranks)
        self.bias, self.down = nn.Parameter(feed_forward.up.bias.detach().clone()), SubLinear(feed_forward.down, ranks)

    def forward(self, x):
        mine = self.ranks.part(self.ranks.copy(x), -1)
        return self.down(F.gelu(self.ranks.sum(self.up(mine)) + self.bias))


bank.several("rows-before-columns", RowsFirst)

bank.slip("rows-before-columns",
    ("column_part(feed_forward.up, ranks)", "row_part(feed_forward.up, ranks)"),
    ("row_part(feed_forward.down, ranks)", "column_part(feed_forward.down, ranks)"),
)  # fmt: skip

six(
    "odd-batch",
    (
        "F.gelu(self.up(self.ranks.copy(x_bsd)))",
        "F.dropout(F.gelu(self.up(self.ranks.copy(x_bsd))), 0.1, not self.training)",
    ),
)

bank.slip("sizes-before-copy", ("        hidden = F.gelu(self.up(self.ranks.copy(x_bsd)))", "        b, s, d = x_bsd.shape\n        hidden = F.gelu(self.up(self.ranks.copy(x_bsd).reshape(b * s, d))).view(b, s, -1)"))  # fmt: skip
