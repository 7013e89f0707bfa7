"""Balise 5: mixed images: boxes, weights and partners of all kinds, and how many times each pixel is read."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged
from dlojz_tp.judging.checks.triton_kernels.watching import (
    KERNEL_LOOKS,
    MANY_PROGRAMS,
    ONE_LAUNCH,
    kernel_parts,
    watched,
)

DRAWS = torch.Generator().manual_seed(0)
IMAGES = torch.randn(4, 3, 7, 5, generator=DRAWS)
PARTNER = torch.tensor([2, 0, 3, 1])
BOXES = torch.tensor([[1, 2, 5, 4], [0, 0, 0, 0], [0, 0, 7, 3], [3, 1, 6, 5]])
WEIGHTS = torch.tensor([1.0, 0.25, 0.75, 0.0])
LARGE = torch.randn(2, 1, 60, 50, generator=DRAWS)
OTHERS = LARGE, torch.tensor([0, 0]), torch.tensor([[10, 0, 60, 50], [59, 49, 60, 50]]), torch.tensor([0.5, 1.0])


def truth(images, partner, boxes, weights):
    """(mixed images, how many times each pixel is read), pixel by pixel."""
    mixed, reads = images.clone(), torch.zeros(images.shape, dtype=torch.int64)
    for n, (other, (top, left, bottom, right), weight) in enumerate(zip(partner, boxes, weights)):
        for y in range(images.shape[2]):
            for x in range(images.shape[3]):
                factor = 0 if top <= y < bottom and left <= x < right else weight
                reads[n, :, y, x] += int(factor != 0)
                reads[other, :, y, x] += int(factor != 1)
                mixed[n, :, y, x] = factor * images[n, :, y, x] + (1 - factor) * images[other, :, y, x]
    return mixed, reads


DUE, READS = truth(IMAGES, PARTNER, BOXES, WEIGHTS)
DUE_OTHERS, _ = truth(*OTHERS)


def observe(mix):
    result, seen, _ = yield from kernel_parts(mix, IMAGES, PARTNER, BOXES, WEIGHTS)
    yield {"finite": bool(result.isfinite().all()), "mixed": result, "busy": seen.busy()}
    yield {"reads": seen.reads(seen.given[0])}
    result, seen, _ = watched(mix, *OTHERS)
    yield {"others": result, "form of others": form(result)}


LOOKS = [
    Look("as many images as were given, float32", "form", "float32 (4, 3, 7, 5)", "another-form"),
    *KERNEL_LOOKS,
    Look("pixels that are not read count as zero", "finite", True, "no-other"),
    Value("CutMix, MixUp and both, of images of their own", "mixed", DUE, "wrong-mix"),
    Look("pixels are read where their factor isn't zero", "reads", READS, "needless-reads",
         holds=at_most,
         fields=lambda seen, due: {"got": f"{seen.sum()} pixels read", "expected": f"{due.sum()} pixels read"}),
    ONE_LAUNCH,
    MANY_PROGRAMS,
    Look("larger images of one channel, the first its own partner", "others", DUE_OTHERS, "wrong-there",
         fields={"what": "two images of 1 × 60 × 50, the first its own partner"}),
]  # fmt: skip


def balise_5(mix):
    yield from judged(LOOKS, observe, mix)
