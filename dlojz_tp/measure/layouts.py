"""Watch the memory formats of what runs: which operators change the order of elements in memory, or mix two orders."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = {"aten.clone", "aten._to_copy", "aten.copy_", "aten.contiguous", "aten.to"}
_SKIPPED = ("aten._foreach", "aten._fused", "aten.empty", "aten.new_empty", "aten.detach")


@dataclass(frozen=True)
class Conversion:
    """One operator that reads one order and writes, or meets, another. shape: of the largest tensor."""

    operator: str
    before: str
    after: str
    shape: tuple[int, ...]
    storages: tuple[int, ...]  # addresses of the memory read
    backward: bool

    def __str__(self):
        where = "backward" if self.backward else "forward"
        return (
            f"{where:<8}  {self.operator:<22} {self.before:>13} -> {self.after:<13}  {'×'.join(map(str, self.shape))}"
        )


def layout(tensor: torch.Tensor) -> str | None:
    """ "contiguous" or "channels_last" for a tensor of 4 dimensions; None if it is both or neither."""
    if tensor.dim() != 4:
        return None
    plain = tensor.is_contiguous()
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return None if plain == last else "contiguous" if plain else "channels_last"


class Layouts(TorchDispatchMode):
    """Record the layout conversions that happen inside, backward included.

    A conversion is a copy whose elements end up in another order than they were read in; or, in a forward pass, any
    other operator whose tensors of 4 dimensions are not all in the same format: a convolution of channels_last images
    with contiguous weights, for example, reorders one of them before it begins, and images with gaps are copied. Views
    move nothing and do not count.
    In a backward pass only copies count: the gradient of a mean comes from PyTorch as one number for many pixels.
    """

    def __init__(self):
        super().__init__()
        self.conversions: list[Conversion] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        if name.startswith(_SKIPPED):
            return out
        read = list(_tensors((args, kwargs)))
        if name == "aten.copy_":
            read, written = read[1:], read[:1]
        else:
            written = [] if _is_view(func) else list(_tensors(out))
        if not written:
            return out
        backward = torch._C._current_graph_task_id() != -1
        changed = None
        if name in _COPIES:
            if read and _order(read[0]) and _order(written[0]) and not _fits(read[0], written[0]):
                changed = _words(read[0]), _words(written[0])
        elif not backward:
            formats = [f for f in map(layout, (*read, *written)) if f]
            if name == "aten.convolution" and _has_gaps(read[0]):
                changed = "a view with gaps", "a copy inside"
            elif len(set(formats)) > 1:
                changed = formats[0], next(f for f in formats if f != formats[0])
        if changed:
            shape = tuple(max((*read, *written), key=torch.Tensor.numel).shape)
            storages = tuple(t.untyped_storage().data_ptr() if t.device.type != "meta" else 0 for t in read)
            self.conversions.append(Conversion(name.removeprefix("aten."), *changed, shape, storages, backward))
        return out


def _tensors(tree) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_view(func) -> bool:
    """Whether the operator returns its input's own memory, by its schema."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _order(tensor) -> list[int]:
    """Dimensions longer than 1 of a tensor of 3 or more, from the widest stride to the narrowest."""
    long = [d for d in range(tensor.dim()) if tensor.size(d) > 1 and tensor.stride(d) > 0]
    return sorted(long, key=lambda d: -tensor.stride(d)) if tensor.dim() > 2 else []


def _fits(read, written) -> bool:
    """Whether both tensors, of the same shape, keep their elements in the same order."""
    return read.shape != written.shape or _order(read) == _order(written)


def _has_gaps(tensor) -> bool:
    return not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))


def _words(tensor) -> str:
    return layout(tensor) or "other strides"
