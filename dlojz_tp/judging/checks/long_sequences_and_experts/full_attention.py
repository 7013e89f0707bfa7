"""Attention and its log-sum-exp in float64, with all scores at once."""

import math


def attention(q, k, v, visible):
    """(attention, log-sum-exp) in float64, with all scores at once; groups of query heads share a head of k and v."""
    k, v = (one.double().repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
