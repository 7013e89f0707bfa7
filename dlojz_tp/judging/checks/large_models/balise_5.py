"""Balise 5: the peak when some blocks are recomputed, and which to recompute so that it stays below a budget."""

import itertools
import operator
import random
from collections import namedtuple

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, tried
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.launch.alarm import Overdue, deadline

Block = namedtuple("Block", "kept input work operations")
DRAWN = random.Random(12)
SECONDS = 3  # of processor time, for what takes milliseconds


def _block():
    """Of even numbers of bytes: an odd budget is no peak itself."""
    at_input = 2 * DRAWN.randint(2, 12)
    kept = at_input + 2 * DRAWN.randint(3, 40)
    return Block(kept, at_input, kept + 2 * DRAWN.randint(0, 25), DRAWN.randint(2, 40))


NETS = [[_block() for _ in range(9)] for _ in range(6)]
# as in a real model, most blocks of a stage are alike; the bytes are those of a real one
STAGES = [(2, Block(90, 30, 140, 11)), (4, Block(61, 12, 83, 21)), (34, Block(27, 5, 30, 24)), (8, Block(9, 2, 11, 17))]
LARGE = [Block(*(size * 1_000_003 for size in block)) for count, block in STAGES for _ in range(count)]
LARGE_BUDGET = 700 * 1_000_003
# blocks: the least operations, of an integer program, solved by HiGHS; backwards, the cheapest ways do not last to the end
LARGE_LEAST = [(LARGE, 555 * 1_000_003), (LARGE[::-1], 664 * 1_000_003)]


def peak(blocks, choice):
    """The highest of: what all earlier blocks hold, and the block at work."""
    held = [b.input if again else b.kept for b, again in zip(blocks, choice)]
    return max(sum(held[:i]) + b.work for i, b in enumerate(blocks))


def extra(blocks, choice):
    """Operations that are done a second time."""
    return sum(b.operations for b, again in zip(blocks, choice) if again)


EVERY = list(itertools.product((False, True), repeat=len(NETS[0])))
PEAKS = [{choice: peak(blocks, choice) for choice in EVERY} for blocks in NETS]


def least(net, budget):
    """Extra operations of the best choice, found by trying all 512; None if nothing fits."""
    return min((extra(NETS[net], choice) for choice, top in PEAKS[net].items() if top <= budget), default=None)


def _budget(tops, share):
    """From the lowest peak (0) to that without recomputation (1), odd."""
    low = min(tops.values())
    return int(low + share * (tops[EVERY[0]] - low)) | 1


BUDGETS = [(net, _budget(tops, k / 4)) for net, tops in enumerate(PEAKS) for k in range(5)]
TIGHT = [(net, min(tops.values())) for net, tops in enumerate(PEAKS)]
OVER = [(net, budget - 1) for net, budget in TIGHT]
TRIED = [EVERY[i] for i in (0, 511, 170, 455, 28, 256)]


def _form(blocks, choice):
    if choice is None or isinstance(choice, str | dict | set | frozenset):
        return "none" if choice is None else str(choice)[:80]
    choice = [*choice]
    if len(choice) > len(blocks):
        return f"{len(choice)} entries for {len(blocks)} blocks"
    return len(choice) if len(choice) == len(blocks) and all(one in (0, 1) for one in choice) else str(choice)[:80]


def observe(peak_bytes, choose_blocks):
    yield {"peaks": [peak_bytes([*blocks], [*choice]) for blocks in NETS[:2] for choice in TRIED]}
    chosen = [choose_blocks([*NETS[net]], budget) for net, budget in BUDGETS]
    yield {"forms": [_form(NETS[net], choice) for (net, _), choice in zip(BUDGETS, chosen)]}
    yield {"tops": [peak(NETS[net], choice) for (net, _), choice in zip(BUDGETS, chosen)]}
    yield {"costs": [extra(NETS[net], choice) for (net, _), choice in zip(BUDGETS, chosen)]}
    exact = [choose_blocks([*NETS[net]], budget) for net, budget in TIGHT]
    yield {"exact": [choice is not None and peak(NETS[net], choice) <= top for (net, top), choice in zip(TIGHT, exact)]}
    yield {"impossible": [tried(choose_blocks, [*NETS[net]], budget) for net, budget in OVER]}
    try:
        choices = []
        for blocks, _ in LARGE_LEAST:
            with deadline(SECONDS, of_processor=True):
                choices.append(choose_blocks([*blocks], LARGE_BUDGET))
    except Overdue:
        raise Wrong("too-slow", seconds=SECONDS) from None
    fit = [_form(LARGE, choice) == len(LARGE) and peak(blocks, choice) <= LARGE_BUDGET
           for choice, (blocks, _) in zip(choices, LARGE_LEAST)]  # fmt: skip
    yield {"large": [extra(LARGE_LEAST[k][0], choices[k]) if fits else "none that fits" for k, fits in enumerate(fit)]}


def _gives_up(seen, due):
    first = _first(seen, due)["first"]
    return "gives-up" if first == "none" else "one-list" if "entries for" in str(first) else "choice-form"


def _first(seen, due):
    """The first that is not as it should be, for a hint."""
    return silent(seen, due) | {"first": next(one for one, right in zip(seen, due) if one != right)}


def _below(seen, due):
    return all(one <= most for one, most in zip(seen, due))


def _first_budget(wrong, due_in_words):
    """Fields: of many budgets, the first with which it goes wrong."""

    def fields(seen, due):
        k = next(k for k, pair in enumerate(zip(seen, due)) if wrong(*pair))
        return {
            "expected": due_in_words(due[k]),
            "got": seen[k],
            "where": f"{len(NETS[0])} blocks, a budget of {BUDGETS[k][1]} bytes",
        }

    return fields


LOOKS = [
    Value("the peak of a given choice", "peaks", [p[c] for p in PEAKS[:2] for c in TRIED], "wrong-peak"),
    Look("one True or False for each block", "forms", [9] * len(BUDGETS), _gives_up, fields=_first),
    Value(
        "the peak stays within the budget",
        "tops",
        [b for _, b in BUDGETS],
        "over-budget",
        holds=_below,
        fields=_first_budget(operator.gt, "at most {}".format),
    ),
    Value(
        "with the fewest extra operations",
        "costs",
        [least(*one) for one in BUDGETS],
        "not-cheapest",
        fields=_first_budget(operator.ne, "{} operations".format),
    ),
    Look("a peak of exactly the budget fits", "exact", [True] * len(TIGHT), "budget-itself", fields=silent),
    Look("None if nothing fits", "impossible", [None] * len(OVER), "impossible", fields=_first),
    Look("48 blocks, with the bytes of a real model", "large", [due for _, due in LARGE_LEAST], "large-not-cheapest"),
]


def balise_5(peak_bytes, choose_blocks):
    yield from judged(LOOKS, observe, peak_bytes, choose_blocks)
