"""Threads that write a checkpoint in the background: they begin late, unless somebody waits for them."""

import contextlib
import sys
import threading
import time

from torch.distributed.checkpoint import FileSystemWriter

from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.probes import threads
from dlojz_tp.launch.proc import rests

LOOKS = 30  # in a row, a hundredth of a second apart


@contextlib.contextmanager
def late_threads():
    """A thread that writes in the background begins when this ends, or when this thread waits for something."""
    ended, here = threading.Event(), threading.current_thread()
    write = FileSystemWriter.write_data

    def late(*args, **kwargs):
        if threading.current_thread() is not here:
            asleep = _Asleep(here)
            wait_until(lambda: ended.is_set() or asleep(), pause=0.01)
        return write(*args, **kwargs)

    with replaced(FileSystemWriter, "write_data", late):
        try:
            yield
        finally:
            ended.set()


class _Asleep:
    """Called again and again: whether a thread has slept at one place for all of some looks: it waits, for this one perhaps.

    A thread that could go on and has no core does not sleep.
    """

    def __init__(self, thread):
        self.thread, self.place, self.looks = thread, None, 0

    def __call__(self) -> bool:
        frame = sys._current_frames().get(self.thread.ident)
        place = (id(frame), frame.f_lasti) if frame else None
        if not rests(threads.states().get(self.thread.native_id, "S")):  # "S": only Linux tells
            place = None
        self.looks = self.looks + 1 if place is not None and place == self.place else 0
        self.place = place
        return self.looks >= LOOKS


def wait_until(true, seconds=20.0, pause=0.02):
    """Wait until true() is true, or the seconds are over."""
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(pause)
