"""Answers to balise 4 of 18_long_sequences_and_experts: the zig-zag order."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 4, whole=True)

# views of pieces; the half that a query sees, chosen by slices
BY_VIEWS = """
def zigzag_batch(tokens, rank, ranks):
    length = tokens.shape[1] - 1
    size = length // (2 * ranks)
    if size * 2 * ranks != length:
        raise ValueError(f"{length} tokens are no multiple of {2 * ranks}")
    both = rank * size, (2 * ranks - 1 - rank) * size
    inputs = torch.cat([tokens[:, at : at + size] for at in both], 1)
    labels = torch.cat([tokens[:, at + 1 : at + 1 + size] for at in both], 1)
    return inputs, labels, torch.cat([torch.arange(at, at + size, device=tokens.device) for at in both])


def add_zigzag(state, q, k, v, rank, source):
    early, late = slice(0, q.shape[2] // 2), slice(q.shape[2] // 2, None)
    if source > rank:
        some = add_block(State(*(x[:, :, late].clone() for x in state)), q[:, :, late], k, v)
        whole = State(*(x.clone() for x in state))
        for x, y in zip(whole, some):
            x[:, :, late] = y
        return whole
    if source < rank:
        return add_block(state, q, k[:, :, early], v[:, :, early])
    places = torch.arange(q.shape[2], device=q.device)
    return add_block(state, q, k, v, places[:, None] >= places)
"""
bank.text(None, BY_VIEWS)

# a table of places; pairs of pieces, each visible or not
BY_PAIRS = """
def zigzag_batch(tokens, rank, ranks):
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    if inputs.shape[1] % (2 * ranks):
        raise ValueError("an uneven length")
    places = torch.arange(inputs.shape[1], device=tokens.device).view(2 * ranks, -1)
    mine = torch.stack([places[rank], places[-rank - 1]]).flatten()
    return inputs[:, mine], labels[:, mine], mine


def add_zigzag(state, q, k, v, rank, source):
    n = q.shape[2] // 2
    parts = []
    for i in range(2):
        rows = slice(i * n, (i + 1) * n)
        part = State(*(x[:, :, rows] for x in state))
        for j in range(2):
            columns = slice(j * n, (j + 1) * n)
            mine, its = (rank, -1 - rank)[i], (source, -1 - source)[j]
            earlier = (i, mine) > (j, its)
            if earlier or mine == its:
                visible = None if earlier else triangle(q[:, :, rows])
                part = add_block(part, q[:, :, rows], k[:, :, columns], v[:, :, columns], visible)
        parts.append(part)
    return State(*(torch.cat(pair, 2) for pair in zip(*parts)))
"""
bank.text(None, BY_PAIRS)

CAT = "torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])"
EARLIER = "return add_block(state, q, k[:, :, :half], v[:, :, :half])"
LATER = "return add_late(state, q, k, v)"

bank.hint("zigzag-form", "inputs and labels are whole numbers (b, s / N), positions are (s / N,): {expected}.")
bank.slip("zigzag-form", (CAT, "torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])[None].expand(len(tokens), -1)"), ("tokens[:, positions], tokens[:, positions + 1]", "tokens.gather(1, positions), tokens.gather(1, positions + 1)"))  # fmt: skip
bank.slip("zigzag-form", (CAT, "pieces[rank]"))
bank.variant("zigzag-form", BY_PAIRS, ("labels[:, mine], mine", "labels[:, mine], mine.float()"))

bank.hint("other-pieces", "Rank {rank} of {n} has other tokens. Its pieces are r = {rank} and 2N − 1 − r, in this order, of 2N, counted "
                             "from 0.")  # fmt: skip
bank.slip("other-pieces", ("2 * ranks - 1 - rank", "2 * rank + 1"), ("pieces[rank]", "pieces[2 * rank]"))
bank.slip("other-pieces", ("2 * ranks - 1 - rank", "rank + ranks"))
bank.slip("other-pieces", (CAT, "torch.cat([pieces[2 * ranks - 1 - rank], pieces[rank]])"))
bank.slip("other-pieces", (CAT, "torch.arange(length, device=tokens.device)[rank::ranks]"))
bank.slip("other-pieces", ("2 * ranks - 1 - rank", "-rank"))
bank.variant("other-pieces", BY_VIEWS, ("(2 * ranks - 1 - rank) * size", "(2 * ranks - 1 - rank) * size - 1"))
bank.variant("other-pieces", BY_PAIRS, ("places[-rank - 1]", "places[-rank - 1].flip(0)"))

bank.hint("labels-of-rank", "Rank {rank} of {n}: a label isn't the next token of the text. Where a piece ends, the next token is on "
                               "another rank: take the labels from the whole text.")  # fmt: skip
bank.slip("labels-of-rank", ("tokens[:, positions + 1], positions", "tokens[:, positions].roll(-1, 1), positions"))
bank.slip("labels-of-rank", ("tokens[:, positions + 1], positions", "tokens[:, positions], positions"))
bank.slip("labels-of-rank", ("tokens[:, positions + 1], positions", "tokens[:, positions.roll(-1)], positions"))
bank.variant(
    "labels-of-rank", BY_PAIRS, ("inputs[:, mine], labels[:, mine]", "inputs[:, mine], inputs[:, mine].roll(-1, -1)")
)
bank.variant("labels-of-rank", BY_VIEWS, ("tokens[:, at + 1 : at + 1 + size]", "tokens[:, at : at + size]"))

bank.hint("positions-of-rank", "Rank {rank} of {n}: a position is the place in the whole text. A rotary embedding that counts from 0 on "
                                  "each rank turns the keys by other angles.")  # fmt: skip
bank.slip("positions-of-rank", ("+ 1], positions", "+ 1], torch.arange(len(positions), device=tokens.device)"))
bank.slip("positions-of-rank", ("+ 1], positions", "+ 1], torch.arange(len(positions), device=tokens.device) + rank * len(positions)"))  # fmt: skip
bank.variant(
    "positions-of-rank",
    BY_VIEWS,
    ("torch.arange(at, at + size, device", "torch.arange(at + 1, at + 1 + size, device"),
)
bank.variant("positions-of-rank", BY_PAIRS, ("labels[:, mine], mine", "labels[:, mine], places[0].repeat(2)"))

bank.hint("not-refused", "2N doesn't divide 23 tokens here, so some would be lost: raise a ValueError.", edge=True)
bank.slip("not-refused", ("raise ValueError", "print"))
bank.slip(
    "not-refused",
    ('raise ValueError(f"{2 * ranks} pieces do not divide {length} tokens")', "length -= length % (2 * ranks)"),
)
bank.variant("not-refused", BY_VIEWS, ("    if size * 2 * ranks != length:\n", "    if not size:\n"))

bank.hint("earlier-wrong", "Wrong after the keys of an earlier rank. Its first piece comes before both of this rank's, its second "
                              "one after both.")  # fmt: skip
bank.slip("earlier-wrong", (EARLIER, "return add_block(state, q, k, v)"))
bank.slip("earlier-wrong", (EARLIER, "return add_block(state, q, k[:, :, half:], v[:, :, half:])"))
bank.slip("earlier-wrong", ("if source < rank", "if source > rank"))
bank.slip("earlier-wrong", (EARLIER, LATER))
bank.slip("earlier-wrong", (EARLIER, "return add_block(state, q, k, v, triangle(q))"))
bank.variant("earlier-wrong", BY_VIEWS, ("k[:, :, early], v[:, :, early]", "k[:, :, early], v[:, :, late]"))
bank.variant("earlier-wrong", BY_PAIRS, ("(source, -1 - source)[j]", "(source, source)[j]"))

bank.hint("later-wrong", "Right after earlier ranks, wrong after the keys of a later rank. Both of its pieces come before this rank's "
                            "second piece, and after its first one.")  # fmt: skip
bank.slip("later-wrong", (LATER, "return state"))
bank.slip("later-wrong", (LATER, "return add_late(state, q, k[:, :, :half], v[:, :, :half])"))
bank.slip("later-wrong", (LATER, "return add_block(state, q, k, v)"))
bank.slip("later-wrong", (LATER, "return add_late(state, q, k[:, :, half:], v[:, :, half:])"))
bank.slip("later-wrong", ("if source < rank", "if source != rank"))
bank.variant("later-wrong", BY_VIEWS, ("    if source > rank:\n", "    if source > rank:\n        return state\n"))
bank.variant("later-wrong", BY_PAIRS, ("(i, mine) > (j, its)", "(i, mine) > (j, its) and not i == j == 1"))

bank.hint("hidden-computed", "{n} times as many products as needed: of another rank's keys, half of the scores are hidden, always a whole "
                                "piece. Leave it out; a mask computes it all the same.")  # fmt: skip
MASK = "torch.arange(2 * half, device=q.device) < half"
bank.slip("hidden-computed", (EARLIER, f"return add_block(state, q, k, v, ({MASK}).expand(2 * half, -1))"))
bank.slip("hidden-computed", (LATER, f"return add_block(state, q, k, v, ~({MASK})[:, None].expand(-1, 2 * half))"))
bank.variant("hidden-computed", BY_PAIRS, ("if earlier or mine == its:", "if True:"), ("None if earlier else triangle(q[:, :, rows])", "None if earlier else triangle(q[:, :, rows]) & (mine == its)"))  # fmt: skip
bank.variant("hidden-computed", BY_VIEWS, ("return add_block(state, q, k[:, :, early], v[:, :, early])", "return add_block(state, q, k, v, torch.arange(q.shape[2], device=q.device).expand(q.shape[2], -1) < q.shape[2] // 2)"))  # fmt: skip

bank.hint(
    "state-changed",
    "The State that was given has changed. Its tensors may still be used: return new ones.",
    edge=True,
)
bank.slip("state-changed", (LATER, "new = add_late(state, q, k, v)\n    [old.copy_(one) for old, one in zip(state, new)]\n    return state"))  # fmt: skip
bank.variant("state-changed", BY_VIEWS, ("State(*(x.clone() for x in state))\n", "state\n"))

bank.edge("wrong-device", "hidden-sync")
bank.slip("wrong-device", ("add_block(state, q, k, v, triangle(q))", "add_block(state, q, k, v, torch.ones(2 * half, 2 * half).tril().bool())"))  # fmt: skip
bank.variant(
    "wrong-device",
    BY_VIEWS,
    ("places = torch.arange(q.shape[2], device=q.device)", "places = torch.arange(q.shape[2])"),
)
bank.slip("hidden-sync", ("torch.arange(length, device=tokens.device)", "torch.arange(length)"), ("+ 1], positions", "+ 1], positions.to(tokens.device)"))  # fmt: skip
bank.variant("hidden-sync", BY_PAIRS, ("torch.arange(inputs.shape[1], device=tokens.device)", "torch.arange(inputs.shape[1])"), ("labels[:, mine], mine", "labels[:, mine], mine.to(tokens.device)"))  # fmt: skip
