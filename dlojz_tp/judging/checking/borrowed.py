"""Notice an answer that borrows a ready-made implementation of what it was to write."""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import CodeType


class Borrowed(Exception):  # noqa: N818  (raised on a rank, it names what was borrowed)
    """The answer called a ready-made implementation of what it was to write."""


@contextlib.contextmanager
def refusing(*borrowed: tuple[object, str, str]):
    """Inside, calling what is named raises Borrowed. borrowed: (owner, name of its attribute, what it is called)."""

    def refusal(what):
        def refuse(*_, **__):
            raise Borrowed(what)

        return refuse

    with contextlib.ExitStack() as stack:
        for owner, name, what in borrowed:
            stack.enter_context(replaced(owner, name, refusal(what)))
        yield


@contextlib.contextmanager
def replaced(owner, name: str, value):
    """Inside, the attribute `name` of `owner` is `value`. (unittest.mock costs every rank 20 ms to import.)"""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def out_of_reach(raising: Callable[[str], Exception], *borrowed, copies: bool = False):
    """Inside, calling one of `borrowed`, Python functions and classes, raises `raising(its name)`.

    A function's code itself is exchanged, and a class's `__init__` where it is defined: an answer may hold them under
    another name, in a dictionary, in a partial, or as the default of an argument. copies: so does a function's copy,
    made from its source text or from its code; it is known by its steps. Not for short functions, which two people may
    write alike.
    """
    with contextlib.ExitStack() as stack:
        if copies:
            stack.enter_context(_no_copies(raising, [one for one in borrowed if not isinstance(one, type)]))
        for one in borrowed:
            if isinstance(one, type):
                owner = next(kind for kind in one.__mro__ if "__init__" in vars(kind))
                stack.enter_context(replaced(owner, "__init__", _refusal(raising, one.__name__)))
                continue
            _RAISING[id(one)] = functools.partial(raising, one.__name__)
            stack.callback(_RAISING.pop, id(one))
            stack.enter_context(replaced(one, "__code__", _refusing_code(id(one), one.__code__)))
        yield


_RAISING: dict[int, Callable[[], Exception]] = {}  # of the functions that are out of reach now


def _refusal(raising, name):
    def refuse(*_, **__):
        raise raising(name)

    return refuse


def _refusing_code(key: int, instead: CodeType) -> CodeType:
    """Code that finds what to raise by a number: it runs with the globals of the function that it is put into.

    Who asks for its source text gets that of the code which it stands for.
    """
    space = {}
    text = f"def refuse(*_, **__):\n from dlojz_tp.judging.checking import borrowed\n raise borrowed._RAISING[{key}]()"
    exec(text, space)
    code = space["refuse"].__code__
    return code.replace(co_filename=instead.co_filename, co_firstlineno=instead.co_firstlineno)


@contextlib.contextmanager
def _no_copies(raising, functions):
    """Inside, a call in this thread of a function with the same steps as one of `functions` raises; so does the end."""
    names = {_steps(function.__code__): function.__name__ for function in functions}
    copied: list[str] = []
    seen = {}  # id of a code that was called: the code, so that its id stays its own, and whose copy it is

    def look(frame, event, argument):
        if before is not None:
            before(frame, event, argument)
        if event == "call":
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = code, names.get(_steps(code))
            if name := seen[id(code)][1]:
                copied.append(name)
                raise raising(name)  # Python then looks at no further call

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    if copied:
        raise raising(copied[0])


def _steps(code: CodeType) -> tuple:
    """What two codes of the same text have alike, wherever they were compiled."""
    return code.co_code, code.co_names, tuple(_steps(inner) for inner in code.co_consts if isinstance(inner, CodeType))
