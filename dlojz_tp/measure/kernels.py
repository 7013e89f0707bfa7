"""Triton kernels without a GPU: run by Triton's interpreter, every element that they read and write seen.

Importing this module sends each launch on CPU tensors to the interpreter; on CUDA tensors it is compiled, as ever.
`TRITON_INTERPRET` need not be set. An address outside of the tensors that a launch was given is never touched: the
launch raises `WildPointer`, or goes on and notes it where it is watched:

    with kernels.Watched() as seen:
        y = softmax(x)                  # launches kernels
    seen.reads(x), seen.writes(y)       # how many times each element was read or written, in the shape of x and y
    seen.read_bytes(), seen.outside, seen.dots, ...

Inside `Watched`, `torch.empty` is full of NaN. A lane whose mask is False and that has no `other` is undefined on a
GPU: it holds infinity here (integers: zero). What `Watched` tells is exact and has nothing to do with time.

All names of the interpreter that Triton doesn't promise to keep stand in this file. They are the same in 3.6 to 3.8.
"""

import contextlib
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from dlojz_tp.measure.kernel_traffic import Access, Dot, Launch, Memory, Outside, Watched, watching

try:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction
except ImportError as error:
    raise ImportError("Kernels need Triton, which exists for Linux: python -m pip install triton") from error

APART = 1 << 44  # bytes between two tensors, as a kernel sees them
__all__ = ["Dot", "Launch", "Outside", "Watched", "WildPointer"]
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # of a launch, which the interpreter doesn't need
_PRIVATE = "interpreter_builder", "FunctionRewriter", "InterpretedFunction", "TensorHandle", "_patch_lang"
_PRIVATE += "_implicit_cvt", "_LangPatchScope", "_MISSING"
_BUILDERS = "create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas", "create_dot"
_BUILDERS += "binary_op", "set_grid_dim", "set_grid_idx"
_missing = [name for name in _PRIVATE if not hasattr(interpreter, name)]
_missing += [name for name in _BUILDERS if not hasattr(interpreter.InterpreterBuilder, name)]
if _missing:
    raise ImportError(
        f"The interpreter of Triton {triton.__version__} has no {', '.join(_missing)}. Install Triton 3.6, 3.7 or 3.8."
    )


class WildPointer(IndexError):
    """A kernel reads or writes outside of the tensors that it was given."""


class _Running:
    """One launch in the interpreter: the builder's methods that touch memory, wrapped.

    A kernel gets addresses of its own, those of two tensors far apart: one that leaves a tensor can't enter another.
    """

    def __init__(self, launch: Launch):
        self.launch, self.program, self.number = launch, (0, 0, 0), 0
        self.memories: list[Memory] = []
        self.given = {name: self.argument(name, value) for name, value in launch.arguments.items()}

    def argument(self, name, value):
        """What the kernel gets: a number or a tensor as the interpreter has it, a constant as it is."""
        if name in self.launch.constants:
            return value
        found = interpreter._implicit_cvt(value)
        if isinstance(value, torch.Tensor):
            offset = value.storage_offset() * value.element_size()
            found.handle.data[:] = (self.memory(name, value) + 1) * APART + APART // 2 + offset
        return found

    def memory(self, name, tensor) -> int:
        """The number of the memory of a tensor, all of whose elements may be used from now on."""
        storage, known = tensor.untyped_storage(), watching[-1].memories if watching else {}
        places = [one.storage.data_ptr() for one in self.memories]
        if storage.data_ptr() not in places or not storage.nbytes():
            inside = np.zeros(storage.nbytes() // tensor.element_size(), bool)
            memory = known.setdefault(storage.data_ptr(), Memory(name, storage, tensor.element_size(), inside))
            memory.inside = inside
            self.memories.append(memory)
            places.append(storage.data_ptr())
        number = len(places) - 1 - places[::-1].index(storage.data_ptr())
        start = self.memories[number].inside[tensor.storage_offset() :]  # of one byte each, as their strides are
        np.lib.stride_tricks.as_strided(start, tensor.shape, tensor.stride())[...] = True
        return number

    def touch(self, kind, pointers, mask):
        """Note an access. Returns (pointers, mask): real addresses, and which lanes may use theirs.

        Raises WildPointer where nobody watches and a lane is outside.
        """
        wanted = np.broadcast_to(_data(mask), pointers.data.shape).astype(bool)
        addresses = pointers.data.astype(np.int64)
        numbers, places = addresses // APART - 1, addresses % APART - APART // 2
        allowed, real = np.zeros(wanted.shape, bool), np.zeros(wanted.shape, np.uint64)
        for number in np.unique(numbers[wanted]):
            here = wanted & (numbers == number)
            if 0 <= number < len(self.memories):
                memory = self.memories[number]
                elements = places // memory.itemsize
                here &= (elements >= 0) & (elements < len(memory.inside))
                here[here] = memory.inside[elements[here]]
                allowed |= here
                real[here] = memory.storage.data_ptr() + places[here]
                if watching and here.any():
                    launch = len(watching[-1].launches) - 1
                    watching[-1].log.append(Access(launch, self.number, kind, memory, elements[here]))
        wild = wanted & ~allowed
        if wild.any():
            told = self.told(kind, int(numbers[wild].flat[0]), int(places[wild].flat[0]), int(wild.sum()))
            if not watching:
                raise WildPointer(f"{told}. Mask these lanes.")
            watching[-1].outside.append(told)
        return interpreter.TensorHandle(real, pointers.dtype), interpreter.TensorHandle(allowed, tl.int1)

    def told(self, kind, number, place, count) -> Outside:
        if not 0 <= number < len(self.memories):
            return Outside(self.launch.kernel, self.program, kind, "no tensor", place, count, False)
        memory = self.memories[number]
        own = np.flatnonzero(memory.inside)
        first, last = (own[0], own[-1]) if len(own) else (0, -1)
        element = place // memory.itemsize
        between = bool(first < element < last)
        return Outside(self.launch.kernel, self.program, kind, memory.name, int(element - first), count, between)

    def load(self, original, pointers, mask, other, *rest):
        wanted = _data(mask)
        pointers, mask = self.touch("read", pointers, mask)
        found = original(pointers, mask, other, *rest)
        if found.data.dtype.kind == "f":
            undefined = ~mask.data if other is None else ~mask.data & np.broadcast_to(wanted, mask.data.shape)
            found.data[undefined] = np.inf
        return found

    def store(self, original, pointers, value, mask, *rest):
        pointers, mask = self.touch("write", pointers, mask)
        return original(pointers, value, mask, *rest)

    def atomic_rmw(self, original, operation, pointers, value, mask, *rest):
        pointers, mask = self.touch("atomic", pointers, mask)
        return original(operation, pointers, value, mask, *rest)

    def atomic_cas(self, original, pointers, *rest):
        pointers, mask = self.touch("atomic", pointers, np.ones(pointers.data.shape, bool))
        if not mask.data.all():  # it has no mask of its own
            raise WildPointer(f"{self.launch.kernel}: tl.atomic_cas outside of the tensors given")
        return original(pointers, *rest)

    def dot(self, original, a, b, sums, *rest):
        if watching:
            (m, k), n = a.data.shape[-2:], b.data.shape[-1]
            watching[-1].dots.append(Dot(m, n, k, a.get_element_ty().name, sums.get_element_ty().name))
        return original(a, b, sums, *rest)

    def binary_op(self, original, *args):
        """A comparison of floats gives booleans that are called floats, and as such a scalar is broadcast."""
        found = original(*args)
        return interpreter.TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found


def _data(mask):
    return mask.data if isinstance(mask, interpreter.TensorHandle) else mask


@functools.cache
def _language() -> list[tuple[object, str, object, object]]:
    """What the interpreter changes in the language while it runs: (of what, name, as it is, as it becomes)."""
    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    first = {(id(of), name): (of, name, was) for of, name, was in reversed(scope._changes)}
    changes = {(of, name): (was, vars(of)[name]) for of, name, was in first.values()}
    scope.restore()
    was, _ = changes[tl.tensor, "__index__"]
    changes[tl.tensor, "__index__"] = was, lambda self: int(self.handle.data.item())  # 3.6 fails with new NumPys
    return [(of, name, was, becomes) for (of, name), (was, becomes) in changes.items()]


@contextlib.contextmanager
def _interpreting(running: _Running):
    """Inside, the language computes, and memory is touched by way of `running`."""
    builder = interpreter.interpreter_builder
    methods = running.load, running.store, running.atomic_rmw, running.atomic_cas, running.dot, running.binary_op
    wrapped = dict(zip(_BUILDERS, methods))
    changes = _language()
    try:
        for of, name, _, becomes in changes:
            setattr(of, name, becomes)
        for name, method in wrapped.items():
            setattr(builder, name, functools.partial(method, getattr(builder, name)))
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            yield builder
    finally:
        for name in wrapped:
            builder.__dict__.pop(name, None)
        for of, name, was, _ in changes:
            if was is interpreter._MISSING:
                delattr(of, name)
            else:
                setattr(of, name, was)


_rewritten: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _python(fn: Callable) -> Callable:
    """A kernel's function as the interpreter runs it. Its module gets one name, not all of the interpreter's."""
    if fn not in _rewritten:
        before = {*fn.__globals__, "interpreter_semantic"}
        _rewritten[fn] = interpreter.FunctionRewriter(fn).rewrite_ast()
        for name in set(fn.__globals__) - before:
            del fn.__globals__[name]
    return _rewritten[fn]


def _grid(grid, arguments) -> tuple[int, int, int]:
    found = grid(arguments) if callable(grid) else grid
    if not isinstance(found, tuple | list) or not 1 <= len(found) <= 3 or any(type(n) is not int for n in found):
        raise TypeError(f"A grid is a tuple of one to three whole numbers, not {found!r}")
    return (*found, 1, 1)[:3]


def _launch(function, args, grid, options):
    """Run a kernel on CPU tensors, program by program."""
    fn = function.fn
    names = list(inspect.signature(fn).parameters)
    if unknown := set(options) - {*names, *OPTIONS}:
        raise TypeError(f"{fn.__name__} has no argument {', '.join(sorted(unknown))}")
    arguments = inspect.getcallargs(fn, *args, **{name: value for name, value in options.items() if name in names})
    constants = interpreter.GridExecutor(fn, names, grid).constexprs
    launch = Launch(fn.__name__, _grid(grid, arguments), {n: arguments[n] for n in constants}, function, arguments)
    if watching:
        watching[-1].launches.append(launch)
    running = _Running(launch)
    nx, ny, nz = launch.grid
    programs = [(n % nx, n // nx % ny, n // (nx * ny)) for n in range(nx * ny * nz)]
    with _interpreting(running) as builder:
        builder.set_grid_dim(*launch.grid)
        for number in watching[-1].order(range(len(programs))) if watching else range(len(programs)):
            running.number, running.program = number, programs[number]
            builder.set_grid_idx(*programs[number])
            _python(fn)(**running.given)


def _is_real_gpu(value) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().device.type != "cpu"


def _send_to_interpreter(kind):
    """Replace `run` and the call inside of a kernel of one of Triton's classes of kernels."""
    compiled, called = kind.run, kind.__call__

    @functools.wraps(compiled)
    def run(self, *args, grid, warmup, **options):
        if any(isinstance(one, FakeTensor) for one in [*args, *options.values()]):
            raise RuntimeError(f"{self.fn.__name__} needs values, and it is given tensors that only have a shape")
        if warmup or any(map(_is_real_gpu, [*args, *options.values()])):
            return compiled(self, *args, grid=grid, warmup=warmup, **options)
        return _launch(self, args, grid, options)

    @functools.wraps(called)
    def call(self, *args, **options):
        if interpreter.interpreter_builder.__dict__.get("create_dot") is None:  # no kernel is being interpreted
            return called(self, *args, **options)
        return _python(self.fn)(*args, **options)

    kind.run, kind.__call__ = run, call


if not hasattr(JITFunction.run, "__wrapped__"):
    for _kind in (JITFunction, interpreter.InterpretedFunction):
        _send_to_interpreter(_kind)
