"""Balises 2 and 5: MixUp and CutMix. Labels that name each image tell which images were mixed, and how much of each."""

import numpy as np
import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.data_augmentation.areas import LIMIT, MANY, right_areas
from dlojz_tp.checks.data_augmentation.devices import counts, leaves_inputs, stays_on_device

HINTS = {
    "mix-form": "Return two tensors: images of the shape that was given, and soft labels of shape (batch, classes).",
    "labels-no-mass": "The soft labels of an image must add up to 1, here {total:.3f}.",
    "nothing-mixed": "No image was mixed with another one.",
    "one-lambda": "All images were mixed with the same λ. Draw one for each image.",
    "other-partner": "Images and labels were mixed with different partners.",
    "images-not-mixed": "The labels are mixed, the images are not what λ and the partner ask for.",
    "soft-labels-lost": "Labels that are soft already (batch, classes) must be mixed as they are.",
    "labels-dtype": "The soft labels came back as {dtype}. They are float32, whatever the images are: half precision has three digits for λ.",
    "dtype-changed": "The images came as {wanted} and left as {dtype}.",
    "uint8-taken": "uint8 images were taken. Whole levels cut and wrap where they are mixed, and are not normalised yet: refuse them with a TypeError.",
}


def balise_2(mixup):
    """λ and partners read from the labels; then distribution, types, operations, devices."""
    yield "each image is mixed with one other by its own λ, and its label alike"
    torch.manual_seed(1)
    for batch, size in ((16, (3, 6, 4)), (1, (3, 4, 6)), (2, (1, 5, 3))):
        images = torch.randn(batch, *size)
        got = _mixed(mixup, images, torch.arange(batch), batch)
        _right_mixup(images, *got)
    yield "labels that are soft already"
    images, soft = torch.randn(8, 3, 4, 4), torch.rand(8, 3).softmax(1)
    mixed, labels = _mixed(mixup, torch.cat([images]), torch.cat([soft]), 3)
    _right_soft(images, soft, mixed, labels)
    yield "λ is drawn from Beta(α, α), for each image"
    for alpha in (0.2, 1.0):
        _right_lambdas(mixup, alpha)
    yield from _common(mixup)


def balise_5(cutmix):
    """Images of one value each tell where another was pasted."""
    yield "a rectangle of one other image is pasted, and the label mass is the fraction of pixels"
    torch.manual_seed(2)
    for batch, (height, width) in ((24, (16, 9)), (24, (7, 20)), (1, (4, 6)), (2, (5, 3))):
        places = (
            torch.arange(height * width, dtype=torch.float32).view(height, width) / 1000
        )  # where a pixel comes from
        images = torch.arange(batch).view(-1, 1, 1, 1) + places + torch.zeros(batch, 2, height, width)
        mixed, labels = _mixed(cutmix, images, torch.arange(batch), batch)
        moved = (mixed - places) - (mixed - places).round()
        if (moved.abs() > 1e-4).any():
            raise Wrong("pasted-from-elsewhere", where=f"image {int(moved.abs().flatten(1).amax(1).argmax())}")
        _right_cutmix((mixed - places).round(), labels, batch)
    yield "labels that are soft already"
    soft = torch.rand(8, 3).softmax(1)
    images = torch.arange(8.0).view(-1, 1, 1, 1).expand(8, 3, 6, 6).clone()
    mixed, labels = _mixed(cutmix, images, soft, 3)
    _right_soft_cut(soft, mixed, labels)
    yield "boxes: one for each image, anywhere, of the right areas"
    for alpha in (1.0, 0.3):
        right_areas(lambda images, labels, a=alpha: _mixed(cutmix, images, labels, 1, a)[0], alpha)
    yield from _common(cutmix)


def _common(mix):
    yield "float32 and bfloat16 stay what they are; uint8 is refused with a TypeError"
    _right_types(mix)
    yield "the inputs are left as they were"
    leaves_inputs(lambda x, y: mix(x, y, 5, 1.0), torch.randn(6, 3, 8, 8), torch.arange(6) % 5)
    leaves_inputs(lambda x, y: mix(x, y, 5, 1.0), torch.randn(6, 3, 8, 8), torch.eye(6)[:, :5].contiguous())
    yield "no loop over the images, on the images' device, nothing read back"
    counts(lambda x, y: mix(x, y, 5, 1.0), lambda b: (torch.randn(b, 3, 8, 8), torch.arange(b) % 5))
    stays_on_device(lambda x, y: mix(x, y, 5, 1.0), torch.randn(6, 3, 8, 8), torch.arange(6) % 5)
    yield "the same after the same torch.manual_seed, another mix at each call"
    found = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        found.append(mix(torch.arange(16.0).view(-1, 1, 1, 1).expand(16, 1, 8, 8).clone(), torch.arange(16), 16, 1.0))
    if not close(found[0], found[1], 1e-6):
        raise Wrong("not-reproducible")
    if close(found[1], found[2], 1e-6):
        raise Wrong("always-the-same")


def _mixed(mix, images, labels, classes, alpha=1.0):
    got = mix(images.clone(), labels.clone(), classes, alpha)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(g, torch.Tensor) for g in got):
        raise Wrong("mix-form", expected="(images, soft labels)", got=got)
    if got[0].shape != images.shape or got[1].shape != (len(images), classes):
        expected = f"{tuple(images.shape)} and {(len(images), classes)}"
        raise Wrong("mix-form", expected=expected, got=f"{tuple(got[0].shape)} and {tuple(got[1].shape)}")
    if got[1].dtype != torch.float32:
        raise Wrong(
            "labels-dtype", expected="float32", got=got[1].dtype, dtype=str(got[1].dtype).removeprefix("torch.")
        )
    total = got[1].sum(1)
    if not close(total, torch.ones(len(images)), 1e-4):
        worst = (total - 1).abs().argmax()
        raise Wrong("labels-no-mass", where=f"image {worst.item()}", total=total[worst].item())
    return got[0], got[1]


def _partners(labels, images_mixed=False):
    """(λ, partner) of each image from labels that name the images: λ is the mass of the image's own name."""
    batch = len(labels)
    named = (labels > 1e-6).sum(1)
    if (named > 2).any():
        image = int((named > 2).int().argmax())
        raise Wrong("three-images", image=image, n=int(named[image]))
    own = labels.diagonal()
    others = labels.clone()
    others.fill_diagonal_(0.0)
    partner = torch.where(others.sum(1) > 1e-6, others.argmax(1), torch.arange(batch))
    if batch > 8 and (partner == torch.arange(batch)).all():
        raise Wrong("labels-not-mixed" if images_mixed else "nothing-mixed")
    real = partner[partner != torch.arange(batch)]
    if len(real.unique()) < len(real):
        raise Wrong("partner-twice", got=f"{len(real)} images, {len(real.unique())} partners")
    return own, partner


def _right_mixup(images, mixed, labels):
    lam, partner = _partners(labels, not close(mixed, images))
    lam_4d = lam.view(-1, 1, 1, 1)
    alone = partner == torch.arange(len(images))
    wanted = torch.where(alone.view(-1, 1, 1, 1), images, lam_4d * images + (1 - lam_4d) * images[partner])
    if len(lam) > 8 and lam[~alone].std() < 1e-4:  # a permutation may leave an image alone
        raise Wrong("one-lambda", got=f"λ = {lam[0]:.3f} for all")
    if close(mixed, wanted, 1e-4):
        return
    where = f"batch {len(images)}, image {int((mixed - wanted).flatten(1).abs().amax(1).argmax())}"
    swapped = torch.where(alone.view(-1, 1, 1, 1), images, (1 - lam_4d) * images + lam_4d * images[partner])
    if close(mixed, swapped, 1e-4):
        raise Wrong("lambda-swapped", where=where)
    if close(mixed, images, 1e-6):
        raise Wrong("images-not-mixed", where=where)
    fits = [
        (lam_4d * images + (1 - lam_4d) * images.roll(k, 0) - mixed).flatten(1).abs().amax(1)
        for k in range(len(images))
    ]
    raise Wrong("other-partner" if (torch.stack(fits).amin(0) < 1e-3).any() else "images-not-mixed", where=where)


def _right_soft(images, soft, mixed, labels):
    for image in range(len(images)):
        fits = False
        for partner in range(len(images)):
            apart = (images[image] - images[partner]).flatten()
            lam = (
                1.0
                if image == partner
                else (((mixed[image] - images[partner]).flatten() @ apart) / (apart @ apart)).item()
            )
            if close(mixed[image], lam * images[image] + (1 - lam) * images[partner], 1e-3):
                fits |= close(labels[image], lam * soft[image] + (1 - lam) * soft[partner], 1e-3)
        if not fits:
            raise Wrong("soft-labels-lost", where=f"soft labels, image {image}", got=labels[image])


def _right_lambdas(mixup, alpha):
    from scipy.stats import beta

    torch.manual_seed(3)
    _, labels = _mixed(mixup, torch.zeros(MANY, 1, 1, 1), torch.arange(MANY), MANY, alpha)
    own, partner = _partners(labels)
    lam = np.sort(own[partner != torch.arange(MANY)].double().numpy())
    if lam.std() < 1e-4:
        raise Wrong("one-lambda", got=f"λ = {lam[0]:.3f} for all")
    if lam[0] >= 0.5:
        raise Wrong("lambda-folded", got=f"the smallest of {len(lam)} λ is {lam[0]:.3f}")
    if _distance(lam, lambda x: beta.cdf(x, alpha, alpha)) > LIMIT / np.sqrt(len(lam)):
        uniform = alpha != 1 and _distance(lam, lambda x: x) < LIMIT / np.sqrt(len(lam))
        raise Wrong(
            "lambda-uniform" if uniform else "lambda-wrong", where=f"α = {alpha}, {len(lam)} images", alpha=alpha
        )


def _distance(values, cdf):
    """Kolmogorov's distance of sorted values to a distribution, but for the ends, which float32 rounds to 0 and 1."""
    points = np.linspace(0.002, 0.998, 2000)
    return np.abs(np.searchsorted(values, points, side="right") / len(values) - cdf(points)).max()


def _right_types(mix):
    for dtype in (torch.float32, torch.bfloat16):
        mixed, _ = mix(torch.randn(4, 3, 8, 8).to(dtype), torch.arange(4), 4, 1.0)
        if mixed.dtype != dtype:
            raise Wrong("dtype-changed", wanted=dtype, dtype=mixed.dtype)
        images = (8 * torch.arange(16).view(-1, 1, 1, 1) + torch.zeros(16, 3, 8, 8)).to(dtype)
        mixed, labels = _mixed(mix, images, torch.arange(16), 16)
        if close(mixed, images) and (labels.diagonal() < 0.9).any():
            raise Wrong("images-not-mixed", where=f"{dtype} images")
    levels = torch.randint(0, 256, (8, 1, 6, 6), dtype=torch.uint8)
    try:
        got = mix(levels, torch.arange(8), 8, 1.0)
    except TypeError:
        return
    except Exception as error:
        raise Wrong("unclear-refusal", error=f"{type(error).__name__}: {str(error)[:80]}") from error
    raise Wrong("uint8-taken", expected="TypeError", got=got)


def _right_cutmix(mixed, labels, batch):
    own = torch.arange(batch)
    pasted = mixed[:, 0] != own.view(-1, 1, 1)
    mass, partner = _partners(labels, bool(pasted.any()))
    if batch > 8 and not pasted.any():
        raise Wrong("images-not-mixed", where=f"batch {batch}")
    if all(_rectangle(~inside) for inside in pasted) and not all(_rectangle(inside) for inside in pasted):
        raise Wrong("pasted-outside")
    for image in range(batch):
        inside = pasted[image]
        if not inside.any():
            if partner[image] != image and mass[image] < 1 - 1e-4:
                raise Wrong("lambda-not-area", image=image, kept=1.0, mass=mass[image].item())
            continue
        values = mixed[image][:, inside].unique()
        if not _rectangle(inside) or len(values) != 1 or not close(mixed[image, 0], mixed[image, 1], 0.0):
            raise Wrong("not-a-rectangle", image=image)
        if partner[image] != image and values.item() != partner[image].item():
            raise Wrong("other-partner", where=f"image {image}")
        kept = 1 - inside.float().mean().item()
        if abs(kept - mass[image].item()) > 1e-4:
            slug = "area-swapped" if abs(1 - kept - mass[image].item()) < 1e-4 else "lambda-not-area"
            raise Wrong(slug, image=image, kept=kept, mass=mass[image].item())


def _rectangle(inside):
    """Whether what is True is a rectangle, or nothing."""
    if not inside.any():
        return True
    rows, columns = inside.any(1).nonzero().flatten(), inside.any(0).nonzero().flatten()
    return bool(inside.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))


def _right_soft_cut(soft, mixed, labels):
    for image in range(len(soft)):
        values, n = mixed[image].unique(return_counts=True)
        wanted = sum(soft[int(v)] * (k / n.sum()) for v, k in zip(values, n))
        if not close(labels[image], wanted, 1e-3):
            raise Wrong("soft-labels-lost", where=f"soft labels, image {image}", expected=wanted, got=labels[image])
