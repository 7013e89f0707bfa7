"""Every function of torch, as the program calls it: where its C++ creates tensors, and what only CUDA does."""

import torch
from torch.overrides import TorchFunctionMode

from dlojz_tp.judging.pretend_gpu.amp import UPPER, cast
from dlojz_tp.judging.pretend_gpu.machine import ANYWHERE
from dlojz_tp.judging.pretend_gpu.memory import block, device_of, tensors

FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
PRINTED = {torch.Tensor.__repr__, torch.Tensor.__format__}
_set_gradient = torch.Tensor.grad.__set__


class Functions(TorchFunctionMode):
    """The innermost function mode. It is off within the function that it was told of."""

    def __init__(self, machine, mover, streams):
        super().__init__()
        self.machine, self.mover, self.streams = machine, mover, streams

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.machine.clock is not None:
            func, args, kwargs = self.machine.clock.instead(self.machine, self.streams, func, args, kwargs)
        if func in UPPER:
            args, kwargs = cast(self.machine, args, kwargs, torch.float32)
        if func in FROM_PYTHON:
            return self._from_python(func, args, kwargs)
        first = next((b for x in tensors(args) if (b := block(x)) is not None), None)
        if first is None and "input" in kwargs:
            first = next((b for x in tensors([kwargs["input"]]) if (b := block(x)) is not None), None)
        given = kwargs.get("device")
        if isinstance(given, int) and not isinstance(given, bool):
            kwargs = kwargs | {"device": self.machine.place(given)}
        where = first.index if first is not None and given is None else None
        if isinstance(func, torch._ops.OpOverload) and (first is None or self.machine.makes is not ANYWHERE):
            where = self.machine.makes  # C++ called it, and a mode of the program hands it on
        with self.machine.making(where):
            return func(*args, **kwargs) if first is None else self._on_gpu(func, args, kwargs)

    def run_backward(self, run):
        """The engine's way in, from a function or not: functions of the program that it calls see the mode again."""

        def run_backward(roots, *args, **kwargs):
            memory = next((b for x in tensors(roots) if (b := block(x)) is not None), None)
            with self.machine.making(None if memory is None else memory.index), self:
                return run(roots, *args, **kwargs)

        return run_backward

    def _on_gpu(self, func, args, kwargs):
        """A function with a tensor of a GPU among its arguments."""
        if func in PRINTED:
            self.streams.wait_for_stream("print", self.streams.current(device_of(args[0]).index))
        elif func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)
        elif func is torch.Tensor.type_as:
            return self.mover.to(args[0], args[1])
        elif func == _set_gradient and args[1] is not None and device_of(args[1]) != device_of(args[0]):
            raise RuntimeError(
                f"attempting to assign a gradient with device type '{device_of(args[1]).type}' to a tensor with device "
                f"type '{device_of(args[0]).type}'. Please ensure that the gradient and the tensor are on the same "
                "device"
            )
        cast = getattr(self.machine.here, "casts", ())
        if cast and cast[-1] != "cuda":  # autocast("cpu") does nothing for a GPU's operations: checkpoints enter both
            enabled, dtype = (getattr(self.machine.here, "on_gpu", ()) or ((False, torch.bfloat16),))[-1]
            with torch.amp.autocast_mode.autocast.__mro__[1]("cpu", dtype, enabled):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _from_python(self, func, args, kwargs):
        """torch.tensor and its like: made on the CPU, then moved, as a GPU's are."""
        source = args[0] if args else next(iter(kwargs.values()))
        there = kwargs.get("device")
        if there is None and isinstance(source, torch.Tensor):
            there = device_of(source)
        there = torch.get_default_device() if there is None else there
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
        out = func(*args, **rest)
        out = self.mover.move(out.detach() if func is torch.tensor else out, there)
        return out.requires_grad_() if kwargs.get("requires_grad") else out


def _one_hot(x, num_classes=-1):
    """CUDA's branch of aten/src/ATen/native/Onehot.cpp: reads one value back, and none if the number is given."""
    if num_classes == -1:
        num_classes = int(x.max().item()) + 1
    out = torch.zeros((*x.shape, num_classes), dtype=torch.int64, device=x.device)
    return out.scatter_(-1, x.unsqueeze(-1), 1)
