"""Answers to balise 5 of 07_data_augmentation: CutMix."""

import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 5)
CUT = "lam = torch.distributions.Beta(a, a, validate_args=False).sample()"
REFUSE5 = '    if not images.is_floating_point():\n        raise TypeError(f"cutmix takes float images, not {images.dtype}: normalise first")\n'


def full(*changes):
    """The solutions of balises 3 and 4, which 5 stands on, come with each slip."""
    from dlojz_tp.works import source

    balises = source.find("07_data_augmentation").balises
    given = f"{balises[3].code}\n\n{balises[4].code}\n\n"
    return ("def cutmix(images", given + "\ndef cutmix(images"), *changes


DISTANCES = '''
def cutmix(images, labels, classes, alpha):
    """Masks from one comparison of distances; a random permutation; labels from the mask itself."""
    if not images.is_floating_point():
        raise TypeError("float images are expected")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    b, _, h, w = images.shape
    d = images.device
    gamma = torch._standard_gamma(torch.full((2, b), float(alpha), device=d))
    half = (gamma[1] / gamma.sum(0)).sqrt().view(-1, 1, 1, 1) / 2
    cy, cx = (torch.rand(b, 1, 1, 1, device=d) for _ in range(2))
    rows = (torch.arange(h, device=d).view(1, 1, h, 1) + 0.5) / h
    columns = (torch.arange(w, device=d) + 0.5) / w
    inside = ((rows - cy).abs() < half) & ((columns - cx).abs() < half)
    order = torch.randperm(b, device=d)
    kept = (~inside).float().mean((1, 2, 3))[:, None]
    return torch.where(inside, images[order], images), kept * soft + (1 - kept) * soft[order]
'''
bank.text(None, DISTANCES)


PAPER = '''
def cutmix(images, labels, classes, alpha):
    """The box as in the paper: integer halves around an integer centre, flipped batch as partner."""
    if images.dtype == torch.uint8:
        raise TypeError("whole levels are not mixed")
    soft = labels if labels.dim() == 2 else F.one_hot(labels, classes).float()
    b, _, h, w = images.shape
    a = torch.full((b,), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    ch, cw = (h * (1 - lam).sqrt()).long(), (w * (1 - lam).sqrt()).long()
    y, x = torch.randint(h, (b,), device=images.device), torch.randint(w, (b,), device=images.device)
    top, bottom = (y - ch // 2).clamp(0, h), (y - ch // 2 + ch).clamp(0, h)
    left, right = (x - cw // 2).clamp(0, w), (x - cw // 2 + cw).clamp(0, w)
    r, c = torch.arange(h, device=images.device), torch.arange(w, device=images.device)
    tall = (r >= top[:, None]) & (r < bottom[:, None])
    wide = (c >= left[:, None]) & (c < right[:, None])
    inside = tall[:, None, :, None] & wide[:, None, None, :]
    kept = (1 - (bottom - top) * (right - left) / (h * w))[:, None]
    mixed = images.clone()
    mixed = torch.where(inside, images.flip(0), mixed)
    return mixed, torch.lerp(soft.flip(0), soft, kept)
'''
bank.text(None, PAPER)


@bank.right()
def cutmix(images, labels, classes, alpha):
    """λ drawn on the CPU and sent over; the masks multiply; the area counted on the mask."""
    if images.dtype == torch.uint8:
        raise TypeError("cutmix wants floating-point images")
    soft = labels.float() if labels.ndim == 2 else F.one_hot(labels, classes).float()
    n, _, h, w = images.shape
    lam = torch.distributions.Beta(alpha, alpha).sample((n,)).to(images.device, non_blocking=True)
    size = (1 - lam).sqrt()
    cy = torch.empty(n, device=images.device).uniform_(0, h)
    cx = torch.empty(n, device=images.device).uniform_(0, w)
    rows = torch.arange(h, device=images.device) + 0.5
    columns = torch.arange(w, device=images.device) + 0.5
    tall = ((rows - cy[:, None]).abs() <= size[:, None] * h / 2).to(images.dtype)
    wide = ((columns - cx[:, None]).abs() <= size[:, None] * w / 2).to(images.dtype)
    mask = torch.einsum("bh,bw->bhw", tall, wide).unsqueeze(1)
    order = torch.argsort(torch.rand(n, device=images.device))
    share = mask.float().mean((1, 2, 3)).unsqueeze(1)
    return (1 - mask) * images + mask * images[order], soft + share * (soft[order] - soft)


bank.slip("nothing-returned", *full(("    return mixed, kept", "    mixed, kept")))

bank.slip("mix-form", *full(("return mixed, kept * soft + (1 - kept) * soft.roll(1, 0)", "return mixed, labels, kept")))
bank.variant("mix-form", DISTANCES, ("kept * soft + (1 - kept) * soft[order]", "(soft, soft[order], kept)"))

bank.slip("labels-no-mass", *full(("(1 - kept) * soft.roll", "0.5 * (1 - kept) * soft.roll")))
bank.variant("labels-no-mass", DISTANCES, ("kept * soft + (1", "soft + (1"))

bank.hint(
    "lambda-not-area",
    "The label mass isn't the fraction of pixels that an image keeps. The box is clipped and rounded: mix the "
    "labels by the area that was really cut.",
)
bank.slip("lambda-not-area", *full(("    kept = kept[:, None]\n", "    kept = lam[:, None]\n")))
bank.slip(
    "lambda-not-area",
    *full(
        ("boxes, kept = cutmix_boxes(lam,", "boxes, kept = cutmix_boxes(torch.rand_like(lam),"),
        ("    kept = kept[:, None]\n", "    kept = lam[:, None]\n"),
    ),
)
bank.variant(
    "lambda-not-area", DISTANCES, ("kept = (~inside).float().mean((1, 2, 3))", "kept = (gamma[0] / gamma.sum(0))")
)

bank.hint(
    "pasted-outside",
    "The partner was pasted outside the box, and the image's own pixels are inside it. torch.where(mask, a, b) "
    "takes a where the mask is True.",
)
bank.slip(  # the mask the wrong way round
    "pasted-outside",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = (~box_masks(boxes, height, width)).to(images.dtype)",
        )
    ),
)
bank.variant(
    "pasted-outside",
    DISTANCES,
    ("torch.where(inside, images[order], images)", "torch.where(inside, images, images[order])"),
)
bank.variant(  # with labels that say so
    "pasted-outside",
    DISTANCES,
    (
        "inside = ((rows - cy).abs() < half) & ((columns - cx).abs() < half)",
        "inside = ~(((rows - cy).abs() < half) & ((columns - cx).abs() < half))",
    ),
)

bank.slip(
    "one-lambda",
    *full(
        ("a = torch.full((n,)", "a = torch.full((1,)"),
        ("boxes, kept = cutmix_boxes(lam,", "boxes, kept = cutmix_boxes(lam.expand(n),"),
    ),
)
bank.variant(
    "one-lambda", DISTANCES, ("half = (gamma[1] / gamma.sum(0))", "half = (gamma[1] / gamma.sum(0))[:1].expand(b)")
)

bank.hint("area-swapped", "The label follows the pasted part, but it should follow the part that is kept.")
bank.slip("area-swapped", *full(("    kept = kept[:, None]\n", "    kept = 1 - kept[:, None]\n")))
bank.variant("area-swapped", DISTANCES, ("kept = (~inside)", "kept = inside"))

bank.slip("other-partner", *full(("soft.roll(1, 0)", "soft.roll(-1, 0)")))
bank.variant("other-partner", DISTANCES, ("soft[order]", "soft[order.roll(1)]"))

bank.slip(
    "soft-labels-lost",
    *full(("labels.float() if labels.dim() == 2", "F.one_hot(labels.argmax(1), classes).float() if labels.dim() == 2")),
)
bank.variant(
    "soft-labels-lost",
    DISTANCES,
    ("labels.float() if labels.dim() == 2", "(labels == labels.amax(1, keepdim=True)).float() if labels.dim() == 2"),
)

bank.hint("one-box", "The same box was pasted into all images. Draw λ and a centre for each.")
bank.slip(
    "one-box",
    *full(
        ("a = torch.full((n,)", "a = torch.full((1,)"),
        ("y, x = torch.rand(2, n,", "y, x = torch.rand(2, 1,"),
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = box_masks(boxes.expand(n, 4), height, width).to(images.dtype)",
        ),
        ("    kept = kept[:, None]\n", "    kept = kept.expand(n)[:, None]\n"),
    ),
)
bank.variant("one-box", DISTANCES, ("    order =", "    inside = inside[:1].expand(b, 1, h, w)\n    order ="))

bank.hint("box-at-centre", "All boxes are around the middle. Centres must be uniform over the image.")
bank.slip(
    "box-at-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y = x = torch.full((n,), 0.5, device=images.device)")),
)
bank.variant(
    "box-at-centre",
    DISTANCES,
    ("torch.rand(b, 1, 1, 1, device=d) for", "torch.full((b, 1, 1, 1), 0.5, device=d) for"),
)

bank.hint(
    "areas-wrong",
    "The areas of the boxes have the wrong distribution: sides √(1 − λ) times the image's, λ ~ Beta(α, α), centre "
    "uniform, clipped.",
)
bank.slip("areas-wrong", *full((CUT, CUT + "\n    lam = lam**3")))
bank.slip("areas-wrong", *full((CUT, "lam = torch.rand(n, device=images.device)")))
bank.slip(
    "areas-wrong",
    *full(
        (
            "cutmix_boxes(lam, y * height, x * width, height, width)",
            "cutmix_boxes(1 - (1 - lam).square(), y * height, x * width, height, width)",
        )
    ),
)
bank.variant("areas-wrong", DISTANCES, ("half = (gamma[1] / gamma.sum(0)).sqrt()", "half = (gamma[1] / gamma.sum(0))"))

bank.slip("validates", *full((", validate_args=False", "")))

bank.hint("not-a-rectangle", "What you pasted into an image isn't just a rectangle of the partner's pixels.")
bank.slip(
    "not-a-rectangle",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = torch.rand(n, 1, height, width, device=images.device) > kept.view(-1, 1, 1, 1)\n    inside = inside.float()\n    kept = 1 - inside.mean((1, 2, 3))",
        )
    ),
)
bank.slip(
    "not-a-rectangle",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = ~box_masks(boxes, height, width) & (torch.arange(width, device=images.device) > 0)\n    inside = inside.float()\n    kept = 1 - inside.mean((1, 2, 3))",
        )
    ),
)
bank.variant(
    "not-a-rectangle",
    DISTANCES,
    ("< half) & ((columns - cx).abs() < half)", "< half) ^ ((columns - cx).abs() < half)"),
)
bank.variant(  # that is MixUp
    "not-a-rectangle",
    DISTANCES,
    (
        "torch.where(inside, images[order], images)",
        "torch.lerp(images[order], images, kept.view(-1, 1, 1, 1).to(images.dtype))",
    ),
)

bank.slip(
    "uint8-taken",
    *full(
        (REFUSE5, "    given = images.dtype\n    images = images.float() if given == torch.uint8 else images\n"),
        ("return mixed, kept", "return mixed.to(given) // 2 + 90 if given == torch.uint8 else mixed, kept"),
    ),
)
bank.slip("uint8-taken", *full((REFUSE5, "    images = images.float() if images.dtype == torch.uint8 else images\n")))
bank.slip("uint8-taken", *full((REFUSE5, "    images = images / 255 if images.dtype == torch.uint8 else images\n")))
bank.variant(
    "uint8-taken",
    DISTANCES,
    ('        raise TypeError("float images are expected")', "        images = images.float()"),
)

bank.slip("dtype-changed", *full(("return mixed, kept", "return mixed.float(), kept")))
bank.variant(
    "dtype-changed",
    DISTANCES,
    ("return torch.where(inside, images[order], images)", "return torch.where(inside, images[order], images).float()"),
)

bank.slip(
    "nothing-mixed",
    *full(("return mixed, kept * soft + (1 - kept) * soft.roll(1, 0)", "return images.clone(), soft")),
)
bank.variant("nothing-mixed", DISTANCES, ("torch.randperm(b, device=d)", "torch.arange(b, device=d)"))

bank.slip("not-a-rectangle", *full((".to(images.dtype)  #", ".to(images.dtype) * 0.5  #")))  # a blend in the box
bank.variant("not-a-rectangle", DISTANCES, ("images[order], images)", "images[order].lerp(images, 0.3), images)"))

bank.hint("pasted-from-elsewhere", "The pasted pixels aren't those of the partner at the same position.")
bank.slip(
    "pasted-from-elsewhere",
    *full(
        (
            "    kept = kept[:, None]\n",
            "    mixed = torch.where(inside > 0, mixed.flip(3), mixed)\n    kept = kept[:, None]\n",
        )
    ),
)
bank.slip(
    "pasted-from-elsewhere",
    *full(
        (
            "    kept = kept[:, None]\n",
            "    mixed = torch.where(inside > 0, images.roll(1, 0).mean((2, 3), keepdim=True), images)\n    kept = kept[:, None]\n",
        )
    ),
)
bank.variant(
    "pasted-from-elsewhere",
    DISTANCES,
    ("torch.where(inside, images[order]", "torch.where(inside, images[order].flip(2)"),
)

bank.hint(
    "box-not-uniform",
    "The centres aren't uniform over the image: draw rows and columns separately, over the whole height and the "
    "whole width.",
)
bank.slip("box-not-uniform", *full(("x * width, height", "x * width / 2, height")))
bank.slip(
    "box-not-uniform",
    *full(("cutmix_boxes(lam, y * height, x * width,", "cutmix_boxes(lam, y * height, y * width,")),
)
bank.variant("box-not-uniform", DISTANCES, ("(columns - cx)", "(columns - cy)"))
bank.slip("box-not-uniform", *full(("lam, y * height", "lam, (y + torch.rand_like(y)) / 2 * height")))
bank.variant(
    "box-not-uniform", DISTANCES, ("(columns - cx)", "(columns - (0.5 + 0.2 * torch.randn_like(cx)).clamp(0, 1))")
)
bank.slip("labels-dtype", *full(("return mixed, kept * soft", "return mixed, kept.double() * soft")))
KEPT = ("labels.float() if labels.dim() == 2 else F", "labels if labels.dim() == 2 else F")
BACK = ("kept * soft + (1 - kept) * soft.roll(1, 0)", "(kept * soft + (1 - kept) * soft.roll(1, 0)).to(soft.dtype)")
bank.slip("labels-dtype", *full(KEPT, BACK))  # those that come in bfloat16 stay so
bank.variant(
    "labels-dtype",
    DISTANCES,
    ("kept * soft + (1 - kept) * soft[order]", "(kept * soft + (1 - kept) * soft[order]).bfloat16()"),
)

bank.hint(
    "one-centre",
    "The boxes of all images share a row or a column, as if they had one centre. Draw one centre for each image: y "
    "and x of shape (batch,), in pixels.",
)
bank.slip(
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y, x = torch.rand(2, device=images.device)")),
)
bank.slip(
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y, x = torch.rand(2, 1, device=images.device)")),
)
bank.slip("one-centre", *full(("(lam, y * height,", "(lam, torch.rand(1, device=y.device) * height,")))
bank.slip(
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y = x = torch.zeros(n, device=images.device)")),
)
bank.variant("one-centre", DISTANCES, ("torch.rand(b, 1, 1, 1, device=d) for", "torch.rand(1, 1, 1, 1, device=d) for"))

bank.hint(
    "box-proportions",
    "The boxes don't have the proportions of the image: one side is √(1 − λ) times the image's height, the other "
    "√(1 − λ) times its width.",
)


@bank.wrong("box-proportions")
def cutmix(images, labels, classes, alpha):
    """Squares, whatever the image."""
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    if not images.is_floating_point():
        raise TypeError("float images, please")
    n, _, h, w = images.shape
    a = torch.full((n,), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    y, x = torch.rand(2, n, device=images.device)
    half = ((1 - lam) * h * w).sqrt() / 2
    top, bottom = ((y * h + k * half).round().clamp(0, h)[:, None] for k in (-1, 1))
    left, right = ((x * w + k * half).round().clamp(0, w)[:, None] for k in (-1, 1))
    r, c = torch.arange(h, device=images.device), torch.arange(w, device=images.device)
    inside = ((r >= top) & (r < bottom))[:, None, :, None] & ((c >= left) & (c < right))[:, None, None]
    kept = 1 - (bottom - top) * (right - left) / (h * w)
    return torch.where(inside, images.roll(1, 0), images), kept * soft + (1 - kept) * soft.roll(1, 0)


bank.variant("box-proportions", DISTANCES, ("(columns - cx).abs() < half)", "(columns - cx).abs() * w / h < half)"))

bank.slip("labels-not-mixed", *full(("kept * soft + (1 - kept) * soft.roll(1, 0)", "soft")))
bank.variant("labels-not-mixed", DISTANCES, ("kept * soft + (1 - kept) * soft[order]", "soft"))

bank.slip("images-not-mixed", *full(("return mixed, kept", "return images.clone(), kept")))
bank.variant("images-not-mixed", DISTANCES, ("torch.where(inside, images[order], images)", "images.clone()"))

bank.slip("unclear-refusal", *full((REFUSE5, "")))
bank.slip("unclear-refusal", *full(("raise TypeError", "raise ValueError")))
bank.variant(
    "unclear-refusal",
    DISTANCES,
    ('raise TypeError("float images are expected")', 'raise AssertionError("floats")'),
)

bank.slip(
    "partner-twice",
    *full(
        (
            "    mixed = torch.empty_like(images)",
            "    order = torch.randint(n, (n,), device=images.device)\n    mixed = torch.empty_like(images)",
        ),
        (
            "torch.lerp(images[1:], images[:-1], inside[1:], out=mixed[1:])",
            "mixed = torch.lerp(images, images[order], inside)",
        ),
        ("    torch.lerp(images[:1], images[-1:], inside[:1], out=mixed[:1])\n", ""),
        ("soft.roll(1, 0)", "soft[order]"),
    ),
)
bank.variant("partner-twice", DISTANCES, ("torch.randperm(b, device=d)", "torch.randint(b, (b,), device=d)"))

bank.slip(
    "three-images", *full(("(1 - kept) * soft.roll(1, 0)", "(1 - kept) * (soft.roll(1, 0) + soft.roll(2, 0)) / 2"))
)
bank.variant("three-images", DISTANCES, ("(1 - kept) * soft[order]", "(1 - kept) * (soft[order] + soft.flip(0)) / 2"))

bank.hint(
    "sides-swapped",
    "Height and width are swapped: in images of 24 rows and 32 columns, no box goes beyond column 24.",
)
bank.slip(
    "sides-swapped",
    *full(
        (
            "cutmix_boxes(lam, y * height, x * width, height, width)",
            "cutmix_boxes(lam, y * height, x * width, width, height)",
        )
    ),
)
bank.slip(
    "sides-swapped",
    *full(
        (
            "cutmix_boxes(lam, y * height, x * width, height, width)",
            "cutmix_boxes(lam, y * width, x * height, width, height)",
        )
    ),
)
bank.variant(
    "sides-swapped",
    PAPER,
    ("    ch, cw =", "    h, w = w, h\n    ch, cw ="),
    (
        "torch.arange(h, device=images.device), torch.arange(w,",
        "torch.arange(w, device=images.device), torch.arange(h,",
    ),
)
bank.slip("box-not-uniform", *full(("y * height, x * width,", "y * width, x * height,")))

# what every augmentation of a batch promises, in the other design
bank.variant("other-device", DISTANCES, ("float(alpha), device=d)", "float(alpha))"))
bank.variant("waits", DISTANCES, ("torch.randperm(b, device=d)", "torch.randperm(b)"))
bank.variant("waits", DISTANCES, ("    order =", "    assert inside.any() or b > 0\n    order ="))
bank.variant(
    "loop-over-images",
    DISTANCES,
    ("torch.where(inside,", "torch.where(torch.stack([one.clone() for one in inside]),"),
)
bank.variant(
    "images-changed",
    DISTANCES,
    ("torch.where(inside, images[order], images)", "images.copy_(torch.where(inside, images[order], images)).clone()"),
)
bank.variant(
    "not-reproducible",
    DISTANCES,
    ("    cy, cx =", "    import random\n\n    cy, cx ="),
    ("torch.rand(b, 1, 1, 1, device=d) for", "(torch.rand(b, 1, 1, 1, device=d) + random.random()) % 1 for"),
)
bank.variant("always-the-same", DISTANCES, ("    gamma =", "    torch.manual_seed(3)\n    gamma ="))
bank.slip(
    "half-edges",
    *full(("    kept = kept[:, None]\n", "    kept = 1 - (1 - kept).to(images.dtype).float()[:, None]\n")),
)
bank.slip(
    "half-edges",
    *full(("    kept = kept[:, None]\n", "    kept = kept.to(images.dtype)[:, None].float()\n")),
    variant=True,
)
bank.slip("areas-wrong", *full((CUT, CUT + "\n    lam = lam.sqrt()")), variant=True)
