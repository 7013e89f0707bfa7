"""Balise 7: gradients clipped by their norm over the shards of all ranks."""

import torch
from torch import nn

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, Value, at_most, silent
from dlojz_tp.judging.checks.zero_under_the_hood.common import world
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import judged_on_ranks
from dlojz_tp.judging.probes.gpus import Seen, left_on_cpu, on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank, stacked
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits
from dlojz_tp.judging.probes.withheld import Withheld
from dlojz_tp.launch import device
from dlojz_tp.measure.operations import Operations, in_words, syncs

MAX = 1.5
#        name: (elements of a rank's three shards; of those of the last rank; dtype; scale; tolerance)
CASES = {
    "long gradients": ((7, 12, 1), (5, 3, 2), torch.float32, 3.0, 1e-5),
    "short gradients": ((4, 6, 1), (2, 9, 3), torch.float32, 0.01, 1e-5),
    "a rank without elements": ((9, 4, 2), (0, 0, 0), torch.float32, 2.0, 1e-5),
    "gradients of zero": ((3, 2, 1), (4, 1, 5), torch.float32, 0.0, 1e-5),
    "bfloat16": ((3000, 8, 2), (2000, 5, 1), torch.bfloat16, 1.0, 2e-2),
    "float16": (
        (40, 8, 3),
        (30, 2, 6),
        torch.float16,
        2000.0,
        5e-3,
    ),  # the norm is more than float16 holds, no element is
}
TOLERANCES = torch.tensor([case[-1] for case in CASES.values()])


class LeftOut(Exception):  # noqa: N818
    """A rank without elements went another way than the others."""


KNOWN = (("NoneType", "grad-is-none"), (LeftOut, "rank-left-out"))


def given(case: str, rank: int, size: int) -> list[torch.Tensor]:
    """The gradients of a rank in a case; ranks differ much in their norms."""
    first, last, dtype, scale, _ = CASES[case]
    generator = torch.Generator().manual_seed(40 + 7 * rank + len(case))
    shards = [torch.rand(n, generator=generator) for n in (last if rank == size - 1 > 0 else first)]
    return [((shard + 0.5) * scale * (1 + 2 * rank)).to(dtype) for shard in shards]


def truth(case: str, size: int) -> tuple[float, float]:
    """The norm of the whole vector, and what it is multiplied by."""
    norm = torch.cat([g.double() for rank in range(size) for g in given(case, rank, size)]).norm().item()
    return norm, MAX / norm if norm > MAX else 1.0


def observe(clip_grad_norm):
    """On a rank, for each case: what came, how it and the gradients compare with the truth, what it took."""
    rank, size = world()
    found = {key: [] for key in ("kinds", "norms", "gradients", "calls", "sent", "syncs", "new")} | {"early": False}
    for case in CASES:
        before, (norm, factor) = given(case, rank, size), truth(case, size)
        shards = [nn.Parameter(torch.ones_like(g)) for g in before]
        for p, g in zip(shards, before, strict=True):
            p.grad = g.clone()
        places = [p.grad.data_ptr() for p in shards]
        without = nn.Parameter(torch.ones(2, dtype=before[0].dtype))  # it has no gradient
        empty = size > 1 and not any(map(len, before))
        with Withheld(), Traffic() as log, counted_waits() as waits, Operations() as operations:
            try:
                got = clip_grad_norm([shards[0], without, *shards[1:]], MAX)
            except Exception as error:
                if empty:
                    raise LeftOut(error) from error
                raise
        if empty and found["calls"][0] and not log.calls:  # at once, before the others wait in vain
            raise LeftOut("it called no collective")
        after = [torch.zeros_like(p) if p.grad is None else p.grad for p in shards]
        one = isinstance(got, torch.Tensor) and got.numel() == 1
        found["kinds"].append("one number" if one else type(got).__name__)
        found["norms"].append(_compared(got.double().reshape(1) if one else torch.zeros(1), torch.tensor([norm])))
        found["gradients"].append(torch.stack([_compared(a, g * factor) for a, g in zip(after, before, strict=True)]))
        found["early"] |= len(waits) < len(log.calls)
        found["calls"].append(len(log.calls))
        found["sent"].append(log.volume())
        found["syncs"] += [name.removeprefix("aten.") for name in syncs(operations)]
        found["new"] += [case for a, place in zip(after, places, strict=True) if a.data_ptr() != place]
    return found | {key: torch.stack(found[key]) for key in ("norms", "gradients")}


def _on_gpu(gpu, clip_grad_norm):
    """What made the CPU wait, in words."""
    shards = [nn.Parameter(torch.ones(n, device=device())) for n in (3, 2)]
    for p in shards:
        p.grad = torch.ones_like(p)
    clip_grad_norm(shards, MAX)
    return Seen(waits=list(gpu.waits)).reads


def _compared(got, due):
    """(2,): the least and the largest of what came, divided by what is due, and 1."""
    got, due = got.detach().double(), due.double()
    ratios = torch.cat([torch.where(due == 0, got + 1, got / due), torch.ones(1)])
    return torch.stack([ratios.min(), ratios.max()])


def _off(ratios):
    """Which are not 1: (ranks, cases, …) -> (ranks, cases)."""
    return ~((ratios - 1).abs().flatten(2).amax(2) <= TOLERANCES)


def _unwaited(ranks):
    """Of each rank, whether it went on before a sum was there, and has another norm."""
    off = _off(torch.stack([rank["norms"] for rank in ranks])).any(1).tolist()
    return [rank["early"] and wrong for rank, wrong in zip(ranks, off, strict=True)]


def _compare(claim, key, hint, *shape):
    """A look at ratios that should be 1: (ranks, cases, *shape)."""

    def fields(seen, _):
        rank, k = _off(seen).nonzero()[0].tolist()
        case, size = list(CASES)[k], len(seen)
        low, high = seen[rank, k].min().item(), seen[rank, k].max().item()
        return {"rank": rank, "norm": truth(case, size)[0], "most": MAX, "where": f"{case}, rank {rank} of {size}",
                "expected": "", "got": f"{low if 1 - low > high - 1 else high:.7g} times what is due"}  # fmt: skip

    def ones(size):
        return torch.ones(size, len(CASES), *shape)

    return Value(claim, stacked(key), ones, hint, holds=lambda seen, _: not _off(seen).any(), fields=fields)


def _no_norm(got, _):
    return "nothing-returned" if "NoneType" in got else "norm-not-returned"


def _first_unwaited(seen, due):
    return silent(seen, due) | {"rank": seen.index(True)}


LOOKS = [
    each_rank("one number crosses between the ranks, and none is copied to Python (1, 2, 3 and 4 ranks)",
         "sent", 64, "gradients-sent",
         holds=at_most, fields=lambda got, _: {"got": max(got)}),
    each_rank("", "syncs", [], "hidden-sync", fields=lambda got, _: {"error": in_words(got), "got": ""}),
    each_rank("", "calls", 1, "one-message-each", holds=at_most, fields=lambda got, _: {"got": max(got)}),
    each_rank("", "sent", 8, "numbers-sent", holds=at_most, fields=lambda got, _: {"got": max(got)}),
    each_rank("the norm over the shards of all ranks, as a tensor, on every rank", "kinds", ["one number"] * len(CASES),
         _no_norm, fields=lambda got, _: {"got": got[0]}),
    Look("", _unwaited, lambda size: [False] * size, "norm-not-waited", fields=_first_unwaited),
    _compare("", "norms", "wrong-norm", 2),
    _compare("one factor for all gradients, in place; short gradients and zeros stay as they are",
             "gradients", "wrong-clip", 3, 2),
    each_rank("", "new", [], "new-gradients"),
]  # fmt: skip


def balise_7(clip_grad_norm):
    yield from judged_on_ranks(LOOKS, observe, clip_grad_norm, known=KNOWN)
    yield "the same with two ranks that each have a GPU"
    waits = on_gpus(_on_gpu, clip_grad_norm, known=left_on_cpu("norm-not-on-gpu"))
    if waits and waits[0]:
        raise Wrong("hidden-sync", error=", ".join(dict.fromkeys(waits[0])), where="rank 0 of 2, on a GPU")
