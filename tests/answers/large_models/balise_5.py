"""Answers to balise 5 of 12_large_models: which blocks to recompute under a budget."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 5, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# an integer program: held before i is the sum of what is kept, less what recomputing saves
PROGRAM = """
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def peak_bytes(blocks, recomputed):
    kept, inputs, work, _ = np.array(blocks).T
    again = np.array(recomputed, dtype=bool)
    held = np.where(again, inputs, kept)
    before = np.cumsum(held) - held
    return int((before + work).max())


def choose_blocks(blocks, budget):
    kept, inputs, work, operations = np.array(blocks, dtype=float).T
    n = len(blocks)
    saved = kept - inputs
    before = np.cumsum(kept) - kept
    room = budget - before - work
    found = milp(
        operations / operations.max(),
        constraints=LinearConstraint(-np.tril(np.ones((n, n)), -1) * saved / kept.max(), -np.inf, room / kept.max() + 1e-9),
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    return None if found.x is None else [bool(x > 0.5) for x in found.x]
"""
bank.text(None, PROGRAM)

# from the last block to the first, with a memory of what has been solved
RECURSION = """
import functools


def peak_bytes(blocks, recomputed):
    peak = 0
    for block, again in reversed([*zip(blocks, recomputed)]):
        peak = max(block.work, peak + (block.input if again else block.kept))
    return peak


def choose_blocks(blocks, budget):
    @functools.cache
    def solve(i, held):
        if i == len(blocks):
            return 0, ()
        b = blocks[i]
        if held + b.work > budget:
            return None
        options = []
        for again in (False, True):
            rest = solve(i + 1, held + (b.input if again else b.kept))
            if rest is not None:
                options.append((rest[0] + again * b.operations, (again, *rest[1])))
        return min(options, default=None)

    best = solve(0, 0)
    return None if best is None else list(best[1])
"""
bank.text(None, RECURSION)

# a front: only ways that no other beats in both, bytes and operations
FRONT = """
def peak_bytes(blocks, recomputed):
    held, sums = 0, []
    for (kept, inp, work, _), again in zip(blocks, recomputed):
        sums += [held + work]
        held = held + (inp if again else kept)
    return max(sums)


def choose_blocks(blocks, budget):
    front = [(0, 0, ())]
    for kept, inp, work, operations in blocks:
        ways = [w for w in front if w[0] + work <= budget]
        ways = [(h + kept, c, (*r, 0)) for h, c, r in ways] + [(h + inp, c + operations, (*r, 1)) for h, c, r in ways]
        front = []
        for way in sorted(ways):
            if not front or way[1] < front[-1][1]:
                front.append(way)
    return front[-1][2] if front else None
"""
bank.text(None, FRONT)

WORK = "        peak = max(peak, held + block.work)\n"
HELD = "        held += block.input if again else block.kept\n"
FRONT_WORK = "        sums += [held + work]\n"
FRONT_HELD = "        held = held + (inp if again else kept)\n"

slip("nothing-returned", ("    return peak\n", ""))

hint("wrong-peak", "That is not the peak. For each block, add its work to what the blocks before it hold (what "
                      "they keep, or only their input if they are recomputed). The peak is the largest of these "
                      "sums.")  # fmt: skip
slip("wrong-peak", (WORK, "        peak = max(peak, block.work)\n"))
variant("wrong-peak", FRONT, ("max(sums)", "sums[-1]"))

hint("live-block-forgotten", "That is what all blocks hold at the end of the forward pass. But a block at work "
                                "needs more: while it is recomputed, all its activations are in memory again, "
                                "beside what the blocks before it hold.")  # fmt: skip
slip("live-block-forgotten", (WORK, ""), (HELD, HELD + "        peak = held\n"))
variant("live-block-forgotten", FRONT, ("max(sums)", "held"))

hint("later-blocks-counted", "While a block is at work, the blocks after it hold nothing: the forward pass has "
                                "not reached them yet, or the backward pass has freed them. Count only the blocks "
                                "before it.")  # fmt: skip
slip(
    "later-blocks-counted",
    (WORK, "        peak = max(peak, block.work)\n"),
    ("    return peak\n", "    return held + peak\n"),
)
variant("later-blocks-counted", FRONT, (FRONT_WORK, "        sums += [work]\n"), ("max(sums)", "held + max(sums)"))

hint("own-bytes-twice", "The block at work is counted twice: its work already includes what it keeps, and its "
                           "input. What a block holds counts only for the blocks after it.")  # fmt: skip
slip("own-bytes-twice", (WORK + HELD, HELD + WORK))
slip("own-bytes-twice", (WORK, "        peak = max(peak, held + block.work + again * block.kept)\n"))
slip("own-bytes-twice", (WORK, "        peak = max(peak, held + block.work + again * block.input)\n"))
variant("own-bytes-twice", FRONT, (FRONT_WORK + FRONT_HELD, FRONT_HELD + FRONT_WORK))

hint(
    "input-not-held",
    "A block that is recomputed holds its input until then: without it, there would be nothing to recompute from.",
)
slip("input-not-held", (HELD, "        held += 0 if again else block.kept\n"))
variant("input-not-held", FRONT, ("(inp if again else kept)", "(not again) * kept"))

hint("peak-inverted", "True and False are swapped: a block with True is recomputed, and holds only its input.")
slip("peak-inverted", (HELD, "        held += block.kept if again else block.input\n"))
variant("peak-inverted", FRONT, ("(inp if again else kept)", "(kept if again else inp)"))

hint("from-the-end", "You go through the blocks from last to first. In the backward pass too, it is the blocks "
                        "*before* a block, in forward order, that still hold their bytes.")  # fmt: skip
slip("from-the-end", ("zip(blocks, recomputed)", "zip(blocks[::-1], recomputed[::-1])"))
variant("from-the-end", FRONT, ("zip(blocks, recomputed)", "reversed([*zip(blocks, recomputed)])"))

hint("work-of-some", "Every block needs its work while it is computed, recomputed or not.")
slip("work-of-some", (WORK, "        peak = max(peak, held + (block.work if again else block.kept))\n"))
variant("work-of-some", FRONT, (FRONT_WORK, "        sums += [held + (work if again else kept)]\n"))

hint(
    "kept-for-work",
    "For the block at work, you count only what it keeps. Its work is more: it includes gradients and temporary "
    "results.",
)
slip("kept-for-work", (WORK, "        peak = max(peak, held + block.kept)\n"))
variant("kept-for-work", FRONT, (FRONT_WORK, "        sums += [held + kept]\n"))

hint("choice-form", "choose_blocks returns a list with one True or False for each block, not {first}.")
slip("choice-form", ("return min(found.values())[1]", "return [i for i, x in enumerate(min(found.values())[1]) if x]"))
variant("choice-form", FRONT, ("return front[-1][2]", "return front[-1]"))

hint("one-list", "choose_blocks returns one True or False for each block, not {first}. Do several ways append "
                    "to the same list? Each needs its own: [*choices, again].")  # fmt: skip
slip("one-list", ("[*choices, again]", "choices.append(again) or choices"))
variant(
    "one-list",
    FRONT.replace("()", "[]"),
    ("(*r, 0)", "r.append(0) or r"),
    ("(*r, 1)", "r.append(1) or r"),
)

hint("gives-up", "You returned None for a budget that a list fits.")
slip("gives-up", ("block.work > budget", "block.work + block.input > budget"))
variant("gives-up", FRONT, ("w[0] + work <=", "w[0] + kept + work <="))

ORDERED = """
def peak_bytes(blocks, recomputed):
    held = peak = 0
    for block, again in zip(blocks, recomputed):
        peak = max(peak, held + block.work)
        held += block.input if again else block.kept
    return peak


def choose_blocks(blocks, budget):
    recomputed = [False] * len(blocks)
    for i in sorted(range(len(blocks)), key=lambda i: ORDER):
        if peak_bytes(blocks, recomputed) <= budget:
            return recomputed
        recomputed[i] = True
    return recomputed if peak_bytes(blocks, recomputed) <= budget else None
"""
SAVED = "(blocks[i].kept - blocks[i].input)"


def ordered(slug, order, *, is_variant=False):
    """Blocks are recomputed one after the other in a fixed order until the peak fits."""
    bank.text(slug, ORDERED.replace("ORDER", order), variant=is_variant)


hint("over-budget", "With this list, the peak is above the budget. Every block must fit: its work plus all that "
                       "the blocks before it hold.")  # fmt: skip
slip("over-budget", ("            if held + block.work > budget:\n                continue\n", ""))
slip("over-budget", ("held + block.work > budget", "block.work > budget"))
variant("over-budget", FRONT, ("if w[0] + work <= budget", "if work <= budget"))

hint("held-alone", "What all blocks hold at the end is within the budget, but the peak is not: while a block "
                      "runs, its work is in memory beside what the blocks before it hold. Compare with the budget "
                      "at every block, work included.")  # fmt: skip
slip("held-alone", ("if held + block.work > budget", "if held > budget"), (
    "    return min(found.values())[1] if found else None", "    found = {h: v for h, v in found.items() if h <= budget}\n    return min(found.values())[1] if found else None"))  # fmt: skip
variant("held-alone", FRONT, ("if w[0] + work <= budget", "if w[0] <= budget"), (
    "return front[-1][2] if front", "front = [w for w in front if w[0] <= budget]\n    return front[-1][2] if front"))  # fmt: skip

hint("inverted", "True and False are swapped: True is for a block that is recomputed.")
slip("inverted", ("return min(found.values())[1]", "return [not x for x in min(found.values())[1]]"))
variant("inverted", FRONT, ("return front[-1][2]", "return [1 - x for x in front[-1][2]]"))

hint("reversed", "The list is reversed: its first entry is for the first block of the forward pass.")
slip("reversed", ("return min(found.values())[1]", "return min(found.values())[1][::-1]"))
variant("reversed", FRONT, ("return front[-1][2]", "return front[-1][2][::-1]"))

hint(
    "not-cheapest",
    "The peak fits, but another list that fits needs fewer extra operations. The sum of the operations counts, not "
    "the number of blocks that are recomputed.",
)
slip("not-cheapest", ("(True, block.input, block.operations)", "(True, block.input, 1)"))  # the fewest blocks
variant("not-cheapest", FRONT, ("c + operations,", "c + 1,"))

hint("greedy", "You take blocks one by one, the seemingly best first, until the peak fits. Here, other lists "
                  "cost less. The last block taken often frees far more than needed, and recomputing a late block "
                  "does not help an early one.")  # fmt: skip
ordered("greedy", f"blocks[i].operations / {SAVED}")
ordered("greedy", f"-{SAVED}")
ordered("greedy", "blocks[i].operations")
ordered("greedy", "blocks[i].operations / blocks[i].kept")
ordered("greedy", "blocks[i].operations / blocks[i].work")
ordered("greedy", f"-{SAVED} / blocks[i].operations", is_variant=True)
RELIEF = (
    ORDERED.split("def choose_blocks")[0]
    + """def choose_blocks(blocks, budget):
    recomputed = [False] * len(blocks)
    while (peak := peak_bytes(blocks, recomputed)) > budget:
        gains = []
        for i, block in enumerate(blocks):
            trial = [again or k == i for k, again in enumerate(recomputed)]
            gains.append(((peak - peak_bytes(blocks, trial)) / block.operations, i))
        if max(gains)[0] <= 0:
            return None
        recomputed[max(gains)[1]] = True
    return recomputed
"""
)
bank.text("greedy", RELIEF)

hint("in-order", "You recompute the first blocks, as many as it takes. They may be the most expensive: look at "
                    "what each block frees and what it costs.")  # fmt: skip
ordered("in-order", "i")
variant("in-order", ORDERED.replace("ORDER", "i"), (
    "    recomputed = [False]", "    for k in range(len(blocks) + 1):\n        if peak_bytes(blocks, [i < k for i in range(len(blocks))]) <= budget:\n            return [i < k for i in range(len(blocks))]\n    recomputed = [False]"))  # fmt: skip

hint(
    "all-or-nothing",
    "You recompute either all blocks or none. A list between the two fits and costs less.",
)
ALL = (
    ORDERED.split("def choose_blocks")[0]
    + """def choose_blocks(blocks, budget):
    for again in (False, True):
        if peak_bytes(blocks, [again] * len(blocks)) <= budget:
            return [again] * len(blocks)
"""
)
bank.text("all-or-nothing", ALL)
variant("all-or-nothing", ALL, ("(False, True)", "(0, 1)"))

hint(
    "most-bytes",
    "Minimize the operations of the blocks that are recomputed: not the bytes held, nor the operations of the "
    "blocks that are kept, which run only once.",
)
slip("most-bytes", ("return min(found.values())[1]", "return found[min(found)][1]"))
slip("most-bytes", ("return min(found.values())[1]", "return found[max(found)][1]"))
variant("most-bytes", FRONT, ("return front[-1][2]", "return front[0][2]"))
slip(
    "most-bytes",
    ("(False, block.kept, 0)", "(False, block.kept, block.operations)"),
    ("(True, block.input, block.operations)", "(True, block.input, 0)"),
)
variant(
    "most-bytes",
    FRONT,
    ("(h + kept, c, (*r, 0))", "(h + kept, c + operations, (*r, 0))"),
    ("(h + inp, c + operations,", "(h + inp, c,"),
)

hint(
    "first-way-kept",
    "Where two ways lead to the same number of bytes held, keep the cheaper one, not simply the last or the first.",
)
slip(
    "first-way-kept",
    ("min(option, longer.get(held + size, option))", "max(option, longer.get(held + size, option))"),
)
slip("first-way-kept", ("min(option, longer.get(held + size, option))", "option"))
slip("first-way-kept", ("min(option, longer.get(held + size, option))", "longer.get(held + size, option)"))
variant("first-way-kept", FRONT, ("sorted(ways)", "sorted(ways, key=lambda w: (w[0], -w[1]))"), (
    "if not front or way[1] < front[-1][1]", "if not front or (way[0] > front[-1][0])"), ("return front[-1][2]", "return min(front, key=lambda w: w[1])[2]"))  # fmt: skip

hint("budget-itself", "A peak of exactly the budget fits.")
slip("budget-itself", ("block.work > budget", "block.work >= budget"))
variant("budget-itself", FRONT, ("+ work <= budget", "+ work < budget"))

hint("impossible", "Where no list fits, the answer is None, not {first}.")
slip("impossible", ("    return min(found.values())[1] if found else None", "    return min(found.values())[1]"))
slip("impossible", ("if found else None", "if found else [True] * len(blocks)"))
variant("impossible", FRONT, ("if front else None", "if front else []"))

hint("too-slow", "48 blocks took more than {seconds} s of processor time. Do not go through all lists, nor "
                    "through all numbers of bytes: for each number of bytes that is really reached, remember only "
                    "the cheapest way to it.")  # fmt: skip
BRUTE = (
    ORDERED.split("def choose_blocks")[0]
    + """def choose_blocks(blocks, budget):
    import itertools

    best = None
    for choice in itertools.product((False, True), repeat=len(blocks)):
        cost = sum(b.operations for b, again in zip(blocks, choice) if again)
        if peak_bytes(blocks, choice) <= budget and (best is None or cost < best[0]):
            best = cost, choice
    return best and [*best[1]]
"""
)
bank.text("too-slow", BRUTE)
TABLE = (
    ORDERED.split("def choose_blocks")[0]
    + """def choose_blocks(blocks, budget):
    budget = int(budget)
    best = {0: (0, ())}
    for b in blocks:
        new = {}
        for held in range(budget + 1 - b.work):
            if held in best:
                cost, choice = best[held]
                for again, size, more in ((0, b.kept, 0), (1, b.input, b.operations)):
                    option = cost + more, (*choice, again)
                    new[held + size] = min(new.get(held + size, option), option)
        best = new
    return list(min(best.values())[1]) if best else None
"""
)
variant("too-slow", TABLE)

hint(
    "large-not-cheapest",
    "For 48 blocks of four stages, your list is not the best one that fits, though it was for nine blocks. Drop a "
    "way only for a cheaper one that holds no more bytes: the cheapest of all may not fit at a later block.",
)
slip(
    "large-not-cheapest",
    ("        found = longer\n", "        found = dict(sorted(longer.items(), key=lambda e: e[1])[:64])\n"),
)
slip(
    "large-not-cheapest",
    (
        "        found = longer\n",
        "        found = dict(sorted(longer.items(), key=lambda e: e[1][0])[: 2**9 if len(blocks) < 10 else 20])\n",
    ),
)
variant(
    "large-not-cheapest",
    FRONT,
    ("    return front[-1][2]", "        front = front[: 2**9 if len(blocks) < 10 else 20]\n    return front[-1][2]"),
)

bank.edge("budget-itself", "first-way-kept", "impossible", "large-not-cheapest")

bank.edge("one-list")
