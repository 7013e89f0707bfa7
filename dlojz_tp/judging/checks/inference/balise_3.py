"""Balise 3: blocks that are taken, shared and given back, beside Python lists, and attention over them, beside its sum.

What a sequence must hold is a list of the numbers written to it. How many blocks that takes, `Ledger` finds by looking through all tables: it counts nobody.
"""

import random

import numpy as np
import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, nothing, same, silent, tried
from dlojz_tp.judging.checks.inference.devices import STAYS
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.measure.operations import Operations

SIZE, LAYERS = 4, 3
SIGNS = torch.arange(1, LAYERS + 1) / 4  # of the layer
DRAWN = torch.Generator().manual_seed(33)


class Ledger:
    """Tables of blocks that are Python lists; a block is shared if another table has the very same list."""

    def __init__(self, blocks, size=SIZE):
        self.blocks, self.size, self.tables = blocks, size, {}

    @property
    def free(self):
        return self.blocks - len({id(block) for table in self.tables.values() for block in table})

    def grow(self, name, values):
        """Whether there was room."""
        table = self.tables.setdefault(name, [])
        others = [block for other, each in self.tables.items() if other != name for block in each]
        copied = bool(values and table and len(table[-1]) < self.size and any(table[-1] is block for block in others))
        length = sum(map(len, table))
        if copied + -(-(length + len(values)) // self.size) - len(table) > self.free:
            return False
        if copied:
            table[-1] = list(table[-1])
        for value in values:
            if not table or len(table[-1]) == self.size:
                table.append([])
            table[-1].append(value)
        return True

    def fork(self, name, new):
        self.tables[new] = list(self.tables[name])

    def release(self, name):
        self.tables[name] = []

    def tokens(self, name):
        return [value for block in self.tables[name] for value in block]


# (what, table, tokens or the new table's name)
ALONE = [("grow", "a", n) for n in (1, 0, 3, 1, 2, 6, 0, 4, 8, 1)]  # of six blocks: 1 to 13 tokens, then 17; then full
FULL = [("grow", "a", 17), ("grow", "b", 5), ("grow", "b", 8), ("grow", "b", 4), ("grow", "a", 4), ("grow", "a", 3), ("release", "b", 0),
        ("grow", "a", 1), ("fork", "a", "c"), ("grow", "c", 11), ("grow", "c", 7), ("fork", "a", "d"), ("grow", "d", 1), ("grow", "a", 1)]  # fmt: skip
SHARED = [("grow", "a", 6), ("fork", "a", "b"), ("grow", "b", 0), ("grow", "b", 1), ("grow", "a", 1), ("grow", "b", 4), ("fork", "a", "c"),
          ("fork", "c", "d"), ("grow", "c", 5), ("grow", "a", 1), ("fork", "a", "e"), ("grow", "e", 1), ("grow", "d", 1)]  # fmt: skip
RELEASED = [("grow", "a", 6), ("fork", "a", "b"), ("release", "a", 0), ("grow", "c", 7), ("grow", "b", 1), ("fork", "b", "a"), ("grow", "a", 1),
            ("release", "b", 0), ("grow", "a", 1), ("release", "b", 0), ("release", "c", 0), ("release", "a", 0), ("grow", "b", 9)]  # fmt: skip
SCRIPTS = {"alone": (ALONE, 6), "shared": (SHARED, 12), "released": (RELEASED, 12), "full": (FULL, 8)}


def drawn_script(steps=200, names="abcdef"):
    """Operations in no order that anybody thought of."""
    chance, script, there = random.Random(5), [], dict.fromkeys(names, False)
    for _ in range(steps):
        name = chance.choice(names)
        others = [one for one in names if not there[one]]
        what = chance.choices(["grow", "fork", "release"], [5, 2, 1])[0]
        if what == "fork" and others and there[name]:
            script.append(("fork", name, chance.choice(others)))
            there[script[-1][2]] = True
        else:
            script.append(
                ("release" if what == "release" else "grow", name, chance.choice([0, 1, 1, 1, 2, 3, 4, 5, 9]))
            )
            there[name] = what != "release"
    return [*script, *(("release", name, 0) for name in names)]


SCRIPTS["random"] = drawn_script(), 17


def truth(script, blocks):
    """{"free": free blocks after each operation, "words": what each did, "wrong": tokens that are not what was written}."""
    ledger, number, free, words = Ledger(blocks), 0, [], []
    for what, name, more in script:
        if what == "grow":
            fits = ledger.grow(name, list(range(number, number + more)))
            words.append("done" if fits else "MemoryError")
        else:
            getattr(ledger, what)(*(name, more)[: 1 + (what == "fork")])
            words.append("done")
        number += 40
        free.append(float(ledger.free))
    return {"free": free, "words": words, "wrong": [0.0] * len(script)}


def follow(make, script, blocks):
    """The same, of the answer's pool. Each number is written, with a sign for values and a place for the layer."""
    pool, tables, lists = make(blocks, SIZE, LAYERS), {}, {}
    found = {"free": [], "words": [], "wrong": [], "left": []}
    for at, (what, name, more) in enumerate(script):
        table, tokens = tables.setdefault(name, []), lists.setdefault(name, [])
        word = "done"
        if what == "grow":
            due, before = [40.0 * at + k for k in range(more)], list(table)
            word = tried(pool.extend, table, len(tokens), more)
            word = word.split(":")[0] if isinstance(word, str) else "done"
            if word == "done":
                tried(put, pool, table, len(tokens), due)
                tokens += due
            elif table != before:
                word += " with a changed table"
        elif what == "fork":
            tables[more], lists[more] = pool.fork(table), list(tokens)
        else:
            pool.release(table)
            found["left"].append(len(table))
            tables[name], lists[name] = [], []
        found["words"].append(word)
        found["free"].append(float(len(pool.free)))
        found["wrong"].append(float(sum(others(pool, tables[one], lists[one]) for one in tables)))
    return found


def put(pool, table, first, numbers):
    for place, number in enumerate(numbers, first):
        block, at = table[place // SIZE], place % SIZE
        pool.keys[:, block, at, 0, 0] = number + SIGNS
        pool.values[:, block, at, 0, 0] = -number - SIGNS


def others(pool, table, numbers):
    """How many tokens of a sequence are not as they were written, in some layer, as key or value."""
    if len(table) * SIZE < len(numbers):
        return len(numbers)
    if not numbers:
        return 0
    keys, values = ((sign * each.detach().numpy()[..., 0, 0][:, table]).reshape(LAYERS, -1)[:, : len(numbers)]
                    for sign, each in ((1, pool.keys), (-1, pool.values)))  # fmt: skip
    due = np.array(numbers) + SIGNS[:, None].numpy()
    return int(((keys != due) | (values != due)).any(0).sum())


def drawn(*shape):
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64)


def given(heads, groups, d, lengths, size, scale=1.0, spare=8):
    """(q, keys, values, tables, lengths), blocks in no order; what belongs to nobody is large."""
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=DRAWN)
    keys, values = (30 * drawn(len(order), size, groups, d) for _ in range(2))
    tables, begin = torch.zeros(len(lengths), max(counts), dtype=torch.int64), 0
    for row, (count, length) in enumerate(zip(counts, lengths)):
        tables[row, :count] = order[begin : begin + count]
        begin += count
        for place in range(length):
            where = tables[row, place // size], place % size
            keys[where], values[where] = drawn(groups, d), drawn(groups, d)
    return scale * drawn(len(lengths), heads, d), keys, values, tables, torch.tensor(lengths)


def attention(q, keys, values, tables, lengths):
    """Sequence by sequence and head by head."""
    rows, size = [], keys.shape[1]
    for one, table, length in zip(q, tables.tolist(), lengths.tolist()):
        k, v = (torch.stack([each[table[p // size], p % size] for p in range(length)]) for each in (keys, values))
        heads = [place * k.shape[1] // len(one) for place in range(len(one))]
        rows.append(torch.stack([(k[:, g] @ h / len(h) ** 0.5).softmax(0) @ v[:, g] for h, g in zip(one, heads)]))
    return torch.stack(rows)


FIRST = given(4, 2, 6, (9, 4, 1), 4)
OTHERS = {"one head of keys for all": given(6, 1, 4, (5, 7), 3), "a head of keys each": given(3, 3, 4, (2, 8), 8),
          "blocks of one token": given(2, 1, 2, (3, 1, 4), 1), "one sequence": given(4, 2, 2, (1,), 16),
          "large scores": given(2, 2, 4, (6, 5), 4, scale=1e3)}  # fmt: skip
FEW, MANY = given(2, 1, 2, (3, 2), 4), given(2, 1, 2, (9, 17, 4, 20, 3, 11), 4)


def copies(of):
    return [one.clone() for one in of]


def operators(paged_attention, of):
    with Operations() as operations:
        paged_attention(*copies(of))
    return operations.total


def table_in_words(make):
    pool, table = make(12, SIZE, LAYERS), []
    pool.extend(table, 0, 9)
    kinds = sorted({type(one).__name__ for one in table})
    fork = pool.fork(table)
    word = "of its own" if fork is not table else "the same list"
    return {
        "table": [len(table), len(set(table)), *kinds],
        "fork": None if fork is None else [type(fork).__name__, fork == table, word],
    }


def copied(make):
    """What a fork of 9 tokens is after one more: a block in it twice, or which of the first three it still shares."""
    pool, table = make(12, SIZE, LAYERS), []
    pool.extend(table, 0, 9)
    fork = pool.fork(table)
    before = pool.keys.data_ptr(), pool.values.data_ptr()
    pool.extend(fork, 9, 1)
    if before != (pool.keys.data_ptr(), pool.values.data_ptr()):
        return "all copied"
    if fork == table and len(pool.free) == 9:
        return "no copy"
    return "twice" if len(fork) > len(set(fork)) else [a == b for a, b in zip(fork, table)]


def observe(make, paged_attention):
    yield table_in_words(make)
    yield {"copied": copied(make)}
    for name, (script, blocks) in SCRIPTS.items():
        yield {f"{name} {key}": value for key, value in follow(make, script, blocks).items()}
    args = copies(FIRST)
    out = paged_attention(*args)
    yield {"form": form(out), "out": out, "kept": all(map(same, args, FIRST))}
    yield {"others": [paged_attention(*copies(one)) for one in OTHERS.values()]}
    yield {
        "float32": form(paged_attention(*(one.float() if one.is_floating_point() else one for one in copies(FIRST))))
    }
    yield {"more": operators(paged_attention, MANY) - operators(paged_attention, FEW)}
    yield {"device": on_gpu(paged_attention, *copies(FIRST))}


def first(seen, due):
    return next(k for k, (one, other) in enumerate(zip(seen, due)) if one != other)


def step(script, what="{}"):
    """Fields: the first operation after which something is not as it is due."""

    def fields(seen, due):
        at = first(seen, due)
        told = [f"{name} → {more}" if what == "fork" else f"release {name}" if what == "release" else f"{name} + {more}"
                for what, name, more in script[max(0, at - 5) : at + 1]]  # fmt: skip
        where = f"after operation {at + 1}: …, " + ", ".join(told)
        return {"where": where, "expected": what.format(f"{due[at]:g}" if isinstance(due[at], float) else due[at]),
                "got": what.format(f"{seen[at]:g}" if isinstance(seen[at], float) else seen[at])}  # fmt: skip

    return fields


def counted(script):
    """Fields: as `step`, and what the operation should have done to the free blocks."""
    told = {
        "grow": "extend takes one block for each block that is missing at the end and one for each copy that is needed, and no others",
        "fork": "fork takes no block",
        "release": "a block becomes free when its last holder releases it, and not before",
    }
    blocks = step(script, "{} blocks free")
    return lambda seen, due: blocks(seen, due) | {"told": told[script[first(seen, due)][0]]}


def refused(seen, due):
    """The hint of words that are not due."""
    one, other = seen[first(seen, due)], due[first(seen, due)]
    if one == "done":
        return "no-error"
    if other == "done":
        return "too-early" if one.startswith("MemoryError") else "wrong-error"
    return "half-done" if "changed" in one else "wrong-error"


LOOKS = [
    Look("9 tokens in blocks of 4: the table has three numbers", "table", [3, 3, "int"], "table-form"),
    Look("a fork is a separate list", "fork", ["list", True, "of its own"], "fork-form"),
    Look(
        "a block that will be written into is replaced by a copy",
        "copied",
        [True, True, False],
        lambda seen, due: {"no copy": "no-copy", "all copied": "pool-copied"}.get(str(seen), "not-last"),
        fields=silent,
    ),
]
CLAIMS = {
    "alone": "one sequence that grows",
    "full": "until no block is free",
    "shared": "two and more sequences that share blocks",
    "released": "released and taken again",
    "random": f"{len(SCRIPTS['random'][0])} operations drawn at random",
}
for name, (script, blocks) in SCRIPTS.items():
    due = truth(script, blocks)
    LOOKS += [
        Look(CLAIMS[name], f"{name} words", due["words"], refused, fields=step(script)),
        Look("released tables are empty", f"{name} left", None, "not-cleared", holds=nothing,
             fields=silent),
        Value("the right number of blocks is free", f"{name} free", due["free"], "wrong-free", fields=counted(script)),
        Value("every token is as it was written", f"{name} wrong", due["wrong"], "wrong-tokens", fields=step(script, "{} tokens wrong")),
    ]  # fmt: skip
LOOKS += [
    Look("attention: a vector for each head of each query", "form", form(attention(*FIRST)), "attention-form"),
    Look("the inputs are not changed", "kept", True, "inputs-changed"),
    Value("equal to attention over contiguous keys and values", "out", attention(*FIRST), "wrong-attention"),
    Value("other sizes", "others", [attention(*one) for one in OTHERS.values()], "wrong-attention"),
    Look("float32 stays float32", "float32", form(attention(*FIRST).float()), "attention-form"),
    Look("as many operators for six sequences as for two", "more", 0, "operators-grow", holds=at_most,
         fields="n"),
    STAYS,
]  # fmt: skip


def balise_3(make, paged_attention):
    yield from judged(LOOKS, observe, make, paged_attention)
