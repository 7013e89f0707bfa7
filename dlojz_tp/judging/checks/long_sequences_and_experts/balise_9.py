"""Balise 9: blocks of a window, against the definition for each pair of tokens; how many blocks, and how large the work."""

import torch

from dlojz_tp.judging.checking.looks import Look, at_most, judged, silent
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import stays
from dlojz_tp.measure.operations import Operations

CASES = {  # length, block, window, sinks
    "64 tokens in blocks of 8, a window of 16": (64, 8, 16, 0), "a window of 17": (64, 8, 17, 0), "a window of 18": (64, 8, 18, 0),
    "a window of 1": (40, 8, 1, 0), "a window longer than the text": (40, 8, 100, 0), "45 tokens in blocks of 8": (45, 8, 11, 0),
    "4 sinks": (64, 8, 12, 4), "8 sinks": (64, 8, 20, 8), "19 sinks": (45, 8, 5, 19), "a block longer than the text": (5, 8, 3, 1),
}  # fmt: skip
LONG, BLOCK, WINDOW = 4096, 64, 65


def truth(length, window, sinks):
    """Booleans (length, length): which query sees which key."""
    q, k = torch.arange(length)[:, None], torch.arange(length)
    return (k <= q) & ((q - k < window) | (k < sinks))


def blocks_of(pairs, block):
    """How many blocks have a pair that is seen, and how many of them are seen whole."""
    parts = [part for rows in pairs.split(block) for part in rows.split(block, 1)]
    return sum(bool(one.any()) for one in parts), sum(bool(one.all()) for one in parts)


def walk(window_blocks, case):
    """Of a case: how often each pair is seen (length, length); blocks; blocks without a mask; queries in order."""
    length, block, window, sinks = case
    times, count, whole, order = torch.zeros(length, length, dtype=torch.long), 0, 0, []
    for rows, seen in window_blocks(length, block, window, sinks):
        order += range(*rows.indices(length))
        for columns, visible in seen:
            times[rows, columns] += 1 if visible is None else visible.long()
            count, whole = count + 1, whole + (visible is None)
    return times, count, whole, order == list(range(length))


def wrong_pairs(window_blocks):
    """Of each case, how many pairs of (query, key): later keys seen; too old ones; hidden though in the window; sinks; twice."""
    found, counts = {}, {}
    for name, case in CASES.items():
        length, _, window, sinks = case
        times, count, whole, ordered = walk(window_blocks, case)
        q, k = torch.arange(length)[:, None], torch.arange(length)
        due, near = truth(length, window, sinks), (k <= q) & (q - k < window)
        kinds = [
            (times > 0) & (k > q),
            (times > 0) & ~due & (k <= q),
            (times == 0) & near,
            (times == 0) & due & ~near,
            times > 1,
        ]
        found[name] = [int(one.sum()) for one in kinds] + [int(not ordered)]
        counts[name] = [count, whole]
    return found, counts


def observe(window_blocks):
    """What is seen, in how many blocks; numbers made for a long text; on a GPU."""
    found, counts = wrong_pairs(window_blocks)
    yield {"pairs": found}
    yield {
        "blocks": {name: one[0] for name, one in counts.items()},
        "whole": {name: one[1] for name, one in counts.items()},
    }
    with Operations() as operations:
        list(window_blocks(LONG, BLOCK, WINDOW))
    yield {"made": sum(out[1] for *_, out in operations.log if out)}
    yield {
        "device": on_gpu(
            lambda x: [m for _, seen in window_blocks(24, 8, 10, 3, x.device) for _, m in seen], torch.zeros(1)
        )
    }


KINDS = "sees-later", "sees-older", "misses", "misses-sinks", "seen-twice", "misses"
NOTHING = {name: [0] * len(KINDS) for name in CASES}
DUE = {name: blocks_of(truth(length, window, sinks), block) for name, (length, block, window, sinks) in CASES.items()}
ALL = 16 * BLOCK * BLOCK * 2 * (LONG // BLOCK)  # numbers: sixteen for each pair in a block of which something is seen


def first_wrong(seen, due):
    return next(name for name in due if seen[name] != due[name])


def kind_of(seen, due):
    """The hint of the first case that is wrong."""
    found = seen[first_wrong(seen, due)]
    return KINDS[next(k for k, n in enumerate(found) if n)]


def of_case(seen, due):
    name = first_wrong(seen, due)
    return {"where": name, "n": max(seen[name]) if isinstance(seen[name], list) else seen[name]}


LOOKS = [
    Look("which query sees which key: " + ", ".join(CASES), "pairs", NOTHING, kind_of, fields=lambda seen, due: of_case(seen, due) | silent(seen, due)),
    Look("blocks that are listed", "blocks", {name: one[0] for name, one in DUE.items()}, "empty-blocks",
         fields=lambda seen, due: of_case(seen, due) | {"expected": due[first_wrong(seen, due)], "got": seen[first_wrong(seen, due)]}),
    Look("of these, blocks without a mask", "whole", {name: one[1] for name, one in DUE.items()}, "masks-whole",
         fields=lambda seen, due: of_case(seen, due) | {"expected": due[first_wrong(seen, due)], "got": seen[first_wrong(seen, due)]}),
    Look("numbers made for 4,096 tokens and a window of 65", "made", ALL, "quadratic", holds=at_most),
    stays("on a GPU: masks are there, and nothing waits for it"),
]  # fmt: skip


def balise_9(window_blocks):
    yield from judged(LOOKS, observe, window_blocks)
