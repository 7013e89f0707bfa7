"""The memory of a training step: measured where it runs, estimated where it cannot run."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from .live import LiveBytes
from .machine import as_device
from .units import human_bytes


class _FakeWorld(FakeTensorMode):
    """A fake mode that survives ``copy.deepcopy`` of its tensors, as ``nn.TransformerEncoder`` does."""

    def __deepcopy__(self, memo: dict) -> "_FakeWorld":
        return self


@dataclass
class PeakMemory:
    """What ``peak_memory`` found: ``peak`` in bytes, and its kind."""

    peak: int = 0
    kind: str = "measured"

    def __str__(self) -> str:
        return f"{human_bytes(self.peak)} ({self.kind})"


@contextmanager
def peak_memory(device: torch.device | str | None = None, track: Sequence[Any] = ()) -> Iterator[PeakMemory]:
    """Measure the highest memory in use inside a ``with`` block.

    On a GPU it is the allocator's own figure: everything on the card counts, made before or in the block. On a CPU,
    where PyTorch keeps no such figure, the bytes of living tensors are counted: those made in the block, and those in
    ``track``::

        with measure.peak_memory(device, track=[model, optimizer]) as memory:
            train_step()
        print(memory)

    Args:
        device: where the work is done; ``None`` is the GPU if there is one.
        track: on a CPU, modules, optimizers and tensors that exist already.

    Yields:
        A ``PeakMemory``, filled at the end of the block, also if the block raises.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    device = as_device(device)
    found = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield found
        finally:
            found.peak = torch.cuda.max_memory_allocated(device)
        return
    counter = LiveBytes().track(*track)
    try:
        with counter:
            yield found
    finally:
        found.peak = counter.peak


@dataclass
class MemoryEstimate:
    """Bytes of each part at the moment when a training step needs most. The parts add up to ``peak``.

    Gradients may be far below the size of the parameters: the peak often comes before most of them exist.

    Attributes:
        parameters: weights.
        buffers: running statistics and the like.
        gradients: of the weights.
        optimizer_states: momentum, variance, ...
        inputs: images and labels.
        activations: all else: what is kept for the backward pass, gradients of activations, temporaries.
        peak: the sum.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_states: int
    inputs: int
    activations: int
    peak: int

    kind = "estimated"

    def parts(self) -> dict[str, int]:
        """Give the parts, name to bytes, without the sum."""
        return {name.replace("_", " "): size for name, size in asdict(self).items() if name != "peak"}

    def __str__(self) -> str:
        rows = [*self.parts().items(), ("peak", self.peak)]
        return "estimated memory at the peak\n" + "\n".join(f"{name:>18} {human_bytes(n):>12}" for name, n in rows)


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, images: Any, labels: Any) -> None:
    """Do one plain step of classification: forward, cross-entropy, backward, update, gradients freed.

    Args:
        model: gives logits of shape ``(batch, classes)``.
        optimizer: ``None`` leaves the weights alone.
        images: one tensor, or a tuple of inputs.
        labels: class numbers, shape ``(batch,)``.
    """
    logits = model(*images) if isinstance(images, tuple) else model(images)
    F.cross_entropy(logits, labels).backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def estimate_memory(
    model: Callable[[], torch.nn.Module],
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    batch_size: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    step: Callable[[torch.nn.Module, Any, Any, Any], Any] = training_step,
    input_dtype: torch.dtype = torch.float32,
    label_shape: Sequence[int] = (),
) -> MemoryEstimate:
    """Estimate the GPU memory of a training step, without a GPU and without computing anything.

    The step runs on *fake* tensors, which have a shape and a type but no data, and the bytes of the storages alive are
    counted after each operation. It runs twice and the second counts: from then on the optimizer's states exist.
    For example::

        measure.estimate_memory(lambda: resnet18(num_classes=15), (3, 64, 64), batch_size=32,
                                optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    Not counted: the CUDA context (some hundred MiB), scratch memory inside kernels (cuDNN, cuBLAS), rounding to
    blocks and fragmentation in the allocator. The optimizer runs as on a CPU, one weight after the other; on a
    GPU PyTorch's default treats all at once and needs one or two more copies of the weights for a moment: give
    ``foreach=True`` to see it.

    Args:
        model: makes the model. Called in the fake world: a model made outside cannot be used.
        input_shape: shape of one sample, without the batch; or a list of such shapes for several inputs.
        batch_size: samples in a step.
        optimizer: makes the optimizer from the parameters; ``None`` for no update.
        step: does one step from ``(model, optimizer, images, labels)``; several inputs come as a tuple.
        input_dtype: type of the inputs, for example ``torch.long`` for tokens.
        label_shape: shape of one label (class numbers, ``torch.long``), without the batch.

    Returns:
        A ``MemoryEstimate``.

    Raises:
        ValueError: if the step needs a value (``loss.item()``, a test on a tensor), which fake tensors do not have; if
            the model was made outside; if the batch size is not at least 1.
        TypeError: if ``model`` is a model, not a function that makes one.

    Source: ``torch._subclasses.fake_tensor``; https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, not {batch_size}")
    if isinstance(model, torch.nn.Module):
        raise TypeError("give a function that makes the model, for example lambda: resnet18()")
    several = bool(input_shape) and isinstance(input_shape[0], Sequence)
    counter = LiveBytes()
    try:
        with warnings.catch_warnings(), _FakeWorld(), counter:
            # Copying a fake tensor asks for its address, in vain and without harm.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            shapes = input_shape if several else [input_shape]
            images = tuple(torch.zeros(batch_size, *shape, dtype=input_dtype) for shape in shapes)
            images = images if several else images[0]
            labels = torch.zeros(batch_size, *label_shape, dtype=torch.long)
            # Drawing from a truncated normal tests values until they fit; here no value matters.
            with patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor, create=True):
                network = model()
            if not all(isinstance(parameter, FakeTensor) for parameter in network.parameters()):
                raise ValueError("the model was made outside: make it inside the function that is given")
            updater = optimizer(network.parameters()) if optimizer else None
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(counter.track_gradient)
            for _ in range(2):
                counter.track(network, images, labels, [updater] if updater else [])
                counter.reset_peak()
                step(network, updater, images, labels)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the step needs a value ({error.func}), which the fake tensors of an estimate do not have: "
            "leave out loss.item(), printing, masks, and tests on tensors"
        ) from None
    parts = {name: counter.parts_at_peak[name.replace("_", " ")] for name in MemoryEstimate.__dataclass_fields__}
    return MemoryEstimate(**{**parts, "peak": counter.peak})
