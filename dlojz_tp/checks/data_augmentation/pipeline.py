"""Balise 1: RandAugment in the right place of the CPU pipeline, watched while it works on photographs of known windows."""

import contextlib
import functools
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from dlojz_tp.checking.looks import Look, form, judged, within

MEAN, STD = (torch.tensor(three).view(3, 1, 1) for three in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
CALLS = 30  # a fair coin shows one side only in two of a thousand million runs
FORMS = ["float32 (3, 48, 48)", "float32 (3, 31, 31)"]
COLOUR, GREY = (200, 100, 50), (128, 128, 128)


@functools.cache
def _photograph():
    """Red grows from top to bottom, green from left to right."""
    rows, columns = np.mgrid[0:300, 0:400]
    pixels = np.stack([rows * 255 // 299, columns * 255 // 399, (rows + columns) % 256], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


@contextlib.contextmanager
def _watched(instead=None):
    """Lists each call of RandAugment: whether it got floats, height, width, num_ops, magnitude; `instead` may do its work."""
    calls = []

    def watching(forward):
        def watch(this, image):
            floats = isinstance(image, torch.Tensor) and image.is_floating_point()
            calls.append((floats, *v2.functional.get_size(image), this.num_ops, this.magnitude))
            return instead(image) if instead else forward(this, image)

        return watch

    with contextlib.ExitStack() as stack:
        for kind in (v2.RandAugment, v1.RandAugment):
            stack.enter_context(mock.patch.object(kind, "forward", watching(kind.forward)))
        yield calls


def _tried(transform, mode="RGB", size=(90, 70), colour=COLOUR):
    """The mean of each channel, (3,), for an image of one colour; in words the error, or what else came."""
    try:
        got = transform(Image.new(mode, size, colour))
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).split("\n")[0]
    return got.mean((1, 2)) if form(got) == FORMS[0] else f"{FORMS[0]} was asked for, {form(got)} came"


def _windows(transform):
    """How windows are cut from `_photograph`: red and green tell."""
    windows = torch.stack([transform(_photograph()) for _ in range(CALLS)]).double() * STD + MEAN
    down = (windows[:, 0, -1] - windows[:, 0, 0]).mean(1)  # the share of the height, negative if upside down
    right = (windows[:, 1, :, -1] - windows[:, 1, :, 0]).mean(1)
    apart = torch.stack([windows, windows.flip(3)]).sub(windows[0]).abs().amax((2, 3, 4)).amin(0)
    return {"apart": apart.max() > 1e-3, "upright": (down >= 0).all(), "mirrored": (right < 0).double().mean(),
            "drawn": max(down.std(), right.abs().std()) >= 0.02}  # fmt: skip


def observe(make_transform):
    """What RandAugment was called for, forms, the levels of images of one colour; windows of a photograph."""
    plain, rich = (make_transform(48, augment=augment) for augment in (False, True))
    yield {"callable": callable(plain)}
    with _watched() as never:
        forms = [form(make(_photograph())) for make in (plain, make_transform(31, augment=False))]
    yield {"forms": forms, "never": never}
    yield {"levels": _tried(plain), "grey": _tried(plain, "L", colour=128)}
    small = _tried(plain, size=(31, 20))
    yield {"small": "" if isinstance(small, torch.Tensor) else small}
    with _watched() as calls:
        got = [rich(_photograph()) for _ in range(4)]
    yield {"calls": calls, "rich forms": [form(got[-1]), form(make_transform(31, augment=True)(_photograph()))]}
    with _watched(lambda image: image) as times:
        windows, n = _windows(rich), len(times)
        levels, grey = _tried(rich), _tried(rich, "L", colour=128)
    yield {True: windows, "times": n, "rich levels": levels, "rich grey": grey}
    with _watched(lambda image: v2.functional.adjust_brightness(image, 0)):
        rest = rich(_photograph())
    yield {"rest": (rest - rest[:, :1, :1]).abs().max()}
    yield {False: _windows(plain)}


def _size(seen, _):
    return "size-ignored" if "float32 (3, " in seen[0] and seen[0] in (seen[1], FORMS[0]) else "transform-shape"


def _forms(see):
    return Look("", see, FORMS, _size, fields=lambda seen, _: {"shape": seen[0].removeprefix("float32 ")})


def _levels(claim, see, colour, refused, hint):
    due = (torch.tensor(colour).view(3, 1, 1) / 255 - MEAN).div(STD).flatten()
    return Look(claim, see, due, lambda seen, _: refused if isinstance(seen, str) else hint, within(1e-3))


def _cut(augment, when):
    fields = lambda seen, _: {"n": CALLS, "when": when}  # noqa: E731
    for what, hint in (("apart", "no-random-crop"), ("upright", "flip-upside-down"), ("drawn", "crop-not-resized")):
        yield Look("", lambda o, what=what: bool(o[augment][what]), True, hint, fields=fields)
    yield Look("", lambda o: float(o[augment]["mirrored"]), "some", lambda seen, _: "always-flipped" if seen else "no-flip",
               lambda seen, _: 0 < seen < 1, fields)  # fmt: skip


LOOKS = [
    Look("a float32 tensor (3, size, size), normalised", "callable", True, "transform-not-callable"),
    Look("", "never", [], "randaugment-always"),
    _forms("forms"),
    _levels("", "levels", COLOUR, "transform-shape", "not-normalised"),
    _levels("grey photographs and small ones are taken, too", "grey", GREY, "grey-refused", "not-normalised"),
    Look("", "small", "", "small-refused", fields=lambda seen, _: {"error": seen}),
    Look("with augment, once an image: after the crop, on whole levels from 0 to 255", "calls", "1 to 4",
         lambda seen, _: "randaugment-twice" if seen else "no-randaugment", lambda seen, _: 0 < len(seen) <= 4,
         lambda seen, _: {"n": len(seen) // 4}),
    Look("", lambda o: o["calls"][0][0], False, "randaugment-on-floats"),
    Look("", lambda o: o["calls"][0][1:3], 2 * 48**2, "randaugment-before-crop", lambda seen, most: seen[0] * seen[1] <= most,
         lambda seen, _: {"height": seen[0], "width": seen[1], "expected": "48 × 48", "got": f"{seen[1]} × {seen[0]}"}),
    Look("", lambda o: o["calls"][0][3:], "1 or more", "randaugment-idle", lambda seen, _: min(seen) >= 1,
         lambda seen, _: {"n": seen[0], "strength": seen[1]}),
    _forms("rich forms"),
    Look("", "times", CALLS, "randaugment-sometimes", fields=lambda seen, _: {"n": seen, "of": CALLS}),
    _levels("", "rich levels", COLOUR, "transform-shape", "augmented-not-normalised"),
    _levels("", "rich grey", GREY, "grey-refused", "augmented-not-normalised"),
    Look("", lambda o: float(o["rest"]), 0.0, "randaugment-lost", within(1e-4)),
    Look("the crop is random", lambda o: True, True, ""), *_cut(False, ""), *_cut(True, " with augment"),
]  # fmt: skip


def balise_1(make_transform):
    yield from judged(LOOKS, observe, make_transform)
