"""A whole process that has pretended GPUs until it ends: the kernel of a rehearsal, and each rank that it launches.

DLOJZ_PRETENDED_GPUS says how many. Ranks have a GPU each and NCCL's rules where there are enough; else they see the
GPUs, and talk through gloo on the CPU. The ranks of a check pretend nothing, unless the check does. With
DLOJZ_PRETENDED_CARD, a name of planner.CARDS, tensors have shapes and no values, as in modelled_gpu.
"""

import atexit
import contextlib
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import CodeType, FunctionType

import torch

from dlojz_tp.judging.pretend_gpu.inside import pretend_gpu
from dlojz_tp.launch import place

CAPACITY = "80 GiB"
machines: list = []  # that this process has entered: one
_entered = contextlib.ExitStack()
atexit.register(_entered.close)  # torch's own end must not meet the modes


def enter(nccl: bool = True) -> None:
    """From here on, this process has as many GPUs as `place.pretended()` says; the second time, nothing changes."""
    if machines:
        return
    _hide()
    card, clock = os.environ.get(place.CARD), None
    if card and nccl:
        clock = importlib.import_module("dlojz_tp.modelled_gpu.runs").clock_of(card)  # of a room above
    machines.append(_entered.enter_context(pretend_gpu(place.pretended(), CAPACITY, nccl, clock)))


def note() -> None:
    """Add a line to the file DLOJZ_REHEARSED: most bytes that a GPU held here, seconds by the clock."""
    if file := os.environ.get("DLOJZ_REHEARSED"):
        with Path(file).open("a") as notes:
            for machine in machines:
                print(max(machine.peak), machine.clock.host if machine.clock else 0.0, file=notes)


def decides() -> None:
    """Add the line of a cell, the innermost, whose condition is a value that tensors do not have here."""
    file, frame = os.environ.get("DLOJZ_REHEARSED"), sys._getframe()
    while file and frame and "ipykernel_" not in frame.f_code.co_filename:
        frame = frame.f_back
    if file and frame:
        with Path(file).open("a") as notes:
            print("decides", Path(frame.f_code.co_filename).name, frame.f_lineno, file=notes)


def _hide() -> None:
    """Let the package's frames look like PyTorch's: a search for the program's line in a stack passes over them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            for each in list(vars(module).values()):
                methods = vars(each).values() if isinstance(each, type) and each.__module__ == name else [each]
                for function in map(inspect.unwrap, filter(callable, methods)):
                    if type(function) is FunctionType and function.__globals__ is vars(module):
                        function.__code__ = _renamed(function.__code__)


def _renamed(code: CodeType) -> CodeType:
    file = str(Path(torch.__path__[0], "pretend_gpu", Path(code.co_filename).name))
    inner = tuple(_renamed(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)
