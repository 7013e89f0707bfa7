"""Count what a rank holds."""

import functools
import gc
import weakref
from collections import deque
from collections.abc import Mapping, Set
from types import FunctionType, GeneratorType, ModuleType

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.probes.settling import settle


def held_bytes(tree) -> int:
    """Bytes of memory that the tensors and arrays in `tree` hold; shared memory counts once.

    tree: nested lists, tuples, dictionaries, sets, deques, and objects with attributes of their own.
    """
    return sum(held_storages(tree).values())


def held_storages(tree, functions: bool = False) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors and arrays in `tree` hold.

    functions: also what functions in it keep for their calls (closures, defaults, partial arguments, generators).
    """
    found: dict[int, int] = {}
    visited, stack = {}, [tree]
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item  # kept, so that no other object gets its number
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(item, numpy.ndarray):
            found[item.ctypes.data] = item.nbytes
        elif functions and isinstance(item, FunctionType):
            stack += [cell.cell_contents for cell in item.__closure__ or ()] + [item.__defaults__, item.__kwdefaults__]
        elif functions and isinstance(item, functools.partial):
            stack += [item.func, item.args, item.keywords]
        elif functions and isinstance(item, GeneratorType):
            stack.append(item.gi_frame and item.gi_frame.f_locals)
        elif isinstance(item, str | bytes | type | ModuleType | FunctionType):
            continue
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | Set | deque):
            stack.extend(item)
        else:
            stack.append(attributes(item))
    return found


def attributes(item) -> dict[str, object]:
    """The attributes of an object itself, whether it keeps them in a dictionary or in __slots__."""
    found = dict(getattr(item, "__dict__", {}))
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                found[name] = getattr(item, name)
    return found


class Memory(TorchDispatchMode):
    """The bytes of all living storages that were made under it, or tracked, as they are now: resized ones too.

    peak: highest figure since the last `reset`, looked at after each operation.
    """

    def __init__(self, *tensors):
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self.peak = 0
        for tensor in tensors:
            self._note(tensor)

    def _note(self, value) -> bool:
        """Follow the storages of what an operation returned; whether one of them is new."""
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._known and self._known[key]() is not None:
                return False
            self._known[key] = weakref.ref(storage, lambda ref, key=key: self._forget(key, ref))
            return True
        return isinstance(value, tuple | list) and sum(self._note(item) for item in value) > 0

    def _forget(self, key, ref):
        if self._known.get(key) is ref:
            del self._known[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._note(out) or func.namespace == "c10d":  # a resized storage comes back in a collective
            self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive now."""
        return sum(s.nbytes() for s in [ref() for ref in list(self._known.values())] if s is not None)

    def settled(self, most: float) -> int:
        """Bytes alive once they are `most`, or once no thread has anything to do: that of a collective lets go late."""
        return settle(self.now, most)

    def reset(self):
        """Begin a new peak."""
        self.peak = self.now()


def living_storages() -> dict[int, int]:
    """{storage: bytes} of all tensors that Python holds on this rank."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing) in (torch.Tensor, nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves is noted. `made`: how many tensors; `alive`: how many of them a graph still keeps."""

    def __init__(self):
        self.made, self._saved = 0, weakref.WeakSet()
        super().__init__(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor):
        saved = _Saved(tensor)
        self.made += 1
        self._saved.add(saved)
        return saved

    @property
    def alive(self) -> int:
        """How many a graph still keeps."""
        return len(self._saved)


class _Saved:
    """What a graph holds in place of a tensor; without its history, which would hold the graph."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


class Alive:
    """Follow the tensors made from here on: those in a closure, a bound method, a default or on another object too.

    A tensor is an object that Python's collector knows. What was there before is set aside ("frozen"), so that little
    is left to look through.
    """

    def __enter__(self):
        gc.freeze()
        return self

    def __exit__(self, *error):
        gc.unfreeze()

    def held(self, layer, known=()) -> int:
        """Bytes of the living tensors, and of all that can be reached from `layer`.

        Left out: the tensors of `known`, masks (of two different numbers at most), and states of random generators.
        """
        gc.collect()
        try:
            found = held_storages(layer)
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own: its parts are found below
            found = {}
        living = gc.get_objects()
        new = [t for t in living if issubclass(type(t), torch.Tensor) and not t.is_meta]
        found |= dict(map(_storage, new))
        found |= {
            s.data_ptr(): s.nbytes() for s in living if type(s) is torch.UntypedStorage and s.device.type == "cpu"
        }
        known = [*known, *(t for t in new if _tells_nothing(t))]
        return sum(found.values()) - sum(found.get(at, 0) for at in {_storage(t)[0] for t in known})


def _tells_nothing(tensor) -> bool:
    """Whether it holds nothing of a weight: a state of a random generator, a mask of zeros and ones, or infinities."""
    if tensor.dtype == torch.uint8 and tensor.numel() == torch.get_rng_state().numel():
        return True
    if tensor.numel() < 16 or tensor.numel() != tensor.untyped_storage().nbytes() // tensor.element_size():
        return False
    tensor = tensor.detach()
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def _storage(tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0
