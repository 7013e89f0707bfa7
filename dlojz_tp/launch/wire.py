"""How functions, arguments and results travel between processes: by value, in one pickle."""

import functools
import importlib
import io
import pickle
import struct
import sys
import threading
from types import CodeType, ModuleType

import cloudpickle
import torch

# Made in C++, it is no entry of sys.modules: by value (once_differentiable refers to it) half of torch would go along.
sys.modules.setdefault("torch._C._functions", torch._C._functions)

_Cached = type(functools.cache(int))
HEADER = struct.Struct("!cQ")  # one letter for what it is, then the number of bytes that follow
UP, PART, WAITS, SIGNALS, LIMITED, THROUGH, RETURNED, FAILED = b"U", b"P", b"W", b"S", b"L", b"T", b"R", b"F"


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with plain tensors as bytes: no shared memory, no file descriptor, never more than the view.

    Modules with their own class, such as torch.classes or torch.distributed.config, go by name: cloudpickle would
    take them for objects, and a function that uses `torch` and an attribute `classes` sends torch.classes along.
    Code keeps its file's name, which cloudpickle 3.1.3 drops: a rank's error quotes the line of the cell.
    A function of a notebook under functools.cache goes with its code, as others do, and with an empty cache.
    Memory formats and layouts go by their names in torch: PyTorch gives the first no module, so pickle looks through
    every loaded one and misses it where a lazy module imports others meanwhile, and it can't pickle the second at all.
    """

    def reducer_override(self, obj):
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _tensor, _tensor_parts(obj)
        if isinstance(obj, CodeType):
            return _code, (self.dispatch_table[CodeType](obj), obj.co_filename)
        if isinstance(obj, torch.memory_format | torch.layout):
            return getattr, (torch, str(obj).removeprefix("torch."))
        if type(obj) is _Cached and not _has_a_name(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _code(reduced: tuple, filename: str) -> CodeType:
    make, args = reduced
    return make(*args).replace(co_filename=filename)


def _has_a_name(obj) -> bool:
    """Whether another process finds it where it was defined."""
    return obj.__module__ != "__main__" and getattr(sys.modules.get(obj.__module__), obj.__qualname__, None) is obj


def _cached(function, parameters: dict):
    return functools.lru_cache(**parameters)(function)


def _submodules(code, found) -> list:
    """The loaded submodules of the modules among `found` that this code may use.

    In place of cloudpickle's own way, which compares the names of all loaded modules, for a hundredth of its time.
    """
    packages = [each.__name__ for each in found if isinstance(each, ModuleType) and getattr(each, "__package__", None)]
    return [each for package in packages for each in _below(package, set(code.co_names))]


def _below(package: str, names: set[str]):
    for path in [f"{package}.{name}" for name in names]:
        if sys.modules.get(path) is not None:
            yield sys.modules[path]
            yield from _below(path, names)


cloudpickle.cloudpickle._find_imported_submodules = _submodules


def _is_plain(t: torch.Tensor) -> bool:
    return (
        t.layout is torch.strided
        and t.device.type in ("cpu", "cuda")
        and not (t.is_quantized or t.is_nested or t.__dict__)
    )


def _tensor_parts(t: torch.Tensor) -> tuple:
    # clone() drops what lies outside a view, and keeps the memory format of a dense tensor.
    dense = t.detach().cpu().resolve_conj().resolve_neg().clone()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    data = pickle.PickleBuffer(flat.numpy()) if dense.numel() else bytearray()
    return data, t.dtype, tuple(dense.shape), dense.stride(), t.requires_grad


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple, stride: tuple, requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride).requires_grad_(requires_grad)


def pack(obj) -> memoryview:
    """Pickle any object by value; raises whatever the object's own pickling raises."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return memoryview(stream.getvalue())  # no copy; a stream with a buffer given out complains when it is collected


def culprit(obj, name: str, depth: int = 4) -> str | None:
    """Name the innermost part of `obj` that cannot be pickled, such as "result['loader'], a generator".

    Arguments: obj, the object; name, how to call it; depth, how many levels to look into.
    Returns the name and type of the part, or None when all of `obj` can be pickled.
    """
    try:
        pack(obj)
        return None
    except Exception:
        for part_name, part in _parts(obj, name) if depth else ():
            found = culprit(part, part_name, depth - 1)
            if found:
                return found
    return f"{name}, {_a_type(obj)}"


def _parts(obj, name: str):
    if isinstance(obj, dict):
        return [(f"{name}[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)):
        return [(f"{name}[{i}]", value) for i, value in enumerate(obj)]
    code = getattr(obj, "__code__", None)
    if code is not None:
        names = [n for n in code.co_names if n in obj.__globals__]
        used = [(f"the global {n!r}", obj.__globals__[n]) for n in names if obj.__globals__[n] is not obj]
        cells = zip(code.co_freevars, obj.__closure__ or (), strict=False)
        return used + [(f"the variable {n!r}", cell.cell_contents) for n, cell in cells]
    if not isinstance(obj, type):
        return [(f"{name}.{key}", value) for key, value in getattr(obj, "__dict__", {}).items()]
    return []


def _a_type(obj) -> str:
    kind = type(obj)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    hint = ": return x.to_local() or x.full_tensor()" if kind.__name__ == "DTensor" else ""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{hint}"


_whole = threading.RLock()  # a thread of the function's may tell of a signal while another message is on its way


def send(conn, tag: bytes, data=b"") -> None:
    """Write one message on a blocking socket."""
    with _whole:
        conn.sendall(HEADER.pack(tag, len(data)))
        conn.sendall(data)


def take(buffer: bytearray) -> tuple[bytes, bytes] | None:
    """Return (tag, data) when `buffer` holds a whole message, else None.

    A socket carries UP, PARTs, pairs of WAITS, SIGNALS and LIMITED, then THROUGH and RETURNED, or FAILED.
    """
    if len(buffer) < HEADER.size:
        return None
    tag, size = HEADER.unpack_from(buffer)
    if len(buffer) < HEADER.size + size:
        return None
    data = bytes(memoryview(buffer)[HEADER.size : HEADER.size + size])
    del buffer[: HEADER.size + size]
    return tag, data
