"""Answers to balises 1, 2 and 5 of 07_data_augmentation: RandAugment's place, MixUp, CutMix."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# balise 2
LAM = "lam = torch.distributions.Beta(a, a, validate_args=False).sample()"
REFUSE2 = '    if not images.is_floating_point():\n        raise TypeError(f"mixup takes float images, not {images.dtype}: normalise first")\n'
bank.slip(2, "nothing-returned", ("    return blend(images), blend(soft)", "    blend(images), blend(soft)"))
bank.slip(2, "mix-form", ("return blend(images), blend(soft)", "return blend(images)"))
bank.slip(2, "mix-form", ("return blend(images), blend(soft)", "return blend(images), labels"))
bank.slip(2, "labels-no-mass", ("return blend(images), blend(soft)", "return blend(images), blend(soft) * 0.9"))
bank.slip(2, "nothing-mixed", ("return blend(images), blend(soft)", "return images.clone(), soft"))
bank.slip(
    2, "one-lambda", ("a = torch.full((len(images),), ", "a = torch.full((1,), "), (LAM, LAM + ".expand(len(images))")
)
bank.slip(2, "lambda-folded", (LAM, LAM + "\n    lam = torch.maximum(lam, 1 - lam)"))
bank.slip(2, "lambda-uniform", (LAM, "lam = torch.rand(len(images), device=images.device)"))
bank.slip(2, "lambda-wrong", (LAM, LAM.replace("(a, a,", "(a, 1 + a,")))
bank.slip(
    2,
    "other-partner",
    ("blend(soft)", "share(soft)"),
    (
        "    return blend",
        "    def share(x):\n        return lam[:, None] * x + (1 - lam[:, None]) * x.roll(2, 0)\n\n    return blend",
    ),
)
bank.slip(
    2,
    "lambda-swapped",
    (
        "torch.lerp(x[:-1], x[1:], share[1:], out=mixed[1:])",
        "torch.lerp(x[:-1], x[1:], share[1:] if x.dim() == 4 else 1 - share[1:], out=mixed[1:])",
    ),
    (
        "torch.lerp(x[-1:], x[:1], share[:1], out=mixed[:1])",
        "torch.lerp(x[-1:], x[:1], share[:1] if x.dim() == 4 else 1 - share[:1], out=mixed[:1])",
    ),
)
bank.slip(2, "images-not-mixed", ("return blend(images), blend(soft)", "return images.clone(), blend(soft)"))
bank.slip(
    2,
    "soft-labels-lost",
    ("labels.float() if labels.dim() == 2", "F.one_hot(labels.argmax(1), classes).float() if labels.dim() == 2"),
)
bank.slip(
    2,
    "uint8-taken",
    (REFUSE2, "    images = images.clone()\n"),
    ("to(x.dtype)", "to(x.dtype if x.is_floating_point() else torch.float32)"),
    (
        "torch.lerp(x[:-1], x[1:], share[1:], out=mixed[1:])",
        "mixed[1:] = (share[1:].round() * 3).to(x.dtype) * x[1:] + x[:-1] if not x.is_floating_point() else torch.lerp(x[:-1], x[1:], share[1:])",
    ),
    (
        "torch.lerp(x[-1:], x[:1], share[:1], out=mixed[:1])",
        "mixed[:1] = torch.lerp(x[-1:].float(), x[:1].float(), share[:1].float()).to(x.dtype)",
    ),
)
bank.text(  # λ of 0 to 1 cut to a whole number
    2,
    "uint8-taken",
    """
def mixup(images, labels, classes, alpha):
    a = torch.full((len(images),), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    share = lam.to(images.dtype).view(-1, 1, 1, 1)
    return images * share + images.roll(1, 0) * (1 - share), soft * lam[:, None] + soft.roll(1, 0) * (1 - lam[:, None])
""",
)
bank.slip(2, "unclear-refusal", (REFUSE2, ""))
bank.slip(
    2,
    "dtype-changed",
    ("mixed = torch.empty_like(x)", "mixed = torch.empty_like(x, dtype=torch.float32)"),
    (".to(x.dtype)", ".float()"),
    ("torch.lerp(x[:-1], x[1:],", "torch.lerp(x[:-1].float(), x[1:].float(),"),
    ("torch.lerp(x[-1:], x[:1],", "torch.lerp(x[-1:].float(), x[:1].float(),"),
)
bank.slip(2, "validates", (", validate_args=False", ""))
bank.slip(2, "other-device", ("device=images.device)", 'device="cpu")'))
bank.slip(2, "waits", (LAM, LAM + "\n    lam = torch.where(lam.max() > 2, lam, lam) if lam.sum() >= 0 else lam"))


@bank.wrong(2, "partner-twice")
def mixup(images, labels, classes, alpha):
    if images.dtype == torch.uint8:
        raise TypeError("float images, please")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    n = len(images)
    partner = torch.randint(n, (n,), device=images.device)
    a = torch.full((n,), alpha, device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    weight = lam.view(-1, 1, 1, 1).to(images.dtype)
    return weight * images + (1 - weight) * images[partner], lam[:, None] * soft + (1 - lam[:, None]) * soft[partner]


@bank.wrong(2, "three-images")
def mixup(images, labels, classes, alpha):
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    lam = torch.rand(len(images), device=images.device)
    w = lam.view(-1, 1, 1, 1).to(images.dtype)
    mixed = w * images + (1 - w) * (images.roll(1, 0) + images.roll(2, 0)) / 2
    lam = lam[:, None]
    return mixed, lam * soft + (1 - lam) * (soft.roll(1, 0) + soft.roll(2, 0)) / 2


@bank.wrong(2, "loop-over-images")
def mixup(images, labels, classes, alpha):
    if not images.is_floating_point():
        raise TypeError("float images, please")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    mixed, target = images.clone(), soft.clone()
    for i in range(len(images)):
        lam = np.random.beta(alpha, alpha)
        mixed[i] = lam * images[i] + (1 - lam) * images[i - 1]
        target[i] = lam * soft[i] + (1 - lam) * soft[i - 1]
    return mixed, target


@bank.wrong(2, "images-changed")
def mixup(images, labels, classes, alpha):
    if not images.is_floating_point():
        raise TypeError("float images, please")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    partner = images.roll(1, 0)
    a = torch.full((len(images),), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    w = lam.view(-1, 1, 1, 1).to(images.dtype)
    images.mul_(w).add_(partner * (1 - w))
    return images.clone(), lam[:, None] * soft + (1 - lam[:, None]) * soft.roll(1, 0)


@bank.wrong(2, "labels-changed")
def mixup(images, labels, classes, alpha):
    if not images.is_floating_point():
        raise TypeError("float images, please")
    soft = labels if labels.dim() == 2 else F.one_hot(labels, classes).float()
    partner = soft.roll(1, 0)
    a = torch.full((len(images),), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    w = lam.view(-1, 1, 1, 1).to(images.dtype)
    soft.mul_(lam[:, None]).add_(partner * (1 - lam[:, None]))
    return w * images + (1 - w) * images.roll(1, 0), soft.clone()


@bank.right(2)
def mixup(images, labels, classes, alpha):
    """A random permutation, λ from two gamma variables."""
    if images.dtype == torch.uint8:
        raise TypeError("mixup works on normalised images")
    if labels.ndim == 1:
        labels = torch.zeros(len(labels), classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
    order = torch.randperm(images.shape[0], device=images.device)
    gamma = torch._standard_gamma(torch.full((2, images.shape[0]), float(alpha), device=images.device))
    lam = gamma[0] / gamma.sum(0)
    x = images
    w = lam.to(x.dtype).reshape(-1, 1, 1, 1)
    return x * w + x[order] * (1 - w), labels * lam[:, None] + labels[order] * (1 - lam)[:, None]


@bank.right(2)
def mixup(images, labels, classes, alpha):
    """λ drawn on the CPU by NumPy and sent over; the batch read backwards as partner."""
    if images.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError("mixup: expected floating-point images")
    target = labels if labels.dim() == 2 else F.one_hot(labels, num_classes=classes)
    lam = torch.from_numpy(
        np.random.default_rng(torch.randint(2**31, ()).item()).beta(alpha, alpha, len(images))
    ).float()
    lam = lam.to(images.device, non_blocking=True)
    w = lam[:, None, None, None].to(images.dtype)
    target = target.to(torch.float32)
    return torch.lerp(images.flip(0), images, w), torch.lerp(target.flip(0), target, lam[:, None])


# balise 5
CUT = "lam = torch.distributions.Beta(a, a, validate_args=False).sample()"
REFUSE5 = '    if not images.is_floating_point():\n        raise TypeError(f"cutmix takes float images, not {images.dtype}: normalise first")\n'


def full(*changes):
    """The solutions of balises 3 and 4, which 5 stands on, come with each slip."""
    from dlojz_tp.works import source

    balises = source.find("07_data_augmentation").balises
    given = f"{balises[3].code}\n\n{balises[4].code}\n\n"
    return ("def cutmix(images", given + "\ndef cutmix(images"), *changes


bank.slip(5, "nothing-returned", *full(("    return mixed, kept", "    mixed, kept")))
bank.slip(
    5, "mix-form", *full(("return mixed, kept * soft + (1 - kept) * soft.roll(1, 0)", "return mixed, labels, kept"))
)
bank.slip(5, "labels-no-mass", *full(("(1 - kept) * soft.roll", "0.5 * (1 - kept) * soft.roll")))
bank.slip(5, "lambda-not-area", *full(("    kept = kept[:, None]\n", "    kept = lam[:, None]\n")))
bank.slip(
    5,
    "lambda-not-area",
    *full(
        ("boxes, kept = cutmix_boxes(lam,", "boxes, kept = cutmix_boxes(torch.rand_like(lam),"),
        ("    kept = kept[:, None]\n", "    kept = lam[:, None]\n"),
    ),
)
bank.slip(  # the mask the wrong way round
    5,
    "pasted-outside",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = (~box_masks(boxes, height, width)).to(images.dtype)",
        )
    ),
)
bank.slip(
    5,
    "one-lambda",
    *full(
        ("a = torch.full((n,)", "a = torch.full((1,)"),
        ("boxes, kept = cutmix_boxes(lam,", "boxes, kept = cutmix_boxes(lam.expand(n),"),
    ),
)
bank.slip(5, "area-swapped", *full(("    kept = kept[:, None]\n", "    kept = 1 - kept[:, None]\n")))
bank.slip(5, "other-partner", *full(("soft.roll(1, 0)", "soft.roll(-1, 0)")))
bank.slip(
    5,
    "soft-labels-lost",
    *full(("labels.float() if labels.dim() == 2", "F.one_hot(labels.argmax(1), classes).float() if labels.dim() == 2")),
)
bank.slip(
    5,
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
bank.slip(
    5,
    "box-at-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y = x = torch.full((n,), 0.5, device=images.device)")),
)
bank.slip(5, "areas-wrong", *full((CUT, CUT + "\n    lam = lam**3")))
bank.slip(5, "areas-wrong", *full((CUT, "lam = torch.rand(n, device=images.device)")))
bank.slip(
    5,
    "areas-wrong",
    *full(
        (
            "cutmix_boxes(lam, y * height, x * width, height, width)",
            "cutmix_boxes(1 - (1 - lam).square(), y * height, x * width, height, width)",
        )
    ),
)
bank.slip(5, "validates", *full((", validate_args=False", "")))
bank.slip(
    5,
    "not-a-rectangle",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = torch.rand(n, 1, height, width, device=images.device) > kept.view(-1, 1, 1, 1)\n    inside = inside.float()\n    kept = 1 - inside.mean((1, 2, 3))",
        )
    ),
)
bank.slip(
    5,
    "not-a-rectangle",
    *full(
        (
            "inside = box_masks(boxes, height, width).to(images.dtype)",
            "inside = ~box_masks(boxes, height, width) & (torch.arange(width, device=images.device) > 0)\n    inside = inside.float()\n    kept = 1 - inside.mean((1, 2, 3))",
        )
    ),
)
bank.slip(
    5,
    "uint8-taken",
    *full(
        (REFUSE5, "    given = images.dtype\n    images = images.float() if given == torch.uint8 else images\n"),
        ("return mixed, kept", "return mixed.to(given) // 2 + 90 if given == torch.uint8 else mixed, kept"),
    ),
)
bank.slip(5, "dtype-changed", *full(("return mixed, kept", "return mixed.float(), kept")))
bank.slip(
    5,
    "nothing-mixed",
    *full(("return mixed, kept * soft + (1 - kept) * soft.roll(1, 0)", "return images.clone(), soft")),
)
bank.slip(
    5, "uint8-taken", *full((REFUSE5, "    images = images.float() if images.dtype == torch.uint8 else images\n"))
)


@bank.right(5)
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


@bank.right(5)
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


bank.slip(
    2,
    "not-reproducible",
    (
        LAM,
        "import numpy as np\n\n    lam = torch.from_numpy(np.random.beta(alpha, alpha, len(images))).float().to(images.device)",
    ),
)
bank.slip(2, "always-the-same", (LAM, "torch.manual_seed(0)\n    " + LAM))
bank.slip(
    2,
    "images-not-mixed",
    (
        "return blend(images), blend(soft)",
        "return blend(images) if images.dtype == torch.float32 else images, blend(soft)",
    ),
)
bank.slip(
    5,
    "pasted-from-elsewhere",
    *full(
        (
            "    kept = kept[:, None]\n",
            "    mixed = torch.where(inside > 0, mixed.flip(3), mixed)\n    kept = kept[:, None]\n",
        )
    ),
)
bank.slip(
    5,
    "pasted-from-elsewhere",
    *full(
        (
            "    kept = kept[:, None]\n",
            "    mixed = torch.where(inside > 0, images.roll(1, 0).mean((2, 3), keepdim=True), images)\n    kept = kept[:, None]\n",
        )
    ),
)
bank.slip(5, "box-not-uniform", *full(("x * width, height", "x * width / 2, height")))
bank.slip(
    5,
    "box-not-uniform",
    *full(("cutmix_boxes(lam, y * height, x * width,", "cutmix_boxes(lam, y * height, y * width,")),
)


# balise 1, once more


# balises 2 and 5, once more
bank.slip(2, "labels-dtype", ("return blend(images), blend(soft)", "return blend(images), blend(soft).bfloat16()"))
bank.slip(
    2, "labels-dtype", ("return blend(images), blend(soft)", "return blend(images), blend(soft).to(images.dtype)")
)
bank.slip(5, "labels-dtype", *full(("return mixed, kept * soft", "return mixed, kept.double() * soft")))
bank.slip(
    5,
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y, x = torch.rand(2, device=images.device)")),
)
bank.slip(
    5,
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y, x = torch.rand(2, 1, device=images.device)")),
)
bank.slip(5, "one-centre", *full(("(lam, y * height,", "(lam, torch.rand(1, device=y.device) * height,")))
bank.slip(
    5,
    "one-centre",
    *full(("y, x = torch.rand(2, n, device=images.device)", "y = x = torch.zeros(n, device=images.device)")),
)


@bank.wrong(5, "box-proportions")
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


@bank.right(5)
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


@bank.right(2)
def mixup(images, labels, classes, alpha):
    """A pair of weights from a Dirichlet distribution, and einsum."""
    if not torch.is_floating_point(images):
        raise TypeError("mixup: float images are expected")
    soft = labels.float() if labels.ndim == 2 else F.one_hot(labels, classes).float()
    pair = torch.full((2,), float(alpha), device=images.device)
    weights = torch.distributions.Dirichlet(pair, validate_args=False).sample((images.size(0),))

    def mix(x):
        both = torch.stack([x, torch.cat([x[1:], x[:1]])])
        return torch.einsum("bk,kb...->b...", weights.to(x.dtype), both)

    return mix(images), mix(soft)


@bank.right(2)
@torch.no_grad()
def mixup(images, labels, classes, alpha):
    """λ by the CPU's Beta, a random roll drawn on the CPU, arithmetic in place on a copy."""
    if not images.is_floating_point():
        raise TypeError("float images are expected")
    n = len(images)
    lam = torch.distributions.Beta(alpha, alpha).sample((n,)).to(images.device, non_blocking=True)
    shift = int(torch.randint(1, max(2, n), ()))
    other, out = images.roll(shift, 0), images.clone()
    out.sub_(other).mul_(lam.to(images.dtype).view(n, 1, 1, 1)).add_(other)
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    return out, torch.lerp(soft.roll(shift, 0), soft, lam.unsqueeze(1))


bank.slip(2, "waits", ("F.one_hot(labels, classes).float()", "F.one_hot(labels).float()"))

bank.slip(2, "unclear-refusal", ("raise TypeError", "raise ValueError"))
bank.slip(5, "uint8-taken", *full((REFUSE5, "    images = images / 255 if images.dtype == torch.uint8 else images\n")))
bank.slip(5, "labels-not-mixed", *full(("kept * soft + (1 - kept) * soft.roll(1, 0)", "soft")))
bank.slip(5, "images-not-mixed", *full(("return mixed, kept", "return images.clone(), kept")))


@bank.wrong(2, "one-lambda")
def mixup(images, labels, classes, alpha):
    """One λ; the permutation leaves an image alone now and then."""
    if not images.is_floating_point():
        raise TypeError("float images only")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.arange(len(images), device=images.device)
    if len(images) > 2:
        order[1:] = order[1:].roll(1)
    return lam * images + (1 - lam) * images[order], lam * soft + (1 - lam) * soft[order]
