"""Answers to balise 1 of 11_hyperparameter_search: drawing from a space, and a grid in it."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 1, whole=True)

PRODUCT = """
import itertools

def draw(space, only_if, rng):
    found = {}
    for name, axis in space.items():
        if isinstance(axis, CategoricalDistribution):
            value = axis.choices[int(rng.random() * len(axis.choices))]
        elif isinstance(axis, IntDistribution):
            every = np.arange(axis.low, axis.high + 1)
            weights = 1 / every if axis.log else np.ones(len(every))
            value = int(rng.choice(every, p=weights / weights.sum()))
        elif axis.log:
            value = float(10 ** rng.uniform(np.log10(axis.low), np.log10(axis.high)))
            value = min(max(value, axis.low), axis.high)
        else:
            value = axis.low + (axis.high - axis.low) * rng.random()
        if active(name, found, only_if):
            found[name] = value
    return found


def grid(space, only_if, counts):
    values = []
    for name, axis in space.items():
        if isinstance(axis, CategoricalDistribution):
            values.append(list(axis.choices))
        else:
            scale = np.logspace(np.log10(axis.low), np.log10(axis.high), counts[name]) if axis.log else np.linspace(axis.low, axis.high, counts[name])
            values.append([int(np.floor(v + 0.5)) if isinstance(axis, IntDistribution) else float(v) for v in scale])
    found = []
    for point in itertools.product(*values):
        config = {}
        for name, value in zip(space, point):
            if active(name, config, only_if):
                config[name] = value
        if config not in found:
            found.append(config)
    return found
"""
bank.text(None, PRODUCT)

RECURSIVE = """
def _value(axis, u):
    if isinstance(axis, CategoricalDistribution):
        return axis.choices[min(int(u * len(axis.choices)), len(axis.choices) - 1)]
    whole = isinstance(axis, IntDistribution)
    low, high = axis.low, axis.high + whole
    value = low * (high / low) ** u if axis.log else low + (high - low) * u
    return min(int(value), axis.high) if whole else min(value, axis.high)

def draw(space, only_if, rng):
    config = {}
    for name in space:
        if active(name, config, only_if):
            config[name] = _value(space[name], rng.uniform())
    return config


def grid(space, only_if, counts):
    def below(names, config):
        if not names:
            return [config]
        name, *rest = names
        if not active(name, config, only_if):
            return below(rest, config)
        axis = space[name]
        if isinstance(axis, CategoricalDistribution):
            values = axis.choices
        else:
            n = counts[name] - 1
            values = [axis.low * (axis.high / axis.low) ** (k / n) if axis.log else axis.low + (axis.high - axis.low) * k / n for k in range(n + 1)]
            if isinstance(axis, IntDistribution):
                values = dict.fromkeys(round(value) for value in values)
        return [found for value in values for found in below(rest, {**config, name: value})]

    return below(list(space), {})
"""
bank.text(None, RECURSIVE)

bank.slip("nothing-returned", ("    return config\n", "    return None\n"))

bank.hint("draw-form", "A configuration is a dict of names and values. You returned {got}.")
bank.slip("draw-form", ("    return config\n", "    return list(config.values())\n"))
bank.variant("draw-form", RECURSIVE, ("    return config\n", "    return tuple(config.items())\n"))

bank.hint(
    "inactive-value",
    "A configuration has a value for {name}, which is not active there: its parent has another value, or is not "
    "active itself.",
)
bank.slip("inactive-value", ("        if not active(name, config, only_if):\n            continue\n", ""))
bank.slip(
    "inactive-value",
    ("{**config, name: value} if active(name, config, only_if) else config", "{**config, name: value}"),
)
bank.variant(
    "inactive-value",
    PRODUCT,
    ("        if active(name, found, only_if):\n            found[name]", "        if True:\n            found[name]"),
)
bank.variant(
    "inactive-value",
    RECURSIVE,
    ("        if not active(name, config, only_if):\n            return", "        if False:\n            return"),
)

bank.hint("value-missing", "A configuration has no value for {name}, which is active there.")
bank.slip("value-missing", ("if not active(name, config, only_if)", "if name in only_if"))
bank.variant("value-missing", RECURSIVE, ("if active(name, config, only_if):\n", "if name not in only_if:\n"))

bank.hint(
    "not-an-int",
    "{name} is an integer axis or a choice of strings, and one of its values has the type {kind}. PyTorch, JSON "
    "and Optuna need Python's own int and str.",
)
bank.slip("not-an-int", ("round(value) if half else value", "np.round(value) if half else value"))
bank.slip("not-an-int", ("sorted({round(value) for value in values})", "np.unique(np.round(values).astype(int))"))
bank.variant(
    "not-an-int",
    PRODUCT,
    ("int(rng.choice(every, p=weights / weights.sum()))", "rng.choice(every, p=weights / weights.sum())"),
)

bank.hint("outside", "A value of {name} is outside its axis: {got}. Does rounding go past one of the ends?")
bank.slip(
    "outside",
    (
        "value = min(max(round(value) if half else value, axis.low), axis.high)",
        "value = int(value) + 1 if half else value",
    ),
)
bank.variant("outside", RECURSIVE, ("min(int(value), axis.high)", "int(value + 0.5)"))

bank.hint("draw-shares", "Values come up too often in one part of an axis and too rarely in another. {axis}")
bank.slip("draw-shares", ("rng.integers(len(axis.choices))", "min(rng.integers(2), len(axis.choices) - 1)"))
bank.variant("draw-shares", RECURSIVE, ("rng.uniform()", "rng.beta(2, 2)"))

bank.hint(
    "log-ignored",
    "You draw uniformly on an axis with log=True. Nine out of ten learning rates are then in the last decade. Draw "
    "the logarithm uniformly instead.",
)
bank.slip(
    "log-ignored",
    (
        "math.exp(rng.uniform(math.log(low), math.log(high))) if axis.log else rng.uniform(low, high)",
        "rng.uniform(low, high)",
    ),
)
bank.variant("log-ignored", RECURSIVE, (
    "low * (high / low) ** u if axis.log else low + (high - low) * u\n    return min", "low + (high - low) * u\n    return min"))  # fmt: skip
bank.variant("log-ignored", PRODUCT, ("1 / every if axis.log else", ""), (
    "float(10 ** rng.uniform(np.log10(axis.low), np.log10(axis.high)))", "rng.uniform(axis.low, axis.high)"))  # fmt: skip

bank.hint(
    "ends-half",
    "The two ends of an integer axis come up half as often as they should: if you draw from low to high and round, "
    "each end gets only half an interval. Draw from low - 1/2 to high + 1/2.",
)
bank.slip(
    "ends-half",
    ("half = 0.5 if isinstance(axis, IntDistribution) else 0", "half = 1e-9 * isinstance(axis, IntDistribution)"),
)
bank.variant(
    "ends-half", RECURSIVE, ("axis.low, axis.high + whole", "axis.low, axis.high"), ("int(value)", "round(value)")
)

bank.hint("top-never", "The highest value of an integer axis never comes up. Both ends belong to the axis.")
bank.slip("top-never", (
    "half = 0.5 if isinstance(axis, IntDistribution) else 0", "half = 1e-9 * isinstance(axis, IntDistribution)"), ("round(value)", "int(value + 1e-8)"))  # fmt: skip
bank.variant("top-never", RECURSIVE, ("axis.low, axis.high + whole", "axis.low, axis.high"))

bank.hint(
    "own-chance",
    "A second generator with the same seed gives other configurations. Draw every random number from rng.",
)
bank.slip("own-chance", ("    config = {}\n", "    config, rng = {}, np.random.default_rng()\n"))
bank.variant("own-chance", RECURSIVE, ("rng.uniform()", "np.random.uniform()"))

bank.hint("grid-form", "The grid is a list of dicts. You returned {got}.")
bank.slip("grid-form", ("    return configs\n", "    return iter(configs)\n"))
bank.variant(
    "grid-form",
    RECURSIVE,
    ("return below(list(space), {})", "return [tuple(config) for config in below(list(space), {})]"),
)

bank.hint(
    "grid-values",
    "On the axis {name!r}, the grid has {values}. It should have {due}: as many values as counts says, evenly "
    "spaced on the axis's own scale, both ends included.",
)
bank.slip("grid-values", ("counts[name]).tolist()", "counts[name] + 1).tolist()"))
bank.slip("grid-values", ("counts[name]).tolist()", "counts[name]).round(3).tolist()"))
bank.slip("grid-values", ("values = (np.geomspace if axis.log else np.linspace)(axis.low,", "values = (np.geomspace if axis.log else np.linspace)(axis.low if axis.log or isinstance(axis, IntDistribution) else 0.0,"))  # fmt: skip
bank.variant("grid-values", RECURSIVE, ("k / n for k in range(n + 1)", "(k / n) ** 2 for k in range(n + 1)"))

bank.hint(
    "grid-log-ignored",
    "The grid is evenly spaced on the plain scale although the axis has log=True. Use equal ratios there.",
)
bank.slip("grid-log-ignored", ("(np.geomspace if axis.log else np.linspace)", "np.linspace"))
bank.variant("grid-log-ignored", RECURSIVE, (
    "axis.low * (axis.high / axis.low) ** (k / n) if axis.log else axis.low + ", "axis.low + "))  # fmt: skip

bank.hint(
    "grid-truncated",
    "You truncate the integers of the grid instead of rounding them. Even the upper end may get lost that way.",
)
bank.slip("grid-truncated", ("{round(value) for", "{int(value) for"))
bank.variant("grid-truncated", RECURSIVE, ("dict.fromkeys(round(value)", "dict.fromkeys(math.floor(value)"))

bank.hint("grid-end-missing", "The upper end of the axes is missing from the grid.")
bank.slip("grid-end-missing", (
    "(np.geomspace if axis.log else np.linspace)(axis.low, axis.high, counts[name]).tolist()",
    "(np.geomspace if axis.log else np.linspace)(axis.low, axis.high, counts[name], endpoint=False).tolist()"))  # fmt: skip
bank.variant(
    "grid-end-missing",
    RECURSIVE,
    ("n = counts[name] - 1", "n = counts[name]"),
    ("for k in range(n + 1)", "for k in range(n)"),
)

bank.hint(
    "twice",
    "{n} configurations of the grid are duplicates: each of them is a training paid for twice. Neither an inactive "
    "value nor integers that round to the same number may multiply the grid.",
)
bank.slip("twice", ("values if active(name, config, only_if) else values[:1]", "values"))
bank.slip("twice", ("sorted({round(value) for value in values})", "[round(value) for value in values]"))
bank.variant("twice", PRODUCT, ("if config not in found:", "if True:"))

bank.hint(
    "combinations",
    "The grid has {n} configurations, but {of} are possible. Combine every value of an axis with every value of "
    "the others.",
)
bank.slip("combinations", ("    return configs\n", "    return configs[:-1]\n"))
bank.variant("combinations", RECURSIVE, ("return below(list(space), {})", "return below(list(space), {})[:-1]"))

bank.hint(
    "one-draw",
    "Every draw gives the same configuration. Draw from the given rng: a new generator with a fixed seed starts "
    "again each time.",
)
bank.slip("one-draw", ("    config = {}\n", "    config, rng = {}, np.random.default_rng(0)\n"))
bank.variant("one-draw", RECURSIVE, ("rng.uniform()", "np.random.default_rng(1).uniform()"))

bank.hint(
    "same-dict",
    "{n} entries of the grid are the same dict object as an earlier entry: changing one changes the other. Make a "
    "new dict for each configuration.",
)
bank.slip("same-dict", ("{**config, name: value} if", "config.update({name: value}) or config if"))
bank.variant(
    "same-dict",
    RECURSIVE,
    ("below(rest, {**config, name: value})", "below(rest, config.update({name: value}) or config)"),
)

DRAWN = "        half = 0.5 if"
WHOLE = "        if isinstance(axis, IntDistribution){}:\n            config[name] = int(rng.integers(axis.low, axis.high{}))\n            continue\n"
bank.slip("top-never", (DRAWN, WHOLE.format(" and not axis.log", "") + DRAWN))
bank.slip("log-ignored", (DRAWN, WHOLE.format("", " + 1") + DRAWN))

bank.hint(
    "grid-not-rounded",
    "On an integer axis, the values of the grid are floats. Round them, and drop duplicates.",
)
bank.slip("grid-not-rounded", ("sorted({round(value) for value in values})", "sorted(set(values))"))
bank.variant(
    "grid-not-rounded", RECURSIVE, ("dict.fromkeys(round(value) for value in values)", "dict.fromkeys(values)")
)

bank.hint("whole-values", "Six values from 1 to 8, on an integer axis with log=True, are {expected}. You have "
                             "{got}. First space the values by equal ratios, as for floats, then round each to the "
                             "nearest whole number and drop duplicates.")  # fmt: skip
bank.slip(
    "whole-values",
    (
        "(np.geomspace if axis.log else np.linspace)",
        "(np.geomspace if axis.log and isinstance(axis, FloatDistribution) else np.linspace)",
    ),
)
bank.slip(
    "whole-values",
    ("sorted({round(value) for value in values})", "sorted({math.ceil(value - 1e-9) for value in values})"),
)
bank.variant("whole-values", RECURSIVE, ("dict.fromkeys(round(value)", "dict.fromkeys(math.ceil(value - 1e-9)"))
