"""What replaces methods of tensors and storages, and of C++ that tells Python about devices."""

import torch

from dlojz_tp.judging.pretend_gpu.machine import line
from dlojz_tp.judging.pretend_gpu.memory import CPU, TENSOR, Block, Pinned, block, device_of, real, real_storage, tag

_wrapper = torch.Tensor._make_wrapper_subclass
_group = torch._C._group_tensors_by_device_and_dtype
_clone = torch.UntypedStorage.clone
_resize = torch._C.StorageBase.resize_


def replaced(machine, streams, mover) -> list[tuple]:
    """(class or module, name, stand-in) of each."""

    def numpy(x, *, force=False):
        if block(x) is not None and not force:
            raise TypeError(
                f"can't convert {device_of(x)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return real(TENSOR.numpy, x, force=force)

    def array(x, dtype=None, copy=None):
        return x.numpy() if dtype is None else x.numpy().astype(dtype, copy=False)

    def tolist(x):
        if (memory := block(x)) is not None and torch._C._len_torch_dispatch_stack():  # off while it prints
            streams.wait_for_stream("tolist", streams.current(memory.index))
        return real(TENSOR.tolist, x)

    def pin_memory(x, device=None):
        if block(x) is not None:
            raise RuntimeError(f"cannot pin '{_kind(x)}' only dense CPU tensors can be pinned")
        machine.pinned.append(line())
        if type(tag(x)) is Pinned:
            return x
        out = x.detach().clone(memory_format=torch.preserve_format)
        real_storage(out)._gpu_tag = Pinned()
        return out

    def record_stream(x, s):
        if (memory := block(x)) is None:
            raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend.")
        memory.kept.add(s)

    def resize(storage, size):
        _resize(storage, size)
        if type(memory := getattr(storage, "_gpu_tag", None)) is Block:
            memory.resize(size)

    def clone(storage):
        out = _clone(storage)
        if type(memory := getattr(storage, "_gpu_tag", None)) is Block:
            out._gpu_tag = Block(machine, memory.index, out.nbytes(), memory.home)
        return out

    def wrapper(cls, *args, **kwargs):
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        return _wrapper(cls, *args, **kwargs)

    def grouped(lists, with_indices=False):
        def place(known, group):
            first = next((x for x in group[0][0] if x is not None), None)
            return (known[0] if first is None else device_of(first)), known[1]

        return {place(known, group): group for known, group in _group(lists, with_indices).items()}

    def get_device(x):
        index = device_of(x).index
        return -1 if index is None else index

    def is_pinned(x, *_, **__):
        return type(tag(x)) is Pinned

    return [
        *((torch.Tensor, name, property(get)) for name, get in (
            ("device", device_of), ("is_cuda", lambda x: device_of(x).type == "cuda"),
            ("is_cpu", lambda x: device_of(x).type == "cpu"), ("is_meta", lambda x: device_of(x).type == "meta"),
        )),
        *((torch.Tensor, name, _method(method)) for name, method in (
            ("to", mover.to), ("cuda", mover.cuda), ("cpu", mover.cpu), ("numpy", numpy), ("__array__", array),
            ("tolist", tolist), ("pin_memory", pin_memory), ("is_pinned", is_pinned), ("get_device", get_device),
            ("record_stream", record_stream),
        )),
        (torch.Tensor, "_make_wrapper_subclass", staticmethod(wrapper)),
        (torch.UntypedStorage, "resize_", resize),
        (torch.UntypedStorage, "clone", clone),
        (torch._C, "_group_tensors_by_device_and_dtype", grouped),
    ]  # fmt: skip


def _method(function):
    """A function that binds to its tensor, also where a bound method is given."""
    return lambda x, *args, **kwargs: function(x, *args, **kwargs)


def _kind(x) -> str:
    return x.type().replace("torch.", "torch.cuda.", 1)
