"""Balise 1: RandAugment in the right place of the CPU pipeline."""

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
    "not-normalised": "The pixels are not normalised as asked: brought to [0, 1], then minus MEAN, over STD.",
    "grey-refused": 'A grey photograph has one channel: convert("RGB") first.',
    "no-randaugment": "With augment=True, RandAugment was never called.",
    "randaugment-always": "With augment=False, RandAugment was called all the same.",
    "randaugment-twice": "RandAugment was called {n} times for one image.",
    "randaugment-on-floats": "RandAugment got floating-point pixels. Posterise, equalise and solarise count in levels from 0 "
    "to 255: it belongs before the conversion to float.",
    "randaugment-before-crop": "RandAugment worked on the whole photograph, {width} × {height} pixels, of which the crop then "
    "threw most away. After the crop it does a fraction of the work.",
    "no-random-crop": "Two calls gave the same window. The crop (RandomResizedCrop) must be random.",
}

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def balise_1(make_transform):
    """Photographs that tell where they were cut; RandAugment watched while it works."""
    yield "a float32 tensor (3, size, size), normalised"
    plain = make_transform(48, augment=False)
    if not callable(plain):
        raise Wrong("transform-not-callable", got=plain)
    with _watched() as seen:
        got = plain(Image.new("RGB", (90, 70), (200, 100, 50)))
    if seen:
        raise Wrong("randaugment-always")
    _right_form(got)
    yield "grey photographs are taken, too"
    try:
        grey = plain(Image.new("L", (90, 70), 128))
    except (RuntimeError, ValueError, TypeError) as error:
        raise Wrong("grey-refused", got=str(error).split("\n")[0]) from error
    if grey.shape != (3, 48, 48):
        raise Wrong("grey-refused", expected="(3, 48, 48)", got=tuple(grey.shape))
    yield "with augment, once an image: after the crop, on whole levels from 0 to 255"
    augmented = make_transform(48, augment=True)
    with _watched() as seen:
        for _ in range(4):
            got = augmented(_photograph())
    _right_place(seen)
    if got.shape != (3, 48, 48) or got.dtype != torch.float32:
        raise Wrong("transform-shape", expected="float32, (3, 48, 48)", got=got)
    yield "the crop is random"
    torch.manual_seed(0)
    windows = [plain(_photograph()) for _ in range(6)]
    if all(close(window, windows[0], 1e-3) for window in windows):
        raise Wrong("no-random-crop")


def _photograph():
    rows, columns = np.mgrid[0:300, 0:400]
    pixels = np.stack([rows * 255 // 299, columns * 255 // 399, (rows + columns) % 256], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


class _watched:  # noqa: N801  (it reads "with _watched() as seen")
    """Lists what RandAugment is given meanwhile: ("float" or "levels", width, height) of each call."""

    def __enter__(self):
        seen, self._patches = [], []
        for kind in (v2.RandAugment, v1.RandAugment):
            forward = kind.forward

            def watch(this, *inputs, forward=forward):
                seen.append(_describe(inputs[0]))
                return forward(this, *inputs)

            self._patches.append(mock.patch.object(kind, "forward", watch))
        for patch in self._patches:
            patch.start()
        return seen

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()


def _describe(image):
    if isinstance(image, Image.Image):
        return "levels", *image.size
    return "float" if image.is_floating_point() else "levels", image.shape[-1], image.shape[-2]


def _right_form(got):
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, torch.Tensor) or got.shape != (3, 48, 48) or got.dtype != torch.float32:
        raise Wrong("transform-shape", expected="float32, (3, 48, 48)", got=got)
    wanted = [(value / 255 - mean) / std for value, mean, std in zip((200, 100, 50), MEAN, STD)]
    if not close(got.mean((1, 2)), torch.tensor(wanted), 1e-3):
        raise Wrong("not-normalised", expected=wanted, got=got.mean((1, 2)))


def _right_place(seen):
    if not seen:
        raise Wrong("no-randaugment")
    if len(seen) > 4:
        raise Wrong("randaugment-twice", n=len(seen) // 4)
    kind, width, height = seen[0]
    if kind == "float":
        raise Wrong("randaugment-on-floats")
    if width * height > 2 * 48 * 48:
        raise Wrong(
            "randaugment-before-crop", expected="48 × 48", got=f"{width} × {height}", width=width, height=height
        )
