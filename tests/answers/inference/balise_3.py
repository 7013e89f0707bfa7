"""Answers to balise 3 of 23_inference: blocks, their tables, and attention over them."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 3, whole=True)

# block by block, free ones in a set, and attention written out over the places of tokens
BLOCK_BY_BLOCK = """
class Pool:
    def __init__(self, blocks, size, layers=1, groups=1, d=1, device=None):
        self.keys = torch.zeros(layers, blocks, size, groups, d, device=device)
        self.values = torch.zeros(layers, blocks, size, groups, d, device=device)
        self.size, self.free, self.holders = size, set(range(blocks)), {}

    def take(self):
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def extend(self, table, length, n):
        begin, end = length // self.size, (length + n + self.size - 1) // self.size
        written = range(begin, min(end, len(table))) if n else ()
        copies = [at for at in written if self.holders[table[at]] > 1]
        needed = len(copies) + max(0, end - len(table))
        if needed > len(self.free):
            raise MemoryError("the pool is full")
        for at in copies:
            block = self.take()
            self.keys[:, block].copy_(self.keys[:, table[at]])
            self.values[:, block].copy_(self.values[:, table[at]])
            self.holders[table[at]] -= 1
            table[at] = block
        while len(table) < end:
            table.append(self.take())

    def fork(self, table):
        other = []
        for block in table:
            self.holders[block] = self.holders[block] + 1
            other.append(block)
        return other

    def release(self, table):
        while table:
            block = table.pop()
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                self.free.add(block)


def paged_attention(q, keys, values, tables, lengths):
    b, h, d = q.shape
    size, g = keys.shape[1:3]
    places = torch.arange(tables.shape[1] * size, device=q.device)
    slots = tables[:, places // size] * size + places % size
    k, v = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
    scores = torch.einsum("bgrd,bpgd->bgrp", q.reshape(b, g, h // g, d), k) / d**0.5
    outside = places >= lengths[:, None]
    weights = scores.masked_fill(outside[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bgrp,bpgd->bgrd", weights, v).reshape(b, h, d)
"""
bank.text(None, BLOCK_BY_BLOCK)

# tables kept by the pool, who shares is looked up; heads of keys are repeated
LOOKED_UP = """
import collections


class Pool:
    def __init__(self, blocks, size, layers=1, groups=1, d=1, device=None):
        self.keys = torch.zeros(layers, blocks, size, groups, d, device=device)
        self.values = torch.zeros_like(self.keys)
        self.size, self.free = size, collections.deque(range(blocks))
        self.tables = []

    def held(self, block):
        return sum(block in each for each in self.tables)

    def extend(self, table, length, n):
        if not any(each is table for each in self.tables):
            self.tables.append(table)
        inside = length % self.size
        copy = n > 0 and inside > 0 and self.held(table[-1]) > 1
        room = len(table) * self.size - length
        more = max(0, n - room + self.size - 1) // self.size
        if more + copy > len(self.free):
            raise MemoryError
        if copy:
            new = self.free.popleft()
            for store in (self.keys, self.values):
                store[:, new, :inside] = store[:, table[-1], :inside]
            table[-1] = new
        table.extend(self.free.popleft() for _ in range(more))

    def fork(self, table):
        self.tables.append(table[:])
        return self.tables[-1]

    def release(self, table):
        self.tables = [each for each in self.tables if each is not table]
        self.free.extend(block for block in table if self.held(block) == 0)
        del table[:]


def paged_attention(q, keys, values, tables, lengths):
    n, heads = q.shape[0], q.shape[1]
    k, v = keys[tables].flatten(1, 2), values[tables].flatten(1, 2)
    k, v = (x.repeat_interleave(heads // k.shape[2], dim=2) for x in (k, v))
    inside = torch.arange(k.shape[1], device=q.device).expand(n, -1).lt(lengths.unsqueeze(1))
    scores = (k * q.unsqueeze(1)).sum(-1) * q.shape[-1] ** -0.5
    scores = torch.where(inside.unsqueeze(-1), scores, -torch.inf)
    return (scores.softmax(1).unsqueeze(-1) * v).sum(1)
"""
bank.text(None, LOOKED_UP)
# a table has no block to spare
bank.slip(None, ("- len(table)", "- -(-length // self.size)"))

bank.slip("nothing-returned", ("        return list(table)\n", ""))
bank.slip("nothing-returned", ("    return y[:, :, 0]\n", ""))

bank.hint("table-form", "After extend, the table itself must hold the number of a block, an int, for every four "
                           "tokens or part of four, each number different. Change the list that you are given.")  # fmt: skip
bank.slip("table-form", ("table += taken", "table = table + taken"))
bank.slip("table-form", ("-(-(length + n) // self.size)", "-(-(length + n) * self.size // self.size)"))
bank.slip("table-form", ("-(-(length + n) // self.size)", "(length + n) // self.size"))
bank.variant("table-form", BLOCK_BY_BLOCK, ("table.append(self.take())", "table.append(float(self.take()))"))

bank.hint("fork-form", "A fork has the same numbers, but must be another list: what one sequence adds later "
                          "does not belong to the other.")  # fmt: skip
bank.slip("fork-form", ("return list(table)", "return table"))
bank.slip("fork-form", ("return list(table)", "return [self.free.pop() for _ in table]"))
bank.variant("fork-form", LOOKED_UP, ("        return self.tables[-1]", "        return table"))

bank.hint("no-error", "extend went on although too few blocks were free. Raise a MemoryError. Did it write into "
                         "a block of another sequence?", edge=True)  # fmt: skip
bank.slip("no-error", ('            raise MemoryError(f"{missing + shared} blocks needed, {len(self.free)} free")\n', "            return\n"))  # fmt: skip
bank.slip("no-error", ("if missing + shared > len", "if missing > len"), ("        for block in taken:\n", "        shared = shared and len(taken) > missing\n        for block in taken:\n"), ("for _ in range(missing + shared)]", "for _ in range(min(len(self.free), missing + shared))]"))  # fmt: skip
bank.variant("no-error", BLOCK_BY_BLOCK, ('raise MemoryError("the pool is full")', "copies, end = [], 0"))

bank.hint("wrong-error", "You get {got} instead of {expected}. The caller of extend must be able to recognise "
                            "that memory is short: raise a MemoryError before a list is empty.", edge=True)  # fmt: skip
bank.slip("wrong-error", ("        if missing + shared > len(self.free):\n", "        if False:\n"))
bank.slip("wrong-error", ("raise MemoryError", "raise ValueError"))
bank.slip("wrong-error", ("if missing + shared > len", "if missing > len"))
bank.variant("wrong-error", LOOKED_UP, ("raise MemoryError", 'raise RuntimeError("full")'))

bank.hint("too-early", "extend raises a MemoryError although there are enough free blocks. Count only the "
                          "blocks that are *missing* in the table, and one for a copy only if a copy is needed.", edge=True)  # fmt: skip
bank.slip("too-early", ("if missing + shared > len", "if missing + shared >= len"))
bank.slip("too-early", ("if missing + shared > len", "if missing + 1 > len"))
bank.slip("too-early", ("if missing + shared > len", "if missing + len(table) + shared > len"))
bank.slip("too-early", (" - len(table)", ""))
bank.variant("too-early", BLOCK_BY_BLOCK, ("if needed > len", "if n + len(copies) > len"))

bank.hint("half-done", "The error came too late: the table had already changed, and the caller will try again "
                          "with it. First count what is needed; then raise a MemoryError or take the blocks.", edge=True)  # fmt: skip
HALF = """
        while len(table) < -(-(length + n) // self.size):
            if not self.free:
                raise MemoryError
            table.append(self.free.pop())
            self.holders[table[-1]] = 1
        missing = 0
"""
bank.slip("half-done", ("        missing = -(-(length + n) // self.size) - len(table)\n", HALF), ("shared = n > 0", "at = len(table) - 1\n        shared = n > 0"), ("table.pop(), taken[0]", "table[at], taken[0]"), ("        table += taken", "            table[at] = new"))  # fmt: skip
bank.variant("half-done", BLOCK_BY_BLOCK, ("needed = len(copies) + max(0, end - len(table))", "needed = len(copies)"), ("            table.append(self.take())", "            if not self.free:\n                raise MemoryError\n            table.append(self.take())"))  # fmt: skip

bank.hint("not-cleared", "A released table still names its blocks. If it is released a second time, it takes "
                            "them from other sequences: empty it.", edge=True)  # fmt: skip
bank.slip("not-cleared", ("        table.clear()\n", ""))
bank.slip("not-cleared", ("        table.clear()\n", "        table = []\n"))
bank.variant("not-cleared", LOOKED_UP, ("        del table[:]\n", ""))

bank.hint("wrong-tokens", "A sequence doesn't hold what was written to it.")
bank.slip(
    "wrong-tokens",
    ("        table += taken", "        table[:] = table + taken if shared else table[:1] + taken + table[1:]"),
)
bank.variant(
    "wrong-tokens", BLOCK_BY_BLOCK, ("table.append(self.take())", "table.insert(len(table) // 2, self.take())")
)

bank.hint("no-copy", "A sequence wrote into its last block while another one shared it, and the other one now "
                        "reads the wrong tokens. Count one more holder in each fork, and copy a block that others "
                        "also hold, be it one or several, before it is written into.")  # fmt: skip
bank.slip("no-copy", ("and self.holders[table[-1]] > 1", "and False"))
bank.slip("no-copy", ("and self.holders[table[-1]] > 1", "and self.holders[table[-1]] == 2"))
bank.variant("no-copy", BLOCK_BY_BLOCK, ("if self.holders[table[at]] > 1]", "if self.holders[table[at]] == 2]"))
bank.slip("no-copy", ("            self.holders[block] += 1\n        return", "            pass\n        return"), ("            self.holders[block] -= 1\n            if self.holders[block] == 0:\n", "            if block not in self.free:\n"))  # fmt: skip
bank.slip("no-copy", ("self.holders[block] += 1\n        return", "self.holders[block] = 1\n        return"))
bank.variant("no-copy", LOOKED_UP, ("self.held(table[-1]) > 1", "self.held(table[-1]) > 9"))

bank.hint("empty-copy", "The copy doesn't hold what was in the shared block. Copy the keys and values of all "
                           "layers.")  # fmt: skip
bank.slip("empty-copy", ("self.keys[:, new], self.values[:, new] =", "self.values[:, new], self.keys[:, new] ="))
bank.slip(
    "empty-copy",
    ("            self.keys[:, new], self.values[:, new] = self.keys[:, old], self.values[:, old]\n", ""),
)
bank.slip("empty-copy", ("            self.keys[:, new], self.values[:, new] = self.keys[:, old], self.values[:, old]\n", "            self.keys[:, new] = self.keys[:, old]\n"))  # fmt: skip
bank.slip("empty-copy", ("self.keys[:, new], self.values[:, new] = self.keys[:, old], self.values[:, old]", "self.keys[0, new], self.values[0, new] = self.keys[0, old], self.values[0, old]"))  # fmt: skip
bank.variant("empty-copy", LOOKED_UP, ("for store in (self.keys, self.values):", "for store in (self.keys,):"))
bank.variant("empty-copy", LOOKED_UP, ("store[:, new, :inside] = store[:, table[-1], :inside]", "store[:2, new, :inside] = store[:2, table[-1], :inside]"))  # fmt: skip

bank.hint("pool-copied", "To copy one block, you copied all keys or values of the pool: for a while this needs "
                            "the memory twice, and code that holds pool.keys reads the old ones. Write only into "
                            "the one block.", edge=True)  # fmt: skip
bank.slip("pool-copied", ("            self.keys[:, new]", "            self.keys, self.values = self.keys.clone(), self.values.clone()\n            self.keys[:, new]"))  # fmt: skip
bank.variant("pool-copied", LOOKED_UP, ("            for store in", "            self.values = self.values.clone()\n            for store in"))  # fmt: skip

bank.hint("not-last", "The copy doesn't take the place of the block that it replaces in the given list: its "
                         "number must be there once, and the old number gone. The order of the table is the order "
                         "of the tokens.", edge=True)  # fmt: skip
bank.slip("not-last", ("        table += taken", "        table += taken[::-1]"))
bank.slip("not-last", ("        table += taken", "        table += taken\n        table.sort()"))
bank.slip("not-last", ("old, new = table.pop(), taken[0]", "old, new = table[-1], taken[0]"))  # behind it
bank.slip(
    "not-last", ("old, new = table.pop(), taken[0]", "old, new = table[-1], taken[0]\n            table[-1] = new")
)  # twice
bank.variant("not-last", LOOKED_UP, ("            table[-1] = new", "            table = table[:-1] + [new]"))
bank.slip("not-last", ("        table += taken", "        table[:] = taken + table if shared else table + taken"))
bank.variant("not-last", BLOCK_BY_BLOCK, ("            table[at] = block\n", "            table.insert(0, block)\n            table.pop()\n"))  # fmt: skip

bank.hint("freed-for-both", "A block became free while another table still held it, and was given to a third "
                               "one. Decrease the number of its holders, and free it at zero.")  # fmt: skip
bank.slip("freed-for-both", ("            if self.holders[block] == 0:\n                self.free.append(block)\n", "            self.free.append(block)\n"))  # fmt: skip
bank.variant("freed-for-both", LOOKED_UP, ("if self.held(block) == 0)", "if self.held(block) < 2)"))

bank.hint(
    "wrong-free",
    "{got} instead of {expected}, {where}. Remember: {told}.",
)
bank.hint("block-too-many", "You take a block as soon as the last one is exactly full, before there is a token "
                               "for it. n tokens need n / size blocks, rounded up.", edge=True)  # fmt: skip
bank.slip("block-too-many", ("-(-(length + n) // self.size)", "((length + n) // self.size + 1)"))
bank.variant("block-too-many", BLOCK_BY_BLOCK, ("(length + n + self.size - 1) // self.size", "(length + n) // self.size + 1"))  # fmt: skip

bank.hint("copied-alone", "You copied a block that nobody shares any more, or a full block that is only read. "
                             "Copy a block only if it will be written into and another table holds it. Did you "
                             "also take one holder from the block that a copy replaced?", edge=True)  # fmt: skip
bank.slip("copied-alone", ("shared = n > 0 and length % self.size > 0 and", "shared = n > 0 and length > 0 and"), ("            old, new = table.pop(), taken[0]\n            self.holders[old] -= 1\n", "            old, new = table[-1], taken[0]\n            self.holders[old] -= 1\n            del table[-1]\n"))  # fmt: skip
bank.slip("copied-alone", ("shared = n > 0 and", "shared = "))
bank.slip("copied-alone", ("            self.holders[old] -= 1\n", ""))
bank.variant("copied-alone", LOOKED_UP, ("copy = n > 0 and inside > 0 and", "copy = inside > 0 and"))

bank.slip("wrong-free", ("            if self.holders[block] == 0:\n                self.free.append(block)\n", ""))
bank.slip("wrong-free", ("if self.holders[block] == 0:", "if self.holders[block] == 1:"))
bank.variant("wrong-free", BLOCK_BY_BLOCK, ("                self.free.add(block)\n", ""))

SDPA = "F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)"
bank.hint("attention-form", "paged_attention must return (b, heads, d), in the dtype of the queries.")
bank.slip("attention-form", ("return y[:, :, 0]", "return y"))
bank.slip("attention-form", ("return y[:, :, 0]", "return y[:, :, 0].double()"))
bank.variant("attention-form", BLOCK_BY_BLOCK, (".reshape(b, h, d)\n", "\n"))

bank.hint("inputs-changed", "You changed the keys, the values or the tables that you were given. Other "
                               "sequences read them too.", edge=True)  # fmt: skip
bank.slip("inputs-changed", ("    k, v = (each.index_select", "    q *= 1.0001\n    k, v = (each.index_select"))
bank.slip(
    "inputs-changed",
    ("    seen = torch", "    lengths -= 1\n    seen = torch"),
    ("< lengths[:, None]", "<= lengths[:, None]"),
)
bank.variant("inputs-changed", BLOCK_BY_BLOCK, ("tables[:, places // size] * size + places % size", "tables.mul_(size)[:, places // size] + places % size"))  # fmt: skip

bank.hint(
    "wrong-attention", "The shape is right, but the result is not the attention over the tokens of each sequence."
)
bank.slip("wrong-attention", (SDPA, SDPA.replace("k, v", "v, k")))
bank.variant("wrong-attention", BLOCK_BY_BLOCK, ('"bgrp,bpgd->bgrd", weights, v', '"bgrp,bpgd->bgrd", weights, k'))

bank.hint("not-masked", "You also count what follows the end of a sequence: the rest of its last block, and the "
                           "zeros of the table, which name a block of another sequence. Only places below its "
                           "length may be seen.")  # fmt: skip
bank.slip("not-masked", ("attn_mask=seen[:, None, None], ", ""))
bank.slip("not-masked", ("< lengths[:, None]", "< -(-lengths[:, None] // keys.shape[1]) * keys.shape[1]"))
bank.slip("not-masked", ("< lengths[:, None]", "< lengths.max().expand(len(q), 1)"))
bank.variant("not-masked", BLOCK_BY_BLOCK, ('scores.masked_fill(outside[:, None, None], float("-inf"))', "scores"))

bank.hint("zeros-count", "You set the values after the end of a sequence to 0, but they still count: a score of "
                            "0 is a weight of exp(0) = 1. Hide them from the softmax with a mask or a score of "
                            "-inf.")  # fmt: skip
bank.slip("zeros-count", (SDPA, "F.scaled_dot_product_attention(q[:, :, None], *(each * seen[:, None, :, None] for each in (k, v)), enable_gqa=True)"))  # fmt: skip
bank.variant("zeros-count", BLOCK_BY_BLOCK, ('    scores = torch', '    k, v = (each * (places < lengths[:, None])[..., None, None] for each in (k, v))\n    scores = torch'), ('scores.masked_fill(outside[:, None, None], float("-inf"))', "scores"))  # fmt: skip

bank.hint("masked-after", "You set the weights to 0 after the softmax, so the remaining ones no longer add up "
                             "to 1. Hide the scores before the softmax.")  # fmt: skip
AFTER = (
    'scores.masked_fill(outside[:, None, None], float("-inf")).softmax(-1)',
    "scores.softmax(-1) * ~outside[:, None, None]",
)
bank.text("masked-after", BLOCK_BY_BLOCK.replace(*AFTER))
bank.variant("masked-after", LOOKED_UP, ("    scores = torch.where(inside.unsqueeze(-1), scores, -torch.inf)\n", ""), ("(scores.softmax(1).unsqueeze(-1)", "(scores.softmax(1).mul(inside.unsqueeze(-1)).unsqueeze(-1)"))  # fmt: skip

bank.hint("one-token-off", "Either the last token of each sequence is not seen, or one token too many is. The "
                              "key and value of the last token are already in the pool: use places 0 to length - 1.", edge=True)  # fmt: skip
bank.slip("one-token-off", ("< lengths[:, None]", "< lengths[:, None] - 1 + (lengths[:, None] == 1)"))
bank.slip("one-token-off", ("< lengths[:, None]", "<= lengths[:, None]"))
bank.variant("one-token-off", BLOCK_BY_BLOCK, ("places >= lengths[:, None]", "places > lengths[:, None]"))

bank.hint("heads-in-turn", "The query heads use the key heads in turn. Neighbours must share one: with four "
                              "query heads and two key heads, 0 and 1 use the first.", edge=True)  # fmt: skip
bank.slip("heads-in-turn", (SDPA, "F.scaled_dot_product_attention(q[:, :, None], *(each.repeat(1, q.shape[1] // k.shape[1], 1, 1) for each in (k, v)), attn_mask=seen[:, None, None])"))  # fmt: skip
bank.variant("heads-in-turn", LOOKED_UP, ("x.repeat_interleave(heads // k.shape[2], dim=2)", "x.repeat(1, 1, heads // k.shape[2], 1)"))  # fmt: skip

bank.hint("no-table", "You read the blocks as they are in the pool, or in the order of their numbers. The table "
                         "says which blocks come, and in which order.")  # fmt: skip
bank.slip("no-table", ("each.index_select(0, tables.flatten())", "each[: tables.numel()]"))
bank.slip("no-table", ("each.index_select(0, tables.flatten())", "each[: tables.shape[1]].repeat(len(q), 1, 1, 1)"))
bank.slip("no-table", ("tables.flatten()", "tables.T.flatten()"))
bank.slip("no-table", ("tables.flatten()", "tables.sort(1).values.flatten()"))
bank.variant("no-table", BLOCK_BY_BLOCK, ("tables[:, places // size] * size + places % size", "places.expand(b, -1)"))

bank.hint("no-scale", "The scores are not divided by √d.")
bank.slip("no-scale", ("enable_gqa=True", "enable_gqa=True, scale=1"))
bank.variant("no-scale", BLOCK_BY_BLOCK, ("k) / d**0.5", "k)"))

bank.slip(
    "other-device",
    ("torch.arange(k.shape[2], device=q.device) < lengths[:, None]", "torch.arange(k.shape[2]) < lengths[:, None]"),
)
bank.slip(
    "other-device",
    ("torch.arange(k.shape[2], device=q.device)", 'torch.arange(k.shape[2], device="cuda" if q.is_cuda else "cpu")'),
)
bank.variant(
    "other-device", BLOCK_BY_BLOCK, ("outside = places >=", "outside = torch.arange(tables.shape[1] * size) >=")
)

bank.hint("operators-grow", "With six sequences and longer tables, {n} more operators ran than with two: there "
                               "is a loop over sequences or blocks, and in each iteration the GPU waits for "
                               "Python. One index_select takes the blocks of all sequences, and one comparison "
                               "says what is seen.")  # fmt: skip
ONE_BY_ONE = """
    rows = []
    for i in range(len(q)):
        n = int(lengths[i])
        k, v = (each[tables[i]].flatten(0, 1)[:n].transpose(0, 1) for each in (keys, values))
        rows.append(F.scaled_dot_product_attention(q[i][:, None], k, v, enable_gqa=True)[:, 0])
    return torch.stack(rows)
"""
GATHER = (
    "    k, v = (each.index_select(0, tables.flatten()) for each in (keys, values))  # (b · most, size, groups, d)\n"
)
bank.slip("operators-grow", (GATHER, ONE_BY_ONE))
bank.slip("operators-grow", (GATHER, "    k, v = (torch.stack([each[block] for row in tables for block in row]) for each in (keys, values))\n"))  # fmt: skip
bank.variant("operators-grow", LOOKED_UP, ("keys[tables].flatten(1, 2)", "torch.stack([keys[row].flatten(0, 1) for row in tables])"))  # fmt: skip

bank.edge("other-device")
