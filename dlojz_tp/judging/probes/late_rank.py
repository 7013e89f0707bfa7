"""Ranks that tell each other when they wait for a collective: so that one of them can come late for certain."""

import contextlib
import time
from collections.abc import Callable

import torch.distributed as dist

from dlojz_tp.judging.checking.borrowed import replaced

WAITS = (*((dist.Work, name) for name in ("wait", "synchronize", "get_future", "is_completed")),
         (dist.ProcessGroup, "monitored_barrier"))  # fmt: skip


class Waits:
    """Inside, on a rank: waits for collectives are counted, and told to the other ranks; its end is told, too.

    word: names these waits, once in a world. count: waits so far.
    """

    def __init__(self, word: str):
        self.word, self.count = word, 0
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store, self._inside = dist.distributed_c10d._get_default_store(), contextlib.ExitStack()

    def __enter__(self):
        for owner, name in WAITS:
            self._inside.enter_context(replaced(owner, name, self._telling(name, getattr(owner, name))))
        return self

    def __exit__(self, *error):
        self._inside.close()

    def _telling(self, name, method):
        def telling(work, *args, **kwargs):
            self.tell(self.count + 1)
            self.count += name in ("wait", "monitored_barrier")
            return method(work, *args, **kwargs)

        return telling

    def tell(self, what) -> None:
        """Tell the others that this rank waits for the `what`-th time, or another word."""
        self._store.set(self._key(self.rank, what), "1")

    def _key(self, rank, what):
        return f"{self.word}: {rank} {what}"

    def others_wait(self, *, limit: float, besides: tuple[str, ...] = (), meanwhile: Callable = bool) -> bool:
        """Return when every other rank waits for more than this one has waited for, or has told one of `besides`.

        False after `limit` seconds, or when meanwhile() is true: ranks may wait in a way that nobody sees.
        """
        others, end = [rank for rank in range(self._size) if rank != self.rank], time.monotonic() + limit
        told = self.count + 1, *besides
        while others := [rank for rank in others if not self._told(rank, told)]:
            if meanwhile() or time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def _told(self, rank, words) -> bool:
        return any(self._store.check([self._key(rank, word)]) for word in words)
