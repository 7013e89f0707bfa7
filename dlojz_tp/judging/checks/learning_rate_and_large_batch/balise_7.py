"""Balise 7: the gradient noise scale, from the gradients before and after the all-reduce."""

import math

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, tried
from dlojz_tp.judging.probes.ranks import hung, killed_by, world_after_world
from dlojz_tp.judging.probes.shared_looks import stacked
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.works.balise import BaliseNotDone

SHAPES = [(4, 5), (6,), (3, 3), (2, 2), (3,), (1,)]
BATCHES, SIGNALS = [8, 3], [0.3, 0.05]  # in the second case |G|² is estimated as negative


def given(rank: int, case: int) -> list[torch.Tensor]:
    """The gradients of a rank: the same for all, and noise."""
    same, own = (torch.Generator().manual_seed(seed + case) for seed in (5, 50 + 10 * rank))
    noise = 1 / BATCHES[case] ** 0.5
    return [SIGNALS[case] * torch.randn(s, generator=same) + noise * torch.randn(s, generator=own) for s in SHAPES]


def means(case: int, size: int) -> torch.Tensor:
    """The gradients of `size` ranks, (size, elements), float64."""
    return torch.stack([torch.cat([g.flatten() for g in given(r, case)]) for r in range(size)]).double()


def estimates(case: int, size: int) -> list[float]:
    """[|G|², tr Σ] from the sample variance between the ranks: no equation of two batch sizes."""
    gradients, batch = means(case, size), BATCHES[case]
    trace = batch * gradients.var(0).sum()
    return [(gradients.mean(0).square().sum() - trace / (size * batch)).item(), trace.item()]


def observe(gradient_noise):
    """On a rank, for two batch sizes: what is returned, the gradients afterwards, bytes beside them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {"forms": [], "pairs": [], "gradients": [], "sent": []}
    for case, batch in enumerate(BATCHES):
        gradients = given(rank, case)
        parameters = [nn.Parameter(torch.ones_like(g)) for g in gradients]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        frozen, unused = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        every = [parameters[0], frozen, *parameters[1:], unused]
        if size == 1:
            return {"alone": str(tried(gradient_noise, every, batch)).partition(":")[0]}
        with Traffic() as log:
            got = gradient_noise((p for p in every), batch)
        got = list(got) if isinstance(got, torch.Tensor) and got.dim() == 1 else got
        pair = isinstance(got, tuple | list) and len(got) == 2
        pair = pair and all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in got)
        found["forms"].append("pair" if pair else form(got))
        found["pairs"].append(torch.tensor([float(one) for one in got] if pair else [0.0, 0.0]))
        found["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))
        found["sent"].append(log.volume() - 4 * len(found["gradients"][-1]))
    return found | {key: torch.stack(found[key]) for key in ("pairs", "gradients")}


def _near(seen, due):
    return seen.shape == due.shape and bool((seen - due).abs().max() <= 1e-4 * due.abs().max())


def _no_pair(seen, _):
    return "nothing-returned" if None in seen[0] else "not-a-pair"


def _pairs(seen, _):
    return all(one == "pair" for rank in seen for one in rank)


def _few(seen, most):
    return max(map(max, seen)) <= most


RANKS = [
    Look("two tensors per step (2, 3 and 4 ranks)", "forms", None,
         _no_pair, holds=_pairs,
         fields=lambda seen, _: {"expected": "", "got": seen[0][0]}),
    Value("afterwards the gradients are the mean over the ranks", stacked("gradients"),
          lambda size: torch.stack([means(case, size).mean(0).float() for case in range(2)]).expand(size, -1, -1),
          "not-the-mean", holds=_near),
    Look("besides the gradients, at most two numbers are sent", "sent", 16, "more-sent",
         holds=_few, fields=lambda seen, _: {"n": max(map(max, seen)), "expected": "", "got": ""}),
    Value("the estimates of |G|² and tr Σ, on all ranks", stacked("pairs"),
          lambda size: torch.tensor([estimates(case, size) for case in range(2)]).expand(size, -1, -1), "wrong-estimates", holds=_near),
]  # fmt: skip
ALONE = [Look("one rank: a ValueError", "alone", ["ValueError"], "one-rank-estimated",
              fields=lambda seen, _: {"expected": "", "got": seen[0]})]  # fmt: skip
KNOWN = ((hung, "noise-ranks-waiting"), (killed_by("SIGABRT"), "noise-ranks-waiting"))

# pairs (|G|², tr Σ), the plain quotients of which are 40, -69 and 12; 33, -440 and 51
STEPS = [[(0.5, 20.0), (-0.3, 20.6), (1.5, 18.0)], [(1.2, 40.0), (-0.1, 44.0), (0.8, 41.0)], [(0.7, 30.0)]]
LOST = [[(0.1, 20.0), (-0.3, 22.0)], [(0.5, 20.0), (-0.5, 22.0)]]  # in the second case the mean is 0
PAYING = [(1000.0, 10, 0.5), (1000.0, 32, 0.8), (700.0, 64, 0.5), (5000.0, 16, 0.9), (30.0, 64, 0.5), (300.0, 7, 0.25)]


def _tensors(steps):
    return [tuple(map(torch.tensor, pair)) for pair in steps]


def observe_scale(noise_scale, ranks_that_pay):
    yield {"scales": [float(noise_scale(_tensors(steps))) for steps in STEPS]}
    lost = [tried(noise_scale, _tensors(steps)) for steps in LOST]
    yield {"lost": [one if isinstance(one, str) or one is None else float(one) for one in lost]}
    got = [ranks_that_pay(*case) for case in PAYING]
    yield {"whole": all(not isinstance(one, str) and float(one) == int(one) for one in got)}
    yield {"ranks": [float(one) for one in got]}


def _paying(noise, batch, share):
    """Counted up, one rank at a time."""
    return float(max(n for n in range(1, 10_000) if n == 1 or 1 / (1 + n * batch / noise) >= share))


def _first(seen, due):
    case, got = next((case, a) for case, a, b in zip(PAYING, seen, due) if a != b)
    return {"where": "noise={}, batch={}, share={}".format(*case), "expected": _paying(*case), "got": got}


ALL_STEPS = [
    Value("the noise scale over many steps: the ratio of the means", "scales",
          [sum(t for _, t in steps) / sum(g for g, _ in steps) for steps in STEPS], "wrong-scale"),
    Look("a gradient that is lost in the noise", "lost", [math.inf] * 2, "not-infinite", holds=lambda seen, due: seen == due),
    Look("the largest number of ranks that still pays", "whole", True, "no-whole-number"),
    Value("", "ranks", [_paying(*case) for case in PAYING], "wrong-ranks", fields=_first),
]  # fmt: skip


def balise_7(gradient_noise, noise_scale, ranks_that_pay):
    """What needs no ranks comes first, but does not keep back the verdict on the first answer while it is not written."""
    parts = [_over_ranks(gradient_noise), judged(ALL_STEPS, observe_scale, noise_scale, ranks_that_pay)]
    for part in reversed(parts) if _written(noise_scale, ranks_that_pay) else parts:
        yield from part


def _over_ranks(gradient_noise):
    yield RANKS[0].claim
    for size, ranks in world_after_world(observe, gradient_noise, known=KNOWN):
        looks, where = (ALONE, "one rank") if size == 1 else (RANKS, f"{size} ranks")
        yield from judged(looks, lambda seen=ranks: seen, at=size, where=where)


def _written(noise_scale, ranks_that_pay) -> bool:
    try:
        list(observe_scale(noise_scale, ranks_that_pay))
    except BaliseNotDone:
        return False
    except Exception:
        return True
    return True
