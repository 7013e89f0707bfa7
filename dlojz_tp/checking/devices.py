"""Check on a machine without a GPU that code is right on one."""

import contextlib
import functools

import torch

from dlojz_tp.checking.pretend import pretended


@contextlib.contextmanager
def fake_cuda():
    """Inside, `tensor(x)` given by the context turns a CPU tensor into a fake `cuda` tensor of the same shape.

    A tensor made on another device raises, and so does `.item()` and every other hidden synchronisation.
    Forward computations only: autograd's backward does not run on fake tensors of a device that is not there.
    Source: torch._subclasses.fake_tensor, PyTorch documentation "Fake tensor".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    _gamma_of_fake_tensors()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def tensor(x: torch.Tensor):
            with mode:
                return torch.empty(x.shape, dtype=x.dtype, device="cuda")

        yield tensor


@functools.cache
def _gamma_of_fake_tensors():
    """Let fake and meta tensors draw from a gamma distribution, from which a Beta is made: torch 2.11 cannot."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_standard_gamma", "Meta"):
        return None
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_standard_gamma", lambda x, generator=None: torch.empty_like(x))
    return library  # the cache keeps it alive, and with it the kernel


def meta_device() -> torch.device:
    """A device that computes shapes only, backward and optimizers included: a stand-in for a GPU in training steps.

    Mixing it with CPU tensors raises, and so does reading a value back, which is what a synchronisation does.
    """
    _gamma_of_fake_tensors()
    return torch.device("meta")


@contextlib.contextmanager
def autocast_on_meta(*answers):
    """Inside, `torch.autocast("meta")` does nothing: PyTorch refuses it, though a GPU in its place would be right."""
    real = torch.autocast

    class Autocast(real):
        def __new__(cls, device_type=None, *_, **__):
            return _Nothing() if device_type == "meta" else super().__new__(cls)

    places = (torch, torch.amp, torch.amp.autocast_mode)
    with pretended([(place, "autocast", Autocast) for place in places], *answers):
        yield


class _Nothing(contextlib.ContextDecorator):
    """A context manager and a decorator that change nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False
