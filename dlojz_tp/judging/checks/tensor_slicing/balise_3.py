"""Balise 3: an embedding cut along its dimension, and along its vocabulary (bonus)."""

import copy
from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checks.tensor_slicing import parts
from dlojz_tp.judging.checks.tensor_slicing.common import (
    STEPS,
    Form,
    exercise,
    match,
    noise,
    randomise,
    refused,
    together,
    truth,
)  # fmt: skip
from dlojz_tp.judging.checks.tensor_slicing.layers import layer_looks
from dlojz_tp.judging.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each
from dlojz_tp.judging.probes.networks import state
from dlojz_tp.works.balise import BaliseNotDone

WORDS, WIDTH = 80, 12  # many words, few tokens: a table that travels is seen


def _forms(dim):
    """A part of the table; of its rows, one of zeros may stand in front or behind, where other ranks' words are looked up."""
    return [Form(("weight",), dim)] + [Form(("weight",), 0, pad=pad) for pad in ((0, 1), (1, 0)) if dim == 0]


@cache
def _case(dim: int) -> dict:
    plain, other = (randomise(nn.Embedding(WORDS, WIDTH), seed) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    edges = torch.tensor([[0, 19, 20, 39], [40, 59, 60, 79], [7, 33, 46, 71]])  # first and last words of the parts
    others = [torch.randint(WORDS, (3, 4), generator=generator) for _ in range(STEPS - 1)]
    return {
        "plain": plain, "other": other, "forms": _forms(dim), "large": partial(nn.Embedding, 512, 256),
        "batches": [edges, *others],
        "upstream": [noise(3, 4, WIDTH, seed=30 + k) for k in range(STEPS)],
    }  # fmt: skip


@cache
def _truth(dim: int) -> dict:
    return truth(_case(dim))


_OUT_OF_RANGE = tuple(
    (sign, "words-out-of-range") for sign in ("index out of range in self", "is out of bounds for dimension")
)


def _tables(SlicedEmbedding, VocabularyEmbedding, ranks):  # noqa: N803
    report = _table(SlicedEmbedding, 1, ranks)
    if report["stopped"]:
        return report | {"bonus": None}
    try:
        report["bonus"] = _table(VocabularyEmbedding, 0, ranks)
        report["halt"] = report["bonus"]["stopped"]
    except BaliseNotDone:
        report["bonus"] = None
    return report


def _table(Layer, dim, ranks):  # noqa: N803
    report = exercise(Layer, _case(dim), ranks)
    if report["stopped"]:
        return report
    plain = _case(dim)["other"]
    report["odd"] = {
        "a row of tokens": parts.run(Layer, plain, torch.tensor([0, WORDS - 1, 7, 7, 5]), ranks),
        "tokens that are all the last rank's": parts.run(Layer, plain, torch.full((2, 3), WORDS - 1), ranks),
        "a transposed input": parts.run(Layer, plain, torch.arange(WORDS).view(8, 10).t(), ranks),
    }
    sizes = (WORDS, 7) if dim else (7, WIDTH)
    small = randomise(nn.Embedding(*sizes), 4)
    report["refused"] = {7: refused(Layer, small, ranks)} if ranks.size > 1 else {}
    if ranks.size > 1 and not dim and together(not report["refused"][7]):
        report["refused"][7] = _filled_up(Layer, small, ranks)
    return report


def _filled_up(Layer, small, ranks):  # noqa: N803
    """What tells that a vocabulary was filled up with words of zeros, so that it can be shared out, and works; "" if not."""
    layer, whole = (
        Layer(copy.deepcopy(small), ranks),
        {"weight": F.pad(small.weight.detach(), (0, 0, 0, -7 % ranks.size))},
    )
    held = state(layer)
    if not together(len(match(held, _forms(0), whole, ranks.rank, ranks.size)) == len(held) > 0):
        return ""
    with torch.no_grad():
        tokens = torch.arange(7).view(1, 7)
        return "filled up" if close(layer(tokens), small(tokens)) else ""


def _looked_up(size, lookup):
    """Sum over the ranks of `lookup(part, number in the part)`, every word looked up everywhere."""
    weight, tokens = _case(0)["plain"].weight.detach(), _case(0)["batches"][0]
    pieces = weight.chunk(size)
    return sum(lookup(part, tokens - k * len(part)) for k, part in enumerate(pieces))


def _first_word(_rank, size):
    def lookup(part, number):
        return part[number.masked_fill((number < 0) | (number >= len(part)), 0)]

    return _looked_up(size, lookup)


def _nearest_word(_rank, size):
    return _looked_up(size, lambda part, number: part[number.clamp(0, len(part) - 1)])


def _word_modulo(_rank, size):
    return _looked_up(size, lambda part, number: part[number % len(part)])


def _masked_late(rank, size):
    wanted, tokens = _truth(0)["output"], _case(0)["batches"][0]
    return wanted.masked_fill((tokens // (WORDS // size) != rank).unsqueeze(-1), 0)


_KNOWN = (
    *(("words-not-masked", mistake) for mistake in (_first_word, _nearest_word, _word_modulo)),
    ("masked-late", _masked_late),
)


def _looks(dim, known, cut, size):
    named = {"wrong-dimension": cut, "too-much-volume": "table-travels"}
    return [
        *layer_looks(partial(_case, dim), partial(_truth, dim), (1, 0), sent=(3 * 4 * WIDTH * 8, 0), known=known,
                     named=lambda slug, got: named.get(slug, slug), products=False),
        parts.odd("a single row of tokens; tokens that are all in one rank's part; transposed tokens"),
        parts.sizes("a size that does not divide is refused", size),
    ]  # fmt: skip


COLUMNS = _looks(1, (), "words-cut", "A dimension of {n}")
ROWS = _looks(0, _KNOWN, "columns-cut", "A vocabulary of {n}")


def balise_3(SlicedEmbedding, VocabularyEmbedding):  # noqa: N803
    """The table cut by columns; by rows, where that is done."""
    every = on_groups(_tables, SlicedEmbedding, VocabularyEmbedding, known=_OUT_OF_RANGE)
    yield from in_groups_too(_judge, every)


def _judge(every):
    yield from at_each(COLUMNS, every)
    rows = [(size, rank, got["bonus"]) for size, rank, got in every]
    if all(got is None for *_, got in rows):
        yield "the bonus, cut along the vocabulary, is not done yet"
        return
    for claim in at_each(ROWS, rows):
        yield f"bonus: {claim}"
