# %% [markdown]
# # Data parallelism with DDP, and jobs · about 145 min, core 50
#
# `DistributedDataParallel` is one line around a network. What it does *not* do is the rest of the program: who gets which
# samples, what a metric means when each rank has seen a part, which parameters took part in a step, who writes the
# checkpoint. Most of these go wrong silently. In this practical work you write them, and judge them by the one truth
# there is: **many ranks must compute what one process computes on the whole batch**.
#
# **What you will gain.** The third cell below estimates it for ResNet-50 on up to 1,024 GPUs, each with a link of
# 100 Gbit/s. It is a model, not a measurement; further down you put measured points of this machine beside such a curve.

# %% tags=["setup"]
import contextlib
import heapq
import os
import random
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from dlojz_tp import course, data, launch, measure, planner, scale, todo

tp = course.open("09_ddp")
tp

# %% tags=["setup"]
FULL = scale() == "full"
RANKS = min(4, torch.cuda.device_count()) if torch.cuda.device_count() > 1 else 2
HIDDEN = 2048 if FULL else 256  # width of the network
BATCH = 240  # samples of a step, over all ranks together
EPOCHS = 8
RATE = 0.5  # learning rate

# %%
NETWORK = planner.Link(latency=6e-6, bandwidth=12.5e9)  # seconds, bytes a second: 100 Gbit/s for each GPU
GRADIENTS = 4 * 25.6e6  # bytes: ResNet-50 in float32
STEP = 64 / planner.A100.resnet50_mixed  # seconds for 64 images on one A100, from its published throughput


def predicted(
    gpus,
    algorithm="best",
    overlap=True,
    link=NETWORK,
    computing=(STEP / 3, 2 * STEP / 3),
    size=GRADIENTS,
    bucket=25 * 2**20,
):
    """Times of a data-parallel step on so many GPUs; computing: seconds of (forward, backward)."""

    def exchange(message):
        return planner.all_reduce(message, gpus, link, algorithm)

    return planner.data_parallel_step(*computing, size, exchange, overlap=overlap, bucket_bytes=bucket)


print("estimate: ResNet-50 in mixed precision, 64 images an A100, gradients in float32, 100 Gbit/s for each GPU")
for gpus in (1, 4, 32, 256, 1024):
    ring, tree = (planner.scaling_efficiency(predicted(gpus, name)) for name in ("ring", "tree"))
    images = 64 * gpus / predicted(gpus).total
    print(
        f"{gpus:5} GPUs: efficiency {ring:4.0%} with a ring, {tree:4.0%} with a tree; {images:9,.0f} images/s with the better"
    )

# %% [markdown]
# ## The idea
#
# Every rank holds a whole copy of the network and computes the gradient of its own part of the batch. The mean over the
# ranks is the gradient of the whole batch, because the loss is a mean, and all copies make the same step:
#
# $$g = \frac{1}{B}\sum_{i=1}^{B} \nabla \ell_i
# = \frac{1}{N}\sum_{r=1}^{N} \Big(\frac{N}{B} \sum_{i \in \text{part } r} \nabla \ell_i\Big)$$
#
# The bracket is the mean over rank $r$'s own part **only if the parts are equally large**: each then has $B/N$ samples.
# DDP exchanges the gradients in buckets while backward still computes the others:


# %% jupyter={"source_hidden": true}
def block(axes, rank, start, length, colour, text):
    axes.barh(rank, length, left=start, height=0.36, color=colour, edgecolor="white")
    axes.text(start + length / 2, rank, text, ha="center", va="center", color="white", fontsize=8)


figure, axes = plt.subplots(figsize=(8.5, 2.2), layout="constrained")
for rank in range(2):
    block(axes, rank - 0.2, 0, 2, "#0072B2", "forward")
    for k in range(3):
        block(axes, rank - 0.2, 2 + 4 / 3 * k, 4 / 3, "#009E73", f"backward, part {k + 1}")
        block(axes, rank + 0.2, 2 + 4 / 3 * (k + 1), 0.9, "#CC79A7", f"bucket {k + 1}")
    block(axes, rank - 0.2, 6.9, 0.6, "#D55E00", "step")
axes.axvspan(6, 6.9, color="#CC79A7", alpha=0.15)
axes.text(6.45, -0.62, "not hidden", ha="center", fontsize=8)
axes.set(yticks=[0, 1], yticklabels=["rank 0", "rank 1"], xlabel="time (a sketch)", xticks=[], ylim=(1.5, -0.75))
axes.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The baseline: one process
#
# Handwritten digits and a small network, so that a training takes a second. Read this function well: you will make it
# parallel.

# %% tags=["setup"]
digits = data.digits()
train_set = TensorDataset(digits.train_x.flatten(1), digits.train_y)
val_set = TensorDataset(digits.val_x.flatten(1), digits.val_y)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def train_alone(make_model, dataset, epochs, batch_size, learning_rate):
    """Train in one process. Returns the module, and the mean loss over the samples of each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loader = DataLoader(dataset, batch_size, shuffle=True)
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
        losses.append(total.item() / len(dataset))
    return model, losses


# %%
start = time.perf_counter()
model, alone = train_alone(make_model, train_set, EPOCHS, BATCH, RATE)
print(f"one process: {time.perf_counter() - start:.2f} s, loss of the last epoch {alone[-1]:.3f}")

# %% [markdown]
# ### Balise 1 · The training function on many ranks · about 35 min
#
# **`join_world()`** starts the default process group, unless there is one already, and returns this rank's
# `torch.device`. It must work however the ranks were started:
#
# | started by | rank | number of ranks | rank on this node |
# |---|---|---|---|
# | `launch.ranks`, `launch.job` | the group is there already: keep it | | `launch.device()` is the device |
# | `torchrun` | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
# | `srun` | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` |
#
# These are environment variables. So are `MASTER_ADDR` and `MASTER_PORT`, where rank 0 waits for the others: torchrun sets
# them, under `srun` the batch script does (balise 8). torchrun may run inside a Slurm job: where the
# variables of both are there, torchrun's count. Leave `MASTER_ADDR` and `MASTER_PORT` as they are. A node with GPUs has one
# for each of its ranks: NCCL, and the GPU whose number is the rank *on the node*, made the current one. Without GPUs: gloo,
# and the CPU.
#
# **`train(make_model, dataset, epochs, batch_size, learning_rate)`** is `train_alone` on all ranks. It begins with
# `join_world()`. `batch_size` counts the samples of a step over *all* ranks, and is a multiple of their number. Items are
# pairs `(x, y)`. Each epoch goes once through the data set, each rank through a share of its own (the same in each epoch, or
# another) in a new order; in each step all ranks have equally many samples. Repeating a few samples for that is fine, and so
# is leaving out the rest of the last batch.
#
# Return `(module, losses)` on every rank: the trained network without a wrapper, and a list with one float an epoch, the
# mean loss over all samples that *all* ranks have seen in it. SGD without momentum, as above. About 12 and 20 lines.
#
# <details><summary>Hint</summary>
#
# `os.environ.get`, `dist.is_initialized()`, `dist.init_process_group(backend, rank=..., world_size=...)`,
# `torch.cuda.set_device`. `DistributedSampler` cuts the shares; it must be told the epoch. DDP averages the gradients, so
# the loss is the plain mean of the rank's own batch. For the report, all-reduce the sum of losses *and* the number of
# samples.
# </details>


# %% tags=["balise-1"]
def join_world():
    """Start the process group where there is none. Returns the torch.device of this rank."""
    # BEGIN SOLUTION
    if dist.is_initialized():
        return launch.device()
    environment = os.environ.get
    rank = int(environment("RANK") or environment("SLURM_PROCID"))
    world_size = int(environment("WORLD_SIZE") or environment("SLURM_NTASKS"))
    local_rank = int(environment("LOCAL_RANK") or environment("SLURM_LOCALID"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return torch.device("cpu")
    # END SOLUTION


def train(make_model, dataset, epochs, batch_size, learning_rate):
    """Train on all ranks; batch_size over all of them. Returns the module, and the mean loss of each epoch."""
    # BEGIN SOLUTION
    device = join_world()
    ddp = DDP(make_model().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        for x, y in loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[0] += loss.detach() * len(y)
            seen[1] += len(y)
        dist.all_reduce(seen)
        losses.append((seen[0] / seen[1]).item())
    return ddp.module, losses
    # END SOLUTION


# %%
tp.check(1, join_world, train)

# %%
start = time.perf_counter()
results = launch.ranks(train, make_model, train_set, EPOCHS, BATCH, RATE, n=RANKS)
trained, losses = results[0]
print(f"{RANKS} ranks: {time.perf_counter() - start:.2f} s with the start of the ranks")
for epoch, pair in enumerate(zip(alone, losses), 1):
    print(f"epoch {epoch}: loss {pair[0]:.3f} alone, {pair[1]:.3f} on {RANKS} ranks")

# %% [markdown]
# The columns agree but for the order of the samples: the *work* is the same. Do not read a gain or a loss from the times. A
# network this small spends its time on waking threads, and a rank has fewer of them than one process alone.

# %% [markdown]
# ### Balise 2 · Metrics over ranks, exact · further · about 18 min
#
# `evaluate(model, dataset, batch_size)` runs on every rank: `model` is on the rank's device (and not wrapped),
# `batch_size` is that of one rank. Return `(loss, accuracy)`, two floats, the mean over **all** samples of the data set,
# each counted once, the same on every rank.
#
# The data set need not divide, and may have fewer samples than there are ranks. Each rank goes through its share only, in
# eval mode, without recording gradients; afterwards `model` and its submodules are in the mode they were in before, training
# or eval. Exchange a few numbers at the end, not in each batch.
# About 14 lines.
#
# <details><summary>Hint</summary>
#
# `DistributedSampler` repeats samples until the shares are equal: do not use it here. `range(rank, len(dataset),
# world_size)` with `Subset` is exact. A mean of means is not the mean: exchange two sums and a count.
# </details>


# %% tags=["balise-2"]
def evaluate(model, dataset, batch_size):
    """Mean loss and accuracy over the whole data set, exact, on every rank: two floats."""
    # BEGIN SOLUTION
    device = next(model.parameters()).device
    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, right answers, samples
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for x, y in DataLoader(share, batch_size):
            logits, y = model(x.to(device)), y.to(device)
            sums[0] += F.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == y).sum()
            sums[2] += len(y)
    model.train(was_training)
    dist.all_reduce(sums)
    loss, right, samples = sums.tolist()
    return loss / samples, right / samples
    # END SOLUTION


# %%
tp.check(2, evaluate)


# %%
def evaluate_badly(model, dataset, batch_size):
    """What one often sees: a sampler that pads, and a mean of means."""
    device = next(model.parameters()).device
    loader = DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))
    model.eval()
    with torch.inference_mode():
        right = [(model(x.to(device)).argmax(dim=1) == y.to(device)).double().mean() for x, y in loader]
    mean = torch.stack(right).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def both(model):
    model = model.to(launch.device())
    return evaluate(model, val_set, 64)[1], evaluate_badly(model, val_set, 64)


for n in (1, 2, 4):
    exact, rough = launch.ranks(both, trained, n=n)[0]
    print(f"{n} ranks: accuracy {exact:.5f}, with padding and a mean of means {rough:.5f}")

# %% [markdown]
# A figure that changes with the number of ranks is not a property of the network. Papers have been compared on less.

# %% [markdown]
# ### Balise 3 · Batch norm over all ranks · further · about 23 min
#
# Batch norm takes mean and variance of *its* batch. With 8 images on each of 64 ranks, that is the noise of 8 images.
# Synchronised, it uses all 512, and the result must be that of one process with one big batch, in the forward *and* the
# backward pass.
#
# **`AllReduceSum`**: an `autograd.Function` whose forward returns the sum of the ranks' tensors, and leaves its input as it
# was. In its backward, each rank receives the gradient of *its own* loss with respect to the sum; but the sum went into
# the losses of all ranks.
#
# **`SyncBatchNorm`**: a subclass of `nn.BatchNorm2d`; write `forward(x)`, `x` of shape `(b, channels, h, w)`, where `b`
# differs between ranks. In training: mean and (biased) variance over the images of all ranks; running statistics move by
# `self.momentum`, `running_var` with the unbiased variance; `num_batches_tracked` need not count. In eval mode as the parent
# class, without any message. The ranks exchange a few numbers for each channel, in one message each way. About 8 and 16
# lines.
#
# <details><summary>Hint</summary>
#
# Backward of a sum over ranks: the sum of the gradients over ranks. Exchange one vector with the sums of `x`, the sums of
# `x²`, and the number of values: $\mu = S_1/n$, $\sigma^2 = S_2/n - \mu^2$. The number of values carries no gradient.
# Unbiased: times $n/(n-1)$. Running statistics are updated under `torch.no_grad()`.
# </details>


# %% tags=["balise-3"]
class AllReduceSum(torch.autograd.Function):
    """The sum of x over all ranks, any shape; gradients flow back to the x of every rank."""

    @staticmethod
    def forward(ctx, x):
        # BEGIN SOLUTION
        total = x.clone()
        dist.all_reduce(total)
        return total
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        total = gradient.clone()
        dist.all_reduce(total)
        return total
        # END SOLUTION


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics are those of all ranks' images. x: (b, channels, h, w)."""

    def forward(self, x):
        # BEGIN SOLUTION
        if not self.training:
            return super().forward(x)
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))
        n = sums[-1].detach()
        mean, square = (sums[:-1] / n).view(2, -1)
        var = square - mean**2
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]
        # END SOLUTION


# %%
tp.check(3, AllReduceSum, SyncBatchNorm)

# %% [markdown]
# PyTorch's own `nn.SyncBatchNorm` trains on GPUs only. Its forward *gathers*: each rank receives mean, inverse deviation
# and count of every other, so what arrives grows with the number of ranks. Its backward adds up two sums a channel, like
# yours. (With large means, $S_2/n - \mu^2$ subtracts two large numbers:
# that is why library code sums squares of *differences*.)

# %% [markdown]
# ## Parameters that take no part
#
# This network has a trunk and one head for each task; a step uses one head. DDP waits for the gradient of *every*
# parameter before a bucket is complete. Run the two cells below and read the error: it says what happened.


# %% tags=["setup"]
class SeveralHeads(nn.Module):
    """A trunk, and a head for each task. Call it as network(x, task)."""

    def __init__(self, tasks=3):
        super().__init__()
        self.trunk = nn.Linear(64, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 10) for _ in range(tasks))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.trunk(x)))


def three_steps(make_parallel):
    torch.manual_seed(0)
    network = make_parallel(SeveralHeads(), launch.device())
    for step in range(3):
        x = torch.randn(8, 64, device=launch.device())
        network(x, task=step % 2).square().mean().backward()
    return "three steps done"


# %%
def plain_ddp(network, device):
    return DDP(network.to(device))


try:
    launch.ranks(three_steps, plain_ddp, n=2, timeout=10)
except launch.RankError as error:
    print(error.summary)

# %% [markdown]
# ### Balise 4 · Heads that take turns · further · about 4 min
#
# The heads of a network may differ in width. Write `make_parallel(network, device)`: it returns something that is called like
# the network, `parallel(x, task)`, whose `parameters()` are those of the network, and trains on all ranks, whatever heads a
# step uses; in one step different ranks may use different heads. The gradients are the mean over ranks, where a rank that did
# not use a head counts as zero. The heads that nobody used stay as they are (plain SGD). About 2 lines, or 8 if you mend the
# network instead of DDP's options.
#
# <details><summary>Hint</summary>
#
# DDP has an option that walks through the graph after each forward pass and marks as ready what is not in it. Another one
# promises that the graph never changes; is that so here?
# </details>


# %% tags=["balise-4"]
def make_parallel(network, device):
    """The network on `device`, its gradients averaged over ranks though each step uses one head only."""
    # BEGIN SOLUTION
    device_ids = [device] if device.type == "cuda" else None
    return DDP(network.to(device), device_ids=device_ids, find_unused_parameters=True)
    # END SOLUTION


# %%
tp.check(4, make_parallel)

# %%
print(launch.ranks(three_steps, make_parallel, n=2, timeout=10))

# %% [markdown]
# The walk through the graph costs time in every step. Do not switch it on "to be safe": an error about unused parameters
# is often the only sign of a layer that somebody forgot to call.

# %% [markdown]
# ### Balise 5 · Accumulate, exchange once, and choose the learning rate · further · about 14 min
#
# **`accumulate(model, micro_batches, optimizer)`**: `model` is wrapped in DDP; `micro_batches` is a list of pairs `(x, y)` of
# this rank, on its device. Make *one* step that equals a step on all samples at once (mean cross-entropy), one micro-batch
# after the other: memory never holds the activations of two. Call `model` itself, not `model.module`. The last micro-batch
# may be smaller. All ranks have equally many samples. Gradients are exchanged once, with the last micro-batch.
#
# **`learning_rate(step, base, base_batch, batch, warmup_steps)`**: the linear rule. `base` suits a batch of `base_batch`
# samples; with `batch` samples the target is `base · batch / base_batch`. The rate starts at `base` in step 0, changes by
# the same amount each step (a smaller batch lowers it), reaches the target in step `warmup_steps`, and stays there.
# `warmup_steps` may be 0. About 10 and 5 lines.
#
# <details><summary>Hint</summary>
#
# `with model.no_sync():` switches the exchange off for forward passes made inside it. Weight each micro-batch by its share
# of the samples: `reduction="sum"` divided by all samples does it. `contextlib.nullcontext()` is the context that does
# nothing.
# </details>


# %% tags=["balise-5"]
def accumulate(model, micro_batches, optimizer):
    """One optimizer step on all micro-batches of all ranks, with one exchange of gradients."""
    # BEGIN SOLUTION
    samples = sum(len(y) for _, y in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches, 1):
        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():
            loss = F.cross_entropy(model(x), y, reduction="sum") / samples
            loss.backward()
    optimizer.step()
    # END SOLUTION


def learning_rate(step, base, base_batch, batch, warmup_steps):
    """The learning rate of a step: linear in the batch, after a linear warm-up that starts at `base`."""
    # BEGIN SOLUTION
    target = base * batch / base_batch
    if step >= warmup_steps:
        return target
    return base + (target - base) * step / warmup_steps
    # END SOLUTION


# %%
tp.check(5, accumulate, learning_rate)


# %% [markdown]
# What does it save? Four micro-batches on every rank, with one exchange and with four, in turn, inside the same ranks.


# %%
def accumulate_naively(model, micro_batches, optimizer):
    optimizer.zero_grad()
    for x, y in micro_batches:
        (F.cross_entropy(model(x), y) / len(micro_batches)).backward()
    optimizer.step()


def race_accumulation():
    torch.set_num_threads(1)
    device = launch.device()
    torch.manual_seed(dist.get_rank())
    micro_batches = [(torch.randn(8, 1024, device=device), torch.randint(10, (8,), device=device)) for _ in range(4)]
    candidates = {}
    for name, step in (("one exchange", accumulate), ("an exchange each time", accumulate_naively)):
        network = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
        ddp = DDP(network)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        candidates[name] = lambda s=step, m=ddp, o=optimizer: s(m, micro_batches, o)
    return measure.race(candidates, repeats=15, device=device, calls=1)


launch.ranks(race_accumulation, n=RANKS)[0]

# %% [markdown]
# ### Balise 6 · Equal work · further · about 9 min
#
# The slowest rank sets the pace of all. With sentences of 8 to 2,000 tokens, equally many sequences are not equal work.
#
# `balance(lengths, world_size)`: `lengths` is a list of numbers of tokens, one for each sequence of a global batch. Return
# `world_size` lists of *places* in `lengths`, each place in exactly one list. The fullest rank may hold at most 4/3 of the
# tokens that the best possible partition would give it. Many sequences are easier to level out: with 1,000 of at most 2,048
# tokens on 64 ranks, it may hold at most 2 % more than the mean. No rank is left without a sequence if there are enough.
# Every rank calls it by itself and must find the same. About 8 lines.
#
# <details><summary>Hint</summary>
#
# Longest first: go through the sequences from the longest to the shortest and give each to the rank with the fewest tokens
# so far (Graham, 1969). A heap (`heapq`) finds that rank quickly.
# </details>


# %% tags=["balise-6"]
def balance(lengths, world_size):
    """Places in `lengths`, shared out over the ranks so that the sums of lengths are nearly equal."""
    # BEGIN SOLUTION
    shares = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]  # a heap: (tokens, rank)
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(place)
        heapq.heappush(loads, (tokens + lengths[place], rank))
    return shares
    # END SOLUTION


# %%
tp.check(6, balance)


# %% jupyter={"source_hidden": true}
def show_loads():
    generator = random.Random(0)
    lengths = [min(2048, max(8, int(generator.lognormvariate(5.5, 0.8)))) for _ in range(128)]
    plain = [sum(lengths[rank::16]) for rank in range(16)]
    balanced = [sum(lengths[place] for place in share) for share in balance(lengths, 16)]
    figure, columns = plt.subplots(1, 2, figsize=(8.5, 2.5), sharey=True, layout="constrained")
    for axes, loads, title in zip(columns, (plain, balanced), ("equally many sequences", "balanced")):
        mean = sum(loads) / len(loads)
        axes.bar(range(16), loads, color="#0072B2")
        axes.axhline(mean, color="#D55E00", linestyle="--", label="mean")
        axes.set(title=f"{title}: idle {1 - mean / max(loads):.0%}", xlabel="rank")
    columns[0].set_ylabel("tokens in the step")
    columns[0].legend(fontsize=8)
    plt.show()


show_loads()

# %% [markdown]
# With unequal shares, the mean of the ranks' mean losses is not the mean over tokens any more: weight each rank's loss by
# its tokens, as in balise 2.

# %% [markdown]
# ### Balise 7 · A checkpoint that survives · further · about 23 min
#
# **`save_checkpoint(path, model, optimizer, epoch)`** runs on every rank; `path` is a `Path`; `model` may be wrapped in DDP;
# `epoch` is the number of epochs done. Rank 0 alone writes one file, with tensors and plain numbers only, under the names of
# the network itself. It is there when the function returns, on any rank. If writing fails half-way (a full disk, the end of
# the time limit), the checkpoint that was there before is untouched, the error comes through (on rank 0 at least), and no
# rank is left waiting. Once there is a checkpoint, at no moment is there no whole one under `path`, even if the process is
# killed.
#
# **`load_checkpoint(path, model, optimizer)`** runs on every rank, of another number of ranks, too; `model` may be wrapped or
# not. It restores both and returns the number of epochs done; without a file it changes nothing and returns 0. About 14
# and 8 lines.
#
# <details><summary>Hint</summary>
#
# `ddp.module` is the network inside. Write to another name in the same folder, then `Path.replace`, which is atomic.
# `torch.load(path, map_location=..., weights_only=True)`. `dist.barrier()` waits for all, but only if all arrive;
# `dist.broadcast_object_list` waits too, and tells the others what came of it.
# </details>


# %% tags=["balise-7"]
def save_checkpoint(path, model, optimizer, epoch):
    """Rank 0 writes the state of model and optimizer and the number of epochs done, whole or not at all."""
    # BEGIN SOLUTION
    outcome = [None]
    if dist.get_rank() == 0:
        network = model.module if isinstance(model, DDP) else model
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        partial = Path(f"{path}.partial")
        try:
            torch.save(state, partial)
            partial.replace(path)  # atomic: readers see the old file or the new one
        except (OSError, RuntimeError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)  # the others wait for the file here, and learn of a failure
    if outcome[0] is not None:
        raise outcome[0]
    # END SOLUTION


def load_checkpoint(path, model, optimizer):
    """Restore model and optimizer on this rank. Returns the number of epochs done, 0 without a file."""
    # BEGIN SOLUTION
    if not Path(path).exists():
        return 0
    network = model.module if isinstance(model, DDP) else model
    device = next(network.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]
    # END SOLUTION


# %%
tp.check(7, save_checkpoint, load_checkpoint)

# %% [markdown]
# ## A job
#
# `launch.ranks` uses this machine. A supercomputer has a queue in front of it: you describe what you need, Slurm starts it
# when it is free. `launch.job` sends a function of the notebook there; without a Slurm it runs as a job on this machine,
# under the same name and with the same methods. What the function uses of the notebook goes with it.


# %%
def train_and_evaluate():
    module, losses = train(make_model, train_set, EPOCHS, BATCH, RATE)
    loss, accuracy = evaluate(module, val_set, 64)
    print(f"rank {dist.get_rank()}: last loss {losses[-1]:.3f}, validation accuracy {accuracy:.3f}")
    return accuracy


job = launch.job(train_and_evaluate, nodes=1, ranks_per_node=RANKS, minutes=5)
job.wait()

# %%
print(job.results())
launch.queue()

# %% [markdown]
# ### Balise 8 · The batch script behind it · about 8 min
#
# Most trainings are submitted as a script. `batch_script(nodes, gpus_per_node, cpus_per_gpu, minutes, command)` returns its
# text:
#
# - `bash` runs it; the directives (`#SBATCH`) come before any command;
# - `nodes` nodes, **one process for each GPU**, all GPUs of each node, `cpus_per_gpu` cores for each process;
# - a time limit of `minutes` (an `int`, may exceed a day), a job name, and, if you name the output file, the job's number in
#   it;
# - `srun` starts `command` (a program and its arguments, as one writes them in a shell, quotes included), and hands each
#   process its cores;
# - each process finds what `join_world` needs: all GPUs of its node; `MASTER_ADDR`, the first node of the job, where rank 0
#   waits for the others; and `MASTER_PORT`, made from the job's number, so that two jobs do not meet. Slurm sets neither of
#   these two. The script ends when the processes have ended.
#
# About 13 lines.
#
# <details><summary>Hint</summary>
#
# `--nodes`, `--ntasks-per-node`, `--gres=gpu:N`, `--cpus-per-task`, `--time` (a plain number means minutes), `--job-name`,
# `--output` with `%x` (name) and `%j` (number). See `man sbatch`. Since Slurm 22.05 `srun` does not take over
# `--cpus-per-task`: say it to `srun` again, or set `SRUN_CPUS_PER_TASK`. In the script,
# `scontrol show hostnames "$SLURM_JOB_NODELIST"` writes one node a line, and `$SLURM_JOB_ID` is the job's number.
# </details>


# %% tags=["balise-8"]
def batch_script(nodes, gpus_per_node, cpus_per_gpu, minutes, command):
    """The text of a batch script for Slurm: one process for each GPU, `cpus_per_gpu` cores each."""
    # BEGIN SOLUTION
    return f"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus_per_node}
#SBATCH --gres=gpu:{gpus_per_node}
#SBATCH --cpus-per-task={cpus_per_gpu}
#SBATCH --time={minutes}
#SBATCH --output=%x-%j.out

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun {command}
"""
    # END SOLUTION


# %%
tp.check(8, batch_script)

# %%
print(batch_script(nodes=2, gpus_per_node=4, cpus_per_gpu=10, minutes=90, command="python train.py"))

# %% [markdown]
# A site wants more: an account, a partition, modules to load. These belong to the site, not to the training; `launch.job`
# reads them from one small file (`docs/slurm.md`).
#
# ## Past this machine · further
#
# First measure what a message costs *here*: the times of all-reduces of several sizes give latency and bandwidth.


# %%
def all_reduce_times(sizes, repeats=9):
    """Median seconds of an all-reduce of each size in bytes."""
    found = []
    for size in sizes:
        x, times = torch.zeros(size // 4, device=launch.device()), []
        for _ in range(repeats):
            dist.barrier()
            measure.synchronize(launch.device())
            start = time.perf_counter()
            dist.all_reduce(x)
            measure.synchronize(launch.device())
            times.append(time.perf_counter() - start)
        found.append(sorted(times)[repeats // 2])
    return found


def fit_link(sizes, times, n):
    """The link whose ring all-reduce takes such times: a small message gives the latency, a large one the bandwidth."""
    latency = times[0] / (2 * (n - 1))
    seconds = max(times[-1] - times[0], 1e-9)
    return planner.Link(latency, 2 * (n - 1) / n * sizes[-1] / seconds)


SIZES = [2**k for k in (10, 14, 18, 20, 22, 24)]
link = fit_link(SIZES, launch.ranks(all_reduce_times, SIZES, n=2)[0], 2)
print(f"this machine, 2 ranks: latency {link.latency * 1e6:.0f} µs, bandwidth {link.bandwidth / 1e9:.2f} GB/s")


# %% [markdown]
# Then a training step of a larger network, one thread a rank, on 1, 2 and 4 ranks.


# %%
BUCKET = 4  # MiB: less than the gradients, so that there is something to exchange beside backward


def step_times(repeats=12, width=1024, batch=96):
    """Median seconds of (forward, backward without exchange, a whole DDP step) and the bytes of the gradients."""
    torch.set_num_threads(1)
    network = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(launch.device())
    ddp, x, times = DDP(network, bucket_cap_mb=BUCKET), torch.randn(batch, width, device=launch.device()), []

    def clock():
        measure.synchronize(x.device)  # a GPU still works when the call has returned
        return time.perf_counter()

    for _ in range(repeats):
        marks = [clock()]
        with ddp.no_sync():
            loss = ddp(x).square().mean()
            marks.append(clock())
            loss.backward()
        marks.append(clock())
        ddp(x).square().mean().backward()
        marks.append(clock())
        times.append([b - a for a, b in zip(marks, marks[1:])])
        ddp.zero_grad()
    medians = [sorted(column)[repeats // 2] for column in zip(*times)]
    return *medians, sum(4 * p.numel() for p in network.parameters())


steps = {n: launch.ranks(step_times, n=n)[0] for n in (1, 2, 4)}
for n, (forward, backward, step, size) in steps.items():
    print(f"{n} ranks: computing {forward + backward:.3f} s, step {step:.3f} s, gradients {measure.human_bytes(size)}")

# %% jupyter={"source_hidden": true}
counts = [2**k for k in range(2, 11)]
curves = {
    "ring, overlapped": ("#0072B2", "-", {"algorithm": "ring"}),
    "ring, after backward": ("#0072B2", "--", {"algorithm": "ring", "overlap": False}),
    "tree, overlapped": ("#009E73", "-", {"algorithm": "tree"}),
}
figure, axes = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
for name, (colour, look, how) in curves.items():
    efficiency = [planner.scaling_efficiency(predicted(n, **how)) for n in counts]
    axes.plot(counts, efficiency, look, color=colour, label=f"ResNet-50, {name} (model)")
here = [
    planner.scaling_efficiency(predicted(n, "ring", True, link, (forward, backward), size, BUCKET * 2**20))
    for n, (forward, backward, _, size) in steps.items()
]
axes.plot(list(steps), here, ":", color="#D55E00", label="this machine (model, from its own link)")
points = {n: (forward + backward) / step for n, (forward, backward, step, _) in steps.items()}
axes.plot(list(points), list(points.values()), "o", color="#D55E00", label="this machine (measured)")
axes.set(xscale="log", xlabel="GPUs (this machine: ranks)", ylabel="computing / step", ylim=(0, 1.05))
axes.set_xticks([1, 2, *counts], [str(n) for n in (1, 2, *counts)])
axes.minorticks_off()
axes.set_title("How far does data parallelism carry?")
axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
plt.show()

# %% [markdown]
# The curves are models: latency and bandwidth of a link, buckets of 25 MiB (for this machine 4 MiB, as in its measurement)
# that start when they are full; the sources stand in the docstrings of `dlojz_tp.planner`. The points are measured: the time
# that a rank computes, over the time of its step with the exchange. Where they lie beside the dotted line, this machine does
# what the model leaves out: DDP copies gradients into buckets even at one rank, where nothing is exchanged; ranks on a
# processor share its memory, and its cores where there are fewer than ranks; and the exchange itself needs a core.
#
# **Read it from the right.** At 1,024 GPUs the two models are far apart: the estimate at the top says which figure is
# whose. A ring sends the fewest bytes, but its latency grows with the number of ranks; a tree's grows with the
# logarithm. Real libraries take the better of the two, and use the fast links inside a node first. A larger batch a GPU,
# or gradients in half precision (`fp16_compress_hook`), moves every curve up.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>You go from 1 GPU to 8, keep the batch of each GPU, and the loss falls more slowly per epoch. Why?</summary>
#
# The global batch is 8 times as large, so there are 8 times fewer updates in an epoch. With the linear rule each of them is
# 8 times as long; the warm-up keeps the first ones from diverging.
# </details>
#
# <details><summary>One rank raises an exception in its data loader. What do the others do?</summary>
#
# They wait in their next all-reduce. If the failed process ends, gloo notices that the connection is gone and the others
# fail too; NCCL may notice only at the time limit of the process group. If it hangs, all wait for that limit. torchrun
# and `launch.ranks` end the others soon after one process has failed. Look for the rank that failed <em>first</em>: its
# message is the cause.
# </details>
#
# <details><summary>Why must every rank build the same network with its layers in the same order?</summary>
#
# Buckets are filled by position, not by name. Two ranks with another order would average the gradient of one layer with
# that of another, and nothing would complain if the sizes agree.
# </details>
#
# ## To remember
#
# DDP averages gradients; everything else is yours. Shares must be equal, orders must change with the epoch, metrics are
# sums and counts exchanged once, and one rank writes a checkpoint that is whole or not there. Many ranks that compute what
# one process would compute is a property you can *test*, and now have. Next: what to do with the large batch that came with
# it, and later, models whose copy no longer fits on a rank.
