"""Answers to balise 2 of 12_large_models: relative positions, and attention with written-out scores."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", whole=True)

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
bank.text(2, None, FLAT)

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
bank.text(2, None, WINDOWS)
bank.slip(2, None, ("q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias", "(q / q.shape[-1] ** 0.5) @ k.mT + bias"))

DOWN = "rows[:, None] - rows[None] + height - 1"
RIGHT = "columns[:, None] - columns[None] + width - 1"
SCORES = "q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias"
bank.slip(2, "nothing-returned", ("    return table[:, down, right]\n", ""))

bank.hint(
    2, "bias-form", "relative_bias returns (heads, places, places), in the dtype of the table; places = height * width."
)
bank.slip(2, "bias-form", ("table[:, down, right]", "table[:, down, right].unsqueeze(0)"))
bank.slip(2, "bias-form", ("table[:, down, right]", "table[:, down[:, 0], right[:, 0]]"))
bank.variant(2, "bias-form", WINDOWS, ("windows.reshape(len(table), height * width, height * width)", "windows"))

bank.hint(
    2,
    "wrong-bias",
    "The shape is right, but not every pair has the bias of its offset: query minus key, in rows and in columns.",
)
bank.slip(2, "wrong-bias", (DOWN, "rows[:, None] - rows[None] + 1"))
bank.variant(2, "wrong-bias", FLAT, ("+ offsets[..., 1] + width - 1", "+ offsets[..., 1]"))

bank.hint(
    2, "key-minus-query", "The offsets have the wrong sign: query minus key is expected. With key minus query, the "
                          "table is mirrored."
)
bank.slip(
    2,
    "key-minus-query",
    (DOWN, "rows[None] - rows[:, None] + height - 1"),
    (RIGHT, "columns[None] - columns[:, None] + width - 1"),
)
bank.slip(2, "key-minus-query", ("table[:, down, right]", "table[:, down, right].transpose(1, 2)"))
bank.variant(2, "key-minus-query", WINDOWS, ("flip(3, 4)", "flip(1, 2)"))
bank.variant(
    2,
    "key-minus-query",
    FLAT,
    ("places.unsqueeze(1) - places.unsqueeze(0)", "places.unsqueeze(0) - places.unsqueeze(1)"),
)

bank.hint(
    2,
    "not-shifted",
    "Offsets can be negative, and a negative index counts from the end, without an error. Add height - 1 and width "
    "- 1: then the smallest is 0.",
)
bank.slip(2, "not-shifted", (DOWN, "rows[:, None] - rows[None]"), (RIGHT, "columns[:, None] - columns[None]"))
bank.variant(
    2,
    "not-shifted",
    FLAT,
    (
        "(offsets[..., 0] + height - 1) * (2 * width - 1) + offsets[..., 1] + width - 1",
        "offsets[..., 0] % (2 * height - 1) * (2 * width - 1) + offsets[..., 1] % (2 * width - 1)",
    ),
)

bank.hint(
    2,
    "both-sides-alike",
    "Left and right have the same bias: the offsets have lost their sign. A key above the query is not the same as "
    "one below.",
)
bank.slip(
    2,
    "both-sides-alike",
    (DOWN, "(rows[:, None] - rows[None]).abs() + height - 1"),
    (RIGHT, "(columns[:, None] - columns[None]).abs() + width - 1"),
)
bank.variant(
    2, "both-sides-alike", FLAT, ("places.unsqueeze(0)\n", "places.unsqueeze(0)\n    offsets = offsets.abs()\n")
)

bank.hint(
    2, "column-by-column", "The places are numbered column by column. Number them row by row: the column changes "
                           "fastest."
)
bank.slip(
    2,
    "column-by-column",
    ("repeat_interleave(width)", "repeat(width)"),
    ("repeat(height)", "repeat_interleave(height)"),
)
bank.variant(
    2,
    "column-by-column",
    WINDOWS,
    ("    return windows", "    windows = windows.permute(0, 2, 1, 4, 3)\n    return windows"),
)

bank.hint(
    2,
    "table-gradient",
    "The numbers are right, but the table gets no gradient, or a wrong one, and it must be learnt. An offset that "
    "several pairs share gets the sum of their gradients. Leave out detach, .data and no_grad.",
)
bank.slip(2, "table-gradient", ("table[:, down, right]", "table.detach()[:, down, right]"))
bank.variant(2, "table-gradient", WINDOWS, ("table.unfold(1", "table.data.unfold(1"))

bank.hint(
    2,
    "operators-grow",
    "81 places take {n} more operators than 9: there is a loop over the places. Index the table once, with all pairs.",
)
bank.slip(
    2, "operators-grow", ("table[:, down, right]", "torch.stack([table[:, d, r] for d, r in zip(down, right)], 1)")
)
bank.variant(
    2,
    "operators-grow",
    FLAT,
    ("table.flatten(1)[:, index]", "torch.stack([table.flatten(1)[:, one] for one in index], 1)"),
)

bank.hint(
    2,
    "attention-form",
    "relative_attention returns (n, heads, places, length of v's vectors), in the dtype of q: for each query, a "
    "vector as long as those of v.",
)
bank.slip(2, "attention-form", ("scores.softmax(dim=-1) @ v", "(scores.softmax(dim=-1) @ v).transpose(1, 2)"))
bank.slip(2, "attention-form", ("scores.softmax(dim=-1) @ v", "scores.softmax(dim=-1)"))
bank.variant(
    2, "attention-form", WINDOWS, ("return torch.matmul(weights, v)", "return torch.matmul(weights, v).flatten(1, 2)")
)

bank.hint(
    2,
    "borrowed",
    "scaled_dot_product_attention does the work here. This time, write out the scores yourself: below you measure "
    "what that costs.",
)
bank.slip(2, "borrowed", ("scores.softmax(dim=-1) @ v", "F.scaled_dot_product_attention(q, k, v, attn_mask=bias)"))
bank.variant(
    2, "borrowed", FLAT, ("    scale =", "    return F.scaled_dot_product_attention(q, k, v, bias)\n    scale =")
)

bank.hint(2, "wrong-attention", "The result is not the softmax over the keys of scores plus bias, times the values.")
bank.slip(2, "wrong-attention", ("scores.softmax(dim=-1) @ v", "scores.sigmoid() @ v"))
bank.slip(2, "wrong-attention", ("q @ k.transpose(-2, -1) /", "(q @ k.transpose(-2, -1)).softmax(-1) /"))
bank.variant(
    2,
    "wrong-attention",
    WINDOWS,
    ("scores = torch.add(scores, bias[None])", "scores = torch.add(scores, bias[None]) * 2"),
)

bank.hint(
    2,
    "keys-by-queries",
    "The scores or the bias are transposed: each row belongs to a query, and each column to a key.",
)
bank.slip(2, "keys-by-queries", ("q @ k.transpose(-2, -1)", "k @ q.transpose(-2, -1)"))
bank.slip(2, "keys-by-queries", ("** 0.5 + bias", "** 0.5 + bias.mT"))
bank.variant(2, "keys-by-queries", WINDOWS, ("torch.matmul(q, k.mT)", "torch.matmul(q, k.mT).mT"))

bank.hint(
    2,
    "not-scaled",
    "The scores are not divided by the square root of a head's size. The longer the vectors, the larger their "
    "products: the softmax would choose one key alone.",
)
bank.slip(2, "not-scaled", (" / q.shape[-1] ** 0.5", ""))
bank.variant(2, "not-scaled", FLAT, ("q * scale", "q"))

bank.hint(
    2,
    "scaled-by-size",
    "The scores are divided by the size of a head. A product of d numbers spreads with the *square root* of d.",
)
bank.slip(2, "scaled-by-size", ("q.shape[-1] ** 0.5", "q.shape[-1]"))
bank.variant(2, "scaled-by-size", WINDOWS, ("math.sqrt(q.shape[3])", "q.shape[3]"))

bank.hint(
    2,
    "size-written-down",
    "The scores are divided by the square root of a hard-coded size, and here the heads have another. Read the "
    "size from q's shape.",
)
bank.slip(2, "size-written-down", ("q.shape[-1] ** 0.5", "32**0.5"))
bank.slip(2, "size-written-down", ("q.shape[-1] ** 0.5", "8"))
bank.variant(2, "size-written-down", WINDOWS, ("math.sqrt(q.shape[3])", "math.sqrt(32)"))
bank.variant(2, "size-written-down", FLAT, ("q.size(-1) ** -0.5", "64**-0.5"))

bank.hint(
    2,
    "scaled-by-width",
    "The scores are divided by the square root of the size of all heads together. Each head has its own scores: "
    "divide by the square root of one head's size.",
)
bank.slip(2, "scaled-by-width", ("q.shape[-1] ** 0.5", "(q.shape[1] * q.shape[-1]) ** 0.5"))
bank.variant(2, "scaled-by-width", FLAT, ("q.size(-1) ** -0.5", "(q.size(1) * q.size(-1)) ** -0.5"))

bank.hint(
    2,
    "scaled-by-places",
    "The scores are divided by the square root of the wrong size: the number of places, or the length of v's "
    "vectors. Use the length of q's and k's vectors: that is how many numbers a product adds up.",
)
bank.slip(2, "scaled-by-places", ("q.shape[-1] ** 0.5", "q.shape[-2] ** 0.5"))
bank.slip(2, "scaled-by-places", ("q.shape[-1] ** 0.5", "v.shape[-1] ** 0.5"))
bank.variant(2, "scaled-by-places", WINDOWS, ("math.sqrt(q.shape[3])", "math.sqrt(q.shape[2])"))

bank.hint(2, "bias-scaled", "The bias is divided together with the scores. Add it after the division.")
bank.slip(2, "bias-scaled", (SCORES, "(q @ k.transpose(-2, -1) + bias) / q.shape[-1] ** 0.5"))
bank.variant(
    2,
    "bias-scaled",
    WINDOWS,
    ("torch.add(scores, bias[None])", "torch.add(scores, bias[None] / math.sqrt(q.shape[3]))"),
)

bank.hint(
    2,
    "over-queries",
    "The softmax goes over the queries, or the heads. Each query distributes its attention over the *keys*, the "
    "last axis.",
)
bank.slip(2, "over-queries", ("softmax(dim=-1)", "softmax(dim=-2)"))
bank.slip(2, "over-queries", ("softmax(dim=-1)", "softmax(dim=1)"))
bank.variant(2, "over-queries", FLAT, ("amax(-1,", "amax(-2,"), (".sum(-1,", ".sum(-2,"))

bank.hint(
    2,
    "bias-behind",
    "The bias is added after the softmax: then the weights of a query no longer sum to 1, and may be negative. Add "
    "it to the scores.",
)
bank.slip(2, "bias-behind", (" + bias\n", "\n"), ("scores.softmax(dim=-1) @ v", "(scores.softmax(dim=-1) + bias) @ v"))
bank.variant(
    2,
    "bias-behind",
    WINDOWS,
    ("    scores = torch.add(scores, bias[None])\n", ""),
    ("torch.matmul(weights, v)", "torch.matmul(weights + bias, v)"),
)

bank.hint(2, "no-bias", "The bias is not used.")
bank.slip(2, "no-bias", (" + bias\n", "\n"))
bank.variant(2, "no-bias", FLAT, (", k) + bias", ", k)"))

bank.hint(
    2,
    "inputs-changed",
    "After the call, {what} is not what it was: an operation wrote into it. The caller and the backward pass still "
    "read it.",
)
bank.slip(
    2,
    "inputs-changed",
    (
        "    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5",
        "    scores = q.mul_(q.shape[-1] ** -0.5) @ k.transpose(-2, -1)",
    ),
)
bank.variant(2, "inputs-changed", FLAT, ("q * scale, k) + bias", "q, k.mul_(scale)) + bias"))

bank.hint(
    2,
    "overflow",
    "Scores of several thousand have infinite exponentials, which become NaN; clamped scores give other weights. "
    "Subtract each query's largest score first, or use torch.softmax.",
)
bank.slip(2, "overflow", ("scores.softmax(dim=-1) @ v", "scores.exp() / scores.exp().sum(-1, keepdim=True) @ v"))
bank.slip(
    2, "overflow", ("** 0.5 + bias", "** 0.5 + bias\n    scores = (scores - scores.amax()).exp().nan_to_num().log()")
)
bank.variant(2, "overflow", WINDOWS, ("bias[None])", "bias[None]).clamp(-80, 80)"))
bank.variant(2, "overflow", FLAT, ("(scores - high).exp()", "scores.exp()"))

bank.hint(
    2,
    "no-gradient",
    "The values are right, but a gradient is wrong, that of: {what}. q, k, v and the bias all pass gradients on. "
    "Leave out detach, .data and no_grad.",
)
bank.slip(2, "no-gradient", ("** 0.5 + bias", "** 0.5 + bias.detach()"))
bank.variant(2, "no-gradient", FLAT, ("weights = (scores - high).exp()", "weights = (scores - high).detach().exp()"))

bank.hint(2, "float32-inside", "The result is right only to float32 precision, but q, k and v are float64. Keep "
                               "their dtype.")
bank.slip(2, "float32-inside", ("scores.softmax(dim=-1)", "scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)"))
bank.variant(
    2, "float32-inside", FLAT, ("weights = (scores - high).exp()", "weights = (scores - high).float().exp().double()")
)

bank.hint(
    2, "a-loop-over-heads", "Seven heads take {n} more operators than two: there is a loop over the heads. Index "
                            "all heads at once."
)
bank.slip(2, "a-loop-over-heads", ("table[:, down, right]", "torch.stack([one[down, right] for one in table])"))
bank.variant(
    2,
    "a-loop-over-heads",
    FLAT,
    ("table.flatten(1)[:, index]", "torch.cat([one.flatten()[index][None] for one in table.unbind()])"),
)

bank.slip(2, None, ("    return table[:, down, right]\n", "    rows, columns = (F.one_hot(one, n).to(table.dtype) for one, n in ((down, table.shape[1]), (right, table.shape[2])))\n"
          "    return torch.einsum('hrc,ijr,ijc->hij', table, rows, columns)\n"))  # fmt: skip
