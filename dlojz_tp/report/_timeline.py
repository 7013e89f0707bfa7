"""What happens when: loading beside computing, several runs one above the other."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlojz_tp.measure import human_seconds

from ._style import COLOURS, Chart, style

KINDS = {"loading": COLOURS["loading"], "copy": COLOURS["copy"], "waiting": "#DDDDDD", "step": COLOURS["step"]}
Event = tuple[str, int, float, float]


def timeline(runs: Mapping[str, Sequence[Event]], seconds: float | None = None) -> Chart:
    """Show when batches are loaded and when the network computes, one panel a run, all on the same axis of time.

    Args:
        runs: name to events `(kind, worker, begin, end)`. kind: "loading", "copy", "waiting" (the step has no batch)
            or "step". worker: number of the loader's process, -1 for the main process. begin, end: seconds of one
            clock; each run begins at its first event.
        seconds: show no more than so many from the start; ``None`` shows all.

    Returns:
        A figure.

    Raises:
        ValueError: without events, for an unknown kind, or an event that ends before it begins.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise ValueError("no timeline to show: give {name: events}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a timeline shows a time above 0, not {seconds}")
    runs = {name: _checked(name, events) for name, events in runs.items()}
    span = max(end for events in runs.values() for *_, end in events)
    span = min(span, seconds or math.inf) or 1e-9
    scale, unit = (1.0, "s") if span >= 2 else (1000.0, "ms")
    rows = [_rows(events) for events in runs.values()]
    with style():
        figure = Chart(height=1.1 + sum(0.55 + 0.36 * len(names) for names in rows))
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=[1.2 + len(n) for n in rows])
        for ax, (name, events), names in zip(panels[:, 0], runs.items(), rows, strict=True):
            _panel(ax, name, events, names, span, scale)
        panels[-1, 0].set_xlabel(f"time since the start ({unit})")
        panels[-1, 0].set_xlim(0, span * scale)
        shown = {kind for events in runs.values() for kind, *_ in events}
        patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items() if kind in shown]
        figure.legend(handles=patches, loc="outside lower right", ncols=len(patches))
    return figure


def _checked(name: str, events: Sequence[Event]) -> list[Event]:
    """Give the events with times from the start of the first."""
    events = list(events)
    if not events:
        raise ValueError(f"the timeline {name!r} holds no event")
    for event in events:
        if not isinstance(event, tuple | list) or len(event) != 4:
            raise ValueError(f"an event is (kind, worker, begin, end), not {event!r}")
        kind, _, begin, end = event
        if kind not in KINDS:
            raise ValueError(f"unknown kind of event {kind!r}: choose from {', '.join(KINDS)}")
        if not begin <= end:
            raise ValueError(f"{kind!r} ends before it begins: {begin} to {end}. Were two clocks used?")
    start = min(begin for *_, begin, _ in events)
    return [(kind, int(worker), float(begin) - start, float(end) - start) for kind, worker, begin, end in events]


def _rows(events: list[Event]) -> list[tuple[str, int]]:
    """The rows of a panel, from the top: one a loading process, then copies, then the network's."""
    workers = sorted({worker for kind, worker, *_ in events if kind == "loading"})
    copies = [("copy", -1)] if any(kind == "copy" for kind, *_ in events) else []
    return [*(("loading", worker) for worker in workers), *copies, ("step", -1)]


def _panel(ax: Axes, name: str, events: list[Event], rows: list[tuple[str, int]], span: float, scale: float) -> None:
    for kind, worker, begin, end in events:
        row = rows.index(("loading", worker) if kind == "loading" else ("copy" if kind == "copy" else "step", -1))
        if begin > span:
            continue
        # A thin white edge parts neighbours; it would hide what is narrower than itself.
        width = (min(end, span) - begin) * scale
        edge = "white" if width > 0.004 * span * scale and kind != "waiting" else "none"
        ax.barh(row, width, left=begin * scale, height=0.78, color=KINDS[kind], edgecolor=edge, linewidth=0.8)
    ax.set_yticks(range(len(rows)), [_label(*row) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_title(f"{name}: {_summary(events)}")


def _label(kind: str, worker: int) -> str:
    if kind != "loading":
        return "network" if kind == "step" else "copy"
    return f"worker {worker}" if worker >= 0 else "loader"


def _summary(events: list[Event]) -> str:
    total = max(end for *_, end in events)
    steps = sum(kind == "step" for kind, *_ in events)
    waiting = sum(end - begin for kind, _, begin, end in events if kind == "waiting")
    words = f"{steps} steps in {human_seconds(total)}"
    if any(kind == "waiting" for kind, *_ in events):
        words += f", {100 * waiting / (total or 1):.0f} % of it waiting for batches"
    return words
