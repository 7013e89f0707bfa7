"""What an operation of ATen asks of a card: operations of its products, bytes read and written."""

from math import prod
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from dlojz_tp.judging.pretend_gpu.memory import tensors, written
from dlojz_tp.modelled_gpu.rates import ATTENTION_HALF, fits

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
COPIES = {"_to_copy", "copy_", "clone"}
COPIED_FIRST = {"masked_fill", "index_fill", "index_put", "scatter"}  # two kernels: a copy, which is then changed
TILE = 32  # channels that a kernel of Tensor Cores computes at least, also of a group that has fewer
PICKED = {"embedding", "index", "gather", "index_select", "nll_loss_forward", "nll_loss_backward", "scatter",
          "embedding_dense_backward"}  # fmt: skip


class Work(NamedTuple):
    """flops: of products, in `dtype`. reads: (tensor, bytes). writes: tensors, fresh where the operation made them.

    again: bytes read a second time. reordered: bytes that go through memory beside where the memory format doesn't fit;
    last: whether images have their channels last. fits: speed that the sizes leave, see rates.fits. attention: fused.
    strided: an elementwise kernel that cannot read 16 bytes at once. depthwise: a convolution of each channel alone.
    smallest: size of a plain product; 0 for others.
    """

    flops: float
    dtype: torch.dtype | None
    conv: bool
    reads: list
    writes: list
    fresh: bool
    again: float
    reordered: float = 0.0
    fits: float = 1.0
    last: bool = False
    attention: bool = False
    smallest: int = 0
    strided: bool = False
    depthwise: bool = False


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
        strided = torch.Tag.pointwise in func.tags or name in COPIES
        strided = strided and any(not _alike(x, y) for x in inputs if x.dim() for y in writes)
        return Work(0, None, False, reads, writes, not changed, again, strided=strided)
    first = next(x for x in inputs if x.is_floating_point())
    flops, conv, more = formula(*args, **kwargs, out_val=out), name.startswith("conv"), {}
    attention = name.startswith(("_scaled_dot_product", "_flash", "_efficient"))
    if attention:
        causal = True in [a for a in (*args, *kwargs.values()) if isinstance(a, bool)]
        flops *= (0.5 if causal else 1) * (1 + ATTENTION_HALF / first.shape[-2])
    elif conv:
        weight = args[2] if "backward" in name else args[1]
        if "backward" in name:  # the formula counts the weight's gradient once for each group
            flops = 2.0 * sum(args[-1][:2]) * args[args[7]].numel() * weight[0].numel()
        groups = args[9] if "backward" in name else args[8]
        sides, step = (len(weight) // groups, weight.shape[1]), 16 // first.element_size() if groups == 1 else TILE
        flops *= prod(-(-c // step) * step / c for c in sides) if max(sides) > 1 else 1
        more["reordered"] = 2.0 * sum(nbytes(x) for x in (*inputs, *outputs) if x.dim() == 4 and x is not weight)
        more |= {"last": any(last(x) for x in inputs[:2]), "depthwise": max(sides) == 1}
    else:
        a, b = inputs[-2:]
        sizes = *a.shape[-2:], b.shape[-1]
        more |= {"fits": fits(*sizes, itemsize=first.element_size()), "smallest": min(sizes) if a.dim() == 2 else 0}
    return Work(flops, first.dtype, conv, reads, writes, not changed, again, attention=attention, **more)


def _alike(x, y) -> bool:
    """Whether a kernel can go through both in one way, many numbers at once."""
    return x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


def last(x) -> bool:
    """Whether an image has its channels last in memory."""
    return x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1
