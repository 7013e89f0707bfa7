# %% [markdown] tags=["slide"]
# # Data parallelism with DDP, and jobs · about 120 min, core 45
#
# `DistributedDataParallel` (DDP) wraps a network in one line. The rest is yours: which rank gets which samples, what a
# metric means, who writes the checkpoint. Most mistakes are silent. Your criterion: **many ranks must compute what one
# process computes on the whole batch**.
#
# **What you will gain.** Each of two ranks processes 120 of the 240 samples of a step, and the loss is the same. An
# interrupted job resumes with losses that are 0.00 % off.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import heapq
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from dlojz_tp import course, data, launch, measure, planner, recorded, report, scale, todo, training_run
from dlojz_tp.works import state

tp = course.open("09_ddp")
tp

# %% tags=["setup"]
FULL = scale() == "full"
GPUS = torch.cuda.device_count()
RANKS = min(4, GPUS) if GPUS > 1 else 2
COUNTS = [n for n in (1, 2, 4) if n <= GPUS] or [1, 2]  # ranks of the scaling at the end
FOLDER = state.folder().absolute() / "09_ddp"  # for programs and checkpoints: the nodes of a cluster must see it
HIDDEN = 2048 if FULL else 256  # width of the network
BATCH = 240  # samples of a step, over all ranks together
EPOCHS = 8
RATE = 0.5  # learning rate

# %% [markdown] tags=["slide"]
# ## The idea
#
# Every rank has a copy of the network and computes the gradient of its part of the batch. The mean over the ranks is
# the gradient of the whole batch:
#
# $$g = \frac{1}{B}\sum_{i=1}^{B} \nabla \ell_i
# = \frac{1}{N}\sum_{r=1}^{N} \Big(\frac{N}{B} \sum_{i \in \text{part } r} \nabla \ell_i\Big)$$
#
# The term in brackets is the mean over rank $r$'s part **only if all parts are equally large**. DDP exchanges gradients
# in buckets while the backward pass still computes others:


# %% tags=["slide"] jupyter={"source_hidden": true}
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
# A small network learns handwritten digits. Read `train_alone`: you will make it parallel.

# %% tags=["setup"] jupyter={"source_hidden": true}
digits = data.digits()
train_set = TensorDataset(digits.train_x.flatten(1), digits.train_y)
val_set = TensorDataset(digits.val_x.flatten(1), digits.val_y)


@torch.inference_mode()
def accuracy(model):
    """Accuracy of a network on the validation set, on one device."""
    x, y = (one.to(next(model.parameters()).device) for one in val_set.tensors)
    return (model(x).argmax(dim=1) == y).double().mean().item()


# %% tags=["setup"]
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
model, alone = train_alone(make_model, train_set, EPOCHS, BATCH, RATE)
COLUMNS = {"": "{}", "samples per rank/step": "{}", "bytes exchanged": "{:,}", "loss": "{:.3f}", "accuracy": "{:.3f}"}
report.table(COLUMNS, [("one process", BATCH, 0, alone[-1], accuracy(model))])

# %% [markdown]
# ### Balise 1 · The training function on many ranks · about 13 min
#
# `join_world()` is given: it reads the rank from the variables of `torchrun` or `srun`.
#
# **`train` is `train_alone` on all ranks.** Write the three parts that make it parallel:
#
# 1. `ddp`, the wrapped network on `device`; a `sampler` that gives each rank its share; and a `loader` that uses it.
#    `batch_size` counts the samples of a step over *all* ranks, and is a multiple of their number;
# 2. a new order in each epoch;
# 3. from `seen`, the mean loss over the samples of all ranks: append it to `losses`.
#
# About 3, 1 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `DDP(network)`. `DistributedSampler(dataset)` shuffles, then cuts the shares. Without `set_epoch`, each epoch has
# the same order. `DataLoader(dataset, batch, sampler=...)` takes the batch of *one* rank. `dist.all_reduce` adds up
# over the ranks, in place.
# </details>


# %% tags=["balise-1"]
def join_world():
    """Start the process group if there is none. Returns the torch.device of this rank."""
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


def train(make_model, dataset, epochs, batch_size, learning_rate):
    """Train on all ranks; batch_size is that of all together. Returns the module, and the mean loss of each epoch."""
    device = join_world()
    # BEGIN SOLUTION
    ddp = DDP(make_model().to(device), device_ids=[device] if device.type == "cuda" else None)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
    # END SOLUTION
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    losses = []
    for epoch in range(epochs):
        # BEGIN SOLUTION
        sampler.set_epoch(epoch)
        # END SOLUTION
        seen = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        for x, y in loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[0] += loss.detach() * len(y)
            seen[1] += len(y)
        # BEGIN SOLUTION
        dist.all_reduce(seen)
        losses.append((seen[0] / seen[1]).item())
        # END SOLUTION
    return ddp.module, losses


# %%
tp.check(1, join_world, train)

# %%
results = launch.ranks(train, make_model, train_set, EPOCHS, BATCH, RATE, n=RANKS)
trained, losses = results[0]
report.table({"epoch": "{}", "loss alone": "{:.3f}", "on ranks": "{:.3f}"}, list(zip(range(1, 9), alone, losses)))

# %% [markdown]
# The losses differ only because the samples come in a different order.

# %% [markdown]
# ### Balise 2 · Metrics over ranks, exact · about 13 min
#
# The number of ranks rarely divides the size of a validation set. `DistributedSampler` then repeats samples, and a mean
# of the ranks' means gives a small share the same weight as a large one. Both are wrong for a metric.
#
# `evaluate` returns `(loss, accuracy)` over **all** samples, each counted once. A rank may have no sample at all. Write
#
# 1. `share`: the part of `dataset` for this rank;
# 2. in the loop: what a batch adds to `sums`;
# 3. after the loop: one exchange, and the two means.
#
# About 1, 3 and 3 lines.
#
# <details><summary>Hint</summary>
#
# Use `Subset(dataset, indices)` with every `world_size`-th index, starting at the rank. `F.cross_entropy(...,
# reduction="sum")` adds up the losses of a batch. `sums.tolist()` gives three floats.
# </details>


# %% tags=["balise-2", "slide-mistake=means-averaged"]
def evaluate(model, dataset, batch_size):
    """Mean loss and accuracy over the whole data set, exact, on every rank: two floats."""
    device = next(model.parameters()).device
    # BEGIN SOLUTION
    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    # END SOLUTION
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, right answers, samples
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for x, y in DataLoader(share, batch_size):
            logits, y = model(x.to(device)), y.to(device)
            # BEGIN SOLUTION
            sums[0] += F.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == y).sum()
            sums[2] += len(y)
            # END SOLUTION
    model.train(was_training)
    # BEGIN SOLUTION
    dist.all_reduce(sums)
    loss, right, samples = sums.tolist()
    return loss / samples, right / samples
    # END SOLUTION


# %%
tp.check(2, evaluate)


# %% tags=["slide"] jupyter={"source_hidden": true}
def evaluate_badly(model, dataset, batch_size):
    """The usual mistake: a sampler that pads, and a mean of means."""
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


rows = [(n, *launch.ranks(both, trained, n=n)[0]) for n in (1, 2, 4)]
report.table({"ranks": "{}", "yours": "{:.5f}", "padding, mean of means": "{:.5f}"}, rows)

# %% [markdown]
# A metric is wrong if it changes with the number of ranks.

# %% [markdown]
# ### Balise 3 · Batch norm over all ranks · further · about 15 min
#
# Synchronised batch norm computes what one process computes with one big batch, forward *and* backward.
#
# **`AllReduceSum`** adds up over the ranks. Write `backward`: `gradient` is the gradient of this rank's *own* loss with
# respect to the sum. But the sum went into the losses of all ranks.
#
# **`SyncBatchNorm.forward(x)`**: `b` may differ between ranks. Write `n`, the number of values per channel on all ranks
# together (a tensor without a gradient), `mean` and the biased variance `var`, both `(channels,)`, with **one** message
# forward and one backward:
#
# $$S_1 = \sum x, \quad S_2 = \sum x^2, \qquad \mu = S_1/n, \quad \sigma^2 = S_2/n - \mu^2$$
#
# About 3 and 5 lines.
#
# <details><summary>Hint</summary>
#
# Don't change `gradient`: `clone()` it first. `torch.cat` makes one vector of $S_1$, $S_2$ and the rank's own count;
# `AllReduceSum.apply(vector)` sums it. `x.sum((0, 2, 3))` keeps the channels.
# </details>


# %% tags=["balise-3"]
class AllReduceSum(torch.autograd.Function):
    """The sum of x over all ranks, any shape; gradients flow back to the x of every rank."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

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
        if not self.training:
            return super().forward(x)
        # BEGIN SOLUTION
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))
        n = sums[-1].detach()
        mean, square = (sums[:-1] / n).view(2, -1)
        var = square - mean**2
        # END SOLUTION
        # running statistics: with momentum, and the unbiased variance
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


# %%
tp.check(3, AllReduceSum, SyncBatchNorm)

# %% [markdown]
# ## Parameters that take no part
#
# With one head for each task, a step uses only one of them. DDP waits for the gradient of *every* parameter:


# %% tags=["setup"] jupyter={"source_hidden": true}
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
# ### Balise 4 · Heads that take turns · further · about 8 min
#
# `make_parallel(network, device)` returns something that is called like the network, `parallel(x, task)`, and trains on
# all ranks. Ranks may use different heads. The gradient is the mean over the ranks, and an unused head counts as zero.
# About 2 lines.
#
# <details><summary>Hint</summary>
#
# DDP has an option that walks through the graph after each forward pass and marks unused parameters as ready. Another
# one promises that the graph never changes. Is that true here?
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
# The option costs time in every step. It also hides a mistake: a layer that is never called.

# %% [markdown]
# ### Balise 5 · Accumulate, exchange once, and choose the learning rate · further · about 10 min
#
# **`accumulate` is given.** Inside `model.no_sync()` DDP exchanges nothing. The *forward* pass must be inside too.
#
# **`learning_rate`** is the linear rule. `base` suits `base_batch` samples, and the target for `batch` samples is `base
# · batch / base_batch`. The warm-up goes linearly from `base` in step 0 to the target in step `warmup_steps`, which may
# be 0. About 4 lines.
#
# <details><summary>Hint</summary>
#
# Handle the steps after the warm-up first. During the warm-up, the rate has gone the fraction `step / warmup_steps` of
# the way from `base` to the target.
# </details>


# %% tags=["balise-5"]
def accumulate(model, micro_batches, optimizer):
    """One optimizer step on all micro-batches of all ranks, with one exchange of gradients."""
    samples = sum(len(y) for _, y in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches, 1):
        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():
            loss = F.cross_entropy(model(x), y, reduction="sum") / samples
            loss.backward()
    optimizer.step()


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
# Race one exchange against four:

# %%
faster = tp.predict("With four micro-batches, how many times faster is a step with one exchange than with four?", ...)


# %% jupyter={"source_hidden": true}
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


race = launch.ranks(race_accumulation, n=RANKS)[0]
faster.shows(
    race.medians["an exchange each time"] / race.medians["one exchange"],
    "× {:.2f}",
    "Only a quarter of the messages are left. But all the computing remains, and DDP hides part of an exchange anyway.",
)
race

# %% [markdown]
# ### Balise 6 · Equal work · further · about 10 min
#
# The slowest rank sets the pace, and sequences differ in length. A simple rule is never worse than 4/3 of the best
# partition (Graham, 1969): **longest first, each to the rank with the fewest tokens so far.**
#
# `balance(lengths, world_size)` returns a list of *indices* into `lengths` for each rank. All ranks must compute the
# same lists. Write the loop. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `sorted(range(len(lengths)), key=...)` sorts indices. `heapq.heappop(loads)` takes out the smallest pair `(tokens,
# rank)`; `heapq.heappush(loads, pair)` puts one in.
# </details>


# %% tags=["balise-6"]
def balance(lengths, world_size):
    """Indices into `lengths`, a list for each rank, so that the ranks' sums of lengths are nearly equal."""
    shares = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]  # a heap: (tokens, rank)
    # BEGIN SOLUTION
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(place)
        heapq.heappush(loads, (tokens + lengths[place], rank))
    # END SOLUTION
    return shares


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
# ### Balise 7 · A checkpoint that survives · further · about 15 min
#
# A job may end while it writes. There must always be a whole checkpoint at `path`: rank 0 writes a second file
# beside it and moves it into place. The others wait; that part is given.
#
# **`save_checkpoint`**: write `state`, a dictionary with the states of the network (under its own names, not DDP's) and
# of the optimizer, and `epoch`. Then write the two lines that save it. Rank 0 alone runs all this.
#
# **`load_checkpoint`**: restore both on every rank, and return the number of epochs. The tensors must not all go to
# rank 0's GPU, and the file must not run code while it loads. About 5 and 4 lines.
#
# **Write all of it:** `tp.open_task(7)` gives you only names and docstrings. Save a checkpoint that neither a kill nor
# a full disk can damage, and load it on every rank.
#
# <details><summary>Hint</summary>
#
# `ddp.module` is the network inside. `partial.replace(path)` is atomic within a folder. `torch.load(path,
# map_location=..., weights_only=True)` loads tensors and plain numbers only, and no code.
# </details>


# %% tags=["balise-7"]
def save_checkpoint(path, model, optimizer, epoch):
    """Rank 0 alone writes the states of model and optimizer and `epoch`, the number of epochs done.

    model may be wrapped in DDP; the file has the names of the network inside, and only tensors and plain numbers. There
    is a whole checkpoint at `path` at every moment: write another file in the same folder, then move it into place in
    one operation. No rank returns before that. If writing fails (OSError, RuntimeError), all ranks raise the error.
    """
    outcome = [None]
    if dist.get_rank() == 0:
        # BEGIN SOLUTION
        network = model.module if isinstance(model, DDP) else model
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        # END SOLUTION
        partial = Path(f"{path}.partial")  # in the same folder
        try:
            # BEGIN SOLUTION
            torch.save(state, partial)
            partial.replace(path)  # atomic: readers see the old file or the new one
            # END SOLUTION
        except (OSError, RuntimeError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)  # the others wait for the file here, and learn of a failure
    if outcome[0] is not None:
        raise outcome[0]


def load_checkpoint(path, model, optimizer):
    """Restore model, perhaps wrapped in DDP, and optimizer on this rank. Returns the epochs done, 0 without a file.

    Tensors go to the device of the model's parameters. Parameters stay the same objects. The file can't run code.
    """
    if not Path(path).exists():
        return 0
    network = model.module if isinstance(model, DDP) else model
    device = next(network.parameters()).device
    # BEGIN SOLUTION
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
# On a supercomputer, Slurm queues jobs. `launch.job` submits a function to it. Without Slurm, the function runs here.


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
# ### Balise 8 · The batch script · about 11 min
#
# `batch_script` returns the text of a script in three parts:
#
# 1. **Resources**, in `#SBATCH` lines above any command: `nodes`, **one process for each GPU** of each node, those
#    GPUs, `cpus_per_gpu` cores for each process, `minutes` of time, a job name.
# 2. **The meeting point.** Slurm sets neither `MASTER_ADDR` (the job's first node) nor `MASTER_PORT` (made from the
#    job's number). Export both.
# 3. **The start:** `srun` starts `command`, such as `python train.py`, once for each process. The command may contain
#    quotes.
#
# `join_world` picks its GPU from all those of the node, so ask for GPUs per node, not per task. About 12 lines of text.
#
# <details><summary>Hint</summary>
#
# `--nodes`, `--ntasks-per-node`, `--gres=gpu:N`, `--cpus-per-task`, `--time` (a number means minutes), `--job-name`. In
# `--output`, `%j` is the job's number. `scontrol show hostnames "$SLURM_JOB_NODELIST"` writes one node per line.
# `$((10000 + SLURM_JOB_ID % 20000))` is a port. `srun` doesn't inherit `--cpus-per-task`: repeat it, or export
# `SRUN_CPUS_PER_TASK`.
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
# Most sites also want an account and a partition: see `docs/slurm.md`.
#
# ## From the command line
#
# `torchrun` starts ranks on one node, `sbatch` submits a script, `squeue` shows the queue. `program` writes a file that
# runs a function from this notebook.


# %% tags=["setup"] jupyter={"source_hidden": true}
def program(function):
    """Write a file into FOLDER that runs `function` with all that it uses. Returns its name."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = function.__name__
    (FOLDER / f"{name}.pickle").write_bytes(cloudpickle.dumps(function))
    lines = f"""import pickle

import torch.distributed as dist

pickle.load(open("{name}.pickle", "rb"))()
if dist.is_initialized():
    dist.destroy_process_group()  # a rank that just ends makes gloo abort on the others
"""
    (FOLDER / f"{name}.py").write_text(lines)
    return f"{name}.py"


def slurm_here():
    """Whether Slurm answers."""
    command = ["scontrol", "ping"]
    return bool(shutil.which("scontrol")) and " is UP" in subprocess.run(command, capture_output=True, text=True).stdout


def shell(line):
    """Run a command line in FOLDER, and show what it writes."""
    if not line.startswith("torchrun") and not slurm_here():
        print(f"there is no Slurm here; on a cluster you would type: {line}")
        return
    line = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run")  # the same program, by this Python
    done = subprocess.run(line, shell=True, text=True, capture_output=True, cwd=FOLDER)
    print(done.stdout if done.returncode == 0 else done.stderr[-300:])


# %%
shell(f"torchrun --standalone --nproc-per-node={RANKS} {program(train_and_evaluate)}")

# %%
script = batch_script(1, RANKS, 1, 5, f"{sys.executable} {program(train_and_evaluate)}")
(FOLDER / "train.sh").write_text(script)
shell("sbatch train.sh")
shell("squeue --me")

# %% [markdown]
# ## Past the time limit · further
#
# ### Balise 9 · Everything that the next job needs · further · about 14 min
#
# `#SBATCH --signal=USR1@90` asks Slurm for a signal 90 s before the limit. Then the ranks save and requeue the job. The
# restarted job must have exactly the losses of an uninterrupted one.
#
# `Everything` takes the optimizer's place in `save_checkpoint`. It holds the other parts of the training, the position
# of the loader, and the random states of all ranks (for dropout). Write its two methods. `state_dict` runs on rank 0
# alone and must not communicate: `collect` has done that. About 2 and 4 lines.
#
# <details><summary>Hint</summary>
#
# Each part has its own `state_dict()` and `load_state_dict(state)`. `set_random_states` takes the states of *this*
# rank. It comes last, because loading something else might draw random numbers.
# </details>


# %% tags=["setup"]
def random_states():
    """States of this rank's random generators: of the CPU, and of its GPU if it has one."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])


def set_random_states(states):
    """Put this rank's generators into states that `random_states` has returned."""
    for set_state, one in zip((torch.set_rng_state, torch.cuda.set_rng_state), states):
        set_state(one.cpu().clone())  # a clone, because a view of a larger tensor does not work


# %% tags=["balise-9"]
class Everything:
    """What a training run needs besides its network. It has a state_dict, like an optimizer."""

    def __init__(self, **parts):
        self.parts = parts  # by name: the optimizer, the scheduler, the loss scaler, ...
        self.epoch, self.batch = 0, 0  # position of the loader: epochs done, and batches done of this one
        self.random = None  # one entry per rank

    def collect(self):
        """On all ranks, before saving: get the random states of all."""
        self.random = [None] * dist.get_world_size()
        dist.all_gather_object(self.random, random_states())

    def state_dict(self):
        """All of it, as tensors and plain numbers."""
        # BEGIN SOLUTION
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {"parts": states, "epoch": self.epoch, "batch": self.batch, "random": self.random}
        # END SOLUTION

    def load_state_dict(self, state):
        """Put all of it back, on each rank."""
        # BEGIN SOLUTION
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.epoch, self.batch = state["epoch"], state["batch"]
        set_random_states(state["random"][dist.get_rank()])
        # END SOLUTION


# %%
tp.check(9, Everything)

# %% [markdown]
# In `train_on`, the signal's **handler only sets a flag**, and the ranks **agree** after each step whether to leave. A
# rank that left alone would keep the others waiting.


# %% tags=["setup"]
def train_on(path, epochs, notice_at=None, make=None):
    """Train, from a checkpoint if there is one. At SIGUSR1 save and leave. Returns (losses, whether it is done)."""
    device, noticed, losses = join_world(), [], []
    signal.signal(signal.SIGUSR1, lambda number, frame: noticed.append(number))  # nothing else
    first, relu, last = make_model()
    ddp = DDP(nn.Sequential(first, relu, nn.Dropout(0.3), last).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=40)
    scaler = torch.amp.GradScaler(device.type, growth_interval=10)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH // dist.get_world_size(), sampler=sampler, generator=torch.Generator())
    torch.manual_seed(dist.get_rank())
    rest = (make or Everything)(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    load_checkpoint(path, ddp, rest)
    for epoch in range(rest.epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in itertools.islice(loader, rest.batch, None):  # batches done before are loaded and dropped
            with torch.autocast(device.type, torch.float16):
                loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            rest.batch += 1
            losses.append(loss.item())
            if notice_at == len(losses) and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)  # to one rank alone
            leave = torch.tensor(len(noticed), device=device)
            dist.all_reduce(leave)
            if leave:
                rest.collect()
                save_checkpoint(path, ddp, rest, epoch)
                return losses, False
        rest.epoch, rest.batch = epoch + 1, 0
    return losses, True


# %%
off = tp.predict("You resume without the optimizer's state. By what % is the next loss off?", ...)


# %% jupyter={"source_hidden": true}
class Ignored:
    """A part whose state is not restored."""

    def load_state_dict(self, state):
        pass


class Without(Everything):
    """Everything, except that the part MISSING is not restored."""

    def load_state_dict(self, saved):
        fresh, part = random_states(), self.parts.get(MISSING)
        if part is not None:
            self.parts[MISSING] = Ignored()
        super().load_state_dict(saved)
        if part is not None:
            self.parts[MISSING] = part
        elif MISSING == "random states":
            set_random_states(fresh)
        else:
            self.batch = 0


FOLDER.mkdir(parents=True, exist_ok=True)
(FOLDER / "resumed.pt").unlink(missing_ok=True)
whole, _ = launch.ranks(train_on, FOLDER / "none.pt", EPOCHS, n=2)[0]
begun, _ = launch.ranks(train_on, FOLDER / "resumed.pt", EPOCHS, 27, n=2)[0]
print(f"{len(begun)} of {len(whole)} steps were done when rank 1 got the signal. By what % are later losses off?")
rows = []
for MISSING in (None, "optimizer", "scheduler", "scaler", "random states", "place of the loader"):
    rest = launch.ranks(train_on, FOLDER / "resumed.pt", EPOCHS, None, Without if MISSING else None, n=2)[0][0]
    gaps = [100 * abs(a - b) / b for a, b in zip(rest, whole[len(begun) :])]
    rows.append((MISSING or "nothing", gaps[0], gaps[1], max(gaps)))
report.table({"without": "{}", "first": "{:.2f}", "second": "{:.2f}", "largest": "{:.2f}"}, rows)
why = "The next loss is computed before the next update, so it is right. The second loss shows the mistake."
off.shows(rows[1][1], "{:.2f} %", why)

# %% [markdown]
# One correct loss doesn't prove a checkpoint complete. Now run the same training as a job:


# %% tags=["setup"] jupyter={"source_hidden": true}
def with_notice(script, seconds):
    """The batch script, with a signal `seconds` before the limit, for a job that may restart and keeps its output."""
    asked = f"#SBATCH --signal=USR1@{seconds}\n#SBATCH --requeue\n#SBATCH --open-mode=append\n"
    return script.replace("\n", "\n" + asked, 1)


def until_done():
    """What each rank of the job runs."""
    losses, done = train_on(FOLDER / "checkpoint.pt", EPOCHS)
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, {'done' if done else 'again'}, loss {losses[-1]:.6f}", flush=True)
        if not done:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


# %%
script = batch_script(1, RANKS, 1, 5, f"{sys.executable} {program(until_done)}")
(FOLDER / "again.sh").write_text(with_notice(script, 90))
(FOLDER / "checkpoint.pt").unlink(missing_ok=True)
shell("sbatch again.sh")

# %% [markdown]
# ## The training run, on several ranks · further
#
# Train the ResNet of works 01 to 06. **Weak scaling:** each rank keeps its batch. **Strong scaling:** the ranks
# share one batch.

# %%
twice = tp.predict("With weak scaling, by what factor do 2 ranks here process more images/s than one?", ...)


# %% jupyter={"source_hidden": true}
def images_a_second(strong):
    """On a rank: images a second of all ranks, in the training run under DDP."""
    torch.set_num_threads(1)  # on a CPU, a rank is one core
    size, n = training_run.setting(), dist.get_world_size()
    photos = training_run.make_loader().dataset
    batch = size.batch_size // n if strong else size.batch_size
    sampler = DistributedSampler(photos)
    workers = size.workers if FULL else 1  # for each rank: a node with GPUs has cores for each of them
    options = {"sampler": sampler, "shuffle": False, "num_workers": workers, "persistent_workers": True}
    loader = training_run.make_loader(batch_size=batch, **options)
    model = DDP(training_run.fast_model(len(photos.classes)))
    model = torch.compile(model) if FULL else model  # compile around DDP: the graph is cut where its buckets end
    record = training_run.run("scaling", training_run.fast_step, model=model, loader=loader)
    times = sorted(step["total"] for step in record.steps[record.warmup :])
    return n * batch / times[len(times) // 2]


# %%
rates = {}
for n in COUNTS:
    for strong in (False, True)[: 1 + (n > 1)]:
        rates[strong, n] = launch.ranks(images_a_second, strong, n=n, timeout=300)[0]
rows = [("strong" if strong else "weak", n, rate) for (strong, n), rate in rates.items()]
report.table({"scaling": "{}", "ranks": "{}", "images/s": "{:,.0f}"}, rows)
recorded.note("09_ddp", "scaling", [[strong, n, rate] for (strong, n), rate in rates.items()])
if 2 in COUNTS:
    why = "GPUs share only the link; ranks on a CPU share its memory and cores with each other and their loaders."
    twice.shows(rates[False, 2] / rates[False, 1], "× {:.2f}", why)

# %% jupyter={"source_hidden": true}
A100S = planner.Cluster(planner.A100)  # nodes of 8, a network card of 200 Gbit/s for each GPU
GRADIENTS = 4 * 25.6e6  # bytes: ResNet-50 in float32
STEP = 64 / planner.A100.resnet50_mixed  # seconds for 64 images on one A100, from its published throughput


def predicted(gpus, algorithm, overlap=True):
    """Efficiency of a data-parallel step on a number of GPUs."""
    near = min(gpus, 8)  # GPUs of a node

    def all_reduce(size):
        links = A100S.inside(near), A100S.between
        return planner.hierarchical_all_reduce(size, gpus // near, near, *links, algorithm)

    step = planner.data_parallel_step(STEP / 3, 2 * STEP / 3, GRADIENTS, all_reduce, overlap=overlap)
    return planner.scaling_efficiency(step)


counts = [2**k for k in range(2, 13)]
curves = {
    "ring, overlapped": ("#0072B2", "-", ("ring",)),
    "ring, after backward": ("#0072B2", "--", ("ring", False)),
    "tree, overlapped": ("#009E73", "-", ("tree",)),
}
figure, axes = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
for name, (colour, look, how) in curves.items():
    axes.plot(counts, [predicted(n, *how) for n in counts], look, color=colour, label=f"ResNet-50, {name} (model)")
measured = {"this machine": ("#D55E00", rates)}
if found := recorded.load("09_ddp", "scaling"):
    measured[recorded.where("09_ddp")] = ("#CC79A7", {(strong, n): rate for strong, n, rate in found})
for where, (colour, of) in measured.items():
    for kind, marker, strong in (("weak", "o", False), ("strong", "s", True)):
        points = {n: rate / (n * of[False, 1]) for (s, n), rate in of.items() if s == strong}
        axes.plot(list(points), list(points.values()), marker, color=colour, label=f"{where}, {kind} (measured)")
axes.set(xscale="log", xlabel="GPUs (this machine: ranks)", ylabel="efficiency", ylim=(0, 1.1))
ticks = [1, 2, *counts[::2]]
axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
axes.minorticks_off()
axes.set_title("How far does data parallelism scale?")
axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
plt.show()

# %% [markdown]
# The points are measured; the curves are a model of A100s. A ring's latency grows with the number of nodes, a tree's
# with its logarithm.

# %% [markdown]
# ## Measured again
#
# One rank trains on the same global batches as several. A hook counts the gradient bytes of a step.


# %% jupyter={"source_hidden": true}
def bytes_of_a_step():
    """What DDP exchanges in one step, counted by a hook on its buckets."""
    ddp, sent = DDP(make_model().to(launch.device())), []

    def count(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, count)
    ddp(torch.zeros(4, 64, device=launch.device())).sum().backward()
    return sum(sent)


# %% tags=["slide"]
rows = []
for n in (1, RANKS):
    module, found = launch.ranks(train, make_model, train_set, EPOCHS, BATCH, RATE, n=n)[0]
    exchanged = launch.ranks(bytes_of_a_step, n=n)[0] if n > 1 else 0
    rows.append((f"{n} rank{'s' * (n > 1)}", BATCH // n, exchanged, found[-1], accuracy(module)))
report.table(COLUMNS, rows)

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Going from 1 GPU to 8, with the same batch per GPU, the loss falls more slowly per epoch. Why?</summary>
#
# The global batch is 8 times as large, so there are 8 times fewer updates in an epoch. With the linear rule, the
# learning rate is 8 times as large; the warm-up keeps the first updates from diverging.
# </details>
#
# <details><summary>One rank raises an exception in its data loader. What do the others do?</summary>
#
# They wait in their next all-reduce. If the failed process ends, gloo notices the closed connection and the others fail
# too; NCCL may notice only at the process group's timeout. torchrun and `launch.ranks` end the others soon after one
# process has failed. Look for the rank that failed <em>first</em>: its message names the cause.
# </details>
#
# <details><summary>Why must every rank build the same network with its layers in the same order?</summary>
#
# Buckets are filled by position, not by name. Two ranks with a different order would average the gradient of one layer
# with that of another, and nothing would complain if the sizes agreed.
# </details>
#
# ## To remember
#
# DDP averages gradients; everything else is yours. Shares must be equal, the order must change with the epoch, metrics
# are sums and counts exchanged once, and one rank writes a checkpoint that is whole or absent. You can *test* that many
# ranks compute what one process would.
