"""Answers to balise 1 of 23_inference: a cache of keys and values, and text that is read once."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 1, whole=True)

# pairs in a list, scores by hand; the first token comes from the prompt's call
BY_HAND = """
class Cache:
    def __init__(self):
        self.kept = []

    def attend(self, layer, q, k, v):
        if layer == len(self.kept):
            self.kept.append((k, v))
        else:
            old_k, old_v = self.kept[layer]
            self.kept[layer] = torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)
        k, v = self.kept[layer]
        shared = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        places = torch.arange(k.size(2), device=q.device)
        later = places > places[k.size(2) - q.size(2) :, None]
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


@torch.no_grad()
def write(model, prompt, count, attend):
    logits, new = model(prompt, 0, attend), []
    for i in range(count):
        new.append(logits[:, -1].argmax(-1))
        if i + 1 < count:
            logits = model(new[-1][:, None], prompt.size(1) + i, attend)
    return torch.cat([prompt, torch.stack(new, 1)], 1)
"""
bank.text(None, BY_HAND)

# room that doubles, groups as a dimension of their own, a token needs no mask; all tokens in one tensor made before
ROOM = """
class Cache:
    def __init__(self):
        self.rooms, self.used = [], []

    def attend(self, layer, q, k, v):
        if layer == len(self.rooms):
            self.rooms.append(torch.stack([k, v]))
            self.used.append(k.shape[2])
        else:
            room, begin = self.rooms[layer], self.used[layer]
            end = begin + k.shape[2]
            if end > room.shape[3]:
                larger = room.new_empty(*room.shape[:3], max(end, 2 * room.shape[3]), room.shape[4])
                larger[:, :, :, :begin] = room[:, :, :, :begin]
                room = self.rooms[layer] = larger
            room[0, :, :, begin:end], room[1, :, :, begin:end] = k, v
            self.used[layer] = end
        k, v = self.rooms[layer][:, :, :, None, : self.used[layer]]
        queries = q.unflatten(1, (k.shape[1], -1))
        if q.shape[2] == 1:
            return F.scaled_dot_product_attention(queries, k, v).flatten(1, 2)
        bias = torch.full((q.shape[2], k.shape[3]), float("-inf"), dtype=q.dtype, device=q.device).triu(1 + k.shape[3] - q.shape[2])
        k, v = (one.expand(-1, -1, queries.shape[2], -1, -1) for one in (k, v))
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=bias).flatten(1, 2)


def write(model, prompt, count, attend):
    rows, length = prompt.shape
    text = torch.cat([prompt, prompt.new_zeros(rows, count)], 1)
    with torch.no_grad():
        text[:, length] = model(prompt, first=0, attend=attend)[:, -1].max(-1).indices
        for place in range(length, length + count - 1):
            text[:, place + 1] = model(text[:, place : place + 1], attend=attend, first=torch.full((rows,), place))[:, 0].max(-1).indices
    return text
"""
bank.text(None, ROOM)
bank.slip(None, (", attn_mask=visible, enable_gqa=True)", ", **({'is_causal': True} if new == seen else {'attn_mask': visible}), enable_gqa=True)"))  # fmt: skip
bank.slip("nothing-returned", ("return F.scaled", "F.scaled"))
bank.slip("nothing-returned", ("    return text\n", ""))

MASK, STORE = "attn_mask=visible, ", "        self.keys[layer], self.values[layer] = k, v\n"
RETURN = "        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)"

# PyTorch's own mask of the lower right corner: it is a subclass of tensors, and can be made in no dispatch mode
bank.slip(None, (
    "        visible = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)\n",
    "        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))\n"
    "        from torch.nn.attention.bias import causal_lower_right\n        visible = causal_lower_right(new, seen)\n"), ("attn_mask=visible, enable_gqa=True", "attn_mask=visible"))  # fmt: skip

bank.hint(
    "attend-form",
    "attend must return a tensor like q, one vector for each new query of each head. You returned {got}.",
)
bank.slip("attend-form", ("enable_gqa=True)", "enable_gqa=True).transpose(1, 2)"))
bank.slip("attend-form", ("enable_gqa=True)", "enable_gqa=True), k, v"))
bank.slip("attend-form", ("enable_gqa=True)", "enable_gqa=True)[:, :, -1:]"))
bank.variant("attend-form", BY_HAND, (".softmax(-1) @ v", ".softmax(-1) @ v, self.kept"))

bank.hint("looks-ahead", "Queries see later tokens. Each new token may see only itself and the tokens before it.")  # fmt: skip
bank.slip("looks-ahead", (MASK, ""))
bank.slip("looks-ahead", ("tril(seen - new)", "tril(seen - new + 1)"))
bank.slip("looks-ahead", (MASK, "attn_mask=visible if new == seen else None, "))
bank.variant("looks-ahead", BY_HAND, ('.masked_fill(later, float("-inf"))', ""))
bank.variant("looks-ahead", ROOM, ("triu(1 + k.shape[3]", "triu(2 + k.shape[3]"))

bank.hint("first-key-only", "The single new token sees only the first key of the text. The triangle is aligned "
                               "with the upper left corner, as in `is_causal=True` and `.tril()`, so its only row "
                               "allows only one key. A new token may see all keys up to its own, which is the "
                               "last: use `.tril(all - new)`.")  # fmt: skip
bank.slip("first-key-only", (MASK, "is_causal=True, "))
bank.slip("first-key-only", ("tril(seen - new)", "tril()"))
bank.variant("first-key-only", BY_HAND, ("places[k.size(2) - q.size(2) :, None]", "places[: q.size(2), None]"))

bank.hint("upper-left", "One new token is right, but several at once after others are not: their triangle is at "
                           "the upper left corner, as if the text began with them. Each new token sees all earlier "
                           "tokens; the triangle belongs at the right end.", edge=True)  # fmt: skip
bank.slip("upper-left", (MASK, "is_causal=new > 1, "))
bank.slip("upper-left", ("tril(seen - new)", "tril(seen - new if new == 1 else 0)"))
bank.variant("upper-left", ROOM, ("triu(1 + k.shape[3] - q.shape[2])", "triu(1)"))

bank.hint("not-itself", "A token doesn't see itself. The diagonal must be visible.")
bank.slip("not-itself", ("tril(seen - new)", "tril(seen - new - 1)"))
bank.text("not-itself", BY_HAND.replace("places > places[", "places >= places["))  # NaN, where SDPA gives 0
bank.variant("not-itself", ROOM, ("triu(1 + k.shape[3]", "triu(k.shape[3]"))

bank.hint("mask-inverted", "The mask is the wrong way round: each query sees exactly what should be hidden from "
                              "it. In `attn_mask`, True means that a query may look there.")  # fmt: skip
bank.slip("mask-inverted", (MASK, "attn_mask=~visible, "))
bank.text("mask-inverted", BY_HAND.replace("masked_fill(later", "masked_fill(~later"))  # NaN, where SDPA gives 0
bank.variant("mask-inverted", ROOM, ("triu(1 + k.shape[3] - q.shape[2])", "tril(k.shape[3] - q.shape[2])"))

bank.hint("added-mask", "The mask is a tensor of numbers, which are added to the scores: 1 for what may be seen "
                           "and 0 for what may not, so nothing is hidden. Make it a tensor of booleans.")  # fmt: skip
bank.slip(
    "added-mask",
    ("torch.ones(new, seen, dtype=torch.bool, device=q.device)", "torch.ones(new, seen, dtype=q.dtype)"),
)
bank.variant("added-mask", BY_HAND, ('scores.masked_fill(later, float("-inf"))', "(scores + ~later)"))

bank.hint("forgets", "Tokens are missing: you don't keep everything that earlier calls brought. Keep all of it, "
                        "old and new.")  # fmt: skip
bank.slip("forgets", (STORE, "        if layer not in self.keys:\n    " + STORE))
bank.slip("forgets", (STORE, ""), ("        if layer in", "        fresh = k, v\n        if layer in"), ("        new, seen", "        self.keys[layer], self.values[layer] = fresh\n        new, seen"))  # fmt: skip
bank.slip("forgets", (STORE, ""))
bank.slip("forgets", (STORE, "        k, v = k[:, :, -32:], v[:, :, -32:]\n" + STORE))  # a window
bank.variant("forgets", BY_HAND, ("(old_k, k), -2), torch.cat((old_v, v), -2)", "(old_k, k), -2)[:, :, -48:], torch.cat((old_v, v), -2)[:, :, -48:]"))  # fmt: skip
bank.variant("forgets", BY_HAND, ("torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)", "k, v"))

bank.hint("new-in-front", "The new keys and values are placed before the old ones. Place them after the old "
                             "ones: the mask relies on this order.")  # fmt: skip
bank.slip("new-in-front", ("[self.keys[layer], k]", "[k, self.keys[layer]]"), ("[self.values[layer], v]", "[v, self.values[layer]]"))  # fmt: skip
bank.variant("new-in-front", BY_HAND, ("(old_k, k)", "(k, old_k)"), ("(old_v, v)", "(v, old_v)"))

bank.hint("other-groups", "Query heads use the wrong key heads. With h = 8 and g = 2, the first four query "
                             "heads share the first key head: repeat each head (`repeat_interleave`), not the row "
                             "of heads (`repeat`).", edge=True)  # fmt: skip
bank.slip("other-groups", (RETURN, "        k, v = (one.repeat(1, q.shape[1] // one.shape[1], 1, 1) for one in (k, v))\n" + RETURN))  # fmt: skip
bank.variant("other-groups", BY_HAND, ("k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)", "k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)"))  # fmt: skip

bank.hint("not-scaled", "The scores are not divided by the square root of the head size, so the softmax is too sharp.")
bank.slip("not-scaled", (MASK, MASK + "scale=1.0, "))
bank.variant("not-scaled", BY_HAND, (" / q.size(-1) ** 0.5", ""))

bank.hint("wrong-attention", "These are not the expected vectors. For each query, take the softmax of its "
                                "scores over all keys that it may see, and sum their values with these weights.")  # fmt: skip
bank.slip("wrong-attention", ("(q, k, v, attn", "(q, v, k, attn"))
bank.variant("wrong-attention", BY_HAND, (".softmax(-1)", ".sigmoid()"))

bank.hint("caches-mixed", "A new Cache starts with what another one has seen: its memory belongs to the class. "
                             "Create it in `__init__`, separately for each cache.")  # fmt: skip
bank.slip("caches-mixed", ("    def __init__(self):\n        self.keys, self.values = {}, {}\n", "    keys, values = {}, {}\n"))  # fmt: skip
bank.slip("caches-mixed", ("    def __init__(self):\n        self.keys, self.values = {}, {}\n", "    def __init__(self, keys={}, values={}):\n        self.keys, self.values = keys, values\n"))  # fmt: skip
bank.variant("caches-mixed", BY_HAND, ("    def __init__(self):\n        self.kept = []\n", "    kept = []\n"))

bank.hint("layers-mixed", "With one layer everything is right, with three layers it is not: each layer has its "
                             "own keys and values.", edge=True)  # fmt: skip
bank.slip("layers-mixed", ("[layer]", "[0]"), ("layer in", "0 in"))
bank.slip("layers-mixed", ("if layer in", "if layer == 0 and layer in"))
bank.variant("layers-mixed", ROOM, ("        k, v = self.rooms[layer][:, :, :, None, : self.used[layer]]\n", "        k, v = self.rooms[layer][:, :, :, None, : self.used[layer]] if layer == 0 else (k[:, :, None], v[:, :, None])\n"))  # fmt: skip
bank.variant("layers-mixed", BY_HAND, ("if layer == len(self.kept)", "layer = 0\n        if not self.kept"))

bank.slip("other-device", ("dtype=torch.bool, device=q.device)", "dtype=torch.bool)"))
bank.slip(
    "other-device",
    ("dtype=torch.bool, device=q.device)", 'dtype=torch.bool, device="cuda" if q.is_cuda else "cpu")'),
)
bank.variant("other-device", BY_HAND, ("k.size(2), device=q.device)", "k.size(2))"))
bank.variant("other-device", ROOM, ("dtype=q.dtype, device=q.device)", "dtype=q.dtype)"))

bank.hint("given-changed", "You changed tensors that the model gave you: attend must work on new tensors.", edge=True)
bank.slip(
    "given-changed", (RETURN, "        q *= q.shape[-1] ** -0.5\n" + RETURN.replace("enable", "scale=1.0, enable"))
)
bank.variant("given-changed", BY_HAND, ("q @ k.transpose(-1, -2) / q.size(-1) ** 0.5", "q.div_(q.size(-1) ** 0.5) @ k.transpose(-1, -2)"))  # fmt: skip

bank.hint("too-many-bytes", "The cache grows by {n} times the bytes of the keys and values of g heads. Keep the "
                               "g heads as they come, and repeat them only when you use them. Keep nothing else: "
                               "no queries and no older versions.", edge=True)  # fmt: skip
bank.slip(
    "too-many-bytes",
    ("        new, seen", "        self.all = [*getattr(self, 'all', []), k, v]\n        new, seen"),
)
EXPANDED = "        shared = q.size(1) // k.size(1)\n        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)\n        if layer == len(self.kept)"
bank.text("too-many-bytes", BY_HAND.replace("        if layer == len(self.kept)", EXPANDED))
bank.variant("too-many-bytes", ROOM, ("        if layer == len(self.rooms):", "        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))\n        if layer == len(self.rooms):"))  # fmt: skip
# room for 512 tokens from the start
bank.text(
    None,
    ROOM.replace(
        "self.rooms.append(torch.stack([k, v]))",
        "room = k.new_empty(2, *k.shape[:2], 512, k.shape[3])\n            room[0, :, :, : k.shape[2]], room[1, :, :, : k.shape[2]] = k, v\n            self.rooms.append(room)",
    ),
)

bank.hint("text-form", "write must return the prompt followed by `count` tokens, int64 of shape (b, s + count). "
                          "You returned {got}.")  # fmt: skip
bank.slip("text-form", ("return text", "return text[:, prompt.shape[1]:]"))
bank.slip("text-form", ("range(count)", "range(count - 1)"))
bank.variant("text-form", BY_HAND, ("torch.cat([prompt, torch.stack(new, 1)], 1)", "torch.stack(new, 1)"))

bank.hint("without-attend", "You call the model without the `attend` that write was given: without it, the "
                               "model has no memory and sees only the tokens of this call.")  # fmt: skip
bank.slip("without-attend", ("model(text[:, first:], first, attend)", "model(text)"))
bank.slip("without-attend", ("text, first = prompt, 0", "text, first = prompt, 0\n    attend = Cache().attend"))
bank.slip("without-attend", ("model(text[:, first:], first, attend)", "model(text[:, first:], first)"))
bank.variant("without-attend", BY_HAND, ("model(new[-1][:, None], prompt.size(1) + i, attend)", "model(torch.cat([prompt, torch.stack(new, 1)], 1))"))  # fmt: skip

bank.hint("read-again", "Tokens that are already in the cache go through the model again. The calls read {got}; "
                           "after the prompt, each call should read one new token.")  # fmt: skip
bank.slip("read-again", ("model(text[:, first:], first, attend)", "model(text, 0, attend)"))
bank.variant("read-again", BY_HAND, ("model(new[-1][:, None], prompt.size(1) + i, attend)", "model(torch.stack(new, 1), prompt.size(1), attend)"))  # fmt: skip

bank.hint("wrong-position", "The calls read the right number of tokens, but at the wrong positions: {got}. "
                               "`first` counts all earlier tokens of the text, including those of the prompt.")  # fmt: skip
bank.slip("wrong-position", ("text[:, first:], first, attend", "text[:, first:], 0, attend"))
bank.slip("wrong-position", ("for _ in", "for step in"), ("text[:, first:], first, attend", "text[:, first:], step, attend"))  # fmt: skip
bank.slip("wrong-position", ("text[:, first:], first, attend", "text[:, first:], first + (first > 0), attend"))
bank.variant("wrong-position", BY_HAND, ("prompt.size(1) + i, attend", "prompt.size(1) + i + 1, attend"))

bank.hint("prompt-in-pieces", "The prompt goes through the model token by token. All of its tokens are known: "
                                 "read them in one call, which computes the same products at once.")  # fmt: skip
PIECES = "    for i in range(prompt.shape[1] - 1):\n        model(prompt[:, i : i + 1], i, attend)\n"
bank.slip(
    "prompt-in-pieces", ("    text, first = prompt, 0\n", PIECES + "    text, first = prompt, prompt.shape[1] - 1\n")
)
bank.variant("prompt-in-pieces", BY_HAND, ("    logits, new = model(prompt, 0, attend), []\n", "    for i, token in enumerate(prompt.split(1, 1)):\n        logits = model(token, i, attend)\n    new = []\n"))  # fmt: skip

bank.hint("one-call-too-many", "You call the model more often than tokens are asked for: each call must produce "
                                  "a token that is returned.", edge=True)  # fmt: skip
bank.slip("one-call-too-many", ("    return text", "    model(text[:, first:], first, attend)\n    return text"))
bank.variant("one-call-too-many", BY_HAND, ("if i + 1 < count:", "if i < count:"))

bank.hint("other-calls", "The calls of the model read {got}. Read all tokens of the prompt in one call, then "
                            "each new token in one call.")  # fmt: skip
bank.slip("other-calls", ("text, first = prompt, 0", "text, first = prompt, prompt.shape[1] - 1"))
bank.variant("other-calls", BY_HAND, ("model(prompt, 0, attend)", "model(prompt[:, :1], 0, attend)"))

bank.hint("not-the-last-place", "The model returns logits for each token that it read. Take those of the last "
                                   "token: they say what comes next.")  # fmt: skip
bank.slip("not-the-last-place", ("logits[:, -1:]", "logits[:, :1]"))
bank.variant("not-the-last-place", BY_HAND, ("logits[:, -1]", "logits[:, 0]"))

bank.hint("other-tokens", "The calls are right, but the tokens are not. For each row, take the most likely "
                             "token at its last position.")  # fmt: skip
bank.slip("other-tokens", (".argmax(-1)", ".topk(2).indices[..., 1]"))
bank.slip("other-tokens", (".argmax(-1)", ".argmax(-1)[:1].expand(len(text), -1)"))
bank.variant("other-tokens", BY_HAND, (".argmax(-1)", ".argmin(-1)"))

bank.edge("other-device")
