"""What an answer sends: works that are waited for or not, and nobody else's pipeline."""

import contextlib

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import stage as library

from dlojz_tp.checking import Wrong, pretended


class Sends:
    """Counts the sends, and the receives, that were started and not waited for."""

    def __init__(self):
        self.open, self.receiving = {}, {}
        # number of a send, or of a receive: None once it was waited for, until then its work: a message whose work is
        # dropped may be lost

    def began(self, name):
        """A send or a receive starts: "isend" or "irecv". For those who want to know."""

    def waited(self):
        """A send or a receive was waited for."""

    @contextlib.contextmanager
    def watched(self, *answers):
        """Inside, dist.isend and dist.irecv give works that tell when they are waited for, also under a name in the answers."""
        changes = [(library._PipelineStageBase, "__init__", _refused)]
        # both places: batch_isend_irecv takes no other isend than that of its own module
        for name, table in (("isend", self.open), ("irecv", self.receiving)):
            telling = self._telling(name, getattr(dist, name), table)
            changes += [(dist, name, telling), (distributed_c10d, name, telling)]
        with pretended(changes, *answers):
            yield self

    def _telling(self, name, begin, table):
        def started(*args, **kwargs):
            self.began(name)
            work = begin(*args, **kwargs)
            if work is None:
                return None
            number = len(table)
            table[number] = work

            def through():
                table[number] = None
                self.waited()

            return _Work(work, through)

        return started

    def finish(self) -> int:
        """Wait for the sends that nobody has waited for, so that the other ranks get their messages; how many these are."""
        left = [work for work in self.open.values() if work is not None]
        for work in left:
            work.wait()
        return len(left)


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

    def is_completed(self):
        done = self._work.is_completed()
        if done:
            self._tell()
        return done

    def __getattr__(self, name):
        return getattr(self._work, name)
