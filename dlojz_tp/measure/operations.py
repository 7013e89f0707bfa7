"""Count what an answer really does: operations, elements read, synchronisations, copies between devices."""

import math
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Each of these hands a value of a tensor to Python, or needs its values to know a shape: on a GPU the CPU then waits.
SYNCHRONISING = {
    "aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select",
    "python.values", "python.numpy", "python.print", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
    "aten.bincount", "aten.repeat_interleave", "aten.allclose",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Record every operator that runs inside, the backward pass included.

    calls: Counter {"aten.add": n}. log: list of (name, tensors read, arguments, keyword arguments, result).
    functions: names of the functions of PyTorch that were called, such as "cross_entropy"; not what these call in turn.
    """

    def __init__(self):
        super().__init__()
        self.calls: Counter = Counter()
        self.log: list[tuple[str, list, tuple, dict, object]] = []
        self.functions: set[str] = set()
        self._to_python = _ToPython(self)

    def __enter__(self):
        self._to_python.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._to_python.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        if self._to_python.on_cpu_only and name in SYNCHRONISING:
            return out
        self.calls[name] += 1
        # shapes and addresses only: keeping the tensors would keep their memory
        read = [_sketch(tensor) for tensor in _tensors((args, kwargs))]
        self.log.append((name, read, _plain(args), _plain(kwargs), _sketch(out)))
        return out

    @property
    def total(self) -> int:
        """How many operators ran that compute: views and metadata are free and not counted."""
        return sum(n for name, n in self.calls.items() if name not in FREE)


class _ToPython(TorchFunctionMode):
    """`tolist`, `numpy` and `print` hand out values without running an operator: they are recorded here, as a read.

    on_cpu_only: inside an operation that looks at values on the CPU, where that costs nothing, and never on a GPU.
    """

    def __init__(self, operations):
        super().__init__()
        self._operations, self.on_cpu_only = operations, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._operations.functions.add(getattr(func, "__name__", ""))
        name = _HANDS_OUT.get(func)
        if getattr(func, "__name__", "") in _FROM_LISTS and _in_lists(args):  # each is read; no operator tells
            self._operations.calls["python.values"] += 1
            self._operations.log.append(("python.values", [], (), {}, None))
        if name:
            self._operations.calls[name] += 1
            self._operations.log.append((name, [_sketch(args[0])], (), {}, None))
        if func is torch.nn.functional.one_hot and (args[1:] or [kwargs.get("num_classes", -1)])[0] > 0:
            self.on_cpu_only = True  # without the number of classes, the largest label is read on any device
        try:
            return func(*args, **kwargs)
        finally:
            self.on_cpu_only = False


_FROM_LISTS = {"tensor", "as_tensor", "asarray", "new_tensor"}


def _in_lists(args) -> bool:
    """Whether tensors are in a list among the arguments."""
    lists = [item for item in args if isinstance(item, list | tuple)]
    return any(isinstance(item, torch.Tensor) for one in lists for item in one) or any(map(_in_lists, lists))


_HANDS_OUT = {
    torch.Tensor.tolist: "python.values",
    torch.Tensor.numpy: "python.numpy",
    torch.Tensor.__array__: "python.numpy",
    torch.Tensor.__repr__: "python.print",
    torch.Tensor.__format__: "python.print",
}

FREE = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.detach", "aten.alias", "aten.slice", "aten.select",
    "aten.expand", "aten.t", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.split",
    "aten.chunk", "aten.narrow", "aten.as_strided", "aten.unbind", "aten.split_with_sizes", "aten.tensor_split",
    "aten.empty", "aten.lift_fresh",
}  # fmt: skip

# These look at a tensor's shape only. An array shares the tensor's memory: what is read of it then is not known here.
_SHAPE_ONLY = {
    "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided", "aten.zeros_like",
    "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.rand_like", "aten.randn_like", "python.numpy",
}  # fmt: skip
_CHOOSES = {"aten.index", "aten.index_select", "aten.take", "aten.gather"}  # as many elements as come out


def elements_read(operations: Operations, storage_of: torch.Tensor) -> int:
    """Elements of one tensor's storage that computing operators read (views are free, so slices count as slices)."""
    address = storage_of.untyped_storage().data_ptr()
    return sum(
        out[1] if name in _CHOOSES and out else size
        for name, tensors, _, _, out in operations.log
        if name not in FREE and name not in _SHAPE_ONLY
        for where, size, *_ in tensors
        if where == address
    )


def syncs(operations: Operations) -> list[str]:
    """The operators that would make the CPU wait for a GPU, in the order they ran."""
    return [name for name, *_ in operations.log if name in SYNCHRONISING]


def in_words(names) -> str:
    """What `syncs` has found, each once, as a program writes it."""
    return ", ".join(dict.fromkeys(_WORDS.get(name.removeprefix("aten."), name) for name in sorted(names)))


_READ = "a value is read (item(), float(…), if …)"
_WORDS = {
    "_local_scalar_dense": _READ, "item": _READ, "is_nonzero": _READ, "equal": "torch.equal",
    "python.values": "values are read (tolist(), or torch.tensor of tensors)", "python.numpy": "numpy()",
    "nonzero": "nonzero, or a mask as index: how many elements come out is a value",
    "masked_select": "masked_select: how many elements come out is a value",
}  # fmt: skip


def copies(operations: Operations, source: str, target: str) -> list[bool]:
    """Copies from device type `source` to `target`: one entry each, True where it was non-blocking."""
    found = []
    for name, tensors, args, kwargs, out in operations.log:
        # in inference mode PyTorch does not break `to` up into `_to_copy`
        if name in ("aten._to_copy", "aten.to") and tensors and tensors[0][2] == source and out and out[2] == target:
            found.append(bool(kwargs.get("non_blocking", True in args)))
        elif name == "aten.copy_" and (tensors[1][2], tensors[0][2]) == (source, target):
            found.append(bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
    return found


def _tensors(tree) -> list[torch.Tensor]:
    found = []
    stack = [tree]
    while stack:
        item = stack.pop(0)
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            stack = list(item) + stack
        elif isinstance(item, dict):
            stack = list(item.values()) + stack
    return found


def _sketch(value):
    """(storage address, elements, device type, shape) of a tensor; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    real = value.device.type == "cpu" and not isinstance(value, FakeTensor) and not is_traceable_wrapper_subclass(value)
    address = value.untyped_storage().data_ptr() if real else 0
    return address, value.numel(), value.device.type, tuple(value.shape)


def _plain(value):
    """The value with None in place of each tensor, also in lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(inner) for inner in value)
    return None if isinstance(value, torch.Tensor) else value


class Products(TorchDispatchMode):
    """The matrix products that run inside. dtypes: of each result. multiplications: of numbers, in all of them."""

    def __init__(self):
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: what it does inside comes back here
        out = func(*args, **(kwargs or {}))
        if (name := func.overloadpacket._qualified_op_name) in _PRODUCTS:
            first = args[1] if "add" in name else args[0]
            self.dtypes.append(out.dtype)
            self.multiplications += math.prod(out.shape) * first.shape[-1]
        return out

    def take(self) -> list[torch.dtype]:
        """The dtypes of the products since the last time; they are forgotten."""
        dtypes, self.dtypes = self.dtypes, []
        return dtypes


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
