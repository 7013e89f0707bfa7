# %% [markdown] tags=["slide"]
# # Compression: smaller, and sometimes faster · about 110 min, core 40
#
# A model is trained once and then queried for years. What counts then is the cost of an answer, in bytes and time. In
# the core you write **quantization**: 8-bit integers replace the floats of a whole network. The further parts add
# **distillation**, **pruning** and FP8.
#
# **What you will gain.** A network that takes 28 % of the bytes, computes in integer layers that you wrote, and keeps
# its accuracy. You also measure how fast your processor multiplies bytes.

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% [markdown] tags=["slide"]
# ## The idea
#
# A network has $N$ weights. A share $s$ of them is zero, and each of the others takes $b$ bits:
#
# $$\text{bytes} \approx \underbrace{N}_{\text{distillation}} \times \underbrace{(1 - s)}_{\text{pruning}} \times
# \underbrace{b / 8}_{\text{quantization}}$$
#
# A smaller $N$ saves *time* on any processor; zeros and fewer bits do so only if the processor can use them.


# %% tags=["slide"] jupyter={"source_hidden": true}
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
# The task: handwritten digits of 8 × 8 pixels.


# %% tags=["setup"] jupyter={"source_hidden": true}
digits = data.digits()
X, Y = digits.train_x.flatten(1), digits.train_y  # (1438, 64) in [0, 1], (1438,)
VAL_X, VAL_Y = digits.val_x.flatten(1), digits.val_y  # 359 of each
WIDTHS = (300, 100)


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


# %% tags=["setup"]
def network(seed=0, widths=WIDTHS, norm=True):
    """Linear, BatchNorm1d (if norm) and ReLU for each width, then Linear: (n, 64) to (n, 10)."""
    torch.manual_seed(seed)
    layers = []
    for before, after in zip((64, *widths), widths):
        layers += [nn.Linear(before, after, bias=not norm), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


# %%
teacher = train(network())


def bytes_of(model):
    return sum(one.nbytes for one in model.state_dict().values())


report.table({"": "{}", "bytes": "{:,}", "accuracy": "{:.3f}"}, [("float32", bytes_of(teacher), accuracy(teacher))])

# %% [markdown]
# Each of the 359 validation images is worth 0.003 of accuracy.

# %% [markdown]
# ## A teacher and a student
#
# A label says "3". A trained network says "3, and if not, an 8 rather than a 1". A small network, the student, can
# learn from these probabilities (Hinton, Vinyals and Dean, 2015). A good teacher is nearly certain, though, and its
# small probabilities are close to 0. Both sets of logits are therefore divided by a **temperature** $T$ before the
# softmax. With the teacher's $p$ and the student's $q$ at temperature $T$, the loss is
#
# $$L = T^2 \, \frac{1}{n} \sum_i \mathrm{KL}\big(p_i \,\|\, q_i\big) + \lambda \, \frac{1}{m}
# \sum_{i \text{ labelled}}
# - \log q^{(T = 1)}_{i,\, y_i} , \qquad \mathrm{KL}(p \,\|\, q) = \sum_c p_c \, (\log p_c - \log q_c) .$$
#
# The gradient of the soft part shrinks like $1 / T^2$, and the factor $T^2$ makes up for it.
#
# ### Balise 1 · Distillation · further · about 8 min
#
# **`distillation_loss(student, teacher, labels, temperature, weight)`** returns $L$, where `weight` is $\lambda$. The
# part with the labels is given. Write `soft`, including $T^2$. No gradient may reach the teacher. Logits can be in the
# thousands, so never take the logarithm of a softmax.
#
# About 3 lines.
#
# <details><summary>Hint</summary>
#
# `F.log_softmax` copes with large logits. `F.kl_div(log_q, log_p, log_target=True)` is $\mathrm{KL}(p \| q)$: the
# student comes first. The reduction `"mean"` also divides by the number of classes, `"batchmean"` does not.
# </details>


# %% tags=["balise-1"]
def distillation_loss(student, teacher, labels, temperature, weight):
    """The loss of the student's logits (n, classes), by the teacher's and by labels (n,), -1 where there is none."""
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
# How much do those small probabilities say? In Hinton's experiment, the student never sees a 3. It can learn about 3s
# only from what the teacher says about *other* digits. A student that never saw a class considers it rare, so its bias
# for the 3 is corrected afterwards, on training images that it did not learn from.

# %%
never_seen = tp.predict(
    "After that correction, what share of the 3s does the distilled student recognise (0 to 1)?", ...
)

# %% jupyter={"source_hidden": true}
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
    """Raise the bias of one class to what is best on the held-out training images."""
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
    never_seen.shows(sum(recalls) / SEEDS, "{:.2f}", "The teacher's doubts about other digits say what a 3 looks like.")
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
# Taught by the teacher, the student recognises most 3s once the bias is corrected. Does a teacher always help? Now
# students train with all labels, or with the first 100. The teacher had all.


# %% jupyter={"source_hidden": true}
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
    print(f"{len(rows)} seeds; the teacher's accuracy is {accuracy(teacher):.3f}")
    columns = {"student learns from": "{}", "accuracy": "{:.3f}", "±": "{:.3f}"}
    report.table(columns, [(name, v.mean().item(), v.std().item()) for name, v in zip(names, rows.T)])


show_with_and_without()

# %% [markdown]
# Distillation pays off when the teacher knows more than the student's labels say.

# %% [markdown] tags=["slide"]
# ## Integers instead of floats
#
# **Affine quantization** stores a real number $x$ as a small integer $q$. The **scale** $s$ is the distance between two
# neighbours, and the **zero point** $z$ is the integer that represents 0:
#
# $$q=\operatorname{clamp}\big(\operatorname{round}(x/s)+z,\;q_{\min},\;q_{\max}\big),\qquad\hat{x}=(q-z)\,s.$$
#
# *Asymmetric* integers (from 0 to 255) suit activations after a ReLU. *Symmetric* ones (from −127 to 127, with $z=0$)
# suit weights.


# %% tags=["setup"]
def limits(bits, symmetric):
    """The least and the greatest integer of `bits` bits."""
    most = 2 ** (bits - 1) - 1
    return (-most, most) if symmetric else (0, 2**bits - 1)


# %% [markdown]
# ### Balise 2 · Affine quantization · about 13 min
#
# - **`affine(low, high, ...)`** returns scale and zero point. First widen the range until it contains 0, which must be
#   represented exactly. Two steps are given. At the end, map `low` to $q_{\min}$ and `high` to $q_{\max}$.
# - **`quantize(x, scale, zero, ...)`** returns $q$. Round first, *then* add $z$. Numbers outside the range *saturate*.
# - **`dequantize(q, scale, zero)`** returns $\hat x$.
#
# About 6 lines in all, without a loop: the scales of channels broadcast.
#
# <details><summary>Hint</summary>
#
# `low.clamp(max=0)` widens a range downwards. `torch.round` rounds halves to the even neighbour. A float that is too
# large for a byte becomes an arbitrary byte, so call `clamp` first. A byte minus a larger byte wraps around, so call
# `q.int()` first.
# </details>


# %% tags=["balise-2", "slide-mistake=wraps"]
def extremes(x, axis=None):
    """The least and greatest number of x, (); with an axis, those of each channel along it, broadcastable with x."""
    axes = [other for other in range(x.dim()) if other != axis]
    keep = axis is not None
    return x.amin(axes, keepdim=keep), x.amax(axes, keepdim=keep)


def affine(low, high, bits=8, symmetric=False):
    """(scale, zero point) for numbers from low to high: float32 and int32, of their shape."""
    least, most = limits(bits, symmetric)
    # BEGIN SOLUTION
    low, high = low.clamp(max=0), high.clamp(min=0)
    # END SOLUTION
    # a range of zeros has no width, but the scale must not be 0: any range that contains 0 will do
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
# What do fewer bits cost? Only the weights are rounded here. The signal-to-noise ratio (SNR) compares them with the
# rounding error.


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


columns = {"bits": "{}", "one scale for": "{}", "accuracy": "{:.3f}", "SNR, dB": "{:.1f}"}
rows = []
for bits in (8, 6, 4, 3, 2):
    for name, axis in (("a matrix", None), ("a channel", 0)):
        model, ratio = rounded(teacher, bits, axis)
        rows.append((bits, name, accuracy(model), ratio))
report.table(columns, rows)

# %% [markdown]
# One bit fewer doubles the step, which costs about 6 dB. At 2 bits the integers are −1, 0 and 1.

# %% [markdown]
# ## A network that computes in integers
#
# An integer unit multiplies bytes and adds the products in 32 bits. Three steps prepare a network for it, without
# training (**post-training quantization**, PTQ):
#
# 1. Batch norm disappears: the layer before it takes over its factor and its shift.
# 2. A few hundred training images show the range of each layer's output (**calibration**).
# 3. With $x = s_x (q_x - z_x)$ and $w = s_w q_w$, a layer is a sum of integers, times a factor $M$:
#
# $$q_y=z_y+\operatorname{round}\Big(M\Big(\sum_k(q_{x,k}-z_x)\,q_{w,k}+q_b\Big)\Big),
# \qquad M=\frac{s_xs_w}{s_y},\quad q_b=\operatorname{round}\Big(\frac{b}{s_xs_w}\Big).$$
#
# Even $M$ is made of integers: `factor / 2**shift` (Jacob and others, 2017). ReLU is free: if the range of $y$ starts
# at 0, saturation cuts off negative values.


# %% tags=["setup"] jupyter={"source_hidden": true}
def fixed_point(real):
    """Two int64 tensors (factor, shift): real numbers between 0 and 1 as factor / 2**shift, with factors of 31 bits."""
    mantissa, exponent = torch.frexp(real.double())
    return (mantissa * 2**31).round().long(), 31 - exponent.long()


# %% [markdown]
# ### Balise 3 · A network in integers · about 15 min
#
# - **`fold(layer, norm)`** merges a layer and its batch norm. Write the gain of each channel, and the bias for a layer
#   without one.
# - **`least_error(x, shares, ...)`** cuts off rare large values, because they make all steps coarse. Write
#   `error(share)`, which returns the sum of squared errors as a Python number.
# - **`integer_linear(...)`** is the formula above for one layer, without any floats.
#
# 2, 3 and 3 lines.
#
# **Write all of it:** `tp.open_task(3)` gives you only names and docstrings. Turn a layer and its batch norm into sums
# of integers, exact to the last bit.
#
# <details><summary>Hint</summary>
#
# Batch norm is $y = \gamma\,(x - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta$. Its numbers are `norm.weight`,
# `running_mean`, `running_var`, `eps` and `bias`. `total >> shift` divides by a power of two. The product with a factor
# of 31 bits needs 64 bits.
# </details>


# %% tags=["balise-3"]
def fold(layer, norm):
    """(weight, bias) of one layer that does what layer and norm, a batch norm in eval mode, do together.

    layer: nn.Linear or nn.Conv2d, with or without bias. norm turns a channel y of its output into norm.weight ·
    (y - running_mean) / √(running_var + eps) + norm.bias. Returns two new tensors: a weight with the shape of
    layer.weight, and a bias for each output channel. layer and norm stay as they are.
    """
    # BEGIN SOLUTION
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = norm.bias - norm.running_mean * gain
    # END SOLUTION
    if layer.bias is not None:
        bias = bias + layer.bias * gain
    return layer.weight * gain.view(-1, *[1] * (layer.weight.dim() - 1)), bias


def least_error(x, shares, bits=8, symmetric=False):
    """(low, high), two tensors (): the extremes of x times the share with which rounding x has the least squared error.

    x: float32, any shape. shares: a list of numbers, 0 < share <= 1. `extremes(x)` is (low, high), the least and the
    greatest number of x. `affine(share * low, share * high, bits, symmetric)` is the (scale, zero) of a share's range.
    With them, `quantize(x, scale, zero, bits, symmetric)` is q, and `dequantize(q, scale, zero)` turns it back. The
    squared errors are summed over all of x, also over numbers that the range cuts off.
    """
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
    """A linear layer on integers: zero_out + ((q - zero) @ weight.T + bias) · factor / 2**shift, uint8 (n, outputs).

    q uint8 (n, inputs) and its zero point, int32 (); weight int8 (outputs, inputs); bias int32, factor and shift int64,
    one for each output; zero_out is z_y, int32 (). The sums, with bias, have 32 bits and factor has 31, so a product of
    both needs 64. Use no floats, not even for intermediate results. To round the division, add half of 2**shift before
    you shift right: halves go up, also below 0. The last step before uint8 clamps to `limits(bits, False)`, the least
    and the greatest integer.
    """
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
# The collapsed cell puts your functions together. *Percentile* drops one number in a thousand at each end.


# %% jupyter={"source_hidden": true}
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
    """For each layer the arguments of `integer_linear` after q; scale and zero point of the images."""
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


def in_integers(bits, way):
    """(layers, scale and zero point of the images) of the teacher; way: a key of CALIBRATION."""
    pairs = folded(teacher)
    return to_integers(pairs, [CALIBRATION[way](x, bits) for x in layer_by_layer(pairs, X[:256])], bits)


def answers(net):
    return accuracy(lambda x: run_integers(*net, x)[-1])


# %%
SHARES = [k / 50 for k in range(10, 51)]
CALIBRATION = {
    "extremes": lambda x, bits: extremes(x),
    "percentile": lambda x, bits: (x.quantile(0.001), x.quantile(0.999)),
    "least error": lambda x, bits: least_error(x, SHARES, bits),
}
columns = {"bits": "{}"} | dict.fromkeys(CALIBRATION, "{:.3f}")
report.table(columns, [(bits, *(answers(in_integers(bits, way)) for way in CALIBRATION)) for bits in (8, 6, 4, 3)])

# %% [markdown]
# With 8 bits, the accuracy stays within an image or two.
#
# ### How much faster are bytes?
#
# PyTorch has no fast kernel for the int32 matrices in `integer_linear`, but it has one for bytes: `torch._int_mm`.

# %%
faster = tp.predict("By what factor is the product of bytes faster here than the float32 product?", ...)


# %%
@torch.no_grad()
def race_bytes(n=1024, rows=64):
    """[(format, bytes of the weight, seconds)] of x (rows, n) times a weight (n, n)."""
    x, weight = torch.rand(rows, n), torch.randn(n, n)
    qx = quantize(x, *affine(*extremes(x), symmetric=True), symmetric=True)
    qw = quantize(weight, *affine(*extremes(weight, 0), symmetric=True), symmetric=True)
    runs = {"float32": lambda: x @ weight.T, "int8": lambda: torch._int_mm(qx, qw.T)}
    seconds = measure.race(runs, repeats=10, device="cpu").seconds
    return [("float32", weight.nbytes, min(seconds["float32"])), ("int8", qw.nbytes, min(seconds["int8"]))]


raced = race_bytes()
report.table({"weight": "{}", "size": measure.human_bytes, "product": measure.human_seconds}, raced)
faster.shows(raced[0][2] / raced[1][2], "× {:.1f}", "The size is always a quarter; the time depends on the processor.")

# %% [markdown]
# ## Training through the rounding
#
# With very few bits a network loses accuracy, unless it adapts its weights to the rounding: **quantization-aware
# training** (QAT). The weights stay float32. The forward pass rounds them and turns them back (*fake* quantization).
# But rounding is a staircase, and its derivative is 0 nearly everywhere. The **straight-through estimator** (Bengio and
# others, 2013) replaces it:
#
# $$\frac{\partial \hat x}{\partial x} := \begin{cases} 1 & q_{\min} \le \operatorname{round}(x / s) + z \le q_{\max} \\
# 0 & \text{elsewhere (saturated)} \end{cases}$$
#
# ### Balise 4 · Training through the rounding · further · about 9 min
#
# - **`fake_quantize(x, scale, zero, ...)`** returns $\hat x$, float32, with the gradient above. `back` ($\hat x$
#   without a gradient) and `steps` (the integers before they saturate) are given. Write the return line.
# - **`fake_layer(layer, x, high, bits)`** returns what a linear layer or a convolution computes from rounded inputs and
#   rounded weights. Scales and zero points are given. The bias is not rounded. The layer's float32 weights don't
#   change, and they receive the gradient.
#
# 1 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `x - x.detach()` is 0, and its gradient is 1: multiply it by a mask, and add it to something without a gradient.
# `torch.func.functional_call(layer, {"weight": other}, x)` calls a layer with another weight, and keeps its stride,
# padding, dilation and groups.
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
# Inputs and weights of all layers are rounded: without training (PTQ), and after `EPOCHS` more epochs with rounding
# (QAT). The float network gets these epochs too.


# %% jupyter={"source_hidden": true}
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
    report.table({"bits": "{}", "PTQ": "{:.3f}", "QAT": "{:.3f}"}, [(bits, *both) for bits, both in by_bits.items()])


show_training()

# %% [markdown]
# Down to 3 bits there is little to repair. With 2 bits the accuracy drops, and training recovers most of it.

# %% [markdown]
# ## Few bits for the weights of a language model · further
#
# Decoding reads all weights and computes little, so language models often store 4 bits a weight and compute in 16.
# Training again is too expensive. Rounding keeps each *weight's* error small, but it is the *output's* error that
# counts, $\lVert X (W - \hat W)^\top \rVert$. Inputs are correlated, so later weights can make up for an
# earlier one's error. **GPTQ** (arXiv 2210.17323) rounds one input's weights $w_k$ at a time, and moves the later
# ones:
#
# $$w_j \leftarrow w_j - \frac{w_k - \hat w_k}{u_{kk}}\, u_{kj}, \quad j > k, \qquad U^\top U = (X^\top X)^{-1},
# \quad U \text{ upper triangular}$$


# %%
@torch.no_grad()
def gptq(weight, x, bits):
    """The weight (outputs, inputs), rounded so that the outputs for inputs like x (n, inputs) change little."""
    scale, zero = affine(*extremes(weight, 0), bits, symmetric=True)
    square = x.T.double() @ x.double()
    square.diagonal().add_(0.01 * square.diagonal().mean())  # an input that is always 0 has no inverse
    upper = torch.linalg.cholesky(torch.linalg.inv(square), upper=True)
    w = weight.double()
    for k in range(w.shape[1]):
        back = dequantize(quantize(w[:, k : k + 1], scale, zero, bits, symmetric=True), scale, zero)
        error = (w[:, k : k + 1] - back) / upper[k, k]
        w[:, k + 1 :] -= error * upper[k, k + 1 :]
        w[:, k : k + 1] = back
    return w.float()


# %% jupyter={"source_hidden": true}
def show_gptq():
    """Relative errors of the hidden layer's weights and of its outputs on validation images; calibrated on training images."""
    pairs, rows = folded(teacher), []
    weight, seen, new = pairs[1][0], layer_by_layer(pairs, X)[1], layer_by_layer(pairs, VAL_X)[1]
    for bits in (4, 3, 2):
        scale, zero = affine(*extremes(weight, 0), bits, symmetric=True)
        nearest = dequantize(quantize(weight, scale, zero, bits, symmetric=True), scale, zero)
        ways = nearest, gptq(weight, seen, bits)
        of_weights = [((one - weight).norm() / weight.norm()).item() for one in ways]
        of_outputs = [((new @ (one - weight).T).norm() / (new @ weight.T).norm()).item() for one in ways]
        rows.append((bits, *of_weights, *of_outputs, of_outputs[0] / of_outputs[1]))
    heads = ("weights off: nearest", "GPTQ", "outputs off: nearest", " GPTQ")
    report.table({"bits": "{}"} | dict.fromkeys(heads, "{:.1%}") | {"better": "× {:.1f}"}, rows)


show_gptq()

# %% [markdown]
# GPTQ's weights are further from the trained ones, but the layer's outputs are closer.
#
# <details><summary>What do AWQ and SmoothQuant do instead?</summary>
#
# **AWQ** (arXiv 2306.00978) enlarges weights before rounding where activations are large, and divides those activations,
# so the weights that matter keep a finer step. **SmoothQuant** (arXiv 2211.10438) divides activations too: outliers move
# into the weights, until both fit into 8 bits.
# </details>

# %% [markdown]
# ## Fewer weights
#
# **Pruning** sets weights to zero. Which ones? Those with the smallest $|w|$: in a large comparison no cleverer
# criterion was reliably better (Gale, Elsen and Hooker, 2019). Then the rest is trained a little more (*fine-tuning*).
#
# Meanwhile the zeros must stay zero. Momentum from before the pruning would still move them. They are therefore
# restored after each step, in the weight and in the optimizer's state.
#
# ### Balise 5 · Pruning by magnitude · further · about 11 min
#
# - **`magnitude_masks(weights, sparsity, by_layer=False)`** returns a boolean mask for each tensor, `True` where the
#   weight stays. A group is one tensor with `by_layer`, otherwise all of them. In each group, exactly the
#   `round(sparsity * n)` smallest of `n` magnitudes go, even if many are equal. Write `mask` for the group's
#   magnitudes, `sizes`.
# - **`hold_zeros(weights, masks, optimizer)`** restores the zeros in place: in each weight, and in every tensor of its
#   shape in `optimizer.state[weight]`. That dictionary may be empty, or hold other things too.
#
# 2 and 3 lines.
#
# <details><summary>Hint</summary>
#
# Use `argsort`, and a mask of `True` in which the first places of that order are set to `False`. A threshold fails
# where magnitudes are equal. `weight.masked_fill_(~mask, 0)` works in place.
# </details>


# %% tags=["balise-5"]
def magnitude_masks(weights, sparsity, by_layer=False):
    """Boolean masks: False for the smallest weights, a share `sparsity` of all tensors together, or of each."""
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
    """Zero the pruned places, in the weights and in the optimizer's tensors of their shape, in place."""
    for weight, mask in zip(weights, masks):
        # BEGIN SOLUTION
        for one in (weight, *optimizer.state[weight].values()):
            if isinstance(one, torch.Tensor) and one.shape == weight.shape:
                one.masked_fill_(~mask, 0)
        # END SOLUTION


# %%
tp.check(5, magnitude_masks, hold_zeros)

# %% [markdown]
# How many weights can go? The teacher is pruned, then it trains for three more epochs.


# %% jupyter={"source_hidden": true}
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
    print(f"With {shares[3]:.0%} of the whole network pruned, the layers keep {stay}.")
    for ax, title in ((left, "Pruned"), (right, "Pruned, and three more epochs")):
        ax.axhline(accuracy(teacher), color="0.4", ls=":", lw=1)
        ax.set(title=title, xlabel="weights that are zero", ylim=(0, 1.02))
    left.set_ylabel("accuracy")
    right.legend(loc="lower left")
    plt.show()


show_pruned()

# %% [markdown]
# The dotted line is the teacher. Pruning alone soon costs accuracy, but a few epochs bring it back.

# %% [markdown]
# ## A pattern that hardware knows
#
# Scattered zeros don't help a processor that multiplies whole blocks. Tensor Cores, from the A100 on, know one pattern,
# **2:4**: of every four consecutive weights of a row, at most two aren't zero. Half of the products are skipped.
#
# Where three large weights share a group of four, one must go. But the **order of the hidden channels is free**:
# reorder the rows of the first matrix, its bias and the columns of the second in the same way, and the network computes
# the same function. A good order keeps more magnitude (Pool and Yu, 2021).
#
# ### Balise 6 · Two of four · further · about 14 min
#
# - **`two_of_four(weight)`** returns a boolean mask: `True` for exactly two of every four consecutive inputs, those of
#   largest magnitude.
# - **`reorder(first, bias, second, order)`** returns the three with their channels reordered: the new channel `k` is
#   the old channel `order[k]`.
# - **`order_columns(weight)`** tries all exchanges of two columns until none helps. The loop and the exchanged order
#   `other` are given. Accept `other` if `saved` (of all columns, or of the two groups alone) grows by more than a
#   millionth.
#
# 3, 1 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `reshape` to `(outputs, groups, 4)`; `topk(2)` along the last axis gives `indices`, and `scatter` writes `True` there
# in a mask of `False`. `weight[:, order]` has the columns in another order.
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
# What does the pattern cost the teacher?


# %% jupyter={"source_hidden": true}
def in_pattern(model, masks):
    """Accuracy with the weights of these masks alone, and after three more epochs."""
    model = copy.deepcopy(model)
    hold = holding(model, masks)
    hold(torch.optim.SGD(model.parameters()))
    return accuracy(model), accuracy(train(model, epochs=3, rate=0.05, after=hold))


def show_patterns():
    weights = weights_of(teacher)
    whole = sum(one.abs().sum() for one in weights)
    patterns = {
        "half, anywhere in a layer": magnitude_masks(weights, 0.5, by_layer=True),
        "2:4": [two_of_four(one.detach()) for one in weights],
    }
    rows = []
    for name, masks in patterns.items():
        kept = sum((one.abs() * mask).sum() for one, mask in zip(weights, masks)) / whole
        rows.append((name, kept.item(), *in_pattern(teacher, masks)))
    report.table({"pattern": "{}", "magnitude": "{:.1%}", "accuracy": "{:.3f}", "tuned": "{:.3f}"}, rows)
    last = weights[-1].detach()
    ways = {
        "2:4": saved(last),
        "2:4, channels reordered": saved(last[:, order_columns(last)]),
        "half, anywhere": (last * magnitude_masks([last], 0.5)[0]).abs().sum().item(),
    }
    print(f"\nthe last matrix, {len(last)} × {last.shape[1]}:")
    rows = [(name, kept / last.abs().sum().item()) for name, kept in ways.items()]
    report.table({"pattern": "{}", "magnitude": "{:.1%}"}, rows)


show_patterns()

# %% [markdown]
# The pattern costs some magnitude and, after tuning, next to no accuracy. A good order recovers part of the magnitude.

# %% [markdown]
# ## Why zeros gain no time · further
#
# A *sparse* format (CSR, *compressed sparse rows*) stores the nonzero numbers and their positions. It needs fewer
# operations, each with a lookup. A dense product works on whole vectors and reuses what it has loaded. Take a 1,024 ×
# 1,024 matrix times 64 columns.

# %%
half = tp.predict(
    "With half of the weights zero, how many times as long as the dense product does the sparse one take?", ...
)

# %% jupyter={"source_hidden": true}
ZEROS = 0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99


@torch.no_grad()
def race_zeros(n=1024, columns=64):
    """{share of zeros: (seconds of the dense product, of the sparse one)}"""
    drawn = torch.Generator().manual_seed(0)
    x, found = torch.randn(n, columns, generator=drawn), {}
    for share in ZEROS:
        weight = torch.randn(n, n, generator=drawn)
        weight[torch.rand(n, n, generator=drawn) < share] = 0
        with warnings.catch_warnings(action="ignore"):  # sparse tensors are in beta
            sparse = weight.to_sparse_csr()
        one = measure.race({"dense": lambda w=weight: w @ x, "sparse": lambda w=sparse: w @ x}, 15, 2, "cpu")
        found[share] = tuple(min(times) for times in one.seconds.values())  # other processes can only add time
    return found


# %% jupyter={"source_hidden": true}
def show_zeros():
    found = race_zeros()
    dense, sparse = ([one[k] for one in found.values()] for k in (0, 1))
    columns = {"zeros": "{:.0%}", "dense": measure.human_seconds, "sparse": measure.human_seconds}
    report.table(columns, list(zip(ZEROS, dense, sparse)))
    half.shows(sparse[1] / dense[1], "× {:.1f}", "Half of the products, but each of them needs a lookup.")


show_zeros()

# %% [markdown]
# The dense product takes the same time whatever it multiplies. The sparse one pays only where few weights are left. On
# a GPU, `torch.sparse.to_sparse_semi_structured` stores a weight as 2:4, for twice the peak (A100's data sheet).

# %% [markdown]
# ## Eight bits with an exponent
#
# The steps of an integer format all have the same size. The steps of a floating-point format grow with the number, so
# its *relative* error is the same over a wide range. **E4M3** has four bits of exponent and three of *mantissa*,
# **E5M2** has five and two. With $m$ bits of mantissa, and the exponent $e_{\min}$ of the least *normal* number,
#
# $$\hat x = \operatorname{round}\Big(\frac{x}{\delta}\Big)\, \delta,
# \qquad \delta = 2^{\,\max(\lfloor \log_2 |x| \rfloor,\; e_{\min}) - m} .$$
#
# Below $2^{e_{\min}}$ the step $\delta$ stays the same down to 0: these numbers are *subnormal*.
#
# | | $m$ | $e_{\min}$ | least above 0 | largest |
# |---|---|---|---|---|
# | E4M3 | 3 | -6 | $2^{-9}$ | 448 |
# | E5M2 | 2 | -14 | $2^{-16}$ | 57,344 |
# | E2M1 | 1 | 0 | $2^{-1}$ | 6 |
#
# A tensor needs a scale here too: a single one, or a **block scale** for every 32 consecutive numbers. The microscaling
# formats (MX) store it as a power of two.

# %% tags=["setup"]
E4M3 = 3, -6, 448.0  # bits of mantissa, exponent of the least normal number, largest number
E5M2 = 2, -14, 57344.0
E2M1 = 1, 0, 6.0

# %% [markdown]
# ### Balise 7 · Eight bits of floating point · further · about 12 min
#
# - **`round_float(x, mantissa, least, most)`** returns $\hat x$, float32, rounded to `mantissa` bits, halves to the
#   even neighbour. `least` is $e_{\min}$. Saturation at `most` is given.
# - **`tensor_scale(x, most)`** returns one scale, `()`. Dividing by it turns the largest magnitude of `x` into `most`.
# - **`block_scales(x, most, size=32)`** returns for each number the scale of its block: the least power of two, from
#   $2^{-127}$ on, for which no number of the block exceeds `most` after the division. Write `exponent`, one for each
#   block of `blocks`, which has the shape `(..., blocks, size)`.
#
# 3, 1 and 1 lines, without a loop.
#
# <details><summary>Hint</summary>
#
# `torch.frexp(x)` gives $x = a \cdot 2^e$ with $\frac12 \le a < 1$, so $\lfloor \log_2 |x| \rfloor$ is $e - 1$.
# `torch.exp2` makes powers of two. `amax`, `log2` and `ceil` find the exponent of a block, exactly if `log2` gets
# float64.
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
    """One scale, (): dividing by it turns the largest magnitude of x into `most`."""
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
# What does the exponent buy? On the right, one of 64 × 512 random numbers grows: what does that cost *all others*?


# %% jupyter={"source_hidden": true}
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
    """Signal-to-noise ratio in dB of all numbers but one, which has the given size."""
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
    left.set_title("An exponent keeps the relative error constant")
    left.legend()
    right.set(xscale="log", xlabel="size of the outlier (the others are about 1)", ylabel="signal to noise, dB")
    right.set_title("What one outlier costs the others")
    right.legend(loc=(0.36, 0.12))
    plt.show()
    sizes = {f"outlier {outliers[k]:,.0f}": k for k in (0, 4, 7)}
    columns = {"signal to noise, dB": "{}"} | dict.fromkeys(sizes, "{:.1f}")
    report.table(columns, [(name, *(ratios[k] for k in sizes.values())) for name, ratios in found.items()])


draw_eight_bits()

# %% [markdown]
# Without outliers int8 is the better format: it spends no bit on an exponent. But each doubling of the range costs it 6
# dB. A block scale confines the damage of an outlier to 31 neighbours.
#
# ## A training step in FP8 · further
#
# A layer has three products in a training step: $y = x W^T$ forward, $g\,W$ and $g^T x$ backward, where $g$ is the
# gradient of $y$. Below, their factors are rounded to FP8. Sums and the optimizer's weights stay float32. The last
# rows have an outlier: one weight is 100,000, for a pixel that is 0 in all images, so it changes no answer.


# %% jupyter={"source_hidden": true}
def no_scale(x, most):
    return torch.ones(())


def tiles(rows, columns=128):
    """A function like `tensor_scale`, but with a scale for each tile of rows × columns numbers of a matrix."""

    def scales(x, most):
        padded = F.pad(x.abs(), (0, -x.shape[1] % columns, 0, -len(x) % rows))
        top = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
        whole = torch.where(top > 0, top / most, 1.0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return whole[: len(x), : x.shape[1]]

    return scales


class Products(torch.autograd.Function):
    """x (n, inputs) times weight (outputs, inputs), transposed; all that is multiplied is rounded."""

    @staticmethod
    def forward(ctx, x, weight, scales, back, lost):
        ctx.save_for_backward(x, weight)
        ctx.scales, ctx.back, ctx.lost = scales, back, lost
        of_x, of_weight = scales
        return rounded8(x, E4M3, of_x) @ rounded8(weight, E4M3, of_weight).T

    @staticmethod
    def backward(ctx, g):
        (x, weight), (scales, of_weight) = ctx.saved_tensors, ctx.scales
        along_outputs, along_images = rounded8(g, ctx.back, scales), rounded8(g.T, ctx.back, scales)
        ctx.lost.append(((along_images == 0) & (g.T != 0)).sum() / (g != 0).sum().clamp(min=1))
        of_x = along_outputs @ rounded8(weight.T, E4M3, of_weight).T if ctx.needs_input_grad[0] else None
        return of_x, along_images @ rounded8(x.T, E4M3, scales).T, None, None, None


class Eight(nn.Module):
    """A linear layer whose products are rounded; layer.weight stays float32. back: the format of gradients."""

    def __init__(self, layer, scales, back, lost):
        super().__init__()
        self.layer, self.kind = layer, (scales, back, lost)

    def forward(self, x):
        y = Products.apply(x, self.layer.weight, *self.kind)
        return y if self.layer.bias is None else y + self.layer.bias


def in_eight_bits(seed, scales, back, outlier):
    """(accuracy, share of gradients that became 0) of a network trained for three epochs.

    scales: a function; a pair if weights have another; None: in float32.
    """
    model, lost = network(seed), []
    if outlier:
        model[0].weight.data[0, 0] = outlier
    if scales:
        scales = scales if isinstance(scales, tuple) else (scales, scales)
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
    "1 × 128, weights 128 × 128": ((tiles(1), tiles(128)), E4M3, 0),
    "float32, outlier": (None, None, 1e5),
    "a scale for each tensor, outlier": (tensor_scale, E4M3, 1e5),
    "a scale for each block, outlier": (block_scales, E4M3, 1e5),
    "1 × 128, weights 128 × 128, outlier": ((tiles(1), tiles(128)), E4M3, 1e5),
}


def show_eight_bits():
    rows = []
    for name, kind in ARMS.items():
        rights, lost = torch.tensor([in_eight_bits(seed, *kind) for seed in range(SEEDS)]).T
        rows.append((name, rights.mean().item(), lost.mean().item()))
    report.table({"products in FP8": "{}", "accuracy": "{:.3f}", "gradients that became 0": "{:.1%}"}, rows)


show_eight_bits()

# %% [markdown]
# Without scales, most gradients underflow in E4M3. E5M2 reaches numbers 128 times smaller and loses far fewer. The
# outlier ruins a scale for the whole tensor: all other weights of the layer become 0. Block scales survive it. So do
# tiles: only the 128 units in the outlier's tile lose their weights. **Not measured here:** an H100's peak is 989 TFLOP/s
# in bfloat16 and 1,979 in FP8 (data sheet).
#
# <details><summary>Which scales do large trainings use?</summary>
#
# | recipe | one scale for | taken from |
# |---|---|---|
# | delayed scaling | a tensor | its largest magnitude in past steps: the tensor is read once, and a sudden peak saturates |
# | current scaling | a tensor | its largest magnitude now: the tensor is read twice |
# | DeepSeek-V3 | 1 × 128 activations or gradients, 128 × 128 weights | the tile now; E4M3 for all |
# | MXFP8, from Blackwell on | 32 neighbours | the block now, a power of two |
#
# Each has a recipe in NVIDIA's
# [Transformer Engine](https://nvidia.github.io/TransformerEngine/features/low_precision_training/fp8_delayed_scaling/fp8_delayed_scaling.html).
# A square tile has the same scale in the transposed weight, so one rounded copy serves forward and backward. DeepSeek-V3
# also adds up in float32 after every 128 products, because an H800's Tensor Cores keep only about 14 bits of a sum (arXiv
# 2412.19437).
# </details>

# %% [markdown]
# ## Deployment: ONNX Runtime · further
#
# In practice a network is *exported* to a graph of operators (ONNX), and an inference engine fuses them and picks
# kernels. ONNX Runtime does what you did: it folds, calibrates and computes in integers, here with a small ResNet on
# digits of 24 × 24 pixels. Without the extra `deploy` you see recorded numbers.


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
def processor_seconds(runs, repeats=15):
    """{name: median seconds of the processor}, each in turn."""
    taken = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            taken[name].append(time.process_time() - start)
    return {name: sorted(one)[repeats // 2] for name, one in taken.items()}


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
    """Silence the exporters."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def show_deployed():
    if all(map(frameworks.here, ("onnx", "onnxscript", "onnxruntime"))):
        rows = deploy()
        recorded.note("22_compression", "deployed", rows, on_cpu=True)
    else:
        rows = recorded.instead("onnxruntime", "22_compression", "deployed") or []
    columns = {"engine": "{}", "accuracy": "{:.3f}", "size": measure.human_bytes, "8 images": measure.human_seconds}
    report.table(columns | {"× eager": "{:.1f}"}, [(*row, rows[0][3] / row[3]) for row in rows])


show_deployed()

# %% [markdown]
# The float32 row saves no bytes: its gain comes from fused operators. `reduce_range` gives weights seven bits, because
# a processor without VNNI adds two products of bytes in 16 bits, which can overflow.
#
# ### The same with torchao
#
# The `QATConfig` of torchao, PyTorch's library for quantization, does what you wrote in balise 4. With 2 bits, its
# integers include −2 and its inputs stay float.


# %% jupyter={"source_hidden": true}
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
rows = [(name, right, by_bits[int(name[5])][name.startswith("QAT")]) for name, right in by_torchao.items() if by_bits]
report.table({"": "{}", "torchao": "{:.3f}", "yours": "{:.3f}"}, rows)

# %% [markdown]
# ## Measure again
#
# The same network twice: in float32 and in your integers.

# %% tags=["slide"]
net = in_integers(8, "least error")
held = sum(one.nbytes for layer in net[0] for one in layer[1:5])
rows = [("float32", bytes_of(teacher), accuracy(teacher)), ("yours, int8", held, answers(net))]
report.table(
    {"": "{}", "bytes": "{:,}", "of float32": "{:.0%}", "accuracy": "{:.3f}"},
    [(name, size, size / rows[0][1], right) for name, size, right in rows],
)

# %% [markdown]
# ## Three questions
#
# **1.** A colleague has set 90 % of the weights to zero and kept the accuracy. The file is no smaller and no time is
# saved. Why?
#
# <details><summary>Answer</summary>
#
# A zero in a dense tensor is a number like any other: it is stored, read and multiplied. A sparse format makes the file
# smaller, but saving time takes a kernel that profits from *this* pattern. Structure helps: remove whole channels,
# which leaves a smaller dense network, or use 2:4 on hardware that knows it, which saves at most half.
# </details>
#
# **2.** Distillation with $T = 2$ works well. Someone sets $T = 8$ and drops the factor $T^2$. What happens?
#
# <details><summary>Answer</summary>
#
# The gradient of the soft part shrinks like $1 / T^2$, and nothing makes up for it any more: it is about a 64th of what
# it would be with the factor. The student learns almost only from labels. It looks as if a high temperature were bad,
# but only the weight changed.
# </details>
#
# **3.** A language model of 7 billion parameters in bfloat16 must fit on an 8 GB card. How?
#
# <details><summary>Answer</summary>
#
# In bfloat16 it takes 14 GB. int8 makes it 7 GB, which leaves almost nothing for a KV cache. 2:4 on top of int8 keeps
# two of four bytes and 2 × 2 bits, 20 bits instead of 32: about 4.4 GB. Four bits a weight make 3.5 GB, a little more
# with a scale for each block. Measure each of them on the task itself.
# </details>

# %% [markdown] tags=["slide"]
# ## In one paragraph
#
# **A trained network is larger than its task needs.** Quantization takes bits from every number, and a scale decides
# what the integers mean. Eight bits cost hardly any accuracy; with two, training must include the rounding.
# Distillation makes the network smaller. Pruning removes weights, but zeros save time only in a pattern that hardware
# knows.

# %%
tp.progress()
