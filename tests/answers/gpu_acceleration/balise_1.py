"""Answers to balise 1 of 01_gpu_acceleration."""

import random

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as TF

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 1)

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


@bank.right()
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


@bank.right()
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


bank.hint("not-decoded", "The transform receives the path of a JPEG file. Open and decode it first, for example "
          'with Image.open(path).convert("RGB").')  # fmt: skip


@bank.wrong("not-decoded")
def make_transform(size, train):
    return v2.Compose([v2.RandomResizedCrop(size), *FINISH])


@bank.wrong("not-decoded", variant=True)
def make_transform(size, train):
    return lambda path: path


bank.hint("not-a-tensor", "Return a tensor, not {kind}. ToImage() or pil_to_tensor turns the picture into a tensor.")


@bank.wrong("not-a-tensor", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=[])


bank.hint("grey-image", 'A grey photograph has one channel, but the network needs three. Use convert("RGB"), or '
          "decode with mode RGB.")  # fmt: skip


@bank.wrong("grey-image")
def make_transform(size, train):
    transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    def load(path):
        pixels = transform(Image.open(path))
        return (pixels - torch.tensor(MEAN[: len(pixels)])[:, None, None]) / torch.tensor(STD[: len(pixels)])[
            :, None, None
        ]

    return load


bank.hint("channels-last", "In your image the channels come last. PyTorch expects (channels, height, width).")


@bank.wrong("channels-last", variant=True)
def make_transform(size, train):
    load = usual(size, train)
    return lambda path: load(path).permute(1, 2, 0)


bank.hint("wrong-size", "The image does not have the requested size of {size} × {size} pixels.")


@bank.wrong("wrong-size")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(size)])


@bank.wrong("wrong-size", variant=True)
def make_transform(size, train):
    return usual(24, train)


bank.hint("not-float", "The image must be float32: ToDtype(torch.float32, scale=True).")


@bank.wrong("not-float", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=[v2.ToImage()])


bank.hint("not-scaled", "Your pixels still go up to 255, but MEAN and STD are for values in [0, 1]. Divide by 255 "
          "(scale=True) first.")  # fmt: skip


@bank.wrong("not-scaled", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=[v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize(MEAN, STD)])


bank.hint("not-normalised", "The pixels are in [0, 1] but not normalised: subtract MEAN and divide by STD, channel "
          "by channel.")  # fmt: skip


@bank.wrong("not-normalised", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=FINISH[:2])


bank.hint("mean-only", "You subtract MEAN, but you do not divide the result by STD.")


@bank.wrong("mean-only", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=[*FINISH[:2], v2.Normalize(MEAN, (1.0, 1.0, 1.0))])


bank.hint("channels-swapped", "Red and blue are swapped.")


@bank.wrong("channels-swapped", variant=True)
def make_transform(size, train):
    load = usual(size, train)
    return lambda path: load(path).flip(0)


bank.hint("wrong-values", "An image of one colour must come out as (colour / 255 − MEAN) / STD in each channel, "
          "wherever you crop it.")  # fmt: skip


@bank.wrong("wrong-values", variant=True)
def make_transform(size, train):
    return usual(size, train, finish=[*FINISH[:2], v2.Normalize((0.5,) * 3, (0.5,) * 3)])


bank.hint("random-validation", "Two calls for validation gave two different images. Nothing in this transform may "
          "be random, or two runs cannot be compared.")  # fmt: skip


@bank.wrong("random-validation", variant=True)
def make_transform(size, train):
    return usual(size, True)


bank.hint("flipped-validation", "The validation image is mirrored.")


@bank.wrong("flipped-validation", variant=True)
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.RandomHorizontalFlip(1.0), v2.Resize(size), v2.CenterCrop(size)])


bank.hint("validation-squashed", "The validation image is squashed: a circle became an ellipse. Resize the shorter "
          "side, then crop the centre.")  # fmt: skip


@bank.wrong("validation-squashed", variant=True)
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize((size, size))])


bank.hint("validation-off-centre", "The validation image is not cropped from the centre.")


@bank.wrong("validation-off-centre")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(size), v2.Lambda(lambda image: TF.crop(image, 0, 0, size, size))])


bank.hint("validation-too-small", "The validation image shows only {part:.0%} of the shorter side. First resize "
          "that side to `size`, or to slightly more in proportion (256 suits 224, but no other size), "
          "then crop.")  # fmt: skip


@bank.wrong("validation-too-small")
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.CenterCrop(size)])


@bank.wrong("validation-too-small", variant=True)
def make_transform(size, train):
    return usual(size, train, val_cut=[v2.Resize(256), v2.CenterCrop(size)])


bank.hint("not-random", "Training gave the same image in every call. RandomResizedCrop and RandomHorizontalFlip "
          "make a new random draw for each image.")  # fmt: skip


@bank.wrong("not-random", variant=True)
def make_transform(size, train):
    return usual(size, False)


bank.hint("never-flipped", "No image was mirrored in {draws} calls: RandomHorizontalFlip is missing.")


@bank.wrong("never-flipped", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size)])


bank.hint("always-flipped", "{flips} of {draws} images were mirrored. It should be about half of them.")


@bank.wrong("always-flipped")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(1.0)])


@bank.wrong("always-flipped", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(0.25)])


bank.hint("upside-down", "Some training images are upside down. A horizontal flip only mirrors left and right.")


@bank.wrong("upside-down", variant=True)
def make_transform(size, train):
    flips = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), *flips])


bank.hint("no-crop", "Every training image shows the whole photograph. RandomResizedCrop crops a part of it.")


@bank.wrong("no-crop", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.Resize((size, size)), v2.RandomHorizontalFlip()])


bank.hint("fixed-scale", "The crops cover {low:.0%} to {high:.0%} of the photograph. RandomResizedCrop draws an "
          "area between 8 % and 100 % of it, then resizes the crop, so that objects appear near and far.")  # fmt: skip


@bank.wrong("fixed-scale")
def make_transform(size, train):
    cut = [v2.Resize(2 * size), v2.RandomCrop(size, pad_if_needed=True), v2.RandomHorizontalFlip()]
    return usual(size, train, train_cut=cut)


@bank.wrong("fixed-scale")
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, scale=(0.8, 1.0)), v2.RandomHorizontalFlip()])


def cut_at(size, train, share):
    """Windows of random area and shape, which leave `share` of the free room to their left and above them."""

    def cut(image):
        _, _, height, width = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        left, top = int(share * (image.width - width)), int(share * (image.height - height))
        return TF.resized_crop(image, top, left, height, width, [size, size])

    return usual(size, train, train_cut=[v2.Lambda(cut), v2.RandomHorizontalFlip()])


bank.hint("fixed-place", "Every crop is at the same place, {axis}. RandomResizedCrop draws the position too.")


@bank.wrong("fixed-place")
def make_transform(size, train):
    return cut_at(size, train, 0.5)


@bank.wrong("fixed-place", variant=True)
def make_transform(size, train):
    return cut_at(size, train, 0.0)


bank.hint("fixed-shape", "Every crop has the same shape. RandomResizedCrop draws an aspect ratio between 3:4 and 4:3.")


@bank.wrong("fixed-shape", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, ratio=(1.0, 1.0)), v2.RandomHorizontalFlip()])


bank.hint("too-distorted", "Crops of {low:.1f}:1 to {high:.1f}:1 become squares, and objects are squashed beyond "
          "recognition. The aspect ratio should be between 3:4 and 4:3.")  # fmt: skip


@bank.wrong("too-distorted", variant=True)
def make_transform(size, train):
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, ratio=(0.1, 10.0)), v2.RandomHorizontalFlip()])


@bank.wrong("grey-image", variant=True)
def make_transform(size, train):
    cut = v2.RandomResizedCrop(size) if train else v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
    flip = v2.RandomHorizontalFlip() if train else v2.Identity()

    def load(path):
        pixels = decode_image(str(path))
        pixels = torch.cat([pixels, pixels.new_zeros(3 - len(pixels), *pixels.shape[1:])])
        return TF.normalize(flip(cut(pixels)).float() / 255, MEAN, STD)

    return load


@bank.wrong("nothing-returned")
def make_transform(size, train):
    def load(path):
        usual(size, train)(path)

    return load


@bank.wrong("not-callable")
def make_transform(size, train):
    return None


@bank.wrong("signature")
def make_transform(size):
    return usual(size, True)


@bank.wrong("fixed-scale")
def make_transform(size, train):
    """Nothing is ever seen from near."""
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, (0.55, 1.0)), v2.RandomHorizontalFlip()])


@bank.wrong("fixed-scale")
def make_transform(size, train):
    """Nothing is ever seen from far."""
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size, scale=(0.08, 0.4)), v2.RandomHorizontalFlip()])


bank.hint("flipped-once", "One transform mirrors all or none of {draws} images, and another transform differs: you "
          "draw the flip when the transform is created. Draw it again for each image.")  # fmt: skip


@bank.wrong("flipped-once", variant=True)
def make_transform(size, train):
    """The coin is thrown when the transform is made."""
    mirrored = [v2.RandomHorizontalFlip(1.0)] if random.random() < 0.5 else []
    return usual(size, train, train_cut=[v2.RandomResizedCrop(size), *mirrored])


def by_width(size, image):
    return image.resize((size, round(image.height * size / image.width)))


bank.hint("wrong-side", "The image has a border that is not in the photograph, because the crop is larger than the "
          "resized image. Resize the shorter side to at least the size of the crop, not the longer side, and not "
          "always to the same size.")  # fmt: skip


@bank.wrong("wrong-side")
def make_transform(size, train):
    """Always the width, whichever side is shorter."""
    return usual(size, train, val_cut=[v2.Lambda(lambda image: by_width(size, image)), v2.CenterCrop(size)])


@bank.wrong("wrong-side")
def make_transform(size, train):
    """The longer side."""
    return usual(size, train, val_cut=[v2.Resize(None, max_size=size), v2.CenterCrop(size)])


@bank.wrong("wrong-side")
def make_transform(size, train):
    """Always the height: wide photographs come out well."""
    cut = [v2.Lambda(lambda image: image.resize((round(image.width * size / image.height), size))), v2.CenterCrop(size)]
    return usual(size, train, val_cut=cut)


def transposed(path):
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 1, 0)


bank.hint("axes-swapped", "Height and width are swapped: left to right became top to bottom. PyTorch expects "
          "(channels, height, width), but an array is (height, width, channels). Use permute(2, 0, 1).")  # fmt: skip


@bank.wrong("axes-swapped")
def make_transform(size, train):
    cut = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()] if train else [v2.Resize(size), v2.CenterCrop(size)]
    transform = v2.Compose([*cut, *FINISH[1:]])
    return lambda path: transform(transposed(path))


@bank.wrong("axes-swapped", variant=True)
def make_transform(size, train):
    """In training alone."""
    if not train:
        return usual(size, train)
    transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *FINISH[1:]])
    return lambda path: transform(transposed(path))


bank.hint("always-upright", "All crops are {kind}. RandomResizedCrop draws an aspect ratio between 3:4 and 4:3.")


@bank.wrong("always-upright", variant=True)
def make_transform(size, train):
    return usual(size, train, [v2.RandomResizedCrop(size, ratio=(3 / 4, 1.0)), v2.RandomHorizontalFlip()])


@bank.wrong("fixed-scale", variant=True)
def make_transform(size, train):
    return usual(size, train, [v2.RandomResizedCrop(size, scale=(0.08, 0.65)), v2.RandomHorizontalFlip()])


@bank.wrong("validation-off-centre", variant=True)
def make_transform(size, train):
    """The offsets of the crop have changed places."""

    def middle(image):
        return TF.crop(image, (image.width - size) // 2, (image.height - size) // 2, size, size)

    return usual(size, train, val_cut=[v2.Resize(size), middle])


bank.hint("one-image", "The transform must return one image with three dimensions, (3, {size}, {size}). The loader "
          "makes the batch.")  # fmt: skip


@bank.wrong("one-image", variant=True)
def make_transform(size, train):
    transform = usual(size, train)
    return lambda path: transform(path).unsqueeze(0)


with_setup = Bank("01_gpu_acceleration", 1, whole=True)

with_setup.text(
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
    variant=True,
)
bank.add(with_setup)
