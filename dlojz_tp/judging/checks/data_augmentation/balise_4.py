"""Balise 4: masks of boxes at borders, empty, full; counted pixel by pixel."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged
from dlojz_tp.judging.checks.data_augmentation.devices import BATCHES, observe_batches

BOXES = [[1, 2, 3, 6], [0, 0, 1, 1], [4, 6, 5, 7], [0, 3, 5, 4], [2, 0, 3, 7], [0, 0, 5, 7], [0, 1, 4, 2]]
EMPTY = [[2, 3, 2, 3], [0, 0, 0, 7], [5, 7, 5, 7], [1, 1, 4, 1]]
MASKS = torch.zeros(11, 1, 5, 7, dtype=torch.bool)
for mask, (top, left, bottom, right) in zip(MASKS, BOXES):
    mask[0, top:bottom, left:right] = True


def observe(box_masks):
    """The masks of all boxes."""
    got = box_masks(torch.tensor(BOXES + EMPTY), 5, 7)
    box_masks(torch.tensor(EMPTY + BOXES), 5, 7)  # what came back stays as it is
    yield {"form": form(got), "masks": got}
    yield {"wide": box_masks(torch.tensor([[0, 1, 2, 300]]), 3, 600).sum()}
    yield from observe_batches(lambda boxes: box_masks(boxes, 9, 11), lambda b: (torch.tensor([[1, 2, 5, 9]] * b),))


def _hint(seen, due):
    if seen[: len(BOXES)].equal(due[: len(BOXES)]):
        return "mask-of-empty-box"
    return "mask-too-wide" if seen[due].all() else "mask-wrong"


def _box(seen, due):
    """The first box whose mask is wrong."""
    k = int((seen != due).flatten(1).any(1).int().argmax())
    counts = {"expected": f"{due[k].sum()} pixels", "got": f"{seen[k].sum()} pixels"}
    return {"where": f"box {(BOXES + EMPTY)[k]} in 5 × 7"} | counts


LOOKS = [
    Look("booleans of shape (batch, 1, height, width)", "form", form(MASKS), "mask-form"),
    Value("exact: full boxes, empty ones, at each border, inside", "masks", MASKS, _hint, fields=_box),
    Value(
        "in an image of 600 columns",
        "wide",
        torch.tensor(2 * 299),
        "mask-wrong",
        fields=lambda seen, due: {
            "where": "299 columns in 3 × 600",
            "expected": f"{due} pixels",
            "got": f"{seen} pixels",
        },
    ),
    *BATCHES,
]


def balise_4(box_masks):
    yield from judged(LOOKS, observe, box_masks)
