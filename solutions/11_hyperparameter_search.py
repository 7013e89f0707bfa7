# %% [markdown]
# # Hyperparameter search, from a grid to a supercomputer
#
# Gradient descent finds the weights. What it needs itself (a learning rate, a batch size, a width, an optimizer) is found by
# trying, and each trial is a whole training: a search is the most expensive thing that most teams ever run. It is also the
# part of the work that is most often reported from one lucky run.
#
# In this practical work you write the methods that make do with less: you stop poor trials early, you never let a worker
# wait for another, you let a model of the past choose the next trial, you change rates in the middle of training. You compare
# them with **medians over a hundred repetitions**. Then you spread a search over processes with Optuna and with Ray.
#
# **What you will gain.** The first cell below estimates it for a ResNet-50, each trial on a GPU of its own.

# %% tags=["setup"]
import copy
import heapq
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, scale, todo

tp = course.open("11_hyperparameter_search")
tp

# %% tags=["setup"]
FULL = scale() == "full"

# %%
EPOCH = 1_281_167 / planner.A100.resnet50_mixed / 3600  # hours: ImageNet once, ResNet-50, on one A100
TRIALS = EPOCHS = 81
every = TRIALS * EPOCHS * EPOCH
stopped = TRIALS * (1 + 4 * (1 - 1 / 3)) * EPOCH  # the formula below
print(f"estimate: {TRIALS} trials of {EPOCHS} epochs of ImageNet: {every:,.0f} GPU hours")
print(f"          stopped early, as you will do it: {stopped:,.0f} GPU hours, {every / stopped:.0f} times less")

# %% [markdown]
# ## The idea
#
# Most trials are poor, and most of those show it early. So give many trials a little, and only the better ones more: with
# **successive halving** the best $1/\eta$ of each *rung* go on, for $\eta$ times as many epochs. With $n$ trials, $r$ epochs in
# the first rung and $R = r\,\eta^K$ in the last one, all of it costs
#
# $$\underbrace{n\,r}_{\text{first rung}} + \sum_{k=1}^{K} \underbrace{\frac{n}{\eta^k}}_{\text{trials}}
# \;\underbrace{(r\,\eta^k - r\,\eta^{k-1})}_{\text{more epochs of each}} = n\,r\,\big(1 + K\,(1 - 1/\eta)\big)
# \quad\text{epochs instead of } n\,R .$$
#
# Each rung costs the same. The picture has a bar for each of 27 trials:

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3))
for trial in range(27):
    rung = sum(trial % 3**k == 0 for k in (1, 2, 3))  # which trials are good is not known before: any third will do
    axes.barh(trial, 27, color="0.9", height=0.8)
    for k in range(rung + 1):
        left = 0 if k == 0 else 3 ** (k - 1)
        axes.barh(trial, 3**k - left, left=left, color=f"C{k}", height=0.8)
axes.set(xlabel="epochs", ylabel="trial", title="27 trials: 81 epochs (colours) instead of 729 (grey)", xticks=(1, 3, 9, 27));

# %% [markdown]
# What this needs: that the order of trials after few epochs tells something of the order after many. Whether it does, and
# what the order tells at all when another seed would have changed it, is measured first.

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
# ## Three questions
#
# <details><summary>A paper compares two optimizers, each at its best of 50 random trials, one seed. What is missing?</summary>
#
# The spread. The best of 50 is a maximum over noise: part of it is luck, and more trials give more luck. Take the best by the
# validation score of a search, train <em>that</em> configuration again with several seeds, report test scores with their spread,
# and give both optimizers the same budget and spaces of the same size.
# </details>
#
# <details><summary>Successive halving and ASHA throw away a configuration that would have won. Which kind?</summary>
#
# One that begins slowly: a small learning rate, a long warm-up, strong regularisation, a large network. Curves that cross
# after the rung are what early stopping cannot see. A longer first rung, or Hyperband, which runs several halvings with
# different first rungs, is the insurance; it costs a factor of about the number of rungs.
# </details>
#
# <details><summary>You have 512 GPUs for one night and trials of two hours. Bayesian search or ASHA?</summary>
#
# Four waves of 512. A Gaussian process that learns from finished trials chooses well one after the other; of 512 at once most
# are chosen nearly blind. Random draws with ASHA keep every GPU busy and stop the poor ones. The two go together: a sampler
# proposes (TPE, a Gaussian process), ASHA stops. Both Optuna and Ray let you combine them.
# </details>
#
# ## To remember
#
# Draw at random rather than on a grid, on a logarithmic scale where the scale is unknown. Stop early: each rung costs the same,
# and together a few full trainings. Do not wait: promote what is good enough now. Let a model propose where trials are dear and
# few. Copy weights and change rates where training is long and runs on many machines. And whatever the method: one seed
# ranks nothing, so compare medians, at equal budget. Next: models too large to be tried twice.
