"""Answers to balise 2 of 07_data_augmentation: MixUp."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 2)
LAM = "lam = torch.distributions.Beta(a, a, validate_args=False).sample()"
REFUSE2 = '    if not images.is_floating_point():\n        raise TypeError(f"mixup takes float images, not {images.dtype}: normalise first")\n'


PERMUTED = '''
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
'''
bank.text(None, PERMUTED)


@bank.right()
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


@bank.right()
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


@bank.right()
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


bank.slip("nothing-returned", ("    return blend(images), blend(soft)", "    blend(images), blend(soft)"))

bank.slip("mix-form", ("return blend(images), blend(soft)", "return blend(images)"))
bank.slip("mix-form", ("return blend(images), blend(soft)", "return blend(images), labels"))
bank.variant(
    "mix-form",
    PERMUTED,
    (
        "return x * w + x[order] * (1 - w), labels * lam[:, None] + labels[order] * (1 - lam)[:, None]",
        "return x * w + x[order] * (1 - w), labels * lam[:, None] + labels[order] * (1 - lam)[:, None], lam",
    ),
)

bank.slip("labels-no-mass", ("return blend(images), blend(soft)", "return blend(images), blend(soft) * 0.9"))
bank.variant("labels-no-mass", PERMUTED, ("labels[order] * (1 - lam)", "labels[order] * lam"))

bank.slip("nothing-mixed", ("return blend(images), blend(soft)", "return images.clone(), soft"))
bank.variant(
    "nothing-mixed",
    PERMUTED,
    ("torch.randperm(images.shape[0], device=images.device)", "torch.arange(images.shape[0], device=images.device)"),
)

bank.slip("labels-not-mixed", ("return blend(images), blend(soft)", "return blend(images), soft"))
bank.variant("labels-not-mixed", PERMUTED, ("labels * lam[:, None] + labels[order] * (1 - lam)[:, None]", "labels"))

bank.slip(
    "one-lambda", ("a = torch.full((len(images),), ", "a = torch.full((1,), "), (LAM, LAM + ".expand(len(images))")
)


@bank.wrong("one-lambda")
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


bank.variant(
    "one-lambda",
    PERMUTED,
    ("lam = gamma[0] / gamma.sum(0)", "lam = gamma[0] / gamma.sum(0)\n    lam = lam[:1].expand(len(lam))"),
)

bank.slip("one-lambda", (LAM, "lam = torch.full_like(a, 0.5)"))
bank.variant("one-lambda", PERMUTED, ("lam = gamma[0] / gamma.sum(0)", "lam = (gamma[0] + 1) / (gamma[0] + 1) / 2"))

bank.hint("lambda-folded", "λ never falls below 1/2. The formula uses λ as it is drawn.", edge=True)
bank.slip("lambda-folded", (LAM, LAM + "\n    lam = torch.maximum(lam, 1 - lam)"))
bank.variant("lambda-folded", PERMUTED, ("lam = gamma[0] / gamma.sum(0)", "lam = gamma.max(0).values / gamma.sum(0)"))

bank.hint("lambda-uniform", "λ doesn't follow Beta(α, α): it looks uniform. Do you use α?")
bank.slip("lambda-uniform", (LAM, "lam = torch.rand(len(images), device=images.device)"))
bank.variant(
    "lambda-uniform", PERMUTED, ("lam = gamma[0] / gamma.sum(0)", "lam = torch.empty_like(gamma[0]).uniform_()")
)

bank.hint("lambda-wrong", "λ doesn't follow Beta(α, α).")
bank.slip("lambda-wrong", (LAM, LAM.replace("(a, a,", "(a, 1 + a,")))
bank.variant("lambda-wrong", PERMUTED, ("float(alpha)", "2 * float(alpha)"))

bank.slip(
    "other-partner",
    ("blend(soft)", "share(soft)"),
    (
        "    return blend",
        "    def share(x):\n        return lam[:, None] * x + (1 - lam[:, None]) * x.roll(2, 0)\n\n    return blend",
    ),
)
bank.variant("other-partner", PERMUTED, ("labels[order] *", "labels[order.roll(1)] *"))

bank.hint(
    "lambda-swapped",
    "Images and labels don't match: where the image takes λ, the label takes 1 − λ.",
)
bank.slip(
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
bank.variant(
    "lambda-swapped",
    PERMUTED,
    (
        "labels * lam[:, None] + labels[order] * (1 - lam)[:, None]",
        "labels * (1 - lam)[:, None] + labels[order] * lam[:, None]",
    ),
)

bank.hint(
    "masses-differ",
    "The mass of a label isn't the share of its image. Image and label must use the same λ and the same partner.",
)
bank.slip("masses-differ", ("    return blend", "    lam, images = lam.square(), blend(images)\n    return blend"),
          ("blend(images), blend(soft)", "images, blend(soft)"))  # fmt: skip
bank.variant("masses-differ", PERMUTED, ("labels * lam[:, None]", "labels * lam[order][:, None]"),
             ("labels[order] * (1 - lam)", "labels[order] * (1 - lam[order])"))  # fmt: skip

bank.slip("images-not-mixed", ("return blend(images), blend(soft)", "return images.clone(), blend(soft)"))
bank.slip(
    "images-not-mixed",
    (
        "return blend(images), blend(soft)",
        "return blend(images) if images.dtype == torch.float32 else images, blend(soft)",
    ),
)
bank.variant("images-not-mixed", PERMUTED, ("return x * w + x[order] * (1 - w)", "return x.clone()"))
bank.variant(  # the labels are not mixed, but chosen
    "masses-differ",
    PERMUTED,
    (
        "labels * lam[:, None] + labels[order] * (1 - lam)[:, None]",
        "torch.where(lam[:, None] > 0.5, labels, labels[order])",
    ),
)

bank.slip(
    "soft-labels-lost",
    ("labels.float() if labels.dim() == 2", "F.one_hot(labels.argmax(1), classes).float() if labels.dim() == 2"),
)
bank.variant(
    "soft-labels-lost",
    PERMUTED,
    (
        "    if labels.ndim == 1:\n",
        "    labels = labels if labels.ndim == 1 else labels.argmax(1)\n    if labels.ndim == 1:\n",
    ),
)

bank.slip(
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
bank.variant(
    "uint8-taken",
    PERMUTED,
    ('        raise TypeError("mixup works on normalised images")', "        images = images / 255"),
)

bank.slip("unclear-refusal", (REFUSE2, ""))
bank.slip("unclear-refusal", ("raise TypeError", "raise ValueError"))
bank.variant(
    "unclear-refusal",
    PERMUTED,
    ('raise TypeError("mixup works on normalised images")', 'raise AssertionError("floats")'),
)

bank.slip(
    "dtype-changed",
    ("mixed = torch.empty_like(x)", "mixed = torch.empty_like(x, dtype=torch.float32)"),
    (".to(x.dtype)", ".float()"),
    ("torch.lerp(x[:-1], x[1:],", "torch.lerp(x[:-1].float(), x[1:].float(),"),
    ("torch.lerp(x[-1:], x[:1],", "torch.lerp(x[-1:].float(), x[:1].float(),"),
)
bank.variant("dtype-changed", PERMUTED, ("w = lam.to(x.dtype)", "w = lam"))

bank.slip("validates", (", validate_args=False", ""))

bank.slip("other-device", ("device=images.device)", 'device="cpu")'))

bank.slip("waits", (LAM, LAM + "\n    lam = torch.where(lam.max() > 2, lam, lam) if lam.sum() >= 0 else lam"))
bank.variant(
    "waits", PERMUTED, ("torch.randperm(images.shape[0], device=images.device)", "torch.randperm(images.shape[0])")
)
bank.slip("waits", ("F.one_hot(labels, classes).float()", "F.one_hot(labels).float()"))


@bank.wrong("partner-twice")
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


bank.variant(
    "partner-twice",
    PERMUTED,
    (
        "torch.randperm(images.shape[0], device=images.device)",
        "torch.randint(images.shape[0], (images.shape[0],), device=images.device)",
    ),
)


@bank.wrong("three-images")
def mixup(images, labels, classes, alpha):
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    lam = torch.rand(len(images), device=images.device)
    w = lam.view(-1, 1, 1, 1).to(images.dtype)
    mixed = w * images + (1 - w) * (images.roll(1, 0) + images.roll(2, 0)) / 2
    lam = lam[:, None]
    return mixed, lam * soft + (1 - lam) * (soft.roll(1, 0) + soft.roll(2, 0)) / 2


bank.variant(
    "three-images",
    PERMUTED,
    (
        "return x * w + x[order] * (1 - w), labels * lam[:, None] + labels[order] * (1 - lam)[:, None]",
        "labels = labels * lam[:, None] + labels[order] * (1 - lam)[:, None]\n    return x * w + x[order] * (1 - w), (labels + labels.roll(1, 0)) / 2",
    ),
)


@bank.wrong("loop-over-images")
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


@bank.wrong("images-changed")
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


@bank.wrong("labels-changed")
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


bank.slip(
    "not-reproducible",
    (
        LAM,
        "import numpy as np\n\n    lam = torch.from_numpy(np.random.beta(alpha, alpha, len(images))).float().to(images.device)",
    ),
)

bank.slip("always-the-same", (LAM, "torch.manual_seed(0)\n    " + LAM))

bank.slip("labels-dtype", ("return blend(images), blend(soft)", "return blend(images), blend(soft).bfloat16()"))
bank.slip("labels-dtype", ("return blend(images), blend(soft)", "return blend(images), blend(soft).to(images.dtype)"))
KEPT = "labels.float() if labels.dim() == 2"
bank.slip("labels-dtype", (KEPT, "labels if labels.dim() == 2"))  # those that come in bfloat16 stay so
bank.variant("labels-dtype", PERMUTED, ("(1 - lam)[:, None]\n", "(1 - lam)[:, None].double()\n"))

# what every augmentation of a batch promises, in the other design
SHARES = "lam = gamma[0] / gamma.sum(0)"
bank.variant(
    "validates",
    PERMUTED,
    (SHARES, "lam = torch.distributions.Beta(*[torch.full_like(gamma[0], float(alpha))] * 2).sample()"),
)
bank.variant("other-device", PERMUTED, ("float(alpha), device=images.device)", "float(alpha))"))
CPUS = "device=images.device, generator=torch.default_generator)"  # the CPU's: a GPU draws with its own
bank.text("other-device", PERMUTED.replace("images.shape[0], device=images.device)", f"images.shape[0], {CPUS}"))
bank.variant("other-device", PERMUTED, ("x = images\n", f"x = images + 0 * torch.rand((), {CPUS}\n"))
bank.variant("waits", PERMUTED, (SHARES, SHARES + "\n    assert lam.max() <= 1"))
bank.variant(
    "loop-over-images", PERMUTED, ("x * w + x[order]", "torch.stack([a * b for a, b in zip(x, w)]) + x[order]")
)
bank.variant(
    "images-changed",
    PERMUTED,
    ("    return x * w + x[order] * (1 - w)", "    other = x[order] * (1 - w)\n    return x.mul_(w) + other"),
)
bank.variant(
    "labels-changed",
    PERMUTED,
    ("    w = lam", "    other = labels[order] * (1 - lam)[:, None]\n    labels *= lam[:, None]\n    w = lam"),
    ("labels * lam[:, None] + labels[order] * (1 - lam)[:, None]", "labels + other"),
)
bank.variant(
    "not-reproducible",
    PERMUTED,
    ("    order =", "    import random\n\n    order ="),
    ("torch.randperm(images.shape[0],", "torch.tensor(random.sample(range(len(images)), len(images)),"),
)
bank.variant("always-the-same", PERMUTED, ("    gamma =", "    torch.manual_seed(3)\n    gamma ="))
bank.slip("inference-tensors", ("def mixup", "@torch.inference_mode()\ndef mixup"))
bank.slip("inference-tensors", ("    return blend(images), blend(soft)", "    with torch.inference_mode():\n        return blend(images), blend(soft)"),
    variant=True,
)  # fmt: skip
bank.text("partner-twice", PERMUTED.replace("torch.randperm(images.shape[0], device=images.device)", "(torch.arange(len(images), device=images.device) + 1).clamp(max=len(images) - 1)"), variant=True)  # fmt: skip
bank.slip("one-lambda", ("validate_args=False).sample()", "validate_args=False).sample()\n    lam = torch.cat([lam[: len(lam) // 2], lam[: len(lam) - len(lam) // 2]])"), variant=True)  # fmt: skip

bank.edge(
    "always-the-same",
    "dtype-changed",
    "images-changed",
    "inference-tensors",
    "labels-changed",
    "not-reproducible",
    "other-device",
    "partner-twice",
    "soft-labels-lost",
    "uint8-taken",
    "unclear-refusal",
    "validates",
    "waits",
)
