# %% [markdown] tags=["slide"]
# # The profiler: find out before you change · about 110 min, core 55
#
# A training loop is slow, and everybody has an opinion on why. A profiler has measurements. You'll record a training
# loop, read from the trace where time and memory go, and find every place where the processor waits for the device.
# Then you'll fix three slow loops.
#
# **What you will gain.** A training step with about a third of the *operators* and without a single *wait*. That means
# more images a second, on this machine too. First, here is the run as a colleague left it.

# %% tags=["setup"] jupyter={"source_hidden": true}
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages; read when torch is imported

import copy
import functools
import json
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from dlojz_tp import course, data, gains, measure, precision, recorded, report, scale, todo, training_run, worth
from dlojz_tp.measure.trace import generated

NAME = "04_profiler"
tp = course.open(NAME)
FULL = scale() == "full"
DEVICE = training_run.device()
CLASSES = len(data.image_set().classes)
BATCH = training_run.setting().batch_size
SIZE = training_run.setting().image_size  # pixels of a side
ACTIVE = 6 if FULL else 3  # steps that the profiler records
MAX_NORM = 5.0  # gradients with a larger norm are clipped
HALF = precision.fast_dtype(DEVICE) == torch.bfloat16  # is bfloat16 faster here? (float16 would need loss scaling)
kept = tempfile.TemporaryDirectory(prefix="profiles-")  # private: a trace holds paths, names of functions and shapes
FOLDER = Path(kept.name)
tp


# %% tags=["setup"] jupyter={"source_hidden": true}
class Network(nn.Module):
    """The training run's network in channels_last, its forward pass in bfloat16 if that pays: images -> float32 logits."""

    def __init__(self):
        super().__init__()
        self.network = training_run.make_model(CLASSES).to(memory_format=torch.channels_last)

    def forward(self, images):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=HALF):
            logits = self.network(images.contiguous(memory_format=torch.channels_last))
        return logits.float()


# %% tags=["setup"] jupyter={"source_hidden": true}
def slow_a(images, contrast):
    """Scale each channel of image i about its mean by contrast[i], then limit to ±3. (b, c, h, w)."""
    changed = []
    for image, factor in zip(images, contrast):
        planes = []
        for plane in image:
            mean = plane.mean()
            planes.append(((plane - mean) * factor + mean).clamp(-3, 3))
        changed.append(torch.stack(planes))
    return torch.stack(changed)


# %% tags=["setup"]
def hesitant_step(model, images, labels, optimizer, device):
    """One step; images with label -1 do not count. Returns loss, right answers, gradient norm: numbers."""
    images, labels = images.to(device), labels.to(device)
    shift = 0.4 * torch.rand(len(images)).to(device) - 0.2
    logits = model(images + shift[:, None, None, None])
    known = labels >= 0
    loss = F.cross_entropy(logits[known], labels[known])
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    if norm > MAX_NORM:
        for g in gradients:
            g *= MAX_NORM / norm
    optimizer.step()
    correct = (logits[known].argmax(dim=1) == labels[known]).sum()
    return loss.item(), correct.item(), norm.item()


def newcomer_step(model, images, labels, optimizer, device):
    """The run as found: contrast, then the step, with last week's search for a NaN still on."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        contrast = (0.8 + 0.4 * torch.rand(len(images))).to(device)
        return hesitant_step(model, slow_a(images.to(device), contrast), labels, optimizer, device)


# %% tags=["setup"] jupyter={"source_hidden": true}
def a_batch():
    """Random images (BATCH, 3, SIZE, SIZE) and labels (BATCH,), on the processor, as from a loader."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=drawn)
    return images, torch.randint(CLASSES, (BATCH,), generator=drawn)


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def second_step(step, mode):
    """Run two steps, the second inside mode; returns mode."""
    model = Network()
    optimizer = training_run.make_optimizer(model.parameters())
    step(model, *a_batch(), optimizer, DEVICE)
    with mode:
        step(model, *a_batch(), optimizer, DEVICE)
    return mode


# %%
before = training_run.run("as found", newcomer_step, model=Network())
print(f"operators in a step as found: {second_step(newcomer_step, Operators()).calls:,}")
print(f"on {DEVICE}: {before.images_per_second:,.1f} images/s")
print(gains.expected(NAME))

# %% [markdown]
# This is the training run of the previous works plus what your colleague has added: each image gets its own contrast
# and brightness, large gradients are clipped, each step returns three numbers, and last week's search for a NaN is
# still on. The cell with the contrast, `slow_a`, is collapsed. Leave it closed: later you'll find out from a profile
# alone why it's slow.

# %% [markdown] tags=["slide"]
# ## The idea
#
# With a GPU, the processor doesn't do the computing. It runs your Python code and *queues* kernels, and the device
# works through the queue, on several streams in parallel. The device is busy while at least one kernel or copy runs:
#
# $$\text{busy} = \frac{1}{T}\;\Bigl|\,\bigcup_i\,[\,b_i,\ e_i\,]\,\Bigr|$$
#
# where $b_i$ and $e_i$ are the start and end of kernel or copy $i$, and $T$ is the length of the recorded steps. These
# two traces are **generated, not recorded**:

# %% tags=["setup"] jupyter={"source_hidden": true}
COLOURS = {"loading": "#E69F00", "forward": "#0072B2", "backward": "#009E73", "optimizer": "#D55E00",
           "wait": "#E3C3D5", "kernel": "#4D5566", "gpu_memcpy": "#56B4E9", "gpu_memset": "#999999"}  # fmt: skip


def lanes(trace):
    """Events to draw, by lane: {"processor" or "stream N": [(begin, length, colour)]}, microseconds."""
    found, waits = {"processor": []}, []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, cat = event["name"], event.get("cat")
        span = event["ts"], event["dur"]
        if cat == "user_annotation" and name in COLOURS:
            found["processor"].append((*span, COLOURS[name]))
        elif cat in ("kernel", "gpu_memcpy", "gpu_memset"):
            lane = event["args"].get("lane") or f"stream {event['args']['stream']}"
            found.setdefault(lane, []).append((*span, COLOURS[cat]))
        elif cat == "cuda_runtime" and event["dur"] > 20:  # a call that takes longer has waited
            waits.append((*span, COLOURS["wait"]))
    found["processor"] += waits
    return dict(sorted(found.items(), key=lambda lane: (lane[0] != "processor", len(lane[0]), lane[0])))


# %% tags=["setup"] jupyter={"source_hidden": true}
def draw(axes, trace, title, gaps=()):
    """Draw a trace, one lane a row; gaps: (begin, end) that are shaded."""
    rows = lanes(trace)
    start = min(begin for spans in rows.values() for begin, *_ in spans)
    for row, spans in enumerate(rows.values()):
        axes.broken_barh([((begin - start) / 1000, length / 1000) for begin, length, _ in spans],
                         (row - 0.4, 0.8), facecolors=[colour for *_, colour in spans])  # fmt: skip
    for begin, end in gaps:
        axes.axvspan((begin - start) / 1000, (end - start) / 1000, color="#D55E00", alpha=0.18, lw=0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure, *names):
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    words = {"gpu_memcpy": "copy", "wait": "processor waits"}
    figure.legend(patches, [words.get(name, name) for name in names], ncols=len(names), loc="outside lower center",
                  frameon=False, fontsize=8)  # fmt: skip


# %% tags=["slide"] jupyter={"source_hidden": true}
pictures = {"hesitant: waits for each batch and each copy, reads a value in each step (generated)": "hesitant",
            "flowing: without these waits (generated)": "flowing"}  # fmt: skip
figure, panels = plt.subplots(2, 1, figsize=(9, 4.2), layout="constrained", sharex=True)
for axes, (title, kind) in zip(panels, pictures.items()):
    draw(axes, generated(kind, steps=4), title)
panels[1].set_xlabel("time (ms)")
legend(figure, "loading", "forward", "backward", "optimizer", "wait", "kernel", "gpu_memcpy")
plt.show()

# %% [markdown]
# White gaps in a stream's row are time you paid for and didn't use. The processor waits in both pictures: in the upper
# one for a value, while the queue is empty; in the lower one because the queue is full.
#
# ## A profiled loop
#
# ### Balise 1 · A profiled loop · about 17 min
#
# A profile of a whole training run doesn't fit into memory. Train through `loader`, but record only `active` steps:
#
# ```
# step       0      1         2 … 1 + active         all that follow
#            wait   warm up   recorded               nothing, however long the loader is
# labels                      loading | forward | backward | optimizer
# ```
#
# - **A schedule** says which steps are recorded. One step warms up, because the profiler's own start costs time. The
#   profiler can't see where your steps end: call its `step()` at the end of each.
# - **Labels**: everything inside `with record_function("loading"):` has this name in the trace. Write the other three;
#   `"optimizer"` covers the update *and* clearing the gradients.
#
# About 9 lines.
#
# <details><summary>Hint</summary>
#
# `schedule(wait=…, warmup=…, active=…, repeat=…)` makes a schedule. Without `repeat=1`, waiting, warming up and
# recording start again, and the trace is overwritten.
# </details>


# %% tags=["balise-1"]
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    """Train through `loader` of (images, labels); record `active` steps into `folder`. Returns the profiler.

    forward(model, images, labels) gives the loss. Steps: one is skipped, one warms up, `active` are recorded, once.
    Labels: "loading", "forward", "backward", and "optimizer", which clears the gradients too.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    batches = iter(loader)
    # BEGIN SOLUTION
    when = schedule(wait=1, warmup=1, active=active, repeat=1)
    # END SOLUTION
    with profile(
        schedule=when,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / "trace.json")),
        profile_memory=True,
    ) as profiler:
        while True:
            with record_function("loading"):
                batch = next(batches, None)
            if batch is None:
                return profiler
            # BEGIN SOLUTION
            with record_function("forward"):
                loss = forward(model, *batch)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
            # END SOLUTION


# %%
tp.check(1, profiled_loop)

# %% [markdown]
# Record the run as found. (A warning about memory that was allocated before is harmless.)


# %% tags=["setup"] jupyter={"source_hidden": true}
def newcomer_loss(model, images, labels):
    """The loss of the run as found."""
    images, labels = images.to(DEVICE), labels.to(DEVICE)
    contrast = (0.8 + 0.4 * torch.rand(len(images))).to(DEVICE)
    return F.cross_entropy(model(slow_a(images, contrast)), labels)


# %%
model = Network().train()
optimizer = training_run.make_optimizer(model.parameters())
drawn = torch.randint(len(data.image_set().train), ((ACTIVE + 3) * BATCH,)).tolist()  # a few batches are enough
loader = training_run.make_loader(sampler=drawn, shuffle=False)
profiler = profiled_loop(model, loader, optimizer, newcomer_loss, FOLDER / "as found", active=ACTIVE)
trace_file = next((FOLDER / "as found").glob("*.json"))
print(f"{trace_file.name}: {measure.human_bytes(trace_file.stat().st_size)}")

# %% jupyter={"source_hidden": true}
trace = json.loads(trace_file.read_text())
spans = {name: [e["dur"] / 1000 for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["name"] == name]
         for name in ("loading", "forward", "backward", "optimizer")}  # fmt: skip
figure, axes = plt.subplots(figsize=(9, 1.9), layout="constrained")
for step in range(len(spans["forward"])):
    left = 0.0
    for name, times in spans.items():
        axes.barh(step, times[step], left=left, color=COLOURS[name], label=name if step == 0 else None)
        left += times[step]
axes.set_yticks(range(len(spans["forward"])), [f"step {k + 2}" for k in range(len(spans["forward"]))])
axes.set(xlabel="processor's time (ms), with the profiler on", title="Your labels, step by step")
axes.invert_yaxis()
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# Open the trace file at `ui.perfetto.dev` to see every event; it stays in your browser. On a GPU these times are the
# *processor's*: a long label may only mean that it waited there.
#
# The trace also records each allocation and release of memory.

# %%
peak = tp.predict(
    "Under which label does the allocated memory peak?", ..., choices=("loading", "forward", "backward", "optimizer")
)


# %% jupyter={"source_hidden": true}
def memory_over_time(trace, kind):
    """(ms, MiB) at each allocation and release on the processor (kind 0) or a GPU (1), minus the first."""
    noted = [e for e in trace["traceEvents"] if e["name"] == "[memory]" and e["args"]["Device Type"] == kind]
    noted.sort(key=lambda event: event["ts"])
    first = noted[0]["args"]["Total Allocated"] - noted[0]["args"]["Bytes"]
    return [(e["ts"] / 1000, (e["args"]["Total Allocated"] - first) / 2**20) for e in noted]


def label_at(trace, moment):
    """The label under which a moment (ms) lies, or "none"."""
    labels = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["name"] in COLOURS]
    inside = (e["name"] for e in labels if e["ts"] <= 1000 * moment <= e["ts"] + e["dur"])
    return next(inside, "none")


held = memory_over_time(trace, kind=int(DEVICE.type == "cuda"))
most = max(held, key=lambda point: point[1])
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
start = held[0][0]
axes.step([ms - start for ms, _ in held], [mib for _, mib in held], where="post", color="#4D5566", lw=1)
for event in trace["traceEvents"]:
    if event.get("cat") == "user_annotation" and event["name"] in COLOURS:
        left = event["ts"] / 1000 - start
        axes.axvspan(left, left + event["dur"] / 1000, color=COLOURS[event["name"]], alpha=0.3, lw=0)
axes.plot(most[0] - start, most[1], "o", color="#D55E00")
axes.set(xlabel="time (ms)", ylabel="allocated (MiB)", title=f"Memory of your run, recorded here on {DEVICE}")
axes.margins(x=0)
axes.spines[["top", "right"]].set_visible(False)
legend(figure, "loading", "forward", "backward", "optimizer")
plt.show()


# %%
peak.shows(
    label_at(trace, most[0]),
    why="Activations pile up in the forward pass. Backward adds the first gradients, then frees activations.",
)

# %% [markdown]
# Each step is a hill. If the valleys rise from step to step, memory leaks.
#
# ## Which operators cost most · further
#
# ### Balise 2 · The most expensive operators · further · about 9 min
#
# Operators call operators. **Total** time includes that of the inner operators, so a sum of totals counts time twice.
# **Self** time excludes inner operators:
#
# ```
# aten::linear   |------------------------|     total 10, self 2
#   aten::addmm     |------------------|        total 8,  self 8
# ```
#
# Each row of `averages`, from `profiler.key_averages()`, has a name `key`, a number of calls `count`, and summed times:
# `self_cpu_time_total` and `self_device_time_total`. The rows that are operators, not labels or kernels, are selected
# for you.
#
# Return the `k` most expensive operators on `device` as `(name, calls, share)`, the most expensive first. `share`,
# between 0 and 1, is the part of the time that you'd save if this operator took none. About 3 lines.
#
# <details><summary>Hint</summary>
#
# `getattr(row, "self_cpu_time_total")` reads an attribute by its name. `sorted(rows, key=…, reverse=True)` leaves
# `rows` unchanged. The sum is over *all* operators, not just these k.
# </details>


# %% tags=["balise-2"]
def top_operators(averages, k, device="cpu"):
    """The k operators with the largest self time on `device`: [(name, calls, share of all operators' self time)]."""
    attribute = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    rows = [r for r in averages if not r.is_user_annotation and r.device_type == torch.autograd.DeviceType.CPU]
    # BEGIN SOLUTION
    rows = sorted(rows, key=lambda row: getattr(row, attribute), reverse=True)
    total = sum(getattr(row, attribute) for row in rows) or 1.0
    return [(row.key, row.count, getattr(row, attribute) / total) for row in rows[:k]]
    # END SOLUTION


# %%
tp.check(2, top_operators)

# %% jupyter={"source_hidden": true}
averages = profiler.key_averages()
found = top_operators(averages, 10)
total = {row.key: row.cpu_time_total for row in averages if not row.is_user_annotation}
own = {row.key: row.self_cpu_time_total for row in averages if not row.is_user_annotation}
everything = sum(own.values())
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
rows = range(len(found))
names = [name for name, *_ in found]
axes.barh(rows, [100 * total[name] / everything for name in names], height=0.75, color="#DDDDDD", label="total time")
axes.barh(rows, [100 * own[name] / everything for name in names], height=0.45, color="#0072B2", label="self time")
for row, (name, calls, _) in enumerate(found):
    axes.text(100 * total[name] / everything + 0.5, row, f"{calls} calls", va="center", fontsize=8)
axes.set_yticks(rows, [name if len(name) < 42 else "…" + name[-40:] for name in names], fontsize=8)
axes.set(xlabel="share of the operators' time on the processor (%)", title="Where does the time go?")
axes.margins(x=0.12)
axes.invert_yaxis()
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# A network of this size runs about twenty convolutions a step, so operators called hundreds of times come from
# somewhere else. With `with_stack=True` the profiler also records each operator's call stack (this costs time, so
# switch it off when you measure speed):


# %% jupyter={"source_hidden": true}
def callers(profiler, k=6):
    """The k operators of a profile that are called most from functions of this notebook: {(operator, function): calls}."""
    found = Counter()
    for row in profiler.key_averages(group_by_stack_n=12):
        ours = [frame for frame in row.stack if "ipykernel" in frame]  # the innermost comes first
        if ours and row.key.startswith("aten::"):
            found[row.key, ours[0].split(": ")[-1]] += row.count
    return found.most_common(k)


images, labels = next(iter(loader))
newcomer_loss(model, images, labels)
deep = torch._C._profiler._ExperimentalConfig(verbose=True)  # without it, stacks are only in the trace
with profile(with_stack=True, experimental_config=deep) as stacks:
    newcomer_loss(model, images, labels).backward()
for (operator, function), calls in callers(stacks):
    print(f"{calls:6} × {operator:<24} called in {function}")

# %% [markdown]
# ## Waits that nobody sees
#
# Three things make the processor wait for the device: reading a value (`.item()`, `print`, `if tensor:`), a result
# whose size depends on values (`nonzero`, a mask as an index), and a blocking copy between processor and device. They
# look harmless. But every operator passes through PyTorch's *dispatcher*, where a `TorchDispatchMode` can look at it.
# The given `makes_wait(func, args, kwargs)` says whether an operator waits.

# %% tags=["setup"] jupyter={"source_hidden": true}
READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2",
         "unique_consecutive", "bincount", "repeat_interleave"}  # fmt: skip


def makes_wait(func, args, kwargs):
    """Whether this operator makes the processor wait for the device that its tensors are on."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # a mask as index: how many are true?
        mask = any(getattr(index, "dtype", None) in (torch.bool, torch.uint8) for index in args[1])
        return mask and (name == "index" or args[2].numel() > 1)  # one number is filled in without counting
    if name == "_to_copy":
        device = kwargs.get("device")
        return device is not None and device.type != args[0].device.type and not kwargs.get("non_blocking")
    if name == "copy_":
        return args[0].device.type != args[1].device.type and not (kwargs.get("non_blocking") or args[2:3] == (True,))
    return name in READS


# %% [markdown]
# ### Balise 3 · Find the waits · about 10 min
#
# A `TorchDispatchMode` is a context manager. Inside it, each operator arrives at `__torch_dispatch__`, which runs it
# and returns its result.
#
# If an operator waits, append the pair (operator, **source line** to blame) to `self.found`. The call stack holds
# your lines and PyTorch's:
#
# ```
# <module>            step(model, …)
# hesitant_step       loss.backward()            ← to blame: the innermost that is not PyTorch's
# torch/_tensor.py    torch.autograd.backward(…)
# your finder         traceback.extract_stack()
# ```
#
# On a GPU, backward runs in its own thread, so there may be no such line. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `traceback.extract_stack()` is a list of frames, the innermost last, each with `filename` and `line`; leave out the
# last one, your finder. `torch.__path__[0]` is PyTorch's folder (torchvision's begins with the same letters).
# </details>


# %% tags=["balise-3"]
class WaitFinder(TorchDispatchMode):
    """Lists in `found` the waits that happen inside: (operator, line of source).

    operator: str(func.overloadpacket). line: of the innermost frame outside PyTorch, stripped; "" if there is none.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if makes_wait(func, args, kwargs):
            # BEGIN SOLUTION
            torchs = torch.__path__[0] + os.sep
            frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith(torchs)]
            line = frames[-1].line.strip() if frames else ""
            self.found.append((str(func.overloadpacket), line))
            # END SOLUTION
        return func(*args, **kwargs)


# %%
tp.check(3, WaitFinder)


# %% tags=["setup"] jupyter={"source_hidden": true}
def find_waits(step):
    """Print the waits of the second of two steps, those of one line together; return their number."""
    found = second_step(step, WaitFinder()).found
    print(f"{step.__name__}: {len(found)} waits")
    for operator, line in dict.fromkeys(found):
        words = line or "(in a thread of PyTorch: the backward pass)"
        print(f"  {found.count((operator, line))} × {operator:<26} {words}")
    return len(found)


# %%
waits = tp.predict("How many waits are there in one step of the run as found?", ...)

# %%
found = second_step(newcomer_step, WaitFinder()).found
waits.shows(len(found), "{:.0f}", "The search for a NaN reads a value after every function of the backward pass.")

# %%
numbers = find_waits(hesitant_step), find_waits(newcomer_step)

# %% [markdown]
# Without a GPU everything is on one device, so copies *to* the device don't show; the next check looks at them too. On
# a GPU, `torch.cuda.set_sync_debug_mode("warn")` warns about most waits.
#
# ### Balise 4 · Remove the waits · about 16 min
#
# Rewrite `hesitant_step` (above) so that nothing waits. Go through the lines that your finder named, and the copies:
#
# - **copies** to the device must not block; draw **the shift** on the device that uses it;
# - **the loss** leaves out images with label -1, but without a mask;
# - **the norm of the gradients** (their length): clip them to `MAX_NORM` without an `if`;
# - **the right answers**: can an image with label -1 be among them at all?
#
# Return loss, right answers and norm (before clipping) as tensors. About 10 lines.
#
# <details><summary>Hint</summary>
#
# `non_blocking=True`; `device=device`; `F.cross_entropy` has an `ignore_index`; `torch.nn.utils.clip_grad_norm_`
# clips the gradients and returns their norm before clipping, without reading a value.
# </details>


# %% tags=["balise-4", "slide-mistake=mask-as-index"]
def flowing_step(model, images, labels, optimizer, device):
    """hesitant_step without a wait. Returns loss, right answers and norm of the gradients: tensors () on the device.

    images, labels: in pinned memory. Images with label -1 count neither in the loss nor as right answers.
    """
    # BEGIN SOLUTION
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    shift = 0.4 * torch.rand(len(images), device=device) - 0.2
    logits = model(images + shift[:, None, None, None])
    loss = F.cross_entropy(logits, labels, ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    correct = (logits.argmax(dim=1) == labels).sum()
    # END SOLUTION
    return loss.detach(), correct, norm


# %%
tp.check(4, flowing_step)

# %%
left = find_waits(flowing_step)

# %% [markdown]
# ## How busy is the device?
#
# ### Balise 5 · Find the busy time and the gaps · further · about 14 min
#
# Now the formula $|\bigcup_i [b_i, e_i]| / T$. Kernels on several streams overlap, so you can't add up their lengths.
# Overlapping time counts **once**:
#
# ```
# stream 7    |--kernel--|      |---kernel---|
# stream 20        |----copy----|                 |-copy-|
# union       |------------------------------|    |------|
#             first                          gap       last
# ```
#
# Given: `first` and `last`, the start and end of the window in microseconds, and `work`, the device's events.
#
# Write `gaps` and `idle`, their total length. About 7 lines.
#
# **Write all of it:** `tp.open_task(5)` gives you only the name and the docstring. Read from any trace how busy the
# device is, and when it isn't.
#
# <details><summary>Hint</summary>
#
# Clip each event to `first` and `last`, sort by start, and walk through them, keeping the end of the busy time so far.
# An interval that begins later leaves a gap; one that ends earlier changes nothing. Append an empty interval at
# `last` to catch a final gap.
# </details>


# %% tags=["balise-5"]
def device_busy(trace):
    """(share of the window in which the device works, gaps [(begin, end)] in microseconds, longest first).

    trace: a Chrome trace as json.load returns it; it stays unchanged. trace["traceEvents"] is a list of dictionaries in
    no particular order. Only events e with e["ph"] == "X" count, and even these may lack "cat". They begin at e["ts"]
    and take e["dur"] microseconds.

    The window goes from the start of the first step to the end of the last. A step's cat is "user_annotation", and its
    name begins with "ProfilerStep". The device works during events of cat "kernel", "gpu_memcpy" and "gpu_memset", on
    any stream. Time that overlaps counts once, and time outside the window doesn't count.
    gaps: every interval of the window without work, also at its start and its end, on the trace's clock; none is empty.
    Without any work, the share is 0, and the window is one gap.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    first, last = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # BEGIN SOLUTION
    spans = sorted((max(first, e["ts"]), min(last, e["ts"] + e["dur"])) for e in work)
    end, gaps = first, []
    for begin, until in [span for span in spans if span[0] < span[1]] + [(last, last)]:
        if begin > end:
            gaps.append((end, begin))
        end = max(end, until)
    idle = sum(end - begin for begin, end in gaps)
    # END SOLUTION
    return 1 - idle / (last - first), sorted(gaps, key=lambda gap: gap[0] - gap[1])


# %%
tp.check(5, device_busy)

# %% [markdown]
# Here is your run, with its four longest gaps shaded. Without a GPU the processor is the device, and operators stand
# in for kernels.


# %% tags=["slide"] jupyter={"source_hidden": true}
def of_operators(trace):
    """The trace of a processor, with its operators in place of kernels; overlapping ones count once, as kernels do."""
    place = {"cat": "kernel", "args": {"lane": "operators"}}
    return {"traceEvents": [e | place if e.get("cat") == "cpu_op" else e for e in trace["traceEvents"]]}


own = trace if DEVICE.type == "cuda" else of_operators(trace)
busy, gaps = device_busy(own)
for begin, end in gaps[:4]:
    print(f"a gap of {(end - begin) / 1000:6.2f} ms; at its start the processor is in: {label_at(trace, begin / 1000)}")
if DEVICE.type == "cuda":
    recorded.note(NAME, "busy", {"as found": busy})
pretended = generated("hesitant", steps=4)
figure, panels = plt.subplots(2, 1, figsize=(9, 4.2), layout="constrained")
draw(panels[0], own, f"your run, recorded here on {DEVICE}: busy {busy:.0%}", gaps=gaps[:4])
its_busy, its_gaps = device_busy(pretended)
draw(panels[1], pretended, f"for comparison, hesitant (generated): busy {its_busy:.0%}", gaps=its_gaps[:7])
panels[1].set_xlabel("time (ms)")
legend(figure, "loading", "forward", "backward", "optimizer", "wait", "kernel", "gpu_memcpy")
plt.show()
if found := recorded.load(NAME, "busy"):
    print(f"recorded on {recorded.where(NAME)}: busy {found['as found']:.0%}")

# %% [markdown]
# A busy device may still be poorly used: a kernel on a single SM counts as busy. The label above a gap says what the
# processor was doing meanwhile.
#
# ## Three slow loops
#
# A is the contrast from the beginning, B computes a validation loss, C trains. Each has a different ailment. Their code
# is collapsed: **leave it closed**, and work from a profile of each at two sizes. `AILMENTS` lists the possible ones.

# %% tags=["setup"] jupyter={"source_hidden": true}
AILMENTS = ("values are read", "many tiny operators", "a graph is kept", "debugging is on", "work is done twice",
            "made on the processor, then moved")  # fmt: skip


def train_through(model, batches, optimizer):
    """Train through the batches (images, labels); the loss of each: a tensor (n,)."""
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %% tags=["setup"] jupyter={"source_hidden": true}
def slow_b(model, batches):
    """The mean loss over the validation batches (images, labels): a tensor ()."""
    model.eval()
    total = 0.0
    for images, labels in batches:
        total = total + F.cross_entropy(model(images), labels)
    return total / len(batches)


def slow_c(model, batches, optimizer):
    """Train through the batches (images, labels); the loss of each: a tensor (n,)."""
    torch.autograd.set_detect_anomaly(True)
    return train_through(model, batches, optimizer)


# %% tags=["setup"] jupyter={"source_hidden": true}
small = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
some = [(torch.randn(8, 3, 8, 8, device=DEVICE), torch.randint(10, (8,), device=DEVICE)) for _ in range(8)]
# operators that we leave out: they are part of any run, or compute nothing
DULL = {"as_strided", "as_strided_", "empty", "empty_like", "empty_strided", "resize_", "fill_", "copy_", "_to_copy", "to",
        "detach", "resolve_conj", "unsqueeze", "select", "conv2d", "_convolution", "cat", "narrow"}  # fmt: skip


def symptoms(run):
    """A profile of run(): the calls of its operators, and KiB that stay allocated besides the result."""
    was_on = torch.is_anomaly_enabled()
    run()  # warm up
    with profile(profile_memory=True) as profiler:
        result = run()
    torch.autograd.set_detect_anomaly(was_on)
    rows = profiler.key_averages()
    held = sum(row.self_cpu_memory_usage + row.self_device_memory_usage for row in rows) - result.nbytes
    names = ((row.key.removeprefix("aten::"), row.count) for row in rows if row.key.startswith("aten::"))
    return Counter({name: calls for name, calls in names if name not in DULL}), held / 1024


# %% jupyter={"source_hidden": true}
def train(loop, batches):
    network = copy.deepcopy(small).to(DEVICE)
    return loop(network, batches, torch.optim.SGD(network.parameters(), lr=0.01))


def table(a, b, c):
    """What a profile shows of three loops, on a small and on a larger input."""
    network = copy.deepcopy(small).to(DEVICE)
    pictures = [(torch.randn(n, 3, 64, 64, device=DEVICE), torch.rand(n, device=DEVICE)) for n in (8, 32)]
    runs = {"A, 8 and 32 images": [functools.partial(a, *batch) for batch in pictures],
            "B, 2 and 8 batches": [functools.partial(b, network, some[:n]) for n in (2, 8)],
            "C, 2 and 8 batches": [functools.partial(train, c, some[:n]) for n in (2, 8)]}  # fmt: skip
    for name, pair in runs.items():
        (few, held), (many, more) = map(symptoms, pair)
        print(f"{name}: {held:.0f} and {more:.0f} KiB stay allocated. Operators and their calls:")
        print("   " + ", ".join(f"{operator} {few[operator]} and {calls}" for operator, calls in many.most_common(9)))


# %%
table(slow_a, slow_b, slow_c)

# %%
print(*AILMENTS, sep="; ")

# %% [markdown]
# ### Balise 6 · Name each ailment, then fix it · further · about 14 min
#
# **First** write `diagnosis()`: `{"A": …, "B": …, "C": …}`, each one of `AILMENTS`. What grows with the input? Which
# operators don't belong there? Careful with C: a value is read there, but what reads it, and why? The check looks at
# your diagnosis first.
#
# **Then** open the cells and fix the loops: same results, no new ailment. About 7 lines in all.
#
# <details><summary>What the fixed loops must do (this gives the diagnosis away, so write yours first)</summary>
#
# - A: each channel of each image is scaled about its own mean, then limited to ±3. The number of operators doesn't
#   depend on any size;
# - B: nobody calls backward here, so autograd doesn't need to record (reading a value in each round would be a new
#   ailment);
# - C: `train_through`, with debugging off, even if somebody switched it on *before* the call. Afterwards restore
#   it, `check_nan` too.
# </details>
#
# <details><summary>Hint</summary>
#
# A value that is not equal to itself is a NaN. A: `mean(dim=…, keepdim=True)` keeps the averaged dimensions, with size
# 1; a factor for each image has the shape `(b, 1, 1, 1)`. B: two context managers switch recording off; use either. C:
# the switch is global; `set_detect_anomaly` is a function and a context manager.
# </details>


# %% tags=["balise-6"]
def diagnosis():
    """The ailment of each loop: {"A": one of AILMENTS, "B": …, "C": …}."""
    # BEGIN SOLUTION
    return {"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}
    # END SOLUTION


def mended_a(images, contrast):
    """slow_a, mended: images (b, c, h, w), contrast (b,) -> (b, c, h, w). The same number of operators for any size."""
    # BEGIN SOLUTION
    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)
    # END SOLUTION


def mended_b(model, batches):
    """slow_b, mended: the mean loss, a tensor (). No value is read."""
    model.eval()
    # BEGIN SOLUTION
    with torch.no_grad():
        losses = [F.cross_entropy(model(images), labels) for images, labels in batches]
    # END SOLUTION
    return torch.stack(losses).mean()


def mended_c(model, batches, optimizer):
    """slow_c, mended: the loss of each batch, a tensor (n,).

    The debugging is off inside, even if it was on before. Afterwards everything is as before, including check_nan.
    """
    # BEGIN SOLUTION
    with torch.autograd.set_detect_anomaly(False):
        return train_through(model, batches, optimizer)
    # END SOLUTION


# %%
tp.check(6, diagnosis, mended_a, mended_b, mended_c)

# %%
table(mended_a, mended_b, mended_c)

# %% jupyter={"source_hidden": true}
pictures = torch.randn(64, 3, 32, 32, device=DEVICE), torch.rand(64, device=DEVICE)
pairs = {"A, 64 images of 32 pixels": (slow_a, mended_a, pictures),
         "C, 8 batches": (functools.partial(train, slow_c), functools.partial(train, mended_c), (some,))}  # fmt: skip
rows = []
for name, (slow, mended, given) in pairs.items():
    pair = {"slow": functools.partial(slow, *given), "mended": functools.partial(mended, *given)}
    medians = measure.race(pair, repeats=15, device=DEVICE, calls=1).medians
    torch.autograd.set_detect_anomaly(False)  # slow_c leaves it on
    rows.append((name, medians["slow"], medians["mended"], medians["slow"] / medians["mended"]))
seconds = measure.human_seconds
report.table(
    {"measured (B saves memory, not time)": "{}", "slow": seconds, "mended": seconds, "faster": "× {:.1f}"}, rows
)

# %% [markdown]
# ## Small savings · further
#
# ### Balise 7 · No bias before a batch norm · further · about 9 min
#
# A batch norm subtracts the mean over the batch, and with it any constant that was added before:
#
# $$(x + b) - \overline{(x + b)} = x - \bar x$$
#
# Such a bias is read, added, differentiated (a sum over all pixels) and updated for nothing. `without_bias` removes it
# from each convolution, and each linear layer on `(n, features)`, directly before a batch norm. The code that finds
# these pairs is given. Write what happens to one: the model must compute the same afterwards, in training **and in eval
# mode**. There the batch norm subtracts a stored mean, `norm.running_mean`, which was learnt with the bias. About 3
# lines.
#
# <details><summary>Hint</summary>
#
# The stored mean is that of $x + b$, so it includes the bias. It is a buffer, not a parameter, so use
# `layer.bias.detach()`. Setting `layer.bias = None` removes the parameter.
# </details>


# %% tags=["balise-7"]
def without_bias(model):
    """Remove the biases that a batch norm undoes in every nn.Sequential of `model`, in place; returns the model.

    The model computes the same in training and in eval mode. norm.running_mean is None if the norm keeps no mean.
    """
    linear = nn.Linear, nn.modules.conv._ConvNd
    for block in model.modules():
        if not isinstance(block, nn.Sequential):
            continue
        layers = list(block)
        for layer, norm in zip(layers, layers[1:]):
            if (
                isinstance(layer, linear)
                and isinstance(norm, nn.modules.batchnorm._BatchNorm)
                and layer.bias is not None
            ):
                # BEGIN SOLUTION
                if norm.running_mean is not None:
                    norm.running_mean -= layer.bias.detach()
                layer.bias = None
                # END SOLUTION
    return model


# %%
tp.check(7, without_bias)


# %% jupyter={"source_hidden": true}
def biases(layers):
    convolutions = [m for m in layers.modules() if isinstance(m, nn.Conv2d)]
    return f"{sum(c.bias is not None for c in convolutions)} of {len(convolutions)} convolutions have a bias"


vgg = models.vgg.make_layers(models.vgg.cfgs["A"], batch_norm=True)
print(f"torchvision's ResNet-18: {biases(models.resnet18())}; VGG-11 with batch norm: {biases(vgg)}")
images = torch.randn(4, 3, 32, 32)
with torch.no_grad():
    expected = vgg.eval()(images)
    difference = (without_bias(vgg)(images) - expected).abs().max().item()
print(f"after your function: {biases(vgg)}; largest difference {difference:.1e} of {expected.abs().max():.1e}")

# %% [markdown]
# ### Balise 8 · The longest batch first, and what the autotuner saves · further · about 12 min
#
# Batches of sentences, or of images of different sizes, vary in shape. Two consequences:
#
# - PyTorch reuses freed blocks of device memory. A batch longer than all earlier ones fits into none of them, so new
#   memory is reserved beside the idle blocks, and a run can fail with "out of memory" after an hour. The cure:
#   **`reserve`** runs the longest batch *before* training. It must use *all* the memory of a step, and leave no trace.
#   Buffers are restored for you; restore the random state, which `batch_of` and dropout use, and the gradients.
# - With `torch.backends.cudnn.benchmark = True`, cuDNN tries its algorithms the first time it sees **each new shape**.
#   **`autotuner_saves`** returns the seconds that this saves in a run.
#
# About 5 lines in all.
#
# <details><summary>Hint</summary>
#
# Without a backward pass there are no gradients, and under `no_grad` no activations are kept. `torch.random.fork_rng()`
# restores the random numbers. `torch.cuda.empty_cache()` would give all the memory back.
# </details>


# %% tags=["balise-8"]
def reserve(model, batch_of, lengths):
    """Run forward and backward once on a batch of the longest length; leave no trace but reserved memory.

    batch_of(length) makes (inputs, labels); the loss is the mean cross-entropy. Buffers, gradients (None) and random
    numbers of processor and device are the same afterwards.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # BEGIN SOLUTION
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad(set_to_none=True)
    # END SOLUTION
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def autotuner_saves(shapes, search, usual, best):
    """Seconds that the autotuner saves in a run over batches of these shapes; negative if it loses time.

    search: seconds to try all algorithms for a new shape; usual, best: seconds of a step without and with it.
    """
    # BEGIN SOLUTION
    return len(shapes) * (usual - best) - len(set(shapes)) * search
    # END SOLUTION


# %%
tp.check(8, reserve, autotuner_saves)

# %% [markdown]
# Both effects are **modelled**: an allocator that reuses the smallest block that fits, and an epoch of 10,000 steps of
# 100 ms in which a search takes 2 s per shape and saves 10 % of a step (assumed).


# %% jupyter={"source_hidden": true}
def reserved(lengths, widths=(256, 1024, 256, 1024, 256, 64)):
    """MiB reserved after each step, batch of 32, float32."""
    blocks, seen = [], []
    for length in lengths:
        free = sorted(blocks)
        for need in (4 * 32 * length * width for width in widths):
            fitting = [block for block in free if block >= need]
            if fitting:
                free.remove(fitting[0])
            else:
                blocks.append(need)
        seen.append(sum(blocks) / 2**20)
    return seen


lengths = torch.randint(40, 513, (60,), generator=torch.Generator().manual_seed(2)).tolist()
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.step(range(1, 61), reserved(lengths), where="post", color="#D55E00", label="as they come")
first = reserved([max(lengths), *lengths])[1:]
axes.step(range(1, 61), first, where="post", color="#0072B2", label="longest first")
axes.set(xlabel="step", ylabel="reserved (MiB)", title="What a model of an allocator reserves", ylim=(0, None))
axes.legend(frameon=False, ncols=2)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

drawn = torch.Generator().manual_seed(3)
many = torch.randint(40, 513, (10_000,), generator=drawn).tolist()
epochs = {
    "images of one size": [(128, 224)] * 10_000,
    "recordings of any length": [(128, n) for n in many],
    "padded to multiples of 64": [(128, -(-n // 64) * 64) for n in many],
}
saved = {name: autotuner_saves(shapes, search=2.0, usual=0.1, best=0.09) for name, shapes in epochs.items()}
rows = [(name, len(set(shapes)), saved[name]) for name, shapes in epochs.items()]
report.table({"batches": "{}", "shapes": "{}", "saved in an epoch (s)": "{:,.0f}"}, rows)

# %% [markdown]
# ## Measured again
#
# Here is the same run with your step and `mended_a`.

# %%
gain = tp.predict("By what factor does your step raise the images per second of this run, on this machine?", ...)


# %%
def your_step(model, images, labels, optimizer, device):
    images = images.to(device, non_blocking=True)
    contrast = 0.8 + 0.4 * torch.rand(len(images), device=device)
    return flowing_step(model, mended_a(images, contrast), labels, optimizer, device)


after = training_run.run("your step", your_step, model=Network())
before = training_run.run("as found", newcomer_step, model=Network())  # once more: a machine's speed changes

# %%
gain.shows(
    after.images_per_second / before.images_per_second,
    "× {:.2f}",
    "On a CPU there is no queue, so only the removed work counts. On a GPU the removed waits count too.",
)

# %% tags=["slide"] jupyter={"source_hidden": true}
gains.keep(NAME, "no waits, no tiny operators, no debugging", before, after)
rows = [
    (
        record.name,
        second_step(step, Operators()).calls,
        len(second_step(step, WaitFinder()).found),
        record.images_per_second,
    )
    for record, step in ((before, newcomer_step), (after, your_step))
]
report.table({"a step": "{}", "operators": "{:,}", "waits": "{}", "images/s": "{:.1f}"}, rows)

# %%
worth.table({"as found": newcomer_step, "your step": your_step}, makes=worth.Mixed, keep=NAME)

# %% [markdown]
# On a GPU, launching operators and waiting both cost time. But this gain only recovers what the additions had lost:
# **the run is no faster than the previous works left it**.
#
# ## Race · further

# %% jupyter={"source_hidden": true}
batch = tuple(tensor.to(DEVICE) for tensor in a_batch())
candidates = {}
for name, step in {"yours": your_step, "as found": newcomer_step, "no extras": training_run.plain_step}.items():
    model = Network()
    optimizer = training_run.make_optimizer(model.parameters())
    candidates[name] = functools.partial(step, model, *batch, optimizer, DEVICE)
result = measure.race(candidates, repeats=20 if FULL else 5, warmup=5 if FULL else 1, device=DEVICE, calls=1)
recorded.note(NAME, "steps", result.medians)
result

# %% [markdown]
# ## Beyond this machine
#
# This profiler sees only its own process. **Nsight Systems** (`nsys profile --trace=cuda,nvtx,osrt python train.py`)
# shows all processes of a node, CUDA calls, NCCL and the operating system on one clock. For "out of memory",
# `torch.cuda.memory._record_memory_history()` and `_dump_snapshot` write a file for `pytorch.org/memory_viz`. And if
# batches are too small, the processor stays the bottleneck even without waits: compile the model, or replay a recorded
# queue (CUDA graphs).

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>In a profile on a GPU, <code>aten::item</code> takes 60 % of the processor's time. Is reading a number so slow?</summary>
#
# No. The processor waits there until the device has finished everything queued before. Remove it, and the wait moves to
# the next place that needs a value. With none left, the processor runs ahead.
# </details>
#
# <details><summary>The device is 98 % busy, and the step is still far from the peak. How can that be?</summary>
#
# Busy only means that some kernel is running. That kernel may be limited by memory, fill only a few SMs, or compute in
# float32. Look at the roofline next.
# </details>
#
# <details><summary>The profile shows that the optimizer takes 4 % of the step. How much can a fused optimizer gain at most?</summary>
#
# A factor of 1 / (1 - 0.04) = 1.04, if it took no time at all. Look for the larger part first.
# </details>
#
# ## To remember
#
# Measure, change one thing, then measure again. A schedule keeps a profile small and labels make it readable. Self time
# says which operators cost most, and the union of the device's intervals says how busy it is. Waits hide in
# harmless-looking lines, and a tool finds them faster than the eye. Next: **the data loader**, the usual reason for the
# longest gap.
