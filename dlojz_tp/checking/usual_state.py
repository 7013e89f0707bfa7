"""What a check finds in the process is always the same, whatever the notebook has set or drawn before."""

import contextlib
import random
import sys

SEED = 20260  # of the random numbers that a check starts with


@contextlib.contextmanager
def usual_state():
    """Inside, PyTorch's settings of a new process, and the same random numbers each time; then the caller's own again.

    Settings: default dtype and device, recording of gradients, autocast, anomaly detection, deterministic algorithms,
    precision of products. The number of threads is kept: a check may change it.
    """
    import numpy
    import torch

    with contextlib.ExitStack() as restore:
        for get, put in (
            (random.getstate, random.setstate),
            (numpy.random.get_state, numpy.random.set_state),  # noqa: NPY002
            (torch.get_rng_state, torch.set_rng_state),
        ):
            restore.callback(put, get())
        restore.callback(_put, torch.get_num_threads, torch.set_num_threads, torch.get_num_threads())
        for get, put, usual in _settings():
            before = get()
            restore.callback(_put, get, put, before)
            _put(get, put, usual)
        random.seed(SEED)
        numpy.random.seed(SEED)  # noqa: NPY002
        torch.default_generator.manual_seed(SEED)  # of the CPU alone: torch.manual_seed would set the GPUs' too
        yield


def _put(get, put, value):
    if get() != value:
        put(value)


def _flushes():
    """Whether subnormal numbers count as 0: so after a library is loaded that gcc has made with -ffast-math.

    Asked of Python's own numbers: a tensor would lie on whatever default device an answer has set.
    """
    return sys.float_info.min / 2 == 0.0


def _settings():
    """(how to read a setting, how to set it, its value in a new process)."""
    import torch

    return (
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (_default_device, torch.set_default_device, None),
        (torch.is_grad_enabled, torch.set_grad_enabled, True),
        (_flushes, torch.set_flush_denormal, False),
        (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), False),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    )


def _default_device():
    """The device that was set as default; None if none was."""
    import torch

    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return getattr(context, "device", None)
