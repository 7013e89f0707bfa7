"""Balise 9 of 09_ddp as a job: Slurm signals before the limit; it saves, starts again, and ends as if uninterrupted."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlojz_tp import launch
from tests.answers.bank import before
from tests.slurm.requeued import until_over

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent.parent
STEPS = 48  # of eight epochs


class Slow:
    """A data set whose first start is slow: it would need more than the minute that the job has."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, k):
        if not os.environ.get("SLURM_RESTART_COUNT"):
            time.sleep(0.015)
        return self.samples[k]


# a minute is Slurm's shortest job: on a busy machine the signal may come before the ranks listen for it
@pytest.mark.flaky(reruns=1)
def test_a_job_whose_time_is_over_goes_on_where_it_stood(tmp_path):
    cells = before("09_ddp", 10)
    quick = cells["train_set"]
    whole, done = launch.ranks(cells["train_on"], tmp_path / "none.pt", 8, n=2)[0]
    assert done and len(whole) == STEPS
    cells |= {"FOLDER": tmp_path, "train_set": Slow(quick)}
    script = cells["batch_script"](1, 2, 1, 1, f"{sys.executable} {cells['program'](cells['until_done'])}")
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    assert first in script
    # Slurm looks every half a minute: the signal comes 10 to 40 s before the limit, when the ranks listen for it
    script = cells["with_notice"](script.replace(first, "127.0.0.1"), 10)
    told = subprocess.run(
        ["sbatch", "--parsable", f"--export=ALL,GLOO_SOCKET_IFNAME=lo,OMP_NUM_THREADS=1,PYTHONPATH={ROOT}"],
        input=script, text=True, capture_output=True, cwd=tmp_path, timeout=30, check=True,
    )  # fmt: skip
    number = told.stdout.strip()
    until_over(number, number, 240)
    printed = (tmp_path / f"train-{number}.out").read_text()
    starts = [line.replace(",", "").split() for line in printed.splitlines() if " steps, " in line]
    counts = [int(words[0]) for words in starts]
    assert [words[2] for words in starts] == ["again", "done"] and sum(counts) == STEPS, printed
    losses = [float(words[-1]) for words in starts]
    assert losses == pytest.approx([whole[counts[0] - 1], whole[-1]], rel=1e-4), printed
