# %% [markdown] tags=["slide"]
# # Learning rates, optimizers and large batches · about 130 min, core 60
#
# A hundred ranks have a hundred times the batch of one rank. You hope for far fewer steps. Do you get them?
#
# **What you will gain.** At the baseline's learning rate, the network needs about as many steps to the same loss with
# 1,438 images a step as with 256. With your schedule, AdamW needs **three times fewer**, and Muon five times fewer. The
# *gradient noise scale* predicts how large a batch still pays off.

# %% tags=["setup"] jupyter={"source_hidden": true}
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

from dlojz_tp import course, data, launch, measure, planner, report, todo
from dlojz_tp.training.side_by_side import SideBySide

warnings.filterwarnings("ignore", message="IProgress not found|`torch.jit")  # from libraries that we only import
tp = course.open("10_learning_rate_and_large_batch")
tp

# %% tags=["setup"]
torch.set_num_threads(1)  # all matrices of this work are small: a second thread waits more than it works
digits = data.digits()
X, Y, VAL_X, VAL_Y = digits.train_x, digits.train_y, digits.val_x, digits.val_y  # 1,438 and 359 images (1, 8, 8)


def network(width=128):
    """Two hidden layers: 64 → width → width → 10."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()),
        nn.Linear(width, 10),
    )


# %% [markdown] tags=["slide"]
# ## The idea
#
# On average, the gradient $g_B$ of a batch of $B$ samples equals the gradient $G$ of all data, around which it
# scatters. With $\Sigma$, the covariance of a single sample's gradient,
#
# $$\mathbb{E}\,[g_B] = G, \qquad \mathbb{E}\,\lVert g_B - G \rVert^2 = \frac{\operatorname{tr} \Sigma}{B} .$$
#
# Each point below is one batch's gradient; the arrow is $G$. Once all points sit at its tip, more samples add nothing.


# %% tags=["slide"] jupyter={"source_hidden": true}
def batch_gradients(size, count=60):
    """Gradients (count, parameters) of `count` random batches, all for the same network."""
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
# ## The baseline: one rate, larger batches
#
# We train with SGD and momentum until the validation loss is 0.25, and count steps (the median of three seeds). The
# learning rate (*rate* for short) stays the same, or grows with the batch by the *linear scaling rule* (Goyal and
# others, 2017).

# %%
fewer = tp.predict("With 1,438 images a step instead of 64, at the same rate: how many times fewer steps?", ...)

# %%
TARGET, SEEDS = 0.25, 3


def steps_to_target(make, rates, batch, schedule=None, most=200):
    """Train until the validation loss is TARGET. Returns (best rate, sorted steps of its seeds; inf: more than `most`).

    make(model, rate): a list of optimizers. schedule(step, peak): the rate of a step; without it, the rate is constant.
    """
    tried = [(rate, seed) for rate in rates for seed in range(SEEDS)]
    runs = SideBySide(network, [seed for _, seed in tried])  # all models in one batched pass
    optimizers = [(optimizer, rate) for model, (rate, _) in zip(runs.models, tried) for optimizer in make(model, rate)]
    generator, arrived = torch.Generator().manual_seed(batch), torch.full((len(tried),), math.inf)
    for step in range(most):
        drawn = torch.stack([torch.randperm(len(X), generator=generator)[:batch] for _ in tried])
        runs.backward(X[drawn], Y[drawn])
        for optimizer, peak in optimizers:
            if schedule:
                set_rates(optimizer, schedule(step, peak))
            optimizer.step()
        arrived[(validation_losses(runs) <= TARGET) & arrived.isinf()] = step + 1
        of_each_rate = arrived.view(-1, SEEDS).sort().values
        best = int(of_each_rate[:, SEEDS // 2].argmin())
        if of_each_rate[best].isfinite().all():
            break
    return rates[best], of_each_rate[best].tolist()


# %% jupyter={"source_hidden": true}
@torch.no_grad()
def validation_losses(runs):
    """Mean cross-entropy of each model on the validation images, (models,)."""
    logits = runs(VAL_X.expand(len(runs.models), *VAL_X.shape)).transpose(1, -1)
    return F.cross_entropy(logits, VAL_Y.expand(len(runs.models), -1), reduction="none").mean(1)


def steps_said(steps):
    return "never" if math.isinf(steps) else f"{steps:.0f}"


# %%
def sgd(model, rate):
    return [torch.optim.SGD(model.parameters(), rate, momentum=0.9)]


baseline = {}
for batch in (16, 64, 256, len(X)):
    (_, same), (_, linear) = (steps_to_target(sgd, [rate], batch) for rate in (0.02, 0.02 * batch / 16))
    baseline[batch] = same[1], linear[1], batch * same[1]
report.table(
    {
        "batch": "{:,}",
        "steps, same rate": steps_said,
        "steps, linear rule": steps_said,
        "images read, same rate": "{:,.0f}",
    },
    [(batch, *row) for batch, row in baseline.items()],
)
fewer.shows(
    baseline[64][0] / baseline[len(X)][0],
    "{:.1f}",
    "The rate limits how far a step goes, however exact its direction is.",
)

# %% [markdown]
# At the same rate, larger batches soon stop saving steps. With the linear rule the largest batch fails: the rule
# assumes that the path is nearly straight over the steps it replaces.
#
# ## Learning rates that change: schedules
#
# Early gradients change with every step, and a high rate can do lasting damage. At the end, batch noise keeps the
# weights jumping as widely as the rate allows. So the rate rises first (**warm-up**), then falls.
#
# ### Balise 1 · Schedules · about 14 min
#
# A schedule is a **function of the step** $k = 0, 1, \dots$, so a resumed run has no state to lose.
#
# - **`warmup_cosine`** returns $\text{peak}\,(k + 1) / \text{warmup}$ while $k < \text{warmup}$. Then it follows half
#   a cosine, from `peak` at $k = \text{warmup}$ to `floor` at $k = \text{total}$, and stays there. 4 lines.
# - **`one_cycle`** returns (rate, momentum). While the rate goes up to `peak` and down, the momentum does the
#   opposite, from `high` to `low` and back. The given `w` falls from 1 to 0 on the way up, and again on the way down.
#   2 lines.
#
# <details><summary>Hint</summary>
#
# Half a cosine from $a$ to $b$ is $b + (a - b)\,(1 + \cos \pi t) / 2$, with $t$ from 0 to 1; `min(t, 1.0)` keeps it at
# the end. In `one_cycle`, first make `w` 1 at the peak and 0 at both ends.
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
    """(rate, momentum) of a step: the rate rises in the first `share` of steps, then falls; momentum the reverse."""
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
    for group in optimizer.param_groups:  # each may have its own factor: a pretrained part may train at a tenth
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif momentum is not None:
            group["momentum"] = momentum


def train(model, batches, optimizer, schedule, first=0):
    """Take one step per batch, each at its own rate. Returns the number of the next step."""
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

# %% jupyter={"source_hidden": true}
STEPS = 135
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
scheduler, apart = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, STEPS), []
for step in range(STEPS):
    theirs = optimizer.param_groups[0]
    rate, momentum = one_cycle(step, STEPS, 0.4)
    apart.append(max(abs(rate - theirs["lr"]), abs(momentum - theirs["momentum"])))
    optimizer.step()
    scheduler.step()
print(f"torch.optim's OneCycleLR: rate and momentum differ from yours by at most {max(apart):.0e}")
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.plot([warmup_cosine(k, STEPS, 20, 0.4) for k in range(STEPS)], label="warm-up and cosine")
left.plot([one_cycle(k, STEPS, 0.4)[0] for k in range(STEPS)], label="one cycle")
left.plot([cyclical(k, 30, 0.01, 0.4) for k in range(STEPS)], label="cyclical")
right.plot([one_cycle(k, STEPS, 0.4)[1] for k in range(STEPS)], color="C1")
left.set(xlabel="step", ylabel="rate", title="Three schedules of three epochs, batch 32", ylim=(-0.02, 0.5))
right.set(xlabel="step", ylabel="momentum", title="One cycle: the momentum does the opposite")
left.legend(fontsize=8, ncols=3)
plt.show()

# %% [markdown]
# What does a schedule gain? Below: three epochs, batches of 32, ten rates (or peaks), four seeds.


# %% tags=["setup"] jupyter={"source_hidden": true}
def rows_of(n_seeds, epochs, size=32):
    """For each step, the images that every seed trains on, int64 (seeds, size): a new order for each seed and epoch."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        orders = torch.stack([torch.randperm(len(X), generator=generator) for _ in range(n_seeds)])
        yield from orders.split(size, 1)[: len(X) // size]


TRIED = [0.00125 * 2**k for k in range(10)]  # rates, or peaks


# %% jupyter={"source_hidden": true}
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


# %%
rows = []
for name in ("constant", "one cycle"):
    accuracy = by_schedule(name)
    mean = accuracy.mean(1).tolist()
    best = max(mean)
    good = [rate for rate, one in zip(TRIED, mean) if one > best - 0.02]
    rows.append((name, best, float(accuracy[mean.index(best)].std()), good[0], good[-1]))
report.table(
    {"schedule": "{}", "best accuracy": "{:.3f}", "spread of seeds": "{:.3f}", "good rates from": "{:g}", "to": "{:g}"},
    rows,
)

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")

for name in ("constant", "one cycle"):
    accuracy = by_schedule(name)
    low, high = accuracy.amin(1), accuracy.amax(1)
    axes.plot(TRIED, accuracy.mean(1), "o-", label=f"{name}: mean, lowest and highest of four seeds")
    axes.fill_between(TRIED, low, high, alpha=0.2)
axes.set(xscale="log", xlabel="rate, or peak of the cycle", ylabel="validation accuracy", ylim=(0.7, 1))
axes.set_title("What does one cycle gain in three epochs?")
axes.legend(fontsize=8, loc="lower left")
plt.show()

# %% [markdown]
# Good rates are those within two points of the best. A cycle that went too high still ends with small steps.
#
# ## Which rate? A finder
#
# Smith (2017) trains with a rate that rises from far too small to far too large: the loss falls, then explodes. That
# costs a hundred batches, not a run per rate.
#
# ### Balise 2 · A learning-rate finder · further · about 14 min
#
# **`find_rates`** makes up to `n` steps and leaves everything as it was. You write
#
# 1. the line that keeps the caller's model and optimizer unchanged;
# 2. the rate of step $k$: from `low` at $k = 0$ to `high` at $k = n - 1$, by the same *factor* each time;
# 3. `smooth`, here $s_k$, a running mean of the losses $\ell_k$, corrected for its start at $a_{-1} = 0$: $\;a_k =
#    \beta\, a_{k-1} + (1 - \beta)\, \ell_k$, $\;s_k = a_k / (1 - \beta^{k+1})$.
#
# **`propose`** returns (smallest, largest). The largest useful rate is a *quarter* of the rate with the lowest
# smoothed loss. The smallest is the first rate at which a *tenth* of the whole fall has happened (2 lines).
#
# <details><summary>Hint</summary>
#
# Train copies. An optimizer refers to its model's parameters: one `copy.deepcopy` of the pair keeps them together, two
# would not.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
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


# %% tags=["balise-2"]
def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    """Raise the rate from low to high in n steps. Returns (rates, smoothed losses); leaves everything as it was."""
    states, generator = random_states(), getattr(batches, "generator", None)  # a DataLoader may have one
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
        # also after an error
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


# %% jupyter={"source_hidden": true}
def loader_of(size, seed=0):
    """Shuffled batches of the training images, with their own random generator."""
    pairs = torch.utils.data.TensorDataset(X, Y)
    return torch.utils.data.DataLoader(pairs, size, shuffle=True, generator=torch.Generator().manual_seed(seed))


def found_for(make, low, high):
    """Rates and losses of a new network with the optimizer make(parameters), and the proposed rates."""
    torch.manual_seed(0)
    model = network()
    rates, losses = find_rates(model, loader_of(32), make(model.parameters()), low, high)
    return rates, losses, *propose(rates, losses)


proposed = {"SGD, momentum 0.9": found_for(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 1e-4, 10),
            "AdamW": found_for(torch.optim.AdamW, 1e-5, 1)}  # fmt: skip
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
# <details><summary>Two newer answers: warm-up–stable–decay, and muP</summary>
#
# A cosine needs the number of steps in advance. **Warm-up–stable–decay** (Hu and others, 2024, arXiv 2404.06395) stays
# at the peak and falls only in the last tenth or so: with more data, go on from the stable part. **muP** (Yang and
# others, 2022, arXiv 2203.03466) scales each layer's initialisation and rate with its width, so the best rate stays
# nearly the same: find it on a narrow model.
# </details>
#
# ## AdamW
#
# Adam scales the step of each weight $\theta$ separately: it divides a moving average $m$ of the gradient $g$ by the
# root of a moving average $v$ of $g^2$. Both start at 0, and are corrected for that after $t$ steps:
#
# $$m \leftarrow \beta_1 m + (1-\beta_1)\,g,\quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,\qquad
# \hat m = \frac{m}{1-\beta_1^t},\quad \hat v = \frac{v}{1-\beta_2^t},\qquad
# \theta \leftarrow \theta - \alpha\lambda\,\theta - \alpha\,\frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# The term $\alpha\lambda\,\theta$ is the **decoupled** weight decay, the W of AdamW: it stays out of $m$ and $v$.
#
# ### Balise 3 · AdamW · about 19 min
#
# - **`parameter_groups`**: which parameters decay, and which don't. 3 lines.
# - **`AdamW.step`**: the whole update, for all weights of a group at once. About 9 lines.
#
# **Write all of it:** `tp.open_task(3)` gives you only names and docstrings. Build an optimizer that resumes exactly.
#
# Ten operators for each of hundreds of parameters keep a GPU waiting for the CPU. Use `torch._foreach_…`, as PyTorch's
# optimizers do: `torch._foreach_add_(xs, ys)` adds two lists, in place (the last underscore).
#
# <details><summary>Hint</summary>
#
# `_foreach_lerp_(xs, ys, w)` moves each x towards y by the share w. `_foreach_addcmul_(xs, ys, zs, w)` adds w · y · z,
# and `_foreach_addcdiv_(xs, ys, zs, ws)` adds w · y / z. `_foreach_sqrt` and `_foreach_div(xs, numbers)` return new
# lists. The decay multiplies the weights by a number a little below 1, before the step.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
def ready(optimizer, group, *names):
    """Count this step. Returns (weights that have a gradient, their gradients, number of steps of each, *buffers).

    names: buffers of the weights' shapes, zeros at first, kept in the optimizer's state. Returned as a list per name.
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
    """Two groups [{"params": [...], "weight_decay": ...}, ...] with every parameter that learns, each once.

    Matrices and kernels (two dimensions or more) get `weight_decay`; biases, gains and scalars get 0.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # BEGIN SOLUTION
    return [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    # END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW computes it, for whole lists of tensors.

    A step makes a few calls of torch._foreach_…, however many weights there are, and reads nothing back from the
    device. Weights change in place; gradients don't change. Averages and counts are in self.state, so that
    load_state_dict resumes exactly.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient; first shrink each by lr · weight_decay of it.

        Read the options of each group at each step. ε is added to √v̂. m and v are corrected by the number of steps of
        their own weight, since a weight may have had no gradient. ready(self, group, "mean", "square") gives lists, an
        entry for each weight: the weights, their gradients, how many steps each has taken (this one included), and m
        and v, which are zeros at first and kept in self.state.
        """
        for group in self.param_groups:
            weights, gradients, steps, means, squares = ready(self, group, "mean", "square")
            if not weights:
                continue
            rate, (beta1, beta2) = group["lr"], group["betas"]
            # BEGIN SOLUTION
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            # α m̂ / (√v̂ + ε) = m · rates / below with c = √(1 - β₂ᵗ), below = √v + ε c: one pass less over the memory
            roots = [math.sqrt(1 - beta2**step) for step in steps]
            below = torch._foreach_sqrt(squares)
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            rates = [-rate * root / (1 - beta1**step) for root, step in zip(roots, steps)]  # minus: downhill
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            torch._foreach_addcdiv_(weights, means, below, rates)
            # END SOLUTION


# %%
tp.check(3, parameter_groups, AdamW)

# %% [markdown]
# **What does "decoupled" change?** Adam with "L2" adds the decay to the gradient, so $\sqrt{\hat v}$ divides it too.
# Here the gradients are pure noise, so the decay alone moves the weights' mean away from 1.

# %% jupyter={"source_hidden": true}
SIZES = torch.tensor([0.01, 0.1, 1.0, 10.0])  # of the gradients


def pulled(make, steps=1000):
    """The mean of 500 weights after a number of steps, for each size of the gradients."""
    noise, weights = torch.Generator().manual_seed(0), nn.Parameter(torch.ones(4, 500))
    optimizer = make([weights], lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        weights.grad = SIZES[:, None] * torch.randn(4, 500, generator=noise)
        optimizer.step()
    return weights.detach().mean(1).tolist()


report.table({"weights after 1,000 steps": "{}"} | {f"gradients of {size:g}": "{:.2f}" for size in SIZES.tolist()},
             [("AdamW, yours", *pulled(AdamW)), ("Adam with L2", *pulled(torch.optim.Adam)),
              ("the decay alone", *[(1 - 0.01 * 0.1) ** 1000] * 4)])  # fmt: skip

# %% [markdown]
# ## Gradients that vanish or explode · further
#
# Backward multiplies the gradient by each layer's weights, so it shrinks or grows exponentially with depth. Three
# things prevent this: weights drawn at the right scale (Glorot and Bengio, 2010; He and others, 2015), skip connections
# $x + F(x)$ (He and others, 2016), and norms. Which does a deep network need?


# %% jupyter={"source_hidden": true}
class Skip(nn.Sequential):
    """x + F(x), where F is the layers in it."""

    def forward(self, x):
        return x + super().forward(x)


STARTS = {
    "default": lambda weight: None,
    "Xavier": nn.init.xavier_normal_,
    "Kaiming": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}
DEEP = {  # how its weights start; skip connections; norms
    "PyTorch's default": ("default", False, False),
    "Xavier (Glorot)": ("Xavier", False, False),
    "Kaiming (He)": ("Kaiming", False, False),
    "Kaiming, x + F(x)": ("Kaiming", True, False),
    "default, x + F(norm(x))": ("default", True, True),
}


def deep(depth, start, skips, norms, width=64):
    """`depth` layers with ReLU, then a linear one: 64 → … → 10."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        STARTS[start](linear.weight)
        parts = [nn.LayerNorm(width)] if norms else []
        blocks.append((Skip if skips else nn.Sequential)(*parts, linear, nn.ReLU()))
    return nn.Sequential(nn.Flatten(), *blocks, nn.LayerNorm(width) if norms else nn.Identity(), nn.Linear(width, 10))


def first_gradient(model):
    """The length of the gradient of the first layer's weights, before the first step."""
    F.cross_entropy(model(X[:256]), Y[:256]).backward()
    return float(next(p for p in model.parameters() if p.ndim > 1).grad.norm())


def loss_after(model, steps=40):
    """The training loss after some steps of SGD; not finite where training diverged."""
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(X), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(model(X), Y))


def draw_depths(depths=(2, 4, 8, 16, 32)):
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(3, 2))
    for place, (name, kind) in enumerate(DEEP.items()):
        left.plot(depths, [first_gradient(deep(depth, *kind)) for depth in depths], "o-", label=name)
        loss = loss_after(deep(depths[-1], *kind))
        right.barh(place, loss if math.isfinite(loss) else 0, color=f"C{place}")
        right.text(2.4, place, f"{loss:.2f}" if math.isfinite(loss) else "diverged", va="center")
    left.set_xscale("log", base=2)
    left.set(yscale="log", xticks=depths, xticklabels=depths, xlabel="layers", ylabel="length of the gradient",
             title="What is left of the gradient at the first layer?")  # fmt: skip
    left.minorticks_off()
    left.legend(fontsize=8)
    right.axvline(math.log(10), color="0.5", ls=":")
    right.invert_yaxis()
    right.set(
        yticks=[], xlim=(0, 3), xlabel="training loss (dotted: a guess)", title=f"{depths[-1]} layers, after 40 steps"
    )
    plt.show()


draw_depths()

# %% [markdown]
# <details><summary>What the picture shows</summary>
#
# A layer of ReLUs keeps the scale if its weights have the variance $2 / n$ for $n$ inputs: Kaiming's rule. Xavier has
# half of it, and PyTorch's default for `nn.Linear` a sixth, so both lose a factor with each layer. Kaiming's gradient
# survives, yet so many plain layers hardly learn. $x + F(x)$ alone adds to the scale until it explodes. With a norm
# before $F$, even the default start is good enough here.
# </details>

# %% [markdown]
# ## Clip, and accumulate
#
# **Clipping** bounds the length of *all* gradients together: if $\lVert g \rVert > c$, all are multiplied by $c /
# \lVert g \rVert$.
#
# **Accumulation** must give *the same step* as one large batch. Padding has the label −100, which doesn't count. So
# divide the summed loss once, by the number of labels that count in *all* micro-batches of all ranks. A mean of means
# gives tokens of short texts more weight.


# %% tags=["setup"] jupyter={"source_hidden": true}
def average_over_ranks(parameters):
    """Replace the gradients (those that are not None) by their mean over all ranks, in one message."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    pieces = (flat / dist.get_world_size()).split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])


# %% [markdown]
# ### Balise 4 · Clip and accumulate · further · about 13 min
#
# - **`clip_gradients`** scales the gradients to a common norm of at most `max_norm`. No value may go to Python (`if
#   norm > …`, `.item()`), since the CPU would wait. Use `torch._foreach_…`, not `clip_grad_norm_`. 2 lines.
# - **`accumulated_step`** runs on every rank. Write `count`, how many labels count on all ranks together, as a tensor
#   on the labels' device (2 lines). Then write the `loss` of a micro-batch, its share of the mean over all labels, and
#   its backward (2 lines). `average_over_ranks(parameters)` later divides by the number of ranks, as
#   `DistributedDataParallel` does: make up for this in backward, but leave `loss` unscaled.
#
# <details><summary>Hint</summary>
#
# The norm of all is the norm of the norms: `torch._foreach_norm(gradients)`, `torch.stack`. `torch.clamp(…, max=1.0)`
# is an `if` that doesn't read the value; add 1e-6 to the norm you divide by. `F.cross_entropy(logits, labels,
# reduction="sum")` skips the labels −100. `dist.all_reduce(count)` sums a tensor over the ranks.
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
# The same 96 images, cut in three ways:


# %% jupyter={"source_hidden": true}
def one_step(sizes):
    """On a rank, with micro-batches of sizes[rank] images: (loss, norm of the gradients)."""
    torch.manual_seed(0)
    model, own = network().to(launch.device()), sizes[dist.get_rank()]
    first = sum(sum(sizes[: dist.get_rank()], []))
    parts = [t[first : first + sum(own)].to(launch.device()).split(own) for t in (X, Y)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [float(one) for one in accumulated_step(model, list(zip(*parts)), optimizer, max_norm=1.0)]


torch.manual_seed(0)
model, rows = network(), []
for sizes in ([[96]], [[60, 4, 32]], [[60, 4], [31, 1]]):
    loss, norm = launch.ranks(one_step, sizes, n=len(sizes))[0]
    means = [F.cross_entropy(model(x), y) for x, y in zip(*(t[:96].split(sum(sizes, [])) for t in (X, Y)))]
    gradients = torch.autograd.grad(sum(means) / len(means), model.parameters())
    rows.append((str(sizes), norm, float(nn.utils.get_total_norm(gradients))))
report.table(
    {"micro-batches of each rank": "{}", "norm of your gradient": "{:.5f}", "by the mean of means": "{:.5f}"}, rows
)

# %% [markdown]
# ## Trust ratios: LARS and LAMB
#
# The most sensitive layer limits a rate that all layers share. LARS and LAMB (You and others, 2017 and 2020) scale the
# step $u$ of each **layer** to its weights $w$, by a *trust ratio*:
#
# $$r = c\;\frac{\lVert w \rVert}{\lVert u \rVert + \lambda \lVert w \rVert}, \qquad\text{and 1 where}\quad \lVert w \rVert = 0
# \;\text{ or }\; \lVert u \rVert = 0 .$$
#
# | | update of a layer | |
# |---|---|---|
# | **LARS**: SGD with momentum | $b \leftarrow \mu\, b + r\,(g + \lambda w)$, $\;w \leftarrow w - \alpha\, b$ | $r$ of $u = g$ |
# | **LAMB**: AdamW | $u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w$, $\;w \leftarrow w - \alpha\, r\, u$ | in $r$: $\lambda = 0$, $c = 1$ |
#
# Biases and gains of norms get no decay and no ratio.
#
# ### Balise 5 · LARS and LAMB · further · about 12 min
#
# - **`trust_ratios`** returns $r$ of each pair, `(n,)`, without `if norm > 0`: on a GPU, the CPU would wait. 2 lines.
# - **`LARS.step`**, **`LAMB.step`**: `updates` is the plain step of each weight, decay included. Multiply those of the
#   matrices (`layers` has their indices) by their ratios, in one `torch._foreach_…` call: 2 lines and 1.
#
# <details><summary>Hint</summary>
#
# `torch.where(condition, ratios, 1.0)` chooses. `_foreach_mul_(some_updates, list(ratios))` works in place, even on a
# new list of the same tensors.
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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
# A few singular values of a gradient matrix are much larger than the rest, so a step goes in few directions. Muon
# (Jordan, 2024) goes equally far in all: of $M = U \Sigma V^\top$ it keeps $U V^\top$. Five rounds of a *Newton-Schulz
# iteration* come close:
#
# $$X_0 = \frac{M}{\lVert M \rVert_F}, \qquad A = X X^\top,\qquad X \leftarrow a X + (b A + c A^2) X .$$
#
# ### Balise 6 · Muon · further · about 10 min
#
# - **`orthogonalise`**: write a round (2 lines). The first division is given.
# - **`Muon.step`** orthogonalises the momentum of each matrix, into `updates`. Add them to the weights, times $-\alpha
#   \cdot 0.2 \sqrt{\max(\text{rows}, \text{columns})}$, in one `torch._foreach_…` call (1 line). The factor gives
#   steps the size of AdamW's (Liu and others, 2025); AdamW still updates biases, norms and the last layer.
#
# <details><summary>Hint</summary>
#
# `x.mT` transposes the last two dimensions. `torch.baddbmm(z, x, y, beta=b, alpha=c)` is b · z + c · x @ y.
# `torch._foreach_add_(xs, ys, alpha=…)` adds alpha · y. The reason for √max: the squared entries of $UV^\top$ sum to
# min(rows, columns).
# </details>


# %% tags=["balise-6"]
def orthogonalise(matrices, steps=5):
    """Make all singular values of each matrix about 1: (n, rows, columns) → the same shape."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # so that A is the smaller square: most of the time goes there
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

# %% jupyter={"source_hidden": true}
torch.manual_seed(0)
model = network()
F.cross_entropy(model(X), Y).backward()
gradient = model[4].weight.grad  # (128, 128)
values = {"gradient": torch.linalg.svdvals(gradient),
          "orthogonalised": torch.linalg.svdvals(orthogonalise(gradient[None])[0])}  # fmt: skip


def matrices(model):
    return [weight for weight in model.parameters() if weight.ndim > 1]


options = {"lr": 0.01, "weight_decay": 0.1}
compared("Muon", lambda model: Muon(matrices(model), **options),
         lambda model: torch.optim.Muon(matrices(model), adjust_lr_fn="match_rms_adamw", **options))  # fmt: skip
_, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
for name, one in values.items():
    axes.plot(range(1, len(one) + 1), one / one[0], label=name)
axes.set(xlabel="number of the singular value", ylabel="singular value / largest", yscale="log", ylim=(1e-4, 2),
         title="In which directions does a step go?")  # fmt: skip
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## How large is too large? The gradient noise scale
#
# For the squared length of a gradient of $B$ samples, "The idea" gives
#
# $$\mathbb{E}\,\lVert g_B \rVert^2 = \lVert G \rVert^2 + \frac{\operatorname{tr} \Sigma}{B}, \qquad
# B_\text{noise} = \frac{\operatorname{tr} \Sigma}{\lVert G \rVert^2} .$$
#
# From it McCandlish and others (2018) predict, for tuned rates,
#
# $$\text{steps}(B) = S_\text{min} \Big(1 + \frac{B_\text{noise}}{B}\Big), \qquad
# \text{efficiency}(B) = \frac{\text{fewest samples}}{\text{samples}} = \frac{1}{1 + B / B_\text{noise}} .$$
#
# ### Balise 7 · The gradient noise scale · about 14 min
#
# Data parallelism measures $B_\text{noise}$ for free: each of $N$ ranks has a gradient of $b$ samples before the
# all-reduce, and one of $N b$ after it.
#
# - **`gradient_noise`** runs on every rank. The squared lengths are given: `small` for one rank's gradient (averaged
#   over the ranks), `big` for the mean gradient. Solve for $\lVert G \rVert^2$ and $\operatorname{tr} \Sigma$. 2 lines.
# - **`noise_scale`**: one number from many steps. A step's estimate of $\lVert G \rVert^2$ may be near zero or
#   negative, which ruins a mean of quotients. Average numerator and denominator **separately**, then divide. 3 lines.
# - **`ranks_that_pay`**: the largest number of ranks with an efficiency of at least `share`. 1 line.
#
# <details><summary>Hint</summary>
#
# The difference of the two equations has no $\lVert G \rVert^2$ in it. For efficiency $\ge$ share, solve for $B$,
# which is ranks times batch, and round down.
# </details>


# %% tags=["balise-7", "slide-mistake=mean-of-quotients"]
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
# We count the steps of plain SGD for seven batch sizes, each at the best of four rates. Then four ranks train with 8
# samples each, and your functions predict where the curve *bends*.


# %%
def plain(model, rate):
    return [torch.optim.SGD(model.parameters(), rate)]


RATES = (0.02, 0.05, 0.125, 0.3)
bend = {}
for batch in (4, 8, 16, 32, 64, 128, 256):
    rate, steps = steps_to_target(plain, RATES, batch, most=1000)
    bend[batch] = torch.tensor(steps)
report.table({"batch": "{}", "steps": "{:.0f}", "images read": "{:,.0f}"},
             [(batch, float(steps[1]), float(batch * steps[1])) for batch, steps in bend.items()])  # fmt: skip


# %%
def watched_training(steps=64, batch=8, rate=0.1):
    """On a rank: train, and keep each step's estimates (|G|², tr Σ)."""
    torch.manual_seed(0)
    device, found = launch.device(), []
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        drawn = torch.randint(len(X), (batch,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(X[drawn].to(device)), Y[drawn].to(device)).backward()
        found.append([float(one) for one in gradient_noise(model.parameters(), batch)])
        optimizer.step()
    return found


estimates = launch.ranks(watched_training, n=4, timeout=120)[0]
noise = noise_scale(estimates)


# %% tags=["slide"] jupyter={"source_hidden": true}
def fitted(bend):
    """(S_min, B_c) of the curve steps = S_min + S_min B_c / B with the least relative errors, over all seeds."""
    points = [(batch, float(steps)) for batch, all_steps in bend.items() for steps in all_steps]
    rows = torch.tensor([[1 / steps, 1 / (batch * steps)] for batch, steps in points])
    fewest, slope = torch.linalg.lstsq(rows, torch.ones(len(rows), 1)).solution.flatten().tolist()
    return fewest, slope / fewest


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
        sizes,
        [middle[1, 0] * sizes[0] / size for size in sizes],
        ":",
        color="0.5",
        label="twice the batch, half the steps",
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


fewest, critical = fitted(bend)
half = len(estimates) // 2
halves = f"first half {noise_scale(estimates[:half]):.0f}, second half {noise_scale(estimates[half:]):.0f}"
print(f"noise scale of the training: {noise:.0f} samples ({halves})")
print(f"bend of the measured steps: {critical:.0f} samples; no batch needs fewer than {fewest:.0f} steps")
print(f"ranks of 8 samples that pay off, by the noise scale: {ranks_that_pay(noise, 8, 0.5)} at an efficiency of 0.5, "
      f"{ranks_that_pay(noise, 8, 0.2)} at 0.2")  # fmt: skip
draw_bend(estimates, fewest, critical, noise)

# %% [markdown]
# Far left of the bend, doubling the ranks nearly halves the steps. Far right, it doubles the bill for nothing. Noise
# scale and bend agree only in order of magnitude: the formula leaves out curvature.
#
# ## The same loss in fewer steps
#
# Beyond the bend, a step must go *further*. We measure again: your optimizers, with your warm-up and cosine, each at
# the best rate of a grid. AdaGrad and RMSprop are PyTorch's.

# %%
contestants = ("SGD", "AdaGrad", "RMSprop", "LARS", "LAMB", "AdamW", "Muon")
first = tp.predict("Which optimizer needs the fewest steps with all 1,438 images a step?", ..., choices=contestants)


# %% jupyter={"source_hidden": true}
def muon_and_adamw(model, rate):
    """Muon for the hidden matrices, AdamW for the rest: biases, norms, the last layer."""
    hidden = [weight for weight in model.parameters() if weight.ndim > 1][:-1]
    rest = [weight for weight in model.parameters() if all(weight is not one for one in hidden)]
    return [Muon(hidden, rate), AdamW(rest, rate)]


CONTESTANTS = {  # name: (model, rate → optimizers; rates)
    "SGD": (sgd, (0.02, 0.05, 0.1, 0.2)),
    "AdaGrad": (lambda model, rate: [torch.optim.Adagrad(model.parameters(), rate)], (0.005, 0.01, 0.03)),
    "RMSprop": (lambda model, rate: [torch.optim.RMSprop(model.parameters(), rate)], (0.0005, 0.001, 0.003)),
    "LARS": (
        lambda model, rate: [LARS(model.parameters(), rate, weight_decay=1e-4, coefficient=0.02)],
        (0.1, 0.3, 1.0, 3.0),
    ),
    "LAMB": (lambda model, rate: [LAMB(model.parameters(), rate)], (0.01, 0.03, 0.1, 0.3)),
    "AdamW": (lambda model, rate: [AdamW(parameter_groups(model, 0.01), rate)], (0.003, 0.01, 0.03)),
    "Muon": (muon_and_adamw, (0.01, 0.03, 0.1)),
}

# %% tags=["slide"]
rows = [("baseline: SGD, same rate", baseline[64][0], 0.02, baseline[len(X)][0], 0.02, 1.0)]
for name, (make, rates) in CONTESTANTS.items():
    found = [
        steps_to_target(make, rates, batch, lambda step, peak: warmup_cosine(step, 100, 2, peak), most=100)
        for batch in (64, len(X))
    ]
    (small_rate, small), (large_rate, large) = found
    rows.append((name, small[1], small_rate, large[1], large_rate, baseline[len(X)][0] / large[1]))
report.table({"": "{}", "steps, batch 64": steps_said, "rate": "{:g}", "steps, batch 1,438": steps_said,
              "rate ": "{:g}", "times fewer": "{:.1f}"}, rows)  # fmt: skip
first.shows(
    min(rows[1:], key=lambda row: row[3])[0],
    why="Muon lengthens the step in directions in which the other optimizers hardly move.",
)

# %% [markdown]
# <details><summary>What the result shows</summary>
#
# SGD gains only from a rate tuned for *this* batch. Better optimizers give the rest. AdaGrad (Duchi and others, 2011)
# divides by the root of the *sum* of all past $g^2$, so its steps only shrink. RMSprop (Hinton, 2012) takes a moving
# average. Neither has momentum here; Adam (Kingma and Ba, 2015) adds it and corrects the first steps. Trust ratios
# help where dozens of layers differ widely, over thousands of steps; here there are three layers. In large networks,
# well-tuned baselines have matched them (Nado and others, 2021).
# </details>
#
# ## Flat or sharp minima? · further
#
# Large batches are said to end in sharp minima, which generalise worse (Keskar and others, 2017). The largest
# eigenvalue of the Hessian measures sharpness. Below, networks train to a loss of 0.2:

# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
def trained_to(loss, batch, rates, every):
    """Train rates × 3 seeds side by side, each down to the loss `loss`. Returns (weights, accuracy) of all models."""
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


# %% jupyter={"source_hidden": true}
MINIMA_RATES, minima, rows = (0.1, 0.3, 0.8), {}, []
for batch, every in ((32, 10), (len(X), 2)):
    weights, accuracies = trained_to(0.2, batch, MINIMA_RATES, every)
    minima[batch] = torch.stack([sharpness(weights), accuracies]).view(2, len(MINIMA_RATES), SEEDS)
    for rate, sharp, accuracy in zip(MINIMA_RATES, *minima[batch]):
        found = ", ".join(f"{value:.1f}" for value in sharp.sort().values)
        rows.append((batch, rate, found, 2 / rate, float(accuracy.mean()), float(accuracy.std())))
report.table({"batch": "{:,}", "rate": "{:g}", "sharpness of 3 seeds": "{}", "2 / rate": "{:.1f}",
              "validation accuracy": "{:.3f}", "spread of seeds": "{:.3f}"}, rows)  # fmt: skip
order = torch.stack([torch.cat([m[k].flatten() for m in minima.values()]) for k in (0, 1)]).argsort(1).argsort(1)
agree = torch.corrcoef(order.double())[0, 1]
print(f"rank correlation of sharpness and accuracy: {agree:+.2f} (-1: the flatter, the better)")

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
# Descent at rate $\eta$ can't settle where the curvature is above $2/\eta$, so the **rate** matters more than the batch
# (Cohen and others, 2021). Is flat *better*? See the correlation above.
#
# ## Resume exactly
#
# A cluster job ends when its hours are over, not when its epoch is. From the weights alone, you resume a different
# run: the momentum is empty, and half an epoch is read twice. A resumed run should be **bitwise identical** to one that
# never stopped.
#
# ### Balise 8 · Resume exactly · further · about 16 min
#
# - **`Batches.__iter__`**, a generator, yields the rest of the epoch. `self.done` counts the batches handed out. A
#   checkpoint written in the loop's body must contain the number of the *next* batch. 2 lines.
# - **`save_checkpoint`**: a job may be killed while it writes, so write to another file in the same folder, then let
#   it replace the old one. 3 lines.
# - **`load_checkpoint`** sets the random states last, since loading a part may draw random numbers. 4 lines.
#
# <details><summary>Hint</summary>
#
# In a generator, code after `yield` runs only when the next batch is asked for. `Path.replace` puts a file in
# another's place in one step. `torch.load(..., weights_only=True)` never runs code from the file. Use
# `random_states` and `set_random_states`.
# </details>


# %% tags=["balise-8"]
class Batches:
    """Batches (x, y), in a new order each epoch; knows which one comes next."""

    def __init__(self, x, y, size, seed=0):
        self.x, self.y, self.size, self.seed = x, y, size, seed
        self.epoch, self.done = 0, 0  # the epoch, and how many of its batches were handed out

    def order(self):
        """The order of the samples in this epoch, int64 (samples,): the same in every call."""
        return torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))

    def __iter__(self):
        """Yield the rest of this epoch, then get ready for the next one."""
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
    """Save the state_dict() of every part and all random states. `path` is always a whole file, the old or the new one.

    parts: anything that has state_dict() and load_state_dict(), under any name. Errors are passed on to the caller.
    """
    # BEGIN SOLUTION
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"parts": states, "random": random_states()}, f"{path}.new")
    Path(f"{path}.new").replace(path)
    # END SOLUTION


def load_checkpoint(path, **parts):
    """Restore every given part and all random states from `path`; the file may contain more parts."""
    # BEGIN SOLUTION
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    set_random_states(saved["random"])
    # END SOLUTION


# %%
tp.check(8, Batches, save_checkpoint, load_checkpoint)

# %% [markdown]
# A run with dropout stops after 70 of 135 steps and goes on in new objects. What if you leave something out?


# %% jupyter={"source_hidden": true}
def made(seed):
    """The parts of a training run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Dropout(0.1), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "batches": Batches(X, Y, 32)}


def go_on(until, model, optimizer, batches):
    """Train from the position of the batches to step `until`; 45 steps an epoch. Returns all weights, (n,)."""
    while (step := batches.epoch * 45 + batches.done) < until:
        some = itertools.islice(batches, until - step)
        train(model, some, optimizer, lambda k: warmup_cosine(k, 135, 10, 0.03), step)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
whole, stopped = go_on(135, **made(0)), made(0)
go_on(70, **stopped)
file = Path(tempfile.mkdtemp()) / "last.pt"
save_checkpoint(file, **stopped)
rows = []
for without in ("nothing", "random states", "optimizer", "batches"):
    parts, before = made(1), random_states()
    load_checkpoint(file, **{name: part for name, part in parts.items() if name != without})
    if without == "random states":
        set_random_states(before)
    end = go_on(135, **parts)
    off = "bitwise the same" if torch.equal(end, whole) else f"{(end - whole).norm() / whole.norm():.1%} away"
    rows.append((without, off))
report.table({"resumed without": "{}", "the final weights are": "{}"}, rows)

# %% [markdown]
# ## Past this machine · further
#
# For language models, Kaplan and others (2020) fitted the bend as a function of the loss $L$ in nats:
# $B_\text{crit} \approx 2 \cdot 10^8 \text{ tokens} \cdot L^{-1/0.21}$. With the planner's step time, you get an estimate:

# %% jupyter={"source_hidden": true}
PARAMETERS, TOKENS = 1.3e9, 2048  # of the model; tokens per GPU and step
A100S = planner.Cluster(planner.A100)  # nodes of 8, a network card of 200 Gbit/s for each GPU
COMPUTING = 6 * PARAMETERS * TOKENS / (0.4 * planner.A100.bfloat16)  # seconds; 40 % of the peak


def efficiencies(gpus, loss):
    """(share of samples not wasted, share of time not spent on messages) on a number of GPUs: an estimate."""
    batch, bend = gpus * TOKENS, 2e8 * loss ** (-1 / 0.21)
    step = planner.data_parallel_step(
        COMPUTING / 3, 2 * COMPUTING / 3, 2 * PARAMETERS, lambda size: A100S.collective("all_reduce", size, gpus)
    )
    return 1 / (1 + batch / bend), COMPUTING / step.total


rows = []
for loss, gpus in itertools.product((3.5, 2.5), (16, 64, 256, 1024, 4096)):
    samples, messages = efficiencies(gpus, loss)
    share = samples * messages / math.prod(efficiencies(1, loss))
    rows.append((loss, gpus, samples, messages, gpus * share, 1 / share))
print("estimate: 1.3 billion parameters, 2,048 tokens per GPU and step, gradients in bfloat16, A100")
report.table({"loss": "{}", "GPUs": "{:,}", "batch efficiency": "{:.0%}", "message efficiency": "{:.1%}",
              "times as fast as one": "{:,.0f}", "times its GPU hours": "{:.1f}"}, rows)  # fmt: skip

# %% [markdown]
# A throughput benchmark sees only message efficiency, which is nearly perfect. The batch is why, beyond a few hundred
# GPUs, you split the *model*, too.
#
# <details><summary>The bend, measured since</summary>
#
# For models of 85 million to 1.2 billion parameters, the bend grows mainly with the number of training tokens, hardly
# with the size of the model (Zhang and others, 2024, arXiv 2410.21676). During the training of models of 1 and 7
# billion, it is near zero at first, grows fast, then stays the same (Merrill and others, 2025, arXiv 2505.23971);
# Kaplan's formula grows as long as the loss falls. With a batch that grew, the smaller model took 43 % fewer steps to a
# slightly better loss.
# </details>
#
# ## Questions
#
# **1.** From 8 to 64 GPUs, with the same batch on each and the same epochs, accuracy falls by two points. What do you
# try?
#
# <details><summary>Answer</summary>
#
# First the schedule: find the rate again, with a warm-up (at most eight times the old rate). Then another optimizer, at
# its own tuned rate. Then measure the noise scale: if the new batch is far beyond it, use fewer GPUs or train longer.
# </details>
#
# **2.** A library divides the sum of 8 micro-batches' mean losses by 8. When is this right?
#
# <details><summary>Answer</summary>
#
# Only when all have the same number of tokens that count. Averaging the ranks' means repeats the mistake. Add the
# sums, and divide once.
# </details>
#
# **3.** The noise scale grows during training, often tenfold. What follows if you have booked a machine for the whole
# run?
#
# <details><summary>Answer</summary>
#
# The batch may grow during training, as it did for GPT-3. On a fixed machine, start with fewer ranks, and use the
# others for another seed.
# </details>

# %% [markdown] tags=["slide"]
# ## To remember
#
# **A larger batch buys precision, not steps.** Up to the gradient noise scale that's a good bargain; beyond it, more
# ranks save less and less. Find the rate *for the batch*: warm up, stay high, bring it down at the end. Compare
# optimizers at their own tuned rates, with several seeds. Save everything the next step depends on.

# %%
tp.progress()
