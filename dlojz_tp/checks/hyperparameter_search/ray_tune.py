"""Balise 7: what Ray Tune is given, judged with a stand-in for its module; and by Ray itself, where it is installed."""

import contextlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dlojz_tp.checking import pretended
from dlojz_tp.checking.looks import Look, judged, silent

SPACE = {
    "kind": CategoricalDistribution(("wide", "deep", "none")),
    "rate": FloatDistribution(1e-3, 10.0, log=True),
    "layers": IntDistribution(2, 5),
    "units": IntDistribution(4, 64, log=True),
    "drop": FloatDistribution(0.25, 0.5),
    "depth": IntDistribution(1, 3),
    "cut": FloatDistribution(0.5, 0.75),
}
ONLY_IF = {"depth": {"kind": "deep"}, "cut": {"kind": "wide"}}
SWITCH = CategoricalDistribution((0, 1))
CHAINED = {"a": SWITCH, "b": SWITCH, "c": SWITCH} | dict.fromkeys(("both", "below", "two"), FloatDistribution(0.0, 1.0))
CHAINED_IF = {"b": {"a": 1}, "both": {"a": 1, "b": 1}, "below": {"b": 1}, "two": {"c": 1, "a": 1}}
WORDS = {
    "kind": "choice of deep, none, wide", "rate": "loguniform from 0.001 to 10", "layers": "randint from 2 below 6",
    "units": "lograndint from 4 below 65", "drop": "uniform from 0.25 to 0.5",
}  # fmt: skip
OTHERS = "FIFOScheduler", "HyperBandScheduler", "MedianStoppingRule", "PopulationBasedTraining"
RISING = [0.3, 0.5, 0.4, 0.7]
DRAWS = 60


class Domain:
    """A domain of the stand-in, which draws like Ray's."""

    def __init__(self, kind, *bounds):
        self.kind, self.bounds = kind, bounds
        if kind != "choice":
            self.lower, self.upper = bounds

    def sample(self, *_, random_state=None, **__):
        draw = random_state if hasattr(random_state, "uniform") else np.random.default_rng()
        if self.kind == "choice":
            return self.bounds[0][int(draw.uniform(0, len(self.bounds[0])))]
        low, high = self.bounds[:2]
        log = self.kind.startswith("log")
        value = math.exp(draw.uniform(math.log(low), math.log(high))) if log else draw.uniform(low, high)
        return int(value) if "int" in self.kind else value

    def __str__(self):
        if self.kind == "choice":
            return f"choice of {', '.join(sorted(map(str, self.bounds[0])))}"
        low, high, *_ = self.bounds
        return f"{self.kind} from {low:g} {'below' if 'int' in self.kind else 'to'} {high:g}"


class Late:
    """What sample_from makes."""

    def __init__(self, function):
        self.function = function

    def __str__(self):
        return "sample_from"


NO_DICTIONARY = "no dictionary"
_HEARS = [lambda metrics: None]  # the last one hears what is reported


def _report(metrics=None, *, checkpoint=None, **named):
    _HEARS[-1](dict(metrics) if isinstance(metrics, Mapping) and not named else {"accuracy": NO_DICTIONARY})


def _bounded(kind):
    """A function that makes domains, with the names of Ray's arguments."""

    def domain(lower, upper, *_, **__):
        return Domain(kind, lower, upper)

    return domain


def _choice(*given, **named):
    values = [*given, *named.values()]
    if len(values) != 1:
        raise TypeError(f"tune.choice takes one list, not {len(values)} values")
    return Domain("choice", list(values[0]))


def _with_parameters(trainable, *given, **named):
    if given:
        raise TypeError("tune.with_parameters wants a name for each thing that it hands over, such as train=train")
    return partial(trainable, **named)


def _unknown(module):
    """What says that a stand-in does not have everything."""

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"no {module}.{name} in this check, which has a stand-in for Ray: the balise does not need it"
        )

    return get


@cache
def _modules() -> dict[str, ModuleType]:
    """Modules `ray`, `ray.tune` and so on that keep what they are given; the same in all checks."""
    ray, tune, schedulers, train = (
        ModuleType(name) for name in ("ray", "ray.tune", "ray.tune.schedulers", "ray.train")
    )
    for kind in (
        "uniform",
        "loguniform",
        "randint",
        "lograndint",
        "quniform",
        "qloguniform",
        "qrandint",
        "qlograndint",
    ):
        setattr(tune, kind, _bounded(kind))
    tune.choice = _choice
    tune.grid_search = lambda values: {"grid_search": list(values)}
    tune.sample_from = Late
    tune.report, train.report = _report, _report

    def kept(name, defaults):
        """A class that keeps its keyword arguments, and takes no others."""

        def begin(self, *given, **more):
            values = dict(zip(defaults, given)) | more
            if unknown := set(values) - set(defaults):
                raise TypeError(f"{name} has no argument {sorted(unknown)[0]!r}")
            vars(self).update(defaults | values)

        return type(name, (), {"__init__": begin})

    asha = {"time_attr": "training_iteration", "metric": None, "mode": None, "max_t": 100, "grace_period": 1, "reduction_factor": 4,
            "brackets": 1, "stop_last_trials": True}  # fmt: skip
    schedulers.ASHAScheduler = schedulers.AsyncHyperBandScheduler = kept("ASHAScheduler", asha)
    for name in OTHERS:
        setattr(schedulers, name, type(name, (), {"__init__": lambda self, *_, **__: None}))
    makers = dict.fromkeys(("asha", "async_hyperband", "asynchyperband"), schedulers.ASHAScheduler)
    schedulers.create_scheduler = tune.create_scheduler = lambda scheduler, **named: makers[scheduler](**named)
    config = {"mode": None, "metric": None, "search_alg": None, "scheduler": None, "num_samples": 1, "max_concurrent_trials": None,
              "time_budget_s": None, "reuse_actors": False, "trial_name_creator": None, "trial_dirname_creator": None}  # fmt: skip
    tune.TuneConfig = kept("TuneConfig", config)
    names = ("name", "storage_path", "storage_filesystem", "failure_config", "checkpoint_config", "sync_config", "verbose", "stop",
             "callbacks", "progress_reporter", "log_to_file")  # fmt: skip
    tune.RunConfig = train.RunConfig = kept("RunConfig", dict.fromkeys(names))
    tune.Tuner = kept("Tuner", dict.fromkeys(("trainable", "param_space", "tune_config", "run_config")))
    tune.Tuner.fit = lambda self: vars(self).update(started=True)
    tune.with_parameters = _with_parameters
    tune.with_resources = lambda trainable, resources: trainable
    ray.tune, tune.schedulers, ray.train, ray.__path__, tune.__path__ = tune, schedulers, train, [], []
    for module in (ray, tune, schedulers, train):
        module.__getattr__ = _unknown(module.__name__)
    return {"ray": ray, "ray.tune": tune, "ray.tune.schedulers": schedulers, "ray.train": train}


@contextlib.contextmanager
def _stand_in(*answers):
    """Stand-ins in the place of Ray's modules, also for answers that hold what the real ones have."""
    names = _modules()
    changes = [
        (sys.modules[name], key, value)
        for name, module in names.items() if name in sys.modules
        for key, value in vars(module).items() if callable(value) and hasattr(sys.modules[name], key)
    ]  # fmt: skip
    with mock.patch.dict(sys.modules, names), pretended(changes, *answers):
        yield


def _drawn(domains):
    """One configuration, drawn as Ray does: in the order of the dictionary."""
    config = dict(domains)
    for name, domain in domains.items():
        if isinstance(domain, Domain):
            config[name] = domain.sample()
        elif isinstance(domain, Late):
            config[name] = domain.function(config)
        elif callable(domain):
            config[name] = domain
    return config


def _wrong_configs(configs):
    """What is wrong in configurations that train was given: words, or "" if nothing is."""
    for name, needs in ONLY_IF.items():
        counts = [
            [name in config for config in configs if (needs.items() <= config.items()) == due] for due in (True, False)
        ]
        if not all(counts[0]) or any(counts[1]):
            (there, of), (others, rest) = ((sum(one), len(one)) for one in counts)
            return f"{name} is there in {there} of the {of} where it is active, and in {others} of the {rest} others"
    for config in configs:
        for name, distribution in SPACE.items():
            due = name in config
            if not due and name not in ONLY_IF:
                return f"{name} is missing"
            if due and not isinstance(config[name], str | int | float):
                return f"{name} is a {type(config[name]).__name__}"
            if due and not distribution._contains(distribution.to_internal_repr(config[name])):
                return f"{name} is {config[name]}"
    inside = [config["cut"] for config in configs if "cut" in config]
    return "" if len(set(inside)) > 1 else "cut is always the same"


def _trained(trainable, config, values):
    """Run one trial. Returns what train got, what was reported, how many epochs were trained then, and in all."""
    got, told, after, trained = {}, [], [], []

    def train(config):
        got.update(config)
        for value in values:
            trained.append(value)
            yield value

    def hear(metrics):
        told.append(metrics)
        after.append(len(trained))

    _HEARS.append(hear)
    try:
        trainable(config, train)
    finally:
        _HEARS.pop()
    return {"got": got, "told": told, "after": after, "trained": len(trained)}


def observe(ray_space, trainable, tuner):
    """The domains, two trials, the tuner, all with the stand-in; then what Ray itself draws."""
    answers = ray_space, trainable, tuner
    with _stand_in(*answers):
        domains = ray_space(dict(SPACE), dict(ONLY_IF))
    names = sorted(domains) if isinstance(domains, dict) else domains if domains is None else [type(domains).__name__]
    yield {"names": names}
    yield {"domains": {name: str(domains[name]) for name in WORDS}}
    config = dict.fromkeys(SPACE) | {"kind": "wide", "cut": 0.6, "layers": 0}
    with _stand_in(*answers):
        trials = [_trained(trainable, config, values) for values in (RISING, [0.3, math.nan, 0.1])]
    told = [[str(told.get("accuracy")) for told in trial["told"]] for trial in trials]
    yield {"told": told, "config": trials[0]["got"], "after": trials[0]["after"], "trained": trials[1]["trained"]}
    run_config = SimpleNamespace(name="given")
    with _stand_in(*answers):
        made = tuner(iter, dict(SPACE), dict(ONLY_IF), 7, 9, run_config)
    yield {"tuner": made if made is None else type(made).__name__}
    how, asha = made.tune_config, getattr(made.tune_config, "scheduler", None)
    steps = getattr(asha, "time_attr", "training_iteration")
    yield {
        "started": hasattr(made, "started"), "trials": getattr(how, "num_samples", 1), "run": made.run_config is run_config,
        "goal": [str(getattr(how, name, None) or getattr(asha, name, None)) for name in ("metric", "mode")],
        "twice": any(getattr(how, name, None) and getattr(asha, name, None) for name in ("metric", "mode")),
        "asha": _numbers(asha),
        "bare": _wants_more(made.trainable),
        "time": steps == "training_iteration" or [told.get(steps) for told in trials[0]["told"]] == [1, 2, 3, 4],
        "reuse": bool(getattr(how, "reuse_actors", False)),
    }  # fmt: skip
    with _stand_in(*answers):
        drawn = _wrong_configs(_come(tuner, lambda space: [_drawn(space) for _ in range(DRAWS)]))
        chained = _come(tuner, lambda space: [_drawn(space) for _ in range(4 * DRAWS)], CHAINED, CHAINED_IF)
    yield {"drawn": drawn, "chained": sorted({tuple(name in config for name in CHAINED_IF) for config in chained})}
    configs = _by_ray(*answers) if INSTALLED else []
    with _stand_in(*answers):
        drawn = _wrong_configs(_come(tuner, lambda space: configs)) if configs else ""
    yield {"ray": drawn}


def _numbers(asha):
    """Of ASHA its four numbers, of another scheduler its name, of none nothing."""
    if asha is None:
        return []
    names = "grace_period", "reduction_factor", "max_t", "brackets"
    return [getattr(asha, name) for name in names] if hasattr(asha, names[0]) else [type(asha).__name__]


def _wants_more(trainable):
    """Whether a trainable cannot be called with a configuration alone."""
    try:
        inspect.signature(trainable).bind({})
    except TypeError:
        return True
    return False


def _come(tuner, draw, space=SPACE, only_if=ONLY_IF):
    """The configurations that train gets when the tuner's trials run on those that are drawn."""
    given = []

    def train(config):
        given.append(dict(config))
        yield 0.5

    made = tuner(train, dict(space), dict(only_if), 7, 9, None)
    for config in draw(made.param_space or {}):
        made.trainable(config)
    return given


def _by_ray(ray_space, trainable, tuner):
    """Configurations that Ray draws from the answer's space; raises where Ray refuses something. Nothing is started."""
    from ray.tune.search.variant_generator import generate_variants

    tuner(iter, dict(SPACE), dict(ONLY_IF), 3, 9, None)
    space = ray_space(dict(SPACE), dict(ONLY_IF))
    return [config for _ in range(DRAWS) for _, config in generate_variants(dict(space))]


def _wrong_domain(seen, due):
    exclusive = seen["layers"] == "randint from 2 below 5" or seen["units"] == "lograndint from 4 below 64"
    return "upper-bound" if exclusive else "other-domain"


def _first(seen, due):
    name = next(name for name in due if seen[name] != due[name])
    return {"name": name, "expected": due[name], "got": seen[name]}


def _badly_drawn(seen, _):
    return (
        "domain-returned"
        if seen.endswith("is a Domain")
        else "drawn-once"
        if seen.endswith("the same")
        else "wrong-drawn"
    )


TOGETHER = [(False,) * 4, *((True, b, b, c) for b in (False, True) for c in (False, True))]
INSTALLED = getattr(importlib.util.find_spec("ray"), "origin", None) is not None  # a folder of this name is no package
LOOKS = [
    Look("a domain for each name", "names", sorted(SPACE), "space-names"),
    Look("of the right kind, with the bounds as Ray counts them", "domains", WORDS, _wrong_domain, fields=_first),
    Look("a trial gets what is active", "config", {"kind": "wide", "cut": 0.6, "layers": 0}, lambda seen, _: "none-passed" if None in
         seen.values() else "active-lost"),
    Look("it reports the accuracy after each epoch", "told", [[str(value) for value in RISING], ["0.3", "nan"]],
         lambda seen, due: "never-told" if not seen[0] else "no-dictionary" if NO_DICTIONARY in seen[0] else "nan-told" if seen[0] == due[0] else "wrong-told"),
    Look("", "after", [1, 2, 3, 4], "told-late"),
    Look("and ends where it is NaN", "trained", 2, "nan-goes-on"),
    Look("the tuner is made, and not started", "tuner", "Tuner", "no-tuner"),
    Look("", "started", False, "tuner-started"),
    Look("it looks for the highest accuracy, in as many trials as asked for", "goal", ["accuracy", "max"], "other-goal"),
    Look("", "twice", False, "goal-twice"),
    Look("", "trials", 7, "other-number"),
    Look("under ASHA", "asha", [1, 3, 9, 1], lambda seen, _: {0: "no-asha", 1: "other-scheduler"}.get(len(seen), "asha-numbers"),
         fields=lambda seen, _: {"seen": "".join(seen)} if len(seen) < 2 else {"seen": "grace_period {}, reduction_factor {}, max_t {}, brackets {}".format(*seen)}),
    Look("", "time", True, "asha-time"),
    Look("with processes that serve trial after trial", "reuse", True, "no-reuse"),
    Look("and the run_config that it was given", "run", True, "run-config-lost"),
    Look("what is drawn comes to train as the space says", "bare", False, "train-lost"),
    Look("", "drawn", "", _badly_drawn, fields=lambda seen, _: {"what": seen, "n": DRAWS}),
    Look("a value with two conditions where both hold", "chained", TOGETHER, "one-condition", fields=silent),
    Look("Ray itself draws so, too" if INSTALLED else "not checked here, as Ray is not installed: what Ray itself draws", "ray", "",
         "wrong-drawn", fields=lambda seen, _: {"what": seen, "n": DRAWS}),
]  # fmt: skip


def balise_7(ray_space, trainable, tuner):
    yield from judged(LOOKS, observe, ray_space, trainable, tuner)
