# %% [markdown]
# # ZeRO, under the hood · about 95 min, core 60
#
# Data parallelism holds everything on every rank: parameters, gradients, optimizer states, as many times as there are
# ranks. The *Zero Redundancy Optimizer* (ZeRO) takes the copies away: first of the states, then of the gradients, then of
# the parameters. You write its three stages with `reduce_scatter` and `all_gather` alone, see what each rank holds, and
# let them run against PyTorch's. What is further adds half precision, clipping, the host's memory, and a checkpoint in
# pieces.
#
# **What you will gain.** How large a model fits into GPUs of 80 GB, if only parameters, gradients and Adam's states
# counted? An *estimate*: arithmetic with the published formula.

# %% tags=["setup"]
import functools
import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp import course, data, launch, measure, modelled_gpu, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss

tp = course.open("13_zero_under_the_hood")
tp

# %%
print("estimate: billions of parameters whose states fill 80 GB, activations not counted\n")
print(f"{'ranks':>5}", *(f"{name:>16}" for name in ("data parallelism", "stage 1", "stage 2", "stage 3")))
for n in (1, 8, 64, 512):
    largest = [80e9 / planner.state_bytes(1, n, stage).total / 1e9 for stage in range(4)]
    print(f"{n:>5}", *(f"{billions:>16.1f}" for billions in largest))

# %% [markdown]
# Plain data parallelism stays at 5 billion on any number of GPUs. The last column grows with each one. What is the
# price? Balise 9 counts it.
#
# With two GPUs or more, the ranks talk through NCCL; else they are processes on the CPU, talk through gloo, and share
# the cores.

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
LARGE = scale() == "full" and GPUS >= 1
TEXT = data.code_text()  # the source of Python's standard library, as tokens
FULL_SIZE = LlamaConfig(TEXT.vocab_size, width=1024, heads=16, kv_heads=4, layers=16, max_length=512)
SMALL = LlamaConfig(TEXT.vocab_size, width=96, heads=4, kv_heads=2, layers=4, max_length=64)
CONFIG = FULL_SIZE if FULL else SMALL
LENGTH = CONFIG.max_length  # tokens of a sequence
BATCH = 8 if FULL else 4  # sequences of a rank in a step
CAPACITY = 25 * 2**20 if FULL else 400 * 2**10  # bytes of a bucket
STEPS = 40 if FULL else 6
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
OPTIONS = {"lr": 3e-4 if FULL else 1e-3, "weight_decay": 0.1}

# torch 2.14 names these two anew; both write into their first argument
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# %% [markdown]
# ## The idea
#
# What does a rank hold for each of the $\Psi$ parameters, in mixed precision with Adam? 2 bytes of parameter, 2 of
# gradient, and 12 for the optimizer: a float32 copy of the parameter (4) and two float32 moments (8). Sixteen bytes,
# of which a step of $N$ ranks needs only *one* copy: an update of parameter $i$ reads nothing but the gradient and
# the states of $i$, so any one rank can do it, and tell the others. Each stage cuts one thing more into $N$ shards:
#
# $$\underbrace{2\Psi+2\Psi+12\Psi}_{\text{data parallelism}}\;\to\;
# \underbrace{2\Psi+2\Psi+\frac{12\Psi}{N}}_{\text{stage 1}}\;\to\;
# \underbrace{2\Psi+\frac{2\Psi+12\Psi}{N}}_{\text{stage 2}}\;\to\;
# \underbrace{\frac{2\Psi+2\Psi+12\Psi}{N}}_{\text{stage 3}}$$

# %% jupyter={"source_hidden": true}
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer states": "#009E73"}
figure, panels = plt.subplots(1, 4, figsize=(8.5, 2.9), layout="constrained", sharey=True)
for stage, axes in enumerate(panels):
    low = 0
    for (name, colour), size, first in zip(COLOURS.items(), (2, 2, 12), (3, 2, 1)):
        for rank in range(4):
            axes.bar(rank, size, 0.8, bottom=low, color="#eeeeee")
            part = (size / 4, low + rank * size / 4) if stage >= first else (size, low)
            axes.bar(rank, part[0], 0.8, bottom=part[1], color=colour, label=name if rank == stage == 0 else None)
        low += size
    total = planner.state_bytes(1, 4, stage).total
    axes.set_title(f"stage {stage}: {total:g} bytes" if stage else f"data parallel: {total:g} bytes", fontsize=10)
    axes.set(xticks=range(4), xlabel="rank")
panels[0].set(ylabel="bytes of a parameter")
figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
plt.show()

# %% [markdown]
# Grey is what a rank does not hold. Source: Rajbhandari, Rasley, Ruwase and He, *ZeRO: memory optimizations toward
# training trillion parameter models* (2020).
#
# ## The baseline, measured first
#
# A small decoder of the Llama kind, on the source code of Python's standard library. Each rank trains on its own
# sequences.


# %% tags=["setup"]
TOKENS_USED = TEXT.train if FULL else TEXT.train[300_000:400_000].clone()  # all that travels to the ranks


def make_model(config=CONFIG):
    """The decoder on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    return Llama(config).to(launch.device())


def layers_of(model):
    """The layers that hold the model's parameters, in the order of forward."""
    return [model.token_embedding, *model.blocks, model.norm, model.head]


def token_batch(step, length=LENGTH):
    """This rank's tokens of a step, (BATCH, length + 1), on its device."""
    seed = 1000 * step + dist.get_rank()
    return data.batch_of_text(TOKENS_USED, BATCH, length + 1, seed).to(launch.device())


# %% [markdown]
# Plain data parallelism, stage 0: all gradients travel in one flat all-reduce, and every rank does the whole update.


# %% tags=["setup"]
class Replicated:
    """Stage 0: everything on every rank."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = optimizer_class(self.parameters, **options)

    def step(self):
        flat = torch.cat([p.grad.view(-1) for p in self.parameters]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, piece in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            p.grad.copy_(piece.view(p.shape))
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


# %% [markdown]
# What does a rank hold, and when? `held` adds up the memory of all parameters, gradients and states; memory that
# several tensors share counts once.


# %% tags=["setup"]
def held(model, optimizer):
    """Bytes on this rank now, {part: bytes}."""
    parts = [*getattr(optimizer, "parts", ()), *getattr(optimizer, "frozen", ())]
    owns = [part.own for part in parts]
    tensors = {
        "parameters": [*model.parameters(), *(part.flat for part in parts), *owns],
        "gradients": [p.grad for p in [*model.parameters(), *owns]],
        "optimizer states": [t for state in optimizer.optimizer.state.values() for t in state.values()],
    }
    storages = {name: [t.untyped_storage() for t in found if torch.is_tensor(t)] for name, found in tensors.items()}
    return {name: sum({s._cdata: s.nbytes() for s in found}.values()) for name, found in storages.items()}


# %% [markdown]
# `train` runs some steps, then one more in which it asks `held` whenever a layer begins forward or backward and whenever
# a gradient is complete.


# %% tags=["setup"]
def train(make):
    """On a rank, with the optimizer make(model): (mean losses, seconds of each step, what is held in the last step)."""
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    model, losses, times, moments = make_model(), [], [], []

    def note(*_):
        if len(times) == STEPS:
            moments.append(held(model, optimizer))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    optimizer = make(model)
    for layer in layers_of(model):
        layer.register_forward_pre_hook(note)
        layer.register_full_backward_pre_hook(note)
    for step in range(STEPS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        note()
        loss = language_loss(model, token_batch(step))
        loss.backward()
        optimizer.step()
        note()
        losses.append(loss.detach())
        measure.synchronize(launch.device())
        times.append(time.perf_counter() - start)
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist(), times[:STEPS], moments


# %%
def run(name, make, n=RANKS[-1]):
    """Train on `n` ranks, keep the result, and say what rank 0 measured."""
    losses, times, moments = found[name] = launch.ranks(train, make, n=n, timeout=120)[0]
    step = sorted(times[1:])[len(times) // 2]
    most = max(moments, key=lambda moment: sum(moment.values()))
    print(f"{name}, {n} ranks: loss {losses[0]:.3f} → {losses[-1]:.3f}, {measure.human_seconds(step)} a step")
    for word, moment in (("between steps", moments[0]), ("at the most", most)):
        shares = ", ".join(f"{part} {measure.human_bytes(size)}" for part, size in moment.items())
        print(f"  {word + ':':<15} {measure.human_bytes(sum(moment.values()))} = {shares}")


def stage_0(model):
    return Replicated(model.parameters(), **OPTIONS)


found = {}
run("data parallelism", stage_0)

# %% [markdown]
# At the most sixteen bytes for each parameter: float32 throughout here, 4 + 4 + 8; between steps 12. Every other rank holds the
# very same.
#
# Two helpers are given: parameters in groups, as `torch.optim` takes them, and `make_buckets` of practical work 08.


# %% tags=["setup"]
def param_groups(parameters):
    """Groups (dictionaries) for an optimizer, from parameters or groups; frozen and repeated ones are left out."""
    parameters = list(parameters)
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters}]
    seen, found = set(), []
    for group in groups:
        kept = [p for p in dict.fromkeys(group["params"]) if p.requires_grad and p not in seen]
        seen.update(kept)
        if kept:
            found.append({**group, "params": kept})
    return found


def make_buckets(parameters, capacity):
    """Lists of parameters, in reverse order, of at most `capacity` bytes each: yours, from practical work 08."""
    buckets, room = [], 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(p)
        room -= size
    return buckets


# %% [markdown]
# ### Balise 1 · Bytes on a rank · about 6 min
#
# Write the formula as a function: bytes of a rank as three numbers, `(parameters, gradients, optimizer)`.
#
# | bytes of a | parameter | gradient | optimizer: Adam | momentum | plain SGD |
# |---|---|---|---|---|---|
# | mixed precision | 2 | 2 | 4 + 8 | 4 + 4 | 4 + 0 |
# | float32 throughout | 4 | 4 | 8 | 4 | 0 |
#
# The 4 in the first row is the float32 copy of the parameter: it belongs to the optimizer, and is shared out with its
# states. Given are `weight` and `kept`, the bytes of this table, and `share`, how many parameters are a rank's own share
# (fractions are fine). Stage 0 shares nothing out, stage 1 the optimizer's part, stage 2 also the gradients, stage 3 also
# the parameters. About 3 lines.
#
# <details><summary>Hint</summary>
#
# Each of the three numbers is bytes × (all parameters, or the share): from which stage on is it the share?
# </details>


# %% tags=["balise-1"]
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    """Bytes of a rank: (parameters, gradients, optimizer). stage 0 to 3; optimizer "adam", "momentum" or "sgd"."""
    weight = 2 if mixed_precision else 4
    kept = {"adam": 8, "momentum": 4, "sgd": 0}[optimizer] + (4 if mixed_precision else 0)
    share = n_parameters / world_size
    # BEGIN SOLUTION
    return (
        weight * (share if stage >= 3 else n_parameters),
        weight * (share if stage >= 2 else n_parameters),
        kept * (share if stage >= 1 else n_parameters),
    )
    # END SOLUTION


# %%
tp.check(1, bytes_per_rank)

# %% [markdown]
# See it, from 1 rank to 1,024:

# %% jupyter={"source_hidden": true}
worlds = [2**k for k in range(11)]
figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
    sizes = [sum(bytes_per_rank(7.5e9, n, stage)) / 1e9 for n in worlds]
    axes.plot(worlds, sizes, marker="o", markersize=4, label=name)
axes.axhline(80, color="#555555", linestyle="--", linewidth=1)
axes.text(1024, 76, "a GPU of 80 GB", ha="right", va="top", fontsize=9, color="#555555")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xticks=worlds, xticklabels=worlds, xlabel="ranks", ylabel="GB on each rank", yticks=(0.1, 1, 10, 100),
         yticklabels=("0.1", "1", "10", "100"))  # fmt: skip
axes.set_title("7.5 billion parameters, Adam, mixed precision (formula, not measured)", fontsize=10)
axes.legend(fontsize=9, frameon=False, loc="lower left")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Stages 1 and 2 end on a floor, what is not shared out yet: 4 bytes a parameter, then 2. Stage 3 has none.

# %% [markdown]
# ### Balise 2 · One flat tensor, cut into equal shards · about 8 min
#
# How do you cut a model into $N$ equal parts? Not by layers, which have all sizes. All parameters are laid into **one**
# flat tensor, and that is cut: a cut may go through the middle of a matrix, which an optimizer that works number by
# number does not mind. Padding makes the parts equal:
#
# ```
# [ matrix, row by row       | vector  | 0 0 ]
# [ rank 0     | rank 1      | rank 2        ]
# ```
#
# - `flatten(tensors, world_size)`: a **new** tensor of one dimension with all elements, one tensor after the other, then
#   zeros, as few as possible, until `world_size` divides its length $n$. Same dtype and device as the tensors, which are
#   all alike in this; they may be transposed. `size` counts their elements.
# - `shard(flat, rank, world_size)`: the part of `flat` that `rank` owns, `(n / world_size,)`, one piece. A **view**: what
#   is written there must be in `flat`.
#
# The way back, `unflatten`, is given. About 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `-(-a // b)` is a / b, rounded up. `t.reshape(-1)` lays out a tensor row by row; `torch.cat` joins. `t.new_zeros(n)` and
# `t.new_empty(n)` have the dtype and the device of `t`.
# </details>


# %% tags=["balise-2"]
@torch.no_grad()
def flatten(tensors, world_size):
    """One new tensor (n,): all elements, one tensor after the other, then zeros until world_size divides n."""
    size = sum(t.numel() for t in tensors)
    # BEGIN SOLUTION
    flat = tensors[0].new_empty(-(-size // world_size) * world_size)
    torch.cat([t.reshape(-1) for t in tensors], out=flat[:size])
    flat[size:] = 0
    # END SOLUTION
    return flat


def shard(flat, rank, world_size):
    """The part of `flat` that `rank` owns, (n / world_size,): a view."""
    # BEGIN SOLUTION
    return flat.view(world_size, -1)[rank]
    # END SOLUTION


def unflatten(flat, like):
    """Views into `flat`, one for each tensor of `like`, with its shape. What is behind is padding."""
    sizes = [t.numel() for t in like]
    return [piece.view(t.shape) for piece, t in zip(flat[: sum(sizes)].split(sizes), like)]


# %%
tp.check(2, flatten, shard, unflatten)

# %% [markdown]
# See it: a matrix (3, 4) and a vector (5), on three ranks. A colour is a rank's shard, 0 is padding.

# %% jupyter={"source_hidden": true}
tensors = [torch.arange(1.0, 13).view(3, 4), torch.arange(13.0, 18)]
flat = flatten(tensors, 3)
figure, axes = plt.subplots(figsize=(8.5, 0.9), layout="constrained")
for rank in range(3):
    for k, value in enumerate(shard(flat, rank, 3)):
        place = rank * len(flat) // 3 + k
        axes.add_patch(plt.Rectangle((place, 0), 1, 1, facecolor=f"C{rank}", edgecolor="white", alpha=0.75))
        axes.text(place + 0.5, 0.5, f"{value:.0f}", ha="center", va="center", color="white", fontsize=11)
axes.set(xlim=(0, len(flat)), ylim=(0, 1), yticks=[], xticks=(0, 12, 17, 18))
axes.set_xticklabels(("matrix", "vector", "padding", ""), ha="left", fontsize=9)
axes.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# The next class is given; all stages stand on it. It moves parameters into a flat tensor: `p.data = view` makes a
# parameter look at another memory, and the model does not notice. **What happens to `own`, this rank's shard, happens to
# the model**: both are the same memory.


# %% tags=["setup"]
class Part:
    """Parameters that live together in one flat tensor, of which this rank owns one shard.

    flat (n,): all of them, then padding; each `p.data` is a view of it (views: those views). own (n / world_size,): this
    rank's shard, itself a view of `flat`, and the only thing that the optimizer knows; its gradient is own.grad.
    """

    def __init__(self, parameters):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.parameters = list(parameters)
        self.flat = flatten(self.parameters, world_size)
        self.views = unflatten(self.flat, self.parameters)
        for p, view in zip(self.parameters, self.views):
            p.data = view
        self.own = nn.Parameter(shard(self.flat, rank, world_size))


# %% [markdown]
# ### Balise 3 · Stage 1: a shard of the optimizer states · about 9 min
#
# Every rank computes its own gradients, as before. But the mean gradient is needed only where it is used: the owner of a
# shard gets that shard of it, and updates its shard, with states for that shard alone. Then all gather the new
# parameters.
#
# $$\underset{\Psi}{\text{gradients}} \xrightarrow{\text{reduce-scatter}} \underset{\Psi/N}{\text{own.grad}}
# \xrightarrow{\text{optimizer}} \underset{\Psi/N}{\text{own}} \xrightarrow{\text{all-gather}}
# \underset{\Psi}{\text{parameters}}$$
#
# Given: `__init__`, with a `Part` for each group and an optimizer that knows only their `own`. Write
#
# - `reduce()`: leave in each `part.own.grad` this rank's shard of the **mean** gradient over all ranks, by a
#   reduce-scatter of one flat tensor. `gradients`, given, has one for each parameter of the part, zeros where one
#   was not used.
# - `update()`: update the shards, then gather them into each `part.flat`.
#
# About 2 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `reduce_scatter(out, flat)`: the flat tensors of all ranks are added up, and rank r's `out`, (n / N,), gets shard r of
# the sum. `all_gather(flat, mine)` is its mirror; `mine` may lie in `flat`, and is outside of any graph: `own.detach()`.
# Yours from balise 2 makes one tensor of many.
# </details>


# %% tags=["balise-3"]
class ShardedOptimizer:
    """An optimizer whose states are shared out over the ranks (ZeRO stage 1).

    parameters: a list of parameters, or of groups, as torch.optim takes them. options: those of optimizer_class.
    parts: list of Part. shards: what this rank updates. optimizer: an optimizer_class on the shards, group by group.
    """

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        self.parts, groups = [], []
        for group in param_groups(parameters):
            parts = self.make_parts(group["params"])
            self.parts += parts
            groups.append({**group, "params": [part.own for part in parts]})
        self.optimizer = optimizer_class(groups, **options)

    def make_parts(self, parameters):
        """The parts of one group; a later stage makes several."""
        return [Part(parameters)]

    @property
    def shards(self):
        """The parameters that this rank updates, one a part; after reduce() with their gradients."""
        return [part.own for part in self.parts]

    def reduce(self):
        """After backward: leave in each own.grad this rank's shard of the mean gradient over all ranks."""
        for part in self.parts:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters]
            # BEGIN SOLUTION
            flat = flatten(gradients, dist.get_world_size()).div_(dist.get_world_size())
            # END SOLUTION
            part.own.grad = torch.empty_like(part.own)
            # BEGIN SOLUTION
            reduce_scatter(part.own.grad, flat)
            # END SOLUTION

    def update(self):
        """Update this rank's shards, then gather the parameters of all ranks."""
        # BEGIN SOLUTION
        self.optimizer.step()
        for part in self.parts:
            all_gather(part.flat, part.own.detach())
        # END SOLUTION

    def step(self):
        """Everything after backward."""
        self.reduce()
        self.update()

    def zero_grad(self):
        """Free all gradients, of the parameters and of the shards."""
        for part in self.parts:
            for p in [*part.parameters, part.own]:
                p.grad = None


# %%
tp.check(3, ShardedOptimizer)


# %%
def stage_1(model):
    return ShardedOptimizer(model.parameters(), **OPTIONS)


run("stage 1", stage_1)

# %% [markdown]
# The same losses, and each rank holds its part of the states. The update is done once, not on every rank.
#
# The next two stages are a matter of *when*. A step of three layers, from left to right:

# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(8.5, 2.7), layout="constrained", sharey=True)
for axes, stage in zip(panels, (2, 3)):
    for layer in range(3):
        if stage == 2:
            axes.barh(layer, 7, 0.8, color=COLOURS["parameters"], alpha=0.3)
        for slot in (layer, 5 - layer):
            axes.barh(layer, 1, 0.8, slot, color=COLOURS["parameters"], edgecolor="white")
            axes.text(slot + 0.5, layer, "compute", ha="center", va="center", color="white", fontsize=8)
            if stage == 3:
                ends = (slot + 0.08, layer - 0.35), (slot + 0.08, layer - 0.75)
                axes.annotate("", *ends, arrowprops={"arrowstyle": "->"})
                axes.text(slot + 0.12, layer - 0.55, "gather", va="center", fontsize=7)
                ends = (slot + 0.92, layer + 0.75), (slot + 0.92, layer + 0.4)
                axes.annotate("", *ends, arrowprops={"arrowstyle": "->"})
                axes.text(slot + 0.86, layer + 0.55, "free", ha="right", va="center", fontsize=7)
        axes.barh(layer, 1, 0.35, 6 - layer, color=COLOURS["gradients"])
        axes.text(6.5 - layer, layer, "send", ha="center", va="center", fontsize=8)
    axes.axvline(3, color="#333333", linewidth=0.8, linestyle=":")
    title = "all parameters, gradients leave" if stage == 2 else "a layer comes, computes, is freed"
    axes.set_title(f"stage {stage}: {title}", fontsize=10)
    axes.set(xlim=(0, 7), ylim=(2.8, -0.9), xticks=(1.5, 5), xticklabels=("forward", "backward"))
    axes.set_yticks(range(3), ["layer 1", "layer 2", "layer 3"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# Blue: parameters in memory, dark where the layer computes. Orange: gradients, which are sent and freed at once.
#
# ### Balise 4 · Stage 2: gradients leave while backward goes on · about 11 min
#
# In stage 1, all gradients of a rank are there when backward ends; most of them are another rank's business. Stage 2
# lets them go as soon as they come, bucket by bucket. Each bucket is a `Part` with a shard of its own, so
# `ShardedOptimizer` works on as it is.
#
# Given: the buckets; a hook that calls `ready(p)` as soon as `p.grad` is complete; `flat`, a bucket's gradients divided by
# $N$; and `reduce()`, which sends after backward what could not leave, because a parameter of its bucket was not used.
# Write
#
# - `ready(p)`: if its bucket misses no gradient any more, `send` it.
# - `send(part)`: free the gradients, whose values are in `flat` now. `arriving` is given. Start the reduce-scatter of `flat` **asynchronously**, and
#   put into the list `self.running` what must live until it has travelled: `(part, arriving, flat, handle)`.
# - `wait()`: wait for what is under way, and **add** what arrives to `own.grad`, which may be None: several backward
#   passes before a step add up.
#
# `send` begins with `wait()`, so at most one bucket is under way. Held: the gradients of one shard and about two buckets.
# About 2, 3 and 2 lines, `send`'s in two places.
#
# <details><summary>Hint</summary>
#
# A bucket is complete when no `p.grad` in it is None; freeing them makes it ready for the next backward.
# `reduce_scatter(out, flat, async_op=True)` returns a handle with `wait()`.
# </details>


# %% tags=["balise-4"]
class ShardedGradients(ShardedOptimizer):
    """ZeRO stage 2: only shards of gradients are kept. All ranks use the same parameters. capacity: bytes of a bucket."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        self.capacity, self.running = capacity, []
        super().__init__(parameters, optimizer_class, **options)
        self.home = {p: part for part in self.parts for p in part.parameters}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)

    def make_parts(self, parameters):
        """A Part for each bucket."""
        return [Part(bucket) for bucket in make_buckets(parameters, self.capacity)]

    def ready(self, p):
        """p.grad is complete; where it was the last of its bucket, the bucket leaves."""
        part = self.home[p]
        # BEGIN SOLUTION
        if all(q.grad is not None for q in part.parameters):
            self.send(part)
        # END SOLUTION

    def send(self, part):
        """Start the reduce-scatter of a part's gradients, and free what is not owned; at most one is under way."""
        self.wait()
        gradients = [torch.zeros_like(v) if p.grad is None else p.grad for p, v in zip(part.parameters, part.views)]
        flat = flatten(gradients, dist.get_world_size()).div_(dist.get_world_size())
        # BEGIN SOLUTION
        for p in part.parameters:
            p.grad = None
        # END SOLUTION
        arriving = torch.empty_like(part.own)
        # BEGIN SOLUTION
        self.running.append((part, arriving, flat, reduce_scatter(arriving, flat, async_op=True)))
        # END SOLUTION

    def wait(self):
        """Wait for what is under way, and add it to own.grad."""
        for part, arriving, _, work in self.running:
            # BEGIN SOLUTION
            work.wait()
            part.own.grad = arriving if part.own.grad is None else part.own.grad + arriving
            # END SOLUTION
        self.running.clear()

    def reduce(self):
        """After backward: send what is left, wait; each own.grad is this rank's shard of the mean gradient."""
        self.wait()
        for part in self.parts:
            if part.own.grad is None or any(p.grad is not None for p in part.parameters):
                self.send(part)
        self.wait()


# %%
tp.check(4, ShardedGradients)


# %%
def stage_2(model):
    return ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS)


run("stage 2", stage_2)

# %% [markdown]
# ### Balise 5 · Stage 3: parameters only while they are used · about 12 min
#
# Now the parameters, as in the right picture: each layer is cut over all ranks, gathered just before it computes and
# freed just after, and once more in backward. (Lectures sometimes say that stage 3 deals whole layers out to the ranks.
# It does not.)
#
# The difficulty: autograd keeps a *view* of each weight for backward, and a view keeps the memory alive. So the memory
# itself must go, below all views: `flat.untyped_storage().resize_(0)`. Gathered again, the views see the values again.
# Meanwhile `p.data` is an empty tensor: who reads a parameter at the wrong moment gets an error and not freed memory.
#
# Given: `free()`, which does this, and what makes a `Unit` for each layer: a `Part` whose `own` has a memory of its own.
# Frozen parameters get one apart, and one that several layers share belongs to the first. Write
#
# - in `Unit.gather()`, the mirror of `free()`: give `flat` its memory back, and fill it from all ranks' `own`.
# - the end of `add(layer)`: three hooks on the layer. When is `gather` due, when `free`, when `backward_begins`?
# - `send(part)`: a unit's gradients are complete, and on their way. What is not needed any more?
# - `update()`: the shards are updated. What of stage 1's has no place here?
#
# About 2, 3, 1 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `storage.resize_(bytes)` counts bytes: `t.numel() * t.element_size()`. `layer.register_forward_pre_hook(f)`,
# `register_forward_hook(f)` and `register_full_backward_pre_hook(f)` call `f` before forward, after it, before backward.
# </details>


# %% tags=["balise-5"]
class Unit(Part):
    """A Part of which this rank keeps its shard alone; `flat` holds memory only between gather() and free()."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.own = nn.Parameter(self.own.detach().clone())  # a memory of its own
        self.nothing = self.flat.new_empty(0)
        self.gathered = True
        self.free()

    def gather(self):
        """Give `flat` its memory and fill it with the shards of all ranks; nothing where that is done already."""
        if not self.gathered:
            # BEGIN SOLUTION
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            all_gather(self.flat, self.own.detach())
            # END SOLUTION
            for p, view in zip(self.parameters, self.views):
                p.data = view
            self.gathered = True

    def free(self):
        """Give the memory of `flat` back."""
        for p in self.parameters:
            p.data = self.nothing
        self.flat.untyped_storage().resize_(0)
        self.gathered = False


class ShardedParameters(ShardedGradients):
    """ZeRO stage 3. layers: modules that together hold all parameters; each is gathered by itself, and freed."""

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        self.running, self.parts, self.home = [], [], {}
        self.frozen = []
        for layer in layers:
            self.add(layer)
        self.optimizer = optimizer_class(self.shards, **options)

    def add(self, layer):
        """Make the units of a layer: trained and frozen parameters apart; hooks gather them when the layer is used."""
        for trained in (True, False):
            new = [p for p in layer.parameters() if p.requires_grad == trained and p not in self.home]
            if new:
                unit = Unit(new)
                (self.parts if trained else self.frozen).append(unit)
                self.home.update(dict.fromkeys(new, unit))
                if trained:
                    for p in new:
                        p.register_post_accumulate_grad_hook(self.ready)
        units = list(dict.fromkeys(self.home[p] for p in layer.parameters()))

        def gather(*_):
            for unit in units:
                unit.gather()

        def free(*_):
            for unit in units:
                unit.free()

        def backward_begins(*_):  # no gradient tells when a frozen unit of another layer is done: free it here
            for unit in self.frozen:
                if unit not in units:
                    unit.free()
            gather()

        # BEGIN SOLUTION
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(free)
        layer.register_full_backward_pre_hook(backward_begins)
        # END SOLUTION

    def send(self, part):
        """As before; then the parameters are not needed any more."""
        super().send(part)
        # BEGIN SOLUTION
        part.free()
        # END SOLUTION

    def reduce(self):
        """As before; then frozen layers that are still gathered are freed."""
        super().reduce()
        for unit in self.frozen:
            unit.free()

    def update(self):
        """Update this rank's shards."""
        # BEGIN SOLUTION
        self.optimizer.step()
        # END SOLUTION


# %%
tp.check(5, Unit, ShardedParameters)

# %% [markdown]
# Guess before you run the next cells; the formula counts the shards alone.

# %%
left = tp.predict(
    f"At the most, what percentage of data parallelism's bytes does a rank hold in stage 3, of {RANKS[-1]} ranks?", ...
)


# %%
def stage_3(model):
    return ShardedParameters(layers_of(model), **OPTIONS)


run("stage 3", stage_3)
peaks = {name: max(sum(moment.values()) for moment in moments) for name, (_, _, moments) in found.items()}
left.shows(
    100 * peaks["stage 3"] / peaks["data parallelism"],
    "{:.0f} %",
    "A rank keeps 1/N of all, and for a moment whole layers beside it: in a small model these weigh much.",
)

# %% [markdown]
# ## One step, moment by moment
#
# What one rank holds while a step goes by. Activations are not drawn, nor the flat tensors that are sent: a bucket in stages 2
# and 3, but all gradients once more in data parallelism and stage 1.

# %%
psi, n = CONFIG.n_parameters, RANKS[-1]
print(f"{psi:,} parameters, {n} ranks, float32      formula    between steps    at the most")
for stage, (name, (_, _, moments)) in enumerate(found.items()):
    formula = sum(bytes_per_rank(psi, n, stage, mixed_precision=False))
    totals = [sum(moment.values()) for moment in moments]
    sizes = [measure.human_bytes(size) for size in (formula, totals[0], max(totals))]
    print(f"{name:<34} {sizes[0]:>12} {sizes[1]:>16} {sizes[2]:>14}")

# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, len(found), figsize=(8.5, 3), layout="constrained", sharey=True, squeeze=False)
for axes, (name, (_, _, moments)) in zip(panels[0], found.items()):
    heights = [[moment[part] / 2**20 for moment in moments] for part in COLOURS]
    axes.stackplot(range(len(moments)), *heights[::-1], colors=list(COLOURS.values())[::-1], labels=list(COLOURS)[::-1])
    turn = 1 + CONFIG.layers + 3  # embedding, blocks, norm and head have begun forward
    axes.axvline(turn, color="#333333", linewidth=0.8, linestyle=":")
    axes.set_title(name, fontsize=10)
    axes.set(
        xticks=(turn / 2, (turn + len(moments)) / 2), xticklabels=("forward", "backward"), xlim=(0, len(moments) - 1)
    )
    axes.tick_params(axis="x", length=0)
panels[0, 0].set(ylabel="MiB on a rank")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(handles, COLOURS, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
plt.show()

# %% [markdown]
# Stage 1 is a shard above its formula, as `own.grad` is there beside the whole gradients; stages 2 and 3 by a bucket or a
# layer. The green falls with stage 1 and stays. The orange of stage 2 is a thin wedge that grows
# to one shard, and a bucket that fills. The blue of stage 3 is a shard and a bump wherever a layer is gathered: one part in eighty for a model of eighty layers.
#
# Stage 3 has a price beside its bytes: whoever gathers a layer when it begins stands and waits. `Ahead` is given: your
# stage 3, whose layers are gathered on a stream of their own, a second queue of work, while the layer before computes. The next cell runs both on two **modelled**
# H100, each behind a network card of 100 Gb/s: tensors have sizes and no values, operations and messages take the time of
# their arithmetic and their bytes.


# %%
class Ahead(ShardedParameters):
    """Your stage 3; when a layer begins, gathering the next one starts."""

    def __init__(self, layers, **options):
        super().__init__(layers, **options)
        self.stream = torch.cuda.Stream()
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, k=k: self.begins(k + 1))
            layer.register_full_backward_pre_hook(lambda *_, k=k: self.begins(k - 1))

    def begins(self, following):
        """The layer that begins waits for its parameters; those of the following one are asked for."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.stream.wait_stream(torch.cuda.current_stream())
        if 0 <= following < len(self.parts):
            with torch.cuda.stream(self.stream):
                self.parts[following].gather()


def modelled_step(clock, stage_3):
    """On a modelled rank: forward and backward of 16 sequences of 1,024 tokens, computed in bfloat16."""
    model = make_model(LlamaConfig(TEXT_SIZE, width=2048, heads=16, kv_heads=4, layers=6, max_length=1024))
    optimizer = stage_3(layers_of(model), **OPTIONS)
    tokens = torch.zeros(16, 1025, dtype=torch.int64, device=launch.device())
    clock.restart()  # what was before is not shown
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = language_loss(model, tokens)
    loss.backward()
    optimizer.reduce()


TEXT_SIZE = TEXT.vocab_size
steps = {
    "gathered on demand, your stage 3": (modelled_step, ShardedParameters),
    "gathered ahead": (modelled_step, Ahead),
}
runs = [ranks[0] for ranks in modelled_gpu.each_on_ranks(steps, n=2, network=12.5e9).values()]
print(*runs, sep="\n")
report.streams(runs) if runs else None

# %% [markdown]
# Above, computing and messages take turns. Below, most gathers travel beside the computing, as in `fully_shard`.
#
# ## Race
#
# Your stages against PyTorch's, on the same model and the same batches: stage 1 against `ZeroRedundancyOptimizer`
# (which leaves the gradients to `DistributedDataParallel`), stage 3 against `fully_shard`, a group for each block, then
# the root. Do they train the same model? The loss of one more batch after three steps tells.


# %%
def stepper(model, optimizer):
    """A function of a batch of tokens that trains one step."""

    def step(tokens):
        optimizer.zero_grad()
        language_loss(model, tokens).backward()
        optimizer.step()

    return step


def candidates():
    """name -> (model, function of a batch of tokens that trains one step), all from the same start."""
    zero, one, two, three, sharded, plain = (make_model() for _ in range(6))
    theirs, both = (DistributedDataParallel(m, gradient_as_bucket_view=True) for m in (zero, plain))
    for layer in (*sharded.blocks, sharded):
        fully_shard(layer)
    optimizers = {
        "data parallelism": (both, torch.optim.AdamW(plain.parameters(), **OPTIONS)),
        "stage 1, yours": (one, ShardedOptimizer(one.parameters(), **OPTIONS)),
        "ZeroRedundancyOptimizer": (theirs, ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, **OPTIONS)),
        "stage 2, yours": (two, ShardedGradients(two.parameters(), capacity=CAPACITY, **OPTIONS)),
        "stage 3, yours": (three, ShardedParameters(layers_of(three), **OPTIONS)),
        "fully_shard": (sharded, torch.optim.AdamW(sharded.parameters(), **OPTIONS)),
    }
    return {name: (model, stepper(model, optimizer)) for name, (model, optimizer) in optimizers.items()}


def race_on_ranks(rounds):
    """({name: loss of a batch after three steps}, race)"""
    racers, tokens, losses = candidates(), token_batch(3), {}
    for name, (model, step) in racers.items():
        for k in range(3):
            step(token_batch(k))
        with torch.no_grad():
            losses[name] = language_loss(model, tokens).item()
    turns = {name: functools.partial(step, tokens) for name, (_, step) in racers.items()}
    return losses, measure.race(turns, repeats=rounds, warmup=1, calls=1, device=launch.device())


# %% [markdown]
# Guess before you run the next cell.

# %%
longer = tp.predict(
    f"A step of your stage 3 takes how many times as long as one of data parallelism, on {RANKS[-1]} ranks?", ...
)

# %%
medians = {}
for n in RANKS:
    losses, race = launch.ranks(race_on_ranks, 30 if FULL else 4, n=n, timeout=120)[0]
    print(f"{n} ranks on {launch.backend(n)}: loss after three steps, and a step")
    for name, seconds in race.medians.items():
        median, spread = measure.human_seconds(seconds), measure.human_seconds(race.spreads[name] / 2)
        print(f"  {name:<24} {losses[name]:.6f}  {median:>9} ± {spread}")
    for mine, theirs in (("stage 1, yours", "ZeroRedundancyOptimizer"), ("stage 3, yours", "fully_shard")):
        print(f"  {mine} / {theirs}: {race.medians[mine] / race.medians[theirs]:.2f}")
    medians[f"{n} ranks"] = race.medians
print(recorded.line("13_zero_under_the_hood", "race"))
if FULL:
    recorded.note("13_zero_under_the_hood", "race", medians)
longer.shows(
    race.medians["stage 3, yours"] / race.medians["data parallelism"],
    "× {:.2f}",
    "On a CPU a message is a copy through memory that ranks share, and a smaller update pays it back in part; on GPUs "
    "the waiting for gathers decides.",
)

# %% [markdown]
# The losses agree to rounding. Under `ZeroRedundancyOptimizer`, DDP all-reduces whole gradients, and then each rank
# broadcasts what it updated: by arithmetic 3Ψ, where your stage 1 sends 2Ψ. `fully_shard` keeps books, a `DTensor` for
# each parameter: on small layers that costs more than on large ones.

# %% [markdown]
# ## What a real training needs besides
#
# What every training framework adds: half precision, clipping, memory beyond the GPU, and a checkpoint of what lies in
# pieces.
#
# ### Balise 6 · Parameters in bfloat16, masters in float32 · further · about 8 min
#
# A large model computes in bfloat16: half the memory, half the bytes in every message. But just above 1 the
# bfloat16 numbers are 1/128 apart, just below 1/256, and an update of 0.001 is rounded away, every time. So the optimizer works on a *master*, a
# float32 copy, in which small updates add up (practical work 02). It is needed where a parameter is updated: on its
# owner alone. That is the 12 in the formula: 4 bytes of master and 8 of Adam's states, all of them divided by $N$.
#
# `MasterShards` stands on your stage 2. Given: the masters take the place of the shards in the optimizer's groups. Write
#
# - `master_of`: a dictionary from `part.own` of each of `self.parts` to its master, a float32 `nn.Parameter` of the same values.
# - `reduce()`: put the mean gradient of each shard into `master.grad`, in float32.
# - the loop of `update()`: round each updated master into its `part.own`, and gather. Every message stays in bfloat16.
#
# About 1, 1 and 2 lines.
#
# <details><summary>Hint</summary>
#
# After stage 2's `reduce()` the gradient is in `part.own.grad`. `a.copy_(b)` rounds; under `torch.no_grad()` it may write
# into a parameter.
# </details>


# %% tags=["balise-6"]
class MasterShards(ShardedGradients):
    """ZeRO stage 2 for parameters in bfloat16. masters: float32 copies of this rank's shards, one for each part."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        # BEGIN SOLUTION
        master_of = {part.own: nn.Parameter(part.own.detach().float()) for part in self.parts}
        # END SOLUTION
        self.masters = list(master_of.values())
        for group in self.optimizer.param_groups:
            group["params"] = [master_of[own] for own in group["params"]]

    @property
    def shards(self):
        """What this rank updates: the masters; after reduce() with their gradients."""
        return self.masters

    def reduce(self):
        """After backward: leave in each master.grad this rank's shard of the mean gradient, in float32."""
        super().reduce()
        for part, master in zip(self.parts, self.masters):
            # BEGIN SOLUTION
            master.grad = part.own.grad.float()
            # END SOLUTION
            part.own.grad = None

    @torch.no_grad()
    def update(self):
        """Update the masters, round them into this rank's shards, then gather the parameters of all ranks."""
        self.optimizer.step()
        for part, master in zip(self.parts, self.masters):
            # BEGIN SOLUTION
            part.own.copy_(master)
            all_gather(part.flat, part.own.detach())
            # END SOLUTION

    def zero_grad(self):
        """Free all gradients, those of the masters too."""
        super().zero_grad()
        for master in self.masters:
            master.grad = None


# %%
tp.check(6, MasterShards)

# %% [markdown]
# See it: a weight of 1, whose gradient is always the same, so that each step of Adam is 0.001.


# %%
def drifting(kind, dtype, steps=30):
    """On a rank: a weight after each step."""
    w = nn.Parameter(torch.ones(10, dtype=dtype, device=launch.device()))
    optimizer, found = kind([w], lr=1e-3, weight_decay=0.0), [1.0]
    for _ in range(steps):
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()
        found.append(w[0].item())
    return found


drifts = {
    "float32": launch.ranks(drifting, ShardedGradients, torch.float32, n=2)[0],
    "bfloat16, no masters": launch.ranks(drifting, ShardedGradients, torch.bfloat16, n=2)[0],
    "bfloat16, float32 masters": launch.ranks(drifting, MasterShards, torch.bfloat16, n=2)[0],
}

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
for (name, weights), colour, width in zip(drifts.items(), ("#888888", "#D55E00", "#0072B2"), (4, 1.5, 1.5)):
    axes.plot(weights, label=name, drawstyle="steps-post", color=colour, linewidth=width)
axes.set(xlabel="step", ylabel="weight", title="Where do small updates go?")
axes.legend(fontsize=9, frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# ### Balise 7 · One norm for all shards · further · about 7 min
#
# Clipping bounds the length of the whole gradient: where $\lVert g \rVert > c$, all of it is multiplied by
# $c / \lVert g \rVert$, and its direction stays. Now no rank has the whole gradient. Ranks that clipped by the norms of
# their own shards would each scale by another factor, and the direction would turn.
#
# Given: `squares`, the sum of squares of each gradient of this rank, in float32, because in half precision squares
# overflow or are too coarse. At the end the gradients are multiplied by `scale`. Between these, find
#
# - `norm`, over the shards of **all** ranks, a tensor of no dimension, the same on all ranks: one number a rank travels,
#   in one collective.
# - `scale`, so that the norm becomes at most `max_norm`, and short gradients stay as they are. No value goes to Python
#   (`if norm > …`, `.item()`): on a GPU that would wait for all that is still under way.
#
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# Squares can be added up, norms cannot. `torch.stack` makes a tensor of the list. `torch.clamp(…, max=1.0)` is an `if`
# without a look at the value; `norm + 1e-6` is never zero.
# </details>


# %% tags=["balise-7"]
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """Scale the gradients of all ranks' shards to a common norm of at most max_norm. Returns the norm before, a tensor."""
    gradients = [p.grad for p in shards if p.grad is not None]
    squares = [g.to(torch.promote_types(g.dtype, torch.float32)).square().sum() for g in gradients]
    # BEGIN SOLUTION
    norm = torch.stack(squares).sum()
    dist.all_reduce(norm)
    norm = norm.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # END SOLUTION
    for g in gradients:
        g.mul_(scale)
    return norm


# %%
tp.check(7, clip_grad_norm)

# %% [markdown]
# See it: clipped to a fifth of the norm, all gradients shrink to 0.2 of what they were. The last column is the factor
# by which each rank would have scaled its shards alone.


# %%
def factors():
    """On a rank: (norm of the own shards, norm of all, norm after clipping to a fifth of it)."""
    model = make_model()
    optimizer = ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS)
    language_loss(model, token_batch(0)).backward()
    optimizer.reduce()
    own = torch.stack([p.grad.square().sum() for p in optimizer.shards]).sum().sqrt()
    norm = clip_grad_norm(optimizer.shards, 1e9)
    clip_grad_norm(optimizer.shards, norm.item() / 5)
    return own.item(), norm.item(), clip_grad_norm(optimizer.shards, 1e9).item()


print("rank   norm of own shards   norm of all   clipped to a fifth   factor by own norm")
for rank, (own, norm, after) in enumerate(launch.ranks(factors, n=RANKS[-1])):
    print(f"{rank:>4}   {own:>18.4f}   {norm:>11.4f}   {after:>18.4f}   {min(1, norm / 5 / own):>18.2f}")

# %% [markdown]
# ### Balise 8 · Masters and states in CPU memory · further · about 7 min
#
# Where 12 bytes for each parameter of its shard are still too many for the GPU, they can live in the memory of the
# host, which is larger and cheaper, and so can the update itself (Ren and others, *ZeRO-Offload*, 2021). What crosses
# the bus in a step is little: **this rank's shard of the gradients down, its shard of the parameters up, both in
# bfloat16**. Forward and backward stay on the GPU.
#
# Given: `__init__` moves the masters, and the states follow, as the optimizer makes them beside the masters. `t.cpu()`
# sends a tensor, `t.float()` casts it where it is, and `gpu.copy_(cpu)` into a bfloat16 tensor rounds before it sends.
#
# Write the loop of `reduce()`, which leaves each shard's mean gradient in `master.grad` on the CPU, in float32, and none
# on the GPU; and `update()`. The check runs your code on tensors that *say* they are on a GPU, and counts what crosses.
# About 2 and 1 lines.
#
# <details><summary>Hint</summary>
#
# In which order do `.cpu()` and `.float()` send 2 bytes an element? What must change in the `update()` that you have?
# </details>


# %% tags=["balise-8"]
class OffloadedShards(MasterShards):
    """MasterShards whose masters and optimizer states are in CPU memory, wherever the parameters are."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        for master in self.masters:
            master.data = master.data.cpu()

    def reduce(self):
        """After backward: leave in each master.grad, on the CPU, this rank's shard of the mean gradient in float32."""
        ShardedGradients.reduce(self)  # that of stage 2
        for part, master in zip(self.parts, self.masters):
            # BEGIN SOLUTION
            master.grad = part.own.grad.cpu().float()
            part.own.grad = None
            # END SOLUTION

    @torch.no_grad()
    def update(self):
        """Update the masters on the CPU, round them into this rank's shards, then gather the parameters of all ranks."""
        # BEGIN SOLUTION
        super().update()
        # END SOLUTION


# %%
tp.check(8, OffloadedShards)

# %% [markdown]
# What does it cost? On a GPU the next cell measures it; without one it is an estimate.


# %%
def offload_figures(kind, config, steps=6):
    """On a rank with a GPU: (bytes held between two steps, median seconds of a step)."""
    device, times = launch.device(), []
    model = make_model(config)
    for p in model.parameters():
        p.data = p.data.bfloat16()  # not model.bfloat16(), which would round the rotary tables, too
    optimizer = kind(model.parameters(), capacity=CAPACITY, fused=True, **OPTIONS)
    for step in range(steps):
        tokens = token_batch(step, config.max_length)
        measure.synchronize(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        language_loss(model, tokens).backward()
        optimizer.step()
        measure.synchronize(device)
        times.append(time.perf_counter() - start)
    optimizer.zero_grad()
    return torch.cuda.memory_allocated(device), sorted(times)[steps // 2]


if GPUS:
    config = FULL_SIZE if LARGE else SMALL
    for kind in (MasterShards, OffloadedShards):
        kept, seconds = launch.ranks(offload_figures, kind, config, n=RANKS[0] if FULL else 1, timeout=120)[0]
        print(f"{kind.__name__}: {measure.human_bytes(kept)} on the GPU, a step {measure.human_seconds(seconds)}")
else:
    bus, psi = 25e9, 1e9  # assumed: bytes a second each way (PCIe 4.0, 16 lanes), parameters of a shard
    print(f"estimate for a shard of a billion parameters: the GPU is rid of {12 * psi / 1e9:.0f} GB; in a step")
    print(f"{2 * psi / 1e9:.0f} GB cross the bus each way, {4 * psi / bus:.2f} s, and then the host's cores update")

# %% [markdown]
# ### Balise 9 · What a step sends · further · about 5 min
#
# Is the memory paid for with communication? Count it. `sent_bytes(step)` calls `step()` once, on every rank, and returns
# the bytes that *this* rank sends meanwhile. The log of the collectives is given: each entry has a `name` and `bytes`,
# **those that the rank hands in**. What it sends is another number; in a ring of $N$ ranks:
#
# | `name` | a rank hands in | and sends |
# |---|---|---|
# | `reduce_scatter` | the whole | $N-1$ times an $N$-th of it |
# | `all_gather` | its own part | $N-1$ times a part |
# | `all_reduce` | the whole | a reduce-scatter, then an all-gather of what came out |
# | `send` | a message | the message |
#
# Write `sent`: for each name, the bytes sent for one byte handed in. What is not in it (`recv`, barriers) counts nothing.
# About 1 to 6 lines.
#
# <details><summary>Hint</summary>
#
# On four ranks, with 100 bytes handed in: 75, 300, 150 and 100.
# </details>


# %% tags=["balise-9"]
def sent_bytes(step):
    """Bytes that this rank sends while step() runs, once, if every collective is a ring."""
    n = dist.get_world_size()
    # BEGIN SOLUTION
    sent = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1, "send": 1}
    # END SOLUTION
    with measure.Communications() as log:
        step()
    return sum(sent.get(entry["name"], 0) * entry["bytes"] for entry in log.entries() if entry["kind"] != "phase")


# %%
tp.check(9, sent_bytes)


# %% [markdown]
# Now your stages, in the unit of the paper: $\Psi$, the number of parameters. Guess before you run the next cells.

# %%
as_much = tp.predict(f"How many times Ψ does PyTorch's fully_shard send in a step, on {RANKS[-1]} ranks?", ...)


# %%
def volumes():
    """name -> elements sent in the second step over the number of parameters."""
    psi, racers, found = sum(p.numel() for p in make_model().parameters()), candidates(), {}
    del racers["ZeroRedundancyOptimizer"]  # its broadcasts are not in our table
    for name, (_, step) in racers.items():
        step(token_batch(0))  # the first step of DistributedDataParallel also compares the models
        found[name] = sent_bytes(lambda step=step: step(token_batch(1))) / 4 / psi
    return found


# %%
counted = {n: launch.ranks(volumes, n=n)[0] for n in RANKS}
in_blocks = CONFIG.layers * CONFIG.block_parameters / CONFIG.n_parameters
formula = (2, 2, 2, 3, 2 + in_blocks)  # fully_shard gathers its blocks twice, and what is left, its root, once
print("elements sent in a step / Ψ", *(f"{n} ranks, counted   formula" for n in RANKS), sep="   ")
for stage, name in enumerate(counted[RANKS[0]]):
    cells = [f"{counted[n][name]:>16.3f}   {formula[stage] * (n - 1) / n:>7.3f}" for n in RANKS]
    print(f"{name:<27}", *cells, sep="   ")
as_much.shows(
    counted[RANKS[-1]]["fully_shard"],
    "{:.2f} Ψ",
    "Of everything a rank sends (N - 1)/N, and fully_shard keeps its root, embedding and head, from forward to backward.",
)

# %% [markdown]
# With many ranks $(N-1)/N$ is nearly 1: **2Ψ, 2Ψ, 2Ψ, 3Ψ**. Why?
#
# - Data parallelism all-reduces the gradients: Ψ for the reduce-scatter in it, Ψ for the all-gather.
# - Stages 1 and 2 need of the reduced gradients only the own shard, Ψ, and gather the *updated parameters*, Ψ again.
#   Nothing is paid for the memory that was saved.
# - Stage 3 gathers its parameters for forward, Ψ, and for backward, Ψ; and the gradients' reduce-scatter, Ψ.
#
# ### Balise 10 · A checkpoint in pieces · further · about 10 min
#
# No rank holds the whole state any more, so no rank can write it. Each writes its own shards, and a checkpoint of
# many files must still be whole or not there, whenever the job is killed.
#
# The means is a *mark*, one small file that says which folder counts. `a.replace(b)` moves a file into the place of
# another in one stroke: whoever reads finds the old one or the new one, never a half. So the order decides:
#
# ```
# every rank   its shards, under the name `partial` → moved to `file`
# all          barrier
# rank 0       the mark, under the name mark.partial → moved to mark.json: now the checkpoint counts
# ```
#
# Write this order into `save_shards`. Given: `place`, a folder for each step and number of ranks, and another one where
# the mark points there already; `mark`, what is to be written; and the barrier at the end. `shards`: {name: 1-D tensor},
# this rank's equal part of a flat tensor of `lengths[name]` elements and padding. About 3 and 2 lines.
#
# `load_shards`, for **any number of ranks**, is given. With `each = ⌈length / N⌉`, rank r has the elements from
# `r * each` on, as then, so now: a rank reads what overlaps with its part, and no other file.
#
# <details><summary>Hint</summary>
#
# `torch.save` writes the whole memory behind a view: hence `clone`. `json.dumps(mark)` is the text of the mark.
# </details>


# %% tags=["balise-10"]
def save_shards(folder, step, shards, lengths):
    """Every rank writes its shards; the checkpoint counts when all are there. lengths: {name: elements without padding}."""
    folder, rank, world_size = Path(folder), dist.get_rank(), dist.get_world_size()
    place, last = folder / f"step-{step}-of-{world_size}", folder / "mark.json"
    if last.exists() and json.loads(last.read_text())["place"] == place.name:
        place = folder / f"{place.name}-again"  # never write where the mark points
    place.mkdir(parents=True, exist_ok=True)
    partial, file = place / f"{rank}.partial", place / f"{rank}.pt"
    # BEGIN SOLUTION
    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)
    partial.replace(file)
    dist.barrier()
    # END SOLUTION
    if rank == 0:
        dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in shards.items()}
        mark = {"step": step, "world_size": world_size, "lengths": lengths, "dtypes": dtypes, "place": place.name}
        # BEGIN SOLUTION
        (folder / "mark.partial").write_text(json.dumps(mark))
        (folder / "mark.partial").replace(folder / "mark.json")
        # END SOLUTION
    dist.barrier()


def load_shards(folder):
    """(step, {name: this rank's shard}) of the newest complete checkpoint, for the ranks of now; None without one."""
    if not (Path(folder) / "mark.json").exists():
        return None
    mark, shards = json.loads((Path(folder) / "mark.json").read_text()), {}
    files = [Path(folder) / mark["place"] / f"{k}.pt" for k in range(mark["world_size"])]
    for name, length in mark["lengths"].items():
        then, now = (-(-length // n) for n in (len(files), dist.get_world_size()))
        begin = dist.get_rank() * now
        shards[name] = torch.zeros(now, dtype=getattr(torch, mark["dtypes"][name]))
        for k, file in enumerate(files):
            low, high = max(begin, k * then), min(begin + now, (k + 1) * then, length)
            if low < high:
                piece = torch.load(file, mmap=True, weights_only=True, map_location="cpu")[name]
                shards[name][low - begin : high - begin] = piece[low - k * then : high - k * then]
    return mark["step"], shards


# %%
tp.check(10, save_shards, load_shards)

# %% [markdown]
# See it: trained for four steps on four ranks, saved, and loaded on two: its parameters alone; masters and states go the
# same way. (Practical work 14 resumes a training so.)


# %%
def a_loss(model):
    """The loss of one batch, the same on all ranks."""
    with torch.no_grad():
        return language_loss(model, TOKENS_USED[: LENGTH + 1][None].to(launch.device())).item()


def train_and_save(folder):
    """On a rank: the loss after four steps, whose parameters are saved."""
    model = make_model()
    optimizer = ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS)
    for step in range(4):
        stepper(model, optimizer)(token_batch(step))
    sizes = {str(k): sum(p.numel() for p in part.parameters) for k, part in enumerate(optimizer.parts)}
    save_shards(folder, 4, {str(k): part.own for k, part in enumerate(optimizer.parts)}, sizes)
    return a_loss(model)


def load(folder):
    """On a rank: the loss of a new model, and its loss with the loaded parameters."""
    model = make_model()
    parts, new = ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS).parts, a_loss(model)
    for name, values in load_shards(folder)[1].items():
        all_gather(parts[int(name)].flat, values.to(launch.device()))
    return new, a_loss(model)


with tempfile.TemporaryDirectory() as folder:
    trained = launch.ranks(train_and_save, folder, n=RANKS[-1])[0]
    new, loaded = launch.ranks(load, folder, n=2)[0]
    sizes = [measure.human_bytes(p.stat().st_size) for p in sorted(Path(folder).rglob("*.pt"))]
print(f"loss on {RANKS[-1]} ranks {trained:.6f}; on 2, before loading {new:.6f}, after {loaded:.6f}")
print("files:", ", ".join(sizes))

# %% [markdown]
# ## Past this machine · further
#
# When does the communication disappear behind the computation? A rank computes about $6\,\Psi$ floating-point
# operations for each token (Kaplan and others, 2020), and sends $2\,\Psi$ or $3\,\Psi$ numbers of 2 bytes in a step.
# $\Psi$ cancels: what counts is **how many tokens a rank computes in a step**,
#
# $$t_\text{compute} = \frac{6\,\Psi \cdot \text{tokens}}{\text{FLOP/s}} \qquad
# t_\text{send} = (2 \text{ or } 3)\,\Psi \cdot 2\text{ bytes} \cdot \text{seconds for a byte}$$
#
# The GPUs of a node talk through NVLink; between nodes each sends its part at the same time as its neighbours.

# %% jupyter={"source_hidden": true}
SPEED = 0.4 * planner.A100.bfloat16  # assumed: 40 % of the peak
NVLINK = planner.Link(0, 300e9)  # data sheets, bytes a second; latency is left out
LINKS = {"one node of 8": (1, 25e9, "#0072B2"), "8 nodes, a card for each GPU": (8, 25e9, "#D55E00"),
         "8 nodes, one card a node": (8, 25e9 / 8, "#555555")}  # fmt: skip
ticks, tokens = [2**k for k in range(7, 17)], [2 ** (k / 20) for k in range(140, 321)]
figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
for link, (nodes, rate, colour) in LINKS.items():
    seconds = planner.hierarchical_all_gather(1, nodes, 8, NVLINK, planner.Link(0, rate))  # for a byte
    for volume, words, line in ((2, "stages 0 to 2", "-"), (3, "stage 3", "--")):
        even = volume * 2 * seconds * SPEED / 6  # tokens at which both take equally long
        shares = [100 * min(1, count / even) for count in tokens]
        axes.plot(tokens, shares, line, color=colour, label=f"{link}, {words}: {even:,.0f} tokens")
axes.set_xscale("log", base=2)
axes.set(xticks=ticks, xticklabels=[f"{count:,}" for count in ticks], ylim=(0, 105))
axes.set(xlabel="tokens that a GPU computes in a step", ylabel="efficiency (%)")
axes.set_title("From how many tokens on is sending hidden? (model, not measured: perfect overlap)", fontsize=10)
figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Inside a node, stage 3 wants a few hundred tokens on every GPU in every step, on 8 nodes with a card for each GPU about
# a thousand, and thousands where the GPUs of a node share one card. Hence *hybrid* sharding: stage 3 inside a node, plain
# copies of it between nodes. And a ring of 1,024 ranks has 1,023 steps of some microseconds for every layer gathered:
# with very many ranks latency decides, as in practical work 08.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Gradients are accumulated over four micro-batches. What does each stage send, and keep?</summary>
#
# Stage 1 keeps whole gradients anyway: they add up there, and travel once. Stage 2 keeps only a shard, so every
# micro-batch's gradients must travel: 5 Ψ with the parameters. Or one keeps them whole until the last micro-batch, and
# is back at the memory of stage 1. Stage 3 also gathers its parameters for each forward and each backward: 12 Ψ where
# stage 1 sends 2 Ψ.
# </details>
#
# <details><summary>An optimizer scales each matrix's update by the matrix's norm. Can its states be sharded so?</summary>
#
# Not as it is: a cut through a matrix leaves each rank with a part of it. The partial sums of squares, one for each
# parameter, have to be added up over the ranks first.
# </details>
#
# <details><summary>ZeroRedundancyOptimizer is stage 1, and yet it sends 3 Ψ. What is it good for?</summary>
#
# It leaves the gradients to DistributedDataParallel: whole on every rank, so that nothing else in a program has to
# change, neither clipping nor logging nor other hooks. And it shares out whole parameters, so that optimizers which
# need them whole work as they are.
# </details>
#
# ## To remember
#
# An update needs one copy of the states, not one for each rank. ZeRO keeps data parallelism and gives each rank a
# shard: of the states (stage 1), of the gradients (stage 2), of the parameters (stage 3). A reduce-scatter brings
# gradients to their owner, an all-gather brings parameters to all, together they are an all-reduce: so stages 1 and 2
# save memory and send no more, and stage 3 pays half as much communication again for a memory that falls with every
# rank. All else is bookkeeping: flat tensors, hooks, and letting go of memory in time. `fully_shard` does what you have
# written; the next practical work, **14_fsdp**, uses it.
