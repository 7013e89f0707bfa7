"""Record what crosses between ranks, and when: every collective, asynchronous ones until they are complete."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .machine import as_device, synchronize

# Operators of c10d, written as users call them. Source: PyTorch, torch/csrc/distributed/c10d/Ops.cpp.
SPACES = ("c10d", "_c10d_functional")  # collectives that write into a tensor, and those that return one (DTensor)
NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "recv_any_source": "recv",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
CALLBACK_LIMIT_S = 0.5
# Their first argument is what they write; what a rank hands in comes second.
_WRITES_FIRST = ("allgather", "_allgather", "gather", "reduce_scatter", "_reduce_scatter", "scatter", "alltoall")


class Communications(TorchDispatchMode):
    """Record the collectives and messages of this rank, those of DDP and FSDP included, with their times.

        with measure.Communications() as log:
            with log.phase("backward"):
                loss.backward()
        log.entries()

    An asynchronous collective lasts from its call until it is complete, whether anybody waits for it or not; a
    message (send, receive) and a functional collective (DTensor's) until somebody has waited for it. On a GPU the times
    are those of CUDA events, and nothing synchronises before ``entries``.

    Source: each call arrives as an operator ``c10d.NAME_`` that returns its ``Work``; the future of a ``Work`` calls
    back when it is complete (PyTorch, torch.futures).
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Prepare a record of this rank.

        Args:
            device: where the rank computes; ``None`` is the GPU with NCCL, else the CPU.
        """
        super().__init__()
        if device is None:
            gpu = dist.is_initialized() and dist.get_backend() == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        self._device = as_device(device)
        self._found: list[dict[str, Any]] = []
        self._open: list[tuple[Any, dict]] = []  # messages that tell nobody when they are done
        self._returned: list[tuple[int, dict]] = []  # functional collectives: address of the result
        self._called_back: dict[int, Any] = {}  # collectives whose callback is still to come
        self._lock = threading.Lock()
        self._zero: tuple[float, Any] = (0.0, None)

    def __enter__(self) -> "Communications":
        if self._device.type == "cuda":
            synchronize(self._device)
            zero = torch.cuda.Event(enable_timing=True)
            zero.record()
            self._zero = (time.perf_counter(), zero)
        self._wait = dist.Work.wait
        dist.Work.wait = self._watched_wait(self._wait)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        dist.Work.wait = self._wait
        for _, entry in self._open:
            entry["end"] = self._stamp()
        self._open.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step on this rank, such as "forward", "backward", "wait" or "optimizer".

        Args:
            name: what the rank does meanwhile.
        """
        entry = {"kind": "phase", "name": name, "start": self._stamp()}
        self._found.append(entry)
        try:
            yield
        finally:
            entry["end"] = self._stamp()

    def entries(self) -> list[dict[str, Any]]:
        """Give what was recorded, in the order of the calls, for ``communications`` of a run record.

        Returns:
            Dictionaries with ``rank``, ``kind`` ("collective", "message" or "phase"), ``name``, ``start`` and ``end``
            (seconds on the clock that all processes of a machine share), and for what is sent ``bytes`` (handed in by
            this rank, for "recv" taken out) and ``peer`` (the other rank of a message, else None). What is not
            complete yet has ``end`` None.
        """
        gpu = self._device.type == "cuda"
        if gpu:
            synchronize(self._device)
        self._let_call_back()
        rank = dist.get_rank() if dist.is_initialized() else 0
        with self._lock:
            found = [dict(entry) for entry in self._found]
        if gpu:  # a callback may have recorded its event after the first wait
            synchronize(self._device)
        return [
            {"rank": rank, **entry, "start": self._seconds(entry["start"]), "end": self._seconds(entry.get("end"))}
            for entry in found
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a wrapper: what it does inside, waiting for one, comes back here
        namespace, name = func.overloadpacket._qualified_op_name.split("::")
        if namespace == SPACES[1] and name == "wait_tensor":
            return self._waited(func, args, kwargs or {})
        call = collective(func, args)
        if call is None:
            return func(*args, **(kwargs or {}))
        name, size = call
        message = name in ("send", "recv", "recv_any_source")
        entry = {
            "kind": "message" if message else "collective",
            "name": NAMES.get(name, name),
            "start": self._stamp(),
            "bytes": size,
            "peer": args[2] if message and name != "recv_any_source" else None,
        }
        self._found.append(entry)
        out = func(*args, **(kwargs or {}))
        if namespace == SPACES[1]:
            for tensor in out if isinstance(out, list | tuple) else [out]:
                self._returned.append((tensor.untyped_storage().data_ptr(), entry))
        else:
            self._follow(out[-1] if isinstance(out, tuple) else out, entry)
        return out

    def _waited(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``wait_tensor``: a functional collective is complete when somebody has waited for its result."""
        out = func(*args, **kwargs)
        address = args[0].untyped_storage().data_ptr()
        for known, entry in self._returned:
            if known == address:
                entry["end"] = self._stamp()
        self._returned[:] = [pair for pair in self._returned if pair[0] != address]
        return out

    def _follow(self, boxed: Any, entry: dict) -> None:
        """Write down the end of a ``Work`` when it comes."""
        work = dist.Work.unbox(boxed)

        def done(_future: Any) -> None:
            with self._lock:
                entry["end"] = self._stamp()
                self._called_back.pop(id(entry), None)

        try:
            future = work.get_future()
        except RuntimeError:  # a message has no future
            self._open.append((work, entry))
            return
        self._called_back[id(entry)] = future
        future.add_done_callback(done)

    def _let_call_back(self) -> None:
        """Wait a moment for callbacks of collectives that are complete: another thread makes them."""
        limit = time.monotonic() + CALLBACK_LIMIT_S
        while time.monotonic() < limit:
            with self._lock:
                futures = list(self._called_back.values())
            # a future is done a moment before its callbacks run, and its Work a moment after them
            if not any(future.done() for future in futures):
                return
            time.sleep(1e-4)

    def _watched_wait(self, wait: Any) -> Any:
        def watched(work, *args, **kwargs):
            result = wait(work, *args, **kwargs)
            for known, entry in self._open:
                if known is work:
                    entry["end"] = self._stamp()
            self._open[:] = [pair for pair in self._open if pair[0] is not work]
            return result

        return watched

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the current stream: in a callback, one that waits for the collective
        return event

    def _seconds(self, stamp: Any) -> float | None:
        if stamp is None or isinstance(stamp, float):
            return stamp
        seconds, zero = self._zero
        return seconds + zero.elapsed_time(stamp) / 1000


def collective(func: Any, args: tuple) -> tuple[str, int] | None:
    """Tell whether an operator is a collective or a message (a barrier too), as dispatch modes see them.

    Args:
        func: the operator.
        args: what it is called with.

    Returns:
        Its name without ``c10d.`` and a last underscore (``NAMES`` has what users call it), and the bytes that this
        rank hands in; ``None`` for every other operator, waits among them.
    """
    namespace, name = func.overloadpacket._qualified_op_name.split("::")
    if namespace not in SPACES or "wait" in name or name.startswith("_wrap"):
        return None
    name = name.rstrip("_")
    return name, handed_in(name, args)


def handed_in(name: str, args: tuple) -> int:
    """Give the bytes that a rank hands in, from the name (without ``c10d.``) and the arguments of an operator."""
    # functional collectives (DTensor's) write nothing that they are given: a word such as "sum" comes second
    position = 1 if name.startswith(_WRITES_FIRST) and len(args) > 1 and not isinstance(args[1], str) else 0
    stack, total = [args[position]], 0
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return total
