# %% [markdown]
# # Data augmentation on CPU and GPU · about 80 min, core 35
#
# Augmentation gives a network images that it has never seen, at the price of computing them. **Is the CPU enough? What
# should go to the GPU, and how is it written for a GPU?** You will put RandAugment where it belongs, in the loader's
# workers, and write MixUp and CutMix for whole batches, on the device: many recipes for ImageNet use all three. Then
# you measure, and the figures decide where each belongs.
#
# **What you will gain.** A budget, to begin with. A GPU that trains 2,470 images a second (an A100 with a ResNet-50 in mixed
# precision, as published by NVIDIA) leaves 8 workers 3.2 ms for an image, decoding included. The cell below measures what a
# photograph costs *this* processor, and how many workers such a GPU would need.

# %% tags=["setup"]
import io
import math
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Image as Picture
from IPython.display import display
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from dlojz_tp import course, data, gains, measure, planner, recorded, scale, todo, training_run, worth

NAME = "07_data_augmentation"
tp = course.open(NAME)
tp

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 224 if FULL else 112  # pixels of a side, in the races
BATCHES = [64, 128, 256, 512, 1024] if FULL else [16, 64, 256]  # of the race
SMALL = 64 if FULL else 32  # pixels of a side, in the short trainings
EPOCHS = 20 if FULL else 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels, for pixels in [0, 1]

# %%
cores = tp.predict("How many cores like this one keep such a GPU fed with decoded, augmented images?", ...)

# %%
dataset = data.image_set()
CLASSES = len(dataset.classes)


def milliseconds(call, repeats=40):
    start = time.perf_counter()
    for k in range(repeats):
        call(k)
    return (time.perf_counter() - start) / repeats * 1e3


def decoded(k):
    with Image.open(dataset.train[k * 7 % len(dataset.train)][0]) as image:
        return image.convert("RGB")


def crop(image):
    return v2.RandomResizedCrop(224)(image)


images_224 = [crop(decoded(k)) for k in range(40)]
decoding = milliseconds(lambda k: crop(decoded(k)))
augmenting = milliseconds(lambda k: v2.RandAugment()(images_224[k]))
print(f"measured here, one core: decoding and crop {decoding:.1f} ms, RandAugment {augmenting:.1f} ms an image")
for what, cost in (("decoding and crop", decoding), ("decoding, crop and RandAugment", decoding + augmenting)):
    needed = planner.A100.resnet50_mixed * cost / 1000
    print(
        f"estimate: a GPU that trains {planner.A100.resnet50_mixed:,} images/s needs {needed:4.0f} such cores for {what}"
    )
cores.shows(
    needed, "{:.0f} cores", "Some milliseconds an image are nothing, until they are wanted thousands of times a second."
)
print(gains.expected(NAME))

# %% [markdown]
# ## The idea
#
# RandAugment looks at one image at a time and hides in the workers, as long as there are enough of them. MixUp and CutMix
# (Zhang et al., 2018; Yun et al., 2019) need *two* images, so they work on the batch. Of two images $x_i$, $x_j$ with labels
# $y_i$, $y_j$ and a random $\lambda \sim \mathrm{Beta}(\alpha, \alpha)$ they make
#
# $$\tilde x = M \odot x_i + (1 - M) \odot x_j, \qquad \tilde y = \lambda\, y_i + (1 - \lambda)\, y_j$$
#
# where for MixUp $M = \lambda$ everywhere, and for CutMix $M$ is 0 in a rectangle that takes $1 - \lambda$ of the area,
# and 1 elsewhere. The labels are *soft*: a probability for each class.


# %% jupyter={"source_hidden": true}
def show(images, titles, width=8.5):
    """Draw images (n, 3, h, w), normalised or not, in a row."""
    figure, row = plt.subplots(1, len(images), figsize=(width, width / len(images) * 1.25), layout="constrained")
    for axes, image, title in zip(row, images.float().cpu(), titles):
        low, high = image.amin(), image.amax()
        axes.imshow(((image - low) / (high - low + 1e-6)).permute(1, 2, 0))
        axes.set_title(title, fontsize=8)
        axes.axis("off")
    picture = io.BytesIO()  # as JPEG: photographs make large PNG files
    figure.savefig(picture, format="jpeg", pil_kwargs={"quality": 80})
    plt.close(figure)
    display(Picture(picture.getvalue()))


# %%
a, b = (v2.functional.to_image(images_224[k]) / 255 for k in (0, 17))
m = torch.ones(1, 224, 224)
m[:, 60:170, 90:210] = 0
kept = m.mean().item()
show(
    torch.stack([a, b, 0.6 * a + 0.4 * b, m * a + (1 - m) * b]),
    ["$x_i$", "$x_j$", "MixUp, λ = 0.6", f"CutMix, λ = {kept:.2f} (pixels kept)"],
)

# %% [markdown]
# ## The baseline: one image after the other
#
# This is how it is often written: a loop over the images of the batch. It is right, and it is what you will make faster.


# %%
def cutmix_loop(images, labels, classes, alpha):
    """CutMix with a Python loop: one λ, one box, one partner for each image."""
    mixed, soft = images.clone(), F.one_hot(labels, classes).float()
    target = soft.clone()
    height, width = images.shape[2:]
    for i, j in enumerate(torch.randperm(len(images)).tolist()):
        lam = torch.distributions.Beta(alpha, alpha).sample().item()
        half_h, half_w = height * math.sqrt(1 - lam) / 2, width * math.sqrt(1 - lam) / 2
        y, x = torch.rand(2).tolist()
        top, bottom = (min(max(round(y * height + k * half_h), 0), height) for k in (-1, 1))
        left, right = (min(max(round(x * width + k * half_w), 0), width) for k in (-1, 1))
        mixed[i, :, top:bottom, left:right] = images[j, :, top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        target[i] = kept * soft[i] + (1 - kept) * soft[j]
    return mixed, target


def random_batch(n, size=SIZE):
    return torch.randn(n, 3, size, size, device=DEVICE), torch.randint(CLASSES, (n,), device=DEVICE)


batch = random_batch(BATCHES[1])
seconds = measure.race({"loop": lambda: cutmix_loop(*batch, CLASSES, 1.0), "copy": batch[0].clone}, repeats=5).medians
print(f"CutMix by a loop, batch {BATCHES[1]} on {DEVICE}: {BATCHES[1] / seconds['loop']:,.0f} images/s,", end=" ")
print(f"{seconds['loop'] / seconds['copy']:.1f} times as long as a copy of the batch")

# %% [markdown]
# ## On the CPU, image by image

# %% [markdown]
# ### Balise 1 · RandAugment in its place · about 8 min
#
# Return a function that takes a PIL image (of any size; it may be grey) and returns a float32 tensor `(3, size, size)`,
# normalised with `MEAN` and `STD`: a window by `RandomResizedCrop`, half of the images flipped from left to right, and, if `augment`,
# `v2.RandAugment()` **once, where it belongs**. Two things decide where: how many pixels it has to touch, and what kind
# of numbers its operations (posterise, equalise, solarise) expect. About 5 lines.
#
# <details><summary>Hint</summary>
#
# `v2.Compose` of a list. `v2.ToImage()` and `v2.ToDtype(torch.float32, scale=True)` make floats in [0, 1] of levels from 0 to
# 255. `v2.RGB()` or `image.convert("RGB")` makes three channels of one.
# </details>


# %% tags=["balise-1"]
def make_transform(size, augment):
    """Return a function: PIL image -> float32 tensor (3, size, size), normalised."""
    # BEGIN SOLUTION
    steps = [v2.RGB(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    if augment:
        steps.append(v2.RandAugment())
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)
    # END SOLUTION


# %%
tp.check(1, make_transform)

# %%
torch.manual_seed(5)
photograph, augmented = decoded(4), make_transform(96, augment=True)
original = v2.functional.to_image(photograph.resize((96, 96))) / 255
windows = [augmented(photograph) for _ in range(6)]
show(torch.stack([original, *windows]), ["the photograph", *(f"window {k}" for k in range(1, 7))])

# %% [markdown]
# Does it hide? A training step on this machine, beside what the workers need for its batch, without and with RandAugment.

# %%
setting = training_run.setting()
plain, rich = (make_transform(setting.image_size, augment) for augment in (False, True))
rounds = [[milliseconds(lambda k: f(decoded(k))) / 1e3 for f in (plain, rich)] for _ in range(3)]  # noqa: B023
cost = [min(times) for times in zip(*rounds)]  # in turn: whatever else the machine does meets both
model = training_run.make_model(CLASSES)
optimizer = training_run.make_optimizer(model.parameters())
batch = random_batch(setting.batch_size, setting.image_size)
chrono = measure.Chronometer(DEVICE, warmup=2)
for images, labels in chrono.steps([batch] * 6):
    with chrono.step():
        training_run.plain_step(model, images, labels, optimizer, DEVICE)
step = sum(s["step"] for s in chrono.record("step").steps[2:]) / 4
print(f"step of {setting.batch_size} images on {DEVICE}: {step * 1e3:.0f} ms (measured)")
for what, one in zip(("without RandAugment", "with RandAugment"), cost):
    busy = one * setting.batch_size / setting.workers
    hidden = "hidden behind the step" if busy < step else f"the step waits {1e3 * (busy - step):.0f} ms"
    print(
        f"{what:<20} {setting.workers} workers need {1e3 * busy:4.0f} ms for a batch, on cores of their own: {hidden}"
    )
recorded.note(NAME, "hiding", {"step": step, "image": cost, "workers": setting.workers, "batch": setting.batch_size})
found = recorded.load(NAME, "hiding")
print(f"recorded on {recorded.where(NAME)}: {found}" if found else "No figures of a GPU are recorded yet.")

# %% [markdown]
# Without a GPU the step itself needs the cores, so nothing is really hidden: read the line as what a node with spare cores
# would do. The rule is simple: an augmentation of single images belongs in the workers **as long as they keep up**.
#
# ## On the device, batch by batch

# %% [markdown]
# ### Balise 2 · MixUp for a batch · about 15 min
#
# `images` of shape `(b, channels, h, w)`, float32 or bfloat16; `labels` either integers `(b,)` or soft, `(b, classes)`.
# Return `(mixed, soft)`: images of the same shape and dtype, and soft labels `(b, classes)` in float32.
#
# - **one λ for each image** from Beta(α, α), drawn with torch, so that `torch.manual_seed` repeats it; each image is mixed with a partner of the batch, perhaps itself, and each serves once:
#   a permutation, random or a fixed roll;
# - no loop over the images; all is drawn, and comes back, on the device of `images`, and no value is read back from it;
# - the inputs stay as they are; integer images (uint8) are refused with a `TypeError`.
#
# About 8 lines.
#
# <details><summary>Hint</summary>
#
# `torch.distributions.Beta(a, a, validate_args=False).sample()` with tensors `a` of shape `(b,)` on the device; without
# `validate_args=False` it reads `a` back to check it. `F.one_hot`, `lam.view(-1, 1, 1, 1)`, `torch.lerp`. λ in the dtype of the
# images for the images, in float32 for the labels.
# </details>


# %% tags=["balise-2"]
def mixup(images, labels, classes, alpha):
    """Mix each image with another by its own λ ~ Beta(α, α). Returns images (b, c, h, w), soft labels (b, classes)."""
    # BEGIN SOLUTION
    if not images.is_floating_point():
        raise TypeError(f"mixup takes float images, not {images.dtype}: normalise first")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    a = torch.full((len(images),), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()

    def blend(x):  # λ x[i] + (1 − λ) x[i − 1], in two slices, so that no shifted copy of the batch is made
        share = lam.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        mixed = torch.empty_like(x)
        torch.lerp(x[:-1], x[1:], share[1:], out=mixed[1:])
        torch.lerp(x[-1:], x[:1], share[:1], out=mixed[:1])
        return mixed

    return blend(images), blend(soft)
    # END SOLUTION


# %%
tp.check(2, mixup)


# %%
def photographs(n=6, size=96):
    """A batch of n validation photographs of different classes, and their labels."""
    chosen = dataset.val[:: len(dataset.val) // n][:n]
    to_tensor = v2.Compose([v2.Resize((size, size)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    images = [to_tensor(Image.open(path).convert("RGB")) for path, _ in chosen]
    return torch.stack(images), torch.tensor([label for _, label in chosen])


CAPTIONS = [name.replace("_", " ") for name in dataset.classes]


def words(soft):
    """The two largest masses of each soft label, as text."""
    mass, which = soft.topk(2, dim=1)
    names = [[CAPTIONS[k] for k in row] for row in which.tolist()]
    return [f"{n[0]} {p[0]:.2f}\n{n[1]} {p[1]:.2f}" for n, p in zip(names, mass.tolist())]


batch = photographs()
show(batch[0], [CAPTIONS[k] for k in batch[1].tolist()])
torch.manual_seed(1)
mixed, soft = mixup(*batch, CLASSES, 1.0)
show(mixed, words(soft))

# %% [markdown]
# Above each image: its label mass. Check with your eyes that the stronger image has the larger number.

# %% [markdown]
# ### Balise 3 · The boxes of CutMix · further · about 7 min
#
# Given for each image: `lam` in [0, 1] and a centre `(y, x)` in pixels (float tensors of shape `(b,)`), and the size of the
# images. The box has the fraction `1 − lam` of the image's *area* and the image's proportions; it is rounded to whole pixels,
# up or down, and clipped to the image.
#
# Return `(boxes, lam)`: `boxes` int64 `(b, 4)` with top, left, bottom, right (the last two are the first row and column
# *outside*; `lam = 1` gives an empty box), and the `lam` of shape `(b,)` **that is really kept**: 1 minus the fraction of
# pixels in the box. No loop, nothing read back. About 8 lines.
#
# <details><summary>Hint</summary>
#
# A box of the fraction $1-\lambda$ of the area has sides $\sqrt{1-\lambda}$ of the image's. From the centre, half a side goes
# each way. Clip, *then* count.
# </details>


# %% tags=["balise-3"]
def cutmix_boxes(lam, y, x, height, width):
    """Integer boxes (b, 4): top, left, bottom, right; and the λ (b,) that is really kept."""
    # BEGIN SOLUTION
    half = (1 - lam).sqrt() / 2
    top, bottom = ((y + k * half * height).round().clamp(0, height) for k in (-1, 1))
    left, right = ((x + k * half * width).round().clamp(0, width) for k in (-1, 1))
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return torch.stack([top, left, bottom, right], dim=1).long(), kept
    # END SOLUTION


# %%
tp.check(3, cutmix_boxes)

# %% [markdown]
# ### Balise 4 · Masks without a loop · further · about 8 min
#
# From `boxes` `(b, 4)` make masks of shape `(b, 1, height, width)`, `torch.bool`, True inside the box: exact at the borders,
# for empty boxes and for full ones. No loop, on the device of the boxes. About 5 lines.
#
# <details><summary>Hint</summary>
#
# A pixel is inside if its row is at least `top` and below `bottom`, and its column likewise. `torch.arange(height,
# device=...)` of shape `(height, 1)` compared with `top` of shape `(b, 1, 1, 1)` broadcasts.
# </details>


# %% tags=["balise-4"]
def box_masks(boxes, height, width):
    """True inside the boxes: (b, 4) -> (b, 1, height, width), bool."""
    # BEGIN SOLUTION
    top, left, bottom, right = boxes.view(-1, 4, 1, 1, 1).unbind(dim=1)
    rows = torch.arange(height, device=boxes.device).view(height, 1)
    columns = torch.arange(width, device=boxes.device)
    tall, wide = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    inside = tall.view(torch.uint8) & wide.view(torch.uint8)  # the only operation on all pixels: bytes are faster
    return inside.view(torch.bool)
    # END SOLUTION


# %%
tp.check(4, box_masks)

# %% [markdown]
# ### Balise 5 · CutMix for a batch · further · about 16 min
#
# The same arguments, results and promises as `mixup`: one λ ~ Beta(α, α), one centre, uniform over the image, and one
# partner for each image; the partner's pixels go into the box. The labels are mixed by the area **really** cut. Use
# `cutmix_boxes` and `box_masks`. About 12 lines.
#
# <details><summary>Hint</summary>
#
# `torch.rand(b, device=...) * height` for the centres. `torch.where(mask, partner, images)` makes a new tensor. The
# corrected λ goes into the labels.
# </details>


# %% tags=["balise-5"]
def cutmix(images, labels, classes, alpha):
    """Paste a box of another image into each. Returns images (b, c, h, w) and soft labels (b, classes)."""
    # BEGIN SOLUTION
    if not images.is_floating_point():
        raise TypeError(f"cutmix takes float images, not {images.dtype}: normalise first")
    soft = labels.float() if labels.dim() == 2 else F.one_hot(labels, classes).float()
    n, _, height, width = images.shape
    a = torch.full((n,), float(alpha), device=images.device)
    lam = torch.distributions.Beta(a, a, validate_args=False).sample()
    y, x = torch.rand(2, n, device=images.device)
    boxes, kept = cutmix_boxes(lam, y * height, x * width, height, width)
    inside = box_masks(boxes, height, width).to(images.dtype)  # lerp by 0 or 1 is exact, and faster than where
    mixed = torch.empty_like(images)  # two slices, so that no shifted copy of the batch is made
    torch.lerp(images[1:], images[:-1], inside[1:], out=mixed[1:])
    torch.lerp(images[:1], images[-1:], inside[:1], out=mixed[:1])
    kept = kept[:, None]
    return mixed, kept * soft + (1 - kept) * soft.roll(1, 0)
    # END SOLUTION


# %%
tp.check(5, cutmix)

# %%
torch.manual_seed(3)
mixed, soft = cutmix(*batch, CLASSES, 1.0)
show(mixed, words(soft))

# %% [markdown]
# ### Balise 6 · A loss for soft labels · further · about 6 min
#
# With soft labels the loss is the mean over the images of $-\sum_c y_c \log p_c$: a sum over *all* classes, where one term was
# left of it before. **Label smoothing** makes labels softer still: a part `s` of the mass goes to all classes alike,
# $y' = (1-s)\,y + s / \text{classes}$, so that no network has to be certain.
#
# - `soft_cross_entropy(logits, labels, smoothing)`: this loss with smoothed labels, a tensor of shape `()`, from logits
#   `(b, classes)`. That integer labels become one-hot ones is given. Compute in float32 where the logits have 16 bits, and
#   take the logarithm of the softmax in one operation: where logits lie hundreds apart, a softmax is 0, and its logarithm
#   infinite. Write it without PyTorch's own losses.
# - `top1(logits, soft)`: the fraction of images whose largest logit and largest label mass are in the same class, a tensor
#   of shape `()`; nothing is read.
#
# About 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `tensor.log_softmax(dim=1)`. `logits.to(torch.promote_types(logits.dtype, torch.float32))` widens 16 bits, and leaves
# float64 as it is. A mean of booleans wants `.float()` before.
# </details>


# %% tags=["balise-6"]
def soft_cross_entropy(logits, labels, smoothing=0.0):
    """Mean cross-entropy of logits (b, classes) with labels (b, classes) or (b,), smoothed. A tensor ()."""
    classes = logits.shape[1]
    if labels.dim() == 1:
        labels = F.one_hot(labels, classes)
    # BEGIN SOLUTION
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)
    labels = (1 - smoothing) * labels + smoothing / classes
    return -(labels * log_p).sum(dim=1).mean()
    # END SOLUTION


def top1(logits, soft):
    """The fraction of images whose largest logit is in the class of the largest label mass: (), float32 or wider."""
    # BEGIN SOLUTION
    return (logits.argmax(dim=1) == soft.argmax(dim=1)).float().mean()
    # END SOLUTION


# %%
tp.check(6, soft_cross_entropy, top1)

# %% [markdown]
# ### Balise 7 · One or the other, in the step · further · about 8 min
#
# Recipes use both: a coin is thrown for each batch. A value on the *device* would make the CPU wait before it can decide,
# so the coin is a number of the CPU.
#
# - `MixOrCut(classes, alpha)`, an `nn.Module`: in training mode, `forward(images, labels)` applies your `mixup` or your `cutmix`
#   to the whole batch, each with probability 1/2. In eval mode (`mix.eval()`) the images come back as they are, with one-hot
#   labels in float32; labels that are soft already stay as they are. The same `torch.manual_seed` gives the same batches.
# - `train_step(model, mix, images, labels, optimizer, device)`: the step of work 01, given but for what is new: mix the batch
#   with `mix(images, labels)` where it is, and compute your loss (`loss`), without smoothing.
#
# About 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `self.training` tells the mode. `torch.rand(())` is drawn on the CPU. Functions are values: a name can stand for either.
# </details>


# %% tags=["balise-7"]
class MixOrCut(nn.Module):
    """MixUp or CutMix for a batch, half of the time each; nothing in eval mode."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.classes, self.alpha = classes, alpha

    def forward(self, images, labels):
        # BEGIN SOLUTION
        if not self.training:
            return images, labels if labels.dim() == 2 else F.one_hot(labels, self.classes).float()
        mix = mixup if torch.rand(()) < 0.5 else cutmix  # drawn on the CPU: nobody waits
        return mix(images, labels, self.classes, self.alpha)
        # END SOLUTION


def train_step(model, mix, images, labels, optimizer, device):
    """One step on the batch, mixed on `device`. Returns the loss (), detached."""
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    # BEGIN SOLUTION
    images, soft = mix(images, labels)
    # END SOLUTION
    optimizer.zero_grad()
    # BEGIN SOLUTION
    loss = soft_cross_entropy(model(images), soft)
    # END SOLUTION
    loss.backward()
    optimizer.step()
    return loss.detach()


# %%
tp.check(7, MixOrCut, train_step)

# %% [markdown]
# ## Race
#
# The loop of the beginning, your batched versions, and torchvision's `v2.CutMix` and `v2.MixUp`. Mind the difference:
# torchvision draws *one* box and one λ for the whole batch; yours draws them for each image. Guess before it runs.

# %%
loop_time = tp.predict(f"How many times as long as your cutmix does the loop take, batch {BATCHES[-1]}, here?", ...)


# %%
def race_of(n):
    """Median seconds of each candidate for a batch of n."""
    batch = random_batch(n)
    cut, mix = v2.CutMix(num_classes=CLASSES), v2.MixUp(num_classes=CLASSES)
    candidates = {
        "CutMix, yours": lambda: cutmix(*batch, CLASSES, 1.0),
        "CutMix, torchvision": lambda: cut(*batch),
        "CutMix, loop": lambda: cutmix_loop(*batch, CLASSES, 1.0),
        "MixUp, yours": lambda: mixup(*batch, CLASSES, 1.0),
        "MixUp, torchvision": lambda: mix(*batch),
    }
    return measure.race(candidates, repeats=7, warmup=2, device=DEVICE).medians


races = {n: race_of(n) for n in BATCHES}
recorded.note(NAME, "race", {"size": SIZE, "seconds": races})


# %% jupyter={"source_hidden": true}
def draw_race(axes, races, title):
    looks = {"yours": "#0072B2", "torchvision": "#E69F00", "loop": "#D55E00"}
    for name in next(iter(races.values())):
        speed = [int(n) / seconds[name] for n, seconds in races.items()]
        axes.plot(
            [int(n) for n in races], speed, "--" if "MixUp" in name else "-",
            color=looks[name.split(", ")[1]], marker="o", label=name,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="images/s", title=title)
    axes.set_xticks([int(n) for n in races], list(races))
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


found = recorded.load(NAME, "race")
figure, columns = plt.subplots(1, 1 + bool(found), figsize=(8.5, 3.0), layout="constrained", squeeze=False)
draw_race(columns[0][0], races, f"Measured here ({DEVICE}, {SIZE} pixels)")
if found:
    draw_race(columns[0][1], found["seconds"], f"Recorded: {recorded.where(NAME)}")
plt.show()

# %%
for n, seconds in races.items():
    ratio = {kind: seconds[f"{kind}, yours"] / seconds[f"{kind}, torchvision"] for kind in ("CutMix", "MixUp")}
    loop = seconds["CutMix, loop"] / seconds["CutMix, yours"]
    print(
        f"batch {n:4}: your time over torchvision's: CutMix {ratio['CutMix']:.2f}, MixUp {ratio['MixUp']:.2f};", end=" "
    )
    print(f"the loop takes {loop:.1f} times as long as yours")
why = "On a CPU a turn of the loop copies whole rows at the memory's speed; on a GPU each turn starts a dozen tiny kernels."
loop_time.shows(loop, "× {:.1f}", why)
if not found:
    print("No race on a GPU is recorded yet.")

# %% [markdown]
# On a processor a loop over images is not so bad: each turn of it copies whole rows, at the speed of the memory. On a GPU
# every turn starts kernels that a batch of 256 repeats 256 times, some microseconds each, and most of the GPU stands idle
# meanwhile.
#
# ## Does it help?
#
# A small network, trained from scratch on the photo patches in low resolution, three seeds each: without augmentation, with
# MixUp, with CutMix. Whatever comes out is shown. The images are decoded once.

# %%
best = tp.predict(
    "After these short trainings, which has the best mean accuracy?", ..., choices=("none", "MixUp", "CutMix")
)


# %%
def decode_all(items, size):
    to_tensor = v2.Compose([v2.Resize((size, size)), v2.ToImage()])
    images = []
    for path, _ in items:
        with Image.open(path) as image:
            image.draft("RGB", (2 * size, 2 * size))  # JPEG can be decoded at 1/2, 1/4, 1/8 for less
            images.append(to_tensor(image.convert("RGB")))
    mean, std = (torch.tensor(v)[:, None, None] * 255 for v in (MEAN, STD))
    labels = torch.tensor([label for _, label in items])
    return ((torch.stack(images) - mean) / std).to(DEVICE), labels.to(DEVICE)


LIMIT = 4000 if FULL else 600  # photographs for training, at most
train_x, train_y = decode_all(dataset.train[:: math.ceil(len(dataset.train) / LIMIT)], SMALL)
val_x, val_y = decode_all(dataset.val[:: math.ceil(len(dataset.val) / 240)], SMALL)
print(f"{len(train_x)} training and {len(val_x)} validation images of {SMALL} pixels, {CLASSES} classes")


# %%
class As(MixOrCut):
    """MixOrCut with the choice made: None, mixup or cutmix."""

    def __init__(self, chosen):
        super().__init__(CLASSES, 1.0)
        self.chosen = chosen

    def forward(self, images, labels):
        if self.chosen is None or not self.training:
            return images, F.one_hot(labels, CLASSES).float()
        return self.chosen(images, labels, CLASSES, 1.0)


def small_network():
    layers, channels = [], 3
    for width in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)).to(DEVICE)


def accuracy_with(chosen, seed, batch_size=50):
    torch.manual_seed(seed)
    model, mix = small_network(), As(chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = EPOCHS * (len(train_x) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps + 1)
    for _ in range(EPOCHS):
        order = torch.randperm(len(train_x), device=DEVICE)
        for some in order[: len(order) // batch_size * batch_size].split(batch_size):
            train_step(model, mix, train_x[some], train_y[some], optimizer, DEVICE)
            schedule.step()
    with torch.inference_mode():
        return top1(model.eval()(val_x), F.one_hot(val_y, CLASSES)).item()


# %%
accuracies = {
    name: [accuracy_with(chosen, seed) for seed in range(3)]
    for name, chosen in (("none", None), ("MixUp", mixup), ("CutMix", cutmix))
}
for name, values in accuracies.items():
    print(
        f"{name:<7} validation accuracy {sum(values) / 3:.3f}, three seeds from {min(values):.3f} to {max(values):.3f}"
    )
recorded.note(NAME, "accuracy", accuracies)
why = "Mixing works against learning by heart: that takes long trainings and large networks; short ones show little, or lose."
best.shows(max(accuracies, key=lambda name: sum(accuracies[name])), why=why)

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
for row, values in enumerate(accuracies.values()):
    axes.plot(values, [row] * 3, "o", color="#0072B2")
    axes.plot(sum(values) / 3, row, "|", color="#D55E00", markersize=22)
axes.axvline(1 / CLASSES, linestyle=":", color="grey")
axes.set(yticks=range(3), yticklabels=list(accuracies), ylim=(2.5, -0.5), xlabel="validation accuracy (dotted: chance)")
axes.set_title("Three seeds each, and their mean", fontsize=10)
plt.show()

# %% [markdown]
# Look at the spread of the points before you look at the means: where they overlap, three seeds show no difference.
# **At the small size, expect no gain**: after five epochs a small network has not even learned the plain images, and
# each step now shows it two of them at once, with a label that says so. There is nothing to prevent yet: mixing works
# against learning by heart, and pays in *long* trainings of large networks; the papers train for hundreds of epochs.
#
# ## Past this machine · further
#
# What does each augmentation move through memory? MixUp reads two images and writes one: 3 × 4 × 3 × 224² bytes in float32,
# 1.8 MB. CutMix needs two thirds of that, as each pixel comes from one image; a version that reads
# both, as `torch.where` does, needs all of it, and that is counted below.

# %%
MOVED = 3 * 4 * 3 * 224**2  # bytes an image
print("estimate, float32, 224 pixels, from the memory bandwidth of the data sheets:")
for card in (planner.V100, planner.A100, planner.H100):
    ms = 256 * MOVED / card.bandwidth * 1e3
    print(f"  {card.name:<11} a batch of 256 in {ms:.2f} ms: {256 / ms * 1e3:12,.0f} images/s")
here = MOVED / (3 * 4 * 3 * SIZE**2) * races[BATCHES[-1]]["CutMix, yours"] / BATCHES[-1]
print(f"  here, from the race above, scaled by the pixels: {1 / here:12,.0f} images/s")

# %% [markdown]
# **So where does each belong?** RandAugment works on levels of single images with branches and interpolation: in the
# workers, while they keep up. MixUp and CutMix are a few passes over a batch that lies on the device already: there the
# card needs a fraction of a millisecond for them, and the workers nothing. Doing them in a worker's `collate_fn` would
# cost cores you need for decoding.
#
# On a **modelled** card: the loop of the beginning and your `cutmix` with a batch of 128 that lies there, each alone; then both
# in a whole step of a ResNet-50. Alone, what takes the time is the processor, which starts one small operation after the
# other; in a step the card's own work can hide these starts.


# %%
def alone(cut):
    def make(device):
        batch = torch.empty(128, 3, 224, 224, device=device), torch.zeros(128, dtype=torch.int64, device=device)
        return lambda: cut(*batch, 1000, 1.0)

    return make


worth.calls({"loop": alone(cutmix_loop), "your cutmix": alone(cutmix)})


# %%
def whole_step(cut):
    return lambda model, *batch: (train_step(model, lambda x, y: cut(x, y, 1000, 1.0), *batch), None)


steps = {"loop": whole_step(cutmix_loop), "your cutmix": whole_step(cutmix)}
worth.table(steps, makes=worth.Mixed, batches=(32, 128), keep=NAME)

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>The training accuracy under CutMix is 60 %, the validation accuracy 75 %. Is something broken?</summary>
#
# No. The training images are mixed: where λ is near one half, even a perfect network is "wrong" half of the time. Compare
# validation with validation.
# </details>
#
# <details><summary>A colleague draws λ = 0.7, cuts a box near the corner, and uses 0.7 for the labels. What goes wrong?</summary>
#
# The box is clipped, so less than 30 % is pasted, but 30 % of the label mass goes to the partner. The network is taught that
# pixels are there which are not.
# </details>
#
# <details><summary>Why is <code>if torch.rand((), device="cuda") &lt; 0.5:</code> slow, and what is its cure?</summary>
#
# Python must know the number to decide, so the CPU waits until the GPU has done all that was queued before. Draw on the
# CPU, or compute both branches and select with <code>torch.where</code>.
# </details>
#
# ## To remember
#
# An augmentation of single images hides in the workers as long as they keep up; one that mixes images belongs on the device,
# on the whole batch, without a loop and without a question to the device. A box becomes a mask by comparing row and column
# numbers with its borders, for all images at once. And labels follow the pixels that are really there. Next: many devices at
# once, and what must be said between them.
