"""Copies between devices: recorded, waited for where CUDA waits, and late where nobody waits.

A copy to the CPU that does not block arrives with the next wait for its stream; until then its target holds NaN, or the
smallest number of its type. Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dlojz_tp.judging.pretend_gpu import integers
from dlojz_tp.judging.pretend_gpu.machine import Copy, Race, line
from dlojz_tp.judging.pretend_gpu.memory import (
    CPU,
    PLAIN,
    TENSOR,
    Pinned,
    block,
    device_of,
    is_traceable_wrapper_subclass,
    real,
    real_storage,
    tag,
)

_parse_to = torch._C._nn._parse_to


def to_copy(mode, func, args, kwargs, moving):
    """x.to(device): the copy into new memory that `move` asked for."""
    target, non_blocking = moving
    source = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
    out = func(*args, **kwargs, device=mode.machine.home)
    if target.type == "cuda":
        mode.put(out, target.index)
    elif non_blocking:
        real_storage(out)._gpu_tag = Pinned()  # aten::_to_copy allocates it pinned
    crossed(mode, source, out, non_blocking)
    return out


def copy_(mode, func, args, kwargs, found):
    """target.copy_(source) between devices."""
    target, source = found[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    out = func(*args, **kwargs)
    crossed(mode, source, target, non_blocking)
    return out


def foreach_copy_(mode, args, kwargs):
    """torch._foreach_copy_: one copy after the other."""
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source, non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))


def crossed(mode, source, target, non_blocking: bool) -> None:
    """Note a copy whose values are in its target already, and let them be late if they would be."""
    machine, streams = mode.machine, mode.streams
    a, b = block(source), block(target)
    if not (a or b):  # zeros without memory, of autograd
        return
    way = "between gpus" if a and b else "to cpu" if a else "to gpu"
    cpu = tag(target if way == "to cpu" else source)
    pinned = type(cpu) is Pinned
    # another dtype is made on the CPU where the copy blocks, else on the GPU (copy_kernel_cuda in that file of ATen)
    sent = source if way == "between gpus" or (way == "to cpu") != bool(non_blocking) else target
    machine.copies.append(Copy(way, sent.nbytes, sent.element_size(), bool(non_blocking), pinned, *line()))
    stream = streams.current((a or b).index)
    if way == "between gpus":  # the two current streams wait for each other (aten/src/ATen/native/cuda/Copy.cu)
        stream.wait_stream(streams.current(b.index))
    mark = streams.mark(stream)
    machine.queued += 1
    if machine.clock is not None:
        machine.clock.copied(mark, way, sent.nbytes, pinned)
    for memory, x in ((a, source), (b, target)):
        if memory is not None:
            streams.used(memory, mark, x is target, f"copy {way}", x)
    if machine.clock is not None and way == "to gpu":
        integers.copied(source, target)
    if way == "between gpus":
        streams.current(b.index).wait_stream(stream)
        return
    if not non_blocking:
        streams.wait_for_stream(f"copy {way}", stream)
    elif not pinned:
        streams.wait_for_stream(f"copy {way}, not pinned", stream)
    elif way == "to gpu":
        cpu.read[stream] = mark[1]
    else:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            streams.arriving.append((target.detach(), target.detach().clone(), mark))
            target.detach().fill_(_nothing(target.dtype))


def indexed(mode, x, index: int) -> None:
    """Note that an index of the CPU goes to GPU `index`, in a copy that blocks.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp, make_info: indices[i].to(self.device()).
    """
    stream = mode.streams.current(index)
    mode.machine.copies.append(Copy("to gpu", x.nbytes, x.element_size(), False, type(tag(x)) is Pinned, *line()))
    if mode.machine.clock is not None:
        mode.machine.clock.copied(mode.streams.mark(stream), "to gpu", x.nbytes, type(tag(x)) is Pinned)
    mode.streams.wait_for_stream("an index of the CPU", stream)


def _nothing(dtype):
    """What stands in memory into which no value has come."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def overwritten(mode, x, what: str) -> None:
    """The CPU writes into pinned memory: a race, if a copy to a GPU reads it and nobody has waited for it."""
    memory, streams = tag(x), mode.streams
    if type(memory) is Pinned and any(streams.host.get(s, 0) < number for s, number in memory.read.items()):
        mode.machine.races.append(Race(f"{what} on the CPU, while a copy reads", tuple(x.shape), *line()))
        memory.read.clear()


class Mover:
    """The ways of a tensor to another device, with its gradient coming back."""

    def __init__(self, machine):
        self.machine = machine

    def move(self, x, device, dtype=None, non_blocking=False, memory_format=None, copy=False):
        here = device_of(x)
        device = here if device is None else self.machine.place(device)
        keep = {"memory_format": memory_format} if memory_format else {}
        if device == here or {device.type, here.type} - {"cpu", "cuda"}:
            more = {} if device == here else {"device": self.machine.home if device.type == "cuda" else device}
            if device.type == "cuda" and device != here:  # from "meta", which holds nothing
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            return real(TENSOR.to, x, dtype=dtype or x.dtype, non_blocking=non_blocking, copy=copy, **more, **keep)
        return _Move.apply(x, self, device, dtype or x.dtype, non_blocking, keep)

    def to(self, x, *args, **kwargs):
        """Tensor.to in all its forms: (device, dtype), (dtype), (other)."""
        if type(x) not in PLAIN and is_traceable_wrapper_subclass(x):
            return real(TENSOR.to, x, *args, **kwargs)
        copy = kwargs.pop("copy", False)
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.pop("other", None)
        if other is not None:
            args = (device_of(other), other.dtype, *args[1:])
        # _parse_to knows no fourth argument, "copy", and takes numbers for devices only where it finds a GPU
        places = [i for i, a in enumerate(args) if isinstance(a, bool)]
        if len(places) == 2:
            copy, args = args[places[1]], args[: places[1]]
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        device, dtype, non_blocking, memory_format = _parse_to(*args, **kwargs)
        return self.move(x, device, dtype, non_blocking, memory_format, copy)

    def cuda(self, x, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return self.move(x, torch.device("cuda", self.machine.index(device)), None, non_blocking, memory_format)

    def cpu(self, x, memory_format=torch.preserve_format):
        return self.move(x, CPU, None, False, memory_format)


class _Move(torch.autograd.Function):
    """The copy itself. C++ would send the gradient to the device that it knows, which is the CPU."""

    @staticmethod
    def forward(ctx, x, mover, device, dtype, non_blocking, keep):
        ctx.back = mover, device_of(x), x.dtype
        here = mover.machine.here
        here.moving = device, non_blocking
        try:
            # the modes above ours see the copy that a GPU would see
            return real(TENSOR.to, x.detach(), device=device, dtype=dtype, non_blocking=non_blocking, copy=True, **keep)
        finally:
            here.moving = None

    @staticmethod
    def backward(ctx, gradient):
        mover, device, dtype = ctx.back
        return mover.move(gradient, device, dtype), None, None, None, None, None
