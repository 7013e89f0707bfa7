# %% [markdown]
# # Compression: smaller, and at times faster · about 100 min, core 30
#
# A model is trained once and then asked for years, by phones, by cars, by a thousand requests a second. What counts now is the cost of an answer:
# the bytes that are kept and read, the operations, the watts. And a trained network has room. DistilBERT answers nearly as well as BERT with
# 60 % of its numbers (Sanh and others, 2019), most weights can be set to zero, and eight bits do instead of 32.
#
# Here you write three ways of using that room. A small network learns from a large one (**distillation**). Numbers get fewer bits
# (**quantization**), in integers and in floating point. Weights become zero (**pruning**), one by one or in the pattern that Tensor Cores know.
#
# **What you will gain.** At the end you can say of a technique what it saves, memory or time as well, on which machine, and what
# it costs in accuracy; and you have seen an integer network that runs several times as fast as the one it was made from.

# %% tags=["setup"]
import contextlib
import copy
import io
import itertools
import logging
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo

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
# and a little more, to say where the numbers stand that stayed. Each technique has its own factor, so they can be combined. *Time* is another matter: it falls
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
# Handwritten digits of 8 × 8 pixels, and a network of two hidden layers, 300 and 100 wide: LeNet-300-100, on which many
# of these methods were first shown. Ours also has batch norm. All sections begin with it.


# %% tags=["setup"]
digits = data.digits()
X, Y = digits.train_x.flatten(1), digits.train_y  # (1438, 64) in [0, 1], (1438,)
VAL_X, VAL_Y = digits.val_x.flatten(1), digits.val_y  # 359 of each
WIDTHS = (300, 100)


def network(seed=0, widths=WIDTHS, norm=True):
    """Linear, BatchNorm1d (if norm) and ReLU for each width, then Linear: (n, 64) to (n, 10)."""
    torch.manual_seed(seed)
    layers = []
    for before, after in zip((64, *widths), widths):
        layers += [nn.Linear(before, after, bias=not norm), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def train(model, x=X, y=Y, epochs=10, seed=0, rate=0.1, loss=F.cross_entropy, after=None):
    """The model, trained with SGD and momentum, and in eval mode. after(optimizer) is called after each step."""
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=drawn).split(64):
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
# Three numbers to beat: bytes, seconds and accuracy. The last is measured on 359 images, so one of them is 0.003, and a few thousandths say nothing.

# %% [markdown]
# ## A teacher and a student
#
# A label says "3". A trained network says "3, and if not, rather an 8 than a 1". These small probabilities are what it has learnt about
# which classes resemble each other, and a student can learn from them (Hinton, Vinyals and Dean, 2015). But a good teacher is nearly sure,
# and they are too small to teach anything. So both sets of logits are divided by a **temperature** $T$ before the softmax,
# which brings the classes closer together. With $p$ of the teacher and $q$ of the student, both at temperature $T$, the loss is
#
# $$L \;=\; T^2 \, \frac{1}{n} \sum_i \mathrm{KL}\big(p_i \,\|\, q_i\big) \;+\; \lambda \, \frac{1}{m} \sum_{i \text{ labelled}}
# - \log q^{(T = 1)}_{i,\, y_i} , \qquad \mathrm{KL}(p \,\|\, q) = \sum_c p_c \, (\log p_c - \log q_c) .$$
#
# The soft part's gradient shrinks like $1 / T^2$; the factor $T^2$ keeps the balance with the labels when $T$ changes. The direction
# matters too: $\mathrm{KL}(p \| q)$ is large where the *student* forgets a class that the teacher believes in.
#
# ### Balise 1 · Distillation · further · about 5 min
#
# **`distillation_loss(student, teacher, labels, temperature, weight)`** returns $L$, one number. `student` and
# `teacher` are logits `(n, classes)`; `weight` is $\lambda$. `labels` `(n,)` are class numbers, **-1 where there is no
# label**: such images count in the soft part alone. The part with the labels is given. Write `soft`, with its $T^2$.
# The teacher is a source of truth here: no gradient flows into it. Logits may be in the thousands: many probabilities
# are then exactly 0, and their logarithm is −∞. So never take the logarithm of a softmax.
#
# About 3 lines.
#
# <details><summary>Hint</summary>
#
# `F.log_softmax` takes care of large logits. `F.kl_div(log_q, log_p, log_target=True)` is $\mathrm{KL}(p \| q)$: the student stands first. Of its
# reductions, `"mean"` also divides by the number of classes, `"batchmean"` does not.
# </details>


# %% tags=["balise-1"]
def distillation_loss(student, teacher, labels, temperature, weight):
    """The loss of logits (n, classes) with the teacher's; labels (n,), -1 where there is none."""
    # BEGIN SOLUTION
    mine = F.log_softmax(student / temperature, dim=1)
    its = F.log_softmax(teacher.detach() / temperature, dim=1)
    soft = temperature**2 * F.kl_div(mine, its, reduction="batchmean", log_target=True)
    # END SOLUTION
    hard = F.cross_entropy(student, labels, ignore_index=-1, reduction="sum")
    return soft + weight * hard / (labels >= 0).sum().clamp(min=1)


# %%
tp.check(1, distillation_loss)

# %% [markdown]
# ## The omitted digit · further
#
# How much is in those small probabilities? Hinton's experiment: take every 3 out of the images that the student learns from. No label ever says "3", no
# image shows one. All it can learn about 3 is what the teacher says of *other* digits: this 2 is a little like a 3, this 4 is not.
#
# A student that never saw a class believes it rare. So one number is corrected afterwards: the last layer's bias of class 3 is
# raised to what is best on training images that it did not learn from. Guess what that gives.

# %%
never_seen = tp.predict(
    "After that correction, which share of the 3s does the distilled student recognise (0 to 1)?", ...
)

# %%
SMALL = (30,)  # the student's widths: one hidden layer
HELD = torch.arange(len(X)) % 5 == 0  # training images that the student does not learn from
SEEN = (Y != 3) & ~HELD


@torch.no_grad()
def logits_of(model, x):
    return model(x)


def student_of(logits, labels, x, seed, temperature=4.0, weight=0.0):
    """A small network that learns from a teacher's logits, and from labels where there are some."""

    def loss(outputs, rows):
        return distillation_loss(outputs, logits[rows], labels[rows], temperature, weight)

    return train(network(seed, SMALL), x, torch.arange(len(x)), seed=seed, loss=loss)


def raise_bias(model, digit=3):
    """Correct the bias of one class to what is best on the held training images."""
    outputs, one = logits_of(model, X[HELD]), F.one_hot(torch.tensor(digit), 10)
    tries = torch.linspace(0, 10, 101)
    right = torch.stack([((outputs + add * one).argmax(1) == Y[HELD]).double().mean() for add in tries])
    model[-1].bias.data[digit] += tries[right.argmax()]
    return model


def recall(model, digit=3):
    return accuracy(model, VAL_X[digit == VAL_Y], VAL_Y[digit == VAL_Y])


def omitted():
    """{what the student learnt from: [(recall of 3, accuracy) of each seed]}"""
    logits, found = logits_of(teacher, X[SEEN]), {"labels": [], "teacher": [], "teacher, bias raised": []}
    for seed in range(SEEDS):
        labelled = train(network(seed, SMALL), X[SEEN], Y[SEEN], seed=seed)
        taught = student_of(logits, Y[SEEN], X[SEEN], seed)
        found["labels"].append((recall(labelled), accuracy(labelled)))
        found["teacher"].append((recall(taught), accuracy(taught)))
        found["teacher, bias raised"].append((recall(raise_bias(taught)), accuracy(taught)))
    return found


# %% jupyter={"source_hidden": true}
def show_omitted():
    found = omitted()
    for name, pairs in found.items():
        recalls, rights = torch.tensor(pairs).T
        print(f"{name:<22} recall of 3: {recalls.mean():.2f} (from {recalls.min():.2f} to {recalls.max():.2f}); "
              f"accuracy on all digits {rights.mean():.3f}")  # fmt: skip
    recalls = [recall for recall, _ in found["teacher, bias raised"]]
    never_seen.shows(sum(recalls) / SEEDS, "{:.2f}", "What a 3 is stood in the teacher's doubts about other digits.")
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    others = [digit for digit in range(10) if digit != 3]
    for temperature in (1, 4):
        said = torch.softmax(logits_of(teacher, X[SEEN]) / temperature, 1)[:, 3]
        left.plot(others, [said[Y[SEEN] == digit].mean() for digit in others], "o-", label=f"T = {temperature}")
    left.set(yscale="log", xticks=others, xlabel="digit on the image", ylabel="mean probability of 3")
    left.set_title("What the teacher says about 3")
    left.legend()
    for k, pairs in enumerate(found.values()):
        right.plot([k] * len(pairs), [one for one, _ in pairs], "o", color=f"C{k}")
    right.set(xticks=range(3), xticklabels=found, ylim=(-0.05, 1.05), ylabel="recall", xlim=(-0.5, 2.5))
    right.set_title("3s recognised by a student that never saw one")
    plt.show()


show_omitted()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# With labels alone the recall is 0: nothing ever pointed at this class. The distilled student has most of what it needs to know a 3; only its
# threshold is wrong, and one number repairs that. At temperature 1 the teacher's mean probability of a 3 is far lower, and so is what can be learnt from it.
# </details>
#
# Is a student then better for having a teacher? Not as such. Below, it learns from labels alone and with the teacher ($\lambda = 0.5$), when
# all images have a label and when only the first 100 do. The teacher had all of them.


# %%
def with_and_without(seed):
    """Accuracy of the student with (all labels, all and the teacher, 100 labels, 100 and the teacher)."""
    few = torch.where(torch.arange(len(Y)) < 100, Y, -1)
    logits = logits_of(teacher, X)
    return (
        accuracy(train(network(seed, SMALL), seed=seed)),
        accuracy(student_of(logits, Y, X, seed, weight=0.5)),
        accuracy(train(network(seed, SMALL), X[:100], Y[:100], epochs=115, seed=seed)),  # as many steps
        accuracy(student_of(logits, few, X, seed, weight=0.5)),
    )


def show_with_and_without():
    rows = torch.tensor([with_and_without(seed) for seed in range(5)])
    names = "all labels", "all labels and the teacher", "100 labels", "100 labels and the teacher"
    print(f"accuracy over {len(rows)} seeds; the teacher's is {accuracy(teacher):.3f}")
    for name, values in zip(names, rows.T):
        print(f"  {name:<28} {values.mean():.3f} ± {values.std():.3f}")
    gain = rows[:, 1] - rows[:, 0]
    word = "no clear difference" if gain.mean().abs() < 2 * gain.std() / len(rows) ** 0.5 else "a difference"
    print(f"With all labels: {gain.mean():+.3f} ± {gain.std() / len(rows) ** 0.5:.3f}, {word}.")


show_with_and_without()

# %% [markdown]
# Distillation pays where the teacher knows what the labels at hand do not say: few labels, images without any, or a teacher that saw far more than this
# data. It also pays with thousands of classes, or words, where a label says little and a distribution much. On ten digits with all labels there is little to add.

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
# ### Balise 2 · Affine quantization · about 11 min
#
# Given is `extremes(x, axis)`, the least and the greatest number of `x`, or of each channel along an axis: for `x` of shape `(32, 16, 3, 3)` and `axis=0` two
# tensors `(32, 1, 1, 1)`, which broadcast with `x`. The rest of a quantizer is yours:
#
# - **`affine(low, high, ...)`**: first widen the range until it holds 0, so that 0 comes back as exactly 0: ReLU and padding make many zeros. Two given steps follow:
#   an empty range gets a width, and a symmetric one reaches as far below 0 as above. Then choose the scale such that `low` becomes $q_{\min}$ and `high` $q_{\max}$. The
#   zero point is the integer that 0 becomes: round it, int32. A symmetric range always has $z = 0$: `integer_linear` below knows no other for weights.
# - **`quantize(x, scale, zero, ...)`** returns $q$ in a byte each, `torch.uint8`, or `torch.int8` if symmetric. Round first, halves to the even neighbour, *then* add $z$, as the
#   formula says. What lies outside of the range *saturates* at the nearest limit.
# - **`dequantize(q, scale, zero)`** returns $\hat x$, float32.
#
# A scale for each channel broadcasts, so no loop. About 6 lines in all.
#
# <details><summary>Hint</summary>
#
# `low.clamp(max=0)` widens a range downwards. `torch.round` rounds halves to the even neighbour. A float that is too large for a byte becomes any byte:
# `clamp` first. And a byte minus a larger one is a byte, too: `q.int()` first.
# </details>


# %% tags=["balise-2"]
def extremes(x, axis=None):
    """The least and the greatest number of x: shape (), or of each channel along an axis, with all of x's axes."""
    axes = [other for other in range(x.dim()) if other != axis]
    keep = axis is not None
    return x.amin(axes, keepdim=keep), x.amax(axes, keepdim=keep)


def affine(low, high, bits=8, symmetric=False):
    """(scale, zero point) for numbers from low to high: float32 and int32, of their shape."""
    least, most = limits(bits, symmetric)
    # BEGIN SOLUTION
    low, high = low.clamp(max=0), high.clamp(min=0)
    # END SOLUTION
    # zeros alone have no width, and the scale must not be 0: any range that holds 0 will do
    high = torch.where(high - low > 1e-37, high, 1.0)
    # as far below 0 as above: the zero point becomes 0
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    # BEGIN SOLUTION
    scale = (high - low) / (most - least)
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
# What do fewer bits cost? Here only the weights of the baseline are rounded, with one scale for each matrix or one for
# each output channel. In dB: how far the rounding error lies below the weights.


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
# A bit more halves the step, and the error has a quarter of its square: 6 dB a bit, and more with the last bits. A scale for each channel costs four bytes a channel, and helps
# where channels differ in size. Symmetric integers of 2 bits are -1, 0 and 1, and all but the largest weights become 0.
# </details>

# %% [markdown]
# ## A network that computes in integers
#
# Rounded weights that are turned back into floats save memory, and no time. An integer unit multiplies bytes, and adds the products in 32 bits.
# Three steps lead there without training (**post-training quantization**, PTQ):
#
# 1. batch norm disappears. After training it is one factor and one shift for each channel, and the layer before it can have them;
# 2. a few hundred training images tell the range of what each layer gives (**calibration**);
# 3. with $x = s_x (q_x - z_x)$ and $w = s_w q_w$, a layer is a sum of integers, and one real factor $M$ brings it to the scale of what comes out:
#
# $$q_y = z_y + \operatorname{round}\Big( M \Big( \sum_k (q_{x,k} - z_x)\, q_{w,k} + q_b \Big) \Big), \qquad M = \frac{s_x s_w}{s_y}, \quad q_b = \operatorname{round}\Big(\frac{b}{s_x s_w}\Big).$$
#
# Even $M$ becomes an integer: `factor / 2**shift`, with a factor of 31 bits (Jacob and others, 2017). Division by a power of
# two is a shift to the right. And ReLU costs nothing: where the range of $y$ begins at 0, $z_y = 0$, and saturation cuts off what is negative.


# %% tags=["setup"]
def fixed_point(real):
    """Two int64 tensors (factor, shift): real numbers between 0 and 1 as factor / 2**shift, with factors of 31 bits."""
    mantissa, exponent = torch.frexp(real.double())
    return (mantissa * 2**31).round().long(), 31 - exponent.long()


# %% [markdown]
# ### Balise 3 · A network in integers · further · about 11 min
#
# - **`fold(layer, norm)`**: the weight and the bias of one layer that does what `layer` and then `norm`, its batch norm in eval mode, do. Write the gain of each channel, and
#   the bias for a layer that has none; the rest is given.
# - **`least_error(x, shares, ...)`**: a rare large number stretches the range, and makes the steps of all others coarse: cutting it off may be better. Of the ranges `share * low` to
#   `share * high` it takes the one with the least error. Write `error(share)`: quantize `x` in that range, turn it back, and return the sum of squared errors, a Python number.
# - **`integer_linear(q, zero, weight, bias, factor, shift, zero_out, bits)`**: the formula above, for a linear layer. `q` uint8 `(n, inputs)` with
#   its zero point; `weight` int8 `(outputs, inputs)`; `bias` int32, `factor` and `shift` int64, one number for each output; `zero_out` is
#   $z_y$. Return $q_y$, uint8 `(n, outputs)`, within `limits(bits, False)`. To round a division by $2^{shift}$, add half of $2^{shift}$ first,
#   then shift. No floats, not even for a moment: an integer unit has none.
#
# 2, 3 and 3 lines.
#
# <details><summary>Hint</summary>
#
# Batch norm is $y = \gamma\,(x - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta$; its numbers are `norm.weight`, `running_mean`, `running_var`, `eps`, `bias`. `total >> shift` shifts, and the
# product with a factor of 31 bits needs 64 bits.
# </details>


# %% tags=["balise-3"]
def fold(layer, norm):
    """(weight, bias) of one layer that does what layer and norm, a batch norm in eval mode, do together."""
    # BEGIN SOLUTION
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = norm.bias - norm.running_mean * gain
    # END SOLUTION
    if layer.bias is not None:
        bias = bias + layer.bias * gain
    return layer.weight * gain.view(-1, *[1] * (layer.weight.dim() - 1)), bias


def least_error(x, shares, bits=8, symmetric=False):
    """(low, high): the extremes of x times the share with which rounding x has the least squared error."""
    low, high = extremes(x)

    def error(share):
        # BEGIN SOLUTION
        scale, zero = affine(share * low, share * high, bits, symmetric)
        back = dequantize(quantize(x, scale, zero, bits, symmetric), scale, zero)
        return (back - x).square().sum().item()
        # END SOLUTION

    # calls error for each share
    best = min(shares, key=error)
    return best * low, best * high


def integer_linear(q, zero, weight, bias, factor, shift, zero_out, bits=8):
    """A linear layer on integers: uint8 (n, inputs) to uint8 (n, outputs). The sums have 32 bits."""
    # BEGIN SOLUTION
    total = (q.int() - zero) @ weight.int().T + bias
    moved = (total * factor + (1 << (shift - 1))) >> shift
    return (moved + zero_out).clamp(*limits(bits, False)).to(torch.uint8)
    # END SOLUTION


# %%
tp.check(3, fold, least_error, integer_linear)

# %% [markdown]
# ### The whole network in integers
#
# Your functions, put together: batch norm folded, ranges from 256 training images, a scale for each channel of a weight. A *percentile* here
# leaves out one number in a thousand at each end.


# %%
@torch.no_grad()
def folded(model):
    """[(weight, bias)] of a network of Linear, BatchNorm1d and ReLU, without its batch norms."""
    layers = list(model)
    pairs = [fold(one, after) for one, after in zip(layers, layers[1:]) if isinstance(after, nn.BatchNorm1d)]
    return [*pairs, (layers[-1].weight, layers[-1].bias)]


@torch.no_grad()
def layer_by_layer(pairs, x):
    """What goes into each layer, and what comes out of the last."""
    seen = [x]
    for k, pair in enumerate(pairs, 1):
        x = F.linear(x, *pair)
        x = x.relu() if k < len(pairs) else x
        seen.append(x)
    return seen


@torch.no_grad()
def to_integers(pairs, ranges, bits=8):
    """Of each layer what `integer_linear` is given after q, and scale and zero point of the images."""
    found = []
    for (weight, bias), before, after in zip(pairs, ranges, ranges[1:]):
        (x_scale, x_zero), (y_scale, y_zero) = affine(*before, bits), affine(*after, bits)
        scale, zero = affine(*extremes(weight, 0), bits, symmetric=True)
        step = (x_scale * scale).flatten().double()
        q = quantize(weight, scale, zero, bits, symmetric=True)
        found.append((x_zero, q, (bias / step).round().int(), *fixed_point(step / y_scale), y_zero, bits))
    return found, affine(*ranges[0], bits)


def run_integers(layers, start, x):
    """From images to the bytes that come out of each layer."""
    seen = [quantize(x, *start, layers[0][-1])]
    for layer in layers:
        seen.append(integer_linear(seen[-1], *layer))
    return seen


# %%
SHARES = [k / 50 for k in range(10, 51)]
CALIBRATION = {
    "extremes": lambda x, bits: extremes(x),
    "percentile": lambda x, bits: (x.quantile(0.001), x.quantile(0.999)),
    "least error": lambda x, bits: least_error(x, SHARES, bits),
}


def show_integers():
    pairs = folded(teacher)
    seen = layer_by_layer(pairs, X[:256])
    assert torch.allclose(seen[-1], teacher(X[:256]), atol=1e-3), "the folded layers are not the teacher"
    print(f"float32: accuracy {accuracy(teacher):.3f}, {sum(w.nbytes + b.nbytes for w, b in pairs):,} bytes")
    for bits in (8, 6, 4, 3):
        found = {name: to_integers(pairs, [way(x, bits) for x in seen], bits) for name, way in CALIBRATION.items()}
        words = [f"{name} {accuracy(lambda x, net=net: run_integers(*net, x)[-1]):.3f}" for name, net in found.items()]
        print(f"{bits} bits: " + ", ".join(words))
    layers, start = to_integers(pairs, [extremes(x) for x in seen])
    print(f"8 bits: {sum(one.nbytes for layer in layers for one in layer[1:5]):,} bytes")
    whole, real = run_integers(layers, start, VAL_X)[1], layer_by_layer(pairs, VAL_X)[1]
    same = quantize(real, *affine(*extremes(seen[1]))) == whole
    print(f"of the first layer's bytes {same.double().mean():.1%} are those of the float network, rounded")
    runs = {"float32": lambda: layer_by_layer(pairs, VAL_X), "integers": lambda: run_integers(layers, start, VAL_X)}
    race = measure.race(runs, repeats=5, device="cpu")
    print(
        f"{len(VAL_X)} images in PyTorch: "
        + ", ".join(f"{name} {measure.human_seconds(s)}" for name, s in race.medians.items())
    )


show_integers()

# %% [markdown]
# With 8 bits, the accuracy differs from the float network's by an image or two, whichever way the range was found. With 4 and 3 bits the ways differ by a few images at
# most. It is small, but not fast: PyTorch hands float matrices to a library that uses all that the processor has, but not those of int32 that
# `integer_linear` multiplies. Its kernels for bytes are others, and a network usually goes to another library for them: see the end of this work.

# %% [markdown]
# ## Training through the rounding
#
# With very few bits a network loses accuracy, unless it may adapt its weights to the rounding: **quantization-aware training** (QAT).
# The weights stay float32, and are rounded and turned back in the forward pass (*fake* quantization), so the loss sees what integers would do.
# But rounding is a staircase, and its derivative is 0 nearly everywhere.
#
# The **straight-through estimator** (Bengio and others, 2013) takes another one instead: 1, as if nothing had been rounded. And 0 where a
# number is saturated: if such a number grows a little more, the result does not change. At the end of the range you may choose: from the last integer to half a
# step after it, a derivative of 0 is as good as 1.
#
# $$\frac{\partial \hat x}{\partial x} := \begin{cases} 1 & q_{\min} \le \operatorname{round}(x / s) + z \le q_{\max} \\ 0 & \text{elsewhere} \end{cases}$$
#
# ### Balise 4 · Training through the rounding · further · about 5 min
#
# - **`fake_quantize(x, scale, zero, ...)`** returns $\hat x$, float32, with the gradient above. Given are `back`, which is $\hat x$ without a gradient, and `steps`,
#   the integers before they saturate. Write what is returned.
# - **`fake_layer(layer, x, high, bits)`** returns what `layer`, an `nn.Linear`, or an `nn.Conv2d` with its stride, padding, dilation and groups, gives for rounded inputs, between 0 and `high`,
#   and rounded weights. Scales and zero points are given. The bias is not rounded. The float32 weights of
#   the layer stay as they are, and get the gradient: an optimizer moves them by less than a step of the grid at a time, which would be lost if they were rounded themselves.
#
# 1 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `x - x.detach()` is 0, and its gradient is 1: multiply it by a mask, and add it to something without a gradient. `torch.func.functional_call(layer, {"weight": other}, x)` calls a layer with
# another weight, and leaves it as it is.
# </details>


# %% tags=["balise-4"]
def fake_quantize(x, scale, zero, bits=8, symmetric=False):
    """x, rounded and turned back; the gradient passes where nothing is saturated."""
    least, most = limits(bits, symmetric)
    with torch.no_grad():
        back = dequantize(quantize(x, scale, zero, bits, symmetric), scale, zero)
        steps = torch.round(x / scale) + zero
    # BEGIN SOLUTION
    return back + (x - x.detach()) * ((steps >= least) & (steps <= most))
    # END SOLUTION


def fake_layer(layer, x, high, bits):
    """What a layer gives with rounded inputs, from 0 to high, and rounded weights, one scale a channel."""
    # scale and zero point, of the weights as they are now
    with torch.no_grad():
        of_weight = affine(*extremes(layer.weight, 0), bits, symmetric=True)
        of_x = affine(torch.zeros_like(high), high, bits)
    # BEGIN SOLUTION
    weight = fake_quantize(layer.weight, *of_weight, bits, symmetric=True)
    return torch.func.functional_call(layer, {"weight": weight}, fake_quantize(x, *of_x, bits))
    # END SOLUTION


# %%
tp.check(4, fake_quantize, fake_layer)


# %% jupyter={"source_hidden": true}
def draw_staircase():
    """Yours, for 3 bits: the value and the gradient."""
    x = torch.linspace(-2.2, 2.2, 881, requires_grad=True)
    scale, zero = affine(torch.tensor(-1.5), torch.tensor(1.5), 3, symmetric=True)
    y = fake_quantize(x, scale, zero, 3, symmetric=True)
    (slope,) = torch.autograd.grad(y.sum(), x)
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharex=True)
    left.plot(x.detach(), x.detach(), color="#999999", linestyle="--", label="x")
    left.plot(x.detach(), y.detach(), color="#0072B2", label="rounded to 3 bits")
    left.set(title="Forward: a staircase", xlabel="x", ylabel="what comes out")
    left.legend()
    right.plot(x.detach(), slope, color="#D55E00")
    right.set(title="Backward: as if there were none", xlabel="x", ylabel="gradient", ylim=(-0.1, 1.2))
    plt.show()


draw_staircase()

# %% [markdown]
# ## Few bits: with and without training · further
#
# The baseline once more, with inputs and weights of all three layers rounded: as it is (PTQ), and after `EPOCHS` more epochs with the rounding in the forward pass (QAT). To be fair,
# the float network gets as many more. With 2 bits, a weight is -1, 0 or 1, times its channel's scale. Guess.

# %%
two_bits = tp.predict("What is the accuracy with 2 bits, not trained for it (0 to 1)?", ...)


# %%
class Rounded(nn.Module):
    """A linear layer that is rounded at each call: fake quantization."""

    def __init__(self, layer, high, bits):
        super().__init__()
        self.layer, self.high, self.bits = layer, high, bits

    def forward(self, x):
        return fake_layer(self.layer, x, self.high, self.bits)


def without_norms(model, bits=None):
    """A network with the batch norms folded; with `bits` all of its layers are rounded."""
    pairs, layers = folded(model), []
    for (weight, bias), x in zip(pairs, layer_by_layer(pairs, X[:256])):
        layer = nn.Linear(*reversed(weight.shape))
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers += [Rounded(layer, least_error(x, SHARES, bits)[1], bits) if bits else layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# %%
EPOCHS = 10 if FULL else 5
by_bits = {}  # bits: accuracy of PTQ, of QAT


def longer(model):
    return train(model, epochs=EPOCHS, rate=0.01)


def show_training():
    print(f"float32: {accuracy(teacher):.3f}, {EPOCHS} epochs later {accuracy(longer(without_norms(teacher))):.3f}")
    for bits in (8, 4, 3, 2):
        model = without_norms(teacher, bits)
        by_bits[bits] = accuracy(model), accuracy(longer(model))
        print(f"{bits} bits: PTQ {by_bits[bits][0]:.3f}, QAT {by_bits[bits][1]:.3f}")
    two_bits.shows(by_bits[2][0], "{:.2f}", "Which weights are large, and their signs, already say much.")


show_training()

# %% [markdown]
# Down to 3 bits there is nothing to repair that 359 images would show. With 2 bits the loss is plain, and most of it comes back. The float network gained nothing from its
# additional epochs: it is the rounding in the forward pass that helps, not the longer training.

# %% [markdown]
# ## Fewer weights
#
# Fewer bits take something from every weight. **Pruning** takes some away whole. Which ones? Those with the smallest
# $|w|$: in a large comparison none of the cleverer choices was reliably better (Gale, Elsen and Hooker, 2019). One can take the smallest of
# each layer, or of the whole network, which takes most from layers with many inputs: their weights are smaller. Then the network is trained a little more
# (*fine-tuning*), so that what stayed makes up for what went.
#
# Meanwhile the zeros must stay zero, and that is less simple than it looks. A pruned weight still has a gradient. With its gradient
# set to 0, momentum gathered before the pruning would still move it, and so would Adam's averages. So the zeros are put back after each step, in
# the weight and in all that the optimizer remembers of it.
#
# ### Balise 5 · Pruning by magnitude · about 9 min
#
# - **`magnitude_masks(weights, sparsity, by_layer=False)`** returns a mask for each tensor of the list `weights`, of booleans, `True` where the weight stays. Of the `n` weights of a
#   group, all together or one tensor, the `round(sparsity * n)` smallest in magnitude go: exactly that number, also where many are equal, as the zeros of an earlier pruning. The groups,
#   their magnitudes in one row (`sizes`), and the way back to the shapes are given. Write `mask` for that row.
# - **`hold_zeros(weights, masks, optimizer)`** puts the zeros back, in place: in each weight, and in everything of the weight's shape that the optimizer
#   remembers of it, under whatever name. `optimizer.state[weight]` is a dictionary; it can be empty, and it also holds other things, such as a count of steps, or tensors of another shape.
#
# 2 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `argsort`, and a mask of `True` in which the first places of that order are set to `False`. A threshold will not do where
# magnitudes are equal. `weight.masked_fill_(~mask, 0)` works in place.
# </details>


# %% tags=["balise-5"]
def magnitude_masks(weights, sparsity, by_layer=False):
    """Masks of booleans, False for the share `sparsity` that is smallest in magnitude: of all weights, or of each."""
    masks = []
    for group in [[one] for one in weights] if by_layer else [weights]:
        sizes = torch.cat([one.detach().abs().flatten() for one in group])
        # BEGIN SOLUTION
        mask = torch.ones_like(sizes, dtype=torch.bool)
        mask[sizes.argsort()[: round(sparsity * len(sizes))]] = False
        # END SOLUTION
        masks += [part.view_as(one) for part, one in zip(mask.split([one.numel() for one in group]), group)]
    return masks


@torch.no_grad()
def hold_zeros(weights, masks, optimizer):
    """Zero, in place, what is pruned of the weights, and of all in their shape that the optimizer remembers of them."""
    for weight, mask in zip(weights, masks):
        # BEGIN SOLUTION
        for one in (weight, *optimizer.state[weight].values()):
            if isinstance(one, torch.Tensor) and one.shape == weight.shape:
                one.masked_fill_(~mask, 0)
        # END SOLUTION


# %%
tp.check(5, magnitude_masks, hold_zeros)

# %% [markdown]
# How much can go? The teacher is pruned by magnitude over the whole network, by magnitude in each layer, and at random,
# which shows what the choice is worth; then it is trained for three more epochs. Guess.

# %%
without = tp.predict("Accuracy without the smallest 90 % of all weights, three epochs later (0 to 1)?", ...)


# %%
def weights_of(model):
    """The matrices of the linear layers; batch norm and biases are few, and stay."""
    return [layer.weight for layer in model if isinstance(layer, nn.Linear)]


def holding(model, masks):
    """For `train`: what is called after each step."""
    return lambda optimizer: hold_zeros(weights_of(model), masks, optimizer)


def pruned(sparsity, kind):
    """Accuracy of the teacher without its smallest (or any) weights, and after three more epochs."""
    model = copy.deepcopy(teacher)
    weights = weights_of(model)
    if kind == "at random":
        torch.manual_seed(0)
        weights = [torch.rand_like(one) for one in weights]
    masks = magnitude_masks(weights, sparsity, kind == "each layer")
    hold = holding(model, masks)
    hold(torch.optim.SGD(model.parameters()))
    before = accuracy(model)
    return before, accuracy(train(model, epochs=3, rate=0.05, after=hold)), masks


# %% jupyter={"source_hidden": true}
def show_pruned(shares=(0.5, 0.8, 0.9, 0.95, 0.98)):
    found = {kind: [pruned(share, kind) for share in shares] for kind in ("whole network", "each layer", "at random")}
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
    for k, (kind, rows) in enumerate(found.items()):
        for ax, values in ((left, [row[0] for row in rows]), (right, [row[1] for row in rows])):
            ax.plot([f"{share:.0%}" for share in shares], values, "o-", color=f"C{k}", label=kind)
        print(
            f"{kind:<14}" + "   ".join(f"{share:.0%}: {row[0]:.2f} → {row[1]:.2f}" for share, row in zip(shares, rows))
        )
        if kind == "whole network":
            stay = ", ".join(f"{mask.double().mean():.1%} of {mask.shape[1]} × {mask.shape[0]}" for mask in rows[3][2])
    print(f"Of each layer there stay, at {shares[3]:.0%} over the whole network: {stay}.")
    for ax, title in ((left, "Pruned"), (right, "Pruned, and three more epochs")):
        ax.axhline(accuracy(teacher), color="0.4", ls=":", lw=1)
        ax.set(title=title, xlabel="weights that are zero", ylim=(0, 1.02))
    left.set_ylabel("accuracy")
    right.legend(loc="lower left")
    plt.show()
    without.shows(found["whole network"][2][1], "{:.2f}", "It had far more numbers than ten digits ask for.")


show_pruned()

# %% [markdown]
# The dotted line is the teacher. Pruning alone costs a lot, early: batch norm's running averages were those of another network. A few
# epochs bring it back. At the far end the two ways of choosing part: over the whole network
# the small last layer keeps much and the one with 300 inputs next to nothing, until too few of its weights are left for anything to pass.

# %% [markdown]
# ## The lottery ticket · further
#
# If a twentieth of the weights is enough, why train the others? Prune first, then train: this rarely worked as well. Frankle and Carbin (2018) found out when it does. Train
# the whole network, look which weights are large, put *those* back to the values that they began with, and train them alone: they learn as well as the whole. With the same
# mask but newly drawn values they do not. A large network, they say, is a book of lottery tickets: one of its small networks had the luck to begin well. Below, with 95 % of zeros.

# %%
DRAWS = {"first values (the ticket)": 0, "newly drawn": 1000}


def ticket(seed, norm, sparsity=0.95):
    """Accuracy of the whole network, and of the weights that are large in it, trained alone from each of DRAWS."""
    whole = train(network(seed, norm=norm), seed=seed)
    masks, found = magnitude_masks(weights_of(whole), sparsity, by_layer=True), [accuracy(whole)]
    for other in DRAWS.values():
        model = network(seed + other, norm=norm)
        hold = holding(model, masks)
        hold(torch.optim.SGD(model.parameters()))
        found.append(accuracy(train(model, seed=seed, after=hold)))
    return found


# %% jupyter={"source_hidden": true}
def show_tickets():
    names, found = ["whole network", *DRAWS], []
    for norm in (True, False):
        found.append(torch.tensor([ticket(seed, norm) for seed in range(SEEDS)]))
    _, axes = plt.subplots(1, 2, figsize=(10, 3.1), layout="constrained", sharey=True)
    for ax, norm, rows in zip(axes, (True, False), found):
        word = "with batch norm" if norm else "without batch norm"
        print(f"{word:<19}" + ", ".join(f"{name} {v.mean():.3f} ± {v.std():.3f}" for name, v in zip(names, rows.T)))
        for k in range(3):
            ax.plot([k] * len(rows), rows[:, k], "o", color=f"C{k}")
        ax.set(title=f"{word.capitalize()}, {len(rows)} seeds", xticks=range(3), xticklabels=names, xlim=(-0.5, 2.5))
    axes[0].set_ylabel("accuracy, 95 % of zeros")
    plt.show()


show_tickets()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# Without batch norm half of it is as the paper says: the same places with other values learn less well. But the ticket, too, stays behind the whole. With batch norm there is next to no difference: what was
# lucky in the first draw seems to be mostly its scale, which batch norm sets right for any draw. A finding
# of one architecture is not yet one of the next.
# </details>

# %% [markdown]
# ## A pattern that hardware knows
#
# Zeros anywhere are of no use to a processor that multiplies whole blocks. Tensor Cores, from the A100 on, know one pattern: **2:4**. Of every four
# consecutive weights of a row, those that meet four consecutive inputs, at most two are not zero. The two are stored side by side, with two bits each that say which of the four they were,
# and the core picks the inputs that they need: half of the products, in half of the time.
#
# A pattern is a constraint: where three large weights stand in one group of four, one must go. But the inputs of a
# layer are the hidden channels of the one before, and **their order is free**: sort the rows of the first matrix, its bias and the columns of the second
# in the same way, and the network computes what it did, while other weights share a group. A good order saves magnitude for nothing (Pool and Yu, 2021).
#
# ### Balise 6 · Two of four · further · about 11 min
#
# - **`two_of_four(weight)`**: a mask of booleans of the shape of `weight`, `(outputs, inputs)`: `True` for the two of largest magnitude in every four consecutive
#   inputs of a row, exactly two, also where magnitudes are equal.
# - **`reorder(first, bias, second, order)`**: `first` `(hidden, inputs)` and `bias` `(hidden,)` make the hidden channels, `second` `(outputs, hidden)` takes them. Return the three with
#   the channels in another order: the new channel `k` is the old channel `order[k]`.
# - **`order_columns(weight)`** goes through all pairs of columns, again and again, until no exchange makes `saved`, the
#   magnitude that 2:4 keeps, larger. The loop is given, and the order `other` with columns `i` and `j` exchanged. Write
#   when it becomes the order: if `saved`, of all columns or of the two groups alone, grows by more than a millionth, so that
#   rounding alone exchanges nothing.
#
# 3, 1 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `reshape` to `(outputs, groups, 4)`, `topk(2)` of the last axis gives `indices`, and `scatter` writes `True` at these places of a mask of `False`. `weight[:, order]` has the columns in an order.
# </details>


# %% tags=["setup"]
def saved(weight):
    """The sum of the magnitudes that 2:4 keeps of a weight (outputs, inputs)."""
    return weight.abs().reshape(len(weight), -1, 4).topk(2).values.sum().item()


# %% tags=["balise-6"]
def two_of_four(weight):
    """A mask of booleans: the two largest of every four consecutive inputs. weight (outputs, inputs)."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs do not divide into groups of four")
    # BEGIN SOLUTION
    groups = weight.abs().reshape(len(weight), -1, 4)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter(2, groups.topk(2).indices, True).reshape(weight.shape)
    # END SOLUTION


def reorder(first, bias, second, order):
    """The same network with its hidden channels in another order."""
    # BEGIN SOLUTION
    return first[order], bias[order], second[:, order]
    # END SOLUTION


def order_columns(weight):
    """An order of the columns after which no exchange of two of them saves more magnitude."""
    order, exchanged = torch.arange(weight.shape[1]), True
    while exchanged:
        exchanged = False
        for i, j in itertools.combinations(range(len(order)), 2):
            other = order.clone()
            other[i], other[j] = order[j], order[i]
            # BEGIN SOLUTION
            # only two groups change: the others need not be summed
            both, after = (torch.cat([one[i // 4 * 4 :][:4], one[j // 4 * 4 :][:4]]) for one in (order, other))
            if i // 4 != j // 4 and saved(weight[:, after]) > (1 + 1e-6) * saved(weight[:, both]):
                order, exchanged = other, True
            # END SOLUTION
    return order


# %%
tp.check(6, two_of_four, reorder, order_columns)

# %% [markdown]
# What the pattern costs the teacher: the share of magnitude that stays, and its accuracy, at once and after three more epochs.


# %%
def in_pattern(model, masks):
    """Accuracy with the weights of these masks alone, and after three more epochs."""
    model = copy.deepcopy(model)
    hold = holding(model, masks)
    hold(torch.optim.SGD(model.parameters()))
    return accuracy(model), accuracy(train(model, epochs=3, rate=0.05, after=hold))


def show_patterns():
    weights = weights_of(teacher)
    patterns = {
        "half, anywhere in a layer": magnitude_masks(weights, 0.5, by_layer=True),
        "2:4": [two_of_four(one.detach()) for one in weights],
    }
    for name, masks in patterns.items():
        kept = sum((one.abs() * mask).sum() for one, mask in zip(weights, masks)) / sum(
            one.abs().sum() for one in weights
        )
        before, after = in_pattern(teacher, masks)
        print(f"{name:<26} keeps {kept:.1%} of the magnitude; accuracy {before:.3f}, tuned {after:.3f}")
    last = weights[-1].detach()
    ordered = last[:, order_columns(last)]
    best = magnitude_masks([last], 0.5)[0]
    print(f"of the last matrix, {len(last)} × {last.shape[1]}, 2:4 keeps {saved(last) / last.abs().sum():.1%}; with its channels in another "
          f"order {saved(ordered) / last.abs().sum():.1%}; half of it anywhere would be {(last * best).abs().sum() / last.abs().sum():.1%}")  # fmt: skip


show_patterns()

# %% [markdown]
# The choice in groups of four costs some magnitude, and next to no accuracy once the rest is trained. On the last matrix a good order wins most of it back: ten
# rows have to agree on it; in a matrix of a thousand rows that is harder. Of 4 × 16 bits there remain 2 × 16, and two places of 2 bits.

# %% [markdown]
# ## Why zeros gain no time · further
#
# Half of the weights are zero, so half of the products need not be computed. But who leaves them out? A processor multiplies eight or sixteen pairs of numbers at once; to ask
# of each whether it is zero costs more than the product. A *sparse* format (CSR, *compressed sparse rows*) holds only the numbers that are not zero, and where each of them stands. It does fewer
# operations, but a dense product uses what it has read into registers many times, and this one only once. Guess, for a matrix of 1,024 × 1,024 times 64 columns.

# %%
half = tp.predict("With half of zeros, how many times as long as the dense product takes the sparse one?", ...)

# %%
ZEROS = 0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99


@torch.no_grad()
def race_zeros(n=1024, columns=64):
    """{share of zeros: (seconds of the dense product, of the sparse one)}"""
    drawn = torch.Generator().manual_seed(0)
    x, found = torch.randn(n, columns, generator=drawn), {}
    for share in ZEROS:
        weight = torch.randn(n, n, generator=drawn)
        weight[torch.rand(n, n, generator=drawn) < share] = 0
        with warnings.catch_warnings(action="ignore"):  # that sparse tensors are in beta
            sparse = weight.to_sparse_csr()
        one = measure.race({"dense": lambda w=weight: w @ x, "sparse": lambda w=sparse: w @ x}, 15, 2, "cpu")
        found[share] = tuple(min(times) for times in one.seconds.values())  # what others do here only adds
    return found


# %% jupyter={"source_hidden": true}
def show_zeros():
    found = race_zeros()
    dense, sparse = ([1000 * one[k] for one in found.values()] for k in (0, 1))
    names = [f"{share:.0%}" for share in found]
    print(
        f"dense: {dense[0]:.2f} ms without zeros, {dense[1]:.2f} ms with half of them, {dense[-1]:.2f} ms with {names[-1]}"
    )
    half.shows(sparse[1] / dense[1], "× {:.1f}", "Half of the products, but each of them has to be looked up.")
    print(
        f"sparse: with {names[3]} of zeros {sparse[3] / dense[3]:.2f} times as long, for {1 - ZEROS[3]:.0%} of the products"
    )
    faster = [name for name, one, other in zip(names, dense, sparse) if other < one]
    print(f"sparse is faster from {faster[0]} of zeros on." if faster else "sparse is never faster here.")
    _, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
    ax.plot(names, dense, "o-", label="dense: zeros are multiplied too")
    ax.plot(names, sparse, "o-", label="sparse (CSR)")
    ax.set(yscale="log", xlabel="weights that are zero", ylabel="milliseconds")
    ax.set_title("1,024 × 1,024 times 64 columns, one thread: what do zeros save?")
    ax.legend()
    plt.show()


show_zeros()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# The dense product takes the same time whatever it multiplies. The sparse one falls with the numbers that are left, from far above, and
# where it pays at all, it gains far less than the zeros promise. Memory is gained wherever the weights are stored in such a format.
#
# 2:4 is the way out: regular enough that every block has as much to do as any other. NVIDIA's data sheet of the A100 has 312 TFLOP/s for dense bfloat16 and 624 with 2:4:
# the peak of a matrix product. Mishra and others (2021, *Accelerating Sparse Deep Neural Networks*) describe the format,
# and train networks with it that lose no accuracy. In PyTorch, `torch.sparse.to_sparse_semi_structured` makes such a weight; it needs a GPU from the A100 on.
# </details>

# %% [markdown]
# ## Eight bits with an exponent
#
# Back to fewer bits. An integer's steps are all of one size. A floating-point number has steps that grow with it: its *relative* error stays the same over a wide range, and a scale need not
# be exact. Of eight bits, one is the sign. **E4M3** has four bits of exponent and three of *mantissa*, **E5M2** has five and two (Micikevicius and others, 2022,
# arXiv 2209.05433). With $m$ bits of mantissa, and the exponent $e_{\min}$ of the least *normal* number,
#
# $$\hat x = \operatorname{round}\Big(\frac{x}{\delta}\Big)\, \delta, \qquad \delta = 2^{\,\max(\lfloor \log_2 |x| \rfloor,\; e_{\min}) - m} :$$
#
# between two powers of two there are $2^m$ numbers, at equal distances $\delta$. Below $2^{e_{\min}}$ the exponent can go no lower, and the distance stays as it is down to 0: the *subnormal* numbers.
#
# | | $m$ | $e_{\min}$ | least above 0 | largest | |
# |---|---|---|---|---|---|
# | E4M3 | 3 | -6 | $2^{-9}$ | 448 | no infinities, so that one more power of two fits |
# | E5M2 | 2 | -14 | $2^{-16}$ | 57,344 | a float16 whose mantissa was cut off |
# | E2M1 | 1 | 0 | $2^{-1}$ | 6 | four bits, sixteen codes |
#
# The ranges are narrow, so a tensor gets a scale, as with integers: one, or a **block scale** for every 32 consecutive numbers. The microscaling formats (MX) keep a
# block's scale in a byte of exponent alone (E8M0): a power of two from $2^{-127}$ to $2^{127}$. It only moves exponents, rounds nothing itself, and
# costs a quarter of a bit for each number.

# %% tags=["setup"]
E4M3 = 3, -6, 448.0  # bits of mantissa, exponent of the least normal number, largest number
E5M2 = 2, -14, 57344.0
E2M1 = 1, 0, 6.0

# %% [markdown]
# ### Balise 7 · Eight bits of floating point · further · about 9 min
#
# - **`round_float(x, mantissa, least, most)`** returns $\hat x$, float32, of the shape of `x`: rounded to `mantissa` bits, with `least` for $e_{\min}$, halves to the even neighbour. Given is what is larger
#   than `most`: it *saturates*.
# - **`tensor_scale(x, most)`** is one scale, `()`, that brings the largest magnitude of `x` to `most`: rounded is $x / s$, and $s$ times that is about $x$, as with integers.
# - **`block_scales(x, most, size=32)`** is a float32 tensor of the shape of `x`: for each number the scale of its
#   block, `size` consecutive numbers of the last axis. A scale is the least power of two, from $2^{-127}$ on, such that
#   no number of its block, divided by it, is larger than `most`. Given: `blocks`, of shape `(..., blocks, size)`, and
#   the way back. Write `exponent`, one for each block.
#
# No loop over numbers or rows. 3, 1 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `torch.frexp(x)` gives $x = a \cdot 2^e$ with $\frac12 \le a < 1$, so $\lfloor \log_2 |x| \rfloor$ is $e - 1$. `torch.exp2` makes powers of two; `amax`, `log2` and `ceil` find the exponent of a block, to the last bit if `log2` is given float64.
# </details>


# %% tags=["balise-7"]
def round_float(x, mantissa, least, most):
    """x float32, rounded to a format: bits of its mantissa, exponent of its least normal number, its largest number."""
    x = x.clamp(-most, most)
    # BEGIN SOLUTION
    _, exponent = torch.frexp(x)
    step = torch.exp2((exponent - 1).clamp(min=least) - mantissa)
    return torch.round(x / step) * step
    # END SOLUTION


def tensor_scale(x, most):
    """One scale, (): the largest magnitude of x, divided by it, is `most`."""
    # BEGIN SOLUTION
    scale = x.abs().amax() / most
    # END SOLUTION
    # for a tensor of zeros any scale will do
    return torch.where(scale > 0, scale, 1.0)


def block_scales(x, most, size=32):
    """For each number of x the scale of its block of `size` numbers of the last axis: a power of two."""
    # the last block is filled up with 0
    blocks = F.pad(x.abs(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    # BEGIN SOLUTION
    exponent = torch.log2(blocks.amax(-1).double() / most).ceil().clamp(min=-127).float()
    # END SOLUTION
    return torch.exp2(exponent).repeat_interleave(size, -1)[..., : x.shape[-1]]


# %%
tp.check(7, round_float, tensor_scale, block_scales)

# %% [markdown]
# What does the exponent buy? On the left, the largest error in rounding a number of a given size, with one scale that makes 448 the largest. On the right,
# 64 × 512 random numbers, one of which is made larger and larger: how far does the rounding error of all the *others* lie below them?


# %%
def rounded8(x, form, scales):
    """x, rounded to a format (bits of mantissa, least exponent, largest number) with scales(x, largest number)."""
    scale = scales(x, form[-1])
    return round_float(x / scale, *form) * scale


def as_integers(x):
    """x as symmetric integers of 8 bits, with one scale, and back."""
    scale, zero = affine(*extremes(x), symmetric=True)
    return dequantize(quantize(x, scale, zero, symmetric=True), scale, zero)


EIGHT_BITS = {
    "int8, one scale": as_integers,
    "E5M2, one scale": lambda x: rounded8(x, E5M2, tensor_scale),
    "E4M3, one scale": lambda x: rounded8(x, E4M3, tensor_scale),
    "E4M3, block scales": lambda x: rounded8(x, E4M3, block_scales),
}


def with_outlier(size, way):
    """Signal-to-noise ratio in dB of all numbers but one, of the given size."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[5, 100] = size
    noise = (way(x) - x).square()
    noise[5, 100] = x[5, 100] = 0
    return 10 * (x.square().sum() / noise.sum()).log10().item()


# %% jupyter={"source_hidden": true}
def draw_eight_bits():
    powers, outliers = range(-20, 9), [2.0**k for k in range(2, 23, 2)]
    found = {name: [with_outlier(size, way) for size in outliers] for name, way in EIGHT_BITS.items()}
    _, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained")
    for k, (name, way) in enumerate(EIGHT_BITS.items()):
        right.plot(outliers, found[name], color=f"C{k}", label=name)
        if "block" not in name:
            x = torch.cat([torch.linspace(1, 2, 100)[:-1] * 2.0**e for e in powers] + [torch.tensor([448.0])])
            worst = [((way(x) - x).abs() / x)[99 * j : 99 * (j + 1)].max() for j in range(len(powers) - 1)]
            left.plot([2.0**e for e in powers][:-1], worst, color=f"C{k}", label=name)
    left.set(xscale="log", yscale="log", xlabel="size of the number", ylabel="largest relative error")
    left.set_title("An exponent keeps the relative error")
    left.legend()
    right.set(xscale="log", xlabel="size of the outlier (the others are about 1)", ylabel="signal to noise, dB")
    right.set_title("What one outlier costs the others")
    right.legend(loc=(0.36, 0.12))
    plt.show()
    for name, ratios in found.items():
        words = [f"of {outliers[k]:,.0f}: {ratios[k]:4.1f} dB" for k in (0, 4, 7)]
        print(f"{name:<19} with an outlier " + ", ".join(words))


draw_eight_bits()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# Without outliers int8 is the better format: no bit is spent on an exponent. But each doubling of the range costs it 6 dB. E4M3
# has the same relative error over some fifteen powers of two: an outlier costs the others nothing until they slip into the subnormal numbers. A
# scale for each block confines the damage to 31 neighbours, however large the outlier is. E5M2 rounds twice as coarsely as E4M3, and its range ends beyond this figure.
# </details>
#
# ## A training step in FP8 · further
#
# In a training step nearly all of the work is in three products for each layer: $y = x W^T$ forward, $g\,W$ and $g^T x$ backward, where $g$ is the gradient of $y$. Below, what is multiplied is rounded to
# FP8, as Tensor Cores take it, and sums stay float32. So do the weights that the optimizer moves: the rounded weights are made anew at each call, as in balise 4. Each product sums over
# the last axis of both matrices, and along it lie the blocks.
#
# Weights and inputs are about 1 in size. Gradients are not: the loss is a mean over 64 images, and a network that is nearly right has small ones. To see the cost of an outlier alone, one weight is set to
# 100,000: one of the first layer, for a pixel at the edge that is 0 in all images. It changes nothing of what the network computes.


# %%
def no_scale(x, most):
    return torch.ones(())


class Products(torch.autograd.Function):
    """x (n, inputs) times weight (outputs, inputs), transposed; all that is multiplied is rounded."""

    @staticmethod
    def forward(ctx, x, weight, scales, back, lost):
        ctx.save_for_backward(x, weight)
        ctx.scales, ctx.back, ctx.lost = scales, back, lost
        return rounded8(x, E4M3, scales) @ rounded8(weight, E4M3, scales).T

    @staticmethod
    def backward(ctx, g):
        (x, weight), scales = ctx.saved_tensors, ctx.scales
        along_outputs, along_images = rounded8(g, ctx.back, scales), rounded8(g.T, ctx.back, scales)
        ctx.lost.append(((along_images == 0) & (g.T != 0)).sum() / (g != 0).sum().clamp(min=1))
        of_x = along_outputs @ rounded8(weight.T, E4M3, scales).T if ctx.needs_input_grad[0] else None
        return of_x, along_images @ rounded8(x.T, E4M3, scales).T, None, None, None


# %%
class Eight(nn.Module):
    """A linear layer whose products are rounded; layer.weight stays float32. back: the format of gradients."""

    def __init__(self, layer, scales, back, lost):
        super().__init__()
        self.layer, self.kind = layer, (scales, back, lost)

    def forward(self, x):
        y = Products.apply(x, self.layer.weight, *self.kind)
        return y if self.layer.bias is None else y + self.layer.bias


# %%
def in_eight_bits(seed, scales, back, outlier):
    """(accuracy, share of gradients that became 0) of a network trained for three epochs; scales None: in float32."""
    model, lost = network(seed), []
    if outlier:
        model[0].weight.data[0, 0] = outlier
    if scales:
        layers = [Eight(one, scales, back, lost) if isinstance(one, nn.Linear) else one for one in model]
        model = nn.Sequential(*layers)
    right = accuracy(train(model, epochs=3, seed=seed))
    return right, torch.stack(lost).mean().item() if lost else 0.0


# %%
#   name: scales, format of gradients, outlier
ARMS = {
    "float32": (None, None, 0),
    "no scales, E4M3 for all": (no_scale, E4M3, 0),
    "no scales, E5M2 for gradients": (no_scale, E5M2, 0),
    "a scale for each tensor": (tensor_scale, E4M3, 0),
    "a scale for each block": (block_scales, E4M3, 0),
    "float32, outlier": (None, None, 1e5),
    "a scale for each tensor, outlier": (tensor_scale, E4M3, 1e5),
    "a scale for each block, outlier": (block_scales, E4M3, 1e5),
}


def show_eight_bits():
    for name, kind in ARMS.items():
        rights, lost = torch.tensor([in_eight_bits(seed, *kind) for seed in range(SEEDS)]).T
        words = f"{rights.mean():.3f} (from {rights.min():.3f} to {rights.max():.3f})"
        print(f"{name:<33} accuracy {words}; gradients that became 0: {lost.mean():6.1%}")


show_eight_bits()

# %% [markdown]
# <details><summary>What the table says</summary>
#
# Without scales most gradients are smaller than half of E4M3's least number, $2^{-10}$, and become 0. E5M2 reaches 128 times further down, and loses far fewer;
# that is why it was made. With scales, one for each tensor is enough here, also with three bits of mantissa for the gradients.
#
# The outlier is a million times the other weights of its layer. One scale for all of them makes all others 0, and the first layer passes nothing on. With block scales it takes
# 31 neighbours with it, and nothing of that is seen in the accuracy.
# </details>
#
# **Facts of 2026, not measured here.** An H100's peak is 989 TFLOP/s in bfloat16 and 1,979 in FP8 (NVIDIA's data sheet, without sparsity). The usual recipe has a scale for each
# tensor, with E5M2 for gradients; models of up to 175 billion parameters came out as in 16 bits (arXiv 2209.05433). The MX formats are a standard of the Open Compute Project
# (*Microscaling Formats Specification*, 2023), and Blackwell's Tensor Cores multiply block scales in; with them E4M3 does for gradients, too (documentation of Transformer Engine, *MXFP8*). The standard rounds a
# block's scale down; Mishra and others (2025, arXiv 2506.08027) round it up, as you do, because down can make training diverge. NVFP4 goes on: E2M1 in blocks of 16, with E4M3 for the scale, and one more scale for the tensor.

# %% [markdown]
# ## The bfloat16 trap · further
#
# Then why not simply bfloat16? It needs no scale, halves the bytes, and one line does it: `model.bfloat16()`. On a GPU
# that is what everybody does. On a CPU it depends: without instructions for bfloat16 (AVX-512 BF16 or AMX) it is
# emulated, or done in plain loops, and may be several times slower than float32. Nothing warns you.
#
# Below, a layer of 2,048 × 2,048 with one row, which is one token of a language model that writes, up to 128, a prompt
# that it reads. Without oneDNN, the library with the fast kernels, any processor does what one without AVX-512 does.


# %%
@torch.no_grad()
def race_bfloat16(rows, n=2048):
    """(float32, bfloat16, bfloat16 without oneDNN): seconds for x (rows, n) through a layer (n, n)."""
    x, weight = torch.randn(rows, n), torch.randn(n, n)
    narrow = x.bfloat16(), weight.bfloat16()

    def plain():
        with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
            return F.linear(*narrow)

    runs = {"float32": lambda: F.linear(x, weight), "bfloat16": lambda: F.linear(*narrow), "plain": plain}
    return [min(times) for times in measure.race(runs, 5, 1, "cpu").seconds.values()]


# %% jupyter={"source_hidden": true}
def show_bfloat16():
    rows = 1, 4, 16, 64, 128
    times = torch.tensor([race_bfloat16(n) for n in rows])
    ratio = times / times[:, :1]
    _, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for k, name in enumerate(("float32", "bfloat16 on this machine", "bfloat16 without oneDNN")):
        ax.plot([str(n) for n in rows], ratio[:, k], "o-", color=f"C{k}", label=name)
    ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8]
    ax.set(yscale="log", xlabel="rows", ylabel="time, as a multiple of float32's")
    ax.set_yticks(ticks, labels=[f"{one:g}" for one in ticks])
    ax.set_yticks([], minor=True)
    ax.set_title("2,048 × 2,048, one thread: when is bfloat16 faster?")
    ax.legend()
    plt.show()
    takes = "takes" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "does not take"
    print(f"oneDNN {takes} bfloat16 on this processor. Times as long as float32:")
    for k, name in ((1, "bfloat16 here"), (2, "without oneDNN")):
        print(f"  {name:<15} one row {ratio[0, k]:.2f}, {rows[-1]} rows {ratio[-1, k]:.2f}")


show_bfloat16()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# One row reads every weight once and does two operations with it. Reading takes the time, there are half as many bytes, and even plain loops keep up with a slow memory. With many rows
# arithmetic decides, and plain loops lose several times over. A model can be faster in bfloat16 when it writes, and far slower when it reads the prompt. So ask the machine, not a table.
# </details>

# %% [markdown]
# ## Deployment: ONNX Runtime · further
#
# Nobody writes kernels for bytes twice. A network is *exported*, as a graph of operators in a format that many programs read
# (ONNX), and an inference engine fuses operators, and chooses kernels for the processor. ONNX Runtime does what you did: it folds batch norms, calibrates with
# images that you give, and computes convolutions in integers. Without the extra `deploy`, what was recorded is shown.
#
# The larger the products, the more there is to win: here are the digits at 24 × 24 pixels, and a small ResNet. One thread, and
# seconds of the processor, so that other programs do not count.


# %%
class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them. a and b: channels before and after."""

    def __init__(self, a, b):
        super().__init__()
        self.way = nn.Sequential(
            *(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)),
        )
        self.around = nn.Sequential(nn.Conv2d(a, b, 1, 2, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.way(x) + self.around(x))


def resnet():
    """Images (n, 1, 24, 24) to (n, 10)."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [Residual(32, 32), Residual(32, 64), Residual(64, 128)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def enlarged(x):
    return F.interpolate(x, scale_factor=3, mode="bilinear")


# %%
def session(path):
    """The network of a file, as a function of a tensor, in one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    opened = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(opened.run(None, {"x": x.numpy()})[0])


def export(model, images, folder):
    """Write the network to folder, as float32 and as int8 calibrated with images. Returns both paths."""
    from onnxruntime import quantization as ort

    paths = [f"{folder}/{name}.onnx" for name in ("float32", "prepared", "int8")]
    several = {0: torch.export.Dim("batch", min=1, max=1024)}
    names = {"input_names": ["x"], "dynamic_shapes": (several,), "dynamo": True, "external_data": False}
    torch.onnx.export(model, (images[:2],), paths[0], **names, verbose=False)
    ort.shape_inference.quant_pre_process(*paths[:2])
    batches = iter([{"x": x.numpy()} for x in images.split(32)])
    reader = type("Images", (ort.CalibrationDataReader,), {"get_next": lambda _: next(batches, None)})()
    kinds = {"activation_type": ort.QuantType.QUInt8, "weight_type": ort.QuantType.QInt8, "per_channel": True}
    ort.quantize_static(*paths[1:], reader, **kinds, reduce_range=True)
    return paths[0], paths[2]


def processor_seconds(runs, repeats=15):
    """{name: median seconds of the processor}, each in turn."""
    taken = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            taken[name].append(time.process_time() - start)
    return {name: sorted(one)[repeats // 2] for name, one in taken.items()}


# %% [markdown]
# `reduce_range` gives the weights seven bits. A processor without VNNI adds two products of bytes in 16 bits, and two products of
# 255 × 127 do not fit. With 64 instead of 127 they do.


# %%
def deploy():
    """[(name, accuracy, bytes, seconds of the processor for 8 images)]."""
    images, held_out = enlarged(digits.train_x), enlarged(digits.val_x)
    model = train(train(resnet(), images, epochs=3, rate=0.05), images, epochs=1, rate=0.01)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        quiet()
        paths = export(model, images[:256], folder)
        sizes = [sum(one.nbytes for one in model.state_dict().values()), *(Path(one).stat().st_size for one in paths)]
        nets = dict(zip(("eager", "ONNX Runtime, float32", "ONNX Runtime, int8"), (model, *map(session, paths))))
        seconds = processor_seconds({name: lambda net=net: net(held_out[:8]) for name, net in nets.items()})
        rights = [accuracy(net, held_out) for net in nets.values()]
    return [(name, right, size, seconds[name]) for name, right, size in zip(nets, rights, sizes)]


def quiet():
    """Exporters tell a lot, none of it for us."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def show_deployed():
    if all(map(frameworks.here, ("onnx", "onnxscript", "onnxruntime"))):
        rows = deploy()
        recorded.note("22_compression", "deployed", rows, on_cpu=True)
    else:
        rows = recorded.instead("onnxruntime", "22_compression", "deployed") or []
    for name, right, size, seconds in rows:
        print(
            f"{name:<22} accuracy {right:.3f}, {measure.human_bytes(size):>9}, 8 images {measure.human_seconds(seconds):>8}",
            end="",
        )
        print(f", {rows[0][3] / seconds:.1f} times as fast as eager")


show_deployed()

# %% [markdown]
# <details><summary>What the table says</summary>
#
# Look at float32 first: without a single byte saved it is faster, because batch norm and ReLU go into the convolutions, and no operator is
# dispatched from Python. What int8 brings is the step from there; it depends on the processor (with VNNI, four products of bytes are one
# operation) and on the kind of integers: the fast instructions want unsigned inputs and signed weights (documentation of ONNX Runtime, *Quantize ONNX models*, also for `reduce_range`).
# </details>
#
# ### The same with torchao
#
# torchao is PyTorch's own library for this; its `QATConfig` does your balise 4. Here it meets the baseline, with weights of 8 and of 2 bits and a scale for each channel. With 2 bits it leaves the inputs as they
# are, and its integers are -2, -1, 0 and 1; yours rounds the inputs, too, and has no -2. Only accuracy is compared, not time.


# %%
def with_torchao():
    """{name: accuracy} of the baseline, quantized with torchao."""
    quiet()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, PerAxis, quantize_
    from torchao.quantization.qat import QATConfig

    def tuned(config, qat=False):
        model = without_norms(teacher)
        if qat:
            quantize_(model, QATConfig(config, step="prepare"))
            longer(model)
            quantize_(model, QATConfig(config, step="convert"))
        else:
            quantize_(model, config)
        return accuracy(model)

    eight, two = Int8DynamicActivationInt8WeightConfig(), IntxWeightOnlyConfig(torch.int2, granularity=PerAxis(0))
    return {"PTQ, 8 bits": tuned(eight), "PTQ, 2 bits": tuned(two), "QAT, 2 bits": tuned(two, qat=True)}


if frameworks.here("torchao"):
    by_torchao = with_torchao()
    recorded.note("22_compression", "torchao", by_torchao, on_cpu=True)
else:
    by_torchao = recorded.instead("torchao", "22_compression", "torchao") or {}
for name, right in by_torchao.items():
    bits = int(name[5])
    yours = f", yours {by_bits[bits][name.startswith('QAT')]:.3f}" if bits in by_bits else ""
    print(f"{name}: torchao {right:.3f}{yours}")

# %% [markdown]
# ## Three questions
#
# **1.** A colleague has set 90 % of a network's weights to zero and kept its accuracy. The file is as large as before, and an answer takes as long. What do you tell her?
#
# <details><summary>Answer</summary>
#
# That a zero in a dense tensor is a number like any other: it is stored, read and multiplied. A sparse format makes the file smaller; time needs a kernel that profits from *this* pattern.
# What is sure to help is structure: whole channels removed, which leaves a smaller dense network, or 2:4 on hardware that knows it, which saves at most half.
# </details>
#
# **2.** You distil with $T = 2$ and $\lambda = 1$, and it works well. Someone sets $T = 8$, and leaves the factor $T^2$ out. What happens?
#
# <details><summary>Answer</summary>
#
# The soft part's gradient shrinks like $1 / T^2$. With the factor it was about as large as at $T = 1$; now nothing makes up for it, and it is about a 64th of that: the student learns from labels almost alone. It
# looks as if a high temperature were bad, though only the weight changed. With the factor, $T$ can be tuned by itself.
# </details>
#
# **3.** A language model of 7 billion parameters in bfloat16 shall be served from a card of 8 GB. Which of the techniques gets it there?
#
# <details><summary>Answer</summary>
#
# In bfloat16 it takes 14 GB. int8 makes 7 GB, which leaves next to nothing for a cache of keys and values. 2:4 on top of int8 keeps two of four bytes and 2 × 2 bits, 20 bits instead of
# 32: about 4.4 GB. Four bits make 3.5 GB, with a scale for each small block of weights a little more. They can be combined, and each has to be measured on the task itself.
# </details>

# %% [markdown]
# ## In one paragraph
#
# **A trained network is larger than what it computes needs.** Distillation makes the network itself smaller, and pays most where labels are few: the teacher's doubts say more than a label. Quantization takes
# bits from every number, with a scale that decides what they mean; with eight bits there is hardly a loss, with two the network must learn to live with it; an exponent in each number makes the scale less delicate. Pruning takes numbers away, far
# more than one would think, but zeros save time only in a pattern that the hardware knows. Bytes, accuracy and time are three measurements: a technique that improves one says nothing yet of the others.

# %%
tp.progress()
