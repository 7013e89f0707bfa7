"""Answers to balise 2 of 23_inference: FLOP and bytes of one pass."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 2, whole=True)

# a row each, token by token
BY_ROWS = """
def pass_cost(config, batch, seen, new, size):
    d, g, k, f = config.width, config.groups, config.head_size, config.hidden
    matrices = config.layers * [(d, d), (d, d), (d, g * k), (d, g * k), (d, f), (d, f), (f, d)] + [(d, config.vocab_size)]
    flop, moved = 0, sum(a * b * size for a, b in matrices)
    for token in range(seen + 1, seen + new + 1):
        flop += sum(2 * a * b for a, b in matrices)
        flop += config.layers * config.heads * (2 * k * token + 2 * token * k)
    kept = config.layers * 2 * g * k * size
    return batch * flop, moved + batch * kept * seen + batch * kept * new


def tokens_a_second(config, batch, seen, size, peak, bandwidth):
    flop, moved = pass_cost(config, batch, seen, 1, size)
    if flop / moved > peak / bandwidth:
        return batch * peak / flop
    return batch * bandwidth / moved
"""
bank.text(None, BY_ROWS)

# the configuration's own count, without norms
BY_CONFIG = """
def pass_cost(config, batch, seen, new, size):
    weights = config.n_parameters - config.width * (2 * config.layers + 1)
    if not config.tied_head:
        weights -= config.vocab_size * config.width
    pairs = batch * sum(range(seen + 1, seen + new + 1))
    cached = batch * (seen + new) * config.layers * 2 * config.groups * config.head_size
    return 2 * batch * new * weights + 4 * config.layers * config.heads * config.head_size * pairs, (weights + cached) * size


def tokens_a_second(config, batch, seen, size, peak, bandwidth):
    flop, moved = pass_cost(config, batch, seen, 1, size)
    return min(batch / (flop / peak), batch / (moved / bandwidth))
"""
bank.text(None, BY_CONFIG)
bank.slip(None, ("new * (new + 1) // 2", "new * (new + 1) / 2"))

bank.slip("nothing-returned", ("return flop, size", "flop, size"))

bank.hint("not-two", "pass_cost must return two numbers, (FLOP, bytes).")
bank.slip("not-two", ("return flop, size", "return size"), ("flop, moved = pass_cost(config, batch, seen, 1, size)", "flop = moved = pass_cost(config, batch, seen, 1, size)"))  # fmt: skip
bank.variant("not-two", BY_ROWS, ("return batch * flop, ", "return batch * flop + "))

bank.hint("multiply-add-once", "A multiplication and an addition are two operations: count 2 FLOP for each "
                                  "weight and token, and 4 d for each pair.")  # fmt: skip
bank.slip("multiply-add-once", ("2 * weights * new + 4 * d", "weights * new + 2 * d"))
bank.slip("multiply-add-once", ("2 * weights * new", "weights * new"))
bank.variant("multiply-add-once", BY_ROWS, ("sum(2 * a * b", "sum(a * b"), ("(2 * k * token + 2 * token * k)", "(k * token + token * k)"))  # fmt: skip

bank.hint("head-forgotten", "The head is missing: after the last block, d · v weights are read, and multiplied "
                               "for each new token.")  # fmt: skip
bank.slip("head-forgotten", (" + d * config.vocab_size", ""))
bank.variant("head-forgotten", BY_ROWS, (" + [(d, config.vocab_size)]", ""))

bank.hint("head-once", "You count the head for only one token of each row. Only the logits of the last one are "
                          "needed to go on, but this model computes them for all new tokens.")  # fmt: skip
bank.slip("head-once", ("2 * weights * new", "2 * weights * new - 2 * d * config.vocab_size * (new - 1)"))
bank.variant("head-once", BY_CONFIG, ("return 2 * batch * new * weights", "return 2 * batch * (new * weights - (new - 1) * config.width * config.vocab_size)"))  # fmt: skip

bank.hint("one-square", "A block has two layers of d · d: for the queries and for the output of attention.")
bank.slip("one-square", ("2 * d * d", "d * d"))
bank.variant("one-square", BY_ROWS, ("(d, d), (d, d)", "(d, d)"))

bank.hint("pairs-of-key-heads", "You count the pairs for the g key heads. Each of the h query heads has its own "
                                   "scores: 4 d for each pair, whatever g is.")  # fmt: skip
bank.slip("pairs-of-key-heads", ("4 * d * config.layers", "4 * shared * config.layers"))
bank.variant("pairs-of-key-heads", BY_ROWS, ("config.heads * (2", "g * (2"))

bank.hint("pairs-of-one-layer", "You count the pairs of one layer. Every layer has its own attention.")
bank.slip("pairs-of-one-layer", ("4 * d * config.layers", "4 * d"))
bank.variant("pairs-of-one-layer", BY_ROWS, ("config.layers * config.heads", "config.heads"))

bank.hint("bytes-first", "The first number is the bytes. Return the FLOP first.")
bank.slip("bytes-first", ("return flop, size * (weights + 2 * shared * config.layers * batch * (seen + new))", "return size * (weights + 2 * shared * config.layers * batch * (seen + new)), flop"))  # fmt: skip
bank.variant("bytes-first", BY_CONFIG, ("return 2 * batch * new * weights + 4 * config.layers * config.heads * config.head_size * pairs, (weights + cached) * size", "return (weights + cached) * size, 2 * batch * new * weights + 4 * config.layers * config.heads * config.head_size * pairs"))  # fmt: skip

bank.hint("embedding-counted", "You count the embedding as a multiplication. A token only looks up one row of "
                                  "it; the head is what multiplies by d · v weights.")  # fmt: skip
bank.slip("embedding-counted", (" + d * config.vocab_size", " + 2 * d * config.vocab_size"))
bank.variant("embedding-counted", BY_ROWS, (" + [(d, config.vocab_size)]", " + 2 * [(d, config.vocab_size)]"))

bank.hint("all-heads", "You count keys and values for all h query heads. There are only g key heads: g · k "
                          "numbers for each, not d.")  # fmt: skip
bank.slip("all-heads", ("2 * d * shared", "2 * d * d"))
bank.slip("all-heads", ("2 * shared * config", "2 * d * config"))
bank.slip("all-heads", ("config.groups * config.head_size", "config.width"))
bank.variant("all-heads", BY_ROWS, ("(d, g * k), (d, g * k)", "(d, d), (d, d)"))
bank.variant("all-heads", BY_CONFIG, ("2 * config.groups * config.head_size", "2 * config.width"))

bank.hint("two-matrices", "The feed-forward of a Llama has three matrices of size d · f: gate, up and down.")
bank.slip("two-matrices", ("3 * d * config.hidden", "2 * d * config.hidden"))
bank.variant("two-matrices", BY_ROWS, ("(d, f), (d, f), (f, d)", "(d, f), (f, d)"))

bank.hint("no-attention", "You count only the linear layers. Attention adds 4 d FLOP in each layer for each "
                             "pair of a new token and a token that it sees.")  # fmt: skip
bank.slip("no-attention", (" + 4 * d * config.layers * pairs", ""))
bank.variant(
    "no-attention", BY_ROWS, ("        flop += config.layers * config.heads * (2 * k * token + 2 * token * k)\n", "")
)

bank.hint("scores-once", "A pair takes 4 d FLOP in each layer: 2 d for the scores of all heads, and another 2 d "
                            "where the weights multiply the values.")  # fmt: skip
bank.slip("scores-once", ("4 * d * config.layers", "2 * d * config.layers"))
bank.variant("scores-once", BY_ROWS, ("(2 * k * token + 2 * token * k)", "(2 * k * token)"))

bank.hint("not-itself", "A new token also sees itself: the first new token sees seen + 1 tokens.")
bank.slip("not-itself", ("new * (new + 1) // 2", "new * (new - 1) // 2"))
bank.variant("not-itself", BY_ROWS, ("range(seen + 1, seen + new + 1)", "range(seen, seen + new)"))

bank.hint("hidden-pairs", "You count pairs that the mask hides. The new tokens of a row see seen + 1, seen + 2, "
                             "… tokens: only the last one sees all.")  # fmt: skip
bank.slip("hidden-pairs", ("new * seen + new * (new + 1) // 2", "new * (seen + new)"))
bank.variant("hidden-pairs", BY_CONFIG, ("sum(range(seen + 1, seen + new + 1))", "(seen + new) * new"))

bank.hint(
    "square-again",
    "You count queries for the old tokens, as if nothing were cached. Only the new tokens have queries.",
)
bank.slip("square-again", ("new * seen + new * (new + 1) // 2", "(seen + new) * (seen + new + 1) // 2"))
bank.variant("square-again", BY_CONFIG, ("range(seen + 1, seen + new + 1)", "range(seen + new + 1)"))

bank.hint("one-row", "You count the FLOP of one row. Each of the `batch` rows has its own tokens.")
bank.slip("one-row", ("flop = batch * (", "flop = ("))
bank.variant("one-row", BY_ROWS, ("return batch * flop", "return flop"))

bank.hint("pairs-of-one-row", "You count the pairs of one row. Each of the `batch` rows has its own.")
bank.slip("pairs-of-one-row", ("batch * (2 * weights * new + 4 * d * config.layers * pairs)", "batch * 2 * weights * new + 4 * d * config.layers * pairs"))  # fmt: skip
bank.variant("pairs-of-one-row", BY_CONFIG, ("pairs = batch *", "pairs ="))

bank.hint(
    "one-token",
    "You count the weights for one token of each row. Each of the `new` tokens is multiplied by all of them.",
)
bank.slip("one-token", ("2 * weights * new", "2 * weights"))
bank.variant("one-token", BY_CONFIG, ("2 * batch * new * weights", "2 * batch * weights"))

bank.hint("weights-again", "The weights are read once in a pass, however many rows and new tokens there are. "
                              "This is why batches help.")  # fmt: skip
bank.slip("weights-again", ("size * (weights +", "size * (batch * weights +"))
bank.slip("weights-again", ("size * (weights +", "size * (new * weights +"))
bank.slip("weights-again", ("size * (weights +", "size * (batch * new * weights +"))
bank.variant("weights-again", BY_ROWS, ("moved + batch", "batch * moved + batch"))

bank.hint("cache-of-one-row", "Each row has its own keys and values: their bytes grow with the batch.")
bank.slip("cache-of-one-row", ("config.layers * batch * (seen", "config.layers * (seen"))
bank.variant("cache-of-one-row", BY_ROWS, ("moved + batch * kept * seen + batch * kept * new", "moved + kept * seen + kept * new"))  # fmt: skip

bank.hint("keys-alone", "Each token stores a key *and* a value in each layer: 2 g k numbers.")
bank.slip("keys-alone", ("2 * shared * config", "shared * config"))
bank.variant("keys-alone", BY_ROWS, ("config.layers * 2 * g", "config.layers * g"))

bank.hint("one-layer", "You count the cache of one layer. Each layer has its own keys and values.")
bank.slip("one-layer", ("shared * config.layers *", "shared *"))
bank.variant("one-layer", BY_ROWS, ("kept = config.layers * ", "kept = "))

bank.hint("no-cache", "You count only the weights. The keys and values of all tokens are also read or written.")
bank.slip("no-cache", ("(weights + 2 * shared * config.layers * batch * (seen + new))", "weights"))
bank.variant("no-cache", BY_ROWS, (" + batch * kept * seen + batch * kept * new", ""))

bank.hint("new-unwritten", "The bytes lack the keys and values of the new tokens: they are written.")
bank.slip("new-unwritten", ("batch * (seen + new))", "batch * seen)"))
bank.variant("new-unwritten", BY_ROWS, (" + batch * kept * new", ""))

bank.hint(
    "old-unread",
    "You count only the keys and values of the new tokens. Those of all earlier tokens are read in each pass.",
)
bank.slip("old-unread", ("batch * (seen + new))", "batch * new)"))
bank.variant("old-unread", BY_ROWS, (" + batch * kept * seen", ""))

bank.hint(
    "numbers-not-bytes",
    "The number of bytes is wrong. Each number takes `size` bytes, an argument that may be 1, 2, 4 or 8.",
)
bank.slip("numbers-not-bytes", ("size * (weights", "(weights"))
bank.slip("numbers-not-bytes", ("size * (weights", "4 * (weights"))
bank.variant("numbers-not-bytes", BY_CONFIG, ("(weights + cached) * size", "weights + cached"))

bank.hint("wrong-flop", "FLOP: for each row and new token, count 2 for each weight of the linear layers, and in "
                           "each layer 4 d for each token that it sees.")  # fmt: skip
bank.slip("wrong-flop", ("4 * d * config.layers * pairs", "4 * d * config.layers * pairs * new * 5"))
bank.slip("wrong-flop", ("new * seen + new * (new + 1) // 2", "new * (seen + new) // 2"))
bank.slip("wrong-flop", ("4 * d * config.layers", "4 * config.head_size * config.layers"))
bank.variant("wrong-flop", BY_ROWS, ("config.layers * config.heads * (2", "config.layers**3 * config.heads**3 * (2"))

bank.hint("wrong-bytes", "Bytes: count each weight of the linear layers once, and the keys and values of seen + "
                            "new tokens in each layer and row.")  # fmt: skip
bank.slip("wrong-bytes", ("(seen + new))", "(seen + new) ** 3)"))
bank.variant("wrong-bytes", BY_ROWS, ("batch * kept * new", "batch * kept * 77 * (seen + 5)"))

bank.hint("one-after-the-other", "You add the times for reading and computing. Both happen at the same time: "
                                    "the slower one counts.")  # fmt: skip
bank.slip("one-after-the-other", ("max(flop / peak, moved / bandwidth)", "(flop / peak + moved / bandwidth)"))
bank.variant("one-after-the-other", BY_CONFIG, ("min(batch / (flop / peak), batch / (moved / bandwidth))", "1 / (flop / peak / batch + moved / bandwidth / batch)"))  # fmt: skip

bank.hint("faster-side", "The pass ends when its slower part ends: the maximum of the two times.")
bank.slip("faster-side", ("max(", "min("))
bank.variant("faster-side", BY_ROWS, ("> peak / bandwidth", "< peak / bandwidth"))

bank.hint("passes-a-second", "You return passes per second. Each of the `batch` rows gets a token in every pass.")
bank.slip("passes-a-second", ("return batch / max", "return 1 / max"))
bank.variant("passes-a-second", BY_ROWS, ("return batch * peak", "return peak"), ("return batch * bandwidth", "return bandwidth"))  # fmt: skip

bank.hint("seconds-a-token", "You return seconds. Tokens per second are the batch divided by the seconds of a pass.")
bank.slip("seconds-a-token", ("return batch / max(flop / peak, moved / bandwidth)", "return max(flop / peak, moved / bandwidth) / batch"))  # fmt: skip
bank.variant("seconds-a-token", BY_ROWS, ("return batch * peak / flop", "return flop / peak / batch"), ("return batch * bandwidth / moved", "return moved / bandwidth / batch"))  # fmt: skip

bank.hint("swapped", "You swapped peak and bandwidth: divide the FLOP by the peak, and the bytes by the bandwidth.")
bank.slip("swapped", ("flop / peak, moved / bandwidth", "flop / bandwidth, moved / peak"))
bank.variant("swapped", BY_CONFIG, ("(flop / peak), batch / (moved / bandwidth)", "(flop / bandwidth), batch / (moved / peak)"))  # fmt: skip

bank.hint("one-side", "You use only one side of the roofline. The pass takes as long as the slower of "
                         "arithmetic and memory.")  # fmt: skip
bank.slip("one-side", ("max(flop / peak, moved / bandwidth)", "(flop / peak)"))
bank.slip("one-side", ("max(flop / peak, moved / bandwidth)", "(moved / bandwidth)"))
bank.variant("one-side", BY_ROWS, ("if flop / moved > peak / bandwidth", "if flop"))

bank.hint("wrong-speed", "Tokens per second: divide the batch by the seconds of a pass with one new token in "
                            "each row (new = 1). These are the larger of FLOP / peak and bytes / bandwidth.")  # fmt: skip
bank.slip("wrong-speed", ("flop / peak, moved / bandwidth", "peak / flop, bandwidth / moved"))
bank.slip("wrong-speed", ("pass_cost(config, batch, seen, 1, size)", "pass_cost(config, batch, seen, 0, size)"))
bank.variant(
    "wrong-speed",
    BY_CONFIG,
    ("min(batch / (flop / peak), batch / (moved / bandwidth))", "batch * min(peak, bandwidth) * 1e9"),
)
bank.variant(
    "wrong-speed",
    BY_CONFIG,
    ("pass_cost(config, batch, seen, 1, size)", "(x + 1e-9 for x in pass_cost(config, batch, seen, 0, size))"),
)
