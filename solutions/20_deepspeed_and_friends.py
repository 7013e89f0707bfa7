# %% [markdown]
# # DeepSpeed and friends: one training, four engines
#
# Placeholder of the opening.

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, frameworks, launch, measure, planner, recorded, report, scale, todo

tp = course.open("20_deepspeed_and_friends")
tp

# %% tags=["setup"]
FULL = scale() == "full"

# %% [markdown]
# ## The idea
#
# Placeholder.

# %% [markdown]
# ## Baseline
#
# Placeholder.

# %% [markdown]
# ### Balise 1 · The arithmetic of batches
#
# A step moves the weights once, after `batch` samples. They come in pieces: each of the `n_ranks` ranks takes `accumulation`
# **micro-batches** of `micro` samples, one after the other, so that activations of `micro` samples alone are in memory:
#
# $$\text{batch} \;=\; \text{micro} \times \text{accumulation} \times \text{ranks}$$
#
# Every library has words of its own for this, and leaves some to you:
#
# | library | its words | what they count |
# |---|---|---|
# | DeepSpeed | `train_batch_size` | samples of a step, all ranks |
# | | `train_micro_batch_size_per_gpu` | samples of one forward on one rank |
# | | `gradient_accumulation_steps` | forwards of a rank in a step |
# | transformers | `per_device_train_batch_size` (if not given: 8) | samples of one forward on one rank |
# | | `gradient_accumulation_steps` (if not given: 1) | forwards of a rank in a step |
# | Accelerate | `batch_size` of the `DataLoader` | samples of one forward on one rank; with `split_batches=True`: on all ranks together |
# | | `gradient_accumulation_steps` (if not given: 1) | forwards of a rank in a step |
# | Fabric | `batch_size` of the `DataLoader` | samples of one forward on one rank |
# | | none: your loop counts; here `every` (if not given: 1) | forwards of a rank in a step |
#
# **`batch_sizes(n_ranks, batch=None, micro=None, accumulation=None)`** returns all three, `(batch, micro, accumulation)`, from
# those that are given. At least one of `batch` and `micro` is; without `accumulation`, what the other two leave decides it,
# and it is 1 if only one is given. It raises a `ValueError` where that cannot be: a number below 1, neither `batch` nor `micro`,
# a product that is not `batch`. In the last case its message names the nearest batches that *would* do, below and
# above, with the numbers that are given kept (where all three are given, only one would). For 30 samples as micro-batches
# of 4 on 2 ranks: 24 and 32. About 9 lines.
#
# **`from_words(library, words, n_ranks)`** returns the same three for a run of another library. `library` is `"deepspeed"`,
# `"transformers"`, `"accelerate"` or `"fabric"`, `words` a dictionary with words of the table. What does not divide is a
# `ValueError` here too. About 8 lines.
#
# <details><summary>Hint</summary>
#
# With the numbers that are given, a step has a multiple of `unit = n_ranks * (micro or 1) * (accumulation or 1)` samples, and what is
# missing is that multiple: `batch // unit`. With a `DataLoader` that serves all ranks together you know how many samples all of
# them take in one forward; so you know `batch` and `accumulation`, and not `micro`.
# </details>


# %% tags=["balise-1"]
def batch_sizes(n_ranks, batch=None, micro=None, accumulation=None):
    """(batch, micro, accumulation) of a step, from those that are given; ValueError if they contradict each other."""
    # BEGIN SOLUTION
    if batch is None and micro is None:
        raise ValueError("give the samples of a step (batch) or of one forward on one rank (micro)")
    if any(number is not None and number < 1 for number in (n_ranks, batch, micro, accumulation)):
        raise ValueError("ranks, batch, micro and accumulation are 1 or more")
    unit = n_ranks * (micro or 1) * (accumulation or 1)
    batch = batch or unit
    most = 1 if micro and accumulation else max(1, batch // unit)
    if batch != most * unit:
        fits = {most * unit} if micro and accumulation or batch < unit else {most * unit, (most + 1) * unit}
        raise ValueError(f"a step of {batch} samples does not come out: {' or '.join(map(str, sorted(fits)))} would")
    return batch, micro or most, accumulation or (most if micro else 1)
    # END SOLUTION


def from_words(library, words, n_ranks):
    """(batch, micro, accumulation) of a run described in the words of a library; ValueError if they do not fit."""
    # BEGIN SOLUTION
    if library == "deepspeed":
        keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        return batch_sizes(n_ranks, *map(words.get, keys))
    accumulation = words.get("every" if library == "fabric" else "gradient_accumulation_steps", 1)
    if words.get("split_batches"):
        return batch_sizes(n_ranks, words["batch_size"] * accumulation, None, accumulation)
    micro = words.get("per_device_train_batch_size", 8) if library == "transformers" else words["batch_size"]
    return batch_sizes(n_ranks, None, micro, accumulation)
    # END SOLUTION


# %%
tp.check(1, batch_sizes, from_words)

# %% [markdown]
# DeepSpeed finds contradictions too, in its engine's first second, on every rank. Where numbers are missing, it first divides
# and rounds down, and then tells you that numbers are wrong of which you gave only two:
#
# > `AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 30 != 4 * 3 * 2`
#
# On a cluster it says so after the job has waited in the queue. An answer of yours takes no time, and needs no GPU.

# %%
WORDS = {
    "deepspeed": {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4},
    "transformers": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "accelerate": {"batch_size": 256, "split_batches": True, "gradient_accumulation_steps": 4},
    "fabric": {"batch_size": 4, "every": 4},
}
for ranks in (64, 32):
    print(f"on {ranks} ranks          batch  micro  accumulation")
    for library, words in WORDS.items():
        try:
            print(f"  {library:<14}", "{:>8} {:>6} {:>13}".format(*from_words(library, words, ranks)))
        except ValueError as error:
            print(f"  {library:<14} {error}")

# %% [markdown]
# The same files on half of the ranks: in the first and the third library the step stays as it is, in the two others it
# becomes half as large without a word, and the learning rate does not know. (Of 07 you know what that does.)

# %% [markdown]
# ### Balise 2 · A configuration for DeepSpeed
#
# Placeholder of balise 2. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-2"]
def deepspeed_config(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(2, deepspeed_config)

# %% [markdown]
# ### Balise 3 · The engine's loop
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def engine_step(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, engine_step)

# %% [markdown]
# ### Balise 4 · A fused optimizer
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def FusedAdamW(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, FusedAdamW)

# %% [markdown]
# ## Race: launches and time
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · 1-bit Adam
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def OneBitAdam(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, OneBitAdam)

# %% [markdown]
# ## What a network would gain
#
# Placeholder after balise 5.

# %% [markdown]
# ### Balise 6 · Accelerate
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def train_with_accelerate(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, train_with_accelerate)

# %% [markdown]
# ### Balise 7 · Lightning Fabric
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def train_with_fabric(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, train_with_fabric)

# %% [markdown]
# ## The table
#
# Placeholder after balise 7.

# %% [markdown]
# ## What torchtitan and Megatron-LM add
#
# Placeholder.

# %% [markdown]
# ## Questions
#
# Placeholder.

# %% [markdown]
# ## In one paragraph
#
# Placeholder.

# %%
tp.progress()
