"""Answers to balise 9 of 18_long_sequences_and_experts: a window of attention."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 9, whole=True)

# from the first block of the window on, and the sinks' blocks before it; whole if the corners of the block are seen
BY_RANGES = """
def window_blocks(length, block, window, sinks=0, device=None):
    def sees(q, k):
        return q >= k and (q - k < window or k < sinks)

    places = torch.arange(length, device=device)
    found = []
    for first in range(0, length, block):
        stop = min(first + block, length)
        near = max(0, first - window + 1) // block * block
        starts = sorted({*range(0, min(sinks, stop), block), *range(near, stop, block)})
        seen = []
        for c in starts:
            end = min(c + block, length)
            rest = max(c, min(sinks, end))  # the first key that is no sink
            if sees(first, end - 1) and (rest == end or sees(stop - 1, rest)):
                seen.append((slice(c, end), None))
                continue
            q, k = places[first:stop, None], places[None, c:end]
            late, old = k > q, q - k >= window
            seen.append((slice(c, end), ~late & (~old | (k < sinks))))
        found.append((slice(first, stop), seen))
    return found
"""
bank.text(None, BY_RANGES)

# the masks come from torch's own triangles
BY_TRIANGLES = """
def window_blocks(length, block, window, sinks=0, device=None):
    starts = range(0, length, block)
    for first in starts:
        rows = slice(first, min(first + block, length))
        n, seen = rows.stop - first, []
        for c in starts:
            end = min(c + block, length)
            if c > first or (end - 1 <= first - window and sinks <= c):
                continue
            ones = torch.ones(n, end - c, dtype=torch.bool, device=device)
            visible = ones.tril(first - c).triu(first - c - window + 1)
            if sinks > c:
                visible[:, : sinks - c] = ones.tril(first - c)[:, : sinks - c]
            inside = max(end - max(c, sinks), 0)
            all_seen = end - 1 <= first and (inside == 0 or rows.stop - 1 - max(c, sinks) < window)
            seen.append((slice(c, end), None if all_seen else visible))
        yield rows, seen
"""
bank.text(None, BY_TRIANGLES)
bank.slip(None, ("queries - keys < window", "keys > queries - window"))

SKIP = "            if first - last >= window and c >= sinks:\n                continue\n"
VISIBLE = "(queries >= keys) & ((queries - keys < window) | (keys < sinks))"
WHOLE = "last <= first and (oldest > last or rows.stop - 1 - oldest < window)"

bank.hint("sees-later", "{where}: a query sees later tokens. Nothing after itself is visible, no sink either: "
                           "query >= key.")  # fmt: skip
bank.slip("sees-later", (VISIBLE, "(queries - keys < window) | (keys < sinks)"))
bank.slip("sees-later", (VISIBLE, "(queries >= keys) & (queries - keys < window) | (keys < sinks)"))
bank.slip("sees-later", ("last <= first and (oldest", "(oldest"))
bank.variant("sees-later", BY_TRIANGLES, ("ones.tril(first - c)[:, : sinks - c]", "True"))
bank.variant("sees-later", BY_RANGES, ("~late & (~old | (k < sinks))", "~old | (k < sinks)"))

bank.hint("sees-older", "{where}: a query sees tokens before its window: {n} pairs. The window holds `window` tokens, the "
                           "query itself included, so query − key < window.")  # fmt: skip
bank.slip("sees-older", ("queries - keys < window", "queries - keys <= window"))
bank.slip("sees-older", ("(queries - keys < window) | (keys < sinks)", "(queries - keys < window) | (keys <= sinks)"))
bank.slip("sees-older", ("rows.stop - 1 - oldest < window", "first - oldest < window"))
bank.slip("sees-older", (VISIBLE, "queries >= keys"))
bank.variant("sees-older", BY_TRIANGLES, ("triu(first - c - window + 1)", "triu(first - c - window)"))
bank.variant("sees-older", BY_RANGES, ("sees(stop - 1, rest)", "sees(first, rest)"))

bank.hint("misses", "{where}: {n} pairs of the window are hidden. Two blocks are as far apart as their *nearest* tokens: "
                       "the first query and the last key. Together the rows cover all queries, in order.")  # fmt: skip
bank.slip("misses", ("first - last >= window", "first - c >= window"))
bank.slip("misses", ("first - last >= window", "rows.stop - 1 - last >= window"))
bank.slip("misses", ("queries - keys < window", "queries - keys < window - 1"))
bank.slip("misses", ("queries >= keys", "queries > keys"))
bank.variant("misses", BY_RANGES, ("max(0, first - window + 1)", "max(0, first + 2 - window)"))
bank.variant("misses", BY_TRIANGLES, ("end - 1 <= first - window", "c <= first - window"))

bank.hint("misses-sinks", "{where}: {n} pairs of a query and a sink are hidden. The first tokens are visible to all later "
                             "ones, so their blocks are not left out.")  # fmt: skip
bank.slip("misses-sinks", (" and c >= sinks:", ":"))
bank.slip("misses-sinks", (VISIBLE, "(queries >= keys) & (queries - keys < window)"))
bank.slip("misses-sinks", ("c >= sinks", "last >= sinks"))
bank.variant("misses-sinks", BY_RANGES, ("*range(0, min(sinks, stop), block), ", ""))
bank.variant("misses-sinks", BY_TRIANGLES, (" and sinks <= c", ""))

bank.hint(
    "seen-twice",
    "{where}: a query gets a key in two blocks, {n} pairs. It would count twice in the softmax.",
    edge=True,
)
bank.slip("seen-twice", ("range(0, rows.stop, block)", "range(0, rows.stop, block // 2)"))
bank.variant("seen-twice", BY_RANGES, ("starts = sorted({*range(0, min(sinks, stop), block), *range(near, stop, block)})", "starts = [*range(0, min(sinks, stop), block), *range(near, stop, block)]"))  # fmt: skip

bank.hint("empty-blocks", "{where}: you list {got} blocks, and {expected} have something to see. Leave out a block as soon as its "
                             "nearest tokens are too far apart: this is what makes a window cheap.")  # fmt: skip
bank.slip("empty-blocks", (SKIP, ""))
bank.slip("empty-blocks", ("first - last >= window", "first - last > window"))
bank.slip("empty-blocks", ("and c >= sinks", "and c > sinks"))
bank.variant("empty-blocks", BY_RANGES, ("max(0, first - window + 1)", "max(0, first - window)"))
bank.variant("empty-blocks", BY_TRIANGLES, ("end - 1 <= first - window", "end <= first - window"))

bank.hint("masks-whole", "{where}: {got} blocks have no mask, and {expected} are seen whole. For those, yield None: a mask of "
                            "ones costs a pass over all scores. Window and sinks may cover a block together.", edge=True)  # fmt: skip
bank.slip("masks-whole", ("None if whole else visible", "visible"))
bank.slip("masks-whole", (WHOLE, "last <= first and rows.stop - 1 - c < window"))
bank.slip("masks-whole", (WHOLE, "last <= first and (last < sinks or rows.stop - 1 - c < window)"))
bank.variant("masks-whole", BY_RANGES, ("rest == end or", "False or"))
bank.variant(
    "masks-whole", BY_TRIANGLES, ("inside == 0 or rows.stop - 1 - max(c, sinks)", "inside == 0 or rows.stop - 1 - c")
)

bank.hint("quadratic", "For 4,096 tokens and a window of 65 you make {got} numbers: masks of blocks that you then leave out. "
                          "Compare the blocks' ends, which are plain numbers, first.")  # fmt: skip
bank.slip("quadratic", (SKIP, ""), ("            oldest = max", "            if not visible.any():\n                continue\n            oldest = max"))  # fmt: skip
bank.variant("quadratic", BY_TRIANGLES, ("            if c > first or", "            q, k = torch.arange(first, rows.stop)[:, None], torch.arange(c, end)\n            hidden = ((q - k >= window) & (k >= sinks)).all()\n            if c > first or hidden or"))  # fmt: skip

bank.hint("waits", "On a GPU this makes the CPU wait: {error}. Whether a block is seen follows from its ends, which are "
                      "plain numbers: no need to read a mask.", edge=True)  # fmt: skip
bank.slip("waits", (WHOLE, "bool(visible.all())"))
bank.variant("waits", BY_TRIANGLES, ("None if all_seen else visible", "None if visible.all() else visible"))

bank.hint(
    "other-device",
    "A mask is on the CPU, although `device` is a GPU: {error}. Make each tensor with `device=device`.",
    edge=True,
)
bank.slip("other-device", ("torch.arange(first, rows.stop, device=device)", "torch.arange(first, rows.stop)"), ("torch.arange(c, last + 1, device=device)", "torch.arange(c, last + 1)"))  # fmt: skip
bank.variant("other-device", BY_RANGES, ("torch.arange(length, device=device)", "torch.arange(length)"))
