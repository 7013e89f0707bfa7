"""What crosses between ranks: which collectives and messages, of how many bytes, in which group, in which order."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.measure.communications import NAMES, collective

_WITH_PEER = ("broadcast", "send", "recv")  # their third argument is the other rank


class Call(NamedTuple):
    """A collective or a message. name: as users call it, "all_reduce". bytes: those that this rank handed in.

    group: ranks that take part. peer: the root of a broadcast, the other rank of a message, else None. dtype: of what
    is sent. A mark between the calls has its text as name, and bytes None.
    """

    name: str
    bytes: int | None
    group: int = 0
    peer: int | None = None
    dtype: torch.dtype | None = None


class Traffic(TorchDispatchMode):
    """Record every collective and message that runs inside on this rank, those of DDP and FSDP included.

    events: what was called, in order, barriers too, and the marks between.
    `torch.distributed` calls arrive as operators `c10d.NAME_`. Source: PyTorch, torch/csrc/distributed/c10d/Ops.cpp.
    """

    def __init__(self):
        super().__init__()
        self.events: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: what it does inside comes back here
        call = collective(func, args)
        if call is not None:
            name, size = call
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.events.append(
                Call(
                    NAMES.get(name, name), size, _group_size(args, kwargs or {}),
                    args[2] if func.namespace == "c10d" and name in _WITH_PEER else None,
                    tensors[0].dtype if tensors else None,
                )
            )  # fmt: skip
        return func(*args, **(kwargs or {}))

    def mark(self, text: str) -> None:
        """Write a mark between the calls."""
        self.events.append(Call(text, None))

    @property
    def calls(self) -> list[Call]:
        """The calls that carry something, without barriers and marks."""
        return sent(self.events)

    def names(self) -> list[str]:
        """The collectives in the order they were called, barriers too."""
        return [event.name for event in self.events if event.bytes is not None]

    def volume(self) -> int:
        """Bytes that this rank handed in, summed over all calls."""
        return volume(self.events)

    def take(self) -> list[Call]:
        """The calls since the last time; they are forgotten."""
        calls, self.events = self.calls, []
        return calls


@contextlib.contextmanager
def counted_waits():
    """Inside, the waits for collectives are counted: yields a list with an entry for each."""
    found, wait = [], dist.Work.wait

    def counting(work, *args, **kwargs):
        found.append(1)
        return wait(work, *args, **kwargs)

    with replaced(dist.Work, "wait", counting):
        yield found


def sent(events: list[Call]) -> list[Call]:
    """The events without marks and barriers."""
    return [event for event in events if event.bytes is not None and "barrier" not in event.name]


def volume(events: list[Call]) -> int:
    """Bytes handed in."""
    return sum(event.bytes for event in sent(events))


def until(events: list[Call], mark: str) -> list[Call]:
    """The events before the first mark `mark`; all of them where it is missing."""
    marks = [event.name if event.bytes is None else None for event in events]
    return events[: marks.index(mark)] if mark in marks else events


def on_the_wire(events: list[Call]) -> float:
    """Bytes that a rank sends, on average over its group, if each collective goes round a ring (or as cheap a way).

    Of each byte handed in, an all-gather sends N − 1, an all-reduce 2 (N − 1) / N, a message 1, every other collective
    (N − 1) / N. Source: nccl-tests, PERFORMANCE.md, "Bus bandwidth".
    """
    return sum(event.bytes * _cost(event) for event in sent(events) if event.group > 1)


def _cost(call: Call) -> float:
    n = call.group
    known = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n, "send": 1, "recv": 0, "recv_any_source": 0}
    return known.get(call.name, (n - 1) / n)


def _group_size(args, kwargs) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
        if isinstance(value, str) and value not in ("sum", "avg", "min", "max"):
            return dist.distributed_c10d._resolve_process_group(value).size()
    return dist.get_world_size()
