"""Copies that an answer keeps outside of tensors: NumPy arrays, lists of numbers and bytes in its globals or its functions."""

from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType

import numpy


def kept_outside(*answers) -> int:
    """Bytes of arrays, numbers in lists, and bytes that these functions reach: globals they name, closures, defaults, attributes."""
    found, visited, stack = 0, {}, list(answers)
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item  # kept, so that no other object gets its number
        if isinstance(item, numpy.ndarray):
            found += item.nbytes if item.base is None else 0
        elif isinstance(item, bytes | bytearray):
            found += len(item)
        elif isinstance(item, FunctionType):
            stack += [item.__globals__[name] for name in _names(item.__code__) if name in item.__globals__]
            stack += [item.__defaults__, item.__kwdefaults__, vars(item), *_cells(item)]
        elif isinstance(item, MethodType):
            stack += [item.__func__, item.__self__]
        elif isinstance(item, partial):
            stack += [item.func, item.args, item.keywords]
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            if item and isinstance(next(iter(item)), float):
                found += 8 * len(item)
            else:
                stack += item
        elif isinstance(item, type):
            if not _of_a_library(item):
                stack += vars(item).values()
        elif not isinstance(item, ModuleType) and hasattr(item, "__dict__") and not _of_a_library(type(item)):
            stack.append(vars(item))
    return found


def _of_a_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "numpy", "builtins", "functools", "dlojz_tp")


def _names(code: CodeType) -> set[str]:
    """The names that a function reads or writes outside of itself, those of the functions in it too."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _cells(function):
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
