"""Put stand-ins in the place of functions, also where an answer imported them by name."""

import contextlib
from functools import partial
from types import FunctionType
from unittest import mock


@contextlib.contextmanager
def pretended(changes, *answers):
    """Inside, each (module, name, stand-in) of `changes` holds, in the module and under any name in the answers.

    `from torch.cuda import is_available` leaves the function itself among the answer's globals, where a change of
    torch.cuda is not seen. What is found there and *is* a function that was replaced is replaced too, also in a
    dictionary, in a partial, or as the default of an argument.
    """
    stand_ins = {}
    with contextlib.ExitStack() as pretend:
        for target, name, stand_in in changes:
            original = getattr(target, name, None)
            if original is not None:
                stand_ins.setdefault(id(original), (original, stand_in))
            pretend.enter_context(mock.patch.object(target, name, stand_in, create=original is None))
        for names, function in _places(answers):
            tables = [names, *(value for value in names.values() if type(value) is dict), function.__kwdefaults__ or {}]
            for table in tables:
                for name, value in list(table.items()):
                    if (other := _instead(value, stand_ins)) is not value:
                        pretend.callback(table.__setitem__, name, value)
                        table[name] = other
            for cell in function.__closure__ or ():
                value = _content(cell)
                if (other := _instead(value, stand_ins)) is not value:
                    pretend.callback(setattr, cell, "cell_contents", value)
                    cell.cell_contents = other
            defaults = function.__defaults__ or ()
            others = tuple(_instead(value, stand_ins) for value in defaults)
            if any(other is not value for other, value in zip(others, defaults, strict=True)):
                pretend.callback(setattr, function, "__defaults__", defaults)
                function.__defaults__ = others
        yield


def _instead(value, stand_ins):
    """The stand-in for a function that was replaced, or for a partial of it; else the value itself."""
    if isinstance(value, partial):
        func = _instead(value.func, stand_ins)
        return value if func is value.func else partial(func, *value.args, **value.keywords)
    return stand_ins[id(value)][1] if id(value) in stand_ins else value


def _places(answers):
    """The globals (each once) of the answers' functions and of the helpers that they use, and these functions."""
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
        names, of_module = item.__globals__, (id(item.__globals__), item.__module__)
        found.append(({} if id(names) in visited else names, item))
        inside = [*(() if of_module in visited else names.values()), *map(_content, item.__closure__ or ())]
        visited |= {id(names), of_module}
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
