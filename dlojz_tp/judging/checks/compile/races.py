"""Race of 06: the GELU of a million numbers, on one core."""

import ctypes

import torch
from torch.nn import functional as F  # noqa: N812

from dlojz_tp.judging.contest import Contest
from dlojz_tp.measure import compiling

NUMBERS = 1_000_000


def yours(compile_command, c_source, fused_gelu):
    folder, x = compiling.private_folder(), torch.randn(NUMBERS)
    (folder / "gelu.c").write_text(c_source())
    compiling.run_compiler(compile_command(folder / "gelu.c", folder / "gelu.so"), folder / "gelu.so")
    library = ctypes.CDLL(str(folder / "gelu.so"))
    return lambda: fused_gelu(x, library)


def theirs():
    x = torch.randn(NUMBERS)
    return lambda: F.gelu(x)


RACES = {1: Contest("F.gelu", yours, theirs, device="cpu")}
