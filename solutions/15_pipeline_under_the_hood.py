# %% [markdown] tags=["slide"]
# # Pipeline parallelism, under the hood · about 125 min, core 50
#
# If a model does not fit on one device, you can cut it between two layers. Each rank holds a few neighbouring layers, a
# **stage**, and sends its activations to the next rank. The price is idle time: while the first stage computes, the
# others wait.
#
# **What you will gain.** You lower two numbers, both measured here: the share of a step in which a rank is *idle* (%),
# and the *peak memory of the activations* on a rank (MiB).

# %% tags=["setup"] jupyter={"source_hidden": true}
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from dlojz_tp import course, data, launch, measure, planner, recorded, report, scale, todo

tp = course.open("15_pipeline_under_the_hood")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
if GPUS == 1:
    os.environ[launch.place.ON_CPU] = "1"
WIDTH = 4096 if FULL else 512
BLOCKS = 16 if FULL else 6
BATCH = 2048 if FULL else 1024
MICRO_BATCHES = 8
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
ROUNDS = 20 if FULL else 5  # of the runs that are timed
MIB = 2**20

# %% [markdown] tags=["slide"]
# ## The idea
#
# Cut the batch into $m$ *micro-batches*. A stage takes time $t_F$ for the forward of one micro-batch and $t_B$ for
# its backward. While a pipeline of $p$ stages fills and drains, each stage is idle for as long as $p - 1$ micro-batches
# take: the **bubble**.
#
# $$t_\text{step} = (m + p - 1)\,(t_F + t_B), \qquad \text{bubble} = \frac{p-1}{m+p-1}$$

# %% tags=["slide"] jupyter={"source_hidden": true}
sketch = {
    f"4 stages, {m} micro-batch{'es' * (m > 1)}": planner.simulate(
        planner.gpipe(4, m), {"F": 8 / m, "B": 16 / m}, activation_bytes=1
    ).events
    for m in (1, 4, 16)
}
report.gantt(sketch, unit="units of work")

# %% [markdown]
# In this simulation, white is idle time. Every panel shows the same work.
#
# ## The baseline, measured first
#
# The model is a list of layers in plain PyTorch. It classifies 64-pixel images of handwritten digits.


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


# %% tags=["setup"] jupyter={"source_hidden": true}
digits = data.digits()  # loaded once, and sent to the ranks with the functions that use it


def make_batch(size=BATCH):
    """Images (size, 64) and labels (size,) on this rank's device, the same on all ranks."""
    rows = torch.arange(size) % len(digits.train_x)
    return digits.train_x[rows].flatten(1).to(launch.device()), digits.train_y[rows].to(launch.device())


def loss_function(logits, labels):
    """Mean over the batch."""
    return nn.functional.cross_entropy(logits, labels)


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


# %% jupyter={"source_hidden": true}
def baseline():
    """For each layer of the model: seconds of forward and backward, and bytes that forward keeps for backward."""
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    model, (x, _) = make_model(), make_batch()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    costs, sizes = [], []
    for layer in model:
        x, found = x.detach().requires_grad_(), {}

        def pack(tensor, found=found):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x)
        sizes.append(sum(found.values()))
        costs.append(seconds(lambda layer=layer, x=x: layer(x).sum().backward()))
        x = y
    return costs, sizes


costs, sizes = launch.ranks(baseline, n=1, timeout=120)[0]
print(f"one process: {1e3 * sum(costs):.0f} ms for {BATCH} images, {sum(sizes) / MIB:.0f} MiB of activations\n")
print("cut into four stages that take turns (each layer was measured in one process):")
quarters = [slice(k * len(costs) // 4, (k + 1) * len(costs) // 4) for k in range(4)]
columns = {"stage": "{}", "computes, ms": "{:.0f}", "idle": "{:.0%}", "keeps, MiB": "{:.1f}"}
busy, kept = ([sum(values[part]) for part in quarters] for values in (costs, sizes))
report.table(columns, [(k, 1e3 * b, 1 - b / sum(busy), size / MIB) for k, (b, size) in enumerate(zip(busy, kept))])

# %% [markdown]
# Four devices that take turns are no faster than one.
#
# ## Where to cut
#
# ### Balise 1 · Cut the model evenly · further · about 10 min
#
# The slowest stage sets the pace, so cut the layers into contiguous stages whose *largest* sum of costs is as small as
# possible. Use dynamic programming: if the first $j$ layers fill $s$ stages, the last stage has layers $i$ to $j - 1$
# for some $i$, and the first $i$ layers are cut into $s - 1$ stages in the best way.
#
# $$\text{best}_s(j) = \min_i\, \max\big(\text{best}_{s-1}(i),\; c_i + \dots + c_{j-1}\big)$$
#
# `total[j]` is the sum of the first j costs; `best[j]` is a pair: the cost of the largest stage, and the list of the
# stages' first layers. Write the step from s − 1 stages to s, for every j from s to n. About 3 lines.
#
# <details><summary>Hint</summary>
#
# `min` compares pairs by their first entries first. The last stage costs `total[j] - total[i]`, and its start is
# appended to the list: `[*best[i][1], i]`. For which i does each of the s − 1 earlier stages get at least one layer?
# </details>


# %% tags=["balise-1"]
def balance(costs, n_stages):
    """Cut layers with these costs (0 or more) into stages whose largest sum is smallest: list of (start, stop)."""
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
rows = []
for n in (2, 3, 4):
    equal = [slice(k * len(costs) // n, (k + 1) * len(costs) // n) for k in range(n)]
    both = (equal, [slice(start, stop) for start, stop in balance(costs, n)])
    rows.append((n, *(" ".join(f"{1e3 * sum(costs[part]):4.0f}" for part in parts) for parts in both)))
report.table({"stages": "{}", "ms of each stage, equal numbers of layers": "{}", "ms, balanced": "{}"}, rows)

# %% [markdown]
# ## Stages on ranks
#
# From here on, each rank makes the whole model and keeps only its stage.


# %% tags=["setup"]
@dataclass(frozen=True)
class Place:
    """A rank's place in its pipeline. before, behind: ranks of the previous and the next stage, None at the ends."""

    stage: int
    n_stages: int
    before: int | None
    behind: int | None


# %% tags=["setup"] jupyter={"source_hidden": true}
def my_place():
    """One pipeline over all ranks, in their order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return Place(rank, n, rank - 1 if rank > 0 else None, rank + 1 if rank < n - 1 else None)


def my_stage(place, width=WIDTH, blocks=BLOCKS):
    """The layers of this stage; a block costs 1, the first and the last layer 0."""
    model = make_model(width, blocks)
    start, stop = balance([0.0, *[1.0] * blocks, 0.0], place.n_stages)[place.stage]
    return model[start:stop]


def clock():
    """The time now: seconds on a CPU; on a GPU a CUDA event, so that nothing waits. `in_seconds` reads it."""
    if launch.device().type == "cpu":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def in_seconds(events):
    """The events of a step, (…, begin, end), in seconds, once the device has finished."""
    if launch.device().type == "cpu":
        return events
    last = clock()
    torch.cuda.synchronize()
    now = time.perf_counter()
    return [(*what, *(now - mark.elapsed_time(last) / 1e3 for mark in (begin, end))) for *what, begin, end in events]


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)

# %% [markdown]
# Four functions carry messages to or from the rank `peer`. `tag` is the micro-batch's number.
#
# | starts to send, returns *works* (handles) to wait for | waits, then returns the received tensor |
# |---|---|
# | `send_activation(output, peer, tag)` | `receive_activation(peer, tag)` |
# | `send_gradient(received, peer, tag)` | `receive_gradient(output, peer, tag)` |

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
left.set(title="one batch: a stage waits for its neighbour", xlabel="time", yticks=[0, -1, -2], ylim=(-2.5, 0.6))
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
right.set(title="both send first: deadlock", xlabel="time", yticks=[0, -1], ylim=(-1.5, 0.6), xlim=(0, 7.6))
for axes in (left, right):
    axes.set_xticks([])
    axes.set_yticklabels([f"stage {s}" for s in range(len(axes.get_yticks()))])
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ### Balise 2 · Messages between neighbours · further · about 12 min
#
# If two neighbours both wait for their sends to finish, neither receives: a deadlock (on the right). So *start* each
# send with `dist.isend`, which returns a `Work` at once; `dist.recv` waits. In one group, NCCL sends messages in the
# order in which they were started, so activations and gradients each get their own process group, a **lane**.
#
# A header (given) tells the receiver the shape and dtype of an activation. Write, in about 5 lines:
#
# - `send_activation`: start the sends of header and values, and return the list of works. Send the values without their
#   graph. Copy them only if they aren't contiguous.
# - `receive_activation`: receive the values. Return a leaf that requires a gradient if its dtype can have one.
# - `send_gradient`: the same for the gradient of `received`, but without a header.
#
# <details><summary>Hint</summary>
#
# `dist.isend(tensor, peer, lane, tag=tag)`: gloo finds a message by its tag, so both ends must pass the same one.
# `output.detach().contiguous()` copies only where it must. `dist.recv` fills an empty tensor: with which shape
# and dtype, on which device? Integers have no gradients: `is_floating_point()`.
# </details>


# %% tags=["balise-2"]
def send_activation(output, peer, tag=0):
    """Start to send `output`, of any shape and dtype, to rank `peer`. Returns the list of works to wait for.

    The header has eight integers: dtype, number of dimensions, the sizes, then zeros.
    """
    sizes = [DTYPES.index(output.dtype), output.dim(), *output.shape]
    header = torch.tensor(sizes + [0] * (8 - len(sizes)), device=output.device)
    lane = launch.lane("activations")
    # BEGIN SOLUTION
    return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]
    # END SOLUTION


def receive_activation(peer, tag=0):
    """Receive what rank `peer` sent with `send_activation`: a leaf that requires a gradient."""
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
    """Receive the gradient of `output` from rank `peer`, with the shape, dtype and device of `output`."""
    lane = launch.lane("gradients")
    gradient = torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)
    dist.recv(gradient, peer, lane, tag=tag)
    return gradient


# %%
tp.check(2, send_activation, receive_activation, send_gradient, receive_gradient)

# %% [markdown]
# ### Balise 3 · The naive step · about 10 min
#
# Start without micro-batches. Autograd knows only its own rank, so you apply the chain rule across a cut:
# `y.backward(gradient)` continues from the gradient that the next stage sent, and leaves in `x.grad` the gradient that
# the previous stage needs.
#
# The input, the last stage with its loss, and the wait for all `works` are given. Write the part for stages that have a
# next stage (`place.behind`), then the part for stages that have a previous one (`place.before`). About 4 lines.
#
# <details><summary>Hint</summary>
#
# `works += send_…(…)` collects the started sends. Rank 0 can be a neighbour, but 0 counts as false, so compare with
# `None`.
# </details>


# %% tags=["balise-3", "slide-mistake=gradient-of-ones"]
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
# ### Balise 4 · Micro-batches · about 11 min
#
# **GPipe** (Huang et al., 2019): all micro-batches go forward, one after the other; then their gradients come back, the
# last micro-batch first. Two things are new:
#
# - **The loss.** The gradients add up in `p.grad` and must be those of the mean over the *whole batch*. But
#   `loss_function` gives the mean of *one* micro-batch, and 99 rows split into 4 parts give 25, 25, 25 and 24. So
#   weight each mean by its share of the rows. On the last stage, assign this weighted loss to `y`, and add it up in
#   `total`, without its graph.
# - **The way back.** `kept` contains `(x, y)` for each micro-batch, in order. Take out the last pair and run its
#   backward. The last stage starts from its loss, the others from the gradient that they receive.
#
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# The mean of the batch is $\sum_k \frac{\text{rows}_k}{\text{rows}}\, \text{mean}_k$. `pop()` takes the last entry out
# of a list. `y.backward(None)` is `y.backward()`.
# </details>


# %% tags=["balise-4"]
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """Like naive_step, but in micro-batches; returns the mean loss of the whole batch on the last stage, else None."""
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

# %%
faster = tp.predict("On two stages, how many times faster is a GPipe step of 8 micro-batches than the naive step?", ...)


# %%
def steps_on_ranks():
    """Seconds of a naive step and of a GPipe step."""
    torch.set_num_threads(1)
    place, (x, labels) = my_place(), make_batch()
    stage = my_stage(place)
    naive = seconds(lambda: naive_step(stage, place, x, labels, loss_function))
    return naive, seconds(lambda: gpipe_step(stage, place, x, labels, loss_function, MICRO_BATCHES))


# %% jupyter={"source_hidden": true}
rows = [
    (name, *launch.ranks(steps_on_ranks, n=n, timeout=120)[0]) for n, name in ((1, "one process"), (2, "two stages"))
]
report.table(
    {"": "{}", "whole batch": measure.human_seconds, f"{MICRO_BATCHES} micro-batches": measure.human_seconds}, rows
)
faster.shows(
    rows[1][1] / rows[1][2],
    "× {:.2f}",
    "The formula gives 16 / 9 = 1.78, but it leaves out messages, and small matrix products are less efficient.",
)

# %% [markdown]
# The first row shows the price of micro-batches: smaller matrix products, and more calls. So make them no smaller than
# the bubble requires.
#
# ### Balise 5 · Schedules as data · about 11 min
#
# GPipe keeps the activations of all micro-batches. **1F1B** (PipeDream, 2019) has the same bubble, but runs each
# backward as early as possible, which frees activations sooner. A stage first runs as many forwards as there are stages
# after it. Then it alternates one forward and one backward. The remaining backwards come last. A stage never keeps more
# than `n_stages − stage` micro-batches. With 3 stages and 4 micro-batches, the last stage and the first stage run:
#
# `F0 B0 F1 B1 F2 B2 F3 B3` and `F0 F1 F2 B0 F3 B1 B2 B3`
#
# A schedule is a list: `("F", k)` is the forward of micro-batch k, `("B", k)` its backward. `gpipe` is given. Write
# `one_f_one_b`, which must also work for fewer micro-batches than stages. About 5 lines.
#
# <details><summary>Hint</summary>
#
# After w forwards, the pairs are forward w + k and backward k. How many pairs are there, and which backwards are left?
# w is 0 on the last stage, and never more than the number of micro-batches.
# </details>


# %% tags=["balise-5"]
def gpipe(stage, n_stages, n_micro_batches):
    """The actions of one stage: all forwards, then all backwards, the last micro-batch first."""
    forwards = [("F", k) for k in range(n_micro_batches)]
    return forwards + [("B", k) for k in reversed(range(n_micro_batches))]


def one_f_one_b(stage, n_stages, n_micro_batches):
    """The actions of one stage: a few forwards, then forward and backward in turn, then the remaining backwards."""
    # BEGIN SOLUTION
    warm_up = min(n_stages - stage - 1, n_micro_batches)
    actions = [("F", k) for k in range(warm_up)]
    for k in range(n_micro_batches - warm_up):
        actions += [("F", warm_up + k), ("B", k)]
    return actions + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)]
    # END SOLUTION


# %%
tp.check(5, gpipe, one_f_one_b)

# %% jupyter={"source_hidden": true}
SCHEDULES = {"naive": (gpipe, 1), "GPipe": (gpipe, MICRO_BATCHES), "1F1B": (one_f_one_b, MICRO_BATCHES)}
simulated = {
    name: planner.simulate([order(stage, 4, m) for stage in range(4)], {"F": 8 / m, "B": 16 / m})
    for name, (order, m) in SCHEDULES.items()
}
report.gantt({name: found.events for name, found in simulated.items() if name != "naive"}, unit="forwards")
columns = {"simulated": "{}", "units of time": "{:.0f}", "idle": "{:.0%}", "micro-batches kept by each stage": "{}"}
report.table(columns, [(name, found.seconds, found.bubble, found.in_flight) for name, found in simulated.items()])

# %% [markdown]
# ### Balise 6 · Run any schedule · about 11 min
#
# `run_schedule` is balise 4, with the order taken from data. The forward is given. It stores `(x, y, works of its
# send)` under the micro-batch's number, because backwards may come in any order.
#
# Write the lines before a backward: take out what was kept for micro-batch k, receive the gradient of y (`None` on the
# last stage), and wait for the sends of that forward. Once the gradient is back, the activation must have arrived, so
# this wait costs nothing and frees y's memory. About 4 lines.
#
# **Write all of it:** `tp.open_task(6)` gives you only the name and the docstring. Run any valid list of actions, 1F1B
# among them, on any number of stages.
#
# <details><summary>Hint</summary>
#
# `kept.pop(k)` returns an entry and removes it. The given lines after yours call `y.backward(gradient)`.
# </details>


# %% tags=["balise-6"]
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Run the actions of this stage in their order. Returns (loss, events).

    actions: list of ("F" or "B", k), the forward or backward of micro-batch k; the k may come in any order.
    stage: a module. place: its attributes stage, n_stages, before, behind are the stage's number, their count, and the
    ranks of the previous and next stage, or None. inputs, targets: the batch (rows, …); its
    tensor_split(n_micro_batches) are the micro-batches. The first stage reads inputs, the last one targets.
    loss_function(y, t): mean over the rows of y, and micro-batches may differ by a row.

    Gradients add up in p.grad, and are those of the mean over the batch. loss: this mean on the last stage, a tensor ()
    without a graph; None elsewhere. events: for each action (this rank, kind, k, place.stage, begin, end). begin and
    end are clock() just before and after the computation, loss included, without any message.

    `send_activation(y, peer, k)` and `send_gradient(x, peer, k)` (it sends x.grad) start sends and return their works.
    `receive_activation(peer, k)` waits for a leaf x, `receive_gradient(y, peer, k)` for the gradient of y. messages:
    None, or (send, receive) to use instead of the two for activations. Start a send as soon as its tensor is there.
    Wait for each work once, before you return, but not in the action that started it: in 1F1B, neighbours send to each
    other, and both would wait forever. After the backward of k, nothing holds its tensors.
    """
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
            for work in sent:  # finished, since the gradient is back: frees the output's memory
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


# %% tags=["setup"] jupyter={"source_hidden": true}
def shapes_once():
    """The two functions of balise 2, for same-shaped activations: only the first message has a header."""
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
# Autograd saves tensors in a forward and frees them in the backward. `SavedBytes`, given, counts their bytes with
# `torch.autograd.graph.saved_tensors_hooks`.
#
# ### Balise 7 · Recompute activations · further · about 13 min
#
# With **recomputation** (activation checkpointing, Chen et al., 2016), a stage keeps only its input. In its backward,
# it runs forward a second time, now with a graph. You write what `torch.utils.checkpoint` does. `Recompute.forward` is
# given: it runs without a graph, and keeps x and the state of the random number generator.
#
# In `backward`, run the stage again with a graph, then run backward through it, which adds to the parameters'
# gradients. **Dropout must draw the same masks again.** Afterwards, the random numbers of x's device must continue as
# if nothing had been recomputed. About 5 lines.
#
# <details><summary>Hint</summary>
#
# Inside `backward`, autograd records no graph unless you write `with torch.enable_grad():`.
# `set_random_state(device, state)` is given. Which state did the forward start from? And which one, kept in `now`, must
# be restored at the end?
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
    """The state of a device's random number generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device, state):
    """Set the device's random number generator to this state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class Recompute(torch.autograd.Function):
    """A stage that keeps only its input, and runs forward again when its backward comes."""

    @staticmethod
    def forward(ctx, stage, x, *parameters):
        """The stage's output for `x`. This code runs without a graph."""
        ctx.stage, ctx.state = stage, random_state(x.device)
        ctx.save_for_backward(x)
        return stage(x)

    @staticmethod
    def backward(ctx, gradient):
        """Add to the parameters' gradients; return one gradient for each argument of forward: None, that of x, None, ...

        Dropout draws the same masks as in forward; then the random numbers of x's device continue where they were.
        """
        # x without its graph; the batch itself needs no gradient
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
    """stage(x), recomputed in backward. The parameters are passed too: y needs a gradient even if x does not."""
    return Recompute.apply(stage, x, *stage.parameters())


# %%
tp.check(7, SavedBytes, recompute)

# %%
more = tp.predict("On stage 0, by what factor does the peak of activations change from the naive step to GPipe?", ...)


# %% jupyter={"source_hidden": true}
class Recomputed(nn.Module):
    """A stage that keeps only its inputs."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        return recompute(self.stage, x)


def peaks_on_rank():
    """{run: (peak of saved bytes, forwards of the stage)} of this rank."""
    place, (x, labels), found = my_place(), make_batch(), {}
    for name, (order, m) in SCHEDULES.items():
        for again in (False, True):
            stage, forwards = my_stage(place), []
            stage.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
            runs = Recomputed(stage) if again else stage
            with SavedBytes(stage.parameters()) as saved:
                run_schedule(order(place.stage, place.n_stages, m), runs, place, x, labels, loss_function, m)
            found[name + ", recomputed" * again] = saved.peak, len(forwards)
    return found


# %% tags=["slide"]
peaks = launch.ranks(peaks_on_rank, n=RANKS[-1], timeout=120)
columns = {"measured": "{}", "forwards": "{}"} | {f"stage {s}, MiB": "{:.1f}" for s in range(len(peaks))}
report.table(columns, [(name, peaks[0][name][1], *(found[name][0] / MIB for found in peaks)) for name in peaks[0]])
more.shows(
    peaks[0]["GPipe"][0] / peaks[0]["naive"][0],
    "× {:.2f}",
    "All micro-batches go forward before the first gradient comes back: together they are the whole batch.",
)

# %% [markdown]
# Micro-batches alone save no memory. 1F1B does, and so does recomputing each micro-batch. The second forward costs, in
# theory, a third more computation.
#
# ## Idle time
#
# ### Balise 8 · The bubble, by formula and from your run · further · about 11 min
#
# - `ideal_bubble(n_stages, n_micro_batches)`: the bubble, by the formula in *The idea*.
# - `measured_bubble(events)`: the idle share of a run, from events `(rank, kind, k, stage, begin, end)`. The run lasts
#   from the first begin to the last end, on any rank. A rank is idle whenever none of its events is running. Events
#   come in any order, the clock may start at any number, and a rank may hold several stages.
#
# About 1 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `for rank, kind, k, stage, begin, end in events`. Count the ranks in the events: `len({...})`.
# </details>


# %% tags=["balise-8"]
def ideal_bubble(n_stages, n_micro_batches):
    """Share of the time that a stage waits, 0 to 1, if stages are equal and messages take no time."""
    # BEGIN SOLUTION
    return (n_stages - 1) / (n_micro_batches + n_stages - 1)
    # END SOLUTION


def fewest_micro_batches(n_stages, share):
    """The smallest number of micro-batches whose ideal bubble is at most `share`."""
    n_micro_batches = 1
    while ideal_bubble(n_stages, n_micro_batches) > share + 1e-9:  # allows for rounding
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
shares = (0.5, 0.2, 0.1, 0.05)
print("fewest micro-batches for a bubble of at most")
columns = {"stages": "{}"} | {f"{share:.0%}": "{}" for share in shares}
report.table(columns, [(p, *(fewest_micro_batches(p, share) for share in shares)) for p in (2, 4, 8, 16, 64)])

# %% [markdown]
# Now your own runs: two stages that compute, then four that *sleep* for as long as a device would compute, because four
# stages can't compute at the same time on two cores. Their messages and waiting are real.


# %% jupyter={"source_hidden": true}
def turns_on_rank(rounds, make_stage):
    """{schedule: the events of this rank, a list for each step}. Schedules take turns; the first round is dropped."""
    place, (x, labels) = my_place(), make_batch()
    stage, found = make_stage(place), {name: [] for name in SCHEDULES}
    messages = {name: shapes_once() for name in SCHEDULES}
    for _ in range(rounds + 1):
        for name, (order, m) in SCHEDULES.items():
            actions = order(place.stage, place.n_stages, m)
            dist.barrier()
            events = run_schedule(actions, stage, place, x, labels, loss_function, m, messages[name])[1]
            found[name].append(in_seconds(events))
    return {name: steps[1:] for name, steps in found.items()}


def lasted(events):
    return max(e[5] for e in events) - min(e[4] for e in events)


def quickest_steps(rounds, make_stage, n):
    """{schedule: events of all ranks in its quickest step, the one that other programs disturbed least}"""
    ranks = launch.ranks(turns_on_rank, rounds, make_stage, n=n, timeout=120)
    steps = {name: zip(*(rank[name] for rank in ranks)) for name in SCHEDULES}
    return {name: min((sum(step, []) for step in found), key=lasted) for name, found in steps.items()}


class Sleep(torch.autograd.Function):
    """x times a weight. It sleeps 10 ms for a micro-batch in forward, and 20 ms in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(0.010 * len(x) * MICRO_BATCHES / BATCH)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.020 * len(gradient) * MICRO_BATCHES / BATCH)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=launch.device()))

    def forward(self, x):
        return Sleep.apply(x, self.weight)


# %%
computing = quickest_steps(ROUNDS, my_stage, 2)
sleeping = quickest_steps(2, Sleeper, 4)

# %% jupyter={"source_hidden": true}
rows = []
for n, what, steps in ((2, "compute", computing), (4, "sleep", sleeping)):
    for name, events in steps.items():
        row = ideal_bubble(n, SCHEDULES[name][1]), measured_bubble(events), lasted(events)
        rows.append((f"{n} that {what}", name, *row))
columns = {
    "stages": "{}",
    "schedule": "{}",
    "idle, formula": "{:.0%}",
    "idle, measured": "{:.0%}",
    "step": measure.human_seconds,
}
report.table(columns, rows)
report.gantt({f"{name}, four stages that sleep, measured": sleeping[name] for name in ("GPipe", "1F1B")})

# %% [markdown]
# The formula leaves out messages, the Python code between two actions, other programs, and stages of unequal cost.
#
# ## Asynchronous updates
#
# The bubble exists because all ranks finish the batch before they update their weights. **PipeDream** runs an endless
# 1F1B instead, in which each stage updates its weights after *each* backward. Now the weights change between the
# forward and the backward of a micro-batch, so each stage **stashes** the weights of a forward for its backward.
#
# ### Balise 9 · An asynchronous stage · further · about 14 min
#
# - `forward(k, x)` runs micro-batch k with the **newest** weights. Write two things: a copy of these weights (a
#   dictionary by name), and the output `y` computed with this copy, so that y's graph leads to the copy. Frozen
#   parameters stay frozen in the copy.
# - `backward(k, gradient)`: write the backward through that graph, which gives the gradient of the *old* weights, and
#   one optimizer step that applies it to the **newest** weights. A weight that micro-batch k did not use gets no
#   gradient.
#
# About 2 and 4 lines.
#
# <details><summary>Hint</summary>
#
# The optimizer changes parameters in place: stash `p.detach().clone()`, which requires a gradient if p does.
# `torch.func.functional_call(stage, weights, (x,))` runs the stage with these weights instead of its own. Backward
# fills their `.grad`; the optimizer reads the `.grad` of the stage's own parameters.
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
        """Gradient of the input of micro-batch k, with the weights of its forward; then updates the newest weights."""
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


# %% jupyter={"source_hidden": true}
def stream(stages, xs, ts):
    """Run micro-batches through asynchronous stages in an endless 1F1B; returns the losses."""
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
    """Cut a small model into p asynchronous stages; returns the model and the stages."""
    model = make_model(width, blocks)
    cuts = balance([0.0, *[1.0] * blocks, 0.0], p)
    stages = [model[start:stop] for start, stop in cuts]
    return model, [AsyncStage(stage, torch.optim.SGD(stage.parameters(), lr=rate)) for stage in stages]


def staleness():
    x, labels = make_batch(10 * 16)
    _, stages = async_stages(0.01)
    stream(stages, x.split(16), labels.split(16))
    return [stage.history for stage in stages]


class NoStash:
    """Like AsyncStage, but backward uses the newest weights."""

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


SIZE, PARTS, BATCHES = 16, 8, 11  # rows of a micro-batch, micro-batches of a synchronous update, updates an epoch
METHODS, RATES = ("one device", "synchronous", "asynchronous", "no stash"), (0.05, 0.1, 0.2)


def train(method, rate, epochs=4):
    """Accuracy on the validation digits at the end."""
    model, stages = async_stages(rate)
    if method == "no stash":
        stages = [NoStash(stage.stage, stage.optimizer) for stage in stages]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
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
        return (model(val_x.flatten(1)).argmax(1) == val_t).float().mean().item()


def train_on_rank():
    """Each rank trains with one method, at each rate: four processes side by side, no pipeline."""
    return [train(METHODS[dist.get_rank()], rate) for rate in RATES]


# %% [markdown]
# In the first table, 3 → 6 means that the forward used version 3 of the weights and the update changed version 6. The
# second shows the accuracy after 4 epochs. A *synchronous* run updates every 8 micro-batches.

# %% jupyter={"source_hidden": true}
histories = launch.ranks(staleness, n=1, timeout=120)[0]
columns = {"micro-batch": "stage {}"} | {str(k): "{}" for k in range(6, 10)} | {"updates in between": "{}"}
rows = [
    (s, *(f"{used} → {now}" for _, used, now in h[6:]), max(now - used for _, used, now in h))
    for s, h in enumerate(histories)
]
report.table(columns, rows)

trained = dict(zip(METHODS, launch.ranks(train_on_rank, n=4, timeout=120)))
endless = (BATCHES * PARTS + 3) * 3  # forward 1, backward 2, on each of four stages
units = dict(zip(METHODS, (BATCHES * PARTS * 4 * 3, BATCHES * (PARTS + 3) * 3, endless, endless)))
print()
columns = {"four stages": "{}"} | {f"rate {rate}": "{:.1%}" for rate in RATES} | {"epoch, in simulated forwards": "{}"}
report.table(columns, [(method, *found, units[method]) for method, found in trained.items()])

# %% [markdown]
# Nearly all large models train synchronously, because synchronous updates are exact for any number of stages.
#
# <details><summary>Does anyone train without a stash?</summary>
#
# **PipeMare** (arXiv 1910.05124) does: no bubble and one copy of the weights, but a backward uses newer weights than its
# forward. PipeMare makes up for that. The longer a stage's delay, the smaller its learning rate at first, and a
# backward estimates the old weights from recent updates.
# </details>
#
# ## Pipelines side by side
#
# More stages mean a larger bubble, so use only as many as the model needs to fit. The other devices hold **replicas**
# of the pipeline, each with its own rows of the batch. The ranks with the same stage average their gradients.

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
# ### Balise 10 · Data × pipeline · further · about 11 min
#
# Ranks are numbered along the pipelines: **rank = replica × n_stages + stage**.
#
# - `make_grid(n_stages)`: make this rank's *data group*, the process group of all ranks with its stage.
#   `dist.new_group` is a collective: *every* rank calls it for *every* group, in the same order, and keeps its own.
# - `hybrid_step`: `step` runs this replica's pipeline, and leaves the gradients of the mean loss of *its* rows in
#   `p.grad`. Turn these gradients, and the loss on the last stages, into those of the mean over the **whole batch**,
#   even if its rows can't be divided equally.
#
# About 3 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The ranks with stage s are `r * n_stages + s`. Weight each replica's mean by its share of the rows; then
# `dist.all_reduce(value, group=data_group)` adds them up. Work in place: `value` is `p.grad` itself.
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
    """One step on the whole batch, on all pipelines: gradients in p.grad; mean loss on the last stages, else None."""
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
# ## Race: PyTorch's schedules
#
# `torch.distributed.pipelining` has the same two schedules.


# %% jupyter={"source_hidden": true}
LIBRARY = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def our_step(actions, messages, place, stage, x, labels):
    """A step of `run_schedule` with two functions that send and receive activations."""

    def step():
        stage.zero_grad()
        run_schedule(actions, stage, place, x, labels, loss_function, MICRO_BATCHES, messages)

    return step


def race_on_ranks(rounds):
    """For each schedule: the largest relative gap between a gradient of yours and of PyTorch's, and a race."""
    place, (x, labels), found = my_place(), make_batch(), {}
    for name, torchs in LIBRARY.items():
        stages = [my_stage(place) for _ in range(2)]
        actions = SCHEDULES[name][0](place.stage, place.n_stages, MICRO_BATCHES)
        steps = {
            f"your {name}": our_step(actions, shapes_once(), place, stages[0], x, labels),
            torchs.__name__: torch_step(torchs, place, stages[1], x, labels),
        }
        race = measure.race(steps, rounds, warmup=1, calls=1, device=launch.device())
        pairs = zip(*(stage.parameters() for stage in stages))
        found[name] = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs), race
    return found


# %%
def torch_step(schedule, place, stage, x, labels):
    """A step with one of PyTorch's schedules; only the first stage is given the batch."""
    part = PipelineStage(stage, place.stage, place.n_stages, launch.device())
    runner = schedule(part, MICRO_BATCHES, loss_fn=loss_function)

    def step():
        stage.zero_grad()
        runner.step(*[x] * (place.before is None), target=labels, return_outputs=False)

    return step


# if there are more ranks than cores, they take turns, and a race says nothing
races = {n: launch.ranks(race_on_ranks, ROUNDS, n=n, timeout=200) for n in (RANKS if FULL else RANKS[:1])}

# %% jupyter={"source_hidden": true}
for n, ranks in races.items():
    for name in LIBRARY:
        gap = max(found[name][0] for found in ranks)
        print(f"{n} ranks on {launch.backend(n)}, {name}: gradients differ by at most {gap:.0e}\n{ranks[0][name][1]}\n")
print(recorded.line("15_pipeline_under_the_hood", "race"))
if FULL:
    medians = {f"{n} ranks": {name: race.medians for name, (_, race) in ranks[0].items()} for n, ranks in races.items()}
    recorded.note("15_pipeline_under_the_hood", "race", medians)

# %% [markdown]
# ## Measured again
#
# The idle share and the step's time come from the four stages that sleep, the peaks from the real stages of the model.

# %% tags=["slide"] jupyter={"source_hidden": true}
columns = {
    "": "{}",
    "idle": "{:.0%}",
    "a step": measure.human_seconds,
    "peak on stage 0, MiB": "{:.1f}",
    "the same, recomputed": "{:.1f}",
}
rows = []
for name, events in sleeping.items():
    kept = [peaks[0][run][0] / MIB for run in (name, f"{name}, recomputed")]
    rows.append((name, measured_bubble(events), lasted(events), *kept))
report.table(columns, rows)

# %% [markdown]
# ## Past this machine · further
#
# The figure *models* 70 billion parameters at 16 bytes each (mixed precision, Adam) on 16 A100s with 80 GB. A
# micro-batch is a sequence of 2,048 tokens. We assume 40 % of 312 TFLOP/s and links of 100 Gb/s. Activation sizes
# follow Korthikanti et al. (2022).

# %% jupyter={"source_hidden": true}
FORWARD = 2 * 70e9 / 16 * 2048 / (0.4 * planner.A100.bfloat16)  # seconds of a micro-batch on a stage
LINK = planner.Link(latency=5e-6, bandwidth=12.5e9)
MESSAGE = 2 * 2048 * 8192  # bytes of an activation between two stages, bfloat16
USABLE = 0.9 * planner.A100.memory / 1e9  # GB
KEPT = 5 * planner.layer_activation_bytes(2048, 1, 8192, 64, recomputation="selective")  # a micro-batch on a stage


def on_sixteen(schedule, n_micro_batches, recompute):
    """(tokens a second, GB of the fullest device)"""
    orders = [schedule(stage, 16, n_micro_batches) for stage in range(16)]
    costs = {"F": FORWARD, "B": FORWARD * (3 if recompute else 2)}
    kept = MESSAGE if recompute else KEPT
    found = planner.simulate(orders, costs, link=LINK, message_bytes=MESSAGE, activation_bytes=kept)
    working = KEPT if recompute else 0  # what is computed again lives for one micro-batch
    return 2048 * n_micro_batches / found.seconds, (16 * 70e9 / 16 + max(found.peak_bytes) + working) / 1e9


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
    fitting = [(m, rate) for m, rate, size in zip(numbers, rates, sizes) if size <= USABLE]
    right.plot(numbers, rates, color="#BBBBBB", linewidth=1, zorder=0)
    right.plot(*zip(*fitting), marker="o", markersize=4, **look) if fitting else None
left.axhline(USABLE, color="black", linewidth=1)
left.text(64, 86, "a card of 80 GB, a tenth free", fontsize=9, ha="center")
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
message = LINK.latency + MESSAGE / LINK.bandwidth
print(f"a micro-batch on a stage, recomputed: {4e3 * FORWARD:.0f} ms; a message: {1e3 * message:.1f} ms")

# %% [markdown]
# With 1F1B, activations stop growing at 16 micro-batches, the number of stages. The model fits only with recomputation.
#
# A stage computes on a micro-batch for much longer than a message takes. So lay the pipeline across the *slow* links of a
# cluster.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>You start to send an activation and continue to compute. When may its memory be
# overwritten?</summary>
#
# Only after <code>wait()</code> on the send (with NCCL it makes the stream wait, not Python). The trap is reused
# memory: a fixed buffer for outputs, or the output of a CUDA graph. The next micro-batch overwrites it, and the
# neighbour receives whatever is there at that moment.
# </details>
#
# <details><summary>The model has batch norm. Does a pipeline with micro-batches train the same model?</summary>
#
# No. Each micro-batch is normalised with its own mean and variance. Layer norm uses one sample only, which is one more
# reason why large models use it.
# </details>
#
# <details><summary>The first and the last layer share one weight (tied embeddings) but are now on two ranks. What do
# you have to add?</summary>
#
# Both ranks hold a copy, and the copies must stay equal. After the backwards, an all-reduce between these two ranks
# adds up their gradients.
# </details>
#
# ## To remember
#
# A pipeline cuts the model by layers and sends only the activations at a cut, so slow links are fast enough. Its price
# is the bubble, $(p-1)/(m+p-1)$ of the time; more micro-batches make it smaller. GPipe and 1F1B have the same bubble,
# but 1F1B keeps the activations of at most as many micro-batches as there are stages. Next: **16_pipeline_schedules**
# makes the bubble smaller still.
