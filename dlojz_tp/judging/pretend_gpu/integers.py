"""Short lists of integers, where tensors have no values: they may be sizes, so they are known, and travel.

They become known with a copy to a GPU, a message, or an all-reduce, that fills its memory, and are forgotten when
something is written over them.
"""

import functools
import json
import math

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from dlojz_tp.judging.pretend_gpu.memory import CPU, TENSOR, block, real, real_device, real_storage

SHORT = 64  # numbers
FOLDS = {"SUM": sum, "MAX": max, "MIN": min, "PRODUCT": math.prod}


def is_short(x) -> bool:
    return x.numel() <= SHORT and x.dtype in (torch.int32, torch.int64)


def copied(source, target) -> None:
    """A tensor of the CPU, with values, has come to a GPU."""
    if is_short(source) and real_device(source) == CPU:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            numbers = source.detach().flatten().tolist()
        _remember(target, lambda: numbers)


def sent(x, key: str) -> None:
    """A message with this key carries x, or nothing where its numbers aren't known."""
    _store().set(key, json.dumps(known(x)))


def received(x, key: str) -> None:
    """The message with this key is to come into x; whoever reads it waits for the sender."""
    _remember(x, functools.cache(lambda: json.loads(_store().get(key))))


def reduced(x, numbers: list[int] | None, key: str, rank: int, ranks: list[int], operation: str) -> None:
    """The all-reduce with this key has left in x what the numbers of all ranks make; numbers: those of this rank."""
    _store().set(f"{key}/{rank}", json.dumps(numbers))

    @functools.cache
    def together():
        lists = [json.loads(_store().get(f"{key}/{each}")) for each in ranks]
        return [FOLDS[operation](each) for each in zip(*lists)] if operation in FOLDS and all(lists) else None

    _remember(x, together)


def _remember(x, numbers) -> None:
    """For all of a storage alone, in its order: of a part, nobody knows the rest."""
    if real(TENSOR.is_contiguous, x) and x.nbytes == real_storage(x).nbytes():
        block(x).integers = numbers


def known(x) -> list[int] | None:
    """The numbers in x, or in its part of a list, in order; None if they aren't known."""
    memory = block(x)
    if memory is None or memory.integers is None or not real(TENSOR.is_contiguous, x):
        return None
    numbers, first = memory.integers(), real(TENSOR.storage_offset, x)
    return numbers and numbers[first : first + x.numel()]


def _store():
    return dist.distributed_c10d._get_default_store()
