# %% [markdown]
# # Compression: smaller, and at times faster
#
# Placeholder of the opening.

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, launch, measure, planner, report, scale, todo

tp = course.open("22_compression")
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
# ### Balise 1 · Distillation
#
# Placeholder of balise 1. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-1"]
def distillation_loss(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(1, distillation_loss)

# %% [markdown]
# ## The omitted digit
#
# Placeholder after balise 1.

# %% [markdown]
# ### Balise 2 · Affine quantization
#
# Placeholder of balise 2. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-2"]
def quantize(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(2, quantize)

# %% [markdown]
# ### Balise 3 · A network in integers
#
# Placeholder of balise 3. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-3"]
def integer_layer(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(3, integer_layer)

# %% [markdown]
# ### Balise 4 · Training through the rounding
#
# Placeholder of balise 4. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-4"]
def fake_quantize(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(4, fake_quantize)

# %% [markdown]
# ## Two bits: with and without training
#
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · Pruning by magnitude
#
# Placeholder of balise 5. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-5"]
def prune(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(5, prune)

# %% [markdown]
# ## The lottery ticket
#
# Placeholder after balise 5.

# %% [markdown]
# ### Balise 6 · Two of four
#
# Placeholder of balise 6. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-6"]
def two_of_four(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(6, two_of_four)

# %% [markdown]
# ## Why zeros gain no time
#
# Placeholder after balise 6.

# %% [markdown]
# ### Balise 7 · Eight bits of floating point
#
# Placeholder of balise 7. About 1 line.
#
# <details><summary>Hint</summary>
#
# Placeholder.
# </details>


# %% tags=["balise-7"]
def to_float8(x):
    """Placeholder."""
    # BEGIN SOLUTION
    return x
    # END SOLUTION


# %%
tp.check(7, to_float8)

# %% [markdown]
# ## A training step in FP8
#
# Placeholder after balise 7.

# %% [markdown]
# ## Deployment: ONNX Runtime
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
