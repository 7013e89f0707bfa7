"""What an answer sends: works that are waited for or not, and nobody else's pipeline."""

import contextlib

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import stage as library

from dlojz_tp.checking import Wrong, pretended


class Sends:
    """Counts the sends that were started and not waited for."""

    def __init__(self):
        self.open = {}
        self.works = []  # kept: a work that is dropped may take its message with it

    @contextlib.contextmanager
    def watched(self, *answers):
        """Inside, dist.isend gives works that tell when they are waited for, also under a name in the answers."""
        begin = dist.isend

        def isend(*args, **kwargs):
            work = begin(*args, **kwargs)
            if work is None:
                return None
            self.works.append(work)
            number = len(self.open)
            self.open[number] = True
            return _Work(work, lambda: self.open.__setitem__(number, False))

        # both places: batch_isend_irecv takes no other isend than that of its own module
        changes = [(dist, "isend", isend), (distributed_c10d, "isend", isend)]
        with pretended([*changes, (library._PipelineStageBase, "__init__", _refused)], *answers):
            yield self


def _refused(*_, **__):
    raise Wrong("library-pipeline")


class _Work:
    """A work that tells when it is through; all else is the real one's."""

    def __init__(self, work, tell):
        self._work, self._tell = work, tell

    def wait(self, *args, **kwargs):
        done = self._work.wait(*args, **kwargs)
        self._tell()
        return done

    def __getattr__(self, name):
        return getattr(self._work, name)
