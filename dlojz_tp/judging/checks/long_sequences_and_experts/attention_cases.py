"""Queries, keys and values for attention on one process: all from one generator, so their order counts."""

import torch

DRAWN = torch.Generator().manual_seed(18)
HEADS, SIZE = 4, 8


def drawn(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=DRAWN, dtype=torch.float64)


def causal(length, block):
    """Blocks of keys from the diagonal back to the first, where causal_blocks goes forward."""
    for first in range(0, length, block):
        rows = slice(first, min(first + block, length))
        triangle = torch.ones(rows.stop - first, rows.stop - first, dtype=torch.bool).tril()
        yield rows, [(rows, triangle)] + [(slice(c, c + block), None) for c in range(first - block, -1, -block)]


def every_other(length, block):
    """No causal order: each query sees every other block of keys, and of the second a checkerboard."""
    board = (torch.arange(block)[:, None] + torch.arange(block)) % 2 == 0
    for first in range(0, length, block):
        columns = [slice(c, c + block) for c in range(0, length, 2 * block)]
        yield slice(first, first + block), [(one, board if c == 1 else None) for c, one in enumerate(columns)]


# queries (s), and blocks of keys: how many keys, the scale of their scores, what is visible
ROWS = 5
ONE = [(6, 1.0, None)]
MORE = [(6, 1.0, None), (3, 0.2, None), (4, 3.0, None), (1, 1.0, None), (7, 2.0, torch.arange(35).view(5, 7) % 3 > 0)]
BLIND = [
    (4, 1.0, torch.arange(ROWS)[:, None].expand(5, 4) > 1),
    (6, 1.0, None),
    (3, 2.0, torch.arange(ROWS)[:, None].expand(5, 3) < 3),
]
LARGE = [(4, 300.0, None), (4, 900.0, None), (4, 100.0, None)]
SHARED = [(5, 1.0, None), (4, 2.0, None)]


def blocks_of(plan, groups=HEADS):
    return [(drawn(2, groups, n, SIZE, scale=scale), drawn(2, groups, n, SIZE), visible) for n, scale, visible in plan]


Q = drawn(2, HEADS, ROWS, SIZE)
GIVEN = {name: blocks_of(plan) for name, plan in (("one", ONE), ("more", MORE), ("blind", BLIND), ("large", LARGE))}
GIVEN["shared"] = blocks_of(SHARED, 2)
LENGTHS = {"37 tokens in blocks of 8": (37, 8, causal), "16 in blocks of 16": (16, 16, causal),
           "32 in blocks of 4, not causal": (32, 4, every_other)}  # fmt: skip
QKV = {name: [drawn(2, 3, length, SIZE) for _ in range(3)] for name, (length, _, _) in LENGTHS.items()}
HALF = [drawn(1, 2, 64, SIZE).bfloat16() for _ in range(3)]
