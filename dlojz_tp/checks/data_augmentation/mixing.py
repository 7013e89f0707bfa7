"""Balises 2 and 5: MixUp and CutMix. Images that are one-hot show how much of which image stands at each pixel."""

import torch

from dlojz_tp.checking import close
from dlojz_tp.checking.looks import Look, Value, at_most, judged, shape, within
from dlojz_tp.checks.data_augmentation.areas import AREAS, LIMIT, MANY, observe_areas
from dlojz_tp.checks.data_augmentation.devices import BATCHES, SEEDS, SILENT, observe_batches, observe_seeds

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
    "labels-not-mixed": "The images were mixed, the labels were not: each still names its own image alone.",
    "partner-twice": "Some images are the partner of several others. A permutation uses each once: torch.randperm, or a roll.",
    "three-images": "The labels of image {image} name {n} images. Two are mixed.",
    "unclear-refusal": "uint8 images raise {error}. Say in a TypeError that float images are expected.",
}


def _images(batch, height, width):
    """(batch, batch + 1, height, width): image k is 1 in channel k, 0 in all others; the last channel tells the place."""
    places = torch.linspace(-3, 3, height * width).view(1, 1, height, width).expand(batch, 1, height, width)
    return torch.cat([torch.eye(batch).view(batch, batch, 1, 1).expand(-1, -1, height, width), places], 1)


SIZES = (24, 16, 9), (24, 7, 20), (1, 4, 6), (2, 5, 3)
NAMES = [f"batch {batch}, image {k}" for batch, *_ in SIZES for k in range(batch)]
NAMES += [f"soft labels, image {k}" for k in range(8)]
SOFT = torch.rand(8, 3, generator=torch.Generator().manual_seed(2)).softmax(1)
CASES = [*((_images(*size), torch.arange(size[0]), size[0]) for size in SIZES), (_images(8, 6, 6), SOFT, 3)]
HALF = [(_images(16, 8, 8).bfloat16(), torch.arange(16), 16)]  # images, labels, classes
ALPHAS, POINTS = (0.2, 1.0), torch.linspace(0.002, 0.998, 200).double()  # but for the ends: float32 rounds to 0 and 1


def _all(mix, cases):
    return [mix(images.clone(), labels.clone(), classes, 1.0) for images, labels, classes in cases]


def _is_mixed(*shares):
    """Of the images and of the labels: whether one of them has a share in another image."""
    return [bool((one.diagonal() < 0.999).any()) for one in shares]


def observe(mix):
    """What becomes of one-hot images, and of their labels."""
    torch.manual_seed(1)
    got = _all(mix, CASES)
    yield {"got": got}
    pixels = [mixed[:, :-1] for mixed, _ in got]  # (batch, batch, height, width): the share of each image
    shares, labels = [one.mean((2, 3)) for one in pixels], [soft for _, soft in got]
    others = labels[0].clone().fill_diagonal_(0)
    yield {
        "mass": torch.cat([soft.sum(1) for soft in labels]),
        "mixed": [_is_mixed(shares[k], labels[k]) for k in (0, 1)],
        "names": (labels[0] > 1e-6).sum(1),
        "own": labels[0].diagonal()[others.sum(1) > 1e-6],
        "partners": others.argmax(1)[others.sum(1) > 1e-6].tolist(),
        "moved": torch.cat([(got[k][0] - CASES[k][0])[:, -1].abs().amax((1, 2)) for k in range(4)]),
        "uneven": torch.cat([(pixels[k] - shares[k][..., None, None]).abs().amax((1, 2, 3)) for k in range(4)]),
        "kept": [image for one in pixels[:2] for image in one.diagonal().permute(2, 0, 1)],
        "shares": list(zip(shares[:4], labels)),
        "soft": [labels[4], shares[4] @ SOFT],
    }


def observe_promises(mix):
    """bfloat16 and uint8; whether the inputs change; operations, device, seeds."""
    got = _all(mix, HALF)
    yield {"half": got}
    yield {"half mixed": [_is_mixed(mixed.float().mean((2, 3)), soft) for mixed, soft in got]}
    levels = torch.randint(0, 256, (8, 1, 6, 6), dtype=torch.uint8)
    try:
        mix(levels, torch.arange(8), 8, 1.0)
        refused = ""
    except Exception as error:
        refused = "TypeError" if isinstance(error, TypeError) else f"{type(error).__name__}: {str(error)[:80]}"
    yield {"uint8": refused}
    changed = []
    for labels in (torch.arange(6) % 5, torch.eye(6)[:, :5].contiguous()):
        given = {"images": torch.randn(6, 3, 8, 8), "labels": labels}
        before = {name: tensor.clone() for name, tensor in given.items()}
        mix(*given.values(), 5, 1.0)
        changed += [name for name in given if not close(given[name], before[name], 0.0)]
    yield {"changed": changed}
    yield from observe_batches(lambda x, y: mix(x, y, 5, 1.0), lambda b: (torch.randn(b, 3, 8, 8), torch.arange(b) % 5))
    values = torch.arange(16.0).view(-1, 1, 1, 1).expand(16, 1, 8, 8)
    yield observe_seeds(lambda: mix(values.clone(), torch.arange(16), 16, 1.0))


def _first(seen, due):
    """The first that is not as it should be."""
    got, expected = next(pair for pair in zip(seen, due) if pair[0] != pair[1])
    dtypes = {"dtype": str(got).removeprefix("torch."), "wanted": str(expected).removeprefix("torch.")}
    return {"got": got, "expected": expected} | dtypes


def _form(claim, key, cases):
    shapes = [[tuple(images.shape), (len(images), classes)] for images, _, classes in cases]
    floats, kinds = [torch.float32] * len(cases), [images.dtype for images, *_ in cases]
    yield Look(claim, lambda o: shape(o[key]), shapes, "mix-form", fields=_first)
    yield Look("", lambda o: [soft.dtype for _, soft in o[key]], floats, "labels-dtype", fields=_first)
    yield Look("", lambda o: [mixed.dtype for mixed, _ in o[key]], kinds, "dtype-changed", fields=_first)


def _mixed(key, due, where=""):
    def hint(seen, _):
        images, labels = next(one for one in seen if not all(one))
        return "images-not-mixed" if labels else "labels-not-mixed" if images else "nothing-mixed"

    return Look("", key, due, hint, fields=lambda *_: {"where": where} | SILENT)


def _zero(key, hint):
    return Look("", key, torch.zeros(51), hint, within(1e-4), lambda seen, _: {"where": NAMES[seen.argmax()]} | SILENT)


def _shares(hints):
    """A look at what the images are made of, beside their labels. hints: where these are swapped; where both differ."""

    def wrong(seen):
        return next((pair for pair in seen if not close(*pair, 1e-4)), None)

    def hint(seen, _):
        own, mass = (one.diagonal() for one in wrong(seen))
        swapped, same = (
            (own - other).abs().median() < 1e-4 for other in (1 - mass, mass)
        )  # a permutation may leave some
        return hints[0] if swapped else "other-partner" if same else hints[1]

    def fields(seen, _):
        shares, labels = wrong(seen)
        k = int((shares - labels).abs().amax(1).argmax())
        where = {"where": f"batch {len(labels)}, image {k}"}
        return {"image": k, "kept": shares[k, k].item(), "mass": labels[k, k].item()} | where | SILENT

    return Look("", "shares", None, hint, lambda seen, _: wrong(seen) is None, fields)


def _worst(seen, due):
    return int((seen - due).abs().argmax())


SOFT_LABELS = Look(
    "labels that are soft already", "soft", None, "soft-labels-lost", lambda seen, _: close(*seen, 1e-3),
    lambda seen, _: {"where": f"soft labels, image {(k := _worst(*seen) // 3)}", "expected": seen[1][k], "got": seen[0][k]},
)  # fmt: skip
LABELS = [
    Look("", "mass", torch.ones(59), "labels-no-mass", within(1e-4), lambda seen, due: {"total": seen[k := _worst(seen, due)].item(), "where": NAMES[k]} | SILENT),
    _mixed("mixed", [[True, True]] * 2),
    Look("", "names", 2, "three-images", at_most, lambda seen, _: {"image": int(seen.argmax()), "n": int(seen.max())} | SILENT),
    Look("", "partners", "", "partner-twice", lambda seen, _: len(set(seen)) == len(seen),
         lambda seen, _: {"got": f"{len(seen)} images, {len(set(seen))} partners"}),
]  # fmt: skip
PROMISES = [
    *_form("float32 and bfloat16 stay what they are; uint8 is refused with a TypeError", "half", HALF),
    _mixed("half mixed", [[True, True]], "bfloat16 images"),
    Look("", "uint8", "TypeError", lambda seen, _: "unclear-refusal" if seen else "uint8-taken", fields=lambda seen, _: {"error": seen, "got": "" if seen else "no error"}),
    Look("the inputs are left as they were", "changed", [], lambda seen, _: f"{seen[0]}-changed", fields=lambda *_: SILENT),
    *BATCHES, *SEEDS,
]  # fmt: skip


def observe_mixup(mixup):
    """As `observe`; for each α, which part of the λ lies below each point."""
    yield from observe(mixup)
    torch.manual_seed(3)
    own = [mixup(torch.zeros(MANY, 1, 1, 1), torch.arange(MANY), MANY, alpha)[1].diagonal() for alpha in ALPHAS]
    yield {"λ": [(lam <= POINTS[:, None]).double().mean(1) for lam in own]}
    yield from observe_promises(mixup)


def _beta(_):
    from scipy.stats import beta

    return [torch.from_numpy(beta.cdf(POINTS, alpha, alpha)) for alpha in ALPHAS]


def _off(seen, due):
    """Kolmogorov's distance, for each α."""
    return [(one - other).abs().max().item() for one, other in zip(seen, due)]


def _alpha(seen, due):
    alpha = max(zip(_off(seen, due), ALPHAS))[1]
    return {"where": f"α = {alpha}, {MANY} images", "alpha": alpha} | SILENT


MIXUP = [
    *_form("each image is mixed with one other by its own λ, and its label alike", "got", CASES), *LABELS,
    Look("", "own", "", "one-lambda", lambda seen, _: seen.max() - seen.min() > 1e-4, lambda seen, _: {"got": f"λ = {seen[0]:.3f} for all"}),
    _shares(("lambda-swapped", "images-not-mixed")), _zero("uneven", "images-not-mixed"), _zero("moved", "images-not-mixed"),
    SOFT_LABELS,
    Value("λ is drawn from Beta(α, α), for each image", "λ", _beta, "lambda-wrong", lambda seen, due: max(_off(seen, due)) <= LIMIT / MANY**0.5, _alpha),
    *PROMISES,
]  # fmt: skip


def balise_2(mixup):
    yield from judged(MIXUP, observe_mixup, mixup)


def observe_cutmix(cutmix):
    yield from observe(cutmix)
    yield from observe_areas(cutmix)
    yield from observe_promises(cutmix)


def _outlines(observed):
    """Of each image: whether its own pixels, and those of another one, are a rectangle; neither is where they blend."""
    kept = [(one, bool(one.frac().eq(0).all())) for one in observed["kept"]]
    return [
        [whole and _rectangle(one > 0) for one, whole in kept],
        [whole and _rectangle(one < 1) for one, whole in kept],
    ]


def _rectangle(inside):
    """Whether what is True is a rectangle, or nothing."""
    rows, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    return not len(rows) or bool(inside.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))


CUTMIX = [
    *_form("a rectangle of one other image is pasted, and the label mass is the fraction of pixels", "got", CASES), *LABELS,
    _zero("moved", "pasted-from-elsewhere"),
    Look("", _outlines, "", lambda seen, _: "pasted-outside" if all(seen[0]) else "not-a-rectangle", lambda seen, _: all(seen[1]),
         lambda seen, _: {"image": seen[1].index(False) % 24} | SILENT),
    *AREAS[:2],  # of the same box, or of sides swapped, the shares say less
    _shares(("area-swapped", "lambda-not-area")),
    SOFT_LABELS,
    Look("boxes: one for each image, anywhere, of the right areas", lambda o: True, True, ""), *AREAS[2:],
    *PROMISES,
]  # fmt: skip


def balise_5(cutmix):
    yield from judged(CUTMIX, observe_cutmix, cutmix)
