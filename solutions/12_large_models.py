# %% [markdown]
# # Large models: where memory goes, and where data parallelism ends · about 90 min, core 40
#
# In 2021 the two best networks on ImageNet were CoAtNet-7 and ViT-G/14, of 2.4 and 1.8 billion parameters; ResNet-50
# has 25 million. Data parallelism gives each rank a copy of the model and a share of the images. It makes training
# faster, but a copy that does not fit on one card fits on none of a thousand.
#
# Here you predict what a training step holds in memory, and find the largest batch that fits. Further on you write what such
# models are made of, count their parameters and operations without allocating a single one, and write two ways of
# holding less: recomputation under a budget, and an optimizer that steps inside backward.
#
# **What you will gain.** At the end you say of any card which is the largest model that it trains, with how many images, and
# with which technique, without ever having seen the card.

# %% tags=["setup"]
import dataclasses
import functools
import itertools
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp import course, launch, measure, planner, report, scale, todo
from dlojz_tp.models import COATNETS, VITS, CoAtNet, CoAtNetConfig, Stage, ViT, coatnet

tp = course.open("12_large_models")
tp

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # the layers are small here: a second thread waits more than it works

# %% [markdown]
# ## The idea
#
# CoAtNet is a convolutional network whose last stages are a transformer. While the image is large, convolutions (*MBConv*) look
# at what is near; once it is small, attention looks at all of it. Most stages halve the sides, and each has more channels.
#
# A rank that trains it with AdamW in float32 holds, for $P$ parameters and $B$ images over $N$ ranks,
#
# $$M \;=\; \underbrace{4 P}_{\text{weights}} + \underbrace{4 P}_{\text{gradients}} + \underbrace{8 P}_{\text{two averages}}
# + \underbrace{a\, B / N}_{\text{activations}} \quad \text{bytes.}$$
#
# Ranks divide the last term, and nothing else: the first three are a floor, on each of them. The bars on the right are this
# floor, from the numbers of parameters that the authors published.


# %% jupyter={"source_hidden": true}
def draw_stages(axes):
    """CoAtNet-7: its stages as boxes, as high as their maps of features."""
    config, side = COATNETS[7], 112
    axes.bar(0, side, color="#999999", width=0.7)
    axes.text(0, side + 3, f"stem\n{side} × {side}\n{config.stem} ch.", ha="center", fontsize=8)
    for k, stage in enumerate(config.stages, 1):
        side //= stage.stride
        axes.bar(k, side, color="#56B4E9" if stage.kind == "conv" else "#E69F00", width=0.7)
        text = f"{stage.kind} ×{stage.blocks}\n{side} × {side}\n{stage.width:,} ch."
        axes.text(k, side + 3, text, ha="center", fontsize=8)
    axes.set(ylim=(0, 150), xticks=[], ylabel="side of a map, in places", title="CoAtNet-7, image of 224 pixels")
    axes.grid(False)


def draw_floor(axes):
    """16 bytes for each of the published parameters, beside what cards have."""
    published = {"CoAtNet-0": 25e6, "CoAtNet-3": 168e6, "CoAtNet-5": 688e6, "CoAtNet-6": 1.47e9, "ViT-G/14": 1.84e9,
                 "CoAtNet-7": 2.44e9}  # fmt: skip
    floors = {f"{name}: {16 * count / 1e9:.1f} GB": 16 * count / 1e9 for name, count in published.items()}
    axes.barh(list(floors), list(floors.values()), color="#CC79A7")
    for memory in (32, 80, 141):
        axes.axvline(memory, color="#666666", linestyle="--", linewidth=1)
        axes.text(memory, 1.02, f"{memory} GB", ha="center", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set(xlim=(0, 150), xlabel="GB a rank, before the first image")
    axes.set_title("Weights, gradients and averages", pad=18)


_, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained", width_ratios=(1.2, 1))
draw_stages(left)
draw_floor(right)
plt.show()

# %% [markdown]
# ## The baseline: one step of a small CoAtNet
#
# The same architecture, small enough for this machine. How long does a step take, and what does it hold at its peak? The blocks
# towards the end are the widest, and have most parameters. Guess before you run what follows.

# %%
convolutions = tp.predict("Which share, in %, of what is kept for backward do the stem and the convolutions keep?", ...)

# %%
STAGES = (Stage("conv", 1, 32), Stage("conv", 2, 64), Stage("attention", 3, 128), Stage("attention", 2, 256))
SMALL = COATNETS[0] if FULL else CoAtNetConfig(16, STAGES, image=(64, 64))
BATCH = 64 if FULL else 16


def small_training():
    """A small CoAtNet, AdamW, random images and labels."""
    torch.manual_seed(0)
    model = CoAtNet(SMALL).to(DEVICE)
    images = torch.randn(BATCH, 3, *SMALL.image, device=DEVICE)
    return model, torch.optim.AdamW(model.parameters()), images, torch.randint(SMALL.classes, (BATCH,), device=DEVICE)


def baseline(steps=3):
    """(records of the steps' phases, what lives at the peak)."""
    model, optimizer, images, labels = small_training()
    chrono = measure.Chronometer(DEVICE, warmup=1)
    for x, y in chrono.steps([(images, labels)] * (steps + 1)):
        with chrono.forward():
            loss = F.cross_entropy(model(x), y)
        with chrono.backward():
            loss.backward()
        with chrono.optimizer():
            optimizer.step()
            optimizer.zero_grad()
    live = measure.LiveBytes().track(model, optimizer, images, labels)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(live.track_gradient)
    with live:
        measure.training_step(model, optimizer, images, labels)
    return measure.counted_steps(chrono.record("baseline", batch_size=BATCH)), live


def show_baseline():
    steps, live = baseline()
    times = {phase: statistics.median(step[phase] for step in steps) for phase in ("forward", "backward", "optimizer")}
    whole = sum(times.values())
    print(f"a step of {BATCH} images on {DEVICE}: {measure.human_seconds(whole)}, {BATCH / whole:,.0f} images/s")
    print("  " + ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in times.items()))
    print(f"at its peak {measure.human_bytes(live.peak)}:")
    print(
        "  "
        + ", ".join(
            f"{part} {size / live.peak:.0%}" for part, size in live.parts_at_peak.items() if size > live.peak / 200
        )
    )


show_baseline()

# %% [markdown]
# The peak lies somewhere in the backward pass: gradients come, activations go. Most of it is activations. Which layers keep them?


# %%
def kept_by_block():
    """[(name, bytes of parameters, bytes kept for the backward pass)] of stem, blocks and head, in order."""
    model, _, images, labels = small_training()
    live = measure.LiveBytes().track(model, images, labels)
    parts = {"stem": model.stem} | {f"{kind(block)} {k}": block for k, block in enumerate(model.blocks)}
    parts["head"] = model.head
    after = [live.live]
    for part in parts.values():
        part.register_forward_hook(lambda *_: after.append(live.live))
    with live:
        loss = F.cross_entropy(model(images), labels)  # noqa: F841  (holds what backward will need)
    weights = [sum(p.nbytes for p in part.parameters()) for part in parts.values()]
    return list(zip(parts, weights, [end - begin for begin, end in itertools.pairwise(after)]))


def kind(block):
    return "attention" if hasattr(block, "attention") else "conv"


kept = kept_by_block()

# %% jupyter={"source_hidden": true}
_, (above, below) = plt.subplots(2, 1, figsize=(8, 4.2), layout="constrained", sharex=True)
names, weights, activations = zip(*kept)
colours = ["#E69F00" if "attention" in name else "#999999" if name in ("stem", "head") else "#56B4E9" for name in names]
above.bar(names, [4 * size / 2**20 for size in weights], color=colours)
below.bar(names, [size / 2**20 for size in activations], color=colours)
above.set(ylabel="MiB", title="Weights, gradients and averages")
below.set(ylabel="MiB", title=f"Kept for the backward pass, {BATCH} images")
below.tick_params(axis="x", rotation=30)
plt.show()
early = [not name.startswith(("attention", "head")) for name in names]
share = {what: sum(size for size, one in zip(sizes, early) if one) / sum(sizes)
         for what, sizes in (("the parameters", weights), ("what is kept", activations))}  # fmt: skip
print("stem and convolutions: " + ", ".join(f"{part:.0%} of {what}" for what, part in share.items()))

# %%
why = "A convolution at the beginning has few weights, and uses each at thousands of places: every place is an activation."
convolutions.shows(100 * share["what is kept"], "{:.0f} %", why)

# %% [markdown]
# Parameters and activations run in opposite directions. A technique that shares out states (ZeRO) helps with the end of the
# network, one that keeps fewer activations (recomputation) with its beginning.

# %% [markdown]
# ## From an image to tokens
#
# A Vision Transformer (ViT; Dosovitskiy and others, 2020) cuts an image into squares, and reads them as a text is read: a
# square is a word. Attention knows no order, so each token gets a vector that says where it stands. One more token, the
# **class token**, stands for no square: it gathers what the image shows.
#
# Libraries do the cut with a convolution whose stride is as long as its kernel. No two of its windows overlap, so it is a
# **matrix product**: a patch laid out as a vector, times the kernel laid out as a matrix.
#
# ### Balise 1 · Patches, class token, positions · further · about 6 min
#
# Write that product, without a convolution, `F.unfold` or a loop. Only the order of the axes matters:
#
# ```
# images                 n, channels,  height      , width
# squares (reshape)      n, channels,  rows, size  , columns, size
# patches                n, (rows · columns), (channels · size · size)
# ```
#
# The squares come row by row as one reads; in each vector one channel after the other, row by row, as in the kernel of a
# convolution. `cut_patches` returns them; that sizes which do not divide are refused is given.
#
# `embed_image` makes tokens `(n, 1 + patches, width)` of them: `weight` `(width, channels, size, size)` and `bias` are those of the
# convolution, and `class_token` `(1, 1, width)` comes first. Positions are given. About 4 lines in all.
#
# <details><summary>Hint</summary>
#
# `permute` brings axes that belong together side by side, `flatten` joins them. `weight.flatten(1)` is the matrix for
# `F.linear`. `class_token.expand(n, -1, -1)` gives one to each image without a copy.
# </details>


# %% tags=["balise-1"]
def cut_patches(images, size):
    """Cut images (n, channels, height, width) into squares: (n, patches, channels·size²). ValueError where some are cut off."""
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
# ## Attention that knows where things are
#
# A vector for each position ties the model to one image size, and what it has learnt in one corner it must learn again in the
# other. A convolution does not: it only knows *offsets*. CoAtNet (Dai and others, 2021) gives attention the same. To the score
# of a query at place $i$ and a key at place $j$ it adds a number that was learnt for the offset $i - j$:
#
# $$y_i = \sum_j \underset{j}{\operatorname{softmax}} \left( \frac{q_i \cdot k_j}{\sqrt{d}} + w_{i - j} \right) v_j ,
# \qquad d = \text{the size of a head} .$$
#
# On $H \times W$ places there are $(2H - 1)(2W - 1)$ offsets: a small table for each head, instead of a number for
# each of the $(HW)^2$ pairs.
#
# ### Balise 2 · Attention with relative positions · further · about 7 min
#
# - **`relative_bias`** looks the numbers of all pairs up in `table` `(heads, 2H - 1, 2W - 1)`: `(heads, places, places)`, queries
#   first. An offset of rows goes from $-(H - 1)$ to $H - 1$, an index begins at 0: hence the number for offset 0 stands in the
#   middle, at `[head, H - 1, W - 1]`. Row and column of each place are given. No loop.
# - **`relative_attention`** is the formula, with the scores *written out*: `q`, `k`, `v` are `(n, heads, places, …)`, `bias` that of
#   above. Do without `scaled_dot_product_attention`: that is what you are compared with.
#
# About 5 lines in all.
#
# <details><summary>Hint</summary>
#
# `rows[:, None] - rows[None]` are all differences, query minus key. Two tensors of integers index together:
# `table[:, down, right]`. `softmax` takes care of large scores.
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
# ## What written-out scores cost · further
#
# A table of scores has a number for each pair of places, in each head of each image. PyTorch's
# `scaled_dot_product_attention` (SDPA) may work through it piece by piece in one *fused* kernel (Dao and others, 2022), and keep
# next to nothing. Does it, with relative positions? Four images of 28 × 28 places, four heads.


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


SIDES = (7, 14, 28)
found = {name: [score_memory(attention, side, learnt) for side in SIDES] for name, (attention, learnt) in KINDS.items()}
print(f"28 × 28 places: a table of scores has {measure.human_bytes(found['written out'][-1][0])}")
for name, rows in found.items():
    table, kept, peak = rows[-1]
    print(f"  {name + ':':19} {kept / table:5.2f} tables kept for the backward pass, {peak / table:5.2f} at the peak")

# %% jupyter={"source_hidden": true}
places, tables = [side**2 for side in SIDES], [row[0] / 2**20 for row in found["written out"]]
_, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
for (name, rows), marker in zip(found.items(), "osD"):
    axes.plot(places, [row[1] / 2**20 for row in rows], marker=marker, label=name)
axes.plot(places, tables, "--", color="#999999", label="one table: ∝ places²")
axes.set(xscale="log", yscale="log", xlabel="places", ylabel="MiB kept", title="What one attention keeps")
axes.set_xticks(places, [f"{side} × {side}" for side in SIDES])
axes.minorticks_off()
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Written out, the weights of the softmax wait for the backward pass: one table. At the peak, in the backward pass, the
# gradients of the weights and of the scores live beside them.
#
# SDPA chooses among several kernels. With a frozen bias it takes one that never has the whole table. A bias that is *learnt*
# needs a gradient as large as a table, and the kernel for a CPU has none: PyTorch then writes the scores out as you do. Nothing
# says so; only the memory tells. (Its kernel for CUDA does have a gradient for the bias.) Measure what you were promised.

# %% [markdown]
# ## Large, before anything is allocated
#
# ### Balise 3 · Parameters and operations, as formulas · further · about 7 min
#
# What a model needs follows from its sizes. For the three layers that ViT and CoAtNet are made of, return `(parameters,
# operations)` of a forward pass of **one image**. One rule is enough. A linear layer from $a$ to $b$ channels, used at $n$
# places, has $(a + 1)\,b$ parameters and takes $2\,a\,b\,n$ operations; a multiplication and an addition are two, and norms and
# biases take none that count. A 1 × 1 convolution is such a layer.
#
# - `attention_cost`: queries, keys and values from `c` channels to `d`, in all heads together; then a projection from `d` to `d`;
#   all with a bias. Each of the `heads` has `table` learned numbers for relative positions. Where do the `n` places meet each
#   other?
# - `feed_forward_cost`: two linear layers, d → f → d.
# - `mbconv_cost`: a convolutional block (MBConv). Its parameters are given, layer by layer. Yours are the operations of its five
#   products: c → m *before* the stride; then, at the places that are left, 9 → 1 for each channel alone (the 3 × 3 convolution),
#   and m → d; and for one mean an image m → squeezed → m. The shortcut is given.
#
# About 4 lines in all.
#
# <details><summary>Hint</summary>
#
# The scores are a product of (n, d/h) and (d/h, n) for each of h heads: $2 n^2 d$ in all. Then the scores meet the values.
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
# ## Two families, by your formulas · further
#
# Blocks add up to models. The norms, the ends and the stem are given. No weight exists yet: `torch.device("meta")` makes tensors
# that have a shape and no data, and serves to compare.


# %% tags=["setup"]
def added(*costs):
    return tuple(map(sum, zip(*costs)))


# %%
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
    """(parameters, operations an image, seconds that this took) of the model itself, without data."""
    start = time.perf_counter()
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = model(config).eval()
        network(torch.empty(1, 3, *config.image))
    return sum(p.numel() for p in network.parameters()), counter.get_total_flops(), time.perf_counter() - start


def show_families():
    rows = {f"ViT-{name}": vit_costs(config) for name, config in VITS.items()}
    rows |= {f"CoAtNet-{n}": added(*coatnet_costs(config)) for n, config in COATNETS.items()}
    compared = {
        "ViT-B/16": (ViT, VITS["B/16"]),
        "CoAtNet-0": (CoAtNet, COATNETS[0]),
        "CoAtNet-3": (CoAtNet, COATNETS[3]),
    }
    print(f"{'':<11}{'parameters':>14}{'GFLOP an image':>16}")
    for name, (parameters, operations) in rows.items():
        print(f"{name:<11}{parameters / 1e6:>12,.1f} M{operations / 1e9:>16,.1f}", end="")
        if name in compared:
            *due, seconds = counted_on_meta(*compared[name])
            print(f"   counted on meta: {'equal' if [parameters, operations] == due else due}, {seconds:.1f} s", end="")
        print()


show_families()

# %% [markdown]
# The parameters are those of the papers. Three oddities: CoAtNet-3, 168 million in its paper, comes out at 167, in `timm` too,
# and CoAtNet-5 at 687 instead of 688; for CoAtNet-6 the paper's table 12 prints a last width of 2,048, which makes 1.35
# billion: its 1.47 ask for 3,072. Papers on vision often count a multiplication and an addition as one: half of these
# operations, and even then CoAtNet's are some per cent fewer in its paper (34.7 instead of 36.5 billion for CoAtNet-3).


# %% jupyter={"source_hidden": true}
def draw_shares(numbers=(0, 4, 7)):
    figure, axes = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained", sharey=True)
    figure.suptitle("Where parameters are, and where operations are done")
    for k, (ax, what) in enumerate(zip(axes, ("parameters", "operations of an image"))):
        for y, n in enumerate(numbers):
            kinds = ["stem", *[kind for kind, *_ in coatnet.block_shapes(COATNETS[n])], "head"]
            rows, left = [row[k] for row in coatnet_costs(COATNETS[n])], 0
            for kind, color in {"stem": "#999999", "conv": "#56B4E9", "attention": "#E69F00", "head": "C7"}.items():
                part = 100 * sum(row for row, name in zip(rows, kinds) if name == kind) / sum(rows)
                ax.barh(
                    y,
                    part,
                    left=left,
                    color=color,
                    label={"conv": "convolutions"}.get(kind, kind) if y == 0 else None,
                )
                if part > 5:
                    ax.text(left + part / 2, y, f"{part:.0f}", ha="center", va="center")
                left += part
        ax.set(xlabel=f"% of {what}", yticks=range(len(numbers)), yticklabels=[f"CoAtNet-{n}" for n in numbers])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plt.show()


draw_shares()


# %% [markdown]
# A parameter costs memory once; its operations, and the activations behind it, come at each place. So the large models make
# the *late* stages deep and wide: their parameters cost the least time.

# %% [markdown]
# ## Where memory goes
#
# Four things fill a card. **Parameters**, their **gradients** and the **states** of the optimizer depend on the model alone: in
# float32 with AdamW 4, 4 and 8 bytes a parameter. **Activations**, what forward keeps for backward, grow with the batch. Which
# tensors these are follows from the derivatives: a product needs its factors, a sum needs nothing.
#
# | operation | keeps, besides weights |
# |---|---|
# | linear layer, convolution | its input |
# | layer norm | its input; mean and deviation, one number each for a token |
# | GELU | its input |
# | fused attention | queries, keys, values; its output; one number for a head and a token |
# | sum, bias, positions | nothing |
# | cross-entropy | a number for each class |
#
# A tensor that two operations keep is there once. And what counts is the **storage**: a view of one number keeps all of it.
#
# ### Balise 4 · Where memory goes · about 12 min
#
# **First ask autograd.** `kept_bytes(layers, x)` calls the layers one after the other and returns the bytes that each of them keeps
# for backward. Given is where autograd tells: inside `saved_tensors_hooks`, `note(tensor)` is called for each tensor that is kept.
# What do you add, when two layers keep the same tensor, or a view of it? `found[-1]` is the sum of the layer at work; the
# addresses in `seen`, at first those of weights and buffers, are not to be counted.
#
# **Then predict it**, by the table, without running anything. A block of a ViT of width d has s tokens; write how many *numbers* of
# an image each part keeps, `s * (…)`:
#
# ```
# x ─ norm ─ qkv (d → 3d) ─ fused attention, h heads ─ linear ─ + ─ norm ─ linear (d → f) ─ GELU ─ linear (f → d) ─ + ─
# ```
#
# Before the blocks a convolution reads the `image`; after them come a norm of all tokens, a linear layer that reads a *view* of
# it, the class token, and the cross-entropy over `config.classes`. There are `config.layers` blocks. About 9 lines in all.
#
# <details><summary>Hint</summary>
#
# `tensor.untyped_storage()` has `data_ptr()`, its address, and `nbytes()`. In the formula, what a layer gives out is the input of
# the next: a norm keeps its input, s · d, and s means and deviations each; the layer after it keeps the norm's result.
# </details>


# %% tags=["balise-4"]
def kept_bytes(layers, x):
    """Bytes that each layer keeps for backward, a list. A storage counts once, those of weights and buffers do not."""
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
    # the numbers that the parts of a block keep of one image
    # BEGIN SOLUTION
    norm = s * (d + 2)
    attention = s * (d + 3 * d + d + h)
    feed_forward = s * (d + f + f)
    # END SOLUTION
    image = config.channels * config.image[0] * config.image[1]
    # and all that is kept of one image: kept
    # BEGIN SOLUTION
    head = norm + s * d + config.classes
    kept = image + config.layers * (norm + attention + norm + feed_forward) + head
    # END SOLUTION
    return {"parameters": 4 * n, "gradients": 4 * n, "optimizer states": 8 * n, "activations": 4 * batch * kept}


# %%
tp.check(4, kept_bytes, predict_memory)

# %% [markdown]
# ## Predicted beside measured
#
# First the activations, your two functions beside each other. Then a whole step: at every operation of a training step, all
# bytes that live are counted. The four parts have a sum. Guess.

# %%
saved = tp.predict("With two images, by how many % lies a step's highest point below the sum of the four parts?", ...)

# %%
TINY = dataclasses.replace(VITS["Ti/16"], layers=6, patch=8, image=(64, 64), classes=100)


class Loss(nn.Module):
    """The cross-entropy with random labels, as a last layer."""

    def __init__(self, batch, classes):
        super().__init__()
        self.register_buffer("labels", torch.randint(classes, (batch,)))

    def forward(self, logits):
        return F.cross_entropy(logits, self.labels)


def compare_activations(name, config, batch):
    """Print what is kept for backward: by formula, and as autograd tells."""
    layers = [ViT(config).to(DEVICE), Loss(batch, config.classes).to(DEVICE)]
    measured = sum(kept_bytes(layers, torch.randn(batch, config.channels, *config.image, device=DEVICE)))
    predicted = predict_memory(config, batch)["activations"]
    print(f"{name:>9}, batch {batch:2}: predicted {predicted / 2**20:7.2f} MiB, measured {measured / 2**20:7.2f} MiB "
          f"({predicted / measured - 1:+.1%})")  # fmt: skip


for name, config, batch in (("tiny ViT", TINY, 1), ("tiny ViT", TINY, 32), ("ViT-S/16", VITS["S/16"], 1)):
    compare_activations(name, config, batch)


# %%
class Curve(measure.LiveBytes):
    """Also notes, after each operation: all bytes that live, and those of gradients."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.append((self.live, sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)))
        return out


def follow_step(config, batch):
    """(predicted parts, the curve of a step's memory)"""
    model = ViT(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    images, labels = torch.randn(batch, 3, *config.image), torch.randint(config.classes, (batch,))
    given = model, optimizer, images.to(DEVICE), labels.to(DEVICE)
    measure.training_step(*given)  # now the states exist
    curve = Curve(model).track(*given)
    with curve:
        measure.training_step(*given)
    return predict_memory(config, batch), curve


followed = {batch: follow_step(TINY, batch) for batch in (32, 2)}
for batch, (parts, curve) in followed.items():
    print(f"batch {batch:2}: the four parts {sum(parts.values()) / 2**20:5.1f} MiB, the highest point "
          f"{curve.peak / 2**20:5.1f} MiB, {curve.peak / sum(parts.values()):.0%} of it")  # fmt: skip
why = "Backward frees activations while it makes gradients: they are never all there at once."
saved.shows(100 - 100 * followed[2][1].peak / sum(followed[2][0].values()), "{:.0f} %", why)


# %% jupyter={"source_hidden": true}
def draw_step(axes, batch, parts, curve):
    fixed = (parts["parameters"] + parts["optimizer states"]) / 2**20
    live, gradients = (torch.tensor(row, dtype=torch.float64) / 2**20 for row in zip(*curve.seen))
    layers = [torch.full_like(live, fixed), gradients, (live - gradients - fixed).clamp(min=0)]
    axes.stackplot(range(len(live)), *layers, labels=["parameters and states", "gradients", "activations, temporary results"],
                   colors=["#999999", "#D55E00", "#56B4E9"])  # fmt: skip
    axes.axhline(sum(parts.values()) / 2**20, color="#333333", linestyle="--", label="sum of the four predicted parts")
    axes.set(title=f"{batch} image{'s' if batch > 1 else ''}", xlabel="operation of the step", ylim=(0, None))


_, axes = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained")
for ax, (batch, (parts, curve)) in zip(axes, followed.items()):
    draw_step(ax, batch, parts, curve)
axes[0].set(ylabel="MiB that live")
axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
plt.show()

# %% [markdown]
# With many images the peak stands where forward ends, and gradients hardly count; with two, gradients are as large as
# activations, and only the larger of both counts. A little comes on top: each operation's own results. Balise 5 lowers the hill
# on the left, balise 6 the plateau on the right.

# %% [markdown]
# ## Memory for time: recomputation · further
#
# A block whose activations are thrown away keeps its input alone. Before its backward pass it runs forward again, and what it
# then keeps lives only until that backward pass is over. The usual switch: every block, or none. (`torch.compile`
# takes a budget, `activation_memory_budget`.) But blocks differ, in the bytes that they keep and in the operations that they take. **Which** ones?

# %% tags=["setup"]
from typing import NamedTuple

from matplotlib.ticker import PercentFormatter
from torch.utils.checkpoint import checkpoint


class Block(NamedTuple):
    """What one block costs. Bytes, except for the operations."""

    kept: int  # from forward to backward, if it is not recomputed; its input is part of it
    input: int  # of its input: all that it keeps if it is recomputed
    work: int  # that live at most while this block is computed, forward or backward; kept is part of it
    operations: int  # of one forward pass: what recomputing it costs


# %% [markdown]
# ### Balise 5 · Recomputation under a budget · further · about 10 min
#
# `blocks` is a list of `Block` in the order of forward, `recomputed` a list with True for each block that is recomputed.
#
# **`peak_bytes`**: while a block is computed, its `work` lives beside what the blocks *before* it hold (those after it hold nothing
# yet in forward, nothing any more in backward). The peak is the largest such sum.
#
# **`choose_blocks`**: the list whose peak is at most `budget` bytes, and whose extra operations are the fewest. 50 blocks have $2^{50}$
# lists. But who continues from block k need not know which blocks before it were recomputed, only *how much they hold*; and of
# two ways to the same number of bytes the dearer one can be forgotten:
#
# ```
# found   bytes held so far → (extra operations, choices)
#           0 → (0, [])      →      kept₁ → (0, [False])      →   …
#                                  input₁ → (operations₁, [True])
# ```
#
# Most blocks of a stage are alike, so few sums differ. Yours is one step of it, from `found` to `longer`: two successors for each
# entry, unless this block's `work` no longer fits. About 7 lines in all.
#
# <details><summary>Hint</summary>
#
# `longer.get(bytes, option)` is what is there, or else the option; `min` of two tuples compares their first entries. Each way needs
# a list of its own: `[*choices, again]`.
# </details>


# %% tags=["balise-5"]
def peak_bytes(blocks, recomputed):
    """The most bytes that live at once; recomputed: a list of True and False, one a block."""
    held = peak = 0
    for block, again in zip(blocks, recomputed):
        # BEGIN SOLUTION
        peak = max(peak, held + block.work)
        held += block.input if again else block.kept
        # END SOLUTION
    return peak


def choose_blocks(blocks, budget):
    """Which blocks to recompute: a peak of at most `budget`, the fewest extra operations. None if nothing fits."""
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
# ## Measured: memory against time · further
#
# A small CoAtNet, block by block: what each keeps is counted by your `kept_bytes`, its `work` and its operations are measured with
# this block alone. Then your choice for several budgets, beside the usual switches: every block, or every second one.


# %%
def run_step(layers, x, recomputed):
    """Forward and backward; the blocks for which `recomputed` says True keep their input alone."""
    for layer, again in zip(layers, recomputed):
        x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    x.sum().backward()


def operations_of(layers, x, recomputed):
    """Of one step, those of recomputation included."""
    with FlopCounterMode(display=False) as counter:
        run_step(layers, x, recomputed)
    return counter.get_total_flops()


def peak_of_step(layers, x, recomputed):
    """Bytes, without weights and their gradients, which are there before and after."""
    live = measure.LiveBytes().track(*layers, x)
    there = live.live - x.nbytes
    with live:
        run_step(layers, x, recomputed)
    return live.peak - there


# %%
def measure_blocks(layers, x):
    """(a Block for each layer, operations of a whole forward pass)"""
    found, forward = [], 0
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    for layer, kept in zip(layers, kept_bytes(layers, x)):
        x = x.detach().requires_grad_()
        # checkpoint stops as soon as it has what backward needs: a little less than a forward pass
        again = operations_of([layer], x, [True]) - operations_of([layer], x, [False])
        found.append(Block(kept, x.nbytes, peak_of_step([layer], x, [False]), again))
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
        forward += counter.get_total_flops()
    return found, forward


# %%
DEEPER = tuple(dataclasses.replace(stage, blocks=blocks) for stage, blocks in zip(STAGES, (2, 3, 5, 2)))
DEEP = COATNETS[0] if FULL else CoAtNetConfig(16, DEEPER, image=(64, 64))


def choices_for(blocks, budgets):
    """{name: which blocks are recomputed}: the switches, and yours from the least budget that fits upwards."""
    n = len(blocks)
    most = peak_bytes(blocks, [False] * n)
    least = next(budget for budget in range(most // 100, most, most // 100) if choose_blocks(blocks, budget))
    rows = {"nothing": [False] * n, "every block": [True] * n}
    rows |= {f"every second, from {first}": [i % 2 == first for i in range(n)] for first in (0, 1)}
    yours = [least + (most - least) * k // budgets for k in range(budgets)]
    return rows | {f"yours, at most {budget / 2**20:.0f} MiB": choose_blocks(blocks, budget) for budget in yours}


# %%
def trade(budgets=5, batch=BATCH // 4):
    """{name: (predicted and measured peak in MiB, predicted and measured extra operations in forward passes, seconds)}"""
    torch.manual_seed(0)
    model = CoAtNet(DEEP).to(DEVICE)
    layers = [model.stem, *model.blocks, nn.Sequential(model.head, Loss(batch, DEEP.classes).to(DEVICE))]
    x = torch.randn(batch, 3, *DEEP.image, device=DEVICE)
    (blocks, forward), found = measure_blocks(layers, x), {}
    choices = choices_for(blocks, budgets)
    steps = {name: functools.partial(run_step, layers, x, choice) for name, choice in choices.items()}
    seconds = measure.race(steps, repeats=3, warmup=1, calls=1).medians
    plain = operations_of(layers, x, choices["nothing"])
    for name, choice in choices.items():
        extra = sum(block.operations for block, again in zip(blocks, choice) if again)
        found[name] = (peak_bytes(blocks, choice) / 2**20, peak_of_step(layers, x, choice) / 2**20, extra / forward,
                       (operations_of(layers, x, choice) - plain) / forward, seconds[name])  # fmt: skip
    return found


# %%
traded = trade()
print(
    f"{'recomputed':>24} {'MiB predicted':>14} {'measured':>9} {'forward again, predicted':>25} {'measured':>9} {'time':>6}"
)
for name, (peak, measured_peak, extra, measured_extra, seconds) in traded.items():
    print(f"{name:>24} {peak:14.1f} {measured_peak:9.1f} {extra:25.0%} {measured_extra:9.0%} "
          f"{seconds / traded['nothing'][-1]:5.2f}×")  # fmt: skip


# %% jupyter={"source_hidden": true}
def draw_trade(axes):
    yours = sorted(row for name, row in traded.items() if name.startswith(("yours", "nothing")))
    axes.plot(
        [row[0] for row in yours],
        [row[2] for row in yours],
        drawstyle="steps-post",
        color="C0",
        label="yours, predicted",
    )
    axes.plot([row[1] for row in yours], [row[3] for row in yours], "o", color="C0", label="yours, measured")
    for name, row in traded.items():
        if name.startswith("every"):
            axes.plot(row[1], row[3], "s", color="C1", label="switches, measured" if name == "every block" else None)
            axes.annotate(name, (row[1], row[3]), xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set(
        xlabel="MiB at the peak, without weights and gradients",
        ylabel="forward passes again",
        xlim=(0, None),
        ylim=(-0.03, 0.75),
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend()


_, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
draw_trade(axes)
plt.show()


# %%
def against(name):
    """What your choice saves where `name` fits."""
    peak, _, extra, *_ = traded[name]
    fits = [row for other, row in traded.items() if other.startswith("yours") and row[0] <= peak]
    if not fits:
        return f"{name}: none of the budgets above is as small"
    best = min(row[2] for row in fits)
    return f"{name}: {extra:.0%} of a forward pass again; yours within its {peak:.0f} MiB: {best:.0%}"


for name in ("every block", "every second, from 0", "every second, from 1"):
    print(against(name))

# %% [markdown]
# Memory can be planned: it follows from the shapes, and the plan holds. No choice comes below the peak of *every block*, but most
# of what that recomputes is in vain: the peak stands at one block, and later ones may keep what they like as long as it
# stays there. Seconds need not follow operations, as norms and GELUs have few operations and many bytes. And a batch norm that is
# recomputed updates its running mean twice in a step.

# %% [markdown]
# ## A gradient lives only until it is used
#
# After the usual backward pass, the gradients of all parameters exist together, as many bytes as the parameters; then the
# optimizer goes through them. But the gradient of a layer is complete long before the backward pass ends. If its step is done
# *there*, its memory is free again for the next one. The lecture calls this **optimizer fusion** (Jiang and others, 2021).
#
# ### Balise 6 · The optimizer's step inside backward · further · about 11 min
#
# Prepare a model so that `loss.backward()` alone updates it. `p.register_post_accumulate_grad_hook(f)` calls `f(p)` as soon as `p.grad`
# is complete. What has to happen there, and what must be gone afterwards? `make([p, …])` makes an optimizer of some parameters, such
# as `torch.optim.AdamW`. The weights must be those of the usual loop, step by step, so an optimizer's momentum has to last
# from step to step. Some parameters may be frozen. Return the list of optimizers: a loop may want to change their rates.
#
# Read what is given: three things cannot be had with it, and each refusal says why. About 7 lines.
#
# <details><summary>Hint</summary>
#
# One optimizer for each parameter, in a dictionary. A function made in a loop sees the loop variable's *last* value: use what the
# hook is given.
# </details>


# %% tags=["balise-6"]
def step_in_backward(model, make, max_norm=None, micro_batches=1, scaler=None):
    """From now on backward updates each parameter as soon as its gradient is there. Returns the list of optimizers."""
    if max_norm is not None:
        raise ValueError("the norm of all gradients is known when the first ones are gone already")
    if micro_batches > 1:
        raise ValueError("to add up gradients of several micro-batches, all of them would have to stay")
    if scaler is not None:
        raise ValueError("whether to skip a step is known when its first updates are done already")
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

# %% [markdown]
# The step of before with one image, and the same with your hooks. Where does its highest point lie now?


# %%
def prepare(batch, fused):
    """(model, optimizers, what makes a step): the usual loop, or a step inside backward."""
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
        found[name] = Curve(model).track(model, *optimizers)
        with found[name]:
            step()
    return found


# %%
fused_curves = curves(1)
usual, fused = (curve.peak for curve in fused_curves.values())
gradients = predict_memory(TINY, 1)["gradients"]
print(f"peak {usual / 2**20:.1f} MiB, with the step inside backward {fused / 2**20:.1f} MiB: "
      f"{(usual - fused) / gradients:.0%} of the bytes of all gradients less")  # fmt: skip
print(measure.race({"step inside backward": prepare(1, True)[2], "the usual loop": prepare(1, False)[2]}, repeats=5))

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, curve in fused_curves.items():
    axes.plot([live / 2**20 for live, _ in curve.seen], label=name)
axes.set(xlabel="operation of the step", ylabel="MiB that live", title="One step, one image", ylim=(0, None))
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# The plateau of gradients is gone, and the highest point lies at the end of forward, where both loops need the same: with many
# images nothing is gained, unless recomputation lowers that too. It need not be faster: an optimizer is called for each
# parameter. The *fused* optimizers of libraries are something else: one kernel for many parameters.

# %% [markdown]
# ## Where data parallelism ends
#
# In data parallelism each rank holds a whole model and its own images. More ranks take more images; they make no room for a
# larger model. ZeRO shares out the states. Recomputation throws activations away, and computes them again in backward. What is
# the most that a card can take?
#
# ### Balise 7 · The largest batch that fits · about 11 min
#
# **`rank_bytes`**: what a rank holds in a step. `stage` 0 is DDP; in ZeRO's stages 1, 2 and 3 the ranks share out the optimizer's
# states, then the gradients too, then the weights too. Given is what is left of all these, in mixed precision with Adam. Beside
# it live
#
# - the activations, `activations` bytes for each of the `batch` images *of this rank*;
# - what is there for a moment, before it is shared out, 2 bytes a parameter of the `largest` block: its gradient from stage 2 on,
#   in stage 3 its gathered weights as well.
#
# **`largest_batch`**: the largest batch from 1 to `most` with `bytes_of(batch) <= memory`, 0 if there is none. `bytes_of` never falls
# when the batch grows, but it may be a measurement that takes seconds: ask about log₂(`most`) times. Given are two numbers, a
# batch that `fits` and one that `fails`. What do you ask, and which of the two moves? About 8 lines in all.
#
# <details><summary>Hint</summary>
#
# Until they are neighbours, ask for the one in the middle. True counts as 1: `(stage >= 2) + (stage >= 3)`.
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
# *Fake* tensors have a shape and no data: a step on them counts bytes, and needs no card. Most of CoAtNet-7's 58 blocks are alike.
# Take one of each kind, forward and backward, and count the bytes of living tensors: those that it keeps, and those that it needs
# at its worst. `peak_bytes` of balise 5 adds up.

# %%
FLOAT = 4  # bytes: the fake tensors are float32; mixed precision keeps half of that


@functools.cache
def block_bytes(make, *sizes, images=64):
    """`Block` of one layer, make(*sizes) without the last: bytes an image in float32, on fake tensors of the last size."""
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


# %%
def by_block_and_whole(images=32):
    """Whether blocks add up: a step of CoAtNet-0, by block and whole, on fake tensors."""
    blocks = coatnet_blocks(COATNETS[0])
    ours = images * peak_bytes(blocks, [False] * len(blocks))
    whole = measure.estimate_memory(lambda: CoAtNet(COATNETS[0]), (3, 224, 224), images).activations
    print(f"CoAtNet-0, {images} images, float32, activations at the peak: by block {ours / 1e9:.2f} GB, "
          f"whole {whole / 1e9:.2f} GB ({100 * (ours / whole - 1):+.1f} %)")  # fmt: skip


by_block_and_whole()

# %% [markdown]
# Now the limit. 64 ranks train a CoAtNet in mixed precision with Adam, images of 224 pixels; a tenth of a card is left to libraries
# and fragmentation. Guess.

# %%
ddp_limit = tp.predict("Which CoAtNet, 0 to 7, is the largest that plain DDP trains on cards of 32 GB?", ...)

# %%
CARDS = {"32 GB (V100)": 32e9, "80 GB (H100)": 80e9, "141 GB (H200)": 141e9}
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
def show_limits():
    for card, batches in limits().items():
        print(f"\n{card:<22}" + "".join(f"{f'-{n}':>7}" for n in COATNETS))
        for name, row in batches.items():
            print(f"  {name:<20}" + "".join(f"{batch or '·':>7}" for batch in row))
    return max(n for n in COATNETS if limits()["32 GB (V100)"]["DDP"][n])


why = "16 bytes for each parameter are the floor of every rank: DDP does not share them out, however many ranks there are."
ddp_limit.shows(show_limits(), "CoAtNet-{:.0f}", why)


# %% jupyter={"source_hidden": true}
def draw_limits():
    found = limits()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
    figure.suptitle(f"How many images does a card take? {RANKS} ranks, mixed precision with Adam, 224 pixels")
    for ax, (card, batches) in zip(axes, found.items()):
        for k, (name, row) in enumerate(batches.items()):
            again = TECHNIQUES[name][1]
            fits = [n for n in COATNETS if row[n]]
            style = {"color": "C3" if TECHNIQUES[name][0] == 3 else "C0" if name.startswith("DDP") else f"C{k}"}
            ax.plot(fits, [row[n] for n in fits], "--" if again else "-", marker="o", ms=3.5, label=name, **style)
        ax.set(yscale="log", title=card, xlabel="CoAtNet-", xticks=list(COATNETS))
    axes[0].set_ylabel("largest batch of a card")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    plt.show()


draw_limits()

# %% [markdown]
# Estimates, for the kernels of a CPU: these write the scores out, which a fused kernel on a GPU need not do. Where a
# line ends, the next model does not fit with a single image.
#
# <details><summary>What to see</summary>
#
# For the small models ZeRO changes nothing that matters: their memory is activations, and recomputation helps. Where
# the states alone fill the card, as those of CoAtNet-7 do on 32 GB, no recomputation makes room, and ZeRO must come
# first. Where they leave some, recomputation brings even CoAtNet-7 more images than any stage, and both together the
# most. Stage 1 makes most of ZeRO's room: it shares out 12 of the 16 bytes of a parameter. Stages 2 and 3 share out 2
# more each, and 3 pays for them with traffic: it sends one and a half times as many bytes. With recomputation CoAtNet-6
# takes more images than 5, where its states leave room: its first stages are narrower.
# </details>

# %% [markdown]
# ## Race
#
# Your patches against the convolution of the course's ViT, and your attention against SDPA, forward and backward.


# %%
def race_patches():
    """Images of 224 pixels to tokens of ViT-B/16: (race, largest difference)."""
    torch.manual_seed(0)
    model = ViT(dataclasses.replace(VITS["B/16"], layers=1)).embedding.to(DEVICE)
    given = *model.projection.parameters(), model.class_token, model.positions
    images = torch.randn(4, 3, 224, 224, device=DEVICE)
    apart = (embed_image(images, *given) - model(images)).abs().max().item()
    candidates = {"yours": lambda: embed_image(images, *given), "convolution": lambda: model(images)}
    with torch.no_grad():
        return measure.race(candidates, repeats=7, warmup=2, device=DEVICE), apart


def race_attention(side=14):
    def both_ways(attention, given):
        return lambda: torch.autograd.grad(attention(*given).sum(), [one for one in given if one.requires_grad])

    candidates = {
        name: both_ways(attention, attention_inputs(side, learnt)) for name, (attention, learnt) in KINDS.items()
    }
    return measure.race(candidates, repeats=9, warmup=2, device=DEVICE)


race, apart = race_patches()
print(f"patches of four images, differing by {apart:.0e} at most: your time over the convolution's is {race.ratio:.2f}")
race = race_attention()
for name, ratio in race.ratios.items():
    print(f"attention on 14 × 14 places: your time over that of {name}: {ratio:.2f}")

# %% [markdown]
# ## Past this machine · further
#
# CoAtNet-7 on 64 H100, estimated: what each technique changes. What is sent is `planner.step_volume`'s, of 2 bytes an element;
# recomputation does the forward pass again, which is a third more operations.


# %%
def show_costs(number=7, card="80 GB (H100)"):
    parameters = added(*coatnet_costs(COATNETS[number]))[0]
    operations = added(*coatnet_costs(COATNETS[number]))[1]
    print(f"{'':<20}{'states':>10}{'an image':>11}{'largest batch':>15}{'sent a step':>13}{'TFLOP an image':>16}")
    for name, (stage, again) in TECHNIQUES.items():
        states = planner.state_bytes(parameters, RANKS, stage).total
        image = needs(number, stage, again)(1) - needs(number, stage, again)(0)
        sent = planner.step_volume(parameters, RANKS, stage)
        print(f"{name:<20}{states / 1e9:>7.1f} GB{image / 1e9:>8.2f} GB{limits()[card][name][number]:>15}"
              f"{sent / 1e9:>10.1f} GB{(3 + again) * operations / 1e12:>16.2f}")  # fmt: skip


show_costs()


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
    ax.set(yticks=range(len(TECHNIQUES)), yticklabels=TECHNIQUES, xlabel="GB of a rank", xlim=(0, 150))
    ax.set_title(f"Who fills the card? CoAtNet-{number}, {batch} images a card, {RANKS} ranks", pad=16)
    ax.invert_yaxis()
    ax.legend(loc="lower right", fontsize=8)
    plt.show()


draw_rank()

# %% [markdown]
# How fast is that? The field counts **images or tokens a second**, and the share of the cards' peak that the model's own
# operations reach, **MFU** (*model FLOPs utilization*): three forward passes' worth of operations an image, whatever was recomputed.
# `planner.Throughput` has both. First the small CoAtNet on this machine, measured; the peak is what a large matrix product reaches here.


# %%
def matmul_peak(n=4096 if DEVICE.type == "cuda" else 1024):
    """Operations a second of the best of several products of n × n matrices."""
    a, seconds = torch.randn(n, n, device=DEVICE), []
    for _ in range(8):
        measure.synchronize(DEVICE)
        start = time.perf_counter()
        a @ a
        measure.synchronize(DEVICE)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def show_speed():
    forward = added(*coatnet_costs(SMALL))[1]
    steps, _ = baseline()
    seconds = statistics.median(step["forward"] + step["backward"] + step["optimizer"] for step in steps)
    print(f"the small CoAtNet, {BATCH} images a step: {planner.Throughput(BATCH, seconds, forward, matmul_peak())}")


show_speed()

# %% [markdown]
# Small layers keep no machine busy. If 64 H100 reached an MFU of 0.4 with CoAtNet-7 (an assumption; PaLM reported 0.46), then as many
# images as JFT-3B has, on which CoAtNet-7 was trained, would take:


# %%
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
# **1.** CoAtNet-7 does not fit on a GPU of 32 GB, in float32 with AdamW and one image. A colleague asks for four times as many
# GPUs, to run the same DDP with fewer images on each. What do you answer?
#
# <details><summary>Answer</summary>
#
# That it will fail in the same way on all of them. 2.44 billion parameters of 16 bytes are 39 GB on *each* rank, whatever their
# number. More GPUs help once the states are shared out among them (ZeRO, works 13 and 14), or the model itself is (15 to 17).
# </details>
#
# **2.** A model was trained with images of 224 pixels, and is tuned further with 448. What happens to the parameters, to
# what the convolutions keep, to a written-out table of scores, and to the table of relative positions?
#
# <details><summary>Answer</summary>
#
# The weights stay as they are. Convolutions have four times the places and keep four times as much. A table of scores has four
# times the queries and four times the keys: sixteen times as much. The relative table gets about four times the numbers; those
# that are missing are interpolated.
# </details>
#
# **3.** You may recompute some blocks of a CoAtNet and shall save half of the activations. Which do you take, those that
# keep most bytes?
#
# <details><summary>Answer</summary>
#
# Not by their bytes alone. What counts is how many bytes a block sets free for each operation that is done again; and one very
# large block bounds what recomputation can reach, for its work lives at once.
# </details>

# %% [markdown]
# ## To remember
#
# **Data parallelism divides the images, and nothing else.** Weights, gradients and the optimizer's averages, 16 bytes for each
# parameter with AdamW in float32, are the floor of every rank. What lies above it can be predicted to a few per cent before anything
# is allocated, because it is no secret what autograd keeps. Early layers keep activations, late ones parameters: each technique
# helps with one of the two, at a price in operations or messages that you can count as well.

# %%
tp.progress()
