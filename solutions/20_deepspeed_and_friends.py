# %% [markdown] tags=["slide"]
# # DeepSpeed and friends: one training, four engines · about 110 min, core 40
#
# The scripts that you will open after this course call DeepSpeed, Accelerate or Lightning Fabric. Here you port the
# training of a small Llama to each of them, and see what each does without being asked.
#
# **What you will gain.** With one line of configuration (ZeRO), a rank holds fewer **bytes**. With 1-bit Adam, which
# you write, it sends fewer **bytes** in a step. You measure both, and the planner *estimates* them for 7 billion
# parameters on 64 ranks.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import copy
import dataclasses
import difflib
import inspect
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss

tp = course.open("20_deepspeed_and_friends")
tp

# %% jupyter={"source_hidden": true}
SEVEN, MANY = 6_738_415_616, 64
kinds = ("a copy each (DDP)", "ZeRO 1", "ZeRO 2", "ZeRO 3")
states = [(kind, planner.state_bytes(SEVEN, MANY, stage).total / 1e9) for stage, kind in enumerate(kinds)]
report.table({"estimate": "{}", "GB held by a rank": "{:.1f}"}, states)
links = [(rate, planner.Link(latency=20e-6, bandwidth=rate * 1e9 / 8)) for rate in (10, 100)]
waits = [(rate, *(planner.all_reduce(SEVEN * size, MANY, link) for size in (4, 1 / 8))) for rate, link in links]
print()
report.table({"estimate, Gb/s a rank": "{}", "gradients of 32 bits": "{:.1f} s", "of 1 bit": "{:.2f} s"}, waits)

# %% [markdown]
# The three libraries come with the extra `frameworks`. Without them, balises that need one can't be judged, and cells
# show recorded figures.

# %% tags=["setup"] jupyter={"source_hidden": true}
WORK = "20_deepspeed_and_friends"
FULL = scale() == "full"
TEXT = data.code_text()  # the source of Python's standard library, as tokens
CONFIG = LlamaConfig(TEXT.vocab_size, width=256 if FULL else 64, heads=4, layers=4 if FULL else 2, max_length=32)
TOKENS = TEXT.train[300_000:400_000].clone()  # all that travels to the ranks
RANKS, MICRO, ACCUMULATION = 2, 2, 2
BATCH = RANKS * MICRO * ACCUMULATION  # samples of a step, all ranks together
STEPS = 8
RATE, DECAY, MAX_NORM = 1e-3, 0.1, 0.5  # AdamW's, and the norm to which gradients are clipped


# %% tags=["setup"] jupyter={"source_hidden": true}
def make_model():
    """The Llama of this work, the same on all ranks."""
    torch.manual_seed(0)
    return Llama(CONFIG).to(launch.device())


def make_optimizer(model):
    """AdamW for all of its parameters."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def micro_batches(step):
    """This rank's share of the step's BATCH samples: ACCUMULATION tensors (MICRO, length + 1)."""
    whole = data.batch_of_text(TOKENS, BATCH, CONFIG.max_length + 1, seed=step)
    n, me = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return whole.chunk(n)[me].to(launch.device()).split(MICRO)


# %% [markdown] tags=["slide"]
# ## The idea
#
# All four engines do the same arithmetic. With $N$ ranks and $k$ micro-batches, the gradient of a step is a mean,
# clipped by its norm over *all* parameters:
#
# $$g \;=\; \frac{1}{N k} \sum_{r=1}^{N} \sum_{j=1}^{k} \nabla L_{r,j}, \qquad \hat g \;=\; g \cdot \min\Big(1, \frac{c}{\lVert g \rVert_2}\Big)$$
#
# They differ in *who writes which part of it*. If a part is wrong, the loss usually still looks plausible.

# %% tags=["slide"] jupyter={"source_hidden": true}
ROWS = [
    "launch, process group",
    "share of the data",
    "mean over micro-batches",
    "when gradients travel",
    "mean over ranks",
]
ROWS += ["clipping", "learning rate", "who holds the states", "precision", "saving"]
OWNERS = {
    "ours (DDP)": "you you you you lib you you you you you",
    "Fabric": "lib lib you you lib you you lib lib lib",
    "Accelerate": "lib lib lib lib lib you you lib lib lib",
    "DeepSpeed": "lib you lib lib lib file file file file lib",
}
COLOURS = {"you": "#D55E00", "lib": "#56B4E9", "file": "#009E73"}
_, axes = plt.subplots(figsize=(8.5, 3.9), layout="constrained")
for x, owners in enumerate(OWNERS.values()):
    for y, owner in enumerate(owners.split()):
        axes.add_patch(plt.Rectangle((x + 0.04, -y - 0.92), 0.92, 0.84, color=COLOURS[owner]))
        word = {"you": "your line", "lib": "the library", "file": "the configuration"}[owner]
        axes.text(x + 0.5, -y - 0.5, word, ha="center", va="center", color="white", fontsize=9)
axes.set(xlim=(0, 4), ylim=(-len(ROWS), 0), xticks=[k + 0.5 for k in range(4)], xticklabels=OWNERS)
axes.set(yticks=[-k - 0.5 for k in range(len(ROWS))], yticklabels=ROWS)
axes.xaxis.tick_top()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
axes.set_title("One step of data parallelism in four ways: who writes what", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# ## The baseline, measured first
#
# Our own loop uses DDP. It is a **generator**: each `next` runs one step and returns its loss, so one function measures
# every port. The *peak* is the most bytes that a rank's tensors take.


# %% tags=["setup"]
def train_ours():
    """Our loop of 08 and 14: DDP, gradients travel only at the last micro-batch. Yields each step's loss on this rank."""
    model = DDP(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        losses = []
        for k, tokens in enumerate(micro_batches(step), 1):
            with contextlib.nullcontext() if k == ACCUMULATION else model.no_sync():
                loss = language_loss(model, tokens)
                (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).mean()


# %% tags=["setup"] jupyter={"source_hidden": true}
def measured(train, *args):
    """On a rank: losses (mean over ranks), median seconds of a step, peak bytes, names and bytes of a step's messages."""
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    warnings.simplefilter("ignore")
    run, seconds = iter(train(*args)), []
    with measure.ShardBytes() as live:
        losses = [next(run), next(run)]  # DDP rebuilds its buckets in the second
        live.reset_peak()
        with measure.Communications() as log:
            losses.append(next(run))
    for _ in range(STEPS - 3):
        dist.barrier()
        start = time.perf_counter()
        losses.append(next(run))
        seconds.append(time.perf_counter() - start)
    losses = torch.stack([torch.as_tensor(loss, dtype=torch.float64) for loss in losses])
    dist.all_reduce(losses)
    sent = [(entry["name"], entry["bytes"]) for entry in log.entries() if entry["kind"] != "phase"]
    found = {"losses": (losses / dist.get_world_size()).tolist(), "peak": live.peak, "sent": sent}
    return found | {"seconds": sorted(seconds)[len(seconds) // 2]}


def compared(*names):
    """A line for each of these runs: what `measured` found."""
    heads = {"": "{}", "loss, first": "{:.4f}", "last": "{:.4f}", "a step": measure.human_seconds}
    heads |= {"peak": measure.human_bytes, "messages": "{}", "bytes sent": measure.human_bytes}
    rows = [(name, found[name]) for name in names if name in found]
    report.table(heads, [
        (name, row["losses"][0], row["losses"][-1], row["seconds"], row["peak"], len(row["sent"]), bytes_sent(row))
        for name, row in rows
    ])  # fmt: skip


def bytes_sent(row):
    return sum(size for _, size in row["sent"])


found = {}

# %%
found["ours (DDP)"] = launch.ranks(measured, train_ours, n=RANKS, timeout=60)[0]
compared("ours (DDP)")

# %% [markdown]
# Every port must reproduce these losses.
#
# ### Balise 1 · The arithmetic of batches · further · about 14 min
#
# A step moves the weights once, after `batch` samples. Each rank takes `accumulation` **micro-batches** of `micro`
# samples in turn, so only the activations of `micro` samples are in memory at a time:
#
# $$\text{batch} \;=\; \text{micro} \times \text{accumulation} \times \text{ranks}$$
#
# **`batch_sizes`** returns `batch`, `micro` and `accumulation`. Two of them decide the third; with `batch` or `micro`
# alone, `accumulation` is 1. First write three numbers. `unit` is the number of ranks, times `micro` and `accumulation`
# if given. `batch` is one unit if it isn't given. `most` is how many units fit in the batch: at least 1, and 1 if
# `micro` and `accumulation` are both given. In the result, `most` replaces the missing number.
#
# **`from_words`** does the same from a library's own words, which its docstring lists. Write `micro`. With
# `split_batches`, return early.
#
# 4 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `unit = n_ranks * (micro or 1) * (accumulation or 1)`, and the missing number is `batch // unit`, at least 1. With
# `split_batches` you know how many samples all ranks take in one forward: `batch` and `accumulation`, but not `micro`.
# </details>


# %% tags=["balise-1"]
def batch_sizes(n_ranks, batch=None, micro=None, accumulation=None):
    """(batch, micro, accumulation) of a step, from those that are given; ValueError if they contradict each other."""
    if batch is None and micro is None:
        raise ValueError("give the samples of a step (batch) or of one forward on one rank (micro)")
    if any(number is not None and number < 1 for number in (n_ranks, batch, micro, accumulation)):
        raise ValueError("ranks, batch, micro and accumulation are 1 or more")
    # BEGIN SOLUTION
    unit = n_ranks * (micro or 1) * (accumulation or 1)
    batch = batch or unit
    most = 1 if micro and accumulation else max(1, batch // unit)
    # END SOLUTION
    if batch != most * unit:
        fits = {most * unit} if micro and accumulation or batch < unit else {most * unit, (most + 1) * unit}
        raise ValueError(f"a batch of {batch} does not divide evenly: {' or '.join(map(str, sorted(fits)))} would")
    # BEGIN SOLUTION
    return batch, micro or most, accumulation or (most if micro else 1)
    # END SOLUTION


def from_words(library, words, n_ranks):
    """(batch, micro, accumulation) of a run described in the words of a library; ValueError if they do not fit.

    "deepspeed": train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: batch, micro, accumulation.
    "transformers": per_device_train_batch_size (8 if not given) is micro; gradient_accumulation_steps (1 if not given).
    "accelerate": batch_size of the DataLoader, which is always given, is micro. With split_batches=True it counts the
        samples of one forward on all ranks together. gradient_accumulation_steps (1 if not given).
    "fabric": batch_size is micro. The loop accumulates; every says how many micro-batches (1 if not given).
    """
    if library == "deepspeed":
        keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        return batch_sizes(n_ranks, *map(words.get, keys))
    accumulation = words.get("every" if library == "fabric" else "gradient_accumulation_steps", 1)
    # BEGIN SOLUTION
    if words.get("split_batches"):
        return batch_sizes(n_ranks, words["batch_size"] * accumulation, None, accumulation)
    micro = words.get("per_device_train_batch_size", 8) if library == "transformers" else words["batch_size"]
    # END SOLUTION
    return batch_sizes(n_ranks, None, micro, accumulation)


# %%
tp.check(1, batch_sizes, from_words)

# %% jupyter={"source_hidden": true}
WORDS = {
    "deepspeed": {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4},
    "transformers": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "accelerate": {"batch_size": 256, "split_batches": True, "gradient_accumulation_steps": 4},
    "fabric": {"batch_size": 4, "every": 4},
}
for ranks in (64, 32):
    print(f"on {ranks} ranks          batch  micro  accumulation")
    for library, words in WORDS.items():
        try:
            print(f"  {library:<14}", "{:>8} {:>6} {:>13}".format(*from_words(library, words, ranks)))
        except ValueError as error:
            print(f"  {library:<14} {error}")

# %% [markdown]
# With the same files on half of the ranks, two libraries keep the batch. The other two silently halve it, but not
# the learning rate.
#
# ### Balise 2 · A configuration for DeepSpeed · further · about 10 min
#
# `deepspeed.initialize(model=…, optimizer=…, config=…)` wraps a model in an **engine**. A dictionary tells it what to
# do, but some defaults are surprising, and an unknown key is silently ignored. So the only proof of a configuration is
# what the engine does with it.
#
# **`deepspeed_config(plan)`** returns the dictionary. Its docstring explains the plan, and most of the code is given.
# Write the two parts with the numbers: `rates`, the parameters of the schedule, and `zero`, which says what is cut and
# sent. At stage 3, *no* weight may stay whole between steps. About 4 lines.
#
# <details><summary>Hint</summary>
#
# - `rates`: `warmup_max_lr`, `warmup_num_steps`, and `total_num_steps`, which includes the warm-up.
# - `zero`: `stage`, `reduce_bucket_size` (500 million by default), `stage3_param_persistence_threshold` (tensors with
#   at most this many numbers aren't cut; 100,000 by default), and, only with offload, `offload_optimizer: {device:
#   "cpu"}`.
# </details>

# %% tags=["setup"] jupyter={"source_hidden": true}
OURS = {
    "zero_allow_untested_optimizer": True,  # ZeRO with any optimizer of PyTorch's
    "zero_force_ds_cpu_optimizer": False,  # on the CPU too, where DeepSpeed would otherwise compile its own
}


# %% tags=["balise-2"]
def deepspeed_config(plan):
    """DeepSpeed's configuration for a plan: a dictionary of plain numbers, words and dictionaries.

    plan["batch"], plan["micro"]: samples of a step on all RANKS ranks; of one forward on one rank.
    "stage": ZeRO 0 to 3. "max_norm": clip the gradient to this norm; None: never clip.
    "precision": "float32", or "bfloat16": computes with bfloat16 weights; the optimizer keeps float32 ones.
    "rate", "warmup", "total": the learning rate grows linearly from 0 to rate in warmup steps, then falls linearly
        to 0 at step total.
    "offload": the optimizer's states and its step are on the CPU, the weights are not.
    "bucket": from stage 1 on, gradients of several tensors share a message of at most this many numbers.
    """
    # BEGIN SOLUTION
    rates = {"warmup_max_lr": plan["rate"], "warmup_num_steps": plan["warmup"], "total_num_steps": plan["total"]}
    zero = {"stage": plan["stage"], "reduce_bucket_size": plan["bucket"], "stage3_param_persistence_threshold": 0}
    if plan["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    # END SOLUTION
    # clipping: 0.0 means never, and the default is 1.0; the warm-up is logarithmic by default
    return {
        **OURS,
        "train_batch_size": plan["batch"],
        "train_micro_batch_size_per_gpu": plan["micro"],
        "gradient_clipping": plan["max_norm"] or 0.0,
        "bf16": {"enabled": plan["precision"] == "bfloat16"},
        "scheduler": {"type": "WarmupDecayLR", "params": {**rates, "warmup_type": "linear"}},
        "zero_optimization": zero,
    }


# %%
tp.check(2, deepspeed_config)

# %% [markdown]
# ### Balise 3 · The engine's loop · about 16 min
#
# **`engine_step`** makes one step. `pieces` are this rank's micro-batches, as many as the engine accumulates.
# `engine(tokens)` is the model's forward. `engine.backward(loss)` divides by the number of micro-batches and sends
# gradients when the stage requires it. Call `engine.step()` **after every backward**: it counts the calls, but clips,
# steps and zeroes only at the last. Write what happens to each piece (3 lines).
#
# A DeepSpeed checkpoint is cut for the number of ranks that wrote it. A **universal checkpoint** has a file for each
# parameter and state, which any number of ranks can cut again. All ranks call both functions:
#
# - **`save`**: when every rank has written, *one* calls `to_universal(folder, "saved")`. No rank may return before the
#   files are complete (3 lines).
# - **`resume`**: make the engine with `make_engine(model, optimizer, config)` and one more key, `"checkpoint":
#   {"load_universal": True}`. Don't change the given `config` (1 line).
#
# <details><summary>Hint</summary>
#
# `language_loss(engine, tokens)` calls the engine like a model. At `dist.barrier()` all ranks wait for each other.
# `{**config, key: value}` is a new dictionary.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
def make_engine(model, optimizer, config):
    """DeepSpeed's engine on this rank, without its log and without its minute of compiling."""
    return frameworks.quiet_deepspeed().initialize(model=model, optimizer=optimizer, config=config)[0]


def to_universal(folder, tag):
    """Write folder/universal from folder/tag, for any number of ranks. (In a shell: python -m deepspeed.checkpoint.ds_to_universal.)"""
    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    options |= {"input_folder": f"{folder}/{tag}", "output_folder": f"{folder}/universal", "inject_missing_state": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(SimpleNamespace(**options))


# %% tags=["balise-3"]
def engine_step(engine, pieces):
    """One step of DeepSpeed's engine on this rank's micro-batches. Returns their mean loss, a tensor without a graph."""
    losses = []
    for tokens in pieces:
        # BEGIN SOLUTION
        loss = language_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        # END SOLUTION
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def save(engine, folder):
    """Save all that a run needs, as folder/universal, for any number of ranks. All ranks call it."""
    engine.save_checkpoint(folder, tag="saved")
    # BEGIN SOLUTION
    if dist.get_rank() == 0:
        to_universal(folder, "saved")
    dist.barrier()
    # END SOLUTION


def resume(model, optimizer, config, folder):
    """An engine that goes on from folder/universal, on any number of ranks. All ranks call it."""
    # BEGIN SOLUTION
    engine = make_engine(model, optimizer, {**config, "checkpoint": {"load_universal": True}})
    # END SOLUTION
    engine.load_checkpoint(folder, tag="universal")
    return engine


# %%
tp.check(3, engine_step, save, resume)

# %% [markdown]
# Our loop sends gradients once a step, after the last of `ACCUMULATION` micro-batches.

# %%
more = tp.predict("By what factor does DeepSpeed at stage 2 send more gradient bytes than our loop?", ...)


# %% tags=["setup"] jupyter={"source_hidden": true}
def train_with_deepspeed(stage):
    """The port to DeepSpeed. Yields each step's loss on this rank."""
    plan = {"batch": BATCH, "micro": MICRO, "stage": stage, "precision": "float32", "max_norm": MAX_NORM}
    plan |= {"rate": RATE, "warmup": 2, "total": STEPS, "offload": False, "bucket": CONFIG.n_parameters // 2}
    config = {key: value for key, value in deepspeed_config(plan).items() if key != "scheduler"}  # our loop has none
    model = make_model()
    engine = make_engine(model, make_optimizer(model), config)
    for step in range(STEPS):
        yield engine_step(engine, micro_batches(step))


def all_stages():
    """On a rank: {name: what was measured}."""
    return {f"DeepSpeed, stage {stage}": measured(train_with_deepspeed, stage) for stage in range(4)}


def gradients_sent(row):
    """Bytes of gradients that a rank gives to collectives in a step; messages of up to 64 bytes aren't gradients."""
    return sum(size for name, size in row["sent"] if name in ("all_reduce", "reduce_scatter") and size > 64)


# %%
if frameworks.here("deepspeed"):
    rows = launch.ranks(all_stages, n=RANKS, timeout=150)[0]
    recorded.note(WORK, "stages", rows, on_cpu=True)
else:
    rows = recorded.instead("deepspeed", WORK, "stages") or {}
    rows = {name: row | {"recorded": True} for name, row in rows.items()}  # their sizes may be others
found.update(rows)
compared("ours (DDP)", *rows)
if rows and not (FULL and any("recorded" in row for row in rows.values())):
    times = gradients_sent(found["DeepSpeed, stage 2"]) / gradients_sent(found["ours (DDP)"])
    why = (
        "A rank that keeps only a share of the gradients can't accumulate the rest: it sends them after every backward."
    )
    more.shows(times, "× {:.2f}", why)

# %% [markdown]
# Stages 2 and 3 send gradients after **every** micro-batch; stage 3 also gathers weights for each. Unless memory is
# short, take stage 1. The peak says little about stage 3 here: it keeps gathered weights up to a limit
# (`stage3_max_live_parameters`) that is larger than this model.
#
# <details><summary>What if even a share of the states doesn't fit?</summary>
#
# **ZeRO-Infinity** (arXiv 2104.07857) moves states, and weights if necessary, to the host's memory or to NVMe drives
# (`"offload_optimizer": {"device": "nvme", "nvme_path": …}`). Each rank moves only its own share, over its own link, so
# the bandwidths add up. What it costs for 7 billion parameters on a node of 8 H100s, as an *estimate*:
#
# | states are in | travels in a step, bytes a parameter | GB/s a card, at most | time |
# |---|---|---|---|
# | the card's memory | 24: the states, read and written | 3,350 | 0.006 s |
# | the host's memory, where the CPU runs AdamW | 4: gradients out, weights back, in 16 bits | 63 | 0.05 s |
# | NVMe drives, by way of the host | 24 more | 16 | 1.3 s |
#
# The bandwidths are the data sheet's and PCIe 5's: 16 lanes to each card, and 4 to each card's drive.
# </details>
#
# ### Balise 4 · A fused optimizer · further · about 11 min
#
# For a GPU, the CPU has to prepare the launch of every operator. A plain loop launches about ten for **each** tensor. A
# *fused* optimizer updates many tensors at once: `torch._foreach_mul_(tensors, 0.9)` multiplies a list in place, in one
# call.
#
# Write AdamW with calls like this one. `means` and `squares` are the averages $m$ and $v$. Change all but the gradients
# **in place**. Hold only one more list: `roots`. In step $t$, with rate $\eta$ and decay $\lambda$:
#
# $$w \leftarrow (1 - \eta\lambda)\,w, \quad m \leftarrow \beta_1 m + (1-\beta_1)\,g, \quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,
# \quad w \leftarrow w - \eta\,\frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}$$
#
# `roots` is given: the denominator times `correction` $= \sqrt{1-\beta_2^t}$. Multiply the rate by this number instead
# of dividing the tensors. Write the five lines around it.
#
# <details><summary>Hint</summary>
#
# `_foreach_mul_(x, number)`, `_foreach_lerp_(x, y, number)`, `_foreach_addcmul_(x, y, z, number)` and
# `_foreach_addcdiv_(x, y, z, number)` change the list x as `mul_`, `lerp_`, … change one tensor.
# </details>


# %% tags=["balise-4"]
def fused_adamw(weights, gradients, means, squares, step, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1):
    """One step of AdamW on four lists of tensors: changes all but the gradients in place."""
    correction = (1 - beta2**step) ** 0.5
    # BEGIN SOLUTION
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    # END SOLUTION
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, epsilon * correction)
    # BEGIN SOLUTION
    torch._foreach_addcdiv_(weights, means, roots, -lr * correction / (1 - beta1**step))
    # END SOLUTION


# %%
tp.check(4, fused_adamw)

# %% [markdown]
# ## Race: operators and time · further
#
# Four versions of AdamW update the same weights, on one thread: yours, and three of PyTorch's. `foreach=False` is the
# loop, `foreach=True` does what you do, and `fused=True` is one kernel that reads each number once.


# %% tags=["setup"] jupyter={"source_hidden": true}
def tensor_sets():
    """{name: shapes}"""
    config = LlamaConfig(2048, width=128, heads=8, kv_heads=2, layers=4, max_length=64)
    llama = [tuple(p.shape) for p in Llama(config).parameters()]
    return {"Llama of 14": llama, "300 small": [(16, 16)] * 300, "8 large": [(512, 512)] * 8}


def steps_of(shapes, device):
    """{name: a step of AdamW on tensors of these shapes}; yours first."""
    ours = [[torch.full(shape, value, device=device) for shape in shapes] for value in (1.0, 0.1, 0.0, 0.0)]
    count = itertools.count(1)
    steps = {"yours": lambda: fused_adamw(*ours, next(count), 1e-3)}
    for name, how in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        weights = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
        for p in weights:
            p.grad = torch.full_like(p, 0.1)
        steps[name] = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1, **how).step
    return steps


# %% tags=["setup"] jupyter={"source_hidden": true}
class Launches(TorchDispatchMode):
    """Counts the operators that compute."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten" and func.overloadpacket.__name__ not in (
            "_local_scalar_dense",
            "lift_fresh",
        )
        return func(*args, **(kwargs or {}))


# %% jupyter={"source_hidden": true}
def race_optimizers(rounds=5):
    """{set of tensors: (seconds, operators), each {name: number}}"""
    device, raced = "cuda" if torch.cuda.is_available() else "cpu", {}
    for name, shapes in tensor_sets().items():
        steps, operators = steps_of(shapes, device), {}
        for way, step in steps.items():
            step()  # PyTorch's make their states here
            with Launches() as launches:
                step()
            operators[way] = launches.count
        raced[name] = measure.race(steps, repeats=rounds, warmup=1, device=device).medians, operators
    return raced


threads = torch.get_num_threads()
torch.set_num_threads(1)
optimizers = race_optimizers()
torch.set_num_threads(threads)
ways = ("yours", "loop", "foreach", "fused")
print("operators in a step")
report.table(
    {"tensors": "{}"} | dict.fromkeys(ways, "{}"),
    [(name, *(n[w] for w in ways)) for name, (_, n) in optimizers.items()],
)
print("\ntime of a step")
rows = [(name, *(seconds[w] for w in ways)) for name, (seconds, _) in optimizers.items()]
report.table({"tensors": "{}"} | dict.fromkeys(ways, measure.human_seconds), rows)

# %% [markdown]
# Your step calls 7 operators for any number of tensors, the loop nine for each. With many small tensors, calls
# dominate, and lists win. With a few large ones, *memory traffic* does.
#
# ## One bit for each number · further
#
# Data parallelism sends 32 bits for each parameter. 1-bit Adam sends one, the **sign**. A block of $b$ numbers travels
# as $b$ bits and one scale, the mean of the absolute values:
#
# $$x \;\approx\; s\,\operatorname{sign}(x), \qquad s = \tfrac1b \textstyle\sum_i |x_i|$$
#
# Two ideas make it converge (Tang and others, 2021). **Error feedback**: what a step loses, $e = x -
# s\,\operatorname{sign}(x)$, is added to what is sent next time. **Frozen variance**: $m / \sqrt v$ is not linear in
# the gradient, so errors in $v$ would never cancel. After a warm-up with plain Adam, the denominator is frozen, and
# only the mean $m$ is exchanged.
#
# The numbers are cut into one **row** per rank. As a *worker*, a rank sends its version of every row. As the *server*
# of one row, it averages what all workers sent for it. Both compress, and both keep an error:

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
STAGES = [
    (0, "m + worker error", "32 bits"),
    (2.3, "signs, scales", "1 bit"),
    (4.6, "mean of rows\n+ server error", "32 bits"),
]
for x, text, bits in [*STAGES, (6.9, "signs, scales", "1 bit")]:
    for rank in (0, 1):
        axes.add_patch(
            plt.Rectangle((x, 1.2 - 1.2 * rank), 1.6, 0.9, color="#0072B2" if bits == "1 bit" else "#56B4E9")
        )
        axes.text(
            x + 0.8,
            1.65 - 1.2 * rank,
            f"{text}\nrank {rank}, {bits}",
            ha="center",
            va="center",
            fontsize=7.5,
            color="white",
        )
for x, text in ((1.65, "compress"), (3.95, "all-to-all"), (6.25, "compress"), (8.55, "all-gather")):
    crossing = text.startswith("all")
    for rank in (0, 1):
        for other in (0, 1) if crossing else (rank,):
            axes.annotate(
                "",
                (x + 0.6, 1.65 - 1.2 * other),
                (x, 1.65 - 1.2 * rank),
                arrowprops={"arrowstyle": "->", "color": "#555555"},
            )
    axes.text(x + 0.3, 2.3, text, ha="center", fontsize=9)
axes.text(9.25, 1.05, "the same\nmean on\nall ranks", va="center", fontsize=9)
axes.set(xlim=(-0.1, 10.2), ylim=(-0.2, 2.6))
axes.axis("off")
axes.set_title("One exchange: two compressions, each with an error that stays on its rank", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# All numbers are one tensor `(N, k, b)`: N rows, k blocks a row, b numbers a block. You are given `pack` and `unpack`,
# `swap` (row s goes to rank s; row s of the result came from rank s), and `gather`.


# %% tags=["setup"] jupyter={"source_hidden": true}
def pack(positive):
    """Booleans (…, b) as bytes (…, b / 8), uint8."""
    return torch.from_numpy(np.packbits(positive.cpu().numpy(), axis=-1)).to(positive.device)


def unpack(packed):
    """Bytes (…, b / 8) as booleans (…, b)."""
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy(), axis=-1)).bool().to(packed.device)


def swap(rows):
    """(N, …) -> (N, …): row s is sent to rank s; row s of the result is what rank s sent here."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous())
    return received


def gather(mine):
    """(…) -> (N, …): what each rank gave, in the order of ranks, on every rank."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.stack(parts)


# %% tags=["setup"]
class OneBitState:
    """What a rank keeps. weights (N, k, b): those of the model itself, not a copy."""

    def __init__(self, weights):
        self.steps, self.weights = 0, weights
        self.mean, self.squares, self.root, self.worker_error = (torch.zeros_like(weights) for _ in range(4))
        self.server_error = torch.zeros_like(weights[0])


# %% [markdown]
# ### Balise 5 · 1-bit Adam · further · about 15 min
#
# - `compress(x)` gives the signs of `x`, packed, and the scales.
# - `expand(bits, scales)` gives plus or minus the scale.
# - `one_bit_mean` gives roughly the mean of all ranks' `x`, the same on all ranks. The server's compression and the
#   gathering are given. Write the worker's part: add its error to get what it `wanted` to send, compress that, and
#   store what is lost as the new error, **in place**. Then `wanted` becomes what the server wants to send: the mean of
#   what it received, plus its own error. Only bits and scales travel.
# - `one_bit_adam`: one step with this rank's gradient. The warm-up is given. After it, `squares` and `root` no longer
#   change. Each rank mixes its own gradient into the common mean, and the exchange averages the results.
#
# 1, 1, 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `unpack(bits)` is 1 and 0; you need 1 and −1. `x.abs().mean(-1, keepdim=True)`. A worker loses what it *wanted* to
# send minus what its bits say. Call `swap` twice, for bits and for scales. `error.copy_(…)` writes into an existing
# tensor. `state.mean.lerp(gradient, 1 - beta1)` is a new tensor.
# </details>


# %% tags=["balise-5", "slide-mistake=weights-rebound"]
def compress(x):
    """x (…, b) -> (packed signs, uint8 (…, b / 8); scales (…, 1))."""
    # BEGIN SOLUTION
    return pack(x >= 0), x.abs().mean(-1, keepdim=True)
    # END SOLUTION


def expand(bits, scales):
    """Packed signs (…, b / 8) and scales (…, 1) -> (…, b)."""
    # BEGIN SOLUTION
    return torch.where(unpack(bits), scales, -scales)
    # END SOLUTION


def one_bit_mean(x, worker_error, server_error):
    """Roughly the mean of all ranks' x (N, k, b), from signs and scales alone; updates both errors in place."""
    # BEGIN SOLUTION
    wanted = x + worker_error
    bits, scales = compress(wanted)
    worker_error.copy_(wanted - expand(bits, scales))
    wanted = expand(swap(bits), swap(scales)).mean(0) + server_error
    # END SOLUTION
    bits, scales = compress(wanted)
    server_error.copy_(wanted - expand(bits, scales))
    return expand(gather(bits), gather(scales))


def one_bit_adam(state, gradient, lr, warmup, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """One step with this rank's gradient (N, k, b): Adam for `warmup` steps, then 1-bit Adam."""
    state.steps += 1
    if state.steps <= warmup:
        dist.all_reduce(gradient)
        gradient = gradient / dist.get_world_size()
        state.mean.lerp_(gradient, 1 - beta1)
        state.squares.lerp_(gradient**2, 1 - beta2)
        state.root = (state.squares / (1 - beta2**state.steps)).sqrt() + epsilon
    else:
        # BEGIN SOLUTION
        mixed = state.mean.lerp(gradient, 1 - beta1)
        state.mean = one_bit_mean(mixed, state.worker_error, state.server_error)
        # END SOLUTION
    state.weights.addcdiv_(state.mean, state.root, value=-lr / (1 - beta1**state.steps))


# %%
tp.check(5, compress, expand, one_bit_mean, one_bit_adam)

# %% [markdown]
# ## Does it converge? · further
#
# A smaller Llama trains on 2 ranks, with three seeds. After 20 steps of Adam, training continues in three ways: with
# Adam, with your 1-bit Adam, and with 1-bit Adam without feedback. The last one zeroes its errors after each step.

# %% tags=["setup"] jupyter={"source_hidden": true}
BLOCK = 256  # numbers that share a scale


def in_rows(numbers, block=BLOCK):
    """A new tensor (N, k, b) with these numbers (n,), then zeros."""
    n = dist.get_world_size()
    rows = numbers.new_zeros(n, -(-len(numbers) // (n * block)), block)
    rows.flatten()[: len(numbers)] = numbers
    return rows


def flatten_model(model):
    """(weights, gradients), (N, k, b) each: the model's parameters and their gradients become views of them."""
    parameters = [*model.parameters()]
    weights = in_rows(torch.cat([p.detach().flatten() for p in parameters]))
    gradients = torch.zeros_like(weights)
    flat, sizes = (weights.flatten(), gradients.flatten()), [p.numel() for p in parameters]
    for p, w, g in zip(parameters, *(one[: sum(sizes)].split(sizes) for one in flat)):
        p.data, p.grad = w.view_as(p), g.view_as(p)
    return weights, gradients


# %% tags=["setup"] jupyter={"source_hidden": true}
WARMUP, COMPRESSED, ONE_BIT_RATE, ONE_BIT_BATCH = 20, 60, 3e-3, 4
WAYS = ("Adam", "1-bit Adam", "without feedback")


def one_bit_step(model, gradients, state, seed, warmup, feedback=True):
    """A step on this rank's samples. Returns the loss, the mean over the ranks."""
    gradients.zero_()
    place = 10_000 * seed + 2 * state.steps + dist.get_rank()
    tokens = data.batch_of_text(TOKENS, ONE_BIT_BATCH, CONFIG.max_length + 1, place)
    loss = language_loss(model, tokens.to(gradients.device))
    loss.backward()
    with torch.no_grad():
        one_bit_adam(state, gradients, ONE_BIT_RATE, warmup)
    if not feedback:
        state.worker_error.zero_()
        state.server_error.zero_()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# %% tags=["setup"] jupyter={"source_hidden": true}
def one_bit_training(seed):
    """On a rank: {way: losses of all steps, means over the ranks}. The ways share their warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Llama(dataclasses.replace(CONFIG, layers=1, tied_head=True)).to(launch.device())
    weights, gradients = flatten_model(model)
    start = OneBitState(weights)
    found = {"warm-up": [one_bit_step(model, gradients, start, seed, WARMUP) for _ in range(WARMUP)]}
    after = weights.clone()
    for way in WAYS:
        weights.copy_(after)
        state = copy.deepcopy(start)
        state.weights = weights
        warmup, feedback = WARMUP + COMPRESSED * (way == "Adam"), way != "without feedback"
        found[way] = [one_bit_step(model, gradients, state, seed, warmup, feedback) for _ in range(COMPRESSED)]
    return found


def one_bit_trainings(seeds):
    """On a rank: the training for each seed."""
    return [one_bit_training(seed) for seed in seeds]


# %% jupyter={"source_hidden": true}
def draw_trainings(trainings):
    _, axes = plt.subplots(figsize=(8.5, 3), layout="constrained")
    for way, colour in zip(WAYS, ("#0072B2", "#009E73", "#D55E00")):
        for seed, losses in enumerate(trainings):
            smooth = np.convolve(losses["warm-up"] + losses[way], np.ones(10) / 10, "valid")
            axes.plot(range(9, 9 + len(smooth)), smooth, color=colour, lw=1.2, label=None if seed else way)
    axes.axvline(WARMUP, color="#555555", linestyle=":")
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", ylim=(None, 7.8))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("What does error feedback change? Three seeds, 2 ranks", loc="left", fontsize=11)
    plt.show()


# %% tags=["slide"] jupyter={"source_hidden": true}
trainings = launch.ranks(one_bit_trainings, range(3), n=2, timeout=200)[0]
rows = []
for seed, losses in enumerate(trainings):
    before, (adam, *others) = np.mean(losses["warm-up"][-10:]), [np.mean(losses[way][-15:]) for way in WAYS]
    rows.append((seed, before, adam, *others, *((before - loss) / (before - adam) for loss in others)))
heads = {"seed": "{}"} | dict.fromkeys(("loss after warm-up", *WAYS), "{:.2f}")
report.table(heads | dict.fromkeys(("of Adam's gain: 1 bit", "no feedback"), "{:.0%}"), rows)
draw_trainings(trainings)

# %% [markdown]
# With feedback the model goes on learning. Without it, learning slows or stops: in a block, all means get the same
# magnitude, and nothing corrects that.
#
# ## What 1-bit Adam sends · further
#
# For each number the exchange sends $1/8$ byte and its share of a scale, $4/b$ bytes. That is $\frac{1}{32} +
# \frac{1}{b}$ of the usual 4 bytes. Your exchange against gloo's all-reduce, on this machine:


# %% tags=["setup"] jupyter={"source_hidden": true}
def exchanges(counts, rounds=5):
    """On a rank: [(numbers, bytes sent by a ring's all-reduce, bytes sent by yours, ratio, seconds of both)]"""
    torch.set_num_threads(1)
    n, found = dist.get_world_size(), []
    for count in counts:
        x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
        x = in_rows(x.to(launch.device()))
        errors = torch.zeros_like(x), torch.zeros_like(x[0])
        with measure.Communications() as log:
            one_bit_mean(x, *errors)
        factor = {"all_to_all": (n - 1) / n, "all_gather": n - 1}
        ways = {
            "one bit": lambda x=x, errors=errors: one_bit_mean(x, *errors),
            "all-reduce": lambda x=x: dist.all_reduce(x.clone()),
        }
        times = measure.race(ways, repeats=rounds, warmup=1, calls=1, device=x.device).medians
        sent = sum(factor[entry["name"]] * entry["bytes"] for entry in log.entries())
        floats = 2 * (n - 1) / n * 4 * x.numel()
        found.append((count, floats, sent, floats / sent, times["all-reduce"], times["one bit"]))
    return found


# %%
heads = {
    "numbers": "{:,}",
    "sent as float32": measure.human_bytes,
    "by 1 bit": measure.human_bytes,
    "fewer": "× {:.1f}",
}
heads |= {"all-reduce takes": measure.human_seconds, "your exchange": measure.human_seconds}
report.table(heads, launch.ranks(exchanges, (10**6, 4 * 10**6), n=2, timeout=100)[0])

# %% [markdown]
# It sends 28 times fewer bytes, but takes longer here: loopback is fast, and signs and errors cost CPU time. Between
# nodes, bytes dominate. The planner *estimates* how long 340 million numbers (BERT-large) take between 64 nodes:

# %% jupyter={"source_hidden": true}
NUMBERS, rows = 340e6, []
for gigabits in (10, 100):
    link = planner.Link(20e-6, gigabits * 1e9 / 8)
    half = (1 / 8 + 4 / BLOCK) * NUMBERS  # bytes of each half of the exchange
    bits = planner.reduce_scatter(half, 64, link) + planner.all_gather(half, 64, link)
    rows.append((gigabits, *(planner.all_reduce(size * NUMBERS, 64, link) for size in (4, 2)), bits))
report.table({"estimate, Gb/s a node": "{}"} | dict.fromkeys(("32 bits", "16 bits", "1 bit"), "{:.3f} s"), rows)

# %% [markdown]
# DeepSpeed removed its own 1-bit Adam in 2026 (pull request 8490).
#
# <details><summary>Can it be less than a bit?</summary>
#
# With **0/1 Adam** (arXiv 2202.06009), ranks take several steps of their own between two exchanges. It needs no long
# warm-up at full precision either: it updates the variance again and again, but more and more rarely. DeepSpeed's
# [tutorial](https://deepspeed.ai/tutorials/zero-one-adam) reports up to 26 times fewer bytes for BERT-large.
# </details>
#
# ## Accelerate and Fabric: the loop stays yours
#
# With Accelerate (Hugging Face) and Fabric (Lightning) you keep your loop, and hand over the *objects* that it works
# on. The objects that come back do more: the model is inside DDP, and the loader gives each rank its share. You port
# this loop twice.


# %% tags=["setup"]
def train_alone(model, optimizer, loader, accumulation, max_norm, cpu=True):
    """One epoch on one process. Yields each step's loss, the mean over its micro-batches; the last step may have fewer."""
    losses = []
    for i, tokens in enumerate(loader, 1):
        loss = language_loss(model, tokens)
        (loss / accumulation).backward()
        losses.append(loss.detach())
        if i % accumulation == 0 or i == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield torch.stack(losses).mean()
            losses = []


# %% tags=["setup"] jupyter={"source_hidden": true}
def ported(train, micro=MICRO):
    """On a rank: `train`, a loop like `train_alone`, on the samples of all STEPS steps in order."""
    model, steps = make_model(), range(STEPS)
    samples = [data.batch_of_text(TOKENS, BATCH, CONFIG.max_length + 1, seed=step) for step in steps]
    loader = torch.utils.data.DataLoader(torch.cat(samples).to(launch.device()), batch_size=micro)
    on_cpu = launch.device().type == "cpu"
    return train(model, make_optimizer(model), loader, ACCUMULATION, MAX_NORM, cpu=on_cpu)


def changed_lines(train):
    """How many lines of `train`'s body aren't in `train_alone`; indentation and docstrings don't count."""
    bodies = (inspect.getsource(each).split('"""')[-1].splitlines() for each in (train_alone, train))
    old, new = (Counter(map(str.strip, body)) for body in bodies)
    return sum(count for line, count in (new - old).items() if line)


# %%
found["one process"] = launch.ranks(measured, ported, train_alone, RANKS * MICRO, n=1, timeout=60)[0]
compared("one process")

# %% [markdown]
# ### Balise 6 · Accelerate · about 14 min
#
# Accelerate finds out once how many processes there are. **`train_with_accelerate`** is `train_alone` for any number of
# processes.
#
# Write what is prepared, the backward, and what happens when a step is due. 8 lines, some as in `train_alone`.
#
# **Write all of it:** `tp.open_task(6)` gives you only the name and the docstring. Make two ranks train like one.
#
# <details><summary>Hint</summary>
#
# Before a step is due, the gradient is this rank's alone, and unfinished. `yield` the mean of `losses`, and begin a new
# list.
# </details>


# %% tags=["balise-6"]
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    """One epoch, on each rank. Yields each step's loss on this rank, a tensor (): the mean over its micro-batches.

    All ranks get the same model, optimizer and loader, a DataLoader of tokens (b, s + 1), and share its micro-batches.
    `language_loss(model, tokens)` is the mean loss () of one, and its backward comes before the next forward. A step
    adds up the gradients of loss / accumulation. It is due after `accumulation` micro-batches, and at the loader's end.
    Only its last backward sends gradients. Clip the finished gradient, the mean over all ranks, to the norm max_norm;
    then step, and clear the gradients.

    Import Accelerator from accelerate here. Accelerator(cpu=cpu, gradient_accumulation_steps=accumulation) finds the
    ranks. Its prepare(model, optimizer, loader) returns the three that the loop uses from here on. `with
    accelerator.accumulate(model):` counts a micro-batch; inside, accelerator.sync_gradients is True if a step is due.
    accelerator.backward(loss) divides by `accumulation`. accelerator.clip_grad_norm_(parameters, norm) clips.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=accumulation)
    # BEGIN SOLUTION
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # END SOLUTION
    losses = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = language_loss(model, tokens)
            # BEGIN SOLUTION
            accelerator.backward(loss)
            # END SOLUTION
            losses.append(loss.detach())
            # BEGIN SOLUTION
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                yield torch.stack(losses).mean()
                losses = []
            # END SOLUTION


# %%
tp.check(6, train_with_accelerate)


# %% tags=["setup"] jupyter={"source_hidden": true}
def ours_and_theirs(name, library, train):
    """Train with a port if its library is installed, and show its figures beside one process with the same batches."""
    if frameworks.here(library):
        row = launch.ranks(measured, ported, train, n=RANKS, timeout=90)[0] | {"changed": changed_lines(train)}
        recorded.note(WORK, name, row, on_cpu=True)
        worst = max(abs(a - b) for a, b in zip(row["losses"], found["one process"]["losses"]))
        print(f"{row['changed']} lines changed; losses differ from one process by at most {worst:.1e}")
        assert worst < 1e-3, "not the same training"
        found[name] = row
    elif row := recorded.instead(library, WORK, name):
        print(f"{row['changed']} lines changed")
        found[name] = row | {"recorded": True}  # its sizes may be others
    compared("one process", name)


# %%
ours_and_theirs("Accelerate", "accelerate", train_with_accelerate)

# %% [markdown]
# ### How many processes does the launcher start?
#
# `accelerate launch --num_processes 2 script.py` starts a script on two cards. What happens on a machine without cards?

# %%
processes = tp.predict("How many processes does `accelerate launch --cpu --num_processes 2` start?", ...)

# %% jupyter={"source_hidden": true}
SCRIPT = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

print("Accelerator()         sees processes:", Accelerator().num_processes, flush=True)
AcceleratorState._reset_state(True)
accelerator = Accelerator(cpu=True)
print("Accelerator(cpu=True) sees processes:", accelerator.num_processes, flush=True)
print("of 4 micro-batches it gets:", len(accelerator.prepare(DataLoader(range(8), batch_size=2))), flush=True)
"""
LAUNCHERS = {
    "accelerate launch --cpu --num_processes 2": ("accelerate.commands.launch", "--cpu", "--num_processes=2"),
    "torchrun --nproc-per-node 2": ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
}  # fmt: skip


def from_shells(launchers):
    """{name: lines that the script prints}, started by all launchers at once, with one thread a process, over loopback."""
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | quiet}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        started = {
            name: subprocess.Popen([sys.executable, "-m", *launcher, str(script)], **options)
            for name, launcher in launchers.items()
        }
        said = {name: process.communicate(timeout=120) for name, process in started.items()}
    return {name: out.splitlines() or errors.splitlines()[-3:] for name, (out, errors) in said.items()}


# %% jupyter={"source_hidden": true}
if frameworks.here("accelerate"):
    said = from_shells(LAUNCHERS)
    recorded.note(WORK, "launchers", said, on_cpu=True)
else:
    said = recorded.instead("accelerate", WORK, "launchers") or {}
for name, lines in said.items():
    print(name, *lines, sep="\n    ")
if said:
    started = sum("Accelerator(cpu=True)" in line for line in next(iter(said.values())))
    processes.shows(started, why="Accelerate doesn't warn you.")

# %% [markdown]
# With `--cpu` the launcher starts one process, which takes all micro-batches. `torchrun` starts two processes. Without
# `cpu=True` each looks only for cards, finds none, and would train alone on all data. So print
# `accelerator.num_processes` in the first line of every log.
#
# <details><summary>Why did IDRIS write <code>idr_accelerate</code>?</summary>
#
# `accelerate launch` runs once on each node, and its configuration file says which node this is (`machine_rank`). So a
# job on 16 nodes needed 16 files, and `idr_accelerate` made them itself. A script started by `srun` or `torchrun` needs
# none: each process finds its rank in its environment.
# </details>
#
# ### Balise 7 · Lightning Fabric · further · about 12 min
#
# Fabric hides less than Accelerate: *you* count micro-batches, and say when gradients travel. In return, nothing
# happens that isn't in the loop, and the same loop runs under `strategy="ddp"` and, on cards, `"fsdp"`.
#
# **`train_with_fabric`** does what balise 6 does. Divide each loss by `accumulation`, even in a last step that has
# fewer micro-batches. `due`, true when a step is due, is given. You need:
#
# - `fabric.setup(model, optimizer)` and `fabric.setup_dataloaders(loader)`, which return what the loop uses. Rank $r$
#   of $N$ gets every $N$-th *sample*.
# - `with fabric.no_backward_sync(model, enabled=…):` around forward and backward. While it is enabled, nothing is sent.
# - `fabric.backward(loss)`, which doesn't divide, and `fabric.clip_gradients(model, optimizer, max_norm=…)`.
#
# 6 lines.
#
# <details><summary>Hint</summary>
#
# Enable `no_backward_sync` when a step is *not* due. Divide the loss for backward, but not the one that you keep.
# </details>


# %% tags=["balise-7"]
def train_with_fabric(model, optimizer, loader, accumulation, max_norm, cpu=True):
    """One epoch, on each rank. Yields each step's loss on this rank, the mean over its micro-batches."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu" if cpu else "cuda", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    # BEGIN SOLUTION
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    # END SOLUTION
    losses = []
    for i, tokens in enumerate(loader, 1):
        due = i % accumulation == 0 or i == len(loader)
        # BEGIN SOLUTION
        with fabric.no_backward_sync(model, enabled=not due):
            loss = language_loss(model, tokens)
            fabric.backward(loss / accumulation)
        # END SOLUTION
        losses.append(loss.detach())
        if due:
            # BEGIN SOLUTION
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            # END SOLUTION
            optimizer.step()
            optimizer.zero_grad()
            yield torch.stack(losses).mean()
            losses = []


# %%
tp.check(7, train_with_fabric)

# %%
ours_and_theirs("Fabric", "lightning_fabric", train_with_fabric)

# %% [markdown]
# ## Measured again
#
# All engines train on the same samples, from the same weights. Our loop with `fully_shard`, from 14, holds gradients
# back until the last micro-batch.


# %% tags=["setup"] jupyter={"source_hidden": true}
def train_sharded():
    """Our loop of 14: `fully_shard` by block. Yields each step's loss on this rank."""
    model = make_model()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh(launch.device().type, (dist.get_world_size(),)))
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        losses = []
        for k, tokens in enumerate(micro_batches(step), 1):
            model.set_requires_gradient_sync(k == ACCUMULATION)
            loss = language_loss(model, tokens)
            (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).mean()


# %% tags=["slide"] jupyter={"source_hidden": true}
found["ours (fully_shard)"] = launch.ranks(measured, train_sharded, n=RANKS, timeout=60)[0]
print("measured here" if all(map(frameworks.here, frameworks.NAMES)) else "measured; the libraries' rows are recorded")
stages = [name for name in found if name.startswith("DeepSpeed")]
compared("one process", "ours (DDP)", "ours (fully_shard)", *stages, "Accelerate", "Fabric")
for name, row in found.items():
    apart = max(abs(a - b) for a, b in zip(row["losses"], found["one process"]["losses"]))
    assert apart < 1e-3 or "recorded" in row, f"{name}: not the same training"

# %% [markdown]
# All losses are the same up to rounding. Stage 2 and `fully_shard` hold less at the peak and send more. The seconds show
# a library's Python overhead, not its savings on a card.
#
# ## Beyond this machine: torchtitan and Megatron-LM · further
#
# Both bring their own models, because they cut inside the layers. We ran neither for this course.
#
# - **torchtitan** is PyTorch's reference for pre-training: `fully_shard`, DTensor plans on plain models and pipeline
#   schedules, in one readable loop. Llama 3.1 8B trains 65 % faster on 128 H100s than with an optimised baseline (arXiv
#   2410.06511). With MXFP8 and expert parallelism, a DeepSeek-V3 of 16 billion parameters trains 10 to 25 % faster on
#   B200s ([torchao](https://docs.pytorch.org/ao/main/eager_tutorials/mxfp8_expert_parallel_training.html)). With
#   [torchft](https://github.com/pytorch/torchft), the other replicas go on when one fails.
# - **Megatron-LM** is NVIDIA's library of sliced layers and interleaved schedules. A model of 1,008 billion parameters
#   on 3,072 A100s reaches 52 % of the peak (arXiv 2104.04473). It has expert parallelism and MXFP8 too, and
#   [NVRx](https://nvidia.github.io/nvidia-resiliency-ext/) restarts failed ranks within the job.
#
# If your model fits with ZeRO, stay with the library your scripts use. If it needs tensor or pipeline parallelism, take
# one of these.
#
# ## Three questions
#
# <details><summary>A file says <code>train_batch_size</code> 512 and <code>train_micro_batch_size_per_gpu</code> 4. It was tuned on 32 cards, and now
# there are 24. What happens, and when?</summary>
#
# 512 is not a multiple of 4 × 24 = 96. DeepSpeed rounds down to 5 micro-batches, finds 480 samples and stops, after the
# job has waited in the queue. 480 and 576 would work, but the learning rate was tuned for 512.
# </details>
#
# <details><summary>Training with stage 2 and 32 micro-batches is slower than with stage 1. Memory is not short. Why, and what do you change?</summary>
#
# Stage 2 sends gradients after every micro-batch, 32 times a step; stage 1 sends them once. Take stage 1, or fewer and
# larger micro-batches.
# </details>
#
# <details><summary>A colleague divides the loss by <code>gradient_accumulation_steps</code> before <code>engine.backward</code>. With AdamW the
# curve looks nearly the same, with SGD it doesn't. Why?</summary>
#
# The engine divides once more, so gradients are too small by that factor. Adam divides by their size and hardly
# notices. SGD's step shrinks.
# </details>

# %% [markdown] tags=["slide"]
# ## To remember
#
# Four ways to write one step give the same weights. Micro × accumulation × ranks is the batch, and each library leaves
# a different factor to you. DeepSpeed takes over the step and reads a file; look at what its engine holds and sends.
# From stage 2 on, holding less means sending more. One bit per number is enough if the rounding error is fed back.
# Accelerate and Fabric leave you the loop, and hand back objects that do more.

# %%
tp.progress()
