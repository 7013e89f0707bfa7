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
    cuda.py tensor_methods.py amp.py random_numbers.py compiling.py profiles.py     what replaces torch's
    groups.py           process groups like NCCL's
    integers.py         short lists of integers, where others have no values
    stuck.py            messages that wait for each other
    inside.py           the way in and out
    rehearsed.py        a whole kernel and all its ranks, until they end

What it cannot do; tests/test_pretend_gpu_limits.py shows each point, and test_pretend_gpu_groups.py the last:

    - Time: nothing here is fast or slow, events measure the CPU: modelled_gpu gives operations a time.
    - Autocast casts by a GPU's list what the program calls; inside of PyTorch's own functions the CPU's list holds.
    - Random numbers are those of a CPU's generator with the same seed; each GPU has its own.
    - Sparse tensors cannot carry a tag. A storage's own .device says cpu.
    - Tensors that C++ makes outside of any function of torch (the reducer's buckets) are at home on every device.
    - copy_ between devices leaves the gradient of its source on the device of its target.
    - Backward runs on its caller's stream, not on the one of its forward.
    - A race is one of whole memories: streams that use two halves of one tensor are told as one.
    - Memory has no fragments, no workspaces of libraries, and nothing beside tensors.
    - No CUDA graphs, no kernels of one's own, no float32 in fewer bits (TF32); torch.compile is a plain call.
    - A profile tells the CPU's memory and operators once more as the GPU's.
    - What waits in C++ for a collective (DDP's reducer) is taken to wait at once.
    - Messages are recorded, and hang only in `stuck`.
"""

from dlojz_tp.judging.pretend_gpu.inside import pretend_gpu
from dlojz_tp.judging.pretend_gpu.machine import Copy, Machine, Race, Wait
from dlojz_tp.judging.pretend_gpu.stuck import Message, stuck

__all__ = ["Copy", "Machine", "Message", "Race", "Wait", "pretend_gpu", "stuck"]
