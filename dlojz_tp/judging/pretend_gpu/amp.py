"""Autocast for "cuda": the CPU's, with a GPU's list of what is computed in float32.

Lists of autocast: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dlojz_tp.judging.pretend_gpu.memory import block

LOWER = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.multi_head_attention_forward, F.scaled_dot_product_attention, F.prelu, torch.matmul, torch.mm, torch.mv,
    torch.bmm, torch.addmm, torch.addmv, torch.baddbmm, torch.addbmm, torch.einsum, Tensor.matmul,
    Tensor.__matmul__, Tensor.mm, Tensor.mv, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
}  # fmt: skip
UPPER = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softmin, F.softplus, F.cross_entropy, F.nll_loss,
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.cosine_similarity, F.normalize, F.rms_norm,
    F.binary_cross_entropy_with_logits, torch.softmax, torch.log_softmax, torch.exp, torch.log, torch.log2, torch.log10,
    torch.log1p, torch.pow, torch.rsqrt, torch.reciprocal, torch.sum, torch.prod, torch.cumsum, torch.cumprod,
    torch.norm, torch.dist, torch.cdist, torch.erfinv, torch.expm1, torch.sinh, torch.cosh, torch.tan, torch.acos,
    torch.asin, Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__, Tensor.rsqrt,
    Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm,
}  # fmt: skip


def replaced(machine) -> list[tuple]:
    """(module, name, stand-in) of each."""
    here = machine.here
    cast_now, dtype_now = torch.is_autocast_enabled, torch.get_autocast_dtype

    class Autocast(torch.autocast):
        """autocast("cuda") is the CPU's, in CUDA's dtype where none is given; autocast("cpu") is for CPU tensors."""

        def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
            self.asked = device_type
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or dtype_now("cuda")
            super().__init__(device_type, dtype, enabled, cache_enabled)

        def __enter__(self):
            here.casts = (*getattr(here, "casts", ()), self.asked)
            if self.asked == "cuda":
                here.on_gpu = (*getattr(here, "on_gpu", ()), (self._enabled, self.fast_dtype))
            return super().__enter__()

        def __exit__(self, *error):
            here.casts, here.kept = here.casts[:-1], {}
            if self.asked == "cuda":
                here.on_gpu = here.on_gpu[:-1]
            return super().__exit__(*error)

    class CudaAutocast(Autocast):
        """torch.cuda.amp.autocast."""

        def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
            super().__init__("cuda", dtype, enabled, cache_enabled)

    def casts(device_type=None):
        asked = getattr(here, "casts", ())
        return cast_now("cpu") and (not asked or asked[-1] == (device_type or "cuda"))

    places = (torch, torch.amp, torch.amp.autocast_mode)
    return [
        *((place, "autocast", Autocast) for place in places),
        (torch.cuda.amp, "autocast", CudaAutocast),
        (torch.cuda.amp.autocast_mode, "autocast", CudaAutocast),
        (torch, "is_autocast_enabled", casts),
        (torch, "get_autocast_dtype", lambda kind: dtype_now("cpu" if kind == "cuda" else kind)),
    ]


def cast(machine, args, kwargs, dtype=None):
    """A function's arguments as a GPU's autocast casts them, if one is on: to `dtype`, or to what it was given.

    A weight is cast once while its autocast lasts.
    """
    enabled, lower = (getattr(machine.here, "on_gpu", ()) or ((False, None),))[-1]
    if not enabled:
        return args, kwargs
    dtype = dtype or lower
    kept = machine.here.__dict__.setdefault("kept", {})

    return tuple(_cast(x, dtype, kept) for x in args), {key: _cast(x, dtype, kept) for key, x in kwargs.items()}


def _cast(x, dtype, kept: dict):
    """No closure: one that calls itself keeps `kept`, and so its tensors, until Python's collector comes."""
    if isinstance(x, list | tuple):
        return type(x)(_cast(one, dtype, kept) for one in x)
    if not isinstance(x, Tensor) or not x.is_floating_point() or block(x) is None:
        return x
    if x.dtype in (dtype, torch.float64):
        return x
    if not (x.is_leaf and x.requires_grad):
        return x.to(dtype)
    if (id(x), dtype) not in kept:
        kept[id(x), dtype] = x.to(dtype)
    return kept[id(x), dtype]
