# %% [markdown]
# # ZeRO, under the hood · about 225 min, core 60
#
# Data parallelism holds everything on every rank: the same parameters, the same gradients, the same optimizer states,
# as many times as there are ranks. The *Zero Redundancy Optimizer* keeps the method and takes the copies away: first
# of the states, then of the gradients, then of the parameters themselves. In this practical work you write its three
# stages with `reduce_scatter` and `all_gather` alone, and then what a real training adds: half precision, clipping,
# memory of the host, a checkpoint in pieces. You count what each rank holds and what it sends, and at the end your
# stages run against PyTorch's.
#
# **What you will gain.** How large a model fits, if only parameters, gradients and Adam's states counted? The next
# cell asks for GPUs of 80 GB and mixed precision. It is an *estimate*: arithmetic with the published formula, nothing
# measured.

# %% tags=["setup"]
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

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
# price? You will count that, too.
#
# All sizes are here. With two GPUs or more, the ranks talk through NCCL; else they are processes on the CPU, talk
# through gloo, and share the cores. A single GPU measures what one rank can show: offload, at full size.

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
#
# These are the paper's bytes, and this notebook keeps to them. Usual practice beside bfloat16 parameters adds gradients
# up and reduces them in float32: 4 bytes in the place of 2, 18 in all (`planner.state_bytes` has the option).

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
# The model is a small decoder of the Llama kind, on the source code of Python's standard library. It knows nothing of
# ranks. Each rank trains on its own sequences. `language_loss(model, tokens)` is the mean cross-entropy of each next token.


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
# Sixteen bytes for each parameter: float32 throughout here, 4 + 4 + 8. Every other rank holds the very same.
#
# Two helpers are given: one brings parameters into groups, as `torch.optim` takes them; the other is `make_buckets`
# of practical work 08.


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
# ### Balise 1 · Bytes on a rank · about 10 min
#
# Write the formula as a function: bytes of a rank as three numbers, `(parameters, gradients, optimizer)`. Fractions are
# fine, and padding counts nothing.
#
# | | parameter | gradient | optimizer: Adam | momentum | plain SGD |
# |---|---|---|---|---|---|
# | mixed precision | 2 | 2 | 4 + 8 | 4 + 4 | 4 + 0 |
# | float32 throughout | 4 | 4 | 8 | 4 | 0 |
#
# The 4 in the first row is the float32 copy of the parameter: it belongs to the optimizer, and is shared out with its
# states. Stage 0 shares nothing out, stage 1 the optimizer's part, stage 2 also the gradients, stage 3 also the
# parameters. About 6 lines.
#
# The check asks for the published example: 7.5 billion parameters on 64 ranks, 120, 31.4, 16.6 and 1.9 GB.
#
# <details><summary>Hint</summary>
#
# `{"adam": 8, …}[optimizer]` gives the states. Each of the three numbers is bytes × (all parameters, or a share of
# them): from which stage on is it the share?
# </details>


# %% tags=["balise-1"]
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    """Bytes of a rank: (parameters, gradients, optimizer). stage 0 to 3; optimizer "adam", "momentum" or "sgd"."""
    # BEGIN SOLUTION
    weight = 2 if mixed_precision else 4
    kept = {"adam": 8, "momentum": 4, "sgd": 0}[optimizer] + (4 if mixed_precision else 0)
    share = n_parameters / world_size
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
# Stages 1 and 2 end on a floor, what is not shared out yet: 4 bytes a parameter, then 2. Stage 3 has none. With 16
# ranks, stage 1 is at 4.75 bytes and stage 2 at 2.9: near their floors.

# %% [markdown]
# ### Balise 2 · One flat tensor, cut into equal shards · about 12 min
#
# How do you cut a model into $N$ equal parts? Not by layers, which have all sizes. All parameters are laid into
# **one** flat tensor, and that is cut: a cut may go through the middle of a matrix, which an optimizer that works
# number by number does not mind.
#
# - `flatten(tensors, world_size)`: a **new** tensor of one dimension with all elements, one tensor after the other in
#   the order of the list, then zeros, as few as possible, until `world_size` divides its length $n$. Same dtype and
#   device as the tensors, which are all alike in this; they may be transposed, empty, or scalars. No graph
#   (`@torch.no_grad()` sees to it).
# - `shard(flat, rank, world_size)`: the part of `flat` that `rank` owns, `(n / world_size,)`, one piece. A **view**.
# - `unflatten(flat, like)`: a list of **views** into `flat`, one for each tensor of `like`, with its shape. What is
#   behind is padding.
#
# About 5, 1 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `-(-a // b)` is a / b, rounded up. `t.reshape(-1)` lays out a tensor row by row, a scalar too; `torch.cat` joins.
# `t.new_zeros(n)` and `t.new_empty(n)` have the dtype and the device of `t`. `flat.split([3, 5])` gives views of 3
# and of 5 elements, `.view(shape)` gives them their shapes.
# </details>


# %% tags=["balise-2"]
@torch.no_grad()
def flatten(tensors, world_size):
    """One new tensor (n,): all elements, one tensor after the other, then zeros until world_size divides n."""
    # BEGIN SOLUTION
    size = sum(t.numel() for t in tensors)
    flat = tensors[0].new_empty(-(-size // world_size) * world_size)
    torch.cat([t.reshape(-1) for t in tensors], out=flat[:size])
    flat[size:] = 0
    return flat
    # END SOLUTION


def shard(flat, rank, world_size):
    """The part of `flat` that `rank` owns, (n / world_size,): a view."""
    # BEGIN SOLUTION
    return flat.view(world_size, -1)[rank]
    # END SOLUTION


def unflatten(flat, like):
    """Views into `flat`, one for each tensor of `like`, with its shape."""
    # BEGIN SOLUTION
    sizes = [t.numel() for t in like]
    return [piece.view(t.shape) for piece, t in zip(flat[: sum(sizes)].split(sizes), like)]
    # END SOLUTION


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
# parameter look at another memory, and the model does not notice. This rank's shard is a parameter by itself, for the
# optimizer: **what happens to `own` happens to the model**, because both are the same memory.


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
# ### Balise 3 · Stage 1: a shard of the optimizer states · about 21 min
#
# Every rank computes its own gradients, as before. Then the mean gradient is needed only where it is used: the owner
# of a shard gets that shard of it. It updates its shard, with states for that shard alone, and all gather the new
# parameters.
#
# Write `ShardedOptimizer`, with one `Part` for each group:
#
# - `__init__`: `self.parts`, by `self.make_parts(...)`, for every group of `param_groups(parameters)`, in its order;
#   and `self.optimizer`, an `optimizer_class` with `options` that knows only the parts' `own`. A group is a
#   dictionary, and its own options (a rate, a weight decay) stay with it.
# - `reduce()`: leave in each `own.grad` this rank's shard of the **mean** gradient over all ranks, by a
#   reduce-scatter. A parameter that was not used has `p.grad` None and counts as zero, at its place.
# - `update()`: update the shards, gather the parameters.
# - `zero_grad()`: all gradients become None, those of the shards too.
#
# Sent in a step: $\Psi$ for the reduce-scatter, $\Psi$ for the all-gather. Held: one copy of the parameters, the
# states of one shard. About 5, 5, 3 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `reduce_scatter(out, flat)`: the flat tensors of all ranks are added up, and rank r's `out`, (n / N,), gets shard r
# of the sum. `all_gather(flat, mine)` is its mirror; `mine` may lie in `flat`, and should be outside of any graph:
# `own.detach()`. `{**group, "params": […]}` is the group with other parameters.
# </details>


# %% tags=["balise-3"]
class ShardedOptimizer:
    """An optimizer whose states are shared out over the ranks (ZeRO stage 1).

    parameters: a list of parameters, or of groups, as torch.optim takes them. options: those of optimizer_class.
    parts: list of Part. shards: what this rank updates. optimizer: an optimizer_class on the shards, group by group.
    """

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        # BEGIN SOLUTION
        self.parts, groups = [], []
        for group in param_groups(parameters):
            parts = self.make_parts(group["params"])
            self.parts += parts
            groups.append({**group, "params": [part.own for part in parts]})
        self.optimizer = optimizer_class(groups, **options)
        # END SOLUTION

    def make_parts(self, parameters):
        """The parts of one group; a later stage makes several."""
        return [Part(parameters)]

    @property
    def shards(self):
        """The parameters that this rank updates, one a part; after reduce() with their gradients."""
        return [part.own for part in self.parts]

    def reduce(self):
        """After backward: leave in each own.grad this rank's shard of the mean gradient over all ranks."""
        # BEGIN SOLUTION
        for part in self.parts:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters]
            flat = flatten(gradients, dist.get_world_size()).div_(dist.get_world_size())
            part.own.grad = torch.empty_like(part.own)
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
        # BEGIN SOLUTION
        for part in self.parts:
            for p in [*part.parameters, part.own]:
                p.grad = None
        # END SOLUTION


# %%
tp.check(3, ShardedOptimizer)


# %%
def stage_1(model):
    return ShardedOptimizer(model.parameters(), **OPTIONS)


run("stage 1", stage_1)

# %% [markdown]
# The same losses, and each rank holds its part of the states. The update is done once, not on every rank.

# %% [markdown]
# ### Balise 4 · Stage 2: gradients leave while backward goes on · further · about 29 min
#
# In stage 1, all gradients of a rank are there when backward ends; most of them are another rank's business. Stage 2
# lets them go as soon as they come, bucket by bucket. Each bucket is a `Part` with a shard of its own, so
# `ShardedOptimizer` works on as it is.
#
# `ShardedGradients` adds to yours:
#
# - `make_parts(parameters)`: a `Part` for each bucket of at most `capacity` bytes (given: `make_buckets`).
# - `ready(p)` is called by a hook when `p.grad` is complete. Was it the last of its bucket, `send` it.
# - `send(part)`: start the reduce-scatter, asynchronously so that backward goes on, and free the gradients at once: `p.grad = None`. The
#   flat tensor must live until it has travelled, and no longer: before another starts, wait for the one before.
# - `wait()`: wait for what is under way; what arrives is **added** to `own.grad`, so that several backward passes
#   before a step add up.
# - `reduce()`: after backward, send what is left and wait. A parameter that was not used keeps its bucket from being
#   complete; it counts as zero. A bucket of which nothing was used leaves zeros in `own.grad`, not None, with which
#   AdamW would leave out its weight decay.
#
# All ranks use the same parameters in a step, so they start the same buckets in the same order. Held: the gradients
# of one shard and about two buckets. About 5, 1, 3, 7, 4 and 5 lines.
#
# <details><summary>Hint</summary>
#
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when the gradient is in `p.grad`. A bucket is complete when
# no `p.grad` in it is None: freeing them makes it ready for the next backward. `reduce_scatter(out, flat,
# async_op=True)` returns a handle with `wait()`; a list of (part, out, flat, handle) keeps all that must live.
# `super().__init__` calls `make_parts`: what that needs must be set before.
# </details>


# %% tags=["balise-4"]
class ShardedGradients(ShardedOptimizer):
    """ShardedOptimizer that keeps of the gradients only its shards (ZeRO stage 2). capacity: bytes of a bucket."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        # BEGIN SOLUTION
        self.capacity, self.running = capacity, []
        super().__init__(parameters, optimizer_class, **options)
        self.home = {p: part for part in self.parts for p in part.parameters}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)
        # END SOLUTION

    def make_parts(self, parameters):
        """A Part for each bucket."""
        # BEGIN SOLUTION
        return [Part(bucket) for bucket in make_buckets(parameters, self.capacity)]
        # END SOLUTION

    def ready(self, p):
        """p.grad is complete; where it was the last of its bucket, the bucket leaves."""
        # BEGIN SOLUTION
        part = self.home[p]
        if all(q.grad is not None for q in part.parameters):
            self.send(part)
        # END SOLUTION

    def send(self, part):
        """Start the reduce-scatter of a part's gradients, and free what is not owned; at most one is under way."""
        # BEGIN SOLUTION
        self.wait()
        gradients = [torch.zeros_like(v) if p.grad is None else p.grad for p, v in zip(part.parameters, part.views)]
        flat = flatten(gradients, dist.get_world_size()).div_(dist.get_world_size())
        for p in part.parameters:
            p.grad = None
        arriving = torch.empty_like(part.own)
        self.running.append((part, arriving, flat, reduce_scatter(arriving, flat, async_op=True)))
        # END SOLUTION

    def wait(self):
        """Wait for what is under way, and add it to own.grad."""
        # BEGIN SOLUTION
        for part, arriving, _, work in self.running:
            work.wait()
            part.own.grad = arriving if part.own.grad is None else part.own.grad + arriving
        self.running.clear()
        # END SOLUTION

    def reduce(self):
        """After backward: send what is left, wait; each own.grad is this rank's shard of the mean gradient."""
        # BEGIN SOLUTION
        self.wait()
        for part in self.parts:
            if part.own.grad is None or any(p.grad is not None for p in part.parameters):
                self.send(part)
        self.wait()
        # END SOLUTION


# %%
tp.check(4, ShardedGradients)


# %%
def stage_2(model):
    return ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS)


run("stage 2", stage_2)

# %% [markdown]
# ### Balise 5 · Stage 3: parameters only while they are used · further · about 49 min
#
# Now the parameters. A rank keeps its shard of each layer, gathers the layer just before it computes, frees it just
# after, and does so once more in backward. (Lectures sometimes say that stage 3 deals whole layers out to the ranks. It
# does not: it cuts each layer over all of them, as you do here, and as DeepSpeed and `fully_shard` do.)
#
# The difficulty: autograd remembers what forward used. A linear layer keeps a *view* of its weight for backward, and
# a view keeps the memory alive. So the memory itself must go, below all views: `flat.untyped_storage().resize_(0)`.
# Gathered again, the views see the values again. Meanwhile `p.data` is an empty tensor: who reads a parameter at the
# wrong moment gets an error and not freed memory.
#
# `Unit` is a `Part` whose `own` has a memory of its own:
#
# - `gather()`: give `flat` its memory back, fill it from all ranks' `own`, make each `p.data` its view
#   (`self.views`). Nothing where it is there already.
# - `free()`: each `p.data` becomes `self.nothing`, the memory of `flat` goes.
#
# `ShardedParameters`, for `layers`, modules that together hold all parameters:
#
# - `add(layer)`: trained parameters in a `Unit` of `self.parts`, with the hooks of stage 2; frozen ones in a `Unit`
#   of `self.frozen`, which the optimizer does not know. A **tied** parameter belongs to the first layer that has it;
#   *every* layer that uses it gathers it. Then three hooks on the layer: before forward, after forward, before
#   backward.
# - `send(part)`: as in stage 2. The gradients of the unit are complete: it is not needed any more.
# - Frozen parameters are gathered in backward too, but no gradient ever says that they are done. Free them when the
#   backward of another layer begins, and those of the first layers in `reduce()`.
# - `update()`: the shards are updated, nothing is gathered.
#
# - `__init__`: `self.parts`, `self.frozen`, the hooks, and an optimizer on the units' `own`.
#
# About 6, 4, 6, 25, 2, 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# `storage.resize_(bytes)` counts bytes: `t.numel() * t.element_size()`. `layer.register_forward_pre_hook(f)`,
# `register_forward_hook(f)` and `register_full_backward_pre_hook(f)` call `f(layer, …)`; what `f` returns would
# replace inputs or outputs, so return None. A dictionary from parameter to unit, such as `self.home`, answers both
# questions: is it taken, and which units does this layer need? What of `super().__init__` is wanted here, and what
# not?
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
        # BEGIN SOLUTION
        if not self.gathered:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            all_gather(self.flat, self.own.detach())
            for p, view in zip(self.parameters, self.views):
                p.data = view
            self.gathered = True
        # END SOLUTION

    def free(self):
        """Give the memory of `flat` back."""
        # BEGIN SOLUTION
        for p in self.parameters:
            p.data = self.nothing
        self.flat.untyped_storage().resize_(0)
        self.gathered = False
        # END SOLUTION


class ShardedParameters(ShardedGradients):
    """ZeRO stage 3. layers: modules that together hold all parameters; each is gathered by itself, and freed."""

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        # BEGIN SOLUTION
        self.running, self.parts, self.home = [], [], {}
        self.frozen = []
        for layer in layers:
            self.add(layer)
        self.optimizer = optimizer_class(self.shards, **options)
        # END SOLUTION

    def add(self, layer):
        """Make the units of a layer: trained and frozen parameters apart; hooks gather them when the layer is used."""
        # BEGIN SOLUTION
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

        def backward_begins(*_):
            for unit in self.frozen:
                if unit not in units:
                    unit.free()
            gather()

        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(free)
        layer.register_full_backward_pre_hook(backward_begins)
        # END SOLUTION

    def send(self, part):
        """As before; then the parameters are not needed any more."""
        # BEGIN SOLUTION
        super().send(part)
        part.free()
        # END SOLUTION

    def reduce(self):
        """As before; then frozen layers that are still gathered are freed."""
        # BEGIN SOLUTION
        super().reduce()
        for unit in self.frozen:
            unit.free()
        # END SOLUTION

    def update(self):
        """Update this rank's shards. Nothing is gathered."""
        # BEGIN SOLUTION
        self.optimizer.step()
        # END SOLUTION


# %%
tp.check(5, Unit, ShardedParameters)


# %%
def stage_3(model):
    return ShardedParameters(layers_of(model), **OPTIONS)


run("stage 3", stage_3)

# %% [markdown]
# ## One step, moment by moment
#
# What one rank holds while a step goes by: forward layer by layer, backward layer by layer, update. Buckets under way
# and activations are not drawn.

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
# Read it from left to right. The green falls with stage 1 and stays. The orange of stage 2 is a thin wedge that grows
# to one shard. The blue of stage 3 is a shard and a bump wherever a layer is gathered. The formula counts neither the
# bumps nor the shard of gradients that stands beside the whole ones for a moment in stage 1. A bump is one layer: one
# part in eighty for a model of eighty layers.
#
# Stage 3 has a price beside its bytes: whoever gathers a layer when it begins stands and waits. `Ahead` is given: your
# stage 3, whose layers are gathered on a stream of their own while the layer before computes. Both on two **modelled**
# H100, each behind a network card of 100 Gb/s, a decoder of six blocks: tensors have sizes and no values, operations and
# messages take the time of their arithmetic and their bytes.


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
# Above, computing and messages take turns: neither begins before the other has ended. Below, most gathers travel beside the
# computing; what is left of the waiting is forward, where this network needs longer for a layer than the card. `fully_shard`,
# in the next practical work, gathers ahead as well.

# %% tags=["setup"]
import json
import tempfile
from pathlib import Path

from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

# %% [markdown]
# ## What a real training needs besides
#
# Three stages, and all of it in float32. Next come the four things that every training framework adds: half precision,
# clipping, memory beyond the GPU, and a checkpoint of what lies in pieces.
#
# ### Balise 6 · Parameters in bfloat16, masters in float32 · further · about 17 min
#
# A large model computes in bfloat16: half the memory, half the bytes in every message. But near 1 the bfloat16
# numbers are 1/128 apart, and an update of 0.001 is rounded away, every time. So the optimizer works on a *master*, a
# float32 copy, in which small updates add up (practical work 02). It is needed where a parameter is updated: on its
# owner alone. That is the 12 in the formula: 4 bytes of master and 8 of Adam's states, all of them divided by $N$.
#
# Write `MasterShards` for parameters in bfloat16, on top of your stage 2:
#
# - `self.masters`: a list with one float32 `nn.Parameter` for each part, in their order, the values of `part.own`. Made
#   once. The optimizer knows nothing else; the options of each group stay those of its parts.
# - `reduce()` leaves the mean gradient of each shard, in float32, in `master.grad`.
# - `update()` updates the masters and rounds them into the parameters of all ranks.
# - Parameters, their gradients and every message stay in bfloat16.
#
# Between two steps, with `zero_grad()` called, a rank holds 2 bytes a parameter and 12 for each of its own shard.
# About 5, 3 and 4 lines.
#
# <details><summary>Hint</summary>
#
# An optimizer makes its states at the first step. So let `super().__init__` make it for the bfloat16 shards, and
# exchange these for the masters in each `group["params"]` of `self.optimizer.param_groups`. `a.copy_(b)` rounds;
# under `torch.no_grad()` it may write into a parameter.
# </details>


# %% tags=["balise-6"]
class MasterShards(ShardedGradients):
    """ZeRO stage 2 for parameters in bfloat16. masters: float32 copies of this rank's shards, one for each part."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        # BEGIN SOLUTION
        super().__init__(parameters, optimizer_class, **options)
        master_of = {part.own: nn.Parameter(part.own.detach().float()) for part in self.parts}
        self.masters = list(master_of.values())
        for group in self.optimizer.param_groups:
            group["params"] = [master_of[own] for own in group["params"]]
        # END SOLUTION

    @property
    def shards(self):
        """What this rank updates: the masters; after reduce() with their gradients."""
        return self.masters

    def reduce(self):
        """After backward: leave in each master.grad this rank's shard of the mean gradient, in float32."""
        # BEGIN SOLUTION
        super().reduce()
        for part, master in zip(self.parts, self.masters):
            master.grad = part.own.grad.float()
            part.own.grad = None
        # END SOLUTION

    @torch.no_grad()
    def update(self):
        """Update the masters, round them into this rank's shards, then gather the parameters of all ranks."""
        # BEGIN SOLUTION
        self.optimizer.step()
        for part, master in zip(self.parts, self.masters):
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
# See it: a weight of 1, whose gradient is always the same, so that each step of Adam is 0.001. What becomes of it,
# with the parameters in float32, in bfloat16 alone, and in bfloat16 with masters?


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


figure, axes = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
for name, kind, dtype, look in (
    ("float32", ShardedGradients, torch.float32, {"color": "#888888", "linewidth": 4}),
    ("bfloat16, no masters", ShardedGradients, torch.bfloat16, {"color": "#D55E00"}),
    ("bfloat16, float32 masters", MasterShards, torch.bfloat16, {"color": "#0072B2"}),
):
    axes.plot(launch.ranks(drifting, kind, dtype, n=2)[0], label=name, drawstyle="steps-post", **look)
axes.set(xlabel="step", ylabel="weight", title="Where do small updates go?")
axes.legend(fontsize=9, frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# ### Balise 7 · One norm for all shards · further · about 12 min
#
# Clipping bounds the length of the whole gradient: where $\lVert g \rVert > c$, all of it is multiplied by
# $c / \lVert g \rVert$, and its direction stays. Now no rank has the whole gradient. Ranks that clipped by the norms of
# their own shards would each scale by another factor, and the direction would turn.
#
# `shards` are this rank's parameters after `reduce()`, each with its part in `p.grad` (None where there is none, but
# not all; on some rank they may all have no element). Scale the gradients in place, so that the norm over all ranks is at most
# `max_norm`, and return the norm from before, a tensor, the same on all ranks.
#
# - One number a rank travels, in one collective.
# - No value goes to Python (`if norm > …`, `.item()`): on a GPU that would wait for all that is still under way.
# - Gradients may be in float16 or bfloat16, where squares overflow or are too coarse.
#
# About 6 lines.
#
# <details><summary>Hint</summary>
#
# Squares can be added up, norms cannot. `g.float()` is a float32 copy of a gradient in half precision.
# `torch.clamp(…, max=1.0)` is an `if` without a look at the value.
# </details>


# %% tags=["balise-7"]
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """Scale the gradients of all ranks' shards to a common norm of at most max_norm. Returns the norm before, a tensor."""
    # BEGIN SOLUTION
    gradients = [p.grad for p in shards if p.grad is not None]
    squares = [g.to(torch.promote_types(g.dtype, torch.float32)).square().sum() for g in gradients]
    norm = torch.stack(squares).sum()
    dist.all_reduce(norm)
    norm = norm.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for g in gradients:
        g.mul_(scale)
    return norm
    # END SOLUTION


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
# ### Balise 8 · Masters and states in CPU memory · further · about 13 min
#
# Where 12 bytes for each parameter of its shard are still too many for the GPU, they can live in the memory of the
# host, which is larger and cheaper, and so can the update itself (Ren and others, *ZeRO-Offload*, 2021). What crosses
# the bus in a step is little: **this rank's shard of the gradients down, its shard of the parameters up, both in
# bfloat16**. Forward and backward stay on the GPU.
#
# A copy with `non_blocking=True` between the GPU and *pinned* (page-locked) memory goes on beside other work. It has two
# traps: what comes down may be read only after a synchronisation; and where the copy also casts, PyTorch casts on the
# GPU, so that float32 crosses. A copy that blocks casts on the CPU.
#
# Change `MasterShards` so that
#
# - the masters are in CPU memory, and so are the states: the optimizer makes them beside the masters;
# - `reduce()` brings each shard's mean gradient to the CPU, and makes float32 of it there;
# - `update()` computes on the CPU and sends the rounded values back.
#
# The check runs your code on tensors that *say* they are on a GPU, and counts what crosses. About 3 and 4 lines;
# perhaps your `update()` is right as it is.
#
# <details><summary>Hint</summary>
#
# `master.data = master.data.cpu()` moves a parameter that the optimizer already knows.
# `ShardedGradients.reduce(self)` is the one of stage 2. `t.cpu().float()` sends 2 bytes an element, `t.float().cpu()`
# 4. `gpu.copy_(cpu)` into a bfloat16 tensor rounds before it sends.
# </details>


# %% tags=["balise-8"]
class OffloadedShards(MasterShards):
    """MasterShards whose masters and optimizer states are in CPU memory, wherever the parameters are."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        # BEGIN SOLUTION
        super().__init__(parameters, optimizer_class, **options)
        for master in self.masters:
            master.data = master.data.cpu()
        # END SOLUTION

    def reduce(self):
        """After backward: leave in each master.grad, on the CPU, this rank's shard of the mean gradient in float32."""
        # BEGIN SOLUTION
        ShardedGradients.reduce(self)
        for part, master in zip(self.parts, self.masters):
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
# What does it cost? First the update itself, which one core of the CPU now has to do. `torch.optim.AdamW` passes over
# memory once for every operation; with `fused=True`, one of its `options`, it passes once.

# %%
MANY = 10_000_000  # parameters


def adamw_step(fused):
    """A function that updates MANY float32 parameters on the CPU."""
    p = nn.Parameter(torch.zeros(MANY))
    p.grad = torch.ones(MANY)
    return torch.optim.AdamW([p], fused=fused).step


threads = torch.get_num_threads()
torch.set_num_threads(1)
steps = {"default": adamw_step(fused=False), "fused=True": adamw_step(fused=True)}
update = measure.race(steps, repeats=5, warmup=1, calls=1).medians
torch.set_num_threads(threads)
for name, seconds in update.items():
    print(f"AdamW, {name}: {seconds / MANY * 1e9:.1f} s of one core for the update of a billion parameters")

# %% [markdown]
# Then the step. On a GPU the next cell measures it; without one it is an estimate.


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
    bus, psi = 25e9, 1e9  # assumed: 25 GB/s each way, as a PCIe 4.0 link of 16 lanes gives; parameters of a shard
    print(
        f"estimate for a shard of {psi / 1e9:g} billion parameters: the GPU is rid of {12 * psi / 1e9:.0f} GB; in each step"
    )
    print(f"{2 * psi / 1e9:.0f} GB cross the bus each way, {4 * psi / bus:.2f} s at {bus / 1e9:.0f} GB/s, and then the")
    fused = update["fused=True"] / MANY * psi
    print(f"update, {fused:.1f} s of one core as measured above: so many cores share it as the memory can feed")

# %% [markdown]
# ### Balise 9 · What a step sends · further · about 10 min
#
# Is it paid for with communication? The original paper says: stages 1 and 2 send what data parallelism sends, stage 3
# half as much again. Count it. A rank sends, in a ring of $N$ ranks and for a tensor of $n$ bytes,
#
# | collective | a rank hands in | and sends |
# |---|---|---|
# | reduce-scatter | the whole, $n$ | $\frac{N-1}{N}\,n$ |
# | all-gather | its part, $n/N$ | $\frac{N-1}{N}\,n$ |
# | all-reduce | the whole, $n$ | $2\,\frac{N-1}{N}\,n$, the two above one after the other |
# | message to one rank | $n$ | $n$ |
#
# `sent_bytes(step)` calls `step()` once, on every rank, and returns the bytes that *this* rank sends meanwhile,
# whichever of these they are and wherever they start, in a hook of backward for example. What is received, and
# barriers, count nothing. About 5 lines.
#
# <details><summary>Hint</summary>
#
# `with measure.Communications() as log:`, then `log.entries()`: dictionaries, with `name` ("all_reduce", "all_gather",
# "reduce_scatter", "send", "recv", …) and `bytes`, those that the rank hands in. (Marks in the log, of `kind` "phase", have no bytes.)
# </details>


# %% tags=["balise-9"]
def sent_bytes(step):
    """Bytes that this rank sends while step() runs, once, if every collective is a ring."""
    # BEGIN SOLUTION
    n = dist.get_world_size()
    sent = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1, "send": 1}
    with measure.Communications() as log:
        step()
    return sum(sent.get(entry["name"], 0) * entry["bytes"] for entry in log.entries() if entry["kind"] != "phase")
    # END SOLUTION


# %%
tp.check(9, sent_bytes)


# %% [markdown]
# Now all stages, in the unit of the paper: $\Psi$, the number of parameters. One step of the decoder, counted on rank
# 0.


# %%
def stepper(model, optimizer):
    """A function of a batch of tokens that trains one step."""

    def step(tokens):
        optimizer.zero_grad()
        language_loss(model, tokens).backward()
        optimizer.step()

    return step


def four_stages():
    """name -> a function of a batch of tokens that trains one step, all from the same start; and fully_shard."""
    plain, sharded, *models = (make_model() for _ in range(5))
    for layer in (*sharded.blocks, sharded):
        fully_shard(layer)
    wrapped = DistributedDataParallel(plain)
    return {
        "data parallelism": stepper(wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIONS)),
        "stage 1": stepper(models[0], ShardedOptimizer(models[0].parameters(), **OPTIONS)),
        "stage 2": stepper(models[1], ShardedGradients(models[1].parameters(), capacity=CAPACITY, **OPTIONS)),
        "stage 3": stepper(models[2], ShardedParameters(layers_of(models[2]), **OPTIONS)),
        "fully_shard": stepper(sharded, torch.optim.AdamW(sharded.parameters(), **OPTIONS)),
    }


# %%
def volumes():
    """name -> elements sent in the second step over the number of parameters."""
    psi, found = sum(p.numel() for p in make_model().parameters()), {}
    for name, step in four_stages().items():
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

# %% [markdown]
# With many ranks $(N-1)/N$ is nearly 1: **2Ψ, 2Ψ, 2Ψ, 3Ψ**. (Padding adds a few elements, too few to show here.) Why?
#
# - Data parallelism all-reduces the gradients: Ψ for the reduce-scatter in it, Ψ for the all-gather.
# - Stages 1 and 2 need of the reduced gradients only the own shard: the reduce-scatter, Ψ. In place of the gradients
#   they gather the *updated parameters*, Ψ again. Nothing is paid for the memory that was saved.
# - Stage 3 keeps no parameter: gathered for forward, Ψ, freed, gathered for backward, Ψ; and the gradients'
#   reduce-scatter, Ψ.
# - `fully_shard`, in its usual form, leaves its root (embedding, last norm, head) gathered from forward to backward, and
#   sends so much less.
#
# The table counts what was asked for. How a library does it is its own affair: gloo, on the CPU, does its
# reduce-scatter as an all-reduce inside, NCCL as a ring or a tree.
#
# ### Balise 10 · A checkpoint in pieces · further · about 34 min
#
# No rank holds the whole state any more, so no rank can write it. Each writes its own shards, and a checkpoint of
# many files must still be whole or not there, whenever the job ends.
#
# **`save_shards(folder, step, shards, lengths)`** runs on every rank. `shards`: {name: 1-D tensor}, this rank's equal
# part of a flat tensor, which has `lengths[name]` elements and then zeros until $N$ divides. A shard may be a view.
#
# - Each rank writes its own part and nothing else; nothing but a barrier crosses between ranks. `folder` may not
#   exist yet.
# - If the job is killed at any moment, `load_shards` finds the checkpoint from before. What a killed save left is no
#   obstacle to saving the same step again, on any number of ranks; and where that step is complete already, saving it
#   again may be killed, too.
# - When it returns, on any rank, the checkpoint is complete.
#
# **`load_shards(folder)`** runs on every rank, of **any number of ranks**. It returns `(step, shards)` of the checkpoint
# that was saved last (steps never fall), with this rank's part for the number of ranks of *now*, in tensors of its own on the CPU; None where
# there is no complete checkpoint.
#
# - It loads with `weights_only=True`, reads the files that hold some of its part and no others, and never holds the
#   whole.
#
# About 12 and 15 lines.
#
# <details><summary>Hint</summary>
#
# Make a folder for each step and number of ranks (another one where the mark points to it already), in which each rank
# writes its file. Then comes `dist.barrier()`, then rank 0 writes a small JSON file (a *mark*: step, number of ranks,
# lengths, dtypes, folder) under another name, and moves it into place with `Path.replace`: only then the checkpoint counts. `torch.save` writes the whole memory behind a view: save
# `t.clone()`. With `each = ⌈length / N⌉`, rank r has the elements from `r * each` on, as then, so now. `torch.load(…,
# mmap=True)` reads only what is touched.
# </details>


# %% tags=["balise-10"]
def save_shards(folder, step, shards, lengths):
    """Every rank writes its shards; the checkpoint counts when all are there. lengths: {name: elements without padding}."""
    # BEGIN SOLUTION
    folder, rank, world_size = Path(folder), dist.get_rank(), dist.get_world_size()
    place, last = folder / f"step-{step}-of-{world_size}", folder / "mark.json"
    if last.exists() and json.loads(last.read_text())["place"] == place.name:
        place = folder / f"{place.name}-again"  # never write where the mark points
    place.mkdir(parents=True, exist_ok=True)
    partial, file = place / f"{rank}.partial", place / f"{rank}.pt"
    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)
    partial.replace(file)
    dist.barrier()
    if rank == 0:
        dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in shards.items()}
        mark = {"step": step, "world_size": world_size, "lengths": lengths, "dtypes": dtypes, "place": place.name}
        (folder / "mark.partial").write_text(json.dumps(mark))
        (folder / "mark.partial").replace(folder / "mark.json")
    dist.barrier()
    # END SOLUTION


def load_shards(folder):
    """(step, {name: this rank's shard}) of the newest complete checkpoint, for the ranks of now; None without one."""
    # BEGIN SOLUTION
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
                piece = torch.load(file, mmap=True, weights_only=True)[name]
                shards[name][low - begin : high - begin] = piece[low - k * then : high - k * then]
    return mark["step"], shards
    # END SOLUTION


# %%
tp.check(10, save_shards, load_shards)

# %% [markdown]
# See it: eight sequences a step, trained on four ranks, saved after step 4, and resumed on two. The losses are those
# of the run that went on, up to the rounding of another order of additions; the loaded numbers are exact.


# %%
def pieces_of(optimizer):
    """({name: this rank's shard}, {name: length}) of parameters and Adam's states, for a stage 2 in float32."""
    shards, lengths = {}, {}
    for k, part in enumerate(optimizer.parts):
        state = optimizer.optimizer.state[part.own]
        for name in ("exp_avg", "exp_avg_sq"):
            shards[f"{k}.{name}"] = state.setdefault(name, torch.zeros_like(part.own))
        state.setdefault("step", torch.tensor(0.0))
        shards[f"{k}.own"] = part.own
        lengths |= dict.fromkeys([n for n in shards if n.startswith(f"{k}.")], sum(p.numel() for p in part.parameters))
    return shards, lengths


@torch.no_grad()
def put_back(optimizer, step, loaded):
    """Write what load_shards gave into the optimizer and its parameters."""
    for name, own in pieces_of(optimizer)[0].items():
        own.copy_(loaded[name])
    for part in optimizer.parts:
        optimizer.optimizer.state[part.own]["step"].fill_(step)
        all_gather(part.flat, part.own.detach())


# %%
def train_from(folder, first, steps, save_after=None):
    """On a rank: the mean loss of each step from `first` on; a global batch of 8 sequences on any number of ranks."""
    model = make_model()
    optimizer, losses = ShardedGradients(model.parameters(), capacity=CAPACITY, **OPTIONS), []
    if first:
        put_back(optimizer, *load_shards(folder))
    for step in range(first, first + steps):
        starts = torch.randint(len(TOKENS_USED) - LENGTH, (8, 1), generator=torch.Generator().manual_seed(step))
        tokens = TOKENS_USED[starts + torch.arange(LENGTH + 1)].chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        loss = language_loss(model, tokens.to(launch.device()))
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if save_after == step + 1:
            save_shards(folder, step + 1, *pieces_of(optimizer))
    return losses


# %%
with tempfile.TemporaryDirectory() as folder:
    whole = launch.ranks(train_from, folder, 0, 8, save_after=4, n=RANKS[-1], timeout=120)[0]
    resumed = launch.ranks(train_from, folder, 4, 4, n=2, timeout=120)[0]
    sizes = [measure.human_bytes(p.stat().st_size) for p in sorted(Path(folder).rglob("*.pt"))]
print(f"{RANKS[-1]} ranks    ", *(f"{loss:.5f}" for loss in whole))
print("2, resumed ", *[" " * 7] * 4, *(f"{loss:.5f}" for loss in resumed))
print("files:", ", ".join(sizes))

# %% [markdown]
# ## Race
#
# Your stages against PyTorch's, on the same model and the same batches: stage 1 against `ZeroRedundancyOptimizer`
# (which leaves the gradients to `DistributedDataParallel`), stage 3 against `fully_shard`, in its usual form: each
# block, then the root. First: do they train the same model?


# %%
def plain_weights(model):
    """Copies of a model's parameters, gathered where fully_shard has cut them."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def gathered_weights(model, optimizer):
    """The same for your stage 3, whose parameters have no memory between two steps."""
    for unit in optimizer.parts:
        unit.gather()
    weights = plain_weights(model)
    for unit in optimizer.parts:
        unit.free()
    return weights


# %%
def candidates():
    """name -> (function that trains one step, function that gives the weights), all from the same start."""
    zero, one, two, three, sharded, plain = (make_model() for _ in range(6))
    theirs, both = (DistributedDataParallel(m, gradient_as_bucket_view=True) for m in (zero, plain))
    redundancy = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, **OPTIONS)
    for layer in (*sharded.blocks, sharded):
        fully_shard(layer)
    stage_3 = ShardedParameters(layers_of(three), **OPTIONS)
    optimizers = {
        "stage 1, yours": (one, one, ShardedOptimizer(one.parameters(), **OPTIONS)),
        "ZeroRedundancyOptimizer": (zero, theirs, redundancy),
        "stage 2, yours": (two, two, ShardedGradients(two.parameters(), capacity=CAPACITY, **OPTIONS)),
        "stage 3, yours": (three, three, stage_3),
        "fully_shard": (sharded, sharded, torch.optim.AdamW(sharded.parameters(), **OPTIONS)),
        "data parallelism": (plain, both, torch.optim.AdamW(plain.parameters(), **OPTIONS)),
    }
    found = {}
    for name, (model, called, optimizer) in optimizers.items():
        weights = (lambda m=model: gathered_weights(m, stage_3)) if model is three else lambda m=model: plain_weights(m)
        found[name] = stepper(called, optimizer), weights
    return found


# %%
def race_on_ranks(rounds):
    """({name: largest gap to data parallelism after three steps}, race)"""
    steps = candidates()
    for k in range(3):
        for step, _ in steps.values():
            step(token_batch(k))
    truth, gaps = steps["data parallelism"][1](), {}
    for name, (_, weights) in steps.items():
        gaps[name] = max((a - b).abs().max().item() for a, b in zip(weights(), truth))
    tokens = token_batch(3)
    turns = {name: lambda step=step: step(tokens) for name, (step, _) in steps.items()}
    return gaps, measure.race(turns, repeats=rounds, warmup=1, calls=1, device=launch.device())


# %%
medians = {}
for n in RANKS:
    gaps, race = launch.ranks(race_on_ranks, 30 if FULL else 4, n=n, timeout=120)[0]
    print(f"{n} ranks on {launch.backend(n)}: largest difference of a weight after three steps, and a step")
    for name, seconds in race.medians.items():
        median, spread = measure.human_seconds(seconds), measure.human_seconds(race.spreads[name] / 2)
        print(f"  {name:<24} {gaps[name]:8.1e}  {median:>9} ± {spread}")
    for mine, theirs in (("stage 1, yours", "ZeroRedundancyOptimizer"), ("stage 3, yours", "fully_shard")):
        print(f"  {mine} / {theirs}: {race.medians[mine] / race.medians[theirs]:.2f}")
    medians[f"{n} ranks"] = race.medians
print(recorded.line("13_zero_under_the_hood", "race"))
if FULL:
    recorded.note("13_zero_under_the_hood", "race", medians)

# %% [markdown]
# The weights agree to rounding. `ZeroRedundancyOptimizer` all-reduces whole gradients and then lets each rank
# broadcast what it updated: by arithmetic 3Ψ, where your stage 1 sends 2Ψ. `fully_shard` also keeps books, a `DTensor`
# for each parameter: on small layers that costs more than it does on large ones. In return it does what yours does not:
# it gathers the *next* layer while this one computes. Practical work **14_fsdp** uses it.

# %% [markdown]
# ## Past this machine · further
#
# When does the communication disappear behind the computation? A rank computes about $6\,\Psi$ floating-point
# operations for each token, and sends $2\,\Psi$ or $3\,\Psi$ numbers of 2 bytes in a step. $\Psi$ cancels: what
# counts is **how many tokens a rank computes in a step**,
#
# $$t_\text{compute} = \frac{6\,\Psi \cdot \text{tokens}}{\text{FLOP/s}} \qquad
# t_\text{send} = (2 \text{ or } 3)\,\Psi \cdot 2\text{ bytes} \cdot \text{seconds for a byte}$$
#
# The seconds for a byte are those of `planner.hierarchical_all_gather`: the GPUs of a node talk through NVLink, and
# between nodes each sends its part at the same time as its neighbours, through a network card of its own where there are
# so many, as NCCL's rings do. (Gradients that are reduced in float32 weigh twice.)

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
# a thousand, and thousands where the GPUs of a node share one card; their activations need memory in their turn. Hence
# *hybrid* sharding: stage 3 inside a node, plain copies of it between nodes. And a ring of 1,024 ranks has 1,023 steps of
# some microseconds for every layer gathered: with very many ranks latency decides, as in practical work 08. Source of the
# 6: Kaplan and others, *Scaling laws for neural language models* (2020).

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Gradients are accumulated over four micro-batches. What does each stage send, and keep?</summary>
#
# Stage 1 keeps whole gradients anyway: they add up there, and travel once. Stage 2 keeps only a shard, so every
# micro-batch's gradients must travel, four times Ψ; or one keeps them whole until the last one, and is back at the
# memory of stage 1. Stage 3 also gathers its parameters for each forward and each backward: 12 Ψ where stage 1 sends
# 2 Ψ. That is why accumulation and stage 3 go badly together.
# </details>
#
# <details><summary>An optimizer scales each matrix's update by the matrix's norm. Can its states be sharded so?</summary>
#
# Not as it is: a cut through a matrix leaves each rank with a part of it, and <code>optimizer_class</code> would take
# the norm of its whole shard, many parameters at once. The partial sums of squares, one for each parameter, have to
# be added up over the ranks first, as in balise 7. Optimizers that multiply whole matrices need more: sharding by
# whole parameters, or gathering each of them.
# </details>
#
# <details><summary>ZeroRedundancyOptimizer is stage 1, and yet it sends 3 Ψ. Why, and what is it good for?</summary>
#
# It leaves the gradients to DistributedDataParallel, which all-reduces them: 2 Ψ, where a reduce-scatter would do.
# Then the parameters are sent, Ψ. In return the gradients are whole on every rank, so that nothing else in a program
# has to change: clipping, logging, other hooks. And it shares out whole parameters, so that optimizers which need
# them whole work as they are.
# </details>
#
# ## To remember
#
# An update needs one copy of the states, not one for each rank. ZeRO keeps data parallelism and gives each rank a
# shard: of the states (stage 1), of the gradients (stage 2), of the parameters (stage 3). A reduce-scatter brings
# gradients to their owner, an all-gather brings parameters to all, together they are an all-reduce: so stages 1 and 2
# save memory for nothing, and stage 3 pays half as much communication again for a memory that falls with every rank.
# All else in it is bookkeeping: flat tensors, hooks, and letting go of memory in time. You have written what
# `fully_shard` does; the next practical work, **14_fsdp**, uses it: on real sizes, with mixed precision, activation
# checkpointing, offload and checkpoints.
