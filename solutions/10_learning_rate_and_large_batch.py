# %% [markdown]
# # Learning rates, optimizers and large batches · about 245 min, core 35
#
# Work 09 ended with many ranks that compute together what one process computes. But with a hundred ranks a batch is a hundred
# times as large, and an epoch has a hundred times fewer steps. The machine is faster; does the *training* end sooner?
#
# In this practical work you write what answers: schedules and a finder for the learning rate, AdamW, clipping and
# accumulation, the optimizers that were made for large batches (LARS, LAMB) and one of the latest (Muon). You measure the
# **gradient noise scale**, a number that tells beforehand how large a batch is worth its ranks. At the end you resume a
# training so exactly that nobody can tell it was ever stopped.
#
# **What you will gain.** The baseline below shows what is lost when the batch grows and nothing else changes. You will get
# most of it back, see where nothing brings it back, and know why. All of it is measured on the handwritten digits, with
# several seeds, within seconds.

# %% tags=["setup"]
import copy
import math
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, scale, todo
from dlojz_tp.training.side_by_side import SideBySide

warnings.filterwarnings("ignore", message="IProgress not found|`torch.jit")  # of libraries that are only imported here

tp = course.open("10_learning_rate_and_large_batch")
tp

# %% tags=["setup"]
FULL = scale() == "full"
torch.set_num_threads(1)  # all products of this work are small: a second thread waits more than it works
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
# The gradient $g_B$ of a batch of $B$ samples is right on average, and scatters around the gradient $G$ of all data. With
# $\Sigma$, the covariance of a single sample's gradient,
#
# $$\mathbb{E}\,[g_B] = G, \qquad \mathbb{E}\,\lVert g_B - G \rVert^2 = \frac{\operatorname{tr} \Sigma}{B} .$$
#
# Each point below is the gradient of one batch of this network: how far it goes along $G$ (the arrow), and how far to the
# side in which it scatters most.


# %% jupyter={"source_hidden": true}
def batch_gradients(size, count=60):
    """Gradients (count, parameters) of `count` random batches, for one and the same network."""
    torch.manual_seed(0)
    runs = SideBySide(network, [0] * count)
    picked = torch.stack([torch.randperm(len(X))[:size] for _ in range(count)])
    runs.backward(X[picked], Y[picked])
    return torch.stack([torch.cat([p.grad.flatten() for p in model.parameters()]) for model in runs.models])


def draw_gradients(sizes=(8, 64, 512)):
    whole = batch_gradients(len(X), 1)[0]
    along, found = whole / whole.norm(), [batch_gradients(size) for size in sizes]
    aside = found[0] - (found[0] @ along)[:, None] * along
    sideways = torch.linalg.svd(aside, full_matrices=False).Vh[0]
    _, axes = plt.subplots(1, len(sizes), figsize=(9, 2.9), sharex=True, sharey=True, layout="constrained")
    for ax, size, gradients in zip(axes, sizes, found):
        ax.scatter(gradients @ along / whole.norm(), gradients @ sideways / whole.norm(), s=12, color="C0", alpha=0.7)
        ax.annotate("", (1, 0), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "C1", "lw": 2})
        ax.set(title=f"batches of {size}", xlabel="along G, in lengths of G")
    axes[0].set(ylabel="to the side", xlim=(-0.1, None))


draw_gradients()

# %% [markdown]
# A larger batch knows the direction better. It pays while the scatter is larger than the arrow; once all points lie on its tip,
# more samples say the same again, and only the number of steps counts, which a larger batch makes smaller. Between the two lies
# a **bend**. The schedules and optimizers of this work move the steps; the noise scale of balise 7 tells where the bend is.

# %% [markdown]
# ## The baseline: one rate, one batch size
#
# Six epochs for everybody, SGD with momentum, three seeds side by side. First the rate stays as it is while the batch grows.
# Then it grows with the batch: the *linear scaling rule* (Goyal and others, 2017), which lets one step of a batch twice as
# large go as far as two steps.
#
# **Commit to a guess.** At batch 16 and 6 epochs the network is right on about 96 % of the validation images. How many will
# it be at batch 1,438, the whole training set, with either rule? Write it down, then run the cell.

# %%
guess = {"same rate": None, "linear rule": None}  # per cent


# %%
def shuffled(seeds, size, epochs):
    """Yields indices (seeds, size) of the training set: batches of `epochs` epochs, in an order of each seed's own."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(epochs):
        orders = torch.stack([torch.randperm(len(X), generator=generator) for generator in generators])
        yield from (orders[:, at : at + size] for at in range(0, len(X) - size + 1, size))


def sgd_accuracy(rate, size, epochs=6, seeds=(0, 1, 2)):
    """(validation accuracy of each seed, number of steps)."""
    runs, steps = SideBySide(network, seeds), 0
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9) for model in runs.models]
    for steps, picked in enumerate(shuffled(seeds, size, epochs), 1):  # noqa: B007
        runs.backward(X[picked], Y[picked])
        for optimizer in optimizers:
            optimizer.step()
    return runs.accuracy(VAL_X, VAL_Y), steps


print(f"{'batch':>6}{'steps':>7}{'same rate':>22}{'linear rule':>22}    (mean of three seeds, least and most)")
for size in (16, 64, 256, len(X)):
    row = [sgd_accuracy(rate, size) for rate in (0.02, 0.02 * size / 16)]
    cells = "".join(f"{a.mean():12.1%} ({a.min():.0%}–{a.max():.0%})" for a, _ in row)
    print(f"{size:6,}{row[0][1]:7,}{cells}")

# %% [markdown]
# <details><summary>What the figures say</summary>
#
# With the same rate there are simply too few steps. The linear rule makes up for it as long as the path is nearly straight
# over many steps; beyond that a step jumps over what it should have followed. So neither is the answer by itself: how a rate
# rises and falls, how far each layer may go, and how many samples a step needs at all are questions of their own. They are
# the sections of this work.
# </details>

# %% [markdown]
# ## Learning rates that change: schedules
#
# At the start gradients are large and change with every step, and an optimizer's averages rest on a few batches: a high rate may
# throw the weights where they never recover. At the end the noise of the batches keeps the weights jumping around a minimum as
# widely as the rate allows. So the rate rises at first (**warm-up**), stays high while there is way to go, and falls towards
# the end. It changes with every *batch*, not with every epoch: a large batch leaves few steps, and a whole epoch of them at a
# poor rate is a good part of the training.
#
# A schedule is a **function of the step**, a number that starts at 0. A function has no state that could be forgotten when a
# run is resumed, and it can be drawn before anything is trained.
#
# ### Balise 1 · Schedules · further · about 32 min
#
# Each takes the step $k = 0, 1, \dots$ and returns a number. `total` is the number of steps of the whole training.
#
# - **`warmup_cosine(step, total, warmup, peak, floor=0.0)`**: $\text{peak}\,(k + 1) / \text{warmup}$ as long as
#   $k < \text{warmup}$, so that no step has the rate 0; then half a cosine, from `peak` at $k = \text{warmup}$ to where `floor`
#   is reached at $k = \text{total}$. It stays there. `warmup` may be 0.
# - **`one_cycle(step, total, peak, share=0.3, start=25, end=1e4, low=0.85, high=0.95)`** returns a tuple (rate, momentum). The
#   rate is `peak / start` at step 0, `peak` at $k = \text{share} \cdot \text{total} - 1$, which need not be a whole number,
#   and `peak / start / end` at $k = \text{total} - 1$, with half a cosine in each part. It stays there. The momentum does the
#   opposite: `high`, `low` at the peak, `high`. While steps are long, old ones matter less. (`share * total` is above 1.)
# - **`cyclical(step, half, low, high)`**: a triangle. `low` at step 0, `high` at step `half`, `low` at step `2 * half`, and on.
# - **`set_rates(optimizer, rate)`** sets the rate of every parameter group. A group may have a factor of its own,
#   `group["lr_scale"]`: its rate is then that times `rate`. (timm's name; a pretrained part may train at a tenth.) `rate` may
#   also be a tuple (rate, momentum): the momentum belongs in the first of `group["betas"]` where the group has them, else in
#   `group["momentum"]`.
# - **`train(model, batches, optimizer, schedule, first=0)`** makes one step for each `(x, y)` of `batches`, with the
#   cross-entropy, each at the rate `set_rates(optimizer, schedule(step))` of *this* step. The first batch is step `first`.
#   Returns the step that comes next. `batches` is any iterable, perhaps an empty one. The model stays in the mode that it is in.
#
# 3, 6, 1, 7 and 7 lines.
#
# <details><summary>Hint</summary>
#
# One small function does most: half a cosine from $a$ to $b$ is $b + (a - b)\,(1 + \cos \pi t) / 2$, with $t$ from 0 to 1.
# `min(t, 1)` keeps it at the end. For the triangle, `step / half % 2` runs from 0 to 2 in each cycle: how far is it from 1?
# </details>


# %% tags=["balise-1"]
def warmup_cosine(step, total, warmup, peak, floor=0.0):
    """Rate of a step: linear up to peak in `warmup` steps, then half a cosine down to floor at `total`."""
    # BEGIN SOLUTION
    if step < warmup:
        return peak * (step + 1) / warmup
    t = min((step - warmup) / (total - warmup), 1.0)
    return floor + (peak - floor) * (1 + math.cos(math.pi * t)) / 2
    # END SOLUTION


def one_cycle(step, total, peak, share=0.3, start=25, end=1e4, low=0.85, high=0.95):
    """(rate, momentum) of a step: up in the first share of the steps, then far down; the momentum the opposite."""
    # BEGIN SOLUTION
    top = share * total - 1
    up = step <= top
    t = step / top if up else min((step - top) / (total - 1 - top), 1.0)
    w = (1 + math.cos(math.pi * t)) / 2
    far = peak / start if up else peak / start / end
    w = 1 - w if up else w  # 1 at the peak
    return far + (peak - far) * w, high + (low - high) * w
    # END SOLUTION


def cyclical(step, half, low, high):
    """Rate of a step: a triangle, up for `half` steps and down for as many."""
    # BEGIN SOLUTION
    return low + (high - low) * (1 - abs(step / half % 2 - 1))
    # END SOLUTION


def set_rates(optimizer, rate):
    """Set the rate, or a tuple (rate, momentum), in all parameter groups."""
    # BEGIN SOLUTION
    rate, momentum = rate if isinstance(rate, tuple) else (rate, None)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif momentum is not None:
            group["momentum"] = momentum
    # END SOLUTION


def train(model, batches, optimizer, schedule, first=0):
    """One step a batch, each at its own rate. Returns the number of the next step."""
    # BEGIN SOLUTION
    step = first
    for x, y in batches:
        set_rates(optimizer, schedule(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
    return step
    # END SOLUTION


# %%
tp.check(1, warmup_cosine, one_cycle, cyclical, set_rates, train)

# %% [markdown]
# PyTorch has schedulers instead: objects that count their own calls, beside the optimizer. Theirs, and yours at the same steps:


# %%
def of_torch(make, steps, momentum=0.9):
    """What a scheduler of PyTorch's sets at each step: (rate, momentum) of the first group."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=momentum)
    scheduler, seen = make(optimizer), []
    for _ in range(steps):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64)


def furthest(mine, theirs):
    """The largest difference, as a number."""
    return float((torch.tensor(mine, dtype=torch.float64) - theirs).abs().max())


schedulers, STEPS = torch.optim.lr_scheduler, 135
theirs = of_torch(lambda o: schedulers.LambdaLR(o, lambda k: warmup_cosine(k, STEPS, 20, 0.4)), STEPS)[:, 0]
print(f"LambdaLR of warmup_cosine: {furthest([warmup_cosine(k, STEPS, 20, 0.4) for k in range(STEPS)], theirs):.1e}")
theirs = of_torch(lambda o: schedulers.OneCycleLR(o, 0.4, STEPS), STEPS)
print(f"OneCycleLR:                {furthest([one_cycle(k, STEPS, 0.4) for k in range(STEPS)], theirs):.1e}")
theirs = of_torch(lambda o: schedulers.CyclicLR(o, 0.01, 0.4, 30, cycle_momentum=False), STEPS)[:, 0]
print(f"CyclicLR:                  {furthest([cyclical(k, 30, 0.01, 0.4) for k in range(STEPS)], theirs):.1e}")

# %% jupyter={"source_hidden": true}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.plot([warmup_cosine(k, STEPS, 20, 0.4) for k in range(STEPS)], label="warm-up and cosine")
left.plot([one_cycle(k, STEPS, 0.4)[0] for k in range(STEPS)], label="one cycle")
left.plot([cyclical(k, 30, 0.01, 0.4) for k in range(STEPS)], label="cyclical")
right.plot([one_cycle(k, STEPS, 0.4)[1] for k in range(STEPS)], color="C1")
left.set(xlabel="step", ylabel="rate", title="Three schedules of three epochs, batch 32")
right.set(xlabel="step", ylabel="momentum", title="One cycle: the momentum does the opposite")
left.legend(fontsize=8, ncols=3)
left.set(ylim=(-0.02, 0.5))
plt.show()

# %% [markdown]
# ## Which rate? A finder
#
# All three schedules want to know how high they may go. Smith (2017) asks the model itself: train with a rate that rises from
# far too small to far too large, and look at the loss. At first nothing happens; then it falls; then it varies, and at last it
# explodes. That costs about a hundred batches, where a grid costs that many trainings.
#
# The finder must leave **nothing** behind: a model that exploded is of no use to anybody. Dropout and shuffling have used up
# random numbers, too, and a run that follows a search for its rate should be the run that it would have been without.

# %% tags=["setup"]
import functools
import itertools
import random
import tempfile
from pathlib import Path

import numpy as np


def random_states():
    """The states of all common random generators, in types that torch.load takes with weights_only=True."""
    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [kind, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_states(states):
    """Put them back."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(states["numpy"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))


# %% [markdown]
# ### Balise 2 · A learning-rate finder · further · about 37 min
#
# **`find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9)`** makes up to `n` steps like those of
# `train`, in the mode that the model is in. `batches` is a `DataLoader` or the like: each `for` over it is a new epoch, and you
# begin another one when it ends too early. The rate rises from `low` at the first step to `high` at the $n$-th, by the same
# *factor* each time (`set_rates`).
# Single batches are noisy, so the loss $\ell_k$ of each batch, before its step, goes into a running mean
#
# $$a_k = \beta\, a_{k-1} + (1 - \beta)\, \ell_k, \qquad a_{-1} = 0, \qquad s_k = a_k / (1 - \beta^{k+1}), \quad k = 0, 1, \dots$$
#
# The division corrects the mean for its start at 0. Stop as soon as $s_k$ is not finite, or larger than 4 times the smallest
# one so far. Return two lists, the rates and the $s_k$, without the one that made you stop.
#
# Afterwards everything is as it was, also if something in it raises (which goes on to the caller): weights, buffers and
# gradients, the mode of every module, the optimizer's rates and state, all random states, and the loader's own,
# `batches.generator`, where it has one that is not None. About 22 lines.
#
# **`propose(rates, losses)`** returns (smallest, largest). The largest useful rate is a *quarter* of the one at which the
# smoothed loss is lowest: from there on it varies. The smallest is the first rate at which a *tenth* of the whole fall, from
# the first smoothed loss to the lowest, has happened. Where the first one is the lowest nothing ever fell: raise a
# `ValueError`. About 6 lines.
#
# <details><summary>Hint</summary>
#
# Train copies, and the originals need no repair: `copy.deepcopy((model, optimizer))`, in *one* call, so that the copy of the
# optimizer holds the parameters of the copy of the model. Random states are put back in a `finally:`. An iterator is made by
# `iter(batches)`, and `next(iterator, None)` is None at its end. Or restore everything yourself; then do not forget gradients
# that were None.
# </details>


# %% tags=["balise-2"]
def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    """Raise the rate from low to high in n steps. Returns (rates, smoothed losses); leaves everything as it was."""
    # BEGIN SOLUTION
    states, generator = random_states(), getattr(batches, "generator", None)
    own = generator and generator.get_state()
    model, optimizer = copy.deepcopy((model, optimizer))
    rates, losses, average, iterator = [], [], 0.0, iter(())
    try:
        for k in range(n):
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(batches)
                batch = next(iterator)
            rate = low * (high / low) ** (k / (n - 1))
            set_rates(optimizer, rate)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average = beta * average + (1 - beta) * loss.item()
            smooth = average / (1 - beta ** (k + 1))
            if not math.isfinite(smooth) or smooth > 4 * min(losses, default=math.inf):
                break
            rates.append(rate)
            losses.append(smooth)
        return rates, losses
    finally:
        set_random_states(states)
        if generator is not None:
            generator.set_state(own)
    # END SOLUTION


def propose(rates, losses):
    """(smallest, largest) useful rate, from what find_rates returns."""
    # BEGIN SOLUTION
    lowest = min(losses)
    if lowest == losses[0]:
        raise ValueError("the loss never fell: begin at a lower rate")
    line = losses[0] - 0.1 * (losses[0] - lowest)
    smallest = next(rate for rate, loss in zip(rates, losses) if loss <= line)
    return smallest, rates[losses.index(lowest)] / 4
    # END SOLUTION


# %%
tp.check(2, find_rates, propose)

# %% [markdown]
# Two optimizers, one model, batches of 32:


# %% tags=["setup"]
def loader_of(size, seed=0):
    """Shuffled batches of the training images, with a random generator of their own."""
    pairs = torch.utils.data.TensorDataset(X, Y)
    return torch.utils.data.DataLoader(pairs, size, shuffle=True, generator=torch.Generator().manual_seed(seed))


# %%
@functools.cache
def found_for(name):
    """Rates and losses of a new network with this optimizer, and what is proposed."""
    torch.manual_seed(0)
    model = network()
    if name == "AdamW":
        rates, losses = find_rates(model, loader_of(32), torch.optim.AdamW(model.parameters()), 1e-5, 1)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rates, losses = find_rates(model, loader_of(32), sgd, 1e-4, 10)
    return rates, losses, *propose(rates, losses)


for name in ("SGD, momentum 0.9", "AdamW"):
    _, losses, smallest, largest = found_for(name)
    print(f"{name}: from {smallest:.2g} to {largest:.2g}, in {len(losses)} steps")

# %% jupyter={"source_hidden": true}
figure, both = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
figure.suptitle("How high may the rate go?")
for axes, name in zip(both, ("SGD, momentum 0.9", "AdamW")):
    rates, losses, smallest, largest = found_for(name)
    axes.axvspan(smallest, largest, color="0.85", label="proposed")
    axes.plot(rates, losses)
    axes.set(xscale="log", xlabel="rate", title=f"{name}: from {smallest:.2g} to {largest:.2g}")
both[0].set_ylabel("smoothed loss")
both[0].legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Measured: one cycle against a constant rate
#
# Three epochs, batches of 32, SGD with momentum. Each of the two is *tuned*: all rates of a grid, four seeds each. A method that
# is compared at a rate that suits the other one always loses. All models are trained side by side:
# `SideBySide` computes them in one batched pass, and each rate of the grid is the `lr_scale` of a parameter group.
#
# **Commit to a guess.** Let "good" be within 2 points of the best accuracy. A constant rate may be by some factor higher than
# the lowest good one, and still be good. By which factor? And the peak of one cycle?

# %%
guess_constant, guess_one_cycle = None, None  # two factors


# %% tags=["setup"]
def rows_of(n_seeds, epochs, size=32):
    """For each step which images every seed trains on, int64 (seeds, size): another order for each seed and epoch."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        orders = torch.stack([torch.randperm(len(X), generator=generator) for _ in range(n_seeds)])
        yield from orders.split(size, 1)[: len(X) // size]


TRIED = [0.00125 * 2**k for k in range(10)]  # rates, or peaks


# %%
@functools.cache
def by_schedule(name, seeds=4, epochs=3):
    """Validation accuracy after three epochs, (rates, seeds)."""
    runs = SideBySide(network, list(range(seeds)) * len(TRIED))
    weights = [list(model.parameters()) for model in runs.models]
    groups = [
        {"params": sum(weights[k * seeds : (k + 1) * seeds], []), "lr_scale": rate} for k, rate in enumerate(TRIED)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True)
    total = epochs * (len(X) // 32)
    for step, rows in enumerate(rows_of(seeds, epochs)):
        rows = rows.repeat(len(TRIED), 1)
        runs.backward(X[rows], Y[rows])
        set_rates(optimizer, 1.0 if name == "constant" else one_cycle(step, total, 1.0))
        optimizer.step()
    return runs.accuracy(VAL_X, VAL_Y).view(len(TRIED), seeds)


for name, guess_factor in (("constant", guess_constant), ("one cycle", guess_one_cycle)):
    accuracy = by_schedule(name)
    mean, k = accuracy.mean(1), int(accuracy.mean(1).argmax())
    good = [rate for rate, one in zip(TRIED, mean) if one > mean[k] - 0.02]
    edge = " (an edge of the grid)" if k in (0, len(TRIED) - 1) else ""
    print(f"{name:9}: best {mean[k]:.3f}, standard deviation of seeds {accuracy[k].std():.3f}, at {TRIED[k]:g}{edge}")
    print(
        f"           good from {good[0]:g} to {good[-1]:g}: a factor of {good[-1] / good[0]:.0f}; your guess: {guess_factor}"
    )

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
_, _, smallest, largest = found_for("SGD, momentum 0.9")
axes.axvspan(smallest, largest, color="0.85", label="proposed by the finder")
for name in ("constant", "one cycle"):
    accuracy = by_schedule(name)
    low, high = accuracy.amin(1), accuracy.amax(1)
    axes.plot(TRIED, accuracy.mean(1), "o-", label=f"{name}: mean, lowest and highest of four seeds")
    axes.fill_between(TRIED, low, high, alpha=0.2)
axes.set(xscale="log", xlabel="rate, or peak of the cycle", ylabel="validation accuracy", ylim=(0.7, 1))
axes.set_title("What does one cycle bring in three epochs?")
axes.legend(fontsize=8, loc="lower left")
plt.show()

# %% [markdown]
# <details><summary>What to look at</summary>
#
# How much better the best of one row is than the best of the other, beside what another seed changes; and how far the good
# rates reach. A cycle that went too high still ends with small steps, and has time to settle. Where the good rates reach far,
# nobody has to hit one: the finder's proposal took about two epochs, each of the two rows 120. Hold its grey band against both
# curves.
# </details>
#
# ## Measured: snapshots of one training, as an ensemble · further
#
# A cosine that begins again every few hundred steps (Loshchilov and Hutter, 2017) ends each time in some minimum, and the high
# rate after it throws the weights out into another one. Keep the weights at the end of each cycle, and average what these
# **snapshots** predict: an ensemble for the price of one training (Huang et al., 2017). It helps where its members are good
# *and* make different mistakes. Beside it: one cosine over all of the same steps.


# %%
def cosines(cycles, epochs=5, seeds=8, peak=0.1):
    """Train in so many cycles. Returns what is predicted after each of them, (cycles, seeds, images, 10)."""
    runs = SideBySide(network, range(seeds))
    optimizer = torch.optim.SGD([p for model in runs.models for p in model.parameters()], lr=0.1, momentum=0.9)
    length, snapshots = epochs * (len(X) // 32) // cycles, []
    for step, rows in enumerate(rows_of(seeds, epochs)):
        runs.backward(X[rows], Y[rows])
        set_rates(optimizer, warmup_cosine(step % length, length, 0, peak))
        optimizer.step()
        if (step + 1) % length == 0:
            with torch.no_grad():
                snapshots.append(runs(VAL_X.expand(seeds, *VAL_X.shape)).softmax(-1))
    return torch.stack(snapshots)


# %%
def said(name, predicted):
    """Print mean and spread over seeds of the accuracy of predictions (seeds, images, 10)."""
    right = (predicted.argmax(-1) == VAL_Y).float().mean(-1)
    print(f"{name:32} {right.mean():.4f}, standard deviation of seeds {right.std():.4f}")


def snapshots_compared():
    members = cosines(5)
    for k, member in enumerate(members):
        said(f"snapshot {k + 1}", member)
    said("ensemble of all five", members.mean(0))
    said("ensemble of the last three", members[-3:].mean(0))
    said("one cosine, as many steps", cosines(1)[0])
    differ = (members[-1].argmax(-1) != members[-2].argmax(-1)).float().mean()
    print(f"the last two snapshots disagree on {differ:.1%} of the images")


snapshots_compared()

# %% [markdown]
# Compare three lines: the last snapshot, the ensemble, and the single cosine that had all the steps for itself. The ensemble
# must beat the last one to be worth keeping several networks; to beat the first two of them is no feat.

# %% [markdown]
# ## AdamW by hand
#
# SGD has one rate for all weights. Adam gives each weight $\theta$ a step of its own: it keeps moving averages of the gradient $g$ and
# of its square, and divides one by the root of the other. Both begin at 0, so early ones are too small; after $t$ steps they are
# corrected:
#
# $$m \leftarrow \beta_1 m + (1-\beta_1)\,g,\quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,\qquad
# \hat m = \frac{m}{1-\beta_1^t},\quad \hat v = \frac{v}{1-\beta_2^t},\qquad
# \theta \leftarrow \theta - \alpha\lambda\,\theta - \alpha\,\frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# The term $\alpha\lambda\,\theta$ is the **decoupled** weight decay, the W of AdamW: it stays outside of $m$ and $v$. Some texts write
# $\sqrt{\hat v + \epsilon}$; here $\epsilon$ is outside of the root, as in PyTorch.
#
# **Why lists.** A step needs about ten operations for each parameter. A large network has hundreds of parameters, and on a GPU each
# operation is a launch that takes the CPU some microseconds: the GPU would wait for the loop. `torch._foreach_add_(xs, ys)` adds
# all pairs of two lists in one call, and on a GPU in few launches. PyTorch's own optimizers are made of these.
#
# ### Balise 3 · AdamW · further · about 17 min
#
# - **`parameter_groups(model, weight_decay)`** returns a list of dicts `{"params": [...], "weight_decay": ...}` for an optimizer.
#   Matrices and kernels (two dimensions or more) decay. Biases, gains of norms, all vectors and scalars get 0: pulling them to zero
#   restricts nothing that overfits, and switches channels off. Each parameter once, tied ones too; frozen ones are left out.
# - **`AdamW.step`**: the formulas above, for each group with its own options. `ready` is given. `torch._foreach_*` throughout: the number of
#   operations must not grow with the number of parameters. The gradients stay as they are, the weights change in place.
#
# About 3 and 10 lines.
#
# <details><summary>Hint</summary>
#
# `_foreach_lerp_(means, gradients, 1 - beta1)` is the first formula. `_foreach_addcmul_(xs, ys, zs, value)` and
# `_foreach_addcdiv_(xs, ys, zs, value)` add value · y · z and value · y / z; the last one, and `_foreach_div_`, also take a list of
# numbers, one for each tensor: parameters may have had different numbers of steps. A name without the last underscore returns new tensors.
# The decay is `_foreach_mul_(weights, 1 - rate * decay)`, before the step.
# </details>


# %% tags=["setup"]
def ready(optimizer, group, *names):
    """What a step needs of a group: (weights that have a gradient, gradients, number of each one's steps, *buffers).

    Counts this step. names: buffers like the weights, zeros at first, kept in the optimizer's state: a list each.
    """
    weights = [weight for weight in group["params"] if weight.grad is not None]
    states = [optimizer.state[weight] for weight in weights]
    for weight, state in zip(weights, states):
        if not state:
            state.update({name: torch.zeros_like(weight) for name in names}, step=0)
        state["step"] += 1
    steps = [state["step"] for state in states]
    return weights, [weight.grad for weight in weights], steps, *([state[name] for state in states] for name in names)


# %% tags=["balise-3"]
def parameter_groups(model, weight_decay):
    """Groups for an optimizer: weight_decay for matrices and kernels, 0 for vectors and scalars."""
    # BEGIN SOLUTION
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    # END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights, gradients, steps, means, squares = ready(self, group, "mean", "square")
            if not weights:
                continue
            rate, (beta1, beta2) = group["lr"], group["betas"]
            # BEGIN SOLUTION
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            # m̂ / (√v̂ + ε) = m · c / (1 - β₁ᵗ) / (√v + ε · c) with c = √(1 - β₂ᵗ): one pass less over the memory
            roots = [math.sqrt(1 - beta2**step) for step in steps]
            below = torch._foreach_sqrt(squares)
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            rates = [-rate * root / (1 - beta1**step) for root, step in zip(roots, steps)]
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            torch._foreach_addcdiv_(weights, means, below, rates)
            # END SOLUTION


# %%
tp.check(3, parameter_groups, AdamW)

# %% [markdown]
# **What does "decoupled" change?** Before AdamW, the decay was a part of the gradient, $g + \lambda\theta$ ("L2"), and so was divided by
# $\sqrt{\hat v}$ like the gradient. The cell trains weights whose gradients are noise around zero, of four sizes: only the decay moves
# them.

# %%
SIZES = torch.tensor([0.01, 0.1, 1.0, 10.0])  # of the gradients


def pulled(make, steps=1000):
    """The mean of 500 weights after each step: (steps, 4), a column for each size of the gradients."""
    noise, weights, means = torch.Generator().manual_seed(0), nn.Parameter(torch.ones(4, 500)), []
    optimizer = make([weights], lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        weights.grad = SIZES[:, None] * torch.randn(4, 500, generator=noise)
        optimizer.step()
        means.append(weights.detach().mean(1))
    return torch.stack(means)


remaining = {"AdamW, yours": pulled(AdamW), "Adam with L2": pulled(torch.optim.Adam)}
print(f"weights of 1 after 1,000 steps; the decay alone would leave {(1 - 0.01 * 0.1) ** 1000:.2f}")
for name, means in remaining.items():
    left = ", ".join(f"{value:.2f} (gradients of {size:g})" for size, value in zip(SIZES, means[-1]))
    print(f"{name}: {left}")

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
for part, (name, means) in zip(axes, remaining.items()):
    for size, curve in zip(SIZES, means.T):
        part.plot(range(1, 1001), curve, label=f"gradients of {size:g}")
    part.set(xlabel="steps", ylabel="mean of 500 weights", title=name)
axes[0].legend(fontsize=8, loc="lower left")
plt.show()

# %% [markdown]
# With L2, weights whose gradients are large hardly decay, and those whose gradients are small vanish: λ means something else for
# each weight. Decoupled, all decay alike.

# %% [markdown]
# ## Clip, and accumulate
#
# Two things stand between the gradients and the optimizer. **Clipping**: one bad batch can give a gradient a hundred times
# as long as usual, and one step along it undoes hours. So the length of *all* gradients together is bounded: where $\lVert
# g \rVert > c$, all are multiplied by $c / \lVert g \rVert$. The direction stays, which it would not if each were clipped
# by itself.
#
# **Accumulation**: a batch that does not fit into memory is computed as micro-batches, whose gradients add up. It is to be
# *the same step*. The loss of a batch is the mean over what it contains, and so
#
# $$\nabla L = \frac{1}{n} \sum_{\text{micro-batches}} \; \sum_{i} \nabla \ell_i, \qquad n = \text{labels that count, in all
# micro-batches of all ranks} .$$
#
# A mean of the micro-batches' means is something else as soon as they are of unequal size: a token in a short one
# weighs more. Texts are of unequal length, and padding has the label −100, which does not count. Well-known libraries
# shipped this mistake for years, until the autumn of 2024: nothing fails, the model is somewhat worse.
#
# In practical works 08 and 09 ranks had equal batches, and the mean over ranks was right. Now they have not. This is what
# `DistributedDataParallel` does to the gradients, in one message:


# %% tags=["setup"]
def average_over_ranks(parameters):
    """Replace the gradients (those that are not None) by their mean over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])


# %% [markdown]
# ### Balise 4 · Clip and accumulate · further · about 22 min
#
# - **`clip_gradients(parameters, max_norm)`** scales the gradients in place, so that their norm together is at most
#   `max_norm`, and returns the norm from before as a tensor without dimensions. Gradients may be None. No value goes to
#   Python (`if norm > …`, `.item()`): a GPU would have to be waited for. The number of operators does not grow
#   with the number of parameters: `torch._foreach_…` work on a whole list, because starting a small kernel takes a GPU
#   longer than the kernel itself. A norm that is not finite is returned as it is: it is how the loop gets to know.
# - **`accumulated_step(model, micro_batches, optimizer, max_norm)`** runs on every rank and does one step, as if the
#   micro-batches of all ranks were one batch. `micro_batches` is a list of pairs `(x, y)`, on each rank another number of
#   them, at least one; `model(x)` has the shape of `y` and one more dimension, for the classes; labels of −100 do not count, and in some
#   micro-batch none may. One micro-batch is in memory at a time, gradients travel once, in one message after the last one,
#   and are then clipped. Gradients of an earlier step do not count. Returns the mean loss and the norm before clipping,
#   tensors, the same on all ranks.
#
# About 5 and 14 lines.
#
# <details><summary>Hint</summary>
#
# The norm of the norms is the norm of all. `torch.clamp(…, max=1.0)` is an `if` without a look at the value.
# `F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")` leaves out the labels −100. How many labels count is
# known before the first forward; an all-reduce adds it up over the ranks. `average_over_ranks` divides by the number of
# ranks, and your loss is divided already.
# </details>


# %% tags=["balise-4"]
@torch.no_grad()
def clip_gradients(parameters, max_norm):
    """Scale the gradients to a common norm of at most max_norm, in place. Returns the norm before, a tensor."""
    # BEGIN SOLUTION
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
    # END SOLUTION


def accumulated_step(model, micro_batches, optimizer, max_norm):
    """On a rank: one step on the micro-batches (x, y) of all ranks. Returns (mean loss, norm before clipping)."""
    # BEGIN SOLUTION
    optimizer.zero_grad()
    count = sum((y != -100).sum() for _, y in micro_batches)
    dist.all_reduce(count)
    total = 0
    for x, y in micro_batches:
        logits = model(x).flatten(0, -2)
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / count
        (loss * dist.get_world_size()).backward()  # the mean over the ranks divides by it
        total = total + loss.detach()
    dist.all_reduce(total)
    average_over_ranks(model.parameters())
    norm = clip_gradients(model.parameters(), max_norm)
    optimizer.step()
    return total, norm
    # END SOLUTION


# %%
tp.check(4, clip_gradients, accumulated_step)

# %% [markdown]
# See it: the same 96 images, cut in three ways, and what the mean of the micro-batches' means would have made of them.


# %%
def one_step(sizes):
    """On a rank, with micro-batches of sizes[rank] images: (loss, norm of the gradients)."""
    torch.manual_seed(0)
    model = network()
    every = list(zip(X[:96].split(sum(sizes, [])), Y[:96].split(sum(sizes, []))))
    first = sum(map(len, sizes[: dist.get_rank()]))
    parts = every[first : first + len(sizes[dist.get_rank()])]
    loss, norm = accumulated_step(model, parts, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0)
    return loss.item(), norm.item()


torch.manual_seed(0)
model = network()
print("micro-batches of each rank      loss      norm")
for sizes in ([[96]], [[60, 4, 32]], [[60, 4], [31, 1]]):
    loss, norm = launch.ranks(one_step, sizes, n=len(sizes))[0]
    print(f"{str(sizes):<28} {loss:.5f}   {norm:.5f}")
    means = [F.cross_entropy(model(x), y) for x, y in zip(*(t[:96].split(sum(sizes, [])) for t in (X, Y)))]
    mean = sum(means) / len(means)
    squares = sum(g.square().sum() for g in torch.autograd.grad(mean, model.parameters()))
    print(f"{'   mean of means':<28} {mean.item():.5f}   {squares.sqrt().item():.5f}")

# %% [markdown]
# ## Trust ratios: LARS and LAMB
#
# With a larger batch there are fewer steps in an epoch, so each must go further. But one rate for all layers is limited by the
# layer that bears least: where the gradient is large beside the weights, a long step throws the layer far away. LARS (You et al., 2017)
# and LAMB (You et al., 2020) give each **layer** a step in proportion to the size of its own weights. Its *trust ratio* is
#
# $$r = c\;\frac{\lVert w \rVert}{\lVert u \rVert + \lambda \lVert w \rVert}, \qquad\text{and 1 where}\quad \lVert w \rVert = 0
# \;\text{ or }\; \lVert u \rVert = 0 .$$
#
# | | update of a layer | |
# |---|---|---|
# | **LARS**: SGD with momentum | $b \leftarrow \mu\, b + r\,(g + \lambda w)$, $\;w \leftarrow w - \alpha\, b$ | $r$ of $u = g$, with $\lambda$ and $c$ |
# | **LAMB**: AdamW | $u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w$, $\;w \leftarrow w - \alpha\, r\, u$ | $r$ of this $u$, which has the decay in it: $\lambda = 0$, $c = 1$ |
#
# Weights that begin at 0 would stay there forever without the second part: hence the 1. The rate stands outside of the momentum, as in
# PyTorch's SGD: when a schedule changes it, the momentum obeys at once.
#
# **Exempt** are biases, gains of norms, all with fewer than two dimensions: no decay, no ratio, a plain step. Libraries often ask
# `weight_decay == 0` instead (timm does): set no decay at all there, and no layer is adapted any longer.
#
# ### Balise 5 · LARS and LAMB · further · about 32 min
#
# - **`trust_ratios(weights, updates, decay=0.0, coefficient=1.0)`**: lists of tensors; returns $r$ of each pair, a tensor `(n,)` on their device.
#   Do not look at the values in Python (`if norm > 0`): on a GPU the CPU would wait for each.
# - **`LARS.step`** and **`LAMB.step`**, with `torch._foreach_*` as in balise 3. A group may be without any matrix.
#
# About 4, 8 and 13 lines.
#
# <details><summary>Hint</summary>
#
# `torch._foreach_norm` gives a list of norms, `torch.stack` makes a tensor of them, `torch.where(condition, ratios, 1.0)` chooses.
# `_foreach_mul` takes a list of numbers as well: with a decay of 0 for each exempt weight, one call serves all. Then multiply only the
# updates of matrices: `_foreach_mul_(some_updates, list(ratios))`.
# </details>


# %% tags=["balise-5"]
def trust_ratios(weights, updates, decay=0.0, coefficient=1.0):
    """One ratio for each pair of weights and updates: tensor (n,)."""
    # BEGIN SOLUTION
    of_weights = torch.stack(torch._foreach_norm(weights))
    of_updates = torch.stack(torch._foreach_norm(updates))
    ratios = coefficient * of_weights / (of_updates + decay * of_weights)
    return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)
    # END SOLUTION


class LARS(torch.optim.Optimizer):
    """SGD with momentum, with a trust ratio for each layer."""

    def __init__(self, params, lr=1.0, momentum=0.9, weight_decay=0.0, coefficient=0.001):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient}
        )

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights, gradients, _, buffers = ready(self, group, "buffer")
            if not weights:
                continue
            # BEGIN SOLUTION
            decay, layers = group["weight_decay"], [k for k, weight in enumerate(weights) if weight.ndim > 1]
            updates = torch._foreach_mul(weights, [decay * (weight.ndim > 1) for weight in weights])
            torch._foreach_add_(updates, gradients)
            if layers:
                pairs = [weights[k] for k in layers], [gradients[k] for k in layers]
                ratios = trust_ratios(*pairs, decay, group["coefficient"])
                torch._foreach_mul_([updates[k] for k in layers], list(ratios))
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_add_(weights, buffers, alpha=-group["lr"])
            # END SOLUTION


class LAMB(torch.optim.Optimizer):
    """AdamW, with a trust ratio for each layer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights, gradients, steps, means, squares = ready(self, group, "mean", "square")
            if not weights:
                continue
            beta1, beta2 = group["betas"]
            # BEGIN SOLUTION
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            roots = [math.sqrt(1 - beta2**step) for step in steps]
            below = torch._foreach_sqrt(squares)
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            updates = torch._foreach_mul(weights, [group["weight_decay"] * (weight.ndim > 1) for weight in weights])
            corrections = [root / (1 - beta1**step) for root, step in zip(roots, steps)]
            torch._foreach_addcdiv_(updates, means, below, corrections)
            layers = [k for k, weight in enumerate(weights) if weight.ndim > 1]
            if layers:
                adapted = [updates[k] for k in layers]
                torch._foreach_mul_(adapted, list(trust_ratios([weights[k] for k in layers], adapted)))
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            # END SOLUTION


# %%
tp.check(5, trust_ratios, LARS, LAMB)

# %% [markdown]
# **Beside PyTorch's and timm's own**, on the same weights with the same gradients: how far apart the weights are after five steps,
# then a race, a step of each in turn. timm clips the global gradient norm inside LAMB unless told not to, and needs a group without
# decay to exempt vectors.


# %%
@torch.no_grad()
def beside(mine, theirs, repeats=20):
    """Largest difference of the weights after five equal steps, and a race of their steps. mine, theirs: model → optimizer."""
    torch.manual_seed(0)
    models = [network()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [make(model) for make, model in zip((mine, theirs), models)]
    for _ in range(5):
        for pair in zip(*(model.parameters() for model in models)):
            pair[0].grad = torch.randn_like(pair[0])
            pair[1].grad = pair[0].grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    apart = max(float((one - other).abs().max()) for one, other in zip(*(model.parameters() for model in models)))
    return apart, measure.race({"yours": optimizers[0].step, "theirs": optimizers[1].step}, repeats, device="cpu")


def compared(optimizers):
    """Print `beside` for several: {name: (mine, theirs)}."""
    for name, pair in optimizers.items():
        apart, race = beside(*pair)
        times = ", ".join(f"{which} {1e3 * seconds:.3f} ms" for which, seconds in race.medians.items())
        print(f"{name:6} apart by {apart:.0e} after 5 steps; a step: {times}, ratio {race.ratio:.2f}")


# %%
def by_timm():
    """timm's LARS and LAMB with the options that make them equal. Its import takes a few seconds."""
    from timm.optim import Lamb, Lars

    options = {"lr": 0.01, "weight_decay": 0.1}
    return {
        "AdamW": (lambda model: AdamW(parameter_groups(model, 0.1)),
                  lambda model: torch.optim.AdamW(parameter_groups(model, 0.1), foreach=True)),
        "LARS": (lambda model: LARS(model.parameters(), **options),
                 lambda model: Lars(parameter_groups(model, 0.1), lr=0.01, momentum=0.9, foreach=True)),
        "LAMB": (lambda model: LAMB(model.parameters(), **options),
                 lambda model: Lamb(parameter_groups(model, 0.1), lr=0.01, max_grad_norm=None, foreach=True)),
    }  # fmt: skip


compared(by_timm())

# %% [markdown]
# ## Orthogonal steps: Muon
#
# A gradient of a matrix is mostly a few directions: a handful of singular values is much larger than all others, and a step along it
# moves these few and hardly the rest. Muon (Jordan, 2024) makes all directions of the step equally long: of $M = U \Sigma V^\top$ it keeps
# $U V^\top$. An SVD would be far too slow. Five rounds of a *Newton-Schulz iteration*, matrix products only, come near enough: with
# $X_0 = M / \lVert M \rVert_F$,
#
# $$A = X X^\top,\qquad X \leftarrow a X + (b A + c A^2) X,\qquad (a, b, c) = (3.4445,\; -4.7750,\; 2.0315).$$
#
# Each round maps every singular value $s$ to $a s + b s^3 + c s^5$ and leaves the directions alone; small ones grow by a factor of 3.4,
# large ones stay between about 0.7 and 1.2.
#
# Muon is for **hidden matrices**. Biases and norms, embeddings and the last layer belong to AdamW. The squares of the entries of
# $UV^\top$ add up to $\min(\text{rows}, \text{columns})$, so they are $1/\sqrt{\max(\text{rows}, \text{columns})}$ in size. Times $0.2 \sqrt{\max(\text{rows},
# \text{columns})}$ it is as large as AdamW's steps usually are, and one rate serves both.
#
# ### Balise 6 · Muon · further · about 21 min
#
# - **`orthogonalise(matrices, steps=5)`**: matrices `(n, rows, columns)` → the same shape and dtype, each matrix on its own, by the iteration.
#   It computes in the dtype that it is given. A matrix of zeros stays zero. Of a tall matrix take the transpose, so that $A$ is the small
#   square: it is where the time goes.
# - **`Muon.step`**: $B \leftarrow \mu B + (1-\mu)\,g$; orthogonalise $(1-\mu)\,g + \mu B$ (Nesterov: one step ahead), all matrices of one
#   shape **in one call**, in the group's `dtype`; then $w \leftarrow w - \alpha\lambda w - \alpha \cdot 0.2\sqrt{\max(\text{rows},
#   \text{columns})}\;O$. All parameters are matrices, and what has to be done for each of them again goes through `torch._foreach_*`.
#
# About 8 and 9 lines.
#
# <details><summary>Hint</summary>
#
# `x.mT` transposes the last two dimensions, `torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)` is Frobenius's norm of each matrix,
# `.clamp(min=1e-7)` protects the zeros. `torch.baddbmm(z, x, y, beta=b, alpha=c)` is b · z + c · x @ y in one call. Both formulas of
# the momentum are a `lerp`. A dict `{shape: places}` sorts matrices by shape; `torch.stack`, `.to(dtype)`, then `.unbind()`.
# </details>


# %% tags=["balise-6"]
def orthogonalise(matrices, steps=5):
    """Make all singular values of each matrix about 1: (n, rows, columns) → the same."""
    a, b, c = 3.4445, -4.7750, 2.0315
    # BEGIN SOLUTION
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
    # END SOLUTION


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal. For matrices only."""

    def __init__(self, params, lr=1e-3, momentum=0.95, weight_decay=0.01, dtype=torch.float32):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self):
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            weights, gradients, _, means = ready(self, group, "mean")
            if not weights:
                continue
            rate, momentum = group["lr"], group["momentum"]
            # BEGIN SOLUTION
            torch._foreach_lerp_(means, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, means, momentum)
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            shapes = {}
            for k, weight in enumerate(weights):
                shapes.setdefault(weight.shape, []).append(k)
            for shape, places in shapes.items():
                stacked = torch.stack([ahead[k] for k in places]).to(group["dtype"])
                updates = orthogonalise(stacked).to(weights[places[0]].dtype).unbind()
                torch._foreach_add_([weights[k] for k in places], updates, alpha=-0.2 * max(shape) ** 0.5 * rate)
            # END SOLUTION


# %%
tp.check(6, orthogonalise, Muon)

# %% [markdown]
# What does it do to a gradient of this work's network? And beside `torch.optim.Muon`, which takes one matrix after the other, always in
# bfloat16. On processors without bfloat16 instructions, most laptops, that is slow; on a GPU it is what you want. So the dtype
# is an option here, and the race is in float32.


# %%
def spectra():
    """Singular values of the hidden matrix's gradient, before and after, both divided by the largest: {name: (128,)}."""
    torch.manual_seed(0)
    model = network()
    F.cross_entropy(model(X), Y).backward()
    gradient = next(weight.grad for weight in model.parameters() if weight.shape == (128, 128))
    after = torch.linalg.svdvals(orthogonalise(gradient[None])[0])
    return {"gradient": torch.linalg.svdvals(gradient), "orthogonalised": after}


def by_torch():
    """torch's Muon with the options that make both equal, on the matrices of the network and of a deep one."""
    options = {"lr": 0.01, "weight_decay": 0.1}

    def matrices(model):
        return [weight for weight in model.parameters() if weight.ndim > 1]

    return {"Muon": (lambda model: Muon(matrices(model), **options),
                     lambda model: torch.optim.Muon(matrices(model), adjust_lr_fn="match_rms_adamw", **options))}  # fmt: skip


values = spectra()
for name, one in values.items():
    share = float((one > 0.1 * one[0]).float().mean())
    print(f"{name}: {share:.0%} of the singular values are above a tenth of the largest")
compared(by_torch())

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
for name, one in values.items():
    axes.plot(range(1, len(one) + 1), one / one[0], label=name)
axes.set(
    xlabel="number of the singular value",
    ylabel="singular value / largest",
    title="Which directions does a step move?",
    yscale="log",
    ylim=(1e-4, 2),
)
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Batch 32 against batch 1,438, at a fixed number of epochs
#
# Work 09 left this question. 45 ranks with 32 images each are a batch of 1,438: the whole training set in one step. An epoch then
# takes a 45th of the steps, and if the number of epochs stays, the weights are changed 5 times instead of 225. Which optimizer
# makes the most of five steps? Each gets a grid of rates for each batch size, three seeds (weights, order of images), and your cosine
# schedule from balise 1. What counts is the validation accuracy at its best rate.
#
# **Commit to a guess.** LARS and LAMB were made for large batches. Which of SGD, LARS, LAMB, AdamW and Muon loses least when the
# batch grows from 32 to 1,438? Write it into the cell, then run it.

# %%
guess = None  # a name


# %%
def muon_and_adamw(model, rate):
    """Muon for the hidden matrices, AdamW for the rest: biases, norms, the last layer."""
    hidden = [weight for weight in model.parameters() if weight.ndim > 1][:-1]
    rest = [weight for weight in model.parameters() if all(weight is not one for one in hidden)]
    return [Muon(hidden, rate), AdamW(rest, rate)]


CONTESTANTS = {  # name: (model, rate → optimizers; rates for batch 32; rates for batch 1,438)
    "SGD": (lambda model, rate: [torch.optim.SGD(model.parameters(), rate, momentum=0.9)],
            (0.01, 0.03, 0.1), (0.03, 0.1, 0.3, 1.0)),
    "LARS": (lambda model, rate: [LARS(model.parameters(), rate, weight_decay=1e-4, coefficient=0.02)],
             (0.1, 0.3, 1.0), (0.3, 1.0, 3.0, 10.0)),
    "LAMB": (lambda model, rate: [LAMB(model.parameters(), rate)], (0.003, 0.01, 0.03), (0.01, 0.03, 0.1, 0.3)),
    "AdamW": (lambda model, rate: [AdamW(parameter_groups(model, 0.01), rate)],
              (0.001, 0.003, 0.01), (0.003, 0.01, 0.03, 0.1)),
    "Muon": (muon_and_adamw, (0.003, 0.01, 0.03), (0.01, 0.03, 0.1, 0.3)),
}  # fmt: skip


# %%
def reached_by(make, rates, batch, epochs=5, seeds=(0, 1, 2)):
    """Validation accuracy of each rate and seed, (rates, seeds), all trained side by side."""
    pairs = [(rate, seed) for rate in rates for seed in seeds]
    runs = SideBySide(network, [seed for _, seed in pairs])
    optimizers = [make(model, rate) for model, (rate, _) in zip(runs.models, pairs)]
    orders = [torch.Generator().manual_seed(seed) for _, seed in pairs]
    step, steps = 0, epochs * math.ceil(len(X) / batch)
    for _ in range(epochs):
        order = torch.stack([torch.randperm(len(X), generator=one) for one in orders])
        for rows in order.split(batch, dim=1):
            runs.backward(X[rows], Y[rows])
            share = warmup_cosine(step, steps, 0, 1.0)
            for (rate, _), several in zip(pairs, optimizers):
                for optimizer in several:
                    for group in optimizer.param_groups:
                        group["lr"] = rate * share
                    optimizer.step()
            step += 1
    return runs.accuracy(VAL_X, VAL_Y).reshape(len(rates), len(seeds))


def best_of(make, rates, batch):
    """(accuracies of the seeds at the rate with the best mean, that rate, a remark if it lies at the edge of the grid)."""
    reached = reached_by(make, rates, batch)
    k = int(reached.mean(1).argmax())
    return reached[k], rates[k], ", at the edge of its grid" if k in (0, len(rates) - 1) else ""


# %%
def contest():
    """{name: what `best_of` found with (batch 32, batch 1,438)}."""
    return {name: [best_of(make, rates, batch) for rates, batch in zip(grids, (32, 1438))]
            for name, (make, *grids) in CONTESTANTS.items()}  # fmt: skip


found = contest()
for name, pair in found.items():
    for batch, (reached, rate, remark) in zip(("32", "1,438"), pair):
        words = f"{reached.mean():.3f} ({reached.min():.3f} to {reached.max():.3f})"
        print(f"{name:6} batch {batch:>5}: accuracy {words}, rate {rate:g}{remark}")
loses = {name: float(small[0].mean() - large[0].mean()) for name, (small, large) in found.items()}
least, most = min(loses, key=loses.get), max(loses, key=loses.get)
print(f"{least} loses least, {loses[least]:.3f}; {most} most, {loses[most]:.3f}; your guess: {guess}")
for name, other in (("LAMB", "AdamW"), ("LARS", "SGD")):
    one, two = found[name][1][0], found[other][1][0]
    word = "all seeds" if one.min() > two.max() or two.min() > one.max() else "not all seeds, their ranges overlap"
    which = (name, other) if one.mean() > two.mean() else (other, name)
    print(f"batch 1,438: {which[0]} ahead of {which[1]} by {abs(float(one.mean() - two.mean())):.3f}, {word}")

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for batch, (label, left) in enumerate((("batch 32: 225 steps", -0.1), ("batch 1,438: 5 steps", 0.1))):
    reached = torch.stack([pair[batch][0] for pair in found.values()])
    middle = reached.mean(1)
    bars = torch.stack([middle - reached.amin(1), reached.amax(1) - middle])
    axes.errorbar([k + left for k in range(len(found))], middle, bars, fmt="o", capsize=4, label=label)
axes.set_xticks(range(len(found)), found)
axes.set(ylabel="validation accuracy", title="Five epochs, rate tuned for each: mean and range of three seeds")
axes.legend(fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# <details><summary>What to read from it</summary>
#
# With a small batch, tuned, all are nearly level: there is no lack of steps. With five steps, what counts is how far a step gets. A
# trust ratio makes the lengths of the steps of all layers equal, which helps where they differ much, in networks of dozens of layers
# trained for thousands of steps. This one has three layers and five steps: do LARS and LAMB gain anything over SGD and AdamW, beyond the
# ranges? Later comparisons with well-tuned baselines doubted it for large networks, too (Nado et al., 2021). Muon lengthens the small directions within a
# matrix, and these are what five steps of the others hardly move. Look at the ranges before you believe an order, and at the
# remarks: a best rate at the edge of its grid may not be the best.
# </details>

# %% [markdown]
# ## How large is too large? The gradient noise scale
#
# A gradient of $B$ samples is the true one, $G$, plus noise whose variance falls as $1/B$. With $\Sigma$ the covariance of
# one sample's gradient,
#
# $$\mathbb{E}\,\lVert g_B \rVert^2 = \lVert G \rVert^2 + \frac{\operatorname{tr} \Sigma}{B}, \qquad
# B_\text{noise} = \frac{\operatorname{tr} \Sigma}{\lVert G \rVert^2} .$$
#
# At the batch size $B_\text{noise}$ noise and gradient are equally long. Far below it, twice the batch nearly halves the
# steps; far above it, the direction is known well enough, and more samples say the same again. McCandlish and others (2018)
# make of it, for tuned rates,
#
# $$\text{steps}(B) = S_\text{min} \Big(1 + \frac{B_\text{noise}}{B}\Big), \qquad
# \text{efficiency}(B) = \frac{\text{fewest samples}}{\text{samples}} = \frac{1}{1 + B / B_\text{noise}} .$$
#
# Data parallelism measures it for nothing: each rank has a gradient of $b$ samples before the all-reduce, and one of $N b$
# after it. Two batch sizes, two equations, two unknowns.
#
# ### Balise 7 · The gradient noise scale · about 18 min
#
# - **`gradient_noise(parameters, batch)`** runs on every rank, between backward and the optimizer's step. Each rank's
#   gradients are means over `batch` samples; some may be None. (`parameters`, like `model.parameters()`, can perhaps be gone
#   through only once.) Afterwards they are the mean over the ranks, as always. It
#   returns *this step's* estimates of $\lVert G \rVert^2$ and of $\operatorname{tr} \Sigma$, two tensors, the same on all
#   ranks: the first equation for $B = b$, where the left side is the mean over the ranks, and for $B = N b$, solved. Beside
#   the gradients at most two numbers travel. With one rank there is one equation: raise a `ValueError`.
# - **`noise_scale(estimates)`** makes one number of such pairs, those of many steps. Each estimate is right on average, and
#   wild by itself: $\lVert G \rVert^2$ is a small difference of large numbers and may be negative. So numerator and
#   denominator are averaged **apart**, before the division: a mean of quotients is ruled by the few whose denominator is near
#   zero. Where even the mean of $\lVert G \rVert^2$ is not above zero, the answer is `math.inf`.
# - **`ranks_that_pay(noise, batch, share)`**: the largest number of ranks with `batch` samples each at which the efficiency
#   is at least `share`; 1 if even one rank is too many.
#
# About 10, 3 and 1 lines.
#
# <details><summary>Hint</summary>
#
# The difference of the two equations has no $\lVert G \rVert^2$ in it. `torch._foreach_norm(gradients)` are the norms of a
# list, and squares add up. The squared length before `average_over_ranks` is another one on each rank: all-reduce it, and
# divide by the number of ranks.
# </details>


# %% tags=["balise-7"]
@torch.no_grad()
def gradient_noise(parameters, batch):
    """On a rank: average the gradients; (|G|², tr Σ) as this step estimates them, tensors, the same on all ranks."""
    # BEGIN SOLUTION
    n = dist.get_world_size()
    if n == 1:
        raise ValueError("one rank has gradients of one batch size: two are needed")
    parameters = [p for p in parameters if p.grad is not None]
    small = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()
    dist.all_reduce(small)
    small /= n
    average_over_ranks(parameters)
    big = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()
    trace = (small - big) / (1 / batch - 1 / (n * batch))
    return small - trace / batch, trace
    # END SOLUTION


def noise_scale(estimates):
    """tr Σ / |G|² of many steps' estimates (|G|², tr Σ); math.inf where the gradient is lost in the noise."""
    # BEGIN SOLUTION
    square = sum(float(square) for square, _ in estimates)
    trace = sum(float(trace) for _, trace in estimates)
    return trace / square if square > 0 else math.inf
    # END SOLUTION


def ranks_that_pay(noise, batch, share):
    """The largest number of ranks of `batch` samples each with an efficiency of at least `share`; at least 1."""
    # BEGIN SOLUTION
    return max(1, math.floor(noise * (1 / share - 1) / batch))
    # END SOLUTION


# %%
tp.check(7, gradient_noise, noise_scale, ranks_that_pay)

# %% [markdown]
# ## The bend: steps to a target against the batch size
#
# Does it hold? For each batch size, plain SGD trains until the validation loss is 0.25 for the first time: four rates side
# by side, three seeds each. What counts is the rate whose middle seed arrives first. Were samples all that matters, twice
# the batch would take half the steps.
#
# **Commit to a guess.** A batch of 256 sees 64 times as many samples in a step as one of 4. How many times fewer steps does
# it need: 64, 30, 15, or 8? (Where the table says "edge of the grid", a rate beyond it might do with fewer still.)

# %%
guess = None  # times fewer

# %%
TARGET, RATES, SEEDS = 0.25, (0.02, 0.05, 0.125, 0.3), 3


def steps_to_target(batch, every):
    """(best rate, its steps of each seed, sorted): all rates side by side until all seeds of the best one have arrived."""
    runs = SideBySide(network, [seed for _ in RATES for seed in range(SEEDS)])
    rates, count = torch.tensor(RATES).repeat_interleave(SEEDS), len(runs.models)
    generator, arrived = torch.Generator().manual_seed(batch), torch.full((count,), math.inf)
    for step in range(1, 3000):
        drawn = torch.randint(len(X), (count, batch), generator=generator)
        runs.backward(X[drawn], Y[drawn])
        runs.descend(rates)
        if step % every == 0:
            with torch.no_grad():
                logits = runs(VAL_X.expand(count, *VAL_X.shape)).transpose(1, -1)
                losses = F.cross_entropy(logits, VAL_Y.expand(count, -1), reduction="none").mean(1)
            arrived[(losses <= TARGET) & arrived.isinf()] = step
            of_each_rate = arrived.view(-1, SEEDS).sort().values
            best = of_each_rate[:, SEEDS // 2].argmin()
            if of_each_rate[best].isfinite().all():
                return RATES[best], of_each_rate[best]
    raise RuntimeError(f"no rate reaches the target with batch {batch}")


# %%
bend, before = {}, None
print("batch   steps (3 seeds)     rate                samples   of the steps at half the batch")
for batch in (4, 8, 16, 32, 64, 128, 256):
    rate, steps = steps_to_target(batch, every=min(8, max(1, 64 // batch)))
    bend[batch] = steps
    edge = "(edge of the grid)" if rate in (RATES[0], RATES[-1]) else ""
    share = f"{steps[1] / before:.2f}" if before else ""
    print(
        f"{batch:5}   {', '.join(f'{one:.0f}' for one in steps):18}  {rate:<5g} {edge:19} {batch * steps[1]:5.0f}   {share}"
    )
    before = steps[1]
print(f"64 times the batch: {bend[4][1] / bend[256][1]:.1f} times fewer steps; your guess: {guess}")

# %% [markdown]
# <details><summary>Why so few?</summary>
#
# A larger batch makes each step *surer*, not longer: the longest rate that a step may have is set by the curvature. The step
# of a batch whose gradient is nearly the true one is as good as it gets, and some number of such steps is always needed.
# </details>
#
# Now the prediction, from one training of four ranks with 8 samples each, which takes no longer than any other. Beside it,
# the line that fits the measured steps best, $S_\text{min} (1 + B_c / B)$.


# %%
def watched_training(steps=64, batch=8, rate=0.1):
    """On a rank: train, and keep each step's estimates (|G|², tr Σ)."""
    torch.manual_seed(0)
    model, found = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        drawn = torch.randint(len(X), (batch,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(X[drawn]), Y[drawn]).backward()
        found.append([float(one) for one in gradient_noise(model.parameters(), batch)])
        optimizer.step()
    return found


def fitted(bend):
    """(S_min, B_c) of the line steps = S_min + S_min B_c / B with the least relative errors, all seeds."""
    points = [(batch, float(steps)) for batch, all_steps in bend.items() for steps in all_steps]
    rows = torch.tensor([[1 / steps, 1 / (batch * steps)] for batch, steps in points])
    fewest, slope = torch.linalg.lstsq(rows, torch.ones(len(rows), 1)).solution.flatten().tolist()
    return fewest, slope / fewest


# %% jupyter={"source_hidden": true}
def draw_bend(estimates, fewest, critical, noise):
    """Left: each step's quotient, and the quotient of the means so far. Right: steps to the target."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot([trace / square for square, trace in estimates], "o", markersize=4, label="this step's quotient")
    left.plot([noise_scale(estimates[: k + 1]) for k in range(len(estimates))], label="quotient of the means so far")
    left.set_yscale("symlog", linthresh=10)
    left.set(xlabel="step", ylabel="noise scale (samples)", title="One step says little, and may be negative")
    left.legend(fontsize=8)
    sizes = list(bend)
    middle = torch.stack(list(bend.values())).T
    right.errorbar(
        sizes, middle[1], (middle[1] - middle[0], middle[2] - middle[1]), fmt="o", capsize=3, label="measured: 3 seeds"
    )
    right.plot(sizes, [fewest * (1 + critical / size) for size in sizes], label=f"fit: bend at {critical:.0f} samples")
    right.plot(sizes, [fewest * (1 + noise / size) for size in sizes], "--", label=f"with the noise scale, {noise:.0f}")
    right.plot(
        sizes, [middle[1, 0] * sizes[0] / size for size in sizes], ":", color="0.5", label="half the steps each time"
    )
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set(
        xlabel="batch size (samples)", ylabel="steps to the target", title="Where do more samples stop saving steps?"
    )
    right.set(
        xticks=sizes,
        xticklabels=sizes,
        ylim=(0.5 * fewest, None),
        yticks=(20, 50, 100, 200, 500),
        yticklabels=(20, 50, 100, 200, 500),
    )
    right.minorticks_off()
    right.legend(fontsize=8)
    plt.show()


# %%
estimates = launch.ranks(watched_training, n=4, timeout=120)[0]
noise, (fewest, critical) = noise_scale(estimates), fitted(bend)
quotients = sorted(trace / square for square, trace in estimates)
half = len(estimates) // 2
print(
    f"this step's quotient: from {quotients[0]:.0f} to {quotients[-1]:.0f}, {sum(q < 0 for q in quotients)} of {2 * half} negative"
)
print(f"noise scale of the training: {noise:.0f} samples (first half {noise_scale(estimates[:half]):.0f}, "
      f"second half {noise_scale(estimates[half:]):.0f})")  # fmt: skip
print(f"bend of the measured steps: {critical:.0f} samples, with never fewer than {fewest:.0f} steps; "
      f"the noise scale says {noise / critical:.1f} times as many")  # fmt: skip
print(f"ranks of 8 samples that pay, by the noise scale: {ranks_that_pay(noise, 8, 0.5)} at an efficiency of 0.5, "
      f"{ranks_that_pay(noise, 8, 0.2)} at 0.2")  # fmt: skip
draw_bend(estimates, fewest, critical, noise)

# %% [markdown]
# Left of the bend, twice the ranks halve the time at the same number of samples. Far right of it they double the bill and
# save nothing, whatever the network between them. McCandlish and others find the noise scale and the bend of the same order
# of magnitude over six orders of it, not equal: the formula leaves out the curvature. And it is not one number: as the loss
# falls the gradient gets shorter and the noise stays, so that the noise scale rises during a training. That is why some
# trainings let their batch grow.

# %% [markdown]
# ## Flat or sharp? Measure it · further
#
# The lecture's picture: large batches end in steep, narrow minima, and these generalise worse (Keskar and others, 2017).
# Measure it. Two numbers tell how sharp a minimum is:
#
# - the largest eigenvalue of the Hessian, the curvature in the steepest direction. The Hessian has hundreds of millions of
#   entries even here, but its product with a vector costs about two backward passes, and *power iteration* needs nothing
#   else;
# - the mean rise of the loss in random directions, each row of which has half the length of the weights' row (*filter
#   normalisation*, Li and others, 2018). Without that, weights that are merely larger would look flatter.
#
# Three rates, batch 32 and all 1,438 samples, three seeds. Each stops where its training loss is 0.2: what lies deeper is
# flatter anyway, because the curvature of a cross-entropy vanishes with it.


# %%
SHAPE = network().to("meta")  # what a network computes; the weights come from elsewhere


def on_probe(weights, model=SHAPE):
    """Mean cross-entropy on 256 training samples, with these weights {name: tensor}."""
    return F.cross_entropy(torch.func.functional_call(model, weights, (X[:256],)), Y[:256])


def sharpness(weights, iterations=8):
    """Largest eigenvalue of each model's Hessian, (models,). weights: {name: (models, ...)}"""

    def product(at, along):
        return torch.func.jvp(torch.func.grad(on_probe), (at,), (along,))[1]

    torch.manual_seed(0)
    along = {name: torch.randn_like(w) for name, w in weights.items()}
    for _ in range(iterations):
        length = sum(v.flatten(1).square().sum(1) for v in along.values()).sqrt()
        unit = {name: v / length.view(-1, *[1] * (v.dim() - 1)) for name, v in along.items()}
        along = torch.func.vmap(product)(weights, unit)
    return sum((unit[name] * along[name]).flatten(1).sum(1) for name in unit)


def direction(weights, seed, vectors=1):
    """A random direction: each row as long as the weights' row; zero for biases and norms, of `vectors` dimensions."""
    torch.manual_seed(seed)
    return {name: w.norm(dim=-1, keepdim=True) * F.normalize(torch.randn_like(w), dim=-1) if w.dim() > vectors else 0 * w
            for name, w in weights.items()}  # fmt: skip


def rise(weights, radius=0.5, directions=8):
    """How much the loss rises at this distance, on average over directions, (models,)."""
    losses = torch.func.vmap(on_probe)
    moved = [direction(weights, seed, vectors=2) for seed in range(directions)]
    far = [losses({name: w + radius * one[name] for name, w in weights.items()}) for one in moved]
    return sum(far) / directions - losses(weights)


# %%
def trained_to(loss, batch, rates, every):
    """(weights of all models, steps), rates × 3 seeds side by side; a model that has arrived stands still."""
    runs = SideBySide(network, [seed for _ in rates for seed in range(SEEDS)])
    left, steps = torch.tensor(rates).repeat_interleave(SEEDS), torch.zeros(len(runs.models))
    generator, every_model = torch.Generator().manual_seed(batch), X.expand(len(left), *X.shape)
    for step in range(1, 2000):
        if batch == len(X):
            losses = runs.backward(every_model, Y.expand(len(left), -1))
        else:
            drawn = torch.randint(len(X), (len(left), batch), generator=generator)
            runs.backward(X[drawn], Y[drawn])
            if step % every == 0:
                with torch.no_grad():
                    logits = runs(every_model).transpose(1, -1)
                    losses = F.cross_entropy(logits, Y.expand(len(left), -1), reduction="none").mean(1)
        if step % every == 0:
            left[losses <= loss] = 0.0
        steps += left > 0
        if not left.any():
            break
        runs.descend(left)
    weights = {name: w.detach() for name, w in torch.func.stack_module_state(runs.models)[0].items()}
    return weights, steps, runs.accuracy(VAL_X, VAL_Y)


# %%
LOSS, MINIMA_RATES = 0.2, (0.1, 0.3, 0.8)
minima = {}
print("batch  rate   steps   sharpness (3 seeds)    2 / rate   rise of the loss   validation accuracy")
for batch, every in ((32, 10), (len(X), 1)):
    weights, steps, accuracies = trained_to(LOSS, batch, MINIMA_RATES, every)
    sharp, rises = sharpness(weights), rise(weights)
    minima[batch] = torch.stack([sharp, rises, accuracies]).view(3, len(MINIMA_RATES), SEEDS)
    for rate, taken, one in zip(MINIMA_RATES, steps.view(-1, SEEDS).mean(1), minima[batch].transpose(0, 1)):
        found = ", ".join(f"{value:4.1f}" for value in one[0].sort().values)
        print(
            f"{batch:5}  {rate:<5g}  {taken:5.0f}   {found:21}  {2 / rate:8.1f}   {one[1].mean():8.3f}          {one[2].mean():.3f}"
        )
small, large = minima.values()
for k, rate in enumerate(MINIMA_RATES):
    print(f"rate {rate:g}: the large batch's minima are {(large[0, k] / small[0, k]).mean():.1f} times as sharp, "
          f"their accuracy differs by {100 * (large[2, k] - small[2, k]).mean():+.1f} points (that of seeds by up to "
          f"{100 * max(s[2, k].max() - s[2, k].min() for s in (small, large)):.1f})")  # fmt: skip
print(f"rate {MINIMA_RATES[-1]} instead of {MINIMA_RATES[0]}: "
      + " and ".join(f"{(m[0, 0] / m[0, -1]).mean():.0f} times flatter with batch {batch:,}" for batch, m in minima.items()))  # fmt: skip
order = torch.stack([torch.cat([m[k].flatten() for m in minima.values()]) for k in (0, 2)]).argsort(1).argsort(1)
print(
    f"the orders by sharpness and by accuracy agree by {torch.corrcoef(order.double())[0, 1]:+.2f} (-1: the flatter, the better)"
)

# %% jupyter={"source_hidden": true}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for batch, values in minima.items():
    rates = torch.tensor(MINIMA_RATES).repeat_interleave(SEEDS) * (1.03 if batch == len(X) else 0.97)
    left.plot(rates, values[0].flatten(), "o", alpha=0.7, label=f"batch {batch:,}")
    right.plot(values[0].flatten(), values[2].flatten(), "o", alpha=0.7, label=f"batch {batch:,}")
left.plot(MINIMA_RATES, [2 / rate for rate in MINIMA_RATES], color="0.5", label="2 / rate: above it, steps grow")
left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="largest eigenvalue of the Hessian",
         title="What makes a minimum sharp: the batch, or the rate?")  # fmt: skip
left.set(xticks=MINIMA_RATES, xticklabels=MINIMA_RATES, yticks=(2, 5, 10, 20, 50), yticklabels=(2, 5, 10, 20, 50))
left.minorticks_off()
left.legend(fontsize=8)
right.set(xscale="log", xlabel="largest eigenvalue of the Hessian", ylabel="validation accuracy",
          title="Do flat minima generalise better?", xticks=(2, 5, 10, 20), xticklabels=(2, 5, 10, 20))  # fmt: skip
right.minorticks_off()
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# Read the table in two directions. Down a batch, the **rate** changes. A gradient step of rate $\eta$ cannot stay where the
# curvature is above $2/\eta$: it jumps across, farther each time. So training with a large rate goes on only where it is
# flat, and without noise it is often found right at that edge (Cohen and others, 2021). Across the batches, at the same
# rate, the **noise** changes: it shakes a small batch out of narrow places in which a large one can stay. So far the
# lecture's picture holds.
#
# Then read the last column, beside its spread over seeds, and the line on the orders: is flat *better*? Nothing here has
# forced it to be. All stopped at the same training loss, on 1,438 small images: that is a narrow test, and yet one that a
# law would have to pass. With tuned rates and as many steps, others found much of the gap between small and large batches
# gone (Hoffer and others, 2017; Shallue and others, 2019).
#
# ## See it: the surface with and without skip connections · further
#
# A network of 20 layers, trained twice: plain, and with each layer added to its input. The loss over a plane through what
# was found, spanned by two random directions, filter-normalised as above, is what Li and others (2018) drew to explain why
# residual networks train so well.


# %%
class Deep(nn.Module):
    """64 → 32 → … → 32 → 10 without norms; with skip, a layer adds to its input."""

    def __init__(self, skip, layers=20, width=32):
        super().__init__()
        self.skip, self.first, self.last = skip, nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            layer.weight.data *= 0.3 if skip else 1.0  # what is added 20 times must be small

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.layers:
            x = F.relu(layer(x)) + (x if self.skip else 0)
        return self.last(x)


def plane(skip, steps=200, points=25, reach=0.5):
    """Train; (training loss at the end, losses of points × points in the plane)."""
    torch.manual_seed(0)
    model = Deep(skip)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        drawn = torch.randint(len(X), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(X[drawn]), Y[drawn]).backward()
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    one, other = direction(weights, 1), direction(weights, 2)

    def at(a, b):
        return on_probe({name: w + a * one[name] + b * other[name] for name, w in weights.items()}, model)

    far = torch.linspace(-reach, reach, points)
    with torch.no_grad():
        losses = torch.func.vmap(at, chunk_size=125)(far.repeat_interleave(points), far.repeat(points))
    return losses[len(losses) // 2].item(), losses.view(points, points)


# %%
planes = {name: plane(skip) for name, skip in (("plain", False), ("with skip connections", True))}
for name, (middle, losses) in planes.items():
    ring = torch.cat([losses[6, 6:19], losses[18, 6:19], losses[6:19, 6], losses[6:19, 18]])  # half of the way out
    print(
        f"{name + ':':23} loss {middle:.3f} in the middle, {ring.median():.2f} half of the way out, {losses.max():.0f} at the most"
    )

# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
levels = [10 ** (k / 3 - 2) for k in range(16)]
for axes, (name, (_, losses)) in zip(panels, planes.items()):
    far = torch.linspace(-0.5, 0.5, len(losses))
    shown = axes.contourf(far, far, losses.clamp(levels[0], levels[-1]).T, levels, norm="log", cmap="viridis")
    axes.plot(0, 0, "w+")
    axes.set(aspect="equal", xlabel="first direction (of the weights' length)", title=name)
panels[0].set(ylabel="second direction")
figure.colorbar(shown, ax=panels, label="training loss", ticks=[0.01, 0.1, 1, 10, 100, 1000], format="{x:g}")
figure.suptitle("How far around what was found is the loss still low?")
plt.show()

# %% [markdown]
# Same depth, width, steps and rate. A slice is two directions out of some twenty thousand, chosen by chance: it shows how
# forgiving a place is, and not whether there are other minima.

# %% [markdown]
# ## Stop early, and resume exactly
#
# A job on a cluster ends when its hours are over, not when its epoch is. Whoever goes on from the weights alone goes on with
# another training: the momentum is empty, the schedule begins again, the first half of the epoch is read twice and the second
# half perhaps never. A resumed run should be **bitwise** the run that was never stopped. Then a difference between two runs
# is a difference between two methods.
#
# ### Balise 8 · Stop early, resume exactly · further · about 27 min
#
# - **`EarlyStopping.update(value, model)`** takes in the validation value of an epoch. Is it better than `self.best` (smaller;
#   larger with `maximize`; NaN never is)? Then note it, *copy* the model's weights and buffers (`state_dict()`) to `self.weights`, and begin
#   `self.waited` at 0 again; else it is one more. Returns True if `patience` values in a row were not better: stop.
#   **`restore(model)`** puts the best weights back into the model; where there are none yet, it does nothing.
# - **`Batches.__iter__`** is a generator: it goes through the batches `(x, y)` of `self.order()` from number `self.done` on.
#   `self.done` counts those handed out, so that whoever saves in the middle of the loop, after the step, saves the number of
#   the *next* batch. With the epoch it ends, ready for the next one: `self.epoch` is one more, `self.done` is 0.
# - **`save_checkpoint(path, **parts)`** saves the `state_dict()` of every part (model, optimizer, scheduler, scaler, batches,
#   early stopping, ...) and `random_states()` in one file; `path` is a string or a `Path`. A job may be killed while it writes:
#   write to another file of the same folder, and let it take the old one's place with `Path.replace` when it is whole. Either
#   the old checkpoint is there, or the new one.
# - **`load_checkpoint(path, **parts)`** hands each part that is given its state by `load_state_dict`, and then sets the random
#   states. The file may come from anywhere: `weights_only=True`, or reading it may run somebody's code.
#
# 10, 6, 4 and 4 lines.
#
# <details><summary>Hint</summary>
#
# `model.state_dict()` holds the model's own tensors, not copies: `copy.deepcopy` it. In a generator, what stands behind
# `yield` runs only when the next batch is asked for. `order.split(size)` cuts the order into batches. The random states come
# last: what else is loaded might draw.
# </details>


# %% tags=["balise-8"]
class EarlyStopping:
    """Says when to stop, and keeps the best weights."""

    def __init__(self, patience, maximize=False):
        self.patience, self.maximize = patience, maximize
        self.best, self.weights, self.waited = None, None, 0

    def update(self, value, model):
        """Take in a value; True: stop."""
        # BEGIN SOLUTION
        if self.best is None:
            better = not math.isnan(value)
        else:
            better = value > self.best if self.maximize else value < self.best
        self.waited += 1
        if better:
            self.best, self.waited = float(value), 0
            self.weights = copy.deepcopy(model.state_dict())
        return self.waited >= self.patience
        # END SOLUTION

    def restore(self, model):
        """Put the best weights back."""
        # BEGIN SOLUTION
        if self.weights is not None:
            model.load_state_dict(self.weights)
        # END SOLUTION

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Batches:
    """Batches (x, y) in another order each epoch; knows where it stands."""

    def __init__(self, x, y, size, seed=0):
        self.x, self.y, self.size, self.seed = x, y, size, seed
        self.epoch, self.done = 0, 0  # the epoch, and how many of its batches were handed out

    def order(self):
        """The order of the samples in this epoch, int64 (samples,): the same whenever it is asked for."""
        return torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))

    def __iter__(self):
        """The rest of this epoch."""
        # BEGIN SOLUTION
        for rows in self.order().split(self.size)[self.done :]:
            self.done += 1
            yield self.x[rows], self.y[rows]
        self.epoch, self.done = self.epoch + 1, 0
        # END SOLUTION

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


def save_checkpoint(path, **parts):
    """Save the state of every part and all random states: the old file, or the new one, never half of one."""
    # BEGIN SOLUTION
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"parts": states, "random": random_states()}, f"{path}.new")
    Path(f"{path}.new").replace(path)
    # END SOLUTION


def load_checkpoint(path, **parts):
    """Put every part, and all random states, into the state that was saved."""
    # BEGIN SOLUTION
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    set_random_states(saved["random"])
    # END SOLUTION


# %%
tp.check(8, EarlyStopping, Batches, save_checkpoint, load_checkpoint)

# %% [markdown]
# What does it cost to leave something out? A training of three epochs is stopped after 70 of its 135 steps, in the middle of
# an epoch, and goes on in new objects, as a new process would. It has dropout, so that random numbers matter.


# %%
def made(seed):
    """The parts of a training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Dropout(0.1), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "batches": Batches(X, Y, 32)}


def go_on(until, model, optimizer, batches):
    """Train from where the batches stand to this step, 45 an epoch. Returns all weights, (n,)."""
    while (step := batches.epoch * 45 + batches.done) < until:
        some = itertools.islice(batches, until - step)
        train(model, some, optimizer, lambda k: warmup_cosine(k, 135, 10, 0.03), step)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
def resumed(path, without):
    """The weights of a run that was resumed without one part."""
    parts = made(1)
    before = random_states()
    load_checkpoint(path, **{name: part for name, part in parts.items() if name != without})
    if without == "random states":
        set_random_states(before)
    return go_on(135, **parts)


def left_out():
    whole, stopped = go_on(135, **made(0)), made(0)
    go_on(70, **stopped)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/last.pt", **stopped)
        for without in ("nothing", "random states", "optimizer", "batches"):
            end = resumed(f"{folder}/last.pt", without)
            off = "bitwise the same" if torch.equal(end, whole) else f"{(end - whole).norm() / whole.norm():.1%} away"
            print(f"resumed without {without + ':':15} all weights together end {off}")


left_out()

# %% [markdown]
# One part less is another training, and nothing says so: no error, no warning.

# %% [markdown]
# ## Past this machine · further
#
# For language models Kaplan and others (2020) fitted the batch size of the bend to the loss $L$ (in nats a token) alone:
# $B_\text{crit} \approx 2 \cdot 10^8 \text{ tokens} \cdot L^{-1/0.21}$. It does not depend on the size of the model; it grows while the
# training goes on, so the number of ranks that pays grows too. With the planner's time of a step this becomes the question
# that somebody has to answer before the machine is booked: **how much sooner, and for how many more GPU hours?**

# %%
PARAMETERS, TOKENS = 1.3e9, 2048  # of the model; tokens a GPU and step
NODE = planner.Link(latency=6e-6, bandwidth=25e9)  # seconds, bytes a second: 200 Gbit/s for each GPU
COMPUTING = 6 * PARAMETERS * TOKENS / (0.4 * planner.A100.bfloat16)  # seconds; 40 % of the peak


def efficiencies(gpus, loss):
    """(share of samples not wasted, of time not spent on messages) with so many GPUs: an estimate."""
    batch, bend = gpus * TOKENS, 2e8 * loss ** (-1 / 0.21)
    step = planner.data_parallel_step(
        COMPUTING / 3, 2 * COMPUTING / 3, 2 * PARAMETERS, lambda size: planner.all_reduce(size, gpus, NODE, "best")
    )
    return 1 / (1 + batch / bend), COMPUTING / step.total


print("estimate: 1.3 billion parameters, 2,048 tokens a GPU and step, gradients in bfloat16, A100")
for loss in (3.5, 2.5):
    print(f"\nwhere the loss is {loss}: the bend lies at {2e8 * loss ** (-1 / 0.21) / 1e6:.1f} million tokens a step")
    alone = math.prod(efficiencies(1, loss))
    for gpus in (16, 64, 256, 1024, 4096):
        samples, messages = efficiencies(gpus, loss)
        share = samples * messages / alone
        print(f"{gpus:6,} GPUs: batch {samples:4.0%}, messages {messages:4.0%}, together {share:4.0%} efficient: "
              f"{gpus * share:6,.0f} times as fast as one, {1 / share:4.1f} times its GPU hours")  # fmt: skip

# %% [markdown]
# Two efficiencies are multiplied here that are usually reported apart; a benchmark of throughput sees the second one alone.
# And they pull in opposite directions: four times the tokens on each GPU would hide the messages behind the computing, and
# make the batch four times as large (try it: `TOKENS`). This is why beyond some hundreds of GPUs the other works of this course
# cut the *model*, not only the batch.

# %% [markdown]
# ## Questions
#
# **1.** A colleague goes from 8 to 64 GPUs, with the same batch on each and the same number of epochs. The training is seven
# times faster, and the accuracy two points lower. What happened, and what do you try, in which order?
#
# <details><summary>Answer</summary>
#
# An eighth of the steps, each along a better known direction than it may need. First the schedule: a higher rate, with a warm-up (find it
# again; the linear rule says eight times, and is an upper end). Then measure the noise scale: if the new batch is far beyond
# it, no optimizer brings the samples back, and fewer GPUs, or a longer training, are the honest answer. In between, an
# optimizer that uses steps better, compared at its own tuned rate and with several seeds.
# </details>
#
# **2.** A library accumulates over 8 micro-batches of sentences and divides the sum of the 8 mean losses by 8. When is this
# the gradient of the whole batch, and who loses when it is not?
#
# <details><summary>Answer</summary>
#
# Only when all micro-batches have the same number of tokens that count. Otherwise a token in a short micro-batch weighs more
# than one in a long one. The same mistake is made once more over ranks when their means are averaged. Both go away when sums
# are added up and divided once, by the number of tokens of all.
# </details>
#
# **3.** The noise scale grows during training, often tenfold. What follows for the batch size, and for a machine that is
# booked for the whole training?
#
# <details><summary>Answer</summary>
#
# At the beginning a small batch loses nothing and makes more steps; later a large one pays. So the batch may grow with the
# training, as that of GPT-3 did, which is kinder than letting the rate fall (Smith and others, 2018). On a fixed machine
# one starts with fewer ranks, or uses the others for something else: another seed, another model.
# </details>

# %% [markdown]
# ## To remember
#
# **A larger batch buys precision, not steps.** Up to the gradient noise scale that is a good bargain, and ranks save time
# nearly one to one; beyond it they only save it on paper. What a batch size needs is a rate found *for it*: warmed up, high
# while there is way to go, and brought down at the end. LARS, LAMB and Muon bound how far a layer goes in a step; whether
# one of them helps is a question for your own problem, each at its own tuned rate, with several seeds. Divide by what was
# counted, once, over all micro-batches and ranks. And save whatever the next step depends on: then a stop costs nothing.

# %%
tp.progress()
