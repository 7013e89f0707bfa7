"""Balise 1: RandAugment in the right place of the CPU pipeline."""

import functools
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from dlojz_tp.checking import Wrong, close

HINTS = {
    "transform-not-callable": "make_transform must return a function that takes a PIL image.",
    "transform-shape": "The result must be a float32 tensor of shape (3, size, size).",
    "size-ignored": "Sizes of 48 and of 31 were asked for, and {shape} came out both times. Is `size` used everywhere?",
    "not-normalised": "The pixels are not normalised as asked: brought to [0, 1], then minus MEAN, over STD.",
    "augmented-not-normalised": "Without augment the pixels are normalised, with augment they are not. What follows RandAugment "
    "is the same in both cases.",
    "grey-refused": 'A grey photograph has one channel: convert("RGB") first.',
    "small-refused": "A photograph smaller than the window fails: {error}. RandomResizedCrop enlarges what it cuts.",
    "no-randaugment": "With augment=True, RandAugment was never called.",
    "randaugment-sometimes": "With augment=True, RandAugment was called for {n} of {of} images. It draws its operations for "
    "every image by itself: no RandomApply, no RandomChoice.",
    "randaugment-always": "With augment=False, RandAugment was called all the same.",
    "randaugment-twice": "RandAugment was called {n} times for one image.",
    "randaugment-idle": "RandAugment was called, but with num_ops={n} and magnitude={strength}: it changes next to nothing. Its "
    "defaults are 2 and 9.",
    "randaugment-lost": "RandAugment was called, but the image that goes on is the one from before. It returns a new image.",
    "randaugment-on-floats": "RandAugment got floating-point pixels. Posterise, equalise and solarise count in levels from 0 "
    "to 255: it belongs before the conversion to float.",
    "randaugment-before-crop": "RandAugment worked on the whole photograph, {width} × {height} pixels, of which the crop then "
    "threw most away. After the crop it does a fraction of the work.",
    "no-random-crop": "Two calls gave the same window. The crop (RandomResizedCrop) must be random.",
    "crop-not-resized": "All windows show the same share of the photograph. RandomResizedCrop draws size and proportions, too.",
    "no-flip": "In {n} calls no image was flipped{when}. One in two is mirrored, left to right.",
    "always-flipped": "Every image came out mirrored{when}. Half of them shall.",
    "flip-upside-down": "Photographs came out upside down{when}. Mirror them left to right only.",
}

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CALLS = 30  # a fair coin shows one side only in two of a thousand million runs


def balise_1(make_transform):
    """Photographs that tell where they were cut, and whether they are mirrored; RandAugment watched while it works."""
    yield "a float32 tensor (3, size, size), normalised"
    plain = make_transform(48, augment=False)
    if not callable(plain):
        raise Wrong("transform-not-callable", got=plain)
    with _watched() as seen:
        got = plain(Image.new("RGB", (90, 70), (200, 100, 50)))
    if seen:
        raise Wrong("randaugment-always")
    _right_size(make_transform, got)
    _right_pixels(got, (200, 100, 50))
    yield "grey photographs and small ones are taken, too"
    _right_grey(plain)
    try:
        small = plain(Image.new("RGB", (31, 20), (200, 100, 50)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise Wrong("small-refused", error=str(error).split("\n")[0]) from error
    if small.shape != (3, 48, 48):
        raise Wrong("small-refused", error=f"(3, 48, 48) was asked for, {tuple(small.shape)} came")
    yield "with augment, once an image: after the crop, on whole levels from 0 to 255"
    augmented = make_transform(48, augment=True)
    with _watched() as seen:
        for _ in range(4):
            got = augmented(_photograph())
    _right_place(seen)
    if got.shape != (3, 48, 48) or got.dtype != torch.float32:
        raise Wrong("transform-shape", expected="float32, (3, 48, 48)", got=got)
    with _watched("not") as seen:
        windows = [augmented(_photograph()) for _ in range(CALLS)]
        if len(seen) != CALLS:
            raise Wrong("randaugment-sometimes", n=len(seen), of=CALLS)
        _right_pixels(augmented(Image.new("RGB", (90, 70), (200, 100, 50))), (200, 100, 50), augment=True)
        _right_grey(augmented)
    with _watched("black"):
        got = augmented(_photograph())
    if not close(got, got[:, :1, :1].expand(3, 48, 48), 1e-4):
        raise Wrong("randaugment-lost")
    yield "the crop is random"
    _right_windows([plain(_photograph()) for _ in range(CALLS)], "")
    _right_windows(windows, " with augment")
    yield "the size is the one that is asked for"
    for augment in (False, True):
        got = make_transform(31, augment=augment)(_photograph())
        if got.shape != (3, 31, 31):
            raise Wrong("size-ignored", expected="(3, 31, 31)", got=got, shape=tuple(got.shape))


@functools.cache
def _photograph():
    """Red grows from top to bottom, green from left to right."""
    rows, columns = np.mgrid[0:300, 0:400]
    pixels = np.stack([rows * 255 // 299, columns * 255 // 399, (rows + columns) % 256], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


class _watched:  # noqa: N801  (it reads "with _watched() as seen")
    """Lists each call of RandAugment: ("float" or "levels", width, height) of what it was given, num_ops, magnitude.

    works: "really"; "not": it gives back what it got, so that what is around it can be seen; or "black": nothing is left.
    """

    def __init__(self, works="really"):
        self.works = works

    def __enter__(self):
        seen, self._patches = [], []
        for kind in (v2.RandAugment, v1.RandAugment):
            forward = kind.forward

            def watch(this, *inputs, forward=forward):
                seen.append((*_describe(inputs[0]), this.num_ops, this.magnitude))
                if self.works == "really":
                    return forward(this, *inputs)
                if self.works == "black":
                    inputs = tuple(map(_black, inputs))
                return inputs if len(inputs) > 1 else inputs[0]

            self._patches.append(mock.patch.object(kind, "forward", watch))
        for patch in self._patches:
            patch.start()
        return seen

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()


def _black(image):
    return Image.new(image.mode, image.size) if isinstance(image, Image.Image) else torch.zeros_like(image)


def _describe(image):
    if isinstance(image, Image.Image):
        return "levels", *image.size
    return "float" if image.is_floating_point() else "levels", image.shape[-1], image.shape[-2]


def _right_size(make_transform, got):
    if got is None:
        raise Wrong("nothing-returned")
    if isinstance(got, torch.Tensor) and got.shape == (3, 48, 48) and got.dtype == torch.float32:
        return
    other = make_transform(31, augment=False)(Image.new("RGB", (90, 70), (200, 100, 50)))
    if isinstance(got, torch.Tensor) and got.dtype == torch.float32 and got.shape == other.shape:
        raise Wrong("size-ignored", expected="(3, 48, 48)", got=got, shape=tuple(got.shape))
    raise Wrong("transform-shape", expected="float32, (3, 48, 48)", got=got)


def _right_pixels(got, levels, augment=False):
    wanted = [(value / 255 - mean) / std for value, mean, std in zip(levels, MEAN, STD)]
    if not close(got.double().mean((1, 2)), torch.tensor(wanted, dtype=torch.float64), 1e-3):
        slug = "augmented-not-normalised" if augment else "not-normalised"
        raise Wrong(slug, expected=wanted, got=got.mean((1, 2)), where=f"augment={augment}")


def _right_grey(transform):
    try:
        grey = transform(Image.new("L", (90, 70), 128))
    except (RuntimeError, ValueError, TypeError) as error:
        raise Wrong("grey-refused", got=str(error).split("\n")[0]) from error
    if grey.shape != (3, 48, 48):
        raise Wrong("grey-refused", expected="(3, 48, 48)", got=tuple(grey.shape))
    _right_pixels(grey, (128, 128, 128))


def _right_place(seen):
    if not seen:
        raise Wrong("no-randaugment")
    if len(seen) > 4:
        raise Wrong("randaugment-twice", n=len(seen) // 4)
    kind, width, height, n, strength = seen[0]
    if kind == "float":
        raise Wrong("randaugment-on-floats")
    if width * height > 2 * 48 * 48:
        raise Wrong(
            "randaugment-before-crop", expected="48 × 48", got=f"{width} × {height}", width=width, height=height
        )
    if n < 1 or strength < 1:
        raise Wrong("randaugment-idle", n=n, strength=strength)


def _right_windows(windows, when):
    """Each window's red and green tell how it was cut from the photograph of `_photograph`."""
    if all(close(window, windows[0], 1e-3) or close(window.flip(2), windows[0], 1e-3) for window in windows):
        raise Wrong("no-random-crop")
    levels = torch.stack(windows).double() * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    down = (levels[:, 0, -1] - levels[:, 0, 0]).mean(1)  # the share of the height, negative if upside down
    right = (levels[:, 1, :, -1] - levels[:, 1, :, 0]).mean(1)
    if (down < 0).any():
        raise Wrong("flip-upside-down", when=when)
    for slug, found in (("no-flip", (right > 0).all()), ("always-flipped", (right < 0).all())):
        if found:
            raise Wrong(slug, n=len(windows), when=when)
    if down.std() < 0.02 and right.abs().std() < 0.02:
        raise Wrong("crop-not-resized", got=f"{down.mean():.0%} of the height in each window")
