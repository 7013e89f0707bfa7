"""Balise 6: a trial that can be stopped, a study in a file, workers that are killed and come back."""

import math
import os
import select
import signal
import tempfile
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.probes.ranks import on_ranks

PATIENCE = 20  # seconds that a worker may take over what needs a tenth of one
NAN = math.nan
SPACE = {
    "optimizer": CategoricalDistribution(("sgd", "adamw")),
    "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "batch_size": IntDistribution(16, 256, log=True),
    "width": IntDistribution(8, 72, log=True),
    "weight_decay": FloatDistribution(1e-5, 1e-2, log=True),
}
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "batch_size": 64, "width": 24, "weight_decay": 1e-5}
ADAMW = {name: value for name, value in SGD.items() if name != "momentum"} | {"optimizer": "adamw"}
CURVE = [0.3, 0.7, 0.4, 0.5]
# what is trained: configuration, accuracies, after which epoch the pruner says stop
TRAININGS = [
    (SGD, CURVE, 9),
    (ADAMW, CURVE, 9),
    (SGD, CURVE, 2),
    (SGD, [0.3, NAN, 0.1, 0.1], 9),
    (SGD, [0.3, NAN], 9),
]
KNOWN = [("DuplicatedStudyError", "made-twice")]


class _StopAt(optuna.pruners.BasePruner):
    """Says stop as soon as the accuracy of this epoch, or of a later one, has been reported."""

    def __init__(self, epoch):
        self.epoch = epoch

    def prune(self, study, trial):
        return (trial.last_step or 0) >= self.epoch


def _train_one(objective, config, values, stop):
    """Run one trial of a study in memory. Returns what it was given, what it has trained and told."""
    given, trained = [], []

    def train(config):
        given.append(dict(config))
        for value in values:
            trained.append(value)
            yield value

    study = optuna.create_study(direction="maximize", pruner=_StopAt(stop))
    study.enqueue_trial(config)
    study.optimize(lambda trial: objective(trial, train), n_trials=1)
    trial = study.trials[0]
    ranges = {name: _range(distribution) for name, distribution in trial.distributions.items()}
    told = {epoch: str(value) for epoch, value in trial.intermediate_values.items()}
    value = trial.value if trial.state == TrialState.COMPLETE else None
    return {"ranges": ranges, "given": given[0] if given else {}, "told": told, "value": value,
            "end": [trial.state.name, len(trained)]}  # fmt: skip


def _range(distribution):
    """A distribution in words; the order of choices does not matter."""
    if isinstance(distribution, CategoricalDistribution):
        return f"one of {', '.join(sorted(map(str, distribution.choices)))}"
    kind = type(distribution).__name__.removesuffix("Distribution").lower()
    return f"{kind} from {distribution.low:g} to {distribution.high:g}{', log' if distribution.log else ''}"


def observe(objective, make_study, work):
    """Trials in memory; then workers over a file, one of them killed, another alive."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        found = [_train_one(objective, *one) for one in TRAININGS]
    finally:
        optuna.logging.set_verbosity(before)
    yield {key: [one[key] for one in found] for key in found[0]}
    yield on_ranks(_workers, make_study, work, sizes=(1,), timeout=2 * PATIENCE, known=KNOWN)[1][0]


def _workers(make_study, work):
    """On a rank: what is in the file after each worker. One that is killed, or lives on, is a process of its own."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="dlojz-study-") as folder:
        path = Path(folder) / "search.journal"
        make_study(path)
        start = path.read_bytes()[:9] if path.exists() else b""
        file = "sqlite" if start.startswith(b"SQLite") else "journal" if start.startswith(b"{") else "none"
        if file != "journal":
            return {"file": file}
        storage = JournalStorage(JournalFileBackend(str(path)))
        found = {"file": file, "studies": [[s.study_name, s.direction.name.lower()] for s in storage.get_all_studies()]}
        if found["studies"] != STUDIES:
            return found
        study = optuna.load_study(study_name="search", storage=storage)
        scores = iter([0.9, 0.1])  # the second training is poor: the pruner stops it
        work(path, "worker 1", 2, lambda config: _epochs(next(scores, 0.9)))
        found |= {"first": _states(study), "own": len(storage.get_all_studies())}
        found["rungs"] = [sum(key.startswith("completed_rung") for key in trial.system_attrs) for trial in study.trials]
        work(path, "worker 2", 2, lambda config: _epochs())
        found["enough"] = _states(study)
        make_study(path)
        anew = JournalStorage(JournalFileBackend(str(path)))
        found["kept"] = [[t.state.name for t in anew.get_all_trials(one._study_id)] for one in anew.get_all_studies()]
        if found["first"] == found["enough"] == FIRST and found["kept"] == [FIRST]:
            found |= _killed(path, study, work)
        return found


def _epochs(accuracy=0.9):
    yield from [accuracy] * 9


def _states(study):
    return [trial.state.name for trial in study.trials]


def _killed(path, study, work):
    """Worker 12 lives, and stands in the middle of its trial; worker 1 is killed in one, and comes back; then 12 goes on."""
    (read, write), (held, release) = os.pipe(), os.pipe()

    def waits(config):
        os.write(write, b"begun")
        os.read(held, 1)
        yield from _epochs()

    def dies(config):
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    living = _start(work, path, "worker 12", 4, waits)
    select.select([read, living[1]], [], [], PATIENCE)
    _end(_start(work, path, "worker 1", 4, dies))
    errors = [_end(_start(work, path, "worker 1", 4, lambda config: _epochs()))]
    states = [*_states(study), "none", "none"][2:]  # of 12's trial, of 1's, and of what came then
    found = {"living": states[0], "killed": states[1], "finished": sum(state in DONE for state in _states(study))}
    os.write(release, b"go on" * 20)  # whatever it begins
    errors.append(_end(living))
    rates = [trial.params.get("learning_rate") for trial in study.trials[2:]]
    back = sum("fixed_params" in trial.system_attrs for trial in study.trials)
    found |= {"errors": errors, "all": _states(study), "back": back, "rates": len(set(rates)) == len(rates)}
    _end(_start(work, path, "worker 3", 99, dies))
    study.ask()  # of a worker that has not written its name yet
    _end(_start(work, path, "worker 3", 99, dies))
    _end(_start(work, path, "worker 3", 0, lambda config: _epochs()))
    return found | {"swept": _states(study)[len(found["all"]) :]}


def _start(work, *arguments):
    """Call work in a process of its own. Returns (process id, the end of a pipe that tells its error, or closes)."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        try:
            work(*arguments)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:400])
        finally:
            os._exit(0)
    os.close(write)
    return process, read


def _end(started):
    """Wait for the end of a process, PATIENCE at most. Returns the error that it told, or ""."""
    process, read = started
    ended = select.select([read], [], [], PATIENCE)[0]
    told = os.read(read, 400).decode() if ended else "endless"
    if not ended:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(read)
    return told


STUDIES, FIRST, DONE = [["search", "maximize"]], ["COMPLETE", "PRUNED"], ("COMPLETE", "PRUNED")


def _ranges(config):
    return {name: _range(SPACE[name]) for name in config}


def _wrong_range(seen, due):
    if "momentum" in seen[1]:
        return "momentum-always"
    return "names" if any(one.keys() != true.keys() for one, true in zip(seen, due)) else "ranges"


def _range_fields(seen, due):
    one, true = next(pair for pair in zip(seen, due) if pair[0] != pair[1])
    name = next((name for name in true if one.get(name) != true[name]), None) or next(iter(one.keys() - true.keys()))
    return {"name": name, "expected": true.get(name, "not asked for"), "got": one.get(name, "not asked for")}


def _told(values):
    return {epoch: str(value) for epoch, value in enumerate(values, 1)}


def _wrong_report(seen, due):
    if not any(seen):
        return "never-reported"
    return "epochs-from-zero" if any(0 in told for told in seen) else "wrong-report"


def _wrong_end(seen, due):
    stopped, trained = seen[2]
    if seen[2] != due[2]:
        if stopped == "COMPLETE":
            return "never-asked" if trained == 4 else "pruned-as-complete"
        return ("trained-on" if trained == 4 else "asked-late") if stopped == "PRUNED" else "trial-fails"
    if seen[0] != due[0] or seen[1] != due[1]:
        return "trial-fails"
    if seen[3][1] > 2:
        return "nan-trains-on"
    return "nan-completes" if "COMPLETE" in (seen[3][0], seen[4][0]) else "nan-fails"


def _first_wrong(seen, due):
    states, rungs = seen
    if len(states) > 2:
        return "pruned-not-counted"
    if len(states) < 2 or "FAIL" in states:
        return "trial-fails" if "FAIL" in states else "not-in-the-file"
    return "other-rungs" if any(rungs) else "no-pruner"


def _counts(seen, due):
    states = ", ".join(seen) or "none"
    return {"n": len(seen), "states": states, "got": states, "state": "FAIL"}


def _first_counts(seen, due):
    return _counts(seen[0], due) | {"rungs": (*seen[1], 0)[0], "expected": ", ".join(FIRST)}


def _other_study(seen, _):
    return "minimised" if seen == [["search", "minimize"]] else "other-name"


def _lost(seen, _):
    return "lost-left" if seen == "RUNNING" else "wrong-states"


def _other_states(seen, due):
    return "one-more" if len(seen) > len(due) else "wrong-states"


def _all_ended(seen, due):
    return len(seen) == len(due) and all(a == b or b is True and a in DONE for a, b in zip(seen, due))


def _not_swept(seen, due):
    if len(seen) < 3 or seen[1] != "RUNNING":
        return "without-a-name"
    return "swept-late" if seen[0] == "FAIL" else "only-the-last"


LOOKS = [
    Look("a trial suggests the values of the space, momentum for SGD only", "ranges", [_ranges(one[0]) for one in TRAININGS], _wrong_range,
         fields=_range_fields),
    Look("it trains with the suggested values", "given", [one[0] for one in TRAININGS], "other-config"),
    Look("it reports every epoch", "told", [_told(v[:n]) for v, n in zip((one[1] for one in TRAININGS), (4, 4, 2, 1, 1))],
         _wrong_report, holds=lambda seen, due: all(one.items() <= told.items() and one for one, told in zip(due, seen)), fields=silent),
    Look("it ends when the pruner says so, or when the training has diverged", "end",
         [["COMPLETE", 4], ["COMPLETE", 4], ["PRUNED", 2], ["PRUNED", 2], ["PRUNED", 2]], _wrong_end,
         fields=lambda seen, due: {"state": seen[2][0], "n": seen[2][1], "expected": "", "got": ""}),
    Look("it returns the last accuracy", "value", [0.5, 0.5, None, None, None], "not-the-last"),
    Look("the study is in a journal, and is maximised", "file", "journal", lambda seen, _: "sqlite" if seen == "sqlite" else "no-file"),
    Look("", "studies", STUDIES, _other_study,
         fields=lambda seen, _: {"names": ", ".join(name for name, _ in seen) or "none"}),
    Look("a worker runs trials of this study, and prunes them", "own", 1, "own-study", fields="n"),
    Look("", lambda found: [found["first"], found["rungs"]], [FIRST, [3, 1]], _first_wrong, fields=_first_counts),
    Look("the next worker finds enough trials and runs none", "enough", FIRST, lambda seen, _: "total-each" if len(seen) > 3 else "counts-after",
         fields=_counts),
    Look("when it is made again, the study keeps its trials", "kept", [FIRST], "study-lost"),
    Look("two workers, one is killed and comes back: its old trial is a FAIL", "killed", "FAIL",
         _lost, fields="states"),
    Look("the trial of the other worker is not", "living", "RUNNING", "living-failed"),
    Look("both end without an error", "errors", ["", ""], "worker-raised", fields=lambda seen, _: {"error": next(filter(None, seen))}),
    Look("there are as many finished trials as asked for", "finished", 4, "others-counted"),
    Look("the lost configuration is not run again", "back", 0, "put-back"),
    Look("at the end, no trial is still running", "all", [*FIRST, True, "FAIL", True, True],
         _other_states, holds=_all_ended, fields=lambda *both: _counts(*both) | silent(*both)),
    Look("workers draw different configurations", "rates", True, "same-seed"),
    Look("a worker that finds enough trials gives up the one it left, and runs none", "swept", ["FAIL", "RUNNING", "FAIL"], _not_swept),
]  # fmt: skip


def balise_6(objective, make_study, work):
    yield from judged(LOOKS, observe, objective, make_study, work)
