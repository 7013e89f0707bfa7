"""Answers to balise 7 of 17_tensor_slicing: the whole model."""

import copy

import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.functions import SubLinear
from tests.answers.tensor_slicing.layers import OwnWeights, SizesFirst, Written, rows_by_numbers

bank = Bank("17_tensor_slicing", 7, whole=True)


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


bank.several(None, Replaced, PlainReplaced)


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


bank.several(None, Replaced, ManySlices)


TIED = "mine = self.ranks.part(self.ranks.copy(x_bsd), -1)\n        return self.ranks.sum(F.linear(mine, self.token_embedding.weight))"  # fmt: skip

bank.slip("world-not-ranks", ("SlicedAttention(block.attention, ranks)", "SlicedAttention(block.attention, Ranks())"))

bank.slip("world-not-ranks", (TIED, TIED.replace("self.ranks.sum(", "SumOverRanks.apply(")))

bank.slip("world-not-ranks", ("ColumnLinear(model.head, ranks)", "ColumnLinear(model.head, Ranks())"))

ATTENDED = "self.drop(self.attention(self.norm_attention(x_bsd)))"

ADDED = "self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))"

EMBEDDED = "self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))"

bank.hint("residual-dropout-rate", "The dropout of {what} is {rate} in the plain version, but yours is {found:.3g}. "
          "Use its `drop`.")  # fmt: skip
for place in (ATTENDED, ADDED, EMBEDDED):
    inner = place.removeprefix("self.drop(").removesuffix(")")
    bank.slip(None, (place, f"F.dropout({inner}, self.drop.p, self.training)"))
    for rate in ("self.drop.p**2", "self.drop.p / 2", "1 - self.drop.p"):
        bank.slip("residual-dropout-rate", (place, f"F.dropout({inner}, {rate}, self.training and self.drop.p > 0)"))

bank.slip("residual-dropout-rate", (ADDED, "F.dropout(self.drop(self.feed_forward(self.norm_feed_forward(x_bsd))), self.drop.p, self.training)"), variant=True)  # fmt: skip

bank.hint("residual-dropout-elsewhere", "In training, you drop more than {what}, or something else: the input, or "
          "the sum with it.")  # fmt: skip
bank.slip("residual-dropout-elsewhere", ("x_bsd + " + ATTENDED, "self.drop(x_bsd + self.attention(self.norm_attention(x_bsd)))"))  # fmt: skip

bank.slip("residual-dropout-elsewhere", (ADDED, "self.feed_forward(self.drop(self.norm_feed_forward(x_bsd)))"))

bank.slip("residual-dropout-elsewhere", (EMBEDDED, "self.drop(self.token_embedding(tokens_bs)) + self.position_embedding(places_s)"), variant=True)  # fmt: skip


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


bank.several("sizes-before-copy", ReplacedSizesFirst, PlainReplaced)

bank.hint("inner-dropout-lost", "In training, the attention inside your block has no dropout, but the plain block's "
          "has. Its rate is block.attention.dropout.")  # fmt: skip
bank.several("inner-dropout-lost", ReplacedSilent, PlainReplaced, variant=True)

bank.hint("norm-behind", "The norms come after attention and feed-forward. In the plain block they come before them.")
bank.slip("norm-behind", ("self.attention(self.norm_attention(x_bsd))", "self.norm_attention(self.attention(x_bsd))"), ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.norm_feed_forward(self.feed_forward(x_bsd))"))  # fmt: skip

bank.hint("residual-lost", "You return only what attention and feed-forward add. Add each to its input.")
bank.slip("residual-lost", ("x_bsd = x_bsd + self.drop(self.att", "x_bsd = self.drop(self.att"), ("return x_bsd + self.drop", "return self.drop"))  # fmt: skip

bank.slip("residual-lost", ("return x_bsd + self.drop", "return self.drop"))

bank.hint("residual-dropout-lost", "In training, nothing is dropped from {what}. The plain version does it there, "
          "with its `drop`.")  # fmt: skip
bank.slip("residual-dropout-lost", ("self.drop(self.attention(self.norm_attention(x_bsd)))", "self.attention(self.norm_attention(x_bsd))"), ("self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))", "self.feed_forward(self.norm_feed_forward(x_bsd))"))  # fmt: skip

bank.slip("residual-dropout-lost", ("return x_bsd + self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))", "return x_bsd + self.feed_forward(self.norm_feed_forward(x_bsd))"))  # fmt: skip

bank.slip("residual-dropout-lost", ("self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "self.token_embedding(tokens_bs) + self.position_embedding(places_s)"), variant=True)  # fmt: skip

bank.hint("residual-dropout-differs", "In training with dropout, {what} differs between the ranks. Outside the "
          "sliced regions, all ranks must drop out the same numbers: use no ranks.own_random() there, and no seed "
          "that differs between ranks.")  # fmt: skip
bank.slip("residual-dropout-differs", ("return x_bsd + self.drop(self.feed", "with self.attention.ranks.own_random():\n            return x_bsd + self.drop(self.feed"))  # fmt: skip

bank.slip("residual-dropout-differs", ("x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "with self.ranks.own_random():\n            x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))"), variant=True)  # fmt: skip

bank.hint("model-dropout-in-eval", "In evaluation the model's result is not the plain model's, because something is "
          "dropped out.")  # fmt: skip
bank.slip("model-dropout-in-eval", ("self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))", "F.dropout(self.token_embedding(tokens_bs) + self.position_embedding(places_s), self.drop.p)"), variant=True)  # fmt: skip

bank.slip("not-cut", ("self.attention = SlicedAttention(block.attention, ranks)", "self.attention = block.attention"))

bank.slip("not-cut", ("ColumnLinear(model.head, ranks)", "model.head"))

bank.slip("not-cut", ("SlicedEmbedding(model.token_embedding, ranks)", "model.token_embedding"))

bank.slip(
    "too-many-collectives", ("ColumnRow(block.feed_forward, ranks)", "GatheredFeedForward(block.feed_forward, ranks)")
)

bank.hint("tie-broken", "The head and the token embedding hold two parameters, each with a separate gradient. Tied, "
          "they are one parameter.")  # fmt: skip
bank.slip(
    "tie-broken",
    ("None if model.config.tied_head else ColumnLinear(model.head, ranks)", "ColumnLinear(model.head, ranks)"),
    variant=True,
)

bank.slip("norm-behind", ("x_bsd = x_bsd + " + ATTENDED, "x_bsd = self.norm_attention(x_bsd + self.drop(self.attention(x_bsd)))"), ("return x_bsd + " + ADDED, "return self.norm_feed_forward(x_bsd + self.drop(self.feed_forward(x_bsd)))"), variant=True)  # fmt: skip

bank.slip("residual-lost", ("x_bsd = x_bsd + " + ATTENDED, "x_bsd = " + ATTENDED), variant=True)

bank.hint("norms-lost", "The norms are missing: one comes before the attention, one before the feed-forward.")
bank.slip("norms-lost", ("self.attention(self.norm_attention(x_bsd))", "self.attention(x_bsd)"))

bank.slip("norms-lost", ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.feed_forward(x_bsd)"), variant=True)

bank.hint("norms-mixed", "The two norms are swapped: norm_attention comes before the attention, norm_feed_forward "
          "before the feed-forward.")  # fmt: skip
bank.slip(
    "norms-mixed",
    ("self.feed_forward(self.norm_feed_forward(x_bsd))", "self.feed_forward(self.norm_attention(x_bsd))"),
    variant=True,
)

bank.hint("halves-side-by-side", "Attention and feed-forward get the same input. The feed-forward works on the sum "
          "of the input and the attention's result.")  # fmt: skip
bank.slip("halves-side-by-side", ("x_bsd = x_bsd + " + ATTENDED, "y_bsd = x_bsd + " + ATTENDED), ("return x_bsd + ", "return y_bsd + "), variant=True)  # fmt: skip

bank.hint("positions-shifted", "Your positions begin with 1, but the first token has position 0.")
bank.slip(
    "positions-shifted", ("torch.arange(tokens_bs.shape[1],", "torch.arange(1, tokens_bs.shape[1] + 1,"), variant=True
)

bank.hint("blocks-lost", "You use only the first block.")
bank.slip("blocks-lost", ("for block in self.blocks:", "for block in self.blocks[:1]:"), variant=True)

bank.slip(
    "copy-aside",
    ("self.drop = block.drop", "self.drop, self.first = block.drop, block.feed_forward.up.weight.tolist()"),
)

bank.slip("whole-product", (TIED, "return F.linear(x_bsd, self.ranks.gather(self.token_embedding.weight))"))

bank.slip(
    "whole-product", ("return self.head(x_bsd)", "return F.linear(x_bsd, self.ranks.gather(self.head.part.weight, 0))")
)

bank.hint("tables-travel", "For a single token, a rank sends {found} bytes forward, but {wanted} are enough. Do not "
          "send a table of weights. First look up or multiply with this rank's part, then "
          "send the result.")  # fmt: skip
bank.slip(
    "tables-travel",
    ("self.token_embedding(tokens_bs)", "F.embedding(tokens_bs, self.ranks.gather(self.token_embedding.weight))"),
)

bank.slip(
    "tables-travel",
    (
        "self.drop(self.token_embedding(tokens_bs) +",
        "words = self.token_embedding.weight\n"
        "        words = self.ranks.gather(words) if self.head is None else words\n"
        "        whole = self.token_embedding(tokens_bs) if self.head is not None else F.embedding(tokens_bs, words)\n"
        "        x_bsd = self.drop(whole +",
    ),
    ("x_bsd = words =", "words ="),
    variant=True,
)

bank.hint("last-norm-lost", "The last norm is missing: it comes before the head.")
bank.slip("last-norm-lost", ("        x_bsd = self.norm(x_bsd)\n", ""), variant=True)

bank.hint("positions-lost", "The position embedding is missing.")
bank.slip("positions-lost", (" + self.position_embedding(places_s)", ""), variant=True)

bank.slip("not-summed", (TIED, TIED.replace("self.ranks.sum(F.linear(mine, self.token_embedding.weight))", "F.linear(mine, self.token_embedding.weight)")))  # fmt: skip

bank.hint("tied-entrance", "The gradients of {name} differ between the ranks: each rank knows only its own part. "
          "Before the tied head, copy x to the ranks, and only then cut.")  # fmt: skip
bank.slip("tied-entrance", (TIED, TIED.replace("self.ranks.copy(x_bsd)", "x_bsd")))

bank.slip(
    "tied-entrance",
    (TIED, TIED.replace("self.ranks.part(self.ranks.copy(x_bsd), -1)", "self.ranks.copy(self.ranks.part(x_bsd, -1))")),
    variant=True,
)

bank.slip("wrong-order", ("return self.head(x_bsd)", "y = self.head(x_bsd)\n            return torch.cat(y.chunk(2, -1)[::-1], -1) if self.ranks.size > 1 else y"))  # fmt: skip

bank.slip("whole-kept", ("        self.ranks = ranks\n", "        self.ranks, self.model = ranks, [model]\n"))

bank.slip("odd-batch", ("tokens_bs.shape[1], device", "5, device"))

bank.slip("input-gradient-wrong", ("self.attention(self.norm_attention(x_bsd))", "self.attention(self.norm_attention(self.attention.ranks.copy(x_bsd)))"), ("self.ranks = ranks", "self.ranks = ranks"))  # fmt: skip

bank.slip(
    "output-wrong", ("        for block in self.blocks:", "        for block in [self.blocks[0]] * len(self.blocks):")
)

# what only GPUs show
POSITIONS = "        places_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)\n"

bank.hint("positions-not-on-gpu", "On GPUs, a tensor is in the CPU's memory: {error}. Create the layer's own tensors "
          "(positions, a mask, zeros) on the device of its "
          "input: torch.arange(…, device=tokens_bs.device).")  # fmt: skip
bank.slip("positions-not-on-gpu", (POSITIONS, "        places_s = torch.arange(tokens_bs.shape[1])\n"))

bank.slip("positions-not-on-gpu", (POSITIONS, "        places_s = torch.tensor(list(range(tokens_bs.shape[1])))\n"))

bank.slip(
    "positions-not-on-gpu",
    (POSITIONS, "        places_s = torch.ones(tokens_bs.shape[1]).long().cumsum(0) - 1\n"),
    variant=True,
)

bank.slip(
    "sizes-do-not-fit",
    (
        "mine = self.ranks.part(self.ranks.copy(x_bsd), -1)",
        "mine = self.ranks.copy(x_bsd).chunk(2, -1)[self.ranks.rank]",
    ),
)
