"""Balise 1: attention by blocks, against softmax in float64 over all scores; what it holds at any moment."""

import math
from typing import NamedTuple

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, tried, within
from dlojz_tp.judging.checks.long_sequences_and_experts.attention_cases import (
    GIVEN,
    HALF,
    HEADS,
    LENGTHS,
    QKV,
    ROWS,
    SIZE,
    Q,
    causal,
    drawn,
)
from dlojz_tp.judging.checks.long_sequences_and_experts.full_attention import attention
from dlojz_tp.judging.probes.memory import Memory


class State(NamedTuple):
    """As in the notebook."""

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


def fresh(q):
    wide = torch.promote_types(q.dtype, torch.float32)
    zeros = torch.zeros(q.shape, dtype=wide)
    return State(torch.full(q.shape[:3], torch.finfo(wide).min, dtype=wide), zeros[..., 0].clone(), zeros)


def seen_pairs(length, blocks):
    """Booleans (length, length): which query sees which key."""
    pairs = torch.zeros(length, length, dtype=torch.bool)
    for rows, seen in blocks:
        for columns, visible in seen:
            pairs[rows, columns] |= True if visible is None else visible
    return pairs


def state_of(q, k, v, visible):
    """The State, float64, after these keys, with all scores at once."""
    k, v = (one.double().repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return [scores.amax(-1), weights.sum(-1), weights @ v]


def joined(blocks):
    """All keys, values and what is visible of them."""
    shown = [torch.ones(ROWS, k.shape[2], dtype=torch.bool) if m is None else m for k, _, m in blocks]
    return torch.cat([k for k, _, _ in blocks], 2), torch.cat([v for _, v, _ in blocks], 2), torch.cat(shown, 1)


def taken_in(add_block, name, dtype=torch.float32):
    """The State after all blocks of this name."""
    state = fresh(Q.to(dtype))
    for k, v, visible in GIVEN[name]:
        state = add_block(state, Q.to(dtype), k.to(dtype), v.to(dtype), visible)
    return state


def one_block(add_block):
    """The State after one block, and whether what was given has changed."""
    given = State(*(one.float() for one in state_of(Q, *GIVEN["one"][0][:2], torch.ones(ROWS, 6, dtype=torch.bool))))
    q, (k, v, visible) = Q.float(), GIVEN["more"][2]
    k, v = k.float(), v.float()
    before = [one.clone() for one in (*given, q, k, v)]
    add_block(given, q, k, v, visible)
    return [torch.equal(one, old) for one, old in zip((*given, q, k, v), before)].count(False)


LONG, LONG_BLOCK = 768, 64  # a block of scores is small, all scores are not


def half_error(blockwise):
    """Form and largest error of attention in bfloat16."""
    out, _ = blockwise(*HALF, causal(64, 8))
    return [form(out), (out.double() - attention(*HALF, seen_pairs(64, causal(64, 8)))[0]).abs().max().item()]


def observe(add_block, finish, blockwise):
    """States after some blocks, the end, whole sequences, what is held, half precision."""
    yield {"state form": form(taken_in(add_block, "one"))}
    yield {"one": list(taken_in(add_block, "one"))}
    yield {"more": list(taken_in(add_block, "more"))}
    yield {"large": list(taken_in(add_block, "large"))}
    yield {"blind": list(taken_in(add_block, "blind")), "changed": one_block(add_block)}
    yield {"shared": tried(taken_in, add_block, "shared")}
    half = tried(taken_in, add_block, "more", torch.bfloat16)
    yield {"half state": half if isinstance(half, str) else form(half)}
    ended = finish(State(*(one.float() for one in state_of(Q, *joined(GIVEN["more"])))))
    yield {"end form": form(ended)}
    yield {"end": list(ended)}
    found = [
        blockwise(*(one.float() for one in QKV[name]), plan(n, block)) for name, (n, block, plan) in LENGTHS.items()
    ]
    yield {"forms": [form(one) for one in found]}
    yield {"attention": [one[0] for one in found], "lse": [one[1] for one in found]}
    q, k, v = (drawn(1, 2, LONG, SIZE).float() for _ in range(3))
    with Memory() as memory:
        blockwise(q, k, v, causal(LONG, LONG_BLOCK))
    yield {"held": memory.peak}
    yield {"half": tried(half_error, blockwise)}


STATE = [f"float32 {shape}" for shape in ((2, HEADS, ROWS), (2, HEADS, ROWS), (2, HEADS, ROWS, SIZE))]
TRUE = {name: [one.float() for one in state_of(Q, *joined(blocks))] for name, blocks in GIVEN.items()}
END = [one.float() for one in attention(Q, *joined(GIVEN["more"]))]
FOUND = [attention(*QKV[name], seen_pairs(n, plan(n, block))) for name, (n, block, plan) in LENGTHS.items()]
FORMS = [[f"float32 (2, 3, {n}, {SIZE})", f"float32 (2, 3, {n})"] for n, _, _ in LENGTHS.values()]


def state_hint(seen, due):
    """The hint where a State has no number, or another one."""
    return "sees-nothing" if not all(one.isfinite().all() for one in seen) else "wrong-state"


LOOKS = [
    Look("add_block: a State", "state form", STATE, "wrong-form"),
    Value("after one block", "one", TRUE["one"], "wrong-state", fields=silent),
    Value("after five blocks, with larger and smaller scores", "more", TRUE["more"], "wrong-state", fields=silent),
    Value("with scores in the hundreds", "large", TRUE["large"], "overflows", holds=within(1e-3), fields=silent),
    Value("where a query sees nothing of a block", "blind", TRUE["blind"], state_hint, fields=silent),
    Look("what was given stays as it was", "changed", 0, "given-changed"),
    Look("two query heads share a head of keys", "shared", TRUE["shared"], "wrong-state", fields=silent),
    Look("keys and values in bfloat16", "half state", STATE, "half-state"),
    Look("finish: attention and log-sum-exp", "end form", [STATE[2], STATE[0]], "wrong-form"),
    Value("", "end", END, "wrong-end", fields=silent),
    Look("blockwise_attention: " + ", ".join(LENGTHS), "forms", FORMS, "wrong-form"),
    Value("", "attention", [one[0].float() for one in FOUND], "wrong-attention", fields=silent),
    Value("the log-sum-exp", "lse", [one[1].float() for one in FOUND], "wrong-attention", fields=silent),
    Look("bytes held at any moment, of 768 tokens", "held", 2 * 4 * LONG * LONG // 4, "square", holds=at_most),
    Look("in bfloat16: dtype, and largest error", "half", ["bfloat16 (1, 2, 64, 8)", 0.0], "half-state",
         holds=lambda seen, due: isinstance(seen, list) and seen[0] == due[0] and seen[1] < 2e-2),
]  # fmt: skip


def balise_1(add_block, finish, blockwise):
    yield from judged(LOOKS, observe, add_block, finish, blockwise)
