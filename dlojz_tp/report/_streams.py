"""What a modelled card does when: the CPU, the streams, the bus and the messages, one above the other."""

from collections.abc import Sequence

from matplotlib.patches import Patch

from ._style import COLOURS, GREY, Chart, style

ROWS = {"CPU": "step", "compute": "forward", "stream": "optimizer", "copy": "copy", "NCCL": "communication"}
WAITS = "waiting"


def streams(runs: Sequence, seconds: float | None = None) -> Chart:
    """Show runs of `modelled_gpu`, one panel each, or the last `seconds` of them. Each title says that it is modelled.

    Raises ValueError without runs, or for one that does not say on which card it was modelled.
    """
    runs = list(runs)
    if not runs or not all(run.label.startswith("modelled, ") and run.spans for run in runs):
        raise ValueError("streams shows what modelled_gpu gives: runs with a label and spans")
    whole = seconds is None
    seconds = seconds or max(span.end for run in runs for span in run.spans)
    scale, unit = (1.0, "s") if seconds >= 2 else (1000.0, "ms")
    with style():
        figure = Chart(height=1.0 + 1.9 * len(runs))
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for ax, run in zip(panels, runs, strict=True):
            end = seconds if whole else max(span.end for span in run.spans)
            spans = [span for span in run.spans if span.end > end - seconds]
            rows = [row for row in ROWS if any(span.row == row for span in spans)]
            for row, name in enumerate(rows):
                for waits, colour in ((True, "#DDDDDD"), (False, COLOURS.get(ROWS[name], GREY))):
                    bars = [(span.begin, span.end) for span in spans
                            if span.row == name and span.name.startswith(WAITS) == waits]  # fmt: skip
                    bars = [((b - end + seconds) * scale, (e - b) * scale) for b, e in _joined(bars, seconds / 1000)]
                    ax.broken_barh(bars, (row - 0.39, 0.78), facecolors=colour)
            ax.set_yticks(range(len(rows)), rows)
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.set_xlim(0, seconds * scale)
            ax.tick_params(axis="y", length=0)
            ax.grid(visible=False, axis="y")
            ax.set_title(f"{run.label}: {run.name}")
        panels[-1].set_xlabel(f"modelled time ({unit})")
        figure.legend(handles=[Patch(color="#DDDDDD", label="waiting")], loc="outside lower right")
    return figure


def _joined(bars, gap):
    """Bars that nearly touch, as one: nobody could tell them apart."""
    joined: list[list[float]] = []
    for begin, end in bars:
        if joined and begin - joined[-1][1] < gap:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined
