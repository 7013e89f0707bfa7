"""Faults of Slurm, and of the file that a centre writes; tests/slurm injects more of them into a real one."""

import signal
from pathlib import Path

import pytest
import torch

from dlojz_tp import launch
from dlojz_tp.launch.jobs import files, options, outcome
from dlojz_tp.launch.jobs import slurm as job_slurm

FACTS = {"name": "train-1", "nodes": 1, "ranks_per_node": 2, "minutes": 0.5, "collective_timeout": 120}
STACK = 'main 0x1\nThread 0x1 (most recent call first):\n  File "train.py", line 3 in step\n'


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that look like Slurm's: `slurm(name, body)` says what one of them does."""
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in [name for name in options.os.environ if name.startswith("DLOJZ_SLURM_")]:
        monkeypatch.delenv(name)

    def write(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o700)

    for name in ("sbatch", "squeue", "srun", "scancel", "scontrol", "sinfo"):
        write(name, "exit 9")
    return write


def refused() -> str:
    with pytest.raises(launch.JobError) as caught:
        launch.job(abs, -1)
    assert "\n" not in str(caught.value)
    assert not list(files.state.folder().glob("jobs/*"))
    return str(caught.value)


def test_a_controller_that_is_down_is_told_before_sbatch_tries_for_long(slurm):
    slurm("scontrol", "echo 'Slurmctld(primary) at n1 is DOWN'; exit 1")
    slurm("sbatch", "sleep 60")
    assert refused().startswith("Slurm does not answer, and nothing was submitted; try again in some minutes")


def test_one_of_two_controllers_is_enough(slurm):
    slurm("scontrol", "echo 'Slurmctld(primary) at n1 is DOWN'; echo 'Slurmctld(backup) at n2 is UP'")
    slurm("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    assert refused().startswith("Slurm refused the job: Invalid qos")


@pytest.mark.parametrize("said", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send"])
def test_a_controller_that_goes_while_sbatch_asks_is_no_refusal(slurm, said):
    slurm("sbatch", f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    assert refused().startswith("Slurm does not answer") and "refused" not in refused()
    with pytest.raises(launch.JobError, match="^Slurm does not answer, and the job was not cancelled"):
        slurm("scancel", f"echo 'scancel: error: {said}' >&2; exit 1")
        job_slurm.cancel(Path(), {"id": "1"})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("DLOJZ_SLURM_ENVIRONMENT", "'A;touch /tmp/x'=1"),
        ("DLOJZ_SLURM_ENVIRONMENT", "'$(id)'=1"),
        ("DLOJZ_SLURM_ENVIRONMENT", "2WORDS=1"),
        ("DLOJZ_SLURM_ENVIRONMENT", "=1"),
        ("DLOJZ_SLURM_SBATCH", "'mem=1\nid'=1"),
        ("DLOJZ_SLURM_SBATCH", "mem='1\nid'"),
    ],
)
def test_a_name_or_a_line_that_would_run_is_refused(slurm, monkeypatch, variable, words):
    monkeypatch.setenv(variable, words)
    line = refused()
    assert line.startswith(variable) and "a table of names and values" in line


def test_names_that_are_right_are_taken(slurm, monkeypatch):
    monkeypatch.setenv("DLOJZ_SLURM_ENVIRONMENT", "NCCL_DEBUG=WARN _x='a; b'")
    monkeypatch.setenv("DLOJZ_SLURM_SBATCH", "--exclusive mem-per-cpu=3G mail_type='END FAIL'")
    found = options.load()
    assert found.environment == {"NCCL_DEBUG": "WARN", "_x": "a; b"}
    assert found.sbatch == {"exclusive": True, "mem-per-cpu": "3G", "mail_type": "END FAIL"}


def ended(folder, *stacks):
    for rank, stack in enumerate(stacks):
        (folder / f"rank-{rank}.up").touch()
        (folder / f"rank-{rank}.stack").write_text(stack)
        files.write(folder / f"rank-{rank}.end", {"why": "late", "code": -signal.SIGKILL, "at": 1.0})
    return outcome.error(folder, FACTS, "FAILED")


def test_too_few_minutes_are_not_called_a_hang(tmp_path):
    error = ended(tmp_path, STACK, STACK)
    assert error.kind == "hung" and "hung" not in error.summary and error.stands[0]
    assert error.summary.endswith("its 0.5 min were over: if it only needs longer, ask for more with minutes=")
    assert str(error).startswith(error.summary) and "train.py" in str(error)


def test_ranks_that_only_wait_for_each_other_still_are(tmp_path):
    waits = STACK.replace("train.py", f"{Path(torch.__file__).parent}/distributed/distributed_c10d.py").replace(
        "step", "all_reduce"
    ) + ('  File "train.py", line 3 in step\n')
    assert ended(tmp_path, waits, waits).summary.startswith("ranks 0, 1 of 2 hung: all still waiting after 30 s")
