"""Answers to balise 3: the gradient's norm and the loss over the grid."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 3, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# what is held t times counts 1 / t each; over the world, what is held d times 1 / d; the loss travels as a mean of the last stages
SHARED = """
def total_norm(part, mesh):
    square = 0.0
    for p in part.parameters():
        if p.grad is None:
            continue
        times = mesh.data.size * (1 if p.cut else mesh.tensor.size)
        if p.tied and mesh.pipeline.size > 1:
            times *= 2
        square = square + p.grad.double().pow(2).sum() / times
    square = torch.as_tensor(square, dtype=torch.float64)
    dist.all_reduce(square)
    return square ** 0.5


def total_loss(loss, n_rows, mesh):
    last = mesh.pipeline.rank == mesh.pipeline.size - 1
    told = torch.zeros(2, dtype=torch.float64)
    if last:
        told += torch.tensor([float(loss), 1.0], dtype=torch.float64) * n_rows
    dist.all_reduce(told)
    return told[0] / told[1]
"""
bank.text(None, SHARED)

# norms of norms; the loss in a list of all ranks
GATHERED = """
def total_norm(part, mesh):
    mine = [p for p in part.parameters() if p.grad is not None]
    mine = [p for p in mine if p.cut or mesh.tensor.rank == mesh.tensor.size - 1]
    mine = [p for p in mine if not p.tied or mesh.pipeline.rank == 0]
    norm = torch.tensor([torch.linalg.vector_norm(p.grad) for p in mine], dtype=torch.float64).norm()
    for axis in (mesh.pipeline, mesh.tensor):
        parts = [torch.zeros_like(norm) for _ in range(axis.size)]
        dist.all_gather(parts, norm, group=axis.group)
        norm = torch.stack(parts).norm()
    return norm


def total_loss(loss, n_rows, mesh):
    mine = (mesh.data.rank, float(loss), n_rows) if loss is not None else None
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    found = {one[0]: one[1:] for one in found if one is not None}
    total = sum(loss * rows for loss, rows in found.values()) / sum(rows for _, rows in found.values())
    return torch.tensor(total, dtype=torch.float64)
"""
bank.text(None, GATHERED)

hint(
    "number-missing",
    "Every rank needs the number as a tensor, but rank {ranks} returned {got}. All ranks clip by the norm, and all "
    "may print the loss; `.item()` makes each one wait for its GPU.",
)
slip("number-missing", ("return square.sqrt()", "return square.sqrt() if dist.get_rank() == 0 else None"))
slip("number-missing", ("return sums[0] / sums[1]", "return sums[0] / sums[1] if known else None"))
slip("number-missing", ("return square.sqrt()", "return square.sqrt().item()"))
slip("number-missing", ("return sums[0] / sums[1]", "return (sums[0] / sums[1]).item()"))
variant("number-missing", GATHERED, ("return torch.tensor(total, dtype=torch.float64)", "return total"))
variant("number-missing", GATHERED, ("    found = {one", "    if loss is None:\n        return None\n    found = {one"))

hint(
    "stage-norm",
    "This is the norm of what one rank holds, or one stage. The others hold other layers, whose squares count too; "
    "clipping by it would scale each part of the model by a different factor.",
)
slip(
    "stage-norm",
    (
        "    dist.all_reduce(square, group=mesh.tensor.group)\n    dist.all_reduce(square, group=mesh.pipeline.group)\n",
        "",
    ),
)
slip("stage-norm", ("    dist.all_reduce(square, group=mesh.pipeline.group)\n", ""))
slip(
    "stage-norm",
    (
        "    dist.all_reduce(square, group=mesh.pipeline.group)\n",
        "    if mesh.ends:\n        dist.all_reduce(square, group=mesh.ends.group)\n",
    ),
)
slip(
    "stage-norm",
    (
        "return square.sqrt()",
        "return nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None])",
    ),
)
variant("stage-norm", GATHERED, ("for axis in (mesh.pipeline, mesh.tensor)", "for axis in (mesh.tensor,)"))

hint(
    "tensor-left-out",
    "You did not add up the squares over the tensor ranks, which hold different parts of each matrix.",
)
slip("tensor-left-out", ("    dist.all_reduce(square, group=mesh.tensor.group)\n", ""))
variant(
    "tensor-left-out",
    GATHERED,
    ("for axis in (mesh.pipeline, mesh.tensor)", "for axis in (mesh.pipeline,)"),
    ("== mesh.tensor.size - 1", "== 0"),
)

hint(
    "whole-counted-often",
    "The parameters that every tensor rank holds whole, norms and biases after a sum, were counted once on each "
    "rank. Check `p.cut`.",
)
slip("whole-counted-often", ("(not p.cut and mesh.tensor.rank > 0) or ", ""))
variant("whole-counted-often", SHARED, ("(1 if p.cut else mesh.tensor.size)", "1"))

hint(
    "cut-dropped",
    "Parts that only *one* tensor rank has were left out on the others. Count each parameter once: the cut ones on "
    "every rank, the whole ones on a single rank.",
)
slip("cut-dropped", ("(not p.cut and mesh.tensor.rank > 0)", "mesh.tensor.rank > 0"))
variant("cut-dropped", GATHERED, ("if p.cut or mesh.tensor.rank == mesh.tensor.size - 1", "if mesh.tensor.rank == 0"))

hint(
    "tied-counted-twice",
    "The tied words are on the first and on the last stage, and you counted them on both. They are one weight.",
)
slip("tied-counted-twice", (" or (p.tied and mesh.pipeline.rank > 0)", ""))
variant("tied-counted-twice", SHARED, ("            times *= 2\n", "            pass\n"))

hint(
    "tied-dropped",
    "You counted the tied words nowhere. Leave out the copy on the last stage, not the weight itself; with one "
    "stage there is no copy.",
)
slip("tied-dropped", ("(p.tied and mesh.pipeline.rank > 0)", "p.tied"))
variant("tied-dropped", GATHERED, ("if not p.tied or mesh.pipeline.rank == 0", "if not p.tied"))

hint(
    "tied-dropped-alone",
    "With one stage the tied words are one parameter of this rank, which counts. Only with several stages is the "
    "last stage's a copy.",
)
slip(
    "tied-dropped-alone",
    ("(p.tied and mesh.pipeline.rank > 0)", "(p.tied and mesh.pipeline.rank == mesh.pipeline.size - 1)"),
)
variant(
    "tied-dropped-alone",
    GATHERED,
    ("not p.tied or mesh.pipeline.rank == 0", "not p.tied or mesh.pipeline.rank < mesh.pipeline.size - 1"),
)

hint(
    "summed-again",
    "Some squares were counted more than once. Sum over the tensor ranks and over the pipeline, which already "
    "includes its ends. Data ranks hold the *same* gradient since balise 2: count one of them.",
)
slip(
    "summed-again",
    (
        "dist.all_reduce(square, group=mesh.tensor.group)\n",
        "dist.all_reduce(square, group=mesh.tensor.group)\n    dist.all_reduce(square, group=mesh.data.group)\n",
    ),
)
slip(
    "summed-again",
    (
        "    dist.all_reduce(square, group=mesh.pipeline.group)\n",
        "    for axis in (mesh.pipeline, mesh.ends):\n        if axis:\n            dist.all_reduce(square, group=axis.group)\n",
    ),
)
variant("summed-again", SHARED, ("mesh.data.size * (1 if", "(1 if"))

hint("norms-added", "You added up norms. Add up the squares, and take the root once, at the end.")
slip(
    "norms-added",
    (
        "    dist.all_reduce(square, group=mesh.tensor.group)",
        "    square = square.sqrt()\n    dist.all_reduce(square, group=mesh.tensor.group)",
    ),
    ("return square.sqrt()", "return square"),
)
variant("norms-added", GATHERED, ("torch.stack(parts).norm()", "torch.stack(parts).sum()"))

hint("no-root", "That is the square of the norm.")
slip("no-root", ("return square.sqrt()", "return square"))
variant("no-root", SHARED, ("return square ** 0.5", "return square"))

hint(
    "norm-on-some",
    "The norm is right on rank {ranks}, but wrong on the others. Every rank needs the whole sum (`all_reduce`), "
    "and data ranks hold the same gradients: what one of them counts, all must count.",
)
slip(
    "norm-on-some",
    (
        "    dist.all_reduce(square, group=mesh.pipeline.group)",
        "    dist.reduce(square, mesh.pipeline.ranks[0], group=mesh.pipeline.group)",
    ),
)
slip("norm-on-some", ("not p.cut and mesh.tensor.rank > 0", "not p.cut and mesh.data.rank > 0"))
variant(
    "norm-on-some",
    SHARED,
    ("    dist.all_reduce(square)\n", "    dist.reduce(square, 0)\n"),
)

hint("wrong-norm", "This is not the norm of the whole model's gradient.")
slip("wrong-norm", ("p.grad.square()", "p.grad.abs()"))
slip(
    "wrong-norm",
    (
        "copy = (not p.cut and mesh.tensor.rank > 0) or (p.tied and mesh.pipeline.rank > 0)",
        "copy = not p.cut if mesh.tensor.rank > 0 else p.tied and mesh.pipeline.rank > 0",
    ),
)
slip("wrong-norm", ("(p.tied and", "(p.tied and mesh.tensor.rank == 0 and"))
variant("wrong-norm", SHARED, (".pow(2)", ".pow(3)"))

hint("norm-none", "A frozen parameter has no gradient, `p.grad` is None ({what}). It adds nothing.")
slip("norm-none", ("p.grad is not None and not copy", "not copy"))
variant("norm-none", GATHERED, (" if p.grad is not None]", "]"))

hint(
    "gradients-changed",
    "The gradients have changed after the call. The function only measures; clipping comes later.",
)
slip(
    "gradients-changed",
    (
        "return square.sqrt()",
        "for p in part.parameters():\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n    return square.sqrt()",
    ),
)
variant(
    "gradients-changed",
    SHARED,
    (
        "    return square ** 0.5",
        "    for p in part.parameters():\n        if p.grad is not None:\n            p.grad /= square ** 0.5\n    return square ** 0.5",
    ),
)

hint(
    "totals-waiting",
    "The ranks wait for each other, or one gave up: {error}. Ranks without a loss or without tied words must call "
    "the same collectives as the others, with tensors of the same size and dtype: they add 0.",
)
slip(
    "totals-waiting",
    (
        "    dist.all_reduce(sums, group=mesh.data.group)\n    dist.all_reduce(sums, group=mesh.pipeline.group)",
        "    if known:\n        dist.all_reduce(sums, group=mesh.data.group)\n        dist.all_reduce(sums, group=mesh.pipeline.group)",
    ),
)
variant("totals-waiting", SHARED, ("    dist.all_reduce(told)", "    if last:\n        dist.all_reduce(told)"))

hint("loss-none", "Only the last stage has a loss; the others are given None ({what}). They add 0, for 0 rows.")
slip("loss-none", (" if known else [0, 0]", ""))
variant("loss-none", GATHERED, (" if loss is not None else None", ""))

hint("share-loss", "This is the loss of one data rank's rows. The others saw different rows.")
slip("share-loss", ("    dist.all_reduce(sums, group=mesh.data.group)\n", ""))
variant(
    "share-loss",
    GATHERED,
    ("torch.tensor(total,", "torch.tensor(found[mesh.data.rank][0],"),
)

hint(
    "loss-alike",
    "This is the mean of the data ranks' means. It is right when their shares are equal, but here one rank has 4 "
    "rows and the other has 3.",
)
slip("loss-alike", ("[loss * n_rows, n_rows]", "[loss, 1]"))
variant("loss-alike", SHARED, ("1.0], dtype=torch.float64) * n_rows", "1.0], dtype=torch.float64)"))

hint(
    "loss-over-stages",
    "The loss is too small by the number of stages: you counted rows of stages that have no loss. (Or you divided "
    "once more by the number of data ranks, which is the same here.)",
)
slip("loss-over-stages", ("[0, 0]", "[0, n_rows]"))
variant(
    "loss-over-stages",
    SHARED,
    (
        "    if last:\n        told += torch.tensor([float(loss), 1.0], dtype=torch.float64) * n_rows\n",
        "    told += torch.tensor([float(loss or 0), 1.0], dtype=torch.float64) * n_rows\n",
    ),
)

hint("loss-summed", "The loss is a sum over ranks. Divide it by the number of rows that were added up.")
slip("loss-summed", ("[loss * n_rows, n_rows]", "[loss, 1]"), ("return sums[0] / sums[1]", "return sums[0]"))
slip("loss-summed", ("return sums[0] / sums[1]", "return sums[0]"))
variant("loss-summed", SHARED, ("told[0] / told[1]", "told[0]"))
variant("loss-summed", SHARED, ("told[0] / told[1]", "told[0] / told[1] * mesh.data.size"))

hint(
    "loss-own-rows",
    "The sum of losses times rows is right, but the divisor is not. Add up the rows too: their number differs "
    "between data ranks and between batches.",
)
slip("loss-own-rows", ("return sums[0] / sums[1]", "return sums[0] / (n_rows * mesh.data.size)"))
slip("loss-own-rows", ("return sums[0] / sums[1]", "return sums[0] / BATCH"))
variant("loss-own-rows", SHARED, ("told[0] / told[1]", "told[0] / 16"))
variant("loss-own-rows", SHARED, ("told[0] / told[1]", "told[0] / n_rows / mesh.data.size"))

hint(
    "loss-on-some",
    "The loss is right on rank {ranks}, but wrong on the others. Every rank needs the sums: those of the last "
    "stages must reach all stages, including the middle ones.",
)
slip(
    "loss-on-some",
    (
        "    dist.all_reduce(sums, group=mesh.data.group)\n",
        "    if known:\n        dist.all_reduce(sums, group=mesh.data.group)\n",
    ),
    (
        "    dist.all_reduce(sums, group=mesh.pipeline.group)\n",
        "    if mesh.ends:\n        dist.all_reduce(sums, group=mesh.ends.group)\n",
    ),
)
slip("loss-on-some", ("    dist.all_reduce(sums, group=mesh.pipeline.group)\n", ""))
variant("loss-on-some", SHARED, ("    dist.all_reduce(told)\n", "    dist.reduce(told, dist.get_world_size() - 1)\n"))

hint("wrong-loss", "This is not the mean loss of the whole batch.")
slip("wrong-loss", ("return sums[0] / sums[1]", "return sums[1] / sums[0]"))
variant("wrong-loss", SHARED, ("told[0] / told[1]", "told[1] / told[0]"))
