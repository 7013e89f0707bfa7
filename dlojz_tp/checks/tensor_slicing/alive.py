"""What stays in memory of a layer that was cut: all that was made meanwhile and still lives, whoever holds it."""

import copy
import gc
import tracemalloc

import torch

from dlojz_tp.probes.memory import held_storages
from dlojz_tp.works.balise import BaliseNotDone

SLACK = 512  # bytes that a layer may hold besides its slices: a buffer of positions
ASIDE = 2**17  # bytes of Python's own that a layer may leave in memory: the objects of a whole model take 50,000


class Alive:
    """Follow the tensors made from here on: those in a closure, a bound method, a default or on another object too.

    A tensor is an object that Python's collector knows. What was there before is set aside ("frozen"), so that little
    is left to look through.
    """

    def __enter__(self):
        gc.freeze()
        return self

    def __exit__(self, *error):
        gc.unfreeze()

    def held(self, layer, known=()) -> int:
        """Bytes of the living tensors, and of all that can be reached from `layer`.

        Left out: the tensors of `known`, masks (of two different numbers at most), and states of random generators.
        """
        gc.collect()
        try:
            found = held_storages(layer)
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own: its parts are found below
            found = {}
        living = gc.get_objects()
        new = [t for t in living if issubclass(type(t), torch.Tensor) and not t.is_meta]
        found |= dict(map(_storage, new))
        found |= {
            s.data_ptr(): s.nbytes() for s in living if type(s) is torch.UntypedStorage and s.device.type == "cpu"
        }
        known = [*known, *(t for t in new if _tells_nothing(t))]
        return sum(found.values()) - sum(found.get(at, 0) for at in {_storage(t)[0] for t in known})


_later: list[tuple] = []


def look_later(make, large, ranks) -> list[int]:
    """A list into which `look_aside` will put `aside(make, large, ranks)`: once traced, all that Python does is slower."""
    found: list[int] = []
    _later.append((found, make, large, ranks))
    return found


def look_aside() -> None:
    """Look at all that `look_later` was asked for; the last thing that a rank does."""
    while _later:
        found, *rest = _later.pop(0)
        found.append(aside(*rest))


def aside(make, large, ranks) -> int:
    """Bytes in lists, arrays and the like, all but tensors, that stay in memory once a layer is made from a large one.

    large: builds the plain layer; each of its matrices holds at least 2^17 numbers, so that a copy of one, in whatever
    precision, is more than ASIDE. 0 where the answer fails: what else is looked at tells why.
    tracemalloc goes on until the rank ends: to stop it crashes where other threads allocate meanwhile (until Python 3.13).
    """
    plain = large()
    gc.freeze()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make(copy.deepcopy(plain), ranks)
        for p in made.parameters():
            p.data = p.data.clone()  # a part may lie in an array's memory
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    except BaliseNotDone:
        raise
    except Exception:
        return 0
    finally:
        gc.unfreeze()


def _tells_nothing(tensor) -> bool:
    """Whether it holds nothing of a weight: a state of a random generator, or a mask of zeros and ones, or infinities."""
    if tensor.dtype == torch.uint8 and tensor.numel() == torch.get_rng_state().numel():
        return True
    if tensor.numel() < 16 or tensor.numel() != tensor.untyped_storage().nbytes() // tensor.element_size():
        return False
    tensor = tensor.detach()
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def _storage(tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0
