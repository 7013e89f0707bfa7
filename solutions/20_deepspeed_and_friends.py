# %% [markdown]
# # DeepSpeed and friends: one training, four engines · about 100 min, core 40
#
# After this course you will rarely write a distributed training loop from nothing. You will open somebody's script, and it will call
# DeepSpeed, Accelerate or Lightning Fabric. In the works before, you built by hand what they do. Here one training, a small
# Llama on the source code of Python, is ported to each of them; you write the lines that matter, and look at what each does
# behind them: who holds what, what is sent and when, what it divides, clips and rounds without being asked.
#
# **What you will gain.** Less memory for one line of configuration: that is what these libraries sell. And fewer bytes to send, with
# 1-bit Adam, which DeepSpeed once brought and you will write. The next cell asks the planner what
# both are worth for 7 billion parameters on 64 ranks: an *estimate*, nothing in it was run.

# %% tags=["setup"]
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

# %%
SEVEN, MANY = 6_738_415_616, 64
print(f"estimate: {SEVEN / 1e9:.2f} billion parameters on {MANY} ranks, mixed precision with AdamW")
for stage, word in enumerate(("a copy each (DDP)", "ZeRO 1", "ZeRO 2", "ZeRO 3")):
    held = planner.state_bytes(SEVEN, MANY, stage).total / 1e9
    print(f"  {word:<20} a rank holds {held:6.1f} GB of weights, gradients and states")
for gigabits in (10, 100):
    link = planner.Link(latency=20e-6, bandwidth=gigabits * 1e9 / 8)
    full, bits = (planner.all_reduce(SEVEN * size, MANY, link) for size in (4, 1 / 8))
    print(f"  at {gigabits:>3} Gb/s: gradients of 32 bits are summed in {full:5.1f} s, of 1 bit in {bits:5.2f} s")

# %% [markdown]
# DeepSpeed, Accelerate and Fabric are the extra `frameworks`. Without them, a balise that runs
# one says that it could not judge, cells show what was recorded with them, and balises 1, 4 and 5 are judged as always.

# %% tags=["setup"]
WORK = "20_deepspeed_and_friends"
FULL = scale() == "full"
TEXT = data.code_text()  # the source of Python's standard library, as tokens
CONFIG = LlamaConfig(TEXT.vocab_size, width=256 if FULL else 64, heads=4, layers=4 if FULL else 2, max_length=32)
TOKENS = TEXT.train[300_000:400_000].clone()  # all that travels to the ranks
RANKS, MICRO, ACCUMULATION = 2, 2, 2
BATCH = RANKS * MICRO * ACCUMULATION  # samples of a step, all ranks together
STEPS = 8
RATE, DECAY, MAX_NORM = 1e-3, 0.1, 0.5  # AdamW's, and the norm to which gradients are clipped


# %% tags=["setup"]
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


# %% [markdown]
# ## The idea
#
# All four do the same arithmetic. With $N$ ranks and $k$ micro-batches of $m$ samples each, the gradient of a step is the mean over
# $B = m\,k\,N$ samples, clipped by its norm over *all* parameters:
#
# $$g \;=\; \frac{1}{N k} \sum_{r=1}^{N} \sum_{j=1}^{k} \nabla L_{r,j}, \qquad \hat g \;=\; g \cdot \min\Big(1, \frac{c}{\lVert g \rVert_2}\Big)$$
#
# The optimizer steps once. Where a library differs is *who writes which part of it*: it divides by $k$, or you do; it
# counts micro-batches, or you do; it sends gradients after each of them, or after the last; it clips although nobody asked.
# Losses look plausible with nearly any of these wrong.

# %% jupyter={"source_hidden": true}
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
axes.set_title("Who writes it: one step of data parallelism in four ways", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# ## The baseline: our own loop, measured
#
# The training is a **generator**: each `next` runs one step and gives its loss, the mean over this rank's micro-batches. So
# every port below can be measured by the same function. The *peak* is the most bytes of
# tensors that a rank holds at one time in a step. DDP and DeepSpeed send gradients in **buckets**: many tensors in one message.


# %% tags=["setup"]
def train_ours():
    """Our loop of 08 and 14: DDP, gradients travel at the last micro-batch alone. Yields each step's loss on this rank."""
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


# %% tags=["setup"]
def measured(train, *args):
    """On a rank: losses (mean over ranks), median seconds of a step, peak bytes, names and bytes of a step's messages."""
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    warnings.simplefilter("ignore")
    run, seconds = iter(train(*args)), []
    with measure.ShardBytes() as live:
        losses = [next(run), next(run)]  # DDP arranges its buckets anew in the second
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


def shown(name, row):
    """One line of figures of what `measured` returns; "peak": the most bytes of weights, gradients, states, activations alive on rank 0."""
    size = measure.human_bytes(sum(size for _, size in row["sent"]))
    step, peak = measure.human_seconds(row["seconds"]), measure.human_bytes(row["peak"])
    print(f"{name:<22} loss {row['losses'][0]:.4f} → {row['losses'][-1]:.4f}, step {step:>8}, peak {peak:>8}, ", end="")
    print(f"{len(row['sent']):>3} messages with {size:>8}")


found = {}

# %%
found["ours (DDP)"] = launch.ranks(measured, train_ours, n=RANKS, timeout=60)[0]
print(f"{CONFIG.n_parameters:,} parameters, a step has {BATCH} samples: {RANKS} ranks × {ACCUMULATION} × {MICRO}")
shown("ours (DDP)", found["ours (DDP)"])

# %% [markdown]
# This is what every port has to reproduce: the same losses, to the last digits that float32 keeps.

# %% [markdown]
# ### Balise 1 · The arithmetic of batches · further · about 13 min
#
# A step moves the weights once, after `batch` samples. Each of the `n_ranks` ranks takes `accumulation`
# **micro-batches** of `micro` samples, one after the other, so that activations of `micro` samples alone are in memory:
#
# $$\text{batch} \;=\; \text{micro} \times \text{accumulation} \times \text{ranks}$$
#
# Every library has words of its own for this, and leaves some to you:
#
# | library | its words | what they count |
# |---|---|---|
# | DeepSpeed | `train_batch_size` | samples of a step, all ranks |
# | | `train_micro_batch_size_per_gpu` | samples of one forward on one rank |
# | | `gradient_accumulation_steps` | forwards of a rank in a step |
# | transformers | `per_device_train_batch_size` (if not given: 8) | samples of one forward on one rank |
# | | `gradient_accumulation_steps` (if not given: 1) | forwards of a rank in a step |
# | Accelerate | `batch_size` of the `DataLoader` (here always given) | samples of one forward on one rank; with `split_batches=True`: on all ranks together |
# | | `gradient_accumulation_steps` (if not given: 1) | forwards of a rank in a step |
# | Fabric | `batch_size` of the `DataLoader` (here always given) | samples of one forward on one rank |
# | | none: your loop counts; here `every` (if not given: 1) | forwards of a rank in a step |
#
# **`batch_sizes(n_ranks, batch=None, micro=None, accumulation=None)`** returns all three from those that are given: at
# least one of `batch` and `micro`. Two of the three decide the third; where `batch` or `micro` is given alone,
# `accumulation` is 1. What cannot be is refused, with the numbers that *would* do; that is given. Write the three
# numbers that decide: `unit`, the product of the ranks and of what is given of `micro` and `accumulation`; `batch`, one
# unit where it is not given; and `most`, how many units the batch has, at least 1, which is what the missing number
# becomes (1 where both are given). The last line returns all three.
#
# **`from_words(library, words, n_ranks)`** returns the same for a run of `"deepspeed"`, `"transformers"`,
# `"accelerate"` or `"fabric"`; `words` is a dictionary with words of the table. Write `micro` for all of them: two
# libraries say something else than you would think, and with `split_batches` you return at once, as the last line is for the others.
#
# 4 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `unit = n_ranks * (micro or 1) * (accumulation or 1)`, and what is missing is `batch // unit`, at least 1. Where both are given, nothing is missing: 1. With a
# `DataLoader` that serves all ranks together you know how many samples all of them take in one forward: `batch` and `accumulation`, and not `micro`.
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
        raise ValueError(f"a step of {batch} samples does not come out: {' or '.join(map(str, sorted(fits)))} would")
    # BEGIN SOLUTION
    return batch, micro or most, accumulation or (most if micro else 1)
    # END SOLUTION


def from_words(library, words, n_ranks):
    """(batch, micro, accumulation) of a run described in the words of a library; ValueError if they do not fit."""
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

# %% [markdown]
# DeepSpeed finds contradictions too, in its engine's first second: on a cluster, after the job has waited in the queue. Where numbers are missing, it divides and
# rounds down, and then tells you that numbers are wrong of which you gave only two: `train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 30 != 4 * 3 * 2`.

# %%
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
# The same files on half of the ranks: in the first and the third library the step stays as it is (the third takes
# larger micro-batches, which need more memory), in the two others it becomes half as large without a word, and the
# learning rate does not know.

# %% [markdown]
# ### Balise 2 · A configuration for DeepSpeed · further · about 8 min
#
# `deepspeed.initialize(model=..., optimizer=..., config=...)` wraps a model in an **engine**, and a dictionary (or a JSON file) tells it what
# to do. It has defaults that nobody expects, and an unknown key at its first level is ignored without a word.
# So the only proof of a configuration is what the engine does with it. **`deepspeed_config(plan)`** is the dictionary for
# a `plan`, which has these keys (it is called where there are no ranks, too, so their number is `RANKS`):
#
# | `plan[...]` | what the engine shall do |
# |---|---|
# | `"batch"`, `"micro"` | samples of a step on all ranks, and of one forward on one rank |
# | `"stage"` | ZeRO 0 to 3 |
# | `"precision"` | `"float32"`, or `"bfloat16"`: weights to compute with in bfloat16, the optimizer's in float32 |
# | `"max_norm"` | clip the gradient to this norm; `None`: never clip |
# | `"rate"`, `"warmup"`, `"total"` | the learning rate grows on a straight line from 0 to `rate` in `warmup` steps, then falls on one to 0 at step `total` |
# | `"offload"` | the optimizer's states and its step are on the CPU, the weights are not |
# | `"bucket"` | from stage 1 on, gradients of several tensors travel in one message, a bucket, which has room for so many numbers |
#
# Most of it is given: look which defaults it overrules. Write the two parts in which the numbers stand: `rates`, the parameters of the schedule, and `zero`, what is cut and sent. At stage 3 *no*
# weight shall stay whole between steps.
#
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# - `rates`: `warmup_max_lr`, `warmup_num_steps`, and `total_num_steps`, with those of the warm-up.
# - `zero`: `stage`, `reduce_bucket_size` (500 million, if it is not given), `stage3_param_persistence_threshold` (tensors with no more numbers than that are not cut;
#   if it is not given, 100,000), and, only with offload, `offload_optimizer: {device: "cpu"}`.
# </details>

# %% tags=["setup"]
OURS = {
    "zero_allow_untested_optimizer": True,  # ZeRO with any optimizer of PyTorch's
    "zero_force_ds_cpu_optimizer": False,  # also where it steps on the CPU; else DeepSpeed compiles one of its own
}


# %% tags=["balise-2"]
def deepspeed_config(plan):
    """DeepSpeed's configuration for a plan: a dictionary of plain numbers, words and dictionaries."""
    # BEGIN SOLUTION
    rates = {"warmup_max_lr": plan["rate"], "warmup_num_steps": plan["warmup"], "total_num_steps": plan["total"]}
    zero = {"stage": plan["stage"], "reduce_bucket_size": plan["bucket"], "stage3_param_persistence_threshold": 0}
    if plan["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    # END SOLUTION
    # clipping: 0.0 is never, and 1.0 if it is not given; the warm-up: logarithmic if no type is given
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
# One more key is in every tutorial: `allgather_bucket_size`. DeepSpeed 0.19 reads it and, with today's PyTorch, uses it
# nowhere at stages 1 and 2. And the learning rate begins with *two* steps at 0, since the schedule moves for the first time after the first step, to its own step 0. Neither can be seen in
# the file.


# %% [markdown]
# ### Balise 3 · The engine's loop · about 10 min
#
# **`engine_step(engine, pieces)`** makes one step: `pieces` are this rank's micro-batches, as many as the engine accumulates.
# The engine takes over what you wrote in `train_ours`. `engine(tokens)` is the model's forward, `engine.backward(loss)` divides by the
# number of micro-batches and sends gradients when the stage wants it, and `engine.step()` is called **after every backward**: the
# engine counts, and only at the last micro-batch does it clip, step, and set gradients to zero. Write what happens to each piece.
#
# A checkpoint of DeepSpeed is cut as its ranks were, and cannot be loaded on another number of them. The way out is a **universal checkpoint**: each
# parameter and each of its states in a file of its own, which any number of ranks can cut anew. All ranks call both functions:
#
# - **`save(engine, folder)`**: every rank has written what it holds; now *one* makes it universal, with `to_universal(folder, "saved")` below. When a rank returns, it is all there.
# - **`resume(model, optimizer, config, folder)`**: an engine that goes on from there. Make it with
#   `make_engine(model, optimizer, config)` below, with the further key `"checkpoint": {"load_universal": True}`; leave the given `config` as it is.
#
# 3, 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `language_loss(engine, tokens)` calls the engine like a model. What has all ranks wait for each other is `dist.barrier()`. `{**config, key: value}` is a new dictionary.
# </details>


# %% tags=["setup"]
def make_engine(model, optimizer, config):
    """DeepSpeed's engine on this rank, without its log and without what it would compile for a minute."""
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
# ### What each stage sends
#
# Our loop sends its gradients once a step, after the last of `ACCUMULATION` micro-batches. Guess.

# %%
more = tp.predict("How many times as many bytes of gradients as ours does a rank hand in at DeepSpeed's stage 2?", ...)


# %% tags=["setup"]
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
    """Bytes of gradients that a rank hands in within a step; what is smaller than a norm's weight is none."""
    return sum(size for name, size in row["sent"] if name in ("all_reduce", "reduce_scatter") and size > 64)


# %%
if frameworks.here("deepspeed"):
    rows = launch.ranks(all_stages, n=RANKS, timeout=150)[0]
    recorded.note(WORK, "stages", rows, on_cpu=True)
else:
    rows = recorded.instead("deepspeed", WORK, "stages") or {}
found.update(rows)
for name in ("ours (DDP)", *rows):
    shown(name, found[name])
    times = gradients_sent(found[name]) / gradients_sent(found["ours (DDP)"])
    print(f"{'':<22} of gradients {times:.2f} times as many bytes as ours")
    if name == "DeepSpeed, stage 2":
        more.shows(
            times, "× {:.2f}", "Who keeps only a share has nowhere to add up the rest: it is sent after every backward."
        )

# %% [markdown]
# Stages 0 and 1 send gradients as our loop does; stage 1 gathers the new weights besides. Stages 2 and 3 send them after **every** micro-batch: with 64 of them it would be 64 times. Stage 2
# with accumulation is the most frequent expensive line in a DeepSpeed file: it saves 2 bytes of gradients a parameter beyond stage 1, and
# pays for them with the network. Stage 3 also gathers weights, in forward and in backward, for every micro-batch.
#
# The peak hardly shrinks: with a model as small as this one, logits, buckets and what is gathered weigh as much as what is shared.


# %% [markdown]
# ### Balise 4 · A fused optimizer · further · about 8 min
#
# DeepSpeed's `Adam` is a *fused* one: on a GPU, one launch updates many tensors. A plain loop launches some ten operators for
# **each** tensor, small as it may be, and the GPU waits for the CPU that launches them. PyTorch has operators that take lists:
# `torch._foreach_mul_(tensors, 0.9)` multiplies all tensors of a list in place, in one call.
#
# Write AdamW with them. `weights`, `gradients`, `means` and `squares` are four lists of tensors of equal shapes;
# `means` and `squares` are the averages $m$ and $v$. Change weights, means and squares **in place**, leave the
# gradients as they are. Memory is short where states are kept: at no time may there be more than one further list of
# that size; `roots` is one. In step $t$, with rate $\eta$ and decay $\lambda$:
#
# $$w \leftarrow (1 - \eta\lambda)\,w, \quad m \leftarrow \beta_1 m + (1-\beta_1)\,g, \quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,
# \quad w \leftarrow w - \eta\,\frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}$$
#
# The denominator is given, in `roots`, but times `correction` $= \sqrt{1-\beta_2^t}$: multiply the rate by it, a number, in place of dividing each tensor of the list. Write the five lines around it.
#
# <details><summary>Hint</summary>
#
# `_foreach_mul_(x, number)`, `_foreach_lerp_(x, y, number)`, `_foreach_addcmul_(x, y, z, number)` and `_foreach_addcdiv_(x, y, z, number)` change the list x as
# `mul_`, `lerp_`, … change one tensor.
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
# ## Race: launches and time · further
#
# Four AdamWs update the same weights: yours, and PyTorch's three. `foreach=False` is the loop, `foreach=True` does what
# you do, `fused=True` is one kernel that reads each number once. Three sets of tensors: the Llama of practical work 14, 300 small
# tensors, 8 large ones, on a CPU with one thread. There, nothing is launched on another device. Guess.

# %%
lists = tp.predict("How many times as fast as the loop is yours on 8 large tensors, on this machine?", ...)


# %% tags=["setup"]
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


# %% tags=["setup"]
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


# %%
def race_optimizers(rounds=5):
    """{set of tensors: (milliseconds, operators), each {name: number}}"""
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for name, shapes in tensor_sets().items():
        steps, operators = steps_of(shapes, device), {}
        for way, step in steps.items():
            step()  # torch's make their states here
            with Launches() as launches:
                step()
            operators[way] = launches.count
        times = measure.race(steps, repeats=rounds, warmup=1, device=device).medians
        found[name] = {way: 1e3 * seconds for way, seconds in times.items()}, operators
    return found


threads = torch.get_num_threads()
torch.set_num_threads(1)
optimizers = race_optimizers()
torch.set_num_threads(threads)
print("                   milliseconds a step              | operators")
print("tensors            yours    loop  foreach    fused  | yours  loop  foreach  fused   yours ÷ foreach")
for name, (times, operators) in optimizers.items():
    print(f"{name:<14}", *(f"{one:>8.2f}" for one in times.values()), " |", end="")
    print(*(f"{one:>6}" for one in operators.values()), f"{times['yours'] / times['foreach']:>14.2f}")
large, _ = optimizers["8 large"]
lists.shows(
    large["loop"] / large["yours"], "× {:.2f}", "Few calls gain little where the memory is what takes the time."
)

# %% [markdown]
# Read the table from the right. Your step takes the same few operators for any number of tensors; the loop takes nine for
# each. With many small tensors the calls are the cost, and lists win. With large ones the *memory* is: on a CPU the loop brings a
# tensor into the cache once and does all its operations there, while lists go through all tensors once for each operation. Only
# the kernel that reads each number once has neither cost. On a GPU the calls weigh more, since each is a launch that the CPU must
# prepare; PyTorch takes `foreach` there unless you ask for something else.

# %% [markdown]
# ## One bit for each number · further
#
# Data parallelism sends 32 bits for each parameter. 1-bit Adam sends one: the **sign**. A block of $b$ numbers
# travels as $b$ bits and one scale, the mean of their absolute values:
#
# $$x \;\approx\; s\,\operatorname{sign}(x), \qquad s = \tfrac1b \textstyle\sum_i |x_i|$$
#
# Two ideas make it converge. **Error feedback**: what a step loses, $e = x - s\,\operatorname{sign}(x)$, is kept and added to what
# is sent next time, so nothing is lost for good. And **frozen variance**: $m / \sqrt v$ is not linear in the gradient, so errors in
# $v$ would never cancel. Hence a warm-up of plain Adam, after which the denominator stays as it is and only the mean $m$, which is
# linear, is exchanged (Tang et al. 2021).
#
# The numbers are cut into as many **rows** as there are ranks. Each rank is a *worker*, which sends its version of every row, and also the
# **server** of one row: it takes the mean of what all workers sent of it. Both compress, so both
# lose something and keep an error of their own:

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
axes.set_title("One exchange: two compressions, each with an error that stays where it arose", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# All numbers of the model lie in one tensor `(N, k, b)`: a row for each of the N ranks, k blocks a row, b numbers a block. Given are `pack` and `unpack`,
# `swap` (row s goes to rank s, and row s of the result came from rank s) and `gather`. `OneBitState` is what a rank keeps.


# %% tags=["setup"]
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
# ### Balise 5 · 1-bit Adam · further · about 11 min
#
# - `compress(x)`: `x` (…, b) to its signs, packed, uint8 (…, b / 8), and the scales (…, 1).
# - `expand(bits, scales)`: back to (…, b), plus or minus the scale.
# - `one_bit_mean(x, worker_error, server_error)`: about the mean of all ranks' `x` (N, k, b), the same on all ranks. The server's compression and the gathering
#   are given. Write the worker's: what it `wanted` to send, with its error; what it keeps, **in place**, of what is lost; and what the server wants to send, the mean of what came and its own error. Only bits and scales travel.
# - `one_bit_adam(state, gradient, lr, warmup)`: one step with this rank's gradient (N, k, b). The warm-up is Adam as you know it, and given. After it `squares` and `root` stay: each rank
#   mixes its own gradient into the mean that all have, and the exchange makes of these the new mean of all.
#
# 1, 1, 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `unpack(bits)` is 1 and 0; you need 1 and −1. `x.abs().mean(-1, keepdim=True)`. A worker's loss is what it *wanted* to send less what
# its bits say. `swap` takes bits and scales, one after the other. `error.copy_(…)`
# writes into a tensor that exists. `state.mean.lerp(gradient, 1 - beta1)` is a new tensor.
# </details>


# %% tags=["balise-5"]
def compress(x):
    """x (…, b) -> (signs, packed, uint8 (…, b / 8); scales (…, 1))."""
    # BEGIN SOLUTION
    return pack(x >= 0), x.abs().mean(-1, keepdim=True)
    # END SOLUTION


def expand(bits, scales):
    """Signs, packed, (…, b / 8), and scales (…, 1) -> (…, b)."""
    # BEGIN SOLUTION
    return torch.where(unpack(bits), scales, -scales)
    # END SOLUTION


def one_bit_mean(x, worker_error, server_error):
    """About the mean of all ranks' x (N, k, b), by signs and scales; writes both errors in place."""
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
# The Llama of this work with one layer and a tied head, on 2 ranks that see different samples, three times with other weights and other text. After
# 20 steps of Adam the training goes on in three ways: Adam, your 1-bit Adam, and the same with both errors set to zero after each step.
# (The head is tied so that the vector of every token has a gradient in the warm-up. A weight whose gradients
# were all zero would have a denominator of $\epsilon = 10^{-8}$ alone; bits know no zero, so the first sign that reaches it throws it far away.)


# %% tags=["setup"]
BLOCK = 256  # numbers that share a scale


def in_rows(numbers, block=BLOCK):
    """A new tensor (N, k, b) with these numbers (n,), zeros behind them."""
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


# %% tags=["setup"]
WARMUP, COMPRESSED, ONE_BIT_RATE, ONE_BIT_BATCH = 20, 60, 3e-3, 4
WAYS = ("Adam", "1-bit Adam", "without feedback")


def one_bit_step(model, gradients, state, seed, warmup, feedback=True):
    """A step on this rank's samples. Returns the loss, the mean over the ranks."""
    gradients.zero_()
    place = 10_000 * seed + 2 * state.steps + dist.get_rank()
    loss = language_loss(model, data.batch_of_text(TOKENS, ONE_BIT_BATCH, CONFIG.max_length + 1, place))
    loss.backward()
    with torch.no_grad():
        one_bit_adam(state, gradients, ONE_BIT_RATE, warmup)
    if not feedback:
        state.worker_error.zero_()
        state.server_error.zero_()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# %% tags=["setup"]
def one_bit_training(seed):
    """On a rank: {way: losses of all steps, means over the ranks}. The ways share their warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Llama(dataclasses.replace(CONFIG, layers=1, tied_head=True))
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


# %%
trainings = launch.ranks(one_bit_trainings, range(3), n=2, timeout=200)[0]
print(
    "mean loss      end of warm-up", *(f"{way:>18}" for way in WAYS), "  share of Adam's gain: 1 bit, without feedback"
)
for seed, losses in enumerate(trainings):
    before, (adam, *others) = np.mean(losses["warm-up"][-10:]), [np.mean(losses[way][-15:]) for way in WAYS]
    print(f"seed {seed} {before:>22.2f}", *(f"{loss:>18.2f}" for loss in (adam, *others)), end="     ")
    print(*(f"{(before - loss) / (before - adam):>10.0%}" for loss in others))
draw_trainings(trainings)

# %% [markdown]
# One bit with feedback goes on learning, behind Adam in so short a training; without feedback learning soon stops. A sign makes all
# means of a block equally large. With feedback what was overdone is taken back in the next steps, and on average each weight gets its due.

# %% [markdown]
# ## What a network would gain · further
#
# First the volume. Per number the exchange hands in $1/8$ byte and a share of a scale, $4/b$, where float32 hands in 4 bytes:
#
# $$\frac{1/8 + 4/b}{4} \;=\; \frac{1}{32} + \frac{1}{b}$$
#
# Then time: your exchange against gloo's all-reduce, on this machine's loopback, for one million and four million numbers.


# %% tags=["setup"]
def exchanges(counts, rounds=5):
    """On a rank: {numbers: (bytes sent by a ring's all-reduce, bytes sent by yours, {way: seconds})}"""
    torch.set_num_threads(1)
    n, found = dist.get_world_size(), {}
    for count in counts:
        x = in_rows(torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())))
        errors = torch.zeros_like(x), torch.zeros_like(x[0])
        with measure.Communications() as log:
            one_bit_mean(x, *errors)
        factor = {"all_to_all": (n - 1) / n, "all_gather": n - 1}
        ways = {
            "one bit": lambda x=x, errors=errors: one_bit_mean(x, *errors),
            "all-reduce": lambda x=x: dist.all_reduce(x.clone()),
            "computing": lambda x=x: [
                expand(*compress(part)) for part in (x, x, x[0])
            ],  # what an exchange computes, about
        }
        times = measure.race(ways, repeats=rounds, warmup=1, calls=1, device="cpu").medians
        sent = sum(factor[entry["name"]] * entry["bytes"] for entry in log.entries())
        found[count] = 2 * (n - 1) / n * 4 * x.numel(), sent, times
    return found


# %%
print(f"{1 / 32 + 1 / BLOCK:.4f} is the ratio of bytes by the formula, for blocks of {BLOCK}")
for count, (floats, bits, times) in launch.ranks(exchanges, (10**6, 4 * 10**6), n=2, timeout=100)[0].items():
    print(f"{count / 1e6:.0f} million numbers: a rank sends {floats / 1e6:.2f} MB in float32", end=", ")
    print(f"{bits / 1e6:.3f} MB by 1 bit: ratio {bits / floats:.4f}")
    whole, one_bit, computing = (times[name] for name in ("all-reduce", "one bit", "computing"))
    print(f"   all-reduce {1e3 * whole:.1f} ms, {floats / whole / 1e9:.2f} GB/s", end="; ")
    print(f"one bit {1e3 * one_bit:.1f} ms, about {1e3 * computing:.1f} ms of them computing", end="; ")
    print(f"one bit ÷ all-reduce {one_bit / whole:.2f}")
print(f"for 340 million numbers, one core would compute {340e6 * computing / count:.0f} s at this rate")

# %% [markdown]
# What travels is as small as computed. Whether that is *faster* depends on the network: over loopback bytes cost little, while signs,
# scales and errors cost CPU time. The planner says what the wires alone would need with 64 ranks, for BERT-large,
# 340 million numbers: an estimate, and computing comes on top.

# %%
NUMBERS, LATENCY = 340e6, 20e-6
print("estimate, 64 ranks       all-reduce of 32 bits   of 16 bits   1 bit   32 bits ÷ 1   16 bits ÷ 1")
for gigabits in (10, 100):
    link = planner.Link(LATENCY, gigabits * 1e9 / 8)
    floats, halves = (planner.all_reduce(size * NUMBERS, 64, link) for size in (4, 2))
    half = (1 / 8 + 4 / BLOCK) * NUMBERS  # bytes of each half of the exchange
    bits = planner.reduce_scatter(half, 64, link) + planner.all_gather(half, 64, link)
    print(f"{gigabits:>4} Gb/s {floats:>33.3f} s {halves:>10.3f} s {bits:>5.3f} s", end="")
    print(f" {floats / bits:>12.1f} {halves / bits:>13.1f}")
for share in (0.1, 0.15, 0.2):
    saved = 1 / (share + (1 - share) / 16)
    print(
        f"with a warm-up of {share:.0%} in 16 bits, a whole training sends {saved:.1f} times less than one in 16 bits"
    )

# %% [markdown]
# So two figures that are told of 1-bit Adam speak of different things: 97 % less is a compressed step against 32 bits; five times
# less is a whole training, warm-up included, against 16 bits.
#
# **What could not run here.** DeepSpeed's own 1-bit Adam needed NCCL or MPI, and DeepSpeed 0.19.8, with which this work was tested, has none any more: it was removed in 2026 (pull
# request 8490 of its repository). Nothing above is measured with DeepSpeed.

# %% [markdown]
# ## Accelerate and Fabric: the loop stays yours
#
# DeepSpeed's engine takes over the step. Accelerate (Hugging Face) and Fabric (Lightning) take less: you keep your loop, and hand them the
# *objects* that it works on. What they give back looks the same and does more: the model is inside DDP, the loader gives each
# rank its share. Here is the loop of one process that you port twice.


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


def ported(train, micro=MICRO):
    """On a rank: a loop that is written like `train_alone`, on the samples of all STEPS steps in their order."""
    model, steps = make_model(), range(STEPS)
    samples = [data.batch_of_text(TOKENS, BATCH, CONFIG.max_length + 1, seed=step) for step in steps]
    loader = torch.utils.data.DataLoader(torch.cat(samples).to(launch.device()), batch_size=micro)
    on_cpu = launch.device().type == "cpu"
    return train(model, make_optimizer(model), loader, ACCUMULATION, MAX_NORM, cpu=on_cpu)


def changed_lines(train):
    """Lines of `train`'s body that do not stand in `train_alone`; indentation does not count."""
    old, new = (Counter(map(str.strip, inspect.getsource(each).splitlines()[2:])) for each in (train_alone, train))
    return sum(count for line, count in (new - old).items() if line)


# %%
found["one process"] = launch.ranks(measured, ported, train_alone, RANKS * MICRO, n=1, timeout=60)[0]
shown("one process", found["one process"])

# %% [markdown]
# ### Balise 6 · Accelerate · about 11 min
#
# A script that many people run, on a laptop and on 64 cards, should not ask in each line on how many. Accelerate finds that out
# once, and the loop no longer mentions it. **`train_with_accelerate`** is `train_alone` for as many processes as there are; it is called on each of them, with the same model and the same
# loader, and yields each step's loss *on this rank*. Each micro-batch has its own backward, before the next one goes forward.
#
# - `Accelerator(gradient_accumulation_steps=…, cpu=…)` finds the other processes by the variables that a launcher sets (`RANK`,
#   `WORLD_SIZE`, …). Without `cpu=True` it looks for cards alone: where there are none, each process believes that it is alone, and nobody says a word.
# - `accelerator.prepare(…)` takes model, optimizer and loader, and returns what the loop has to use from here on.
# - `with accelerator.accumulate(model):` counts micro-batches. Inside, `accelerator.sync_gradients` is true where a step is due: after each `accumulation` of them, *and at the end of the
#   loader*. Elsewhere DDP sends nothing.
# - `accelerator.backward(loss)` divides by the number of micro-batches itself. `accelerator.clip_grad_norm_` clips a gradient that is finished: the mean over all ranks.
#
# Write what is prepared, the backward, and what happens where a step is due. 8 lines, some as in `train_alone`.
#
# <details><summary>Hint</summary>
#
# Before a step is due the gradient is this rank's alone, and unfinished. `yield` the mean of `losses`, and begin a new list.
# </details>


# %% tags=["balise-6"]
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    """One epoch, on each rank. Yields each step's loss on this rank, the mean over its micro-batches."""
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


# %%
def ours_and_theirs(name, library, train):
    """Train with a port where its library is; figures into `found`, beside one process that had the same batches."""
    if frameworks.here(library):
        row = launch.ranks(measured, ported, train, n=RANKS, timeout=90)[0] | {"changed": changed_lines(train)}
        recorded.note(WORK, name, row, on_cpu=True)
    else:
        row = recorded.instead(library, WORK, name)
    if row is None:
        return
    found[name] = row
    shown(name, row)
    worst = max(abs(a - b) for a, b in zip(row["losses"], found["one process"]["losses"]))
    print(f"{row['changed']} changed lines; losses differ from one process by at most {worst:.1e}")
    assert worst < 1e-3, "another training"


ours_and_theirs("Accelerate", "accelerate", train_with_accelerate)

# %% [markdown]
# ### The launcher that starts one process
#
# `accelerate launch --num_processes 2 script.py` starts a script on two cards. And on a machine without cards?

# %%
processes = tp.predict("How many processes does `accelerate launch --cpu --num_processes 2` start?", ...)

# %%
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


# %%
if frameworks.here("accelerate"):
    said = from_shells(LAUNCHERS)
    recorded.note(WORK, "launchers", said, on_cpu=True)
else:
    said = recorded.instead("accelerate", WORK, "launchers") or {}
for name, lines in said.items():
    print(name, *lines, sep="\n    ")
if said:
    started = sum("Accelerator(cpu=True)" in line for line in next(iter(said.values())))
    processes.shows(started, why="And nobody warns you.")

# %% [markdown]
# With `--cpu` the launcher leaves all its branches that start several processes (`launch_command` in
# `accelerate/commands/launch.py`): it starts the script once, and that takes all micro-batches itself, twice as many steps of half the batch. `torchrun` starts two, and sets the variables that `Accelerator(cpu=True)` reads.
# Without `cpu=True` each of the two would train alone, on all data, and both would write the same checkpoint.
# So print `accelerator.num_processes` in the first line of every log.

# %% [markdown]
# ### Balise 7 · Lightning Fabric · further · about 9 min
#
# Fabric hides less than Accelerate: *you* count micro-batches, and say where gradients travel. In return nothing happens that does
# not stand in the loop, and the same loop runs under `strategy="ddp"` and, on cards, `"fsdp"`. Under `"deepspeed"` clipping and
# accumulation belong to DeepSpeed's configuration again, and `fabric.clip_gradients` raises.
#
# **`train_with_fabric`** does what balise 6 does; each loss is divided by `accumulation`, also in a last step that has fewer. `Fabric(…)` is told how many processes there are, and `fabric.launch()` meets them; the count of micro-batches, `due`, is given. You need:
#
# - `fabric.setup(model, optimizer)` and `fabric.setup_dataloaders(loader)` return what the loop has to use. The loader's *samples* are dealt
#   out one by one: rank $r$ of $N$ gets every $N$-th.
# - `with fabric.no_backward_sync(model, enabled=…):` around forward and backward: where it is enabled, nothing is sent.
# - `fabric.backward(loss)` divides by nothing. `fabric.clip_gradients(model, optimizer, max_norm=…)`.
#
# 6 lines.
#
# <details><summary>Hint</summary>
#
# Nothing is sent where a step is *not* due. The loss that is kept is not divided, the one for backward is.
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
# ## The table
#
# Same samples, same weights at the start, the same AdamW, on two ranks of this machine. Beside the ports stands what you wrote yourself in 14:
# `fully_shard`, with gradients held back until the last micro-batch. All losses must be those of one process with whole batches.


# %% tags=["setup"]
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


HIDDEN = {
    "one process": "nothing: what all others have to reproduce",
    "ours (DDP)": "mean over ranks, buckets",
    "ours (fully_shard)": "who holds what, gathers and reduce-scatters",
    "DeepSpeed, stage 0": "division by micro-batches and ranks, boundaries, clipping, zeroing",
    "DeepSpeed, stage 1": "the same, and a share of the states",
    "DeepSpeed, stage 2": "the same, and a message after every micro-batch",
    "DeepSpeed, stage 3": "the same, and weights gathered for every micro-batch",
    "Accelerate": "shares of the data, mean over ranks, division by micro-batches, boundaries",
    "Fabric": "shares of the data, mean over ranks, buckets",
}

# %%
found["ours (fully_shard)"] = launch.ranks(measured, train_sharded, n=RANKS, timeout=60)[0]
WRITTEN = {"ours (DDP)": train_ours, "ours (fully_shard)": train_sharded}
WRITTEN |= {name: train_with_deepspeed for name in found if name.startswith("DeepSpeed")}
whole = found["one process"]["losses"]
made = "measured here" if all(map(frameworks.here, frameworks.NAMES)) else "measured, recorded"
print(
    f"{made:<20}{'loss':>7}{'apart by':>10}{'a step':>10}{'peak':>10}{'messages':>9}{'sent':>10}  changed  what is hidden"
)
for name in [name for name in HIDDEN if name in found]:
    row, apart = found[name], max(abs(a - b) for a, b in zip(found[name]["losses"], whole))
    sent = measure.human_bytes(sum(size for _, size in row["sent"]))
    changed = row.get("changed", changed_lines(WRITTEN[name]) if name in WRITTEN else 0)
    print(f"{name:<20}{row['losses'][-1]:>7.4f}{apart:>10.0e}{measure.human_seconds(row['seconds']):>10}", end="")
    print(f"{measure.human_bytes(row['peak']):>10}{len(row['sent']):>9}{sent:>10}{changed:>9}  {HIDDEN[name]}")
    assert apart < 1e-3, f"{name}: another training"

# %% [markdown]
# The seconds show what a library costs *around* the arithmetic, in Python, not what it saves on a card.
# Stage 3 cuts the most, but here it holds more than stage 2. It keeps the weights that it has gathered, up to a billion numbers (`stage3_max_live_parameters`), and this
# model has far fewer. So at the peak all weights are held whole, in addition to their shares. We set that limit, `stage3_max_reuse_distance` and `stage3_prefetch_bucket_size` to 1: a model of 1.3 million parameters
# then needed 22.8 MiB instead of 28.2; stage 2 needed 21.6. Stage 3 saves memory only where a model is larger than these limits.
#
# "Changed" counts lines of the loop that do not stand in `train_alone`. A library that hides more is neither faster nor slower: it moves
# decisions into a file, where you have to know that they are there.

# %% jupyter={"source_hidden": true}
names = [name for name in HIDDEN if name in found]
figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
for axes, (title, of) in zip(
    panels,
    {
        "milliseconds of a step": lambda row: 1e3 * row["seconds"],
        "MB held at the peak": lambda row: row["peak"] / 1e6,
        "MB handed in, a step": lambda row: sum(size for _, size in row["sent"]) / 1e6,
    }.items(),
):
    values = [of(found[name]) for name in names]
    axes.barh(names, values, color=["#E69F00" if name.startswith("o") else "#0072B2" for name in names])
    axes.set(title=title, xlim=(0, 1.25 * max(values)))
    for y, value in enumerate(values):
        axes.text(value, y, f" {value:.3g}", va="center", fontsize=8)
panels[0].invert_yaxis()
plt.show()

# %% [markdown]
# ## What torchtitan and Megatron-LM add
#
# Two others bring the model along, as what they add has to be inside of it. Nothing here was run in this course; the figures are those of the papers.
#
# | | torchtitan | Megatron-LM |
# |---|---|---|
# | what it is | PyTorch's reference for pre-training: `fully_shard`, DTensor, pipeline schedules, `torch.compile`, in one loop to read and copy | NVIDIA's library of sliced layers and schedules, and training scripts around it |
# | tensor parallelism | a plan of DTensor for each layer, the model's code stays plain | layers of its own (`ColumnParallelLinear`, `RowParallelLinear`) |
# | pipeline | PyTorch's schedules (16) | 1F1B, and interleaved stages, which it introduced |
# | data | ZeRO 3 by `fully_shard`, HSDP | DDP with a distributed optimizer (ZeRO 1); Megatron-FSDP (up to ZeRO 3) |
# | long sequences | sequence parallelism in the tensor group, context parallelism | the same; it introduced the first |
# | checkpoints | distributed, asynchronous; cut anew for other ranks (13) | distributed; cut anew for other ranks, too |
# | published | Llama 3.1 8B on 128 H100s trains 65 % faster than its own optimised baseline; 70B on 256 gains 12.6 % more with 2D, 405B on 512 another 30 % with 3D | 1,008 billion parameters on 3,072 A100s: 163 teraFLOP/s each, 52 % of the peak |
#
# Sources: Liang et al. 2024, "TorchTitan", arXiv 2410.06511, abstract (its gains come from float8, compilation, asynchronous tensor parallelism and 3D);
# Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", arXiv 2104.04473, table 1 and §2.2; Korthikanti et al. 2022,
# "Reducing activation recomputation in large transformer models", arXiv 2205.05198 (sequence parallelism, selective recomputation).
#
# When to take which? A model of yours that fits with ZeRO: whichever library your scripts speak already. A Transformer that needs
# tensor or pipeline parallelism: torchtitan where you want to read all of it, Megatron-LM where its model is yours.

# %% [markdown]
# ## Questions
#
# 1. A file says `train_batch_size` 512 and `train_micro_batch_size_per_gpu` 4. It was tuned on 32 cards, and now there are 24. What happens, and when?
# 2. Training with stage 2 and 32 micro-batches is slower than with stage 1. Memory is not short. Why, and what do you change?
# 3. A colleague divides the loss by `gradient_accumulation_steps` before `engine.backward`. With AdamW the curve looks nearly the same. With SGD it does not. Why?
#
# <details><summary>Answers</summary>
#
# 1. 512 is no multiple of 4 × 24 = 96. DeepSpeed rounds down to 5 micro-batches, multiplies, finds 480 and stops, after the job has waited for its cards. 480 and
#    576 would do: the learning rate was tuned for 512.
# 2. Stage 2 sends gradients after every micro-batch, 32 times a step, stage 1 once. Stage 1, or fewer and larger micro-batches.
# 3. The engine divides once more, so gradients are too small by that number. Adam divides by their size, and hardly notices (its ε and the clipping do); SGD's step shrinks.
# </details>

# %% [markdown]
# ## In one paragraph
#
# Four ways to write one step, and the same weights. Batches multiply: micro × accumulation × ranks, and each library leaves
# another factor to you. DeepSpeed takes over the step and reads a file; what that file means can only be seen in what the engine holds and sends, and some
# of its defaults (clipping at 1, a logarithmic warm-up, gradients sent after each micro-batch) are nobody's intention. Its checkpoints are cut
# for their ranks, unless you make them universal. One bit a number saves bytes, as long as what was rounded away is remembered. Accelerate and Fabric leave the loop to you and hand back
# objects that do more than they look. Read what a library does, not what it is called.

# %%
tp.progress()
