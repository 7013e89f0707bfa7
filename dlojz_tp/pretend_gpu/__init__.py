"""GPUs that are not there: code that is right on the CPU alone shows it.

    def step():
        with pretend_gpu(count=2, capacity="24 MiB") as gpu:
            x = torch.ones(3, device="cuda")       # x.device is cuda:0
            x + torch.ones(3)                      # RuntimeError: Expected all tensors to be on the same device, ...
            x.sum().item()                         # 3.0, and gpu.waits has one more line
    launch.ranks(step, n=1)

Plain CPU tensors whose storage carries a tag "on cuda:N"; everything in C++ stays the CPU's, so that numbers are real
and equal the CPU's, with backward, optimizers and process groups. The files, from the ground up:

    machine.py          what is pretended, and what was noted: waits, copies, races, memory
    memory.py           tags on storages, bytes, out of memory
    mixing.py           CUDA's words for tensors of several devices
    streams.py          streams, events, races
    copies.py           tensors that move
    operators.py        each operation of ATen
    functions.py        each function of torch
    cuda.py tensor_methods.py amp.py    what stands in the place of torch's
    groups.py           process groups like NCCL's
    stuck.py            messages that wait for each other
    inside.py           the way in and out
"""

from dlojz_tp.pretend_gpu.inside import pretend_gpu
from dlojz_tp.pretend_gpu.machine import Copy, Machine, Race, Wait
from dlojz_tp.pretend_gpu.stuck import Message, stuck

__all__ = ["Copy", "Machine", "Message", "Race", "Wait", "pretend_gpu", "stuck"]
