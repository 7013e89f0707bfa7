# %% [markdown]
# # Large models: where memory goes, and where data parallelism ends
#
# Placeholder of the opening.

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, launch, measure, planner, report, scale, todo

tp = course.open("12_large_models")
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
# ### Balise 1 · Patches, class token, positions
#
# Placeholder of balise 1. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-1"]
def embed_patches(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(1, embed_patches)

# %% [markdown]
# ### Balise 2 · Attention with relative positions
#
# Placeholder of balise 2. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-2"]
def relative_attention(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(2, relative_attention)

# %% [markdown]
# ## What written-out scores cost
#
# Placeholder after balise 2.

# %% [markdown]
# ### Balise 3 · Parameters and operations, as formulas
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def count(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, count)

# %% [markdown]
# ### Balise 4 · Where memory goes
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def predict_memory(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, predict_memory)

# %% [markdown]
# ## Predicted beside measured
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · Recomputation under a budget
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def choose_blocks(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, choose_blocks)

# %% [markdown]
# ## Measured: memory against time
#
# Placeholder after balise 5.

# %% [markdown]
# ### Balise 6 · The optimizer's step inside backward
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def step_in_backward(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, step_in_backward)

# %% [markdown]
# ### Balise 7 · Where data parallelism ends
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def largest(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, largest)

# %% [markdown]
# ## The limit, card by card
#
# Placeholder after balise 7.

# %% [markdown]
# ## Race
#
# Placeholder.

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
