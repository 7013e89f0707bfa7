"""Worlds of 1, 2, 3 and 4 ranks in one launch of four: the ranks leave one process group and meet in the next."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from dlojz_tp import launch
from dlojz_tp.checking import Wrong

PARTS = (((0, 1, 2, 3),), ((0, 1, 2), (3,)), ((0, 1), (2, 3)))  # three times, four ranks as one, two, two worlds


def in_worlds(fn, *args, timeout: float = 20) -> dict[int, list]:
    """Call `fn(*args)` on all ranks of worlds of 4, 3, 1 and 2 ranks. Returns world size -> results in rank order."""
    with tempfile.TemporaryDirectory(prefix="dlojz-worlds-") as folder:
        try:
            ranks = launch.ranks(_through, folder, fn, args, n=4, timeout=timeout)
        except launch.RankError as error:
            if isinstance(error.cause, Wrong):
                raise error.cause from error
            raise
    return {4: [r[0] for r in ranks], 3: [r[1] for r in ranks[:3]], 1: [ranks[3][1]], 2: [r[2] for r in ranks[:2]]}


def _through(folder, fn, args):
    me, found = dist.get_rank(), []
    torch.set_num_threads(1)
    for turn, parts in enumerate(PARTS):
        mine = next(part for part in parts if me in part)
        if len(mine) < 4:
            _join(Path(folder) / f"{turn}-{mine[0]}", mine.index(me), len(mine))
        found.append(fn(*args))
    return found


def _join(file, rank, size):
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", store=dist.FileStore(str(file), size), rank=rank, world_size=size)


def has_memory(tensor) -> bool:
    """Whether this is a tensor with memory of its own: DTensor finds out shapes on fake and meta tensors."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor)
