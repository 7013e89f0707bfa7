"""Fake tensors on a pretended GPU: they are the CPU's, whose backward pass works here, and say where they are."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dlojz_tp.judging.pretend_gpu import memory
from dlojz_tp.judging.pretend_gpu.memory import CPU, in_kernel, tensors

_device = FakeTensor.device.fget
_MODE = torch._C._TorchDispatchModeKey.FAKE


def faking(types) -> bool:
    """Whether an operation with tensors of these types is a fake one: that mode comes after all others."""
    return torch._C._get_dispatch_mode(_MODE) is not None or any(issubclass(t, FakeTensor) for t in types)


def call(machine, func, args, kwargs):
    """The operation, on the CPU; what comes out says the GPU that was asked for, or that of the arguments."""
    asked = kwargs.get("device")
    places = (getattr(x, "_gpu_index", None) for x in tensors((*args, *kwargs.values())))
    index = next((place for place in places if place is not None), None)
    moving = getattr(machine.here, "moving", None) if func is torch.ops.aten._to_copy.default else None
    if moving is not None:
        index, kwargs = moving[0].index, kwargs | {"device": CPU}
    elif asked is not None and asked.type == "cuda":
        index, kwargs = machine.index(asked), kwargs | {"device": CPU}
    elif asked is not None and (asked.type != "cpu" or machine.makes is None):
        index = None  # as the program says it; C++ says "cpu" of all that it makes
    with in_kernel():  # its decompositions ask for the device
        out = func(*args, **kwargs)
    for x in tensors([out]):
        if isinstance(x, FakeTensor):
            x._gpu_index = index
    return out


def device_of(x) -> torch.device:
    """What x.device says of a fake tensor."""
    known = _device(x)
    return known if known.type != "cpu" else memory.device_of(x)


def replaced() -> list[tuple]:
    """(class, name, stand-in)."""
    return [(FakeTensor, "device", property(device_of))]
