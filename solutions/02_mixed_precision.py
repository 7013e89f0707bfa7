# %% [markdown]
# # Mixed precision: 16 bits where they suffice, 32 where they must be · about 80 min, core 40
#
# A weight of a network is a number of 32 bits. Most of a step does as well with 16: half the bytes to move and to
# keep, and a part of the processor made for it. Some of it does not: small gradients become zero, small updates are
# lost, and nothing tells you but a loss that stops falling. In this practical work you write both sides, the step
# that gains and the three things that keep it right: **loss scaling**, **operations left in float32**, and **master
# weights**.
#
# **What you will gain**, estimated from a data sheet: where a step computes, time follows the peak; where it moves
# memory, the bytes.

# %% tags=["setup"]
import contextlib
import math
import statistics
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, gains, measure, planner, precision, recorded, scale, todo, training_run, worth

NAME = "02_mixed_precision"
tp = course.open(NAME)
tp

# %% [markdown]
# All sizes are here. The network of the speed measurements is that of the whole red thread, `training_run.setting()`.
# `FAST` is the format in which *this* machine computes fastest, found from what it can do and a trial of milliseconds:
# bfloat16 on most machines; float16 on GPUs older than the A100: their Tensor Cores know no bfloat16; float32 on processors
# without instructions for either, where 16 bits are a trap that is measured below, once.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = training_run.device()
SETTING = training_run.setting()
CLASSES = len(data.image_set().classes)
PRODUCT = 8192 if FULL else 768  # side of the square matrices that measure the rate of products
SLOW_PRODUCT = 8192 if FULL else 96  # for float16, which a processor without the right units emulates
FAST = precision.fast_dtype(DEVICE)
PAYS = FAST.itemsize == 2
HALF = FAST if PAYS else torch.bfloat16  # the format that is set beside float32
ROUNDS = 20 if FULL else 4  # of a race between whole steps
STEPS = 500  # of the small trainings on digits
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"

# %%
card = planner.A100
a100 = {"float32": card.float32, "TF32 Tensor Cores": card.tf32, "float16 or bfloat16 Tensor Cores": card.float16}
print("estimate, from the data sheet of an A100:")
for name, peak in a100.items():
    print(f"  {name:<34}{peak / 1e12:6.1f} TFLOP/s   × {peak / card.float32:4.1f}")
print("  bytes of an activation: 4 → 2      × 2 where memory is the limit")
print(gains.expected(NAME))
print(
    f"published by NVIDIA, ResNet-50 on an A100: {card.resnet50_float32:,} images/s in TF32, "
    f"{card.resnet50_mixed:,} in mixed precision (channels last): × {card.resnet50_mixed / card.resnet50_float32:.1f}"
)

# %% [markdown]
# No step becomes sixteen times faster. On such a card PyTorch runs "float32" convolutions in TF32 by default: against
# that, the peak and the bytes both allow a factor of two, and what stays in float32 takes its part of it. The published
# pair gains more, as it changes the memory format too, for which Tensor Cores ask: the next practical work.
#
# Guess before anything is measured:

# %%
step_gain = tp.predict("How many times faster is a whole training step in 16 bits, on this machine?", ...)

# %% [markdown]
# ## The idea
#
# A floating-point number is a sign, an exponent and a *mantissa*. The exponent's bits give the **range**, the
# mantissa's $m$ bits the **precision**. Rounding $x$ to the nearest such number makes a relative error of at most
# half a unit in the last place,
#
# $$\mathrm{fl}(x) = x\,(1 + \delta), \qquad |\delta| \le 2^{-(m+1)} \qquad \text{while } x \text{ is in the range.}$$

# %% jupyter={"source_hidden": true}
FORMATS = {
    "float32": (8, 23, BLUE),
    "bfloat16": (8, 7, ORANGE),
    "float16": (5, 10, GREEN),
}  # bits of exponent, mantissa
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 2.8), layout="constrained", width_ratios=(1, 1.1))
for row, (exponent, mantissa, colour) in enumerate(FORMATS.values()):
    start = 0
    for bits, alpha in ((1, 0.25), (exponent, 1.0), (mantissa, 0.55)):
        left.barh(row, bits, left=start, color=colour, alpha=alpha, edgecolor="white")
        left.text(start + bits / 2, row, str(bits), ha="center", va="center", fontsize=9)
        start += bits
    bias = 2 ** (exponent - 1) - 1
    right.barh(row, 2 * bias, left=1 - bias, color=colour, height=0.55)
    right.barh(row, mantissa, left=1 - bias - mantissa, color=colour, alpha=0.4, height=0.55)
    digits_10 = (mantissa + 1) * 0.30103
    right.text(132, row, f"{digits_10:.1f} digits", va="center", fontsize=9)
left.set(yticks=range(3), yticklabels=FORMATS, xlabel="bits: sign, exponent, mantissa", title="Where the bits go")
right.set(yticks=[], xlabel="log2 |x|   (pale: subnormal numbers)", title="What can be written", xlim=(-155, 178))
for axes in (left, right):
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
right.axvspan(-60, -14, color=GREY, alpha=0.18, zorder=0)
right.text(-37, 1.62, "small gradients", ha="center", fontsize=8)
plt.show()

# %% [markdown]
# **bfloat16** keeps the range and gives up digits. **float16** keeps more digits, and its range ends where small
# gradients lie. As a product of the loss with $s$ multiplies every gradient by $s$,
#
# $$\nabla_w (s\,L) = s\,\nabla_w L,$$
#
# gradients can be moved into float16's range and brought back in float32: *loss scaling* (Micikevicius et al., "Mixed
# Precision Training", 2018).
#
# ## The baseline, measured first
#
# What does this machine do in each format? A product of two $n \times n$ matrices takes $2n^3$ operations; a
# convolution, two for each weight of its kernel, position and image.


# %%
def operands(dtype, n=PRODUCT, images=8, channels=64, side=32):
    """Two matrices (n, n), and images with a kernel of 3 × 3, on the device."""
    a = torch.randn(n, n, device=DEVICE).to(dtype)
    x = torch.randn(images, channels, side, side, device=DEVICE).to(dtype)
    return a, x, torch.randn(channels, channels, 3, 3, device=DEVICE).to(dtype)


def rates(dtypes, n=PRODUCT, turns=20 if PAYS else 2):
    """{(what, dtype): FLOP/s}: the best of several turns, as others may use the machine too; of few where one is long."""
    runs, flop = {}, {}
    for dtype in dtypes:
        a, x, kernel = operands(dtype, n)
        runs["product", dtype], flop["product", dtype] = (lambda a=a: a @ a), 2 * n**3
        work = 2 * kernel.numel() * x.numel() / x.shape[1]
        runs["convolution", dtype], flop["convolution", dtype] = (lambda x=x, k=kernel: F.conv2d(x, k, padding=1)), work
    found = measure.race(runs, repeats=turns, warmup=min(2, turns - 1), device=DEVICE)
    return {key: flop[key] / min(seconds) for key, seconds in found.seconds.items()}


RATES = rates([torch.float32, HALF])
for (what, dtype), found in RATES.items():
    print(f"measured here: {what:<12} {str(dtype).removeprefix('torch.'):<9}{found / 1e9:10,.0f} GFLOP/s"
          f"   × {found / RATES[what, torch.float32]:.2f}")  # fmt: skip
(other,) = {torch.float16, torch.bfloat16} - {HALF}
wide = torch.randn(SLOW_PRODUCT, SLOW_PRODUCT, device=DEVICE)
half = wide.to(other)
pair = {"other": lambda: half @ half, "float32": lambda: wide @ wide}
slow = 2 * SLOW_PRODUCT**3 / min(measure.race(pair, repeats=5, device=DEVICE).seconds["other"])
print(f"measured here: product      {str(other).removeprefix('torch.'):<9}{slow / 1e9:10,.0f} GFLOP/s")

# %%
images = torch.randn(SETTING.batch_size, 3, SETTING.image_size, SETTING.image_size)
labels = torch.randint(CLASSES, (SETTING.batch_size,))


def median_step(step, rounds=ROUNDS, warmup=1):
    """Median seconds of a few steps on random images, with a new network."""
    model = training_run.make_model(CLASSES)
    optimizer = training_run.make_optimizer(model.parameters())
    chrono = measure.Chronometer(DEVICE, warmup=warmup)
    for batch in chrono.steps([(images, labels)] * (rounds + warmup)):
        with chrono.step():
            step(model, *batch, optimizer, DEVICE)
    record = chrono.record("step", batch_size=SETTING.batch_size)
    return statistics.median(found["step"] for found in measure.counted_steps(record))


baseline = median_step(training_run.plain_step)
print(f"{SETTING.architecture}, {SETTING.batch_size} images of {SETTING.image_size} pixels, float32: "
      f"{measure.human_seconds(baseline)} a step")  # fmt: skip

# %% [markdown]
# ## TF32: float32 on Tensor Cores
#
# Since the A100 there is a step between. In **TF32** the numbers stay float32 in memory, and a Tensor Core rounds what it
# multiplies to ten bits of mantissa; sums are float32. No byte is saved and no line of the network changes: it is a switch,
# one for products and one for convolutions (`fp32_precision` is `"ieee"` or `"tf32"`; torch 2.9 and later). PyTorch turns
# it on for convolutions only. Older code says `allow_tf32 = True` or `torch.set_float32_matmul_precision("high")`: use one
# of the two ways, as reading an old name after a new one was set may raise an error. The rounding can be imitated anywhere;
# the time needs the unit.


# %%
def to_tf32(x):
    """The float32 tensor x, its mantissa rounded to the ten bits that TF32 keeps of 23."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


x = torch.randn(768, 768)
exact = x.double() @ x.double()
for name, rounded in {"float32": x, "TF32": to_tf32(x), "bfloat16": x.bfloat16().float()}.items():
    error = (rounded @ rounded - exact).norm() / exact.norm()
    print(f"{name:<9} relative error of a product: {error:.0e}   (numbers rounded by hand, added up in float32)")

# %%
switch, a = torch.backends.cuda.matmul, torch.randn(PRODUCT, PRODUCT, device=DEVICE)
print(f"as it stands: products {switch.fp32_precision!r}, convolutions {torch.backends.cudnn.conv.fp32_precision!r}")


def product(precision):
    """A product of float32 matrices with the switch so."""
    switch.fp32_precision = precision
    return a @ a


if DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) >= (8, 0):
    before = switch.fp32_precision
    tf32_race = measure.race({p: lambda p=p: product(p) for p in ("tf32", "ieee")}, repeats=20, device=DEVICE)
    switch.fp32_precision = before
    recorded.note(NAME, "tf32", tf32_race.medians)
    print(tf32_race)
else:
    found = recorded.load(NAME, "tf32")
    gain = (
        f"recorded on {recorded.where(NAME)}: × {found['ieee'] / found['tf32']:.1f}"
        if found
        else "none is recorded yet"
    )
    print("No Tensor Core for TF32 here: nothing is measured, the switch changes nothing. On a GPU:", gain)

# %% [markdown]
# `"none"` means that nobody has set it: float32 as ever. On an A100, the data sheet printed above promises eight times the
# peak.
#
# ## Two steps

# %% [markdown]
# ### Balise 1 · A step in float16, with loss scaling · about 10 min
#
# The *scaled* loss goes backward, so that small gradients survive float16. Before anyone looks at them, the clip or the
# optimizer, they are divided by the scale again, in float32. `scaler` has the methods of `torch.amp.GradScaler`: it
# knows the scale, leaves out the update after an overflow, and adapts.
#
# The copies, `zero_grad` and the result are those of every step, and given. Write what stands between: forward under
# autocast in float16 (`logits`), mean cross-entropy computed in float32 (`loss`), backward, **gradients clipped to the
# global norm `max_norm`**, update. `model` is on `device`, in float32. Read no value, not even the scale: the CPU would
# wait. (`scaler.step` reads one, to know whether to skip.) About 8 lines.
#
# <details><summary>Hint</summary>
#
# `torch.autocast(device_type, dtype=...)` is a context manager; `device.type` is "cuda" or "cpu". Backward runs in
# the dtypes that forward has chosen, so it can stand outside; PyTorch's documentation advises that, and both are
# accepted here. The norm means something only for gradients that are no longer scaled: `scaler.unscale_(optimizer)`.
# `torch.nn.utils.clip_grad_norm_` clips by global norm. `scaler.step(optimizer)` calls the optimizer, or skips it
# after an overflow; `scaler.update()` ends the step.
# </details>


# %% tags=["balise-1"]
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """A step in float16. images (b, 3, h, w), labels (b,). Returns loss () and logits (b, classes), detached."""
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad()
    # BEGIN SOLUTION
    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    # END SOLUTION
    return loss.detach(), logits.detach()


# %%
tp.check(1, fp16_step)

# %% [markdown]
# ### Balise 2 · A step in bfloat16, and what stays in float32 · about 9 min
#
# bfloat16 has the range of float32, so nothing is scaled: this is how most networks are trained today. Write forward
# (`logits`) with its `loss`, backward and update. Weights and gradients stay float32, and the loss is computed in it. About 5 lines.
#
# `dtypes_under_autocast` is given. A *hook* on each module without children notes the dtype of what comes out, in one
# forward pass: so you will see below what is computed in bfloat16, and what is not.
#
# <details><summary>Hint</summary>
#
# `cross_entropy` computes in float32 under autocast, whatever comes in; outside, it takes what comes.
# </details>


# %% tags=["balise-2"]
def bf16_step(model, images, labels, optimizer, device):
    """A step in bfloat16. images (b, 3, h, w), labels (b,). Returns loss () and logits (b, classes), detached."""
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad()
    # BEGIN SOLUTION
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    # END SOLUTION
    return loss.detach(), logits.detach()


def dtypes_under_autocast(model, x, dtype):
    """{name of a module without children: dtype of its output}, from one forward pass under autocast."""
    found, handles = {}, []
    modes = {module: module.training for module in model.modules()}
    for name, module in model.named_modules():
        if not any(module.children()):

            def look(module, inputs, output, name=name):  # PyTorch calls it after the module's forward
                if isinstance(output, torch.Tensor):
                    found[name] = output.dtype

            handles.append(module.register_forward_hook(look))
    try:
        model.eval()  # batch norm learns nothing from x
        with torch.no_grad(), torch.autocast(x.device.type, dtype=dtype):
            model(x)
    finally:  # the model as it was: no hook left, each module in its own mode
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return found


# %%
tp.check(2, bf16_step, dtypes_under_autocast)


# %% [markdown]
# Let your report speak. Which parts of this small network stay in float32 is decided by lists in PyTorch, one for each
# type of device: matrix products and convolutions go to 16 bits; losses go to float32, and on a GPU sums, the norm of a
# vector, softmax, exponentials and layer norm too, as they add up many numbers or have a large range; everything else,
# batch norm too, takes what comes.


# %%
class Mixed(nn.Module):
    """A bit of everything, for looking at dtypes. images (b, 3, 16, 16)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.flatten, self.linear = nn.Flatten(), nn.Linear(8 * 14 * 14, 16)
        self.layer_norm, self.gelu, self.softmax = nn.LayerNorm(16), nn.GELU(), nn.Softmax(dim=1)

    def forward(self, x):
        x = self.linear(self.flatten(self.relu(self.norm(self.conv(x)))))
        return self.softmax(self.gelu(self.layer_norm(x)))


for name, dtype in dtypes_under_autocast(
    Mixed().to(DEVICE), torch.randn(2, 3, 16, 16, device=DEVICE), torch.bfloat16
).items():
    print(f"{name:<11} {str(dtype).removeprefix('torch.')}")
logits, target = torch.randn(4, 10, device=DEVICE).bfloat16(), torch.zeros(4, dtype=torch.long, device=DEVICE)
with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
    print(f"\ncross_entropy of bfloat16 logits: {F.cross_entropy(logits, target).dtype} under autocast", end=", ")
print(f"{F.cross_entropy(logits, target).dtype} outside")

# %% [markdown]
# ## What float16 loses

# %% [markdown]
# ### Balise 3 · The gradients that become zero · about 7 min
#
# How many gradients does float16 lose, and which scale saves them? Float16's smallest normal number is $2^{-14}$; below
# lie *subnormals*, with fewer and fewer digits, down to $2^{-24}$. The cast rounds to the nearest, so the border of what is
# lost is neither of the two.
#
# `gradients` is an iterable of float32 tensors (or `None`), `s` a scale. Each is multiplied by `s` in float32, then cast to
# float16. Count the values that were not zero and became zero (`lost`), and those that became infinite (`infinite`), over
# all tensors. Given are the loop, and the division by the number of values that were `there`, not zero, to begin with.
# About 3 lines.
#
# <details><summary>Hint</summary>
#
# Let the cast decide: `tensor.half()` rounds as said, and keeps subnormals. Comparisons give tensors of booleans; `&`
# joins two of them, `.sum()` counts. The gradients themselves stay as they are.
# </details>


# %% tags=["balise-3"]
def lost_in_float16(gradients, s):
    """(fraction that float16 makes zero, fraction that it makes infinite) of the non-zero gradients times s."""
    lost = infinite = there = 0
    for gradient in gradients:
        if gradient is not None:
            not_zero = gradient != 0
            there += not_zero.sum()
            # BEGIN SOLUTION
            half = (gradient * s).half()
            lost += ((half == 0) & not_zero).sum()
            infinite += half.isinf().sum()
            # END SOLUTION
    there = max(int(there), 1)  # read once, after the loop
    return float(lost) / there, float(infinite) / there


# %%
tp.check(3, lost_in_float16)

# %% [markdown]
# Now look at the gradients of a real step of the network: those of the weights, and those that flow back from layer to
# layer, which float16 would hold too. Guess first:

# %%
underflow = tp.predict("How many % of the gradients of a step does float16 make zero, without a scale?", ...)


# %%
def gradients_of_a_step(model, images, labels):
    """The float32 gradients of all weights, and of the outputs of convolutions and linear layers."""
    flowing = []
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    handles = [m.register_forward_hook(lambda _, __, y: y.register_hook(flowing.append) and None) for m in layers]
    F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).backward()
    for handle in handles:
        handle.remove()
    return flowing + [p.grad for p in model.parameters()]


photos, classes = next(iter(training_run.make_loader(num_workers=0)))
gradients = gradients_of_a_step(training_run.make_model(CLASSES), photos[:16], classes[:16])
SCALES = [2.0**k for k in range(-20, 33, 4)]
lost, infinite = zip(*(lost_in_float16(gradients, s) for s in SCALES))
best = min(range(len(SCALES)), key=lambda k: lost[k] + 1000 * infinite[k])
print(f"{sum(g.numel() for g in gradients):,} gradients")
for k in (SCALES.index(1.0), best):
    print(f"scale {SCALES[k]:8,.0f}  {lost[k]:7.2%} become zero, {infinite[k]:.2%} infinite")
why = "A new network has large gradients: look at the figure for what the step loses in digits, and for how near the border is."
underflow.shows(100 * lost[SCALES.index(1.0)], "{:.2g} %", why)

# %% jupyter={"source_hidden": true}
log2 = torch.cat([g[g != 0].abs().log2().flatten() for g in gradients])
counts, start = torch.histc(log2, bins=60, min=-45, max=15).cpu() / log2.numel() * 100, -45
figure, axes = plt.subplots(3, 1, figsize=(9, 5.4), layout="constrained", sharex=True, sharey=True)
causes = {2.0**-12: "a loss of small weight", 1.0: "as they come", SCALES[best]: "scaled"}
for row, (s, cause) in zip(axes, causes.items()):
    shift = torch.tensor(s).log2().item()
    row.bar(torch.arange(60) + start + 0.5 + shift, counts, width=1.0, color=BLUE)
    row.axvspan(-14, 16, color=GREEN, alpha=0.18)
    row.axvspan(-25, -14, color=GREEN, alpha=0.08)
    row.axvline(-25, color=ORANGE, linewidth=1.5)
    share = lost_in_float16(gradients, s)[0]
    row.set(ylabel="% of gradients", xlim=(-40, 20))
    row.set_title(f"{cause}, times $2^{{{shift:.0f}}}$: {share:.2%} become zero", loc="left", fontsize=11)
top = 1.3 * axes[0].get_ylim()[1]
axes[0].set_ylim(0, top)
axes[0].text(1, 0.88 * top, "float16: normal", ha="center", fontsize=9)
axes[0].text(-19.5, 0.88 * top, "subnormal", ha="center", fontsize=9)
axes[0].text(-39.5, 0.88 * top, "becomes zero", ha="left", fontsize=9, color=ORANGE)
axes[2].set_xlabel("log2 of |gradient × scale|")
plt.show()


# %% jupyter={"source_hidden": true}
def subnormal(s):
    """Fraction of the non-zero gradients that become subnormal: not lost, but with fewer digits."""
    exponent = sample + torch.tensor(s).log2()
    return ((exponent > -25) & (exponent < -14)).double().mean().item()


sample = log2.cpu()[::10]
powers = [torch.tensor(s).log2() for s in SCALES]
figure, axes = plt.subplots(figsize=(8.5, 2.8), layout="constrained")
axes.plot(powers, [100 * x for x in lost], "o-", color=ORANGE, label="become zero")
axes.plot(powers, [100 * subnormal(s) for s in SCALES], "^-", color=GREY, label="become subnormal")
axes.plot(powers, [100 * x for x in infinite], "s-", color=BLUE, label="become infinite")
axes.set(xlabel="log2 of the scale", ylabel="% of gradients", title="Which scale?")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Read both figures together. Without a scale (1, at $2^0$) few gradients of *this* step are zero, but about one in six
# is subnormal and has lost digits. Whatever makes gradients smaller moves the whole figure to the left: a network that
# has nearly learned, a larger batch, a loss with a small weight. A scale that is too large makes the largest ones
# infinite, and one infinite gradient spoils the whole step. Between the two lies room, and it moves during the
# training: so the scale has to be found by trying, all the time.

# %% [markdown]
# ### Balise 4 · A dynamic loss scaler · further · about 19 min
#
# No scale fits a whole training, so it is found by trying: smaller after an overflow, whose step is left out; larger after
# a long row of good steps. Write what `torch.amp.GradScaler` does, for one optimizer. What a scaler keeps is given, with
# `scale` and `get_scale`.
#
# - `unscale_(optimizer)`: divide `gradients` by the scale, in place, and let the tensor `self.found` tell whether one was
#   infinite or NaN. It stays on the device: nothing is read.
# - `step(optimizer)`: unscale if nobody has yet; then call `optimizer.step()`, unless a gradient was not finite. Note in
#   `self.skipped` which it was. This is the **one value** that may be read in a step.
# - `update()`: after a skipped step, multiply the scale by `backoff_factor`; after `growth_interval` good steps in a
#   row, by `growth_factor`, and count anew.
#
# About 13 lines. `GradScaler` itself is not to be used: you will race against it.
#
# <details><summary>Hint</summary>
#
# A loop over parameters costs an operator each, and a norm of all gradients finds infinities where there are none: its
# squares overflow first. PyTorch has one operator that divides a list of gradients in place and looks for what is not
# finite, in a single pass: `torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse_scale)`. `found`
# and `inverse_scale` are float32 tensors of one value on the device; `found`, zero before, becomes 1 in place.
# </details>


# %% tags=["balise-4"]
class LossScaler:
    """A loss scale that shrinks after an overflow and grows after a row of good steps."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.value, self.good_steps = init_scale, 0  # the scale; good steps in a row
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.found = None  # a tensor on the device after unscale_: 0 if all gradients are finite
        self.skipped = False  # whether step() left out the optimizer

    def scale(self, loss):
        """The loss times the scale."""
        return loss * self.value

    def unscale_(self, optimizer):
        """Divide the gradients by the scale, in place. Reads no value."""
        if self.found is not None:
            raise RuntimeError("unscale_() was called already in this step: call update() first")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = gradients[0].device
        # BEGIN SOLUTION
        self.found = torch.zeros((), device=device)
        inverse = torch.full((), 1 / self.value, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, inverse)
        # END SOLUTION

    def step(self, optimizer):
        """Call optimizer.step() if every gradient is finite. Reads one value."""
        # BEGIN SOLUTION
        if self.found is None:
            self.unscale_(optimizer)
        self.skipped = bool(self.found)  # the only wait
        if not self.skipped:
            optimizer.step()
        # END SOLUTION

    def update(self):
        """Adapt the scale, and begin a new step."""
        # BEGIN SOLUTION
        self.good_steps = 0 if self.skipped else self.good_steps + 1
        if self.skipped:
            self.value *= self.backoff_factor
        elif self.good_steps == self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0
        # END SOLUTION
        self.found = None  # a new step begins

    def get_scale(self):
        """The scale, a float."""
        return self.value


# %%
tp.check(4, LossScaler)

# %% [markdown]
# See it look for its scale: a small network on handwritten digits, in float16, with **your** step and **your**
# scaler. It starts far too high on purpose.

# %%
digits = data.digits()


def make_small_model():
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).to(DEVICE)


def digit_batches(n, batch_size=128):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(n):
        chosen = torch.randint(len(digits.train_x), (batch_size,), generator=drawn)
        yield digits.train_x[chosen], digits.train_y[chosen]


@contextlib.contextmanager
def one_core():
    """Compute on one core inside: on so small a network several would spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_core()
def scale_trace(scaler, steps=120):
    model = make_small_model()
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for x, y in digit_batches(steps):
        scales.append(scaler.get_scale())
        fp16_step(model, x, y, optimizer, scaler, DEVICE, max_norm=1.0)
    return scales


# %%
options = {"init_scale": 2.0**30, "growth_interval": 10}
traces = {"torch.amp.GradScaler": scale_trace(torch.amp.GradScaler(DEVICE.type, **options)),
          "yours": scale_trace(LossScaler(**options))}  # fmt: skip

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
for (name, trace), style, width in zip(traces.items(), ("-", "--"), (4, 1.8)):
    axes.step(
        range(1, len(trace) + 1), [torch.tensor(s).log2() for s in trace], style, lw=width, where="post", label=name
    )
skipped = [k + 1 for k, (a, b) in enumerate(zip(traces["yours"], traces["yours"][1:])) if b < a]
axes.plot(
    skipped, [min(torch.tensor(traces["yours"]).log2()) - 0.8] * len(skipped), "|", color=ORANGE, ms=9, label="skipped"
)
axes.set(xlabel="step", ylabel="log2 of the scale", title="The scaler looks for the largest scale that fits")
axes.legend(frameon=False, ncols=3)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# It falls until nothing overflows, then tries a larger scale every ten good steps and pays with a skipped one. With the
# usual interval of 2,000 steps that costs nearly nothing.
#
# ## Why weights stay in float32
#
# The next number below 1 in bfloat16 is 0.9961. An update of 0.001 is less than half of that distance, so it is rounded
# away, and so is the next one, for ever:

# %%
w, update = torch.tensor(1.0), torch.tensor(1e-3)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    narrow = w.to(dtype)
    for _ in range(1000):
        narrow = narrow - update.to(dtype)
    print(f"1 − 1000 × 0.001 in {str(dtype).removeprefix('torch.'):<9} {narrow.item():8.4f}")

# %% [markdown]
# ### Balise 5 · The unit in the last place, and master weights · further · about 10 min
#
# An update counts if it is more than half of the distance to the next number, the *unit in the last place*. (Below a
# power of two the next number is only half as far.) Where it does not, a second copy of the weights in float32, the
# *masters*, collects what 16 bits would round away.
#
# 1. `ulp(x)`: for a tensor in bfloat16, float16 or float32 return the distance from $|x|$ to the next larger number *of
#    its dtype*, same shape, in any dtype that holds it. It is the same between two powers of two, $\epsilon\,2^{\lfloor\log_2 |x|\rfloor}$ with `info.eps` the
#    distance at 1; and below `info.smallest_normal` it gets no smaller.
# 2. `MasterSGD`: SGD with momentum ($v \leftarrow \mu v + g$, $w \leftarrow w - \eta v$) for 16-bit parameters. Masters and
#    momentum are float32. Write how the masters are made, and the step of one parameter: update $v$ and the master, then
#    write the master, rounded, into the parameter. Nothing else is kept: 8 bytes a parameter.
#
# About 3 and 4 lines.
#
# <details><summary>Hint</summary>
#
# `torch.frexp(x)` gives the exponent without a logarithm: $x = a\,2^e$ with $\frac12 \le a < 1$; `torch.ldexp(a, e)` goes
# back. `clamp(min=...)` for the small ones, and float64 for room below. `p.detach().float()` makes a copy in float32,
# `p.copy_(master)` rounds it into the parameter.
# </details>


# %% tags=["balise-5"]
def ulp(x):
    """Distance from |x| to the next larger number of its dtype, same shape as x."""
    info = torch.finfo(x.dtype)
    # BEGIN SOLUTION
    size = x.double().abs().clamp(min=info.smallest_normal)
    _, exponent = torch.frexp(size)
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)
    # END SOLUTION


class MasterSGD:
    """SGD with momentum on float32 masters of 16-bit parameters."""

    def __init__(self, parameters, lr, momentum=0.9):
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        # BEGIN SOLUTION
        self.masters = [p.detach().float() for p in self.parameters]
        # END SOLUTION
        self.velocities = [torch.zeros_like(master) for master in self.masters]

    @torch.no_grad()
    def step(self):
        """Update the masters, then round them into the parameters."""
        for p, master, velocity in zip(self.parameters, self.masters, self.velocities):
            if p.grad is not None:
                # BEGIN SOLUTION
                velocity.mul_(self.momentum).add_(p.grad)
                master.sub_(velocity, alpha=self.lr)
                p.copy_(master)
                # END SOLUTION

    def zero_grad(self):
        """Let go of the gradients."""
        for p in self.parameters:
            p.grad = None


# %%
tp.check(5, ulp, MasterSGD)

# %% [markdown]
# How many updates of a real training step are lost? Compare each one with half the unit of its weight.

# %%
model = training_run.make_model(CLASSES)
F.cross_entropy(model(photos[:32].to(DEVICE)), classes[:32].to(DEVICE)).backward()
parts = [(p.detach(), p.grad) for p in model.parameters() if p.dim() > 1]
for lr in (0.1, 0.01, 0.001):
    for dtype in (torch.bfloat16, torch.float16):
        small = sum(((lr * g).abs() < ulp(w.to(dtype)) / 2).sum() for w, g in parts) / sum(w.numel() for w, _ in parts)
        print(f"learning rate {lr:<6} {str(dtype).removeprefix('torch.'):<9} {small:6.1%} of updates below half a unit")

# %% [markdown]
# ## What breaks, seen in the loss
#
# Left: a small learning rate, so small updates; SGD with momentum, 500 steps on digits. Right: small gradients. The
# loss is a term of weight $2^{-18}$, as one of several terms may be, and the learning rate is $2^{18}$ times larger,
# so that in float32 nothing changes at all.


# %%
@one_core()
def fit(step, model, optimizer, steps=STEPS):
    """The loss after each step, smoothed; model and optimizer as given."""
    losses = [step(model, x, y, optimizer, DEVICE)[0].float() for x, y in digit_batches(steps)]
    return F.avg_pool1d(torch.stack(losses)[None].cpu(), 15, 5)[0].tolist()


def sgd(model, lr=0.003):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def pure_step(model, images, labels, optimizer, device):
    """Everything in the dtype of the model, except the loss."""
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    loss = F.cross_entropy(model(images.to(device, dtype)).float(), labels.to(device))
    loss.backward()
    optimizer.step()
    return loss.detach(), None


def narrow():
    return make_small_model().bfloat16()


# %%
full, autocast, pure, kept = make_small_model(), make_small_model(), narrow(), narrow()
updates = {
    "float32": fit(training_run.plain_step, full, sgd(full)),
    "autocast to bfloat16": fit(bf16_step, autocast, sgd(autocast)),
    "all in bfloat16, no masters": fit(pure_step, pure, sgd(pure)),
    "all in bfloat16, your masters": fit(pure_step, kept, MasterSGD(kept.parameters(), lr=0.003)),
}

# %%
WEIGHT = 2.0**-18


def weighted_step(scaler, dtype=torch.float16):
    """A step on WEIGHT × the loss, under autocast, with a scaler or None. Returns the loss without its weight."""

    def step(model, images, labels, optimizer, device):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        if scaler is None:
            (WEIGHT * loss).backward()
            optimizer.step()
        else:
            scaler.scale(WEIGHT * loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach(), None

    return step


# %%
def fit_weighted(scaler, dtype=torch.float16):
    model = make_small_model()
    return fit(weighted_step(scaler, dtype), model, sgd(model, lr=0.02 / WEIGHT))


small_gradients = {
    "float32": fit_weighted(None, torch.float32),
    "autocast to bfloat16": fit_weighted(None, torch.bfloat16),
    "autocast to float16, no scaler": fit_weighted(None),
    "autocast to float16, your scaler": fit_weighted(LossScaler(growth_interval=100)),
}

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
LOOKS = [(BLUE, "-", 4), (GREEN, "-", 1.8), (ORANGE, "-", 1.8), (PINK, "--", 1.8)]
for axis, runs, title in zip(axes, (updates, small_gradients), ("Small updates", "Small gradients")):
    for (name, curve), (colour, style, width) in zip(runs.items(), LOOKS):
        axis.plot([8 + 5 * k for k in range(len(curve))], curve, style, color=colour, linewidth=width, label=name)
    axis.set(xlabel="step", ylabel="loss (cross-entropy)", ylim=(0, 2.5), title=title)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Left, it is the *digits* that are missing: without masters most updates are rounded away, and the loss hardly falls.
# Right, it is the *range*: without a scaler the gradients are zero. Autocast to bfloat16 has trouble with neither, as
# its weights stay in float32 and its range is that of float32. And there is a third way to break it, in one step:

# %%
model = make_small_model().half()
adam = torch.optim.Adam(model.parameters(), lr=1e-3)
for k, (x, y) in enumerate(digit_batches(2), 1):
    print(f"Adam, all in float16, step {k}: loss {pure_step(model, x, y, adam, DEVICE)[0].item():.3f}")
print(f"its eps of 1e-8 in float16: {torch.tensor(1e-8).half().item()}")

# %% [markdown]
# Adam divides by $\sqrt{v} + \epsilon$. In float16 the squares of small gradients are zero, and $\epsilon$ is zero too.
#
# ## What it costs in memory · further


# %% tags=["setup"]
@dataclass(frozen=True)
class Setup:
    """How numbers are kept and computed with. compute differs from weights where autocast casts."""

    name: str
    weights: torch.dtype
    compute: torch.dtype
    masters: bool = False


SETUPS = [
    Setup("float32", torch.float32, torch.float32),
    Setup("autocast to bfloat16", torch.float32, torch.bfloat16),
    Setup("all in bfloat16", torch.bfloat16, torch.bfloat16),
    Setup("bfloat16 with masters", torch.bfloat16, torch.bfloat16, masters=True),
]
OPTIMIZERS = {"SGD": 0, "SGD, momentum": 1, "AdamW": 2}  # numbers it keeps for each parameter

# %% [markdown]
# ### Balise 6 · Bytes · further · about 10 min
#
# Does mixed precision make a model smaller? Count the bytes of one parameter, part by part. The weights and the gradients
# are given: backward leaves a gradient in the dtype of its weight.
#
# 1. `bytes_per_parameter(setup, states)`: add to `parts`
#    - `states`: the optimizer's numbers (`states` is how many), in the dtype of *what it updates*, weight or master;
#    - `masters`: a float32 copy of the weight, if the setup has them (0 if not);
#    - `casts`: the copy that autocast makes of a weight whose dtype is not `compute`, and keeps until backward is done.
# 2. `largest_model(capacity, setup, states, activations)`: the largest number of parameters (an `int`, 0 if none) that
#    fits into `capacity` bytes beside so many `activations` (numbers, not bytes: each has the dtype `compute`).
#
# About 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `dtype.itemsize` is the bytes of a number; two dtypes of the same size are still two. Whole numbers are divided by `//`.
# </details>


# %% tags=["balise-6"]
def bytes_per_parameter(setup, states):
    """{"weights", "gradients", "states", "masters", "casts"}: bytes for one parameter."""
    parts = {"weights": setup.weights.itemsize, "gradients": setup.weights.itemsize}
    # BEGIN SOLUTION
    updated = torch.float32 if setup.masters else setup.weights
    parts["states"] = states * updated.itemsize
    parts["masters"] = updated.itemsize if setup.masters else 0
    parts["casts"] = setup.compute.itemsize if setup.compute != setup.weights else 0
    # END SOLUTION
    return parts


def bytes_per_activation(setup):
    """Bytes of one number of an activation."""
    return setup.compute.itemsize


def largest_model(capacity, setup, states, activations=0):
    """Number of parameters that fit into `capacity` bytes beside `activations` numbers of activations."""
    # BEGIN SOLUTION
    room = int(capacity) - activations * bytes_per_activation(setup)
    return max(0, room // sum(bytes_per_parameter(setup, states).values()))
    # END SOLUTION


# %%
tp.check(6, bytes_per_parameter, bytes_per_activation, largest_model)

# %%
print(f"{'bytes a parameter':<24}{'':<15}weights gradients states masters casts  total   fits into 80 GB")
for setup in SETUPS:
    for optimizer, states in OPTIMIZERS.items():
        parts = bytes_per_parameter(setup, states)
        size = largest_model(80e9, setup, states)
        numbers = "".join(f"{parts[key]:{width}}" for key, width in zip(parts, (8, 10, 7, 8, 6)))
        print(
            f"{setup.name:<24}{optimizer:<14}{numbers}{sum(parts.values()):7}   {size / 1e9:5.1f} billion (calculated)"
        )

# %%
HALF_NAME = str(HALF).removeprefix("torch.")
SCALER = None if HALF is torch.bfloat16 else LossScaler()


def half_step(model, images, labels, optimizer, device):
    """Your step in the 16 bits of this machine: float16 needs your scaler."""
    if SCALER:
        return fp16_step(model, images, labels, optimizer, SCALER, device, max_norm=math.inf)  # clips nothing
    return bf16_step(model, images, labels, optimizer, device)


# %% [markdown]
# Read the last row: 16-bit weights with masters and Adam make 2 + 2 + (4 + 4 + 4) = 16 bytes, the figure of the ZeRO
# paper (Rajbhandari et al., 2020). **Mixed precision does not make the model smaller**: float32 with Adam takes 16
# bytes as well. Autocast even adds its copies. What becomes smaller is the activations, and with large batches these
# are the largest part. Is that so? Weigh a real step: all bytes that live at its peak. Guess first:

# %%
left = tp.predict("What is the peak memory of a step in 16 bits, in % of that of a step in float32?", ...)


# %%
def peak_of(step):
    """Highest memory in use in a step, in bytes; one in float32 goes before, which makes the momentum."""
    model = training_run.make_model(CLASSES)
    optimizer = training_run.make_optimizer(model.parameters())
    training_run.plain_step(model, images, labels, optimizer, DEVICE)
    optimizer.zero_grad()
    with measure.peak_memory(DEVICE, track=[model, optimizer]) as found:
        step(model, images, labels, optimizer, DEVICE)
    return found.peak, sum(p.numel() for p in model.parameters())


peaks = {}
for setup, step in zip(SETUPS[:2], (training_run.plain_step, half_step)):
    peaks[setup.name], n = peak_of(step)
    print(f"{setup.name:<22} peak {measure.human_bytes(peaks[setup.name]):>10} (measured)   "
          f"weights and momentum {measure.human_bytes(8 * n):>10} of it")  # fmt: skip
of_float32, of_half = peaks.values()
why = "Only activations are halved, and not all of them; autocast adds its copies of the weights."
left.shows(100 * of_half / of_float32, "{:.0f} %", why)

# %% [markdown]
# Weights, momentum and gradients take the same bytes in both: all that has become smaller are activations. The more of
# them there are, with larger images and batches, the closer the whole comes to one half.
#
# ## Measured again

# %%
again = median_step(half_step) if PAYS else median_step(half_step, rounds=1, warmup=0)
print(f"float32  {measure.human_seconds(baseline):>8} a step\n{HALF_NAME:<8} {measure.human_seconds(again):>8} a step"
      f"   × {baseline / again:.2f}")  # fmt: skip
for what in ("product", "convolution"):
    print(f"a {what} alone, measured above: × {RATES[what, HALF] / RATES[what, torch.float32]:.2f}")
if not PAYS:
    print("\nOne step is enough: bfloat16 does not pay on this processor, and the red thread stays in float32.")

# %% [markdown]
# What to expect on a processor, by arithmetic? An instruction of AVX-512 multiplies and adds 16 numbers of float32; with its
# extension for bfloat16, 32: **twice** the operations. With AMX, Intel's unit for tiles of matrices, a core does 512
# multiply-adds in bfloat16 a cycle where two AVX-512 units do 32 in float32: **sixteen** times, more than its memory can feed
# in most layers. AVX-512 without that extension converts to float32 and back, and gains nothing. And without AVX-512? The library of
# convolutions (oneDNN) has no kernel for bfloat16 there, so PyTorch falls back to plain loops: not a little slower, but **ten
# times**. Most laptops are so. Autocast does not warn: measure, before you trust a format.
#
# Compare with your figures. A factor far above the arithmetic says that the float32 product comes from a library that does not
# suit your processor, not that bfloat16 is so good: `ONEDNN_VERBOSE=1` in the environment shows who computes what. Float16
# without a unit for it is emulated. Where others use the cores too, all this moves from run to run: believe the race below
# more than two runs one after the other.
#
# ## Race
#
# First the steps: the same network, in turn (not where one step has told enough). Then your scaler against PyTorch's, on
# the same gradients: unscale, step, update.

# %%
networks = [training_run.make_model(CLASSES) for _ in range(2)]
optimizers = [training_run.make_optimizer(network.parameters()) for network in networks]
candidates = {
    f"autocast to {HALF_NAME}": lambda: half_step(networks[0], images, labels, optimizers[0], DEVICE),
    "float32": lambda: training_run.plain_step(networks[1], images, labels, optimizers[1], DEVICE),
}
step_race = measure.race(candidates, repeats=ROUNDS, warmup=1, device=DEVICE) if PAYS else None
in_half, in_float32 = step_race.medians.values() if PAYS else (again, baseline)
why = "What is no product and no convolution stays as it was; where the processor has no unit for 16 bits, they cost time."
step_gain.shows(in_float32 / in_half, "× {:.2f}", why)
step_race


# %%
def scaler_step(scaler, network):
    """Unscale, step, update, on the gradients that `network` has: a learning rate of 0 leaves all as it is."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    scaler.scale(torch.zeros((), device=DEVICE))

    def run():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return run


for network in networks:
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
no_growth = {"growth_interval": 10**9}
race = measure.race(
    {
        "your scaler": scaler_step(LossScaler(**no_growth), networks[0]),
        "torch.amp.GradScaler": scaler_step(torch.amp.GradScaler(DEVICE.type, **no_growth), networks[1]),
    },
    repeats=60,
    device=DEVICE,
)
print(f"ratio {race.ratio:.2f}")
race

# %% [markdown]
# A scaler that divides and looks in two passes reads every gradient twice, and starts an operator for each parameter:
# it is slower than PyTorch's, which has one fused operator for all (see the hint of balise 4).
#
# ## Past this machine · further
#
# The memory of a step is computed in float32 by `measure.estimate_memory`; your bytes turn it into that of autocast.
# Which batch fits on a card that is not here?

# %%
from torchvision import models

GIGABYTES = (16, 32, 80, 141)  # of cards in use
float32, mixed = SETUPS[:2]
print(f"{'largest batch at 224 pixels (estimate)':<42}" + "".join(f"{size:>10} GB" for size in GIGABYTES))
for architecture in (models.resnet18, models.resnet50):
    low, high = (
        measure.estimate_memory(architecture, (3, 224, 224), b, training_run.make_optimizer).peak for b in (16, 32)
    )
    image, n = (high - low) / 16, sum(p.numel() for p in architecture().parameters())
    for setup in (float32, mixed):
        fixed = n * sum(bytes_per_parameter(setup, 1).values())
        each = image * bytes_per_activation(setup) / 4
        fits = "".join(f"{int((size * 1e9 - fixed) / each):>13,}" for size in GIGABYTES)
        print(f"{architecture.__name__ + ', ' + setup.name:<42}{fits}")

# %% [markdown]
# These are estimates: some activations stay in float32 under autocast, the images that come in among them, and a real
# card holds the CUDA context and scratch memory too.
#
# And on a card that you may not have? Your step in bfloat16 beside float32, which an H100 computes in TF32, on a **modelled**
# card: each operation takes the time that its arithmetic and its bytes would need there.

# %%
worth.table({"float32": training_run.plain_step, "your bf16_step": bf16_step}, keep=NAME)

# %% [markdown]
# ## The red thread
#
# The same training run as in every practical work on one device: float32 with the loader of the one before, then your
# step in 16 bits. Where they do not pay, nothing changes and no row is added: a technique that costs time on this machine
# is left out here, and all later works go on in float32.

# %%
if PAYS:
    before = training_run.run("float32", training_run.plain_step)
    after = training_run.run(f"autocast to {HALF_NAME}", half_step)
    gains.keep(NAME, f"autocast to {HALF_NAME}", before=before, after=after)
gains.table()

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Training in float16 skips every step, and the scale falls to zero. What is wrong?</summary>
#
# Not the scale. A gradient, or the loss itself, is NaN or infinite for another reason: a division by zero, a
# logarithm of zero, an activation above 65,504 in the forward pass. No scale can mend that: look for the first module
# with an infinite output.
# </details>
#
# <details><summary>A colleague calls model.half() before training under autocast. What happens?</summary>
#
# Weights and gradients are now in float16: there are no masters any more, so small updates are lost, and
# <code>GradScaler.unscale_</code> refuses float16 gradients. Autocast wants a model in float32.
# </details>
#
# <details><summary>Gradients add up over four micro-batches. When are unscale_, step and update called?</summary>
#
# Once, after the fourth. Gradients of one update must have the same scale, and it may change only between updates.
# </details>
#
# ## To remember
#
# Autocast to bfloat16 is three lines and needs nothing else, as weights stay in float32; whether it gains time, the
# hardware decides: Tensor Cores from the A100 on, AVX-512 with its extension, AMX. Float16 has more digits and
# less range: it needs a scaler, and gradients that are unscaled before anyone looks at them. Sums, losses and updates
# need float32: below half a unit in the last place, an addition does nothing. The bytes saved are those of
# activations, not of the model. Eight bits go on from here: **FP8** has so little range that each tensor needs a scale of its
# own, and work 22 (compression) trains a network so. Next: **Tensor Cores and memory formats**, which decide how much of
# the promised peak a step can reach.
