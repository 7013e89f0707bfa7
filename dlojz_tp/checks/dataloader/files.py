"""Balise 1: a data set over JPEG files: lazy, picklable, clean, and clear about damage."""

import gc
import pickle
import tempfile
from pathlib import Path

import cloudpickle
import torch
from PIL import Image, ImageFile

from dlojz_tp.checking import Wrong
from dlojz_tp.probes.files import Opened, open_descriptors

HINTS = {
    "opened-in-init": "{n} files were opened when the data set was made. With a million files, that takes hours "
                      "and fills the memory. Keep the paths, and open each file in __getitem__.",
    "not-a-pair": "An item is a pair: (transform(picture), label).",
    "not-transformed": "The first half of an item must be what transform(picture) returned.",
    "path-transformed": "The transform was given {kind}. It expects a decoded picture: "
                        'Image.open(path).convert("RGB").',
    "not-rgb": "The transform was given a picture of mode {mode}. Every large set contains grey, palette and CMYK "
               'files: use convert("RGB").',
    "picture-altered": "The transform was given a picture that differs from the file's: resized, cropped or "
                       "rotated. All of that belongs in the transform, which must see the picture as it was "
                       "decoded.",
    "label-not-int": "The label must be the int that came with the path, not {kind}: the collate function makes a "
                     "tensor from the whole batch.",
    "wrong-item": "The item is not the picture and the label of this index.",
    "wrong-length": "len(dataset) must be the number of items.",
    "not-picklable": "Spawned workers get the data set through pickle, which fails: {error}. Keep no open file, "
                     "lambda or inner function in the data set.",
    "file-left-open": "{n} files are still open after their items were read. Use `with Image.open(path) as image:`.",
    "pictures-kept": "After reading, the data set holds {size} of pictures, and each worker would hold its own "
                     "copy. Read and decode the file again for each item.",
    "file-not-named": "The error does not name the file: a training on a million files stops, and nobody knows at "
                      "which one. Put the path into the message.",
    "damage-hidden": "{what} gave an item instead of an error. A damaged file must be reported, not replaced or skipped.",
    "loop-ends": "{what} raised {kind}: a loop over the data set takes that for its end, and stops silently. Raise "
                 "another error that names the file.",
    "truncation-allowed": "ImageFile.LOAD_TRUNCATED_IMAGES was switched on: the rest of the picture becomes grey, "
                          "for every picture in the program, and nobody notices.",
    "item-kept": "Item 0 was read twice, but transform was called only once: the item is kept. Memory then grows "
                 "with the set, and the transform's random draws never change.",
    "index-wraps": "dataset[len(dataset)] gave an item. It must raise IndexError, or a plain loop over the data set never "
    "ends.",
    "index-error-hidden": "dataset[len(dataset)] must raise IndexError, as a list does; it raised {kind}. Is the "
                          "index looked up inside the try?",
    "negative-index": "dataset[-1] must be the last item, or raise IndexError.",
}


class Mean:
    """A transform that can be pickled: the mean colours of four quarters, and what it was given."""

    seen: list = []

    def __call__(self, picture):
        Mean.seen.append((picture.mode, picture.size) if isinstance(picture, Image.Image) else picture)
        if not isinstance(picture, Image.Image):
            raise Wrong("path-transformed", kind=f"a {type(picture).__name__}")
        return _quarters(picture)


def _quarters(picture):
    """(channels × 4,): the mean colours of upper left, upper right, lower left, lower right."""
    small = picture.resize((2, 2), Image.Resampling.BOX)
    return torch.tensor([small.getpixel((x, y)) for y in (0, 1) for x in (0, 1)], dtype=torch.float32).flatten()


def balise_1(JpegFiles):  # noqa: N803  (the answer is a class)
    """Files of colours of their own tell which was read; the audit hook tells when."""
    allowed = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
            yield from _look(JpegFiles, Path(folder))
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed
        Mean.seen.clear()


def _look(JpegFiles, folder):  # noqa: N803
    items = _made(folder)
    yield "no file is opened when the data set is made"
    with Opened(folder) as opened:
        dataset = JpegFiles(list(items), Mean())
    if opened.reads:
        raise Wrong("opened-in-init", n=len(opened.reads))
    yield "the length; items (transform(picture in RGB), int)"
    length = len(dataset)
    if length != len(items):
        raise Wrong("wrong-length", expected=len(items), got=length)
    descriptors = open_descriptors()
    for index, (path, label) in [*enumerate(items), *enumerate(items)]:
        before = len(Mean.seen)
        item = dataset[index]
        _right_item(item, path, label, index, anew=len(Mean.seen) > before)
    if len(Mean.seen) < 2 * len(items):
        raise Wrong("item-kept", expected=f"{2 * len(items)} calls of transform", got=f"{len(Mean.seen)}")
    if _right_again(dataset, items):
        raise Wrong("wrong-item", where="the same index after others")
    yield "no file stays open, no picture stays in memory"
    left = [where for number, where in open_descriptors().items() if number not in descriptors and str(folder) in where]
    if left:
        raise Wrong("file-left-open", n=len(left))
    _keeps_nothing(JpegFiles, folder)
    yield "the data set can be pickled, as spawned workers require"
    _pickled(dataset, items)
    yield "indices beyond the end raise IndexError"
    _indices(dataset, items)
    yield "a damaged or missing file raises an error that names it"
    _damaged(JpegFiles, folder, items)


COLOURS = [(220, 40, 40), (40, 200, 60), (60, 60, 230), (200, 200, 50)]


def _made(folder):
    """Five small JPEG files: three in RGB, one grey, one CMYK."""
    items = []
    for k, colour in enumerate(COLOURS[:3]):
        items.append((folder / f"photo{k}.jpg", 10 + k))
        picture = Image.new("RGB", (20 + 2 * k, 16), colour)
        picture.paste((250, 250, 250), (0, 0, 10 + k, 8))  # a corner of its own tells which way up it is
        picture.save(items[-1][0], quality=95)
    items.append((folder / "grey.jpg", 20))
    Image.new("L", (12, 30), 90).save(items[-1][0], quality=95)
    items.append((folder / "print.jpg", 21))
    Image.new("CMYK", (18, 18), (10, 200, 20, 30)).save(items[-1][0], quality=95)
    return items


def _decoded(path):
    """The size of a picture, and its colours."""
    with Image.open(path) as image:
        return image.size, _quarters(image.convert("RGB"))


def _truth(path):
    return _decoded(path)[1]


def _right_item(item, path, label, index, anew):
    where = f"index {index}, {path.name}"
    if item is None:
        raise Wrong("nothing-returned")
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise Wrong("not-a-pair", got=item, where=where)
    image, got = item
    if not Mean.seen or not isinstance(image, torch.Tensor):
        raise Wrong("not-transformed", got=type(image).__name__, where=where)
    mode, size = Mean.seen[-1]
    if mode != "RGB":
        raise Wrong("not-rgb", mode=mode, where=where)
    if not isinstance(got, int) or isinstance(got, bool):
        raise Wrong("label-not-int", got=got, where=where, kind=f"a {type(got).__name__}")
    due_size, due = _decoded(path)
    if got != label or image.shape != (12,) or (image - due)[-3:].abs().max() > 100:
        raise Wrong("wrong-item", expected=f"label {label}, mean colour {due.tolist()[-3:]}",
                    got=f"label {got}, mean colour {image.tolist()[-3:]}", where=where)  # fmt: skip
    if anew and size != due_size or (image - due).abs().max() > 4:
        expected, found = ("{} × {} pixels".format(*one) for one in (due_size, size))
        raise Wrong("picture-altered", expected=expected, got=found, where=where)


def _right_again(dataset, items):
    return any((dataset[k][0] - _truth(items[k][0])).abs().max() > 4 for k in (2, 0, torch.tensor(1)))


def _keeps_nothing(JpegFiles, folder):  # noqa: N803
    """Large pictures are read; what the data set then holds must not have grown by one of them."""
    path = folder / "large.jpg"
    Image.effect_noise((640, 480), 90).convert("RGB").save(path, quality=95)  # no small file
    dataset = JpegFiles([(path, 0)], Mean())
    before, alive = len(_dumped(dataset)), _pictures()
    dataset[0]
    if Mean.seen[-1] != ("RGB", (640, 480)):
        raise Wrong("picture-altered", expected="640 × 480 pixels", got=str(Mean.seen[-1][1]))
    size = len(_dumped(dataset)) - before
    if size > 100_000 or _pictures() > alive:
        raise Wrong("pictures-kept", size=f"{max(size, 640 * 480 * 3) / 1e6:.1f} MB")


def _pictures():
    """How many decoded pictures of 640 × 480 live in this process."""
    # type(), not isinstance: that would ask every object, lazy modules too, for its class
    found = [o for o in gc.get_objects() if issubclass(type(o), Image.Image) and getattr(o, "_im", None) is not None]
    return sum(picture.size == (640, 480) for picture in found)


def _dumped(dataset):
    try:
        return cloudpickle.dumps(_state(dataset))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise Wrong("not-picklable", error=str(error)) from error


def _state(dataset):
    _, arguments, *state = dataset.__reduce_ex__(2)
    return state[0] if state else arguments


def _pickled(dataset, items):
    try:
        # what the data set holds by plain pickle, as spawn does it; its class by value, since it lives in a notebook
        pickle.dumps(_state(dataset))
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise Wrong("not-picklable", error=str(error)) from error
    path, label = items[1]
    got = copy[1]
    if got[1] != label or (got[0] - _truth(path)).abs().max() > 4:
        raise Wrong("wrong-item", where="index 1 of the pickled copy")


def _indices(dataset, items):
    for index in (len(items), len(items) + 7):
        try:
            got = dataset[index]
        except IndexError:
            continue
        except Exception as error:
            raise Wrong("index-error-hidden", got=str(error), kind=type(error).__name__) from error
        raise Wrong("index-wraps", got=got, where=f"index {index} of {len(items)} items")
    try:
        got = dataset[-1]
    except IndexError:
        return
    if got[1] != items[-1][1]:
        raise Wrong("negative-index", expected=f"label {items[-1][1]}", got=f"label {got[1]}")


def _damaged(JpegFiles, folder, items):  # noqa: N803
    large = folder / "source.jpg"
    Image.effect_noise((160, 120), 60).convert("RGB").save(large, quality=90)
    content = large.read_bytes()
    damaged = {
        "a file that was cut short": ("cutshort.jpg", content[: len(content) // 2]),
        "a text file named .jpg": ("letter.jpg", b"this is no picture at all"),
        "an empty file": ("empty.jpg", b""),
        "a file that does not exist": ("gone.jpg", None),
    }
    for what, (name, found) in damaged.items():
        if found is not None:
            (folder / name).write_bytes(found)
        dataset, subject = JpegFiles([items[0], (folder / name, 3), items[1]], Mean()), what[0].upper() + what[1:]
        try:
            got = dataset[1]
        except Wrong:
            raise
        except (StopIteration, IndexError) as error:
            kind = type(error).__name__
            raise Wrong("loop-ends", got=str(error), where=what, what=subject, kind=kind) from error
        except Exception as error:
            if name not in "\n".join([str(error), *getattr(error, "__notes__", ())]):
                raise Wrong(
                    "file-not-named", expected=f"an error that contains {name}", got=str(error), where=what
                ) from error
        else:
            slug = "truncation-allowed" if ImageFile.LOAD_TRUNCATED_IMAGES else "damage-hidden"
            raise Wrong(slug, got=got, where=what, what=subject)
        if dataset[2][1] != items[1][1]:
            raise Wrong("wrong-item", where="the item after a damaged one")
