# %% [markdown]
# # Hyperparameter search, from a grid to a supercomputer · about 195 min, core 30
#
# Gradient descent finds the weights. What it needs itself (a learning rate, a batch size, a width, an optimizer) is found by
# trying, and each trial is a whole training: a search is the most expensive thing that most teams ever run. It is also the
# part of the work that is most often reported from one lucky run.
#
# In this practical work you write the methods that make do with less: you stop poor trials early, you never let a worker
# wait for another, you let a model of the past choose the next trial, you change rates in the middle of training. You compare
# them with **medians over a hundred repetitions**. Then you spread a search over processes with Optuna and with Ray.
#
# **What you will gain.** A cell below estimates it for a ResNet-50, each trial on a GPU of its own.

# %% tags=["setup"]
import copy
import heapq
import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # of a progress bar that nobody asked for
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, scale, todo

tp = course.open("11_hyperparameter_search")
tp

# %% tags=["setup"]
FULL = scale() == "full"

# %%
EPOCH = 1_281_167 / planner.A100.resnet50_mixed / 3600  # hours: ImageNet once, ResNet-50, on one A100
every = 81 * 81 * EPOCH
stopped = 81 * (1 + 4 * (1 - 1 / 3)) * EPOCH  # the formula below
print(f"estimate: 81 trials of 81 epochs of ImageNet: {every:,.0f} GPU hours")
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
axes.set(
    xlabel="epochs", ylabel="trial", title="27 trials: 81 epochs (colours) instead of 729 (grey)", xticks=(1, 3, 9, 27)
)

# %% [markdown]
# What this needs: that the order of trials after few epochs tells something of the order after many. Whether it does, and
# what the order tells at all when another seed would have changed it, is measured first.

# %% [markdown]
# ## A benchmark made on the spot
#
# A method that draws at random must be run a hundred times before a median says anything, and nobody has a hundred clusters.
# So all trainings were done once, when the data sets were made: a network with one hidden layer on the handwritten digits, in
# every configuration of a grid, with three seeds each. A search then looks its trainings up. Published benchmarks of this
# kind are FCNet, NAS-Bench and LCBench. A proposal between the points of the grid counts as the nearest one.

# %% tags=["setup"]
SPACE = {
    "optimizer": CategoricalDistribution(("sgd", "adamw")),
    "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "batch_size": IntDistribution(16, 256, log=True),
    "width": IntDistribution(8, 72, log=True),
    "weight_decay": FloatDistribution(1e-5, 1e-2, log=True),
}
ONLY_IF = {"momentum": {"optimizer": "sgd"}}  # AdamW has no momentum: a parent stands before its child in SPACE
table = data.search_table()

# %%
config = {"optimizer": "adamw", "learning_rate": 0.003, "batch_size": 40, "width": 50, "weight_decay": 1e-3}
print(table)
for name, values in table.axes.items():
    print(f"{name:>14}", *(f"{value:.3g}" if isinstance(value, float) else value for value in values))
print("nearest:", table.nearest(config))
print("validation accuracy after 1, 3, 9, 27 epochs:", table.curve(config, seed=0)[[0, 2, 8, 26]].round(3))
print(f"{table.seconds(config):.3f} s an epoch, alone on one core")

# %% [markdown]
# A training that diverges has an accuracy of NaN from then on: one in sixty did where this text was written. (It counts as
# diverged when an output is larger than 65,504, which float16 cannot hold.)
#
# **Commit to a guess.** Of all 936 configurations, take the one that is best under seed 0. Which place does it have under
# seed 1, and under seed 2: the first, within the first 10, or within the first 50? Write it into the cell, then run it.

# %%
guess = None  # a place

# %%
curves = np.array([[table.curve(config, seed) for seed in range(3)] for config in table.configurations])
final = np.nan_to_num(curves[:, :, -1])  # (936, 3); diverged: 0
winner = final[:, 0].argmax()
places = 1 + (final > final[winner]).sum(0)
print(f"best under seed 0: {final[winner, 0]:.4f}; under seeds 1 and 2: {final[winner, 1]:.4f}, {final[winner, 2]:.4f}")
print(f"its place there: {places[1]} and {places[2]}; your guess: {guess}")
top = np.argsort(-final.mean(1))[:50]
print(f"share of trainings that diverged: {np.isnan(curves[:, :, -1]).mean():.3f}")
for name, rows in (("all 936", final), ("best 50 by their mean", final[top])):
    ranks = rows.argsort(0).argsort(0)
    print(
        f"{name}: the order under two seeds agrees by {np.corrcoef(ranks[:, :2].T)[0, 1]:.2f} (1: the same, 0: chance)"
    )

# %% jupyter={"source_hidden": true}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
shown = [
    {
        "optimizer": "sgd",
        "learning_rate": rate,
        "momentum": momentum,
        "batch_size": 64,
        "width": 24,
        "weight_decay": 1e-5,
    }
    for rate, momentum in ((0.001, 0.9), (0.1, 0.0), (0.1, 0.9), (1.0, 0.9))
]
for k, config in enumerate(shown):
    for seed in range(3):
        name = f"rate {config['learning_rate']:g}, momentum {config['momentum']:g}" if seed == 0 else None
        left.plot(range(1, 28), table.curve(config, seed), color=f"C{k}", linewidth=1, label=name)
left.set(
    xlabel="epochs", ylabel="validation accuracy", title="Do early leaders win? SGD, three seeds each", xscale="log"
)
left.set(xticks=(1, 3, 9, 27), xticklabels=(1, 3, 9, 27))
left.legend(fontsize=8)
right.plot(*final[top, :2].T + np.random.default_rng(0).uniform(-5e-4, 5e-4, (2, 50)), "o", alpha=0.6)
right.set(
    xlabel="validation accuracy, seed 0",
    ylabel="the same configurations, seed 1",
    title="What does one seed tell of the best 50?",
)
plt.show()

# %% [markdown]
# One seed tells good from poor: that is enough to stop the poor ones early. Among the good ones **one seed ranks almost
# nothing**: they differ by a few images out of 360, and so do their seeds. The best of many trials is partly the luckiest
# one. What counts afterwards is its *test* accuracy, and methods are compared over many repetitions.

# %% [markdown]
# ## Draw, or lay a grid
#
# ### Balise 1 · The space, and a grid in it · further · about 30 min
#
# A learning rate is searched by its ratio: from 0.001 to 0.01 is as far as from 0.1 to 1. An axis with `log=True` says so.
# Axes are Optuna's own: `CategoricalDistribution` has `.choices`; `FloatDistribution` and `IntDistribution` have `.low`,
# `.high` and `.log`, and both ends belong to them. A configuration is a dict `{name: value}`. A value that is not active is
# not in it: `active` is given, and a parent stands before its child.
#
# - **`draw(space, only_if, rng)`** returns one configuration, at random: every choice equally often, a float uniform on its
#   axis (on the logarithm, where it is a log axis), an integer as a Python `int`. Every integer gets its share, the ends
#   like the others: on a log axis about as often as $1/k$. `rng` is a NumPy `Generator`, the only source of chance.
# - **`grid(space, only_if, counts)`** returns a list of all configurations of a grid: every choice, and `counts[name]` values
#   (at least 2) on a numeric axis, ends included, even on its own scale; integers rounded. No configuration comes twice.
#
# About 12 lines each.
#
# <details><summary>Hint</summary>
#
# An integer k owns the stretch from k - 1/2 to k + 1/2: draw a float from low - 1/2 to high + 1/2, on the axis's scale, and
# round. `np.geomspace` and `np.linspace` include the ends. Build the grid axis by axis: a list of configurations, each
# of which becomes several, or stays what it is where the axis is not active. Small integer axes may round to the same.
# </details>


# %% tags=["setup"]
def active(name, config, only_if):
    """Whether a hyperparameter has a value, given what was chosen for those before it."""
    return all(config.get(parent) == value for parent, value in only_if.get(name, {}).items())


# %% tags=["balise-1"]
def draw(space, only_if, rng):
    """Draw a configuration: {name: value}, active ones only."""
    # BEGIN SOLUTION
    config = {}
    for name, axis in space.items():
        if not active(name, config, only_if):
            continue
        if isinstance(axis, CategoricalDistribution):
            config[name] = axis.choices[rng.integers(len(axis.choices))]
            continue
        half = 0.5 if isinstance(axis, IntDistribution) else 0
        low, high = axis.low - half, axis.high + half
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if axis.log else rng.uniform(low, high)
        value = min(max(round(value) if half else value, axis.low), axis.high)
        config[name] = value
    return config
    # END SOLUTION


def grid(space, only_if, counts):
    """List the configurations of a grid: counts[name] values on each numeric axis."""
    # BEGIN SOLUTION
    configs = [{}]
    for name, axis in space.items():
        if isinstance(axis, CategoricalDistribution):
            values = axis.choices
        else:
            values = (np.geomspace if axis.log else np.linspace)(axis.low, axis.high, counts[name]).tolist()
            if isinstance(axis, IntDistribution):
                values = sorted({round(value) for value in values})
        configs = [
            {**config, name: value} if active(name, config, only_if) else config
            for config in configs
            for value in (values if active(name, config, only_if) else values[:1])
        ]
    return configs
    # END SOLUTION


# %%
tp.check(1, draw, grid)

# %% [markdown]
# Bergstra and Bengio (2012): where a few axes matter, and nobody knows which, a grid tries the same few values of these over
# and over. Same number of trials, all 27 epochs long; the best by validation hands in its test accuracy.


# %%
def handed_in(configs, seed):
    """Test accuracy of the configuration that has the best validation accuracy, all trained to the end."""
    best = max(configs, key=lambda config: np.nan_to_num(table.curve(config, seed)[-1]))
    return table.test(best, seed)[-1]


def quartiles(values):
    """Median and quartiles in words."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{median:.4f} ({low:.4f} to {high:.4f})"


print("trials  learning rates tried  test accuracy: median (quartiles), of the grid the median of 3 seeds")
for counts in ({"learning_rate": 2}, {"learning_rate": 4}, {"learning_rate": 4, "momentum": 3, "width": 3}):
    laid = grid(SPACE, ONLY_IF, dict.fromkeys(SPACE, 2) | counts)
    found = []
    for repetition in range(100):
        rng = np.random.default_rng(repetition)
        drawn = [draw(SPACE, ONLY_IF, rng) for _ in laid]
        found.append(handed_in(drawn, repetition % 3))
    for name, configs, values in (
        ("grid", laid, [handed_in(laid, seed) for seed in range(3)]),
        ("random", drawn, found),
    ):
        print(
            f"{len(configs):6} {len({config['learning_rate'] for config in configs}):21}  {name:6} {quartiles(values)}"
        )

# %% [markdown]
# Random draws try as many learning rates as there are trials; the grid as many as somebody has allowed it, and one value more
# on one axis multiplies the whole. A grid is ahead only where its few values happen to be good ones, as may happen in the last
# row, and nobody knows that beforehand.

# %% [markdown]
# ## Stop early: successive halving
#
# ### Balise 2 · Successive halving · about 19 min
#
# `trials` is a list of trainings. `trials[i].train(epochs)` trains for so many **more** epochs and returns the value after them
# (accuracy, or a loss: then `maximize=False`).
#
# **`successive_halving(trials, first, eta, last, maximize=True)`**: all trials train for `first` epochs; the best
# `n // eta` of the `n` in a rung go on, but at least one, until they have `first * eta` epochs in all; and so on, as long
# as `first * eta**k` is at most `last`. Nothing is trained that does not go on. NaN is the worst value, whatever is sought;
# of equals, the trial with the lower number goes on. Returns the rungs, a list of pairs `(epochs in all, {trial number:
# value})`.
#
# **`halving_epochs(n, first, eta, last)`** returns how many epochs that takes, over all trials together, without training
# anything. About 12 and 7 lines.
#
# <details><summary>Hint</summary>
#
# Comparisons with NaN are all false, so a list that holds one is not sorted at all: give `sorted` a key, a tuple whose
# first entry is `math.isnan(value)`. A rung trains for the difference to the rung before.
# </details>


# %% tags=["balise-2"]
def successive_halving(trials, first, eta, last, maximize=True):
    """Train trials in rungs, the best 1 / eta of each go on. Returns [(epochs in all, {trial number: value})]."""
    # BEGIN SOLUTION
    rungs, going_on, done, epochs = [], range(len(trials)), 0, first
    while epochs <= last:
        values = {number: trials[number].train(epochs - done) for number in going_on}
        rungs.append((epochs, values))
        sign = -1 if maximize else 1
        order = sorted(values, key=lambda number: (math.isnan(values[number]), sign * values[number], number))
        going_on = order[: max(1, len(order) // eta)]
        done, epochs = epochs, epochs * eta
    return rungs
    # END SOLUTION


def halving_epochs(n, first, eta, last):
    """Epochs of successive halving with n trials, all together."""
    # BEGIN SOLUTION
    total, done, epochs = 0, 0, first
    while epochs <= last:
        total += n * (epochs - done)
        n = max(1, n // eta)
        done, epochs = epochs, epochs * eta
    return total
    # END SOLUTION


# %%
tp.check(2, successive_halving, halving_epochs)


# %% [markdown]
# Does it find as good a configuration as random search with the same number of epochs? And does it reach the pruner of
# Optuna, which decides about each trial at once, by what was seen before? All hand in the test accuracy of what is best by
# validation.


# %%
import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
FIRST, ETA, TRIALS = 1, 3, 54
BUDGET = halving_epochs(TRIALS, FIRST, ETA, table.epochs)


class Trial:
    """A training that is looked up in the table."""

    def __init__(self, config, seed):
        self.config, self.seed, self.epochs = config, seed, 0

    def train(self, epochs):
        self.epochs += epochs
        return table.curve(self.config, self.seed)[self.epochs - 1]

    def test(self):
        return table.test(self.config, self.seed)[self.epochs - 1]


def by_random(repetition, budget=BUDGET):
    rng = np.random.default_rng(repetition)
    return handed_in([draw(SPACE, ONLY_IF, rng) for _ in range(budget // table.epochs)], repetition % 3)


def by_halving(repetition, budget=BUDGET):
    rng = np.random.default_rng(repetition)
    trials = [Trial(draw(SPACE, ONLY_IF, rng), repetition % 3) for _ in range(budget * TRIALS // BUDGET)]
    _, values = successive_halving(trials, FIRST, ETA, table.epochs)[-1]
    return trials[max(values, key=lambda number: np.nan_to_num(values[number]))].test()


def by_optuna(repetition, budget=BUDGET):
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST, reduction_factor=ETA)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(repetition), pruner=pruner)
    spent, best = 0, (0, 0.0, None)
    while spent < budget:
        asked = study.ask(SPACE)
        config = {name: value for name, value in asked.params.items() if active(name, asked.params, ONLY_IF)}
        trial, epochs = Trial(config, repetition % 3), FIRST
        while spent + epochs - trial.epochs <= budget and epochs <= table.epochs:
            spent += epochs - trial.epochs
            value = np.nan_to_num(trial.train(epochs - trial.epochs))
            best = max(best, (epochs, value, trial), key=lambda one: one[:2])
            asked.report(value, epochs)
            if asked.should_prune():
                break
            epochs *= ETA
        else:
            spent = budget if epochs <= table.epochs else spent
        study.tell(asked, value)
    return best[2].test()


race = {
    method.__name__: [method(repetition) for repetition in range(100)] for method in (by_random, by_halving, by_optuna)
}
print(f"{BUDGET} epochs each, 100 repetitions, test accuracy: median (quartiles)")
for name, values in race.items():
    print(f"{name:10} {quartiles(values)}")

# %% [markdown]
# ## Never wait: ASHA
#
# Successive halving waits at each rung for the slowest worker. The asynchronous one does not: whoever is free asks for a job,
# and whatever is known at that moment decides. It promotes a few trials too many, which costs less than waiting does (Li et
# al. 2020).
#
# ### Balise 3 · Asynchronous successive halving · further · about 21 min
#
# Write the class `ASHA(first, last, eta, maximize=True)`. Rung k is reached with `first * eta**k` epochs, at most `last`.
#
# - **`job()`** returns `(trial number, epochs in all)`: up to where that trial shall be trained. From the highest rung down
#   (the last one promotes nobody): of all that have *reported* in the rung, promoted ones too, take the best
#   `how many // eta`. If one of them was not promoted yet, it is now: the best such one. If no rung has any: a new trial,
#   numbered 0, 1, 2, ..., for `first` epochs. There is always a job.
# - **`report(number, epochs, value)`** says that a trial has been trained to so many epochs in all, with this value. NaN is
#   worst. Several workers may report before one of them asks.
#
# About 22 lines.
#
# <details><summary>Hint</summary>
#
# One dict `{trial number: value}` a rung, filled by `report`, and one set a rung of those that were promoted from it. Put a
# trial into the set when its job is handed out, not when it reports: another worker asks before that.
# </details>


# %% tags=["balise-3"]
class ASHA:
    """Hand out jobs: promote from the highest rung that can, else start a new trial."""

    def __init__(self, first, last, eta, maximize=True):
        # BEGIN SOLUTION
        self.eta, self.sign, self.started = eta, -1 if maximize else 1, 0
        self.epochs = [first]
        while self.epochs[-1] * eta <= last:
            self.epochs.append(self.epochs[-1] * eta)
        self.rungs = [{} for _ in self.epochs]
        self.promoted = [set() for _ in self.epochs]
        # END SOLUTION

    def job(self):
        """What a free worker does next: (trial number, epochs in all)."""
        # BEGIN SOLUTION
        for k in reversed(range(len(self.epochs) - 1)):
            values = self.rungs[k]
            order = sorted(values, key=lambda number: (math.isnan(values[number]), self.sign * values[number]))
            for number in order[: len(order) // self.eta]:
                if number not in self.promoted[k]:
                    self.promoted[k].add(number)
                    return number, self.epochs[k + 1]
        self.started += 1
        return self.started - 1, self.epochs[0]
        # END SOLUTION

    def report(self, number, epochs, value):
        """Take in the value of a trial after so many epochs in all."""
        # BEGIN SOLUTION
        self.rungs[self.epochs.index(epochs)][number] = value
        # END SOLUTION


# %%
tp.check(3, ASHA)

# %% [markdown]
# A simulator: workers of unequal speed, and a heap that knows who is free next. The fourth worker is three times slower.


# %% tags=["setup"]
def simulate(asha, train, speeds, until):
    """Let workers do asha's jobs until the clock says `until`.

    train(number, epochs in all) gives the value; speeds: seconds an epoch of each worker.
    Returns [(worker, trial number, epochs in all, start, end)], times in seconds.
    """
    trained, jobs, free = {}, [], [(0.0, worker, None) for worker in range(len(speeds))]
    while free[0][0] < until:
        now, worker, finished = heapq.heappop(free)
        if finished is not None:
            asha.report(*finished)
        number, epochs = asha.job()
        end = now + speeds[worker] * (epochs - trained.get(number, 0))
        trained[number] = epochs
        jobs.append((worker, number, epochs, now, end))
        heapq.heappush(free, (end, worker, (number, epochs, train(number, epochs))))
    return jobs


def with_barriers(n, speeds, first=1, eta=3, last=27):
    """The same for successive halving, which waits at each rung for all workers."""
    jobs, now, done, epochs = [], 0.0, 0, first
    while epochs <= last:
        free = [(now, worker) for worker in range(len(speeds))]
        for number in range(n):
            start, worker = heapq.heappop(free)
            heapq.heappush(free, (start + speeds[worker] * (epochs - done), worker))
            jobs.append((worker, number, epochs, start, start + speeds[worker] * (epochs - done)))
        now, n, done, epochs = max(end for end, _ in free), max(1, n // eta), epochs, epochs * eta
    return jobs


# %%
SPEEDS = [1.0, 1.0, 1.0, 3.0]  # seconds an epoch
rng = np.random.default_rng(0)
configs = [draw(SPACE, ONLY_IF, rng) for _ in range(200)]
waiting = with_barriers(27, SPEEDS)
until = max(job[-1] for job in waiting)
never = simulate(ASHA(1, 27, 3), lambda number, epochs: table.curve(configs[number], 0)[epochs - 1], SPEEDS, until)
_, both = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
for axes, name, jobs in zip(both, ("successive halving", "ASHA"), (waiting, never)):
    busy = sum(min(end, until) - start for *_, start, end in jobs) / until / len(SPEEDS)
    finished = sum(epochs == 27 and end <= until for _, _, epochs, _, end in jobs)
    for worker, _, epochs, start, end in jobs:
        colour = f"C{round(math.log(epochs, 3))}"
        axes.barh(worker, end - start, left=start, color=colour, edgecolor="white", linewidth=0.5)
    axes.set(
        ylabel="worker",
        yticks=range(4),
        xlim=(0, until),
        title=f"{name}: trials finished: {finished}, workers busy {busy:.0%} of the time",
    )
both[1].set(xlabel="seconds (simulated); colours: rungs of 1, 3, 9, 27 epochs")
plt.show()


# %%
def by_asha(repetition, budget=BUDGET):
    """Four workers of equal speed, until the budget is spent."""
    rng, trials, spent, best = np.random.default_rng(repetition), [], 0, (0, 0.0, None)
    asha, running = ASHA(FIRST, table.epochs, ETA), []
    while True:
        number, epochs = asha.job()
        if number == len(trials):
            trials.append(Trial(draw(SPACE, ONLY_IF, rng), repetition % 3))
        spent += epochs - trials[number].epochs
        if spent > budget:
            return best[2].test()
        value = trials[number].train(epochs - trials[number].epochs)
        best = max(best, (epochs, np.nan_to_num(value), trials[number]), key=lambda one: one[:2])
        running.append((number, epochs, value))
        if len(running) == 4:  # one of the four is ready
            asha.report(*running.pop(0))


race["by_asha"] = [by_asha(repetition) for repetition in range(100)]
print(f"{BUDGET} epochs each, 100 repetitions, test accuracy: median (quartiles)")
for name, values in race.items():
    print(f"{name:10} {quartiles(values)}")

# %% [markdown]
# Compare the medians of the last three with the quartiles beside them: for the same epochs, it is no loss never to wait. What
# is won is the time that stood white in the upper picture. The more workers there are, and the more their speeds differ, the
# more of it there is.

# %% [markdown]
# ## Learn from what was tried: Bayesian search
#
# Random search forgets: its twentieth trial is drawn like its first. **Bayesian search** fits a model to what was tried, and
# asks it where the next trial is worth most. The model is a *Gaussian process*: for any point $x$ it says which value to expect,
# $\mu(x)$, and how sure it is, $\sigma(x)$: nearly certain close to what was tried, unsure far from it. Both count. How much
# more than the best value so far, $f^\star$, will $x$ bring? If its value is normally distributed, on average
#
# $$\mathrm{EI}(x) = \mathbb{E}\big[\max(f(x) - f^\star, 0)\big]
# = (\mu - f^\star)\,\Phi(z) + \sigma\,\varphi(z), \qquad z = \frac{\mu - f^\star}{\sigma},$$
#
# with $\Phi$ and $\varphi$, distribution and density of the standard normal. That is the **expected improvement** (Jones et al.,
# 1998): large where the mean is high, or where nobody knows yet. The point with the largest one is tried next.
#
# A Gaussian process measures similarity by distance, so configurations become points of a cube: each value by its place on its
# axis, logarithmic where the axis is, from 0 to 1. Where there is no momentum, it counts as 0. Our search chooses among the
# table's points.

# %% tags=["setup"]
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern
from threadpoolctl import threadpool_limits


def in_cube(config):
    """A configuration of the table as a point, six numbers between 0 and 1."""
    place = []
    for name, axis in table.axes.items():
        value = config.get(name, axis[0])
        if name in ("learning_rate", "batch_size", "width", "weight_decay"):
            place.append(math.log(value / axis[0]) / math.log(axis[-1] / axis[0]))
        else:
            place.append(axis.index(value) / (len(axis) - 1))
    return place


def surrogate(length=1.0):
    """A Gaussian process. length: the distance in the cube over which values change; not fitted, so that it is quick."""
    return GaussianProcessRegressor(Matern(length, nu=2.5), alpha=0.01, optimizer=None, normalize_y=True)


points = np.array([in_cube(config) for config in table.configurations])  # (936, 6)
finals = np.array(
    [[table.curve(config, s)[-1] for s in range(table.seeds)] for config in table.configurations]
)  # (936, 3)

# %% [markdown]
# ### Balise 4 · Expected improvement, and the search · further · about 18 min
#
# **`expected_improvement(mean, std, best)`**: the formula above for NumPy arrays `mean` and `std` of one shape, any; `best` is
# a number. We look for the *largest* value. Where `std` is 0, nothing is unknown: the improvement is `mean - best`, or 0 where
# that is negative, and never NaN. About 3 lines.
#
# **`bayesian_search(objective, points, model, n_first, n_trials, rng)`**: `points` has the shape (points, d). `objective(k)`
# tries the point at place `k`, an int, and returns its value; NaN if it has diverged. `model` has scikit-learn's two methods:
# `model.fit(x, y)` with `x` (n, d), `y` (n,), and `model.predict(x, return_std=True)`, which returns `(mean, std)`, (n,) each.
#
# First try `n_first` different points drawn with `rng`. Then, until `n_trials` points are tried in all: fit the model to all
# that was tried so far, and try the point with the largest expected improvement over the best value so far. Nothing is tried
# twice. A model cannot be fitted to NaN, but it should learn to keep away: tell it the lowest value seen so far instead (one
# of the first points has a value, you may assume). Return `(tried, values)`, two lists in the order of the trials; a NaN stays
# NaN there. About 12 lines.
#
# <details><summary>Hint</summary>
#
# `norm.cdf`, `norm.pdf`; `np.maximum(std, 1e-12)` keeps the division finite, and gives what is asked for where `std` is 0.
# `rng.choice(n, size, replace=False)`. `np.nanmin`, `np.nanmax`, `np.where(np.isnan(...), ...)`. Before the `argmax`, set
# the expected improvement of what was tried to `-np.inf`: 0 is not enough, all others may be 0 as well.
# </details>


# %% tags=["balise-4"]
def expected_improvement(mean, std, best):
    """E[max(f - best, 0)] for f normal with mean and std, arrays of one shape; best is a number."""
    # BEGIN SOLUTION
    gain = mean - best
    z = gain / np.maximum(std, 1e-12)
    return gain * norm.cdf(z) + std * norm.pdf(z)
    # END SOLUTION


def bayesian_search(objective, points, model, n_first, n_trials, rng):
    """Try n_trials of the points (n, d), the first n_first at random. Returns (tried, values) in order of the trials."""
    # BEGIN SOLUTION
    tried = rng.choice(len(points), n_first, replace=False).tolist()
    values = [objective(k) for k in tried]
    while len(tried) < n_trials:
        model.fit(points[tried], np.where(np.isnan(values), np.nanmin(values), values))
        mean, std = model.predict(points, return_std=True)
        promise = expected_improvement(mean, std, np.nanmax(values))
        promise[tried] = -np.inf
        tried.append(int(promise.argmax()))
        values.append(objective(tried[-1]))
    return tried, values
    # END SOLUTION


# %%
tp.check(4, expected_improvement, bayesian_search)

# %% [markdown]
# One axis at first, so that it can be drawn: thirteen learning rates of one SGD, two of them tried at random. Where does the
# model want to look next, after three, five and eight trials?

# %% jupyter={"source_hidden": true}
rates = np.array(table.axes["learning_rate"])
others = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 64, "width": 24, "weight_decay": 1e-5}
line = np.linspace(0, 1, len(rates))[:, None]  # (13, 1)
heights = [table.curve(others | {"learning_rate": rate})[-1] for rate in rates]
tried, found = bayesian_search(lambda k: heights[k], line, surrogate(0.3), 2, 9, np.random.default_rng(3))
fine = np.linspace(0, 1, 200)[:, None]
figure, grid_of_axes = plt.subplots(
    2, 3, figsize=(9.5, 4), layout="constrained", sharex=True, sharey="row", height_ratios=(2, 1)
)
for (upper, lower), n in zip(grid_of_axes.T, (3, 5, 8)):
    known = np.where(np.isnan(found[:n]), np.nanmin(found[:n]), found[:n])
    mean, std = surrogate(0.3).fit(line[tried[:n]], known).predict(fine, return_std=True)
    axis = 1e-4 ** (1 - fine[:, 0])
    upper.fill_between(axis, mean - 2 * std, mean + 2 * std, alpha=0.2)
    upper.plot(axis, mean, label="mean, and two standard deviations")
    upper.plot(rates, heights, ".", color="0.6", label="the table (not known to the search)")
    upper.plot(rates[tried[:n]], known, "o", color="C3", label="tried")
    upper.set(title=f"after {n} trials", ylim=(-0.3, 1.6))
    untried = np.delete(np.arange(len(rates)), tried[:n])
    promise = expected_improvement(mean, std, known.max())
    lower.plot(axis, promise, color="C2")
    lower.plot(rates[untried], np.interp(line[untried, 0], fine[:, 0], promise), ".", color="C2", label="not tried yet")
    lower.axvline(rates[tried[n]], color="C2", linestyle=":")
    lower.set(xscale="log", xlabel="learning rate (dotted: next)")
grid_of_axes[0, 0].set_ylabel("accuracy")
grid_of_axes[1, 0].set_ylabel("expected\nimprovement")
grid_of_axes[0, 0].legend(fontsize=7, loc="lower center")
grid_of_axes[1, 0].legend(fontsize=7)
plt.show()

# %% [markdown]
# Now all six axes, 936 points, a hundred repetitions each with draws of its own. The seed of the training changes from
# repetition to repetition. **Before you run the cell, commit yourself**: 20 trials of Bayesian search, 5 of them at random, find
# some best value. How many trials does random search need for as good a one?

# %%
guess_trials = None  # such as 100


# %%
def best_so_far(values):
    return np.maximum.accumulate(np.nan_to_num(values))


MORE = 120  # trials of random search


def repeated():
    """Best validation accuracy in percent after each trial: Bayesian (100, 20), random (100, MORE)."""
    by_model, by_chance = [], []
    for repetition in range(100):
        rng, column = np.random.default_rng(repetition), finals[:, repetition % table.seeds]
        tried = bayesian_search(lambda k, column=column: column[k], points, surrogate(), 5, 20, rng)[1]
        by_model.append(best_so_far(tried))
        by_chance.append(best_so_far(column[rng.choice(len(points), MORE, replace=False)]))
    return 100 * np.array(by_model), 100 * np.array(by_chance)


with threadpool_limits(1):
    by_model, by_chance = repeated()


def as_good(statistic):
    """How many trials of random search it takes, by this statistic of the repetitions; None: more than MORE."""
    enough = statistic(by_chance, axis=0) >= statistic(by_model[:, -1])
    return int(enough.argmax()) + 1 if enough.any() else None


for name, bests in (("Bayesian", by_model), ("random", by_chance)):
    low, middle, high = np.percentile(bests[:, 19], (25, 50, 75))
    print(
        f"{name:<8} after 20 trials: best validation accuracy {middle:.2f} % ({low:.2f} to {high:.2f}), mean {bests[:, 19].mean():.2f} %"
    )
print(
    f"random search is as good after {as_good(np.median)} trials by the median, {as_good(np.mean)} by the mean; your guess: {guess_trials}"
)
good = finals[(finals > np.nanmedian(finals)).all(axis=1)]
print(
    f"one image more or less: {100 / table.images[0]:.2f} points; another seed: {100 * good.std(axis=1, ddof=1).mean():.2f} points (standard deviation)"
)

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, bests in (("Bayesian", by_model), ("random", by_chance)):
    low, middle, high = np.percentile(bests, (25, 50, 75), axis=0)
    axes.plot(range(1, len(middle) + 1), middle, label=f"{name}: median, quartiles")
    axes.fill_between(range(1, len(middle) + 1), low, high, alpha=0.2)
axes.set(xlabel="trials", ylabel="best validation accuracy (%)", ylim=(93, 99.5), title="What does the model save?")
axes.legend()
plt.show()

# %% [markdown]
# Compare what the model saves in trials with the last line above. Where a good part of all configurations is nearly equally
# good, as here, drawing twenty finds one of them, and what is left to win is about what another seed changes: a single run of
# both would show nothing. A model pays where a trial is expensive and good ones are rare. It also has a price that the figure
# does not show: each proposal waits for all results before it, so 20 trials are 15 trainings in a row after the first five.
# Random search can make all of them at once. With many workers, one pretends that running trials have returned, say, their
# mean, and proposes the next one (Ginsbourger et al., 2010); Optuna's default sampler, TPE, replaces the Gaussian process by two
# densities, of good and of poor trials (Bergstra et al., 2011), which costs less where there are thousands.

# %% [markdown]
# ## Change while training: populations
#
# Every search so far looks for *constants*. But the learning rate that is best for the first epoch is rarely the best one for
# the last. **Population based training** (Jaderberg et al., 2017) trains a population side by side, each member with a network
# and hyperparameters of its own. After every few epochs
#
# - **exploit**: a poor member gives up, and copies a good one: weights, state of the optimizer, hyperparameters;
# - **explore**: then it changes its hyperparameters a little, so that the two do not do the same from now on.
#
# Nobody starts again from zero: the whole search costs as much as training the population once, side by side, and what comes
# out is a network *and a schedule*. On a supercomputer each member has a GPU, and what members exchange is a checkpoint. The
# price: there is no table of such a search, because a member's past is not one configuration. So this one is live, on small
# networks. A third part of the digits, the test images, plays no part in the search.

# %% tags=["setup"]
from dataclasses import dataclass

MEMBERS, GENERATIONS, REPETITIONS = 12, 10, 20 if FULL else 5
torch.set_num_threads(1)  # networks this small lose time on waking others
digits = data.digits(val_share=0.4)
train_x, train_y = digits.train_x.flatten(1), digits.train_y
val_x, test_x = (digits.val_x.flatten(1)[k::2] for k in (0, 1))
val_y, test_y = (digits.val_y[k::2] for k in (0, 1))


@dataclass
class Member:
    """One of a population."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    hyperparameters: dict  # {name in optimizer.param_groups: value}, such as {"lr": 0.1, "weight_decay": 1e-4}
    value: float = math.nan  # validation accuracy when it was last looked at; NaN: diverged


def new_member(rng):
    """A network with random weights, SGD with momentum, a random rate and weight decay."""
    torch.manual_seed(int(rng.integers(2**31)))
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    drawn = {"lr": 10 ** rng.uniform(-3, 0), "weight_decay": 10 ** rng.uniform(-6, -2)}
    return Member(network, torch.optim.SGD(network.parameters(), momentum=0.9, **drawn), drawn)


def share_right(network, x, y):
    """The share of right answers; NaN where the network's output is no longer finite."""
    with torch.no_grad():
        logits = network(x)
    return (logits.argmax(1) == y).double().mean().item() if logits.isfinite().all() else math.nan


def train_epoch(member, rng):
    """One epoch of batches of 128, then a look at the validation images."""
    for batch in torch.from_numpy(rng.permutation(len(train_y))).split(128):
        loss = nn.functional.cross_entropy(member.network(train_x[batch]), train_y[batch])
        member.optimizer.zero_grad()
        loss.backward()
        member.optimizer.step()
    member.value = share_right(member.network, val_x, val_y)


# %% [markdown]
# ### Balise 5 · Exploit and explore · further · about 20 min
#
# Three functions, about 4, 5 and 9 lines. `rng` is a NumPy generator: draw everything from it. Write them for any
# network and any optimizer of PyTorch: a network may have buffers (batch norm's statistics), an optimizer several
# `param_groups` (all with the same hyperparameters).
#
# **`exploit(member, better)`**: `member` becomes what `better` is now. From here on it must train *exactly* as `better` would
# have, and what one of them does later must not reach the other. `better` stays as it is. Returns nothing.
#
# **`explore(member, rng)`**: multiply each of `member.hyperparameters` by 0.8 or by 1.25, drawn for each anew. The dictionary
# is only the member's note of them: what it trains with stands in its optimizer. Weights, and what the optimizer has gathered,
# stay. Returns nothing.
#
# **`evolve(members, rng)`**: the lowest quarter by `value` (`len(members) // 4`, but at least one) copy, each, a member drawn
# from the highest quarter, and explore. The others stay as they are, and all stay in their places in the list. A `value` of NaN
# is the worst. Returns a list of pairs of places: (who copied, whom).
#
# <details><summary>Hint</summary>
#
# `state_dict()` of a network has its buffers too; `load_state_dict` of a network copies the numbers. That of an *optimizer*
# keeps the very tensors that it is given: `copy.deepcopy` them first. `for group in optimizer.param_groups:
# group.update(...)`. Every comparison with NaN is false, so sorting by NaN puts nothing in order: sort by
# `-math.inf` in its place.
# </details>


# %% tags=["balise-5"]
def exploit(member, better):
    """Make member a copy of better: weights, buffers, optimizer's state, hyperparameters; nothing is shared."""
    # BEGIN SOLUTION
    member.network.load_state_dict(better.network.state_dict())
    member.optimizer.load_state_dict(copy.deepcopy(better.optimizer.state_dict()))
    member.hyperparameters = dict(better.hyperparameters)
    # END SOLUTION


def explore(member, rng):
    """Multiply each hyperparameter by 0.8 or 1.25, in the optimizer too."""
    # BEGIN SOLUTION
    for name in member.hyperparameters:
        member.hyperparameters[name] *= float(rng.choice((0.8, 1.25)))
    for group in member.optimizer.param_groups:
        group.update(member.hyperparameters)
    # END SOLUTION


def evolve(members, rng):
    """The lowest quarter copies members of the highest, and explores. Returns [(who copied, whom), …]."""
    # BEGIN SOLUTION
    values = [-math.inf if math.isnan(member.value) else member.value for member in members]
    order = sorted(range(len(members)), key=values.__getitem__)
    quarter = max(1, len(members) // 4)
    pairs = [(poor, int(rng.choice(order[-quarter:]))) for poor in order[:quarter]]
    for poor, good in pairs:
        exploit(members[poor], members[good])
        explore(members[poor], rng)
    return pairs
    # END SOLUTION


# %%
tp.check(5, exploit, explore, evolve)

# %% [markdown]
# Now against the same number of members, begun with the same weights and the same rates, that keep them. **Before you run the
# cell, commit yourself**: of the network that is best on the validation images, how many more *test* images, in percent, does
# the population get right? And the median network of the population?

# %%
guess_best, guess_median = None, None  # percentage points, such as 2.0, 2.0


# %%
def trained(seed, evolving):
    """(members, rates, pairs): rates (generations, members), pairs of each generation but the last."""
    rng = np.random.default_rng(seed)
    members, rates, pairs = [new_member(rng) for _ in range(MEMBERS)], [], []
    for generation in range(GENERATIONS):
        rates.append([member.hyperparameters["lr"] for member in members])
        for member in members:
            train_epoch(member, rng)
        if evolving and generation < GENERATIONS - 1:
            pairs.append(evolve(members, rng))
    return members, np.array(rates), pairs


def on_test(members):
    """Test accuracy in percent of the best on the validation images, and the median of all."""
    found = [100 * share_right(member.network, test_x, test_y) for member in members]
    best = max(range(len(members)), key=lambda k: np.nan_to_num(members[k].value))
    return found[best], np.nanmedian(found)


runs = {evolving: [trained(seed, evolving) for seed in range(REPETITIONS)] for evolving in (False, True)}
scores = {evolving: np.array([on_test(members) for members, *_ in runs[evolving]]) for evolving in runs}
print(f"measured, test accuracy in %, median (quartiles) of {REPETITIONS} repetitions of {MEMBERS} members:")
for evolving, name in ((False, "fixed rates"), (True, "population based")):
    low, middle, high = np.percentile(scores[evolving], (25, 50, 75), axis=0)
    text = [f"{m:.1f} ({a:.1f} to {b:.1f})" for a, m, b in zip(low, middle, high)]
    print(f"{name:<17} best {text[0]}   median member {text[1]}")
more = np.median(scores[True] - scores[False], axis=0)
print(f"more, median: best {more[0]:+.1f}, median member {more[1]:+.1f}; your guess: {guess_best}, {guess_median}")


# %% jupyter={"source_hidden": true}
def lineage(members, rates, pairs):
    """The learning rates along which the best network was trained: its own, and before those of whom it copied."""
    k = max(range(len(members)), key=lambda k: np.nan_to_num(members[k].value))
    path = []
    for generation in reversed(range(len(rates))):
        path.append(rates[generation][k])
        k = dict(pairs[generation - 1]).get(k, k) if generation else k
    return path[::-1]


figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained", width_ratios=(3, 2))
epochs = range(1, GENERATIONS + 1)
members, rates, pairs = runs[True][0]
left.plot(epochs, rates, color="0.8", linewidth=1)
for run in runs[True]:
    left.plot(epochs, lineage(*run), color="C0", alpha=0.6)
left.plot([], [], color="C0", label="way to the best network, each repetition")
left.plot([], [], color="0.8", label="all members of the first")
left.set(yscale="log", xlabel="epoch", ylabel="learning rate", title="Which schedules does the population find?")
left.legend(fontsize=8)
for k in (0, 1):
    for evolving in runs:
        place = k + 0.15 * (2 * evolving - 1)
        right.plot([place] * REPETITIONS, scores[evolving][:, k], "o", color=f"C{1 - evolving}", alpha=0.6)
        right.hlines(np.median(scores[evolving][:, k]), place - 0.1, place + 0.1, color=f"C{1 - evolving}")
right.plot([], [], "o", color="C0", label="population based")
right.plot([], [], "o", color="C1", label="fixed rates")
right.set(xticks=(0, 1), xticklabels=("best on validation", "median member"), xlim=(-0.5, 1.5),
          ylabel="test accuracy (%)", title="What does it gain?")  # fmt: skip
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# What a population gains is above all that nobody stays poor: with fixed rates, most of the machine trains networks that nobody
# will use. Its *best* network gains little here, if anything: among twelve rates drawn at random one is good already, and the
# points of the right picture overlap. Read the lines with the same care. A member is copied because it is good *now*, so the
# schedule is greedy: it takes what pays in the next epoch, and falls too late or too early where patience would have paid.
# Where a schedule is known to be good (a warm-up, then a cosine to zero), searching its peak as a constant is often enough;
# populations pay where none is known, as in reinforcement learning, where they come from.

# %% [markdown]
# ## A study on many nodes: Optuna
#
# On a supercomputer a search is a few hundred jobs that start and end when the queue says so, and some are killed. They
# need no master: **one file that all of them read and write is enough**. Optuna knows three things:
#
# - a **trial** is one configuration, and how far it came. Its state is RUNNING, then COMPLETE, PRUNED (stopped early) or
#   FAIL;
# - a **study** is all trials so far, and whether the value is to be minimised or maximised;
# - a **storage** keeps the study: in memory (gone with the process), in a database, or in a **journal**, a file to which
#   every process appends what it does, a line at a time.
#
# Two more belong to the process, not to the study: the **sampler** proposes configurations (by default TPE, a relative of
# your Bayesian search: it models where good trials lie and where bad ones do, and draws where the first is large beside the
# second), the **pruner** stops trials. *The storage keeps neither*: each worker brings its own.

# %% tags=["setup"]
import contextlib
import os
import secrets
import signal
import tempfile
import threading
import time
from pathlib import Path

import optuna
import psutil
import torch.distributed as dist
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch.utils.tensorboard import SummaryWriter

from dlojz_tp import recorded, tensorboard

try:
    import ray.tune
except ImportError:  # it is not installed everywhere
    ray = None

optuna.logging.set_verbosity(optuna.logging.WARNING)  # else a line a trial


def train(config, pause=0.01):
    """Train with a configuration: yields the validation accuracy after each epoch, NaN once diverged.

    It reads the table, and waits a little for each epoch. Nothing is computed for epochs that nobody asks for.
    """
    for accuracy in data.search_table().curve(config, seed=0):
        time.sleep(pause)
        yield float(accuracy)


# %% [markdown]
# ### Balise 6 · One study, many workers · further · about 31 min
#
# **`objective(trial, train)`** is one trial. Ask `trial` for a configuration: a dictionary with the names and the ranges of
# `SPACE`, and `momentum` only where the optimizer is `"sgd"`. `train(config)` is a generator as above. After each epoch
# (the first is 1), `report` its accuracy, then ask the pruner: where it says stop, the trial ends as PRUNED and trains no
# further. So does one that has diverged (NaN), at once: a value of NaN would make it a FAIL, as if it had never been
# tried. Return the accuracy after the last epoch.
#
# **`make_study(path)`** makes the study `"search"`, to be maximised, in a journal in the file `path`. It is called once
# before the workers start: two that create it at the same moment would clash. Called again later, when more jobs are
# submitted for the same search, it keeps all that is there.
#
# **`work(path, name, total, train)`** is what each worker runs:
#
# 1. It loads the study, with a `SuccessiveHalvingPruner` (`min_resource=1`, `reduction_factor=3`: ASHA, without
#    pausing). No two workers may draw the same numbers.
# 2. A worker that was killed has left a trial RUNNING, for ever. `name`, a string, belongs to one living worker at a
#    time, as the number of a task in an array of jobs does. So whatever a worker of *this* name has left running is lost: it becomes
#    FAIL. Trials of other names may be alive on another node: leave them alone. To be found later, a trial must carry the
#    name of its worker from its beginning.
# 3. As long as fewer than `total` trials of the study, those of all workers, are COMPLETE or PRUNED, it runs another one.
#    If there are enough already, it runs none, but has given up what it left.
#
# A lost configuration is not put in the queue again. If it was bad luck (the time limit), the sampler may come back to its
# neighbourhood; if it was the configuration (out of memory), it would kill the next worker, too. About 14, 3 and 12 lines.
#
# <details><summary>Hint</summary>
#
# `trial.suggest_categorical`, `suggest_float(name, low, high, log=True)`, `suggest_int`; `trial.should_prune()`,
# `optuna.TrialPruned`, which you raise. `JournalStorage(JournalFileBackend(path))` wants a `str`; `create_study(...,
# load_if_exists=True)`, `load_study`. `trial.set_user_attr(key, value)` before the objective starts, `trial.user_attrs`
# when you look for it; `study.get_trials(states=...)`, `study.tell(number, state=...)`. `study.optimize(f, n_trials=1)` runs one.
# </details>


# %% tags=["balise-6"]
def objective(trial, train):
    """One trial of a study: trains until the end or until the pruner says stop. Returns the last accuracy."""
    # BEGIN SOLUTION
    config = {
        "optimizer": trial.suggest_categorical("optimizer", ("sgd", "adamw")),
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
        "batch_size": trial.suggest_int("batch_size", 16, 256, log=True),
        "width": trial.suggest_int("width", 8, 72, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True),
    }
    if config["optimizer"] == "sgd":
        config["momentum"] = trial.suggest_float("momentum", 0.0, 0.99)
    for epoch, accuracy in enumerate(train(config), 1):
        trial.report(accuracy, epoch)
        if math.isnan(accuracy) or trial.should_prune():
            raise optuna.TrialPruned
    return accuracy
    # END SOLUTION


def make_study(path):
    """Make the study "search" in the journal `path`, to be maximised, or keep the one that is there."""
    # BEGIN SOLUTION
    storage = JournalStorage(JournalFileBackend(str(path)))
    optuna.create_study(study_name="search", storage=storage, direction="maximize", load_if_exists=True)
    # END SOLUTION


def work(path, name, total, train):
    """Worker `name`: give up what it left running, then run trials until `total` are complete or pruned, by all workers."""
    # BEGIN SOLUTION
    storage = JournalStorage(JournalFileBackend(str(path)))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.load_study(study_name="search", storage=storage, pruner=pruner)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("worker") == name:
            study.tell(trial.number, state=TrialState.FAIL)

    def named(trial):
        trial.set_user_attr("worker", name)
        return objective(trial, train)

    while len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) < total:
        study.optimize(named, n_trials=1)
    # END SOLUTION


# %%
tp.check(6, objective, make_study, work)

# %% [markdown]
# Three workers, 40 trials asked for. **Guess first:** how many will be finished at the end, exactly 40, or more? How many more at most?


# %%
WANTED = 40


def search(path, trials=WANTED, train=train):
    """On a rank: a worker of the study in `path`, under the name of its rank."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    work(path, f"rank {dist.get_rank()}", trials, train)


def load(path):
    """The study in a journal, as anybody may read it, while others write."""
    return optuna.load_study(study_name="search", storage=JournalStorage(JournalFileBackend(str(path))))


def summary(study):
    """How many trials are in which state, and how many epochs they took."""
    states = {state.name: len(study.get_trials(states=(state,))) for state in TrialState}
    epochs = sum(len(trial.intermediate_values) for trial in study.trials)
    return ", ".join(f"{n} {name}" for name, n in states.items() if n) + f"; {epochs} epochs"


folder = Path(tempfile.mkdtemp(prefix="dlojz-search-"))
make_study(folder / "ranks.journal")
start = time.perf_counter()
launch.ranks(search, folder / "ranks.journal", n=3, timeout=120)
study = load(folder / "ranks.journal")
print(f"3 workers, {time.perf_counter() - start:.1f} s: {summary(study)} instead of {27 * len(study.trials)}")
print(f"best: accuracy {study.best_value:.3f} with {study.best_params}")
print(f"the journal: {(folder / 'ranks.journal').stat().st_size / 1024:.0f} KiB, for example")
print(*(folder / "ranks.journal").read_text().splitlines()[:3], sep="\n")

# %% [markdown]
# There may be up to 42: to count and to begin are two steps, and others begin between them. Each worker can be late by
# one trial. Whoever needs the exact number must hold a lock over both steps; for a search it is not worth it.
#
# ### A worker that dies
#
# On a supercomputer the workers are an **array of jobs**: the same program, as often as you like, each with its number.
# The tasks need not start at the same time, and need not know of each other:
#
# ```bash
# # #!/bin/bash
# #SBATCH --array=0-15          # 16 workers; --array=0-999%64 runs 64 of 1,000 at a time
# #SBATCH --gres=gpu:1
# #SBATCH --time=120
# #SBATCH --requeue             # a task that its node has lost starts again, under the same number
# srun python worker.py "task $SLURM_ARRAY_TASK_ID"     # calls work(path, name, ...)
# ```
#
# The journal must lie where all nodes see it. `launch.job` does the same from a notebook, one job a worker (on a machine
# without a Slurm, here). Task 1 is killed in the third training that it begins, as if its time were over.


# %%
def task(path, name, trials, killed_in):
    """A task of the array: a worker that is killed in its training number `killed_in`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    begun = []

    def train_or_die(config):
        begun.append(config)
        if len(begun) == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(config)

    work(path, name, trials, train_or_die)


journal = folder / "array.journal"
make_study(journal)
job = launch.job(task, journal, "task 1", 12, 3, nodes=1, ranks_per_node=1, minutes=5)
with contextlib.suppress(launch.RankError):
    job.results()
print("task 1 was killed:   ", summary(load(journal)))
work(journal, "task 0", 8, train)  # the others go on; here, to save the time of another job
print("task 0 goes on:      ", summary(load(journal)))
work(journal, "task 1", 12, train)
print("task 1 has come back:", summary(load(journal)))

# %% [markdown]
# Nothing that was finished is lost: it was in the file. The trial that task 1 was in stayed RUNNING, whoever else worked,
# until a worker *of its name* came. If nobody comes back, `work(path, name, 0, train)` for each name of the array cleans up, and runs nothing.
#
# > **Heartbeats.** Optuna can find dead workers by itself where the storage is a database (`RDBStorage(...,
# > heartbeat_interval=60)`): a thread of each worker says now and then that it is alive. Journals have no heartbeat (Optuna
# > 5.0). A database on a supercomputer is a server that somebody must run; SQLite is none, and its locks do not hold on most network file systems.
#
# ## What Optuna draws · further
#
# Four of its pictures, with the study of the ranks above (`optuna.visualization.matplotlib`; the module without `matplotlib`
# draws with Plotly, to be turned and zoomed):

# %%
for name in ("timeline", "optimization_history", "intermediate_values", "param_importances"):
    with plt.rc_context(), warnings.catch_warnings():  # Optuna changes the style of all figures that follow
        warnings.simplefilter("ignore")  # each says that it is experimental
        axes = getattr(optuna.visualization.matplotlib, f"plot_{name}")(study)
        axes.figure.set_size_inches(8, 3)
        if name == "intermediate_values":
            axes.get_legend().remove()  # a line for each trial
        plt.show()

# %% [markdown]
# - **Timeline**: what each trial took, and how it ended. A worker that waits shows as a gap.
# - **History**: the red line is the best so far. Pruned trials are not in it.
# - **Intermediate values**: most lines end after 1 epoch, a few after 3 and 9. Do the lines cross later? Then stopping early has
#   its price.
# - **Importances** (PED-ANOVA): which parameter sets the best trials apart. It is computed from the trials that *ran to their
#   end*: only a few here. Run the cells again and look how much of the order stays: that is how far you may trust it.
#
# `pip install optuna-dashboard`, then `optuna-dashboard ranks.journal --host 127.0.0.1`, shows the same while the search runs. It asks for no
# password: whoever has a login on that machine can open it, and delete the study.

# %% [markdown]
# ## The same with Ray Tune · further
#
# Ray turns nodes into one pool: a master knows all of them, and sends trials to processes that it keeps there. Its part for
# searches is Tune. The names change, the ideas do not:
#
# | | Optuna | Ray Tune |
# |---|---|---|
# | who decides | every worker, from the file | one master |
# | a configuration | the trial is *asked* for each value, in plain code | a dictionary of **domains**, drawn before the trial begins |
# | stopping early | the trial asks, and raises | `tune.report` does not come back |
# | ASHA | `SuccessiveHalvingPruner` | `ASHAScheduler` |
#
# Ray is large (half a gigabyte). Where it is installed (`pip install "dlojz-tp[ray]"`), the cell after this balise searches
# with it; elsewhere it shows what was measured with it. The balise is judged in both cases.

# %% [markdown]
# ### Balise 7 · The same search for Ray · further · about 35 min
#
# - **`ray_space(space, only_if)`**: Ray's dictionary of domains for a space like `SPACE`: `tune.choice`, `tune.uniform`,
#   `tune.loguniform`, `tune.randint`, `tune.lograndint`. Optuna's bounds are both inside; **Ray leaves the upper bound of an
#   integer out**. A value that is not active cannot be absent here: it is `None`.
# - **`trainable(config, train)`** is one trial: it trains (`train` is the generator of balise 6, and gets only what is
#   active), and reports `{"accuracy": …}` after each epoch. A diverged training reports its NaN and ends.
# - **`tuner(train, space, only_if, n_trials, epochs, run_config)`** returns the `tune.Tuner`, not yet started: `n_trials`
#   drawn from the space; the accuracy is maximised, under ASHA with a first rung of 1 epoch, a factor of 3, and at most `epochs`;
#   a process serves trial after trial (`reuse_actors`), else each starts a new one.
#
# Import what you need of `ray` *inside* the functions: it is not installed everywhere. About 14, 5 and 10 lines.
#
# <details><summary>Hint</summary>
#
# `tune.sample_from(f)` calls `f(config)` with what was drawn before it, in the order of the dictionary; `domain.sample()`
# draws a value. `tune.with_parameters(trainable, train=train)` hands over what is no hyperparameter. `tune.TuneConfig`
# takes `metric`, `mode`, `num_samples`, `scheduler`, `reuse_actors`; `ASHAScheduler` from `ray.tune.schedulers` takes `max_t`,
# `grace_period`, `reduction_factor` (4, unless you say so).
# </details>


# %% tags=["balise-7"]
def ray_space(space, only_if):
    """The search space for Ray: {name: domain}; a value that is not active is None."""
    # BEGIN SOLUTION
    from ray import tune

    def domain(one):
        if isinstance(one, CategoricalDistribution):
            return tune.choice(list(one.choices))
        if isinstance(one, IntDistribution):
            return (tune.lograndint if one.log else tune.randint)(one.low, one.high + 1)
        return (tune.loguniform if one.log else tune.uniform)(one.low, one.high)

    def active(one, needs):
        drawn = domain(one)
        return lambda config: drawn.sample() if all(config[name] == value for name, value in needs.items()) else None

    return {
        name: tune.sample_from(active(one, only_if[name])) if name in only_if else domain(one)
        for name, one in space.items()
    }
    # END SOLUTION


def trainable(config, train):
    """One trial: report the accuracy after each epoch, end where it is NaN."""
    # BEGIN SOLUTION
    from ray import tune

    for accuracy in train({name: value for name, value in config.items() if value is not None}):
        tune.report({"accuracy": accuracy})
        if math.isnan(accuracy):
            return
    # END SOLUTION


def tuner(train, space, only_if, n_trials, epochs, run_config=None):
    """A tune.Tuner: n_trials configurations, ASHA (1, 3, epochs), the highest accuracy."""
    # BEGIN SOLUTION
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3)
    how = tune.TuneConfig(
        metric="accuracy", mode="max", num_samples=n_trials, scheduler=scheduler, reuse_actors=True
    )  # fmt: skip
    return tune.Tuner(
        tune.with_parameters(trainable, train=train),
        param_space=ray_space(space, only_if), tune_config=how, run_config=run_config,
    )  # fmt: skip
    # END SOLUTION


# %%
tp.check(7, ray_space, trainable, tuner)


# %%
def noted(train, file):
    """A training that first writes the time into a file: when did the trials begin?"""

    def training(config):
        with file.open("a") as lines:
            lines.write(f"{time.time()}\n")
        return train(config)

    return training


class Below(threading.Thread):
    """What the processes below this one take beyond what they had: the most bytes together, and processor seconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.before, self.most = threading.Event(), self.now(), np.zeros(2)

    def now(self):
        total = np.zeros(2)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss, sum(process.cpu_times()[:2])
        return total

    def run(self):
        while not self.over.wait(0.2):
            self.most = np.maximum(self.most, self.now() - self.before)


def figures(run, trials, workers=2):
    """Run a search whose training costs nothing, and see what it takes."""
    file, below, begin = folder / f"{run.__name__}.begun", Below(), time.time()
    below.start()
    run(noted(lambda config: train(config, pause=0), file), trials, workers)
    below.over.set()
    begun = sorted(float(line) for line in file.read_text().split())
    return {
        "seconds until the first trial": round(begun[0] - begin, 2),
        "milliseconds a trial": round(1000 * (begun[-1] - begun[0]) * workers / (len(begun) - 1), 1),
        "processor seconds": round(below.most[1], 1),
        "MiB of memory": round(below.most[0] / 2**20),
    }


def with_optuna(train, trials, workers):
    """The search of balise 6."""
    make_study(folder / "figures.journal")
    launch.ranks(search, folder / "figures.journal", trials, train, n=workers, timeout=120)


def with_ray(train, trials, workers):
    """The search of balise 7. Ray's processes start here, and end here."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
    }  # it reports to nobody, and prints nothing
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        run_config = ray.tune.RunConfig(storage_path=str(folder), verbose=0)
        found = tuner(train, SPACE, ONLY_IF, trials, 27, run_config).fit()
    finally:
        ray.shutdown()
    assert not found.errors, found.errors[0]
    best = found.get_best_result("accuracy", "max")
    config = {name: value for name, value in best.config.items() if value is not None}
    print(f"with Ray: accuracy {best.metrics['accuracy']:.3f} with {config}")


beside = {"Optuna, here": figures(with_optuna, 40)}
if ray is not None:
    beside["Ray, here"] = figures(with_ray, 40)
    versions = f"ray {ray.__version__}, optuna {optuna.__version__}, {os.cpu_count()} cores"
    versions += f", load {os.getloadavg()[0]:.1f} (of all programs, also those of others)"
    recorded.note("11_hyperparameter_search", "beside", {"versions": versions} | beside, on_cpu=True)
else:
    print("Ray is not installed here. Recorded with it:", recorded.where("11_hyperparameter_search"))
    kept = recorded.load("11_hyperparameter_search", "beside") or {}
    print(kept.pop("versions", "nothing is recorded yet"))
    beside |= {name.replace("here", "recorded"): value for name, value in kept.items()}
for name, values in beside.items():
    print(f"{name:18}", "; ".join(f"{value:g} {what}" for what, value in values.items()))

# %% [markdown]
# The training costs nothing in this measurement, 27 epochs are reported unless ASHA stops a trial, two processes work. So *a
# trial* is what the library itself takes for it. If yours train for an hour, none of it matters; if they train for a
# second, it does. The processor seconds are those of the whole run with its start; unlike the others, they hardly depend on how busy
# the machine is.
#
# | | Optuna, journal | Ray Tune |
# |---|---|---|
# | lines of our solution | 27 | 29 |
# | processes of its own | none | a master, a store of objects and agents on each node, a process a worker |
# | on Slurm | an array of jobs and a file that all see; tasks come and go as the queue lets them | **one** job with all nodes at once: `ray start --head` on the first, `ray start --address=…` on each of the others, then the program; open ports between nodes |
# | a worker dies | its trial is lost; yours to notice, as above | the master notices, and may run it again (`FailureConfig`) |
# | the master dies | there is none | all ends; `Tuner.restore` goes on from what it has written |
# | a trial over several nodes | yours to arrange: a worker is a job | `ScalingConfig` of Ray Train |
# | can pause a trial | no: it is stopped, or it goes on | yes, with checkpoints: population based training, HyperBand |
#
# > **Ray listens on all networks of the node**, and whoever gets through to it runs programs as you. Versions before 2.52 let
# > everybody in. Since then `RAY_AUTH_MODE=token` asks for a token, as in the cell above (the same on all nodes);
# > 2.59 does so by itself on one machine, 2.61 on several, says its documentation.
# >
# > Ray's search can take Optuna as its sampler: `tune_config=TuneConfig(search_alg=OptunaSearch())`. And the other way round, Optuna needs
# > nothing of Ray to run on a thousand nodes.

# %% [markdown]
# ## All trials on one page: TensorBoard · further
#
# TensorBoard has a page for searches, HParams: a table of all trials to sort and filter, and lines from parameters to results. It
# wants the parameters and the result of each run in that run's own folder.

# %%
logs = folder / "tensorboard"
for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
    if trial.value is None:  # it has diverged at once: nothing to show
        continue
    with SummaryWriter(str(logs / f"trial {trial.number:02}")) as writer:
        for epoch, accuracy in trial.intermediate_values.items():
            writer.add_scalar("accuracy", accuracy, epoch)
        results = {"last accuracy": trial.value, "epochs": len(trial.intermediate_values)}
        writer.add_hparams(trial.params, results, run_name=".")
board = tensorboard.start(logs)
board.show()

# %% [markdown]
# Open **HParams**, then *Parallel coordinates view*: drag a range on the axis of the last accuracy, and see where its lines
# come from. A pruned trial has the accuracy of a short training there. Sort by *epochs* to see how few trained to
# their end.

# %%
board.stop()

# %% [markdown]
# ## All of them, at equal budget
#
# Each method gets the same number of epochs, and hands in the **test** accuracy of what was best by validation. Bayesian search
# trains every trial to its end, as random search does. The population is not here: it has no table.


# %%
def by_bayes(repetition, budget=BUDGET):
    """Bayesian search, at most five trials at random."""
    seed, trials, rng = repetition % 3, budget // table.epochs, np.random.default_rng(repetition)
    tried, values = bayesian_search(lambda k: finals[k, seed], points, surrogate(), min(5, trials), trials, rng)
    return table.test(table.configurations[tried[np.nanargmax(values)]], seed)[-1]


METHODS = {"random": by_random, "Bayesian": by_bayes, "successive halving": by_halving, "ASHA": by_asha,
           "Optuna's pruner": by_optuna}  # fmt: skip
BUDGETS = [81, 243, 729]  # epochs: 3, 9 and 27 whole trainings
with threadpool_limits(1):
    reached = {name: [[method(repetition, budget) for repetition in range(30)] for budget in BUDGETS]
               for name, method in METHODS.items()}  # fmt: skip
print("test accuracy of what was best by validation, 30 repetitions: median (quartiles)")
for name, values in reached.items():
    print(f"{name:18}", "   ".join(f"{budget} epochs: {quartiles(of)}" for budget, of in zip(BUDGETS, values)))

# %% jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
for k, (name, values) in enumerate(reached.items()):
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
    places = np.array(BUDGETS) * 1.04 ** (k - 2)  # side by side, so that no bar hides another
    axes.errorbar(places, middle, (middle - low, high - middle), fmt="o-", capsize=3, label=name)
axes.set(
    xscale="log", xlabel="epochs of all trials together", ylabel="test accuracy", title="What does the same budget buy?"
)
axes.set_xticks(BUDGETS, BUDGETS)
axes.minorticks_off()
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# Read the bars before the points: where they overlap, another seed would have changed the order. Stopping early pays most where
# the budget is small, a few whole trainings. With more of it every method finds one of the many good configurations of this
# table, and what is left to gain is smaller than what a seed changes. A search space with few good points would keep them
# apart for longer. Whatever you compare, compare it like this.

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
