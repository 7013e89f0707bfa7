"""What a check finds in the process is always the same, whatever the notebook has set, entered or drawn before."""

import contextlib
import random
import sys
import warnings

import numpy
import torch
from torch.distributed import distributed_c10d
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _device, _python_dispatch

SEED = 20260  # of the random numbers that a check starts with
PRECISIONS = {  # (backend, operation): value in a new process; where it is "none", that of all operations counts
    ("generic", "all"): "none", ("cuda", "all"): "none", ("mkldnn", "all"): "none",
    ("cuda", "matmul"): "none", ("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32",
    ("mkldnn", "matmul"): "none", ("mkldnn", "conv"): "none", ("mkldnn", "rnn"): "none",
}  # fmt: skip


@contextlib.contextmanager
def usual_state():
    """Inside, PyTorch's state of a new process, and the same random numbers each time; then the caller's own again.

    Settings: default dtype and device, recording of gradients, autocast, anomaly detection, deterministic algorithms,
    precision of products, kernels of attention, what numpy does about errors, warnings that raise. The number of
    threads is kept: a check may change it.
    Entered and not left, by a cell that was interrupted say: inference mode, `torch.device`, FakeTensorMode and other
    modes, autocast, hooks on saved tensors, a process group; and hooks on all modules or on all optimizers.
    """
    with contextlib.ExitStack() as restore:
        restore.enter_context(torch.inference_mode(False))  # also where it is off: an answer may leave it on
        for take, give in ENTERED:
            restore.callback(give, take())
        restore.enter_context(numpy.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        if any(action == "error" for action, *_ in warnings.filters):
            restore.enter_context(warnings.catch_warnings())
            warnings.filters[:] = [rule for rule in warnings.filters if rule[0] != "error"]
        for get, put in (
            (random.getstate, random.setstate),
            (numpy.random.get_state, numpy.random.set_state),  # noqa: NPY002
            (torch.get_rng_state, torch.set_rng_state),
        ):
            restore.callback(put, get())
        restore.callback(_put, torch.get_num_threads, torch.set_num_threads, torch.get_num_threads())
        for get, put, usual in SETTINGS:
            before = get()
            restore.callback(_put, get, put, before)
            _put(get, put, usual)
        random.seed(SEED)
        numpy.random.seed(SEED)  # noqa: NPY002
        torch.default_generator.manual_seed(SEED)  # of the CPU alone: torch.manual_seed would set the GPUs' too
        for take, _ in ENTERED:
            restore.callback(take)  # what the answer has not left: the caller's own comes back without it
        yield


def _put(get, put, value):
    if get() != value:
        put(value)


def _flushes():
    """Whether subnormal numbers count as 0: so after a library is loaded that gcc has made with -ffast-math."""
    return sys.float_info.min / 2 == 0.0


def _of(get, put, *given):
    """How to read and to set what is asked for by a name, such as a device's."""
    return lambda: get(*given), lambda value: put(*given, value)


# (how to read a setting, how to set it, its value in a new process)
SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.is_grad_enabled, torch.set_grad_enabled, True),
    (_flushes, torch.set_flush_denormal, False),
    (*_of(torch.is_autocast_enabled, torch.set_autocast_enabled, "cpu"), False),
    (*_of(torch.is_autocast_enabled, torch.set_autocast_enabled, "cuda"), False),
    (*_of(torch.get_autocast_dtype, torch.set_autocast_dtype, "cpu"), torch.bfloat16),
    (*_of(torch.get_autocast_dtype, torch.set_autocast_dtype, "cuda"), torch.float16),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, True),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, True),
)


def _take_precisions():
    """The precision of float32 products: PyTorch keeps it twice, and its older reader raises where the two differ."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    found = {}
    for key, usual in PRECISIONS.items():
        found[key] = get(*key)  # its own: what is above it has been set to "none" before
        put(*key, usual)
    older = torch.get_float32_matmul_precision(), _older_convolutions()
    if older != ("highest", True):
        _give_precisions((PRECISIONS, ("highest", True)))
    return found, older


def _give_precisions(saved):
    found, older = saved
    if older != (torch.get_float32_matmul_precision(), _older_convolutions()):
        torch.set_float32_matmul_precision(older[0])
        torch.backends.cudnn.allow_tf32 = older[1]
    for key, value in found.items():  # after the older names, which set some of these too
        torch._C._set_fp32_precision_setter(*key, value)


def _older_convolutions() -> bool:
    """What `torch.backends.cudnn.allow_tf32` was set to; convolutions are on TF32, as in a new process."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it differs from what convolutions do
        return False


def _take_function_modes():
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    default, current = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE
    torch._GLOBAL_DEVICE_CONTEXT.device_context = _device.CURRENT_DEVICE = None
    for mode in filter(_stays, reversed(modes)):
        _push_mode(mode)
    return modes, default, current


def _give_function_modes(saved):
    modes, torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = saved
    for _ in filter(_stays, modes):
        _pop_mode()
    for mode in reversed(modes):
        _push_mode(mode)


def _stays(mode) -> bool:
    """Whether it is the whole kernel's, in a rehearsal."""
    return getattr(mode, "of_kernel", False)


def _take_dispatch_modes():
    modes = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    lifts = torch._C._only_lift_cpu_tensors()  # FakeTensorMode sets it
    stay = [mode for mode in reversed(modes) if _stays(mode)]
    for mode in stay:
        _python_dispatch._push_mode(mode)
    torch._C._set_only_lift_cpu_tensors(lifts and bool(stay))
    return modes, lifts


def _give_dispatch_modes(saved):
    modes, lifts = saved
    torch._C._set_only_lift_cpu_tensors(lifts)
    for _ in filter(_stays, modes):
        _python_dispatch._pop_mode()
    for mode in reversed(modes):
        _python_dispatch._push_mode(mode)


def _take_saved_tensor_hooks():
    autograd, pairs = torch._C._autograd, []
    refused = autograd._saved_tensors_hooks_get_disabled_error_message()
    if refused is not None:
        autograd._saved_tensors_hooks_enable()
    while pair := autograd._top_saved_tensors_default_hooks(True):
        pairs.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    return pairs, refused


def _give_saved_tensor_hooks(saved):
    pairs, refused = saved
    for pair in reversed(pairs):
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    if refused is not None:
        torch._C._autograd._saved_tensors_hooks_disable(refused)


def _take_autocast_depth():
    """Autocast keeps the weights that it has cast until the outermost `with` is left: an older one would keep them."""
    depth = torch.autocast_increment_nesting() - 1
    _give_autocast_depth(-depth - 1)
    torch.clear_autocast_cache()
    return depth


def _give_autocast_depth(depth):
    for _ in range(abs(depth)):
        (torch.autocast_increment_nesting if depth > 0 else torch.autocast_decrement_nesting)()


def _take_hooks():
    tables = [
        table
        for owner in (modules, optimizers)
        for name, table in vars(owner).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ]
    found, full = [(table, dict(table)) for table in tables], modules._global_is_full_backward_hook
    for table in tables:
        table.clear()
    modules._global_is_full_backward_hook = None
    return found, full


def _give_hooks(saved):
    found, modules._global_is_full_backward_hook = saved
    for table, hooks in found:
        table.update(hooks)


def _take_process_group():
    """Checkpoints, say, would be written for all of its ranks."""
    found = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(None)
    return found


# (how to take away what has been entered, how to give it back)
ENTERED = (
    (_take_function_modes, _give_function_modes),
    (_take_dispatch_modes, _give_dispatch_modes),
    (_take_saved_tensor_hooks, _give_saved_tensor_hooks),
    (_take_autocast_depth, _give_autocast_depth),
    (_take_hooks, _give_hooks),
    (_take_precisions, _give_precisions),
    (_take_process_group, distributed_c10d._update_default_pg),
)
