"""Balise 2: one flat tensor, cut into equal shards, and views back into it."""

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close

HINTS = {
    "not-flat": "flatten() must return one tensor of one dimension.",
    "padding-missing": "{n} elements for {size} ranks came back as {got_n}. Zeros at the end must make the length a multiple "
    "of world_size: {due}.",
    "padding-always": "{n} elements for {size} ranks came back as {got_n}: no more zeros than needed, none where the length "
    "divides.",
    "each-padded": "Each tensor was padded by itself. One tensor after the other, and zeros at the end only: else every small "
    "tensor would cost a whole row.",
    "padding-not-zero": "The padding is not zero. It goes into sums and norms: fill it.",
    "padding-first": "The zeros are not at the end: the first element of the first tensor is the first of the flat one.",
    "dtype-lost": "Tensors of {dtype} came back as {found}. The flat tensor has the dtype of what it holds.",
    "flat-alias": "The flat tensor is the memory of what was given. It must be a new one: what is written into it later must "
    "not change the given tensors.",
    "flat-graph": "The flat tensor is part of a graph. It is memory, not a computation.",
    "flat-order": "The tensors are not one after the other, in the order of the list.",
    "memory-order": "A transposed tensor came out in the order of its memory. Its elements count row by row: reshape(-1).",
    "wrong-flat": "The elements are not those of the tensors.",
    "shards-not-equal": "The shards have {found} elements. They must be equally long.",
    "shard-not-flat": "A shard has the shape {found}. It has one dimension: ({due},).",
    "shard-strided": "Shard {rank} holds every {size}-th element. A shard is one piece of the flat tensor, without gaps: that is "
    "what collectives send and fill.",
    "shard-of-another": "Shard {rank} is the one of rank {other}.",
    "wrong-shard-values": "The shards in the order of the ranks are not the flat tensor.",
    "shard-copied": "A shard is a copy. It must be a view: what the optimizer changes there must be in the flat tensor.",
    "unflatten-count": "unflatten() must return one tensor for each of `like`, in their order.",
    "shape-lost": "Piece {k} has the shape {found}, not {due}.",
    "wrong-pieces": "Piece {k} does not hold the elements of tensor {k}: each one begins where the one before ends.",
    "pieces-copied": "The pieces are copies. They must be views: what arrives in the flat tensor must be in the parameters.",
    "like-changed": "The tensors of `like` were changed. They only tell shapes.",
}


def _lists():
    """Lists of tensors: shapes of all kinds, their values never twice the same."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + 3

    return {
        "a matrix and a vector": [some(3, 4), some(5)],
        "a single vector whose length divides": [some(12)],
        "a scalar, a vector of one, an empty one": [some(), some(1), torch.empty(0, 3), some(2, 1)],
        "one element": [some(1)],
        "a transposed matrix, a part of a table": [some(4, 3).t(), some(4, 6)[:, 1:5:2], some(2)],
        "three dimensions, float64": [some(2, 3, 2, dtype=torch.float64), some(3, dtype=torch.float64)],
        "bfloat16": [some(5, dtype=torch.bfloat16), some(2, 2, dtype=torch.bfloat16)],
        "parameters": [nn.Parameter(some(3, 3)), nn.Parameter(some(2)), nn.Parameter(some(7), requires_grad=False)],
    }


SIZES = (1, 2, 3, 4, 7)


def balise_2(flatten, shard, unflatten):
    """flatten alone, shard of a given flat tensor, unflatten of one, then all three together."""
    yield "flatten: the elements in their order, then as many zeros as needed"
    for word, tensors in _lists().items():
        for size in SIZES:
            _flat(flatten, tensors, size, f"{word}, {size} ranks")
    yield "flatten: on the device of the tensors, in a memory of its own"
    tensors = [torch.ones(3, 2), torch.ones(5)]
    try:
        with torch.device("meta"):  # what is made without a word on the device is made there
            found = flatten(tensors, 2)
    except RuntimeError as error:
        raise Wrong("wrong-device", error=str(error).split("\n")[0]) from error
    if found.device.type == "meta":
        raise Wrong("wrong-device", error="the result is not where the tensors are")
    yield "shard: equal pieces, views in the order of the ranks"
    for size in SIZES:
        for each in (3, 5, 1):
            _shards(shard, torch.arange(1.0, 1 + each * size), size)
    yield "unflatten: views with the shapes of the tensors, the padding left out"
    for word, tensors in _lists().items():
        for size in (1, 3, 4):
            _views(unflatten, tensors, size, f"{word}, {size} ranks")
    yield "all together: what one rank writes into its shard is in the tensors"
    _together(flatten, shard, unflatten)


def _flat(flatten, tensors, size, where):
    before = [t.detach().clone() for t in tensors]
    got = flatten(list(tensors), size)
    if got is None:
        raise Wrong("nothing-returned", where=where)
    if not isinstance(got, torch.Tensor) or got.ndim != 1:
        raise Wrong("not-flat", got=got if isinstance(got, torch.Tensor) else type(got).__name__, where=where)
    n = sum(t.numel() for t in before)
    due = -(-n // size) * size
    fields = {"n": n, "size": size, "due": due, "got_n": len(got), "where": where}
    if got.dtype != tensors[0].dtype:
        raise Wrong("dtype-lost", dtype=str(tensors[0].dtype), found=str(got.dtype), where=where)
    truth = torch.cat([torch.stack(list(_elements(t))) if t.numel() else t.reshape(-1) for t in before])
    if len(got) != due:
        padded = sum(-(-t.numel() // size) * size for t in before)
        if len(got) == padded and len(before) > 1:
            raise Wrong("each-padded", **fields)
        raise Wrong("padding-missing" if len(got) < due or len(got) % size else "padding-always", **fields)
    if got.requires_grad or got.grad_fn is not None:
        raise Wrong("flat-graph", where=where)
    values = got.clone()
    if not torch.equal(values[:n], truth):
        raise Wrong(_order(values, before, truth, size), expected=truth, got=values, where=where)
    if values[n:].count_nonzero():
        raise Wrong("padding-not-zero", got=values[n:], where=where)
    with torch.no_grad():
        got.fill_(77)
    if any(not torch.equal(t.detach(), b) for t, b in zip(tensors, before, strict=True)):
        with torch.no_grad():
            for t, b in zip(tensors, before, strict=True):
                t.copy_(b)
        raise Wrong("flat-alias", where=where)


def _elements(t):
    """One by one, row by row, by indices alone."""
    if t.ndim == 0:
        yield t
    else:
        for row in t:
            yield from _elements(row)


def _order(got, tensors, truth, size):
    pieces = [part for t in tensors for part in (t.reshape(-1), t.new_zeros(-t.numel() % size))]
    if close(got, torch.cat(pieces), 0.0):
        return "each-padded"
    if torch.equal(got[-len(truth) :], truth):
        return "padding-first"
    got = got[: len(truth)]
    turned = torch.cat([t.t().reshape(-1) if t.ndim == 2 else t.reshape(-1) for t in tensors])
    if torch.equal(got, turned):
        return "memory-order"
    if torch.equal(got.sort()[0], truth.sort()[0]):
        return "flat-order"
    return "wrong-flat"


def _shards(shard, flat, size):
    where = f"{len(flat)} elements, {size} ranks"
    pieces = [shard(flat, rank, size) for rank in range(size)]
    for piece in pieces:
        if not isinstance(piece, torch.Tensor):
            raise Wrong("nothing-returned" if piece is None else "not-flat", got=type(piece).__name__, where=where)
    lengths = [p.numel() for p in pieces]
    if len(set(lengths)) > 1 or lengths[0] * size != len(flat):
        raise Wrong("shards-not-equal", found=", ".join(map(str, lengths)), where=where)
    if (piece := pieces[0]).ndim != 1:
        raise Wrong("shard-not-flat", found=tuple(piece.shape), due=lengths[0], where=where)
    for rank, piece in enumerate(pieces):
        due = flat.chunk(size)[rank]
        if not close(piece, due):
            others = [k for k in range(size) if close(piece, flat.chunk(size)[k])]
            slug = "shard-of-another" if others else "wrong-shard-values"
            slug = "shard-strided" if size > 1 and close(piece, flat[rank::size]) else slug
            fields = {"rank": rank, "size": size, "other": others[0] if others else ""}
            raise Wrong(slug, expected=due, got=piece, where=where, **fields)
        if piece.data_ptr() != due.data_ptr():
            raise Wrong("shard-copied", where=where)


def _views(unflatten, tensors, size, where):
    shapes = [t.shape for t in tensors]
    n = sum(shape.numel() for shape in shapes)
    flat = torch.arange(1, 1 + -(-n // size) * size).to(tensors[0].dtype)
    before = [t.detach().clone() for t in tensors]
    got = unflatten(flat, list(tensors))
    if got is None:
        raise Wrong("nothing-returned", where=where)
    got = list(got)
    if len(got) != len(tensors) or not all(isinstance(t, torch.Tensor) for t in got):
        raise Wrong("unflatten-count", expected=len(tensors), got=len(got), where=where)
    begin = 0
    for k, (piece, shape) in enumerate(zip(got, shapes, strict=True)):
        if piece.shape != shape:
            raise Wrong("shape-lost", k=k, found=tuple(piece.shape), due=tuple(shape), where=where)
        due = flat[begin : begin + shape.numel()].reshape(shape)
        if not torch.equal(piece.detach(), due):
            raise Wrong("wrong-pieces", k=k, expected=due, got=piece, where=where)
        begin += shape.numel()
        if shape.numel() and piece.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            raise Wrong("pieces-copied", where=where)
    if any(not torch.equal(t.detach(), b) for t, b in zip(tensors, before, strict=True)):
        raise Wrong("like-changed", where=where)


def _together(flatten, shard, unflatten):
    tensors = [torch.randn(3, 5), torch.randn(5, 2).t(), torch.randn(())]
    flat = flatten(tensors, 3)
    pieces = unflatten(flat, tensors)
    for rank in range(3):
        shard(flat, rank, 3).mul_(rank + 2)
    factors = torch.arange(2.0, 5.0).repeat_interleave(len(flat) // 3)
    whole = torch.cat([torch.stack(list(_elements(t))) for t in tensors]) * factors[: sum(t.numel() for t in tensors)]
    got = torch.cat([piece.reshape(-1) for piece in pieces])
    if not close(got, whole):
        raise Wrong("pieces-copied", expected=whole, got=got, where="after each rank has multiplied its shard")
