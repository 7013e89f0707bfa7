"""Count what crosses between ranks, and in which groups."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.measure.communications import NAMES, collective


class Traffic(TorchDispatchMode):
    """Record every collective and message that runs inside on this rank, those of DDP and FSDP included.

    calls: list of (name, bytes handed in by this rank). Names: "allreduce", "broadcast", "allgather", …
    `torch.distributed` calls arrive as operators `c10d.NAME_`. Source: PyTorch, torch/csrc/distributed/c10d/Ops.cpp.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = collective(func, args)
        if call is not None:
            self.calls.append(call)
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        """The collectives in the order they were called."""
        return [name for name, _ in self.calls]

    def volume(self) -> int:
        """Bytes that this rank handed in, summed over all calls."""
        return sum(size for _, size in self.calls)


class GroupTraffic(TorchDispatchMode):
    """The collectives of this rank: calls is a list of (name, bytes handed in, ranks of the group)."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = collective(func, args)
        if call is not None and "barrier" not in call[0]:
            self.calls.append((NAMES.get(call[0], call[0]), call[1], _group_size(args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _group_size(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
        if isinstance(value, str) and value not in ("sum", "avg", "min", "max"):
            return dist.distributed_c10d._resolve_process_group(value).size()
    return dist.get_world_size()
