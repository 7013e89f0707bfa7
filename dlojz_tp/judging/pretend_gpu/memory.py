"""Which memory is on a GPU: a tag on the storage of a plain CPU tensor.

The tag is an attribute of the storage's Python object, which lives as long as the memory does, so that views share it
and the bytes are free again when the last of them goes.
"""

import contextlib
import functools
import threading

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

TENSOR = torch._C.TensorBase
CPU, META = torch.device("cpu"), torch.device("meta")
HOMES = {"cpu"}  # and "meta" on a modelled machine: where tensors are in truth
PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_device = TENSOR.device.__get__
real_storage = TENSOR.untyped_storage
_in_kernel = threading.local()
ROUND = 512  # bytes; the caching allocator's smallest block (c10/cuda/CUDACachingAllocator.h: kMinBlockSize)
MIB = 2**20


def real(method, *args, **kwargs):
    """A method as C++ has it: with torch functions on, C++ would look for what now stands under its name."""
    with torch._C.DisableTorchFunction():
        return method(*args, **kwargs)


def real_device(x):
    return real(_device, x)


class Block:
    """Memory of one GPU, freed with its storage. bytes: rounded up as the allocator rounds; asked: as asked for.

    written: (stream, number) of the operation that wrote it last. read: {stream: number} of those that read it since.
    home: the stream it was allocated for. kept: streams named by record_stream. integers: a function that gives what a
    short list of them holds, where others have no values; None where nobody knows.
    """

    __slots__ = ("machine", "index", "bytes", "asked", "written", "read", "home", "kept", "integers", "__weakref__")

    def __init__(self, machine, index: int, nbytes: int, home=None):
        self.machine, self.index, self.bytes, self.asked = machine, index, 0, 0
        self.written, self.read, self.home, self.kept = None, {}, home, set()
        self.integers = None
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        asked, nbytes = nbytes, -(-nbytes // ROUND) * ROUND
        machine, held = self.machine, self.machine.live[self.index]
        if held + nbytes - self.bytes > machine.capacity:
            machine.reserved[self.index] = held  # what was free is given back before it fails
            raise out_of_memory(machine, self.index, nbytes)
        machine.live[self.index] = held = held + nbytes - self.bytes
        machine.reserved[self.index] = max(machine.reserved[self.index], held)
        machine.peak[self.index] = max(machine.peak[self.index], held)
        machine.requested[self.index] += asked - self.asked
        self.bytes, self.asked = nbytes, asked

    def __del__(self):
        self.machine.live[self.index] -= self.bytes
        self.machine.requested[self.index] -= self.asked
        if self.bytes and self.home is not None:
            self.home.freed(self)


class Pinned:
    """Page-locked memory of the CPU. read: {stream: number} of the copies that read it."""

    def __init__(self):
        self.written, self.read = None, {}


def out_of_memory(machine, index: int, nbytes: int) -> torch.OutOfMemoryError:
    """CUDA's words; the source is c10/cuda/CUDACachingAllocator.cpp."""
    held, capacity = machine.live[index], machine.capacity
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {index} has a total capacity of {_size(capacity)} "
        f"of which {_size(capacity - held)} is free. Including non-PyTorch memory, this process has {_size(held)} "
        f"memory in use. Of the allocated memory {_size(held)} is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )


def _size(nbytes: int) -> str:
    return next((f"{nbytes / unit:.2f} {name}" for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB"))
                 if nbytes >= unit), f"{nbytes} bytes")  # fmt: skip


def tag(x):
    """Block of a tensor on a GPU, Pinned, or None."""
    while type(x) not in PLAIN and is_traceable_wrapper_subclass(x):  # DTensor and others hold plain tensors
        x = getattr(x, x.__tensor_flatten__()[0][0])
    try:
        return getattr(real_storage(x), "_gpu_tag", None)
    except NotImplementedError:  # sparse
        return None


def block(x) -> Block | None:
    found = tag(x)
    return found if type(found) is Block else None


@contextlib.contextmanager
def in_kernel():
    """Inside, tensors say where they are in truth: what computes shapes in Python asks for it."""
    before, _in_kernel.on = is_in_kernel(), True
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        _in_kernel.on = before


def is_in_kernel() -> bool:
    return getattr(_in_kernel, "on", False)


def device_of(x) -> torch.device:
    """What x.device says."""
    known = real_device(x)
    if type(x) not in PLAIN and (index := getattr(x, "_gpu_index", None)) is not None and not is_in_kernel():
        return torch.device("cuda", index)  # a fake tensor
    if known.type not in HOMES or is_in_kernel():
        return known
    return CPU if (found := block(x)) is None else torch.device("cuda", found.index)


def is_wild(x) -> bool:
    """Made in C++ outside any function that the program called, by the engine or the reducer: at home everywhere."""
    try:
        storage = real_storage(x)
    except NotImplementedError:
        return False
    return getattr(storage, "_gpu_wild", False) and getattr(storage, "_gpu_tag", None) is None


def tensors(items):
    """All tensors of nested lists and tuples."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors(item)


def written(func, args, kwargs):
    """The tensors that an operation writes, as its schema says."""
    for i, name in _written(func):
        yield from tensors([args[i] if i < len(args) else kwargs.get(name)])


@functools.cache
def _written(func) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
