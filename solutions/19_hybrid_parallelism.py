# %% [markdown]
# # Hybrid parallelism: three dimensions, and the best compromise
#
# Placeholder of the opening.

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, launch, measure, planner, report, scale, todo

tp = course.open("19_hybrid_parallelism")
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
# ### Balise 1 · A mesh of ranks
#
# Placeholder of balise 1. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-1"]
def mesh(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(1, mesh)

# %% [markdown]
# ### Balise 2 · One step on three axes
#
# Placeholder of balise 2. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-2"]
def hybrid_step(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(2, hybrid_step)

# %% [markdown]
# ### Balise 3 · The norm and the loss over the grid
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def global_norm(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, global_norm)

# %% [markdown]
# ## Our grid beside PyTorch's
#
# Placeholder after balise 3.

# %% [markdown]
# ### Balise 4 · The memory of a rank
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def rank_memory(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, rank_memory)

# %% [markdown]
# ## Predicted beside measured
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · The time of a step
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def step_time(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, step_time)

# %% [markdown]
# ### Balise 6 · The search
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def search(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, search)

# %% [markdown]
# ## Predicted order, measured order
#
# Placeholder after balise 6.

# %% [markdown]
# ### Balise 7 · The published table
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def fit_constants(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, fit_constants)

# %% [markdown]
# ## Past this machine
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
