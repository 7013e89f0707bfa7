"""The machine that is pretended: how many GPUs, what they hold, and what was noted down while the answer ran."""

import contextlib
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

ANYWHERE = "made in C++"  # outside of any function that the program called: see memory.is_wild
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_OURS = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, __file__))


class Wait(NamedTuple):
    """The CPU has waited for a GPU. why: the operation, file and line: of the program, not of torch."""

    why: str
    file: str
    line: int


class Copy(NamedTuple):
    """Bytes over the bus, and of one number; way: "to gpu", "to cpu", "between gpus"; pinned: the CPU's memory."""

    way: str
    bytes: int
    item: int
    non_blocking: bool
    pinned: bool
    file: str
    line: int


class Race(NamedTuple):
    """Two streams use the same memory, at least one writes, and neither waits for the other."""

    what: str
    shape: tuple
    file: str
    line: int


class Machine:
    """What the pretended machine is made of.

    waits, copies, races: what was noted; pinned: file and line where `pin_memory` is called. queued: operations on GPUs
    since the CPU last waited for one. launched: all of them. messages: point-to-point messages and collectives of this
    rank in their order, for `stuck`.
    """

    def __init__(self, count: int, capacity: int, nccl: bool):
        self.count, self.capacity, self.nccl = count, capacity, nccl
        self.current = 0
        self.clock, self.home = None, torch.device("cpu")  # see modelled_gpu
        # bytes of each GPU: in whole blocks, their peak, as they were asked for, and with what is kept of freed blocks
        self.live, self.peak, self.requested, self.reserved = [0] * count, [0] * count, [0] * count, [0] * count
        self.waits: list[Wait] = []
        self.copies: list[Copy] = []
        self.races: list[Race] = []
        self.pinned: list[tuple[str, int]] = []
        self.messages: list = []
        self.queued = self.launched = 0
        self.generators = weakref.WeakValueDictionary()  # of GPUs, by the address that C++ knows them by
        self.here = threading.local()  # of a thread: streams, where C++ creates, what it casts for

    def waited(self, why: str) -> None:
        """Note that the CPU waits here."""
        self.waits.append(Wait(why, *line()))
        self.queued = 0

    @contextlib.contextmanager
    def making(self, where):
        """Inside, C++ creates its tensors there: a GPU's number, or None for the CPU. Outside, see ANYWHERE."""
        before = self.makes
        self.here.makes = where
        try:
            yield
        finally:
            self.here.makes = before

    @property
    def makes(self):
        return getattr(self.here, "makes", ANYWHERE)

    def index(self, device=None) -> int:
        """The number of a GPU given as a number, a text, a torch.device or None, the current one."""
        if isinstance(device, str):
            device = torch.device(device)
        index = getattr(device, "index", device)
        index = self.current if index is None else index
        if not 0 <= index < self.count:
            raise _no_such_device()
        return index

    def place(self, device) -> torch.device:
        """A device with its number; "cuda" alone, and a number alone, mean what they mean to torch.cuda."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device(device)
        return torch.device("cuda", self.index(device)) if device.type == "cuda" else device


def line() -> tuple[str, int]:
    """File and line of the program that runs: the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def size(text) -> int:
    """Bytes: 24, "24 MiB", "1.5 GiB"."""
    if isinstance(text, int):
        return text
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*(\w*)\s*", text).groups()
    return int(float(number) * UNITS[unit.upper()])


def _no_such_device() -> Exception:
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    return kind("CUDA error: invalid device ordinal")
