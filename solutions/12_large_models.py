# %% [markdown] tags=["slide"]
# # Large models: where memory goes, and where data parallelism ends · about 105 min, core 55
#
# A training step holds weights, gradients, optimizer states and activations. Data parallelism divides only the
# activations: a model whose states don't fit on one card doesn't fit on a thousand cards either. You predict what a
# step holds, lower its peak by recomputation, and find the largest batch that fits on a card.
#
# **What you will gain.** You lower the peak of a small network's activations from 50 to 20 MiB. Recomputing every block
# gets there too, but repeats 62 % of a forward pass. Your choice of blocks repeats only 17 %. These numbers are
# counted, not timed.

# %% tags=["setup"] jupyter={"source_hidden": true}
import dataclasses
import functools
import itertools
import time
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from matplotlib.ticker import PercentFormatter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp import course, measure, planner, report, scale, todo
from dlojz_tp.models import COATNETS, VITS, CoAtNet, CoAtNetConfig, Stage, ViT, coatnet

tp = course.open("12_large_models")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # the layers are small here: a second thread waits more than it works

# %% [markdown] tags=["slide"]
# ## The idea
#
# CoAtNet is a convolutional network with a transformer in its last stages. When $N$ ranks train $P$ parameters on $B$
# images with AdamW in float32, each rank holds
#
# $$M \;=\; \underbrace{4 P}_{\text{weights}} + \underbrace{4 P}_{\text{gradients}} + \underbrace{8 P}_{\text{two averages}}
# + \underbrace{a\, B / N}_{\text{activations}} \quad \text{bytes.}$$
#
# Here $a$ is the activation bytes of one image. The first three terms don't shrink when $N$ grows. The bars show their
# sum for published models, and the dashed lines show the memory of three cards.


# %% tags=["slide"] jupyter={"source_hidden": true}
def draw_stages(axes):
    """CoAtNet-7: its stages as boxes, as high as their feature maps."""
    config, side = COATNETS[7], 112
    axes.bar(0, side, color="#999999", width=0.7)
    axes.text(0, side + 3, f"stem\n{side} × {side}\n{config.stem} ch.", ha="center", fontsize=8)
    for k, stage in enumerate(config.stages, 1):
        side //= stage.stride
        axes.bar(k, side, color="#56B4E9" if stage.kind == "conv" else "#E69F00", width=0.7)
        text = f"{stage.kind} ×{stage.blocks}\n{side} × {side}\n{stage.width:,} ch."
        axes.text(k, side + 3, text, ha="center", fontsize=8)
    axes.set(ylim=(0, 150), xticks=[], ylabel="side of the feature map", title="CoAtNet-7, image of 224 pixels")
    axes.grid(False)


def draw_floor(axes):
    """16 bytes for each parameter of published models, and the memory of three cards."""
    published = {"CoAtNet-0": 25e6, "CoAtNet-3": 168e6, "CoAtNet-5": 688e6, "CoAtNet-6": 1.47e9, "ViT-G/14": 1.84e9,
                 "CoAtNet-7": 2.44e9}  # fmt: skip
    floors = {f"{name}: {16 * count / 1e9:.1f} GB": 16 * count / 1e9 for name, count in published.items()}
    axes.barh(list(floors), list(floors.values()), color="#CC79A7")
    for memory in (32, 80, 141):
        axes.axvline(memory, color="#666666", linestyle="--", linewidth=1)
        axes.text(memory, 1.02, f"{memory} GB", ha="center", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set(xlim=(0, 150), xlabel="GB on each rank, before the first image")
    axes.set_title("Weights, gradients and averages", pad=18)


_, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained", width_ratios=(1.2, 1))
draw_stages(left)
draw_floor(right)
plt.show()

# %% [markdown]
# ## The baseline: the peak of one step
#
# **Activation checkpointing** keeps only a block's input, and runs the block again before its backward pass. The usual
# switch recomputes every block or none.

# %% jupyter={"source_hidden": true}
STAGES = (Stage("conv", 2, 32), Stage("conv", 3, 64), Stage("attention", 5, 128), Stage("attention", 2, 256))
SMALL = COATNETS[0] if FULL else CoAtNetConfig(16, STAGES, image=(64, 64))
BATCH = 64 if FULL else 8


class Loss(nn.Module):
    """The cross-entropy with random labels, as a last layer."""

    def __init__(self, batch, classes):
        super().__init__()
        self.register_buffer("labels", torch.randint(classes, (batch,)))

    def forward(self, logits):
        return F.cross_entropy(logits, self.labels)


def small_training():
    """(the layers of a small CoAtNet and its loss, random images); the gradients exist from the start."""
    torch.manual_seed(0)
    model = CoAtNet(SMALL).to(DEVICE)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    layers = [model.stem, *model.blocks, nn.Sequential(model.head, Loss(BATCH, SMALL.classes).to(DEVICE))]
    return layers, torch.randn(BATCH, 3, *SMALL.image, device=DEVICE)


# %%
def run_step(layers, x, recomputed):
    """Forward and backward; the blocks for which `recomputed` says True keep only their input."""
    for layer, again in zip(layers, recomputed):
        x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    x.sum().backward()


def peak_of_step(layers, x, recomputed):
    """Bytes of activations at the peak: weights and gradients exist before the step, and don't count."""
    live = measure.LiveBytes().track(*layers, x)
    there = live.live - x.nbytes
    with live:
        run_step(layers, x, recomputed)
    return live.peak - there


def operations_of(layers, x, recomputed):
    """The operations of one step, including those of recomputation."""
    with FlopCounterMode(display=False) as counter:
        run_step(layers, x, recomputed)
    return counter.get_total_flops()


layers, images = small_training()
switches = {"nothing": [False] * len(layers), "every block": [True] * len(layers)}
plain = operations_of(layers, images, switches["nothing"])
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    nn.Sequential(*layers)(images)
forward = counter.get_total_flops()
baseline = [(name, peak_of_step(layers, images, choice), (operations_of(layers, images, choice) - plain) / forward)
            for name, choice in switches.items()]  # fmt: skip
report.table({"recomputed": "{}", "peak of activations": measure.human_bytes, "forward again": "{:.0%}"}, baseline)
states = 16 * sum(p.numel() for layer in layers for p in layer.parameters())
print(f"weights, gradients and AdamW's averages: {measure.human_bytes(states)}, whatever the batch")

# %% [markdown]
# Which blocks keep most of the activations? The last ones have most of the parameters.

# %%
convolutions = tp.predict("Of all bytes kept for backward, what share (%) do the stem and the convolutions keep?", ...)


# %% tags=["slide"] jupyter={"source_hidden": true}
def kept_by_block():
    """[(name, bytes of parameters, bytes kept for the backward pass)] of stem, blocks and head, in order."""
    live, x, rows = measure.LiveBytes().track(*layers, images), images, []
    with live:
        for k, layer in enumerate(layers):
            kind = "stem" if k == 0 else "head" if k == len(layers) - 1 else kind_of(layer)
            before, x = live.live, layer(x)
            rows.append((f"{kind} {k}", sum(p.nbytes for p in layer.parameters()), live.live - before))
    return rows


def kind_of(block):
    return "attention" if hasattr(block, "attention") else "conv"


kept = kept_by_block()
_, (above, below) = plt.subplots(2, 1, figsize=(8, 4.2), layout="constrained", sharex=True)
names, weights, activations = zip(*kept)
colours = ["#E69F00" if "attention" in name else "#56B4E9" if "conv" in name else "#999999" for name in names]
above.bar(names, [4 * size / 2**20 for size in weights], color=colours)
below.bar(names, [size / 2**20 for size in activations], color=colours)
above.set(ylabel="MiB", title="Weights, gradients and averages")
below.set(ylabel="MiB", title=f"Kept for the backward pass, {BATCH} images")
below.tick_params(axis="x", rotation=45)
plt.show()
early = [not name.startswith(("attention", "head")) for name in names]
share = {what: sum(size for size, one in zip(sizes, early) if one) / sum(sizes)
         for what, sizes in (("the parameters", weights), ("what is kept", activations))}  # fmt: skip
print("stem and convolutions: " + ", ".join(f"{part:.0%} of {what}" for what, part in share.items()))

# %%
why = "An early convolution has few weights, but it applies them at many places and keeps its input for every place."
convolutions.shows(100 * share["what is kept"], "{:.0f} %", why)

# %% [markdown]
# Recomputation therefore helps at the beginning of the network, and sharding the states (ZeRO) helps at the end.

# %% [markdown]
# ## From an image to tokens
#
# A Vision Transformer (ViT) cuts an image into square patches and reads each as a token. A convolution whose stride
# equals its kernel size can do this. Its windows don't overlap, so it is a **matrix product** of flattened patches and
# the flattened kernel.
#
# ### Balise 1 · Patches, class token, positions · further · about 10 min
#
# Write this product without a convolution, `F.unfold` or a loop.
#
# - `cut_patches` returns the patches in reading order. Within a patch, the order is that of a convolution's kernel:
#   channel, row, column.
#
# ```
# images                 n, channels,  height      , width
# squares (reshape)      n, channels,  rows, size  , columns, size
# patches                n, (rows · columns), (channels · size · size)
# ```
#
# - `embed_image` makes tokens `(n, 1 + patches, width)`. `weight` `(width, channels, size, size)` and `bias` are the
#   convolution's. The `class_token` `(1, 1, width)`, which gathers what the image shows, comes first. The code that
#   adds the positions is given.
#
# <details><summary>Hint</summary>
#
# `permute` brings axes that belong together side by side, and `flatten` joins them. `weight.flatten(1)` is the matrix
# for `F.linear`. `class_token.expand(n, -1, -1)` gives each image a class token without a copy.
# </details>


# %% tags=["balise-1"]
def cut_patches(images, size):
    """Cut images (n, channels, height, width) into squares: (n, patches, channels·size²). ValueError if pixels are left."""
    n, channels, height, width = images.shape
    if height % size or width % size:
        raise ValueError(f"{height} × {width} pixels do not divide into patches of {size} × {size}")
    # BEGIN SOLUTION
    squares = images.reshape(n, channels, height // size, size, width // size, size)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    # END SOLUTION


def embed_image(images, weight, bias, class_token, positions):
    """The tokens (n, 1 + patches, width) that a ViT begins with."""
    # BEGIN SOLUTION
    tokens = F.linear(cut_patches(images, weight.shape[-1]), weight.flatten(1), bias)
    tokens = torch.cat([class_token.expand(len(images), -1, -1), tokens], dim=1)
    # END SOLUTION
    if tokens.shape[1] != positions.shape[1]:
        raise ValueError(f"{positions.shape[1]} positions for {tokens.shape[1]} tokens")
    return tokens + positions


# %%
tp.check(1, cut_patches, embed_image)

# %% [markdown]
# ## Attention with relative positions
#
# CoAtNet's self-attention learns a number for each *offset* between a query at $i$ and a key at $j$:
#
# $$y_i = \sum_j \underset{j}{\operatorname{softmax}} \left( \frac{q_i \cdot k_j}{\sqrt{d}} + w_{i - j} \right) v_j ,
# \qquad d = \text{the size of a head} .$$
#
# ### Balise 2 · Attention with relative positions · further · about 11 min
#
# - **`relative_bias`** looks up the bias of all pairs, `(heads, places, places)`, queries first, without a loop. Row
#   offsets go from $-(H - 1)$ to $H - 1$, so offset 0 is at index `[head, H - 1, W - 1]`. The row and the column of
#   each place are given.
# - **`relative_attention`** is the formula with its scores *written out*, without `scaled_dot_product_attention`. `q`,
#   `k`, `v` are `(n, heads, places, …)`.
#
# <details><summary>Hint</summary>
#
# `rows[:, None] - rows[None]` gives all differences, query minus key. Two tensors of integers index together: `table[:,
# down, right]`. `softmax` takes care of large scores.
# </details>


# %% tags=["balise-2"]
def relative_bias(table, height, width):
    """The bias of every query and key, (heads, places, places), from a table of offsets (heads, 2H - 1, 2W - 1)."""
    rows = torch.arange(height, device=table.device).repeat_interleave(width)
    columns = torch.arange(width, device=table.device).repeat(height)
    # BEGIN SOLUTION
    down = rows[:, None] - rows[None] + height - 1
    right = columns[:, None] - columns[None] + width - 1
    return table[:, down, right]
    # END SOLUTION


def relative_attention(q, k, v, bias):
    """Attention with a bias on its scores, which are written out. Returns (n, heads, places, size of v's vectors)."""
    # BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias
    return scores.softmax(dim=-1) @ v
    # END SOLUTION


# %%
tp.check(2, relative_bias, relative_attention)

# %% [markdown]
# ## Does the fused kernel save memory? · further
#
# `scaled_dot_product_attention` (SDPA) may use a *fused* kernel that never holds the whole table of scores.


# %%
def library(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


KINDS = {
    "written out": (relative_attention, True),
    "SDPA, bias learnt": (library, True),
    "SDPA, bias frozen": (library, False),
}


def attention_inputs(side, learnt, n=4, heads=4, d=32):
    """q, k, v and the bias for side × side places."""
    q, k, v = (torch.randn(n, heads, side**2, d, device=DEVICE, requires_grad=True) for _ in range(3))
    table = torch.randn(heads, 2 * side - 1, 2 * side - 1, device=DEVICE)
    return q, k, v, relative_bias(table, side, side).requires_grad_(learnt)


def score_memory(attention, side, learnt):
    """(bytes of one table, bytes kept for the backward pass, bytes added at the peak)."""
    given = q, _, _, bias = attention_inputs(side, learnt)
    live = measure.LiveBytes().track(*given)
    before = live.live
    with live:
        out = attention(*given)
        kept = live.live - before
        out.sum().backward()
    return len(q) * bias.nbytes, kept, live.peak - before


rows = [(name, *score_memory(attention, 28, learnt)) for name, (attention, learnt) in KINDS.items()]
size = measure.human_bytes
report.table(
    {"28 × 28 places": "{}", "table of scores": size, "kept for backward": size, "added at the peak": size}, rows
)

# %% [markdown]
# A *learnt* bias needs a gradient as large as the table. The fused CPU kernel can't compute it, so PyTorch silently
# writes the scores out. The CUDA kernel can.

# %% [markdown]
# ## Large models, before anything is allocated
#
# A linear layer from $a$ to $b$ channels, used at $n$ places, has $(a + 1)\,b$ parameters and takes $2\,a\,b\,n$
# operations. A multiplication and an addition are two operations; those of norms and biases don't count. A 1 × 1
# convolution is a linear layer.
#
# ### Balise 3 · Parameters and operations, as formulas · further · about 11 min
#
# Return `(parameters, operations)` of a forward pass of **one image**. The next cell compares them with PyTorch's
# counter: they must be equal.
#
# - `attention_cost`: queries, keys and values from `c` to `d` channels (all heads together), the two products of
#   self-attention between `n` places, and a projection from `d` to `d`. All four layers have a bias. Each head has
#   `table` learnt numbers for relative positions.
# - `feed_forward_cost`: two linear layers, d → f → d.
# - `mbconv_cost`: parameters and shortcut are given. Add up the operations of its products. At the places *before* the
#   stride: c → m. At the places *after* it: a 3 × 3 convolution of each channel alone (9 → 1), then m → d. Once per
#   image: m → squeezed → m.
#
# <details><summary>Hint</summary>
#
# The scores are a product of (n, d/h) and (d/h, n) for each of h heads: $2 n^2 d$ in all. The product of scores and
# values is as large.
# </details>


# %% tags=["balise-3"]
def attention_cost(c, d, n, heads, table):
    """(parameters, operations an image) of attention from c to d channels between n places."""
    # BEGIN SOLUTION
    parameters = 3 * (c + 1) * d + (d + 1) * d + heads * table
    return parameters, 2 * n * (3 * c * d + d * d) + 2 * 2 * n * n * d
    # END SOLUTION


def feed_forward_cost(d, f, n):
    """(parameters, operations an image) of two linear layers d → f → d at n places."""
    # BEGIN SOLUTION
    return (d + 1) * f + (f + 1) * d, 2 * n * (d * f + f * d)
    # END SOLUTION


def mbconv_cost(c, d, height, width, stride):
    """(parameters, operations an image) of an MBConv block from c channels of height × width to d channels."""
    m, squeezed = 4 * d, d // 4
    before, after = height * width, (height // stride) * (width // stride)
    parameters = 2 * c + c * m + 2 * m + 9 * m + 2 * m + (m + 1) * squeezed + (squeezed + 1) * m + (m + 1) * d
    # BEGIN SOLUTION
    operations = 2 * (before * c * m + after * 9 * m + 2 * m * squeezed + after * m * d)
    # END SOLUTION
    if c != d:
        parameters += (c + 1) * d
        operations += 2 * after * c * d
    return parameters, operations


# %%
tp.check(3, attention_cost, feed_forward_cost, mbconv_cost)

# %% [markdown]
# ## Predicted and counted, up to billions · further
#
# The `meta` device makes tensors that have a shape but no data, so PyTorch can count the operations of a model that no
# card could hold.


# %% tags=["setup"] jupyter={"source_hidden": true}
def added(*costs):
    return tuple(map(sum, zip(*costs)))


# %% jupyter={"source_hidden": true}
def vit_costs(config):
    """(parameters, operations an image) of a ViT."""
    d, n, pixels = config.width, config.patches + 1, config.patch**2 * config.channels
    layer = added(attention_cost(d, d, n, config.heads, 0), feed_forward_cost(d, config.ffn_width, n), (4 * d, 0))
    patches = (pixels + 1) * d + (n + 1) * d, 2 * config.patches * pixels * d
    head = 2 * d + (d + 1) * config.classes, 2 * d * config.classes
    return added(*[layer] * config.layers, patches, head)


def coatnet_costs(config):
    """(parameters, operations an image) of a CoAtNet: the stem, each block, the head."""
    height, width, first, last = config.image[0] // 2, config.image[1] // 2, config.stem, config.stages[-1].width
    rows = [((27 + 2 + 9 * first) * first, 2 * height * width * (27 * first + 9 * first**2))]
    for kind, c, d, stride, (height, width) in coatnet.block_shapes(config):
        if kind == "conv":
            rows.append(mbconv_cost(c, d, height, width, stride))
            continue
        h, w = height // stride, width // stride
        shortcut = ((c + 1) * d, 2 * h * w * c * d) if c != d else (0, 0)
        table = (2 * h - 1) * (2 * w - 1)
        both = attention_cost(c, d, h * w, d // config.head, table), feed_forward_cost(d, 4 * d, h * w)
        rows.append(added(*both, shortcut, (2 * c + 2 * d, 0)))
    classes = config.classes
    rows.append((2 * last + (last + 1) * (last + classes), 2 * last * (last + classes)))
    return rows


# %%
def counted_on_meta(model, config):
    """(parameters, operations an image) of the model itself, without data."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = model(config).eval()
        network(torch.empty(1, 3, *config.image))
    return sum(p.numel() for p in network.parameters()), counter.get_total_flops()


rows = []
for name, model, config in (("ViT-B/16", ViT, VITS["B/16"]), ("ViT-G/14", ViT, VITS["G/14"]),
                            *((f"CoAtNet-{n}", CoAtNet, COATNETS[n]) for n in (0, 3, 5, 7))):  # fmt: skip
    predicted = vit_costs(config) if model is ViT else added(*coatnet_costs(config))
    equal = predicted == counted_on_meta(model, config)
    rows.append((name, predicted[0] / 1e6, predicted[1] / 1e9, "yes" if equal else "no"))
report.table(
    {"model": "{}", "million parameters": "{:,.1f}", "GFLOP an image": "{:,.1f}", "equal to counted": "{}"}, rows
)

# %% [markdown]
# ## Where memory goes
#
# In float32 with AdamW, parameters, gradients and optimizer states take 4, 4 and 8 bytes a parameter. Activations grow
# with the batch. An operation keeps the tensors that its derivative needs:
#
# | operation | keeps, besides weights |
# |---|---|
# | linear layer, convolution | its input |
# | layer norm | its input; a mean and a deviation for each token |
# | GELU | its input |
# | fused attention | queries, keys, values; its output; one number for each head and token |
# | sum, bias, positions | nothing |
# | cross-entropy | a number for each class |
#
# A tensor kept by two operations counts once. The **storage** is what counts: a view of a single number keeps the
# whole storage alive.
#
# ### Balise 4 · Where memory goes · about 16 min
#
# **`kept_bytes`** asks autograd. Inside `saved_tensors_hooks`, PyTorch calls `note(tensor)` for each tensor that it
# keeps. Add the bytes of each storage to `found[-1]`, the sum of the current layer, but only once: `seen` has the
# addresses that no longer count, at first those of weights and buffers.
#
# **`predict_memory`** runs nothing. From the table, write how many *numbers* each part of a ViT block keeps for an
# image with s tokens of width d:
#
# ```
# x ─ norm ─ qkv (d → 3d) ─ fused attention, h heads ─ linear ─ + ─ norm ─ linear (d → f) ─ GELU ─ linear (f → d) ─ + ─
# ```
#
# Then sum up `kept`: the `image`, which a convolution reads; `config.layers` blocks; a norm of all tokens; a linear
# layer that reads a *view* of the norm's output; the cross-entropy over `config.classes`.
#
# <details><summary>Hint</summary>
#
# `tensor.untyped_storage()` has `data_ptr()`, its address, and `nbytes()`. A layer's output is the input of the next: a
# norm keeps its input, s · d, and s means and s deviations; the layer after it keeps the norm's result.
# </details>


# %% tags=["balise-4"]
def kept_bytes(layers, x):
    """Bytes that each layer keeps for backward, a list. A storage counts once; weights and buffers don't count."""
    seen = {t.untyped_storage().data_ptr() for layer in layers for t in [*layer.parameters(), *layer.buffers()]}
    found = []

    def note(tensor):
        # BEGIN SOLUTION
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[-1] += storage.nbytes()
        # END SOLUTION
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for layer in layers:
            found.append(0)
            x = layer(x)
    return found


def predict_memory(config, batch):
    """Bytes of parameters, gradients, optimizer states and activations of a step of ViT(config): a dictionary."""
    with torch.device("meta"):
        n = sum(p.numel() for p in ViT(config).parameters())
    s, d, f, h = config.patches + 1, config.width, config.ffn_width, config.heads
    # how many numbers each part of a block keeps for one image
    # BEGIN SOLUTION
    norm = s * (d + 2)
    attention = s * (d + 3 * d + d + h)
    feed_forward = s * (d + f + f)
    # END SOLUTION
    image = config.channels * config.image[0] * config.image[1]
    # kept: the sum of all numbers that are kept for one image
    # BEGIN SOLUTION
    head = norm + s * d + config.classes
    kept = image + config.layers * (norm + attention + norm + feed_forward) + head
    # END SOLUTION
    return {"parameters": 4 * n, "gradients": 4 * n, "optimizer states": 8 * n, "activations": 4 * batch * kept}


# %%
tp.check(4, kept_bytes, predict_memory)

# %%
TINY = dataclasses.replace(VITS["Ti/16"], layers=6, patch=8, image=(64, 64), classes=100)
rows = []
for name, config, batch in (("tiny ViT", TINY, 1), ("tiny ViT", TINY, 32), ("ViT-S/16", VITS["S/16"], 1)):
    vit = [ViT(config).to(DEVICE), Loss(batch, config.classes).to(DEVICE)]
    kept = sum(kept_bytes(vit, torch.randn(batch, config.channels, *config.image, device=DEVICE)))
    rows.append((name, batch, predict_memory(config, batch)["activations"], kept))
size = measure.human_bytes
report.table({"model": "{}", "images": "{}", "activations, predicted": size, "measured": size}, rows)

# %% [markdown]
# ## Recomputation under a budget
#
# Blocks differ in the bytes they keep and in the operations it takes to recompute them. Which should run again?


# %% tags=["setup"]
class Block(NamedTuple):
    """What one block costs, in bytes except for the operations."""

    kept: int  # from forward to backward if it isn't recomputed, its input included
    input: int  # all that it keeps if it is recomputed
    work: int  # the most bytes in use while it is computed, forward or backward, `kept` included
    operations: int  # of one forward pass: what recomputing it costs


# %% [markdown]
# ### Balise 5 · Recomputation under a budget · about 14 min
#
# - **`peak_bytes`**: while a block is computed, its `work` is in memory together with what the blocks *before* it hold.
# - **`choose_blocks`**: there are $2^n$ lists, but only *how many bytes are held* matters for later blocks. Of two
#   lists that hold the same number of bytes, forget the more expensive one:
#
# ```
# found   bytes held so far → (extra operations, choices)
#           0 → (0, [])      →      kept₁ → (0, [False])      →   …
#                                  input₁ → (operations₁, [True])
# ```
#
# You write one step, from `found` to `longer`. Each entry has two successors, or none if this block's `work` doesn't
# fit on top of its bytes.
#
# **Write all of it:** `tp.open_task(5)` gives you only names and docstrings. Find the cheapest of $2^{48}$ lists in
# three seconds.
#
# <details><summary>Hint</summary>
#
# `longer.get(bytes, option)` returns the existing entry, or the option if there is none. `min` of two tuples compares
# their first entries. Each entry needs its own list: `[*choices, again]`.
# </details>


# %% tags=["balise-5", "slide-mistake=live-block-forgotten"]
def peak_bytes(blocks, recomputed):
    """The most bytes in use at once, in forward or backward.

    blocks: a list of `Block`, in forward order. recomputed: a list with True for each block that is recomputed.
    While a block is computed, its `work` is in memory, together with what the blocks before it hold: `input` if they
    are recomputed, `kept` if not. `work` includes what the block itself holds. Blocks after it hold nothing.
    """
    held = peak = 0
    for block, again in zip(blocks, recomputed):
        # BEGIN SOLUTION
        peak = max(peak, held + block.work)
        held += block.input if again else block.kept
        # END SOLUTION
    return peak


def choose_blocks(blocks, budget):
    """Which blocks to recompute: a list of True and False, one for each block in forward order. None if no list fits.

    Among the lists with peak_bytes(blocks, list) <= budget, it has the fewest extra operations: the smallest sum of
    `operations` over the blocks that are recomputed. 48 blocks of many megabytes may take three seconds at most, so
    you can try neither all lists nor all numbers of bytes. But many lists hold the same number of bytes.
    """
    found = {0: (0, [])}  # bytes held so far: (extra operations, choices)
    for block in blocks:
        longer = {}
        for held, (extra, choices) in found.items():
            # BEGIN SOLUTION
            if held + block.work > budget:
                continue
            for again, size, cost in ((False, block.kept, 0), (True, block.input, block.operations)):
                option = (extra + cost, [*choices, again])
                longer[held + size] = min(option, longer.get(held + size, option))
            # END SOLUTION
        found = longer
    return min(found.values())[1] if found else None


# %%
tp.check(5, peak_bytes, choose_blocks)

# %% [markdown]
# ## Measured again
#
# Each block is measured alone. From these measurements, your `choose_blocks` plans whole steps.

# %%
cheaper = tp.predict(
    "Recomputing every block gives the lowest peak. What share (%) of its extra operations is enough for this peak?",
    ...,
)


# %% jupyter={"source_hidden": true}
def measure_blocks(layers, x):
    """A Block for each layer."""
    found = []
    for layer, kept in zip(layers, kept_bytes(layers, x)):
        x = x.detach().requires_grad_()
        # checkpoint stops as soon as it has what backward needs, so this is less than a forward pass
        again = operations_of([layer], x, [True]) - operations_of([layer], x, [False])
        found.append(Block(kept, x.nbytes, peak_of_step([layer], x, [False]), again))
        x = layer(x)
    return found


# %% tags=["slide"]
def choices_for(blocks, budgets):
    """{name: which blocks are recomputed}: the switches, then your choices, from the smallest budget up."""
    most, least = (peak_bytes(blocks, switches[name]) for name in ("nothing", "every block"))
    yours = [least + (most - least) * k // budgets for k in range(budgets)]
    return switches | {f"yours, at most {budget / 2**20:.0f} MiB": choose_blocks(blocks, budget) for budget in yours}


def trade(budgets=5):
    """Rows of the table below; extra operations in forward passes."""
    blocks = measure_blocks(layers, images)
    choices = choices_for(blocks, budgets)
    steps = {name: functools.partial(run_step, layers, images, choice) for name, choice in choices.items()}
    seconds = measure.race(steps, repeats=3, warmup=1, calls=1).medians
    return [(name, peak_bytes(blocks, choice), peak_of_step(layers, images, choice),
             sum(block.operations for block, again in zip(blocks, choice) if again) / forward,
             (operations_of(layers, images, choice) - plain) / forward, seconds[name] / seconds["nothing"])
            for name, choice in choices.items()]  # fmt: skip


traded = trade()
size, passes = measure.human_bytes, "{:.0%}"
report.table({"recomputed": "{}", "peak, predicted": size, "peak, measured": size, "forward again, predicted": passes,
              "measured": passes, "time": "{:.2f}×"}, traded)  # fmt: skip
why = "Only the blocks before the largest one have to make room for it. The later ones may keep their activations."
cheaper.shows(100 * traded[2][4] / traded[1][4], "{:.0f} %", why)

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
yours = sorted(row[1:] for row in traded if row[0] != "every block")
axes.plot([row[0] / 2**20 for row in yours], [row[2] for row in yours], drawstyle="steps-post", color="C0",
          label="yours, predicted")  # fmt: skip
axes.plot([row[1] / 2**20 for row in yours], [row[3] for row in yours], "o", color="C0", label="yours, measured")
axes.plot(traded[1][2] / 2**20, traded[1][4], "s", color="C1", label="every block, measured")
axes.set(xlabel="MiB of activations at the peak", ylabel="forward pass run again", xlim=(0, None), ylim=(-0.03, 0.75))
axes.yaxis.set_major_formatter(PercentFormatter(1))
axes.legend()
plt.show()

# %% [markdown]
# The plan works because memory follows from shapes. Seconds follow operations less closely: norms and GELUs take few
# operations but move many bytes.

# %% [markdown]
# ## A gradient lives only until it is used
#
# After an ordinary backward pass, all gradients exist at once. **Optimizer fusion** updates each parameter as soon as
# its gradient is complete, and frees the gradient.
#
# ### Balise 6 · The optimizer's step inside backward · further · about 13 min
#
# Prepare a model so that `loss.backward()` alone updates it. `p.register_post_accumulate_grad_hook(f)` calls `f(p)` as
# soon as `p.grad` is complete. Step there, then free the gradient. The given lines refuse what needs all gradients at
# once.
#
# `make([p, …])` makes an optimizer, such as AdamW, for some parameters. After every step, the weights must equal those
# of the usual loop, with momentum too. Some parameters may be frozen. Return the list of optimizers, so that a loop can
# change their learning rates.
#
# <details><summary>Hint</summary>
#
# Make one optimizer for each parameter, in a dictionary. A function made in a loop sees the loop variable's *last*
# value, so use the hook's argument.
# </details>


# %% tags=["balise-6"]
def step_in_backward(model, make, max_norm=None, micro_batches=1, scaler=None):
    """From now on backward updates each parameter as soon as its gradient is there. Returns the list of optimizers."""
    if max_norm is not None:
        raise ValueError("the norm of all gradients is known only after the first ones are gone")
    if micro_batches > 1:
        raise ValueError("to add up the gradients of several micro-batches, all of them would have to stay in memory")
    if scaler is not None:
        raise ValueError("whether to skip a step is known only after its first updates are done")
    # BEGIN SOLUTION
    optimizers = {p: make([p]) for p in model.parameters() if p.requires_grad}

    def update(p):
        optimizers[p].step()
        p.grad = None

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())
    # END SOLUTION


# %%
tp.check(6, step_in_backward)


# %% jupyter={"source_hidden": true}
class Curve(measure.LiveBytes):
    """Also records how many bytes are live after each operation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.append(self.live)
        return out


def prepare(batch, fused):
    """(model, optimizers, function that makes a step): the usual loop, or a step inside backward."""
    torch.manual_seed(0)
    model = ViT(TINY).to(DEVICE)
    make = lambda parameters: torch.optim.AdamW(parameters, foreach=False)  # noqa: E731
    optimizers = step_in_backward(model, make) if fused else [make(model.parameters())]
    images, labels = (
        torch.randn(batch, 3, *TINY.image, device=DEVICE),
        torch.zeros(batch, dtype=torch.long, device=DEVICE),
    )

    def step():
        F.cross_entropy(model(images), labels).backward()
        if not fused:
            optimizers[0].step()
            model.zero_grad()

    step()  # now the states exist
    return model, optimizers, step


def curves(batch):
    """{name: curve of a step's memory}"""
    found = {}
    for name, fused in (("the usual loop", False), ("step inside backward", True)):
        model, optimizers, step = prepare(batch, fused)
        found[name] = Curve().track(model, *optimizers)
        with found[name]:
            step()
    return found


# %%
fused_curves = curves(1)
usual, fused = (curve.peak for curve in fused_curves.values())
gradients = predict_memory(TINY, 1)["gradients"]
print(f"one image: peak {usual / 2**20:.1f} MiB, with the step inside backward {fused / 2**20:.1f} MiB; "
      f"all gradients take {gradients / 2**20:.1f} MiB")  # fmt: skip
print(measure.race({"step inside backward": prepare(1, True)[2], "the usual loop": prepare(1, False)[2]}, repeats=5))

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, curve in fused_curves.items():
    axes.plot([live / 2**20 for live in curve.seen], label=name)
axes.set(xlabel="operation of the step", ylabel="MiB in use", title="One step, one image", ylim=(0, None))
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# Without the plateau of gradients, the peak moves to the end of forward, where both loops hold the same bytes. With
# many images the peak is there anyway, and only recomputation lowers it.

# %% [markdown]
# ## Where data parallelism ends
#
# ZeRO shards the states over ranks, and recomputation lowers the activations. How large a model, and how large a batch,
# can a card then train?
#
# ### Balise 7 · The largest batch that fits · about 14 min
#
# **`rank_bytes`** is what a rank holds. `stage` 0 is DDP; ZeRO's stages 1, 2 and 3 shard the optimizer states, then the
# gradients, then the weights. The `states` that a rank keeps in mixed precision with Adam are given. Add
#
# - `activations` bytes for each of this rank's `batch` images;
# - 2 bytes a parameter of the `largest` block, once for each tensor that exists only for a moment: its whole gradient
#   from stage 2 on, and its gathered weights in stage 3.
#
# **`largest_batch`** finds the largest batch from 1 to `most` with `bytes_of(batch) <= memory`, or 0. `bytes_of` never
# falls when the batch grows, but it may be a slow measurement: call it about log₂(`most`) times, and only with batches
# from 1 to `most`. Start from a batch that `fits` and one that `fails`.
#
# <details><summary>Hint</summary>
#
# As long as the two aren't neighbours, try the batch in the middle. True counts as 1: `(stage >= 2) + (stage >= 3)`.
# </details>


# %% tags=["balise-7"]
def rank_bytes(n_parameters, largest, activations, batch, n_ranks, stage):
    """Bytes of one rank in a training step; activations: bytes an image, largest: parameters of the largest block."""
    states = planner.state_bytes(n_parameters, n_ranks, stage).total
    # BEGIN SOLUTION
    moment = 2 * largest * ((stage >= 2) + (stage >= 3))
    return states + batch * activations + moment
    # END SOLUTION


def largest_batch(bytes_of, memory, most):
    """The largest batch up to `most` with bytes_of(batch) <= memory; 0 if there is none."""
    fits, fails = 0, most + 1
    # BEGIN SOLUTION
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if bytes_of(middle) <= memory:
            fits = middle
        else:
            fails = middle
    # END SOLUTION
    return fits


# %%
tp.check(7, rank_bytes, largest_batch)

# %% [markdown]
# ## The limit, card by card
#
# *Fake* tensors have a shape but no data, so the bytes of a step can be counted without a card. The next cell measures
# one block of each kind, and your `peak_bytes` adds them up. 64 ranks train in mixed precision with Adam; a tenth of
# each card stays free.

# %% jupyter={"source_hidden": true}
FLOAT = 4  # bytes: the fake tensors are float32; mixed precision keeps half of that


@functools.cache
def block_bytes(make, *sizes, images=64):
    """`Block` of make(*sizes), in float32 bytes an image, on fake tensors. The last of `sizes` is the input's shape."""
    *sizes, shape = sizes
    with FakeTensorMode(), measure.LiveBytes() as live:
        layer, x = make(*sizes), torch.zeros(images, *shape, requires_grad=True)
        weights = sum(one.nbytes for one in itertools.chain(layer.parameters(), layer.buffers()))
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(live.track_gradient)
        live.track(layer)
        y = layer(x)
        kept = live.live - weights - y.nbytes  # its result is the input of the next, and counts there
        y.backward(torch.ones_like(y))
        return Block(kept // images, x.nbytes // images, live.parts_at_peak["activations"] // images, 0)


def coatnet_blocks(config):
    """`Block`s of a CoAtNet, stem and head too."""
    last, side = config.stages[-1].width, [edge // 32 for edge in config.image]
    found = [block_bytes(coatnet.Stem, 3, config.stem, (3, *config.image))]
    for kind, c, d, stride, (height, width) in coatnet.block_shapes(config):
        if kind == "conv":
            found.append(block_bytes(coatnet.MBConv, c, d, stride, (c, height, width)))
        else:
            places = height // stride, width // stride
            found.append(block_bytes(coatnet.AttentionBlock, c, d, stride, config.head, places, (c, height, width)))
    return [*found, block_bytes(coatnet.Head, last, config.classes, (last, *side))]


def by_block_and_whole(images=32):
    """Do the blocks add up? A step of CoAtNet-0, by block and whole, on fake tensors."""
    blocks = coatnet_blocks(COATNETS[0])
    ours = images * peak_bytes(blocks, [False] * len(blocks))
    whole = measure.estimate_memory(lambda: CoAtNet(COATNETS[0]), (3, 224, 224), images).activations
    print(f"CoAtNet-0, {images} images, float32, activations at the peak: by block {ours / 1e9:.2f} GB, "
          f"whole {whole / 1e9:.2f} GB ({100 * (ours / whole - 1):+.1f} %)")  # fmt: skip


by_block_and_whole()

# %%
ddp_limit = tp.predict("Which CoAtNet, 0 to 7, is the largest that plain DDP can train on cards of 32 GB?", ...)

# %% jupyter={"source_hidden": true}
NAMES = {"32 GB (V100)": "V100-32GB", "80 GB (H100)": "H100", "141 GB (H200)": "H200"}
CARDS = {name: planner.CARDS[card].memory for name, card in NAMES.items()}  # bytes, as the driver shows them
TECHNIQUES = {  # name: (stage, whether every block is recomputed)
    "DDP": (0, False), "ZeRO 1": (1, False), "ZeRO 2": (2, False), "ZeRO 3": (3, False),
    "DDP, recomputed": (0, True), "ZeRO 3, recomputed": (3, True),
}  # fmt: skip
RANKS, FREE = 64, 0.1


@functools.cache
def needs(number, stage, again):
    """A function from the batch to the bytes of a rank that trains CoAtNet-`number` in mixed precision."""
    config = COATNETS[number]
    rows, blocks = coatnet_costs(config), coatnet_blocks(config)
    activations = peak_bytes(blocks, [again] * len(blocks)) * 2 / FLOAT
    parameters, largest = added(*rows)[0], max(held for held, _ in rows)
    return lambda batch: rank_bytes(parameters, largest, activations, batch, RANKS, stage)


@functools.cache
def limits():
    """{card: {technique: the largest batch of CoAtNet-0 to 7}}"""
    most = 4096
    return {
        card: {name: [largest_batch(needs(n, *how), (1 - FREE) * memory, most) for n in COATNETS]
               for name, how in TECHNIQUES.items()}
        for card, memory in CARDS.items()
    }  # fmt: skip


# %%
why = "Every rank holds 16 bytes a parameter: DDP doesn't shard them, however many ranks there are."
for card, batches in limits().items():
    rows = [(name, *(batch or None for batch in row)) for name, row in batches.items()]
    report.table({f"largest batch, {card}": "{:<20}"} | {f"CoAtNet-{n}": "{}" for n in COATNETS}, rows)
ddp_limit.shows(max(n for n in COATNETS if limits()["32 GB (V100)"]["DDP"][n]), "CoAtNet-{:.0f}", why)

# %% [markdown]
# These are estimates for a CPU's kernels, which write the attention scores out. Small models fill the card with
# activations, so recomputation helps. CoAtNet-7's states alone exceed 32 GB, so it needs ZeRO first. Stage 1 already
# shards 12 of the 16 bytes.

# %% [markdown]
# ## Past this machine · further
#
# The table *estimates* what each technique changes for CoAtNet-7 on 64 H100s.


# %% jupyter={"source_hidden": true}
def costs(number=7, card="80 GB (H100)"):
    """Rows of the table below."""
    parameters, operations = added(*coatnet_costs(COATNETS[number]))
    for name, (stage, again) in TECHNIQUES.items():
        states = planner.state_bytes(parameters, RANKS, stage).total / 1e9
        image = (needs(number, stage, again)(1) - needs(number, stage, again)(0)) / 1e9
        sent = planner.step_volume(parameters, RANKS, stage) / 1e9
        yield name, states, image, limits()[card][name][number], sent, (3 + again) * operations / 1e12


report.table({"80 GB": "{}", "GB of states": "{:.1f}", "GB an image": "{:.2f}", "largest batch": "{}",
              "GB sent a step": "{:.1f}", "TFLOP an image": "{:.2f}"}, list(costs()))  # fmt: skip


# %% jupyter={"source_hidden": true}
def draw_rank(number=7, batch=32):
    parameters = added(*coatnet_costs(COATNETS[number]))[0]
    _, ax = plt.subplots(figsize=(8, 3.1), layout="constrained")
    for y, (stage, again) in enumerate(TECHNIQUES.values()):
        held, bytes_of = planner.state_bytes(parameters, RANKS, stage), needs(number, stage, again)
        images = batch * (bytes_of(1) - bytes_of(0))
        parts = {"weights": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
        parts |= {"for a moment": bytes_of(0) - held.total, f"activations of {batch} images": images}
        left = 0
        for k, (part, size) in enumerate(parts.items()):
            ax.barh(y, size / 1e9, left=left, color=f"C{k}", label=part if y == 0 else None)
            left += size / 1e9
    for card, memory in CARDS.items():
        ax.axvline(memory / 1e9, color="0.3", ls=":", lw=1)
        ax.text(memory / 1e9, -0.75, card, ha="center", fontsize=8)
    ax.set(yticks=range(len(TECHNIQUES)), yticklabels=TECHNIQUES, xlabel="GB of a rank", xlim=(0, 160))
    ax.set_title(f"What fills the card: CoAtNet-{number}, {batch} images a card, {RANKS} ranks", pad=16)
    ax.invert_yaxis()
    ax.legend(loc="lower right", fontsize=8)
    plt.show()


draw_rank()

# %% [markdown]
# **MFU** (*model FLOPs utilization*) is the share of the cards' peak that the model's own operations reach. At an
# assumed MFU of 0.4, the three billion images of JFT-3B take:


# %% jupyter={"source_hidden": true}
def show_days(number=7, assumed=0.4, images=3e9):
    forward = added(*coatnet_costs(COATNETS[number]))[1]
    peak = RANKS * planner.H100.bfloat16
    speed = planner.Throughput(images, 3 * forward * images / (assumed * peak), forward, peak)
    print(f"CoAtNet-{number} on {RANKS} H100 at an MFU of {speed.mfu:.2f}: {speed.per_second:,.0f} images a second, and "
          f"{speed.seconds / 86400:.1f} days for {images / 1e9:.0f} billion images (an estimate)")  # fmt: skip
    print(f"With every block recomputed, the same speed would keep the cards {speed.hfu():.0%} busy (HFU).")


show_days()

# %% [markdown]
# ## Three questions
#
# **1.** CoAtNet-7 with AdamW in float32 doesn't fit on a 32 GB GPU. A colleague asks for four times as many GPUs to
# run the same DDP. What do you say?
#
# <details><summary>Answer</summary>
#
# It will fail in the same way on all of them. 2.44 billion parameters at 16 bytes each are 39 GB on *each* rank. More
# GPUs help once they shard the states (ZeRO, works 13 and 14) or the model itself (15 to 17).
# </details>
#
# **2.** You fine-tune on 448 pixels instead of 224. What happens to the parameters, to what convolutions keep, to a
# written-out table of scores, and to the table of relative positions?
#
# <details><summary>Answer</summary>
#
# The weights don't change. Convolutions have four times as many places and keep four times as much. A table of scores
# has four times the queries and four times the keys, so it is sixteen times as large. The relative table gets about
# four times as many numbers; the missing ones are interpolated.
# </details>
#
# **3.** To save half of the activations, do you recompute the blocks that keep the most bytes?
#
# <details><summary>Answer</summary>
#
# Not by their bytes alone. What counts is how many bytes a block frees for each operation that runs again. Also, one
# very large block limits what recomputation can save, because all its work is in memory at once.
# </details>

# %% [markdown] tags=["slide"]
# ## To remember
#
# **Data parallelism divides the images and nothing else.** With AdamW in float32, 16 bytes a parameter is the floor on
# every rank. Activations follow from shapes, so you can plan recomputation: free the bytes that are kept before the
# peak, and repeat as few operations as possible. ZeRO lowers the floor, and pays in messages.

# %%
tp.progress()
