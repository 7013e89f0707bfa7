"""Balise 6: beam search, beside one on lists of tokens that keeps nothing, with a model that reads its history from the blocks."""

from collections import Counter
from itertools import pairwise

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, shape, within
from dlojz_tp.judging.checking.verdicts import Wrong

DRAWN = torch.Generator().manual_seed(36)


class Shelf:
    """A pool of blocks that are lists of tokens."""

    def __init__(self, blocks, size):
        self.size, self.held, self.content = size, Counter(), [[None] * size for _ in range(blocks)]
        self.forked_free = False  # whether a fork named a block that nobody held

    @property
    def keys(self):
        raise Wrong("looked-into")

    values = holders = keys

    @property
    def used(self):
        return len(+self.held)

    @property
    def free(self):
        return [block for block in range(len(self.content)) if self.held[block] < 1]

    def extend(self, table, length, n):
        copied = bool(n > 0 and length % self.size > 0 and table and self.held[table[-1]] > 1)
        if copied:
            old = table.pop()
            self.held[old] -= 1
        for _ in range(-(-(length + n) // self.size) - len(table)):
            block = self.free[0]
            table.append(block)
            self.held[block], self.content[block] = 1, [None] * self.size
        if copied:
            self.content[table[length // self.size]] = list(self.content[old])

    def fork(self, table):
        self.forked_free |= any(self.held[block] < 1 for block in table)
        self.held.update(table)
        return list(table)

    def release(self, table):
        self.held.subtract(table)
        table.clear()

    def write(self, tables, lengths, tokens):
        """Put a token behind each table. What stands in the way, in words."""
        trouble, written = [], Counter()
        for table, place, token in zip(tables, lengths, tokens):
            if place // self.size >= len(table):
                trouble.append("no room")
                continue
            block = table[place // self.size]
            written[block] += 1
            trouble += ["shared"] * (self.held[block] > 1 or written[block] > 1)
            self.content[block][place % self.size] = token
        return trouble

    def tokens(self, table, length):
        return [token for block in table for token in self.content[block]][:length]


EMBEDDING = torch.randn(11, 8, generator=DRAWN, dtype=torch.float64)
HEAD = 2.5 * torch.randn(8, 11, generator=DRAWN, dtype=torch.float64)  # logits do not add up to anything in particular
UNSURE = 0.15 * torch.randn(8, 300, generator=DRAWN)  # float32: 28 tokens of about 1/100 have a probability of 0


def logits_of(tokens, head):
    """(vocabulary,) after these tokens, in the dtype of `head`: all of them matter, and where they stand."""
    state = torch.zeros(8, dtype=torch.float64)
    for token in tokens:
        state = torch.sin(state.roll(1) * 1.3 + (0 if token is None else EMBEDDING[token % 11]))
    return (state @ head.double() + state.sum()).to(head.dtype)


# prompt, width, count, tokens in a block, the model's head
CASES = {
    "three beams, six tokens": ([3, 1, 4, 1, 5, 9], 3, 6, 4),
    "a prompt that fills its blocks": ([2, 7, 1, 8, 2, 8, 1, 8], 4, 7, 4),
    "a short prompt": ([10], 2, 5, 8),
    "one beam": ([6, 6, 6], 1, 6, 2),
    "one token": ([1, 2, 3, 4, 5], 4, 1, 4),
    "blocks of one token": ([5, 0, 5], 5, 8, 1),
    "as many beams as tokens": ([9, 2], 11, 5, 3),
    "twenty tokens": ([0, 1, 1, 2, 3, 5, 8], 4, 20, 4),
    "28 unlikely tokens": ([4, 2], 2, 28, 8, UNSURE),
}


def searched(prompt, width, count, size, head=HEAD):
    """(texts, scores, blocks needed in each step): all candidates as lists, sorted; a block is what its tokens and all before them are."""
    rows, needed = [([], 0.0)], []
    for k in range(count):
        if k:
            every = [prompt + text for text, _ in rows]
            needed.append(len({tuple(text[: (j + 1) * size]) for text in every for j in range(-(-len(text) // size))}))
        found = []
        for text, score in rows:
            logs = logits_of(prompt + text, head).double().log_softmax(0).tolist()
            found += [([*text, token], score + log) for token, log in enumerate(logs)]
        rows = sorted(found, key=lambda row: -row[1])
        assert min(a - b for (_, a), (_, b) in pairwise(rows[: width + 1])) > 1e-3, "the best must be clear"
        rows = rows[:width]
    return [text for text, _ in rows], torch.tensor([score for _, score in rows], dtype=torch.float64), needed


def search(beam_search, prompt, width, count, size, head=HEAD):
    """What an answer does on a shelf that has room for more than enough."""
    shelf, table = Shelf(400, size), []
    shelf.extend(table, 0, len(prompt))
    for place, token in enumerate(prompt):
        shelf.write([table], [place], [token])
    used, trouble, rows = [], [], []

    def step(tables, lengths, tokens):
        trouble.extend(shelf.write(tables, lengths, tokens.tolist()))
        used.append(shelf.used)
        rows.append([len(tables), len(lengths), *tokens.shape])
        return torch.stack([logits_of(shelf.tokens(each, place + 1), head) for each, place in zip(tables, lengths)])

    got = beam_search(shelf, table, len(prompt), logits_of(prompt, head), width, count, step)
    return got, {
        "used": used,
        "trouble": sorted(set(trouble)),
        "freed": shelf.forked_free,
        "rows": rows,
        "left": shelf.used,
    }


def observe(beam_search):
    for name, case in CASES.items():
        got, found = search(beam_search, *case)
        forms = [form(got[0]), shape(got[1])] if isinstance(got, tuple | list) and len(got) == 2 else form(got)
        yield {f"{name} {key}": value for key, value in found.items()} | {f"{name} form": forms}
        order = in_order(got[0].tolist(), DUE[name][0])
        yield {
            f"{name} texts": got[0][order].double(),
            f"{name} scores": got[1][order].double(),
            f"{name} finite": bool(got[1].isfinite().all()),
        }


def in_order(texts, due):
    """Where each row stands, in the order of `due` if they are the same rows: which comes first is not asked."""
    return [texts.index(row) for row in due] if sorted(texts) == sorted(due) else list(range(len(texts)))


def says(seen, due):
    """The hint of what stood in the way of a token."""
    return "not-extended" if "no room" in seen else "written-into"


def step_hint(seen, due):
    """The hint of calls of the model: each beam alone, too many or too few, or other rows."""
    alone = due and due[0][0] > 1 and all(tables == 1 for tables, *_ in seen)
    return "steps" if len(seen) != len(due) and not alone else "step-rows"


def blocks(name):
    def fields(seen, due):
        at = next((k for k, (one, other) in enumerate(zip(seen, due)) if one != other), 0)
        return {"where": f"{name}, step {at + 1}", "expected": f"{due[at]} blocks", "got": f"{seen[at]} blocks"}

    return fields


DUE = {name: searched(*case) for name, case in CASES.items()}
LOOKS = []
for name, case in CASES.items():
    _, width, count, *_ = case
    texts, scores, needed = DUE[name]
    here = lambda seen, due, name=name: {"where": name}  # noqa: E731
    LOOKS += [
        Look(name, f"{name} form", [f"int64 ({width}, {count})", (width,)], "result-form", fields=here),
        Look("a table, a length and a token for each beam", f"{name} rows", [[width] * 3] * (count - 1),
             step_hint,
             fields=lambda seen, due, name=name: {"where": name, "expected": f"{len(due)} steps", "got": f"{len(seen)} steps"}),
        Look("each token has room, in a block that only its beam holds", f"{name} trouble", [], says,
             fields={"where": name, "expected": "", "got": ""}),
        Look("no table is forked after its blocks were freed", f"{name} freed", False, "released-first"),
        Look("all scores are finite", f"{name} finite", True, "underflow", fields=here),
        Value("the best continuations", f"{name} texts", torch.tensor(texts).double(), "wrong-beams", fields=here),
        Value("their scores", f"{name} scores", scores, "wrong-scores", holds=within(1e-5), fields=here),
        Look("no more blocks than needed in any step", f"{name} used", needed, "too-many-blocks", fields=blocks(name)),
        Look("no block is held at the end", f"{name} left", 0, "kept-at-end", fields="n"),
    ]  # fmt: skip


def balise_6(beam_search):
    yield from judged(LOOKS, observe, beam_search)
