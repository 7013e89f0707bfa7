"""Answers to balise 3 of 07_data_augmentation: the boxes of CutMix."""

import torch

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 3)

TOGETHER = '''
def cutmix_boxes(lam, y, x, height, width):
    """Both axes at once."""
    size = torch.tensor([height, width], device=lam.device)
    centre = torch.stack([y, x], dim=1)
    half = (1 - lam).sqrt()[:, None] * size / 2
    start, end = torch.round(centre - half).to(torch.int64), torch.round(centre + half).to(torch.int64)
    start, end = (torch.minimum(edge.clamp(min=0), size) for edge in (start, end))
    return torch.cat([start, end], dim=1), 1 - (end - start).prod(1) / (height * width)
'''
bank.text(None, TOGETHER)

HALVES = '''
def cutmix_boxes(lam, y, x, height, width):
    """Integer halves, as in the paper."""
    root = torch.sqrt(1.0 - lam)
    half_h, half_w = (root * height / 2).long(), (root * width / 2).long()
    y, x = y.long(), x.long()
    boxes = torch.stack(
        [
            (y - half_h).clamp(min=0),
            (x - half_w).clamp(min=0),
            (y + half_h).clamp(max=height),
            (x + half_w).clamp(max=width),
        ],
        1,
    )
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return boxes, 1 - area / (height * width)
'''
bank.text(None, HALVES)

WHOLE = '''
def cutmix_boxes(lam, y, x, height, width):
    """Whole sides around a whole centre."""
    root = (1 - lam).sqrt()
    tall, wide = (height * root).round().long(), (width * root).round().long()
    top, left = y.round().long() - tall // 2, x.round().long() - wide // 2
    bottom, right = (top + tall).clamp(0, height), (left + wide).clamp(0, width)
    top, left = top.clamp(0, height), left.clamp(0, width)
    return torch.stack([top, left, bottom, right], 1), 1 - ((bottom - top) * (right - left)).float() / (height * width)
'''
bank.text(None, WHOLE)


@bank.right()
def cutmix_boxes(lam, y, x, height, width):
    """Outwards to whole pixels at the start, inwards at the end; counted with prod."""
    side = torch.sqrt(torch.clamp(1.0 - lam, min=0.0))
    limits = torch.tensor([height, width, height, width], device=lam.device, dtype=lam.dtype)
    shift = torch.stack([-side, -side, side, side], dim=-1) * limits / 2
    edges = torch.minimum(torch.relu(torch.stack([y, x, y, x], dim=-1) + shift), limits).floor().to(torch.int64)
    sides = edges[:, 2:] - edges[:, :2]
    return edges, (height * width - sides.prod(dim=1)) / (height * width)


bank.slip(None, (".long()", ".int()"))

BOXES = "return torch.stack([top, left, bottom, right], dim=1).long(), kept"
bank.slip("nothing-returned", (BOXES, BOXES.removeprefix("return ")))

bank.hint("boxes-form", "Return two tensors: boxes of shape (batch, 4), and λ of shape (batch,).")
bank.slip("boxes-form", (BOXES, BOXES.replace(", kept", "")))
bank.slip("boxes-form", ("dim=1)", "dim=0)"))
bank.variant("boxes-form", TOGETHER, ("dim=1), 1 - ", "dim=1), height * width * 1 - "), ("prod(1)", "prod()"))

bank.hint("boxes-not-integers", "The boxes count pixels, so they must be integers (int64).")
bank.slip("boxes-not-integers", (".long()", ""))
bank.variant("boxes-not-integers", TOGETHER, (".to(torch.int64)", ".double()"))

bank.hint("boxes-narrow", "{got} is too narrow to count the rows and columns of every image: the boxes must be int64.")
bank.slip("boxes-narrow", (".long()", ".to(torch.int16)"))
bank.slip("boxes-narrow", (".long()", ".to(torch.uint8)"))
bank.variant("boxes-narrow", HALVES, ("return boxes,", "return boxes.short(),"))

bank.hint("outside", "A box extends outside the image: {got} for {where}. Clip it.")
bank.slip("outside", (".round().clamp(0, height)", ".round()"), (".round().clamp(0, width)", ".round()"))
bank.variant("outside", HALVES, (".clamp(min=0)", ""), (".clamp(max=height)", ""), (".clamp(max=width)", ""))
bank.variant("outside", TOGETHER, ("torch.minimum(edge.clamp(min=0), size)", "edge"))
bank.variant("outside", WHOLE, (".clamp(0, height)", ""), (".clamp(0, width)", ""))

bank.hint("ends-before-start", "A box ends before it starts: {got}. The order is top, left, bottom, right.")
bank.slip("ends-before-start", ("[top, left, bottom, right]", "[top, bottom, left, right]"))
bank.slip("ends-before-start", ("for k in (-1, 1))\n    left", "for k in (1, -1))\n    left"))
bank.variant("ends-before-start", WHOLE, ("[top, left, bottom, right]", "[top, bottom, left, right]"))
bank.variant(
    "ends-before-start",
    HALVES,
    ("(y - half_h).clamp(min=0)", "(y + half_h).clamp(max=height)  "),
    ("(y + half_h).clamp(max=height),", "(y - half_h).clamp(min=0),"),
)

bank.hint("height-width-swapped", "Rows and columns are swapped. Images are height × width: {where}.")
bank.slip(
    "height-width-swapped",
    ("y + k * half * height).round().clamp(0, height)", "x + k * half * width).round().clamp(0, width)"),
    (
        "x + k * half * width).round().clamp(0, width) for k in (-1, 1))\n    kept",
        "y + k * half * height).round().clamp(0, height) for k in (-1, 1))\n    kept",
    ),
)
bank.variant("height-width-swapped", WHOLE, ("[top, left, bottom, right]", "[left, top, right, bottom]"))
bank.variant(
    "height-width-swapped", TOGETHER, ("tensor([height, width]", "tensor([width, height]"), ("[y, x]", "[x, y]")
)

bank.hint("side-not-root", "The sides are 1 − λ times the image's, so the area is (1 − λ)². Take the square root.")
bank.slip("side-not-root", ("(1 - lam).sqrt() / 2", "(1 - lam) / 2"))
bank.variant("side-not-root", HALVES, ("torch.sqrt(1.0 - lam)", "1.0 - lam"))
bank.variant("side-not-root", TOGETHER, ("(1 - lam).sqrt()", "(1 - lam)"))
bank.variant("side-not-root", WHOLE, ("(1 - lam).sqrt()", "(1 - lam)"))

bank.hint(
    "side-of-lambda",
    "The area of the box is λ times the image's. The box is the part that is pasted, so it must be 1 − λ.",
)
bank.slip("side-of-lambda", ("(1 - lam).sqrt() / 2", "lam.sqrt() / 2"))
bank.variant("side-of-lambda", HALVES, ("torch.sqrt(1.0 - lam)", "torch.sqrt(lam)"))
bank.variant("side-of-lambda", WHOLE, ("(1 - lam).sqrt()", "lam.sqrt()"))

bank.hint(
    "box-size-wrong",
    "The boxes are centred correctly but have the wrong size: {got} for {where}. The sides are √(1 − λ) times the "
    "height and √(1 − λ) times the width, half of each on either side of the centre.",
)
bank.slip("box-size-wrong", ("(1 - lam).sqrt() / 2", "(1 - lam).sqrt()"))
bank.slip("box-size-wrong", ("(1 - lam).sqrt() / 2", "(1 - lam).sqrt() / 4"))
bank.slip("box-size-wrong", ("(1 - lam).sqrt() / 2", "(1 - lam).sqrt() / 3"))
bank.slip("box-size-wrong", ("half * width", "half * height"))  # squares
bank.slip("box-size-wrong", ("half * height", "half * width"))
bank.variant("box-size-wrong", HALVES, ("root * height / 2", "root * height"), ("root * width / 2", "root * width"))
bank.variant("box-size-wrong", TOGETHER, ("* size / 2", "* size / 3"))
bank.variant("box-size-wrong", TOGETHER, ("* size / 2", "* width / 2"))

bank.hint(
    "box-misplaced",
    "A box is in the wrong place: {got} for {where}. From the centre, go half a side each way; the sides are √(1 − "
    "λ) times the height and the width.",
)
bank.slip("box-misplaced", ("(y + k * half * height)", "(y + (k + 1) * half * height)"))
bank.variant("box-misplaced", TOGETHER, ("torch.round(centre - half)", "torch.round(centre)"))
bank.variant("box-misplaced", WHOLE, ("y.round().long() - tall // 2", "y.round().long()"))
bank.variant("box-misplaced", HALVES, ("max=width", "max=height"))

bank.hint(
    "box-too-large",
    "The boxes are too large; λ = 1 asks for an empty one. bottom and right are the first row and column outside "
    "the box.",
)
bank.slip(
    "box-too-large",
    (
        "top, bottom = ((y + k * half * height).round().clamp(0, height) for k in (-1, 1))",
        "top, bottom = ((y + k * half * height).floor().clamp(0, height - 1) + (k + 1) // 2 for k in (-1, 1))",
    ),
    (
        "left, right = ((x + k * half * width).round().clamp(0, width) for k in (-1, 1))",
        "left, right = ((x + k * half * width).floor().clamp(0, width - 1) + (k + 1) // 2 for k in (-1, 1))",
    ),
)
bank.slip(
    "box-too-large",
    ("half * height).round()", "half * height).round().add(k)"),
    ("half * width).round()", "half * width).round().add(k)"),
)
bank.slip(  # outwards at both ends
    "box-too-large",
    ("(y + k * half * height).round()", "(k * (k * y + half * height).ceil())"),
    ("(x + k * half * width).round()", "(k * (k * x + half * width).ceil())"),
)
bank.variant(
    "box-too-large",
    TOGETHER,
    ("round(centre - half)", "floor(centre - half)"),
    ("round(centre + half)", "ceil(centre + half)"),
)
bank.variant("box-too-large", HALVES, ("y + half_h", "y + half_h + 1"), ("x + half_w", "x + half_w + 1"))

bank.hint(
    "border-left-out",
    "The box {got} for {where} should reach the border, but it ends before it. bottom and right are the first row "
    "and column outside the box: clip them to the height and the width themselves, and top and left to 0.",
)
bank.slip("border-left-out", ("clamp(0, height)", "clamp(0, height - 1)"), ("clamp(0, width)", "clamp(0, width - 1)"))
bank.slip("border-left-out", (".round().clamp(0, width)", ".round().clamp(1, width)"))
bank.variant("border-left-out", HALVES, ("max=height", "max=height - 1"), ("max=width", "max=width - 1"))
bank.variant("border-left-out", TOGETHER, ("clamp(min=0), size)", "clamp(min=0), size - 1)"))

bank.hint(
    "lambda-as-drawn",
    "λ came back as it was drawn, or as it was for the box before clipping. The box was "
    "rounded and clipped: count the pixels that were really cut.",
)
bank.slip("lambda-as-drawn", (", kept", ", lam"))
bank.variant("lambda-as-drawn", HALVES, ("1 - area / (height * width)", "lam"))
bank.variant("lambda-as-drawn", TOGETHER, ("1 - (end - start).prod(1) / (height * width)", "lam"))

bank.hint("lambda-of-box", "That is the fraction inside the box. λ is the fraction of the image that is kept.")
bank.slip("lambda-of-box", ("kept = 1 - ", "kept = "))
bank.variant("lambda-of-box", HALVES, ("1 - area", "area"))

bank.hint("lambda-not-exact", "λ isn't 1 minus the fraction of pixels in the box.")
bank.slip(
    "lambda-not-exact",
    ("kept = 1 - (bottom - top) * (right - left)", "kept = 1 - (bottom - top + 1) * (right - left + 1)"),
)
bank.variant("lambda-not-exact", WHOLE, ("(bottom - top) *", "(bottom - top - 1) *"))

bank.slip("waits", ("    half = ", "    assert lam.max() <= 1\n    half = "))


@bank.wrong("loop-over-images")
def cutmix_boxes(lam, y, x, height, width):
    boxes, kept = [], []
    for a, cy, cx in zip(lam, y, x):
        half = torch.sqrt(1 - a) / 2
        t, b = ((cy + k * half * height).round().clamp(0, height) for k in (-1, 1))
        s, e = ((cx + k * half * width).round().clamp(0, width) for k in (-1, 1))
        boxes.append(torch.stack([t, s, b, e]).long())
        kept.append(1 - (b - t) * (e - s) / (height * width))
    return torch.stack(boxes), torch.stack(kept)
