"""Answers to balise 5 of 24_triton_kernels: mixed images."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 5)

# a program walks through one plane; rows and columns of a tile
BY_PLANES = """
@triton.jit
def planes(images, partner, boxes, weights, out, c, h, w, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) // c
    p = tl.load(partner + n)
    weight = tl.load(weights + n)
    box = boxes + 4 * n
    plane = tl.program_id(0) % c * h * w
    x = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, h, ROWS):
        y = (start + tl.arange(0, ROWS))[:, None]
        exists = (y < h) & (x < w)
        cut = (y >= tl.load(box)) & (y < tl.load(box + 2)) & (x >= tl.load(box + 1)) & (x < tl.load(box + 3))
        here = plane + y * w + x
        mine = tl.load(images + n * c * h * w + here, exists & ~cut & (weight > 0), other=0)
        its = tl.load(images + p * c * h * w + here, exists & (cut | (weight < 1)), other=0)
        tl.store(out + n * c * h * w + here, tl.where(cut, its, its + weight * (mine - its)), exists)


def mix(images, partner, boxes, weights):
    out = torch.empty(images.shape, device=images.device)
    b, c, h, w = images.shape
    planes[b * c,](images, partner, boxes, weights, out, c, h, w, ROWS=16, COLUMNS=triton.next_power_of_2(w))
    return out
"""
bank.text(None, BY_PLANES)
bank.slip(None, ("1024", "32"), ("factor * own + (1 - factor) * theirs", "theirs + factor * (own - theirs)"))
bank.slip(None, ("grid = (b, triton.cdiv(c * h * w, 1024))", "grid = (b, 1 + (c * h * w - 1) // 128)"), ("BLOCK=1024", "BLOCK=128"), ("row, column = lane // width % height, lane % width", "row, column = lane % (height * width) // width, lane - lane // width * width"))  # fmt: skip

OWN, THEIRS = "mask=(lane < size) & (factor != 0), other=0.0", "mask=(lane < size) & (factor != 1), other=0.0"
STORE = "factor * own + (1 - factor) * theirs, mask=lane < size)"
bank.slip("reads-outside", (OWN, "mask=factor != 0, other=0.0"), (THEIRS, "mask=factor != 1, other=0.0"))
bank.edge("writes-outside")
bank.slip("writes-outside", (STORE, "factor * own + (1 - factor) * theirs)"))
bank.slip("never-written", (STORE, "factor * own + (1 - factor) * theirs, mask=(lane < size) & ~inside)"))
bank.slip("never-written", ("grid = (b, triton.cdiv(c * h * w, 1024))", "grid = (b, triton.cdiv(c * h * w, 32) - 1)"), ("BLOCK=1024", "BLOCK=32"))  # fmt: skip
bank.slip("given-changed", ("out = torch.empty_like(images)", "out = images"))
bank.text(
    "no-kernel",
    """
def mix(images, partner, boxes, weights):
    y, x = torch.arange(images.shape[2])[:, None], torch.arange(images.shape[3])
    top, left, bottom, right = (side[:, None, None, None] for side in boxes.unbind(1))
    mask = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    factor = torch.where(mask, 0.0, weights[:, None, None, None])
    return factor * images + (1 - factor) * images[partner]
""",
)
bank.slip("pytorch-copies", ("    b, c, h, w = images.shape", "    boxes = boxes.int()\n    b, c, h, w = images.shape"))

bank.hint("no-other", "There are infinities or NaN among the pixels. Without `other`, a masked pixel may hold anything, and "
                         "zero times infinity is NaN. Use `other=0.0`.", edge=True)  # fmt: skip
bank.slip("no-other", (OWN, OWN.replace(", other=0.0", "")), (THEIRS, THEIRS.replace(", other=0.0", "")))
bank.slip("no-other", (THEIRS, THEIRS.replace(", other=0.0", "")))
bank.variant("no-other", BY_PLANES, ("& (weight > 0), other=0", "& (weight > 0)"))

bank.hint("wrong-mix", "These are not the mixed images. Inside its box, an image has the partner's pixels of the same place; "
                          "outside, `weight * own + (1 - weight) * partner's`.")  # fmt: skip
bank.slip("wrong-mix", ("tl.where(inside, 0.0, weight)", "tl.where(inside, weight, 1.0)"))
bank.slip("wrong-mix", ("images + other * size", "images + (image + 1) % 4 * size"))
bank.slip("wrong-mix", ("tl.where(inside, 0.0, weight)", "weight + 0.0 * lane"))
bank.variant("wrong-mix", BY_PLANES, ("weight = tl.load(weights + n)", "weight = tl.load(weights + p)"))

bank.hint("weights-swapped", "The weight belongs to the image itself: it is the share of its own pixels, `1 - weight` the "
                                "partner's.")  # fmt: skip
bank.slip("weights-swapped", ("tl.where(inside, 0.0, weight)", "tl.where(inside, 0.0, 1 - weight)"))
bank.variant("weights-swapped", BY_PLANES, ("weight = tl.load(weights + n)", "weight = 1 - tl.load(weights + n)"))

bank.hint("box-inverted", "The partner's pixels are outside of the box. They belong inside.")
bank.slip("box-inverted", ("tl.where(inside, 0.0, weight)", "tl.where(inside, weight, 0.0)"))
bank.variant("box-inverted", BY_PLANES, ("        here =", "        cut = cut == 0\n        here ="))

bank.hint("axes-swapped", "Rows and columns are swapped somewhere. `lane % width` is the column, and a box is top, left, "
                             "bottom, right.")  # fmt: skip
bank.slip("axes-swapped", ("row, column = lane // width % height, lane % width", "column, row = lane // width % height, lane % width"))  # fmt: skip
bank.slip("axes-swapped", ("row, column = lane // width % height, lane % width", "row, column = lane % height, lane // height % width"))  # fmt: skip
bank.variant("axes-swapped", BY_PLANES, ("cut = (y >= tl.load(box)) & (y < tl.load(box + 2)) & (x >= tl.load(box + 1)) & (x < tl.load(box + 3))", "cut = (x >= tl.load(box)) & (x < tl.load(box + 2)) & (y >= tl.load(box + 1)) & (y < tl.load(box + 3))"))  # fmt: skip

bank.hint("box-end", "The box is one row or column off. `bottom` and `right` are outside, `top` and `left` inside.", edge=True)  # fmt: skip
bank.slip("box-end", ("row < bottom", "row <= bottom"), ("column < right", "column <= right"))
bank.slip("box-end", ("row >= top", "row > top"), ("column >= left", "column > left"))
bank.slip("box-end", ("row < bottom", "row <= bottom"))
bank.variant("box-end", BY_PLANES, ("(y < tl.load(box + 2))", "(y <= tl.load(box + 2))"), ("(x < tl.load(box + 3))", "(x <= tl.load(box + 3))"))  # fmt: skip

bank.hint("first-channel", "Only the first channel has its box. The rows of the next channel begin at 0 again: "
                              "`lane // width % height`.", edge=True)  # fmt: skip
bank.slip("first-channel", ("lane // width % height", "lane // width"))
bank.variant("first-channel", BY_PLANES, ("        here =", "        cut = cut & (plane == 0)\n        here ="))

bank.hint("needless-reads", "Pixels are read whose factor is zero. CutMix needs one pixel for each that it writes: put "
                               "`factor != 0` and `factor != 1` into the masks.")  # fmt: skip
bank.slip("needless-reads", (OWN, "mask=lane < size, other=0.0"), (THEIRS, "mask=lane < size, other=0.0"))
bank.slip("needless-reads", (OWN, "mask=(lane < size) & ~inside, other=0.0"), (THEIRS, "mask=lane < size, other=0.0"))  # fmt: skip
bank.variant("needless-reads", BY_PLANES, ("exists & ~cut & (weight > 0)", "exists"))

bank.edge("wrong-there")
bank.slip("wrong-there", ("(b, triton.cdiv(c * h * w, 1024))", "(b, 1)"))
bank.slip("wrong-there", ("lane // width % height, lane % width", "lane // 5 % 7, lane % 5"))
bank.slip("wrong-there", ("c * h * w, h, w, BLOCK", "3 * h * w, h, w, BLOCK"), ("cdiv(c * h * w", "cdiv(3 * h * w"))
bank.variant("wrong-there", BY_PLANES, ("COLUMNS=triton.next_power_of_2(w)", "COLUMNS=32"))
