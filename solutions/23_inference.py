# %% [markdown]
# # Inference: a token at a time
#
# Placeholder of the opening.

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, launch, measure, planner, report, scale, todo

tp = course.open("23_inference")
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
# ### Balise 1 · A cache of keys and values
#
# Placeholder of balise 1. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-1"]
def decode(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(1, decode)

# %% [markdown]
# ### Balise 2 · What a token costs
#
# Placeholder of balise 2. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-2"]
def decode_cost(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(2, decode_cost)

# %% [markdown]
# ### Balise 3 · Paged attention
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def BlockTable(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, BlockTable)

# %% [markdown]
# ### Balise 4 · Continuous batching
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def schedule(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, schedule)

# %% [markdown]
# ## Arrivals: throughput and waiting
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · Speculative decoding
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def accept(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, accept)

# %% [markdown]
# ### Balise 6 · Samples that share blocks
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def sample(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, sample)

# %% [markdown]
# ### Balise 7 · Heads on several ranks
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def decode_on_ranks(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, decode_on_ranks)

# %% [markdown]
# ## What vLLM does with the same ideas
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
