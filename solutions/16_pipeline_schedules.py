# %% [markdown]
# # Pipeline schedules: 1F1B, interleaved, zero-bubble, and how to choose · about 145 min, core 35
#
# A pipeline cuts a model by layers over ranks and a batch into micro-batches. What is left to decide is the
# **schedule**: in which order a rank does its forwards and backwards. The order changes no gradient. It changes how
# long ranks stand idle, the *bubble*, and how many activations they keep. In this practical work you run the
# schedules of `torch.distributed.pipelining`, write the two best ones as data, split the backward pass in two with
# your own hands, and build the search that picks a schedule for a given machine.
#
# **What you will gain.** The next cell estimates it for 8 stages and 16 micro-batches: arithmetic on stages of equal
# cost with a backward of twice the forward, nothing measured.

# %% tags=["setup"]
import os
import time
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo

tp = course.open("16_pipeline_schedules")
tp

# %% [markdown]
# All sizes are here. Ranks use one GPU each where there are enough, else they are processes on the CPU. (A single GPU is left
# out: no table mixes it with the CPU.)

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 2
if GPUS == 1:
    os.environ[launch.place.ON_CPU] = "1"
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
WIDTH = 4096 if FULL else 256  # of a layer
LAYERS = 16 if FULL else 8
BATCH = 1024 if FULL else 512  # samples of a step
MICRO_BATCHES = 8
ROUNDS = 20 if FULL else 5  # of the race

# %%
WHOLE = {"F": 1.0, "B": 2.0}  # costs of a stage, in forwards
SPLIT = {"F": 1.0, "I": 1.0, "W": 1.0}  # the same backward in two halves: input, weights
HALF = {kind: cost / 2 for kind, cost in WHOLE.items()}  # a stage of half as many layers


def four_schedules(ranks, micro_batches):
    """The known schedules on equal stages, simulated: {name: Simulation}."""
    return {
        "GPipe": planner.simulate(planner.gpipe(ranks, micro_batches), WHOLE),
        "1F1B": planner.simulate(planner.one_f_one_b(ranks, micro_batches), WHOLE),
        "interleaved, 2 chunks": planner.simulate(
            planner.interleaved_1f1b(ranks, micro_batches, 2), HALF, activation_bytes=0.5
        ),
        "zero-bubble (ZB-H1)": planner.simulate(planner.zero_bubble_h1(ranks, micro_batches), SPLIT),
    }


print("estimate: 8 stages, 16 micro-batches      bubble    step    activations of the fullest rank (micro-batches)")
for name, found in four_schedules(8, 16).items():
    print(f"{name:<40}{found.bubble:8.1%} {found.seconds:7.1f} {max(found.peak_bytes):8.1f}")

# %% [markdown]
# ## The idea
#
# With $p$ ranks and $m$ micro-batches, a rank works for $m\,(t_F + t_B)$. The first micro-batch needs time to reach
# the last rank, and the last gradient to come back. Each schedule has its own idle time of a rank:
#
# $$\underbrace{(p-1)(t_F+t_B)}_{\text{GPipe, 1F1B}} \;\to\;
# \underbrace{\frac{(p-1)(t_F+t_B)}{v}}_{\text{interleaved, } v \text{ chunks}} \qquad
# \underbrace{(p-1)(t_F+t_I-t_W)}_{\text{zero-bubble, } t_B = t_I + t_W}$$
#
# White is the bubble. The number in a box is the micro-batch; a rank's second chunk is drawn lighter.

# %%
report.gantt(
    {name: found.events for name, found in four_schedules(4, 8).items()}, unit="time of a forward pass of a stage"
)

# %% [markdown]
# Simulated: four ranks of equal stages, messages that take no time, the same work in all four panels. 1F1B is as long as
# GPipe; that it keeps fewer activations stands in the table above. Interleaving passes each micro-batch round the ranks twice, in steps of half the length. Zero-bubble fills idle time with the
# half of the backward that nobody waits for.
#
# ## The baseline, measured first
#
# One process, all layers, the batch in the same micro-batches. Every pipeline below must give this loss and these
# gradients.

# %% tags=["setup"]
digits = data.digits()


class Block(nn.Module):
    """Two linear layers around which the input is added: (b, width) -> (b, width)."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def make_layers():
    """The layers of the network, the same on every rank: 64 pixels in, 10 classes out."""
    torch.manual_seed(0)
    layers = [Block(WIDTH) for _ in range(LAYERS)]
    layers[0] = nn.Sequential(nn.Linear(64, WIDTH), layers[0])
    layers[-1] = nn.Sequential(layers[-1], nn.Linear(WIDTH, 10))
    return layers


def make_batch():
    """One batch: x (BATCH, 64), y (BATCH,)."""
    repeats = -(-BATCH // len(digits.train_x))
    x, y = digits.train_x.flatten(1).repeat(repeats, 1), digits.train_y.repeat(repeats)
    return x[:BATCH].to(launch.device()), y[:BATCH].to(launch.device())


def plain_step(model, x, y, n_micro_batches):
    """A step of one process: gradients of the mean loss over the batch, summed over micro-batches. Returns the loss."""
    model.zero_grad()
    total = torch.zeros((), device=x.device)
    for x_k, y_k in zip(x.chunk(n_micro_batches), y.chunk(n_micro_batches)):
        loss = F.cross_entropy(model(x_k), y_k) / n_micro_batches
        loss.backward()
        total += loss.detach()
    return total


# %%
def baseline(repeats=5):
    torch.set_num_threads(1)  # as the ranks below
    model, (x, y), seconds = nn.Sequential(*make_layers()).to(launch.device()), make_batch(), []
    for _ in range(repeats):
        start = time.perf_counter()
        loss = plain_step(model, x, y, MICRO_BATCHES).item()
        seconds.append(time.perf_counter() - start)
    norms = [sum(p.grad.norm().item() ** 2 for p in layer.parameters()) ** 0.5 for layer in model]
    return loss, norms, sorted(seconds)[repeats // 2]


plain_loss, plain_norms, plain_seconds = launch.ranks(baseline, n=1)[0]
print(f"one process: loss {plain_loss:.6f}, {1000 * plain_seconds:.0f} ms a step of {BATCH} samples")

# %% [markdown]
# ## Stages and schedules of PyTorch

# %% [markdown]
# ### Balise 1 · A stage on each rank, and a step with GPipe · about 18 min
#
# Every rank calls these with the same arguments.
#
# - **`make_stage(layers, device)`**: `layers` is the list of all layers (modules). Return a `PipelineStage` that
#   holds this rank's share, on `device`: neighbouring layers, rank 0 the first ones; shares differ by at most one
#   layer.
# - **`make_gpipe(stage, n_micro_batches, loss_fn, reduction)`**: return the `ScheduleGPipe`. `loss_fn(output,
#   target)` gives the mean over its samples if `reduction` is `"mean"`, their sum if it is `"sum"`. Gradients must be
#   those of the loss of the **whole batch**.
# - **`pipeline_step(stages, schedule, x, y, reduction)`**: `stages` is the list of this rank's stages (one, for now).
#   Clear the old gradients, run the schedule, return the loss of the whole batch, **on every rank**, as a scalar
#   tensor without graph. `x` `(b, …)` is to be trusted on the rank of the first stage only, `y` on the rank of the
#   last.
#
# A stage has its module in `stage.submod`, and says `stage.is_first` and `stage.is_last`. The number of micro-batches
# divides the batch. About 5, 1 and 12 lines.
#
# <details><summary>Hint</summary>
#
# Rank r of n can take the layers from `len(layers) * r // n` to `len(layers) * (r + 1) // n`. A schedule divides all
# gradients by the number of micro-batches when `scale_grads=True`: right for one of the two reductions. Only the last
# stage sees losses, one for each micro-batch: `schedule.step(..., losses=[])` fills the list. A collective brings
# their sum or mean to the others; its tensor must have the same dtype on all ranks.
# </details>


# %% tags=["balise-1"]
def make_stage(layers, device):
    """The PipelineStage of this rank: its share of `layers`, neighbours, on `device`."""
    # BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    share = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]
    return PipelineStage(nn.Sequential(*share).to(device), rank, n, device)
    # END SOLUTION


def make_gpipe(stage, n_micro_batches, loss_fn, reduction="mean"):
    """The GPipe schedule; loss_fn(output, target) is the mean or the sum over its samples, as `reduction` says."""
    # BEGIN SOLUTION
    return ScheduleGPipe(stage, n_micro_batches, loss_fn, scale_grads=reduction == "mean")
    # END SOLUTION


def pipeline_step(stages, schedule, x, y, reduction="mean"):
    """Gradients of the whole batch in the stages' parameters; returns its loss () on every rank, without graph."""
    # BEGIN SOLUTION
    for stage in stages:
        stage.submod.zero_grad()
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    losses = []
    schedule.step(*((x,) if first else ()), target=y if last else None, losses=losses)
    loss = torch.zeros((), device=x.device, dtype=x.dtype)
    if last:
        found = torch.stack([part.detach() for part in losses])
        loss = found.mean() if reduction == "mean" else found.sum()
    dist.broadcast(loss, src=dist.get_world_size() - 1)  # here and below, the last rank holds the last stage
    return loss
    # END SOLUTION


# %%
tp.check(1, make_stage, make_gpipe, pipeline_step)

# %% [markdown]
# The same network on 2 and 4 ranks, beside the single process. Each rank reports the norm of the gradient of its
# layers.


# %%
def norms_of(stages):
    """The norm of the gradient of each layer that this rank holds, in order."""
    layers = [layer for stage in stages for layer in stage.submod]
    return [sum(p.grad.norm().item() ** 2 for p in layer.parameters()) ** 0.5 for layer in layers]


def gpipe_once():
    stage = make_stage(make_layers(), launch.device())
    schedule = make_gpipe(stage, MICRO_BATCHES, F.cross_entropy, "mean")
    loss = pipeline_step([stage], schedule, *make_batch(), "mean")
    return loss.item(), norms_of([stage])


print(f"{'one process':<12} loss {plain_loss:.6f}   gradient norms " + " ".join(f"{norm:.4f}" for norm in plain_norms))
for n in RANKS:
    found = launch.ranks(gpipe_once, n=n)
    shares = " | ".join(" ".join(f"{norm:.4f}" for norm in norms) for _, norms in found)
    print(f"{n} ranks      loss {found[0][0]:.6f}   gradient norms {shares}")

# %% [markdown]
# ### Balise 2 · 1F1B, and enough micro-batches · about 8 min
#
# GPipe keeps the activations of all micro-batches at once. In 1F1B a rank begins backwards as soon as it can; the
# stage number $s$ (from 0) then keeps at most $p - s$ of them.
#
# - **`choose_micro_batches(n_stages, bubble, batch_size)`**: return the smallest number of equal micro-batches of a
#   batch of `batch_size` samples whose bubble, as a share of the step, is at most `bubble`, a number from 0 (it may be
#   0) to 1, for stages of equal cost; raise `ValueError` if there is none.
# - **`make_1f1b(stage, n_micro_batches, loss_fn, reduction)`**: the schedule, as in balise 1.
#
# About 6 lines and 1.
#
# <details><summary>Hint</summary>
#
# A rank works for $m$ pairs of forward and backward and is idle for $p - 1$ of them: the share is $(p-1)/(m+p-1)$.
# Try the divisors of the batch, the smallest first.
# </details>


# %% tags=["balise-2"]
def choose_micro_batches(n_stages, bubble, batch_size):
    """The smallest divisor of `batch_size` that keeps the bubble's share at or under `bubble`; ValueError if none."""
    # BEGIN SOLUTION
    for m in range(1, batch_size + 1):
        if batch_size % m == 0 and (n_stages - 1) / (m + n_stages - 1) <= bubble:
            return m
    raise ValueError(f"{batch_size} samples on {n_stages} stages always have a bubble above {bubble:.0%}")
    # END SOLUTION


def make_1f1b(stage, n_micro_batches, loss_fn, reduction="mean"):
    """The 1F1B schedule; arguments as of make_gpipe."""
    # BEGIN SOLUTION
    return Schedule1F1B(stage, n_micro_batches, loss_fn, scale_grads=reduction == "mean")
    # END SOLUTION


# %%
tp.check(2, choose_micro_batches, make_1f1b)

# %% [markdown]
# What does a rank keep? A hook counts up at the end of each forward of a stage, and down when the gradient of its
# output arrives.


# %%
class InFlight:
    """Counts the micro-batches whose backward has not begun: `peak` of one module."""

    def __init__(self, module):
        self.now = self.peak = 0
        module.register_forward_hook(self.up)

    def up(self, module, inputs, output):
        if output.requires_grad:
            self.now += 1
            self.peak = max(self.peak, self.now)
            output.register_hook(self.down)

    def down(self, gradient):
        self.now -= 1


# %%
def peak_in_flight(make_schedule):
    stage = make_stage(make_layers(), launch.device())
    schedule = make_schedule(stage, MICRO_BATCHES, F.cross_entropy, "mean")
    pipeline_step([stage], schedule, *make_batch(), "mean")  # the first step also finds out the shapes
    counter = InFlight(stage.submod)
    pipeline_step([stage], schedule, *make_batch(), "mean")
    return counter.peak


for name, make_schedule in {"GPipe": make_gpipe, "1F1B": make_1f1b}.items():
    print(f"{name:<6} micro-batches kept by the ranks:", launch.ranks(peak_in_flight, make_schedule, n=RANKS[-1]))
for bubble in (0.5, 0.3, 0.2, 0.1):
    m = choose_micro_batches(RANKS[-1], bubble, BATCH)
    print(f"{RANKS[-1]} stages, bubble of at most {bubble:.0%}: {m} micro-batches of {BATCH // m} samples")

# %% [markdown]
# With 1F1B, more micro-batches shrink the bubble and cost no memory. But a micro-batch of a few samples no longer
# fills a device, and the batch cannot grow for ever. The next two schedules shrink the bubble at the same number of
# micro-batches.
#
# ## Interleaved stages

# %% [markdown]
# ### Balise 3 · Several chunks on a rank · further · about 24 min
#
# Cut the model into $v\,p$ stages and deal them out like cards: rank r holds stages $r, r + p, r + 2p, \ldots$ A
# stage is $v$ times shorter, and so is every wait.
#
# - **`placement(n_layers, n_ranks, n_chunks)`**: return a list with, for each rank, the list of its `(stage, [numbers
#   of its layers])`, in order of stage. Stages hold neighbouring layers; any two differ by at most one.
# - **`interleaved_order(rank, n_ranks, n_micro_batches, n_chunks)`**: return the order of a rank, **as data**: a list
#   of `("F" or "B", micro_batch, stage)`. The idle time of a rank must be that of 1F1B divided by `n_chunks`, and
#   rank r must keep at most $2(p-r-1) + (v-1)p + 1$ forwards of a chunk at once; an order that keeps fewer is right too.
#   `n_micro_batches` is a multiple of `n_ranks`.
# - **`make_interleaved(layers, n_chunks, n_micro_batches, loss_fn, reduction, device)`**: return `(stages, schedule)`
#   of this rank, with `ScheduleInterleaved1F1B`. Returned `stages` are in order.
#
# About 6, 14 and 7 lines.
#
# <details><summary>Hint</summary>
#
# Forwards go in rounds: $p$ micro-batches through the rank's first chunk, the same $p$ through its second, and so on,
# then the next $p$. So the forward number i of a rank has chunk `i % (p * v) // p` and micro-batch `i // (p * v) * p
# + i % p`. Backwards go likewise, with the chunks from the last to the first. First `2 * (p - r - 1) + (v - 1) * p`
# forwards (never more than there are), then a forward and a backward in turn, then the backwards that are left.
# `planner.simulate` tells you what waits for what.
# </details>


# %% tags=["balise-3"]
def placement(n_layers, n_ranks, n_chunks):
    """For each rank, its [(stage, [numbers of its layers]), ...]: stages are dealt out in turn."""
    # BEGIN SOLUTION
    n_stages = n_ranks * n_chunks
    cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    layers = [list(range(begin, end)) for begin, end in zip(cuts, cuts[1:])]
    return [[(stage, layers[stage]) for stage in range(rank, n_stages, n_ranks)] for rank in range(n_ranks)]
    # END SOLUTION


def interleaved_order(rank, n_ranks, n_micro_batches, n_chunks):
    """What one rank does: a list of ("F" or "B", micro_batch, stage)."""
    # BEGIN SOLUTION
    total, group = n_micro_batches * n_chunks, n_ranks * n_chunks

    def action(kind, i):
        chunk = i % group // n_ranks
        if kind == "B":
            chunk = n_chunks - 1 - chunk
        return kind, i // group * n_ranks + i % n_ranks, chunk * n_ranks + rank

    ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)
    order = [action("F", i) for i in range(ahead)]
    for i in range(total - ahead):
        order += [action("F", ahead + i), action("B", i)]
    return order + [action("B", i) for i in range(total - ahead, total)]
    # END SOLUTION


def make_interleaved(layers, n_chunks, n_micro_batches, loss_fn, reduction, device):
    """(stages, schedule) of this rank: its chunks of `layers`, and ScheduleInterleaved1F1B over them."""
    # BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)
        for stage, numbers in placement(len(layers), n, n_chunks)[rank]
    ]
    return stages, ScheduleInterleaved1F1B(stages, n_micro_batches, loss_fn, scale_grads=reduction == "mean")
    # END SOLUTION


# %%
tp.check(3, placement, interleaved_order, make_interleaved)

# %% [markdown]
# Your order on the clock: more chunks, less white, and more messages, because every cut is crossed by every
# micro-batch. (With one chunk it is 1F1B with a longer warm-up than it needs; there the plain one keeps less.) With more
# chunks, too, a warm-up of $(p-r-1) + (v-1)p$ forwards is as fast in a simulation with free messages, and keeps fewer
# chunks. The longer one, which Megatron-LM and PyTorch have, gives messages time to travel.

# %%
shown = {}
for chunks in (1, 2, 4):
    orders = [interleaved_order(rank, 4, 8, chunks) for rank in range(4)]
    found = planner.simulate(orders, {"F": 1 / chunks, "B": 2 / chunks}, activation_bytes=1 / chunks)
    shown[f"{chunks} chunk{'s' * (chunks > 1)} a rank"] = found.events
    kept = " ".join(f"{size:.2f}" for size in found.peak_bytes)
    print(f"{chunks} chunks: bubble {found.bubble:5.1%}, rank 0 keeps {found.in_flight[0]:2} chunks;", end=" ")
    print(f"activations of the ranks, in micro-batches: {kept}")
report.gantt(shown, unit="time of a forward pass of a whole rank")

# %% [markdown]
# ## Zero-bubble
#
# The backward of a linear layer $y = xW^\top$ has two products: $\partial x = \partial y\, W$, which the stage before
# is waiting for, and $\partial W = \partial y^\top x$, which **nobody waits for** until the optimizer steps.
# Zero-bubble schedules do the first at once ("I") and keep the second ("W") for when there is nothing else to do.

# %% [markdown]
# ### Balise 4 · Backward in two halves, and ZB-H1 · further · about 35 min
#
# **`SplitStage(module)`**: `module` is a `nn.Sequential` of layers, with or without parameters (`nn.Linear`,
# `nn.GELU`, …).
#
# - `forward(k, x)`: the output for micro-batch `k`; several micro-batches can be under way.
# - `backward_input(k, grad_y)`: the gradient of that micro-batch's `x`. It computes no gradient of any weight.
# - `backward_weight(k)`: adds micro-batch `k`'s gradients to `.grad` of the parameters, as `backward()` would,
#   without doing the work of the first half again, then lets go of all that it kept of `k`.
#
# Together they must do as many matrix products as the whole backward, and no `.backward()` is needed.
#
# **`zero_bubble_order(rank, n_ranks, n_micro_batches)`**: the order of ZB-H1, a list of `("F", "I" or "W",
# micro_batch)`. With at least as many micro-batches as ranks, the step must last $m(t_F+t_I+t_W) +
# (p-1)(t_F+t_I-t_W)$ for $t_W \le t_F$ and $t_W \le t_I$, and no rank may keep more than $p$ micro-batches (from "F"
# to "W"): the peak of 1F1B.
#
# About 20 and 8 lines.
#
# <details><summary>Hint</summary>
#
# In `forward`, run layer after layer on an input that is a leaf (`x.detach().requires_grad_()`), and keep the output
# of each layer that has parameters. `torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)` then gives the
# gradient of the input *and* those of these outputs. With the gradient of a layer's output,
# `torch.autograd.grad(output, parameters_of_that_layer, gradient)` needs one product.
#
# ZB-H1 is 1F1B with each backward cut in two. Rank r puts its weight gradients off by r micro-batches: after "I" of
# micro-batch k comes "W" of k − r, if there is one. What is left comes at the end.
# </details>


# %% tags=["balise-4"]
class SplitStage:
    """A stage whose backward comes in two halves. module: nn.Sequential; k: number of a micro-batch."""

    def __init__(self, module):
        # BEGIN SOLUTION
        self.module, self.kept = module, {}
        # END SOLUTION

    def forward(self, k, x):
        """The output of the module for x (b, …)."""
        # BEGIN SOLUTION
        x = x.detach().requires_grad_()
        y, with_weights = x, []
        for layer in self.module:
            y = layer(y)
            weights = [p for p in layer.parameters() if p.requires_grad]
            if weights:
                with_weights.append((y, weights))
        self.kept[k] = x, y, with_weights
        return y.detach()
        # END SOLUTION

    def backward_input(self, k, grad_y):
        """Gradient of x, from that of the output; no weight gradient is computed."""
        # BEGIN SOLUTION
        x, y, with_weights = self.kept[k]
        outputs = [output for output, _ in with_weights]
        grad_x, *grads = torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)
        self.kept[k] = [(*pair, grad) for pair, grad in zip(with_weights, grads)]
        return grad_x
        # END SOLUTION

    def backward_weight(self, k):
        """Add the gradients of micro-batch k to `.grad` of the parameters; let go of all that was kept of it."""
        # BEGIN SOLUTION
        for output, weights, grad in self.kept.pop(k):
            for weight, found in zip(weights, torch.autograd.grad(output, weights, grad)):
                if weight.grad is None:
                    weight.grad = found
                else:
                    weight.grad += found
        # END SOLUTION


def zero_bubble_order(rank, n_ranks, n_micro_batches):
    """What one rank does in ZB-H1: a list of ("F", "I" or "W", micro_batch)."""
    # BEGIN SOLUTION
    ahead = min(n_ranks - rank - 1, n_micro_batches)
    order = [("F", k) for k in range(ahead)]
    for k in range(n_micro_batches):
        if ahead + k < n_micro_batches:
            order.append(("F", ahead + k))
        order.append(("I", k))
        if k >= rank:
            order.append(("W", k - rank))
    return order + [("W", k) for k in range(max(0, n_micro_batches - rank), n_micro_batches)]
    # END SOLUTION


# %%
tp.check(4, SplitStage, zero_bubble_order)

# %% [markdown]
# First the two halves, measured on this machine: is each as long as a forward?


# %%
def measured_now():
    """Seconds, once the device has done all that it was given."""
    measure.synchronize(launch.device())
    return time.perf_counter()


def halves(repeats=15):
    """Median milliseconds of F, I and W for a stage of linear layers and one micro-batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())))
    x, stage, seconds = (
        torch.randn(BATCH // 2, 2 * WIDTH, device=launch.device()),
        SplitStage(module.to(launch.device())),
        [],
    )
    grad = torch.ones_like(x)
    parts = (lambda: stage.forward(0, x), lambda: stage.backward_input(0, grad), lambda: stage.backward_weight(0))
    for _ in range(repeats):
        times = [measured_now()]
        for part in parts:
            part()
            times.append(measured_now())
        seconds.append([1000 * (end - begin) for begin, end in zip(times, times[1:])])
    return dict(zip("FIW", torch.tensor(seconds).median(dim=0).values.tolist()))


found = launch.ranks(halves, n=1)[0]
print("one stage of linear layers, one micro-batch:", ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in found.items()))

# %% [markdown]
# Then your order beside 1F1B, with equal costs and with a weight half of three quarters of the input half.

# %%
shown = {}
for name, costs in {"equal halves": SPLIT, "W is 3/4 of I": {"F": 1.0, "I": 1.0, "W": 0.75}}.items():
    orders = [zero_bubble_order(rank, 4, 8) for rank in range(4)]
    zero = planner.simulate(orders, costs)
    whole = planner.simulate(planner.one_f_one_b(4, 8), {"F": costs["F"], "B": costs["I"] + costs["W"]})
    shown |= {f"1F1B, {name}": whole.events, f"ZB-H1, {name}": zero.events}
    for schedule, found in (("1F1B", whole), ("ZB-H1", zero)):
        idle = found.seconds - found.busy[0]
        print(f"{name:<14} {schedule:<6} idle {idle:.2f} a rank, bubble {found.bubble:5.1%}, kept {found.in_flight}")
report.gantt(shown, unit="time of a forward pass")

# %% [markdown]
# Every rank now keeps as many micro-batches as the first rank of 1F1B did: the peak of the pipeline is the same, the
# other ranks have used what they had spare. ZB-H2 and ZB-V, of the same authors, use more memory, or two chunks a
# rank in the form of a V, and reach nearly no bubble at all.
#
# ## Choose
#
# The best schedule depends on the machine. Each action has a fixed price (kernels to launch, small matrices that fill
# no device), so **more micro-batches are not always better**; memory forbids some schedules, and slow links punish
# chunks. Here is a job, in numbers that can all be measured or calculated.


# %% tags=["setup"]
@dataclass(frozen=True)
class Job:
    """What a pipeline has to do. The model comes in `len(forward)` equal-size pieces along it; lists: one a piece."""

    n_ranks: int
    batch: int  # samples of a step
    forward: list  # seconds a sample; the input half of the backward takes as long, and so does the weight half
    overhead: float  # seconds that each action, "F", "B", "I" or "W", costs on top
    split: float  # seconds that "I" and "W" cost on top of that: a backward in two halves is rarely free
    activation_bytes: list  # kept for a sample between forward and backward
    state_bytes: list  # weights, gradients, optimizer
    message_bytes: float  # a sample's activations at a cut
    link: planner.Link
    memory: float  # bytes of a rank


SCHEDULES = {  # name: (orders of all ranks from (n_ranks, n_micro_batches), stages that a rank holds)
    "GPipe": (planner.gpipe, 1),
    "1F1B": (planner.one_f_one_b, 1),
    "interleaved": (lambda ranks, micro_batches: planner.interleaved_1f1b(ranks, micro_batches, 2), 2),
    "zero-bubble": (planner.zero_bubble_h1, 1),
}

# %% [markdown]
# ### Balise 5 · The schedule with the highest throughput that fits · further · about 27 min
#
# `choose(job, schedules)`: try every schedule with every number of equal micro-batches (the divisors of the batch),
# on paper. Return `(name, n_micro_batches, samples_per_second)` of the fastest that fits into the memory of **every**
# rank, or `None` if nothing fits: say so, don't invent.
#
# - `schedules` is a dictionary like the one above. A function raises `ValueError` for what it cannot schedule: skip
#   that.
# - A schedule with $c$ stages a rank has $S = c\,p$ stages, each of `len(job.forward) / S` neighbouring pieces (it
#   divides). Stage $s$ is on rank $s \bmod p$.
# - For a micro-batch of b samples on a stage whose pieces have the sum f of `forward`, "F" takes `overhead` + b f,
#   "B" takes `overhead` + 2 b f, "I" and "W" each take `overhead` + `split` + b f.
# - A rank needs the states of its stages and the peak of its activations.
#
# About 20 lines.
#
# <details><summary>Hint</summary>
#
# `planner.simulate(orders, costs, link=…, message_bytes=…, activation_bytes=…)` takes one number a stage as a list,
# and gives `.seconds` and `.peak_bytes` (activations, one number a rank). Give it costs for all four kinds.
# Throughput is `job.batch / seconds`.
# </details>


# %% tags=["balise-5"]
def choose(job, schedules):
    """(name, n_micro_batches, samples a second) of the fastest schedule that fits every rank; None if nothing fits."""
    # BEGIN SOLUTION
    best = None
    for name, (make_orders, chunks) in schedules.items():
        n_stages = chunks * job.n_ranks

        def merged(pieces, n_stages=n_stages):
            size = len(pieces) // n_stages
            return [sum(pieces[s * size : (s + 1) * size]) for s in range(n_stages)]

        forward, activations, states = merged(job.forward), merged(job.activation_bytes), merged(job.state_bytes)
        for m in (m for m in range(1, job.batch + 1) if job.batch % m == 0):
            try:
                orders = make_orders(job.n_ranks, m)
            except ValueError:
                continue
            b = job.batch // m
            costs = {"F": [job.overhead + b * t for t in forward], "B": [job.overhead + 2 * b * t for t in forward]}
            costs["I"] = costs["W"] = [seconds + job.split for seconds in costs["F"]]
            found = planner.simulate(
                orders, costs, link=job.link, message_bytes=b * job.message_bytes,
                activation_bytes=[b * size for size in activations],
            )  # fmt: skip
            fits = all(sum(states[r :: job.n_ranks]) + peak <= job.memory for r, peak in enumerate(found.peak_bytes))
            if fits and (best is None or job.batch / found.seconds > best[2]):
                best = name, m, job.batch / found.seconds
    return best
    # END SOLUTION


# %%
tp.check(5, choose)

# %% [markdown]
# One job, several machines. All figures are *estimates* of the simulator. Then three of them in full: the dots that
# are missing do not fit.

# %%
GB = 1e9
JOB = {
    "n_ranks": 4, "batch": 32, "forward": [0.002] * 8, "overhead": 0.001, "split": 0.0, "memory": 20 * GB,
    "activation_bytes": [0.2 * GB] * 8, "state_bytes": [2 * GB] * 8, "message_bytes": 16e6,
    "link": planner.Link(latency=5e-6, bandwidth=50e9),
}  # fmt: skip
MACHINES = {
    "as above": {},
    "each action costs 20 ms": {"overhead": 0.020},
    "cheap actions, dear split": {"overhead": 0.0002, "split": 0.004},
    "split, links of 2 GB/s": {"split": 0.004, "link": planner.Link(latency=5e-5, bandwidth=2e9)},
    "8 GB a rank": {"memory": 8 * GB},
    "7 GB, a large last piece": {"memory": 7 * GB, "state_bytes": [2 * GB] * 7 + [4.2 * GB]},
    "5 GB a rank": {"memory": 5 * GB},
}
for name, change in MACHINES.items():
    found = choose(Job(**{**JOB, **change}), SCHEDULES)
    words = f"{found[0]}, {found[1]} micro-batches, {found[2]:.1f} samples/s" if found else "nothing fits"
    print(f"{name:<26} {words}")


# %%
def only(make_orders, wanted):
    """The schedule with one number of micro-batches; all others are refused."""

    def orders(n_ranks, n_micro_batches):
        if n_micro_batches != wanted:
            raise ValueError(f"only {wanted} micro-batches are asked for")
        return make_orders(n_ranks, n_micro_batches)

    return orders


def throughputs(job):
    """For each schedule {micro-batches: samples a second}: your choose, given one schedule and one number at a time."""
    lines = {}
    for name, (make_orders, chunks) in SCHEDULES.items():
        found = {m: choose(job, {name: (only(make_orders, m), chunks)}) for m in (1, 2, 4, 8, 16, 32)}
        lines[name] = {m: best[2] for m, best in found.items() if best}
    return lines


# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained", sharey=True)
for axes, name in zip(panels, ("as above", "each action costs 20 ms", "8 GB a rank")):
    for (schedule, line), marker in zip(throughputs(Job(**{**JOB, **MACHINES[name]})).items(), "osD^"):
        axes.plot(list(line), list(line.values()), marker=marker, label=schedule)
    axes.set(title=name, xlabel="micro-batches", xlim=(0.8, 40), ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32])
panels[0].set_ylabel("samples a second (simulated)")
panels[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Each curve rises while the bubble shrinks, and falls where the price of an action takes over. In the right panel
# only small micro-batches fit, and only in schedules that let go of activations early.
#
# ## DeepSpeed's PipelineModule
#
# DeepSpeed has one schedule, 1F1B, and hides it: a `PipelineModule` takes a list of layer **specs**, builds on each
# rank only the layers of that rank, and `engine.train_batch(iterator)` does a whole step. Where `deepspeed` is
# installed (extra `frameworks`), the cell after this balise trains with it; elsewhere it is skipped.

# %% [markdown]
# ### Balise 6 · The same model for DeepSpeed · further · about 18 min
#
# - **`layer_specs(sizes)`**: a list of `LayerSpec`: `nn.Linear(sizes[0], sizes[1])`, then `nn.GELU()`, then the next
#   `nn.Linear`, …, no `GELU` after the last. No layer may be built yet.
# - **`pipeline_module(specs, n_stages, loss_fn)`**: the `PipelineModule`.
# - **`deepspeed_config(batch_size, n_micro_batches, n_replicas)`**: the dictionary for `deepspeed.initialize`.
#   `batch_size` samples a step in all, over `n_replicas` pipelines side by side, each with `n_micro_batches`;
#   `ValueError` if they do not divide. The step must be the plain one: **no clipping** of gradients.
#
# Import what you need of `deepspeed.pipe` *inside* the functions: it is not installed everywhere. About 8, 3 and 8
# lines.
#
# <details><summary>Hint</summary>
#
# `LayerSpec(nn.Linear, 64, 128)` keeps the class and its arguments; `.build()` makes the layer. DeepSpeed knows three
# numbers, and `train_batch_size` is the product of `train_micro_batch_size_per_gpu` (samples),
# `gradient_accumulation_steps` (micro-batches) and the replicas. Its `gradient_clipping` is 1.0 in newer versions, where
# you do not set it (since June 2026, pull request 8068); 0.0 switches it off.
# </details>


# %% tags=["balise-6"]
def layer_specs(sizes):
    """LayerSpecs of an MLP: a linear layer between neighbours of `sizes`, GELU between linear layers."""
    # BEGIN SOLUTION
    from deepspeed.pipe import LayerSpec

    specs = []
    for wide, out in zip(sizes, sizes[1:]):
        specs += [LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)]
    return specs[:-1]
    # END SOLUTION


def pipeline_module(specs, n_stages, loss_fn):
    """The PipelineModule of these specs over n_stages ranks."""
    # BEGIN SOLUTION
    from deepspeed.pipe import PipelineModule

    return PipelineModule(layers=specs, num_stages=n_stages, loss_fn=loss_fn, partition_method="uniform")
    # END SOLUTION


def deepspeed_config(batch_size, n_micro_batches, n_replicas=1):
    """DeepSpeed's configuration: batch_size samples a step over all replicas, no clipping; ValueError if uneven."""
    # BEGIN SOLUTION
    if batch_size % (n_micro_batches * n_replicas):
        raise ValueError(
            f"{batch_size} samples do not divide by {n_micro_batches} micro-batches × {n_replicas} replicas"
        )
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size // (n_micro_batches * n_replicas),
        "gradient_accumulation_steps": n_micro_batches,
        "gradient_clipping": 0.0,
    }
    # END SOLUTION


# %%
tp.check(6, layer_specs, pipeline_module, deepspeed_config)


# %%
def train_with_deepspeed(steps=8):
    """On each rank: losses of some steps of a DeepSpeed pipeline on one batch."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False  # else it is compiled for a minute; gloo does without
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    x, y = make_batch()
    torch.manual_seed(0)
    module = pipeline_module(layer_specs([64, WIDTH, WIDTH, WIDTH, 10]), dist.get_world_size(), F.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    config = deepspeed_config(BATCH, MICRO_BATCHES, 1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    pieces = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)))
    return [engine.train_batch(data_iter=iter(pieces)).item() for _ in range(steps)]


if frameworks.here("deepspeed"):
    losses = launch.ranks(train_with_deepspeed, n=2, timeout=200)[0]
    recorded.note("16_pipeline_schedules", "deepspeed", losses, on_cpu=True)
else:
    losses = recorded.instead("deepspeed", "16_pipeline_schedules", "deepspeed") or []
print("DeepSpeed, 2 stages, losses:", " ".join(f"{loss:.3f}" for loss in losses))

# %% [markdown]
# ## Measured again, and raced
#
# All schedules in one run: the same layers, the same batch, the same number of micro-batches, one thread a rank.
# Zero-bubble is PyTorch's `ScheduleInterleavedZeroBubble` (two chunks). *One process* does all the work on rank 0
# while the others wait.


# %%
def zero_bubble(layers, n_chunks, n_micro_batches, loss_fn, reduction, device):
    """As make_interleaved, with PyTorch's interleaved zero-bubble schedule over the same stages."""
    stages, _ = make_interleaved(layers, n_chunks, n_micro_batches, loss_fn, reduction, device)
    mean = reduction == "mean"
    return stages, ScheduleInterleavedZeroBubble(stages, n_micro_batches, loss_fn, scale_grads=mean)


def race_schedules(rounds):
    torch.set_num_threads(1)
    device, batch, loss = launch.device(), make_batch(), (F.cross_entropy, "mean")
    made = {}
    for name, make in {"1F1B": make_1f1b, "GPipe": make_gpipe}.items():
        stage = make_stage(make_layers(), device)
        made[name] = [stage], make(stage, MICRO_BATCHES, *loss)
    made["interleaved"] = make_interleaved(make_layers(), 2, MICRO_BATCHES, *loss, device)
    made["interleaved zero-bubble"] = zero_bubble(make_layers(), 2, MICRO_BATCHES, *loss, device)
    steps = {
        name: lambda s=stages, c=schedule: pipeline_step(s, c, *batch, "mean")
        for name, (stages, schedule) in made.items()
    }

    def one_process():
        if dist.get_rank() == 0:
            plain_step(model, *batch, MICRO_BATCHES)
        dist.barrier()

    model = nn.Sequential(*make_layers()).to(device)
    return measure.race(steps | {"one process": one_process}, repeats=rounds, warmup=1, calls=1, device=device)


races = {n: launch.ranks(race_schedules, ROUNDS, n=n, timeout=120)[0] for n in RANKS}
for n, race in races.items():
    print(f"{n} ranks on {launch.backend(n)}\n{race}\n")

# %% [markdown]
# Is that what the simulator says? It needs what a stage costs: measured here, in one process, on one thread, for one
# micro-batch and all layers; each stage is taken to have its share. Messages take no time in this simulation, and it gives
# every rank a processor of its own. (Zero-bubble is left out: what its halves cost in PyTorch is not measured here.)


# %%
def measured_costs(repeats=10):
    """Median seconds of forward and backward of the whole network, for one micro-batch."""
    torch.set_num_threads(1)
    model, (x, y), seconds = nn.Sequential(*make_layers()).to(launch.device()), make_batch(), []
    x, y = x.chunk(MICRO_BATCHES)[0], y.chunk(MICRO_BATCHES)[0]
    for _ in range(repeats):
        model.zero_grad()
        times = [measured_now()]
        loss = F.cross_entropy(model(x), y)
        times.append(measured_now())
        loss.backward()
        times.append(measured_now())
        seconds.append([times[1] - times[0], times[2] - times[1]])
    forward, backward = torch.tensor(seconds).median(dim=0).values.tolist()
    return {"F": forward, "B": backward}


# %%
costs = launch.ranks(measured_costs, n=1)[0]
print(f"one micro-batch, all layers: forward {1000 * costs['F']:.1f} ms, backward {1000 * costs['B']:.1f} ms\n")
print("time of a step over that of 1F1B        simulated   measured")
for n, race in races.items():
    stage = {kind: seconds / n for kind, seconds in costs.items()}
    chunk = {kind: seconds / 2 for kind, seconds in stage.items()}
    interleaved = [interleaved_order(rank, n, MICRO_BATCHES, 2) for rank in range(n)]
    simulated = {
        "1F1B": planner.simulate(planner.one_f_one_b(n, MICRO_BATCHES), stage).seconds,
        "GPipe": planner.simulate(planner.gpipe(n, MICRO_BATCHES), stage).seconds,
        "interleaved": planner.simulate(interleaved, chunk).seconds,
        "one process": MICRO_BATCHES * (costs["F"] + costs["B"]),
    }
    for name, seconds in simulated.items():
        ratio, found = seconds / simulated["1F1B"], race.medians[name] / race.medians["1F1B"]
        print(f"{n} ranks, {name:<30} {ratio:9.2f} {found:10.2f}")
    print(f"{n} ranks: 1F1B takes {1000 * race.medians['1F1B']:.0f} ms, simulated {1000 * simulated['1F1B']:.0f} ms\n")

# %% [markdown]
# What is measured and not simulated are messages, and Python around each action: the shorter the actions, the more of both.
# Only rows of ranks that have a processor each can be compared. Four ranks on two cores take turns on them: while one waits
# in its bubble another one computes, so a smaller bubble gains nothing there.

# %%
print(recorded.line("16_pipeline_schedules", "race"))
if FULL:
    recorded.note("16_pipeline_schedules", "race", {f"{n} ranks": race.medians for n, race in races.items()})

# %% [markdown]
# ## Past this machine · further
#
# A model of about 70 billion parameters: 64 layers of width $h = 9600$ have $12\,h^2$ parameters each. An *estimate*,
# with this arithmetic: a micro-batch is one sequence of 4,096 tokens; a forward takes 2 operations a parameter and
# token, a backward twice as many, and each layer is recomputed in its backward (before "I", where that is cut in two);
# a device does an assumed 40 % of an H100's 989 TFLOP/s; a cut passes $4096 \times h$ numbers of 2 bytes over 50 GB/s; a layer keeps its
# input, and 34 bytes for each of its numbers while it is in backward; weights, gradients and Adam take 16 bytes a
# parameter; each action costs 50 µs on top. A step has 64 sequences, however many the stages.

# %%
H, DEPTH, TOKENS, SPEED, DEVICE = 9600, 64, 4096, 0.4 * planner.H100.bfloat16, planner.H100.memory
LINK = planner.Link(latency=5e-6, bandwidth=50e9)
SECONDS = 2 * 12 * H**2 * TOKENS / SPEED  # forward of a layer, one micro-batch
KEPT, INSIDE, STATES = 2 * TOKENS * H, 34 * TOKENS * H, 16 * 12 * H**2  # bytes of a layer: input, activations, states


def estimate(name, ranks, micro_batches=64):
    """(bubble, bytes of the fullest rank, tokens a second and device) of a schedule for the model above."""
    make_orders, chunks = SCHEDULES[name]
    layers = DEPTH // (ranks * chunks)
    if layers == 0:
        return None
    costs = {kind: 50e-6 + forwards * layers * SECONDS for kind, forwards in {"F": 1, "B": 3, "I": 2, "W": 1}.items()}
    found = planner.simulate(
        make_orders(ranks, micro_batches), costs, link=LINK, message_bytes=2 * TOKENS * H, activation_bytes=layers * KEPT,
        weight_bytes=layers * INSIDE,
    )  # fmt: skip
    memory = max(found.peak_bytes) + layers * INSIDE + STATES * DEPTH / ranks
    return found.bubble, memory, micro_batches * TOKENS / found.seconds / ranks


print(f"estimate: {12 * H**2 * DEPTH / 1e9:.1f} billion parameters, a layer forward {1000 * SECONDS:.1f} ms")
print(f"{'stages':>6}  {'schedule':<14}{'bubble':>8}{'memory':>12}{'tokens/s a device':>20}")
for ranks in (8, 16, 32, 64):
    for name in SCHEDULES:
        found = estimate(name, ranks)
        words = "  has more stages than layers"
        if found:
            speed = f"{found[2]:20,.0f}" if found[1] <= DEVICE else f"{'does not fit':>20}"
            words = f"{found[0]:8.1%}{found[1] / 1e9:9,.0f} GB{speed}"
        print(f"{ranks:>6}  {name:<14}{words}")

# %% [markdown]
# Eight stages do not fit into a device of 80 GB: the states alone need more; sixteen just fail. Of what fits, interleaving
# on 32 stages is the fastest. Zero-bubble, which won above, pays for recomputation twice: what "I" has recomputed stays
# until "W", which comes late, and a longer "I" beside the same "W" leaves more idle time. And with a batch that stays,
# the bubble grows with the stages. So real trainings cut layers too, by tensor parallelism inside a node, and put data
# parallelism around it: then fewer stages are enough.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>You double the micro-batches of 1F1B at the same batch. What happens to bubble and memory?</summary>
#
# The bubble's share goes from (p−1)/(m+p−1) to (p−1)/(2m+p−1), nearly half. The first rank still keeps p
# micro-batches, of half the samples: half the bytes. An action takes half as long, plus its fixed price: in the end
# that price wins.
# </details>
#
# <details><summary>Why not deal out sixteen chunks to a rank, if the bubble is divided by sixteen?</summary>
#
# Every cut is crossed by every micro-batch, so messages grow sixteenfold, and each action becomes so short that its
# fixed price and the messages take over. The model also needs that many layers, and warm-up keeps more activations.
# </details>
#
# <details><summary>Clipping needs the norm of all gradients. What does that do to a zero-bubble schedule?</summary>
#
# The norm is known only when the last weight gradient is, on all ranks: a synchronisation at the end of each step,
# which brings idle time back. The authors step first, and undo the step in the rare case that the norm or a NaN
# demands it.
# </details>
#
# ## To remember
#
# A schedule is data: a list of actions for each rank, which a simulator can judge before a single device is rented.
# 1F1B keeps p micro-batches instead of all; interleaving divides the bubble by the number of chunks and multiplies
# messages; zero-bubble puts weight gradients where ranks would wait. None changes a gradient. Which one wins depends
# on costs, links and memory: measure the costs, then search. Next: **tensor slicing**, which cuts the layers
# themselves.
