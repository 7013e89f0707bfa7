# %% [markdown] tags=["slide"]
# # Welcome: the course and its tools · about 30 min
#
# **Who is it for?** Anyone who can write a training loop in PyTorch. You need no CUDA, no C and no cluster: the same
# notebooks run on two CPU cores and on a node full of GPUs. Only the sizes change.
#
# **Afterwards,** you can
#
# 1. find out with measurements why a training step is slow, and make it faster on one device;
# 2. write data parallelism yourself, and train with DDP on many ranks;
# 3. train models too large for one GPU, with FSDP, pipelines and tensor slicing;
# 4. predict the memory, messages and time of a parallel layout before you run it;
# 5. fine-tune, compress and serve a model.

# %% [markdown]
# **Which work builds on which?**
#
# - 01 to 07: one device.
# - 08: data parallelism. Then 09 (DDP), 10 (large batches), 11 (hyperparameters).
# - 12 → 13 → 14: large models, ZeRO, FSDP.
# - 15 → 16: pipelines.
# - 17: tensor slicing. Then 18 (long sequences and experts), 19 (hybrid parallelism), 20 (DeepSpeed).
# - 21, 22, 23: fine-tuning, compression, inference.
# - 24: kernels in Triton, after 03 and 06.
# - 25: the race at the end.

# %% tags=["setup"]
import os

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import course, launch, measure, report, scale, todo

tp = course.open("00_welcome")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"  # if there is a GPU; the environment variable DLOJZ_SCALE overrides this
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 4096 if FULL else 256
WIDTH = 4096 if FULL else 512
STEPS = 20
print(f"scale {scale()}, on {DEVICE}: batches of {BATCH} vectors of {WIDTH} numbers, {STEPS} steps")

# %% [markdown]
# ## A balise and its verdict
#
# A **balise** is a hole in the code. Run the next two cells unchanged: nothing breaks, and "Run All Cells" goes
# on. Then replace `todo(1)` with your answer, and run them again.
#
# ### Balise 1 · Say what this process may use · about 11 min
#
# Return a dictionary with four keys:
#
# - `"device"`: `"cuda"` if torch can use a GPU, otherwise `"cpu"`;
# - `"gpus"`: the number of GPUs this process may use, an integer;
# - `"cores"`: the number of CPU cores **this process** may use, an integer. On a shared node, that's fewer than the
#   node has;
# - `"torch"`: the version of torch, a string.
#
# About 6 lines.
#
# <details><summary>Hint</summary>
#
# `torch.cuda` has `is_available()` and `device_count()`. `os.cpu_count()` counts the cores of the node;
# `os.sched_getaffinity(0)` is the set of cores that the system lets this process run on.
# </details>


# %% tags=["balise-1", "slide-mistake=cores-of-the-node"]
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
# The check runs your answer on *simulated* machines, such as one with two cores and four GPUs. It looks at what your
# code *does*, not at how it is written. Here is a common wrong answer, with its hint.


# %%
def describe_machine_of_a_hurried_person():
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


tp.show(1, describe_machine_of_a_hurried_person)  # shows a verdict without counting it

# %% [markdown] tags=["slide"]
# ## Ranks
#
# From work 08 on, several processes work together. Each is a **rank**, with a number from 0 to `world_size − 1`.
# `launch.ranks(function, ..., n=4)` runs a function in four ranks and returns their results. `x.to(launch.device())`
# moves a tensor to its rank's device, a GPU or the CPU.


# %% tags=["slide-more"]
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = torch.tensor(float(rank + 1), device=launch.device())
    dist.all_reduce(number)  # in place: afterwards every rank holds the sum
    print(f"I am rank {rank} of {world_size}, and the sum of 1 to {world_size} is {number.item():.0f}")
    return number.item()


launch.ranks(hello, n=4)

# %% [markdown]
# If a rank fails, you're told which one and why. Here the error is intended.


# %%
def one_rank_fails():
    if dist.get_rank() == 2:
        raise ValueError("the disk of rank 2 is full")
    dist.barrier()  # the others wait here for a rank that never arrives


try:
    launch.ranks(one_rank_fails, n=4)
except launch.RankError as error:
    print(error)

# %% [markdown]
# `%%ranks 2` runs a cell on two ranks that **live until the notebook ends**, so that you can look around. They have
# their own variables. `--take x` sends them a value from the notebook. The value of the last line is shown per rank.

# %%
# %%ranks 2
half = torch.arange(6.0, device=launch.device()).chunk(2)[dist.get_rank()]
dist.get_rank(), half.tolist()

# %%
# %%ranks
total = half.sum()
mine = total.item()
dist.all_reduce(total)
mine, total.item()

# %% [markdown]
# Here rank 1 never calls `all_reduce`: a **deadlock**. `--fails` says that the error is intended.

# %%
# %%ranks --fails --timeout 10
if dist.get_rank() == 0:
    dist.all_reduce(half)

# %% [markdown]
# ### Balise 2 · Sum a tensor over ranks · about 11 min
#
# Every rank gets the same `values`. Return their sum on **every** rank, and share the work. About 4 lines.
#
# **Write all of it:** `tp.open_task(2)` puts a cell below with only the name and the docstring. Let each rank read only
# its share, yet know the whole sum.
#
# <details><summary>Hint</summary>
#
# `values[a::b]` takes every b-th value, starting at a, and may be empty. The sum of an empty tensor is 0.
# `dist.all_reduce(t)` adds up `t` over the ranks, in place, and returns nothing useful.
# </details>


# %% tags=["balise-2", "slide-mistake=reduce-not-all-reduce"]
def distributed_sum(values):
    """Sum `values`, shape (n,), the same on every rank. Returns a tensor () with their dtype, on every rank.

    values: int64, which are summed exactly, or floating point. They stay unchanged. n may be any number above 0, even
    smaller than world_size. Each rank reads only about n / world_size values, and sends one number. When the function
    returns, the sum is complete.
    """
    # BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = values[rank::world_size].sum()
    dist.all_reduce(total)
    return total
    # END SOLUTION


# %%
tp.check(2, distributed_sum)


# %%
def sum_of_all(values):
    return distributed_sum(values.to(launch.device())).item()


values = torch.rand(1_000_003)
print("one process:", values.sum().item())
print("three ranks:", launch.ranks(sum_of_all, values, n=3, timeout=10)[0])

# %% [markdown]
# The last digits may differ, because the numbers are added in a different order. Verdicts allow for that.
#
# If you fall behind, `tp.catch_up(2)` defines our answers to balises 1 and 2; your cells don't change. Balises marked
# *further* are optional: until you write one, the notebook uses our answer. `tp.progress()` shows where you are.
#
# A **★** means that nothing is left to fix. Amber, *works, not yet robust*, means that the idea is right, but an edge
# case isn't. It counts as done. Where PyTorch does the same job, `tp.race(N)` times your ★ answer against PyTorch's.
#
# If your class sets `DLOJZ_CLASS`, your instructor sees the result of each check (balise, verdict, hint, tries and
# time; with `DLOJZ_RACE=1`, ratios of races), but not your code. `%env DLOJZ_CLASS=` in a cell turns that off for this
# notebook.

# %%
tp.progress()

# %% [markdown]
# ## A measured step
#
# A `Chronometer` times the parts of a training step, and a **report** draws what was measured.

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

# %% tags=["slide"]
report.inspection(record)

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Why does <code>os.cpu_count()</code> mislead on a shared node?</summary>
#
# It counts the node's cores. Slurm and containers give a process only some of them. If you start as many threads as the
# node has cores, they wait for each other.
# </details>
#
# <details><summary>One rank returns before <code>all_reduce</code>; all the others call it. What happens?</summary>
#
# The others wait. A collective is complete only when every rank has called it. Here the launcher notices, stops them,
# and says which one was missing. Without it, they would wait many minutes for a timeout.
# </details>
#
# <details><summary>With N ranks, how much faster can the sum of n values get?</summary>
#
# Each rank reads n/N values, so up to N times. But ranks also have to exchange messages. For a million numbers the
# messages cost more than the sum. The whole course asks when distributing pays off.
# </details>
#
# ## To remember
#
# A verdict judges what your code does. Ranks are processes that communicate through collectives. A claim about speed
# counts only once it's measured. Go on with **01_gpu_acceleration**.
