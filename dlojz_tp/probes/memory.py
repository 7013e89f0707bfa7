"""Count what a rank holds."""

from collections import deque
from collections.abc import Mapping, Set
from types import FunctionType, ModuleType

import numpy
import torch


def held_bytes(tree) -> int:
    """Bytes of memory that the tensors and arrays in `tree` hold; shared memory counts once.

    tree: nested lists, tuples, dictionaries, sets, deques, and objects with attributes of their own.
    """
    return sum(held_storages(tree).values())


def held_storages(tree) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors and arrays in `tree` hold."""
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
