"""Answers to balise 2 of 12_large_models: relative positions, and attention with written-out scores."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 2, whole=True)

# one index into a flat table; the exponentials by hand
FLAT = """
def relative_bias(table, height, width):
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    offsets = places.unsqueeze(1) - places.unsqueeze(0)
    index = (offsets[..., 0] + height - 1) * (2 * width - 1) + offsets[..., 1] + width - 1
    return table.flatten(1)[:, index]


def relative_attention(q, k, v, bias):
    scale = q.size(-1) ** -0.5
    scores = torch.einsum("nhqd,nhkd->nhqk", q * scale, k) + bias
    high = scores.amax(-1, keepdim=True)
    weights = (scores - high).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("nhqk,nhkd->nhqd", weights, v)
"""
bank.text(None, FLAT)

# windows of the table, turned around; the sum of all weights divides at the end
WINDOWS = """
def relative_bias(table, height, width):
    windows = table.unfold(1, height, 1).unfold(2, width, 1).flip(3, 4)
    return windows.reshape(len(table), height * width, height * width)


def relative_attention(q, k, v, bias):
    scores = torch.matmul(q, k.mT)
    scores = scores / math.sqrt(q.shape[3])
    scores = torch.add(scores, bias[None])
    weights = torch.exp(scores - scores.logsumexp(dim=-1)[..., None])
    return torch.matmul(weights, v)


import math
"""
bank.text(None, WINDOWS)
bank.slip(None, ("q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias", "(q / q.shape[-1] ** 0.5) @ k.mT + bias"))

DOWN = "rows[:, None] - rows[None] + height - 1"
RIGHT = "columns[:, None] - columns[None] + width - 1"
SCORES = "q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias"
bank.slip("nothing-returned", ("    return table[:, down, right]\n", ""))

bank.hint(
    "bias-form", "relative_bias returns (heads, places, places), in the dtype of the table; places = height * width."
)
bank.slip("bias-form", ("table[:, down, right]", "table[:, down, right].unsqueeze(0)"))
bank.slip("bias-form", ("table[:, down, right]", "table[:, down[:, 0], right[:, 0]]"))
bank.variant("bias-form", WINDOWS, ("windows.reshape(len(table), height * width, height * width)", "windows"))

bank.hint(
    "wrong-bias",
    "The shape is right, but not every pair has the bias of its offset: query minus key, in rows and in columns.",
)
bank.slip("wrong-bias", (DOWN, "rows[:, None] - rows[None] + 1"))
bank.variant("wrong-bias", FLAT, ("+ offsets[..., 1] + width - 1", "+ offsets[..., 1]"))

bank.hint(
    "key-minus-query",
    "The offsets have the wrong sign: query minus key is expected. With key minus query, the table is mirrored.",
)
bank.slip(
    "key-minus-query",
    (DOWN, "rows[None] - rows[:, None] + height - 1"),
    (RIGHT, "columns[None] - columns[:, None] + width - 1"),
)
bank.slip("key-minus-query", ("table[:, down, right]", "table[:, down, right].transpose(1, 2)"))
bank.variant("key-minus-query", WINDOWS, ("flip(3, 4)", "flip(1, 2)"))
bank.variant(
    "key-minus-query",
    FLAT,
    ("places.unsqueeze(1) - places.unsqueeze(0)", "places.unsqueeze(0) - places.unsqueeze(1)"),
)

bank.hint(
    "not-shifted",
    "Offsets can be negative, and a negative index counts from the end, without an error. Add height - 1 and width "
    "- 1: then the smallest is 0.",
)
bank.slip("not-shifted", (DOWN, "rows[:, None] - rows[None]"), (RIGHT, "columns[:, None] - columns[None]"))
bank.variant(
    "not-shifted",
    FLAT,
    (
        "(offsets[..., 0] + height - 1) * (2 * width - 1) + offsets[..., 1] + width - 1",
        "offsets[..., 0] % (2 * height - 1) * (2 * width - 1) + offsets[..., 1] % (2 * width - 1)",
    ),
)

bank.hint(
    "both-sides-alike",
    "Left and right have the same bias: the offsets have lost their sign. A key above the query is not the same as "
    "one below.",
)
bank.slip(
    "both-sides-alike",
    (DOWN, "(rows[:, None] - rows[None]).abs() + height - 1"),
    (RIGHT, "(columns[:, None] - columns[None]).abs() + width - 1"),
)
bank.variant("both-sides-alike", FLAT, ("places.unsqueeze(0)\n", "places.unsqueeze(0)\n    offsets = offsets.abs()\n"))

bank.hint(
    "column-by-column",
    "The places are numbered column by column. Number them row by row: the column changes fastest.",
)
bank.slip(
    "column-by-column",
    ("repeat_interleave(width)", "repeat(width)"),
    ("repeat(height)", "repeat_interleave(height)"),
)
bank.variant(
    "column-by-column",
    WINDOWS,
    ("    return windows", "    windows = windows.permute(0, 2, 1, 4, 3)\n    return windows"),
)

bank.hint(
    "table-gradient",
    "The numbers are right, but the table gets no gradient, or a wrong one, and it must be learnt. An offset that "
    "several pairs share gets the sum of their gradients. Leave out detach, .data and no_grad.",
)
bank.slip("table-gradient", ("table[:, down, right]", "table.detach()[:, down, right]"))
bank.variant("table-gradient", WINDOWS, ("table.unfold(1", "table.data.unfold(1"))

bank.hint(
    "operators-grow",
    "81 places take {n} more operators than 9: there is a loop over the places. Index the table once, with all pairs.",
)
bank.slip("operators-grow", ("table[:, down, right]", "torch.stack([table[:, d, r] for d, r in zip(down, right)], 1)"))
bank.variant(
    "operators-grow",
    FLAT,
    ("table.flatten(1)[:, index]", "torch.stack([table.flatten(1)[:, one] for one in index], 1)"),
)

bank.hint(
    "attention-form",
    "relative_attention returns (n, heads, places, length of v's vectors), in the dtype of q: for each query, a "
    "vector as long as those of v.",
)
bank.slip("attention-form", ("scores.softmax(dim=-1) @ v", "(scores.softmax(dim=-1) @ v).transpose(1, 2)"))
bank.slip("attention-form", ("scores.softmax(dim=-1) @ v", "scores.softmax(dim=-1)"))
bank.variant(
    "attention-form", WINDOWS, ("return torch.matmul(weights, v)", "return torch.matmul(weights, v).flatten(1, 2)")
)

bank.hint(
    "borrowed",
    "scaled_dot_product_attention does the work here. This time, write out the scores yourself: below you measure "
    "what that costs.",
)
bank.slip("borrowed", ("scores.softmax(dim=-1) @ v", "F.scaled_dot_product_attention(q, k, v, attn_mask=bias)"))
bank.variant("borrowed", FLAT, ("    scale =", "    return F.scaled_dot_product_attention(q, k, v, bias)\n    scale ="))

bank.hint("wrong-attention", "The result is not the softmax over the keys of scores plus bias, times the values.")
bank.slip("wrong-attention", ("scores.softmax(dim=-1) @ v", "scores.sigmoid() @ v"))
bank.slip("wrong-attention", ("q @ k.transpose(-2, -1) /", "(q @ k.transpose(-2, -1)).softmax(-1) /"))
bank.variant(
    "wrong-attention",
    WINDOWS,
    ("scores = torch.add(scores, bias[None])", "scores = torch.add(scores, bias[None]) * 2"),
)

bank.hint(
    "keys-by-queries",
    "The scores or the bias are transposed: each row belongs to a query, and each column to a key.",
)
bank.slip("keys-by-queries", ("q @ k.transpose(-2, -1)", "k @ q.transpose(-2, -1)"))
bank.slip("keys-by-queries", ("** 0.5 + bias", "** 0.5 + bias.mT"))
bank.variant("keys-by-queries", WINDOWS, ("torch.matmul(q, k.mT)", "torch.matmul(q, k.mT).mT"))

bank.hint(
    "not-scaled",
    "The scores are not divided by the square root of a head's size. The longer the vectors, the larger their "
    "products: the softmax would choose one key alone.",
)
bank.slip("not-scaled", (" / q.shape[-1] ** 0.5", ""))
bank.variant("not-scaled", FLAT, ("q * scale", "q"))

bank.hint(
    "scaled-by-size",
    "The scores are divided by the size of a head. A product of d numbers spreads with the *square root* of d.",
)
bank.slip("scaled-by-size", ("q.shape[-1] ** 0.5", "q.shape[-1]"))
bank.variant("scaled-by-size", WINDOWS, ("math.sqrt(q.shape[3])", "q.shape[3]"))

bank.hint(
    "size-written-down",
    "The scores are divided by the square root of a hard-coded size, and here the heads have another. Read the "
    "size from q's shape.",
)
bank.slip("size-written-down", ("q.shape[-1] ** 0.5", "32**0.5"))
bank.slip("size-written-down", ("q.shape[-1] ** 0.5", "8"))
bank.variant("size-written-down", WINDOWS, ("math.sqrt(q.shape[3])", "math.sqrt(32)"))
bank.variant("size-written-down", FLAT, ("q.size(-1) ** -0.5", "64**-0.5"))

bank.hint(
    "scaled-by-width",
    "The scores are divided by the square root of the size of all heads together. Each head has its own scores: "
    "divide by the square root of one head's size.",
)
bank.slip("scaled-by-width", ("q.shape[-1] ** 0.5", "(q.shape[1] * q.shape[-1]) ** 0.5"))
bank.variant("scaled-by-width", FLAT, ("q.size(-1) ** -0.5", "(q.size(1) * q.size(-1)) ** -0.5"))

bank.hint(
    "scaled-by-places",
    "The scores are divided by the square root of the wrong size: the number of places, or the length of v's "
    "vectors. Use the length of q's and k's vectors: that is how many numbers a product adds up.",
)
bank.slip("scaled-by-places", ("q.shape[-1] ** 0.5", "q.shape[-2] ** 0.5"))
bank.slip("scaled-by-places", ("q.shape[-1] ** 0.5", "v.shape[-1] ** 0.5"))
bank.variant("scaled-by-places", WINDOWS, ("math.sqrt(q.shape[3])", "math.sqrt(q.shape[2])"))

bank.hint("bias-scaled", "The bias is divided together with the scores. Add it after the division.")
bank.slip("bias-scaled", (SCORES, "(q @ k.transpose(-2, -1) + bias) / q.shape[-1] ** 0.5"))
bank.variant(
    "bias-scaled",
    WINDOWS,
    ("torch.add(scores, bias[None])", "torch.add(scores, bias[None] / math.sqrt(q.shape[3]))"),
)

bank.hint(
    "over-queries",
    "The softmax goes over the queries, or the heads. Each query distributes its attention over the *keys*, the "
    "last axis.",
)
bank.slip("over-queries", ("softmax(dim=-1)", "softmax(dim=-2)"))
bank.slip("over-queries", ("softmax(dim=-1)", "softmax(dim=1)"))
bank.variant("over-queries", FLAT, ("amax(-1,", "amax(-2,"), (".sum(-1,", ".sum(-2,"))

bank.hint(
    "bias-behind",
    "The bias is added after the softmax: then the weights of a query no longer sum to 1, and may be negative. Add "
    "it to the scores.",
)
bank.slip("bias-behind", (" + bias\n", "\n"), ("scores.softmax(dim=-1) @ v", "(scores.softmax(dim=-1) + bias) @ v"))
bank.variant(
    "bias-behind",
    WINDOWS,
    ("    scores = torch.add(scores, bias[None])\n", ""),
    ("torch.matmul(weights, v)", "torch.matmul(weights + bias, v)"),
)

bank.hint("no-bias", "The bias is not used.")
bank.slip("no-bias", (" + bias\n", "\n"))
bank.variant("no-bias", FLAT, (", k) + bias", ", k)"))

bank.hint(
    "inputs-changed",
    "After the call, {what} is not what it was: an operation wrote into it. The caller and the backward pass still "
    "read it.",
)
bank.slip(
    "inputs-changed",
    (
        "    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5",
        "    scores = q.mul_(q.shape[-1] ** -0.5) @ k.transpose(-2, -1)",
    ),
)
bank.variant("inputs-changed", FLAT, ("q * scale, k) + bias", "q, k.mul_(scale)) + bias"))

bank.hint(
    "overflow",
    "Scores of several thousand have infinite exponentials, which become NaN; clamped scores give other weights. "
    "Subtract each query's largest score first, or use torch.softmax.",
)
bank.slip("overflow", ("scores.softmax(dim=-1) @ v", "scores.exp() / scores.exp().sum(-1, keepdim=True) @ v"))
bank.slip(
    "overflow", ("** 0.5 + bias", "** 0.5 + bias\n    scores = (scores - scores.amax()).exp().nan_to_num().log()")
)
bank.variant("overflow", WINDOWS, ("bias[None])", "bias[None]).clamp(-80, 80)"))
bank.variant("overflow", FLAT, ("(scores - high).exp()", "scores.exp()"))

bank.hint(
    "no-gradient",
    "The values are right, but a gradient is wrong, that of: {what}. q, k, v and the bias all pass gradients on. "
    "Leave out detach, .data and no_grad.",
)
bank.slip("no-gradient", ("** 0.5 + bias", "** 0.5 + bias.detach()"))
bank.variant("no-gradient", FLAT, ("weights = (scores - high).exp()", "weights = (scores - high).detach().exp()"))

bank.hint(
    "float32-inside", "The result is right only to float32 precision, but q, k and v are float64. Keep their dtype."
)
bank.slip("float32-inside", ("scores.softmax(dim=-1)", "scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)"))
bank.variant(
    "float32-inside", FLAT, ("weights = (scores - high).exp()", "weights = (scores - high).float().exp().double()")
)

bank.hint(
    "a-loop-over-heads",
    "Seven heads take {n} more operators than two: there is a loop over the heads. Index all heads at once.",
)
bank.slip("a-loop-over-heads", ("table[:, down, right]", "torch.stack([one[down, right] for one in table])"))
bank.variant(
    "a-loop-over-heads",
    FLAT,
    ("table.flatten(1)[:, index]", "torch.cat([one.flatten()[index][None] for one in table.unbind()])"),
)

bank.slip(None, ("    return table[:, down, right]\n", "    rows, columns = (F.one_hot(one, n).to(table.dtype) for one, n in ((down, table.shape[1]), (right, table.shape[2])))\n"
          "    return torch.einsum('hrc,ijr,ijc->hij', table, rows, columns)\n"))  # fmt: skip
