"""Copies that no tensor holds: NumPy arrays, lists of numbers, bytes, wherever an answer keeps them."""

import gc
import sysconfig
import tracemalloc
from pathlib import Path

import numpy
import torch

import dlojz_tp
from dlojz_tp.checking import Wrong

HINTS = {
    "copy-outside": "This rank keeps {found} bytes in NumPy arrays, lists or bytes, where the whole makes {whole}. A copy outside "
    "of tensors is a copy all the same: hold no more than this rank's shard, and the parameters where the stage keeps them.",
}

_ARRAYS = numpy.lib.tracemalloc_domain
_LARGE = 1900  # bytes of one block; the tables of small dictionaries are below
_HUGE = 64  # times a whole copy: a table of Python's own, of all names for example, that grew just then
_NOT_THEIRS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(torch.__file__).parent),
    str(Path(dlojz_tp.__file__).parent),
    "<frozen",
)


class Outside:
    """Inside, what is allocated outside of tensors is followed. kept: bytes of copies that are alive at the end.

    whole: bytes of a whole copy. lists: whether small objects count where they are many. What Python needs for objects and
    small tables is not counted. For processes that end soon, ranks of a check: tracemalloc is never stopped, as that
    crashes where other threads allocate meanwhile (until Python 3.13).
    """

    def __init__(self, whole: int, on: bool = True, lists: bool = True):
        self.whole, self.on, self.lists, self.kept = whole, on, lists, 0

    def __enter__(self):
        if self.on:
            tracemalloc.start(1)
        return self

    def __exit__(self, *error):
        if self.on and error[0] is None:
            self.kept = self._now()
            if self.kept > self.whole / 2:
                gc.collect()  # what was thrown away may wait in a circle
                self.kept = self._now()

    def _now(self) -> int:
        arrays = large = small = 0
        for domain, size, frames, *_ in tracemalloc.take_snapshot().traces._traces:
            if domain == _ARRAYS:
                arrays += size
            elif not frames[0][0].startswith(_NOT_THEIRS):
                if size >= _LARGE:
                    large += size if size < _HUGE * self.whole else 0
                else:
                    small += size
        # a number in a list takes 32 bytes, and 8 in a tensor of float64
        return arrays + (large + small if self.lists and large + small > 2 * self.whole else large)


def no_copy(found: int, whole: int, where: str):
    """Raise Wrong where what an Outside found is more than a shard of two ranks."""
    if found > 0.6 * whole:
        raise Wrong("copy-outside", found=found, whole=whole, where=where)
