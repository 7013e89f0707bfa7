"""Check on a machine without a GPU that code is right on one."""

import contextlib

import torch


@contextlib.contextmanager
def fake_cuda():
    """Inside, `tensor(x)` given by the context turns a CPU tensor into a fake `cuda` tensor of the same shape.

    A tensor made on another device raises, and so does `.item()` and every other hidden synchronisation.
    Forward computations only: autograd's backward does not run on fake tensors of a device that is not there.
    Source: torch._subclasses.fake_tensor, PyTorch documentation "Fake tensor".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def tensor(x: torch.Tensor):
            with mode:
                return torch.empty(x.shape, dtype=x.dtype, device="cuda")

        yield tensor


def meta_device() -> torch.device:
    """A device that computes shapes only, backward and optimizers included: a stand-in for a GPU in training steps.

    Mixing it with CPU tensors raises, and so does reading a value back, which is what a synchronisation does.
    """
    return torch.device("meta")
