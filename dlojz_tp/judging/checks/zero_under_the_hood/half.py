"""How balises 6 and 8 are judged: a small training in bfloat16, and what the ranks have of it."""

import torch

from dlojz_tp.judging.checking.looks import Value, within
from dlojz_tp.judging.probes.exact_training import COUNTS, SHAPES, N, truth

CAPACITY = 400  # bytes of a bucket: 200 elements of two bytes
OTHER_DTYPE = (  # the signs of a gradient that is not of the dtype of what it belongs to
    ("attempting to assign a gradient with dtype", "gradient-elsewhere"),
    ("assigned grad has data of a different type", "gradient-elsewhere"),
)
CLOSE = 2e-5  # to one process in float64: the gradients have no rounding errors


def places(optimizer, parameters) -> list[list[int]]:
    """Which parameters each part of an optimizer holds, by their numbers."""
    number = {id(p): k for k, p in enumerate(parameters)}
    return [[number[id(p)] for p in part.parameters] for part in optimizer.parts]


def whole(ranks: list[dict], key: str) -> torch.Tensor:
    """(N,) what the ranks have under `key` for each part, side by side, in the order of the parameters; no padding."""
    found = {}
    for k, numbers in enumerate(ranks[0]["places"]):
        counts = [COUNTS[number] for number in numbers]
        flat = torch.cat([torch.as_tensor(rank[key][k]).double().reshape(-1) for rank in ranks])
        found |= zip(numbers, flat[: sum(counts)].split(counts), strict=True)
    return torch.cat([found[number] for number in range(len(SHAPES))])


def weights(claim: str, hint: str, claim_rounded: str, hint_rounded: str) -> list[Value]:
    """Looks at the masters of all ranks, against one process, and at the parameters of each, their rounded values."""

    def errors(ranks):
        return torch.stack([rank["parameters"] - whole(ranks, "masters").bfloat16() for rank in ranks])

    def fields(seen, _):
        rank, size = seen.any(1).nonzero()[0].item(), len(seen)
        got = f"{seen[rank].count_nonzero()} of {N} are others"
        return {"rank": rank, "expected": "rounded masters", "got": got, "where": f"rank {rank} of {size}"}

    nothing = lambda size: torch.zeros(size, N, dtype=torch.bfloat16)  # noqa: E731
    return [
        Value(claim, lambda ranks: whole(ranks, "masters"), truth, hint, holds=within(CLOSE)),
        Value(claim_rounded, errors, nothing, hint_rounded, holds=torch.equal, fields=fields),
    ]
