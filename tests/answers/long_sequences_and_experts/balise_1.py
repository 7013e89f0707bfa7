"""Answers to balise 1 of 18_long_sequences_and_experts: online softmax."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 1, whole=True)

# the old maximum is one more score, whose value is the old sum
ONE_MORE = """
def add_block(state, q, k, v, visible=None):
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.cat([state.maximum[..., None], scores_of(q, k, visible)], -1)
    top = scores.max(-1).values
    p = (scores - top.unsqueeze(-1)).exp()
    total = p[..., 0] * state.total + p[..., 1:].sum(-1)
    weighted = p[..., :1] * state.weighted + torch.einsum("bhsn,bhnd->bhsd", p[..., 1:], v.to(p.dtype))
    return State(top, total, weighted)


def finish(state):
    lse = state.total.log() + state.maximum
    return state.weighted * (1 / state.total).unsqueeze(-1), lse


def blockwise_attention(q, k, v, blocks):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, seen in blocks:
        state, mine = start(q[:, :, rows]), q[:, :, rows]
        for columns, visible in seen:
            state = add_block(state, mine, k[:, :, columns], v[:, :, columns], visible)
        out[:, :, rows], lse[:, :, rows] = finish(state)
    return out, lse
"""
bank.text(None, ONE_MORE)

# each block by itself first, then the two are merged; groups are never repeated
MERGED = """
def add_block(state, q, k, v, visible=None):
    wide = state.weighted.dtype
    groups = q.unflatten(1, (k.shape[1], -1)).to(wide)
    scores = torch.einsum("bgxsd,bgnd->bgxsn", groups, k.to(wide)).flatten(1, 2) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = torch.where(visible, scores, -math.inf)
    own = scores.amax(-1).clamp(min=torch.finfo(wide).min)
    weights = torch.exp(scores - own[..., None])
    values = torch.einsum("bgxsn,bgnd->bgxsd", weights.unflatten(1, (k.shape[1], -1)), v.to(wide)).flatten(1, 2)
    maximum = torch.maximum(state.maximum, own)
    old, new = torch.exp(state.maximum - maximum), torch.exp(own - maximum)
    total = old * state.total + new * weights.sum(-1)
    return State(maximum, total, old[..., None] * state.weighted + new[..., None] * values)


def finish(state):
    return state.weighted / state.total.unsqueeze(-1), torch.log(state.total) + state.maximum


def blockwise_attention(q, k, v, blocks):
    found = []
    for rows, seen in blocks:
        state = start(q[:, :, rows])
        for columns, visible in seen:
            state = add_block(state, q[:, :, rows], k[:, :, columns], v[:, :, columns], visible)
        found.append(finish(state))
    outs, sums = zip(*found)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)
"""
bank.text(None, MERGED)
bank.slip(None, ("torch.exp(scores - maximum[..., None])", "(scores - maximum.unsqueeze(-1)).exp_()"))

bank.hint(
    "wrong-form", "The result has another form than the docstring says. Expected: {expected}. You returned: {got}."
)
bank.slip("wrong-form", ("return State(maximum, fade * state.total + weights.sum(-1), ", "return ("))
bank.slip(
    "wrong-form",
    (
        "return state.weighted / state.total[..., None], state.maximum + state.total.log()",
        "return state.weighted / state.total[..., None]",
    ),
)
bank.slip("wrong-form", ("return torch.cat(outs, 2), torch.cat(sums, 2)", "return torch.cat(outs, 2)"))
bank.variant(
    "wrong-form",
    MERGED,
    ("torch.log(state.total) + state.maximum", "(torch.log(state.total) + state.maximum)[..., None]"),
)
bank.variant("wrong-form", MERGED, ("return torch.cat(outs, 2).to(q.dtype), torch", "return torch"))
bank.variant(
    "wrong-form",
    ONE_MORE,
    ("return State(top, total, weighted)", "return State(top[..., None], total[..., None], weighted)"),
)

bank.hint("not-rescaled", "Earlier sums are not rescaled. They were made with the old maximum: when a larger score "
                             "comes, multiply `total` and `weighted` by exp(old maximum − new maximum).")  # fmt: skip
bank.slip("not-rescaled", ("fade[..., None] * state.weighted", "state.weighted"), ("fade * state.total", "state.total"))
bank.slip("not-rescaled", ("fade[..., None] * state.weighted", "state.weighted"))
bank.slip("not-rescaled", ("fade * state.total", "state.total"))
bank.variant(
    "not-rescaled",
    ONE_MORE,
    ("p[..., :1] * state.weighted", "state.weighted"),
    ("p[..., 0] * state.total", "state.total"),
)
bank.variant("not-rescaled", MERGED, ("old * state.total", "state.total"))

bank.hint("forgets", "Earlier blocks are forgotten: after several blocks the State is that of the last one. Add the "
                        "new sums to the earlier ones, and take the maximum over both.")  # fmt: skip
bank.slip(
    "forgets", ("fade[..., None] * state.weighted + weights", "weights"), ("fade * state.total + weights", "weights")
)
bank.slip("forgets", ("torch.maximum(state.maximum, scores.amax(-1))", "scores.amax(-1)"), ("fade[..., None] * state.weighted + weights", "weights"), ("fade * state.total + weights", "weights"))  # fmt: skip
bank.variant("forgets", MERGED, ("old * state.total + new", "new"), ("old[..., None] * state.weighted + new", "new"))

bank.hint("overflows", "With scores in the hundreds the State is no longer right. exp(score) overflows in float32: "
                          "subtract the maximum before every exp, also where you rescale.", edge=True)  # fmt: skip
bank.slip("overflows", ("torch.exp(scores - maximum[..., None]), torch.exp(state.maximum - maximum)",
                           "torch.exp(scores) * torch.exp(-maximum)[..., None], torch.exp(state.maximum - maximum)"))  # fmt: skip
bank.slip(
    "overflows", ("torch.exp(state.maximum - maximum)", "torch.exp(state.maximum.clamp(min=-50)) / torch.exp(maximum)")
)
bank.variant("overflows", ONE_MORE, ("(scores - top.unsqueeze(-1)).exp()", "scores.exp() / top.unsqueeze(-1).exp()"))

bank.hint("sees-nothing", "A query that sees nothing of a block gets NaN: its scores are all -inf, and -inf − (-inf) is "
                             "NaN. Subtract the running maximum, which `start` makes finite.", edge=True)  # fmt: skip
bank.slip("sees-nothing", ("torch.exp(scores - maximum[..., None])", "torch.exp(scores - scores.amax(-1, keepdim=True)) * torch.exp(scores.amax(-1) - maximum)[..., None]"))  # fmt: skip
bank.variant("sees-nothing", MERGED, (".clamp(min=torch.finfo(wide).min)", ""))

bank.hint("wrong-state", "This is not the State after these blocks. `maximum` is the largest score of all blocks; "
                            "each weight is exp(score − maximum); `total` is their sum over the keys, and `weighted` "
                            "the sum of the values times the weights.")  # fmt: skip
bank.slip("wrong-state", ("torch.maximum(state.maximum, scores.amax(-1))", "scores.amax(-1)"))
bank.variant("wrong-state", MERGED, ("torch.maximum(state.maximum, own)", "own"))
bank.slip("wrong-state", ("torch.exp(scores - maximum[..., None])", "scores.softmax(-1)"))
bank.slip("wrong-state", ("torch.exp(state.maximum - maximum)", "torch.exp(maximum - state.maximum)"))
bank.variant("wrong-state", ONE_MORE, ("p = (scores - top.unsqueeze(-1)).exp()", "p = scores.softmax(-1)"))

bank.hint("given-changed", "You changed a tensor that was given. Other ranks or a retry may still need the old State: "
                              "make new tensors.", edge=True)  # fmt: skip
bank.slip("given-changed", ("fade[..., None] * state.weighted", "state.weighted.mul_(fade[..., None])"))
bank.variant(
    "given-changed",
    ONE_MORE,
    ("p[..., 0] * state.total + p[..., 1:].sum(-1)", "state.total.mul_(p[..., 0]).add_(p[..., 1:].sum(-1))"),
)

bank.hint("half-state", "In bfloat16 this is not right: {got}. The State stays in float32, and so do the weights: "
                           "convert the values to the weights' dtype before the product.", edge=True)  # fmt: skip
bank.slip("half-state", (", v.to(state.weighted.dtype)", ", v"))
bank.slip("half-state", ("return State(maximum, fade * state.total + weights.sum(-1), fade[..., None] * state.weighted + weights @ v)", "return State(*(one.to(q.dtype) for one in (maximum, fade * state.total + weights.sum(-1), fade[..., None] * state.weighted + weights @ v)))"))  # fmt: skip
bank.variant(
    "half-state", ONE_MORE, ("return State(top, total, weighted)", "return State(top, total, weighted.to(v.dtype))")
)

bank.hint("wrong-end", "finish is not right. Attention is `weighted / total`. The log of the sum of exp(score) has to "
                          "put back the maximum that the weights leave out: maximum + log(total).")  # fmt: skip
END = "return state.weighted / state.total[..., None], state.maximum + state.total.log()"
bank.slip("wrong-end", (", state.maximum + state.total.log()", ", state.total.log()"))
bank.slip("wrong-end", (END, "return state.weighted, state.maximum + state.total.log()"))
bank.slip("wrong-end", ("state.maximum + state.total.log()", "state.maximum * state.total.log()"))
bank.variant("wrong-end", MERGED, ("torch.log(state.total) + state.maximum", "torch.log(state.total)"))
bank.variant("wrong-end", ONE_MORE, ("lse = state.total.log() + state.maximum", "lse = state.total + state.maximum"))

ADDED = "            state = add_block(state, q[:, :, rows], k[:, :, columns], v[:, :, columns], visible)\n"
bank.hint("one-block-only", "Only one block of keys counts for each query. Hand the State that came back to the next "
                               "call of add_block.")  # fmt: skip
bank.slip("one-block-only", ("add_block(state, q[", "add_block(start(q[:, :, rows]), q["))
bank.slip("one-block-only", (ADDED, ADDED + "            break\n"))
bank.slip("one-block-only", (ADDED, ADDED.replace("state = add", "last = add") + "        state = last\n"))
bank.variant("one-block-only", ONE_MORE, ("add_block(state, mine", "add_block(start(mine), mine"))

bank.hint("wrong-attention", "The attention of the sequence is not right, though add_block and finish are. For each "
                                "block, cut q with `rows`, k and v with `columns`, and pass on its own `visible`.")  # fmt: skip
bank.slip("wrong-attention", ("v[:, :, columns], visible)", "v[:, :, columns])"))
bank.variant("wrong-attention", MERGED, ("v[:, :, columns], visible)", "v[:, :, columns], None)"))
bank.variant("wrong-attention", ONE_MORE, ("out[:, :, rows], lse[:, :, rows] = finish(state)", "out[:, :, rows], lse[:, :, rows] = finish(state)[0], state.maximum"))  # fmt: skip
bank.slip("wrong-attention", ("k[:, :, columns], v[:, :, columns]", "v[:, :, columns], k[:, :, columns]"))
bank.variant("wrong-attention", MERGED, ("k[:, :, columns], v[:, :, columns]", "k[:, :, columns], k[:, :, columns]"))

WHOLE = """
def blockwise_attention(q, k, v, blocks):
    visible = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    for rows, seen in blocks:
        for columns, shown in seen:
            visible[rows, columns] = True if shown is None else shown
    out, lse = finish(add_block(start(q), q, k, v, visible))
    return out.to(q.dtype), lse
"""
bank.hint("square", "At some moment this holds {got} bytes, which grows with the square of the sequence. Add one block of scores at a "
                       "time, and keep none of them.")  # fmt: skip
bank.slip("square", ("def blockwise_attention(q, k, v, blocks):", "def unused(q, k, v, blocks):"), ("return torch.cat(outs, 2), torch.cat(sums, 2)\n", "return torch.cat(outs, 2), torch.cat(sums, 2)\n" + WHOLE))  # fmt: skip
bank.slip("square", ("    outs, sums = [], []\n", "    outs, sums, kept = [], [], []\n"), (ADDED, "            kept.append(scores_of(q[:, :, rows], k[:, :, columns], visible))\n" + ADDED))  # fmt: skip
bank.variant("square", ONE_MORE, ("    out, lse = torch.empty_like(q)", "    every = scores_of(q, k)\n    out, lse = torch.empty_like(q)"))  # fmt: skip
