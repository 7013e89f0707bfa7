# %% [markdown]
# # Learning rates, optimizers and large batches · about 100 min, core 35
#
# Work 09 ended with many ranks that compute together what one process computes. But a hundred ranks have a batch a hundred
# times as large, and an epoch of a hundred times fewer steps. The machine is faster; does the *training* end sooner?
#
# **What you will gain.** The baseline shows what is lost when only the batch grows. You get most of it back with schedules
# and optimizers, and measure the **gradient noise scale**, a number that tells beforehand how large a batch is worth its
# ranks. All on handwritten digits, with several seeds, within seconds.

# %% tags=["setup"]
import copy
import functools
import itertools
import math
import random
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, todo
from dlojz_tp.training.side_by_side import SideBySide

warnings.filterwarnings("ignore", message="IProgress not found|`torch.jit")  # of libraries that are only imported here
tp = course.open("10_learning_rate_and_large_batch")
tp

# %% tags=["setup"]
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
# Each point is the gradient of one batch: how far it goes along $G$ (the arrow), and how far to the side.


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
# A larger batch pays while the scatter is larger than the arrow. Once all points lie on its tip, more samples say the same
# again, and an epoch has fewer steps. Between the two lies a **bend**.

# %% [markdown]
# ## The baseline: one rate, one batch size
#
# Six epochs, SGD with momentum, three seeds. First the rate stays as it is while the batch grows. Then it grows with the
# batch: the *linear scaling rule* (Goyal and others, 2017) lets one step of a batch twice as large go as far as two steps.
# With batches of 16 the network is right on about 96 % of the validation images. Guess before you run the next cell.

# %%
whole_set = tp.predict("Batch 1,438, the whole training set, with the linear rule: accuracy after 6 epochs, in %?", ...)


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

# %%
whole_set.shows(
    100 * float(row[1][0].mean()), "{:.0f} %", "Six steps only, and at so high a rate each jumps over what it should follow."
)

# %% [markdown]
# With the same rate, 64 still does as well; then there are too few steps. The linear rule, here without its warm-up, is worse at every larger size:
# it holds only while the path is nearly straight over all steps that one replaces. So neither is the answer by itself:
# how a rate rises and falls, how far each layer may go, and how many samples a step needs are questions of their own.

# %% [markdown]
# ## Learning rates that change: schedules
#
# At the start gradients change with every step: a high rate may throw the weights where they never recover. At the end the
# noise of the batches keeps the weights jumping around a minimum as widely as the rate allows. So the rate rises at first
# (**warm-up**), stays high while there is way to go, and falls, with every *batch*: a large batch leaves few steps.
#
# ### Balise 1 · Schedules · about 10 min
#
# A schedule is a **function of the step** $k = 0, 1, \dots$: it has no state to forget when a run is resumed. `total` is the
# number of steps of the training.
#
# - **`warmup_cosine`**: the rate is $\text{peak}\,(k + 1) / \text{warmup}$ while $k < \text{warmup}$, so that no step has the
#   rate 0; then half a cosine from `peak`, at $k = \text{warmup}$, to `floor`, at $k = \text{total}$, where it stays. 4 lines.
# - **`one_cycle`** returns (rate, momentum): the rate goes up to `peak` and far down, the momentum from `high` to `low`
#   and back: while steps are long, old ones matter less. Given is `w`, which falls from 1 to 0 on the way up and once
#   more on the way down: turn it round where it must rise. 2 lines.
#
# Given are `cyclical`, a triangle; `set_rates`, which brings a rate into an optimizer; and `train`, one step a batch.
#
# <details><summary>Hint</summary>
#
# Half a cosine from $a$ to $b$ is $b + (a - b)\,(1 + \cos \pi t) / 2$, with $t$ from 0 to 1. `min(t, 1.0)` keeps it at the
# end. In `one_cycle`, first make `w` 1 at the peak and 0 at both ends; then both numbers lie between two values, by `w`.
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
    top = share * total - 1  # where the peak is, on the way from step 0 to the last one, total - 1
    up = step <= top
    t = step / top if up else min((step - top) / (total - 1 - top), 1.0)
    w = (1 + math.cos(math.pi * t)) / 2  # from 1 down to 0, in each of the two parts
    far = peak / start if up else peak / start / end  # the rate at the other end of this part
    # BEGIN SOLUTION
    w = 1 - w if up else w  # 1 at the peak
    return far + (peak - far) * w, high + (low - high) * w
    # END SOLUTION


def cyclical(step, half, low, high):
    """Rate of a step: a triangle, up for `half` steps and down for as many."""
    return low + (high - low) * (1 - abs(step / half % 2 - 1))


def set_rates(optimizer, rate):
    """Set the rate, or a tuple (rate, momentum), in all parameter groups."""
    rate, momentum = rate if isinstance(rate, tuple) else (rate, None)
    for group in optimizer.param_groups:  # each may have a factor of its own: a pretrained part trains at a tenth, say
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif momentum is not None:
            group["momentum"] = momentum


def train(model, batches, optimizer, schedule, first=0):
    """One step a batch, each at its own rate. Returns the number of the next step."""
    step = first
    for x, y in batches:
        set_rates(optimizer, schedule(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
    return step


# %%
tp.check(1, warmup_cosine, one_cycle, cyclical, set_rates, train)

# %% [markdown]
# PyTorch has schedulers instead: objects that count their own calls. Its one cycle, beside yours:


# %%
STEPS = 135
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
scheduler, apart = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, STEPS), []
for step in range(STEPS):
    theirs = optimizer.param_groups[0]
    rate, momentum = one_cycle(step, STEPS, 0.4)
    apart.append(max(abs(rate - theirs["lr"]), abs(momentum - theirs["momentum"])))
    optimizer.step()
    scheduler.step()
print(f"OneCycleLR: rate and momentum differ by at most {max(apart):.0e}")

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
# How high may a schedule go? Smith (2017) asks the model itself: train with a rate that rises from far too small to far
# too large. At first nothing happens; then the loss falls; then it varies, and at last it explodes. That costs a
# hundred batches; a grid costs a whole training for each rate.
#
# The finder must leave **nothing** behind. Dropout and shuffling use up random numbers, too: a training that follows should be
# the one that it would have been without. For that you get two functions, again in balise 8:

# %% tags=["setup"]
def random_states():
    """The states of all common random generators, in types that torch.load takes with weights_only=True."""
    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = [kind, keys.tolist(), *rest]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": numpy, "python": random.getstate()}


def set_random_states(states):
    """Put them back."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(states["numpy"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))


# %% [markdown]
# ### Balise 2 · A learning-rate finder · further · about 10 min
#
# **`find_rates`** makes up to `n` steps. You write
#
# 1. a line that keeps the caller's model and optimizer as they were, although the loop trains (1 line);
# 2. the rate of step $k$: from `low` at $k = 0$ to `high` at $k = n - 1$, by the same *factor* each time (1 line);
# 3. `smooth`, that is $s_k$. Losses $\ell_k$ of single batches are noisy, so they go into a running mean, corrected for its
#    start at $a_{-1} = 0$ (2 lines):
#
# $$a_k = \beta\, a_{k-1} + (1 - \beta)\, \ell_k, \qquad s_k = a_k / (1 - \beta^{k+1}) .$$
#
# **`propose`** returns (smallest, largest). At the rate of the lowest smoothed loss the training is near its limit: a
# *quarter* of that rate counts as the largest useful one. The smallest is the first at which a *tenth* of the whole
# fall has happened (2 lines).
#
# <details><summary>Hint</summary>
#
# Train copies. But an optimizer holds its model's parameters: one `copy.deepcopy` of the pair keeps them together, two
# would not.
# </details>


# %% tags=["balise-2"]
def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    """Raise the rate from low to high in n steps. Returns (rates, smoothed losses); leaves everything as it was."""
    states, generator = random_states(), getattr(batches, "generator", None)  # a DataLoader may have its own
    own = generator and generator.get_state()
    # BEGIN SOLUTION
    model, optimizer = copy.deepcopy((model, optimizer))
    # END SOLUTION
    rates, losses, average, iterator = [], [], 0.0, iter(())
    try:
        for k in range(n):
            batch = next(iterator, None)
            if batch is None:  # the epoch is over: another one
                iterator = iter(batches)
                batch = next(iterator)
            # BEGIN SOLUTION
            rate = low * (high / low) ** (k / (n - 1))
            # END SOLUTION
            set_rates(optimizer, rate)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # BEGIN SOLUTION
            average = beta * average + (1 - beta) * loss.item()
            smooth = average / (1 - beta ** (k + 1))
            # END SOLUTION
            if not math.isfinite(smooth) or smooth > 4 * min(losses, default=math.inf):
                break
            rates.append(rate)
            losses.append(smooth)
        return rates, losses
    finally:
        # also if something in it raises
        set_random_states(states)
        if generator is not None:
            generator.set_state(own)


def propose(rates, losses):
    """(smallest, largest) useful rate, from what find_rates returns."""
    lowest = min(losses)
    if lowest == losses[0]:
        raise ValueError("the loss never fell: begin at a lower rate")
    line = losses[0] - 0.1 * (losses[0] - lowest)
    # BEGIN SOLUTION
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
def found_for(make, low, high):
    """Rates and losses of a new network with the optimizer make(parameters), and what is proposed."""
    torch.manual_seed(0)
    model = network()
    rates, losses = find_rates(model, loader_of(32), make(model.parameters()), low, high)
    return rates, losses, *propose(rates, losses)


proposed = {"SGD, momentum 0.9": found_for(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 1e-4, 10),
            "AdamW": found_for(torch.optim.AdamW, 1e-5, 1)}  # fmt: skip
for name, (_, losses, smallest, largest) in proposed.items():
    print(f"{name}: from {smallest:.2g} to {largest:.2g}, in {len(losses)} steps")

# %% jupyter={"source_hidden": true}
figure, both = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
figure.suptitle("How high may the rate go?")
for axes, (name, (rates, losses, smallest, largest)) in zip(both, proposed.items()):
    axes.axvspan(smallest, largest, color="0.85", label="proposed")
    axes.plot(rates, losses)
    axes.set(xscale="log", xlabel="rate", title=f"{name}: from {smallest:.2g} to {largest:.2g}")
both[0].set_ylabel("smoothed loss")
both[0].legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Measured: one cycle against a constant rate
#
# Three epochs, batches of 32. Each of the two is *tuned*: a grid of rates, four seeds each. A method compared at a rate that
# suits the other one always loses. `SideBySide` computes all models in one batched pass; each rate of the grid is the
# `lr_scale` of a parameter group.

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


for name in ("constant", "one cycle"):
    accuracy = by_schedule(name)
    mean, k = accuracy.mean(1), int(accuracy.mean(1).argmax())
    good = [rate for rate, one in zip(TRIED, mean) if one > mean[k] - 0.02]
    edge = " (an edge of the grid)" if k in (0, len(TRIED) - 1) else ""
    print(f"{name:9}: best {mean[k]:.3f}, standard deviation of seeds {accuracy[k].std():.3f}, at {TRIED[k]:g}{edge}")
    print(f"           within 2 points of it from {good[0]:g} to {good[-1]:g}: a factor of {good[-1] / good[0]:.0f}")

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
_, _, smallest, largest = proposed["SGD, momentum 0.9"]
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
# How much better is the best of one row than the best of the other, beside what another seed changes? And how far do the
# good rates reach? A cycle that went too high still ends with small steps, and has time to settle. The finder's grey band
# took less than two epochs, each curve 120.
#
# ## Measured: snapshots of one training, as an ensemble · further
#
# A cosine that begins again and again (Loshchilov and Hutter, 2017) ends each time in some minimum, and the high rate after it
# throws the weights into another. Average what these **snapshots** predict: an ensemble for the price of one training (Huang
# and others, 2017), if it beats one cosine over the same steps.


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


members = cosines(5)
said("last snapshot", members[-1])
said("ensemble of all five", members.mean(0))
said("one cosine, as many steps", cosines(1)[0])

# %% [markdown]
# ## AdamW by hand
#
# SGD has one rate for all weights. Adam gives each weight $\theta$ a step of its own: it divides a moving average $m$ of the
# gradient $g$ by the root of one of its square, $v$. Both begin at 0, and are corrected for it after $t$ steps:
#
# $$m \leftarrow \beta_1 m + (1-\beta_1)\,g,\quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,\qquad
# \hat m = \frac{m}{1-\beta_1^t},\quad \hat v = \frac{v}{1-\beta_2^t},\qquad
# \theta \leftarrow \theta - \alpha\lambda\,\theta - \alpha\,\frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# The term $\alpha\lambda\,\theta$ is the **decoupled** weight decay, the W of AdamW: it stays outside of $m$ and $v$.
#
# ### Balise 3 · AdamW · further · about 9 min
#
# - **`parameter_groups`** returns a list of two dicts `{"params": [...], "weight_decay": ...}`. Matrices and kernels (two
#   dimensions or more) decay. Biases and gains of norms, all vectors and scalars, get 0: pulling them to zero restricts
#   nothing that overfits, and switches channels off. 3 lines.
# - **`AdamW.step`**: $m$, $v$ and their corrections are given. You write the decay, then the step. 2 lines.
#
# A step needs ten operations for each of hundreds of parameters, and on a GPU each takes the CPU some microseconds to start:
# the GPU would wait. `torch._foreach_add_(xs, ys)` adds all pairs of two lists in one call. Use only such ones, as
# PyTorch's own optimizers do.
#
# <details><summary>Hint</summary>
#
# `_foreach_addcdiv_(xs, ys, zs, values)` adds value · y / z to each x. The decay is a multiplication, by a number a little
# below 1: `_foreach_mul_`.
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
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # BEGIN SOLUTION
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
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            # α m̂ / (√v̂ + ε) = m · rates / below with c = √(1 - β₂ᵗ), below = √v + ε c: one pass less over the memory
            roots = [math.sqrt(1 - beta2**step) for step in steps]
            below = torch._foreach_sqrt(squares)
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            rates = [-rate * root / (1 - beta1**step) for root, step in zip(roots, steps)]  # minus: downhill
            # BEGIN SOLUTION
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            torch._foreach_addcdiv_(weights, means, below, rates)
            # END SOLUTION


# %%
tp.check(3, parameter_groups, AdamW)

# %% [markdown]
# **What does "decoupled" change?** Before AdamW, the decay was a part of the gradient, $g + \lambda\theta$ ("L2"), and so was
# divided by $\sqrt{\hat v}$ as well. Here gradients are noise of four sizes: only the decay moves the weights.

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
# With L2, weights with large gradients hardly decay, and those with small ones vanish. Decoupled, all decay alike.

# %% [markdown]
# ## Clip, and accumulate
#
# One bad batch can give a gradient a hundred times as long as usual, and one step along it undoes hours. **Clipping** bounds
# the length of *all* gradients together: where $\lVert g \rVert > c$, all are multiplied by $c / \lVert g \rVert$.
#
# **Accumulation** you know from works 08 and 09. New: texts are of unequal length, padding has the label −100, which does not
# count, and the count is over all ranks. It is to be *the same step*, so
#
# $$\nabla L = \frac{1}{n} \sum_{\text{micro-batches}} \; \sum_{i} \nabla \ell_i, \qquad n = \text{labels that count, in all
# micro-batches of all ranks} .$$
#
# A mean of the micro-batches' means is something else: a token in a short one weighs more. Well-known libraries shipped this
# mistake for years, until 2024: nothing fails, the model is somewhat worse. What `DistributedDataParallel` does to the gradients:


# %% tags=["setup"]
def average_over_ranks(parameters):
    """Replace the gradients (those that are not None) by their mean over all ranks, in one message."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    pieces = (flat / dist.get_world_size()).split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])


# %% [markdown]
# ### Balise 4 · Clip and accumulate · further · about 10 min
#
# - **`clip_gradients`** scales the gradients in place, so that their norm together is at most `max_norm`, and returns the norm
#   from before. No value may go to Python (`if norm > …`, `.item()`), and no gradient gets an operator of its own
#   (`torch._foreach_…` takes them all): a GPU would wait. `clip_grad_norm_` is not for use. 2 lines.
# - **`accumulated_step`** runs on every rank and does one step, as if the micro-batches of all ranks were one batch.
#   Write `count`, the number of labels that count, on all ranks (2 lines): a tensor on the labels' device, for NCCL sends
#   from nowhere else. Then the `loss` of a micro-batch as it enters the mean over all, and its backward (2 lines). But
#   `average_over_ranks` divides once more: by what must the loss be multiplied before the backward? The loss that is
#   returned stays unmultiplied.
#
# <details><summary>Hint</summary>
#
# The norm of the norms is the norm of all: `torch._foreach_norm(gradients)`, `torch.stack`. `torch.clamp(…, max=1.0)` is an
# `if` without a look at the value; add 1e-6 to the norm that you divide by. `F.cross_entropy(logits, labels,
# reduction="sum")` leaves out the labels −100. `dist.all_reduce(count)` adds a tensor up over the ranks.
# </details>


# %% tags=["balise-4"]
@torch.no_grad()
def clip_gradients(parameters, max_norm):
    """Scale the gradients to a common norm of at most max_norm, in place. Returns the norm before, a tensor."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # BEGIN SOLUTION
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    # END SOLUTION
    return norm


def accumulated_step(model, micro_batches, optimizer, max_norm):
    """On a rank: one step on the micro-batches (x, y) of all ranks. Returns (mean loss, norm before clipping)."""
    optimizer.zero_grad()
    # BEGIN SOLUTION
    count = sum((y != -100).sum() for _, y in micro_batches)
    dist.all_reduce(count)
    # END SOLUTION
    total = 0
    for x, y in micro_batches:
        logits = model(x).flatten(0, -2)  # (labels, classes); the labels are y.flatten()
        # BEGIN SOLUTION
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / count
        (loss * dist.get_world_size()).backward()  # the mean over the ranks divides by it
        # END SOLUTION
        total = total + loss.detach()
    dist.all_reduce(total)
    average_over_ranks(model.parameters())
    norm = clip_gradients(model.parameters(), max_norm)
    optimizer.step()
    return total, norm


# %%
tp.check(4, clip_gradients, accumulated_step)

# %% [markdown]
# The same 96 images, cut in three ways, and what the mean of means would have made of them:


# %%
def one_step(sizes):
    """On a rank, with micro-batches of sizes[rank] images: (loss, norm of the gradients)."""
    torch.manual_seed(0)
    model, own = network(), sizes[dist.get_rank()]
    first = sum(sum(sizes[: dist.get_rank()], []))
    parts = [t[first : first + sum(own)].split(own) for t in (X, Y)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [float(one) for one in accumulated_step(model, list(zip(*parts)), optimizer, max_norm=1.0)]


torch.manual_seed(0)
model = network()
for sizes in ([[96]], [[60, 4, 32]], [[60, 4], [31, 1]]):
    loss, norm = launch.ranks(one_step, sizes, n=len(sizes))[0]
    means = [F.cross_entropy(model(x), y) for x, y in zip(*(t[:96].split(sum(sizes, [])) for t in (X, Y)))]
    gradients = torch.autograd.grad(sum(means) / len(means), model.parameters())
    wrong = nn.utils.get_total_norm(gradients)
    print(f"micro-batches of each rank {str(sizes):<20} gradient {norm:.5f} long; by the mean of means {wrong:.5f}")

# %% [markdown]
# ## Trust ratios: LARS and LAMB
#
# With fewer steps each must go further. But one rate for all layers is limited by the layer that bears least: where the
# gradient is large beside the weights, a long step throws the layer far away. LARS and LAMB (You and others, 2017 and 2020)
# give each **layer** a step in proportion to its own weights, by a *trust ratio*:
#
# $$r = c\;\frac{\lVert w \rVert}{\lVert u \rVert + \lambda \lVert w \rVert}, \qquad\text{and 1 where}\quad \lVert w \rVert = 0
# \;\text{ or }\; \lVert u \rVert = 0 .$$
#
# | | update of a layer | |
# |---|---|---|
# | **LARS**: SGD with momentum | $b \leftarrow \mu\, b + r\,(g + \lambda w)$, $\;w \leftarrow w - \alpha\, b$ | $r$ of $u = g$ |
# | **LAMB**: AdamW | $u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w$, $\;w \leftarrow w - \alpha\, r\, u$ | in $r$: $\lambda = 0$, $c = 1$ |
#
# Weights that begin at 0 would stay there for ever without the second part: hence the 1. **Exempt** are vectors (biases, gains
# of norms): no decay, no ratio.
#
# ### Balise 5 · LARS and LAMB · further · about 9 min
#
# - **`trust_ratios`**: two lists of tensors → $r$ of each pair, `(n,)`. The norms are given. No `if norm > 0`: on a GPU the CPU
#   would wait for each. 2 lines.
# - **`LARS.step`**, **`LAMB.step`**: `updates` is the plain step of each weight, decay included; `layers` has the places of
#   the matrices. Multiply *their* updates by their ratios, in one `torch._foreach_…` and no loop, as in balise 3: 2 lines and
#   1. Mind which $u$ the ratio is of.
#
# <details><summary>Hint</summary>
#
# `torch.where(condition, ratios, 1.0)` chooses. `_foreach_mul_(some_updates, list(ratios))` multiplies each by its number, in
# place: a new list of the same tensors will do.
# </details>


# %% tags=["balise-5"]
def trust_ratios(weights, updates, decay=0.0, coefficient=1.0):
    """One ratio for each pair of weights and updates: tensor (n,)."""
    of_weights = torch.stack(torch._foreach_norm(weights))
    of_updates = torch.stack(torch._foreach_norm(updates))
    # BEGIN SOLUTION
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
            decay, layers = group["weight_decay"], [k for k, weight in enumerate(weights) if weight.ndim > 1]
            updates = torch._foreach_mul(weights, [decay * (weight.ndim > 1) for weight in weights])
            torch._foreach_add_(updates, gradients)
            if layers:
                pairs = [weights[k] for k in layers], [gradients[k] for k in layers]
                # BEGIN SOLUTION
                ratios = trust_ratios(*pairs, decay, group["coefficient"])
                torch._foreach_mul_([updates[k] for k in layers], list(ratios))
                # END SOLUTION
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_add_(weights, buffers, alpha=-group["lr"])


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
            beta1, beta2 = group["betas"]  # what follows is your AdamW, up to the updates
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
                # BEGIN SOLUTION
                torch._foreach_mul_(adapted, list(trust_ratios([weights[k] for k in layers], adapted)))
                # END SOLUTION
            torch._foreach_add_(weights, updates, alpha=-group["lr"])


# %%
tp.check(5, trust_ratios, LARS, LAMB)

# %% [markdown]
# **Beside PyTorch's and timm's own**, on the same weights and gradients: how far apart after five steps, and a race. (timm
# clips the gradients inside LAMB unless told not to, and exempts what has no decay.)


# %%
def compared(name, mine, theirs, repeats=20):
    """Five equal steps of two optimizers (model → optimizer), then a race of their steps."""
    torch.manual_seed(0)
    models = [network()]
    models.append(copy.deepcopy(models[0]))
    one, other = mine(models[0]), theirs(models[1])
    for _ in range(5):
        for w, v in zip(*(model.parameters() for model in models)):
            w.grad = torch.randn_like(w)
            v.grad = w.grad.clone()
        one.step()
        other.step()
    apart = max(float((w - v).detach().abs().max()) for w, v in zip(*(model.parameters() for model in models)))
    race = measure.race({"yours": one.step, "theirs": other.step}, repeats, device="cpu")
    times = ", ".join(f"{which} {1e3 * seconds:.3f} ms" for which, seconds in race.medians.items())
    print(f"{name:6} apart by {apart:.0e} after 5 steps; a step: {times}, ratio {race.ratio:.2f}")


# %%
from timm.optim import Lamb, Lars

compared("AdamW", lambda model: AdamW(parameter_groups(model, 0.1)),
         lambda model: torch.optim.AdamW(parameter_groups(model, 0.1), foreach=True))  # fmt: skip
compared("LARS", lambda model: LARS(model.parameters(), lr=0.01, weight_decay=0.1),
         lambda model: Lars(parameter_groups(model, 0.1), lr=0.01, momentum=0.9, foreach=True))  # fmt: skip
compared("LAMB", lambda model: LAMB(model.parameters(), lr=0.01, weight_decay=0.1),
         lambda model: Lamb(parameter_groups(model, 0.1), lr=0.01, max_grad_norm=None, foreach=True))  # fmt: skip

# %% [markdown]
# ## Orthogonal steps: Muon
#
# A gradient of a matrix is mostly a few directions: a handful of singular values is much larger than all others, and a step
# along it moves these few. Muon (Jordan, 2024) makes all directions equally long: of $M = U \Sigma V^\top$ it keeps $U V^\top$.
# An SVD would be far too slow. Five rounds of a *Newton-Schulz iteration*, matrix products only, come near enough for all but
# the smallest singular values:
#
# $$X_0 = \frac{M}{\lVert M \rVert_F}, \qquad A = X X^\top,\qquad X \leftarrow a X + (b A + c A^2) X .$$
#
# Each round maps every singular value $s$ to $a s + b s^3 + c s^5$ and leaves the directions alone.
#
# ### Balise 6 · Muon · further · about 7 min
#
# - **`orthogonalise`**: matrices `(n, rows, columns)` → the same shape, each on its own. The first division is given; write a
#   round (2 lines).
# - **`Muon.step`** makes the momentum of each matrix orthogonal, `updates`. Write the step: times $-\alpha \cdot 0.2
#   \sqrt{\max(\text{rows}, \text{columns})}$, which makes it as large as AdamW's steps usually are (Liu and others,
#   2025; can you see why?), in one `torch._foreach_…` and no loop, as in balise 3. So one rate serves both: biases,
#   norms and the last layer stay with AdamW. 1 line.
#
# <details><summary>Hint</summary>
#
# `x.mT` transposes the last two dimensions. `torch.baddbmm(z, x, y, beta=b, alpha=c)` is b · z + c · x @ y in one call.
# `torch._foreach_add_(xs, ys, alpha=…)` adds alpha · y. Why 0.2 √max: the squares of the entries of $UV^\top$ add up to
# min(rows, columns).
# </details>


# %% tags=["balise-6"]
def orthogonalise(matrices, steps=5):
    """Make all singular values of each matrix about 1: (n, rows, columns) → the same."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # so that A is the small square: it is where the time goes
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        # BEGIN SOLUTION
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
        # END SOLUTION
    return x.mT if tall else x


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
            # the momentum, B ← μ B + (1 - μ) g, and (1 - μ) g + μ B, which is one step ahead (Nesterov)
            torch._foreach_lerp_(means, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, means, momentum)
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            shapes = {}  # all matrices of one shape are orthogonalised in one call
            for k, weight in enumerate(weights):
                shapes.setdefault(weight.shape, []).append(k)
            for shape, places in shapes.items():
                stacked = torch.stack([ahead[k] for k in places]).to(group["dtype"])
                updates = orthogonalise(stacked).to(weights[places[0]].dtype).unbind()
                # BEGIN SOLUTION
                torch._foreach_add_([weights[k] for k in places], updates, alpha=-0.2 * max(shape) ** 0.5 * rate)
                # END SOLUTION


# %%
tp.check(6, orthogonalise, Muon)

# %% [markdown]
# What does it do to a gradient of this work's network? And beside `torch.optim.Muon`, which takes one matrix after the other,
# always in bfloat16: slow on processors without such instructions, right on a GPU. The race is yours in float32.

# %%
torch.manual_seed(0)
model = network()
F.cross_entropy(model(X), Y).backward()
gradient = model[4].weight.grad  # (128, 128)
values = {"gradient": torch.linalg.svdvals(gradient),
          "orthogonalised": torch.linalg.svdvals(orthogonalise(gradient[None])[0])}  # fmt: skip
for name, one in values.items():
    share = float((one > 0.1 * one[0]).float().mean())
    print(f"{name}: {share:.0%} of the singular values are above a tenth of the largest")


def matrices(model):
    return [weight for weight in model.parameters() if weight.ndim > 1]


options = {"lr": 0.01, "weight_decay": 0.1}
compared("Muon", lambda model: Muon(matrices(model), **options),
         lambda model: torch.optim.Muon(matrices(model), adjust_lr_fn="match_rms_adamw", **options))  # fmt: skip

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
# 45 ranks with 32 images each would take all 1,438 at once: the whole training set in one step. In five epochs the
# weights are then changed 5 times instead of 225. Each optimizer gets a grid of rates for each batch size, three seeds,
# and your cosine schedule. LARS and LAMB were made for large batches. Guess before you run the next cells.

# %%
contestants = ("SGD", "LARS", "LAMB", "AdamW", "Muon")
loses_least = tp.predict("Who loses least when the batch grows from 32 to 1,438?", ..., choices=contestants)


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
            for (rate, _), several in zip(pairs, optimizers):
                for optimizer in several:
                    set_rates(optimizer, warmup_cosine(step, steps, 0, rate))
                    optimizer.step()
            step += 1
    return runs.accuracy(VAL_X, VAL_Y).reshape(len(rates), len(seeds))


# %%
def best_of(make, rates, batch):
    """(accuracies of the seeds at the rate with the best mean, that rate, a remark if it lies at the edge of the grid)."""
    reached = reached_by(make, rates, batch)
    k = int(reached.mean(1).argmax())
    return reached[k], rates[k], ", at the edge of its grid" if k in (0, len(rates) - 1) else ""


found = {name: [best_of(make, rates, batch) for rates, batch in zip(grids, (32, 1438))]
         for name, (make, *grids) in CONTESTANTS.items()}  # fmt: skip
for name, pair in found.items():
    for batch, (reached, rate, remark) in zip(("32", "1,438"), pair):
        words = f"{reached.mean():.3f} ({reached.min():.3f} to {reached.max():.3f})"
        print(f"{name:6} batch {batch:>5}: accuracy {words}, rate {rate:g}{remark}")
loses = {name: float(small[0].mean() - large[0].mean()) for name, (small, large) in found.items()}
loses_least.shows(min(loses, key=loses.get), why="With five steps, what counts is how far one gets in every direction.")

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
# With a small batch, tuned, four are nearly level, Muon a point ahead: there is no lack of steps. A trust ratio helps where layers differ much, in
# dozens of layers and thousands of steps; here there are three layers and five steps. Well-tuned baselines raised doubts
# for large networks, too (Nado and others, 2021). Muon lengthens the small directions within a matrix, which five steps of the
# others hardly move.
# </details>

# %% [markdown]
# ## How large is too large? The gradient noise scale
#
# For the squared length of a gradient of $B$ samples, "The idea" gives
#
# $$\mathbb{E}\,\lVert g_B \rVert^2 = \lVert G \rVert^2 + \frac{\operatorname{tr} \Sigma}{B}, \qquad
# B_\text{noise} = \frac{\operatorname{tr} \Sigma}{\lVert G \rVert^2} .$$
#
# With batches of $B_\text{noise}$ samples, noise and gradient are equally long. McCandlish and others (2018) make of it, for tuned rates,
#
# $$\text{steps}(B) = S_\text{min} \Big(1 + \frac{B_\text{noise}}{B}\Big), \qquad
# \text{efficiency}(B) = \frac{\text{fewest samples}}{\text{samples}} = \frac{1}{1 + B / B_\text{noise}} .$$
#
# ### Balise 7 · The gradient noise scale · about 9 min
#
# Data parallelism measures it for free: each of $N$ ranks has a gradient of $b$ samples before the all-reduce, and one of
# $N b$ after it. Two batch sizes, two equations, two unknowns.
#
# - **`gradient_noise`** runs on every rank, after the backward. You have the squared lengths: `small`, of one rank's gradient
#   (the mean over the ranks), and `big`, of the gradient of all. Solve for this step's estimates of $\lVert G \rVert^2$ and
#   $\operatorname{tr} \Sigma$. 2 lines.
# - **`noise_scale`** makes one number of many steps' estimates. $\lVert G \rVert^2$ is a small difference of large numbers and
#   may be negative: a mean of quotients would be ruled by the few whose denominator is near zero. So average numerator and
#   denominator **apart**, then divide. Where $\lVert G \rVert^2$ is not above zero even so: `math.inf`. 3 lines.
# - **`ranks_that_pay`**: the largest number of ranks with `batch` samples each at which the efficiency is at least `share`;
#   at least 1, for a finite `noise`. 1 line.
#
# <details><summary>Hint</summary>
#
# The difference of the two equations has no $\lVert G \rVert^2$ in it. Efficiency $\ge$ share: solve for $B$, which is ranks
# times batch, and round down.
# </details>


# %% tags=["balise-7"]
@torch.no_grad()
def gradient_noise(parameters, batch):
    """On a rank: average the gradients; (|G|², tr Σ) as this step estimates them, tensors, the same on all ranks."""
    n = dist.get_world_size()
    if n == 1:
        raise ValueError("one rank has gradients of one batch size: two are needed")
    parameters = [p for p in parameters if p.grad is not None]
    small = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()
    dist.all_reduce(small)
    small /= n
    average_over_ranks(parameters)
    big = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()
    # BEGIN SOLUTION
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
# Does it hold? Plain SGD trains until the validation loss is 0.25 for the first time: for each batch size four rates side by
# side, three seeds each. What counts is the rate whose middle seed arrives first. Guess before you run the next cells.

# %%
fewer = tp.predict("A batch of 256 sees 64 times as many samples a step as one of 4. How many times fewer steps?", ...)

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
why = "A larger batch makes each step surer, not longer: how far a step may go is set by the curvature."
fewer.shows(bend[4][1] / bend[256][1], "{:.1f}", why)

# %% [markdown]
# Now the prediction, from one training of four ranks with 8 samples each. Beside it, the line that fits the measured steps
# best, $S_\text{min} (1 + B_c / B)$.


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
half = len(estimates) // 2
print(f"noise scale of the training: {noise:.0f} samples (first half {noise_scale(estimates[:half]):.0f}, "
      f"second half {noise_scale(estimates[half:]):.0f})")  # fmt: skip
print(f"bend of the measured steps: {critical:.0f} samples, with never fewer than {fewest:.0f} steps; "
      f"the noise scale says {noise / critical:.1f} times as many")  # fmt: skip
print(f"ranks of 8 samples that pay, by the noise scale: {ranks_that_pay(noise, 8, 0.5)} at an efficiency of 0.5, "
      f"{ranks_that_pay(noise, 8, 0.2)} at 0.2")  # fmt: skip
draw_bend(estimates, fewest, critical, noise)

# %% [markdown]
# Far left of the bend, twice the ranks nearly halve the time for nearly the same samples. Far right of it they double the bill and save
# nothing, whatever the network between them. Noise scale and bend are of the same order of magnitude, not equal: the formula
# leaves out the curvature. And as the loss falls the gradient gets shorter and the noise stays, so the noise scale rises.

# %% [markdown]
# ## Flat or sharp? Measure it · further
#
# The lecture's picture: large batches end in steep, narrow minima, and these generalise worse (Keskar and others,
# 2017). The largest eigenvalue of the Hessian, the curvature in the steepest direction, tells how sharp a minimum is:
# *power iteration* finds it, and a Hessian times a vector costs about two backward passes. Here it is the
# Hessian of the loss over the whole training set. Networks train at three rates, with batches of 32 and of all 1,438 samples, from three seeds.
# Each training stops when its loss is 0.2.


# %%
SHAPE = network().to("meta")  # what a network computes; the weights come from elsewhere


def loss_of(weights, model=SHAPE, samples=None):
    """Mean cross-entropy on the first `samples` training samples (None: all), with these weights {name: tensor}."""
    return F.cross_entropy(torch.func.functional_call(model, weights, (X[:samples],)), Y[:samples])


def sharpness(weights, iterations=8):
    """Largest eigenvalue of each model's Hessian, (models,). weights: {name: (models, ...)}"""

    def product(at, along):
        return torch.func.jvp(torch.func.grad(loss_of), (at,), (along,))[1]

    torch.manual_seed(0)
    along = {name: torch.randn_like(w) for name, w in weights.items()}
    for _ in range(iterations):
        length = sum(v.flatten(1).square().sum(1) for v in along.values()).sqrt()
        unit = {name: v / length.view(-1, *[1] * (v.dim() - 1)) for name, v in along.items()}
        along = torch.func.vmap(product)(weights, unit)
    return sum((unit[name] * along[name]).flatten(1).sum(1) for name in unit)


# %%
def trained_to(loss, batch, rates, every):
    """(weights, accuracy) of all models, rates × 3 seeds side by side; a model that has arrived stands still."""
    runs = SideBySide(network, [seed for _ in rates for seed in range(SEEDS)])
    left = torch.tensor(rates).repeat_interleave(SEEDS)
    generator, every_model = torch.Generator().manual_seed(batch), X.expand(len(left), *X.shape)
    for step in range(1, 2000):
        rows = torch.stack([torch.randperm(len(X), generator=generator)[:batch] for _ in left])
        runs.backward(X[rows], Y[rows])
        if step % every == 0:
            with torch.no_grad():
                logits = runs(every_model).transpose(1, -1)
                losses = F.cross_entropy(logits, Y.expand(len(left), -1), reduction="none").mean(1)
            left[losses <= loss] = 0.0
        if not left.any():
            break
        runs.descend(left)
    weights = {name: w.detach() for name, w in torch.func.stack_module_state(runs.models)[0].items()}
    return weights, runs.accuracy(VAL_X, VAL_Y)


# %%
MINIMA_RATES, minima = (0.1, 0.3, 0.8), {}
print("batch  rate   sharpness (3 seeds)    2 / rate   validation accuracy (spread of seeds)")
for batch, every in ((32, 10), (len(X), 2)):
    weights, accuracies = trained_to(0.2, batch, MINIMA_RATES, every)
    minima[batch] = torch.stack([sharpness(weights), accuracies]).view(2, len(MINIMA_RATES), SEEDS)
    for rate, sharp, accuracy in zip(MINIMA_RATES, *minima[batch]):
        found = ", ".join(f"{value:4.1f}" for value in sharp.sort().values)
        print(f"{batch:5}  {rate:<5g}  {found:21}  {2 / rate:8.1f}   {accuracy.mean():.3f} ({accuracy.std():.3f})")
order = torch.stack([torch.cat([m[k].flatten() for m in minima.values()]) for k in (0, 1)]).argsort(1).argsort(1)
agree = torch.corrcoef(order.double())[0, 1]
print(f"the orders by sharpness and by accuracy agree by {agree:+.2f} (-1: the flatter, the better)")

# %% jupyter={"source_hidden": true}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for batch, values in minima.items():
    rates = torch.tensor(MINIMA_RATES).repeat_interleave(SEEDS) * (1.03 if batch == len(X) else 0.97)
    left.plot(rates, values[0].flatten(), "o", alpha=0.7, label=f"batch {batch:,}")
    right.plot(values[0].flatten(), values[1].flatten(), "o", alpha=0.7, label=f"batch {batch:,}")
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
# Within one batch size, from line to line, the **rate** changes. A step of rate $\eta$ cannot settle where the
# curvature is above $2/\eta$: it jumps across, farther each time, until it finds a flatter place. Trained long with the
# whole set, networks end about this line (Cohen and others, 2021). Here each run is stopped at a loss of 0.2, on its
# way: at the lowest rate the curvature has come near the line, at the higher ones it stands above it, some runs far
# above. Across the batches, at the same rate, the **noise** shakes a small batch out of narrow places in which a large
# one can stay. So far the lecture's picture holds. But is flat *better*? Read the last column and the last line. With
# tuned rates and as many steps, others found much of the gap between small and large batches gone (Hoffer and others,
# 2017; Shallue and others, 2019).
#
# ## See it: the surface with and without skip connections · further
#
# A network of 20 layers, trained twice: plain, and with each layer added to its input. The loss over a plane through what was
# found, spanned by two random directions with rows as long as the weights' rows (*filter normalisation*), shows why residual
# networks train so well (Li and others, 2018).


# %% jupyter={"source_hidden": true}
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


def direction(weights, seed):
    """A random direction: each row as long as the weights' row; zero for biases."""
    torch.manual_seed(seed)
    return {name: w.norm(dim=-1, keepdim=True) * F.normalize(torch.randn_like(w), dim=-1) if w.dim() > 1 else 0 * w
            for name, w in weights.items()}  # fmt: skip


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
        return loss_of({name: w + a * one[name] + b * other[name] for name, w in weights.items()}, model, 256)

    far = torch.linspace(-reach, reach, points)
    with torch.no_grad():
        losses = torch.func.vmap(at, chunk_size=125)(far.repeat_interleave(points), far.repeat(points))
    return losses[len(losses) // 2].item(), losses.view(points, points)


planes = {name: plane(skip) for name, skip in (("plain", False), ("with skip connections", True))}
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
# Such a slice shows how forgiving a place is, not whether there are other minima.

# %% [markdown]
# ## Stop early, and resume exactly
#
# A job on a cluster ends when its hours are over, not when its epoch is. Whoever goes on from the weights alone goes on with
# another training: the momentum is empty, the schedule begins again, the first half of the epoch is read twice. A resumed run
# should be **bitwise** the run that was never stopped. Then a difference between two runs is one between two methods.
#
# ### Balise 8 · Stop early, resume exactly · further · about 10 min
#
# - **`EarlyStopping.update`** takes in the validation value of an epoch. Where it is the best so far, keep the model's
#   `state_dict()` in `self.weights`, so that later steps do not change it. 1 line.
# - **`Batches.__iter__`**, a generator, hands out the rest of the epoch. Whoever saves in the middle of the loop, after the step,
#   must save the number of the *next* batch. Where does the count `self.done` belong? 2 lines.
# - **`save_checkpoint`** saves `{"parts": …, "random": …}`, with all random states. A job may be killed while it writes. So
#   write to another file of the same folder, and let it take the old one's place when it is whole. 2 lines.
#
# <details><summary>Hint</summary>
#
# `state_dict()` holds the model's own tensors, not copies: `copy.deepcopy`. In a generator, what stands behind `yield` runs
# only when the next batch is asked for. `Path.replace` takes another file's place at once.
# </details>


# %% tags=["balise-8"]
class EarlyStopping:
    """Says when to stop, and keeps the best weights."""

    def __init__(self, patience, maximize=False):
        self.patience, self.maximize = patience, maximize
        self.best, self.weights, self.waited = None, None, 0

    def update(self, value, model):
        """Take in a value; True: stop."""
        if self.best is None:
            better = not math.isnan(value)
        else:
            better = value > self.best if self.maximize else value < self.best
        self.waited += 1
        if better:
            self.best, self.waited = float(value), 0
            # BEGIN SOLUTION
            self.weights = copy.deepcopy(model.state_dict())
            # END SOLUTION
        return self.waited >= self.patience

    def restore(self, model):
        """Put the best weights back."""
        if self.weights is not None:
            model.load_state_dict(self.weights)

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
        """The rest of this epoch; at its end the next one is ready."""
        for rows in self.order().split(self.size)[self.done :]:
            # BEGIN SOLUTION
            self.done += 1
            yield self.x[rows], self.y[rows]
            # END SOLUTION
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


def save_checkpoint(path, **parts):
    """Save the state of every part and all random states: the old file, or the new one, never half of one."""
    states = {name: part.state_dict() for name, part in parts.items()}
    # BEGIN SOLUTION
    torch.save({"parts": states, "random": random_states()}, f"{path}.new")
    Path(f"{path}.new").replace(path)
    # END SOLUTION


def load_checkpoint(path, **parts):
    """Put every part, and all random states, into the state that was saved."""
    saved = torch.load(path, map_location="cpu", weights_only=True)  # else reading a file may run somebody's code
    # the random states last: what else is loaded might draw
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    set_random_states(saved["random"])


# %%
tp.check(8, EarlyStopping, Batches, save_checkpoint, load_checkpoint)

# %% [markdown]
# What does it cost to leave something out? A training with dropout is stopped after 70 of 135 steps, in the middle of an
# epoch, and goes on in new objects, as a new process would.


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
whole, stopped = go_on(135, **made(0)), made(0)
go_on(70, **stopped)
file = Path(tempfile.mkdtemp()) / "last.pt"
save_checkpoint(file, **stopped)
for without in ("nothing", "random states", "optimizer", "batches"):
    parts, before = made(1), random_states()
    load_checkpoint(file, **{name: part for name, part in parts.items() if name != without})
    if without == "random states":
        set_random_states(before)
    end = go_on(135, **parts)
    off = "bitwise the same" if torch.equal(end, whole) else f"{(end - whole).norm() / whole.norm():.1%} away"
    print(f"resumed without {without + ':':15} all weights together end {off}")

# %% [markdown]
# One part less is another training, and nothing says so: no error, no warning.

# %% [markdown]
# ## Past this machine · further
#
# For language models Kaplan and others (2020) fitted the batch size of the bend to the loss $L$ (in nats a token):
# $B_\text{crit} \approx 2 \cdot 10^8 \text{ tokens} \cdot L^{-1/0.21}$. With the planner's time of a step: **how much sooner
# is a training ready with more GPUs, and for how many more GPU hours?**

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
# A benchmark of throughput sees the second efficiency alone. More tokens on each GPU would hide the messages, and make the
# batch larger (try it: `TOKENS`). This is why beyond some hundreds of GPUs one cuts the *model*, not only the batch.

# %% [markdown]
# ## Questions
#
# **1.** From 8 to 64 GPUs, same batch on each, same number of epochs: the training is seven times faster, the accuracy two
# points lower. What do you try, in which order?
#
# <details><summary>Answer</summary>
#
# First the schedule: a higher rate, found again, with a warm-up (eight times is an upper end). Then the noise scale: if
# the new batch is far beyond it, fewer GPUs or a longer training are the honest answer. In between, another optimizer, at its own
# tuned rate.
# </details>
#
# **2.** A library accumulates over 8 micro-batches of sentences and divides the sum of the 8 mean losses by 8. When is this
# right?
#
# <details><summary>Answer</summary>
#
# Only when all have the same number of tokens that count. The same mistake is made once more when the ranks' means are
# averaged. Add sums up, and divide once.
# </details>
#
# **3.** The noise scale grows during training, often tenfold. What follows for a machine booked for the whole training?
#
# <details><summary>Answer</summary>
#
# The batch may grow with the training, as that of GPT-3 did. On a fixed machine one starts with fewer ranks, or uses the
# others for another seed.
# </details>

# %% [markdown]
# ## To remember
#
# **A larger batch buys precision, not steps.** Up to the gradient noise scale that is a good bargain; beyond it more ranks save
# less and less, a factor of two at most. A batch size needs a rate found *for it*: warmed up, high while there is way to go, brought down at the end.
# Compare optimizers each at its own tuned rate, with several seeds. Divide by what was counted, once. And save whatever the
# next step depends on: then a stop costs nothing.

# %%
tp.progress()
