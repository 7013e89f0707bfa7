"""Answers to balise 6 of 24_triton_kernels: FlashAttention's forward."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 6)

# the diagonal block first, then the others, which need no mask; powers of two; keys loaded transposed
BY_DIAGONAL = """
@triton.jit
def scores_of(queries, k, first, s, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    key = first + tl.arange(0, BLOCK)
    keys = tl.load(k + key[None, :] * D + tl.arange(0, D)[:, None], mask=(key < s)[None, :], other=0.0)
    return tl.dot(queries, keys) * (scale * 1.4426950408889634)


@triton.jit
def flash(q, k, v, out, s, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(1) * s * D
    q += begin
    k += begin
    v += begin
    last = tl.program_id(0) * BLOCK
    lane, width = tl.arange(0, BLOCK), tl.arange(0, D)
    rows = (last + lane)[:, None]
    queries = tl.load(q + rows * D + width[None, :], mask=rows < s, other=0.0)
    scores = scores_of(queries, k, last, s, scale, D, BLOCK)
    scores = tl.where(lane[:, None] >= lane[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    shares = tl.exp2(scores - top[:, None])
    total = tl.sum(shares, 1)
    mean = tl.dot(shares, tl.load(v + rows * D + width[None, :], mask=rows < s, other=0.0))
    for first in range(0, last, BLOCK):
        scores = scores_of(queries, k, first, s, scale, D, BLOCK)
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        keys = (first + lane)[:, None]
        mean = mean * shrink[:, None] + tl.dot(shares, tl.load(v + keys * D + width[None, :]))
        total = total * shrink + tl.sum(shares, 1)
        top = higher
    tl.store(out + begin + rows * D + width[None, :], mean / total[:, None], mask=rows < s)


def attention(q, k, v, block=32):
    out = torch.empty(q.shape, device=q.device)
    heads, s, d = q.shape
    flash[-(-s // block), heads](q, k, v, out, s, d**-0.5, d, block)
    return out
"""
bank.text(None, BY_DIAGONAL)
bank.slip(None, ("        sums = tl.dot(shares, values, sums * old[:, None])", "        sums *= old[:, None]\n        sums += tl.sum(shares[:, :, None] * values[None], 1)"), ("(tl.program_id(0) + 1) * BLOCK, BLOCK)", "min(s, (tl.program_id(0) + 1) * BLOCK), BLOCK)"))  # fmt: skip
bank.slip(None, ("tl.dot(own, tl.trans(keys)) * factor", "tl.dot(own * factor, keys.trans())"), ('    most = tl.full((BLOCK,), -float("inf"), tl.float32)', "    most = tl.full((BLOCK,), -1e30, tl.float32)"), ('scores, -float("inf"))', "scores, -1e30)"))  # fmt: skip

MASK = '        scores = tl.where(key[None, :] <= query[:, None], scores, -float("inf"))\n'
LOAD_K, LOAD_V = "tl.load(k + there, mask=(key < s)[:, None], other=0.0)", "tl.load(v + there, mask=(key < s)[:, None], other=0.0)"  # fmt: skip
RANGE = "range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK)"
bank.slip("reads-outside", (LOAD_K, "tl.load(k + there)"), (LOAD_V, "tl.load(v + there)"))
bank.edge("writes-outside")
bank.slip("writes-outside", ("sums / total[:, None], mask=(query < s)[:, None])", "sums / total[:, None])"))
bank.slip("never-written", ("triton.cdiv(s, block), heads", "s // block, heads"))
bank.slip("never-written", ("triton.cdiv(s, block), heads", "triton.cdiv(s, block), 1"))
bank.slip("given-changed", ("out = torch.empty_like(q)", "out = q"))
bank.text("no-kernel", "def attention(q, k, v, block=32):\n    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n")  # fmt: skip
bank.slip("pytorch-computes", ("    heads, s, d = q.shape", "    q = q * 1.0\n    heads, s, d = q.shape"))

bank.hint("own-key-hidden", "The first query has no result: it sees no key, and a softmax of nothing is NaN. A query sees its "
                               "own key, and the last block that a program reads is that of its own queries.")  # fmt: skip
bank.slip("own-key-hidden", ("key[None, :] <= query[:, None]", "key[None, :] < query[:, None]"))
bank.slip("own-key-hidden", (RANGE, "range(0, tl.program_id(0) * BLOCK, BLOCK)"))
bank.variant("own-key-hidden", BY_DIAGONAL, ("lane[:, None] >= lane[None, :]", "lane[:, None] > lane[None, :]"))

bank.hint("no-other", "There are infinities or NaN in the last rows. Without `other`, masked values may hold anything, and a "
                         "share of zero times infinity is NaN. Use `other=0.0`.", edge=True)  # fmt: skip
bank.slip("no-other", (LOAD_V, LOAD_V.replace(", other=0.0", "")), (LOAD_K, LOAD_K.replace(", other=0.0", "")))
bank.slip("no-other", (LOAD_V, LOAD_V.replace(", other=0.0", "")))
bank.variant("no-other", BY_DIAGONAL, ("mean = tl.dot(shares, tl.load(v + rows * D + width[None, :], mask=rows < s, other=0.0))", "mean = tl.dot(shares, tl.load(v + rows * D + width[None, :], mask=rows < s))"))  # fmt: skip

bank.hint("wrong-attention", "It isn't softmax(q kᵀ / √d) v. For each query: the new maximum, exponentials relative to it, their "
                                "sum, and the sum of the values weighted by them.")  # fmt: skip
bank.slip("wrong-attention", ("sums / total[:, None], mask", "sums, mask"))
bank.slip("wrong-attention", ("tl.load(v + there", "tl.load(k + there"))
bank.slip("wrong-attention", ("head * s * D + key[:, None] * D", "key[:, None] * D"))
bank.slip("wrong-attention", ("tl.exp(most - new)", "tl.exp(new - most)"))
bank.variant("wrong-attention", BY_DIAGONAL, ("mean / total[:, None], mask", "mean, mask"))

bank.hint("old-sums", "What was summed before a larger score came is relative to the old maximum. Scale both `total` and "
                         "`sums` by `exp(old - new)`.")  # fmt: skip
bank.slip("old-sums", ("sums * old[:, None]", "sums"), ("total * old", "total"))
bank.slip("old-sums", ("sums * old[:, None]", "sums"))
bank.slip("old-sums", ("total * old", "total"))
bank.slip("old-sums", ("        most = new\n", ""))
bank.variant("old-sums", BY_DIAGONAL, ("shrink = tl.exp2(top - higher)", "shrink = tl.exp2(higher - higher)"))

bank.hint("no-factor", "The scores are divided by something else than √d. `factor` is 1 / √d.")
bank.slip("no-factor", (" * factor", ""))
bank.slip("no-factor", ("1 / math.sqrt(d)", "1 / d"))
bank.slip("no-factor", ("1 / math.sqrt(d)", "math.sqrt(d)"))
bank.variant("no-factor", BY_DIAGONAL, ("d**-0.5", "1 / d"))

bank.hint("future-seen", "Queries see keys that come after them. Within a block such scores are minus infinity, so that their "
                            "exponentials are zero.")  # fmt: skip
bank.slip("future-seen", (MASK, '        scores = tl.where(key[None, :] < s, scores, -float("inf"))\n'))
bank.slip("future-seen", ('scores, -float("inf"))', "scores, 0.0)"))
bank.slip("future-seen", (MASK, ""))
bank.variant("future-seen", BY_DIAGONAL, ('scores, float("-inf"))', "scores, 0.0)"))

bank.hint("scores-in-memory", "Scores go through memory: they need s × s numbers a head there, written once and read again. "
                                 "Keep only what belongs to a block, and sum as you go.")  # fmt: skip
bank.slip("scores-in-memory", ("q, k, v, out, s, factor, D:", "q, k, v, out, scratch, s, factor, D:"), ("q, k, v, out, s, 1 /", "q, k, v, out, q.new_empty(heads, s, s), s, 1 /"), ("        new = tl.maximum", "        tl.store(scratch + head * s * s + query[:, None] * s + key[None, :], scores, mask=(query < s)[:, None] & (key < s)[None, :])\n        new = tl.maximum"))  # fmt: skip
bank.variant("scores-in-memory", BY_DIAGONAL, ("def flash(q, k, v, out, s,", "def flash(q, k, v, out, scratch, s,"), ("(q, k, v, out, s, d**", "(q, k, v, out, q.new_empty(heads, s, s), s, d**"), ("    top = tl.max(scores, 1)\n", "    place = scratch + tl.program_id(1) * s * s + rows * s + (last + lane)[None, :]\n    tl.store(place, scores, mask=(rows < s) & (last + lane < s)[None, :])\n    top = tl.max(scores, 1)\n"))  # fmt: skip

bank.hint("future-read", "Blocks of keys are read that none of the program's queries may see. That is nearly half of all blocks: "
                            "end the loop at the block of its own queries.")  # fmt: skip
bank.slip("future-read", (RANGE, "range(0, s, BLOCK)"))
bank.slip("future-read", (RANGE, "range(0, (tl.program_id(0) + 2) * BLOCK, BLOCK)"))
bank.variant("future-read", BY_DIAGONAL, ("    for first in range(0, last, BLOCK):", "    for first in range(last + BLOCK, s, BLOCK):\n        total += 0 * tl.sum(scores_of(queries, k, first, s, scale, D, BLOCK), 1)\n    for first in range(0, last, BLOCK):"))  # fmt: skip

bank.hint("more-reads", "Some rows of q, k or v are read more often than necessary. Load the queries once, before the loop, and "
                           "each block of keys and values once in it.")  # fmt: skip
bank.slip("more-reads", ("        key = start", "        own = tl.load(q + place, mask=(query < s)[:, None], other=0.0)\n        key = start"))  # fmt: skip
bank.slip("more-reads", ("tl.dot(own, tl.trans(keys))", f"tl.dot(own, tl.trans({LOAD_K}))"))
bank.variant("more-reads", BY_DIAGONAL, ("        keys = (first", "        scores = scores_of(queries, k, first, s, scale, D, BLOCK)\n        keys = (first"))  # fmt: skip

bank.hint("unstable", "With scores around 283 or -283 there are infinities or NaN: exponentials overflow, or all are zero. "
                         "Subtract each query's own largest score so far.", edge=True)  # fmt: skip
bank.slip("unstable", ("tl.max(scores, 1)", "tl.max(scores, 0)"))
bank.slip("unstable", ('-float("inf"), tl.float32)', "0.0, tl.float32)"))
bank.slip("unstable", ("new = tl.maximum(most, tl.max(scores, 1))", "new = tl.zeros((BLOCK,), tl.float32)"), ("tl.exp(most - new)", "tl.full((BLOCK,), 1.0, tl.float32)"))  # fmt: skip
bank.slip("unstable", ("        new = tl.maximum(most, tl.max(scores, 1))\n        shares, old = tl.exp(scores - new[:, None]), tl.exp(most - new)\n        total = total * old +", "        shares = tl.exp(scores)\n        total = total +"), ("sums * old[:, None]", "sums"), ("        most = new\n", ""))  # fmt: skip
bank.variant("unstable", BY_DIAGONAL, ("    top = tl.max(scores, 1)\n", "    top = 0 * tl.sum(tl.exp2(scores), 1)\n"), ("higher = tl.maximum(top, tl.max(scores, 1))", "higher = top"))  # fmt: skip

bank.edge("wrong-there")
bank.slip("wrong-there", ("1 / math.sqrt(d)", "0.25"))
bank.variant("wrong-there", BY_DIAGONAL, ("d**-0.5", "16**-0.5"))
