# %% [markdown]
# # Hyperparameter search, from a grid to a supercomputer
#
# (opening: integrator)

# %% tags=["setup"]
import copy
import heapq
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from dlojz_tp import course, data, launch, measure, scale, todo

tp = course.open("11_hyperparameter_search")
tp

# %% tags=["setup"]
FULL = scale() == "full"

# %% [markdown]
# ## The idea
#
# (integrator)

# %% [markdown]
# ## A benchmark made on the spot
#
# (table author)

# %% [markdown]
# ## Draw, or lay a grid
#
# (balise 1)

# %% [markdown]
# ## Stop early: successive halving
#
# (balise 2)

# %% [markdown]
# ## Never wait: ASHA
#
# (balise 3)

# %% [markdown]
# ## Learn from what was tried: Bayesian search
#
# (balise 4)

# %% [markdown]
# ## Change while training: populations
#
# (balise 5)

# %% [markdown]
# ## A study on many nodes: Optuna
#
# (balise 6)

# %% [markdown]
# ## The same with Ray Tune
#
# (balise 7)

# %% [markdown]
# ## All of them, at equal budget
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
