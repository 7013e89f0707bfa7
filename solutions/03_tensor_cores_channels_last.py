# %% [markdown]
# # Tensor Cores and channels_last: work that fits the hardware · about 75 min, core 30
#
# On the data sheet of an A100, half precision computes sixteen times faster than single precision. No real step becomes
# sixteen times faster. Where is the rest? In bytes that have to be moved, in tiles that are computed and thrown away, and
# in images whose numbers lie in the wrong order. In this practical work you compute each of these losses, see them in
# figures, and remove the one that costs nothing to remove: the **memory format**.
#
# **What you will gain.** An estimate first, from data sheets. A GPU has several peaks, one for each number format, and
# one memory. The *ridge point*, their quotient, is the number of operations that must be done for each byte, or the
# peak cannot be reached.

# %% tags=["setup"]
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from dlojz_tp import (
    course, data, gains, measure, planner, precision, recorded, report, scale, todo, training_run, worth,
)  # fmt: skip
from dlojz_tp.checks.tensor_cores_channels_last.layouts import Layouts

NAME = "03_tensor_cores_channels_last"
tp = course.open(NAME)
tp

# %% [markdown]
# All sizes are here, and what the data sheets promise: peaks in FLOP/s without sparsity and memory in byte/s, from
# `planner`, and the number of streaming multiprocessors (SMs). V100's Tensor Cores know float16, no bfloat16.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = training_run.device()
CLASSES = len(data.image_set().classes)
LAYER_BATCH = 128 if FULL else 4  # images, for the layers measured one by one
PRODUCT = 8192 if FULL else 1024  # side of the square matrices that measure the peak
COPY = 2**28 if FULL else 2**23  # numbers in the tensor that measures the memory
VOCABULARY = (4096, 1024, 50257) if FULL else (64, 256, 5027)  # tokens, width, words
FAST = precision.fast_dtype(DEVICE)  # of the training run; float32 where 16 bits do not pay (see the last work)
FAST_NAME = str(FAST).removeprefix("torch.")
SPEED_DTYPE = FAST if DEVICE.type == "cuda" else torch.float32  # of what is measured layer by layer

SHEETS = {  # FLOP/s, byte/s
    "V100, FP16": (planner.V100.float16, planner.V100.bandwidth),
    "A100, BF16": (planner.A100.bfloat16, planner.A100.bandwidth),
    "H100, BF16": (planner.H100.bfloat16, planner.H100.bandwidth),
}
SMS = {"V100": 80, "A100": 108, "H100 SXM": 132}
if DEVICE.type == "cuda":
    torch.backends.cudnn.benchmark = True  # sizes stay the same: cuDNN tries its algorithms once, and keeps the best

# %%
card = planner.A100
a100 = {"FP32": card.float32, "TF32 Tensor Cores": card.tf32, "BF16 Tensor Cores": card.bfloat16}
print(f"estimate from the data sheet of an A100 80 GB ({card.bandwidth / 1e9:,.0f} GB/s):")
for name, peak in a100.items():
    print(f"  {name:<18} {peak / 1e12:6.1f} TFLOP/s   ridge point {peak / card.bandwidth:5.1f} FLOP per byte")
x, y = 64 * 56 * 56, 256 * 56 * 56  # numbers of an image before and after a 1×1 convolution of ResNet-50
print(f"\nestimate: its 1×1 convolution 64 → 256 moves {2 * (x + y) / 1e6:.1f} MB an image in bfloat16.")
print(
    f"If both tensors are also reordered, {2 * 3 * (x + y) / 1e6:.1f} MB: three times as long where memory is the limit."
)
print(gains.expected(NAME))

# %% [markdown]
# These are estimates and an upper bound: libraries hide part of the reordering. What channels_last gains on *this*
# machine is measured below, and on a GPU where results have been recorded.
#
# ## The idea
#
# A kernel that does $W$ operations and moves $Q$ bytes has the *arithmetic intensity* $I = W/Q$. Computing and moving
# overlap, and the slower one decides (Williams, Waterman and Patterson, 2009):
#
# $$\text{rate}(I) = \min(\text{peak},\ \text{bandwidth} \times I)$$
#
# One picture holds it: a roof with a slanted and a flat part. Faster number formats raise the flat part only.

# %% jupyter={"source_hidden": true}
report.roofline(
    {}, {f"A100, {name}": (peak, card.bandwidth) for name, peak in a100.items()}, title="One memory, three peaks"
)

# %% [markdown]
# ## The baseline, measured first
#
# The training run that the last practical work left: `training_run.mixed_step` copies images without blocking and
# computes under autocast to the 16 bits that pay on this machine, or in float32 where none do.

# %%
before = training_run.run(f"{FAST_NAME}, contiguous", training_run.mixed_step)
print(f"{before.name}, on {DEVICE}: {before.images_per_second:,.0f} images/s")

# %% [markdown]
# ## Operations and bytes
#
# Six convolutions as they stand in networks, a large matrix product and a copy. Two of them first: a 3×3 convolution of 256
# channels does 28 times the operations of a *depthwise* one, in which each of 144 channels is convolved by itself.

# %%
times = tp.predict(
    "28 times the operations: how many times as long does the 3×3 layer take here as the depthwise one?", ...
)


# %%
LAYERS = {  # c_in, c_out, height, width, kernel, stride, padding, groups
    "7×7, 3→64, stride 2": (3, 64, 224, 224, 7, 2, 3, 1),
    "1×1, 64→256": (64, 256, 56, 56, 1, 1, 0, 1),
    "3×3, 64→64": (64, 64, 56, 56, 3, 1, 1, 1),
    "3×3, 256→256": (256, 256, 14, 14, 3, 1, 1, 1),
    "1×1, 512→2048": (512, 2048, 7, 7, 1, 1, 0, 1),
    "3×3, 144 depthwise": (144, 144, 56, 56, 3, 1, 1, 144),
}


def make_layer(c_in, c_out, height, width, kernel, stride, padding, groups):
    """A function that runs one convolution, in channels_last."""
    kind = {"dtype": SPEED_DTYPE, "device": DEVICE}
    layer = nn.Conv2d(c_in, c_out, kernel, stride, padding, groups=groups, bias=False, **kind)
    layer = layer.to(memory_format=torch.channels_last).requires_grad_(False)
    x = torch.randn(LAYER_BATCH, c_in, height, width, **kind).to(memory_format=torch.channels_last)
    return lambda: layer(x)


def race_layers():
    """Seconds of a matrix product, of a copy, and of each layer."""
    a = torch.randn(PRODUCT, PRODUCT, dtype=SPEED_DTYPE, device=DEVICE)
    source, target = torch.randn(COPY, device=DEVICE), torch.empty(COPY, device=DEVICE)
    candidates = {"product": lambda: a @ a, "copy": lambda: target.copy_(source)}
    candidates |= {name: make_layer(*layer) for name, layer in LAYERS.items()}
    return measure.race(candidates, repeats=7, warmup=2, device=DEVICE).medians


# %%
seconds = race_layers()
for name, taken in seconds.items():
    print(f"{name:<22} {1000 * taken:8.2f} ms")
why = "The bytes do not shrink with the operations: the depthwise layer moves more of them, and waits for memory or its start."
times.shows(seconds["3×3, 256→256"] / seconds["3×3, 144 depthwise"], "× {:.1f}", why)

# %% [markdown]
# Operations alone do not tell the time. What does? Count both, operations and bytes.

# %% [markdown]
# ### Balise 1 · Count operations and bytes · further · about 10 min
#
# Write two functions. Both return `(flop, n_bytes)`: a multiply-add is **two** operations, and each operand and the
# result are moved **once**, with `itemsize` bytes an element.
#
# - `matmul_cost(m, n, k, itemsize)`: an `(m, k)` matrix times a `(k, n)` matrix;
# - `conv_cost(...)`: a 2-D convolution without bias, with a square kernel, of `batch` images of `c_in` channels. With
#   `groups`, the channels are cut into as many groups, and each result sees the input channels of its own group only.
#
# About 10 lines.
#
# <details><summary>Hint</summary>
#
# A side of `n` pixels becomes `(n + 2 * padding - kernel) // stride + 1`. Each result of the convolution is a sum over
# `kernel × kernel × c_in / groups` products, and there is one weight for each product that goes into one output channel.
# </details>


# %% tags=["balise-1"]
def matmul_cost(m, n, k, itemsize):
    """Operations and bytes of (m, k) @ (k, n), itemsize bytes an element: (flop, n_bytes)."""
    # BEGIN SOLUTION
    return 2 * m * n * k, itemsize * (m * k + k * n + m * n)
    # END SOLUTION


def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    """Operations and bytes of a convolution of images (batch, c_in, height, width): (flop, n_bytes)."""
    # BEGIN SOLUTION
    rows = (height + 2 * padding - kernel) // stride + 1
    columns = (width + 2 * padding - kernel) // stride + 1
    results = batch * c_out * rows * columns
    products = c_in // groups * kernel * kernel  # in each result
    moved = batch * c_in * height * width + c_out * products + results
    return 2 * results * products, itemsize * moved
    # END SOLUTION


# %%
tp.check(1, matmul_cost, conv_cost)

# %% [markdown]
# Networks became lighter over the years: fewer operations an image. With **your** functions, look at what that did to
# the operations *per byte*. The convolutions of each network are found on the meta device: nothing is computed.


# %%
def convolutions(model, image=(3, 224, 224)):
    """The convolutions of a network, in order: (c_in, c_out, height, width, kernel, stride, padding, groups)."""
    found = []

    def see(layer, inputs, _output):
        sizes = layer.in_channels, layer.out_channels, *inputs[0].shape[2:]
        found.append((*sizes, layer.kernel_size[0], layer.stride[0], layer.padding[0], layer.groups))

    model = model.to("meta").eval()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(see)
    model(torch.empty(1, *image, device="meta"))
    return found


years = {"vgg16": 2014, "resnet50": 2015, "mobilenet_v2": 2018, "efficientnet_b0": 2019}
networks = {name: convolutions(getattr(models, name)()) for name in years}
print(f"{'convolutions, batch 128, bfloat16':<36}{'GFLOP/image':>12}{'MB/image':>12}{'FLOP/byte':>12}")
for name, layers in networks.items():
    flop, moved = (sum(part) for part in zip(*(conv_cost(128, *layer, 2) for layer in layers)))
    print(f"{name} ({years[name]}){'':<{27 - len(name)}}{flop / 128e9:14.2f}{moved / 128e6:12.0f}{flop / moved:12.0f}")

# %% [markdown]
# A depthwise convolution has one group a channel. It saves nearly all operations and hardly any bytes. So the networks
# with the fewest operations are the ones that a GPU's peak helps least.

# %% [markdown]
# ### Balise 2 · The roofline · about 4 min
#
# What can a layer reach at best? With `flop` operations and `n_bytes` moved, on a machine of `peak` FLOP/s and `bandwidth`
# byte/s, return `rate`, the FLOP/s under the roof; whether `"compute"` or `"memory"` is the limit; and the ridge point,
# which is given, in FLOP per byte. About 1 line.
#
# <details><summary>Hint</summary>
#
# The formula is above the picture. At the ridge point, both roofs have the same height.
# </details>


# %% tags=["balise-2"]
def roofline(flop, n_bytes, peak, bandwidth):
    """Attainable FLOP/s, "compute" or "memory", and the ridge point in FLOP per byte."""
    intensity, ridge = flop / n_bytes, peak / bandwidth
    # BEGIN SOLUTION
    return min(peak, bandwidth * intensity), "memory" if intensity < ridge else "compute", ridge
    # END SOLUTION


# %%
tp.check(2, roofline)

# %% [markdown]
# Typical layers of ResNet-50 at 224 pixels, and a depthwise one, on three GPUs. All of this is *estimated* from data
# sheets: open marks, at the best that a layer could reach.

# %%
costs = {name: conv_cost(128, *layer, 2) for name, layer in LAYERS.items()}
print(f"{'estimate, batch 128, half precision':<38}" + "".join(f"{card:>24}" for card in SHEETS))
for name, cost in costs.items():
    cells = [roofline(*cost, *card)[:2] for card in SHEETS.values()]
    print(f"{name:<38}" + "".join(f"{rate / 1e12:6.0f} TFLOP/s {bound}".rjust(24) for rate, bound in cells))
report.roofline({name: (flop / moved, None) for name, (flop, moved) in costs.items()}, SHEETS,
                title="Estimate: what could the layers of a ResNet-50 reach?")  # fmt: skip

# %% [markdown]
# Three generations, and the ridge point moves right each time: peaks grow faster than memories. A layer left of it gains
# from a new GPU what its memory gains, no more.
#
# And here? Your counts turn the seconds measured above into rates. The flat roof is the highest rate that any of them
# reaches: a promised peak is of no use here.

# %%
measured = {}
for name, layer in LAYERS.items():
    flop, moved = conv_cost(LAYER_BATCH, *layer, SPEED_DTYPE.itemsize)
    measured[name] = flop / moved, flop / seconds[name]
peak = max(2 * PRODUCT**3 / seconds["product"], *(rate for _, rate in measured.values()))
here = peak, 2 * 4 * COPY / seconds["copy"]  # FLOP/s; byte/s, each number is read and written
words = f"{str(SPEED_DTYPE).removeprefix('torch.')}, batch {LAYER_BATCH}"
recorded.note(NAME, "roofline", {"points": measured, "machine": here, "words": words})
report.roofline(measured, {f"this machine, {words}": here}, title="Measured: what do they reach here?")

# %% [markdown]
# A point under the roof has another limit: a kernel that does not fit the shape, or one that takes longer to start than
# to run. A point *above* the slanted part found its data in a cache, which is faster than the memory that was measured:
# on a processor, small batches do.

# %% jupyter={"source_hidden": true}
found = recorded.load(NAME, "roofline")
if found:
    chart = report.roofline(found["points"], {f"recorded, {found['words']}": found["machine"]},
                            title=f"Recorded: {recorded.where(NAME)}")  # fmt: skip
else:
    chart = None
    print("No roofline of a GPU is recorded yet.")
chart

# %% [markdown]
# ## Tiles and waves
#
# Tensor Cores do not compute results one at a time. The result of a matrix product is cut into **tiles**, for example of
# 128 × 256, and an SM computes a whole tile even where only a corner of it lies inside the matrix. All SMs take a tile
# each, and the next one as soon as they are free: no SM waits for the others. But tiles of one product take equally long,
# so that all are free at about the same time, and it goes in **waves**. The last one takes as long as the others, be it
# full or nearly empty.

# %% [markdown]
# ### Balise 3 · Tiles, waves, and what is lost · further · about 6 min
#
# A result of `m × n` is cut into tiles of `tile_m × tile_n`; each of `n_sms` SMs takes one tile a wave. Return four
# numbers:
#
# - the number of tiles and the number of waves;
# - the tile efficiency: results wanted, over results computed in all tiles;
# - the wave efficiency: tiles, over places for tiles in all waves.
#
# About 5 lines.
#
# <details><summary>Hint</summary>
#
# `math.ceil(a / b)`, or `-(-a // b)`, rounds up. Round the rows of tiles and the columns of tiles up separately, then
# multiply.
# </details>


# %% tags=["balise-3"]
def quantization(m, n, tile_m, tile_n, n_sms):
    """Tiles, waves, tile efficiency and wave efficiency of a matrix product with an (m, n) result."""
    # BEGIN SOLUTION
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / n_sms)
    return tiles, waves, m * n / (tiles * tile_m * tile_n), tiles / (waves * n_sms)
    # END SOLUTION


# %%
tp.check(3, quantization)

# %% [markdown]
# The product of both efficiencies, against the number of columns: a saw. *Predicted* for tiles of 128 × 256, one a SM,
# by **your** function.

# %% jupyter={"source_hidden": true}
widths = range(64, 12289, 32)
figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
for card, style in (("A100", "-"), ("H100 SXM", ":")):
    losses = [quantization(2048, n, 128, 256, SMS[card])[2:] for n in widths]
    if card == "A100":
        axes.plot(widths, [100 * of_tiles for of_tiles, _ in losses], color="0.75", lw=1, label="tiles alone")
    both = [100 * of_tiles * of_waves for of_tiles, of_waves in losses]
    axes.plot(widths, both, style, label=f"tiles and waves, {card} ({SMS[card]} SMs)")
axes.set(xlabel="columns n of the result (2048 rows)", ylabel="part of the work that counts (%)", ylim=(0, 105))
axes.set_title("How much of a matrix product is thrown away?")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# The grey teeth are tiles, 256 columns wide. The large ones are waves: with 16 rows of tiles, an A100 fills a wave of
# 108 with 6.75 columns of tiles. One column too many can cost a whole wave; an almost empty tile costs nothing in a
# wave that has free places, which is why the grey teeth are not seen in the others. For large products all this fades:
# the loss is at most one wave of many. cuBLAS has other tiles to choose from, and takes smaller ones for smaller
# products.


# %%
def race_products(widths, m=2048, k=4096):
    """{columns: FLOP/s} of matrix products with an (m, columns) result."""
    kind = {"dtype": FAST, "device": DEVICE}
    left = torch.randn(m, k, **kind)
    rights = {str(n): torch.randn(k, n, **kind) for n in widths}
    raced = measure.race({n: lambda w=w: left @ w for n, w in rights.items()}, repeats=9, device=DEVICE)
    return {n: 2 * m * k * int(n) / seconds for n, seconds in raced.medians.items()}


where, found = recorded.where(NAME), recorded.load(NAME, "saw")
if DEVICE.type == "cuda":
    where, found = torch.cuda.get_device_name(DEVICE), race_products(range(256, 12289, 256))
    recorded.note(NAME, "saw", found)
if found:
    figure, axes = plt.subplots(figsize=(8.5, 2.8), layout="constrained")
    axes.plot([int(n) for n in found], [rate / 1e12 for rate in found.values()], ".-")
    axes.set(xlabel="columns n of the result (2048 rows, k = 4096)", ylabel="TFLOP/s", ylim=(0, None))
    axes.set_title(f"Measured on {where}")
    plt.show()
else:
    print("Tiles and waves belong to GPUs, and none has been recorded yet: the saw above is a prediction.")

# %% [markdown]
# ## Sizes that Tensor Cores like
#
# Tensor Cores are fed well by sizes that are multiples of 16 bytes: 4 numbers in TF32, 8 in half precision, 16 in INT8.
# On an A100 multiples of 128 bytes are best: 32, 64, 128. (Since cuBLAS 11.0 and cuDNN 7.6.3 other sizes use them too,
# less well.) A vocabulary of 50,257 words is a multiple of none of these. So one adds words that do not exist.

# %% [markdown]
# ### Balise 4 · Pad a linear layer · further · about 16 min
#
# - `padded_size(size, dtype, alignment)`: the smallest number of elements, not below `size`, whose bytes are a multiple
#   of `alignment`, itself a multiple of an element's bytes; and the fraction of work added, for example 0.25. Return both.
# - `PaddedLinear(linear, alignment)`: a module made from an `nn.Linear`. Inside, its weights have `padded_size` rows: the
#   given ones first, then zeros. Outside nothing changes: same output, same shape, same gradients. `linear` itself stays
#   as it is, also while the new layer is trained: the weights are copies. A layer without bias must work too.
#
# About 15 lines.
#
# <details><summary>Hint</summary>
#
# `dtype.itemsize` is the bytes of an element. Make a new `nn.Linear` with the padded `out_features`, of the same dtype and
# device; fill it under `torch.no_grad()`. A slice of the output is a view, and its gradient for what was cut off is zero.
# </details>


# %% tags=["balise-4"]
def padded_size(size, dtype, alignment=16):
    """Elements after padding to `alignment` bytes, and the fraction of work added."""
    # BEGIN SOLUTION
    multiple = alignment // dtype.itemsize
    padded = math.ceil(size / multiple) * multiple
    return padded, padded / size - 1
    # END SOLUTION


class PaddedLinear(nn.Module):
    """Gives what `linear` gives: (..., in_features) -> (..., out_features), computed with a padded out_features."""

    def __init__(self, linear, alignment=16):
        super().__init__()
        # BEGIN SOLUTION
        self.out_features = linear.out_features
        weight = linear.weight
        padded, _ = padded_size(self.out_features, weight.dtype, alignment)
        bias = linear.bias is not None
        self.inner = nn.Linear(linear.in_features, padded, bias=bias, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            for mine, given in zip(self.inner.parameters(), linear.parameters()):
                mine.zero_()
                mine[: self.out_features] = given
        # END SOLUTION

    def forward(self, x):
        # BEGIN SOLUTION
        return self.inner(x)[..., : self.out_features]
        # END SOLUTION


# %%
tp.check(4, padded_size, PaddedLinear)

# %% [markdown]
# What it costs: nearly nothing where the size is large, a lot where it is small. What it buys is a question to the
# hardware.

# %%
print(f"{'bfloat16':<14}{'16 bytes':>24}{'128 bytes':>24}")
for size in (10, 100, 1000, 30522, 50257):
    cells = [padded_size(size, torch.bfloat16, alignment) for alignment in (16, 128)]
    print(f"{size:<14,}" + "".join(f"{padded:>14,} {extra:+9.2%}" for padded, extra in cells))

# %%
padding_time = tp.predict(
    "An output layer of odd size, padded: how many times as fast as before, on this machine?", ...
)

# %%
tokens, width, words = VOCABULARY
head = nn.Linear(width, words, dtype=SPEED_DTYPE, device=DEVICE).requires_grad_(False)
padded_head = PaddedLinear(head, 128).requires_grad_(False)
x = torch.randn(tokens, width, dtype=SPEED_DTYPE, device=DEVICE)
result = measure.race({"padded": lambda: padded_head(x), "as it is": lambda: head(x)}, repeats=9, device=DEVICE)
recorded.note(NAME, "padding", {"sizes": VOCABULARY, "medians": result.medians})
why = "Without Tensor Cores there is nothing to align for; with them, the kernels for odd sizes are the slower ones."
padding_time.shows(1 / result.ratio, "× {:.2f}", why)
result

# %% [markdown]
# A processor has no Tensor Cores, and little to gain here: the columns that exist are computed as before, and a few more.
# Beware of one thing on every machine: had the layer returned its padded output, the made-up words would take part in the
# softmax with a logit of 0, and the loss would change.
#
# ## The order of numbers in memory
#
# A batch of images has four indices: image N, channel C, row H, column W. Memory has one. *Contiguous* (NCHW) puts all
# columns of a row side by side, channel after channel. *channels_last* (NHWC) puts all channels of a pixel side by side.
# A convolution sums over the channels of a pixel and its neighbours, and with channels_last the channels of each pixel are
# one piece of memory. So a 1×1 convolution is a matrix product as it lies there, pixels times channels; a 3×3 one adds up
# nine such products, of shifted pixels. That is what cuDNN's Tensor Core kernels compute.
#
# A tensor's **strides** say which: how many elements further in memory the next index lies. The shape never tells.

# %% [markdown]
# ### Balise 5 · Two memory formats, by hand · further · about 12 min
#
# - `strides_of(shape, channels_last)`: the four strides, in the order N, C, H, W, of a new tensor of that shape;
# - `formats_of(shape, strides)`: the set of formats, out of `"contiguous"` and `"channels_last"`, that the strides fit.
#   It may be empty, or hold both. The stride of a dimension of size 1 is never used: it may be anything;
# - `channels_last_copy(x)`: same shape, same values, in channels_last, with each element moved once at most, and without
#   asking for a `memory_format`. Where `x` is in channels_last already, nothing has to move: `x` itself, or a view of it,
#   will do. The `x` that is given stays as it is.
#
# About 15 lines.
#
# <details><summary>Hint</summary>
#
# The dimension that varies fastest has stride 1, the next one the size of that, and so on: go through the dimensions from
# the fastest. In channels_last that is C, W, H, N. For the copy: `x.permute(0, 2, 3, 1)` shows the images as
# (N, H, W, C), and `.contiguous()` moves the elements; which permutation leads back?
# </details>


# %% tags=["balise-5"]
def strides_of(shape, channels_last):
    """Strides in elements, in the order N, C, H, W, of a tensor of this shape (n, c, h, w)."""
    # BEGIN SOLUTION
    n, c, h, w = shape
    return (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)
    # END SOLUTION


def formats_of(shape, strides):
    """The set of "contiguous" and "channels_last" that a tensor with this shape and these strides is in."""
    # BEGIN SOLUTION
    found = set()
    for name in ("contiguous", "channels_last"):
        wanted = strides_of(shape, name == "channels_last")
        if all(size == 1 or stride == want for size, stride, want in zip(shape, strides, wanted)):
            found.add(name)
    return found
    # END SOLUTION


def channels_last_copy(x):
    """A copy of x, shape (n, c, h, w), in channels_last."""
    # BEGIN SOLUTION
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    # END SOLUTION


# %%
tp.check(5, strides_of, formats_of, channels_last_copy)

# %% [markdown]
# Look at the memory, with your strides: an image of 3 channels, 2 rows and 4 columns. A box is an element; its number is
# the pixel, its colour the channel. Left to right is how they lie in memory.

# %% jupyter={"source_hidden": true}
shape = (1, 3, 2, 4)
figure, rows = plt.subplots(2, 1, figsize=(8.5, 2.2), layout="constrained")
for axes, channels_last in zip(rows, (False, True)):
    strides = strides_of(shape, channels_last)
    for c in range(3):
        for pixel in range(8):
            place = c * strides[1] + pixel // 4 * strides[2] + pixel % 4 * strides[3]
            axes.add_patch(plt.Rectangle((place, 0), 1, 1, color=("#D55E00", "#009E73", "#0072B2")[c], ec="white"))
            axes.text(place + 0.5, 0.47, pixel, ha="center", va="center", color="white", fontsize=10)
    axes.set(xlim=(0, 24), ylim=(0, 1), yticks=[], xticks=range(0, 25, 4))
    name = "channels_last" if channels_last else "contiguous"
    axes.set_title(f"{name}: strides {strides}", loc="left", fontsize=10)
rows[1].set_xlabel("place in memory (elements)")
plt.show()

# %% [markdown]
# ## A network without conversions
#
# An operator whose input comes in one format and whose weights are in the other reorders one of them first; a
# `.contiguous()` in a forward pass reorders back. So in the forward pass each forgotten line can cost two reorderings:
# one there, and one at the next convolution, whose weights are in channels_last. Here is a small network with what one
# meets in real ones: a normalisation over channels, as in ConvNeXt; a smoothing that treats each channel as an image of
# its own; a `.contiguous()` to be safe.


# %% tags=["setup"]
class Given(nn.Module):
    """Images (b, 3, size, size) -> logits (b, classes)."""

    def __init__(self, classes=10, size=16):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.register_buffer("position", torch.rand(1, 16, size, size))
        self.body, self.ln = nn.Conv2d(16, 24, 3, padding=1), nn.LayerNorm(24)
        self.register_buffer("kernel", torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).view(1, 1, 3, 3) / 16)
        self.deep, self.head = nn.Conv2d(24, 32, 3, padding=1), nn.Linear(32, classes)

    def norm(self, x):
        """Layer norm over the channels of each pixel, (b, c, h, w) -> (b, c, h, w)."""
        x = self.ln(x.permute(0, 2, 3, 1).contiguous())
        return x.permute(0, 3, 1, 2).contiguous()

    def blur(self, x):
        """Smooth each channel with self.kernel (1, 1, 3, 3), keep every second pixel: (b, c, h/2, w/2)."""
        b, c, h, w = x.shape
        x = F.conv2d(x.contiguous().view(b * c, 1, h, w), self.kernel, stride=2, padding=1)
        return x.view(b, c, *x.shape[2:])

    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x.contiguous())))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).view(len(x), -1))


# %% [markdown]
# There is also a counter: `Layouts` records every operator that copies a tensor into another order, or that is handed
# tensors in both formats. Here is what happens if one only asks for channels_last at the entrance.


# %%
def count_conversions(model, images, labels):
    """Print each layout conversion of a forward and a backward pass."""
    with Layouts() as seen:
        F.cross_entropy(model(images), labels).backward()
    print(f"{type(model).__name__}: {len(seen.conversions)} conversions", *seen.conversions, sep="\n  ")


some_images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
some_labels = torch.randint(10, (8,))
count_conversions(Given().to(memory_format=torch.channels_last), some_images, some_labels)

# %% [markdown]
# ### Balise 6 · No conversion left in the step · about 12 min
#
# Mend the network: same parameters, same numbers, no conversion.
#
# - `Mended`: `norm(x)`, `blur(x)` and `forward(images)`, each written anew where it has to be;
# - `prepare(model)`: all parameters and buffers of 4 dimensions in channels_last. Return the model: the same object, with the same
#   parameter objects;
# - `to_device(images, labels, device)`: both on `device`, copied without blocking, the images in channels_last. This is the
#   **one** conversion that is allowed, because images come out of a loader contiguous; the device does it, in the copy or
#   after it. Images that come in channels_last (a loader's collate function can see to that) are not reordered at all.
#   Return both.
#
# About 12 lines.
#
# <details><summary>Hint</summary>
#
# When `x` is in channels_last, what are the strides of `x.permute(0, 2, 3, 1)`? For the blur: a convolution with
# `groups=c` and a kernel of shape `(c, 1, 3, 3)`; `expand` repeats without copying. `Tensor.to` and `Module.to` both take
# `memory_format=torch.channels_last`. Labels have one dimension, and no format.
# </details>


# %% tags=["balise-6"]
class Mended(Given):
    """Given, without layout conversions when its images and parameters are in channels_last."""

    def norm(self, x):
        # BEGIN SOLUTION
        return self.ln(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # END SOLUTION

    def blur(self, x):
        # BEGIN SOLUTION
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(c, 1, 3, 3), stride=2, padding=1, groups=c)
        # END SOLUTION

    def forward(self, images):
        # BEGIN SOLUTION
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        # END SOLUTION


def prepare(model):
    """Put the model's parameters and buffers into channels_last; return it."""
    # BEGIN SOLUTION
    return model.to(memory_format=torch.channels_last)
    # END SOLUTION


def to_device(images, labels, device):
    """images (b, 3, h, w) in channels_last and labels (b,), on the device, without blocking: (images, labels)."""
    # BEGIN SOLUTION
    images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
    return images, labels.to(device, non_blocking=True)
    # END SOLUTION


# %%
tp.check(6, Mended, prepare, to_device)

# %%
count_conversions(prepare(Mended()), *to_device(torch.randn(8, 3, 16, 16), some_labels, torch.device("cpu")))


# %% [markdown]
# ## Measured again
#
# The same training run, with your `prepare` and `to_device`. torchvision's ResNets hold no obstacle.


# %%
def channels_last_step(model, images, labels, optimizer, device):
    images, labels = to_device(images, labels, device)
    return training_run.mixed_step(model, images, labels, optimizer, device)


model = prepare(training_run.make_model(CLASSES))
after = training_run.run(f"{FAST_NAME}, channels_last", channels_last_step, model=model)
gains.keep(NAME, "channels_last", before=before, after=after)

# %% jupyter={"source_hidden": true}
report.compare([before, after])

# %% [markdown]
# On a processor the workers that decode images share its cores, so that a run of seconds moves by more than the format
# does. The race below leaves them out.
#
# ## Race
#
# PyTorch's own conversion is what you used; so the race is between the formats: one step on a batch that lies ready on
# the device, contiguous as it came, in turn. The channels_last candidates convert their images in each step.

# %%
format_gain = tp.predict("How many times faster is a whole step in channels_last, on this machine?", ...)

# %%
size = training_run.setting()
images = torch.randn(size.batch_size, 3, size.image_size, size.image_size, device=DEVICE)
labels = torch.randint(CLASSES, (size.batch_size,), device=DEVICE)


def candidate(step, channels_last):
    model = training_run.make_model(CLASSES)
    model = prepare(model) if channels_last else model
    optimizer = training_run.make_optimizer(model.parameters())

    def run():
        batch = to_device(images, labels, DEVICE) if channels_last else (images, labels)
        step(model, *batch, optimizer, DEVICE)

    return run


# %%
steps = {FAST_NAME: training_run.mixed_step, "float32": training_run.plain_step}  # one, where FAST is float32
formats = {"channels_last": True, "contiguous": False}
result = measure.race(
    {f"{name}, {how}": candidate(step, last) for name, step in steps.items() for how, last in formats.items()},
    repeats=20 if FULL else 5,
    warmup=10 if FULL else 1,
    device=DEVICE,
)
recorded.note(NAME, "formats", result.medians)
last, first = (result.medians[f"{FAST_NAME}, {how}"] for how in formats)
why = "A library reorders what comes in another order than its own: on a GPU for Tensor Cores, on a CPU into blocks."
format_gain.shows(first / last, "× {:.2f}", why)
result

# %% [markdown]
# Why? A convolution library has kernels for one order of its own, and reorders what comes in another. On a GPU, cuDNN's
# Tensor Core kernels want channels_last; those for plain float32, which use no Tensor Cores, also exist for contiguous
# images, and there the format may make no difference. (Since the A100, PyTorch lets float32 *convolutions* run in TF32,
# on Tensor Cores.) On a processor, PyTorch's library reorders contiguous images too, into blocks of 8 or 16 channels, so a
# gain here is possible and says nothing about a GPU's. The table above is what this machine does.

# %% jupyter={"source_hidden": true}
found = recorded.load(NAME, "formats")
if found:
    print(f"recorded on {recorded.where(NAME)}:")
    for name, seconds in found.items():
        print(f"  {name:<26} {1000 * seconds:8.2f} ms a step")
else:
    print("No step of a GPU is recorded yet.")

# %% [markdown]
# On a **modelled** card, where nothing is measured: your step at full size, in bfloat16 on both lines. Then the output layer
# of a language model with 50,257 words, as it is and padded by your `PaddedLinear`. The model lets a product of odd sizes run
# at half the speed: that half was put in, the table does not show that it is true.

# %%
worth.table(
    {"contiguous": training_run.mixed_step, "your channels_last": channels_last_step},
    makes={"your channels_last": lambda: prepare(worth.resnet50())},
    keep=NAME,
)


# %%
def output_layer(device, wrap=None):
    layer = nn.Linear(1024, 50257, dtype=torch.bfloat16, device=device)
    layer = wrap(layer, 128) if wrap else layer
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device=device)
    return lambda: layer(x)


worth.calls({"50,257 words": output_layer, "padded": lambda device: output_layer(device, PaddedLinear)})

# %% [markdown]
# ## Past this machine · further
#
# What would reordering cost at most, on GPUs that are not here? With **your** functions: all convolutions of a network,
# forward, each at its roof; then the same with input and output of each read and written once more. An *estimate*, and an
# upper bound: neighbouring layers can share a conversion, and some kernels reorder while they compute.

# %%
print(f"{'estimate, batch 128, forward':<30}" + "".join(f"{card:>30}" for card in SHEETS))
for name, layers in networks.items():
    cells = []
    for peak, bandwidth in SHEETS.values():
        computing = converting = 0.0
        for layer in layers:
            flop, moved = conv_cost(128, *layer, 2)
            weights = 2 * layer[1] * layer[0] // layer[7] * layer[4] ** 2
            computing += flop / roofline(flop, moved, peak, bandwidth)[0]
            converting += 2 * (moved - weights) / bandwidth
        cells.append(f"{1000 * computing:7.1f} ms, converting {1000 * converting:5.1f} ms")
    print(f"{name:<30}" + "".join(f"{cell:>30}" for cell in cells))

# %% [markdown]
# Compare a row's two numbers: on all three cards conversions would take longer than the work, except in VGG-16, which
# computes most for each byte.

# %%
tp.progress()

# %%
gains.table()

# %% [markdown]
# ## Three questions
#
# <details><summary>A layer does 30 operations a byte. The next GPU has Tensor Cores of twice the speed and the same memory. How much faster is the layer?</summary>
#
# Not at all. On an A100 its roof is the memory already (ridge point 153 in half precision). Fusing it with the next layer,
# so that fewer bytes are moved, would help.
# </details>
#
# <details><summary>You replace a 3×3 convolution of 256 channels by a depthwise one: a 256th of the operations. The layer gets faster, but not nearly 256 times. Why?</summary>
#
# Nearly the same bytes are moved: images in, images out. The layer was bound by computing and is now bound by memory, and
# it takes as long as its bytes take.
# </details>
#
# <details><summary>A grey image (1 channel) still says it is contiguous after .to(memory_format=torch.channels_last). Did the conversion fail?</summary>
#
# No. With one channel both formats are the same order of numbers, and <code>is_contiguous</code> is true for both. There
# was nothing to move.
# </details>
#
# ## To remember
#
# Operations per byte decide whether a faster peak helps: count both before you buy or rewrite. Sizes that are multiples of
# 64 are aligned and cost little; only multiples of a tile waste none of it. And the order of numbers in memory is a promise that the whole step has to keep: convert
# the model once, each batch once, and count what is left. Next: **the profiler**, which shows where the time of a step goes
# without having to guess.
