# %% [markdown] tags=["slide"]
# # Mixed precision: 16 bits where they suffice, 32 where they're needed · about 95 min, core 45
#
# Most of a training step works just as well with 16-bit numbers as with 32-bit ones. Some of it doesn't: small
# gradients become zero and small updates are lost, and nothing warns you except a loss that stops falling. You write
# the step, and what keeps it correct: **loss scaling**, **operations left in float32**, and **master weights**.
#
# **What you will gain.** The activations take about half the bytes, measured with your own step. You also save nearly
# all the gradients that float16 would turn into zero.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp import (
    course, data, gains, measure, planner, precision, recorded, report, scale, todo, training_run, worth,
)  # fmt: skip

NAME = "02_mixed_precision"
tp = course.open(NAME)
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
# all sizes. FAST is the format in which this machine computes fastest: float32 if it has no 16-bit instructions
FULL = scale() == "full"
DEVICE = training_run.device()
SETTING = training_run.setting()
CLASSES = len(data.image_set().classes)
PRODUCT = 8192 if FULL else 768  # side of the square matrices that measure the rate of products
SLOW_PRODUCT = 8192 if FULL else 96  # for float16, which a processor without the right units emulates
FAST = precision.fast_dtype(DEVICE)
PAYS = FAST.itemsize == 2
HALF = FAST if PAYS else torch.bfloat16  # the format that is compared with float32
ROUNDS = 20 if FULL else 4  # of a race between whole steps
STEPS = 500  # of the small trainings on digits
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"

# %% [markdown]
# ## The idea
#
# A floating-point number has a sign, an exponent and a *mantissa*. The bits of the exponent give the **range**, the $m$
# bits of the mantissa the **precision**: rounding has a relative error of at most $2^{-(m+1)}$.

# %% tags=["slide"] jupyter={"source_hidden": true}
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
right.set(yticks=[], xlabel="log2 |x|   (pale: fewer digits)", title="What each one can represent", xlim=(-155, 178))
for axes in (left, right):
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
right.axvspan(-60, -14, color=GREY, alpha=0.18, zorder=0)
right.text(-37, 1.62, "small gradients", ha="center", fontsize=8)
plt.show()

# %% [markdown] tags=["slide"]
# **bfloat16** keeps the range of float32 and gives up digits. **float16** keeps more digits, but many small gradients
# are below its range. If the loss is multiplied by $s$, so is every gradient:
#
# $$\nabla_w (s\,L) = s\,\nabla_w L.$$
#
# This moves gradients into float16's range. They are then divided by $s$ in float32. That is *loss scaling*
# (Micikevicius et al., "Mixed Precision Training", 2018).

# %% [markdown]
# ## The baseline
#
# The backward pass needs the activations of the forward pass, so a step keeps them. How many bytes do they take in
# float32, for 8 images of 224 pixels?


# %% jupyter={"source_hidden": true}
PHOTOS, CLASSES_OF_PHOTOS = torch.randn(8, 3, 224, 224), torch.randint(CLASSES, (8,))


def activations_of(step):
    """Bytes that a step keeps for its backward pass; weights, and copies of them in 16 bits, do not count."""
    model = training_run.make_model(CLASSES)
    optimizer = training_run.make_optimizer(model.parameters())
    weights, kept = {p.shape for p in model.parameters() if p.dim() > 1}, {}

    def note(tensor):
        if tensor.shape not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step(model, PHOTOS, CLASSES_OF_PHOTOS, optimizer, DEVICE)
    return sum(kept.values())


# %%
in_float32 = activations_of(training_run.plain_step)
report.table({"step": "{}", "activations": measure.human_bytes}, [("float32", in_float32)])

# %% [markdown]
# ## TF32: float32 on Tensor Cores · further
#
# In **TF32**, numbers stay float32 in memory, and a Tensor Core rounds the factors of a product to ten bits of
# mantissa. That saves no memory and needs no new code: it's a switch, `fp32_precision`. By default, PyTorch turns it on
# for convolutions only.


# %% jupyter={"source_hidden": true}
def to_tf32(x):
    """The float32 tensor x, its mantissa rounded from 23 bits to TF32's ten."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


x = torch.randn(768, 768)
exact = x.double() @ x.double()
for name, rounded in {"float32": x, "TF32": to_tf32(x), "bfloat16": x.bfloat16().float()}.items():
    error = (rounded @ rounded - exact).norm() / exact.norm()
    print(f"{name:<9} relative error of a product: {error:.0e}   (factors rounded first, sums in float32)")

# %% jupyter={"source_hidden": true}
switch, a = torch.backends.cuda.matmul, torch.randn(PRODUCT, PRODUCT, device=DEVICE)
print(f"as set here: products {switch.fp32_precision!r}, convolutions {torch.backends.cudnn.conv.fp32_precision!r}")


def product(precision):
    """A product of float32 matrices with the switch set to `precision`."""
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
    print("No Tensor Core for TF32 here: the switch changes nothing, so nothing is measured. On a GPU:", gain)

# %% [markdown]
# ## Two steps
#
# ### Balise 1 · A step in float16, with loss scaling · about 14 min
#
# Call backward on the *scaled* loss. Divide the gradients by the scale before you clip them and before the optimizer
# uses them. `scaler` has the methods of `torch.amp.GradScaler`: it keeps the scale, adapts it, and skips the update
# after an overflow.
#
# Write the forward pass under autocast in float16 (`logits`), the mean cross-entropy in float32 (`loss`), the backward
# pass, the **clipping of gradients to the global norm `max_norm`**, and the update. `model` is on `device`, in float32.
# Don't read any value yourself: the CPU would wait. About 8 lines.
#
# <details><summary>Hint</summary>
#
# `torch.autocast(device_type, dtype=...)` is a context manager, and `device.type` is "cuda" or "cpu". The backward pass
# uses the dtypes of the forward pass, so it can stay outside. The norm is meaningful only after
# `scaler.unscale_(optimizer)`. `torch.nn.utils.clip_grad_norm_` clips by global norm. `scaler.step(optimizer)` calls
# the optimizer, or skips it after an overflow; `scaler.update()` ends the step.
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
# ### Balise 2 · A step in bfloat16, and what stays in float32 · about 12 min
#
# bfloat16 has the range of float32, so it needs no scale. Most networks are trained this way today. Write the forward
# pass (`logits`), the `loss` in float32, the backward pass and the update. Weights and gradients stay float32. About 5
# lines.
#
# `dtypes_under_autocast` is given: a *hook* on each module notes the dtype of its output.
#
# <details><summary>Hint</summary>
#
# `cross_entropy` computes in float32 under autocast, whatever its input. Outside, it uses the dtype of its input.
# </details>


# %% tags=["balise-2", "slide-mistake=loss-in-half"]
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
# PyTorch has lists of what autocast does to each operation, for each type of device. Matrix products and convolutions
# run in 16 bits. Losses run in float32; on a GPU softmax, sums and layer norm do too. Everything else keeps the dtype
# of its input.


# %% jupyter={"source_hidden": true}
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


# %%
seen = dtypes_under_autocast(Mixed().to(DEVICE), torch.randn(2, 3, 16, 16, device=DEVICE), torch.bfloat16)
report.table({"module": "{}", "output": "{}"}, list(seen.items()))

# %% [markdown]
# ## What float16 loses
#
# ### Balise 3 · The gradients that become zero · about 10 min
#
# Float16's smallest normal number is $2^{-14}$. Below it are the *subnormals*, with fewer digits, down to $2^{-24}$.
# How many gradients does float16 lose, and which scale saves them?
#
# Multiply each gradient by `s` in float32, then cast it to float16. Count the values that were not zero and became zero
# (`lost`), and those that became infinite (`infinite`). The loop and the division are given. About 3 lines.
#
# <details><summary>Hint</summary>
#
# Let the cast decide: `tensor.half()` rounds to the nearest and keeps subnormals. Comparisons give boolean tensors, `&`
# joins two of them, and `.sum()` counts. Don't change the gradients themselves.
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
# The next cell counts lost gradients in a real step: those of weights, and those that flow back from layer to layer.

# %%
underflow = tp.predict("What % of the gradients of a step does float16 turn into zero, without a scale?", ...)


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
columns = {"gradients times": "2^{:.0f}", "become zero": "{:.2%}", "infinite": "{:.2%}"}
report.table(columns, [(math.log2(SCALES[k]), lost[k], infinite[k]) for k in (2, SCALES.index(1.0), best)])
why = "An untrained network has large gradients. The first row is for a loss with a small weight."
underflow.shows(100 * lost[SCALES.index(1.0)], "{:.2g} %", why)

# %% tags=["slide"] jupyter={"source_hidden": true}
log2 = torch.cat([g[g != 0].abs().log2().flatten() for g in gradients])
counts, start = torch.histc(log2, bins=60, min=-45, max=15).cpu() / log2.numel() * 100, -45
figure, axes = plt.subplots(3, 1, figsize=(9, 5.4), layout="constrained", sharex=True, sharey=True)
causes = {2.0**-12: "a loss with a small weight", 1.0: "unscaled", SCALES[best]: "scaled"}
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
# Anything that makes gradients smaller moves the bars to the left: a network that's nearly trained, a larger batch, a
# loss with a small weight. A scale that is too large makes the largest gradients infinite, and one infinite gradient
# spoils the step. The range of good scales moves during training.

# %% [markdown]
# ### Balise 4 · A dynamic loss scaler · further · about 21 min
#
# No scale fits a whole training run, so the scale adapts. Write what `torch.amp.GradScaler` does:
#
# - `unscale_`: divide `gradients`. The tensor `self.found` tells whether one was infinite or NaN.
# - `step`: whether to skip is the **one value** that you may read in a step. Keep it in `self.skipped`.
# - `update`: adapt `self.value`, the scale.
#
# About 13 lines.
#
# **Write all of it:** `tp.open_task(4)` gives you only names and docstrings. Build a scaler that follows
# `GradScaler` through every overflow, with one wait in a step.
#
# <details><summary>Hint</summary>
#
# A loop would run an operator for each parameter, and a norm may overflow even if all gradients are finite. PyTorch has
# one operator that divides a list of gradients in place and looks for non-finite values in a single pass:
# `torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse_scale)`. `found` and `inverse_scale` are
# float32 tensors of one value on the device; `found` starts at 0 and becomes 1 if a value is not finite. </details>


# %% tags=["balise-4"]
class LossScaler:
    """A loss scale that shrinks after an overflow and grows after many good steps in a row, as GradScaler's does.

    A step calls scale(loss).backward(), unscale_(optimizer) or not, step(optimizer) and update(). All of them together
    may read one value from the device. The scale begins at init_scale and has no limits. Don't use GradScaler itself.
    """

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.value, self.good_steps = init_scale, 0  # the scale; good steps in a row
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.found = None  # a tensor on the device after unscale_: 0 if all gradients are finite
        self.skipped = False  # whether step() left out the optimizer

    def scale(self, loss):
        """The loss times the scale: a new tensor with the loss's graph."""
        return loss * self.value

    def unscale_(self, optimizer):
        """Divide the gradients of all parameter groups by the scale, in place, except those that are None.

        Keep in a tensor on their device whether one was infinite or NaN, and read no value. Finite gradients may be as
        large as 1e30. A second call before update() raises RuntimeError.
        """
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
        """Call optimizer.step() if every gradient is finite. Reads one value. Unscales first if nobody has."""
        # BEGIN SOLUTION
        if self.found is None:
            self.unscale_(optimizer)
        self.skipped = bool(self.found)  # the only wait
        if not self.skipped:
            optimizer.step()
        # END SOLUTION

    def update(self):
        """Adapt the scale, and begin a new step. Nothing else changes the scale.

        After a skipped step, multiply it by backoff_factor. After growth_interval good steps in a row, multiply it by
        growth_factor in the update of the last one, and count from 0 again.
        """
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
        """The scale, a Python float."""
        return self.value


# %%
tp.check(4, LossScaler)

# %% [markdown]
# Watch **your** scaler search: a small network in float16, with **your** step, starts from a scale that is far too
# high.

# %% jupyter={"source_hidden": true}
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
    """Compute on one core inside: in a network this small, several cores would mostly wait for each other."""
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
# ## Why weights stay in float32
#
# The next number below 1 in bfloat16 is 0.9961. An update of 0.001 is less than half of that distance, so it is rounded
# away, every time:

# %%
w, update = torch.tensor(1.0), torch.tensor(1e-3)
rows = []
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    narrow = w.to(dtype)
    for _ in range(1000):
        narrow = narrow - update.to(dtype)
    rows.append((str(dtype).removeprefix("torch."), narrow.item()))
report.table({"": "{}", "1 − 1000 × 0.001": "{:.4f}"}, rows)

# %% [markdown]
# ### Balise 5 · The unit in the last place, and master weights · further · about 14 min
#
# An update has an effect only if it is more than half of the distance to the next number, the *unit in the last place*.
# So a second copy of the weights in float32, the *masters*, collects what 16 bits would round away.
#
# 1. `ulp(x)`: return the distance from $|x|$ to the next larger number *of its dtype*. It is
#    $\epsilon\,2^{\lfloor\log_2 |x|\rfloor}$ with `info.eps` for $\epsilon$. Below `info.smallest_normal` it stays the
#    same.
# 2. `MasterSGD`: SGD with momentum ($v \leftarrow \mu v + g$, $w \leftarrow w - \eta v$). Masters and momentum are
#    float32. Write the line that makes the masters, and the step of one parameter: update $v$ and the master, then
#    write the master, rounded, into the parameter. Keep nothing else.
#
# About 3 and 4 lines.
#
# <details><summary>Hint</summary>
#
# `torch.frexp(x)` gives the exponent without a logarithm: $x = a\,2^e$ with $\frac12 \le a < 1$; `torch.ldexp(a, e)`
# goes back. Use `clamp(min=...)` for small numbers, and float64 so that small distances don't underflow.
# `p.detach().float()` makes a copy in float32, `p.copy_(master)` rounds it into the parameter.
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
        """Drop the gradients."""
        for p in self.parameters:
            p.grad = None


# %%
tp.check(5, ulp, MasterSGD)

# %% [markdown]
# How many updates of a real training step are lost?

# %%
model = training_run.make_model(CLASSES)
F.cross_entropy(model(photos[:32].to(DEVICE)), classes[:32].to(DEVICE)).backward()
parts = [(p.detach(), p.grad) for p in model.parameters() if p.dim() > 1]
rows = []
for lr in (0.1, 0.01, 0.001):
    for dtype in (torch.bfloat16, torch.float16):
        small = sum(((lr * g).abs() < ulp(w.to(dtype)) / 2).sum() for w, g in parts) / sum(w.numel() for w, _ in parts)
        rows.append((f"{lr}", str(dtype).removeprefix("torch."), small.item()))
report.table({"learning rate": "{}", "weights": "{}", "updates lost": "{:.1%}"}, rows)

# %% [markdown]
# ## What breaks, seen in the loss · further
#
# On the left, the learning rate is small, so updates are small. On the right, the loss has a weight of $2^{-18}$, and
# the learning rate is $2^{18}$ times larger: in float32 these two cancel.


# %% jupyter={"source_hidden": true}
@one_core()
def fit(step, model, optimizer, steps=STEPS):
    """Train `model`; return the loss of the steps, smoothed."""
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

# %% jupyter={"source_hidden": true}
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
# On the left, *digits* run out: without masters, most updates are rounded away. On the right, *range* does: without a
# scaler, gradients are zero. Adam breaks in one step, because its $\epsilon$ is zero in float16:

# %%
model = make_small_model().half()
adam = torch.optim.Adam(model.parameters(), lr=1e-3)
for k, (x, y) in enumerate(digit_batches(2), 1):
    print(f"Adam, all in float16, step {k}: loss {pure_step(model, x, y, adam, DEVICE)[0].item():.3f}")
print(f"its eps of 1e-8 in float16: {torch.tensor(1e-8).half().item()}")

# %% [markdown]
# ## What it costs in memory · further


# %% tags=["setup"]
@dataclass(frozen=True)
class Setup:
    """The dtypes in which numbers are kept and computed. Under autocast, compute differs from weights."""

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
# ### Balise 6 · Count the bytes · further · about 14 min
#
# Does mixed precision make a model smaller? Add up the bytes of one parameter. Its weight and gradient are given.
#
# 1. `bytes_per_parameter(setup, states)`: add to `parts`
#    - `states`: the `states` numbers the optimizer keeps, in the dtype of *what it updates*, weight or master;
#    - `masters`: a float32 copy of the weight, if the setup has them (0 if not);
#    - `casts`: the copy that autocast makes and keeps of a weight whose dtype is not `compute`.
# 2. `largest_model(capacity, setup, states, activations)`: the largest number of parameters (an `int`, 0 if none) that
#    fits into `capacity` bytes beside the `activations`, a number of values in the dtype `compute`.
#
# About 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `dtype.itemsize` gives the bytes of one number. Two dtypes of the same size are still different. Divide whole numbers
# with `//`.
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
rows = []
for setup in SETUPS:
    for optimizer, states in OPTIMIZERS.items():
        parts = bytes_per_parameter(setup, states)
        fits = largest_model(planner.H100.memory, setup, states) / 1e9
        rows.append((setup.name, optimizer, *parts.values(), sum(parts.values()), fits))
columns = {"bytes per parameter": "{}", "": "{}"} | dict.fromkeys([*parts, "total"], "{}")
report.table(columns | {"billions in 80 GB": "{:.1f}"}, rows)

# %%
HALF_NAME = str(HALF).removeprefix("torch.")
SCALER = None if HALF is torch.bfloat16 else LossScaler()


def half_step(model, images, labels, optimizer, device):
    """Your step in this machine's 16-bit format: float16 needs your scaler."""
    if SCALER:
        return fp16_step(model, images, labels, optimizer, SCALER, device, max_norm=math.inf)  # clips nothing
    return bf16_step(model, images, labels, optimizer, device)


# %% [markdown]
# In the last row, 16-bit weights with masters and AdamW take 16 bytes. **Mixed precision does not make the model
# smaller**: float32 takes 16 bytes as well, and autocast even adds its copies. How much smaller is the peak of a whole
# step, with 32 small images?

# %%
left = tp.predict("What is the peak memory of a step in 16 bits, as a % of that in float32?", ...)


# %%
images = torch.randn(SETTING.batch_size, 3, SETTING.image_size, SETTING.image_size)
labels = torch.randint(CLASSES, (SETTING.batch_size,))


def peak_of(step):
    """(peak memory of a step in bytes, number of parameters); a float32 step comes first, to make the momentum."""
    model = training_run.make_model(CLASSES)
    optimizer = training_run.make_optimizer(model.parameters())
    training_run.plain_step(model, images, labels, optimizer, DEVICE)
    optimizer.zero_grad()
    with measure.peak_memory(DEVICE, track=[model, optimizer]) as found:
        step(model, images, labels, optimizer, DEVICE)
    return found.peak, sum(p.numel() for p in model.parameters())


peaks = {name: peak_of(step) for name, step in {"float32": training_run.plain_step, HALF_NAME: half_step}.items()}
rows = [(name, peak, 8 * n) for name, (peak, n) in peaks.items()]
report.table({"step": "{}", "peak": measure.human_bytes, "of which weights and momentum": measure.human_bytes}, rows)
why = "Only activations become smaller; autocast adds its copies of the weights."
left.shows(100 * peaks[HALF_NAME][0] / peaks["float32"][0], "{:.0f} %", why)

# %% [markdown]
# With larger images and batches, activations dominate, and the peak comes closer to one half.
#
# ## Measured again
#
# Here is your step in 16 bits, on the images of the baseline. The right column is for a loss with weight $2^{-12}$.

# %% tags=["slide"]
in_half = activations_of(half_step)
no_range = sum(((g * SCALES[2]).bfloat16() == 0).sum() - (g == 0).sum() for g in gradients if g is not None)
rows = [
    ("float32", in_float32, 1.0, 0.0),
    (f"yours, {HALF_NAME}", in_half, in_half / in_float32, None),
    ("gradients in bfloat16", None, None, float(no_range) / sum(g.numel() for g in gradients)),
    ("gradients in float16", None, None, lost[2]),
    ("gradients in float16, scaled", None, None, lost[best]),
]
columns = {"": "{}", "activations": measure.human_bytes, "of float32": "{:.0%}", "gradients that become zero": "{:.2%}"}
report.table(columns, rows)

# %% [markdown]
# ## What about time? · further
#
# With AVX-512's extension for bfloat16, a core does up to twice the operations of float32; with AMX, sixteen times.
# Without AVX-512, PyTorch has no kernel for convolutions in bfloat16 and falls back to plain loops, about **ten times
# slower**. Autocast doesn't warn you.

# %%
step_gain = tp.predict("How many times as fast is a training step in 16 bits as one in float32, on this machine?", ...)


# %% jupyter={"source_hidden": true}
def operands(dtype, n=PRODUCT, images=8, channels=64, side=32):
    """Two matrices (n, n), and images with a kernel of 3 × 3, on the device."""
    a = torch.randn(n, n, device=DEVICE).to(dtype)
    x = torch.randn(images, channels, side, side, device=DEVICE).to(dtype)
    return a, x, torch.randn(channels, channels, 3, 3, device=DEVICE).to(dtype)


def rates(dtypes, n=PRODUCT, turns=20 if PAYS else 2):
    """{(what, dtype): FLOP/s}: the best of several turns, because others may use the machine too."""
    runs, flop = {}, {}
    for dtype in dtypes:
        a, x, kernel = operands(dtype, n)
        runs["product", dtype], flop["product", dtype] = (lambda a=a: a @ a), 2 * n**3
        work = 2 * kernel.numel() * x.numel() / x.shape[1]
        runs["convolution", dtype], flop["convolution", dtype] = (lambda x=x, k=kernel: F.conv2d(x, k, padding=1)), work
    found = measure.race(runs, repeats=turns, warmup=min(2, turns - 1), device=DEVICE)
    return {key: flop[key] / min(seconds) for key, seconds in found.seconds.items()}


RATES = rates([torch.float32, HALF])
columns = {"": "{}", "dtype": "{}", "GFLOP/s": "{:,.0f}"}
report.table(columns, [(what, str(d).removeprefix("torch."), rate / 1e9) for (what, d), rate in RATES.items()])

# %%
networks = [training_run.make_model(CLASSES) for _ in range(2)]
optimizers = [training_run.make_optimizer(network.parameters()) for network in networks]
candidates = {
    f"autocast to {HALF_NAME}": lambda: half_step(networks[0], images, labels, optimizers[0], DEVICE),
    "float32": lambda: training_run.plain_step(networks[1], images, labels, optimizers[1], DEVICE),
}
few = {"repeats": ROUNDS, "warmup": 1} if PAYS else {"repeats": 1, "warmup": 0}
step_race = measure.race(candidates, device=DEVICE, **few)
seconds = step_race.medians
why = "Only products and convolutions can gain; where the processor has no unit for 16 bits, they lose."
step_gain.shows(seconds["float32"] / seconds[f"autocast to {HALF_NAME}"], "× {:.2f}", why)
step_race

# %% [markdown]
# Now your scaler against PyTorch's, on the same gradients.


# %% jupyter={"source_hidden": true}
def scaler_step(scaler, network):
    """Unscale, step, update, on the gradients that `network` has: a learning rate of 0 changes no weight."""
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
# ## Beyond this machine · further
#
# Your byte counts tell you which batch fits on a card (an estimate: some activations stay in float32). The last cell
# compares your step with float32 on a **modelled** H100, which computes float32 convolutions in TF32.

# %%
from torchvision import models

CARDS = [planner.CARDS[name] for name in ("V100", "V100-32GB", "H100", "H200")]
rows = []
for architecture in (models.resnet18, models.resnet50):
    low, high = (
        measure.estimate_memory(architecture, (3, 224, 224), b, training_run.make_optimizer).peak for b in (16, 32)
    )
    image, n = (high - low) / 16, sum(p.numel() for p in architecture().parameters())
    for setup in SETUPS[:2]:
        fixed = n * sum(bytes_per_parameter(setup, 1).values())
        each = image * bytes_per_activation(setup) / 4
        rows.append((architecture.__name__, setup.name, *(int((card.memory - fixed) / each) for card in CARDS)))
report.table({"largest batch": "{}", "estimate": "{}"} | {card.name: "{:,}" for card in CARDS}, rows)

# %%
worth.table({"float32": training_run.plain_step, "your bf16_step": bf16_step}, keep=NAME)

# %% [markdown]
# ## The shared training run
#
# All works on one device share a training run. Here it runs in float32, then with your step. If 16 bits are slower on
# this machine, no row is added, and later works continue in float32.

# %%
if PAYS:
    before = training_run.run("float32", training_run.plain_step)
    after = training_run.run(f"autocast to {HALF_NAME}", half_step)
    gains.keep(NAME, f"autocast to {HALF_NAME}", before=before, after=after)
gains.table()

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Training in float16 skips every step, and the scale falls to zero. What is wrong?</summary>
#
# Not the scale. A gradient, or the loss itself, is NaN or infinite for another reason: a division by zero, a logarithm
# of zero, an activation above 65,504 in the forward pass. No scale can fix that. Look for the first module with an
# infinite output.
# </details>
#
# <details><summary>A colleague calls model.half() before training under autocast. What happens?</summary>
#
# Weights and gradients are now in float16. There are no float32 masters any more, so small updates are lost, and
# <code>GradScaler.unscale_</code> refuses float16 gradients. Autocast expects a model in float32.
# </details>
#
# <details><summary>Gradients add up over four micro-batches. When are unscale_, step and update called?</summary>
#
# Once, after the fourth. Gradients of one update must have the same scale, and it may change only between updates.
# </details>
#
# ## To remember
#
# Autocast to bfloat16 needs one `with` block and nothing else, because weights stay in float32. It saves the bytes of
# activations, not of the model. Whether it saves time depends on the hardware. Float16 has more digits and less range:
# it needs a scaler, and gradients that are unscaled before anything uses them. Sums, losses and updates need float32:
# an addition below half a unit in the last place does nothing.
