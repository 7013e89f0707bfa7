"""Answers at work on GPUs that are not there, one for each rank: what only a GPU would show."""

import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.pretend_gpu import pretend_gpu
from dlojz_tp.probes.ranks import on_ranks

MIXED = "Expected all tensors to be on the same device"
NO_BACKEND = "No backend type associated with device type cpu"


def on_gpus(fn, *args, known, n=2, **more) -> list | None:
    """Call `fn(gpu, *args)` on `n` ranks, each with a pretended GPU of its own: results in rank order.

    known: (sign, slug), as for `on_ranks`; they end in Wrong. None where it fails without a sign: a pretended GPU is
    not a GPU, and what goes wrong for another reason than its words say is not the answer's fault.
    """
    try:
        return on_ranks(_with_gpu, fn, args, sizes=(n,), known=known, **more)[n]
    except launch.RankError:
        return None


def _with_gpu(fn, args):
    with pretend_gpu(count=dist.get_world_size()) as gpu:
        return fn(gpu, *args)
