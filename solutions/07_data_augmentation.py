# %% [markdown] tags=["slide"]
# # Data augmentation on CPU and GPU · about 100 min, core 35
#
# Augmentation shows a network images that it has never seen, but it costs computing time. Some of it belongs in the
# loader's workers, some on the GPU.
#
# **What you will gain.** A loop over images starts operations for each image. You write MixUp and CutMix for the whole
# batch, so the number of *operations* no longer depends on the batch size.

# %% tags=["setup"] jupyter={"source_hidden": true}
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
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from dlojz_tp import course, data, measure, planner, recorded, report, scale, todo, worth

NAME = "07_data_augmentation"
tp = course.open(NAME)
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 224 if FULL else 112  # pixels of a side, in the races
BATCHES = [64, 128, 256, 512, 1024] if FULL else [16, 64, 256]  # of the race
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels, for pixels in [0, 1]

# %% [markdown] tags=["slide"]
# ## The idea
#
# RandAugment changes one image at a time, at random. MixUp and CutMix (Zhang et al., 2018; Yun et al., 2019) need *two*
# images, so they work on the batch. With labels $y$ and a random $\lambda \sim \mathrm{Beta}(\alpha, \alpha)$ they make
#
# $$\tilde x = M \odot x_i + (1 - M) \odot x_j, \qquad \tilde y = \lambda\, y_i + (1 - \lambda)\, y_j$$
#
# For MixUp, $M = \lambda$ everywhere. For CutMix, $M$ is 0 in a rectangle with $1 - \lambda$ of the area, and 1
# elsewhere. The new labels are *soft*: a probability, or *mass*, for each class.


# %% tags=["slide"] jupyter={"source_hidden": true}
dataset = data.image_set()
CLASSES = len(dataset.classes)


def decoded(k):
    with Image.open(dataset.train[k * 7 % len(dataset.train)][0]) as image:
        return image.convert("RGB")


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


a, b = (v2.functional.to_image(v2.RandomResizedCrop(224)(decoded(k))) / 255 for k in (0, 17))
m = torch.ones(1, 224, 224)
m[:, 60:170, 90:210] = 0
kept = m.mean().item()
show(
    torch.stack([a, b, 0.6 * a + 0.4 * b, m * a + (1 - m) * b]),
    ["$x_i$", "$x_j$", "MixUp, λ = 0.6", f"CutMix, λ = {kept:.2f} (pixels kept)"],
)

# %% [markdown]
# ## The baseline: one image at a time
#
# A first version usually loops over the images of the batch.


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


# %% jupyter={"source_hidden": true}
class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch starts inside `with`."""

    def __init__(self):
        super().__init__()
        self.started = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.started += 1
        return operation(*args, **(kwargs or {}))


def operations(call):
    with Operations() as counted:
        call()
    return counted.started


def random_batch(n, size=SIZE):
    return torch.randn(n, 3, size, size, device=DEVICE), torch.randint(CLASSES, (n,), device=DEVICE)


# %%
rows = [
    (n, operations(lambda n=n: cutmix_loop(*random_batch(n), CLASSES, 1.0)) - 2) for n in BATCHES
]  # not counting the 2 that make the batch
report.table({"CutMix in a loop, images": "{}", "operations": "{:,}"}, rows)

# %% [markdown]
# On a GPU, Python starts a kernel for each operation except views.
#
# ## On the CPU, image by image
#
# ### Balise 1 · RandAugment in the right place · about 11 min
#
# Return a function that takes a PIL image (of any size, perhaps grey) and returns a float32 tensor `(3, size, size)`,
# normalised with `MEAN` and `STD`. It crops with `RandomResizedCrop`, flips half of the images from left to right, and,
# if `augment`, applies `v2.RandAugment()` **once, where it belongs**. Two things decide where: how many pixels it has
# to process, and which pixel values its operations (posterise, equalise, solarise) expect. About 5 lines.
#
# <details><summary>Hint</summary>
#
# Use `v2.Compose` with a list. `v2.ToImage()` and `v2.ToDtype(torch.float32, scale=True)` turn pixel values from 0 to
# 255 into floats in [0, 1]. `v2.RGB()` or `image.convert("RGB")` turns one channel into three.
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
show(torch.stack([original, *windows]), ["the photograph", *(f"sample {k}" for k in range(1, 7))])

# %% [markdown]
# RandAugment in the workers costs no extra time as long as they keep up with the GPU. An A100 trains on 2,470 images a
# second (ResNet-50, mixed precision, published by NVIDIA).

# %%
cores = tp.predict("How many cores like this one does it take to supply an A100 with decoded, augmented images?", ...)


# %% jupyter={"source_hidden": true}
def milliseconds(call, repeats=40):
    start = time.perf_counter()
    for k in range(repeats):
        call(k)
    return (time.perf_counter() - start) / repeats * 1e3


plain, rich = (make_transform(224, augment) for augment in (False, True))
threads, rows = torch.get_num_threads(), []
torch.set_num_threads(1)
rounds = [[milliseconds(lambda k: f(decoded(k))) for f in (plain, rich)] for _ in range(3)]  # noqa: B023
torch.set_num_threads(threads)
for what, cost in zip(("without RandAugment", "with RandAugment"), map(min, zip(*rounds))):
    needed = planner.A100.resnet50_mixed * cost / 1000
    rows.append((what, cost, needed))
columns = {
    "decoding and transform, one core": "{}",
    "ms an image, measured": "{:.1f}",
    "cores needed, estimate": "{:.0f}",
}
report.table(columns, rows)
cores.shows(needed, "{:.0f} cores", "Milliseconds per image add up when thousands of images a second are needed.")

# %% [markdown]
# ## On the device, batch by batch
#
# All functions below keep three promises: no loop over the images, all work on the images' device, and no value read
# back to the CPU.
#
# ### Balise 2 · MixUp for a batch · about 18 min
#
# `images` has the shape `(b, channels, h, w)` and is float32 or bfloat16. `labels` are integers `(b,)` or soft,
# `(b, classes)`. Return `(mixed, soft)`: images of the same shape and dtype, and soft labels `(b, classes)` in float32.
#
# Draw **one λ for each image** from Beta(α, α). The partners are a permutation of the batch, random or a fixed roll.
#
# About 8 lines.
#
# **Write all of it:** `tp.open_task(2)` gives you only the name and the docstring. Write MixUp for a whole batch.
#
# <details><summary>Hint</summary>
#
# Call `torch.distributions.Beta(a, a, validate_args=False).sample()` with a tensor `a` of shape `(b,)` on the device;
# without `validate_args=False` it reads `a` back to check it. `F.one_hot`, `lam.view(-1, 1, 1, 1)` and `torch.lerp`
# help too. Use λ in the images' dtype for the images, and in float32 for the labels.
# </details>


# %% tags=["balise-2", "slide-mistake=lambda-folded"]
def mixup(images, labels, classes, alpha):
    """Mix each image with another by its own λ ~ Beta(α, α). Returns images (b, c, h, w), soft labels (b, classes).

    An image gets λ of itself and 1 − λ of its partner, and so does its label. The partners are a permutation of the
    batch, random or a fixed roll. images: float32 or bfloat16, and so is the result; TypeError for integers. labels: (b,)
    integers or (b, classes) soft; the result is float32. The inputs don't change. Draw by torch's global generator. There
    is no loop over images. On a GPU all stays there, and nothing is read back: torch.distributions.Beta needs
    validate_args=False for that.
    """
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


# %% tags=["slide"] jupyter={"source_hidden": true}
def photographs(n=6, size=96):
    """A batch of n validation photographs of different classes, and their labels."""
    chosen = dataset.val[:: len(dataset.val) // n][:n]
    to_tensor = v2.Compose([v2.Resize((size, size)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    images = [to_tensor(Image.open(path).convert("RGB")) for path, _ in chosen]
    return torch.stack(images), torch.tensor([label for _, label in chosen])


CAPTIONS = [name.replace("_", " ") for name in dataset.classes]


def words(soft):
    """The two largest probabilities of each soft label, as text."""
    mass, which = soft.topk(2, dim=1)
    names = [[CAPTIONS[k] for k in row] for row in which.tolist()]
    return [f"{n[0]} {p[0]:.2f}\n{n[1]} {p[1]:.2f}" for n, p in zip(names, mass.tolist())]


batch = photographs()
show(batch[0], [CAPTIONS[k] for k in batch[1].tolist()])
torch.manual_seed(1)
mixed, soft = mixup(*batch, CLASSES, 1.0)
show(mixed, words(soft))

# %% [markdown]
# ### Balise 3 · The boxes of CutMix · further · about 11 min
#
# For each image you are given `lam` in [0, 1] and a centre `(y, x)` in pixels (float tensors of shape `(b,)`). The box
# has the fraction `1 − lam` of the image's *area* and the image's proportions. Round it to whole pixels, and clip it to
# the image.
#
# Return `(boxes, lam)`: `boxes` int64 `(b, 4)` with top, left, bottom, right (the last two are the first row and column
# *outside*), and `lam` `(b,)`, the fraction of pixels **really kept**, those outside the box. About 8 lines.
#
# <details><summary>Hint</summary>
#
# A box with the fraction $1-\lambda$ of the area has sides of $\sqrt{1-\lambda}$ times the image's. It extends half a
# side each way from the centre. Clip, *then* count the pixels. `lam = 1` gives an empty box.
# </details>


# %% tags=["balise-3"]
def cutmix_boxes(lam, y, x, height, width):
    """Integer boxes (b, 4): top, left, bottom, right; and λ (b,), the fraction of pixels really kept."""
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
# ### Balise 4 · Masks without a loop · further · about 11 min
#
# From `boxes` `(b, 4)`, make `torch.bool` masks `(b, 1, height, width)` that are True inside the box. About 5 lines.
#
# <details><summary>Hint</summary>
#
# A pixel is inside if its row is at least `top` and below `bottom`, and its column is at least `left` and below
# `right`. `torch.arange(height, device=...)` of shape `(height, 1)` compared with `top` of shape `(b, 1, 1, 1)`
# broadcasts.
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
# ### Balise 5 · CutMix for a batch · further · about 19 min
#
# The arguments, results and promises are those of `mixup`. Draw one λ, one centre (uniform over the image) and one
# partner for each image. The partner's pixels go into the box. Mix the labels by the area that is **really** cut. Use
# `cutmix_boxes` and `box_masks`. About 12 lines.
#
# <details><summary>Hint</summary>
#
# `torch.rand(b, device=...) * height` for the centres. `torch.where(mask, partner, images)` makes a new tensor. Use the
# corrected λ for the labels.
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

# %% jupyter={"source_hidden": true}
torch.manual_seed(3)
mixed, soft = cutmix(*batch, CLASSES, 1.0)
show(mixed, words(soft))

# %% [markdown]
# ### Balise 6 · A loss for soft labels · further · about 10 min
#
# With soft labels the loss is the mean over the images of $-\sum_c y_c \log p_c$. **Label smoothing** spreads a part
# `s` of the probability equally over all classes: $y' = (1-s)\,y + s / \text{classes}$.
#
# - `soft_cross_entropy(logits, labels, smoothing)`: this loss with smoothed labels, a tensor `()`, without PyTorch's
#   own loss functions. Compute in float32 if the logits have 16 bits. Take the logarithm of the softmax in one
#   operation: if logits are hundreds apart, a softmax can be 0 and its logarithm infinite.
# - `top1(logits, soft)`: the fraction of images whose most probable class is the same in logits and label, a tensor
#   `()`.
#
# About 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `tensor.log_softmax(dim=1)`. `logits.to(torch.promote_types(logits.dtype, torch.float32))` widens 16 bits, and leaves
# float64 unchanged. A mean of booleans needs `.float()` first.
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
    """The fraction of images whose most probable class is the same in logits and label: (), float32 or wider."""
    # BEGIN SOLUTION
    return (logits.argmax(dim=1) == soft.argmax(dim=1)).float().mean()
    # END SOLUTION


# %%
tp.check(6, soft_cross_entropy, top1)

# %% [markdown]
# ### Balise 7 · MixUp or CutMix, in the step · further · about 12 min
#
# Training recipes use both and flip a coin for each batch. Flip it on the CPU: a coin flipped on the *device* would
# make the CPU wait.
#
# - `MixOrCut(classes, alpha)`: in training mode, `forward(images, labels)` applies your `mixup` or your `cutmix` to the
#   whole batch, each with probability 1/2. In eval mode it returns the images unchanged, with one-hot labels in
#   float32; soft labels stay unchanged. The same `torch.manual_seed` gives the same batches.
# - `train_step`: mix the batch with `mix(images, labels)`, and compute your loss (`loss`), without smoothing.
#
# About 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `self.training` tells you the mode. `torch.rand(())` is drawn on the CPU. Functions are values: a name can refer to
# either.
# </details>


# %% tags=["balise-7"]
class MixOrCut(nn.Module):
    """MixUp or CutMix for a batch, each half of the time; neither in eval mode."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.classes, self.alpha = classes, alpha

    def forward(self, images, labels):
        # BEGIN SOLUTION
        if not self.training:
            return images, labels if labels.dim() == 2 else F.one_hot(labels, self.classes).float()
        mix = mixup if torch.rand(()) < 0.5 else cutmix  # drawn on the CPU: nothing waits
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
# Race the loop, your versions, and torchvision's, which draw *one* box and one λ for the whole batch.

# %%
saved = tp.predict(
    f"In a batch of {BATCHES[-1]}, how many operations does the loop start for each one that your cutmix starts?", ...
)


# %%
def race_of(n):
    """For each candidate: its operations, and its median seconds, for a batch of n."""
    batch = random_batch(n)
    cut, mix = v2.CutMix(num_classes=CLASSES), v2.MixUp(num_classes=CLASSES)
    candidates = {
        "CutMix, loop": lambda: cutmix_loop(*batch, CLASSES, 1.0),
        "CutMix, yours": lambda: cutmix(*batch, CLASSES, 1.0),
        "CutMix, torchvision": lambda: cut(*batch),
        "MixUp, yours": lambda: mixup(*batch, CLASSES, 1.0),
        "MixUp, torchvision": lambda: mix(*batch),
    }
    medians = measure.race(candidates, repeats=7, warmup=2, device=DEVICE).medians
    return {name: (operations(call), medians[name]) for name, call in candidates.items()}


races = {n: race_of(n) for n in BATCHES}
recorded.note(
    NAME, "race", {"size": SIZE, "seconds": {n: {k: s for k, (_, s) in race.items()} for n, race in races.items()}}
)

# %% jupyter={"source_hidden": true}
columns = {f"measured, {DEVICE}": "{}"} | {f"operations, {n} images": "{:,}" for n in BATCHES}
columns |= {f"time, {n}": measure.human_seconds for n in BATCHES}
rows = [
    (name, *(races[n][name][0] for n in BATCHES), *(races[n][name][1] for n in BATCHES)) for name in races[BATCHES[0]]
]
report.table(columns, rows)
saved.shows(
    races[BATCHES[-1]]["CutMix, loop"][0] / races[BATCHES[-1]]["CutMix, yours"][0],
    "{:.0f}",
    "Yours starts the same number for any batch. The loop starts a few dozen operations for each image.",
)

# %% [markdown]
# A CPU spends much of the time copying pixels. A **modelled** GPU copies 128 images quickly, and waits for Python to
# start the loop's small kernels:


# %% tags=["slide"]
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
# In a whole training step, Python starts many of these kernels while the GPU does other work.
#
# ## Three questions
#
# <details><summary>The training accuracy under CutMix is 60 %, the validation accuracy 75 %. Is something broken?</summary>
#
# No. The training images are mixed: where λ is near one half, even a perfect network is "wrong" half of the time.
# Compare only validation accuracies. (Mixing works against memorising: it pays off in long runs of large networks.)
# </details>
#
# <details><summary>A colleague draws λ = 0.7, cuts a box near the corner, and uses 0.7 for the labels. What goes wrong?</summary>
#
# The box is clipped, so less than 30 % is pasted, but 30 % of the label goes to the partner. The labels claim pixels
# that are not there.
# </details>
#
# <details><summary>Why is <code>if torch.rand((), device="cuda") &lt; 0.5:</code> slow, and how do you avoid it?</summary>
#
# Python must know the number to decide, so the CPU waits until the GPU has finished all work that was queued before.
# Draw on the CPU, or compute both branches and select with <code>torch.where</code>.
# </details>

# %% [markdown] tags=["slide"]
# ## To remember
#
# Augment single images in the workers, as long as they keep up. Mix images on the device: the whole batch, without a
# loop and without reading a value back. Labels must match the pixels that are really there. Next: many devices.
