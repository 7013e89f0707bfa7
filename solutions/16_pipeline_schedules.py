# %% [markdown] tags=["slide"]
# # Pipeline schedules: 1F1B, interleaved, zero-bubble, and how to choose · about 90 min, core 45
#
# A pipeline splits a model's layers over ranks, and a batch into micro-batches. The **schedule** orders each rank's
# forwards and backwards. It changes no gradient, but it decides how long ranks are idle (the *bubble*) and how many
# activations they keep.
#
# **What you will gain.** On four ranks with eight micro-batches, GPipe leaves 27 % of the time slots idle, and each
# rank keeps the activations of 8 micro-batches. 1F1B keeps at most 4. Interleaving leaves 16 % idle, and zero-bubble 11
# %. You count the idle slots in the schedules' tables, and measure the bytes.

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% tags=["setup"] jupyter={"source_hidden": true}
digits = data.digits()


class Block(nn.Module):
    """x plus two linear layers of x: (b, width) -> (b, width)."""

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


# %% [markdown]
# ## The baseline: idle slots and bytes
#
# A slot is the time of a stage's forward. A backward takes two slots, and messages take no time here. The bytes that a
# stage keeps for one micro-batch are measured.

# %%
WHOLE = {"F": 1.0, "B": 2.0}  # slots of a stage
SPLIT = {"F": 1.0, "I": 1.0, "W": 1.0}  # the same backward in two halves: input, weights
HALF = {kind: cost / 2 for kind, cost in WHOLE.items()}  # a stage of half as many layers


def bytes_of_a_micro_batch():
    """Bytes that a quarter of the layers keeps for one micro-batch, between forward and backward."""
    stage, (x, _) = nn.Sequential(*make_layers()[LAYERS // 4 : LAYERS // 2]).to(launch.device()), make_batch()
    x = torch.zeros(BATCH // MICRO_BATCHES, WIDTH, device=x.device)
    live = measure.LiveBytes().track(stage, x)
    before = live.live
    with live:
        y = stage(x)  # noqa: F841  (holds what backward will need)
        return live.live - before


def four_schedules(ranks, micro_batches, size=1):
    """Simulate four schedules on equal stages: {name: Simulation}; size: bytes of a rank for one micro-batch."""
    gpipe, plain = planner.gpipe(ranks, micro_batches), planner.one_f_one_b(ranks, micro_batches)
    interleaved, zero = planner.interleaved_1f1b(ranks, micro_batches, 2), planner.zero_bubble_h1(ranks, micro_batches)
    return {
        "GPipe": planner.simulate(gpipe, WHOLE, activation_bytes=size),
        "1F1B": planner.simulate(plain, WHOLE, activation_bytes=size),
        "interleaved, 2 chunks": planner.simulate(interleaved, HALF, activation_bytes=size / 2),
        "zero-bubble (ZB-H1)": planner.simulate(zero, SPLIT, activation_bytes=size),
    }


size = launch.ranks(bytes_of_a_micro_batch, n=1)[0]
rows = [(name, found.bubble, found.seconds, max(found.peak_bytes))
        for name, found in four_schedules(4, MICRO_BATCHES, size).items()]  # fmt: skip
report.table({"4 ranks, 8 micro-batches": "{}", "idle slots": "{:.1%}", "slots of a step": "{:.1f}",
              "activations of the fullest rank": measure.human_bytes}, rows)  # fmt: skip

# %% [markdown] tags=["slide"]
# ## The idea
#
# With $p$ ranks, the first micro-batch needs time to reach the last rank, and the last gradient needs time to come
# back. The idle time of a rank is
#
# $$\underbrace{(p-1)(t_F+t_B)}_{\text{GPipe, 1F1B}} \;\to\;
# \underbrace{\frac{(p-1)(t_F+t_B)}{v}}_{\text{interleaved, } v \text{ chunks}} \qquad
# \underbrace{(p-1)(t_F+t_I-t_W)}_{\text{zero-bubble, } t_B = t_I + t_W}$$
#
# A *chunk* is one of several pieces of the model on a rank; $t_I$ and $t_W$ are the times of the backward's halves, for
# input and weights. In the figure, white is the bubble, and the number in a box is the micro-batch.

# %% tags=["slide"] jupyter={"source_hidden": true}
report.gantt(
    {name: found.events for name, found in four_schedules(4, 8).items()}, unit="time of a forward pass of a stage"
)

# %% [markdown]
# ## Stages and schedules of PyTorch
#
# ### Balise 1 · A stage on each rank, and a step with GPipe · about 14 min
#
# Every rank calls these three functions. A `PipelineStage` wraps a rank's layers, so that they can send and receive.
#
# - `make_stage`: take this rank's contiguous share of the list `layers` without changing the list. Rank 0 has the first
#   layers, and shares differ by at most one layer. Return `PipelineStage(module, its number, number of stages,
#   device)`, with the module on `device`.
# - `make_gpipe`: return `ScheduleGPipe(stage, n_micro_batches, loss_fn, scale_grads=…)`. Gradients of micro-batches add
#   up; `scale_grads=True` divides them by the number of micro-batches. The result must be the gradient of the **whole
#   batch's** loss. `reduction` says whether `loss_fn` is a mean or a sum.
# - `pipeline_step`: only the last stage fills `losses`, with one for each micro-batch. Make `loss` the whole batch's
#   loss **on every rank**: a scalar tensor without a graph.
#
# <details><summary>Hint</summary>
#
# Rank r of n can take the layers from `len(layers) * r // n` to `len(layers) * (r + 1) // n`, as
# `nn.Sequential(*share)`. The mean of a batch is the mean of the means of its equal parts. `dist.broadcast(loss,
# src=rank)` overwrites `loss` on every rank with that of one rank; the last stage is on the last rank.
# </details>


# %% tags=["balise-1"]
def make_stage(layers, device):
    """The PipelineStage of this rank: its share of consecutive `layers`, on `device`."""
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
    """Leave the whole batch's gradients in the stages; return its loss () on every rank, without a graph."""
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


# %% jupyter={"source_hidden": true}
def one_process():
    model, (x, y) = nn.Sequential(*make_layers()).to(launch.device()), make_batch()
    loss = plain_step(model, x, y, MICRO_BATCHES).item()
    norms = [sum(p.grad.norm().item() ** 2 for p in layer.parameters()) ** 0.5 for layer in model]
    return loss, norms


def norms_of(stages):
    """The norm of the gradient of each layer that this rank holds, in order."""
    layers = [layer for stage in stages for layer in stage.submod]
    return [sum(p.grad.norm().item() ** 2 for p in layer.parameters()) ** 0.5 for layer in layers]


def gpipe_once():
    stage = make_stage(make_layers(), launch.device())
    schedule = make_gpipe(stage, MICRO_BATCHES, F.cross_entropy, "mean")
    loss = pipeline_step([stage], schedule, *make_batch(), "mean")
    return loss.item(), norms_of([stage])


found = {"one process": launch.ranks(one_process, n=1)} | {f"{n} ranks": launch.ranks(gpipe_once, n=n) for n in RANKS}
rows = [(name, ranks[0][0], " | ".join(" ".join(f"{norm:.4f}" for norm in norms) for _, norms in ranks))
        for name, ranks in found.items()]  # fmt: skip
report.table({"": "{}", "loss": "{:.6f}", "gradient norms of the layers, by rank": "{}"}, rows)

# %% [markdown]
# ### Balise 2 · 1F1B, and enough micro-batches · about 10 min
#
# In 1F1B, a rank begins its backwards as soon as it can, so stage $s$ of $p$, counted from 0, keeps at most $p - s$
# micro-batches. More micro-batches then cost no memory, and they shrink the bubble's share, $(p-1)/(m+p-1)$.
#
# - `choose_micro_batches`: return the smallest number of *equal* micro-batches whose bubble's share is at most
#   `bubble`, a number from 0 to 1.
# - `make_1f1b`: return the `Schedule1F1B`, as in balise 1.
#
# <details><summary>Hint</summary>
#
# Equal means that the number divides the batch. Try the smallest first.
# </details>


# %% tags=["balise-2", "slide-mistake=size-returned"]
def choose_micro_batches(n_stages, bubble, batch_size):
    """The smallest divisor of `batch_size` that keeps the bubble's share at or under `bubble`; ValueError if none."""
    # BEGIN SOLUTION
    for m in range(1, batch_size + 1):
        if batch_size % m == 0 and (n_stages - 1) / (m + n_stages - 1) <= bubble:
            return m
    # END SOLUTION
    raise ValueError(f"{batch_size} samples on {n_stages} stages always have a bubble above {bubble:.0%}")


def make_1f1b(stage, n_micro_batches, loss_fn, reduction="mean"):
    """The 1F1B schedule; arguments as for make_gpipe."""
    # BEGIN SOLUTION
    return Schedule1F1B(stage, n_micro_batches, loss_fn, scale_grads=reduction == "mean")
    # END SOLUTION


# %%
tp.check(2, choose_micro_batches, make_1f1b)


# %%
def one_chunk(make_schedule):
    """(stages, schedule) of this rank."""
    stage = make_stage(make_layers(), launch.device())
    return [stage], make_schedule(stage, MICRO_BATCHES, F.cross_entropy, "mean")


def peak_of_activations(make, *given):
    """Peak bytes of activations on this rank, in a step of the stages and schedule that make(*given) returns."""
    (stages, schedule), batch = make(*given), make_batch()
    pipeline_step(stages, schedule, *batch, "mean")  # the first step also finds out the shapes
    live = measure.LiveBytes().track(*(stage.submod for stage in stages), *batch)
    for p in (p for stage in stages for p in stage.submod.parameters()):
        p.register_post_accumulate_grad_hook(live.track_gradient)
    with live:
        pipeline_step(stages, schedule, *batch, "mean")
    return live.parts_at_peak["activations"]


rows = [(name, *launch.ranks(peak_of_activations, one_chunk, make_schedule, n=RANKS[-1]))
        for name, make_schedule in {"GPipe": make_gpipe, "1F1B": make_1f1b}.items()]  # fmt: skip
report.table({"activations, measured": "{}"} | {f"rank {rank}": measure.human_bytes for rank in range(RANKS[-1])}, rows)
rows = [(bubble, m, BATCH // m) for bubble in (0.5, 0.3, 0.2, 0.1) for m in [choose_micro_batches(4, bubble, BATCH)]]
report.table({"bubble of 4 stages, at most": "{:.0%}", "micro-batches": "{}", "samples in each": "{}"}, rows)

# %% [markdown]
# But a micro-batch of a few samples doesn't keep a device busy. The next schedules shrink the bubble without smaller
# micro-batches.
#
# ## Interleaved stages
#
# Cut the model into $v\,p$ stages and deal them out: rank r holds stages $r, r + p, r + 2p, \ldots$, its *chunks*. A
# stage is $v$ times shorter, and so is every wait. A round sends $p$ micro-batches through a rank's first chunk, then
# the same $p$ through its second, and so on. On two ranks with two chunks, rank 0 does these forwards:
#
# ```
# i            0  1  2  3  4  5  6  7
# micro-batch  0  1  0  1  2  3  2  3
# stage        0  0  2  2  0  0  2  2
# ```
#
# ### Balise 3 · Several chunks on a rank · about 13 min
#
# - `placement`: `layers` lists the layer numbers of each stage. Deal them out.
# - `action(kind, i)` in `interleaved_order`: the rank's i-th forward or backward, as `(kind, micro_batch, stage)`.
# - `ahead`: with how many forwards does the rank start?
#
# **Write all of it:** `tp.open_task(3)` gives you only names and docstrings. Deal out the chunks, order a rank's
# actions, and prepare PyTorch's schedule.
#
# <details><summary>Hint</summary>
#
# A round has `group` forwards. `i // group` is the number of the round, and `i % group` the place in it: which chunk is
# that, if each takes `n_ranks` places? And which micro-batch of the round is `i % n_ranks`?
# </details>


# %% tags=["balise-3"]
def placement(n_layers, n_ranks, n_chunks):
    """For each rank, its [(stage, [numbers of its layers]), ...] in order of stage.

    The n_ranks · n_chunks stages hold consecutive layers, in order, and differ by at most one layer. They are dealt
    out in turn: rank r has the stages r, r + n_ranks, r + 2 n_ranks, …, which are its chunks.
    """
    n_stages = n_ranks * n_chunks
    cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    layers = [list(range(begin, end)) for begin, end in zip(cuts, cuts[1:])]
    # BEGIN SOLUTION
    return [[(stage, layers[stage]) for stage in range(rank, n_stages, n_ranks)] for rank in range(n_ranks)]
    # END SOLUTION


def interleaved_order(rank, n_ranks, n_micro_batches, n_chunks):
    """What one rank does: a list of ("F" or "B", micro_batch, stage), the order of interleaved 1F1B.

    A round sends n_ranks micro-batches through the rank's first chunk, then the same ones through its second, and so
    on. n_micro_batches is a multiple of n_ranks. Backwards follow the same rounds, with the same micro-batches and the
    chunks from last to first. The rank starts with (n_chunks - 1) · n_ranks forwards, and two more for each rank after
    it, but at most with all of them. Then it alternates one forward and one backward, until only backwards are left.
    Write the order yourself, without the schedules of `planner` or PyTorch.
    """
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
    """(stages, schedule) of this rank: its chunks of `layers`, and ScheduleInterleaved1F1B over them.

    layers: all modules of the network, in order. stages: in order, a PipelineStage(module, its number, number of all
    stages, device) for each chunk, with the module on `device`. reduction: "mean" or "sum", what loss_fn(output,
    target) is over its samples. The schedule, ScheduleInterleaved1F1B(stages, n_micro_batches, loss_fn, scale_grads=…),
    must give the gradients of the whole batch's loss. scale_grads=True divides them by n_micro_batches.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)
        for stage, numbers in placement(len(layers), n, n_chunks)[rank]
    ]
    return stages, ScheduleInterleaved1F1B(stages, n_micro_batches, loss_fn, scale_grads=reduction == "mean")


# %%
tp.check(3, placement, interleaved_order, make_interleaved)

# %% tags=["slide"] jupyter={"source_hidden": true}
shown, rows = {}, []
for chunks in (1, 2, 4):
    orders = [interleaved_order(rank, 4, 8, chunks) for rank in range(4)]
    found = planner.simulate(orders, {"F": 1 / chunks, "B": 2 / chunks}, activation_bytes=1 / chunks)
    shown[f"{chunks} chunk{'s' * (chunks > 1)} a rank"] = found.events
    rows.append((chunks, found.bubble, max(found.peak_bytes)))
report.table(
    {"your order, chunks": "{}", "idle slots": "{:.1%}", "micro-batches kept by the fullest rank": "{:.2f}"}, rows
)
report.gantt(shown, unit="time of a forward pass of a whole rank")

# %% [markdown]
# Chunks cost messages, because every micro-batch crosses every cut. The warm-up is longer than 1F1B's to give messages
# time.

# %% [markdown]
# ## Zero-bubble
#
# The backward of a linear layer $y = xW^\top$ has two products. The previous stage waits for $\partial x = \partial y\,
# W$, and **nobody waits for** $\partial W = \partial y^\top x$. Zero-bubble schedules do the first right away ("I"),
# and fill idle slots with the second ("W").
#
# ### Balise 4 · Backward in two halves, and ZB-H1 · further · about 19 min
#
# `SplitStage.forward` is given. It keeps the *outputs* $o_1, o_2, \ldots$ of the layers that have weights:
#
# | half | goes from | to |
# |---|---|---|
# | `backward_input` | $\partial y$ | $\partial x$ and all $\partial o$, but no weight |
# | `backward_weight` | $\partial o_1$; $\partial o_2$; … | the weights of layer 1; of layer 2; … |
#
# - `backward_input`: get these gradients in one call, return `grad_x`, and keep in `kept[k]`, for each layer, `(output,
#   weights, gradient of the output)`.
# - `backward_weight`: for each layer, add the gradients of its weights to their `.grad`, as `backward()` does.
# - `zero_bubble_order`: 1F1B with "I" for the backward. Rank r delays weight gradients by r micro-batches: "W" of k −
#   r, if there is one, follows "I" of k. Any remaining "W" come last.
#
# <details><summary>Hint</summary>
#
# `torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)` gives a gradient for each tensor of the list. The
# graph stays for the second half: `torch.autograd.grad(output, weights, grad)`. A `.grad` that hasn't been written yet
# is `None`.
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
        """Return the gradient of x, given that of the output; compute no weight gradient."""
        x, y, with_weights = self.kept[k]
        # BEGIN SOLUTION
        outputs = [output for output, _ in with_weights]
        grad_x, *grads = torch.autograd.grad(y, [x, *outputs], grad_y, retain_graph=True)
        self.kept[k] = [(*pair, grad) for pair, grad in zip(with_weights, grads)]
        # END SOLUTION
        return grad_x

    def backward_weight(self, k):
        """Add the gradients of micro-batch k to `.grad` of the parameters; free all that was kept for it."""
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

# %% jupyter={"source_hidden": true}
shown, rows = {}, []
for name, costs in {"equal halves": SPLIT, "W is 3/4 of I": {"F": 1.0, "I": 1.0, "W": 0.75}}.items():
    zero = planner.simulate([zero_bubble_order(rank, 4, 8) for rank in range(4)], costs)
    whole = planner.simulate(planner.one_f_one_b(4, 8), {"F": costs["F"], "B": costs["I"] + costs["W"]})
    shown |= {f"1F1B, {name}": whole.events, f"ZB-H1, {name}": zero.events}
    rows += [(name, "1F1B", whole.bubble, str(whole.in_flight)), (name, "ZB-H1", zero.bubble, str(zero.in_flight))]
report.table({"halves": "{}", "order": "{}", "idle slots": "{:.1%}", "micro-batches kept by the ranks": "{}"}, rows)
report.gantt(shown, unit="time of a forward pass")

# %% [markdown]
# ## Choose
#
# Each action has a fixed price, such as kernel launches, so **more micro-batches aren't always better**. Memory rules
# some schedules out, and slow links punish chunks.


# %% tags=["setup"] jupyter={"source_hidden": true}
@dataclass(frozen=True)
class Job:
    """What a pipeline has to do. The model is cut into `len(forward)` pieces; each list has a number for each piece."""

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
# ### Balise 5 · The schedule with the highest throughput that fits · further · about 12 min
#
# Find the fastest schedule that fits into the memory of **every** rank. Stage s is on rank s mod p. In the given
# search, write
#
# - `costs`: for each of "F", "B", "I", "W" a list of seconds, one for each stage. For a micro-batch of b samples, on a
#   stage whose entry in `forward` is f, "F" takes `overhead` + b f, and "B" takes `overhead` + 2 b f. "I" and "W" each
#   take `overhead` + `split` + b f.
# - the choice: each rank must have room for the states of its stages and for the peak of its activations,
#   `found.peak_bytes[rank]`. If so, and if the schedule is faster than `best`, it becomes the new `best`.
#
# <details><summary>Hint</summary>
#
# `states[r :: job.n_ranks]` are the states of rank r's stages. A step of `job.batch` samples takes `found.seconds`.
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

# %% jupyter={"source_hidden": true}
GB = 1e9
JOB = {
    "n_ranks": 4, "batch": 32, "forward": [0.002] * 8, "overhead": 0.001, "split": 0.0, "memory": 20 * GB,
    "activation_bytes": [0.2 * GB] * 8, "state_bytes": [2 * GB] * 8, "message_bytes": 16e6,
    "link": planner.Link(latency=5e-6, bandwidth=50e9),
}  # fmt: skip
MACHINES = {
    "as above": {},
    "each action costs 20 ms": {"overhead": 0.020},
    "cheap actions, costly split": {"overhead": 0.0002, "split": 0.004},
    "split, links of 2 GB/s": {"split": 0.004, "link": planner.Link(latency=5e-5, bandwidth=2e9)},
    "8 GB a rank": {"memory": 8 * GB},
    "7 GB, a large last piece": {"memory": 7 * GB, "state_bytes": [2 * GB] * 7 + [4.2 * GB]},
    "5 GB a rank": {"memory": 5 * GB},
}
rows = [
    (name, *(choose(Job(**{**JOB, **change}), SCHEDULES) or ("nothing fits", None, None)))
    for name, change in MACHINES.items()
]
report.table({"one job, simulated": "{}", "your choice": "{}", "micro-batches": "{}", "samples/s": "{:.1f}"}, rows)

# %% [markdown]
# ## DeepSpeed's PipelineModule
#
# A `PipelineModule` takes layer **specs** (a class and its arguments), builds only a rank's own layers, and hides its
# 1F1B schedule.
#
# ### Balise 6 · The same model for DeepSpeed · further · about 13 min
#
# - `layer_specs([64, 128, 10])` returns the specs of `nn.Linear(64, 128)`, `nn.GELU()`, `nn.Linear(128, 10)`. Write the
#   loop.
# - `deepspeed_config`: return a dictionary with `train_batch_size`, the samples of a step;
#   `train_micro_batch_size_per_gpu`, those of a micro-batch; `gradient_accumulation_steps`, the micro-batches; and
#   `gradient_clipping`, where 0.0 means none. `n_replicas` pipelines share a step's samples.
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


# %% jupyter={"source_hidden": true}
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
# ## Measured again
#
# Your pipelines now run whole steps, which also keep the output of each chunk.


# %% tags=["slide"]
def two_chunks():
    """(stages, schedule) of this rank."""
    return make_interleaved(make_layers(), 2, MICRO_BATCHES, F.cross_entropy, "mean", launch.device())


n = RANKS[-1]
interleaved = [interleaved_order(rank, n, MICRO_BATCHES, 2) for rank in range(n)]
yours = {  # name: (orders, slots, what makes stages and schedule)
    "GPipe": (planner.gpipe(n, MICRO_BATCHES), WHOLE, (one_chunk, make_gpipe)),
    "1F1B": (planner.one_f_one_b(n, MICRO_BATCHES), WHOLE, (one_chunk, make_1f1b)),
    "interleaved, 2 chunks": (interleaved, HALF, (two_chunks,)),
}
rows = [(name, planner.simulate(orders, slots).bubble, max(launch.ranks(peak_of_activations, *make, n=n)))
        for name, (orders, slots, make) in yours.items()]  # fmt: skip
report.table({f"{n} ranks, 8 micro-batches": "{}", "idle slots": "{:.1%}",
              "activations of the fullest rank": measure.human_bytes}, rows)  # fmt: skip

# %% [markdown]
# Stages that only *sleep* need no device, but their order, messages and waiting are real. PyTorch's zero-bubble
# schedule ZB-V gives rank r of p the stages $r$ and $2p - 1 - r$, so the last stage is on rank 0. DualPipeV (after
# DeepSeek-V3) also pairs the forward of one micro-batch with the backward of another.

# %%
waiting = tp.predict(
    "With ZB-V on four ranks and 8 micro-batches, what share (%) of the ranks' time will be measured as idle?", ...
)


# %% jupyter={"source_hidden": true}
class Rest(torch.autograd.Function):
    """Rest, then return x; in backward, rest, then return the gradient."""

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
    "GPipe": (ScheduleGPipe, lambda rank, n: [rank]),
    "1F1B": (Schedule1F1B, lambda rank, n: [rank]),
    "interleaved": (ScheduleInterleaved1F1B, lambda rank, n: [rank, rank + n]),
    "ZB-V": (ScheduleZBVZeroBubble, lambda rank, n: [rank, 2 * n - 1 - rank]),
    "DualPipeV": (ScheduleDualPipeV, lambda rank, n: [rank, 2 * n - 1 - rank]),
}
if torch.__version__ < (2, 14):  # two stages on one rank sent each other messages, which gloo cannot
    del IN_V["ZB-V"], IN_V["DualPipeV"]


def asleep(rounds=3):
    """{schedule: (this rank's events in each step, orders of all ranks)}; each F, I, W of a micro-batch takes 20 ms."""
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
shown, rows = {}, []
for name in IN_V:
    steps = [sum(step, []) for step in zip(*(rank[name][0] for rank in slept))]
    long, events = min(((max(e[5] for e in step) - min(e[4] for e in step)), step) for step in steps)
    bubble = 1 - sum(event[5] - event[4] for event in events) / (4 * long)
    orders = [[(kind, int(k), int(s)) for s, kind, k in re.findall(r"(\d+)([FBIW])(\d+)", text)]
              for text in slept[0][name][1]]  # fmt: skip
    plain = {"GPipe": planner.gpipe, "1F1B": planner.one_f_one_b}.get(name)
    chunks, orders = (1, plain(4, MICRO_BATCHES)) if plain else (2, orders)
    free = [0.0] + [1.0] * (4 * chunks - 1)  # the first stage has no input gradient to sleep for
    costs = {"F": 1.0, "W": 1.0, "I": free, "B": [1 + seconds for seconds in free]}
    paper = planner.simulate(orders, costs, activation_bytes=1 / chunks)
    rows.append((name, paper.bubble, bubble, long, max(paper.peak_bytes)))
    if name in ("1F1B", "ZB-V"):
        shown[f"{name}, measured"] = events
    if name == "ZB-V":
        waited = 100 * bubble
report.table({"4 ranks, 8 micro-batches": "{}", "idle in its table": "{:.1%}", "idle, measured": "{:.1%}",
              "step": measure.human_seconds, "kept by the fullest rank": "{:.1f} micro-batches"}, rows)  # fmt: skip
report.gantt(shown)
if "ZB-V" in IN_V:
    why = "Only an endless step would reach zero: filling and emptying the V takes time, as do messages and Python."
    waiting.shows(waited, "{:.0f} %", why)

# %% [markdown]
# A schedule's table leaves out the time that messages and PyTorch's Python code take.
#
# Now race real layers on two ranks. *One process* is rank 0 alone, while rank 1 waits.

# %%
fastest = tp.predict(
    "Which is the fastest on two ranks?",
    ...,
    choices=("GPipe", "1F1B", "interleaved", "interleaved zero-bubble", "one process"),
)


# %% jupyter={"source_hidden": true}
def zero_bubble(layers, n_chunks, n_micro_batches, loss_fn, reduction, device):
    """Like make_interleaved, but with PyTorch's interleaved zero-bubble schedule over the same stages."""
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


# %%
race = launch.ranks(race_schedules, ROUNDS, n=2, timeout=120)[0]
print(f"2 ranks on {launch.backend(2)}\n{race}\n")
why = "A smaller bubble costs more actions and messages, and two ranks have little bubble to save."
fastest.shows(min(race.medians, key=race.medians.get), why=why)
if FULL:
    recorded.note("16_pipeline_schedules", "race", {"2 ranks": race.medians})
print(recorded.line("16_pipeline_schedules", "race"))

# %% [markdown]
# ## Past this machine · further
#
# The table is an *estimate* for 71 billion parameters in 64 layers, on H100s at 40 % of their peak with links of 50
# GB/s. A step has 64 sequences of 4,096 tokens. Each layer is recomputed in its backward.

# %% jupyter={"source_hidden": true}
H, DEPTH, TOKENS, SPEED, DEVICE = 9600, 64, 4096, 0.4 * planner.H100.bfloat16, planner.H100.memory
LINK = planner.Cluster(planner.H100).between
SECONDS = 2 * 12 * H**2 * TOKENS / SPEED  # forward of a layer, one micro-batch
KEPT, INSIDE, STATES = 2 * TOKENS * H, 34 * TOKENS * H, 16 * 12 * H**2  # bytes of a layer: input, activations, states


def estimate(name, ranks, micro_batches=64):
    """(bubble, bytes of the fullest rank, tokens a second on each device) of a schedule for the model above."""
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


rows = []
for ranks in (8, 16, 32, 64):
    for name in SCHEDULES:
        if found := estimate(name, ranks):
            bubble, memory, speed = found
            rows.append((ranks, name, bubble, memory / 1e9, speed if memory <= DEVICE else None))
heads = {"stages": "{}", "schedule": "{}", "bubble": "{:.1%}", "GB": "{:,.0f}"}
report.table(heads | {"tokens/s a device, if it fits": "{:,.0f}"}, rows)

# %% [markdown]
# What "I" recomputes stays until the late "W", so zero-bubble needs the most memory. The bubble grows with the number
# of stages. Large training runs therefore add tensor and data parallelism, and need fewer stages.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>With 1F1B, you cut the same batch into twice as many micro-batches. What happens to the bubble and
# memory?</summary>
#
# The bubble's share falls from (p−1)/(m+p−1) to (p−1)/(2m+p−1), nearly half. The first rank still keeps p
# micro-batches, each with half the samples. An action takes half as long, plus its fixed price: in the end, that price
# dominates.
# </details>
#
# <details><summary>Why not give a rank sixteen chunks, if the bubble is divided by sixteen?</summary>
#
# Middle ranks send sixteen times as much, and each action becomes so short that its fixed price dominates. The model
# also needs that many layers, and the longer warm-up keeps more activations than 1F1B does.
# </details>
#
# <details><summary>Clipping needs the norm of all gradients. What does that do to a zero-bubble schedule?</summary>
#
# The norm is known only after the last weight gradient of every rank. That is a synchronisation at the end of each
# step, which brings idle time back. The authors of zero-bubble take the step first, and undo it in the rare case that
# the norm demands it.
# </details>
#
# ## To remember
#
# A schedule is a list of actions for each rank, and a simulator can judge it. 1F1B keeps p micro-batches instead of
# all. Interleaving divides the bubble by the number of chunks, and multiplies messages. Zero-bubble fills idle slots
# with weight gradients. Costs, links and memory decide which schedule is best. Next: **tensor slicing**, which cuts the
# layers themselves.
