"""What replaces torch's functions where tensors have shapes and no values."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import _disable_current_modes

from dlojz_tp.judging.pretend_gpu import amp, integers, rehearsed
from dlojz_tp.judging.pretend_gpu.memory import CPU, META, TENSOR, Block, block, real, real_device, real_storage

SPLIT = {Tensor.split, torch.split}
SHOWN = {Tensor.__format__, Tensor.__repr__}
_register_parameter = nn.Module.register_parameter
_address = torch.UntypedStorage.data_ptr
VALUES = {
    Tensor.item: lambda kind: READ[kind], Tensor.__bool__: lambda _: False, Tensor.__int__: lambda _: 0,
    Tensor.__float__: lambda _: READ[float], Tensor.__index__: lambda _: 0,
}  # fmt: skip
READ = {float: 1.0, int: 0, bool: False}  # what is read back: a mean may be divided by a number, an index is in range


def _batch_norm(x, *settings):
    mean, rstd = (x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in "mr")
    return torch.empty_like(x), mean, rstd


def _batch_norm_backward(grad, x, weight, mean, var, saved, rstd, training, eps, wanted):
    like = weight if weight is not None else saved
    return torch.empty_like(x), *(torch.empty_like(like) if wants else None for wants in wanted[1:])


def _bincount(x, weights=None, minlength=0):
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return x.new_empty(max(minlength, 1), dtype=dtype)  # all that is read is 0


NO_META = {  # operators whose kernel for tensors without values is missing, refuses, or is slow: long Python
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::bincount": _bincount,
    "aten::_to_sparse_csr": lambda x, dense_dim=None: torch.empty_like(x),  # how many zeros it has, nobody knows
    "aten::equal": lambda x, y: rehearsed.decides() or False,
    "aten::_sample_dirichlet": lambda x, generator=None: torch.empty_like(x),
    "aten::_local_scalar_dense": lambda x: READ[_kind(x)],  # read in C++
}


def instead(machine, streams, func, args, kwargs):
    """The function to call, and its arguments, in the place of this one."""
    x = args[0] if args else None
    if isinstance(x, Tensor) and real_device(x) == META and (func in VALUES or func in SHOWN):
        if (memory := block(x)) is not None:
            streams.wait_for_stream(func.__name__, streams.current(memory.index))
        kind = _kind(x)
        if func in VALUES and (numbers := integers.known(x)):
            return (lambda: bool(numbers[0]) if func is Tensor.__bool__ else numbers[0]), (), {}
        if func is Tensor.__bool__:
            rehearsed.decides()
        if func in SHOWN:
            wanted = args[1:] if func is Tensor.__format__ and not x.dim() else None
            return (lambda: "tensor(...)" if wanted is None else format(READ[kind], *wanted)), (), {}
        return functools.partial(VALUES[func], kind), (), {}
    if func in amp.LOWER:
        args, kwargs = amp.cast(machine, args, kwargs)
    if func is F.scaled_dot_product_attention:
        func = _attention
    if func in SPLIT and len(args) > 1 and isinstance(args[1], list | tuple) and args[1] and not any(args[1]):
        func, args = torch.tensor_split, (x, len(args[1]), *args[2:])  # sizes that were read: the parts are equal
    return func, args, kwargs


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
        pads = (options.get("options") or {}).get("shape_padding", True)
        how = mode in ("reduce-overhead", "max-autotune"), pads
        run = model.forward if isinstance(model, nn.Module) else model

        @functools.wraps(run)
        def inside(*args, **kwargs):
            with clock.compiled(how):
                return run(*args, **kwargs)

        if not isinstance(model, nn.Module):
            return inside
        model = copy.copy(model)
        model.forward = inside
        return model

    def values(what, x, kind):
        if (memory := block(x)) is not None:
            memory.home.streams.wait_for_stream(what, memory.home)
        numbers = integers.known(x)
        return np.full(x.shape, READ[_kind(x)], kind) if numbers is None else np.array(numbers, kind).reshape(x.shape)

    def tolist(x):
        return values("tolist", x, _kind(x)).tolist() if real_device(x) == META else real(TENSOR.tolist, x)

    def numpy(x, *, force=False):
        if real_device(x) != META:
            return real(TENSOR.numpy, x, force=force)
        return values("numpy", x, str(x.dtype).removeprefix("torch."))

    def data_ptr(x):
        if real_device(x) != META:
            return real(TENSOR.data_ptr, x)
        return address(real_storage(x)) + x.storage_offset() * x.element_size()

    def address(storage):
        """No two storages have the same. On the CPU, zeros stand for the values: C reads and writes them."""
        if storage.device != META:
            return _address(storage)
        if type(getattr(storage, "_gpu_tag", None)) is Block:
            return id(storage)
        if not hasattr(storage, "zeros"):
            storage.zeros = np.zeros(max(storage.nbytes(), 1), np.uint8)
        return storage.zeros.ctypes.data

    def register_parameter(module, name, x):
        """Small parameters have no values either: a gradient has to be where its parameter is."""
        if type(x) is nn.Parameter and real_device(x) == CPU and x.is_floating_point():
            with _disable_current_modes():
                bare = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
            x = nn.Parameter(bare, x.requires_grad)
        _register_parameter(module, name, x)

    def set_rng_state(state):
        """One that has been on a card, as after loading to it, has no values: the generator goes on as it is."""
        if real_device(state) != META:
            torch.default_generator.set_state(state)

    card = SimpleNamespace(
        name=clock.label, total_memory=machine.capacity, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    return [
        (torch, "compile", compiled), (nn.Module, "register_parameter", register_parameter),
        (torch.Tensor, "tolist", tolist), (torch.Tensor, "numpy", numpy), (torch.Tensor, "data_ptr", data_ptr),
        (torch.UntypedStorage, "data_ptr", address),
        *((module, "set_rng_state", set_rng_state) for module in (torch, torch.random)),
        # C++ compares the shapes of all ranks, which are values
        (nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        (torch.cuda, "get_device_name", lambda device=None: clock.label),
        (torch.cuda, "get_device_properties", lambda device=None: card),
    ]  # fmt: skip


def _kind(x):
    return float if x.is_floating_point() else bool if x.dtype == torch.bool else int
