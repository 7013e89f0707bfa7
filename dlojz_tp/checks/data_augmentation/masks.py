"""Balise 4: the masks of boxes."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.data_augmentation.devices import batched

HINTS = {
    "mask-form": "The masks are booleans of shape (batch, 1, height, width).",
    "mask-inverted": "The mask is True outside of the box. It shall be True inside.",
    "mask-inclusive": "The mask has a row or a column too many: bottom and right are the first outside.",
    "mask-of-empty-box": "An empty box gives a mask with pixels in it.",
    "mask-transposed": "Rows and columns of the mask are swapped.",
    "mask-too-wide": "The mask of box {box} has pixels outside of it. A pixel is inside if all four hold: row at least top, row below "
    "bottom, column at least left, column below right. Join them with & (logical_and).",
    "mask-starts-late": "The mask leaves out the first row or column of the box: top and left belong to it.",
    "mask-wrong": "The mask of box {box} is not that box.",
}


def balise_4(box_masks):
    """Boxes at borders, empty, full; counted pixel by pixel."""
    cases = [
        ([[1, 2, 3, 6], [0, 0, 1, 1], [4, 6, 5, 7], [0, 3, 5, 4], [2, 0, 3, 7]], 5, 7),
        ([[0, 0, 5, 7]], 5, 7),
        ([[2, 3, 2, 3], [0, 0, 0, 7], [5, 7, 5, 7], [1, 1, 4, 1]], 5, 7),
        ([[0, 1, 9, 2], [3, 0, 8, 3]], 9, 3),
    ]
    yield "booleans of shape (batch, 1, height, width)"
    for boxes, height, width in cases:
        got = box_masks(torch.tensor(boxes), height, width)
        if got is None:
            raise Wrong("nothing-returned")
        shape = (len(boxes), 1, height, width)
        if not isinstance(got, torch.Tensor) or got.shape != shape or got.dtype != torch.bool:
            raise Wrong("mask-form", expected=f"bool, {shape}", got=got)
    yield "exact: full boxes, empty ones, at each border, inside"
    for boxes, height, width in cases:
        got = box_masks(torch.tensor(boxes), height, width)
        for box, mask in sorted(zip(boxes, got[:, 0]), key=lambda pair: _empty(pair[0])):
            _right_mask(box, mask, height, width)
    yield from batched(lambda boxes: box_masks(boxes, 9, 11), lambda b: (torch.tensor([[1, 2, 5, 9]] * b),))


def _empty(box):
    return box[0] >= box[2] or box[1] >= box[3]


def _right_mask(box, mask, height, width):
    top, left, bottom, right = box
    wanted = torch.zeros(height, width, dtype=torch.bool)
    wanted[top:bottom, left:right] = True
    if close(mask, wanted):
        return
    inclusive, late, swapped = (torch.zeros(height, width, dtype=torch.bool) for _ in range(3))
    inclusive[top : bottom + 1, left : right + 1] = True
    late[top + 1 : bottom, left + 1 : right] = True
    swapped[left:right, top:bottom] = True
    slug = "mask-wrong"
    if not wanted.any():
        slug = "mask-of-empty-box"
    elif close(mask, ~wanted):
        slug = "mask-inverted"
    elif close(mask, late):
        slug = "mask-starts-late"
    elif close(mask, inclusive):
        slug = "mask-inclusive"
    elif close(mask, swapped):
        slug = "mask-transposed"
    elif (mask | wanted).equal(mask):
        slug = "mask-too-wide"
    raise Wrong(
        slug,
        where=f"box {box} in {height} × {width}",
        expected=f"{int(wanted.sum())} pixels",
        got=f"{int(mask.sum())} pixels",
        box=box,
    )
