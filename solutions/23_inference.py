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
# ## A small model drafts, the large one judges
#
# A token costs one pass over all weights, and the processor waits for memory most of that time. So let a small, fast model (the **draft**)
# guess the next $k$ tokens, one after the other. The large one (the **target**) then reads all of them in *one* pass, as it reads a prompt,
# and says for each place what it would have drawn from. That pass costs little more than that of a single token. This is speculative decoding
# (Leviathan, Kalman and Matias, 2023; Chen and others, 2023).
#
# Which guesses may stay? A token $x$ came from the draft's distribution $q$, and shall look as if it came from the target's $p$. Keep it with
# probability $\min(1, p(x) / q(x))$. Where the draft said too much, some of its tokens go; where it said too little, tokens are missing, and a
# refusal is the occasion to add one. Which? Kept tokens have come out as $\min(p, q)$. What is missing is
#
# $$p(x) - \min\big(p(x), q(x)\big) = \max\big(0,\ p(x) - q(x)\big) ,$$
#
# so after a refusal the next token is drawn from that, divided by its sum. Kept and added tokens together have **exactly** the distribution $p$,
# however bad the draft is. A bad draft only costs time.


# %% jupyter={"source_hidden": true}
def draw_acceptance():
    p, q = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05]), torch.tensor([0.15, 0.45, 0.10, 0.05, 0.25])
    low, x = torch.minimum(p, q), range(5)
    _, axes = plt.subplots(1, 3, figsize=(10.5, 2.9), layout="constrained", sharey=True)
    axes[0].bar(x, low, color="C0", label="kept: min(p, q)")
    axes[0].bar(x, q - low, bottom=low, color="C1", label="refused")
    axes[1].bar(x, p - low, color="C2", label="missing: max(0, p - q)")
    axes[2].bar(x, low, color="C0", label="kept")
    axes[2].bar(x, p - low, bottom=low, color="C2", label="drawn after a refusal")
    for ax, title in zip(axes, ("What the draft says, q", "What is missing", "Together: the target's p")):
        ax.set(title=title, xticks=x, xticklabels="abcde", xlabel="token")
        ax.legend(fontsize=8)
    axes[0].set_ylabel("probability")
    plt.show()


draw_acceptance()

# %% [markdown]
# Only a beginning can be kept. The target read the third guess behind the first two: if the second is refused, what it said of the
# third has no meaning any more. If all $k$ stay, the same pass has also said what comes behind them: one more token, for nothing.
#
# ### Balise 5 · Speculative decoding
#
# **`verify(target, draft, drafted, uniforms)`** decides about $k$ drafted tokens. `target`, `(k + 1, v)`, has the target's probabilities at the
# $k$ places and behind the last one; `draft`, `(k, v)`, those of the draft; `drafted`, `(k,)`, its tokens; `uniforms`, `(k,)`, numbers in $[0, 1)$,
# drawn already: draw none yourself, so that the same numbers give the same answer. Token $i$ may stay if
# $u_i < p_i(x_i) / q_i(x_i)$; with $<$ and not $\le$, as `torch.rand` does return 0 at times, and a token of probability 0 must never come out.
#
# Return `(kept, after)`: how many tokens stay, all those before the first refusal, and the distribution `(v,)` from which the next one is to be
# drawn. After a refusal that is $\max(0, p - q)$ of the refused place, divided by its sum; where all stay, the target's last row. $k$ can be 0:
# when one token is left to write, nothing is drafted.
#
# 5 to 8 lines, 10 minutes.
#
# <details><summary>Hint</summary>
#
# `target[torch.arange(k), drafted]` (or `gather`) takes one probability from each row. With 1 for "may stay" and 0 else, `cumprod` is 1 up to the
# first refusal, and its sum counts. A drafted token has been drawn, so its $q$ is not 0.
# </details>


# %% tags=["balise-5"]
def verify(target, draft, drafted, uniforms):
    """(kept, the next token's distribution (v,)); target (k + 1, v), draft (k, v), drafted (k,), uniforms (k,)."""
    # BEGIN SOLUTION
    places = torch.arange(len(drafted))
    stays = uniforms < target[places, drafted] / draft[places, drafted]
    kept = int(stays.long().cumprod(0).sum())
    if kept == len(drafted):
        return kept, target[kept]
    missing = (target[kept] - draft[kept]).clamp(min=0)
    return kept, missing / missing.sum()
    # END SOLUTION


# %%
tp.check(5, verify)

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
