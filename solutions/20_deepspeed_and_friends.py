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
# Placeholder of balise 1. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-1"]
def batch_sizes(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(1, batch_sizes)

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
