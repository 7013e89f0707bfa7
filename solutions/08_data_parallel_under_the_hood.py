# %% [markdown] tags=["slide"]
# # Data parallelism, under the hood · about 115 min, core 55
#
# In data parallelism, every rank holds the whole model and trains on its own part of the batch. Only the gradients
# travel. You average them, pack them into buckets, and send them while backward is still computing. Finally, your
# `DataParallel` races PyTorch's `DistributedDataParallel`.
#
# **What you will gain.** The baseline sums 300 gradients in 300 messages. You send the same bytes in one, and start
# most all-reduces *during* backward.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import statistics
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


# %% tags=["setup"] jupyter={"source_hidden": true}
GPUS = torch.cuda.device_count()  # with two or more, ranks talk through NCCL; otherwise through gloo, on the CPU
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
WIDTH = 2048 if FULL else 512
LAYERS = 16 if FULL else 8
BATCH = 2048 if FULL else 48  # rows a rank
CAPACITY = 2 * (WIDTH * WIDTH + WIDTH) * 4  # bytes of a bucket: two layers
RANKS = (2,) if GPUS in (2, 3) else (2, 4)
ROUNDS = 30 if FULL else 20  # of the race

# %% [markdown]
# ## The baseline: one message per gradient
#
# `dist.all_reduce(t)` adds up `t` over all ranks, in place. Two ranks do this for 300 gradients of 8 kB, one after the
# other.


# %% tags=["setup"] jupyter={"source_hidden": true}
def small_gradients(average, rounds=8):
    """On a rank: (messages, bytes, median seconds) of `average(parameters)` with 300 gradients of 8 kB."""
    parameters = [nn.Parameter(torch.zeros(2000, device=launch.device())) for _ in range(300)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        average(parameters)
        measure.synchronize(launch.device())
        seconds.append(time.perf_counter() - start)
    with measure.Communications() as log:
        average(parameters)
    sent = [entry["bytes"] for entry in log.entries()]
    return len(sent), sum(sent), statistics.median(seconds)


SMALL = {"300 gradients": "{}", "messages": "{}", "bytes": measure.human_bytes, "time": measure.human_seconds}


# %%
def sum_each(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)


baseline = launch.ranks(small_gradients, sum_each, n=2)[0]
report.table(SMALL, [("one by one", *baseline)])

# %% [markdown] tags=["slide"]
# ## The idea
#
# Cut the batch into $N$ equal shares. The mean of the shares' gradients is the gradient of the whole:
#
# $$\nabla L = \frac1N \sum_{r=0}^{N-1} \nabla L_r$$
#
# The all-reduce costs time, unless it runs *while* backward computes. Backward starts at the last layer, so its
# gradients can leave first.


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


# %% tags=["slide"] jupyter={"source_hidden": true}
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
# Look at two ranks (`%%ranks`, see 00). Each has built its own layer:

# %%
# %%ranks 2
torch.manual_seed(dist.get_rank())  # as if each had started by itself
layer = torch.nn.Linear(3, 1, bias=False).to(launch.device())
layer.weight.data
# %% [markdown]
# The model is a chain of linear layers of the same size. In the training step, `average` stands for the code that you
# will write.


# %% tags=["setup"] jupyter={"source_hidden": true}
def make_model():
    """A chain of linear layers on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(launch.device())


def make_batch():
    """This rank's rows."""
    torch.manual_seed(1000 + dist.get_rank())
    return torch.randn(BATCH, WIDTH).to(launch.device())


# %% tags=["setup"]
def train_step(model, x, optimizer, average):
    """One step; `average()` replaces the gradients by their means over the ranks."""
    optimizer.zero_grad()
    loss = model(x).square().sum(dim=1).mean()
    loss.backward()
    average()
    optimizer.step()


# %% tags=["setup"] jupyter={"source_hidden": true}
def watch(wrap, steps=6):
    """On a rank: record steps like train_step. Returns their entries, and how far the weights are from rank 0's."""

    def last_gradient(_):
        phase.close()
        phase.enter_context(log.phase("wait"))

    model, x, entries = make_model(), make_batch(), []
    next(model.parameters()).register_post_accumulate_grad_hook(last_gradient)
    model, average = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        dist.barrier()
        phase = contextlib.ExitStack()
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
        entries.append(log.entries())
    weight = next(model.parameters()).detach().clone()
    zeroth = weight.clone()
    dist.broadcast(zeroth, src=0)
    return entries, ((weight - zeroth).norm() / zeroth.norm()).item()


STEPS = {"a step of rank 0": "{}", "messages": "{}", "started in backward": "{}", "bytes": measure.human_bytes,
         "weights differ by": "{:.2%}"}  # fmt: skip


def watched(name, wrap, n=2):
    """Watch n ranks: (a row of the table STEPS, a record of the quickest step, as it was the least disturbed)."""
    results = launch.ranks(watch, wrap, n=n)
    steps = [[entry for rank in step for entry in rank] for step in zip(*(entries for entries, _ in results))]
    quickest = min(steps[1:], key=lambda step: max(e["end"] for e in step) - min(e["start"] for e in step))
    own = [e for e in quickest if e["rank"] == 0]
    sent = [e for e in own if e["kind"] != "phase"]
    end = next(e["end"] for e in own if e["name"] == "backward")
    early = sum(e["start"] < end for e in sent)
    row = name, len(sent), early, sum(e["bytes"] for e in sent), max(gap for _, gap in results)
    device = "cuda" if launch.backend(n) == "nccl" else "cpu"
    return row, measure.new_record(name, device, communications=quickest)


def timeline(*records):
    """When each rank computes and sends, for each record."""
    figure = report.communications(records)
    figure.suptitle("When does a rank compute, and when does it send?")
    for record, axes in zip(records, figure.axes[1::2]):
        axes.set_title(record.name, loc="left")
    return figure


# %% [markdown]
# ### Balise 1 · The same start everywhere · further · about 11 min
#
# Averaged gradients keep the ranks together only if all start from the same weights. Copy rank 0's **parameters and
# buffers** into `model` on every other rank, in place: an optimizer may already hold the parameters. Each tensor
# travels once. Return nothing. About 5 lines.
#
# A view with *gaps* in memory, such as `t[::2]`, can't be sent directly: gloo would send the wrong memory.
#
# <details><summary>Hint</summary>
#
# `model.parameters()` and `model.buffers()` give each tensor once. All ranks call `dist.broadcast(t, src=0)`, which
# writes into `t` on all but rank 0. `t.contiguous()` is `t` itself if there are no gaps, and otherwise a copy. Write
# that copy back with `tensor.copy_(...)`.
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
# ### Balise 2 · Each rank's share of the data · further · about 9 min
#
# All ranks draw the **same** permutation, from `seed` and `epoch`, and take disjoint shares of it without any message.
# The shares must have **equal lengths**: a rank with an extra batch would wait for gradients that never come. The given
# lines pad the permutation, or drop its tail.
#
# Write `order`, a tensor: this epoch's permutation of 0 … n − 1. Then return the share of `rank`, a list, from the
# first `each * world_size` entries. Leave the global random state alone. About 2 lines, then 1.
#
# <details><summary>Hint</summary>
#
# `torch.Generator().manual_seed(k)` and `torch.randperm(n, generator=…)`. `order[a::b]` takes every b-th element,
# starting at a.
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
# ### Balise 3 · Average the gradients, one by one · about 10 min
#
# After backward, `p.grad` is the gradient of this rank's share, for each `p` in the list `parameters`. Replace it by
# its mean over the ranks, on every rank. If `p.grad` is None, leave it. Each gradient travels once, in its own dtype.
# Return nothing. About 4 lines.
#
# <details><summary>Hint</summary>
#
# Divide by `dist.get_world_size()`, before or after the sum.
# </details>


# %% tags=["balise-3"]
def average_gradients(parameters):
    """Replace each gradient by its mean over the ranks, with one all-reduce per parameter."""
    # BEGIN SOLUTION
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
    # END SOLUTION


# %%
tp.check(3, average_gradients)

# %% [markdown]
# Each rank's gradient, before your average and after it:

# %%
# %%ranks 2 --take average_gradients
layer = torch.nn.Linear(3, 1, bias=False).to(launch.device())
layer(torch.full((1, 3), 1.0 + dist.get_rank(), device=launch.device())).sum().backward()
before = layer.weight.grad.tolist()
average_gradients(list(layer.parameters()))
before, layer.weight.grad.tolist()


# %%
def silent(model):
    return model, lambda: None


def one_by_one(model):
    parameters = list(model.parameters())
    return model, lambda: average_gradients(parameters)


row_silent, _ = watched("no communication", silent)
row_one_by_one, record_one_by_one = watched("one by one", one_by_one)
report.table(STEPS, [row_silent, row_one_by_one])
timeline(record_one_by_one)

# %% [markdown]
# Without communication the ranks drift apart: each trains its own network. With your averages they agree. But every
# all-reduce waits for the end of backward, and for the all-reduce before it.

# %% [markdown]
# ### Balise 4 · Flat buckets · about 18 min
#
# Each message has a fixed cost, and most of a ResNet-50's 161 parameter tensors are tiny. So we copy several
# gradients into one flat tensor, a **bucket**, and reduce that.
#
# **`make_buckets`** returns lists of parameters, **in reverse order**, because backward computes the last gradients
# first. A bucket has at most `capacity` **bytes** and a single dtype. A larger parameter gets its own bucket. `size` is
# a parameter's size in bytes, and `room` the bytes left in the last bucket.
#
# **`average_in_buckets`** copies the gradients of a bucket (none is None) into one flat tensor, does **one**
# all-reduce, and copies the means back. Some gradients aren't contiguous.
#
# About 5 and 6 lines.
#
# <details><summary>Hint</summary>
#
# If the parameter doesn't fit, start a new bucket. Then append it: a large parameter needs no special case.
# `torch.cat([g.reshape(-1), …])` makes a flat tensor, `flat.split([sizes])` cuts it, `piece.view(p.shape)` restores a
# shape.
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
    """Replace each gradient by its mean over the ranks, with one all-reduce per bucket."""
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
# Average the 300 gradients again, in buckets of growing size.

# %%
faster = tp.predict("How many times faster is one message of 2.4 MB than 300 messages of 8 kB?", ...)


# %%
def with_capacity(capacity):
    return lambda parameters: average_in_buckets(make_buckets(parameters, capacity))


timed = {f"buckets of {kib:,} KiB": launch.ranks(small_gradients, with_capacity(kib * 1024), n=2)[0]
         for kib in (8, 32, 128, 512, 2048, 8192)}  # fmt: skip
report.table(SMALL, [(name, *row) for name, row in timed.items()])
many, *_, one = timed.values()
faster.shows(many[2] / one[2], "× {:.1f}", "The bytes are the same: you saved the fixed cost of 299 messages.")

# %% [markdown]
# A single bucket can't be sent until *all* gradients are ready.
#
# ## Send while backward computes
#
# A `Bucket` keeps its flat tensor. `place(p)` copies a gradient, divided by the number of ranks, into `flat`, and
# makes `p.grad` a view of it. After the all-reduce, the means are in `p.grad` without copying back.


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
# ### Balise 5 · Overlap · about 19 min
#
# As soon as a bucket is complete, start its all-reduce **asynchronously** (`async_op=True`): the call returns
# immediately, and you wait later. A *hook* makes autograd call you when a gradient is ready.
#
# The buckets of `Overlap` are given, and `home` maps a parameter to its bucket. Every parameter gets a gradient in each
# step. Write
#
# - the end of `__init__`: have `self.ready(p)` called as soon as `p.grad` is complete;
# - `ready(p)`: place the gradient. If it was the last one missing in its bucket, start the all-reduce;
# - `finish()`, called after backward: wait for all running all-reduces, and reset the state for the next step.
#
# About 2, 4 and 5 lines.
#
# **Write all of it:** `tp.open_task(5)` gives you only names and docstrings. Build data parallelism as one class: hooks,
# buckets, sums that run during backward, means in place.
#
# <details><summary>Hint</summary>
#
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` after the gradient has been added to `p.grad` (`register_hook`
# would call too early). `dist.all_reduce(t, async_op=True)` returns a handle with `wait()`.
# </details>


# %% tags=["balise-5", "slide-mistake=hook-too-early"]
class Overlap:
    """Averages the gradients of `parameters` over the ranks while backward runs.

    `make_buckets(parameters, capacity)` groups the parameters. Each bucket is one all-reduce of one flat tensor. It starts,
    asynchronously, as soon as the bucket's last gradient is complete. Every parameter gets one gradient in a backward
    and is sent once. Nothing is written into a tensor while its all-reduce runs, and the parameters don't change. Steps
    follow each other; between them, p.grad may be set to None or to zeros in place.
    """

    def __init__(self, parameters, capacity):
        self.buckets = [Bucket(group) for group in make_buckets(parameters, capacity)]
        self.home = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.running = []  # handles
        # BEGIN SOLUTION
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.ready)
        # END SOLUTION

    def ready(self, p):
        """p.grad is complete; called by a hook on p. If p is the last of its bucket, start the all-reduce."""
        # BEGIN SOLUTION
        bucket = self.home[p]
        bucket.place(p)
        if not bucket.missing:
            self.running.append(dist.all_reduce(bucket.flat, async_op=True))
        # END SOLUTION

    def finish(self):
        """Called after backward. Wait; then every p.grad is the mean over the ranks, ready for the next step."""
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


row_overlapped, record_overlapped = watched("overlapped", overlapped)
report.table(STEPS, [row_one_by_one, row_overlapped])
timeline(record_one_by_one, record_overlapped)

# %% [markdown]
# Most messages now start during backward. On a CPU they compete with backward for the cores, so you may save
# little time. A GPU computes and sends at the same time: the next cell runs one step of a ResNet-50 with your code, on
# two **modelled** H100s with a 100 Gb/s link and 64 images each.


# %% tags=["slide"]
def modelled_step(clock, overlap):
    """On a modelled rank: one step with your averages, in buckets during backward or in one message after it."""
    model = resnet50().to(launch.device())
    parameters, x = list(model.parameters()), torch.empty(64, 3, 224, 224, device=launch.device())
    one = make_buckets(parameters, 2**30)
    average = Overlap(parameters, 25 * 2**20).finish if overlap else lambda: average_in_buckets(one)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clock.restart()
    train_step(model, x, optimizer, average)


steps = {
    "one all-reduce after backward": (modelled_step, False),
    "your buckets, during backward": (modelled_step, True),
}
runs = [ranks[0] for ranks in modelled_gpu.each_on_ranks(steps, n=2, network=12.5e9).values()]
print(*runs, sep="\n")
report.streams(runs) if runs else None

# %% [markdown]
# ### Balise 6 · Accumulate, and send with the last micro-batch · further · about 10 min
#
# If a batch doesn't fit in memory, the gradients of its micro-batches add up in `p.grad`, and only the sum has to
# travel. Inside `with reducer.no_sync():`, backward sends nothing. Write `ready`, and the lines for one `part`.
#
# **`backward_in_parts(loss_of, parts, reducer)`**: `parts` are this rank's micro-batches, tensors `(b_k, …)` of
# different lengths. `loss_of(part)` is the *mean* loss of one. Afterwards `p.grad` is the gradient of the mean loss
# over the **whole** batch; every rank has the same number of rows. Each graph is freed before the next is built, and
# only the last backward sends. About 2 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The hooks still fire inside `no_sync()`: let `ready` look at `sending`. `contextlib.nullcontext()` is a context that
# does nothing. Weight each mean by its share of rows, `len(part) / total`.
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
            yield  # the body of the `with` runs here
        finally:  # even after an exception
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
# ### Balise 7 · Parameters that were not used · further · about 15 min
#
# The hook of an unused parameter never fires, so its bucket is never complete. If rank 0 uses head A and rank 1 head B,
# their buckets complete in different orders. Collectives are matched **by order alone**: A's gradients would be added
# to B's.
#
# `Reducer` is `Overlap` with `no_sync`, for any list of parameters. Write
#
# - `__init__`: keep in `parameters` only those to average, in order: no frozen ones, and tied ones (listed twice) once;
# - `start_complete`: start the complete buckets, **strictly in order**, without waiting. `len(self.running)` of them
#   have already started;
# - the beginning of `finish`: place what is missing. A parameter that this rank didn't use counts as **zero**. One that
#   was used inside `no_sync()` has a gradient, though `ready` skipped it.
#
# About 1, 2 and 5 lines.
#
# <details><summary>Hint</summary>
#
# `dict.fromkeys(list)` keeps the order and drops repetitions. Bucket k starts only after bucket k − 1: use a `while`
# loop that looks at the next one. `place` removes parameters from `bucket.missing`, so loop over a copy.
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
        """Send the buckets that backward did not complete, with zeros for unused parameters, and wait for all."""
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
# In a **ring**, each rank sends to the next one only, and a tensor of $n$ bytes is cut into $N$ chunks. In the $N-1$
# steps of the *reduce-scatter*, every rank passes a chunk on, and the receiver adds its own part. Then the *all-gather*
# passes the finished chunks around. Each rank sends $2\,\frac{N-1}{N}\,n < 2n$ bytes, however many ranks there are.
# Each number below counts the ranks in a chunk's sum.

# %% jupyter={"source_hidden": true}
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
# ### Balise 8 · A ring all-reduce · further · about 11 min
#
# `ring_all_reduce` returns the sum of `x` over the ranks. `chunks` are the N parts of `total`; some are longer by one.
# The exchange is given: `leaving` goes to the next rank, and the previous rank's chunk ends up in `arriving`. For each
# step, write
#
# 1. the chunk that is `leaving`, and the chunk `target` to which the arriving one belongs;
# 2. what to do with `arriving` in the reduce-scatter and in the all-gather, without more memory.
#
# All ranks end up with the same **bits**. About 1 and 4 lines.
#
# <details><summary>Hint</summary>
#
# In step 0, rank r sends chunk r. In step t it sends what it received in step t − 1, in *both* phases: chunk (r − t)
# mod N. The previous rank sends by the same rule.
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
# %% [markdown]
# ## Your own DataParallel
#
# Put your pieces together, and compare the result with PyTorch's.


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


# %%
row_yours, record_yours = watched("yours", yours)
row_torchs, record_torchs = watched("DistributedDataParallel", torchs)
timeline(record_yours, record_torchs)

# %% [markdown]
# PyTorch waits inside `backward()`; you wait in `finish()`. Now race whole steps. For each parameter, your hooks run
# Python, and PyTorch's run C++.

# %%
slower = tp.predict("On 2 ranks, how many times as long does a step take with your class as with DDP?", ...)


# %% jupyter={"source_hidden": true}
def race_on_ranks(rounds):
    x, steps = make_batch(), {}
    for name, wrap in {"yours": yours, "DDP": torchs}.items():
        model, average = wrap(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps[name] = lambda m=model, o=optimizer, a=average: train_step(m, x, o, a)
    return measure.race(steps, repeats=rounds, warmup=4, calls=1, device=launch.device())


# %%
races = {n: launch.ranks(race_on_ranks, ROUNDS, n=n, timeout=120)[0] for n in RANKS}
for n, race in races.items():
    print(f"{n} ranks on {launch.backend(n)}\n{race}\n")
medians = races[2].medians
why = "Both send the same bytes in the same buckets, and with so few parameters Python has little to do."
slower.shows(medians["yours"] / medians["DDP"], "× {:.2f}", why)

# %% [markdown]
# ## What you gained
#
# Compare your messages with those of the baseline.

# %% tags=["slide"]
report.table(SMALL, [("one by one", *baseline), ("in one of your buckets", *one)])
print()
report.table(STEPS, [row_silent, row_one_by_one, row_yours, row_torchs])

# %% [markdown]
# ## Beyond this machine · further
#
# The table **models** a ResNet-50 on nodes of 8 A100s. The *scaling efficiency* is the time of a step without
# communication, divided by its time with it. Between $N$ nodes, an all-reduce pays a message's latency $2(N-1)$ times
# in a ring, $2\log_2 N$ times in a tree; *best* is the quicker.

# %% jupyter={"source_hidden": true}
GRADIENTS = 25.6e6 * 4  # bytes of a ResNet-50's gradients, float32
STEP = 64 / planner.A100.resnet50_mixed  # seconds of computing for 64 images on an A100, in mixed precision
A100S = planner.Cluster(planner.A100)  # nodes of 8, a network card of 200 Gb/s for each rank
CALL = 20e-6  # seconds that a collective costs by itself, an assumption


def efficiency(ranks, messages, overlap, algorithm):
    """Model: time of a step without communication, divided by its time with it."""

    def all_reduce(size):
        links = A100S.inside(8), A100S.between
        return CALL + planner.hierarchical_all_reduce(size, ranks // 8, 8, *links, algorithm)

    sizes = {"bucket_bytes": GRADIENTS / messages, "overlap": overlap}
    step = planner.data_parallel_step(STEP / 3, 2 * STEP / 3, GRADIENTS, all_reduce, **sizes)
    return planner.scaling_efficiency(step)


WAYS = {
    "161 messages, after backward, ring": (161, False, "ring"),
    "one message, after backward, ring": (1, False, "ring"),
    "161 messages, overlapped, ring": (161, True, "ring"),
    "4 buckets of 26 MB, overlapped, ring": (4, True, "ring"),
    "4 buckets of 26 MB, overlapped, best": (4, True, "best"),
}
report.table({"model": "{}"} | {f"{n} ranks": "{:.0%}" for n in (8, 64, 1024)},
             [(name, *(efficiency(n, *way) for n in (8, 64, 1024))) for name, way in WAYS.items()])  # fmt: skip

# %% [markdown]
# Inside a node, overlap hides even small messages. Over many nodes latency dominates, so libraries send large
# buckets and switch to trees.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>With float16 gradients, do you divide before the sum or after it?</summary>
#
# Before. Two gradients of 40,000 have a mean of 40,000, but their sum exceeds 65,504, the largest float16. Your
# <code>place</code> divides first, as PyTorch does. With very many ranks, small gradients may then underflow. bfloat16
# has neither problem.
# </details>
#
# <details><summary>You need <code>finish()</code>. How does PyTorch know that backward has ended?</summary>
#
# It asks the autograd engine for a callback at the end of backward
# (<code>torch.autograd.Variable._execution_engine.queue_callback</code>), and waits there. With
# <code>find_unused_parameters</code> it also walks the graph after forward, to learn early which hooks won't fire.
# </details>
#
# <details><summary>Suppose no rank used a parameter. Does it matter whether its gradient is zero or None?</summary>
#
# Yes, to the optimizer. With None it skips the parameter. With zero, momentum keeps moving it and weight decay keeps
# shrinking it. With <code>find_unused_parameters=True</code>, PyTorch's DDP finds out in one extra message which
# parameters were used, and leaves the others None. Without it, the next forward raises an error.
# </details>
#
# ## To remember
#
# The mean of the gradients of equal shares is the gradient of the whole batch. Start all ranks from the same weights,
# call the same collectives in the same order everywhere, and send a few large messages while backward computes. The
# next work, **09_ddp**, uses PyTorch's version in a real training function.
