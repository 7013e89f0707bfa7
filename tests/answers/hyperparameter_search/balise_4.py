"""Answers to balise 4 of 11_hyperparameter_search: expected improvement, and the search."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 4)

UNTRIED = '''
def expected_improvement(mean, std, best):
    """By masks and the error function's complement."""
    from scipy.special import erfc
    found = np.maximum(mean - best, 0.0)
    some = std > 0
    gain, spread = mean[some] - best, std[some]
    z = gain / spread
    found[some] = gain * erfc(-z / math.sqrt(2)) / 2 + spread * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return found


def bayesian_search(objective, points, model, n_first, n_trials, rng):
    """A list of the untried; values scaled to mean 0 and spread 1 before the model sees them."""
    order = rng.permutation(len(points)).tolist()
    tried, untried, values = [], order[:], []

    def go(k):
        untried.remove(k)
        tried.append(k)
        values.append(objective(k))

    for k in order[:n_first]:
        go(k)
    for _ in range(n_trials - n_first):
        y = np.array(values)
        y[np.isnan(y)] = y[~np.isnan(y)].min()
        y = (y - y.mean()) / (y.std() + 1e-12)
        model.fit(points[tried], y)
        mean, std = model.predict(points[untried], return_std=True)
        go(untried[int(np.argmax(expected_improvement(mean, std, y.max())))])
    return tried, values
'''
bank.text(None, UNTRIED)

LOWEST = '''
def expected_improvement(mean, std, best):
    """Where std is 0, the limit."""
    safe = np.where(std > 0, std, 1.0)
    z = (mean - best) / safe
    return np.where(std > 0, safe * (z * norm.cdf(z) + norm.pdf(z)), np.clip(mean - best, 0, None)).clip(0)


def bayesian_search(objective, points, model, n_first, n_trials, rng):
    """Minimises the loss 1 - value; a dictionary of what was tried; a new copy of the model each time."""
    from sklearn.base import clone
    losses = {}
    while len(losses) < n_trials:
        if len(losses) < n_first:
            k = int(rng.integers(len(points)))
            if k in losses:
                continue
        else:
            seen = list(losses)
            y = np.array([losses[s] for s in seen])
            y = np.where(np.isfinite(y), y, np.nanmax(y))
            guess = clone(model).fit(points[seen], y)
            rest = [k for k in range(len(points)) if k not in losses]
            mean, std = guess.predict(points[rest], return_std=True)
            promise = expected_improvement(-mean, std, -y.min())
            k = rest[promise.argmax()]
        losses[k] = 1 - objective(k)
    return list(losses), [1 - loss for loss in losses.values()]
'''
bank.text(None, LOWEST)

LAST = "    return gain * norm.cdf(z) + std * norm.pdf(z)\n"
Z = "    z = gain / np.maximum(std, 1e-12)\n"
FIRST = "rng.choice(len(points), n_first, replace=False).tolist()"
FIT = "        model.fit(points[tried], np.where(np.isnan(values), np.nanmin(values), values))\n"
PROMISE = "promise = expected_improvement(mean, std, np.nanmax(values))"
bank.slip("nothing-returned", (LAST, LAST.replace("return ", "")))
bank.slip("nothing-returned", ("    return tried, values", "    tried, values"))

bank.hint("improvement-form", "Return one number for each point: an array with the shape of mean. You returned "
                                 "the shapes {got} instead of {expected}.")  # fmt: skip
bank.slip("improvement-form", (LAST, "    return float((gain * norm.cdf(z) + std * norm.pdf(z)).max())\n"))
bank.slip("improvement-form", (LAST, "    return (gain * norm.cdf(z) + std * norm.pdf(z)).ravel()\n"))
bank.variant("improvement-form", LOWEST, ("(mean - best, 0, None)).clip(0)", "(mean - best, 0, None)).max()"))

bank.hint("improvement-wrong", "This is not the mean of max(f - best, 0). The formula has two terms, with z in both.")
bank.slip("improvement-wrong", (LAST, "    return gain * norm.pdf(z) + std * norm.cdf(z)\n"))
bank.slip("improvement-wrong", (LAST, "    return gain * norm.cdf(z) - std * norm.pdf(z)\n"))
bank.slip("improvement-wrong", ("np.maximum(std, 1e-12)", "np.maximum(std, 1e-2)"))
bank.variant("improvement-wrong", UNTRIED, ("gain * erfc(-z / math.sqrt(2)) / 2", "gain * erfc(-z)"))

bank.hint(
    "smaller-is-better",
    "This is how far a point is expected to fall below best. We look for the largest "
    "value, so compute how far it is expected to exceed best.",
)
bank.slip("smaller-is-better", ("gain = mean - best", "gain = best - mean"))
bank.variant("smaller-is-better", LOWEST, ("z = (mean - best)", "z = (best - mean)"))

bank.hint("no-density", "The second term, σ φ(z), is missing. Without it, uncertain points promise nothing.")
bank.slip("no-density", (LAST, "    return gain * norm.cdf(z)\n"))
bank.variant("no-density", UNTRIED, (" + spread * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)", ""))

bank.hint(
    "density-not-scaled",
    "φ(z) must be multiplied by σ: it is in standard deviations, but the improvement is in units of the value.",
)
bank.slip("density-not-scaled", ("std * norm.pdf(z)", "norm.pdf(z)"))
bank.variant("density-not-scaled", UNTRIED, ("spread * np.exp", "np.exp"))

bank.hint("probability", "Φ(z) is the probability of an improvement, however small. We want its average size.")
bank.slip("probability", (LAST, "    return norm.cdf(z)\n"))
bank.variant("probability", LOWEST, ("safe * (z * norm.cdf(z) + norm.pdf(z))", "norm.cdf(z)"))

bank.hint("variance-in-z", "z is in standard deviations: divide by std, not by its square.")
bank.slip("variance-in-z", (Z, "    z = gain / np.maximum(std, 1e-12) ** 2\n"))
bank.variant("variance-in-z", UNTRIED, ("z = gain / spread", "z = gain / (spread * spread)"))

bank.hint("best-ignored", "You don't subtract best. We want the improvement over the best value so far.")
bank.slip("best-ignored", ("gain = mean - best", "gain = mean"))
bank.variant("best-ignored", UNTRIED, ("mean[some] - best", "mean[some]"))

bank.hint("positive-part", "This is max(mean - best, 0), the improvement of the mean. We want the mean of the "
                              "improvement: a point whose mean is below best may still turn out to be above it.")  # fmt: skip
bank.slip("positive-part", (LAST, "    return np.maximum(gain, 0)\n"))
bank.variant("positive-part", LOWEST, ("safe * (z * norm.cdf(z) + norm.pdf(z))", "(mean - best) * (mean > best)"))

bank.hint("improvement-nan", "Where std is 0, your result is not finite: z divides by 0.")
bank.slip("improvement-nan", ("np.maximum(std, 1e-12)", "std"))
bank.variant("improvement-nan", LOWEST, ("safe = np.where(std > 0, std, 1.0)", "safe = std"), ("np.where(std > 0, safe * (z * norm.cdf(z) + norm.pdf(z)), np.clip(mean - best, 0, None))", "(safe * (z * norm.cdf(z) + norm.pdf(z)))"))  # fmt: skip

bank.hint("improvement-certain", "Where std is 0, the value is known. The improvement is mean - best if that is "
                                    "positive, else 0. For means 0.2, 0.7, 1.5 and best 0.7, it is 0, 0, 0.8.")  # fmt: skip
bank.slip("improvement-certain", (LAST, "    return (gain * norm.cdf(z) + std * norm.pdf(z)) * (std > 0)\n"))
bank.slip("improvement-certain", (LAST, "    return np.where(std > 0, gain * norm.cdf(z) + std * norm.pdf(z), gain)\n"))
bank.variant("improvement-certain", UNTRIED, ("found = np.maximum(mean - best, 0.0)", "found = np.zeros(mean.shape)"))

bank.hint(
    "std-changed",
    "You changed an array that you were given. mean and std belong to the caller, who may use them again.",
)
bank.slip("std-changed", ("np.maximum(std, 1e-12)", "np.maximum(std, 1e-12, out=std)"))
bank.variant("std-changed", LOWEST, ("    safe = np", "    std[std <= 0] = 1e-12\n    safe = np"))

bank.hint("all-certain", "Three of four points have std 0. The fourth doesn't, and its improvement is "
                            "{got[3]:.3g} instead of {expected[3]:.3g}. Decide point by point (np.where), not for "
                            "all of them at once.")  # fmt: skip
bank.slip("all-certain", (Z, "    if np.any(std == 0):\n        return np.maximum(gain, 0)\n" + Z))
bank.variant(
    "all-certain",
    LOWEST,
    ("    z = (mean", "    if std.min() == 0:\n        return (mean - best).clip(0)\n    z = (mean"),
)

bank.hint("improvement-negative", "Far below best, your result is {got}. A mean of max(…, 0) is never negative. "
                                     "1 + erf(x), 1 - Φ and torch's ndtr lose small probabilities by cancellation; "
                                     "norm.cdf(z) and erfc keep them. Also, z is gain / std, and nothing is added "
                                     "to std where it is not 0.")  # fmt: skip
bank.slip("improvement-negative", ("norm.cdf(z)", "(1 - norm.cdf(-z))"))
bank.slip("improvement-negative", ("norm.cdf(z)", "0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))"))
bank.variant("improvement-negative", UNTRIED, ("gain * erfc(-z / math.sqrt(2)) / 2", "gain * (1 - erfc(z / math.sqrt(2)) / 2)"))  # fmt: skip

bank.hint("not-a-place", "objective(k) takes an index into points, an int, not the point itself.")
bank.slip("not-a-place", ("[objective(k) for k in tried]", "[objective(points[k]) for k in tried]"))
bank.variant("not-a-place", LOWEST, ("1 - objective(k)", "1 - objective(points[k])"))

bank.hint("trials-miscounted", "n_trials counts all trials, including the first ones, and each calls objective "
                                  "once. In three searches, objective was called {got} times instead of {expected}.")  # fmt: skip
bank.slip("trials-miscounted", ("while len(tried) < n_trials:", "for _ in range(n_trials):"), (FIRST, "rng.choice(len(points), n_first, replace=False).tolist()"))  # fmt: skip
bank.slip("trials-miscounted", ("len(tried) < n_trials", "len(tried) < n_trials - n_first"))
bank.slip(
    "trials-miscounted", ("    while len", "    heights = [objective(k) for k in range(len(points))]\n    while len")
)
bank.slip(
    "trials-miscounted",
    ("[objective(k) for k in tried]", "[objective(k) for k in tried if objective(k) is not None]"),
)
bank.variant("trials-miscounted", UNTRIED, ("range(n_trials - n_first)", "range(n_trials - n_first - 1)"))

bank.hint("tried-twice", "In three searches, points were tried again {n} times. A point that was tried must not "
                            "come up again, neither among the first ones nor where the expected improvement is 0 "
                            "everywhere. (An argmax over the untried points alone is an index among those, not "
                            "into points.)")  # fmt: skip
bank.slip("tried-twice", ("        promise[tried] = -np.inf\n", ""))
bank.slip("tried-twice", ("promise[tried] = -np.inf", "promise[tried] = 0"))
bank.slip("tried-twice", (", replace=False)", ")"))
bank.variant("tried-twice", UNTRIED, ("        untried.remove(k)\n", ""))

bank.hint("returned-form", "Return (tried, values): a list of indices and a list of values.")
bank.slip("returned-form", ("    return tried, values", "    return max(zip(values, tried))"))
bank.slip("returned-form", ("    return tried, values", "    return values"))
bank.variant("returned-form", UNTRIED, ("return tried, values", "return dict(zip(tried, values))"))

bank.hint("returned-order", "tried must contain all the indices, in the order in which they were tried.")
bank.slip("returned-order", ("    return tried, values", "    order = np.argsort(values)\n    return np.array(tried)[order], np.array(values)[order]"))  # fmt: skip
bank.slip("returned-order", ("    return tried, values", "    return tried[n_first:], values[n_first:]"))
bank.variant("returned-order", LOWEST, ("return list(losses)", "return sorted(losses)"))

bank.hint("returned-values", "values are not what objective returned for tried. The value of a diverged trial "
                                "stays NaN there; only the model gets another value.")  # fmt: skip
bank.slip("returned-values", ("    return tried, values", "    return tried, best_values(values)"), ("def bayesian_search", "def best_values(values):\n    return [max(values[: k + 1]) for k in range(len(values))]\n\n\ndef bayesian_search"))  # fmt: skip
bank.slip("returned-values", ("    while len", "    values = [v if v == v else 0.0 for v in values]\n    while len"), ("values.append(objective(tried[-1]))", "values.append(np.nan_to_num(objective(tried[-1])))"), ("np.nanmin(values), values))", "np.nanmin(values), values))\n"), ("np.where(np.isnan(values), np.nanmin(values), values)", "np.where(np.array(values) == 0, min(v for v in values if v), values)"))  # fmt: skip
bank.variant("returned-values", UNTRIED, ("        y = np.array(values)\n        y[np", "        y = np.array(values)\n        values[:] = np.where(np.isnan(y), np.nanmin(y), y).tolist()\n        y[np"))  # fmt: skip

bank.hint(
    "first-not-drawn",
    "The first points are always the same, or nearly: three out of twelve, drawn with 40 generators of different "
    "seeds. Draw them with `rng`, from all points.",
)
bank.slip("first-not-drawn", (FIRST, "list(range(n_first))"))
bank.slip("first-not-drawn", (FIRST, "np.linspace(0, len(points) - 1, n_first).astype(int).tolist()"))
bank.variant(
    "first-not-drawn", UNTRIED, ("rng.permutation(len(points))", "np.random.default_rng(0).permutation(len(points))")
)

bank.hint("rng-ignored", "A second generator with the same seed gives other first points. Draw from `rng` alone.")
bank.slip("rng-ignored", ("rng.choice(len", "np.random.choice(len"))
bank.variant("rng-ignored", LOWEST, ("rng.integers(len(points))", "np.random.randint(len(points))"))

bank.hint("model-unused", "You proposed a trial before the given model was fitted.")
bank.slip("model-unused", (FIT, "        known = np.where(np.isnan(values), np.nanmin(values), values)\n"), ("        mean, std = model.predict(points, return_std=True)\n", "        mean, std = np.full(len(points), known.mean()), rng.random(len(points))\n"))  # fmt: skip
bank.variant("model-unused", UNTRIED, ("        model.fit(points[tried], y)\n", ""), ("model.predict(points[untried], return_std=True)", "rng.random((2, len(untried)))"))  # fmt: skip

bank.hint(
    "model-old",
    "You proposed a trial with a model that didn't know all the trials so far. Fit it again after each trial, to "
    "all of them.",
)
bank.slip("model-old", (FIT, "        if len(tried) == n_first:\n    " + FIT))
bank.slip(
    "model-old",
    (
        "points[tried], np.where(np.isnan(values), np.nanmin(values), values)",
        "points[tried[-3:]], np.array(values[-3:])",
    ),
)
bank.variant("model-old", LOWEST, ("seen = list(losses)", "seen = list(losses)[:n_first]"))

bank.hint("other-points", "The x that you give to model.fit must be the rows of `points` that were tried.")
bank.slip("other-points", ("model.fit(points[tried],", "model.fit(np.array(tried, dtype=float)[:, None],"), ("model.predict(points,", "model.predict(np.arange(len(points), dtype=float)[:, None],"))  # fmt: skip
bank.slip("other-points", ("model.fit(points[tried],", "model.fit(points[: len(tried)],"))
bank.variant("other-points", UNTRIED, ("points[tried], y)", "points[::-1][tried], y)"))

bank.hint(
    "other-values",
    "The y that you give to model.fit must be the values of the points tried, in the same order as x.",
)
bank.slip("other-values", (FIT, "        model.fit(points[tried], np.sort(values))\n"))
bank.slip("other-values", (FIT, "        model.fit(points[tried], np.maximum.accumulate(values))\n"))
bank.variant("other-values", UNTRIED, ("model.fit(points[tried], y)", "model.fit(points[tried], y[::-1])"))

bank.hint("chosen-by-mean", "You always try the untried point with the highest mean. There may be better ones "
                               "where the search has not looked yet. Take std into account, and use the highest "
                               "value so far as best, not a low one.")  # fmt: skip
bank.slip("chosen-by-mean", (PROMISE, "promise = mean.copy()"))
bank.slip("chosen-by-mean", (PROMISE, "promise = expected_improvement(mean, std, np.nanmin(values))"))
bank.slip("chosen-by-mean", (PROMISE, "promise = expected_improvement(mean, 0 * std, -1e9)"))
bank.variant("chosen-by-mean", UNTRIED, ("np.argmax(expected_improvement(mean, std, y.max()))", "np.argmax(mean)"))

bank.hint(
    "chosen-by-std",
    "You always try the point about which the model is least certain. That explores, and never exploits what was "
    "found.",
)
bank.slip("chosen-by-std", (PROMISE, "promise = std.copy()"))
bank.variant("chosen-by-std", LOWEST, ("promise = expected_improvement(-mean, std, -y.min())", "promise = std"))

bank.hint("chosen-by-minimum", "Your trials go where the expected values are lowest. Larger is better here.")
bank.slip("chosen-by-minimum", (PROMISE, "promise = expected_improvement(-mean, std, -np.nanmin(values))"))
bank.variant("chosen-by-minimum", UNTRIED, ("expected_improvement(mean, std, y.max())", "expected_improvement(-mean, std, -y.min())"))  # fmt: skip

bank.hint("chosen-otherwise", "The point that you try is not the untried one with the largest expected "
                                 "improvement over the best value so far. (An argmax over the untried points alone "
                                 "is an index among those, not into points.)")  # fmt: skip
bank.slip("chosen-otherwise", ("promise.argmax()", "np.where(np.isinf(promise), np.inf, promise).argmin()"))
bank.slip("chosen-otherwise", (PROMISE, "promise = expected_improvement(mean, std, values[-1])"))
bank.slip("chosen-otherwise", (PROMISE, "promise = mean + 2 * std"))
bank.slip("chosen-otherwise", ("tried.append(int(promise.argmax()))", "tried.append(int(rng.choice(np.setdiff1d(np.arange(len(points)), tried))))"))  # fmt: skip
bank.variant("chosen-otherwise", UNTRIED, ("std, y.max())", "std, y.mean())"))
bank.variant("chosen-otherwise", LOWEST, ("rest[promise.argmax()]", "[k for k in range(len(points)) if k not in losses][::-1][promise.argmax()]"))  # fmt: skip

bank.hint("chosen-with-nan", "Once a trial has diverged, the point that you try doesn't have the largest "
                                "expected improvement over the best of all values so far. (With a NaN among the "
                                "values, max() may be NaN or too low. Use np.nanmax.)")  # fmt: skip
bank.slip("chosen-with-nan", ("np.nanmax(values))", "max(values))"))
bank.slip("chosen-with-nan", ("np.nanmax(values))", "np.nanmax(values[:n_first]))"))
bank.variant("chosen-with-nan", LOWEST, ("-y.min())", "-min(losses.values()))"))

bank.hint("nan-fitted", "A trial diverged, and you fit the model to its NaN, which the model refuses. Give it "
                           "the lowest value so far instead.")  # fmt: skip
bank.slip("nan-fitted", ("np.where(np.isnan(values), np.nanmin(values), values)", "values"))
bank.slip("nan-fitted", ("np.nanmin(values), values)", "min(values), values)"))
bank.variant("nan-fitted", UNTRIED, ("        y[np.isnan(y)] = y[~np.isnan(y)].min()\n", ""))

bank.hint("diverged-left-out", "The model doesn't learn about diverged trials, so it will propose their "
                                  "neighbours. Give it the lowest value so far for them.")  # fmt: skip
bank.slip("diverged-left-out", (FIT, "        good = ~np.isnan(values)\n        model.fit(points[tried][good], np.array(values)[good])\n"))  # fmt: skip
bank.variant("diverged-left-out", LOWEST, ("            seen = list(losses)\n", "            seen = [k for k in losses if losses[k] == losses[k]]\n"))  # fmt: skip

bank.hint("diverged-too-good", "For a diverged trial, you give the model more than the lowest value so far.")
bank.slip("diverged-too-good", ("np.nanmin(values), values)", "np.nanmean(values), values)"))
bank.slip("diverged-too-good", ("np.nanmin(values), values)", "1e6, values)"))
bank.variant("diverged-too-good", UNTRIED, ("y[~np.isnan(y)].min()", "np.nanmedian(y)"))

bank.hint("diverged-too-low", "For a diverged trial, you give the model a value far below all others. One such "
                                 "value outweighs the rest. Use the lowest value so far.")  # fmt: skip
bank.slip("diverged-too-low", ("np.nanmin(values), values)", "-1e9, values)"))
bank.slip("diverged-too-low", ("np.nanmin(values), values)", "0.0, values)"))
bank.variant("diverged-too-low", UNTRIED, ("y[~np.isnan(y)].min()", "-100"))

EARLY = """
def bayesian_search(objective, points, model, n_first, n_trials, rng):
    \"\"\"What diverged is replaced once, when it is seen; x and y are kept beside.\"\"\"
    free = np.ones(len(points), dtype=bool)
    tried, values, known = [], [], []
    for trial in range(n_trials):
        if trial < n_first:
            k = rng.choice(np.flatnonzero(free))
        else:
            if trial == n_first:
                known = np.nan_to_num(values, nan=np.nanmin(values)).tolist()
            mean, std = model.fit(points[tried], known).predict(points, return_std=True)
            k = np.where(free, expected_improvement(mean, std, max(known)), -1).argmax()
        free[k] = False
        tried.append(k)
        values.append(objective(k))
        known.append(min(known) if math.isnan(values[-1]) and known else values[-1])
    return np.array(tried), np.array(values)
"""
bank.text(None, LOWEST[: LOWEST.index("def bayesian")] + EARLY.lstrip())

BY_POINT = """
def expected_improvement(mean, std, best):
    \"\"\"A point at a time; far below best it may round to just below 0.\"\"\"
    def one(m, s):
        gain = m - best
        if s == 0:
            return max(gain, 0.0)
        z = gain / s
        return gain * 0.5 * math.erfc(-z / math.sqrt(2)) + s * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return np.vectorize(one, otypes=[float])(mean, std)


"""
bank.text(None, BY_POINT.lstrip() + EARLY.lstrip())
