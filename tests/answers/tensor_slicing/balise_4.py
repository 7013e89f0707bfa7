"""Answers to balise 4 of 17_tensor_slicing: attention cut by heads."""

import torch

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.layers import (
    COUNTED,
    MaskHeld,
    Megatron,
    NumberByNumber,
    SizesFirst,
    ThreeDimensions,
    Written,
    rows_by_numbers,
)

bank = Bank("17_tensor_slicing", 4, whole=True)

bank.several(None, rows_by_numbers, Written)

for answer in (Megatron, NumberByNumber, ThreeDimensions, MaskHeld):
    bank.several(None, rows_by_numbers, answer)

bank.several("sizes-before-copy", rows_by_numbers, SizesFirst)


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


bank.several(None, rows_by_numbers, OneBias)


SCALED = "F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)"

SUMMED = "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2))) + self.bias"

bank.slip(None, ("        x_bsd = self.ranks.copy(x_bsd)\n", ""), ("layer(x_bsd)", "layer(y)"), ("        layers = self", "        y = self.ranks.copy(x_bsd)\n        layers = self"))  # fmt: skip

bank.slip(None, ("with self.ranks.own_random():\n            y_bhsk = " + SCALED, "mask = torch.ones(x_bsd.shape[1], x_bsd.shape[1], dtype=torch.bool).tril()\n        with self.ranks.own_random():\n            y_bhsk = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)"))  # fmt: skip

bank.slip("sizes-do-not-fit", (SUMMED, SUMMED.replace("self.ranks.sum(", "self.ranks.gather(")))

bank.hint("scaled-by-width", "You scale the scores by the hidden size, either the whole one or this rank's part. The "
          "scale is 1/√k, where k is the size of one head, and a head is not cut.")  # fmt: skip
bank.slip(
    "scaled-by-width", (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=x_bsd.shape[-1] ** -0.5"))
)

bank.slip(
    "scaled-by-width",
    (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=self.query.out_features ** -0.5")),
    variant=True,
)

bank.hint("not-scaled", "You do not scale the scores. The scale is 1/√k, where k is the size of a head.")
bank.slip("not-scaled", (SCALED, SCALED.replace("is_causal=True", "is_causal=True, scale=1.0")), variant=True)

bank.hint("not-causal", "Every token also attends to later tokens, but attention here is causal.")
bank.slip("not-causal", (SCALED, SCALED.replace(", is_causal=True", "")), variant=True)

bank.slip("odd-batch", (SCALED, SCALED.replace("is_causal=True", "is_causal=self.training")))

bank.hint("heads-not-divided", "The heads are {n} times too small: you split this rank's width into as many heads as "
          "the whole layer has. The rank holds only its share of the heads, each as large as before.")  # fmt: skip
bank.slip("heads-not-divided", ("attention.heads // ranks.size", "attention.heads"), variant=True)

bank.hint("heads-mixed", "You split or join the heads in the wrong way. The numbers of one head are next to each "
          "other: view (b, s, d) as (b, s, heads, k), then swap heads and s. Swap them back before you join the last "
          "two dimensions.")  # fmt: skip
bank.slip("heads-mixed", ("y_bhsk.transpose(1, 2).flatten(2)", "y_bhsk.reshape(*x_bsd.shape[:2], -1)"))

SPLIT = "unflatten(-1, (self.heads, -1)).transpose(1, 2)"

JOINED = "y_bhsk.transpose(1, 2).flatten(2)"

bank.slip("heads-mixed", (SPLIT, "view(len(x_bsd), self.heads, x_bsd.shape[1], -1)"))

bank.slip(
    "heads-mixed",
    (SPLIT, "view(len(x_bsd), self.heads, x_bsd.shape[1], -1)"),
    (JOINED, "y_bhsk.reshape(*x_bsd.shape[:2], -1)"),
)

bank.slip("heads-mixed", (SPLIT, "unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)"))

bank.slip(
    "heads-mixed",
    (SPLIT, "unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)"),
    (JOINED, "y_bhsk.permute(0, 2, 3, 1).flatten(2)"),
    variant=True,
)

bank.hint("scaled-twice", "You scale the scores by too small a number. Either you scale twice, because "
          "F.scaled_dot_product_attention already scales by 1/√k, or you compute k from this rank's number of heads, "
          "and it is N times too large.")  # fmt: skip
bank.slip("scaled-twice", (SCALED, SCALED.replace("(q, k, v", "(q * q.shape[-1] ** -0.5, k, v")), variant=True)

bank.hint("outside-differs", "After the layer, the ranks draw different random numbers, so dropout outside the layer "
          "would no longer be the same on all of them. Keep the ranks' own draws inside ranks.own_random(), and set "
          "no seed.", edge=True)  # fmt: skip
bank.slip("outside-differs", ("with self.ranks.own_random():", "torch.manual_seed(self.ranks.rank)\n        if True:"))

bank.slip(
    "copy-aside",
    ("self.ranks, self.heads", "self.table = attention.query.weight.tolist()\n        self.ranks, self.heads"),
)

bank.slip("world-not-ranks", (SUMMED, SUMMED.replace("self.ranks.sum(", "SumOverRanks.apply(")))

bank.slip("world-not-ranks", ("self.ranks.copy(x_bsd)", "CopyToRanks.apply(x_bsd)"))

bank.slip("world-not-ranks", ("attention.heads // ranks.size", "attention.heads // dist.get_world_size()"))

for length in ("x_bsd.shape[1]", "len(x_bsd[0])"):
    bank.slip("sizes-before-copy", ("        x_bsd = self.ranks.copy(x_bsd)\n", f"        s = {length}\n        x_bsd = self.ranks.copy(x_bsd)\n"), ("unflatten(-1, (self.heads, -1))", "view(len(x_bsd), s, self.heads, -1)"))  # fmt: skip

bank.hint("dropout-rate", "The layer's dropout is {rate}, but yours is {found:.3g}. Use the rate of the plain layer, "
          "whatever the number of ranks, and divide the kept values by 1 - rate "
          "(dropout_p does both).", edge=True)  # fmt: skip
for rate in ("rate**2", "rate / self.ranks.size", "rate and 1 - rate", "rate * 0.9"):
    bank.slip("dropout-rate", ("dropout_p=rate", f"dropout_p={rate}"))

WEIGHTS = """w = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            s = w.shape[-1]
            w = w.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
            """

bank.slip(None, ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = F.dropout(w, rate) @ v"))

bank.slip(None, ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) >= rate) / (1 - rate) @ v"))

bank.hint("dropout-unscaled", "You drop the right values, but you do not divide the kept ones by 1 - {rate}: in "
          "training the layer gives less than in evaluation.", edge=True)  # fmt: skip
bank.slip(
    "dropout-unscaled", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) >= rate) @ v"), variant=True
)

bank.slip("dropout-rate", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * (torch.rand_like(w) < rate) / (1 - rate if rate else 1) @ v if rate else w @ v"), variant=True)  # fmt: skip

bank.hint("mask-shared", "Two heads of one rank, or two sequences, get the same dropout. Each attention weight must "
          "be dropped independently.", edge=True)  # fmt: skip
bank.slip("mask-shared", ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * F.dropout(torch.ones_like(w[:1]), rate) @ v"))

bank.slip(
    "mask-shared",
    ("y_bhsk = " + SCALED, WEIGHTS + "y_bhsk = w * F.dropout(torch.ones_like(w[:, :1]), rate) @ v"),
    variant=True,
)

bank.hint("dropout-elsewhere", "You do not drop attention weights but other numbers (of the result, the values or "
          "the heads, or of the scores before the softmax), or you normalise the weights to a sum of 1 again. The "
          "plain layer drops attention weights (dropout_p).")  # fmt: skip
bank.slip("dropout-elsewhere", (SCALED, "F.scaled_dot_product_attention(q, k, F.dropout(v, rate), is_causal=True)"))

bank.slip("dropout-elsewhere", (SCALED, "F.scaled_dot_product_attention(q, k, F.dropout1d(v.flatten(0, 1), rate).view(v.shape), is_causal=True)"))  # fmt: skip

bank.hint("dropout-lost", "You drop no attention weight in training, although the layer's dropout is {rate}. Apply "
          "dropout to the weights after the softmax, and do not normalise them again.", edge=True)  # fmt: skip
bank.slip("dropout-lost", ("y_bhsk = " + SCALED, "y_bhsk = F.scaled_dot_product_attention(F.dropout(q, rate), F.dropout(k, rate), v, is_causal=True)"))  # fmt: skip

bank.hint("same-mask", "The heads of different ranks get the same dropout, because all ranks draw the same random "
          "numbers. Inside the sliced region, draw them in ranks.own_random().")  # fmt: skip
bank.slip("same-mask", ("with self.ranks.own_random():", "if True:"), variant=True)

bank.slip("outside-differs", ("with self.ranks.own_random():", "if True:\n            torch.manual_seed(self.ranks.rank + int(1000 * torch.rand(1)))"), variant=True)  # fmt: skip

bank.hint("mask-repeats", "Two calls gave the same dropout, or later layers then draw the same numbers: the random "
          "numbers start again each time. Set no seed in forward.", edge=True)  # fmt: skip
bank.slip("mask-repeats", ("with self.ranks.own_random():\n            y_bhsk = " + SCALED, "with torch.random.fork_rng():\n            torch.manual_seed(self.ranks.rank)\n            y_bhsk = " + SCALED))  # fmt: skip

bank.slip("dropout-lost", ("dropout_p=rate", "dropout_p=0.0"), variant=True)

bank.hint("dropout-in-eval", "In evaluation the result is not that of the plain layer: you still apply dropout "
          "(self.training is False).", edge=True)  # fmt: skip
bank.slip("dropout-in-eval", ("self.dropout if self.training else 0.0", "self.dropout"), variant=True)

bank.slip(
    "dropout-elsewhere",
    ("dropout_p=rate, is_causal=True)", "is_causal=True)\n            y_bhsk = F.dropout(y_bhsk, rate)"),
)

bank.hint("dropout-disagrees", "In training with dropout, the ranks' results differ. All ranks must return the same "
          "sum.")  # fmt: skip
bank.slip("dropout-disagrees", (SUMMED, SUMMED.replace("+ self.bias", "+ 0\n        with self.ranks.own_random():\n            return F.dropout(y, rate) + self.bias").replace("return self.ranks.sum", "y = self.ranks.sum", 1)), variant=True)  # fmt: skip

bank.slip(
    "bias-every-rank", (SUMMED, "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + self.bias)")
)

bank.slip("bias-over-n", ("attention.output.bias.detach().clone()", "attention.output.bias.detach() / ranks.size"), (SUMMED, "return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + self.bias)"))  # fmt: skip

bank.slip("bias-cut", ("attention.output.bias.detach().clone()", "ranks.part(attention.output.bias, 0).detach().clone()"), (SUMMED, SUMMED.replace("self.bias", "self.ranks.gather(self.bias)")))  # fmt: skip

bank.slip("bias-lost", (SUMMED, SUMMED.replace(" + self.bias", "")))

bank.slip("slice-lost", ("        self.bias = nn.Parameter(attention.output.bias.detach().clone())\n", ""), (SUMMED, SUMMED.replace(" + self.bias", "")))  # fmt: skip

bank.slip(
    "row-part-bias",
    ("bias=False", "bias=True"),
    ("    part.weight = ", "    part.bias = linear.bias\n    part.weight = "),
)

bank.slip("part-wrong-shape", ("ranks.part(linear.weight, 1)", "ranks.part(linear.weight, 0)"))

bank.slip("part-is-view", ("ranks.part(linear.weight, 1).detach().clone()", "ranks.part(linear.weight, 1).detach()"))

bank.slip("entrance-forgotten", ("self.ranks.copy(x_bsd)", "x_bsd"))

bank.slip("entrance-twice", ("self.ranks.copy(x_bsd)", "self.ranks.copy(self.ranks.copy(x_bsd))"))

bank.slip(
    "too-many-collectives",
    ("        x_bsd = self.ranks.copy(x_bsd)\n", ""),
    ("layer(x_bsd)", "layer(self.ranks.copy(x_bsd))"),
)

bank.slip("not-summed", (SUMMED, SUMMED.replace("self.ranks.sum(", "(")))

bank.slip("summed-too-often", (SUMMED, "return self.ranks.sum(" + SUMMED.removeprefix("return ") + ")"))

bank.slip("size-accepted", ("        if attention.heads % ranks.size:\n            raise ValueError(f\"{ranks.size} ranks do not divide {attention.heads} heads\")\n", ""), ("attention.heads // ranks.size", "max(1, attention.heads // ranks.size)"))  # fmt: skip

bank.slip("wrong-dimension", ("        self.bias = nn.Parameter(attention.output.bias.detach().clone())\n", ""), ("self.output = row_part(attention.output, ranks)", "self.output = column_part(attention.output, ranks)"), (SUMMED, "return self.ranks.gather(self.output(self.ranks.gather(y_bhsk.transpose(1, 2).flatten(2))))"))  # fmt: skip

bank.slip("not-cut", ("self.value = column_part(attention.value, ranks)", "self.value = attention.value"), ("layers = self", "n = self.ranks\n        layers = self"))  # fmt: skip

bank.slip("whole-kept", ("self.ranks, self.heads", "self.plain = [attention]\n        self.ranks, self.heads"))

bank.slip("weight-without-gradient", (SUMMED, SUMMED.replace("+ self.bias", "+ self.bias.detach()")))

bank.slip("weight-times-n", (SUMMED, SUMMED.replace("+ self.bias", "+ self.ranks.copy(self.bias)")))

bank.slip("weight-partial", (SUMMED, SUMMED.replace("+ self.bias", "+ self.bias.detach() + (self.bias - self.bias.detach()) * float(self.ranks.rank == 0)")))  # fmt: skip

WEIGHT = "weight = ranks.part(linear.weight, 1).detach().clone()"

bank.slip("part-dtype", (WEIGHT, WEIGHT + ".float()"))

bank.slip(
    "part-frozen", ("part.weight = nn.Parameter(weight)", "part.weight = nn.Parameter(weight, requires_grad=False)")
)

bank.slip("plain-changed", ("part.weight = nn.Parameter(weight)", "part.weight = linear.weight = nn.Parameter(weight)"))

bank.slip("part-not-trained", ("attention.output.bias.detach().clone()", "attention.output.bias.detach(), requires_grad=False"))  # fmt: skip

bank.slip("view-keeps-whole", ("        self.bias =", "        self.value.weight = nn.Parameter(ranks.part(attention.value.weight, 0).detach())\n        self.bias ="))  # fmt: skip

bank.slip("steps-drift", (SUMMED, COUNTED + SUMMED + " * (1 if self.calls == 1 else 0.5)"))

# what a layer meets later: groups, other lengths and sizes, evaluation, dropout, a frozen or lent part, a second call
bank.edge("world-not-ranks", "sizes-before-copy", "size-accepted", "odd-batch", "length-kept", "steps-drift")

bank.edge("part-is-view", "view-keeps-whole", "plain-changed", "part-dtype", "part-frozen", "part-not-trained")


bank.edge("weight-without-gradient")

ATTEND = "y_bhsk = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)"

KEPT = """if not hasattr(self, "mask"):
                self.mask = torch.ones(q.shape[2], q.shape[2]).bool().tril()
            y_bhsk = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, attn_mask=self.mask)"""

bank.slip("length-kept", (ATTEND, KEPT))

bank.slip("output-wrong", ("dropout_p=rate,", "dropout_p=rate, scale=q.shape[-2] ** -0.5,"))

OWN = "        with self.ranks.own_random():\n"

bank.slip("mask-repeats", (OWN, "        torch.manual_seed(0)\n" + OWN), variant=True)

COPIED = "self.ranks.copy(x_bsd)"

bank.slip("dropout-elsewhere", (COPIED, "self.ranks.copy(F.dropout(x_bsd, self.dropout, self.training))"), variant=True)

bank.slip("bias-every-rank", ("+ self.bias", "+ self.ranks.sum(self.bias)"))

bank.slip(
    "weight-without-gradient",
    (
        "self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2))) + self.bias",
        "self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2)) + (self.bias if self.ranks.rank == 0 else 0))",
    ),
)
