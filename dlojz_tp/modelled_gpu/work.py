"""What an operation of ATen asks of a card: operations of its products, bytes read and written."""

from math import prod
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from dlojz_tp.modelled_gpu.rates import ATTENTION, fits
from dlojz_tp.pretend_gpu.memory import tensors, written

aten = torch.ops.aten
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "set_", "resize_", "resize_as_", "is_same_size", "lift_fresh", "detach", "alias",
}  # fmt: skip
ONLY_WRITTEN = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "_foreach_zero_"}
# read again, by a second kernel or a second pass: positions of arguments
TWICE = {
    "native_batch_norm": (0,), "native_batch_norm_backward": (0, 1), "native_layer_norm_backward": (0, 1),
    "convolution_backward": (0,), "_log_softmax": (0,), "_log_softmax_backward_data": (0, 1),
}  # fmt: skip
PICKED = {"embedding", "index", "gather", "index_select", "nll_loss_forward", "nll_loss_backward", "scatter",
          "embedding_dense_backward"}  # fmt: skip


class Work(NamedTuple):
    """flops: of products whose sizes fit (others count as more), in `dtype`. reads: (tensor, bytes). writes: tensors,
    fresh where the operation made them. again: bytes read a second time. reordered: bytes that go through memory
    beside, because a memory format does not fit Tensor Cores.
    """

    flops: float
    dtype: torch.dtype | None
    conv: bool
    reads: list
    writes: list
    fresh: bool
    again: float
    reordered: float = 0.0


def nbytes(x) -> int:
    """Bytes of the elements that are there, with expanded dimensions counted once."""
    return x.element_size() * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def work(func, name: str, args, kwargs, out) -> Work:
    """The work of `func`, called `name`, that gave `out`."""
    inputs, outputs = list(tensors((*args, *kwargs.values()))), list(tensors([out]))
    changed = list(written(func, args, kwargs))
    writes = changed or outputs
    if name in PICKED:  # a few rows of a table
        small = [x for x in (*inputs, *outputs) if x.dtype != torch.int64]
        reads = [(x, min(nbytes(y) for y in small)) for x in small[:1]]
    else:
        reads = [(x, nbytes(x)) for x in inputs if not (name in ONLY_WRITTEN and any(x is y for y in changed))]
    twice = TWICE.get(name, ()) if name != "native_batch_norm" or args[5] else ()
    again = float(sum(nbytes(args[i]) for i in twice))
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return Work(0, None, False, reads, writes, not changed, again)
    first = next(x for x in inputs if x.is_floating_point())
    flops, conv, reordered = formula(*args, **kwargs, out_val=out), name.startswith("conv"), 0.0
    if name.startswith(("_scaled_dot_product", "_flash", "_efficient")):
        causal = True in [a for a in (*args, *kwargs.values()) if isinstance(a, bool)]
        flops *= (0.5 if causal else 1) / ATTENTION
    elif conv:
        weight = args[2] if "backward" in name else args[1]
        step = 16 // first.element_size()
        flops *= prod(-(-c // step) * step / c for c in weight.shape[:2] if weight.shape[1] > 1)
        if not any(last(x) for x in inputs[:2]):
            reordered = 2.0 * sum(nbytes(x) for x in (*inputs, *outputs) if x.dim() == 4 and x is not weight)
    else:
        a, b = inputs[-2:]
        flops /= fits(*a.shape[-2:], b.shape[-1], itemsize=first.element_size())
    return Work(flops, first.dtype, conv, reads, writes, not changed, again, reordered)


def last(x) -> bool:
    """Whether an image has its channels last in memory."""
    return x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1
