"""Answers to balise 6 of 11_hyperparameter_search: one Optuna study, many workers."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 6, whole=True)

TOLD = '''
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution


def objective(trial, train):
    """Reports in a while loop, and looks at NaN itself."""
    kind = trial.suggest_categorical("optimizer", ["adamw", "sgd"])
    config = dict(
        optimizer=kind,
        learning_rate=trial.suggest_float("learning_rate", 0.0001, 1, log=True),
        batch_size=trial.suggest_int("batch_size", 16, 256, log=True),
        width=trial.suggest_int("width", 8, 72, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-5, 0.01, log=True),
    )
    if kind == "sgd":
        config["momentum"] = trial.suggest_float("momentum", 0, 0.99)
    epoch, last = 0, None
    for accuracy in train(config):
        epoch += 1
        if accuracy != accuracy:
            raise optuna.exceptions.TrialPruned("diverged")
        trial.report(accuracy, step=epoch)
        last = accuracy
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned
    return last


def make_study(path):
    """Looks first whether there is one."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{path}"))
    if not storage.get_all_studies():
        optuna.create_study(storage=storage, study_name="search", direction="maximize")


def work(path, name, total, train):
    """Asks and tells; counts by hand."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{path}"))
    study = optuna.load_study(
        study_name="search", storage=storage, sampler=optuna.samplers.TPESampler(multivariate=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    State = optuna.trial.TrialState
    for old in study.trials:
        if old.state == State.RUNNING and old.user_attrs.get("held by") == name:
            storage.set_trial_state_values(old._trial_id, State.FAIL)
    while sum(t.state in (State.COMPLETE, State.PRUNED) for t in study.get_trials(deepcopy=False)) < total:
        trial = study.ask()
        trial.set_user_attr("held by", name)
        try:
            value = objective(trial, train)
        except optuna.TrialPruned:
            study.tell(trial, state=State.PRUNED)
        except Exception:
            study.tell(trial, state=State.FAIL)
            raise
        else:
            study.tell(trial, value)
'''
bank.text(None, TOLD)

MOST = '''
def objective(trial, train):
    """Takes the ranges from the space."""
    config = {}
    for name, one in SPACE.items():
        if name == "momentum" and config["optimizer"] != "sgd":
            continue
        if isinstance(one, CategoricalDistribution):
            config[name] = trial.suggest_categorical(name, one.choices)
        else:
            suggest = trial.suggest_int if isinstance(one, IntDistribution) else trial.suggest_float
            config[name] = suggest(name, one.low, one.high, log=one.log)
    for epoch, accuracy in enumerate(train(config), start=1):
        trial.report(accuracy, epoch)
        if trial.should_prune() or np.isnan(accuracy):
            raise optuna.TrialPruned()
    return accuracy


def make_study(path):
    """Keeps a study that is there, by its error; a lock of the other kind."""
    lock = optuna.storages.journal.JournalFileOpenLock(str(path))
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    try:
        return optuna.create_study(study_name="search", storage=storage, direction=optuna.study.StudyDirection.MAXIMIZE)
    except optuna.exceptions.DuplicatedStudyError:
        return optuna.load_study(study_name="search", storage=storage)


def work(path, name, total, train):
    """Optuna's own callback ends it, after a first look."""
    lock = optuna.storages.journal.JournalFileOpenLock(str(path))
    study = optuna.load_study(
        study_name="search", storage=JournalStorage(JournalFileBackend(str(path), lock_obj=lock)),
        pruner=optuna.pruners.SuccessiveHalvingPruner(1, 3),
    )
    done = (TrialState.COMPLETE, TrialState.PRUNED)

    def one(trial):
        trial.set_user_attr("name", name)
        return objective(trial, train)

    for trial in study.trials:
        if trial.user_attrs.get("name") == name and not trial.state.is_finished():
            study.tell(trial.number, state=TrialState.FAIL)
    if len(study.get_trials(states=done)) < total:
        study.optimize(one, callbacks=[optuna.study.MaxTrialsCallback(total, states=done)])
'''
SPACE = """
SPACE = {
    "optimizer": CategoricalDistribution(("sgd", "adamw")),
    "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "batch_size": IntDistribution(16, 256, log=True),
    "width": IntDistribution(8, 72, log=True),
    "weight_decay": FloatDistribution(1e-5, 1e-2, log=True),
}
"""
MOST = SPACE + MOST
bank.text(None, MOST)
CREATED = 'optuna.create_study(study_name="search", storage=storage, direction="maximize", load_if_exists=True)'
LOADED = 'optuna.load_study(study_name="search", storage=storage, pruner=pruner)'
LOOP = """    while len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) < total:
        study.optimize(named, n_trials=1)
"""
TOLD_STORAGE = 'storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{path}"))'
ASKED = "        if math.isnan(accuracy) or trial.should_prune():\n            raise optuna.TrialPruned\n"

bank.hint(
    "momentum-always",
    "AdamW has no momentum, yet you ask for one. The sampler would learn from a number that does nothing.",
)
bank.slip("momentum-always", ('    if config["optimizer"] == "sgd":\n        config', "    if True:\n        config"))
bank.variant("momentum-always", TOLD, ('if kind == "sgd"', "if kind"))

bank.hint("names", "Ask the trial for the names of SPACE. For {name}, {expected} was expected, and you have {got}.")
bank.slip("names", ('"learning_rate": trial', '"lr": trial'), ('_float("learning_rate"', '_float("lr"'))
bank.variant("names", TOLD, ('        width=trial.suggest_int("width", 8, 72, log=True),\n', ""))

bank.hint("ranges", "The range of {name} is not that of SPACE: you asked for {got} instead of {expected}.")
bank.slip("ranges", ("1e-4, 1.0, log=True", "1e-4, 1.0"))
bank.variant("ranges", TOLD, ('trial.suggest_int("width", 8', 'trial.suggest_float("width", 8'))

bank.hint(
    "other-config",
    "You give train another configuration than the one the trial suggested. It is a dictionary of all the names "
    "and their values.",
)
bank.slip("other-config", ('        config["momentum"] = trial', "        trial"))
bank.variant(
    "other-config", TOLD, ("    epoch, last = 0", '    config.setdefault("momentum", None)\n    epoch, last = 0')
)

bank.hint(
    "never-reported",
    "You report nothing, so the pruner has nothing to judge. Call trial.report(accuracy, epoch) after each epoch.",
)
bank.slip("never-reported", ("        trial.report(accuracy, epoch)\n", ""))
bank.variant("never-reported", TOLD, ("        trial.report(accuracy, step=epoch)\n", ""))

bank.hint(
    "epochs-from-zero",
    "You report the first epoch as epoch 0. A rung at 3 epochs would be judged after 4.",
)
bank.slip("epochs-from-zero", ("train(config), 1)", "train(config))"))
bank.variant("epochs-from-zero", TOLD, ("epoch, last = 0", "epoch, last = -1"))

bank.hint(
    "wrong-report",
    "After epochs 1, 2, 3 …, report the accuracy of that epoch. You reported something else.",
)
bank.slip(
    "wrong-report",
    (
        "trial.report(accuracy, epoch)",
        "best = max(accuracy, locals().get('best', 0))\n        trial.report(best, epoch)",
    ),
)
bank.variant("wrong-report", TOLD, ("step=epoch)", "step=10 * epoch)"))

bank.hint(
    "never-asked",
    "The pruner said stop after epoch 2, but you trained all 4. trial.should_prune() only asks the pruner; it "
    "stops nothing by itself.",
)
bank.slip("never-asked", (" or trial.should_prune()", ""))
bank.variant(
    "never-asked", TOLD, ("        if trial.should_prune():\n            raise optuna.exceptions.TrialPruned\n", "")
)

bank.hint(
    "pruned-as-complete",
    "A trial that was stopped ended as COMPLETE, so its early value counts like those of full trainings. Let "
    "optuna.TrialPruned leave the objective.",
)
bank.slip("pruned-as-complete", ("            raise optuna.TrialPruned", "            return accuracy"))
bank.slip("pruned-as-complete",
    ("    for epoch, accuracy in", "    try:\n      for epoch, accuracy in"),
    ("        trial.report", "          trial.report"),
    (ASKED, "          if math.isnan(accuracy) or trial.should_prune():\n              raise optuna.TrialPruned\n    except optuna.TrialPruned:\n        pass\n"),
)  # fmt: skip
bank.variant(
    "pruned-as-complete",
    TOLD,
    ("            raise optuna.exceptions.TrialPruned\n    return", "            break\n    return"),
)

bank.hint(
    "trained-on",
    "You train all epochs before you ask the pruner, so it saves nothing. Take one epoch from the generator, "
    "report it, ask.",
)
bank.slip("trained-on", ("enumerate(train(config), 1)", "enumerate(list(train(config)), 1)"))
bank.variant("trained-on", TOLD, ("in train(config)", "in [*train(config)]"))

bank.hint(
    "asked-late",
    "The pruner said stop after epoch 2, but you trained {n} epochs. After each epoch: report, then ask.",
)
bank.slip(
    "asked-late",
    ("        trial.report(accuracy, epoch)\n" + ASKED, ASKED + "        trial.report(accuracy, epoch)\n"),
)
bank.variant("asked-late", TOLD,
    ("        epoch += 1\n", "        epoch += 1\n        if trial.should_prune():\n            raise optuna.exceptions.TrialPruned\n"),
    ("        last = accuracy\n        if trial.should_prune():\n            raise optuna.exceptions.TrialPruned\n", "        last = accuracy\n"),
)  # fmt: skip

bank.hint("trial-fails", "A trial ended as {state}. A trial that the pruner stops is PRUNED: raise optuna.TrialPruned.")
bank.slip("trial-fails", ("            raise optuna.TrialPruned", "            return None"))
bank.variant(
    "trial-fails",
    TOLD,
    ("            raise optuna.exceptions.TrialPruned\n    return", "            return float('nan')\n    return"),
)

bank.hint(
    "nan-fails",
    "A training that diverged (NaN) became a FAIL. The sampler learns nothing from it and may draw a similar one "
    "again. End it as PRUNED.",
)
bank.slip("nan-fails", (ASKED, "        if math.isnan(accuracy):\n            return accuracy\n" + ASKED))
bank.variant("nan-fails", TOLD, ('raise optuna.exceptions.TrialPruned("diverged")', "return accuracy"))

bank.hint(
    "nan-trains-on",
    "A training that diverged (NaN) went on. After a NaN come only NaNs. End the trial at once, as PRUNED.",
)
bank.slip("nan-trains-on", ("if math.isnan(accuracy) or trial", "if trial"))
bank.variant("nan-trains-on", TOLD, ('raise optuna.exceptions.TrialPruned("diverged")', "continue"))

bank.hint(
    "nan-completes",
    "A training that diverged (NaN) ended as COMPLETE, so its value counts like those of full trainings. End it as "
    "PRUNED.",
)
bank.slip("nan-completes", (ASKED, "        if math.isnan(accuracy):\n            return 0.0\n" + ASKED))
bank.variant("nan-completes", TOLD, ('raise optuna.exceptions.TrialPruned("diverged")', "return last"))

bank.hint("not-the-last", "The value of a trial is its accuracy after the last epoch.")
bank.slip(
    "not-the-last",
    ("        trial.report(", "        best = max(accuracy, best) if epoch > 1 else accuracy\n        trial.report("),
    ("    return accuracy", "    return best"),
)
bank.variant("not-the-last", TOLD, ("        last = accuracy\n", "        last = max(last or 0.0, accuracy)\n"))

bank.hint(
    "sqlite",
    "This is a SQLite database. Its locks don't work on the network file systems of a supercomputer. Use "
    "JournalStorage(JournalFileBackend(path)).",
)
bank.slip("sqlite", ("storage = JournalStorage(JournalFileBackend(str(path)))", 'storage = f"sqlite:///{path}"'))
bank.variant("sqlite", TOLD, (TOLD_STORAGE, 'storage = optuna.storages.RDBStorage(f"sqlite:///{path}")'))

bank.hint(
    "no-file",
    "After make_study(path), there is no journal in the file path. A study in memory ends with its process.",
)
bank.slip("no-file", ("optuna.create_study(", "study = optuna.create_study("), ('"search", storage=storage, direction', '"search", direction'), (
    "    storage = JournalStorage(JournalFileBackend(str(path)))\n    study", "    study"))  # fmt: skip
bank.variant("no-file", TOLD, ('JournalFileBackend(f"{path}")', 'JournalFileBackend(f"{path}.log")'))

bank.hint("minimised", "The study must maximise its value, which is an accuracy. Optuna minimises by default.")
bank.slip("minimised", (' direction="maximize",', ""))
bank.variant("minimised", TOLD, (', direction="maximize")', ', directions=["minimize"])'))

bank.hint(
    "other-name",
    'The journal should contain one study, named "search", so that the workers find it. It contains: {names}.',
)
bank.slip(
    "other-name",
    ('create_study(study_name="search"', 'create_study(study_name="optuna"'),
    ('load_study(study_name="search"', 'load_study(study_name="optuna"'),
)
bank.variant("other-name", TOLD, ('study_name="search", direction', 'study_name="Search", direction'))

bank.hint(
    "own-study",
    "The worker created its own study: there are now {n} in the file, and none knows the others' trials. Load the "
    "existing one.",
)
bank.slip(
    "own-study",
    (LOADED, 'optuna.create_study(study_name=f"search {name}", storage=storage, pruner=pruner, direction="maximize")'),
)
bank.variant(
    "own-study",
    TOLD,
    ('optuna.load_study(\n        study_name="search",', 'optuna.create_study(\n        direction="maximize",'),
)

bank.hint(
    "not-in-the-file",
    'After work(path, "worker 1", 2, train), the study in the file has these trials: {states}. Two finished ones '
    "are expected.",
)
bank.slip("not-in-the-file", (LOADED, 'optuna.create_study(direction="maximize", pruner=pruner)'))
bank.variant(
    "not-in-the-file",
    TOLD,
    ("for t in study.get_trials(deepcopy=False)) < total:", "for t in study.get_trials(deepcopy=False)) < total - 1:"),
)

bank.hint(
    "no-pruner",
    "The second training was poor, yet ran to its end. Give load_study a pruner: the file doesn't know which one "
    "you want.",
)
bank.slip("no-pruner", (", storage=storage, pruner=pruner)", ", storage=storage)"))
bank.variant("no-pruner", MOST, ("        pruner=optuna.pruners.SuccessiveHalvingPruner(1, 3),\n", ""))

bank.hint(
    "other-rungs",
    "The first training, of 9 epochs, was judged in {rungs} rungs. It should be 3, after 1, 3 and 9 epochs: "
    "min_resource=1, reduction_factor=3. Without min_resource, the pruner first waits for a full training.",
)
bank.slip("other-rungs", ("min_resource=1, reduction_factor=3", ""))
bank.slip("other-rungs", ("min_resource=1, reduction_factor=3", "min_resource=3, reduction_factor=3"))
bank.variant("other-rungs", MOST, ("SuccessiveHalvingPruner(1, 3)", "SuccessiveHalvingPruner(1, 4)"))

bank.hint(
    "pruned-not-counted",
    "2 trials were asked for, and there are {n}: {states}. A pruned trial is finished, too. A worker ends as soon "
    "as there are as many as asked for.",
)
bank.slip("pruned-not-counted", ("< total", "<= total"))
bank.slip("pruned-not-counted", ("states=(TrialState.COMPLETE, TrialState.PRUNED)", "states=(TrialState.COMPLETE,)"))
bank.variant("pruned-not-counted", MOST, ("MaxTrialsCallback(total, states=done)", "MaxTrialsCallback(total)"))

bank.hint(
    "total-each",
    "2 trials were asked for and already there. The second worker ran {n} in all. total counts the trials of all "
    "workers together.",
)
bank.slip("total-each", (LOOP, "    study.optimize(named, n_trials=total)\n"))
bank.variant("total-each", MOST, (
    "    if len(study.get_trials(states=done)) < total:\n        study.optimize(one, callbacks=[optuna.study.MaxTrialsCallback(total, states=done)])",
    "    for _ in range(total):\n        study.optimize(one, n_trials=1)"))  # fmt: skip

bank.hint(
    "counts-after",
    "2 trials were asked for and already there, yet the second worker ran another one. Count before a trial, not "
    "only after it.",
)
bank.slip(
    "counts-after",
    (
        LOOP,
        "    while True:\n        study.optimize(named, n_trials=1)\n        if sum(t.state.is_finished() for t in study.trials) >= total:\n            break\n",
    ),
)
bank.variant("counts-after", MOST, ("    if len(study.get_trials(states=done)) < total:\n", "    if True:\n"))

bank.hint(
    "made-twice",
    "A study of this name already exists, and create_study refuses: {what} With load_if_exists=True, it uses the "
    "existing one; a worker loads it.",
)
bank.slip("made-twice", (", load_if_exists=True", ""))
bank.slip("made-twice", ("optuna.load_study(study_name", 'optuna.create_study(direction="maximize", study_name'))
bank.variant("made-twice", TOLD, ("    if not storage.get_all_studies():\n    ", ""))

bank.hint(
    "study-lost",
    "make_study(path) was called a second time, as when more jobs are submitted. The old trials are now gone, or "
    "in another study than the new one.",
)
bank.slip(
    "study-lost",
    (
        "    storage = JournalStorage(JournalFileBackend(str(path)))\n    optuna.c",
        "    Path(path).unlink(missing_ok=True)\n    storage = JournalStorage(JournalFileBackend(str(path)))\n    optuna.c",
    ),
)
bank.variant("study-lost", TOLD, (
    '    if not storage.get_all_studies():\n', '    if storage.get_all_studies():\n        optuna.delete_study(study_name="search", storage=storage)\n    if True:\n'))  # fmt: skip

bank.hint(
    "lost-left",
    "Worker 1 was killed during a trial and came back, but its old trial is still RUNNING. It looks for trials "
    "that carry its own name. Do you set the name before the training starts?",
)
bank.slip("lost-left", ("            study.tell(trial.number, state=TrialState.FAIL)", "            pass"))
bank.slip("lost-left", (
    '        trial.set_user_attr("worker", name)\n        return objective(trial, train)', '        value = objective(trial, train)\n        trial.set_user_attr("worker", name)\n        return value'))  # fmt: skip
bank.variant("lost-left", TOLD, ('        trial.set_user_attr("held by", name)\n', ""))

bank.hint(
    "living-failed",
    "Worker 12 is alive in the middle of its trial, but another worker has set this trial to FAIL: it can no "
    "longer report. Only trials with the worker's own name are lost.",
)
bank.slip("living-failed", ('        if trial.user_attrs.get("worker") == name:\n    ', "    "))
bank.slip("living-failed", ('trial.user_attrs.get("worker") == name', 'name in trial.user_attrs.get("worker", "")'))
bank.variant("living-failed", MOST, ('trial.user_attrs.get("name") == name and not', "not"))

bank.hint(
    "others-counted",
    "{expected} finished trials were asked for, but there are {got} when worker 1 ends. A trial that is running or "
    "has failed is not finished.",
)
bank.slip("others-counted", (LOOP, "    while len(study.trials) < total:\n        study.optimize(named, n_trials=1)\n"))
bank.variant(
    "others-counted",
    MOST,
    (
        "done = (TrialState.COMPLETE, TrialState.PRUNED)",
        "done = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)",
    ),
)

bank.hint(
    "put-back",
    "You put the configuration of the lost trial back in the queue. What has killed one worker may kill the next. "
    "Leave it.",
)
bank.slip(
    "put-back",
    ("state=TrialState.FAIL)\n", "state=TrialState.FAIL)\n            study.enqueue_trial(trial.params)\n"),
)
bank.variant(
    "put-back",
    TOLD,
    (
        "State.FAIL)\n    while",
        "State.FAIL)\n            study.enqueue_trial(old.params, skip_if_exists=False)\n    while",
    ),
)

bank.hint("worker-raised", "A worker ended with {error}")
bank.slip(
    "worker-raised",
    (
        "    while len(",
        "    if study.get_trials(states=(TrialState.FAIL,)):\n        raise SystemExit(3)\n    while len(",
    ),
)
bank.variant(
    "worker-raised",
    TOLD,
    (
        "    while sum",
        "    assert len([t for t in study.trials if t.state == State.FAIL]) == 0, 'a trial has failed'\n    while sum",
    ),
)

bank.hint(
    "wrong-states",
    "The trial of the killed worker should be a FAIL, and all others finished. The study has: {states}.",
)
bank.slip("wrong-states", ("state=TrialState.FAIL", "state=TrialState.PRUNED"))
bank.variant("wrong-states", TOLD, ("old._trial_id, State.FAIL", "old._trial_id, State.PRUNED"))

bank.hint(
    "one-more",
    "Worker 12 went on when enough trials were finished, and began another one: {n} in all. Look into the file "
    "before each trial.",
)
bank.slip("one-more", (LOOP, """    finished = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    study.optimize(named, n_trials=max(0, total - len(finished)))
"""))  # fmt: skip
bank.slip(
    "one-more",
    (
        LOOP,
        LOOP
        + "    for trial in study.get_trials(states=(TrialState.FAIL,)):\n        if name == 'worker 12':\n            study.optimize(named, n_trials=1)\n",
    ),
)
bank.variant("one-more", TOLD, ("    while sum", "    if name == 'worker 12':\n        total += 2\n    while sum"))

bank.hint(
    "swept-late",
    "Worker 3 was killed, and came back when there were enough trials. Its old trial should be a FAIL, and no new "
    "one should begin. Give up the old trial before you count.",
)
RUNNING = "    for trial in study.get_trials(states=(TrialState.RUNNING,)):\n"
ENOUGH = "    if len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) >= total:\n        return\n"
bank.slip("swept-late", (RUNNING, ENOUGH + RUNNING))
bank.variant("swept-late", TOLD, ("    for old in study.trials:\n", """    if sum(t.state in (State.COMPLETE, State.PRUNED) for t in study.trials) >= total:
        return
    for old in study.trials:
"""))  # fmt: skip

bank.hint(
    "only-the-last",
    "Worker 3 was killed and came back, but the trial that it left is still RUNNING, because a trial of another "
    "worker has begun since. Look at all running trials, not only at the last or the first one.",
)
bank.slip("only-the-last", (RUNNING, RUNNING.replace("):\n", ")[-1:]:\n")))
bank.slip("only-the-last", (RUNNING, RUNNING.replace("):\n", ")[1:]:\n")))
bank.variant("only-the-last", TOLD, ("    for old in study.trials:\n", "    for old in study.trials[-1:]:\n"))

bank.hint(
    "same-seed",
    "The same configuration was drawn twice. A sampler with a fixed seed draws the same in each worker, and again "
    "when a worker comes back. Don't give it a seed.",
)
bank.slip("same-seed", ("pruner=pruner)", "pruner=pruner, sampler=optuna.samplers.TPESampler(seed=0))"))
bank.variant("same-seed", TOLD, ("multivariate=True", 'seed=name.count("1")'))

bank.hint(
    "without-a-name",
    "Another worker's trial has only just begun and has no name yet. Nobody may give it up, and it must not make "
    "your code raise an error.",
)
NAMED = 'trial.user_attrs.get("worker") == name:'
bank.slip("without-a-name", (NAMED, 'trial.user_attrs["worker"] == name:'))
bank.slip("without-a-name", (NAMED, 'trial.user_attrs.get("worker") in (name, None):'))
bank.variant("without-a-name", TOLD, ('old.user_attrs.get("held by") == name', 'old.user_attrs["held by"] == name'))
bank.variant(
    "without-a-name", TOLD, ('old.user_attrs.get("held by") == name', 'old.user_attrs.get("held by", name) == name')
)
