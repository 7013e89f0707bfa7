"""Balises 1 and 8 of 09_ddp fit together: ranks join through what the batch script gives to srun's processes."""

import os

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checks.ddp import script_run
from dlojz_tp.works import source

CASE = {"nodes": 1, "gpus_per_node": 2, "cpus_per_gpu": 3, "minutes": 5, "command": "python train.py"}


def joined(code, variables):
    """On a rank: leave the group of the launch, and join as a process that srun has started."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or "ELASTIC" in name]:
        del os.environ[name]
    os.environ.update(variables, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS=str(size))
    namespace = {"os": os, "torch": torch, "dist": dist, "launch": launch}
    exec(code, namespace)
    device, total = namespace["join_world"](), torch.ones(1)
    dist.all_reduce(total)
    return str(device), dist.get_rank(), int(total)


def test_ranks_meet_where_the_script_says():
    work, namespace = source.find("09_ddp"), {}
    exec(work.balises[8].code, namespace)
    [(words, variables)] = script_run.told(namespace["batch_script"](**CASE), CASE, {"cpus-per-task": "3"}, os.getpid())
    assert words == ["srun", "python", "train.py"] and variables["SRUN_CPUS_PER_TASK"] == "3"
    assert variables["MASTER_ADDR"] == script_run.FIRST  # a name that this machine does not know
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": variables["MASTER_PORT"]}
    join_world = source.without_markers(work.balises[1].code).split("\n\n\ndef train")[0]
    found = launch.ranks(joined, join_world, meeting, n=2)
    assert found == [("cpu", 0, 2), ("cpu", 1, 2)]
