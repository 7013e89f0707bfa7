"""Check on a machine without a GPU that code is right on one."""

import contextlib
import functools
import sys
from types import SimpleNamespace

import torch

from dlojz_tp.checking.pretend import pretended
from dlojz_tp.probes.networks import network


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
    """Let fake and meta tensors draw from the distributions of which a Beta is made: torch 2.11 cannot."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_standard_gamma", "_sample_dirichlet"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, lambda x, generator=None: torch.empty_like(x))
    return library  # the cache keeps it alive, and with it the kernels


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


@contextlib.contextmanager
def waits(answer, *more_changes):
    """Inside, synchronize() and empty_cache() do nothing; yields the list of their calls, by name."""
    calls = []

    def record(name):
        return lambda *_, **__: calls.append(f"{name}()")

    stream = SimpleNamespace(synchronize=record("torch.cuda.Stream.synchronize"))
    changes = [
        (torch.cuda, "synchronize", record("torch.cuda.synchronize")),
        (torch.cuda, "empty_cache", record("torch.cuda.empty_cache")),
        (torch.cuda.memory, "empty_cache", record("torch.cuda.empty_cache")),
        (torch.cuda, "current_stream", lambda *_, **__: stream),
        (torch.cuda.Stream, "synchronize", record("torch.cuda.Stream.synchronize")),
        (torch.cuda.Event, "synchronize", record("torch.cuda.Event.synchronize")),
        (torch.accelerator, "synchronize", record("torch.accelerator.synchronize")),
    ]
    with pretended([*changes, *more_changes], answer):
        yield calls


def waits_on_gpu(answer, call) -> list[str]:
    """What waits in `call(model, device)` where torch sees a GPU: forward on a fake one, backward and update left out.

    Whatever goes wrong on the fake device is not the answer's fault: then what was seen until there is returned.
    """
    changes = (
        (torch.cuda, "is_available", _available_to_answers),
        (torch.Tensor, "backward", lambda *_, **__: None),
        (torch.autograd, "backward", lambda *_, **__: None),
        (torch.autograd, "grad", lambda _, inputs, *__, **___: [torch.zeros_like(p) for p in inputs]),
    )
    with waits(answer, *changes) as calls, contextlib.suppress(Exception), fake_cuda() as tensor:
        model = network()
        for module in model.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = torch.nn.Parameter(tensor(p))
            for name, buffer in module._buffers.items():
                module._buffers[name] = tensor(buffer)
        call(model, torch.device("cuda"))
    return calls


def _available_to_answers():
    # torch itself asks too, and would then start a driver that is not there
    return not sys._getframe(1).f_globals.get("__name__", "").startswith("torch")
