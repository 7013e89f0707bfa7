"""Answers to balise 3 of 17_tensor_slicing: a sliced embedding."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlojz_tp import todo
from tests.answers.bank import Bank

bank = Bank("17_tensor_slicing", 3, whole=True)


class Looked(nn.Embedding):
    """An nn.Embedding with the part as its table."""

    def __init__(self, embedding, ranks):
        if embedding.embedding_dim % ranks.size:
            raise ValueError("the ranks do not divide the dimension")
        width = embedding.embedding_dim // ranks.size
        mine = embedding.weight.detach()[:, ranks.rank * width : (ranks.rank + 1) * width]
        super().__init__(len(mine), width, _weight=mine.clone())
        self.ranks = ranks

    def forward(self, tokens):
        return self.ranks.gather(super().forward(tokens))


class Padded(nn.Module):
    """Parts padded with zeros and summed."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.table = ranks, nn.Parameter(ranks.part(embedding.weight, -1).detach().clone())

    def forward(self, tokens):
        n, r = self.table.shape[1], self.ranks.rank
        return self.ranks.sum(F.pad(self.table[tokens], (r * n, (self.ranks.size - r - 1) * n)))


class OneHot(nn.Module):
    """The vocabulary as a product with a one-hot matrix: other ranks' words are rows of zeros."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        words = torch.arange(len(self.weight)) + self.ranks.rank * len(self.weight)
        return self.ranks.sum((tokens.unsqueeze(-1) == words).to(self.weight.dtype) @ self.weight)


class Clamped(nn.Module):
    """Numbers clamped into the table, vectors multiplied by the mask."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        n = len(self.weight)
        mine = tokens // n == self.ranks.rank
        return self.ranks.sum(self.weight[(tokens - self.ranks.rank * n).clamp(0, n - 1)] * mine[..., None])


class ZeroRow(nn.Module):
    """A row of zeros behind this rank's words, for all others."""

    def __init__(self, embedding, ranks):
        super().__init__()
        part = ranks.part(embedding.weight.detach(), 0)
        self.ranks, self.n = ranks, len(part)
        self.table = nn.Embedding(self.n + 1, part.shape[1], padding_idx=self.n, dtype=part.dtype)
        with torch.no_grad():
            self.table.weight[: self.n] = part

    def forward(self, tokens):
        mine = tokens - self.ranks.rank * self.n
        return self.ranks.sum(self.table(torch.where((mine >= 0) & (mine < self.n), mine, self.n)))


class FilledUp(Clamped):
    """A vocabulary that the ranks do not divide is filled up with words that never come, as Megatron-LM does."""

    def __init__(self, embedding, ranks):
        rows = F.pad(embedding.weight.detach(), (0, 0, 0, -embedding.num_embeddings % ranks.size))
        super().__init__(nn.Embedding.from_pretrained(rows), ranks)


class FilledUpTooFar(Clamped):
    """Filled up to a size of its own: rank 0 holds most of the words."""

    def __init__(self, embedding, ranks):
        rows = F.pad(embedding.weight.detach(), (0, 0, 0, 50 * ranks.size - embedding.num_embeddings))
        super().__init__(nn.Embedding.from_pretrained(rows), ranks)


class WholeTravels(Looked):
    """Puts the table together each time."""

    def forward(self, tokens):
        return F.embedding(tokens, self.ranks.gather(self.weight))


class Unfinished(nn.Module):
    """The bonus, left undone."""

    def __init__(self, embedding, ranks):
        super().__init__()
        todo(3)


class Unwritten(nn.Module):
    """The bonus, its forward left undone."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        todo(3)


bank.several(None, Looked, OneHot)

bank.several(None, Padded, Clamped)

bank.several(None, Looked, ZeroRow)

bank.several(None, Looked, FilledUp)

bank.several("unknown-parameter", Looked, FilledUpTooFar)

bank.hint("table-travels", "You pass {found} bytes to collectives {way}, but the vectors of these tokens take only "
          "{wanted}. Do not send the table: look up first, then put the vectors together.")  # fmt: skip
bank.several("table-travels", WholeTravels, Clamped, variant=True)

bank.several(None, Looked, Unfinished)

bank.several(None, Padded, Unwritten)


GATHERED = "self.ranks.gather(F.embedding(tokens, self.weight))"

MASKED = "self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0))"

bank.slip("world-not-ranks", (GATHERED, "GatherFromRanks.apply(F.embedding(tokens, self.weight), -1)"))

bank.slip("world-not-ranks", (MASKED, MASKED.replace("self.ranks.sum(", "SumOverRanks.apply(")))

bank.slip(
    "world-not-ranks", ("tokens - self.ranks.rank * len(self.weight)", "tokens - dist.get_rank() * len(self.weight)")
)

bank.hint("words-cut", "You hold the whole vectors of some words here. SlicedEmbedding holds a part of the vector of "
          "every word.")  # fmt: skip
bank.slip("words-cut", ("ranks.part(embedding.weight, 1)", "ranks.part(embedding.weight, 0)"), variant=True)

bank.hint("columns-cut", "You hold a part of every word's vector here. VocabularyEmbedding holds the whole vectors "
          "of some words.")  # fmt: skip
bank.slip("columns-cut", ("ranks.part(embedding.weight, 0)", "ranks.part(embedding.weight, 1)"), variant=True)

bank.slip(
    "not-cut", ("ranks.part(embedding.weight, 1)", "embedding.weight"), (GATHERED, "F.embedding(tokens, self.weight)")
)

bank.slip("not-cut", ("ranks.part(embedding.weight, 0)", "embedding.weight"))

bank.slip("view-keeps-whole", ("embedding.weight, 1).detach().clone()", "embedding.weight, 1).detach()"))

bank.slip("not-gathered", (GATHERED, "F.embedding(tokens, self.weight)"))

bank.slip("wrong-shape", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight), dim=1)"))

bank.slip(
    "wrong-shape", (GATHERED, "self.ranks.sum(F.embedding(tokens, self.weight)).repeat(1, 1, 1, self.ranks.size)")
)

bank.slip("wrong-order", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight).unsqueeze(-1)).flatten(-2)"))

bank.slip("too-many-collectives", (GATHERED, GATHERED + " + 0 * self.ranks.sum(self.weight.detach()).sum()"))

bank.slip("weight-gradient-wrong", (GATHERED, "self.ranks.gather(self.ranks.copy(F.embedding(tokens, self.weight)))"))

bank.hint("words-not-masked", "You looked up words of other ranks in this rank's rows and added their vectors. Set "
          "these vectors to zero before the sum.")  # fmt: skip
bank.slip("words-not-masked", (MASKED, "self.ranks.sum(vectors)"))

bank.slip("words-not-masked", ("mine.masked_fill(others, 0)", "mine.clamp(0, len(self.weight) - 1)"), (MASKED, "self.ranks.sum(vectors)"))  # fmt: skip

bank.slip("words-not-masked", ("mine.masked_fill(others, 0)", "tokens % len(self.weight)"), (MASKED, "self.ranks.sum(vectors)"), variant=True)  # fmt: skip

bank.hint("masked-late", "Words of other ranks have a zero vector in the result. You applied the mask to the result "
          "of the sum, not to this rank's term.")  # fmt: skip
bank.slip("masked-late", (MASKED, "self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0)).masked_fill(others.unsqueeze(-1), 0)"), variant=True)  # fmt: skip

bank.hint("words-out-of-range", "A word number is outside this rank's part of the table: {error}. If you cut along "
          "the dimension, every rank holds all words. If you cut along the vocabulary, subtract the number of the "
          "first word held, and use a mask for the words of other ranks.")  # fmt: skip
bank.slip("words-out-of-range", ("mine.masked_fill(others, 0)", "mine"))

bank.slip(
    "words-out-of-range",
    ("tokens - self.ranks.rank * len(self.weight)", "tokens"),
    ("| (mine >= len(self.weight))", ""),
    variant=True,
)

bank.slip("output-wrong", ("(mine >= len(self.weight))", "(mine > len(self.weight))"), ("mine.masked_fill(others, 0)", "mine.masked_fill(others, 0) % len(self.weight)"))  # fmt: skip

bank.slip("not-summed", (MASKED, "vectors.masked_fill(others.unsqueeze(-1), 0)"))

bank.slip("summed-too-often", (MASKED, "self.ranks.sum(self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0)))"))

bank.slip("layer-overwrites", ("mine = tokens - self", "mine = tokens.sub_(self"), ("len(self.weight)\n        others", "len(self.weight))\n        others"))  # fmt: skip

bank.slip(
    "size-accepted", ("ranks.part(embedding.weight, 1)", "embedding.weight.tensor_split(ranks.size, 1)[ranks.rank]")
)

bank.slip("size-accepted", ("ranks.part(embedding.weight, 0)", "embedding.weight.tensor_split(ranks.size)[ranks.rank]"))

bank.slip("odd-batch", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight)) if tokens.ndim == 2 else F.embedding(tokens, self.weight)"))  # fmt: skip

bank.slip("graph-cut", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight.detach()))"))

bank.slip("nothing-returned", ("return self.ranks.gather(", "self.ranks.gather("))

# ---------------------------------------------------------------- parts that nobody trains

TABLE = "self.weight = nn.Parameter(ranks.part(embedding.weight, 1).detach().clone())"

FROM = "self.table = nn.Embedding.from_pretrained(ranks.part(embedding.weight, 1).detach().clone())"

LOOK = ("F.embedding(tokens, self.weight))\n\n\nclass Voc", "self.table(tokens))\n\n\nclass Voc")

bank.slip("part-not-trained", (TABLE, FROM), LOOK)

bank.slip("part-not-trained", (TABLE, TABLE.replace("clone())", "clone(), requires_grad=False)")))

bank.slip(None, (TABLE, FROM.replace("clone())", "clone(), freeze=False)")), LOOK)
