"""Answers to balise 6: the search."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 6, whole=True)

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
bank.text(None, BY_LOOPS)

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
bank.text(None, BY_STEPS)

bank.slip("nothing-returned", ("    return sorted(found", "    sorted(found"))

bank.hint(
    "planner-called",
    "`planner.search` and its parts already do this. Here you write it yourself: six conditions and a sort.",
)
bank.text("planner-called", BY_LOOPS.replace("    found, least", "    planner.search(model, planner.Cluster(planner.H100), gpus, batch)\n    found, least", 1))  # fmt: skip
bank.variant("planner-called", BY_STEPS, ("    tried = []", "    tried = []\n    list(planner.layout_search._grids(model, planner.Cluster(planner.H100), gpus, {}))"))  # fmt: skip

bank.hint(
    "search-form",
    "Return a list of (seconds, bytes, layout), with a `planner.Layout` at the end. You returned {got}.",
)
bank.slip("search-form", ("    return sorted(found, key=lambda one: one[:2])", "    return [one[2] for one in sorted(found, key=lambda one: one[:2])]"))  # fmt: skip
bank.slip("search-form", ("    return sorted(found, key=lambda one: one[:2])", "    return min(found, key=lambda one: one[:2])"))  # fmt: skip
bank.variant("search-form", BY_STEPS, ("    return sorted(", "    return iter("), (", key=lambda one: one[0])", ")"))

bank.hint(
    "not-all-gpus",
    "This layout ({layout}) leaves GPUs idle, or needs more than there are: t · p · d must be their number.",
)
bank.slip("not-all-gpus", ("for d in [gpus // t // p]", "for d in divisors(gpus // t // p)"))
bank.slip(
    "not-all-gpus",
    ("divisors(math.gcd(model.heads, min(node, gpus), gpus))", "divisors(math.gcd(model.heads, min(node, gpus)))"),
)
bank.variant("not-all-gpus", BY_LOOPS, ("            d, torn = divmod(gpus // t, p)\n            if torn or", "            d = gpus // t // p\n            if"))  # fmt: skip

bank.hint(
    "other-batch",
    "This layout ({layout}) has a different batch: data ranks × micro-batch × micro-batches must be `batch`.",
)
bank.slip("other-batch", ("for b in divisors(batch // d)", "for b in range(1, batch // d + 1)"))
bank.slip("other-batch", ("batch // d // b, zero", "batch // b, zero"))
bank.slip("other-batch", ("        if batch % d == 0\n", ""))
bank.variant("other-batch", BY_STEPS, (" or batch % d)", ")"))

bank.hint("heads-divided", "This layout ({layout}) splits a head: the tensor ranks must divide the number of heads.")
bank.slip("heads-divided", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(min(node, gpus), gpus)"))

bank.variant("heads-divided", BY_LOOPS, (" or model.heads % t", ""))

bank.hint(
    "layers-divided",
    "This layout ({layout}) has stages of unequal size: the pipeline must divide the number of layers.",
)
bank.slip("layers-divided", ("divisors(math.gcd(model.layers, gpus // t))", "divisors(gpus // t)"))
bank.variant("layers-divided", BY_STEPS, ("model.heads % t or model.layers % p or", "model.heads % t or"))

bank.hint("torn",
    "This layout ({layout}) splits a tensor group over nodes: some of its sums would go over the network. t must "
    "divide the GPUs of a node.", edge=True,
)  # fmt: skip
bank.slip("torn", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(model.heads, gpus)"))
bank.variant("torn", BY_STEPS, ("inside = t <= node and (gpus <= node or node % t == 0)", "inside = t <= node"))

bank.hint("too-large", "This layout ({layout}) takes more than `usable` bytes: it does not fit, however quick it is.")
bank.slip("too-large", (" if size <= usable]", "]"))
bank.variant("too-large", BY_LOOPS, ("if size <= usable:", "if size:"))

bank.hint(
    "other-options",
    "An option differs from what was asked for: {layout}. Use `zero=1` with several data ranks, "
    '`sequence_parallel` with several tensor ranks, and recomputation "none" and "full".',
    edge=True,
)
bank.slip("other-options", ("zero=int(d > 1), ", ""))
bank.slip("other-options", ("sequence_parallel=t > 1", "sequence_parallel=True"))
bank.variant("other-options", BY_STEPS, ("zero=1 if d > 1 else 0", "zero=1"))

bank.hint("missing", "You returned {n} layouts, but {of} divide and fit. One that is missing: {layout}.")
bank.slip("missing", ('("none", "full")', '("none",)'))
bank.slip("missing", ("math.gcd(model.heads, min(node, gpus), gpus)", "math.gcd(model.heads, node, gpus)"))
bank.slip("missing", ("        for b in divisors(batch // d)", "        for b in [1]"))
bank.variant("missing", BY_LOOPS, ("range(1, node + 1)", "range(1, node)"))

bank.hint("just-fits", "A layout that takes exactly `usable` bytes fits. You left it out: {layout}.", edge=True)
bank.slip("just-fits", ("size <= usable]", "size < usable]"))
bank.variant("just-fits", BY_LOOPS, ("if size <= usable:", "if size < usable:"))

bank.hint("twice", "A layout comes twice: {layout}. You returned {n} different ones.", edge=True)
bank.slip("twice", ('("none", "full")', '("none", "full", "full")'))
bank.variant("twice", BY_STEPS, ("tried += [plain,", "tried += [plain, plain,"))

bank.hint(
    "values-changed",
    "With each layout return the seconds and the bytes that `seconds` and `memory` give for it, in this order.",
)
bank.slip("values-changed", ("(seconds(layout), size, layout)", "(size, seconds(layout), layout)"))
bank.variant("values-changed", BY_LOOPS, ("(seconds(layout), size, layout)", "(seconds(layout), size / 1e9, layout)"))

bank.hint("slowest-first", "The slowest layout comes first. Put the quickest first, the one with the fewest seconds.")
bank.slip("slowest-first", ("one[:2])", "one[:2], reverse=True)"))
bank.variant("slowest-first", BY_STEPS, ("key=lambda one: one[0])", "key=lambda one: -one[0])"))

bank.hint("unordered", "The layouts are not sorted by their seconds.")
bank.slip("unordered", ("one[:2])", "one[1])"))
bank.slip("unordered", ("sorted(found, key=lambda one: one[:2])", "found"))
bank.variant("unordered", BY_LOOPS, ("    found.sort(key=lambda one: (one[0], one[1]))\n", ""))

bank.hint(
    "layouts-compared",
    "Where seconds and bytes are equal, sorting went on to compare layouts, which have no order. Pass a key.",
    edge=True,
)
bank.slip("layouts-compared", (", key=lambda one: one[:2])", ")"))
bank.variant("layouts-compared", BY_LOOPS, ("found.sort(key=lambda one: (one[0], one[1]))", "found.sort()"))

bank.hint("ties", "Of equally quick layouts, put the one that takes fewer bytes first, and leave none out.", edge=True)
bank.slip("ties", ("one[:2])", "one[0])"))
bank.slip("ties", ("one[:2])", "(one[0], -one[1]))"))
bank.slip("ties", ("    return sorted(found, key=lambda one: one[:2])", "    return sorted({one[:2]: one for one in found}.values(), key=lambda one: one[:2])"))  # fmt: skip
bank.variant("ties", BY_STEPS, ("    fit = sorted(fit, key=sizes.get)\n", ""))

bank.hint(
    "silent-none", "Where there is no layout, raise `planner.NoLayout` with the reason. Instead: {got}.", edge=True
)
bank.slip("silent-none", ("    if not found:\n        raise planner.NoLayout(f\"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB\")\n", ""))  # fmt: skip
bank.slip("silent-none", ("    if not layouts:\n        raise planner.NoLayout(f\"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}\")\n", ""))  # fmt: skip
bank.slip("silent-none", ('planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")', "planner.NoLayout"))  # fmt: skip
bank.variant("silent-none", BY_STEPS, ("    if not fit:\n", "    if tried and not fit:\n"))

bank.hint(
    "leanest-unsaid",
    "The message does not say how much the leanest layout takes: {expected} GB. It reads: {got}",
    edge=True,
)
bank.slip("leanest-unsaid", ("the leanest takes {min(sizes) / 1e9:.1f} GB", "{usable / 1e9:.1f} GB are too few"))
bank.slip("leanest-unsaid", ("{min(sizes) / 1e9:.1f} GB", "{min(sizes) // 1e9:.1f} GB"))
bank.variant("leanest-unsaid", BY_LOOPS, ("{least / 1e9:.1f} GB", "{least / 2**30:.1f} GB"))

bank.hint(
    "one-sentence",
    "You give the same message where nothing divides and where nothing fits. Different things would help.",
    edge=True,
)
bank.slip("one-sentence", ('    if not layouts:\n        raise planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")\n', ""), ('f"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB"', '"no layout divides, or it takes 7.5, 8.0, 8.5, 6.4 or 11.0 GB"'))  # fmt: skip
bank.variant("one-sentence", BY_LOOPS, ('"nothing divides"', '"nothing divides, or the leanest takes 6.4 GB"'), ('f"the leanest takes {least / 1e9:.1f} GB"', '"nothing divides, or the leanest takes 6.4 GB"'))  # fmt: skip
bank.slip(
    "heads-divided",
    (
        "divisors(math.gcd(model.heads, min(node, gpus), gpus))",
        "[t for t in divisors(math.gcd(min(node, gpus), gpus)) if t <= model.heads]",
    ),
)
