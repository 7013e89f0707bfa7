"""Count living bytes where storages are resized in place, as `fully_shard` does with the parameters it gathers."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .live import LiveBytes


class ShardBytes(LiveBytes):
    """LiveBytes that also follows ``storage.resize_``: memory that is freed, and taken again, under a living tensor.

        with measure.ShardBytes().track(model, optimizer) as live:
            step()
        live.peak, live.parts_at_peak

    ``fully_shard`` keeps one tensor for each gathered parameter and resizes its storage: to nothing after use. From the
    first such change on, a storage counts under the part "gathered". So let one step pass before you look at parts:
    the first gathering counts as "activations".

    record: keep the bytes of each part after every operation in `history`, a list of dictionaries.
    fake: count fake tensors, for a step that is only planned; else only what has memory counts, for DTensor finds out
    shapes with fake tensors. Tensors on the meta device never count.

    The sizes of all known storages are read again after every operation that makes or changes something, which costs
    some microseconds each.
    """

    def __init__(self, record: bool = False, fake: bool = False) -> None:
        super().__init__()
        self._fake = fake
        self.history: list[dict[str, int]] = []
        self._record = record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._read_again()
            if self._record:
                self.history.append(dict(self._parts))
        return result

    def _count(self, tensor: torch.Tensor, part: str | None, retag: bool = True) -> None:
        if tensor.device.type != "meta" and (self._fake or not isinstance(tensor, FakeTensor)):
            super()._count(tensor, part, retag)

    def reset_peak(self) -> None:
        """Start a new peak from what lives now."""
        self._read_again(settle=False)
        super().reset_peak()

    def _read_again(self, settle: bool = True) -> None:
        before = self.live
        for held in list(self._held.values()):
            storage = held()
            if storage is None or storage.nbytes() == held.size:
                continue
            self._add(held.part, -held.size)
            held.size, held.part = storage.nbytes(), "gathered"
            self._add(held.part, held.size)
        if settle:
            self._settle(before)


def shard_bytes(*things: Any) -> int:
    """Bytes of the storages that tensors, modules' parameters and optimizers' states hold on this rank.

    A DTensor counts with its local shard, a shared storage once. Takes what ``LiveBytes.track`` takes.
    """
    return int(ShardBytes().track(*things).live)
