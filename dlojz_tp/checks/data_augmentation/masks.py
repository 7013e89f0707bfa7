"""Balise 4: masks of boxes at borders, empty, full; counted pixel by pixel."""

import torch

from dlojz_tp.checking.looks import Look, Value, form, judged
from dlojz_tp.checks.data_augmentation.devices import BATCHES, observe_batches

CASES = [  # boxes, height, width
    ([[1, 2, 3, 6], [0, 0, 1, 1], [4, 6, 5, 7], [0, 3, 5, 4], [2, 0, 3, 7]], 5, 7),
    ([[0, 0, 5, 7]], 5, 7),
    ([[2, 3, 2, 3], [0, 0, 0, 7], [5, 7, 5, 7], [1, 1, 4, 1]], 5, 7),
    ([[0, 1, 9, 2], [3, 0, 8, 3]], 9, 3),
]
BOXES = [box for boxes, *_ in CASES for box in boxes]


def _truth():
    for boxes, height, width in CASES:
        for top, left, bottom, right in boxes:
            mask = torch.zeros(height, width, dtype=torch.bool)
            mask[top:bottom, left:right] = True
            yield mask


def observe(box_masks):
    """Forms of what is returned; the masks of all boxes, a list of (height, width)."""
    got = [box_masks(torch.tensor(boxes), height, width) for boxes, height, width in CASES]
    yield {"forms": form(got)}
    yield {"masks": [mask[0] for masks in got for mask in masks]}
    yield from observe_batches(lambda boxes: box_masks(boxes, 9, 11), lambda b: (torch.tensor([[1, 2, 5, 9]] * b),))


FORMS = [f"bool {(len(boxes), 1, height, width)}" for boxes, height, width in CASES]
MASKS = list(_truth())


def _wrong(seen):
    """The number of the first box whose mask is wrong; empty boxes come last."""
    return min((k for k in range(len(BOXES)) if not seen[k].equal(MASKS[k])), key=lambda k: not MASKS[k].any())


def _hint(seen, _):
    k = _wrong(seen)
    return "mask-of-empty-box" if not MASKS[k].any() else "mask-too-wide" if seen[k][MASKS[k]].all() else "mask-wrong"


def _fields(seen, _):
    k = _wrong(seen)
    pixels = {"expected": f"{MASKS[k].sum()} pixels", "got": f"{seen[k].sum()} pixels", "box": BOXES[k]}
    return pixels | {"where": f"box {BOXES[k]} in {' × '.join(map(str, MASKS[k].shape))}"}


LOOKS = [
    Look("booleans of shape (batch, 1, height, width)", "forms", FORMS, "mask-form"),
    Value("exact: full boxes, empty ones, at each border, inside", "masks", MASKS, _hint, fields=_fields),
    *BATCHES,
]


def balise_4(box_masks):
    yield from judged(LOOKS, observe, box_masks)
