"""In which precision this machine computes fastest: bfloat16 pays on some processors and costs tenfold on others."""

import functools
import time

import torch
import torch.nn.functional as F


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype to hand to autocast where speed counts; torch.float32 where less would be slower (then leave it off).

    On a GPU: bfloat16, or float16 where its Tensor Cores know no bfloat16 (Volta, Turing), which asks for loss scaling.
    On a CPU: bfloat16 if `bfloat16_pays()`.
    """
    if torch.device(device).type == "cuda":
        # emulation would do the arithmetic in float32, without Tensor Cores
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if bfloat16_pays() else torch.float32


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this processor convolves faster in bfloat16 than in float32: its instructions first, then a short trial.

    AVX-512 without its extension for bfloat16 converts, and gains nothing; without AVX-512, oneDNN has no kernel for
    it and PyTorch computes in plain loops, ten times slower.
    The environment variable ONEDNN_MAX_CPU_ISA=AVX2 makes any x86 processor behave so.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The fastest of a few convolutions of a middle layer of ResNet-18, channels last: about a millisecond each.

    On one core: on a busy machine several would wait for the one that is late, and chance would decide.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 16, 16, generator=generator).to(dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3, generator=generator).to(dtype).to(memory_format=torch.channels_last)
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(10):  # the first also prepares the kernel
                start = time.perf_counter()
                F.conv2d(x, weight, padding=1)
                times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times)
