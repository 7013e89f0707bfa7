"""What replaces torch.cuda's and torch.accelerator's functions."""

import contextlib
from collections import defaultdict
from types import FunctionType, SimpleNamespace

import torch

from dlojz_tp.judging.pretend_gpu.streams import Event, Stream
from dlojz_tp.launch.place import NAME


def replaced(machine, streams) -> list[tuple]:
    """(module, name, stand-in) of each."""
    index, count, capacity = machine.index, machine.count, machine.capacity
    facts = SimpleNamespace(
        name=NAME, total_memory=capacity, major=9, minor=0, multi_processor_count=132, warp_size=32, is_integrated=0
    )

    def set_device(device):
        machine.current = index(device)

    class Device:
        """torch.cuda.device: a class, for torch asks what is one."""

        def __init__(self, device):
            other = device is None or device == -1 or getattr(device, "type", "cuda") != "cuda"
            self.idx = -1 if other else index(device)

        def __enter__(self):
            self.prev_idx = machine.current
            if self.idx != -1:
                set_device(self.idx)

        def __exit__(self, *error):
            machine.current = self.prev_idx

    class StreamContext(contextlib.AbstractContextManager):
        """torch.cuda.StreamContext: a class, for torch asks what is one."""

        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self._inside = streams.use(self.stream)
            self._inside.__enter__()

        def __exit__(self, *error):
            return self._inside.__exit__(*error)

    def reset_peak(device=None):
        machine.peak[index(device)] = machine.live[index(device)]

    def stats(device=None):
        i = index(device)
        held = {
            "allocated_bytes": machine.live[i],
            "active_bytes": machine.live[i],
            "reserved_bytes": machine.reserved[i],
        }
        found = {"num_ooms": 0, "num_alloc_retries": 0} | {f"{name}.all.current": n for name, n in held.items()}
        return defaultdict(int, found | {f"{name}.all.peak": max(n, machine.peak[i]) for name, n in held.items()})

    def nothing(*_, **__):
        return None

    def empty():
        machine.waited("torch.cuda.empty_cache")  # freeing memory waits for all that may use it
        machine.reserved[:] = machine.live

    def live(device=None):
        return machine.live[index(device)]

    def reserved(device=None):
        return machine.reserved[index(device)]

    def peak(device=None):
        return machine.peak[index(device)]

    both = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_stream": lambda device=None: streams.current(device),
        "set_stream": lambda stream: streams.set(stream),
        "memory_allocated": live, "max_memory_allocated": peak, "memory_reserved": reserved,
        "max_memory_reserved": lambda device=None: max(peak(device), reserved(device)),
        "reset_peak_memory_stats": reset_peak, "empty_cache": empty, "memory_stats": stats,
        "get_memory_info": lambda device=None: (capacity - live(device), capacity),
    }  # fmt: skip
    cuda = both | {
        "_lazy_init": nothing, "_initialized": True, "is_initialized": lambda: True, "init": nothing,
        "current_device": lambda: machine.current, "set_device": set_device, "device": Device,
        "synchronize": lambda device=None: streams.wait_for_all("torch.cuda.synchronize", device),
        "Stream": Stream, "Event": Event, "stream": streams.use, "StreamContext": StreamContext,
        "default_stream": lambda device=None: streams.default[index(device)],
        "mem_get_info": lambda device=None: (capacity - live(device), capacity),
        "reset_max_memory_allocated": reset_peak, "ipc_collect": nothing,
        "get_device_name": lambda device=None: NAME, "get_device_properties": lambda device=None: facts,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda *_, **__: True, "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda a, b: True,
    }  # fmt: skip
    accelerator = both | {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: machine.current, "current_device_idx": lambda: machine.current,
        "set_device_index": set_device, "set_device_idx": set_device, "device_index": Device,
        "synchronize": lambda device=None: streams.wait_for_all("torch.accelerator.synchronize", device),
    }  # fmt: skip
    changes = [(torch.cuda, name, new) for name, new in cuda.items()]
    changes += [(torch.accelerator, name, new) for name, new in accelerator.items()]
    return [(place, name, _own(new)) for place, name, new in changes if hasattr(place, name)] + [
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
    ]


def _own(f):
    """A function object of its own for each name: torch.compile's tables refuse one that has two."""
    return FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__) if _plain(f) else f


def _plain(f) -> bool:
    return type(f) is FunctionType and not hasattr(f, "__wrapped__")
