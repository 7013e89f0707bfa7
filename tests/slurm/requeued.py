"""Slurm lets a job that it puts back into its queue wait for two minutes; tests have less patience."""

import subprocess
import time

from tests.slurm.conftest import in_queue


def until_over(job: str, put_back: str, seconds: float) -> None:
    """Wait until no task of `job` is in the queue; the task `put_back` starts again as soon as it may."""
    limit = time.monotonic() + seconds
    while in_queue("--job", job):
        assert time.monotonic() < limit, f"job {job} is not over after {seconds} s"
        if in_queue("--job", put_back, "--states=PENDING"):
            time.sleep(2)  # sooner its node refuses it, "credential revoked": it compares whole seconds
            at_once = ["scontrol", "update", f"JobId={put_back}", "StartTime=now"]
            subprocess.run(at_once, capture_output=True, timeout=30)  # it fails where the task has just begun
        time.sleep(0.2)
