"""Balise 1: patches, class token and positions, as a convolution would make them."""

import re

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, tried
from dlojz_tp.judging.checks.large_models.wrong_tensors import names_of_wrong
from dlojz_tp.measure.operations import Operations

DRAWN = torch.Generator().manual_seed(12)


def drawn(*shape):
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64)


IMAGES = drawn(2, 3, 12, 8)  # three rows of two patches
OTHERS = (drawn(1, 1, 6, 9), 3), (drawn(3, 2, 4, 4), 4), (drawn(2, 3, 2, 5), 1), (drawn(1, 2, 2, 6), 2)
UNEVEN = ((13, 8), 4), ((12, 9), 4), ((3, 8), 4)  # the height, the width, smaller than a patch
MODEL = (drawn(2, 3, 8, 12), drawn(5, 3, 4, 4) / 7, drawn(5), drawn(1, 1, 5), drawn(1, 7, 5))
NAMES = "images", "weight", "bias", "class token", "positions"
COUNTS = 1, 6, 10  # of positions, where 7 are due
ALONG = drawn(2, 7, 5)  # the gradients are those of the product with it


def patches_of(images, size):
    return F.unfold(images, size, stride=size).transpose(1, 2)


def tokens_of(images, weight, bias, class_token, positions):
    patches = F.conv2d(images, weight, bias, stride=weight.shape[-1]).flatten(2).transpose(1, 2)
    return torch.cat([class_token.expand(len(images), -1, -1), patches], 1) + positions


def copies(of=MODEL):
    return [one.clone() for one in of]


def gradients(embed):
    given = [one.clone().requires_grad_() for one in MODEL]
    tokens = embed(*given)
    if not tokens.requires_grad:
        return [torch.zeros_like(one) for one in given]
    found = torch.autograd.grad((tokens * ALONG).sum(), given, allow_unused=True)
    return [torch.zeros_like(one) if g is None else g for one, g in zip(given, found)]


def refusal(call, *args):
    """(what happened in a word, the numbers in the message)."""
    got = tried(call, *args)
    if not isinstance(got, str):
        return "taken", []
    return got.split(":")[0], [int(one) for one in re.findall(r"\d+", got)]


def steps(embed, side, images=1, channels=2):
    """The operators of an embedding of side × side patches."""
    pixels, weight = torch.ones(images, channels, 2 * side, 2 * side), torch.ones(3, channels, 2, 2)
    given = pixels, weight, torch.ones(3), torch.ones(1, 1, 3)
    with Operations() as operations:
        embed(*given, torch.ones(1, side**2 + 1, 3))
    return operations


def called(*every):
    ready = {"aten.im2col": "F.unfold", "aten.convolution": "a convolution"}
    return [what for name, what in ready.items() if any(operations.calls[name] for operations in every)]


def observe(cut_patches, embed_image):
    with Operations() as cutting:
        got = cut_patches(IMAGES.clone(), 4)
    yield {"form": form(got), "patches": got}
    yield {"others": [cut_patches(images.clone(), size) for images, size in OTHERS]}
    yield {"channels last": cut_patches(IMAGES.contiguous(memory_format=torch.channels_last), 4)}
    uneven = [refusal(cut_patches, torch.zeros(1, 2, *shape), size) for shape, size in UNEVEN]
    yield {"uneven": [kind for kind, _ in uneven]}
    yield {"sizes": [{*shape, size} <= {*said} for (shape, size), (_, said) in zip(UNEVEN, uneven)]}
    got = embed_image(*copies())
    yield {"tokens form": form(got), "tokens": got}
    yield {"one image": embed_image(MODEL[0][:1].clone(), *copies(MODEL[1:]))}
    kinds = [refusal(embed_image, *copies(MODEL[:4]), torch.zeros(1, count, 5)) for count in COUNTS]
    yield {"positions": [kind for kind, _ in kinds]}
    yield {"counts": [{7, count} <= {*said} for count, (_, said) in zip(COUNTS, kinds)]}
    yield {"gradients": gradients(embed_image)}
    few, many = steps(embed_image, 2), steps(embed_image, 8)
    yield {"called": called(cutting, many), "more": many.total - few.total}
    yield {"for more images": steps(embed_image, 2, 6, 5).total - steps(embed_image, 2, 2).total}


def refused(dropped, unclear):
    """The hint: of what is taken, or of another error."""
    return lambda seen, due: dropped if "taken" in seen else unclear


def first_other(cases):
    """Fields: the first of the cases whose entry is not due."""

    def fields(seen, due):
        k = next(k for k, one in enumerate(seen) if one != due[k])
        return {"expected": due[k], "got": seen[k], "where": cases[k]}

    return fields


LOOKS = [
    Look("patches of the right shape and dtype", "form", form(patches_of(IMAGES, 4)), "patches-form"),
    Value("the order of the patches, and of the pixels in them", "patches", patches_of(IMAGES, 4), "wrong-patches"),
    Value(
        "one image, one patch, patches of one pixel", "others", [patches_of(*one) for one in OTHERS], "wrong-patches"
    ),
    Value("any memory format", "channels last", patches_of(IMAGES, 4), "wrong-patches"),
    Look(
        "a ValueError for sizes that do not divide",
        "uneven",
        ["ValueError"] * 3,
        refused("remainder", "other-error"),
        fields=first_other([f"{height} × {width} pixels, patches of {size}" for (height, width), size in UNEVEN]),
    ),  # fmt: skip
    Look("the message names the sizes", "sizes", [True] * 3, "sizes-unnamed"),
    Look("tokens of the right shape and dtype", "tokens form", form(tokens_of(*MODEL)), "tokens-form"),
    Value("the same tokens as with a convolution", "tokens", tokens_of(*MODEL), "wrong-tokens"),
    Value("a batch of one", "one image", tokens_of(MODEL[0][:1], *MODEL[1:]), "wrong-tokens"),
    Look(
        "a ValueError for a wrong number of positions",
        "positions",
        ["ValueError"] * 3,
        refused("positions-spread", "other-error"),
        fields=first_other([f"positions: {count}, patches: 6" for count in COUNTS]),
    ),  # fmt: skip
    Look("the message names both numbers", "counts", [True] * 3, "counts-unnamed"),
    Value("gradients", "gradients", gradients(tokens_of), "no-gradient", fields=names_of_wrong(NAMES)),
    Look(
        "no convolution", "called", [], "borrowed", fields=lambda seen, due: {"what": " and ".join(seen).capitalize()}
    ),
    Look(
        "as many operators for 64 patches as for 4",
        "more",
        0,
        "operators-grow",
        holds=at_most,
        fields="n",
    ),  # fmt: skip
    Look(
        "nor more for six images of five channels",
        "for more images",
        0,
        "a-loop-over-images",
        holds=at_most,
        fields="n",
    ),
]


def balise_1(cut_patches, embed_image):
    yield from judged(LOOKS, observe, cut_patches, embed_image)
