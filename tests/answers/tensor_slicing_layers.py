"""Answers to 17_tensor_slicing: attention, the two feed-forwards, the whole model (balises 4 to 7)."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.bank import Bank
from tests.answers.tensor_slicing_functions import SubLinear, part_by_numbers

bank = Bank("17_tensor_slicing", whole=True)

# ---------------------------------------------------------------- balise 4


def rows_by_numbers(linear, ranks):
    n = linear.in_features // ranks.size
    if linear.in_features % ranks.size:
        raise ValueError("the ranks do not divide the input features")
    part = nn.Linear(n, linear.out_features, bias=False, device=linear.weight.device, dtype=linear.weight.dtype)
    part.weight.data.copy_(linear.weight.data[:, ranks.rank * n : (ranks.rank + 1) * n])
    return part


class Written(nn.Module):
    """The softmax written out, queries, keys and values in one product."""

    def __init__(self, attention, ranks):
        super().__init__()
        if attention.heads % ranks.size:
            raise ValueError("heads")
        three = [part_by_numbers(layer, ranks) for layer in (attention.query, attention.key, attention.value)]
        self.qkv = nn.Parameter(torch.cat([layer.weight.detach() for layer in three]))
        self.qkv_bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in three]))
        self.out = rows_by_numbers(attention.output, ranks)
        self.b = nn.Parameter(attention.output.bias.detach().clone())
        self.ranks, self.k, self.p = ranks, attention.query.out_features // attention.heads, attention.dropout

    def forward(self, x):
        x = self.ranks.copy(x)
        b, s, _ = x.shape
        qkv = F.linear(x, self.qkv, self.qkv_bias).reshape(b, s, 3, -1, self.k)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / self.k**0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        with self.ranks.own_random():
            weights = F.dropout(scores.softmax(-1), self.p, self.training)
        joined = (weights @ v).transpose(1, 2).reshape(b, s, -1)
        return self.ranks.sum(self.out(joined)) + self.b


bank.several(4, None, rows_by_numbers, Written)


class Megatron(nn.Module):
    """Megatron-LM's fused layer: query, key and value of a head together, head by head."""

    def __init__(self, attention, ranks):
        super().__init__()
        if attention.heads % ranks.size:
            raise ValueError("heads")
        self.ranks, self.heads, self.p = ranks, attention.heads // ranks.size, attention.dropout
        three = attention.query, attention.key, attention.value
        self.qkv, self.qkv_bias = (
            nn.Parameter(self.fused([ranks.part(p, 0).detach() for p in parts]))
            for parts in ([layer.weight for layer in three], [layer.bias for layer in three])
        )
        self.out = rows_by_numbers(attention.output, ranks)
        self.b = nn.Parameter(attention.output.bias.detach().clone())

    def fused(self, parts):
        return torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], 1).flatten(0, 2)

    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)

    def forward(self, x):
        q, k, v = self.split(F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias))
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).flatten(2))) + self.b


class NumberByNumber(Megatron):
    """As in `rearrange(…, "b s (h k three)")`: the three numbers of a place together."""

    def fused(self, parts):
        return torch.stack(parts, 1).flatten(0, 1)

    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, -1, 3)).permute(4, 0, 2, 1, 3)


class ThreeDimensions(Megatron):
    """One parameter of shape (3, d / N, d)."""

    def fused(self, parts):
        return torch.stack(parts)

    def forward(self, x):
        shape = self.qkv.shape
        whole = self.ranks.copy(x)
        q, k, v = (
            F.linear(whole, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w, b in zip(self.qkv.view(shape), self.qkv_bias)
        )
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).flatten(2))) + self.b


class SizesFirst(Written):
    """Sizes taken before ranks.copy, which will lengthen the sequence later."""

    def forward(self, x):
        b, s, _ = x.shape
        qkv = F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias).reshape(b, s, 3, -1, self.k)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).reshape(b, s, -1))) + self.b


class MaskHeld(Megatron):
    """A mask for long sequences, made once and kept."""

    def __init__(self, attention, ranks):
        super().__init__(attention, ranks)
        mask = torch.full((128, 128), float("-inf"), dtype=attention.query.weight.dtype).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.drop = nn.Dropout(attention.dropout)

    def forward(self, x):
        q, k, v = self.split(F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias))
        s, scale = q.shape[2], q.shape[-1] ** -0.5
        with self.ranks.own_random():
            weights = self.drop((torch.einsum("bhqk,bhsk->bhqs", q * scale, k) + self.mask[:s, :s]).softmax(-1))
        return self.ranks.sum(self.out(torch.einsum("bhqs,bhsk->bqhk", weights, v).flatten(2))) + self.b


for answer in (Megatron, NumberByNumber, ThreeDimensions, MaskHeld):
    bank.several(4, None, rows_by_numbers, answer)
bank.several(4, "sizes-before-copy", rows_by_numbers, SizesFirst)


class OneBias(Written):
    """The bias lives on rank 0 alone, which adds it to its term of the sum."""

    def __init__(self, attention, ranks):
        super().__init__(attention, ranks)
        if ranks.rank:
            self.b = None

    def forward(self, x):
        zero = self.ranks
        ours = self.b
        bias = 0 if ours is None else ours
        self.ranks = _NoSum(zero)
        try:
            self.b = None
            self.__dict__["b"] = None
            self._parameters.pop("b", None)
            self.__dict__["b"] = torch.zeros(1, dtype=x.dtype)
            term = super().forward(x)
        finally:
            self.ranks = zero
            self.__dict__.pop("b", None)
            self.register_parameter("b", ours)
        return zero.sum(term + bias)


class _NoSum:
    def __init__(self, ranks):
        self.inner = ranks
        self.copy, self.own_random = ranks.copy, ranks.own_random

    def sum(self, x):
        return x


bank.several(4, None, rows_by_numbers, OneBias)


def four(slug, *changes):
    bank.slip(4, slug, *changes)


SCALED = "F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)"
SUMMED = "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2))) + self.bias"
four(None, ("        x_bsd = self.ranks.copy(x_bsd)\n", ""), ("layer(x_bsd)", "layer(y)"), ("        layers = self", "        y = self.ranks.copy(x_bsd)\n        layers = self"))  # fmt: skip
four(None, ("with self.ranks.own_random():\n            y_bhsk = " + SCALED, "mask = torch.ones(x_bsd.shape[1], x_bsd.shape[1], dtype=torch.bool).tril()\n        with self.ranks.own_random():\n            y_bhsk = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)"))  # fmt: skip
four("sizes-do-not-fit", (SUMMED, SUMMED.replace("self.ranks.sum(", "self.ranks.gather(")))
four("scaled-by-width", (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=x_bsd.shape[-1] ** -0.5")))
four(
    "scaled-by-width",
    (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=self.query.out_features ** -0.5")),
)
four("not-scaled", (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=1.0")))
four("not-causal", (SCALED, SCALED.replace(", is_causal=True", "")))
four("odd-batch", (SCALED, SCALED.replace("is_causal=True", "is_causal=self.training")))
four("heads-not-divided", ("attention.heads // ranks.size", "attention.heads"))
four("heads-mixed", ("y_bhsk.transpose(1, 2).flatten(2)", "y_bhsk.reshape(*x_bsd.shape[:2], -1)"))
SPLIT = "unflatten(-1, (self.heads, -1)).transpose(1, 2)"
JOINED = "y_bhsk.transpose(1, 2).flatten(2)"
four("heads-mixed", (SPLIT, "view(len(x_bsd), self.heads, x_bsd.shape[1], -1)"))
four(
    "heads-mixed",
    (SPLIT, "view(len(x_bsd), self.heads, x_bsd.shape[1], -1)"),
    (JOINED, "y_bhsk.reshape(*x_bsd.shape[:2], -1)"),
)
four("heads-mixed", (SPLIT, "unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)"))
four(
    "heads-mixed",
    (SPLIT, "unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)"),
    (JOINED, "y_bhsk.permute(0, 2, 3, 1).flatten(2)"),
)
four("scaled-twice", (SCALED, SCALED.replace("(q, k, v", "(q * q.shape[-1] ** -0.5, k, v")))
four("outside-differs", ("with self.ranks.own_random():", "torch.manual_seed(self.ranks.rank)\n        if True:"))
four(
    "copy-aside",
    ("self.ranks, self.heads", "self.table = attention.query.weight.tolist()\n        self.ranks, self.heads"),
)
four("world-not-ranks", (SUMMED, SUMMED.replace("self.ranks.sum(", "SumOverRanks.apply(")))
four("world-not-ranks", ("self.ranks.copy(x_bsd)", "CopyToRanks.apply(x_bsd)"))
four("world-not-ranks", ("attention.heads // ranks.size", "attention.heads // dist.get_world_size()"))
for length in ("x_bsd.shape[1]", "len(x_bsd[0])"):
    four("sizes-before-copy", ("        x_bsd = self.ranks.copy(x_bsd)\n", f"        s = {length}\n        x_bsd = self.ranks.copy(x_bsd)\n"), ("unflatten(-1, (self.heads, -1))", "view(len(x_bsd), s, self.heads, -1)"))  # fmt: skip
for rate in ("rate**2", "rate / self.ranks.size", "rate and 1 - rate", "rate * 0.9"):
    four("dropout-rate", ("dropout_p=rate", f"dropout_p={rate}"))
WEIGHTS = """w = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            s = w.shape[-1]
            w = w.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
            """
four(None, ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = F.dropout(w, rate) @ v"))
four(None, ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) >= rate) / (1 - rate) @ v"))
four("dropout-unscaled", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) >= rate) @ v"))
four("dropout-rate", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) < rate) / (1 - rate if rate else 1) @ v if rate else w @ v"))  # fmt: skip
four("mask-shared", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * F.dropout(torch.ones_like(w[:1]), rate) @ v"))
four("mask-shared", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * F.dropout(torch.ones_like(w[:, :1]), rate) @ v"))
four("dropout-elsewhere", (SCALED, "F.scaled_dot_product_attention(q, k, F.dropout(v, rate), is_causal=True)"))
four("dropout-elsewhere", (SCALED, "F.scaled_dot_product_attention(q, k, F.dropout1d(v.flatten(0, 1), rate).view(v.shape), is_causal=True)"))  # fmt: skip
four("dropout-lost", ("y_bhsk = " + SCALED, "y_bhsk = F.scaled_dot_product_attention(F.dropout(q, rate), F.dropout(k, rate), v, is_causal=True)"))  # fmt: skip
four("same-mask", ("with self.ranks.own_random():", "if True:"))
four("outside-differs", ("with self.ranks.own_random():", "if True:\n            torch.manual_seed(self.ranks.rank + int(1000 * torch.rand(1)))"))  # fmt: skip
four("mask-repeats", ("with self.ranks.own_random():\n            y_bhsk = " + SCALED, "with torch.random.fork_rng():\n            torch.manual_seed(self.ranks.rank)\n            y_bhsk = " + SCALED))  # fmt: skip
four("dropout-lost", ("dropout_p=rate", "dropout_p=0.0"))
four("dropout-in-eval", ("self.dropout if self.training else 0.0", "self.dropout"))
four(
    "dropout-elsewhere",
    ("dropout_p=rate, is_causal=True)", "is_causal=True)\n            y_bhsk = F.dropout(y_bhsk, rate)"),
)
four("dropout-disagrees", (SUMMED, SUMMED.replace("+ self.bias", "+ 0\n        with self.ranks.own_random():\n            return F.dropout(y, rate) + self.bias").replace("return self.ranks.sum", "y = self.ranks.sum", 1)))  # fmt: skip
four("bias-every-rank", (SUMMED, "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + self.bias)"))
four("bias-over-n", ("attention.output.bias.detach().clone()", "attention.output.bias.detach() / ranks.size"), (SUMMED, "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + self.bias)"))  # fmt: skip
four("bias-cut", ("attention.output.bias.detach().clone()", "ranks.part(attention.output.bias, 0).detach().clone()"), (SUMMED, SUMMED.replace("self.bias", "self.ranks.gather(self.bias)")))  # fmt: skip
four("bias-lost", (SUMMED, SUMMED.replace(" + self.bias", "")))
four("slice-lost", ("        self.bias = nn.Parameter(attention.output.bias.detach().clone())\n", ""), (SUMMED, SUMMED.replace(" + self.bias", "")))  # fmt: skip
four(
    "row-part-bias",
    ("bias=False", "bias=True"),
    ("    part.weight = ", "    part.bias = linear.bias\n    part.weight = "),
)
four("part-wrong-shape", ("ranks.part(linear.weight, 1)", "ranks.part(linear.weight, 0)"))
four("part-is-view", ("ranks.part(linear.weight, 1).detach().clone()", "ranks.part(linear.weight, 1).detach()"))
four("entrance-forgotten", ("self.ranks.copy(x_bsd)", "x_bsd"))
four("entrance-twice", ("self.ranks.copy(x_bsd)", "self.ranks.copy(self.ranks.copy(x_bsd))"))
four(
    "too-many-collectives",
    ("        x_bsd = self.ranks.copy(x_bsd)\n", ""),
    ("layer(x_bsd)", "layer(self.ranks.copy(x_bsd))"),
)
four("not-summed", (SUMMED, SUMMED.replace("self.ranks.sum(", "(")))
four("summed-too-often", (SUMMED, "return self.ranks.sum(" + SUMMED.removeprefix("return ") + ")"))
four("size-accepted", ("        if attention.heads % ranks.size:\n            raise ValueError(f\"{ranks.size} ranks do not divide {attention.heads} heads\")\n", ""), ("attention.heads // ranks.size", "max(1, attention.heads // ranks.size)"))  # fmt: skip
four("wrong-dimension", ("        self.bias = nn.Parameter(attention.output.bias.detach().clone())\n", ""), ("self.output = row_part(attention.output, ranks)", "self.output = column_part(attention.output, ranks)"), (SUMMED, "return self.ranks.gather(self.output(self.ranks.gather(y_bhsk.transpose(1, 2).flatten(2))))"))  # fmt: skip
four("not-cut", ("self.value = column_part(attention.value, ranks)", "self.value = attention.value"), ("layers = self", "n = self.ranks\n        layers = self"))  # fmt: skip
four("whole-kept", ("self.ranks, self.heads", "self.plain = [attention]\n        self.ranks, self.heads"))
four("weight-without-gradient", (SUMMED, SUMMED.replace("+ self.bias", "+ self.bias.detach()")))
four("weight-times-n", (SUMMED, SUMMED.replace("+ self.bias", "+ self.ranks.copy(self.bias)")))
four("weight-partial", (SUMMED, SUMMED.replace("+ self.bias", "+ self.bias.detach() + (self.bias - self.bias.detach()) * float(self.ranks.rank == 0)")))  # fmt: skip

# ---------------------------------------------------------------- balise 5


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


class Pair(nn.Module):
    """Columns, then rows."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks, self.a, self.b = (
            ranks,
            part_by_numbers(feed_forward.up, ranks),
            rows_by_numbers(feed_forward.down, ranks),
        )
        self.register_parameter("c", nn.Parameter(feed_forward.down.bias.detach().clone()))

    def forward(self, x):
        return torch.add(self.ranks.sum(self.b(nn.functional.gelu(self.a(self.ranks.copy(x))))), self.c)


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


for answer in (Chained, EarlyActivation, Pair):
    bank.several(5, None, answer)


def five(slug, *changes):
    bank.slip(5, slug, *changes)


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

# ---------------------------------------------------------------- balise 6

bank.several(6, None, Pair)
bank.several(6, None, BiasOfRankZero)


class OwnWeights(nn.Module):
    """Plain parameters and products."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks = ranks
        up, down = feed_forward.up, feed_forward.down
        if up.out_features % ranks.size:
            raise ValueError("width")
        mine = torch.arange(up.out_features).view(ranks.size, -1)[ranks.rank]
        self.w1, self.b1 = nn.Parameter(up.weight.detach()[mine]), nn.Parameter(up.bias.detach()[mine])
        self.w2, self.b2 = (
            nn.Parameter(down.weight.detach()[:, mine].t().contiguous()),
            nn.Parameter(down.bias.detach().clone()),
        )

    def forward(self, x):
        h = F.gelu(self.ranks.copy(x) @ self.w1.t() + self.b1)
        return self.b2 + self.ranks.sum(h @ self.w2)


bank.several(6, None, OwnWeights)


def six(slug, *changes):
    bank.slip(6, slug, *changes)


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

# ---------------------------------------------------------------- balise 7


class Replaced(nn.Module):
    """A plain block whose two halves are replaced."""

    def __new__(cls, block, ranks):
        block.attention = Written(block.attention, ranks)
        block.feed_forward = OwnWeights(block.feed_forward, ranks)
        return block


class PlainReplaced(nn.Module):
    """A plain transformer whose parts are replaced, its own forward kept."""

    def __new__(cls, model, ranks):
        tied = model.config.tied_head
        for k, block in enumerate(model.blocks):
            model.blocks[k] = Replaced(block, ranks)
        model.token_embedding = _Words(model.token_embedding, ranks)
        model.head = _TiedWords(model.token_embedding, ranks) if tied else SubLinear(model.head, ranks)
        return model


class _Words(nn.Module):
    """Cut along the vocabulary."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        n = len(self.weight)
        mine = tokens // n == self.ranks.rank
        return self.ranks.sum(self.weight[(tokens - self.ranks.rank * n).clamp(0, n - 1)] * mine[..., None])


class _TiedWords(nn.Module):
    def __init__(self, words, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, words.weight

    def forward(self, x):
        return self.ranks.gather(F.linear(self.ranks.copy(x), self.weight))


bank.several(7, None, Replaced, PlainReplaced)


class ManySlices(nn.Module):
    """The positions cut too; a head cut by rows."""

    def __init__(self, model, ranks):
        super().__init__()
        self.ranks = ranks
        self.words = nn.Parameter(ranks.part(model.token_embedding.weight, 1).detach().clone())
        self.places = nn.Parameter(ranks.part(model.position_embedding.weight, 1).detach().clone())
        self.blocks = nn.ModuleList([Replaced(copy.deepcopy(block), ranks) for block in model.blocks])
        self.norm, self.p = model.norm, model.config.dropout
        self.scores = None if model.config.tied_head else rows_by_numbers(model.head, ranks)

    def forward(self, tokens):
        x = self.ranks.gather(self.words[tokens] + self.places[: tokens.shape[1]])
        x = F.dropout(x, self.p, self.training)
        for block in self.blocks:
            x = block(x)
        mine = self.ranks.part(self.ranks.copy(self.norm(x)), -1)
        return self.ranks.sum(mine @ self.words.t() if self.scores is None else self.scores(mine))


bank.several(7, None, Replaced, ManySlices)


def seven(slug, *changes):
    bank.slip(7, slug, *changes)


TIED = "mine = self.ranks.part(self.ranks.copy(x_bsd), -1)\n        return self.ranks.sum(F.linear(mine, self.token_embedding.weight))"  # fmt: skip
seven("world-not-ranks", ("SlicedAttention(block.attention, ranks)", "SlicedAttention(block.attention, Ranks())"))
seven("world-not-ranks", (TIED, TIED.replace("self.ranks.sum(", "SumOverRanks.apply(")))
seven("world-not-ranks", ("ColumnLinear(model.head, ranks)", "ColumnLinear(model.head, Ranks())"))
ATTENDED = "self.drop(self.attention(self.norm_attention(x_bsd)))"
ADDED = "self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))"
EMBEDDED = "self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))"
for place in (ATTENDED, ADDED, EMBEDDED):
    inner = place.removeprefix("self.drop(").removesuffix(")")
    seven(None, (place, f"F.dropout({inner}, self.drop.p, self.training)"))
    for rate in ("self.drop.p**2", "self.drop.p / 2", "1 - self.drop.p"):
        seven("residual-dropout-rate", (place, f"F.dropout({inner}, {rate}, self.training and self.drop.p > 0)"))
seven("residual-dropout-rate", (ADDED, "F.dropout(self.drop(self.feed_forward(self.norm_feed_forward(x_bsd))), self.drop.p, self.training)"))  # fmt: skip
seven("residual-dropout-elsewhere", ("x_bsd + " + ATTENDED, "self.drop(x_bsd + self.attention(self.norm_attention(x_bsd)))"))  # fmt: skip
seven("residual-dropout-elsewhere", (ADDED, "self.feed_forward(self.drop(self.norm_feed_forward(x_bsd)))"))
seven("residual-dropout-elsewhere", (EMBEDDED, "self.drop(self.token_embedding(tokens_bs)) + self.position_embedding(places_s)"))  # fmt: skip


class ReplacedSizesFirst(nn.Module):
    def __new__(cls, block, ranks):
        block.attention = SizesFirst(block.attention, ranks)
        block.feed_forward = OwnWeights(block.feed_forward, ranks)
        return block


class ReplacedSilent(nn.Module):
    """The attention's dropout is lost."""

    def __new__(cls, block, ranks):
        block.attention.dropout = 0.0
        return Replaced(block, ranks)


bank.several(7, "sizes-before-copy", ReplacedSizesFirst, PlainReplaced)
bank.several(7, "inner-dropout-lost", ReplacedSilent, PlainReplaced)
seven("norm-behind", ("self.attention(self.norm_attention(x_bsd))", "self.norm_attention(self.attention(x_bsd))"), ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.norm_feed_forward(self.feed_forward(x_bsd))"))  # fmt: skip
seven("residual-lost", ("x_bsd = x_bsd + self.drop(self.att", "x_bsd = self.drop(self.att"), ("return x_bsd + self.drop", "return self.drop"))  # fmt: skip
seven("residual-lost", ("return x_bsd + self.drop", "return self.drop"))
seven("residual-dropout-lost", ("self.drop(self.attention(self.norm_attention(x_bsd)))", "self.attention(self.norm_attention(x_bsd))"), ("self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))", "self.feed_forward(self.norm_feed_forward(x_bsd))"))  # fmt: skip
seven("residual-dropout-lost", ("return x_bsd + self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))", "return x_bsd + self.feed_forward(self.norm_feed_forward(x_bsd))"))  # fmt: skip
seven("residual-dropout-lost", ("self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "self.token_embedding(tokens_bs) + self.position_embedding(places_s)"))  # fmt: skip
seven("residual-dropout-differs", ("return x_bsd + self.drop(self.feed", "with self.attention.ranks.own_random():\n            return x_bsd + self.drop(self.feed"))  # fmt: skip
seven("residual-dropout-differs", ("x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "with self.ranks.own_random():\n            x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))"))  # fmt: skip
seven("model-dropout-in-eval", ("self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "F.dropout(self.token_embedding(tokens_bs) + self.position_embedding(places_s), self.drop.p)"))  # fmt: skip
seven("not-cut", ("self.attention = SlicedAttention(block.attention, ranks)", "self.attention = block.attention"))
seven("not-cut", ("ColumnLinear(model.head, ranks)", "model.head"))
seven("not-cut", ("SlicedEmbedding(model.token_embedding, ranks)", "model.token_embedding"))
seven(
    "too-many-collectives", ("ColumnRow(block.feed_forward, ranks)", "GatheredFeedForward(block.feed_forward, ranks)")
)
seven(
    "tie-broken",
    ("None if model.config.tied_head else ColumnLinear(model.head, ranks)", "ColumnLinear(model.head, ranks)"),
)
seven("norm-behind", ("x_bsd = x_bsd + " + ATTENDED, "x_bsd = self.norm_attention(x_bsd + self.drop(self.attention(x_bsd)))"), ("return x_bsd + " + ADDED, "return self.norm_feed_forward(x_bsd + self.drop(self.feed_forward(x_bsd)))"))  # fmt: skip
seven("residual-lost", ("x_bsd = x_bsd + " + ATTENDED, "x_bsd = " + ATTENDED))
seven("norms-lost", ("self.attention(self.norm_attention(x_bsd))", "self.attention(x_bsd)"))
seven("norms-lost", ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.feed_forward(x_bsd)"))
seven(
    "norms-mixed", ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.feed_forward(self.norm_attention(x_bsd))")
)
seven("halves-side-by-side", ("x_bsd = x_bsd + " + ATTENDED, "y_bsd = x_bsd + " + ATTENDED), ("return x_bsd + ", "return y_bsd + "))  # fmt: skip
seven("positions-shifted", ("torch.arange(tokens_bs.shape[1],", "torch.arange(1, tokens_bs.shape[1] + 1,"))
seven("blocks-lost", ("for block in self.blocks:", "for block in self.blocks[:1]:"))
seven(
    "copy-aside",
    ("self.drop = block.drop", "self.drop, self.first = block.drop, block.feed_forward.up.weight.tolist()"),
)
seven("whole-product", (TIED, "return F.linear(x_bsd, self.ranks.gather(self.token_embedding.weight))"))
seven(
    "whole-product", ("return self.head(x_bsd)", "return F.linear(x_bsd, self.ranks.gather(self.head.part.weight, 0))")
)
seven(
    "tables-travel",
    ("self.token_embedding(tokens_bs)", "F.embedding(tokens_bs, self.ranks.gather(self.token_embedding.weight))"),
)
seven(
    "tables-travel",
    (
        "self.drop(self.token_embedding(tokens_bs) +",
        "words = self.token_embedding.weight\n"
        "        words = self.ranks.gather(words) if self.head is None else words\n"
        "        whole = self.token_embedding(tokens_bs) if self.head is not None else F.embedding(tokens_bs, words)\n"
        "        x_bsd = self.drop(whole +",
    ),
    ("x_bsd = words =", "words ="),
)
seven("last-norm-lost", ("        x_bsd = self.norm(x_bsd)\n", ""))
seven("positions-lost", (" + self.position_embedding(places_s)", ""))
seven("not-summed", (TIED, TIED.replace("self.ranks.sum(F.linear(mine, self.token_embedding.weight))", "F.linear(mine, self.token_embedding.weight)")))  # fmt: skip
seven("tied-entrance", (TIED, TIED.replace("self.ranks.copy(x_bsd)", "x_bsd")))
seven("tied-entrance", (TIED, TIED.replace("self.ranks.part(self.ranks.copy(x_bsd), -1)", "self.ranks.copy(self.ranks.part(x_bsd, -1))")))
seven("wrong-order", ("return self.head(x_bsd)", "y = self.head(x_bsd)\n            return torch.cat(y.chunk(2, -1)[::-1], -1) if self.ranks.size > 1 else y"))  # fmt: skip
seven("whole-kept", ("        self.ranks = ranks\n", "        self.ranks, self.model = ranks, [model]\n"))
seven("odd-batch", ("tokens_bs.shape[1], device", "5, device"))
seven("input-gradient-wrong", ("self.attention(self.norm_attention(x_bsd))", "self.attention(self.norm_attention(self.attention.ranks.copy(x_bsd)))"), ("self.ranks = ranks", "self.ranks = ranks"))  # fmt: skip
seven(
    "output-wrong", ("        for block in self.blocks:", "        for block in [self.blocks[0]] * len(self.blocks):")
)


class RowsFirst(nn.Module):
    """Right numbers: the sum stands in the middle, and the result is gathered."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks, self.up = ranks, rows_by_numbers(feed_forward.up, ranks)
        self.bias, self.down = nn.Parameter(feed_forward.up.bias.detach().clone()), SubLinear(feed_forward.down, ranks)

    def forward(self, x):
        mine = self.ranks.part(self.ranks.copy(x), -1)
        return self.down(F.gelu(self.ranks.sum(self.up(mine)) + self.bias))


bank.several(6, "rows-before-columns", RowsFirst)
bank.slip(6, "rows-before-columns",
    ("column_part(feed_forward.up, ranks)", "row_part(feed_forward.up, ranks)"),
    ("row_part(feed_forward.down, ranks)", "column_part(feed_forward.down, ranks)"),
)  # fmt: skip


# what only GPUs show
POSITIONS = "        places_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)\n"
seven("positions-not-on-gpu", (POSITIONS, "        places_s = torch.arange(tokens_bs.shape[1])\n"))
seven("positions-not-on-gpu", (POSITIONS, "        places_s = torch.tensor(list(range(tokens_bs.shape[1])))\n"))
bank.slip(
    7,
    "positions-not-on-gpu",
    (POSITIONS, "        places_s = torch.ones(tokens_bs.shape[1]).long().cumsum(0) - 1\n"),
    variant=True,
)

# what was made for one length, or lies on no device
BIAS = "ranks.part(linear.bias, 0).detach().clone()"
bank.slip(2, "part-on-meta", (f"part.bias = nn.Parameter({BIAS})", f"part.bias.data.copy_({BIAS})"))
bank.slip(2, "part-wrong-values", (BIAS, f"{BIAS} / ranks.size"))
ATTEND = "y_bhsk = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)"
KEPT = """if not hasattr(self, "mask"):
                self.mask = torch.ones(q.shape[2], q.shape[2]).bool().tril()
            y_bhsk = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, attn_mask=self.mask)"""
bank.slip(4, "length-kept", (ATTEND, KEPT))
bank.slip(4, "output-wrong", ("dropout_p=rate,", "dropout_p=rate, scale=q.shape[-2] ** -0.5,"))
OWN = "        with self.ranks.own_random():\n"
bank.slip(4, "mask-repeats", (OWN, "        torch.manual_seed(0)\n" + OWN))
COPIED = "self.ranks.copy(x_bsd)"
bank.slip(4, "dropout-elsewhere", (COPIED, "self.ranks.copy(F.dropout(x_bsd, self.dropout, self.training))"))
bank.slip(4, "bias-every-rank", ("+ self.bias", "+ self.ranks.sum(self.bias)"))
bank.slip(
    4,
    "weight-without-gradient",
    (
        "self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2))) + self.bias",
        "self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + (self.bias if self.ranks.rank == 0 else 0))",
    ),
)
seven(
    "sizes-do-not-fit",
    (
        "mine = self.ranks.part(self.ranks.copy(x_bsd), -1)",
        "mine = self.ranks.copy(x_bsd).chunk(2, -1)[self.ranks.rank]",
    ),
)

six(
    "odd-batch",
    (
        "F.gelu(self.up(self.ranks.copy(x_bsd)))",
        "F.dropout(F.gelu(self.up(self.ranks.copy(x_bsd))), 0.1, not self.training)",
    ),
)
bank.slip(6, "sizes-before-copy", ("        hidden = F.gelu(self.up(self.ranks.copy(x_bsd)))", "        b, s, d = x_bsd.shape\n        hidden = F.gelu(self.up(self.ranks.copy(x_bsd).reshape(b * s, d))).view(b, s, -1)"))  # fmt: skip
