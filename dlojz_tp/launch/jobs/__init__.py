"""A function on several nodes of a Slurm machine, or here where there is no Slurm; a job outlives the notebook.

options.py  what a centre asks: slurm.toml and DLOJZ_SLURM_*
files.py    the private folder of each job
slurm.py    submission to Slurm, through submitit
here.py     the same on this machine
shepherd.py the process beside each rank: starts it, watches it, ends it
rank.py     what happens inside a rank
outcome.py  how the ranks ended, root cause first
handle.py   Job: wait, results, logs, cancel
view.py     how a job is shown
"""

import math
import operator
import os
import shutil

from dlojz_tp.launch import place, run
from dlojz_tp.launch.jobs import files, here, options, slurm
from dlojz_tp.launch.jobs.handle import Job
from dlojz_tp.launch.jobs.options import JobError
from dlojz_tp.launch.jobs.view import Table

MOST_NODES, MOST_RANKS_PER_NODE = 1024, 64
SHOWN = 10  # jobs that are over, in the table


def job(fn, *args, nodes: int = 1, ranks_per_node: int = 4, minutes: float = 10, **kwargs) -> Job:
    """Submit a function as a job: to Slurm where there is one, else to this machine, and return at once.

    Each rank runs the function with torch.distributed initialised, as with `launch.ranks`: NCCL where a node has a GPU
    a rank, else gloo on the CPU. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. The job goes on
    when the notebook ends; `launch.last_job()` and `launch.queue()` find it again. When a rank fails, the others are
    ended.

    Arguments:
        fn: the function. One from a notebook or a script is sent by value with the globals it uses, one from an
            importable module by name. An argument of its own called `nodes`, `ranks_per_node` or `minutes` needs
            functools.partial.
        args, kwargs: its arguments, the same on all ranks.
        nodes: number of nodes. On a machine without Slurm they are imitated: only the ranks' numbers differ.
        ranks_per_node: ranks on each node, one for each GPU.
        minutes: the time the ranks have; Slurm counts whole minutes.
    Returns a Job: `.wait()`, `.results()`, `.logs()`, `.cancel()`.
    Errors: JobError when Slurm refuses the job (its reason in one line), for a wrong slurm.toml, and for a folder that
        cannot be written; TypeError when `fn` or an argument cannot be sent; ValueError for a wrong number.
    """
    if place.INSIDE in os.environ:
        raise RuntimeError("this code already runs on a rank: launch.job cannot be called there")
    run.check_callable(fn)
    nodes = _count(nodes, "nodes", MOST_NODES)
    ranks_per_node = _count(ranks_per_node, "ranks_per_node", MOST_RANKS_PER_NODE)
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a positive number, not {minutes!r}")
    centre = options.load()
    task = run.packed(fn, args, kwargs)
    folder = files.create(getattr(fn, "__name__", type(fn).__name__))
    on_slurm = slurm.available(centre)
    facts = {
        "name": folder.name,
        "place": "slurm" if on_slurm else "here",
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "minutes": minutes,
        "collective_timeout": centre.collective_timeout,
        "submitted": files.now(),
    }
    try:
        files.write_task(folder, run.surroundings(), task)
        if on_slurm:
            slurm.submit(folder, facts, centre)
        else:
            here.submit(folder, facts)
    except BaseException:
        if not facts.get("id"):
            shutil.rmtree(folder, ignore_errors=True)  # nothing runs: nothing to remember
        raise
    files.prune()
    return Job(folder)


def last_job() -> Job:
    """The job submitted last, also after a restart of the kernel. Errors: JobError where there is none."""
    folders = files.known()
    if not folders:
        raise JobError("no job has been submitted yet")
    return Job(folders[-1])


def queue() -> Table:
    """The user's jobs of this course: those that wait or run, and the last that are over, the newest first.

    Returns a table; `queue()["train-1"]` is the job of that name.
    """
    jobs, looks, over = [], [], 0
    for folder in reversed(files.known()):
        if (folder / "over.json").exists() and over >= SHOWN:
            continue
        jobs.append(Job(folder))
        looks.append(jobs[-1].look())
        over += looks[-1].over
    return Table(jobs, looks)


def _count(n, name: str, most: int) -> int:
    try:
        number = 0 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}, not {n!r}")
    return number
