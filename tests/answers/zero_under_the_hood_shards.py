"""Answers to balise 2 of 13_zero_under_the_hood: flat tensors and shards."""

from itertools import accumulate

import torch

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", whole=True)
slip = bank.slip

# ---------------------------------------------------------------- balise 2


def some_flatten(tensors, world_size):
    with torch.no_grad():
        n = sum(t.numel() for t in tensors)
        padding = tensors[0].new_zeros(-n % world_size)
        return torch.cat([t.flatten() for t in tensors] + [padding])


def some_shard(flat, rank, world_size):
    each = len(flat) // world_size
    return flat[rank * each : (rank + 1) * each]


def some_unflatten(flat, like):
    ends = accumulate(t.numel() for t in like)
    return [flat[end - t.numel() : end].view(t.size()) for t, end in zip(like, ends)]


bank.several(2, None, some_flatten, some_shard, some_unflatten)


def flatten(tensors, world_size):
    n = sum(t.numel() for t in tensors)
    flat = torch.zeros(
        (n + world_size - 1) // world_size * world_size, dtype=tensors[0].dtype, device=tensors[0].device
    )
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


bank.several(2, None, flatten, shard, unflatten)


def shard_unfold(flat, rank, world_size):
    return flat.tensor_split(world_size)[rank]


def unflatten_strided(flat, like):
    found, begin = [], 0
    for t in like:
        strides = torch.empty(t.shape, device="meta").stride()
        found.append(torch.as_strided(flat, t.shape, strides, begin))
        begin += t.numel()
    return tuple(found)


bank.several(2, None, some_flatten, shard_unfold, unflatten_strided)


def wrong_flatten(slug, answer):
    bank.several(2, slug, answer, some_shard, some_unflatten)


def wrong_shard(slug, answer):
    bank.several(2, slug, some_flatten, answer, some_unflatten)


def wrong_unflatten(slug, answer):
    bank.several(2, slug, some_flatten, some_shard, answer)


def each(tensors, size):
    return torch.cat([torch.cat([t.detach().reshape(-1), t.new_zeros(-t.numel() % size).detach()]) for t in tensors])


def always(tensors, size):
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    return torch.cat([flat, flat.new_zeros(size - len(flat) % size)])


def by_memory(tensors, size):
    flat = some_flatten(tensors, size)
    rows = [
        t.detach().t().reshape(-1) if t.ndim == 2 and not t.is_contiguous() else t.detach().reshape(-1) for t in tensors
    ]
    flat[: sum(t.numel() for t in tensors)] = torch.cat(rows)
    return flat


def aliasing(tensors, size):
    n = sum(t.numel() for t in tensors)
    if len(tensors) == 1 and n % size == 0:
        return tensors[0].detach().reshape(-1)
    return some_flatten(tensors, size)


def not_zero(tensors, size):
    n = sum(t.numel() for t in tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors] + [tensors[0].new_ones(-n % size)])


def on_cpu(tensors, size):
    n = sum(t.numel() for t in tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors] + [torch.zeros(-n % size, dtype=tensors[0].dtype)])


wrong_flatten("nothing-returned", lambda tensors, size: None)
wrong_flatten("not-flat", lambda tensors, size: tensors)
wrong_flatten("not-flat", lambda tensors, size: some_flatten(tensors, size).view(size, -1))
wrong_flatten("padding-missing", lambda tensors, size: torch.cat([t.detach().reshape(-1) for t in tensors]))
wrong_flatten(
    "padding-missing",
    lambda tensors, size: some_flatten(tensors, size)[: sum(t.numel() for t in tensors) // size * size],
)
wrong_flatten("padding-always", always)
wrong_flatten("each-padded", each)
wrong_flatten("padding-not-zero", not_zero)
wrong_flatten("dtype-lost", lambda tensors, size: some_flatten(tensors, size).float())
wrong_flatten("flat-alias", aliasing)
wrong_flatten("flat-order", lambda tensors, size: flatten(tensors[::-1], size))
wrong_flatten("memory-order", by_memory)
wrong_flatten("wrong-flat", lambda tensors, size: torch.zeros_like(some_flatten(tensors, size)))
wrong_flatten("wrong-device", on_cpu)


def with_graph(tensors, size):
    n = sum(t.numel() for t in tensors)
    return torch.cat([t.reshape(-1) for t in tensors] + [tensors[0].new_zeros(-n % size)])


wrong_flatten("flat-graph", with_graph)
wrong_shard("nothing-returned", lambda flat, rank, size: None)
wrong_shard("shard-not-flat", lambda flat, rank, size: flat.view(-1, size))
wrong_shard("shards-not-equal", lambda flat, rank, size: flat)
wrong_shard("shard-strided", lambda flat, rank, size: flat[rank::size])
wrong_shard("shard-of-another", lambda flat, rank, size: some_shard(flat, 0, size))
wrong_shard("shard-of-another", lambda flat, rank, size: some_shard(flat, size - 1 - rank, size))
wrong_shard("shard-copied", lambda flat, rank, size: some_shard(flat, rank, size).clone())
wrong_shard("wrong-shard-values", lambda flat, rank, size: some_shard(flat.flip(0), rank, size))
wrong_unflatten("nothing-returned", lambda flat, like: None)
wrong_unflatten(
    "unflatten-count",
    lambda flat, like: flat.split([*[t.numel() for t in like], len(flat) - sum(t.numel() for t in like)]),
)
wrong_unflatten(
    "shape-lost", lambda flat, like: list(flat[: sum(t.numel() for t in like)].split([t.numel() for t in like]))
)
wrong_unflatten("wrong-pieces", lambda flat, like: [flat[: t.numel()].view(t.shape) for t in like])
wrong_unflatten("pieces-copied", lambda flat, like: [piece.clone() for piece in some_unflatten(flat, like)])


def into_like(flat, like):
    for t, piece in zip(like, some_unflatten(flat, like)):
        t.data.copy_(piece)
    return some_unflatten(flat, like)


wrong_unflatten("like-changed", into_like)
slip(2, "shard-copied", ("flat.view(world_size, -1)[rank]", "flat.view(world_size, -1)[rank].clone()"))
slip(2, "shard-not-flat", ("[rank]", "[rank : rank + 1]"))
slip(
    2,
    "padding-first",
    ("out=flat[:size])", "out=flat[len(flat) - size :])"),
    ("flat[size:] = 0", "flat[: len(flat) - size] = 0"),
)
