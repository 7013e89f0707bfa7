"""A pretend card: run out of memory on a machine without a GPU, for the same reasons as on one."""

import torch

from .live import LiveBytes
from .units import human_bytes


class MemoryBudget(LiveBytes):
    """Stands for a card with so much memory: beyond it, ``torch.OutOfMemoryError`` is raised.

    All that is made in the ``with`` block lives on the card, and whatever was made before counts once registered.
    As on a GPU, memory comes back when the last reference dies: keep a loss with its graph, or the exception with its
    traceback, and it stays taken. As on a GPU too, a failed allocation does not count in ``peak``::

        card = measure.MemoryBudget(300 * 2**20, model, optimizer)
        try:
            with card:
                train_step(model, optimizer, images, labels)
        except torch.OutOfMemoryError as error:
            print(error)

    One card may be entered many times; ``live`` and ``peak`` go on.

    Args:
        capacity: bytes of the pretend card.
        *things: modules, optimizers and tensors that are already on it.

    Raises:
        torch.OutOfMemoryError: when an operation makes more than is free.
        ValueError: for a capacity that is not positive.
    """

    def __init__(self, capacity: float, *things: object):
        super().__init__()
        if not capacity > 0:
            raise ValueError(f"the capacity is in bytes and above 0, not {capacity}")
        self.capacity = int(capacity)
        self.track(*things)

    def _refusal(self, before: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"pretend card out of memory. Tried to allocate {human_bytes(self.live - before)}. "
            f"The pretend card has a total capacity of {human_bytes(self.capacity)} of which "
            f"{human_bytes(self.capacity - before)} is free; {human_bytes(before)} is held by live tensors."
        )
