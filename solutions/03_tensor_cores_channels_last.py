# %% [markdown] tags=["slide"]
# # Tensor Cores and channels_last: work that fits the hardware · about 95 min, core 45
#
# On the data sheet of an A100, half precision computes sixteen times faster than single precision. No real step gains
# that much. Time is lost on bytes that must be moved, tiles that are computed and thrown away, and images whose numbers
# are in the wrong order.
#
# **What you will gain.** With channels_last images and an unprepared model, one step of a ResNet-18 reorders dozens of
# tensors. With your code it reorders none. You also count operations per byte, and the share of a product's tiles that
# is wasted.

# %% tags=["setup"] jupyter={"source_hidden": true}
import math
from collections import Counter

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from dlojz_tp import (
    course, data, gains, measure, planner, precision, recorded, report, scale, todo, training_run, worth,
)  # fmt: skip
from dlojz_tp.measure.layouts import Layouts

NAME = "03_tensor_cores_channels_last"
tp = course.open(NAME)
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = training_run.device()
CLASSES = len(data.image_set().classes)
LAYER_BATCH = 128 if FULL else 4  # images, for the layers measured one by one
PRODUCT = 8192 if FULL else 1024  # side of the square matrices that measure the peak
COPY = 2**28 if FULL else 2**23  # numbers in the tensor that measures the memory

FAST = precision.fast_dtype(DEVICE)  # of the training run; float32 if 16 bits are slower here (see the last work)
FAST_NAME = str(FAST).removeprefix("torch.")
SPEED_DTYPE = FAST if DEVICE.type == "cuda" else torch.float32  # for measurements of single layers

SHEETS = {  # FLOP/s, byte/s
    "V100, FP16": (planner.V100.float16, planner.V100.bandwidth),
    "A100, BF16": (planner.A100.bfloat16, planner.A100.bandwidth),
    "H100, BF16": (planner.H100.bfloat16, planner.H100.bandwidth),
}
SMS = {"V100": 80, "A100": 108, "H100 SXM": 132}
if DEVICE.type == "cuda":
    torch.backends.cudnn.benchmark = True  # sizes stay the same: cuDNN tries its algorithms once, and keeps the best

# %% [markdown]
# ## The baseline: conversions in a step
#
# Images are stored in one of two memory formats: channel by channel (*contiguous*) or pixel by pixel (*channels_last*).
# If a layer's images and weights differ in format, one of them must be reordered first. `Layouts` records each operator
# that copies a tensor into another order, or that gets tensors in both formats.

# %%
asked = tp.predict(
    "ResNet-18 has 20 convolutions. Only its images are in channels_last: how many conversions in a step?", ...
)


# %%
def conversions(model, images, labels):
    """The layout conversions of a forward and a backward pass."""
    with Layouts() as seen:
        F.cross_entropy(model(images), labels).backward()
    return seen.conversions


small_images, small_labels = torch.randn(2, 3, 64, 64), torch.randint(10, (2,))
careless = conversions(
    models.resnet18(num_classes=10), small_images.to(memory_format=torch.channels_last), small_labels
)
counted = Counter(("backward" if one.backward else "forward", one.operator) for one in careless)
report.table({"pass": "{}", "operator": "{}", "conversions": "{}"}, [(*what, n) for what, n in counted.items()])
asked.shows(
    len(careless), "{:.0f}", "The images' format spreads from layer to layer, and the weights are in the other one."
)

# %% [markdown] tags=["slide"]
# ## The idea
#
# A kernel that does $W$ operations and moves $Q$ bytes has the *arithmetic intensity* $I = W/Q$. Computing and moving
# overlap, and the slower one decides (Williams, Waterman and Patterson, 2009):
#
# $$\text{rate}(I) = \min(\text{peak},\ \text{bandwidth} \times I)$$
#
# Plotted, this is a roof. Faster number formats raise only its flat part. The corner is the *ridge point*: with fewer
# operations per byte, the memory is the limit.

# %% tags=["slide"] jupyter={"source_hidden": true}
card = planner.A100
a100 = {"FP32": card.float32, "TF32 Tensor Cores": card.tf32, "BF16 Tensor Cores": card.bfloat16}
print(f"estimate from the data sheet of an A100 80 GB ({card.bandwidth / 1e9:,.0f} GB/s)")
report.table({"format": "{}", "TFLOP/s": "{:.1f}", "ridge point, FLOP per byte": "{:.1f}"},
             [(name, peak / 1e12, peak / card.bandwidth) for name, peak in a100.items()])  # fmt: skip
report.roofline(
    {}, {f"A100, {name}": (peak, card.bandwidth) for name, peak in a100.items()}, title="One memory, three peaks"
)

# %% [markdown]
# ## Operations and bytes
#
# A 3×3 convolution of 256 channels does 28 times the operations of a *depthwise* one, which convolves each of 144
# channels separately.

# %%
times = tp.predict(
    "The first layer does 28 times the operations of the second. How many times as long does it take here?", ...
)

# %% jupyter={"source_hidden": true}
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
report.table({"measured here": "{}", "time": measure.human_seconds}, list(seconds.items()))
why = "The depthwise layer moves more bytes, so it waits for memory, or it is too short to hide its launch."
times.shows(seconds["3×3, 256→256"] / seconds["3×3, 144 depthwise"], "× {:.1f}", why)

# %% [markdown]
# Operations alone don't predict the time, so count bytes too.
#
# ### Balise 1 · Count operations and bytes · about 13 min
#
# Both functions return `(flop, n_bytes)`. A multiply-add is **two** operations. Each operand and the result are moved
# **once**, at `itemsize` bytes per element.
#
# - `matmul_cost` is for an `(m, k)` matrix times a `(k, n)` matrix.
# - `conv_cost` is for a 2-D convolution without bias, with a square kernel. With `groups`, the channels are cut into
#   groups, and each result sees only the input channels of its group.
#
# About 10 lines.
#
# <details><summary>Hint</summary>
#
# A side of `n` pixels becomes `(n + 2 * padding - kernel) // stride + 1`. Each result sums `kernel × kernel × c_in /
# groups` products, and each output channel has as many weights.
# </details>


# %% tags=["balise-1"]
def matmul_cost(m, n, k, itemsize):
    """Operations and bytes of (m, k) @ (k, n), itemsize bytes an element: (flop, n_bytes)."""
    # BEGIN SOLUTION
    return 2 * m * n * k, itemsize * (m * k + k * n + m * n)
    # END SOLUTION


def conv_cost(batch, c_in, c_out, height, width, kernel, stride=1, padding=0, groups=1, itemsize=2):
    """Operations and bytes of a convolution, (batch, c_in, height, width) to c_out channels: (flop, n_bytes)."""
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
# Some newer networks need far fewer operations per image. And *per byte*? **Your** functions count them:


# %% jupyter={"source_hidden": true}
def convolutions(model, image=(3, 224, 224)):
    """The convolutions of a network, in order: (c_in, c_out, height, width, kernel, stride, padding, groups)."""
    found = []

    def see(layer, inputs, _output):
        sizes = layer.in_channels, layer.out_channels, *inputs[0].shape[2:]
        found.append((*sizes, layer.kernel_size[0], layer.stride[0], layer.padding[0], layer.groups))

    model = model.to("meta").eval()  # nothing is computed
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(see)
    model(torch.empty(1, *image, device="meta"))
    return found


# %%
years = {"vgg16": 2014, "resnet50": 2015, "mobilenet_v2": 2018, "efficientnet_b0": 2019}
networks, rows = {name: convolutions(getattr(models, name)()) for name in years}, []
for name, layers in networks.items():
    flop, moved = (sum(part) for part in zip(*(conv_cost(128, *layer, 2) for layer in layers)))
    rows.append((name, years[name], flop / 128e9, moved / 128e6, flop / moved))
report.table({"convolutions, batch 128, bfloat16": "{}", "year": "{}", "GFLOP/image": "{:.2f}", "MB/image": "{:.0f}",
              "FLOP/byte": "{:.0f}"}, rows)  # fmt: skip

# %% [markdown]
# Depthwise convolutions save nearly all operations and hardly any bytes. The networks with the fewest operations gain
# least from a GPU's peak.
#
# ### Balise 2 · The roofline · about 7 min
#
# What can a layer reach at most? Return the FLOP/s under the roof, the limit (`"compute"` or `"memory"`), and the
# ridge point, which is given. About 1 line.
#
# <details><summary>Hint</summary>
#
# The formula is above the first roofline. At the ridge point, both roofs have the same height.
# </details>


# %% tags=["balise-2"]
def roofline(flop, n_bytes, peak, bandwidth):
    """Attainable FLOP/s, "compute" or "memory", and the ridge point in FLOP per byte.

    peak: FLOP/s. bandwidth: byte/s.
    """
    intensity, ridge = flop / n_bytes, peak / bandwidth
    # BEGIN SOLUTION
    return min(peak, bandwidth * intensity), "memory" if intensity < ridge else "compute", ridge
    # END SOLUTION


# %%
tp.check(2, roofline)

# %%
costs, rows = {name: conv_cost(128, *layer, 2) for name, layer in LAYERS.items()}, []
for name, cost in costs.items():
    rates = [roofline(*cost, *sheet)[:2] for sheet in SHEETS.values()]
    rows.append((name, cost[0] / cost[1], *(f"{rate / 1e12:.0f} TFLOP/s, {bound}" for rate, bound in rates)))
report.table({"estimate, batch 128": "{}", "FLOP/byte": "{:.0f}"} | dict.fromkeys(SHEETS, "{}"), rows)
report.roofline({name: (flop / moved, None) for name, (flop, moved) in costs.items()}, SHEETS,
                title="Estimate: what could these layers reach?")  # fmt: skip

# %% [markdown]
# With each generation the ridge point moves right, because peaks grow faster than bandwidths. Your counts also turn the
# times measured above into rates:

# %% jupyter={"source_hidden": true}
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
# A point under the roof has another limit, such as a kernel that doesn't fit the shape. A point *above* the slanted
# part found its data in a cache.

# %% jupyter={"source_hidden": true}
found = recorded.load(NAME, "roofline")
if found:
    chart = report.roofline(found["points"], {f"recorded, {found['words']}": found["machine"]},
                            title=f"Recorded: {recorded.where(NAME)}")  # fmt: skip
else:
    chart = None
chart

# %% [markdown]
# ## Tiles and waves
#
# Tensor Cores compute the result of a matrix product in **tiles**, for example of 128 × 256, and an SM (streaming
# multiprocessor) computes a whole tile even if only a corner of it is inside the matrix. All SMs take a tile each.
# Tiles take equally long, so the work goes in **waves**, and the last wave takes as long as the others, full or nearly
# empty.
#
# ### Balise 3 · Tiles, waves, and what is lost · further · about 9 min
#
# Each of `n_sms` SMs takes one tile a wave. Return four numbers:
#
# - the number of tiles and the number of waves;
# - the tile efficiency: the results wanted, divided by those computed in all tiles;
# - the wave efficiency: the tiles, divided by those that all waves have room for.
#
# About 5 lines.
#
# <details><summary>Hint</summary>
#
# `math.ceil(a / b)` rounds up. Round the rows of tiles and the columns of tiles up separately, then multiply.
# </details>


# %% tags=["balise-3"]
def quantization(m, n, tile_m, tile_n, n_sms):
    """Tiles, waves, tile efficiency and wave efficiency of a matrix product with an (m, n) result.

    tile_m, tile_n: rows and columns of a tile.
    """
    # BEGIN SOLUTION
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / n_sms)
    return tiles, waves, m * n / (tiles * tile_m * tile_n), tiles / (waves * n_sms)
    # END SOLUTION


# %%
tp.check(3, quantization)

# %% tags=["slide"] jupyter={"source_hidden": true}
widths = range(64, 12289, 32)
figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
for card, style in (("A100", "-"), ("H100 SXM", ":")):
    losses = [quantization(2048, n, 128, 256, SMS[card])[2:] for n in widths]
    if card == "A100":
        axes.plot(widths, [100 * of_tiles for of_tiles, _ in losses], color="0.75", lw=1, label="tiles alone")
    both = [100 * of_tiles * of_waves for of_tiles, of_waves in losses]
    axes.plot(widths, both, style, label=f"tiles and waves, {card} ({SMS[card]} SMs)")
axes.set(xlabel="columns n of the result (2048 rows)", ylabel="useful part of the work (%)", ylim=(0, 105))
axes.set_title("How much of the work on a matrix product is useful?")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# **Your** function predicts this for tiles of 128 × 256. Grey teeth come from tiles, large ones from waves: one column
# too many can cost a whole wave.


# %% jupyter={"source_hidden": true}
def race_products(widths, m=2048, k=4096):
    """{columns: FLOP/s} of matrix products with an (m, columns) result."""
    kind = {"dtype": FAST, "device": DEVICE}
    left = torch.randn(m, k, **kind)
    rights = {str(n): torch.randn(k, n, **kind) for n in widths}
    raced = measure.race({n: lambda w=w: left @ w for n, w in rights.items()}, repeats=9, device=DEVICE)
    return {n: 2 * m * k * int(n) / seconds for n, seconds in raced.medians.items()}


where, found = recorded.where(NAME), recorded.load(NAME, "saw")
if DEVICE.type == "cuda":
    where, found = torch.cuda.get_device_name(DEVICE), race_products(range(256, 12289, 256) if FULL else (256, 512))
    recorded.note(NAME, "saw", found)
if found:
    figure, axes = plt.subplots(figsize=(8.5, 2.8), layout="constrained")
    axes.plot([int(n) for n in found], [rate / 1e12 for rate in found.values()], ".-")
    axes.set(xlabel="columns n of the result (2048 rows, k = 4096)", ylabel="TFLOP/s", ylim=(0, None))
    axes.set_title(f"Measured on {where}")
    plt.show()


# %% [markdown]
# ## Sizes that Tensor Cores like
#
# Tensor Cores prefer sizes that are multiples of 16 bytes, and, on an A100, of 128 bytes: 64 numbers in half precision.
# A vocabulary of 50,257 words is a multiple of neither. So add words that don't exist.
#
# ### Balise 4 · Pad a linear layer · further · about 20 min
#
# `padded_size` rounds a size up. `PaddedLinear` is made from an `nn.Linear`: inside, it computes with more rows, and
# outside, nothing changes. About 15 lines.
#
# **Write all of it:** `tp.open_task(4)` gives you only names and docstrings. Pad a layer of any dtype so that nobody
# outside can tell.
#
# <details><summary>Hint</summary>
#
# `dtype.itemsize` is the bytes of an element. Make a new `nn.Linear` with the padded `out_features`, of the same dtype
# and device; fill it under `torch.no_grad()`. A slice of the output is a view, and its gradient for what was cut off
# is zero.
# </details>


# %% tags=["balise-4"]
def padded_size(size, dtype, alignment=16):
    """(padded, added): elements after padding to `alignment` bytes, and the fraction of work added, such as 0.25.

    padded: the smallest number of elements, not below size, whose bytes are a multiple of alignment.
    added: (padded - size) / size. alignment: a multiple of an element's bytes.
    """
    # BEGIN SOLUTION
    multiple = alignment // dtype.itemsize
    padded = math.ceil(size / multiple) * multiple
    return padded, padded / size - 1
    # END SOLUTION


class PaddedLinear(nn.Module):
    """Gives what `linear` gives: (..., in_features) -> (..., out_features), computed with a padded out_features.

    linear: an nn.Linear with or without bias. It stays unchanged, also while this layer is trained, and isn't part of
    it. The parameters are a weight with padded_size(out_features, dtype, alignment)[0] rows and, if linear has one, a
    bias of that length. They are made once, with linear's dtype and device ("meta" too): copies of its values, then
    zeros, which stay zero in training. forward computes with all rows and returns the first out_features columns. The
    output, and the gradients of x and of the given rows, are those of linear.
    """

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


# %%
def padding_row(size):
    (by_16, added_16), (by_128, added_128) = (padded_size(size, torch.bfloat16, alignment) for alignment in (16, 128))
    return size, by_16, added_16, by_128, added_128


report.table({"size in bfloat16": "{:,}", "to 16 bytes": "{:,}", "work": "{:+.2%}", "to 128 bytes": "{:,}",
              "work ": "{:+.2%}"}, [padding_row(size) for size in (10, 100, 1000, 30522, 50257)])  # fmt: skip

# %% [markdown]
# Padding costs next to nothing for large sizes. A **modelled** card runs a product of odd sizes at a third of the speed,
# as published for nanoGPT:


# %%
def output_layer(device, wrap=None):
    layer = nn.Linear(1024, 50257, dtype=torch.bfloat16, device=device)
    layer = wrap(layer, 128) if wrap else layer
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device=device)
    return lambda: layer(x)


worth.calls({"50,257 words": output_layer, "padded": lambda device: output_layer(device, PaddedLinear)})

# %% [markdown]
# ## Three colours, and time steps · further
#
# An image has 3 channels. NVIDIA's guide pads the *first convolution* to 4 if its stride is 2. A *recurrent* layer
# takes its time steps in turn. Yet its products with the inputs don't wait for each other, so cuDNN computes them all
# as one product. **Your** functions count what both change:


# %% jupyter={"source_hidden": true}
ROWS, UNITS, TIMES = (64, 1024, 100) if FULL else (16, 512, 32)  # of an LSTM: sequences, hidden size, time steps
COLOURS = LAYERS["7×7, 3→64, stride 2"]


def make_products(joined):
    """A function that multiplies the inputs of all time steps by an LSTM's weights, in one product or in turn."""
    kind = {"dtype": SPEED_DTYPE, "device": DEVICE}
    inputs, weights = torch.randn(TIMES, ROWS, UNITS, **kind), torch.randn(UNITS, 4 * UNITS, **kind)
    together = inputs.view(-1, UNITS)
    return lambda: together @ weights if joined else [x @ weights for x in inputs]


one = matmul_cost(ROWS, 4 * UNITS, UNITS, 2)
kinds = {
    "first convolution, 3 channels": (conv_cost(LAYER_BATCH, *COLOURS, 2), make_layer(*COLOURS)),
    "4 channels": (conv_cost(LAYER_BATCH, 4, *COLOURS[1:], 2), make_layer(4, *COLOURS[1:])),
    f"LSTM's inputs, {TIMES} steps in turn": ([TIMES * part for part in one], make_products(joined=False)),
    "one product": (matmul_cost(TIMES * ROWS, 4 * UNITS, UNITS, 2), make_products(joined=True)),
}
took = measure.race({name: run for name, (_, run) in kinds.items()}, repeats=7, warmup=2, device=DEVICE).medians
rows = []
for name, (cost, _) in kinds.items():
    rate = roofline(*cost, *SHEETS["A100, BF16"])[0]
    rows.append((name, cost[0] / 1e9, cost[1] / 1e6, cost[0] / cost[1], cost[0] / rate, took[name]))
report.table({"bfloat16": "{}", "GFLOP": "{:.2f}", "MB": "{:.1f}", "FLOP/byte": "{:.0f}",
              "A100, at its roof (estimate)": measure.human_seconds,
              f"measured here, {str(SPEED_DTYPE).removeprefix('torch.')}": measure.human_seconds}, rows)  # fmt: skip

# %% [markdown]
# <details><summary>What the table shows, and sizes for recurrent layers</summary>
#
# The fourth channel costs a third more operations, but hardly more bytes. In return, Tensor Cores can load the pixels. A
# CPU has no such rule, so there it is only more work. The LSTM's weights are read again in each step; one product reads
# them once.
#
# The products with the *state* must run in turn. A *persistent* kernel keeps their weights on the chip, so they are
# read once, too. NVIDIA's *Recurrent Layers User's Guide* asks for batches and hidden sizes that are multiples of 8 in
# FP16 and of 4 in TF32, preferably of 64, ideally of 256. On a V100, a batch above 128 and a hidden size above 256 make
# the products compute-bound. The persistent kernel takes only FP16, with hidden sizes in multiples of 32 and batches in
# multiples of 8.
# </details>

# %% [markdown]
# ## The order of numbers in memory
#
# A batch of images has four indices: image N, channel C, row H, column W. *Contiguous* (NCHW) memory has all columns
# of a row side by side, channel after channel. *channels_last* (NHWC) has all channels of a pixel side by side. A
# convolution sums over channels, so in channels_last a 1×1 convolution is a matrix product, pixels times channels.
# That is what cuDNN's Tensor Core kernels compute. A tensor's **strides** say how far you move in memory when an index
# grows by one.
#
# ### Balise 5 · Two memory formats, by hand · further · about 15 min
#
# - `strides_of(shape, channels_last)`: the four strides, in the order N, C, H, W, of a new tensor of that shape;
# - `formats_of(shape, strides)`: the formats, out of `"contiguous"` and `"channels_last"`, that the strides fit. The
#   set may be empty or have both, since the stride of a dimension of size 1 is never used;
# - `channels_last_copy(x)`: the same values in channels_last, without using `memory_format`, and moving each element at
#   most once.
#
# About 15 lines.
#
# <details><summary>Hint</summary>
#
# The dimension that varies fastest has stride 1. Each further stride is the previous stride times the previous size. In
# channels_last the order is C, W, H, N. For the copy: `x.permute(0, 2, 3, 1)` shows the images as (N, H, W, C), and
# `.contiguous()` moves the elements; which permutation leads back?
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
    """A copy of x, shape (n, c, h, w), in channels_last; x or a view of it if it already is. x stays unchanged."""
    # BEGIN SOLUTION
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    # END SOLUTION


# %%
tp.check(5, strides_of, formats_of, channels_last_copy)

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
# Real models have obstacles: a normalisation over channels, as in ConvNeXt; a blur that treats each channel as an
# image; a `.contiguous()` to be safe. Each can cost two conversions, one there and one at the next convolution.


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


# %%
tiny = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last), torch.randint(10, (8,))
print(*conversions(Given().to(memory_format=torch.channels_last), *tiny), sep="\n")

# %% [markdown]
# ### Balise 6 · No conversion left in the step · about 16 min
#
# Fix the network: same parameters, same numbers, no conversion.
#
# - `Mended`: rewrite `norm(x)`, `blur(x)` and `forward(images)`;
# - `prepare(model)`: put all parameters and buffers of 4 dimensions into channels_last;
# - `to_device(images, labels, device)`: copy both to `device` without blocking, the images in channels_last. This is
#   the **one** conversion that is allowed, because a loader gives contiguous images.
#
# About 12 lines.
#
# <details><summary>Hint</summary>
#
# When `x` is in channels_last, what are the strides of `x.permute(0, 2, 3, 1)`? For the blur: a convolution with
# `groups=c` and a kernel of shape `(c, 1, 3, 3)`; `expand` repeats without copying. `Tensor.to` and `Module.to` both
# take `memory_format=torch.channels_last`. Labels have one dimension, and no format.
# </details>


# %% tags=["balise-6", "slide-mistake=view-fails"]
class Mended(Given):
    """The same as Given, without layout conversions when its images and parameters are in channels_last."""

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
    """Put the model's parameters and buffers into channels_last; return the same model, with the same parameters."""
    # BEGIN SOLUTION
    return model.to(memory_format=torch.channels_last)
    # END SOLUTION


def to_device(images, labels, device):
    """images (b, 3, h, w) in channels_last and labels (b,), on the device, without blocking: (images, labels).

    The device reorders, in the copy or after it. Images that come in channels_last are not reordered at all.
    """
    # BEGIN SOLUTION
    images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
    return images, labels.to(device, non_blocking=True)
    # END SOLUTION


# %%
tp.check(6, Mended, prepare, to_device)

# %% [markdown]
# ## Measured again
#
# Here is the count with your `prepare` and `to_device`, which converts the images before the step.

# %% tags=["slide"]
batch = to_device(small_images, small_labels, torch.device("cpu"))
mine = conversions(prepare(models.resnet18(num_classes=10)), *batch)
counts = {
    "ResNet-18, not prepared": careless,
    "ResNet-18, yours": mine,
    "Mended, yours": conversions(prepare(Mended()), *tiny),
}
report.table({"network": "{}", "conversions in a step": "{}"}, [(name, len(found)) for name, found in counts.items()])

# %% [markdown]
# Now the training run from the end of the last work, in both formats. On a CPU, convolutions reorder images anyway,
# into blocks of channels, so these seconds say nothing about a GPU.

# %%
before = training_run.run(f"{FAST_NAME}, contiguous", training_run.mixed_step)


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
# ## Race
#
# Each candidate does a step on a batch that is already on the device. Those in channels_last convert it in each step.

# %% jupyter={"source_hidden": true}
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
steps = {FAST_NAME: training_run.mixed_step, "float32": training_run.plain_step}  # only one if FAST is float32
formats = {"channels_last": True, "contiguous": False}
result = measure.race(
    {f"{name}, {how}": candidate(step, last) for name, step in steps.items() for how, last in formats.items()},
    repeats=20 if FULL else 5,
    warmup=10 if FULL else 1,
    device=DEVICE,
)
recorded.note(NAME, "formats", result.medians)
result

# %% [markdown]
# On a GPU, cuDNN's Tensor Core kernels want channels_last and reorder anything else. Plain float32 kernels also exist
# for contiguous images. Here is your step at full size, on a **modelled** card:

# %% jupyter={"source_hidden": true}
found = recorded.load(NAME, "formats")
if found:
    print(f"recorded on {recorded.where(NAME)}:")
    report.table({"step": "{}", "time": measure.human_seconds}, list(found.items()))
worth.table(
    {"contiguous": training_run.mixed_step, "your channels_last": channels_last_step},
    makes={"your channels_last": lambda: prepare(worth.resnet50())},
    keep=NAME,
)

# %% [markdown]
# ## Past this machine · further
#
# What would reordering cost at most? **Your** functions give an *estimate*. *Computing* is the forward pass of all
# convolutions, each at its roof. *Converting* reads and writes each input and output once more: an upper bound.


# %%
def milliseconds(layers, peak, bandwidth):
    """(computing, converting) of a network's convolutions, batch 128, in ms."""
    computing = converting = 0.0
    for layer in layers:
        flop, moved = conv_cost(128, *layer, 2)
        weights = 2 * layer[1] * layer[0] // layer[7] * layer[4] ** 2
        computing += flop / roofline(flop, moved, peak, bandwidth)[0]
        converting += 2 * (moved - weights) / bandwidth
    return 1000 * computing, 1000 * converting


columns = {f"{card.split(',')[0]}, {what}": "{:.1f} ms" for card in SHEETS for what in ("computing", "converting")}
rows = [(name, *sum((milliseconds(layers, *s) for s in SHEETS.values()), ())) for name, layers in networks.items()]
report.table({"estimate": "{}"} | columns, rows)

# %% [markdown]
# On all three cards, conversions would take longer than the work itself, except in VGG-16, which does the most
# operations per byte.

# %%
tp.progress()

# %%
print(gains.expected(NAME))
gains.table()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>A layer does 30 operations per byte. The next GPU has Tensor Cores twice as fast and the same memory. How much faster is the layer?</summary>
#
# Not at all. On an A100, memory already limits it (ridge point 153 in half precision). Fusing it with the next
# layer, so that fewer bytes are moved, would help.
# </details>
#
# <details><summary>You replace a 3×3 convolution of 256 channels by a depthwise one, with a 256th of the operations. The layer gets faster, but not nearly 256 times. Why?</summary>
#
# It moves nearly the same bytes: images in, images out. The layer was compute-bound and is now memory-bound, so it
# takes as long as its bytes take.
# </details>
#
# <details><summary>A grey image (1 channel) still says it is contiguous after .to(memory_format=torch.channels_last). Did the conversion fail?</summary>
#
# No. With one channel both formats are the same order of numbers, and <code>is_contiguous</code> is true for both.
# There was nothing to move.
# </details>
#
# ## To remember
#
# Operations per byte decide whether a faster peak helps: count both before you buy or rewrite. Padding sizes to
# multiples of 64 aligns them and costs little. Memory order is a promise that the whole step has to keep: convert the
# model once and each batch once, then count what is left. Next: **the profiler**.
