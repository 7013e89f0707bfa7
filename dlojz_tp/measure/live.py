"""Count the bytes of living tensors, real or fake: the allocator's view where there is no allocator."""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ("parameters", "buffers", "gradients", "optimizer states", "inputs", "activations")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made under it for as long as they live.

    It sees every operation, those of the backward pass too, and follows the *storage* of each result: views cost
    nothing, and memory comes back when the last tensor on a storage dies, even after the ``with`` block.
    Tensors made before count only once they are registered with ``track``. Scratch memory inside a kernel is not
    seen, nor is a direct ``storage.resize_``.

    Attributes:
        live: bytes alive now.
        peak: highest ``live`` so far.
        parts_at_peak: bytes of each of ``PARTS`` at the peak. What an operation makes is "activations" (gradients of
            activations and temporaries too) until ``track`` says better.

    Source: the idea of ``torch.distributed._tools.mem_tracker.MemTracker``, without its record per module, which
    forbids to call a model twice in a step (gradient accumulation).
    """

    kind = "measured"
    capacity: float = math.inf

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.parts_at_peak: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()
        self._held: dict[int, _Held] = {}

    def track(self, *things: Any) -> "LiveBytes":
        """Count tensors that exist already, each under its part; tensors counted before only change their part.

        Args:
            *things: modules (parameters, buffers, gradients), optimizers (states), tensors (inputs), or collections
                of these.

        Returns:
            Itself.

        Raises:
            TypeError: for anything else.
        """
        before = self.live
        for part, tensor in _named(things):
            self._count(tensor, part)
        self._settle(before)
        return self

    def track_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Count the gradient of a parameter as such; fits ``register_post_accumulate_grad_hook``."""
        if parameter.grad is not None:
            for tensor in _pieces(parameter.grad):
                self._count(tensor, "gradients")

    def reset_peak(self) -> None:
        """Start a new peak from what lives now."""
        self.peak = self.live
        self.parts_at_peak = self._parts.copy()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            # A wrapper such as DTensor: let it unwrap itself, its local tensors come back here.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        effect = _effect(func)
        if effect != "view":
            before = self.live
            self._count_result(result, effect == "new")
            try:
                self._settle(before)
            except torch.OutOfMemoryError:
                # What was refused must not live on in the frames of the exception.
                del result
                raise
        return result

    def _settle(self, before: int) -> None:
        """Accept or refuse what has been counted since ``live`` was ``before``; move the peak."""
        if self.live > self.peak:
            if self.live > self.capacity:
                raise self._refusal(before)
            self.reset_peak()

    def _refusal(self, before: int) -> Exception:
        raise NotImplementedError("a class that sets a capacity says how it refuses")

    def _count_result(self, result: Any, new: bool) -> None:
        if isinstance(result, torch.Tensor):
            self._count(result, None if not new else "activations", retag=False)
        elif isinstance(result, tuple | list):
            for item in result:
                self._count_result(item, new)

    def _count(self, tensor: torch.Tensor, part: str | None, retag: bool = True) -> None:
        """Count a storage, or count it anew: it may have been resized or have changed its part.

        A storage that is not known yet is left alone where ``part`` is None.
        """
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None:
            if part is None:
                return
            held = self._held[storage._cdata] = _Held(storage, self._drop)
            held.key, held.size, held.part = storage._cdata, 0, part
        size = storage.nbytes()
        if size == held.size and not retag:
            return
        self._add(held.part, -held.size)
        held.size = size
        held.part = part if retag else held.part
        self._add(held.part, size)

    def _add(self, part: str, size: int) -> None:
        self.live += size
        self._parts[part] += size

    def _drop(self, held: "_Held") -> None:
        self._add(held.part, -held.size)
        del self._held[held.key]


class _Held(weakref.ref):
    """A weak reference to a storage, with what is needed to give its bytes back."""

    __slots__ = ("key", "part", "size")


@cache
def _effect(func: Any) -> str:
    """Tell whether an operation makes new storages, changes existing ones ("change") or only looks at them ("view")."""
    schema = getattr(func, "_schema", None)
    if schema is None or func is torch.ops.aten.lift_fresh.default:
        # lift_fresh is the last step of torch.tensor([...]): its data was made out of sight.
        return "new"
    if any(value.alias_info is None for value in schema.returns):
        return "new"
    return "change" if schema.is_mutable else "view"


def _named(things: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Go through modules, optimizers, tensors and collections of these as (part, tensor)."""
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            for parameter in thing.parameters():
                yield from (("parameters", piece) for piece in _pieces(parameter))
                if parameter.grad is not None:
                    yield from (("gradients", piece) for piece in _pieces(parameter.grad))
            for buffer in thing.buffers():
                yield from (("buffers", piece) for piece in _pieces(buffer))
        elif isinstance(thing, torch.optim.Optimizer):
            for state in thing.state.values():
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                yield from (("optimizer states", piece) for tensor in tensors for piece in _pieces(tensor))
        elif isinstance(thing, torch.Tensor):
            part = "parameters" if isinstance(thing, torch.nn.Parameter) else "inputs"
            yield from ((part, piece) for piece in _pieces(thing))
        elif isinstance(thing, Mapping):
            yield from _named(thing.values())
        elif isinstance(thing, tuple | list):
            yield from _named(thing)
        else:
            raise TypeError(f"can track modules, optimizers and tensors, not {type(thing).__name__}")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the plain tensors inside a wrapper such as DTensor, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # a DTensor of torch 2.14 names its mesh as well
                yield from _pieces(part)
    else:
        yield tensor
