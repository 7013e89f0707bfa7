"""Balise 7: gradients clipped by their norm over the shards of all ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.zero_under_the_hood.worlds import on_ranks
from dlojz_tp.probes.operations import Operations, syncs
from dlojz_tp.probes.traffic import Traffic, volume

MAX = 1.5
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
FEW = 64  # bytes that may cross: some numbers, not the gradients

HINTS = {
    "norm-not-returned": "Return the norm before clipping, as a tensor with one number. {got} came.",
    "norm-of-own-shard": "Rank {rank} returns the norm of its own shards. The squares of all ranks have to be added up.",
    "norms-added": "Norms were added up. Lengths at right angles add up as squares: sum the squares, then take the root.",
    "norm-not-rooted": "This is the sum of the squares. The norm is its root.",
    "squares-averaged": "This is the root of the squares' mean over the ranks; shards are parts of one vector: add up.",
    "largest-norm": "This is the largest norm of a rank, or the largest element. Asked is the length of the whole vector.",
    "norm-after-clipping": "The norm that is returned is the one after clipping. Return the one before: it shows a diverging run.",
    "wrong-norm": "The norm is not that of the gradients of all ranks, laid end to end.",
    "half-overflow": "Squares of float16 gradients overflow: 300 squared is beyond 65,504. Take norms in float32.",
    "clip-lost": "The gradients did not change, though their norm is {norm:.4g} and may be {most}. Scale them in place, with mul_.",
    "new-gradients": "p.grad is another tensor now. Scale in place: a second one takes its memory once more, and whoever holds the first, "
    "as a flat buffer of all gradients does, sees nothing of it.",
    "scaled-up": "Gradients with a norm of {norm:.4g} may be up to {most} long, and were changed. Clipping never makes them longer.",
    "clipped-by-own-norm": "Rank {rank} scaled its gradients by another factor than the others: by the norm of its own shards, or "
    "of each tensor. One factor for all: the direction must stay.",
    "elements-clamped": "Single elements were cut off. That turns the gradient; scale all of it by one factor.",
    "zero-norm": "Gradients that are all zero became NaN: nothing may be divided by their norm without a guard.",
    "wrong-clip": "The gradients are not the given ones times max_norm / norm.",
    "gradients-sent": "Rank {rank} handed in {got} bytes for a norm. One number, its sum of squares, is enough.",
    "rank-left-out": "Rank {rank} has shards without a single element, and went another way than the others: {error}. It has "
    "nothing to add, but must take part in the collective all the same: the others wait for it.",
    "one-message-each": "{got} collectives for one norm. Add up over the tensors of a rank first.",
}
KNOWN = (("NoneType", "grad-is-none"),)
HINTS["grad-is-none"] = "A shard without a gradient has .grad None. Leave it out: {error}"

#        name: (sizes of the shards on rank 0; on the last rank; dtype; scale)
CASES = {
    "long gradients": ((7, 12, 1), (5, 3, 2), torch.float32, 3.0),
    "short gradients": ((4, 6), (2, 9), torch.float32, 0.01),
    "a rank without elements": ((9, 4), (0,), torch.float32, 2.0),
    "gradients of zero": ((3, 2), (4,), torch.float32, 0.0),
    "bfloat16": ((3000,), (2000, 5), torch.bfloat16, 1.0),
    "float16": ((40, 8), (30,), torch.float16, 300.0),
}


def given(case: str, rank: int, size: int) -> list[torch.Tensor]:
    """The gradients of a rank in a case."""
    first, last, dtype, scale = CASES[case]
    generator = torch.Generator().manual_seed(40 + 7 * rank + len(case))
    sizes = last if rank == size - 1 > 0 else first
    rates = 1 + 2 * rank  # ranks differ much in their norms
    return [(torch.rand(n, generator=generator, dtype=torch.float64) + 0.5).mul(scale * rates).to(dtype) for n in sizes]


def balise_7(clip_grad_norm):
    """Long, short, empty, zero and half-precision shards on 1 to 4 ranks, against the whole vector in float64."""
    yield "the norm of the shards of all ranks, as a tensor, on every rank (1, 2, 3 and 4 ranks)"
    worlds = on_ranks(_clip, clip_grad_norm, known=KNOWN)
    for case in CASES:
        for size, ranks in worlds.items():
            for rank, found in enumerate(ranks):
                _norm(case, found[case], rank, size)
    yield "one factor for all gradients, in place; short and zero ones stay as they are"
    for case in CASES:
        for size, ranks in worlds.items():
            for rank, found in enumerate(ranks):
                _clipped(case, found[case], rank, size)
    yield "one number crosses between the ranks, and none goes to Python"
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            for case in reversed(CASES):
                _cheap(found[case], rank, f"{case}, rank {rank} of {size}")


def _clip(clip_grad_norm):
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for case in CASES:
        gradients = given(case, rank, size)
        shards = [nn.Parameter(torch.ones_like(g)) for g in gradients]
        for p, g in zip(shards, gradients, strict=True):
            p.grad = g.clone()
        before = [p.grad for p in shards]
        shards.insert(1, nn.Parameter(torch.ones(2, dtype=gradients[0].dtype)))  # it has no gradient
        nothing = size > 1 and not any(g.numel() for g in gradients)
        with Traffic() as traffic, Operations() as operations:
            try:
                norm = clip_grad_norm(list(shards), MAX)
            except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
                if nothing:
                    raise _left_out(rank, size, f"{type(error).__name__}: {error}") from error
                raise
        if nothing and not traffic.calls and found["long gradients"]["calls"]:
            raise _left_out(rank, size, "it called no collective")  # at once, before the others wait in vain
        if case == "long gradients" and len(traffic.calls) == len(
            gradients
        ):  # later, ranks have other numbers of shards
            raise Wrong("one-message-each", got=len(traffic.calls), where=f"{case}, rank {rank} of {size}")
        after = [p.grad for k, p in enumerate(shards) if k != 1]
        found[case] = {
            "norm": norm.detach().clone() if isinstance(norm, torch.Tensor) else norm,
            "after": [None if g is None else g.detach().clone() for g in after],
            "new": any(a is not None and a.data_ptr() != b.data_ptr() for a, b in zip(after, before, strict=True)),
            "calls": traffic.calls,
            "syncs": syncs(operations),
            "held": sum(g.nbytes for g in gradients) + 2 * FEW,
        }
    return found


def _left_out(rank, size, error):
    where = f"a rank without elements, rank {rank} of {size}"
    return Wrong("rank-left-out", rank=rank, error=error.split("\n")[0][:160], where=where)


def _all(case, size):
    return [given(case, rank, size) for rank in range(size)]


def _length(tensors) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def _norm(case, got, rank, size):
    norm, where = got["norm"], f"{case}, rank {rank} of {size}"
    ranks = _all(case, size)
    lengths = [_length(tensors) for tensors in ranks]
    truth, dtype = math.hypot(*lengths), CASES[case][2]
    if norm is None:
        raise Wrong("nothing-returned", where=where)
    if not isinstance(norm, torch.Tensor) or norm.numel() != 1:
        if isinstance(norm, float) and got["syncs"]:
            raise Wrong("hidden-sync", error=got["syncs"][0], where=where)
        kind = f"a tensor of shape {tuple(norm.shape)}" if isinstance(norm, torch.Tensor) else type(norm).__name__
        raise Wrong("norm-not-returned", got=kind, where=where)
    value = norm.double().reshape(()).item()
    near = CLOSE[dtype]

    def is_(other, near=near):
        return math.isfinite(value) and abs(value - other) <= near * abs(other) + 1e-12

    if is_(truth):
        return
    every = [_length([t]) for tensors in ranks for t in tensors]
    elements = [t.double().abs().max().item() for tensors in ranks for t in tensors if t.numel()]
    fields = {"expected": truth, "got": norm, "where": where, "rank": rank}
    if not math.isfinite(value):
        raise Wrong("half-overflow" if dtype is torch.float16 else "wrong-norm", **fields)
    for slug, others in {
        "norm-of-own-shard": lengths[rank : rank + 1] if size > 1 else [],
        "norms-added": [sum(lengths), sum(every), sum(_length([t]) for t in ranks[rank])],
        "norm-not-rooted": [truth**2],
        "squares-averaged": [truth / math.sqrt(size), sum(lengths) / size],
        "largest-norm": [max(lengths), max(elements), max(every)],
        "norm-after-clipping": [MAX] if truth > MAX else [],
    }.items():
        if any(is_(other, 1e-4) for other in others):
            raise Wrong(slug, **fields)
    raise Wrong("wrong-norm", **fields)


def _clipped(case, got, rank, size):
    where = f"{case}, rank {rank} of {size}"
    ranks = _all(case, size)
    norm, dtype = math.hypot(*(_length(tensors) for tensors in ranks)), CASES[case][2]
    before, after, near = ranks[rank], got["after"], CLOSE[dtype]
    factor = min(1.0, MAX / norm) if norm else 1.0
    wanted = [g.double() * factor for g in before]
    fields = {"where": where, "rank": rank, "norm": norm, "most": MAX}

    def are(values):
        return all(a is not None and close(a.double(), b, near) for a, b in zip(after, values, strict=True))

    if are(wanted):
        if got["new"]:
            raise Wrong("new-gradients", **fields)
        return
    k = next(
        k for k, (a, b) in enumerate(zip(after, wanted, strict=True)) if a is None or not close(a.double(), b, near)
    )
    fields |= {"expected": wanted[k], "got": "None" if after[k] is None else after[k]}
    slug = "wrong-clip"
    own = _length(before)
    if not norm:
        slug = "zero-norm"
    elif factor == 1:
        slug = "scaled-up"
    elif are([g.double() for g in before]) and own > MAX:
        slug = "clip-lost"
    elif are([g.double().clamp(-MAX, MAX) for g in before]):
        slug = "elements-clamped"
    elif are([g.double() * min(1.0, MAX / max(own, 1e-12)) for g in before]) or are(
        [g.double() * min(1.0, MAX / max(_length([g]), 1e-12)) for g in before]
    ):
        slug = "clipped-by-own-norm"
    raise Wrong(slug, **fields)


def _cheap(got, rank, where):
    sent = volume(got["calls"])
    if got["syncs"] and sent < got["held"] // 2:
        raise Wrong("hidden-sync", error=got["syncs"][0].removeprefix("aten."), where=where)
    if sent > FEW:
        raise Wrong("gradients-sent", got=sent, rank=rank, where=where)
    if len(got["calls"]) > 1:
        raise Wrong("one-message-each", got=len(got["calls"]), where=where)
