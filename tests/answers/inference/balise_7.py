"""Answers to balise 7 of 23_inference: attention with a rank's heads."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 7, whole=True)

# heads as an axis, picked by number; a head of keys found by each head of queries
PICKED = """
def cut_attention(attention, ranks):
    k = attention.head_size
    heads, groups = len(attention.query.weight) // k, len(attention.key.weight) // k
    if heads % ranks.size:
        raise ValueError("heads")
    if groups % ranks.size and ranks.size % groups:
        raise ValueError("key heads")
    mine = torch.arange(heads).chunk(ranks.size)[ranks.rank]
    held = (mine // (heads // groups)).unique()
    rows = (mine[:, None] * k + torch.arange(k)).flatten()
    theirs = (held[:, None] * k + torch.arange(k)).flatten()
    attention.query = linear_part(attention.query, rows)
    attention.key, attention.value = linear_part(attention.key, theirs), linear_part(attention.value, theirs)
    attention.output = Summed(linear_part(attention.output, inputs=rows), ranks)
    return attention
"""
bank.text(None, PICKED)

# a layer of its own, with weights cut by hand and the all-reduce called
OWN = """
class Part(nn.Module):
    def __init__(self, attention, ranks):
        super().__init__()
        self.size, self.rotary = attention.head_size, attention.rotary
        heads, groups = (len(layer.weight) // self.size for layer in (attention.query, attention.key))
        if heads % ranks.size or max(groups, ranks.size) % min(groups, ranks.size):
            raise ValueError("not to be shared out")
        r, n, g = ranks.rank, ranks.size, min(groups, ranks.size)
        cut = lambda w, parts, place, dim: nn.Parameter(w.detach().chunk(parts, dim)[place].clone(), False)
        self.q = cut(attention.query.weight, n, r, 0)
        self.k = cut(attention.key.weight, g, r * g // n, 0)
        self.v = cut(attention.value.weight, g, r * g // n, 0)
        self.o = cut(attention.output.weight, n, r, 1)

    def forward(self, x, first=0, attend=None):
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = attend(self.rotary(q, first), self.rotary(k, first), v).transpose(1, 2).flatten(2)
        y = F.linear(y, self.o)
        dist.all_reduce(y)
        return y


def cut_attention(attention, ranks):
    return Part(attention, ranks)
"""
bank.text(None, OWN)
bank.slip("nothing-returned", ("    return attention\n", ""))

OUTPUT = "Summed(linear_part(attention.output, inputs=mine), ranks)"

bank.hint("refuses-shared", "{got}: these heads can be split evenly. If there are fewer key heads than ranks, "
                               "and their number divides that of the ranks, several ranks keep the same key head.")  # fmt: skip
bank.slip("refuses-shared", ("(groups % ranks.size and ranks.size % groups)", "groups % ranks.size"))
bank.variant("refuses-shared", PICKED, ("if groups % ranks.size and ranks.size % groups:", "if groups % ranks.size:"))

bank.hint("not-a-layer", "Return the layer with this rank's heads, an nn.Module. You returned {got}.")
bank.slip("not-a-layer", ("return attention", "return attention.query, attention.key, attention.value, attention.output"))  # fmt: skip
bank.variant("not-a-layer", PICKED, ("return attention", "return attention.state_dict()"))

bank.hint("other-heads", "Rank {rank} doesn't have its share of the heads: with h heads on N ranks, each has h / N.")
bank.slip("other-heads", ("attention.query = linear_part(attention.query, outputs=mine)", "pass"), ("linear_part(attention.output, inputs=mine)", "attention.output"))  # fmt: skip
bank.slip("other-heads", ("    size = attention.head_size", "    if ranks.rank:\n        attention.output.weight.data.zero_()\n    return Summed2(attention, ranks)\n\n\nclass Summed2(nn.Module):\n    def __init__(self, attention, ranks):\n        super().__init__()\n        self.attention, self.ranks = attention, ranks\n\n    def forward(self, *args):\n        return self.ranks.sum(self.attention(*args))\n\n\ndef other(attention, ranks):\n    size = attention.head_size"))  # fmt: skip
bank.variant("other-heads", PICKED, ("    rows = ", "    mine = torch.arange(heads)\n    rows = "), ("linear_part(attention.output, inputs=rows)", "attention.output"))  # fmt: skip

bank.hint("whole-cache", "Rank {rank} keeps {n} key heads; its queries read {held}. Cut the cache too: key and "
                            "value keep only the heads that this rank's queries need.")  # fmt: skip
bank.slip("whole-cache", ("    attention.key = linear_part(attention.key, outputs=held)\n    attention.value = linear_part(attention.value, outputs=held)\n", ""))  # fmt: skip
bank.slip("whole-cache", ("held = slice(first * size, (first + few) * size)", "shared = heads // groups\n    held = torch.cat([torch.arange(size) + (ranks.rank * many + j) // shared * size for j in range(many)])"))  # fmt: skip
bank.variant("whole-cache", PICKED, ("(mine // (heads // groups)).unique()", "mine // (heads // groups)"))

bank.hint("few-keys", "Rank {rank} keeps {n} key heads, but its queries read {held}: with g key heads on N "
                         "ranks, each has g / N, and at least one.")  # fmt: skip
bank.slip("few-keys", ("max(groups // ranks.size, 1)", "1"))
bank.slip("few-keys", ("max(groups // ranks.size, 1)", "groups // ranks.size"))  # none
bank.variant("few-keys", PICKED, (".unique()", ".unique()[:1]"))

bank.hint("heads-form", "The output is not (b, s, d) on each rank: {got}.")
bank.slip("heads-form", ("    return attention\n", "    class Last(nn.Module):\n        def __init__(self):\n            super().__init__()\n            self.attention = attention\n\n        def forward(self, *args):\n            return self.attention(*args)[:, -1]\n\n    return Last()\n"))  # fmt: skip
bank.variant("heads-form", OWN, ("return y\n", "return y.float()\n"))

bank.hint(
    "whole-weights",
    "A rank holds {got} weights and should hold {expected}: weights that it doesn't multiply must not stay on it.",
)
bank.slip("whole-weights", ("    attention.query =", "    attention.whole = attention.query\n    attention.query ="))
bank.variant("whole-weights", OWN, ("        super().__init__()\n", "        super().__init__()\n        self.attention = attention\n"))  # fmt: skip

bank.hint(
    "view-kept",
    "A part is a view of the whole weight, which therefore stays in memory: copy the part, as linear_part does.",
)
bank.slip("view-kept", ("attention.query = linear_part(attention.query, outputs=mine)", "attention.query.weight = nn.Parameter(attention.query.weight[mine], False)"))  # fmt: skip
bank.variant("view-kept", OWN, (".clone()", ""))

bank.hint(
    "not-summed",
    "The ranks send nothing. After the output projection, each rank has a part of a sum: add up the parts over the "
    "ranks.",
)
bank.slip("not-summed", (OUTPUT, "linear_part(attention.output, inputs=mine)"))
bank.variant("not-summed", OWN, ("        dist.all_reduce(y)\n", ""))

bank.hint("too-often", "You send more than one all-reduce in each call. Add up only the results of the output "
                          "projection: queries, keys and values stay on the rank of their head.")  # fmt: skip
bank.slip(
    "too-often",
    ("    return attention\n", "    attention.output = Summed(attention.output, ranks)\n    return attention\n"),
)
bank.slip("too-often", ("attention.value = linear_part(attention.value, outputs=held)", "attention.value = Summed(linear_part(attention.value, outputs=held), ranks)"))  # fmt: skip
bank.variant("too-often", OWN, ("        dist.all_reduce(y)\n", "        dist.all_reduce(y)\n        dist.broadcast(y, 0)\n"))  # fmt: skip

bank.hint(
    "other-collective",
    "Each call needs one all-reduce: it adds up over the ranks and leaves the sum on each of them. You used {got}.",
)
bank.slip("other-collective", (OUTPUT, "Gathered(linear_part(attention.output, inputs=mine))"), ("    size = attention.head_size", "    class Gathered(nn.Module):\n        def __init__(self, linear):\n            super().__init__()\n            self.linear = linear\n\n        def forward(self, x):\n            y = self.linear(x).contiguous()\n            all_of_them = [torch.empty_like(y) for _ in range(dist.get_world_size())]\n            dist.all_gather(all_of_them, y)\n            return sum(all_of_them)\n\n    size = attention.head_size"))  # fmt: skip
bank.variant("other-collective", OWN, ("dist.all_reduce(y)", "dist.reduce(y, 0)"))

bank.hint(
    "too-much-sent",
    "The calls all-reduce {got} bytes, but (b, s, d) has {expected}. Add up the output of the output projection, "
    "and nothing larger.",
)
bank.slip("too-much-sent", ("    return attention\n", "    class Twice(nn.Module):\n        def __init__(self, linear):\n            super().__init__()\n            self.linear = linear\n\n        def forward(self, x):\n            y = self.linear(x)\n            both = torch.cat([y, y])\n            dist.all_reduce(both)\n            return both[: len(y)]\n\n    attention.output = Twice(attention.output.linear)\n    return attention\n"))  # fmt: skip
bank.variant("too-much-sent", OWN, ("        dist.all_reduce(y)\n        return y", "        y = y.repeat(1, 1, 2)\n        dist.all_reduce(y)\n        return y.chunk(2, -1)[0]"))  # fmt: skip

bank.hint("wrong-attention", "The sum over the ranks is not what the whole layer gives. Rank r has the r-th "
                                "share of the heads: the same rows of the query weight and columns of the output "
                                "weight.")  # fmt: skip
bank.slip("wrong-attention", ("outputs=mine)", "outputs=mine)\n    attention.query.weight.data.neg_()"))

bank.variant("wrong-attention", OWN, ("F.linear(y, self.o)", "F.linear(y, -self.o)"))

bank.hint("first-heads", "Each rank has the first heads, and no rank has the others: start at `ranks.rank` shares.")
bank.slip("first-heads", ("slice(ranks.rank * many * size, (ranks.rank + 1) * many * size)", "slice(0, many * size)"), ("first = ranks.rank * groups // ranks.size", "first = 0"))  # fmt: skip
bank.variant("first-heads", PICKED, ("chunk(ranks.size)[ranks.rank]", "chunk(ranks.size)[0]"))

bank.hint("other-columns", "You cut the output projection at other places than the queries. The results of a "
                              "rank's heads go to the columns of these heads: use the same numbers, as `inputs`.")  # fmt: skip
bank.slip("other-columns", (OUTPUT, "Summed(linear_part(attention.output, inputs=slice(0, many * size)), ranks)"))
bank.slip(
    "other-columns",
    (OUTPUT, "Summed(linear_part(attention.output, inputs=slice(ranks.rank, None, ranks.size)), ranks)"),
)
bank.variant("other-columns", PICKED, ("inputs=rows", "inputs=torch.arange(len(rows))"))

bank.hint("other-keys", "The queries of some ranks read another key head than in the whole layer. With fewer "
                           "key heads than ranks, neighbours share one: for example, ranks 0 and 1 the first, "
                           "ranks 2 and 3 the second.")  # fmt: skip
bank.slip("other-keys", ("first = ranks.rank * groups // ranks.size", "first = ranks.rank * few % groups"))
bank.slip("other-keys", ("first = ranks.rank * groups // ranks.size", "first = 0 if few == 1 and groups < ranks.size else ranks.rank * few"))  # fmt: skip
bank.variant("other-keys", OWN, ("r * g // n", "r % g"))

bank.hint(
    "averaged",
    "You divide the sum over the ranks by their number. Each rank has a part of the sum, not an estimate of the whole.",
)
bank.slip(
    "averaged",
    ("    return attention\n", "    attention.output.linear.weight.data /= ranks.size\n    return attention\n"),
)
bank.variant("averaged", OWN, ("        return y\n", "        return y / dist.get_world_size()\n"))

bank.hint("position-lost", "The prompt is right, but the tokens after it are not: rotate queries and keys for "
                              "the position `first`, not for 0.")  # fmt: skip
bank.slip("position-lost", ("    return attention\n", "    turn = attention.rotary.forward\n    attention.rotary.forward = lambda x, first=0: turn(x)\n    return attention\n"))  # fmt: skip
bank.variant("position-lost", OWN, ("self.rotary(q, first), self.rotary(k, first)", "self.rotary(q), self.rotary(k)"))  # fmt: skip

bank.hint("other-order", "The sum is right, but the heads are distributed in another order: the first rank must "
                            "have the first heads, the next rank the heads after them.")  # fmt: skip
bank.slip("other-order", ("    size = attention.head_size\n", "    size, r = attention.head_size, ranks.size - 1 - ranks.rank\n"), ("ranks.rank *", "r *"), ("(ranks.rank + 1)", "(r + 1)"))  # fmt: skip
bank.variant("other-order", PICKED, ("[ranks.rank]", "[-1 - ranks.rank]"))

bank.hint("not-refused", "These heads cannot be split evenly: raise a ValueError. Two ranks whose queries don't "
                            "all use the same key heads would need the same key head.")  # fmt: skip
bank.slip("not-refused", (" or (groups % ranks.size and ranks.size % groups)", ""))
bank.slip("not-refused", ("        raise ValueError(", "        print("))
bank.variant("not-refused", PICKED, ('        raise ValueError("key heads")', "        pass"))

bank.hint("other-error", "Refuse heads that cannot be split evenly with a ValueError. Your code raised {got}.")
bank.slip("other-error", ("raise ValueError(", "raise RuntimeError("))
bank.variant("other-error", PICKED, ('raise ValueError("key heads")', 'raise AssertionError("key heads")'))

bank.hint("heads-not-numbers", "The layer gives a number of features that is not a multiple of the head size: "
                                  "count in heads, then multiply by the head size. {error}")  # fmt: skip
bank.slip("heads-not-numbers", ("slice(first * size, (first + few) * size)", "slice(first, first + few)"))
bank.slip("heads-not-numbers", ("slice(ranks.rank * many * size, (ranks.rank + 1) * many * size)", "slice(ranks.rank * many, (ranks.rank + 1) * many)"))  # fmt: skip
bank.variant("heads-not-numbers", PICKED, ("theirs = (held[:, None] * k + torch.arange(k)).flatten()", "theirs = held"))

bank.hint("other-side", "You cut a layer on the wrong side, or at the places of another layer. Queries, keys "
                           "and values lose outputs (the first axis of the weight), the output projection loses "
                           "inputs. {error}")  # fmt: skip
bank.slip("other-side", ("linear_part(attention.query, outputs=mine)", "linear_part(attention.query, inputs=mine)"))
bank.slip("other-side", ("linear_part(attention.output, inputs=mine)", "linear_part(attention.output, outputs=mine)"))
bank.slip("other-side", ("linear_part(attention.output, inputs=mine)", "attention.output"))
bank.slip("other-side", ("inputs=mine), ranks", "inputs=held), ranks"))
bank.variant("other-side", PICKED, ("inputs=rows", "outputs=rows"))
bank.slip(
    "wrong-attention",
    (
        "mine = slice(ranks.rank * many * size, (ranks.rank + 1) * many * size)",
        "mine = slice(ranks.rank, None, ranks.size)",
    ),
)
