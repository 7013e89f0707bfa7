"""Balise 6: causal attention in one kernel: what it reads of the keys, and that scores are never written."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, same, silent, within
from dlojz_tp.judging.checks.triton_kernels.watching import (
    KERNEL_LOOKS,
    MANY_PROGRAMS,
    ONE_LAUNCH,
    kernel_parts,
    watched,
)

DRAWS = torch.Generator().manual_seed(0)
HEADS, S, BLOCK = 2, 50, 16
QKV = torch.randn(3, HEADS, S, 16, generator=DRAWS).unbind()
LARGE = torch.randn(3, 1, 40, 32, generator=DRAWS)
LARGE[:2, ..., 31] = 40  # adds 1600 / √32 to all scores of a query, or subtracts it
LARGE[0, :, 1::2, 31] = -40
BLOCKS = -(-S // BLOCK)
# how many times a query, a key and a value is read: by the programs of its own block of queries and of later ones
READS = [[1] * S, *[[BLOCKS - n // BLOCK for n in range(S)]] * 2]


def truth(q, k, v):
    scores = q.double() @ k.double().transpose(1, 2) / q.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(2) @ v.double()).float()


def broken_rows(result):
    """Rows with infinities or NaN, of any head."""
    return sorted({int(row) for row in (~result.isfinite()).any(2).nonzero()[:, 1]})


def observe(attention):
    result, seen, _ = yield from kernel_parts(attention, *QKV, block=BLOCK)
    yield {"broken": broken_rows(result), "values": result, "busy": seen.busy()}
    yield {"reads": [seen.reads(one).amax((0, 2)).tolist() for one in seen.given]}
    yield {"beside": sum(one.storage.nbytes() for one in seen.memories.values()) - 4 * HEADS * S * 16 * 4}
    result, seen, _ = watched(attention, *LARGE, block=32)
    yield {"finite": bool(result.isfinite().all()), "large": result}


def broken(seen, due):
    if 0 not in seen:
        return "no-other"
    return "own-key-hidden" if len(seen) < S else "wrong-attention"


def wrong(seen, due):
    """Queries of the first block see one block of keys: they need no scaling."""
    return "old-sums" if same(seen[:, :BLOCK], due[:, :BLOCK]) else "wrong-attention"


def too_many(seen, due):
    """Reads of the first keys are as due where later keys are read too often: blocks in the future."""
    first = all(a[0] <= b[0] for a, b in zip(seen, due)) and max(seen[0]) <= 1
    return "future-read" if first else "more-reads"


def no_more(seen, due):
    return all(a <= b for one, other in zip(seen, due) for a, b in zip(one, other))


def in_words(seen):
    return f"{sum(map(sum, seen)):,} rows of q, k and v read a head"


LOOKS = [
    Look("as many rows as queries, float32", "form", f"float32 ({HEADS}, {S}, 16)", "another-form"),
    *KERNEL_LOOKS,
    Look("no infinities, no NaN", "broken", [], broken, fields=silent),
    Value("causal attention of 50 queries in blocks of 16", "values", truth(*QKV), wrong),
    Look("scores stay in registers", "beside", HEADS * S * 16, "scores-in-memory", holds=at_most,
         fields=lambda seen, due: {"got": f"{seen:,} bytes beside q, k, v and the result", "expected": "none, or some numbers a query"}),
    Look("queries are read once, no keys of the future", "reads", READS, too_many, holds=no_more,
         fields=lambda seen, due: {"got": in_words(seen), "expected": in_words(due)}),
    ONE_LAUNCH,
    MANY_PROGRAMS,
    Look("scores around 283 or -283, blocks of 32", "finite", True, "unstable"),
    Look("", "large", truth(*LARGE), "wrong-there", holds=within(1e-3),
         fields={"what": "40 queries of 32 numbers in blocks of 32, with scores around 283 or -283"}),
]  # fmt: skip


def balise_6(attention):
    yield from judged(LOOKS, observe, attention)
