# %% [markdown]
# # Welcome: the tools of the course · about 20 min
#
# In twenty minutes you will have met the four things that every practical work is made of:
#
# | | |
# |---|---|
# | a **balise** | a numbered hole in the code, for you to fill |
# | a **verdict** | what the course says of your answer, in a second or a few, with a hint |
# | **ranks** | processes that compute together, started from a cell |
# | a **report** | a figure drawn from what was measured |
#
# The same notebook runs on a laptop with two cores and on a node full of GPUs. Only the sizes change.

# %% tags=["setup"]
import os

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import course, launch, measure, report, scale, todo

tp = course.open("00_welcome")
tp

# %% [markdown]
# The sizes of this notebook are all here. `scale()` says "full" where there is a GPU and "small" elsewhere; the
# environment variable `DLOJZ_SCALE` overrules it.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 4096 if FULL else 256
WIDTH = 4096 if FULL else 512
STEPS = 20
print(f"scale {scale()}, on {DEVICE}: batches of {BATCH} vectors of {WIDTH} numbers, {STEPS} steps")

# %% [markdown]
# ## 1 · A balise
#
# Below is your first one. The line `todo(1)` stands where your code belongs. Run the two cells as they are first: the
# verdict is calm, and "Run All Cells" goes on to the end of the notebook. Then write your answer over `todo(1)` and run
# them again. You can do so as often as you like.

# %% [markdown]
# ### Balise 1 · Say what this process may use · about 8 min
#
# Return a dictionary with four keys, found by asking the system:
#
# - `"device"`: the string `"cuda"` if torch can use a GPU, else `"cpu"`;
# - `"gpus"`: how many GPUs this process may use, an integer, 0 if none;
# - `"cores"`: how many CPU cores **this process** may use, an integer. On a shared node that is less than the node has;
# - `"torch"`: the version of torch, a string.
#
# About 6 lines.
#
# <details><summary>Hint</summary>
#
# `torch.cuda` has `is_available()` and `device_count()`. `os.cpu_count()` counts the cores of the node;
# `os.sched_getaffinity(0)` is the set of cores that the system lets this process run on.
# </details>


# %% tags=["balise-1"]
def describe_machine():
    """Return {"device": "cuda" or "cpu", "gpus": int, "cores": int, "torch": str} for this process."""
    # BEGIN SOLUTION
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    # END SOLUTION


# %%
tp.check(1, describe_machine)

# %% [markdown]
# Once there is an answer, the verdict runs it three times on *pretended* machines: with one core and no GPU, with two
# cores and four GPUs, with one of each. A check of this course never compares with our code. It compares with a truth found in another
# way, and it also looks at what your code *does*.
#
# **See a wrong answer.** Here is one that nearly everybody has written once. Run it and read the verdict: what was
# expected, what came, for which input, and a hint.


# %%
def describe_machine_of_a_hurried_person():
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


tp.show(1, describe_machine_of_a_hurried_person)  # shows a verdict without counting it

# %% [markdown]
# ## 2 · Ranks
#
# From practical work 08 on, several processes compute together. Each is a **rank**: a number from 0 to `world_size − 1`.
# `launch.ranks(function, ..., n=4)` starts four of them on this machine, runs the function in each, and returns what
# each returned. The function is an ordinary one of this notebook.
#
# With a GPU for each rank they talk through NCCL; otherwise through gloo, on the CPU. The code is the same: tensors
# arrive on the CPU, and `x.to(launch.device())` brings one to where its rank computes.


# %%
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = torch.tensor(float(rank + 1), device=launch.device())
    dist.all_reduce(number)  # in place: afterwards every rank holds the sum
    print(f"I am rank {rank} of {world_size}, and the sum of 1 to {world_size} is {number.item():.0f}")
    return number.item()


launch.ranks(hello, n=4)

# %% [markdown]
# `all_reduce` is the heart of data parallelism: every rank gives a tensor, every rank gets the sum.
#
# $$\text{all-reduce:}\qquad x_r \;\longleftarrow\; \sum_{k=0}^{N-1} x_k \qquad\text{on every rank } r$$
#
# And if a rank fails? You are told which one, and why, and nothing is left running. Try it: the error is the point here.


# %%
def one_rank_fails():
    if dist.get_rank() == 2:
        raise ValueError("the disk of rank 2 is full")
    dist.barrier()  # the others wait here for a rank that will not come


try:
    launch.ranks(one_rank_fails, n=4)
except launch.RankError as error:
    print(error)

# %% [markdown]
# ### Balise 2 · Sum a tensor over ranks · about 7 min
#
# Every rank is given the same `values`, a tensor of shape `(n,)`. Return the sum of all values, as a tensor without
# dimensions, of the same dtype (int64 or floating point), on **every** rank, and share the work: each rank reads only
# its part, about `n / world_size` values, and sends one number.
#
# It must work when `n` does not divide by `world_size`, and when there are fewer values than ranks. About 4 lines.
#
# <details><summary>Hint</summary>
#
# `values[a::b]` is every b-th value from the a-th on, and may be empty. The sum of an empty tensor is 0.
# `dist.all_reduce(t)` adds up `t` over the ranks, in place, and returns nothing useful.
# </details>


# %% tags=["balise-2"]
def distributed_sum(values):
    """Sum `values`, shape (n,), the same on every rank; each rank adds up its share. Returns shape () on every rank."""
    # BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = values[rank::world_size].sum()
    dist.all_reduce(total)
    return total
    # END SOLUTION


# %%
tp.check(2, distributed_sum)

# %% [markdown]
# Now use it. A sum that is split over ranks is rounded in another order, so the last digits may differ: that is why the
# checks of this course compare with a tolerance, never to the last bit.



# %%
def sum_of_all(values):
    return distributed_sum(values.to(launch.device())).item()  # NCCL sends what lies on a GPU


values = torch.rand(1_000_003)
print("one process:", values.sum().item())
print("three ranks:", launch.ranks(sum_of_all, values, n=3, timeout=10)[0])

# %% [markdown]
# Fallen behind? `tp.catch_up(2)` defines our answers to balises 1 and 2 in the notebook, and your cells stay as they
# are. A verdict that passed with our answer says so. `tp.progress()` shows where you stand: the last verdict counts.
#
# In the notebooks to come, some balises are *further*: their headings say so. The others are the core. You need not write
# what is further: our answers stand in until you do.
#
# Does your instructor see it? Only where the variable `DLOJZ_CLASS` names a folder of your class. Each verdict is then noted there
# for the instructor alone: the work, the balise, the verdict, the name of the hint, how often you tried, the time. Your code is
# not. A cell with `%env DLOJZ_CLASS=` ends it for this notebook.

# %%
tp.progress()

# %% [markdown]
# ## 3 · A measured step
#
# This course believes what was measured. A `Chronometer` times the four parts of a training step: loading the batch,
# forward, backward, optimizer. On a GPU it uses CUDA events, so that measuring does not slow the step down.

# %%
network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).to(DEVICE)
sgd = torch.optim.SGD(network.parameters(), lr=0.1)
batches = [(torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))) for _ in range(4)] * (STEPS // 4 + 1)

chrono = measure.Chronometer(DEVICE, warmup=3)
for x_bd, y_b in chrono.steps(batches, n=STEPS):
    with chrono.forward():
        loss = nn.functional.cross_entropy(network(x_bd.to(DEVICE)), y_b.to(DEVICE))
    with chrono.backward():
        loss.backward()
    with chrono.optimizer():
        sgd.step()
        sgd.zero_grad()

record = chrono.record(name="first step", batch_size=BATCH)
print(f"{record.images_per_second:,.0f} vectors per second")

# %%
report.inspection(record)

# %% [markdown]
# The record can be saved, carried to another notebook and compared: reports read records, never log files.
#
# ## Three questions
#
# <details><summary>Why does <code>os.cpu_count()</code> mislead on a shared node?</summary>
#
# It counts the node's cores. Slurm and containers give a process some of them. Starting as many threads as the node has
# cores makes them wait for each other.
# </details>
#
# <details><summary>One rank returns before it calls <code>all_reduce</code>; all others call it. What happens?</summary>
#
# The others wait. A collective is complete only when every rank has called it. Here the course sees that they wait, ends them,
# and says who was missing; on a real machine they would wait for many minutes.
# </details>
#
# <details><summary>With N ranks, how much faster can the sum of n values get?</summary>
#
# Each rank reads n/N values, so up to N times; but one message has to go round. For a million numbers the message costs
# more than the sum. When is distributing worth it? That question goes through the whole course.
# </details>
#
# ## To remember
#
# A balise is a hole, a verdict tells you what it saw, ranks are processes that agree through collectives, and a claim
# about speed is worth something when it was measured. Go on with **01_gpu_acceleration**.
