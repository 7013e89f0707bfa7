"""Balise 1: a data set over JPEG files: lazy, picklable, clean, and clear about damage."""

import functools
import gc
import pickle
import tempfile
from pathlib import Path

import cloudpickle
import torch
from PIL import Image, ImageFile

from dlojz_tp.judging.checking.looks import Look, judged, one_of, silent
from dlojz_tp.judging.probes.files import Opened, open_descriptors

COLOURS = [(220, 40, 40), (40, 200, 60), (60, 60, 230), (200, 200, 50)]
FILES = ["photo0.jpg", "photo1.jpg", "photo2.jpg", "grey.jpg", "print.jpg"]
DAMAGED = {"a file that was cut short": "cutshort.jpg", "a text file named .jpg": "letter.jpg",
"an empty file": "empty.jpg",
           "a file that does not exist": "gone.jpg"}  # fmt: skip
DAMAGES = {"ends a loop": "loop-ends", "not named": "file-not-named", "the rest is grey": "truncation-allowed",
           "an item": "damage-hidden"}  # fmt: skip


class Mean:
    """A transform that can be pickled: the mean colours of four quarters, and what it was given."""

    seen: list = []

    def __call__(self, picture):
        decoded = isinstance(picture, Image.Image)
        Mean.seen.append((picture.mode, picture.size) if decoded else f"a {type(picture).__name__}")
        return _quarters(picture) if decoded else torch.zeros(12)


def _quarters(picture):
    """(channels × 4,): the mean colours of upper left, upper right, lower left, lower right."""
    small = picture.resize((2, 2), Image.Resampling.BOX)
    return torch.tensor([small.getpixel((x, y)) for y in (0, 1) for x in (0, 1)], dtype=torch.float32).flatten()


def observe(JpegFiles, folder):  # noqa: N803  (the answer is a class)
    """Files of colours of their own tell which was read; the audit hook tells when."""
    items = _made(folder)
    with Opened(folder) as opened:
        dataset = JpegFiles(list(items), Mean())
    yield {"opened": len(opened.reads)}
    yield {"length": len(dataset)}
    descriptors = open_descriptors()
    for k, (path, label) in enumerate([*items, *items]):
        before = len(Mean.seen)
        item = dataset[k % len(items)]
        given = Mean.seen[-1] if Mean.seen else None
        yield {("item", k): (item, given), ("due", k): (label, *_decoded(path)), ("anew", k): len(Mean.seen) > before}
    yield {"calls": len(Mean.seen)}
    yield {"again": all(_alike(dataset[k][0], items[k][0]) for k in (2, 0, torch.tensor(1)))}
    left = {number: where for number, where in open_descriptors().items() if number not in descriptors}
    yield {"left": sum(str(folder) in where for where in left.values())}
    yield from _kept(JpegFiles, folder)
    yield from _pickled(dataset, items)
    for index in (len(items), len(items) + 7):
        yield {("beyond", index): _beyond(dataset, index)}
    try:
        yield {"last": dataset[-1][1]}
    except IndexError:
        yield {"last": "IndexError"}
    yield from _damaged(JpegFiles, folder, items)


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


def _alike(image, path):
    return not (image - _decoded(path)[1]).abs().max() > 4


def _kept(JpegFiles, folder):  # noqa: N803
    """Large pictures are read; what the data set then holds must not have grown by one of them."""
    path = folder / "large.jpg"
    Image.effect_noise((640, 480), 90).convert("RGB").save(path, quality=95)  # no small file
    dataset = JpegFiles([(path, 0)], Mean())
    (before, error), alive = _dumped(dataset), _pictures()
    yield {"dumped": error}
    dataset[0]
    yield {"large": Mean.seen[-1]}
    after, error = _dumped(dataset)
    yield {"dumped again": error, "kept": (after - before, _pictures() - alive)}


def _pictures():
    """How many decoded pictures of 640 × 480 live in this process."""
    # type(), not isinstance: that would ask every object, lazy modules too, for its class
    found = [o for o in gc.get_objects() if issubclass(type(o), Image.Image) and getattr(o, "_im", None) is not None]
    return sum(picture.size == (640, 480) for picture in found)


def _dumped(dataset):
    """Bytes of what it holds, and the error of one that cannot be pickled."""
    try:
        return len(cloudpickle.dumps(_state(dataset))), ""
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        return 0, str(error)


def _state(dataset):
    _, arguments, *state = dataset.__reduce_ex__(2)
    return state[0] if state else arguments


def _pickled(dataset, items):
    """What the data set holds by plain pickle, as spawn does it; its class by value, since it lives in a notebook."""
    try:
        pickle.dumps(_state(dataset))
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        yield {"pickled": str(error), "copy": True}
        return
    yield {"pickled": ""}
    got = copy[1]
    yield {"copy": got[1] == items[1][1] and _alike(got[0], items[1][0])}


def _beyond(dataset, index):
    """What comes of it, in words."""
    try:
        dataset[index]
        return "an item"
    except Exception as error:
        return "IndexError" if isinstance(error, IndexError) else type(error).__name__


def _damaged(JpegFiles, folder, items):  # noqa: N803
    large = folder / "source.jpg"
    Image.effect_noise((160, 120), 60).convert("RGB").save(large, quality=90)
    content = large.read_bytes()
    contents = content[: len(content) // 2], b"this is no picture at all", b"", None
    for (what, name), found in zip(DAMAGED.items(), contents):
        if found is not None:
            (folder / name).write_bytes(found)
        dataset = JpegFiles([items[0], (folder / name, 3), items[1]], Mean())
        yield {what: _outcome(dataset, name)}
        yield {("after", what): dataset[2][1] == items[1][1]}


def _outcome(dataset, name):
    """What comes of reading a damaged file, in words: (the outcome, more about it)."""
    try:
        dataset[1]
    except (StopIteration, IndexError) as error:
        return "ends a loop", type(error).__name__
    except Exception as error:
        named = name in "\n".join([str(error), *getattr(error, "__notes__", ())])
        return "named" if named else "not named", str(error)
    return "the rest is grey" if ImageFile.LOAD_TRUNCATED_IMAGES and name == "cutshort.jpg" else "an item", ""


def _form(seen, _):
    """What is wrong about the form of an item, or about what the transform was given."""
    item, given = seen
    if isinstance(given, str):
        return "path-transformed"
    if item is None:
        return "nothing-returned"
    if not isinstance(item, tuple | list) or len(item) != 2:
        return "not-a-pair"
    return "" if given and isinstance(item[0], torch.Tensor) else "not-transformed"


def _is_int(seen, _):
    return isinstance(seen[0][1], int) and not isinstance(seen[0][1], bool)


def _mistake(k, o):
    """What is wrong about item k; of another mode no colours can be compared, and the label only if it is a number."""
    (image, got), (mode, size) = o["item", k]
    label, due_size, due = o["due", k]
    image = image if mode == "RGB" else due
    if (_is_int(o["item", k], None) and got != label) or image.shape != (12,) or (image - due)[-3:].abs().max() > 100:
        return "wrong-item"
    return "picture-altered" if (o["anew", k] and size != due_size) or (image - due).abs().max() > 4 else ""


def _item(k):
    where = {"where": f"index {k % 5}, {FILES[k % 5]}"}

    def given(seen, _):
        return where | {"kind": seen[1], "got": seen[0]}

    def here(*of):
        return silent(*of) | where

    return [
        Look("", ("item", k), "(transform(picture), label)", _form, holds=lambda *of: not _form(*of), fields=given),
        Look("", lambda o: o["item", k][1][0], "RGB", "not-rgb", fields=_told("mode")),
        Look("", ("item", k), "an int", "label-not-int", holds=_is_int,
             fields=lambda seen, _: where | {"kind": f"a {type(seen[0][1]).__name__}", "got": seen[0][1]}),
        Look("", functools.partial(_mistake, k), "", lambda seen, _: seen, fields=here),
    ]  # fmt: skip


def _is_named(seen, due):
    return seen[0] == due


def _damage(claim, what):
    def fields(seen, _):
        about = {"what": what[0].upper() + what[1:], "kind": seen[1], "where": what}
        return about | {"expected": f"an error that contains {DAMAGED[what]}", "got": seen[1] or seen[0]}

    return [
        Look(claim, what, "named", lambda seen, _: DAMAGES[seen[0]], holds=_is_named, fields=fields),
        Look("", ("after", what), True, "wrong-item", fields={"where": "the item after a damaged one"}),
    ]


def _told(name):
    return lambda seen, _: {name: seen}


def _size(seen, due):
    return {"size": f"{max(seen[0], 640 * 480 * 3) / 1e6:.1f} MB"} | silent(seen, due)


LOOKS = [
    Look("no file is opened when the data set is made", "opened", 0, "opened-in-init", fields=_told("n")),
    Look("the length; items (transform(picture in RGB), int)", "length", len(FILES), "wrong-length"),
    *(look for k in range(10) for look in _item(k)),
    Look("", "calls", 10, "item-kept", holds=lambda seen, due: seen >= due),
    Look("", "again", True, "wrong-item", fields={"where": "the same index after others"}),
    Look("no file stays open, no picture stays in memory", "left", 0, "file-left-open", fields=_told("n")),
    Look("", "dumped", "", "not-picklable", fields=_told("error")),
    Look("", "large", ("RGB", (640, 480)), "picture-altered"),
    Look("", "dumped again", "", "not-picklable", fields=_told("error")),
    Look("", "kept", (100_000, 0), "pictures-kept",
         holds=lambda seen, due: seen[0] <= due[0] and seen[1] <= due[1], fields=_size),
    Look("the data set can be pickled, as spawned workers require", "pickled", "", "not-picklable",
         fields=_told("error")),
    Look("", "copy", True, "wrong-item", fields={"where": "index 1 of the pickled copy"}),
    *(Look("indices beyond the end raise IndexError" * (index == 5), ("beyond", index), "IndexError",
           lambda seen, _: "index-wraps" if seen == "an item" else "index-error-hidden",
           fields=_told("kind")) for index in (5, 12)),
    Look("", "last", (21, "IndexError"), "negative-index", holds=one_of),
    *(look for k, what in enumerate(DAMAGED)
      for look in _damage("a damaged or missing file raises an error that names it" * (k == 0), what)),
]  # fmt: skip


def balise_1(JpegFiles):  # noqa: N803
    allowed = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
            yield from judged(LOOKS, observe, JpegFiles, Path(folder))
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed
        Mean.seen.clear()
