"""Python's and PyTorch's own functions: has a cell or an answer replaced one, does a notebook's variable hide one?

Checks call these functions, as answers do: where `torch.allclose` is another function, no verdict means anything. Only
what a trainee wrote counts: PyTorch wraps some functions of its own, and so do libraries.
"""

import ast
import builtins
import dis
import functools
import inspect
import itertools
import linecache
import math
import operator
import random
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MappingProxyType, ModuleType

import numpy
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils import checkpoint, data

from dlojz_tp.launch import stacks

GONE = object()
MODULES = (
    builtins, math, operator, random, itertools, functools, numpy, numpy.linalg, numpy.random, torch, functional,
    torch.nn, torch.nn.init, torch.nn.utils, torch.nn.parallel, torch.linalg, torch.fft, torch.special, torch.autograd,
    torch.func, torch.amp, torch.cuda, torch.optim, lr_scheduler, data, checkpoint, dist,
)  # fmt: skip
CLASSES_OF = torch.nn, torch.optim, lr_scheduler, data


def _owners() -> Iterator[tuple[str, object]]:
    """(name, module or class) of what is looked at."""
    for module in MODULES:
        yield "" if module is builtins else f"{module.__name__}.", module
    yield "torch.Tensor.", torch.Tensor
    yield "torch.autograd.Function.", torch.autograd.Function
    for module in CLASSES_OF:
        for name, kind in vars(module).items():
            if isinstance(kind, type) and kind.__module__.startswith("torch"):
                yield f"{module.__name__}.{name}.", kind


def _public(name: str) -> bool:
    return not name.startswith("_") or name.startswith("__")


# as they were when the course was imported
_BEFORE = [
    (prefix, vars(owner), {name: value for name, value in vars(owner).items() if _public(name)}, owner)
    for prefix, owner in _owners()
]
_INHERITED = {id(owner): frozenset(dir(owner)) for *_, owner in _BEFORE if isinstance(owner, type)}


def replaced() -> str:
    """Say which function isn't the original any more, and what replaced it; empty if all are."""
    for prefix, now, before, owner in _BEFORE:
        for name, was in before.items():
            found = now.get(name, GONE)
            if found is not was and _is_function(was) and _theirs(found):
                return _said(prefix + name, found)
        if isinstance(now, MappingProxyType) and len(now) > len(before):
            for name in _INHERITED[id(owner)].intersection(now.keys() - before.keys()):  # it hides a base's
                if _public(name) and _is_function(now[name]) and _theirs(now[name]):
                    return _said(prefix + name, now[name])
    return ""


def hidden(answers: tuple, code: str = "") -> tuple[str, object] | None:
    """A name that the answers use while a variable of the notebook has taken it: (name, the variable's value).

    Names are those of Python's functions, and those of modules, functions and classes that the course's own `code` for
    the notebook imports and gives to nothing else.
    """
    imported = _imported(code)
    todo, seen = [one if isinstance(one, (FunctionType, type)) else type(one) for one in answers], set()
    while todo:
        one = todo.pop()
        if id(one) in seen or not stacks.is_trainee(_file(one)):
            continue
        seen.add(id(one))
        if isinstance(one, type):
            todo += [inspect.unwrap(each) for each in vars(one).values() if isinstance(each, FunctionType)]
            continue
        for name, called in _globals_of(one.__code__):
            value = one.__globals__.get(name, GONE)
            taken = value is not GONE and not _is_used(value)
            if taken and (name in imported or (called and hasattr(builtins, name))):
                return name, value
            todo += [value] * isinstance(value, (FunctionType, type))
    return None


def _imported(code: str) -> set[str]:
    found, given = set(), set()
    for node in _outside_functions(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.add(node.id)
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = sys.modules.get(node.module or "")
            found |= {each.asname or each.name for each in node.names if _is_used(getattr(module, each.name, None))}
    return found - given


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)


def _is_used(value) -> bool:
    return callable(value) or isinstance(value, ModuleType)


def _globals_of(code: CodeType) -> Iterator[tuple[str, bool]]:
    """The global names that a function reads, its inner functions too, and whether it calls them."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval, bool(step.arg & 1)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _is_function(value) -> bool:
    return callable(value) or isinstance(value, (classmethod, property))


def _theirs(value) -> bool:
    """Whether a trainee put this in the place of a function."""
    if value is GONE:
        return True
    return stacks.is_trainee(_file(value)) if _is_function(value) else True


def _code(value) -> CodeType | None:
    for _ in range(5):  # of wrappers round it
        if hasattr(value, "__code__"):
            return value.__code__
        inner = next((key for key in ("__func__", "func", "fget", "__wrapped__") if hasattr(value, key)), None)
        if inner is None:
            break
        value = getattr(value, inner)
    return None


def _file(value) -> str:
    """Where a function or a class is written; "" for one of no file, such as those that Python is made of."""
    codes = [_code(each) for each in vars(value).values()] if isinstance(value, type) else [_code(value)]
    files = [code.co_filename for code in codes if code is not None]
    kind = value if isinstance(value, type) else type(value)
    files = files or [getattr(sys.modules.get(kind.__module__), "__file__", None) or ""]
    return next(filter(stacks.is_trainee, files), files[0])


def _said(name: str, found) -> str:
    whose = "PyTorch's" if name.startswith("torch") else "NumPy's" if name.startswith("numpy") else "Python's"
    code = None if found is GONE else _code(found)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip() if code else ""
    if found is GONE:
        return f"{name} is not {whose} own any more: it was deleted"
    return f"{name} is not {whose} own any more: {f'`{line}`' if line else 'something else'} has replaced it"
