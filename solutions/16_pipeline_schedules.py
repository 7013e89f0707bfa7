# %% [markdown]
# # Pipeline schedules: 1F1B, interleaved, zero-bubble, and how to choose · about 80 min, core 35
#
# A pipeline cuts a model by layers over ranks and a batch into micro-batches. What is left to decide is the
# **schedule**: in which order a rank does its forwards and backwards. The order changes no gradient. It changes how
# long ranks stand idle, the *bubble*, and how many activations they keep. Here you run the schedules of
# `torch.distributed.pipelining`, write the two best ones as data, and let a search pick one for a given machine.
#
# **What you will gain.** The same 8 devices, the same 16 micro-batches, only another order: a step a fifth shorter,
# with half of GPipe's activations. An *estimate*: arithmetic on stages of equal cost with a backward of twice the
# forward, nothing measured.

# %% tags=["setup"]
import os
import re
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
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo

tp = course.open("16_pipeline_schedules")
tp

# %% [markdown]
# Ranks use one GPU each where there are enough, else they are processes on the CPU.

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
# A *chunk* is one of several separate pieces of the model on a rank; $t_I$ and $t_W$ are the two halves of a backward,
# the gradient of the input and that of the weights. White is the bubble. The number in a box is the micro-batch; a
# rank's second chunk of layers is drawn lighter.

# %% jupyter={"source_hidden": true}
report.gantt(
    {name: found.events for name, found in four_schedules(4, 8).items()}, unit="time of a forward pass of a stage"
)

# %% [markdown]
# Simulated: equal stages, messages that take no time, the same work in all four panels. 1F1B is as long as GPipe, but keeps
# fewer activations. Interleaving passes each micro-batch round the ranks twice, in steps of half the length. Zero-bubble fills
# idle time with the half of the backward that nobody waits for.
#
# ## The baseline, measured first
#
# One process, all layers, the batch in micro-batches. Every pipeline below must give this loss and these gradients.

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
# ### Balise 1 · A stage on each rank, and a step with GPipe · about 10 min
#
# Every rank calls these three. Its layers, wrapped in a `PipelineStage`, can send and receive; `stage.submod` is the module
# inside.
#
# - `make_stage`: choose this rank's share of the list `layers`, which stays as it is: neighbours, rank 0 the first ones; shares differ by at most
#   one layer. Return `PipelineStage(module, its number, number of stages, device)`, the module on `device`.
# - `make_gpipe`: return `ScheduleGPipe(stage, n_micro_batches, loss_fn, scale_grads=…)`. Micro-batches add their gradients up,
#   and those of the loss of the **whole batch** are due. `loss_fn` gives the mean over a micro-batch's samples, or their sum:
#   `reduction` says which. With `scale_grads=True` the schedule divides all gradients by the number of micro-batches.
# - `pipeline_step`: given is the run. Only the last stage sees `losses`, one for each micro-batch. Let `loss` become that of the
#   whole batch, **on every rank**, a scalar tensor, no graph.
#
# About 2, 1 and 4 lines.
#
# <details><summary>Hint</summary>
#
# Rank r of n can take the layers from `len(layers) * r // n` to `len(layers) * (r + 1) // n`, as `nn.Sequential(*share)`. The
# mean of a batch is the mean of the means of its equal parts. `dist.broadcast(loss, src=rank)` overwrites `loss` everywhere
# with that of one rank; the last stage is on the last rank.
# </details>


# %% tags=["balise-1"]
def make_stage(layers, device):
    """The PipelineStage of this rank: its share of `layers`, neighbours, on `device`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    # BEGIN SOLUTION
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
    for stage in stages:
        stage.submod.zero_grad()
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    losses = []
    schedule.step(*((x,) if first else ()), target=y if last else None, losses=losses)
    loss = torch.zeros((), device=x.device, dtype=x.dtype)
    # BEGIN SOLUTION
    if last:
        found = torch.stack([part.detach() for part in losses])
        loss = found.mean() if reduction == "mean" else found.sum()
    dist.broadcast(loss, src=dist.get_world_size() - 1)  # here and below, the last rank holds the last stage
    # END SOLUTION
    return loss


# %%
tp.check(1, make_stage, make_gpipe, pipeline_step)

# %% [markdown]
# The same network on ranks, beside one process. Each rank reports the gradient's norm of its layers.


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
# ### Balise 2 · 1F1B, and enough micro-batches · about 7 min
#
# GPipe keeps the activations of all micro-batches at once. In 1F1B a rank begins backwards as soon as it can: stage $s$ (from
# 0) of $p$ keeps at most $p - s$ of them. So more micro-batches cost no memory, and they shrink the bubble's share of the
# step, $(p-1)/(m+p-1)$ for stages of equal cost. How many are enough?
#
# - `choose_micro_batches`: return the smallest number of *equal* micro-batches of `batch_size` samples whose bubble's share is at
#   most `bubble`, a number from 0 to 1. Where there is none, the given line says so.
# - `make_1f1b`: the `Schedule1F1B`, as in balise 1.
#
# About 3 lines and 1.
#
# <details><summary>Hint</summary>
#
# Equal means that it divides the batch. Try the smallest first.
# </details>


# %% tags=["balise-2"]
def choose_micro_batches(n_stages, bubble, batch_size):
    """The smallest divisor of `batch_size` that keeps the bubble's share at or under `bubble`; ValueError if none."""
    # BEGIN SOLUTION
    for m in range(1, batch_size + 1):
        if batch_size % m == 0 and (n_stages - 1) / (m + n_stages - 1) <= bubble:
            return m
    # END SOLUTION
    raise ValueError(f"{batch_size} samples on {n_stages} stages always have a bubble above {bubble:.0%}")


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
# But a micro-batch of a few samples no longer fills a device, and the batch cannot grow for ever. The next schedules shrink the
# bubble at the same number of micro-batches.
#
# ## Interleaved stages

# %% [markdown]
# ### Balise 3 · Several chunks on a rank · about 10 min
#
# Cut the model into $v\,p$ stages and deal them out like cards: rank r holds stages $r, r + p, r + 2p, \ldots$, its *chunks*. A
# stage is $v$ times shorter, and so is every wait. A rank works in rounds: $p$ micro-batches through its first chunk, the
# same $p$ through its second, and so on, then the next $p$. On two ranks with two chunks, rank 0 goes forward so:
#
# ```
# i            0  1  2  3  4  5  6  7
# micro-batch  0  1  0  1  2  3  2  3
# stage        0  0  2  2  0  0  2  2
# ```
#
# Backwards go likewise, with the chunks from the last to the first. The rest is 1F1B: `ahead` forwards, then a forward and a
# backward in turn, then the backwards left. Write:
#
# - `placement`: for each rank the list of its `(stage, [numbers of its layers])`, in order of stage. What layers each stage has
#   is given.
# - `interleaved_order`: in it, `action(kind, i)`, a rank's i-th forward or backward, `(kind, micro_batch, stage)`. And
#   `ahead`: $(v-1)\,p$ forwards, a round without the last chunk, and two more for each rank behind this one; never more
#   than `total`, all that a rank has.
#
# About 1 and 5 lines. `n_micro_batches` is a multiple of `n_ranks`. `make_interleaved`, for PyTorch, is given.
#
# <details><summary>Hint</summary>
#
# A round has `group` forwards. `i // group` is the number of the round, `i % group` where in it we are: which chunk is that,
# if each takes `n_ranks` of them? And which micro-batch of the round, `i % n_ranks`?
# </details>


# %% tags=["balise-3"]
def placement(n_layers, n_ranks, n_chunks):
    """For each rank, its [(stage, [numbers of its layers]), ...]: stages are dealt out in turn."""
    n_stages = n_ranks * n_chunks
    cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    layers = [list(range(begin, end)) for begin, end in zip(cuts, cuts[1:])]
    # BEGIN SOLUTION
    return [[(stage, layers[stage]) for stage in range(rank, n_stages, n_ranks)] for rank in range(n_ranks)]
    # END SOLUTION


def interleaved_order(rank, n_ranks, n_micro_batches, n_chunks):
    """What one rank does: a list of ("F" or "B", micro_batch, stage)."""
    total, group = n_micro_batches * n_chunks, n_ranks * n_chunks

    def action(kind, i):
        # BEGIN SOLUTION
        chunk = i % group // n_ranks
        if kind == "B":
            chunk = n_chunks - 1 - chunk
        return kind, i // group * n_ranks + i % n_ranks, chunk * n_ranks + rank
        # END SOLUTION

    # BEGIN SOLUTION
    ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)
    # END SOLUTION
    order = [action("F", i) for i in range(ahead)]
    for i in range(total - ahead):
        order += [action("F", ahead + i), action("B", i)]
    return order + [action("B", i) for i in range(total - ahead, total)]


def make_interleaved(layers, n_chunks, n_micro_batches, loss_fn, reduction, device):
    """(stages, schedule) of this rank: its chunks of `layers`, and ScheduleInterleaved1F1B over them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)
        for stage, numbers in placement(len(layers), n, n_chunks)[rank]
    ]
    return stages, ScheduleInterleaved1F1B(stages, n_micro_batches, loss_fn, scale_grads=reduction == "mean")


# %%
tp.check(3, placement, interleaved_order, make_interleaved)

# %% [markdown]
# Your order on the clock: more chunks, less white, and more messages, because every micro-batch crosses every cut. (A warm-up of
# $(p-r-1) + (v-1)p$ would be as fast with free messages. The longer one, which Megatron-LM and PyTorch have, gives them time.)

# %% jupyter={"source_hidden": true}
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
# Zero-bubble schedules do the first at once ("I", input) and keep the second ("W") for when there is nothing else to do.
#
# ### Balise 4 · Backward in two halves, and ZB-H1 · further · about 17 min
#
# Autograd can be asked for some gradients only. `SplitStage.forward`, given, runs the layers of a `nn.Sequential` and keeps the
# *outputs* $o_1, o_2, \ldots$ of those that have weights: from there both halves start.
#
# | half | goes from | to |
# |---|---|---|
# | `backward_input` | $\partial y$ | $\partial x$ and all $\partial o$: no weight |
# | `backward_weight` | $\partial o_1$; $\partial o_2$; … | the weights of layer 1; of layer 2; … |
#
# - `backward_input`: get these gradients in one call, from `grad_y`; return `grad_x`. In `kept`, put for each layer `(output,
#   weights, gradient of the output)`, which is what the other half unpacks.
# - `backward_weight`: for one layer, get the gradients of its weights, and add them to their `.grad`, as `backward()` would.
# - `zero_bubble_order`: 1F1B, where "I" stands for the backward, and rank r puts its weight gradients off by r
#   micro-batches: after "I" of k comes "W" of k − r, if there is one. What is left comes at the end of the list that is returned.
#
# About 3, 5 and 4 lines.
#
# <details><summary>Hint</summary>
#
# `torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)` gives a gradient for each tensor of the list; the graph
# stays for the second half: `torch.autograd.grad(output, weights, grad)`. A `.grad` that nobody has written is `None`.
# </details>


# %% tags=["balise-4"]
class SplitStage:
    """A stage whose backward comes in two halves. module: nn.Sequential; k: number of a micro-batch."""

    def __init__(self, module):
        self.module, self.kept = module, {}

    def forward(self, k, x):
        """The output of the module for x (b, …)."""
        x = x.detach().requires_grad_()
        y, with_weights = x, []
        for layer in self.module:
            y = layer(y)
            weights = [p for p in layer.parameters() if p.requires_grad]
            if weights:
                with_weights.append((y, weights))
        self.kept[k] = x, y, with_weights
        return y.detach()

    def backward_input(self, k, grad_y):
        """Gradient of x, from that of the output; no weight gradient is computed."""
        x, y, with_weights = self.kept[k]
        # BEGIN SOLUTION
        outputs = [output for output, _ in with_weights]
        grad_x, *grads = torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)
        self.kept[k] = [(*pair, grad) for pair, grad in zip(with_weights, grads)]
        # END SOLUTION
        return grad_x

    def backward_weight(self, k):
        """Add the gradients of micro-batch k to `.grad` of the parameters; let go of all that was kept of it."""
        for output, weights, grad in self.kept.pop(k):
            # BEGIN SOLUTION
            for weight, found in zip(weights, torch.autograd.grad(output, weights, grad)):
                if weight.grad is None:
                    weight.grad = found
                else:
                    weight.grad += found
            # END SOLUTION


def zero_bubble_order(rank, n_ranks, n_micro_batches):
    """What one rank does in ZB-H1: a list of ("F", "I" or "W", micro_batch)."""
    ahead = min(n_ranks - rank - 1, n_micro_batches)
    order = [("F", k) for k in range(ahead)]
    for k in range(n_micro_batches):
        if ahead + k < n_micro_batches:
            order.append(("F", ahead + k))
        # BEGIN SOLUTION
        order.append(("I", k))
        if k >= rank:
            order.append(("W", k - rank))
        # END SOLUTION
    # BEGIN SOLUTION
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

# %% jupyter={"source_hidden": true}
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
# Every rank now keeps as many micro-batches as the first rank of 1F1B did: the peak of the pipeline is the same.
#
# ### The V
#
# Deal two chunks out to a rank in the form of a V: rank r of p gets stages $r$ and $2p - 1 - r$. A micro-batch goes down the
# ranks and comes back up, so its gradient starts on rank 0, at once. PyTorch has two such schedules. `ScheduleZBVZeroBubble` (ZB-V,
# of the authors of ZB-H1) fills the V with weight gradients. `ScheduleDualPipeV` (after DeepSeek-V3's DualPipe) pairs the
# forward of one micro-batch with the backward of another: messages of one can travel while the other computes. (PyTorch runs
# the two of a pair one after the other.)
#
# Their orders are data too: `schedule.pipeline_order`. You run them on four ranks, with stages that only *sleep* for each
# "F", "I" and "W": that needs no device, but order, messages and waiting are real. Guess before you measure.

# %%
waiting = tp.predict(
    "ZB-V, four ranks, 8 micro-batches: for how many per cent of the time do ranks wait, measured?", ...
)


# %%
class Rest(torch.autograd.Function):
    """The input after a rest; backward, its gradient after a rest."""

    @staticmethod
    def forward(ctx, x, rest, forth, back):
        ctx.rest, ctx.back = rest, back
        rest(forth)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.rest(ctx.back)
        return gradient, None, None, None


class Sleeper(nn.Module):
    """A stage that sleeps some seconds for each F, I and W. events: [(rank, kind, micro-batch, stage, begin, end)]"""

    def __init__(self, stage, seconds):
        super().__init__()
        self.weight, self.stage, self.seconds, self.events = nn.Parameter(torch.ones(1)), stage, seconds, []

    def rest(self, kind):
        if kind:
            begin, k = time.perf_counter(), sum(event[1] == kind for event in self.events)
            time.sleep(self.seconds)
            self.events.append((dist.get_rank(), kind, k, self.stage, begin, time.perf_counter()))

    def forward(self, x):
        return Rest.apply(x, self.rest, "F", "I") * Rest.apply(self.weight, self.rest, None, "W")


IN_V = {  # name: (schedule, stages that a rank holds)
    "1F1B": (Schedule1F1B, lambda rank, n: [rank]),
    "interleaved": (ScheduleInterleaved1F1B, lambda rank, n: [rank, rank + n]),
    "ZB-V": (ScheduleZBVZeroBubble, lambda rank, n: [rank, 2 * n - 1 - rank]),
    "DualPipeV": (ScheduleDualPipeV, lambda rank, n: [rank, 2 * n - 1 - rank]),
}
if torch.__version__ < (2, 14):  # neighbouring stages of one rank sent messages to themselves, which gloo cannot
    del IN_V["ZB-V"], IN_V["DualPipeV"]


def asleep(rounds=3):
    """{schedule: (events of this rank in each step, orders of all ranks)}; a rank sleeps 20 ms for each micro-batch and kind."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), {}
    for name, (schedule, numbers) in IN_V.items():
        numbers = numbers(rank, n)
        sleepers = [Sleeper(stage, 0.020 / len(numbers)) for stage in numbers]
        stages = [PipelineStage(part, part.stage, n * len(numbers), launch.device()) for part in sleepers]
        run = schedule(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, lambda y, t: (y * t).mean())
        x, steps = torch.ones(MICRO_BATCHES, 1), []
        for _ in range(rounds):
            for part in sleepers:
                part.events = []
            dist.barrier()
            run.step(*[x] * stages[0].is_first, target=x, losses=[])
            steps.append([event for part in sleepers for event in part.events])
        orders = getattr(run, "pipeline_order", {})  # an action is written "0F3": stage, kind, micro-batch
        found[name] = steps[1:], [" ".join(map(str, orders[r])) for r in sorted(orders)]
    return found


# %%
with launch.place.on_cpu():
    slept = launch.ranks(asleep, n=4, timeout=120)

# %% jupyter={"source_hidden": true}
shown = {}
print(
    f"{'4 ranks, 8 micro-batches':<26}{'bubble on paper':>16}{'measured':>10}{'step':>10}{'kept by the fullest rank':>26}"
)
for name in IN_V:
    steps = [sum(step, []) for step in zip(*(rank[name][0] for rank in slept))]
    long, events = min(((max(e[5] for e in step) - min(e[4] for e in step)), step) for step in steps)
    bubble = 1 - sum(event[5] - event[4] for event in events) / (4 * long)
    texts = slept[0][name][1]
    orders = [[(kind, int(k), int(s)) for s, kind, k in re.findall(r"(\d+)([FBIW])(\d+)", text)] for text in texts]
    chunks, orders = (2, orders) if name != "1F1B" else (1, planner.one_f_one_b(4, MICRO_BATCHES))
    free = [0.0] + [1.0] * (4 * chunks - 1)  # the first stage has no input gradient to sleep for
    costs = {"F": 1.0, "W": 1.0, "I": free, "B": [1 + seconds for seconds in free]}
    paper = planner.simulate(orders, costs, activation_bytes=1 / chunks)
    print(
        f"{name:<26}{paper.bubble:>16.1%}{bubble:>10.1%}{1000 * long:>7.0f} ms{max(paper.peak_bytes):>13.1f} micro-batches"
    )
    if name != "interleaved":
        shown[f"{name}, measured"] = events
    if name == "ZB-V":
        waited = 100 * bubble
report.gantt(shown)
if "ZB-V" in IN_V:
    why = "Zero holds for endless steps: to fill and empty the V takes time, and so do messages and Python."
    waiting.shows(waited, "{:.0f} %", why)

# %% [markdown]
# A V keeps about what 1F1B keeps on its first rank, and waits least. What paper does not know are messages, and PyTorch's Python
# between two actions: with twice the stages, each is half as long, and the price is paid twice as often.
#
# ## Choose
#
# The best schedule depends on the machine. Each action has a fixed price (kernels to launch, small matrices that fill
# no device), so **more micro-batches are not always better**; memory forbids some schedules, and slow links punish
# chunks. Here is a job, in numbers that can all be measured or calculated.


# %% tags=["setup"]
@dataclass(frozen=True)
class Job:
    """What a pipeline has to do. The model is cut into `len(forward)` pieces; lists: one number a piece."""

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
# ### Balise 5 · The schedule with the highest throughput that fits · further · about 9 min
#
# Try every schedule with every number of equal micro-batches, on paper, and return `(name, n_micro_batches,
# samples_per_second)` of the fastest that fits into the memory of **every** rank; `None` if nothing does. The search is given:
# it asks a schedule for its orders (a `ValueError` means that it has none), sums pieces up to stages (stage s is on rank s mod
# p), and simulates. Write what it knows of the machine:
#
# - `costs`: for each of "F", "B", "I", "W" a list of seconds, one a stage. For a micro-batch of b samples, on a stage whose entry
#   in `forward` is f, "F" takes `overhead` + b f and "B" `overhead` + 2 b f; "I" and "W" each take `overhead` + `split` + b f.
# - the choice: does each rank have room for the states of its stages and the peak of its activations,
#   `found.peak_bytes[rank]`? If so, and if it is faster than `best`, it is the new best.
#
# About 5 lines.
#
# <details><summary>Hint</summary>
#
# `states[r :: job.n_ranks]` are those of rank r. A step of `job.batch` samples takes `found.seconds`.
# </details>


# %% tags=["balise-5"]
def choose(job, schedules):
    """(name, n_micro_batches, samples a second) of the fastest schedule that fits every rank; None if nothing fits."""
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
            # BEGIN SOLUTION
            costs = {"F": [job.overhead + b * t for t in forward], "B": [job.overhead + 2 * b * t for t in forward]}
            costs["I"] = costs["W"] = [seconds + job.split for seconds in costs["F"]]
            # END SOLUTION
            found = planner.simulate(
                orders, costs, link=job.link, message_bytes=b * job.message_bytes,
                activation_bytes=[b * size for size in activations],
            )  # fmt: skip
            # BEGIN SOLUTION
            fits = all(sum(states[r :: job.n_ranks]) + peak <= job.memory for r, peak in enumerate(found.peak_bytes))
            if fits and (best is None or job.batch / found.seconds > best[2]):
                best = name, m, job.batch / found.seconds
            # END SOLUTION
    return best


# %%
tp.check(5, choose)

# %% [markdown]
# One job, several machines: *estimates* of the simulator. Then three of them in full: the dots that are missing do not fit.

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
# A curve rises while the bubble shrinks, and falls once the price of an action takes over. On the right only small
# micro-batches fit, and only in schedules that let go of activations early.
#
# ## DeepSpeed's PipelineModule
#
# DeepSpeed's schedule is 1F1B (0.19.8 has DualPipeV, too), and it is hidden: a `PipelineModule` takes a list of layer **specs**, which name a layer's class
# and arguments, builds on each rank only the layers of that rank, and `engine.train_batch(iterator)` does a whole step.

# %% [markdown]
# ### Balise 6 · The same model for DeepSpeed · further · about 10 min
#
# - `layer_specs([64, 128, 10])` are specs of `nn.Linear(64, 128)`, `nn.GELU()`, `nn.Linear(128, 10)`. Write the loop. Nothing is
#   built yet.
# - `deepspeed_config`: return a dictionary with `train_batch_size`, the samples of a step; `train_micro_batch_size_per_gpu`, those
#   of a micro-batch; `gradient_accumulation_steps`, the micro-batches; and `gradient_clipping`, which newer versions set to 1.0
#   and 0.0 switches off: the step must be the plain one. `n_replicas` pipelines side by side share a step's samples.
#
# About 2 and 5 lines. The cell after the verdict trains with it, where `deepspeed` is installed.
#
# <details><summary>Hint</summary>
#
# `LayerSpec(nn.Linear, 64, 128)`. The first number is the product of the second, the third and the replicas.
# </details>


# %% tags=["balise-6"]
def layer_specs(sizes):
    """LayerSpecs of an MLP: a linear layer between neighbours of `sizes`, GELU between linear layers."""
    from deepspeed.pipe import LayerSpec  # here: it is not installed everywhere

    specs = []
    # BEGIN SOLUTION
    for wide, out in zip(sizes, sizes[1:]):
        specs += [LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)]
    # END SOLUTION
    return specs[:-1]  # no GELU at the end


def pipeline_module(specs, n_stages, loss_fn):
    """The PipelineModule of these specs over n_stages ranks."""
    from deepspeed.pipe import PipelineModule

    return PipelineModule(layers=specs, num_stages=n_stages, loss_fn=loss_fn, partition_method="uniform")


def deepspeed_config(batch_size, n_micro_batches, n_replicas=1):
    """DeepSpeed's configuration: batch_size samples a step over all replicas, no clipping; ValueError if uneven."""
    if batch_size % (n_micro_batches * n_replicas):
        raise ValueError(
            f"{batch_size} samples do not divide by {n_micro_batches} micro-batches × {n_replicas} replicas"
        )
    # BEGIN SOLUTION
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
    deepspeed = frameworks.quiet_deepspeed()
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
# All schedules in one run: the same layers, batch and micro-batches, one thread a rank. Zero-bubble is PyTorch's
# `ScheduleInterleavedZeroBubble` (two chunks). *One process* does all the work on rank 0 while the others wait. Guess before
# you measure.

# %%
fastest = tp.predict(
    "Which is the fastest on two ranks?",
    ...,
    choices=("GPipe", "1F1B", "interleaved", "interleaved zero-bubble", "one process"),
)


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
fastest.shows(
    min(races[2].medians, key=races[2].medians.get),
    why="A smaller bubble is bought with more actions and messages, and with two stages there is little bubble to win.",
)

# %% [markdown]
# Is that what the simulator says? It needs what a stage costs: measured in one process, on one thread, for one micro-batch and
# all layers; each stage is taken to have its share. Messages take no time in it, and each rank has a processor of its own.


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

# %% jupyter={"source_hidden": true}
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
# Compare rows of ranks that have a processor each. Four ranks on two cores take turns: while one waits in its bubble another
# one computes, and a smaller bubble gains nothing.

# %% jupyter={"source_hidden": true}
print(recorded.line("16_pipeline_schedules", "race"))
if FULL:
    recorded.note("16_pipeline_schedules", "race", {f"{n} ranks": race.medians for n, race in races.items()})

# %% [markdown]
# ## Past this machine · further
#
# A model of about 70 billion parameters: 64 layers of width $h = 9600$ have $12\,h^2$ each. An *estimate*: a micro-batch is one
# sequence of 4,096 tokens; a forward takes 2 operations a parameter and token, a backward twice as many, and each layer is
# recomputed in its backward (before "I", where that is cut in two); a device does an assumed 40 % of an H100's 989 TFLOP/s;
# a cut passes $4096 \times h$ numbers of 2 bytes over 50 GB/s; a layer keeps its input, and 34 bytes for each of its numbers
# while it is in backward: one layer at a time, but with "I" all of a stage, until its "W"; states take 16 bytes a parameter; each
# action costs 50 µs on top; 64 sequences a step.

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
    at_once = layers if name == "zero-bubble" else 1  # what "I" recomputes stays for its "W"
    memory = max(found.peak_bytes) + at_once * INSIDE + STATES * DEPTH / ranks
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
# Eight stages do not fit into 80 GB, sixteen just do: interleaved, the fastest of all for each device, with 79.5 GB,
# which leaves no room for anything else; 1F1B with 77. Zero-bubble pays for recomputation twice: what "I" has
# recomputed stays until "W", which comes late, and a longer "I" beside the same "W" leaves more idle time. And with a
# batch that stays, the bubble grows with the stages. So real trainings cut layers too, by tensor parallelism, and put
# data parallelism around it: then fewer stages are enough.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>You double the micro-batches of 1F1B at the same batch. What happens to bubble and memory?</summary>
#
# The bubble's share goes from (p−1)/(m+p−1) to (p−1)/(2m+p−1), nearly half. The first rank still keeps p micro-batches, of
# half the samples. An action takes half as long, plus its fixed price: in the end that price wins.
# </details>
#
# <details><summary>Why not deal out sixteen chunks to a rank, if the bubble is divided by sixteen?</summary>
#
# Middle ranks send sixteenfold, and each action becomes so short that its fixed price takes over. The model also needs that many
# layers, and warm-up keeps more activations.
# </details>
#
# <details><summary>Clipping needs the norm of all gradients. What does that do to a zero-bubble schedule?</summary>
#
# The norm is known only when the last weight gradient is, on all ranks: a synchronisation at the end of each step, which brings
# idle time back. The authors step first, and undo the step in the rare case that the norm demands it.
# </details>
#
# ## To remember
#
# A schedule is data: a list of actions for each rank, which a simulator can judge before a single device is rented.
# 1F1B keeps p micro-batches instead of all; interleaving divides the bubble by the number of chunks and multiplies
# messages; zero-bubble puts weight gradients where ranks would wait. None changes a gradient. Which one wins depends
# on costs, links and memory: measure the costs, then search. Next: **tensor slicing**, which cuts the layers
# themselves.
