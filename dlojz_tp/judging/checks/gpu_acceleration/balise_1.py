"""Balise 1: the input pipeline. One colour gives the arithmetic, two ramps give the place that was cut out."""

import tempfile
from pathlib import Path

import torch
from PIL import Image

from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look, judged, silent, within

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 24  # pixels of a side asked for
DRAWS = 200  # with a fair coin, fewer than 65 or more than 135 flips in 200 happen once in 1.8 million runs
COLOUR, GREY, SMALL = (200.0, 120.0, 40.0), (90.0,) * 3, (10.0, 200.0, 90.0)
SHAPES = {"wide": 1.5, "tall": 1 / 1.5}  # of the photographs with ramps: width over height


def observe(make_transform, folder):
    """Images of each kind of file, for training and for validation; windows of many training images."""
    colour = _save(folder / "colour.jpg", _plain((200, 120, 40), 40, 64))
    both = {"train": make_transform(SIZE, train=True), "val": make_transform(SIZE, train=False)}
    for name, transform in both.items():
        yield {f"{name} called": type(transform).__name__ if not callable(transform) else "callable"}
        yield {f"{name} colour": _applied(transform, colour)}
    for name, transform in both.items():
        yield {f"{name} values": _applied(transform, colour)}
    grey = _save(folder / "grey.jpg", Image.new("L", (50, 30), 90))
    small = _save(folder / "small.jpg", _plain((10, 200, 90), 9, 7))
    for name, transform in both.items():
        yield {f"{name} grey": (_applied(transform, grey, RuntimeError),)}
        yield {f"{name} small": _applied(transform, small)}
    for name in ("val", "train"):
        yield {f"{name} 37": _applied(make_transform(37, train=name == "train"), colour)}
    photos = {"wide": _save(folder / "wide.jpg", _ramps(60, 90)), "tall": _save(folder / "tall.jpg", _ramps(90, 60))}
    for name, path in photos.items():
        first, *others = [both["val"](path) for _ in range(4)]
        blue = (first[2].double() * STD[2] + MEAN[2]) * 255  # 128 all over the photograph
        yield {f"{name} alike": all(close(other, first, 1e-6) for other in others), f"{name} upright": _upright(first)}
        yield {f"{name} border": (blue - 128).abs() > 40, f"{name} window": _window(first)}
    yield {"small again": _applied(both["val"], small)}
    yield from _observe_training(make_transform, both["train"], photos["wide"])


def _observe_training(make_transform, train, wide):
    """Areas, shapes and places of the windows; how many are mirrored, and by which transforms if all or none."""
    images = [train(wide) for _ in range(DRAWS)]
    yield {"training upright": _upright(torch.stack(images).mean(dim=0))}
    windows = [_window(image) for image in images]
    left, right, top, bottom = torch.tensor(windows).unbind(1)
    widths, heights, flips = (right - left).abs(), (bottom - top).abs(), sum(map(_mirrored, windows))
    areas, shapes = widths * heights, widths * SHAPES["wide"] / heights
    # a place drawn evenly has a standard deviation of 0.29; where few windows leave room, nothing can be said
    fixed = [axis for axis, place in _places(windows).items() if len(place) >= 25 and place.std() < 0.15]
    alike = [kind for kind, one in (("upright", shapes.max() < 1.1), ("wide", shapes.min() > 0.91)) if one]
    yield {"spread": torch.tensor(windows).std(dim=0).max(), "areas": areas, "shapes": shapes}
    yield {"fixed": fixed, "alike": alike, "upside down": bool((top > bottom).any()), "flips": flips}
    made = [make_transform(SIZE, train=True)(wide) for _ in range(20 if flips in (0, DRAWS) else 0)]
    yield {"made": [_mirrored(_window(image)) for image in made]}


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


def _applied(transform, path, kind=()):
    """What becomes of a file; an error of this kind, or one that says that it was not decoded."""
    try:
        return transform(path)
    except kind as error:
        return error
    except TypeError as error:
        if any(words in str(error) for words in ("Path", "str", "found in the sample")):
            return error
        raise


def _upright(image):
    """Whether red grows from left to right, also where it is mirrored."""
    red = image[0].double()
    return not red.mean(dim=0).std() < 0.2 * red.mean(dim=1).std()


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


def _border(strange, _=None):
    """The slug for pixels, (size, size), that are none of the photograph's: of one side only, what was cut lies beside it."""
    lines = [strange.double().mean(dim=dim) > 0.5 for dim in (0, 1)]
    return "validation-off-centre" if any(line[0] != line[-1] for line in lines) else "wrong-side"


def _mirrored(window):
    return window[0] > window[1]


def _line(x, y):
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return slope, y.mean() - slope * x.mean()


def _places(windows):
    """Where windows lie in the room that they leave, from 0 to 1, of those that leave a fifth or more of the side."""
    found = {}
    for axis, start, end in (("across", 0, 1), ("down", 2, 3)):
        low = torch.tensor([min(window[start], window[end]) for window in windows])
        room = 1 - torch.tensor([abs(window[end] - window[start]) for window in windows])
        found[axis] = (low / room)[room > 0.2]
    return found


def _formed(image, size):
    """A look's `holds`: a float32 tensor (3, size, size)."""
    return isinstance(image, torch.Tensor) and image.shape == (3, size, size) and image.dtype == torch.float32


def _form_hint(image, size):
    if isinstance(image, TypeError | str | Path):
        return "not-decoded"
    if not isinstance(image, torch.Tensor):
        return "not-a-tensor"
    if image.shape == (3, size, size):
        return "not-float"
    known = {(1, size, size): "grey-image", (size, size, 3): "channels-last"}
    return known.get(tuple(image.shape), "wrong-size" if image.dim() == 3 else "one-image")


def _form(claim, key, where, size=SIZE):
    """The look at the form of an image."""

    def fields(image, _):
        got = str(tuple(image.shape)) if isinstance(image, torch.Tensor) else str(image).split("\n")[0]
        about = {"kind": type(image).__name__, "size": size, "where": where}
        return about | {
            "expected": f"(3, {size}, {size})",
            "got": got if _form_hint(image, size) != "not-float" else image,
        }

    return Look(claim, key, size, _form_hint, holds=_formed, fields=fields)


def _due(colour):
    return (torch.tensor(colour) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)


def _mean(image):
    """Of each channel."""
    return image.double().mean(dim=(1, 2)).float()


def _has(colour):
    """A look's `holds`: an image has this colour; JPEG rounds it by about one part in 255."""
    return lambda image, _: close(_mean(image), _due(colour), 0.03)


def _values_hint(image, truth):
    got, mean, std, colour = _mean(image), torch.tensor(MEAN), torch.tensor(STD), torch.tensor(COLOUR)
    known = {
        "not-scaled": (colour, (colour - mean) / std),
        "not-normalised": (colour / 255,),
        "mean-only": (colour / 255 - mean,),
        "channels-swapped": ((colour.flip(0) / 255 - mean) / std, truth.flip(0)),
    }
    for slug, values in known.items():
        if any((got - value).abs().max() < 0.02 * value.abs().max().clamp(min=1) for value in values):
            return slug
    other = (image - truth[:, None, None]).abs().amax(dim=0) > 0.5
    return _border(other) if close(image.flatten(1).median(dim=1).values, truth, 0.03) else "wrong-values"


def _is_grey(seen, size):
    return _formed(seen[0], size) and _has(GREY)(seen[0], None)


def _other_files():
    """Looks at images of other files and sizes; a grey one may fail in any way."""
    claim = "grey photographs, very small ones, other sizes"
    for name in ("train", "val"):
        yield Look(claim, f"{name} grey", SIZE, "grey-image", holds=_is_grey,
                   fields=lambda seen, _: {"got": seen[0], "expected": "", "where": "a grey photograph"})  # fmt: skip
        yield _form("", f"{name} small", "a photograph of 9 × 7 pixels")
    yield from (_form("", f"{name} 37", "size 37", 37) for name in ("val", "train"))


def _validation(name):
    """Looks at the validation image of a photograph with ramps."""
    claim, ratio, where = (
        "validation: the centre, undistorted, always the same",
        SHAPES[name],
        f"a {name} photograph of ratio 3:2",
    )

    def sides(window):
        """Width and height of what is shown, in shorter sides."""
        left, right, top, bottom = window
        return (right - left) * max(1.0, ratio), (bottom - top) * max(1.0, 1 / ratio)

    def fields(window, _):
        left, right, top, bottom = window
        got = f"{left:.0%} to {right:.0%} across, {top:.0%} to {bottom:.0%} down"
        return {"expected": "", "got": got, "where": where, "part": min(sides(window))}

    yield Look(claim, f"{name} alike", True, "random-validation", fields={"where": where})
    yield Look("", f"{name} upright", True, "axes-swapped", fields={"where": where})
    yield Look("", f"{name} border", "", _border, holds=lambda border, _: not border.double().mean() > 0.02,
               fields={"got": "rows or columns of another colour at the border", "where": where})  # fmt: skip
    for slug, wrong in (
        ("flipped-validation", lambda window: window[0] > window[1] or window[2] > window[3]),
        ("validation-squashed", lambda window: abs(sides(window)[0] - sides(window)[1]) > 0.12 * max(sides(window))),
        ("validation-off-centre",
        lambda window: abs(window[0] + window[1] - 1) > 0.12 or abs(window[2] + window[3] - 1) > 0.12),
        ("validation-too-small", lambda window: min(sides(window)) < 0.6),
    ):  # fmt: skip
        yield Look(
            "", f"{name} window", "", slug, holds=lambda window, _, wrong=wrong: not wrong(window), fields=fields
        )


def _spread(claim, wrong, slug, key="areas"):
    """A look at the areas, or at the shapes, of all windows."""
    return Look(claim, key, "", slug, holds=lambda seen, _: not wrong(seen), fields=_range)


def _range(seen, _):
    low, high = seen.min().item(), seen.max().item()
    return {"low": low, "high": high, "got": f"from {low:.2f} to {high:.2f}"}


def _flip_fields(flips, _):
    return {"flips": flips, "draws": DRAWS}


def _made_fields(seen, _):
    return {"draws": DRAWS, "got": f"{sum(seen)} of {len(seen)} transforms mirror"}


LOOKS = [
    *(look for name in ("train", "val") for look in (
        Look("a JPEG file becomes a float32 tensor (3, size, size)", f"{name} called", "callable", "not-callable",
             fields="error"),
        _form("", f"{name} colour", "a photograph of 40 × 64 pixels"))),
    *(Look("it is normalised: (colour / 255 − MEAN) / STD", f"{name} values", _due(COLOUR), _values_hint,
           holds=_has(COLOUR),
           fields=lambda image, _: {"got": _mean(image), "where": "the colour (200, 120, 40), mean of each channel"})
      for name in ("train", "val")),
    *_other_files(), *_validation("wide"), *_validation("tall"),
    Look("", "small again", "", "wrong-side", holds=_has(SMALL),
         fields={"got": "", "where": "a photograph of 9 × 7 pixels"}),
    Look("training: another crop at another scale in every call", "training upright", True, "axes-swapped",
         fields={"where": "training"}),
    Look("", "spread", "", "not-random", holds=lambda seen, _: not seen < 0.01, fields=silent),
    _spread("", lambda areas: areas.min() > 0.93, "no-crop"),
    _spread("", lambda areas: areas.std() < 0.05 or areas.min() > 0.45 or areas.max() < 0.6, "fixed-scale"),
    Look("", "fixed", [], "fixed-place", fields=lambda seen, _: {"axis": seen[0]} | silent(seen, _)),
    _spread("", lambda shapes: shapes.log().std() < 0.06, "fixed-shape", "shapes"),  # 0.17 if drawn between 3:4 and 4:3
    Look("", "alike", [], "always-upright", fields=lambda seen, _: {"kind": seen[0]} | silent(seen, _)),
    _spread("", lambda shapes: ((shapes < 0.62) | (shapes > 1.6)).double().mean() > 0.1, "too-distorted", "shapes"),
    _spread("", lambda areas: areas.max() < 0.72, "fixed-scale"),
    Look("training: half of the images are mirrored, none are upside down", "upside down", False, "upside-down"),
    Look("", "made", "alike", "flipped-once", holds=lambda seen, _: len(set(seen)) < 2, fields=_made_fields),
    Look("", "flips", DRAWS / 2, lambda seen, _: "always-flipped" if seen else "never-flipped", holds=within(0.35),
         fields=_flip_fields),
]  # fmt: skip


def balise_1(make_transform):
    with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
        yield from judged(LOOKS, observe, make_transform, Path(folder))
