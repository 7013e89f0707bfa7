"""Balise 2: one flat tensor, cut into equal shards, and views back into it."""

import copy
import functools

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, shape, tried, within
from dlojz_tp.judging.probes.gpus import on_one_gpu

GENERATOR = torch.Generator().manual_seed(1)


def some(*sizes, dtype=torch.float32):
    """Numbers that are not zero."""
    return (torch.rand(sizes, generator=GENERATOR) + 1).to(dtype)


LISTS = {
    "a vector and a matrix": [some(3), some(2, 3)],  # of two, each wrong order is the same one
    "a single vector": [some(12)],
    "a scalar, a vector of one element, an empty tensor": [some(), some(1), torch.empty(0, 3), some(2, 1)],
    "a transposed matrix, a part of a table": [some(4, 3).t(), some(4, 6)[:, 1:5:2], some(2)],
    "three dimensions, float64": [some(2, 3, 2, dtype=torch.float64), some(3, dtype=torch.float64)],
    "bfloat16": [some(5, dtype=torch.bfloat16), some(2, 2, dtype=torch.bfloat16)],
    "parameters": [nn.Parameter(some(3, 3)), nn.Parameter(some(2)), nn.Parameter(some(7), requires_grad=False)],
}
CASES = {f"{word}, {size} ranks": (given, size) for word, given in LISTS.items() for size in (2, 7, 1)}


def _elements(tensors):
    """(n,) in float64, row by row, by NumPy; a copy."""
    return torch.cat([torch.from_numpy(t.detach().double().numpy().ravel()) for t in tensors])


@functools.cache
def _truth(case):
    return _elements(CASES[case][0])


@functools.cache
def _flat(case):
    """As many elements as a padded flat tensor has, all different, none zero, in no order: a shift shows."""
    tensors, size = CASES[case]
    n = -(-len(_truth(case)) // size) * size
    return (torch.arange(1, 1 + n) * 37 % 101).to(tensors[0].dtype)


def _cut(case):
    """(ranks, elements of a shard)"""
    return torch.stack(_flat(case).double().chunk(CASES[case][1]))


def observe(case, flatten, shard, unflatten):
    """Each function by itself: shard and unflatten are given `_flat`. Where memory is shared, zeros show it."""
    tensors, size = copy.deepcopy(CASES[case])
    got, n = flatten(list(tensors), size), len(_truth(case))
    yield {"length": len(got) if isinstance(got, torch.Tensor) and got.ndim == 1 else form(got)}
    yield {"dtype": str(got.dtype), "graph": got.requires_grad, "values": _elements([got])[:n]}
    yield {"padding": got[n:].count_nonzero().item()}
    got.detach().zero_()
    yield {"given": torch.equal(_elements(tensors), _truth(case))}
    flat = _flat(case).clone()
    shards = [shard(flat, rank, size) for rank in range(size)]
    yield {"shards": shape(shards)}
    yield {"cut": torch.stack(shards).double()}
    flat.zero_()
    yield {"cut views": not any(map(torch.any, shards))}
    flat = _flat(case).clone()
    pieces = unflatten(flat, list(tensors))
    pieces = pieces if pieces is None else list(pieces)
    yield {"pieces": shape(pieces)}
    yield {"back": _elements(pieces), "like": torch.equal(_elements(tensors), _truth(case))}
    flat.zero_()
    yield {"back views": not any(map(torch.any, pieces))}


def _length(got, due):
    return "not-flat" if not isinstance(got, int) else "padding-missing" if got < due else "padding-always"


def _unlike(got, _):
    return "shards-not-equal" if all(isinstance(one, tuple) and len(one) == 1 for one in got) else "shard-not-flat"


def _first(got, due):
    """Fields: the first shape that is not the one due."""
    pairs = enumerate(zip(got, due))
    return next(({"k": k, "found": one, "due": other} for k, (one, other) in pairs if one != other), {})


def _shapes_due(case):
    return shape(CASES[case][0])


EXACT = within(0.0)
LOOKS = [
    Look("flatten: the elements in order, then as many zeros as needed", "length", lambda case: len(_flat(case)),
         _length),
    Look("", "dtype", lambda case: str(_flat(case).dtype), "dtype-lost"),
    Look("", "graph", False, "flat-graph"),
    Value("", "values", _truth, "wrong-flat", holds=EXACT),
    Look("", "padding", 0, "padding-not-zero"),
    Look("flatten: the result has its own memory", "given", True, "flat-alias"),
    Look("shard: equal pieces, as views, in rank order", "shards", lambda case: shape(list(_cut(case))), _unlike,
         fields=_first),
    Value("", "cut", _cut, "wrong-shard-values", holds=EXACT),
    Look("", "cut views", True, "shard-copied"),
    Look("unflatten: views with the shapes of the tensors, without the padding",
         "pieces", _shapes_due,
         lambda got, due: "shape-lost" if len(got) == len(due) else "unflatten-count", fields=_first),
    Value("", "back", lambda case: _flat(case)[: len(_truth(case))].double(), "wrong-pieces", holds=EXACT),
    Look("", "like", True, "like-changed"),
    Look("", "back views", True, "pieces-copied"),
]  # fmt: skip


def _flat_on_gpu(gpu, device, flatten):
    found = tried(flatten, [tensor.to(device) for tensor in LISTS["a vector and a matrix"]], 2)
    where = found if isinstance(found, str) else str(found.device)
    return "" if where == str(device) else where


def observe_device(flatten):
    yield {"device": on_one_gpu(_flat_on_gpu, flatten) or ""}


DEVICE = [
    Look(
        "flatten: on the device of the tensors", "device", "", "wrong-device", fields=lambda got, _: {"error": str(got)}
    )
]


def balise_2(flatten, shard, unflatten):
    for case in CASES:
        yield from judged(LOOKS, functools.partial(observe, case), flatten, shard, unflatten, at=case, where=case)
    yield from judged(DEVICE, observe_device, flatten)
