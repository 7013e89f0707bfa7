"""Answers to balise 4 of 07_data_augmentation: masks of boxes."""

import torch

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 4)
RETURN = "return inside.view(torch.bool)"


AXES = '''
def box_masks(boxes, height, width):
    """Two lines, one for each axis, multiplied."""
    r, c = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    tall = (r[None] >= boxes[:, 0:1]) & (r[None] < boxes[:, 2:3])
    wide = (c[None] >= boxes[:, 1:2]) & (c[None] < boxes[:, 3:4])
    return (tall[:, :, None] & wide[:, None, :])[:, None]
'''
bank.text(None, AXES)


@bank.right()
def box_masks(boxes, height, width):
    """Distances from the start, unsigned by clamping."""
    t, s, b, e = (edge[:, None, None, None] for edge in boxes.unbind(1))
    y = torch.arange(height, device=boxes.device)[None, None, :, None] - t
    x = torch.arange(width, device=boxes.device)[None, None, None, :] - s
    return torch.logical_and((y >= 0) * (y < b - t), (x >= 0) * (x < e - s)).bool()


GRID = '''
def box_masks(boxes, height, width):
    """A grid of places, compared as pairs."""
    places = torch.meshgrid(
        torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device), indexing="ij"
    )
    grid = torch.stack(places)[None]
    start, end = boxes[:, :2, None, None], boxes[:, 2:, None, None]
    return ((grid >= start) & (grid < end)).all(1, keepdim=True)
'''
bank.text(None, GRID)
bank.slip("nothing-returned", (RETURN, RETURN.removeprefix("return ")))

bank.hint("mask-form", "The masks must be booleans of shape (batch, 1, height, width).")
bank.slip("mask-form", (RETURN, "return (tall & wide).float()"))
bank.slip("mask-form", (RETURN, "return (tall & wide)[:, 0]"))
bank.variant("mask-form", AXES, ("[:, None]\n", "\n"))

bank.hint("mask-wrong", "The mask of {where} doesn't match that box.")
bank.slip("mask-wrong", (RETURN, "return tall ^ wide"))
bank.variant("mask-wrong", AXES, ("tall[:, :, None] & wide", "tall[:, :, None] ^ wide"))
bank.variant("mask-wrong", GRID, ("grid < end", "grid < start + 1"))

bank.hint("mask-inverted", "The mask is True outside the box. It must be True inside.")
bank.slip("mask-inverted", (RETURN, "return ~(tall & wide)"))
bank.variant("mask-inverted", AXES, ("return (tall", "return ~(tall"))
bank.variant("mask-inverted", GRID, ("return ((", "return ~(("))

bank.hint("mask-inclusive", "The mask has one row or column too many: bottom and right are the first outside the box.")
bank.slip(
    "mask-inclusive",
    ("rows < bottom", "rows <= bottom"),
    ("columns < right", "columns <= right"),
    ("return inside.view(torch.bool)", "return (bottom > top) & (right > left) & inside.view(torch.bool)"),
)
bank.slip("mask-inclusive", ("rows < bottom", "rows <= bottom"), ("columns < right", "columns <= right"))
bank.variant("mask-inclusive", AXES, ("[None] < ", "[None] <= "))
bank.variant("mask-inclusive", GRID, ("grid < end", "grid <= end"))

bank.hint("mask-of-empty-box", "The mask of an empty box contains pixels.")
bank.slip("mask-of-empty-box", (RETURN, "return tall & wide | (top == bottom)"))
bank.variant("mask-of-empty-box", GRID, ("return (", "return (start == end).any(1, keepdim=True) | ("))

bank.hint("mask-transposed", "Rows and columns of the mask are swapped.")
bank.slip("mask-transposed", ("top, left, bottom, right = ", "left, top, right, bottom = "))
bank.variant("mask-transposed", AXES, ("0:1", "1:2 "), ("2:3", "3:4 "), ("1:2]", "0:1]"), ("3:4]", "2:3]"))
bank.variant(
    "mask-transposed",
    GRID,
    ("boxes[:, :2, None", "boxes[:, [1, 0], None"),
    ("boxes[:, 2:, None", "boxes[:, [3, 2], None"),
)

bank.hint("mask-starts-late", "The mask leaves out the first row or column of the box: top and left are part of it.")
bank.slip("mask-starts-late", ("rows >= top", "rows > top"), ("columns >= left", "columns > left"))
bank.variant("mask-starts-late", AXES, ("[None] >= ", "[None] > "))
bank.variant("mask-starts-late", GRID, ("grid >= start", "grid > start"))

bank.hint(
    "mask-too-wide",
    "The mask of {where} has pixels outside the box. A pixel is inside if all four conditions hold: row at least "
    "top, row less than bottom, column at least left, column less than right. Combine them with & (logical_and).",
)
bank.slip("mask-too-wide", (" & (columns < right)", ""))
bank.slip("mask-too-wide", (RETURN, "return torch.logical_or(tall, wide)"))
bank.slip("mask-too-wide", ("(rows >= top) & (rows < bottom)", "torch.logical_and(rows >= top, columns < right)"))
bank.slip(
    "mask-too-wide",
    ("rows < bottom", "rows <= bottom"),
    ("return inside.view(torch.bool)", "return (bottom > top) & (right > left) & inside.view(torch.bool)"),
)
bank.variant("mask-too-wide", AXES, ("tall[:, :, None] & wide", "tall[:, :, None] | wide"))
bank.variant("mask-too-wide", GRID, (".all(1", ".any(1"))
bank.variant(
    "mask-too-wide",
    GRID,
    ("grid < end", "grid < end + torch.tensor([1, 0])[:, None, None]"),
    ("return (", "return (end > start).all(1, keepdim=True) & ("),
)

bank.slip("other-device", ("torch.arange(width, device=boxes.device)", "torch.arange(width)"))
OWN = 'device="cuda" if torch.cuda.is_available() else "cpu")'  # not that of the boxes
bank.slip("other-device", ("width, device=boxes.device)", f"width, {OWN}"))
bank.variant("other-device", AXES, ("height, device=boxes.device)", f"height, {OWN}"))


@bank.wrong("loop-over-images")
def box_masks(boxes, height, width):
    masks = torch.zeros(len(boxes), 1, height, width, dtype=torch.bool, device=boxes.device)
    rows = torch.arange(height, device=boxes.device)[:, None]
    columns = torch.arange(width, device=boxes.device)
    for i in range(len(boxes)):
        t, s, b, e = boxes[i].unbind()
        masks[i, 0] = (rows >= t) & (rows < b) & (columns >= s) & (columns < e)
    return masks


@bank.wrong("loop-over-images")
def box_masks(boxes, height, width):
    masks = torch.zeros(len(boxes), 1, height, width, dtype=torch.bool, device=boxes.device)
    for mask, (t, s, b, e) in zip(masks, boxes.tolist()):
        mask[0, t:b, s:e] = True
    return masks
