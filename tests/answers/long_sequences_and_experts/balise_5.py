"""Answers to balise 5 of 18_long_sequences_and_experts: Ulysses."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 5, whole=True)

# one tensor with a dimension for the ranks, moved to the front and back
BY_VIEWS = """
def to_heads(x):
    n = dist.get_world_size()
    b, h, s, d = x.shape
    if h < n:
        x = x[:, :, None].expand(b, h, n // h, s, d).reshape(b, n, s, d)
    sent = x.unflatten(1, (n, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def to_sequence(x):
    n = dist.get_world_size()
    sent = x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.transpose(0, 1).flatten(1, 2)


def ulysses_attention(q, k, v):
    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).masked_fill(~triangle(q), -math.inf)
    return to_sequence((scores.softmax(-1) @ v.double()).to(q.dtype))


def sent_numbers(heads, groups, tokens, size, ranks):
    ring = sum(tokens * groups * size + tokens * groups * size for _ in range(ranks - 1))
    ways = [heads, max(groups, ranks), max(groups, ranks), heads]
    return ring, sum(n * tokens * size / ranks * (ranks - 1) for n in ways)
"""
bank.text(None, BY_VIEWS)

# rows that are transposed so that heads come first; splits that are uneven in name only
BY_ROWS = """
def to_heads(x):
    ranks = dist.get_world_size()
    mine = [x[:, r * x.shape[1] // ranks : max(r * x.shape[1] // ranks + 1, (r + 1) * x.shape[1] // ranks)] for r in range(ranks)]
    rows = torch.cat([part.transpose(0, 1) for part in mine])
    out = rows.new_empty(rows.shape)
    dist.all_to_all_single(out, rows, [len(rows) // ranks] * ranks, [len(rows) // ranks] * ranks)
    return torch.cat(out.split(len(rows) // ranks), dim=2).transpose(0, 1)


def to_sequence(x):
    ranks, n = dist.get_world_size(), x.shape[1]
    rows = torch.cat([part.transpose(0, 1) for part in x.split(x.shape[2] // ranks, 2)])
    out = rows.new_empty(rows.shape)
    dist.all_to_all_single(out, rows)
    return out.transpose(0, 1)


def ulysses_attention(q, k, v):
    whole, _ = blockwise_attention(*map(to_heads, (q, k, v)), causal_blocks(q.shape[2] * dist.get_world_size(), 4, q.device))
    return to_sequence(whole)


def sent_numbers(heads, groups, tokens, size, ranks):
    travels = (ranks - 1) / ranks
    of_keys = groups if groups >= ranks else ranks
    return 2 * ranks * groups * tokens * size * travels, 2 * (heads + of_keys) * tokens * size * travels
"""
bank.text(None, BY_ROWS)

THERE, BACK = (
    "return torch.cat(exchange(x.chunk(ranks, 1)), 2)",
    "return torch.cat(exchange(x.chunk(dist.get_world_size(), 2)), 1)",
)
REPEATED = "x = x.repeat_interleave(ranks // x.shape[1], 1)"
FEW = f"    if x.shape[1] < ranks:\n        {REPEATED}\n"
RING, TWICE = (
    "ring = 2 * groups * tokens * size * (ranks - 1)",
    "(2 * heads + 2 * max(groups, ranks)) * tokens * size * (ranks - 1) / ranks",
)

bank.hint(
    "heads-form",
    "{name} returns {got}, not {expected}: cut along the dimension that shrinks, and join along the one that grows.",
)
bank.slip("heads-form", (THERE, "return torch.cat(exchange(x.chunk(ranks, 1)), 1)"))
bank.slip("heads-form", (BACK, "return torch.cat(exchange(x.chunk(dist.get_world_size(), 2)), 2)"))
bank.slip("heads-form", (THERE, "return x"))
bank.slip("heads-form", (THERE, "return torch.stack(exchange(x.chunk(ranks, 1)))"))
bank.variant("heads-form", BY_VIEWS, ("received.permute(1, 2, 0, 3, 4).flatten(2, 3)", "received.flatten(0, 1)"))
bank.variant("heads-form", BY_ROWS, ("dim=2).transpose(0, 1)", "dim=0).transpose(0, 1)"))

bank.hint("wrong-share", "These aren't the r-th share of the heads, with all tokens in the order of the text. Rank r is sent x.chunk(N, 1)[r], "
                            "and what comes from rank r is the r-th piece of the text.")  # fmt: skip
bank.slip("wrong-share", (THERE, "return torch.cat(exchange(x.chunk(ranks, 1))[::-1], 2)"))
bank.slip("wrong-share", (THERE, "return torch.cat(exchange(x.chunk(ranks, 1)[::-1]), 2)"))
bank.slip("wrong-share", (THERE, "return torch.cat(exchange([x[:, r::ranks] for r in range(ranks)]), 2)"))
bank.slip("wrong-share", (THERE, "return torch.stack(exchange(x.chunk(ranks, 1)), 3).flatten(2, 3)"))
bank.slip("wrong-share", (THERE, "return torch.cat(x.chunk(ranks, 1), 2)"))
bank.slip(
    "wrong-share",
    (THERE, "return torch.stack(exchange(x.chunk(ranks, 1))).reshape(len(x), -1, ranks * x.shape[2], x.shape[3])"),
)
bank.variant(
    "wrong-share",
    BY_VIEWS,
    ("received.permute(1, 2, 0, 3, 4).flatten(2, 3)", "received.permute(1, 2, 3, 0, 4).flatten(2, 3)"),
)
bank.variant("wrong-share", BY_ROWS, ("torch.cat([part.transpose(0, 1) for part in mine])", "torch.cat([part.transpose(0, 1) for part in mine[::-1]])"))  # fmt: skip

bank.hint("wrong-way-back", "The way back isn't right: rank r is sent the r-th piece of the text, and what comes from rank r are its heads, the "
                               "r-th share.")  # fmt: skip
bank.slip("wrong-way-back", (BACK, "return torch.cat(exchange(x.chunk(dist.get_world_size(), 2))[::-1], 1)"))
bank.slip("wrong-way-back", (BACK, "return torch.stack(exchange(x.chunk(dist.get_world_size(), 2)), 2).flatten(1, 2)"))
bank.slip("wrong-way-back", (BACK, "return torch.cat(x.chunk(dist.get_world_size(), 2), 1)"))
bank.variant(
    "wrong-way-back",
    BY_VIEWS,
    ("received.transpose(0, 1).flatten(1, 2)", "received.permute(1, 2, 0, 3, 4).flatten(1, 2)"),
)
bank.variant("wrong-way-back", BY_ROWS, ("return out.transpose(0, 1)\n", "return out.flip(0).transpose(0, 1)\n"))

bank.hint("few-heads", "Heads fewer than ranks: each rank gets one, the one that its queries share. Of 2 heads for 4 ranks these are 0, 0, 1, 1, so "
                          "repeat each head side by side.", edge=True)  # fmt: skip
bank.slip("few-heads", (REPEATED, "x = x.repeat(1, ranks // x.shape[1], 1, 1)"))
bank.slip("few-heads", (FEW, "    if x.shape[1] < ranks:\n        x = x[:, :1].expand(-1, ranks, -1, -1)\n"))
bank.variant(
    "few-heads", BY_VIEWS, ("x[:, :, None].expand(b, h, n // h, s, d)", "x[:, None].expand(b, n // h, h, s, d)")
)
bank.variant("few-heads", BY_ROWS, ("r * x.shape[1] // ranks : max(r * x.shape[1] // ranks + 1", "r % x.shape[1] if x.shape[1] < ranks else r * x.shape[1] // ranks : max(r % x.shape[1] + 1 if x.shape[1] < ranks else r * x.shape[1] // ranks + 1"))  # fmt: skip

bank.hint("other-traffic", "Rank {rank} handed {got} bytes to {calls} calls, {name} among them; {expected} bytes to an all-to-all for each tensor are "
                              "enough. Send each rank its own share, once.")  # fmt: skip
GATHERED = "    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n    dist.all_gather(every, x.contiguous())\n"
bank.slip(
    "other-traffic", ("    " + THERE, GATHERED + "    return torch.cat(every, 2).chunk(ranks, 1)[dist.get_rank()]")
)
bank.slip(
    "other-traffic",
    ("    " + BACK, GATHERED + "    return torch.cat(every, 1).chunk(dist.get_world_size(), 2)[dist.get_rank()]"),
)
bank.slip(
    "other-traffic",
    (THERE, "return torch.cat([exchange(x.chunk(ranks, 1)) and one for one in exchange(x.chunk(ranks, 1))], 2)"),
)
bank.variant("other-traffic", BY_VIEWS, ("    received = torch.empty_like(sent)\n    dist.all_to_all_single(received, sent)\n    return received.transpose", "    received = torch.empty_like(sent)\n    dist.barrier()\n    for r in range(n):\n        one = sent[r].clone()\n        everyone = [torch.empty_like(one) for _ in range(n)]\n        dist.all_gather(everyone, one)\n        if r == dist.get_rank():\n            received = torch.stack(everyone)\n    return received.transpose"))  # fmt: skip
bank.variant("other-traffic", BY_ROWS, ("    dist.all_to_all_single(out, rows)\n", "    dist.all_to_all_single(out, rows)\n    dist.all_to_all_single(out, rows)\n"))  # fmt: skip

bank.hint("wrong-ulysses", "to_heads and to_sequence are right, the attention isn't: causal, over the whole text, each group of h / g query heads "
                              "with its own head of keys, in q's dtype.")  # fmt: skip
bank.slip("wrong-ulysses", ("is_causal=True, ", ""))
bank.slip("wrong-ulysses", ("(q, k, v, is_causal=True", "(q, v, k, is_causal=True"))
bank.slip("wrong-ulysses", ("    q, k, v = to_heads(q), to_heads(k), to_heads(v)\n", ""), ("to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))", "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)"))  # fmt: skip
bank.variant("wrong-ulysses", BY_VIEWS, ("(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for", "(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for"))  # fmt: skip
bank.variant("wrong-ulysses", BY_ROWS, ("map(to_heads, (q, k, v))", "map(to_heads, (q, k, k))"))

bank.hint("not-contiguous", "It fails for tensors that are transposed views, which is how layers make them: {error}. An all-to-all takes what lies in "
                               "order in memory: contiguous().", edge=True)  # fmt: skip
bank.slip("not-contiguous", (THERE, "whole = torch.empty(ranks, len(x), x.shape[1] // ranks, *x.shape[2:], dtype=x.dtype, device=x.device)\n    dist.all_to_all_single(whole, x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous() if x.is_contiguous() else x.unflatten(1, (ranks, -1)).transpose(0, 1))\n    return torch.cat(list(whole), 2)"))  # fmt: skip
bank.variant(
    "not-contiguous",
    BY_VIEWS,
    (
        "    b, h, s, d = x.shape\n    if",
        "    b, h, s, d = x.shape\n    x = x.view(b * h, s, d).view(b, h, s, d)\n    if",
    ),
)

bank.hint("ring-numbers", "The ring: keys and values (2), of `groups` heads, go to the next rank N − 1 times.")
bank.slip("ring-numbers", (RING, RING.replace("(ranks - 1)", "ranks")))
bank.slip("ring-numbers", (RING, RING.replace("groups", "heads")))
bank.slip("ring-numbers", (RING, RING.replace("2 * ", "")))
bank.slip("ring-numbers", (RING, RING + " / ranks"))
bank.variant(
    "ring-numbers", BY_VIEWS, ("tokens * groups * size + tokens * groups * size for", "tokens * groups * size for")
)
bank.variant("ring-numbers", BY_ROWS, ("2 * ranks * groups", "2 * groups"))

bank.hint("ulysses-numbers", "Ulysses: queries and the result have `heads` heads, keys and values `groups` each. Of each, a rank keeps 1 / N and "
                                "sends the rest, once.")  # fmt: skip
bank.slip("ulysses-numbers", (TWICE, TWICE.replace(" * (ranks - 1) / ranks", "")))
bank.slip("ulysses-numbers", (TWICE, TWICE.replace("2 * heads + ", "heads + ")))
bank.slip("ulysses-numbers", (TWICE, TWICE.replace(" / ranks", "")))
bank.slip("ulysses-numbers", (TWICE, TWICE.replace("2 * max(groups, ranks)", "2 * heads")))
bank.variant(
    "ulysses-numbers",
    BY_VIEWS,
    ("[heads, max(groups, ranks), max(groups, ranks), heads]", "[heads, max(groups, ranks), max(groups, ranks)]"),
)
bank.variant(
    "ulysses-numbers",
    BY_ROWS,
    ("(heads + of_keys) * tokens * size * travels", "(heads + of_keys) * tokens * size / ranks"),
)

bank.hint("repeated-numbers", "Right, but not where heads of keys are fewer than ranks: then each rank gets a whole head, so N heads of keys "
                                 "travel.", edge=True)  # fmt: skip
bank.slip("repeated-numbers", ("max(groups, ranks)", "groups"))
bank.slip("repeated-numbers", ("max(groups, ranks)", "(groups if groups >= ranks else heads)"))
bank.variant("repeated-numbers", BY_ROWS, ("groups if groups >= ranks else ranks", "groups"))

bank.edge("wrong-device")
bank.slip("wrong-device", (THERE, "parts = torch.stack(x.chunk(ranks, 1))\n    whole = torch.empty(parts.shape, dtype=x.dtype)\n    dist.all_to_all_single(whole, parts)\n    return torch.cat(list(whole), 2)"))  # fmt: skip
bank.variant("wrong-device", BY_VIEWS, ("~triangle(q)", "~triangle(q.new_empty(q.shape, device='cpu'))"))
