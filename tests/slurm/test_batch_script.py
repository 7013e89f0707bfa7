"""Batch scripts of 09_ddp, submitted: what Slurm makes of them, and whether the ranks of balise 1 meet through them."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dlojz_tp.works import source

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent.parent

TRAINING = """
    import os, subprocess
    from pathlib import Path
    import torch, torch.distributed as dist
    from dlojz_tp import launch

    {join_world}

    nodes = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True).stdout.split()
    if os.environ["MASTER_ADDR"] == nodes[0]:  # the emulated nodes stand in no list of hosts
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    device, total = join_world(), torch.ones(1)
    dist.all_reduce(total)
    names = ("SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK")
    found = [*(os.environ[name] for name in names), device, int(total)]
    text = "{{}} processes, {{}} GPUs, {{}} cores, {{}}, sum {{}}".format(*found)
    Path(f"rank{{dist.get_rank()}}.txt").write_text(text)
    dist.barrier()
    dist.destroy_process_group()
"""


def batch_scripts():
    """The solution, and right answers of other designs that name the first node in other ways."""
    code = source.find("09_ddp").balises[8].code
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    assert first in code
    exported = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n"
    return [
        code,
        code.replace(first, "$(hostname)").replace(exported, "").replace("srun {", "srun -c {cpus_per_gpu} {"),
    ]


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ("--gres=gpu:2 --ntasks-per-node=2", {"0,1"}),
        ("--gpus-per-task=1 --ntasks-per-node=2", {"0", "1"}),
        ("--gres=gpu:2 --ntasks-per-gpu=1", {"0", "1"}),
    ],
)
def test_gpus_asked_for_by_task_hide_the_others(tmp_path, asked, seen):
    """Why the check of balise 8 refuses them: join_world takes the GPU with the number of the local rank."""
    script = "#!/bin/bash\nsrun bash -c 'echo $CUDA_VISIBLE_DEVICES'\n"
    command = ["sbatch", "--wait", "--parsable", "--nodes=1", "--time=1", "--output=seen.txt", *asked.split()]
    subprocess.run(command, input=script, text=True, capture_output=True, cwd=tmp_path, timeout=60, check=True)
    assert set((tmp_path / "seen.txt").read_text().split()) == seen


@pytest.mark.parametrize("code", batch_scripts(), ids=["solution", "hostname"])
def test_ranks_meet_through_the_script(tmp_path, code):
    namespace = {}
    exec(code, namespace)
    join_world = source.find("09_ddp").balises[1].code.split("\n\n\ndef train")[0]
    training = tmp_path / "train.py"
    training.write_text(textwrap.dedent(TRAINING).format(join_world=join_world))
    script = namespace["batch_script"](
        nodes=2, gpus_per_node=2, cpus_per_gpu=1, minutes=3, command=f"{sys.executable} {training}"
    )
    environment = f"ALL,GLOO_SOCKET_IFNAME=lo,PYTHONPATH={ROOT}"  # all nodes are this machine
    told = subprocess.run(
        ["sbatch", "--parsable", f"--export={environment}"],
        input=script, text=True, capture_output=True, cwd=tmp_path, timeout=30, check=True,
    )  # fmt: skip
    number = told.stdout.strip()
    limit = time.monotonic() + 120
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=30).stdout.strip():
        assert time.monotonic() < limit
        time.sleep(0.2)
    printed = (tmp_path / f"train-{number}.out").read_text()
    told = [path.read_text() for path in sorted(tmp_path.glob("rank*.txt"))]
    assert told == ["4 processes, 2 GPUs, 1 cores, cpu, sum 4"] * 4, printed
