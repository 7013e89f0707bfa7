# %% [markdown]
# # The profiler: find out before you change · about 90 min, core 35
#
# A training loop is slow, and everybody has an opinion why. A profiler has measurements. Here you record a training
# loop and read from the record where time and memory go, where the processor waits for the device, and how much of the
# time the device works at all. Then you mend loops that ail, each in its own way.
#
# **What you will gain** depends on what you find. An *estimate* of one common find: a value is read at the end of
# each step (`loss.item()`), and the device stands still for a millisecond, until the processor has fetched the next
# batch and started the first kernels.

# %% tags=["setup"]
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

from dlojz_tp import (
    course, data, gains, measure, planner, precision, recorded, report, scale, tensorboard, todo, training_run,
    worth,
)  # fmt: skip
from dlojz_tp.measure.trace import generated

NAME = "04_profiler"
tp = course.open(NAME)
tp

# %% [markdown]
# All sizes are here. The folder is private: a trace holds paths, names of functions and shapes.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = training_run.device()
CLASSES = len(data.image_set().classes)
BATCH = training_run.setting().batch_size
SIZE = training_run.setting().image_size  # pixels of a side
ACTIVE = 6 if FULL else 3  # steps that the profiler records
MAX_NORM = 5.0  # gradients longer than this are shortened
HALF = (
    precision.fast_dtype(DEVICE) == torch.bfloat16
)  # does bfloat16 pay here? (float16 would want loss scaling besides)
kept = tempfile.TemporaryDirectory(prefix="profiles-")  # for this user alone, gone when the notebook ends
FOLDER = Path(kept.name)

# %%
IDLE = 1e-3  # seconds that the device stands still in each step: assumed
CARDS = [
    card for card in (planner.V100, planner.A100, planner.H100) if card.resnet50_mixed
]  # those with a published rate
print("estimate: part of the time lost if the device stands still for 1 ms a step (ResNet-50, 224 pixels)")
print(f"{'batch':<10}" + "".join(f"{batch:>8}" for batch in (64, 128, 256, 512)))
for card in CARDS:
    steps = [batch / card.resnet50_mixed for batch in (64, 128, 256, 512)]
    print(f"{card.name:<10}" + "".join(f"{IDLE / (step + IDLE):8.1%}" for step in steps))
print(gains.expected(NAME))

# %% [markdown]
# This is arithmetic from the rates that NVIDIA has published for these cards (none for newer ones), and an idle time
# that is assumed. It says when to look: **the faster the device and the smaller its piece of work, the more a wait costs**.
#
# ## The idea
#
# On a GPU the processor does not compute, it *queues* work: it runs through your Python code and fills a queue, and the
# device empties it, on several streams at once. The device is busy while at least one of its kernels or copies runs:
#
# $$\text{busy} = \frac{1}{T}\;\Bigl|\,\bigcup_i\,[\,b_i,\ e_i\,]\,\Bigr|$$
#
# where $b_i$ and $e_i$ are begin and end of kernel or copy $i$ and $T$ is the length of the recorded steps. Below are
# two loops on a pretended GPU. **These two traces are made by arithmetic, not recorded.** Yours is recorded further down.

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


# %% jupyter={"source_hidden": true}
pictures = {"hesitant: loads in turn, copies in turn, reads a value in each step (generated)": "hesitant",
            "flowing: none of these (generated)": "flowing"}  # fmt: skip
figure, panels = plt.subplots(2, 1, figsize=(9, 4.2), layout="constrained", sharex=True)
for axes, (title, kind) in zip(panels, pictures.items()):
    draw(axes, generated(kind, steps=4), title)
panels[1].set_xlabel("time (ms)")
legend(figure, "loading", "forward", "backward", "optimizer", "wait", "kernel", "gpu_memcpy")
plt.show()

# %% [markdown]
# White on the streams' rows is time that was paid for and not used. The processor waits in both pictures, for opposite
# reasons: above for a value, with an empty queue behind it; below because its queue is full.
#
# ## The baseline, measured first
#
# Here is a training run as one finds them: the run of the works before (channels_last, and bfloat16 where the device
# computes faster in it), and what somebody has added to it. Each image gets a contrast of its own, all images of a batch are
# shifted a little, gradients are shortened if they are too long, some numbers are shown, and last week somebody looked
# for a NaN. Suspect what you like, and change nothing yet. The cell with the contrast is closed. Leave it so: later you
# find out what ails it from a profile alone.


# %% tags=["setup"]
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
    """Multiply the contrast of image i, about the mean of each channel, by contrast[i]; limit to ±3. (b, c, h, w)."""
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
    """One step; images with label -1 do not count. Returns loss, right answers, length of the gradients: numbers."""
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
    """What the training run does now: contrast, then the step, with last week's search for a NaN still on."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        contrast = (0.8 + 0.4 * torch.rand(len(images))).to(device)
        return hesitant_step(model, slow_a(images.to(device), contrast), labels, optimizer, device)


# %%
before = training_run.run("as found", newcomer_step, model=Network())
print(f"as found, on {DEVICE}: {before.images_per_second:,.1f} images/s")

# %% [markdown]
# ## A profiled loop
#
# A profile of a whole training would not fit into memory, and the first steps are unlike the others. So a `schedule`
# says which steps are recorded, and **labels** (`record_function`) say in the record which part of your code was at work.

# %% [markdown]
# ### Balise 1 · A profiled loop · about 11 min
#
# Train through `loader`; record `active` of the steps. Two ideas make a record small and readable:
#
# ```
# step       0      1         2 … 1 + active         all that follow
#            wait   warm up   recorded               nothing, however long the loader is
# labels                      loading | forward | backward | optimizer
# ```
#
# - **A schedule.** What the profiler does at its own start would be in the first step that it records; hence one step to
#   warm up. And the profiler knows nothing of your steps: call its `step()` at the end of each.
# - **Labels.** All that runs inside `with record_function("loading"):` stands under this name in the trace. `"forward"` is
#   given too; yours are `"backward"`, and `"optimizer"` around the update *and* the line that clears the gradients.
#
# `profile_memory`, given, also notes each allocation. About 7 lines.
#
# <details><summary>Hint</summary>
#
# `schedule(wait=…, warmup=…, active=…, repeat=…)` makes a schedule. Without `repeat=1`, waiting, warming up and recording
# begin again, and the trace is written over.
# </details>


# %% tags=["balise-1"]
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    """Train through `loader` of (images, labels); record `active` steps into `folder`. Returns the profiler."""
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    batches = iter(loader)
    # when: the schedule
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
            with record_function("forward"):
                loss = forward(model, *batch)
            # BEGIN SOLUTION
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
# Record the training run as it was found: its contrast and its loss as the `forward`. (What is shown and shortened, and the search
# for a NaN, stay out. A warning of memory that was allocated before is harmless.)


# %% tags=["setup"]
def newcomer_loss(model, images, labels):
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
# To read the trace itself: copy the file to your own machine and open it at `ui.perfetto.dev`, which keeps it in the
# browser. On a GPU the times above are those of the *processor*: it queues, and a long label may only mean that it
# waited there.
#
# ## Where the memory goes
#
# The same trace holds each allocation and each release. In which of the four labels is most memory in use? Guess.

# %%
peak = tp.predict(
    "During which label is most memory allocated?", ..., choices=("loading", "forward", "backward", "optimizer")
)


# %%
def memory_over_time(trace, kind):
    """(ms, MiB) of each allocation and release on the processor (kind 0) or a GPU (1), less what was there at first."""
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
peak.shows(
    label_at(trace, most[0]),
    why="Activations pile up in the forward pass. Backward begins at the top, adds the first gradients and then works off the pile.",
)

# %% jupyter={"source_hidden": true}
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

# %% [markdown]
# A step is a hill: up in the forward pass and a little more as backward begins, then down. What does
# not come down again is kept. A mountain that grows from step to step is a leak, and this picture is where you see it.
#
# ## Which operators cost

# %% [markdown]
# ### Balise 2 · The most expensive operators · further · about 5 min
#
# Operators call operators. **Total** time includes them, so in a sum it counts twice; **self** time does not:
#
# ```
# aten::linear   |------------------------|     total 10, self 2
#   aten::addmm     |------------------|        total 8,  self 8
# ```
#
# Each row of `averages` (what `profiler.key_averages()` returns) has a name `key`, a number of calls `count`, and times summed
# over these calls: `self_cpu_time_total` of the processor, `self_device_time_total` of the device. Given: which rows are
# operators, and not labels or kernels, whose time would count again.
#
# Return the `k` operators that cost most on `device`, as `(name, calls, share)`, the most expensive first. `share`, between 0 and
# 1, must answer "how much is gained at most if this one took no time?" Of which sum is it a part? About 3 lines.
#
# <details><summary>Hint</summary>
#
# `getattr(row, "self_cpu_time_total")` reads an attribute by its name. `sorted(rows, key=…, reverse=True)` leaves `rows` as they
# are. The sum is that of *all* operators, not of the k.
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
axes.set(xlabel="part of the operators' time on the processor (%)", title="Where does the time go?")
axes.margins(x=0.12)
axes.invert_yaxis()
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Grey beyond blue is time that belongs to an operator further down. Look at the **calls** too: a network of this size
# calls a convolution some twenty times a step, so what is called hundreds of times comes from somewhere else. From where?
#
# ## Who called it? · further
#
# With `with_stack=True` the profiler notes the call stack of each operator. Stacks cost time, so never leave them on when
# you measure. One step, and for the operators with most calls the innermost function of *yours* on the stack:


# %%
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
deep = torch._C._profiler._ExperimentalConfig(verbose=True)  # without it, stacks stand in the trace only
with profile(with_stack=True, experimental_config=deep) as stacks:
    newcomer_loss(model, images, labels).backward()
for (operator, function), calls in callers(stacks):
    print(f"{calls:6} × {operator:<24} called in {function}")

# %% [markdown]
# For **memory** the same is a *snapshot*: each block of a GPU's memory with the stack of who asked for it. It is the
# tool for "out of memory, but whose?", and a CPU has none. `_dump_snapshot` writes a file for `pytorch.org/memory_viz`;
# but a snapshot is a dictionary, and a few lines read it:


# %%
def owners(snapshot):
    """MiB in use by the line of Python that asked for them, the largest first: [(line, MiB)]."""
    found = Counter()
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] == "active_allocated":  # others are free, or wait for a stream
            ours = [f for f in block["frames"] if not f["filename"].startswith(torch.__path__[0] + os.sep)]
            found[f"{ours[0]['name']}, line {ours[0]['line']}" if ours else "unknown"] += block["size"] / 2**20
    return found.most_common(5)


if DEVICE.type == "cuda":
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    loss = newcomer_loss(model, images, labels)  # its graph is alive, and with it all activations
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    del loss
else:
    print("no GPU here: this snapshot is made up, two blocks in use and one free, in the form of a real one")
    stack = [{"filename": "step.py", "name": "forward", "line": 12}]
    blocks = [{"size": 96 * 2**20, "state": "active_allocated", "frames": stack}]
    blocks.append(
        {"size": 480 * 2**20, "state": "active_allocated", "frames": [stack[0] | {"name": "log", "line": 31}]}
    )
    blocks.append({"size": 900 * 2**20, "state": "inactive", "frames": []})
    snapshot = {"segments": [{"blocks": blocks}]}
for line, mib in owners(snapshot):
    print(f"{mib:8.1f} MiB asked for in {line}")

# %% [markdown]
# ## Waits that nobody sees
#
# Three things make the processor wait for the device: a value is handed to Python (`.item()`, `print`, `if tensor:`), the
# size of a result depends on values (`nonzero`, a mask as index), and a copy between the two machines that blocks. None of
# them says so in the code. But every operator passes through PyTorch's *dispatcher*, and a `TorchDispatchMode` can look at
# it there. Given is the judgement whether an operator waits.


# %% tags=["setup"]
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
# ### Balise 3 · Find the waits · about 8 min
#
# A `TorchDispatchMode` is a context manager. Inside it, each operator comes to your method `__torch_dispatch__` instead of
# being run; you run it, and hand on its result. So you may look at everything in passing.
#
# Where an operator waits, add a pair to `self.found`: its name, `str(func.overloadpacket)`, and **the line of source** to blame,
# without spaces around it. Whose line? The call stack holds them all, yours and PyTorch's:
#
# ```
# <module>            step(model, …)
# hesitant_step       loss.backward()            ← to blame: the innermost that is not PyTorch's
# torch/_tensor.py    torch.autograd.backward(…)
# your finder         traceback.extract_stack()
# ```
#
# There may be none (`""`): on a GPU the backward pass runs in a thread of its own, where nobody of yours has called.
# About 3 lines.
#
# <details><summary>Hint</summary>
#
# `traceback.extract_stack()` is a list of frames, the innermost last, each with `filename` and `line`; leave the very last one
# out. `torch.__path__[0]` is the folder that PyTorch's files are in (that of torchvision begins with the same letters).
# </details>


# %% tags=["balise-3"]
class WaitFinder(TorchDispatchMode):
    """Lists in `found` the (operator, line of source) of each wait that happens inside."""

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


# %% tags=["setup"]
def a_batch():
    """Random images (BATCH, 3, SIZE, SIZE) and labels (BATCH,), on the processor as a loader gives them."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=drawn)
    return images, torch.randint(CLASSES, (BATCH,), generator=drawn)


def find_waits(step):
    """Print the waits of the second of two steps, those of one line together; return their number."""
    model = Network()
    optimizer = training_run.make_optimizer(model.parameters())
    step(model, *a_batch(), optimizer, DEVICE)
    with WaitFinder() as finder:
        step(model, *a_batch(), optimizer, DEVICE)
    print(f"{step.__name__}: {len(finder.found)} waits")
    for operator, line in dict.fromkeys(finder.found):
        words = line or "(in a thread of PyTorch: the backward pass)"
        print(f"  {finder.found.count((operator, line))} × {operator:<26} {words}")
    return len(finder.found)


# %% [markdown]
# Guess: you have read both steps.

# %%
waits = tp.predict("How often does one step of the run as it was found wait?", ...)

# %%
find_waits(hesitant_step)
waits.shows(
    find_waits(newcomer_step),
    "{:.0f}",
    "The search for a NaN reads a value after every function of the backward pass; no line of the step shows it.",
)

# %% [markdown]
# Without a GPU everything is on one device, so copies *to* the device cannot be seen here; the next check looks at them
# in another way. With a GPU, PyTorch has a finder of its own: `torch.cuda.set_sync_debug_mode("warn")` warns at most waits.

# %%
if DEVICE.type == "cuda":
    model = Network()
    optimizer = training_run.make_optimizer(model.parameters())
    hesitant_step(model, *a_batch(), optimizer, DEVICE)
    torch.cuda.set_sync_debug_mode("warn")
    hesitant_step(model, *a_batch(), optimizer, DEVICE)
    torch.cuda.set_sync_debug_mode("default")
else:
    print("no GPU here: torch.cuda.set_sync_debug_mode has nothing to watch")

# %% [markdown]
# ### Balise 4 · Remove them · about 8 min
#
# Make `hesitant_step` flow: the same step, nothing in it waits. What has no wait in it is given. Yours are the lines that
# hesitated, each with a question:
#
# - **copies**: how do they go to the device without anybody waiting?
# - **the shift**, a number between -0.2 and 0.2 an image from `torch.rand`: where is it drawn?
# - **the loss**, a mean over the images whose label is not -1: who leaves the others out, if not a mask?
# - **the length of the gradients**, and gradients longer than `MAX_NORM` shortened to it: who decides that, if not an `if`?
# - **the right answers**: can an image with label -1 be among them at all?
#
# Loss, right answers and length are returned as tensors of shape `()`, on the device. The batch comes in pinned memory.
# About 6 lines.
#
# <details><summary>Hint</summary>
#
# `non_blocking=True`; `device=device`; `F.cross_entropy` has an `ignore_index`; `torch.nn.utils.clip_grad_norm_` shortens and
# returns the length before, reading no value.
# </details>


# %% tags=["balise-4"]
def flowing_step(model, images, labels, optimizer, device):
    """One step that never waits; images with label -1 do not count. Returns loss, right answers, norm: tensors ()."""
    # BEGIN SOLUTION
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    shift = 0.4 * torch.rand(len(images), device=device) - 0.2
    # END SOLUTION
    logits = model(images + shift[:, None, None, None])
    # BEGIN SOLUTION
    loss = F.cross_entropy(logits, labels, ignore_index=-1)
    # END SOLUTION
    optimizer.zero_grad()
    loss.backward()
    # BEGIN SOLUTION
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    # END SOLUTION
    optimizer.step()
    # BEGIN SOLUTION
    correct = (logits.argmax(dim=1) == labels).sum()
    # END SOLUTION
    return loss.detach(), correct, norm


# %%
tp.check(4, flowing_step)

# %%
print(find_waits(flowing_step), "are left")

# %% [markdown]
# ## How busy is the device?

# %% [markdown]
# ### Balise 5 · The busy part of the device, and its gaps · further · about 11 min
#
# Now the formula of the beginning, $|\bigcup_i [b_i, e_i]| / T$. Kernels overlap, on several streams, so lengths may not simply be
# added. What overlaps counts **once**:
#
# ```
# stream 7    |--kernel--|      |---kernel---|
# stream 20        |----copy----|                 |-copy-|
# union       |------------------------------|    |------|
#             first                          gap       last
# ```
#
# Given, from a Chrome trace (times in microseconds): `first` and `last`, the begin and end of the recorded steps, and `work`,
# the device's events, each with a begin `"ts"` and a length `"dur"`. Work before or after the steps counts only as far as it
# lies between `first` and `last`.
#
# Find `gaps`, the list of all `(begin, end)` between `first` and `last` in which the device does nothing, and `idle`,
# their sum. There may be a gap at the very beginning, at the very end, or nothing but a gap. About 7 lines.
#
# <details><summary>Hint</summary>
#
# Cut each event to `first` and `last`, sort by begin, and walk through with the end of what is busy so far. An interval that
# begins later leaves a gap; one that ends earlier changes nothing. An empty one at `last` closes the list.
# </details>


# %% tags=["balise-5"]
def device_busy(trace):
    """(part of the window in which the device works, gaps [(begin, end)] in microseconds, longest first)."""
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
# **Your** run, as it was recorded above, with its four longest gaps (shaded). Without a GPU the processor is the device, and
# its operators are what works: what is left is Python and loading.


# %%
def of_operators(trace):
    """The trace of a processor, its operators in the place of kernels; one inside another counts once, as kernels do."""
    place = {"cat": "kernel", "args": {"lane": "operators"}}
    return {"traceEvents": [e | place if e.get("cat") == "cpu_op" else e for e in trace["traceEvents"]]}


own = trace if DEVICE.type == "cuda" else of_operators(trace)
busy, gaps = device_busy(own)
for begin, end in gaps[:4]:
    print(f"a gap of {(end - begin) / 1000:6.2f} ms, at its start the processor is in: {label_at(trace, begin / 1000)}")
if DEVICE.type == "cuda":
    recorded.note(NAME, "busy", {"as found": busy})

# %% jupyter={"source_hidden": true}
pretended = generated("hesitant", steps=4)
figure, panels = plt.subplots(2, 1, figsize=(9, 4.2), layout="constrained")
draw(panels[0], own, f"your run, recorded here on {DEVICE}: busy {busy:.0%}", gaps=gaps[:4])
its_busy, its_gaps = device_busy(pretended)
draw(panels[1], pretended, f"for comparison, hesitant (made by arithmetic): busy {its_busy:.0%}", gaps=its_gaps[:7])
panels[1].set_xlabel("time (ms)")
legend(figure, "loading", "forward", "backward", "optimizer", "wait", "kernel", "gpu_memcpy")
plt.show()
found = recorded.load(NAME, "busy")
print(f"recorded on {recorded.where(NAME)}: busy {found['as found']:.0%}" if found else "No figures of a GPU yet.")

# %% [markdown]
# A busy device is not yet a well-used one: a kernel that occupies a single SM counts as busy. But a device that is not
# busy cannot be well used, and above the beginning of each gap stands what the processor did instead.
#
# This profiler sees its own process. **Nsight Systems** looks from outside: all processes and threads of a node, what the
# operating system does with them, CUDA calls, kernels, copies, NCCL and counters of the GPU, on one clock. Ask it when the gap's
# reason is not in your process. (Not run here; it needs an NVIDIA GPU: `nsys profile --trace=cuda,nvtx,osrt
# --capture-range=cudaProfilerApi python train.py`, with `torch.cuda.profiler.start()` and `stop()` around some steps, labels by
# `torch.cuda.nvtx.range(…)`.)

# %% [markdown]
# ## Three slow loops
#
# A is the contrast of the beginning. B computes a validation loss, C trains. Each does its job, and each ails in a way of its
# own. Their code is in closed cells: **leave them closed**. A profile of each, at two sizes, must do.


# %% tags=["setup"]
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


# %% tags=["setup"]
small = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
some = [(torch.randn(8, 3, 8, 8, device=DEVICE), torch.randint(10, (8,), device=DEVICE)) for _ in range(8)]
# operators that compute nothing
DULL = {"as_strided", "as_strided_", "empty", "empty_like", "empty_strided", "resize_", "fill_", "copy_", "_to_copy", "to",
        "detach", "resolve_conj", "unsqueeze", "select", "conv2d", "_convolution", "cat", "narrow"}  # fmt: skip


def symptoms(run):
    """A profile of run(): the calls of its operators, and KiB that stay allocated beside the result."""
    was_on = torch.is_anomaly_enabled()
    run()  # warm up
    with profile(profile_memory=True) as profiler:
        result = run()
    torch.autograd.set_detect_anomaly(was_on)
    rows = profiler.key_averages()
    held = sum(row.self_cpu_memory_usage + row.self_device_memory_usage for row in rows) - result.nbytes
    names = ((row.key.removeprefix("aten::"), row.count) for row in rows if row.key.startswith("aten::"))
    return Counter({name: calls for name, calls in names if name not in DULL}), held / 1024


# %%
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
        print(f"{name}: {held:.0f} and {more:.0f} KiB stay allocated. Operators, and their calls:")
        print("   " + ", ".join(f"{operator} {few[operator]} and {calls}" for operator, calls in many.most_common(9)))


table(slow_a, slow_b, slow_c)

# %% [markdown]
# ### Balise 6 · Name the ailment, and mend it · further · about 10 min
#
# **First** `diagnosis()`: `{"A": …, "B": …, "C": …}`, each one of `AILMENTS`, from what is printed above. What grows with the
# input, what does not? What should be there, what should not? Beware of C: a value is read there, but who reads it, and what
# for? The check judges the names first. **Then** open the cells and mend, with the same results and no new ailment.
#
# About 7 lines in all.
#
# <details><summary>What the mended loops must do (with it you know the names: not before your diagnosis)</summary>
#
# - A: `images` `(b, c, h, w)`, `contrast` `(b,)`. Each channel of each image is changed about its own mean, then limited to ±3. The
#   number of operators depends on no size;
# - B: nobody calls backward here, so autograd has nothing to record (a value read in each round would be a new ailment);
# - C: `train_through`, with the debugging off, also if somebody switched it on *before* the call; afterwards it is as it
#   was, `check_nan` too.
# </details>
#
# <details><summary>Hint</summary>
#
# What is not equal to itself is a NaN. A: `mean(dim=…, keepdim=True)` keeps the dimensions that it averages over, with size 1; a
# factor an image has to have the shape `(b, 1, 1, 1)`. B: two context managers switch recording off. C: the switch is a global
# one; `set_detect_anomaly` is a function and a context manager.
# </details>


# %% tags=["balise-6"]
def diagnosis():
    """The ailment of each loop: {"A": one of AILMENTS, "B": …, "C": …}."""
    # BEGIN SOLUTION
    return {"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}
    # END SOLUTION


def mended_a(images, contrast):
    """slow_a, mended: images (b, c, h, w), contrast (b,) -> (b, c, h, w)."""
    # BEGIN SOLUTION
    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)
    # END SOLUTION


def mended_b(model, batches):
    """slow_b, mended: the mean loss, a tensor ()."""
    model.eval()
    # BEGIN SOLUTION
    with torch.no_grad():
        losses = [F.cross_entropy(model(images), labels) for images, labels in batches]
    # END SOLUTION
    return torch.stack(losses).mean()


def mended_c(model, batches, optimizer):
    """slow_c, mended: the loss of each batch, a tensor (n,)."""
    # BEGIN SOLUTION
    with torch.autograd.set_detect_anomaly(False):
        return train_through(model, batches, optimizer)
    # END SOLUTION


# %%
tp.check(6, diagnosis, mended_a, mended_b, mended_c)

# %%
table(mended_a, mended_b, mended_c)

# %% [markdown]
# ## The checklist
#
# The usual suspects, and where this series practises each. Go through them *after* a profile, not in its stead: an item that
# takes 1 % of your step can gain 1 %.
#
# | item | practised in |
# |---|---|
# | load and augment asynchronously | 05, balises 4 and 6 |
# | no gradients in validation; no debugging in a real run | here, balise 6 |
# | mixed precision; channels_last; sizes that fill tiles | 02; 03 |
# | create tensors on the device; no needless waits | 01; here, balises 3 and 4 |
# | one operator in place of many; fused ones | here, balise 6; 06; 07 |
# | **no bias before a batch norm** | here, balise 7 |
# | **the longest batch first; the autotuner** | here, balise 8 |
# | data parallelism that overlaps; equal work on all ranks | 08, 09 |

# %% [markdown]
# ### Balise 7 · No bias before a batch norm · further · about 7 min
#
# A batch norm subtracts the mean over the batch, and a constant that was added before goes with it:
#
# $$(x + b) - \overline{(x + b)} = x - \bar x$$
#
# So the bias is read, added, differentiated (a sum over all pixels) and updated for nothing. `without_bias` takes it out of each
# convolution, and each linear layer on `(n, features)`, that is directly followed by a batch norm. Finding these pairs is given. Yours is what happens
# to a pair: the model must compute the same afterwards, in training, where the formula holds, **and in eval mode**. There the
# batch norm subtracts a stored mean, `norm.running_mean` (`None` if it keeps none). What did it learn while the bias was there?
# About 3 lines.
#
# <details><summary>Hint</summary>
#
# It learnt the mean of $x + b$: the bias is in it. It is a buffer, no parameter: `layer.bias.detach()`. Setting `layer.bias = None`
# takes a parameter out.
# </details>


# %% tags=["balise-7"]
def without_bias(model):
    """Take the biases out that a batch norm undoes, in every nn.Sequential of `model`; returns it, changed in place."""
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

# %% [markdown]
# torchvision's ResNets are built so. Is that true of all its networks? The convolutions of two of them:


# %%
def biases(layers):
    convolutions = [m for m in layers.modules() if isinstance(m, nn.Conv2d)]
    return f"{sum(c.bias is not None for c in convolutions)} of {len(convolutions)} convolutions have a bias"


vgg = models.vgg.make_layers(models.vgg.cfgs["A"], batch_norm=True)
print(f"ResNet-18: {biases(models.resnet18())}")
print(f"VGG-11 with batch norm: {biases(vgg)}")
images = torch.randn(4, 3, 32, 32)
with torch.no_grad():
    expected = vgg.eval()(images)
    difference = (without_bias(vgg)(images) - expected).abs().max().item()
print(
    f"after your function: {biases(vgg)}; largest difference {difference:.1e}, largest value {expected.abs().max():.1e}"
)

# %% [markdown]
# What does a bias cost? Its gradient is a sum over all images and pixels: the gradient of the layer's output is read once
# more. One layer, forward and backward, on this machine:


# %%
def block(bias):
    layers = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()).to(DEVICE)
    layers = layers if bias else without_bias(layers)
    images = torch.randn(BATCH, 32, 16, 16, device=DEVICE)
    return lambda: layers(images).sum().backward()


candidates = {"without bias": block(False), "with bias": block(True)}
print(f"read for the gradient of the bias: {measure.human_bytes(4 * BATCH * 64 * 16 * 16)} a step")
measure.race(candidates, repeats=25, device=DEVICE)

# %% [markdown]
# One of the small items: with a convolution beside it, it may drown in the spread. It also costs nothing to have.
#
# ## Shapes that change
#
# Batches are not always alike: sentences, recordings, images of any size.
#
# - PyTorch keeps freed device memory in blocks and uses a block again for what fits into it. A batch longer than all
#   before fits nowhere: new memory is reserved, while the old blocks lie idle. PyTorch can give back only what is
#   wholly free, and the device stops for it. Hence runs that fail with "out of memory" after an hour. The cure: let the
#   longest batch come **first**. (Or, set before the start, `PYTORCH_ALLOC_CONF=expandable_segments:True`: then a
#   block can grow.)
# - cuDNN has several algorithms for a convolution. With `torch.backends.cudnn.benchmark = True` it tries several at the
#   first sight of **each new shape**, and then uses the best.

# %% [markdown]
# ### Balise 8 · The longest batch first, and does the autotuner pay? · further · about 9 min
#
# `reserve(model, batch_of, lengths)` runs before the training: memory is reserved for the longest batch, by really
# using it. `batch_of(length)` makes a batch `(inputs, labels)`; the loss is the mean cross-entropy. What has to run so
# that *all* memory of a step is asked for? And nobody must notice afterwards. Given is that buffers, such as the
# statistics of batch norms, come back. Left for you: the random numbers (the processor's and the device's), which
# `batch_of` and dropout use, and the gradients (`None` as before).
#
# `autotuner_saves(shapes, search, usual, best)`: the seconds that the autotuner saves in a run, negative if it costs. `shapes`
# are those of the run's batches in their order, `search` the seconds to try all algorithms for one shape, before its first step, `usual` and `best`
# the seconds of a step without and with it.
#
# About 5 lines in all.
#
# <details><summary>Hint</summary>
#
# Without a backward pass there are no gradients, and under `no_grad` no activations are kept. `torch.random.fork_rng()`
# puts the random numbers back. `torch.cuda.empty_cache()` would give all of it back.
# </details>


# %% tags=["balise-8"]
def reserve(model, batch_of, lengths):
    """Forward and backward once on a batch of the longest length; leaves no trace but reserved memory."""
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
    """Seconds that the autotuner saves in a run over batches of these shapes; negative if it costs."""
    # BEGIN SOLUTION
    return len(shapes) * (usual - best) - len(set(shapes)) * search
    # END SOLUTION


# %%
tp.check(8, reserve, autotuner_saves)

# %% [markdown]
# A **model** of an allocator without expandable segments, not a measurement: a request takes the smallest free block that is large enough, or a new
# one is reserved. A network of six layers, lengths drawn at random.


# %%
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


# %% jupyter={"source_hidden": true}
lengths = torch.randint(40, 513, (60,), generator=torch.Generator().manual_seed(2)).tolist()
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.step(range(1, 61), reserved(lengths), where="post", color="#D55E00", label="as they come")
first = reserved([max(lengths), *lengths])[1:]
axes.step(range(1, 61), first, where="post", color="#0072B2", label="the longest first")
axes.set(xlabel="step", ylabel="reserved (MiB)", title="What a model of an allocator reserves", ylim=(0, None))
axes.legend(frameon=False, ncols=2)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# And the autotuner, with **your** function: an *estimate* for an epoch of 10,000 steps that take 100 ms, if trying the
# algorithms takes 2 s a shape and the best ones save 10 % (both assumed; they depend on network and card).

# %%
drawn = torch.Generator().manual_seed(3)
many = torch.randint(40, 513, (10_000,), generator=drawn).tolist()
epochs = {
    "images of one size, drop_last=True": [(128, 224)] * 10_000,
    "images of one size, a smaller last batch": [(128, 224)] * 9_999 + [(61, 224)],
    "recordings of any length": [(128, n) for n in many],
    "padded to multiples of 64": [(128, -(-n // 64) * 64) for n in many],
}
for name, shapes in epochs.items():
    saved = autotuner_saves(shapes, search=2.0, usual=0.1, best=0.09)
    print(f"{name:<42}{len(set(shapes)):>5} shapes {saved:>8,.0f} s saved in an epoch (estimate)")

# %% [markdown]
# Measured, where there is a GPU:


# %%
def convolutions(tuned):
    layers = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]).to(DEVICE)
    images = torch.randn(BATCH, 64, 56, 56, device=DEVICE)

    def run():
        torch.backends.cudnn.benchmark = tuned
        layers(images).sum().backward()

    return run


if DEVICE.type == "cuda":
    result = measure.race({"autotuner on": convolutions(True), "off": convolutions(False)}, repeats=10, warmup=5)
    recorded.note(NAME, "autotuner", result.medians)
    torch.backends.cudnn.benchmark = False
else:
    result = "no GPU here: the autotuner is cuDNN's"
result

# %% [markdown]
# ## Measured again
#
# The training run with your pieces in place of the ailing ones: no wait, no tiny operators, no debugging. Guess first.

# %%
gain = tp.predict("How many times as many images a second does the run with your step train, on this machine?", ...)


# %%
def your_step(model, images, labels, optimizer, device):
    images = images.to(device, non_blocking=True)
    contrast = 0.8 + 0.4 * torch.rand(len(images), device=device)
    return flowing_step(model, mended_a(images, contrast), labels, optimizer, device)


after = training_run.run("your step", your_step, model=Network())
print(f"your step: {after.images_per_second:,.1f} images/s")

# %% [markdown]
# And once more as it was found, so that the two stand side by side: a machine is not equally fast all day.

# %%
before = training_run.run("as found", newcomer_step, model=Network())
gains.keep(NAME, "no waits, no tiny operators, no debugging", before, after)
gain.shows(
    after.images_per_second / before.images_per_second,
    "× {:.2f}",
    "A CPU has no queue to run ahead of: only work that is no longer done counts there. On a GPU it is the waits too.",
)
report.compare([before, after])

# %% [markdown]
# And where there is a queue? `hesitant_step` and yours on a **modelled** card, with a ResNet-50 of 224 pixels in bfloat16: the
# processor starts each operation there, and stands still wherever a value is read.

# %%
steps = {"hesitant_step": hesitant_step, "your flowing_step": flowing_step}
worth.table(steps, makes=worth.Mixed, batches=(16,))

# %%
worth.table({"as found": newcomer_step, "your step": your_step}, makes=worth.Mixed, keep=NAME)

# %% [markdown]
# With 16 images the processor is the slower side, so what counts is how many operations it starts: `hesitant_step`
# takes a norm for each gradient, yours one call for all. Waits cost little here, and most where both sides are equally
# fast. In the second table tiny operators and the search for a NaN weigh as well.

# %%
gains.table()

# %% [markdown]
# Read the row of this work with care. What it gains was lost by what this notebook had added: **the run is no faster than
# the works before left it**, and the next work does not go on from here.
#
# ## Race · further
#
# The steps in turn on one batch, and beside them the step of `training_run` that has none of the extras: how much do they
# still cost?

# %%
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
# ## TensorBoard · further
#
# Curves of many runs beside each other are what TensorBoard is good at. A run writes scalars with a `SummaryWriter`; one
# call starts the server. On a shared machine, mind who else can look: this one listens on the machine itself only
# (127.0.0.1), below a secret path, and ends with the notebook.

# %%
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    print("TensorBoard is not installed: pip install tensorboard")
else:
    for record in (before, after):
        with SummaryWriter(FOLDER / "board" / record.name) as writer:
            for step, (loss, times) in enumerate(zip(record.losses, record.steps)):
                writer.add_scalar("loss", loss, step)
                writer.add_scalar("step time (ms)", 1000 * times["total"], step)

# %%
board = tensorboard.start(FOLDER / "board")

# %%
if board.up:
    status, page = board.visit()
    print(f"asked for the page: HTTP {status}, title {page.partition('<title>')[2].partition('</title>')[0]!r}")
    status, runs = board.visit("data/runs")
    print(f"asked for the runs: HTTP {status}, {runs}")

# %%
board.show()

# %% [markdown]
# ## Past this machine · further
#
# From which batch on is the device the slower one? Starting a kernel takes some microseconds, but that is the least of it:
# Python runs through the modules, autocast casts the weights of each layer, a gradient graph is built. NVIDIA has published
# how long the **forward pass** of a ResNet-50 takes on a V100 in mixed precision (DeepLearningExamples, ResNet50 v1.5 for
# PyTorch, "Inference performance results"):

# %%
published = planner.RESNET50_FORWARD_SECONDS
print("batch            " + "".join(f"{batch:7}" for batch in published))
print("forward pass (ms)" + "".join(f"{1000 * seconds:7.1f}" for seconds in published.values()))
processor = published[1]  # with so little for the GPU to do, this is what the processor takes
for card in CARDS:
    least = processor * 3 * card.resnet50_mixed  # the forward pass is a third of a step's arithmetic
    print(f"estimate: {card.name} below a batch of {least:4.0f} images a processor as slow as that one is what decides")

# %% [markdown]
# From 1 to 16 images hardly anything changes: sixteen times the work, and the processor decides. From 64 on, the time
# goes with the batch. The faster the card, the later that begins. Below that batch a mended wait gains little: the
# device is done first anyway. There one needs fewer, larger kernels (compilation), or a queue that is recorded once and
# replayed (CUDA graphs).

# %%
board.stop()
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>In a profile on a GPU, <code>aten::item</code> takes 60 % of the processor's time. Is reading a number so slow?</summary>
#
# No. The processor waits there until the device has done all that was queued before. Take it out, and the wait moves to the
# next place where a value is needed; with none left, the processor runs ahead.
# </details>
#
# <details><summary>The device is 98 % busy, and the step is still far from the peak. How can that be?</summary>
#
# Busy only says that some kernel runs. It may be bound by memory, fill few of the SMs, or compute in float32. The roofline
# is the next thing to look at.
# </details>
#
# <details><summary>The profile shows that the optimizer takes 4 % of the step. How much can a fused optimizer gain at most?</summary>
#
# A factor 1 / (1 - 0.04) = 1.04, if it took no time at all. Look for the larger part first.
# </details>
#
# ## To remember
#
# Measure, then change one thing, then measure again. A schedule keeps a profile small, labels make it readable, self time
# says who really works, and the union of the device's intervals says whether it works at all. Waits hide in harmless lines,
# and a tool finds them faster than an eye. Next: **the data loader**, the usual reason for the longest gap.
