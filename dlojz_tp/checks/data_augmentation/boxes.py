"""Balise 3: the boxes of CutMix, against their real-valued truth, and λ against the pixels of the boxes returned."""

import torch

from dlojz_tp.checking.looks import Look, Value, form, judged, one_of, shape, within
from dlojz_tp.checks.data_augmentation.devices import BATCHES, observe_batches

OFF = 2.01  # pixels that rounding, in one direction at the centre and in another at the side, may move an edge


def _cases():
    """λ, y, x, height, width: boxes at corners, empty, full, and drawn."""
    generator = torch.Generator().manual_seed(0)
    for height, width in ((20, 50), (32, 32), (61, 16)):
        lam = torch.cat([torch.tensor([0.0, 1.0, 0.75, 0.75, 0.5, 0.999]), torch.rand(40, generator=generator)])
        y, x = (torch.rand(46, generator=generator) * side for side in (height, width))
        y[:4], x[:4] = torch.tensor([height / 2, 1, height / 2, 0.4]), torch.tensor([width / 2, 2, width / 2, 0.4])
        yield lam, y, x, height, width
    yield torch.tensor([0.36]), torch.tensor([10.0]), torch.tensor([7.0]), 20, 14


CASES = list(_cases())
LAM = torch.cat([case[0] for case in CASES]).double()  # (139,): the boxes of all cases
CENTRES = torch.cat([torch.stack(case[1:3], 1) for case in CASES]).double()
SIDES = torch.cat([torch.tensor(case[3:]).expand(len(case[0]), 2) for case in CASES]).double()
HALF, LIMITS = (1 - LAM).sqrt()[:, None] * SIDES / 2, SIDES.repeat(1, 2)
ENDS = torch.cat([CENTRES - HALF, CENTRES + HALF], 1)  # (139, 4): top, left, bottom, right, not clipped
IDEAL = torch.minimum(ENDS.clamp(min=0), LIMITS)
OVER = (ENDS < -OFF) | (ENDS > LIMITS + OFF)  # however it is rounded, such an edge lies on the border
INSIDE = ((ENDS > 0) & (ENDS < LIMITS)).all(1)


def observe(cutmix_boxes):
    """Forms of what is returned; (139, 4) boxes and (139,) λ of all cases."""
    got = [cutmix_boxes(lam.clone(), y.clone(), x.clone(), height, width) for lam, y, x, height, width in CASES]
    yield {"shapes": shape(got)}
    boxes, kept = zip(*got)
    yield {"kinds": [form(one).split()[0] for one in boxes], "boxes": torch.cat(boxes), "kept": torch.cat(kept)}
    call = lambda lam, y, x: cutmix_boxes(lam, y, x, 20, 30)  # noqa: E731
    yield from observe_batches(call, lambda b: (torch.rand(b), torch.rand(b) * 20, torch.rand(b) * 30))


SHAPES = [[(len(case[0]), 4), (len(case[0]),)] for case in CASES]


def _edges(kind, wrong, hint):
    """A look at all boxes. wrong(boxes): (139, 4), which edges are; hints speak of a box away from the borders, if any."""

    def fields(seen, _):
        rows = wrong(seen).any(1)
        free = rows & (seen[:, :2] > 0).all(1) & (seen[:, 2:] < SIDES).all(1)
        k = int((free if free.any() else rows).int().argmax())
        (height, width), (y, x), box = SIDES[k].int().tolist(), CENTRES[k].tolist(), seen[k].int().tolist()
        return {"box": box, "height": height, "width": width, "y": y, "x": x, "tall": box[2] - box[0], "wide": box[3] - box[1],
                "lam": LAM[k].item(), "expected": [round(edge, 1) for edge in IDEAL[k].tolist()], "got": box,
                "where": f"λ = {LAM[k]:.3f}, image {height} × {width}"}  # fmt: skip

    return kind("", "boxes", IDEAL, hint, lambda seen, _: not wrong(seen).any(), fields)


def _misplaced(seen, due):
    """Whether only the size is wrong: all boxes that touch no border have the right centre."""
    free = (seen[:, :2] > 0).all(1) & (seen[:, 2:] < SIDES).all(1)
    centred = ((seen[:, :2] + seen[:, 2:]) / 2 - CENTRES).abs().amax(1) <= 1.1
    sized = free & ((seen - due).abs() > OFF).any(1)
    return "box-size-wrong" if sized.any() and centred[free].all() else "box-misplaced"


def _excess(seen):
    """How much the boxes inside the image are too tall and wide, on average; the area of the largest for λ = 1."""
    sides = seen["boxes"][:, 2:] - seen["boxes"][:, :2]
    return [(sides - 2 * HALF)[INSIDE].mean().item(), sides[LAM == 1].prod(1).max().item()]


def _error(seen):
    """Of λ, from the pixels of the boxes."""
    return seen["kept"].double() - 1 + (seen["boxes"][:, 2:] - seen["boxes"][:, :2]).prod(1) / SIDES.prod(1)


LOOKS = [
    Look("integer boxes (batch, 4), inside the image", "shapes", SHAPES, "boxes-form"),
    Look("", "kinds", ["int64", "int32"], lambda seen, _: "boxes-not-integers" if seen[0].startswith(("float", "bfloat", "bool")) else "boxes-narrow", one_of,
         lambda seen, _: {"dtype": seen[0], "got": seen[0], "expected": "int64"}),
    _edges(Value, lambda boxes: (boxes - IDEAL).abs() > OFF, _misplaced),
    _edges(Look, lambda boxes: (boxes < 0) | (boxes > LIMITS), "outside"),
    _edges(Look, lambda boxes: OVER & (boxes != IDEAL), "border-left-out"),
    Look("", _excess, [1.2, 0.0], "box-too-large", lambda seen, due: seen[0] <= due[0] and seen[1] <= due[1],
         lambda seen, _: {"expected": "", "got": f"{seen[0]:.1f} pixels too long on average, {seen[1]:.0f} pixels for λ = 1"}),
    Value("λ is what is really kept of the image", _error, 0 * LAM, "lambda-not-exact", within(1e-5)),
    *BATCHES,
]  # fmt: skip


def balise_3(cutmix_boxes):
    yield from judged(LOOKS, observe, cutmix_boxes)
