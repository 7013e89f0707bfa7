"""How ranks join a process group: nobody is ahead of the others, and gloo's threads give way to those that compute."""

import contextlib
import os

import torch.distributed as dist


def join_group(backend: str, **more) -> None:
    """`dist.init_process_group(backend, **more)`, for ranks of ours.

    It returns when all ranks have joined: one that leaves the group at once would break the connections that a slower
    one is still making ("connection closed by peer").
    """
    with giving_way():
        dist.init_process_group(backend, **more)
    if backend == "gloo":
        dist.barrier()


@contextlib.contextmanager
def giving_way():
    """Inside, this thread and those that it starts wait for a core until it is free (SCHED_BATCH, on Linux).

    For the moment in which a process group starts its threads. A peer's message wakes gloo's event loop; usually it
    takes the core from the very thread whose lock it needs next, and spins until its time is up. Measured on two cores,
    an all-reduce of 16 numbers: 1.3 ms → 0.5 ms with two ranks, 4.8 → 1.3 with four.

    Source: sched(7), "SCHED_BATCH".
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))
