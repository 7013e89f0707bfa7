# %% [markdown]
# # Compression: smaller, and at times faster
#
# A model is trained once and then asked for years, by phones, by cars, by a thousand requests a second. What it costs is no longer
# the training but each answer: the bytes that are kept and read, the operations, the watts. And a trained network has room. DistilBERT
# answers nearly as well as BERT with 60 % of its numbers, most weights can be set to zero, and eight bits do instead of 32.
#
# Here you write the three ways of using that room. A small network learns from a large one (**distillation**). Numbers get fewer bits
# (**quantization**), in integers and in floating point. Weights become zero (**pruning**), one by one or in the pattern that Tensor Cores
# know. Each is measured on one small network, in bytes, in accuracy and in time; they do not always go together.
#
# **What you will gain.** At the end you can say of a technique what it saves: memory, or time as well, on which machine, and what
# it costs in accuracy; and you have an integer network that runs faster here than the one it was made from.

# %% tags=["setup"]
import copy

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, report, scale, todo

tp = course.open("22_compression")
tp

# %% tags=["setup"]
FULL = scale() == "full"
SEEDS = 5 if FULL else 3
torch.set_num_threads(1)  # the layers are small here: a second thread waits more than it works

# %% [markdown]
# ## The idea
#
# A network of $N$ numbers, of which a share $s$ is zero and each of the others takes $b$ bits, needs about
#
# $$\underbrace{N}_{\text{distillation}} \times \underbrace{(1 - s)}_{\text{pruning}} \times
# \underbrace{b}_{\text{quantization}} \; / \; 8 \quad \text{bytes,}$$
#
# and where the numbers that stayed stand. The techniques work on one factor each, so they can be combined. *Time* is another matter: it falls
# only where the machine has an instruction that profits. Below, the same 16 × 16 weights four times.


# %% jupyter={"source_hidden": true}
def draw_idea():
    weights = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    levels = (weights / 1.1).round().clamp(-2, 1) * 1.1
    large = torch.where(weights.abs() >= weights.abs().median(), weights, 0)
    groups = weights.view(16, 4, 4)
    third = groups.abs().sort(dim=2).values[..., 2:3]
    pattern = torch.where(groups.abs() >= third, groups, 0).view(16, 16)
    _, axes = plt.subplots(1, 4, figsize=(10.5, 2.9), layout="constrained")
    kinds = {"trained: 256 numbers of 32 bits": weights, "quantized: 4 levels, 2 bits": levels,
             "pruned: the smaller half is 0": large, "2:4: two of every four are 0": pattern}  # fmt: skip
    for ax, (title, shown) in zip(axes, kinds.items()):
        ax.imshow(shown.where(shown != 0, torch.nan), cmap="RdBu", vmin=-2.5, vmax=2.5)
        ax.set(title=title, xticks=[], yticks=[])
        ax.grid(False)
    plt.show()


draw_idea()

# %% [markdown]
# ## The baseline
#
# Handwritten digits of 8 × 8 pixels, and a network of two hidden layers, 300 and 100 wide. That is LeNet-300-100, the network on
# which many of these methods were first shown, with batch norm. All sections begin with it.


# %% tags=["setup"]
digits = data.digits()
X, Y = digits.train_x.flatten(1), digits.train_y  # (1438, 64) in [0, 1], (1438,)
VAL_X, VAL_Y = digits.val_x.flatten(1), digits.val_y  # 359 of each
WIDTHS = (300, 100)


def network(seed=0, widths=WIDTHS):
    """Linear, BatchNorm1d and ReLU for each width, then Linear: (n, 64) to (n, 10)."""
    torch.manual_seed(seed)
    layers = []
    for before, after in zip((64, *widths), widths):
        layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def train(model, x=X, y=Y, epochs=10, seed=0, rate=0.1, loss=F.cross_entropy, after=None):
    """The model, trained with SGD and momentum, and in eval mode. after(optimizer) is called after each step."""
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=drawn).split(32):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if after is not None:
                after(optimizer)
    return model.eval()


@torch.no_grad()
def accuracy(model, x=VAL_X, y=VAL_Y):
    return (model(x).argmax(1) == y).double().mean().item()


# %%
teacher = train(network())


@torch.no_grad()
def cost(model):
    """(parameters, bytes, seconds of one image, seconds of 64 images, accuracy)."""
    count, size = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    race = measure.race({"one": lambda: model(VAL_X[:1]), "64": lambda: model(VAL_X[:64])}, repeats=15, device="cpu")
    return count, size, *race.medians.values(), accuracy(model)


def show_cost():
    count, size, one, many, right = cost(teacher)
    print(f"{count:,} parameters, {measure.human_bytes(size)}; accuracy {right:.3f}")
    print(
        f"one image takes {measure.human_seconds(one)}, a batch of 64 {measure.human_seconds(many)}: {64 / many:,.0f} images/s"
    )


show_cost()

# %% [markdown]
# Three numbers to beat, bytes, seconds and accuracy, and 359 images to measure the last one: one image more or less
# is 0.003, so a difference of a few thousandths says nothing.

# %% [markdown]
# ## A teacher and a student
#
# A label says "3". A trained network says "3, and if not, rather an 8 than a 1". These small probabilities are what it has learnt about
# which classes resemble each other, and a student can learn from them (Hinton, Vinyals and Dean, 2015). A well-trained teacher is nearly sure,
# though: its small probabilities are too small to teach anything. So both sets of logits are divided by a **temperature** $T$ before the softmax,
# which brings the classes closer together. With $p$ of the teacher and $q$ of the student, both at temperature $T$, the loss is
#
# $$L \;=\; T^2 \, \frac{1}{n} \sum_i \mathrm{KL}\big(p_i \,\|\, q_i\big) \;+\; \lambda \, \frac{1}{m} \sum_{i \text{ labelled}}
# - \log q^{(T = 1)}_{i,\, y_i} , \qquad \mathrm{KL}(p \,\|\, q) = \sum_c p_c \, (\log p_c - \log q_c) .$$
#
# The gradient of the soft part with respect to the logits shrinks like $1 / T^2$; the factor $T^2$ keeps the balance with the labels when $T$ changes. The direction
# matters as well: $\mathrm{KL}(p \| q)$ is large where the *student* forgets a class that the teacher believes in.
#
# ### Balise 1 · Distillation
#
# **`distillation_loss(student, teacher, labels, temperature, weight)`** returns $L$, one number. `student` and `teacher` are logits
# `(n, classes)`; `labels` `(n,)` are class numbers, and **-1 where there is no label**: the soft part takes these images too, and they count neither in
# the sum nor in the number $m$ of the second part. Without any label the second part is 0. `weight` is $\lambda$. No gradient
# flows into the teacher, and logits in the thousands, or probabilities of 0, shall not give NaN.
#
# 4 to 6 lines, 10 minutes.
#
# <details><summary>Hint</summary>
#
# `F.log_softmax` takes care of large logits. `F.kl_div(log_q, log_p, log_target=True)` is $\mathrm{KL}(p \| q)$: the student stands first. Of its
# reductions, `"mean"` also divides by the number of classes, `"batchmean"` does not. `F.cross_entropy` has `ignore_index` and
# `reduction="sum"`.
# </details>


# %% tags=["balise-1"]
def distillation_loss(student, teacher, labels, temperature, weight):
    """The loss of logits (n, classes) with the teacher's; labels (n,), -1 where there is none."""
    # BEGIN SOLUTION
    mine = F.log_softmax(student / temperature, dim=1)
    its = F.log_softmax(teacher.detach() / temperature, dim=1)
    soft = temperature**2 * F.kl_div(mine, its, reduction="batchmean", log_target=True)
    hard = F.cross_entropy(student, labels, ignore_index=-1, reduction="sum")
    return soft + weight * hard / (labels >= 0).sum().clamp(min=1)
    # END SOLUTION


# %%
tp.check(1, distillation_loss)

# %% [markdown]
# ## The omitted digit
#
# Placeholder after balise 1.

# %% [markdown]
# ## Integers instead of floats
#
# An **affine quantization** keeps, of a real number $x$, a small integer $q$. A **scale** $s$ says how far apart two neighbours are, and
# the **zero point** $z$ says which integer stands for 0:
#
# $$q = \operatorname{clamp}\big(\operatorname{round}(x / s) + z,\ q_{\min},\ q_{\max}\big), \qquad \hat x = (q - z)\, s .$$
#
# Two kinds are in use. *Asymmetric*: from 0 to $2^b - 1$, for what lies on one side, as all that comes out of a ReLU. *Symmetric*: from $-(2^{b-1} - 1)$ to
# $2^{b-1} - 1$ with $z = 0$, for weights: an integer product is cheaper without a zero point.


# %% tags=["setup"]
def limits(bits, symmetric):
    """The least and the greatest integer of `bits` bits."""
    most = 2 ** (bits - 1) - 1
    return (-most, most) if symmetric else (0, 2**bits - 1)


# %% [markdown]
# ### Balise 2 · Affine quantization
#
# - **`extremes(x, axis=None)`** returns the least and the greatest number of `x`, two tensors of shape `()`. With an `axis`, one of
#   each *channel* along it: for `x` of shape `(32, 16, 3, 3)` and `axis=0` two tensors `(32, 1, 1, 1)`, which broadcast with `x`.
# - **`affine(low, high, bits=8, symmetric=False)`** returns the scale, float32, and the zero point, int32, both of the shape of `low` and
#   `high`. The range is first widened to hold 0, so that 0 becomes exactly $z$, and comes back as exactly 0: ReLU and padding make many of them.
#   If symmetric, widen it to as far below 0 as above. Then the least
#   number becomes $q_{\min}$ and the greatest $q_{\max}$, and $z$ is rounded to an integer. Where a range is empty, as in a channel
#   of zeros, any positive scale will do.
# - **`quantize(x, scale, zero, bits=8, symmetric=False)`** returns $q$ in a byte each: `torch.uint8`, or `torch.int8` if symmetric. Round to
#   the nearest, halves to the even neighbour, and *then* add $z$, as the formula says. What lies outside of the range *saturates*: it becomes the nearest limit.
# - **`dequantize(q, scale, zero)`** returns $\hat x$, float32.
#
# No loop over numbers or channels: a scale for each channel broadcasts. About 13 lines in all, 20 minutes.
#
# <details><summary>Hint</summary>
#
# `x.amin(axes, keepdim=True)` takes a list of axes: here all but one. `low.clamp(max=0)` widens a range. `torch.round` rounds halves to the even neighbour.
# A float that is too large for a byte becomes any byte: `clamp` first. And a byte minus a larger one is a
# byte, too: `q.int()` first.
# </details>


# %% tags=["balise-2"]
def extremes(x, axis=None):
    """The least and the greatest number of x: shape (), or of each channel along an axis, with all of x's axes."""
    # BEGIN SOLUTION
    axes = [other for other in range(x.dim()) if other != axis]
    keep = axis is not None
    return x.amin(axes, keepdim=keep), x.amax(axes, keepdim=keep)
    # END SOLUTION


def affine(low, high, bits=8, symmetric=False):
    """(scale, zero point) for numbers from low to high: float32 and int32, of their shape."""
    # BEGIN SOLUTION
    least, most = limits(bits, symmetric)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = (high - low) / (most - least)
    scale = torch.where(scale > 0, scale, 1.0)
    return scale, (least - low / scale).round().int()
    # END SOLUTION


def quantize(x, scale, zero, bits=8, symmetric=False):
    """The integers of x, uint8, or int8 if symmetric. scale and zero broadcast with x."""
    # BEGIN SOLUTION
    q = torch.round(x / scale) + zero
    return q.clamp(*limits(bits, symmetric)).to(torch.int8 if symmetric else torch.uint8)
    # END SOLUTION


def dequantize(q, scale, zero):
    """The real numbers that the integers q stand for, float32."""
    # BEGIN SOLUTION
    return (q.int() - zero) * scale
    # END SOLUTION


# %%
tp.check(2, extremes, affine, quantize, dequantize)

# %% [markdown]
# What do fewer bits cost? Here the weights of the baseline alone are rounded, nothing else, with one scale for each matrix or one for
# each output channel. SNR says how far the rounding error lies below the weights.


# %%
@torch.no_grad()
def rounded(model, bits, axis):
    """(a copy of the model with rounded weights, signal-to-noise ratio in dB of all its matrices)."""
    model, signal, noise = copy.deepcopy(model), 0.0, 0.0
    for layer in model:
        if isinstance(layer, nn.Linear):
            x, way = layer.weight.clone(), (bits, True)
            scale, zero = affine(*extremes(x, axis), *way)
            layer.weight.copy_(dequantize(quantize(x, scale, zero, *way), scale, zero))
            signal, noise = signal + x.square().sum(), noise + (layer.weight - x).square().sum()
    return model, 10 * (signal / noise).log10().item()


def show_rounded():
    print(f"float32: accuracy {accuracy(teacher):.3f}")
    for bits in (8, 6, 4, 3, 2):
        both = [rounded(teacher, bits, axis) for axis in (None, 0)]
        words = [
            f"{name} {accuracy(model):.3f}, {ratio:4.1f} dB"
            for name, (model, ratio) in zip(("a matrix", "a channel"), both)
        ]
        print(f"{bits} bits, one scale for " + "; for ".join(words))


show_rounded()

# %% [markdown]
# <details><summary>What the table says</summary>
#
# A bit more halves the step, and the error has a quarter of its square: 6 dB a bit. A scale for each channel costs four bytes a channel, and helps
# where channels differ in size. Symmetric integers of 2 bits are -1, 0 and 1, and all but the largest weights become 0.
# </details>

# %% [markdown]
# ### Balise 3 · A network in integers
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def integer_layer(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, integer_layer)

# %% [markdown]
# ### Balise 4 · Training through the rounding
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def fake_quantize(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, fake_quantize)

# %% [markdown]
# ## Two bits: with and without training
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · Pruning by magnitude
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def prune(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, prune)

# %% [markdown]
# ## The lottery ticket
#
# Placeholder after balise 5.

# %% [markdown]
# ### Balise 6 · Two of four
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def two_of_four(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, two_of_four)

# %% [markdown]
# ## Why zeros gain no time
#
# Placeholder after balise 6.

# %% [markdown]
# ### Balise 7 · Eight bits of floating point
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def to_float8(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, to_float8)

# %% [markdown]
# ## A training step in FP8
#
# Placeholder after balise 7.

# %% [markdown]
# ## Deployment: ONNX Runtime
#
# Placeholder.

# %% [markdown]
# ## Questions
#
# Placeholder.

# %% [markdown]
# ## In one paragraph
#
# Placeholder.

# %%
tp.progress()
