# %% [markdown]
# # Pipeline parallelism, under the hood · about 100 min, core 40
#
# A model that does not fit on one device can be cut between two layers: each rank holds a few neighbouring layers, a
# **stage**, and hands its activations to the next. Only what crosses a cut is sent. The price is waiting: while the first
# rank works, the others have nothing to do. Here you send activations and gradients yourself, and fight the waiting.
#
# **What you will gain.** 70 billion parameters, trained with Adam in mixed precision, take 16 bytes each. Do they fit on
# devices of 80 GB, and what does waiting cost? An *estimate*: arithmetic, nothing measured.

# %% tags=["setup"]
import os
import statistics
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, recorded, report, scale, todo

tp = course.open("15_pipeline_under_the_hood")
tp

# %%
STATES = 16 * 70e9 / 1e9  # GB: weights and gradients in 2 bytes, three float32 numbers for Adam
print(f"estimate: {STATES:,.0f} GB of states, on one device of 80 GB: no; on 16 stages: {STATES / 16:.0f} GB each\n")
print("share of the time that 16 stages wait, estimate for equal stages:")
for micro_batches in (1, 4, 16, 64, 256):
    print(f"{micro_batches:>5} micro-batch{'es' * (micro_batches > 1)}: {15 / (micro_batches + 15):4.0%}")

# %% [markdown]
# A *micro-batch* is a part of the batch. With a single one, the whole batch, the stages take turns: sixteen devices are
# each idle 94 % of the time. You will foretell this waiting, see it in your own run, and get it down. Without a GPU for
# each rank, ranks are processes on the CPU: two stages can really compute at the same time on two cores, four cannot.

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
if GPUS == 1:
    os.environ[launch.place.ON_CPU] = "1"
WIDTH = 4096 if FULL else 512
BLOCKS = 16 if FULL else 6
BATCH = 2048 if FULL else 256
MICRO_BATCHES = 8
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
ROUNDS = 20 if FULL else 5  # of what is run to be timed

# %% [markdown]
# ## The idea
#
# A stage works on each of $m$ micro-batches for $t_F$ forward and $t_B$ backward. With $p$ stages, the first micro-batch has
# to come through all of them and its gradient back, which adds $p - 1$ times the same: the **bubble**.
#
# $$t_\text{step} = (m + p - 1)\,(t_F + t_B), \qquad \text{bubble} = \frac{p-1}{m+p-1}$$

# %% jupyter={"source_hidden": true}
sketch = {
    f"4 stages, {m} micro-batch{'es' * (m > 1)}": planner.simulate(
        planner.gpipe(4, m), {"F": 8 / m, "B": 16 / m}, activation_bytes=1
    ).events
    for m in (1, 4, 16)
}
report.gantt(sketch, unit="units of work")

# %% [markdown]
# The same work in each panel, cut finer and finer. White is waiting. (Simulated; messages take no time.)
#
# ## The baseline, measured first
#
# The model is plain PyTorch and knows nothing of stages: a list of layers. It learns handwritten digits, 64 numbers each.


# %% tags=["setup"]
class Block(nn.Module):
    """x (b, d) -> x + two linear layers of norm(x), (b, d)."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x_bd):
        return x_bd + self.layers(x_bd)


def make_model(width=WIDTH, blocks=BLOCKS):
    """The layers in order, on this rank's device, the same on all ranks: (b, 64) -> logits (b, 10)."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 10)]
    return nn.Sequential(*layers).to(launch.device())


digits = data.digits()  # loaded once, and sent to the ranks with the functions that use it


def make_batch(size=BATCH):
    """Images (size, 64) and labels (size,) on this rank's device, the same on all ranks."""
    rows = torch.arange(size) % len(digits.train_x)
    return digits.train_x[rows].flatten(1).to(launch.device()), digits.train_y[rows].to(launch.device())


def loss_function(logits, labels):
    """Mean over the batch."""
    return nn.functional.cross_entropy(logits, labels)


# %% tags=["setup"]
def seconds(call, repeats=5):
    """Median seconds of a call, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if launch.device().type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# %%
def baseline():
    """Seconds of a step of the whole model, and of forward and backward of each layer."""
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    model, (x, labels) = make_model(), make_batch()
    step = seconds(lambda: loss_function(model(x), labels).backward())
    costs = []
    for layer in model:
        x = x.detach().requires_grad_()
        y = layer(x)
        costs.append(seconds(lambda layer=layer, x=x: layer(x).sum().backward()))
        x = y
    return step, costs


step, costs = launch.ranks(baseline, n=1, timeout=120)[0]
print(f"one process: {1e3 * step:.0f} ms a step of {BATCH} images")
print("its layers: " + ", ".join(f"{1e3 * cost:.1f}" for cost in costs) + " ms")

# %% [markdown]
# ## Where to cut
#
# ### Balise 1 · Cut the model evenly · further · about 6 min
#
# The slowest stage sets the pace of all: cut the layers into contiguous stages such that the *largest* sum of costs is as
# small as possible. 200 layers go into 16 stages in more than $10^{22}$ ways. So build the answer up (dynamic programming): in
# the best cut of the first $j$ layers into $s$ stages, the last stage is some layers $i$ to $j - 1$, and before it stands the
# best cut of the first $i$ layers into $s - 1$ stages:
#
# $$\text{best}_s(j) = \min_i\, \max\big(\text{best}_{s-1}(i),\; c_i + \dots + c_{j-1}\big)$$
#
# `total[j]` is the sum of the first j costs, `best[j]` a pair: the cost of the largest stage, and the list of where stages
# start. Given is `best` for one stage; write the step from s − 1 stages to s, for every j from s to n. About 3 lines.
#
# <details><summary>Hint</summary>
#
# `min` of pairs compares their first entries first. The last stage costs `total[j] - total[i]`; its start goes to the end of
# the list: `[*best[i][1], i]`. Which i leave a layer to each of the s − 1 stages before?
# </details>


# %% tags=["balise-1"]
def balance(costs, n_stages):
    """Cut layers of these costs (numbers of 0 or more) into stages: list of (start, stop), smallest largest sum."""
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be cut into {n_stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[j]: (largest stage, cuts) of the first j layers in as many stages as the loop has made
    best = {j: (total[j], [0]) for j in range(1, n + 1)}
    for s in range(2, n_stages + 1):
        # BEGIN SOLUTION
        best = {
            j: min((max(best[i][0], total[j] - total[i]), [*best[i][1], i]) for i in range(s - 1, j))
            for j in range(s, n + 1)
        }
        # END SOLUTION
    cuts = [*best[n][1], n]
    return list(zip(cuts[:-1], cuts[1:]))


# %%
tp.check(1, balance)

# %% jupyter={"source_hidden": true}
print(f"{'stages':<8} {'the same number of layers':<28} balanced")
for n in (2, 3, 4):
    equal = [sum(part) for part in (costs[k * len(costs) // n : (k + 1) * len(costs) // n] for k in range(n))]
    yours = [sum(costs[start:stop]) for start, stop in balance(costs, n)]
    shown = [" ".join(f"{1e3 * cost:4.0f}" for cost in stages) + " ms" for stages in (equal, yours)]
    print(f"{n:<8} {shown[0]:<28} {shown[1]}")

# %% [markdown]
# ## Stages on ranks
#
# From here on each rank makes the whole model and keeps its stage; a model that does not fit would be made in parts. Where
# a rank stands in its pipeline is a `Place`; `clock()` tells the time of a rank's work, on a GPU too.


# %% tags=["setup"]
@dataclass(frozen=True)
class Place:
    """Where a rank stands in its pipeline. before, behind: ranks of its neighbours, None at the ends."""

    stage: int
    n_stages: int
    before: int | None
    behind: int | None


def my_place():
    """One pipeline over all ranks, in their order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return Place(rank, n, rank - 1 if rank > 0 else None, rank + 1 if rank < n - 1 else None)


def my_stage(place, width=WIDTH, blocks=BLOCKS):
    """The layers of this stage; blocks count one, first and last layer nothing."""
    model = make_model(width, blocks)
    start, stop = balance([0.0, *[1.0] * blocks, 0.0], place.n_stages)[place.stage]
    return model[start:stop]


def clock():
    """Now: seconds on a CPU; on a GPU a mark in its queue of work, so that nothing waits, which `in_seconds` reads."""
    if launch.device().type == "cpu":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def in_seconds(events):
    """The events of a step, (…, begin, end), in seconds, once the device is through."""
    if launch.device().type == "cpu":
        return events
    last = clock()
    torch.cuda.synchronize()
    now = time.perf_counter()
    return [(*what, *(now - mark.elapsed_time(last) / 1e3 for mark in (begin, end))) for *what, begin, end in events]


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)

# %% [markdown]
# Forward, a stage sends its output on; backward, the gradient of that output comes back. Four functions carry them:
#
# | starts to send, and returns *works* to wait for later | waits, and returns what came |
# |---|---|
# | `send_activation(output, peer, tag)` | `receive_activation(peer, tag)` |
# | `send_gradient(received, peer, tag)` | `receive_gradient(output, peer, tag)` |
#
# `peer` is the rank at the other end, `tag` the micro-batch's number (0 if there is but one). Who waits for whom:

# %% jupyter={"source_hidden": true}
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 2.7), layout="constrained", width_ratios=(3, 2))
for s in range(3):
    for begin, long, kind, colour in ((1.5 * s, 1, "F", "#0072B2"), (10.5 - 2.5 * s, 2, "B", "#D55E00")):
        left.barh(-s, long, 0.5, left=begin, color=colour)
        left.text(begin + long / 2, -s, kind, color="white", ha="center", va="center")
    if s < 2:
        left.annotate("", (1.5 * s + 1.5, -s - 0.75), (1.5 * s + 1, -s - 0.25), arrowprops={"arrowstyle": "->"})
        left.annotate("", (10.5 - 2.5 * s, -s - 0.25), (10 - 2.5 * s, -s - 0.75), arrowprops={"arrowstyle": "->"})
left.text(2.2, -0.5, "activation", fontsize=9)
left.text(8.6, -0.5, "gradient", fontsize=9)
left.set(title="one batch: who waits for whom", xlabel="time", yticks=[0, -1, -2], ylim=(-2.5, 0.6))
for y, mine, theirs in ((0, "sends activation 2", "stage 1"), (-1, "sends gradient 1", "stage 0")):
    right.barh(y, 3.4, 0.4, color="#999999")
    right.barh(y, 3.2, 0.4, left=3.6, color="white", edgecolor="#999999", linestyle="--")
    right.text(1.7, y, mine, ha="center", va="center", fontsize=9)
    right.text(5.2, y, "then receives", ha="center", va="center", fontsize=9)
    at = (3, y + (0.28 if y else -0.28))
    right.text(
        4, -0.38 if y == 0 else -0.62, f"waits until {theirs} receives", fontsize=8, va="center", color="#D55E00"
    )
    right.annotate("", (3.6, -0.78 - y if y == 0 else -0.22), at, arrowprops={"arrowstyle": "->", "color": "#D55E00"})
right.set(title="both send first, and wait: for ever", xlabel="time", yticks=[0, -1], ylim=(-1.5, 0.6), xlim=(0, 7.6))
for axes in (left, right):
    axes.set_xticks([])
    axes.set_yticklabels([f"stage {s}" for s in range(len(axes.get_yticks()))])
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# `F` is a forward, `B` a backward. On the right, both wait for the end of a send, and nobody receives.
#
# ### Balise 2 · Messages between neighbours · further · about 8 min
#
# A *started* send, `dist.isend`, returns a work at once, and the stage computes on; `dist.recv` waits. But NCCL,
# between GPUs, can come to what is drawn on the right even so: between two ranks of a group messages pass in the order
# in which they were started, each after the one before. (`dist.batch_isend_irecv` starts such a send and a receive as
# one.) Here activations and gradients get a **lane** each, a process group: `launch.lane("activations")`,
# `launch.lane("gradients")`. Give the same `tag` at both ends: gloo, on CPUs, finds a message by it, and waits for ever where
# sender and receiver give different tags; NCCL ignores it.
#
# The receiver knows neither shape nor dtype of an activation, so a header of eight integers goes first (given): dtype, number of
# dimensions `dims`, the sizes, then zeros. A gradient is like its activation, and needs none. Write, in about 5 lines:
#
# - `send_activation`: start the sends of header and values, without waiting; return the list of works. The values carry no
#   graph; they are copied only if they are not contiguous.
# - `receive_activation`: after the header, receive the values. Return a leaf of the graph that asks for its gradient, if
#   its dtype has gradients.
# - `send_gradient`: the same for the gradient of what was received.
#
# <details><summary>Hint</summary>
#
# `dist.isend(tensor, peer, lane, tag=tag)`. `output.detach().contiguous()` copies only where it must. `dist.recv` fills an
# empty tensor: of which shape, which dtype, on which device? Integers have no gradients: `is_floating_point()`.
# </details>


# %% tags=["balise-2"]
def send_activation(output, peer, tag=0):
    """Start to send `output`, any shape and dtype, to rank `peer`. Returns the list of works to wait for."""
    sizes = [DTYPES.index(output.dtype), output.dim(), *output.shape]
    header = torch.tensor(sizes + [0] * (8 - len(sizes)), device=output.device)
    lane = launch.lane("activations")
    # BEGIN SOLUTION
    return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]
    # END SOLUTION


def receive_activation(peer, tag=0):
    """Receive what `send_activation` of rank `peer` sent: a leaf that asks for its gradient."""
    header, lane = torch.empty(8, dtype=torch.int64, device=launch.device()), launch.lane("activations")
    dist.recv(header, peer, lane, tag=tag)
    dtype, dims, *shape = header.tolist()
    # BEGIN SOLUTION
    received = torch.empty(shape[:dims], dtype=DTYPES[dtype], device=launch.device())
    dist.recv(received, peer, lane, tag=tag)
    return received.requires_grad_(received.is_floating_point())
    # END SOLUTION


def send_gradient(received, peer, tag=0):
    """Start to send the gradient of `received` back to rank `peer`. Returns the list of works to wait for."""
    lane = launch.lane("gradients")
    # BEGIN SOLUTION
    return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]
    # END SOLUTION


def receive_gradient(output, peer, tag=0):
    """Receive the gradient of `output` from rank `peer`: shape, dtype and device of `output`."""
    lane = launch.lane("gradients")
    gradient = torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)
    dist.recv(gradient, peer, lane, tag=tag)
    return gradient


# %%
tp.check(2, send_activation, receive_activation, send_gradient, receive_gradient)

# %% [markdown]
# ### Balise 3 · The naive step · about 6 min
#
# First without micro-batches, as drawn on the left: the whole batch goes through the stages, and the gradient comes back the
# same way. Autograd knows only its own rank, so the chain rule across a cut is yours: `y.backward(gradient)` goes on from a
# gradient that came from behind, and leaves in `x.grad` what the stage before waits for.
#
# Every rank calls `naive_step` with the same arguments. `place.before` and `place.behind` are the ranks of the neighbours,
# `None` at the ends. Given: what comes in, the last stage with its loss, and waiting for all `works` at the end. Write
# what a stage does that has one behind it, and what a stage does that has one before it. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `works += send_…(…)` keeps the started sends. Rank 0 is a neighbour too, and counts as false: compare with `None`.
# </details>


# %% tags=["balise-3"]
def naive_step(stage, place, inputs, targets, loss_function):
    """Forward and backward of one batch through all stages; gradients add up in the stage's parameters."""
    x = inputs if place.before is None else receive_activation(place.before)
    y = stage(x)
    works = []
    if place.behind is None:
        loss = loss_function(y, targets)
        loss.backward()
    else:
        # BEGIN SOLUTION
        works += send_activation(y, place.behind)
        y.backward(receive_gradient(y, place.behind))
        # END SOLUTION
    # BEGIN SOLUTION
    if place.before is not None:
        works += send_gradient(x, place.before)
    # END SOLUTION
    for work in works:
        work.wait()
    return loss.detach() if place.behind is None else None


# %%
tp.check(3, naive_step)

# %% [markdown]
# ### Balise 4 · Micro-batches · about 8 min
#
# Now all micro-batches go forward one after the other, then all gradients come back, the last micro-batch first: **GPipe**
# (Huang et al., 2019). While the second stage has the first micro-batch, the first stage has the second one. What you
# wrote in balise 3 is given; two things are new:
#
# - **The loss.** Gradients of the micro-batches add up in `p.grad`, and must be those of the *whole batch's mean*. But
#   `loss_function` gives the mean of *one* micro-batch, and 99 rows in 4 parts are 25, 25, 25 and 24. So each mean counts by
#   its share of the rows. On the last stage, let `y` become this weighted loss, and add it up in `total`, without its graph.
# - **The way back.** `kept` has `(x, y)` of each micro-batch, in order. Take the last one out, and run its backward: from
#   nothing on the last stage, from the gradient that comes from behind elsewhere.
#
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# The mean of the batch is $\sum_k \frac{\text{rows}_k}{\text{rows}}\, \text{mean}_k$. A list gives back its last entry by
# `pop()`. `y.backward(None)` is `y.backward()`.
# </details>


# %% tags=["balise-4"]
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """As naive_step, in micro-batches; returns the mean loss of the whole batch on the last stage, else None."""
    kept, works, total = [], [], None
    for k, (x, t) in enumerate(zip(inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches))):
        x = x if place.before is None else receive_activation(place.before, k)
        y = stage(x)
        if place.behind is None:
            # BEGIN SOLUTION
            y = loss_function(y, t) * (len(t) / len(targets))
            total = y.detach() if total is None else total + y.detach()
            # END SOLUTION
        else:
            works += send_activation(y, place.behind, k)
        kept.append((x, y))
    for k in reversed(range(n_micro_batches)):
        # BEGIN SOLUTION
        x, y = kept.pop()
        y.backward(None if place.behind is None else receive_gradient(y, place.behind, k))
        # END SOLUTION
        if place.before is not None:
            works += send_gradient(x, place.before, k)
    for work in works:
        work.wait()
    return total


# %%
tp.check(4, gpipe_step)

# %% [markdown]
# Guess before you measure.

# %%
faster = tp.predict("How many times faster are 8 micro-batches on two stages than the whole batch in one process?", ...)


# %%
def steps_on_ranks():
    place, (x, labels) = my_place(), make_batch()
    stage = my_stage(place)
    torch.set_num_threads(1)  # as in the baseline
    naive = seconds(lambda: naive_step(stage, place, x, labels, loss_function))
    return naive, seconds(lambda: gpipe_step(stage, place, x, labels, loss_function, MICRO_BATCHES))


(whole, cut), (naive, gpiped) = (launch.ranks(steps_on_ranks, n=n, timeout=120)[0] for n in (1, 2))
print(f"{'':<12}{'whole batch':>14}{f'{MICRO_BATCHES} micro-batches':>18}")
print(f"{'one process':<12}{1e3 * whole:>11.0f} ms{1e3 * cut:>15.0f} ms")
print(f"{'two stages':<12}{1e3 * naive:>11.0f} ms{1e3 * gpiped:>15.0f} ms")
print(
    f"the formula, from one process with {MICRO_BATCHES} micro-batches: {1e3 * cut * (MICRO_BATCHES + 1) / MICRO_BATCHES / 2:.0f} ms"
)
faster.shows(
    whole / gpiped,
    "× {:.2f}",
    f"A ninth of the time is waiting, messages cost Python's time, and products of few rows use a device worse: in one process, "
    f"cutting alone makes a step {cut / whole:.1f} times as long here.",
)

# %% [markdown]
# Compare within a column: on the left, two stages take turns; on the right they work at the same time. But cutting has a price,
# in one process as well: products of few rows use a processor worse, and Python makes eight times as many calls. So micro-batches are
# made as small as the bubble asks, and no smaller.
#
# ### Balise 5 · Schedules as data · about 8 min
#
# GPipe keeps the activations of all micro-batches. **1F1B** (PipeDream, 2019; DAPPLE, 2021) lets go of each as soon as
# it can: same work, same bubble, less memory. A stage begins with as many forwards as there are stages behind it: its
# first gradient has to come back from all of them. Then it does one forward and one backward in turn, then the
# backwards that are left. It never keeps more than `n_stages − stage` micro-batches. The last of 3 stages, and the
# first, with 4 micro-batches:
#
# `F0 B0 F1 B1 F2 B2 F3 B3` and `F0 F1 F2 B0 F3 B1 B2 B3`
#
# A schedule is a list: `("F", k)` is the forward of micro-batch k, `("B", k)` its backward. `gpipe` is given; write
# `one_f_one_b`, also for fewer micro-batches than stages. About 5 lines. A simulator looks at your list before anything runs.
#
# <details><summary>Hint</summary>
#
# With w forwards first, the pairs are forward w + k, backward k. How many pairs are there, and which backwards are left? w is
# 0 on the last stage, and never more than there are micro-batches.
# </details>


# %% tags=["balise-5"]
def gpipe(stage, n_stages, n_micro_batches):
    """The actions of one stage: all forwards, then all backwards, the last micro-batch first."""
    forwards = [("F", k) for k in range(n_micro_batches)]
    return forwards + [("B", k) for k in reversed(range(n_micro_batches))]


def one_f_one_b(stage, n_stages, n_micro_batches):
    """The actions of one stage: a few forwards, then forward and backward in turn, then the backwards left."""
    # BEGIN SOLUTION
    warm_up = min(n_stages - stage - 1, n_micro_batches)
    actions = [("F", k) for k in range(warm_up)]
    for k in range(n_micro_batches - warm_up):
        actions += [("F", warm_up + k), ("B", k)]
    return actions + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)]
    # END SOLUTION


# %%
tp.check(5, gpipe, one_f_one_b)

# %%
ORDERS = {"GPipe": gpipe, "1F1B": one_f_one_b}
simulated = {
    name: planner.simulate([schedule(stage, 4, 8) for stage in range(4)], {"F": 1, "B": 2})
    for name, schedule in ORDERS.items()
}

# %% jupyter={"source_hidden": true}
report.gantt({name: found.events for name, found in simulated.items()}, unit="forwards")
for name, found in simulated.items():
    print(f"{name:<6} {found.seconds:.0f} units of time, micro-batches kept by each stage: {found.in_flight}")

# %% [markdown]
# And a schedule that waits for itself? The simulator says who waits for whom. On ranks it would be a long silence.

# %%
try:
    planner.simulate(
        [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]], {"F": 1, "B": 2}
    )
except planner.Deadlock as error:
    print(error)

# %% [markdown]
# ### Balise 6 · Run any schedule · about 8 min
#
# `run_schedule` does one stage's list of actions, whatever schedule it comes from: balise 4, with the order taken from
# data. So the forward is given. It keeps `(x, y, works of its send)` by the micro-batch's number, not in a list: the
# backwards may come in any order. Given too are the events, `(rank, kind, k, stage, begin, end)`, of the computing
# alone, not the messages. (`messages` are other functions that send and receive, for later; leave it.)
#
# Write the way to a backward: take out what was kept of micro-batch k, receive the gradient of y (the last stage has
# none), and wait for the sends of that forward. Why not at once, in the forward? In 1F1B two neighbours often send to
# each other at the same moment, as drawn on the right above. But once the gradient is back, the activation has surely
# arrived; waiting costs nothing, and then the memory of y is free. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `kept.pop(k)` takes out and forgets. The given line below yours is `y.backward(gradient)`.
# </details>


# %% tags=["balise-6"]
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Do the actions of this stage. Returns (loss of the batch on the last stage, else None; list of events)."""
    send, receive = messages or (send_activation, receive_activation)
    xs, ts = inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)
    first, last = place.before is None, place.behind is None
    kept, works, events, total = {}, [], [], None
    for kind, k in actions:
        if kind == "F":
            x = xs[k] if first else receive(place.before, k)
            begin = clock()
            y = stage(x)
            if last:
                y = loss_function(y, ts[k]) * (len(ts[k]) / len(targets))
                total = y.detach() if total is None else total + y.detach()
            end = clock()
            kept[k] = x, y, [] if last else send(y, place.behind, k)
        else:
            # BEGIN SOLUTION
            x, y, sent = kept.pop(k)
            gradient = None if last else receive_gradient(y, place.behind, k)
            for work in sent:  # through, since the gradient is back: lets go of the output's memory
                work.wait()
            # END SOLUTION
            begin = clock()
            y.backward(gradient)
            end = clock()
            if not first:
                works += send_gradient(x, place.before, k)
        events.append((dist.get_rank(), kind, k, place.stage, begin, end))
    for work in works:
        work.wait()
    return total, events


# %%
tp.check(6, run_schedule)

# %% [markdown]
# A header with every activation is right for any batch. But the receiver reads it before it can ask for the values, and on a
# GPU Python waits for that. Real systems agree on the shapes once. So do all timed runs below.


# %% tags=["setup"]
def shapes_once():
    """The two functions of balise 2, for activations that are all alike: later messages are values alone."""
    known = {}

    def send(output, peer, tag=0):
        if peer not in known:
            known[peer] = True
            return send_activation(output, peer, tag)
        return [dist.isend(output.detach().contiguous(), peer, launch.lane("activations"), tag=tag)]

    def receive(peer, tag=0):
        if peer not in known:
            received = receive_activation(peer, tag)
            known[peer] = received.shape, received.dtype
            return received
        shape, dtype = known[peer]
        received = torch.empty(shape, dtype=dtype, device=launch.device())
        dist.recv(received, peer, launch.lane("activations"), tag=tag)
        return received.requires_grad_()

    return send, receive


# %% [markdown]
# ## Memory
#
# What a stage keeps from a forward until its backward are the tensors that autograd saves. PyTorch lets you stand in between:
# inside `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` each saved tensor goes through `pack`, the graph keeps what
# `pack` returns, and backward gets it back by `unpack`. `SavedBytes` below, given, counts with it: each storage once, the
# weights not; `now` goes down when the graph lets go, and `peak` is the most that it has been.
#
# ### Balise 7 · Keep less: compute it again · further · about 11 min
#
# **Recomputation** (activation checkpointing, Chen et al., 2016): a stage keeps its input only, and when its backward comes,
# it runs forward once more, this time with a graph. `torch.utils.checkpoint` does so in practice; here you write it, as the
# backward of an operation of your own. `Recompute.forward` is given: it runs without a graph, and keeps x and the state of the
# random numbers. `backward` gets the gradient of the stage's output; its last line, given, returns that of x.
#
# Write what lies between, about 5 lines: the stage runs again, with a graph, and a backward goes through it, which adds to
# the parameters' gradients by itself. **Dropout must draw the same masks again**, and afterwards the random numbers, those of x's
# device, go on as if nothing had been recomputed.
#
# <details><summary>Hint</summary>
#
# Inside a `backward` graphs are off: `with torch.enable_grad():`. `set_random_state(device, state)` is given. Which state was
# there in the forward, and which one, kept in `now`, has to be there at the end?
# </details>


# %% tags=["balise-7"]
class Kept:
    """What the graph holds in place of a saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class SavedBytes:
    """Inside `with`, bytes that autograd keeps for backward: `now`, and their highest value, `peak`.

    left_out: tensors that do not count, such as `stage.parameters()`.
    """

    def __init__(self, left_out=()):
        self.now = self.peak = 0
        self.left_out = {t.untyped_storage().data_ptr() for t in left_out}
        self.holders = Counter()  # address of a storage -> how many saved tensors hold it
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        """autograd saves `tensor`: count it, and return a Kept, which the graph will hold instead."""
        kept, storage = Kept(tensor.detach()), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.left_out:
            self.holders[address] += 1
            if self.holders[address] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(kept, self.dropped, address, size)
        return kept

    def unpack(self, kept):
        """backward needs the tensor: return it."""
        return kept.tensor

    def dropped(self, address, size):
        """The graph has let go of a Kept whose storage of `size` bytes is at `address`."""
        self.holders[address] -= 1
        if not self.holders[address]:
            self.now -= size


def random_state(device):
    """Where the random numbers of a device are."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device, state):
    """Go on with the random numbers from there."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class Recompute(torch.autograd.Function):
    """A stage that keeps its input only, and runs forward again when its backward comes."""

    @staticmethod
    def forward(ctx, stage, x, *parameters):
        """The stage's output for `x`. What is written here runs without a graph."""
        ctx.stage, ctx.state = stage, random_state(x.device)
        ctx.save_for_backward(x)
        return stage(x)

    @staticmethod
    def backward(ctx, gradient):
        """Add to the parameters' gradients; return one gradient for each argument of forward: None, that of x, None, ...

        Dropout draws the masks of forward again; then the random numbers of x's device go on from where they were.
        """
        # x without its past; the batch itself needs no gradient
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        now = random_state(x.device)
        # BEGIN SOLUTION
        set_random_state(x.device, ctx.state)
        with torch.enable_grad():
            y = ctx.stage(x)
        set_random_state(x.device, now)
        y.backward(gradient)
        # END SOLUTION
        return None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2)


def recompute(stage, x):
    """stage(x), recomputed in backward. The parameters are handed over too: x may need no gradient, and y does."""
    return Recompute.apply(stage, x, *stage.parameters())


# %%
tp.check(7, SavedBytes, recompute)

# %% [markdown]
# See it, in five runs of the same batch. Guess before you measure.

# %%
more = tp.predict("At the peak on stage 0: how many times the naive step's memory does GPipe keep?", ...)


# %%
class Recomputed(nn.Module):
    """A stage that keeps its inputs only."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        return recompute(self.stage, x)


RUNS = {
    "naive": (gpipe, 1, False),
    "GPipe": (gpipe, MICRO_BATCHES, False),
    "1F1B": (one_f_one_b, MICRO_BATCHES, False),
    "GPipe, recomputed": (gpipe, MICRO_BATCHES, True),
    "1F1B, recomputed": (one_f_one_b, MICRO_BATCHES, True),
}


def peaks_on_rank():
    """{run: (peak of saved bytes, forwards of the stage)} of this rank."""
    place, (x, labels), found = my_place(), make_batch(), {}
    for name, (schedule, m, again) in RUNS.items():
        stage, forwards = my_stage(place), []
        stage.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
        actions = schedule(place.stage, place.n_stages, m)
        with SavedBytes(stage.parameters()) as saved:
            run_schedule(actions, Recomputed(stage) if again else stage, place, x, labels, loss_function, m)
        found[name] = saved.peak, len(forwards)
    return found


# %%
peaks = launch.ranks(peaks_on_rank, n=RANKS[-1], timeout=120)
more.shows(
    peaks[0]["GPipe"][0] / peaks[0]["naive"][0],
    "× {:.2f}",
    "All micro-batches go forward before the first gradient is back: together they are the whole batch.",
)
for name in RUNS:
    print(f"{name:<18} forwards of each stage: {[found[name][1] for found in peaks]}")

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for k, (name, colour) in enumerate(zip(RUNS, ("#999999", "#0072B2", "#009E73", "#56B4E9", "#E69F00"))):
    heights = [found[name][0] / 2**20 for found in peaks]
    bars = axes.bar([s + 0.17 * (k - 2) for s in range(len(peaks))], heights, 0.16, color=colour, label=name)
    axes.bar_label(bars, fmt="%.1f", fontsize=7)
axes.set(xticks=range(len(peaks)), xticklabels=[f"stage {s}" for s in range(len(peaks))], ylabel="peak (MiB)")
axes.set_title(f"Activations kept: {BATCH} images, {MICRO_BATCHES} micro-batches (naive: one); measured", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
figure.legend(fontsize=9, frameon=False, loc="outside lower center", ncols=len(RUNS))
plt.show()

# %% [markdown]
# Gradients that were sent are not counted: here they live until the end of the step; real systems let go of them earlier.
#
# Micro-batches alone save nothing. With 1F1B a stage keeps `n_stages − stage` of them. With recomputation what is left is the
# inputs that wait, and one micro-batch whole while its backward runs. The price is a second forward.

# %%
price = tp.predict("With recomputation, how many times as long do a stage's forward and backward take?", ...)


# %%
def price_of_recomputation():
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    model, x = make_model()[1:-1], torch.randn(BATCH // MICRO_BATCHES, WIDTH, device=launch.device())
    candidates = {
        "forward and backward": lambda: model(x).sum().backward(),
        "recomputed": lambda: recompute(model, x).sum().backward(),
    }
    return measure.race(candidates, repeats=2 * ROUNDS, calls=1, device=launch.device())


paid = launch.ranks(price_of_recomputation, n=1, timeout=120)[0]
print(paid)
price.shows(
    paid.medians["recomputed"] / paid.medians["forward and backward"],
    "× {:.2f}",
    "A backward has about twice the products of a forward: in theory one forward more is 4 for 3.",
)

# %% [markdown]
# ## Waiting
#
# ### Balise 8 · The bubble, by formula and from your run · further · about 10 min
#
# Before a run, and after it:
#
# - `ideal_bubble(n_stages, n_micro_batches)`: the share of the time in which a stage waits, if stages are equal and messages
#   take no time: the formula of *The idea*.
# - `measured_bubble(events)`: the same share from your run. Each rank has the time from the first begin to the last end of
#   all events, on whatever rank; what none of its own events covers is waiting. Events come in any order, the clock began
#   at some time, and a rank may hold several stages.
#
# About 1 and 3 lines. Given are `fewest_micro_batches`, which turns the formula round, and `stage_costs`, for the simulator.
#
# <details><summary>Hint</summary>
#
# `for rank, kind, k, stage, begin, end in events`. Ranks are counted from the events: `len({...})`.
# </details>


# %% tags=["balise-8"]
def ideal_bubble(n_stages, n_micro_batches):
    """Share of the time that a stage waits, 0 to 1: equal stages, messages that take no time."""
    # BEGIN SOLUTION
    return (n_stages - 1) / (n_micro_batches + n_stages - 1)
    # END SOLUTION


def fewest_micro_batches(n_stages, share):
    """The smallest number of micro-batches whose ideal bubble is at most `share`."""
    n_micro_batches = 1
    while ideal_bubble(n_stages, n_micro_batches) > share + 1e-9:  # equal but for rounding will do
        n_micro_batches += 1
    return n_micro_batches


def measured_bubble(events):
    """Share of all ranks' time, from the first begin to the last end, in which they do nothing."""
    # BEGIN SOLUTION
    length = max(end for *_, end in events) - min(begin for *_, begin, _ in events)
    busy = sum(end - begin for *_, begin, end in events)
    return 1 - busy / (length * len({rank for rank, *_ in events}))
    # END SOLUTION


def stage_costs(events):
    """{kind: median seconds of one action of this kind, for each stage in order}"""
    n_stages = 1 + max(stage for _, _, _, stage, _, _ in events)
    return {
        kind: [statistics.median(e[5] - e[4] for e in events if e[1] == kind and e[3] == s) for s in range(n_stages)]
        for kind in {kind for _, kind, *_ in events}
    }


# %%
tp.check(8, ideal_bubble, fewest_micro_batches, measured_bubble, stage_costs)

# %% jupyter={"source_hidden": true}
fewest = {p: [fewest_micro_batches(p, share) for share in (0.5, 0.2, 0.1, 0.05)] for p in (2, 4, 8, 16, 64)}
print("micro-batches for a bubble of at most\nstages     50%    20%    10%     5%")
for p, numbers in fewest.items():
    print(f"{p:>6} " + "".join(f"{number:>7}" for number in numbers))

# %% [markdown]
# Now your own run, on two ranks. Above, what the simulator makes of the costs of your stages with messages that take no time;
# below, what was measured.


# %%
def turns_on_rank(rounds, make_stage):
    """{schedule: the events of this rank, a list for each step}; the schedules take turns, the first round counts for none."""
    place, (x, labels) = my_place(), make_batch()
    stage, messages, found = make_stage(place), shapes_once(), {name: [] for name in ORDERS}
    for _ in range(rounds + 1):
        for name, schedule in ORDERS.items():
            actions = schedule(place.stage, place.n_stages, MICRO_BATCHES)
            dist.barrier()
            events = run_schedule(actions, stage, place, x, labels, loss_function, MICRO_BATCHES, messages)[1]
            found[name].append(in_seconds(events))
    return {name: steps[1:] for name, steps in found.items()}


def lasted(events):
    return max(e[5] for e in events) - min(e[4] for e in events)


def quickest_steps(rounds, make_stage, n):
    """{schedule: events of all ranks in its quickest step, the one that other programs disturbed least}"""
    ranks = launch.ranks(turns_on_rank, rounds, make_stage, n=n, timeout=120)
    return {name: min((sum(step, []) for step in zip(*(rank[name] for rank in ranks))), key=lasted) for name in ORDERS}


def plan(name, n, costs, message=0.0):
    """A simulated step of a schedule on n stages; a message takes so many seconds."""
    link = planner.Link(latency=message, bandwidth=float("inf"))  # all of a message's time, for this size
    return planner.simulate([ORDERS[name](s, n, MICRO_BATCHES) for s in range(n)], costs, link=link)


# %%
computing = quickest_steps(ROUNDS, my_stage, 2)


# %% jupyter={"source_hidden": true}
def ideal_and_measured(name, n, events):
    """Prints the bubbles; returns the events of the plan, and those of the run."""
    ideal = plan(name, n, stage_costs(events))
    print(f"{name}, {n} stages, {MICRO_BATCHES} micro-batches: bubble {ideal_bubble(n, MICRO_BATCHES):.1%} by formula, {ideal.bubble:.1%} "
          f"simulated, {measured_bubble(events):.1%} measured; step {1e3 * ideal.seconds:.0f} ms simulated, "
          f"{1e3 * lasted(events):.0f} ms measured")  # fmt: skip
    return {f"{name}, {n} stages, ideal": ideal.events, f"{name}, measured": events}


report.gantt(ideal_and_measured("1F1B", 2, computing["1F1B"]))

# %% [markdown]
# Formula and simulation differ where stages do not cost the same. White below and not above is what the plan does not know:
# messages, Python between two actions, other programs.
#
# Four stages cannot compute at the same time on two cores. But a stage that only *sleeps*, as long as another device would
# compute, needs none: messages, order and waiting are real.


# %%
class Sleep(torch.autograd.Function):
    """x times a weight, after some rest."""

    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(0.010)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.020)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=launch.device()))

    def forward(self, x):
        return Sleep.apply(x, self.weight)


# %%
sleeping = quickest_steps(2, Sleeper, 4)
report.gantt(ideal_and_measured("GPipe", 4, sleeping["GPipe"]) | ideal_and_measured("1F1B", 4, sleeping["1F1B"]))

# %% [markdown]
# What do messages cost where they can travel beside computing? Your executor on four **modelled** H100 with network cards of
# 400 Gb/s, 2 billion parameters a stage: tensors have sizes and no values; operations and messages take the time of their
# arithmetic and bytes. Stage 1 is drawn.

# %%
from dlojz_tp import modelled_gpu


def modelled_step(clock, schedule):
    """On a modelled rank: a step of 16,384 rows in bfloat16; all ranks know the shapes."""
    rows, width, device = 16384, 32768, launch.device()
    place, lane = my_place(), dist.new_group()  # a lane for these activations alone
    stage = my_stage(place, width, blocks=4).bfloat16()
    x, labels = torch.empty(rows, 64, device=device).bfloat16(), torch.zeros(rows, dtype=torch.int64, device=device)

    def send(output, peer, tag=0):
        return [dist.isend(output.detach(), peer, lane, tag=tag)]

    def receive(peer, tag=0):
        received = torch.empty(rows // MICRO_BATCHES, width, dtype=torch.bfloat16, device=device)
        dist.recv(received, peer, lane, tag=tag)
        return received.requires_grad_()

    actions = schedule(place.stage, place.n_stages, MICRO_BATCHES)
    clock.restart()  # what was before is not shown
    run_schedule(actions, stage, place, x, labels, loss_function, MICRO_BATCHES, (send, receive))


steps = {name: (modelled_step, schedule) for name, schedule in ORDERS.items()}
modelled = modelled_gpu.each_on_ranks(steps, n=4, network=50e9)

# %% jupyter={"source_hidden": true}
for name, ranks in modelled.items():
    busy = max(sum(span.end - span.begin for span in run.spans if span.row == "compute") for run in ranks)
    print(f"{ranks[0].label}: {name}, {1e3 * max(run.seconds for run in ranks):.0f} ms a step; "
          f"by formula, from {1e3 * busy:.0f} ms of computing: {1e3 * busy * (1 + 3 / MICRO_BATCHES):.0f} ms")  # fmt: skip
report.streams([ranks[1] for ranks in modelled.values()]) if modelled else None

# %% [markdown]
# Beyond the formula there are messages: your executor asks for one when it needs it, and the card stands while it comes. With
# GPipe it stands for two, for its own send is before it in the same lane; with 1F1B that send travels during a computation.
#
# ## No bubble at all?
#
# The bubble is there because all ranks wait for the end of the batch to update their weights. **PipeDream** does not wait: it
# is an endless 1F1B in which each stage updates its weights after *each* backward. But then, between forward and backward of a
# micro-batch, others change the weights, and activations of one version with weights of another are the gradient of nothing.
# So each stage **stashes** the weights of a forward until its backward.
#
# ### Balise 9 · An asynchronous stage · further · about 12 min
#
# `AsyncStage` holds a stage and the optimizer of its parameters.
#
# - `forward(k, x)` runs micro-batch k with the **newest** weights. Write: a copy of them, a dictionary by name, and the output
#   `y` made with this copy, so that y's graph leads to the copy. Frozen parameters stay frozen in it. Buffers (running
#   statistics) stay the stage's own.
# - `backward(k, gradient)` goes back through that graph, which gives the gradient of the *old* weights. Write: this backward,
#   and one step of the optimizer that applies that gradient to the **newest** weights. A weight that k did not use gets none.
#
# Given are the stash and the books: `version` counts updates, `history` notes which version the forward used and which one
# the update found. About 2 and 4 lines.
#
# <details><summary>Hint</summary>
#
# The optimizer changes parameters in place: stash `p.detach().clone()`, which asks for its gradient as p does.
# `torch.func.functional_call(stage, weights, (x,))` runs the stage on these weights instead of its own. Their `.grad` is what
# backward gives; the optimizer looks for `.grad` of the stage's own parameters.
# </details>


# %% tags=["balise-9"]
class AsyncStage:
    """A stage that updates its weights after each micro-batch. history: (micro-batch, version used, version updated)."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer = stage, optimizer
        self.version = 0  # updates so far
        self.stash = {}  # number of a micro-batch in flight -> what its backward needs
        self.history = []

    def forward(self, k, x):
        """Output for micro-batch k with the newest weights, without a graph. Buffers stay the stage's own."""
        parameters = self.stage.named_parameters()
        x = x.detach().requires_grad_(x.is_floating_point())
        # BEGIN SOLUTION
        weights = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters}
        y = torch.func.functional_call(self.stage, weights, (x,))
        # END SOLUTION
        self.stash[k] = self.version, weights, x, y
        return y.detach()

    def backward(self, k, gradient):
        """Gradient of the input of micro-batch k, with the weights of its forward; updates the newest of those used."""
        version, weights, x, y = self.stash.pop(k)
        # BEGIN SOLUTION
        y.backward(gradient)
        for name, p in self.stage.named_parameters():
            p.grad = weights[name].grad
        self.optimizer.step()
        # END SOLUTION
        self.history.append((k, version, self.version))
        self.version += 1
        return x.grad


# %%
tp.check(9, AsyncStage)

# %% [markdown]
# See it: four stages in one process, in the order of 1F1B on four ranks.


# %%
def stream(stages, xs, ts):
    """Micro-batches through asynchronous stages, an endless 1F1B; returns the losses."""
    p, travelling, losses = len(stages), {}, []
    orders = [one_f_one_b(s, p, len(xs)) for s in range(p)]
    for _, kind, k, s, *_ in planner.simulate(orders, {"F": 1, "B": 2}).events:
        if kind == "F":
            x = xs[k] if s == 0 else travelling.pop(("F", k, s))
            travelling["F", k, s + 1] = stages[s].forward(k, x)
            continue
        if s == p - 1:
            y = travelling.pop(("F", k, p)).requires_grad_()
            loss = loss_function(y, ts[k])
            loss.backward()
            losses.append(loss.item())
        gradient = y.grad if s == p - 1 else travelling.pop(("B", k, s))
        travelling["B", k, s - 1] = stages[s].backward(k, gradient)
    return losses


def async_stages(rate, p=4, width=64, blocks=4):
    """A small model in p asynchronous stages; returns the model and the stages."""
    model = make_model(width, blocks)
    cuts = balance([0.0, *[1.0] * blocks, 0.0], p)
    stages = [model[start:stop] for start, stop in cuts]
    return model, [AsyncStage(stage, torch.optim.SGD(stage.parameters(), lr=rate)) for stage in stages]


def staleness():
    x, labels = make_batch(10 * 16)
    _, stages = async_stages(0.01)
    stream(stages, x.split(16), labels.split(16))
    return [stage.history for stage in stages]


# %% jupyter={"source_hidden": true}
histories = launch.ranks(staleness, n=1, timeout=120)[0]
print("version of the weights in forward → version that the update changes")
print("micro-batch  " + "".join(f"{k:>8}" for k in range(10)))
for s, history in enumerate(histories):
    print(f"stage {s}      " + "".join(f"{f'{used} → {changed}':>8}" for _, used, changed in history))
print("updates in between:", [max(changed - used for _, used, changed in history) for history in histories])

# %% [markdown]
# On stage s of p, a gradient is p − 1 − s updates old when it arrives. Does it still learn? Four ways to train on the digits,
# in micro-batches of 16 images: *one device*, an update for each; *synchronous*, four stages, an update after 8 micro-batches;
# *asynchronous*, yours; *no stash*, the same, but backward runs with the newest weights. Time is **simulated**, in forwards of
# one stage.


# %%
class NoStash:
    """As AsyncStage, but backward takes the weights that are there."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.inputs = stage, optimizer, {}

    def forward(self, k, x):
        self.inputs[k] = x
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x = self.inputs.pop(k).detach().requires_grad_()
        self.optimizer.zero_grad()
        self.stage(x).backward(gradient)
        self.optimizer.step()
        return x.grad


# %%
SIZE, PARTS, BATCHES = 16, 8, 11  # rows of a micro-batch, micro-batches of a synchronous update, updates an epoch


def train(method, rate, epochs=4):
    """Loss and accuracy on the validation digits after each epoch."""
    model, stages = async_stages(rate)
    if method == "no stash":
        stages = [NoStash(stage.stage, stage.optimizer) for stage in stages]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = []
    parts = digits.train_x, digits.train_y, digits.val_x, digits.val_y
    x, t, val_x, val_t = (part.to(launch.device()) for part in parts)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[: BATCHES * PARTS * SIZE]
        images, labels = x[order].flatten(1), t[order]
        if method in ("asynchronous", "no stash"):
            stream(stages, images.split(SIZE), labels.split(SIZE))
        else:
            rows = SIZE if method == "one device" else PARTS * SIZE
            for a, b in zip(images.split(rows), labels.split(rows)):
                optimizer.zero_grad()
                loss_function(model(a), b).backward()
                optimizer.step()
        with torch.no_grad():
            y = model(val_x.flatten(1))
        found.append((loss_function(y, val_t).item(), (y.argmax(1) == val_t).float().mean().item()))
    return found


# %%
METHODS, RATES = ("one device", "synchronous", "asynchronous", "no stash"), (0.05, 0.1, 0.2)


def train_on_rank():
    """Each rank trains with one method, at each rate: four processes side by side, no pipeline."""
    return {rate: train(METHODS[dist.get_rank()], rate) for rate in RATES}


trained = dict(zip(METHODS, launch.ranks(train_on_rank, n=4, timeout=120)))
endless = (BATCHES * PARTS + 3) * 3  # forward 1, backward 2, on each of four stages
units = {"one device": BATCHES * PARTS * 4 * 3, "synchronous": BATCHES * (PARTS + 3) * 3}
units |= {"asynchronous": endless, "no stash": endless}

# %% jupyter={"source_hidden": true}
print("accuracy after 4 epochs, by learning rate, and simulated time of an epoch")
print(f"{'':<14}" + "".join(f"{rate:>8}" for rate in RATES) + "    time")
for method, found in trained.items():
    print(f"{method:<14}" + "".join(f"{found[rate][-1][1]:>8.1%}" for rate in RATES) + f"{units[method]:>8}")


# %% jupyter={"source_hidden": true}
def last_loss(found, rate):
    """For the choice of a rate; a loss that is no number is the worst."""
    loss = found[rate][-1][0]
    return loss if loss == loss else float("inf")


best_rates = {method: min(RATES, key=lambda rate: last_loss(trained[method], rate)) for method in METHODS}
figure, panels = plt.subplots(1, 2, figsize=(8, 2.7), layout="constrained", sharey=True)
for method, colour in zip(METHODS, ("#999999", "#0072B2", "#009E73", "#D55E00")):
    best = best_rates[method]
    losses = [loss for loss, _ in trained[method][best]]
    for axes, step in zip(panels, (1, units[method])):
        at = [step * (k + 1) for k in range(4)]
        axes.plot(at, losses, "o-", color=colour, markersize=4, label=f"{method}, {best}")
panels[0].set(xlabel="epochs", ylabel="validation loss", xticks=range(1, 5), yscale="log", title="by samples seen")
panels[1].set(xlabel="time (simulated, forwards of a stage)", title="by time", xlim=(0, None))
handles = panels[0].get_legend_handles_labels()
figure.legend(
    *handles, fontsize=9, frameon=False, loc="outside right center", title="best rate of each", title_fontsize=9
)
for axes in panels:
    axes.set_yticks([0.2, 0.3, 0.5, 1, 2], ["0.2", "0.3", "0.5", "1", "2"], minor=False)
    axes.set_yticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# One seed, a small model, each rate chosen on the very digits that are shown. Without the stash,
# training breaks down at rates that the others bear. With it, three updates of delay cost nothing that one seed could
# show. The synchronous run makes 8 times fewer updates, but exact ones, whatever the number of stages: that is why nearly all
# large models are trained so.
#
# ## Pipelines side by side
#
# A pipeline has as many stages as the model needs to fit; more are more bubble. Other devices hold **replicas** of it, each with
# its own rows of the batch. Ranks of one stage average their gradients.

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(5.6, 2), layout="constrained")
for rank in range(8):
    replica, stage = divmod(rank, 4)
    left, low, colour = 1.6 * stage, 1.3 * (1 - replica), f"C{stage}"
    axes.add_patch(plt.Rectangle((left, low), 1.1, 0.8, color=colour))
    axes.text(left + 0.55, low + 0.4, f"rank {rank}", ha="center", va="center", color="white")
    if stage < 3:
        axes.annotate("", (left + 1.6, low + 0.4), (left + 1.1, low + 0.4), arrowprops={"arrowstyle": "<->"})
    if replica == 0:
        arrow = {"arrowstyle": "<->", "color": colour}
        axes.annotate("", (left + 0.55, 0.8), (left + 0.55, 1.3), arrowprops=arrow)
        axes.text(left + 0.55, 2.2, f"stage {stage}", ha="center", fontsize=9)
for replica in range(2):
    axes.text(-0.15, 1.3 * (1 - replica) + 0.4, f"replica {replica}", ha="right", va="center", fontsize=9)
axes.set(xlim=(-1.2, 6.1), ylim=(-0.1, 2.5))
axes.set_title("→ activations and gradients between stages · ↕ all-reduce in a data group", fontsize=10)
axes.axis("off")
plt.show()

# %% [markdown]
# ### Balise 10 · Data × pipeline · further · about 9 min
#
# Ranks are numbered along the pipelines: **rank = replica × n_stages + stage**.
#
# - `make_grid(n_stages)` also returns the process group of all ranks with this rank's stage, its *data group*. Write how it is
#   made. `dist.new_group` is a collective: *every* rank calls it for *every* group, in one order, and keeps the one it is in.
# - `hybrid_step`: `step(rows, their_targets)` runs this replica's pipeline, and leaves the gradients of the mean loss of *its*
#   rows in `p.grad`. Afterwards they, and the loss that the last stages return, must be those of the mean over the **whole
#   batch**, also where it does not divide by the replicas. Write what happens to a gradient: the rule of balise 4 once
#   more, this time with a message.
#
# About 3 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The ranks with stage s are `r * n_stages + s`. Each replica's mean counts by its share of the rows:
# then `dist.all_reduce(value, group=data_group)` adds up. In place: `value` is the `p.grad` itself.
# </details>


# %% tags=["balise-10"]
def make_grid(n_stages):
    """Returns (stage, replica, ranks of this rank's pipeline in order, process group of the ranks with its stage)."""
    replica, stage = divmod(dist.get_rank(), n_stages)
    n_replicas = dist.get_world_size() // n_stages
    for s in range(n_stages):
        # BEGIN SOLUTION
        group = dist.new_group([r * n_stages + s for r in range(n_replicas)])
        if s == stage:
            mine = group
        # END SOLUTION
    return stage, replica, [replica * n_stages + s for s in range(n_stages)], mine


def hybrid_step(step, parameters, x, targets, replica, data_group):
    """One step of the whole batch on all pipelines: gradients in p.grad; mean loss on the last stages, else None."""
    n_replicas = dist.get_world_size(data_group)
    rows = x.tensor_split(n_replicas)[replica]
    loss = step(rows, targets.tensor_split(n_replicas)[replica])
    for value in [loss, *(p.grad for p in parameters)]:
        if value is not None:
            # BEGIN SOLUTION
            value *= len(rows) / len(x)
            dist.all_reduce(value, group=data_group)
            # END SOLUTION
    return loss


# %%
tp.check(10, make_grid, hybrid_step)

# %% [markdown]
# All pieces together: two pipelines of two stages on four ranks, 1F1B in each, a batch that does
# not divide, each rank beside the whole model in one process.


# %%
def side_by_side(n_stages):
    number, replica, pipeline, data_group = make_grid(n_stages)
    before = pipeline[number - 1] if number > 0 else None
    behind = pipeline[number + 1] if number < n_stages - 1 else None
    place = Place(number, n_stages, before, behind)
    stage, actions = my_stage(place), one_f_one_b(number, n_stages, 4)
    x, labels = make_batch(99)

    def step(rows, targets):
        loss = run_schedule(actions, stage, place, rows, targets, loss_function, 4)[0]
        return None if loss is None else torch.as_tensor(loss, device=launch.device())

    loss = hybrid_step(step, list(stage.parameters()), x, labels, replica, data_group)
    model = make_model()
    whole = loss_function(model(x), labels)
    whole.backward()
    start, stop = balance([0.0, *[1.0] * BLOCKS, 0.0], n_stages)[number]
    pairs = zip(stage.parameters(), model[start:stop].parameters())
    error = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)
    return number, replica, error, None if loss is None else (float(loss), whole.item())


# %% jupyter={"source_hidden": true}
for rank, (number, replica, error, loss) in enumerate(launch.ranks(side_by_side, 2, n=RANKS[-1], timeout=120)):
    shown = f", loss {loss[0]:.6f}, one process {loss[1]:.6f}" if loss else ""
    print(f"rank {rank}: stage {number}, replica {replica}, gradients within {error:.0e} of one process{shown}")

# %% [markdown]
# The same gradients, whatever the grid. More stages: more bubble, less memory a rank. More replicas: fewer rows for
# each, and gradients that travel.


# %% [markdown]
# ## Race: PyTorch's schedules
#
# `torch.distributed.pipelining` has the same two schedules. Its stages agree on shapes once, in their first step. So yours
# runs twice: with the shapes *once*, as PyTorch, and *each time*.

# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def our_step(actions, messages, place, stage, x, labels):
    """A step of `run_schedule` with two functions that send and receive activations."""

    def step():
        stage.zero_grad()
        run_schedule(actions, stage, place, x, labels, loss_function, MICRO_BATCHES, messages)

    return step


def torch_step(schedule, place, stage, x, labels):
    """The same step with a schedule of PyTorch; only the first stage is given the batch."""
    part = PipelineStage(stage, place.stage, place.n_stages, launch.device())
    runner = schedule(part, MICRO_BATCHES, loss_fn=loss_function)

    def step():
        stage.zero_grad()
        runner.step(*[x] * (place.before is None), target=labels, return_outputs=False)

    return step


# %%
def race_on_ranks(rounds):
    """For each schedule: the largest relative gap between a gradient of yours and of PyTorch's, and a race."""
    place, (x, labels), found = my_place(), make_batch(), {}
    for name, torchs in SCHEDULES.items():
        stages = [my_stage(place) for _ in range(3)]
        actions = ORDERS[name](place.stage, place.n_stages, MICRO_BATCHES)
        steps = {
            f"your {name}": our_step(actions, shapes_once(), place, stages[0], x, labels),
            torchs.__name__: torch_step(torchs, place, stages[1], x, labels),
            f"your {name}, shapes each time": our_step(actions, None, place, stages[2], x, labels),
        }
        race = measure.race(steps, rounds, warmup=1, calls=1, device=launch.device())
        pairs = list(zip(*(stage.parameters() for stage in stages)))
        gap = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for mine, q, slow in pairs for p in (mine, slow))
        found[name] = gap, race
    return found


# %%
# more ranks than cores take turns on them, and a race tells nothing
races = {n: launch.ranks(race_on_ranks, ROUNDS, n=n, timeout=200) for n in (RANKS if FULL else RANKS[:1])}

# %% jupyter={"source_hidden": true}
for n, ranks in races.items():
    for name in SCHEDULES:
        gap = max(found[name][0] for found in ranks)
        print(f"{n} ranks on {launch.backend(n)}, {name}: gradients differ by at most {gap:.0e}\n{ranks[0][name][1]}\n")
print(recorded.line("15_pipeline_under_the_hood", "race"))
if FULL:
    medians = {f"{n} ranks": {name: race.medians for name, (_, race) in ranks[0].items()} for n, ranks in races.items()}
    recorded.note("15_pipeline_under_the_hood", "race", medians)

# %% [markdown]
# Look at the column *time / first*: PyTorch's against yours. Theory says 1: the same work, the same activations.
# (`ScheduleGPipe` goes backward from the first micro-batch: its sums have another order, and other last bits.)
#
# ## Predicted, then measured · further
#
# Could you have known the time of 1F1B before you ran it? The events of a GPipe step, such as the one you drew, tell what
# the stages cost, and two things that the ideal plan left out:
#
# - a *message*: from the end of an action to the begin of the one on another stage that waited for it;
# - a *turn*: from the end of an action to the begin of the next of the same stage, when all it needs is there: Python's time.
#
# The simulator does the rest.


# %%
def message_and_turn(events):
    """Median seconds of a message, and of a turn, in the events of a step on all ranks."""
    ended = {(kind, k, stage): end for _, kind, k, stage, _, end in events}
    free, messages, turns = {}, [], []  # free: when a stage ended its last action
    for _, kind, k, stage, begin, end in sorted(events, key=lambda event: event[4]):
        sent = ended.get((kind, k, stage - 1 if kind == "F" else stage + 1), 0.0)  # 0: needs no message
        if stage in free:
            waits = sent > free[stage]
            (messages if waits else turns).append(begin - max(sent, free[stage]))
        free[stage] = end
    return statistics.median(messages), statistics.median(turns)


# %% jupyter={"source_hidden": true}
print(f"{'stages':<12} {'message':>8} {'turn':>8}   {'schedule':<9} predicted   measured   predicted / measured")
for n, what, steps in ((2, "computing", computing), (4, "sleeping", sleeping)):
    message, turn = message_and_turn(steps["GPipe"])
    costs = {kind: [cost + turn for cost in stages] for kind, stages in stage_costs(steps["GPipe"]).items()}
    for name, events in steps.items():
        guess, truth = plan(name, n, costs, message).seconds, lasted(events)
        print(f"{n} {what:<10} {1e3 * message:5.2f} ms {1e3 * turn:5.2f} ms   {name:<9} {1e3 * guess:6.0f} ms  {1e3 * truth:6.0f} ms   "
              f"{guess / truth:12.2f}")  # fmt: skip

# %% [markdown]
# The plan knows a GPipe step, and nothing of 1F1B. Sleeping stages have devices of their own. Computing ones share
# cores with other programs: how far can a plan be trusted there?
#
# ## Past this machine · further
#
# A transformer of 70 billion parameters (80 layers, width 8,192) on 16 A100 of 80 GB. A micro-batch is a sequence of 2,048
# tokens. All of it is arithmetic: 2 operations a parameter and token forward, at an assumed 40 % of 312 TFLOP/s; messages over
# 100 Gb/s; activations after Korthikanti et al. (2022), with fused attention.

# %%
FORWARD = 2 * 70e9 / 16 * 2048 / (0.4 * planner.A100.bfloat16)  # seconds of a micro-batch on a stage
LINK = planner.Link(latency=5e-6, bandwidth=12.5e9)
MESSAGE = 2 * 2048 * 8192  # bytes of an activation between two stages, bfloat16
KEPT = 5 * planner.layer_activation_bytes(2048, 1, 8192, 64, recomputation="selective")  # a micro-batch on a stage


def on_sixteen(schedule, n_micro_batches, recompute):
    """(tokens a second, GB of the fullest device)"""
    orders = [schedule(stage, 16, n_micro_batches) for stage in range(16)]
    costs = {"F": FORWARD, "B": FORWARD * (3 if recompute else 2)}
    kept = MESSAGE if recompute else KEPT
    found = planner.simulate(orders, costs, link=LINK, message_bytes=MESSAGE, activation_bytes=kept)
    working = KEPT if recompute else 0  # what is computed again lives for one micro-batch
    return 2048 * n_micro_batches / found.seconds, (16 * 70e9 / 16 + max(found.peak_bytes) + working) / 1e9


# %% jupyter={"source_hidden": true}
print(f"forward of a micro-batch on a stage {1e3 * FORWARD:.0f} ms, with its backward {3e3 * FORWARD:.0f} ms, "
      f"its message {1e3 * MESSAGE / 12.5e9:.1f} ms, its activations {KEPT / 1e9:.1f} GB")  # fmt: skip
print(
    f"a step of 64 micro-batches: {2 * 64 * MESSAGE / 1e9:.1f} GB over a cut; all gradients, 2 bytes each: {2 * 70:.0f} GB"
)

# %% jupyter={"source_hidden": true}
numbers = [4, 8, 16, 32, 64, 128, 256]
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
for name, schedule, redo, look in (
    ("GPipe", gpipe, False, {"color": "#0072B2"}),
    ("GPipe, recomputing", gpipe, True, {"color": "#0072B2", "linestyle": "--"}),
    ("1F1B", one_f_one_b, False, {"color": "#D55E00"}),
    ("1F1B, recomputing", one_f_one_b, True, {"color": "#D55E00", "linestyle": "--"}),
):
    rates, sizes = zip(*(on_sixteen(schedule, m, redo) for m in numbers))
    left.plot(numbers, sizes, marker="o", markersize=4, label=name, **look)
    fitting = [(m, rate) for m, rate, size in zip(numbers, rates, sizes) if size <= 80]
    right.plot(numbers, rates, color="#BBBBBB", linewidth=1, zorder=0)
    right.plot(*zip(*fitting), marker="o", markersize=4, **look) if fitting else None
left.axhline(80, color="black", linewidth=1)
left.text(64, 86, "80 GB: the device", fontsize=9, ha="center")
left.set(yscale="log", ylim=(60, 1000), yticks=[70, 100, 200, 500, 1000], yticklabels=[70, 100, 200, 500, 1000])
left.set_title("Does it fit? GB of the fullest device", fontsize=10)
right.set_title("How fast? tokens per second (grey: does not fit)", fontsize=10)
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set(xticks=numbers, xticklabels=numbers, xlabel="micro-batches a step")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
plt.show()

# %% [markdown]
# Left: with GPipe activations grow with the micro-batches; with 1F1B they stop growing at 16, the number of stages. Only
# recomputing fits, and costs a second forward: the distance between grey and coloured on the right. And 1F1B goes on fitting
# with the many micro-batches that make the bubble small.
#
# A stage works about 80 times as long on a micro-batch (431 ms) as its two messages travel (2.7 ms each); data
# parallelism would all-reduce all gradients. So a pipeline is what is laid across the *slow* links of a machine.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>You start to send an activation and go on computing. When may its memory be written again?</summary>
#
# Only after <code>wait()</code> on the send (with NCCL it makes the stream wait, not Python). The trap is memory that
# is used again: a fixed buffer for outputs, or the output of a CUDA graph. The next micro-batch writes there, and the
# neighbour gets whatever is there at that moment.
# </details>
#
# <details><summary>The model has batch norm. Does a pipeline with micro-batches train the same model?</summary>
#
# No. Each micro-batch is normalised with its own mean and variance. Layer norm looks at one sample alone: one more reason why
# large models use it.
# </details>
#
# <details><summary>First and last layer share one weight (tied embeddings), now on two ranks. What has to be done?</summary>
#
# Both ranks hold a copy and must stay alike: after the backwards, an all-reduce between these two alone adds up the two
# gradients.
# </details>
#
# ## To remember
#
# A pipeline cuts the model by layers and sends only what crosses a cut: little, so it bears slow links. Its price is
# the bubble, $(p-1)/(m+p-1)$ of the time, and micro-batches make it small; their losses count by their rows.
# GPipe and 1F1B have the same bubble, but 1F1B keeps at most as many micro-batches as there are stages. A schedule is
# data: simulate it before you run it. Can the bubble be smaller still? **16_pipeline_schedules** does that, with PyTorch's
# own tools.
