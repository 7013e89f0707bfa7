"""The batch script of 09_ddp, submitted: what Slurm makes of it."""

import subprocess
import time

import pytest

from dlojz_tp import source

pytestmark = pytest.mark.slurm


def test_solution_starts_one_process_for_each_gpu(tmp_path):
    namespace = {}
    exec(source.find("09_ddp").balises[8].code, namespace)
    command = (
        "bash -c 'echo process $SLURM_PROCID of $SLURM_NTASKS, gpus $SLURM_GPUS_ON_NODE, cores $SLURM_CPUS_PER_TASK'"
    )
    script = namespace["batch_script"](nodes=2, gpus_per_node=2, cpus_per_gpu=1, minutes=2, command=command)
    told = subprocess.run(
        ["sbatch", "--parsable"], input=script, text=True, capture_output=True, cwd=tmp_path, timeout=30, check=True
    )
    number = told.stdout.strip()
    output = tmp_path / f"train-{number}.out"
    limit = time.monotonic() + 60
    while time.monotonic() < limit and (not output.exists() or output.read_text().count("process") < 4):
        time.sleep(0.2)
    lines = sorted(output.read_text().splitlines())
    assert lines == [f"process {rank} of 4, gpus 2, cores 1" for rank in range(4)]
