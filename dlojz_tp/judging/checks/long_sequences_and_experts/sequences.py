"""What attention over ranks is compared with: causal attention of the whole text, in float64, on one process."""

import math
from typing import NamedTuple

import torch


class State(NamedTuple):
    """As in the notebook."""

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


def begun(q):
    """The State before the first block."""
    zeros = torch.zeros_like(q)
    return State(torch.full_like(zeros[..., 0], torch.finfo(q.dtype).min), zeros[..., 0], zeros)


def ended(state):
    """The attention of a State; zeros where nothing was seen."""
    return (state.weighted / state.total[..., None]).nan_to_num()


def texts(heads, groups, length, size=4, batch=1, dtype=torch.float64):
    """[q (b, h, s, d), k, v (b, g, s, d)] of a whole text."""
    drawn = torch.Generator().manual_seed(1000 * heads + 100 * groups + length)
    shapes = [(batch, n, length, size) for n in (heads, groups, groups)]
    return [torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype) for shape in shapes]


def truth(q, k, v, dtype=torch.float64, at=None, of=None):
    """(b, h, s, d) in `dtype`, of the values that q, k and v have in their own.

    at, of: the places of queries and of keys in the text, if these are parts of it.
    """
    at, of = (torch.arange(x.shape[2]) if places is None else places for x, places in ((q, at), (k, of)))
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores.masked_fill(of > at[:, None], -math.inf).softmax(-1) @ v).to(dtype)


def piece(x, rank, ranks):
    """The r-th piece of the text; not contiguous, as a chunk is not."""
    return x.chunk(ranks, 2)[rank]
