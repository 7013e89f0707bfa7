"""Count what crosses between ranks, and what a rank holds."""

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Record every collective and message that runs inside on this rank, those of DDP and FSDP included.

    calls: list of (name, bytes handed in by this rank). Names: "allreduce", "broadcast", "allgather", …
    `torch.distributed` calls arrive as operators `c10d.NAME_`. Source: PyTorch, torch/csrc/distributed/c10d/Ops.cpp.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.overloadpacket._qualified_op_name.split("::")
        if namespace in ("c10d", "_c10d_functional") and "wait" not in name and not name.startswith("_wrap"):
            self.calls.append((name.rstrip("_"), _handed_in(name, args)))
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        """The collectives in the order they were called."""
        return [name for name, _ in self.calls]

    def volume(self) -> int:
        """Bytes that this rank handed in, summed over all calls."""
        return sum(size for _, size in self.calls)


def _handed_in(name, args) -> int:
    # an all-gather's first argument is its output: what is handed in comes second
    position = 1 if name.startswith(("allgather", "gather", "reduce_scatter", "scatter", "alltoall")) else 0
    if len(args) <= position:
        position = 0
    return sum(t.numel() * t.element_size() for t in _flatten(args[position]))


def _flatten(tree) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flatten(item)


def held_bytes(tree) -> int:
    """Bytes of memory that the tensors in a nest of lists, tuples and dictionaries hold; shared memory counts once."""
    seen: dict[int, int] = {}
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            seen[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
    return sum(seen.values())
