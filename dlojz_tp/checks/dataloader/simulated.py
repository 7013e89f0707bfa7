"""A simulated GPU for copies: tensors that say where they are, streams that know which copies they have waited for.

It stands for the rules of CUDA streams, not for a GPU's speed: work in different streams has no order, until one waits
for another. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

import contextlib
import itertools
import threading
from unittest import mock

import torch

CUDA = torch.device("cuda")


class Stream:
    """A stream. done: numbers of the copies that work queued here from now on comes after."""

    def __init__(self, device=None, priority=0, **_):
        self.done: set[int] = set()
        self.device = CUDA
        self.waited_for: list[Stream] = []

    def wait_stream(self, other):
        self.done |= other.done
        self.waited_for.append(other)

    def wait_event(self, event):
        self.done |= event.done
        self.waited_for.append(event.stream)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        _cpu_waits(self.done)

    def query(self):
        return True

    def __enter__(self):
        self._inside = use(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error):
        self._inside.__exit__(*error)


class Event:
    """A mark in a stream."""

    def __init__(self, *_, **__):
        self.done, self.stream = set(), None

    def record(self, stream=None):
        self.stream = stream or current_stream()
        self.done = set(self.stream.done)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        _cpu_waits(self.done)

    def query(self):
        return True


class OnDevice(torch.Tensor):
    """A tensor in CPU memory that plays one on the simulated GPU, or the pinned one it is copied from."""

    @staticmethod
    def of(values, copy=None, stream=None, blocking=False):
        tensor = torch.Tensor._make_subclass(OnDevice, values)
        tensor.copy_number, tensor.stream, tensor.blocking, tensor.users = copy, stream, blocking, []
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def to(self, *args, **kwargs):
        places = [a for a in (*args, kwargs.get("device")) if isinstance(a, str | torch.device | int)
                  and not isinstance(a, bool)]  # fmt: skip
        if not places or (isinstance(places[0], str | torch.device) and torch.device(places[0]).type != "cuda"):
            return self
        # positions of to(device, dtype, non_blocking, copy), of which dtype may be left out
        flags = [a for a in args if isinstance(a, bool)]
        return self._copied(kwargs.get("non_blocking", bool(flags and flags[0])))

    def cuda(self, device=None, non_blocking=False, **_):
        return self._copied(non_blocking)

    def _copied(self, non_blocking):
        if self.copy_number is not None:
            return self
        number, stream = next(_state.numbers), current_stream()
        stream.done.add(number)
        if not non_blocking:
            _state.everywhere.add(number)  # the processor waits until it is done: every stream comes after
        return OnDevice.of(self.as_subclass(torch.Tensor), number, stream, not non_blocking)

    def record_stream(self, stream):
        self.users.append(stream)

    def pin_memory(self, *_):
        return self

    def is_pinned(self, *_):
        return True

    @property
    def is_cuda(self):
        return self.copy_number is not None

    @property
    def device(self):
        return CUDA if self.copy_number is not None else torch.device("cpu")


class _State:
    def __init__(self):
        self.default, self.local = Stream(), threading.local()
        self.numbers, self.everywhere, self.main_waits = itertools.count(), set(), 0


_state = _State()


def current_stream(*_, **__):
    """The current stream of this thread; as with CUDA, a new thread begins with the default stream."""
    return getattr(_state.local, "stream", _state.default)


@contextlib.contextmanager
def use(stream):
    """Inside, `stream` is the current one of this thread; None changes nothing."""
    before = current_stream()
    _state.local.stream = stream or before
    try:
        yield stream
    finally:
        _state.local.stream = before


def _cpu_waits(done):
    _state.everywhere |= done
    if threading.current_thread() is threading.main_thread():
        _state.main_waits += 1


def _synchronize(*_, **__):
    _cpu_waits(set())
    _state.everywhere = _Everything()


class _Everything(set):
    def __contains__(self, _):
        return True


def arrived(tensor: OnDevice) -> bool:
    """Whether work queued now in the current stream comes after the copy."""
    return tensor.copy_number in current_stream().done or tensor.copy_number in _state.everywhere


def main_waits() -> int:
    """How often the main thread has waited for the device."""
    return _state.main_waits


@contextlib.contextmanager
def gpu():
    """Inside, torch.cuda's streams and events are those of the simulation."""
    global _state
    _state = _State()
    nothing = mock.Mock(side_effect=lambda *_, **__: contextlib.nullcontext())
    changed = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "stream": use, "StreamContext": use,
        "current_stream": current_stream, "default_stream": lambda *_: _state.default, "synchronize": _synchronize,
        "set_stream": lambda stream: setattr(_state.local, "stream", stream), "device": nothing, "set_device": nothing,
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Stream", Stream))
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", current_stream))
        stack.enter_context(mock.patch.object(torch.accelerator, "synchronize", _synchronize))
        yield
