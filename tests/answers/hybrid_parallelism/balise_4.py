"""Answers to balise 4: the parameters and the bytes of a rank."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 4, whole=True)

BY_PIECES = """
from math import prod

def stage_parameters(model, layout, stage):
    h, t, p = model.width, layout.tensor, layout.pipeline
    cut = [(3 * h, h), (3 * h,), (h, h), (4 * h, h), (4 * h,), (4 * h, h)]
    layer = sum(map(prod, cut)) / t + 6 * h
    total = sum(layer for _ in range(model.layers // p))
    if stage in (0, p - 1):
        total += model.vocabulary * h / t
    if stage == 0:
        total += model.sequence * h
    if stage == p - 1:
        total += 2 * h
    return [total, layer]


def rank_memory(model, layout, stage, widths):
    here, layer = stage_parameters(model, layout, stage)
    t, d, p, m = layout.tensor, layout.data, layout.pipeline, layout.micro_batches
    norms = t if layout.sequence_parallel else 1
    token = model.width * (widths["whole"] / norms + widths["cut"] / t)
    flying = m if layout.schedule == "GPipe" else m if m < p - stage else p - stage
    layers = model.layers // p
    if layout.recomputation == "full":
        activations = flying * layers * model.width * widths["input"] / norms + token
    else:
        activations = flying * layers * token
    if stage == p - 1:
        activations += widths["logit"] * model.vocabulary / t
    gathered = 0
    if d > 1 and layout.zero == 2:
        gathered = layer * widths["gradient"]
    elif d > 1 and layout.zero == 3:
        gathered = layer * (widths["gradient"] + widths["parameter"])
    shares = {"parameters": 3, "gradients": 2, "optimizer": 1}
    states = {name: here * widths[name.rstrip("s")] / (d if layout.zero >= first else 1) for name, first in shares.items()}
    return states | {"gathered": gathered, "activations": activations * model.sequence * layout.micro_batch}
"""
bank.text(None, BY_PIECES)

BY_RANKS = """
def stage_parameters(model, layout, stage):
    stages, h = range(layout.pipeline), model.width
    cut = {"layers": model.layers / len(stages) * (12 * h**2 + 7 * h), "words": 0}
    if stage == stages[0] or stage == stages[-1]:
        cut["words"] = model.vocabulary * h
    whole = model.layers / len(stages) * 6 * h + (stage == stages[0]) * model.sequence * h + (stage == stages[-1]) * 2 * h
    return sum(cut.values()) / layout.tensor + whole, (12 * h**2 + 7 * h) / layout.tensor + 6 * h


def rank_memory(model, layout, stage, widths):
    n, one = stage_parameters(model, layout, stage)
    def share(least):
        return 1 / layout.data if layout.zero >= least else 1
    cells = model.sequence * layout.micro_batch * model.width
    norm = cells / layout.tensor if layout.sequence_parallel else cells
    heads = cells / layout.tensor
    full = norm * widths["whole"] + heads * widths["cut"]
    again = layout.recomputation == "full"
    total = full if again else 0
    for micro_batch in range(layout.micro_batches):
        if layout.schedule == "GPipe" or micro_batch + stage < layout.pipeline:
            total += model.layers / layout.pipeline * (norm * widths["input"] if again else full)
    if stage + 1 == layout.pipeline:
        total += model.sequence * layout.micro_batch * model.vocabulary * widths["logit"] / layout.tensor
    held = 0
    if layout.data > 1:
        held = one * ((layout.zero > 1) * widths["gradient"] + (layout.zero > 2) * widths["parameter"])
    return dict(parameters=n * share(3) * widths["parameter"], gradients=n * share(2) * widths["gradient"],
                optimizer=n * share(1) * widths["optimizer"], gathered=held, activations=total)
"""
bank.text(None, BY_RANKS)

bank.slip("nothing-returned", ("    return found\n", "    pass\n"))

bank.hint(
    "planner-called", "The planner already has `{name}`. Here you write it yourself: counting by hand is the point."
)
bank.text("planner-called", BY_PIECES.replace("    return [total, layer]", "    return planner.stage_parameters(model, layout, stage)[:2]"))  # fmt: skip
bank.variant("planner-called", BY_RANKS, ("    n, one = stage_parameters(model, layout, stage)", "    n, one = stage_parameters(model, layout, stage)\n    held = planner.rank_memory(model, layout, stage)"))  # fmt: skip

bank.hint(
    "stage-form",
    "`stage_parameters` must return two numbers: the parameters of the whole stage, and of one of "
    "its layers. You returned {got}.",
)
bank.slip("stage-form", ("+ ends, layer\n", "+ ends\n"))
bank.variant("stage-form", BY_PIECES, ("return [total, layer]", "return total"))

bank.hint(
    "memory-form",
    'Return a dict with "parameters", "gradients", "optimizer", "gathered" and "activations", always all five.',
)
bank.slip("memory-form", ("    return found\n", "    return sum(found.values())\n"))
bank.slip("memory-form", ('    found["gathered"] = layer * at_once * (d > 1)\n', ""))
bank.variant("memory-form", BY_RANKS, ("optimizer=n", "states=n"))

bank.hint(
    "wrong-parameters",
    "{where}: you count {got} parameters, but {expected} are expected. A layer has "
    "(12 h² + 7 h) / t + 6 h on a rank; a stage has `layers / pipeline` layers, and "
    "its ends.",
)
bank.slip("wrong-parameters", ("12 * h * h", "8 * h * h"))
bank.slip("wrong-parameters", ('n * widths["parameter"] / (d', 'n / t * widths["parameter"] / (d'))
bank.variant("wrong-parameters", BY_PIECES, ("(3 * h, h), (3 * h,), (h, h)", "(3 * h, h), (3 * h,)"))

bank.hint("all-cut",
    "You divided everything by the tensor ranks. The norms, and the biases that are added after a sum, are whole "
    "on each rank: 6 h of a layer.",
)  # fmt: skip
bank.slip("all-cut", ("(12 * h * h + 7 * h) / t + 6 * h", "(12 * h * h + 13 * h) / t"))
bank.variant("all-cut", BY_PIECES, ("/ t + 6 * h", "/ t + 6 * h / t"))

bank.hint("layers-undivided", "You counted all layers of the model. Any stage has only `layers / pipeline` of them, "
                           "plus its ends."
)  # fmt: skip
bank.slip("layers-undivided", ("return model.layers // layout.pipeline * layer", "return model.layers * layer"))
bank.variant("layers-undivided", BY_PIECES, ("for _ in range(model.layers // p))", "for _ in range(model.layers))"))

bank.hint("ends-wrong",
    "The layers are right, but the rest is not. First stage: words (cut), positions (whole). Last stage: words "
    "(cut), the last norm's 2 h (whole).",
)  # fmt: skip
bank.slip("ends-wrong", (" + model.sequence * h * first", " + model.sequence * h / t * first"))
bank.slip("ends-wrong", (" + model.sequence * h * first", ""))
bank.slip("ends-wrong", (" + 2 * h * last", ""))
bank.slip("ends-wrong", (" + 2 * h * last", " + 2 * h / t * last"))
bank.variant("ends-wrong", BY_PIECES, ("        total += 2 * h\n", "        total += 0\n"))

bank.hint("pair-swapped", "The two numbers are swapped: first the whole stage's parameters, then one layer's.")
bank.slip("pair-swapped", ("return model.layers // layout.pipeline * layer + ends, layer", "return layer, model.layers // layout.pipeline * layer + ends"))  # fmt: skip
bank.variant("pair-swapped", BY_PIECES, ("return [total, layer]", "return [layer, total]"))

bank.hint("layer-cut-wrong",
    "With tensor ranks, your count of a layer's parameters is wrong: 12 h² + 7 h of them are cut over the ranks, 6 "
    "h are whole on each.",
)  # fmt: skip
bank.slip("layer-cut-wrong", ("(12 * h * h + 7 * h) / t + 6 * h", "12 * h * h / t + 13 * h"))
bank.slip("layer-cut-wrong", ("(12 * h * h + 7 * h) / t + 6 * h", "12 * h * h + 13 * h"))
bank.variant("layer-cut-wrong", BY_PIECES, ("/ t + 6 * h", "/ t**2 + 6 * h"))

bank.hint("words-whole", "You left the word matrix whole: it is cut over the tensor ranks too.")
bank.slip("words-whole", ("model.vocabulary * h / t *", "model.vocabulary * h *"))
bank.variant("words-whole", BY_RANKS, ("model.vocabulary * h\n", "model.vocabulary * h * layout.tensor\n"))

bank.hint("head-forgotten", "The last stage also has the words: its head is a copy of the embedding, of the same size.")
bank.slip("head-forgotten", ("* (first or last)", "* first"))
bank.variant("head-forgotten", BY_PIECES, ("stage in (0, p - 1)", "stage == 0"))

bank.hint("words-twice", "When one stage is both the first and the last, embedding and head are one matrix, held once.")
bank.slip("words-twice", ("(first or last)", "(first + last)"))
bank.variant("words-twice", BY_PIECES, ("    if stage == p - 1:\n        total += 2 * h", "    if stage == p - 1:\n        total += 2 * h + (p == 1) * model.vocabulary * h / t"))  # fmt: skip

bank.hint(
    "ends-everywhere",
    "You counted words, positions and the last norm on stages in the middle, which have only layers.",
)
bank.slip("ends-everywhere", ("(first or last)", "1"), ("* h * first + 2 * h * last", "* h + 2 * h"))
bank.slip("ends-everywhere", ("(first or last)", "1"))
bank.slip("ends-everywhere", ("2 * h * last", "2 * h"))
bank.variant("ends-everywhere", BY_PIECES, ("    if stage in (0, p - 1):", "    if True:"))

bank.hint(
    "wrong-memory",
    "{where}: you count {got} bytes, but {expected} are expected. How many ranks share "
    "this part, and for how many layers and micro-batches is it kept?",
)
bank.slip("wrong-memory", ("min(m, layout.pipeline - stage)", "1"))

bank.variant("in-flight", BY_PIECES, ("p - stage\n", "p\n"), ("flying = m if", "flying = 1 if"))
bank.variant("wrong-memory", BY_PIECES, ("activations = flying * layers * token", "activations = flying * token"))

bank.hint("zero-order",
    "ZeRO shards the optimizer's states first (1), then the gradients (2), then the parameters (3): what is used "
    "least comes first.",
)  # fmt: skip
bank.slip("zero-order", ("(d if zero >= 3 else 1)", "(d if zero >= 9 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero >= 3 else 1)"), ("(d if zero >= 9 else 1)", "(d if zero >= 1 else 1)"))  # fmt: skip
bank.variant("zero-order", BY_PIECES, ('{"parameters": 3, "gradients": 2, "optimizer": 1}', '{"parameters": 1, "gradients": 2, "optimizer": 3}'))  # fmt: skip

bank.hint("zero-exact",
    "ZeRO 1 shards the optimizer's states over the data ranks; ZeRO 2 also shards the gradients; ZeRO 3 also the "
    "parameters.",
)  # fmt: skip
bank.slip("zero-exact", ("(d if zero >= 2 else 1)", "(d if zero == 2 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero == 1 else 1)"))  # fmt: skip
bank.slip("zero-exact", ("(d if zero >= 2 else 1)", "(d if zero > 2 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero > 1 else 1)"))  # fmt: skip
bank.variant("zero-exact", BY_PIECES, ("(d if layout.zero >= first else 1)", "(d if layout.zero == first else 1)"))

bank.hint("gathered-wrong",
    '"gathered" is one layer, which is whole for a moment in addition to the shards: its gradients with ZeRO 2 and '
    "3, and its parameters too with ZeRO 3.",
)  # fmt: skip
bank.slip("gathered-wrong", ("layer * at_once * (d > 1)", "layer * at_once / d * (d > 1)"))
bank.slip("gathered-wrong", ("layer * at_once * (d > 1)", "n * at_once * (d > 1)"))
bank.slip("gathered-wrong", ('widths["gradient"] * (zero >= 2)', 'widths["gradient"] * (zero == 2)'))
bank.slip("gathered-wrong", ('widths["gradient"] * (zero >= 2) + ', ""))
bank.slip("gathered-wrong", ("layer * at_once * (d > 1)", "0"))
bank.variant("gathered-wrong", BY_PIECES, ('(widths["gradient"] + widths["parameter"])', 'widths["parameter"]'))

bank.hint(
    "widths-changed",
    "You changed the table `widths` in the call. It belongs to the caller, and the next call reads it. Compute "
    "with its numbers, but leave them as they are.",
)
bank.slip("widths-changed", ('    everything = tokens', '    widths["cut"] /= t\n    everything = tokens'), ('widths["cut"] / t', 'widths["cut"]'))  # fmt: skip
bank.variant(
    "widths-changed", BY_RANKS, ("    full = norm *", '    widths["whole"] *= norm / cells\n    full = cells *')
)

bank.hint("zero-over-all",
    "You sharded the states over all ranks. The tensor and pipeline ranks have different parameters; only the data "
    "ranks have the same ones.",
)  # fmt: skip
bank.slip("zero-over-all", ("layout.data, layout.micro_batches", "layout.ranks, layout.micro_batches"), ("layer * at_once * (d > 1)", "layer * at_once * (layout.data > 1)"))  # fmt: skip
bank.variant("zero-over-all", BY_RANKS, ("1 / layout.data if", "1 / layout.ranks if"))

bank.hint("gathered-alone", "With one data rank nothing is sharded, so nothing has to be gathered for a moment: 0.")
bank.slip("gathered-alone", (" * (d > 1)", ""))
bank.variant("gathered-alone", BY_RANKS, ("    if layout.data > 1:", "    if layout.data:"))

bank.hint("in-flight",
    "The number of micro-batches in flight is wrong. With 1F1B it is the number of stages from this one to the "
    "last, but never more than there are micro-batches; with GPipe it is all of them.",
)  # fmt: skip
bank.slip("in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline)"))
bank.slip("in-flight", ("min(m, layout.pipeline - stage)", "layout.pipeline - stage"))
bank.slip("in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline - stage + 1)"))
bank.slip(
    "in-flight",
    (
        'm if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)',
        'min(m, layout.pipeline if layout.schedule == "GPipe" else layout.pipeline - stage)',
    ),
)
bank.slip("in-flight", ("min(m, layout.pipeline - stage)", "min(m, stage + 1)"))
bank.slip("in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline - stage - 1)"))
bank.slip("in-flight", ('m if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)', "m"))
bank.slip("in-flight", ('m if layout.schedule == "GPipe" else ', ""))
bank.variant("in-flight", BY_PIECES, ("m if m < p - stage else p - stage", "m if m < p else p"))

bank.hint(
    "cut-left-whole",
    'Activations where the heads are cut are divided among the tensor ranks: divide `widths["cut"]` by t.',
)
bank.slip("cut-left-whole", ('widths["cut"] / t', 'widths["cut"]'))
bank.variant("cut-left-whole", BY_RANKS, ("heads = cells / layout.tensor", "heads = cells"))

bank.hint(
    "widths-unread",
    "The bytes do not follow the table `widths`: it is `MIXED` in one cell, and a different table in the next.",
)
bank.slip("widths-unread", ('widths["whole"]', "10"), ('widths["cut"]', "24"), ('widths["input"]', "2"), ('widths["logit"]', "4"))  # fmt: skip
bank.slip("widths-unread", ('n * widths["parameter"]', "n * 2"), ('n * widths["gradient"]', "n * 4"), ('n * widths["optimizer"]', "n * 12"))  # fmt: skip
bank.slip("widths-unread", ("    n, layer = stage", "    widths = MIXED\n    n, layer = stage"))
bank.variant("widths-unread", BY_PIECES, ("    here, layer =", "    widths = MIXED\n    here, layer ="))

bank.hint("all-layers-kept", "A stage keeps activations only of its own layers: 1/p of the model's.")
bank.slip("all-layers-kept", ("in_flight * (model.layers // layout.pipeline)", "in_flight * model.layers"))
bank.variant("all-layers-kept", BY_RANKS, ("total += model.layers / layout.pipeline *", "total += model.layers *"))

bank.hint("whole-cut",
    "Without sequence parallelism, norms and dropouts are computed on every tensor rank, so the activations that "
    "they keep are whole, and so is a layer's input; with it, both are cut.",
)  # fmt: skip
bank.slip("whole-cut", ("t if layout.sequence_parallel else 1", "t"))
bank.slip("whole-cut", ('widths["input"] / sharing', 'widths["input"]'))
bank.slip("whole-cut", ('widths["input"] / sharing', 'widths["input"] / t'))
bank.slip("whole-cut", ("t if layout.sequence_parallel else 1", "1"))
bank.variant("whole-cut", BY_PIECES, ("norms = t if layout.sequence_parallel else 1", "norms = t"))
bank.variant(
    "whole-cut", BY_RANKS, ("norm = cells / layout.tensor if layout.sequence_parallel else cells", "norm = cells")
)

bank.hint(
    "again-forgotten",
    "While a layer is recomputed, all of its own activations are in memory: one layer's, in addition to the kept "
    "inputs.",
)
bank.slip("again-forgotten", ("+ full * everything", ""))
bank.variant("again-forgotten", BY_RANKS, ("total = full if again else 0", "total = 0"))

bank.hint("again-wrong",
    "With recomputation there are two parts: `tokens · width` numbers of `input` bytes over `whole` ranks, for "
    "each layer and each micro-batch in flight; and everything of one layer, once. One of the two is wrong, or the "
    "logits, which come on top of both on the last stage.",
)  # fmt: skip
bank.slip("again-wrong", ("full * everything", "full * (everything - kept)"))
bank.slip("again-wrong", ('widths["input"] / sharing', "1 / sharing"))
bank.slip("again-wrong", ("kept = tokens *", "kept = model.sequence *"))
bank.variant("again-wrong", BY_RANKS, ('(norm * widths["input"] if', "(norm if"))
bank.variant("again-wrong", BY_PIECES, ("flying * layers * model.width", "layers * model.width"))

bank.hint(
    "again-all",
    "Layers are recomputed one at a time: add the activations of one layer and one micro-batch to the inputs, not "
    "those of all.",
)
bank.slip("again-all", ("full * everything", "full * everything * (model.layers // layout.pipeline)"))
bank.slip("again-all", ("full * everything", "full * everything * in_flight"))
bank.variant("again-all", BY_RANKS, ("total = full if again else 0", "total = full * model.layers / layout.pipeline if again else 0"))  # fmt: skip

bank.hint(
    "logits-wrong",
    "Only the last stage has logits: those of one micro-batch, one number for each token and word, and each tensor "
    "rank has its own words.",
)
bank.slip("logits-wrong", (" * (stage == layout.pipeline - 1)\n    found[", "\n    found["))
bank.slip("logits-wrong", ('model.vocabulary / t * widths["logit"]', 'model.vocabulary * widths["logit"]'))
bank.slip("logits-wrong", (" + logits\n", "\n"))
bank.slip("logits-wrong", (" + logits\n", " + m * logits\n"))
bank.slip("logits-wrong", ("(stage == layout.pipeline - 1)\n    found[", "(stage == 0)\n    found["))
bank.slip("logits-wrong", (" + logits\n", " + in_flight * logits\n"))
bank.variant(
    "logits-wrong", BY_PIECES, ("    if stage == p - 1:\n        activations", "    if True:\n        activations")
)
bank.variant("logits-wrong", BY_RANKS, ('model.vocabulary * widths["logit"] / layout.tensor', 'model.vocabulary * widths["logit"]'))  # fmt: skip

bank.hint(
    "micro-batch-forgotten",
    "Your activations do not grow with the micro-batch. Count the tokens of all `layout.micro_batch` sequences.",
)
bank.slip("micro-batch-forgotten", ("model.sequence * layout.micro_batch, t", "model.sequence, t"))
bank.variant("micro-batch-forgotten", BY_PIECES, ("model.sequence * layout.micro_batch}", "model.sequence}"))
bank.slip("wrong-memory", ("in_flight * (model.layers // layout.pipeline) * kept", "in_flight * kept"))
