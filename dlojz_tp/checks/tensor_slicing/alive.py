"""What stays in memory of a layer that was cut: every tensor made meanwhile that still lives, whoever holds it."""

import gc

import torch

from dlojz_tp.checking import held_storages

SLACK = 512  # bytes that a layer may hold besides its slices: a buffer of positions


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
        new = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_meta]
        found |= dict(map(_storage, new))
        known = [*known, *(t for t in new if _tells_nothing(t))]
        return sum(found.values()) - sum(found.get(at, 0) for at in {_storage(t)[0] for t in known})


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
