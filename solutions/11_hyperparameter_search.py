# %% [markdown] tags=["slide"]
# # Hyperparameter search, from a grid to a supercomputer · about 100 min, core 35
#
# Gradient descent finds the weights. You find the learning rate, the batch size, the width and the optimizer by trying
# values, and every trial is a complete training run. That makes a search the most expensive computation most teams ever
# run.
#
# **What you will gain**, counted in *epochs of training until a configuration reaches 98 % validation accuracy*: about
# six times fewer with successive halving. With ASHA, no worker waits. First the baseline: random search.

# %% tags=["setup"] jupyter={"source_hidden": true}
import copy
import heapq
import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that we do not use
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from dlojz_tp import course, data, launch, planner, report, scale, todo

tp = course.open("11_hyperparameter_search")
FULL = scale() == "full"
SPACE = {
    "optimizer": CategoricalDistribution(("sgd", "adamw")),
    "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "batch_size": IntDistribution(16, 256, log=True),
    "width": IntDistribution(8, 72, log=True),
    "weight_decay": FloatDistribution(1e-5, 1e-2, log=True),
}
ONLY_IF = {"momentum": {"optimizer": "sgd"}}  # AdamW has no momentum. In SPACE, a parent comes before its child
table = data.search_table()
tp

# %%
GOAL = 0.98  # validation accuracy


class Search:
    """Trains configurations from the table and counts all their epochs until one reaches GOAL."""

    def __init__(self, repetition):
        self.rng, self.seed = np.random.default_rng(repetition), repetition % table.seeds
        self.spent, self.reached = 0, None  # epochs so far; epochs when GOAL was reached

    def trial(self, config=None):
        return Trial(self, self.rng.choice(table.configurations) if config is None else config)


class Trial:
    """One training run, looked up in the table."""

    def __init__(self, search, config):
        self.search, self.config, self.epochs = search, config, 0

    def train(self, epochs):
        """Train for `epochs` more epochs. Returns the validation accuracy after them, NaN if training diverged."""
        self.epochs += epochs
        self.search.spent += epochs
        value = table.curve(self.config, self.search.seed)[self.epochs - 1]
        if value >= GOAL and self.search.reached is None:
            self.search.reached = self.search.spent
        return value


def by_random(search):
    while search.reached is None:
        search.trial().train(table.epochs)


def epochs_to_goal(method, repetitions=100):
    searches = [Search(repetition) for repetition in range(repetitions)]
    for search in searches:
        method(search)
    return [search.reached or math.inf for search in searches]


needed = {"random search": epochs_to_goal(by_random)}


# %% jupyter={"source_hidden": true}
def compare(needed):
    """Show the median and quartiles of each method's epochs, and how many times fewer it needs than random search."""
    base = np.median(needed["random search"])
    rows = [
        (name, *np.quantile(epochs, (0.5, 0.25, 0.75)), base / np.median(epochs) if name != "random search" else None)
        for name, epochs in needed.items()
    ]
    columns = {"": "{}", f"median epochs to {GOAL:.0%}": "{:,.0f}", "lower quartile": "{:,.0f}", "upper": "{:,.0f}"}
    report.table(columns | {"fewer": "× {:.1f}"}, rows)


print(table, f"measured over {len(needed['random search'])} searches:")
compare(needed)
epoch = 1_281_167 / planner.A100.resnet50_mixed / 3600
print(
    f"modelled: the same number of epochs on ImageNet (ResNet-50, A100): {np.median(needed['random search']) * epoch:,.0f} GPU hours"
)

# %% [markdown]
# A single random search proves little: you have to repeat it a hundred times. The course therefore ships a **table**: a
# small network on handwritten digits, trained for 27 epochs in 936 configurations with three seeds each. A trial looks
# up its results there, so a search takes milliseconds.

# %% [markdown] tags=["slide"]
# ## The idea
#
# Most trials are poor, and most poor ones show it early. **Successive halving** gives every trial a few epochs, keeps
# the best $1/\eta$ of this *rung*, and trains those until they have $\eta$ times as many epochs. With $n$ trials, $r$
# epochs in the first rung and $R = r\,\eta^K$ in the last:
#
# $$n\,r + \sum_{k=1}^{K} \frac{n}{\eta^k}\,(r\,\eta^k - r\,\eta^{k-1}) = n\,r\,\big(1 + K\,(1 - 1/\eta)\big)
# \quad\text{epochs instead of } n\,R .$$

# %% tags=["slide"] jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3))
for trial in range(27):
    rung = sum(trial % 3**k == 0 for k in (1, 2, 3))  # which trials are good does not matter here: take every third
    axes.barh(trial, 27, color="0.9", height=0.8)
    for k in range(rung + 1):
        left = 0 if k == 0 else 3 ** (k - 1)
        axes.barh(trial, 3**k - left, left=left, color=f"C{k}", height=0.8)
axes.set(
    xlabel="epochs", ylabel="trial", title="27 trials: 81 epochs (colours) instead of 729 (grey)", xticks=(1, 3, 9, 27)
)
plt.show()

# %% [markdown]
# This works only if the ranking after a few epochs predicts the final ranking. How reliable is the final ranking
# itself? Two seeds order all 936 configurations almost identically: the correlation of their ranks is 0.97.

# %%
agree = tp.predict("For the best 50 alone, what is the correlation of their ranks between two seeds (0: chance)?", ...)

# %% jupyter={"source_hidden": true}
final = np.nan_to_num([[table.curve(config, seed)[-1] for seed in range(3)] for config in table.configurations])
top = np.argsort(-final.mean(1))[:50]


def agreement(rows):
    return np.corrcoef(rows.argsort(0).argsort(0)[:, :2].T)[0, 1]


_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for k, (rate, momentum) in enumerate(((0.001, 0.9), (0.1, 0.0), (0.1, 0.9), (1.0, 0.9))):
    config = {"optimizer": "sgd", "batch_size": 64, "width": 24, "weight_decay": 1e-5}
    for seed in range(3):
        curve = table.curve(config | {"learning_rate": rate, "momentum": momentum}, seed)
        name = f"rate {rate:g}, momentum {momentum:g}" if seed == 0 else None
        left.plot(range(1, 28), curve, color=f"C{k}", linewidth=1, label=name)
left.set(
    xlabel="epochs", ylabel="validation accuracy", title="Do early leaders win? SGD, three seeds each", xscale="log"
)
left.set(xticks=(1, 3, 9, 27), xticklabels=(1, 3, 9, 27))
left.legend(fontsize=8)
right.plot(*final[top, :2].T + np.random.default_rng(0).uniform(-5e-4, 5e-4, (2, 50)), "o", alpha=0.6)
right.set(
    xlabel="validation accuracy, seed 0", ylabel="the same configurations, seed 1", title="The best 50, two seeds"
)
plt.show()

# %%
agree.shows(
    agreement(final[top]), "{:.2f}", "One image is 0.3 points. The best 50 differ by a few images, and so do two seeds."
)

# %% [markdown]
# One seed separates good configurations from poor ones, which is enough to stop the poor ones. **It doesn't rank the
# good ones.** That is why this work compares medians over many searches, never two single runs.
#
# ## Draw at random or lay a grid
#
# ### Balise 1 · The space, and a grid in it · further · about 12 min
#
# `SPACE` describes each axis with Optuna's classes: both `low` and `high` are included, and `log` means that ratios
# count (from 0.001 to 0.01 is as far as from 0.1 to 1). A configuration is a dict with the *active* values only: AdamW
# has no momentum.
#
# - **`draw`**: write `value`, a float drawn uniformly on the axis, or on its logarithm if it is a log axis. The given
#   code rounds it on an integer axis. Choose the float's range so that both ends get a full share too. 2 lines.
# - **`grid`**: write `values`, a list of `counts[name]` values evenly spaced on the axis's own scale. On an integer
#   axis, round and drop duplicates. 3 lines.
#
# <details><summary>Hint</summary>
#
# An integer k owns the interval from k - 1/2 to k + 1/2; `half` is given. `rng.uniform(a, b)` draws. `np.geomspace` and
# `np.linspace` include both ends, and `.tolist()` returns Python numbers. A `set` drops duplicates.
# </details>


# %% tags=["setup"]
def active(name, config, only_if):
    """Whether a hyperparameter has a value, given the values chosen before it."""
    return all(config.get(parent) == value for parent, value in only_if.get(name, {}).items())


# %% tags=["balise-1"]
def draw(space, only_if, rng):
    """Draw a configuration {name: value} of the active names only. Each integer gets a full share, the ends too."""
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
    """List the configurations of a grid: counts[name] values on each numeric axis, with both ends, no duplicates."""
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
        # each configuration becomes several, or does not change if the axis is not active
        configs = [
            {**config, name: value} if active(name, config, only_if) else config
            for config in configs
            for value in (values if active(name, config, only_if) else values[:1])
        ]
    return configs


# %%
tp.check(1, draw, grid)


# %% jupyter={"source_hidden": true}
def test_accuracy(configs, seed):
    """Test accuracy of the configuration with the best validation accuracy, after training all to the end."""
    return table.test(max(configs, key=lambda config: np.nan_to_num(table.curve(config, seed)[-1])), seed)[-1]


rows = []
for counts in ({"learning_rate": 2}, {"learning_rate": 4}, {"learning_rate": 4, "momentum": 3, "width": 3}):
    laid = grid(SPACE, ONLY_IF, dict.fromkeys(SPACE, 2) | counts)
    reached = []
    for repetition in range(100):
        rng = np.random.default_rng(repetition)
        drawn = [draw(SPACE, ONLY_IF, rng) for _ in laid]
        reached.append(test_accuracy(drawn, repetition % 3))
    for name, configs, values in (
        ("grid", laid, [test_accuracy(laid, s) for s in range(3)]),
        ("random", drawn, reached),
    ):
        rates = len({config["learning_rate"] for config in configs})
        rows.append((name, len(configs), rates, np.median(values)))
report.table({"": "{}", "trials": "{}", "learning rates tried": "{}", "test accuracy, median": "{:.4f}"}, rows)

# %% [markdown]
# Random draws try as many learning rates as there are trials (Bergstra and Bengio, 2012). A grid wins only if its few
# values happen to be good ones.
#
# ## Stop early: successive halving
#
# ### Balise 2 · Successive halving · about 14 min
#
# `trials` is a list of objects with a method `train(epochs)`, like the `Trial` above. The loop over the rungs is given:
# a rung ends at `epochs`, and the previous one ended at `done`.
#
# - **`successive_halving`**: train the trials in `going_on` and collect `values`, `{trial number: value}`. Append
#   `(epochs, values)` to `rungs`, rank the trials, and keep the best `1 / eta` of them as the new `going_on`. Some have
#   diverged: their value is NaN. With `maximize=False`, small values are good. 5 lines.
# - **`halving_epochs`**: add the epochs of a rung to `total`, then reduce `n`. 2 lines.
#
# <details><summary>Hint</summary>
#
# `x < NaN` and `NaN < x` are both false, so `sorted` may leave a list with a NaN unsorted. Give it a key: a tuple that
# begins with `math.isnan(value)` and ends with the trial's number. A sign of -1 makes the best accuracy the smallest.
# </details>


# %% tags=["balise-2", "slide-mistake=from-zero"]
def successive_halving(trials, first, eta, last, maximize=True):
    """Train in rungs of `first`, `first * eta`, ... up to `last` epochs. Returns [(total epochs, {number: value})].

    trials[number].train(k) trains k *more* epochs and returns the value after them. Of the n trials in a rung, the best
    n // eta go on, but at least one. NaN is worse than any other value, whether accuracy or loss. If two values are
    equal, the lower number wins.
    """
    rungs, going_on, done, epochs = [], range(len(trials)), 0, first
    while epochs <= last:
        # BEGIN SOLUTION
        values = {number: trials[number].train(epochs - done) for number in going_on}
        rungs.append((epochs, values))
        sign = -1 if maximize else 1
        order = sorted(values, key=lambda number: (math.isnan(values[number]), sign * values[number], number))
        going_on = order[: max(1, len(order) // eta)]
        # END SOLUTION
        done, epochs = epochs, epochs * eta
    return rungs


def halving_epochs(n, first, eta, last):
    """Compute the total epochs of successive halving with n trials, without training any."""
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


# %%
def by_halving(search):
    for _ in range(100):  # at most
        if search.reached is None:
            successive_halving([search.trial() for _ in range(27)], 1, 3, table.epochs)


needed["successive halving"] = epochs_to_goal(by_halving)
compare(needed)

# %% [markdown]
# ## Never wait: ASHA
#
# At each rung, successive halving waits for the slowest worker. *Asynchronous* successive halving, **ASHA** (Li and
# others, 2020), doesn't: a free worker asks for a job and gets one based on the reports so far. ASHA promotes a few
# trials too many, which costs less than waiting.
#
# ### Balise 3 · Asynchronous successive halving · about 14 min
#
# A worker calls `job()`, trains that trial until it has had the given total of epochs, then calls `report`.
#
# **`job`** goes down the rungs, from the highest that can promote; the loop is given. For rung `k`: sort all trials
# that have reported there, best first. The first `1 / eta` of them, rounded down, deserve the next rung. If some of
# these have not been promoted yet, promote the best of them and return `(trial number, total epochs)`. 6 lines. If no
# rung has such a trial, a new one begins (given).
#
# **Write all of it:** `tp.open_task(3)` gives you only names and docstrings. Build the scheduler that never lets a
# worker wait.
#
# <details><summary>Hint</summary>
#
# Cut the sorted list first, then skip those in `self.promoted[k]`. Add a trial to that set when you hand its job out,
# not when it reports: another worker may ask before that. For NaN, use the key of balise 2.
# </details>


# %% tags=["balise-3"]
class ASHA:
    """Hand out jobs: promote a trial from the highest rung that has one to promote, else start a new trial.

    Rung k has first · eta^k epochs, all whole numbers, up to `last`. A trial deserves the next rung if it is among the
    best n // eta of the n that have reported in its own, those promoted before included; the best one that has not been
    promoted from there goes. Each goes once from a rung, though other workers ask before it reports. NaN is the worst
    value, and counts in n. Trials are numbered from 0 as they start. maximize: whether large values are best.

    epochs[k]: total epochs at rung k; rungs[k]: {trial number: value} of all that reported there, NaN if diverged (the
    worst value, but it counts as a report); promoted[k]: numbers of the trials promoted from there; sign: multiplied by
    it, the best value is the smallest.
    """

    def __init__(self, first, last, eta, maximize=True):
        self.eta, self.sign, self.started = eta, -1 if maximize else 1, 0
        self.epochs = [first]
        while self.epochs[-1] * eta <= last:
            self.epochs.append(self.epochs[-1] * eta)
        self.rungs = [{} for _ in self.epochs]
        self.promoted = [set() for _ in self.epochs]

    def job(self):
        """The next job for a free worker: (trial number, total epochs)."""
        for k in reversed(range(len(self.epochs) - 1)):
            # BEGIN SOLUTION
            values = self.rungs[k]
            order = sorted(values, key=lambda number: (math.isnan(values[number]), self.sign * values[number]))
            for number in order[: len(order) // self.eta]:
                if number not in self.promoted[k]:
                    self.promoted[k].add(number)
                    return number, self.epochs[k + 1]
            # END SOLUTION
        self.started += 1
        return self.started - 1, self.epochs[0]

    def report(self, number, epochs, value):
        """Record the value of a trial after a total of `epochs` epochs."""
        self.rungs[self.epochs.index(epochs)][number] = value


# %%
tp.check(3, ASHA)


# %%
def by_asha(search):
    asha, trials = ASHA(1, table.epochs, 3), []
    for _ in range(5000):  # at most
        if search.reached is not None:
            return
        number, epochs = asha.job()
        if number == len(trials):
            trials.append(search.trial())
        asha.report(number, epochs, trials[number].train(epochs - trials[number].epochs))


needed["ASHA"] = epochs_to_goal(by_asha)
compare(needed)

# %% [markdown]
# ASHA needs about as many epochs, but less time. Take four workers, one of them three times slower than the others.

# %%
busy_share = tp.predict("What % of the time do these workers train, in successive halving with 27 trials?", ...)

# %% jupyter={"source_hidden": true}
SPEEDS = [1.0, 1.0, 1.0, 3.0]  # seconds per epoch, for each worker


def simulate(asha, train, until):
    """Let workers do asha's jobs for `until` seconds: [(worker, trial number, total epochs, start, end)]."""
    trained, jobs, free = {}, [], [(0.0, worker, None) for worker in range(len(SPEEDS))]
    while free[0][0] < until:
        now, worker, finished = heapq.heappop(free)
        if finished is not None:
            asha.report(*finished)
        number, epochs = asha.job()
        end = now + SPEEDS[worker] * (epochs - trained.get(number, 0))
        trained[number] = epochs
        jobs.append((worker, number, epochs, now, end))
        heapq.heappush(free, (end, worker, (number, epochs, train(number, epochs))))
    return jobs


def with_barriers(n):
    """The same for successive halving, which waits at each rung for all workers."""
    jobs, now, done, epochs = [], 0.0, 0, 1
    while epochs <= table.epochs:
        free = [(now, worker) for worker in range(len(SPEEDS))]
        for number in range(n):
            start, worker = heapq.heappop(free)
            heapq.heappush(free, (start + SPEEDS[worker] * (epochs - done), worker))
            jobs.append((worker, number, epochs, start, start + SPEEDS[worker] * (epochs - done)))
        now, n, done, epochs = max(end for end, _ in free), max(1, n // 3), epochs, epochs * 3
    return jobs


configs = np.random.default_rng(0).choice(table.configurations, 200)
waiting = with_barriers(27)
until = max(job[-1] for job in waiting)
never = simulate(ASHA(1, 27, 3), lambda number, epochs: table.curve(configs[number], 0)[epochs - 1], until)


def busy(jobs):
    """Share of the time until `until` in which the workers train."""
    return sum(min(end, until) - start for *_, start, end in jobs) / until / len(SPEEDS)


# %%
busy_share.shows(
    100 * busy(waiting), "{:.0f} %", "All workers wait at the end of each rung, and the last rung has a single trial."
)

# %% tags=["slide"] jupyter={"source_hidden": true}
_, both = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
for axes, name, jobs in zip(both, ("successive halving", "ASHA"), (waiting, never)):
    trained = sum((min(end, until) - start) / SPEEDS[worker] for worker, _, _, start, end in jobs)
    for worker, _, epochs, start, end in jobs:
        colour = f"C{round(math.log(epochs, 3))}"
        axes.barh(worker, end - start, left=start, color=colour, edgecolor="white", linewidth=0.5)
    axes.set(ylabel="worker", yticks=range(4), xlim=(0, until),
             title=f"{name}: {trained:.0f} epochs trained, workers busy {busy(jobs):.0%} of the time")  # fmt: skip
both[1].set(xlabel="seconds (simulated); colours: rungs of 1, 3, 9, 27 epochs")
plt.show()

# %% [markdown]
# ## Learn from what was tried: Bayesian search
#
# Random search forgets: its twentieth trial is drawn like its first. **Bayesian search** fits a model to the results so
# far. At any point $x$ a *Gaussian process* predicts the value, $\mu(x)$, and how uncertain this is, $\sigma(x)$. The
# next point to try is the one that improves most, on average, on the best value so far, $f^\star$. This **expected
# improvement** is
#
# $$\mathrm{EI}(x) = \mathbb{E}\big[\max(f(x) - f^\star, 0)\big]
# = (\mu - f^\star)\,\Phi(z) + \sigma\,\varphi(z), \qquad z = \frac{\mu - f^\star}{\sigma},$$
#
# where $\Phi$ and $\varphi$ are the distribution function and the density of the standard normal. It is large where the
# mean is high, and where the model is unsure. The points are the 936 configurations, with each axis scaled to 0 … 1.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib

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
    """A Gaussian process. length: the distance in the cube over which values change (not fitted, to save time)."""
    return GaussianProcessRegressor(Matern(length, nu=2.5), alpha=0.01, optimizer=None, normalize_y=True)


points = np.array([in_cube(config) for config in table.configurations])  # (936, 6)

# %% [markdown]
# ### Balise 4 · Expected improvement, and the search · further · about 14 min
#
# - **`expected_improvement`**: the formula, for arrays. `std` may be 0. 3 lines.
# - **`bayesian_search`** tries `n_first` points at random, then always the most promising one. Fit `model` to what was
#   tried, and write `promise`, the expected improvement of every point over the best value so far. The model can't be
#   fitted to NaN, but it should learn to avoid such points: give it the lowest value so far instead. 4 lines.
#
# <details><summary>Hint</summary>
#
# `norm.cdf`, `norm.pdf`; `np.maximum(std, 1e-12)` keeps the division finite. `np.nanmin`, `np.nanmax`,
# `np.where(np.isnan(…), …)`. Set the promise of tried points to `-np.inf`: 0 is not enough, because all others may be 0
# as well.
# </details>


# %% tags=["balise-4"]
def expected_improvement(mean, std, best):
    """E[max(f - best, 0)] for a normal f with this mean and std, arrays of the same shape; best is a number.

    Where std is 0: mean - best, or 0 if that is negative. Never NaN, never negative.
    """
    # BEGIN SOLUTION
    gain = mean - best
    z = gain / np.maximum(std, 1e-12)
    return gain * norm.cdf(z) + std * norm.pdf(z)
    # END SOLUTION


def bayesian_search(objective, points, model, n_first, n_trials, rng):
    """Try n_trials of the points (n, d), the first n_first at random. Returns (tried, values) in the order of trials.

    objective(k) tries point k and returns its value, NaN if it diverged. At least one of the first values is a number.
    No point is tried twice. model.fit(x, y) takes x (n, d), y (n,); model.predict(x, return_std=True) returns mean and
    std, (n,) each.
    """
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
# Start with one axis, to see the model at work: thirteen learning rates of SGD, two of them tried at random.

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
    upper.plot(rates, heights, ".", color="0.6", label="the table (unknown to the search)")
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


# %%
class Reached(Exception):
    """Ends a search whose objective has reached GOAL."""


def by_bayes(search):
    def objective(k):
        value = search.trial(table.configurations[k]).train(table.epochs)
        if search.reached is not None:
            raise Reached
        return value

    with contextlib.suppress(Reached):
        bayesian_search(objective, points, surrogate(), 5, len(points), search.rng)


with threadpool_limits(1):
    needed["Bayesian"] = epochs_to_goal(by_bayes)
compare(needed)

# %% [markdown]
# Each of these trials ran to its end, and each waited for the one before. A model pays off where trials are expensive
# and good ones are rare. You can add early stopping: the model proposes, ASHA stops. Optuna's default sampler, TPE,
# replaces the Gaussian process with two densities, one of good trials and one of poor trials.

# %% [markdown]
# ## Change while training: populations
#
# Every search so far has looked for *constants*, but the best learning rate for the first epoch is rarely the best one
# for the last. **Population based training** (Jaderberg and others, 2017) trains a population of networks side by side.
# After every few epochs each poor member
#
# - **exploits**: it copies a good member's weights, optimizer state and hyperparameters;
# - **explores**: it changes these hyperparameters a little.
#
# The result is a network *and a schedule*, for the cost of training the population once. A table can't hold every
# schedule, so here small networks are actually trained.

# %% tags=["setup"] jupyter={"source_hidden": true}
from dataclasses import dataclass

MEMBERS, GENERATIONS, REPETITIONS = 12, 10, 20 if FULL else 5
torch.set_num_threads(1)  # networks this small lose time waking other threads
digits = data.digits(val_share=0.4)
train_x, train_y = digits.train_x.flatten(1), digits.train_y
val_x, test_x = (digits.val_x.flatten(1)[k::2] for k in (0, 1))
val_y, test_y = (digits.val_y[k::2] for k in (0, 1))


@dataclass
class Member:
    """A member of the population."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    hyperparameters: dict  # {name in optimizer.param_groups: value}, such as {"lr": 0.1, "weight_decay": 1e-4}
    value: float = math.nan  # the last measured validation accuracy; NaN: diverged


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
    """Train one epoch in batches of 128, then measure the validation accuracy."""
    for batch in torch.from_numpy(rng.permutation(len(train_y))).split(128):
        loss = nn.functional.cross_entropy(member.network(train_x[batch]), train_y[batch])
        member.optimizer.zero_grad()
        loss.backward()
        member.optimizer.step()
    member.value = share_right(member.network, val_x, val_y)


# %% [markdown]
# ### Balise 5 · Exploit and explore · further · about 16 min
#
# - **`exploit`**: `member` becomes a copy of `better`. What one of them does later must not affect the other. 3 lines.
# - **`explore`** multiplies each hyperparameter by 0.8 or 1.25 (given). But `member.hyperparameters` is only a note:
#   the optimizer trains with the values in its `param_groups`. 2 lines.
# - **`evolve`**: each of the lowest `quarter` of members copies a member drawn from the highest `quarter`, then
#   explores. Write `pairs`, a list of indices (copier, copied), and carry them out. 4 lines.
#
# <details><summary>Hint</summary>
#
# A network's `load_state_dict` copies the numbers. An *optimizer's* keeps the tensors themselves: `copy.deepcopy` them
# first. A parameter group is a dictionary that contains the names in `hyperparameters`: `group.update(…)`.
# `int(rng.choice(indices))` draws one index.
# </details>


# %% tags=["balise-5"]
def exploit(member, better):
    """Make member a copy of better: weights, buffers, optimizer's state, hyperparameters. The two share nothing.

    From then on, member trains exactly as better would have.
    """
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
    """Let the lowest quarter copy members of the highest, then explore. Returns [(index of copier, of copied), …].

    order: indices of all members, lowest value first.
    """
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
# For comparison, an equally large population starts from the same weights and rates, but keeps its rates.


# %% jupyter={"source_hidden": true}
def trained(seed, evolving):
    """Train a population. Returns (members, rates (generations, members), pairs of each generation but the last)."""
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
    """Test accuracy in %: of the member that is best on the validation images, and the median of all members."""
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
print(f"gain, median: best {more[0]:+.1f}, median member {more[1]:+.1f}")


# %% jupyter={"source_hidden": true}
def lineage(members, rates, pairs):
    """The learning rates that trained the best network: its own and, before, those of the members that it copied."""
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
left.plot([], [], color="C0", label="path to the best network, each repetition")
left.plot([], [], color="0.8", label="all members, first repetition")
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
# Above all, no member stays poor. The *best* network gains little here: one of twelve random rates is usually good
# already. The schedule is greedy, because members are copied for being good *now*. Populations pay off where no good
# schedule is known, as in reinforcement learning.

# %% [markdown]
# ## A study on many nodes: Optuna
#
# On a supercomputer a search is a few hundred jobs that start and end when the queue says so, and some are killed. They
# need no master: **one file that all of them read and write is enough**. Optuna's terms:
#
# - a **trial** is one configuration and its results: RUNNING, then COMPLETE, PRUNED (stopped early) or FAIL;
# - a **study** is the set of all trials, and a **storage** keeps it: a database or a **journal**, a file that every
#   process appends to.
#
# The storage keeps neither the **sampler**, which proposes configurations, nor the **pruner**, which stops trials: each
# worker brings its own.

# %% tags=["setup"] jupyter={"source_hidden": true}
import os
import signal
import tempfile
import time
from pathlib import Path

import optuna
import torch.distributed as dist
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise it prints a line for each trial


def train(config, pause=0.01):
    """Train with a configuration: yields the validation accuracy after each epoch, NaN once training has diverged.

    It reads the table and waits a little at each epoch. Epochs that nobody asks for take no time.
    """
    for accuracy in data.search_table().curve(config, seed=0):
        time.sleep(pause)
        yield float(accuracy)


# %% [markdown]
# ### Balise 6 · One study, many workers · further · about 16 min
#
# - **`objective`** runs one trial; the code that draws its configuration is given. After each epoch, `report` the
#   accuracy to the trial, then ask the pruner whether to stop. A diverged trial must end as PRUNED too: the sampler
#   ignores failed trials. 3 lines.
# - **`make_study`** (given) is called once, before the workers start.
# - **`work`** is what each worker runs. A killed worker leaves its trial RUNNING forever. The worker restarts under the
#   same `name`, the number of its task in a job array. So first mark the RUNNING trials of *this* name as FAIL (3
#   lines). Then run `named`, one trial at a time, while fewer than `total` trials of the study are COMPLETE or PRUNED
#   (2 lines).
#
# <details><summary>Hint</summary>
#
# `trial.report(value, epoch)`, `trial.should_prune()`, `optuna.TrialPruned`, which you raise.
# `study.get_trials(states=(TrialState.…,))` lists trials; `trial.user_attrs.get("worker")`; `study.tell(trial.number,
# state=…)`. `study.optimize(f, n_trials=1)` runs one.
# </details>


# %% tags=["balise-6"]
def objective(trial, train):
    """Run one trial of a study to its end, or until the pruner stops it. Returns the last accuracy.

    train(config) yields an accuracy after each epoch. A trial that is stopped or diverges (NaN) ends as PRUNED
    immediately.
    """
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
    """Make the study "search" in the journal `path`; it maximises. Keep the study if there is one."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    optuna.create_study(study_name="search", storage=storage, direction="maximize", load_if_exists=True)


def work(path, name, total, train):
    """Worker `name`: mark its own RUNNING trials as FAIL, then run trials until `total` are COMPLETE or PRUNED.

    A trial's user attribute "worker" names its worker. Trials with another name, or none yet, may be running elsewhere.
    """
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
# Three workers, 40 trials:


# %%
def search(path, trials):
    """On a rank: a worker of the study in `path`, named after its rank."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    work(path, f"rank {dist.get_rank()}", trials, train)


def load(path):
    """Load the study from a journal; you may do so while workers write to it."""
    return optuna.load_study(study_name="search", storage=JournalStorage(JournalFileBackend(str(path))))


def summary(study):
    """How many trials are in each state, and how many epochs they took."""
    states = {state.name: len(study.get_trials(states=(state,))) for state in TrialState}
    epochs = sum(len(trial.intermediate_values) for trial in study.trials)
    return ", ".join(f"{n} {name}" for name, n in states.items() if n) + f"; {epochs} epochs"


folder = Path(tempfile.mkdtemp(prefix="dlojz-search-"))
make_study(folder / "ranks.journal")
start = time.perf_counter()
launch.ranks(search, folder / "ranks.journal", 40, n=3, timeout=120)
study = load(folder / "ranks.journal")
print(f"3 workers, {time.perf_counter() - start:.1f} s: {summary(study)} instead of {27 * len(study.trials)}")
print(f"best: accuracy {study.best_value:.3f} with {study.best_params}")

for name in ("timeline", "intermediate_values"):
    with plt.rc_context(), warnings.catch_warnings():  # Optuna changes the style of all later figures
        warnings.simplefilter("ignore")  # these functions are marked as experimental
        axes = getattr(optuna.visualization.matplotlib, f"plot_{name}")(study)
        axes.figure.set_size_inches(8, 3)
        if name == "intermediate_values":
            axes.get_legend().remove()  # a line for each trial
        plt.show()

# %% [markdown]
# There may be up to 42 trials: a worker counts them, then begins one, and others may begin one in between. In the
# second figure, some lines that were cut might have overtaken others: this is the price of stopping early.
#
# ### A worker that dies
#
# On a supercomputer the workers are a **job array**, the same program with a number for each task:
#
# ```bash
# # #!/bin/bash
# #SBATCH --array=0-999%64      # 1,000 workers, 64 at a time
# #SBATCH --gres=gpu:1
# #SBATCH --time=120
# #SBATCH --requeue             # a task whose node failed starts again, under the same number
# srun python worker.py "task $SLURM_ARRAY_TASK_ID"     # calls work(path, name, ...)
# ```
#
# All nodes must see the journal. Here task 1 is killed in its third trial, as if its time had run out.


# %%
def task(path, name, trials, killed_in):
    """A task of the array: a worker that is killed when it begins training run number `killed_in`."""
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
work(journal, "task 0", 8, train)  # the others continue; here it runs in the notebook, which saves a job
print("task 0 continues:    ", summary(load(journal)))
work(journal, "task 1", 12, train)
print("task 1 has come back:", summary(load(journal)))

# %% [markdown]
# No finished trial is lost. The interrupted one stays RUNNING until a worker *with its name* comes back.
#
# ## Race: epochs to the goal

# %%
compare(needed)

# %% tags=["slide"] jupyter={"source_hidden": true}
_, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.boxplot(list(needed.values())[::-1], orientation="horizontal", tick_labels=list(needed)[::-1], showfliers=False)
axes.set(xscale="log", xlabel=f"epochs of all trials together until one reaches {GOAL:.0%} (boxes: quartiles)")
plt.show()

# %% [markdown]
# ## Beyond this machine
#
# **Ray Tune** runs the same search with one master, which sends trials to its processes on all nodes. It can notice a
# dead worker, and pause and resume a trial, as populations need. Ray listens on all network interfaces of a node, so
# set `RAY_AUTH_MODE=token`. `optuna-dashboard` shows a study while it runs. It asks for no password, so don't leave it
# open on a shared machine.
#
# ## Three questions
#
# <details><summary>A paper compares two optimizers, each by its best of 50 random trials, with one seed. What is missing?</summary>
#
# The spread. The best of 50 is a maximum over noise, and more trials mean more luck. Train <em>that</em> configuration
# again with several seeds, report test scores with their spread, and give both the same budget and search spaces of the
# same size.
# </details>
#
# <details><summary>Successive halving and ASHA may throw away a configuration that would have won. What kind?</summary>
#
# One that starts slowly: a small learning rate, a long warm-up, a large network. A longer first rung helps. So does
# Hyperband, which runs one halving for each possible first rung, and costs that many times as much.
# </details>
#
# <details><summary>You have 512 GPUs for one night and trials of two hours. Bayesian search or ASHA?</summary>
#
# That is four waves of 512 trials: a Gaussian process would choose most of them nearly blind. Random draws with ASHA
# keep every GPU busy and stop the poor trials. You can combine the two: a sampler proposes, ASHA stops.
# </details>

# %% [markdown] tags=["slide"]
# ## To remember
#
# **One seed doesn't rank the good configurations: compare medians, in epochs.** Draw at random, on a log scale where
# the order of magnitude is unknown. Stop poor trials early: each rung costs less than the first one. Don't wait:
# promote what is good enough now. Let a model propose configurations where trials are few and expensive. Next:
# **large models**.

# %%
tp.progress()
