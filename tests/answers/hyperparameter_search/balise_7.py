"""Answers to balise 7 of 11_hyperparameter_search: the search for Ray Tune."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", whole=True)

WALKED = '''
def ray_space(space, only_if):
    """With a loop, and random numbers of NumPy for what depends on others."""
    import ray.tune

    kinds = {(True, True): ray.tune.lograndint, (True, False): ray.tune.randint,
             (False, True): ray.tune.loguniform, (False, False): ray.tune.uniform}
    found = {}
    for name, one in space.items():
        if hasattr(one, "choices"):
            domain = ray.tune.choice(one.choices)
        else:
            whole = isinstance(one, IntDistribution)
            domain = kinds[whole, one.log](one.low, one.high + whole)
        found[name] = domain
        if name in only_if:
            def late(config, domain=domain, needs=only_if[name]):
                for parent, value in needs.items():
                    if config[parent] != value:
                        return None
                return domain.sample()

            found[name] = ray.tune.sample_from(lambda config, late=late: late(config))
    return found


def trainable(config, train):
    """Counts its epochs."""
    import ray

    config = {k: v for k, v in config.items() if v is not None}
    epoch = 0
    for accuracy in train(config):
        epoch += 1
        ray.tune.report({"accuracy": accuracy, "epoch": epoch})
        if accuracy != accuracy:
            break


def tuner(train, space, only_if, n_trials, epochs, run_config=None):
    """The goal stands in the scheduler; time is counted in epochs."""
    import functools

    from ray.tune import TuneConfig, Tuner, schedulers

    asha = schedulers.AsyncHyperBandScheduler(
        time_attr="epoch", metric="accuracy", mode="max", max_t=epochs, reduction_factor=3
    )
    return Tuner(
        functools.partial(trainable, train=train),
        param_space=ray_space(space, only_if),
        tune_config=TuneConfig(num_samples=n_trials, scheduler=asha, reuse_actors=True),
        run_config=run_config,
    )
'''
bank.text(7, None, WALKED)

TAKEN = '''
def ray_space(space, only_if):
    """By the name of the distribution; what depends on others is drawn always, and taken out by the trial."""
    from ray import tune

    makers = {
        "CategoricalDistribution": lambda one: tune.choice(list(one.choices)),
        "FloatDistribution": lambda one: tune.loguniform(one.low, one.high) if one.log else tune.uniform(one.low, one.high),
        "IntDistribution": lambda one: tune.lograndint(one.low, one.high + 1) if one.log else tune.randint(one.low, one.high + 1),
    }
    return {name: makers[type(one).__name__](one) for name, one in space.items()}


def trainable(config, train):
    """Looks one step ahead for the end."""
    from ray import tune

    epochs = iter(train({name: value for name, value in config.items() if value is not None}))
    while (accuracy := next(epochs, None)) is not None:
        tune.report(metrics={"accuracy": float(accuracy)})
        if np.isnan(accuracy):
            epochs = iter(())


def tuner(train, space, only_if, n_trials, epochs, run_config=None):
    """The trial takes out what is not active."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    def active(config):
        given = {}
        for name in space:
            if all(given.get(parent) == value for parent, value in only_if.get(name, {}).items()):
                given[name] = config[name]
        return given

    config = tune.TuneConfig("max", "accuracy") if False else tune.TuneConfig(
        mode="max", metric="accuracy", num_samples=n_trials, reuse_actors=True,
        scheduler=ASHAScheduler(grace_period=1, max_t=epochs, reduction_factor=3))
    function = tune.with_resources(lambda config: trainable(active(config), train), {"cpu": 1})
    return tune.Tuner(function, param_space=ray_space(space, only_if), tune_config=config, run_config=run_config)
'''
TAKEN = TAKEN.replace('tune.TuneConfig("max", "accuracy") if False else ', "")
bank.text(7, None, TAKEN)

bank.hint(7, "space-names", "The dictionary has domains for {got}; due are {expected}.")
bank.slip(
    7,
    "space-names",
    ("        for name, one in space.items()\n", "        for name, one in space.items() if name not in only_if\n"),
)
bank.variant(
    7,
    "space-names",
    TAKEN,
    ("for name, one in space.items()}", "for name, one in space.items() if not hasattr(one, 'choices')}"),
)

bank.hint(7, "upper-bound", "Ray leaves the upper bound of an integer out: {got} never draws the highest value. Add 1.")
bank.slip(7, "upper-bound", ("one.high + 1", "one.high"))
bank.variant(7, "upper-bound", WALKED, (" + whole)", ")"))

bank.hint(7, "other-domain", "The domain of {name} is another one than Optuna's: {got}, and {expected} is due.")
bank.slip(7, "other-domain", ("(tune.loguniform if one.log else tune.uniform)", "tune.uniform"))
bank.slip(
    7,
    "other-domain",
    ("(tune.lograndint if one.log else tune.randint)", "(tune.loguniform if one.log else tune.uniform)"),
)
bank.variant(
    7,
    "other-domain",
    TAKEN,
    (
        "tune.loguniform(one.low, one.high) if one.log else tune.uniform(one.low, one.high)",
        "tune.loguniform(one.low, one.high)",
    ),
)

bank.hint(
    7, "none-passed", "A trial handed None on to train. A value that is not active is to be absent: leave the None out."
)
bank.slip(
    7, "none-passed", ("train({name: value for name, value in config.items() if value is not None})", "train(config)")
)
bank.variant(7, "none-passed", WALKED, (" if v is not None}", "}"))

bank.hint(
    7,
    "active-lost",
    "What a trial hands on to train is not its configuration: {got}, and {expected} is due. Only None is left out, not 0.",
)
bank.slip(7, "active-lost", ("if value is not None})", "if value})"))
bank.variant(7, "active-lost", WALKED, ("if v is not None}", "if isinstance(v, str) or v}"))

bank.hint(
    7,
    "never-told",
    'Nothing was reported: tune.report({{"accuracy": accuracy}}) after each epoch. ASHA has nothing to judge by.',
)
bank.slip(7, "never-told", ('        tune.report({"accuracy": accuracy})\n        if', "        if"))
bank.variant(7, "never-told", WALKED, ('        ray.tune.report({"accuracy": accuracy, "epoch": epoch})\n', ""))

bank.hint(
    7,
    "wrong-told",
    'Reported as "accuracy" was {got}, and {expected} is due: the accuracy of each epoch, under this name.',
)
bank.slip(7, "wrong-told", ('{"accuracy": accuracy}', '{"acc": accuracy}'))
bank.slip(
    7,
    "wrong-told",
    (
        '        tune.report({"accuracy": accuracy})\n        if math.isnan(accuracy):\n            return\n',
        '        if math.isnan(accuracy):\n            break\n    tune.report({"accuracy": accuracy})\n',
    ),
)
bank.variant(7, "wrong-told", TAKEN, ("float(accuracy)", "-float(accuracy)"))

bank.hint(
    7,
    "no-dictionary",
    'tune.report takes one dictionary: tune.report({{"accuracy": accuracy}}). Keywords, or a bare number, it does not know.',
)
bank.slip(7, "no-dictionary", ('tune.report({"accuracy": accuracy})', "tune.report(accuracy=accuracy)"))
bank.slip(7, "no-dictionary", ('tune.report({"accuracy": accuracy})', "tune.report(accuracy)"))
bank.variant(7, "no-dictionary", TAKEN, ('metrics={"accuracy": float(accuracy)}', "accuracy=float(accuracy)"))

bank.hint(
    7, "nan-told", "A diverged training reports its NaN, once, and ends. After 0.3 and NaN it has reported {got}."
)
bank.slip(
    7,
    "nan-told",
    (
        '        tune.report({"accuracy": accuracy})\n        if math.isnan(accuracy):\n            return\n',
        '        tune.report({"accuracy": accuracy})\n',
    ),
)
bank.variant(
    7, "nan-told", TAKEN, ("        tune.report(", "        if not np.isnan(accuracy):\n          tune.report(")
)

bank.hint(
    7,
    "told-late",
    "When a report came, more epochs had been trained than reported. ASHA stops a trial in tune.report: report each epoch before you ask for the next.",
)
bank.slip(
    7,
    "told-late",
    (
        "in train({name: value for name, value in config.items() if value is not None}):",
        "in list(train({name: value for name, value in config.items() if value is not None})):",
    ),
)
bank.variant(7, "told-late", WALKED, ("in train(config):", "in [*train(config)]:"))

bank.hint(
    7,
    "nan-goes-on",
    "After NaN the training went on, {got} epochs where {expected} are due. ASHA does not stop it: NaN is not lower than anything.",
)
bank.slip(
    7,
    "nan-goes-on",
    ("    for accuracy in train(", "    diverged = False\n    for accuracy in train("),
    (
        '        tune.report({"accuracy": accuracy})\n        if math.isnan(accuracy):\n            return\n',
        '        if not diverged:\n            tune.report({"accuracy": accuracy})\n        diverged |= math.isnan(accuracy)\n',
    ),
)
bank.variant(
    7,
    "nan-goes-on",
    WALKED,
    (
        '        ray.tune.report({"accuracy": accuracy, "epoch": epoch})\n        if accuracy != accuracy:\n            break\n',
        '        if epoch < 3 or accuracy > 0.3:\n            ray.tune.report({"accuracy": accuracy, "epoch": epoch})\n',
    ),
)

bank.hint(7, "no-tuner", "tuner should return a tune.Tuner, not {got}.")
bank.slip(
    7,
    "no-tuner",
    (
        "param_space=ray_space(space, only_if), tune_config=how, run_config=run_config,\n    )",
        "param_space=ray_space(space, only_if), tune_config=how, run_config=run_config,\n    ), how",
    ),
)
bank.variant(
    7,
    "no-tuner",
    TAKEN,
    (
        "    return tune.Tuner(function, param_space=ray_space(space, only_if), tune_config=config, run_config=run_config)",
        "    return config",
    ),
)

bank.hint(7, "tuner-started", "The tuner was started. Return it: who calls starts it with fit().")
bank.slip(
    7,
    "tuner-started",
    ("    return tune.Tuner(", "    made = tune.Tuner("),
    ("run_config=run_config,\n    )  # fmt: skip", "run_config=run_config,\n    )\n    made.fit()\n    return made"),
)
bank.variant(
    7,
    "tuner-started",
    TAKEN,
    ("    return tune.Tuner(function", "    tune.Tuner(function).fit()\n    found = tune.Tuner(function"),
    (
        "tune_config=config, run_config=run_config)",
        "tune_config=config, run_config=run_config)\n    found.fit()\n    return found",
    ),
)

bank.hint(
    7, "other-goal", 'metric and mode are {got}; "accuracy" and "max" are due, in TuneConfig or in the scheduler.'
)
bank.slip(7, "other-goal", ('mode="max"', 'mode="min"'))
bank.slip(7, "other-goal", ('metric="accuracy", mode="max", ', ""))
bank.variant(7, "other-goal", WALKED, ('metric="accuracy", ', ""))

bank.hint(
    7,
    "goal-twice",
    "metric and mode stand in TuneConfig and in the scheduler: Ray refuses to start. Leave one of them out.",
)
bank.slip(7, "goal-twice", ("ASHAScheduler(max_t", 'ASHAScheduler(metric="accuracy", mode="max", max_t'))
bank.variant(7, "goal-twice", WALKED, ("TuneConfig(num", 'TuneConfig(metric="accuracy", mode="max", num'))

bank.hint(7, "other-number", "{expected} trials are due, {got} would run: num_samples, which is 1 unless you say so.")
bank.slip(7, "other-number", ("num_samples=n_trials, ", ""))
bank.variant(7, "other-number", WALKED, ("num_samples=n_trials", "num_samples=-1"))

bank.hint(7, "no-asha", "There is no scheduler in the TuneConfig: every trial would train to its end.")
bank.slip(7, "no-asha", ("scheduler=scheduler, ", ""))
bank.variant(
    7,
    "no-asha",
    WALKED,
    ("scheduler=asha, ", ""),
    ("TuneConfig(num_samples", 'TuneConfig(metric="accuracy", mode="max", num_samples'),
)

bank.hint(7, "other-scheduler", "The scheduler is a {seen}. ASHAScheduler is due.")
bank.slip(7, "other-scheduler", ("import ASHAScheduler", "import HyperBandScheduler as ASHAScheduler"))
bank.variant(
    7,
    "other-scheduler",
    TAKEN,
    ("import ASHAScheduler", "import MedianStoppingRule"),
    ("ASHAScheduler(grace_period=1, max_t=epochs, reduction_factor=3)", "MedianStoppingRule()"),
)

bank.hint(
    7,
    "asha-numbers",
    "ASHA has {seen}. Due are grace_period 1, reduction_factor 3, max_t 9 (the epochs that it was given), one bracket.",
)
bank.slip(7, "asha-numbers", (", reduction_factor=3)", ")"))
bank.slip(7, "asha-numbers", ("max_t=epochs, ", ""))
bank.variant(7, "asha-numbers", TAKEN, ("grace_period=1, max_t=epochs", "grace_period=epochs, max_t=epochs"))

bank.hint(
    7,
    "asha-time",
    "ASHA counts by a time_attr that is not reported as 1, 2, 3 …: leave it out, Ray counts reports as training_iteration.",
)
bank.slip(7, "asha-time", ("ASHAScheduler(max_t", 'ASHAScheduler(time_attr="epoch", max_t'))
bank.variant(7, "asha-time", WALKED, ("epoch += 1", "epoch += 2"))

bank.hint(7, "no-reuse", "Each trial would start a process of its own, and import all over again: reuse_actors=True.")
bank.slip(7, "no-reuse", (", reuse_actors=True", ""))
bank.variant(7, "no-reuse", WALKED, ("reuse_actors=True", "reuse_actors=None"))

bank.hint(7, "run-config-lost", "run_config was not handed on to the Tuner: results would go to another folder.")
bank.slip(7, "run-config-lost", (" run_config=run_config,\n", "\n"))
bank.variant(7, "run-config-lost", WALKED, ("run_config=run_config,\n", "run_config=None,\n"))

bank.hint(
    7,
    "wrong-drawn",
    "Of {n} configurations that came to train, {what}. Look at the condition: which way round is it, and does it give None where it does not hold? Is a name drawn before the one that it depends on (Ray goes through the dictionary in order)? Does a function made in a loop see the loop's last values?",
)
bank.slip(
    7,
    "wrong-drawn",
    (
        "        name: tune.sample_from(when_active(one, only_if[name])) if name in only_if else domain(one)\n",
        "        name: domain(one)\n",
    ),
)
bank.hint(7, "drawn-once", "Over {n} configurations, {what}: what sample_from calls must draw anew each time.")
bank.slip(
    7,
    "drawn-once",
    (
        "        return lambda config: drawn.sample()",
        "        once = drawn.sample()\n        return lambda config: once",
    ),
)
bank.slip(7, "wrong-drawn", ("for name, one in space.items()\n    }", "for name, one in sorted(space.items())\n    }"))
bank.slip(7, "wrong-drawn", ("config[name] == value for", "config[name] != value for"))
bank.variant(7, "wrong-drawn", WALKED, ("if config[parent] != value:", "if config[parent] == value:"))
bank.variant(7, "wrong-drawn", TAKEN, ("trainable(active(config), train)", "trainable(config, train)"))
bank.slip(
    7,
    "wrong-drawn",
    (
        "        return lambda config: drawn.sample() if all(config[name] == value for name, value in needs.items()) else None\n",
        "        return lambda config: last[1].sample() if all(config[k] == v for k, v in last[0].items()) else None\n",
    ),
    (
        "    return {\n        name: tune",
        "    last = only_if[list(only_if)[-1]], domain(space[list(only_if)[-1]])\n    return {\n        name: tune",
    ),
)
bank.variant(7, "drawn-once", WALKED, ("found[name] = domain\n", "found[name], once = domain, domain.sample()\n"),
             ("domain=domain, needs", "once=once, needs"), ("return domain.sample()", "return once"))  # fmt: skip

bank.hint(7, "domain-returned", "{what}: what sample_from calls returns a value. domain.sample() draws one.")
bank.slip(7, "domain-returned", ("lambda config: drawn.sample()", "lambda config: drawn"))
bank.variant(7, "domain-returned", WALKED, ("return domain.sample()", "return domain"))

bank.hint(7, "one-condition", "A value is drawn where one of its conditions holds, and another does not, or stands on what is not active. It needs all of them.")  # fmt: skip
bank.slip(7, "one-condition", ("if all(config[name]", "if any(config[name]"))
bank.slip(7, "one-condition", ("if all(config[name] == value for name, value in needs.items())", "if [config[name] == value for name, value in needs.items()][-1]"))
bank.slip(7, "one-condition", ("if all(config[name] == value for name, value in needs.items())", "if [config[name] == value for name, value in needs.items()][0]"))
bank.slip(7, "one-condition", ("config[name] == value for", "config.get(name) in (value, None) for"))
bank.variant(7, "one-condition", TAKEN, ("if all(given.get(parent)", "if not needs(name) or any(given.get(parent)"), ("    def active(config):\n", "    def needs(name):\n        return only_if.get(name)\n\n    def active(config):\n"))  # fmt: skip

bank.hint(
    7,
    "train-lost",
    "Ray calls a trainable with the configuration alone, and yours wants more: tune.with_parameters(trainable, train=train).",
)
bank.slip(7, "train-lost", ("tune.with_parameters(trainable, train=train)", "trainable"))
bank.slip(
    7,
    "train-lost",
    ("tune.with_parameters(trainable, train=train)", "trainable"),
    ("ray_space(space, only_if), tune", 'ray_space(space, only_if) | {"train": train}, tune'),
)
bank.variant(7, "train-lost", WALKED, ("functools.partial(trainable, train=train)", "trainable"))

BY_NAME = TAKEN.replace("tune.choice(list(one.choices))", "tune.choice(categories=one.choices)").replace(
    "(one.low, one.high", "(lower=one.low, upper=one.high"
)
bank.text(7, None, BY_NAME.replace("ASHAScheduler(", 'tune.create_scheduler("asha", '))
