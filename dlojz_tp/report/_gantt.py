"""What each rank of a pipeline does when: a row a rank, a box an action, what is white is the bubble."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from ._style import COLOURS, Chart, style

KINDS = {
    "F": ("forward", COLOURS["forward"]),
    "B": ("backward", COLOURS["backward"]),
    "I": ("input backward", COLOURS["communication"]),
    "W": ("weight backward", COLOURS["loading"]),
}
Event = tuple[int, str, int, int, float, float]


def gantt(
    runs: Mapping[str, Sequence[Event]],
    n_ranks: int | None = None,
    *,
    unit: str = "s",
    share_time: bool = True,
) -> Chart:
    """Show the actions of a pipeline's ranks over time, one panel a run; each panel's title says its bubble.

    Args:
        runs: name to events `(rank, kind, micro_batch, stage, begin, end)`, as `planner.PipelineEvent`. kind: "F", "B",
            "I" or "W". A rank's second and third stages are drawn lighter. Each run begins at its first event.
        n_ranks: rows to draw; ``None``: as many as the events name.
        unit: of begin and end; "s" is shown as ms where that reads better. Simulations may have another, such as
            "forwards".
        share_time: whether all panels have the same axis of time, so that lengths can be compared.

    Returns:
        A figure.

    Raises:
        ValueError: without events, for an unknown kind or rank, or an event that ends before it begins.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise ValueError("no pipeline to show: give {name: events}")
    runs = {name: _checked(name, events) for name, events in runs.items()}
    rows = n_ranks or 1 + max(event[0] for events in runs.values() for event in events)
    if any(event[0] >= rows for events in runs.values() for event in events):
        raise ValueError(f"an event names a rank outside 0 to {rows - 1}")
    spans = {name: max(event[5] for event in events) or 1e-9 for name, events in runs.items()}
    longest = max(spans.values())
    milliseconds = unit == "s" and longest < 2
    scale, unit = (1000.0, "ms") if milliseconds else (1.0, unit)
    with style():
        figure = Chart(height=0.8 + len(runs) * (0.6 + 0.27 * rows))
        panels = figure.subplots(len(runs), 1, sharex=share_time, squeeze=False)[:, 0]
        for ax, (name, events) in zip(panels, runs.items(), strict=True):
            _panel(ax, name, events, rows, scale, longest if share_time else spans[name])
        panels[-1].set_xlabel(f"time since the start ({unit})")
        shown = {event[1] for events in runs.values() for event in events}
        patches = [Patch(color=colour, label=label) for kind, (label, colour) in KINDS.items() if kind in shown]
        figure.legend(handles=patches, loc="outside lower right", ncols=len(patches))
    return figure


def _checked(name: str, events: Sequence[Event]) -> list[Event]:
    """Give the events with times from the start of the first."""
    events = [tuple(event) for event in events]
    if not events:
        raise ValueError(f"the run {name!r} holds no event")
    for event in events:
        if len(event) != 6:
            raise ValueError(f"an event is (rank, kind, micro_batch, stage, begin, end), not {event!r}")
        rank, kind, _, _, begin, end = event
        if kind not in KINDS:
            raise ValueError(f"unknown kind of action {kind!r}: choose from {', '.join(KINDS)}")
        if rank < 0 or not begin <= end:
            raise ValueError(f"an event with a negative rank, or that ends before it begins: {event!r}")
    start = min(event[4] for event in events)
    return [(*event[:4], float(event[4] - start), float(event[5] - start)) for event in events]


def _panel(ax: Axes, name: str, events: list[Event], rows: int, scale: float, span: float) -> None:
    stages = {rank: sorted({event[3] for event in events if event[0] == rank}) for rank in range(rows)}
    for rank, kind, micro_batch, stage, begin, end in events:
        chunk = stages[rank].index(stage)
        colour = _lighter(KINDS[kind][1], 0.35 * min(chunk, 2))
        width = (end - begin) * scale
        # A thin white edge parts neighbours; it would hide what is narrower than itself.
        edge = "white" if end - begin > 0.004 * span else "none"
        ax.barh(rank, width, left=begin * scale, height=0.84, color=colour, edgecolor=edge, linewidth=0.8)
        text = str(micro_batch)
        if end - begin > 0.011 * span * len(text):  # about the width of the text
            middle = (begin + (end - begin) / 2) * scale
            ink = "white" if chunk == 0 else "black"
            ax.text(middle, rank, text, ha="center", va="center", color=ink, fontsize=8, clip_on=True)
    ax.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)])
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_xlim(0, span * scale)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    total = max(event[5] for event in events) or 1e-9
    idle = 1 - sum(event[5] - event[4] for event in events) / (total * rows)
    ax.set_title(f"{name}: bubble {100 * idle:.0f} %")


def _lighter(colour: str, amount: float) -> tuple[float, ...]:
    return tuple(part + (1 - part) * amount for part in to_rgb(colour))
