"""Answers to balise 2: what a rank holds, and one step on three axes."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 2, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# one message for all gradients of a rank; the words travel again between the ends
ONE_MESSAGE = """
def part_of(model, mesh):
    axis = mesh.pipeline
    mine = torch.arange(len(model.blocks)).tensor_split(axis.size)[axis.rank].tolist()
    layers = [SlicedBlock(model.blocks[k], mesh.tensor) for k in mine]
    first, last = axis.rank == 0, axis.rank + 1 == axis.size
    front = [Entrance(model, mesh.tensor)] if first else []
    back = [Exit(model, mesh.tensor)] if last else []
    if first and last and model.config.tied_head:
        back[0].words = front[0].words
    return Stage(front + layers + back)


def hybrid_step(part, mesh, tokens, n_micro_batches):
    share = torch.arange(len(tokens)).tensor_split(mesh.data.size)[mesh.data.rank]
    loss = run_pipeline(part, mesh, tokens[share], n_micro_batches, schedule="GPipe")
    held = [p.grad for p in part.parameters() if p.grad is not None]
    message = torch.cat([g.flatten() for g in held]) * (len(share) / len(tokens))
    dist.all_reduce(message, group=mesh.data.group)
    for g, values in zip(held, message.split([g.numel() for g in held])):
        g.copy_(values.view_as(g))
    if mesh.ends is not None and mesh.ends.size == 2:
        for p in part.parameters():
            if p.tied and p.grad is not None:
                dist.all_reduce(p.grad, group=mesh.ends.group)
    return loss
"""
bank.text(None, ONE_MESSAGE)

# the words first, then all data ranks; started together, waited for at the end; Stage by a loop over all layers
STARTED = """
def part_of(model, mesh):
    n = mesh.pipeline.size
    first = [k * n // len(model.blocks) for k in range(len(model.blocks))]  # the stage of each block, as even
    layers = []
    if mesh.pipeline.rank == 0:
        layers.append(Entrance(model, mesh.tensor))
    for k, block in enumerate(model.blocks):
        if first[k] == mesh.pipeline.rank:
            layers.append(SlicedBlock(block, mesh.tensor))
    if mesh.pipeline.rank == n - 1:
        layers.append(Exit(model, mesh.tensor))
        if model.config.tied_head and isinstance(layers[0], Entrance):
            layers[-1].words = layers[0].words
    return Stage(layers)


def hybrid_step(part, mesh, tokens, n_micro_batches):
    sizes = [len(rows) for rows in tokens.tensor_split(mesh.data.size)]
    begin = sum(sizes[: mesh.data.rank])
    mine = sizes[mesh.data.rank]
    loss = run_pipeline(part, mesh, tokens[begin : begin + mine], n_micro_batches)
    works = []
    for p in part.parameters():
        if p.grad is None:
            continue
        if p.tied and mesh.ends.size > 1:
            dist.all_reduce(p.grad, group=mesh.ends.group)
        p.grad.mul_(mine).div_(len(tokens))
        works.append(dist.all_reduce(p.grad, group=mesh.data.group, async_op=True))
    for work in works:
        work.wait()
    return loss
"""
bank.text(None, STARTED)

hint("no-stage", "part_of must return `Stage(layers)`: a list of layers, wrapped. Here: {got}.")
slip("no-stage", ("return Stage(layers)", "return nn.Sequential(*layers)"))
variant("no-stage", ONE_MESSAGE, ("return Stage(front + layers + back)", "return nn.ModuleList(front + layers + back)"))

hint("all-layers", "Every rank holds all blocks. A stage has only a part of them: `mesh.pipeline` tells which.")
slip("all-layers", ("for k in range(begin, end)]", "for k in range(len(model.blocks))]"))
variant("all-layers", ONE_MESSAGE, (".tensor_split(axis.size)[axis.rank]", ""))

hint(
    "ends-wrong",
    "Entrance and Exit are at the two ends of a pipeline: the Entrance only on its first stage, the Exit only on "
    "its last. With a single stage it has both. Here, {got}; it should hold {expected}.",
)
slip("ends-wrong", ("    if stage == 0:\n        layers.insert", "    if True:\n        layers.insert"))
slip("ends-wrong", ("if stage == 0:", "if dist.get_rank() == 0:"), ("n_stages == 1 and", "False and"))
variant(
    "ends-wrong",
    ONE_MESSAGE,
    ("axis.rank == 0, axis", "axis.rank == 0, not axis"),
    ("first and last and", "False and"),
)

hint(
    "wrong-layers",
    "The stages of a pipeline must hold each block once, in order, in shares as equal as possible: three blocks on "
    "two stages are 1 and 2, or 2 and 1. Here, {got}; it should hold {expected}.",
)
slip("wrong-layers", ("(len(model.blocks) * k // n_stages for", "(len(model.blocks) // n_stages * k for"))
slip(
    "wrong-layers",
    (
        "len(model.blocks) * k // n_stages for",
        "len(model.blocks) // n_stages * k if k < n_stages else len(model.blocks) for",
    ),
)
slip("wrong-layers", ("for k in (stage, stage + 1))", "for k in (mesh.data.rank, mesh.data.rank + 1))"))
variant("wrong-layers", STARTED, ("k * n // len(model.blocks)", "k % n"))

hint(
    "cut-elsewhere",
    "These parameters are not a part of the model that rank {rank} should hold. Layers are cut over the *tensor* "
    "ranks, and copied from the plain model as it is.",
)
slip("cut-elsewhere", ("SlicedBlock(model.blocks[k], mesh.tensor)", "SlicedBlock(model.blocks[k], mesh.data)"))
variant("cut-elsewhere", STARTED, ("Exit(model, mesh.tensor)", "Exit(model, mesh.data)"))

hint(
    "tied-twice",
    "On a pipeline of one stage, a tied head and the embedding are *one* parameter, which collects both gradients. "
    "Here the rank holds it twice, and an optimizer would make the two differ: give the Exit the Entrance's "
    "`words`.",
)
slip(
    "tied-twice",
    ("    if n_stages == 1 and model.config.tied_head:\n        layers[-1].words = layers[0].words\n", ""),
)
variant("tied-twice", ONE_MESSAGE, ("        back[0].words = front[0].words", "        pass"))

hint(
    "one-for-two",
    "This head is not tied: it has its own weight, not the embedding's. Check `model.config.tied_head`.",
)
slip("one-for-two", ("if n_stages == 1 and model.config.tied_head:", "if n_stages == 1:"))
variant("one-for-two", STARTED, ("if model.config.tied_head and isinstance", "if isinstance"))

hint(
    "whole-batch",
    "Every rank computes with the whole batch. The gradients may be right, but nothing is gained: each data rank "
    "must take its own rows, `tokens.tensor_split(mesh.data.size)[mesh.data.rank]`.",
)
slip(
    "whole-batch",
    ("tokens.tensor_split(mesh.data.size)[mesh.data.rank]", "tokens"),
    ("p.grad *= len(rows) / len(tokens)", "p.grad /= mesh.data.size"),
)
variant("whole-batch", ONE_MESSAGE, (".tensor_split(mesh.data.size)[mesh.data.rank]", ""))

hint(
    "other-rows",
    "These are not the rows of this rank. All ranks with the same data coordinate, tensor ranks and stages alike, "
    "work on the same rows; the shares differ by one row when the batch does not divide evenly.",
)
slip(
    "other-rows",
    (
        "tokens.tensor_split(mesh.data.size)[mesh.data.rank]",
        "tokens.tensor_split(dist.get_world_size())[dist.get_rank()]",
    ),
)
slip("other-rows", ("tokens.tensor_split(mesh.data.size)[mesh.data.rank]", "tokens[: len(tokens) // mesh.data.size]"))
slip("other-rows", ("(mesh.data.size)[mesh.data.rank]", "(mesh.data.size)[mesh.pipeline.rank]"))
variant("other-rows", STARTED, ("tokens[begin : begin + mine]", "tokens[begin : begin + min(sizes)]"))

hint(
    "not-in-parts",
    "The rows go through the pipeline in `n_micro_batches` parts; pass the number on to `run_pipeline`.",
)
slip("not-in-parts", ("rows, n_micro_batches)", "rows)"))
variant("not-in-parts", ONE_MESSAGE, ("n_micro_batches, schedule", "mesh.pipeline.size, schedule"))

hint(
    "ranks-waiting",
    "The ranks wait for each other, or one gave up: {error}. All ranks of a group must make the same calls, in the "
    "same order, with tensors of the same size. Without `group=` a call involves the whole world; a stage in the "
    "middle has no `words` to add.",
)
slip("ranks-waiting", ("group=mesh.ends.group", "group=mesh.pipeline.group"))
slip(
    "ranks-waiting",
    ("            dist.all_reduce(p.grad, group=mesh.data.group)\n", "            dist.all_reduce(p.grad)\n"),
)
variant("ranks-waiting", STARTED, ("group=mesh.ends.group", "group=mesh.pipeline.group"))

hint(
    "no-ends-here",
    "{what}: a stage in the middle of a pipeline is not one of its ends, and its `mesh.ends` is None.",
)
slip("no-ends-here", ("if p.tied and mesh.pipeline.size > 1:", "if mesh.ends.size > 1 and p.tied:"))
variant(
    "no-ends-here",
    STARTED,
    ("if p.tied and mesh.ends.size > 1:", "if len(dist.get_process_group_ranks(mesh.ends.group)) > 1 and p.tied:"),
)

hint(
    "blocks-whole",
    "A stage holds whole blocks ({what}). Cut each one over the tensor ranks: SlicedBlock(block, mesh.tensor).",
)
slip("blocks-whole", ("SlicedBlock(model.blocks[k], mesh.tensor)", "model.blocks[k]"))
variant("blocks-whole", STARTED, ("layers.append(SlicedBlock(block, mesh.tensor))", "layers.append(block)"))

hint("gradient-none", "A frozen parameter has `p.grad` None ({what}). Leave it out, in the same way on all ranks.")
slip("gradient-none", ("if p.grad is not None:", "if True:"))
variant(
    "gradient-none",
    ONE_MESSAGE,
    ("held = [p.grad for p in part.parameters() if p.grad is not None]", "held = [p.grad for p in part.parameters()]"),
)

hint(
    "frozen-filled",
    "A frozen parameter had no gradient, but has one now: with weight decay an optimizer would move it. None must "
    "stay None.",
)
slip(
    "frozen-filled",
    (
        "        if p.grad is not None:\n",
        "        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n        if True:\n",
    ),
)
variant(
    "frozen-filled",
    STARTED,
    (
        "        if p.grad is None:\n            continue\n",
        "        if p.grad is None:\n            p.grad = p.detach() * 0\n",
    ),
)

hint(
    "data-silent",
    "The gradients are only those of this data rank's rows. Each data rank saw different rows: add up over "
    "`mesh.data.group`.",
)
slip(
    "data-silent",
    ("            dist.all_reduce(p.grad, group=mesh.data.group)\n", ""),
    ("            p.grad *= len(rows) / len(tokens)\n", ""),
)
slip("data-silent", ("            dist.all_reduce(p.grad, group=mesh.data.group)\n", ""))
variant("data-silent", ONE_MESSAGE, ("        g.copy_(values.view_as(g))", "        g = values.view_as(g)"))

hint(
    "data-summed",
    "You added up the means of the data ranks: the result is too large by their number. Weight each mean by its "
    "rows over all rows.",
)
slip("data-summed", ("            p.grad *= len(rows) / len(tokens)\n", ""))
variant("data-summed", STARTED, ("        p.grad.mul_(mine).div_(len(tokens))\n", ""))

hint(
    "shares-alike",
    "The gradients are right when the batch divides evenly, but wrong when it does not: shares of 5 and 4 rows "
    "count the same. Weight each mean by its rows over all rows.",
)
slip("shares-alike", ("p.grad *= len(rows) / len(tokens)", "p.grad /= mesh.data.size"))
variant("shares-alike", ONE_MESSAGE, ("* (len(share) / len(tokens))", "/ mesh.data.size"))

hint(
    "tied-apart",
    "The first and the last stage each hold a copy of the tied words, and each copy has only the gradient of its "
    "own use. The weight's gradient is their sum, over `mesh.ends`; without it, the copies drift apart.",
)
slip(
    "tied-apart",
    (
        "            if p.tied and mesh.pipeline.size > 1:\n                dist.all_reduce(p.grad, group=mesh.ends.group)\n",
        "",
    ),
)
variant("tied-apart", STARTED, ("            dist.all_reduce(p.grad, group=mesh.ends.group)", "            pass"))

hint(
    "tied-averaged",
    "The tied words' gradient is the *sum* of their two uses, but yours is about half of it: "
    "the weight is used twice, and each share counts once.",
)
slip("tied-averaged", ("group=mesh.ends.group)", "group=mesh.ends.group)\n                p.grad /= 2"))
variant("tied-averaged", STARTED, ("group=mesh.ends.group)", "group=mesh.ends.group)\n            p.grad *= 0.5"))

hint(
    "summed-over-tensor",
    "You added up the gradients over the tensor ranks. These ranks hold different parts, and what they hold in "
    "common already has the same gradient on all of them.",
)
slip(
    "summed-over-tensor",
    ("            if p.tied", "            dist.all_reduce(p.grad, group=mesh.tensor.group)\n            if p.tied"),
)
slip(
    "summed-over-tensor",
    (
        "            if p.tied",
        "            if not p.cut:\n                dist.all_reduce(p.grad, group=mesh.tensor.group)\n            if p.tied",
    ),
)
variant(
    "summed-over-tensor",
    ONE_MESSAGE,
    ("    for g, values", "    dist.all_reduce(message, group=mesh.tensor.group)\n    for g, values"),
)

hint(
    "untied-summed",
    "This head is not tied: embedding and head are two weights, and their gradients stay separate. Check `p.tied`.",
)
slip(
    "untied-summed",
    (
        "    for p in part.parameters():\n",
        "    words = {id(layer.words) for layer in part if hasattr(layer, 'words')}\n    for p in part.parameters():\n",
    ),
    ("if p.tied and", "if id(p) in words and"),
)
variant("untied-summed", STARTED, ("if p.tied and", "if any(p is getattr(layer, 'words', None) for layer in part) and"))

hint(
    "weighted-late",
    "Each mean needs the weight of its *own* rows, before you add up over the data ranks. Here their sum is "
    "weighted by the rows of the rank that holds it.",
)
slip(
    "weighted-late",
    ("            p.grad *= len(rows) / len(tokens)\n", ""),
    ("group=mesh.data.group)\n", "group=mesh.data.group)\n            p.grad *= len(rows) / len(tokens)\n"),
)
variant(
    "weighted-late",
    ONE_MESSAGE,
    (" * (len(share) / len(tokens))", ""),
    ("        g.copy_(values.view_as(g))", "        g.copy_(values.view_as(g) * (len(share) / len(tokens)))"),
)

hint(
    "divided-by-parts",
    "The gradients are too small by the number of micro-batches: `run_pipeline` has already averaged over them.",
)
slip("divided-by-parts", ("len(rows) / len(tokens)", "len(rows) / len(tokens) / n_micro_batches"))
variant("divided-by-parts", STARTED, ("div_(len(tokens))", "div_(len(tokens) * n_micro_batches)"))

hint("wrong-gradient", "The gradients differ from those of one process with the whole batch.")
slip("wrong-gradient", ("p.grad *= len(rows) / len(tokens)", "p.grad *= len(rows)"))
slip("wrong-gradient", ("if p.tied and", "if p.tied and mesh.tensor.rank == 0 and"))
slip("wrong-gradient", ("if p.tied and", "if p.tied and mesh.tensor.size == 1 and"))
slip("wrong-gradient", ("len(rows) / len(tokens)", "len(rows) / len(tokens) ** 2"))
variant("wrong-gradient", STARTED, ("div_(len(tokens))", "div_(len(tokens) ** 2)"))

hint(
    "strided-rows",
    "This is the loss of different rows. Data rank 0 takes the first rows of the batch, in one piece, and so on: "
    "use `tokens.tensor_split`.",
)
slip(
    "strided-rows",
    ("tokens.tensor_split(mesh.data.size)[mesh.data.rank]", "tokens[mesh.data.rank :: mesh.data.size]"),
)
variant(
    "strided-rows",
    ONE_MESSAGE,
    (
        "torch.arange(len(tokens)).tensor_split(mesh.data.size)[mesh.data.rank]",
        "list(range(mesh.data.rank, len(tokens), mesh.data.size))",
    ),
)

hint(
    "wrong-step-loss",
    "Return what `run_pipeline` returns: the mean loss of this pipeline's rows on its last stage, None elsewhere. "
    "The sum over the grid comes next.",
)
slip("wrong-step-loss", ("return loss", "return None if loss is None else loss * len(rows) / len(tokens)"))
slip("wrong-step-loss", ("return loss", "return 0.0 if loss is None else loss"))
variant("wrong-step-loss", ONE_MESSAGE, ("return loss", "return None if loss is None else loss * mesh.data.size"))

bank.edge(
    "frozen-filled",
    "one-for-two",
    "shares-alike",
    "tied-apart",
    "tied-averaged",
    "tied-twice",
    "untied-summed",
    "weighted-late",
)
