"""Answers to balise 4 of 07_data_augmentation: masks."""

import torch

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation")

# balise 4
RETURN = "return inside.view(torch.bool)"
bank.slip(4, "nothing-returned", (RETURN, RETURN.removeprefix("return ")))
bank.slip(4, "mask-form", (RETURN, "return (tall & wide).float()"))
bank.slip(4, "mask-form", (RETURN, "return (tall & wide)[:, 0]"))
bank.slip(4, "mask-wrong", (RETURN, "return tall ^ wide"))
bank.slip(4, "mask-inverted", (RETURN, "return ~(tall & wide)"))
bank.slip(
    4,
    "mask-inclusive",
    ("rows < bottom", "rows <= bottom"),
    ("columns < right", "columns <= right"),
    ("return inside.view(torch.bool)", "return (bottom > top) & (right > left) & inside.view(torch.bool)"),
)
bank.slip(4, "mask-inclusive", ("rows < bottom", "rows <= bottom"), ("columns < right", "columns <= right"))
bank.slip(4, "mask-of-empty-box", (RETURN, "return tall & wide | (top == bottom)"))
bank.slip(4, "mask-transposed", ("top, left, bottom, right = ", "left, top, right, bottom = "))
bank.slip(4, "mask-starts-late", ("rows >= top", "rows > top"), ("columns >= left", "columns > left"))
bank.slip(4, "mask-too-wide", (" & (columns < right)", ""))
bank.slip(4, "mask-too-wide", (RETURN, "return torch.logical_or(tall, wide)"))
bank.slip(4, "mask-too-wide", ("(rows >= top) & (rows < bottom)", "torch.logical_and(rows >= top, columns < right)"))
bank.slip(
    4,
    "mask-too-wide",
    ("rows < bottom", "rows <= bottom"),
    ("return inside.view(torch.bool)", "return (bottom > top) & (right > left) & inside.view(torch.bool)"),
)
bank.slip(4, "other-device", ("torch.arange(width, device=boxes.device)", "torch.arange(width)"))


@bank.wrong(4, "loop-over-images")
def box_masks(boxes, height, width):
    masks = torch.zeros(len(boxes), 1, height, width, dtype=torch.bool, device=boxes.device)
    rows = torch.arange(height, device=boxes.device)[:, None]
    columns = torch.arange(width, device=boxes.device)
    for i in range(len(boxes)):
        t, s, b, e = boxes[i].unbind()
        masks[i, 0] = (rows >= t) & (rows < b) & (columns >= s) & (columns < e)
    return masks


@bank.wrong(4, "loop-over-images")
def box_masks(boxes, height, width):
    masks = torch.zeros(len(boxes), 1, height, width, dtype=torch.bool, device=boxes.device)
    for mask, (t, s, b, e) in zip(masks, boxes.tolist()):
        mask[0, t:b, s:e] = True
    return masks


@bank.right(4)
def box_masks(boxes, height, width):
    """Two lines, one for each axis, multiplied."""
    r, c = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    tall = (r[None] >= boxes[:, 0:1]) & (r[None] < boxes[:, 2:3])
    wide = (c[None] >= boxes[:, 1:2]) & (c[None] < boxes[:, 3:4])
    return (tall[:, :, None] & wide[:, None, :])[:, None]


@bank.right(4)
def box_masks(boxes, height, width):
    """Distances from the start, unsigned by clamping."""
    t, s, b, e = (edge[:, None, None, None] for edge in boxes.unbind(1))
    y = torch.arange(height, device=boxes.device)[None, None, :, None] - t
    x = torch.arange(width, device=boxes.device)[None, None, None, :] - s
    return torch.logical_and((y >= 0) * (y < b - t), (x >= 0) * (x < e - s)).bool()


@bank.right(4)
def box_masks(boxes, height, width):
    """A grid of places, compared as pairs."""
    places = torch.meshgrid(
        torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device), indexing="ij"
    )
    grid = torch.stack(places)[None]
    start, end = boxes[:, :2, None, None], boxes[:, 2:, None, None]
    return ((grid >= start) & (grid < end)).all(1, keepdim=True)
