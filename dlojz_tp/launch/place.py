"""Which backend a launch uses, and which device a rank computes on."""

import contextlib
import importlib
import os

INSIDE = "DLOJZ_LAUNCH_INSIDE"  # "server" or "rank" in the processes of a launch, absent elsewhere
DEVICE = "DLOJZ_LAUNCH_DEVICE"
ON_CPU = "DLOJZ_LAUNCH_ON_CPU"  # set: gloo on the CPU, whatever GPUs there are; checks judge on the CPU
PRETENDED = "DLOJZ_PRETENDED_GPUS"  # how many GPUs a rehearsal pretends, in this process and in all that it launches
CARD = "DLOJZ_PRETENDED_CARD"  # what they are, where tensors have shapes and no values: a name of planner.CARDS
NAME = "Pretended GPU"  # what torch calls it
_said: set[int] = set()


@contextlib.contextmanager
def on_cpu():
    """Inside, launches have gloo on the CPU."""
    before = os.environ.get(ON_CPU)
    os.environ[ON_CPU] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ON_CPU]
        else:
            os.environ[ON_CPU] = before


def backend(n: int) -> str:
    """Name the torch.distributed backend for `n` ranks on this machine.

    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), so it needs one GPU a rank.
    Counting asks the driver's management library and opens no CUDA context.

    Arguments: n, number of ranks.
    Returns "nccl" with at least `n` GPUs, else "gloo"; "gloo" always while a check runs.
    """
    if os.environ.get(ON_CPU):
        return "gloo"
    import torch
    import torch.distributed as dist

    gpus = pretended() or torch.cuda.device_count()
    if gpus >= n and (pretended() or dist.is_nccl_available()):
        return "nccl"
    if gpus and not _said:
        _said.add(gpus)
        print(f"{gpus} GPU{'s' * (gpus > 1)} for {n} ranks: they run on the CPU with gloo (NCCL needs one GPU a rank).")
    return "gloo"


def pretended() -> int:
    """How many GPUs a rehearsal pretends in this process; 0 outside of one.

    Errors: ValueError for what is no number of GPUs.
    """
    given = os.environ.get(PRETENDED, "0")
    if not given.isdecimal():
        raise ValueError(f"{PRETENDED} is {given!r}: set it to a number of GPUs, or unset it")
    return int(given)


def joins(backend: str) -> str:
    """The backend through which ranks join: gloo carries what a rehearsal pretends to be NCCL."""
    return "gloo" if pretended() else backend


def pretend(backend: str) -> None:
    """In a rehearsal: from here on, this rank, which has joined, has pretended GPUs. A check's ranks are left alone."""
    if pretended() and not os.environ.get(ON_CPU):
        importlib.import_module("dlojz_tp.judging.pretend_gpu.rehearsed").enter(nccl=backend == "nccl")


def leave() -> None:
    """In a rehearsal, at the end of a rank: note what its GPU held, and its clock."""
    if pretended() and not os.environ.get(ON_CPU):
        importlib.import_module("dlojz_tp.judging.pretend_gpu.rehearsed").note()


def device():
    """Return the torch.device of this rank: its own GPU with NCCL, the CPU with gloo.

    Errors: RuntimeError outside a rank.
    """
    import torch

    if DEVICE not in os.environ:
        raise RuntimeError("launch.device() is for code that runs on ranks: call it inside a function given to launch")
    return torch.device(os.environ[DEVICE])
