"""Slurm lets a job that it puts back into its queue wait for two minutes; tests have less patience."""

import subprocess
import time


def in_queue(job: str, *options: str) -> bool:
    """Whether a task of this job waits or runs."""
    command = ["squeue", "--noheader", "--array", "--job", job, *options]
    return bool(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip())


def until_over(job: str, put_back: str, seconds: float) -> None:
    """Wait until no task of `job` is in the queue; the task `put_back` starts again as soon as it may."""
    limit = time.monotonic() + seconds
    while in_queue(job):
        assert time.monotonic() < limit, f"job {job} is not over after {seconds} s"
        if in_queue(put_back, "--states=PENDING"):
            time.sleep(2)  # sooner its node refuses it, "credential revoked": it compares whole seconds
            at_once = ["scontrol", "update", f"JobId={put_back}", "StartTime=now"]
            subprocess.run(at_once, capture_output=True, timeout=30)  # it fails where the task has just begun
        time.sleep(0.2)
