"""Balise 4 on devices that are not there: a fake GPU for the forward pass, the meta device for the whole step."""

import contextlib
import importlib
import logging
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from dlojz_tp.checking import Wrong
from dlojz_tp.probes.devices import autocast_on_meta, meta_device, waits, waits_on_gpu
from dlojz_tp.probes.networks import batches, network
from dlojz_tp.probes.operations import Operations, copies

_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


def never_waits(flowing_step):
    """Nothing is read where torch sees a GPU."""
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    sgd.step = lambda *_, **__: None
    read = []
    with _quiet():
        waiting = waits_on_gpu(flowing_step, lambda model, gpu: _pretended_step(flowing_step, model, sgd, gpu, read))
    if any("nonzero" in name or "masked_select" in name for name in read):
        raise Wrong("mask-as-index")
    if waiting + read:
        raise Wrong("reads-a-value", error=", ".join(sorted({*waiting, *read})), where="a machine with a GPU")


class _Constants(TorchFunctionMode):
    """Counts tensors that are made of Python's numbers right on a device: each is a copy that waits."""

    made = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func in _FROM_PYTHON
            and out.device.type == "meta"
            and not isinstance(args[0] if args else None, torch.Tensor)
        ):
            self.made += 1
        if func is torch.Tensor.new_tensor and out.device.type == "meta":
            self.made += 1
        return out


def _pretended_step(flowing_step, model, optimizer, gpu, read):
    """A step on a fake GPU, where no backward pass can run: gradients are there all the same."""

    def backward(*_, **__):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    with mock.patch.object(torch.Tensor, "backward", backward):
        try:
            flowing_step(model, torch.zeros(4, 3, 6, 5), torch.zeros(4, dtype=torch.long), optimizer, gpu)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            read.append(str(error).split("\n")[0])


@contextlib.contextmanager
def _quiet():
    """PyTorch logs what fails on a fake device, with a traceback; here that is no news."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _foreach_on_meta():
    """clip_grad_norm_(foreach=True) is right on a GPU, and refused on the meta device."""
    place = importlib.import_module("torch.nn.utils.clip_grad")
    return mock.patch.object(place, "_device_has_foreach_support", lambda device: True, create=True)


def on_a_device(flowing_step, model):
    """A whole step of this model on the meta device: two copies there, which do not block, and nothing else moved."""
    device = meta_device()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = batches(4)[0]
    with Operations() as operations, _Constants() as constants:
        try:
            with autocast_on_meta(flowing_step), waits(flowing_step), _foreach_on_meta():
                flowing_step(model, images, labels, optimizer, device)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
            text = str(error).split("\n")[0]
            if any(words in text for words in ("nonzero", "data-dependent", "data dependent", "masked_select")):
                raise Wrong("mask-as-index") from error
            if "out of meta" in text or "on meta tensors" in text:
                raise Wrong("reads-a-value", error="a value or a copy from the device to the processor") from error
            moved = copies(operations, "cpu", "meta")
            if len(moved) < 2 and "meta" in text:
                raise Wrong("batch-not-moved", error=text) from error
            raise Wrong("own-device", error=text) from error
    moved = copies(operations, "cpu", "meta")
    if len(moved) > 2:
        raise Wrong("made-on-processor", n=len(moved))
    if len(moved) < 2:
        raise Wrong("batch-not-moved", error=f"{len(moved)} copies were seen, images and labels make two")
    if not all(moved):
        raise Wrong("copy-blocks", n=len(moved), blocking=moved.count(False))
    if constants.made:
        raise Wrong("number-copied", n=constants.made)
