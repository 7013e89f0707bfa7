"""Put stand-ins in the place of functions, also where an answer imported them by name."""

import contextlib
from types import FunctionType
from unittest import mock


@contextlib.contextmanager
def pretended(changes, *answers):
    """Inside, each (module, name, stand-in) of `changes` holds, in the module and under any name in the answers.

    `from torch.cuda import is_available` leaves the function itself among the answer's globals, where a change of
    torch.cuda is not seen. What is found there and *is* a function that was replaced is replaced too.
    """
    stand_ins = {}
    with contextlib.ExitStack() as pretend:
        for target, name, stand_in in changes:
            original = getattr(target, name, None)
            if original is not None:
                stand_ins.setdefault(id(original), (original, stand_in))
            pretend.enter_context(mock.patch.object(target, name, stand_in, create=original is None))
        for names, cells in _places(answers):
            for name, value in list(names.items()):
                if id(value) in stand_ins:
                    pretend.callback(names.__setitem__, name, value)
                    names[name] = stand_ins[id(value)][1]
            for cell in cells:
                value = _content(cell)
                if id(value) in stand_ins:
                    pretend.callback(setattr, cell, "cell_contents", value)
                    cell.cell_contents = stand_ins[id(value)][1]
        yield


def _places(answers):
    """The globals (each once) and closures of the answers' functions, and of the helpers that they use."""
    found, visited, stack = [], set(), list(answers)
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, type):
            stack.extend(_unbound(value) for kind in item.__mro__[:-1] for value in vars(kind).values())
            continue
        item = _unbound(item)
        inner = (getattr(item, "func", None), getattr(item, "__wrapped__", None))  # of a partial, of a decorator
        stack.extend(part for part in inner if callable(part))
        if not isinstance(item, FunctionType):
            continue
        names, cells = item.__globals__, item.__closure__ or ()
        found.append(({} if id(names) in visited else names, cells))
        visited.add(id(names))
        inside = [*names.values(), *map(_content, cells)]
        stack.extend(other for other in inside if _of_the_same_module(other, item))
    return found


def _of_the_same_module(other, function):
    return isinstance(other, FunctionType | type) and other.__module__ == function.__module__


def _unbound(item):
    return getattr(item, "__func__", item)  # of a method


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
