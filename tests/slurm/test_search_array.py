"""Balise 6 of 11_hyperparameter_search as an array of jobs: one task is killed, and nothing finished is lost."""

import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from dlojz_tp import launch
from tests.answers.bank import before
from tests.slurm.requeued import until_over

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent.parent
TRIALS, WORK = 30, "11_hyperparameter_search"
ARRAY = """#!/bin/bash
#SBATCH --array=0-2
#SBATCH --ntasks=1
#SBATCH --time=5
#SBATCH --requeue
srun {python} {program} "task $SLURM_ARRAY_TASK_ID"
"""
PROGRAM = """
import sys
from tests.slurm.test_search_array import part
part({path!r}, sys.argv[1])
"""


def answers():
    """The functions of balise 6."""
    return before(WORK, 7)


def training(config):
    """Half a second a trial, if it is not stopped."""
    for epoch in range(9):
        time.sleep(0.05)
        yield config["learning_rate"] + epoch


def part(path, name):
    """What a task of the array does. Task 1 stays within its second trial until it is ended: it dies inside one."""
    inside = Path(f"{path}.inside")
    begun = []

    def until_it_is_ended(config):
        begun.append(config)
        if len(begun) == 2:
            inside.touch()
            time.sleep(300)
        yield from training(config)

    ended_before = name != "task 1" or inside.exists()
    answers()["work"](path, name, TRIALS, training if ended_before else until_it_is_ended)


def load(path):
    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.load_study(study_name="search", storage=storage)


def held(study, name):
    """States of the trials that this worker has begun."""
    return [trial.state.name for trial in study.trials if name in trial.user_attrs.values()]


def until(condition, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def all_is_well(study, before_the_kill):
    states = [trial.state.name for trial in study.trials]
    done = sum(state in ("COMPLETE", "PRUNED") for state in states)
    assert TRIALS <= done <= TRIALS + 2 and set(states) <= {"COMPLETE", "PRUNED", "FAIL"}, states
    assert states.count("FAIL") == held(study, "task 1").count("FAIL") == 1
    after = {trial.number: trial.state for trial in study.trials}
    assert all(after[number] == state for number, state in before_the_kill.items())


def finished(study):
    return {trial.number: trial.state for trial in study.trials if trial.state.is_finished()}


def test_an_array_whose_task_is_put_back_into_the_queue(tmp_path):
    """Slurm ends a task, and starts it again under the same number."""
    path, program = tmp_path / "search.journal", tmp_path / "program.py"
    answers()["make_study"](path)
    program.write_text(PROGRAM.format(path=str(path)))
    script = ARRAY.format(python=sys.executable, program=program)
    told = subprocess.run(
        ["sbatch", "--parsable", f"--export=ALL,PYTHONPATH={ROOT}"],
        input=script, text=True, capture_output=True, cwd=tmp_path, timeout=30, check=True,
    )  # fmt: skip
    study = load(path)
    until(Path(f"{path}.inside").exists)
    seen = finished(study)
    job = told.stdout.strip()
    subprocess.run(["scontrol", "requeue", f"{job}_1"], check=True, timeout=30)
    until_over(job, f"{job}_1", 90)
    all_is_well(study, seen)


def test_jobs_one_of_which_is_cancelled(tmp_path):
    """launch.job: one job a worker; the one that is cancelled is submitted again."""
    path = tmp_path / "search.journal"
    answers()["make_study"](path)
    jobs = [launch.job(part, path, f"task {i}", nodes=1, ranks_per_node=1, minutes=3) for i in range(3)]
    study = load(path)
    until(Path(f"{path}.inside").exists)
    seen = finished(study)
    jobs[1].cancel()
    with pytest.raises(launch.JobError):
        jobs[1].results()
    launch.job(part, path, "task 1", nodes=1, ranks_per_node=1, minutes=3).results()
    for job in (jobs[0], jobs[2]):
        job.results()
    all_is_well(study, seen)
