"""Answers to balise 7."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 7, whole=True)

# part by part; a step that halves
BY_PARTS = """
def rank_bytes(n_parameters, largest, activations, batch, n_ranks, stage):
    weights = gradients = 2 * n_parameters
    optimizer = 12 * n_parameters
    if stage >= 1:
        optimizer /= n_ranks
    if stage >= 2:
        gradients = gradients / n_ranks + 2 * largest
    if stage == 3:
        weights = weights / n_ranks + 2 * largest
    return weights + gradients + optimizer + activations * batch


def largest_batch(bytes_of, memory, most):
    found, step = 0, 1 << most.bit_length()
    while step:
        if found + step <= most and bytes_of(found + step) <= memory:
            found += step
        step //= 2
    return found
"""
bank.text(None, BY_PARTS)
BISECT = """
import bisect


def rank_bytes(n_parameters, largest, activations, batch, n_ranks, stage):
    held = planner.state_bytes(n_parameters, n_ranks, stage)
    return held.parameters + held.gradients + held.optimizer + batch * activations + [0, 0, 2, 4][stage] * largest


def largest_batch(bytes_of, memory, most):
    return bisect.bisect_right(range(1, most + 1), memory, key=bytes_of)
"""
bank.text(None, BISECT)
DOUBLING = """
def rank_bytes(n_parameters, largest, activations, batch, n_ranks, stage):
    extra = {0: 0, 1: 0, 2: 2 * largest, 3: 4 * largest}
    return int(planner.state_bytes(n_parameters, n_ranks, stage).total + extra[stage] + activations * batch)


def largest_batch(bytes_of, memory, most):
    low, high = 0, 1
    while high <= most and bytes_of(high) <= memory:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        half = low + (high - low) // 2
        low, high = (half, high) if bytes_of(half) <= memory else (low, half)
    return low
"""
bank.slip(None, ("(stage >= 2) + (stage >= 3)", "max(0, stage - 1)"))
bank.text(None, DOUBLING.replace("int(planner", "float(planner"))

bank.hint("not-a-number", "rank_bytes returns one number, in bytes.")
bank.slip(
    "not-a-number", ("return states + batch * activations + moment", "return states, batch * activations, moment")
)
bank.variant("not-a-number", BISECT, ("return held.parameters + ", "return held, held.parameters + "))

bank.hint(
    "images-shared-out",
    "The batch is already this rank's own: other ranks have other images, and take none of these.",
)
bank.slip("images-shared-out", ("batch * activations", "batch * activations / n_ranks"))
bank.variant("images-shared-out", BY_PARTS, ("activations * batch", "activations * batch / n_ranks"))

bank.hint("one-image", "Each image of the batch has its own activations: `activations` is for one image.")
bank.slip("one-image", ("batch * activations", "activations"))
bank.variant("one-image", BY_PARTS, ("activations * batch", "activations"))

bank.hint(
    "shared-in-ddp",
    "In stage 0, DDP, nothing is sharded: each rank has all states, however many ranks there are.",
)
bank.slip("shared-in-ddp", ("n_ranks, stage).total", "n_ranks, stage).total / (n_ranks if stage == 0 else 1)"))
bank.slip("shared-in-ddp", ("n_ranks, stage).total", "n_ranks, 3).total"))
bank.slip("shared-in-ddp", ("n_ranks, stage).total", "n_ranks, max(stage, 1)).total"))
bank.variant("shared-in-ddp", BY_PARTS, ("if stage >= 1:", "if stage >= 0:"))

bank.hint(
    "moment-in-ddp",
    "DDP keeps all weights and gradients whole all the time. Nothing extra is held for a moment: that begins with "
    "stage 2.",
    edge=True,
)
bank.slip("moment-in-ddp", ("((stage >= 2) + (stage >= 3))", "2"))
bank.slip("moment-in-ddp", ("((stage >= 2) + (stage >= 3))", "(1 + (stage >= 3))"))
bank.variant("moment-in-ddp", BISECT, ("[0, 0, 2, 4]", "[2, 2, 2, 4]"))

bank.hint("moment-forgotten", "States and activations are counted. In stages 2 and 3, a rank also holds "
                                 "something for a moment: a block's whole gradient, and in stage 3 its gathered "
                                 "weights too.")  # fmt: skip
bank.slip("moment-forgotten", ("+ moment", ""))
bank.variant("moment-forgotten", BY_PARTS, (" + 2 * largest", ""))

bank.hint(
    "gradients-whole-too",
    "In stage 3, a block is whole twice for a moment: its gathered weights, and its gradient before it is sharded.",
    edge=True,
)
bank.slip("gradients-whole-too", ("(stage >= 2) + (stage >= 3)", "stage >= 3"))
bank.slip("gradients-whole-too", ("(stage >= 2) + (stage >= 3)", "stage >= 2"))
bank.variant("gradients-whole-too", BISECT, ("[0, 0, 2, 4]", "[0, 0, 2, 2]"))

bank.hint(
    "all-gathered",
    "Stage 3 gathers one block after another, and frees each: only the largest block counts, not the whole model.",
)
bank.slip("all-gathered", ("2 * largest *", "2 * n_parameters *"))
bank.variant("all-gathered", BY_PARTS, ("2 * largest", "2 * n_parameters"))

bank.hint(
    "stage-ignored",
    "All your stages give the same. Stage 1 shards the optimizer's states, stage 2 also the gradients, stage 3 "
    "also the weights.",
)
bank.slip("stage-ignored", ("n_ranks, stage).total", "n_ranks, 0).total"))
bank.variant(
    "stage-ignored", BISECT, ("state_bytes(n_parameters, n_ranks, stage)", "state_bytes(n_parameters, 1, stage)")
)

bank.hint(
    "elements-moment",
    "A parameter has 2 bytes here. So do the gradients and weights that are held for a moment.",
    edge=True,
)
bank.slip("elements-moment", ("2 * largest *", "largest *"))
bank.slip("elements-moment", ("2 * largest *", "4 * largest *"))
bank.variant("elements-moment", BISECT, ("[0, 0, 2, 4]", "[0, 0, 1, 2]"))

bank.hint(
    "moment-shared-out",
    "What is held for a moment is a block's whole gradient, and its whole weights, not one rank's share.",
    edge=True,
)
bank.slip("moment-shared-out", ("2 * largest *", "2 * largest / n_ranks *"))
bank.slip(
    "moment-shared-out",
    ("2 * largest * ((stage >= 2) + (stage >= 3))", "2 * largest * ((stage >= 2) + (stage >= 3) / n_ranks)"),
)
bank.variant("moment-shared-out", BY_PARTS, ("2 * largest", "2 * largest / n_ranks"))

bank.hint(
    "moment-each-image",
    "What is held for a moment has the size of a block's parameters, however many images there are.",
)
bank.slip("moment-each-image", ("batch * activations + moment", "batch * (activations + moment)"))
bank.variant("moment-each-image", BISECT, ("[stage] * largest", "[stage] * largest * batch"))

bank.hint(
    "moment-in-1",
    "In stage 1, each rank has all gradients anyway: nothing extra is held for a moment. That begins with stage 2.",
    edge=True,
)
bank.slip("moment-in-1", ("(stage >= 2) + (stage >= 3)", "(stage >= 1) + (stage >= 3)"))
bank.slip("moment-in-1", ("((stage >= 2) + (stage >= 3))", "stage"))
bank.variant("moment-in-1", BISECT, ("[0, 0, 2, 4]", "[0, 2, 2, 4]"))

bank.hint(
    "gathered-in-2",
    "In stage 2, each rank has all weights anyway: only a block's gradient is held for a moment.",
    edge=True,
)
bank.slip("gathered-in-2", ("((stage >= 2) + (stage >= 3))", "2 * (stage >= 2)"))
bank.variant("gathered-in-2", BISECT, ("[0, 0, 2, 4]", "[0, 0, 4, 4]"))

bank.hint(
    "wrong-ddp",
    "These bytes are wrong. Count the states, and the activations of each image. What else does DDP hold?",
)
bank.slip("wrong-ddp", ("batch * activations", "(batch - 1) * activations"))
bank.slip("wrong-ddp", ("return states + batch * activations + moment", "return states + moment"))
bank.variant("wrong-ddp", BY_PARTS, ("12 * n_parameters", "8 * n_parameters"))
bank.hint(
    "wrong-zero",
    "The bytes are right with DDP, but not here: which states are sharded, and what is held for a moment?",
)
bank.slip("wrong-zero", ("(stage >= 2) + (stage >= 3)", "(stage >= 1) + (stage >= 2) + 3 * (stage >= 3)"))
bank.variant("wrong-zero", BISECT, ("[0, 0, 2, 4]", "[0, 4, 0, 2]"))

bank.hint("not-a-batch", "largest_batch returns one whole number, 0 if nothing fits; you returned {kind}.")
bank.slip("not-a-batch", ("return fits", "return fits or None"))
bank.slip("not-a-batch", ("(fits + fails) // 2", "(fits + fails) / 2"))
bank.variant("not-a-batch", DOUBLING, ("return low", "return low, high"))

bank.hint(
    "less-than", 'A batch that fills the memory exactly fits: compare with "at most", not "less than".', edge=True
)
bank.slip("less-than", ("(middle) <= memory", "(middle) < memory"))
bank.variant("less-than", BISECT, ("bisect_right", "bisect_left"))

bank.hint("first-that-fails", "That is the smallest batch that does not fit. Return the one before it.", edge=True)
bank.slip("first-that-fails", ("return fits", "return fails"))
bank.variant("first-that-fails", BISECT, ("key=bytes_of)", "key=bytes_of) + 1"))

bank.hint(
    "power-of-two", "That is the largest power of two that fits. Batches between it and the next power may fit too."
)
POWERS = DOUBLING.split("    high = min(")[0] + "    return low\n"
bank.text("power-of-two", POWERS)
bank.variant("power-of-two", POWERS, ("return low", "return high // 2"))

bank.hint(
    "as-if-straight",
    "Memory need not grow in a straight line: two measurements do not give the rest. Measure near the batch that "
    "you return.",
)
LINE = (
    BISECT.split("    return bisect")[0]
    + """    one, two = bytes_of(1), bytes_of(min(2, most))
    if one > memory:
        return 0
    each = two - one
    return min(most, 1 + int((memory - one) // each)) if each else most
"""
)
bank.text("as-if-straight", LINE)
bank.variant(
    "as-if-straight",
    LINE,
    ("one, two = bytes_of(1), bytes_of(min(2, most))", "one = bytes_of(1)"),
    ("two - one", "bytes_of(2) - bytes_of(1)"),
)

bank.hint(
    "wrong-batch",
    "Either a larger batch fits too, or this one does not. Is `bytes_of` at most `memory` for the batch you "
    "return, and above it for one image more?",
)
bank.slip("wrong-batch", ("fits = middle", "fits = middle + 1"))

bank.variant("wrong-batch", BY_PARTS, ("step //= 2", "step //= 4"))

bank.hint("not-zero", "Not even one image fits here: return 0.", edge=True)
bank.slip("not-zero", ("fits, fails = 0, most + 1", "fits, fails = 1, most + 1"))
bank.variant("not-zero", DOUBLING, ("return low", "return max(low, 1)"))

bank.hint("not-most", "`most` is the largest batch to ask for, and it may be returned.", edge=True)
bank.slip("not-most", ("0, most + 1", "0, most"))
bank.variant("not-most", BISECT, ("most + 1", "most"))

bank.hint("asked-outside", "bytes_of was asked for a batch of {batch}: only 1 to `most` can be measured.", edge=True)
bank.slip("asked-outside", ("    while fails", "    if bytes_of(0) > memory:\n        return 0\n    while fails"))
bank.variant(
    "asked-outside",
    BISECT,
    ("range(1, most + 1), memory, key=bytes_of)", "range(most + 1), memory, key=bytes_of) - 1"),
)

bank.hint(
    "asked-often",
    "bytes_of may take seconds, and you called it far more than log₂(most) times. Halve the remaining range with "
    "each call.",
)
BELOW = (
    BISECT.split("    return bisect")[0]
    + """    batch = 0
    while batch < most and bytes_of(batch + 1) <= memory:
        batch += 1
    return batch
"""
)
bank.text("asked-often", BELOW)
bank.text(
    "asked-often",
    BELOW.replace(
        "while batch",
        "while batch + 64 <= most and bytes_of(batch + 64) <= memory:\n        batch += 64\n    while batch",
    ),
)
bank.variant(
    "asked-often",
    BELOW,
    (
        "while batch",
        "while batch + 100 <= most and bytes_of(batch + 100) <= memory:\n        batch += 100\n    while batch",
    ),
)

bank.hint(
    "asked-twice",
    "bytes_of was called more than once for the same batch, and a call may take seconds. Keep the answer.",
    edge=True,
)
bank.slip(
    "asked-twice",
    (
        "            fits = middle\n        else:\n",
        "            fits = middle\n        elif bytes_of(middle) > memory:\n",
    ),
)
bank.variant("asked-twice",
    DOUBLING,
    ("low, high = (half, high) if bytes_of(half) <= memory else (low, half)", "low, high = half if bytes_of(half) <= memory else low, high if bytes_of(half) <= memory else half"),
)  # fmt: skip

bank.hint(
    "asked-again",
    "bytes_of was called for a batch of {batch} again and again: the search does not end. Between two neighbours, "
    "the middle rounded down is the lower one: stop there.",
)
bank.slip("asked-again", ("while fails - fits > 1", "while fails - fits > 0"))
STUCK = (
    BISECT.split("    return bisect")[0]
    + """    low, high = 0, most
    while low < high:
        half = (low + high) // 2
        if bytes_of(half) <= memory:
            low = half
        else:
            high = half - 1
    return low
"""
)
bank.text("asked-again", STUCK)
bank.variant("asked-again", STUCK, ("low, high = 0, most", "low, high = 1, most"))
bank.slip(
    "wrong-batch",
    (
        "        middle = (fits + fails) // 2\n",
        "        middle = (fits + fails) // 2\n        if bytes_of(middle) == memory:\n            return middle\n",
    ),
)
