"""Time the phases of each training step without disturbing it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlojz_tp.scale import brief

from .machine import as_device, synchronize
from .records import Record, new_record

PHASES = ("loading", "copy", "forward", "backward", "communication", "optimizer", "step")


class Chronometer:
    """Times loading, forward, backward and optimizer of each step.

    On a GPU it records CUDA events on the current stream and never waits inside a step: the events are read by
    ``record``. Times are then those of the GPU. In particular *loading* is the time the GPU stood idle for the next
    batch, so a loader that hides behind the computation costs nothing. On a CPU it reads the clock.

    A loop reads::

        chrono = Chronometer(device, warmup=2)
        for images, labels in chrono.steps(loader, n=20):
            with chrono.forward():
                loss = criterion(model(images), labels)
            with chrono.backward():
                loss.backward()
            with chrono.optimizer():
                optimizer.step()
                optimizer.zero_grad()
        record = chrono.record("baseline", batch_size=64)

    A phase may come several times in a step (gradient accumulation): its times are added. A step counts once the
    loop comes back for the next batch: one left by ``break`` or by an exception is dropped, and so is one in which a
    phase raised.

    Args:
        device: where the work is done; ``None`` is the GPU if there is one.
        warmup: first steps that count in no figure (compilation, caches, cuDNN's search for algorithms).

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """

    def __init__(self, device: torch.device | str | None = None, warmup: int = 2):
        if warmup < 0:
            raise ValueError(f"warmup is a number of steps, 0 or more, not {warmup}")
        self.device = as_device(device)
        self.warmup = warmup
        self._finished: list[_Step] = []
        self._open: _Step | None = None
        self._phase: str | None = None
        if self.device.type == "cuda":
            # From here on the allocator keeps the peak that ``record`` reads.
            torch.cuda.reset_peak_memory_stats(self.device)

    def steps(self, loader: Iterable, n: int | None = None) -> Iterator[Any]:
        """Go through the batches of a loader and time the wait for each.

        Starting the loader (its workers, for example) belongs to the loading of the first step. May be called
        again, for example once an epoch: the steps add up, the warm-up is that of the first call.

        Args:
            loader: anything one can iterate over.
            n: stop after this many steps; ``None`` goes to the end of the loader. Where notebooks are
                only tested, three steps after the warm-up are enough.

        Yields:
            The batches, unchanged.

        Raises:
            RuntimeError: if another loop over ``steps`` ran inside a step of this one.
        """
        batches = None
        done = 0
        if brief():
            few = self.warmup + 3
            n = few if n is None else min(n, few)
        while n is None or done < n:
            step = self._open = _Step(self._now())
            try:
                with self.phase("loading"):
                    batches = iter(loader) if batches is None else batches
                    batch = next(batches)
            except StopIteration:
                self._open = None
                return
            step.images = _images(batch)
            yield batch
            if self._open is not step:
                raise RuntimeError("another loop over chrono.steps began inside this one: give it its own Chronometer")
            step.end = self._now()
            self._open = None
            if not step.failed:
                self._finished.append(step)
            done += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the current step.

        Args:
            name: one of ``PHASES``.

        Raises:
            ValueError: for an unknown name.
            RuntimeError: outside a step, or inside another phase.
        """
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: choose from {', '.join(PHASES)}")
        step = self._open
        if step is None:
            raise RuntimeError(f"{name!r} outside a step: loop with 'for batch in chrono.steps(loader)'")
        if self._phase is not None:
            raise RuntimeError(f"{name!r} began inside {self._phase!r}: phases follow each other, they do not nest")
        self._phase = name
        begin = self._now()
        try:
            yield
        except BaseException:
            step.failed = True
            raise
        finally:
            self._phase = None
            step.spans.append((name, begin, self._now()))

    def copy(self):
        """Time the copy of a batch to the device."""
        return self.phase("copy")

    def forward(self):
        """Time the forward pass, loss included."""
        return self.phase("forward")

    def backward(self):
        """Time the backward pass."""
        return self.phase("backward")

    def step(self):
        """Time forward, backward and update together, where one function does all three."""
        return self.phase("step")

    def communication(self):
        """Time an exchange between ranks that is not part of another phase."""
        return self.phase("communication")

    def optimizer(self):
        """Time the update of the weights."""
        return self.phase("optimizer")

    def record(self, name: str, memory: Any = None, **values: Any) -> Record:
        """Read the clocks and make the run record.

        With fewer steps than the warm-up, the record keeps them but counts none: it has no throughput.

        Args:
            name: what ran.
            memory: on a CPU, where the memory figure comes from: a ``MemoryEstimate``, a ``PeakMemory``, a
                ``MemoryBudget``. On a GPU the allocator's own peak is taken if this is ``None``.
            **values: fields of ``Record`` (``losses``, ``accuracy``, ``power``, ...) and settings (``batch_size``,
                ``image_size``, ``model``, ``world_size``, ...). ``batch_size`` is that of one rank; throughput counts
                the images seen in the batches, times ``world_size``.

        Returns:
            A ``Record``.
        """
        synchronize(self.device)
        steps = [step.seconds() for step in self._finished]
        counted = self._finished[self.warmup :]
        seconds = sum(step["total"] for step in steps[self.warmup :])
        settings = {**values.get("settings", {}), **values}
        images = sum(step.images or settings.get("batch_size") or 0 for step in counted) * settings.get("world_size", 1)
        found = {"warmup": min(self.warmup, len(steps)), "steps": steps, **self._memory(memory)}
        if images and seconds > 0:
            found["images_per_second"] = images / seconds
        return new_record(name, self.device, **{**found, **values})

    def _memory(self, source: Any) -> dict:
        if source is None and self.device.type == "cuda":
            return {"peak_memory_bytes": [torch.cuda.max_memory_allocated(self.device)], "memory_kind": "measured"}
        if source is None:
            return {}
        found = {"peak_memory_bytes": [source.peak], "memory_kind": source.kind}
        return found | ({"memory_parts": source.parts()} if hasattr(source, "parts") else {})

    def _now(self) -> "torch.cuda.Event | float":
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class _Step:
    """The marks of one step: clock readings on a CPU, events on a GPU."""

    def __init__(self, begin: "torch.cuda.Event | float"):
        self.begin = begin
        self.end: torch.cuda.Event | float | None = None
        self.spans: list[tuple] = []
        self.images: int | None = None
        self.failed = False

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, begin, end in self.spans:
            found[name] = found.get(name, 0.0) + _between(begin, end)
        return {**found, "total": _between(self.begin, self.end)}


def _between(begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    """Give the seconds between two marks; the work before them must be finished."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


def _images(batch: Any) -> int | None:
    """Give the number of samples in a batch: the first dimension of its first tensor."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.dim() else None
