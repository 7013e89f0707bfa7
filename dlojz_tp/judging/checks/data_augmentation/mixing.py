"""Balises 2 and 5: MixUp and CutMix. Images that are one-hot show how much of which image stands at each pixel."""

import copy

import numpy as np
import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, shape, silent, tried, within
from dlojz_tp.judging.checks.data_augmentation.areas import AREAS, ONE_BOX, dkw
from dlojz_tp.judging.checks.data_augmentation.devices import (
    BATCHES,
    INFERENCE,
    SEEDS,
    in_inference,
    observe_batches,
    observe_seeds,
)

HINTS = {
    "mix-form": "Return two tensors: images of the same shape as the input, and soft labels of shape (batch, classes).",
    "labels-no-mass": "The soft labels of an image must add up to 1.",
    "nothing-mixed": "No image was mixed with another.",
    "one-lambda": "All images were mixed with the same λ. Draw one for each image.",
    "other-partner": "Images and labels were mixed with different partners.",
    "images-not-mixed": "The labels are mixed, but the images aren't what λ and the partner ask for.",
    "soft-labels-lost": "Labels that are already soft (batch, classes) must be mixed as they are.",
    "labels-dtype": "The soft labels came back as {got}. They must be float32, whatever the dtype of the images: "
    "half precision has only three digits for λ.",
    "dtype-changed": "The images came in as {expected} and went out as {got}.",
    "half-edges": "With bfloat16 images, the masses of the labels don't match the pixels. Draw positions and count "
    "pixels in float32 or in integers: bfloat16 has three digits.",
    "uint8-taken": "You accept uint8 images. Integer levels are truncated and wrap around when they are mixed, and "
    "they aren't normalised yet: refuse them with a TypeError.",
    "labels-not-mixed": "The images were mixed, but the labels weren't: each still names only its own image.",
    "partner-twice": "One image is the partner of {got} others. A permutation uses each image once: "
    "torch.randperm, or a roll.",
    "three-images": "The labels of one image name {got} images. Only two are mixed.",
    "unclear-refusal": "uint8 images raise {got}. Raise a TypeError that says that float images are expected.",
}


def _images(batch, height, width):
    """(batch, batch + 1, height, width): image k is 1 in channel k, 0 in all others; the last channel tells the place."""
    places = torch.linspace(-3, 3, height * width).view(1, 1, height, width).expand(batch, 1, height, width)
    return torch.cat([torch.eye(batch).view(batch, batch, 1, 1).expand(-1, -1, height, width), places], 1)


SOFT = torch.rand(8, 3, generator=torch.Generator().manual_seed(2)).softmax(1)
CASES = [  # images, labels, classes
    (_images(24, 7, 20), torch.arange(24), 24),
    (_images(8, 6, 6), SOFT, 3),
    (_images(1, 4, 6), torch.arange(1), 1),
]
HALF = (
    _images(15, 40, 56).bfloat16(),
    torch.arange(15),
    15,
)  # so large that bfloat16 does not hold every place and share
SHAPES = [[tuple(images.shape), (len(images), classes)] for images, _, classes in CASES]
MANY = 1200  # samples for a distribution; the look at it has a false alarm in fewer than 1 of 10,000 runs
SLACK = dkw(MANY)
ALPHAS, POINTS = (0.2, 1.0), np.linspace(0.002, 0.998, 200)  # but for the ends: float32 rounds to 0 and 1


def _below(drawn):
    """Of each list of numbers, which part lies below each point."""
    return torch.stack([torch.from_numpy(np.searchsorted(np.sort(one), POINTS) / len(one)) for one in drawn])


BETA = _below([np.random.default_rng(0).beta(alpha, alpha, 10**5) for alpha in ALPHAS])  # the truth, by NumPy


def _mixed(**matrices):
    """Which of these (batch, batch), shares of images and masses of labels, have more than a diagonal."""
    return [what for what, one in matrices.items() if (one.sum(1) - one.diagonal() > 1e-3).any()]


def observe(mix, observe_more):
    """What becomes of one-hot images, and of their labels; what this way of mixing alone promises; what both promise."""
    torch.manual_seed(1)
    given = copy.deepcopy(CASES)
    got = [mix(*case, 1.0) for case in given]
    yield {"shapes": shape(got), "inference": in_inference(got)}
    shares, labels = [mixed[:, :-1].mean((2, 3)) for mixed, _ in got], [soft for _, soft in got]
    own, mass, others = shares[0].diagonal(), labels[0].diagonal(), labels[0].clone().fill_diagonal_(0)
    yield {
        "dtypes": form(got[0]),
        "mass": torch.cat([soft.sum(1) for soft in labels]),
        "mixed": _mixed(images=shares[0], labels=labels[0]),
        "names": int((labels[0] > 1e-6).sum(1).max()),
        "partners": int((others > 1e-6).sum(0).max()),
        "λ": others.sum(1)[others.sum(1) > 1e-6],
        "moved": (got[0][0] - CASES[0][0])[:, -1].abs().max().item(),
        "own": got[0][0].diagonal().permute(2, 0, 1),  # (24, 7, 20): how much of the image itself stands at each pixel
        # the label's mass is the image's share, or its opposite, but for some that a permutation leaves alone; all agree
        "agree": [*((own - one).abs().median() < 1e-4 for one in (mass, 1 - mass)), close(shares[0], labels[0], 1e-4)],
        "soft": labels[1] - shares[1] @ SOFT,
        "images kept": all(one[0].equal(case[0]) for one, case in zip(given, CASES)),
        "labels kept": all(one[1].equal(case[1]) for one, case in zip(given, CASES)),
    }
    yield from observe_more(mix)
    half, soft = mix(*copy.deepcopy(HALF), 1.0)
    refused = tried(mix, torch.zeros(8, 1, 6, 6, dtype=torch.uint8), torch.arange(8), 8, 1.0)
    yield {"half dtypes": form([half, soft]), "uint8": refused if isinstance(refused, str) else "taken"}
    soft_too = tried(mix, CASES[1][0].bfloat16(), SOFT.bfloat16(), 3, 1.0)
    yield {"half soft": soft_too if isinstance(soft_too, str) else form(soft_too[1]).split()[0]}
    yield {"half mass": soft.sum(1)}
    shares = half[:, :-1].float().mean((2, 3))
    yield {"half mixed": _mixed(images=shares, labels=soft), "half off": (shares - soft).abs().max().item()}
    yield from observe_batches(lambda x, y: mix(x, y, 5, 1.0), lambda b: (torch.randn(b, 3, 8, 8), torch.arange(b) % 5))
    values = torch.arange(16.0).view(-1, 1, 1, 1).expand(16, 1, 8, 8)
    yield observe_seeds(lambda: mix(values.clone(), torch.arange(16), 16, 1.0))
    others = mix(*copy.deepcopy(CASES[0]), 50.0)[1].clone().fill_diagonal_(0) > 1e-6  # no λ is near 0 or 1
    yield {"serves": int((others.sum(0) + ~others.any(1)).max())}  # who is alone serves itself


def _mixing(claim, key, images):
    """Looks at the dtypes, of the labels and of the images, and at which of them are mixed."""
    yield Look(claim, lambda o: o[f"{key}dtypes"][1].split()[0], "float32", "labels-dtype")
    yield Look("", lambda o: o[f"{key}dtypes"][0].split()[0], images, "dtype-changed")
    yield Value("", f"{key}mixed", ["images", "labels"], "images-not-mixed")


MIXED = [
    Look("each image is mixed with one other, and its label in the same way", "shapes", SHAPES, "mix-form"),
    INFERENCE,
    *_mixing("", "", "float32"),
    Look("", "mass", torch.ones(33), "labels-no-mass", holds=within(1e-4)),
    Look("", "names", 2, "three-images", holds=at_most),
    Look("", "partners", 1, "partner-twice", holds=at_most),
]
AGREE = [True, False, True]
PROMISES = [
    Look("labels that are soft already", "soft", torch.zeros(8, 3), "soft-labels-lost", holds=within(1e-3), fields=silent),
    *_mixing("bfloat16 stays what it is; uint8 is refused with a TypeError", "half ", "bfloat16"),
    Look("", "half mass", torch.ones(15), "labels-no-mass", holds=within(1e-6)),
    Look("", "uint8", "TypeError", lambda seen, _: "uint8-taken" if seen == "taken" else "unclear-refusal", holds=str.startswith),
    Look("the inputs are left as they were", "images kept", True, "images-changed"),
    Look("", "labels kept", True, "labels-changed"),
    Look("", "half soft", "float32", "labels-dtype", holds=lambda seen, _: seen != "bfloat16"),  # an error is not silent
    *BATCHES, *SEEDS,
    Look("the partners are a permutation of the batch", "serves", 1, "partner-twice", holds=at_most),
]  # fmt: skip


def observe_beta(mixup):
    """How λ is drawn for each α."""
    torch.manual_seed(3)
    own = [mixup(torch.zeros(MANY, 1, 1, 1), torch.arange(MANY), MANY, alpha)[1].diagonal() for alpha in ALPHAS]
    yield {"Beta": _below(own), "own λ": len(own[1].unique()) > 0.9 * MANY}


MIXUP = [
    *MIXED,
    Look("", lambda o: float((o["own"] - o["own"][:, :1, :1]).abs().max()), 0.0, "images-not-mixed", holds=within(1e-4)),
    Look("", "moved", 0.0, "images-not-mixed", holds=within(1e-4)),
    Value("", "agree", AGREE, "masses-differ", holds=lambda seen, _: seen[2], fields=silent),
    Look("", lambda o: bool(o["λ"].std() > 1e-4), True, "one-lambda"),
    Value("λ is drawn from Beta(α, α), for each image", "Beta", BETA, "lambda-wrong",
          holds=lambda seen, due: (seen - due).abs().max() <= SLACK, fields=silent),
    Look("", "own λ", True, "one-lambda"),
    *PROMISES,
]  # fmt: skip


def _pasted(observed):
    """Which part of every image is a rectangle: the partner's, its own, or neither, as where they blend."""
    own = observed["own"]
    parts = {"the partner's": own < 1, "its own": own > 0} if own.frac().eq(0).all() else {}
    return next((name for name, part in parts.items() if all(map(_rectangle, part))), "neither")


def _rectangle(inside):
    """Whether what is True is a rectangle, or nothing."""
    rows, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    return not len(rows) or bool(inside.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))


CUTMIX = [
    *MIXED,
    Look("a rectangle is pasted, the label mass is the share of pixels",
         "moved", 0.0, "pasted-from-elsewhere", holds=within(1e-4)),
    Look("", _pasted, "the partner's", lambda seen, _: "pasted-outside" if seen == "its own" else "not-a-rectangle"),
    *ONE_BOX,
    Value("", "agree", AGREE, "lambda-not-area", fields=silent),
    *AREAS,
    *PROMISES,
    Look("the mass is the share of pixels in bfloat16 too", "half off", 1e-4, "half-edges", holds=at_most, fields=silent),
]  # fmt: skip
