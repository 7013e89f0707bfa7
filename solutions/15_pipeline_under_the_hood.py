# %% [markdown]
# # Pipeline parallelism, under the hood · about 220 min, core 40
#
# A model that does not fit on one device can be cut between two layers: each rank holds a few layers, a **stage**, and hands
# its activations to the next. Nothing is copied but what crosses a cut. The price is waiting: while the first rank works,
# the others have nothing to do. In this practical work you cut the model, send activations and gradients yourself, and
# fight the waiting: micro-batches, two schedules written as data, an executor that runs any schedule, recomputation,
# asynchronous updates, and pipelines side by side.
#
# **What you will gain.** A model of 70 billion parameters, trained with Adam in mixed precision, has 16 bytes of states a
# parameter. The cell below asks whether that fits on devices of 80 GB, and what waiting costs. It is an *estimate*:
# arithmetic, nothing measured. No figure of this practical work was recorded on a GPU yet.

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
# One micro-batch means that the stages take turns: 94 % of sixteen devices are idle. You will see the waiting in
# your own run, foretell it, and get it down.
#
# All sizes are here. Without a GPU for each rank, the ranks are processes on the CPU and share its cores: two stages can
# really compute at the same time on two cores, four cannot. (A single GPU is left out: no table mixes it with the CPU.)

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
# With $p$ stages and $m$ micro-batches, a stage works $m$ times $t_F + t_B$. The first micro-batch has to come through all
# stages and its gradient back, which adds $p - 1$ times the same: the **bubble**.
#
# $$t_\text{step} = (m + p - 1)\,(t_F + t_B), \qquad \text{bubble} = \frac{p-1}{m+p-1}$$

# %%
sketch = {
    f"4 stages, {m} micro-batch{'es' * (m > 1)}": planner.simulate(
        planner.gpipe(4, m), {"F": 8 / m, "B": 16 / m}, activation_bytes=1
    ).events
    for m in (1, 4, 16)
}
report.gantt(sketch, unit="units of work")

# %% [markdown]
# The same work in each panel, cut finer and finer. White is waiting. (A simulation, with messages that take no time.)
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
# ### Balise 1 · Cut the model evenly · further · about 17 min
#
# The slowest stage sets the pace of all. Cut the layers into `n_stages` contiguous stages, none of them empty, such that the
# largest sum of costs is as small as possible. Return a list of `(start, stop)`: stage s is `model[start:stop]`.
#
# Best possible is asked for, not only good; and 200 layers in 16 stages must take a second or two, so do not try all cuts:
# there are more than $10^{22}$. Fewer layers than stages, or no stage at all: raise `ValueError`. About 15 lines.
#
# <details><summary>Hint</summary>
#
# Dynamic programming: let `best[s][j]` be the smallest possible maximum for the first j layers in s stages. The last of
# these stages begins at some i: `best[s][j]` is the smallest, over i, of `max(best[s-1][i], costs[i] + … + costs[j-1])`.
# Remember the i. Sums of neighbours are differences of cumulative sums (`itertools.accumulate`).
# </details>


# %% tags=["balise-1"]
def balance(costs, n_stages):
    """Cut layers of these costs (numbers of 0 or more) into stages: list of (start, stop), smallest largest sum."""
    # BEGIN SOLUTION
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be cut into {n_stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[j]: (largest stage, cuts) of the first j layers in as many stages as the loop has made
    best = {j: (total[j], [0]) for j in range(1, n + 1)}
    for s in range(2, n_stages + 1):
        best = {
            j: min((max(best[i][0], total[j] - total[i]), [*best[i][1], i]) for i in range(s - 1, j))
            for j in range(s, n + 1)
        }
    cuts = [*best[n][1], n]
    return list(zip(cuts[:-1], cuts[1:]))
    # END SOLUTION


# %%
tp.check(1, balance)

# %%
print(f"{'stages':<8} {'the same number of layers':<28} balanced")
for n in (2, 3, 4):
    equal = [sum(part) for part in (costs[k * len(costs) // n : (k + 1) * len(costs) // n] for k in range(n))]
    yours = [sum(costs[start:stop]) for start, stop in balance(costs, n)]
    shown = [" ".join(f"{1e3 * cost:4.0f}" for cost in stages) + " ms" for stages in (equal, yours)]
    print(f"{n:<8} {shown[0]:<28} {shown[1]}")

# %% [markdown]
# From here on each rank makes the whole model and keeps its stage; a model that does not fit would be made in parts. Where
# a rank stands in its pipeline is a `Place`.


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
# ### Balise 2 · Messages between neighbours · further · about 20 min
#
# Four functions. The receiver knows neither shape nor dtype of an activation, so they are sent first; a gradient is like the
# activation that it belongs to, and needs nothing but itself. `tag` is the number of the micro-batch.
#
# - `send_activation(output, peer, tag)`: start to send shape, dtype and values of `output`, of 1 to 6 dimensions (no size
#   is 0) and a dtype of `DTYPES`. Return the list of started sends (`dist.isend`); do not wait. `output` keeps its graph.
# - `receive_activation(peer, tag)`: wait for them; return a tensor that is a *leaf* and asks for its gradient, if its
#   dtype has gradients.
# - `send_gradient(received, peer, tag)`: start to send back the gradient of what was received. Return the list.
# - `receive_gradient(output, peer, tag)`: wait for the gradient of `output`; return it.
#
# Hand the tag on, but do not rely on it: gloo, on the CPU, tells messages apart by it; NCCL, between GPUs, ignores it. There
# what was sent first arrives first, and each message between two ranks waits for the one before it. If two neighbours both
# begin with a send, they wait for ever. So activations and gradients have a group each, in every send and receive:
# `group=launch.lane("activations")` and `group=launch.lane("gradients")`. (With gloo both are the group of all ranks. The
# check is as strict as NCCL: two lanes, in order, no tags.)
#
# Nothing is copied that need not be, and nothing is kept. Who calls these functions keeps the lists and waits, once for each
# send: a message whose work is dropped may be lost, and a second wait for the same work never ends with gloo. About 18 lines
# in all.
#
# <details><summary>Hint</summary>
#
# `dist.isend` wants a contiguous tensor, and no graph: `output.detach().contiguous()` copies only where it must. Put
# index of the dtype, number of dimensions and the sizes into an int64 tensor of fixed length, filled up with zeros. In a
# lane, messages arrive in the order in which they were sent. `dist.recv(buffer, peer, group=group, tag=tag)` waits.
# Buffers lie on `launch.device()`.
# </details>


# %% tags=["balise-2"]
def send_activation(output, peer, tag=0):
    """Start to send `output`, any shape and dtype, to rank `peer`. Returns the list of works to wait for."""
    # BEGIN SOLUTION
    sizes = [DTYPES.index(output.dtype), output.dim(), *output.shape]
    header = torch.tensor(sizes + [0] * (8 - len(sizes)), device=output.device)
    lane = launch.lane("activations")
    return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]
    # END SOLUTION


def receive_activation(peer, tag=0):
    """Receive what `send_activation` of rank `peer` sent: a leaf that asks for its gradient."""
    # BEGIN SOLUTION
    header, lane = torch.empty(8, dtype=torch.int64, device=launch.device()), launch.lane("activations")
    dist.recv(header, peer, lane, tag=tag)
    dtype, dims, *shape = header.tolist()
    received = torch.empty(shape[:dims], dtype=DTYPES[dtype], device=launch.device())
    dist.recv(received, peer, lane, tag=tag)
    return received.requires_grad_(received.is_floating_point())
    # END SOLUTION


def send_gradient(received, peer, tag=0):
    """Start to send the gradient of `received` back to rank `peer`. Returns the list of works to wait for."""
    # BEGIN SOLUTION
    lane = launch.lane("gradients")
    return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]
    # END SOLUTION


def receive_gradient(output, peer, tag=0):
    """Receive the gradient of `output` from rank `peer`: shape, dtype and device of `output`."""
    # BEGIN SOLUTION
    lane = launch.lane("gradients")
    gradient = torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)
    dist.recv(gradient, peer, lane, tag=tag)
    return gradient
    # END SOLUTION


# %%
tp.check(2, send_activation, receive_activation, send_gradient, receive_gradient)

# %% [markdown]
# There is another way out, which Megatron-LM takes: `dist.batch_isend_irecv` starts a list of sends and receives as one, and
# none of them waits for another. Two ranks that send to each other at the same moment, with no lanes:


# %%
def exchange():
    """What the other one of two ranks has sent."""
    other, mine = 1 - dist.get_rank(), torch.full((3,), float(dist.get_rank()), device=launch.device())
    theirs = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return theirs.tolist()


print(launch.ranks(exchange, n=2))

# %% [markdown]
# ### Balise 3 · The naive step · further · about 16 min
#
# The whole batch goes through the stages, the gradient comes back. Every rank calls `naive_step`; `inputs` and `targets` are
# given to all, but only the first stage uses the inputs and only the last one the targets. The neighbours are the ranks
# `place.before` and `place.behind`; the stage's number says nothing about them. Return the loss on the last
# stage, a detached tensor of no dimension, and `None` on the others. Every gradient must be that of the model in one
# process. Wait for your sends before you return. About 12 lines.
#
# <details><summary>Hint</summary>
#
# On a stage in the middle: receive x, compute y = stage(x), send y, receive its gradient, `y.backward(gradient)`, send the
# gradient of x. The first stage has nothing to receive and no gradient to send; the last one has a loss.
# </details>


# %% tags=["balise-3"]
def naive_step(stage, place, inputs, targets, loss_function):
    """Forward and backward of one batch through all stages; gradients add up in the stage's parameters."""
    # BEGIN SOLUTION
    x = inputs if place.before is None else receive_activation(place.before)
    y = stage(x)
    works = []
    if place.behind is None:
        loss = loss_function(y, targets)
        loss.backward()
    else:
        works += send_activation(y, place.behind)
        y.backward(receive_gradient(y, place.behind))
    if place.before is not None:
        works += send_gradient(x, place.before)
    for work in works:
        work.wait()
    return loss.detach() if place.behind is None else None
    # END SOLUTION


# %%
tp.check(3, naive_step)

# %% [markdown]
# ### Balise 4 · Micro-batches · about 21 min
#
# Cut the batch into `n_micro_batches` with `tensor_split`, send all of them forward, then all gradients back, the last
# micro-batch first: that is GPipe (Huang et al., 2019). Gradients add up. The batch need not divide: the micro-batches then
# differ by one row (there are never fewer rows than micro-batches), and loss and gradients must still be those of the
# **whole batch**. Return the loss as in balise 3. About 18 lines.
#
# <details><summary>Hint</summary>
#
# `loss_function` gives the mean of a micro-batch. The mean of the batch is the sum of these means, each weighted by the
# micro-batch's share of the rows. Keep (x, y) of each micro-batch until its gradient comes. On the last stage, y may be its
# weighted loss.
# </details>


# %% tags=["balise-4"]
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """As naive_step, in micro-batches; returns the mean loss of the whole batch on the last stage, else None."""
    # BEGIN SOLUTION
    kept, works, total = [], [], None
    for k, (x, t) in enumerate(zip(inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches))):
        x = x if place.before is None else receive_activation(place.before, k)
        y = stage(x)
        if place.behind is None:
            y = loss_function(y, t) * (len(t) / len(targets))
            total = y.detach() if total is None else total + y.detach()
        else:
            works += send_activation(y, place.behind, k)
        kept.append((x, y))
    for k in reversed(range(n_micro_batches)):
        x, y = kept.pop()
        y.backward(None if place.behind is None else receive_gradient(y, place.behind, k))
        if place.before is not None:
            works += send_gradient(x, place.before, k)
    for work in works:
        work.wait()
    return total
    # END SOLUTION


# %%
tp.check(4, gpipe_step)


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

# %% [markdown]
# Read it by columns. On the left, two stages are no faster than one process: they take turns. On the right, they work at
# the same time. But cutting has a price of its own, in one process as well: products of a few rows use a processor worse
# than large ones, and Python has eight times as many calls to make. What lies between the formula and your pipeline
# is, first of all, Python that sends and receives between two calls, the shape that each message brings along (the race below
# shows its price), and cores that are shared with all that runs here; the messages themselves are short. Micro-batches are made as small as the bubble asks, and no smaller.
#
# ### Balise 5 · Schedules as data · about 10 min
#
# GPipe keeps every micro-batch until the last one is forward. **1F1B** (from PipeDream, 2019; synchronous in DAPPLE, 2021) begins with a few
# forwards, then does one forward and one backward in turn: as soon as a micro-batch's gradient is back, its activations
# are free. Same work, same bubble, less memory.
#
# What a rank does is a list. Two neighbours must do the micro-batches in one order, forward and back, for messages arrive
# as they were sent. Write two functions that return the list of actions of one stage, `("F", k)` for forward of
# micro-batch k, `("B", k)` for its backward:
#
# - `gpipe(stage, n_stages, n_micro_batches)`: all forwards in order, then all backwards, the last micro-batch first;
# - `one_f_one_b(stage, n_stages, n_micro_batches)`: first as many forwards as stages lie behind this one, then a forward
#   and a backward in turn, then the backwards that are left; all in the order of the micro-batches. At most
#   `n_stages − stage` micro-batches are kept at a time.
#
# Any number of stages and micro-batches, also fewer micro-batches than stages. A simulator looks at your lists before
# anything runs. About 9 lines.
#
# <details><summary>Hint</summary>
#
# With `w = min(n_stages - stage - 1, n_micro_batches)` forwards first, then pairs: forward w + k, backward k. How many pairs
# are there? The last stage has w = 0. Draw it: the cell below the verdict does.
# </details>


# %% tags=["balise-5"]
def gpipe(stage, n_stages, n_micro_batches):
    """The actions of one stage: all forwards, then all backwards, the last micro-batch first."""
    # BEGIN SOLUTION
    forwards = [("F", k) for k in range(n_micro_batches)]
    return forwards + [("B", k) for k in reversed(range(n_micro_batches))]
    # END SOLUTION


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
simulated = {
    name: planner.simulate([schedule(stage, 4, 8) for stage in range(4)], {"F": 1, "B": 2})
    for name, schedule in {"GPipe": gpipe, "1F1B": one_f_one_b}.items()
}
report.gantt({name: found.events for name, found in simulated.items()}, unit="forwards")

# %%
for name, found in simulated.items():
    print(f"{name:<6} {found.seconds:.0f} units of time, micro-batches kept by each stage: {found.in_flight}")

# %% [markdown]
# And a schedule that waits for itself? The simulator says who waits for whom. On real ranks this would be a long silence.

# %%
try:
    planner.simulate(
        [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]], {"F": 1, "B": 2}
    )
except planner.Deadlock as error:
    print(error)

# %% [markdown]
# ### Balise 6 · Run any schedule · further · about 30 min
#
# `run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches)` does the actions of one stage in
# their order, whatever valid schedule they come from: the micro-batches may come in any order, the same on all stages.
# `send(y, peer, k)` and `receive(peer, k)` carry the activations: yours of balise 2, unless others are given. Return `(loss, events)`: the loss as in balise 4, and for each action
# `(rank, kind, k, stage number, begin, end)`, read from `clock()` around the computing alone, not the messages. On the
# last stage the loss is part of the computing.
#
# It must not deadlock. After a micro-batch's backward nothing of it may be kept, neither x nor y, but what is still being
# sent. About 25 lines: most of them are those of balise 4.
#
# <details><summary>Hint</summary>
#
# Sends that are started and not waited for cannot block: wait for them at the end. In 1F1B two neighbours often send to
# each other at the same moment; if both waited for their send, nobody would receive. Keep (x, y) in a dictionary by k, and
# `pop` it in the backward.
# </details>


# %% tags=["balise-6"]
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Do the actions of this stage. Returns (loss of the batch on the last stage, else None; list of events)."""
    send, receive = messages or (send_activation, receive_activation)
    # BEGIN SOLUTION
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
            x, y, sent = kept.pop(k)
            gradient = None if last else receive_gradient(y, place.behind, k)
            for work in sent:  # through, since the gradient is back: lets go of the output's memory
                work.wait()
            begin = clock()
            y.backward(gradient)
            end = clock()
            if not first:
                works += send_gradient(x, place.before, k)
        events.append((dist.get_rank(), kind, k, place.stage, begin, end))
    for work in works:
        work.wait()
    return total, events
    # END SOLUTION


# %%
tp.check(6, run_schedule)

# %% [markdown]
# Shape and dtype with every activation are right for any batch, also one that does not divide. But the receiver can ask
# for the values only when it has them, and on a GPU Python has to wait for these few numbers. Real systems agree on the
# shapes once, and later messages are values alone. So do all runs below that are timed.


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
# What a stage keeps from a micro-batch's forward until its backward are the tensors that autograd has saved. How many bytes
# is that, and when? PyTorch lets you stand in between: inside
# `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`, each tensor that an operation saves goes through `pack`, the graph
# keeps what `pack` returns, and backward gets it back through `unpack`. When backward has passed, the graph lets go of it.
#
# ### Balise 7 · Measure what is kept, and keep less · further · about 30 min
#
# First a meter, `SavedBytes`. Inside `with SavedBytes(stage.parameters()) as saved:`, `saved.now` is the number of bytes that
# graphs keep at this moment, and `saved.peak` the most that it has been.
#
# - Count memory, not tensors: each *storage* once, with all of its bytes, however many saved tensors look at it. It is
#   free when the last of them is.
# - Tensors in `left_out`, the weights, do not count, nor do views of them.
# - What the graph drops is free at once, after a backward or without one.
#
# Then **recomputation** (activation checkpointing, Chen et al., 2016): a stage keeps its input only, and when its backward
# comes, it runs forward once more, this time with a graph. `torch.utils.checkpoint` does this work in practice; here you
# write it without. `recompute(stage, x)` gives `stage(x)` this way:
#
# - gradients of `x` and of the parameters as without it, also where `x` is itself the result of a layer. On the first stage `x` needs no gradient, or is made of token
#   numbers, which cannot have one; parameters may be frozen. If `x` is changed in place before the backward, autograd's
#   error comes, as without it, and never a wrong gradient.
# - **Dropout draws the same masks again.** `random_state` and `set_random_state` are given. Afterwards the random numbers go
#   on as if nothing had been recomputed.
#
# About 9, 1 and 3 lines for the meter, 3 and 8 for the recomputation.
#
# <details><summary>Hint</summary>
#
# `t.untyped_storage()` has `data_ptr()`, its address, and `nbytes()`. Save `tensor.detach()`: a result that holds its own graph
# would never be free. `weakref.finalize(kept, function, a, b)` calls `function(a, b)` when nobody holds `kept` any more.
#
# Inside `Recompute.forward` no graph is made. `ctx.save_for_backward(x)` keeps x; other things can be attributes of `ctx`. In
# `backward`, `ctx.saved_tensors[0].detach()` is x without its past; `torch.enable_grad()` switches graphs on again;
# `ctx.needs_input_grad[1]` tells whether x needs a gradient. `y.backward(gradient)` adds to the parameters' gradients itself.
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
        # BEGIN SOLUTION
        kept, storage = Kept(tensor.detach()), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.left_out:
            self.holders[address] += 1
            if self.holders[address] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(kept, self.dropped, address, size)
        return kept
        # END SOLUTION

    def unpack(self, kept):
        """backward needs the tensor: return it."""
        # BEGIN SOLUTION
        return kept.tensor
        # END SOLUTION

    def dropped(self, address, size):
        """The graph has let go of a Kept whose storage of `size` bytes is at `address`."""
        # BEGIN SOLUTION
        self.holders[address] -= 1
        if not self.holders[address]:
            self.now -= size
        # END SOLUTION


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
        # BEGIN SOLUTION
        ctx.stage, ctx.state = stage, random_state(x.device)
        ctx.save_for_backward(x)
        return stage(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """Add to the parameters' gradients; return one gradient for each argument of forward: None, that of x, None, ..."""
        # BEGIN SOLUTION
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        now = random_state(x.device)
        set_random_state(x.device, ctx.state)
        with torch.enable_grad():
            y = ctx.stage(x)
        set_random_state(x.device, now)
        y.backward(gradient)
        return None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2)
        # END SOLUTION


def recompute(stage, x):
    """stage(x), recomputed in backward. The parameters are handed over too: x may need no gradient, and y does."""
    return Recompute.apply(stage, x, *stage.parameters())


# %%
tp.check(7, SavedBytes, recompute)

# %% [markdown]
# See it: the peak of each stage in five runs of the same batch. `Recomputed` makes a stage of a stage.


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
# Naive and GPipe keep the whole batch: micro-batches alone save nothing. With 1F1B a stage keeps `n_stages − stage` of them. With
# recomputation what is left is the inputs that wait, and one micro-batch whole while its backward runs. The price: twice
# the forwards. If a backward takes as long as two forwards, a step takes 4/3 of the time. On your machine:


# %%
def price_of_recomputation():
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    model, x = make_model()[1:-1], torch.randn(BATCH // MICRO_BATCHES, WIDTH, device=launch.device())
    candidates = {
        "forward and backward": lambda: model(x).sum().backward(),
        "recomputed": lambda: recompute(model, x).sum().backward(),
    }
    return measure.race(candidates, repeats=2 * ROUNDS, calls=1, device=launch.device())


print(launch.ranks(price_of_recomputation, n=1, timeout=120)[0])

# %% [markdown]
# ## Waiting
#
# ### Balise 8 · The bubble, by formula and from your run · further · about 19 min
#
# Four short functions.
#
# - `ideal_bubble(n_stages, n_micro_batches)`: the share of the time in which a stage waits, in an ideal pipeline: stages
#   of equal cost, messages that take no time. How many turns does a step take, and in how many does a stage work?
# - `fewest_micro_batches(n_stages, share)`: the smallest number of micro-batches (1 or more) with which the ideal bubble is
#   at most `share`, a number above 0.
# - `measured_bubble(events)`: the share of all ranks' time, from the first begin to the last end, in which they did
#   nothing. `events` are those of `run_schedule`, of all ranks, in any order; the clock began at some time; there may be
#   several stages on a rank.
# - `stage_costs(events)`: what the simulator wants to know: `{"F": [seconds of stage 0, 1, …], "B": […]}`, for each kind
#   that is in the events. Take the median over the micro-batches.
#
# About 1, 3, 3 and 4 lines.
#
# <details><summary>Hint</summary>
#
# The last stage gets its first micro-batch after p − 1 turns, and then has m of them to do. For the fewest, a loop will do.
# If you solve for m and round up, note that a float which should be whole may lie just above, and give one too many.
# `rank, kind, k, stage, begin, end = event`. `statistics.median`.
# </details>


# %% tags=["balise-8"]
def ideal_bubble(n_stages, n_micro_batches):
    """Share of the time that a stage waits, 0 to 1: equal stages, messages that take no time."""
    # BEGIN SOLUTION
    return (n_stages - 1) / (n_micro_batches + n_stages - 1)
    # END SOLUTION


def fewest_micro_batches(n_stages, share):
    """The smallest number of micro-batches whose ideal bubble is at most `share`."""
    # BEGIN SOLUTION
    n_micro_batches = 1
    while ideal_bubble(n_stages, n_micro_batches) > share:
        n_micro_batches += 1
    return n_micro_batches
    # END SOLUTION


def measured_bubble(events):
    """Share of all ranks' time, from the first begin to the last end, in which they do nothing."""
    # BEGIN SOLUTION
    length = max(end for *_, end in events) - min(begin for *_, begin, _ in events)
    busy = sum(end - begin for *_, begin, end in events)
    return 1 - busy / (length * len({rank for rank, *_ in events}))
    # END SOLUTION


def stage_costs(events):
    """{kind: median seconds of one action of this kind, for each stage in order}"""
    # BEGIN SOLUTION
    n_stages = 1 + max(stage for _, _, _, stage, _, _ in events)
    return {
        kind: [statistics.median(e[5] - e[4] for e in events if e[1] == kind and e[3] == s) for s in range(n_stages)]
        for kind in {kind for _, kind, *_ in events}
    }
    # END SOLUTION


# %%
tp.check(8, ideal_bubble, fewest_micro_batches, measured_bubble, stage_costs)

# %%
fewest = {p: [fewest_micro_batches(p, share) for share in (0.5, 0.2, 0.1, 0.05)] for p in (2, 4, 8, 16, 64)}
print("micro-batches for a bubble of at most\nstages     50%    20%    10%     5%")
for p, numbers in fewest.items():
    print(f"{p:>6} " + "".join(f"{number:>7}" for number in numbers))

# %% [markdown]
# Now your own run, on two ranks: GPipe and 1F1B in turn, so that what slows the machine down slows both. Above, what the
# simulator makes of the costs of your stages with messages that take no time; below, what was measured.

# %%
ORDERS = {"GPipe": gpipe, "1F1B": one_f_one_b}


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


def ideal_and_measured(name, n, events):
    """Prints the bubbles; returns the events of the plan, and those of the run."""
    ideal = plan(name, n, stage_costs(events))
    print(f"{name}, {n} stages, {MICRO_BATCHES} micro-batches: bubble {ideal_bubble(n, MICRO_BATCHES):.1%} by formula, {ideal.bubble:.1%} "
          f"simulated, {measured_bubble(events):.1%} measured; step {1e3 * ideal.seconds:.0f} ms simulated, "
          f"{1e3 * lasted(events):.0f} ms measured")  # fmt: skip
    return {f"{name}, {n} stages, ideal": ideal.events, f"{name}, measured": events}


# %%
computing = quickest_steps(ROUNDS, my_stage, 2)
report.gantt(ideal_and_measured("1F1B", 2, computing["1F1B"]))

# %% [markdown]
# Formula and simulation differ where the stages do not cost the same. What is white below and not above is time that the plan
# does not know: messages, what Python does between two actions, other programs on the same cores.
#
# Four stages cannot compute at the same time on two cores. But a stage that only *sleeps*, as long as another device would
# compute, needs none: the messages, the order and the waiting are real. (10 ms forward, 20 ms backward.)


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
# The formula knows no messages. What do they cost where one can travel beside computing? Your schedules and your executor on
# four **modelled** H100, each behind a network card of 400 Gb/s: four blocks of 2 billion parameters, one a stage. Tensors
# have sizes and no values, operations and messages take the time of their arithmetic and their bytes.


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
for name, ranks in modelled.items():
    busy = max(sum(span.end - span.begin for span in run.spans if span.row == "compute") for run in ranks)
    print(f"{ranks[0].label}: {name}, {1e3 * max(run.seconds for run in ranks):.0f} ms a step; "
          f"by formula, from {1e3 * busy:.0f} ms of computing: {1e3 * busy * (1 + 3 / MICRO_BATCHES):.0f} ms")  # fmt: skip
report.streams([ranks[1] for ranks in modelled.values()]) if modelled else None

# %% [markdown]
# The drawing is of stage 1. What a step takes beyond the formula is messages: your executor asks for one when it needs it, and
# the card stands while it comes. With GPipe it stands for two, since its own send is before it in the same lane; with 1F1B that
# send travels while a micro-batch of the other direction is computed, and it stands for one.

# %% [markdown]
# ## No bubble at all?
#
# The bubble is there because all ranks wait for the end of the batch to update their weights. **PipeDream** (Narayanan et al.,
# 2019) does not wait: the micro-batches of all batches follow each other in one endless 1F1B, and each stage updates its
# weights after *each* backward. No bubble, but a new problem: between forward and backward of a micro-batch, others have
# changed the weights. Activations of one version and weights of another together are the gradient of nothing. So each
# stage **stashes** the weights of a forward until its backward.
#
# ### Balise 9 · An asynchronous stage · further · about 21 min
#
# `AsyncStage(stage, optimizer)` holds a stage and the optimizer of its parameters.
#
# - `forward(k, x)`: the output for micro-batch k, without a graph, made with the **newest** weights.
# - `backward(k, gradient)`: given the gradient of that output, return the gradient of `x`, made with the weights **of that
#   forward**; and update: the gradient of the old weights is applied to the **newest** ones, by the optimizer's `step()`.
#   Each update is with the gradient of one micro-batch. Several are in flight, and come back in the order they went.
# - `version` counts the updates; `history` gets `(k, version that its forward used, version that its update found)`.
# - A stash lives until its backward: `n_stages − stage` copies of the weights at most. Some parameters may be frozen: they get no
#   gradient. The caller's `x` stays as it is.
#
# About 5 and 8 lines.
#
# <details><summary>Hint</summary>
#
# The optimizer changes the parameters in place, so what is stashed must be a copy. With
# `weights = {name: p.detach().clone()…}`, `torch.func.functional_call(stage, weights, (x,))` runs the stage on these weights
# instead of its own; their `.grad` is what backward gives, if they ask for it. The optimizer looks for it in `p.grad` of the
# stage's own parameters.
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
        """Output for micro-batch k with the newest weights, without a graph."""
        # BEGIN SOLUTION
        parameters = self.stage.named_parameters()
        weights = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters}
        x = x.detach().requires_grad_(x.is_floating_point())
        y = torch.func.functional_call(self.stage, weights, (x,))
        self.stash[k] = self.version, weights, x, y
        return y.detach()
        # END SOLUTION

    def backward(self, k, gradient):
        """Gradient of the input of micro-batch k, with the weights of its forward; updates the newest weights."""
        # BEGIN SOLUTION
        version, weights, x, y = self.stash.pop(k)
        y.backward(gradient)
        for name, p in self.stage.named_parameters():
            p.grad = weights[name].grad
        self.optimizer.step()
        self.history.append((k, version, self.version))
        self.version += 1
        return x.grad
        # END SOLUTION


# %%
tp.check(9, AsyncStage)

# %% [markdown]
# See it: a stream of micro-batches through four stages, in one process, in the order that 1F1B has on four ranks. What is
# computed is what four ranks would compute.


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


# %%
histories = launch.ranks(staleness, n=1, timeout=120)[0]
print("version of the weights in forward → version that the update changes")
print("micro-batch  " + "".join(f"{k:>8}" for k in range(10)))
for s, history in enumerate(histories):
    print(f"stage {s}      " + "".join(f"{f'{used} → {changed}':>8}" for _, used, changed in history))
print("updates in between:", [max(changed - used for _, used, changed in history) for history in histories])

# %% [markdown]
# On stage s of p, a gradient is p − 1 − s updates old when it arrives. And one micro-batch meets weights of several ages on its
# way. Does it still learn? An honest comparison gives each method its own learning rate, and counts time as well as
# samples. Four ways to train the same small model on the digits, in micro-batches of 16 images, four epochs:
#
# - *one device*: an update for each micro-batch, no delay;
# - *synchronous*: a pipeline of four stages, an update after 8 micro-batches;
# - *asynchronous*: yours;
# - *no stash*: the same, but backward runs with the newest weights.
#
# Time is **simulated**, in units of a forward of one stage: one device has four stages to do.


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
# One seed, a small model, and each rate chosen on the very digits that are shown: read it with care. The stash earns its
# memory: without it, training breaks down at rates that the others bear. With it, a delay of three updates costs nothing that one
# seed could show. Longer delays, in deeper pipelines, should leave fewer rates that work; that is not measured here. The synchronous
# run makes 8 times fewer updates, each of them exact: slower on a small problem such as this one, no matter for a large
# model, whose batches are large anyway. That exactness, results that do not depend on the number of stages, is why nearly all large models are trained synchronously, and the bubble is fought in other ways.

# %% [markdown]
# ## Pipelines side by side
#
# A pipeline has as many stages as the model needs to fit; more stages are more bubble. What other devices are there for?
# More **replicas** of the pipeline, each with its own rows of the batch: data × pipeline parallelism. Ranks with the same
# stage hold the same layers, and average their gradients.

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
# ### Balise 10 · Data × pipeline · further · about 19 min
#
# Ranks are numbered along the pipelines: **rank = replica × n_stages + stage**. The world is a multiple of `n_stages`.
#
# - `make_grid(n_stages)` returns four things: this rank's stage, its replica, the list of the ranks of its pipeline in the
#   order of the stages, and the process group of all ranks with its stage, its *data group*.
# - `hybrid_step(step, parameters, x, targets, replica, data_group)`: one step of the whole batch `x`, `targets`, which all ranks
#   are given. `step(rows, their_targets)` runs this replica's pipeline: it leaves the gradients of the mean loss of these
#   rows in `p.grad`, and returns that loss on the last stage, else None. Each replica takes its part of the rows
#   (`tensor_split`, in the order of the replicas); afterwards `p.grad` is the gradient of the mean loss of the **whole batch**, on
#   every rank, and the last stages return that loss, a tensor of no dimension, the others None. The batch need not divide by
#   the replicas; some `p.grad` may be None, the same ones on all replicas, and stay None. Nothing is updated here.
#
# About 7 lines each.
#
# <details><summary>Hint</summary>
#
# `dist.new_group(ranks)` is called by *every* rank for *every* group, in the same order; keep the one that you are in. Send
# gradients through `dist.all_reduce(t, group=data_group)`. The mean over the batch weights each replica's mean by its share of
# the rows. `dist.get_world_size(group)` is the number of its members.
# </details>


# %% tags=["balise-10"]
def make_grid(n_stages):
    """Returns (stage, replica, ranks of this rank's pipeline in order, process group of the ranks with its stage)."""
    # BEGIN SOLUTION
    replica, stage = divmod(dist.get_rank(), n_stages)
    n_replicas = dist.get_world_size() // n_stages
    for s in range(n_stages):
        group = dist.new_group([r * n_stages + s for r in range(n_replicas)])
        if s == stage:
            mine = group
    return stage, replica, [replica * n_stages + s for s in range(n_stages)], mine
    # END SOLUTION


def hybrid_step(step, parameters, x, targets, replica, data_group):
    """One step of the whole batch on all pipelines: gradients in p.grad; mean loss on the last stages, else None."""
    # BEGIN SOLUTION
    n_replicas = dist.get_world_size(data_group)
    rows = x.tensor_split(n_replicas)[replica]
    loss = step(rows, targets.tensor_split(n_replicas)[replica])
    for value in [loss, *(p.grad for p in parameters)]:
        if value is not None:
            value *= len(rows) / len(x)
            dist.all_reduce(value, group=data_group)
    return loss
    # END SOLUTION


# %%
tp.check(10, make_grid, hybrid_step)

# %% [markdown]
# All of your pieces together, in pipelines of two stages: two of them on four ranks (with two or three GPUs, one on two
# ranks), 1F1B in each, a batch that does not divide. Every rank compares with the whole model in one process.


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


for rank, (number, replica, error, loss) in enumerate(launch.ranks(side_by_side, 2, n=RANKS[-1], timeout=120)):
    shown = f", loss {loss[0]:.6f}, one process {loss[1]:.6f}" if loss else ""
    print(f"rank {rank}: stage {number}, replica {replica}, gradients within {error:.0e} of one process{shown}")

# %% [markdown]
# The same gradients, whatever the grid. Which grid is fastest? More stages: more bubble, less memory a rank. More replicas: a
# longer all-reduce, and fewer micro-batches for each pipeline. The planner can tell before a run.


# %% [markdown]
# ## Race: PyTorch's schedules
#
# `torch.distributed.pipelining` has the same two schedules: `ScheduleGPipe` and `Schedule1F1B`. Same stages, same
# micro-batches, same ranks, in turn. What PyTorch's can do beyond that is the subject of the next practical work.
#
# PyTorch's stages agree on shapes once, in their first step. So yours runs twice: with the shapes *once*, as PyTorch, and
# with the shapes *each time*.

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
for n, ranks in races.items():
    for name in SCHEDULES:
        gap = max(found[name][0] for found in ranks)
        print(f"{n} ranks on {launch.backend(n)}, {name}: gradients differ by at most {gap:.0e}\n{ranks[0][name][1]}\n")
print(recorded.line("15_pipeline_under_the_hood", "race"))
if FULL:
    medians = {f"{n} ranks": {name: race.medians for name, (_, race) in ranks[0].items()} for n, ranks in races.items()}
    recorded.note("15_pipeline_under_the_hood", "race", medians)

# %% [markdown]
# Look at the column *time / first*: PyTorch's against yours. (The last line compares yours with the fastest of the others,
# which may be your own with shapes each time.) A ratio of 1 is what theory says: both do the
# same work and send the same activations. (`ScheduleGPipe` goes backward from the first micro-batch, yours from the
# last: the sums have another order, and the gradients other last bits.)
#
# ## Predicted, then measured
#
# Could you have known the time of 1F1B before you ran it? Take a step of GPipe, such as the one you drew. Its events tell
# what the stages cost (`stage_costs`), and two things that the ideal plan left out:
#
# - a *message*: the time from the end of an action to the begin of the one on another stage that waited for it;
# - a *turn*: the time from the end of an action to the begin of the next of the same stage, when all it needs is there. It is
#   Python's, and the sending's: a stage pays it with every action.
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


# %%
print(f"{'stages':<12} {'message':>8} {'turn':>8}   {'schedule':<9} predicted   measured   predicted / measured")
for n, what, steps in ((2, "computing", computing), (4, "sleeping", sleeping)):
    message, turn = message_and_turn(steps["GPipe"])
    costs = {kind: [cost + turn for cost in stages] for kind, stages in stage_costs(steps["GPipe"]).items()}
    for name, events in steps.items():
        guess, truth = plan(name, n, costs, message).seconds, lasted(events)
        print(f"{n} {what:<10} {1e3 * message:5.2f} ms {1e3 * turn:5.2f} ms   {name:<9} {1e3 * guess:6.0f} ms  {1e3 * truth:6.0f} ms   "
              f"{guess / truth:12.2f}")  # fmt: skip

# %% [markdown]
# The plan knows the costs and pauses of a GPipe step, and nothing of 1F1B. The sleeping stages have what counts as a
# device of their own, as on a real machine. The computing ones share this machine's cores with the messages and with all
# other programs: run the two cells again, and see how far a plan can be trusted there. (Four computing stages on two
# cores cannot be foretold so: two of them wait for a core, and no event says so.)
#
# ## Past this machine · further
#
# A transformer of 70 billion parameters (80 layers, width 8,192, 64 heads) on 16 devices of 80 GB, as 16 stages of 5
# layers. A micro-batch is one sequence of 2,048 tokens. All of it is arithmetic: 2 operations a parameter and token
# forward, at an assumed 40 % of an A100's 312 TFLOP/s; messages over 100 Gb/s; activations after Korthikanti et al. (2022), with fused
# attention.

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
# Read the left figure first. With GPipe the activations grow with the number of micro-batches, with 1F1B they stop
# growing at 16, the number of stages: but even 4 are too many beside the states. Only recomputing
# fits, and costs a second forward: the distance between grey and coloured on the right. Both schedules are nearly
# equally fast, for their bubble is the same; 1F1B goes on fitting at any number of micro-batches, and it is many
# micro-batches that make the bubble small.
#
# And the network, in the same estimate? In a step of 64 micro-batches each cut carries 64 activations and 64 gradients, and
# a stage that recomputes works about 100 times as long on a micro-batch as these two messages of it travel. Data
# parallelism over the same devices would all-reduce all gradients, 2 bytes a parameter, at the end of a step: much more,
# for a link to carry. That is why a pipeline is what is laid across the *slow* links of a machine.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>You start to send an activation and go on computing. When may its memory be written again?</summary>
#
# Only after <code>wait()</code> on the send. The usual trap is a layer that works in place, such as
# <code>nn.ReLU(inplace=True)</code>, on what is still under way: the neighbour then gets whatever is there at that
# moment. In your executor nothing writes into an output after its forward, and the started send keeps the tensor alive.
# </details>
#
# <details><summary>The model has batch norm. Does a pipeline with micro-batches train the same model?</summary>
#
# No. Each micro-batch is normalised with its own mean and variance, and the running statistics move once a micro-batch
# instead of once a batch. Gradients are then not those of the whole batch, with any schedule. Layer norm, which looks
# at one sample alone, has no such trouble: one more reason why large models use it.
# </details>
#
# <details><summary>First and last layer share one weight (tied embeddings), now on two ranks. What has to be done?</summary>
#
# Both ranks hold a copy, begin alike, and must stay alike: after the backwards, the two gradients are added up by an
# all-reduce between these two ranks alone, before the optimizer steps. Norms for clipping count the weight once.
# </details>
#
# ## To remember
#
# A pipeline cuts the model by layers and sends only what crosses a cut: little, so it bears slow links. Its price is
# the bubble, $(p-1)/(m+p-1)$ of the time, and micro-batches make it small; their losses are weighted by their rows.
# GPipe and 1F1B have the same bubble, but 1F1B keeps at most as many micro-batches as there are stages. A schedule is
# data: simulate it before you run it. Can the bubble be smaller still with the same micro-batches? It can: with several
# chunks of layers on each rank, or with the backward cut in two. The next practical work, **16_pipeline_schedules**,
# does that, with PyTorch's own tools.
