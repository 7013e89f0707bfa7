"""Answers to balise 4: the parameters and the bytes of a rank."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", whole=True)

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
bank.text(4, None, BY_PIECES)

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
bank.text(4, None, BY_RANKS)

bank.slip(4, "nothing-returned", ("    return found\n", "    pass\n"))

bank.hint(4, "planner-called", "The planner already has `{name}`. Here you write it yourself: counting by hand is "
                               "the point.")
bank.text(4, "planner-called", BY_PIECES.replace("    return [total, layer]", "    return planner.stage_parameters(model, layout, stage)[:2]"))  # fmt: skip
bank.variant(4, "planner-called", BY_RANKS, ("    n, one = stage_parameters(model, layout, stage)", "    n, one = stage_parameters(model, layout, stage)\n    held = planner.rank_memory(model, layout, stage)"))  # fmt: skip

bank.hint(
    4, "stage-form", "`stage_parameters` must return two numbers: the parameters of the whole stage, and of one of "
                     "its layers. You returned {got}."
)
bank.slip(4, "stage-form", ("+ ends, layer\n", "+ ends\n"))
bank.variant(4, "stage-form", BY_PIECES, ("return [total, layer]", "return total"))

bank.hint(
    4,
    "memory-form",
    'Return a dict with "parameters", "gradients", "optimizer", "gathered" and "activations", always all five.',
)
bank.slip(4, "memory-form", ("    return found\n", "    return sum(found.values())\n"))
bank.slip(4, "memory-form", ('    found["gathered"] = layer * at_once * (d > 1)\n', ""))
bank.variant(4, "memory-form", BY_RANKS, ("optimizer=n", "states=n"))

bank.hint(4, "wrong-parameters", "{where}: you count {got} parameters, but {expected} are expected. A layer has "
                                 "(12 h² + 7 h) / t + 6 h on a rank; a stage has `layers / pipeline` layers, and "
                                 "its ends.")
bank.slip(4, "wrong-parameters", ("12 * h * h", "8 * h * h"))
bank.slip(4, "wrong-parameters", ('n * widths["parameter"] / (d', 'n / t * widths["parameter"] / (d'))
bank.variant(4, "wrong-parameters", BY_PIECES, ("(3 * h, h), (3 * h,), (h, h)", "(3 * h, h), (3 * h,)"))

bank.hint(
    4, "all-cut",
    "You divided everything by the tensor ranks. The norms, and the biases that are added after a sum, are whole "
    "on each rank: 6 h of a layer.",
)  # fmt: skip
bank.slip(4, "all-cut", ("(12 * h * h + 7 * h) / t + 6 * h", "(12 * h * h + 13 * h) / t"))
bank.variant(4, "all-cut", BY_PIECES, ("/ t + 6 * h", "/ t + 6 * h / t"))

bank.hint(
    4, "layers-undivided", "You counted all layers of the model. Any stage has only `layers / pipeline` of them, "
                           "plus its ends."
)  # fmt: skip
bank.slip(4, "layers-undivided", ("return model.layers // layout.pipeline * layer", "return model.layers * layer"))
bank.variant(4, "layers-undivided", BY_PIECES, ("for _ in range(model.layers // p))", "for _ in range(model.layers))"))

bank.hint(
    4, "ends-wrong",
    "The layers are right, but the rest is not. First stage: words (cut), positions (whole). Last stage: words "
    "(cut), the last norm's 2 h (whole).",
)  # fmt: skip
bank.slip(4, "ends-wrong", (" + model.sequence * h * first", " + model.sequence * h / t * first"))
bank.slip(4, "ends-wrong", (" + model.sequence * h * first", ""))
bank.slip(4, "ends-wrong", (" + 2 * h * last", ""))
bank.slip(4, "ends-wrong", (" + 2 * h * last", " + 2 * h / t * last"))
bank.variant(4, "ends-wrong", BY_PIECES, ("        total += 2 * h\n", "        total += 0\n"))

bank.hint(4, "pair-swapped", "The two numbers are swapped: first the whole stage's parameters, then one layer's.")
bank.slip(4, "pair-swapped", ("return model.layers // layout.pipeline * layer + ends, layer", "return layer, model.layers // layout.pipeline * layer + ends"))  # fmt: skip
bank.variant(4, "pair-swapped", BY_PIECES, ("return [total, layer]", "return [layer, total]"))

bank.hint(
    4, "layer-cut-wrong",
    "With tensor ranks, your count of a layer's parameters is wrong: 12 h² + 7 h of them are cut over the ranks, 6 "
    "h are whole on each.",
)  # fmt: skip
bank.slip(4, "layer-cut-wrong", ("(12 * h * h + 7 * h) / t + 6 * h", "12 * h * h / t + 13 * h"))
bank.slip(4, "layer-cut-wrong", ("(12 * h * h + 7 * h) / t + 6 * h", "12 * h * h + 13 * h"))
bank.variant(4, "layer-cut-wrong", BY_PIECES, ("/ t + 6 * h", "/ t**2 + 6 * h"))

bank.hint(4, "words-whole", "You left the word matrix whole: it is cut over the tensor ranks too.")
bank.slip(4, "words-whole", ("model.vocabulary * h / t *", "model.vocabulary * h *"))
bank.variant(4, "words-whole", BY_RANKS, ("model.vocabulary * h\n", "model.vocabulary * h * layout.tensor\n"))

bank.hint(
    4, "head-forgotten", "The last stage also has the words: its head is a copy of the embedding, of the same size."
)
bank.slip(4, "head-forgotten", ("* (first or last)", "* first"))
bank.variant(4, "head-forgotten", BY_PIECES, ("stage in (0, p - 1)", "stage == 0"))

bank.hint(4, "words-twice", "When one stage is both the first and the last, embedding and head are one matrix, "
                            "held once.")
bank.slip(4, "words-twice", ("(first or last)", "(first + last)"))
bank.variant(4, "words-twice", BY_PIECES, ("    if stage == p - 1:\n        total += 2 * h", "    if stage == p - 1:\n        total += 2 * h + (p == 1) * model.vocabulary * h / t"))  # fmt: skip

bank.hint(
    4, "ends-everywhere", "You counted words, positions and the last norm on stages in the middle, which have only "
                          "layers."
)
bank.slip(4, "ends-everywhere", ("(first or last)", "1"), ("* h * first + 2 * h * last", "* h + 2 * h"))
bank.slip(4, "ends-everywhere", ("(first or last)", "1"))
bank.slip(4, "ends-everywhere", ("2 * h * last", "2 * h"))
bank.variant(4, "ends-everywhere", BY_PIECES, ("    if stage in (0, p - 1):", "    if True:"))

bank.hint(4, "wrong-memory", "{where}: you count {got} bytes, but {expected} are expected. How many ranks share "
                             "this part, and for how many layers and micro-batches is it kept?")
bank.slip(4, "wrong-memory", ("min(m, layout.pipeline - stage)", "1"))

bank.variant(4, "in-flight", BY_PIECES, ("p - stage\n", "p\n"), ("flying = m if", "flying = 1 if"))
bank.variant(4, "wrong-memory", BY_PIECES, ("activations = flying * layers * token", "activations = flying * token"))

bank.hint(
    4, "zero-order",
    "ZeRO shards the optimizer's states first (1), then the gradients (2), then the parameters (3): what is used "
    "least comes first.",
)  # fmt: skip
bank.slip(4, "zero-order", ("(d if zero >= 3 else 1)", "(d if zero >= 9 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero >= 3 else 1)"), ("(d if zero >= 9 else 1)", "(d if zero >= 1 else 1)"))  # fmt: skip
bank.variant(4, "zero-order", BY_PIECES, ('{"parameters": 3, "gradients": 2, "optimizer": 1}', '{"parameters": 1, "gradients": 2, "optimizer": 3}'))  # fmt: skip

bank.hint(
    4, "zero-exact",
    "ZeRO 1 shards the optimizer's states over the data ranks; ZeRO 2 also shards the gradients; ZeRO 3 also the "
    "parameters.",
)  # fmt: skip
bank.slip(4, "zero-exact", ("(d if zero >= 2 else 1)", "(d if zero == 2 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero == 1 else 1)"))  # fmt: skip
bank.slip(4, "zero-exact", ("(d if zero >= 2 else 1)", "(d if zero > 2 else 1)"), ("(d if zero >= 1 else 1)", "(d if zero > 1 else 1)"))  # fmt: skip
bank.variant(4, "zero-exact", BY_PIECES, ("(d if layout.zero >= first else 1)", "(d if layout.zero == first else 1)"))

bank.hint(
    4, "gathered-wrong",
    '"gathered" is one layer, which is whole for a moment in addition to the shards: its gradients with ZeRO 2 and '
    "3, and its parameters too with ZeRO 3.",
)  # fmt: skip
bank.slip(4, "gathered-wrong", ("layer * at_once * (d > 1)", "layer * at_once / d * (d > 1)"))
bank.slip(4, "gathered-wrong", ("layer * at_once * (d > 1)", "n * at_once * (d > 1)"))
bank.slip(4, "gathered-wrong", ('widths["gradient"] * (zero >= 2)', 'widths["gradient"] * (zero == 2)'))
bank.slip(4, "gathered-wrong", ('widths["gradient"] * (zero >= 2) + ', ""))
bank.slip(4, "gathered-wrong", ("layer * at_once * (d > 1)", "0"))
bank.variant(4, "gathered-wrong", BY_PIECES, ('(widths["gradient"] + widths["parameter"])', 'widths["parameter"]'))

bank.hint(
    4,
    "widths-changed",
    "You changed the table `widths` in the call. It belongs to the caller, and the next call reads it. Compute "
    "with its numbers, but leave them as they are.",
)
bank.slip(4, "widths-changed", ('    everything = tokens', '    widths["cut"] /= t\n    everything = tokens'), ('widths["cut"] / t', 'widths["cut"]'))  # fmt: skip
bank.variant(
    4, "widths-changed", BY_RANKS, ("    full = norm *", '    widths["whole"] *= norm / cells\n    full = cells *')
)

bank.hint(
    4, "zero-over-all",
    "You sharded the states over all ranks. The tensor and pipeline ranks have different parameters; only the data "
    "ranks have the same ones.",
)  # fmt: skip
bank.slip(4, "zero-over-all", ("layout.data, layout.micro_batches", "layout.ranks, layout.micro_batches"), ("layer * at_once * (d > 1)", "layer * at_once * (layout.data > 1)"))  # fmt: skip
bank.variant(4, "zero-over-all", BY_RANKS, ("1 / layout.data if", "1 / layout.ranks if"))

bank.hint(
    4, "gathered-alone", "With one data rank nothing is sharded, so nothing has to be gathered for a moment: 0."
)
bank.slip(4, "gathered-alone", (" * (d > 1)", ""))
bank.variant(4, "gathered-alone", BY_RANKS, ("    if layout.data > 1:", "    if layout.data:"))

bank.hint(
    4, "in-flight",
    "The number of micro-batches in flight is wrong. With 1F1B it is the number of stages from this one to the "
    "last, but never more than there are micro-batches; with GPipe it is all of them.",
)  # fmt: skip
bank.slip(4, "in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline)"))
bank.slip(4, "in-flight", ("min(m, layout.pipeline - stage)", "layout.pipeline - stage"))
bank.slip(4, "in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline - stage + 1)"))
bank.slip(4, "in-flight", ('m if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)', 'min(m, layout.pipeline if layout.schedule == "GPipe" else layout.pipeline - stage)'))
bank.slip(4, "in-flight", ("min(m, layout.pipeline - stage)", "min(m, stage + 1)"))
bank.slip(4, "in-flight", ("min(m, layout.pipeline - stage)", "min(m, layout.pipeline - stage - 1)"))
bank.slip(4, "in-flight", ('m if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)', "m"))
bank.slip(4, "in-flight", ('m if layout.schedule == "GPipe" else ', ""))
bank.variant(4, "in-flight", BY_PIECES, ("m if m < p - stage else p - stage", "m if m < p else p"))

bank.hint(
    4,
    "cut-left-whole",
    'Activations where the heads are cut are divided among the tensor ranks: divide `widths["cut"]` by t.',
)
bank.slip(4, "cut-left-whole", ('widths["cut"] / t', 'widths["cut"]'))
bank.variant(4, "cut-left-whole", BY_RANKS, ("heads = cells / layout.tensor", "heads = cells"))

bank.hint(
    4, "widths-unread", "The bytes do not follow the table `widths`: it is `MIXED` in one cell, and a different "
                        "table in the next."
)
bank.slip(4, "widths-unread", ('widths["whole"]', "10"), ('widths["cut"]', "24"), ('widths["input"]', "2"), ('widths["logit"]', "4"))  # fmt: skip
bank.slip(4, "widths-unread", ('n * widths["parameter"]', "n * 2"), ('n * widths["gradient"]', "n * 4"), ('n * widths["optimizer"]', "n * 12"))  # fmt: skip
bank.slip(4, "widths-unread", ("    n, layer = stage", "    widths = MIXED\n    n, layer = stage"))
bank.variant(4, "widths-unread", BY_PIECES, ("    here, layer =", "    widths = MIXED\n    here, layer ="))

bank.hint(4, "all-layers-kept", "A stage keeps activations only of its own layers: 1/p of the model's.")
bank.slip(4, "all-layers-kept", ("in_flight * (model.layers // layout.pipeline)", "in_flight * model.layers"))
bank.variant(4, "all-layers-kept", BY_RANKS, ("total += model.layers / layout.pipeline *", "total += model.layers *"))

bank.hint(
    4, "whole-cut",
    "Without sequence parallelism, norms and dropouts are computed on every tensor rank, so the activations that "
    "they keep are whole, and so is a layer's input; with it, both are cut.",
)  # fmt: skip
bank.slip(4, "whole-cut", ("t if layout.sequence_parallel else 1", "t"))
bank.slip(4, "whole-cut", ('widths["input"] / sharing', 'widths["input"]'))
bank.slip(4, "whole-cut", ('widths["input"] / sharing', 'widths["input"] / t'))
bank.slip(4, "whole-cut", ("t if layout.sequence_parallel else 1", "1"))
bank.variant(4, "whole-cut", BY_PIECES, ("norms = t if layout.sequence_parallel else 1", "norms = t"))
bank.variant(
    4, "whole-cut", BY_RANKS, ("norm = cells / layout.tensor if layout.sequence_parallel else cells", "norm = cells")
)

bank.hint(
    4,
    "again-forgotten",
    "While a layer is recomputed, all of its own activations are in memory: one layer's, in addition to the kept "
    "inputs.",
)
bank.slip(4, "again-forgotten", ("+ full * everything", ""))
bank.variant(4, "again-forgotten", BY_RANKS, ("total = full if again else 0", "total = 0"))

bank.hint(
    4, "again-wrong",
    "With recomputation there are two parts: `tokens · width` numbers of `input` bytes over `whole` ranks, for "
    "each layer and each micro-batch in flight; and everything of one layer, once. One of the two is wrong, or the "
    "logits, which come on top of both on the last stage.",
)  # fmt: skip
bank.slip(4, "again-wrong", ("full * everything", "full * (everything - kept)"))
bank.slip(4, "again-wrong", ('widths["input"] / sharing', "1 / sharing"))
bank.slip(4, "again-wrong", ("kept = tokens *", "kept = model.sequence *"))
bank.variant(4, "again-wrong", BY_RANKS, ('(norm * widths["input"] if', "(norm if"))
bank.variant(4, "again-wrong", BY_PIECES, ("flying * layers * model.width", "layers * model.width"))

bank.hint(
    4,
    "again-all",
    "Layers are recomputed one at a time: add the activations of one layer and one micro-batch to the inputs, not "
    "those of all.",
)
bank.slip(4, "again-all", ("full * everything", "full * everything * (model.layers // layout.pipeline)"))
bank.slip(4, "again-all", ("full * everything", "full * everything * in_flight"))
bank.variant(4, "again-all", BY_RANKS, ("total = full if again else 0", "total = full * model.layers / layout.pipeline if again else 0"))  # fmt: skip

bank.hint(
    4,
    "logits-wrong",
    "Only the last stage has logits: those of one micro-batch, one number for each token and word, and each tensor "
    "rank has its own words.",
)
bank.slip(4, "logits-wrong", (" * (stage == layout.pipeline - 1)\n    found[", "\n    found["))
bank.slip(4, "logits-wrong", ('model.vocabulary / t * widths["logit"]', 'model.vocabulary * widths["logit"]'))
bank.slip(4, "logits-wrong", (" + logits\n", "\n"))
bank.slip(4, "logits-wrong", (" + logits\n", " + m * logits\n"))
bank.slip(4, "logits-wrong", ("(stage == layout.pipeline - 1)\n    found[", "(stage == 0)\n    found["))
bank.slip(4, "logits-wrong", (" + logits\n", " + in_flight * logits\n"))
bank.variant(
    4, "logits-wrong", BY_PIECES, ("    if stage == p - 1:\n        activations", "    if True:\n        activations")
)
bank.variant(4, "logits-wrong", BY_RANKS, ('model.vocabulary * widths["logit"] / layout.tensor', 'model.vocabulary * widths["logit"]'))  # fmt: skip

bank.hint(
    4,
    "micro-batch-forgotten",
    "Your activations do not grow with the micro-batch. Count the tokens of all `layout.micro_batch` sequences.",
)
bank.slip(4, "micro-batch-forgotten", ("model.sequence * layout.micro_batch, t", "model.sequence, t"))
bank.variant(4, "micro-batch-forgotten", BY_PIECES, ("model.sequence * layout.micro_batch}", "model.sequence}"))
bank.slip(4, "wrong-memory", ("in_flight * (model.layers // layout.pipeline) * kept", "in_flight * kept"))
