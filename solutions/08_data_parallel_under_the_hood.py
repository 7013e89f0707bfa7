# %% [markdown]
# # Data parallelism, under the hood · about 90 min, core 55
#
# Data parallelism is the first thing to try on more than one device: every rank holds the whole model and trains on its own
# part of the batch. Only one thing has to travel: the gradients. You write it with nothing but `torch.distributed`: the same
# start on all ranks, buckets, all-reduces that run while backward still computes, at the end the all-reduce itself. Then
# your own `DataParallel` runs against PyTorch's.
#
# **What you will gain.** A ResNet-50 has 102 MB of float32 gradients in every step. The first table below says how long they
# travel, and whether that time can disappear behind backward. It is an *estimate*: published speed of a card, links from data
# sheets, nothing measured here.

# %% tags=["setup"]
import contextlib
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

from dlojz_tp import course, launch, measure, modelled_gpu, planner, report, scale, todo

tp = course.open("08_data_parallel_under_the_hood")
tp

# %%
GRADIENTS = 25.6e6 * 4  # bytes of a ResNet-50's gradients, float32
STEP = 64 / planner.A100.resnet50_mixed  # seconds of computing for 64 images on an A100, in mixed precision
FORWARD, BACKWARD = STEP / 3, 2 * STEP / 3
LATENCY = 6e-6  # seconds a message, an assumption
N = 8
print(f"estimate: forward {1e3 * FORWARD:.0f} ms, backward {1e3 * BACKWARD:.0f} ms a step on each of {N} ranks\n")
print(f"{'link (data sheet)':<20}   GB/s   all-reduce   step, one after the other   step, overlapped")
for name, bandwidth in {"10 Gb/s Ethernet": 1.25, "100 Gb/s InfiniBand": 12.5, "NVLink of an A100": 300}.items():
    link = planner.Link(LATENCY, bandwidth * 1e9)
    reduce = planner.all_reduce(GRADIENTS, N, link, "ring")
    overlapped = planner.data_parallel_step(
        FORWARD,
        BACKWARD,
        GRADIENTS,
        lambda size: planner.all_reduce(size, N, link, "ring"),  # noqa: B023
    )
    milliseconds = f"{1e3 * reduce:>7.1f} ms   {1e3 * (STEP + reduce):>22.0f} ms   {1e3 * overlapped.total:>13.0f} ms"
    print(f"{name:<20} {bandwidth:>6}   {milliseconds}")

# %% [markdown]
# On a fast network nearly all of it can hide; on a slow one nothing helps but sending less. You will see both on this machine.
#
# All sizes are here. With two GPUs or more, the ranks talk through NCCL; else they are processes on the CPU, talk through
# gloo, and share the cores.

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
WIDTH = 2048 if FULL else 512
LAYERS = 16 if FULL else 8
BATCH = 2048 if FULL else 48  # rows a rank
CAPACITY = 2 * (WIDTH * WIDTH + WIDTH) * 4  # bytes of a bucket: two layers
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
ROUNDS = 30 if FULL else 20  # of the race

# %% [markdown]
# ## The idea
#
# A loss that is a mean over the batch has a gradient that is a mean over the batch. Cut the batch into $N$ equal shares,
# and the mean of the shares' gradients is the gradient of the whole:
#
# $$\begin{aligned}
# \nabla L &= \frac1{B}\sum_{i=1}^{B} \nabla \ell_i \;=\; \frac1N \sum_{r=0}^{N-1} \nabla L_r \qquad\text{so} \\
# t_\text{step} &= t_\text{forward} + t_\text{backward} + t_\text{all-reduce}
# \;\longrightarrow\; t_\text{forward} + \max(t_\text{backward},\, t_\text{all-reduce})
# \end{aligned}$$
#
# if the all-reduces run *while* backward computes. Backward begins with the last layer: its gradients can travel first.


# %% jupyter={"source_hidden": true}
def draw(axes, row, name, sends):
    axes.barh(row, 3, height=0.35, color="#0072B2", edgecolor="white")
    for k in range(6):
        axes.barh(row, 1, left=3 + k, height=0.35, color="#009E73", edgecolor="white")
        axes.text(3.5 + k, row, f"{6 - k}", ha="center", va="center", color="white", fontsize=9)
    for begin, length, text in sends:
        axes.barh(row + 0.37, length, left=begin, height=0.3, color="#CC79A7", edgecolor="white")
        axes.text(begin + length / 2, row + 0.37, text, ha="center", va="center", color="white", fontsize=8)
    end = sends[-1][0] + sends[-1][1]
    axes.barh(row, 0.6, left=max(9, end), height=0.35, color="#D55E00")
    axes.text(-0.2, row + 0.18, name, ha="right", va="center")


# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.9), layout="constrained")
draw(axes, 0, "one by one", [(9 + 0.85 * k, 0.85, f"{6 - k}") for k in range(6)])
draw(axes, 1, "in buckets", [(9, 1.4, "6, 5"), (10.4, 1.4, "4, 3"), (11.8, 1.4, "2, 1")])
draw(axes, 2, "overlapped", [(5, 1.4, "6, 5"), (7, 1.4, "4, 3"), (9, 1.4, "2, 1")])
axes.set(xlim=(-0.1, 15), ylim=(2.75, -0.35), yticks=[], xlabel="time", xticks=[])
axes.set_title("When do the gradients of layers 1 to 6 travel? (a sketch)", loc="left", fontsize=11)
axes.spines[["left", "top", "right"]].set_visible(False)
colours = {"forward": "#0072B2", "backward, layer": "#009E73", "all-reduce of layers": "#CC79A7", "update": "#D55E00"}
figure.legend([plt.Rectangle((0, 0), 1, 1, color=c) for c in colours.values()], colours, fontsize=9, frameon=False,
              loc="outside lower center", ncols=4)  # fmt: skip
plt.show()

# %% [markdown]
# ## The baseline, measured first
#
# The model is a chain of equal linear layers: its gradients are large for what it computes, so that communication shows.
# The step below is what every rank will do. `average` stands for what you will write; at first it does nothing.


# %% tags=["setup"]
def make_model():
    """A chain of linear layers on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(launch.device())


def make_batch():
    """This rank's rows."""
    torch.manual_seed(1000 + dist.get_rank())
    return torch.randn(BATCH, WIDTH).to(launch.device())


def train_step(model, x, optimizer, average):
    """One step; `average()` makes the gradients those of all ranks."""
    optimizer.zero_grad()
    loss = model(x).square().sum(dim=1).mean()
    loss.backward()
    average()
    optimizer.step()


# %% [markdown]
# `measure.Communications` records every collective of a rank: what, how many bytes, from when to when. The next cell runs
# such steps with a record of each. Everything after the last gradient was computed and before the update is called
# *wait*.


# %%
def watched_step(model, x, optimizer, average):
    """train_step, recorded: returns the entries of this rank."""
    phase = contextlib.ExitStack()
    first = next(model.parameters())

    def last_gradient(_):
        phase.close()
        phase.enter_context(log.phase("wait"))

    hook = first.register_post_accumulate_grad_hook(last_gradient)
    optimizer.zero_grad()
    with measure.Communications() as log:
        with log.phase("forward"):
            loss = model(x).square().sum(dim=1).mean()
        phase.enter_context(log.phase("backward"))
        loss.backward()
        average()
        phase.close()
        with log.phase("optimizer"):
            optimizer.step()
    hook.remove()
    return log.entries()


def watch(wrap, steps=6):
    """On a rank: `wrap(model)` gives the model to call and `average`. Returns the steps' entries and the weights' gap."""
    model, average = wrap(make_model())
    x, optimizer, entries = make_batch(), torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        dist.barrier()
        entries.append(watched_step(model, x, optimizer, average))
    weight = next(model.parameters()).detach().clone()
    zeroth = weight.clone()
    dist.broadcast(zeroth, src=0)
    return entries, ((weight - zeroth).norm() / zeroth.norm()).item()


# %%
def watched(name, wrap, n=2):
    """Watch `n` ranks; returns a record of the quickest step, which other programs disturbed least."""
    results = launch.ranks(watch, wrap, n=n)
    steps = [[entry for rank in step for entry in rank] for step in zip(*(entries for entries, _ in results))]
    quickest = min(steps[1:], key=lambda step: max(e["end"] for e in step) - min(e["start"] for e in step))
    print(f"{name}: after {len(steps)} steps, the weights of the ranks differ by {max(gap for _, gap in results):.2%}")
    device = "cuda" if launch.backend(n) == "nccl" else "cpu"
    return measure.new_record(name, device, communications=quickest)


def alone(model):
    return model, lambda: None


silent = watched("no communication", alone)
phases = [e for e in silent.communications if e["rank"] == 0 and e["kind"] == "phase"]
print(", ".join(f"{e['name']} {measure.human_seconds(e['end'] - e['start'])}" for e in phases))

# %% [markdown]
# Fast, and wrong: the ranks drift apart. They are two trainings, each on half of the data.

# %% [markdown]
# ### Balise 1 · The same start everywhere · about 8 min
#
# The mean of the gradients keeps the ranks together only if they start together. Make `model` on every rank equal to rank
# 0's, in place: **parameters and buffers** (the running statistics of a batch norm are buffers). The parameters stay the
# objects that they are: an optimizer may hold them already. Each tensor travels once, a tied one too. Nothing is returned.
#
# One trap: a tensor may be a *view with gaps*, part of a larger table. gloo sends the memory from where a tensor
# begins, so its elements would not be what arrives; NCCL raises an error. About 5 lines.
#
# <details><summary>Hint</summary>
#
# `model.parameters()` and `model.buffers()` give each tensor once. `dist.broadcast(t, src=0)` is called by all ranks, and
# writes into `t` on all but rank 0. `t.contiguous()` is `t` itself where there are no gaps, and a copy where there are: then
# the copy must come back, `tensor.copy_(...)`.
# </details>


# %% tags=["balise-1"]
@torch.no_grad()
def broadcast_state(model):
    """Give every rank the parameters and buffers of rank 0, in place."""
    # BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        message = tensor.detach().contiguous()
        dist.broadcast(message, src=0)
        if message.data_ptr() != tensor.data_ptr():
            tensor.copy_(message)
    # END SOLUTION


# %%
tp.check(1, broadcast_state)


# %% [markdown]
# See it: batch norm layers whose weights and running statistics are drawn from another seed on each rank.


# %%
def four_starts():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(launch.device())
    model[1].running_mean.normal_()
    before = model[0].weight[0, 0].item(), model[1].running_mean[0].item()
    broadcast_state(model)
    return *before, model[0].weight[0, 0].item(), model[1].running_mean[0].item()


starts = launch.ranks(four_starts, n=RANKS[-1])
print("rank   weight before  running mean before   weight after  running mean after")
for rank, (weight, mean, new_weight, new_mean) in enumerate(starts):
    print(f"{rank:4}   {weight:13.3f}  {mean:19.3f}   {new_weight:12.3f}  {new_mean:18.3f}")

# %% [markdown]
# ### Balise 2 · Each rank's share of the data · further · about 6 min
#
# All ranks draw the **same** permutation, from `seed` and `epoch` alone, and take disjoint parts of it: no message is needed.
# The shares must be **equally long**, for a rank with one batch more would wait for ever for the others' gradients. So the
# permutation is begun again from its front until its length divides, or with `drop_last` its tail is left out; that is
# given.
#
# Write `order`, a tensor, this epoch's permutation of 0 … n − 1, another one in each epoch; and return the share of `rank`, a list,
# from the first `each * world_size` places of `order`. The global random state differs between ranks: leave it alone. About
# 2 lines and 1.
#
# <details><summary>Hint</summary>
#
# `torch.Generator().manual_seed(k)`, and `torch.randperm(n, generator=…)`. `order[a::b]` is every b-th element from the a-th
# on.
# </details>


# %% tags=["balise-2"]
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """The share of `rank` in epoch `epoch`: a list of indices from 0 to n − 1, equally long on all ranks."""
    # BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n, generator=generator)
    # END SOLUTION
    if drop_last:
        each = n // world_size
    else:
        each = -(-n // world_size)
        order = order.repeat(-(-each * world_size // n))
    # BEGIN SOLUTION
    return order[: each * world_size][rank::world_size].tolist()
    # END SOLUTION


# %%
tp.check(2, my_indices)

# %% [markdown]
# See it: 22 samples, 4 ranks, five epochs. The colour says which rank trains on a sample; two colours in a cell are
# padding, a sample that two ranks get.


# %%
def owners(epoch, drop_last):
    """{sample: ranks that train on it}"""
    found = {}
    for rank in range(4):
        for index in my_indices(22, rank, 4, epoch, drop_last=drop_last):
            found.setdefault(index, []).append(rank)
    return found


shown = {drop_last: [owners(epoch, drop_last) for epoch in range(5)] for drop_last in (False, True)}

# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(8.5, 2.3), layout="constrained", sharey=True)
for axes, (drop_last, epochs) in zip(panels, shown.items()):
    for epoch, samples in enumerate(epochs):
        for index, ranks in samples.items():
            width = 0.9 / len(ranks)
            for k, rank in enumerate(ranks):
                axes.barh(epoch, width, left=index - 0.45 + k * width, color=f"C{rank}", height=0.8)
    axes.set(xlabel="sample", xticks=range(0, 22, 3), title=f"drop_last={drop_last}", ylim=(4.5, -0.5))
panels[0].set(ylabel="epoch", yticks=range(5))
figure.legend([plt.Rectangle((0, 0), 1, 1, color=f"C{r}") for r in range(4)], [f"rank {r}" for r in range(4)],
              loc="outside right center", fontsize=9, frameon=False)  # fmt: skip
plt.show()

# %% [markdown]
# ### Balise 3 · Gradients averaged, one by one · about 6 min
#
# After backward, every rank holds the gradients of its own share, in `p.grad` for each `p` of the list `parameters`. Make
# them the mean over the ranks, on every rank. A parameter that was not used, or is frozen, has `p.grad` None: leave it so.
# Each gradient travels once, in its own dtype. Nothing is returned. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `dist.all_reduce(t)` adds up over the ranks, in place. Divide by `dist.get_world_size()`, before or after.
# </details>


# %% tags=["balise-3"]
def average_gradients(parameters):
    """Replace each gradient by its mean over the ranks, one all-reduce a parameter."""
    # BEGIN SOLUTION
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
    # END SOLUTION


# %%
tp.check(3, average_gradients)


# %%
def one_by_one(model):
    parameters = list(model.parameters())
    return model, lambda: average_gradients(parameters)


record_one_by_one = watched("one by one", one_by_one)
report.communications(record_one_by_one)

# %% [markdown]
# The weights agree now. Each rank does half of the work, and then stands and waits, for an all-reduce a parameter, one after
# the other: nothing is hidden behind work.

# %% [markdown]
# ### Balise 4 · Flat buckets · about 15 min
#
# Each message has a fixed cost besides its bytes, and a ResNet-50 has 161 parameters, most of them tiny. So one puts the
# gradients of several parameters into one flat tensor, a **bucket**, and reduces that.
#
# **`make_buckets`** returns a list of lists of parameters, **in reverse order**, for backward computes the last gradients
# first. A bucket holds at most `capacity` **bytes** and one dtype; a parameter that is larger than that gets a bucket of its
# own. Write what happens to one parameter: `size` are its bytes, `room` those that are left in the last bucket.
#
# **`average_in_buckets`**: the gradients of a bucket, all of them there, into one flat tensor, **one** all-reduce, and the
# means back into the gradients, which may lie in memory otherwise than row by row. About 5 and 6 lines.
#
# <details><summary>Hint</summary>
#
# Start a new bucket first where it is needed, then put the parameter in: so a large one needs no case of its own.
# `torch.cat([g.reshape(-1), …])` makes a flat tensor, `flat.split([sizes])` cuts it again, `piece.view(p.shape)` gives a
# piece its shape, `p.grad.copy_` writes.
# </details>


# %% tags=["balise-4"]
def make_buckets(parameters, capacity):
    """Lists of parameters, in reverse order, of at most `capacity` bytes and of one dtype each."""
    buckets, room = [], 0  # room: bytes left in the last bucket
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        # BEGIN SOLUTION
        if not buckets or size > room or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = capacity
        buckets[-1].append(p)
        room -= size
        # END SOLUTION
    return buckets


def average_in_buckets(buckets):
    """Replace each gradient by its mean over the ranks, one all-reduce a bucket."""
    # BEGIN SOLUTION
    for bucket in buckets:
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(piece.view(p.shape))
    # END SOLUTION


# %%
tp.check(4, make_buckets, average_in_buckets)

# %% [markdown]
# How large should a bucket be? Measure it: 300 small gradients (8 kB each), averaged with several capacities. Guess first.

# %%
faster = tp.predict("300 messages of 8 kB or one of 2.4 MB: how many times faster is one?", ...)


# %%
def time_buckets(capacities, rounds=8):
    parameters = [nn.Parameter(torch.zeros(2000, device=launch.device())) for _ in range(300)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    found = {}
    for capacity in capacities:
        buckets, seconds = make_buckets(parameters, capacity), []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            average_in_buckets(buckets)
            measure.synchronize(launch.device())
            seconds.append(time.perf_counter() - start)
        found[capacity] = len(buckets), sorted(seconds)[rounds // 2]
    return found


timed = launch.ranks(time_buckets, [2**k for k in range(13, 23, 2)] + [2**23], n=2)[0]
for capacity, (messages, seconds) in timed.items():
    print(f"buckets of {measure.human_bytes(capacity):>9}: {messages:4} messages  {measure.human_seconds(seconds):>8}")
(_, many), *_, (_, one) = timed.values()
faster.shows(many / one, "× {:.1f}", "The bytes are the same: what is gained is the fixed cost of 299 messages.")

# %% [markdown]
# A single bucket is among the cheapest here, but it could only be sent when *everything* is there. PyTorch's default is
# 25 MB, and 1 MB for the bucket that leaves first.
#
# ## While backward goes on
#
# Given is a bucket that keeps its flat tensor. `place(p)` moves a gradient to its part of it, divided by the number of ranks,
# and makes `p.grad` that part: what the all-reduce writes there is in `p.grad` at once, nothing is copied back.


# %% tags=["setup"]
class Bucket:
    """Parameters whose gradients travel together in `flat`. `missing`: those whose gradient is not placed yet."""

    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = {p: piece.view(p.shape) for p, piece in zip(parameters, self.flat.split(sizes))}
        self.missing = set(parameters)

    def place(self, p):
        """Put p.grad / world_size into `flat`; from now on p.grad is that part of it."""
        view = self.views[p]
        torch.div(p.grad, dist.get_world_size(), out=view)
        p.grad = view
        self.missing.remove(p)


# %% [markdown]
# ### Balise 5 · Overlap · about 15 min
#
# Backward computes the last layer's gradients first, and they could travel while it goes on with the layers before. So an
# all-reduce starts as soon as a bucket is complete, **asynchronously** (`async_op=True`): the call returns at once, and one
# waits later. Who says that a gradient is there? Autograd, if asked by a *hook*.
#
# `Overlap` averages the gradients of `parameters`, a list; each gets a gradient in every step. The buckets are given, and
# `home`, which tells the bucket of a parameter. Write
#
# - the end of `__init__`: `self.ready(p)` shall be called as soon as `p.grad` is complete;
# - `ready(p)`: place it, and if it was the last one missing in its bucket, start the all-reduce;
# - `finish()`, called after backward: wait for all that runs. What must be as new for the next step?
#
# About 2, 4 and 5 lines.
#
# <details><summary>Hint</summary>
#
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` after the gradient has been added to `p.grad`
# (`register_hook` would be called before). `dist.all_reduce(t, async_op=True)` returns a handle that has `wait()`.
# </details>


# %% tags=["balise-5"]
class Overlap:
    """Averages the gradients of `parameters` in buckets of `capacity` bytes, while backward goes on."""

    def __init__(self, parameters, capacity):
        self.buckets = [Bucket(group) for group in make_buckets(parameters, capacity)]
        self.home = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.running = []  # handles
        # BEGIN SOLUTION
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.ready)
        # END SOLUTION

    def ready(self, p):
        """p.grad is complete."""
        # BEGIN SOLUTION
        bucket = self.home[p]
        bucket.place(p)
        if not bucket.missing:
            self.running.append(dist.all_reduce(bucket.flat, async_op=True))
        # END SOLUTION

    def finish(self):
        """Wait; afterwards every p.grad is the mean over the ranks."""
        # BEGIN SOLUTION
        for work in self.running:
            work.wait()
        self.running.clear()
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
        # END SOLUTION


# %%
tp.check(5, Overlap)


# %%
def overlapped(model):
    return model, Overlap(list(model.parameters()), CAPACITY).finish


record_overlapped = watched("overlapped", overlapped)
report.communications([record_one_by_one, record_overlapped])

# %% [markdown]
# Fewer messages, and many of them in flight under the green bar. Where ranks and messages share the same few cores, backward
# becomes longer while messages are copied, and little may be left of the gain.
#
# On GPUs more is left. The next cell runs your functions of balises 4 and 5 on two **modelled** H100, each behind a network
# card of 100 Gb/s: one step of a ResNet-50 with 64 images a rank. Tensors have sizes and no values, each operation takes the
# time of its arithmetic and its bytes, each message that of the formulas at the end of this notebook.


# %%
def modelled_step(clock, overlap):
    """On a modelled rank: one step with your averages, in buckets during backward or in one message after it."""
    model = resnet50().to(launch.device())
    parameters, x = list(model.parameters()), torch.empty(64, 3, 224, 224, device=launch.device())
    one = make_buckets(parameters, 2**30)
    average = Overlap(parameters, 25 * 2**20).finish if overlap else lambda: average_in_buckets(one)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clock.restart()  # what was before is not shown
    train_step(model, x, optimizer, average)


steps = {
    "one all-reduce after backward": (modelled_step, False),
    "your buckets, during backward": (modelled_step, True),
}
runs = [ranks[0] for ranks in modelled_gpu.each_on_ranks(steps, n=2, network=12.5e9).values()]
print(*runs, sep="\n")
report.streams(runs) if runs else None

# %% [markdown]
# Above, the card has nothing to do while the one message travels. Below, all buckets but the last ones travel beside
# backward, and the step is hardly longer than its computing.

# %% [markdown]
# ### Balise 6 · Accumulation, silent until the last micro-batch · further · about 7 min
#
# A large batch that does not fit is computed in micro-batches, and the gradients add up in `p.grad`. Only their sum has to
# travel. So `Accumulating` gives your `Overlap` a switch: inside `with reducer.no_sync():` backward sends nothing. Write
# `ready`.
#
# **`backward_in_parts(loss_of, parts, reducer)`**: `parts` are this rank's micro-batches, tensors `(b_k, …)` of perhaps
# different lengths, and `loss_of(part)` is the mean loss of one. Afterwards `p.grad` is the gradient of the mean loss
# over the **whole** batch, and every rank has equally many rows of it. But its micro-batches differ: a mean over few
# rows counts less than one over many. Each graph is freed before the next one is made, and the last backward sends.
# Write what is done with one `part`. About 2 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The hooks still fire inside `no_sync()`: `ready` looks at the switch. `contextlib.nullcontext()` is the context that does
# nothing. Each mean counts by its number of rows, `len(part) / total`.
# </details>


# %% tags=["balise-6"]
class Accumulating(Overlap):
    """Overlap with `no_sync()`, inside which backward sends nothing."""

    sending = True

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, gradients only add up on this rank."""
        self.sending = False
        try:
            yield  # what stands inside the `with` runs here
        finally:  # in any case, an exception too
            self.sending = True

    def ready(self, p):
        """p.grad is complete, for this micro-batch."""
        # BEGIN SOLUTION
        if self.sending:
            super().ready(p)
        # END SOLUTION


def backward_in_parts(loss_of, parts, reducer):
    """Leave in p.grad the gradient of the mean loss over all rows of `parts` and all ranks."""
    total = sum(len(part) for part in parts)
    for k, part in enumerate(parts):
        last = k == len(parts) - 1
        # BEGIN SOLUTION
        with contextlib.nullcontext() if last else reducer.no_sync():
            (loss_of(part) * len(part) / total).backward()
        # END SOLUTION
    reducer.finish()


# %%
tp.check(6, Accumulating, backward_in_parts)

# %% [markdown]
# ### Balise 7 · Parameters that took no part · further · about 12 min
#
# A parameter that was not used in a step gets no gradient, and its hook never fires. Then its bucket is never complete. Worse:
# if rank 0 used head A and rank 1 head B, their buckets are complete in another order, and collectives are matched **by
# their order alone**: gradients of A would be added to those of B.
#
# `Reducer` is `Overlap` with the switch of balise 6, written out in one piece, for any list of parameters. Write
#
# - in `__init__`: leave in the list `parameters` those to average, in the order of the list, which is the same on all ranks. Frozen ones (`requires_grad` False) are left out, and one that is in the list
#   twice (tied) travels once;
# - `start_complete`: start the buckets that are complete, **strictly in their order**, and wait for none. `self.running` tells how many were
#   started;
# - the beginning of `finish`: place what is still missing. A parameter that this rank did not use counts as **zero**; one
#   that was used inside `no_sync()` has a gradient though no hook fired.
#
# About 1, 2 and 5 lines.
#
# <details><summary>Hint</summary>
#
# `dict.fromkeys(list)` keeps the order and drops repetitions. Bucket k starts only when bucket k − 1 was started: a `while`
# over the next one. `place` takes parameters out of `bucket.missing`: go through a copy of it.
# </details>


# %% tags=["balise-7"]
class Reducer:
    """Averages gradients in buckets during backward; parameters may be frozen, tied, or not used in every step."""

    def __init__(self, parameters, capacity):
        # BEGIN SOLUTION
        parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        # END SOLUTION
        self.buckets = [Bucket(group) for group in make_buckets(parameters, capacity)]
        self.home = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.running, self.sending = [], True
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.ready)

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, gradients only add up on this rank."""
        self.sending = False
        try:
            yield
        finally:
            self.sending = True

    def ready(self, p):
        """p.grad is complete, for this micro-batch."""
        if self.sending:
            self.home[p].place(p)
            self.start_complete()

    def start_complete(self):
        """Start the buckets that are complete, strictly in their order."""
        # BEGIN SOLUTION
        while len(self.running) < len(self.buckets) and not self.buckets[len(self.running)].missing:
            self.running.append(dist.all_reduce(self.buckets[len(self.running)].flat, async_op=True))
        # END SOLUTION

    def finish(self):
        """Send what backward left, zeros for what was not used; wait."""
        # BEGIN SOLUTION
        for bucket in self.buckets:
            for p in list(bucket.missing):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                bucket.place(p)
        # END SOLUTION
        self.start_complete()
        for work in self.running:
            work.wait()
        self.running.clear()
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)


# %%
tp.check(7, Reducer)

# %% [markdown]
# ## The all-reduce itself
#
# How can $N$ ranks add up a tensor? If all send theirs to rank 0, its link carries $N$ tensors. In a **ring**, each
# rank sends to the next one only, and the tensor is cut into $N$ chunks. First round, *reduce-scatter*: in each of
# $N-1$ steps every rank passes one chunk on, and who gets it adds its own part. Second round, *all-gather*: the
# finished chunks go round. Each sends
#
# $$2\,(N-1)\,\frac{n}{N} \;=\; 2\,\frac{N-1}{N}\,n \quad\text{bytes, less than } 2n \text{ however many ranks there are,}$$
#
# and no algorithm in which the ranks do the adding needs less (Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms
# for clusters of workstations*, 2009; where the network's switches add, a rank sends about $n$). Below: how many ranks' values each chunk holds, after each step.

# %%
n = 4
held = torch.ones(n, n)  # rank, chunk
history = [held.clone()]
for step in range(2 * (n - 1)):
    before = held.clone()
    for rank in range(n):
        chunk, left = (rank - step - 1) % n, (rank - 1) % n
        held[rank, chunk] = before[left, chunk] + (1 if step < n - 1 else 0)
    history.append(held.clone())

# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, len(history), figsize=(8.5, 1.9), layout="constrained", sharey=True)
for step, (axes, state) in enumerate(zip(panels, history)):
    axes.imshow(state, vmin=0, vmax=n, cmap="Blues")
    for rank in range(n):
        for chunk in range(n):
            colour = "white" if state[rank, chunk] > 2 else "black"
            axes.text(chunk, rank, f"{state[rank, chunk]:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_title("start" if not step else f"step {step}", fontsize=9)
    axes.set(xticks=[], yticks=range(n), xlabel="chunks")
panels[0].set(yticklabels=[f"rank {r}" for r in range(n)])
plt.show()

# %% [markdown]
# ### Balise 8 · A ring all-reduce · further · about 8 min
#
# `ring_all_reduce` returns the sum of `x` over the ranks, by messages between neighbours only. `chunks` are the N parts of
# `total`; some are one element longer. The exchange is given: `leaving` goes to the next rank, and what comes from the one
# before lies in `arriving`. Write, for each step,
#
# 1. which chunk is `leaving`, and to which one, `target`, belongs what arrives: look at the picture;
# 2. what is done with `arriving`, in the first round and in the second. More memory than `total` and a chunk is not needed.
#
# Each chunk is added up on one way round and then copied, so all ranks hold the same **bits** in the end. About 1 and 4
# lines.
#
# <details><summary>Hint</summary>
#
# In step 0, rank r sends chunk r. What it sends in step t is what it received in step t − 1, in *both* rounds: chunk
# (r − t) mod N. The rank before it sends at the same time, by the same rule.
# </details>


# %% tags=["balise-8"]
def ring_all_reduce(x):
    """Sum of `x` over the ranks, on every rank, by messages to the next rank only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(n)
    buffer = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(2 * (n - 1)):
        # BEGIN SOLUTION
        leaving, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        # END SOLUTION
        arriving = buffer[: len(target)]
        send = dist.P2POp(dist.isend, leaving, (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        # BEGIN SOLUTION
        if step < n - 1:
            target += arriving
        else:
            target.copy_(arriving)
        # END SOLUTION
    return total


# %%
tp.check(8, ring_all_reduce)


# %%
def ring_against_library(rounds):
    x = torch.randn(2**20, device=launch.device())
    candidates = {"your ring": lambda: ring_all_reduce(x), "dist.all_reduce": lambda: dist.all_reduce(x.clone())}
    return measure.race(candidates, repeats=rounds, warmup=2, calls=1, device=launch.device())


print(launch.ranks(ring_against_library, ROUNDS, n=RANKS[-1])[0])

# %% [markdown]
# Sums of 4 MB. The bytes are the same; the library cuts each chunk again, and adds one part while the next one travels.
#
# ## Your own DataParallel
#
# All pieces together, in ten lines.


# %%
class DataParallel(nn.Module):
    """A module whose gradients are the mean over all ranks, once `finish()` has been called after backward."""

    def __init__(self, module, capacity=25 * 2**20):
        super().__init__()
        self.module = module
        broadcast_state(module)
        self.reducer = Reducer(list(module.parameters()), capacity)
        self.no_sync, self.finish = self.reducer.no_sync, self.reducer.finish

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)


def yours(model):
    model = DataParallel(model, CAPACITY)
    return model, model.finish


def torchs(model):
    return DistributedDataParallel(model, bucket_cap_mb=CAPACITY / 2**20), lambda: None


record_yours = watched("yours", yours)
record_torchs = watched("DistributedDataParallel", torchs)
report.communications([record_yours, record_torchs])

# %% [markdown]
# The same idea, visibly: the same bytes in buckets of two layers, started in the same order while backward goes on.
# PyTorch's waits inside `backward()`, yours in `finish()`: the grey bar in both.
#
# What yours lacks: PyTorch's puts everything into one bucket in its first step, notes in which order the gradients
# really come, and then builds its buckets in that order, once. So a profile of the first step shows no overlap.
#
# ## Race
#
# Whole steps, in turn, in the same processes: yours, PyTorch's as it is, and PyTorch's with
# `gradient_as_bucket_view=True`, which like yours saves the copy out of the bucket. Yours runs Python for each parameter,
# PyTorch's C++. Guess before you run it.

# %%
slower = tp.predict("How many times as long as with PyTorch's DDP does a step with yours take, on 2 ranks?", ...)


# %%
def race_on_ranks(rounds):
    wrapped = {
        "yours": yours(make_model()),
        "DDP": torchs(make_model()),
        "DDP, bucket views": (
            DistributedDataParallel(make_model(), bucket_cap_mb=CAPACITY / 2**20, gradient_as_bucket_view=True),
            lambda: None,
        ),
    }
    x, steps = make_batch(), {}
    for name, (model, average) in wrapped.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps[name] = lambda m=model, o=optimizer, a=average: train_step(m, x, o, a)
    return measure.race(steps, repeats=rounds, warmup=4, calls=1, device=launch.device())


races = {n: launch.ranks(race_on_ranks, ROUNDS, n=n, timeout=120)[0] for n in RANKS}
for n, race in races.items():
    print(f"{n} ranks on {launch.backend(n)}\n{race}\n")
medians = races[2].medians
why = "Both send the same bytes in the same buckets, and Python has little to do beside them; hundreds of tiny parameters would show it."
slower.shows(medians["yours"] / medians["DDP"], "× {:.2f}", why)

# %% [markdown]
# ## Past this machine · further
#
# What would a thousand ranks do? The usual **model** gives each message a latency α and each byte its share of the
# bandwidth β. A ring has 2 (N − 1) steps, a tree 2 log₂ N:
#
# $$t_\text{ring} = 2\,(N-1)\,\alpha + 2\,\frac{N-1}{N}\,\frac{n}{\beta}
# \qquad\qquad t_\text{tree} = 2\,\lceil\log_2 N\rceil\,\alpha + 2\,\frac{n}{\beta}$$
#
# (The tree's bytes do not count once for each level: a message is cut into pieces that follow each other, and two trees
# share it.) `planner.all_reduce` has both, and *best*, the quicker one, which is what a library takes. Besides, each
# call has a cost of its own, however few the ranks: a kernel is started, and two streams wait for each other.
# `planner.data_parallel_step` starts a bucket when its part of backward is done and the one before has ended.

# %%
LINK = planner.Link(LATENCY, 12.5e9)  # 100 Gb/s for each rank
CALL = 20e-6  # seconds that a collective costs by itself, an assumption


def efficiency(ranks, messages, overlap, algorithm):
    """Model: time of a step without communication over its time with it, for the ResNet-50 above."""
    step = planner.data_parallel_step(
        FORWARD, BACKWARD, GRADIENTS, lambda size: CALL + planner.all_reduce(size, ranks, LINK, algorithm),
        bucket_bytes=GRADIENTS / messages, overlap=overlap,
    )  # fmt: skip
    return planner.scaling_efficiency(step)


WAYS = {
    "161 messages, after backward, ring": (161, False, "ring"),
    "one message, after backward, ring": (1, False, "ring"),
    "161 messages, overlapped, ring": (161, True, "ring"),
    "4 buckets of 26 MB, overlapped, ring": (4, True, "ring"),
    "4 buckets of 26 MB, overlapped, best": (4, True, "best"),
}
worlds = [2**k for k in range(1, 11)]
curves = {name: [efficiency(n, *way) for n in worlds] for name, way in WAYS.items()}
for name, curve in curves.items():
    print(f"model, {name:<37} {worlds[2]} ranks {curve[2]:4.0%}, {worlds[-1]} ranks {curve[-1]:4.0%}")

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
for name, curve in curves.items():
    look = "--" if "best" in name else "-"
    axes.plot(worlds, [100 * share for share in curve], look, marker="o", markersize=4, label=name)
axes.set_xscale("log", base=2)
axes.set(xticks=worlds, xticklabels=worlds, xlabel="ranks", ylabel="efficiency (%)", ylim=(0, 103))
axes.set_title("How well would a ResNet-50 scale? (model, not measured: 6 µs a message, 12.5 GB/s)", fontsize=10)
axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# With few ranks the bandwidth decides, and overlap hides nearly all of it, if the messages are large: 161 small ones cost 161
# calls and 161 times the latency. With many ranks the latency decides: a ring of 1,024 has 2,046 steps for each message. So
# there are buckets, and so libraries change from rings to trees. An efficiency that does not name its algorithm says little.
#
# Sources: Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005); Sanders,
# Speck and Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan* (2009); Li and others, *PyTorch
# Distributed: experiences on accelerating data parallel training* (2020), from which the 25 MB and the reverse order come.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Gradients in float16: divide before the sum or after it?</summary>
#
# Before. Two gradients of 40,000 have the mean 40,000, but their sum is beyond 65,504, the largest float16: infinite. Your
# <code>place</code> divides first, as PyTorch does. With very many ranks small gradients may then underflow: bfloat16 has
# neither problem.
# </details>
#
# <details><summary>Your DataParallel needs <code>finish()</code>. How does PyTorch's know that backward has ended?</summary>
#
# It asks the autograd engine to call it back when the running backward is done
# (<code>torch.autograd.Variable._execution_engine.queue_callback</code>), and waits there. It also looks through the graph
# in forward, if told so (<code>find_unused_parameters</code>), to know early which hooks will not fire. Yours learns that in
# <code>finish()</code>: simpler, but a bucket that is never complete keeps all later ones from overlapping.
# </details>
#
# <details><summary>A parameter was used by no rank. Is it the same whether its gradient is zero or None?</summary>
#
# Not for the optimizer. With None it skips the parameter; with zero, momentum goes on moving it, and weight decay goes on
# shrinking it. With <code>find_unused_parameters=True</code>, PyTorch's DDP sends one more message, which parameters were used
# anywhere, and leaves the others None; without, the next forward raises an error.
# </details>
#
# ## To remember
#
# Data parallelism is one sentence, the mean of the gradients of equal shares is the gradient of the whole, and four cares:
# start alike, share fairly, call the same collectives in the same order on every rank, and send while you compute. The
# price of a step is the longer of backward and all-reduce. You have written what `DistributedDataParallel` does; the next
# practical work, **09_ddp**, uses it: in a real training function, with metrics, batch norm, checkpoints and jobs.
