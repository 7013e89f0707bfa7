# %% [markdown]
# # Hyperparameter search, from a grid to a supercomputer · about 95 min, core 25
#
# Gradient descent finds the weights. What it needs itself (a learning rate, a batch size, a width, an optimizer) is found by
# trying, and each trial is a whole training: a search is the most expensive thing that most teams ever run, and the one most
# often reported from a single lucky run.
#
# You write the methods that make do with less: stop poor trials early, never let a worker wait, let a model of the past
# choose the next trial, change rates in the middle of a training. **Medians over a hundred repetitions** compare them.
# Then a search is spread over processes, with Optuna and with Ray. **What you will gain**, if each trial has a GPU of
# its own:

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
# Each rung after the first costs the same, $1 - 1/\eta$ of the first. A bar for each of 27 trials:

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
plt.show()

# %% [markdown]
# What this needs: that the order of trials after few epochs tells something of the order after many. Is it so? And how much
# does the order tell at all, when another seed would have changed it? That is measured first.

# %% [markdown]
# ## A benchmark made on the spot
#
# A method that draws at random must be run a hundred times before a median says anything. So all trainings were done once, when
# the data sets were made: a network with one hidden layer on the handwritten digits, in every configuration of a grid, with
# three seeds each. A search looks its trainings up. A proposal between the points of the grid counts as the nearest one.

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
# A training that diverges has an accuracy of NaN from then on. How well does the *order* of all 936 configurations under one seed
# agree with that under another? By 0.97, where 1 is the same order, and 0 chance. Guess before you run the next cell.

# %%
agree = tp.predict("The best 50 only: how well does their order agree under two seeds (1: the same, 0: chance)?", ...)

# %%
curves = np.array([[table.curve(config, seed) for seed in range(3)] for config in table.configurations])
final = np.nan_to_num(curves[:, :, -1])  # (936, 3); diverged: 0
winner = final[:, 0].argmax()
places = 1 + (final > final[winner]).sum(0)
print(f"best under seed 0: {final[winner, 0]:.4f}; under seeds 1 and 2: {final[winner, 1]:.4f}, {final[winner, 2]:.4f}")
print(f"its place there: {places[1]} and {places[2]}; diverged: {np.isnan(curves[:, :, -1]).mean():.1%} of the trainings")
top = np.argsort(-final.mean(1))[:50]
for name, rows in (("all 936", final), ("best 50 by their mean", final[top])):
    ranks = rows.argsort(0).argsort(0)
    order = np.corrcoef(ranks[:, :2].T)[0, 1]
    print(f"{name}: the order under two seeds agrees by {order:.2f}")
agree.shows(order, "{:.2f}", "The best differ by a few images out of 360, and so does one configuration under two seeds.")

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
# One seed tells good from poor: enough to stop the poor ones early. Among the good ones **one seed ranks almost nothing**, and the
# best of many trials is partly the luckiest. So what counts is its *test* accuracy, over many repetitions.

# %% [markdown]
# ## Draw, or lay a grid
#
# ### Balise 1 · The space, and a grid in it · further · about 9 min
#
# A learning rate is searched by its ratio: from 0.001 to 0.01 is as far as from 0.1 to 1. The axes of `SPACE` above are Optuna's: `log`
# says that an axis is meant by ratio; `low` and `high` both belong to it. A configuration is a dict `{name: value}`, with the
# *active* values only: AdamW has no momentum.
#
# - **`draw`** at random. Write `value`, a float uniform on a numeric axis, on the logarithm where it is a log axis. On an integer
#   axis it is then rounded, and each integer shall get its share, the ends too. From where to where must the float be drawn? 2 lines.
# - **`grid`**: all configurations of a grid. Write `values`, a list of `counts[name]` values, evenly spaced on the
#   axis's own scale, ends included; on an integer axis rounded, and none twice. 3 lines.
#
# <details><summary>Hint</summary>
#
# An integer k owns the stretch from k - 1/2 to k + 1/2, and `half` is given. `rng.uniform(a, b)` draws. `np.geomspace` and
# `np.linspace` include the ends; `.tolist()` makes Python's numbers of theirs. A set has nothing twice.
# </details>


# %% tags=["setup"]
def active(name, config, only_if):
    """Whether a hyperparameter has a value, given what was chosen for those before it."""
    return all(config.get(parent) == value for parent, value in only_if.get(name, {}).items())


# %% tags=["balise-1"]
def draw(space, only_if, rng):
    """Draw a configuration: {name: value}, active ones only."""
    config = {}
    for name, axis in space.items():
        if not active(name, config, only_if):
            continue
        if isinstance(axis, CategoricalDistribution):
            config[name] = axis.choices[rng.integers(len(axis.choices))]
            continue
        half = 0.5 if isinstance(axis, IntDistribution) else 0
        # BEGIN SOLUTION
        low, high = axis.low - half, axis.high + half
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if axis.log else rng.uniform(low, high)
        # END SOLUTION
        value = min(max(round(value) if half else value, axis.low), axis.high)
        config[name] = value
    return config


def grid(space, only_if, counts):
    """List the configurations of a grid: counts[name] values on each numeric axis."""
    configs = [{}]
    for name, axis in space.items():
        if isinstance(axis, CategoricalDistribution):
            values = axis.choices
        else:
            # BEGIN SOLUTION
            values = (np.geomspace if axis.log else np.linspace)(axis.low, axis.high, counts[name]).tolist()
            if isinstance(axis, IntDistribution):
                values = sorted({round(value) for value in values})
            # END SOLUTION
        # each configuration becomes several, or stays as it is where the axis is not active
        configs = [
            {**config, name: value} if active(name, config, only_if) else config
            for config in configs
            for value in (values if active(name, config, only_if) else values[:1])
        ]
    return configs


# %%
tp.check(1, draw, grid)

# %% [markdown]
# Where a few axes matter, and nobody knows which, a grid tries the same few values of these over and over (Bergstra and Bengio,
# 2012). Same number of trials, all 27 epochs long; the best by validation hands in its test accuracy.


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
# Random draws try as many learning rates as there are trials; one value more on an axis of a grid multiplies the whole. A grid is
# ahead only where its few values happen to be good ones, as in the last row perhaps.

# %% [markdown]
# ## Stop early: successive halving
#
# ### Balise 2 · Successive halving · about 10 min
#
# `trials` is a list of trainings: `trials[i].train(epochs)` trains for so many **more** epochs, and returns the value after them
# (an accuracy; or a loss, then `maximize=False`).
#
# - **`successive_halving`**: all train for `first` epochs. Of the $n$ trials of a rung the best `n // eta`, but at
#   least one, go on, until they have `eta` times as many epochs in all; and so on, up to `last`. A rung ends at
#   `epochs`, the one before it at `done`. Write `values`, `{trial number: value}` of those in `going_on`; then the new
#   `going_on`. Some have diverged: NaN is worse than any value, of an accuracy or of a loss, and goes on where the
#   others are too few. Of equal values, the lower number goes on. 3 lines.
# - **`halving_epochs`** counts the epochs of all trials, without training any: what a rung adds to `total`, and how many of
#   `n` go on. 2 lines.
#
# <details><summary>Hint</summary>
#
# Comparisons with NaN are all false, so a list that holds one is not sorted at all. Give `sorted` a key, a tuple whose first
# entry is `math.isnan(value)` and whose last is the number. `sign` makes the best value the smallest.
# </details>


# %% tags=["balise-2"]
def successive_halving(trials, first, eta, last, maximize=True):
    """Train trials in rungs, the best 1 / eta of each go on. Returns [(epochs in all, {trial number: value})]."""
    rungs, going_on, done, epochs = [], range(len(trials)), 0, first
    while epochs <= last:
        # BEGIN SOLUTION
        values = {number: trials[number].train(epochs - done) for number in going_on}
        # END SOLUTION
        rungs.append((epochs, values))
        sign = -1 if maximize else 1
        # BEGIN SOLUTION
        order = sorted(values, key=lambda number: (math.isnan(values[number]), sign * values[number], number))
        going_on = order[: max(1, len(order) // eta)]
        # END SOLUTION
        done, epochs = epochs, epochs * eta
    return rungs


def halving_epochs(n, first, eta, last):
    """Epochs of successive halving with n trials, all together."""
    total, done, epochs = 0, 0, first
    while epochs <= last:
        # BEGIN SOLUTION
        total += n * (epochs - done)
        n = max(1, n // eta)
        # END SOLUTION
        done, epochs = epochs, epochs * eta
    return total


# %%
tp.check(2, successive_halving, halving_epochs)


# %% [markdown]
# A race with random search, and with the pruner of Optuna, which decides about each trial at once, by what it saw before. All
# get the same number of epochs, and hand in the test accuracy of what is best by validation.


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
# Successive halving waits at each rung for the slowest worker. Its *asynchronous* form, ASHA (Li and others, 2020), does not: whoever
# is free asks for a job, and what is known at that moment decides. It promotes a few trials too many, which costs less than
# waiting.
#
# ### Balise 3 · Asynchronous successive halving · about 10 min
#
# A worker calls `job()`, trains that trial up to so many epochs in all, then calls `report`. Given: `self.epochs`, the number of
# epochs at each rung; `self.rungs`, for each rung `{trial number: value}` of all that have reported there; and
# `self.promoted`, for each rung the set of those that may go on from it.
#
# **`job`** looks down from the highest rung that can promote. `order` has all that have reported in rung `k`, the best
# first (NaN has reported too, stands last, and goes on where the others are too few). The best `1 / eta` of them, rounded down, deserve the next rung, and
# some of these have been promoted already. If there is one that has not, promote the best such one, and return `(trial
# number, epochs in all)`. 4 lines. If no rung has any, a new trial begins (given).
#
# <details><summary>Hint</summary>
#
# Cut `order` first, then leave out who is in `self.promoted[k]`. Put a trial into the set when its job is handed out, not when it
# reports: another worker asks before that.
# </details>


# %% tags=["balise-3"]
class ASHA:
    """Hand out jobs: promote from the highest rung that can, else start a new trial."""

    def __init__(self, first, last, eta, maximize=True):
        self.eta, self.sign, self.started = eta, -1 if maximize else 1, 0
        self.epochs = [first]
        while self.epochs[-1] * eta <= last:
            self.epochs.append(self.epochs[-1] * eta)
        self.rungs = [{} for _ in self.epochs]
        self.promoted = [set() for _ in self.epochs]

    def job(self):
        """What a free worker does next: (trial number, epochs in all)."""
        for k in reversed(range(len(self.epochs) - 1)):
            values = self.rungs[k]
            order = sorted(values, key=lambda number: (math.isnan(values[number]), self.sign * values[number]))
            # BEGIN SOLUTION
            for number in order[: len(order) // self.eta]:
                if number not in self.promoted[k]:
                    self.promoted[k].add(number)
                    return number, self.epochs[k + 1]
            # END SOLUTION
        self.started += 1
        return self.started - 1, self.epochs[0]

    def report(self, number, epochs, value):
        """Take in the value of a trial after so many epochs in all."""
        self.rungs[self.epochs.index(epochs)][number] = value


# %%
tp.check(3, ASHA)

# %% [markdown]
# Four simulated workers, the fourth three times slower; a heap knows who is free next. Guess before you run the next cells.

# %%
busy_share = tp.predict("With successive halving of 27 trials: how much of the time are these workers busy, in %?", ...)


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
shares, (_, both) = [], plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
for axes, name, jobs in zip(both, ("successive halving", "ASHA"), (waiting, never)):
    busy = sum(min(end, until) - start for *_, start, end in jobs) / until / len(SPEEDS)
    shares.append(100 * busy)
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
busy_share.shows(shares[0], "{:.0f} %", "All wait at the end of each rung, and the last rung has a single trial.")


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
# Compare the medians of the last three with the quartiles beside them: for the same epochs, it is no loss never to wait. Won
# is the time that stood white in the upper picture.

# %% [markdown]
# ## Learn from what was tried: Bayesian search
#
# Random search forgets: its twentieth trial is drawn like its first. **Bayesian search** fits a model to what was tried. A
# *Gaussian process* says for any point $x$ which value to expect, $\mu(x)$, and how sure it is, $\sigma(x)$: nearly certain close to
# what was tried, unsure far from it. Both count. If the value at $x$ is normally distributed, how much more than the best value so
# far, $f^\star$, will it bring on average?
#
# $$\mathrm{EI}(x) = \mathbb{E}\big[\max(f(x) - f^\star, 0)\big]
# = (\mu - f^\star)\,\Phi(z) + \sigma\,\varphi(z), \qquad z = \frac{\mu - f^\star}{\sigma},$$
#
# with $\Phi$ and $\varphi$, distribution and density of the standard normal. This **expected improvement** (Jones and others, 1998) is
# large where the mean is high, or where nobody knows yet. The point with the largest one is tried next. Distances are taken in a
# cube: each value becomes its place on its axis, from 0 to 1.

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
# ### Balise 4 · Expected improvement, and the search · further · about 12 min
#
# - **`expected_improvement`**: the formula, for arrays `mean` and `std` of one shape and a number `best`. Where `std` is 0,
#   nothing is unknown: `mean - best`, or 0 where that is negative, and never NaN. Far below `best` it is tiny, and never negative. 3 lines.
# - **`bayesian_search`** tries `n_first` points at random, then, one after the other, the most promising. `objective(k)` tries the point
#   at place `k`; its value is NaN if it has diverged. Write `promise`, the expected improvement of each of the points over the best
#   value so far. Fit the model to all that was tried: `model.fit(x, y)` takes `x` (n, d) and `y` (n,), and
#   `model.predict(x, return_std=True)` returns mean and std, (n,) each. It cannot be fitted to NaN, but should learn to keep away: tell it
#   the lowest value seen so far instead (one of the first has a value). Nothing is tried twice. 4 lines.
#
# <details><summary>Hint</summary>
#
# `norm.cdf`, `norm.pdf`; `np.maximum(std, 1e-12)` keeps the division finite. `np.nanmin`, `np.nanmax`, `np.where(np.isnan(…), …)`.
# Set the promise of what was tried to `-np.inf`: 0 is not enough, all others may be 0 as well.
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
    tried = rng.choice(len(points), n_first, replace=False).tolist()
    values = [objective(k) for k in tried]
    while len(tried) < n_trials:
        # BEGIN SOLUTION
        model.fit(points[tried], np.where(np.isnan(values), np.nanmin(values), values))
        mean, std = model.predict(points, return_std=True)
        promise = expected_improvement(mean, std, np.nanmax(values))
        promise[tried] = -np.inf
        # END SOLUTION
        tried.append(int(promise.argmax()))
        values.append(objective(tried[-1]))
    return tried, values


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
# Now all six axes, 936 points, a hundred repetitions each. Guess before you run the next cell.

# %%
as_many = tp.predict("20 trials of Bayesian search: how many must random search make to be as good, by the median?", ...)


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
enough = as_good(np.median)
print(f"random search is as good after {enough} trials by the median, {as_good(np.mean)} by the mean")
good = finals[(finals > np.nanmedian(finals)).all(axis=1)]
print(
    f"one image more or less: {100 / table.images[0]:.2f} points; another seed: {100 * good.std(axis=1, ddof=1).mean():.2f} points (standard deviation)"
)
as_many.shows(enough or MORE, "{:.0f}", "Many configurations of this table are nearly equally good: twenty draws find one.")

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
# Compare what the model saves with the last printed line: what is left to win is about what another seed changes, and a single
# run of both would show nothing. A model pays where a trial is expensive and good ones are rare. And each proposal waits for all
# results before it: 15 trainings in a row, where random search makes all at once. Optuna's default sampler, TPE, has two
# densities instead of the Gaussian process, of good and of poor trials (Bergstra and others, 2011): cheaper where there are thousands.

# %% [markdown]
# ## Change while training: populations
#
# Every search so far looks for *constants*. But the learning rate that is best for the first epoch is rarely the best one for
# the last. **Population based training** (Jaderberg and others, 2017) trains a population side by side, each member with a network
# and hyperparameters of its own. After every few epochs
#
# - **exploit**: a poor member gives up, and copies a good one: weights, state of the optimizer, hyperparameters;
# - **explore**: then it changes its hyperparameters a little, so that the two do not do the same from now on.
#
# The whole search costs as much as training the population once, and out of it come a network *and a schedule*. There is no table
# of such a search, because a member's past is not one configuration: this one is live, on small networks.

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
# ### Balise 5 · Exploit and explore · further · about 13 min
#
# - **`exploit`**: `member` becomes what `better` is now: network, optimizer, hyperparameters. From here on it must train *exactly* as
#   `better` would have, and what one of them does later must not reach the other. 3 lines.
# - **`explore`** multiplies each hyperparameter by 0.8 or by 1.25 (given). But `member.hyperparameters` is only a note of them: what
#   it trains with stands in the `param_groups` of its optimizer. 2 lines.
# - **`evolve`**: each of the lowest quarter copies a member drawn from the highest quarter, and explores. `order` has the places
#   of all members, the lowest value first; `quarter` says how many. Write `pairs` of places, (who copies, whom), and do it. 4 lines.
#
# <details><summary>Hint</summary>
#
# `load_state_dict` of a network copies the numbers of a `state_dict()`. That of an *optimizer* keeps the very tensors that it is
# given: `copy.deepcopy` them first. A parameter group is a dictionary with the names of `hyperparameters` in it: `group.update(…)`.
# `int(rng.choice(places))` draws one.
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
    for name in member.hyperparameters:
        member.hyperparameters[name] *= float(rng.choice((0.8, 1.25)))
    # BEGIN SOLUTION
    for group in member.optimizer.param_groups:
        group.update(member.hyperparameters)
    # END SOLUTION


def evolve(members, rng):
    """The lowest quarter copies members of the highest, and explores. Returns [(who copied, whom), …]."""
    values = [-math.inf if math.isnan(member.value) else member.value for member in members]
    order = sorted(range(len(members)), key=values.__getitem__)
    quarter = max(1, len(members) // 4)
    # BEGIN SOLUTION
    pairs = [(poor, int(rng.choice(order[-quarter:]))) for poor in order[:quarter]]
    for poor, good in pairs:
        exploit(members[poor], members[good])
        explore(members[poor], rng)
    # END SOLUTION
    return pairs


# %%
tp.check(5, exploit, explore, evolve)

# %% [markdown]
# Now against as many members with the same first weights and rates, which keep their rates.


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
print(f"more, median: best {more[0]:+.1f}, median member {more[1]:+.1f}")


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
# What a population gains is above all that nobody stays poor. Its *best* network gains little here, if anything: among twelve
# rates drawn at random one is good already. And a member is copied because it is good *now*: the schedule is greedy, and falls too
# early where patience would have paid. Where a schedule is known to be good (a warm-up, then a cosine), searching its peak is
# often enough. Populations pay where none is known, as in reinforcement learning.

# %% [markdown]
# ## A study on many nodes: Optuna
#
# On a supercomputer a search is a few hundred jobs that start and end when the queue says so, and some are killed. They
# need no master: **one file that all of them read and write is enough**. In Optuna's words
#
# - a **trial** is one configuration, and how far it came: RUNNING, then COMPLETE, PRUNED (stopped early) or FAIL;
# - a **study** is all trials so far;
# - a **storage** keeps it: memory, a database, or a **journal**, a file to which every process appends what it does.
#
# The **sampler**, which proposes configurations (TPE, unless told otherwise), and the **pruner**, which stops trials, belong to the
# process. *The storage keeps neither*: each worker brings its own.

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
# ### Balise 6 · One study, many workers · further · about 12 min
#
# - **`objective`** is one trial. It asks for each value of its configuration (given); `train(config)` is a generator as above. Write
#   what happens after an epoch: `report` its accuracy to the trial, then ask the pruner. Where it says stop, the trial ends as PRUNED.
#   So does one that has diverged, at once, its NaN reported or not: a value of NaN would make it a FAIL, as if it had never
#   been tried. 3 lines.
# - **`make_study`** (given) is called once before the workers start, or again when more jobs are submitted.
# - **`work`** is what each worker runs. One that was killed has left a trial RUNNING, for ever. `name` belongs to one living worker
#   at a time, as the number of a task in an array of jobs does; `named` writes it on each trial. So whatever a worker of
#   *this* name has left running is lost, and becomes FAIL; trials of other names, or of none yet, may be alive on another node. 3 lines. Then it runs
#   `named`, trial after trial, while fewer than `total` trials of the study, those of all workers, are COMPLETE or PRUNED. 2 lines.
#
# <details><summary>Hint</summary>
#
# `trial.report(value, epoch)`, `trial.should_prune()`, `optuna.TrialPruned`, which you raise. `study.get_trials(states=(TrialState.…,))`
# lists trials; `trial.user_attrs.get("worker")`; `study.tell(trial.number, state=…)`. `study.optimize(f, n_trials=1)` runs one.
# </details>


# %% tags=["balise-6"]
def objective(trial, train):
    """One trial of a study: trains until the end or until the pruner says stop. Returns the last accuracy."""
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
        # BEGIN SOLUTION
        trial.report(accuracy, epoch)
        if math.isnan(accuracy) or trial.should_prune():
            raise optuna.TrialPruned
        # END SOLUTION
    return accuracy


def make_study(path):
    """Make the study "search" in the journal `path`, to be maximised, or keep the one that is there."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    optuna.create_study(study_name="search", storage=storage, direction="maximize", load_if_exists=True)


def work(path, name, total, train):
    """Worker `name`: give up what it left running, then run trials until `total` are complete or pruned, by all workers."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.load_study(study_name="search", storage=storage, pruner=pruner)
    # BEGIN SOLUTION
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("worker") == name:
            study.tell(trial.number, state=TrialState.FAIL)
    # END SOLUTION

    def named(trial):
        trial.set_user_attr("worker", name)
        return objective(trial, train)

    # BEGIN SOLUTION
    while len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) < total:
        study.optimize(named, n_trials=1)
    # END SOLUTION


# %%
tp.check(6, objective, make_study, work)

# %% [markdown]
# Three workers, 40 trials asked for. How many will be finished at the end?


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
# There may be up to 42: to count and to begin are two steps, and others begin between them.
#
# ### A worker that dies
#
# On a supercomputer the workers are an **array of jobs**: the same program, as often as you like, each with its number:
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
# The journal must lie where all nodes see it. `launch.job` does the same from a notebook, one job a worker. Task 1 is killed
# in the third training that it begins, as if its time were over.


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
# Nothing that was finished is lost: it was in the file. The trial that task 1 was in stayed RUNNING, whoever else worked, until a
# worker *of its name* came.
#
# > **Heartbeats.** Optuna finds dead workers by itself where the storage is a database (`RDBStorage(…, heartbeat_interval=60)`).
# > Journals have no heartbeat (Optuna 5.0). But a database on a supercomputer is a server that somebody must run; SQLite is none,
# > and its locks do not hold on most network file systems.
#
# ## What Optuna draws · further
#
# Four of its pictures (`optuna.visualization.matplotlib`), with the study of the ranks above:

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
# - **Intermediate values**: do lines cross after they were cut? Then stopping early has its price.
# - **Importances**: which parameter sets the best trials apart. Only trials that *ran to their end* count, a few here. Run the cells
#   again and see how much of the order stays: that is how far you may trust it.
#
# `optuna-dashboard` shows the same while the search runs. It asks for no password: whoever has a login on that machine can open
# it, and delete the study.

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
# Ray is large (half a gigabyte). Where it is not installed (`pip install -e '.[ray]'` in the course's folder), the cell after this balise shows what was
# measured with it.

# %% [markdown]
# ### Balise 7 · The same search for Ray · further · about 14 min
#
# - **`ray_space`** makes Ray's dictionary of domains from Optuna's axes. Two things differ. Ray leaves the upper bound of an integer
#   *out* (`tune.randint(low, high)`, and `tune.lograndint`): return the domain of an integer axis (1 line). And a value that is not active
#   cannot be absent: it is `None`. Ray calls what `when_active(one, needs)` returns with the `config` drawn so far, and wants the value; `needs` says
#   when it is active, `{"optimizer": "sgd"}` for example (2 lines).
# - **`trainable`** is one trial. It trains with what is active (`train` is the generator of balise 6), and reports
#   `{"accuracy": …}` after each epoch. A diverged training reports its NaN and ends. 4 lines.
# - **`tuner`** (given) hands both to Ray, with ASHA.
#
# <details><summary>Hint</summary>
#
# `domain(one)` makes a domain, its `.sample()` draws a value. `when_active` returns a function: `lambda config: …`.
# `tune.report({…})` reports.
# </details>


# %% tags=["balise-7"]
def ray_space(space, only_if):
    """The search space for Ray: {name: domain}; a value that is not active is None."""
    from ray import tune

    def domain(one):
        if isinstance(one, CategoricalDistribution):
            return tune.choice(list(one.choices))
        if isinstance(one, IntDistribution):
            # BEGIN SOLUTION
            return (tune.lograndint if one.log else tune.randint)(one.low, one.high + 1)
            # END SOLUTION
        return (tune.loguniform if one.log else tune.uniform)(one.low, one.high)

    def when_active(one, needs):
        # BEGIN SOLUTION
        drawn = domain(one)
        return lambda config: drawn.sample() if all(config[name] == value for name, value in needs.items()) else None
        # END SOLUTION

    return {
        name: tune.sample_from(when_active(one, only_if[name])) if name in only_if else domain(one)
        for name, one in space.items()
    }


def trainable(config, train):
    """One trial: report the accuracy after each epoch, end where it is NaN."""
    from ray import tune

    # BEGIN SOLUTION
    for accuracy in train({name: value for name, value in config.items() if value is not None}):
        tune.report({"accuracy": accuracy})
        if math.isnan(accuracy):
            return
    # END SOLUTION


def tuner(train, space, only_if, n_trials, epochs, run_config=None):
    """A tune.Tuner: n_trials configurations, ASHA (1, 3, epochs), the highest accuracy."""
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
# The training costs nothing in this measurement, so *a trial* is what the library itself takes for it. If yours train for an
# hour, none of it matters; if they train for a second, it does.
#
# | | Optuna, journal | Ray Tune |
# |---|---|---|
# | processes of its own | none | a master, a store of objects and agents on each node, a process a worker |
# | on Slurm | an array of jobs and a file that all see | **one** job with all nodes at once: `ray start --head` on the first, `ray start --address=…` on the others |
# | a worker dies | its trial is lost; yours to notice, as above | the master notices, and may run it again (`FailureConfig`) |
# | the master dies | there is none | all ends; `Tuner.restore` goes on from what it has written |
# | can pause a trial | no: it is stopped, or it goes on | yes, with checkpoints: population based training |
#
# > **Ray listens on all networks of the node**, and whoever gets through to it runs programs as you. Unless told
# > otherwise, it lets everybody in. From version 2.52 on, `RAY_AUTH_MODE=token` makes it ask for a token: set it, the
# > same on all nodes.

# %% [markdown]
# ## All trials on one page: TensorBoard · further
#
# TensorBoard's page for searches, HParams, wants the parameters and the result of each run in that run's own folder.

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
# come from. A pruned trial has the accuracy of a short training there.

# %%
board.stop()

# %% [markdown]
# ## All of them, at equal budget
#
# Each method gets the same number of epochs. Bayesian search trains every trial to its end, as random search does. The population
# is not here: it has no table.


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
# table. A space with few good points would keep them apart for longer.

# %% [markdown]
# ## Three questions
#
# <details><summary>A paper compares two optimizers, each at its best of 50 random trials, one seed. What is missing?</summary>
#
# The spread. The best of 50 is a maximum over noise, and more trials give more luck. Train <em>that</em> configuration again with
# several seeds, report test scores with their spread, and give both the same budget and spaces of the same size.
# </details>
#
# <details><summary>Successive halving and ASHA throw away a configuration that would have won. Which kind?</summary>
#
# One that begins slowly: a small learning rate, a long warm-up, a large network. A longer first rung, or Hyperband, which runs
# several halvings with different first rungs, is the insurance; it costs a factor of about the number of rungs.
# </details>
#
# <details><summary>You have 512 GPUs for one night and trials of two hours. Bayesian search or ASHA?</summary>
#
# Four waves of 512: most of them a Gaussian process would choose nearly blind. Random draws with ASHA keep every GPU busy and
# stop the poor ones. The two go together: a sampler proposes, ASHA stops.
# </details>
#
# ## To remember
#
# **One seed does not rank the good ones: compare medians, at equal budget.** Draw at random rather than on a grid, by
# ratio where the scale is unknown. Stop early: no rung costs more than the first, and together a few full trainings. Do
# not wait: promote what is good enough now. Let a model propose where trials are dear and few; copy weights and change
# rates where training is long. Next: models too large to be tried twice.

# %%
tp.progress()
