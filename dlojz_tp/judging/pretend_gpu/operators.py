"""Every operation of ATen, as it reaches the kernels: where it runs, what it makes there, whether the CPU waits."""

import contextlib
import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.pretend_gpu import copies, fakes
from dlojz_tp.judging.pretend_gpu.machine import ANYWHERE
from dlojz_tp.judging.pretend_gpu.memory import (
    HOMES,
    PLAIN,
    Block,
    Pinned,
    is_wild,
    real_storage,
    tag,
    tensors,
    written,
)
from dlojz_tp.judging.pretend_gpu.mixing import INDEXED, indices_of_cpu, refuse_mixed
from dlojz_tp.judging.pretend_gpu.random_numbers import drawing

# operations whose result's size, or whose value, the CPU must know
READ_BACK = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "_local_scalar_dense",
    "is_nonzero", "bincount", "_linalg_check_errors", "allclose",
}  # fmt: skip


_TO_COPY = torch.ops.aten._to_copy.default


class Operators(TorchDispatchMode):
    """Gives the results of operations on a GPU's tensors the tag of that GPU; all compute on the CPU.

    `machine.makes` says where C++ creates tensors, which in truth are the CPU's: a GPU's number within a function that
    has a tensor of it, None for the CPU, ANYWHERE outside of any function (functions.py sets it).
    """

    def __init__(self, machine, streams, groups):
        super().__init__()
        self.machine, self.streams, self.groups, self.clock = machine, streams, groups, machine.clock

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if fakes.faking(types):
            return fakes.call(self.machine, func, args, kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented  # it unpacks itself and comes back
        if _composed(func):  # in inference mode, and inside of DTensor, where no autograd takes it apart
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view and "device" not in kwargs:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if self.clock is not None:
            args, kwargs = self.clock.shapes_only(func, args, kwargs)
        found = list(tensors((*args, *kwargs.values()) if kwargs else args))
        if func.namespace in ("c10d", "_c10d_functional"):
            return self.groups.call(self, func, name, args, kwargs, found)
        tags = [tag(x) for x in found]
        on = {each.index for each in tags if type(each) is Block}
        moving = getattr(self.machine.here, "moving", None) if name == "_to_copy" else None
        if moving is not None:
            return copies.to_copy(self, func, args, kwargs, moving)
        if on and None in tags:
            tags = self._settle(found, tags, next(iter(on)))
        target = self._target(func, kwargs, found, on)
        if target is not None and target is not ANYWHERE and "device" in kwargs:
            kwargs = kwargs | {"device": self.machine.home}
        pinned = kwargs.get("pin_memory")
        if pinned:
            kwargs = kwargs | {"pin_memory": False}
        self._same_generator(kwargs.get("generator"), target)
        if not on and type(target) is not int:
            out = self._on_cpu(func, args, kwargs, found, tags, target)
            if pinned:
                real_storage(out)._gpu_tag = Pinned()
            return out
        refuse_mixed(func, name, args, kwargs, found, tags)
        by_program = self.machine.makes is not ANYWHERE  # gloo copies its results in C++
        if name == "copy_" and by_program and found[0] is not found[1] and tags_differ(tags[0], tags[1]):
            return copies.copy_(self, func, args, kwargs, found)
        if name == "_foreach_copy_" and len({each.index if type(each) is Block else None for each in tags}) > 1:
            with self:
                return copies.foreach_copy_(self, args, kwargs)
        stream = self.streams.current(target if type(target) is int else min(on))
        self.machine.queued += 1
        self.machine.launched += 1
        if name in INDEXED:
            for x in indices_of_cpu(name, found, tags):
                copies.indexed(self, x, stream.device.index)
        mark = self.streams.started(stream, func, found, args, kwargs)
        if name in READ_BACK or _read_here(name, args, kwargs, found):
            self.streams.wait_for_stream(f"aten::{name}", stream)
        with self._generator(func, kwargs, target):
            out = func(*args, **kwargs) if self.clock is None else self.clock.result(func, args, kwargs)
        if target is not None:
            for x in tensors([out]):
                self.put(x, target, mark)
        if self.clock is not None:
            self.clock.ran(mark, func, args, kwargs, out)
        if name == "resize_":
            tag(out).resize(real_storage(out).nbytes())
        return out

    def put(self, x, index: int, mark=None):
        """Tag this tensor's memory, unless it has its tag already."""
        storage = real_storage(x)
        if getattr(storage, "_gpu_tag", None) is None:
            stream = self.streams.current(index) if mark is None else mark[0]
            made = Block(self.machine, index, storage.nbytes(), stream)
            stream.allocated(made.bytes)
            made.written = self.streams.mark(stream) if mark is None else mark
            storage._gpu_tag = made
        return x

    def _target(self, func, kwargs, found, on):
        """The GPU on which the result is, None for the CPU or where it is known already, ANYWHERE."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return self.machine.index(device)
        if device is not None and device.type not in HOMES:
            return None
        if not found:
            return self.machine.makes
        if device is not None and self.machine.makes is None and func is not _TO_COPY:
            return None  # empty_like(x, device="cpu"), as the program says it; C++ says so of every tensor
        return min(on) if on else None

    def _settle(self, found, tags, index):
        """Tensors that C++ made, and that were at home everywhere, are of the first GPU that they meet."""
        for i, x in enumerate(found):
            if tags[i] is None and is_wild(x):
                tags[i] = tag(self.put(x, index))
        return tags

    def _same_generator(self, generator, target):
        if generator is not None and type(target) is int and generator._cdata not in self.machine.generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")

    def _generator(self, func, kwargs, target):
        if torch.Tag.nondeterministic_seeded not in func.tags or type(target) is not int or kwargs.get("generator"):
            return contextlib.nullcontext()
        return drawing(self.machine, target)

    def _on_cpu(self, func, args, kwargs, found, tags, target):
        """No GPU takes part. Pinned memory must not be overwritten while a copy reads it."""
        if any(type(each) is Pinned for each in tags):
            for x in written(func, args, kwargs):
                copies.overwritten(self, x, func._schema.name)
        out = func(*args, **kwargs) if self.clock is None else self.clock.on_cpu(func, args, kwargs, found)
        if target is ANYWHERE or found and self.machine.makes is ANYWHERE and all(is_wild(x) for x in found):
            for x in tensors([out]):
                real_storage(x)._gpu_wild = True
        return out


@functools.cache
def _composed(func) -> bool:
    """Whether it has no kernel of its own."""
    keys = torch._C.DispatchKey
    has = func.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(keys.CPU)


def tags_differ(a, b) -> bool:
    """Whether two memories are of different devices."""
    return getattr(a, "index", None) != getattr(b, "index", None)


PUT = "index_put_", "_index_put_impl_", "index_put"


def _read_here(name: str, args, kwargs, found) -> bool:
    """Whether these arguments make the CPU wait: a mask as index (not to write one number), repeats of unknown sum."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "index":
        return _has_mask(found[1:])
    return name in PUT and args[2].numel() != 1 and _has_mask(tensors(args[1]))


def _has_mask(found) -> bool:
    return any(x.dtype in (torch.bool, torch.uint8) for x in found)
