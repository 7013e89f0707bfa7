"""Answers to balise 2 of 13_zero_under_the_hood: flat tensors and shards."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 2, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

FLATTEN = """
def flatten(tensors, world_size):
    with torch.no_grad():
        n = sum(t.numel() for t in tensors)
        padding = tensors[0].new_zeros(-n % world_size)
        return torch.cat([t.flatten() for t in tensors] + [padding])
"""
SHARD = """
def shard(flat, rank, world_size):
    each = len(flat) // world_size
    return flat[rank * each : (rank + 1) * each]
"""
UNFLATTEN = """
def unflatten(flat, like):
    ends = itertools.accumulate(t.numel() for t in like)
    return [flat[end - t.numel() : end].view(t.size()) for t, end in zip(like, ends)]
"""
SOME = "import itertools\n" + FLATTEN + SHARD + UNFLATTEN
bank.text(None, SOME)


LOOP = """
def flatten(tensors, world_size):
    n = sum(t.numel() for t in tensors)
    length = (n + world_size - 1) // world_size * world_size
    flat = torch.zeros(length, dtype=tensors[0].dtype, device=tensors[0].device)
    begin = 0
    for t in tensors:
        flat[begin : begin + t.numel()] = t.detach().contiguous().view(-1)
        begin += t.numel()
    return flat


def shard(flat, rank, world_size):
    return flat.chunk(world_size)[rank]


def unflatten(flat, like):
    begin = 0
    for t in like:
        yield flat.narrow(0, begin, t.numel()).reshape(t.shape)
        begin += t.numel()
"""
bank.text(None, LOOP)


STRIDED = (
    FLATTEN
    + """
def shard(flat, rank, world_size):
    return flat.tensor_split(world_size)[rank]


def unflatten(flat, like):
    found, begin = [], 0
    for t in like:
        strides = torch.empty(t.shape, device="meta").stride()
        found.append(torch.as_strided(flat, t.shape, strides, begin))
        begin += t.numel()
    return tuple(found)
"""
)
bank.text(None, STRIDED)


NUMPY = """
def flatten(tensors, world_size):
    rows = [t.data.ravel() for t in tensors]
    return F.pad(torch.hstack(rows), (0, -sum(map(len, rows)) % world_size))


def shard(flat, rank, world_size):
    return torch.from_numpy(np.split(flat.view(torch.uint8).numpy(), world_size)[rank]).view(flat.dtype)


def unflatten(flat, like):
    rows = torch.split(flat, [t.numel() for t in like] + [len(flat) - sum(t.numel() for t in like)])
    return [row.unflatten(0, t.shape) if t.ndim else row.squeeze() for row, t in zip(rows, like)]
"""
bank.text(None, "import numpy as np\nfrom torch.nn import functional as F\n" + NUMPY)


def again(slug, *changes):
    """A variant: the answer in a loop, changed."""
    variant(slug, LOOP, *changes)


def some(slug, *changes):
    """SOME, changed; put on record."""
    code = SOME
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    bank.text(slug, code)


CAT = "torch.cat([t.flatten() for t in tensors] + [padding])"
CUT = "flat[rank * each : (rank + 1) * each]"
BACK = "[flat[end - t.numel() : end].view(t.size()) for t, end in zip(like, ends)]"
CHUNK = "flat.chunk(world_size)[rank]"
YIELD = "flat.narrow(0, begin, t.numel()).reshape(t.shape)"
ROW = "t.detach().contiguous().view(-1)"

# ---------------------------------------------------------------- flatten

some("nothing-returned", (f"return {CAT}", CAT))

hint("not-flat", "flatten() must return a single one-dimensional tensor.")
some("not-flat", (CAT, "tensors"))
some("not-flat", (CAT, CAT + ".view(world_size, -1)"))
again("not-flat", ("return flat\n", "return [flat]\n"))

hint("padding-missing", "The flat tensor has {got} elements. Zeros at the end must make its length a multiple "
                           "of world_size: {expected}.")  # fmt: skip
some("padding-missing", (" + [padding]", ""))
some("padding-missing", (CAT, CAT + "[: n // world_size * world_size]"))
again("padding-missing", ("length = (n + world_size - 1) // world_size * world_size", "length = n"))

hint(
    "padding-always",
    "The flat tensor has {got} elements, not {expected}: add no more zeros than needed, and none where the length "
    "already divides.",
)
some("padding-always", ("-n % world_size", "world_size - n % world_size"))
again("padding-always", ("(n + world_size - 1) // world_size * world_size", "(n // world_size + 1) * world_size"))

hint("each-padded", "You padded each tensor separately. Put one tensor after the other, with zeros only at the "
                       "end: otherwise every small tensor would cost a whole row.")  # fmt: skip
some(
    "each-padded",
    (CAT, "torch.cat([part for t in tensors for part in (t.flatten(), t.new_zeros(-t.numel() % world_size))])"),
)
again("each-padded", ("n = sum(t.numel() for t in tensors)", "n = sum(-(-t.numel() // world_size) * world_size for t in tensors)"),
      ("        begin += t.numel()\n    return flat\n", "        begin += t.numel() + -t.numel() % world_size\n    return flat\n"))  # fmt: skip

hint(
    "dtype-lost",
    "Tensors of {expected} came back as {got}. The flat tensor must have the dtype of the tensors in it.",
)
some("dtype-lost", (CAT, CAT + ".float()"))
again("dtype-lost", ("dtype=tensors[0].dtype, ", ""))

hint("flat-graph", "The flat tensor is part of a graph. It is memory, not a computation: build it outside autograd.")
some("flat-graph", ("torch.no_grad()", "torch.enable_grad()"))
again("flat-graph", (ROW, "t.contiguous().view(-1)"))

hint("flat-order", "The tensors are not one after the other, in the order of the list.")
some("flat-order", ("for t in tensors] + [padding]", "for t in tensors[::-1]] + [padding]"))
some("flat-order", (CAT, CAT.replace("in tensors", "in sorted(tensors, key=lambda t: t.numel())")))
again("flat-order", ("for t in tensors:", "for t in sorted(tensors, key=torch.numel, reverse=True):"))

hint(
    "memory-order",
    "A matrix came out column by column, or in the order of its memory. Its elements count row by row: use "
    "reshape(-1).",
)
some("memory-order", ("t.flatten()", "(t.t() if t.ndim == 2 and not t.is_contiguous() else t).reshape(-1)"))
some("memory-order", ("t.flatten()", "torch.as_strided(t, (t.numel(),), (1,))"))
some("memory-order", ("t.flatten()", "(t.t() if t.ndim == 2 else t).reshape(-1)"))
again("memory-order", (ROW, "(t.detach() if t.is_contiguous() else t.detach().mT).flatten()"))
again("memory-order", (ROW, "t.detach().as_strided((t.numel(),), (1,), t.storage_offset())"))
again("memory-order", (ROW, "t.detach().permute(*range(t.ndim)[::-1]).flatten()"))

hint(
    "padding-first",
    "The zeros are not at the end: the first element of the first tensor must be the first of the flat one.",
)
slip(
    "padding-first",
    ("out=flat[:size])", "out=flat[len(flat) - size :])"),
    ("flat[size:] = 0", "flat[: len(flat) - size] = 0"),
)
again("padding-first", ("begin = 0\n    for t in tensors", "begin = length - n\n    for t in tensors"))

hint(
    "wrong-flat",
    "The flat tensor does not begin with the elements of the tensors, one tensor after the other, row by row.",
)
some("wrong-flat", (CAT, f"torch.zeros_like({CAT})"))
again("wrong-flat", (ROW, ROW + ".round()"))
again("wrong-flat", ("        begin += t.numel()\n    return flat\n", "        begin += len(t) if t.ndim else 1\n    return flat\n"),
      ("flat[begin : begin + t.numel()] =", "flat[begin : begin + t.numel()] +="))  # fmt: skip

hint("padding-not-zero", "The padding is not zero. It enters sums and norms, so fill it with zeros.")
some("padding-not-zero", ("new_zeros", "new_ones"))
again("padding-not-zero", ("    return flat\n", "    flat[begin:] = flat[0]\n    return flat\n"))

hint("flat-alias", "The flat tensor shares the memory of the given tensors. It must have new memory: later "
                      "writes to it must not change the given tensors.")  # fmt: skip
some("flat-alias", (CAT, f"tensors[0].detach().reshape(-1) if len(tensors) == 1 and n % world_size == 0 else {CAT}"))
again(
    "flat-alias",
    ("= t.detach().contiguous().view(-1)", f"= {ROW}\n        t.data = flat[begin : begin + t.numel()].view(t.shape)"),
)

some("wrong-device", ("tensors[0].new_zeros(-n % world_size)", "torch.zeros(-n % world_size, dtype=tensors[0].dtype)"))
again("wrong-device", (", device=tensors[0].device", ""))
some(
    None,
    (
        "tensors[0].new_zeros(-n % world_size)",
        "torch.zeros(-n % world_size, dtype=tensors[0].dtype).to(tensors[0].device)",
    ),
)
some(
    "wrong-device",
    ("[t.flatten() for t in tensors]", "[t.flatten().cpu() for t in tensors]"),
    ("tensors[0].new_zeros(-n % world_size)", "torch.zeros(-n % world_size, dtype=tensors[0].dtype)"),
)

# ---------------------------------------------------------------- shard

some("nothing-returned", (f"return {CUT}", CUT))

hint("shard-not-flat", "A shard has the shape {found}. It must have one dimension: {due}.")
some("shard-not-flat", (CUT, "flat.view(-1, world_size)"))
slip("shard-not-flat", ("[rank]", "[rank : rank + 1]"))
again("shard-not-flat", (CHUNK, "flat.chunk(world_size)"))

hint("shards-not-equal", "A shard has the shape {found}. All shards must have the same length: {due}.")
some("shards-not-equal", (CUT, "flat"))
again("shards-not-equal", (CHUNK, "flat.chunk(world_size + 1)[rank]"))

hint("shard-strided", "A shard holds every world_size-th element. A shard is one contiguous piece of the flat "
                         "tensor, because that is what collectives send and fill.")  # fmt: skip
some("shard-strided", (CUT, "flat[rank::world_size]"))
again("shard-strided", (CHUNK, "flat.reshape(-1, world_size).t()[rank]"))

hint("shard-of-another", "A rank gets another rank's shard: rank 0 owns the first shard, rank 1 the second.")
some("shard-of-another", (CUT, "flat[:each]"))
some("shard-of-another", (CUT, "flat[len(flat) - each :]"))
some("shard-of-another", (CUT, "flat.view(world_size, each)[world_size - 1 - rank]"))
again("shard-of-another", (CHUNK, "flat.chunk(world_size)[0]"))
again("shard-of-another", (CHUNK, "flat.chunk(world_size)[-1]"))
again("shard-of-another", (CHUNK, "flat.chunk(world_size)[rank - 1]"))

hint(
    "wrong-shard-values",
    "The shards in rank order do not make up the flat tensor: the shard of rank r begins at r * n / world_size and "
    "has n / world_size elements.",
)
some("wrong-shard-values", (CUT, CUT.replace("flat[", "flat.flip(0)[")))
again("wrong-shard-values", (CHUNK, CHUNK + ".flip(0)"))
again("wrong-shard-values", (CHUNK, "flat[rank : rank + len(flat) // world_size]"))

hint(
    "shard-copied",
    "A shard is a copy. It must be a view: what the optimizer changes there must change in the flat tensor.",
)
some("shard-copied", (CUT, CUT + ".clone()"))
slip("shard-copied", ("flat.view(world_size, -1)[rank]", "flat.view(world_size, -1)[rank].clone()"))
again("shard-copied", (CHUNK, "torch.tensor(flat.tolist(), dtype=flat.dtype).chunk(world_size)[rank]"))

# ---------------------------------------------------------------- unflatten

some("nothing-returned", (f"return {BACK}", BACK))

hint("unflatten-count", "unflatten() must return one tensor for each tensor of `like`, in the same order.")
some("unflatten-count", (BACK, "flat.split([*[t.numel() for t in like], len(flat) - sum(t.numel() for t in like)])"))
again("unflatten-count", (f"yield {YIELD}", f"yield from {YIELD}"))

hint("shape-lost", "Piece {k} has the shape {found}, not {due}.")
some("shape-lost", (BACK, "list(flat[: sum(t.numel() for t in like)].split([t.numel() for t in like]))"))
again("shape-lost", (".reshape(t.shape)", ""))

hint(
    "wrong-pieces",
    "A piece does not hold its elements of the flat tensor, row by row: each piece begins where the previous one ends.",
)
some("wrong-pieces", (BACK, "[flat[: t.numel()].view(t.shape) for t in like]"))
again("wrong-pieces", ("begin += t.numel()\n", "begin += len(t) if t.ndim else 1\n"), ("flat[begin : begin + t.numel()] = ", "at = sum(u.numel() for u in tensors[: [u is t for u in tensors].index(True)])\n        flat[at : at + t.numel()] = "))  # fmt: skip

hint("like-changed", "The tensors of `like` were changed. They only give the shapes.")
some(
    "like-changed",
    (
        f"return {BACK}",
        f"found = {BACK}\n    for t, piece in zip(like, found):\n        t.data.copy_(piece)\n    return found",
    ),
)
again("like-changed", (f"yield {YIELD}", f"t.data = {YIELD}\n        yield t"))

hint(
    "pieces-copied",
    "The pieces are copies. They must be views: what arrives in the flat tensor must appear in the parameters.",
)
some("pieces-copied", ("view(t.size())", "view(t.size()).clone()"))
again("pieces-copied", (YIELD, "torch.empty_like(t).copy_(" + YIELD + ").detach()"))

bank.edge(
    "dtype-lost", "flat-alias", "flat-graph", "like-changed", "padding-always", "padding-not-zero", "wrong-device"
)

bank.edge("each-padded")
