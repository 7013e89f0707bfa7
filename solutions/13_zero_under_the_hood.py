# %% [markdown] tags=["slide"]
# # ZeRO, under the hood · about 125 min, core 60
#
# In data parallelism, every rank keeps a copy of the parameters, the gradients and the optimizer states. The *Zero
# Redundancy Optimizer* (ZeRO) removes the copies in three stages. You write these stages with two collectives,
# `reduce_scatter` and `all_gather`, and race them against PyTorch's versions.
#
# **What you will gain.** Memory: with data parallelism, a rank holds 16 bytes for each parameter. With stage 3 on $N$
# ranks, it comes close to $16/N$.

# %% tags=["setup"] jupyter={"source_hidden": true}
import functools
import json
import tempfile
import time
from dataclasses import replace
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

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# torch 2.14 renames these two; both write into their first argument
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# %% [markdown] tags=["slide"]
# ## The idea
#
# In mixed precision with Adam, each of the $\Psi$ parameters takes 16 bytes on a rank: 2 for the parameter, 2 for its
# gradient and 12 for the optimizer, which keeps a float32 copy (4) and two moments (8). But the update of parameter $i$
# reads only the gradient and the states of $i$. One rank can compute it alone and send the result to the others, so
# each stage cuts one more thing into $N$ shards:
#
# $$\underbrace{2\Psi+2\Psi+12\Psi}_{\text{data parallelism}}\;\to\;
# \underbrace{2\Psi+2\Psi+\frac{12\Psi}{N}}_{\text{stage 1}}\;\to\;
# \underbrace{2\Psi+\frac{2\Psi+12\Psi}{N}}_{\text{stage 2}}\;\to\;
# \underbrace{\frac{2\Psi+2\Psi+12\Psi}{N}}_{\text{stage 3}}$$
#
# In the figure, grey marks what a rank no longer holds (after Rajbhandari and others, *ZeRO*, 2020).

# %% tags=["slide"] jupyter={"source_hidden": true}
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
panels[0].set(ylabel="bytes per parameter")
figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
plt.show()

# %% [markdown]
# ## The baseline
#
# A small Llama-style decoder trains on the source code of Python's standard library. Plain data parallelism is stage 0:
# one flat all-reduce averages the gradients, and every rank updates all parameters.

# %% tags=["setup"] jupyter={"source_hidden": true}
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


def train(make):
    """Train on a rank with the optimizer make(model): (mean losses, seconds of each step, bytes held in the last)."""
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


# %% jupyter={"source_hidden": true}
found = {}


def run(name, make, n=RANKS[-1]):
    """Train on `n` ranks, keep the result, and print what rank 0 held."""
    losses, times, moments = found[name] = launch.ranks(train, make, n=n, timeout=120)[0]
    step = sorted(times[1:])[len(times) // 2]
    most = max(moments, key=lambda moment: sum(moment.values()))
    print(f"{name}, {n} ranks: loss {losses[0]:.3f} → {losses[-1]:.3f}, {measure.human_seconds(step)} a step")
    rows = [[part, moments[0][part], most[part]] for part in most]
    rows.append(["total", sum(moments[0].values()), sum(most.values())])
    rows = [[part, between / CONFIG.n_parameters, peak / CONFIG.n_parameters] for part, between, peak in rows]
    report.table({"bytes per parameter": "{}", "between steps": "{:.1f}", "peak": "{:.1f}"}, rows)


# %% [markdown]
# `run` trains on the ranks. In the last step, it adds up the memory of all parameters, gradients and states whenever a
# layer begins and whenever a gradient is complete. Activations and messages don't count.


# %%
def stage_0(model):
    return Replicated(model.parameters(), **OPTIONS)


run("data parallelism", stage_0)

# %% [markdown]
# The model trains in float32, so the 16 bytes are 4 + 4 + 8 here. All ranks hold the same amount.
#
# ### Balise 1 · Bytes on a rank · about 10 min
#
# Write the formula. Return the bytes on a rank as three numbers, `(parameters, gradients, optimizer)`.
#
# | bytes of a | parameter | gradient | optimizer: Adam | momentum | plain SGD |
# |---|---|---|---|---|---|
# | mixed precision | 2 | 2 | 4 + 8 | 4 + 4 | 4 + 0 |
# | float32 throughout | 4 | 4 | 8 | 4 | 0 |
#
# `weight` and `kept` hold the bytes from this table, and `share` is the number of parameters in a rank's shard. Stage 0
# shards nothing. Stage 1 shards the optimizer's part, stage 2 also the gradients, and stage 3 also the parameters.
#
# <details><summary>Hint</summary>
#
# Each number is bytes × (all parameters, or the share). From which stage on does it use the share?
# </details>


# %% tags=["balise-1"]
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    """Bytes on a rank: (parameters, gradients, optimizer). stage 0 to 3; optimizer "adam", "momentum" or "sgd"."""
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

# %% jupyter={"source_hidden": true}
worlds = [2**k for k in range(11)]
figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
    sizes = [sum(bytes_per_rank(7.5e9, n, stage)) / 1e9 for n in worlds]
    axes.plot(worlds, sizes, marker="o", markersize=4, label=name)
axes.axhline(planner.A100.memory / 1e9, color="#555555", linestyle="--", linewidth=1)
axes.text(1024, 81, "a GPU of 80 GB", ha="right", va="top", fontsize=9, color="#555555")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xticks=worlds, xticklabels=worlds, xlabel="ranks", ylabel="GB on each rank", yticks=(0.1, 1, 10, 100),
         yticklabels=("0.1", "1", "10", "100"))  # fmt: skip
axes.set_title("7.5 billion parameters, Adam, mixed precision (formula, not measured)", fontsize=10)
axes.legend(fontsize=9, frameon=False, loc="lower left")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Stages 1 and 2 level off at what they don't shard, 4 and 2 bytes a parameter. Stage 3 keeps falling.
#
# ### Balise 2 · One flat tensor, cut into equal shards · about 13 min
#
# Layers differ in size, so cutting between layers gives unequal parts. Instead, copy all parameters into **one** flat
# tensor, pad it with zeros, and cut it into equal shards. A cut may go through a matrix, because Adam updates each
# number on its own.
#
# ```
# [ matrix, row by row       | vector  | 0 0 ]
# [ rank 0     | rank 1      | rank 2        ]
# ```
#
# - `flatten(tensors, world_size)` returns a **new** 1-D tensor: all elements, then the fewest zeros that make its
#   length a multiple of `world_size`. It keeps the dtype and device of the tensors, which may be transposed. `size`
#   counts their elements.
# - `shard(flat, rank, world_size)` returns the rank's part, a contiguous **view** of `flat`.
# - `unflatten(flat, like)` goes back: a **view** of `flat` for each tensor of `like`, with its shape.
#
# <details><summary>Hint</summary>
#
# `-(-a // b)` is a / b rounded up. `t.reshape(-1)` lays out a tensor row by row, and `flat.split(sizes)` cuts one into
# pieces. `t.new_zeros(n)` and `t.new_empty(n)` have the dtype and device of `t`.
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
    """Views into `flat`, one for each tensor of `like`, with its shape; the padding is left out."""
    # BEGIN SOLUTION
    sizes = [t.numel() for t in like]
    return [piece.view(t.shape) for piece, t in zip(flat[: sum(sizes)].split(sizes), like)]
    # END SOLUTION


# %%
tp.check(2, flatten, shard, unflatten)

# %% [markdown]
# All stages build on `Part`. It moves parameters into a flat tensor: after `p.data = view`, the parameter uses the
# memory of `flat`. `own`, this rank's shard, uses that memory too, so **updating `own` updates the model**.


# %% tags=["setup"]
class Part:
    """Parameters in one flat tensor, of which this rank owns one shard: `own`. `views` are views of `flat`."""

    def __init__(self, parameters):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.parameters = list(parameters)
        self.flat = flatten(self.parameters, world_size)
        self.views = unflatten(self.flat, self.parameters)
        for p, view in zip(self.parameters, self.views):
            p.data = view
        self.own = nn.Parameter(shard(self.flat, rank, world_size))


# %% tags=["setup"] jupyter={"source_hidden": true}
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
# ### Balise 3 · Stage 1: a shard of the optimizer states · about 13 min
#
# The owner of a shard receives the shard's mean gradient and updates its parameters. It keeps optimizer states for this
# shard only. Then all ranks gather the new parameters.
#
# $$\underset{\Psi}{\text{gradients}} \xrightarrow{\text{reduce-scatter}} \underset{\Psi/N}{\text{own.grad}}
# \xrightarrow{\text{optimizer}} \underset{\Psi/N}{\text{own}} \xrightarrow{\text{all-gather}}
# \underset{\Psi}{\text{parameters}}$$
#
# `__init__` makes a `Part` for each parameter group, and an optimizer that sees only their `own` shards. Write
#
# - `reduce()`: leave this rank's shard of the **mean** gradient in each `part.own.grad`, with one reduce-scatter of a
#   flat tensor.
# - `update()`: update the shards, then gather them into each `part.flat`.
#
# <details><summary>Hint</summary>
#
# `reduce_scatter(out, flat)` adds up the flat tensors of all ranks, and rank r's `out`, (n / N,), gets shard r of the
# sum. `all_gather(flat, mine)` does the reverse. `mine` may be a view of `flat`, but must not require a gradient:
# `own.detach()`. Your `flatten` joins the gradients.
# </details>


# %% tags=["balise-3", "slide-mistake=all-reduce-first"]
class ShardedOptimizer:
    """An optimizer whose states are shared out among the ranks (ZeRO stage 1).

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
        """The parameters that this rank updates, one per part; after reduce(), they have gradients."""
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
# The losses are the same, and the states take $8/N$ bytes a parameter. The next two stages decide *when* a gradient or
# a parameter is in memory. In the figure, blue marks a layer's parameters in memory, dark while the layer computes.
# Orange marks its gradients, which are sent and then freed.

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
    title = "parameters stay, gradients leave" if stage == 2 else "a layer is gathered, computes, is freed"
    axes.set_title(f"stage {stage}: {title}", fontsize=10)
    axes.set(xlim=(0, 7), ylim=(2.8, -0.9), xticks=(1.5, 5), xticklabels=("forward", "backward"))
    axes.set_yticks(range(3), ["layer 1", "layer 2", "layer 3"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# ### Balise 4 · Stage 2: gradients leave during backward · further · about 14 min
#
# Stage 2 doesn't keep all gradients until backward ends. It sends them bucket by bucket during backward. Each bucket is
# a `Part`. A given hook calls `ready(p)` as soon as `p.grad` is complete. Write
#
# - `ready(p)`: if no gradient of its bucket is missing, `send` the bucket.
# - `send(part)`: free the gradients, since `flat` has their values. Start the reduce-scatter of `flat` into `arriving`
#   **asynchronously**, and append `(part, arriving, flat, handle)` to `self.running`.
# - `wait()`: wait for each handle and **add** what arrived to `own.grad`, which may be None: the gradients of several
#   backward passes add up.
#
# <details><summary>Hint</summary>
#
# A bucket is complete when no `p.grad` in it is None. Freeing its gradients makes it ready for the next backward pass.
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
        """p.grad is complete; if it was the last of its bucket, the bucket is sent."""
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
        """After backward: send what is left and wait. Then each own.grad is this rank's shard of the mean gradient."""
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
# ### Balise 5 · Stage 3: parameters only while they are used · about 15 min
#
# Each layer's parameters form a `Unit`. It is gathered just before its layer computes, freed just after, and gathered
# again for backward. Write
#
# - `Unit.gather()`, the reverse of `free()`.
# - the end of `add(layer)`: register `gather`, `free` and `backward_begins`.
# - the end of `send(part)`, and `update()`.
#
# **Write all of it:** `tp.open_task(5)` gives you only names and docstrings. Build stage 3 on your stage 2, so that
# only the layer in use is whole.
#
# <details><summary>Hint</summary>
#
# `storage.resize_(bytes)` counts bytes: `t.numel() * t.element_size()`. `layer.register_forward_pre_hook(f)`,
# `register_forward_hook(f)` and `register_full_backward_pre_hook(f)` call `f` before forward, after it, and before
# backward.
# </details>


# %% tags=["balise-5"]
class Unit(Part):
    """A Part of which this rank keeps only its shard; `flat` holds memory only between gather() and free().

    Part(parameters) moves them into `flat`, which is 1-D and padded. `views` are views of `flat` with their shapes, and
    `own`, an nn.Parameter, is this rank's shard, a view too. Here, `own` is a copy with its own memory, and a new unit
    holds nothing else.
    """

    def __init__(self, parameters):
        super().__init__(parameters)
        self.own = nn.Parameter(self.own.detach().clone())  # separate memory
        self.nothing = self.flat.new_empty(0)
        self.gathered = True
        self.free()

    def gather(self):
        """Give `flat` its memory and fill it with `own` of all ranks, outside any graph. Each p.data becomes its view.

        Autograd keeps views of `flat`, so fill the same storage: storage.resize_ brings back its bytes, and no more.
        all_gather(out, mine) writes the `mine` of all ranks, in order of rank, into `out`. The values are there when
        gather returns. If they are there already, it sends nothing.
        """
        if not self.gathered:
            # BEGIN SOLUTION
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            all_gather(self.flat, self.own.detach())
            # END SOLUTION
            for p, view in zip(self.parameters, self.views):
                p.data = view
            self.gathered = True

    def free(self):
        """Release the memory. A view keeps it alive, so empty the storage: flat.untyped_storage().resize_(0)."""
        for p in self.parameters:
            p.data = self.nothing
        self.flat.untyped_storage().resize_(0)
        self.gathered = False


class ShardedParameters(ShardedGradients):
    """ZeRO stage 3: between steps, a rank holds its shards and their states, and nothing else.

    layers: modules that together hold all parameters; each is gathered by itself, and freed.
    parts: the units of trained parameters. frozen: the other units. home: {parameter: its unit}. optimizer: an
    optimizer_class(self.shards, **options); `shards` is inherited, the `own` of each of the parts.

    Stage 2 has ready(p), which calls send(home[p]) if no gradient of that unit is missing, and send(part), which starts
    a reduce-scatter and frees the gradients. Its reduce() sends what is left, with zeros for unused parameters, and
    waits: each own.grad is then this rank's shard of the mean gradient. Its __init__ would make buckets, so don't call
    it, and set `running` to [] yourself.
    """

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        self.running, self.parts, self.home = [], [], {}
        self.frozen = []
        for layer in layers:
            self.add(layer)
        self.optimizer = optimizer_class(self.shards, **options)

    def add(self, layer):
        """Make the units of a layer, one for trained and one for frozen parameters; hooks gather and free them.

        A parameter that an earlier layer holds too stays in that layer's unit, which is then gathered here as well.
        `ready` is the post-accumulate-gradient hook of each trained parameter. The layer gathers before forward, frees
        after it, and gathers before backward. No gradient comes for a frozen unit: it is freed when the backward of
        another layer begins.
        """
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

        def backward_begins(*_):  # a frozen unit gets no gradient, so no hook frees it: free it here
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
        """As in stage 2: start the reduce-scatter. Then the parameters are not needed any more: free them."""
        super().send(part)
        # BEGIN SOLUTION
        part.free()
        # END SOLUTION

    def reduce(self):
        """As in stage 2; then frozen units that are still gathered are freed."""
        super().reduce()
        for unit in self.frozen:
            unit.free()

    def update(self):
        """Update this rank's shards, and gather nothing: the next forward does."""
        # BEGIN SOLUTION
        self.optimizer.step()
        # END SOLUTION


# %%
tp.check(5, Unit, ShardedParameters)

# %% [markdown]
# ## Measure again
#
# Stage 3 shards everything. How close does a rank get to $1/N$?

# %%
left = tp.predict(f"Stage 3 on {RANKS[-1]} ranks: what percentage of data parallelism's peak does a rank hold?", ...)


# %%
def stage_3(model):
    return ShardedParameters(layers_of(model), **OPTIONS)


run("stage 3", stage_3)
peaks = {name: max(sum(moment.values()) for moment in moments) for name, (_, _, moments) in found.items()}
left.shows(
    100 * peaks["stage 3"] / peaks["data parallelism"],
    "{:.0f} %",
    "A rank keeps 1/N of everything and, for a moment, whole gathered layers, which count for a lot in a small model.",
)

# %% tags=["slide"] jupyter={"source_hidden": true}
psi, n, rows = CONFIG.n_parameters, RANKS[-1], []
for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
    if name in found:
        totals = [sum(moment.values()) for moment in found[name][2]]
        formula = sum(bytes_per_rank(psi, n, stage, mixed_precision=False))
        rows.append([name, formula / psi, totals[0] / psi, max(totals) / psi, max(totals)])
print(f"bytes a parameter on each of {n} ranks; the last column is the peak for all {psi:,} parameters")
columns = {
    "float32": "{}",
    "formula": "{:.1f}",
    "between steps": "{:.1f}",
    "peak": "{:.1f}",
    "in all": measure.human_bytes,
}
report.table(columns, rows)

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
# Stage 1 peaks a shard above its formula, because `own.grad` exists alongside the whole gradients. Stage 2 peaks about
# a bucket above its formula, stage 3 about a layer.
#
# ### Gather ahead · further
#
# Your stage 3 computes nothing while it gathers a layer. `Ahead` gathers the next layer while this one computes, on a
# second stream, as `fully_shard` does. Both versions run on two **modelled** H100s with network cards of 100 Gb/s.


# %%
class Ahead(ShardedParameters):
    """Your stage 3; when a layer begins, it starts to gather the next one."""

    def __init__(self, layers, **options):
        super().__init__(layers, **options)
        self.stream = torch.cuda.Stream()
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, k=k: self.begins(k + 1))
            layer.register_full_backward_pre_hook(lambda *_, k=k: self.begins(k - 1))

    def begins(self, following):
        """The layer that begins waits for its parameters, and requests those of the following layer."""
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
    clock.restart()  # the figure begins here
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
# ## Race
#
# Do your stages train the same model as `ZeroRedundancyOptimizer` (stage 1) and `fully_shard` (stage 3)? How fast are
# they?


# %% jupyter={"source_hidden": true}
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


# %%
longer = tp.predict(
    f"By what factor does a step's time change from data parallelism to your stage 3, on {RANKS[-1]} ranks?", ...
)

# %%
medians = {}
for n in RANKS:
    losses, race = launch.ranks(race_on_ranks, 30 if FULL else 4, n=n, timeout=120)[0]
    rows = [[name, losses[name], seconds, race.spreads[name] / 2] for name, seconds in race.medians.items()]
    columns = {f"{n} ranks, {launch.backend(n)}": "{}", "loss": "{:.6f}", "a step": measure.human_seconds}
    report.table({**columns, "±": measure.human_seconds}, rows)
    medians[f"{n} ranks"] = race.medians
print(recorded.line("13_zero_under_the_hood", "race"))
if FULL:
    recorded.note("13_zero_under_the_hood", "race", medians)
longer.shows(
    race.medians["stage 3, yours"] / race.medians["data parallelism"],
    "× {:.2f}",
    "On a CPU, messages are copies in shared memory, and the smaller update makes up for part of it. On GPUs, the "
    "time that a step waits for gathers matters most.",
)

# %% [markdown]
# After three steps, the losses agree up to rounding.
#
# ## What real training needs
#
# ### Balise 6 · Parameters in bfloat16, masters in float32 · further · about 11 min
#
# In bfloat16, memory and messages halve, but an update of 0.001 to a weight of 1 is rounded away. Therefore the
# optimizer updates *masters*, float32 copies in which small updates add up (practical work 02). Only a shard's owner
# keeps its master. Write
#
# - `master_of`: a dictionary that maps the `part.own` of each of `self.parts` to its master, a float32 `nn.Parameter`
#   with the same values.
# - `reduce()`: put the mean gradient of each shard into `master.grad`, in float32.
# - the loop of `update()`: round each updated master into its `part.own`, then gather. Messages stay in bfloat16.
#
# <details><summary>Hint</summary>
#
# After stage 2's `reduce()`, the gradient is in `part.own.grad`. `a.copy_(b)` rounds, and may write into a parameter
# under `torch.no_grad()`.
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
        """What this rank updates: the masters; after reduce(), they have gradients."""
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
# ### Balise 7 · One norm for all shards · further · about 10 min
#
# Clipping shortens the gradient and keeps its direction. But no rank has the whole gradient, and if each clipped by the
# norm of its own shards, the direction would change.
#
# `squares` holds the sum of squares of each gradient on this rank, in float32. Find
#
# - `norm`, over the shards of **all** ranks: a tensor with no dimensions. Each rank sends one number, in one
#   collective.
# - `scale`, which brings the norm down to at most `max_norm` and leaves shorter gradients alone. No value may go to
#   Python (`if norm > …`, `.item()`): Python would wait for all pending work on the GPU.
#
# <details><summary>Hint</summary>
#
# Squares add up, norms don't. `torch.stack` makes a tensor of the list. `torch.clamp(…, max=1.0)` works like an `if`
# that doesn't look at the value, and `norm + 1e-6` is never zero.
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
# Below, the gradient is clipped to a fifth of its norm. The last column shows the factors that the ranks would have
# used on their own.


# %% jupyter={"source_hidden": true}
def factors():
    """On a rank: (norm of its own shards, norm of all shards, the latter after clipping it to a fifth)."""
    model = make_model()
    optimizer = ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS)
    language_loss(model, token_batch(0)).backward()
    optimizer.reduce()
    own = torch.stack([p.grad.square().sum() for p in optimizer.shards]).sum().sqrt()
    norm = clip_grad_norm(optimizer.shards, 1e9)
    clip_grad_norm(optimizer.shards, norm.item() / 5)
    return own.item(), norm.item(), clip_grad_norm(optimizer.shards, 1e9).item()


ranks = launch.ranks(factors, n=RANKS[-1])
columns = {
    "rank": "{}",
    "own norm": "{:.4f}",
    "norm of all": "{:.4f}",
    "clipped": "{:.4f}",
    "factor by own norm": "{:.2f}",
}
report.table(columns, [[rank, *norms, min(1, norms[1] / 5 / norms[0])] for rank, norms in enumerate(ranks)])

# %% [markdown]
# ### Balise 8 · Masters and states in CPU memory · further · about 9 min
#
# Masters and states can move to the host's memory, and its cores run the update (Ren and others, *ZeRO-Offload*, 2021).
# Only **this rank's shard crosses the bus: its gradients down, its parameters up, both in bfloat16**. `__init__` moves
# the masters. `t.cpu()` sends a tensor, `t.float()` casts it where it is, and `gpu.copy_(cpu)` rounds before it sends.
# Write
#
# - the loop of `reduce()`: leave each shard's mean gradient in `master.grad`, on the CPU and in float32, and leave no
#   gradient on the GPU.
# - `update()`.
#
# The check counts transferred bytes.
#
# <details><summary>Hint</summary>
#
# In which order do `.cpu()` and `.float()` send 2 bytes an element? What must change in the `update()` that you
# inherit?
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


# %% jupyter={"source_hidden": true}
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
    print(f"estimate for a shard of a billion parameters: the GPU saves {12 * psi / 1e9:.0f} GB; in a step,")
    print(f"{2 * psi / 1e9:.0f} GB cross the bus each way, {4 * psi / bus:.2f} s, and the host computes the update")

# %% [markdown]
# ### Balise 9 · What a step sends · further · about 8 min
#
# Does ZeRO pay for memory with communication? `sent_bytes(step)` returns the bytes that this rank sends during
# `step()`. The given log has the `name` of each collective and the `bytes` **that the rank hands in**. In a ring of $N$
# ranks:
#
# | `name` | a rank hands in | and sends |
# |---|---|---|
# | `reduce_scatter` | the whole | $N-1$ times an $N$-th of it |
# | `all_gather` | its own part | $N-1$ times a part |
# | `all_reduce` | the whole | a reduce-scatter, then an all-gather of the result |
# | `send` | a message | the message |
#
# Write `sent`, a dictionary: for each name, the bytes sent per byte handed in. Other names count as zero.
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

# %%
as_much = tp.predict(
    f"In a step on {RANKS[-1]} ranks, how many numbers does each rank send with fully_shard, as a multiple of Ψ?", ...
)


# %% jupyter={"source_hidden": true}
def volumes():
    """name -> elements sent in the second step, divided by the number of parameters."""
    psi, racers, found = sum(p.numel() for p in make_model().parameters()), candidates(), {}
    del racers["ZeroRedundancyOptimizer"]  # its broadcasts are not in our table
    for name, (_, step) in racers.items():
        step(token_batch(0))  # the first step of DistributedDataParallel also compares the models
        found[name] = sent_bytes(lambda step=step: step(token_batch(1))) / 4 / psi
    return found


# %% tags=["slide"]
counted = {n: launch.ranks(volumes, n=n)[0] for n in RANKS}
in_blocks = CONFIG.layers * CONFIG.block_parameters / CONFIG.n_parameters
formula = (2, 2, 2, 3, 2 + in_blocks)  # fully_shard gathers its blocks twice, and its root (all other parameters) once
columns = {"elements sent / Ψ": "{}"} | {f"{n} ranks, {how}": "{:.3f}" for n in RANKS for how in ("counted", "formula")}
rows = [[name] for name in counted[RANKS[0]]]
for row, times in zip(rows, formula):
    row += [number for n in RANKS for number in (counted[n][row[0]], times * (n - 1) / n)]
report.table(columns, rows)
as_much.shows(
    counted[RANKS[-1]]["fully_shard"],
    "{:.2f} Ψ",
    "A rank sends (N - 1)/N of everything, and fully_shard keeps its root (embedding and head) gathered until backward.",
)

# %% [markdown]
# With many ranks, data parallelism and the three stages send **2Ψ, 2Ψ, 2Ψ and 3Ψ**. Stages 1 and 2 send as much as an
# all-reduce. Stage 3 gathers the parameters twice, for forward and for backward.
#
# ### Balise 10 · A checkpoint in pieces · further · about 12 min
#
# Each rank writes its own shards. If the job is killed at any moment, the last complete checkpoint must still load. A
# small file, the *mark*, names the folder that counts, and `a.replace(b)` is atomic. Write these steps of
# `save_shards`, in this order:
#
# ```
# every rank   its shards, under the name `partial` → moved to `file`
# all          barrier
# rank 0       the mark, under the name mark.partial → moved to mark.json
# ```
#
# `shards` is {name: 1-D tensor}, this rank's part of padded flat tensors. The given `load_shards` works for **any
# number of ranks**: each rank reads the pieces that overlap its new part.
#
# <details><summary>Hint</summary>
#
# `torch.save` writes the whole storage of a view, hence `clone`. `json.dumps(mark)` is the text of the mark.
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
    """(step, {name: this rank's shard}) of the newest complete checkpoint, for the present number of ranks, or None."""
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
# A training run saves its parameters, and two ranks load them:


# %% jupyter={"source_hidden": true}
def a_loss(model):
    """The loss of one batch, the same on all ranks."""
    with torch.no_grad():
        return language_loss(model, TOKENS_USED[: LENGTH + 1][None].to(launch.device())).item()


def train_and_save(folder):
    """On a rank: the loss after four steps; saves the parameters."""
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
# ## Beyond this machine · further
#
# A rank performs about $6\,\Psi$ operations for each token and sends $2\,\Psi$ or $3\,\Psi$ numbers in a step. $\Psi$
# cancels out: whether sending is hidden depends on **how many tokens a rank processes in a step**.

# %% jupyter={"source_hidden": true}
SPEED = 0.4 * planner.A100.bfloat16  # assumed: 40 % of the peak
SHARED = replace(planner.A100, network=planner.A100.network / 8)
LINKS = {"one node of 8": (8, planner.A100, "#0072B2"), "8 nodes, a card for each GPU": (64, planner.A100, "#D55E00"),
         "8 nodes, one card a node": (64, SHARED, "#555555")}  # fmt: skip
ticks, tokens = [2**k for k in range(7, 17)], [2 ** (k / 20) for k in range(140, 321)]
figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
for link, (gpus, card, colour) in LINKS.items():
    seconds = planner.Cluster(card, latency=0).collective("all_gather", 1, gpus)  # for a byte
    for volume, words, line in ((2, "stages 0 to 2", "-"), (3, "stage 3", "--")):
        even = volume * 2 * seconds * SPEED / 6  # tokens at which both take equally long
        shares = [100 * min(1, count / even) for count in tokens]
        axes.plot(tokens, shares, line, color=colour, label=f"{link}, {words}: {even:,.0f} tokens")
axes.set_xscale("log", base=2)
axes.set(xticks=ticks, xticklabels=[f"{count:,}" for count in ticks], ylim=(0, 105))
axes.set(xlabel="tokens that a GPU processes in a step", ylabel="efficiency (%)")
axes.set_title("How many tokens does it take to hide sending? (model, not measured: perfect overlap)", fontsize=10)
figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# If the GPUs of a node share one network card, stage 3 needs thousands of tokens on every GPU. *Hybrid sharding* helps:
# it uses stage 3 inside a node and data parallelism across nodes.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Gradients are accumulated over four micro-batches. What does each stage send?</summary>
#
# Stage 1 adds them up locally and sends once: 2 Ψ. Stage 2 keeps only a shard, so the gradients of every micro-batch
# must travel: 5 Ψ with the parameters. Stage 3 also gathers its parameters for each forward and each backward: 12 Ψ.
# </details>
#
# <details><summary>An optimizer scales each matrix's update by the matrix's norm. Can its states be sharded like this?</summary>
#
# Yes, with one more message: a cut matrix has its parts on several ranks, which first have to add up their sums of
# squares.
# </details>
#
# <details><summary>ZeroRedundancyOptimizer is stage 1, and yet it sends 3 Ψ. What is it good for?</summary>
#
# DistributedDataParallel all-reduces whole gradients, so clipping and hooks need no change. The optimizer then
# broadcasts whole parameters, so it works with optimizers that need a whole matrix.
# </details>
#
# ## To remember
#
# ZeRO gives each rank a shard of the states (stage 1), the gradients (stage 2) and the parameters (stage 3). A
# reduce-scatter followed by an all-gather is an all-reduce, so stages 1 and 2 send no more than data parallelism. Stage
# 3 sends half as much again, and its memory falls as ranks are added. `fully_shard` does what you have written. Next:
# **14_fsdp**.
