"""Run a notebook's function on several processes of this machine, with torch.distributed ready inside.

    from dlojz_tp import launch

    def mean_rank():
        x = torch.tensor([float(dist.get_rank())], device=launch.device())
        dist.all_reduce(x)
        return x.item() / dist.get_world_size()

    launch.ranks(mean_rank, n=4)                    # [1.5, 1.5, 1.5, 1.5]
    launch.worlds(mean_rank, sizes=(1, 2, 3, 4))    # {1: [0.0], 2: [0.5, 0.5], ...}

A small server process imports torch once. Each launch asks it to fork fresh ranks, which takes a few hundredths of
a second. The files, in the order of one launch:

    run.py      ranks() and worlds(): what the user calls
    wire.py     functions, arguments and results, by value
    client.py   starts the server and talks to it
    server.py   the server: forks the ranks, reaps them, kills them
    large_pages.py  a server that forks often in less time
    rank.py     what happens inside a rank
    joining.py  how ranks join a process group
    place.py    which backend and which device
    lanes.py    groups for messages that must not wait for each other
    starting.py the calm line while the first ranks start, or something else takes long
    started.py  what the parent knows of a rank
    loading.py  unpickles what they have sent
    collect.py  listens to the ranks until they are done, wait for each other, or the deadline passes
    alarm.py    seconds for a piece of code of this process
    proc.py     what Linux tells of a process or a thread
    busy.py     how much longer things may take because other programs want the same cores
    patience.py whether late ranks wait without end, or a busy machine kept them from running
    rest.py     whether all ranks wait for each other, long before the deadline
    stacks.py   where a hung rank stands
    errors.py   the one error to show, root cause first

Ranks can also stay, and keep their variables between cells: `%%ranks 4` in a notebook, `launch.stay(4)` elsewhere:

    staying.py  their parent's side
    living.py   what such a rank does
    magic.py    the cell magic

A job does the same on several nodes of a Slurm machine, or here where there is no Slurm, and outlives the notebook:

    job = launch.job(mean_rank, nodes=2, ranks_per_node=4, minutes=10)
    job.wait()                                      # live: state, time, last lines of the logs
    job.results()                                   # [3.5, 3.5, ...]
    launch.queue()                                  # all jobs by name; launch.last_job() after a restart

See jobs/ for its files.
"""

from dlojz_tp.launch.client import warm
from dlojz_tp.launch.errors import LaunchError, RankError
from dlojz_tp.launch.jobs import job, last_job, queue
from dlojz_tp.launch.jobs.handle import Job
from dlojz_tp.launch.jobs.options import JobError
from dlojz_tp.launch.lanes import lane
from dlojz_tp.launch.place import backend, device
from dlojz_tp.launch.run import ranks, worlds
from dlojz_tp.launch.staying import stay

__all__ = [
    "Job", "JobError", "LaunchError", "RankError", "backend", "device", "job", "lane", "last_job", "queue", "ranks",
    "stay", "warm", "worlds",
]  # fmt: skip
