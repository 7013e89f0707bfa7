"""Balise 1: RandAugment in the right place of the CPU pipeline, watched while it works on a known photograph."""

import contextlib
import functools
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from dlojz_tp.judging.checking.looks import Look, form, judged, silent, tried, within

MEAN, STD = (torch.tensor(three).view(3, 1, 1) for three in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
CALLS = 100
COLOUR, GREY, DARK = (200, 100, 50), 128, (1, 0, 1)  # DARK: no level above 1, as of an image in [0, 1]


@functools.cache
def _photograph():
    """Red grows from top to bottom, green from left to right."""
    rows, columns = np.mgrid[0:300, 0:400]
    pixels = np.stack([rows * 255 // 299, columns * 255 // 399, (rows + columns) % 256], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


@contextlib.contextmanager
def _watched(instead=lambda image: image):
    """`instead` does the work of RandAugment; lists each call: floats or not, pixels, num_ops and magnitude."""
    calls = []

    def forward(this, image):
        floats = isinstance(image, torch.Tensor) and image.is_floating_point()
        calls.append((floats, v2.functional.get_size(image), [this.num_ops, this.magnitude]))
        return instead(image)

    with mock.patch.object(v2.RandAugment, "forward", forward), mock.patch.object(v1.RandAugment, "forward", forward):
        yield calls


def _windows(transform):
    """How windows are cut from the photograph: red and green tell."""
    windows = torch.stack([transform(_photograph()) for _ in range(CALLS)]).double() * STD + MEAN
    down = (windows[:, 0, -1] - windows[:, 0, 0]).mean(1)  # the share of the height, negative if upside down
    right = (windows[:, 1, :, -1] - windows[:, 1, :, 0]).mean(1)
    apart = torch.stack([windows, windows.flip(3)]).sub(windows[0]).abs().amax((2, 3, 4)).amin(0)
    turned = (windows[:, 0, :, -1] - windows[:, 0, :, 0]).abs().max()  # red is alike from left to right
    drawn = max(down.std(), right.abs().std())
    return {
        "turned": turned,
        "apart": apart.max(),
        "down": down.min(),
        "drawn": drawn,
        "mirrored": (right < 0).double().mean().item(),
    }


def observe(make_transform):
    """Forms; images of one colour, grey, small; calls of RandAugment; what becomes of its result; windows."""
    plain, rich = (make_transform(48, augment=augment) for augment in (False, True))
    yield {"callable": callable(plain)}
    with _watched() as never:
        forms = [form(make(_photograph())) for make in (plain, make_transform(31, augment=False))]
    small = tried(plain, Image.new("RGB", (31, 20)))
    yield {"forms": forms, "never": never, "small": small if isinstance(small, str) else "an image"}
    yield {key: plain(Image.new("RGB", (90, 70), colour)) for key, colour in (("levels", COLOUR), ("dark", DARK))}
    yield {"grey": tried(plain, Image.new("L", (90, 70), GREY))}
    with _watched() as calls:
        cut = _windows(rich)
    yield {"calls": calls, "cut": cut}
    with _watched(lambda image: v2.functional.invert(v2.functional.adjust_brightness(image, 0))):
        white = tried(rich, _photograph().convert("L"))
    yield {"white": white}
    yield {"plainly cut": _windows(plain)}


def _level(colour):
    return ((torch.tensor(colour).view(-1, 1, 1) / 255 - MEAN) / STD).expand(3, 48, 48)


def _cut(claim, key):
    """Looks at the windows."""
    yield Look(claim, lambda o: bool(o[key]["turned"] < 0.1), True, "axes-swapped")
    bounds = {"apart": (1e-3, "no-random-crop"), "down": (0, "flip-upside-down"), "drawn": (0.02, "crop-not-resized")}
    for what, (least, hint) in bounds.items():
        yield Look(claim, lambda o, what=what, least=least: bool(o[key][what] >= least), True, hint)
    yield Look(claim, lambda o: o[key]["mirrored"], 0.5, _flips, holds=_some)


def _some(seen, _):
    return 0 < seen < 1


def _half(seen, _):
    """200 fair draws are outside of this band in one of a million runs."""
    return abs(seen - 0.5) < 0.175


def _mirrored(o):
    return (o["plainly cut"]["mirrored"] + o["cut"]["mirrored"]) / 2


def _given_size(o):
    return o["calls"][0][1]


def _given_options(o):
    return o["calls"][0][2]


def _flips(seen, _):
    return "no-flip" if seen < 0.5 else "always-flipped"


def _form(seen, due):
    return "size-ignored" if seen[0] in (seen[1], due[0]) and "float32 (3, " in seen[0] else "transform-shape"


def _colours(seen, _):
    """The slug for a plain image whose levels are not those due."""
    found, due = (seen * STD + MEAN).mean((1, 2)) * 255, torch.tensor(COLOUR).float()
    if (found.sort()[0] - due.sort()[0]).abs().max() < 2:
        return "channels-mixed"
    return "colours-lost" if found.max() - found.min() < 2 else "not-normalised"


def _times(seen, due):
    return "randaugment-twice" if seen > due else "randaugment-sometimes" if seen else "no-randaugment"


def _white(seen, _):
    if isinstance(seen, str):
        return "grey-refused"
    return "randaugment-lost" if seen.std((1, 2)).max() > 1e-3 else "augmented-not-normalised"


LOOKS = [
    Look("a float32 tensor (3, size, size), normalised", "callable", True, "transform-not-callable"),
    Look("", "never", [], "randaugment-always", fields=silent),
    Look("", "forms", ["float32 (3, 48, 48)", "float32 (3, 31, 31)"], _form),
    Look("", "levels", _level(COLOUR), _colours, holds=within(1e-3)),
    Look("", "dark", _level(DARK), "not-normalised", holds=within(1e-3)),
    Look("grey photographs and small ones are accepted too", "grey", _level([GREY]), "grey-refused", holds=within(1e-3)),
    Look("", "small", "an image", "small-refused"),
    Look("with augment, once per image: after the crop, on integer levels", lambda o: len(o["calls"]), CALLS, _times),
    Look("", lambda o: o["calls"][0][0], False, "randaugment-on-floats"),
    Look("", lambda o: min(o["calls"][0][1]) > 3, True, "augmented-channels-last"),
    Look("", _given_size, [48, 48], "randaugment-before-crop",
         holds=lambda seen, due: seen[0] * seen[1] <= 2 * due[0] * due[1]),
    Look("", _given_options, [2, 9], "randaugment-idle", holds=lambda seen, _: min(seen) >= 1),
    Look("", "white", _level([255]), _white, holds=within(1e-3)),
    *_cut("the crop is random", "plainly cut"), *_cut("the crop is random, with augment too", "cut"),
    Look("half of the images are mirrored", _mirrored, 0.5, _flips, holds=_half),
]  # fmt: skip


def balise_1(make_transform):
    yield from judged(LOOKS, observe, make_transform)
