# %% [markdown] tags=["slide"]
# # GPU acceleration: from a plain loop to a device · about 95 min, core 50
#
# A plain training loop leaves most of a GPU unused. You rewrite it so that the device never waits, and find the batch
# size for your card **by calculation**.
#
# **What you will gain.** In each step the plain loop reads **values**, which makes the processor wait for its GPU, and
# it spends **milliseconds on loading**. You measure both here, remove the first and hide the second.
#
# Why a GPU at all? Training a ResNet-50 on one image of 224 × 224 pixels costs about 25 GFLOP. Guess how many images
# this processor manages in a second.

# %% tags=["setup"] jupyter={"source_hidden": true}
import math
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision.transforms import v2

from dlojz_tp import course, data, gains, measure, planner, report, scale, todo, training_run, worth
from dlojz_tp.measure.operations import Operations, syncs

tp = course.open("01_gpu_acceleration")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ARCHITECTURE = models.resnet50 if FULL else models.resnet18
SIZE = 224 if FULL else 64  # pixels of a side
BATCH = 128 if FULL else 32
EPOCHS = 5 if FULL else 2
WORKERS = 8 if FULL else 2  # processes that decode images
RACED = BATCH if FULL else 2  # images of a batch in the race, where a turn is 20 steps
SWEEP = [64, 1024, 16, 256, 32, 512, 128] if FULL else [8, 128, 16, 64, 32]
CARD = None if FULL else 256 * 2**20  # bytes of the simulated card, if there is no real one
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels, for pixels in [0, 1]

# %%
expected = tp.predict("How many images/s does this processor manage when it trains a ResNet-50 at 224 pixels?", ...)

# %% jupyter={"source_hidden": true}
FLOP_PER_IMAGE = 3 * planner.RESNET50_FORWARD_FLOP  # ResNet-50 at 224 pixels: backward costs twice the forward pass
network, images = models.resnet50(), torch.randn(2, 3, 224, 224)
for _ in range(2):  # the first run warms up: only the second counts
    start = time.perf_counter()
    network(images).sum().backward()
    here = len(images) / (time.perf_counter() - start)
rows = [("this processor, measured", here)]
rows += [(f"{card.name}, published", card.resnet50_float32) for card in (planner.V100, planner.A100)]
heads = {"trains ResNet-50": "{}", "images/s": "{:,.1f}", "TFLOP/s": "{:.2f}"}
report.table(heads, [(name, speed, speed * FLOP_PER_IMAGE / 1e12) for name, speed in rows])
del network, images
why = "Each image takes 25 billion operations, and a core does a few tens of billions per second."
expected.shows(here, "{:.1f} images/s", why)

# %% [markdown]
# The published figures come from NVIDIA's own float32 training scripts, run on one GPU.

# %% [markdown] tags=["slide"]
# ## The idea
#
# A step loads a batch, copies it to the device and computes. In a plain loop, each part waits for the one before:
#
# $$t_\text{step} = t_\text{loading} + t_\text{copy} + t_\text{compute}
# \qquad\text{becomes}\qquad
# t_\text{step} \approx \max(t_\text{loading},\ t_\text{copy},\ t_\text{compute})$$
#
# if workers load ahead, copies don't block, and **nothing in the step makes the processor wait for the device**.

# %% jupyter={"source_hidden": true}
images_shape = (3, SIZE, SIZE)
dataset = data.image_set()
CLASSES = len(dataset.classes)


def make_model():
    torch.manual_seed(0)
    return ARCHITECTURE(num_classes=CLASSES)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def random_batches(n, batch_size):
    batch = torch.randn(batch_size, *images_shape), torch.randint(CLASSES, (batch_size,))
    return [batch] * n


def waits(step):
    """How often one step makes the processor wait for a value from the device."""
    model = make_model().to(DEVICE)
    batch, optimizer = random_batches(1, 2)[0], make_optimizer(model.parameters())
    with Operations() as operations:
        step(model, *batch, optimizer, DEVICE)
    return len(syncs(operations))


def compared(loops):
    """Show a row for each loop: {name: (waits in a step, record of a training run)}."""
    heads = {"": "{}", "values read in a step": "{}", "loading": measure.human_seconds, "step": measure.human_seconds}
    rows = []
    for name, (read, record) in loops.items():
        steps = measure.counted_steps(record)
        rows.append((name, read, *(statistics.median(step[phase] for step in steps) for phase in ("loading", "step"))))
    report.table(heads, rows)


# %% [markdown]
# ## The baseline, measured first
#
# This loop decodes photographs itself, then trains on them. What would you change?


# %%
def plain_step(model, images, labels, optimizer, device):
    model = model.to(device)
    images, labels = images.to(device), labels.to(device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    correct = (logits.argmax(dim=1) == labels).sum().item()
    return loss.item(), correct


before = training_run.run("plain loop", plain_step, loader=training_run.make_loader(num_workers=0))
loops = {"plain loop": (waits(plain_step), before)}
compared(loops)

# %% [markdown]
# ## The input pipeline
#
# ### Balise 1 · Turn a JPEG file into a tensor · further · about 16 min
#
# Return a function that takes the path of a JPEG file and returns a float32 tensor of shape `(3, size, size)`,
# normalised with `MEAN` and `STD`.
#
# - `train=True`: a window of random position, area and aspect ratio (`RandomResizedCrop`: from a small part of the
#   photograph to nearly all of it, between 3:4 and 4:3), mirrored left to right half of the time.
# - `train=False`: nothing random. Resize the shorter side to `size`, or to a little more, then cut out the centre,
#   undistorted.
#
# Photographs may be grey, tall or wide, or smaller than `size`. About 12 lines.
#
# <details><summary>Hint</summary>
#
# `Image.open(path).convert("RGB")` decodes. `torchvision.transforms.v2` has `RandomResizedCrop`,
# `RandomHorizontalFlip`, `Resize`, `CenterCrop`, `ToImage`, `ToDtype(torch.float32, scale=True)`, `Normalize` and
# `Compose`. Scale pixels to [0, 1] before you normalise them.
# </details>


# %% tags=["balise-1"]
def make_transform(size, train):
    """Return a function: path of a JPEG file -> float32 tensor (3, size, size), normalised."""
    # BEGIN SOLUTION
    if train:
        cut = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    else:
        cut = [v2.Resize(size), v2.CenterCrop(size)]
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    transform = v2.Compose(cut + finish)

    def load(path):
        with Image.open(path) as image:
            return transform(image.convert("RGB"))

    return load
    # END SOLUTION


# %%
tp.check(1, make_transform)


# %% jupyter={"source_hidden": true}
def windows(path):
    train, val = make_transform(SIZE, train=True), make_transform(SIZE, train=False)
    return [train(path) for _ in range(4)] + [val(path)]


def show_windows(path, label, images, row):
    row[0].imshow(Image.open(path))
    row[0].set_ylabel(dataset.classes[label])
    for axes, image in zip(row[1:], images):
        pixels = image * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        axes.imshow(pixels.clamp(0, 1).permute(1, 2, 0))
    for axes in row:
        axes.set(xticks=[], yticks=[])


shown = [(path, label, windows(path)) for path, label in (dataset.train[3], dataset.train[len(dataset.train) // 2])]
figure, rows = plt.subplots(2, 6, figsize=(8.5, 2.9), layout="constrained")
for row, photograph in zip(rows, shown):
    show_windows(*photograph, row)
for axes, title in zip(rows[0], ["file", "train", "train", "train", "train", "validation"]):
    axes.set_title(title, fontsize=9)
plt.show()

# %% [markdown]
# The loaders' workers decode while the network computes, and pinned memory lets the copy to a GPU run in the
# background.


# %% jupyter={"source_hidden": true}
class Photos(Dataset):
    """Items (image, label) from a list of (path, label)."""

    def __init__(self, items, transform):
        self.items, self.transform = items, transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        return self.transform(path), label


def make_loader(items, train, batch_size=BATCH):
    return DataLoader(
        Photos(items, make_transform(SIZE, train)), batch_size, shuffle=train, drop_last=train,
        num_workers=WORKERS, pin_memory=DEVICE.type == "cuda", persistent_workers=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


train_loader, val_loader = make_loader(dataset.train, True), make_loader(dataset.val, False)
print(f"{len(dataset.train)} training and {len(dataset.val)} validation images, {CLASSES} classes")

# %% [markdown]
# ## The step
#
# Processor and GPU are two machines with a *queue* between them. Python puts operations into the queue and runs ahead.
# But a value that you read, for example with `.item()`, arrives only when the queue is empty, and then the GPU has
# nothing to do. This is a drawing, not a measurement:


# %% tags=["slide"] jupyter={"source_hidden": true}
def draw_queue(axes, title, wait, steps=3, operations=4, start=0.6, run=1.0):
    """CPU and GPU against time: an operation takes `start` to queue, `run` to run; `wait`: a step ends with a read."""
    cpu = gpu = 0.0
    for step in range(steps):
        colour = ("#0072B2", "#56B4E9")[step % 2]
        for _ in range(operations):
            axes.barh(1, start, left=cpu, color=colour, ec="white")
            cpu += start
            if cpu > gpu:  # nothing in the queue
                axes.barh(0, cpu - gpu, left=gpu, color="white", ec="#D55E00", hatch="////", lw=0)
                gpu = cpu
            axes.barh(0, run, left=gpu, color=colour, ec="white")
            gpu += run
        if wait:
            axes.barh(1, gpu - cpu, left=cpu, color="white", ec="#D55E00", hatch="////", lw=0)
            axes.text((cpu + gpu) / 2, 1, ".item()", ha="center", va="center", fontsize=9, backgroundcolor="white")
            cpu = gpu
    axes.set(yticks=[0, 1], yticklabels=["GPU runs", "CPU queues"], xlim=(0, 14), xticks=[], ylim=(-0.6, 1.6))
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


figure, rows = plt.subplots(2, 1, figsize=(8.5, 2.8), layout="constrained", sharex=True)
draw_queue(rows[0], "A value is read at the end of each step: both wait (hatched)", wait=True)
draw_queue(rows[1], "Nothing is read: the CPU runs ahead, and the GPU waits once", wait=False)
rows[1].set_xlabel("time →")
plt.show()

# %% [markdown]
# ### Balise 2 · A training step that never waits · about 13 min
#
# `model` is on `device`; `images` `(b, 3, h, w)` and `labels` `(b,)` are not. Do one step: copy both without blocking,
# run the model once, compute the mean cross-entropy, run backward, update with `optimizer`.
#
# Return `(loss, logits)`: two tensors on the device, without their graph. Read no value, and don't change the model's
# mode. About 8 lines.
#
# <details><summary>Hint</summary>
#
# `tensor.to(device, non_blocking=True)` copies. Gradients add up until `optimizer.zero_grad()`. `.item()`,
# `print(tensor)` and `if tensor > 0` make the processor wait until the GPU has emptied the queue.
# `tensor.detach()` drops the graph.
# </details>


# %% tags=["balise-2", "slide-mistake=hidden-sync"]
def train_step(model, images, labels, optimizer, device):
    """One step of training. images (b, 3, h, w), labels (b,). Returns loss () and logits (b, classes), detached."""
    # BEGIN SOLUTION
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()
    # END SOLUTION


# %%
tp.check(2, train_step)

# %% [markdown]
# ### Balise 3 · Metrics without a synchronisation · about 13 min
#
# Keep the mean loss and the accuracy over many batches, on the device. Nothing waits in `update`: only `result`, which
# you call once an epoch, reads values. About 10 lines.
#
# **Write all of it:** `tp.open_task(3)` gives you only names and docstrings. Count exactly over thousands of batches,
# without a wait and without keeping any of them.
#
# <details><summary>Hint</summary>
#
# Three running sums: loss × images, right answers, images. The first two are tensors on the device, made with
# `device=device`, in float32 or wider: in bfloat16, 256 + 1 is 256. Python knows the number of images, `len(labels)`.
# </details>


# %% tags=["balise-3"]
class RunningMetrics:
    """Mean loss and accuracy over all images seen by this object, kept as a few sums on `device` (torch.device)."""

    def __init__(self, device):
        # BEGIN SOLUTION
        self.loss_sum = torch.zeros((), device=device, dtype=torch.float32)
        self.correct = torch.zeros((), device=device, dtype=torch.int64)
        self.images = 0
        # END SOLUTION

    def update(self, loss, logits, labels):
        """Add a batch: its mean loss (), logits (b, classes), labels (b,), all on the device.

        Batches differ in size. loss and logits may be in bfloat16, which can't count beyond 256: use wider sums.
        Read no value, and copy none from or to the device. Leave the arguments unchanged, and keep neither the graph
        nor the batch.
        """
        # BEGIN SOLUTION
        self.loss_sum += loss.detach().float() * len(labels)
        self.correct += (logits.argmax(dim=1) == labels).sum()
        self.images += len(labels)
        # END SOLUTION

    def result(self):
        """Return (mean loss, accuracy) over all images, two Python floats: the only place that waits for the device.

        accuracy: the fraction of images whose largest logit is that of their label. Read only a few values, however
        many batches there were. More calls of update and result may follow.
        """
        # BEGIN SOLUTION
        return self.loss_sum.item() / self.images, self.correct.item() / self.images
        # END SOLUTION


# %%
tp.check(3, RunningMetrics)

# %% [markdown]
# ### Balise 4 · Validation · further · about 16 min
#
# `model` is on `device`, the batches of `loader` are not. Go through `loader` once, call the network once a batch, and
# return `(loss, accuracy)` over all images, two floats.
#
# Meanwhile, the network must be in eval mode and record no gradients. Afterwards, put it back into the mode it was in.
# Don't read a value for each batch. About 10 lines.
#
# <details><summary>Hint</summary>
#
# `model.training` tells you the mode. `torch.inference_mode()` is a context manager and a decorator. `RunningMetrics`
# does the counting.
# </details>


# %% tags=["balise-4"]
def evaluate(model, loader, device):
    """Mean loss and accuracy of `model` over all images of `loader`: two floats."""
    # BEGIN SOLUTION
    was_training = model.training
    model.eval()
    metrics = RunningMetrics(device)
    with torch.inference_mode():
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            logits = model(images)
            metrics.update(F.cross_entropy(logits, labels), logits, labels)
    model.train(was_training)
    return metrics.result()
    # END SOLUTION


# %%
tp.check(4, evaluate)

# %% [markdown]
# ## The whole loop
#
# Here are your pieces in one loop. It reads no value before the end of an epoch.


# %%
def fit(model, epochs):
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, epochs * len(train_loader))
    chrono, curves = measure.Chronometer(DEVICE, warmup=3), {"train": [], "validation": []}
    losses = []
    for _ in range(epochs):
        metrics = RunningMetrics(DEVICE)
        for images, labels in chrono.steps(train_loader):
            with chrono.step():  # forward, backward and update: one function here
                loss, logits = train_step(model, images, labels, optimizer, DEVICE)
                metrics.update(loss, logits, labels.to(DEVICE, non_blocking=True))
            schedule.step()
            losses.append(loss)
        curves["train"].append(metrics.result()[1])
        curves["validation"].append(evaluate(model, val_loader, DEVICE)[1])
    settings = {"batch_size": BATCH, "image_size": SIZE, "model": ARCHITECTURE.__name__}
    estimate = measure.estimate_memory(make_model, images_shape, BATCH, make_optimizer)
    return chrono.record("your loop", memory=None if FULL else estimate, losses=torch.stack(losses), **settings), curves


model = make_model().to(DEVICE)
record, curves = fit(model, EPOCHS)
for epoch, (train, val) in enumerate(zip(curves["train"], curves["validation"]), 1):
    print(f"epoch {epoch}: accuracy {train:.2f} on training windows, {val:.2f} on validation images")

# %% jupyter={"source_hidden": true}
report.learning(curves, classes=CLASSES)

# %% jupyter={"source_hidden": true}
report.inspection(record)

# %% [markdown]
# If *loading* is large here, the device waits for the loader, and a faster device gains nothing. Without a GPU, the
# workers share the cores with the network and make its steps longer.
#
# ## How large a batch?
#
# Larger batches keep more of a device busy, until its memory is full. Memory is a linear function of the batch size
# $b$:
#
# $$M(b) = \underbrace{M_\text{model}}_{\text{weights, gradients, optimizer}} + \;b\; \underbrace{m_\text{image}}_{\text{activations}}$$
#
# `run(batch_size)` trains a few steps and returns a record, or raises `torch.OutOfMemoryError`. Without a GPU it uses a
# **simulated card**, which counts the bytes of all tensors in use.


# %%
def run(batch_size, steps=3):
    card = measure.MemoryBudget(CARD) if CARD else measure.peak_memory(DEVICE)
    chrono = measure.Chronometer(DEVICE, warmup=1)
    with card as peak:
        model = make_model().to(DEVICE)
        optimizer = make_optimizer(model.parameters())
        for images, labels in chrono.steps(random_batches(steps, batch_size)):
            with chrono.step():
                train_step(model, images, labels, optimizer, DEVICE)
    return chrono.record(f"batch {batch_size}", memory=peak or card, batch_size=batch_size)


# %% [markdown]
# ### Balise 5 · A sweep that survives a full memory · about 15 min
#
# Call `run(b)` once for each `b` in `batch_sizes`, which are in no particular order. Return a dictionary `{b: record}`,
# with `None` for a size that ran out of memory.
#
# A failed size must leave nothing in memory, or the next one fails too. First let its tensors be freed. Then call
# `torch.cuda.empty_cache()`, because PyTorch keeps freed blocks. Do this after every failure, even the last. Let any
# other error through. About 10 lines.
#
# <details><summary>Hint</summary>
#
# An exception holds its traceback, the traceback holds the frames of `run`, and these hold the tensors. They are freed
# after the `except` block, not inside it. Don't keep the exception.
# </details>


# %% tags=["balise-5"]
def sweep(run, batch_sizes):
    """Return {batch size: record of run(batch size), or None where it ran out of memory}."""
    # BEGIN SOLUTION
    records = {}
    for batch_size in batch_sizes:
        try:
            records[batch_size] = run(batch_size)
        except torch.OutOfMemoryError:
            records[batch_size] = None
        if records[batch_size] is None:  # after the block: now the exception, and what it held, is gone
            torch.cuda.empty_cache()
    return records
    # END SOLUTION


# %%
tp.check(5, sweep)

# %%
larger = tp.predict("By what factor does the largest batch that fits beat the smallest one in images/s?", ...)

# %%
records = sweep(run, SWEEP)
found = sorted(records.items())
report.table({"batch": "{}", "images/s": "{:,.0f}"}, [(b, each and each.images_per_second) for b, each in found])
fitted = [each.images_per_second for _, each in found if each]
larger.shows(
    fitted[-1] / fitted[0],
    "× {:.2f}",
    "More images keep idle units busy, and they share the fixed cost of a step, such as the update of all weights.",
)

# %% [markdown]
# A dash means out of memory.
#
# ### Balise 6 · Memory as a straight line · further · about 11 min
#
# `peaks` is a dictionary `{batch size: peak memory in bytes, or None where it ran out}`, in no particular order;
# `capacity` is the card's memory in bytes. Fit $M(b)$ by least squares to all sizes that did not run out.
#
# Return `(model_bytes, bytes_per_image, largest_batch)`. The last is an `int`: the largest batch that fits into
# `capacity` according to this line, or 0 if the model alone doesn't fit. Leave `peaks` unchanged. About 7 lines.
#
# <details><summary>Hint</summary>
#
# `numpy.polyfit(x, y, 1)` and `numpy.polynomial.Polynomial.fit` fit lines, but differ in the order of what they return.
# `statistics.linear_regression` is in Python itself.
# </details>


# %% tags=["balise-6"]
def memory_model(peaks, capacity):
    """From {batch size: peak bytes or None} and a capacity in bytes: (model_bytes, bytes_per_image, largest_batch)."""
    # BEGIN SOLUTION
    from statistics import linear_regression

    fitted = {b: peak for b, peak in peaks.items() if peak is not None}
    bytes_per_image, model_bytes = linear_regression(list(fitted), list(fitted.values()))
    largest_batch = max(0, math.floor((capacity - model_bytes) / bytes_per_image))
    return model_bytes, bytes_per_image, largest_batch
    # END SOLUTION


# %%
tp.check(6, memory_model)

# %% jupyter={"source_hidden": true}
capacity = CARD or torch.cuda.get_device_properties(DEVICE).total_memory
peaks = {b: found.peak_memory_bytes[0] if found else None for b, found in records.items()}
model_bytes, bytes_per_image, largest = memory_model(peaks, capacity)
print(f"model: {measure.human_bytes(model_bytes)}, each image: {measure.human_bytes(bytes_per_image)}")
print(f"on a card of {measure.human_bytes(capacity)} the largest batch should be {largest}")

# %% tags=["slide"] jupyter={"source_hidden": true}
shown = [
    found or measure.new_record(f"batch {b}", DEVICE, out_of_memory=True, batch_size=b)
    for b, found in sorted(records.items())
]
report.sweep(shown, capacity_bytes=capacity, fit=(model_bytes, bytes_per_image))

# %% [markdown]
# Does a batch a little below the predicted one fit, and does one a little above it fail?

# %%
below, above = math.floor(largest * 0.97), math.ceil(largest * 1.06)
tried = sweep(lambda batch_size: run(batch_size, steps=2), [below, above])
for batch_size, found in tried.items():
    print(f"predicted largest {largest}: batch {batch_size} {'fits' if found else 'runs out of memory'}")

# %% [markdown]
# **Which batch size, then?** Take the smallest one at which throughput levels off: a larger one needs more memory,
# makes fewer updates an epoch, and is no faster.
#
# ## Race
#
# Your step and the plain one take turns, on the same network and random batch. The race itself waits for the device
# only once every 20 steps.

# %%
step_gain = tp.predict("How many times faster than the plain loop is your step, on this machine?", ...)

# %% tags=["slide"] jupyter={"source_hidden": true}
batch = random_batches(1, RACED)[0]
batch = [tensor.pin_memory() for tensor in batch] if DEVICE.type == "cuda" else batch
networks = [make_model().to(DEVICE) for _ in range(2)]
optimizers = [make_optimizer(network.parameters()) for network in networks]
race = measure.race(
    {
        "your step": lambda: train_step(networks[0], *batch, optimizers[0], DEVICE),
        "plain loop": lambda: plain_step(networks[1], *batch, optimizers[1], DEVICE),
    },
    repeats=10 if FULL else 3,
    warmup=1,
    calls=20,
    device=DEVICE,
)
why = "Without a GPU there is no queue, so a read costs almost nothing. A GPU gains back the time in which it was idle."
step_gain.shows(1 / race.ratio, "× {:.2f}", why)
race

# %% [markdown]
# On a GPU, the waits that you removed were idle time. Here are the same two steps on a **modelled** H100:

# %%
worth.table({"plain loop": plain_step, "your step": train_step}, batches=(16, 128), keep="01_gpu_acceleration")

# %% [markdown]
# A wait costs most where a step is short. With 128 images the queue is hardly ever empty.
#
# ## Measured again
#
# Here is the training run of the baseline, with your step and with workers that load ahead:

# %%
after = training_run.run("your loop", train_step)
loops["your loop"] = waits(train_step), after
compared(loops)
gains.keep("01_gpu_acceleration", "no wait, loading ahead", before, after)
gains.table()

# %% [markdown]
# *Loading* is how long a step waits for its batch (median). Without a GPU, workers and network share the cores, so
# *step* may grow.
#
# ## Beyond this machine · further
#
# With **your** `memory_model` you can compute the largest batch for cards that aren't here:

# %% jupyter={"source_hidden": true}
CARDS = [planner.CARDS[name] for name in ("V100", "V100-32GB", "H100", "H200")]
rows = []
for architecture in (models.resnet18, models.resnet50, models.resnet152):
    estimated = {b: measure.estimate_memory(architecture, (3, 224, 224), b, make_optimizer).peak for b in (32, 64)}
    rows.append((architecture.__name__, *(memory_model(estimated, card.memory)[2] for card in CARDS)))
print("largest batch at 224 pixels, float32 (estimate)")
report.table({"": "{}"} | {card.name: "{:,}" for card in CARDS}, rows)

# %% [markdown]
# A real card also holds the CUDA context and scratch memory, up to a gigabyte.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Your profile shows 80 % loading. You double the batch size. What happens to the images per second?</summary>
#
# Almost nothing. A batch of twice the size takes twice as long to load, and the device waits as before. More workers,
# faster decoding or smaller files would help.
# </details>
#
# <details><summary>A loss is appended to a list in every step, and after an hour the memory is full. Why?</summary>
#
# A loss that still has its graph holds the activations of its step. Append <code>loss.detach()</code>, or a running
# sum.
# </details>
#
# <details><summary>ResNet-50 has 100 MB of weights. Why does a batch of 256 need twenty gigabytes?</summary>
#
# Because of activations: backward needs the output of nearly every layer, for each image. The weights, their gradients
# and the momentum are the small, fixed part.
# </details>
#
# ## To remember
#
# A device is fast when it never waits: load ahead, copy without blocking, read values once an epoch. Memory is a
# straight line in the batch size, and two measured numbers give you the largest batch before you try it. Next: **mixed
# precision**, which makes the step shorter and the line less steep.
