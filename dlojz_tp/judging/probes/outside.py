"""Copies that no tensor holds: NumPy arrays, lists of numbers, bytes, wherever an answer keeps them."""

import copy
import gc
import tracemalloc
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType

import numpy

from dlojz_tp.launch import stacks
from dlojz_tp.measure.collector import earlier_set_aside
from dlojz_tp.works.balise import BaliseNotDone

_ARRAYS = numpy.lib.tracemalloc_domain
_LARGE = 1900  # bytes of one block; the tables of small dictionaries are below
_HUGE = 64  # times a whole copy: a table of Python's own, of all names for example, that grew just then


class Outside:
    """Inside, what is allocated outside of tensors is followed. kept: bytes of copies that are alive at the end.

    whole: bytes of a whole copy. lists: whether small objects count where they are many. What Python needs for objects
    and small tables is not counted. For processes that end soon, ranks of a check: tracemalloc never stops, as that
    crashes where other threads allocate meanwhile (until Python 3.13).
    """

    def __init__(self, whole: int, on: bool = True, lists: bool = True):
        self.whole, self.on, self.lists, self.kept = whole, on, lists, 0

    def __enter__(self):
        if self.on:
            tracemalloc.start(1)
        return self

    def __exit__(self, *error):
        if self.on and error[0] is None:
            self.kept = self._now()
            if self.kept > self.whole / 2:
                gc.collect()  # what was thrown away may wait in a circle
                self.kept = self._now()

    def _now(self) -> int:
        arrays = large = small = 0
        not_theirs = stacks.not_theirs()
        for domain, size, frames, *_ in tracemalloc.take_snapshot().traces._traces:
            if domain == _ARRAYS:
                arrays += size
            elif not frames[0][0].startswith(not_theirs):
                if size >= _LARGE:
                    large += size if size < _HUGE * self.whole else 0
                else:
                    small += size
        # a number in a list takes 32 bytes, and 8 in a tensor of float64
        return arrays + (large + small if self.lists and large + small > 2 * self.whole else large)


_later: list[tuple] = []


def look_later(make, large, ranks) -> None:
    """Ask `look_aside` for `aside(make, large, ranks)`: once traced, all that Python does is slower."""
    _later.append((make, large, ranks))


def look_aside() -> int:
    """The most bytes of all that `look_later` was asked for; the last thing that a rank does."""
    return max((aside(*_later.pop(0)) for _ in range(len(_later))), default=0)


def aside(make, large, ranks) -> int:
    """Bytes in lists, arrays and the like, all but tensors, that stay in memory once a layer is made from a large one.

    large: builds the plain layer; each of its matrices holds at least 2^17 numbers, so that a copy of one, in whatever
    precision, shows. 0 where the answer fails: what else is looked at tells why.
    tracemalloc goes on until the rank ends, as that of Outside does.
    """
    plain = large()
    tracemalloc.start(1)
    with earlier_set_aside():
        try:
            before = tracemalloc.get_traced_memory()[0]
            made = make(copy.deepcopy(plain), ranks)
            for p in made.parameters():
                p.data = p.data.clone()  # a part may lie in an array's memory
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before
        except BaliseNotDone:
            raise
        except Exception:
            return 0


def kept_outside(*answers) -> int:
    """Bytes of arrays, numbers in lists, and bytes, outside of tensors, that these functions reach.

    Through the globals that they name, closures, defaults and attributes.
    """
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
            if not _of_a_library(item.__globals__.get("__name__")):
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
            if not _of_a_library(item.__module__):
                stack += vars(item).values()
        elif hasattr(item, "__dict__") and not (isinstance(item, ModuleType) or _of_a_library(type(item).__module__)):
            stack.append(vars(item))
    return found


def _of_a_library(module: str) -> bool:
    return str(module).split(".")[0] in ("torch", "numpy", "builtins", "functools", "dlojz_tp")


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
