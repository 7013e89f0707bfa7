# %% [markdown]
# # Learning rates, optimizers and large batches
#
# (opening: integrator)

# %% tags=["setup"]
import copy
import math

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, scale, todo
from dlojz_tp.training.side_by_side import SideBySide

tp = course.open("10_learning_rate_and_large_batch")
tp

# %% tags=["setup"]
FULL = scale() == "full"
digits = data.digits()
X, Y = digits.train_x, digits.train_y  # (1438, 1, 8, 8) in [0, 1], (1438,)
VAL_X, VAL_Y = digits.val_x, digits.val_y  # 359 of each


def network(width=128):
    """Two hidden layers: 64 → width → width → 10."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()),
        nn.Linear(width, 10),
    )


# %% [markdown]
# ## The idea
#
# (integrator)

# %% [markdown]
# ## The baseline: one rate, one batch size
#
# (integrator)

# %% [markdown]
# ## Learning rates that change: schedules
#
# (author A)
#
# ### Balise 1 · Schedules
#
# (author A)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-1"]
def warmup_cosine(step, total, warmup, peak, floor=0.0):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(1, warmup_cosine)

# %% [markdown]
# ## Measured: one cycle against a constant rate; snapshots as an ensemble
#
# (author A, behind balise 2 where it needs it)

# %% [markdown]
# ## Which rate? A finder
#
# (author A)
#
# ### Balise 2 · A learning-rate finder
#
# (author A)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-2"]
def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(2, find_rates)

# %% [markdown]
# ## AdamW by hand
#
# (author B)
#
# ### Balise 3 · AdamW
#
# (author B)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-3"]
def parameter_groups(model, weight_decay):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(3, parameter_groups)

# %% [markdown]
# ## Clip, and accumulate
#
# (author C)
#
# ### Balise 4 · Clip and accumulate
#
# (author C)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-4"]
def clip_gradients(parameters, max_norm):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(4, clip_gradients)

# %% [markdown]
# ## Trust ratios: LARS and LAMB
#
# (author B)
#
# ### Balise 5 · LARS and LAMB
#
# (author B)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-5"]
def trust_ratios(weights, updates):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(5, trust_ratios)

# %% [markdown]
# ## Orthogonal steps: Muon
#
# (author B)
#
# ### Balise 6 · Muon
#
# (author B)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-6"]
def orthogonalise(matrices, steps=5):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(6, orthogonalise)

# %% [markdown]
# ## Batch 32 against batch 1,438, at a fixed number of epochs
#
# (author B)

# %% [markdown]
# ## How large is too large? The gradient noise scale
#
# (author C)
#
# ### Balise 7 · The gradient noise scale
#
# (author C)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-7"]
def noise_scale(pairs, small, big):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(7, noise_scale)

# %% [markdown]
# ## The bend: steps to a target against the batch size
#
# (author C)

# %% [markdown]
# ## Flat or sharp? Measure it
#
# (author C: slice of the loss surface with and without skip connections; sharpness of small- and large-batch minima)

# %% [markdown]
# ## Stop early, and resume exactly
#
# (author A)
#
# ### Balise 8 · Stop early, resume exactly
#
# (author A)
#
# <details><summary>Hint</summary>
#
# none yet
# </details>


# %% tags=["balise-8"]
def save_checkpoint(path, **parts):
    # BEGIN SOLUTION
    raise NotImplementedError
    # END SOLUTION


# %%
tp.check(8, save_checkpoint)

# %% [markdown]
# ## Past this machine
#
# (integrator)

# %% [markdown]
# ## Questions
#
# (integrator)

# %% [markdown]
# ## To remember
#
# (integrator)

# %%
tp.progress()
