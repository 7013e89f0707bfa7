"""A node, or Slurm's daemon on it, is lost in the middle of a job."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from tests.slurm.conftest import in_queue
from tests.slurm.test_slurm_jobs import until

pytestmark = pytest.mark.slurm


def sums(folder, steps):
    """A rank at work: a collective every tenth of a second."""
    (Path(folder) / f"up-{dist.get_rank()}").touch()
    for _ in range(steps):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)
    return dist.get_rank()


def started(folder, steps):
    """A job on both nodes, once both ranks are at work."""
    job = launch.job(sums, str(folder), steps, nodes=2, ranks_per_node=1, minutes=2)
    until(lambda: all((folder / f"up-{rank}").exists() for rank in (0, 1)))
    return job


def daemon() -> psutil.Process:
    """Slurm's daemon of the second node."""
    return psutil.Process(int((Path(os.environ["SLURM_CONF"]).parent / "run" / "slurmd-tp2.pid").read_text()))


@pytest.mark.flaky(reruns=1)  # on a busy machine Slurm can take longer than the fixture waits for an empty queue
def test_a_node_that_is_lost_is_told_and_ends_the_job(tmp_path):
    job = started(tmp_path, steps=1000)
    begin = time.monotonic()
    try:
        subprocess.run(["scontrol", "update", "nodename=tp2", "state=down", "reason=test"], check=True, timeout=30)
        with pytest.raises(launch.JobError, match="a node failed"):
            job.results()
        assert time.monotonic() - begin < 20
        until(lambda: not in_queue())
    finally:  # its daemon still answers, so Slurm may have taken it back by itself: then this is refused
        subprocess.run(["scontrol", "update", "nodename=tp2", "state=resume"], capture_output=True, timeout=30)


@pytest.mark.flaky(reruns=1)
def test_a_daemon_that_dies_and_comes_back_costs_the_job_nothing(tmp_path):
    job = started(tmp_path, steps=40)
    lost = daemon()
    lost.kill()
    until(lambda: not lost.is_running() or lost.status() == psutil.STATUS_ZOMBIE)
    subprocess.run(["slurmd", "-N", "tp2"], check=True, timeout=30)
    assert job.results() == [0, 1]
