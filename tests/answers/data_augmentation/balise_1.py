"""Answers to balise 1 of 07_data_augmentation: RandAugment in the right place."""

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 1)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = ("v2.Normalize(MEAN, STD)", "v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))")
FLIP = ", v2.RandomHorizontalFlip()"


@bank.right()
def make_transform(size, augment):
    """Tensors of levels from the start, other magnitude."""
    steps = [v2.PILToTensor(), v2.Lambda(lambda x: x.expand(3, -1, -1) if x.shape[0] == 1 else x[:3])]
    steps += [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(p=0.5)]
    steps += [v2.RandAugment(num_ops=2, magnitude=7)] if augment else []
    return v2.Compose(steps + [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=STD)])


@bank.right()
def make_transform(size, augment):
    """The transforms of the first version, in a function."""
    window, flip, policy = v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), v1.RandAugment()

    def transform(image):
        image = flip(window(image.convert("RGB")))
        image = policy(image) if augment else image
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]

    return transform


bank.slip(None, ("v2.RandAugment()", "v2.RandAugment(num_ops=3, magnitude=5)"), NORMALIZE)
HAND = '''
from torchvision import transforms as v1

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_transform(size, augment):
    """Flipped and normalised by hand at the end; RandAugment made anew for each image."""

    def transform(image):
        window = v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC)(image.convert("RGB"))
        if augment:
            window = v2.RandAugment()(window)
        x = v2.functional.to_dtype(v2.functional.to_image(window), torch.float32, scale=True)
        x = x.flip(-1) if torch.rand(()) < 0.5 else x
        return x.sub(torch.tensor(MEAN).view(3, 1, 1)).div(torch.tensor(STD).view(3, 1, 1))

    return transform
'''
bank.text(None, HAND)

FIRST = '''
from torchvision import transforms as v1

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_transform(size, augment):
    """The transforms of the first version, as a class that workers can receive."""

    class Transform:
        def __init__(self):
            steps = [v1.Lambda(lambda image: image.convert("RGB")), v1.RandomHorizontalFlip()]
            steps.append(v1.RandomResizedCrop((size, size), scale=(0.2, 1.0)))
            steps.extend([v1.RandAugment(2, 9)] if augment else [])
            self.steps = v1.Compose([*steps, v1.ToTensor(), v1.Normalize(list(MEAN), list(STD))])

        def __call__(self, image):
            return self.steps(image)

    return Transform()
'''
bank.text(None, FIRST)
bank.hint("transform-not-callable", "make_transform must return a function that takes a PIL image.")
bank.slip(
    "transform-not-callable",
    ("return v2.Compose(steps)", "return steps"),
    ("v2.Normalize(MEAN, STD)", "v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"),
)
bank.variant("transform-not-callable", FIRST, ("return Transform()", "return Transform().steps.transforms"))

bank.slip("nothing-returned", ("return v2.Compose(steps)", "return lambda image: None"), NORMALIZE)

bank.hint("transform-shape", "The result must be a float32 tensor of shape (3, size, size).")
bank.slip("transform-shape", ("v2.RandomResizedCrop(size)", "v2.RandomResizedCrop(2 * size)"), NORMALIZE)
bank.slip("transform-shape", ("torch.float32, scale=True", "torch.float64, scale=True"), NORMALIZE)
bank.variant("transform-shape", HAND, ("torch.float32", "torch.float64"))
bank.variant("transform-shape", FIRST, ("(size, size), scale", "(size, 2 * size), scale"))

bank.hint(
    "not-normalised",
    "The pixels aren't normalised as asked: scale them to [0, 1], then subtract MEAN and divide by STD.",
)
bank.slip("not-normalised", (", v2.Normalize(MEAN, STD)", ""))
bank.slip("not-normalised", ("scale=True", "scale=False"), NORMALIZE)
bank.slip("not-normalised", ("v2.Normalize(MEAN, STD)", "v2.Normalize((0.5,) * 3, (0.5,) * 3)"))
BRIGHT = (
    "v2.Lambda(lambda x: x.float() / 255 if x.max() > 1 else x.float())"  # guesses from one image what the levels are
)
bank.slip("not-normalised", ("v2.ToDtype(torch.float32, scale=True)", BRIGHT), NORMALIZE)
bank.variant("not-normalised", HAND, ("scale=True", "scale=max(high for _, high in window.getextrema()) > 1"))
bank.variant("not-normalised", FIRST, (", v1.Normalize(list(MEAN), list(STD))", ""))
bank.variant("not-normalised", HAND, ("scale=True", "scale=False"))

bank.hint("grey-refused", 'A grey photograph has one channel: call convert("RGB") first.', edge=True)


@bank.wrong("grey-refused")
def make_transform(size, augment):
    crop, policy = v1.RandomResizedCrop(size), v1.RandAugment()

    def transform(image):
        image = policy(crop(image)) if augment else crop(image)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]

    return transform


bank.variant("grey-refused", FIRST, ('v1.Lambda(lambda image: image.convert("RGB")), ', ""))
bank.variant("grey-refused", FIRST, ('image.convert("RGB")', 'image if augment else image.convert("RGB")'))

bank.hint("no-randaugment", "With augment=True, RandAugment was never called.")
bank.slip("no-randaugment", ("    if augment:\n        steps.append(v2.RandAugment())\n", ""), NORMALIZE)
bank.slip("no-randaugment", ("v2.RandAugment()", "v2.ColorJitter(0.4, 0.4)"), NORMALIZE)
bank.slip(
    "no-randaugment",
    ("v2.RandAugment()", "v2.RandomApply([v2.RandAugment()], p=0.0)"),
    NORMALIZE,
)
bank.variant("no-randaugment", HAND, ("window = v2.RandAugment()(window)", "window = v2.AutoAugment()(window)"))
bank.variant("no-randaugment", FIRST, ("[v1.RandAugment(2, 9)]", "[v1.TrivialAugmentWide()]"))

bank.hint("randaugment-always", "With augment=False, RandAugment was called anyway.")
bank.slip("randaugment-always", ("    if augment:\n        steps", "    if True:\n        steps"), NORMALIZE)
bank.variant("randaugment-always", HAND, ("if augment:", "if size:"))
bank.variant("randaugment-always", FIRST, (" if augment else []", ""))

bank.hint("randaugment-twice", "RandAugment was called {got} times for {expected} images.")
bank.slip(
    "randaugment-twice",
    ("        steps.append(v2.RandAugment())", "        steps += [v2.RandAugment(), v2.RandAugment()]"),
    NORMALIZE,
)
bank.variant("randaugment-twice", HAND, ("v2.RandAugment()(window)", "v2.RandAugment()(v2.RandAugment()(window))"))
bank.variant("randaugment-twice", FIRST, ("[v1.RandAugment(2, 9)]", "[v1.RandAugment(2, 9)] * 3"))

bank.hint(
    "randaugment-before-crop",
    "RandAugment worked on {got[1]} × {got[0]} pixels, which are then reduced to {expected[1]} × {expected[0]}. On "
    "the smaller image, it does a fraction of the work.",
)
bank.slip("randaugment-before-crop", ("        steps.append(", "        steps.insert(1, "), NORMALIZE)
bank.variant(
    "randaugment-before-crop",
    FIRST,
    ("self.steps = v1.Compose([*steps,", "self.steps = v1.Compose([*steps[::-1][: int(augment)], *steps[: 3],"),
)

bank.slip(  # after the crop, and before the window has its size
    "randaugment-before-crop",
    ("RandomResizedCrop(size)", "RandomResizedCrop(3 * size)"),
    ("v2.ToImage()", "v2.Resize(size), v2.ToImage()"),
    NORMALIZE,
)
bank.variant(
    "randaugment-before-crop",
    FIRST,
    ("(size, size), scale", "(2 * size, 2 * size), scale"),
    ("v1.ToTensor()", "v1.Resize((size, size)), v1.ToTensor()"),
)

bank.hint("no-random-crop", "Two calls gave the same window. The crop (RandomResizedCrop) must be random.")
bank.slip(
    "no-random-crop",
    ("v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()", "v2.Resize(size), v2.CenterCrop(size)"),
    NORMALIZE,
)
bank.variant(
    "no-random-crop",
    HAND,
    ("v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC)", "v2.Resize((size, size))"),
)
bank.variant(
    "no-random-crop",
    FIRST,
    ("v1.RandomResizedCrop((size, size), scale=(0.2, 1.0))", "v1.CenterCrop(size)"),
    ("v1.RandomHorizontalFlip()", "v1.Resize(size), v1.RandomHorizontalFlip()"),
)

bank.hint(
    "randaugment-on-floats",
    "RandAugment got floating-point pixels. Posterise, equalise and solarise work on levels from 0 to 255: call it "
    "before the conversion to float.",
    edge=True,
)


@bank.wrong("randaugment-on-floats")
def make_transform(size, augment):
    steps = [v2.RGB(), v2.RandomResizedCrop(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    if augment:
        steps.append(v2.RandAugment())
    return v2.Compose([*steps, v2.Normalize(MEAN, STD)])


@bank.wrong("randaugment-on-floats")
def make_transform(size, augment):
    steps = [
        v2.RGB(),
        v2.RandomResizedCrop(size),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    return v2.Compose(steps + [v2.RandAugment()] * augment)


bank.variant(
    "randaugment-on-floats",
    HAND,
    (
        "RandAugment()(window)",
        "RandAugment()(v2.functional.to_dtype(v2.functional.to_image(window), torch.float32, scale=True))",
    ),
)

bank.hint(
    "randaugment-idle",
    "RandAugment was called, but with num_ops={got[0]} and magnitude={got[1]}, so it changes next to nothing. The "
    "defaults are 2 and 9.",
)
bank.slip("randaugment-idle", ("v2.RandAugment()", "v2.RandAugment(num_ops=0)"), NORMALIZE)
bank.slip("randaugment-idle", ("v2.RandAugment()", "v2.RandAugment(magnitude=0)"), NORMALIZE)
bank.variant("randaugment-idle", FIRST, ("RandAugment(2, 9)", "RandAugment(2, 0)"))
bank.variant("randaugment-idle", HAND, ("RandAugment()", "RandAugment(num_ops=0)"))

bank.hint(
    "no-flip",
    "No image was mirrored, or too few were. Half of them should be, left to right: toss a "
    "coin for each image, not one for all.",
)
bank.slip("no-flip", (FLIP, ""), NORMALIZE)
bank.slip("no-flip", (FLIP, ", *([] if augment else [v2.RandomHorizontalFlip()])"), NORMALIZE)
bank.slip("no-flip", ("RandomHorizontalFlip()", "RandomHorizontalFlip(0.05)"), NORMALIZE)
bank.slip("no-flip", ("RandomHorizontalFlip()", "RandomHorizontalFlip(0.25)"), NORMALIZE)
bank.variant("no-flip", HAND, ("x = x.flip(-1) if torch.rand(()) < 0.5 else x", ""))
bank.variant("no-flip", FIRST, ("RandomHorizontalFlip()", "RandomHorizontalFlip(p=0)"))
ONCE = "*([v2.RandomHorizontalFlip(1)] if __import__('random').Random({}).random() < 0.5 else [])]"  # when it is made
bank.slip("no-flip", ("v2.RandomHorizontalFlip()]", ONCE.format(0)), NORMALIZE)

bank.hint(
    "always-flipped",
    "Every image was mirrored, or too many were. Half of them should be: toss a coin for each image, not one for all.",
)
bank.slip("always-flipped", ("RandomHorizontalFlip()", "RandomHorizontalFlip(p=1)"), NORMALIZE)
bank.variant("always-flipped", HAND, ("if torch.rand(()) < 0.5 else x", ""))
bank.slip("always-flipped", ("v2.RandomHorizontalFlip()]", ONCE.format(1)), NORMALIZE)

bank.hint("flip-upside-down", "Photographs came out upside down. Mirror them left to right only.")
bank.slip("flip-upside-down", ("RandomHorizontalFlip", "RandomVerticalFlip"), NORMALIZE)
bank.variant("flip-upside-down", HAND, ("flip(-1)", "flip(-2)"))
bank.variant("flip-upside-down", FIRST, ("RandomHorizontalFlip", "RandomVerticalFlip"))

bank.hint(
    "size-ignored",
    "Sizes 48 and 31 were asked for, but {got[0]} and {got[1]} came out. Do you use `size` everywhere?",
    edge=True,
)
bank.slip("size-ignored", ("v2.RandomResizedCrop(size)", "v2.RandomResizedCrop(224)"), NORMALIZE)
bank.slip("size-ignored", ("v2.RandomResizedCrop(size)", "v2.RandomResizedCrop(48)"), NORMALIZE)
bank.variant("size-ignored", HAND, ("RandomResizedCrop(size", "RandomResizedCrop(224"))
bank.variant("size-ignored", FIRST, ("(size, size)", "(48, 48)"))

bank.hint(
    "randaugment-sometimes",
    "With augment=True, RandAugment was called for {got} of {expected} images. It draws its operations for every "
    "image itself: no RandomApply, no RandomChoice.",
)
bank.slip("randaugment-sometimes", ("v2.RandAugment()", "v2.RandomApply([v2.RandAugment()], p=0.9)"), NORMALIZE)
bank.variant("randaugment-sometimes", HAND, ("if augment:", "if augment and torch.rand(()) < 0.85:"))

bank.hint(
    "augmented-not-normalised",
    "Without augment the pixels are normalised, but with augment they aren't. What comes after RandAugment must be "
    "the same in both cases.",
)
bank.slip(
    "augmented-not-normalised",
    ("v2.Normalize(MEAN, STD)", "*([] if augment else [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])"),
)
bank.variant("augmented-not-normalised", HAND, ("return x.sub", "return x if augment else x.sub"))

bank.hint(
    "crop-not-resized",
    "All windows show the same share of the photograph. RandomResizedCrop draws the size and the proportions too.",
    edge=True,
)
bank.slip("crop-not-resized", ("v2.RandomResizedCrop(size)", "v2.RandomCrop(size, pad_if_needed=True)"), NORMALIZE)
bank.variant(
    "crop-not-resized",
    FIRST,
    ("v1.RandomResizedCrop((size, size), scale=(0.2, 1.0))", "v1.RandomCrop(size, pad_if_needed=True)"),
)

bank.hint(
    "small-refused",
    "A photograph smaller than the window fails: {got}. RandomResizedCrop enlarges the part that it cuts out.",
    edge=True,
)
bank.slip("small-refused", ("v2.RandomResizedCrop(size)", "v2.RandomCrop(size)"), NORMALIZE)
bank.variant("small-refused", FIRST, ("v1.RandomResizedCrop((size, size), scale=(0.2, 1.0))", "v1.RandomCrop(size)"))

bank.hint(
    "randaugment-lost",
    "RandAugment was called, but you go on with the image from before. It returns a new image.",
)


@bank.wrong("randaugment-lost")
def make_transform(size, augment):
    window, policy, flip = v2.RandomResizedCrop(size), v2.RandAugment(), v2.RandomHorizontalFlip()

    def transform(image):
        image = flip(window(image.convert("RGB")))
        if augment:
            policy(image)
        x = v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
        return v2.functional.normalize(x, MEAN, STD)

    return transform


bank.variant("randaugment-lost", HAND, ("window = v2.RandAugment()", "v2.RandAugment()"))
bank.hint("axes-swapped", "Rows and columns are swapped: left to right became top to bottom. An array is (height, "
                       "width, channels), but torch wants (channels, height, width): permute(2, 0, 1).",
)  # fmt: skip
bank.slip("axes-swapped", ("v2.ToImage(), ", "v2.ToImage(), v2.Lambda(lambda x: x.transpose(1, 2)), "), NORMALIZE)
bank.slip(
    "axes-swapped",
    ("steps = [v2.RGB(), ", "steps = [v2.RGB(), v2.Lambda(lambda x: x.transpose(5)), "),
    NORMALIZE,
    variant=True,
)
bank.hint("channels-mixed", "The three channels are in the wrong order. It must be red, green, blue.")
bank.slip("channels-mixed", ("v2.ToImage(), ", "v2.ToImage(), v2.Lambda(lambda x: x.flip(0)), "), NORMALIZE)
bank.slip(
    "channels-mixed",
    ("v2.ToImage(), ", "v2.ToImage(), v2.Lambda(lambda x: x.roll(1, 0)), "),
    NORMALIZE,
    variant=True,
)
bank.hint(
    "colours-lost",
    'A coloured photograph came out grey. convert("RGB") turns a grey image into three '
    "channels and leaves the others unchanged.",
    edge=True,
)
bank.slip("colours-lost", ("v2.RGB(), ", "v2.Grayscale(3), "), NORMALIZE)
bank.slip(
    "colours-lost", ("v2.RGB(), ", 'v2.Lambda(lambda x: x.convert("L").convert("RGB")), '), NORMALIZE, variant=True
)
bank.hint("augmented-channels-last", "RandAugment got (height, width, channels), but in torch the channels come "
                                  "first. Call permute(2, 0, 1) before it.",
)  # fmt: skip
LAST = (
    "v2.PILToTensor(), v2.Lambda(lambda x: x.movedim(0, 2)), v2.RandAugment(), v2.Lambda(lambda x: x.permute(2, 0, 1))"
)
bank.slip("augmented-channels-last", ("steps.append(v2.RandAugment())", f"steps += [{LAST}]"), NORMALIZE)
TURNED = (
    "v2.ToImage(), v2.Lambda(lambda x: x.permute(1, 2, 0)), v2.RandAugment(), v2.Lambda(lambda x: x.permute(2, 0, 1))"
)
bank.slip(
    "augmented-channels-last", ("steps.append(v2.RandAugment())", f"steps += [{TURNED}]"), NORMALIZE, variant=True
)
