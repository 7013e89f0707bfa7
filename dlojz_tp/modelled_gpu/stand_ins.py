"""What replaces torch's functions where tensors have shapes and no values.

Lists of autocast: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
"""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp.pretend_gpu.memory import META, TENSOR, block, real, real_device

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
VALUES = {
    Tensor.item: lambda kind: kind(0), Tensor.__bool__: lambda _: False, Tensor.__int__: lambda _: 0,
    Tensor.__float__: lambda _: 0.0, Tensor.__index__: lambda _: 0,
}  # fmt: skip


def _batch_norm(x, *settings):
    mean, rstd = (x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in "mr")
    return torch.empty_like(x), mean, rstd


def _batch_norm_backward(grad, x, weight, mean, var, saved, rstd, training, eps, wanted):
    like = weight if weight is not None else saved
    return torch.empty_like(x), *(torch.empty_like(like) if wants else None for wants in wanted[1:])


NO_META = {  # operators whose kernel for tensors without values is missing, refuses, or is slow: long Python
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::_sample_dirichlet": lambda x, generator=None: torch.empty_like(x),
    "aten::_local_scalar_dense": lambda x: torch.zeros((), dtype=x.dtype, device="cpu").item(),  # read in C++
}


def instead(machine, streams, func, args, kwargs):
    """The function to call, and its arguments, in the place of this one."""
    x = args[0] if args else None
    if isinstance(x, Tensor) and real_device(x) == META and (func in VALUES or func is Tensor.__format__):
        if (memory := block(x)) is not None:
            streams.wait_for_stream(func.__name__, streams.current(memory.index))
        kind = _kind(x)
        if func is Tensor.__format__:
            return (lambda: format(kind(0), args[1]) if not x.dim() else "tensor(...)"), (), {}
        return functools.partial(VALUES[func], kind), (), {}
    enabled, dtype = (getattr(machine.here, "on_gpu", ()) or ((False, None),))[-1]
    if enabled:
        if func in LOWER:
            args, kwargs = _cast(machine, args, kwargs, dtype)
        elif func in UPPER:
            args, kwargs = _cast(machine, args, kwargs, torch.float32)
    if func is F.scaled_dot_product_attention:
        func = _attention
    return func, args, kwargs


def _cast(machine, args, kwargs, dtype):
    """Arguments with their numbers in `dtype`; a weight is cast once while its autocast lasts."""
    kept = machine.here.__dict__.setdefault("kept", {})

    def cast(x):
        if isinstance(x, list | tuple):
            return type(x)(map(cast, x))
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == dtype or block(x) is None:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(dtype)
        if (id(x), dtype) not in kept:
            kept[id(x), dtype] = x.to(dtype)
        return kept[id(x), dtype]

    return tuple(map(cast, args)), {key: cast(x) for key, x in kwargs.items()}


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Fused, as a card does it: without the scores in memory."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    lead = query.shape[:-3]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x for x in (query, key, value))
    if query.dtype != torch.float32 and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        mask = attn_mask if attn_mask is None or attn_mask.is_floating_point() else attn_mask.to(query.dtype)
        mask = None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return out if query.dim() == 4 and len(lead) < 2 else out.reshape(*lead, *out.shape[-3:])


def replaced(clock, machine) -> list[tuple]:
    """(module or class, name, stand-in) of each."""

    def compiled(model=None, *, mode=None, **options):
        if model is None:
            return functools.partial(compiled, mode=mode, **options)
        graph = mode in ("reduce-overhead", "max-autotune")
        run = model.forward if isinstance(model, nn.Module) else model

        @functools.wraps(run)
        def inside(*args, **kwargs):
            with clock.compiled(graph):
                return run(*args, **kwargs)

        if not isinstance(model, nn.Module):
            return inside
        model = copy.copy(model)
        model.forward = inside
        return model

    def zeros(what, x, kind):
        if (memory := block(x)) is not None:
            memory.home.streams.wait_for_stream(what, memory.home)
        return np.zeros(x.shape, kind)

    def tolist(x):
        return zeros("tolist", x, _kind(x)).tolist() if real_device(x) == META else real(TENSOR.tolist, x)

    def numpy(x, *, force=False):
        if real_device(x) != META:
            return real(TENSOR.numpy, x, force=force)
        return zeros("numpy", x, str(x.dtype).removeprefix("torch."))

    card = SimpleNamespace(
        name=clock.label, total_memory=machine.capacity, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    return [
        (torch, "compile", compiled), (torch.Tensor, "tolist", tolist),
        (torch.Tensor, "numpy", numpy),
        (torch.cuda, "get_device_name", lambda device=None: clock.label),
        (torch.cuda, "get_device_properties", lambda device=None: card),
    ]  # fmt: skip


def _kind(x):
    return float if x.is_floating_point() else bool if x.dtype == torch.bool else int
