"""Notice the calls that make the CPU wait for a GPU, on a machine without one."""

import contextlib
import sys
from types import SimpleNamespace

import torch

from dlojz_tp.checking import fake_cuda, pretended
from dlojz_tp.checks.gpu_acceleration.models import network


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
