"""Answers to balise 1 of 01_gpu_acceleration."""

import random

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as TF

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FINISH = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def pillow(*steps, mode="RGB"):
    transform = v2.Compose(steps)
    return lambda path: transform(Image.open(path).convert(mode))


def usual(size, train, train_cut=None, val_cut=None, finish=FINISH, mode="RGB"):
    if train:
        cut = train_cut or [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    else:
        cut = val_cut or [v2.Resize(size), v2.CenterCrop(size)]
    return pillow(*cut, *finish, mode=mode)


@bank.right(1)
def make_transform(size, train):
    """Tensors from the start; validation resized a little larger, as in torchvision's references."""
    if train:
        cut = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomResizedCrop((size, size), antialias=True)])
    else:
        cut = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])

    def load(path):
        pixels = cut(decode_image(str(path), mode=ImageReadMode.RGB)).float() / 255
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]

    return load


@bank.right(1)
class make_transform:  # noqa: N801  (an object that can be called is a function too)
    """A picklable object, the old transforms, the flip drawn with Python's own generator."""

    def __init__(self, size, train):
        self.size, self.train = size, train

    def __call__(self, path):
        image = Image.open(path).convert("RGB")
        if self.train:
            image = v2.RandomResizedCrop(self.size, scale=(0.25, 1.0))(image)
            image = ImageOps.mirror(image) if random.random() < 0.5 else image
        else:
            image = ImageOps.fit(image, (self.size, self.size))
        return TF.normalize(TF.to_dtype(TF.pil_to_tensor(image), torch.float32, scale=True), MEAN, STD)


@bank.wrong(1, "not-decoded")
def make_transform(size, train):
    return v2.Compose([v2.RandomResizedCrop(size), *FINISH])


@bank.wrong(1, "not-decoded")
def make_transform(size, train):
    return lambda path: path


@bank.wrong(1, "not-a-tensor")
def make_transform(size, train):
    return usual(size, train, finish=[])


@bank.wrong(1, "grey-image")
def make_transform(size, train):
    transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    def load(path):
        pixels = transform(Image.open(path))
        return (pixels - torch.tensor(MEAN[: len(pixels)])[:, None, None]) / torch.tensor(STD[: len(pixels)])[
            :, None, None
        ]

    return load


@bank.wrong(1, "channels-last")
def make_transform(size, train):
    load = usual(size, train)
    return lambda path: load(path).permute(1, 2, 0)


@bank.wrong(1, "wrong-size")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(size)])


@bank.wrong(1, "wrong-size")
def make_transform(size, train):
    return usual(24, train)


@bank.wrong(1, "not-float")
def make_transform(size, train):
    return usual(size, train, finish=[v2.ToImage()])


@bank.wrong(1, "not-scaled")
def make_transform(size, train):
    return usual(size, train, finish=[v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize(MEAN, STD)])


@bank.wrong(1, "not-normalised")
def make_transform(size, train):
    return usual(size, train, finish=FINISH[:2])


@bank.wrong(1, "mean-only")
def make_transform(size, train):
    return usual(size, train, finish=[*FINISH[:2], v2.Normalize(MEAN, (1.0, 1.0, 1.0))])


@bank.wrong(1, "channels-swapped")
def make_transform(size, train):
    load = usual(size, train)
    return lambda path: load(path).flip(0)


@bank.wrong(1, "wrong-values")
def make_transform(size, train):
    return usual(size, train, finish=[*FINISH[:2], v2.Normalize((0.5,) * 3, (0.5,) * 3)])


@bank.wrong(1, "random-validation")
def make_transform(size, train):
    return usual(size, True)


@bank.wrong(1, "flipped-validation")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.RandomHorizontalFlip(1.0), v2.Resize(size), v2.CenterCrop(size)])


@bank.wrong(1, "validation-squashed")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize((size, size))])


@bank.wrong(1, "validation-off-centre")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(size), v2.Lambda(lambda image: TF.crop(image, 0, 0, size, size))])


@bank.wrong(1, "validation-too-small")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.CenterCrop(size)])


@bank.wrong(1, "validation-too-small", variant=True)
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(256), v2.CenterCrop(size)])


@bank.wrong(1, "not-random")
def make_transform(size, train):
    return usual(size, False)


@bank.wrong(1, "never-flipped")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size)])


@bank.wrong(1, "always-flipped")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(1.0)])


@bank.wrong(1, "always-flipped", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(0.25)])


@bank.wrong(1, "upside-down")
def make_transform(size, train):
    flips = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), *flips])


@bank.wrong(1, "no-crop")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.Resize((size, size)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "fixed-scale")
def make_transform(size, train):
    cut = [v2.Resize(2 * size), v2.RandomCrop(size, pad_if_needed=True), v2.RandomHorizontalFlip()]
    return usual(size, train, train_cut=cut)


@bank.wrong(1, "fixed-scale")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, scale=(0.8, 1.0)), v2.RandomHorizontalFlip()])


def cut_at(size, train, share):
    """Windows of random area and shape, which leave `share` of the free room to their left and above them."""

    def cut(image):
        _, _, height, width = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        left, top = int(share * (image.width - width)), int(share * (image.height - height))
        return TF.resized_crop(image, top, left, height, width, [size, size])

    return usual(size, train, train_cut=[v2.Lambda(cut), v2.RandomHorizontalFlip()])


@bank.wrong(1, "fixed-place")
def make_transform(size, train):
    return cut_at(size, train, 0.5)


@bank.wrong(1, "fixed-place")
def make_transform(size, train):
    return cut_at(size, train, 0.0)


@bank.wrong(1, "fixed-shape")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, ratio=(1.0, 1.0)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "too-distorted")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, ratio=(0.1, 10.0)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "grey-image")
def make_transform(size, train):
    cut = v2.RandomResizedCrop(size) if train else v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
    flip = v2.RandomHorizontalFlip() if train else v2.Identity()

    def load(path):
        pixels = decode_image(str(path))
        pixels = torch.cat([pixels, pixels.new_zeros(3 - len(pixels), *pixels.shape[1:])])
        return TF.normalize(flip(cut(pixels)).float() / 255, MEAN, STD)

    return load


@bank.wrong(1, "nothing-returned")
def make_transform(size, train):
    def load(path):
        usual(size, train)(path)

    return load


@bank.wrong(1, "not-callable")
def make_transform(size, train):
    return None


@bank.wrong(1, "signature")
def make_transform(size):
    return usual(size, True)


@bank.wrong(1, "fixed-scale")
def make_transform(size, train):
    """Nothing is ever seen from near."""
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, (0.55, 1.0)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "fixed-scale")
def make_transform(size, train):
    """Nothing is ever seen from far."""
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, scale=(0.08, 0.4)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "flipped-once")
def make_transform(size, train):
    """The coin is thrown when the transform is made."""
    mirrored = [v2.RandomHorizontalFlip(1.0)] if random.random() < 0.5 else []
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), *mirrored])


def by_width(size, image):
    return image.resize((size, round(image.height * size / image.width)))


@bank.wrong(1, "wrong-side")
def make_transform(size, train):
    """Always the width, whichever side is shorter."""
    return usual(size, train, val_cut=[v2.Lambda(lambda image: by_width(size, image)), v2.CenterCrop(size)])


@bank.wrong(1, "wrong-side")
def make_transform(size, train):
    """The longer side."""
    return usual(size, train, val_cut=[v2.Resize(None, max_size=size), v2.CenterCrop(size)])


@bank.wrong(1, "wrong-side")
def make_transform(size, train):
    """Always the height: wide photographs come out well."""
    cut = [v2.Lambda(lambda image: image.resize((round(image.width * size / image.height), size))), v2.CenterCrop(size)]
    return usual(size, train, val_cut=cut)


def transposed(path):
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 1, 0)


@bank.wrong(1, "axes-swapped")
def make_transform(size, train):
    cut = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()] if train else [v2.Resize(size), v2.CenterCrop(size)]
    transform = v2.Compose([*cut, *FINISH[1:]])
    return lambda path: transform(transposed(path))


@bank.wrong(1, "axes-swapped")
def make_transform(size, train):
    """In training alone."""
    if not train:
        return usual(size, train)
    transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *FINISH[1:]])
    return lambda path: transform(transposed(path))


@bank.wrong(1, "always-upright")
def make_transform(size, train):
    return usual(size, train, [v2.RandomResizedCrop(size, ratio=(3 / 4, 1.0)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "fixed-scale")
def make_transform(size, train):
    return usual(size, train, [v2.RandomResizedCrop(size, scale=(0.08, 0.65)), v2.RandomHorizontalFlip()])


@bank.wrong(1, "validation-off-centre")
def make_transform(size, train):
    """The offsets of the crop have changed places."""

    def middle(image):
        return TF.crop(image, (image.width - size) // 2, (image.height - size) // 2, size, size)

    return usual(size, train, val_cut=[v2.Resize(size), middle])


@bank.wrong(1, "one-image")
def make_transform(size, train):
    transform = usual(size, train)
    return lambda path: transform(path).unsqueeze(0)

with_setup = Bank("01_gpu_acceleration", whole=True)
with_setup.text(
    1,
    "wrong-side",
    """
def make_transform(size, train):
    def load(path):
        image = Image.open(path).convert("RGB")
        if train:
            image = v2.RandomHorizontalFlip()(v2.RandomResizedCrop(size)(image))
        else:
            if min(image.size) > size:
                image = v2.Resize(size)(image)
            image = v2.CenterCrop(size)(image)
        return v2.Normalize(MEAN, STD)(v2.ToDtype(torch.float32, scale=True)(v2.ToImage()(image)))
    return load
""",
)
bank.add(with_setup)
