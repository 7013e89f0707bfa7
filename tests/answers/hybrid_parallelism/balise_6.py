"""Answers to balise 6: the search."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", whole=True)

BY_LOOPS = """
def search(model, gpus, batch, node, memory, seconds, usable):
    found, least, node = [], None, min(node, gpus)
    for t in range(1, node + 1):
        if node % t or gpus % t or model.heads % t:
            continue
        for p in range(1, gpus // t + 1):
            d, torn = divmod(gpus // t, p)
            if torn or model.layers % p or batch % d:
                continue
            for b in range(1, batch // d + 1):
                if (batch // d) % b:
                    continue
                for again in (False, True):
                    layout = planner.Layout(
                        tensor=t, pipeline=p, data=d, micro_batch=b, micro_batches=batch // d // b, zero=1 if d > 1 else 0,
                        recomputation="full" if again else "none", sequence_parallel=t != 1)
                    size = memory(layout)
                    least = size if least is None else min(least, size)
                    if size <= usable:
                        found.append((seconds(layout), size, layout))
    if least is None:
        raise planner.NoLayout("nothing divides")
    if not found:
        raise planner.NoLayout(f"the leanest takes {least / 1e9:.1f} GB")
    found.sort(key=lambda one: (one[0], one[1]))
    return found
"""
bank.text(6, None, BY_LOOPS)

BY_STEPS = """
from dataclasses import replace

def grids(model, gpus, batch, node):
    for t in divisors(gpus):
        inside = t <= node and (gpus <= node or node % t == 0)
        for p in divisors(gpus // t):
            d = gpus // (t * p)
            if inside and not (model.heads % t or model.layers % p or batch % d):
                yield planner.Layout(t, p, d, zero=1 if d > 1 else 0, sequence_parallel=t > 1)

def search(model, gpus, batch, node, memory, seconds, usable):
    tried = []
    for grid in grids(model, gpus, batch, node):
        rest = batch // grid.data
        for m in divisors(rest):
            plain = replace(grid, micro_batch=rest // m, micro_batches=m)
            tried += [plain, replace(plain, recomputation="full")]
    sizes = {layout: memory(layout) for layout in tried}
    fit = [layout for layout in tried if sizes[layout] <= usable]
    if not fit:
        text = "it would take %.1f GB at least" % (min(sizes.values()) / 1e9) if sizes else "the batch or the layers do not divide"
        raise planner.NoLayout(text)
    fit = sorted(fit, key=sizes.get)
    return sorted([(seconds(layout), sizes[layout], layout) for layout in fit], key=lambda one: one[0])
"""
bank.text(6, None, BY_STEPS)

bank.slip(6, "nothing-returned", ("    return sorted(found", "    sorted(found"))

bank.hint(
    6,
    "planner-called",
    "`planner.search` and its parts already do this. Here you write it yourself: six conditions and a sort.",
)
bank.text(6, "planner-called", BY_LOOPS.replace("    found, least", "    planner.search(model, planner.Cluster(planner.H100), gpus, batch)\n    found, least", 1))  # fmt: skip
bank.variant(6, "planner-called", BY_STEPS, ("    tried = []", "    tried = []\n    list(planner.layout_search._grids(model, planner.Cluster(planner.H100), gpus, {}))"))  # fmt: skip

bank.hint(6, "search-form", "Return a list of (seconds, bytes, layout), with a `planner.Layout` at the end. You "
                            "returned {got}.")
bank.slip(6, "search-form", ("    return sorted(found, key=lambda one: one[:2])", "    return [one[2] for one in sorted(found, key=lambda one: one[:2])]"))  # fmt: skip
bank.slip(6, "search-form", ("    return sorted(found, key=lambda one: one[:2])", "    return min(found, key=lambda one: one[:2])"))  # fmt: skip
bank.variant(6, "search-form", BY_STEPS, ("    return sorted(", "    return iter("), (", key=lambda one: one[0])", ")"))

bank.hint(
    6,
    "not-all-gpus",
    "This layout ({layout}) leaves GPUs idle, or needs more than there are: t · p · d must be their number.",
)
bank.slip(6, "not-all-gpus", ("for d in [gpus // t // p]", "for d in divisors(gpus // t // p)"))
bank.slip(
    6,
    "not-all-gpus",
    ("divisors(math.gcd(model.heads, min(node, gpus), gpus))", "divisors(math.gcd(model.heads, min(node, gpus)))"),
)
bank.variant(6, "not-all-gpus", BY_LOOPS, ("            d, torn = divmod(gpus // t, p)\n            if torn or", "            d = gpus // t // p\n            if"))  # fmt: skip

bank.hint(
    6, "other-batch", "This layout ({layout}) has a different batch: data ranks × micro-batch × micro-batches must "
                      "be `batch`."
)
bank.slip(6, "other-batch", ("for b in divisors(batch // d)", "for b in range(1, batch // d + 1)"))
bank.slip(6, "other-batch", ("batch // d // b, zero", "batch // b, zero"))
bank.slip(6, "other-batch", ("        if batch % d == 0\n", ""))
bank.variant(6, "other-batch", BY_STEPS, (" or batch % d)", ")"))

bank.hint(6, "heads-divided", "This layout ({layout}) splits a head: the tensor ranks must divide the number of heads.")
bank.slip(6, "heads-divided", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(min(node, gpus), gpus)"))

bank.variant(6, "heads-divided", BY_LOOPS, (" or model.heads % t", ""))

bank.hint(
    6, "layers-divided", "This layout ({layout}) has stages of unequal size: the pipeline must divide the number "
                         "of layers."
)
bank.slip(6, "layers-divided", ("divisors(math.gcd(model.layers, gpus // t))", "divisors(gpus // t)"))
bank.variant(6, "layers-divided", BY_STEPS, ("model.heads % t or model.layers % p or", "model.heads % t or"))

bank.hint(
    6, "torn",
    "This layout ({layout}) splits a tensor group over nodes: some of its sums would go over the network. t must "
    "divide the GPUs of a node.",
)  # fmt: skip
bank.slip(6, "torn", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(model.heads, gpus)"))
bank.variant(6, "torn", BY_STEPS, ("inside = t <= node and (gpus <= node or node % t == 0)", "inside = t <= node"))

bank.hint(
    6, "too-large", "This layout ({layout}) takes more than `usable` bytes: it does not fit, however quick it is."
)
bank.slip(6, "too-large", (" if size <= usable]", "]"))
bank.variant(6, "too-large", BY_LOOPS, ("if size <= usable:", "if size:"))

bank.hint(
    6,
    "other-options",
    "An option differs from what was asked for: {layout}. Use `zero=1` with several data ranks, "
    '`sequence_parallel` with several tensor ranks, and recomputation "none" and "full".',
)
bank.slip(6, "other-options", ("zero=int(d > 1), ", ""))
bank.slip(6, "other-options", ("sequence_parallel=t > 1", "sequence_parallel=True"))
bank.variant(6, "other-options", BY_STEPS, ("zero=1 if d > 1 else 0", "zero=1"))

bank.hint(6, "missing", "You returned {n} layouts, but {of} divide and fit. One that is missing: {layout}.")
bank.slip(6, "missing", ('("none", "full")', '("none",)'))
bank.slip(6, "missing", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(model.heads, node, gpus)"))
bank.slip(6, "missing", ("        for b in divisors(batch // d)", "        for b in [1]"))
bank.variant(6, "missing", BY_LOOPS, ("range(1, node + 1)", "range(1, node)"))

bank.hint(6, "just-fits", "A layout that takes exactly `usable` bytes fits. You left it out: {layout}.")
bank.slip(6, "just-fits", ("size <= usable]", "size < usable]"))
bank.variant(6, "just-fits", BY_LOOPS, ("if size <= usable:", "if size < usable:"))

bank.hint(6, "twice", "A layout comes twice: {layout}. You returned {n} different ones.")
bank.slip(6, "twice", ('("none", "full")', '("none", "full", "full")'))
bank.variant(6, "twice", BY_STEPS, ("tried += [plain,", "tried += [plain, plain,"))

bank.hint(
    6,
    "values-changed",
    "With each layout return the seconds and the bytes that `seconds` and `memory` give for it, in this order.",
)
bank.slip(6, "values-changed", ("(seconds(layout), size, layout)", "(size, seconds(layout), layout)"))
bank.variant(
    6, "values-changed", BY_LOOPS, ("(seconds(layout), size, layout)", "(seconds(layout), size / 1e9, layout)")
)

bank.hint(6, "slowest-first", "The slowest layout comes first. Put the quickest first, the one with the fewest "
                              "seconds.")
bank.slip(6, "slowest-first", ("one[:2])", "one[:2], reverse=True)"))
bank.variant(6, "slowest-first", BY_STEPS, ("key=lambda one: one[0])", "key=lambda one: -one[0])"))

bank.hint(6, "unordered", "The layouts are not sorted by their seconds.")
bank.slip(6, "unordered", ("one[:2])", "one[1])"))
bank.slip(6, "unordered", ("sorted(found, key=lambda one: one[:2])", "found"))
bank.variant(6, "unordered", BY_LOOPS, ("    found.sort(key=lambda one: (one[0], one[1]))\n", ""))

bank.hint(
    6,
    "layouts-compared",
    "Where seconds and bytes are equal, sorting went on to compare layouts, which have no order. Pass a key.",
)
bank.slip(6, "layouts-compared", (", key=lambda one: one[:2])", ")"))
bank.variant(6, "layouts-compared", BY_LOOPS, ("found.sort(key=lambda one: (one[0], one[1]))", "found.sort()"))

bank.hint(
    6, "ties", "Of equally quick layouts, put the one that takes fewer bytes first, and leave none out."
)
bank.slip(6, "ties", ("one[:2])", "one[0])"))
bank.slip(6, "ties", ("one[:2])", "(one[0], -one[1]))"))
bank.slip(6, "ties", ("    return sorted(found, key=lambda one: one[:2])", "    return sorted({one[:2]: one for one in found}.values(), key=lambda one: one[:2])"))  # fmt: skip
bank.variant(6, "ties", BY_STEPS, ("    fit = sorted(fit, key=sizes.get)\n", ""))

bank.hint(6, "silent-none", "Where there is no layout, raise `planner.NoLayout` with the reason. Instead: {got}.")
bank.slip(6, "silent-none", ("    if not found:\n        raise planner.NoLayout(f\"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB\")\n", ""))  # fmt: skip
bank.slip(6, "silent-none", ("    if not layouts:\n        raise planner.NoLayout(f\"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}\")\n", ""))  # fmt: skip
bank.slip(6, "silent-none", ('planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")', "planner.NoLayout"))  # fmt: skip
bank.variant(6, "silent-none", BY_STEPS, ("    if not fit:\n", "    if tried and not fit:\n"))

bank.hint(
    6, "leanest-unsaid", "The message does not say how much the leanest layout takes: {expected} GB. It reads: {got}"
)
bank.slip(6, "leanest-unsaid", ("the leanest takes {min(sizes) / 1e9:.1f} GB", "{usable / 1e9:.1f} GB are too few"))
bank.slip(6, "leanest-unsaid", ("{min(sizes) / 1e9:.1f} GB", "{min(sizes) // 1e9:.1f} GB"))
bank.variant(6, "leanest-unsaid", BY_LOOPS, ("{least / 1e9:.1f} GB", "{least / 2**30:.1f} GB"))

bank.hint(
    6,
    "one-sentence",
    "You give the same message where nothing divides and where nothing fits. Different things would help.",
)
bank.slip(6, "one-sentence", ('    if not layouts:\n        raise planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")\n', ""), ('f"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB"', '"no layout divides, or it takes 7.5, 8.0, 8.5, 6.4 or 11.0 GB"'))  # fmt: skip
bank.variant(6, "one-sentence", BY_LOOPS, ('"nothing divides"', '"nothing divides, or the leanest takes 6.4 GB"'), ('f"the leanest takes {least / 1e9:.1f} GB"', '"nothing divides, or the leanest takes 6.4 GB"'))  # fmt: skip
bank.slip(
    6,
    "heads-divided",
    (
        "divisors(math.gcd(model.heads, min(node, gpus), gpus))",
        "[t for t in divisors(math.gcd(min(node, gpus), gpus)) if t <= model.heads]",
    ),
)
