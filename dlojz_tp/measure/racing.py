"""Let several implementations of the same work run in turn, and compare their times."""

import html
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dlojz_tp.scale import brief

from .collector import no_collector
from .machine import as_device, hardware, synchronize, versions
from .units import human_seconds

BRIEF = 2  # rounds, and calls in one, where it is enough that a race runs


@dataclass(repr=False)
class Race:
    """Times of candidates that ran in turn.

    Attributes:
        seconds: for each candidate, the seconds of one call, one entry a round.
        calls: how many calls one entry is the mean of.
        hardware, versions: where it was measured.
    """

    seconds: dict[str, list[float]]
    calls: int = 1
    hardware: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        """Median seconds of one call, for each candidate."""
        return {name: statistics.median(times) for name, times in self.seconds.items()}

    @property
    def spreads(self) -> dict[str, float]:
        """Spread of the times, for each candidate: the range of the middle half (interquartile range), in seconds."""
        return {name: _middle_half(times) for name, times in self.seconds.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """Median time of the first candidate over that of each other; below 1 the first is faster."""
        first, *others = self.medians
        return {name: self.medians[first] / self.medians[name] for name in others}

    @property
    def ratio(self) -> float:
        """Median time of the first candidate over that of the fastest other; below 1 the first is the fastest."""
        return max(self.ratios.values())

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Give the race as JSON, with medians and ratios; with a path, write it there too.

        Args:
            path: file to write, or ``None``.

        Returns:
            The JSON text.
        """
        found = {"medians": self.medians, "spreads": self.spreads, "ratios": self.ratios, "ratio": self.ratio}
        text = json.dumps(found | asdict(self), indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    def __str__(self) -> str:
        rows = [("candidate", "median", "spread", "time / first"), *self._rows()]
        width = max(len(row[0]) for row in rows)
        lines = [f"{row[0]:<{width}}  {row[1]:>9}  {row[2]:>9}  {row[3]:>12}" for row in rows]
        return "\n".join([*lines, self._verdict()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
            + "".join(f"<td style='text-align:right'>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for name, *cells in self._rows()
        )
        heads = ("median", "spread", "time / first")
        head = "<th style='text-align:left'>candidate</th>" + "".join(f"<th>{cell}</th>" for cell in heads)
        return f"<table><tr>{head}</tr>{body}</table><p>{html.escape(self._verdict())}</p>"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        first = next(iter(self.medians.values()))
        return [
            (name, human_seconds(median), f"± {human_seconds(self.spreads[name] / 2)}", f"{median / first:.2f}")
            for name, median in self.medians.items()
        ]

    def _verdict(self) -> str:
        first, *others = self.medians
        rival = min(others, key=self.medians.get)
        gap = abs(self.medians[first] - self.medians[rival])
        rounds = len(self.seconds[first])
        where = f"({rounds} rounds on {self.hardware.get('device_name', 'an unknown device')})"
        if gap <= max(self.spreads[first], self.spreads[rival]) / 2:
            return f"{first} and {rival} are level: they differ by less than the spread {where}"
        word, factor = ("faster", 1 / self.ratio) if self.ratio < 1 else ("slower", self.ratio)
        return f"{first} is {factor:.2f} times {word} than {rival} {where}"


def rounds(n: int) -> range:
    """Rounds of a measurement that is made `n` times; one round where notebooks are only tested."""
    return range(1 if brief() else n)


def race(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int = 20,
    warmup: int = 3,
    device: torch.device | str | None = None,
    calls: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> Race:
    """Run candidates in turn, A B A B, so that what slows the machine down slows them all.

    On a GPU each turn is timed by CUDA events, with a synchronisation before and after it, never inside. The garbage
    collector rests meanwhile.

    Args:
        candidates: name to a function without arguments; the first is the one that is judged.
        repeats: rounds that count.
        warmup: rounds before, which do not count.
        device: where the work is done; ``None`` is the GPU if there is one.
        calls: calls in one turn; ``None`` takes enough for the fastest candidate to last a millisecond.
        before: called before each turn that counts, and not timed; over ranks a barrier, so that all begin together.

    Returns:
        A ``Race``.

    Raises:
        ValueError: for fewer than two candidates, or a number of repeats or calls below 1.
        TypeError: for a candidate that cannot be called.
    """
    if len(candidates) < 2:
        raise ValueError(f"a race needs at least two candidates, not {len(candidates)}")
    if repeats < 1 or warmup < 0 or (calls is not None and calls < 1):
        raise ValueError("repeats and calls are at least 1, warmup at least 0")
    for name, run in candidates.items():
        if not callable(run):
            raise TypeError(f"candidate {name!r} cannot be called: give the function, not its result")
    if brief():
        repeats, warmup, calls = min(repeats, BRIEF), min(warmup, 1), min(calls or BRIEF, BRIEF)
    device = as_device(device)
    for _ in range(warmup):
        for run in candidates.values():
            run()
    if calls is None:
        fastest = min(_turn(run, 1, device) for run in candidates.values())
        calls = min(1000, math.ceil(1e-3 / max(fastest, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    with no_collector():
        for _ in range(repeats):
            for name, run in candidates.items():
                before()
                seconds[name].append(_turn(run, calls, device))
    return Race(seconds, calls, hardware(device), versions())


def _turn(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Time some calls of one candidate; the seconds of one call."""
    synchronize(device)
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(calls):
            run()
        end.record(stream)
        synchronize(device)
        return begin.elapsed_time(end) / 1000 / calls
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _middle_half(times: list[float]) -> float:
    """Give the interquartile range, 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
