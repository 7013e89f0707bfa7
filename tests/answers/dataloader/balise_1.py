"""Answers to balise 1 of 05_dataloader."""

import io
import threading
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as TF

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 1)


class Base(Dataset):
    """A right one; wrong ones override a part of it."""

    def __init__(self, items, transform):
        self.items, self.transform = items, transform

    def __len__(self):
        return len(self.items)

    def picture(self, path):
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except Exception as error:
            raise RuntimeError(f"{path}: {error}") from error

    def __getitem__(self, index):
        path, label = self.items[index]
        return self.transform(self.picture(path)), label


@bank.right()
class JpegFiles(Dataset):
    """Bytes first, paths and labels apart, an own error for each damage."""

    def __init__(self, items, transform):
        self.paths = [str(path) for path, _ in items]
        self.labels = torch.tensor([label for _, label in items])
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        path, label = self.paths[i], self.labels[i].item()
        content = Path(path).read_bytes()
        try:
            picture = Image.open(io.BytesIO(content))
            picture.load()
        except Exception as error:
            raise ValueError(f"{path} is damaged") from error
        return self.transform(picture.convert("RGB")), label


@bank.right()
class JpegFiles(Dataset):
    """A note on the error, no negative indices, no closing by hand: PIL closes a file once it is decoded."""

    def __init__(self, items, transform):
        self.items, self.transform = tuple(items), transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        path, label = self.items[i]
        try:
            picture = Image.open(path).convert("RGB")
        except OSError as error:
            raise OSError(f"{path} cannot be read: {error}") from None
        return self.transform(picture), label


@bank.right()
class JpegFiles(Base):
    """Through numpy, with the file opened by hand; a list as an item."""

    def picture(self, path):
        try:
            with open(path, "rb") as file:
                return Image.fromarray(np.asarray(Image.open(file).convert("RGB")))
        except Exception as error:
            error.args = (f"{path}: {error}",)
            raise

    def __getitem__(self, i):
        return list(super().__getitem__(i))


@bank.right()
class JpegFiles(Base):
    """With a lock, left out of the pickle; a transform that is optional."""

    def __init__(self, items, transform=None):
        super().__init__(items, transform or TF.pil_to_tensor)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state):
        self.__dict__ = state
        self.lock = threading.Lock()

    def picture(self, path):
        with self.lock:
            return super().picture(path)


PLAIN = """
from PIL import Image, ImageFile
from torch.utils.data import Dataset


class JpegFiles(Dataset):
    def __init__(self, items, transform):
        self.items, self.transform = list(items), transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        try:
            picture = Image.open(path).convert("RGB")
        except Exception as error:
            raise RuntimeError(f"cannot read {path}") from error
        return self.transform(picture), label
"""
bank.text(None, PLAIN)

bank.hint(
    "opened-in-init",
    "{n} files were opened when the data set was made. With a million files, that takes hours and fills the memory. "
    "Keep the paths, and open each file in __getitem__.",
)
bank.variant(
    "opened-in-init",
    PLAIN,
    ("list(items), transform", "[(Image.open(path).filename, label) for path, label in items], transform"),
)


@bank.wrong("opened-in-init")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__([(Image.open(path), label) for path, label in items], transform)

    def picture(self, path):
        return path.convert("RGB")


@bank.wrong("opened-in-init")
class JpegFiles(Base):
    def __init__(self, items, transform):
        for path, _ in items:
            Image.open(path).verify()
        super().__init__(items, transform)


bank.hint("not-a-pair", "An item is a pair: (transform(picture), label).")
bank.variant("not-a-pair", PLAIN, ("return self.transform(picture), label", "return self.transform(picture)"))


@bank.wrong("not-a-pair")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0]


@bank.wrong("not-a-pair")
class JpegFiles(Base):
    def __getitem__(self, index):
        return (*super().__getitem__(index), str(self.items[index][0]))


@bank.wrong("nothing-returned")
class JpegFiles(Base):
    def __getitem__(self, index):
        super().__getitem__(index)


bank.hint("not-transformed", "The first half of an item must be what transform(picture) returned.")
bank.variant("not-transformed", PLAIN, ("return self.transform(picture), label", "return picture, label"))


@bank.wrong("not-transformed")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        return self.picture(path), label


bank.hint(
    "path-transformed",
    'The transform was given {kind}. It expects a decoded picture: Image.open(path).convert("RGB").',
)
bank.variant("path-transformed", PLAIN, ("return self.transform(picture), label", "return self.transform(path), label"))


@bank.wrong("path-transformed")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        return self.transform(path), label


@bank.wrong("path-transformed")
class JpegFiles(Base):
    def picture(self, path):
        return TF.pil_to_tensor(super().picture(path))


bank.hint(
    "not-rgb",
    "The transform was given a picture of mode {mode}. Every large set contains grey, palette and CMYK files: use "
    'convert("RGB").',
    edge=True,
)
bank.variant("not-rgb", PLAIN, ('.convert("RGB")', ".copy()"))


@bank.wrong("not-rgb")
class JpegFiles(Base):
    def picture(self, path):
        try:
            with Image.open(path) as image:
                image.load()
                return image.copy()
        except OSError as error:
            raise RuntimeError(f"{path}") from error


bank.hint(
    "label-not-int",
    "The label must be the int that came with the path, not {kind}: the collate function makes a tensor from the "
    "whole batch.",
    edge=True,
)
bank.variant(
    "label-not-int", PLAIN, ("return self.transform(picture), label", "return self.transform(picture), float(label)")
)


@bank.wrong("label-not-int")
class JpegFiles(Base):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, torch.tensor(label)


@bank.wrong("label-not-int")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], Path(self.items[index][0]).parent.name


bank.hint("wrong-item", "The item is not the picture and the label of this index.")
bank.variant("wrong-item", PLAIN, ("self.items[index]", "self.items[index - 1]"))


@bank.wrong("wrong-item")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], index


@bank.wrong("wrong-item")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(sorted(items, reverse=True), transform)


bank.hint("wrong-length", "len(dataset) must be the number of items.")
bank.variant("wrong-length", PLAIN, ("len(self.items)", "len(self.items) + 1"))


@bank.wrong("wrong-length")
class JpegFiles(Base):
    def __len__(self):
        return len(self.items) - 1


bank.hint(
    "not-picklable",
    "Spawned workers get the data set through pickle, which fails: {error}. Keep no open file, lambda or inner "
    "function in the data set.",
    edge=True,
)
bank.variant("not-picklable", PLAIN, ("list(items), transform", "list(items), lambda picture: transform(picture)"))


@bank.wrong("not-picklable")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, lambda picture: transform(picture))


@bank.wrong("not-picklable")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.lock = threading.Lock()


bank.hint(
    "file-left-open",
    "{n} files are still open after their items were read. Use `with Image.open(path) as image:`.",
)
bank.variant(
    "file-left-open",
    PLAIN,
    ("picture = Image.open(path)", 'self.file = open(path, "rb")\n            picture = Image.open(self.file)'),
)


@bank.wrong("file-left-open")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.files = {}

    def picture(self, path):
        file = self.files.setdefault(path, open(path, "rb"))
        file.seek(0)
        try:
            return Image.open(file).convert("RGB")
        except OSError as error:
            raise RuntimeError(str(path)) from error


bank.hint(
    "pictures-kept",
    "After reading, the data set holds {size} of pictures, and each worker would hold its own copy. Read and decode "
    "the file again for each item.",
)
bank.variant(
    "pictures-kept",
    PLAIN,
    ("return self.transform(picture), label", "self.last = picture\n        return self.transform(picture), label"),
)


@bank.wrong("pictures-kept")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.cache = {}

    def picture(self, path):
        if path not in self.cache:
            self.cache[path] = super().picture(path)
        return self.cache[path]


@bank.wrong("pictures-kept")
class JpegFiles(Base):
    seen = []

    def picture(self, path):
        self.seen.append(super().picture(path))
        return self.seen[-1]


bank.hint(
    "file-not-named",
    "The error does not name the file: a training on a million files stops, and nobody knows at which one. Put the "
    "path into the message.",
)
bank.variant("file-not-named", PLAIN, ("cannot read {path}", "cannot read a file"))


@bank.wrong("file-not-named")
class JpegFiles(Base):
    def picture(self, path):
        with Image.open(path) as image:
            return image.convert("RGB")


@bank.wrong("file-not-named")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        try:
            with Image.open(path) as image:
                image = image.convert("RGB")
        except OSError as error:
            raise RuntimeError(f"image {index} is damaged") from error
        return self.transform(image), label


bank.hint(
    "damage-hidden",
    "{what} gave an item instead of an error. A damaged file must be reported, not replaced or skipped.",
)
bank.variant(
    "damage-hidden",
    PLAIN,
    ('raise RuntimeError(f"cannot read {path}") from error', 'picture = Image.new("RGB", (8, 8))'),
)


@bank.wrong("damage-hidden")
class JpegFiles(Base):
    def picture(self, path):
        try:
            return super().picture(path)
        except RuntimeError:
            return Image.new("RGB", (224, 224))


@bank.wrong("damage-hidden")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except RuntimeError:
            return self[(index + 1) % len(self)]


bank.hint(
    "loop-ends",
    "{what} raised {kind}: a loop over the data set takes that for its end, and stops silently. Raise another error "
    "that names the file.",
    edge=True,
)


@bank.wrong("loop-ends")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except RuntimeError as error:
            raise StopIteration(self.items[index][0].name) from error


@bank.wrong("loop-ends", variant=True)
class JpegFiles(Base):
    def picture(self, path):
        try:
            return super().picture(path)
        except RuntimeError as error:
            raise IndexError(f"{path} is damaged") from error


bank.hint(
    "truncation-allowed",
    "ImageFile.LOAD_TRUNCATED_IMAGES was switched on: the rest of the picture becomes grey, for every picture in the "
    "program, and nobody notices.",
    edge=True,
)
bank.variant(
    "truncation-allowed",
    PLAIN,
    ("        path, label", "        ImageFile.LOAD_TRUNCATED_IMAGES = True\n        path, label"),
)


@bank.wrong("truncation-allowed")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        ImageFile.LOAD_TRUNCATED_IMAGES = True


bank.hint(
    "index-wraps",
    "dataset[len(dataset)] gave an item. It must raise IndexError, or a plain loop over the data set never ends.",
    edge=True,
)
bank.variant("index-wraps", PLAIN, ("self.items[index]", "self.items[index % len(self)]"))


@bank.wrong("index-wraps")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(int(index) % len(self))


bank.hint(
    "index-error-hidden",
    "dataset[len(dataset)] must raise IndexError, as a list does; it raised {kind}. Is the index looked up inside the "
    "try?",
    edge=True,
)
bank.variant(
    "index-error-hidden",
    PLAIN,
    (
        "        path, label = self.items[index]\n        try:\n",
        "        try:\n            path, label = self.items[index]\n",
    ),
)


@bank.wrong("index-error-hidden")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            path, label = self.items[index]
            return self.transform(self.picture(path)), label
        except Exception as error:
            raise RuntimeError(f"cannot read item {index}: {error}") from error


bank.hint("negative-index", "dataset[-1] must be the last item, or raise IndexError.", edge=True)
bank.variant("negative-index", PLAIN, ("self.items[index]", "self.items[max(index, 0)]"))


@bank.wrong("negative-index")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(abs(index))


@bank.wrong("signature")
class JpegFiles(Base):
    def __init__(self, items):
        super().__init__(items, TF.pil_to_tensor)


bank.hint(
    "item-kept",
    "Item 0 was read twice, but transform was called only once: the item is kept. Memory then grows with the set, and "
    "the transform's random draws never change.",
)
bank.variant(
    "item-kept",
    PLAIN,
    (
        "return self.transform(picture), label",
        'made = self.__dict__.setdefault("made", {})\n        if int(index) not in made:\n            made[int(index)] = self.transform(picture)\n        return made[int(index)], label',
    ),
)


@bank.wrong("item-kept")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.made = {}

    def __getitem__(self, index):
        index = int(index)
        if index not in self.made:
            self.made[index] = super().__getitem__(index)
        return self.made[index]


bank.hint(
    "picture-altered",
    "The transform was given a picture that differs from the file's: resized, cropped or rotated. All of that belongs "
    "in the transform, which must see the picture as it was decoded.",
)
bank.slip("picture-altered", ('image.convert("RGB")', 'image.convert("RGB").resize((224, 224))'))
bank.slip(
    "picture-altered", ('image.convert("RGB")', 'image.convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT)')
)
bank.slip("picture-altered", ('image.convert("RGB")', 'image.convert("RGB").crop((1, 1, 11, 11))'))
bank.variant(
    "picture-altered", PLAIN, ('.convert("RGB")', '.convert("RGB").transpose(Image.Transpose.FLIP_TOP_BOTTOM)')
)


@bank.wrong("picture-altered")
class JpegFiles(Base):
    """Large photographs come smaller: the decoder is asked for less."""

    def picture(self, path):
        picture = super().picture(path)
        picture.thumbnail((256, 256))
        return picture


bank.slip(
    None,
    (
        "    def __len__",
        "    def __reduce__(self):\n        return JpegFiles, (self.items, self.transform)\n\n    def __len__",
    ),
)

bank.slip(
    "pictures-kept",
    (
        "            with Image.open(path) as image:\n",
        "            kept = self.__dict__.setdefault('kept', {})\n            if path not in kept:\n"
        "                kept[path] = Path(path).read_bytes()\n            with Image.open(io.BytesIO(kept[path])) as image:\n",
    ),
)
