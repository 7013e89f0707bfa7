"""Balise 1: the input pipeline, judged on made images whose pixels say where they come from."""

import tempfile
from pathlib import Path

import torch
from PIL import Image

from dlojz_tp.checking import Wrong, close

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 24  # pixels of a side asked for
DRAWS = 200  # with a fair coin, fewer than 65 or more than 135 flips in 200 happen once in 1.8 million runs

HINTS = {
    "not-decoded": "The transform receives the path of a JPEG file. Open and decode it first, for example with "
                   'Image.open(path).convert("RGB").',
    "not-a-tensor": "Return a tensor, not {kind}. ToImage() or pil_to_tensor turns the picture into a tensor.",
    "grey-image": 'A grey photograph has one channel, but the network needs three. Use convert("RGB"), or decode '
                  "with mode RGB.",
    "channels-last": "In your image the channels come last. PyTorch expects (channels, height, width).",
    "wrong-size": "The image does not have the requested size of {size} × {size} pixels.",
    "one-image": "The transform must return one image with three dimensions, (3, {size}, {size}). The loader makes "
                 "the batch.",
    "not-float": "The image must be float32: ToDtype(torch.float32, scale=True).",
    "not-scaled": "Your pixels still go up to 255, but MEAN and STD are for values in [0, 1]. Divide by 255 "
                  "(scale=True) first.",
    "not-normalised": "The pixels are in [0, 1] but not normalised: subtract MEAN and divide by STD, channel by channel.",
    "mean-only": "You subtract MEAN, but you do not divide the result by STD.",
    "channels-swapped": "Red and blue are swapped.",
    "wrong-values": "An image of one colour must come out as (colour / 255 − MEAN) / STD in each channel, wherever "
                    "you crop it.",
    "random-validation": "Two calls for validation gave two different images. Nothing in this transform may be "
                         "random, or two runs cannot be compared.",
    "axes-swapped": "Height and width are swapped: left to right became top to bottom. PyTorch expects (channels, "
                    "height, width), but an array is (height, width, channels). Use permute(2, 0, 1).",
    "flipped-validation": "The validation image is mirrored.",
    "validation-squashed": "The validation image is squashed: a circle became an ellipse. Resize the shorter side, "
                           "then crop the centre.",
    "validation-off-centre": "The validation image is not cropped from the centre.",
    "wrong-side": "The image has a border that is not in the photograph, because the crop is larger than the "
                  "resized image. Resize the shorter side to at least the size of the crop, not the longer side, "
                  "and not always to the same size.",
    "validation-too-small": "The validation image shows only {part:.0%} of the shorter side. First resize that "
                            "side to `size`, or to slightly more in proportion (256 suits 224, but no other size), "
                            "then crop.",
    "not-random": "Training gave the same image in every call. RandomResizedCrop and RandomHorizontalFlip make a "
                  "new random draw for each image.",
    "never-flipped": "No image was mirrored in {draws} calls: RandomHorizontalFlip is missing.",
    "flipped-once": "One transform mirrors all or none of {draws} images, and another transform differs: you draw "
                    "the flip when the transform is created. Draw it again for each image.",
    "always-flipped": "{flips} of {draws} images were mirrored. It should be about half of them.",
    "upside-down": "Some training images are upside down. A horizontal flip only mirrors left and right.",
    "no-crop": "Every training image shows the whole photograph. RandomResizedCrop crops a part of it.",
    "fixed-scale": "The crops cover {low:.0%} to {high:.0%} of the photograph. RandomResizedCrop draws an area "
                   "between 8 % and 100 % of it, then resizes the crop, so that objects appear near and far.",
    "fixed-place": "Every crop is at the same place, {axis}. RandomResizedCrop draws the position too.",
    "fixed-shape": "Every crop has the same shape. RandomResizedCrop draws an aspect ratio between 3:4 and 4:3.",
    "always-upright": "All crops are {kind}. RandomResizedCrop draws an aspect ratio between 3:4 and 4:3.",
    "too-distorted": "Crops of {low:.1f}:1 to {high:.1f}:1 become squares, and objects are squashed beyond "
                     "recognition. The aspect ratio should be between 3:4 and 4:3.",
}


def balise_1(make_transform):
    """One colour gives the arithmetic, two ramps give the place that was cut out."""
    with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
        folder = Path(folder)
        yield "a JPEG file becomes a float32 tensor (3, size, size)"
        colour = _save(folder / "colour.jpg", _plain((200, 120, 40), 40, 64))
        train, val = make_transform(SIZE, train=True), make_transform(SIZE, train=False)
        for transform in (train, val):
            if not callable(transform):
                raise Wrong("not-callable", error=type(transform).__name__)
            _right_form(_apply(transform, colour), "a photograph of 40 × 64 pixels")
        yield "it is normalised: (colour / 255 − MEAN) / STD"
        for transform in (train, val):
            _right_values(_apply(transform, colour), torch.tensor([200.0, 120.0, 40.0]))
        yield "grey photographs, very small ones, other sizes"
        grey = _save(folder / "grey.jpg", Image.new("L", (50, 30), 90))
        small = _save(folder / "small.jpg", _plain((10, 200, 90), 9, 7))
        for transform in (train, val):
            try:
                image = _apply(transform, grey)
                _right_form(image, "a grey photograph")
                _right_values(image, torch.tensor([90.0, 90.0, 90.0]))
            except Wrong as wrong:
                raise Wrong("grey-image", got=wrong.got, where="a grey photograph") from wrong
            except RuntimeError as error:
                raise Wrong("grey-image", got=str(error).split("\n")[0]) from error
            _right_form(_apply(transform, small), "a photograph of 9 × 7 pixels")
        _right_form(_apply(make_transform(37, train=False), colour), "size 37", 37)
        _right_form(_apply(make_transform(37, train=True), colour), "size 37", 37)

        wide = _save(folder / "wide.jpg", _ramps(60, 90))
        tall = _save(folder / "tall.jpg", _ramps(90, 60))
        yield "validation: the centre, undistorted, always the same"
        for name, path, ratio in (("wide", wide, 1.5), ("tall", tall, 1 / 1.5)):
            _right_validation(val, path, ratio, f"a {name} photograph of ratio 3:2")
        try:
            _right_values(_apply(val, small), torch.tensor([10.0, 200.0, 90.0]))
        except Wrong as wrong:
            raise Wrong("wrong-side", where="a photograph of 9 × 7 pixels") from wrong
        yield "training: another crop at another scale in every call"
        images = [_apply(train, wide) for _ in range(DRAWS)]
        _right_way_up(torch.stack(images).mean(dim=0), "training")
        windows = [_window(image) for image in images]
        _right_training(windows, 90 / 60)
        yield "training: half of the images are mirrored, none are upside down"
        flips = sum(map(_mirrored, windows))
        if any(top > bottom for _, _, top, bottom in windows):
            raise Wrong("upside-down")
        if flips in (0, DRAWS):
            made = [_mirrored(_window(_apply(make_transform(SIZE, train=True), wide))) for _ in range(20)]
            if len(set(made)) > 1:
                raise Wrong("flipped-once", draws=DRAWS, got=f"{sum(made)} of {len(made)} transforms mirror")
        if not flips:
            raise Wrong("never-flipped", draws=DRAWS)
        if not 0.325 * DRAWS <= flips <= 0.675 * DRAWS:
            raise Wrong("always-flipped", flips=flips, draws=DRAWS)


def _plain(colour, height, width):
    return Image.new("RGB", (width, height), colour)


def _ramps(height, width):
    """Red grows from left to right, green from top to bottom: a crop's pixels tell its place. Values 20 to 235."""
    across = torch.linspace(20, 235, width).expand(height, width)
    down = torch.linspace(20, 235, height)[:, None].expand(height, width)
    pixels = torch.stack([across, down, torch.full((height, width), 128.0)], dim=2)
    return Image.fromarray(pixels.round().to(torch.uint8).numpy())


def _save(path, image):
    image.save(path, quality=98, subsampling=0) if image.mode == "RGB" else image.save(path, quality=98)
    return path


def _apply(transform, path):
    try:
        return transform(path)
    except TypeError as error:
        text = str(error)
        if "Path" in text or "str" in text or "found in the sample" in text:
            raise Wrong("not-decoded", got=text.split("\n")[0]) from error
        raise


def _right_form(image, where, size=SIZE):
    if image is None:
        raise Wrong("nothing-returned")
    if isinstance(image, str | Path):
        raise Wrong("not-decoded", got=type(image).__name__)
    if not isinstance(image, torch.Tensor):
        raise Wrong("not-a-tensor", got=type(image).__name__, kind=type(image).__name__)
    if image.shape == (1, size, size):
        raise Wrong("grey-image", expected=f"(3, {size}, {size})", got=str(tuple(image.shape)), where=where)
    if image.shape == (size, size, 3):
        raise Wrong("channels-last", expected=f"(3, {size}, {size})", got=str(tuple(image.shape)), where=where)
    if image.shape != (3, size, size):
        slug = "wrong-size" if image.dim() == 3 else "one-image"
        raise Wrong(slug, expected=f"(3, {size}, {size})", got=str(tuple(image.shape)), where=where, size=size)
    if image.dtype != torch.float32:
        raise Wrong("not-float", expected="float32", got=image, where=where)


def _right_values(image, colour):
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    truth, unit = (colour / 255 - mean) / std, colour / 255
    got = image.double().mean(dim=(1, 2)).float()
    if close(got, truth, 0.03):  # JPEG rounds a colour by about one part in 255
        return
    known = {
        "not-scaled": (colour, (colour - mean) / std),
        "not-normalised": (unit,),
        "mean-only": (unit - mean,),
        "channels-swapped": ((colour.flip(0) / 255 - mean) / std, truth.flip(0)),
    }
    for slug, values in known.items():
        if any((got - value).abs().max() < 0.02 * value.abs().max().clamp(min=1) for value in values):
            raise Wrong(slug, expected=truth, got=got, where="the colour (200, 120, 40), mean of each channel")
    other = (image - truth[:, None, None]).abs().amax(dim=0) > 0.5
    slug = _border(other) if close(image.flatten(1).median(dim=1).values, truth, 0.03) else "wrong-values"
    raise Wrong(slug, expected=truth, got=got, where="the colour (200, 120, 40), mean of each channel")


def _window(image):
    """Where the image was cut: (left, right, top, bottom) as fractions of the photograph, from its two ramps."""
    pixels = image.double() * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    place = (pixels * 255 - 20) / 215
    across, down = place[0].mean(dim=0), place[1].mean(dim=1)
    # straight lines through the inner pixels: the borders suffer from interpolation
    inner = torch.arange(3, image.shape[-1] - 3)
    ends = []
    for line in (across, down):
        slope, start = _line(inner.double(), line[inner])
        ends += [start - 0.5 * slope, start + (len(line) - 0.5) * slope]
    return tuple(end.item() for end in ends)


def _border(strange):
    """The slug for pixels, (size, size), that are none of the photograph's: of one side only, what was cut lies beside it."""
    lines = [strange.double().mean(dim=dim) > 0.5 for dim in (0, 1)]
    return "validation-off-centre" if any(line[0] != line[-1] for line in lines) else "wrong-side"


def _mirrored(window):
    return window[0] > window[1]


def _line(x, y):
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return slope, y.mean() - slope * x.mean()


def _right_validation(val, path, ratio, where):
    first = _apply(val, path)
    for _ in range(3):
        if not close(_apply(val, path), first, 1e-6):
            raise Wrong("random-validation", where=where)
    _right_way_up(first, where)
    blue = (first[2].double() * STD[2] + MEAN[2]) * 255  # 128 all over the photograph
    border = (blue - 128).abs() > 40
    if border.double().mean() > 0.02:
        raise Wrong(_border(border), got="rows or columns of another colour at the border", where=where)
    left, right, top, bottom = _window(first)
    if left > right or top > bottom:
        raise Wrong("flipped-validation", where=where)
    width, height = (right - left) * max(1.0, ratio), (bottom - top) * max(1.0, 1 / ratio)  # in shorter sides
    seen = f"{left:.0%} to {right:.0%} across, {top:.0%} to {bottom:.0%} down"
    if abs(width - height) > 0.12 * max(width, height):
        raise Wrong("validation-squashed", got=seen, where=where)
    if abs(left + right - 1) > 0.12 or abs(top + bottom - 1) > 0.12:
        raise Wrong("validation-off-centre", expected="the same margin on both sides", got=seen, where=where)
    if min(width, height) < 0.6:
        raise Wrong("validation-too-small", got=seen, where=where, part=min(width, height))


def _right_way_up(image, where):
    """Red grows from left to right, also where it is mirrored."""
    red = image[0].double()
    if red.mean(dim=0).std() < 0.2 * red.mean(dim=1).std():
        raise Wrong("axes-swapped", where=where)


def _right_training(windows, ratio):
    spread = torch.tensor(windows).std(dim=0)
    if spread.max() < 0.01:
        raise Wrong("not-random")
    widths = torch.tensor([abs(right - left) for left, right, _, _ in windows])
    heights = torch.tensor([abs(bottom - top) for _, _, top, bottom in windows])
    areas = widths * heights
    if areas.min() > 0.93:
        raise Wrong("no-crop", got=f"windows of {areas.min():.0%} to {areas.max():.0%} of the photograph")
    if areas.std() < 0.05 or areas.min() > 0.45 or areas.max() < 0.6:
        raise Wrong("fixed-scale", low=areas.min().item(), high=areas.max().item())
    places = _places(windows)
    for axis, place in places.items():
        # a place drawn evenly has a standard deviation of 0.29; where few windows leave room, nothing can be said
        if len(place) >= 25 and place.std() < 0.15:
            raise Wrong("fixed-place", axis=axis)
    shapes = widths * ratio / heights
    if shapes.log().std() < 0.06:  # 0.17 if drawn between 3:4 and 4:3
        raise Wrong("fixed-shape", got=f"the sides are as {shapes.median():.2f} to 1")
    for kind, none in (("upright", shapes.max() < 1.1), ("wide", shapes.min() > 0.91)):
        if none:
            raise Wrong("always-upright", kind=kind)
    if ((shapes < 0.62) | (shapes > 1.6)).double().mean() > 0.1:
        raise Wrong("too-distorted", low=shapes.min().item(), high=shapes.max().item())
    if areas.max() < 0.72:
        raise Wrong("fixed-scale", low=areas.min().item(), high=areas.max().item())


def _places(windows):
    """Where windows lie in the room that they leave, from 0 to 1, of those that leave a fifth or more of the side."""
    found = {}
    for axis, start, end in (("across", 0, 1), ("down", 2, 3)):
        low = torch.tensor([min(window[start], window[end]) for window in windows])
        room = 1 - torch.tensor([abs(window[end] - window[start]) for window in windows])
        found[axis] = (low / room)[room > 0.2]
    return found
