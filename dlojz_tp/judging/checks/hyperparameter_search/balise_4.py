"""Balise 4: expected improvement against numerical integration; the search against what its model said at each trial."""

import operator

import numpy as np
import torch
from sklearn.base import BaseEstimator

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, within

NODES, WEIGHTS = np.polynomial.legendre.leggauss(300)
RNG = np.random.default_rng(5)
MEAN, STD, BEST = RNG.normal(0.6, 0.5, (4, 6)), RNG.uniform(0.1, 0.9, (4, 6)), 0.7
MORE = [(RNG.normal(0, 3, 5), RNG.uniform(0.5, 2, 5), -1.0), (np.array([0.3]), np.array([0.2]), 0.5),
        (np.array([0.499, 0.501]), np.array([1e-3, 2e-3]), 0.5)]  # fmt: skip
CERTAIN = np.array([0.2, 0.7, 1.5, 0.7]), np.array([0.0, 0.0, 0.0, 0.5]), 0.7
FAR = -np.linspace(4, 40, 200), np.ones(200), 0.0  # z down to -40


def truth(mean, std, best):
    """The integral of max(y - best, 0) over the normal distribution of y."""
    mean, std = np.broadcast_arrays(mean, std)
    low = np.maximum((best - mean) / std, -12)  # in standard deviations
    half = np.maximum(12 - low, 0) / 2
    t = low[..., None] + half[..., None] * (1 + NODES)
    density = np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)
    return half * (((mean - best)[..., None] + std[..., None] * t) * density * WEIGHTS).sum(-1)


def observe_improvement(expected_improvement):
    """Shapes; values; at std 0; far below the best."""
    call = lambda mean, std, best: expected_improvement(np.array(mean), np.array(std), best)  # noqa: E731
    got = [call(*case) for case in ((MEAN, STD, BEST), *MORE)]
    yield {"shapes": [None if one is None else tuple(np.shape(one)) for one in got]}
    yield {"values": [torch.as_tensor(np.asarray(one, dtype=np.float64)) for one in got]}
    given = [np.array(one) for one in CERTAIN[:2]]
    with np.errstate(all="ignore"):
        certain = np.asarray(expected_improvement(*given, CERTAIN[2]), dtype=np.float64)
    yield {"certain": torch.as_tensor(certain), "given stays": all(map(np.array_equal, given, CERTAIN))}
    with np.errstate(all="ignore"):
        far = np.asarray(call(*FAR), dtype=np.float64)
    yield {
        "far": float(np.nan_to_num(far, nan=-1).min()),
        "large": float(call(np.array([50.0]), np.array([1e-3]), 1.0)[0]),
    }


def _certain(seen, due):
    """The hint where one of some points with std 0 is wrong, or the one beside them."""
    if not seen.isfinite().all():
        return "improvement-nan"
    return "all-certain" if torch.allclose(seen[:3], due[:3], 0, 1e-6) else "improvement-certain"


def _positive(seen, _):
    return seen > -1e-300


IMPROVEMENT = [
    Look("expected improvement, for arrays of any shape", "shapes", [(4, 6), (5,), (1,), (2,)], lambda seen, _: "nothing-returned" if None in seen else "improvement-form"),
    Value("as by integration", "values", [torch.as_tensor(truth(*case)) for case in ((MEAN, STD, BEST), *MORE)], "improvement-wrong", holds=within(1e-6)),
    Look("where std is 0, and far below the best value", "certain", torch.tensor([0.0, 0.0, 0.8, 0.5 / (2 * np.pi) ** 0.5], dtype=torch.float64), _certain, holds=within(1e-6)),
    Look("the arrays are unchanged", "given stays", True, "std-changed"),
    Look("", "far", 0.0, "improvement-negative", holds=_positive, fields=lambda seen, _: {"got": f"{seen:.2g}", "expected": "not below 0"}),
    Look("", "large", 49.0, "improvement-wrong", holds=within(1e-6)),
]  # fmt: skip


class NoPlace(Exception):  # noqa: N818
    """objective was not called with a place."""


def _smooth(x, y, at):
    """A stand-in for a Gaussian process: mean and spread (n,) at points, which follow y in scale and shift."""
    far = ((at[:, None] - x[None]) ** 2).sum(-1)  # (n, tried)
    near = np.exp(-far / 0.08) + 1e-12
    scale = y.std() if y.std() > 1e-9 else 1.0
    return near @ y / near.sum(1), scale * np.sqrt(1 - np.exp(-far.min(1) / 0.1)) + 1e-6 * scale


def _sure(x, y, at):
    """A model that promises nothing anywhere."""
    return np.full(len(at), y.min()), np.zeros(len(at))


def searched(bayesian_search, heights, points, n_first, n_trials, seed=0, says=_smooth, never=None):
    """One search: {"calls", "returned", "fits": [(trials so far, x, y)], "refused": a model was given NaN, "heights"}.

    never: the heights of a slope that never diverges. The first trial then diverges, the next two do not.
    """
    calls, fits, refused, heights = [], [], [], heights.copy()

    class Model(BaseEstimator):
        def fit(self, x, y):
            x, y = np.array(x, dtype=float), np.array(y, dtype=float)
            if x.ndim != 2 or y.shape[:1] != x.shape[:1]:
                raise ValueError(f"x must have the shape (n, d), y (n,): got {x.shape} and {y.shape}")
            if not np.isfinite(y).all():
                refused.append(1)
                raise ValueError("Input y contains NaN.")
            self.x, self.y = x, y.reshape(len(y))
            fits.append((len(calls), self.x, self.y))
            return self

        def predict(self, x, return_std=False):
            mean, std = says(self.x, self.y, np.atleast_2d(np.array(x, dtype=float)))
            return (mean, std) if return_std else mean

    def objective(k):
        try:
            k = operator.index(k)
        except TypeError:
            raise NoPlace from None
        if never is not None and len(calls) < 3:
            heights[k] = never[k] if calls else np.nan
        calls.append(k)
        return float(heights[k])

    try:
        returned = bayesian_search(objective, points.copy(), Model(), n_first, n_trials, np.random.default_rng(seed))
    except NoPlace:
        return {"calls": "not places"}
    except ValueError:
        if not refused:
            raise
        return {"calls": calls, "refused": True}
    return {"calls": calls, "returned": returned, "fits": fits, "refused": False, "heights": heights}


def _fitted(run, points, n_first):
    """For each trial that was proposed, what is wrong with the fit before it ("" if nothing), and which rules chose so."""
    words, rules = [], []
    for n in range(n_first, len(run["calls"])):
        before = [fit for fit in run["fits"] if fit[0] <= n]
        word, y = _fit(before[-1] if before else None, run["calls"][:n], run["heights"], points, n_first)
        words.append(word)
        if not word:
            rules.append(_rules(run["calls"][:n], run["calls"][n], y, points))
    return next(filter(None, words), ""), set.intersection(*rules) if rules else set()


def _fit(fit, tried, heights, points, n_first):
    """What is wrong with a fit, in a word, and the values as the model knew them, in the order of the trials."""
    if fit is None:
        return "model-unused", None
    _, x, y = fit
    due, values = points[tried], heights[tried]
    diverged = np.isnan(values)
    if x.shape[1:] != due.shape[1:]:
        return "other-points", None
    same = (np.abs(x[None] - due[:, None]) < 1e-9).all(-1)  # (tried, fitted)
    if len(x) == (~diverged).sum() < len(due) and same[~diverged].any(1).all():
        return "diverged-left-out", None
    if not same.any(0).all():
        return "other-points", None
    if not same.any(1).all():
        return "model-old", None
    told = y[same.argmax(1)]
    if np.ptp(values[~diverged]) > 1e-9:  # scaled and shifted, if they like
        slope, shift = np.polyfit(told[~diverged], values[~diverged], 1) if np.ptp(told[~diverged]) > 1e-12 else (0, 0)
        told = slope * told + shift
    if np.abs(told - values)[~diverged].max() > 1e-6:
        return "other-values", None
    lowest = [
        np.nanmin(values[: max(k, n_first)]) for k in range(len(values))
    ]  # when it was known that it had diverged
    if (told - lowest > 1e-6)[diverged].any():
        return "diverged-too-good", told
    far = np.nanmin(values) - np.ptp(values[~diverged]) - 1e-6  # a little too low is no harm
    return "diverged-too-low" if (told < far)[diverged].any() else "", told


def _rules(tried, chosen, y, points):
    """The names of the rules by which `chosen` is best among the untried."""
    rest = np.setdiff1d(np.arange(len(points)), tried)
    if chosen not in rest:
        return set()
    mean, std = _smooth(points[tried], y, points)
    scores = {
        "improvement": truth(mean, std, y.max()),
        "mean": mean,
        "std": std,
        "minimum": truth(-mean, std, -y.min()),
    }
    return {name for name, score in scores.items() if score[chosen] >= score[rest].max() - 1e-7}


POINTS = np.random.default_rng(3).random((40, 2))
HILL = 3 + np.exp(-((POINTS - [0.7, 0.3]) ** 2).sum(1) / 0.05) - POINTS[:, 0]
STEEP = np.where(POINTS[:, 0] > 0.6, np.nan, HILL)  # diverges where the rate is large
PLATEAU = np.where(np.arange(12) < 11, 0.1, 0.9)


def observe_search(bayesian_search):
    """A hill; ties, under a model that promises nothing; all points; first points of many seeds; a steep slope."""
    hill = searched(bayesian_search, HILL, POINTS, 4, 14)
    yield {"places": hill["calls"] != "not places"}
    few = POINTS[:12]
    flat = searched(bayesian_search, PLATEAU, few, 3, 10, says=_sure)
    every = searched(bayesian_search, HILL, few, 5, 12)
    yield {"counts": [len(one["calls"]) for one in (hill, flat, every)]}
    yield {"twice": sum(len(one["calls"]) - len(set(one["calls"])) for one in (hill, flat, every))}
    yield {"returned": _returned(hill)}
    first = [searched(bayesian_search, HILL, few, 3, 3, seed)["calls"] for seed in range(40)]
    yield {"first": len({k for calls in first for k in calls}), "ways": len({tuple(sorted(calls)) for calls in first})}
    yield {"again": all(searched(bayesian_search, HILL, few, 3, 3, seed)["calls"] == first[seed] for seed in range(8))}
    word, rules = _fitted(hill, POINTS, 4)
    yield {"fit": word, "rules": rules}
    steep = searched(bayesian_search, STEEP, POINTS, 6, 14, never=HILL)
    yield {"refused": steep["refused"]}
    word, rules = _fitted(steep, POINTS, 6)
    yield {"steep fit": word, "steep rules": rules, "steep returned": _returned(steep)}


def _returned(run):
    """Whether two lists in the order of the trials came back: "" or a word."""
    try:
        tried, values = run["returned"]
        tried, values = [int(k) for k in tried], np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return None if run["returned"] is None else "returned-form"
    if tried != run["calls"] or len(values) != len(tried):
        return "returned-order"
    return "" if np.allclose(values, run["heights"][tried], 1e-6, 1e-9, equal_nan=True) else "returned-values"


def _rule(seen, _):
    """The hint for a choice that is not the largest expected improvement."""
    return next((f"chosen-by-{rule}" for rule in ("mean", "std", "minimum") if rule in seen), "chosen-otherwise")


def _rule_with_nan(seen, _):
    return "chosen-with-nan" if _rule(seen, _) == "chosen-otherwise" else _rule(seen, _)


def _among(seen, due):
    return due in seen


_word = lambda seen, _: seen  # noqa: E731  (the observation names the hint)
SEARCH = [
    Look("objective is called n_trials times, with indices", "places", True, "not-a-place"),
    Look("", "counts", [14, 10, 12], "trials-miscounted"),
    Look("no point is tried twice", "twice", 0, "tried-twice", fields="n"),
    Look("two lists, in the order of the trials", "returned", "", _word, fields=silent),
    Look("the first points are drawn with the given generator", "first", 12, "first-not-drawn"),
    Look("", "ways", 20, "first-not-drawn", holds=operator.ge),
    Look("", "again", True, "rng-ignored"),
    Look("the model knows all the trials so far, and nothing else", "fit", "", _word, fields=silent),
    Look("the next point has the largest expected improvement", lambda o: o["rules"], "improvement", _rule, holds=_among, fields=silent),
    Look("a trial that diverged", "refused", False, "nan-fitted"),
    Look("", "steep fit", "", _word, fields=silent),
    Look("", "steep rules", "improvement", _rule_with_nan, holds=_among, fields=silent),
    Look("", "steep returned", "", _word, fields=silent),
]  # fmt: skip


def balise_4(expected_improvement, bayesian_search):
    yield from judged(IMPROVEMENT, observe_improvement, expected_improvement)
    yield from judged(SEARCH, observe_search, bayesian_search)
