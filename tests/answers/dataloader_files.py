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

bank = Bank("05_dataloader")


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


@bank.right(1)
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


@bank.right(1)
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


@bank.right(1)
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


@bank.right(1)
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


@bank.wrong(1, "opened-in-init")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__([(Image.open(path), label) for path, label in items], transform)

    def picture(self, path):
        return path.convert("RGB")


@bank.wrong(1, "opened-in-init")
class JpegFiles(Base):
    def __init__(self, items, transform):
        for path, _ in items:
            Image.open(path).verify()
        super().__init__(items, transform)


@bank.wrong(1, "not-a-pair")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0]


@bank.wrong(1, "not-a-pair")
class JpegFiles(Base):
    def __getitem__(self, index):
        return (*super().__getitem__(index), str(self.items[index][0]))


@bank.wrong(1, "nothing-returned")
class JpegFiles(Base):
    def __getitem__(self, index):
        super().__getitem__(index)


@bank.wrong(1, "not-transformed")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        return self.picture(path), label


@bank.wrong(1, "path-transformed")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        return self.transform(path), label


@bank.wrong(1, "path-transformed")
class JpegFiles(Base):
    def picture(self, path):
        return TF.pil_to_tensor(super().picture(path))


@bank.wrong(1, "not-rgb")
class JpegFiles(Base):
    def picture(self, path):
        try:
            with Image.open(path) as image:
                image.load()
                return image.copy()
        except OSError as error:
            raise RuntimeError(f"{path}") from error


@bank.wrong(1, "label-not-int")
class JpegFiles(Base):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, torch.tensor(label)


@bank.wrong(1, "label-not-int")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], Path(self.items[index][0]).parent.name


@bank.wrong(1, "wrong-item")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], index


@bank.wrong(1, "wrong-item")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(sorted(items, reverse=True), transform)


@bank.wrong(1, "wrong-length")
class JpegFiles(Base):
    def __len__(self):
        return len(self.items) - 1


@bank.wrong(1, "not-picklable")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, lambda picture: transform(picture))


@bank.wrong(1, "not-picklable")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.lock = threading.Lock()


@bank.wrong(1, "file-left-open")
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


@bank.wrong(1, "pictures-kept")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.cache = {}

    def picture(self, path):
        if path not in self.cache:
            self.cache[path] = super().picture(path)
        return self.cache[path]


@bank.wrong(1, "pictures-kept")
class JpegFiles(Base):
    seen = []

    def picture(self, path):
        self.seen.append(super().picture(path))
        return self.seen[-1]


@bank.wrong(1, "file-not-named")
class JpegFiles(Base):
    def picture(self, path):
        with Image.open(path) as image:
            return image.convert("RGB")


@bank.wrong(1, "file-not-named")
class JpegFiles(Base):
    def __getitem__(self, index):
        path, label = self.items[index]
        try:
            with Image.open(path) as image:
                image = image.convert("RGB")
        except OSError as error:
            raise RuntimeError(f"image {index} is damaged") from error
        return self.transform(image), label


@bank.wrong(1, "damage-hidden")
class JpegFiles(Base):
    def picture(self, path):
        try:
            return super().picture(path)
        except RuntimeError:
            return Image.new("RGB", (224, 224))


@bank.wrong(1, "damage-hidden")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except RuntimeError:
            return self[(index + 1) % len(self)]


@bank.wrong(1, "loop-ends")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except RuntimeError as error:
            raise StopIteration(self.items[index][0].name) from error


@bank.wrong(1, "loop-ends", variant=True)
class JpegFiles(Base):
    def picture(self, path):
        try:
            return super().picture(path)
        except RuntimeError as error:
            raise IndexError(f"{path} is damaged") from error


@bank.wrong(1, "truncation-allowed")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        ImageFile.LOAD_TRUNCATED_IMAGES = True


@bank.wrong(1, "index-wraps")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(int(index) % len(self))


@bank.wrong(1, "index-error-hidden")
class JpegFiles(Base):
    def __getitem__(self, index):
        try:
            path, label = self.items[index]
            return self.transform(self.picture(path)), label
        except Exception as error:
            raise RuntimeError(f"cannot read item {index}: {error}") from error


@bank.wrong(1, "negative-index")
class JpegFiles(Base):
    def __getitem__(self, index):
        return super().__getitem__(abs(index))


@bank.wrong(1, "signature")
class JpegFiles(Base):
    def __init__(self, items):
        super().__init__(items, TF.pil_to_tensor)


@bank.wrong(1, "item-kept")
class JpegFiles(Base):
    def __init__(self, items, transform):
        super().__init__(items, transform)
        self.made = {}

    def __getitem__(self, index):
        index = int(index)
        if index not in self.made:
            self.made[index] = super().__getitem__(index)
        return self.made[index]


bank.slip(1, "picture-altered", ('image.convert("RGB")', 'image.convert("RGB").resize((224, 224))'))
bank.slip(
    1, "picture-altered", ('image.convert("RGB")', 'image.convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT)')
)
bank.slip(1, "picture-altered", ('image.convert("RGB")', 'image.convert("RGB").crop((1, 1, 11, 11))'))


@bank.wrong(1, "picture-altered")
class JpegFiles(Base):
    """Large photographs come smaller: the decoder is asked for less."""

    def picture(self, path):
        picture = super().picture(path)
        picture.thumbnail((256, 256))
        return picture


bank.slip(
    1,
    None,
    (
        "    def __len__",
        "    def __reduce__(self):\n        return JpegFiles, (self.items, self.transform)\n\n    def __len__",
    ),
)

bank.slip(
    1,
    "pictures-kept",
    (
        "            with Image.open(path) as image:\n",
        "            kept = self.__dict__.setdefault('kept', {})\n            if path not in kept:\n"
        "                kept[path] = Path(path).read_bytes()\n            with Image.open(io.BytesIO(kept[path])) as image:\n",
    ),
)
