"""Balise 3: the boxes of CutMix, against their real-valued truth, and λ against the pixels of the boxes returned."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, one_of, shape, silent, within
from dlojz_tp.judging.checks.data_augmentation.devices import BATCHES, observe_batches

OFF = 2.01  # pixels that rounding, in one direction at the centre and in another at the side, may move an edge
N, SIZES = 60, torch.tensor([[20, 50], [61, 16]])  # boxes of each size; heights and widths
SIDES = SIZES.repeat_interleave(N, 0)  # (2 N, 2), as all that follows is of all boxes
GENERATOR = torch.Generator().manual_seed(0)
LAM, CENTRES = torch.rand(2 * N, generator=GENERATOR), torch.rand(2 * N, 2, generator=GENERATOR) * SIDES
LAM.view(2, N)[:, :4] = torch.tensor([0.0, 1.0, 0.75, 0.999])  # full, empty, at a corner, tiny
CENTRES.view(2, N, 2)[:, :3] = torch.stack([SIZES / 2, torch.tensor([[7.6, 12.3]] * 2), torch.full((2, 2), 0.4)], 1)
CASES = [(LAM[k : k + N], *CENTRES[k : k + N].unbind(1), *SIDES[k].tolist()) for k in (0, N)]
HALF = (1 - LAM.double()).sqrt()[:, None] * SIDES / 2
ENDS, LIMITS = torch.cat([CENTRES - HALF, CENTRES + HALF], 1), SIDES.repeat(1, 2)  # not clipped
IDEAL = torch.minimum(ENDS.clamp(min=0), LIMITS)
OVER = (ENDS < -OFF) | (ENDS > LIMITS + OFF)  # however it is rounded, such an edge lies on the border


def observe(cutmix_boxes):
    """Forms of what is returned; boxes (2 N, 4); what is wrong about λ, from their pixels."""
    got = [cutmix_boxes(*(one.clone() for one in case[:3]), *case[3:]) for case in CASES]
    yield {"shapes": shape(got)}
    boxes, kept = map(torch.cat, zip(*got))
    pixels = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    yield {"kind": form(boxes).split()[0], "boxes": boxes}
    yield {"empty": pixels[LAM == 1].tolist(), "error": kept.double() - 1 + pixels / SIDES.prod(1)}
    yield from observe_batches(
        lambda *given: cutmix_boxes(*given, 20, 30), lambda b: (torch.rand(b), torch.rand(b) * 20, torch.rand(b) * 30)
    )


def _edges(kind, wrong, hint):
    """A look at all boxes. wrong(boxes): (2 N, 4), which edges are; told of a box away from the borders, if any."""

    def fields(seen, _):
        rows, free = wrong(seen).any(1).int(), ((seen > 0) & (seen < LIMITS)).all(1)
        k = int((rows + rows * free).argmax())
        (height, width), (y, x) = SIDES[k].tolist(), CENTRES[k].tolist()
        where = f"λ = {LAM[k]:.3f}, centre ({y:.1f}, {x:.1f}), image {height} × {width}"
        return {"got": seen[k].tolist(), "expected": [round(edge, 1) for edge in IDEAL[k].tolist()], "where": where}

    return kind("", "boxes", IDEAL, hint, holds=lambda seen, _: not wrong(seen).any(), fields=fields)


LOOKS = [
    Look("integer boxes (batch, 4), inside the image", "shapes", [[(N, 4), (N,)]] * 2, "boxes-form"),
    Look("", "kind", ["int64", "int32"], lambda seen, _: "boxes-narrow" if "int" in seen else "boxes-not-integers", holds=one_of),
    _edges(Value, lambda boxes: (boxes - IDEAL).abs() > OFF, "box-misplaced"),
    _edges(Look, lambda boxes: (boxes < 0) | (boxes > LIMITS), "outside"),
    _edges(Look, lambda boxes: OVER & (boxes != IDEAL), "border-left-out"),
    Look("", "empty", [0, 0], "box-too-large"),
    Value("λ is the fraction of the image that is really kept",
          "error", torch.zeros(2 * N), "lambda-not-exact", holds=within(1e-5), fields=silent),
    *BATCHES,
]  # fmt: skip


def balise_3(cutmix_boxes):
    yield from judged(LOOKS, observe, cutmix_boxes)
